//! HTTP/1.1 for both halves, and what a fault does to it.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::body::{Body as HttpBody, Frame, Incoming};
use tokio::sync::mpsc;

use super::distort::distort;
use super::fault::Verdict;
use super::state::State;
use super::{control, envd};

pub(super) type Body = UnsyncBoxBody<Bytes, io::Error>;
pub(super) type Answer = Response<Body>;
/// A request that has arrived to its end.
pub(super) type Whole = Request<Full<Bytes>>;

/// Which half a listener serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    ControlPlane,
    Envd,
}

pub(super) async fn serve(listener: std::net::TcpListener, state: Arc<State>, half: Half) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
        return;
    };
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors, most likely: some will be closed.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let state = state.clone();
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request| {
                let state = state.clone();
                async move { handle(state, half, request).await }
            });
            let io = hyper_util::rt::TokioIo::new(stream);
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(io, service)
                .await;
        });
    }
}

/// Closes the connection without an answer.
#[derive(Debug)]
struct Closed;

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("closed on request")
    }
}

impl std::error::Error for Closed {}

async fn handle(state: Arc<State>, half: Half, request: Request<Incoming>) -> Result<Answer, Closed> {
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    let line = format!("{} {target}", request.method());
    state.note(line.clone());
    let verdict = state.faults.judge(&line);
    let delay = match &verdict {
        Some(Verdict::Answer(status, body, headers)) => return Ok(prepared(*status, body, headers)),
        Some(Verdict::Close) => return Err(Closed),
        Some(Verdict::Delay(delay)) => *delay,
        _ => Duration::ZERO,
    };
    let answer = match half {
        Half::ControlPlane => {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map_err(|_| Closed)?.to_bytes();
            let request = Request::from_parts(parts, Full::new(body));
            // What has arrived is done, whether or not somebody still waits for the answer.
            let done = tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                control::handle(&state, request).await
            });
            done.await.map_err(|_| Closed)?
        }
        Half::Envd => {
            tokio::time::sleep(delay).await;
            envd::handle(&state, request).await
        }
    };
    match verdict {
        Some(Verdict::LoseAnswer) => Err(Closed),
        Some(Verdict::Distort(distortion)) => Ok(answer.map(|body| distort(body, distortion))),
        _ => Ok(answer),
    }
}

fn prepared(status: u16, body: &str, headers: &[(String, String)]) -> Answer {
    let kind = if body.starts_with('{') {
        "application/json"
    } else {
        "text/plain"
    };
    let mut answer = Response::new(full(body.to_owned()));
    *answer.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    answer
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, HeaderValue::from_static(kind));
    for (name, value) in headers {
        if let (Ok(name), Ok(value)) = (http::HeaderName::try_from(name), HeaderValue::try_from(value)) {
            answer.headers_mut().insert(name, value);
        }
    }
    answer
}

fn never(error: Infallible) -> io::Error {
    match error {}
}

/// A body in memory.
pub(super) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(never).boxed_unsync()
}

/// An answer without a body.
pub(super) fn empty(status: StatusCode) -> Answer {
    let mut answer = Response::new(full(Bytes::new()));
    *answer.status_mut() = status;
    answer
}

/// A JSON answer.
pub(super) fn json(status: StatusCode, body: &impl serde::Serialize) -> Answer {
    let text = serde_json::to_vec(body).unwrap_or_default();
    let mut answer = Response::new(full(text));
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// An error as the control plane and envd's endpoints put it.
pub(super) fn failure(status: StatusCode, message: impl Into<String>) -> Answer {
    json(
        status,
        &serde_json::json!({ "code": status.as_u16(), "message": message.into() }),
    )
}

/// The whole body of a request.
pub(super) async fn read<B>(request: Request<B>) -> io::Result<Bytes>
where
    B: HttpBody<Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    let collected = request.into_body().collect().await.map_err(io::Error::other)?;
    Ok(collected.to_bytes())
}

/// What goes into a body that is made as it is sent.
#[derive(Debug)]
pub(super) enum Piece {
    Bytes(Bytes),
    /// It is complete. Without this the connection breaks when the sender goes.
    End,
}

struct Channel {
    pieces: mpsc::Receiver<Piece>,
    ended: bool,
}

impl HttpBody for Channel {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        match ready!(self.pieces.poll_recv(cx)) {
            Some(Piece::Bytes(bytes)) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            Some(Piece::End) => {
                self.ended = true;
                Poll::Ready(None)
            }
            None => {
                self.ended = true;
                Poll::Ready(Some(Err(io::Error::other("cut short"))))
            }
        }
    }
}

/// A body that is made as it is sent.
pub(super) fn channel(capacity: usize) -> (mpsc::Sender<Piece>, Body) {
    let (sender, pieces) = mpsc::channel(capacity);
    (sender, Channel { pieces, ended: false }.boxed_unsync())
}

/// The query of a request, decoded.
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    pub(super) fn of<B>(request: &Request<B>) -> Self {
        Self(parse_query(request.uri().query().unwrap_or_default()))
    }

    /// The first value of this name.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

pub(super) fn parse_query(query: &str) -> Vec<(String, String)> {
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        })
        .collect()
}

/// Percent-decoding, with `+` as a space.
pub(super) fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let mut ahead = rest.clone();
                let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
                match (digit(ahead.next()), digit(ahead.next())) {
                    (Some(high), Some(low)) => {
                        bytes.push((high * 16 + low) as u8);
                        rest = ahead;
                    }
                    _ => bytes.push(byte),
                }
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
