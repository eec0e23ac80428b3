//! The guest's end of the link: frames in, frames out, over a socket or over standard input and output.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::frame::{Decoder, Event, Frame, Request, encode};
use crate::sys;

/// Beyond this many waiting bytes nothing more is read from streams and no request is taken.
const FULL: usize = 1 << 20;

struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    descriptor: Option<OwnedFd>,
}

pub(crate) struct Port {
    input: OwnedFd,
    /// Set on a link over stdio; a socket is both.
    output: Option<OwnedFd>,
    decoder: Decoder,
    descriptors: Vec<OwnedFd>,
    outgoing: VecDeque<Outgoing>,
    queued: usize,
}

impl Port {
    pub(crate) fn socket(socket: OwnedFd) -> Self {
        Self::new(socket, None)
    }

    pub(crate) fn stdio(input: OwnedFd, output: OwnedFd) -> io::Result<Self> {
        sys::set_nonblocking(input.as_fd())?;
        sys::set_nonblocking(output.as_fd())?;
        Ok(Self::new(input, Some(output)))
    }

    fn new(input: OwnedFd, output: Option<OwnedFd>) -> Self {
        Self {
            input,
            output,
            decoder: Decoder::new(),
            descriptors: Vec::new(),
            outgoing: VecDeque::new(),
            queued: 0,
        }
    }

    pub(crate) fn input(&self) -> BorrowedFd<'_> {
        self.input.as_fd()
    }

    pub(crate) fn output(&self) -> BorrowedFd<'_> {
        self.output.as_ref().unwrap_or(&self.input).as_fd()
    }

    /// The host does not read as fast as we write.
    pub(crate) fn is_full(&self) -> bool {
        self.queued > FULL
    }

    pub(crate) fn wants_to_write(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Reads once. `false` is the end of the link.
    pub(crate) fn fill(&mut self) -> io::Result<bool> {
        let spare = self.decoder.spare();
        let result = if self.output.is_none() {
            sys::receive(self.input.as_fd(), spare, &mut self.descriptors)
        } else {
            sys::read_fd(self.input.as_fd(), spare)
        };
        match result {
            Ok(count) => {
                self.decoder.filled(count);
                Ok(count > 0)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// The next request that has arrived, with its descriptors.
    pub(crate) fn next(&mut self) -> io::Result<Option<(u32, Request, Vec<OwnedFd>)>> {
        let Some(Frame { tag, fds, message }) = self.decoder.next_frame::<Request>().map_err(io::Error::other)? else {
            return Ok(None);
        };
        if fds > self.descriptors.len() {
            return Err(io::Error::other("descriptors are missing"));
        }
        let descriptors = self.descriptors.drain(..fds).collect();
        Ok(Some((tag, message, descriptors)))
    }

    pub(crate) fn send(&mut self, tag: u32, event: &Event) {
        self.send_with(tag, event, None);
    }

    /// Queues an event. What the guest sends is bounded by construction, so that encoding does not fail.
    pub(crate) fn send_with(&mut self, tag: u32, event: &Event, descriptor: Option<OwnedFd>) {
        let passes = descriptor.is_some() && self.output.is_none();
        if let Ok(bytes) = encode(tag, u8::from(passes), event) {
            self.queued += bytes.len();
            self.outgoing.push_back(Outgoing {
                bytes,
                sent: 0,
                descriptor,
            });
        }
    }

    /// Writes what can be written now.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while let Some(front) = self.outgoing.front_mut() {
            let rest = front.bytes.get(front.sent..).unwrap_or_default();
            let result = match &self.output {
                None => sys::send(self.input.as_fd(), rest, front.descriptor.as_ref().map(AsFd::as_fd)),
                Some(output) => sys::write_fd(output.as_fd(), rest),
            };
            match result {
                Ok(count) => {
                    // The descriptor travels with the first byte.
                    front.descriptor = None;
                    front.sent += count;
                    self.queued -= count;
                    if front.sent >= front.bytes.len() {
                        self.outgoing.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
