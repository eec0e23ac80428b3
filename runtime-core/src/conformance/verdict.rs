//! What a case says of itself.

use std::fmt;
use std::panic::Location;

/// Nothing, or why the case did not pass.
pub type Verdict = Result<(), Failure>;

/// Why a case did not pass. Any error becomes one, with the place at which it did.
#[derive(Debug)]
pub struct Failure {
    message: String,
    skipped: bool,
}

impl Failure {
    /// The box did not behave.
    #[track_caller]
    pub fn new(message: impl fmt::Display) -> Self {
        let place = Location::caller();
        let file = place.file().rsplit('/').next().unwrap_or_default();
        Self {
            message: format!("{message} ({file}:{})", place.line()),
            skipped: false,
        }
    }

    /// The case cannot be tried here, for this reason.
    pub fn skip(reason: impl fmt::Display) -> Self {
        Self {
            message: reason.to_string(),
            skipped: true,
        }
    }

    /// Whether the case could not be tried.
    pub fn is_skip(&self) -> bool {
        self.skipped
    }

    /// What was wrong, or the reason for not trying.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl<E: std::error::Error> From<E> for Failure {
    #[track_caller]
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        Self::new(message)
    }
}

/// A value for a message, cut to a length that one can read.
pub(crate) fn shown(value: &impl fmt::Debug) -> String {
    const LIMIT: usize = 400;
    let text = format!("{value:?}");
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}… ({} more bytes)", &text[..end], text.len() - end),
        None => text,
    }
}

/// Ends the case unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::conformance::Failure::new(format_args!($($message)+)));
        }
    };
}

/// Ends the case unless both sides are equal.
macro_rules! ensure_eq {
    ($left:expr, $right:expr) => {
        ensure_eq!($left, $right, "`{}`", stringify!($left))
    };
    ($left:expr, $right:expr, $($what:tt)+) => {
        match (&$left, &$right) {
            (left, right) => {
                if *left != *right {
                    return Err($crate::conformance::Failure::new(format_args!(
                        "{}: got {}, want {}",
                        format_args!($($what)+),
                        $crate::conformance::verdict::shown(left),
                        $crate::conformance::verdict::shown(right),
                    )));
                }
            }
        }
    };
}

pub(crate) use {ensure, ensure_eq};
