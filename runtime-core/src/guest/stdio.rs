//! Streams over a link that cannot pass descriptors: each direction carries as many bytes as its receiver granted.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::frame::{MAX_CHUNK, Request, WINDOW};
use super::outbox::lock;
use super::session::{Failure, Session};

/// Bytes of one stream that may wait for the link to take them, whatever the guest grants.
const MAX_UNSENT: usize = 128 << 10;

/// Which directions of a stream this side uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// Bytes come from the guest; dropping it resets the stream.
    Read,
    /// Bytes go to the guest; dropping it is the end of the bytes.
    Write,
    /// Both; dropping it resets the stream.
    Both,
}

/// The state of a stream. Holds at most a window of bytes in each direction.
pub(super) struct StreamState {
    id: u32,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    inbox: VecDeque<Bytes>,
    /// How much the guest may still send.
    allowance: u32,
    /// What was read here and not yet granted again.
    consumed: u32,
    ended: bool,
    /// How the guest closed it.
    closed: Option<i32>,
    /// The link has ended, or the stream never came to be.
    failed: bool,
    /// Nobody reads here any more.
    dropped: bool,
    /// The guest was told of it.
    announced: bool,
    /// How much we may still send.
    credit: u64,
    unsent: usize,
    sent_eof: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Inner {
    fn wake_all(&mut self) {
        for waker in [self.reader.take(), self.writer.take()].into_iter().flatten() {
            waker.wake();
        }
    }
}

impl StreamState {
    pub(super) fn new(id: u32) -> Self {
        let inner = Inner {
            allowance: WINDOW,
            credit: u64::from(WINDOW),
            ..Inner::default()
        };
        Self {
            id,
            inner: Mutex::new(inner),
        }
    }

    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// The guest knows of it from now on, and will say when it is closed.
    pub(super) fn announce(&self) {
        lock(&self.inner).announced = true;
    }

    /// Bytes came from the guest.
    pub(super) fn output(&self, bytes: Bytes) -> Result<(), Failure> {
        let mut inner = lock(&self.inner);
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        if len == 0 || bytes.len() > MAX_CHUNK || len > inner.allowance || inner.ended {
            return Err(Failure::protocol("bytes of a stream that were not asked for"));
        }
        inner.allowance -= len;
        if !inner.dropped {
            inner.inbox.push_back(bytes);
            if let Some(waker) = inner.reader.take() {
                waker.wake();
            }
        }
        Ok(())
    }

    /// The guest takes more.
    pub(super) fn grant(&self, amount: u32) -> Result<(), Failure> {
        let mut inner = lock(&self.inner);
        inner.credit = inner.credit.saturating_add(u64::from(amount));
        if let Some(waker) = inner.writer.take() {
            waker.wake();
        }
        Ok(())
    }

    /// No more comes.
    pub(super) fn end(&self) -> Result<(), Failure> {
        let mut inner = lock(&self.inner);
        inner.ended = true;
        inner.wake_all();
        Ok(())
    }

    /// The guest closed it.
    pub(super) fn close(&self, errno: i32) {
        let mut inner = lock(&self.inner);
        inner.closed = Some(errno);
        inner.wake_all();
    }

    /// The link has ended.
    pub(super) fn fail(&self) {
        let mut inner = lock(&self.inner);
        inner.failed = true;
        inner.wake_all();
    }

    /// A frame of ours has left, or was thrown away.
    pub(super) fn left(&self, count: usize) {
        let mut inner = lock(&self.inner);
        inner.unsent = inner.unsent.saturating_sub(count);
        if let Some(waker) = inner.writer.take() {
            waker.wake();
        }
    }
}

/// This side's end of a stream.
pub(super) struct MuxStream {
    session: Arc<Session>,
    state: Arc<StreamState>,
    side: Side,
}

impl MuxStream {
    pub(super) fn new(session: Arc<Session>, state: Arc<StreamState>, side: Side) -> Self {
        Self { session, state, side }
    }

    pub(super) fn id(&self) -> u32 {
        self.state.id
    }

    fn send_eof(&self) {
        let send = {
            let mut inner = lock(&self.state.inner);
            !std::mem::replace(&mut inner.sent_eof, true) && inner.closed.is_none() && !inner.failed
        };
        if send {
            self.session.post(self.state.id, &Request::Eof {});
        }
    }

    /// Waits until the guest has closed the stream after our end of it: everything was written there.
    pub(super) fn poll_closed(&self, context: &Context<'_>) -> Poll<io::Result<()>> {
        self.send_eof();
        let mut inner = lock(&self.state.inner);
        match inner.closed {
            Some(0) => Poll::Ready(Ok(())),
            Some(errno) => Poll::Ready(Err(io::Error::from_raw_os_error(errno))),
            None if inner.failed => Poll::Ready(Err(gone())),
            None => {
                inner.writer = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "the link to the guest has ended")
}

impl AsyncRead for MuxStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut inner = lock(&self.state.inner);
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let Some(chunk) = inner.inbox.front_mut() else {
            return match inner.closed {
                Some(0) => Poll::Ready(Ok(())),
                Some(errno) => Poll::Ready(Err(io::Error::from_raw_os_error(errno))),
                None if inner.ended => Poll::Ready(Ok(())),
                None if inner.failed => Poll::Ready(Err(gone())),
                None => {
                    inner.reader = Some(context.waker().clone());
                    Poll::Pending
                }
            };
        };
        let count = chunk.len().min(buf.remaining());
        buf.put_slice(&chunk[..count]);
        chunk.advance(count);
        if chunk.is_empty() {
            inner.inbox.pop_front();
        }
        inner.consumed += count as u32;
        let mut amount = 0;
        if inner.consumed >= WINDOW / 2 && inner.closed.is_none() && !inner.ended {
            amount = std::mem::take(&mut inner.consumed);
            inner.allowance += amount;
        }
        drop(inner);
        if amount > 0 {
            self.session.post(self.state.id, &Request::Credit { amount });
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for MuxStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let count = {
            let mut inner = lock(&self.state.inner);
            match inner.closed {
                Some(0) | None => {}
                Some(errno) => return Poll::Ready(Err(io::Error::from_raw_os_error(errno))),
            }
            if inner.closed.is_some() || inner.sent_eof {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            if inner.failed {
                return Poll::Ready(Err(gone()));
            }
            let credit = usize::try_from(inner.credit).unwrap_or(usize::MAX);
            let count = bytes.len().min(credit).min(MAX_CHUNK);
            if count == 0 && bytes.is_empty() {
                return Poll::Ready(Ok(0));
            }
            if count == 0 || inner.unsent >= MAX_UNSENT {
                inner.writer = Some(context.waker().clone());
                return Poll::Pending;
            }
            inner.credit -= count as u64;
            // The frame's whole length is subtracted when it has left.
            inner.unsent += count + super::frame::HEADER_LEN + 4;
            count
        };
        self.session.post_data(&self.state, &bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.send_eof();
        Poll::Ready(Ok(()))
    }
}

impl Drop for MuxStream {
    fn drop(&mut self) {
        if !lock(&self.state.inner).announced {
            return self.session.forget_stream(self.state.id);
        }
        if self.side == Side::Write {
            return self.send_eof();
        }
        let reset = {
            let mut inner = lock(&self.state.inner);
            inner.dropped = true;
            inner.inbox = VecDeque::new();
            inner.closed.is_none() && !inner.failed
        };
        if reset {
            self.session.post(self.state.id, &Request::Reset {});
        }
    }
}

/// Resolves once everything that was written to the stream has arrived where it goes.
pub(super) async fn finish(stream: MuxStream) -> io::Result<()> {
    std::future::poll_fn(|context| stream.poll_closed(context)).await
}
