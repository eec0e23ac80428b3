//! How envd says that a program has ended.

use runtime_core::{ExitStatus, Result};

use crate::error;
use crate::wire::process::EndEvent;

/// The status of an ended program.
pub(crate) fn exit_status(end: &EndEvent) -> Result<ExitStatus> {
    if let Some(name) = end.status.strip_prefix("signal: ") {
        let name = name.trim_end_matches(" (core dumped)");
        return match signal_number(name) {
            Some(number) => Ok(ExitStatus::signaled(number)),
            None => Err(error::unreadable(
                "the end of the program",
                format_args!("unknown signal {name:?}"),
            )),
        };
    }
    if end.exited || end.status.starts_with("exit status ") {
        return Ok(ExitStatus::exited(end.exit_code));
    }
    Err(error::unreadable(
        "the end of the program",
        format_args!("it says {:?}", end.status),
    ))
}

/// Signals by the names that envd's language gives them.
const SIGNALS: [(&str, i32); 31] = [
    ("hangup", 1),
    ("interrupt", 2),
    ("quit", 3),
    ("illegal instruction", 4),
    ("trace/breakpoint trap", 5),
    ("aborted", 6),
    ("bus error", 7),
    ("floating point exception", 8),
    ("killed", 9),
    ("user defined signal 1", 10),
    ("segmentation fault", 11),
    ("user defined signal 2", 12),
    ("broken pipe", 13),
    ("alarm clock", 14),
    ("terminated", 15),
    ("stack fault", 16),
    ("child exited", 17),
    ("continued", 18),
    ("stopped (signal)", 19),
    ("stopped", 20),
    ("stopped (tty input)", 21),
    ("stopped (tty output)", 22),
    ("urgent I/O condition", 23),
    ("CPU time limit exceeded", 24),
    ("file size limit exceeded", 25),
    ("virtual timer expired", 26),
    ("profiling timer expired", 27),
    ("window changed", 28),
    ("I/O possible", 29),
    ("power failure", 30),
    ("bad system call", 31),
];

fn signal_number(name: &str) -> Option<i32> {
    let known = SIGNALS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, number)| *number);
    known.or_else(|| name.strip_prefix("signal ")?.parse().ok())
}

/// The name that envd's language gives a signal.
#[cfg(feature = "emulator")]
pub(crate) fn signal_name(number: i32) -> String {
    match SIGNALS.iter().find(|(_, known)| *known == number) {
        Some((name, _)) => (*name).to_owned(),
        None => format!("signal {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime_core::ErrorKind;

    fn end(code: i32, exited: bool, status: &str) -> EndEvent {
        EndEvent {
            exit_code: code,
            exited,
            status: status.to_owned(),
            error: None,
        }
    }

    #[test]
    fn an_end_is_a_code_or_a_signal_and_never_made_up() {
        assert_eq!(
            exit_status(&end(0, true, "exit status 0")).expect("ended"),
            ExitStatus::exited(0)
        );
        assert_eq!(
            exit_status(&end(137, true, "exit status 137")).expect("ended"),
            ExitStatus::exited(137)
        );
        assert_eq!(
            exit_status(&end(-1, false, "signal: killed")).expect("ended"),
            ExitStatus::signaled(9)
        );
        let dumped = end(-1, false, "signal: segmentation fault (core dumped)");
        assert_eq!(exit_status(&dumped).expect("ended"), ExitStatus::signaled(11));
        assert_eq!(
            exit_status(&end(-1, false, "signal: signal 34")).expect("ended"),
            ExitStatus::signaled(34)
        );
        assert_eq!(
            exit_status(&end(0, false, "")).expect_err("says nothing").kind(),
            ErrorKind::Protocol
        );
        assert_eq!(
            exit_status(&end(-1, false, "signal: odd")).expect_err("unknown").kind(),
            ErrorKind::Protocol
        );
    }
}
