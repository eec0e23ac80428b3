//! [`Deadline`]: how long something may be waited for.

use std::future::Future;
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// A deadline that costs nothing until something has to wait. Its timer is kept for the next wait: moving a timer on is
/// much cheaper than making one.
#[derive(Debug, Default)]
pub(super) struct Deadline {
    timer: Option<Pin<Box<Sleep>>>,
    armed: bool,
    phase: u8,
}

impl Deadline {
    /// Whether `limit` has passed since this phase's waiting began. Wakes the task when it has.
    pub(super) fn poll_over(&mut self, phase: u8, limit: Duration, context: &mut Context<'_>) -> bool {
        let at = || Instant::now() + limit;
        if !self.armed || self.phase != phase {
            match &mut self.timer {
                Some(timer) => timer.as_mut().reset(at()),
                None => self.timer = Some(Box::pin(tokio::time::sleep_until(at()))),
            }
            (self.armed, self.phase) = (true, phase);
        }
        match &mut self.timer {
            Some(timer) => timer.as_mut().poll(context).is_ready(),
            None => false,
        }
    }

    /// Whatever was waited for has happened.
    pub(super) fn progress(&mut self) {
        self.armed = false;
    }
}
