//! Deletes the boxes of dead owners.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::cache::CacheDir;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::blocking;
use crate::lease::crash::crash_point;
use crate::lease::journal::{DIRECTORY, SUFFIX, UNBORN, is_contended, is_unlinked};
use crate::lease::record::{Contents, Event, Record, machine, unix_seconds};
use crate::registry::Registry;
use crate::scope::RunScope;

/// How many journals are held at once; each is a descriptor.
const JOURNALS_AT_ONCE: usize = 64;
/// How long to wait for journals that are held although their owner is not seen to run: a child that it had forked holds
/// the lock until it executes. As far as another reaper holds them, it has deleted their boxes when we report.
const HELD_PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait for journals that were free a moment ago: another reaper looks into them, or took them.
const FREE_PATIENCE: Duration = Duration::from_millis(100);
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// What to reap, and how.
#[derive(Debug, Clone)]
pub struct ReapOptions {
    /// The cache directory whose leases are read. Default: [`CacheDir::from_env`].
    pub cache: CacheDir,
    /// Only say what would be deleted. Changes nothing.
    pub dry_run: bool,
    /// Only boxes that were created at least this long ago, by the wall clock. Default: all.
    pub older_than: Option<Duration>,
    /// Only boxes of this run. Default: of all runs.
    pub run_scope: Option<RunScope>,
    /// Boxes of machines that share the cache directory, too, where a box can only be deleted on its machine: that
    /// machine no longer exists, or changed its name. Default: no.
    pub other_machines: bool,
    /// How many boxes are deleted at once, at least 1. Default: 16.
    pub concurrency: usize,
    /// How long one deletion may take. Default: 60 s.
    pub timeout: Duration,
}

impl Default for ReapOptions {
    fn default() -> Self {
        Self {
            cache: CacheDir::from_env(),
            dry_run: false,
            older_than: None,
            run_scope: None,
            other_machines: false,
            concurrency: 16,
            timeout: Duration::from_secs(60),
        }
    }
}

/// What became of an orphan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// It is gone, confirmed by its provider. It may have been gone before.
    Deleted,
    /// As [`Deleted`](Self::Deleted), and past the lifetime that its provider gave it.
    Expired,
    /// A dry run: it would be deleted.
    WouldDelete,
    /// A living owner has a box of the same name, and this lease does not tell the two apart. Its lease stays.
    InUse,
    /// The provider cannot be reached. Its lease stays.
    Unreachable,
    /// Credentials are missing or refused. Its lease stays.
    Unauthorized,
    /// Its provider is not compiled in. Its lease stays.
    UnknownProvider,
    /// It is on another machine that shares this cache directory. Its lease stays.
    OtherMachine,
    /// The deletion failed in another way. Its lease stays.
    Failed,
}

impl Outcome {
    /// Whether the box is gone.
    pub fn is_gone(self) -> bool {
        matches!(self, Self::Deleted | Self::Expired)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deleted => "deleted",
            Self::Expired => "expired, confirmed gone",
            Self::WouldDelete => "would be deleted",
            Self::InUse => "left: a living owner has a box of this name",
            Self::Unreachable => "left: the provider cannot be reached",
            Self::Unauthorized => "left: credentials are missing or refused",
            Self::UnknownProvider => "left: the provider is not compiled in",
            Self::OtherMachine => "left: it is on another machine",
            Self::Failed => "left: the deletion failed",
        })
    }
}

/// One orphan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Reaped {
    /// The provider's tag.
    pub provider: String,
    /// Our name for the box.
    pub name: String,
    /// The provider's id, if the owner lived to learn it.
    pub id: Option<String>,
    /// The run that it belonged to.
    pub run_scope: String,
    /// The process that it belonged to. The id may be somebody else's by now.
    pub owner_pid: u32,
    /// The machine of that process.
    pub owner_machine: String,
    /// When it was created, in seconds since the epoch.
    pub created_at: u64,
    /// When its provider deletes it by itself, in seconds since the epoch.
    pub expires_at: Option<u64>,
    /// What became of it.
    pub outcome: Outcome,
    /// Why it could not be deleted.
    pub error: Option<String>,
}

/// A journal with lines that make no sense. Each may have been the lease of a box: look for boxes by hand, then remove
/// the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// How many of its lines are damaged, or were written by a later version; 0 if it cannot be read at all.
    pub lines: usize,
    /// Why it cannot be read at all.
    pub error: Option<String>,
}

/// What a reap found and did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Nothing was changed.
    pub dry_run: bool,
    /// Every orphan that the filters let through.
    pub boxes: Vec<Reaped>,
    /// Orphans that the filters held back.
    pub filtered: usize,
    /// Processes that live and keep leases, this one included. Another reaper at work counts as one.
    pub living_owners: usize,
    /// Their boxes. None was touched.
    pub living_boxes: usize,
    /// Journals with something unreadable.
    pub damaged: Vec<Damage>,
}

impl Report {
    /// How many orphans are gone.
    pub fn deleted(&self) -> usize {
        self.boxes.iter().filter(|reaped| reaped.outcome.is_gone()).count()
    }

    /// The orphans whose leases stay, for another reap.
    pub fn remaining(&self) -> impl Iterator<Item = &Reaped> {
        self.boxes.iter().filter(|reaped| !reaped.outcome.is_gone())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for reaped in &self.boxes {
            write!(f, "{} {}", reaped.provider, reaped.name)?;
            if let Some(id) = reaped.id.as_ref().filter(|id| **id != reaped.name) {
                write!(f, " ({id})")?;
            }
            write!(f, ": {}", reaped.outcome)?;
            if let Some(error) = &reaped.error {
                write!(f, ": {error}")?;
            }
            writeln!(f)?;
        }
        for damage in &self.damaged {
            let path = damage.path.display();
            match &damage.error {
                Some(error) => writeln!(f, "{path}: cannot be read: {error}")?,
                None => writeln!(
                    f,
                    "{path}: {} damaged lines; each may be a box that nobody finds: look for it, then remove the file",
                    damage.lines
                )?,
            }
        }
        let verb = if self.dry_run { "would be deleted" } else { "deleted" };
        let count = if self.dry_run {
            let would = |reaped: &&Reaped| reaped.outcome == Outcome::WouldDelete;
            self.boxes.iter().filter(would).count()
        } else {
            self.deleted()
        };
        write!(
            f,
            "{count} {verb}, {} left, {} held back by filters; {} boxes of {} living owners untouched",
            self.boxes.len() - count,
            self.filtered,
            self.living_boxes,
            self.living_owners,
        )
    }
}

/// Deletes the boxes whose owners died, each through its provider, and ends their leases. Boxes of living owners are
/// never touched: their journals are locked. Reapers that run at once share the work.
///
/// # Errors
/// Only when the directory of leases cannot be read. What could not be deleted is in the [`Report`], and its lease
/// stays.
///
/// # Cancellation
/// What was deleted is deleted; what a dropped reap was deleting is deleted once more by the next.
pub async fn reap(registry: &Registry, options: ReapOptions) -> Result<Report> {
    let dir = options.cache.path().join(DIRECTORY);
    let dry_run = options.dry_run;
    let scanned = blocking({
        let dir = dir.clone();
        move || scan(&dir, dry_run)
    });
    let scan = scanned
        .await
        .map_err(|error| Error::io(format_args!("reading the leases in {}", dir.display()), error))?;
    let mut report = Report {
        dry_run,
        living_owners: scan.living_owners,
        living_boxes: scan.living.values().map(Vec::len).sum(),
        damaged: scan.damaged,
        ..Report::default()
    };
    let work = Work {
        registry,
        living: scan.living,
        permits: Arc::new(Semaphore::new(options.concurrency.max(1))),
        options,
    };
    for paths in scan.free.chunks(JOURNALS_AT_ONCE) {
        let paths = paths.to_vec();
        let (dead, damaged) = blocking(move || Ok(take(paths, dry_run)))
            .await
            .map_err(|error| Error::io("reading leases", error))?;
        report.damaged.extend(damaged);
        work.delete(&dead, &mut report).await;
    }
    Ok(report)
}

struct Scan {
    /// Journals that nobody holds.
    free: Vec<PathBuf>,
    /// The records of living owners, by name.
    living: HashMap<String, Vec<Record>>,
    living_owners: usize,
    damaged: Vec<Damage>,
}

/// Tells the dead from the living. Blocks.
fn scan(dir: &Path, dry_run: bool) -> io::Result<Scan> {
    let mut scan = Scan {
        free: Vec::new(),
        living: HashMap::new(),
        living_owners: 0,
        damaged: Vec::new(),
    };
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(scan),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry?.path());
    }
    paths.sort();
    let mut unclear = Vec::new();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let unborn = name.starts_with(UNBORN);
        if !unborn && !name.ends_with(SUFFIX) {
            continue;
        }
        match look(&path) {
            Ok(Look::Gone) => {}
            // Its owner died before it wrote a lease, or finds it gone and makes another.
            Ok(Look::Free(_)) if unborn => {
                if !dry_run {
                    let _ = fs::remove_file(&path);
                }
            }
            Ok(Look::Free(_)) => scan.free.push(path),
            Ok(Look::Held(_)) if unborn => {}
            Ok(Look::Held(contents)) => {
                if contents.leases.values().all(|record| record.owner.seems_alive()) {
                    scan.count_living(contents);
                } else {
                    unclear.push((path, contents));
                }
            }
            Err(error) => scan.damaged.push(unreadable(path, &error)),
        }
    }
    retry(&mut unclear, HELD_PATIENCE, |(path, _)| match look(path) {
        Ok(Look::Free(_)) => {
            scan.free.push(path.clone());
            false
        }
        Ok(Look::Gone) => false,
        Ok(Look::Held(_)) | Err(_) => true,
    });
    for (_, contents) in unclear {
        scan.count_living(contents);
    }
    Ok(scan)
}

/// Tries again those that `unsettled` says are, until none is or patience ends. Blocks.
fn retry<T>(items: &mut Vec<T>, patience: Duration, mut unsettled: impl FnMut(&mut T) -> bool) {
    let deadline = Instant::now() + patience;
    while !items.is_empty() && Instant::now() < deadline {
        std::thread::sleep(LOCK_PAUSE);
        items.retain_mut(&mut unsettled);
    }
}

impl Scan {
    fn count_living(&mut self, contents: Contents) {
        self.living_owners += 1;
        for record in contents.leases.into_values() {
            self.living.entry(record.name.clone()).or_default().push(record);
        }
    }
}

fn unreadable(path: PathBuf, error: &io::Error) -> Damage {
    Damage {
        path,
        lines: 0,
        error: Some(error.to_string()),
    }
}

enum Look {
    /// Locked by us, until the file is dropped.
    Free(File),
    /// Locked by its owner or another reaper.
    Held(Contents),
    Gone,
}

fn look(path: &Path) -> io::Result<Look> {
    let mut options = OpenOptions::new();
    options.read(true).append(true);
    #[cfg(unix)]
    {
        // Neither follow a link nor hang on a FIFO that somebody put here.
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags.bits().cast_signed());
    }
    let file = match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Look::Gone),
        file => file?,
    };
    #[cfg(unix)]
    is_own(&file)?;
    match fs2::FileExt::try_lock_exclusive(&file) {
        // Removed by another reaper, or replaced by its owner, since we opened it.
        Ok(()) if is_unlinked(&file)? => Ok(Look::Gone),
        Ok(()) => Ok(Look::Free(file)),
        Err(error) if is_contended(&error) => Ok(Look::Held(read(&file)?)),
        Err(error) => Err(error),
    }
}

/// What a journal says is done: paths are removed, engines are asked. So it must be this user's, wherever it is.
#[cfg(unix)]
fn is_own(file: &File) -> io::Result<()> {
    let owner = std::os::unix::fs::MetadataExt::uid(&file.metadata()?);
    if owner == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let message = format!("it belongs to user {owner}, who alone can reap it");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

fn read(mut file: &File) -> io::Result<Contents> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(Contents::read(&bytes))
}

/// The journal of a dead owner, locked by us.
struct Dead {
    path: PathBuf,
    file: Mutex<File>,
    contents: Contents,
}

/// Locks and reads those that no other reaper takes or took. Blocks.
fn take(mut paths: Vec<PathBuf>, dry_run: bool) -> (Vec<Arc<Dead>>, Vec<Damage>) {
    let (mut dead, mut damaged) = (Vec::new(), Vec::new());
    let mut unsettled = |path: &mut PathBuf| match look(path) {
        Ok(Look::Free(file)) => {
            match Dead::open(path, file, dry_run) {
                Ok(journal) => dead.push(Arc::new(journal)),
                Err(error) => damaged.push(unreadable(path.clone(), &error)),
            }
            false
        }
        Ok(Look::Held(_)) => true,
        Ok(Look::Gone) => false,
        Err(error) => {
            damaged.push(unreadable(path.clone(), &error));
            false
        }
    };
    paths.retain_mut(&mut unsettled);
    retry(&mut paths, FREE_PATIENCE, unsettled);
    (dead, damaged)
}

impl Dead {
    fn open(path: &Path, file: File, dry_run: bool) -> io::Result<Self> {
        let contents = read(&file)?;
        if contents.torn > 0 && !dry_run {
            // What we add must not continue a line that was never finished.
            let len = file.metadata()?.len();
            file.set_len(len.saturating_sub(contents.torn as u64))?;
        }
        Ok(Self {
            path: path.to_owned(),
            file: Mutex::new(file),
            contents,
        })
    }

    /// Ends a lease, so that a reaper that comes after our own death does not repeat it.
    fn finish(&self, key: u64) -> io::Result<()> {
        let line = Event::Gone { key }.line()?;
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let len = file.metadata()?.len();
        crash_point!("reaper append");
        file.write_all(line.as_bytes()).inspect_err(|_| {
            let _ = file.set_len(len);
        })
    }
}

struct Work<'a> {
    registry: &'a Registry,
    options: ReapOptions,
    living: HashMap<String, Vec<Record>>,
    permits: Arc<Semaphore>,
}

impl Work<'_> {
    /// Deletes the boxes of these journals, then the journals that have nothing left in them.
    async fn delete(&self, dead: &[Arc<Dead>], report: &mut Report) {
        let mut tasks = JoinSet::new();
        let mut left = vec![0_usize; dead.len()];
        for (index, journal) in dead.iter().enumerate() {
            if journal.contents.damaged > 0 {
                report.damaged.push(Damage {
                    path: journal.path.clone(),
                    lines: journal.contents.damaged,
                    error: None,
                });
            }
            for (key, record) in &journal.contents.leases {
                left[index] += 1;
                if self.is_filtered(record) {
                    report.filtered += 1;
                    continue;
                }
                if let Some((outcome, error)) = self.decide(record) {
                    report.boxes.push(reaped(record, outcome, error));
                    continue;
                }
                let Ok(provider) = self.registry.provider(&record.provider) else {
                    continue;
                };
                let (journal, record, key) = (journal.clone(), record.clone(), *key);
                let (permits, timeout) = (self.permits.clone(), self.options.timeout);
                tasks.spawn(async move {
                    let _permit = permits.acquire_owned().await;
                    let orphan = record.orphan();
                    // Its own task, so that a panic of one provider is the failure of one box.
                    let mut deletion = JoinSet::new();
                    deletion.spawn(async move { provider.delete_orphan(&orphan).await });
                    let result = match tokio::time::timeout(timeout, deletion.join_next()).await {
                        Ok(Some(Ok(result))) => result,
                        Ok(_) => Err(Error::new(ErrorKind::Other, "the provider panicked")),
                        Err(_) => Err(Error::new(ErrorKind::Timeout, format!("no answer within {timeout:?}"))),
                    };
                    let (outcome, error) = match result {
                        Ok(()) => (gone(&record), None),
                        Err(error) => (classify(&error), Some(error.to_string())),
                    };
                    if outcome.is_gone() {
                        let finished = blocking(move || journal.finish(key)).await;
                        if let Err(error) = finished {
                            tracing::debug!(%error, "the end of an orphan's lease could not be written");
                        }
                    }
                    (index, reaped(&record, outcome, error))
                });
            }
        }
        while let Some(done) = tasks.join_next().await {
            if let Ok((index, reaped)) = done {
                left[index] -= usize::from(reaped.outcome.is_gone());
                report.boxes.push(reaped);
            }
        }
        if self.options.dry_run {
            return;
        }
        let empty = dead.iter().zip(left);
        let empty: Vec<_> = empty
            .filter(|(journal, left)| *left == 0 && journal.contents.damaged == 0)
            .map(|(journal, _)| journal.clone())
            .collect();
        // While they are locked: their names belong to nobody else.
        let _ = blocking(move || {
            for journal in empty {
                crash_point!("reaper remove");
                let _ = fs::remove_file(&journal.path);
            }
            Ok(())
        })
        .await;
    }

    fn is_filtered(&self, record: &Record) -> bool {
        let age = unix_seconds(SystemTime::now()).saturating_sub(record.created_at);
        let young = self.options.older_than.is_some_and(|least| age < least.as_secs());
        let other_run = self
            .options
            .run_scope
            .as_ref()
            .is_some_and(|scope| scope.id() != record.run_scope);
        young || other_run
    }

    /// What is to be said of an orphan without asking its provider; `None` if it is to be deleted.
    fn decide(&self, record: &Record) -> Option<(Outcome, Option<String>)> {
        let provider = match self.registry.provider(&record.provider) {
            Ok(provider) => provider,
            Err(error) => return Some((Outcome::UnknownProvider, Some(error.to_string()))),
        };
        let elsewhere = record.owner.machine != machine();
        if elsewhere && provider.capabilities().local && !self.options.other_machines {
            let reason = format!("its machine is {}", record.owner.machine);
            return Some((Outcome::OtherMachine, Some(reason)));
        }
        let namesakes = self.living.get(&record.name).into_iter().flatten();
        let mut twins = namesakes.filter(|living| {
            // Where the ids differ they tell the two apart, and so does what a deletion goes by.
            let same_id = record.id.is_none() || living.id.is_none() || record.id == living.id;
            let same_target = living.provider == record.provider && living.context == record.context;
            same_target && living.run_scope == record.run_scope && same_id
        });
        if twins.next().is_some() {
            return Some((Outcome::InUse, None));
        }
        self.options.dry_run.then_some((Outcome::WouldDelete, None))
    }
}

fn gone(record: &Record) -> Outcome {
    let now = unix_seconds(SystemTime::now());
    if record.expires_at.is_some_and(|expires| expires <= now) {
        Outcome::Expired
    } else {
        Outcome::Deleted
    }
}

fn classify(error: &Error) -> Outcome {
    match error.kind() {
        ErrorKind::Unavailable
        | ErrorKind::Timeout
        | ErrorKind::ConnectionLost
        | ErrorKind::RateLimited
        | ErrorKind::Protocol => Outcome::Unreachable,
        ErrorKind::Unauthorized => Outcome::Unauthorized,
        _ => Outcome::Failed,
    }
}

fn reaped(record: &Record, outcome: Outcome, error: Option<String>) -> Reaped {
    Reaped {
        provider: record.provider.clone(),
        name: record.name.clone(),
        id: record.id.clone(),
        run_scope: record.run_scope.clone(),
        owner_pid: record.owner.pid,
        owner_machine: record.owner.machine.clone(),
        created_at: record.created_at,
        expires_at: record.expires_at,
        outcome,
        error,
    }
}
