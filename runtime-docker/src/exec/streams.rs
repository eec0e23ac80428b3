//! The standard streams of a program that runs through the Engine API's exec.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bollard::container::LogOutput;
use bytes::Bytes;
use tokio::io::{AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::sync::watch;
use tokio::time::sleep;

/// How long the reader of a killed program's output may take before the rest is thrown away. Podman's monitor tells of
/// an end only once it is rid of the output.
const KILLED_OUTPUT_GRACE: Duration = Duration::from_millis(500);

/// Where the two streams go. One that nobody reads any more is thrown away.
pub(super) struct Sinks {
    pub(super) out: Option<DuplexStream>,
    pub(super) err: Option<DuplexStream>,
    /// Told of a kill, where output that nobody reads would keep its end from being known.
    pub(super) killed: Option<watch::Receiver<bool>>,
}

impl Sinks {
    pub(super) async fn write(&mut self, chunk: LogOutput) {
        let (sink, bytes): (_, Bytes) = match chunk {
            LogOutput::StdErr { message } => (&mut self.err, message),
            LogOutput::StdOut { message } | LogOutput::Console { message } => (&mut self.out, message),
            LogOutput::StdIn { .. } => return,
        };
        let Some(writer) = sink else { return };
        let killed = self.killed.as_mut();
        let abandoned = async {
            if let Some(killed) = killed
                && killed.wait_for(|killed| *killed).await.is_ok()
            {
                sleep(KILLED_OUTPUT_GRACE).await;
            } else {
                std::future::pending().await
            }
        };
        let is_taken = tokio::select! {
            biased;
            written = writer.write_all(&bytes) => written.is_ok(),
            () = abandoned => false,
        };
        if !is_taken {
            *sink = None;
        }
    }
}

/// Standard input. Dropping one half of a connection does not end that half, so this does.
pub(super) struct EofOnDrop<W: AsyncWrite + Unpin + Send + 'static>(pub(super) Option<W>);

impl<W: AsyncWrite + Unpin + Send + 'static> EofOnDrop<W> {
    fn inner(&mut self) -> std::io::Result<Pin<&mut W>> {
        self.0
            .as_mut()
            .map(Pin::new)
            .ok_or_else(|| std::io::ErrorKind::BrokenPipe.into())
    }
}

impl<W: AsyncWrite + Unpin + Send + 'static> AsyncWrite for EofOnDrop<W> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        self.inner()?.poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.inner()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.inner()?.poll_shutdown(cx)
    }
}

impl<W: AsyncWrite + Unpin + Send + 'static> Drop for EofOnDrop<W> {
    fn drop(&mut self) {
        let Some(mut writer) = self.0.take() else { return };
        let mut cx = Context::from_waker(std::task::Waker::noop());
        // At once on a socket; over TLS there is something to be sent first.
        if Pin::new(&mut writer).poll_shutdown(&mut cx).is_pending()
            && let Ok(executor) = tokio::runtime::Handle::try_current()
        {
            executor.spawn(async move { writer.shutdown().await });
        }
    }
}
