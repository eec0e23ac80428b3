//! [`Outgoing`] and [`Reply`]: bodies on their way through, counted and with a deadline.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio_util::sync::CancellationToken;

use super::deadline::Deadline;
use super::forward::Exchange;

/// A request's body on its way out.
pub(super) struct Outgoing {
    body: Option<Incoming>,
    exchange: Arc<Exchange>,
}

impl Outgoing {
    pub(super) fn new(body: Option<Incoming>, exchange: &Arc<Exchange>) -> Self {
        if body.as_ref().is_none_or(Body::is_end_stream) {
            exchange.sent.store(true, Ordering::Release);
        }
        Self {
            body,
            exchange: Arc::clone(exchange),
        }
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(&mut *body).poll_frame(context));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            let sent = &this.exchange.attempt.sent;
            sent.fetch_add(data.len() as u64, Ordering::Relaxed);
        }
        if frame.is_none() || body.is_end_stream() {
            this.exchange.sent.store(true, Ordering::Release);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

/// What a client is answered with.
pub(super) enum Reply {
    Empty,
    Stream(Answer),
}

/// A response's body on its way in.
pub(super) struct Answer {
    body: Incoming,
    /// Closes the connection that the answer comes by.
    quit: CancellationToken,
    exchange: Arc<Exchange>,
    limit: Option<Duration>,
    deadline: Deadline,
}

/// Why an answer broke off.
#[derive(Debug)]
pub(super) enum Broken {
    Upstream(hyper::Error),
    TimedOut,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Upstream(error) => write!(f, "the answer broke off: {error}"),
            Self::TimedOut => f.write_str("the answer stalled"),
        }
    }
}

impl std::error::Error for Broken {}

impl Answer {
    /// `limit` is between two pieces.
    pub(super) fn new(
        body: Incoming,
        quit: CancellationToken,
        exchange: Arc<Exchange>,
        limit: Option<Duration>,
    ) -> Self {
        Self {
            body,
            quit,
            exchange,
            limit,
            deadline: Deadline::default(),
        }
    }

    fn is_late(&mut self, context: &mut Context<'_>) -> bool {
        self.limit
            .is_some_and(|limit| self.deadline.poll_over(0, limit, context))
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let Self::Stream(answer) = self.get_mut() else {
            return Poll::Ready(None);
        };
        let frame = match Pin::new(&mut answer.body).poll_frame(context) {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                if !answer.is_late(context) {
                    return Poll::Pending;
                }
                answer.quit.cancel();
                answer.exchange.attempt.failed("response_timeout");
                return Poll::Ready(Some(Err(Broken::TimedOut)));
            }
        };
        answer.deadline.progress();
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            let received = &answer.exchange.attempt.received;
            received.fetch_add(data.len() as u64, Ordering::Relaxed);
        }
        if (frame.is_none() || answer.body.is_end_stream()) && !answer.exchange.sent.load(Ordering::Acquire) {
            // An answer before the end of the request ends the request.
            answer.quit.cancel();
        }
        Poll::Ready(frame.map(|frame| {
            frame.map_err(|error| {
                answer.exchange.attempt.failed("response_broke_off");
                Broken::Upstream(error)
            })
        }))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Stream(answer) => answer.body.is_end_stream(),
            Self::Empty => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Stream(answer) => answer.body.size_hint(),
            Self::Empty => SizeHint::with_exact(0),
        }
    }
}
