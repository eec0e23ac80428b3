//! A process is killed at random moments while it provisions, uses and stops boxes; one reap must find everything.
#![cfg(all(feature = "subprocess", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "common/talk.rs"]
mod talk;

use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::time::Duration;

use common::{child, leftovers, processes, role};
use runtime_core::cache::CacheDir;
use runtime_core::subprocess::SubprocessConfig;
use runtime_core::{Builder, ReapOptions, Registry, Sandbox, names, reap};
use talk::Talk;

const NAME: &str = "a_process_killed_at_300_random_moments_leaves_nothing_after_one_reap";
const KILLS: u32 = 300;
/// The latest moment, in milliseconds after the start of the process.
const LATEST: u64 = 90;
/// No child outlives a test that was itself killed by much.
const CHILD_LIFETIME: Duration = Duration::from_secs(20);

fn builder(cache: &Path) -> Builder {
    Sandbox::builder(SubprocessConfig::default()).cache(CacheDir::at(cache))
}

fn random(below: u64) -> u64 {
    u64::from_str_radix(&names::random_hex(15), 16).unwrap() % below
}

#[test]
fn a_process_killed_at_300_random_moments_leaves_nothing_after_one_reap() {
    match role() {
        Some((role, cache)) if role == "victim" => return victim(&cache),
        Some((_, cache)) => return bystander(&cache),
        None => {}
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path();
    let mut beside = Talk::start(child(NAME, "bystander", cache));
    beside.expect("ready");
    let journal = only_file(&cache.join("leases"));
    let spared = ["beside-0", "beside-1", journal.as_str()];
    let untouched = processes(cache);
    assert_eq!(untouched.len(), 2);

    let executor = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let registry = Registry::with_builtin();
    let options = ReapOptions {
        cache: CacheDir::at(cache),
        ..ReapOptions::default()
    };
    let mut orphans = 0;
    for kill in 0..KILLS {
        let mut victim = child(NAME, "victim", cache)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let moment = Duration::from_micros(random(LATEST * 1000));
        std::thread::sleep(moment);
        victim.kill().unwrap();
        victim.wait().unwrap();
        let report = executor.block_on(reap(&registry, options.clone())).unwrap();
        assert_eq!(report.remaining().count(), 0, "kill {kill} after {moment:?}: {report}");
        assert_eq!(report.damaged, [], "kill {kill} after {moment:?}");
        assert_eq!(
            (report.living_owners, report.living_boxes),
            (1, 2),
            "kill {kill} after {moment:?}"
        );
        assert_eq!(
            leftovers(cache, &spared),
            [""; 0],
            "kill {kill} after {moment:?}: {report}"
        );
        orphans += report.deleted();
        if kill % 25 == 0 {
            check(&mut beside);
        }
    }
    println!("{orphans} orphans in {KILLS} kills");
    assert!(orphans > 100, "{orphans} orphans: the kills came too early or too late");
    assert_eq!(processes(cache), untouched);
    check(&mut beside);
    let (status, _) = beside.end();
    assert!(status.success(), "{status}");
    assert_eq!(leftovers(cache, &[]), [""; 0]);
}

fn check(bystander: &mut Talk) {
    let stdin = bystander.child.stdin.as_mut().unwrap();
    writeln!(stdin, "check").unwrap();
    bystander.expect("well");
}

fn only_file(dir: &Path) -> String {
    let mut files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let only = files.next().unwrap().into_string().unwrap();
    assert!(files.next().is_none());
    only
}

/// Provisions, runs and stops boxes without end.
fn victim(cache: &Path) {
    let executor = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    executor.block_on(async {
        let workers: Vec<_> = (0..3)
            .map(|worker| {
                let cache = cache.to_owned();
                tokio::spawn(async move {
                    loop {
                        live_a_little(worker, &cache).await;
                    }
                })
            })
            .collect();
        tokio::time::sleep(CHILD_LIFETIME).await;
        workers.iter().for_each(tokio::task::JoinHandle::abort);
    });
}

async fn live_a_little(worker: usize, cache: &Path) {
    // One of them fights over a name with itself: a box that is being deleted still has it.
    let builder = if worker == 0 {
        builder(cache).name("taken")
    } else {
        builder(cache)
    };
    let Ok(sandbox) = builder.provision().await else { return };
    // In the group, out of the group, and a server.
    let program = "sleep 1000 >/dev/null 2>&1 & setsid sleep 1000 >/dev/null 2>&1 & echo done";
    let _ = sandbox.run(["sh", "-c", program]).await;
    let _ = sandbox.run_background(["sleep", "1000"], "log").await;
    let _ = sandbox.write("deep/in/it", vec![7; 10_000]).await;
    if random(2) == 0 {
        let _ = sandbox.stop().await;
    }
}

/// Has two boxes with a program in each, and looks after them when asked to.
fn bystander(cache: &Path) {
    let executor = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    executor.block_on(async {
        let mut boxes = Vec::new();
        for n in 0..2 {
            let sandbox = builder(cache).name(format!("beside-{n}")).provision().await.unwrap();
            sandbox.run_background(["sleep", "1000"], "log").await.unwrap();
            sandbox.write("mine", format!("{n}")).await.unwrap();
            boxes.push(sandbox);
        }
        println!("\nready");
        for line in std::io::stdin().lock().lines() {
            assert_eq!(line.unwrap(), "check");
            for (n, sandbox) in boxes.iter().enumerate() {
                let output = sandbox.run(["cat", "mine"]).await.unwrap();
                assert_eq!(output.stdout_lossy(), n.to_string());
            }
            println!("\nwell");
        }
        for sandbox in boxes {
            sandbox.stop().await.unwrap();
        }
    });
}
