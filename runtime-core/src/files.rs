//! Files of a box: metadata, write options, byte streams.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::SystemTime;

use bytes::Bytes;
use tokio::io::{AsyncRead, ReadBuf};

/// Bytes as they arrive. Dropping it ends the transfer.
pub struct ByteStream(Pin<Box<dyn AsyncRead + Send>>);

impl ByteStream {
    /// Wraps any reader.
    pub fn new(reader: impl AsyncRead + Send + 'static) -> Self {
        Self(Box::pin(reader))
    }

    /// A stream of bytes that are in memory already.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Self {
        Self::new(std::io::Cursor::new(bytes.into()))
    }
}

impl AsyncRead for ByteStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        self.0.as_mut().poll_read(cx, buf)
    }
}

impl fmt::Debug for ByteStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ByteStream")
    }
}

/// What to write into a file.
#[derive(Debug)]
pub enum Content {
    /// Bytes in memory.
    Bytes(Bytes),
    /// A stream, read to its end.
    Stream(ByteStream),
}

macro_rules! content_from {
    ($($source:ty),*) => {$(
        impl From<$source> for Content {
            fn from(source: $source) -> Self {
                Self::Bytes(Bytes::from(source))
            }
        }
    )*};
}

content_from!(Bytes, Vec<u8>, String, &'static [u8], &'static str);

impl<const N: usize> From<&'static [u8; N]> for Content {
    fn from(source: &'static [u8; N]) -> Self {
        Self::Bytes(Bytes::from_static(source))
    }
}

impl From<ByteStream> for Content {
    fn from(source: ByteStream) -> Self {
        Self::Stream(source)
    }
}

/// How to write a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteOptions {
    /// Permission bits (`0o755`). `None` leaves them to the box: an existing file keeps its own where the provider
    /// can, a new one gets the box's default.
    pub mode: Option<u32>,
    /// Replace the file in one step where the provider can ([`Capabilities::atomic_write`](crate::Capabilities)): a
    /// reader sees the old content or the new, and a write that is cut short leaves the old. On by default. Off writes
    /// in place, which keeps hard links and the identity of the file.
    pub atomic: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            mode: None,
            atomic: true,
        }
    }
}

impl WriteOptions {
    /// Options with these permission bits.
    pub fn mode(mode: u32) -> Self {
        Self {
            mode: Some(mode),
            ..Self::default()
        }
    }
}

/// What a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileType {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link, which was not followed.
    Symlink,
    /// A FIFO, a socket or a device.
    Special,
}

/// Facts about a path. A symbolic link is not followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    /// What it is.
    pub file_type: FileType,
    /// Size in bytes; of a directory or a special file, whatever the box says.
    pub size: u64,
    /// Permission bits (the low twelve), where [`Capabilities::file_modes`](crate::Capabilities::file_modes).
    pub mode: Option<u32>,
    /// Time of the last change, where it is known.
    pub modified: Option<SystemTime>,
    /// Where a symbolic link points, where the provider tells.
    pub link_target: Option<PathBuf>,
}

impl Metadata {
    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.file_type == FileType::File
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.file_type == FileType::Directory
    }

    /// Whether it is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.file_type == FileType::Symlink
    }
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Its name, without the directory.
    pub name: OsString,
    /// Facts about it.
    pub metadata: Metadata,
}

/// The error behind an I/O error of a stream: ours, if a provider put one in, with its kind.
pub fn stream_error(what: &str, error: std::io::Error) -> crate::Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<crate::Error>()) {
        Some(inner) => inner.clone(),
        None => crate::Error::io(what, error),
    }
}
