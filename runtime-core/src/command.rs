//! What to run and what came of it: [`Command`], [`Output`], [`ExitStatus`].

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::error::{Error, Result};

/// Bytes of each output stream that a [`Command`] keeps unless told otherwise: 128 MiB.
pub const DEFAULT_OUTPUT_LIMIT: u64 = 128 << 20;

/// Environment variables. Its `Debug` shows names only: values are secrets more often than not.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Env(BTreeMap<OsString, OsString>);

impl Env {
    /// No variables.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets one variable, replacing an older value.
    pub fn set(&mut self, name: impl Into<OsString>, value: impl Into<OsString>) {
        self.0.insert(name.into(), value.into());
    }

    /// The value of one variable.
    pub fn get(&self, name: impl AsRef<OsStr>) -> Option<&OsStr> {
        self.0.get(name.as_ref()).map(OsString::as_os_str)
    }

    /// Removes one variable and returns its value.
    pub fn remove(&mut self, name: impl AsRef<OsStr>) -> Option<OsString> {
        self.0.remove(name.as_ref())
    }

    /// Whether there is no variable.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many variables there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Names and values in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        self.0.iter().map(|(name, value)| (name.as_os_str(), value.as_os_str()))
    }

    /// This environment with `over` laid on top: `over` wins.
    #[must_use]
    pub fn layered(&self, over: &Env) -> Env {
        if over.is_empty() {
            return self.clone();
        }
        let mut merged = self.clone();
        merged
            .0
            .extend(over.0.iter().map(|(name, value)| (name.clone(), value.clone())));
        merged
    }

    /// Checks every name and value.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) naming the variable, never its value: a name that is
    /// empty or contains `=` or NUL, a value that contains NUL.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in &self.0 {
            let bytes = name.as_encoded_bytes();
            if bytes.is_empty() || bytes.contains(&b'=') || bytes.contains(&0) {
                return Err(Error::invalid_argument(
                    format!("env.{}", name.to_string_lossy().escape_debug()),
                    "a variable's name must not be empty and must not contain '=' or NUL",
                ));
            }
            if value.as_encoded_bytes().contains(&0) {
                return Err(Error::invalid_argument(
                    format!("env.{}", name.to_string_lossy()),
                    "a variable's value must not contain NUL",
                ));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl<K: Into<OsString>, V: Into<OsString>> FromIterator<(K, V)> for Env {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(iter: I) -> Self {
        Self(
            iter.into_iter()
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
        )
    }
}

impl<K: Into<OsString>, V: Into<OsString>> Extend<(K, V)> for Env {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, iter: I) {
        self.0
            .extend(iter.into_iter().map(|(name, value)| (name.into(), value.into())));
    }
}

/// Which of the two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A piece of output, in the order in which it arrived on its stream. Boundaries carry no meaning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputChunk {
    /// The stream that it arrived on.
    pub stream: OutputStream,
    /// What arrived; never empty.
    pub bytes: Bytes,
}

/// A program to run: an argument vector, never a shell string.
///
/// ```
/// use std::time::Duration;
/// use runtime_core::Command;
///
/// let command = Command::new(["python3", "-c", "print('hi')"])
///     .env("PYTHONUNBUFFERED", "1")
///     .workdir("src")
///     .timeout(Duration::from_secs(30));
/// assert_eq!(command.argv()[0], "python3");
/// command.validate().unwrap();
/// ```
#[derive(Clone)]
pub struct Command {
    argv: Vec<OsString>,
    env: Env,
    workdir: Option<PathBuf>,
    stdin: Option<Bytes>,
    timeout: Option<Duration>,
    output_limit: u64,
    sink: Option<mpsc::Sender<OutputChunk>>,
}

impl Command {
    /// A command from its whole argument vector, program first.
    pub fn new<I, S>(argv: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: Into<OsString>,
    {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            env: Env::new(),
            workdir: None,
            stdin: None,
            timeout: None,
            output_limit: DEFAULT_OUTPUT_LIMIT,
            sink: None,
        }
    }

    /// `sh -c SCRIPT`, for when a shell is wanted.
    pub fn shell(script: impl Into<OsString>) -> Self {
        Self::new([OsString::from("sh"), OsString::from("-c"), script.into()])
    }

    /// Appends one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.argv.push(arg.into());
        self
    }

    /// Appends arguments.
    #[must_use]
    pub fn args<I, S>(mut self, args: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: Into<OsString>,
    {
        self.argv.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable for this command alone; it wins over the sandbox's.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.set(name, value);
        self
    }

    /// Sets several variables for this command alone.
    #[must_use]
    pub fn envs<I, K, V>(mut self, vars: I) -> Self
    where
        I: IntoIterator<Item = (K, V)>,
        K: Into<OsString>,
        V: Into<OsString>,
    {
        self.env.extend(vars);
        self
    }

    /// Runs in this directory instead of the sandbox's workdir; a relative path is under the workdir.
    #[must_use]
    pub fn workdir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.workdir = Some(dir.into());
        self
    }

    /// Bytes for standard input, followed by EOF. Without this call standard input is empty (`/dev/null`).
    /// Ignored by [`spawn`](crate::View::spawn), whose caller writes to the pipe.
    #[must_use]
    pub fn stdin(mut self, bytes: impl Into<Bytes>) -> Self {
        self.stdin = Some(bytes.into());
        self
    }

    /// Kills the whole process tree after this long. The call then fails with
    /// [`Timeout`](crate::ErrorKind::Timeout) and carries what was printed by then.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Keeps at most this many bytes of each stream (default: [`DEFAULT_OUTPUT_LIMIT`]). The rest is read and thrown
    /// away, so that the program does not block, and [`Captured::dropped`] counts it.
    #[must_use]
    pub fn output_limit(mut self, bytes: u64) -> Self {
        self.output_limit = bytes;
        self
    }

    /// Also sends the output to `sink` while the program runs. A full channel holds the program back; a closed one is
    /// ignored. Chunks are sent in full, whatever the output limit.
    #[must_use]
    pub fn stream_to(mut self, sink: mpsc::Sender<OutputChunk>) -> Self {
        self.sink = Some(sink);
        self
    }

    /// The argument vector.
    pub fn argv(&self) -> &[OsString] {
        &self.argv
    }

    /// The variables of this command alone.
    pub fn env_map(&self) -> &Env {
        &self.env
    }

    /// Checks what can be checked without a box.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) naming `argv`, `argv[N]`, `env.NAME` or `workdir`: an
    /// empty argv or program name, a NUL byte anywhere, a bad variable name.
    pub fn validate(&self) -> Result<()> {
        match self.argv.first() {
            None => {
                return Err(Error::invalid_argument(
                    "argv",
                    "argv is empty: it must start with a program",
                ));
            }
            Some(program) if program.is_empty() => {
                return Err(Error::invalid_argument("argv[0]", "the program's name is empty"));
            }
            Some(_) => {}
        }
        if let Some(index) = self.argv.iter().position(|arg| arg.as_encoded_bytes().contains(&0)) {
            return Err(Error::invalid_argument(
                format!("argv[{index}]"),
                "an argument must not contain NUL",
            ));
        }
        if let Some(dir) = &self.workdir {
            check_path("workdir", dir)?;
        }
        self.env.validate()
    }

    /// Splits the command into what a [`Runtime`](crate::Runtime) starts and how its output is collected.
    pub(crate) fn into_parts(self, base_env: &Env, workdir: &Path) -> (Exec, Collect) {
        let env = if base_env.is_empty() {
            self.env
        } else {
            base_env.layered(&self.env)
        };
        let workdir = match self.workdir {
            Some(dir) => workdir.join(dir),
            None => workdir.to_path_buf(),
        };
        let stdin = if self.stdin.is_some() {
            StdinMode::Piped
        } else {
            StdinMode::Null
        };
        let exec = Exec {
            argv: self.argv,
            env,
            workdir,
            stdin,
        };
        let collect = Collect {
            stdin: self.stdin,
            timeout: self.timeout,
            output_limit: self.output_limit,
            sink: self.sink,
        };
        (exec, collect)
    }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Command")
            .field("argv", &self.argv)
            .field("env", &self.env)
            .field("workdir", &self.workdir)
            .field("stdin_bytes", &self.stdin.as_ref().map(Bytes::len))
            .field("timeout", &self.timeout)
            .field("output_limit", &self.output_limit)
            .finish_non_exhaustive()
    }
}

impl<S: Into<OsString>> From<Vec<S>> for Command {
    fn from(argv: Vec<S>) -> Self {
        Self::new(argv)
    }
}

impl<S: Into<OsString>, const N: usize> From<[S; N]> for Command {
    fn from(argv: [S; N]) -> Self {
        Self::new(argv)
    }
}

/// A path in a box must be non-empty, free of NUL and of bounded length.
pub(crate) fn check_path(field: &'static str, path: &Path) -> Result<()> {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.is_empty() {
        return Err(Error::invalid_argument(field, "the path is empty"));
    }
    if bytes.contains(&0) {
        return Err(Error::invalid_argument(field, "a path must not contain NUL"));
    }
    if bytes.len() > 4095 {
        return Err(Error::invalid_argument(
            field,
            format!("a path has at most 4095 bytes, not {}", bytes.len()),
        ));
    }
    if bytes.split(|byte| *byte == b'/').any(|part| part.len() > 255) {
        return Err(Error::invalid_argument(field, "a file name has at most 255 bytes"));
    }
    Ok(())
}

/// What a [`Runtime`](crate::Runtime) starts: checked, with the environment layered and the workdir resolved.
#[derive(Clone, PartialEq, Eq)]
pub struct Exec {
    /// Program and arguments; never empty, never with NUL.
    pub argv: Vec<OsString>,
    /// The sandbox's and the command's variables, to be laid over the box's own.
    pub env: Env,
    /// Absolute path in the box.
    pub workdir: PathBuf,
    /// Where standard input comes from.
    pub stdin: StdinMode,
}

/// Where a program's standard input comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StdinMode {
    /// `/dev/null`: empty.
    Null,
    /// A pipe that the caller writes to.
    Piped,
}

impl fmt::Debug for Exec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exec")
            .field("argv", &self.argv)
            .field("env", &self.env)
            .field("workdir", &self.workdir)
            .field("stdin", &self.stdin)
            .finish()
    }
}

/// How the output of an [`Exec`] is collected.
pub struct Collect {
    /// Bytes for standard input; `None` is `/dev/null`.
    pub stdin: Option<Bytes>,
    /// Kill the whole process tree after this long.
    pub timeout: Option<Duration>,
    /// Keep at most this many bytes of each stream.
    pub output_limit: u64,
    /// Where chunks go while the program runs.
    pub sink: Option<mpsc::Sender<OutputChunk>>,
}

/// How a program ended. Exactly one of [`code`](Self::code) and [`signal`](Self::signal) is set: an end that nobody
/// observed is an error, never a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct ExitStatus {
    end: End,
    oom_killed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum End {
    Code(i32),
    Signal(i32),
}

impl ExitStatus {
    /// Exited with `code`.
    pub fn exited(code: i32) -> Self {
        Self {
            end: End::Code(code),
            oom_killed: false,
        }
    }

    /// Killed by signal number `signal`.
    pub fn signaled(signal: i32) -> Self {
        Self {
            end: End::Signal(signal),
            oom_killed: false,
        }
    }

    /// Marks that the kernel killed it because memory ran out.
    #[must_use]
    pub fn with_oom_killed(mut self, oom_killed: bool) -> Self {
        self.oom_killed = oom_killed;
        self
    }

    /// From a code in which a shell or an engine has folded signals: 128 + N is death by signal N for the signals 1–64.
    pub fn from_shell_code(code: i32) -> Self {
        if (129..=192).contains(&code) {
            Self::signaled(code - 128)
        } else {
            Self::exited(code)
        }
    }

    /// Exit code 0.
    pub fn success(&self) -> bool {
        self.end == End::Code(0)
    }

    /// The exit code; `None` when a signal ended it.
    pub fn code(&self) -> Option<i32> {
        match self.end {
            End::Code(code) => Some(code),
            End::Signal(_) => None,
        }
    }

    /// The signal that ended it.
    pub fn signal(&self) -> Option<i32> {
        match self.end {
            End::Code(_) => None,
            End::Signal(signal) => Some(signal),
        }
    }

    /// Whether the kernel killed it for lack of memory, as far as the provider can tell
    /// ([`Capabilities::oom_detection`](crate::Capabilities::oom_detection)).
    pub fn oom_killed(&self) -> bool {
        self.oom_killed
    }

    /// One number as a shell reports it: the exit code, or 128 + signal.
    pub fn shell_code(&self) -> i32 {
        match self.end {
            End::Code(code) => code,
            End::Signal(signal) => 128 + signal,
        }
    }
}

impl From<std::process::ExitStatus> for ExitStatus {
    #[cfg(unix)]
    fn from(status: std::process::ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::exited(code),
            (None, Some(signal)) => Self::signaled(signal),
            // Only a stopped or continued process has neither, and those are never waited for.
            (None, None) => Self::signaled(0),
        }
    }

    #[cfg(not(unix))]
    fn from(status: std::process::ExitStatus) -> Self {
        Self::exited(status.code().unwrap_or(1))
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.end {
            End::Code(code) => write!(f, "exit code {code}"),
            End::Signal(signal) if self.oom_killed => write!(f, "signal {signal} (out of memory)"),
            End::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// One stream as it was collected.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Captured {
    /// The first bytes, up to the output limit.
    pub bytes: Bytes,
    /// How many further bytes were read and thrown away.
    pub dropped: u64,
}

impl Captured {
    /// Whether the output limit cut this stream.
    pub fn is_truncated(&self) -> bool {
        self.dropped > 0
    }
}

impl fmt::Debug for Captured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 200;
        let shown = &self.bytes[..self.bytes.len().min(SHOWN)];
        write!(f, "{} bytes {:?}", self.bytes.len(), String::from_utf8_lossy(shown))?;
        if self.bytes.len() > SHOWN {
            f.write_str("…")?;
        }
        if self.dropped > 0 {
            write!(f, " ({} more dropped)", self.dropped)?;
        }
        Ok(())
    }
}

/// The result of a command: how it ended and what it printed, as bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: Captured,
    /// Standard error.
    pub stderr: Captured,
}

impl Output {
    /// Whether it exited with code 0.
    pub fn success(&self) -> bool {
        self.status.success()
    }

    /// The exit code; `None` when a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Standard output as text, invalid UTF-8 replaced.
    pub fn stdout_lossy(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.stdout.bytes)
    }

    /// Standard error as text, invalid UTF-8 replaced.
    pub fn stderr_lossy(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.stderr.bytes)
    }
}

/// What a command had printed when its deadline passed or its box died. Found in [`Error::partial_output`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartialOutput {
    /// Standard output so far.
    pub stdout: Captured,
    /// Standard error so far.
    pub stderr: Captured,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn later_layers_of_the_environment_win() {
        let base = Env::from_iter([("A", "1"), ("B", "2")]);
        let merged = base.layered(&Env::from_iter([("B", "3"), ("C", "4")]));
        assert_eq!(merged, Env::from_iter([("A", "1"), ("B", "3"), ("C", "4")]));
        assert_eq!(base.get("B"), Some(OsStr::new("2")));
    }

    #[test]
    fn debug_output_shows_names_and_never_values() {
        let command = Command::new(["x"]).env("TOKEN", "hunter2").stdin("hunter2");
        let text = format!("{command:?}");
        assert!(text.contains("TOKEN") && !text.contains("hunter2"), "{text}");
    }

    #[test]
    fn bad_input_names_the_field() {
        let field = |command: Command| {
            let error = command.validate().expect_err("must be refused");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.field().map(str::to_owned)
        };
        assert_eq!(field(Command::new(Vec::<String>::new())).as_deref(), Some("argv"));
        assert_eq!(field(Command::new([""])).as_deref(), Some("argv[0]"));
        assert_eq!(field(Command::new(["a", "b\0c"])).as_deref(), Some("argv[1]"));
        assert_eq!(field(Command::new(["a"]).env("", "x")).as_deref(), Some("env."));
        assert_eq!(field(Command::new(["a"]).env("A=B", "x")).as_deref(), Some("env.A=B"));
        assert_eq!(field(Command::new(["a"]).env("A", "x\0")).as_deref(), Some("env.A"));
        assert_eq!(field(Command::new(["a"]).workdir("a\0")).as_deref(), Some("workdir"));
        assert_eq!(field(Command::new(["a"]).workdir("")).as_deref(), Some("workdir"));
        assert_eq!(
            field(Command::new(["a"]).workdir("n".repeat(256))).as_deref(),
            Some("workdir")
        );
    }

    #[test]
    fn a_status_tells_codes_from_signals() {
        assert_eq!(ExitStatus::from_shell_code(137), ExitStatus::signaled(9));
        assert_eq!(ExitStatus::from_shell_code(255), ExitStatus::exited(255));
        assert_eq!(ExitStatus::from_shell_code(128), ExitStatus::exited(128));
        assert_eq!(ExitStatus::signaled(9).shell_code(), 137);
        assert_eq!(ExitStatus::signaled(15).code(), None);
        assert!(!ExitStatus::signaled(0).success());
    }
}
