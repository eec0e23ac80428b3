//! The built front door, run in a world of its own, and ways to look at what it left behind.
#![allow(unreachable_pub, reason = "a test's module is private to it whatever it says")]
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// No run of a test may take longer.
const LIMIT: Duration = Duration::from_secs(60);

/// A directory for the files of one test, and a cache of its own, so that what a run leaves behind is seen.
pub struct World {
    dir: TempDir,
}

impl World {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().expect("a temporary directory"),
        }
    }

    /// The current directory of the runs.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("below the directory")).expect("made");
        std::fs::write(&path, content).expect("written");
        path
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// A FIFO, for programs to tell that they run.
    pub fn fifo(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).expect("a FIFO");
        path
    }

    fn cache(&self) -> PathBuf {
        self.path("cache")
    }

    /// The run of this world's boxes, which no other has.
    pub fn run_scope(&self) -> String {
        let dir = self.dir().file_name().expect("a name").to_string_lossy();
        format!("xtask-{}", dir.trim_start_matches('.'))
    }

    /// `xtask ARGS` with nothing on standard input.
    pub fn xtask<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command
            .args(args)
            .current_dir(self.dir())
            .env("SANDBOX_CACHE_DIR", self.cache())
            .env("VF_RUN_ID", self.run_scope())
            .env_remove("SANDBOX_TYPE")
            .stdin(Stdio::null());
        command
    }

    /// `xtask run OPTIONS -- ARGV` to its end.
    pub fn run(&self, options: &[&str], argv: &[&str]) -> Output {
        let mut command = self.xtask(["run"].iter().chain(options).chain(&["--"]).chain(argv));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("xtask starts");
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        finish(child, stdout, stderr)
    }

    /// `xtask run OPTIONS -- ARGV`, while it runs.
    pub fn start(&self, options: &[&str], argv: &[&str]) -> Running {
        self.start_into(options, argv, Stdio::piped())
    }

    /// As [`start`](Self::start), with a standard output of the caller's.
    pub fn start_into(&self, options: &[&str], argv: &[&str], stdout: impl Into<Stdio>) -> Running {
        let mut command = self.xtask(["run"].iter().chain(options).chain(&["--"]).chain(argv));
        command.stdin(Stdio::piped()).stdout(stdout).stderr(Stdio::piped());
        let mut child = command.spawn().expect("xtask starts");
        Running {
            stdin: child.stdin.take(),
            stdout: child.stdout.take().map(BufReader::new),
            stderr: BufReader::new(child.stderr.take().expect("a pipe")),
            child,
        }
    }

    /// The boxes that are there.
    pub fn boxes(&self) -> Vec<PathBuf> {
        let mut entries = self.entries();
        entries.retain(|path| path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()));
        entries
    }

    /// The boxes that are there, and what the runtime keeps beside them.
    fn entries(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.cache().join("runtimes/subprocess")) else {
            return Vec::new();
        };
        entries.map(|entry| entry.expect("readable").path()).collect()
    }

    /// Processes that were started in a box of this world and still run. A box marks its programs in their environment.
    pub fn processes(&self) -> Vec<Pid> {
        let marker = format!("RUNTIME_SANDBOX_DIR={}/", self.cache().display());
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
            let environ = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            if environ
                .split(|byte| *byte == 0)
                .any(|variable| variable.starts_with(marker.as_bytes()))
            {
                let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
                found.extend(pid.and_then(Pid::from_raw));
            }
        }
        found
    }

    /// Asserts that nothing is left of any box.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        assert_eq!(self.entries(), Vec::<PathBuf>::new());
        assert_eq!(self.processes(), Vec::new());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Also after a failed assertion no process may stay.
        for pid in self.processes() {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// A run in progress.
pub struct Running {
    child: Child,
    pub stdin: Option<ChildStdin>,
    /// Dropping it is what a reader does that goes away.
    pub stdout: Option<BufReader<ChildStdout>>,
    pub stderr: BufReader<ChildStderr>,
}

impl Running {
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid");
        kill_process(Pid::from_raw(pid).expect("a pid"), signal).expect("it still runs");
    }

    /// Reads one line of the program's output, without its end.
    pub fn line(&mut self) -> String {
        line(self.stdout.as_mut().expect("not closed"))
    }

    /// Waits for the end; what was not read of both streams comes with it. Reading ends with the last process that
    /// holds a stream, so a run that leaves one behind must close them first.
    pub fn finish(mut self) -> Output {
        drop(self.stdin.take());
        finish(self.child, self.stdout, Some(self.stderr))
    }
}

impl Running {
    /// Waits for the end although a program of the box that is left behind holds its streams. Returns the exit code.
    pub fn end(self) -> i32 {
        let Self { child, stderr, .. } = self;
        drop(stderr);
        let output = finish(child, None::<ChildStdout>, None::<ChildStderr>);
        code(&output)
    }

    /// What it says on standard error until it closes that.
    pub fn rest_of_stderr(&mut self) -> String {
        String::from_utf8_lossy(&rest(&mut self.stderr)).into_owned()
    }
}

/// Docker, reached through a socket of the test's own, on which deletions can be held up.
#[cfg(feature = "docker")]
pub struct Engine {
    socket: PathBuf,
    holds: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

#[cfg(feature = "docker")]
impl Engine {
    /// `None`, said loudly, where there is no engine with the test images.
    pub fn start(world: &World) -> Option<Self> {
        use std::sync::atomic::{AtomicBool, Ordering};

        let image = ["image", "inspect", "--format", "{{.Id}}", "sandbox-test/busybox:latest"];
        let answer = Command::new("docker").args(image).output();
        let reason = match answer {
            Ok(output) if output.status.success() => None,
            Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ")),
            Err(error) => Some(error.to_string()),
        };
        if let Some(reason) = reason {
            println!("SKIPPED: docker: {reason}");
            return None;
        }
        let socket = world.path("engine.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
        let holds = std::sync::Arc::new(AtomicBool::new(false));
        let held = holds.clone();
        std::thread::spawn(move || {
            for mut client in listener.incoming().flatten() {
                let held = held.clone();
                std::thread::spawn(move || {
                    // Each request has a connection of its own, so its first bytes say what it is.
                    let mut first = [0; 64 << 10];
                    let length = client.read(&mut first).unwrap_or_default();
                    if first.starts_with(b"DELETE ") && held.load(Ordering::SeqCst) {
                        // Until whoever asked goes away.
                        let _ = client.read(&mut first);
                        return;
                    }
                    let _ = pass(client, &first[..length]);
                });
            }
        });
        Some(Self { socket, holds })
    }

    /// Its address.
    pub fn host(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    /// Whether deletions get no answer.
    pub fn hold_deletions(&self, hold: bool) {
        self.holds.store(hold, std::sync::atomic::Ordering::SeqCst);
    }

    /// Ids of the containers of this world.
    pub fn containers(&self, world: &World) -> Vec<String> {
        let filter = format!("label=verifiers.run={}", world.run_scope());
        let output = Command::new("docker")
            .args(["ps", "--all", "--quiet", "--filter", &filter])
            .output();
        let output = output.expect("docker runs");
        assert!(output.status.success());
        stdout(&output).lines().map(str::to_owned).collect()
    }
}

#[cfg(feature = "docker")]
fn pass(client: std::os::unix::net::UnixStream, first: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::net::Shutdown;

    let mut engine = std::os::unix::net::UnixStream::connect("/var/run/docker.sock")?;
    engine.write_all(first)?;
    let (mut from_client, mut to_engine) = (client.try_clone()?, engine.try_clone()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from_client, &mut to_engine);
        let _ = to_engine.shutdown(Shutdown::Write);
    });
    let mut client = client;
    std::io::copy(&mut engine, &mut client)?;
    client.shutdown(Shutdown::Both)
}

/// Reads both streams to their ends and waits for the end of the process, but not for ever.
fn finish(
    mut child: Child,
    stdout: Option<impl Read + Send + 'static>,
    stderr: Option<impl Read + Send + 'static>,
) -> Output {
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid")).expect("a pid");
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let errors = std::thread::spawn(move || stderr.map(|mut stderr| rest(&mut stderr)));
        let stdout = stdout.map(|mut stdout| rest(&mut stdout)).unwrap_or_default();
        let stderr = errors.join().expect("read").unwrap_or_default();
        let status = child.wait().expect("waited");
        let _ = sender.send(Output { status, stdout, stderr });
    });
    match ended.recv_timeout(LIMIT) {
        Ok(output) => output,
        Err(_) => {
            let _ = kill_process(pid, Signal::KILL);
            panic!("the run did not end within {LIMIT:?}");
        }
    }
}

fn rest(reader: &mut impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).expect("readable");
    bytes
}

/// Reads one line, without its end.
pub fn line(reader: &mut impl BufRead) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).expect("readable text");
    line.trim_end().to_owned()
}

/// The exit code; a run of ours is never ended by a signal.
#[track_caller]
pub fn code(output: &Output) -> i32 {
    let shown = String::from_utf8_lossy(&output.stderr);
    output
        .status
        .code()
        .unwrap_or_else(|| panic!("ended by {}: {shown}", output.status))
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("text")
}
