use std::fs::{self, File};
use std::future::Future;
use std::pin::pin;
use std::task::Poll;

use super::*;
use crate::test_log::Log;

/// Its wall clock stands where a test puts it and advances with Tokio's; its monotonic clock is Tokio's.
#[derive(Debug)]
struct TestClock {
    wall: Mutex<f64>,
    started: Instant,
}

impl TestClock {
    fn set(&self, seconds: f64) {
        *self.wall.lock().unwrap() = seconds - self.started.elapsed().as_secs_f64();
    }
}

impl Clock for TestClock {
    fn now(&self) -> SystemTime {
        let seconds = *self.wall.lock().unwrap() + self.started.elapsed().as_secs_f64();
        UNIX_EPOCH + Duration::from_secs_f64(seconds)
    }
}

const START: f64 = 1_000_000.0;

/// A limiter directory with a clock at [`START`].
struct Bench {
    dir: tempfile::TempDir,
    clock: Arc<TestClock>,
}

impl Bench {
    fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            clock: Arc::new(TestClock {
                wall: Mutex::new(START),
                started: Instant::now(),
            }),
        }
    }

    fn dir(&self) -> PathBuf {
        self.dir.path().join("limiter")
    }

    /// Two slots a second.
    fn builder(&self) -> LimiterBuilder {
        Limiter::builder("test-sandbox")
            .per_second(2.0)
            .dir(self.dir())
            .scope(RunScope::new("team/run").unwrap())
            .clock(self.clock.clone())
    }

    fn limiter(&self) -> Limiter {
        self.builder().build().unwrap()
    }

    /// Writes a bucket as another program would have at the time `at`.
    fn store(&self, file: &str, content: impl AsRef<[u8]>, at: f64) -> PathBuf {
        fs::create_dir_all(self.dir()).unwrap();
        let path = self.dir().join(file);
        fs::write(&path, content).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_modified(UNIX_EPOCH + Duration::from_secs_f64(at)).unwrap();
        path
    }
}

const FILE: &str = "test-sandbox-team--run.bucket";

async fn slots(limiter: &Limiter, count: usize) -> Vec<f64> {
    let mut slots = Vec::new();
    for _ in 0..count {
        slots.push(limiter.reserve().await.unwrap().unix_seconds());
    }
    slots
}

#[tokio::test(start_paused = true)]
async fn slots_are_one_interval_apart_and_the_file_names_the_next() {
    let bench = Bench::new();
    let limiter = bench.limiter();
    assert_eq!(limiter.path(), Some(bench.dir().join(FILE).as_path()));
    assert!(!bench.dir().exists());
    assert_eq!(slots(&limiter, 3).await, [START, START + 0.5, START + 1.0]);
    assert_eq!(fs::read_to_string(bench.dir().join(FILE)).unwrap(), "1000001.5");
}

#[tokio::test(start_paused = true)]
async fn an_empty_file_was_never_used_and_a_past_slot_is_free_now() {
    for content in ["", "999999.0", "999000", "0", "-5.0", " 12.5\n"] {
        let bench = Bench::new();
        bench.store(FILE, content, START - 1000.0);
        assert_eq!(slots(&bench.limiter(), 2).await, [START, START + 0.5], "{content:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_another_program_left_is_honoured() {
    let bench = Bench::new();
    bench.store(FILE, "1000007.25", START);
    assert_eq!(slots(&bench.limiter(), 2).await, [START + 7.25, START + 7.75]);
}

#[tokio::test(start_paused = true)]
async fn runs_and_names_have_their_own_queues() {
    let bench = Bench::new();
    let other_run = bench.builder().scope(RunScope::new("other").unwrap()).build().unwrap();
    let mut other_name = bench.builder();
    other_name.name = "test-tunnel".into();
    for limiter in [bench.limiter(), other_run, other_name.build().unwrap()] {
        assert_eq!(slots(&limiter, 2).await, [START, START + 0.5]);
    }
    let same = bench.limiter();
    assert_eq!(slots(&same, 1).await, [START + 1.0]);
}

#[tokio::test(start_paused = true)]
async fn a_corrupt_file_is_restarted_with_a_warning() {
    let contents: [&[u8]; 8] = [
        b"abc",
        b"nan",
        b"inf",
        b"1e999",
        b"1_000",
        b"\0\0\0\0",
        &[0xff, 0xfe],
        &[b'1'; 1 << 20],
    ];
    for content in contents {
        let shown = String::from_utf8_lossy(&content[..content.len().min(9)]);
        let bench = Bench::new();
        bench.store(FILE, content, START);
        let log = Log::default();
        let guard = log.install();
        assert_eq!(
            slots(&bench.limiter(), 3).await,
            [START, START + 0.5, START + 1.0],
            "{shown}"
        );
        drop(guard);
        assert_eq!(log.text().matches("corrupt").count(), 1, "{shown}: {}", log.text());
        assert_eq!(fs::read_to_string(bench.dir().join(FILE)).unwrap(), "1000001.5");
    }
}

#[tokio::test(start_paused = true)]
async fn an_impossible_queue_is_restarted_with_a_warning() {
    for (content, is_restarted) in [("1003600.0", false), ("1003600.5", true), ("1e300", true)] {
        let bench = Bench::new();
        bench.store(FILE, content, START);
        let limiter = bench.builder().max_backlog(Duration::from_secs(3600)).build().unwrap();
        let log = Log::default();
        let guard = log.install();
        let first = limiter.reserve().await.unwrap().unix_seconds();
        drop(guard);
        assert_eq!(first, if is_restarted { START } else { START + 3600.0 }, "{content}");
        assert_eq!(log.text().contains("impossible queue"), is_restarted, "{content}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_was_set_back_takes_the_queue_with_it() {
    let bench = Bench::new();
    // Written two hours in the future, with ten seconds of queue at that time.
    bench.store(FILE, "1007210.0", START + 7200.0);
    let limiter = bench.limiter();
    assert_eq!(slots(&limiter, 2).await, [START + 10.0, START + 10.5]);
    // And again while this process holds reservations of its own.
    bench.clock.set(START - 5000.0);
    assert_eq!(slots(&limiter, 2).await, [START - 4989.0, START - 4988.5]);
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_jumps_forward_does_not_release_a_burst() {
    let bench = Bench::new();
    let limiter = bench.limiter();
    assert_eq!(slots(&limiter, 4).await.last(), Some(&(START + 1.5)));
    bench.clock.set(START + 3600.0);
    let slots = slots(&limiter, 2).await;
    assert!((slots[0] - (START + 3602.0)).abs() < 1e-6, "{slots:?}");
    assert!((slots[1] - (START + 3602.5)).abs() < 1e-6, "{slots:?}");
}

#[tokio::test(start_paused = true)]
async fn a_lost_file_does_not_release_a_burst() {
    let bench = Bench::new();
    let limiter = bench.limiter();
    slots(&limiter, 4).await;
    fs::remove_dir_all(bench.dir()).unwrap();
    assert_eq!(slots(&limiter, 1).await, [START + 2.0]);
}

#[tokio::test(start_paused = true)]
async fn acquire_waits_for_its_slot() {
    let bench = Bench::new();
    let limiter = bench.limiter();
    let started = Instant::now();
    for number in 0..4 {
        let slot = limiter.acquire().await.unwrap();
        assert!(slot.is_shared());
        assert_eq!(slot.due() - started, Duration::from_millis(500 * number));
        assert!(Instant::now() >= slot.due());
        assert_eq!(slot.at(), UNIX_EPOCH + Duration::from_secs_f64(slot.unix_seconds()));
    }
}

#[tokio::test(start_paused = true)]
async fn time_shortens_the_queue() {
    let bench = Bench::new();
    let limiter = bench.limiter();
    slots(&limiter, 3).await;
    tokio::time::advance(Duration::from_secs(60)).await;
    assert_eq!(slots(&limiter, 2).await, [START + 60.0, START + 60.5]);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_waiter_wastes_its_slot_and_nothing_else() {
    let bench = Bench::new();
    let limiter = bench.limiter();
    slots(&limiter, 1).await;
    {
        let mut waiter = pin!(limiter.acquire());
        // Polled until it sleeps: by then the file names the slot after its own.
        std::future::poll_fn(|context| {
            assert!(waiter.as_mut().poll(context).is_pending());
            let content = fs::read_to_string(bench.dir().join(FILE)).unwrap();
            if content == "1000001.0" {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }
    assert_eq!(slots(&limiter, 1).await, [START + 1.0]);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_dropped_in_the_queue_has_reserved_nothing() {
    let bench = Bench::new();
    let limiter = bench.limiter();
    let own = Arc::clone(&limiter.0.as_ref().unwrap().own).lock_owned().await;
    {
        let mut waiter = pin!(limiter.reserve());
        std::future::poll_fn(|context| {
            assert!(waiter.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
    }
    drop(own);
    assert_eq!(slots(&limiter, 1).await, [START]);
}

#[tokio::test(start_paused = true)]
async fn an_unusable_directory_paces_this_process_alone_and_says_so_once() {
    let bench = Bench::new();
    fs::write(bench.dir(), "a file where the directory should be").unwrap();
    let log = Log::default();
    let guard = log.install();
    // As a provider has it: a limiter for each of its sandboxes.
    let (one, two) = (bench.limiter(), bench.limiter());
    assert_eq!(slots(&one, 2).await, [START, START + 0.5]);
    assert_eq!(slots(&two, 2).await, [START + 1.0, START + 1.5]);
    let slot = one.acquire().await.unwrap();
    drop(guard);
    assert!(!slot.is_shared());
    assert_eq!(
        log.text().matches("for this process alone").count(),
        1,
        "{}",
        log.text()
    );
}

#[tokio::test(start_paused = true)]
async fn a_strict_limiter_fails_where_the_file_cannot_be_used() {
    let bench = Bench::new();
    fs::write(bench.dir(), "a file where the directory should be").unwrap();
    let limiter = bench.builder().strict(true).build().unwrap();
    let error = limiter.acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongFileType, "{error}");
    assert!(error.to_string().contains(FILE), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_directory_in_place_of_the_file_is_refused() {
    let bench = Bench::new();
    fs::create_dir_all(bench.dir().join(FILE)).unwrap();
    let error = bench
        .builder()
        .strict(true)
        .build()
        .unwrap()
        .reserve()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongFileType, "{error}");
}

#[cfg(unix)]
#[tokio::test(start_paused = true)]
async fn a_link_is_not_followed_and_a_fifo_does_not_hang() {
    let bench = Bench::new();
    let target = bench.store("target", "5.0", START);
    std::os::unix::fs::symlink(&target, bench.dir().join(FILE)).unwrap();
    let limiter = bench.builder().strict(true).build().unwrap();
    limiter.reserve().await.unwrap_err();
    assert_eq!(fs::read_to_string(&target).unwrap(), "5.0");

    fs::remove_file(bench.dir().join(FILE)).unwrap();
    let fifo = bench.dir().join(FILE);
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let error = limiter.reserve().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongFileType, "{error}");
}

#[tokio::test]
async fn a_lock_that_is_never_let_go_of_does_not_hang() {
    let bench = Bench::new();
    let path = bench.store(FILE, "", START);
    let holder = File::options().write(true).open(&path).unwrap();
    fs2::FileExt::lock_exclusive(&holder).unwrap();
    let builder = bench.builder().lock_timeout(Duration::from_millis(20));
    let error = builder
        .clone()
        .strict(true)
        .build()
        .unwrap()
        .reserve()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(!builder.build().unwrap().reserve().await.unwrap().is_shared());
    drop(holder);
    assert!(bench.limiter().reserve().await.unwrap().is_shared());
}

#[cfg(unix)]
#[tokio::test]
async fn a_file_that_is_removed_while_its_lock_is_awaited_is_made_anew() {
    let bench = Bench::new();
    let path = bench.store(FILE, "", START);
    let holder = File::options().write(true).open(&path).unwrap();
    fs2::FileExt::lock_exclusive(&holder).unwrap();
    let limiter = bench.limiter();
    let waiter = tokio::spawn(async move { limiter.reserve().await });
    fs::remove_file(&path).unwrap();
    drop(holder);
    assert!(waiter.await.unwrap().unwrap().is_shared());
    assert!(!fs::read_to_string(&path).unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn old_buckets_are_swept_and_others_are_left_alone() {
    let bench = Bench::new();
    let old = START - bucket::SWEEP_AFTER.as_secs_f64() - 1.0;
    let long_ago = format!("{old:?}");
    let gone = [
        bench.store("e2b-sandbox-a.bucket", &long_ago, old),
        bench.store("e2b-sandbox-b.bucket", "", old),
        bench.store("e2b-sandbox-c.bucket", "corrupt", old),
    ];
    let locked = bench.store("e2b-sandbox-d.bucket", &long_ago, old);
    let holder = File::options().write(true).open(&locked).unwrap();
    fs2::FileExt::lock_exclusive(&holder).unwrap();
    let kept = [
        locked,
        bench.store("e2b-sandbox-e.bucket", &long_ago, old + 2.0),
        bench.store("e2b-sandbox-f.bucket", "1000001.0", old),
        bench.store("notes.txt", &long_ago, old),
        bench.store(FILE, &long_ago, old),
    ];
    slots(&bench.limiter(), 1).await;
    assert!(gone.iter().all(|path| !path.exists()));
    assert!(kept.iter().all(|path| path.exists()));
    drop(holder);
}

#[test]
fn settings_that_make_no_sense_name_their_field() {
    let bench_free = || Limiter::builder("x").dir("/nonexistent").scope(RunScope::mint());
    for rate in [-1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e6, 1e-300, 1e-9] {
        let error = bench_free().per_second(rate).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
        assert_eq!(error.field(), Some("rate"), "{rate}");
    }
    for name in ["", "a/b", "a b", "a\0", &"x".repeat(65)] {
        let error = Limiter::builder(name).per_second(1.0).build().unwrap_err();
        assert_eq!(error.field(), Some("name"), "{name:?}");
    }
    for backlog in [Duration::ZERO, Duration::MAX] {
        let error = bench_free().max_backlog(backlog).build().unwrap_err();
        assert_eq!(error.field(), Some("max_backlog"));
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_rate_nothing_waits_and_nothing_is_written() {
    let bench = Bench::new();
    let zero = bench.builder().per_second(0.0).build().unwrap();
    let unset = Limiter::builder("x").build().unwrap();
    for limiter in [zero, unset, Limiter::unlimited()] {
        assert!(!limiter.is_enabled());
        assert_eq!(limiter.path(), None);
        let before = Instant::now();
        limiter.acquire().await.unwrap();
        limiter.acquire().await.unwrap();
        assert_eq!(before.elapsed(), Duration::ZERO);
    }
    assert!(!bench.dir().exists());
}

#[tokio::test(start_paused = true)]
async fn a_rate_per_minute_is_a_sixtieth() {
    let bench = Bench::new();
    let limiter = bench.builder().per_minute(30.0).build().unwrap();
    assert_eq!(slots(&limiter, 2).await, [START, START + 2.0]);
}

#[tokio::test(start_paused = true)]
async fn two_hundred_callers_of_one_process_get_two_hundred_slots_in_their_order() {
    let bench = Bench::new();
    let limiter = bench.limiter();
    let mut callers = Vec::new();
    for _ in 0..200 {
        let limiter = limiter.clone();
        callers.push(tokio::spawn(
            async move { limiter.reserve().await.unwrap().unix_seconds() },
        ));
    }
    for (number, caller) in (0..200).zip(callers) {
        assert_eq!(caller.await.unwrap(), START + f64::from(number) * 0.5);
    }
}
