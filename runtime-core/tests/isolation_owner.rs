//! An owner of boxes of namespaces is killed at random moments. Without any reaper, the kernel leaves neither a process
//! nor a mount of them. As root, and as an ordinary user.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "subprocess_target/as_user.rs"]
mod as_user;
#[path = "subprocess_target/isolation.rs"]
mod isolation;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use runtime_core::cache::CacheDir;
use runtime_core::subprocess::{SetupNetwork, SubprocessConfig};
use runtime_core::{Sandbox, names};

const KILLS: u32 = 100;
/// The latest moment after the start of the owner.
const LATEST: Duration = Duration::from_millis(250);
/// What the kernel has for its work.
const PATIENCE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    if let Some(cache) = std::env::var_os("OWNER_CACHE") {
        return own(Path::new(&cache));
    }
    if std::env::args().any(|argument| argument == "--list") {
        println!("a_killed_owner_leaves_neither_process_nor_mount: test");
        return ExitCode::SUCCESS;
    }
    isolation::run("isolation_owner", as_whom_the_tests_run)
}

fn as_whom_the_tests_run() -> ExitCode {
    kill_owners(if rustix::process::geteuid().is_root() {
        "as root"
    } else {
        "as an ordinary user"
    });
    if rustix::process::geteuid().is_root() {
        // The copy that runs as the user comes back here, and is not root.
        return as_user::run(|| ExitCode::SUCCESS);
    }
    println!("test a_killed_owner_leaves_neither_process_nor_mount ... ok");
    println!("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
    ExitCode::SUCCESS
}

/// Makes boxes with programs in them, for as long as it lives.
fn own(cache: &Path) -> ExitCode {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut boxes = Vec::new();
        loop {
            let mut config = SubprocessConfig::namespaces();
            // Every other one has its setup on the host's network, for which more processes have a part in it.
            if boxes.len() % 2 == 1 {
                config.setup_network = SetupNetwork::Host;
            }
            let sandbox = Sandbox::builder(config).cache(CacheDir::at(cache));
            let sandbox = sandbox.provision().await.unwrap();
            // It cannot be told from the next one by anything that its processes do: some ignore signals, some leave
            // their session.
            let script = "trap '' TERM HUP; setsid sleep 1000 & sleep 1000";
            sandbox.run_background(["sh", "-c", script], "log").await.unwrap();
            println!("ready");
            boxes.push(sandbox);
            if boxes.len() > 2 {
                boxes.remove(0).stop().await.unwrap();
            }
        }
    })
}

fn kill_owners(who: &str) {
    let mut with_boxes = 0;
    for kill in 0..KILLS {
        let dir = tempfile::tempdir().unwrap();
        let mut owner = Command::new(std::env::current_exe().unwrap())
            .env("OWNER_CACHE", dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let moment =
            LATEST.mul_f64(f64::from(u32::from_str_radix(&names::random_hex(6), 16).unwrap()) / f64::from(1 << 24));
        std::thread::sleep(moment);
        owner.kill().unwrap();
        owner.wait().unwrap();
        let died = Instant::now();
        let seen = traces(dir.path());
        with_boxes += u32::from(
            fs::read_dir(dir.path().join("runtimes/subprocess")).is_ok_and(|mut found| found.next().is_some()),
        );
        loop {
            let found = traces(dir.path());
            if found.is_empty() {
                break;
            }
            assert!(
                died.elapsed() < PATIENCE,
                "{who}, kill {kill} after {moment:?}: still there: {found:?}, at first {seen:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        // The workdirs stay, for the lease to be found by.
    }
    println!("{KILLS} kills {who}, {with_boxes} of them of owners of boxes");
    assert!(
        with_boxes > KILLS / 3,
        "the kills came too early: {with_boxes} owners had boxes"
    );
}

/// Processes and mounts of boxes below a cache directory. Another user's processes tell nothing, and are not the box's.
fn traces(cache: &Path) -> Vec<String> {
    let wanted = cache.as_os_str().as_bytes();
    let contains = |path: &Path, wanted: &[u8]| {
        fs::read(path).is_ok_and(|text| text.windows(wanted.len()).any(|window| window == wanted))
    };
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if pid == std::process::id() {
            continue;
        }
        if contains(&entry.path().join("environ"), wanted) {
            found.push(format!("process {pid}"));
        }
        // The workdir is a mount of every box, and its directory is below the cache.
        if contains(&entry.path().join("mountinfo"), cache.file_name().unwrap().as_bytes()) {
            found.push(format!("a mount in the namespace of {pid}"));
        }
    }
    found
}
