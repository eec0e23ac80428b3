//! SIGINT and SIGTERM: the first asks to tear the sandbox down, the second leaves at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listens for both signals.
pub(super) struct Interrupts {
    int: Signal,
    term: Signal,
}

impl Interrupts {
    /// From here on the first signal is told by [`first`](Self::first), and the next one ends the process from within
    /// its handler, whatever the executor is doing.
    pub(super) fn install() -> io::Result<Self> {
        let seen = Arc::new(AtomicBool::new(false));
        for number in [SIGINT, SIGTERM] {
            // In this order: the signal that sets the flag does not find it set.
            flag::register_conditional_shutdown(number, 128 + number, seen.clone())?;
            flag::register(number, seen.clone())?;
        }
        Ok(Self {
            int: signal(SignalKind::interrupt())?,
            term: signal(SignalKind::terminate())?,
        })
    }

    /// Waits for the first signal; its number.
    pub(super) async fn first(&mut self) -> i32 {
        tokio::select! {
            _ = self.int.recv() => SIGINT,
            _ = self.term.recv() => SIGTERM,
        }
    }
}
