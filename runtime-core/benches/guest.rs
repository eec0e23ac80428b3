//! The guest against what this machine can do without it, measured alternately in one run.
//!
//! `cargo bench -p runtime-core --features guest --bench guest` prints medians and ratios. Under `cargo test` it runs
//! each measurement once, to see that it works.

#[cfg(all(feature = "guest", target_os = "linux"))]
mod measure {
    use std::path::Path;
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use runtime_core::guest::{Link, LinkOptions, Rendezvous, SpawnOptions, Token, WriteFile, availability};
    use runtime_core::{Env, Exec, StdinMode};
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
    use tokio::process::{Child, Command};

    type Failure = Box<dyn std::error::Error>;
    type Outcome<T = ()> = Result<T, Failure>;

    fn exec(argv: &[&str]) -> Exec {
        Exec {
            argv: argv.iter().map(Into::into).collect(),
            env: Env::new(),
            workdir: "/".into(),
            stdin: StdinMode::Piped,
        }
    }

    fn bare(argv: &[&str]) -> std::io::Result<Child> {
        Command::new(argv[0])
            .args(&argv[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
    }

    async fn run_bare() -> Outcome {
        let mut child = bare(&["true"])?;
        drop(child.stdin.take());
        let output = child.wait_with_output().await?;
        assert!(output.status.success());
        Ok(())
    }

    async fn run_guest(link: &Link) -> Outcome {
        let options = SpawnOptions::default();
        let mut process = link.spawn(&exec(&["true"]), &options).await?;
        drop(process.stdin.take());
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let mut out = process.stdout.take().ok_or("no stdout")?;
        let mut err = process.stderr.take().ok_or("no stderr")?;
        let (out, err, status) = tokio::join!(
            out.read_to_end(&mut stdout),
            err.read_to_end(&mut stderr),
            process.wait()
        );
        out?;
        err?;
        assert!(status?.success());
        Ok(())
    }

    /// Time of one echo, over a thousand.
    async fn echo(
        mut input: impl AsyncWrite + Unpin,
        mut output: impl AsyncRead + Unpin,
        times: u32,
    ) -> Outcome<Duration> {
        let mut buffer = [0; 16];
        let start = Instant::now();
        for _ in 0..times {
            input.write_all(b"a line of input\n").await?;
            output.read_exact(&mut buffer).await?;
        }
        Ok(start.elapsed() / times)
    }

    async fn drain(mut output: impl AsyncRead + Unpin) -> Outcome<u64> {
        let mut buffer = vec![0; 256 << 10];
        let mut total = 0;
        loop {
            match output.read(&mut buffer).await? {
                0 => return Ok(total),
                count => total += count as u64,
            }
        }
    }

    fn median(mut times: Vec<Duration>) -> f64 {
        times.sort();
        times[times.len() / 2].as_secs_f64()
    }

    fn print(what: &str, floor: f64, guest: f64, unit: f64, name: &str) {
        println!(
            "{what:<34} floor {:>9.3} {name}  guest {:>9.3} {name}  ratio {:.2}",
            floor * unit,
            guest * unit,
            guest / floor
        );
    }

    async fn compare(kind: &str, link: &Link, directory: &Path, quick: bool) -> Outcome {
        let scale = |full: usize| if quick { 1 } else { full };
        let (mut floor, mut guest) = (Vec::new(), Vec::new());
        for _ in 0..scale(1000) {
            let start = Instant::now();
            run_bare().await?;
            floor.push(start.elapsed());
            let start = Instant::now();
            run_guest(link).await?;
            guest.push(start.elapsed());
        }
        print(&format!("{kind}: run true"), median(floor), median(guest), 1e3, "ms");

        let (mut floor, mut guest) = (Vec::new(), Vec::new());
        let options = SpawnOptions::default();
        for _ in 0..scale(15) {
            let mut cat = bare(&["cat"])?;
            let streams = (
                cat.stdin.take().ok_or("no stdin")?,
                cat.stdout.take().ok_or("no stdout")?,
            );
            floor.push(echo(streams.0, streams.1, scale(2000) as u32).await?);
            cat.wait().await?;
            let mut cat = link.spawn(&exec(&["cat"]), &options).await?;
            let streams = (
                cat.stdin.take().ok_or("no stdin")?,
                cat.stdout.take().ok_or("no stdout")?,
            );
            guest.push(echo(streams.0, streams.1, scale(2000) as u32).await?);
            cat.wait().await?;
        }
        print(
            &format!("{kind}: echo of a line"),
            median(floor),
            median(guest),
            1e6,
            "us",
        );

        let (mut floor, mut guest) = (Vec::new(), Vec::new());
        let size = if quick { 1 << 20 } else { 1u64 << 30 };
        let argv = ["head", "-c", &size.to_string(), "/dev/zero"];
        for _ in 0..scale(5) {
            let start = Instant::now();
            let mut head = bare(&argv)?;
            assert_eq!(drain(head.stdout.take().ok_or("no stdout")?).await?, size);
            floor.push(start.elapsed());
            head.wait().await?;
            let start = Instant::now();
            let mut head = link.spawn(&exec(&argv), &options).await?;
            assert_eq!(drain(head.stdout.take().ok_or("no stdout")?).await?, size);
            guest.push(start.elapsed());
            head.wait().await?;
        }
        print(
            &format!("{kind}: 1 GiB of stdout"),
            median(floor),
            median(guest),
            1.0,
            "s ",
        );

        let content = bytes::Bytes::from(vec![7; if quick { 1 << 20 } else { 100 << 20 }]);
        let path = directory.join("file");
        let (mut floor_write, mut guest_write, mut floor_read, mut guest_read) = (vec![], vec![], vec![], vec![]);
        for _ in 0..scale(9) {
            let start = Instant::now();
            tokio::fs::write(&path, &content).await?;
            floor_write.push(start.elapsed());
            let start = Instant::now();
            assert!(tokio::fs::read(&path).await?.len() == content.len());
            floor_read.push(start.elapsed());
            let start = Instant::now();
            link.write(&path, content.clone(), WriteFile::default()).await?;
            guest_write.push(start.elapsed());
            let start = Instant::now();
            assert!(link.read(&path, u64::MAX).await?.len() == content.len());
            guest_read.push(start.elapsed());
        }
        print(
            &format!("{kind}: write 100 MiB"),
            median(floor_write),
            median(guest_write),
            1e3,
            "ms",
        );
        print(
            &format!("{kind}: read 100 MiB"),
            median(floor_read),
            median(guest_read),
            1e3,
            "ms",
        );

        let mut pings = Vec::new();
        for _ in 0..scale(2000) {
            let start = Instant::now();
            link.ping().await?;
            pings.push(start.elapsed());
        }
        println!("{:<34} {:.1} us", format!("{kind}: ping"), median(pings) * 1e6);
        Ok(())
    }

    pub(super) async fn all(quick: bool) -> Outcome {
        let program = match availability() {
            Ok(program) => program,
            Err(reason) => {
                println!("SKIPPED: no guest: {reason}");
                return Ok(());
            }
        };
        println!("guest program: {} KiB", program.len() >> 10);
        let directory = tempfile::tempdir()?;
        let rendezvous = Rendezvous::new(
            &directory.path().join("private"),
            "box",
            &directory.path().join("cache"),
        )?;
        let (name, value) = rendezvous.token().variable();
        let path = rendezvous.directory().join("guest");
        let mut guest = Command::new(&path)
            .arg("--socket")
            .arg(rendezvous.directory().join("socket"))
            .env(name, value)
            .kill_on_drop(true)
            .spawn()?;
        let link = rendezvous
            .accept(Duration::from_secs(10), LinkOptions::default())
            .await?;
        compare("socket", &link, directory.path(), quick).await?;
        drop(link);
        guest.wait().await?;

        let token = Token::generate()?;
        let (name, value) = token.variable();
        let mut guest = Command::new(&path)
            .arg("--stdio")
            .env(name, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let (reader, writer) = (
            guest.stdout.take().ok_or("no stdout")?,
            guest.stdin.take().ok_or("no stdin")?,
        );
        let link = Link::over_stdio(reader, writer, &token, LinkOptions::default()).await?;
        compare("stdio", &link, directory.path(), quick).await?;
        drop(link);
        guest.wait().await?;
        Ok(())
    }
}

#[cfg(all(feature = "guest", target_os = "linux"))]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let quick = !std::env::args().any(|argument| argument == "--bench");
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(measure::all(quick))
}

#[cfg(not(all(feature = "guest", target_os = "linux")))]
fn main() {}
