//! Boxes against their floors, in one run: the Engine API's own exec, a bare `tokio::process`, bare pipes and files. The
//! programs are those of the same `busybox` on both sides (Debian package `busybox-static`).
//!
//! `cargo bench -p runtime-docker -- [--engine docker|podman] [--only PART]`. Prints medians and ratios. Only ratios of one
//! run mean something.

use std::process::Stdio;
use std::time::{Duration, Instant};

use bollard::Docker;
use bollard::models::{ContainerCreateBody, ExecConfig, NetworkConnectRequest, NetworkDisconnectRequest};
use futures_util::StreamExt;
use runtime_core::network::Routes;
use runtime_core::{Command, Result, RuntimeConfig, Sandbox};
use runtime_docker::{ContainerConfig, DockerConfig, ExecMode, PodmanConfig, PullPolicy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

struct Bench {
    podman: bool,
    only: Option<String>,
}

impl Bench {
    fn config(&self, exec: ExecMode) -> Box<dyn RuntimeConfig> {
        let prefix = if self.podman { "localhost/" } else { "" };
        let mut config = ContainerConfig::new(format!("{prefix}sandbox-test/busybox:latest"));
        config.exec = exec;
        config.pull = PullPolicy::Never;
        match self.podman {
            true => PodmanConfig(config).into(),
            false => DockerConfig(config).into(),
        }
    }

    /// A box whose execution phase reaches nothing.
    fn closed(&self) -> Box<dyn RuntimeConfig> {
        let prefix = if self.podman { "localhost/" } else { "" };
        let mut config = ContainerConfig::new(format!("{prefix}sandbox-test/busybox:latest"));
        config.pull = PullPolicy::Never;
        config.allow = Vec::new();
        match self.podman {
            true => PodmanConfig(config).into(),
            false => DockerConfig(config).into(),
        }
    }

    fn wants(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == part)
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn report(what: &str, ours: Duration, floor_name: &str, floor: Duration) {
    let ratio = ours.as_secs_f64() / floor.as_secs_f64();
    println!("{what:<34} {ours:>12.2?}   {floor_name:<22} {floor:>12.2?}   ratio {ratio:.2}");
}

async fn api_exec(docker: &Docker, container: &str) {
    let config = ExecConfig {
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        cmd: Some(vec!["true".to_owned()]),
        ..ExecConfig::default()
    };
    let exec = docker.create_exec(container, config).await.expect("an exec");
    let started = docker.start_exec(&exec.id, None).await.expect("a start");
    if let bollard::exec::StartExecResults::Attached { mut output, .. } = started {
        while output.next().await.is_some() {}
    }
    docker.inspect_exec(&exec.id).await.expect("a status");
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut bench = Bench {
        podman: false,
        only: None,
    };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--engine" => bench.podman = arguments.next().as_deref() == Some("podman"),
            "--only" => bench.only = arguments.next(),
            _ => {}
        }
    }
    let guest = Sandbox::builder(bench.config(ExecMode::Guest)).provision().await?;
    let engine = Sandbox::builder(bench.config(ExecMode::Engine)).provision().await?;
    let address = engine.info()["engine"].as_str().unwrap_or_default().to_owned();
    let docker = Docker::connect_with_unix(&address, 120, bollard::API_DEFAULT_VERSION).expect("an engine");
    let docker = docker.negotiate_version().await.expect("a version");
    let container = engine.id().expect("an id");

    if bench.wants("run") {
        let (mut ours, mut modes, mut api, mut bare) = (vec![], vec![], vec![], vec![]);
        for round in 0..60 {
            let at = Instant::now();
            guest.run(["true"]).await?;
            ours.push(at.elapsed());
            let at = Instant::now();
            let child = tokio::process::Command::new("busybox")
                .arg("true")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn();
            child.expect("a child").wait_with_output().await.expect("an end");
            bare.push(at.elapsed());
            if round % 3 == 0 {
                let at = Instant::now();
                api_exec(&docker, &container).await;
                api.push(at.elapsed());
                let at = Instant::now();
                engine.run(["true"]).await?;
                modes.push(at.elapsed());
            }
        }
        let (ours, modes, api, bare) = (median(ours), median(modes), median(api), median(bare));
        report("run true, guest", ours, "tokio::process", bare);
        report("run true, guest", ours, "Engine API exec", api);
        report("run true, engine mode", modes, "Engine API exec", api);
    }
    if bench.wants("cut") {
        let sandbox = Sandbox::builder(bench.closed()).provision().await?;
        let network = if bench.podman { "podman" } else { "bridge" };
        let (mut ours, mut bare) = (vec![], vec![]);
        for _ in 0..15 {
            let at = Instant::now();
            sandbox.prepare_execution(Routes::none()).await?;
            ours.push(at.elapsed());
            sandbox.prepare_setup().await?;
            // The other box is on the same network, and is connected and disconnected by the engine alone.
            let container = engine.id().expect("an id");
            let request = NetworkDisconnectRequest {
                container: container.clone(),
                force: Some(false),
            };
            let at = Instant::now();
            docker.disconnect_network(network, request).await.expect("a disconnect");
            bare.push(at.elapsed());
            let request = NetworkConnectRequest {
                container,
                endpoint_config: None,
            };
            docker.connect_network(network, request).await.expect("a connect");
        }
        sandbox.stop().await?;
        report("prepare_execution", median(ours), "engine's disconnect", median(bare));
    }
    if bench.wants("echo") {
        let mut process = guest.spawn(["cat"]).await?;
        let (mut stdin, mut stdout) = (
            process.stdin.take().expect("stdin"),
            process.stdout.take().expect("stdout"),
        );
        let child = tokio::process::Command::new("busybox")
            .arg("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.expect("a child");
        let (mut bare_in, mut bare_out) = (child.stdin.take().expect("stdin"), child.stdout.take().expect("stdout"));
        let (mut ours, mut bare) = (vec![], vec![]);
        let mut line = [0; 5];
        for _ in 0..2000 {
            let at = Instant::now();
            stdin.write_all(b"ping\n").await.expect("a write");
            stdout.read_exact(&mut line).await.expect("a read");
            ours.push(at.elapsed());
            let at = Instant::now();
            bare_in.write_all(b"ping\n").await.expect("a write");
            bare_out.read_exact(&mut line).await.expect("a read");
            bare.push(at.elapsed());
        }
        report("echo of a line", median(ours), "bare pipe", median(bare));
        drop((bare_in, child));
    }
    if bench.wants("stream") {
        const BYTES: u64 = 1 << 30;
        let command = ["head", "-c", "1073741824", "/dev/zero"];
        let (mut ours, mut bare) = (vec![], vec![]);
        for _ in 0..3 {
            let at = Instant::now();
            let mut process = guest.spawn(Command::new(command)).await?;
            let read = drain(process.stdout.take().expect("stdout")).await;
            assert_eq!(read, BYTES);
            ours.push(at.elapsed());
            let at = Instant::now();
            let child = tokio::process::Command::new("busybox")
                .args(command)
                .stdout(Stdio::piped())
                .spawn();
            assert_eq!(
                drain(child.expect("a child").stdout.take().expect("stdout")).await,
                BYTES
            );
            bare.push(at.elapsed());
        }
        report("1 GiB of stdout", median(ours), "bare pipe", median(bare));
    }
    if bench.wants("files") {
        let content = bytes::Bytes::from(vec![7_u8; 100 << 20]);
        let place = std::env::temp_dir().join(format!("bench-docker-{}", std::process::id()));
        let (mut writes, mut reads, mut bare_writes, mut bare_reads) = (vec![], vec![], vec![], vec![]);
        for _ in 0..3 {
            let at = Instant::now();
            guest.write("large", content.clone()).await?;
            writes.push(at.elapsed());
            let at = Instant::now();
            assert_eq!(guest.read("large").await?.len(), content.len());
            reads.push(at.elapsed());
            let at = Instant::now();
            tokio::fs::write(&place, &content).await.expect("a write");
            bare_writes.push(at.elapsed());
            let at = Instant::now();
            assert_eq!(tokio::fs::read(&place).await.expect("a read").len(), content.len());
            bare_reads.push(at.elapsed());
        }
        let _ = std::fs::remove_file(&place);
        report("write 100 MiB", median(writes), "local file", median(bare_writes));
        report("read 100 MiB", median(reads), "local file", median(bare_reads));
    }
    if bench.wants("provision") {
        let image = if bench.podman {
            "localhost/sandbox-test/busybox:latest"
        } else {
            "sandbox-test/busybox:latest"
        };
        let (mut ours, mut bare) = (vec![], vec![]);
        for _ in 0..7 {
            let at = Instant::now();
            let sandbox = Sandbox::builder(bench.config(ExecMode::Guest)).provision().await?;
            sandbox.run(["true"]).await?;
            ours.push(at.elapsed());
            sandbox.stop().await?;
            let at = Instant::now();
            let body = ContainerCreateBody {
                image: Some(image.to_owned()),
                cmd: Some(vec!["sleep".into(), "1000".into()]),
                ..ContainerCreateBody::default()
            };
            let created = docker.create_container(None, body).await.expect("a container");
            docker.start_container(&created.id, None).await.expect("a start");
            bare.push(at.elapsed());
            let options = bollard::query_parameters::RemoveContainerOptionsBuilder::default()
                .force(true)
                .v(true)
                .build();
            docker.kill_container(&created.id, None).await.expect("a kill");
            docker
                .remove_container(&created.id, Some(options))
                .await
                .expect("a removal");
        }
        report(
            "provision to the first output",
            median(ours),
            "create + start",
            median(bare),
        );
    }
    if bench.wants("load") {
        load(&bench).await?;
    }
    if bench.wants("live") {
        let before = (resident(), processes());
        let mut live = Vec::new();
        for _ in 0..64 {
            live.push(guest.spawn(["cat"]).await?);
        }
        let after = (resident(), processes());
        println!(
            "64 live processes                  {} KiB of ours each, {} more processes of the host (the 64 programs among them)",
            after.0.saturating_sub(before.0) / 64,
            after.1.saturating_sub(before.1)
        );
    }
    guest.stop().await?;
    engine.stop().await
}

/// 64 boxes at once, then 20,000 commands over them with 256 in flight.
async fn load(bench: &Bench) -> Result<()> {
    const BOXES: usize = 64;
    const COMMANDS: usize = 20_000;
    let descriptors = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let before = descriptors();
    let at = Instant::now();
    let made = (0..BOXES).map(|_| tokio::spawn(Sandbox::builder(bench.config(ExecMode::Guest)).provision()));
    let mut sandboxes = Vec::new();
    for made in made.collect::<Vec<_>>() {
        sandboxes.push(made.await.expect("a task")?);
    }
    println!("{BOXES} boxes at once                  {:>12.2?}", at.elapsed());
    let at = Instant::now();
    let mut running = tokio::task::JoinSet::new();
    for number in 0..COMMANDS {
        if running.len() >= 256 {
            running.join_next().await.expect("one").expect("a task")?;
        }
        let view = sandboxes[number % BOXES].view();
        running.spawn(async move {
            let output = view.run(["echo", &number.to_string()]).await?;
            assert_eq!(output.stdout_lossy(), format!("{number}\n"));
            Result::<()>::Ok(())
        });
    }
    while let Some(ended) = running.join_next().await {
        ended.expect("a task")?;
    }
    let took = at.elapsed();
    println!(
        "{COMMANDS} commands, 256 in flight     {took:>12.2?}   {:.0} a second",
        COMMANDS as f64 / took.as_secs_f64()
    );
    let stopping: Vec<_> = sandboxes
        .into_iter()
        .map(|sandbox| tokio::spawn(async move { sandbox.stop().await }))
        .collect();
    for stopped in stopping {
        stopped.await.expect("a task")?;
    }
    println!("descriptors before and after       {before} {}", descriptors());
    Ok(())
}

async fn drain(mut stream: impl tokio::io::AsyncRead + Unpin) -> u64 {
    let mut buffer = vec![0; 256 << 10];
    let mut total = 0;
    loop {
        match stream.read(&mut buffer).await.expect("a read") {
            0 => return total,
            count => total += count as u64,
        }
    }
}

/// Resident memory of this process in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

fn processes() -> usize {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .bytes()
                .all(|byte| byte.is_ascii_digit())
        })
        .count()
}
