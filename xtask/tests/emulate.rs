//! `cargo xtask emulate` as people use it: the built program, real signals, a client that is pointed at it.
#![cfg(all(feature = "emulate", target_os = "linux"))]

mod support;

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use support::{World, code, line, stderr, stdout};

/// An emulator with a directory for temporary files of its own.
struct Emulated {
    child: Child,
    variables: Vec<(String, String)>,
    /// Kept, so that the emulator can write to it.
    _stdout: BufReader<std::process::ChildStdout>,
}

fn temporary(world: &World) -> PathBuf {
    let dir = world.path("tmp");
    std::fs::create_dir_all(&dir).expect("made");
    dir
}

fn emulate(world: &World, options: &[&str]) -> Emulated {
    let mut command = world.xtask(["emulate", "e2b"].iter().chain(options));
    command.env("TMPDIR", temporary(world)).stdout(Stdio::piped());
    let mut child = command.spawn().expect("xtask starts");
    let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    let variables = (0..4).map(|_| {
        let line = line(&mut stdout);
        let (name, value) = line
            .strip_prefix("export ")
            .and_then(|line| line.split_once('='))
            .unwrap_or_else(|| panic!("not a variable: {line:?}"));
        (name.to_owned(), value.to_owned())
    });
    Emulated {
        variables: variables.collect(),
        child,
        _stdout: stdout,
    }
}

impl Emulated {
    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid");
        kill_process(Pid::from_raw(pid).expect("a pid"), signal).expect("it still runs");
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The directories of emulators that are left.
fn left(world: &World) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(temporary(world)).expect("readable");
    entries
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.to_string_lossy().contains("e2b-emulator-"))
        .collect()
}

/// Whether boxes may have files of their own, without which a box would write to this machine's.
fn may_run() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: the E2B emulator needs root, for a mount namespace per box");
        assert!(std::env::var_os("CI").is_none(), "this must not be skipped in CI");
    }
    is_root
}

fn run_in(world: &World, emulated: &Emulated, argv: &[&str]) -> Command {
    let options = ["run", "--runtime", "e2b", "--"];
    let mut command = world.xtask(options.iter().chain(argv));
    command
        .envs(emulated.variables.iter().map(|(name, value)| (name, value)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[test]
fn a_client_is_pointed_at_it_and_a_signal_leaves_nothing() {
    for signal in [Signal::TERM, Signal::INT] {
        let world = World::new();
        let mut emulated = emulate(&world, &["--build-time", "0"]);
        let names: Vec<&str> = emulated.variables.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "NO_PROXY"]);
        if !may_run() {
            return;
        }
        let output = run_in(&world, &emulated, &["sh", "-c", "echo in a box; exit 3"])
            .output()
            .expect("it ran");
        assert_eq!(
            (stdout(&output).as_str(), code(&output)),
            ("in a box\n", 3),
            "{}",
            stderr(&output)
        );
        assert_eq!(left(&world).len(), 1);
        emulated.signal(signal);
        assert_eq!(emulated.child.wait().expect("it ends").code(), Some(0));
        assert_eq!(left(&world), Vec::<PathBuf>::new());
    }
}

#[test]
fn what_a_killed_one_left_is_removed_by_the_next() {
    let world = World::new();
    let mut first = emulate(&world, &[]);
    if !may_run() {
        return;
    }
    let mut client = run_in(&world, &first, &["sh", "-c", "echo up; exec sleep 987654"])
        .spawn()
        .expect("it starts");
    let mut client_stdout = BufReader::new(client.stdout.take().expect("a pipe"));
    assert_eq!(line(&mut client_stdout), "up");
    first.signal(Signal::KILL);
    first.child.wait().expect("it ends");
    assert_eq!(left(&world).len(), 1, "nobody could clean up");
    let second = emulate(&world, &[]);
    assert_eq!(left(&world).len(), 1, "only its own");
    let sleeps = || {
        std::fs::read_dir("/proc")
            .expect("/proc")
            .flatten()
            .any(|entry| std::fs::read(entry.path().join("cmdline")).is_ok_and(|words| words == b"sleep\x00987654\x00"))
    };
    assert!(!sleeps(), "the box's program runs on");
    drop(second);
    let _ = client.kill();
    let _ = client.wait();
}

#[test]
fn a_command_behind_it_has_the_variables_and_gives_the_exit_code() {
    let world = World::new();
    let script = "echo $E2B_API_URL; test -n \"$E2B_API_KEY\" && exit 7";
    let mut command = world.xtask(["emulate", "e2b", "--", "sh", "-c", script]);
    let output = command.env("TMPDIR", temporary(&world)).output().expect("it runs");
    assert_eq!(code(&output), 7);
    assert!(stdout(&output).starts_with("http://127.0.0.1:"), "{}", stdout(&output));
    assert_eq!(left(&world), Vec::<PathBuf>::new());
}

#[test]
fn a_port_is_the_one_that_was_asked_for() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = free.local_addr().expect("bound").port().to_string();
    drop(free);
    let world = World::new();
    let emulated = emulate(&world, &["--port", &port]);
    let (_, url) = &emulated.variables[1];
    assert_eq!(url, &format!("http://127.0.0.1:{port}"));
}
