//! How many retries all callers of one client may make together.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A token bucket that every retry of a client draws from, so that thousands of callers of a provider in trouble do not
/// multiply its load. First attempts are free. Clones share the tokens.
///
/// Tokens come back with time and with successes. A retry that finds none waits for the next one, if that is soon enough
/// for its caller: retries are spread out before they are given up.
#[derive(Clone)]
pub struct RetryBudget(Arc<Bucket>);

struct Bucket {
    capacity: f64,
    per_second: f64,
    per_success: f64,
    tokens: Mutex<Tokens>,
}

#[derive(Debug, Clone, Copy)]
struct Tokens {
    /// Negative while retries wait for tokens to come back.
    count: f64,
    at: Instant,
}

impl RetryBudget {
    /// A full bucket of `capacity` tokens that gains `per_second` tokens with time and `per_success` with every success.
    /// Values that are negative or not numbers count as 0.
    pub fn new(capacity: u32, per_second: f64, per_success: f64) -> Self {
        // `max` takes the other value for NaN.
        let per_second = per_second.clamp(0.0, 1e9).max(0.0);
        let per_success = per_success.clamp(0.0, 1e9).max(0.0);
        Self(Arc::new(Bucket {
            capacity: f64::from(capacity),
            per_second,
            per_success,
            tokens: Mutex::new(Tokens {
                count: f64::from(capacity),
                at: Instant::now(),
            }),
        }))
    }

    /// A bucket that never runs out.
    pub fn unlimited() -> Self {
        Self(Arc::new(Bucket {
            capacity: f64::INFINITY,
            per_second: 0.0,
            per_success: 0.0,
            tokens: Mutex::new(Tokens {
                count: f64::INFINITY,
                at: Instant::now(),
            }),
        }))
    }

    /// The whole tokens left.
    pub fn available(&self) -> u64 {
        self.with_tokens(|_, tokens| {
            // Saturates: infinity is the largest number, a debt is none.
            tokens.count.floor() as u64
        })
    }

    /// Takes a token and returns how long to wait until it is there. `None`, and nothing taken, if that is longer than
    /// `max_wait`.
    pub fn withdraw(&self, max_wait: Duration) -> Option<Duration> {
        self.with_tokens(|bucket, tokens| {
            let missing = 1.0 - tokens.count;
            let wait = if missing <= 0.0 {
                Duration::ZERO
            } else {
                // Division by a rate of 0 is infinite, which no duration is.
                Duration::try_from_secs_f64(missing / bucket.per_second).ok()?
            };
            if wait > max_wait {
                return None;
            }
            tokens.count -= 1.0;
            Some(wait)
        })
    }

    /// Records a success.
    pub fn deposit(&self) {
        self.with_tokens(|bucket, tokens| {
            tokens.count = (tokens.count + bucket.per_success).min(bucket.capacity);
        });
    }

    fn with_tokens<T>(&self, f: impl FnOnce(&Bucket, &mut Tokens) -> T) -> T {
        let bucket = &*self.0;
        let mut tokens = bucket.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let elapsed = now.saturating_duration_since(tokens.at).as_secs_f64();
        tokens.count = (tokens.count + elapsed * bucket.per_second).min(bucket.capacity);
        tokens.at = tokens.at.max(now);
        f(bucket, &mut tokens)
    }
}

impl Default for RetryBudget {
    /// 100 tokens; 10 come back a second, and one with every fifth success.
    fn default() -> Self {
        Self::new(100, 10.0, 0.2)
    }
}

impl fmt::Debug for RetryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryBudget")
            .field("capacity", &self.0.capacity)
            .field("per_second", &self.0.per_second)
            .field("per_success", &self.0.per_success)
            .field("available", &self.available())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn tokens_run_out_and_come_back_with_time() {
        let budget = RetryBudget::new(3, 2.0, 0.0);
        for left in [2, 1, 0] {
            assert_eq!(budget.withdraw(Duration::ZERO), Some(Duration::ZERO));
            assert_eq!(budget.available(), left);
        }
        assert_eq!(budget.withdraw(Duration::ZERO), None);
        tokio::time::advance(SECOND).await;
        assert_eq!(budget.available(), 2);
        tokio::time::advance(60 * SECOND).await;
        assert_eq!(budget.available(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_bucket_hands_out_waits_one_after_the_other() {
        let budget = RetryBudget::new(1, 2.0, 0.0);
        let waits: Vec<_> = (0..5).map(|_| budget.withdraw(SECOND)).collect();
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!(waits, [ms(0), ms(500), ms(1000), None, None]);
        // A refusal takes nothing.
        tokio::time::advance(SECOND).await;
        assert_eq!(budget.withdraw(SECOND), ms(500));
    }

    #[tokio::test(start_paused = true)]
    async fn successes_earn_retries_up_to_the_capacity() {
        let budget = RetryBudget::new(2, 0.0, 0.5);
        assert!(budget.withdraw(SECOND).is_some() && budget.withdraw(SECOND).is_some());
        assert_eq!(budget.withdraw(Duration::MAX), None);
        budget.deposit();
        assert_eq!(budget.withdraw(Duration::MAX), None);
        budget.deposit();
        assert_eq!(budget.withdraw(Duration::MAX), Some(Duration::ZERO));
        for _ in 0..100 {
            budget.deposit();
        }
        assert_eq!(budget.available(), 2);
    }

    #[test]
    fn odd_settings_neither_panic_nor_leak_tokens() {
        for odd in [f64::NAN, -1.0, f64::NEG_INFINITY] {
            let budget = RetryBudget::new(1, odd, odd);
            assert_eq!(budget.withdraw(Duration::MAX), Some(Duration::ZERO));
            budget.deposit();
            assert_eq!(budget.withdraw(Duration::MAX), None, "{odd}");
        }
        assert_eq!(RetryBudget::new(0, 0.0, 0.0).withdraw(Duration::MAX), None);
        let unlimited = RetryBudget::unlimited();
        assert_eq!(unlimited.withdraw(Duration::ZERO), Some(Duration::ZERO));
        unlimited.deposit();
        assert_eq!(unlimited.available(), u64::MAX);
    }
}
