//! Speed against the emulator, which runs in a process of its own: commands at 64 in flight against the official client,
//! memory of a thousand live processes, files of 100 MiB against a bare HTTP client and server, standard input over a
//! distance.
//!
//! `cargo bench -p runtime-e2b --features emulator`; as root, for the emulator's namespaces. The official client is
//! `E2B_PYTHON`'s, or is installed into a virtual environment below the target directory.

#[path = "../../tests/common/python.rs"]
mod python;
mod serve;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use runtime_core::cache::CacheDir;
use runtime_core::{Sandbox, View};
use runtime_e2b::{ApiKey, E2bConfig, wire};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

const SERVE: &str = "E2B_BENCH_SERVE";
const IN_FLIGHT: usize = 64;
const ROUNDS: usize = 3;
const COMMANDS: usize = 1500;
const STARTS: usize = 960;
const OFFICIAL_COMMANDS: usize = 320;
const PROCESSES: usize = 1000;
const FILE: usize = 100 << 20;
const INPUT: usize = 8 << 20;

/// Runs commands for the official client: threads, as its documentation has it.
const SDK: &str = r#"
import resource, sys, time
from concurrent.futures import ThreadPoolExecutor
from e2b import Sandbox
count = int(sys.argv[1])
box = Sandbox.connect(sys.argv[2])
def one(_):
    assert box.commands.run("echo hi", user="root", timeout=0).stdout == "hi\n"
with ThreadPoolExecutor(64) as pool:
    list(pool.map(one, range(64)))
    started, spent = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    list(pool.map(one, range(count)))
    took, used = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF)
    print(count / took, (used.ru_utime + used.ru_stime - spent.ru_utime - spent.ru_stime) / count)
"#;

/// And with its asynchronous client.
const ASYNC_SDK: &str = r#"
import asyncio, resource, sys, time
from e2b import AsyncSandbox
count = int(sys.argv[1])
async def main():
    box = await AsyncSandbox.connect(sys.argv[2])
    async def worker(jobs):
        for _ in range(jobs):
            assert (await box.commands.run("echo hi", user="root", timeout=0)).stdout == "hi\n"
    await asyncio.gather(*[worker(1) for _ in range(64)])
    started, spent = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.gather(*[worker(count // 64) for _ in range(64)])
    took, used = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF)
    done = count // 64 * 64
    print(done / took, (used.ru_utime + used.ru_stime - spent.ru_utime - spent.ru_stime) / done)
asyncio.run(main())
"#;

/// The other side.
struct Server {
    process: Child,
    answers: BufReader<ChildStdout>,
    isolated: bool,
    api_key: String,
    api_url: String,
    sandbox_url: String,
    bare_url: String,
}

impl Server {
    fn start() -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this program"))
            .env(SERVE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a second process");
        let mut answers = BufReader::new(process.stdout.take().expect("a pipe"));
        let mut line = String::new();
        answers.read_line(&mut line).expect("it says where it is");
        let mut words = line.split_whitespace().map(str::to_owned);
        let mut word = || words.next().expect("five words");
        Self {
            isolated: word() == "true",
            api_key: word(),
            api_url: word(),
            sandbox_url: word(),
            bare_url: word(),
            process,
            answers,
        }
    }

    fn tell(&mut self, what: &str) -> String {
        let stdin = self.process.stdin.as_mut().expect("a pipe");
        writeln!(stdin, "{what}").expect("it reads");
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("it answers");
        line.trim().to_owned()
    }

    fn config(&self) -> E2bConfig {
        E2bConfig {
            api_key: Some(ApiKey::new(&self.api_key)),
            api_url: Some(self.api_url.clone()),
            sandbox_url: Some(self.sandbox_url.clone()),
            creates_per_sec: None,
            ..E2bConfig::default()
        }
    }

    /// Commands per second of the official client, and its own processor time for each in seconds.
    fn official(&self, python: &Path, script: &str, id: &str) -> (f64, f64) {
        let output = Command::new(python)
            .args(["-c", script, &OFFICIAL_COMMANDS.to_string(), id])
            .env("E2B_API_KEY", &self.api_key)
            .env("E2B_API_URL", &self.api_url)
            .env("E2B_SANDBOX_URL", &self.sandbox_url)
            .env("NO_PROXY", "127.0.0.1,localhost")
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .expect("python runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut numbers = said.split_whitespace().map(|word| word.parse().expect("a number"));
        (numbers.next().expect("one"), numbers.next().expect("another"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It ends with its input.
        self.process.stdin = None;
        let _ = self.process.wait();
    }
}

/// Resident memory of this process in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok());
    kib.expect("a number") << 10
}

/// Processor time of this process in seconds.
fn processor_time() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let (_, rest) = stat.rsplit_once(") ").expect("a name");
    let ticks = rest.split_whitespace().skip(11).take(2);
    let ticks: u64 = ticks.map(|word| word.parse::<u64>().expect("a number")).sum();
    // A tick is a hundredth of a second wherever Linux runs.
    ticks as f64 / 100.0
}

/// The value in the middle.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Commands per second, and this process's own processor time for each in seconds.
async fn commands(view: &View) -> (f64, f64) {
    let (started, spent) = (Instant::now(), processor_time());
    let mut running = JoinSet::new();
    let mut ended = 0;
    for _ in 0..COMMANDS {
        if running.len() >= IN_FLIGHT {
            running.join_next().await.expect("one runs").expect("joined");
            ended += 1;
        }
        let view = view.clone();
        running.spawn(async move {
            let output = view.run(["echo", "hi"]).await.expect("ran");
            assert_eq!(&output.stdout.bytes[..], b"hi\n");
        });
    }
    while let Some(one) = running.join_next().await {
        one.expect("joined");
        ended += 1;
    }
    let ended = f64::from(ended);
    let used = processor_time() - spent;
    (ended / started.elapsed().as_secs_f64(), used / ended)
}

/// What no client can exceed: the same requests by a bare HTTP client that looks at nothing, and the starts of the same
/// programs by the emulator's process without any client.
async fn floors(server: &mut Server, id: &str) {
    let token = server.tell(&format!("token {id}"));
    let message = wire::process::StartRequest {
        process: Some(wire::process::ProcessConfig {
            cmd: "/usr/bin/setsid".to_owned(),
            args: vec!["echo".to_owned(), "hi".to_owned()],
            ..wire::process::ProcessConfig::default()
        }),
        stdin: Some(false),
        ..wire::process::StartRequest::default()
    };
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let request = std::sync::Arc::new(wire::process::start(&message, "root"));
    let (started, spent) = (Instant::now(), processor_time());
    let workers = (0..IN_FLIGHT).map(|_| {
        let (client, request) = (client.clone(), request.clone());
        let url = format!("{}{}", server.sandbox_url, request.path);
        let (id, token) = (id.to_owned(), token.clone());
        tokio::spawn(async move {
            for _ in 0..STARTS / IN_FLIGHT {
                let mut sent = client
                    .request(request.method.clone(), &url)
                    .header("e2b-sandbox-id", &id)
                    .header("x-access-token", &token);
                for (name, value) in &request.headers {
                    sent = sent.header(name, value);
                }
                let answer = sent.body(request.body.clone()).send().await.expect("sent");
                let body = answer.bytes().await.expect("read");
                assert!(body.windows(3).any(|word| word == b"hi\n"));
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await.expect("joined");
    }
    let done = (STARTS / IN_FLIGHT * IN_FLIGHT) as f64;
    println!(
        "FLOOR the same requests by a bare HTTP client: {:.0} /s ({:.2} ms of this process each)",
        done / started.elapsed().as_secs_f64(),
        (processor_time() - spent) * 1000.0 / done
    );
    for (what, words) in [
        ("ours, setsid echo hi", "/usr/bin/setsid\techo\thi"),
        (
            "the official client's, bash -l -c 'echo hi'",
            "/bin/bash\t-l\t-c\techo hi",
        ),
    ] {
        let rate: f64 = server.tell(&format!("starts {words}")).parse().expect("a number");
        println!("FLOOR starts alone of the programs of {what}: {rate:.0} /s");
    }
}

async fn against_the_official_client(server: &mut Server, view: &View, id: &str) {
    commands(view).await;
    floors(server, id).await;
    let Some(python) = python::python() else {
        let (ours, _) = commands(view).await;
        println!("commands: {ours:.0} /s; the official client is not measured");
        return;
    };
    // A login shell reads profiles, and this machine's may be anything: the box gets a distribution's plain ones.
    for profile in [
        "/root/.profile",
        "/root/.bash_profile",
        "/root/.bash_login",
        "/root/.bashrc",
    ] {
        view.write(profile, "").await.expect("written");
    }
    for (what, script) in [("threads", SDK), ("asyncio", ASYNC_SDK)] {
        let (mut ratios, mut costs) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let (ours, our_cost) = commands(view).await;
            let (theirs, their_cost) = server.official(&python, script, id);
            println!(
                "commands at {IN_FLIGHT} in flight, round {round}: ours {ours:.0} /s ({:.2} ms of this process each), \
                 official client ({what}) {theirs:.0} /s ({:.2} ms)",
                our_cost * 1000.0,
                their_cost * 1000.0
            );
            ratios.push(ours / theirs);
            costs.push(their_cost / our_cost);
        }
        println!(
            "RATIO commands over official client, {what}: {:.1}; of the clients' processor time: {:.1}",
            median(&mut ratios),
            median(&mut costs)
        );
    }
}

async fn live(view: &View) {
    // Once before, so that what is shared is not counted.
    let first = view.spawn(["sleep", "600"]).await.expect("started");
    let before = resident();
    let mut processes = vec![first];
    for _ in 0..PROCESSES / 50 {
        let started = (0..50).map(|_| {
            let view = view.clone();
            tokio::spawn(async move { view.spawn(["sleep", "600"]).await.expect("started") })
        });
        for process in started.collect::<Vec<_>>() {
            processes.push(process.await.expect("joined"));
        }
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let each = resident().saturating_sub(before) as f64 / PROCESSES as f64 / 1024.0;
    println!("{PROCESSES} live processes: {each:.1} KiB of this process each");
    let killed: Vec<_> = processes
        .into_iter()
        .map(|mut process| tokio::spawn(async move { process.kill().await }))
        .collect();
    for process in killed {
        process.await.expect("joined").expect("killed");
    }
}

fn mib_per_second(bytes: usize, started: Instant) -> f64 {
    bytes as f64 / (1 << 20) as f64 / started.elapsed().as_secs_f64()
}

async fn files(view: &View, url: &str) {
    let content = Bytes::from(vec![7; FILE]);
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let (mut ups, mut downs) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let started = Instant::now();
        view.write("/root/big", content.clone()).await.expect("written");
        let up = mib_per_second(FILE, started);
        let started = Instant::now();
        let answer = client.post(url).body(content.clone()).send().await.expect("sent");
        assert!(answer.status().is_success());
        let bare_up = mib_per_second(FILE, started);
        let started = Instant::now();
        let mut stream = view.open("/root/big").await.expect("opened");
        let mut buffer = vec![0; 256 << 10];
        let mut read = 0;
        loop {
            match stream.read(&mut buffer).await.expect("read") {
                0 => break,
                count => read += count,
            }
        }
        assert_eq!(read, FILE);
        let down = mib_per_second(FILE, started);
        let started = Instant::now();
        let mut answer = client.get(url).send().await.expect("sent");
        let mut read = 0;
        while let Some(chunk) = answer.chunk().await.expect("read") {
            read += chunk.len();
        }
        assert_eq!(read, FILE);
        let bare_down = mib_per_second(FILE, started);
        // The first warms both sides up.
        if round > 0 {
            println!(
                "100 MiB, round {round}: up {up:.0} MiB/s (bare {bare_up:.0}), down {down:.0} MiB/s (bare {bare_down:.0})"
            );
            ups.push(100.0 * up / bare_up);
            downs.push(100.0 * down / bare_down);
        }
    }
    println!("RATIO 100 MiB up over bare HTTP: {:.0} %", median(&mut ups));
    println!("RATIO 100 MiB down over bare HTTP: {:.0} %", median(&mut downs));
}

/// Standard input where a call takes a while: as this crate sends it, and by one call for each piece.
async fn input(server: &mut Server, view: &View, id: &str) {
    let token = server.tell(&format!("token {id}"));
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    for delay in [0, 20] {
        server.tell(&format!("delay {delay}"));
        let mut counter = view.spawn(["wc", "-c"]).await.expect("started");
        let mut stdin = counter.stdin.take().expect("a pipe");
        let started = Instant::now();
        stdin.write_all(&vec![b'x'; INPUT]).await.expect("written");
        stdin.shutdown().await.expect("closed");
        drop(stdin);
        assert!(counter.wait().await.expect("ended").success());
        let ours = mib_per_second(INPUT, started);
        let mut counter = view.spawn(["wc", "-c"]).await.expect("started");
        let pid = counter.id().expect("an id");
        let piece = Bytes::from(vec![b'x'; 64 << 10]);
        let started = Instant::now();
        for _ in 0..INPUT / piece.len() {
            let request = wire::process::send_input(pid, piece.clone());
            let mut sent = client
                .request(request.method, format!("{}{}", server.sandbox_url, request.path))
                .header("e2b-sandbox-id", id)
                .header("x-access-token", &token);
            for (name, value) in request.headers {
                sent = sent.header(name, value);
            }
            let answer = sent.body(request.body).send().await.expect("sent");
            assert!(answer.status().is_success());
            answer.bytes().await.expect("read");
        }
        let by_calls = mib_per_second(INPUT, started);
        counter.kill().await.expect("killed");
        println!(
            "8 MiB of standard input, {delay} ms a call: {ours:.0} MiB/s; by one call a piece: {by_calls:.0} MiB/s"
        );
    }
    server.tell("clear");
}

fn main() {
    if std::env::var_os(SERVE).is_some() {
        serve::serve();
        return;
    }
    let mut server = Server::start();
    if !server.isolated {
        eprintln!("SKIPPED: the emulator needs root");
        return;
    }
    let executor = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("an executor");
    executor.block_on(async {
        let cache = tempfile::tempdir().expect("a directory");
        let builder = Sandbox::builder(server.config()).cache(CacheDir::at(cache.path()));
        let sandbox = builder.provision().await.expect("a box");
        let view = sandbox.view();
        let id = sandbox.id().expect("an id");
        live(&view).await;
        files(&view, &server.bare_url).await;
        input(&mut server, &view, &id).await;
        against_the_official_client(&mut server, &view, &id).await;
        sandbox.stop().await.expect("stopped");
    });
}
