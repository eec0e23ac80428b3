//! What came of a run: as an exit code, as words, as JSON.

use std::error::Error as _;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use runtime_core::egress::EgressLog;
use runtime_core::{Captured, Error, ErrorKind, Output, PartialOutput, Result, Retry};
use serde_json::{Map, Value, json};

use super::OWN_FAILURE;

/// After `--timeout`, as `timeout(1)` does.
const TIMED_OUT: u8 = 124;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// 128 + SIGPIPE.
const NOBODY_READS: u8 = 141;

/// How the use of the box ended.
pub(super) enum Ending {
    /// The program ended by itself or by a signal.
    Ended(Output),
    /// The program was killed when its time was up.
    TimedOut(Error, PartialOutput),
    /// A signal to us, after which we exit with this code.
    Interrupted(i32),
    /// Our output is closed; the program was killed, as the kernel would have killed it.
    NobodyReads,
    /// Something else failed.
    Failed(Error),
}

impl Ending {
    /// From what running the program came to; `limited` if it had a deadline of the user's.
    pub(super) fn of(result: Result<Output>, limited: bool) -> Self {
        match result {
            Ok(output) => Self::Ended(output),
            Err(mut error) if limited && error.kind() == ErrorKind::Timeout => {
                let partial = error.take_partial_output().unwrap_or_default();
                Self::TimedOut(error, partial)
            }
            Err(error) => Self::Failed(error),
        }
    }

    /// Whether the program ran and the box is still there.
    pub(super) fn ran(&self) -> bool {
        matches!(self, Self::Ended(_) | Self::TimedOut(..))
    }
}

/// The outcome of a run.
pub(super) struct Report {
    pub(super) ending: Ending,
    /// What failed besides: transfers, the deletion.
    pub(super) errors: Vec<Error>,
    pub(super) phases: Vec<(&'static str, Duration)>,
    /// The record of the box; empty if there was none.
    pub(super) sandbox: Map<String, Value>,
    /// What the box asked for, where a policy was enforced by us.
    pub(super) egress: Option<EgressLog>,
    /// Whether what was used is to be printed.
    pub(super) record_egress: bool,
}

impl Report {
    pub(super) fn new(ending: Ending) -> Self {
        Self {
            ending,
            errors: Vec::new(),
            phases: Vec::new(),
            sandbox: Map::new(),
            egress: None,
            record_egress: false,
        }
    }

    /// Nothing was created.
    pub(super) fn refused(error: Error) -> Self {
        Self::new(Ending::Failed(error))
    }

    pub(super) fn exit_code(&self) -> u8 {
        let code = match &self.ending {
            Ending::Ended(output) => byte(output.status.shell_code()),
            Ending::TimedOut(..) => TIMED_OUT,
            Ending::Interrupted(code) => byte(*code),
            Ending::NobodyReads => NOBODY_READS,
            Ending::Failed(error) => match error.kind() {
                ErrorKind::ProgramNotFound => NOT_FOUND,
                ErrorKind::ProgramNotExecutable => NOT_EXECUTABLE,
                _ => OWN_FAILURE,
            },
        };
        // A program that succeeded while its results could not be fetched is no success.
        match code {
            0 if !self.errors.is_empty() => OWN_FAILURE,
            code => code,
        }
    }

    /// The error of the ending, then the others.
    fn all_errors(&self) -> impl Iterator<Item = &Error> {
        let first = match &self.ending {
            Ending::Failed(error) | Ending::TimedOut(error, _) => Some(error),
            _ => None,
        };
        first.into_iter().chain(&self.errors)
    }

    /// Says on standard error what went wrong, if anything did. A program's own failure is its own to explain.
    pub(super) fn explain(&self) {
        for error in self.all_errors() {
            eprint!("{}", explained(error));
        }
        if let Ending::Ended(output) = &self.ending
            && output.status.oom_killed()
        {
            eprintln!("note: the program was killed because memory ran out");
        }
        if let Some(egress) = &self.egress {
            eprint!("{}", egress_summary(egress, self.record_egress));
        }
    }

    pub(super) fn json(&self) -> Value {
        let (status, output) = match &self.ending {
            Ending::Ended(output) if output.status.signal().is_some() => ("signaled", Some(output)),
            Ending::Ended(output) => ("exited", Some(output)),
            Ending::TimedOut(..) => ("timeout", None),
            Ending::Interrupted(_) => ("interrupted", None),
            Ending::NobodyReads | Ending::Failed(_) => ("failed", None),
        };
        let (stdout, stderr) = match (&self.ending, output) {
            (_, Some(output)) => (Some(&output.stdout), Some(&output.stderr)),
            (Ending::TimedOut(_, partial), _) => (Some(&partial.stdout), Some(&partial.stderr)),
            (Ending::Failed(error), _) => match error.partial_output() {
                Some(partial) => (Some(&partial.stdout), Some(&partial.stderr)),
                None => (None, None),
            },
            _ => (None, None),
        };
        let mut seconds: Map<String, Value> = Map::new();
        for (name, duration) in &self.phases {
            let so_far = seconds.get(*name).and_then(Value::as_f64).unwrap_or(0.0);
            seconds.insert((*name).to_owned(), Value::from(so_far + duration.as_secs_f64()));
        }
        let mut errors = self.all_errors().map(error_json);
        json!({
            "status": status,
            "exit_code": self.exit_code(),
            "code": output.and_then(|output| output.status.code()),
            "signal": output.and_then(|output| output.status.signal()),
            "oom_killed": output.is_some_and(|output| output.status.oom_killed()),
            "stdout": stdout.map(captured_json),
            "stderr": stderr.map(captured_json),
            "seconds": seconds,
            "sandbox": match self.sandbox.is_empty() {
                true => Value::Null,
                false => Value::Object(self.sandbox.clone()),
            },
            "egress": self.egress.as_ref().map(|egress| json!({
                "refused": egress.refused(),
                "used": egress.used(),
            })),
            "error": errors.next(),
            "further_errors": errors.collect::<Vec<_>>(),
        })
    }
}

/// What was refused and the rule that would admit each; and what was reached, if that is wanted.
fn egress_summary(egress: &EgressLog, record: bool) -> String {
    let mut text = String::new();
    let refused = egress.refused();
    if !refused.is_empty() {
        text.push_str("refused by the network policy:\n");
    }
    for refusal in refused {
        let times = if refusal.count == 1 {
            "once".to_owned()
        } else {
            format!("{} times", refusal.count)
        };
        text.push_str(&format!("  {} ({}, {times})", refusal.destination, refusal.reason));
        match refusal.proposal {
            Some(rule) => text.push_str(&format!("; to admit it: --allow {rule}\n")),
            None => text.push_str("; no rule admits it\n"),
        }
    }
    if egress.uncounted() > 0 {
        text.push_str(&format!(
            "  and {} attempts to further destinations\n",
            egress.uncounted()
        ));
    }
    if record {
        let used = egress.used();
        text.push_str(match used.is_empty() {
            true => "nothing was reached over the network\n",
            false => "reached over the network, as an allowlist:\n",
        });
        for rule in used {
            text.push_str(&format!("  --allow {rule}\n"));
        }
    }
    text
}

fn byte(code: i32) -> u8 {
    // What a parent sees of an exit code is its low byte.
    code.to_le_bytes()[0]
}

/// Output as text if it is, else as base64: nothing is lost either way.
fn captured_json(captured: &Captured) -> Value {
    let mut fields = Map::new();
    match std::str::from_utf8(&captured.bytes) {
        Ok(text) => fields.insert("text".to_owned(), Value::from(text)),
        Err(_) => fields.insert("base64".to_owned(), Value::from(STANDARD.encode(&captured.bytes))),
    };
    fields.insert("dropped_bytes".to_owned(), Value::from(captured.dropped));
    Value::Object(fields)
}

fn error_json(error: &Error) -> Value {
    json!({
        "kind": error.kind().as_str(),
        "message": error.message(),
        "provider": error.provider(),
        "sandbox": error.sandbox(),
        "sandbox_id": error.sandbox_id(),
        "operation": error.operation(),
        "field": error.field(),
        "boundary": error.stop_condition(),
        "retry": match error.retry() {
            Retry::Temporary => "temporary",
            Retry::Permanent => "permanent",
            Retry::Exhausted => "exhausted",
        },
        "retry_after_seconds": error.retry_after().map(|delay| delay.as_secs_f64()),
        "hint": hint(error),
        "caused_by": causes(error),
    })
}

fn causes(error: &Error) -> Vec<String> {
    let mut causes: Vec<String> = Vec::new();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        // A message that already ends with its cause need not be followed by it.
        if !error.message().ends_with(&text) && causes.last() != Some(&text) {
            causes.push(text);
        }
        next = cause.source();
    }
    causes
}

/// An error with everything that it knows, one fact a line.
fn explained(error: &Error) -> String {
    let sandbox = match (error.sandbox(), error.sandbox_id()) {
        (Some(name), Some(id)) if name != id => Some(format!("{name} ({id})")),
        (name, _) => name.map(str::to_owned),
    };
    let facts = [
        ("kind", Some(error.kind().as_str().to_owned())),
        ("provider", error.provider().map(str::to_owned)),
        ("sandbox", sandbox),
        ("operation", error.operation().map(str::to_owned)),
        ("field", error.field().map(str::to_owned)),
    ];
    let mut text = format!("error: {}\n", error.message());
    for (name, value) in facts {
        if let Some(value) = value {
            text.push_str(&format!("  {name}: {value}\n"));
        }
    }
    for cause in causes(error) {
        text.push_str(&format!("  caused by: {cause}\n"));
    }
    if let Some(hint) = hint(error) {
        text.push_str(&format!("hint: {hint}\n"));
    }
    text
}

/// What to do about it, where the message does not say so already.
fn hint(error: &Error) -> Option<&'static str> {
    Some(match (error.kind(), error.field()) {
        (ErrorKind::InvalidConfig, Some("image")) => {
            "an image is for providers that start from one; see `cargo xtask providers`"
        }
        (ErrorKind::InvalidArgument, Some("argv")) => "put the program behind `--`: cargo xtask run -- PROGRAM ARG...",
        (ErrorKind::AlreadyExists, Some("name")) => "choose another --name, or leave it out for a random one",
        (ErrorKind::NotFound, Some("workdir")) => "name a directory that exists in the sandbox with --workdir",
        (ErrorKind::Timeout, _) if error.operation() == Some("run_program") => {
            "give it longer with --timeout, or leave that out for no limit"
        }
        (ErrorKind::ProgramNotFound, _) => "the program must be in the sandbox: install it, or --upload it",
        (ErrorKind::ProgramNotExecutable, _) => "give the file its x bit, or name its interpreter first",
        (ErrorKind::Unauthorized, _) => "set the provider's credentials in the environment",
        (ErrorKind::Unavailable | ErrorKind::RateLimited, _) => "try again later",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime_core::ExitStatus;

    fn ended(status: ExitStatus) -> Report {
        Report::new(Ending::Ended(Output {
            status,
            stdout: Captured::default(),
            stderr: Captured::default(),
        }))
    }

    #[test]
    fn each_ending_has_its_exit_code() {
        let failed = |kind| Report::refused(Error::new(kind, "x")).exit_code();
        assert_eq!(ended(ExitStatus::exited(42)).exit_code(), 42);
        assert_eq!(ended(ExitStatus::signaled(9)).exit_code(), 137);
        assert_eq!(failed(ErrorKind::ProgramNotFound), 127);
        assert_eq!(failed(ErrorKind::ProgramNotExecutable), 126);
        assert_eq!(
            failed(ErrorKind::Timeout),
            125,
            "a timeout of ours is not the program's"
        );
        assert_eq!(Report::new(Ending::Interrupted(143)).exit_code(), 143);
    }

    #[test]
    fn a_success_whose_results_were_lost_is_none_but_a_failure_keeps_its_code() {
        let with_error = |status| Report {
            errors: vec![Error::new(ErrorKind::NotFound, "x")],
            ..ended(status)
        };
        assert_eq!(with_error(ExitStatus::exited(0)).exit_code(), 125);
        assert_eq!(with_error(ExitStatus::exited(3)).exit_code(), 3);
    }

    #[test]
    fn output_that_is_no_text_is_kept_as_base64() {
        let captured = |bytes: &'static [u8]| {
            captured_json(&Captured {
                bytes: bytes.into(),
                dropped: 0,
            })
        };
        assert_eq!(captured("é\n".as_bytes()), json!({"text": "é\n", "dropped_bytes": 0}));
        assert_eq!(captured(b"\xff\x00"), json!({"base64": "/wA=", "dropped_bytes": 0}));
    }

    #[test]
    fn an_error_is_explained_with_its_field_and_what_to_do() {
        let error = Error::new(ErrorKind::AlreadyExists, "it is there")
            .with_field("name")
            .with_provider("subprocess")
            .with_operation("provision");
        assert_eq!(
            explained(&error),
            "error: it is there\n  kind: already_exists\n  provider: subprocess\n  operation: provision\n  \
             field: name\nhint: choose another --name, or leave it out for a random one\n"
        );
    }
}
