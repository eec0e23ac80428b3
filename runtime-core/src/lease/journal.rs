//! The leases of one process: an append-only file that its owner keeps locked.
//!
//! The lock, not the file's content, says whether the owner lives: the kernel drops it on any death. So a journal is
//! locked before it gets the name under which reapers look for it, and stays locked under every name that it ever has.
//! All leases of a process share one file and one descriptor, which children do not inherit.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cache::{CacheDir, create_private_dir};
use crate::lease::crash::crash_point;
use crate::lease::record::{Event, MAX_LINE, Record};
use crate::names::random_hex;

/// Where journals are kept below the cache directory.
pub(crate) const DIRECTORY: &str = "leases";
/// The end of a journal's name.
pub(crate) const SUFFIX: &str = ".journal";
/// The start of a file's name that is not a journal yet.
pub(crate) const UNBORN: &str = ".new-";

/// Below this size a journal is not rewritten, however little of it still matters.
const COMPACT_FROM: u64 = 256 << 10;
/// A journal is rewritten when it is this many times as large as what still matters.
const COMPACT_FACTOR: u64 = 4;
/// How long leases that need only survive the process may wait for a flush that covers them together. A flush holds up
/// what others do on the file system, creations of boxes among them.
const LAZY_FLUSH: Duration = Duration::from_secs(1);
/// How often a new file is made again when a reaper took it for a dead one.
const CREATE_ATTEMPTS: u32 = 16;

/// The open journals of this process, one for each cache directory in use.
static OPEN: Mutex<Vec<Arc<Journal>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A place in a journal: everything before it can be flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Position {
    /// Counts rewrites. A rewrite is flushed, so earlier files need no flush any more.
    rewrite: u64,
    len: u64,
}

/// The leases of this process under one cache directory.
#[derive(Debug)]
pub(crate) struct Journal {
    dir: PathBuf,
    path: PathBuf,
    pid: u32,
    inner: Mutex<Inner>,
    /// Held during a flush: whoever waits for it finds that one flush served many.
    flushed: Mutex<Position>,
    flush_planned: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    file: Arc<File>,
    end: Position,
    /// A write failed half-way and what it left could not be cut off.
    torn: bool,
    live: HashMap<u64, Live>,
    /// What a file with the live leases alone would take.
    live_bytes: u64,
    next: u64,
    compact_at: u64,
    /// Its file is removed, so nothing may be added.
    closed: bool,
}

#[derive(Debug)]
struct Live {
    record: Record,
    size: u64,
}

impl Journal {
    /// The journal of this process under `cache`. Blocks on the disk.
    pub(crate) fn of(cache: &CacheDir) -> io::Result<Arc<Self>> {
        let dir = cache.path().join(DIRECTORY);
        let pid = std::process::id();
        let mut open = lock(&OPEN);
        // A journal of another process id was inherited through a fork: its parent writes to it.
        open.retain(|journal| journal.pid == pid);
        if let Some(journal) = open.iter().find(|journal| journal.dir == dir) {
            return Ok(journal.clone());
        }
        open.retain(|journal| !journal.close_if_empty());
        let journal = Arc::new(Self::create(dir)?);
        open.push(journal.clone());
        Ok(journal)
    }

    /// A new journal, locked and empty.
    pub(crate) fn create(dir: PathBuf) -> io::Result<Self> {
        let pid = std::process::id();
        let path = dir.join(format!("{pid}-{}{SUFFIX}", random_hex(12)));
        let file = install(&dir, &path, b"")?;
        Ok(Self {
            dir,
            path,
            pid,
            inner: Mutex::new(Inner {
                file: Arc::new(file),
                end: Position::default(),
                torn: false,
                live: HashMap::new(),
                live_bytes: 0,
                next: 0,
                compact_at: COMPACT_FROM,
                closed: false,
            }),
            flushed: Mutex::default(),
            flush_planned: AtomicBool::new(false),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a lease. When this returns, it survives any death of this process; flushed up to the position, it also
    /// survives that of the machine. `None`: the journal is closed, ask for it again.
    pub(crate) fn begin(&self, record: Record) -> io::Result<Option<(u64, Position)>> {
        let mut inner = lock(&self.inner);
        if inner.closed {
            return Ok(None);
        }
        let key = inner.next;
        inner.next += 1;
        let line = lease_line(key, &record)?;
        self.append(&mut inner, &line)?;
        let size = line.len() as u64;
        inner.live_bytes += size;
        inner.live.insert(key, Live { record, size });
        Ok(Some((key, inner.end)))
    }

    /// Adds the provider's id to a lease.
    pub(crate) fn learn_id(&self, key: u64, id: &str) -> io::Result<()> {
        let mut inner = lock(&self.inner);
        let Some(live) = inner.live.get_mut(&key) else {
            return Ok(());
        };
        live.record.id = Some(id.to_owned());
        let size = lease_line(key, &live.record)?.len() as u64;
        let before = std::mem::replace(&mut live.size, size);
        inner.live_bytes = inner.live_bytes + size - before;
        let event = Event::Id { key, id: id.to_owned() };
        let line = checked_line(&event)?;
        self.append(&mut inner, &line)
    }

    /// Ends a lease: its box is gone. If that cannot be written, the reaper will find the box gone once more.
    pub(crate) fn finish(&self, key: u64) -> io::Result<()> {
        let mut inner = lock(&self.inner);
        let Some(live) = inner.live.remove(&key) else {
            return Ok(());
        };
        inner.live_bytes -= live.size;
        if inner.live.is_empty() && is_unlinked(&inner.file)? {
            // The directory was removed and has nothing to come back for.
            return Ok(());
        }
        let line = checked_line(&Event::Gone { key })?;
        self.append(&mut inner, &line)?;
        self.compact_if_due(&mut inner);
        Ok(())
    }

    /// Moves a lease to a file of its own that nobody locks, so that a reaper may have it while this process lives on.
    /// Returns that file.
    pub(crate) fn leave(&self, key: u64) -> io::Result<Option<PathBuf>> {
        let Some(record) = lock(&self.inner).live.get(&key).map(|live| live.record.clone()) else {
            return Ok(None);
        };
        let path = self.dir.join(format!("left-{}{SUFFIX}", random_hex(24)));
        drop(install(&self.dir, &path, lease_line(0, &record)?.as_bytes())?);
        crash_point!("left");
        self.finish(key)?;
        Ok(Some(path))
    }

    fn append(&self, inner: &mut Inner, line: &str) -> io::Result<()> {
        if is_unlinked(&inner.file)? {
            // Somebody emptied the cache directory: nobody would find what we write.
            self.rewrite(inner)?;
        }
        let torn = if inner.torn { "\n" } else { "" };
        crash_point!("append");
        if let Err(error) = (&*inner.file).write_all(format!("{torn}{line}").as_bytes()) {
            // A full disk takes a part of it.
            inner.torn = inner.file.set_len(inner.end.len).is_err();
            return Err(error);
        }
        crash_point!("appended");
        inner.torn = false;
        inner.end.len += (torn.len() + line.len()) as u64;
        Ok(())
    }

    fn compact_if_due(&self, inner: &mut Inner) {
        if inner.end.len < inner.compact_at || inner.end.len < inner.live_bytes.saturating_mul(COMPACT_FACTOR) {
            return;
        }
        if let Err(error) = self.rewrite(inner) {
            tracing::debug!(%error, path = %self.path.display(), "a journal of leases could not be rewritten yet");
            inner.compact_at = inner.end.len * 2;
        }
    }

    /// Replaces the file by one with the live leases alone.
    fn rewrite(&self, inner: &mut Inner) -> io::Result<()> {
        let mut content = String::new();
        for (key, live) in &inner.live {
            content.push_str(&lease_line(*key, &live.record)?);
        }
        let file = install(&self.dir, &self.path, content.as_bytes())?;
        // The old file's lock goes with it; its name is already the new one's.
        inner.file = Arc::new(file);
        inner.end = Position {
            rewrite: inner.end.rewrite + 1,
            len: content.len() as u64,
        };
        inner.torn = false;
        inner.compact_at = COMPACT_FROM;
        Ok(())
    }

    /// Waits until everything up to `position` is on the disk. Blocks; callers that wait at once share one flush.
    pub(crate) fn flush(&self, position: Position) -> io::Result<()> {
        let mut flushed = lock(&self.flushed);
        if *flushed >= position || flushed.rewrite > position.rewrite {
            return Ok(());
        }
        let (file, end) = {
            let inner = lock(&self.inner);
            (inner.file.clone(), inner.end)
        };
        if end.rewrite == 0 && *flushed == Position::default() {
            sync_dir(&self.dir)?;
        }
        file.sync_data()?;
        *flushed = end;
        Ok(())
    }

    /// Flushes a moment later, unless that is planned already. Needs an executor.
    pub(crate) fn flush_soon(self: &Arc<Self>) {
        /// Lets the next one plan, even when the executor goes away.
        struct Planned(Arc<Journal>);
        impl Drop for Planned {
            fn drop(&mut self) {
                self.0.flush_planned.store(false, Ordering::SeqCst);
            }
        }

        if self.flush_planned.swap(true, Ordering::SeqCst) {
            return;
        }
        let planned = Planned(self.clone());
        tokio::spawn(async move {
            tokio::time::sleep(LAZY_FLUSH).await;
            let journal = planned.0.clone();
            drop(planned);
            let flush = move || {
                let end = lock(&journal.inner).end;
                if let Err(error) = journal.flush(end) {
                    tracing::warn!(%error, path = %journal.path.display(), "leases could not be flushed to the disk");
                }
            };
            let _ = tokio::task::spawn_blocking(flush).await;
        });
    }

    /// Removes the file if no lease is left. Says whether the journal is closed now.
    fn close_if_empty(&self) -> bool {
        // At process exit a thread may have died holding it.
        let Ok(mut inner) = self.inner.try_lock() else {
            return false;
        };
        if !inner.live.is_empty() {
            return false;
        }
        if !inner.closed {
            inner.closed = true;
            let _ = fs::remove_file(&self.path);
        }
        true
    }
}

/// Called by the hook at process exit, after the last teardown: journals with nothing in them go.
pub(crate) fn at_exit() {
    let pid = std::process::id();
    if let Ok(mut open) = OPEN.try_lock() {
        open.retain(|journal| journal.pid != pid || !journal.close_if_empty());
    }
}

fn lease_line(key: u64, record: &Record) -> io::Result<String> {
    checked_line(&Event::Lease {
        key,
        record: Box::new(record.clone()),
    })
}

fn checked_line(event: &Event) -> io::Result<String> {
    let line = event.line()?;
    if line.len() > MAX_LINE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a lease of {} bytes is larger than {MAX_LINE}", line.len()),
        ));
    }
    Ok(line)
}

/// Puts a file with this content at `path` in one step, replacing what is there: nobody ever sees it incomplete or
/// unlocked. Content is flushed before it replaces anything. The lock ends with the file handle.
fn install(dir: &Path, path: &Path, content: &[u8]) -> io::Result<File> {
    create_private_dir(dir)?;
    let mut attempt = 1;
    loop {
        let unborn = dir.join(format!("{UNBORN}{}", random_hex(24)));
        match install_through(&unborn, path, content) {
            Ok(file) => {
                if !content.is_empty() {
                    sync_dir(dir)?;
                }
                return Ok(file);
            }
            // A reaper found it unlocked and removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && attempt < CREATE_ATTEMPTS => attempt += 1,
            Err(error) if is_contended(&error) && attempt < CREATE_ATTEMPTS => attempt += 1,
            Err(error) => {
                let _ = fs::remove_file(&unborn);
                return Err(error);
            }
        }
    }
}

fn install_through(unborn: &Path, path: &Path, content: &[u8]) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    crash_point!("create");
    let mut file = options.open(unborn)?;
    crash_point!("created");
    fs2::FileExt::try_lock_exclusive(&file)?;
    crash_point!("locked");
    if !content.is_empty() {
        file.write_all(content)?;
        crash_point!("written");
        file.sync_data()?;
    }
    crash_point!("rename");
    fs::rename(unborn, path)?;
    crash_point!("renamed");
    Ok(file)
}

/// Whether an attempt to lock failed because somebody else holds the lock.
pub(crate) fn is_contended(error: &io::Error) -> bool {
    error.raw_os_error() == fs2::lock_contended_error().raw_os_error()
}

/// Makes the names in a directory durable.
fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(unix)]
pub(crate) fn is_unlinked(file: &File) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    Ok(file.metadata()?.nlink() == 0)
}

#[cfg(not(unix))]
pub(crate) fn is_unlinked(_: &File) -> io::Result<bool> {
    // An open file cannot be removed there.
    Ok(false)
}

#[cfg(test)]
impl Journal {
    /// Ends the owner's hold as its death would: the file stays, its lock goes.
    pub(crate) fn die(self) -> PathBuf {
        self.path
    }

    pub(crate) fn flushed(&self) -> Position {
        *lock(&self.flushed)
    }

    pub(crate) fn len(&self) -> u64 {
        lock(&self.inner).end.len
    }

    /// As if the process had forked and this were the child.
    pub(crate) fn set_pid(&mut self, pid: u32) {
        self.pid = pid;
    }

    /// From now on writes fail, and so does cutting off what they left.
    pub(crate) fn break_writes(&self) {
        lock(&self.inner).file = Arc::new(File::open(&self.path).unwrap());
    }

    pub(crate) fn mend_writes(&self) {
        let file = OpenOptions::new().append(true).open(&self.path).unwrap();
        lock(&self.inner).file = Arc::new(file);
    }
}

/// As if a fork had brought it here.
#[cfg(test)]
pub(crate) fn adopt(journal: Arc<Journal>) {
    lock(&OPEN).push(journal);
}
