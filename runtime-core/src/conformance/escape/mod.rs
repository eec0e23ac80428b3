//! The escape suite: everything that a program in a closed box may try to get out, against receivers in network
//! namespaces that the suite makes. What counts is what *arrived*.
//!
//! A provider says how its boxes are made and which bridge they are on ([`Lan`]) and calls [`main`] in a test target
//! with `harness = false`. The suite starts itself again in a network namespace of its own, so that what the proxy dials
//! stays in it, and gives the boxes a default route to a host of its own on the bridge, which has every address that an
//! attempt is about: no packet of an attempt can leave the machine. It needs root, iproute2, `nsenter` and `unshare`,
//! and `rustc`, by which it compiles the program that makes the attempts.
//!
//! Each attempt is shown to work before the cut, where it can, and must fail after it; from the cut on no frame at all
//! may come from the box.

mod attempts;
mod proxied;
mod world;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command as HostCommand, ExitCode};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use crate::cache::CacheDir;
use crate::command::Command;
use crate::config::RuntimeConfig;
use crate::files::WriteOptions;
use crate::network::Routes;
use crate::sandbox::Sandbox;

use attempts::{Attempt, Before, DIRECT, Evidence, PROXIED, Way};
use proxied::{Ask, Request};
use world::{Arrivals, GOOD, HOST, OUTSIDE6, Outside, ROUTE, Receiver};

/// Where boxes are in setup.
#[derive(Debug, Clone)]
pub struct Place {
    /// The network namespace of the bridge, as a file.
    pub namespace: PathBuf,
    /// The bridge's interface. Its address is `a.b.c.1`.
    pub bridge: String,
    /// The first three bytes of the subnet, whose addresses from `a.b.c.200` on are nobody's.
    pub subnet: [u8; 3],
}

/// How a provider's boxes are made for the suite.
#[async_trait]
pub trait Lan: Send + Sync {
    /// For the report, such as `docker over socket`.
    fn name(&self) -> &str;

    /// A small box with `sh`, `awk` and `ip` whose execution phase may reach this; `["*"]` is no policy. On the network
    /// of [`place`](Self::place), if there is one.
    fn config(&self, allow: &[&str]) -> Box<dyn RuntimeConfig>;

    /// Where boxes keep their files.
    fn cache(&self) -> CacheDir;

    /// Where boxes are in setup. `None`: they have no network then either, and nothing direct is shown to work before.
    fn place(&self) -> Option<Place>;

    /// A process of the box, as this host numbers it.
    ///
    /// # Errors
    /// What kept it from being found.
    async fn process(&self, sandbox: &Sandbox) -> Result<u32, String>;
}

/// Set in the process that runs in a namespace of its own: the host's namespace.
const INNER: &str = "ESCAPE_SUITE_HOST";

/// The network namespace of the host that the suite was started in.
pub fn host_namespace() -> PathBuf {
    std::env::var_os(INNER).map_or_else(|| "/proc/self/ns/net".into(), PathBuf::from)
}

/// The attempts as a table in Markdown.
pub fn table() -> String {
    let mut table =
        "| # | name | attempt | before the cut | stopped by |\n| --- | --- | --- | --- | --- |\n".to_owned();
    for (index, attempt) in all().enumerate() {
        let before = match attempt.before {
            Before::Box => "works",
            Before::Open => "works in a box without a policy, where that has raw sockets",
            Before::Nowhere => "–",
        };
        let (name, tries, stopped) = (attempt.name, attempt.tries, attempt.stopped_by);
        let _ = writeln!(table, "| {} | `{name}` | {tries} | {before} | {stopped} |", index + 1);
    }
    table
}

fn all() -> impl Iterator<Item = Attempt> {
    DIRECT.iter().chain(PROXIED).copied()
}

/// Runs the suite and prints a line for each attempt, as libtest does.
pub fn main(lan: impl FnOnce() -> Result<Box<dyn Lan>, String>) -> ExitCode {
    if std::env::args().any(|argument| argument == "--list") {
        for attempt in all() {
            println!("escape/{}: test", attempt.name);
        }
        return ExitCode::SUCCESS;
    }
    if std::env::var_os(INNER).is_none() {
        let host = format!("/proc/{}/ns/net", std::process::id());
        let Ok(program) = std::env::current_exe() else {
            return ExitCode::FAILURE;
        };
        // A child: this process stays where it is, and its namespace can be named.
        let status = HostCommand::new("unshare")
            .arg("--net")
            .arg0("unshare")
            .arg(program)
            .args(std::env::args_os().skip(1))
            .env(INNER, host)
            .status();
        return match status {
            Ok(status) if status.success() => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("unshare: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let executor = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let result = executor.map_err(|error| error.to_string()).and_then(|executor| {
        let lan = lan()?;
        let limit = Duration::from_secs(600);
        executor.block_on(async {
            match tokio::time::timeout(limit, run(&*lan)).await {
                Ok(result) => result,
                Err(_) => Err("the suite takes too long".to_owned()),
            }
        })
    });
    let verdicts = match result {
        Ok(verdicts) => verdicts,
        Err(error) => {
            println!("the escape suite could not run: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut failed = 0;
    for (name, verdict) in &verdicts {
        match verdict {
            Ok(()) => println!("test escape/{name} ... ok"),
            Err(why) => {
                failed += 1;
                println!("test escape/{name} ... FAILED: {why}");
            }
        }
    }
    let (word, passed) = (if failed == 0 { "ok" } else { "FAILED" }, verdicts.len() - failed);
    println!("\ntest result: {word}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

type Verdicts = Vec<(String, Result<(), String>)>;

const PROBE: &str = "/escape/probe";
const HOLD_TOKEN: &str = "/escape/token";

/// A box of the suite.
struct Inmate {
    sandbox: Sandbox,
    index: u8,
    device: String,
    address: String,
    hardware: String,
    interface: String,
    credentials: String,
    proxy_port: String,
}

impl Inmate {
    async fn start(lan: &dyn Lan, allow: &[&str], probe: &Path, index: u8) -> Result<Self, String> {
        let builder = Sandbox::builder(lan.config(allow)).cache(lan.cache());
        let sandbox = builder.provision().await.map_err(text)?;
        let content = std::fs::read(probe).map_err(text)?;
        sandbox.create_dir("/escape").await.map_err(text)?;
        sandbox
            .write_with(PROBE, content, WriteOptions::mode(0o755))
            .await
            .map_err(text)?;
        // The proxy's variables, which servers have from the first on.
        let script = "echo $http_proxy >/escape/proxy.new; mv /escape/proxy.new /escape/proxy; sleep 1";
        sandbox
            .run_background(["sh", "-c", script], "/escape/proxy.log")
            .await
            .map_err(text)?;
        let proxy = loop {
            match sandbox.read("/escape/proxy").await {
                Ok(bytes) => break String::from_utf8_lossy(&bytes).trim().to_owned(),
                Err(error) if error.kind() == crate::ErrorKind::NotFound => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => return Err(text(error)),
            }
        };
        let proxy = proxy.strip_prefix("http://").unwrap_or_default().to_owned();
        let (credentials, place) = proxy.rsplit_once('@').unwrap_or_default();
        Ok(Self {
            sandbox,
            index,
            device: String::new(),
            address: String::new(),
            hardware: String::new(),
            interface: "1".to_owned(),
            credentials: credentials.to_owned(),
            proxy_port: place.rsplit(':').next().unwrap_or_default().to_owned(),
        })
    }

    /// Gives the box the outside as its gateway, by its namespace from without.
    async fn lead_out(&mut self, lan: &dyn Lan, place: &Place) -> Result<(), String> {
        let process = lan.process(&self.sandbox).await?;
        let [a, b, c] = place.subnet;
        let index = self.index;
        let script = format!(
            "dev=$(ip -o -4 route show default | sed 's/.* dev \\([^ ]*\\).*/\\1/'); \
             for file in all default $dev; do echo 0 >/proc/sys/net/ipv6/conf/$file/disable_ipv6; done; \
             ip route replace default via {a}.{b}.{c}.250 dev $dev; \
             ip -6 addr add fd77:e5c::{index}/64 dev $dev nodad; \
             ip -6 route replace default via fd77:e5c::250 dev $dev; \
             echo $dev; ip -o -4 addr show dev $dev | sed 's/.*inet \\([0-9.]*\\).*/\\1/'; \
             ip -o link show dev $dev | sed 's/.*link.ether \\([0-9a-f:]*\\).*/\\1/'; \
             ip -o link show dev $dev | sed 's/:.*//'"
        );
        let entered = format!(
            "nsenter --net=/proc/{process}/ns/net sh -ec '{}'",
            script.replace('\'', "'\\''")
        );
        let told = world::shell(&entered)?;
        let mut lines = told.lines().map(str::to_owned);
        let mut next = || lines.next().ok_or_else(|| format!("no device: {told}"));
        (self.device, self.address, self.hardware, self.interface) = (next()?, next()?, next()?, next()?);
        Ok(())
    }

    /// Whether a command of the box succeeds.
    async fn succeeds(&self, argv: Vec<String>, input: Vec<u8>) -> Result<bool, String> {
        let command = Command::new(argv).stdin(input).timeout(Duration::from_secs(60));
        Ok(self.sandbox.run(command).await.map_err(text)?.success())
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

struct Suite<'a> {
    lan: &'a dyn Lan,
    place: Option<Place>,
    subject: Inmate,
    open: Inmate,
    other: Inmate,
    resolver: String,
    arrivals: Arrivals,
    receivers: Vec<Receiver>,
    /// Among them the one that sees every frame of the box.
    sniffer: Option<usize>,
    _outside: Option<Outside>,
}

async fn run(lan: &dyn Lan) -> Result<Verdicts, String> {
    crate::box_network::set_resolver(Arc::new(world::Names::default())).map_err(text)?;
    let directory = tempfile::tempdir().map_err(text)?;
    let probe = world::compile(directory.path())?;
    let arrivals = world::inside_world().await?;
    world::listen_abstract(&arrivals)?;
    let names = [
        "good.example",
        "*.good.example",
        "ten.example",
        "*.ten.example",
        "loop.example",
        "link.example",
        "cgnat.example",
        "multi.example",
        "mapped.example",
        "nat64.example",
        "mixed.example",
        "rebind.example",
    ];
    let (subject, open, other) = tokio::try_join!(
        Inmate::start(lan, &names, &probe, 10),
        Inmate::start(lan, &["*"], &probe, 11),
        Inmate::start(lan, &[], &probe, 12),
    )?;
    let mut suite = Suite {
        lan,
        place: lan.place(),
        subject,
        open,
        other,
        resolver: "127.0.0.11".to_owned(),
        arrivals,
        receivers: Vec::new(),
        sniffer: None,
        _outside: None,
    };
    let verdicts = suite.attempt(&probe).await;
    for inmate in [&suite.subject, &suite.open, &suite.other] {
        inmate.sandbox.stop().await.map_err(text)?;
    }
    verdicts
}

impl Suite<'_> {
    async fn attempt(&mut self, probe: &Path) -> Result<Verdicts, String> {
        self.build(probe).await?;
        let mut verdicts = Verdicts::new();
        let before = match self.place {
            Some(_) => {
                let raw = self.open_has_raw_sockets().await?;
                let works = |attempt: &Attempt| match attempt.before {
                    Before::Box => true,
                    Before::Open => raw,
                    Before::Nowhere => false,
                };
                self.phase('b', &works).await?
            }
            None => {
                self.phase('b', &|attempt| attempt.before == Before::Box && attempt.is_proxied())
                    .await?
            }
        };
        let routes = Routes::new([format!("http://127.0.0.1:{ROUTE}")]).map_err(text)?;
        self.subject.sandbox.prepare_execution(routes).await.map_err(text)?;
        let seen = self.sniffed().len();
        let after = self.phase('a', &|_| true).await?;
        for (index, attempt) in all().enumerate() {
            let shown = match before.get(index).copied().flatten() {
                Some(false) => Err("it does not work before the cut, so its failure says nothing"),
                Some(true) | None => Ok(()),
            };
            let verdict = shown
                .map_err(str::to_owned)
                .and_then(|()| match after.get(index).copied().flatten() {
                    Some(false) => Ok(()),
                    Some(true) => Err("it got out".to_owned()),
                    None => Err("it was not made".to_owned()),
                });
            verdicts.push((attempt.name.to_owned(), verdict));
        }
        let hardware = &self.subject.hardware;
        let frames: Vec<String> = self.sniffed().split_off(seen);
        let own: Vec<&String> = frames
            .iter()
            .filter(|line| line.contains(hardware) && !hardware.is_empty())
            .collect();
        verdicts.push((
            "no-frame-at-all".to_owned(),
            match own.first() {
                None => Ok(()),
                Some(first) => Err(format!("{} frames after the cut, the first: {first}", own.len())),
            },
        ));
        let reached = self.arrived_with("GET /first").is_some() && self.arrived_with("GET /redirect").is_some();
        let foreign = self
            .arrived_with("GET /foreign")
            .is_some_and(|bytes| bytes.contains("good.example\r\n"));
        let allowed = if reached && foreign {
            Ok(())
        } else {
            Err("what is allowed did not arrive".to_owned())
        };
        verdicts.push(("allowed-host-is-reached".to_owned(), allowed));
        Ok(verdicts)
    }

    /// Not every engine gives its boxes `CAP_NET_RAW`.
    async fn open_has_raw_sockets(&self) -> Result<bool, String> {
        let script = "awk '/^CapEff/ {print $2}' /proc/self/status";
        let output = self.open.sandbox.run(Command::shell(script)).await.map_err(text)?;
        let mask = u64::from_str_radix(output.stdout_lossy().trim(), 16).map_err(text)?;
        Ok(mask & (1 << 13) != 0)
    }

    fn sniffed(&self) -> Vec<String> {
        self.sniffer
            .and_then(|at| self.receivers.get(at))
            .map(Receiver::lines)
            .unwrap_or_default()
    }

    /// What arrived with this in it, as text.
    fn arrived_with(&self, what: &str) -> Option<String> {
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let texts = arrivals
            .iter()
            .map(|(_, bytes)| String::from_utf8_lossy(bytes).into_owned());
        texts.into_iter().find(|text| text.contains(what))
    }

    /// The outside, its receivers, and the ways to it.
    async fn build(&mut self, probe: &Path) -> Result<(), String> {
        let Some(place) = self.place.clone() else {
            return Ok(());
        };
        for inmate in [&mut self.subject, &mut self.open, &mut self.other] {
            inmate.lead_out(self.lan, &place).await?;
        }
        let script = "awk '/^nameserver/ {print $2; exit}' /etc/resolv.conf";
        let resolver = self.subject.sandbox.run(Command::shell(script)).await.map_err(text)?;
        self.resolver = resolver.stdout_lossy().trim().to_owned();
        // One that is not in the box is played by the outside.
        let played: Vec<IpAddr> = self
            .resolver
            .parse()
            .ok()
            .into_iter()
            .filter(|ip: &IpAddr| !ip.is_loopback())
            .collect();
        let outside = Outside::make(&place, &played)?;
        let mut watch = outside.command(probe);
        watch.args(["watch", "o0", &self.subject.hardware]);
        self.sniffer = Some(self.receivers.len());
        self.receivers.push(Receiver::start(&mut watch)?);
        let ports = "443,53,80,41230";
        self.receivers
            .push(Receiver::start(outside.command(probe).args(["serve", ports, ports]))?);
        let mut host = HostCommand::new("nsenter");
        host.arg(format!("--net={}", place.namespace.display())).arg(probe);
        self.receivers
            .push(Receiver::start(host.args(["serve", "41230", "41230"]))?);
        self._outside = Some(outside);
        let serve = [PROBE, "serve", "41230", "41230"];
        // Its standard input ends at once, so it is kept by a shell.
        let serve = format!("sleep 100000 | {}", serve.join(" "));
        let open = &self.open.sandbox;
        open.run_background(["sh", "-c", &serve], "/escape/serve.log")
            .await
            .map_err(text)?;
        let held = [PROBE, "hold", &format!("{GOOD}:443"), HOLD_TOKEN];
        let subject = &self.subject.sandbox;
        subject.write(HOLD_TOKEN, "escape-early").await.map_err(text)?;
        subject.run_background(held, "/escape/hold.log").await.map_err(text)?;
        for (sandbox, log, word) in [
            (open, "/escape/serve.log", "ready"),
            (subject, "/escape/hold.log", "held"),
        ] {
            let mut left = 250;
            while !String::from_utf8_lossy(&sandbox.read(log).await.map_err(text)?).contains(word) {
                left -= 1;
                if left == 0 {
                    let said = sandbox.read(log).await.map_err(text)?;
                    return Err(format!("no `{word}` in {log}: {}", String::from_utf8_lossy(&said)));
                }
                tokio::time::sleep(Duration::from_millis(40)).await;
            }
        }
        Ok(())
    }

    /// A place of an attempt's text.
    fn fill(&self, template: &str, inmate: &Inmate, token: &str) -> String {
        let [a, b, c] = self.place.as_ref().map_or([10, 99, 0], |place| place.subnet);
        let peer = if self.open.address.is_empty() {
            "10.99.0.2"
        } else {
            &self.open.address
        };
        // A resolver in the box knows its neighbours; one outside is played, and its question is seen.
        let in_box = self.resolver.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        let id: String = self.open.sandbox.id().unwrap_or_default().chars().take(12).collect();
        template
            .replace("{probe}", PROBE)
            .replace("{index}", &inmate.interface)
            .replace("{token}", token)
            .replace("{outside}", GOOD)
            .replace("{outside6}", OUTSIDE6)
            .replace("{gateway}", &format!("{a}.{b}.{c}.1"))
            .replace("{broadcast}", &format!("{a}.{b}.{c}.255"))
            .replace("{gateway6}", "fd77:e5c::1")
            .replace("{peer-name}", &if in_box { id } else { format!("{token}.example") })
            .replace("{peer}", peer)
            .replace(
                "{dev}",
                if inmate.device.is_empty() {
                    "eth0"
                } else {
                    &inmate.device
                },
            )
            .replace(
                "{own}",
                if inmate.address.is_empty() {
                    "10.99.0.3"
                } else {
                    &inmate.address
                },
            )
            .replace("{resolver}", &self.resolver)
    }

    /// Makes the attempts of a phase, and tells of each whether it got out.
    async fn phase(&self, phase: char, wanted: &dyn Fn(&Attempt) -> bool) -> Result<Vec<Option<bool>>, String> {
        let token = |index: usize| format!("escape-{index}-{phase}");
        if self.place.is_some() {
            // What is held says this phase's token from now on.
            let write = self.subject.sandbox.write(HOLD_TOKEN, format!("escape-held-{phase}"));
            write.await.map_err(text)?;
        }
        let chosen: Vec<(usize, Attempt)> = all().enumerate().filter(|(_, attempt)| wanted(attempt)).collect();
        // What dawdles does so while the others are made.
        let slow = chosen.iter().filter(|(_, attempt)| attempt.is_slow());
        let slow = futures_of(slow.map(|&(index, attempt)| self.make(attempt, token(index))));
        let quick = async {
            let mut results = Vec::new();
            for &(index, attempt) in chosen.iter().filter(|(_, attempt)| !attempt.is_slow()) {
                results.push(self.make(attempt, token(index)).await?);
            }
            Ok::<_, String>(results)
        };
        let (slow, quick) = tokio::join!(slow, quick);
        let (slow, quick) = (slow?, quick?);
        // Datagrams have no end that could be waited for.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let seen = self.tokens().await?;
        let mut outcome = vec![None; all().count()];
        let (mut slow, mut quick) = (slow.into_iter(), quick.into_iter());
        for (index, attempt) in chosen {
            let succeeded = if attempt.is_slow() { slow.next() } else { quick.next() }.unwrap_or(true);
            let arrived = match attempt.way {
                Way::Held(suffix) => seen.contains(&format!("escape-held-{phase}{suffix}")),
                Way::Proxy(request) => self.arrived_at(&token(index), request),
                Way::Probe(_) | Way::Shell(_) => {
                    seen.contains(&token(index)) || self.arrived_with(&token(index)).is_some()
                }
            };
            let got_out = match attempt.evidence {
                Evidence::Arrives => arrived || (attempt.is_slow() && succeeded),
                Evidence::Succeeds => succeeded || arrived,
            };
            if let Some(place) = outcome.get_mut(index) {
                *place = Some(got_out);
            }
        }
        Ok(outcome)
    }

    async fn make(&self, attempt: Attempt, token: String) -> Result<bool, String> {
        let is_before = token.ends_with('b');
        let inmate = if attempt.before == Before::Open && is_before {
            &self.open
        } else {
            &self.subject
        };
        match attempt.way {
            Way::Held(_) => Ok(false),
            Way::Probe(arguments) => {
                let argv = arguments.iter().map(|argument| self.fill(argument, inmate, &token));
                inmate
                    .succeeds(std::iter::once(PROBE.to_owned()).chain(argv).collect(), Vec::new())
                    .await
            }
            Way::Shell(script) => {
                let script = self.fill(script, inmate, &token);
                inmate
                    .succeeds(vec!["sh".to_owned(), "-c".to_owned(), script], Vec::new())
                    .await
            }
            Way::Proxy(request) => {
                let ask = Ask {
                    token: &token,
                    credentials: &inmate.credentials,
                    other: &self.other.credentials,
                };
                let (verb, wait) = if attempt.is_slow() {
                    ("drip", "45000")
                } else {
                    ("talk", "1500")
                };
                let port = match request {
                    Request::Relay => ROUTE.to_string(),
                    _ => inmate.proxy_port.clone(),
                };
                let argv = [PROBE, verb, &port, wait].map(str::to_owned).to_vec();
                inmate.succeeds(argv, ask.bytes(request)).await
            }
        }
    }

    /// Every token that a receiver outside has seen.
    async fn tokens(&self) -> Result<BTreeSet<String>, String> {
        let mut lines: Vec<String> = self.receivers.iter().flat_map(Receiver::lines).collect();
        if self.place.is_some() {
            let log = self.open.sandbox.read("/escape/serve.log").await.map_err(text)?;
            lines.extend(String::from_utf8_lossy(&log).lines().map(str::to_owned));
        }
        let tokens = lines.iter().flat_map(|line| {
            line.match_indices("escape-").map(|(at, _)| {
                let rest = line.get(at..).unwrap_or_default().chars();
                rest.take_while(|char| char.is_ascii_alphanumeric() || *char == '-')
                    .collect::<String>()
            })
        });
        Ok(tokens.collect())
    }

    /// Whether a token came out of the proxy where it should not.
    fn arrived_at(&self, token: &str, request: Request) -> bool {
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.iter().any(|(at, bytes)| {
            let fine = match request {
                Request::Rebind(_) => at.ip().to_string() == GOOD,
                Request::Relay => at.port() == ROUTE,
                _ => false,
            };
            let reached_host = at.port() == HOST;
            let plain = without_records(bytes);
            let has = |bytes: &[u8]| bytes.windows(token.len()).any(|window| window == token.as_bytes());
            // The end of a token may be a digit of another's.
            (!fine && (has(bytes) || has(&plain))) || (reached_host && has(bytes))
        })
    }
}

impl Attempt {
    fn is_slow(&self) -> bool {
        matches!(self.way, Way::Proxy(Request::Drip(_) | Request::DripHello))
    }

    fn is_proxied(&self) -> bool {
        matches!(self.way, Way::Proxy(_))
    }
}

/// All of them at once, the results in order.
async fn futures_of<F: Future<Output = Result<bool, String>>>(
    all: impl Iterator<Item = F>,
) -> Result<Vec<bool>, String> {
    let mut all: Vec<_> = all.map(Box::pin).collect();
    let mut results: Vec<Option<Result<bool, String>>> = all.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        let mut pending = false;
        for (future, result) in all.iter_mut().zip(&mut results) {
            if result.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(done) => *result = Some(done),
                    std::task::Poll::Pending => pending = true,
                }
            }
        }
        if pending {
            std::task::Poll::Pending
        } else {
            std::task::Poll::Ready(())
        }
    })
    .await;
    results.into_iter().map(|result| result.unwrap_or(Ok(true))).collect()
}

/// The content of TLS records, so that a name that was spread over some is found.
fn without_records(mut bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    while let &[22, _, _, high, low, ref rest @ ..] = bytes {
        let length = usize::from(u16::from_be_bytes([high, low])).min(rest.len());
        let (record, after) = rest.split_at(length);
        plain.extend_from_slice(record);
        bytes = after;
    }
    plain
}
