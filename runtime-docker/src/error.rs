//! The one place where an answer of the engine becomes a kind.

use std::io;

use bollard::errors::Error as ApiError;
use runtime_core::{Error, ErrorKind, Retry};

use crate::config::EngineKind;

/// What an error of the client means.
pub(crate) fn from_api(kind: EngineKind, what: &str, error: ApiError) -> Error {
    #[cfg(feature = "tls")]
    if let Some(refused) = crate::tls::refused(&error) {
        return from_tls(kind, what, &refused);
    }
    match error {
        ApiError::DockerResponseServerError { status_code, message } => from_status(kind, what, status_code, &message),
        ApiError::RequestTimeoutError => {
            Error::new(ErrorKind::Timeout, format!("{what}: the engine did not answer in time"))
        }
        ApiError::SocketNotFoundError(path) => unreachable(kind, what, &format!("there is no socket at {path}")),
        ApiError::IOError { err } => from_io(kind, what, err),
        ApiError::DockerStreamError { error } => Error::new(stream_kind(&error), format!("{what}: {error}")),
        other => match io_cause(&other) {
            Some(cause) if cause.kind() == io::ErrorKind::PermissionDenied => denied(kind, what),
            Some(cause) => unreachable(kind, what, &cause.to_string()),
            // What is left is a connection that broke, or an answer that is not of the protocol.
            None => Error::new(ErrorKind::Unavailable, format!("{what}: {other}")).with_source(other),
        },
    }
}

fn from_io(kind: EngineKind, what: &str, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::PermissionDenied => denied(kind, what),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => unreachable(kind, what, &error.to_string()),
        _ => Error::io(what, error),
    }
}

fn denied(kind: EngineKind, what: &str) -> Error {
    let fix = match kind {
        EngineKind::Docker => {
            "this user may not use its socket: add the user to the group `docker` and log in again, or run under `sg docker`"
        }
        EngineKind::Podman => {
            "this user may not use its socket: unset CONTAINER_HOST to use a rootless service of its own"
        }
    };
    Error::new(ErrorKind::PermissionDenied, format!("{what}: {kind}: {fix}")).with_retry(Retry::Permanent)
}

/// Another attempt would show the same certificates.
#[cfg(feature = "tls")]
fn from_tls(kind: EngineKind, what: &str, refused: &crate::tls::Refused) -> Error {
    let (error_kind, text) = match refused {
        crate::tls::Refused::Theirs(why) => (ErrorKind::Unavailable, format!("is not trusted: {why}")),
        crate::tls::Refused::Ours(why) => (ErrorKind::Unauthorized, format!("refuses our certificate: {why}")),
    };
    Error::new(error_kind, format!("{what}: {kind} {text}")).with_retry(Retry::Permanent)
}

fn unreachable(kind: EngineKind, what: &str, detail: &str) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("{what}: {kind} cannot be reached: {detail}"),
    )
}

/// The I/O error at the bottom of a chain, if there is one.
fn io_cause(error: &ApiError) -> Option<&io::Error> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut found = None;
    while let Some(error) = cause {
        found = error.downcast_ref::<io::Error>().or(found);
        cause = error.source();
    }
    found
}

/// What an HTTP status means, with the engine's words.
pub(crate) fn from_status(kind: EngineKind, what: &str, status: u16, message: &str) -> Error {
    let text = format!("{what}: {}", message.trim());
    let error_kind = match status {
        400 if is_missing_program(message) => ErrorKind::ProgramNotFound,
        400 if is_not_executable(message) => ErrorKind::ProgramNotExecutable,
        400 => ErrorKind::InvalidConfig,
        401 => ErrorKind::Unauthorized,
        403 => ErrorKind::PermissionDenied,
        404 => ErrorKind::NotFound,
        409 if message.contains("is not running")
            || message.contains("is paused")
            || message.contains("not running") =>
        {
            ErrorKind::SandboxGone
        }
        409 if message.contains("OCI") || message.contains("runc") => ErrorKind::Other,
        409 => ErrorKind::AlreadyExists,
        429 => ErrorKind::RateLimited,
        500 if is_missing_program(message) => ErrorKind::ProgramNotFound,
        500 if is_not_executable(message) => ErrorKind::ProgramNotExecutable,
        500 if message.contains("no space left on device") => ErrorKind::ResourceExhausted,
        500 if message.contains("is not running") || message.contains("container state improper") => {
            ErrorKind::SandboxGone
        }
        500 if message.contains("no such container") || message.contains("no such exec session") => ErrorKind::NotFound,
        500 if message.contains("unable to find network") => ErrorKind::InvalidConfig,
        500 if message.contains("could not select device driver") => ErrorKind::InvalidConfig,
        500 => ErrorKind::Other,
        502..=504 => ErrorKind::Unavailable,
        _ => ErrorKind::Protocol,
    };
    let error = Error::new(error_kind, text);
    if error_kind == ErrorKind::Unauthorized && kind == EngineKind::Docker {
        return error.with_operation("pull");
    }
    error
}

fn is_missing_program(message: &str) -> bool {
    message.contains("executable file not found") || message.contains("no such file or directory: unknown")
}

fn is_not_executable(message: &str) -> bool {
    message.contains("permission denied: unknown") || message.contains("exec format error")
}

fn stream_kind(message: &str) -> ErrorKind {
    let lower = message.to_lowercase();
    if lower.contains("not found") || lower.contains("manifest unknown") || lower.contains("does not exist") {
        ErrorKind::NotFound
    } else if lower.contains("unauthorized") || lower.contains("authentication required") || lower.contains("denied") {
        ErrorKind::Unauthorized
    } else if lower.contains("toomanyrequests") || lower.contains("rate limit") {
        ErrorKind::RateLimited
    } else if lower.contains("no space left") {
        ErrorKind::ResourceExhausted
    } else if lower.contains("timeout") || lower.contains("connection refused") || lower.contains("no such host") {
        ErrorKind::Unavailable
    } else {
        ErrorKind::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_its_kind() {
        let kind = |status, message| from_status(EngineKind::Docker, "x", status, message).kind();
        assert_eq!(kind(400, "invalid reference format"), ErrorKind::InvalidConfig);
        assert_eq!(kind(401, "unauthorized"), ErrorKind::Unauthorized);
        assert_eq!(kind(404, "No such image: x"), ErrorKind::NotFound);
        assert_eq!(
            kind(409, "Conflict. The container name \"/x\" is already in use"),
            ErrorKind::AlreadyExists
        );
        assert_eq!(kind(409, "Container abc is not running"), ErrorKind::SandboxGone);
        assert_eq!(
            kind(
                409,
                "preparing container x for attach: runc create failed: OCI permission denied"
            ),
            ErrorKind::Other
        );
        assert_eq!(
            kind(400, "exec: \"x\": executable file not found in $PATH: unknown"),
            ErrorKind::ProgramNotFound
        );
        assert_eq!(
            kind(400, "exec: \"/x\": permission denied: unknown"),
            ErrorKind::ProgramNotExecutable
        );
        assert_eq!(
            kind(500, "write /x: no space left on device"),
            ErrorKind::ResourceExhausted
        );
        assert_eq!(
            kind(500, "container x does not exist in database: no such container"),
            ErrorKind::NotFound
        );
        assert_eq!(
            kind(500, "unable to find network with name x"),
            ErrorKind::InvalidConfig
        );
        assert_eq!(kind(503, "busy"), ErrorKind::Unavailable);
        assert_eq!(kind(418, "?"), ErrorKind::Protocol);
    }

    #[test]
    fn a_socket_without_permission_names_the_fix() {
        let denied = ApiError::IOError {
            err: io::ErrorKind::PermissionDenied.into(),
        };
        let error = from_api(EngineKind::Docker, "version", denied);
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert!(error.message().contains("group `docker`"), "{error}");
        let missing = ApiError::SocketNotFoundError("/x.sock".into());
        assert!(from_api(EngineKind::Docker, "version", missing).is_retryable());
    }

    #[test]
    fn failures_of_a_pull_are_told_apart() {
        assert_eq!(
            stream_kind("manifest for x:1 not found: manifest unknown"),
            ErrorKind::NotFound
        );
        assert_eq!(
            stream_kind("pull access denied, repository does not exist or may require login"),
            ErrorKind::NotFound
        );
        assert_eq!(
            stream_kind("unauthorized: authentication required"),
            ErrorKind::Unauthorized
        );
        assert_eq!(stream_kind("toomanyrequests: slow down"), ErrorKind::RateLimited);
    }
}
