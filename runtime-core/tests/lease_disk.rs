//! Leases on a disk that is full, or that cannot be written to.
#![cfg(all(feature = "subprocess", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{child, leftovers, role};
use runtime_core::cache::CacheDir;
use runtime_core::subprocess::SubprocessConfig;
use runtime_core::{Builder, Error, ErrorKind, LeasePolicy, ReapOptions, Registry, Sandbox, reap};

const WARNING: &str = "LEASES ARE OFF";

fn builder(cache: &Path) -> Builder {
    Sandbox::builder(SubprocessConfig::default()).cache(CacheDir::at(cache))
}

/// Runs the test `name` as a child, its cache on a file system of its own, mounted with these options where no other
/// process sees it. `None` where mounting is not allowed.
fn on_own_disk(name: &str, options: &str) -> Option<Output> {
    let dir = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o {options} tmpfs {} && ", dir.path().display());
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        if !rustix::process::geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--mount", "sh", "-c", script]);
        command
    };
    let allowed = unshare(&format!("{mount} true")).stderr(Stdio::null()).status();
    if !allowed.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED {name}: no file system can be mounted here");
        return None;
    }
    let command = child(name, "child", dir.path());
    let mut inside = unshare(&format!("{mount} exec \"$0\" \"$@\""));
    inside.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        inside.env(name, value.unwrap());
    }
    Some(inside.output().unwrap())
}

fn check(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}\n{stderr}");
    stderr
}

/// The cause of a refused lease.
fn cause(error: &Error) -> io::ErrorKind {
    assert_eq!(error.kind(), ErrorKind::Lease, "{error}");
    let source = std::error::Error::source(error).unwrap();
    source.downcast_ref::<io::Error>().unwrap().kind()
}

#[test]
fn a_disk_that_fills_up_during_a_lease_write_refuses_the_box_and_keeps_the_other_leases() {
    let name = "a_disk_that_fills_up_during_a_lease_write_refuses_the_box_and_keeps_the_other_leases";
    if let Some((_, cache)) = role() {
        return run(full_disk(&cache));
    }
    let Some(output) = on_own_disk(name, "size=128k") else {
        return;
    };
    let stderr = check(&output);
    assert_eq!(stderr.matches(WARNING).count(), 1, "once, and loudly: {stderr}");
}

fn run(test: impl Future<Output = ()>) {
    let executor = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    executor.unwrap().block_on(test);
}

async fn full_disk(cache: &Path) {
    let mut boxes = vec![builder(cache).name("first").provision().await.unwrap()];
    let filler = cache.join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    // What is left of the last page takes some more; then one is written half.
    let error = loop {
        match builder(cache).provision().await {
            Ok(sandbox) => boxes.push(sandbox),
            Err(error) => break error,
        }
        assert!(boxes.len() < 100, "the disk never filled up");
    };
    assert_eq!(cause(&error), io::ErrorKind::StorageFull);
    let dirs = std::fs::read_dir(cache.join("runtimes/subprocess")).unwrap();
    let dirs = dirs.filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_dir());
    assert_eq!(dirs.count(), boxes.len(), "nothing was created for the refused one");

    for _ in 0..2 {
        let sandbox = builder(cache)
            .leases(LeasePolicy::BestEffort)
            .provision()
            .await
            .unwrap();
        sandbox.stop().await.unwrap();
    }

    drop(file);
    std::fs::remove_file(filler).unwrap();
    boxes.push(builder(cache).name("last").provision().await.unwrap());
    let options = ReapOptions {
        cache: CacheDir::at(cache),
        ..ReapOptions::default()
    };
    let report = reap(&Registry::with_builtin(), options.clone()).await.unwrap();
    assert_eq!(report.living_boxes, boxes.len(), "every lease can be read: {report}");
    // The journal, left by a death of its owner, is sound.
    let journals = std::fs::read_dir(cache.join("leases")).unwrap();
    for journal in journals.map(|entry| entry.unwrap().path()) {
        std::fs::copy(&journal, journal.with_file_name("copy.journal")).unwrap();
    }
    let report = reap(&Registry::new(), options).await.unwrap();
    assert_eq!(
        (report.boxes.len(), &report.damaged[..]),
        (boxes.len(), &[][..]),
        "{report}"
    );
    std::fs::remove_file(cache.join("leases/copy.journal")).unwrap();

    for sandbox in boxes {
        sandbox.stop().await.unwrap();
    }
    assert_eq!(leftovers(cache, &["journal"]), [""; 0]);
}

#[test]
fn a_cache_directory_that_is_read_only_refuses_or_warns_as_configured() {
    let name = "a_cache_directory_that_is_read_only_refuses_or_warns_as_configured";
    if let Some((_, cache)) = role() {
        return run(read_only(&cache));
    }
    let Some(output) = on_own_disk(name, "ro") else { return };
    let stderr = check(&output);
    assert_eq!(stderr.matches(WARNING).count(), 1, "{stderr}");
}

async fn read_only(cache: &Path) {
    let error = builder(cache).provision().await.unwrap_err();
    assert_eq!(cause(&error), io::ErrorKind::ReadOnlyFilesystem);
    // Without a lease it is the box itself that finds no place.
    for policy in [LeasePolicy::BestEffort, LeasePolicy::BestEffort, LeasePolicy::Off] {
        let error = builder(cache).leases(policy).provision().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    }
    let options = ReapOptions {
        cache: CacheDir::at(cache),
        ..ReapOptions::default()
    };
    assert_eq!(reap(&Registry::with_builtin(), options).await.unwrap().boxes, []);
}
