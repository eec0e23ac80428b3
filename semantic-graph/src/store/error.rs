//! [`StoreError`].

use std::fmt;
use std::io;

use crate::json;

/// Why a store cannot be read or written.
#[derive(Debug)]
#[non_exhaustive]
pub enum StoreError {
    /// The file system.
    Io(io::Error),
    /// Another process has the store open for writing.
    Locked,
    /// The file is no store.
    NotAStore,
    /// A record before the last one is damaged.
    Corrupt {
        /// Where the record begins, in bytes (of the compressed file, its frame).
        offset: u64,
        /// What is wrong.
        reason: String,
    },
    /// A record is intact and says something impossible.
    Invalid {
        /// Where the record begins, in bytes.
        offset: u64,
        /// What is wrong.
        reason: String,
    },
    /// The trace to be written is not the one that was written before.
    Diverged(&'static str),
    /// The store was sealed.
    Sealed,
    /// The file is compressed and the feature `zstd` is off.
    Compressed,
    /// A record of another kind of file.
    Json(json::Error),
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::Io(error) => error.fmt(f),
            StoreError::Locked => f.write_str("another writer has the store open"),
            StoreError::NotAStore => f.write_str("the file is no store: it begins with something else"),
            StoreError::Corrupt { offset, reason } => {
                write!(f, "corrupt record at byte {offset}: {reason}")
            }
            StoreError::Invalid { offset, reason } => {
                write!(f, "impossible record at byte {offset}: {reason}")
            }
            StoreError::Diverged(what) => write!(f, "the trace is not the stored one: {what}"),
            StoreError::Sealed => f.write_str("the store is sealed"),
            StoreError::Compressed => f.write_str("the file is compressed; build with the feature `zstd`"),
            StoreError::Json(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // These two are shown as themselves.
            StoreError::Io(error) => error.source(),
            StoreError::Json(error) => error.source(),
            _ => None,
        }
    }
}

impl From<io::Error> for StoreError {
    fn from(error: io::Error) -> Self {
        StoreError::Io(error)
    }
}

impl From<json::Error> for StoreError {
    fn from(error: json::Error) -> Self {
        StoreError::Json(error)
    }
}
