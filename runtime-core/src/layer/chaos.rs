//! Faults on request, for tests of what stands on a runtime.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf, Take};

use crate::error::{Error, Result};
use crate::files::ByteStream;
use crate::layer::{Around, Layer, Operation, Wrapped};
use crate::process::{Process, ProcessStderr, ProcessStdout};
use crate::runtime::Runtime;

/// What goes wrong with an operation.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Fault {
    /// It fails with this error and is not done.
    Fail(Error),
    /// It is done, but its answer is lost: the caller gets this error.
    LoseAnswer(Error),
    /// It is done after this long.
    Delay(Duration),
    /// It never comes back, and is not done.
    Hang,
    /// The box dies behind everybody's back before it is done.
    KillBox,
}

/// Puts the faults of a [`ChaosHandle`] around a runtime.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use runtime_core::layer::{ChaosLayer, Fault, Operation};
/// use runtime_core::{Error, ErrorKind, Sandbox, subprocess::SubprocessConfig};
///
/// let chaos = ChaosLayer::new();
/// let sandbox =
///     Sandbox::builder(SubprocessConfig::default()).layer(chaos.clone()).provision().await?;
/// chaos.handle().next(Operation::Delete, Fault::Fail(Error::new(ErrorKind::Unavailable, "503")));
/// // The first attempt to delete fails; the box goes all the same.
/// sandbox.stop().await?;
/// # Ok::<(), runtime_core::Error>(()) }).unwrap();
/// ```
#[derive(Debug, Clone, Default)]
pub struct ChaosLayer {
    handle: ChaosHandle,
}

impl ChaosLayer {
    /// A layer without faults; its [`handle`](Self::handle) adds them.
    pub fn new() -> Self {
        Self::default()
    }

    /// What adds faults, at any time.
    pub fn handle(&self) -> &ChaosHandle {
        &self.handle
    }
}

impl Layer for ChaosLayer {
    fn wrap(&self, inner: Arc<dyn Runtime>) -> Arc<dyn Runtime> {
        let around = Chaos {
            inner: inner.clone(),
            handle: self.handle.clone(),
        };
        Arc::new(Wrapped { inner, around })
    }
}

/// Schedules faults and counts operations. Clones share their schedule.
#[derive(Debug, Clone, Default)]
pub struct ChaosHandle(Arc<Mutex<Schedule>>);

#[derive(Debug, Default)]
struct Schedule {
    /// By operation: the call (from 0) at which each fault strikes.
    faults: HashMap<Operation, HashMap<u64, Fault>>,
    calls: HashMap<Operation, u64>,
    cut_streams: Option<u64>,
}

impl ChaosHandle {
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Strikes the next call of `operation` that has no fault yet.
    pub fn next(&self, operation: Operation, fault: Fault) {
        let mut schedule = self.schedule();
        let mut call = schedule.calls.get(&operation).copied().unwrap_or(0);
        let faults = schedule.faults.entry(operation).or_default();
        while faults.contains_key(&call) {
            call += 1;
        }
        faults.insert(call, fault);
    }

    /// Strikes the call of `operation` that comes after `calls` more.
    pub fn after(&self, operation: Operation, calls: u64, fault: Fault) {
        let mut schedule = self.schedule();
        let call = schedule.calls.get(&operation).copied().unwrap_or(0) + calls;
        schedule.faults.entry(operation).or_default().insert(call, fault);
    }

    /// Breaks every stream that is opened from now on (files, trees, stdout, stderr) after this many bytes; `None`
    /// stops that.
    pub fn cut_streams(&self, after_bytes: Option<u64>) {
        self.schedule().cut_streams = after_bytes;
    }

    /// How often `operation` was called.
    pub fn calls(&self, operation: Operation) -> u64 {
        self.schedule().calls.get(&operation).copied().unwrap_or(0)
    }

    fn strike(&self, operation: Operation) -> Option<Fault> {
        let mut schedule = self.schedule();
        let calls = schedule.calls.entry(operation).or_default();
        let call = *calls;
        *calls += 1;
        schedule.faults.get_mut(&operation)?.remove(&call)
    }
}

struct Chaos {
    inner: Arc<dyn Runtime>,
    handle: ChaosHandle,
}

impl Around for Chaos {
    async fn call<T: Send, F, Fut>(&self, operation: Operation, mut attempt: F) -> Result<T>
    where
        F: FnMut() -> Fut + Send,
        Fut: Future<Output = Result<T>> + Send,
    {
        match self.handle.strike(operation) {
            None => attempt().await,
            Some(Fault::Fail(error)) => Err(error),
            Some(Fault::LoseAnswer(error)) => {
                let _ = attempt().await;
                Err(error)
            }
            Some(Fault::Delay(delay)) => {
                tokio::time::sleep(delay).await;
                attempt().await
            }
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::KillBox) => {
                let _ = self.inner.delete().await;
                attempt().await
            }
        }
    }

    fn process(&self, mut process: Process) -> Process {
        let Some(after) = self.handle.schedule().cut_streams else {
            return process;
        };
        process.stdout = process
            .stdout
            .take()
            .map(|stdout| ProcessStdout::new(Cut::new(stdout, after)));
        process.stderr = process
            .stderr
            .take()
            .map(|stderr| ProcessStderr::new(Cut::new(stderr, after)));
        process
    }

    fn stream(&self, stream: ByteStream) -> ByteStream {
        match self.handle.schedule().cut_streams {
            Some(after) => ByteStream::new(Cut::new(stream, after)),
            None => stream,
        }
    }
}

/// A reader that breaks after some bytes.
struct Cut<R>(Take<R>);

impl<R: AsyncRead + Unpin> Cut<R> {
    fn new(inner: R, after: u64) -> Self {
        Self(inner.take(after))
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Cut<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        if self.0.limit() == 0 {
            let error = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "the stream was cut on request");
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}
