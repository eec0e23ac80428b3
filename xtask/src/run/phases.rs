//! Where a run is: timed for the report, and shown on a terminal while it lasts.
//!
//! One line with a spinner needs no crate: a thread that rewrites the line until it is told to clear it. It works while
//! the executor is busy, and prints nothing where nobody looks.

use std::io::{IsTerminal, Write};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const FRAMES: [&str; 10] = ["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"];
const TICK: Duration = Duration::from_millis(100);

/// Times the phases of one run.
pub(super) struct Phases {
    started: Instant,
    shown: bool,
    durations: Vec<(&'static str, Duration)>,
}

impl Phases {
    pub(super) fn start() -> Self {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self {
            started: Instant::now(),
            shown: !dumb && std::io::stderr().is_terminal(),
            durations: Vec::new(),
        }
    }

    /// Runs `work` as the phase `name`. What a phase that is dropped halfway took is not recorded.
    pub(super) async fn during<T>(&mut self, name: &'static str, shown: &str, work: impl Future<Output = T>) -> T {
        let spinner = self.shown.then(|| Spinner::start(shown.to_owned()));
        let value = self.quietly(name, work).await;
        drop(spinner);
        value
    }

    /// As [`during`](Self::during), without a word: the program has the terminal.
    pub(super) async fn quietly<T>(&mut self, name: &'static str, work: impl Future<Output = T>) -> T {
        let started = Instant::now();
        let value = work.await;
        self.durations.push((name, started.elapsed()));
        value
    }

    /// Every finished phase, and the time since the start.
    pub(super) fn finish(self) -> Vec<(&'static str, Duration)> {
        let mut durations = self.durations;
        durations.push(("total", self.started.elapsed()));
        durations
    }
}

/// A line on standard error with what goes on and for how long, until it is dropped.
struct Spinner {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Spinner {
    fn start(label: String) -> Self {
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("spinner".to_owned()).spawn(move || {
            let started = Instant::now();
            let mut drawn = false;
            for frame in FRAMES.iter().cycle() {
                // The first frame comes after a tick: what is quicker is not worth a flicker.
                if stopped.recv_timeout(TICK) != Err(mpsc::RecvTimeoutError::Timeout) {
                    break;
                }
                let mut stderr = std::io::stderr().lock();
                let _ = write!(
                    stderr,
                    "\r{frame} {label} {:.1} s\x1b[K",
                    started.elapsed().as_secs_f64()
                );
                let _ = stderr.flush();
                drawn = true;
            }
            if drawn {
                let _ = write!(std::io::stderr(), "\r\x1b[K");
            }
        });
        Self {
            stop: Some(stop),
            thread: thread.ok(),
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
