use std::future;
use std::sync::Mutex;
use std::time::UNIX_EPOCH;

use super::*;
use crate::ErrorKind;
use crate::test_log::Log;

fn unavailable() -> Error {
    Error::new(ErrorKind::Unavailable, "the other side is busy")
}

fn policy() -> RetryPolicy {
    RetryPolicy {
        max_attempts: 5,
        max_elapsed: Duration::from_secs(100),
        base_delay: Duration::from_secs(1),
        max_delay: Duration::from_secs(4),
        max_retry_after: Duration::from_secs(30),
    }
}

fn retrier(policy: RetryPolicy) -> Retrier {
    Retrier::new(policy)
        .unwrap()
        .with_budget(RetryBudget::unlimited())
        .with_jitter(Jitter::seeded(7))
}

/// Runs an operation that always fails with `failure`; returns its error and when each attempt started.
async fn run_failing(
    retrier: &Retrier,
    idempotency: Idempotency,
    failure: impl Fn(u32) -> Failure,
) -> (Error, Vec<Duration>) {
    let started = Instant::now();
    let starts = Mutex::new(Vec::new());
    let result = retrier
        .run("create", idempotency, |number| {
            starts.lock().unwrap().push(started.elapsed());
            future::ready(Err::<(), _>(failure(number)))
        })
        .await;
    (result.unwrap_err(), starts.into_inner().unwrap())
}

#[tokio::test(start_paused = true)]
async fn delays_are_jittered_between_zero_and_a_doubling_end() {
    let (error, starts) = run_failing(&retrier(policy()), Idempotency::Safe, |_| unavailable().into()).await;
    assert_eq!(error.retry(), Retry::Exhausted);
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.operation(), Some("create"));
    // The same seed gives the same fractions of the ends 1, 2, 4 and again 4 seconds.
    let jitter = Jitter::seeded(7);
    let mut expected = vec![Duration::ZERO];
    for end in [1.0, 2.0, 4.0, 4.0] {
        let delay = Duration::from_secs_f64(end * jitter.fraction());
        expected.push(expected[expected.len() - 1] + delay);
    }
    assert_eq!(starts.len(), expected.len());
    for (start, expected) in starts.iter().zip(expected) {
        // Tokio's timer rounds up to milliseconds, per delay.
        let late = start.checked_sub(expected).unwrap();
        assert!(late <= Duration::from_millis(4), "{start:?} is {late:?} late");
    }
}

#[test]
fn full_jitter_covers_the_whole_range() {
    let jitter = Jitter::seeded(1);
    let fractions: Vec<f64> = (0..10_000).map(|_| jitter.fraction()).collect();
    assert!(fractions.iter().all(|fraction| (0.0..1.0).contains(fraction)));
    for tenth in 0..10 {
        let (low, high) = (f64::from(tenth) / 10.0, f64::from(tenth + 1) / 10.0);
        let hits = fractions.iter().filter(|f| (low..high).contains(*f)).count();
        assert!((800..1200).contains(&hits), "{hits} of 10000 in {low}..{high}");
    }
    assert_ne!(Jitter::random().fraction(), Jitter::random().fraction());
}

#[test]
fn the_end_of_the_delay_doubles_up_to_its_limit_and_never_overflows() {
    let policy = policy();
    let ends: Vec<u64> = (1..6).map(|n| policy.max_delay_after(n).as_secs()).collect();
    assert_eq!(ends, [1, 2, 4, 4, 4]);
    assert_eq!(policy.max_delay_after(u32::MAX), policy.max_delay);
    let huge = RetryPolicy {
        base_delay: Duration::MAX,
        max_delay: Duration::MAX,
        ..policy
    };
    assert_eq!(huge.delay(9, 1.0, Some(Duration::MAX)), Duration::MAX);
}

#[tokio::test(start_paused = true)]
async fn a_success_ends_it_and_attempts_are_numbered_from_one() {
    let numbers = Mutex::new(Vec::new());
    let value = retrier(policy())
        .run("create", Idempotency::Safe, |number| {
            numbers.lock().unwrap().push(number);
            future::ready(if number < 3 { Err(unavailable()) } else { Ok(number) })
        })
        .await
        .unwrap();
    assert_eq!(value, 3);
    assert_eq!(numbers.into_inner().unwrap(), [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn what_another_attempt_cannot_mend_is_not_attempted_again() {
    for retry in [Retry::Permanent, Retry::Exhausted] {
        let (error, starts) = run_failing(&retrier(policy()), Idempotency::Safe, |_| {
            unavailable().with_retry(retry).into()
        })
        .await;
        assert_eq!(error.retry(), retry);
        assert_eq!(starts, [Duration::ZERO]);
    }
}

#[tokio::test(start_paused = true)]
async fn what_may_have_been_carried_out_is_repeated_only_if_it_is_safe() {
    for (idempotency, unsent, attempts, retry) in [
        (Idempotency::Safe, false, 5, Retry::Exhausted),
        (Idempotency::Safe, true, 5, Retry::Exhausted),
        (Idempotency::OnlyIfUnsent, false, 1, Retry::Permanent),
        (Idempotency::OnlyIfUnsent, true, 5, Retry::Exhausted),
        (Idempotency::Never, false, 1, Retry::Permanent),
        (Idempotency::Never, true, 1, Retry::Permanent),
    ] {
        let (error, starts) = run_failing(&retrier(policy()), idempotency, |_| Failure {
            error: unavailable(),
            unsent,
        })
        .await;
        assert_eq!(starts.len(), attempts, "{idempotency:?}, unsent: {unsent}");
        assert_eq!(error.retry(), retry, "{idempotency:?}, unsent: {unsent}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_sent_ends_a_series_of_unsent_ones() {
    let (error, starts) = run_failing(&retrier(policy()), Idempotency::OnlyIfUnsent, |number| {
        if number < 3 {
            Failure::unsent(unavailable())
        } else {
            unavailable().into()
        }
    })
    .await;
    assert_eq!(starts.len(), 3);
    assert_eq!(error.retry(), Retry::Permanent);
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_honoured_up_to_its_limit() {
    let two = RetryPolicy {
        max_attempts: 2,
        ..policy()
    };
    for (asked, waited) in [(10, 10), (30, 30), (3600, 30)] {
        let (error, starts) = run_failing(&retrier(two.clone()), Idempotency::Safe, |_| {
            Error::new(ErrorKind::RateLimited, "slow down")
                .with_retry_after(Duration::from_secs(asked))
                .into()
        })
        .await;
        let waited = Duration::from_secs(waited);
        // Plus the jitter of the first delay, which ends at one second.
        assert!(
            starts[1] >= waited && starts[1] <= waited + Duration::from_secs(1),
            "asked {asked}: {starts:?}"
        );
        assert_eq!(error.retry_after(), Some(Duration::from_secs(asked)));
        assert_eq!(error.retry(), Retry::Exhausted);
    }
}

#[tokio::test(start_paused = true)]
async fn no_attempt_starts_after_the_total_time_and_none_is_waited_for_in_vain() {
    let short = RetryPolicy {
        max_attempts: 100,
        max_elapsed: Duration::from_secs(25),
        ..policy()
    };
    let started = Instant::now();
    let (error, starts) = run_failing(&retrier(short), Idempotency::Safe, |_| {
        unavailable().with_retry_after(Duration::from_secs(10)).into()
    })
    .await;
    assert_eq!(error.retry(), Retry::Exhausted);
    assert_eq!(starts.len(), 3, "{starts:?}");
    assert_eq!(
        started.elapsed(),
        starts[2],
        "given up at once, not at the end of the time"
    );
}

#[tokio::test(start_paused = true)]
async fn the_time_of_the_attempts_counts() {
    let short = RetryPolicy {
        max_elapsed: Duration::from_secs(25),
        ..policy()
    };
    let attempts = AtomicU64::new(0);
    let result = retrier(short)
        .run("create", Idempotency::Safe, |_| async {
            attempts.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(20)).await;
            Err::<(), _>(unavailable())
        })
        .await;
    assert_eq!(result.unwrap_err().retry(), Retry::Exhausted);
    assert_eq!(attempts.into_inner(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_thousand_callers_share_one_budget() {
    let attempts = Arc::new(AtomicU64::new(0));
    let retrier = retrier(policy()).with_budget(RetryBudget::new(50, 0.0, 0.0));
    let mut callers = Vec::new();
    for _ in 0..1000 {
        let (retrier, attempts) = (retrier.clone(), Arc::clone(&attempts));
        callers.push(tokio::spawn(async move {
            retrier
                .run("create", Idempotency::Safe, |_| {
                    attempts.fetch_add(1, Ordering::Relaxed);
                    future::ready(Err::<(), _>(unavailable()))
                })
                .await
        }));
    }
    for caller in callers {
        let error = caller.await.unwrap().unwrap_err();
        assert_eq!(error.retry(), Retry::Exhausted);
    }
    assert_eq!(attempts.load(Ordering::Relaxed), 1050);
}

#[tokio::test(start_paused = true)]
async fn a_budget_that_refills_spreads_retries_out_before_it_refuses_them() {
    // 10 retries a second for 60 seconds, and nothing saved up.
    let policy = RetryPolicy {
        max_attempts: 2,
        max_elapsed: Duration::from_secs(60),
        ..policy()
    };
    let retrier = retrier(policy).with_budget(RetryBudget::new(1, 10.0, 0.0));
    let starts = Arc::new(Mutex::new(Vec::new()));
    let mut callers = Vec::new();
    for _ in 0..1000 {
        let (retrier, starts) = (retrier.clone(), Arc::clone(&starts));
        callers.push(tokio::spawn(async move {
            let attempt = |number| {
                if number > 1 {
                    starts.lock().unwrap().push(Instant::now());
                }
                future::ready(Err::<(), _>(unavailable()))
            };
            retrier.run("create", Idempotency::Safe, attempt).await.unwrap_err()
        }));
    }
    for caller in callers {
        assert_eq!(caller.await.unwrap().retry(), Retry::Exhausted);
    }
    let starts = starts.lock().unwrap();
    assert_eq!(starts.len(), 601);
    for window in starts.windows(100) {
        // The first second is open to the jitter of the first delay.
        assert!(
            window[99] - window[0] >= Duration::from_secs(8),
            "{:?}",
            window[99] - window[0]
        );
    }
}

#[tokio::test(start_paused = true)]
async fn successes_and_first_attempts_cost_nothing() {
    let retrier = retrier(policy()).with_budget(RetryBudget::new(1, 0.0, 0.0));
    for _ in 0..100 {
        let run = retrier.run("get", Idempotency::Safe, |_| future::ready(Ok::<_, Error>(())));
        run.await.unwrap();
    }
    assert_eq!(retrier.budget().available(), 1);
}

#[tokio::test(start_paused = true)]
async fn dropping_the_future_ends_the_attempts() {
    let attempts = AtomicU64::new(0);
    let retrier = retrier(policy());
    let run = retrier.run("create", Idempotency::Safe, |_| {
        attempts.fetch_add(1, Ordering::Relaxed);
        future::ready(Err::<(), _>(unavailable().with_retry_after(Duration::from_secs(10))))
    });
    tokio::time::timeout(Duration::from_secs(5), run).await.unwrap_err();
    tokio::time::advance(Duration::from_secs(60)).await;
    assert_eq!(attempts.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn the_log_tells_of_every_retry_and_of_giving_up() {
    let log = Log::default();
    let guard = log.install();
    run_failing(&retrier(policy()), Idempotency::Safe, |_| unavailable().into()).await;
    drop(guard);
    assert_eq!(log.text().matches("trying again").count(), 4, "{}", log.text());
    assert!(log.text().contains("no attempts left"), "{}", log.text());
}

#[test]
fn a_policy_that_makes_no_sense_names_its_field() {
    let none = RetryPolicy {
        max_attempts: 0,
        ..policy()
    };
    assert_eq!(Retrier::new(none).unwrap_err().field(), Some("max_attempts"));
    let shrinking = RetryPolicy {
        max_delay: Duration::from_millis(1),
        ..policy()
    };
    assert_eq!(Retrier::new(shrinking).unwrap_err().field(), Some("max_delay"));
    RetryPolicy::default().validate().unwrap();
    assert_eq!(RetryPolicy::none().max_attempts, 1);
}

#[test]
fn retry_after_is_read_as_seconds_or_as_a_date() {
    let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
    let year = MAX_RETRY_AFTER.as_millis() as u64;
    for (value, expected_ms) in [
        ("0", Some(0)),
        ("120", Some(120_000)),
        (" 7 ", Some(7_000)),
        ("1.5", Some(1_500)),
        ("99999999999999999999999", Some(year)),
        ("Sun, 06 Nov 1994 08:49:37 GMT", Some(0)),
        ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60_000)),
        ("Sunday, 06-Nov-94 08:50:37 GMT", Some(60_000)),
        ("Sun Nov  6 08:50:37 1994", Some(60_000)),
        ("Sun, 06 Nov 1983 08:49:37 GMT", Some(0)),
        ("Sun, 06 Nov 2095 08:49:37 GMT", Some(year)),
        ("", None),
        (".", None),
        ("1.2.3", None),
        ("-1", None),
        ("+1", None),
        ("1e3", None),
        ("inf", None),
        ("soon", None),
        ("06 Nov 1994", None),
    ] {
        let delay = parse_retry_after(value, now);
        assert_eq!(delay, expected_ms.map(Duration::from_millis), "{value:?}");
    }
    assert_eq!(
        parse_retry_after(&"9".repeat(1000), now),
        Some(MAX_RETRY_AFTER),
        "more digits than a float has"
    );
}
