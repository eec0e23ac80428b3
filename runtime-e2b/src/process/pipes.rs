//! The two output pipes of a live process: bounded memory for one stream of envd.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Buf as _, Bytes};
use runtime_core::Error;
use tokio::io::{AsyncRead, ReadBuf};

/// Unread bytes of a stream at which envd, and so the program, is held back. More than a pipe holds, so that a program
/// whose output would fit into one ends without a reader.
const HOLD: usize = 128 << 10;

/// Unread bytes of a stream at which it is held back even while the other stream's reader waits for more. Both share a
/// connection, so somebody has to give way.
const HOLD_STARVING: usize = 8 << 20;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One of the two pipes.
#[derive(Debug, Default)]
pub(super) struct Pipe {
    chunks: VecDeque<Bytes>,
    length: usize,
    /// Nothing more comes; an error is told once.
    closed: bool,
    failure: Option<Error>,
    /// The reader waits for bytes.
    reader: Option<Waker>,
    /// The reader is gone, so what comes is thrown away.
    abandoned: bool,
}

impl Pipe {
    pub(super) fn push(&mut self, bytes: Bytes) {
        if self.abandoned || bytes.is_empty() {
            return;
        }
        self.length += bytes.len();
        self.chunks.push_back(bytes);
        self.wake();
    }

    pub(super) fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    pub(super) fn close(&mut self, failure: Option<Error>) {
        self.closed = true;
        self.failure = failure;
        self.wake();
    }

    pub(super) fn is_starving(&self) -> bool {
        self.length == 0 && self.reader.is_some()
    }
}

#[derive(Debug, Default)]
pub(super) struct Pipes {
    pub(super) stdout: Pipe,
    pub(super) stderr: Pipe,
    /// The task that fills them, while it is held back.
    pub(super) pump: Option<Waker>,
    /// The program is at its end, so nobody is held back any more.
    draining: bool,
}

impl Pipes {
    /// Lets everything in that is still to come.
    pub(super) fn drain(&mut self) {
        self.draining = true;
        self.wake_pump();
    }

    pub(super) fn may_fill(&self) -> bool {
        if self.draining {
            return true;
        }
        let holds =
            |full: &Pipe, other: &Pipe| full.length >= HOLD_STARVING || (full.length >= HOLD && !other.is_starving());
        !holds(&self.stdout, &self.stderr) && !holds(&self.stderr, &self.stdout)
    }

    pub(super) fn wake_pump(&mut self) {
        if let Some(pump) = self.pump.take() {
            pump.wake();
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Which {
    Stdout,
    Stderr,
}

/// The reading end of one pipe.
pub(super) struct Reader {
    pub(super) pipes: Arc<Mutex<Pipes>>,
    pub(super) which: Which,
}

impl Reader {
    fn pipe(pipes: &mut Pipes, which: Which) -> &mut Pipe {
        match which {
            Which::Stdout => &mut pipes.stdout,
            Which::Stderr => &mut pipes.stderr,
        }
    }
}

impl AsyncRead for Reader {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut pipes = lock(&self.pipes);
        let pipe = Self::pipe(&mut pipes, self.which);
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if let Some(chunk) = pipe.chunks.front_mut() {
            let count = chunk.len().min(buf.remaining());
            buf.put_slice(&chunk[..count]);
            chunk.advance(count);
            if chunk.is_empty() {
                pipe.chunks.pop_front();
            }
            pipe.length -= count;
            if pipe.chunks.is_empty() {
                // An idle process keeps nothing.
                pipe.chunks = VecDeque::new();
            }
            pipes.wake_pump();
            return Poll::Ready(Ok(()));
        }
        if pipe.closed {
            return match pipe.failure.take() {
                Some(failure) => Poll::Ready(Err(io::Error::other(failure))),
                None => Poll::Ready(Ok(())),
            };
        }
        let known = pipe.reader.as_ref().is_some_and(|reader| reader.will_wake(cx.waker()));
        if !known {
            pipe.reader = Some(cx.waker().clone());
        }
        // The other pipe may be full, and may grow further now that somebody waits for this one.
        pipes.wake_pump();
        Poll::Pending
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut pipes = lock(&self.pipes);
        let pipe = Self::pipe(&mut pipes, self.which);
        pipe.abandoned = true;
        pipe.chunks = VecDeque::new();
        pipe.length = 0;
        pipe.reader = None;
        pipes.wake_pump();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime_core::ErrorKind;
    use tokio::io::AsyncReadExt as _;

    #[tokio::test]
    async fn a_full_pipe_holds_unless_the_other_reader_waits() {
        let pipes = Arc::new(Mutex::new(Pipes::default()));
        let mut stdout = Reader {
            pipes: pipes.clone(),
            which: Which::Stdout,
        };
        let stderr = Reader {
            pipes: pipes.clone(),
            which: Which::Stderr,
        };
        lock(&pipes).stderr.push(Bytes::from(vec![0; HOLD]));
        assert!(!lock(&pipes).may_fill());
        let mut byte = [0];
        let waits = std::future::poll_fn(|cx| {
            let mut buf = ReadBuf::new(&mut byte);
            Poll::Ready(Pin::new(&mut stdout).poll_read(cx, &mut buf).is_pending())
        });
        assert!(waits.await);
        assert!(lock(&pipes).may_fill(), "the reader of the other pipe waits");
        lock(&pipes).stderr.push(Bytes::from(vec![0; HOLD_STARVING]));
        assert!(!lock(&pipes).may_fill(), "memory is bounded all the same");
        drop(stderr);
        assert!(lock(&pipes).may_fill(), "nobody reads it any more");
    }

    #[tokio::test]
    async fn a_failure_is_told_once_on_each_pipe() {
        let pipes = Arc::new(Mutex::new(Pipes::default()));
        let mut stdout = Reader {
            pipes: pipes.clone(),
            which: Which::Stdout,
        };
        lock(&pipes).stdout.push(Bytes::from_static(b"ab"));
        lock(&pipes)
            .stdout
            .close(Some(Error::new(ErrorKind::SandboxGone, "gone")));
        let mut read = Vec::new();
        let error = stdout.read_to_end(&mut read).await.expect_err("told");
        assert_eq!(runtime_core::stream_error("x", error).kind(), ErrorKind::SandboxGone);
        assert_eq!(read, b"ab");
        assert_eq!(stdout.read_to_end(&mut read).await.expect("at its end"), 0);
    }
}
