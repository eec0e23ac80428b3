//! The outside: namespaces of the test's own, and who listens there.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};

use super::Place;
use crate::error::{Error, ErrorKind};
use crate::network::Resolver;

/// The public address of `good.example`.
pub(super) const GOOD: &str = "93.184.215.14";
/// That of `other.example`.
pub(super) const OTHER: &str = "198.41.0.4";
pub(super) const OUTSIDE6: &str = "2606:4700::1111";
/// The framework's service, which is a route.
pub(super) const ROUTE: u16 = 4110;
/// Another service of this host, which is none.
pub(super) const HOST: u16 = 4111;

/// What the proxy's world has besides loopback.
const INSIDE: &[&str] = &[
    GOOD,
    OTHER,
    "10.0.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "64:ff9b::a00:1",
];
/// What the world behind the bridge has.
const BEHIND: &[&str] = &[
    GOOD,
    "8.8.8.8",
    "169.254.169.254",
    "169.254.7.7",
    "10.99.0.1",
    "100.64.0.1",
    OUTSIDE6,
    "fd00:ec2::254",
];

/// Runs a script, and says what it said if it failed.
pub(super) fn shell(script: &str) -> Result<String, String> {
    let output = Command::new("sh").args(["-ec", script]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(format!("{script}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Compiles the probe: static, so that it runs in every image.
pub(super) fn compile(dir: &Path) -> Result<PathBuf, String> {
    let source = dir.join("probe.rs");
    std::fs::write(&source, include_str!("probe.rs")).map_err(|error| error.to_string())?;
    let program = dir.join("probe");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(compiler)
        .args([
            "--edition",
            "2024",
            "-O",
            "-C",
            "target-feature=+crt-static",
            "-C",
            "panic=abort",
            "-C",
            "strip=symbols",
        ])
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .output()
        .map_err(|error| format!("rustc: {error}"))?;
    match output.status.success() {
        true => Ok(program),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// What a receiver has printed so far.
pub(super) type Lines = Arc<Mutex<Vec<String>>>;

/// A receiver: a program that prints what arrives. Ended when dropped.
pub(super) struct Receiver {
    child: Child,
    pub(super) lines: Lines,
}

impl Receiver {
    /// Starts a program and waits until it is ready.
    pub(super) fn start(command: &mut Command) -> Result<Self, String> {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|error| error.to_string())?;
        let output = child.stdout.take().ok_or("no output")?;
        let mut output = BufReader::new(output);
        let mut first = String::new();
        let _ = output.read_line(&mut first);
        if first.trim() != "ready" {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("a receiver did not start: {first}"));
        }
        let lines = Lines::default();
        let kept = lines.clone();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                lock(&kept).push(line);
            }
        });
        Ok(Self { child, lines })
    }

    pub(super) fn lines(&self) -> Vec<String> {
        lock(&self.lines).clone()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A host on the boxes' bridge that is everybody behind the gateway. Removed when dropped.
pub(super) struct Outside {
    name: String,
    namespace: PathBuf,
    link: String,
}

impl Outside {
    /// A namespace with a cable to the bridge, the addresses of the world on it.
    pub(super) fn make(place: &Place, more: &[IpAddr]) -> Result<Self, String> {
        let id = std::process::id();
        let outside = Self {
            name: format!("escape-{id}"),
            namespace: place.namespace.clone(),
            link: format!("esc{}", id % 1_000_000),
        };
        let (host, name, link) = (place.namespace.display(), &outside.name, &outside.link);
        let [a, b, c] = place.subnet;
        let mut script = format!(
            "ip netns add {name}; \
             nsenter --net={host} ip link add {link} type veth peer name o0 netns {name}; \
             nsenter --net={host} ip link set {link} master {bridge} up; \
             nsenter --net={host} sh -c 'echo 0 >/proc/sys/net/ipv6/conf/{bridge}/disable_ipv6'; \
             nsenter --net={host} ip addr add fd77:e5c::1/64 dev {bridge} nodad 2>/dev/null || true; \
             ip -n {name} link set lo up; ip -n {name} link set o0 up; \
             ip -n {name} addr add {a}.{b}.{c}.250/24 dev o0; \
             ip -n {name} addr add fd77:e5c::250/64 dev o0 nodad; ",
            bridge = place.bridge,
        );
        let more = more.iter().map(IpAddr::to_string);
        for address in BEHIND.iter().map(|&address| address.to_owned()).chain(more) {
            script.push_str(&format!(
                "ip -n {name} addr add {} dev lo{}; ",
                bits(&address),
                nodad(&address)
            ));
        }
        shell(&script)?;
        Ok(outside)
    }

    /// A command there.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        let _ = shell(&format!("ip netns del {}", self.name));
        // With its other end it is gone, as a rule.
        let _ = shell(&format!(
            "nsenter --net={} ip link del {} 2>/dev/null",
            self.namespace.display(),
            self.link
        ));
    }
}

fn bits(address: &str) -> String {
    format!("{address}/{}", if address.contains(':') { 128 } else { 32 })
}

fn nodad(address: &str) -> &'static str {
    if address.contains(':') { " nodad" } else { "" }
}

/// What arrived in the proxy's world: where, and what.
pub(super) type Arrivals = Arc<Mutex<Vec<(SocketAddr, Vec<u8>)>>>;

/// Gives this namespace the addresses that the proxy may be led to, and listens on them.
pub(super) async fn inside_world() -> Result<Arrivals, String> {
    let mut script = "ip link set lo up; ".to_owned();
    for address in INSIDE {
        script.push_str(&format!("ip addr add {} dev lo{}; ", bits(address), nodad(address)));
    }
    shell(&script)?;
    let arrivals = Arrivals::default();
    for address in INSIDE {
        for port in [80, 443, 22] {
            listen(
                SocketAddr::new(address.parse().map_err(|_| "an address")?, port),
                &arrivals,
            )
            .await?;
        }
    }
    for port in [ROUTE, HOST] {
        listen(SocketAddr::new([127, 0, 0, 1].into(), port), &arrivals).await?;
    }
    Ok(arrivals)
}

async fn listen(at: SocketAddr, arrivals: &Arrivals) -> Result<(), String> {
    let listener = TcpListener::bind(at).await.map_err(|error| format!("{at}: {error}"))?;
    let arrivals = arrivals.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let arrivals = arrivals.clone();
            tokio::spawn(async move {
                let place = {
                    let mut arrivals = lock(&arrivals);
                    arrivals.push((at, Vec::new()));
                    arrivals.len() - 1
                };
                let mut buffer = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                    let answer: &[u8] = {
                        let mut arrivals = lock(&arrivals);
                        let Some((_, all)) = arrivals.get_mut(place) else {
                            return;
                        };
                        all.extend_from_slice(&buffer[..count]);
                        match all.windows(9).any(|window| window == b"/redirect") {
                            true => {
                                b"HTTP/1.1 302 Found\r\nLocation: http://other.example/\r\nContent-Length: 0\r\n\r\n"
                            }
                            false => b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
                        }
                    };
                    if at.port() != 443 && at.port() != 22 && stream.write_all(answer).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    Ok(())
}

/// An abstract Unix socket of this host.
pub(super) fn listen_abstract(arrivals: &Arrivals) -> Result<(), String> {
    use std::os::linux::net::SocketAddrExt;
    let fail = |error: std::io::Error| error.to_string();
    let address = std::os::unix::net::SocketAddr::from_abstract_name("escape-host").map_err(fail)?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let listener = UnixListener::from_std(listener).map_err(fail)?;
    let arrivals = arrivals.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut all = Vec::new();
            let _ = stream.read_to_end(&mut all).await;
            lock(&arrivals).push((SocketAddr::new([0, 0, 0, 0].into(), 0), all));
        }
    });
    let mut stream = std::os::unix::net::UnixStream::connect_addr(&address).map_err(fail)?;
    stream.write_all(b"escape-own").map_err(fail)
}

/// The names of the proxy's world. `rebind.example` has another address each time.
#[derive(Debug, Default)]
pub(super) struct Names {
    asked: AtomicUsize,
}

#[async_trait]
impl Resolver for Names {
    async fn resolve(&self, name: &str, port: u16) -> crate::Result<Vec<SocketAddr>> {
        let all = HashMap::from([
            ("good.example", vec![GOOD]),
            ("other.example", vec![OTHER]),
            ("notgood.example", vec![OTHER]),
            ("ten.example", vec!["10.0.0.1"]),
            ("loop.example", vec!["127.0.0.1"]),
            ("link.example", vec!["169.254.169.254"]),
            ("cgnat.example", vec!["100.64.0.1"]),
            ("multi.example", vec!["224.0.0.1"]),
            ("mapped.example", vec!["::ffff:10.0.0.1"]),
            ("nat64.example", vec!["64:ff9b::a00:1"]),
            ("mixed.example", vec![GOOD, "10.0.0.1"]),
            ("2130706433", vec!["127.0.0.1"]),
        ]);
        let answer = match name {
            "rebind.example" if self.asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) => vec![GOOD],
            "rebind.example" => vec!["10.0.0.1"],
            name => all.get(name).cloned().unwrap_or_default(),
        };
        let addresses: Vec<SocketAddr> = answer
            .iter()
            .filter_map(|address| Some(SocketAddr::new(address.parse().ok()?, port)))
            .collect();
        match addresses.is_empty() {
            true => Err(Error::new(ErrorKind::NotFound, "no such name in this world")),
            false => Ok(addresses),
        }
    }
}
