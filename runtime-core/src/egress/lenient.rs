//! [`Lenient`]: a connection outward that hears the answer out.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::pump::reset;

/// A connection outward on which a failed write is not an error yet: a server that refuses a request answers, closes,
/// and only then is the rest of the request turned away. What it answered is still there to be read, and the end of that
/// is the error.
pub(super) struct Lenient {
    stream: TcpStream,
    deaf: bool,
}

impl Lenient {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, deaf: false }
    }

    pub(super) fn into_stream(self) -> TcpStream {
        self.stream
    }

    pub(super) fn reset(&self) {
        reset(&self.stream);
    }

    fn hear<T>(&mut self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match result {
            Poll::Ready(Err(_)) => {
                self.deaf = true;
                // Whoever reads is woken by the end of the connection.
                Poll::Pending
            }
            result => result,
        }
    }
}

impl AsyncRead for Lenient {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, out)
    }
}

impl AsyncWrite for Lenient {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.deaf {
            return Poll::Pending;
        }
        let result = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.hear(result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.deaf {
            return Poll::Pending;
        }
        let result = Pin::new(&mut this.stream).poll_write_vectored(context, parts);
        this.hear(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
