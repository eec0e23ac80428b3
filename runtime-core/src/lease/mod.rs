//! Leases: what is on the disk of every box that may exist, so that the box is found and deleted after any death of its
//! owner.
//!
//! A lease is written before the create call leaves, learns the provider's id the moment that we do, and ends when the
//! deletion is confirmed. The owner holds an OS lock as long as it lives; [`reap`] deletes the boxes whose owner's lock
//! is free. Nothing is decided by process ids or clocks: ids are reused and clocks jump.
//!
//! # What survives what
//! A lease is with the kernel before the box is created, which any death of the process survives: SIGKILL, a crash, the
//! OOM killer. That the machine itself dies (power, kernel) it survives once it is flushed; [`Durability`] says when
//! that is waited for.

pub(crate) mod crash;
mod journal;
mod reaper;
mod record;
#[cfg(test)]
mod tests;

use std::future::{Future, poll_fn};
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};

use crate::cache::CacheDir;
use crate::config::RuntimeConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::journal::{Journal, Position};
use crate::lease::record::Record;
use crate::registry::Registry;
use crate::runtime::{BoxSpec, Runtime};

#[cfg(all(feature = "conformance", target_os = "linux"))]
pub(crate) use crate::lease::journal::DIRECTORY;
pub(crate) use crate::lease::journal::at_exit;
pub use crate::lease::reaper::{Damage, Outcome, ReapOptions, Reaped, Report, reap};

/// How long a provision waits for the orphans of others.
const REAP_BEFORE_PROVISION: Duration = Duration::from_secs(30);

/// What to do about a box for which no lease can be written: a full disk, a read-only cache directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LeasePolicy {
    /// It is not created: [`ErrorKind::Lease`].
    #[default]
    Required,
    /// It is created all the same. The first time in a process that is said loudly: a box without a lease outlives the
    /// death of its owner, and costs.
    BestEffort,
    /// No leases are written.
    Off,
}

/// Which death a lease is to survive before the box is created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Durability {
    /// [`Machine`](Self::Machine) for boxes that outlive this machine, [`Process`](Self::Process) for those that are on
    /// it and so die with it.
    #[default]
    Auto,
    /// That of the process. The lease is flushed to the disk about a second later, together with its neighbours.
    Process,
    /// That of the machine too. The creation waits for the disk: some milliseconds, shared by all that wait at once.
    Machine,
}

/// How leases are to be kept.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Leasing {
    pub(crate) policy: LeasePolicy,
    pub(crate) durability: Durability,
}

/// The lease of one box.
#[derive(Debug)]
pub(crate) struct Lease {
    journal: Arc<Journal>,
    key: u64,
    position: Position,
    policy: LeasePolicy,
    /// The creation waits for the disk.
    machine: bool,
    /// The provider's id was part of the lease from the start.
    id_foreseen: bool,
    id_learned: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// No box was asked for yet.
    Unused,
    Active,
    /// In a file of its own, for any reaper to take.
    Left(PathBuf),
    Ended,
}

impl Lease {
    /// Writes the lease of a box that is about to be created; `None` if there is to be none.
    ///
    /// # Cancellation
    /// A lease that nobody waits for any more is ended again.
    pub(crate) async fn begin(leasing: Leasing, spec: &BoxSpec, runtime: &dyn Runtime) -> Result<Option<Self>> {
        let policy = leasing.policy;
        if policy == LeasePolicy::Off {
            return Ok(None);
        }
        let machine = match leasing.durability {
            Durability::Auto => !runtime.capabilities().local,
            Durability::Process => false,
            Durability::Machine => true,
        };
        let record = Record::new(spec, runtime);
        let cache = spec.cache.clone();
        let write = move || {
            let id_foreseen = record.id.is_some();
            loop {
                let journal = Journal::of(&cache)?;
                if let Some((key, position)) = journal.begin(record.clone())? {
                    return Ok(Self {
                        journal,
                        key,
                        position,
                        policy,
                        machine,
                        id_foreseen,
                        id_learned: AtomicBool::new(false),
                        state: Mutex::new(State::Unused),
                    });
                }
            }
        };
        match blocking(write).await {
            Ok(lease) => {
                lease.journal.flush_soon();
                Ok(Some(lease))
            }
            Err(error) => without_lease(policy, &spec.cache, error).map(|()| None),
        }
    }

    /// The creation is about to be asked for: waits for the disk if it should.
    pub(crate) async fn activate(&self) -> Result<()> {
        self.set_state(State::Active);
        if !self.machine {
            return Ok(());
        }
        let (journal, position) = (self.journal.clone(), self.position);
        match blocking(move || journal.flush(position)).await {
            Ok(()) => Ok(()),
            Err(error) => Err(unwritten(&self.journal.path().to_string_lossy(), error)).or_else(|error| {
                if self.policy == LeasePolicy::Required {
                    Err(error)
                } else {
                    warn_once(&error)
                }
            }),
        }
    }

    /// Drives a creation to its end and adds the provider's id to the lease the moment that the runtime knows it.
    pub(crate) async fn record_id<T>(&self, runtime: &dyn Runtime, create: impl Future<Output = T>) -> T {
        let mut create = pin!(create);
        let mut write = None;
        let result = poll_fn(|context| {
            let polled = create.as_mut().poll(context);
            if !self.id_foreseen && write.is_none() {
                write = runtime.id().map(|id| self.learn_id(id));
            }
            polled
        })
        .await;
        if let Some(write) = write {
            let _ = write.await;
        }
        result
    }

    fn learn_id(&self, id: String) -> JoinHandle<()> {
        self.id_learned.store(true, Ordering::SeqCst);
        let (journal, key) = (self.journal.clone(), self.key);
        spawn_blocking(move || {
            if let Err(error) = journal.learn_id(key, &id) {
                tracing::warn!(%error, id, "the lease lacks the provider's id; a reaper goes by the name");
            }
        })
    }

    /// Whether a deletion that found nothing proves that there is nothing: the provider has told us of the box.
    pub(crate) fn id_learned(&self) -> bool {
        self.id_learned.load(Ordering::SeqCst)
    }

    /// The box is gone.
    pub(crate) async fn finish(self: &Arc<Self>) {
        let lease = self.clone();
        if let Err(error) = blocking(move || lease.end()).await {
            tracing::debug!(%error, "the end of a lease could not be written; a reaper will find the box gone");
        }
    }

    /// The box may exist and we are done with it: from now on a reaper may have it, although this process lives.
    pub(crate) async fn leave(self: &Arc<Self>) {
        let lease = self.clone();
        let leave = move || {
            let mut state = lease.state.lock().unwrap_or_else(PoisonError::into_inner);
            if matches!(*state, State::Active)
                && let Some(path) = lease.journal.leave(lease.key)?
            {
                *state = State::Left(path);
            }
            Ok(())
        };
        if let Err(error) = blocking(leave).await {
            tracing::debug!(%error, "a reaper can have the box only after the end of this process");
        }
    }

    fn end(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, State::Ended) {
            State::Unused | State::Active => self.journal.finish(self.key),
            State::Left(path) => match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            },
            State::Ended => Ok(()),
        }
    }

    fn set_state(&self, new: State) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = new;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Whatever else happened to the box is on the disk.
        if matches!(self.state.get_mut(), Ok(State::Unused)) {
            let _ = self.end();
        }
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(io::Error::other(error)))
}

fn without_lease(policy: LeasePolicy, cache: &CacheDir, error: io::Error) -> Result<()> {
    let dir = cache.path().join(journal::DIRECTORY);
    let error = unwritten(&dir.to_string_lossy(), error);
    if policy == LeasePolicy::Required {
        return Err(error);
    }
    warn_once(&error)
}

fn unwritten(place: &str, source: io::Error) -> Error {
    Error::new(
        ErrorKind::Lease,
        format!(
            "no lease could be written to {place}: {source}. Without one the box would outlive a crash of this process. \
             Make room there, choose another cache directory ({}), or ask for leases at best effort",
            crate::cache::CACHE_DIR_VAR
        ),
    )
    .with_source(source)
}

/// Says once in a process that boxes are created without leases, on stderr if nobody listens to the log.
fn warn_once(error: &Error) -> Result<()> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::SeqCst) {
        const MESSAGE: &str = "LEASES ARE OFF: sandboxes of this process are not found again if it is killed";
        if tracing::enabled!(tracing::Level::ERROR) {
            tracing::error!(%error, "{MESSAGE}");
        } else {
            eprintln!("{MESSAGE}: {error}");
        }
    }
    Ok(())
}

/// Reaps before the first provision of this process under a cache directory. What cannot be reaped is logged.
pub(crate) async fn reap_once(config: &dyn RuntimeConfig, cache: &CacheDir) {
    static DONE: Mutex<Vec<CacheDir>> = Mutex::new(Vec::new());
    {
        let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
        if done.contains(cache) {
            return;
        }
        done.push(cache.clone());
    }
    let mut registry = Registry::with_builtin();
    if let Some(provider) = config.provider() {
        registry.register(provider);
    }
    let options = ReapOptions {
        cache: cache.clone(),
        ..ReapOptions::default()
    };
    match tokio::time::timeout(REAP_BEFORE_PROVISION, reap(&registry, options)).await {
        Ok(Ok(report)) => {
            for reaped in &report.boxes {
                tracing::info!(provider = reaped.provider, name = reaped.name, outcome = %reaped.outcome, "orphan");
            }
            for damage in &report.damaged {
                tracing::warn!(path = %damage.path.display(), "a damaged journal of leases: boxes may be lost");
            }
        }
        Ok(Err(error)) => tracing::warn!(%error, "orphans could not be reaped"),
        Err(_) => tracing::warn!("reaping took longer than {REAP_BEFORE_PROVISION:?}; it is left to another time"),
    }
}
