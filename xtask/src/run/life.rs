//! The life of one sandbox, from its creation to its end.

use std::io;
use std::pin::pin;
use std::sync::OnceLock;

use runtime_core::{Collect, Error, ErrorKind, Output, Result, Sandbox, collect, shutdown};
use serde_json::Map;
use tokio::io::AsyncWriteExt;

use super::output::{Writer, input};
use super::phases::Phases;
use super::plan::Plan;
use super::report::{Ending, Report};
use super::transfer;

/// Lives through `plan`. What was created is deleted before this returns, or is reported.
pub(super) async fn live(plan: Plan) -> Report {
    // The report is still to be written when the box is gone.
    let options = shutdown::Options {
        quiet: true,
        exit: false,
        ..shutdown::Options::default()
    };
    if let Err(error) = shutdown::install_with(options) {
        return Report::refused(error);
    }
    let mut phases = Phases::start();
    let sandbox = OnceLock::new();
    let mut errors = Vec::new();
    let mut ending = tokio::select! {
        // First: when the box is stopped under the program, that is not how it failed.
        biased;
        code = shutdown::requested() => Ending::Interrupted(code),
        ending = use_box(&plan, &sandbox, &mut phases, &mut errors) => ending,
    };
    let interrupted = matches!(ending, Ending::Interrupted(_));
    let notice = async {
        if interrupted {
            eprintln!("stopping the sandbox; interrupt again to leave it to `cargo xtask reap`");
        }
    };
    let mut record = Map::new();
    let mut egress = None;
    if let Some(sandbox) = sandbox.get() {
        record = sandbox.info();
        egress = sandbox.egress_log();
        // Whoever does not read our standard error does not delay the deletion, which has begun.
        let stop = async { tokio::join!(sandbox.stop(), notice).0 };
        let mut stop = pin!(phases.during("stop", "deleting the sandbox", stop));
        let stopped = tokio::select! {
            stopped = &mut stop => stopped,
            code = shutdown::requested(), if !interrupted => {
                ending = Ending::Interrupted(code);
                stop.await
            }
        };
        if let Err(error) = stopped {
            errors.push(error);
        }
    } else {
        notice.await;
    }
    Report {
        ending,
        errors,
        phases: phases.finish(),
        sandbox: record,
        egress,
        record_egress: plan.record_egress,
    }
}

/// Creates the box and uses it. The box is left in `slot` for its owner to delete.
async fn use_box(plan: &Plan, slot: &OnceLock<Sandbox>, phases: &mut Phases, errors: &mut Vec<Error>) -> Ending {
    if let Err(error) = prepare(plan, slot, phases).await {
        return Ending::Failed(error);
    }
    let Some(sandbox) = slot.get() else {
        return Ending::Failed(Error::new(ErrorKind::Other, "the sandbox is not where it was left"));
    };
    let ending = match phases.quietly("run", program(plan, sandbox)).await {
        Ok(ending) => ending,
        Err(error) => Ending::Failed(error),
    };
    // What the program left is wanted most when it failed.
    if ending.ran() {
        for copy in &plan.downloads {
            let label = format!("downloading {}", copy.from.display());
            let download = transfer::download(sandbox, plan, copy);
            if let Err(error) = phases.during("download", &label, download).await {
                errors.push(error);
            }
        }
    }
    ending
}

async fn prepare(plan: &Plan, slot: &OnceLock<Sandbox>, phases: &mut Phases) -> Result<()> {
    let mut builder = Sandbox::builder(plan.config.clone()).envs(plan.env.clone());
    if let Some(name) = &plan.name {
        builder = builder.name(name);
    }
    let label = format!("creating a sandbox ({})", plan.config.tag());
    let created = phases.during("provision", &label, builder.provision()).await?;
    let sandbox = slot.get_or_init(|| created);
    phases
        .during("setup", "preparing setup", sandbox.prepare_setup())
        .await?;
    if let Some(dir) = plan.workdir.as_ref().filter(|dir| dir.is_relative()) {
        sandbox.create_dir(dir).await?;
    }
    for copy in &plan.uploads {
        let label = format!("uploading {}", copy.from.display());
        phases
            .during("upload", &label, transfer::upload(sandbox, plan, copy))
            .await?;
    }
    let restrict = sandbox.prepare_execution(Default::default());
    phases.during("restrict", "closing the network", restrict).await
}

/// Runs the program to its end.
async fn program(plan: &Plan, sandbox: &Sandbox) -> Result<Ending> {
    let limited = plan.timeout.is_some();
    if plan.json {
        return Ok(Ending::of(started(plan, sandbox, None).await, limited));
    }
    let Writer { sink, mut done } = Writer::start().map_err(|error| Error::io("starting a thread", error))?;
    let ended = tokio::select! {
        ended = started(plan, sandbox, Some(sink)) => Ending::of(ended, limited),
        // Before the program's end this is never a success: its sender still lives.
        written = &mut done => return unwritten(written.unwrap_or_else(|_| Err(io::Error::other("its thread ended")))),
    };
    match done.await {
        Ok(Err(error)) => unwritten(Err(error)),
        _ => Ok(ended),
    }
}

/// Our own output cannot be written any more, and the program was killed for it.
fn unwritten(written: io::Result<()>) -> Result<Ending> {
    match written {
        Ok(()) => Err(Error::new(ErrorKind::Other, "the output ended before the program did")),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Ending::NobodyReads),
        Err(error) => Err(Error::io("writing the program's output", error)),
    }
}

async fn started(
    plan: &Plan,
    sandbox: &Sandbox,
    sink: Option<tokio::sync::mpsc::Sender<runtime_core::OutputChunk>>,
) -> Result<Output> {
    let mut command = plan.command.clone();
    // Streamed output need not be kept as well.
    let output_limit = match sink {
        Some(_) => 0,
        None => runtime_core::DEFAULT_OUTPUT_LIMIT,
    };
    command = command.output_limit(output_limit);
    if !plan.stdin {
        if let Some(sink) = sink {
            command = command.stream_to(sink);
        }
        return sandbox.run_program(command).await;
    }
    let mut process = sandbox.spawn(command).await?;
    let stdin = process.stdin.take();
    let mut chunks = input().map_err(|error| Error::io("starting a thread", error))?;
    let feed = async move {
        let Some(mut stdin) = stdin else { return };
        while let Some(chunk) = chunks.recv().await {
            // A program that reads no more is no error: its exit code says the rest.
            if stdin.write_all(&chunk).await.is_err() || stdin.flush().await.is_err() {
                return;
            }
        }
        let _ = stdin.shutdown().await;
    };
    let feed = tokio::spawn(feed);
    let options = Collect {
        stdin: None,
        timeout: plan.timeout,
        output_limit,
        sink,
    };
    let output = collect(process, options).await;
    feed.abort();
    output.map_err(|error| {
        error
            .with_operation("run_program")
            .with_provider(sandbox.provider())
            .with_sandbox(sandbox.name(), sandbox.id())
    })
}
