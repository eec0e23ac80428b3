//! envd: finds the box of a request, checks its token, and lets the box handle it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use prost::Message;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::boxes::EmulatedBox;
use super::control::gone;
use super::server::{Answer, empty, failure, full, read};
use super::state::State;
use super::{files, filesystem, process, proxy, signature};
use crate::endpoints::ENVD_PORT;
use crate::wire::envelope::{self, Decoder, END_OF_STREAM};
use crate::wire::rpc::Code;

/// The box and port that a request is for, and the path on that port.
fn route(request: &Request<Incoming>) -> (String, u16, String) {
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    if let Some(rest) = target.strip_prefix("/_port/") {
        let (label, path) = rest.split_once('/').unwrap_or((rest, ""));
        if let Some((port, id)) = label.split_once('-') {
            return (id.to_owned(), port.parse().unwrap_or(0), format!("/{path}"));
        }
    }
    let header = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    let id = header("e2b-sandbox-id").unwrap_or_default();
    if !id.is_empty() {
        let port = header("e2b-sandbox-port")
            .and_then(|port| port.parse().ok())
            .unwrap_or(ENVD_PORT);
        return (id.to_owned(), port, target.to_owned());
    }
    // The leftmost label of the host: port, then id.
    let label = header("host")
        .and_then(|host| host.split('.').next())
        .unwrap_or_default();
    let (port, id) = label.split_once('-').unwrap_or(("", ""));
    (id.to_owned(), port.parse().unwrap_or(0), target.to_owned())
}

pub(super) async fn handle(state: &Arc<State>, request: Request<Incoming>) -> Answer {
    let (id, port, path) = route(&request);
    if id.is_empty() {
        return failure(StatusCode::BAD_REQUEST, "no sandbox is named");
    }
    let Some(found) = state.find(&id) else { return gone(&id) };
    let Some(place) = found.place() else { return gone(&id) };
    if port != ENVD_PORT {
        let box_id = id.clone();
        let passed = place.run(async move { proxy::pass(&box_id, port, request, &path).await });
        return passed.await.unwrap_or_else(|| gone(&id));
    }
    let plain = path.split('?').next().unwrap_or_default().to_owned();
    if plain == "/health" {
        return empty(StatusCode::NO_CONTENT);
    }
    let may_pass = match request.headers().get("x-access-token") {
        Some(token) => token.as_bytes() == found.token.as_bytes(),
        None => plain == "/files" && signature::is_good(&request, &found.token),
    };
    if !may_pass {
        return failure(
            StatusCode::UNAUTHORIZED,
            "the access token, or the signature of the URL, is missing or wrong",
        );
    }
    let users = Users {
        shared_home: place.shared_home.clone(),
    };
    if request.method() == Method::POST
        && let Some(method) = plain.strip_prefix("/process.Process/")
    {
        let (method, here) = (method.to_owned(), place.clone());
        let handled = place.run_process(async move { process::handle(&found, &here, &users, &method, request).await });
        return handled.await.unwrap_or_else(|| gone(&id));
    }
    let handled = place.run(async move {
        match (request.method().clone(), plain.as_str()) {
            (Method::GET, "/files") => files::download(&users, &request),
            (Method::POST, "/files") => files::upload(&users, request).await,
            (Method::POST, path) => match path.strip_prefix('/').and_then(|path| path.split_once('/')) {
                Some(("filesystem.Filesystem", method)) => filesystem::handle(&found, &users, method, request).await,
                _ => failure(StatusCode::NOT_FOUND, "no such path"),
            },
            _ => failure(StatusCode::METHOD_NOT_ALLOWED, "no such method"),
        }
    });
    handled.await.unwrap_or_else(|| gone(&id))
}

/// A user of a box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct User {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) home: String,
}

/// The users of a box.
#[derive(Debug, Clone)]
pub(super) struct Users {
    shared_home: Option<std::path::PathBuf>,
}

impl Users {
    pub(super) fn find(&self, name: &str) -> Option<User> {
        if let Some(home) = &self.shared_home {
            // Without a namespace everybody is whoever runs the emulator.
            let known = matches!(name, "root" | "user");
            return known.then(|| User {
                name: name.to_owned(),
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
                home: home.to_string_lossy().into_owned(),
            });
        }
        let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
        passwd.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [found, _, uid, gid, _, home, ..] = fields.as_slice() else {
                return None;
            };
            (*found == name).then_some(())?;
            Some(User {
                name: name.to_owned(),
                uid: uid.parse().ok()?,
                gid: gid.parse().ok()?,
                home: (*home).to_owned(),
            })
        })
    }

    /// The user that the header of a call names, or the template's.
    pub(super) fn of_call(&self, headers: &HeaderMap) -> Result<User, RpcFailure> {
        use base64::Engine as _;
        let named = headers.get(http::header::AUTHORIZATION).and_then(|value| {
            let encoded = value.to_str().ok()?.strip_prefix("Basic ")?;
            let decoded = base64::engine::general_purpose::STANDARD.decode(encoded).ok()?;
            Some(String::from_utf8(decoded).ok()?.split(':').next()?.to_owned())
        });
        let name = named.unwrap_or_else(|| "user".to_owned());
        self.find(&name)
            .ok_or_else(|| RpcFailure::new(Code::Unauthenticated, format!("invalid username: '{name}'")))
    }
}

/// A path as envd resolves it.
pub(super) fn resolve(path: &str, user: &User) -> String {
    let home = user.home.trim_end_matches('/');
    match path {
        "" | "~" => user.home.clone(),
        path if path.starts_with("~/") => format!("{home}/{}", &path[2..]),
        path if path.starts_with('/') => path.to_owned(),
        path => format!("{home}/{path}"),
    }
}

/// An RPC that failed.
#[derive(Debug)]
pub(super) struct RpcFailure {
    pub(super) code: Code,
    pub(super) message: String,
}

impl RpcFailure {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

/// The two codecs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codec {
    Json,
    Proto,
}

impl Codec {
    /// The codec of a request, and whether it is a streaming one.
    pub(super) fn of(headers: &HeaderMap) -> Option<(Self, bool)> {
        let kind = headers.get(http::header::CONTENT_TYPE)?.to_str().ok()?;
        match kind.split(';').next()?.trim() {
            "application/json" => Some((Self::Json, false)),
            "application/proto" => Some((Self::Proto, false)),
            "application/connect+json" => Some((Self::Json, true)),
            "application/connect+proto" => Some((Self::Proto, true)),
            _ => None,
        }
    }

    pub(super) fn decode<T: Message + Default + DeserializeOwned>(self, bytes: &[u8]) -> Result<T, RpcFailure> {
        let decoded = match self {
            Self::Json => serde_json::from_slice(bytes).map_err(|error| error.to_string()),
            Self::Proto => T::decode(bytes).map_err(|error| error.to_string()),
        };
        decoded.map_err(|error| RpcFailure::new(Code::InvalidArgument, error))
    }

    pub(super) fn encode<T: Message + Serialize>(self, message: &T) -> Vec<u8> {
        match self {
            Self::Json => serde_json::to_vec(message).unwrap_or_default(),
            Self::Proto => message.encode_to_vec(),
        }
    }

    /// A frame of a stream.
    pub(super) fn frame<T: Message + Serialize>(self, message: &T) -> Bytes {
        envelope::encode(0, &self.encode(message))
    }

    pub(super) fn stream_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Json => "application/connect+json",
            Self::Proto => "application/connect+proto",
        })
    }
}

/// The last frame of a stream.
pub(super) fn end_frame(failure: Option<&RpcFailure>) -> Bytes {
    let body = match failure {
        None => serde_json::json!({}),
        Some(failure) => {
            serde_json::json!({ "error": { "code": failure.code.name(), "message": failure.message } })
        }
    };
    envelope::encode(END_OF_STREAM, body.to_string().as_bytes())
}

/// An answer of a stream that failed before its first message: a 200 all the same.
pub(super) fn failed_stream(codec: Codec, failure: &RpcFailure) -> Answer {
    let mut answer = Response::new(full(end_frame(Some(failure))));
    answer
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, codec.stream_type());
    answer
}

/// The answer of a unary call.
pub(super) fn unary<T: Message + Serialize>(codec: Codec, result: Result<T, RpcFailure>) -> Answer {
    match result {
        Ok(message) => {
            let mut answer = Response::new(full(codec.encode(&message)));
            let kind = match codec {
                Codec::Json => "application/json",
                Codec::Proto => "application/proto",
            };
            answer
                .headers_mut()
                .insert(http::header::CONTENT_TYPE, HeaderValue::from_static(kind));
            answer
        }
        Err(failure) => {
            let status = StatusCode::from_u16(failure.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let body = serde_json::json!({ "code": failure.code.name(), "message": failure.message });
            super::server::json(status, &body)
        }
    }
}

/// Reads the one message of a call.
pub(super) async fn message<T: Message + Default + DeserializeOwned>(
    codec: Codec,
    request: Request<Incoming>,
) -> Result<T, RpcFailure> {
    let body = read(request)
        .await
        .map_err(|error| RpcFailure::new(Code::Canceled, error.to_string()))?;
    codec.decode(&body)
}

/// The one message of a streaming call, out of its frame.
pub(super) async fn framed<T>(codec: Codec, request: Request<Incoming>) -> Result<T, RpcFailure>
where
    T: prost::Message + Default + serde::de::DeserializeOwned,
{
    let body = read(request)
        .await
        .map_err(|error| RpcFailure::new(Code::Canceled, error.to_string()))?;
    let mut decoder = Decoder::default();
    decoder.push(body);
    match decoder.next_frame() {
        Ok(Some(frame)) => codec.decode(&frame.payload),
        _ => Err(RpcFailure::new(Code::InvalidArgument, "malformed envelope")),
    }
}

/// How often a stream is to say that nothing happened.
pub(super) fn keepalive(headers: &HeaderMap) -> Duration {
    let asked = headers
        .get("keepalive-ping-interval")
        .and_then(|value| value.to_str().ok()?.parse().ok());
    Duration::from_secs(asked.unwrap_or(90).max(1))
}

/// A call of an unknown method.
pub(super) fn unimplemented(method: &str) -> RpcFailure {
    RpcFailure::new(Code::Unimplemented, format!("{method} is not implemented"))
}

/// Keeps the type of a box out of the signatures of its rooms.
pub(super) type Box = Arc<EmulatedBox>;
