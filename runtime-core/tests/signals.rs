//! Programs start with nothing ignored and nothing blocked, whatever their owner ignores.
#![cfg(all(feature = "subprocess", target_os = "linux"))]

use std::process::Command;

use runtime_core::cache::CacheDir;
use runtime_core::subprocess::SubprocessConfig;
use runtime_core::{ErrorKind, Result, Sandbox, WriteOptions};

/// Set for this program when it runs as an owner that ignores signals.
const OWNER: &str = "IGNORES_SIGNALS";

/// The masks of ignored and of blocked signals that a program of a new box starts with, and how it ends by SIGHUP.
async fn as_seen_inside(config: SubprocessConfig) -> Result<(String, Option<i32>)> {
    let cache = tempfile::tempdir().expect("a directory");
    let sandbox = Sandbox::builder(config)
        .cache(CacheDir::at(cache.path()))
        .provision()
        .await?;
    let masks = sandbox
        .run(["grep", "-E", "^Sig(Ign|Blk):", "/proc/self/status"])
        .await?;
    // What cannot be executed is told, whoever started it; and nothing of argument and environment is lost.
    for text in ["\u{7f}ELF is not all of it", "exit 5\n"] {
        sandbox.write_with("file", text, WriteOptions::mode(0o755)).await?;
        let error = sandbox.run(["./file"]).await.expect_err("of no format");
        assert_eq!(error.kind(), ErrorKind::ProgramNotExecutable, "{error}");
    }
    let program = runtime_core::Command::new(["sh", "-c", "echo \"$0 $1 $X\"", "zero", "one two"]).env("X", "= 3");
    assert_eq!(sandbox.run_program(program).await?.stdout_lossy(), "zero one two = 3\n");
    let killed = sandbox.run(["sh", "-c", "kill -HUP $$; exit 3"]).await?;
    sandbox
        .run_background(["grep", "^SigIgn:", "/proc/self/status"], "log")
        .await?;
    let logged = "until [ -s log ]; do sleep 0.02; done; cat log";
    let logged = sandbox.run(["sh", "-c", logged]).await?;
    sandbox.stop().await?;
    let seen = format!("{}{}", masks.stdout_lossy(), logged.stdout_lossy());
    let masks = seen.lines().map(|line| {
        let (name, mask) = line.split_once(':').expect("a mask");
        let mask = u64::from_str_radix(mask.trim(), 16).expect("a number");
        // Two signals are the C library's own, which lets nobody ask for them or change them.
        format!("{name}:{:016x}\n", mask & !0x1_8000_0000)
    });
    Ok((masks.collect(), killed.status.signal()))
}

#[tokio::test]
async fn programs_start_with_nothing_ignored_and_nothing_blocked() {
    if std::env::var_os(OWNER).is_none() {
        // Ignored signals are inherited, as they are under `nohup`.
        let script = "trap '' HUP INT QUIT TERM USR1; exec \"$0\" --exact --nocapture \
                      programs_start_with_nothing_ignored_and_nothing_blocked";
        let output = Command::new("sh")
            .args(["-c", script])
            .arg(std::env::current_exe().expect("our own path"))
            .env(OWNER, "1")
            .output()
            .expect("sh");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    let own = std::fs::read_to_string("/proc/self/status").expect("our status");
    let ignored = own
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .expect("a mask");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a number");
    assert_eq!(
        ignored & 0x4207,
        0x4207,
        "the owner ignores HUP, INT, QUIT, USR1 and TERM"
    );

    let zero = "0000000000000000";
    let expected = format!("SigBlk:{zero}\nSigIgn:{zero}\nSigIgn:{zero}\n");
    let plain = as_seen_inside(SubprocessConfig::default()).await.expect("a box");
    assert_eq!(plain, (expected.clone(), Some(1)));
    #[cfg(feature = "isolation")]
    if runtime_core::subprocess::isolation::availability().is_ok() {
        let isolated = as_seen_inside(SubprocessConfig::namespaces()).await.expect("a box");
        assert_eq!(isolated, (expected, Some(1)));
    }
}
