//! Runs cases: each on a thread and an executor of its own, under a deadline, and looks for what is left behind.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::conformance::case::{Case, Gap, Run};
use crate::conformance::cases::cases;
use crate::conformance::context::Context;
use crate::conformance::report::{CaseReport, Outcome, Report};
use crate::conformance::target::Target;
use crate::conformance::verdict::{Failure, Verdict};

/// How long the boxes of a case may take to be gone after it.
const TEARDOWN_PATIENCE: Duration = Duration::from_secs(180);

/// How long a thread may outlive its case's deadline before it is left behind.
const THREAD_PATIENCE: Duration = Duration::from_secs(30);

/// Which cases to run, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// Run the cases whose name contains one of these; all if empty.
    pub filter: Vec<String>,
    /// A filter must be the whole name.
    pub exact: bool,
    /// Leave out the cases whose name contains one of these.
    pub skip: Vec<String>,
    /// How many cases run at once; at least 1. Default: twice the number of processors, as most of a case is waiting.
    pub concurrency: usize,
    /// Multiplies every case's deadline, for slow providers. Default: 1.
    pub patience: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            filter: Vec::new(),
            exact: false,
            skip: Vec::new(),
            concurrency: 2 * std::thread::available_parallelism().map_or(2, usize::from),
            patience: 1,
        }
    }
}

impl Options {
    /// Whether these options choose the case.
    pub fn chooses(&self, case: &Case) -> bool {
        let matches = |pattern: &String| match self.exact {
            true => case.name == pattern,
            false => case.name.contains(pattern.as_str()),
        };
        (self.filter.is_empty() || self.filter.iter().any(matches)) && !self.skip.iter().any(matches)
    }
}

/// Runs the chosen cases against a target. Blocks until all have ended; call it outside any executor.
///
/// A case that hangs fails at its deadline and the run goes on.
pub fn run(target: Arc<dyn Target>, options: &Options) -> Report {
    run_with(target, options, &|_| {})
}

/// As [`run`], telling each outcome when it is there.
pub(crate) fn run_with(target: Arc<dyn Target>, options: &Options, done: &(dyn Fn(&CaseReport) + Sync)) -> Report {
    let chosen: Vec<Case> = cases().into_iter().filter(|case| options.chooses(case)).collect();
    let reports: Mutex<Vec<Option<CaseReport>>> = Mutex::new(vec![None; chosen.len()]);
    let finish = |index: usize, report: CaseReport| {
        done(&report);
        if let Some(slot) = reports.lock().unwrap_or_else(PoisonError::into_inner).get_mut(index) {
            *slot = Some(report);
        }
    };
    let (alone, mut together): (Vec<_>, Vec<_>) = chosen.iter().enumerate().partition(|(_, case)| case.alone);
    // Those that may take long begin first, so that nobody waits for them alone.
    together.sort_by_key(|(_, case)| std::cmp::Reverse(case.deadline));
    let queue: Mutex<VecDeque<_>> = Mutex::new(together.into());
    std::thread::scope(|scope| {
        for _ in 0..options.concurrency.max(1) {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some((index, case)) = next else { break };
                    finish(index, run_case(&target, case, options.patience));
                }
            });
        }
    });
    for (index, case) in alone {
        finish(index, run_case(&target, case, options.patience));
    }
    let reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    Report {
        target: target.name().to_owned(),
        capabilities: target.config().capabilities(),
        cases: reports.into_iter().flatten().collect(),
    }
}

/// Runs one case. `patience` multiplies its deadline, as does the target's own.
pub fn run_case(target: &Arc<dyn Target>, case: &Case, patience: u32) -> CaseReport {
    let started = Instant::now();
    let (outcome, message) = judge(target, case, patience.max(1));
    CaseReport {
        name: case.name,
        capabilities: case.needs,
        outcome,
        duration: started.elapsed(),
        message,
    }
}

fn judge(target: &Arc<dyn Target>, case: &Case, patience: u32) -> (Outcome, String) {
    let capabilities = target.config().capabilities();
    let lacking: Vec<&str> = (case.needs.iter().filter(|need| !need.is_in(&capabilities)))
        .map(|need| need.as_str())
        .collect();
    let deadline = case.deadline * patience * target.patience().max(1);
    if lacking.is_empty() {
        return match attempt(target, case.run, deadline) {
            Ok(()) => (Outcome::Passed, String::new()),
            Err(failure) if failure.is_skip() => (Outcome::Skipped, failure.message().to_owned()),
            Err(failure) => (Outcome::Failed, failure.message().to_owned()),
        };
    }
    let lacking = format!("no {}", lacking.join(", "));
    match case.gap {
        Gap::Untested => (Outcome::Unsupported, lacking),
        Gap::Probe(probe) => match attempt(target, probe, deadline) {
            Ok(()) => (Outcome::Unsupported, lacking),
            Err(failure) if failure.is_skip() => (Outcome::Unsupported, lacking),
            Err(failure) => (Outcome::Failed, format!("{lacking}, but: {failure}")),
        },
        Gap::CaseFails => match attempt(target, case.run, deadline) {
            Ok(()) => (
                Outcome::Failed,
                format!("{lacking} is declared, but the case passes: the gap is none"),
            ),
            Err(_) => (Outcome::Unsupported, lacking),
        },
    }
}

/// Runs a case, or the probe of a gap, on a thread of its own.
fn attempt(target: &Arc<dyn Target>, run: Run, deadline: Duration) -> Verdict {
    let (sender, receiver) = mpsc::channel();
    let target = target.clone();
    let thread = std::thread::Builder::new().name("conformance-case".to_owned());
    thread
        .spawn(move || {
            let verdict = catch_unwind(AssertUnwindSafe(|| on_this_thread(target, run, deadline)));
            let verdict =
                verdict.unwrap_or_else(|panic| Err(Failure::new(format_args!("it panicked: {}", said(&*panic)))));
            // Nobody listens any more if the runner gave up on this thread.
            let _ = sender.send(verdict);
        })
        .map_err(Failure::from)?;
    let patience = deadline + TEARDOWN_PATIENCE + THREAD_PATIENCE;
    receiver.recv_timeout(patience).unwrap_or_else(|_| {
        Err(Failure::new(format_args!(
            "it blocked its thread for more than {patience:?}"
        )))
    })
}

fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(text), _) => text,
        (None, Some(text)) => text,
        (None, None) => "something that is no text",
    }
}

fn on_this_thread(target: Arc<dyn Target>, run: Run, deadline: Duration) -> Verdict {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let context = Context::new(target)?;
    let case = run(context.clone());
    let verdict = runtime.block_on(async {
        match tokio::time::timeout(deadline, case).await {
            Ok(verdict) => verdict,
            Err(_) => Err(Failure::new(format_args!("it hung: no end within {deadline:?}"))),
        }
    });
    // Whatever the verdict, nothing may stay behind; but what went wrong first is what is told.
    let gone = runtime.block_on(context.all_gone(TEARDOWN_PATIENCE));
    // Threads of dropped operations may still write into the scratch directory.
    runtime.shutdown_timeout(THREAD_PATIENCE);
    match verdict {
        Ok(()) => gone,
        Err(failure) => Err(failure),
    }
}

#[cfg(test)]
mod tests;
