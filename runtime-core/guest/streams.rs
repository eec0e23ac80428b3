//! Streams for links that cannot pass descriptors: the guest holds the pipe, file or socket and carries its bytes in
//! frames, in each direction only as many as the other side has granted.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::files::{EINVAL, EMFILE};
use crate::frame::{ACCEPT_WINDOW, Event, GUEST_STREAM, MAX_CHUNK, WINDOW};
use crate::port::Port;
use crate::sys::{self, POLLERR, POLLHUP, POLLIN, POLLOUT, PollFd};

const MAX_STREAMS: usize = 4096;
const EPIPE: i32 = 32;
const ECANCELED: i32 = 125;
const EPROTO: i32 = 71;

struct Stream {
    /// Bytes for the host come from here.
    reader: Option<OwnedFd>,
    /// Bytes from the host go there.
    writer: Option<OwnedFd>,
    /// Set for a connection, to close one direction of it.
    socket: Option<TcpStream>,
    /// How many more bytes the host takes.
    credit: u64,
    pending: VecDeque<u8>,
    /// The host sends no more.
    host_done: bool,
}

struct Listener {
    socket: TcpListener,
    credit: u64,
}

/// All streams and relayed listeners.
#[derive(Default)]
pub(crate) struct Streams {
    streams: BTreeMap<u32, Stream>,
    listeners: BTreeMap<u32, Listener>,
    next: u32,
}

impl Streams {
    fn has_room(&self, id: u32) -> Result<(), i32> {
        if id == 0 || self.streams.contains_key(&id) || self.listeners.contains_key(&id) {
            return Err(EINVAL);
        }
        if self.streams.len() + self.listeners.len() >= MAX_STREAMS {
            return Err(EMFILE);
        }
        Ok(())
    }

    /// Carries what `reader` gives to the host, and what the host sends to `writer`.
    pub(crate) fn add(&mut self, id: u32, reader: Option<OwnedFd>, writer: Option<OwnedFd>) -> Result<(), i32> {
        self.has_room(id)?;
        for fd in [&reader, &writer].into_iter().flatten() {
            sys::set_nonblocking(fd.as_fd()).map_err(|error| error.raw_os_error().unwrap_or(EINVAL))?;
        }
        self.streams.insert(
            id,
            Stream {
                host_done: writer.is_none(),
                reader,
                writer,
                socket: None,
                credit: u64::from(WINDOW),
                pending: VecDeque::new(),
            },
        );
        Ok(())
    }

    /// Carries a connection.
    pub(crate) fn add_socket(&mut self, id: u32, socket: TcpStream) -> Result<(), i32> {
        let clones = socket.try_clone().and_then(|reader| Ok((reader, socket.try_clone()?)));
        let (reader, writer) = clones.map_err(|error| error.raw_os_error().unwrap_or(EINVAL))?;
        self.add(id, Some(reader.into()), Some(writer.into()))?;
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.socket = Some(socket);
        }
        Ok(())
    }

    /// Accepts for the host.
    pub(crate) fn add_listener(&mut self, id: u32, socket: TcpListener) -> Result<(), i32> {
        self.has_room(id)?;
        self.listeners.insert(
            id,
            Listener {
                socket,
                credit: u64::from(ACCEPT_WINDOW),
            },
        );
        Ok(())
    }

    /// What there is to wait for, as (stream, descriptor).
    pub(crate) fn poll(&self, fds: &mut Vec<PollFd>, owners: &mut Vec<Ready>, port_full: bool) {
        for (&id, listener) in &self.listeners {
            if listener.credit > 0 && self.streams.len() < MAX_STREAMS {
                owners.push(Ready::Accept(id));
                fds.push(poll_for(listener.socket.as_raw_fd(), POLLIN));
            }
        }
        for (&id, stream) in &self.streams {
            // Without credit not even a hang-up is wanted: what the pipe still holds comes first.
            if let Some(reader) = stream.reader.as_ref().filter(|_| stream.credit > 0 && !port_full) {
                owners.push(Ready::Read(id));
                fds.push(poll_for(reader.as_raw_fd(), POLLIN));
            }
            if let Some(writer) = &stream.writer {
                owners.push(Ready::Write(id));
                let events = if stream.pending.is_empty() { 0 } else { POLLOUT };
                fds.push(poll_for(writer.as_raw_fd(), events));
            }
        }
    }

    /// Does what a ready descriptor allows.
    pub(crate) fn ready(&mut self, ready: Ready, revents: i16, port: &mut Port) {
        match ready {
            Ready::Accept(id) => self.accept(id, port),
            Ready::Read(id) => self.read(id, port),
            Ready::Write(id) => {
                let idle = self.streams.get(&id).is_some_and(|stream| stream.pending.is_empty());
                if idle && revents & (POLLERR | POLLHUP) != 0 {
                    self.write_side_broke(id, EPIPE, port);
                } else {
                    self.write(id, port);
                }
            }
        }
    }

    fn accept(&mut self, id: u32, port: &mut Port) {
        let Some(listener) = self.listeners.get_mut(&id) else {
            return;
        };
        let Ok((socket, peer)) = listener.socket.accept() else {
            return;
        };
        listener.credit -= 1;
        self.next = (self.next + 1) & !GUEST_STREAM;
        let stream = GUEST_STREAM | self.next;
        if self.add_socket(stream, socket).is_ok() {
            port.send(id, &Event::Accepted { stream, peer });
        }
    }

    fn read(&mut self, id: u32, port: &mut Port) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let Some(reader) = &stream.reader else { return };
        let mut bytes = vec![0; MAX_CHUNK.min(usize::try_from(stream.credit).unwrap_or(MAX_CHUNK))];
        match sys::read_fd(reader.as_fd(), &mut bytes) {
            Ok(0) => {
                stream.reader = None;
                if stream.writer.is_some() {
                    port.send(id, &Event::End {});
                }
                self.close_if_done(id, port);
            }
            Ok(count) => {
                stream.credit -= count as u64;
                bytes.truncate(count);
                port.send(id, &Event::Output { bytes });
            }
            Err(error) if is_temporary(&error) => {}
            Err(error) => self.close(id, error.raw_os_error().unwrap_or(EINVAL), port),
        }
    }

    fn write(&mut self, id: u32, port: &mut Port) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let Some(writer) = &stream.writer else { return };
        while !stream.pending.is_empty() {
            let (head, _) = stream.pending.as_slices();
            match sys::write_fd(writer.as_fd(), head) {
                Ok(count) => {
                    stream.pending.drain(..count);
                    port.send(id, &Event::Grant { amount: count as u32 });
                }
                Err(error) if is_temporary(&error) => return,
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(EINVAL);
                    return self.write_side_broke(id, errno, port);
                }
            }
        }
        if stream.host_done {
            stream.writer = None;
            if let Some(socket) = &stream.socket {
                // It may be closed already; then there is nothing to say.
                let _ = socket.shutdown(Shutdown::Write);
            }
            self.close_if_done(id, port);
        }
    }

    /// Nobody takes what the host sends. What is still to read is read.
    fn write_side_broke(&mut self, id: u32, errno: i32, port: &mut Port) {
        if let Some(stream) = self.streams.get_mut(&id) {
            if stream.reader.is_none() {
                return self.close(id, errno, port);
            }
            stream.writer = None;
            stream.pending = VecDeque::new();
        }
    }

    fn close_if_done(&mut self, id: u32, port: &mut Port) {
        if self
            .streams
            .get(&id)
            .is_some_and(|stream| stream.reader.is_none() && stream.writer.is_none())
        {
            self.close(id, 0, port);
        }
    }

    fn close(&mut self, id: u32, errno: i32, port: &mut Port) {
        if self.streams.remove(&id).is_some() {
            port.send(id, &Event::Closed { errno });
        }
    }

    /// Bytes from the host. Those for a stream that is no more are dropped: its end has been told.
    pub(crate) fn data(&mut self, id: u32, bytes: &[u8], port: &mut Port) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if stream.host_done || stream.pending.len() + bytes.len() > WINDOW as usize {
            return self.close(id, EPROTO, port);
        }
        if stream.writer.is_some() {
            stream.pending.extend(bytes);
            self.write(id, port);
        }
    }

    pub(crate) fn eof(&mut self, id: u32, port: &mut Port) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.host_done = true;
            if stream.writer.is_some() {
                self.write(id, port);
            } else {
                self.close_if_done(id, port);
            }
        }
    }

    pub(crate) fn credit(&mut self, id: u32, amount: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.credit += u64::from(amount);
        } else if let Some(listener) = self.listeners.get_mut(&id) {
            listener.credit += u64::from(amount);
        }
    }

    pub(crate) fn reset(&mut self, id: u32, port: &mut Port) {
        if self.listeners.remove(&id).is_some() {
            port.send(id, &Event::Closed { errno: 0 });
        } else {
            self.close(id, ECANCELED, port);
        }
    }
}

/// What a descriptor was polled for.
#[derive(Clone, Copy)]
pub(crate) enum Ready {
    Accept(u32),
    Read(u32),
    Write(u32),
}

fn poll_for(fd: i32, events: i16) -> PollFd {
    PollFd { fd, events, revents: 0 }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
