//! The one place where a status, a code or a broken connection becomes a kind.

use std::time::SystemTime;

use http::HeaderMap;
use runtime_core::retry::{Failure, parse_retry_after};
use runtime_core::text::tail;
use runtime_core::{Error, ErrorKind, Retry};

use crate::wire::envelope::Broken;
use crate::wire::rpc::{Code, RpcError};

/// Longest part of a foreign message that goes into an error.
const SHOWN: usize = 500;

/// What an endpoint of the control plane is about, which decides what its 404 means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    Sandbox,
    Template,
}

/// An answer of the control plane that is no success.
pub(crate) fn control_plane(subject: Subject, status: u16, headers: &HeaderMap, body: &[u8]) -> Failure {
    let message = message(status, body);
    let lower = message.to_ascii_lowercase();
    let kind = match status {
        400 if lower.contains("hour") && (lower.contains("timeout") || lower.contains("lifetime")) => {
            ErrorKind::QuotaExceeded
        }
        400 | 422 => ErrorKind::InvalidArgument,
        401 => ErrorKind::Unauthorized,
        402 => ErrorKind::QuotaExceeded,
        403 => ErrorKind::PermissionDenied,
        404 => match subject {
            Subject::Sandbox => ErrorKind::SandboxGone,
            Subject::Template => ErrorKind::NotFound,
        },
        409 => ErrorKind::AlreadyExists,
        429 => ErrorKind::RateLimited,
        500.. => ErrorKind::Unavailable,
        _ => ErrorKind::Protocol,
    };
    let mut error = Error::new(kind, message).with_boundary(runtime_core::Boundary::Sandbox);
    if matches!(status, 429 | 503) {
        let asked = headers
            .get(http::header::RETRY_AFTER)
            .and_then(|value| value.to_str().ok());
        if let Some(delay) = asked.and_then(|value| parse_retry_after(value, SystemTime::now())) {
            error = error.with_retry_after(delay);
        }
    }
    // The provider knows better than the status.
    let should_retry = headers
        .get("should-retry")
        .map(|value| value.as_bytes().to_ascii_lowercase());
    match should_retry.as_deref() {
        Some(b"true") => error = error.with_retry(Retry::Temporary),
        Some(b"false") => error = error.with_retry(Retry::Permanent),
        _ => {}
    }
    // A limiter refuses before anything is done. So does a 503 that the control plane itself wrote.
    let refused = status == 429 || (status == 503 && has_integer_code(body));
    if refused { Failure::unsent(error) } else { error.into() }
}

fn has_integer_code(body: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(body)
        .is_ok_and(|body| body.get("code").is_some_and(|code| code.is_i64()))
}

/// The `message` of a JSON body, else its text.
fn message(status: u16, body: &[u8]) -> String {
    let value: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let text = value.as_ref().and_then(|value| value.get("message")?.as_str());
    let text = match text {
        Some(text) => tail(text.as_bytes(), SHOWN).into_owned(),
        None => tail(body, SHOWN).into_owned(),
    };
    if text.is_empty() {
        format!("the provider answered {status}")
    } else {
        format!("the provider answered {status}: {text}")
    }
}

/// The phrase by which the edge says that a box is gone; its status says no more than that something is wrong.
const GONE: &str = "was not found";

/// The phrase by which it says that the box runs and nothing listens.
const PORT_CLOSED: &str = "port is not open";

/// A failed call to envd, or to the edge before it.
pub(crate) fn rpc(error: &RpcError) -> Error {
    let text = tail(error.message.as_bytes(), SHOWN);
    if !error.from_rpc_layer && error.code == Code::Unavailable && error.message.contains(GONE) {
        return gone(&text);
    }
    let lower = error.message.to_ascii_lowercase();
    let kind = match error.code {
        // What the system of the box says has no code of its own.
        _ if lower.contains("not a directory") => ErrorKind::WrongFileType,
        _ if lower.contains("file exists") => ErrorKind::AlreadyExists,
        Code::Canceled => ErrorKind::ConnectionLost,
        // The exit of the program raced a late subscriber.
        Code::Unknown if error.message.contains("channel") && error.message.contains("closed") => {
            ErrorKind::ConnectionLost
        }
        Code::InvalidArgument | Code::OutOfRange => ErrorKind::InvalidArgument,
        Code::DeadlineExceeded => ErrorKind::Timeout,
        Code::NotFound => ErrorKind::NotFound,
        Code::AlreadyExists => ErrorKind::AlreadyExists,
        Code::PermissionDenied => ErrorKind::PermissionDenied,
        Code::ResourceExhausted => ErrorKind::RateLimited,
        Code::Unimplemented => ErrorKind::Unsupported,
        Code::Unavailable => ErrorKind::Unavailable,
        Code::Unauthenticated => ErrorKind::Unauthorized,
        Code::Unknown | Code::FailedPrecondition | Code::Aborted | Code::Internal | Code::DataLoss => ErrorKind::Other,
    };
    let what = if error.message.contains(PORT_CLOSED) {
        "envd does not listen: "
    } else {
        ""
    };
    Error::new(kind, format!("{what}{text} ({})", error.code.name())).with_boundary(runtime_core::Boundary::Sandbox)
}

fn gone(text: &str) -> Error {
    Error::new(ErrorKind::SandboxGone, format!("the sandbox is gone: {text}"))
}

/// An answer of envd's file endpoint, or of the edge before it, that is no success.
pub(crate) fn files(status: u16, body: &[u8]) -> Error {
    let value: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let text = value
        .as_ref()
        .and_then(|value| value.get("message")?.as_str())
        .map_or_else(
            || tail(body, SHOWN).into_owned(),
            |text| tail(text.as_bytes(), SHOWN).into_owned(),
        );
    let lower = text.to_ascii_lowercase();
    let kind = match status {
        400 if lower.contains("directory") => ErrorKind::WrongFileType,
        400 | 406 => ErrorKind::InvalidArgument,
        401 => ErrorKind::Unauthorized,
        403 => ErrorKind::PermissionDenied,
        404 => ErrorKind::NotFound,
        409 => ErrorKind::AlreadyExists,
        429 => ErrorKind::RateLimited,
        500 if lower.contains("not a directory") => ErrorKind::WrongFileType,
        500 if lower.contains("file exists") || lower.contains("is a file") => ErrorKind::AlreadyExists,
        507 => ErrorKind::ResourceExhausted,
        502 if text.contains(GONE) => return gone(&text),
        502..=504 => ErrorKind::Unavailable,
        _ => ErrorKind::Other,
    };
    Error::new(kind, format!("envd answered {status}: {text}")).with_boundary(runtime_core::Boundary::Sandbox)
}

/// A request that got no answer, or a body that broke off.
pub(crate) fn transport(error: reqwest::Error) -> Failure {
    // Its text names the URL, which is noise at best.
    let error = error.without_url();
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    let mut untrusted = false;
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        untrusted |= is_untrusted(cause);
        source = cause.source();
    }
    if untrusted {
        // Another attempt would meet the same one.
        let message = format!("the certificate of the other side is not trusted: {text}");
        return Failure::unsent(Error::new(ErrorKind::Unavailable, message).with_retry(Retry::Permanent));
    }
    if error.is_connect() {
        return Failure::unsent(Error::new(ErrorKind::Unavailable, format!("no connection: {text}")));
    }
    if error.is_builder() {
        return Error::new(ErrorKind::InvalidArgument, text).into();
    }
    if error.is_timeout() {
        return Error::new(ErrorKind::Timeout, format!("no answer in time: {text}"))
            .with_retry(Retry::Temporary)
            .into();
    }
    Error::new(ErrorKind::ConnectionLost, format!("the connection broke: {text}"))
        .with_retry(Retry::Temporary)
        .into()
}

/// Whether TLS refused the other side's certificate.
fn is_untrusted(cause: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = cause;
    // It may be wrapped more than once, and such an error's source is that of what it wraps.
    while let Some(wrapped) = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        cause = wrapped;
    }
    matches!(cause.downcast_ref(), Some(rustls::Error::InvalidCertificate(_)))
}

/// The error alone, where nothing is tried again.
pub(crate) fn into_error(failure: Failure) -> Error {
    failure.into_error()
}

/// A stream that ended without saying how.
pub(crate) fn cut_short() -> Error {
    Error::new(ErrorKind::ConnectionLost, "the stream broke off")
}

/// A stream that said nothing for far longer than it promised to.
pub(crate) fn silent() -> Error {
    Error::new(
        ErrorKind::ConnectionLost,
        "the stream has fallen silent: the path to the sandbox is dead",
    )
}

/// A stream that cannot be read on.
pub(crate) fn broken(broken: Broken) -> Error {
    let why = match broken {
        Broken::Compressed => "a frame is compressed although that was not negotiated".to_owned(),
        Broken::TooLong(length) => format!("a frame has {length} bytes"),
    };
    Error::new(ErrorKind::Protocol, why)
}

/// An answer that cannot be read.
pub(crate) fn unreadable(what: &str, why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Protocol, format!("{what} cannot be read: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::rpc::parse_error;
    use http::HeaderValue;
    use std::time::Duration;

    fn control(status: u16, body: &str) -> Error {
        into_error(control_plane(
            Subject::Sandbox,
            status,
            &HeaderMap::new(),
            body.as_bytes(),
        ))
    }

    #[test]
    fn every_status_of_the_control_plane_has_a_kind() {
        for (status, body, kind, retry) in [
            (
                400,
                r#"{"code":400,"message":"bad template"}"#,
                ErrorKind::InvalidArgument,
                Retry::Permanent,
            ),
            (
                400,
                r#"{"code":400,"message":"Timeout cannot be greater than 1 hours"}"#,
                ErrorKind::QuotaExceeded,
                Retry::Permanent,
            ),
            (
                401,
                r#"{"code":401,"message":"bad key"}"#,
                ErrorKind::Unauthorized,
                Retry::Permanent,
            ),
            (
                403,
                r#"{"code":403,"message":"blocked"}"#,
                ErrorKind::PermissionDenied,
                Retry::Permanent,
            ),
            (
                404,
                r#"{"code":404,"message":"no"}"#,
                ErrorKind::SandboxGone,
                Retry::Permanent,
            ),
            (409, "{}", ErrorKind::AlreadyExists, Retry::Permanent),
            (422, "{}", ErrorKind::InvalidArgument, Retry::Permanent),
            (429, "slow down", ErrorKind::RateLimited, Retry::Temporary),
            (500, "<html>", ErrorKind::Unavailable, Retry::Temporary),
            (
                503,
                r#"{"code":503,"message":"no capacity"}"#,
                ErrorKind::Unavailable,
                Retry::Temporary,
            ),
            (
                504,
                "upstream request timeout",
                ErrorKind::Unavailable,
                Retry::Temporary,
            ),
            (302, "", ErrorKind::Protocol, Retry::Permanent),
        ] {
            let error = control(status, body);
            assert_eq!((error.kind(), error.retry()), (kind, retry), "{status} {body}");
        }
        let missing = into_error(control_plane(Subject::Template, 404, &HeaderMap::new(), b"{}"));
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn the_provider_knows_better_than_the_status() {
        let mut headers = HeaderMap::new();
        headers.insert("should-retry", HeaderValue::from_static("false"));
        let error = into_error(control_plane(Subject::Sandbox, 503, &headers, b""));
        assert_eq!(error.retry(), Retry::Permanent);
        headers.insert("should-retry", HeaderValue::from_static("True"));
        let error = into_error(control_plane(Subject::Sandbox, 400, &headers, b""));
        assert_eq!(error.retry(), Retry::Temporary);
        headers.clear();
        headers.insert("retry-after", HeaderValue::from_static("7"));
        let error = into_error(control_plane(Subject::Sandbox, 429, &headers, b""));
        assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
    }

    #[test]
    fn only_a_refusal_proves_that_nothing_was_created() {
        let is_unsent = |status, body: &str| {
            control_plane(Subject::Sandbox, status, &HeaderMap::new(), body.as_bytes()).is_unsent()
        };
        assert!(is_unsent(429, "text") && is_unsent(503, r#"{"code":503}"#));
        assert!(!is_unsent(503, "<html>") && !is_unsent(500, r#"{"code":500}"#) && !is_unsent(504, "text"));
    }

    #[test]
    fn a_box_that_is_gone_is_told_from_a_closed_port() {
        let gone = rpc(&parse_error(
            502,
            br#"{"sandboxId":"i1","message":"The sandbox was not found","code":502}"#,
        ));
        assert_eq!(gone.kind(), ErrorKind::SandboxGone);
        let closed = rpc(&parse_error(
            502,
            br#"{"sandboxId":"i1","message":"port is not open","port":1,"code":502}"#,
        ));
        assert_eq!((closed.kind(), closed.is_retryable()), (ErrorKind::Unavailable, true));
        assert_eq!(
            files(502, br#"{"message":"The sandbox was not found","code":502}"#).kind(),
            ErrorKind::SandboxGone
        );
    }

    #[test]
    fn every_code_has_a_kind() {
        for (code, kind) in [
            ("canceled", ErrorKind::ConnectionLost),
            ("invalid_argument", ErrorKind::InvalidArgument),
            ("deadline_exceeded", ErrorKind::Timeout),
            ("not_found", ErrorKind::NotFound),
            ("already_exists", ErrorKind::AlreadyExists),
            ("permission_denied", ErrorKind::PermissionDenied),
            ("resource_exhausted", ErrorKind::RateLimited),
            ("unimplemented", ErrorKind::Unsupported),
            ("internal", ErrorKind::Other),
            ("unavailable", ErrorKind::Unavailable),
            ("unauthenticated", ErrorKind::Unauthorized),
        ] {
            let body = format!(r#"{{"code":"{code}","message":"m"}}"#);
            assert_eq!(rpc(&parse_error(500, body.as_bytes())).kind(), kind, "{code}");
        }
    }

    #[test]
    fn every_status_of_the_file_endpoint_has_a_kind() {
        for (status, body, kind) in [
            (
                400,
                r#"{"code":400,"message":"path '/' is a directory"}"#,
                ErrorKind::WrongFileType,
            ),
            (400, "{}", ErrorKind::InvalidArgument),
            (401, "{}", ErrorKind::Unauthorized),
            (404, "{}", ErrorKind::NotFound),
            (
                500,
                r#"{"message":"open /a/b: not a directory"}"#,
                ErrorKind::WrongFileType,
            ),
            (500, "{}", ErrorKind::Other),
            (503, "", ErrorKind::Unavailable),
            (
                507,
                r#"{"code":507,"message":"no space"}"#,
                ErrorKind::ResourceExhausted,
            ),
        ] {
            assert_eq!(files(status, body.as_bytes()).kind(), kind, "{status} {body}");
        }
    }
}
