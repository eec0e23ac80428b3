//! A process that dies between any two system calls that matter, and the reaper after it.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use super::*;
use crate::lease::crash::COUNTDOWN;
use crate::sandbox::Sandbox;
use crate::subprocess::SubprocessConfig;

/// Tells a child of these tests which cache to work in.
const CACHE: &str = "RUNTIME_CORE_TEST_CACHE";
/// More places than any of the children passes.
const PLACES: u64 = 400;

fn cache_of_child() -> Option<CacheDir> {
    std::env::var_os(CACHE).map(CacheDir::at)
}

/// Runs the named test of this file as a child that dies at its `after`th place; says whether it did.
fn dies(name: &str, cache: &CacheDir, after: u64) -> bool {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("lease::tests::crashes::{name}"), "--nocapture"])
        .env(CACHE, cache.path())
        .env(COUNTDOWN, after.to_string())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let killed = output.status.signal() == Some(9);
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(killed || output.status.success(), "after {after} places: {text}");
    killed
}

/// What is left of boxes: directories, claims, leases, processes.
fn leftovers(cache: &CacheDir) -> Vec<String> {
    let mut left = Vec::new();
    for dir in ["runtimes/subprocess", DIRECTORY] {
        let entries = std::fs::read_dir(cache.path().join(dir)).into_iter().flatten();
        left.extend(entries.map(|entry| entry.unwrap().path().display().to_string()));
    }
    let marker = format!("{}={}", crate::subprocess::MARKER, cache.path().display());
    for entry in std::fs::read_dir("/proc").unwrap() {
        let path = entry.unwrap().path();
        if let Ok(environ) = std::fs::read(path.join("environ"))
            && environ
                .split(|byte| *byte == 0)
                .any(|v| v.starts_with(marker.as_bytes()))
        {
            left.push(path.display().to_string());
        }
    }
    left
}

async fn boxes(cache: &CacheDir) -> Result<()> {
    let builder = || Sandbox::builder(SubprocessConfig::default()).cache(cache.clone());
    let first = builder().name("first").provision().await?;
    first.run_background(["sleep", "1000"], "log").await?;
    first.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"]).await?;
    // The name is taken: this one must go without taking the other with it.
    builder().name("first").provision().await.unwrap_err();
    assert!(first.run(["true"]).await?.success());
    let second = builder().provision().await?;
    first.stop().await?;
    // As if the deletion had failed: its lease goes to a file of its own.
    drop(second);
    let journal = Journal::of(cache).unwrap();
    let (key, _) = journal.begin(record("of another provider")).unwrap().unwrap();
    journal.leave(key).unwrap();
    // Enough to have the journal rewritten.
    for _ in 0..40 {
        let mut large = record("large");
        large.context.insert("filler".into(), "x".repeat(8000));
        let (key, _) = journal.begin(large).unwrap().unwrap();
        journal.finish(key).unwrap();
    }
    Ok(())
}

#[tokio::test]
async fn a_process_that_dies_between_any_two_steps_leaves_nothing_that_one_reap_does_not_find() {
    if let Some(cache) = cache_of_child() {
        return boxes(&cache).await.unwrap();
    }
    let bench = Bench::new();
    let provider = Counting::new();
    let mut registry = Registry::with_builtin();
    registry.register(provider.clone());
    let mut after = 0;
    loop {
        let name = "a_process_that_dies_between_any_two_steps_leaves_nothing_that_one_reap_does_not_find";
        let killed = dies(name, &bench.cache(), after);
        let report = reap(&registry, bench.options()).await.unwrap();
        assert_eq!(report.remaining().count(), 0, "after {after} places: {report}");
        assert_eq!(report.damaged, [], "after {after} places");
        assert_eq!(leftovers(&bench.cache()), [""; 0], "after {after} places");
        if !killed {
            break;
        }
        // The short lives at the end pass the same few places again and again.
        after += if after < 60 { 1 } else { 5 };
        assert!(after < PLACES, "the child never ended by itself");
    }
    assert!(after > 40, "only {after} places were passed");
}

#[tokio::test]
async fn a_reaper_that_dies_between_any_two_steps_leaves_the_rest_to_the_next() {
    if let Some(cache) = cache_of_child() {
        let options = ReapOptions {
            cache,
            ..ReapOptions::default()
        };
        let report = reap(&Registry::with_builtin(), options).await.unwrap();
        assert_eq!(report.remaining().count(), 0, "{report}");
        return;
    }
    let bench = Bench::new();
    let mut after = 0;
    loop {
        // Two boxes of a dead owner, each with a process.
        let mut records = Vec::new();
        for n in 0..2 {
            let name = format!("box-{n}");
            let dir = bench.cache().create_dir(format!("runtimes/subprocess/{name}")).unwrap();
            std::os::unix::fs::symlink("0123", dir.with_file_name(format!(".claim-{name}"))).unwrap();
            let mut orphan = record(&name);
            orphan.provider = "subprocess".into();
            orphan.context = BTreeMap::from([
                ("dir".into(), dir.to_string_lossy().into_owned()),
                ("claim".into(), "0123".into()),
            ]);
            records.push(orphan);
        }
        bench.dead(records);
        let name = "a_reaper_that_dies_between_any_two_steps_leaves_the_rest_to_the_next";
        let killed = dies(name, &bench.cache(), after);
        let report = reap(&Registry::with_builtin(), bench.options()).await.unwrap();
        assert_eq!(report.remaining().count(), 0, "after {after} places: {report}");
        assert_eq!(leftovers(&bench.cache()), [""; 0], "after {after} places");
        if !killed {
            break;
        }
        after += 1;
        assert!(after < PLACES, "the child never ended by itself");
    }
    assert!(after >= 9, "only {after} places were passed");
}
