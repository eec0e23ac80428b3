//! Programs that do not end by themselves, and what they leave behind.

use std::time::Duration;

use tokio::sync::mpsc;

use crate::command::{Command, OutputChunk, PartialOutput};
use crate::conformance::case::{Capability, Case, case};
use crate::conformance::context::{Context, Pulse, each, refused, sh, succeeded};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::{Error, ErrorKind};
use crate::files::WriteOptions;

pub(super) const CASES: &[Case] = &[
    case!("deadlines/a-timeout-carries-what-was-printed", partial_output),
    case!("deadlines/a-timeout-kills-the-whole-tree", kills_tree),
    case!("deadlines/a-timeout-kills-what-ignores-term", ignores_term),
    case!("deadlines/a-timeout-that-is-not-reached-changes-nothing", not_reached),
    case!(
        "deadlines/a-timeout-reaches-a-program-that-reads-no-stdin",
        unread_stdin
    ),
    case!("deadlines/a-timeout-reaches-a-program-whose-sink-is-full", full_sink),
    case!("deadlines/a-timeout-reaches-endless-output", endless_output),
    case!(
        "deadlines/a-timeout-reaches-a-program-that-closed-its-streams",
        closed_streams
    ),
    case!("deadlines/a-timeout-holds-for-run-program", run_program),
    case!("deadlines/a-timeout-before-the-start-is-a-timeout", zero),
    case!("deadlines/timeouts-at-once-hit-their-own-programs", many_timeouts),
    case!(
        "deadlines/a-grandchild-with-the-pipe-does-not-hang-run",
        grandchild_with_pipe
    ),
    case!("deadlines/a-chatty-grandchild-does-not-hang-run", chatty_grandchild),
    case!("deadlines/what-a-program-leaves-behind-is-killed", leftovers).needs(&[Capability::KillsLeftovers]),
    case!("deadlines/a-tree-of-processes-is-killed-by-the-timeout", process_tree).deadline(120),
    case!("deadlines/a-chain-of-forks-is-killed-by-the-timeout", fork_chain).deadline(120),
];

/// By then a program has started and said what it has to say, on a busy machine too.
const IN_TIME: Duration = Duration::from_secs(4);

/// The call must have timed out. Returns what was printed before.
#[track_caller]
fn timed_out<T: std::fmt::Debug>(result: Result<T, Error>) -> Result<PartialOutput, Failure> {
    let mut error = refused(result, ErrorKind::Timeout)?;
    error
        .take_partial_output()
        .ok_or_else(|| Failure::new("a timeout carries the output so far"))
}

async fn partial_output(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "echo out; echo err >&2; printf 'no newline'; sleep 1000; echo late";
    let command = Command::shell(script).timeout(IN_TIME);
    let partial = timed_out(sandbox.run(command).await)?;
    ensure_eq!(&partial.stdout.bytes[..], b"out\nno newline");
    ensure_eq!(&partial.stderr.bytes[..], b"err\n");
    let alive = sandbox.run(["echo", "fine"]).await?;
    ensure_eq!(alive.stdout_lossy(), "fine\n", "the box lives on");
    Ok(())
}

async fn kills_tree(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!(
        "{} sleep 1000 & (sleep 1000 & sh -c 'sleep 1000; :' & wait) & sh -c 'sh -c \"sleep 1000; :\"; :' & echo up; wait",
        pulse.hold()
    );
    let partial = timed_out(sandbox.run(Command::shell(script).timeout(IN_TIME)).await)?;
    ensure_eq!(&partial.stdout.bytes[..], b"up\n");
    pulse.gone(&sandbox).await
}

async fn ignores_term(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let ignore = "trap '' TERM INT HUP QUIT; ";
    let script = format!(
        "{}{ignore} echo deaf; sh -c \"{ignore} while :; do sleep 1; done\" & while :; do sleep 1; done",
        pulse.hold()
    );
    let partial = timed_out(sandbox.run(Command::shell(script).timeout(IN_TIME)).await)?;
    ensure_eq!(&partial.stdout.bytes[..], b"deaf\n");
    pulse.gone(&sandbox).await
}

async fn not_reached(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("cat; echo err >&2; exit 5").stdin("in");
    let output = sandbox.run(command.timeout(Duration::from_secs(50))).await?;
    ensure_eq!(output.code(), Some(5));
    ensure_eq!(
        (output.stdout_lossy(), output.stderr_lossy()),
        ("in".into(), "err\n".into())
    );
    Ok(())
}

async fn unread_stdin(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("echo up; sleep 1000").stdin(vec![0; 8 << 20]);
    let partial = timed_out(sandbox.run(command.timeout(IN_TIME)).await)?;
    ensure_eq!(&partial.stdout.bytes[..], b"up\n");
    Ok(())
}

async fn full_sink(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let (sender, receiver) = mpsc::channel::<OutputChunk>(1);
    let script = format!("{}yes", pulse.hold());
    let command = Command::shell(script).stream_to(sender).output_limit(1000);
    let partial = timed_out(sandbox.run(command.timeout(IN_TIME)).await)?;
    ensure_eq!(partial.stdout.bytes.len(), 1000);
    drop(receiver);
    pulse.gone(&sandbox).await
}

async fn endless_output(cx: Context) -> Verdict {
    /// Few enough to have come in time on a busy machine.
    const LIMIT: usize = 64 << 10;
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}yes & yes >&2", pulse.hold());
    let command = Command::shell(script).output_limit(LIMIT as u64).timeout(IN_TIME);
    let partial = timed_out(sandbox.run(command).await)?;
    for captured in [&partial.stdout, &partial.stderr] {
        ensure_eq!(captured.bytes.len(), LIMIT);
        ensure!(captured.is_truncated(), "it says that it was cut");
        ensure!(captured.bytes.starts_with(b"y\ny\n"), "{captured:?}");
    }
    pulse.gone(&sandbox).await
}

async fn closed_streams(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}echo up; exec <&- >&- 2>&-; sleep 1000", pulse.hold());
    let partial = timed_out(sandbox.run(Command::shell(script).timeout(IN_TIME)).await)?;
    ensure_eq!(&partial.stdout.bytes[..], b"up\n");
    pulse.gone(&sandbox).await
}

async fn run_program(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}echo up; sleep 1000", pulse.hold());
    let command = Command::shell(script).timeout(IN_TIME);
    let partial = timed_out(sandbox.run_program(command).await)?;
    ensure_eq!(&partial.stdout.bytes[..], b"up\n");
    pulse.gone(&sandbox).await
}

async fn zero(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}sleep 1000", pulse.hold());
    for timeout in [Duration::ZERO, Duration::from_micros(100), Duration::from_millis(3)] {
        let command = Command::shell(&script).timeout(timeout);
        timed_out(sandbox.run(command).await)?;
    }
    pulse.gone(&sandbox).await
}

async fn many_timeouts(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    each(24, 0..24, |n: u64| {
        let view = sandbox.view();
        let script = format!("{}echo {n}; sleep 1000", pulse.hold());
        async move {
            if n.is_multiple_of(2) {
                let command = Command::shell(script).timeout(Duration::from_millis(12_000 + n * 20));
                let partial = timed_out(view.run(command).await)?;
                ensure_eq!(String::from_utf8_lossy(&partial.stdout.bytes), format!("{n}\n"));
            } else {
                let output = view.run(Command::shell(format!("sleep 6; exit {n}"))).await?;
                ensure_eq!(
                    output.code().map(i64::from),
                    i64::try_from(n).ok(),
                    "a program without a timeout"
                );
            }
            Ok(())
        }
    })
    .await?;
    pulse.gone(&sandbox).await
}

async fn grandchild_with_pipe(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let output = sandbox
        .run(Command::shell("sleep 1000 & echo out; echo err >&2; exit 3"))
        .await?;
    ensure_eq!(output.code(), Some(3));
    ensure_eq!(
        (output.stdout_lossy(), output.stderr_lossy()),
        ("out\n".into(), "err\n".into())
    );
    Ok(())
}

async fn chatty_grandchild(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "(while :; do echo noise; sleep 0.02; done) & echo first; exit 3";
    let output = sandbox.run(Command::shell(script)).await?;
    ensure_eq!(output.code(), Some(3));
    ensure!(output.stdout_lossy().contains("first\n"), "{:?}", output.stdout);
    Ok(())
}

async fn leftovers(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!(
        "{}(trap '' TERM HUP; while :; do sleep 1; done) >/dev/null 2>&1 & sleep 1000 & exit 0",
        pulse.hold()
    );
    succeeded(&sandbox.run(Command::shell(script)).await?, "the parent")?;
    pulse.gone(&sandbox).await
}

async fn process_tree(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    // 63 processes, half of them leaves that sleep.
    let script = "#!/bin/sh\n[ \"$1\" -gt 0 ] || exec sleep 1000\n./tree $(($1 - 1)) & ./tree $(($1 - 1)) & wait\n";
    sandbox.write_with("tree", script, WriteOptions::mode(0o755)).await?;
    let command = Command::shell(format!("{}./tree 5", pulse.hold()));
    timed_out(sandbox.run(command.timeout(Duration::from_secs(2))).await)?;
    pulse.gone(&sandbox).await?;
    sh(&sandbox, "true").await?;
    Ok(())
}

async fn fork_chain(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    // Each process starts the next and ends at once, so that no process id is ever worth killing by itself. It ends by
    // itself after ten thousand.
    let script = "#!/bin/sh\n[ \"$1\" -gt 0 ] || exit 0\n./chain $(($1 - 1)) &\n";
    sandbox.write_with("chain", script, WriteOptions::mode(0o755)).await?;
    let command = Command::shell(format!("{}./chain 10000; sleep 1000", pulse.hold()));
    timed_out(sandbox.run(command.timeout(Duration::from_secs(1))).await)?;
    pulse.gone(&sandbox).await?;
    sh(&sandbox, "true").await?;
    Ok(())
}
