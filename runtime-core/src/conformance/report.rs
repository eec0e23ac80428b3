//! What came of a run: as a table, as JSON, as a verdict for a test.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::capability::Capabilities;
use crate::conformance::case::Capability;

/// What came of one case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The box behaved.
    Passed,
    /// It did not, or it hung, or left something behind, or a declared gap is none.
    Failed,
    /// The provider declares that it lacks what the case needs, and so it is.
    Unsupported,
    /// The case could not be tried here; the message says why.
    Skipped,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Unsupported => "unsupported",
            Self::Skipped => "skipped",
        })
    }
}

/// One case of a [`Report`].
#[derive(Debug, Clone, Serialize)]
pub struct CaseReport {
    /// The case's name.
    pub name: &'static str,
    /// What the case needs.
    pub capabilities: &'static [Capability],
    /// What came of it.
    pub outcome: Outcome,
    /// How long it took.
    #[serde(rename = "seconds", serialize_with = "as_seconds")]
    pub duration: Duration,
    /// Why it failed or was skipped, or what the provider lacks. Empty for a pass.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

fn as_seconds<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((duration.as_secs_f64() * 1000.0).round() / 1000.0)
}

/// How many cases came to what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// [`Outcome::Passed`].
    pub passed: usize,
    /// [`Outcome::Failed`].
    pub failed: usize,
    /// [`Outcome::Unsupported`].
    pub unsupported: usize,
    /// [`Outcome::Skipped`].
    pub skipped: usize,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} unsupported, {} skipped",
            self.passed, self.failed, self.unsupported, self.skipped
        )
    }
}

/// What came of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The target's name.
    pub target: String,
    /// What its boxes declare.
    pub capabilities: Capabilities,
    /// Every case that was chosen, in the order of the suite.
    pub cases: Vec<CaseReport>,
}

impl Report {
    /// The count of outcomes.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary::default();
        for case in &self.cases {
            *match case.outcome {
                Outcome::Passed => &mut summary.passed,
                Outcome::Failed => &mut summary.failed,
                Outcome::Unsupported => &mut summary.unsupported,
                Outcome::Skipped => &mut summary.skipped,
            } += 1;
        }
        summary
    }

    /// The cases that failed.
    pub fn failures(&self) -> impl Iterator<Item = &CaseReport> {
        self.cases.iter().filter(|case| case.outcome == Outcome::Failed)
    }

    /// Every case by name, then the count.
    pub fn table(&self) -> String {
        use fmt::Write;
        let width = self.cases.iter().map(|case| case.name.len()).max().unwrap_or(0);
        let mut table = String::new();
        for case in &self.cases {
            let seconds = case.duration.as_secs_f64();
            let line = format!(
                "{:width$}  {:11}  {seconds:7.2} s  {}",
                case.name, case.outcome, case.message
            );
            // Writing to a string cannot fail.
            let _ = writeln!(table, "{}", line.trim_end());
        }
        let _ = writeln!(table, "{}: {}", self.target, self.summary());
        table
    }

    /// The report as data: `target`, `capabilities`, `summary`, and `cases` with `name`, `capabilities`, `outcome`,
    /// `seconds` and `message`.
    pub fn to_json(&self) -> serde_json::Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            let summary = serde_json::to_value(self.summary()).unwrap_or_default();
            fields.insert("summary".to_owned(), summary);
        }
        value
    }

    /// For tests.
    ///
    /// # Panics
    /// When a case failed, or none was chosen. The message is the table.
    #[track_caller]
    pub fn assert(&self) {
        assert!(!self.cases.is_empty(), "no case was chosen");
        assert!(self.summary().failed == 0, "\n{}", self.table());
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table())
    }
}
