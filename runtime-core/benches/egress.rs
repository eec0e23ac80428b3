//! The egress proxy against its floors, in one run: a plain reverse proxy made of the same HTTP library, and loopback
//! without anything between. What is compared is measured in turns.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::HeaderValue;
use hyper::service::service_fn;
use hyper::{Request, Response, Uri, client, server};
use hyper_util::rt::TokioIo;
use runtime_core::egress::EgressProxy;
use runtime_core::network::{EgressPolicy, Policy, Resolver, Routes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_millis(700);

fn main() {
    if std::env::args().any(|argument| argument == "--memory") {
        return memory();
    }
    // Servers and clients have threads of their own, as other programs would.
    let others = runtime(2);
    let proxies = runtime(2);
    let upstream = others.block_on(http_server());
    let proxy = proxies.block_on(async {
        let routes = Routes::new([format!("http://{}", upstream.as_route())]).expect("a route");
        let proxy = EgressProxy::builder("bench")
            .policy(EgressPolicy::execution(Policy::framework_only(), routes))
            .resolver(Arc::new(Loopback))
            .build()
            .expect("a proxy");
        let address = proxy.serve(listen().await).expect("served");
        (proxy, address)
    });
    let (proxy, proxy_address) = proxy;
    let plain_address = proxies.block_on(reverse_proxy(upstream));
    let env = proxy.address("127.0.0.1", proxy_address.port()).env();
    let url = env
        .get("http_proxy")
        .and_then(|url| url.to_str())
        .expect("a URL")
        .to_owned();
    let auth = format!(
        "Basic {}",
        base64(
            url["http://".len()..]
                .split('@')
                .next()
                .expect("credentials")
                .as_bytes()
        )
    );

    for clients in [1, 64] {
        let (mut ours, mut plain) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let target: Uri = format!("http://{}/", upstream.as_route()).parse().expect("a URI");
            plain.push(others.block_on(requests(plain_address, "/".parse().expect("a URI"), None, clients)));
            ours.push(others.block_on(requests(proxy_address, target, Some(auth.clone()), clients)));
        }
        report(
            &format!("requests, {clients} connections"),
            "plain reverse proxy",
            &plain,
            &ours,
            0.85,
        );
    }
    for direction in [Direction::Down, Direction::Up] {
        let server = others.block_on(bulk_server());
        let (tunnel, relay) = proxies.block_on(async {
            let routes = Routes::new([format!("http://{}", server.as_route())]).expect("a route");
            let policy = EgressPolicy::execution(Policy::framework_only(), routes.clone());
            proxy.switch(policy, runtime_core::egress::Older::Close).await;
            let route = routes.iter().next().expect("one");
            (
                proxy_address,
                proxy.relay_route(listen().await, route).expect("a relay").address(),
            )
        });
        let (mut direct, mut tunnelled, mut relayed) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            direct.push(others.block_on(bulk(server, None, direction)));
            let connect = format!(
                "CONNECT {} HTTP/1.1\r\nProxy-Authorization: {auth}\r\n\r\n",
                server.as_route()
            );
            tunnelled.push(others.block_on(bulk(tunnel, Some(connect), direction)));
            relayed.push(others.block_on(bulk(relay, None, direction)));
        }
        report(
            &format!("CONNECT {direction:?}, MB"),
            "direct",
            &direct,
            &tunnelled,
            0.7,
        );
        report(&format!("relay {direction:?}, MB"), "direct", &direct, &relayed, 0.7);
    }
    let memory = std::env::current_exe().map(|exe| std::process::Command::new(exe).arg("--memory").status());
    assert!(memory.is_ok_and(|status| status.is_ok_and(|status| status.success())));
}

/// 500 boxes' proxies, each with a listener, a relay and a policy of ten rules, in a process of their own.
fn memory() {
    let before = resident();
    let runtime = runtime(2);
    let rules: Vec<String> = (0..10).map(|number| format!("https://host{number}.example")).collect();
    let kept = runtime.block_on(async {
        let resolver: Arc<dyn Resolver> = Arc::new(Loopback);
        let mut kept = Vec::new();
        for number in 0..500 {
            let routes = Routes::new(["http://127.0.0.1:9000"]).expect("a route");
            let policy = Policy::new(rules.iter().map(String::as_str), []).expect("a policy");
            let proxy = EgressProxy::builder(format!("box-{number}"))
                .policy(EgressPolicy::execution(policy, routes.clone()))
                .resolver(Arc::clone(&resolver))
                .build()
                .expect("a proxy");
            proxy.serve(listen().await).expect("served");
            let route = routes.iter().next().expect("one");
            let relay = proxy.relay_route(listen().await, route).expect("a relay");
            kept.push((proxy, relay));
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        kept
    });
    let after = resident();
    println!(
        "{:<42} {:.1} MiB resident in all, {:.1} MiB of it theirs (at most 40)",
        format!("{} idle proxies with a relay each", kept.len()),
        after,
        after - before
    );
}

fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: f64 = line
        .and_then(|line| line.trim().split(' ').next())
        .and_then(|kib| kib.parse().ok())
        .unwrap_or(f64::NAN);
    kib / 1024.0
}

fn runtime(threads: usize) -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .expect("a runtime")
}

async fn listen() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.expect("a port")
}

/// Routes on loopback need a name.
trait AsRoute {
    fn as_route(&self) -> String;
}

impl AsRoute for SocketAddr {
    fn as_route(&self) -> String {
        format!("upstream.internal:{}", self.port())
    }
}

#[derive(Debug)]
struct Loopback;

#[async_trait::async_trait]
impl Resolver for Loopback {
    async fn resolve(&self, _: &str, port: u16) -> runtime_core::Result<Vec<SocketAddr>> {
        Ok(vec![SocketAddr::from(([127, 0, 0, 1], port))])
    }
}

async fn http_server() -> SocketAddr {
    let listener = listen().await;
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            tokio::spawn(async move {
                let service = service_fn(|_: Request<Incoming>| async {
                    Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"ok"))))
                });
                let _ = server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    address
}

/// What anybody would write: a connection outward for each connection inward, kept; no checks, no deadlines, no log.
async fn reverse_proxy(upstream: SocketAddr) -> SocketAddr {
    type Sender = client::conn::http1::SendRequest<Incoming>;
    let listener = listen().await;
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            tokio::spawn(async move {
                let kept: Arc<Mutex<Option<Sender>>> = Arc::default();
                let service = service_fn(move |mut request: Request<Incoming>| {
                    let kept = Arc::clone(&kept);
                    async move {
                        let sender = kept.lock().expect("not poisoned").take();
                        let mut sender = match sender {
                            Some(sender) => sender,
                            None => {
                                let stream = TcpStream::connect(upstream).await.expect("connected");
                                let _ = stream.set_nodelay(true);
                                let (sender, connection) = client::conn::http1::handshake(TokioIo::new(stream))
                                    .await
                                    .expect("HTTP");
                                tokio::spawn(connection);
                                sender
                            }
                        };
                        let host = HeaderValue::try_from(upstream.to_string()).expect("a value");
                        request.headers_mut().insert("host", host);
                        sender.ready().await.expect("ready");
                        let response = sender.send_request(request).await;
                        *kept.lock().expect("not poisoned") = Some(sender);
                        response
                    }
                });
                let _ = server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    address
}

/// Requests per second over so many connections.
async fn requests(to: SocketAddr, target: Uri, auth: Option<String>, clients: usize) -> Rate {
    let measure = Measure::start();
    let start = measure.start;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..clients {
        let (target, auth) = (target.clone(), auth.clone());
        tasks.spawn(async move {
            let stream = TcpStream::connect(to).await.expect("connected");
            let _ = stream.set_nodelay(true);
            let (mut sender, connection) = client::conn::http1::handshake(TokioIo::new(stream))
                .await
                .expect("HTTP");
            tokio::spawn(connection);
            let mut count = 0u32;
            while start.elapsed() < ROUND {
                let mut request = Request::get(target.clone()).header("host", "upstream.internal");
                if let Some(auth) = &auth {
                    request = request.header("proxy-authorization", auth);
                }
                let request = request.body(Empty::<Bytes>::new()).expect("a request");
                sender.ready().await.expect("ready");
                let response = sender.send_request(request).await.expect("an answer");
                assert_eq!(response.status(), 200);
                let body = response.into_body().collect().await.expect("a body").to_bytes();
                assert_eq!(body.len(), 2);
                count += 1;
            }
            count
        });
    }
    let total: u32 = tasks.join_all().await.into_iter().sum();
    measure.rate(f64::from(total))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Down,
    Up,
}

/// Takes a byte that says which direction, and then sends or receives.
async fn bulk_server() -> SocketAddr {
    let listener = listen().await;
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = vec![0; 256 << 10];
                match stream.read_u8().await {
                    Ok(b'd') => while stream.write_all(&buffer).await.is_ok() {},
                    _ => while matches!(stream.read(&mut buffer).await, Ok(1..)) {},
                }
            });
        }
    });
    address
}

/// Megabytes per second through one connection.
async fn bulk(to: SocketAddr, connect: Option<String>, direction: Direction) -> Rate {
    let mut stream = TcpStream::connect(to).await.expect("connected");
    if let Some(connect) = connect {
        stream.write_all(connect.as_bytes()).await.expect("written");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("an answer"));
        }
        assert!(head.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&head));
    }
    let mut buffer = vec![0; 256 << 10];
    stream
        .write_all(if direction == Direction::Down { b"d" } else { b"u" })
        .await
        .expect("written");
    let measure = Measure::start();
    let mut total = 0;
    while measure.start.elapsed() < ROUND {
        total += match direction {
            Direction::Down => stream.read(&mut buffer).await.expect("read"),
            Direction::Up => stream.write(&buffer).await.expect("written"),
        };
    }
    measure.rate(total as f64 / 1e6)
}

/// How much per second, and how much per second of processor time of clients, servers and proxy together. On a machine
/// whose processors are busy with other things too, only the latter means something.
#[derive(Debug, Clone, Copy)]
struct Rate {
    time: f64,
    processor: f64,
}

struct Measure {
    start: Instant,
    processor: f64,
}

impl Measure {
    fn start() -> Self {
        Self {
            start: Instant::now(),
            processor: processor_seconds(),
        }
    }

    fn rate(&self, amount: f64) -> Rate {
        Rate {
            time: amount / self.start.elapsed().as_secs_f64(),
            processor: amount / (processor_seconds() - self.processor),
        }
    }
}

/// Of all threads of this process.
fn processor_seconds() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").expect("Linux");
    let nanoseconds = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

fn report(what: &str, floor_name: &str, floor: &[Rate], ours: &[Rate], wanted: f64) {
    for (kind, of) in [
        ("per second", (|rate: &Rate| rate.time) as fn(&Rate) -> f64),
        ("per CPU second", |rate| rate.processor),
    ] {
        let median = |rates: &[Rate]| {
            let mut values: Vec<f64> = rates.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let (floor, ours) = (median(floor), median(ours));
        println!(
            "{what:<28} {kind:<15} {ours:>9.0}   {floor_name} {floor:>9.0}   {:>3.0} % (wanted {:.0} %)",
            100.0 * ours / floor,
            100.0 * wanted
        );
    }
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let sextet = ALPHABET[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= group.len() { char::from(sextet) } else { '=' });
        }
    }
    text
}
