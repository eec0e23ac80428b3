//! What goes to the guest: frames in order, each with its descriptors.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::{AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::sync::{Notify, OwnedSemaphorePermit};

use super::frame::MAX_FDS;
use super::stdio::StreamState;

/// Locks, whatever happened to another thread that held it: the data is consistent at every point.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One frame on its way.
pub(super) struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    descriptors: Vec<OwnedFd>,
    _room: Option<OwnedSemaphorePermit>,
    /// Told when the frame has left.
    stream: Option<Arc<StreamState>>,
}

impl Outgoing {
    pub(super) fn new(bytes: Vec<u8>, descriptors: Vec<OwnedFd>, room: Option<OwnedSemaphorePermit>) -> Self {
        Self {
            bytes,
            sent: 0,
            descriptors,
            _room: room,
            stream: None,
        }
    }

    pub(super) fn data(bytes: Vec<u8>, stream: Arc<StreamState>) -> Self {
        let mut frame = Self::new(bytes, Vec::new(), None);
        frame.stream = Some(stream);
        frame
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if let Some(stream) = &self.stream {
            stream.left(self.bytes.len());
        }
    }
}

/// The queue, and the socket where there is one. Bounded by its users: requests hold room of the session's budget,
/// streams keep little unsent, and signals are one per call.
pub(super) struct Outbox {
    queue: Mutex<Queue>,
    more: Notify,
    socket: Option<Arc<UnixStream>>,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Outgoing>,
    closed: bool,
}

impl Outbox {
    pub(super) fn new(socket: Option<Arc<UnixStream>>) -> Self {
        Self {
            queue: Mutex::default(),
            more: Notify::new(),
            socket,
        }
    }

    /// Sends at once if nothing waits and the socket takes it, else queues. Never blocks, needs no executor.
    pub(super) fn push(&self, frame: Outgoing) -> io::Result<()> {
        let mut queue = lock(&self.queue);
        if queue.closed {
            drop(queue);
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let was_empty = queue.frames.is_empty();
        queue.frames.push_back(frame);
        if was_empty && let Some(socket) = &self.socket {
            match send_queued(socket, &mut queue.frames) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        drop(queue);
        self.more.notify_one();
        Ok(())
    }

    /// Throws away what waits and refuses what comes.
    pub(super) fn close(&self) {
        let frames = {
            let mut queue = lock(&self.queue);
            queue.closed = true;
            std::mem::take(&mut queue.frames)
        };
        drop(frames);
        if let Some(socket) = &self.socket {
            // The guest hears of the end even while somebody still holds the socket. It may be gone already.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
        self.more.notify_one();
    }

    /// Sends what was queued, for as long as the link lives.
    pub(super) async fn drive_socket(&self) -> io::Result<()> {
        let Some(socket) = &self.socket else {
            return Ok(());
        };
        loop {
            self.more.notified().await;
            loop {
                socket.writable().await?;
                match socket.try_io(Interest::WRITABLE, || {
                    send_queued(socket, &mut lock(&self.queue).frames)
                }) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    result => break result?,
                }
            }
        }
    }

    /// Writes what was queued to a byte stream, for as long as the link lives.
    pub(super) async fn drive_stream(&self, mut writer: impl AsyncWrite + Unpin) -> io::Result<()> {
        loop {
            let next = lock(&self.queue).frames.pop_front();
            match next {
                Some(frame) => writer.write_all(&frame.bytes).await?,
                None => {
                    writer.flush().await?;
                    if lock(&self.queue).closed {
                        return Ok(());
                    }
                    self.more.notified().await;
                }
            }
        }
    }
}

fn send_queued(socket: &UnixStream, frames: &mut VecDeque<Outgoing>) -> io::Result<()> {
    while let Some(frame) = frames.front_mut() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = frame.descriptors.iter().map(AsFd::as_fd).collect();
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes = frame.bytes.get(frame.sent..).unwrap_or_default();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(count) => {
                // Descriptors travel with the first byte.
                frame.descriptors.clear();
                frame.sent += count;
                if frame.sent >= frame.bytes.len() {
                    frames.pop_front();
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
