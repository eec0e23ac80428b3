//! One error type for every provider: what went wrong, whose fault it is, and whether trying again makes sense.
//!
//! An [`Error`] carries a [`kind`](Error::kind) to match on, the [`Boundary`] that it crossed, the provider, the
//! sandbox, the operation and, for bad input, the field. A command that ran and exited non-zero is *not* an error: it
//! is an [`Output`](crate::Output).

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::command::PartialOutput;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

type BoxError = Box<dyn StdError + Send + Sync + 'static>;
type SharedError = Arc<dyn StdError + Send + Sync + 'static>;

/// What went wrong. Match on this, not on messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A configuration does not validate; [`Error::field`] names the field.
    InvalidConfig,
    /// An argument of a call does not validate (empty argv, NUL byte, bad path); [`Error::field`] names it.
    InvalidArgument,
    /// This provider, or this box as configured, cannot do it. Nothing was sent.
    Unsupported,
    /// A call out of order, such as running a program in a box that was stopped.
    Phase,
    /// The box was stopped, by its owner or by the provider, while or before the operation ran.
    SandboxGone,
    /// The program does not exist in the box, so nothing was started.
    ProgramNotFound,
    /// The program exists but cannot be executed, so nothing was started.
    ProgramNotExecutable,
    /// The file, image, template or box does not exist.
    NotFound,
    /// It exists already.
    AlreadyExists,
    /// A directory where a file is needed, or a FIFO or device where a regular file is needed.
    WrongFileType,
    /// The operating system or the provider refuses access.
    PermissionDenied,
    /// Missing, malformed or refused credentials.
    Unauthorized,
    /// The account's plan, quota or balance does not allow it.
    QuotaExceeded,
    /// The provider asks to slow down; see [`Error::retry_after`].
    RateLimited,
    /// More bytes than the caller's limit.
    LimitExceeded,
    /// No space, descriptors, processes or memory left.
    ResourceExhausted,
    /// A deadline passed. What a command had printed by then is in [`Error::partial_output`].
    Timeout,
    /// The engine or the provider's API cannot be reached, or answered that it is not able to serve.
    Unavailable,
    /// The connection that carried an operation broke, and its outcome is unknown.
    ConnectionLost,
    /// The other side broke the protocol. The connection to it is closed.
    Protocol,
    /// A network policy could not be applied; the program must not start.
    NetworkPolicy,
    /// The record that makes the box findable after a crash could not be written.
    Lease,
    /// The operation was given up because its owner went away.
    Cancelled,
    /// An input or output error of this host.
    Io,
    /// Anything else.
    Other,
}

impl ErrorKind {
    /// The name in `snake_case`, as it appears in logs and JSON reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidConfig => "invalid_config",
            Self::InvalidArgument => "invalid_argument",
            Self::Unsupported => "unsupported",
            Self::Phase => "phase",
            Self::SandboxGone => "sandbox_gone",
            Self::ProgramNotFound => "program_not_found",
            Self::ProgramNotExecutable => "program_not_executable",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::WrongFileType => "wrong_file_type",
            Self::PermissionDenied => "permission_denied",
            Self::Unauthorized => "unauthorized",
            Self::QuotaExceeded => "quota_exceeded",
            Self::RateLimited => "rate_limited",
            Self::LimitExceeded => "limit_exceeded",
            Self::ResourceExhausted => "resource_exhausted",
            Self::Timeout => "timeout",
            Self::Unavailable => "unavailable",
            Self::ConnectionLost => "connection_lost",
            Self::Protocol => "protocol",
            Self::NetworkPolicy => "network_policy",
            Self::Lease => "lease",
            Self::Cancelled => "cancelled",
            Self::Io => "io",
            Self::Other => "other",
        }
    }

    /// What this kind says about another attempt unless the error itself knows better.
    fn default_retry(self) -> Retry {
        match self {
            Self::RateLimited | Self::Unavailable => Retry::Temporary,
            _ => Retry::Permanent,
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The answer to "again?".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Retry {
    /// Another attempt may succeed.
    Temporary,
    /// Another attempt fails the same way, or might do twice what may be done once.
    Permanent,
    /// Attempts were already made and given up; outer layers must not multiply them.
    Exhausted,
}

/// The part of a rollout whose fault an error is. Decides the rollout's stop condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Boundary {
    /// Provisioning, command transport, files, network policy, exposure.
    Sandbox,
    /// A tool server could not be built, installed, launched or reached.
    Toolset,
    /// The agent harness: setup, launch, non-zero exit, session.
    Harness,
    /// The task's own hooks: setup, finalize, scoring.
    Task,
    /// A call to the model provider.
    ModelProvider,
    /// The program could not reach the host's interception endpoint.
    Interception,
    /// A tunnel could not be established. Counts as an interception failure too.
    Tunnel,
    /// Hooks of the environment around the tasks.
    Env,
    /// Wrong use or a failure of the host that belongs to none of the others.
    Other,
}

impl Boundary {
    /// The stop condition that a rollout records for an error of this boundary.
    ///
    /// ```
    /// use runtime_core::Boundary;
    /// assert_eq!(Boundary::Sandbox.stop_condition(), "sandbox_error");
    /// assert_eq!(Boundary::Other.stop_condition(), "error");
    /// ```
    pub fn stop_condition(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox_error",
            Self::Toolset => "toolset_error",
            Self::Harness => "harness_error",
            Self::Task => "task_error",
            Self::ModelProvider => "provider_error",
            Self::Interception => "interception_error",
            Self::Tunnel => "tunnel_error",
            Self::Env => "env_error",
            Self::Other => "error",
        }
    }

    /// Whether an error of this boundary counts as one of `other`: a tunnel failure is an interception failure.
    pub fn is_a(self, other: Boundary) -> bool {
        self == other || (self == Self::Tunnel && other == Self::Interception)
    }
}

/// An error of this workspace. Small to move: its content is boxed.
///
/// ```
/// use runtime_core::{Error, ErrorKind};
///
/// let error = Error::new(ErrorKind::InvalidConfig, "memory must be positive, not -1")
///     .with_field("memory")
///     .with_operation("provision")
///     .with_provider("docker");
/// assert_eq!(error.field(), Some("memory"));
/// assert!(!error.is_retryable());
/// assert_eq!(
///     error.to_string(),
///     "docker: provision: memory: memory must be positive, not -1 (invalid_config)"
/// );
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    boundary: Boundary,
    retry: Retry,
    retry_after: Option<Duration>,
    message: Cow<'static, str>,
    operation: Option<Cow<'static, str>>,
    field: Option<Cow<'static, str>>,
    provider: Option<Cow<'static, str>>,
    sandbox: Option<String>,
    sandbox_id: Option<String>,
    partial: Option<PartialOutput>,
    source: Option<SharedError>,
}

impl Error {
    /// An error of `kind` at the [`Boundary::Sandbox`] (for [`ErrorKind::InvalidConfig`] and
    /// [`ErrorKind::InvalidArgument`]: [`Boundary::Other`], as they are the caller's).
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        let boundary = match kind {
            ErrorKind::InvalidConfig | ErrorKind::InvalidArgument => Boundary::Other,
            _ => Boundary::Sandbox,
        };
        Self(Box::new(Inner {
            kind,
            boundary,
            retry: kind.default_retry(),
            retry_after: None,
            message: message.into(),
            operation: None,
            field: None,
            provider: None,
            sandbox: None,
            sandbox_id: None,
            partial: None,
            source: None,
        }))
    }

    /// [`ErrorKind::InvalidConfig`] for `field`.
    pub fn invalid_config(field: impl Into<Cow<'static, str>>, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidConfig, message).with_field(field)
    }

    /// [`ErrorKind::InvalidArgument`] for `field`.
    pub fn invalid_argument(field: impl Into<Cow<'static, str>>, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message).with_field(field)
    }

    /// [`ErrorKind::Unsupported`].
    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// An input or output error of this host while doing `what`, with the kind that its code stands for.
    pub fn io(what: impl fmt::Display, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::AlreadyExists => ErrorKind::AlreadyExists,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => ErrorKind::PermissionDenied,
            io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory => ErrorKind::WrongFileType,
            io::ErrorKind::TimedOut => ErrorKind::Timeout,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::OutOfMemory => {
                ErrorKind::ResourceExhausted
            }
            io::ErrorKind::FileTooLarge => ErrorKind::LimitExceeded,
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => ErrorKind::ConnectionLost,
            io::ErrorKind::ConnectionRefused => ErrorKind::Unavailable,
            io::ErrorKind::InvalidFilename | io::ErrorKind::ArgumentListTooLong => ErrorKind::InvalidArgument,
            _ => ErrorKind::Io,
        };
        Self::new(kind, format!("{what}: {source}")).with_source(source)
    }

    /// Which kind it is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The boundary that it crossed.
    pub fn boundary(&self) -> Boundary {
        self.0.boundary
    }

    /// The stop condition that a rollout records for it; see [`Boundary::stop_condition`].
    pub fn stop_condition(&self) -> &'static str {
        self.0.boundary.stop_condition()
    }

    /// Whether trying again makes sense.
    pub fn retry(&self) -> Retry {
        self.0.retry
    }

    /// Whether another attempt may succeed: [`Retry::Temporary`].
    pub fn is_retryable(&self) -> bool {
        self.0.retry == Retry::Temporary
    }

    /// How long the other side asks to wait before another attempt.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The description alone, without provider, sandbox and operation.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The operation that failed, such as `exec` or `write /app/x`.
    pub fn operation(&self) -> Option<&str> {
        self.0.operation.as_deref()
    }

    /// The field of the configuration or the argument that is wrong.
    pub fn field(&self) -> Option<&str> {
        self.0.field.as_deref()
    }

    /// The provider's tag.
    pub fn provider(&self) -> Option<&str> {
        self.0.provider.as_deref()
    }

    /// Our name for the sandbox.
    pub fn sandbox(&self) -> Option<&str> {
        self.0.sandbox.as_deref()
    }

    /// The provider's id of the sandbox.
    pub fn sandbox_id(&self) -> Option<&str> {
        self.0.sandbox_id.as_deref()
    }

    /// What a command had printed before its deadline passed or its box died.
    pub fn partial_output(&self) -> Option<&PartialOutput> {
        self.0.partial.as_ref()
    }

    /// Takes the partial output out, without a copy.
    pub fn take_partial_output(&mut self) -> Option<PartialOutput> {
        self.0.partial.take()
    }

    /// Sets the boundary.
    #[must_use]
    pub fn with_boundary(mut self, boundary: Boundary) -> Self {
        self.0.boundary = boundary;
        self
    }

    /// Sets the answer to "again?".
    #[must_use]
    pub fn with_retry(mut self, retry: Retry) -> Self {
        self.0.retry = retry;
        self
    }

    /// Sets how long to wait before another attempt, and makes the error [`Retry::Temporary`].
    #[must_use]
    pub fn with_retry_after(mut self, delay: Duration) -> Self {
        self.0.retry_after = Some(delay);
        self.0.retry = Retry::Temporary;
        self
    }

    /// Names the operation, unless an inner layer has named it already.
    #[must_use]
    pub fn with_operation(mut self, operation: impl Into<Cow<'static, str>>) -> Self {
        self.0.operation.get_or_insert_with(|| operation.into());
        self
    }

    /// Forgets the operation, so that an outer layer, which knows more, names it.
    #[must_use]
    pub fn without_operation(mut self) -> Self {
        self.0.operation = None;
        self
    }

    /// Names the field.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<Cow<'static, str>>) -> Self {
        self.0.field = Some(field.into());
        self
    }

    /// Names the provider, unless it is named already.
    #[must_use]
    pub fn with_provider(mut self, provider: impl Into<Cow<'static, str>>) -> Self {
        self.0.provider.get_or_insert_with(|| provider.into());
        self
    }

    /// Names the sandbox, unless it is named already.
    #[must_use]
    pub fn with_sandbox(mut self, name: impl Into<String>, id: Option<String>) -> Self {
        if self.0.sandbox.is_none() {
            self.0.sandbox = Some(name.into());
            self.0.sandbox_id = id;
        }
        self
    }

    /// Attaches what was printed so far.
    #[must_use]
    pub fn with_partial_output(mut self, output: PartialOutput) -> Self {
        self.0.partial = Some(output);
        self
    }

    /// Attaches the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.0.source = Some(Arc::from(source.into()));
        self
    }

    /// Passes a typed error of any boundary but [`Boundary::Other`] on as it is (the innermost boundary knows best),
    /// and moves an error of no boundary to `boundary`.
    #[must_use]
    pub fn at_boundary(self, boundary: Boundary) -> Self {
        if self.0.boundary == Boundary::Other {
            self.with_boundary(boundary)
        } else {
            self
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(provider) = self.provider() {
            f.write_str(provider)?;
            if let Some(sandbox) = self.sandbox() {
                write!(f, " {sandbox}")?;
                if let Some(id) = self.sandbox_id().filter(|id| *id != sandbox) {
                    write!(f, " ({id})")?;
                }
            }
            f.write_str(": ")?;
        }
        if let Some(operation) = self.operation() {
            write!(f, "{operation}: ")?;
        }
        if let Some(field) = self.field() {
            write!(f, "{field}: ")?;
        }
        write!(f, "{} ({})", self.0.message, self.0.kind)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        let mut debug = f.debug_struct("Error");
        debug.field("kind", &inner.kind).field("message", &inner.message);
        debug.field("boundary", &inner.boundary).field("retry", &inner.retry);
        if let Some(delay) = inner.retry_after {
            debug.field("retry_after", &delay);
        }
        for (name, value) in [
            ("operation", self.operation()),
            ("field", self.field()),
            ("provider", self.provider()),
            ("sandbox", self.sandbox()),
            ("sandbox_id", self.sandbox_id()),
        ] {
            if let Some(value) = value {
                debug.field(name, &value);
            }
        }
        if let Some(partial) = &inner.partial {
            debug.field("partial_output", partial);
        }
        if let Some(source) = &inner.source {
            debug.field("source", source);
        }
        debug.finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_context_wins() {
        let error = Error::new(ErrorKind::Io, "x")
            .with_operation("read a")
            .with_operation("download")
            .with_provider("docker")
            .with_provider("retry")
            .with_sandbox("one", Some("id1".into()))
            .with_sandbox("two", None);
        assert_eq!(error.operation(), Some("read a"));
        assert_eq!(error.provider(), Some("docker"));
        assert_eq!((error.sandbox(), error.sandbox_id()), (Some("one"), Some("id1")));
        assert_eq!(error.to_string(), "docker one (id1): read a: x (io)");
    }

    #[test]
    fn a_typed_boundary_is_kept_and_an_untyped_one_is_set() {
        let typed = Error::new(ErrorKind::Io, "x").at_boundary(Boundary::Task);
        assert_eq!(typed.stop_condition(), "sandbox_error");
        let untyped = Error::new(ErrorKind::Other, "x")
            .with_boundary(Boundary::Other)
            .at_boundary(Boundary::Task);
        assert_eq!(untyped.stop_condition(), "task_error");
        assert!(Boundary::Tunnel.is_a(Boundary::Interception));
        assert!(!Boundary::Interception.is_a(Boundary::Tunnel));
    }

    #[test]
    fn io_errors_keep_their_meaning_and_their_cause() {
        let error = Error::io("open /x", io::Error::from(io::ErrorKind::NotFound));
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.source().is_some_and(|source| source.is::<io::Error>()));
        assert_eq!(
            Error::io("w", io::Error::from_raw_os_error(28)).kind(),
            ErrorKind::ResourceExhausted
        );
        assert_eq!(
            Error::io("w", io::Error::from_raw_os_error(7)).kind(),
            ErrorKind::InvalidArgument
        );
    }

    #[test]
    fn retry_after_makes_an_error_temporary() {
        let error = Error::new(ErrorKind::Other, "x").with_retry_after(Duration::from_secs(3));
        assert!(error.is_retryable());
        assert_eq!(error.retry_after(), Some(Duration::from_secs(3)));
        assert!(Error::new(ErrorKind::RateLimited, "x").is_retryable());
        assert!(!Error::new(ErrorKind::ConnectionLost, "x").is_retryable());
        let exhausted = Error::new(ErrorKind::Unavailable, "x").with_retry(Retry::Exhausted);
        assert!(!exhausted.is_retryable());
    }

    #[test]
    fn an_error_is_one_pointer_wide() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
    }
}
