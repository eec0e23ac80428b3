//! A live process, in the shape of [`tokio::process::Child`].

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::command::ExitStatus;
use crate::error::Result;

/// A signal by number, as Linux numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signal(i32);

impl Signal {
    /// Hang up.
    pub const HUP: Self = Self(1);
    /// Interrupt, as Ctrl-C sends it.
    pub const INT: Self = Self(2);
    /// Quit.
    pub const QUIT: Self = Self(3);
    /// Kill; cannot be caught.
    pub const KILL: Self = Self(9);
    /// First user-defined signal.
    pub const USR1: Self = Self(10);
    /// Second user-defined signal.
    pub const USR2: Self = Self(12);
    /// Ask to terminate.
    pub const TERM: Self = Self(15);
    /// Continue if stopped.
    pub const CONT: Self = Self(18);
    /// Stop; cannot be caught.
    pub const STOP: Self = Self(19);

    /// The signal of this number, if Linux has it (1–64).
    pub fn from_number(number: i32) -> Option<Self> {
        (1..=64).contains(&number).then_some(Self(number))
    }

    /// The number.
    pub fn number(self) -> i32 {
        self.0
    }
}

/// What a provider implements for each process it starts: everything but the streams.
#[async_trait]
pub trait ProcessControl: Send + Sync + 'static {
    /// The process id in the box, where it is known.
    fn pid(&self) -> Option<u32> {
        None
    }

    /// Waits for the end. May be called repeatedly and concurrently; dropping the future disturbs nothing.
    ///
    /// # Errors
    /// When the end cannot be learned (the box is gone, the connection is lost). Never a made-up status.
    async fn wait(&self) -> Result<ExitStatus>;

    /// The status if the process has ended and it is known; does not wait.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    fn try_wait(&self) -> Result<Option<ExitStatus>>;

    /// Sends a signal to the whole process group. Nothing happens when the process has ended.
    ///
    /// # Errors
    /// Only if the process still runs and could not be signalled.
    async fn signal(&self, signal: Signal) -> Result<()>;

    /// Kills the whole group without waiting: called from `Drop`, must not block and must not need the caller's executor.
    /// Where a kill is a request, [`detach`](crate::detach) it.
    fn start_kill(&self);

    /// Called once after the end was seen and the streams were drained: kill what is left of the group and let go of
    /// what the handle holds. The default does nothing.
    async fn finish(&self) {}
}

/// A running program with its stdio.
///
/// `stdin`, `stdout` and `stderr` can be taken out and moved to other tasks. Dropping `stdin` (or shutting it down) is
/// EOF in the box. Back pressure reaches the program: what is not read holds it back and costs bounded memory.
/// **Dropping the `Process` kills its whole process group**; the streams that were taken out then end.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// use runtime_core::{Sandbox, subprocess::SubprocessConfig};
///
/// let sandbox = Sandbox::builder(SubprocessConfig::default()).provision().await?;
/// let mut cat = sandbox.spawn(["cat"]).await?;
/// let mut stdin = cat.stdin.take().expect("not taken yet");
/// stdin.write_all(b"ping").await.expect("cat reads");
/// drop(stdin);
/// let mut echoed = Vec::new();
/// cat.stdout.take().expect("not taken yet").read_to_end(&mut echoed).await.expect("cat writes");
/// assert_eq!(echoed, b"ping");
/// assert!(cat.wait().await?.success());
/// sandbox.stop().await?;
/// # Ok::<(), runtime_core::Error>(()) }).unwrap();
/// ```
pub struct Process {
    /// Standard input; `None` once taken.
    pub stdin: Option<ProcessStdin>,
    /// Standard output; `None` once taken.
    pub stdout: Option<ProcessStdout>,
    /// Standard error; `None` once taken.
    pub stderr: Option<ProcessStderr>,
    control: Arc<dyn ProcessControl>,
    kill_on_drop: bool,
    attached: Vec<Box<dyn Send + Sync>>,
}

impl Process {
    /// Puts a process together from its parts; for providers.
    pub fn new(
        stdin: Option<ProcessStdin>,
        stdout: Option<ProcessStdout>,
        stderr: Option<ProcessStderr>,
        control: Arc<dyn ProcessControl>,
    ) -> Self {
        Self {
            stdin,
            stdout,
            stderr,
            control,
            kill_on_drop: true,
            attached: Vec::new(),
        }
    }

    /// Keeps `value` until the process handle is dropped: a permit, a span, a borrow of the box.
    pub fn attach(&mut self, value: impl Send + Sync + 'static) {
        self.attached.push(Box::new(value));
    }

    /// Replaces the control, for layers that wrap it.
    #[must_use]
    pub fn map_control(mut self, wrap: impl FnOnce(Arc<dyn ProcessControl>) -> Arc<dyn ProcessControl>) -> Self {
        self.control = wrap(self.control.clone());
        self
    }

    /// The process id in the box, where it is known.
    pub fn id(&self) -> Option<u32> {
        self.control.pid()
    }

    /// Closes stdin if it was not taken, then waits for the end. Cancel safe, and may be called again.
    ///
    /// Output that was not taken is not read: a program that fills its pipe waits for a reader.
    ///
    /// # Errors
    /// When the end cannot be learned, such as [`SandboxGone`](crate::ErrorKind::SandboxGone).
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        self.stdin.take();
        self.control.wait().await
    }

    /// A handle that can wait and signal from other tasks. It does not keep the process alive.
    pub fn handle(&self) -> ProcessHandle {
        ProcessHandle {
            control: self.control.clone(),
        }
    }

    /// The status if the process has ended.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.control.try_wait()
    }

    /// Sends a signal to the whole process group; nothing happens when the process has ended.
    ///
    /// # Errors
    /// Only if the process still runs and could not be signalled.
    pub async fn signal(&self, signal: Signal) -> Result<()> {
        self.control.signal(signal).await
    }

    /// Asks the whole process group to end: SIGTERM.
    ///
    /// # Errors
    /// As [`signal`](Self::signal).
    pub async fn terminate(&self) -> Result<()> {
        self.control.signal(Signal::TERM).await
    }

    /// Kills the whole process group and waits for its leader's end.
    ///
    /// # Errors
    /// As [`signal`](Self::signal) and [`wait`](Self::wait).
    pub async fn kill(&mut self) -> Result<ExitStatus> {
        self.control.signal(Signal::KILL).await?;
        self.control.wait().await
    }

    /// The control, for the collector and for layers.
    pub(crate) fn control(&self) -> &Arc<dyn ProcessControl> {
        &self.control
    }

    /// The end was seen and `finish` was called: dropping must not kill again.
    pub(crate) fn finished(&mut self) {
        self.kill_on_drop = false;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.kill_on_drop {
            self.control.start_kill();
        }
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process")
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}

/// Waits for and signals a [`Process`] from another task. Does not keep it alive.
#[derive(Clone)]
pub struct ProcessHandle {
    control: Arc<dyn ProcessControl>,
}

impl ProcessHandle {
    /// As [`Process::wait`], without closing stdin.
    ///
    /// # Errors
    /// As [`Process::wait`].
    pub async fn wait(&self) -> Result<ExitStatus> {
        self.control.wait().await
    }

    /// As [`Process::signal`].
    ///
    /// # Errors
    /// As [`Process::signal`].
    pub async fn signal(&self, signal: Signal) -> Result<()> {
        self.control.signal(signal).await
    }
}

impl fmt::Debug for ProcessHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessHandle")
            .field("id", &self.control.pid())
            .finish()
    }
}

macro_rules! reader {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub struct $name(Pin<Box<dyn AsyncRead + Send>>);

        impl $name {
            /// Wraps what the provider reads from.
            pub fn new(inner: impl AsyncRead + Send + 'static) -> Self {
                Self(Box::pin(inner))
            }
        }

        impl AsyncRead for $name {
            fn poll_read(
                mut self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                buf: &mut ReadBuf<'_>,
            ) -> Poll<std::io::Result<()>> {
                self.0.as_mut().poll_read(cx, buf)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    };
}

reader! {
    /// Standard output of a live process. Ends when the program and everything that inherited the pipe has closed it.
    ProcessStdout
}

reader! {
    /// Standard error of a live process. Independent of standard output, as far as
    /// [`Capabilities::independent_streams`](crate::Capabilities::independent_streams) says.
    ProcessStderr
}

/// Standard input of a live process. Dropping it, or shutting it down, is EOF in the box.
pub struct ProcessStdin(Option<Pin<Box<dyn AsyncWrite + Send>>>);

impl ProcessStdin {
    /// Wraps what the provider writes to. It is dropped when it was shut down.
    pub fn new(inner: impl AsyncWrite + Send + 'static) -> Self {
        Self(Some(Box::pin(inner)))
    }
}

/// What a write after the shutdown gives.
fn shut_down<T>() -> Poll<std::io::Result<T>> {
    Poll::Ready(Err(std::io::ErrorKind::BrokenPipe.into()))
}

impl AsyncWrite for ProcessStdin {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        match &mut self.0 {
            Some(inner) => inner.as_mut().poll_write(cx, buf),
            None => shut_down(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match &mut self.0 {
            Some(inner) => inner.as_mut().poll_flush(cx),
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let Some(inner) = &mut self.0 else {
            return Poll::Ready(Ok(()));
        };
        let shut = std::task::ready!(inner.as_mut().poll_shutdown(cx));
        // A pipe is closed by dropping it and by nothing else.
        self.0 = None;
        Poll::Ready(shut)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        match &mut self.0 {
            Some(inner) => inner.as_mut().poll_write_vectored(cx, bufs),
            None => shut_down(),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.0.as_ref().is_some_and(|inner| inner.is_write_vectored())
    }
}

impl fmt::Debug for ProcessStdin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProcessStdin")
    }
}
