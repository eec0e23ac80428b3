//! [`Listen`]: where connections from a box come from. A listener of this host, one whose descriptor a guest has
//! passed, or one that a guest serves over its link.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

/// How long a connection over a link may take to hand the rest of its bytes to the box after its end.
const LINGER: Duration = Duration::from_secs(5);

/// A listener for [`EgressProxy::serve`](super::EgressProxy::serve) and the relays.
pub trait Listen: Send + 'static {
    /// Where it listens, as those see it who connect.
    ///
    /// # Errors
    /// What the system says of a listener that has no address.
    fn address(&self) -> io::Result<SocketAddr>;

    /// The next connection. Cancel safe: a dropped future loses none.
    ///
    /// # Errors
    /// What kept one connection from being accepted; the next call may succeed unless [`is_closed`](Self::is_closed).
    fn next(&mut self) -> impl Future<Output = io::Result<Accepted>> + Send;

    /// Whether no connection can come any more.
    fn is_closed(&self) -> bool {
        false
    }
}

impl Listen for TcpListener {
    fn address(&self) -> io::Result<SocketAddr> {
        self.local_addr()
    }

    async fn next(&mut self) -> io::Result<Accepted> {
        self.accept().await.map(|(stream, _)| Accepted::from(stream))
    }
}

#[cfg(all(feature = "guest", target_os = "linux"))]
impl Listen for crate::guest::Listener {
    fn address(&self) -> io::Result<SocketAddr> {
        Ok(self.local_addr())
    }

    async fn next(&mut self) -> io::Result<Accepted> {
        match self.accept().await {
            // Accepted by this process, so that nobody in the box has a duplicate.
            Ok((connection, _)) => Ok(match connection.into_socket() {
                Ok(socket) => Accepted::from(socket),
                Err(connection) => Accepted::over_link(connection),
            }),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn is_closed(&self) -> bool {
        self.has_ended()
    }
}

/// A connection that is carried by something else than a socket of this host.
pub trait Carried: AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static {
    /// Ready once everything that was written has arrived at the other end, or cannot any more. Asked after the
    /// writing side was shut down, by which dropping the connection must not lose what is still on its way.
    fn poll_delivered(&mut self, context: &mut Context<'_>) -> Poll<()>;
}

/// A connection from inside the box.
pub struct Accepted(pub(super) Inner);

pub(super) enum Inner {
    Socket(TcpStream),
    Carried(Link),
}

impl From<TcpStream> for Accepted {
    fn from(stream: TcpStream) -> Self {
        Self(Inner::Socket(stream))
    }
}

impl Accepted {
    /// A connection that is carried over a link. Dropping it without shutting it down resets it.
    pub fn over_link(connection: impl Carried) -> Self {
        Self(Inner::Carried(Link {
            connection: Some(Box::new(connection)),
            ended: false,
        }))
    }

    /// Makes dropping it tell the other side that something went wrong.
    pub(super) fn reset(&mut self) {
        match &mut self.0 {
            Inner::Socket(stream) => super::pump::reset(stream),
            Inner::Carried(link) => link.ended = false,
        }
    }

    pub(super) fn set_up(&self) {
        if let Inner::Socket(stream) = &self.0 {
            super::dial::set_up(stream);
        }
    }
}

impl std::fmt::Debug for Accepted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Accepted")
    }
}

impl AsyncRead for Accepted {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            Inner::Socket(stream) => Pin::new(stream).poll_read(context, out),
            Inner::Carried(link) => Pin::new(link.connection()?).poll_read(context, out),
        }
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            Inner::Socket(stream) => Pin::new(stream).poll_write(context, bytes),
            Inner::Carried(link) => Pin::new(link.connection()?).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            Inner::Socket(stream) => Pin::new(stream).poll_write_vectored(context, slices),
            Inner::Carried(link) => {
                let first = slices.iter().find(|slice| !slice.is_empty());
                let first: &[u8] = first.map_or(&[], |slice| slice);
                Pin::new(link.connection()?).poll_write(context, first)
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        matches!(self.0, Inner::Socket(_))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            Inner::Socket(stream) => Pin::new(stream).poll_flush(context),
            Inner::Carried(link) => Pin::new(link.connection()?).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            Inner::Socket(stream) => Pin::new(stream).poll_shutdown(context),
            Inner::Carried(link) => {
                let result = ready!(Pin::new(link.connection()?).poll_shutdown(context));
                link.ended = result.is_ok();
                Poll::Ready(result)
            }
        }
    }
}

/// A connection that is carried. One that was shut down is kept until its bytes have arrived.
pub(super) struct Link {
    /// `None` only while it is being dropped.
    connection: Option<Box<dyn Carried>>,
    ended: bool,
}

impl Link {
    fn connection(&mut self) -> io::Result<&mut Box<dyn Carried>> {
        self.connection.as_mut().ok_or(io::ErrorKind::NotConnected.into())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take().filter(|_| self.ended) else {
            return;
        };
        let Ok(executor) = tokio::runtime::Handle::try_current() else {
            return;
        };
        executor.spawn(async move {
            let delivered = std::future::poll_fn(|context| {
                // What still comes is thrown away: unread, it would hold up the end.
                let mut scratch = [0; 4096];
                let mut buffer = ReadBuf::new(&mut scratch);
                while let Poll::Ready(Ok(())) = Pin::new(&mut connection).poll_read(context, &mut buffer) {
                    if buffer.filled().is_empty() {
                        break;
                    }
                    buffer.clear();
                }
                connection.poll_delivered(context)
            });
            let _ = tokio::time::timeout(LINGER, delivered).await;
        });
    }
}
