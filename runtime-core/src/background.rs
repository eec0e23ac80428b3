//! The thread that tears boxes down, whatever happens to the executors of the program.
//!
//! Teardown must outlive its caller: a dropped future, a `Sandbox` dropped outside any executor, a runtime that shuts
//! down, `main` returning. So it runs on one thread of this crate, started at the first teardown, and a hook at process
//! exit waits until that thread has nothing left to do.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::sandbox::Shared;

/// How long the hook at process exit waits for teardowns.
const EXIT_GRACE: Duration = Duration::from_secs(30);

static PENDING: Mutex<usize> = Mutex::new(0);
static IDLE: Condvar = Condvar::new();
static LIVE: Mutex<Option<HashMap<u64, Weak<Shared>>>> = Mutex::new(None);
static NEXT_ID: AtomicU64 = AtomicU64::new(0);
static SKIP_EXIT_WAIT: AtomicBool = AtomicBool::new(false);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The handle of the background executor, or `None` if its thread cannot be started.
fn executor() -> Option<&'static Handle> {
    static EXECUTOR: OnceLock<Option<Handle>> = OnceLock::new();
    EXECUTOR
        .get_or_init(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .max_blocking_threads(16)
                .thread_name("sandbox-teardown-io")
                .build()
                .map_err(|error| tracing::error!(%error, "the teardown executor cannot be built"))
                .ok()?;
            let handle = runtime.handle().clone();
            std::thread::Builder::new()
                .name("sandbox-teardown".to_owned())
                .spawn(move || runtime.block_on(std::future::pending::<()>()))
                .map_err(|error| tracing::error!(%error, "the teardown thread cannot be started"))
                .ok()?;
            Some(handle)
        })
        .as_ref()
}

/// Counts one teardown, until dropped: the hook at process exit waits for it. To be had before anybody can see that the
/// teardown has begun, or the hook would find it begun and nothing to wait for.
pub(crate) struct Pending;

impl Pending {
    pub(crate) fn new() -> Self {
        crate::exit::arm();
        *lock(&PENDING) += 1;
        Self
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut pending = lock(&PENDING);
        *pending -= 1;
        if *pending == 0 {
            IDLE.notify_all();
        }
    }
}

/// Runs `task` to its end on a thread of this crate, whatever happens to the executors of the program. The process does
/// not end before it has (for up to 30 s).
///
/// For what must happen after its caller went away: a kill from `Drop`, the clean-up behind a cancelled request. The
/// task runs on an executor of its own, so what it awaits must not depend on another: a pooled connection does.
pub fn detach(task: impl Future<Output = ()> + Send + 'static) {
    submit(Pending::new(), task);
}

/// Runs `task` to its end on the background thread, or on the current executor if that thread cannot be had.
pub(crate) fn submit(pending: Pending, task: impl Future<Output = ()> + Send + 'static) {
    crate::exit::arm();
    let task = async move {
        let _pending = pending;
        task.await;
    };
    match executor() {
        Some(executor) => drop(executor.spawn(task)),
        None => match Handle::try_current() {
            Ok(current) => drop(current.spawn(task)),
            Err(_) => tracing::error!("a box is left to its lease: there is no executor to tear it down on"),
        },
    }
}

/// Waits, without an executor, until no teardown is pending. Returns how many still are when `limit` has passed.
pub(crate) fn wait_idle(limit: Duration) -> usize {
    let deadline = Instant::now() + limit;
    let mut pending = lock(&PENDING);
    while *pending > 0 && !SKIP_EXIT_WAIT.load(Ordering::SeqCst) {
        let Some(left) = deadline.checked_duration_since(Instant::now()) else {
            break;
        };
        pending = IDLE
            .wait_timeout(pending, left)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
    }
    *pending
}

/// Adds a box to those that are stopped when the process ends.
pub(crate) fn register(shared: Weak<Shared>) -> u64 {
    crate::exit::arm();
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    lock(&LIVE).get_or_insert_default().insert(id, shared);
    id
}

/// Removes a box again.
pub(crate) fn unregister(id: u64) {
    if let Some(live) = lock(&LIVE).as_mut() {
        live.remove(&id);
    }
}

/// Every box that is not torn down yet.
pub(crate) fn live() -> Vec<std::sync::Arc<Shared>> {
    let weak: Vec<_> = lock(&LIVE).iter().flat_map(|live| live.values().cloned()).collect();
    weak.iter().filter_map(Weak::upgrade).collect()
}

/// The process is to end at once: the hook at exit does not wait, nor go on waiting.
pub(crate) fn skip_exit_wait() {
    SKIP_EXIT_WAIT.store(true, Ordering::SeqCst);
    let _pending = lock(&PENDING);
    IDLE.notify_all();
}

/// Called by the hook at process exit: stops what still lives and waits for it.
pub(crate) fn at_exit() {
    if SKIP_EXIT_WAIT.load(Ordering::SeqCst) {
        return;
    }
    for shared in live() {
        shared.begin_stop();
    }
    let left = wait_idle(EXIT_GRACE);
    if left > 0 && !SKIP_EXIT_WAIT.load(Ordering::SeqCst) {
        eprintln!("{left} sandboxes could not be torn down within {EXIT_GRACE:?}; `reap` deletes them by their leases");
    }
}
