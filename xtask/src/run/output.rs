//! The program's output to ours, byte for byte and in the order in which it came; our standard input to the program.

use std::io::{self, Read, Write};

use bytes::Bytes;
use runtime_core::{OutputChunk, OutputStream};
use tokio::sync::{mpsc, oneshot};

/// Chunks on their way to the terminal. When whoever reads us is slow, the program is held back.
const CHUNKS: usize = 16;

/// Bytes of our standard input at once.
const INPUT: usize = 64 << 10;

/// Writes chunks on a thread of its own, so that a reader who stalls stalls neither the executor nor a signal.
pub(super) struct Writer {
    pub(super) sink: mpsc::Sender<OutputChunk>,
    /// The end: all was written, or what kept it from being written.
    pub(super) done: oneshot::Receiver<io::Result<()>>,
}

impl Writer {
    pub(super) fn start() -> io::Result<Self> {
        let (sink, chunks) = mpsc::channel(CHUNKS);
        let (sender, done) = oneshot::channel();
        std::thread::Builder::new().name("output".to_owned()).spawn(move || {
            let _ = sender.send(write_all(chunks));
        })?;
        Ok(Self { sink, done })
    }
}

fn write_all(mut chunks: mpsc::Receiver<OutputChunk>) -> io::Result<()> {
    while let Some(chunk) = chunks.blocking_recv() {
        match chunk.stream {
            OutputStream::Stdout => put(io::stdout().lock(), &chunk.bytes)?,
            OutputStream::Stderr => put(io::stderr().lock(), &chunk.bytes)?,
        }
    }
    Ok(())
}

fn put(mut to: impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

/// Reads our standard input on a thread of its own: a read from a terminal cannot be called off. The channel closes at
/// the end of the input.
pub(super) fn input() -> io::Result<mpsc::Receiver<Bytes>> {
    let (sink, chunks) = mpsc::channel(2);
    std::thread::Builder::new().name("input".to_owned()).spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut buffer = vec![0; INPUT];
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    if sink.blocking_send(Bytes::copy_from_slice(&buffer[..count])).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    eprintln!("warning: standard input cannot be read: {error}");
                    break;
                }
            }
        }
    })?;
    Ok(chunks)
}
