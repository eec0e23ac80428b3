//! A guest as an ordinary child process, over either kind of link.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use runtime_core::guest::{Link, LinkOptions, Rendezvous, SpawnOptions, Token, availability};
use runtime_core::{Env, Exec, ExitStatus, Process};
use tempfile::TempDir;
use tokio::io::AsyncReadExt;

/// Longest that any step of a test may take.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Which kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Socket,
    Stdio,
}

/// A guest with its link. Ends it when dropped.
pub(crate) struct Guest {
    pub(crate) link: Link,
    pub(crate) directory: TempDir,
    child: Child,
}

impl Guest {
    pub(crate) async fn start(kind: Kind) -> Self {
        Self::start_with(kind, |program| Command::new(program)).await
    }

    /// Starts the program through what `wrap` makes of its path.
    pub(crate) async fn start_with(kind: Kind, wrap: impl FnOnce(&Path) -> Command) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let private = directory.path().join("private");
        let options = LinkOptions::default();
        match kind {
            Kind::Socket => {
                let rendezvous = Rendezvous::new(&private, "box", &directory.path().join("cache")).unwrap();
                let mut command = wrap(&rendezvous.directory().join("guest"));
                let (name, value) = rendezvous.token().variable();
                command.arg("--socket").arg(rendezvous.directory().join("socket"));
                let child = spawn(environment(&mut command).env(name, value).stdin(Stdio::null()));
                let link = rendezvous.accept(LONG, options).await.unwrap();
                Self { link, directory, child }
            }
            Kind::Stdio => {
                let program = directory.path().join("guest");
                write_program(&program);
                let token = Token::generate().unwrap();
                let (name, value) = token.variable();
                let mut command = wrap(&program);
                command
                    .arg("--stdio")
                    .env(name, value)
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped());
                let mut child = spawn(environment(&mut command).env(token.variable().0, token.variable().1));
                let reader = tokio::process::ChildStdout::from_std(child.stdout.take().unwrap()).unwrap();
                let writer = tokio::process::ChildStdin::from_std(child.stdin.take().unwrap()).unwrap();
                let link = Link::over_stdio(reader, writer, &token, options).await.unwrap();
                Self { link, directory, child }
            }
        }
    }

    /// The process id of what was started: the guest, unless it was wrapped.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of the guest process.
    pub(crate) async fn exit(&mut self) -> std::process::ExitStatus {
        within(async {
            loop {
                if let Some(status) = self.child.try_wait().unwrap() {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) async fn spawn<const N: usize>(&self, argv: [&str; N]) -> Process {
        within(self.link.spawn(&piped(argv), &SpawnOptions::default()))
            .await
            .unwrap()
    }

    pub(crate) async fn run<const N: usize>(&self, argv: [&str; N]) -> (ExitStatus, Vec<u8>, Vec<u8>) {
        let process = within(self.link.spawn(&exec(argv), &SpawnOptions::default()))
            .await
            .unwrap();
        within(collect(process)).await
    }

    /// Standard output of a shell script that succeeds.
    pub(crate) async fn shell(&self, script: &str) -> String {
        let (status, stdout, stderr) = self.run(["sh", "-c", script]).await;
        assert!(
            status.success(),
            "{script}: {status}: {}",
            String::from_utf8_lossy(&stderr)
        );
        String::from_utf8(stdout).unwrap().trim_end().to_owned()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.link.close();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A child of another test, between its fork and its program, may hold the file open that was just written.
fn spawn(command: &mut Command) -> Child {
    loop {
        match command.spawn() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            spawned => return spawned.unwrap(),
        }
    }
}

fn environment(command: &mut Command) -> &mut Command {
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("FROM_IMAGE", "yes")
}

pub(crate) fn write_program(path: &Path) {
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(path)
        .unwrap();
    std::io::Write::write_all(&mut file, availability().expect("the guest was built")).unwrap();
}

pub(crate) fn exec<const N: usize>(argv: [&str; N]) -> Exec {
    Exec {
        argv: argv.iter().map(Into::into).collect(),
        env: Env::new(),
        workdir: "/".into(),
        stdin: runtime_core::StdinMode::Null,
    }
}

/// The same with a pipe as standard input.
pub(crate) fn piped<const N: usize>(argv: [&str; N]) -> Exec {
    Exec {
        stdin: runtime_core::StdinMode::Piped,
        ..exec(argv)
    }
}

/// Everything that a program prints, and how it ends.
pub(crate) async fn collect(mut process: Process) -> (ExitStatus, Vec<u8>, Vec<u8>) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut out = process.stdout.take().unwrap();
    let mut err = process.stderr.take().unwrap();
    let (read_out, read_err) = tokio::join!(out.read_to_end(&mut stdout), err.read_to_end(&mut stderr));
    read_out.unwrap();
    read_err.unwrap();
    (process.wait().await.unwrap(), stdout, stderr)
}

/// The result of a step that must not take for ever.
pub(crate) async fn within<T>(step: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, step)
        .await
        .expect("a step of the test takes too long")
}

/// Waits until a condition of the outside world holds.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + LONG;
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// One test for each kind of link.
macro_rules! over_both_links {
    ($($(#[$meta:meta])* async fn $name:ident($guest:ident: Guest) $body:block)*) => {$(
        mod $name {
            use super::*;

            async fn test(#[allow(unused_mut, reason = "some tests change it")] mut $guest: Guest) $body

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn over_a_socket() {
                test(Guest::start(Kind::Socket).await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn over_stdio() {
                test(Guest::start(Kind::Stdio).await).await;
            }
        }
    )*};
}

pub(crate) use over_both_links;
