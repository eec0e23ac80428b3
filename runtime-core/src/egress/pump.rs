//! [`pump`]: bytes between two connections, both ways, until both are done.

use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::time::Instant;

/// Bytes that a direction takes at a time. Held only while bytes are on their way.
const BUFFER: usize = 64 << 10;
/// Full buffers in a row after which a direction counts as bulk.
#[cfg(target_os = "linux")]
const BULK: u32 = 4;

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
    inside: &mut TcpStream,
    outside: &mut TcpStream,
    silence: Silence,
    sent: &AtomicU64,
    received: &AtomicU64,
) -> io::Result<()> {
    let result = both(inside, outside, silence, sent, received).await;
    if result.is_err() {
        reset(inside);
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
    inside: &mut TcpStream,
    outside: &mut TcpStream,
    silence: Silence,
    sent: &AtomicU64,
    received: &AtomicU64,
) -> io::Result<()> {
    let (inside_read, inside_write) = inside.split();
    let (outside_read, outside_write) = outside.split();
    let mut up = pin!(one_way(inside_read, outside_write, sent));
    let mut down = pin!(one_way(outside_read, inside_write, received));
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

const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

async fn one_way(reader: ReadHalf<'_>, mut writer: WriteHalf<'_>, count: &AtomicU64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    let mut full = 0;
    loop {
        reader.readable().await?;
        let mut buffer = vec![0; BUFFER];
        loop {
            match reader.try_read(&mut buffer) {
                Ok(0) => return end(&mut writer).await,
                Ok(length) => {
                    write_all(&writer, buffer.get(..length).unwrap_or_default()).await?;
                    count.fetch_add(length as u64, Ordering::Relaxed);
                    #[cfg(target_os = "linux")]
                    {
                        full = if length == BUFFER { full + 1 } else { 0 };
                        if full == BULK
                            && let Some(pipe) = splice::Pipe::new()
                        {
                            drop(buffer);
                            splice::one_way(&pipe, reader.as_ref(), writer.as_ref(), count).await?;
                            return end(&mut writer).await;
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
    }
}

async fn end(writer: &mut WriteHalf<'_>) -> io::Result<()> {
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
