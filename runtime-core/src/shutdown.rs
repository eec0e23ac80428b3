//! The orderly end of a process: on SIGINT, SIGTERM and SIGHUP every live sandbox is stopped before the process exits.
//!
//! Opt in with [`install`]. A program that handles signals itself calls [`stop_all`] instead, or installs this too:
//! handlers made with `tokio::signal` all see each signal.
//!
//! ```no_run
//! # fn main() -> runtime_core::Result<()> {
//! runtime_core::shutdown::install()?;
//! // Ctrl-C now stops every sandbox and exits with 130; a second Ctrl-C leaves them to their leases.
//! # Ok(()) }
//! ```
//!
//! A program that has something to say at its end installs it with [`Options::exit`] off, and waits for [`requested`].

use std::cell::Cell;
use std::io::Write as _;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::background;
use crate::error::{Error, ErrorKind, Result};
use crate::sandbox::Shared;

/// The code to exit with once a signal has begun the shutdown; 0 before.
static EXIT_CODE: LazyLock<watch::Sender<i32>> = LazyLock::new(|| watch::Sender::new(0));

thread_local! {
    /// This is the thread on which we call `exit` ourselves, with that code.
    static EXITS_FOR_US: Cell<bool> = const { Cell::new(false) };
}

/// How [`install_with`] ends a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How long the sandboxes may take to stop. What is not stopped by then is left to its lease. Default: 30 s.
    pub deadline: Duration,
    /// Nothing is printed on stderr. Default: progress is.
    pub quiet: bool,
    /// The process is ended when the sandboxes are gone. Default: true. Otherwise the program ends itself when it likes,
    /// with whatever code: the one of the signal takes its place.
    pub exit: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(30),
            quiet: false,
            exit: true,
        }
    }
}

/// What became of the live sandboxes.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Stopped {
    /// How many are gone.
    pub stopped: usize,
    /// Why others may still exist. Their leases stay.
    pub failed: Vec<Error>,
    /// Names of those that were not done when the deadline passed. They go on; their leases stay until they are done.
    pub unfinished: Vec<String>,
}

impl Stopped {
    /// Whether every sandbox is gone.
    pub fn is_complete(&self) -> bool {
        self.failed.is_empty() && self.unfinished.is_empty()
    }
}

/// Stops every live sandbox of this process, all at once, and waits for at most `deadline`. Those that come to be in
/// the meantime are stopped, too. Works on any executor.
///
/// # Cancellation
/// The deletions that were begun go on.
pub async fn stop_all(deadline: Duration) -> Stopped {
    stop_live(deadline, |_| {}).await
}

/// What [`stop_live`] has to tell.
enum Progress<'a> {
    Stopping(usize),
    Stopped(&'a str),
    Failed(&'a Error),
}

async fn stop_live(deadline: Duration, mut tell: impl FnMut(Progress<'_>)) -> Stopped {
    let deadline = Instant::now() + deadline;
    let mut report = Stopped::default();
    let mut seen: Vec<Arc<Shared>> = Vec::new();
    let mut waiting = JoinSet::new();
    let mut unfinished: Vec<String> = Vec::new();
    loop {
        let before = seen.len();
        for shared in background::live() {
            if seen.iter().any(|known| Arc::ptr_eq(known, &shared)) {
                continue;
            }
            shared.begin_stop();
            unfinished.push(shared.name.clone());
            seen.push(shared.clone());
            waiting.spawn(async move {
                let result = shared.stopped().await;
                (shared.name.clone(), shared.runtime.provider(), result)
            });
        }
        if seen.len() > before {
            tell(Progress::Stopping(seen.len() - before));
        }
        let Ok(Some(joined)) = timeout_at(deadline, waiting.join_next()).await else {
            break;
        };
        let Ok((name, provider, result)) = joined else {
            continue;
        };
        if let Some(at) = unfinished.iter().position(|other| *other == name) {
            unfinished.swap_remove(at);
        }
        match result {
            Ok(()) => {
                report.stopped += 1;
                tell(Progress::Stopped(&name));
            }
            Err(error) => {
                let error = error.with_provider(provider).with_sandbox(name, None);
                tell(Progress::Failed(&error));
                report.failed.push(error);
            }
        }
    }
    report.unfinished = unfinished;
    report
}

/// [`install_with`] the defaults.
///
/// # Errors
/// As [`install_with`].
pub fn install() -> Result<()> {
    install_with(Options::default())
}

/// From now on the first SIGINT, SIGTERM or SIGHUP stops every live sandbox, lets no new one be created, and ends the
/// process with exit code 130, 143 or 129, whatever the rest of the program returns meanwhile. A second one ends it at
/// once. The leases of what was not confirmed gone stay for the reaper. Only the first call counts.
///
/// A process that was started with SIGHUP ignored, as by `nohup`, goes on ignoring it where `/proc` tells of that.
///
/// The handler runs on a thread of its own and needs no executor.
///
/// # Errors
/// [`ResourceExhausted`](ErrorKind::ResourceExhausted) and [`Io`](ErrorKind::Io) when the thread or the handler cannot
/// be had.
pub fn install_with(options: Options) -> Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    let failed = |error| Error::io("installing the signal handler", error);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed)?;
    let signals = {
        let _context = runtime.enter();
        Signals {
            interrupt: signal(SignalKind::interrupt()).map_err(failed)?,
            terminate: signal(SignalKind::terminate()).map_err(failed)?,
            hangup: match is_ignored(SignalKind::hangup()) {
                true => None,
                false => Some(signal(SignalKind::hangup()).map_err(failed)?),
            },
        }
    };
    std::thread::Builder::new()
        .name("sandbox-signals".to_owned())
        .spawn(move || runtime.block_on(serve(signals, options)))
        .map_err(|error| Error::new(ErrorKind::ResourceExhausted, format!("no thread for signals: {error}")))?;
    // Also for a process that has no sandbox yet.
    crate::exit::arm();
    *installed = true;
    Ok(())
}

/// Waits for the signal that begins the shutdown; returns the code that the process ends with: 130, 143 or 129. For ever
/// where no signal comes or nothing is [installed](install).
///
/// # Cancellation
/// Leaves nothing behind; later calls return the same.
pub async fn requested() -> i32 {
    let mut code = EXIT_CODE.subscribe();
    match code.wait_for(|code| *code != 0).await {
        Ok(code) => *code,
        Err(_) => std::future::pending().await,
    }
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// `None` if the process is to outlive its terminal.
    hangup: Option<Signal>,
}

impl Signals {
    /// Waits for one; returns the code that a shell would report for it.
    async fn next(&mut self) -> i32 {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => 130,
            _ = self.terminate.recv() => 143,
            _ = hangup => 129,
        }
    }
}

/// Whether this process ignores a signal. Not known, and so not the case, where there is no `/proc`.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (kind.as_raw_value() - 1)) != 0)
}

async fn serve(mut signals: Signals, options: Options) {
    let say = |line: std::fmt::Arguments<'_>| {
        if !options.quiet {
            // A closed stderr is no reason to panic.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    };
    let code = signals.next().await;
    EXIT_CODE.send_replace(code);
    let mut done = 0;
    let mut total = 0;
    let stopping = stop_live(options.deadline, |progress| match progress {
        Progress::Stopping(count) => {
            total += count;
            say(format_args!(
                "stopping {count} sandbox{}; a second signal leaves {} to the reaper",
                if count == 1 { "" } else { "es" },
                if count == 1 { "it" } else { "them" }
            ));
        }
        Progress::Stopped(name) => {
            done += 1;
            say(format_args!("stopped {name} ({done} of {total})"));
        }
        Progress::Failed(error) => {
            done += 1;
            say(format_args!("left to its lease: {error}"));
        }
    });
    let report = tokio::select! {
        report = stopping => report,
        _ = signals.next() => {
            say(format_args!("not waiting any longer: `reap` deletes what is left"));
            crate::exit::now(code)
        }
    };
    for name in &report.unfinished {
        say(format_args!(
            "not stopped within {:?}, left to its lease: {name}",
            options.deadline
        ));
    }
    if !options.exit {
        signals.next().await;
        crate::exit::now(code)
    }
    background::skip_exit_wait();
    let exit = move || {
        EXITS_FOR_US.set(true);
        std::process::exit(code)
    };
    // On another thread: should one of the program's own hooks hang, a second signal still ends it.
    match std::thread::Builder::new().spawn(exit) {
        Ok(_) => {
            signals.next().await;
            crate::exit::now(code)
        }
        Err(_) => exit(),
    }
}

/// Refuses what would begin a new sandbox once a signal has begun the shutdown.
pub(crate) fn refuse_new() -> Result<()> {
    if *EXIT_CODE.borrow() == 0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Cancelled,
        "the process was told to end: no sandbox is created any more",
    ))
}

/// The end of the hook at process exit. A program whose `main` returned because its sandboxes were stopped under it ends
/// with the signal's code all the same.
pub(crate) fn at_exit() {
    let code = *EXIT_CODE.borrow();
    if code != 0 && !EXITS_FOR_US.get() {
        crate::exit::now(code);
    }
}
