//! [`Writer`] and [`compact`].

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::builder::seal;
use super::error::StoreError;
use super::line::{RecordRef, write_line};
use super::reader::{Reader, load, replay};
use crate::apply::NewLink;
use crate::id::{EdgeType, NodeId};
use crate::json::{self, Value};
use crate::load::Header;
use crate::trace::Trace;

/// When records are forced to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncPolicy {
    /// Before a call of the writer returns.
    EveryRecord,
    /// Before [`Writer::sync`] returns, but not [`Writer::links`].
    EveryTurn,
    /// Before a call returns, when this much time has passed since the last time.
    Interval(Duration),
    /// When the operating system likes.
    Never,
}

/// How a store is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// When records are forced to the disk. [`SyncPolicy::EveryTurn`] by default.
    pub sync: SyncPolicy,
    /// Compress, with this level (0: the library's choice). Needs the feature `zstd`.
    pub zstd_level: Option<i32>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sync: SyncPolicy::EveryTurn,
            zstd_level: None,
        }
    }
}

/// Links per record when whole traces are written.
const LINKS_PER_RECORD: usize = 1024;

/// Bytes of text that are gathered before they are written.
const GATHER: usize = 1 << 18;

/// Appends a trace to a file as it grows. While it lives, no other writer can open the file.
#[derive(Debug)]
pub struct Writer {
    file: File,
    options: Options,
    next_sequence: u64,
    /// What was written of the trace so far.
    nodes: usize,
    calls: usize,
    /// Per node, how many of its links were written.
    links: Vec<u32>,
    header: Value,
    sealed: bool,
    /// Lines that are not in the file yet.
    gathered: Vec<u8>,
    /// Bytes of the file that come before those, and that it has in part if writing failed.
    pending: Vec<u8>,
    synced_at: Instant,
}

pub(super) fn lock(file: &File) -> Result<(), StoreError> {
    match fs2::FileExt::try_lock_exclusive(file) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == fs2::lock_contended_error().kind() => Err(StoreError::Locked),
        Err(error) => Err(error.into()),
    }
}

impl Writer {
    /// Begins a store with what the trace holds already. The file must not exist.
    ///
    /// # Errors
    /// [`StoreError::Io`], or [`StoreError::Compressed`] if compression is asked for without the
    /// feature `zstd`.
    pub fn create(path: impl AsRef<Path>, trace: &Trace, options: Options) -> Result<Self, StoreError> {
        let file = OpenOptions::new().write(true).create_new(true).open(path.as_ref())?;
        Self::begin(file, trace, options)
    }

    fn begin(file: File, trace: &Trace, options: Options) -> Result<Self, StoreError> {
        if options.zstd_level.is_some() && !cfg!(feature = "zstd") {
            return Err(StoreError::Compressed);
        }
        lock(&file)?;
        let header = json::to_value(&Header(trace))?;
        let mut writer = Self {
            file,
            options,
            next_sequence: 0,
            nodes: 0,
            calls: 0,
            links: Vec::new(),
            header: Value::Null,
            sealed: false,
            gathered: Vec::new(),
            pending: Vec::new(),
            synced_at: Instant::now(),
        };
        writer.gather(&RecordRef::Open(&header))?;
        writer.header = header;
        writer.write_whole(trace)?;
        writer.flush()?;
        Ok(writer)
    }

    /// Goes on with a store, after a crash or not: a torn end is cut off.
    ///
    /// # Errors
    /// [`StoreError::Locked`] if somebody else writes it, [`StoreError::Sealed`] if it is
    /// finished, [`StoreError::Corrupt`] or [`StoreError::Invalid`] if more than its end is
    /// damaged (see [`recover`](super::recover)), [`StoreError::Io`].
    pub fn open(path: impl AsRef<Path>, options: Options) -> Result<(Self, Trace), StoreError> {
        let path = path.as_ref();
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        lock(&file)?;
        let (progress, failure) = replay(&mut Reader::open(path)?);
        if let Some(error) = failure {
            return Err(error);
        }
        if progress.builder.sealed {
            return Err(StoreError::Sealed);
        }
        if progress.next_sequence == 0 {
            return Err(StoreError::Corrupt {
                offset: 0,
                reason: "there is no intact first record".to_owned(),
            });
        }
        file.set_len(progress.valid_len)?;
        file.seek(SeekFrom::End(0))?;
        let header = progress.builder.header.clone();
        let trace = progress.builder.finish();
        let zstd_level = progress.compressed.then(|| options.zstd_level.unwrap_or(0));
        let writer = Self {
            file,
            options: Options { zstd_level, ..options },
            next_sequence: progress.next_sequence,
            nodes: trace.nodes.len(),
            calls: trace.calls.len(),
            links: trace
                .nodes
                .iter()
                .map(|node| node.semantic_parents.len() as u32)
                .collect(),
            header,
            sealed: false,
            gathered: Vec::new(),
            pending: Vec::new(),
            synced_at: Instant::now(),
        };
        Ok((writer, trace))
    }

    /// Writes whatever nodes, calls and fields are new since the last time.
    ///
    /// New links on old nodes are written by [`links`](Self::links). Edits of what is stored
    /// already are not seen; [`compact`] writes a trace as it is.
    ///
    /// # Errors
    /// [`StoreError::Diverged`] if the trace has fewer nodes or calls than the store,
    /// [`StoreError::Sealed`], [`StoreError::Io`].
    pub fn sync(&mut self, trace: &Trace) -> Result<(), StoreError> {
        self.writable()?;
        let (Some(nodes), Some(calls)) = (trace.nodes.get(self.nodes..), trace.calls.get(self.calls..)) else {
            return Err(StoreError::Diverged("it has fewer nodes or calls"));
        };
        if !nodes.is_empty() || !calls.is_empty() {
            self.gather(&RecordRef::Turn(nodes, calls))?;
            self.links.resize(trace.nodes.len(), 0);
            self.gather_links(trace, self.nodes..trace.nodes.len())?;
            self.nodes = trace.nodes.len();
            self.calls = trace.calls.len();
        }
        self.write_changed_header(trace)?;
        self.write_through(true)
    }

    fn write_changed_header(&mut self, trace: &Trace) -> Result<(), StoreError> {
        let header = json::to_value(&Header(trace))?;
        if header == self.header {
            return Ok(());
        }
        let changed: json::Object = header
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(key, value)| {
                self.header
                    .as_object()
                    .into_iter()
                    .flatten()
                    .find(|(known, _)| known == key)
                    .is_none_or(|(_, known)| known != value)
            })
            .cloned()
            .collect();
        self.gather(&RecordRef::Set(&Value::Object(changed)))?;
        self.header = header;
        Ok(())
    }

    /// Writes links that were added to nodes, as [`Trace::add_semantic_edges`] tells them.
    ///
    /// # Errors
    /// [`StoreError::Diverged`] if a link is between nodes that are not stored yet,
    /// [`StoreError::Sealed`], [`StoreError::Io`].
    pub fn links(&mut self, trace: &Trace, added: &[NewLink]) -> Result<(), StoreError> {
        self.writable()?;
        let stored = |id: NodeId| id.index() < self.nodes.min(trace.nodes.len());
        if !added.iter().all(|link| stored(link.target) && stored(link.source)) {
            return Err(StoreError::Diverged("a link is between unknown nodes"));
        }
        self.gather_links(trace, added.iter().map(|link| link.target.index()))?;
        self.write_through(false)
    }

    /// Gathers the links of some nodes that were not written yet.
    fn gather_links(&mut self, trace: &Trace, targets: impl Iterator<Item = usize>) -> Result<(), StoreError> {
        let mut links: Vec<(NodeId, NodeId, EdgeType)> = Vec::new();
        for target in targets {
            let all = &trace.nodes[target].semantic_parents;
            let new = all
                .get(self.links[target] as usize..)
                .ok_or(StoreError::Diverged("it has fewer links"))?;
            links.extend(
                new.iter()
                    .map(|link| (NodeId::new(target as u32), link.node, link.label.clone())),
            );
            self.links[target] = all.len() as u32;
            if links.len() >= LINKS_PER_RECORD {
                self.gather(&RecordRef::Links(&links))?;
                links.clear();
            }
        }
        if !links.is_empty() {
            self.gather(&RecordRef::Links(&links))?;
        }
        Ok(())
    }

    /// Finishes the store: nothing can be added afterwards. O(trace).
    ///
    /// # Errors
    /// [`StoreError::Diverged`] if the trace is not what was written, [`StoreError::Io`].
    pub fn seal(&mut self, trace: &Trace) -> Result<(), StoreError> {
        // After a failure to write it, the seal is still to be written.
        if !self.sealed || (self.gathered.is_empty() && self.pending.is_empty()) {
            self.sync(trace)?;
            self.gather(&RecordRef::Seal(&seal(trace)?))?;
            self.sealed = true;
        }
        self.flush()?;
        self.file.sync_all()?;
        Ok(())
    }

    fn writable(&self) -> Result<(), StoreError> {
        if self.sealed {
            return Err(StoreError::Sealed);
        }
        Ok(())
    }

    /// Writes a trace as it is, after its first record.
    fn write_whole(&mut self, trace: &Trace) -> Result<(), StoreError> {
        let mut from = 0;
        for (i, node) in trace.nodes.iter().enumerate() {
            if node.sampled || i + 1 == trace.nodes.len() {
                let calls = trace.calls[self.calls..]
                    .iter()
                    .take_while(|call| call.node.is_none_or(|node| node <= i as i64))
                    .count();
                let calls = &trace.calls[self.calls..self.calls + calls];
                self.gather(&RecordRef::Turn(&trace.nodes[from..=i], calls))?;
                self.calls += calls.len();
                from = i + 1;
                self.flush_if_large()?;
            }
        }
        self.nodes = trace.nodes.len();
        if self.calls < trace.calls.len() {
            self.gather(&RecordRef::Turn(&[], &trace.calls[self.calls..]))?;
            self.calls = trace.calls.len();
        }
        self.links.resize(trace.nodes.len(), 0);
        for start in (0..trace.nodes.len()).step_by(LINKS_PER_RECORD) {
            let end = trace.nodes.len().min(start + LINKS_PER_RECORD);
            self.gather_links(trace, start..end)?;
            self.flush_if_large()?;
        }
        Ok(())
    }

    /// Makes a line of a record. Nothing is written, so that the file system cannot fail between a
    /// record and the note that it was made.
    fn gather(&mut self, record: &RecordRef<'_>) -> Result<(), StoreError> {
        write_line(&mut self.gathered, self.next_sequence, record)?;
        self.next_sequence += 1;
        Ok(())
    }

    fn flush_if_large(&mut self) -> Result<(), StoreError> {
        if self.gathered.len() >= GATHER {
            self.flush()?;
        }
        Ok(())
    }

    /// Hands what is not in the file yet to the operating system.
    ///
    /// # Errors
    /// [`StoreError::Io`]. What could not be written is kept, and the next call goes on exactly
    /// where this one stopped: a full disk costs nothing once there is room.
    pub fn flush(&mut self) -> Result<(), StoreError> {
        loop {
            let mut written = 0;
            let mut result = Ok(());
            while written < self.pending.len() && result.is_ok() {
                match self.file.write(&self.pending[written..]) {
                    Ok(0) => result = Err(io::ErrorKind::WriteZero.into()),
                    Ok(more) => written += more,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => result = Err(error),
                }
            }
            self.pending.drain(..written);
            result?;
            if self.gathered.is_empty() {
                return Ok(());
            }
            match self.options.zstd_level {
                None => std::mem::swap(&mut self.pending, &mut self.gathered),
                #[cfg(feature = "zstd")]
                Some(level) => self.pending = zstd::stream::encode_all(&*self.gathered, level)?,
                #[cfg(not(feature = "zstd"))]
                Some(_) => return Err(StoreError::Compressed),
            }
            self.gathered.clear();
        }
    }

    /// Follows the sync policy after a call of the user.
    fn write_through(&mut self, turn: bool) -> Result<(), StoreError> {
        self.flush()?;
        let due = match self.options.sync {
            SyncPolicy::EveryRecord => true,
            SyncPolicy::EveryTurn => turn,
            SyncPolicy::Interval(interval) => self.synced_at.elapsed() >= interval,
            SyncPolicy::Never => false,
        };
        if due {
            self.file.sync_data()?;
            self.synced_at = Instant::now();
        }
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Whoever needs to know that this worked calls `flush`.
        let _ = self.flush();
    }
}

/// Writes a store anew, as short as possible, and puts it in the place of the old one at once.
///
/// # Errors
/// As [`load`], [`StoreError::Locked`], [`StoreError::Io`]; the old file then stays.
pub fn compact(path: impl AsRef<Path>, options: Options) -> Result<(), StoreError> {
    let path = path.as_ref();
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    lock(&file)?;
    let loaded = load(path)?;
    rewrite_sealed(path, &loaded.trace, options, loaded.sealed)
}

pub(super) fn rewrite(path: &Path, trace: &Trace, options: Options) -> Result<(), StoreError> {
    rewrite_sealed(path, trace, options, false)
}

fn rewrite_sealed(path: &Path, trace: &Trace, options: Options, sealed: bool) -> Result<(), StoreError> {
    let (temporary, file) = temporary_beside(path)?;
    let result = write_and_replace(file, &temporary, path, trace, options, sealed);
    if result.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    result
}

fn write_and_replace(
    file: File,
    temporary: &Path,
    path: &Path,
    trace: &Trace,
    options: Options,
    sealed: bool,
) -> Result<(), StoreError> {
    let mut writer = Writer::begin(file, trace, options)?;
    if sealed {
        writer.seal(trace)?;
    }
    writer.flush()?;
    writer.file.sync_all()?;
    std::fs::rename(temporary, path)?;
    // The new name has to survive a crash too.
    if let Some(dir) = path.parent() {
        let dir = if dir.as_os_str().is_empty() {
            Path::new(".")
        } else {
            dir
        };
        File::open(dir)?.sync_all()?;
    }
    Ok(())
}

fn temporary_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::other("the path has no file name"))?;
    for attempt in 0..1000 {
        let mut other = name.to_owned();
        other.push(format!(".{}.{attempt}.tmp", std::process::id()));
        let other = path.with_file_name(other);
        match OpenOptions::new().write(true).create_new(true).open(&other) {
            Ok(file) => return Ok((other, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("no free name for a temporary file"))
}

#[cfg(all(test, unix))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::io::Read;
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::message::Message;
    use crate::response::Response;

    /// A file that takes some bytes and then no more until they are read elsewhere: a full disk
    /// with room now and then.
    fn bounded_file() -> (File, std::io::PipeReader) {
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        (File::from(OwnedFd::from(writer)), reader)
    }

    fn drain(mut from: &std::io::PipeReader, into: &mut Vec<u8>) {
        let end = from.read_to_end(into).map_err(|error| error.kind());
        assert!(matches!(end, Ok(_) | Err(io::ErrorKind::WouldBlock)), "{end:?}");
    }

    fn turn(trace: &mut Trace, text: &str) {
        let turn = trace.prepare_turn([Message::user(text)], vec![]).unwrap();
        trace.commit(&turn, Response::text("yes")).unwrap();
    }

    fn writes_resume(options: Options) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.jsonl");
        let mut trace = Trace::new("full");
        let mut writer = Writer::create(&path, &trace, options).unwrap();
        let mut content = std::fs::read(&path).unwrap();
        let (file, reader) = bounded_file();
        writer.file = file;
        let mut noise = 1_u64;
        let mut failures = 0;
        for _ in 0..40 {
            let text: String = (0..20_000)
                .map(|_| {
                    noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    char::from(b' ' + (noise >> 58) as u8)
                })
                .collect();
            turn(&mut trace, &text);
            if writer.sync(&trace).is_err() {
                failures += 1;
                assert!(
                    matches!(writer.sync(&trace), Err(StoreError::Io(_))),
                    "there is no room"
                );
                drain(&reader, &mut content);
            }
        }
        assert!(failures > 1, "the pipe was never full");
        while let Err(error) = writer.flush() {
            assert!(matches!(error, StoreError::Io(_)), "{error}");
            drain(&reader, &mut content);
        }
        drop(writer);
        drain(&reader, &mut content);
        std::fs::write(&path, &content).unwrap();
        let loaded = load(&path).unwrap();
        assert_eq!(loaded.torn, None);
        assert_eq!(loaded.trace, trace);
    }

    #[test]
    fn a_write_that_failed_goes_on_where_it_stopped() {
        for zstd_level in [None, cfg!(feature = "zstd").then_some(1)] {
            writes_resume(Options {
                sync: SyncPolicy::Never,
                zstd_level,
            });
        }
    }

    #[test]
    fn nothing_is_written_twice_after_a_failure_whatever_the_policy() {
        for sync in [SyncPolicy::EveryRecord, SyncPolicy::EveryTurn, SyncPolicy::Never] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("store.jsonl");
            let mut trace = Trace::new("full");
            let options = Options { sync, zstd_level: None };
            let mut writer = Writer::create(&path, &trace, options).unwrap();
            turn(&mut trace, "before");
            writer.sync(&trace).unwrap();
            let Ok(full) = OpenOptions::new().write(true).open("/dev/full") else {
                println!("SKIPPED: nothing_is_written_twice: no /dev/full");
                return;
            };
            let file = std::mem::replace(&mut writer.file, full);
            for text in ["one", "two"] {
                turn(&mut trace, text);
                trace.stop_condition = Some(text.to_owned());
                assert!(matches!(writer.sync(&trace), Err(StoreError::Io(_))));
            }
            assert!(matches!(writer.seal(&trace), Err(StoreError::Io(_))));
            writer.file = file;
            writer.seal(&trace).unwrap();
            assert!(matches!(writer.seal(&trace), Err(StoreError::Sealed)));
            let loaded = load(&path).unwrap();
            assert!(loaded.sealed);
            assert_eq!(loaded.trace, trace);
        }
    }
}
