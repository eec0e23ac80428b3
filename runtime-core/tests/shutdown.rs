//! What signals, panics and aborts leave of the boxes of a process.
#![cfg(all(feature = "subprocess", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "common/talk.rs"]
mod talk;

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{child, leftovers, processes, role};
use runtime_core::cache::CacheDir;
use runtime_core::shutdown;
use runtime_core::subprocess::SubprocessConfig;
use runtime_core::{Builder, ErrorKind, ReapOptions, Registry, Report, Sandbox, reap};
use talk::Talk;

fn builder(cache: &Path) -> Builder {
    Sandbox::builder(SubprocessConfig::default()).cache(CacheDir::at(cache))
}

fn start(name: &str, cache: &Path) -> Talk {
    let mut command = child(name, "child", cache);
    command.stderr(Stdio::piped());
    let mut talk = Talk::start(command);
    talk.expect("ready");
    talk
}

fn signal(talk: &Talk, kind: &str) {
    let pid = talk.child.id().to_string();
    let sent = std::process::Command::new("kill").args([kind, &pid]).status().unwrap();
    assert!(sent.success());
}

fn executor() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Boxes with a program in each.
async fn boxes(cache: &Path, count: usize, program: &str) -> Vec<Sandbox> {
    let mut boxes = Vec::new();
    for n in 0..count {
        let sandbox = builder(cache).name(format!("box-{n}")).provision().await.unwrap();
        sandbox.run_background(["sh", "-c", program], "log").await.unwrap();
        while sandbox.read("up").await.is_err() {
            tokio::task::yield_now().await;
        }
        boxes.push(sandbox);
    }
    boxes
}

fn reap_now(cache: &Path) -> Report {
    let options = ReapOptions {
        cache: CacheDir::at(cache),
        ..ReapOptions::default()
    };
    executor().block_on(reap(&Registry::with_builtin(), options)).unwrap()
}

#[test]
fn the_first_signal_stops_every_box_and_exits_with_its_code() {
    let name = "the_first_signal_stops_every_box_and_exits_with_its_code";
    if let Some((_, cache)) = role() {
        shutdown::install().unwrap();
        shutdown::install().unwrap();
        return executor().block_on(async {
            let _boxes = boxes(&cache, 3, ": >up; exec sleep 1000").await;
            println!("\nready");
            std::future::pending().await
        });
    }
    for (kind, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let dir = tempfile::tempdir().unwrap();
        let talk = start(name, dir.path());
        assert_eq!(processes(dir.path()).len(), 3);
        signal(&talk, kind);
        let (status, stderr) = talk.end();
        assert_eq!(status.code(), Some(code), "{stderr}");
        assert_eq!(leftovers(dir.path(), &[]), [""; 0], "{stderr}");
        assert!(stderr.contains("stopping 3 sandboxes"), "{stderr}");
        assert!(stderr.contains("(3 of 3)"), "{stderr}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_process_that_is_to_outlive_its_terminal_does() {
    let name = "a_process_that_is_to_outlive_its_terminal_does";
    if let Some((_, cache)) = role() {
        shutdown::install().unwrap();
        return executor().block_on(async {
            let _boxes = boxes(&cache, 1, ": >up; exec sleep 1000").await;
            println!("\nready");
            std::future::pending().await
        });
    }
    let dir = tempfile::tempdir().unwrap();
    let child = child(name, "child", dir.path());
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]);
    command.arg(child.get_program()).args(child.get_args());
    command.envs(child.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut talk = Talk::start(command);
    talk.expect("ready");
    signal(&talk, "-HUP");
    // Had the first one begun the shutdown, this one would be the second, and leave the box.
    signal(&talk, "-TERM");
    let (status, stderr) = talk.end();
    assert_eq!(status.code(), Some(143), "{stderr}");
    assert_eq!(leftovers(dir.path(), &[]), [""; 0], "{stderr}");
}

#[test]
fn the_second_signal_exits_at_once_and_the_reaper_finds_the_boxes() {
    let name = "the_second_signal_exits_at_once_and_the_reaper_finds_the_boxes";
    if let Some((_, cache)) = role() {
        shutdown::install().unwrap();
        return executor().block_on(async {
            // It does not obey SIGTERM, so stopping it takes seconds.
            let stubborn = "trap '' TERM; trap 'touch asked' USR1; : >up; while :; do sleep 0.01; done";
            let _boxes = boxes(&cache, 1, stubborn).await;
            println!("\nready");
            std::future::pending().await
        });
    }
    let dir = tempfile::tempdir().unwrap();
    let mut talk = start(name, dir.path());
    signal(&talk, "-INT");
    // Its line says that the first one has arrived.
    let mut stderr = std::io::BufReader::new(talk.child.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut stderr, &mut line).unwrap();
    assert!(line.contains("stopping 1 sandbox;"), "{line}");
    let second = Instant::now();
    signal(&talk, "-INT");
    let (status, _) = talk.end();
    println!("exited {:?} after the second signal", second.elapsed());
    assert_eq!(status.code(), Some(130));
    assert!(!processes(dir.path()).is_empty(), "it was not waited for");
    let report = reap_now(dir.path());
    assert_eq!((report.deleted(), report.remaining().count()), (1, 0), "{report}");
    assert_eq!(leftovers(dir.path(), &[]), [""; 0]);
}

#[test]
fn a_program_that_fails_because_its_box_was_stopped_still_exits_with_the_signals_code() {
    let name = "a_program_that_fails_because_its_box_was_stopped_still_exits_with_the_signals_code";
    if let Some((_, cache)) = role() {
        shutdown::install().unwrap();
        executor().block_on(async {
            let sandbox = builder(&cache).provision().await.unwrap();
            println!("\nready");
            sandbox.run(["sleep", "1000"]).await.unwrap_err();
        });
        std::process::exit(1);
    }
    for _ in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let talk = start(name, dir.path());
        signal(&talk, "-INT");
        let (status, stderr) = talk.end();
        assert_eq!(status.code(), Some(130), "{stderr}");
        assert_eq!(leftovers(dir.path(), &[]), [""; 0], "{stderr}");
    }
}

#[test]
fn a_signal_amid_provisioning_lets_no_new_box_be_and_leaves_none() {
    let name = "a_signal_amid_provisioning_lets_no_new_box_be_and_leaves_none";
    if let Some((_, cache)) = role() {
        shutdown::install().unwrap();
        return executor().block_on(async {
            let mut workers = Vec::new();
            for _ in 0..4 {
                let cache = cache.clone();
                workers.push(tokio::spawn(async move {
                    let mut boxes = Vec::new();
                    loop {
                        match builder(&cache).provision().await {
                            Ok(sandbox) if boxes.len() < 4 => boxes.push(sandbox),
                            Ok(sandbox) => drop(sandbox),
                            Err(error) => break error,
                        }
                        if boxes.len() == 2 {
                            println!("\nready");
                        }
                    }
                }));
            }
            for worker in workers {
                let error = worker.await.unwrap();
                let refused = matches!(
                    error.kind(),
                    ErrorKind::Cancelled | ErrorKind::Phase | ErrorKind::SandboxGone
                );
                assert!(refused, "{error:?}");
            }
            std::future::pending().await
        });
    }
    for _ in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let talk = start(name, dir.path());
        signal(&talk, "-TERM");
        let (status, stderr) = talk.end();
        assert_eq!(status.code(), Some(143), "{stderr}");
        assert_eq!(leftovers(dir.path(), &[]), [""; 0], "{stderr}");
    }
}

#[test]
fn a_program_with_its_own_signal_handling_stops_all_itself() {
    let name = "a_program_with_its_own_signal_handling_stops_all_itself";
    if let Some((_, cache)) = role() {
        executor().block_on(async {
            let mut interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt()).unwrap();
            let mut boxes = boxes(&cache, 2, ": >up; exec sleep 1000").await;
            println!("\nready");
            interrupt.recv().await;
            let report = shutdown::stop_all(Duration::from_secs(30)).await;
            assert_eq!((report.stopped, report.is_complete()), (2, true), "{report:?}");
            assert_eq!(leftovers(&cache, &["journal"]), [""; 0]);
            let gone = boxes.pop().unwrap().run(["true"]).await.unwrap_err();
            assert_eq!(gone.kind(), ErrorKind::Phase);
            // Later boxes are none of its business.
            builder(&cache).provision().await.unwrap();
            let none = shutdown::stop_all(Duration::ZERO).await;
            assert!(none.failed.is_empty(), "{none:?}");
        });
        std::process::exit(7);
    }
    let dir = tempfile::tempdir().unwrap();
    let talk = start(name, dir.path());
    signal(&talk, "-INT");
    let (status, stderr) = talk.end();
    assert_eq!(status.code(), Some(7), "{stderr}");
    assert_eq!(leftovers(dir.path(), &[]), [""; 0]);
}

#[test]
fn a_handler_of_the_programs_own_sees_the_signal_too() {
    let name = "a_handler_of_the_programs_own_sees_the_signal_too";
    if let Some((_, cache)) = role() {
        return executor().block_on(async {
            let kind = tokio::signal::unix::SignalKind::interrupt();
            let mut before = tokio::signal::unix::signal(kind).unwrap();
            shutdown::install().unwrap();
            let mut after = tokio::signal::unix::signal(kind).unwrap();
            // It does not obey SIGTERM, so the shutdown lasts longer than the handlers.
            let _boxes = boxes(&cache, 2, "trap '' TERM; : >up; while :; do sleep 0.01; done").await;
            println!("\nready");
            before.recv().await;
            after.recv().await;
            eprintln!("both were told");
            std::future::pending().await
        });
    }
    let dir = tempfile::tempdir().unwrap();
    let talk = start(name, dir.path());
    signal(&talk, "-INT");
    let (status, stderr) = talk.end();
    assert_eq!(status.code(), Some(130), "{stderr}");
    assert!(
        stderr.contains("both were told") && stderr.contains("(2 of 2)"),
        "{stderr}"
    );
    assert_eq!(leftovers(dir.path(), &[]), [""; 0], "{stderr}");
}

#[test]
fn a_program_that_ends_itself_is_told_of_the_signal_and_exits_with_its_code() {
    let name = "a_program_that_ends_itself_is_told_of_the_signal_and_exits_with_its_code";
    if let Some((_, cache)) = role() {
        let options = shutdown::Options {
            exit: false,
            ..shutdown::Options::default()
        };
        shutdown::install_with(options).unwrap();
        executor().block_on(async {
            let boxes = boxes(&cache, 2, ": >up; exec sleep 1000").await;
            println!("\nready");
            assert_eq!(shutdown::requested().await, 143);
            assert_eq!(shutdown::requested().await, 143, "it stays so");
            for sandbox in boxes {
                sandbox.stop().await.unwrap();
            }
            assert_eq!(leftovers(&cache, &["journal"]), [""; 0]);
            let refused = builder(&cache).provision().await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Cancelled);
            eprintln!("said at the end");
        });
        std::process::exit(7);
    }
    let dir = tempfile::tempdir().unwrap();
    let talk = start(name, dir.path());
    signal(&talk, "-TERM");
    let (status, stderr) = talk.end();
    assert_eq!(status.code(), Some(143), "{stderr}");
    assert!(stderr.contains("said at the end"), "{stderr}");
    assert_eq!(leftovers(dir.path(), &[]), [""; 0], "{stderr}");
}

#[test]
fn a_deadline_that_passes_names_what_is_not_stopped() {
    let name = "a_deadline_that_passes_names_what_is_not_stopped";
    if let Some((_, cache)) = role() {
        return executor().block_on(async {
            let boxes = boxes(&cache, 1, "trap '' TERM; : >up; while :; do sleep 0.01; done").await;
            println!("\nready");
            let report = shutdown::stop_all(Duration::from_millis(20)).await;
            assert_eq!((report.stopped, report.unfinished), (0, vec!["box-0".to_owned()]));
            boxes[0].stop().await.unwrap();
        });
    }
    let dir = tempfile::tempdir().unwrap();
    let (status, stderr) = start(name, dir.path()).end();
    assert!(status.success(), "{stderr}");
    assert_eq!(leftovers(dir.path(), &[]), [""; 0]);
}

#[test]
fn a_panic_in_main_or_in_a_task_leaves_nothing() {
    let name = "a_panic_in_main_or_in_a_task_leaves_nothing";
    if let Some((_, cache)) = role() {
        return executor().block_on(async {
            let mut boxes = boxes(&cache, 2, ": >up; exec sleep 1000").await;
            println!("\nready");
            let first = boxes.remove(0);
            let task = tokio::spawn(async move {
                let _first = first;
                panic!("in a task");
            });
            task.await.unwrap_err();
            panic!("in main");
        });
    }
    let dir = tempfile::tempdir().unwrap();
    let (status, stderr) = start(name, dir.path()).end();
    assert_eq!(status.code(), Some(101), "{stderr}");
    assert_eq!(leftovers(dir.path(), &[]), [""; 0], "{stderr}");
}

#[test]
fn an_abort_leaves_its_boxes_to_the_reaper() {
    let name = "an_abort_leaves_its_boxes_to_the_reaper";
    if let Some((_, cache)) = role() {
        return executor().block_on(async {
            let _boxes = boxes(&cache, 2, ": >up; exec sleep 1000").await;
            println!("\nready");
            std::process::abort();
        });
    }
    let dir = tempfile::tempdir().unwrap();
    let (status, stderr) = start(name, dir.path()).end();
    assert_eq!(status.signal(), Some(6), "{stderr}");
    assert_eq!(processes(dir.path()).len(), 2);
    let report = reap_now(dir.path());
    assert_eq!((report.deleted(), report.remaining().count()), (2, 0), "{report}");
    assert_eq!(leftovers(dir.path(), &[]), [""; 0]);
}
