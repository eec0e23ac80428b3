//! The creation limiter among processes.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use runtime_core::limiter::Limiter;
use runtime_core::scope::RunScope;

const PROCESSES: usize = 16;
const SLOTS: usize = 25;
const INTERVAL: f64 = 0.01;
/// Tells a child of the test which directory to reserve in.
const CHILD: &str = "LIMITER_TEST_CHILD_DIR";
const NAME: &str = "sixteen_processes_reserve_distinct_slots_one_interval_apart";

#[test]
fn sixteen_processes_reserve_distinct_slots_one_interval_apart() {
    if let Some(dir) = std::env::var_os(CHILD) {
        return reserve_as_child(dir.as_ref());
    }
    let dir = tempfile::tempdir().unwrap();
    let mut children: Vec<_> = (0..PROCESSES)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", NAME, "--nocapture"])
                .env(CHILD, dir.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    // Closing their inputs starts all of them.
    for child in &mut children {
        drop(child.stdin.take());
    }
    let mut slots = Vec::new();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        let own: Vec<f64> = text
            .lines()
            .filter_map(|line| line.strip_prefix("slot "))
            .map(|slot| slot.parse().unwrap())
            .collect();
        assert_eq!(own.len(), SLOTS, "{text}");
        assert!(own.is_sorted(), "a process gets later slots for later calls: {own:?}");
        slots.extend(own);
    }
    slots.sort_by(f64::total_cmp);
    assert_eq!(slots.len(), PROCESSES * SLOTS);
    for pair in slots.windows(2) {
        // A microsecond for what a float of seconds since the epoch rounds away.
        assert!(pair[1] - pair[0] >= INTERVAL - 1e-6, "{pair:?}");
    }
    let bucket = std::fs::read_to_string(dir.path().join("test-run--1.bucket")).unwrap();
    assert_eq!(bucket.parse::<f64>().unwrap(), slots[slots.len() - 1] + INTERVAL);
}

fn reserve_as_child(dir: &std::path::Path) {
    let limiter = Limiter::builder("test")
        .per_second(1.0 / INTERVAL)
        .dir(dir)
        .scope(RunScope::new("run/1").unwrap())
        .strict(true)
        .lock_timeout(std::time::Duration::from_secs(120))
        .build()
        .unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let mut lines = String::from("\n");
    for _ in 0..SLOTS {
        let slot = runtime.block_on(limiter.reserve()).unwrap();
        assert!(slot.is_shared());
        lines.push_str(&format!("slot {:?}\n", slot.unix_seconds()));
    }
    std::io::stdout().write_all(lines.as_bytes()).unwrap();
}
