//! [`pump`]: bytes between two connections, both ways, until both are done.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::time::Instant;

use super::inside::{Accepted, Inner};

/// Bytes that a direction takes at a time, into a buffer that all connections of a thread share: one that is silent has
/// none.
const LENGTH: usize = 128 << 10;
/// The buffer of a direction that is carried over a link.
const CARRIED: usize = 32 << 10;
/// After so many bytes a direction counts as bulk, and is worth the two descriptors of a pipe: splicing takes a fifth
/// less processor time than copying.
#[cfg(target_os = "linux")]
const BULK: usize = 512 << 10;

/// How long both directions may be silent; `None` is for ever.
#[derive(Debug, Clone, Copy)]
pub(super) struct Silence {
    pub(super) open: Option<Duration>,
    /// Once one side has ended its direction.
    pub(super) half_closed: Option<Duration>,
}

/// Moves bytes between `inside` and `outside` until each has ended its direction; the end of one is passed on at once,
/// and the other goes on. What `sent` (to the outside) and `received` count has been handed to the system.
///
/// On an error both connections are set to reset when they are dropped, so that neither side takes what it got for the
/// whole. Dropping the future stops at once; what was read and not yet written is lost.
pub(super) async fn pump(
    inside: &mut Accepted,
    outside: &mut TcpStream,
    silence: Silence,
    sent: &AtomicU64,
    received: &AtomicU64,
) -> io::Result<()> {
    let result = match &mut inside.0 {
        Inner::Socket(socket) => {
            let (inside_read, inside_write) = socket.split();
            let (outside_read, outside_write) = outside.split();
            let up = one_way(inside_read, outside_write, sent);
            let down = one_way(outside_read, inside_write, received);
            both(up, down, silence, sent, received).await
        }
        Inner::Carried(_) => {
            let (inside_read, inside_write) = tokio::io::split(&mut *inside);
            let (outside_read, outside_write) = outside.split();
            let up = copy(inside_read, outside_write, sent);
            let down = copy(outside_read, inside_write, received);
            both(up, down, silence, sent, received).await
        }
    };
    if result.is_err() {
        inside.reset();
        reset(outside);
    }
    result
}

/// Makes dropping `stream` tell the other side that something went wrong, and throw away what it was not sent yet.
pub(super) fn reset(stream: &TcpStream) {
    // A connection that is gone already cannot be reset, which is as well.
    let _ = stream.set_zero_linger();
}

async fn both(
    up: impl Future<Output = io::Result<()>>,
    down: impl Future<Output = io::Result<()>>,
    silence: Silence,
    sent: &AtomicU64,
    received: &AtomicU64,
) -> io::Result<()> {
    let mut up = pin!(up);
    let mut down = pin!(down);
    let (mut up_done, mut down_done) = (false, false);
    let total = || {
        sent.load(Ordering::Relaxed)
            .wrapping_add(received.load(Ordering::Relaxed))
    };
    let mut before = total();
    // No limit is a limit that is never looked at.
    let mut limit = silence.open;
    let timer = tokio::time::sleep(limit.unwrap_or(Duration::MAX / 4).min(FOREVER));
    let mut timer = pin!(timer);
    while !(up_done && down_done) {
        tokio::select! {
            result = &mut up, if !up_done => {
                result?;
                up_done = true;
                limit = silence.half_closed;
                timer.as_mut().reset(Instant::now() + limit.unwrap_or(FOREVER));
            }
            result = &mut down, if !down_done => {
                result?;
                down_done = true;
                limit = silence.half_closed;
                timer.as_mut().reset(Instant::now() + limit.unwrap_or(FOREVER));
            }
            () = &mut timer, if limit.is_some() => {
                if total() == before {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                before = total();
                timer.as_mut().reset(Instant::now() + limit.unwrap_or(FOREVER));
            }
        }
    }
    Ok(())
}

/// For connections that are no sockets: a buffer of their own, and no splicing.
async fn copy(
    mut reader: impl AsyncRead + Unpin,
    mut writer: impl AsyncWrite + Unpin,
    count: &AtomicU64,
) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(CARRIED);
    loop {
        buffer.clear();
        if reader.read_buf(&mut buffer).await? == 0 {
            return end(&mut writer).await;
        }
        writer.write_all(&buffer).await?;
        count.fetch_add(buffer.len() as u64, Ordering::Relaxed);
    }
}

const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

async fn one_way(reader: ReadHalf<'_>, mut writer: WriteHalf<'_>, count: &AtomicU64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    let mut total = 0;
    loop {
        reader.readable().await?;
        let moved = match step(&reader, &writer) {
            Ok(Step::End) => return end(&mut writer).await,
            Ok(Step::Moved(length)) => length,
            Ok(Step::Left(moved, left)) => {
                count.fetch_add(moved as u64, Ordering::Relaxed);
                write_all(&writer, &left).await?;
                left.len()
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        count.fetch_add(moved as u64, Ordering::Relaxed);
        #[cfg(target_os = "linux")]
        if total < BULK {
            total += moved;
            if total >= BULK
                && let Some(pipe) = splice::Pipe::new()
            {
                splice::one_way(&pipe, reader.as_ref(), writer.as_ref(), count).await?;
                return end(&mut writer).await;
            }
        }
    }
}

enum Step {
    End,
    Moved(usize),
    /// The other side took so many; these it did not.
    Left(usize, Vec<u8>),
}

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; LENGTH]);
}

/// One read, and as much of a write as the other side takes at once.
fn step(reader: &ReadHalf<'_>, writer: &WriteHalf<'_>) -> io::Result<Step> {
    BUFFER.with_borrow_mut(|buffer| {
        let length = reader.try_read(buffer)?;
        if length == 0 {
            return Ok(Step::End);
        }
        let bytes = buffer.get(..length).unwrap_or_default();
        let moved = match writer.try_write(bytes) {
            Ok(moved) => moved,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        match bytes.get(moved..) {
            None | Some([]) => Ok(Step::Moved(moved)),
            Some(left) => Ok(Step::Left(moved, left.to_vec())),
        }
    })
}

async fn end(writer: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    match writer.shutdown().await {
        // It was closed from the other side meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        result => result,
    }
}

async fn write_all(writer: &WriteHalf<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match writer.try_write(bytes) {
            Ok(length) => bytes = bytes.get(length..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => writer.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Bytes from socket to socket that never enter this process.
#[cfg(target_os = "linux")]
mod splice {
    use std::io;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
    use tokio::io::Interest;
    use tokio::net::TcpStream;

    /// What a pipe is asked to hold; the system may give less.
    const CAPACITY: usize = 512 << 10;

    pub(super) struct Pipe {
        read: OwnedFd,
        write: OwnedFd,
        capacity: usize,
    }

    impl Pipe {
        /// `None` if the system has none left; bytes are then copied.
        pub(super) fn new() -> Option<Self> {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
            let capacity = fcntl_setpipe_size(&write, CAPACITY).unwrap_or(64 << 10);
            Some(Self { read, write, capacity })
        }
    }

    pub(super) async fn one_way(pipe: &Pipe, from: &TcpStream, to: &TcpStream, count: &AtomicU64) -> io::Result<()> {
        loop {
            let taken = moved(from, Interest::READABLE, from, &pipe.write, pipe.capacity).await?;
            if taken == 0 {
                return Ok(());
            }
            let mut left = taken;
            while left > 0 {
                let given = moved(to, Interest::WRITABLE, &pipe.read, to, left).await?;
                if given == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                left -= given;
            }
            count.fetch_add(taken as u64, Ordering::Relaxed);
        }
    }

    /// One splice, as soon as `socket` is ready for it. The pipe always is: it is emptied before it is filled.
    async fn moved(
        socket: &TcpStream,
        interest: Interest,
        from: impl AsFd,
        to: impl AsFd,
        length: usize,
    ) -> io::Result<usize> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        socket
            .async_io(interest, || {
                splice(from.as_fd(), None, to.as_fd(), None, length, flags).map_err(io::Error::from)
            })
            .await
    }
}
