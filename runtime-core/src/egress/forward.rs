//! Plain requests: judged one by one, written anew, sent on over a connection of this client's own.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::{Authority, PathAndQuery};
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::{Answer, Outgoing, Reply};
use super::deadline::Deadline;
use super::dial::{Dialled, NoWay, dial};
use super::guard::Gate;
use super::lenient::Lenient;
use super::live::{Entered, Hello, InForce, Way};
use super::log::{Attempt, EgressKind, Verdict};
use super::proxy::Shared;
use super::tunnel::{self, Outside, Switched};
use crate::network::{Destination, Scheme, Tunnel};

/// A connection that was idle for longer may be closed by its server at any moment, so that a request which must not be
/// sent twice goes over a new one.
const FRESH: Duration = Duration::from_secs(1);
/// A connection that was used this moment is not about to be closed for idleness.
const BUSY: Duration = Duration::from_millis(10);
/// What is buffered of an answer.
const ANSWER_BUFFER: usize = 128 << 10;

/// Fields that concern one connection and never travel further. `Expect` is answered here.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// One connection of the box: what its requests share.
pub(super) struct Client {
    pub(super) shared: Arc<Shared>,
    gate: Arc<Gate>,
    upstream: Mutex<Option<Upstream>>,
    switched: Mutex<Option<Switched>>,
}

/// One request and its answer. When the last part of either is dropped, the log is told.
pub(super) struct Exchange {
    pub(super) attempt: Attempt,
    /// The request's body has been sent on completely.
    pub(super) sent: AtomicBool,
    gate: Arc<Gate>,
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.gate.idle();
    }
}

/// An HTTP connection outward, for one destination under one policy. Dropping it closes it.
struct Upstream {
    destination: Destination,
    generation: u64,
    sender: http1::SendRequest<Outgoing>,
    verdict: Verdict,
    used: Instant,
    /// Of an answer.
    deadline: Option<Deadline>,
    quit: Quit,
}

/// Closes a connection outward when dropped.
struct Quit(CancellationToken);

impl Drop for Quit {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Client {
    pub(super) fn new(shared: Arc<Shared>, gate: Arc<Gate>) -> Self {
        Self {
            shared,
            gate,
            upstream: Mutex::new(None),
            switched: Mutex::new(None),
        }
    }

    pub(super) fn switch(&self, switched: Switched) {
        *self.switched.lock().unwrap_or_else(PoisonError::into_inner) = Some(switched);
    }

    pub(super) fn take_switched(&self) -> Option<Switched> {
        self.switched.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn will_switch(&self) -> bool {
        self.switched.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The connection that the request before this one left behind, if it is of use for this one.
    fn kept(&self, destination: &Destination, in_force: &InForce, once: bool) -> Option<Upstream> {
        let kept = self.upstream.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let of_use = kept.destination == *destination
            && kept.generation == in_force.generation
            && !kept.quit.0.is_cancelled()
            && !kept.sender.is_closed()
            && (!once || kept.used.elapsed() < FRESH);
        of_use.then_some(kept)
    }

    fn keep(&self, mut upstream: Upstream) {
        upstream.used = Instant::now();
        *self.upstream.lock().unwrap_or_else(PoisonError::into_inner) = Some(upstream);
    }
}

/// Answers one request. Never fails: what goes wrong is an answer, or shows in its body.
pub(super) async fn answer(
    client: Arc<Client>,
    request: Request<Incoming>,
) -> Result<Response<Reply>, std::convert::Infallible> {
    let exchange = Arc::new(Exchange {
        attempt: Attempt::new(&client.shared.log, &client.shared.name, EgressKind::Request),
        sent: AtomicBool::new(false),
        gate: Arc::clone(&client.gate),
    });
    exchange.attempt.method(request.method().as_str());
    let response = if !is_admitted(&client.shared, request.headers()) {
        exchange.attempt.refused(Verdict::refused("unauthenticated"));
        let mut response = status(&exchange, StatusCode::PROXY_AUTHENTICATION_REQUIRED);
        let challenge = HeaderValue::from_static("Basic realm=\"verifiers\"");
        response.headers_mut().insert(header::PROXY_AUTHENTICATE, challenge);
        response
    } else if request.method() == Method::CONNECT {
        tunnel::connect(&client, request, exchange).await
    } else {
        forward(&client, request, exchange).await
    };
    if !client.will_switch() {
        client.gate.open();
    }
    Ok(response)
}

/// Whether exactly one token was shown, and the right one.
fn is_admitted(shared: &Shared, headers: &HeaderMap) -> bool {
    let mut shown = headers.get_all(header::PROXY_AUTHORIZATION).iter();
    match (shown.next(), shown.next()) {
        (Some(value), None) => shared
            .token
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .admits(value),
        _ => false,
    }
}

/// An answer without content.
pub(super) fn status(exchange: &Exchange, status: StatusCode) -> Response<Reply> {
    exchange.attempt.status(status.as_u16());
    let mut response = Response::new(Reply::Empty);
    *response.status_mut() = status;
    response
}

/// The answer when there is no way to the destination.
pub(super) fn refuse(exchange: &Exchange, no_way: NoWay) -> Response<Reply> {
    let code = match no_way {
        NoWay::Refused(_) => StatusCode::FORBIDDEN,
        NoWay::ResolveTimeout | NoWay::ConnectTimeout => StatusCode::GATEWAY_TIMEOUT,
        NoWay::Unresolved | NoWay::Unreachable | NoWay::Cancelled => StatusCode::BAD_GATEWAY,
    };
    no_way.tell(&exchange.attempt);
    status(exchange, code)
}

/// Host and port of an authority without user information.
pub(super) fn host_and_port(authority: &Authority, default: u16) -> Option<(&str, u16)> {
    let host = authority.host();
    let rest = authority.as_str().strip_prefix(host)?;
    let port = match rest.strip_prefix(':') {
        None if rest.is_empty() => default,
        Some("") => default,
        Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => port.parse().ok()?,
        _ => return None,
    };
    Some((host, port))
}

/// Where a request in absolute form wants to go, or the answer that it gets.
fn destination(uri: &Uri) -> Result<Destination, (StatusCode, &'static str)> {
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err((StatusCode::FORBIDDEN, "origin_form"));
    };
    match scheme {
        "http" => match host_and_port(authority, 80) {
            Some((host, port)) => Ok(Destination::new(Scheme::Http, host, port)),
            None => Err((StatusCode::BAD_REQUEST, "malformed_target")),
        },
        // TLS is for the program to speak, through a tunnel.
        "https" => Err((StatusCode::FORBIDDEN, "absolute_https")),
        _ => Err((StatusCode::FORBIDDEN, "unknown_scheme")),
    }
}

async fn forward(client: &Client, mut request: Request<Incoming>, exchange: Arc<Exchange>) -> Response<Reply> {
    let shared = &client.shared;
    let attempt = &exchange.attempt;
    let destination = match destination(request.uri()) {
        Ok(destination) => destination,
        Err((code, reason)) => {
            attempt.refused(Verdict::refused(reason));
            return status(&exchange, code);
        }
    };
    let in_force = shared.board.in_force();
    attempt.wants(&destination, in_force.generation);
    if let Some(expect) = request.headers().get(header::EXPECT)
        && !expect.as_bytes().eq_ignore_ascii_case(b"100-continue")
    {
        attempt.failed("unknown_expectation");
        return status(&exchange, StatusCode::EXPECTATION_FAILED);
    }
    let websocket = wants_websocket(&request);
    if websocket {
        attempt.kind(EgressKind::Upgrade);
    }
    let way = Way {
        destination,
        // What becomes a stream of anything needs what a tunnel needs.
        tunnel: if websocket { Tunnel::Yes } else { Tunnel::No },
        addresses: Vec::new(),
        is_route: false,
        hello: Hello::None,
    };
    let verdict = way.judge(&in_force.policy);
    if !verdict.permitted {
        return refuse(&exchange, NoWay::Refused(verdict));
    }
    let inside = websocket.then(|| hyper::upgrade::on(&mut request));
    let (head, body) = request.into_parts();
    let Some(head) = outgoing_head(head, &way.destination, websocket) else {
        attempt.failed("malformed_target");
        return status(&exchange, StatusCode::BAD_REQUEST);
    };
    let bodiless = body.is_end_stream();
    let once = !(bodiless && head.method.is_idempotent());
    let mut kept = if websocket {
        None
    } else {
        client.kept(&way.destination, &in_force, once)
    };
    let is_idle = kept.as_ref().is_some_and(|kept| kept.used.elapsed() > BUSY);
    let mut again = (is_idle && !once).then(|| head.clone());
    let mut request = Request::from_parts(head, Outgoing::new(Some(body), &exchange));
    let mut entered = None;
    let (response, upstream) = loop {
        let reused = kept.is_some();
        let mut upstream = match kept.take() {
            Some(kept) => kept,
            None => match open(shared, way.clone(), websocket).await {
                Ok((upstream, place)) => {
                    entered = place;
                    upstream
                }
                Err(no_way) => return refuse(&exchange, no_way),
            },
        };
        attempt.permitted(upstream.verdict.clone());
        let limit = (!upstream.verdict.is_framework()).then_some(shared.limits.response);
        let failed = match send(&mut upstream, request, &exchange, limit).await {
            Ok(response) => break (response, upstream),
            Err(failed) => failed,
        };
        // A server may close an idle connection just when it is used again. Once more, over a new one, if it got nothing
        // or if it may get it twice.
        request = match (failed, again.take()) {
            (Failed::NotSent(request), _) if reused => *request,
            (Failed::NotSent(_) | Failed::Broken, Some(head)) if reused => {
                Request::from_parts(head, Outgoing::new(None, &exchange))
            }
            (Failed::TimedOut, _) => {
                attempt.failed("response_timeout");
                return status(&exchange, StatusCode::GATEWAY_TIMEOUT);
            }
            _ if upstream.quit.0.is_cancelled() => {
                attempt.failed("policy_changed");
                return status(&exchange, StatusCode::BAD_GATEWAY);
            }
            _ => {
                attempt.failed("no_response");
                return status(&exchange, StatusCode::BAD_GATEWAY);
            }
        };
    };
    attempt.allowed();
    attempt.status(response.status().as_u16());
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let (Some(inside), Some(entered)) = (inside, entered.take()) else {
            attempt.failed("unasked_switch");
            return status(&exchange, StatusCode::BAD_GATEWAY);
        };
        return switched(client, response, inside, entered, upstream, exchange);
    }
    incoming(client, response, upstream, exchange, shared)
}

/// The answer as it goes to the box.
fn incoming(
    client: &Client,
    response: Response<Incoming>,
    upstream: Upstream,
    exchange: Arc<Exchange>,
    shared: &Shared,
) -> Response<Reply> {
    let (mut head, body) = response.into_parts();
    strip(&mut head.headers, false);
    head.version = Version::HTTP_11;
    let limit = (!upstream.verdict.is_framework()).then_some(shared.limits.response);
    if body.is_end_stream() {
        // An answer before the end of the request ends the request.
        if exchange.sent.load(Ordering::Acquire) {
            client.keep(upstream);
        }
        return Response::from_parts(head, Reply::Empty);
    }
    let reply = Reply::Stream(Answer::new(body, upstream.quit.0.clone(), exchange, limit));
    client.keep(upstream);
    Response::from_parts(head, reply)
}

/// The answer to a WebSocket's request, after which the connection is a tunnel.
fn switched(
    client: &Client,
    mut response: Response<Incoming>,
    inside: hyper::upgrade::OnUpgrade,
    entered: Entered,
    upstream: Upstream,
    exchange: Arc<Exchange>,
) -> Response<Reply> {
    let outside = hyper::upgrade::on(&mut response);
    let silence = tunnel::silence(&client.shared, upstream.verdict.is_framework());
    // The connection's task ends by itself once the connection is taken out of it.
    upstream.quit.disarm();
    client.switch(Switched {
        inside,
        outside: Outside::Upgraded(outside),
        entered,
        exchange,
        silence,
    });
    let (mut head, _) = response.into_parts();
    strip(&mut head.headers, true);
    Response::from_parts(head, Reply::Empty)
}

impl Quit {
    fn disarm(mut self) {
        self.0 = CancellationToken::new();
    }
}

/// Why there is no answer.
enum Failed {
    /// Not a byte of the request left.
    NotSent(Box<Request<Outgoing>>),
    Broken,
    TimedOut,
}

async fn send(
    upstream: &mut Upstream,
    request: Request<Outgoing>,
    exchange: &Exchange,
    limit: Option<Duration>,
) -> Result<Response<Incoming>, Failed> {
    if let Err(error) = upstream.sender.ready().await {
        tracing::debug!(%error, "a connection outward is not usable");
        return Err(Failed::NotSent(Box::new(request)));
    }
    let mut response = pin!(upstream.sender.try_send_request(request));
    let mut deadline = upstream.deadline.take().unwrap_or_default();
    deadline.progress();
    let sent = || exchange.attempt.sent.load(Ordering::Relaxed);
    let mut before = sent();
    let answered = std::future::poll_fn(|context| {
        if let Poll::Ready(answered) = response.as_mut().poll(context) {
            return Poll::Ready(Some(answered));
        }
        while let Some(limit) = limit
            && deadline.poll_over(0, limit, context)
        {
            // While the request is still on its way, an answer is not due.
            if sent() == before {
                return Poll::Ready(None);
            }
            before = sent();
            deadline.progress();
        }
        Poll::Pending
    })
    .await;
    upstream.deadline = Some(deadline);
    match answered {
        None => Err(Failed::TimedOut),
        Some(answered) => answered.map_err(|mut error| match error.take_message() {
            Some(request) => Failed::NotSent(Box::new(request)),
            None => {
                tracing::debug!(error = %error.error(), "a request was not answered");
                Failed::Broken
            }
        }),
    }
}

/// A new connection outward. Its place on the board is with the task that carries it, or, for one that is to be
/// switched, with the caller.
async fn open(shared: &Arc<Shared>, way: Way, to_be_switched: bool) -> Result<(Upstream, Option<Entered>), NoWay> {
    let destination = way.destination.clone();
    let Dialled {
        stream,
        entered,
        verdict,
    } = dial(&shared.board, &*shared.resolver, &shared.limits, &shared.stop, way).await?;
    let generation = entered.generation();
    let cancelled = entered.cancel().clone();
    let quit = Quit(cancelled.child_token());
    let quitting = quit.0.clone();
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(ANSWER_BUFFER)
        .handshake(TokioIo::new(Lenient::new(stream)))
        .await
        .map_err(|_| NoWay::Unreachable)?;
    let mut place = Some(entered);
    let kept = if to_be_switched { place.take() } else { None };
    shared.tasks.spawn(async move {
        if to_be_switched {
            tokio::select! {
                () = quitting.cancelled() => {}
                _ = connection.with_upgrades() => {}
            }
        } else {
            let mut connection = connection;
            tokio::select! {
                biased;
                () = quitting.cancelled() => {
                    if cancelled.is_cancelled() {
                        connection.into_parts().io.into_inner().reset();
                    } else {
                        drop(connection);
                    }
                }
                _ = &mut connection => drop(connection),
            }
        }
        // In this order: once it has left the board, it is closed.
        drop(place);
    });
    let upstream = Upstream {
        destination,
        generation,
        sender,
        verdict,
        used: Instant::now(),
        deadline: None,
        quit,
    };
    Ok((upstream, kept))
}

/// Whether a request asks to become a WebSocket, in the one way that is passed on.
fn wants_websocket(request: &Request<Incoming>) -> bool {
    let headers = request.headers();
    let mut upgrade = headers.get_all(header::UPGRADE).iter();
    request.version() == Version::HTTP_11
        && request.method() == Method::GET
        && request.body().is_end_stream()
        && upgrade
            .next()
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
        && upgrade.next().is_none()
        && connection_options(headers).any(|option| option.eq_ignore_ascii_case("upgrade"))
}

/// The head as the destination gets it: in origin form, for its own name, without what concerns this connection.
fn outgoing_head(
    mut head: hyper::http::request::Parts,
    destination: &Destination,
    websocket: bool,
) -> Option<hyper::http::request::Parts> {
    let path = match head.uri.path_and_query() {
        Some(path) if path.as_str().starts_with('/') => path.clone(),
        Some(path) if path.as_str().starts_with('?') => format!("/{path}").parse().ok()?,
        None => PathAndQuery::from_static("/"),
        Some(_) => return None,
    };
    head.uri = Uri::from(path);
    head.version = Version::HTTP_11;
    head.extensions.clear();
    strip(&mut head.headers, websocket);
    head.headers.remove(header::EXPECT);
    let host = match (destination.address(), destination.port()) {
        (Some(std::net::IpAddr::V6(address)), 80) => format!("[{address}]"),
        (Some(std::net::IpAddr::V6(address)), port) => format!("[{address}]:{port}"),
        (_, 80) => destination.host().to_owned(),
        (_, port) => format!("{}:{port}", destination.host()),
    };
    head.headers.insert(header::HOST, HeaderValue::try_from(host).ok()?);
    Some(head)
}

/// Removes what concerns one connection: the well-known fields and those that `Connection` names.
fn strip(headers: &mut HeaderMap, websocket: bool) {
    let named: Vec<HeaderName> = connection_options(headers)
        .filter_map(|option| HeaderName::from_bytes(option.as_bytes()).ok())
        .collect();
    for name in named {
        // Naming one of the first two is an attempt to have the other side read another message than was judged.
        let stays = name == header::HOST || name == header::CONTENT_LENGTH || (websocket && name == header::UPGRADE);
        if !stays {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        if !(websocket && *name == header::UPGRADE) {
            headers.remove(name);
        }
    }
    if websocket {
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    }
}

fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}
