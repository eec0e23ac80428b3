//! Connections into the box and listeners inside it.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, ipproto, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::frame::{ACCEPT_WINDOW, Event, Request};
use super::link::Link;
use super::session::{Baggage, Session, system_error};
use super::stdio::{MuxStream, Side};
use crate::error::{Error, Result};

/// A connection that a relayed listener has accepted.
pub(super) struct Incoming {
    pub(super) stream: MuxStream,
    pub(super) peer: SocketAddr,
}

/// A TCP connection whose other end, or whose origin, is in the box.
///
/// Each read and write asks the kernel not to block, whatever the descriptor's own mode is, because the guest may hold
/// a duplicate and change that mode. Shutting down the writing side is EOF at the other end. Dropping it closes it.
pub struct Connection(Inner);

enum Inner {
    Socket(TcpStream),
    Stream(MuxStream),
}

impl Connection {
    /// The socket itself, for one that this process has accepted: nobody else has a duplicate of it.
    #[cfg(feature = "egress")]
    pub(crate) fn into_socket(self) -> std::result::Result<TcpStream, Self> {
        match self.0 {
            Inner::Socket(socket) => Ok(socket),
            stream => Err(Self(stream)),
        }
    }

    fn socket(fd: OwnedFd) -> io::Result<Self> {
        TcpStream::from_std(fd.into()).map(|socket| Self(Inner::Socket(socket)))
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            Inner::Stream(stream) => Pin::new(stream).poll_read(context, buf),
            Inner::Socket(socket) => loop {
                ready!(socket.poll_read_ready(context))?;
                let result = socket.try_io(Interest::READABLE, || {
                    let (count, _) = rustix::net::recv(&*socket, buf.initialize_unfilled(), RecvFlags::DONTWAIT)?;
                    Ok(count)
                });
                match result {
                    Ok(count) => {
                        buf.advance(count);
                        return Poll::Ready(Ok(()));
                    }
                    Err(error) if is_again(&error) => {}
                    Err(error) => return Poll::Ready(Err(error)),
                }
            },
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            Inner::Stream(stream) => Pin::new(stream).poll_write(context, bytes),
            Inner::Socket(socket) => loop {
                ready!(socket.poll_write_ready(context))?;
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                match socket.try_io(Interest::WRITABLE, || Ok(rustix::net::send(&*socket, bytes, flags)?)) {
                    Err(error) if is_again(&error) => {}
                    result => return Poll::Ready(result),
                }
            },
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            Inner::Stream(stream) => Pin::new(stream).poll_shutdown(context),
            Inner::Socket(socket) => Poll::Ready(match rustix::net::shutdown(&*socket, Shutdown::Write) {
                // The other end has closed it already.
                Err(rustix::io::Errno::NOTCONN) => Ok(()),
                result => result.map_err(Into::into),
            }),
        }
    }
}

#[cfg(feature = "egress")]
impl crate::egress::Carried for Connection {
    fn poll_delivered(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match &self.0 {
            Inner::Stream(stream) => stream.poll_closed(context).map(drop),
            Inner::Socket(_) => Poll::Ready(()),
        }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connection")
    }
}

/// A TCP listener inside the box, served by this process.
pub struct Listener {
    address: SocketAddr,
    inner: ListenerInner,
}

enum ListenerInner {
    /// Wrapped as a stream for the readiness that tokio gives for one: accepting is done here, so that the mode of the
    /// descriptor can be set immediately before.
    Socket(TcpStream),
    Relayed {
        session: Arc<Session>,
        id: u32,
        incoming: mpsc::Receiver<Incoming>,
    },
}

impl Listener {
    /// The address in the box, with the port that was chosen there. It is what the guest says; nothing here relies on it.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Whether it takes no connection any more: its link has ended.
    #[cfg(feature = "egress")]
    pub(crate) fn has_ended(&self) -> bool {
        match &self.inner {
            ListenerInner::Relayed { session, .. } => session.check().is_err(),
            ListenerInner::Socket(_) => false,
        }
    }

    /// The next connection from inside the box, with the address that it came from. Cancel safe.
    ///
    /// # Errors
    /// When the link has ended or the socket fails. Connections that fail before they are accepted are skipped.
    pub async fn accept(&mut self) -> Result<(Connection, SocketAddr)> {
        match &mut self.inner {
            ListenerInner::Relayed { session, id, incoming } => {
                let Some(Incoming { stream, peer }) = incoming.recv().await else {
                    return Err(session.failure());
                };
                session.post(*id, &Request::Credit { amount: 1 });
                Ok((Connection(Inner::Stream(stream)), peer))
            }
            ListenerInner::Socket(socket) => {
                let fail = |error: io::Error| Error::io("accept a connection from the box", error);
                loop {
                    socket.readable().await.map_err(fail)?;
                    match socket.try_io(Interest::READABLE, || accept(socket)) {
                        Ok((fd, peer)) => return Ok((Connection::socket(fd).map_err(fail)?, peer)),
                        Err(error) if is_again(&error) || is_passing(&error) => {}
                        Err(error) => return Err(fail(error)),
                    }
                }
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let ListenerInner::Relayed { session, id, .. } = &self.inner {
            session.give_up_listener(*id);
        }
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

fn accept(listener: &TcpStream) -> io::Result<(OwnedFd, SocketAddr)> {
    // The guest may have a duplicate and may have changed the mode, which they share.
    rustix::io::ioctl_fionbio(listener, true)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (fd, peer) = rustix::net::acceptfrom_with(listener, flags)?;
    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
    Ok((fd, peer.ok_or(io::ErrorKind::ConnectionAborted)?))
}

fn is_again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Failures of one connection, not of the listener.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    )
}

/// Checks that a descriptor is a TCP socket that listens, or one that is connected.
fn check_tcp(fd: &OwnedFd, listens: bool) -> Result<(), String> {
    let family = sockopt::socket_domain(fd).map_err(|error| error.to_string())?;
    if family != AddressFamily::INET && family != AddressFamily::INET6 {
        return Err("a socket of another family".to_owned());
    }
    let is_tcp =
        sockopt::socket_type(fd) == Ok(SocketType::STREAM) && sockopt::socket_protocol(fd) == Ok(Some(ipproto::TCP));
    if !is_tcp {
        return Err("not a TCP socket".to_owned());
    }
    if sockopt::socket_acceptconn(fd) != Ok(listens) {
        return Err("a listener instead of a connection, or the other way round".to_owned());
    }
    if !listens && rustix::net::getpeername(fd).is_err() {
        return Err("a socket that is not connected".to_owned());
    }
    rustix::io::ioctl_fionbio(fd.as_fd(), true).map_err(|error| error.to_string())
}

impl Link {
    /// Connects to a TCP address as seen from inside the box. Dropping the future gives the attempt up.
    ///
    /// # Errors
    /// What connecting gives, such as [`Unavailable`](crate::ErrorKind::Unavailable) when nobody listens.
    pub async fn dial(&self, address: SocketAddr) -> Result<Connection> {
        let session = self.session();
        let mut baggage = Baggage::default();
        let mut relay = None;
        if !session.passes {
            let stream = session.stream(Side::Both)?;
            baggage.streams.push(stream.id());
            relay = Some(stream);
        }
        let request = Request::Dial {
            address,
            stream: relay.as_ref().map_or(0, MuxStream::id),
        };
        let answer = session.call(&request, baggage).await?;
        match (answer.event, answer.descriptor, relay) {
            (Event::Connected {}, None, Some(stream)) => Ok(Connection(Inner::Stream(stream))),
            (Event::Connected {}, Some(fd), None) => {
                check_tcp(&fd, false).map_err(|what| session.wrong_descriptor(what))?;
                Connection::socket(fd).map_err(|error| Error::io("use a connection", error))
            }
            (Event::Failed { errno, step }, ..) => {
                Err(system_error(format!("connect to {address} in the box"), errno, step))
            }
            (other, ..) => Err(session.unexpected(&other)),
        }
    }

    /// Listens on a TCP address inside the box; port 0 lets the system there choose. Connections are then accepted
    /// here. Dropping the listener closes it.
    ///
    /// # Errors
    /// What binding gives.
    pub async fn listen(&self, address: SocketAddr) -> Result<Listener> {
        let session = self.session();
        let mut baggage = Baggage::default();
        let mut relay = None;
        if !session.passes {
            // One place is for the connection that `accept` has taken and the guest was told of.
            let (sender, incoming) = mpsc::channel(ACCEPT_WINDOW as usize);
            let id = session.relayed_listener(sender)?;
            baggage.streams.push(id);
            relay = Some(PendingListener {
                session: session.clone(),
                id,
                incoming: Some(incoming),
            });
        }
        let request = Request::Listen {
            address,
            stream: relay.as_ref().map_or(0, |relay| relay.id),
        };
        let answer = session.call(&request, baggage).await?;
        match (answer.event, answer.descriptor, relay) {
            (Event::Listening { address }, None, Some(mut relay)) => Ok(Listener {
                address,
                inner: ListenerInner::Relayed {
                    session: session.clone(),
                    id: relay.id,
                    incoming: relay.incoming.take().ok_or_else(|| session.failure())?,
                },
            }),
            (Event::Listening { address }, Some(fd), None) => {
                check_tcp(&fd, true).map_err(|what| session.wrong_descriptor(what))?;
                let socket = TcpStream::from_std(fd.into()).map_err(|error| Error::io("use a listener", error))?;
                Ok(Listener {
                    address,
                    inner: ListenerInner::Socket(socket),
                })
            }
            (Event::Failed { errno, step }, ..) => {
                Err(system_error(format!("listen on {address} in the box"), errno, step))
            }
            (other, ..) => Err(session.unexpected(&other)),
        }
    }
}

/// A relayed listener that the guest has not confirmed. Dropped before that, it is closed there.
struct PendingListener {
    session: Arc<Session>,
    id: u32,
    incoming: Option<mpsc::Receiver<Incoming>>,
}

impl Drop for PendingListener {
    fn drop(&mut self) {
        if self.incoming.is_some() {
            self.session.give_up_listener(self.id);
        }
    }
}
