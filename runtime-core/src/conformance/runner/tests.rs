//! The runner against a provider that can do nothing.

use async_trait::async_trait;
use serde_json::Value;

use super::*;
use crate::capability::Capabilities;
use crate::conformance::case::{Capability, case, probe};
use crate::conformance::target::BoxRef;
use crate::conformance::verdict::{ensure, ensure_eq};
use crate::{BoxSpec, Error, Runtime, RuntimeConfig};

#[derive(Debug, Clone)]
struct Nothing;

impl RuntimeConfig for Nothing {
    fn tag(&self) -> &'static str {
        "nothing"
    }

    fn validate(&self) -> crate::Result<()> {
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::minimal()
    }

    fn to_value(&self) -> Value {
        serde_json::json!({"type": "nothing"})
    }

    fn build(&self, _: BoxSpec) -> crate::Result<Arc<dyn Runtime>> {
        Err(Error::unsupported("nothing is built"))
    }

    fn boxed_clone(&self) -> Box<dyn RuntimeConfig> {
        Box::new(self.clone())
    }
}

#[async_trait]
impl Target for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }

    fn config(&self) -> Box<dyn RuntimeConfig> {
        Box::new(self.clone())
    }

    async fn leftovers(&self, boxes: &[BoxRef]) -> Result<Vec<String>, String> {
        match boxes {
            [known] if known.name == "unaskable" => Err("the provider is away".to_owned()),
            _ => Ok(Vec::new()),
        }
    }
}

fn outcome(case: Case) -> (Outcome, String) {
    let target: Arc<dyn Target> = Arc::new(Nothing);
    let report = run_case(&target, &case, 1);
    (report.outcome, report.message)
}

async fn passes(_: Context) -> Verdict {
    Ok(())
}

async fn fails(_: Context) -> Verdict {
    ensure_eq!(1 + 1, 3, "the sum");
    Ok(())
}

async fn meets_an_error(cx: Context) -> Verdict {
    cx.sandbox().await?;
    Ok(())
}

async fn panics(_: Context) -> Verdict {
    panic!("out of order");
}

async fn hangs(_: Context) -> Verdict {
    std::future::pending().await
}

async fn skips(_: Context) -> Verdict {
    Err(Failure::skip("no moon tonight"))
}

async fn leaves_something(cx: Context) -> Verdict {
    let made = cx.builder_named("unaskable").provision().await;
    ensure!(made.is_err(), "something was built");
    Ok(())
}

const PAUSE: &[Capability] = &[Capability::Pause];

#[test]
fn a_case_passes_fails_or_is_skipped() {
    assert_eq!(outcome(case!("a/case", passes)), (Outcome::Passed, String::new()));
    let (failed, message) = outcome(case!("a/case", fails));
    assert_eq!(failed, Outcome::Failed);
    assert!(message.starts_with("the sum: got 2, want 3 (tests.rs:"), "{message}");
    let (failed, message) = outcome(case!("a/case", meets_an_error));
    assert_eq!(failed, Outcome::Failed);
    // An error that was passed on with `?` tells the place of the `?`.
    assert!(
        message.contains("nothing is built") && message.contains("(tests.rs:"),
        "{message}"
    );
    let skipped = (Outcome::Skipped, "no moon tonight".to_owned());
    assert_eq!(outcome(case!("a/case", skips)), skipped);
}

#[test]
fn a_panic_and_a_hang_are_failures() {
    let (failed, message) = outcome(case!("a/case", panics));
    assert_eq!(failed, Outcome::Failed);
    assert!(message.contains("out of order"), "{message}");
    let (failed, message) = outcome(case!("a/case", hangs).deadline(0));
    assert_eq!(failed, Outcome::Failed);
    assert!(message.contains("it hung"), "{message}");
}

#[test]
fn a_case_that_cannot_show_that_nothing_is_left_fails() {
    let (failed, message) = outcome(case!("a/case", leaves_something));
    assert_eq!(failed, Outcome::Failed);
    assert!(message.contains("the provider is away"), "{message}");
}

#[test]
fn a_gap_is_unsupported_when_it_is_one_and_a_failure_when_it_is_none() {
    let unsupported = (Outcome::Unsupported, "no pause".to_owned());
    assert_eq!(outcome(case!("a/case", fails).needs(PAUSE)), unsupported);
    let (failed, message) = outcome(case!("a/case", passes).needs(PAUSE));
    assert_eq!(failed, Outcome::Failed);
    assert!(message.contains("the gap is none"), "{message}");
    assert_eq!(
        outcome(case!("a/case", panics).needs(PAUSE).or_else(probe!(passes))),
        unsupported
    );
    let (failed, message) = outcome(case!("a/case", passes).needs(PAUSE).or_else(probe!(fails)));
    assert_eq!(failed, Outcome::Failed);
    assert!(message.starts_with("no pause, but: the sum"), "{message}");
    assert_eq!(
        outcome(case!("a/case", passes).needs(PAUSE).gap_untested()),
        unsupported
    );
}

#[test]
fn a_report_lists_every_case_and_fails_for_one() {
    let options = Options {
        filter: ["lifecycle/pause-and-resume", "exec/argv-arrives-verbatim"]
            .map(str::to_owned)
            .to_vec(),
        exact: true,
        concurrency: 2,
        ..Options::default()
    };
    let report = run(Arc::new(Nothing), &options);
    let names: Vec<_> = report.cases.iter().map(|case| case.name).collect();
    assert_eq!(names, ["exec/argv-arrives-verbatim", "lifecycle/pause-and-resume"]);
    assert_eq!(report.summary().failed, 2);
    let table = report.table();
    assert!(table.contains("exec/argv-arrives-verbatim  FAILED"), "{table}");
    assert!(
        table.ends_with("nothing: 0 passed, 2 failed, 0 unsupported, 0 skipped\n"),
        "{table}"
    );
    let json = report.to_json();
    assert_eq!(json["target"], "nothing");
    assert_eq!(json["summary"]["failed"], 2);
    assert_eq!(json["cases"][1]["capabilities"], serde_json::json!(["pause"]));
    assert_eq!(json["cases"][0]["outcome"], "failed");
    assert!(json["capabilities"]["live_processes"] == false && json["cases"][0]["seconds"].is_f64());
    let asserted = catch_unwind(AssertUnwindSafe(|| report.assert()));
    assert!(asserted.is_err(), "a failure makes a test fail");
    let nothing = Options {
        filter: vec!["no such case".to_owned()],
        ..Options::default()
    };
    let report = run(Arc::new(Nothing), &nothing);
    let asserted = catch_unwind(AssertUnwindSafe(|| report.assert()));
    assert!(asserted.is_err(), "an empty run proves nothing");
}
