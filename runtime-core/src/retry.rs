//! Trying again: when it is safe, when it makes sense, and after how long.
//!
//! A [`Retrier`] repeats an operation whose error is [`Retry::Temporary`] with exponential backoff and full jitter,
//! within a number of attempts, a total time and a [`RetryBudget`] that all callers of a client share. An error that it
//! gave up on is [`Retry::Exhausted`], so that outer layers do not multiply the attempts.
//!
//! ```
//! use std::sync::atomic::{AtomicU32, Ordering};
//! use runtime_core::retry::{Idempotency, Retrier, RetryPolicy};
//! use runtime_core::{Error, ErrorKind};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> runtime_core::Result<()> {
//! # let policy = RetryPolicy { base_delay: std::time::Duration::from_millis(1), ..RetryPolicy::default() };
//! let retrier = Retrier::new(policy)?;
//! let calls = AtomicU32::new(0);
//! let answer = retrier
//!     .run("get sandbox", Idempotency::Safe, |_attempt| async {
//!         match calls.fetch_add(1, Ordering::Relaxed) {
//!             0 => Err(Error::new(ErrorKind::Unavailable, "503")),
//!             _ => Ok("running"),
//!         }
//!     })
//!     .await?;
//! assert_eq!(answer, "running");
//! # Ok(())
//! # }
//! ```

mod budget;

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

pub use self::budget::RetryBudget;
use crate::error::{Error, Result, Retry};
use crate::names::random_u64;

/// The longest delay that [`parse_retry_after`] reports.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(365 * 24 * 3600);

/// What a second attempt of an operation would do, as its caller knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Idempotency {
    /// Twice is the same as once: reads, deletes, creates with a client-chosen id.
    Safe,
    /// Twice is worse than once, such as running a program: repeated only after a [`Failure::unsent`].
    OnlyIfUnsent,
    /// Never repeated, whatever the failure.
    Never,
}

/// A failed attempt. [`Error`] converts into one that may have been carried out.
#[derive(Debug)]
pub struct Failure {
    error: Error,
    unsent: bool,
}

impl Failure {
    /// A failure that proves that nothing was carried out: the connection was never made, or the other side says that it
    /// refused the request before it looked at it.
    pub fn unsent(error: Error) -> Self {
        Self { error, unsent: true }
    }

    /// What went wrong.
    pub fn into_error(self) -> Error {
        self.error
    }

    /// Whether nothing was carried out, for certain.
    pub fn is_unsent(&self) -> bool {
        self.unsent
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, unsent: false }
    }
}

/// How often and how long to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Attempts in all, the first included; 1 never retries.
    pub max_attempts: u32,
    /// No attempt starts later than this after the first one started. It does not cut an attempt short: that is for the
    /// attempt's own deadline.
    pub max_elapsed: Duration,
    /// The upper end of the first delay; it doubles with every further one.
    pub base_delay: Duration,
    /// The upper end of any delay.
    pub max_delay: Duration,
    /// The longest wait that the other side may ask for; a longer one is cut to this.
    pub max_retry_after: Duration,
}

impl Default for RetryPolicy {
    /// 5 attempts within 2 minutes, delays up to 0.5 s doubling up to 20 s, at most 60 s if asked for.
    fn default() -> Self {
        Self {
            max_attempts: 5,
            max_elapsed: Duration::from_secs(120),
            base_delay: Duration::from_millis(500),
            max_delay: Duration::from_secs(20),
            max_retry_after: Duration::from_secs(60),
        }
    }
}

impl RetryPolicy {
    /// Never tries again.
    pub fn none() -> Self {
        Self {
            max_attempts: 1,
            ..Self::default()
        }
    }

    /// Checks the values.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::ErrorKind::InvalidConfig) naming `max_attempts` when it is 0, or `max_delay` when it is
    /// shorter than the first delay.
    pub fn validate(&self) -> Result<()> {
        if self.max_attempts == 0 {
            return Err(Error::invalid_config(
                "max_attempts",
                "there must be at least one attempt; 1 never retries",
            ));
        }
        if self.max_delay < self.base_delay {
            return Err(Error::invalid_config(
                "max_delay",
                format!(
                    "the longest delay ({:?}) must not be shorter than the first ({:?})",
                    self.max_delay, self.base_delay
                ),
            ));
        }
        Ok(())
    }

    /// The upper end of the delay after failure number `failures` (from 1).
    pub fn max_delay_after(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.base_delay.saturating_mul(1 << doublings).min(self.max_delay)
    }

    /// The delay after failure number `failures` (from 1), for a random `fraction` between 0 and 1: anything up to the
    /// upper end, on top of what the other side asked for.
    fn delay(&self, failures: u32, fraction: f64, asked: Option<Duration>) -> Duration {
        let end = self.max_delay_after(failures);
        // Out of range only where rounding makes the longest duration longer.
        let jitter = Duration::try_from_secs_f64(end.as_secs_f64() * fraction).unwrap_or(end);
        let asked = asked.unwrap_or_default().min(self.max_retry_after);
        // Those who were told the same moment must not come back at the same moment.
        asked.saturating_add(jitter)
    }
}

/// A source of random fractions that costs no lock. Clones draw from the same sequence.
#[derive(Debug, Clone)]
pub struct Jitter(Arc<AtomicU64>);

impl Jitter {
    /// A different sequence in every process.
    pub fn random() -> Self {
        Self::seeded(random_u64())
    }

    /// The same sequence for the same seed.
    pub fn seeded(seed: u64) -> Self {
        Self(Arc::new(AtomicU64::new(seed)))
    }

    /// The next fraction, from 0 up to but without 1.
    pub fn fraction(&self) -> f64 {
        // SplitMix64: a counter in steps of the golden ratio, and a mix that spreads every bit.
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut bits = self.0.fetch_add(GOLDEN, Ordering::Relaxed).wrapping_add(GOLDEN);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        // The upper 53 bits are what a float holds exactly.
        (bits >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Repeats operations. One per client; clones share the budget and the jitter.
#[derive(Clone)]
pub struct Retrier {
    policy: RetryPolicy,
    budget: RetryBudget,
    jitter: Jitter,
}

impl Retrier {
    /// A retrier with a default [`RetryBudget`] of its own.
    ///
    /// # Errors
    /// Those of [`RetryPolicy::validate`].
    pub fn new(policy: RetryPolicy) -> Result<Self> {
        policy.validate()?;
        Ok(Self {
            policy,
            budget: RetryBudget::default(),
            jitter: Jitter::random(),
        })
    }

    /// Draws retries from `budget`, which other clients may share.
    #[must_use]
    pub fn with_budget(mut self, budget: RetryBudget) -> Self {
        self.budget = budget;
        self
    }

    /// Draws delays from `jitter`.
    #[must_use]
    pub fn with_jitter(mut self, jitter: Jitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// The policy.
    pub fn policy(&self) -> &RetryPolicy {
        &self.policy
    }

    /// The budget.
    pub fn budget(&self) -> &RetryBudget {
        &self.budget
    }

    /// Calls `attempt` with 1, 2, … until it succeeds, fails for good or the policy is used up. `operation` is for logs
    /// and for errors that do not name one.
    ///
    /// # Cancellation
    /// Dropping the future drops the attempt in flight, or the wait between two. A token that was drawn for the coming
    /// attempt is lost; time gives it back.
    ///
    /// # Errors
    /// The last attempt's error. It is [`Retry::Exhausted`] if attempts were still to be made but none is left; and
    /// [`Retry::Permanent`] where `idempotency` forbids another attempt, as it forbids outer layers, too.
    pub async fn run<T, E, F, Fut>(
        &self,
        operation: impl Into<Cow<'static, str>>,
        idempotency: Idempotency,
        mut attempt: F,
    ) -> Result<T>
    where
        F: FnMut(u32) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: Into<Failure>,
    {
        let operation = operation.into();
        let started = Instant::now();
        let mut number = 1;
        loop {
            let failure = match attempt(number).await {
                Ok(value) => {
                    self.budget.deposit();
                    return Ok(value);
                }
                Err(failure) => failure.into(),
            };
            match self.delay_after(&failure, number, idempotency, started.elapsed()) {
                Next::GiveUp { retry, reason } => {
                    if number > 1 || retry == Retry::Exhausted {
                        tracing::debug!(operation = %operation, attempts = number, reason, error = %failure.error, "retry: gave up");
                    }
                    return Err(failure.error.with_retry(retry).with_operation(operation));
                }
                Next::After(delay) => {
                    tracing::debug!(
                        operation = %operation,
                        attempt = number,
                        delay_ms = delay.as_millis(),
                        error = %failure.error,
                        "retry: trying again"
                    );
                    tokio::time::sleep(delay).await;
                    number += 1;
                }
            }
        }
    }

    fn delay_after(&self, failure: &Failure, attempts: u32, idempotency: Idempotency, elapsed: Duration) -> Next {
        let give_up = |retry, reason| Next::GiveUp { retry, reason };
        let error = &failure.error;
        if error.retry() != Retry::Temporary {
            return give_up(error.retry(), "another attempt makes no sense");
        }
        let is_safe = match idempotency {
            Idempotency::Safe => true,
            Idempotency::OnlyIfUnsent => failure.unsent,
            Idempotency::Never => false,
        };
        if !is_safe {
            return give_up(Retry::Permanent, "it may have been carried out");
        }
        if attempts >= self.policy.max_attempts {
            return give_up(Retry::Exhausted, "no attempts left");
        }
        let delay = self.policy.delay(attempts, self.jitter.fraction(), error.retry_after());
        let time_left = self.policy.max_elapsed.saturating_sub(elapsed);
        if delay > time_left {
            return give_up(Retry::Exhausted, "no time left");
        }
        // The longer of the two waits: the token comes back while the backoff passes.
        match self.budget.withdraw(time_left) {
            Some(wait) => Next::After(delay.max(wait)),
            None => give_up(Retry::Exhausted, "the client's retry budget is used up"),
        }
    }
}

enum Next {
    After(Duration),
    GiveUp { retry: Retry, reason: &'static str },
}

impl fmt::Debug for Retrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retrier")
            .field("policy", &self.policy)
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}

/// How long a `Retry-After` header asks to wait, seen at `now`: a number of seconds or an HTTP date. A date in the past
/// asks for no wait; more than a year is a year; what is neither form is `None`.
///
/// ```
/// use std::time::{Duration, UNIX_EPOCH};
/// use runtime_core::retry::parse_retry_after;
///
/// let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
/// assert_eq!(parse_retry_after("120", now), Some(Duration::from_secs(120)));
/// assert_eq!(parse_retry_after("Sun, 06 Nov 1994 08:49:47 GMT", now), Some(Duration::from_secs(10)));
/// assert_eq!(parse_retry_after("soon", now), None);
/// ```
pub fn parse_retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    let is_number = |byte: u8| byte.is_ascii_digit() || byte == b'.';
    let delay = if value.bytes().all(is_number) {
        // Some servers send fractions, although the standard has whole seconds only.
        let seconds: f64 = value.parse().ok()?;
        Duration::try_from_secs_f64(seconds).unwrap_or(MAX_RETRY_AFTER)
    } else {
        httpdate::parse_http_date(value)
            .ok()?
            .duration_since(now)
            .unwrap_or_default()
    };
    Some(delay.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests;
