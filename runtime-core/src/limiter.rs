//! A leaky bucket that every process of a run shares: it paces calls that create things at a provider.
//!
//! A caller reserves the next free slot in a file under an exclusive lock, then waits for that slot without the lock. A
//! slot that was reserved is never given back: time alone shortens the queue. It is a pacer, not a limit on how much
//! runs at once.
//!
//! ```
//! use runtime_core::limiter::Limiter;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> runtime_core::Result<()> {
//! # let dir = std::env::temp_dir().join(runtime_core::names::random_id());
//! let limiter = Limiter::builder("e2b-sandbox").per_second(50.0).dir(&dir).build()?;
//! let first = limiter.acquire().await?;
//! let second = limiter.acquire().await?;
//! assert!(second.at() > first.at());
//! # std::fs::remove_dir_all(dir).expect("the bucket is there");
//! # Ok(())
//! # }
//! ```

mod bucket;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::Mutex as AsyncMutex;
use tokio::time::Instant;

use self::bucket::{Reading, Rules};
use crate::cache::{CacheDir, create_private_dir};
use crate::error::{Error, ErrorKind, Result};
use crate::scope::RunScope;

/// The longest queue that a bucket file is believed to have, unless told otherwise.
pub const DEFAULT_MAX_BACKLOG: Duration = Duration::from_secs(6 * 3600);
/// How long to wait for other processes to let go of a bucket file, unless told otherwise.
pub const DEFAULT_LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Slots closer together than this are not told apart by seconds since the epoch in a 64 bit float.
const MIN_INTERVAL: f64 = 1e-5;

/// Where a limiter gets its time from.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The wall clock, which processes share and which may jump.
    fn now(&self) -> SystemTime;

    /// The clock that never jumps. Slots are waited for by this one.
    fn monotonic(&self) -> Instant {
        Instant::now()
    }
}

/// The clocks of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// A reserved moment.
#[derive(Debug, Clone, Copy)]
pub struct Slot {
    at: f64,
    due: Instant,
    shared: bool,
}

impl Slot {
    /// The moment on the wall clock.
    pub fn at(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs_f64(self.at)
    }

    /// The moment in seconds since the epoch, as exactly as the bucket file has it.
    pub fn unix_seconds(&self) -> f64 {
        self.at
    }

    /// The moment on the monotonic clock, which is the one to wait for.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Whether other processes know of this reservation. False for a limiter without a rate, and where the bucket file
    /// could not be used.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Waits until the moment has come. Dropping the future wastes the slot and nothing else.
    pub async fn wait(self) {
        tokio::time::sleep_until(self.due).await;
    }
}

/// The creation limiter. Clones share everything; so do limiters of this process with the same bucket file.
#[derive(Clone)]
pub struct Limiter(Option<Arc<Paced>>);

struct Paced {
    name: String,
    path: PathBuf,
    rules: Rules,
    strict: bool,
    clock: Arc<dyn Clock>,
    own: Arc<AsyncMutex<Own>>,
}

/// What this process knows about a bucket on its own. Its lock also queues the callers of this process in their order, so
/// that at most one thread waits for the file.
#[derive(Debug, Default)]
struct Own {
    next: Option<Instant>,
    warned: bool,
    swept: bool,
}

/// One entry per bucket file in use by this process, so that a limiter per sandbox still is one queue where the file
/// cannot be used, and says so once.
static OWN: Mutex<BTreeMap<PathBuf, Weak<AsyncMutex<Own>>>> = Mutex::new(BTreeMap::new());

fn own_bucket(path: &Path) -> Arc<AsyncMutex<Own>> {
    let mut buckets = OWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(own) = buckets.get(path).and_then(Weak::upgrade) {
        return own;
    }
    buckets.retain(|_, own| own.strong_count() > 0);
    let own = Arc::default();
    buckets.insert(path.to_path_buf(), Arc::downgrade(&own));
    own
}

impl Limiter {
    /// A limiter called `name`, such as `modal-sandbox`. It paces once it is given a rate.
    pub fn builder(name: impl Into<String>) -> LimiterBuilder {
        LimiterBuilder {
            name: name.into(),
            rate: None,
            dir: None,
            scope: None,
            max_backlog: DEFAULT_MAX_BACKLOG,
            lock_timeout: DEFAULT_LOCK_TIMEOUT,
            strict: false,
            clock: Arc::new(SystemClock),
        }
    }

    /// A limiter that never waits.
    pub fn unlimited() -> Self {
        Self(None)
    }

    /// Whether there is a rate.
    pub fn is_enabled(&self) -> bool {
        self.0.is_some()
    }

    /// The bucket file, if there is a rate. It comes into being with the first reservation.
    pub fn path(&self) -> Option<&Path> {
        self.0.as_ref().map(|paced| paced.path.as_path())
    }

    /// Reserves the next slot and returns without waiting for it. Needs a Tokio runtime, as the disk is used on its
    /// blocking threads.
    ///
    /// Where the bucket file cannot be used (its directory is read-only, another process holds its lock and hangs), the
    /// slot is this process's alone, and a warning says so once; a [strict](LimiterBuilder::strict) limiter fails.
    ///
    /// # Cancellation
    /// A future that is dropped while it queues behind others of this process has reserved nothing. Later it may have
    /// reserved a slot, which is wasted.
    ///
    /// # Errors
    /// Of a strict limiter: [`Timeout`](ErrorKind::Timeout) for a lock that is not let go of, and errors of the disk
    /// such as [`PermissionDenied`](ErrorKind::PermissionDenied). [`Cancelled`](ErrorKind::Cancelled) while the runtime
    /// shuts down.
    pub async fn reserve(&self) -> Result<Slot> {
        let Some(paced) = &self.0 else {
            let now = Reading::of(&SystemClock);
            return Ok(Slot {
                at: now.wall,
                due: now.monotonic,
                shared: false,
            });
        };
        // Moved into the blocking task: a reservation in flight keeps the queue closed even if its caller goes away.
        let own = Arc::clone(&paced.own).lock_owned().await;
        let paced = Arc::clone(paced);
        let span = tracing::Span::current();
        let dispatch = tracing::dispatcher::get_default(Clone::clone);
        let reservation = tokio::task::spawn_blocking(move || {
            let mut own = own;
            tracing::dispatcher::with_default(&dispatch, || span.in_scope(|| paced.reserve(&mut own)))
        });
        match reservation.await {
            Ok(slot) => slot,
            Err(error) => {
                let kind = if error.is_cancelled() {
                    ErrorKind::Cancelled
                } else {
                    ErrorKind::Other
                };
                Err(Error::new(kind, "the reservation of a slot did not finish").with_source(error))
            }
        }
    }

    /// Reserves the next slot and waits for it.
    ///
    /// # Cancellation
    /// Dropping the future wastes the slot that it had reserved, if any, and leaves nothing else behind.
    ///
    /// # Errors
    /// Those of [`reserve`](Self::reserve).
    pub async fn acquire(&self) -> Result<Slot> {
        let slot = self.reserve().await?;
        if self.is_enabled() {
            slot.wait().await;
        }
        Ok(slot)
    }
}

impl Paced {
    fn reserve(&self, own: &mut Own) -> Result<Slot> {
        let (at, now, shared) = match self.reserve_shared(own) {
            Ok((at, now)) => (at, now, true),
            Err(error) if self.strict => {
                return Err(Error::io(
                    format_args!("reserve a slot in {}", self.path.display()),
                    error,
                ));
            }
            Err(error) => {
                if !own.warned {
                    own.warned = true;
                    tracing::warn!(
                        limiter = %self.name,
                        file = %self.path.display(),
                        %error,
                        "limiter: the bucket file cannot be used; the rate now holds for this process alone, and all \
                         processes together may exceed it"
                    );
                }
                let now = Reading::of(&*self.clock);
                (now.next_slot(None, own.next), now, false)
            }
        };
        let wait = Duration::from_secs_f64((at - now.wall).max(0.0));
        let due = now.monotonic + wait;
        own.next = Some(due + Duration::from_secs_f64(self.rules.interval));
        tracing::debug!(limiter = %self.name, wait_ms = wait.as_millis(), shared, "limiter: reserved a slot");
        Ok(Slot { at, due, shared })
    }

    fn reserve_shared(&self, own: &mut Own) -> std::io::Result<(f64, Reading)> {
        if let Some(dir) = self.path.parent() {
            create_private_dir(dir)?;
        }
        let reserved = bucket::reserve(&self.path, &*self.clock, own.next, &self.rules)?;
        if !own.swept {
            own.swept = true;
            let removed = bucket::sweep(&self.path, &*self.clock);
            tracing::debug!(limiter = %self.name, removed, "limiter: swept old bucket files");
        }
        Ok(reserved)
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Limiter");
        if let Some(paced) = &self.0 {
            debug.field("path", &paced.path).field("rules", &paced.rules);
        }
        debug.finish_non_exhaustive()
    }
}

/// Settings of a [`Limiter`].
#[derive(Debug, Clone)]
pub struct LimiterBuilder {
    name: String,
    rate: Option<f64>,
    dir: Option<PathBuf>,
    scope: Option<RunScope>,
    max_backlog: Duration,
    lock_timeout: Duration,
    strict: bool,
    clock: Arc<dyn Clock>,
}

impl LimiterBuilder {
    /// At most this many slots a second; 0 is no limit.
    #[must_use]
    pub fn per_second(mut self, rate: f64) -> Self {
        self.rate = Some(rate);
        self
    }

    /// At most this many slots a minute; 0 is no limit.
    #[must_use]
    pub fn per_minute(self, rate: f64) -> Self {
        self.per_second(rate / 60.0)
    }

    /// The directory of the bucket file (default: `limiter` in the [cache](CacheDir)).
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    /// The run whose processes share the bucket (default: [the current one](RunScope::current)).
    #[must_use]
    pub fn scope(mut self, scope: RunScope) -> Self {
        self.scope = Some(scope);
        self
    }

    /// The longest queue that the file is believed to have; beyond it the file is taken for broken and the queue starts
    /// anew. Default: [`DEFAULT_MAX_BACKLOG`].
    #[must_use]
    pub fn max_backlog(mut self, backlog: Duration) -> Self {
        self.max_backlog = backlog;
        self
    }

    /// How long to wait for the file's lock. Default: [`DEFAULT_LOCK_TIMEOUT`].
    #[must_use]
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.lock_timeout = timeout;
        self
    }

    /// Fail where the bucket file cannot be used, instead of pacing this process alone.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Takes the time from `clock`.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Checks the settings. Touches no disk.
    ///
    /// # Errors
    /// [`InvalidConfig`](ErrorKind::InvalidConfig) naming `name`, `rate` or `max_backlog`: a name that is no file name, a
    /// rate that is negative, not a number, above 100,000 a second or below one slot per longest queue.
    pub fn build(self) -> Result<Limiter> {
        let is_name_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.name.is_empty() || self.name.len() > 64 || !self.name.chars().all(is_name_char) {
            return Err(Error::invalid_config(
                "name",
                format!(
                    "a limiter's name has 1 to 64 letters, digits, '-', '_' and '.', unlike {:?}",
                    self.name
                ),
            ));
        }
        let max_backlog = self.max_backlog.as_secs_f64();
        // A century: what is far beyond any queue and far below what a time can hold.
        if !(max_backlog > 0.0 && max_backlog < 3.2e9) {
            return Err(Error::invalid_config(
                "max_backlog",
                "the longest queue must be positive and shorter than a century",
            ));
        }
        let Some(rate) = self.rate.filter(|rate| *rate != 0.0) else {
            return Ok(Limiter::unlimited());
        };
        let interval = 1.0 / rate;
        if !(MIN_INTERVAL..=max_backlog).contains(&interval) {
            return Err(Error::invalid_config(
                "rate",
                format!(
                    "{rate} slots a second are out of range: 0 for no limit, else {} to {}",
                    1.0 / max_backlog,
                    1.0 / MIN_INTERVAL
                ),
            ));
        }
        let dir = match self.dir {
            Some(dir) => dir,
            None => CacheDir::from_env().join("limiter")?,
        };
        let scope = match &self.scope {
            Some(scope) => scope,
            None => RunScope::current(),
        };
        let path = dir.join(format!("{}-{}.bucket", self.name, scope.path_safe()));
        Ok(Limiter(Some(Arc::new(Paced {
            own: own_bucket(&path),
            name: self.name,
            path,
            rules: Rules {
                interval,
                max_backlog,
                lock_timeout: self.lock_timeout,
            },
            strict: self.strict,
            clock: self.clock,
        }))))
    }
}

#[cfg(test)]
mod tests;
