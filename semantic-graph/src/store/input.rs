//! [`Input`]: the plain text of a store file, compressed or not.

use std::fs::File;
#[cfg(feature = "zstd")]
use std::io::Read;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use super::error::StoreError;

/// Largest text of one frame, in bytes; a frame that claims more is refused.
#[cfg(feature = "zstd")]
const MAX_FRAME: u64 = 1 << 32;

const BUFFER: usize = 1 << 18;

/// A source of lines that knows where in the file it is.
#[derive(Debug)]
pub(super) enum Input<R> {
    Plain {
        inner: R,
        offset: u64,
    },
    #[cfg(feature = "zstd")]
    Frames(Frames<R>),
}

impl Input<BufReader<File>> {
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        Self::new(BufReader::with_capacity(BUFFER, File::open(path)?))
    }
}

impl<R: BufRead> Input<R> {
    pub(super) fn new(mut inner: R) -> Result<Self, StoreError> {
        let beginning = inner.fill_buf()?;
        let magic = [0x28, 0xb5, 0x2f, 0xfd];
        if !beginning.is_empty() && beginning.iter().zip(magic).all(|(found, wanted)| *found == wanted) {
            #[cfg(feature = "zstd")]
            return Ok(Input::Frames(Frames {
                inner: Counting { inner, count: 0 },
                text: Vec::new(),
                at: 0,
                start: 0,
                torn: false,
            }));
            #[cfg(not(feature = "zstd"))]
            return Err(StoreError::Compressed);
        }
        Ok(Input::Plain { inner, offset: 0 })
    }

    /// Appends the rest of the current line, with its newline if it has one. False at the end.
    pub(super) fn read_line(&mut self, line: &mut Vec<u8>) -> io::Result<bool> {
        match self {
            Input::Plain { inner, offset } => {
                let read = inner.read_until(b'\n', line)?;
                *offset += read as u64;
                Ok(read > 0)
            }
            #[cfg(feature = "zstd")]
            Input::Frames(frames) => frames.read_line(line),
        }
    }

    /// Bytes of the file that were read, in whole frames if it has frames.
    pub(super) fn offset(&self) -> u64 {
        match self {
            Input::Plain { offset, .. } => *offset,
            #[cfg(feature = "zstd")]
            Input::Frames(frames) => {
                if frames.at == frames.text.len() {
                    frames.inner.count
                } else {
                    frames.start
                }
            }
        }
    }

    /// Whether nothing follows.
    pub(super) fn at_end(&mut self) -> io::Result<bool> {
        match self {
            Input::Plain { inner, .. } => Ok(inner.fill_buf()?.is_empty()),
            #[cfg(feature = "zstd")]
            Input::Frames(frames) => {
                Ok(frames.at == frames.text.len() && (frames.torn || frames.inner.fill_buf()?.is_empty()))
            }
        }
    }

    /// Whether the last frame ends in the middle.
    pub(super) fn is_torn(&self) -> bool {
        match self {
            Input::Plain { .. } => false,
            #[cfg(feature = "zstd")]
            Input::Frames(frames) => frames.torn,
        }
    }

    /// Whether the file consists of compressed frames.
    pub(super) fn is_compressed(&self) -> bool {
        !matches!(self, Input::Plain { .. })
    }
}

/// Counts what is consumed.
#[cfg(feature = "zstd")]
#[derive(Debug)]
pub(super) struct Counting<R> {
    inner: R,
    count: u64,
}

#[cfg(feature = "zstd")]
impl<R: BufRead> Read for Counting<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buf)?;
        self.count += read as u64;
        Ok(read)
    }
}

#[cfg(feature = "zstd")]
impl<R: BufRead> BufRead for Counting<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }
    fn consume(&mut self, amount: usize) {
        self.inner.consume(amount);
        self.count += amount as u64;
    }
}

/// The text of compressed frames, one frame in memory at a time.
#[cfg(feature = "zstd")]
#[derive(Debug)]
pub(super) struct Frames<R> {
    inner: Counting<R>,
    text: Vec<u8>,
    at: usize,
    /// Where the current frame begins in the file.
    start: u64,
    torn: bool,
}

#[cfg(feature = "zstd")]
impl<R: BufRead> Frames<R> {
    fn read_line(&mut self, line: &mut Vec<u8>) -> io::Result<bool> {
        let mut any = false;
        loop {
            if self.at == self.text.len() && !self.next_frame()? {
                return Ok(any);
            }
            let rest = &self.text[self.at..];
            let end = rest.iter().position(|byte| *byte == b'\n');
            let take = end.map_or(rest.len(), |end| end + 1);
            line.extend_from_slice(&rest[..take]);
            self.at += take;
            any = true;
            if end.is_some() {
                return Ok(true);
            }
        }
    }

    fn next_frame(&mut self) -> io::Result<bool> {
        if self.torn || self.inner.fill_buf()?.is_empty() {
            return Ok(false);
        }
        self.start = self.inner.count;
        self.text.clear();
        self.at = 0;
        let result = zstd::stream::read::Decoder::with_buffer(&mut self.inner)
            .and_then(|decoder| decoder.single_frame().take(MAX_FRAME).read_to_end(&mut self.text));
        match result {
            Ok(read) if read as u64 >= MAX_FRAME => Err(io::Error::other("a frame of more than 4 GiB")),
            Ok(_) => Ok(true),
            // A frame that ends in the middle, at the end of the file, is a torn tail.
            Err(_) if self.inner.fill_buf()?.is_empty() => {
                self.text.clear();
                self.torn = true;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
