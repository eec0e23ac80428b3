//! [`Guarded`]: a client's connection as the HTTP library sees it, with strict framing and deadlines in front.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use tokio_util::io::poll_read_buf;

use super::deadline::Deadline;
use super::framing::{Framing, Step};
use super::limits::Limits;

/// What one read asks the system for.
const READ: usize = 8 << 10;
/// Larger pieces of a body go past this layer's buffer.
const DIRECT: u64 = 4 << 10;
/// What the library is shown in place of a malformed head. It answers 400 and closes.
const MALFORMED: &[u8] = b"\0\r\n\r\n";

/// What a connection and the requests on it tell each other.
#[derive(Debug, Default)]
pub(super) struct Gate {
    busy: AtomicBool,
    /// The bytes after a request for another protocol are held back.
    held: AtomicBool,
    open: AtomicBool,
    reader: Mutex<Option<Waker>>,
}

impl Gate {
    /// The request is not (or no longer) one for another protocol, so what follows is a request.
    pub(super) fn open(&self) {
        if !self.held.swap(false, Ordering::AcqRel) {
            return;
        }
        self.open.store(true, Ordering::Release);
        let waker = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The answer is complete, so waiting for the next request is idleness.
    pub(super) fn idle(&self) {
        self.busy.store(false, Ordering::Release);
    }

    /// Whether a request is being served.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire)
    }

    fn poll_open(&self, context: &Context<'_>) -> bool {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if self.open.swap(false, Ordering::AcqRel) {
            return true;
        }
        *reader = Some(context.waker().clone());
        false
    }
}

/// See the [module](self). Reads give only what [`Framing`] passed; what it refuses reads as something that the library
/// answers with 400. Closing lingers when the client is in the middle of a request, so that the answer reaches it.
#[derive(Debug)]
pub(super) struct Guarded<S> {
    stream: S,
    limits: Arc<Limits>,
    gate: Arc<Gate>,
    framing: Framing,
    /// Received and not passed on yet; the first `pass` bytes may be.
    buffer: BytesMut,
    pass: usize,
    /// After `pass`, nothing is passed on until the gate opens.
    hold: bool,
    /// The client's bytes have no one meaning; whether the library has been shown that.
    broken: Option<bool>,
    reading: Deadline,
    writing: Deadline,
    closing: Option<Pin<Box<Sleep>>>,
}

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const BODY: u8 = 2;
const BUSY: u8 = 3;

impl<S> Guarded<S> {
    pub(super) fn new(stream: S, limits: Arc<Limits>, gate: Arc<Gate>) -> Self {
        Self {
            stream,
            limits,
            gate,
            framing: Framing::new(),
            buffer: BytesMut::new(),
            pass: 0,
            hold: false,
            broken: None,
            reading: Deadline::default(),
            writing: Deadline::default(),
            closing: None,
        }
    }

    /// The connection itself, and what was received after the head of the request that switched protocols.
    pub(super) fn into_parts(self) -> (S, Bytes) {
        (self.stream, self.buffer.freeze())
    }

    /// Whether the client is, as far as is known, in the middle of sending something.
    fn is_interrupted(&self) -> bool {
        self.broken.is_some() || !self.framing.is_between_requests() || !self.buffer.is_empty()
    }
}

impl<S: AsyncRead + Unpin> Guarded<S> {
    /// Waits for bytes with the deadline of whatever is being read.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.buffer.capacity() - self.buffer.len() < READ / 4 {
            self.buffer.reserve(READ);
        }
        match poll_read_buf(Pin::new(&mut self.stream), context, &mut self.buffer) {
            Poll::Ready(result) => {
                // Of a head, only its end is progress.
                if !self.framing.is_between_requests() && self.framing.direct() > 0 {
                    self.reading.progress();
                }
                Poll::Ready(result)
            }
            Poll::Pending => {
                if self.buffer.is_empty() {
                    self.buffer = BytesMut::new();
                }
                ready!(self.poll_late(context));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }

    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let in_head = self.framing.is_in_head() || !self.buffer.is_empty();
        let (phase, limit) = match (self.framing.is_between_requests(), self.gate.is_busy()) {
            (true, false) if !in_head => (IDLE, self.limits.keep_alive),
            // The library only looks whether the client is still there.
            (true, true) => (BUSY, self.limits.keep_alive),
            (false, _) if !self.framing.is_in_head() => (BODY, self.limits.body),
            _ => (HEAD, self.limits.head),
        };
        while self.reading.poll_over(phase, limit, context) {
            if phase != BUSY {
                return Poll::Ready(());
            }
            self.reading.progress();
        }
        Poll::Pending
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if out.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            if this.pass > 0 {
                let length = this.pass.min(out.remaining());
                out.put_slice(this.buffer.get(..length).unwrap_or_default());
                this.buffer.advance(length);
                this.pass -= length;
                return Poll::Ready(Ok(()));
            }
            if let Some(shown) = &mut this.broken {
                if !*shown {
                    *shown = true;
                    out.put_slice(
                        MALFORMED
                            .get(..out.remaining().min(MALFORMED.len()))
                            .unwrap_or_default(),
                    );
                }
                return Poll::Ready(Ok(()));
            }
            if this.hold {
                if !this.gate.poll_open(context) {
                    return Poll::Pending;
                }
                this.hold = false;
            }
            if !this.buffer.is_empty() {
                match this.framing.step(&this.buffer) {
                    Ok(Step::Pass(length)) => {
                        this.pass = length;
                        this.reading.progress();
                        continue;
                    }
                    Ok(Step::Head { length, switch }) => {
                        (this.pass, this.hold) = (length, switch);
                        this.gate.held.store(switch, Ordering::Release);
                        this.gate.busy.store(true, Ordering::Release);
                        this.reading.progress();
                        continue;
                    }
                    Ok(Step::More) => {}
                    Err(problem) => {
                        tracing::debug!(%problem, "a request was refused");
                        this.broken = Some(false);
                        continue;
                    }
                }
            } else if this.framing.direct() >= DIRECT {
                return this.poll_direct(context, out);
            }
            if ready!(this.poll_fill(context))? == 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: AsyncRead + Unpin> Guarded<S> {
    /// Reads a piece of a body into `out` itself.
    fn poll_direct(&mut self, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let left = usize::try_from(self.framing.direct()).unwrap_or(usize::MAX);
        let before = out.filled().len();
        let result = if left >= out.remaining() {
            Pin::new(&mut self.stream).poll_read(context, out)
        } else {
            let mut part = ReadBuf::new(out.initialize_unfilled_to(left));
            let result = Pin::new(&mut self.stream).poll_read(context, &mut part);
            let length = part.filled().len();
            out.advance(length);
            result
        };
        match result {
            Poll::Ready(Ok(())) => {
                self.framing.passed((out.filled().len() - before) as u64);
                self.reading.progress();
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                ready!(self.poll_late(context));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> Guarded<S> {
    fn in_time<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.writing.progress();
            return result;
        }
        if self.writing.poll_over(BODY, self.limits.body, context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Poll::Pending
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.in_time(context, result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_write_vectored(context, parts);
        this.in_time(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_flush(context);
        this.in_time(context, result)
    }

    /// Ends what is written and, if the client is still sending, reads on for a while: closing with bytes unread would
    /// reset the connection and take the answer with it.
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.closing.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
            if !this.is_interrupted() {
                return Poll::Ready(Ok(()));
            }
            this.closing = Some(Box::pin(tokio::time::sleep(this.limits.linger)));
        }
        let mut scratch = [0; 8 << 10];
        loop {
            if let Some(timer) = &mut this.closing
                && timer.as_mut().poll(context).is_ready()
            {
                return Poll::Ready(Ok(()));
            }
            let mut buffer = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut this.stream).poll_read(context, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}
