//! The life of a box: phases, stop in every way, what is refused afterwards.

use std::future::Future;
use std::pin::pin;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::task::JoinSet;

use crate::command::{Command, Env};
use crate::conformance::case::{Capability, Case, case, probe};
use crate::conformance::context::{Context, each, refused, refused_field, sh};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::ErrorKind;
use crate::files::ByteStream;
use crate::sandbox::{Phase, Sandbox};
use crate::view::View;

pub(super) const CASES: &[Case] = &[
    case!("lifecycle/phases-follow-each-other", phases),
    case!(
        "lifecycle/preparing-an-unrestricted-box-changes-nothing",
        prepare_unrestricted
    ),
    case!("lifecycle/preparing-again-waits-for-no-server", prepare_again),
    case!("lifecycle/setup-is-refused-while-a-program-runs", setup_refused)
        .needs(&[Capability::LiveProcesses])
        .gap_untested(),
    case!("lifecycle/a-box-is-alive-until-it-is-stopped", alive),
    case!("lifecycle/stopping-twice", stop_twice),
    case!("lifecycle/stopping-from-many-tasks", stop_at_once),
    case!(
        "lifecycle/stopping-while-programs-run-is-told-to-them",
        stop_while_running
    ),
    case!("lifecycle/stopping-ends-what-ignores-term", stop_deaf),
    case!("lifecycle/a-stopped-box-refuses-every-call", use_after_stop),
    case!("lifecycle/a-view-does-not-outlive-the-box", view_after_stop),
    case!("lifecycle/a-view-does-not-keep-the-box-alive", view_keeps_nothing),
    case!("lifecycle/dropping-stops", drop_stops),
    case!("lifecycle/dropping-outside-an-executor-stops", drop_outside),
    case!(
        "lifecycle/dropping-while-the-executor-shuts-down-stops",
        drop_in_shutdown
    ),
    case!(
        "lifecycle/an-executor-that-goes-away-during-provision-leaves-no-box",
        shutdown_in_provision
    ),
    case!(
        "lifecycle/provisioning-outside-an-executor-is-refused",
        provision_outside
    ),
    case!("lifecycle/a-boot-timeout-leaves-no-box", boot_timeout),
    case!("lifecycle/a-name-in-use-is-refused", name_in_use),
    case!("lifecycle/a-name-is-free-again-after-the-stop", name_again),
    case!("lifecycle/bad-names-are-refused-before-creation", bad_names),
    case!("lifecycle/the-record-of-a-box", info),
    case!("lifecycle/the-id-outlives-the-box", id_kept),
    case!("lifecycle/capabilities-are-those-of-the-configuration", capabilities),
    case!("lifecycle/twenty-boxes-at-once", twenty).deadline(240),
    case!("lifecycle/boxes-do-not-see-each-others-files", private).needs(&[Capability::PrivateFilesystem]),
    case!("lifecycle/read-only-files-do-not-keep-a-box", read_only_files),
    case!("lifecycle/a-lifetime-can-be-extended", extend),
    case!("lifecycle/pause-and-resume", pause)
        .needs(&[Capability::Pause])
        .or_else(probe!(pause_refused)),
    case!("lifecycle/a-box-that-died-is-not-alive", died),
    case!("lifecycle/a-box-that-died-stays-dead", died_run),
    case!("lifecycle/a-box-that-dies-ends-what-runs", dies_running),
    case!("lifecycle/a-box-that-died-can-be-stopped", died_stop),
];

async fn phases(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let view = sandbox.view();
    ensure_eq!(sandbox.phase(), Phase::Started);
    sh(&sandbox, "true").await?;
    sandbox.prepare_setup().await?;
    ensure_eq!(view.phase(), Phase::Setup);
    sandbox.prepare_setup().await?;
    ensure_eq!(view.phase(), Phase::Setup);
    sh(&sandbox, "true").await?;
    sandbox.prepare_execution(Default::default()).await?;
    ensure_eq!(view.phase(), Phase::Executing);
    sh(&sandbox, "true").await?;
    sandbox.prepare_execution(Default::default()).await?;
    ensure_eq!(view.phase(), Phase::Executing);
    sandbox.prepare_setup().await?;
    ensure_eq!(view.phase(), Phase::Setup);
    sandbox.stop().await?;
    ensure_eq!(view.phase(), Phase::Stopped);
    refused(sandbox.prepare_setup().await, ErrorKind::Phase)?;
    refused(sandbox.prepare_execution(Default::default()).await, ErrorKind::Phase)?;
    ensure_eq!(view.phase(), Phase::Stopped);
    Ok(())
}

async fn prepare_unrestricted(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", "kept").await?;
    sandbox
        .run_background(
            ["sh", "-c", "until [ -e ask ]; do sleep 0.05; done; echo answer"],
            "log",
        )
        .await?;
    sandbox.prepare_setup().await?;
    sandbox.prepare_execution(Default::default()).await?;
    ensure_eq!(&sandbox.read("file").await?[..], b"kept");
    sh(&sandbox, "touch ask; until [ -s log ]; do sleep 0.05; done").await?;
    Ok(())
}

async fn prepare_again(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.prepare_execution(Default::default()).await?;
    sandbox.run_background(["sleep", "1000"], "log").await?;
    sh(&sandbox, "true").await?;
    sandbox.prepare_setup().await?;
    ensure_eq!(sandbox.phase(), Phase::Setup);
    Ok(())
}

async fn setup_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    // One that was started before the execution phase does not count.
    let before = sandbox.spawn(["cat"]).await?;
    sandbox.prepare_execution(Default::default()).await?;
    sandbox.prepare_setup().await?;
    sandbox.prepare_execution(Default::default()).await?;
    let during = sandbox.spawn(["cat"]).await?;
    refused(sandbox.prepare_setup().await, ErrorKind::Phase)?;
    ensure_eq!(sandbox.phase(), Phase::Executing);
    drop(during);
    sandbox.prepare_setup().await?;
    ensure_eq!(sandbox.phase(), Phase::Setup);
    drop(before);
    Ok(())
}

async fn alive(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.alive().await?;
    sandbox.view().alive().await?;
    sandbox.stop().await?;
    refused(sandbox.alive().await, ErrorKind::Phase)?;
    Ok(())
}

async fn stop_twice(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.stop().await?;
    // It is gone when the first call returns, not some time after.
    cx.all_gone(Duration::ZERO).await?;
    sandbox.stop().await?;
    sandbox.stop().await?;
    Ok(())
}

async fn stop_at_once(cx: Context) -> Verdict {
    let sandbox = std::sync::Arc::new(cx.sandbox().await?);
    sandbox.run_background(["sleep", "1000"], "log").await?;
    let mut stops = JoinSet::new();
    for _ in 0..16 {
        let sandbox = sandbox.clone();
        stops.spawn(async move { sandbox.stop().await });
    }
    while let Some(stopped) = stops.join_next().await {
        stopped??;
        ensure_eq!(sandbox.phase(), Phase::Stopped);
    }
    Ok(())
}

async fn stop_while_running(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut running = JoinSet::new();
    for n in 0..4 {
        let view = sandbox.view();
        let script = format!("touch up-{n}; sleep 1000");
        running.spawn(async move { view.run(Command::shell(script)).await });
    }
    sh(
        &sandbox,
        "until [ $(ls up-* 2>/dev/null | wc -l) -eq 4 ]; do sleep 0.05; done",
    )
    .await?;
    let view = sandbox.view();
    let (sender, reader) = tokio::io::duplex(10);
    running.spawn(async move {
        view.write("never", ByteStream::new(reader)).await?;
        view.run(["true"]).await
    });
    tokio::task::yield_now().await;
    sandbox.stop().await?;
    while let Some(ended) = running.join_next().await {
        match ended? {
            Err(error) if matches!(error.kind(), ErrorKind::SandboxGone | ErrorKind::Phase) => {
                ensure_eq!(error.sandbox(), Some(sandbox.name()));
            }
            other => return Err(Failure::new(format_args!("want SandboxGone, got {other:?}"))),
        }
    }
    drop(sender);
    Ok(())
}

async fn stop_deaf(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let view = sandbox.view();
    let script =
        "trap '' TERM INT HUP; touch up; (trap '' TERM; while :; do sleep 1; done) & while :; do sleep 1; done";
    let running = tokio::spawn(async move { view.run(Command::shell(script)).await });
    sh(&sandbox, "until [ -e up ]; do sleep 0.05; done").await?;
    sandbox.stop().await?;
    refused(running.await?, ErrorKind::SandboxGone)?;
    Ok(())
}

/// Every call must be refused because of the phase.
async fn refuses_every_call(view: &View, cx: &Context) -> Verdict {
    let phase = ErrorKind::Phase;
    let error = refused(view.run(["true"]).await, phase)?;
    ensure!(!error.is_retryable(), "trying again does not help: {error}");
    ensure_eq!(error.sandbox(), Some(view.name()));
    refused(view.run_program(["true"]).await, phase)?;
    refused(view.run_background(["true"], "log").await, phase)?;
    if view.capabilities().live_processes {
        refused(view.spawn(["cat"]).await, phase)?;
    }
    refused(view.alive().await, phase)?;
    refused(view.read("file").await, phase)?;
    refused(view.read_up_to("file", 1).await, phase)?;
    refused(view.open("file").await, phase)?;
    refused(view.write("file", "x").await, phase)?;
    refused(view.stat("file").await, phase)?;
    refused(view.list(".").await, phase)?;
    refused(view.create_dir("dir").await, phase)?;
    refused(view.remove("file").await, phase)?;
    refused(view.remove_all("file").await, phase)?;
    refused(view.upload_dir(cx.scratch(), "dir").await, phase)?;
    refused(view.upload_tar(ByteStream::from_bytes(""), "dir").await, phase)?;
    refused(view.download_dir(".", cx.scratch()).await, phase)?;
    refused(view.download_tar(".").await, phase)?;
    refused(view.expose(8000).await, phase)?;
    refused(view.extend_lifetime(Duration::from_secs(60)).await, phase)?;
    refused(view.pause().await, phase)?;
    refused(view.resume().await, phase)?;
    Ok(())
}

async fn use_after_stop(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.stop().await?;
    refuses_every_call(&sandbox, &cx).await?;
    // What needs no box still answers.
    ensure_eq!(sandbox.phase(), Phase::Stopped);
    ensure!(sandbox.info().contains_key("type"), "the record stays");
    Ok(())
}

async fn view_after_stop(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let views = [sandbox.view(), sandbox.with_env(Env::from_iter([("A", "1")]))?];
    sandbox.stop().await?;
    for view in &views {
        refuses_every_call(view, &cx).await?;
    }
    Ok(())
}

async fn view_keeps_nothing(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let view = sandbox.view();
    drop(sandbox);
    cx.all_gone(Duration::from_secs(60)).await?;
    refuses_every_call(&view, &cx).await
}

async fn drop_stops(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.run_background(["sleep", "1000"], "log").await?;
    let view = sandbox.view();
    let running = tokio::spawn(async move { view.run(Command::shell("touch up; sleep 1000")).await });
    sh(&sandbox, "until [ -e up ]; do sleep 0.05; done").await?;
    drop(sandbox);
    refused(running.await?, ErrorKind::SandboxGone)?;
    cx.all_gone(Duration::from_secs(60)).await
}

/// Moves a box out of the executor's sight: to a thread that has none.
fn on_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failure> {
    let thread = std::thread::Builder::new().spawn(work)?;
    thread.join().map_err(|_| Failure::new("the thread panicked"))
}

async fn drop_outside(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.run_background(["sleep", "1000"], "log").await?;
    on_a_thread(move || drop(sandbox))?;
    cx.all_gone(Duration::from_secs(60)).await
}

fn executor() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?)
}

async fn drop_in_shutdown(cx: Context) -> Verdict {
    let builder = cx.builder();
    on_a_thread(move || {
        let executor = executor()?;
        let sandbox = executor.block_on(builder.provision())?;
        executor.block_on(sandbox.run_background(["sleep", "1000"], "log"))?;
        let view = sandbox.view();
        executor.spawn(async move { view.run(["sleep", "1000"]).await });
        // The box goes down with a task of the executor that is going down.
        executor.spawn(async move {
            let _sandbox = sandbox;
            std::future::pending::<()>().await;
        });
        executor.shutdown_timeout(Duration::from_secs(10));
        Verdict::Ok(())
    })??;
    cx.all_gone(Duration::from_secs(60)).await
}

async fn shutdown_in_provision(cx: Context) -> Verdict {
    for micros in [0, 50, 200, 800, 3000, 12_000] {
        let builder = cx.builder();
        on_a_thread(move || {
            let executor = executor()?;
            let provision = executor.spawn(builder.provision());
            std::thread::sleep(Duration::from_micros(micros));
            executor.shutdown_timeout(Duration::from_secs(10));
            drop(provision);
            Verdict::Ok(())
        })??;
    }
    cx.all_gone(Duration::from_secs(60)).await
}

async fn provision_outside(cx: Context) -> Verdict {
    let builder = cx.builder();
    let polled = on_a_thread(move || {
        let mut provision = pin!(builder.provision());
        match provision.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())) {
            Poll::Ready(result) => Some(result.map(|_: Sandbox| ())),
            Poll::Pending => None,
        }
    })?;
    let result = polled.ok_or_else(|| Failure::new("it waits for an executor that is not there"))?;
    refused(result, ErrorKind::Phase)?;
    Ok(())
}

async fn boot_timeout(cx: Context) -> Verdict {
    match cx.builder().boot_timeout(Duration::from_nanos(1)).provision().await {
        // A provider may be that quick, or may not look at the clock before it is done.
        Ok(sandbox) => sandbox.stop().await?,
        Err(error) => ensure_eq!(error.kind(), ErrorKind::Timeout, "{error}"),
    }
    cx.all_gone(Duration::from_secs(60)).await
}

async fn name_in_use(cx: Context) -> Verdict {
    if !cx.target().names_are_unique() {
        return Err(Failure::skip(
            "this provider gives every box an identity of its own, whatever its name",
        ));
    }
    let first = cx.sandbox().await?;
    first.write("file", "of the first").await?;
    let second = cx.builder_named(first.name()).provision().await;
    refused_field(second.map(|_| ()), ErrorKind::AlreadyExists, "name")?;
    // And the first is untouched by the failure of the second.
    ensure_eq!(&first.read("file").await?[..], b"of the first");
    first.alive().await?;
    Ok(())
}

async fn name_again(cx: Context) -> Verdict {
    let first = cx.sandbox().await?;
    first.write("file", "of the first").await?;
    first.stop().await?;
    let second = cx.builder_named(first.name()).provision().await?;
    refused(second.read("file").await, ErrorKind::NotFound)?;
    second.stop().await?;
    Ok(())
}

async fn bad_names(cx: Context) -> Verdict {
    let long = "n".repeat(64);
    for name in [
        "", ".", "..", "a/b", "../a", "-a", "a b", "a\nb", "a\0b", "größe", &long,
    ] {
        let builder = Sandbox::builder(cx.target().config())
            .cache(cx.target().cache())
            .name(name);
        refused_field(
            builder.provision().await.map(|_| ()),
            ErrorKind::InvalidArgument,
            "name",
        )?;
    }
    Ok(())
}

async fn info(cx: Context) -> Verdict {
    let sandbox = cx.builder().env("TOKEN", "conformance-secret").provision().await?;
    let info = sandbox.info();
    ensure_eq!(info.get("type").and_then(|tag| tag.as_str()), Some(sandbox.provider()));
    ensure_eq!(info.get("name").and_then(|name| name.as_str()), Some(sandbox.name()));
    ensure_eq!(info.get("id").and_then(|id| id.as_str()), sandbox.id().as_deref());
    ensure!(sandbox.id().is_some_and(|id| !id.is_empty()), "a live box has an id");
    ensure_eq!(
        info.get("workdir").and_then(|dir| dir.as_str()),
        sandbox.workdir().to_str()
    );
    ensure_eq!(info.get("borrowed").and_then(serde_json::Value::as_bool), Some(false));
    // Every field of the configuration is there.
    let config = cx.target().config().to_value();
    for field in config.as_object().into_iter().flat_map(|fields| fields.keys()) {
        ensure!(info.contains_key(field), "{field} of the configuration is missing");
    }
    ensure!(
        !format!("{info:?}").contains("conformance-secret"),
        "a secret in the record"
    );
    Ok(())
}

async fn id_kept(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let (id, workdir) = (sandbox.id(), sandbox.workdir());
    ensure!(id.is_some(), "a live box has an id");
    sandbox.stop().await?;
    ensure_eq!(sandbox.id(), id);
    ensure_eq!(sandbox.workdir(), workdir);
    ensure_eq!(sandbox.info().get("id").and_then(|id| id.as_str()), id.as_deref());
    Ok(())
}

async fn capabilities(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    ensure_eq!(sandbox.capabilities(), cx.capabilities());
    ensure_eq!(sandbox.provider(), cx.target().config().tag());
    Ok(())
}

async fn twenty(cx: Context) -> Verdict {
    each(20, 0..20, |n| {
        let cx = cx.clone();
        async move {
            let sandbox = cx.sandbox().await?;
            sandbox.write("mine", n.to_string()).await?;
            let seen = sh(&sandbox, "cat mine; ls -A | wc -l").await?;
            ensure_eq!(seen.replace(' ', ""), format!("{n}1\n"));
            sandbox.stop().await?;
            Ok(())
        }
    })
    .await
}

async fn private(cx: Context) -> Verdict {
    let (one, two) = (cx.sandbox().await?, cx.sandbox().await?);
    let path = format!("/tmp/private-{}", crate::names::random_hex(12));
    one.write(&path, "mine").await?;
    let seen = two.stat(&path).await;
    // Where it is not private, nothing may stay on the host.
    let removed = one.remove(&path).await;
    refused(seen, ErrorKind::NotFound)?;
    Ok(removed?)
}

async fn read_only_files(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "mkdir -p a/b/c; touch a/b/c/file; chmod 400 a/b/c/file; chmod 500 a/b/c a/b; chmod 000 a",
    )
    .await?;
    sandbox.stop().await?;
    cx.all_gone(Duration::from_secs(10)).await
}

async fn extend(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.extend_lifetime(Duration::from_secs(120)).await?;
    sandbox.alive().await?;
    Ok(())
}

async fn pause(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", "kept").await?;
    sandbox.pause().await?;
    sandbox.resume().await?;
    ensure_eq!(&sandbox.read("file").await?[..], b"kept");
    sh(&sandbox, "true").await?;
    // A paused box can be stopped.
    sandbox.pause().await?;
    sandbox.stop().await?;
    Ok(())
}

async fn pause_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    refused(sandbox.pause().await, ErrorKind::Unsupported)?;
    refused(sandbox.resume().await, ErrorKind::Unsupported)?;
    Ok(())
}

async fn kill_box(cx: &Context, view: &View) -> Verdict {
    if !cx.target().can_kill_box() {
        return Err(Failure::skip("this target cannot kill a box"));
    }
    cx.target().kill_box(&cx.box_ref(view)).await.map_err(Failure::new)
}

async fn died(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    kill_box(&cx, &sandbox).await?;
    refused(sandbox.alive().await, ErrorKind::SandboxGone)?;
    Ok(())
}

async fn died_run(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    kill_box(&cx, &sandbox).await?;
    // Never a result, least of all a good one.
    refused(sandbox.run(["true"]).await, ErrorKind::SandboxGone)?;
    refused(
        sandbox.run_program(["sh", "-c", "exit 3"]).await,
        ErrorKind::SandboxGone,
    )?;
    refused(sandbox.run_background(["true"], "log").await, ErrorKind::SandboxGone)?;
    // And nothing brings it back.
    refused(sandbox.write("dir/file", "x").await, ErrorKind::SandboxGone)?;
    refused(sandbox.create_dir("dir").await, ErrorKind::SandboxGone)?;
    refused(sandbox.upload_dir(cx.scratch(), "dir").await, ErrorKind::SandboxGone)?;
    ensure!(sandbox.read("dir/file").await.is_err(), "a file of a dead box was read");
    refused(sandbox.alive().await, ErrorKind::SandboxGone)?;
    Ok(())
}

async fn dies_running(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let view = sandbox.view();
    let running = tokio::spawn(async move { view.run(Command::shell("echo before; touch up; sleep 1000")).await });
    sh(&sandbox, "until [ -e up ]; do sleep 0.05; done").await?;
    let mut live = match cx.capabilities().live_processes {
        true => Some(sandbox.spawn(["cat"]).await?),
        false => None,
    };
    kill_box(&cx, &sandbox).await?;
    match running.await? {
        Err(error) => ensure_eq!(error.kind(), ErrorKind::SandboxGone, "{error}"),
        // Where a box is no more than its processes, theirs is the only death there is.
        Ok(output) => ensure!(!output.success(), "a dead box looks like a success: {output:?}"),
    }
    if let Some(process) = &mut live {
        let mut rest = Vec::new();
        if let Some(mut stdout) = process.stdout.take() {
            let _ = stdout.read_to_end(&mut rest).await;
        }
        match process.wait().await {
            Err(error) => ensure_eq!(error.kind(), ErrorKind::SandboxGone, "{error}"),
            Ok(status) => ensure!(!status.success(), "a dead box looks like a success: {status}"),
        }
    }
    Ok(())
}

async fn died_stop(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.run_background(["sleep", "1000"], "log").await?;
    kill_box(&cx, &sandbox).await?;
    sandbox.stop().await?;
    ensure_eq!(sandbox.phase(), Phase::Stopped);
    Ok(())
}
