//! [`dial`]: from a destination to a connection, by way of every check.

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::net::{TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;

use super::limits::Limits;
use super::live::{Board, Entered, Way};
use super::log::{Attempt, Verdict};
use crate::network::Resolver;

/// How long an address is tried alone before the next one is tried as well.
const STAGGER: Duration = Duration::from_millis(250);
/// How many addresses of a name are checked and dialled; a name with more is refused by none of them, since nobody
/// looks at the rest.
const MAX_ADDRESSES: usize = 64;

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoWay {
    /// A policy says no.
    Refused(Verdict),
    /// The name has no address, or the resolver failed.
    Unresolved,
    /// The resolver took too long.
    ResolveTimeout,
    /// No address could be connected to.
    Unreachable,
    /// Connecting took too long.
    ConnectTimeout,
    /// The policy changed or the proxy stopped meanwhile.
    Cancelled,
}

impl NoWay {
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Refused(verdict) => verdict.reason,
            Self::Unresolved => "unresolved",
            Self::ResolveTimeout => "resolve_timeout",
            Self::Unreachable => "unreachable",
            Self::ConnectTimeout => "connect_timeout",
            Self::Cancelled => "policy_changed",
        }
    }

    /// Tells the log.
    pub(super) fn tell(self, attempt: &Attempt) {
        match self {
            Self::Refused(verdict) => attempt.refused(verdict),
            failed => attempt.failed(failed.as_str()),
        }
    }
}

/// A connection, its place on the board, and what permitted it.
pub(super) struct Dialled {
    pub(super) stream: TcpStream,
    pub(super) entered: Entered,
    pub(super) verdict: Verdict,
}

/// Resolves the destination of `way`, has every address judged, and connects to one of exactly those addresses. The name
/// is asked for once. Dropping the future closes whatever was being opened.
pub(super) async fn dial(
    board: &Arc<Board>,
    resolver: &dyn Resolver,
    limits: &Limits,
    stop: &CancellationToken,
    mut way: Way,
) -> Result<Dialled, NoWay> {
    // Nothing is asked for a name that is refused by its name: a resolver's question travels, too.
    let by_name = way.judge(&board.in_force().policy);
    if !by_name.permitted {
        return Err(NoWay::Refused(by_name));
    }
    let port = way.destination.port();
    way.addresses = match way.destination.address() {
        Some(address) => vec![address],
        // The framework's own service on this host; a resolver may not know the name.
        None if way.is_route && way.destination.is_loopback() => {
            vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
        }
        None => tokio::select! {
            () = stop.cancelled() => return Err(NoWay::Cancelled),
            found = tokio::time::timeout(limits.resolve, resolver.resolve(way.destination.host(), port)) => match found {
                Err(_) => return Err(NoWay::ResolveTimeout),
                Ok(Err(error)) => {
                    tracing::debug!(%error, "a name was not resolved");
                    return Err(NoWay::Unresolved);
                }
                Ok(Ok(found)) => addresses(&found),
            },
        },
    };
    if way.addresses.is_empty() {
        return Err(NoWay::Unresolved);
    }
    let targets: Vec<_> = way
        .addresses
        .iter()
        .map(|address| SocketAddr::new(*address, port))
        .collect();
    let (entered, verdict) = board.enter(way, stop.child_token()).map_err(NoWay::Refused)?;
    let connecting = tokio::time::timeout(limits.connect, connect_any(&targets, STAGGER));
    tokio::select! {
        () = entered.cancel().cancelled() => Err(NoWay::Cancelled),
        connected = connecting => match connected {
            Err(_) => Err(NoWay::ConnectTimeout),
            Ok(Err(error)) => {
                tracing::debug!(%error, "no address could be connected to");
                Err(NoWay::Unreachable)
            }
            Ok(Ok(stream)) => {
                set_up(&stream);
                Ok(Dialled { stream, entered, verdict })
            }
        },
    }
}

/// Each address once, in order. The port is ours to choose, and a scope is nobody's.
fn addresses(found: &[SocketAddr]) -> Vec<IpAddr> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in found.iter().map(SocketAddr::ip) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
        if addresses.len() == MAX_ADDRESSES {
            break;
        }
    }
    addresses
}

/// No delay for small pieces, and dead peers are found.
pub(super) fn set_up(stream: &TcpStream) {
    // A connection without either still works.
    let _ = stream.set_nodelay(true);
    #[cfg(unix)]
    {
        use rustix::net::sockopt;
        let _ = sockopt::set_socket_keepalive(stream, true);
        #[cfg(target_os = "linux")]
        {
            let _ = sockopt::set_tcp_keepidle(stream, Duration::from_secs(60));
            let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(15));
        }
    }
}

/// The first connection that comes about, tried in order, each a little after the one before it or as soon as that one
/// has failed.
async fn connect_any(targets: &[SocketAddr], stagger: Duration) -> io::Result<TcpStream> {
    let mut left = targets.iter().copied();
    let mut trying: Vec<Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>>> = Vec::new();
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    loop {
        let next = left.next();
        let more = left.len() > 0;
        if let Some(target) = next {
            trying.push(Box::pin(connect(target)));
        } else if trying.is_empty() {
            return Err(last);
        }
        let wait = tokio::time::sleep(stagger);
        tokio::pin!(wait);
        // Ends with a connection, or with the wish to try another address.
        let done = std::future::poll_fn(|context| {
            let mut failed = false;
            let mut index = 0;
            while let Some(attempt) = trying.get_mut(index) {
                match attempt.as_mut().poll(context) {
                    Poll::Ready(Ok(stream)) => return Poll::Ready(Some(stream)),
                    Poll::Ready(Err(error)) => {
                        last = error;
                        failed = true;
                        drop(trying.swap_remove(index));
                    }
                    Poll::Pending => index += 1,
                }
            }
            if failed && (more || trying.is_empty()) || (more && wait.as_mut().poll(context).is_ready()) {
                return Poll::Ready(None);
            }
            Poll::Pending
        })
        .await;
        if let Some(stream) = done {
            return Ok(stream);
        }
    }
}

async fn connect(target: SocketAddr) -> io::Result<TcpStream> {
    let socket = if target.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.connect(target).await
}
