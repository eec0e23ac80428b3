//! A network of the test's own: a namespace that has nothing but `lo`, with public and private addresses on it. What a
//! test does cannot leave it, and what arrives at an address is what a real host there would have got.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use runtime_core::egress::{EgressEvent, EgressProxy, Limits, Older};
use runtime_core::network::{EgressPolicy, Policy, Resolver, Routes};
use runtime_core::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;

/// The address of `good.example` and its subdomains.
pub(crate) const GOOD: &str = "93.184.215.14";
/// The address of `other.example`.
pub(crate) const OTHER: &str = "198.41.0.4";
/// Another global one, of IPv6.
pub(crate) const GOOD6: &str = "2606:4700::1111";
/// Addresses that no box may reach in execution.
pub(crate) const FORBIDDEN: [&str; 10] = [
    "127.0.0.1",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "::1",
    "fd00::1",
    "168.63.129.16",
    "198.18.0.1",
];

const NAMESPACE: &str = "EGRESS_TEST_NAMESPACE";

/// Runs `body` in a network namespace: the test starts itself again inside one.
pub(crate) fn run_isolated<F: Future<Output = ()>>(name: &str, body: impl FnOnce() -> F) {
    if std::env::var_os(NAMESPACE).is_some() {
        let add = GOOD_ADDRESSES.iter().chain(&FORBIDDEN);
        let script: String = std::iter::once("ip link set lo up".to_owned())
            .chain(
                add.filter(|address| !matches!(**address, "127.0.0.1" | "::1"))
                    .map(|address| {
                        let (bits, nodad) = if address.contains(':') {
                            (128, " nodad")
                        } else {
                            (32, "")
                        };
                        format!("; ip addr add {address}/{bits} dev lo{nodad}")
                    }),
            )
            .collect();
        let status = Command::new("sh").args(["-ec", &script]).status().unwrap();
        assert!(status.success(), "the namespace has its addresses");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let limit = Duration::from_secs(120);
        runtime.block_on(async {
            tokio::time::timeout(limit, body())
                .await
                .expect("the test ends in time")
        });
        return;
    }
    let name = name.split_once("::").map_or(name, |(_, name)| name);
    let unshare = ["unshare", "-n"];
    let user = ["unshare", "-rn"];
    let works = |command: &[&str; 2]| {
        let mut probe = Command::new(command[0]);
        probe.args([command[1], "true"]).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    };
    let Some(command) = [unshare, user].into_iter().find(works) else {
        eprintln!("SKIPPED {name}: no network namespace can be made here (unshare -n)");
        assert!(std::env::var_os("CI").is_none(), "CI can make network namespaces");
        return;
    };
    let output = Command::new(command[0])
        .arg(command[1])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(NAMESPACE, "1")
        .output()
        .unwrap();
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    print!("{stdout}");
    eprint!("{stderr}");
    assert!(output.status.success(), "{name} failed in its namespace");
    assert!(stdout.contains("1 passed"), "{name} ran in its namespace");
}

const GOOD_ADDRESSES: [&str; 3] = [GOOD, OTHER, GOOD6];

/// Tests, each in a namespace.
macro_rules! isolated {
    ($($(#[$meta:meta])* async fn $name:ident() $body:block)*) => {$(
        $(#[$meta])*
        #[test]
        fn $name() {
            $crate::world::run_isolated(concat!(module_path!(), "::", stringify!($name)), || async $body);
        }
    )*};
}
pub(crate) use isolated;

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Names with answers that the test chose; the last one stays.
#[derive(Debug, Default)]
pub(crate) struct Names {
    answers: Mutex<HashMap<String, Vec<Vec<IpAddr>>>>,
    asked: Mutex<Vec<String>>,
}

impl Names {
    pub(crate) fn set(&self, name: &str, answers: &[&[&str]]) {
        let answers = answers
            .iter()
            .map(|answer| answer.iter().map(|address| ip(address)).collect())
            .collect();
        self.answers.lock().unwrap().insert(name.to_owned(), answers);
    }

    /// What was asked for so far.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

#[async_trait]
impl Resolver for Names {
    async fn resolve(&self, name: &str, port: u16) -> Result<Vec<SocketAddr>> {
        self.asked.lock().unwrap().push(name.to_owned());
        if name == "never.example" {
            std::future::pending::<()>().await;
        }
        let mut answers = self.answers.lock().unwrap();
        let list = answers.get_mut(name);
        let answer = match list {
            Some(list) if list.len() > 1 => list.remove(0),
            Some(list) => list[0].clone(),
            None => return Err(Error::new(ErrorKind::NotFound, "no such name")),
        };
        Ok(answer
            .into_iter()
            .map(|address| SocketAddr::new(address, port))
            .collect())
    }
}

/// A proxy, where it listens, and what it resolves by.
pub(crate) struct World {
    pub(crate) proxy: EgressProxy,
    pub(crate) port: u16,
    pub(crate) names: Arc<Names>,
}

pub(crate) fn policy(allow: &[&str], block: &[&str], routes: &[&str]) -> EgressPolicy {
    let policy = Policy::new(allow.iter().copied(), block.iter().copied()).unwrap();
    EgressPolicy::execution(policy, Routes::new(routes).unwrap())
}

impl World {
    pub(crate) async fn new(policy: EgressPolicy) -> Self {
        Self::with(policy, Limits::default()).await
    }

    pub(crate) async fn with(policy: EgressPolicy, limits: Limits) -> Self {
        let names = Arc::new(Names::default());
        for name in ["good.example", "api.good.example", "third.example"] {
            names.set(name, &[&[GOOD]]);
        }
        names.set("other.example", &[&[OTHER]]);
        let resolver: Arc<dyn Resolver> = Arc::clone(&names) as _;
        let proxy = EgressProxy::builder("box")
            .policy(policy)
            .resolver(resolver)
            .limits(limits)
            .build()
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = proxy.serve(listener).unwrap().port();
        Self { proxy, port, names }
    }

    pub(crate) async fn allow(allow: &[&str]) -> Self {
        Self::new(policy(allow, &[], &[])).await
    }

    pub(crate) async fn switch(&self, policy: EgressPolicy, older: Older) {
        self.proxy.switch(policy, older).await;
    }

    /// `http://verifiers:TOKEN@127.0.0.1:PORT`.
    pub(crate) fn url(&self) -> String {
        let env = self.proxy.address("127.0.0.1", self.port).env();
        env.get("http_proxy").unwrap().to_str().unwrap().to_owned()
    }

    /// A `Proxy-Authorization` line.
    pub(crate) fn auth(&self) -> String {
        auth_of(&self.url())
    }

    pub(crate) async fn connect(&self) -> Raw {
        Raw(TcpStream::connect(("127.0.0.1", self.port)).await.unwrap())
    }

    /// The answer to one request over a connection of its own.
    pub(crate) async fn ask(&self, head: &str) -> Answer {
        let mut raw = self.connect().await;
        raw.send(&self.request(head, "")).await;
        raw.answer().await
    }

    /// A request with credentials: the request line, and fields that end in CR LF.
    pub(crate) fn request(&self, line: &str, fields: &str) -> String {
        format!("{line} HTTP/1.1\r\nHost: whatever\r\n{}{fields}\r\n", self.auth())
    }

    /// The answer to a CONNECT, and the connection behind it.
    pub(crate) async fn tunnel(&self, to: &str) -> (u16, Raw) {
        let mut raw = self.connect().await;
        raw.send(&self.request(&format!("CONNECT {to}"), "")).await;
        let status = raw.head().await.status;
        (status, raw)
    }
}

pub(crate) fn auth_of(url: &str) -> String {
    let credentials = url.strip_prefix("http://").unwrap().split_once('@').unwrap().0;
    format!("Proxy-Authorization: Basic {}\r\n", base64(credentials.as_bytes()))
}

/// The alphabet of RFC 4648 by hand: the tests are a second opinion.
pub(crate) fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let sextet = ALPHABET[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= group.len() { sextet as char } else { '=' });
        }
    }
    text
}

/// An answer as it stands in the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        field(&self.head, name)
    }
}

pub(crate) fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(found, _)| found.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.trim())
}

/// A client that writes what it likes.
pub(crate) struct Raw(pub(crate) TcpStream);

impl Raw {
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write_all(bytes.as_ref()).await.unwrap();
    }

    /// As much as the other side takes.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.0.write_all(bytes.as_ref()).await;
    }

    /// Up to the empty line.
    pub(crate) async fn head(&mut self) -> Answer {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let byte = self.0.read_u8().await;
            let Ok(byte) = byte else {
                panic!("closed after {:?}: {byte:?}", String::from_utf8_lossy(&head));
            };
            head.push(byte);
        }
        let head = String::from_utf8(head).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer {
            status,
            head,
            body: Vec::new(),
        }
    }

    pub(crate) async fn answer(&mut self) -> Answer {
        let mut answer = self.head().await;
        if answer.status == 100 {
            answer = self.head().await;
        }
        if let Some(length) = answer.field("content-length") {
            answer.body = vec![0; length.parse().unwrap()];
            self.0.read_exact(&mut answer.body).await.unwrap();
        } else if answer.field("transfer-encoding") == Some("chunked") {
            loop {
                let size = self.line().await;
                let size = usize::from_str_radix(&size, 16).unwrap();
                let mut chunk = vec![0; size + 2];
                self.0.read_exact(&mut chunk).await.unwrap();
                if size == 0 {
                    break;
                }
                answer.body.extend_from_slice(&chunk[..size]);
            }
        } else if answer.status != 204 && answer.status != 304 {
            let _ = self.0.read_to_end(&mut answer.body).await;
        }
        answer
    }

    async fn line(&mut self) -> String {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(self.0.read_u8().await.unwrap());
        }
        line.truncate(line.len() - 2);
        String::from_utf8(line).unwrap()
    }

    /// Everything up to the end, whether that is orderly or not.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        let _ = self.0.read_to_end(&mut rest).await;
        rest
    }
}

/// The next attempt that the log tells of.
pub(crate) async fn next(log: &mut broadcast::Receiver<Arc<EgressEvent>>) -> Arc<EgressEvent> {
    log.recv().await.unwrap()
}
