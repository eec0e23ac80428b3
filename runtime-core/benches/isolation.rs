//! Boxes of namespaces against bubblewrap, and what many of them cost, in one run.
//!
//! `cargo bench -p runtime-core --features isolation --bench isolation` prints medians and ratios. Under `cargo test` it
//! runs each measurement once and small, to see that it works.

#[cfg(all(feature = "isolation", target_os = "linux"))]
mod measure {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use runtime_core::cache::CacheDir;
    use runtime_core::subprocess::{SetupNetwork, SubprocessConfig, isolation};
    use runtime_core::{LeasePolicy, Sandbox};
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

    type Failure = Box<dyn std::error::Error>;
    type Outcome<T = ()> = Result<T, Failure>;

    pub(super) fn run(quick: bool) -> Outcome {
        if let Err(unavailable) = isolation::availability() {
            println!("SKIPPED: bench isolation: {unavailable}");
            return Ok(());
        }
        let runtime = tokio::runtime::Runtime::new()?;
        let cache = tempfile::tempdir()?;
        runtime.block_on(async {
            first_output(cache.path(), if quick { 1 } else { 60 }).await?;
            commands(cache.path(), if quick { 1 } else { 300 }).await?;
            many(cache.path(), if quick { 2 } else { 500 }).await?;
            shared_root(cache.path(), if quick { 2 } else { 100 }).await
        })
    }

    fn median(mut times: Vec<Duration>) -> f64 {
        times.sort();
        times
            .get(times.len() / 2)
            .map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
    }

    fn builder(cache: &Path, config: SubprocessConfig) -> runtime_core::Builder {
        Sandbox::builder(config).cache(CacheDir::at(cache))
    }

    /// From nothing to the first byte of a program's output.
    async fn first_output(cache: &Path, times: usize) -> Outcome {
        let has_bwrap = bwrap().status().is_ok_and(|status| status.success());
        let (mut ours, mut bare, mut theirs, mut ends) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..times {
            let started = Instant::now();
            let sandbox = builder(cache, SubprocessConfig::namespaces()).provision().await?;
            let output = sandbox.run(["echo", "hi"]).await?;
            ours.push(started.elapsed());
            assert_eq!(output.stdout_lossy(), "hi\n");
            let started = Instant::now();
            sandbox.stop().await?;
            ends.push(started.elapsed());

            let started = Instant::now();
            let off = builder(cache, SubprocessConfig::namespaces()).leases(LeasePolicy::Off);
            let sandbox = off.provision().await?;
            sandbox.run(["echo", "hi"]).await?;
            bare.push(started.elapsed());
            sandbox.stop().await?;

            if has_bwrap {
                let started = Instant::now();
                let output = bwrap().stdout(Stdio::piped()).output()?;
                theirs.push(started.elapsed());
                assert_eq!(output.stdout, b"hi\n");
            }
        }
        let least = |times: &[Duration]| times.iter().min().map_or(f64::NAN, |time| time.as_secs_f64() * 1e3);
        let (our_least, their_least) = (least(&ours), least(&theirs));
        let (ours, bare, theirs) = (median(ours), median(bare), median(theirs));
        println!(
            "provision to first output           {ours:.1} ms, without a lease {bare:.1} ms; deletion {:.1} ms",
            median(ends)
        );
        match has_bwrap {
            true => println!(
                "bwrap doing the same                {theirs:.1} ms, ratio {:.2}; the least of each {our_least:.1} and {their_least:.1} ms, ratio {:.2}",
                ours / theirs,
                our_least / their_least
            ),
            false => println!("SKIPPED: bench isolation: no bwrap here that works"),
        }
        Ok(())
    }

    fn bwrap() -> Command {
        let mut command = Command::new("bwrap");
        command
            .args([
                "--ro-bind",
                "/",
                "/",
                "--dev",
                "/dev",
                "--proc",
                "/proc",
                "--tmpfs",
                "/tmp",
                "--tmpfs",
                "/run",
            ])
            .args([
                "--tmpfs",
                "/home",
                "--tmpfs",
                "/root",
                "--unshare-all",
                "--die-with-parent",
                "--new-session",
            ])
            .args(["--cap-drop", "ALL", "echo", "hi"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// What goes on in a box that stands.
    async fn commands(cache: &Path, times: usize) -> Outcome {
        let sandbox = builder(cache, SubprocessConfig::namespaces()).provision().await?;
        let (mut runs, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..times {
            let started = Instant::now();
            assert!(sandbox.run(["true"]).await?.success());
            runs.push(started.elapsed());
            let started = Instant::now();
            let output = tokio::process::Command::new("true")
                .stdin(Stdio::null())
                .output()
                .await?;
            assert!(output.status.success());
            bare.push(started.elapsed());
        }
        let (runs, bare) = (median(runs), median(bare));
        println!(
            "run `true`                          {runs:.2} ms, on the host {bare:.2} ms, ratio {:.2}",
            runs / bare
        );

        let rounds = 100 * times as u32;
        let mut process = sandbox.spawn(["cat"]).await?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let ours = echo(input.ok_or("no stdin")?, output.ok_or("no stdout")?, rounds).await?;
        process.wait().await?;
        let mut process = tokio::process::Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let bare = echo(input.ok_or("no stdin")?, output.ok_or("no stdout")?, rounds).await?;
        process.wait().await?;
        println!(
            "echo of a line                      {ours:.1} us, by a pipe on the host {bare:.1} us, ratio {:.2}",
            ours / bare
        );

        let megabytes = if times > 1 { 1 << 10 } else { 10 };
        let count = format!("{megabytes}M");
        let head = ["head", "-c", &count, "/dev/zero"];
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..if times > 1 { 5 } else { 1 } {
            let mut process = sandbox.spawn(head).await?;
            ours.push(drain(process.stdout.take().ok_or("no stdout")?, megabytes).await?);
            process.wait().await?;
            let mut process = tokio::process::Command::new(head[0])
                .args(&head[1..])
                .stdout(Stdio::piped())
                .spawn()?;
            bare.push(drain(process.stdout.take().ok_or("no stdout")?, megabytes).await?);
            process.wait().await?;
        }
        let rate = |times| megabytes as f64 * 1.048_576 / median(times);
        let (ours, bare) = (rate(ours), rate(bare));
        println!(
            "{megabytes} MiB of stdout                  {ours:.2} GB/s, by a pipe on the host {bare:.2} GB/s, ratio {:.2}",
            ours / bare
        );
        sandbox.stop().await?;

        let mut config = SubprocessConfig::namespaces();
        config.setup_network = SetupNetwork::Host;
        let sandbox = builder(cache, config).provision().await?;
        let mut runs = Vec::new();
        for _ in 0..times {
            let started = Instant::now();
            assert!(sandbox.run(["true"]).await?.success());
            runs.push(started.elapsed());
        }
        println!("run `true` on the host's network    {:.2} ms", median(runs));
        sandbox.stop().await?;
        Ok(())
    }

    /// Microseconds from a line written to the same line read.
    async fn echo(mut input: impl AsyncWrite + Unpin, mut output: impl AsyncRead + Unpin, rounds: u32) -> Outcome<f64> {
        let mut buffer = [0; 16];
        let started = Instant::now();
        for _ in 0..rounds {
            input.write_all(b"a line of input\n").await?;
            output.read_exact(&mut buffer).await?;
        }
        Ok((started.elapsed() / rounds).as_secs_f64() * 1e6)
    }

    /// How long that many mebibytes take.
    async fn drain(mut output: impl AsyncRead + Unpin, megabytes: usize) -> Outcome<Duration> {
        let mut buffer = vec![0; 256 << 10];
        let started = Instant::now();
        let mut sum = 0;
        loop {
            match output.read(&mut buffer).await? {
                0 => break,
                count => sum += count,
            }
        }
        assert_eq!(sum, megabytes << 20);
        Ok(started.elapsed())
    }

    /// What this machine has left, in KiB.
    fn available() -> Outcome<i64> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
        Ok(line.ok_or("no MemAvailable")?.trim_end_matches(" kB").trim().parse()?)
    }

    async fn many(cache: &Path, count: usize) -> Outcome {
        let before = available()?;
        let started = Instant::now();
        let mut starting = tokio::task::JoinSet::new();
        for _ in 0..count {
            let provision = builder(cache, SubprocessConfig::namespaces()).provision();
            starting.spawn(provision);
        }
        let mut boxes = Vec::new();
        while let Some(started) = starting.join_next().await {
            boxes.push(started??);
        }
        let took = started.elapsed();
        for sandbox in &boxes {
            assert!(sandbox.run(["true"]).await?.success());
        }
        let used = (before - available()?) as f64 / 1024.0;
        println!(
            "{count} boxes at once: {:.2} MiB each in all (MemAvailable), made in {:.1} s, {:.1} ms each",
            used / count as f64,
            took.as_secs_f64(),
            took.as_secs_f64() * 1e3 / count as f64
        );
        let started = Instant::now();
        let mut stopping = tokio::task::JoinSet::new();
        for sandbox in boxes {
            stopping.spawn(async move { sandbox.stop().await });
        }
        while let Some(stopped) = stopping.join_next().await {
            stopped??;
        }
        println!(
            "their deletion                      {:.1} s",
            started.elapsed().as_secs_f64()
        );
        Ok(())
    }

    async fn shared_root(cache: &Path, count: usize) -> Outcome {
        let Some(busybox) = ["/bin/busybox", "/usr/bin/busybox"]
            .into_iter()
            .find(|path| Path::new(path).is_file())
        else {
            println!("SKIPPED: bench isolation: no busybox for a root");
            return Ok(());
        };
        let root = tempfile::tempdir()?;
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755))?;
        fs::create_dir(root.path().join("bin"))?;
        fs::copy(busybox, root.path().join("bin/busybox"))?;
        fs::write(root.path().join("large"), vec![1; 64 << 20])?;
        let mut config = SubprocessConfig::namespaces();
        config.root = root.path().to_str().ok_or("not UTF-8")?.to_owned();
        let mut boxes = Vec::new();
        let mut times = Vec::new();
        for _ in 0..count {
            let started = Instant::now();
            let sandbox = builder(cache, config.clone()).provision().await?;
            let output = sandbox.run(["busybox", "true"]).await?;
            times.push(started.elapsed());
            assert!(output.success() && sandbox.info()["root_by"] == "overlay");
            boxes.push(sandbox);
        }
        let copied: u64 = size(&cache.join("runtimes/subprocess"))?;
        println!(
            "{count} boxes over one root of 66 MB     {copied} bytes copied, provision to output {:.1} ms",
            median(times)
        );
        for sandbox in boxes {
            sandbox.stop().await?;
        }
        Ok(())
    }

    /// Bytes of the regular files below a directory.
    fn size(dir: &Path) -> Outcome<u64> {
        let mut sum = 0;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let info = entry.metadata()?;
            if info.is_dir() {
                // overlayfs's own, which nobody but it may look into.
                sum += size(&entry.path()).unwrap_or(0);
            } else if info.is_file() {
                sum += info.len();
            }
        }
        Ok(sum)
    }
}

fn main() {
    #[cfg(all(feature = "isolation", target_os = "linux"))]
    if let Err(error) = measure::run(!std::env::args().any(|argument| argument == "--bench")) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
