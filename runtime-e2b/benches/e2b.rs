//! Speed against the emulator: commands at 64 in flight, memory of a thousand live processes, files of 100 MiB against a
//! bare HTTP client. With `E2B_PYTHON` (a Python that has the official client), the same commands through that too.
//!
//! `cargo bench -p runtime-e2b --features emulator`; as root, for the emulator's namespaces.

use std::process::Stdio;
use std::time::{Duration, Instant};

use runtime_core::cache::CacheDir;
use runtime_core::{Sandbox, View, WriteOptions};
use runtime_e2b::emulator::Emulator;
use tokio::io::AsyncReadExt;
use tokio::task::JoinSet;

const IN_FLIGHT: usize = 64;
const COMMANDS: usize = 1500;
const PROCESSES: usize = 1000;
const FILE: usize = 100 << 20;

/// Runs commands for the official client: threads, as its documentation has it.
const SDK: &str = r#"
import sys, time
from concurrent.futures import ThreadPoolExecutor
from e2b import Sandbox
count = int(sys.argv[1])
box = Sandbox.connect(sys.argv[2])
def one(_):
    assert box.commands.run("echo hi", user="root", timeout=0).stdout == "hi\n"
with ThreadPoolExecutor(64) as pool:
    list(pool.map(one, range(64)))
    started = time.monotonic()
    list(pool.map(one, range(count)))
    print(count / (time.monotonic() - started))
"#;

/// And with its asynchronous client.
const ASYNC_SDK: &str = r#"
import asyncio, sys, time
from e2b import AsyncSandbox
count = int(sys.argv[1])
async def main():
    box = await AsyncSandbox.connect(sys.argv[2])
    async def worker(jobs):
        for _ in range(jobs):
            assert (await box.commands.run("echo hi", user="root", timeout=0)).stdout == "hi\n"
    await asyncio.gather(*[worker(1) for _ in range(64)])
    started = time.monotonic()
    await asyncio.gather(*[worker(count // 64) for _ in range(64)])
    print(count // 64 * 64 / (time.monotonic() - started))
asyncio.run(main())
"#;

/// Resident memory of this process in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}

async fn commands(view: &View) -> f64 {
    let started = Instant::now();
    let mut running = JoinSet::new();
    let mut ended = 0;
    for _ in 0..COMMANDS {
        if running.len() >= IN_FLIGHT {
            running.join_next().await.expect("one runs").expect("joined");
            ended += 1;
        }
        let view = view.clone();
        running.spawn(async move {
            let output = view.run(["sh", "-c", "echo hi"]).await.expect("ran");
            assert_eq!(&output.stdout.bytes[..], b"hi\n");
        });
    }
    while let Some(one) = running.join_next().await {
        one.expect("joined");
        ended += 1;
    }
    f64::from(ended) / started.elapsed().as_secs_f64()
}

async fn official(emulator: &Emulator, script: &str, id: &str) -> Option<f64> {
    let python = std::env::var_os("E2B_PYTHON")?;
    let output = tokio::process::Command::new(python)
        .args(["-c", script, "640", id])
        .envs(emulator.variables())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .await
        .ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

async fn live(view: &View) -> u64 {
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
    let each = resident().saturating_sub(before) / PROCESSES as u64;
    let killed: Vec<_> = processes
        .into_iter()
        .map(|mut process| tokio::spawn(async move { process.kill().await }))
        .collect();
    for process in killed {
        process.await.expect("joined").expect("killed");
    }
    each
}

fn mib_per_second(started: Instant) -> f64 {
    FILE as f64 / (1 << 20) as f64 / started.elapsed().as_secs_f64()
}

async fn files(view: &View, url: &str, headers: &[(String, String)]) {
    let content = bytes::Bytes::from(vec![7; FILE]);
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let with_headers = |mut request: reqwest::RequestBuilder| {
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request
    };
    for round in 0..3 {
        let started = Instant::now();
        view.write_with(
            "/root/big",
            content.clone(),
            WriteOptions {
                atomic: false,
                ..WriteOptions::default()
            },
        )
        .await
        .expect("written");
        let up = mib_per_second(started);
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
        let down = mib_per_second(started);
        let started = Instant::now();
        let request = with_headers(client.post(url)).header("content-type", "application/octet-stream");
        let answer = request.body(content.clone()).send().await.expect("sent");
        assert!(answer.status().is_success());
        let bare_up = mib_per_second(started);
        let started = Instant::now();
        let mut answer = with_headers(client.get(url)).send().await.expect("sent");
        let mut read = 0;
        while let Some(chunk) = answer.chunk().await.expect("read") {
            read += chunk.len();
        }
        assert_eq!(read, FILE);
        let bare_down = mib_per_second(started);
        println!(
            "100 MiB, round {round}: up {up:.0} MiB/s (bare {bare_up:.0}, {:.0} %), down {down:.0} MiB/s (bare {bare_down:.0}, {:.0} %)",
            100.0 * up / bare_up,
            100.0 * down / bare_down
        );
    }
}

fn main() {
    let emulator = Emulator::start().expect("loopback");
    if !emulator.is_isolated() {
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
        let builder = Sandbox::builder(emulator.config()).cache(CacheDir::at(cache.path()));
        let sandbox = builder.provision().await.expect("a box");
        let view = sandbox.view();
        let id = sandbox.id().expect("an id");
        commands(&view).await;
        let ours = commands(&view).await;
        println!("commands at {IN_FLIGHT} in flight: {ours:.0} /s");
        for (what, script) in [("threads", SDK), ("asyncio", ASYNC_SDK)] {
            match official(&emulator, script, &id).await {
                Some(theirs) => println!(
                    "official client, {what}: {theirs:.0} /s: ours is {:.1} times that",
                    ours / theirs
                ),
                None => println!("official client, {what}: not measured (set E2B_PYTHON)"),
            }
        }
        let token = emulator.access_token(&id).expect("the box is there");
        let headers = [
            ("e2b-sandbox-id".to_owned(), id.clone()),
            ("x-access-token".to_owned(), token),
        ];
        let url = format!("{}/files?username=root&path=/root/bare", emulator.sandbox_url());
        files(&view, &url, &headers).await;
        // The emulator is a part of this process, so this is more than the client's share.
        println!(
            "{PROCESSES} live processes: {} KiB each, client and emulator together",
            live(&view).await >> 10
        );
        sandbox.stop().await.expect("stopped");
    });
}
