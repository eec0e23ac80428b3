//! What a fault does to the body of an answer.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Frame};

use super::fault::Distortion;
use super::server::Body;
use crate::wire::envelope::{self, COMPRESSED, Decoder};

/// The body with what the fault makes of it.
pub(super) fn distort(body: Body, distortion: Distortion) -> Body {
    Distorted {
        body,
        distortion,
        decoder: Decoder::default(),
        held: None,
        ready: VecDeque::new(),
        ended: false,
    }
    .boxed_unsync()
}

struct Distorted {
    body: Body,
    distortion: Distortion,
    decoder: Decoder,
    /// The first frame, while the second one is awaited.
    held: Option<Bytes>,
    /// What is to be sent next.
    ready: VecDeque<Bytes>,
    /// The body is at its end.
    ended: bool,
}

/// Whether more may be sent after this.
#[derive(PartialEq, Eq)]
enum Next {
    Goes,
    Breaks,
    Stalls,
}

impl Distorted {
    fn next(&self) -> Next {
        match self.distortion {
            Distortion::Bytes { left: 0, breaks } | Distortion::Frames { left: 0, breaks } => match breaks {
                true => Next::Breaks,
                false => Next::Stalls,
            },
            _ => Next::Goes,
        }
    }

    fn take_in(&mut self, bytes: Bytes) {
        match &mut self.distortion {
            Distortion::Bytes { left, .. } => {
                let kept = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= kept as u64;
                self.ready.push_back(bytes.slice(..kept));
            }
            Distortion::Rechunk(size) => {
                let size = *size;
                let mut rest = bytes;
                while !rest.is_empty() {
                    let piece = rest.split_to(size.min(rest.len()));
                    self.ready.push_back(piece);
                }
            }
            Distortion::Frames { .. } | Distortion::Reorder | Distortion::ClaimCompressed => {
                self.decoder.push(bytes);
                while let Ok(Some(frame)) = self.decoder.next_frame() {
                    self.take_in_frame(frame.flags, &frame.payload);
                }
            }
        }
    }

    fn take_in_frame(&mut self, flags: u8, payload: &[u8]) {
        match &mut self.distortion {
            Distortion::Frames { left: 0, .. } => {}
            Distortion::Frames { left, .. } => {
                *left -= 1;
                self.ready.push_back(envelope::encode(flags, payload));
            }
            Distortion::ClaimCompressed => self.ready.push_back(envelope::encode(flags | COMPRESSED, payload)),
            _ => match self.held.take() {
                Some(first) => {
                    self.ready.push_back(envelope::encode(flags, payload));
                    self.ready.push_back(first);
                    // From here on everything passes as it comes.
                    self.distortion = Distortion::Rechunk(usize::MAX);
                }
                None => self.held = Some(envelope::encode(flags, payload)),
            },
        }
    }
}

impl HttpBody for Distorted {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            match self.next() {
                Next::Goes => {}
                Next::Breaks => return Poll::Ready(Some(Err(io::Error::other("dropped on request")))),
                Next::Stalls => return Poll::Pending,
            }
            if self.ended {
                return Poll::Ready(None);
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(frame) => {
                    if let Ok(bytes) = frame?.into_data() {
                        self.take_in(bytes);
                    }
                }
                None => {
                    self.ended = true;
                    let held = self.held.take();
                    self.ready.extend(held);
                }
            }
        }
    }
}
