//! Changes to files that go on in their thread although whoever asked for them went away.
//!
//! A thread cannot be cancelled. Whoever drops the future of a change and then makes another must not find that the
//! first one, still on its way, has the last word: so what comes after waits until abandoned changes have ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

/// How many changes were abandoned and have not ended.
#[derive(Clone)]
pub(crate) struct Changes(Arc<watch::Sender<isize>>);

impl Default for Changes {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }
}

impl Changes {
    /// Waits until no abandoned change is on its way.
    pub(crate) async fn settled(&self) {
        if *self.0.borrow() <= 0 {
            return;
        }
        // The sender lives as long as `self`.
        let _ = self.0.subscribe().wait_for(|abandoned| *abandoned <= 0).await;
    }

    /// The two ends of a change: one for whoever waits for it, one for the thread that makes it. Each is dropped when
    /// its holder is done.
    pub(crate) fn begin(&self) -> (Waiting, Working) {
        let other_is_gone = Arc::new(AtomicBool::new(false));
        let waiting = Waiting {
            changes: self.clone(),
            worker_is_gone: other_is_gone.clone(),
        };
        let working = Working {
            changes: self.clone(),
            waiter_is_gone: other_is_gone,
        };
        (waiting, working)
    }
}

/// Held by whoever waits for a change.
pub(crate) struct Waiting {
    changes: Changes,
    worker_is_gone: Arc<AtomicBool>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.worker_is_gone.swap(true, Ordering::SeqCst) {
            self.changes.0.send_modify(|abandoned| *abandoned += 1);
        }
    }
}

/// Held by the thread that makes a change.
pub(crate) struct Working {
    changes: Changes,
    waiter_is_gone: Arc<AtomicBool>,
}

impl Drop for Working {
    fn drop(&mut self) {
        if self.waiter_is_gone.swap(true, Ordering::SeqCst) {
            self.changes.0.send_modify(|abandoned| *abandoned -= 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn is_settled(changes: &Changes) -> bool {
        tokio::time::timeout(Duration::from_millis(1), changes.settled())
            .await
            .is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_waited_for_from_when_it_is_abandoned_to_when_it_ends() {
        let changes = Changes::default();
        let (waiting, working) = changes.begin();
        assert!(
            is_settled(&changes).await,
            "its own caller waits for it, nobody else does"
        );
        drop(waiting);
        assert!(!is_settled(&changes).await);
        let (other_waiting, other_working) = changes.begin();
        drop(other_waiting);
        drop(working);
        assert!(!is_settled(&changes).await);
        drop(other_working);
        assert!(is_settled(&changes).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_that_ended_first_was_not_abandoned() {
        let changes = Changes::default();
        let (waiting, working) = changes.begin();
        drop(working);
        drop(waiting);
        assert!(is_settled(&changes).await);
    }
}
