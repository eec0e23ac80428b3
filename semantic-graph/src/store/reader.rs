//! [`Reader`], [`load`] and [`recover`].

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::builder::Builder;
use super::error::StoreError;
use super::input::Input;
use super::line::{Record, open_line};
use super::writer::{Options, rewrite};
use crate::json;
use crate::trace::Trace;

/// The damaged end of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Torn {
    /// Where it begins, in bytes (of a compressed file, its frame).
    pub offset: u64,
    /// What is wrong with it.
    pub reason: String,
}

/// Reads a store record by record, in memory for one record.
///
/// At the end of the file [`next_record`](Self::next_record) gives none; if the file grows,
/// calling it again goes on, so that a live run can be followed.
#[derive(Debug)]
pub struct Reader<R> {
    input: Input<R>,
    line: Vec<u8>,
    /// Where the line in `line` begins.
    line_start: u64,
    /// Where the last good record ends.
    valid_len: u64,
    next_sequence: u64,
    torn: Option<Torn>,
}

impl Reader<BufReader<File>> {
    /// Opens a file, compressed or not.
    ///
    /// # Errors
    /// [`StoreError::Io`], or [`StoreError::Compressed`] without the feature `zstd`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Ok(Self::over(Input::open(path.as_ref())?))
    }
}

impl<R: BufRead> Reader<R> {
    /// Reads from anything, compressed or not.
    ///
    /// # Errors
    /// [`StoreError::Io`], or [`StoreError::Compressed`] without the feature `zstd`.
    pub fn new(inner: R) -> Result<Self, StoreError> {
        Ok(Self::over(Input::new(inner)?))
    }

    fn over(input: Input<R>) -> Self {
        Self {
            input,
            line: Vec::new(),
            line_start: 0,
            valid_len: 0,
            next_sequence: 0,
            torn: None,
        }
    }

    /// The next record; none at the end of what is there.
    ///
    /// A damaged record that nothing follows is the torn end of a crash: it is not given, and
    /// [`torn`](Self::torn) tells of it.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] for a damaged record that others follow, [`StoreError::Invalid`]
    /// for an intact record that makes no sense, [`StoreError::NotAStore`] for a file that begins
    /// otherwise than a store, [`StoreError::Io`].
    pub fn next_record(&mut self) -> Result<Option<Record>, StoreError> {
        if let Some(torn) = &self.torn {
            if self.input.at_end()? {
                return Ok(None);
            }
            // More came: what looked like a torn end is in the middle.
            return Err(StoreError::Corrupt {
                offset: torn.offset,
                reason: torn.reason.clone(),
            });
        }
        if self.line.is_empty() {
            self.line_start = self.input.offset();
        }
        self.input.read_line(&mut self.line)?;
        if self.next_sequence == 0 && !begins_like_a_store(&self.line) {
            return Err(StoreError::NotAStore);
        }
        let Some(line) = self.line.strip_suffix(b"\n") else {
            return Ok(None);
        };
        let checked = open_line(line).and_then(|(sequence, body)| {
            if sequence == self.next_sequence {
                Ok(body)
            } else {
                Err(format!("record {sequence} where {} should be", self.next_sequence))
            }
        });
        let offset = self.line_start;
        let body = match checked {
            Ok(body) => body,
            Err(reason) => {
                if self.input.at_end()? {
                    self.torn = Some(Torn { offset, reason });
                    return Ok(None);
                }
                return Err(StoreError::Corrupt { offset, reason });
            }
        };
        let record = json::from_str(body).map_err(|error| StoreError::Invalid {
            offset,
            reason: error.to_string(),
        })?;
        self.line.clear();
        self.next_sequence += 1;
        self.valid_len = self.input.offset();
        Ok(Some(record))
    }

    /// The damaged end, once [`next_record`](Self::next_record) gave none.
    pub fn torn(&self) -> Option<Torn> {
        if self.torn.is_some() {
            return self.torn.clone();
        }
        if self.line.is_empty() && !self.input.is_torn() {
            return None;
        }
        Some(Torn {
            offset: self.line_start,
            reason: "the file ends in the middle of a record".to_owned(),
        })
    }

    /// How much of the file is good, in bytes.
    #[must_use]
    pub fn valid_len(&self) -> u64 {
        self.valid_len
    }

    /// The number of the record that comes next.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    pub(super) fn is_compressed(&self) -> bool {
        self.input.is_compressed()
    }
}

/// Whether a file that begins like this can be a store, or the torn beginning of one.
fn begins_like_a_store(line: &[u8]) -> bool {
    const BEGINNING: &[u8] = b"{\"s\":0,\"c\":\"";
    line.iter().zip(BEGINNING).all(|(found, wanted)| found == wanted)
}

/// A trace that was read from a store.
#[derive(Debug)]
pub struct Loaded {
    /// The trace after the last good record.
    pub trace: Trace,
    /// The damaged end, which is not in the trace.
    pub torn: Option<Torn>,
    /// Whether the trace was finished.
    pub sealed: bool,
}

/// Everything a writer needs to go on.
pub(super) struct Progress {
    pub(super) builder: Builder,
    pub(super) valid_len: u64,
    pub(super) next_sequence: u64,
    pub(super) compressed: bool,
    pub(super) torn: Option<Torn>,
}

/// Reads as far as possible; the error that stopped it, if one did.
pub(super) fn replay<R: BufRead>(reader: &mut Reader<R>) -> (Progress, Option<StoreError>) {
    let mut builder = Builder::new();
    let mut failure = None;
    let mut valid_len = 0;
    let mut next_sequence = 0;
    loop {
        let offset = reader.valid_len();
        match reader.next_record() {
            Ok(None) => break,
            Ok(Some(record)) => {
                if let Err(reason) = builder.apply(record) {
                    failure = Some(StoreError::Invalid { offset, reason });
                    break;
                }
                valid_len = reader.valid_len();
                next_sequence = reader.next_sequence();
            }
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    let progress = Progress {
        builder,
        valid_len,
        next_sequence,
        compressed: reader.is_compressed(),
        torn: reader.torn(),
    };
    (progress, failure)
}

/// Reads the trace of a store.
///
/// # Errors
/// As [`Reader::next_record`], and [`StoreError::Invalid`] for records that do not fit together.
/// A torn end is no error.
pub fn load(path: impl AsRef<Path>) -> Result<Loaded, StoreError> {
    let (progress, failure) = replay(&mut Reader::open(path)?);
    match failure {
        Some(error) => Err(error),
        None => Ok(Loaded {
            torn: progress.torn,
            sealed: progress.builder.sealed,
            trace: progress.builder.finish(),
        }),
    }
}

/// Keeps what is good of a damaged store: everything before the first bad record. The file then
/// ends there. Returns the trace and the error that stopped the reading, if there was one.
///
/// # Errors
/// [`StoreError::Io`], [`StoreError::Locked`], or [`StoreError::NotAStore`]; the file is then as it
/// was.
pub fn recover(path: impl AsRef<Path>) -> Result<(Trace, Option<StoreError>), StoreError> {
    let path = path.as_ref();
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    super::writer::lock(&file)?;
    let (progress, failure) = replay(&mut Reader::open(path)?);
    if matches!(failure, Some(StoreError::NotAStore)) {
        return Err(StoreError::NotAStore);
    }
    let trace = progress.builder.finish();
    if progress.compressed {
        // A frame cannot be cut, so the good part is written anew.
        rewrite(
            path,
            &trace,
            Options {
                zstd_level: Some(0),
                ..Options::default()
            },
        )?;
    } else {
        file.set_len(progress.valid_len)?;
        file.sync_all()?;
    }
    Ok((trace, failure))
}
