//! Ports of a box: requests passed on to what listens there.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};
use tokio::net::TcpStream;

use super::server::{Answer, json};

/// A TCP connection as hyper wants it.
pub(super) struct Io {
    stream: TcpStream,
    scratch: Vec<u8>,
}

impl Io {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            scratch: Vec::new(),
        }
    }
}

impl Read for Io {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, mut buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        // Without unsafe code the cursor's own memory cannot be read into.
        let this = &mut *self;
        let mut scratch = std::mem::take(&mut this.scratch);
        scratch.resize(buf.remaining().min(64 << 10), 0);
        let mut read = ReadBuf::new(&mut scratch);
        let polled = Pin::new(&mut this.stream).poll_read(cx, &mut read);
        let count = read.filled().len();
        if polled.is_ready() {
            buf.put_slice(&scratch[..count]);
            this.scratch = scratch;
        }
        polled
    }
}

impl Write for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)))
    }
}

/// Passes a request on to a port of this machine, as boxes have no network of their own.
pub(super) async fn pass(id: &str, port: u16, mut request: Request<Incoming>, path: &str) -> Answer {
    let closed = || {
        let body = serde_json::json!({
            "sandboxId": id, "message": "The sandbox is running but port is not open", "port": port, "code": 502
        });
        json(StatusCode::BAD_GATEWAY, &body)
    };
    let Ok(stream) = TcpStream::connect(("127.0.0.1", port)).await else {
        return closed();
    };
    let Ok((mut sender, connection)) = hyper::client::conn::http1::handshake(Io::new(stream)).await else {
        return closed();
    };
    tokio::spawn(connection);
    let Ok(uri) = path.parse() else { return closed() };
    *request.uri_mut() = uri;
    match sender.send_request(request).await {
        Ok(response) => response.map(|body| body.map_err(io::Error::other).boxed_unsync()),
        Err(_) => closed(),
    }
}
