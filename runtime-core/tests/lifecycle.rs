//! The life of a box when things go wrong: faults of the provider, callers that go away, executors that shut down.
#![cfg(feature = "subprocess")]

use std::path::Path;
use std::time::Duration;

use runtime_core::cache::CacheDir;
use runtime_core::layer::{ChaosLayer, DeadlineLayer, Fault, LimitLayer, Operation, RetryLayer};
use runtime_core::network::Routes;
use runtime_core::retry::{Retrier, RetryPolicy};
use runtime_core::scope::RunScope;
use runtime_core::subprocess::SubprocessConfig;
use runtime_core::{Builder, Command, Error, ErrorKind, Phase, Retry, Sandbox};
use tokio::io::AsyncReadExt;

struct World {
    dir: tempfile::TempDir,
    chaos: ChaosLayer,
}

impl World {
    fn new() -> Self {
        Self {
            dir: tempfile::tempdir().expect("a directory"),
            chaos: ChaosLayer::new(),
        }
    }

    fn builder(&self) -> Builder {
        Sandbox::builder(SubprocessConfig::default())
            .cache(CacheDir::at(self.dir.path()))
            .run_scope(RunScope::new("lifecycle").expect("an id"))
            .layer(self.chaos.clone())
    }

    /// What is there: a box is its directory, and beside it the link that says whose it is.
    fn boxes(&self) -> usize {
        let Ok(entries) = std::fs::read_dir(self.dir.path().join("runtimes/subprocess")) else {
            return 0;
        };
        let kinds: Vec<_> = entries
            .map(|entry| entry.expect("an entry").file_type().expect("its type"))
            .collect();
        let directories = kinds.iter().filter(|kind| kind.is_dir()).count();
        // Nothing may be left of a box that is gone.
        if directories == 0 { kinds.len() } else { directories }
    }

    /// Waits until nothing is left; the test's own deadline is the runner's.
    async fn until_empty(&self) {
        while self.boxes() > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn unavailable() -> Error {
    Error::new(ErrorKind::Unavailable, "503")
}

#[tokio::test]
async fn a_create_whose_caller_went_away_is_finished_and_its_box_deleted() {
    let world = World::new();
    world
        .chaos
        .handle()
        .next(Operation::Create, Fault::Delay(Duration::from_millis(400)));
    {
        let mut provision = std::pin::pin!(world.builder().provision());
        while world.chaos.handle().calls(Operation::Create) == 0 {
            let moment = Duration::from_millis(1);
            assert!(tokio::time::timeout(moment, &mut provision).await.is_err(), "not yet");
        }
    }
    while world.chaos.handle().calls(Operation::Delete) == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    world.until_empty().await;
}

#[tokio::test]
async fn a_create_whose_answer_was_lost_leaves_nothing_behind() {
    let world = World::new();
    world
        .chaos
        .handle()
        .next(Operation::Create, Fault::LoseAnswer(unavailable()));
    let error = world.builder().provision().await.expect_err("the answer was lost");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(
        (error.provider(), error.operation()),
        (Some("subprocess"), Some("provision"))
    );
    assert_eq!(world.boxes(), 0);
}

#[tokio::test]
async fn a_create_that_hangs_fails_at_the_boot_deadline_and_leaves_nothing_behind() {
    let world = World::new();
    world.chaos.handle().next(Operation::Create, Fault::Hang);
    let error = world
        .builder()
        .boot_timeout(Duration::from_millis(30))
        .provision()
        .await
        .expect_err("it hangs");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert_eq!(world.chaos.handle().calls(Operation::Delete), 1);
    assert_eq!(world.boxes(), 0);
}

#[tokio::test]
async fn a_delete_that_fails_for_a_moment_is_tried_again() {
    let world = World::new();
    let sandbox = world.builder().provision().await.expect("a sandbox");
    for _ in 0..2 {
        world.chaos.handle().next(Operation::Delete, Fault::Fail(unavailable()));
    }
    sandbox.stop().await.expect("the third attempt succeeds");
    assert_eq!(world.chaos.handle().calls(Operation::Delete), 3);
    assert_eq!((sandbox.phase(), world.boxes()), (Phase::Stopped, 0));
}

#[tokio::test]
async fn a_delete_that_fails_for_good_says_so_and_a_later_stop_tries_anew() {
    let world = World::new();
    let sandbox = world.builder().provision().await.expect("a sandbox");
    world.chaos.handle().next(
        Operation::Delete,
        Fault::Fail(Error::new(ErrorKind::Unauthorized, "401")),
    );
    let error = sandbox.stop().await.expect_err("refused");
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Unauthorized, Retry::Exhausted)
    );
    assert_eq!(error.sandbox(), Some(sandbox.name()));
    assert_eq!(world.boxes(), 1);
    sandbox.stop().await.expect("another attempt");
    sandbox.stop().await.expect("nothing left to do");
    assert_eq!((world.chaos.handle().calls(Operation::Delete), world.boxes()), (2, 0));
}

#[tokio::test]
async fn a_stop_whose_caller_went_away_is_finished() {
    let world = World::new();
    let sandbox = world.builder().provision().await.expect("a sandbox");
    world
        .chaos
        .handle()
        .next(Operation::Delete, Fault::Delay(Duration::from_millis(400)));
    assert!(
        tokio::time::timeout(Duration::from_millis(5), sandbox.stop())
            .await
            .is_err()
    );
    assert_eq!(sandbox.phase(), Phase::Stopping);
    sandbox.stop().await.expect("waits for the same deletion");
    assert_eq!((world.chaos.handle().calls(Operation::Delete), world.boxes()), (1, 0));
}

#[tokio::test]
async fn a_program_in_flight_learns_that_its_box_is_stopped() {
    let world = World::new();
    let sandbox = world.builder().provision().await.expect("a sandbox");
    let view = sandbox.view();
    let running = tokio::spawn(async move { view.run(["sleep", "60"]).await });
    while world.chaos.handle().calls(Operation::Run) == 0 {
        tokio::task::yield_now().await;
    }
    sandbox.stop().await.expect("stopped");
    let error = running.await.expect("no panic").expect_err("the box is gone");
    assert_eq!((error.kind(), error.operation()), (ErrorKind::SandboxGone, Some("run")));
    let error = sandbox.run(["true"]).await.expect_err("stopped");
    assert_eq!(error.kind(), ErrorKind::Phase);
}

#[tokio::test]
async fn a_box_that_died_never_looks_like_a_commands_result() {
    let world = World::new();
    let sandbox = world.builder().provision().await.expect("a sandbox");
    sandbox.alive().await.expect("alive");
    world.chaos.handle().next(Operation::Run, Fault::KillBox);
    let error = sandbox.run(["true"]).await.expect_err("the box is gone");
    assert_eq!(error.kind(), ErrorKind::SandboxGone);
    assert_eq!(sandbox.alive().await.expect_err("dead").kind(), ErrorKind::SandboxGone);
    sandbox.stop().await.expect("nothing left to delete");
}

#[test]
fn a_sandbox_dropped_outside_any_executor_is_deleted() {
    let world = World::new();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let sandbox = runtime.block_on(world.builder().provision()).expect("a sandbox");
    drop(runtime);
    assert_eq!(world.boxes(), 1);
    drop(sandbox);
    while world.boxes() > 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn sandboxes_of_an_executor_that_shuts_down_are_deleted() {
    let world = World::new();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (sender, receiver) = std::sync::mpsc::channel();
    for _ in 0..8 {
        let (builder, sender) = (world.builder(), sender.clone());
        runtime.spawn(async move {
            let sandbox = builder.provision().await.expect("a sandbox");
            sender.send(()).expect("somebody listens");
            let _ = sandbox.run(["sleep", "600"]).await;
        });
    }
    for _ in 0..8 {
        receiver.recv().expect("provisioned");
    }
    assert_eq!(world.boxes(), 8);
    runtime.shutdown_background();
    while world.boxes() > 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_create_cut_short_by_its_executor_is_followed_by_a_delete() {
    let world = World::new();
    world
        .chaos
        .handle()
        .next(Operation::Create, Fault::LoseAnswer(unavailable()));
    world.chaos.handle().next(Operation::Create, Fault::Hang);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    // The first shows that a delete follows a failure; the second never comes back, and its executor goes away.
    runtime
        .block_on(world.builder().provision())
        .expect_err("the answer was lost");
    runtime.spawn(world.builder().provision());
    while world.chaos.handle().calls(Operation::Create) < 2 {
        std::thread::yield_now();
    }
    runtime.shutdown_background();
    while world.chaos.handle().calls(Operation::Delete) < 2 {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(world.boxes(), 0);
}

#[tokio::test]
async fn a_panic_in_a_users_task_does_not_leak_its_box() {
    let world = World::new();
    let builder = world.builder();
    let task = tokio::spawn(async move {
        let _sandbox = builder.provision().await.expect("a sandbox");
        panic!("a user's mistake");
    });
    assert!(task.await.is_err());
    world.until_empty().await;
}

#[tokio::test]
async fn views_share_the_box_and_keep_their_variables_apart() {
    let world = World::new();
    let sandbox = world
        .builder()
        .env("MINE", "owner")
        .provision()
        .await
        .expect("a sandbox");
    let view = sandbox
        .with_env([("THEIRS", "borrower")].into_iter().collect())
        .expect("good variables");
    let print = ["sh", "-c", "echo ${MINE-none} ${THEIRS-none}"];
    assert_eq!(
        &sandbox.run(print).await.expect("ran").stdout.bytes[..],
        b"owner none\n"
    );
    assert_eq!(
        &view.run(print).await.expect("ran").stdout.bytes[..],
        b"none borrower\n"
    );
    let error = sandbox
        .with_env([("A=B", "")].into_iter().collect())
        .expect_err("a bad name");
    assert_eq!(
        (error.kind(), error.field()),
        (ErrorKind::InvalidArgument, Some("env.A=B"))
    );
    sandbox.stop().await.expect("stopped");
    assert_eq!(view.run(["true"]).await.expect_err("stopped").kind(), ErrorKind::Phase);
}

#[tokio::test]
async fn phases_follow_each_other_and_calls_out_of_order_are_refused() {
    let world = World::new();
    let sandbox = world.builder().provision().await.expect("a sandbox");
    assert_eq!(sandbox.phase(), Phase::Started);
    sandbox.prepare_setup().await.expect("setup");
    assert_eq!(sandbox.phase(), Phase::Setup);
    sandbox.prepare_execution(Routes::default()).await.expect("no policy");
    assert_eq!(sandbox.phase(), Phase::Executing);
    let program = sandbox.spawn(["sleep", "60"]).await.expect("started");
    let error = sandbox.prepare_setup().await.expect_err("a program runs");
    assert_eq!(
        (error.kind(), error.operation()),
        (ErrorKind::Phase, Some("prepare_setup"))
    );
    drop(program);
    sandbox.prepare_setup().await.expect("setup again");
    sandbox.stop().await.expect("stopped");
    for error in [
        sandbox.prepare_setup().await.expect_err("stopped"),
        sandbox.prepare_execution(Routes::default()).await.expect_err("stopped"),
        sandbox.read("x").await.expect_err("stopped"),
        sandbox.write("x", "y").await.expect_err("stopped"),
        sandbox.spawn(["true"]).await.expect_err("stopped"),
        sandbox.alive().await.expect_err("stopped"),
        sandbox.expose(8000).await.expect_err("stopped"),
    ] {
        assert_eq!(
            (error.kind(), error.sandbox()),
            (ErrorKind::Phase, Some(sandbox.name()))
        );
    }
}

#[tokio::test]
async fn two_boxes_never_share_a_name_and_the_loser_leaves_the_winner_alone() {
    let world = World::new();
    let first = world.builder().name("one").provision().await.expect("a sandbox");
    first.write("kept", "yes").await.expect("written");
    let error = world.builder().name("one").provision().await.expect_err("taken");
    assert_eq!((error.kind(), error.field()), (ErrorKind::AlreadyExists, Some("name")));
    assert_eq!(&first.read("kept").await.expect("still there")[..], b"yes");
    first.stop().await.expect("stopped");
}

#[tokio::test]
async fn the_retry_layer_repeats_reads_and_never_programs() {
    let world = World::new();
    let policy = RetryPolicy {
        base_delay: Duration::from_millis(1),
        ..RetryPolicy::default()
    };
    let retry = RetryLayer::new(Retrier::new(policy).expect("a policy"));
    let chaos = world.chaos.clone();
    let sandbox = Sandbox::builder(SubprocessConfig::default())
        .cache(CacheDir::at(world.dir.path()))
        .layer(retry)
        .layer(chaos.clone())
        .provision()
        .await
        .expect("a sandbox");
    sandbox.write("file", "content").await.expect("written");
    chaos.handle().next(Operation::Read, Fault::Fail(unavailable()));
    assert_eq!(&sandbox.read("file").await.expect("repeated")[..], b"content");
    assert_eq!(chaos.handle().calls(Operation::Read), 2);
    chaos.handle().next(Operation::Run, Fault::LoseAnswer(unavailable()));
    let error = sandbox
        .run(["sh", "-c", "echo ran >> count"])
        .await
        .expect_err("the answer was lost");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(&sandbox.read("count").await.expect("ran")[..], b"ran\n");
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn the_deadline_layer_ends_what_hangs_and_leaves_programs_alone() {
    let world = World::new();
    let chaos = world.chaos.clone();
    let sandbox = world
        .builder()
        .layer(DeadlineLayer::new(Duration::from_millis(20)))
        .layer(chaos.clone())
        .provision()
        .await;
    let sandbox = sandbox.expect("a sandbox");
    // The layer under the deadline hangs, as a provider would.
    chaos.handle().after(Operation::Stat, 1, Fault::Hang);
    assert_eq!(sandbox.stat("x").await.expect_err("hangs").kind(), ErrorKind::Timeout);
    assert!(
        sandbox
            .run(["sleep", "0.05"])
            .await
            .expect("longer than the deadline")
            .success()
    );
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn the_limit_layer_bounds_operations_and_live_processes_and_gives_permits_back() {
    let world = World::new();
    let limit = LimitLayer::new(1);
    let sandbox = world.builder().layer(limit).provision().await.expect("a sandbox");
    for _ in 0..3 {
        let process = sandbox.spawn(["sleep", "60"]).await.expect("started");
        let second = tokio::time::timeout(Duration::from_millis(20), sandbox.spawn(["true"])).await;
        assert!(second.is_err(), "one live process at a time");
        drop(process);
    }
    let mut last = sandbox.spawn(["true"]).await.expect("its permit came back");
    assert!(last.wait().await.expect("ended").success());
    sandbox.stop().await.expect("stopping is not bounded");
}

#[tokio::test]
async fn a_stream_that_breaks_is_an_error_and_not_a_short_file() {
    let world = World::new();
    let sandbox = world.builder().provision().await.expect("a sandbox");
    sandbox.write("big", vec![7; 1 << 20]).await.expect("written");
    world.chaos.handle().cut_streams(Some(1000));
    let mut stream = sandbox.open("big").await.expect("opened");
    let mut content = Vec::new();
    assert!(stream.read_to_end(&mut content).await.is_err());
    assert_eq!(content.len(), 1000);
    let error = sandbox
        .download_dir(".", world.dir.path().join("copy"))
        .await
        .expect_err("cut");
    assert!(
        matches!(error.kind(), ErrorKind::ConnectionLost | ErrorKind::InvalidArgument),
        "{error}"
    );
    let mut process = sandbox.spawn(["cat", "big"]).await.expect("started");
    let mut stdout = process.stdout.take().expect("piped");
    assert!(stdout.read_to_end(&mut Vec::new()).await.is_err());
    world.chaos.handle().cut_streams(None);
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn every_bad_input_is_refused_before_anything_is_created() {
    let world = World::new();
    let field = |error: Error| (error.kind(), error.field().map(str::to_owned));
    let long = "n".repeat(300);
    for name in ["", "a/b", "../x", "-x", "a b", long.as_str()] {
        let error = world.builder().name(name).provision().await.expect_err("a bad name");
        assert_eq!(
            field(error),
            (ErrorKind::InvalidArgument, Some("name".into())),
            "{name:?}"
        );
    }
    let error = world
        .builder()
        .env("A", "x\0")
        .provision()
        .await
        .expect_err("a bad variable");
    assert_eq!(field(error), (ErrorKind::InvalidArgument, Some("env.A".into())));
    assert_eq!(world.chaos.handle().calls(Operation::Create), 0);
    assert!(!Path::new(&world.dir.path().join("runtimes")).exists());

    let sandbox = world.builder().provision().await.expect("a sandbox");
    for (command, wrong) in [
        (Command::new(Vec::<String>::new()), "argv"),
        (Command::new(["a", "b\0"]), "argv[1]"),
        (Command::new(["a"]).env("A=", "b"), "env.A="),
        (Command::new(["a"]).workdir("\0"), "workdir"),
    ] {
        let error = sandbox.run(command).await.expect_err("bad input");
        assert_eq!(field(error), (ErrorKind::InvalidArgument, Some(wrong.into())));
    }
    for path in ["", "a\0b", long.as_str()] {
        let error = sandbox.write(path, "x").await.expect_err("a bad path");
        assert_eq!(
            field(error),
            (ErrorKind::InvalidArgument, Some("path".into())),
            "{path:?}"
        );
    }
    assert_eq!(world.chaos.handle().calls(Operation::Run), 0);
    assert_eq!(world.chaos.handle().calls(Operation::Write), 0);
    assert_eq!(
        field(sandbox.expose(0).await.expect_err("no port")),
        (ErrorKind::InvalidArgument, Some("port".into()))
    );
    sandbox.stop().await.expect("stopped");
}
