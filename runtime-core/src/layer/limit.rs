//! A bound on how many operations run at once.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::error::{Error, ErrorKind, Result};
use crate::layer::{Around, Layer, Operation, Wrapped};
use crate::process::Process;
use crate::runtime::Runtime;

/// Bounds how many operations run at once, over all boxes that share the layer. A live process counts until its handle
/// is dropped. Deletion is not bounded: it must never wait for what it ends.
#[derive(Debug, Clone)]
pub struct LimitLayer {
    permits: Arc<Semaphore>,
    programs: Arc<Semaphore>,
}

impl LimitLayer {
    /// At most `concurrency` operations (at least 1) at once, and as many live processes.
    pub fn new(concurrency: usize) -> Self {
        let concurrency = concurrency.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            permits: Arc::new(Semaphore::new(concurrency)),
            programs: Arc::new(Semaphore::new(concurrency)),
        }
    }
}

impl Layer for LimitLayer {
    fn wrap(&self, inner: Arc<dyn Runtime>) -> Arc<dyn Runtime> {
        Arc::new(Wrapped {
            inner,
            around: self.clone(),
        })
    }
}

impl Around for LimitLayer {
    async fn call<T: Send, F, Fut>(&self, operation: Operation, mut attempt: F) -> Result<T>
    where
        F: FnMut() -> Fut + Send,
        Fut: Future<Output = Result<T>> + Send,
    {
        let closed = |_| Error::new(ErrorKind::Other, "the limit is closed");
        match operation {
            Operation::Delete => attempt().await,
            Operation::Spawn => {
                let permit = self.programs.clone().acquire_owned().await.map_err(closed)?;
                let result = attempt().await;
                if result.is_ok() {
                    // It goes to the process, below.
                    permit.forget();
                }
                result
            }
            _ => {
                let _permit = self.permits.acquire().await.map_err(closed)?;
                attempt().await
            }
        }
    }

    fn process(&self, mut process: Process) -> Process {
        process.attach(Returned(self.programs.clone()));
        process
    }
}

/// Gives a live process's permit back.
struct Returned(Arc<Semaphore>);

impl Drop for Returned {
    fn drop(&mut self) {
        self.0.add_permits(1);
    }
}
