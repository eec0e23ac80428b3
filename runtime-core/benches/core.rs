//! The embedded runtime against its floor, in one run: bare `tokio::process` and bare pipes.
//!
//! Each figure is the median of many, and each ratio compares two series that were taken in turns, so that what else
//! the machine does hits both alike.

use std::process::Stdio;
use std::time::{Duration, Instant};

use runtime_core::cache::CacheDir;
use runtime_core::scope::RunScope;
use runtime_core::subprocess::SubprocessConfig;
use runtime_core::{Command, Sandbox};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

const GIB: u64 = 1 << 30;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let dir = tempfile::tempdir().expect("a directory");
    let cache = CacheDir::at(dir.path());
    let scope = RunScope::mint();
    runtime.block_on(async {
        let builder = || {
            Sandbox::builder(SubprocessConfig::default())
                .cache(cache.clone())
                .run_scope(scope.clone())
        };
        let sandbox = builder().provision().await.expect("a sandbox");
        run_true(&sandbox).await;
        echo(&sandbox).await;
        throughput(&sandbox).await;
        sandbox.stop().await.expect("stopped");
        many(builder).await;
    });
}

async fn run_true(sandbox: &Sandbox) {
    let (mut floor, mut ours) = (Vec::new(), Vec::new());
    for round in 0..600 {
        let start = Instant::now();
        let output = tokio::process::Command::new("true")
            .stdin(Stdio::null())
            .output()
            .await
            .expect("true");
        let bare = start.elapsed();
        assert!(output.status.success());
        let start = Instant::now();
        let output = sandbox.run(["true"]).await.expect("true");
        let boxed = start.elapsed();
        assert!(output.success());
        if round >= 50 {
            floor.push(bare);
            ours.push(boxed);
        }
    }
    report("run true", "bare spawn and wait", &mut floor, &mut ours, 1.3);
}

async fn echo(sandbox: &Sandbox) {
    let mut bare = tokio::process::Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("cat");
    let mut bare_in = bare.stdin.take().expect("piped");
    let mut bare_out = bare.stdout.take().expect("piped");
    let mut process = sandbox.spawn(["cat"]).await.expect("cat");
    let mut our_in = process.stdin.take().expect("piped");
    let mut our_out = process.stdout.take().expect("piped");
    let (mut floor, mut ours) = (Vec::new(), Vec::new());
    let mut line = [0; 5];
    for round in 0..5000 {
        let start = Instant::now();
        bare_in.write_all(b"ping\n").await.expect("write");
        bare_out.read_exact(&mut line).await.expect("read");
        let bare = start.elapsed();
        let start = Instant::now();
        our_in.write_all(b"ping\n").await.expect("write");
        our_out.read_exact(&mut line).await.expect("read");
        if round >= 500 {
            ours.push(start.elapsed());
            floor.push(bare);
        }
    }
    report("echo round trip", "bare pipes", &mut floor, &mut ours, 1.2);
}

async fn throughput(sandbox: &Sandbox) {
    let argv = ["head", "-c", "1073741824", "/dev/zero"];
    let mut buffer = vec![0; 256 << 10];
    let (mut floor, mut live, mut collected) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..5 {
        let mut bare = tokio::process::Command::new(argv[0])
            .args(&argv[1..])
            .stdout(Stdio::piped())
            .spawn()
            .expect("head");
        let mut stdout = bare.stdout.take().expect("piped");
        let start = Instant::now();
        let total = drain(&mut stdout, &mut buffer).await;
        floor.push(start.elapsed());
        assert_eq!(total, GIB);
        bare.wait().await.expect("head");

        let mut process = sandbox.spawn(argv).await.expect("head");
        let mut stdout = process.stdout.take().expect("piped");
        let start = Instant::now();
        let total = drain(&mut stdout, &mut buffer).await;
        live.push(start.elapsed());
        assert_eq!(total, GIB);

        let start = Instant::now();
        let output = sandbox.run(Command::new(argv)).await.expect("head");
        collected.push(start.elapsed());
        assert_eq!(output.stdout.bytes.len() as u64 + output.stdout.dropped, GIB);
    }
    report(
        "1 GiB of stdout, live",
        "bare pipe",
        &mut floor.clone(),
        &mut live,
        1.25,
    );
    report("1 GiB of stdout, run", "bare pipe", &mut floor, &mut collected, 1.25);
}

/// Reads to the end; the number of bytes.
async fn drain(stdout: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> u64 {
    let mut total = 0;
    loop {
        match stdout.read(buffer).await.expect("read") as u64 {
            0 => return total,
            count => total += count,
        }
    }
}

async fn many(builder: impl Fn() -> runtime_core::Builder) {
    const COUNT: usize = 1000;
    // The first ones bring threads and tables that the others share.
    let warm = builder().provision().await.expect("a sandbox");
    let before = resident();
    let start = Instant::now();
    let mut sandboxes = Vec::new();
    for _ in 0..COUNT {
        sandboxes.push(builder().provision().await.expect("a sandbox"));
    }
    let elapsed = start.elapsed();
    let each = (resident().saturating_sub(before)) as f64 / COUNT as f64;
    println!(
        "{COUNT} live sandboxes: {:.1} KiB of our memory each (at most 64), {elapsed:.2?} in all",
        each / 1024.0
    );
    let start = Instant::now();
    for sandbox in &sandboxes {
        sandbox.stop().await.expect("stopped");
    }
    println!("{COUNT} stops one after the other: {:.2?}", start.elapsed());
    drop(warm);
}

/// Bytes of this process in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap_or("0");
    line.trim()
        .split(' ')
        .next()
        .and_then(|kib| kib.parse::<u64>().ok())
        .unwrap_or(0)
        * 1024
}

fn report(what: &str, against: &str, floor: &mut [Duration], ours: &mut [Duration], bound: f64) {
    let (floor, ours) = (median(floor), median(ours));
    let ratio = ours.as_secs_f64() / floor.as_secs_f64();
    println!("{what}: {ours:.1?} against {floor:.1?} of {against}: {ratio:.2} times (at most {bound})");
}

fn median(series: &mut [Duration]) -> Duration {
    series.sort();
    series[series.len() / 2]
}
