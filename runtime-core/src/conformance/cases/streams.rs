//! Standard input and both outputs of programs that run to their end: bytes, amounts, limits, sinks.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc;

use crate::command::{Command, Output, OutputChunk, OutputStream};
use crate::conformance::case::{Capability, Case, case};
use crate::conformance::context::{Context, sh, succeeded};
use crate::conformance::verdict::{Verdict, ensure, ensure_eq};
use crate::error::{Error, ErrorKind};
use crate::view::View;

pub(super) const CASES: &[Case] = &[
    case!("streams/no-output-is-no-bytes", nothing),
    case!("streams/every-byte-value-passes-in-and-out", every_byte),
    case!("streams/invalid-utf8-is-not-touched", invalid_utf8),
    case!("streams/sixty-four-mebibytes-on-both-at-once", both_at_once)
        .deadline(180)
        .alone(),
    case!("streams/each-stream-keeps-its-order", order),
    case!("streams/stdin-is-empty-by-default", stdin_default),
    case!("streams/stdin-ends-after-its-bytes", stdin_ends),
    case!("streams/an-empty-stdin-ends-at-once", stdin_empty),
    case!("streams/sixteen-mebibytes-of-stdin-come-back", large_stdin).deadline(120),
    case!("streams/a-program-may-leave-its-stdin-unread", stdin_unread),
    case!("streams/a-program-may-read-a-part-of-its-stdin", stdin_partly_read),
    case!("streams/a-program-may-close-its-streams-early", closes_early),
    case!("streams/output-beyond-the-limit-is-counted", output_limit),
    case!("streams/output-that-fits-exactly-is-not-cut", output_fits),
    case!("streams/a-limit-of-zero-keeps-nothing", limit_zero),
    case!("streams/a-sink-gets-all-of-both-streams", sink_all),
    case!("streams/a-sink-gets-output-while-the-program-runs", sink_live),
    case!("streams/a-slow-sink-holds-the-program-back", sink_slow)
        .needs(&[Capability::BackPressure])
        .deadline(120),
    case!("streams/a-closed-sink-is-no-concern-of-the-program", sink_closed),
];

async fn nothing(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let output = sandbox.run(["true"]).await?;
    ensure!(
        output.stdout.bytes.is_empty() && output.stderr.bytes.is_empty(),
        "{output:?}"
    );
    ensure!(
        !output.stdout.is_truncated() && !output.stderr.is_truncated(),
        "{output:?}"
    );
    Ok(())
}

async fn every_byte(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let bytes: Vec<u8> = (0..=255).cycle().take(256 * 37).collect();
    let command = Command::shell("tee /dev/stderr").stdin(bytes.clone());
    let output = sandbox.run(command).await?;
    succeeded(&output, "tee")?;
    ensure_eq!(&output.stdout.bytes[..], &bytes[..], "standard output");
    let command = Command::shell("cat >&2").stdin(bytes.clone());
    ensure_eq!(
        &sandbox.run(command).await?.stderr.bytes[..],
        &bytes[..],
        "standard error"
    );
    Ok(())
}

async fn invalid_utf8(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let bytes = b"\xff\xfe ok \xc3\x28 \xed\xa0\x80 \0 end";
    let output = sandbox.run(Command::new(["cat"]).stdin(&bytes[..])).await?;
    ensure_eq!(&output.stdout.bytes[..], &bytes[..]);
    let output = sandbox
        .run(Command::shell(r"printf '\377\000\n'; printf '\376' >&2"))
        .await?;
    ensure_eq!(&output.stdout.bytes[..], b"\xff\0\n");
    ensure_eq!(&output.stderr.bytes[..], b"\xfe");
    ensure!(
        output.stdout_lossy().starts_with('\u{fffd}'),
        "the text view replaces what is no text"
    );
    Ok(())
}

/// `yes LINE | head -c BYTES`, as bytes.
fn repeated(line: &str, bytes: usize) -> Vec<u8> {
    let line = format!("{line}\n");
    let mut text = line.repeat(bytes / line.len() + 1).into_bytes();
    text.truncate(bytes);
    text
}

async fn both_at_once(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    const BYTES: usize = 64 << 20;
    let script = format!("yes stdout | head -c {BYTES} & yes stderr | head -c {BYTES} >&2 & wait");
    let output = sandbox.run(Command::shell(script)).await?;
    succeeded(&output, "64 MiB twice")?;
    for (captured, line) in [(&output.stdout, "stdout"), (&output.stderr, "stderr")] {
        ensure_eq!(captured.bytes.len(), BYTES, "bytes of {line}");
        ensure_eq!(captured.dropped, 0, "bytes of {line} that were dropped");
        ensure!(captured.bytes == repeated(line, BYTES), "{line} arrived damaged");
    }
    Ok(())
}

async fn order(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "i=0; while [ $i -lt 2000 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done";
    let (sender, mut receiver) = mpsc::channel::<OutputChunk>(4);
    let streamed = tokio::spawn(async move {
        let (mut stdout, mut stderr) = (BytesMut::new(), BytesMut::new());
        while let Some(chunk) = receiver.recv().await {
            match chunk.stream {
                OutputStream::Stdout => stdout.extend_from_slice(&chunk.bytes),
                OutputStream::Stderr => stderr.extend_from_slice(&chunk.bytes),
            }
        }
        (stdout.freeze(), stderr.freeze())
    });
    let output = sandbox.run(Command::shell(script).stream_to(sender)).await?;
    let want = |name: &str| -> String { (0..2000).map(|n| format!("{name} {n}\n")).collect() };
    ensure_eq!(output.stdout_lossy(), want("out"));
    ensure_eq!(output.stderr_lossy(), want("err"));
    let (stdout, stderr) = streamed.await?;
    ensure!(
        stdout == output.stdout.bytes && stderr == output.stderr.bytes,
        "the sink saw something else"
    );
    Ok(())
}

async fn stdin_default(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    ensure_eq!(sh(&sandbox, "cat | wc -c").await?.trim(), "0");
    Ok(())
}

async fn stdin_ends(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for size in [1_usize, 4095, 4096, 65_536, 65_537, 200_000] {
        let output = sandbox.run(Command::new(["wc", "-c"]).stdin(vec![b'x'; size])).await?;
        ensure_eq!(output.stdout_lossy().trim(), size.to_string());
    }
    Ok(())
}

async fn stdin_empty(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let output = sandbox.run(Command::new(["cat"]).stdin(Bytes::new())).await?;
    ensure!(output.success() && output.stdout.bytes.is_empty(), "{output:?}");
    Ok(())
}

async fn large_stdin(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let bytes = Bytes::from(repeated("a line of input", 16 << 20));
    let output = sandbox.run(Command::new(["cat"]).stdin(bytes.clone())).await?;
    succeeded(&output, "cat")?;
    ensure_eq!(output.stdout.bytes.len(), bytes.len());
    ensure!(output.stdout.bytes == bytes, "it came back damaged");
    Ok(())
}

/// Runs a program that leaves its input unread. Where the engine may lose its output over that, and says so, again.
async fn run_leaving_stdin(cx: &Context, view: &View, command: Command) -> Result<Output, Error> {
    let mut chances = if cx.target().tells_of_lost_output() { 5 } else { 1 };
    loop {
        chances -= 1;
        match view.run(command.clone()).await {
            Err(error) if error.kind() == ErrorKind::ConnectionLost && chances > 0 => {}
            ended => return ended,
        }
    }
}

async fn stdin_unread(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("echo done; exit 4").stdin(vec![0; 16 << 20]);
    let output = run_leaving_stdin(&cx, &sandbox, command).await?;
    ensure_eq!(output.code(), Some(4));
    ensure_eq!(output.stdout_lossy(), "done\n");
    Ok(())
}

async fn stdin_partly_read(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::new(["head", "-c", "10"]).stdin(vec![b'x'; 8 << 20]);
    let output = run_leaving_stdin(&cx, &sandbox, command).await?;
    succeeded(&output, "head")?;
    ensure_eq!(&output.stdout.bytes[..], b"xxxxxxxxxx");
    Ok(())
}

async fn closes_early(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "echo out; echo err >&2; exec <&- >&- 2>&-; sleep 0.5; exit 7";
    let output = run_leaving_stdin(&cx, &sandbox, Command::shell(script).stdin("unread")).await?;
    ensure_eq!(output.code(), Some(7));
    ensure_eq!(output.stdout_lossy(), "out\n");
    ensure_eq!(output.stderr_lossy(), "err\n");
    Ok(())
}

async fn output_limit(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "yes out | head -c 1000000; yes err | head -c 300000 >&2; exit 3";
    let output = sandbox.run(Command::shell(script).output_limit(1000)).await?;
    ensure_eq!(output.code(), Some(3), "the program ran to its end");
    for (captured, line, all) in [(&output.stdout, "out", 1_000_000), (&output.stderr, "err", 300_000)] {
        ensure_eq!(
            &captured.bytes[..],
            &repeated(line, 1000)[..],
            "the first bytes of {line}"
        );
        ensure_eq!(captured.dropped, all - 1000, "dropped bytes of {line}");
        ensure!(captured.is_truncated(), "{line} says that it was cut");
    }
    Ok(())
}

async fn output_fits(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for size in [1_u64, 1000, 65_536, 100_000] {
        let script = format!("yes | head -c {size}");
        let output = sandbox.run(Command::shell(script).output_limit(size)).await?;
        ensure_eq!((output.stdout.bytes.len() as u64, output.stdout.dropped), (size, 0));
        let script = format!("yes | head -c {}", size + 1);
        let output = sandbox.run(Command::shell(script).output_limit(size)).await?;
        ensure_eq!((output.stdout.bytes.len() as u64, output.stdout.dropped), (size, 1));
    }
    Ok(())
}

async fn limit_zero(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let output = sandbox
        .run(Command::shell("echo four; echo 5555 >&2").output_limit(0))
        .await?;
    ensure!(
        output.stdout.bytes.is_empty() && output.stderr.bytes.is_empty(),
        "{output:?}"
    );
    ensure_eq!((output.stdout.dropped, output.stderr.dropped), (5, 5));
    Ok(())
}

async fn sink_all(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let (sender, mut receiver) = mpsc::channel::<OutputChunk>(2);
    let counted = tokio::spawn(async move {
        let (mut stdout, mut stderr, mut empty) = (0, 0, 0);
        while let Some(chunk) = receiver.recv().await {
            empty += usize::from(chunk.bytes.is_empty());
            match chunk.stream {
                OutputStream::Stdout => stdout += chunk.bytes.len(),
                OutputStream::Stderr => stderr += chunk.bytes.len(),
            }
        }
        (stdout, stderr, empty)
    });
    let script = "yes | head -c 3000000; yes | head -c 2000000 >&2";
    let command = Command::shell(script).stream_to(sender).output_limit(10);
    let output = sandbox.run(command).await?;
    ensure_eq!(
        counted.await?,
        (3_000_000, 2_000_000, 0),
        "bytes of both streams, empty chunks"
    );
    ensure_eq!((output.stdout.bytes.len(), output.stdout.dropped), (10, 2_999_990));
    Ok(())
}

async fn sink_live(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let (sender, mut receiver) = mpsc::channel::<OutputChunk>(8);
    let view = sandbox.view();
    let script = "echo first; until [ -e go ]; do sleep 0.05; done; echo second";
    let running = tokio::spawn(async move { view.run(Command::shell(script).stream_to(sender)).await });
    let first = receiver.recv().await.map(|chunk| chunk.bytes);
    ensure_eq!(first.as_deref(), Some(&b"first\n"[..]));
    ensure!(!running.is_finished(), "it ended before it was told to");
    sandbox.write("go", "").await?;
    let second = receiver.recv().await.map(|chunk| chunk.bytes);
    ensure_eq!(second.as_deref(), Some(&b"second\n"[..]));
    ensure_eq!(running.await??.stdout_lossy(), "first\nsecond\n");
    ensure!(receiver.recv().await.is_none(), "the channel ends with the program");
    Ok(())
}

async fn sink_slow(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let (sender, mut receiver) = mpsc::channel::<OutputChunk>(1);
    let view = sandbox.view();
    // Each mebibyte that left the program adds a byte to `progress`.
    let script = "i=0; while [ $i -lt 64 ]; do head -c 1048576 /dev/zero; printf x >>progress; i=$((i+1)); done";
    let command = Command::shell(script).stream_to(sender).output_limit(0);
    let running = tokio::spawn(async move { view.run(command).await });
    let mut seen = receiver.recv().await.map_or(0, |chunk| chunk.bytes.len());
    sh(&sandbox, "sleep 1").await?;
    let progress = sh(&sandbox, "cat progress 2>/dev/null | wc -c").await?;
    let mebibytes: u32 = progress.trim().parse()?;
    ensure!(mebibytes <= 32, "nobody read, and the program wrote {mebibytes} MiB");
    ensure!(!running.is_finished(), "nobody read, and the program ended");
    while let Some(chunk) = receiver.recv().await {
        seen += chunk.bytes.len();
    }
    succeeded(&running.await??, "64 MiB")?;
    ensure_eq!(seen, 64 << 20);
    Ok(())
}

async fn sink_closed(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let (sender, receiver) = mpsc::channel::<OutputChunk>(1);
    drop(receiver);
    let script = "yes | head -c 1000000; exit 6";
    let command = Command::shell(script)
        .stream_to(sender)
        .timeout(Duration::from_secs(40));
    let output = match sandbox.run(command).await {
        Err(error) if error.kind() == ErrorKind::Timeout => {
            return Err(super::super::Failure::new("a closed sink held the program back"));
        }
        output => output?,
    };
    ensure_eq!((output.code(), output.stdout.bytes.len()), (Some(6), 1_000_000));
    Ok(())
}
