//! What a piece of code logs, for tests.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing::Dispatch;

#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Collects what this thread logs, at every level, until the guard is dropped.
    pub(crate) fn install(&self) -> tracing::subscriber::DefaultGuard {
        // While there is but one subscriber, `tracing` asks the one of the thread that first reaches a call site whether
        // anybody listens there, and remembers the answer. Tests run on many threads: a second subscriber that lives on
        // makes it ask all of them.
        static SECOND: OnceLock<Dispatch> = OnceLock::new();
        SECOND.get_or_init(|| Dispatch::new(tracing_subscriber::registry()));
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || log.clone())
            .finish();
        tracing::subscriber::set_default(subscriber)
    }

    /// What was logged so far.
    pub(crate) fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs `f` and returns what it logged on this thread beside its result.
pub(crate) fn captured<T>(f: impl FnOnce() -> T) -> (T, String) {
    let log = Log::default();
    let guard = log.install();
    let result = f();
    drop(guard);
    (result, log.text())
}
