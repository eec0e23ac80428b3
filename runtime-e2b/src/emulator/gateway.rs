//! The other end of a box's network: every connection of its programs ends here, is judged by the box's rules, and goes
//! on from this machine if they allow it.
//!
//! A refused connection is accepted and closed, as the provider's are; refused datagrams vanish.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ipstack::{IpStack, IpStackConfig, IpStackStream, IpStackUdpStream};
use runtime_core::egress::HelloReader;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::runtime::Handle;

use super::interface::{MTU, WayOut};
use super::rules::{RESOLVER, Rules, is_always_denied};

/// How long a flow of datagrams is remembered.
const FLOW: Duration = Duration::from_secs(60);

/// How long a connection may take to be made, and a program to say whom it wants to talk to.
const PATIENCE: Duration = Duration::from_secs(10);

/// Most bytes that are looked through for a name.
const MAX_HEAD: usize = 64 << 10;

const DNS: u16 = 53;

/// Names with addresses of their own, for tests.
pub(super) type Names = Arc<RwLock<BTreeMap<String, Ipv4Addr>>>;

/// What the gateways of all boxes share.
#[derive(Debug, Clone)]
pub(super) struct Outside {
    /// An executor whose threads are in the network of this machine.
    handle: Handle,
    names: Names,
    /// Who is asked where a box asks its resolver.
    resolver: Option<IpAddr>,
}

impl Outside {
    /// That of this thread, on its executor.
    pub(super) fn here(names: Names) -> Self {
        Self {
            handle: Handle::current(),
            names,
            resolver: resolver(),
        }
    }
}

/// The rules of a box, which may be replaced while it runs.
pub(super) type CurrentRules = Arc<RwLock<Rules>>;

#[derive(Clone)]
struct Gateway {
    outside: Outside,
    rules: CurrentRules,
}

/// Serves the network of a box until its executor ends. On that executor.
pub(super) fn serve(way_out: WayOut, outside: Outside, rules: CurrentRules) -> io::Result<()> {
    let gateway = Gateway { outside, rules };
    let mut config = IpStackConfig::default();
    config.mtu_unchecked(MTU).udp_timeout(FLOW);
    tokio::spawn(datagrams(IpStack::new(config, way_out.interface), gateway.clone()));
    let listener = TcpListener::from_std(way_out.connections)?;
    tokio::spawn(connections(listener, gateway));
    Ok(())
}

async fn connections(listener: TcpListener, gateway: Gateway) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(gateway.clone().connection(stream))),
            // Out of descriptors, most likely: some will be closed.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn datagrams(mut stack: IpStack, gateway: Gateway) {
    while let Ok(stream) = stack.accept().await {
        // ICMP and the rest lead nowhere.
        if let IpStackStream::Udp(stream) = stream {
            tokio::spawn(gateway.clone().flow(stream));
        }
    }
}

impl Gateway {
    fn rules(&self) -> Rules {
        self.rules.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn connection(self, mut stream: TcpStream) {
        let Ok(wanted) = rustix::net::sockopt::ip_original_dst(&stream) else {
            return;
        };
        let judged = tokio::time::timeout(PATIENCE, self.judge(wanted, &mut stream)).await;
        let Ok(Ok((head, Some(way)))) = judged else { return };
        if let Ok(mut out) = self.dial(way.into()).await
            && out.write_all(&head).await.is_ok()
        {
            let _ = copy_bidirectional(&mut stream, &mut out).await;
        }
    }

    /// Where a connection to `wanted` goes, if anywhere, and what was read from it to find out.
    async fn judge(&self, wanted: SocketAddrV4, stream: &mut TcpStream) -> io::Result<(Vec<u8>, Option<SocketAddrV4>)> {
        let rules = self.rules();
        let mut head = Vec::new();
        if is_always_denied(*wanted.ip()) {
            return Ok((head, None));
        }
        if rules.knows_names() && matches!(wanted.port(), 80 | 443) {
            let name = match wanted.port() {
                80 => host_of(stream, &mut head).await?,
                _ => server_name_of(stream, &mut head).await?,
            };
            if let Some(name) = name.filter(|name| rules.allows_name(name)) {
                // Whatever address the program has used.
                let found = self.resolve(&name, wanted.port()).await;
                let found = found.filter(|found| !is_always_denied(*found));
                return Ok((head, found.map(|found| SocketAddrV4::new(found, wanted.port()))));
            }
        }
        let is_allowed = rules.allows_address(IpAddr::V4(*wanted.ip()));
        Ok((head, is_allowed.then_some(wanted)))
    }

    async fn resolve(&self, name: &str, port: u16) -> Option<Ipv4Addr> {
        let own = self
            .outside
            .names
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .copied();
        if own.is_some() {
            return own;
        }
        let name = name.to_owned();
        let found = self.outside.handle.spawn(async move {
            let mut found = tokio::net::lookup_host((name, port)).await.ok()?;
            found.find_map(|found| match found.ip() {
                IpAddr::V4(address) => Some(address),
                IpAddr::V6(_) => None,
            })
        });
        found.await.ok()?
    }

    /// A connection from this machine: made by a thread that is in its network.
    async fn dial(&self, way: SocketAddr) -> io::Result<TcpStream> {
        let dialled = self
            .outside
            .handle
            .spawn(async move { tokio::time::timeout(PATIENCE, TcpStream::connect(way)).await });
        let stream = dialled.await.map_err(io::Error::other)??;
        stream.inspect(|stream| drop(stream.set_nodelay(true)))
    }

    /// Datagrams between a port of the box and one elsewhere.
    async fn flow(self, mut stream: IpStackUdpStream) {
        let wanted = stream.peer_addr();
        if !self.rules().allows_address(wanted.ip()) {
            return;
        }
        let way = match wanted.ip() == IpAddr::V4(RESOLVER) && wanted.port() == DNS {
            true => self.outside.resolver.map_or(wanted, |own| (own, DNS).into()),
            false => wanted,
        };
        let made = self.outside.handle.spawn(async move {
            let any: SocketAddr = match way {
                SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
                SocketAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
            };
            let socket = UdpSocket::bind(any).await?;
            socket.connect(way).await?;
            Ok::<_, io::Error>(socket)
        });
        let Ok(Ok(socket)) = made.await else { return };
        let (mut out, mut back) = (vec![0; usize::from(MTU)], vec![0; 64 << 10]);
        loop {
            tokio::select! {
                read = stream.read(&mut out) => match read {
                    Ok(count) if count > 0 => drop(socket.send(&out[..count]).await),
                    _ => return,
                },
                received = socket.recv(&mut back) => match received {
                    Ok(count) if stream.write_all(&back[..count]).await.is_ok() => {}
                    Ok(_) => return,
                    // Nobody listens there: silence, as elsewhere.
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                },
            }
        }
    }
}

/// The first resolver of this machine. Boxes are told of another one, which need not be reachable from here.
fn resolver() -> Option<IpAddr> {
    let text = std::fs::read_to_string("/etc/resolv.conf").ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("nameserver")?.trim().parse().ok())
}

/// Reads on until `found` says what it found, or that there is nothing to find.
async fn read_until<T>(
    stream: &mut TcpStream,
    head: &mut Vec<u8>,
    mut found: impl FnMut(&[u8]) -> Option<Option<T>>,
) -> io::Result<Option<T>> {
    let mut chunk = [0; 4096];
    loop {
        let count = stream.read(&mut chunk).await?;
        if count == 0 {
            return Ok(None);
        }
        head.extend_from_slice(&chunk[..count]);
        if let Some(found) = found(&chunk[..count]) {
            return Ok(found);
        }
        if head.len() > MAX_HEAD {
            return Ok(None);
        }
    }
}

/// The name in the first message of TLS.
async fn server_name_of(stream: &mut TcpStream, head: &mut Vec<u8>) -> io::Result<Option<String>> {
    let mut reader = HelloReader::new();
    let name = |chunk: &[u8]| match reader.push(chunk) {
        Ok(None) => None,
        Ok(Some(hello)) => Some(hello.server_name().map(str::to_owned)),
        Err(_) => Some(None),
    };
    read_until(stream, head, name).await
}

/// The name in `Host`.
async fn host_of(stream: &mut TcpStream, head: &mut Vec<u8>) -> io::Result<Option<String>> {
    let mut seen = Vec::new();
    let name = |chunk: &[u8]| {
        seen.extend_from_slice(chunk);
        let end = seen.windows(4).position(|window| window == b"\r\n\r\n")?;
        Some(host(&seen[..end]))
    };
    read_until(stream, head, name).await
}

/// The host that a request names.
fn host(head: &[u8]) -> Option<String> {
    let head = String::from_utf8_lossy(head);
    let line = head.lines().skip(1).find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("host")
            .then(|| value.trim().to_ascii_lowercase())
    })?;
    let host = line.rsplit_once(':').map_or(line.as_str(), |(host, _)| host);
    Some(host.trim_end_matches('.').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_a_request_is_a_name() {
        assert_eq!(
            host(b"GET / HTTP/1.1\r\nA: b\r\nhOST: Name.Example.:80"),
            Some("name.example".into())
        );
        assert_eq!(
            host(b"GET / HTTP/1.1\r\nHost: name.example"),
            Some("name.example".into())
        );
        assert_eq!(host(b"GET / HTTP/1.1\r\nX: host"), None);
        assert_eq!(host(b"Host: in.the.first.line"), None);
    }
}
