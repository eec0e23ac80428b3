//! Connect RPC: paths, headers, codes.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderName, Method};
use prost::Message;

use super::Request;
use super::envelope;

/// What a unary call may take; envd is told the same.
pub const UNARY_TIMEOUT: Duration = Duration::from_secs(60);

/// How often envd is asked to say that nothing happened. Below every idle limit on the path; never 0, which kills envd.
pub const KEEPALIVE: Duration = Duration::from_secs(50);

const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("connect-protocol-version");
const TIMEOUT: HeaderName = HeaderName::from_static("connect-timeout-ms");
const KEEPALIVE_INTERVAL: HeaderName = HeaderName::from_static("keepalive-ping-interval");
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("connect-accept-encoding");

/// Whether a call names a user of the box.
#[derive(Debug, Clone, Copy)]
pub enum Auth<'a> {
    /// It does not.
    None,
    /// It does.
    User(&'a str),
}

/// A call of one message with one answer.
pub fn unary(method: &str, message: &impl Message, auth: Auth<'_>, timeout: Option<Duration>) -> Request {
    let mut request = Request::new(Method::POST, format!("/{method}"))
        .header(http::header::CONTENT_TYPE, "application/proto")
        .header(PROTOCOL_VERSION, "1");
    request.body = Bytes::from(message.encode_to_vec());
    if let Some(timeout) = timeout {
        // 0 would mean that it has passed already.
        request = request.header(TIMEOUT, timeout.as_millis().max(1).to_string());
    }
    with_auth(request, auth)
}

/// A call of one message with a stream of answers.
pub fn streaming(method: &str, message: &impl Message, auth: Auth<'_>) -> Request {
    let mut request = Request::new(Method::POST, format!("/{method}"))
        .header(http::header::CONTENT_TYPE, "application/connect+proto")
        .header(PROTOCOL_VERSION, "1")
        .header(ACCEPT_ENCODING, "identity")
        .header(KEEPALIVE_INTERVAL, KEEPALIVE.as_secs().to_string());
    request.body = envelope::encode(0, &message.encode_to_vec());
    with_auth(request, auth)
}

/// A call of a stream of messages, which the client adds as frames, with one answer.
pub fn client_streaming(method: &str) -> Request {
    Request::new(Method::POST, format!("/{method}"))
        .header(http::header::CONTENT_TYPE, "application/connect+proto")
        .header(PROTOCOL_VERSION, "1")
        .header(ACCEPT_ENCODING, "identity")
}

fn with_auth(request: Request, auth: Auth<'_>) -> Request {
    match auth {
        Auth::None => request,
        Auth::User(user) => request.header(
            http::header::AUTHORIZATION,
            format!("Basic {}", STANDARD.encode(format!("{user}:"))),
        ),
    }
}

/// The codes of Connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// The caller or a proxy gave up.
    Canceled,
    /// Not told.
    Unknown,
    /// The request is wrong.
    InvalidArgument,
    /// The deadline passed; of `Start`: the process was killed.
    DeadlineExceeded,
    /// No such process, file, or sandbox.
    NotFound,
    /// It exists.
    AlreadyExists,
    /// Refused.
    PermissionDenied,
    /// Too much.
    ResourceExhausted,
    /// Not in this state.
    FailedPrecondition,
    /// A conflict.
    Aborted,
    /// Out of range.
    OutOfRange,
    /// Not offered.
    Unimplemented,
    /// A failure of envd.
    Internal,
    /// Not there now.
    Unavailable,
    /// Lost.
    DataLoss,
    /// No or wrong credentials, or an unknown user.
    Unauthenticated,
}

const CODES: [(Code, &str, u16); 16] = [
    (Code::Canceled, "canceled", 499),
    (Code::Unknown, "unknown", 500),
    (Code::InvalidArgument, "invalid_argument", 400),
    (Code::DeadlineExceeded, "deadline_exceeded", 504),
    (Code::NotFound, "not_found", 404),
    (Code::AlreadyExists, "already_exists", 409),
    (Code::PermissionDenied, "permission_denied", 403),
    (Code::ResourceExhausted, "resource_exhausted", 429),
    (Code::FailedPrecondition, "failed_precondition", 400),
    (Code::Aborted, "aborted", 409),
    (Code::OutOfRange, "out_of_range", 400),
    (Code::Unimplemented, "unimplemented", 501),
    (Code::Internal, "internal", 500),
    (Code::Unavailable, "unavailable", 503),
    (Code::DataLoss, "data_loss", 500),
    (Code::Unauthenticated, "unauthenticated", 401),
];

impl Code {
    /// The code of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        CODES
            .iter()
            .find(|(_, known, _)| *known == name)
            .map(|(code, ..)| *code)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        CODES
            .iter()
            .find(|(code, ..)| *code == self)
            .map_or("unknown", |(_, name, _)| name)
    }

    /// The status of a unary answer with this code.
    pub fn http_status(self) -> u16 {
        CODES
            .iter()
            .find(|(code, ..)| *code == self)
            .map_or(500, |(.., status)| *status)
    }

    /// What a status means that was not produced by the RPC layer.
    pub fn from_http_status(status: u16) -> Self {
        match status {
            400 => Self::InvalidArgument,
            401 => Self::Unauthenticated,
            403 => Self::PermissionDenied,
            404 => Self::NotFound,
            409 => Self::AlreadyExists,
            413 | 429 => Self::ResourceExhausted,
            499 => Self::Canceled,
            500 => Self::Internal,
            501 | 505 => Self::Unimplemented,
            502 | 503 => Self::Unavailable,
            504 => Self::DeadlineExceeded,
            _ => Self::Unknown,
        }
    }
}

/// What went wrong with a call, as the other side said it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RpcError {
    /// Its code.
    pub code: Code,
    /// Its message.
    pub message: String,
    /// Whether the RPC layer itself answered, rather than something on the way to it.
    pub from_rpc_layer: bool,
}

/// Reads the answer of a unary call, or of a streaming call that did not answer 200.
pub fn parse_error(status: u16, body: &[u8]) -> RpcError {
    let value: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let message = value
        .as_ref()
        .and_then(|value| value.get("message")?.as_str())
        .map_or_else(|| String::from_utf8_lossy(body).trim().to_owned(), str::to_owned);
    let code = value.as_ref().and_then(|value| value.get("code"));
    if let Some(code) = code.and_then(serde_json::Value::as_str).and_then(Code::from_name) {
        return RpcError {
            code,
            message,
            from_rpc_layer: true,
        };
    }
    // An integer in the body is nearer to the cause than what a proxy made of it.
    let status = code
        .and_then(serde_json::Value::as_u64)
        .and_then(|code| u16::try_from(code).ok())
        .unwrap_or(status);
    RpcError {
        code: Code::from_http_status(status),
        message,
        from_rpc_layer: false,
    }
}

/// Reads the last frame of a stream: nothing, or what went wrong.
///
/// # Errors
/// The text, if it is no such frame.
pub fn parse_end(payload: &[u8]) -> Result<Option<RpcError>, String> {
    #[derive(serde::Deserialize)]
    struct End {
        error: Option<EndError>,
    }
    #[derive(serde::Deserialize)]
    struct EndError {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let end: End = serde_json::from_slice(payload).map_err(|error| error.to_string())?;
    Ok(end.error.map(|error| RpcError {
        code: Code::from_name(&error.code).unwrap_or(Code::Unknown),
        message: error.message,
        from_rpc_layer: true,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_the_rpc_layer_is_told_from_one_of_the_edge() {
        let error = parse_error(404, br#"{"code":"not_found","message":"no pid 7"}"#);
        assert_eq!(
            (error.code, error.message.as_str(), error.from_rpc_layer),
            (Code::NotFound, "no pid 7", true)
        );
        let error = parse_error(502, br#"{"code":429,"message":"slow down"}"#);
        assert_eq!((error.code, error.from_rpc_layer), (Code::ResourceExhausted, false));
        let error = parse_error(504, b"upstream request timeout");
        assert_eq!(
            (error.code, error.message.as_str()),
            (Code::DeadlineExceeded, "upstream request timeout")
        );
        let error = parse_error(503, b"<html>");
        assert_eq!((error.code, error.from_rpc_layer), (Code::Unavailable, false));
        assert_eq!(parse_error(418, b"").code, Code::Unknown);
    }

    #[test]
    fn the_last_frame_is_nothing_or_an_error() {
        assert_eq!(parse_end(b"{}"), Ok(None));
        let error = parse_end(br#"{"error":{"code":"not_found","message":"x"}}"#)
            .expect("sound")
            .expect("an error");
        assert_eq!((error.code, error.message.as_str()), (Code::NotFound, "x"));
        assert_eq!(
            parse_end(br#"{"error":{"code":"odd"}}"#)
                .expect("sound")
                .expect("an error")
                .code,
            Code::Unknown
        );
        assert!(parse_end(b"<html>").is_err());
    }

    #[test]
    fn every_code_has_a_name_and_a_status() {
        for (code, name, status) in CODES {
            assert_eq!(Code::from_name(name), Some(code));
            assert_eq!((code.name(), code.http_status()), (name, status));
        }
    }
}
