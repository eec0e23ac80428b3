//! From a live process to an [`Output`]: reads both streams, feeds stdin, and knows when to stop.

use std::io;
use std::pin::pin;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::command::{Captured, Collect, Output, OutputChunk, OutputStream, PartialOutput};
use crate::error::{Error, ErrorKind, Result};
use crate::files::stream_error;
use crate::process::{Process, Signal};

/// After the program has ended, its pipes may be held open by what it left behind. When they stay quiet for this long,
/// the output is complete.
const QUIET_GRACE: Duration = Duration::from_millis(200);

/// And if they are never quiet, they are read for at most this long.
const TOTAL_GRACE: Duration = Duration::from_secs(5);

/// How long to wait for a killed program to be gone.
const KILL_GRACE: Duration = Duration::from_secs(5);

/// How long to read what a killed program had printed.
const DRAIN_GRACE: Duration = Duration::from_secs(1);

const CHUNK: usize = 64 << 10;

/// Drives a process to its end and collects its output.
///
/// It ends by whichever comes first: the process exited and its pipes drained (or were quiet for a bounded grace, since
/// a grandchild may hold them for hours), the deadline, or an error such as the death of the box. What is left of the
/// process group is then killed.
///
/// Cancel safe: dropping the future drops the process, which kills it.
///
/// # Errors
/// [`Timeout`](ErrorKind::Timeout) when the deadline passed, and whatever kept the end from being learned; both carry
/// the output so far.
pub async fn collect(mut process: Process, options: Collect) -> Result<Output> {
    let Collect {
        stdin,
        timeout,
        output_limit,
        sink,
    } = options;
    let started = Instant::now();
    let mut stdout = Stream::new(OutputStream::Stdout, process.stdout.take(), output_limit);
    let mut stderr = Stream::new(OutputStream::Stderr, process.stderr.take(), output_limit);
    let mut sink = Sink {
        channel: sink,
        pending: None,
    };
    let control = process.control().clone();

    let pipe = process.stdin.take();
    let mut feed = pin!(async move {
        if let (Some(mut pipe), Some(bytes)) = (pipe, stdin) {
            // A program that does not read its input is no error: the pipe breaks, and its exit code says the rest.
            let _ = pipe.write_all(&bytes).await;
            let _ = pipe.shutdown().await;
        }
    });
    let mut fed = false;
    let mut wait = pin!(control.wait());
    let mut deadline = pin!(sleep_until(started + timeout.unwrap_or(Duration::ZERO)));
    let mut status = None;
    let mut ended_at = started;
    let mut grace = pin!(sleep_until(started));

    let failure = loop {
        if stdout.is_closed() && stderr.is_closed() && !sink.is_busy() && status.is_some() {
            break None;
        }
        let may_read = !sink.is_busy();
        let wanted = sink.channel.is_some();
        tokio::select! {
            read = stdout.read(wanted), if may_read && !stdout.is_closed() => match read {
                Ok(chunk) => sink.offer(chunk),
                Err(error) => break Some(stream_error("reading standard output", error)),
            },
            read = stderr.read(wanted), if may_read && !stderr.is_closed() => match read {
                Ok(chunk) => sink.offer(chunk),
                Err(error) => break Some(stream_error("reading standard error", error)),
            },
            () = sink.flush(), if !may_read => {}
            () = &mut feed, if !fed => fed = true,
            ended = &mut wait, if status.is_none() => match ended {
                Ok(ended) => {
                    status = Some(ended);
                    ended_at = Instant::now();
                    grace.as_mut().reset(ended_at + QUIET_GRACE);
                    continue;
                }
                Err(error) => break Some(error),
            },
            () = &mut grace, if may_read && status.is_some() => {
                // This task may have been kept from running for all of that time, and its bytes are still in the pipes:
                // let the executor ask the system, and look again.
                tokio::task::yield_now().await;
                let rest = async {
                    stdout.drain(&sink, true).await;
                    stderr.drain(&sink, true).await;
                };
                let latest = (ended_at + TOTAL_GRACE).max(Instant::now() + QUIET_GRACE);
                let _ = tokio::time::timeout_at(latest, rest).await;
                break None;
            }
            () = &mut deadline, if timeout.is_some() => {
                let limit = timeout.unwrap_or_default();
                break Some(Error::new(
                    ErrorKind::Timeout,
                    format!("the program did not end within {limit:?} and was killed"),
                ));
            }
        }
        if status.is_some() {
            grace
                .as_mut()
                .reset((Instant::now() + QUIET_GRACE).min(ended_at + TOTAL_GRACE));
        }
    };

    let Some(mut error) = failure else {
        control.finish().await;
        process.finished();
        return match status {
            Some(status) => Ok(Output {
                status,
                stdout: stdout.finish(),
                stderr: stderr.finish(),
            }),
            None => Err(Error::new(ErrorKind::Other, "the program's end was not observed")),
        };
    };
    if error.kind() == ErrorKind::Timeout {
        // What was printed before the kill is still in the pipes: take what is there, but wait for no more.
        let killed = async {
            control.signal(Signal::KILL).await?;
            control.wait().await
        };
        match tokio::time::timeout(KILL_GRACE, killed).await {
            Ok(Ok(_)) => {}
            Ok(Err(cause)) => error = error.with_source(cause),
            Err(_) => {
                error = Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{}; its end could not be confirmed within {KILL_GRACE:?}",
                        error.message()
                    ),
                )
            }
        }
        let drained = async {
            stdout.drain(&sink, false).await;
            stderr.drain(&sink, false).await;
        };
        let _ = tokio::time::timeout(DRAIN_GRACE, drained).await;
        control.finish().await;
        process.finished();
    }
    Err(error.with_partial_output(PartialOutput {
        stdout: stdout.finish(),
        stderr: stderr.finish(),
    }))
}

/// Where chunks go while the program runs. Holds one chunk while the channel is full, which holds the program back.
struct Sink {
    channel: Option<mpsc::Sender<OutputChunk>>,
    pending: Option<OutputChunk>,
}

impl Sink {
    fn is_busy(&self) -> bool {
        self.pending.is_some()
    }

    fn offer(&mut self, chunk: Option<OutputChunk>) {
        let (Some(channel), Some(chunk)) = (&self.channel, chunk) else {
            return;
        };
        match channel.try_send(chunk) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(chunk)) => self.pending = Some(chunk),
            Err(mpsc::error::TrySendError::Closed(_)) => self.channel = None,
        }
    }

    /// Waits for room and sends the pending chunk. Cancel safe: the chunk leaves only with the permit.
    async fn flush(&mut self) {
        let Some(channel) = &self.channel else {
            self.pending = None;
            return;
        };
        let room = channel.reserve().await;
        match room {
            Ok(permit) => {
                if let Some(chunk) = self.pending.take() {
                    permit.send(chunk);
                }
            }
            // Nobody listens any more. The next chunk finds out too and lets go of the channel.
            Err(_) => self.pending = None,
        }
    }
}

struct Stream<R> {
    which: OutputStream,
    reader: Option<R>,
    kept: BytesMut,
    scratch: BytesMut,
    limit: usize,
    dropped: u64,
}

impl<R: AsyncRead + Unpin> Stream<R> {
    /// Reads until the end, or until nothing comes for a moment. What was read is looked at before the time is.
    async fn drain(&mut self, sink: &Sink, waits_for_sink: bool) {
        while !self.is_closed() {
            match tokio::time::timeout(Duration::from_millis(20), self.read(true)).await {
                Ok(Ok(chunk)) => {
                    let (Some(chunk), Some(channel)) = (chunk, &sink.channel) else {
                        continue;
                    };
                    // An error is a listener that went away.
                    let _ = match waits_for_sink {
                        true => channel.send(chunk).await.is_ok(),
                        false => channel.try_send(chunk).is_ok(),
                    };
                }
                Ok(Err(_)) | Err(_) => break,
            }
        }
    }

    fn new(which: OutputStream, reader: Option<R>, limit: u64) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Self {
            which,
            reader,
            kept: BytesMut::new(),
            scratch: BytesMut::new(),
            limit,
            dropped: 0,
        }
    }

    fn is_closed(&self) -> bool {
        self.reader.is_none()
    }

    /// Reads once. Cancel safe: bytes are either in the buffers or still unread.
    async fn read(&mut self, want_chunk: bool) -> io::Result<Option<OutputChunk>> {
        let Some(reader) = &mut self.reader else {
            return Ok(None);
        };
        let room = self.limit - self.kept.len();
        let bytes = if room >= CHUNK {
            // The common case reads straight into what is kept.
            self.kept.reserve(CHUNK);
            let before = self.kept.len();
            let count = reader.read_buf(&mut (&mut self.kept).limit(CHUNK)).await?;
            if count == 0 {
                self.reader = None;
                return Ok(None);
            }
            if !want_chunk {
                return Ok(None);
            }
            Bytes::copy_from_slice(&self.kept[before..])
        } else {
            self.scratch.reserve(CHUNK);
            let count = reader.read_buf(&mut (&mut self.scratch).limit(CHUNK)).await?;
            if count == 0 {
                self.reader = None;
                return Ok(None);
            }
            let keep = count.min(room);
            self.kept.extend_from_slice(&self.scratch[..keep]);
            self.dropped += (count - keep) as u64;
            if !want_chunk {
                self.scratch.clear();
                return Ok(None);
            }
            self.scratch.split().freeze()
        };
        Ok(Some(OutputChunk {
            stream: self.which,
            bytes,
        }))
    }

    fn finish(self) -> Captured {
        // Small outputs give their read buffer back.
        let bytes = if self.kept.len() < CHUNK / 2 {
            Bytes::copy_from_slice(&self.kept)
        } else {
            self.kept.freeze()
        };
        Captured {
            bytes,
            dropped: self.dropped,
        }
    }
}
