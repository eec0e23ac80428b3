//! Connections that break at the worst moments: no byte is lost, nothing is started or created twice.
#![cfg(all(feature = "emulator", target_os = "linux"))]

mod common;

use std::sync::Arc;

use common::Provider;
use runtime_core::{Command, ErrorKind, Output, OutputChunk, OutputStream, Result, RuntimeConfig, View};
use runtime_e2b::emulator::{Action, Fault};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Prints a mebibyte on both streams together, and appends to a file each time that it is started.
const PROGRAM: &str = r#"echo started >>"starts-$1"
i=0; while [ $i -lt 32 ]; do
seq -f "$1 out %07.0f" $((i * 1000)) $((i * 1000 + 999))
seq -f "$1 err %07.0f" $((i * 500)) $((i * 500 + 499)) >&2
i=$((i + 1)); done
exit $(($1 % 100 + 1))"#;

fn wanted(number: usize, stream: &str, lines: usize) -> Vec<u8> {
    (0..lines)
        .flat_map(|line| format!("{number} {stream} {line:07}\n").into_bytes())
        .collect()
}

/// Runs one program, gathering what it streams.
async fn program(view: View, number: usize) -> (Result<Output>, Vec<u8>, Vec<u8>) {
    let (sink, mut chunks) = mpsc::channel::<OutputChunk>(16);
    let gather = tokio::spawn(async move {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        while let Some(chunk) = chunks.recv().await {
            match chunk.stream {
                OutputStream::Stdout => out.extend_from_slice(&chunk.bytes),
                OutputStream::Stderr => err.extend_from_slice(&chunk.bytes),
            }
        }
        (out, err)
    });
    let command = Command::new(["sh", "-c", PROGRAM, "sh", &number.to_string()]).stream_to(sink);
    let output = view.run_program(command).await;
    let (out, err) = gather.await.expect("joined");
    (output, out, err)
}

/// Programs that run, each a mebibyte.
const PROGRAMS: usize = 500;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_durable_programs_lose_nothing_to_broken_streams() {
    let Some(provider) = Provider::start() else { return };
    let sandbox = provider.sandbox().await;
    // Streams of programs and of their output, new and taken up again, and downloads: four in ten break at random.
    for (request, range) in [
        ("/process.Process/Start", 1..300_000),
        ("/process.Process/Connect", 0..200),
        ("GET /files", 0..400_000),
    ] {
        let times = u32::try_from(PROGRAMS * 20).expect("small");
        provider
            .emulator
            .inject(Fault::new(request, times, Action::Drop(range)).probability(0.4));
    }
    let mut running = JoinSet::new();
    let mut started = 0;
    let mut wrong = Vec::new();
    let sandbox = Arc::new(sandbox);
    loop {
        while running.len() < 24 && started < PROGRAMS {
            let (view, number) = (sandbox.view(), started);
            running.spawn(async move { (number, program(view, number).await) });
            started += 1;
        }
        let Some(ended) = running.join_next().await else { break };
        let (number, (output, out, err)) = ended.expect("joined");
        let output = match output {
            Ok(output) => output,
            Err(error) => {
                wrong.push(format!("{number}: {error}"));
                continue;
            }
        };
        let (want_out, want_err) = (wanted(number, "out", 32_000), wanted(number, "err", 16_000));
        if output.code() != Some(i32::try_from(number % 100 + 1).expect("small")) {
            wrong.push(format!("{number}: ended with {}", output.status));
        }
        for (what, got, want) in [
            ("stdout", &output.stdout.bytes[..], &want_out),
            ("stderr", &output.stderr.bytes[..], &want_err),
            ("streamed stdout", &out[..], &want_out),
            ("streamed stderr", &err[..], &want_err),
        ] {
            if got != &want[..] {
                wrong.push(format!("{number}: {what} has {} bytes, not {}", got.len(), want.len()));
            }
        }
    }
    provider.emulator.clear_faults();
    let script = "cat starts-* | wc -l; ls starts-* | wc -l; ls -d /tmp/vf-program-* 2>/dev/null | wc -l";
    let counted = sandbox.run(["sh", "-c", script]).await.expect("counted");
    assert_eq!(wrong, Vec::<String>::new());
    assert_eq!(
        counted.stdout_lossy(),
        format!("{PROGRAMS}\n{PROGRAMS}\n0\n"),
        "starts, programs, leftovers"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_whose_answer_is_lost_is_found_again() {
    let Some(provider) = Provider::start() else { return };
    let sandbox = provider.sandbox().await;
    for _ in 0..10 {
        provider
            .emulator
            .inject(Fault::new("/process.Process/Start", 1, Action::LoseAnswer));
        let output = sandbox
            .run_program(["sh", "-c", "echo once >>starts; exit 9"])
            .await
            .expect("found");
        assert_eq!(output.code(), Some(9));
    }
    assert_eq!(
        &sandbox.read("starts").await.expect("read")[..],
        "once\n".repeat(10).as_bytes()
    );
    // One that did not arrive is not started, and so it may be started.
    provider
        .emulator
        .inject(Fault::new("/process.Process/Start", 1, Action::Close));
    let output = sandbox
        .run_program(["sh", "-c", "echo once >>starts"])
        .await
        .expect("started again");
    assert!(output.success());
    assert_eq!(
        &sandbox.read("starts").await.expect("read")[..],
        "once\n".repeat(11).as_bytes()
    );
    // And where nothing arrives at all, nothing is started.
    provider
        .emulator
        .inject(Fault::new("/process.Process/Start", 3, Action::Close));
    let error = sandbox
        .run_program(["sh", "-c", "echo once >>starts"])
        .await
        .expect_err("did not arrive");
    assert_eq!(error.kind(), ErrorKind::ConnectionLost);
    assert_eq!(
        &sandbox.read("starts").await.expect("read")[..],
        "once\n".repeat(11).as_bytes()
    );
    sandbox.stop().await.expect("stopped");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_creates_whose_answer_is_lost_make_one_box_each_and_leave_none() {
    let Some(provider) = Provider::start() else { return };
    // The template first: its build is another matter.
    provider.sandbox().await.stop().await.expect("stopped");
    provider
        .emulator
        .inject(Fault::new("POST /v2/sandboxes$", u32::MAX, Action::LoseAnswer));
    let creates = |provider: &Provider| {
        provider
            .emulator
            .requests()
            .iter()
            .filter(|line| *line == "POST /v2/sandboxes")
            .count()
    };
    let before = (provider.emulator.created(), creates(&provider));
    let mut running = JoinSet::new();
    let mut asked = 0;
    let mut failed = Vec::new();
    loop {
        while running.len() < 16 && asked < 200 {
            let builder = provider.builder(provider.emulator.config());
            running.spawn(async move {
                let sandbox = builder.provision().await?;
                let output = sandbox.run(["echo", "here"]).await?;
                assert_eq!(&output.stdout.bytes[..], b"here\n");
                sandbox.stop().await
            });
            asked += 1;
        }
        let Some(ended) = running.join_next().await else { break };
        if let Err(error) = ended.expect("joined") {
            failed.push(error.to_string());
        }
    }
    let after = (provider.emulator.created(), creates(&provider));
    assert_eq!(failed, Vec::<String>::new());
    assert_eq!((after.0 - before.0, after.1 - before.1), (200, 200), "boxes, creates");
    assert!(provider.emulator.boxes().is_empty());
}

#[tokio::test]
async fn a_creation_that_nobody_waits_for_leaves_no_box() {
    let Some(provider) = Provider::start() else { return };
    provider.sandbox().await.stop().await.expect("stopped");
    let delay = Action::Delay(std::time::Duration::from_millis(300));
    provider.emulator.inject(Fault::new("POST /v2/sandboxes", 5, delay));
    for _ in 0..5 {
        let provision = provider.builder(provider.emulator.config()).provision();
        assert!(
            tokio::time::timeout(std::time::Duration::from_millis(100), provision)
                .await
                .is_err()
        );
    }
    // Each is finished in the background and then deleted.
    while provider.emulator.created() < 6 || !provider.emulator.boxes().is_empty() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_runtime_deletes_what_it_lost_sight_of_and_only_that() {
    let Some(provider) = Provider::start() else { return };
    let other = provider.sandbox().await;
    let config = provider.emulator.config();
    let spec = |name: &str| runtime_core::BoxSpec {
        name: name.into(),
        run_scope: runtime_core::scope::RunScope::mint(),
        env: runtime_core::Env::new(),
        cache: runtime_core::cache::CacheDir::at(provider.cache.path()),
    };
    let runtime = config.build(spec("mine")).expect("a handle");
    runtime.delete().await.expect("nothing was created");
    runtime.create().await.expect("created");
    // Another handle of the same name, as the reaper would have it, does not know the id.
    let orphan = runtime_core::Orphan {
        name: "mine".into(),
        id: None,
        run_scope: "any".into(),
        context: runtime.lease_context(),
    };
    assert_eq!(orphan.context.get("api_url"), Some(&provider.emulator.api_url()));
    assert!(!format!("{orphan:?}").contains(provider.emulator.api_key()));
    assert_eq!(provider.emulator.boxes().len(), 2);
    runtime.delete().await.expect("deleted");
    runtime.delete().await.expect("gone is deleted");
    assert_eq!(provider.emulator.boxes().len(), 1);
    assert_eq!(runtime.id().map(|id| id.starts_with('i')), Some(true), "the id is kept");
    other.stop().await.expect("stopped");
}
