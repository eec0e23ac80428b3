//! [`Torture`]: processes are killed at random moments while they provision, use and stop boxes; after one reap nothing
//! of them is left, and the boxes of a process that lives were never touched.
//!
//! The processes are this test program again, told by their environment to run one test alone, which begins with
//! [`play_role`]:
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use runtime_core::conformance::{Torture, play_role};
//! # use runtime_core::subprocess::{SubprocessConfig, SubprocessProvider};
//! # mod a { /*
//! #[test]
//! # */ }
//! fn a_killed_process_leaves_nothing() {
//!     if play_role(|| SubprocessConfig::default().into()) {
//!         return;
//!     }
//!     let torture = Torture::new("a_killed_process_leaves_nothing");
//!     let tally = torture.run(Arc::new(SubprocessProvider), |scene| {
//!         Vec::new() // What is left of the boxes of `scene.run_scope`, seen from outside.
//!     });
//!     println!("{}", tally.expect("nothing is left"));
//! }
//! ```

use std::fmt;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::CacheDir;
use crate::config::RuntimeConfig;
use crate::lease::{ReapOptions, Report, reap};
use crate::names::random_hex;
use crate::registry::{Provider, Registry};
use crate::sandbox::{Builder, Sandbox};

/// Tells a process what it is.
const ROLE: &str = "SANDBOX_TORTURE_ROLE";
/// Where its boxes keep what outlives it.
const CACHE: &str = "SANDBOX_TORTURE_CACHE";
/// How many boxes a victim has at once, and how long it lives.
const BOXES: &str = "SANDBOX_TORTURE_BOXES";
const LATEST: &str = "SANDBOX_TORTURE_LATEST";
/// In the environment of every program of a box, which is how one that is left is found.
const MARKER: &str = "SANDBOX_TORTURE_BOX";

/// No victim outlives a test that was itself killed by much.
const LIFETIME: Duration = Duration::from_secs(60);

/// The names of the bystander's boxes. Victims use the last one too: it is not the name that tells boxes apart.
const BESIDE: [&str; 2] = ["beside-0", "beside-1"];

/// How often, in rounds, the bystander looks after its boxes.
const CHECK_EVERY: usize = 5;

/// How processes are killed.
#[derive(Debug, Clone)]
pub struct Torture {
    /// The name of the test, as libtest knows it.
    pub test: &'static str,
    /// How many processes are killed in all. Default: 300.
    pub kills: usize,
    /// How many of them live at once. When all of these are dead there is one reap. Default: 10.
    pub at_once: usize,
    /// How many boxes each of them has at once. Default: 3.
    pub boxes: usize,
    /// The latest moment of a kill after the start of the process. Default: 100 ms.
    pub latest: Duration,
    /// What the processes find in their environment besides.
    pub env: Vec<(String, String)>,
}

/// Where to look for what is left.
#[derive(Debug, Clone)]
pub struct Scene {
    /// The cache directory of the victims, of the reaper and of most of the bystander's boxes.
    pub cache: PathBuf,
    /// The cache directory of somebody else, who has boxes of the same names in the same run.
    pub other: PathBuf,
    /// The run of all boxes.
    pub run_scope: String,
}

/// What was seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// How many processes were killed.
    pub kills: usize,
    /// How many leases they left, each of a box that existed, was about to, or was being deleted.
    pub orphans: usize,
    /// Those of which the provider's id was not known.
    pub without_id: usize,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} kills left {} orphans, {} of them without an id",
            self.kills, self.orphans, self.without_id
        )
    }
}

impl Torture {
    /// The defaults, for the test of this name.
    pub fn new(test: &'static str) -> Self {
        Self {
            test,
            kills: 300,
            at_once: 10,
            boxes: 3,
            latest: Duration::from_millis(100),
            env: Vec::new(),
        }
    }

    /// Kills. `leftovers` says what exists of the boxes of a scene, seen from outside, in any words that stay the same
    /// while nothing happens; leases and processes of boxes are looked for here.
    ///
    /// # Errors
    /// What was left, or who was touched.
    pub fn run(
        &self,
        provider: Arc<dyn Provider>,
        leftovers: impl FnMut(&Scene) -> Vec<String>,
    ) -> Result<Tally, String> {
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let scene = Scene {
            cache: dir.path().join("cache"),
            other: dir.path().join("other"),
            run_scope: format!("torture-{}", random_hex(12)),
        };
        let executor = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        let mut registry = Registry::new();
        registry.register(provider);
        let reap = |cache: &Path| {
            let options = ReapOptions {
                cache: CacheDir::at(cache),
                concurrency: 64,
                ..ReapOptions::default()
            };
            executor
                .block_on(reap(&registry, options))
                .map_err(|error| error.to_string())
        };
        let result = self.kill_all(&scene, &reap, leftovers);
        if result.is_err() {
            // The test has failed; the machine need not suffer.
            let _ = reap(&scene.cache);
            let _ = reap(&scene.other);
        }
        result
    }

    fn kill_all(
        &self,
        scene: &Scene,
        reap: &dyn Fn(&Path) -> Result<Report, String>,
        mut leftovers: impl FnMut(&Scene) -> Vec<String>,
    ) -> Result<Tally, String> {
        let mut seen = |scene: &Scene| {
            let mut seen = leftovers(scene);
            seen.extend(leases(scene));
            seen.extend(processes(scene));
            seen.sort();
            seen
        };
        let mut beside = Bystander::start(self.child("bystander", scene))?;
        beside.expect("ready")?;
        let untouched = seen(scene);
        let mut tally = Tally::default();
        let mut round = 0;
        while tally.kills < self.kills {
            let victims = self.at_once.min(self.kills - tally.kills);
            self.kill_some(victims, scene)?;
            tally.kills += victims;
            let report = reap(&scene.cache)?;
            let blame = |what: &str| Err(format!("round {round}: {what}\n{report}"));
            if report.remaining().next().is_some() || !report.damaged.is_empty() {
                return blame("a lease stays");
            }
            if (report.living_owners, report.living_boxes) != (1, BESIDE.len()) {
                return blame("the bystander's leases are not as they were");
            }
            tally.orphans += report.boxes.len();
            tally.without_id += report.boxes.iter().filter(|reaped| reaped.id.is_none()).count();
            let now = seen(scene);
            if now != untouched {
                return blame(&difference(&untouched, &now));
            }
            if round % CHECK_EVERY == 0 {
                beside.check()?;
            }
            round += 1;
        }
        beside.check()?;
        let report = reap(&scene.cache)?;
        if !report.boxes.is_empty() {
            return Err(format!("one reap was not enough: {report}"));
        }
        let status = beside.end()?;
        if !status.success() {
            return Err(format!("the bystander ended with {status}"));
        }
        let left = seen(scene);
        if !left.is_empty() {
            return Err(format!("after all have ended: {left:?}"));
        }
        if tally.orphans < self.kills / 3 {
            return Err(format!(
                "{tally}: the kills came too early or too late to show anything"
            ));
        }
        Ok(tally)
    }

    /// Starts so many and kills each at a random moment of its own.
    fn kill_some(&self, victims: usize, scene: &Scene) -> Result<(), String> {
        let mut alive = Victims(Vec::with_capacity(victims));
        for _ in 0..victims {
            let mut command = self.child("victim", scene);
            command.stdout(Stdio::null()).stderr(Stdio::null());
            let victim = command.spawn().map_err(|error| error.to_string())?;
            let latest = u64::try_from(self.latest.as_micros()).unwrap_or(u64::MAX);
            alive
                .0
                .push((Instant::now() + Duration::from_micros(random(latest)), victim));
        }
        alive.0.sort_by_key(|(moment, _)| *moment);
        for (moment, victim) in &mut alive.0 {
            std::thread::sleep(moment.saturating_duration_since(Instant::now()));
            if let Ok(Some(status)) = victim.try_wait() {
                return Err(format!("a victim ended by itself with {status}"));
            }
            victim.kill().map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// This program, to run the test alone, in a role.
    fn child(&self, role: &str, scene: &Scene) -> Command {
        let program = std::env::current_exe().unwrap_or_default();
        let mut command = Command::new(program);
        command
            .args(["--exact", self.test, "--nocapture", "--quiet"])
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env(ROLE, role)
            .env(CACHE, if role == "victim" { &scene.cache } else { &scene.other })
            .env(BOXES, self.boxes.to_string())
            .env(LATEST, self.latest.as_millis().to_string())
            .env("VF_RUN_ID", &scene.run_scope)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if role != "victim" {
            command.env(format!("{CACHE}_OF_VICTIMS"), &scene.cache);
        }
        command
    }
}

/// Processes that are killed, at the latest when the test fails.
struct Victims(Vec<(Instant, Child)>);

impl Drop for Victims {
    fn drop(&mut self) {
        for (_, victim) in &mut self.0 {
            let _ = victim.kill();
            let _ = victim.wait();
        }
    }
}

fn random(below: u64) -> u64 {
    u64::from_str_radix(&random_hex(15), 16).unwrap_or_default() % below.max(1)
}

/// Journals of both caches.
fn leases(scene: &Scene) -> Vec<String> {
    let dirs = [&scene.cache, &scene.other].map(|cache| cache.join(crate::lease::DIRECTORY));
    let entries = dirs.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten();
    entries
        .flatten()
        .map(|entry| entry.path().display().to_string())
        .collect()
}

/// Processes of this machine that were started in a box of this scene.
fn processes(scene: &Scene) -> Vec<String> {
    let marker = format!("{MARKER}={}", scene.run_scope);
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let of_boxes = entries.filter(|entry| {
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|variable| variable == marker.as_bytes())
    });
    of_boxes
        .map(|entry| format!("process {}", entry.file_name().to_string_lossy()))
        .collect()
}

fn difference(before: &[String], after: &[String]) -> String {
    let beyond = |some: &[String], others: &[String]| -> Vec<String> {
        some.iter().filter(|one| !others.contains(one)).cloned().collect()
    };
    format!(
        "left: {:?}; the bystander lost: {:?}",
        beyond(after, before),
        beyond(before, after)
    )
}

/// A process whose boxes nobody may touch.
struct Bystander {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Bystander {
    fn start(mut command: Command) -> Result<Self, String> {
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let stdout = child.stdout.take().ok_or("the bystander's output is not piped")?;
        Ok(Self {
            stdin: child.stdin.take(),
            lines: BufReader::new(stdout).lines(),
            child,
        })
    }

    /// Reads up to the line of this word; libtest writes on the same stream.
    fn expect(&mut self, word: &str) -> Result<(), String> {
        let mut seen = Vec::new();
        for line in self.lines.by_ref() {
            let line = line.map_err(|error| error.to_string())?;
            if line.ends_with(word) {
                return Ok(());
            }
            seen.push(line);
        }
        Err(format!("the bystander ended without {word:?}: {seen:?}"))
    }

    fn check(&mut self) -> Result<(), String> {
        let stdin = self.stdin.as_mut().ok_or("the bystander has ended")?;
        writeln!(stdin, "check").map_err(|error| error.to_string())?;
        self.expect("well")
    }

    fn end(mut self) -> Result<ExitStatus, String> {
        drop(self.stdin.take());
        self.child.wait().map_err(|error| error.to_string())
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        // It stops its boxes when its input ends.
        drop(self.stdin.take());
        let _ = self.child.wait();
    }
}

/// In a process that [`Torture::run`] started: plays its role and returns true when it is done. Elsewhere false.
///
/// # Panics
/// When a box of the bystander cannot be had or does not do as it should, so that the test sees it.
pub fn play_role(config: impl Fn() -> Box<dyn RuntimeConfig> + Send + Sync + 'static) -> bool {
    let (Ok(role), Some(cache)) = (std::env::var(ROLE), std::env::var_os(CACHE)) else {
        return false;
    };
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let marker = std::env::var("VF_RUN_ID").unwrap_or_default();
    let builder = move |cache: &Path| {
        Sandbox::builder(config())
            .cache(CacheDir::at(cache))
            .env(MARKER, marker.clone())
    };
    let executor = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let Ok(executor) = executor else { return true };
    let cache = PathBuf::from(cache);
    if role == "victim" {
        let victim = Victim {
            builder,
            cache,
            latest: number(LATEST).unwrap_or(100),
        };
        executor.block_on(Arc::new(victim).live(number(BOXES).unwrap_or(1)));
    } else {
        let of_victims = std::env::var_os(format!("{CACHE}_OF_VICTIMS")).unwrap_or_default();
        if let Err(error) = executor.block_on(stand_by(builder, Path::new(&of_victims), &cache)) {
            panic!("the bystander: {error}");
        }
    }
    true
}

struct Victim<B> {
    builder: B,
    cache: PathBuf,
    /// Milliseconds.
    latest: u64,
}

impl<B: Fn(&Path) -> Builder + Send + Sync + 'static> Victim<B> {
    /// Provisions, uses and stops boxes until it is killed.
    async fn live(self: Arc<Self>, boxes: u64) {
        let workers: Vec<_> = (0..boxes)
            .map(|worker| {
                let victim = self.clone();
                tokio::spawn(async move {
                    loop {
                        victim.live_a_little(worker).await;
                    }
                })
            })
            .collect();
        tokio::time::sleep(LIFETIME).await;
        workers.iter().for_each(tokio::task::JoinHandle::abort);
    }

    async fn live_a_little(&self, worker: u64) {
        let mut builder = (self.builder)(&self.cache);
        if worker == 0 {
            // One of them fights over a name, with itself: a box that is being deleted still has it, and with others.
            builder = builder.name(["taken", BESIDE[1]][usize::from(random(2) == 0)]);
        }
        let provision = builder.provision();
        let provisioned = match random(6) {
            // Nobody waits for it any more.
            0 => {
                let patience = Duration::from_millis(random(self.latest / 2));
                tokio::time::timeout(patience, provision).await.ok()
            }
            _ => Some(provision.await),
        };
        let Some(Ok(sandbox)) = provisioned else { return };
        let _ = sandbox.prepare_setup().await;
        let _ = sandbox.prepare_execution(Default::default()).await;
        // In the group, out of the group, and a server.
        let program = "sleep 1000 >/dev/null 2>&1 & setsid sleep 1000 >/dev/null 2>&1 & echo done";
        let _ = sandbox.run(["sh", "-c", program]).await;
        let _ = sandbox.run_background(["sleep", "1000"], "log").await;
        let _ = sandbox.write("deep/in/it", vec![7; 10_000]).await;
        if random(2) == 0 {
            let _ = sandbox.stop().await;
        }
    }
}

/// Has boxes with a program in each, and looks after them when asked to.
async fn stand_by(builder: impl Fn(&Path) -> Builder, cache: &Path, other: &Path) -> Result<(), String> {
    let mut boxes = Vec::new();
    let all = BESIDE.map(|name| (name, cache)).into_iter().chain([(BESIDE[1], other)]);
    for (n, (name, cache)) in all.enumerate() {
        let sandbox = builder(cache).name(name).provision().await.map_err(shown)?;
        sandbox.run_background(["sleep", "1000"], "log").await.map_err(shown)?;
        sandbox.write("mine", format!("{n}")).await.map_err(shown)?;
        boxes.push(sandbox);
    }
    println!("\nready");
    for line in std::io::stdin().lock().lines() {
        if line.map_err(shown)? != "check" {
            return Err("not understood".to_owned());
        }
        for (n, sandbox) in boxes.iter().enumerate() {
            let output = sandbox.run(["cat", "mine"]).await.map_err(shown)?;
            if output.stdout_lossy() != n.to_string() {
                return Err(format!("box {n} holds {:?}", output.stdout_lossy()));
            }
        }
        println!("\nwell");
    }
    for sandbox in boxes {
        sandbox.stop().await.map_err(shown)?;
    }
    Ok(())
}

fn shown(error: impl fmt::Display) -> String {
    error.to_string()
}
