//! Which processes belong to one run.

use std::ffi::OsString;
use std::fmt;
use std::sync::OnceLock;

use crate::error::{Error, Result};
use crate::names::random_id;

/// The environment variable that carries the run's id from a run's entry point to its processes.
pub const RUN_ID_VAR: &str = "VF_RUN_ID";

static CURRENT: OnceLock<RunScope> = OnceLock::new();

/// The id of the run that this process belongs to. Limits are shared, and leftovers are found, by it.
///
/// ```
/// use runtime_core::scope::RunScope;
///
/// let scope = RunScope::new("team/run-7").unwrap();
/// assert_eq!(scope.path_safe(), "team--run-7");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RunScope {
    id: String,
    shared: bool,
}

impl RunScope {
    /// The run of this process: the [installed](Self::install) one, else `$VF_RUN_ID`, else an id minted once, with a
    /// warning, as limits of the run then cover this process alone.
    pub fn current() -> &'static RunScope {
        CURRENT.get_or_init(|| Self::from_variable(std::env::var_os(RUN_ID_VAR)))
    }

    /// A run with this id.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) naming `run_id`: empty or with NUL.
    pub fn new(id: impl Into<String>) -> Result<Self> {
        let id = id.into();
        if id.is_empty() || id.contains('\0') {
            return Err(Error::invalid_argument(
                "run_id",
                "a run's id must not be empty and must not contain NUL",
            ));
        }
        Ok(Self { id, shared: true })
    }

    /// A run with a fresh id of 32 hex digits, for an entry point that then installs it and hands
    /// [`RUN_ID_VAR`] to its children.
    pub fn mint() -> Self {
        Self {
            id: random_id(),
            shared: true,
        }
    }

    /// Makes this the run of the process. For an entry point, before anything asks for the current run.
    ///
    /// # Errors
    /// [`Phase`](crate::ErrorKind::Phase) when the process belongs to another run already.
    pub fn install(self) -> Result<()> {
        Self::install_in(&CURRENT, self)
    }

    fn install_in(current: &OnceLock<RunScope>, scope: RunScope) -> Result<()> {
        let wanted = scope.id.clone();
        let installed = current.get_or_init(|| scope);
        if installed.id == wanted {
            return Ok(());
        }
        Err(Error::new(
            crate::ErrorKind::Phase,
            format!("this process belongs to run {:?} already", installed.id),
        ))
    }

    fn from_variable(value: Option<OsString>) -> Self {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            // Bytes that are not UTF-8 are replaced: every process of the run replaces them the same way.
            let id = value.to_string_lossy().into_owned();
            return Self { id, shared: true };
        }
        let id = random_id();
        tracing::warn!(
            run_id = %id,
            "{RUN_ID_VAR} is not set: limits that are shared by a run cover this process alone"
        );
        Self { id, shared: false }
    }

    /// The id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whether other processes can know this id, that is, whether it was given rather than minted for want of one.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// The id with every `/` replaced by `--`, to be part of a file name.
    pub fn path_safe(&self) -> String {
        self.id.replace('/', "--")
    }
}

impl fmt::Display for RunScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::test_log::captured;

    #[test]
    fn the_variable_is_taken_as_it_is() {
        let (scope, log) = captured(|| RunScope::from_variable(Some("a/b/../c".into())));
        assert_eq!(scope.id(), "a/b/../c");
        assert_eq!(scope.path_safe(), "a--b--..--c");
        assert!(scope.is_shared());
        assert_eq!(log, "");
    }

    #[test]
    fn without_the_variable_an_id_is_minted_with_a_warning() {
        for value in [None, Some(OsString::new())] {
            let (scope, log) = captured(|| RunScope::from_variable(value));
            assert_eq!(scope.id().len(), 32);
            assert!(scope.id().bytes().all(|byte| byte.is_ascii_hexdigit()));
            assert!(!scope.is_shared());
            assert!(log.contains("WARN") && log.contains("VF_RUN_ID is not set"), "{log}");
        }
    }

    #[test]
    fn the_current_run_stays_the_same() {
        assert!(std::ptr::eq(RunScope::current(), RunScope::current()));
    }

    #[test]
    fn a_run_is_installed_once_and_the_same_one_again() {
        let current = OnceLock::new();
        RunScope::install_in(&current, RunScope::new("one").unwrap()).unwrap();
        RunScope::install_in(&current, RunScope::new("one").unwrap()).unwrap();
        let error = RunScope::install_in(&current, RunScope::new("two").unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Phase);
        assert_eq!(current.get().map(RunScope::id), Some("one"));
        assert_ne!(RunScope::mint().id(), RunScope::mint().id());
    }

    #[test]
    fn an_empty_id_is_refused() {
        for id in ["", "a\0b"] {
            let error = RunScope::new(id).unwrap_err();
            assert_eq!(error.field(), Some("run_id"));
        }
    }

    #[cfg(unix)]
    #[test]
    fn an_id_that_is_not_utf8_is_still_one_id() {
        use std::os::unix::ffi::OsStringExt;
        let scope = || RunScope::from_variable(Some(OsString::from_vec(vec![b'a', 0xff, b'/'])));
        assert_eq!(scope().path_safe(), "a\u{fffd}--");
        assert_eq!(scope(), scope());
    }
}
