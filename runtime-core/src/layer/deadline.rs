//! A deadline for every operation that has none of its own.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::layer::{Around, Layer, Operation, Wrapped};
use crate::runtime::Runtime;

/// Fails an operation with [`Timeout`](ErrorKind::Timeout) when the provider does not answer in time.
///
/// Programs run as long as their own [`timeout`](crate::Command::timeout) says, transfers as long as their size takes,
/// and creation and deletion have deadlines of their own: none of them is touched.
#[derive(Debug, Clone)]
pub struct DeadlineLayer {
    deadline: Duration,
}

impl DeadlineLayer {
    /// The deadline of each operation.
    pub fn new(deadline: Duration) -> Self {
        Self { deadline }
    }
}

impl Layer for DeadlineLayer {
    fn wrap(&self, inner: Arc<dyn Runtime>) -> Arc<dyn Runtime> {
        Arc::new(Wrapped {
            inner,
            around: self.clone(),
        })
    }
}

impl Around for DeadlineLayer {
    async fn call<T: Send, F, Fut>(&self, operation: Operation, mut attempt: F) -> Result<T>
    where
        F: FnMut() -> Fut + Send,
        Fut: Future<Output = Result<T>> + Send,
    {
        match operation {
            Operation::Run
            | Operation::RunProgram
            | Operation::Upload
            | Operation::Write
            | Operation::Create
            | Operation::Delete => attempt().await,
            _ => match tokio::time::timeout(self.deadline, attempt()).await {
                Ok(result) => result,
                Err(_) => Err(Error::new(
                    ErrorKind::Timeout,
                    format!("no answer within {:?}", self.deadline),
                )),
            },
        }
    }
}
