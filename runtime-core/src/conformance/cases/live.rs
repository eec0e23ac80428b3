//! Live processes: stdio as pipes, waiting, signals, back pressure.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::command::{Command, ExitStatus};
use crate::conformance::case::{Capability, Case, case, probe};
use crate::conformance::context::{Context, Pulse, cut_short, each, refused, refused_field, sh};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::ErrorKind;
use crate::process::{Process, ProcessStdin, ProcessStdout, Signal};

const LIVE: &[Capability] = &[Capability::LiveProcesses];
const EOF: &[Capability] = &[Capability::LiveProcesses, Capability::StdinEof];
const GROUP: &[Capability] = &[Capability::LiveProcesses, Capability::GroupSignals];
const SIGNALS: &[Capability] = &[Capability::LiveProcesses, Capability::ExitSignals];
const PRESSURE: &[Capability] = &[Capability::LiveProcesses, Capability::BackPressure];

/// A case that needs live processes; a provider without them must say so at once.
const fn live(case: Case) -> Case {
    case.needs(LIVE).or_else(probe!(refused_without))
}

pub(super) const CASES: &[Case] = &[
    live(case!("live/an-echo-round-trip", echo)),
    case!("live/closing-stdin-is-eof", stdin_eof).needs(EOF).gap_untested(),
    case!("live/shutting-stdin-down-is-eof", stdin_shutdown)
        .needs(EOF)
        .gap_untested(),
    case!("live/waiting-closes-an-untaken-stdin", wait_closes_stdin)
        .needs(EOF)
        .gap_untested(),
    live(case!("live/every-byte-value-passes-both-ways", binary)),
    live(case!("live/sixteen-mebibytes-pass-both-ways-at-once", both_ways)).deadline(120),
    live(case!("live/stdout-and-stderr-are-two-streams", two_streams)),
    live(case!("live/an-unread-stderr-does-not-block-stdout", unread_stderr)),
    case!("live/an-unread-stdout-holds-the-program-back", back_pressure)
        .needs(PRESSURE)
        .deadline(120),
    case!("live/an-unread-stdin-holds-the-writer-back", write_pressure)
        .needs(PRESSURE)
        .deadline(120),
    live(case!("live/exit-codes-are-told", exit_codes)),
    case!("live/death-by-signal-is-told", death_by_signal)
        .needs(SIGNALS)
        .gap_untested(),
    live(case!("live/waiting-twice-and-at-once-gives-one-answer", wait_twice)),
    live(case!("live/a-cancelled-wait-disturbs-nothing", cancelled_wait)),
    live(case!("live/try-wait-does-not-wait", try_wait)),
    live(case!("live/output-can-be-read-after-the-end", read_after_end)),
    live(case!("live/a-signal-can-be-caught", caught_signal)),
    case!("live/a-signal-reaches-the-whole-group", group_signal)
        .needs(GROUP)
        .gap_untested(),
    live(case!("live/terminate-asks", terminate)),
    live(case!("live/kill-ends-what-ignores-everything-else", kill)),
    live(case!("live/stop-and-continue", stop_and_continue)),
    live(case!("live/a-signal-after-the-end-is-nothing", signal_after_end)),
    live(case!("live/dropping-kills-the-whole-group", dropping_kills)),
    live(case!("live/a-handle-waits-and-signals-from-elsewhere", handle)),
    live(case!(
        "live/a-handle-does-not-keep-the-process-alive",
        handle_keeps_nothing
    )),
    live(case!("live/writing-to-a-program-that-ended-fails", write_after_end)),
    live(case!("live/a-grandchild-with-the-pipe-does-not-hang-wait", grandchild)),
    live(case!("live/environment-and-workdir-apply", env_and_workdir)),
    live(case!("live/what-cannot-start-is-typed", cannot_start)),
    live(case!("live/sixty-four-at-once", sixty_four)).deadline(180).alone(),
    live(case!("live/stopping-the-box-ends-them", stop_ends)),
    live(case!("live/they-run-beside-commands", beside_commands)),
];

async fn refused_without(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    refused(sandbox.spawn(["cat"]).await, ErrorKind::Unsupported)?;
    Ok(())
}

fn stdin_of(process: &mut Process) -> Result<ProcessStdin, Failure> {
    process
        .stdin
        .take()
        .ok_or_else(|| Failure::new("the process has no stdin"))
}

fn stdout_of(process: &mut Process) -> Result<ProcessStdout, Failure> {
    process
        .stdout
        .take()
        .ok_or_else(|| Failure::new("the process has no stdout"))
}

async fn rest_of(process: &mut Process) -> Result<Vec<u8>, Failure> {
    let mut rest = Vec::new();
    stdout_of(process)?.read_to_end(&mut rest).await?;
    Ok(rest)
}

/// Reads exactly these bytes next.
async fn expect(stdout: &mut ProcessStdout, want: &[u8]) -> Verdict {
    let mut seen = vec![0; want.len()];
    stdout.read_exact(&mut seen).await?;
    ensure_eq!(&seen[..], want);
    Ok(())
}

async fn echo(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut cat = sandbox.spawn(["cat"]).await?;
    let (mut stdin, mut stdout) = (stdin_of(&mut cat)?, stdout_of(&mut cat)?);
    for n in 0..200 {
        let line = format!("line {n}\n");
        stdin.write_all(line.as_bytes()).await?;
        stdin.flush().await?;
        expect(&mut stdout, line.as_bytes()).await?;
    }
    cat.kill().await?;
    Ok(())
}

async fn stdin_eof(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox.spawn(["sh", "-c", "wc -c; exit 4"]).await?;
    let mut stdin = stdin_of(&mut process)?;
    stdin.write_all(b"12345").await?;
    drop(stdin);
    ensure_eq!(String::from_utf8(rest_of(&mut process).await?)?.trim(), "5");
    ensure_eq!(process.wait().await?, ExitStatus::exited(4));
    Ok(())
}

async fn stdin_shutdown(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut cat = sandbox.spawn(["cat"]).await?;
    let mut stdin = stdin_of(&mut cat)?;
    stdin.write_all(b"all").await?;
    stdin.shutdown().await?;
    ensure_eq!(&rest_of(&mut cat).await?[..], b"all");
    ensure!(cat.wait().await?.success(), "cat ends well");
    drop(stdin);
    Ok(())
}

async fn wait_closes_stdin(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut cat = sandbox.spawn(["cat"]).await?;
    ensure!(cat.wait().await?.success(), "cat ends at the end of its input");
    Ok(())
}

async fn binary(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let bytes: Vec<u8> = (0..=255).cycle().take(20_000).collect();
    let mut cat = sandbox.spawn(["cat"]).await?;
    let (mut stdin, mut stdout) = (stdin_of(&mut cat)?, stdout_of(&mut cat)?);
    stdin.write_all(&bytes).await?;
    stdin.flush().await?;
    expect(&mut stdout, &bytes).await
}

async fn both_ways(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    const BYTES: usize = 16 << 20;
    let bytes: Vec<u8> = (0..BYTES).map(|n| (n / 7 % 251) as u8).collect();
    let mut cat = sandbox.spawn(["cat"]).await?;
    let (mut stdin, mut stdout) = (stdin_of(&mut cat)?, stdout_of(&mut cat)?);
    let sent = bytes.clone();
    let writer = tokio::spawn(async move {
        stdin.write_all(&sent).await?;
        stdin.flush().await?;
        // Kept open, so that the end of the output is not needed to see all of it.
        Ok::<_, std::io::Error>(stdin)
    });
    let mut seen = vec![0; BYTES];
    stdout.read_exact(&mut seen).await?;
    drop(writer.await??);
    ensure!(seen == bytes, "it came back damaged");
    Ok(())
}

async fn two_streams(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox
        .spawn(["sh", "-c", "echo out; echo err >&2; echo out2; echo err2 >&2"])
        .await?;
    let mut stderr = process
        .stderr
        .take()
        .ok_or_else(|| Failure::new("the process has no stderr"))?;
    ensure_eq!(&rest_of(&mut process).await?[..], b"out\nout2\n");
    let mut seen = Vec::new();
    stderr.read_to_end(&mut seen).await?;
    ensure_eq!(&seen[..], b"err\nerr2\n");
    ensure!(process.wait().await?.success(), "it ends well");
    Ok(())
}

async fn unread_stderr(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    // Two writers, so that only the one of stderr is held back.
    let script = "yes err >&2 & yes out | head -c 1000000; echo end";
    let mut process = sandbox.spawn(["sh", "-c", script]).await?;
    let mut stdout = stdout_of(&mut process)?;
    let mut seen = vec![0; 1_000_000];
    stdout.read_exact(&mut seen).await?;
    expect(&mut stdout, b"end\n").await?;
    process.kill().await?;
    Ok(())
}

async fn back_pressure(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "while :; do head -c 1048576 /dev/zero || exit; printf x >>progress; done";
    let mut process = sandbox.spawn(["sh", "-c", script]).await?;
    let mut stdout = stdout_of(&mut process)?;
    expect(&mut stdout, &[0; 1000]).await?;
    sh(&sandbox, "sleep 1").await?;
    let mebibytes: u32 = sh(&sandbox, "cat progress 2>/dev/null | wc -c").await?.trim().parse()?;
    ensure!(mebibytes <= 32, "nobody read, and the program wrote {mebibytes} MiB");
    // A reader that comes back gets it going again.
    let mut seen = vec![0; 1 << 20];
    for _ in 0..64 {
        stdout.read_exact(&mut seen).await?;
    }
    let later: u32 = sh(&sandbox, "wc -c <progress").await?.trim().parse()?;
    ensure!((63 - 1..=64 + 33).contains(&later), "64 MiB were read, {later} written");
    process.kill().await?;
    Ok(())
}

async fn write_pressure(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox
        .spawn(["sh", "-c", "until [ -e go ]; do sleep 0.05; done; wc -c"])
        .await?;
    let mut stdin = stdin_of(&mut process)?;
    const BYTES: usize = 48 << 20;
    let writer = tokio::spawn(async move {
        let block = vec![b'x'; 1 << 20];
        let mut written = 0;
        while written < BYTES {
            // So much that it cannot have gone anywhere but to the program.
            match tokio::time::timeout(Duration::from_secs(1), stdin.write(&block)).await {
                Ok(count) => written += count?,
                Err(_) => break,
            }
        }
        Ok::<_, std::io::Error>((stdin, written))
    });
    let (mut stdin, written) = writer.await??;
    ensure!(written < BYTES, "nobody read, and {written} bytes were taken");
    sandbox.write("go", "").await?;
    stdin.write_all(&vec![b'x'; BYTES - written]).await?;
    stdin.shutdown().await?;
    drop(stdin);
    ensure_eq!(
        String::from_utf8(rest_of(&mut process).await?)?.trim(),
        BYTES.to_string()
    );
    Ok(())
}

async fn exit_codes(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for code in [0, 1, 42, 126, 127, 128, 255] {
        let mut process = sandbox.spawn(["sh", "-c", &format!("exit {code}")]).await?;
        ensure_eq!(process.wait().await?, ExitStatus::exited(code));
    }
    Ok(())
}

async fn death_by_signal(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for signal in [Signal::HUP, Signal::INT, Signal::KILL, Signal::TERM, Signal::USR2] {
        let mut process = sandbox.spawn(["sleep", "1000"]).await?;
        process.signal(signal).await?;
        ensure_eq!(
            process.wait().await?,
            ExitStatus::signaled(signal.number()),
            "{signal:?}"
        );
    }
    Ok(())
}

async fn wait_twice(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox.spawn(["sh", "-c", "read line; exit 5"]).await?;
    let waiters: Vec<_> = (0..8)
        .map(|_| {
            let handle = process.handle();
            tokio::spawn(async move { handle.wait().await })
        })
        .collect();
    let mut stdin = stdin_of(&mut process)?;
    stdin.write_all(b"go\n").await?;
    stdin.flush().await?;
    for waiter in waiters {
        ensure_eq!(waiter.await??, ExitStatus::exited(5));
    }
    ensure_eq!(process.wait().await?, ExitStatus::exited(5), "after the end");
    ensure_eq!(process.wait().await?, ExitStatus::exited(5), "and again");
    ensure_eq!(process.try_wait()?, Some(ExitStatus::exited(5)));
    Ok(())
}

async fn cancelled_wait(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox.spawn(["sh", "-c", "read line; exit 6"]).await?;
    let mut stdin = stdin_of(&mut process)?;
    let handle = process.handle();
    for polls in 1..4 {
        let waited = cut_short(handle.wait(), polls);
        let waited = tokio::time::timeout(Duration::from_millis(100), waited).await;
        ensure!(!matches!(waited, Ok(Some(_))), "it ended by itself: {waited:?}");
    }
    stdin.write_all(b"go\n").await?;
    stdin.flush().await?;
    ensure_eq!(process.wait().await?, ExitStatus::exited(6));
    Ok(())
}

async fn try_wait(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox.spawn(["sh", "-c", "read line; exit 3"]).await?;
    for _ in 0..10 {
        ensure_eq!(process.try_wait()?, None);
    }
    let mut stdin = stdin_of(&mut process)?;
    stdin.write_all(b"go\n").await?;
    stdin.flush().await?;
    process.wait().await?;
    ensure_eq!(process.try_wait()?, Some(ExitStatus::exited(3)));
    Ok(())
}

async fn read_after_end(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox.spawn(["sh", "-c", "echo last words; exit 2"]).await?;
    ensure_eq!(process.wait().await?, ExitStatus::exited(2));
    ensure_eq!(&rest_of(&mut process).await?[..], b"last words\n");
    Ok(())
}

async fn caught_signal(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.1; done";
    let mut process = sandbox.spawn(["sh", "-c", script]).await?;
    let mut stdout = stdout_of(&mut process)?;
    expect(&mut stdout, b"ready\n").await?;
    process.signal(Signal::USR1).await?;
    // The group has the signal too, so the shell's own `sleep` may have died of it first.
    expect(&mut stdout, b"caught\n").await?;
    ensure_eq!(process.wait().await?, ExitStatus::exited(9));
    Ok(())
}

async fn group_signal(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}sleep 1000 & sh -c 'sleep 1000; :' & echo ready; wait", pulse.hold());
    let mut process = sandbox.spawn(Command::shell(script)).await?;
    let mut stdout = stdout_of(&mut process)?;
    expect(&mut stdout, b"ready\n").await?;
    process.terminate().await?;
    process.wait().await?;
    // The handle is still held: what ended ended by the signal.
    pulse.gone(&sandbox).await?;
    drop(process);
    Ok(())
}

async fn terminate(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "trap 'echo tidied; exit 0' TERM; echo ready; while :; do sleep 0.1; done";
    let mut process = sandbox.spawn(["sh", "-c", script]).await?;
    let mut stdout = stdout_of(&mut process)?;
    expect(&mut stdout, b"ready\n").await?;
    process.terminate().await?;
    expect(&mut stdout, b"tidied\n").await?;
    ensure_eq!(process.wait().await?, ExitStatus::exited(0));
    Ok(())
}

async fn kill(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!(
        "{}trap '' TERM INT HUP; (trap '' TERM; while :; do sleep 1; done) & echo ready; while :; do sleep 1; done",
        pulse.hold()
    );
    let mut process = sandbox.spawn(Command::shell(script)).await?;
    let mut stdout = stdout_of(&mut process)?;
    expect(&mut stdout, b"ready\n").await?;
    let status = process.kill().await?;
    ensure_eq!(status.shell_code(), 137);
    ensure_eq!(process.wait().await?, status, "after the kill");
    drop(process);
    pulse.gone(&sandbox).await
}

async fn stop_and_continue(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut cat = sandbox.spawn(["cat"]).await?;
    let (mut stdin, mut stdout) = (stdin_of(&mut cat)?, stdout_of(&mut cat)?);
    stdin.write_all(b"a").await?;
    stdin.flush().await?;
    expect(&mut stdout, b"a").await?;
    cat.signal(Signal::STOP).await?;
    ensure_eq!(cat.try_wait()?, None, "stopped is not ended");
    stdin.write_all(b"b").await?;
    stdin.flush().await?;
    let mut byte = [0];
    let early = tokio::time::timeout(Duration::from_millis(300), stdout.read(&mut byte)).await;
    ensure!(early.is_err(), "a stopped program answered");
    cat.signal(Signal::CONT).await?;
    expect(&mut stdout, b"b").await?;
    cat.kill().await?;
    Ok(())
}

async fn signal_after_end(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox.spawn(["sh", "-c", "exit 3"]).await?;
    ensure_eq!(process.wait().await?, ExitStatus::exited(3));
    process.signal(Signal::USR1).await?;
    process.terminate().await?;
    ensure_eq!(
        process.kill().await?,
        ExitStatus::exited(3),
        "a late kill changes nothing"
    );
    Ok(())
}

async fn dropping_kills(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!(
        "{}trap '' TERM HUP; sleep 1000 & echo ready; wait; sleep 1000",
        pulse.hold()
    );
    let mut process = sandbox.spawn(Command::shell(script)).await?;
    let mut stdout = stdout_of(&mut process)?;
    expect(&mut stdout, b"ready\n").await?;
    let handle = process.handle();
    drop(process);
    pulse.gone(&sandbox).await?;
    // What was taken out ends.
    let mut rest = Vec::new();
    let _ = stdout.read_to_end(&mut rest).await;
    ensure!(rest.is_empty(), "{rest:?}");
    let status = handle.wait().await?;
    ensure_eq!(status.shell_code(), 137);
    Ok(())
}

async fn handle(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let process = sandbox.spawn(["sleep", "1000"]).await?;
    let (waiting, signalling) = (process.handle(), process.handle());
    let waiter = tokio::spawn(async move { waiting.wait().await });
    tokio::spawn(async move { signalling.signal(Signal::TERM).await }).await??;
    ensure_eq!(waiter.await??.shell_code(), 143);
    Ok(())
}

async fn handle_keeps_nothing(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!("{}echo ready; sleep 1000", pulse.hold());
    let mut process = sandbox.spawn(Command::shell(script)).await?;
    expect(&mut stdout_of(&mut process)?, b"ready\n").await?;
    let handle = process.handle();
    let waiter = tokio::spawn(async move { handle.wait().await });
    drop(process);
    pulse.gone(&sandbox).await?;
    ensure_eq!(waiter.await??.shell_code(), 137);
    Ok(())
}

async fn write_after_end(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox.spawn(["sh", "-c", "exec <&-; exit 0"]).await?;
    let mut stdin = stdin_of(&mut process)?;
    process.wait().await?;
    let block = vec![0; 64 << 10];
    for _ in 0..1024 {
        if stdin.write_all(&block).await.is_err() {
            return Ok(());
        }
    }
    Err(Failure::new("64 MiB were written to a program that has ended"))
}

async fn grandchild(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox.spawn(["sh", "-c", "sleep 1000 & echo up; exit 8"]).await?;
    ensure_eq!(process.wait().await?, ExitStatus::exited(8));
    let mut stdout = stdout_of(&mut process)?;
    expect(&mut stdout, b"up\n").await?;
    // Dropping the process kills the grandchild, and so the stream ends.
    drop(process);
    let mut rest = Vec::new();
    let _ = stdout.read_to_end(&mut rest).await;
    ensure!(rest.is_empty(), "{rest:?}");
    Ok(())
}

async fn env_and_workdir(cx: Context) -> Verdict {
    let sandbox = cx.builder().env("A", "sandbox").env("B", "sandbox").provision().await?;
    sandbox.create_dir("sub").await?;
    let command = Command::shell("echo \"$A $B\"; echo x >marker")
        .env("B", "command")
        .workdir("sub");
    let mut process = sandbox.spawn(command).await?;
    ensure_eq!(&rest_of(&mut process).await?[..], b"sandbox command\n");
    ensure!(process.wait().await?.success(), "it ends well");
    ensure_eq!(&sandbox.read("sub/marker").await?[..], b"x\n");
    Ok(())
}

async fn cannot_start(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("plain", "text").await?;
    refused(sandbox.spawn(["no-such-program"]).await, ErrorKind::ProgramNotFound)?;
    refused(sandbox.spawn(["./plain"]).await, ErrorKind::ProgramNotExecutable)?;
    let nothing = Command::new(Vec::<String>::new());
    refused_field(sandbox.spawn(nothing).await, ErrorKind::InvalidArgument, "argv")?;
    let elsewhere = Command::new(["cat"]).workdir("missing");
    refused_field(sandbox.spawn(elsewhere).await, ErrorKind::NotFound, "workdir")?;
    Ok(())
}

async fn sixty_four(cx: Context) -> Verdict {
    let count = cx.capabilities().max_live_processes.unwrap_or(64).min(64);
    let sandbox = cx.sandbox().await?;
    let mut processes = Vec::new();
    for _ in 0..count {
        processes.push(sandbox.spawn(["cat"]).await?);
    }
    // All of them are up before the first is spoken to.
    each(64, processes.into_iter().enumerate(), |(n, mut cat)| async move {
        let (mut stdin, mut stdout) = (stdin_of(&mut cat)?, stdout_of(&mut cat)?);
        for round in 0..20 {
            let line = format!("{n} {round}\n");
            stdin.write_all(line.as_bytes()).await?;
            stdin.flush().await?;
            expect(&mut stdout, line.as_bytes()).await?;
        }
        ensure_eq!(cat.kill().await?.shell_code(), 137);
        Ok(())
    })
    .await?;
    sh(&sandbox, "true").await?;
    Ok(())
}

async fn stop_ends(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox
        .spawn(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"])
        .await?;
    let mut stdout = stdout_of(&mut process)?;
    expect(&mut stdout, b"ready\n").await?;
    let handle = process.handle();
    let waiter = tokio::spawn(async move { handle.wait().await });
    sandbox.stop().await?;
    let mut rest = Vec::new();
    // An end or an error, but no hang.
    let _ = stdout.read_to_end(&mut rest).await;
    match waiter.await? {
        Ok(status) => ensure!(!status.success(), "it was killed, not well: {status}"),
        Err(error) => ensure_eq!(error.kind(), ErrorKind::SandboxGone, "{error}"),
    }
    Ok(())
}

async fn beside_commands(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let mut cat = sandbox.spawn(["cat"]).await?;
    let (mut stdin, mut stdout) = (stdin_of(&mut cat)?, stdout_of(&mut cat)?);
    for n in 0..10 {
        ensure_eq!(sh(&sandbox, format!("echo {n}")).await?, format!("{n}\n"));
        let line = format!("live {n}\n");
        stdin.write_all(line.as_bytes()).await?;
        stdin.flush().await?;
        expect(&mut stdout, line.as_bytes()).await?;
        sandbox.write("file", line.clone()).await?;
        ensure_eq!(&sandbox.read("file").await?[..], line.as_bytes());
    }
    cat.kill().await?;
    Ok(())
}
