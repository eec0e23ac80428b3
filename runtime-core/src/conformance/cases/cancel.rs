//! Futures that are dropped at every await: nothing keeps running, and the box goes on.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::task::JoinSet;

use crate::command::Command;
use crate::conformance::case::{Capability, Case, case};
use crate::conformance::cases::trees::{make_tree, snapshot};
use crate::conformance::context::{Context, Pulse, cut_short, refused, sh};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::ErrorKind;
use crate::files::ByteStream;
use crate::sandbox::Phase;

pub(super) const CASES: &[Case] = &[
    case!("cancel/run-kills-the-program", run).deadline(120),
    case!("cancel/run-kills-the-program-while-bytes-flow", run_flowing).deadline(120),
    case!("cancel/run-kills-the-program-at-its-timeout", run_at_timeout).deadline(120),
    case!("cancel/aborted-tasks-kill-their-programs", aborted_tasks).deadline(120),
    case!("cancel/spawn-kills-the-process", spawn)
        .needs(&[Capability::LiveProcesses])
        .gap_untested()
        .deadline(120),
    case!("cancel/a-cancelled-read-of-stdout-loses-nothing", live_read)
        .needs(&[Capability::LiveProcesses])
        .gap_untested(),
    case!("cancel/run-background-ends-with-the-box-at-the-latest", run_background),
    case!("cancel/read-leaves-the-file-readable", read),
    case!("cancel/write-leaves-the-old-content-or-the-new", write)
        .needs(&[Capability::AtomicWrite])
        .gap_untested()
        .deadline(120),
    case!("cancel/write-of-a-stalled-stream-leaves-the-old-content", write_stalled)
        .needs(&[Capability::AtomicWrite])
        .gap_untested(),
    case!("cancel/stat-list-create-and-remove", small_operations),
    case!("cancel/what-comes-after-has-the-last-word", last_word)
        .needs(&[Capability::Local])
        .gap_untested()
        .deadline(240),
    case!("cancel/upload-can-be-done-again", upload).deadline(120),
    case!("cancel/download-can-be-done-again", download).deadline(120),
    case!("cancel/provision-leaves-no-box", provision).deadline(180),
    case!("cancel/provision-by-an-aborted-task-leaves-no-box", provision_aborted).deadline(180),
    case!("cancel/stop-goes-on", stop),
    case!("cancel/preparing-goes-on", prepare),
];

/// Drops futures of one kind at each of their awaits, then at instants that have nothing to do with awaits. Stops
/// early when a future came to its end, or waits for something that does not come.
async fn at_every_await<F: Future>(mut make: impl FnMut() -> F) {
    for polls in 1..=24 {
        let cut = cut_short(make(), polls);
        match tokio::time::timeout(Duration::from_millis(300), cut).await {
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => break,
        }
    }
    let mut micros = 40;
    while micros < 60_000 {
        let _ = tokio::time::timeout(Duration::from_micros(micros), make()).await;
        micros = micros * 8 / 5;
    }
}

async fn run(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}sleep 1000 & echo up; trap '' TERM; wait; sleep 1000", pulse.hold());
    at_every_await(|| sandbox.run(Command::shell(&script))).await;
    pulse.gone(&sandbox).await?;
    at_every_await(|| sandbox.run_program(Command::shell(&script))).await;
    pulse.gone(&sandbox).await?;
    ensure_eq!(sh(&sandbox, "echo fine").await?, "fine\n");
    Ok(())
}

async fn run_flowing(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}cat; yes >&2", pulse.hold());
    at_every_await(|| sandbox.run(Command::shell(&script).stdin(vec![b'x'; 1 << 20]).output_limit(1000))).await;
    pulse.gone(&sandbox).await?;
    ensure_eq!(sh(&sandbox, "echo fine").await?, "fine\n");
    Ok(())
}

async fn run_at_timeout(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}echo up; sleep 1000", pulse.hold());
    at_every_await(|| sandbox.run(Command::shell(&script).timeout(Duration::from_millis(10)))).await;
    pulse.gone(&sandbox).await?;
    ensure_eq!(sh(&sandbox, "echo fine").await?, "fine\n");
    Ok(())
}

async fn aborted_tasks(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    for pause in [0, 1, 20, 200] {
        let mut tasks = JoinSet::new();
        for _ in 0..16 {
            let view = sandbox.view();
            let script = format!("{}sleep 1000", pulse.hold());
            tasks.spawn(async move { view.run(Command::shell(script)).await });
        }
        tokio::time::sleep(Duration::from_millis(pause)).await;
        tasks.shutdown().await;
        pulse.gone(&sandbox).await?;
    }
    ensure_eq!(sh(&sandbox, "echo fine").await?, "fine\n");
    Ok(())
}

async fn spawn(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}sleep 1000 & echo up; wait; sleep 1000", pulse.hold());
    at_every_await(|| sandbox.spawn(Command::shell(&script))).await;
    pulse.gone(&sandbox).await?;
    ensure_eq!(sh(&sandbox, "echo fine").await?, "fine\n");
    Ok(())
}

async fn live_read(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "i=0; while [ $i -lt 300 ]; do echo line $i; i=$((i+1)); [ $((i % 10)) -ne 0 ] || sleep 0.02; done";
    let mut process = sandbox.spawn(["sh", "-c", script]).await?;
    let mut stdout = process
        .stdout
        .take()
        .ok_or_else(|| Failure::new("the process has no stdout"))?;
    let mut seen = Vec::new();
    loop {
        let mut piece = [0; 37];
        match tokio::time::timeout(Duration::from_millis(1), stdout.read(&mut piece)).await {
            Ok(Ok(0)) => break,
            Ok(count) => seen.extend_from_slice(&piece[..count?]),
            Err(_) => {}
        }
    }
    let want: String = (0..300).map(|n| format!("line {n}\n")).collect();
    ensure_eq!(String::from_utf8(seen)?, want);
    Ok(())
}

async fn run_background(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    at_every_await(|| sandbox.run_background(["sleep", "1000"], "server.log")).await;
    ensure_eq!(sh(&sandbox, "echo fine").await?, "fine\n");
    // What is left of it after the stop is what every case is asked for.
    sandbox.stop().await?;
    Ok(())
}

async fn read(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let content = vec![b'x'; 5 << 20];
    sandbox.write("file", content.clone()).await?;
    at_every_await(|| sandbox.read("file")).await;
    at_every_await(|| async {
        let mut stream = sandbox.open("file").await?;
        let mut seen = Vec::new();
        let _ = stream.read_to_end(&mut seen).await;
        Ok::<_, crate::Error>(seen)
    })
    .await;
    ensure!(sandbox.read("file").await? == content, "the file is not what it was");
    Ok(())
}

async fn write(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", vec![b'0'; 3 << 20]).await?;
    let mut generation = 0_u8;
    at_every_await(|| {
        generation += 1;
        sandbox.write("file", vec![generation; 3 << 20])
    })
    .await;
    let content = sandbox.read("file").await?;
    ensure_eq!(content.len(), 3 << 20, "a part of a content");
    ensure!(content.iter().all(|byte| *byte == content[0]), "a mixture of contents");
    sandbox.write("file", "last").await?;
    ensure_eq!(&sandbox.read("file").await?[..], b"last");
    Ok(())
}

/// Gives some bytes, then nothing, and no end.
struct Stalled(usize);

impl AsyncRead for Stalled {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut TaskContext<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.0 == 0 {
            return Poll::Pending;
        }
        let count = self.0.min(buf.remaining());
        buf.put_slice(&vec![b'n'; count]);
        self.0 -= count;
        Poll::Ready(Ok(()))
    }
}

async fn write_stalled(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", "old").await?;
    for bytes in [0, 1, 100_000, 2_000_000] {
        let write = sandbox.write("file", ByteStream::new(Stalled(bytes)));
        let ended = tokio::time::timeout(Duration::from_millis(300), write).await;
        ensure!(ended.is_err(), "a stream without an end was written: {ended:?}");
        ensure_eq!(&sandbox.read("file").await?[..], b"old", "after {bytes} bytes");
    }
    sandbox.write("file", "new").await?;
    ensure_eq!(&sandbox.read("file").await?[..], b"new");
    Ok(())
}

async fn small_operations(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("dir/file", "x").await?;
    at_every_await(|| sandbox.stat("dir/file")).await;
    at_every_await(|| sandbox.list("dir")).await;
    at_every_await(|| sandbox.create_dir("made")).await;
    at_every_await(|| sandbox.alive()).await;
    at_every_await(|| sandbox.remove_all("dir")).await;
    sandbox.create_dir("made").await?;
    sandbox.alive().await?;
    match sandbox.remove_all("dir").await {
        Ok(()) => {}
        Err(error) => ensure_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
    }
    let names: Vec<_> = sandbox.list(".").await?.into_iter().map(|entry| entry.name).collect();
    ensure_eq!(names, ["made"]);
    Ok(())
}

async fn last_word(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let local = cx.scratch().join("local");
    make_tree(&local, 100)?;
    for round in 0..30 {
        let polls = round % 6 + 1;
        let pause = Duration::from_millis(20);
        let content = format!("last word {round}");
        // Whatever a dropped call still does, it does before the next one.
        let _ = tokio::time::timeout(pause, cut_short(sandbox.write("file", vec![b'x'; 1 << 20]), polls)).await;
        sandbox.write("file", content.clone()).await?;
        ensure_eq!(&sandbox.read("file").await?[..], content.as_bytes());
        let _ = tokio::time::timeout(pause, cut_short(sandbox.upload_dir(&local, "tree"), polls)).await;
        let _ = tokio::time::timeout(pause, cut_short(sandbox.remove_all("tree"), polls)).await;
        sandbox.write("tree/dir-0/file", content.clone()).await?;
        ensure_eq!(sh(&sandbox, "cat file tree/dir-0/file").await?, content.repeat(2));
        ensure_eq!(&sandbox.read("file").await?[..], content.as_bytes());
        sandbox.remove_all("tree").await?;
        refused(sandbox.stat("tree").await, ErrorKind::NotFound)?;
    }
    Ok(())
}

async fn upload(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let local = cx.scratch().join("local");
    make_tree(&local, 200)?;
    at_every_await(|| sandbox.upload_dir(&local, "tree")).await;
    sandbox.upload_dir(&local, "tree").await?;
    let back = cx.scratch().join("back");
    sandbox.download_dir("tree", &back).await?;
    ensure!(
        snapshot(&back)? == snapshot(&local)?,
        "the tree is not what was uploaded"
    );
    Ok(())
}

async fn download(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let local = cx.scratch().join("local");
    make_tree(&local, 200)?;
    sandbox.upload_dir(&local, "tree").await?;
    let back = cx.scratch().join("back");
    at_every_await(|| sandbox.download_dir("tree", &back)).await;
    at_every_await(|| async {
        let mut stream = sandbox.download_tar("tree").await?;
        let mut piece = vec![0; 10_000];
        let _ = stream.read(&mut piece).await;
        Ok::<_, crate::Error>(())
    })
    .await;
    let again = cx.scratch().join("again");
    sandbox.download_dir("tree", &again).await?;
    ensure!(
        snapshot(&again)? == snapshot(&local)?,
        "the tree is not what was uploaded"
    );
    Ok(())
}

async fn provision(cx: Context) -> Verdict {
    for polls in 0..4 {
        if let Some(Ok(sandbox)) = cut_short(cx.builder().provision(), polls).await {
            sandbox.stop().await?;
        }
    }
    let mut micros = 50;
    while micros < 2_000_000 {
        if let Ok(sandbox) = tokio::time::timeout(Duration::from_micros(micros), cx.builder().provision()).await {
            sandbox?.stop().await?;
            break;
        }
        micros *= 2;
    }
    Ok(())
}

async fn provision_aborted(cx: Context) -> Verdict {
    for micros in [0, 100, 300, 1000, 3000, 10_000] {
        let mut tasks = JoinSet::new();
        for _ in 0..4 {
            let builder = cx.builder();
            tasks.spawn(async move { builder.provision().await });
        }
        tokio::time::sleep(Duration::from_micros(micros)).await;
        tasks.shutdown().await;
    }
    Ok(())
}

async fn stop(cx: Context) -> Verdict {
    for polls in 1..4 {
        let sandbox = cx.sandbox().await?;
        sandbox.run_background(["sleep", "1000"], "log").await?;
        let cut = cut_short(sandbox.stop(), polls).await;
        ensure!(!matches!(cut, Some(Err(_))), "{cut:?}");
        ensure!(
            matches!(sandbox.phase(), Phase::Stopping | Phase::Stopped),
            "{}",
            sandbox.phase()
        );
        // Nobody calls `stop` again; the handle is only kept from being dropped.
        cx.all_gone(Duration::from_secs(30)).await?;
        drop(sandbox);
    }
    Ok(())
}

async fn prepare(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for polls in 1..3 {
        let _ = cut_short(sandbox.prepare_setup(), polls).await;
        let _ = cut_short(sandbox.prepare_execution(Default::default()), polls).await;
    }
    sandbox.prepare_setup().await?;
    sandbox.prepare_execution(Default::default()).await?;
    ensure_eq!(sandbox.phase(), Phase::Executing);
    ensure_eq!(sh(&sandbox, "echo fine").await?, "fine\n");
    if cx.capabilities().live_processes {
        let mut cat = sandbox.spawn(["cat"]).await?;
        if let Some(mut stdin) = cat.stdin.take() {
            stdin.write_all(b"x").await?;
        }
        cat.kill().await?;
    }
    Ok(())
}
