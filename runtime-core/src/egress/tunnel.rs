//! CONNECT and WebSocket: a connection that stops being HTTP.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper::{Request, Response, StatusCode, body::Incoming};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use super::body::Reply;
use super::client_hello::{ClientHello, HelloReader};
use super::dial::dial;
use super::forward::{Client, Exchange, host_and_port, refuse, status};
use super::guard::Guarded;
use super::inside::Accepted;
use super::lenient::Lenient;
use super::live::{Entered, Hello, Way};
use super::log::{EgressKind, Verdict};
use super::proxy::Shared;
use super::pump::{Silence, pump, reset};
use crate::network::{Destination, Scheme, Tunnel};

/// The random of a ServerHello that is a HelloRetryRequest (RFC 8446, 4.1.3).
const RETRY_RANDOM: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91, 0xc2, 0xa2, 0x11,
    0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];
/// What has to be seen of a server's first record to tell: its header, a handshake header, the version and the random.
const SERVER_HELLO_START: usize = 5 + 4 + 2 + 32;
/// The most that a client may send between its two ClientHellos.
const MAX_EARLY: usize = 256 << 10;
const MAX_CIPHERTEXT: usize = (16 << 10) + 256;

/// A client whose connection is to become a tunnel once the answer is written.
pub(super) struct Switched {
    pub(super) inside: OnUpgrade,
    pub(super) outside: Outside,
    pub(super) entered: Entered,
    pub(super) exchange: Arc<Exchange>,
    pub(super) silence: Silence,
}

/// The other end.
pub(super) enum Outside {
    /// Dialled for a CONNECT. `true`: TLS is to be looked at.
    Dialled(TcpStream, bool),
    /// An HTTP connection that was switched.
    Upgraded(OnUpgrade),
}

/// Answers a CONNECT.
pub(super) async fn connect(
    client: &Client,
    mut request: Request<Incoming>,
    exchange: Arc<Exchange>,
) -> Response<Reply> {
    let shared = &client.shared;
    let attempt = &exchange.attempt;
    attempt.kind(EgressKind::Tunnel);
    let named = request
        .uri()
        .authority()
        .filter(|_| request.uri().scheme().is_none())
        .and_then(|authority| host_and_port(authority, 443));
    let Some((host, port)) = named else {
        attempt.refused(Verdict::refused("malformed_target"));
        return status(&exchange, StatusCode::BAD_REQUEST);
    };
    let in_force = shared.board.in_force();
    let scheme = in_force.policy.routes().tunnel_scheme(host, port);
    let destination = Arc::new(Destination::new(scheme, host, port));
    attempt.wants(&destination, in_force.generation);
    let way = Way {
        destination,
        tunnel: Tunnel::Yes,
        addresses: Vec::new(),
        is_route: false,
        hello: match scheme {
            Scheme::Https => Hello::Awaited,
            Scheme::Http | Scheme::Tcp => Hello::None,
        },
    };
    let dialled = match dial(&shared.board, &*shared.resolver, &shared.limits, &shared.stop, way).await {
        Ok(dialled) => dialled,
        Err(no_way) => return refuse(&exchange, no_way),
    };
    let silence = silence(shared, dialled.verdict.is_framework());
    attempt.permitted(dialled.verdict);
    client.switch(Switched {
        inside: hyper::upgrade::on(&mut request),
        outside: Outside::Dialled(dialled.stream, scheme == Scheme::Https),
        entered: dialled.entered,
        exchange: Arc::clone(&exchange),
        silence,
    });
    let mut response = status(&exchange, StatusCode::OK);
    response
        .extensions_mut()
        .insert(hyper::ext::ReasonPhrase::from_static(b"Connection established"));
    response
}

/// A framework's service may be silent for as long as it likes.
pub(super) fn silence(shared: &Shared, is_framework: bool) -> Silence {
    let unless = |limit| (!is_framework).then_some(limit);
    Silence {
        open: unless(shared.limits.tunnel),
        half_closed: unless(shared.limits.half_closed),
    }
}

/// Carries a tunnel to its end.
pub(super) async fn run(shared: &Shared, switched: Switched) {
    let Switched {
        inside,
        outside,
        entered,
        exchange,
        silence,
    } = switched;
    // The answer is written or the connection is broken by now, so there is nothing to wait for.
    let Ok(Ok((mut inside, early))) = tokio::time::timeout(shared.limits.head, client_side(inside)).await else {
        exchange.attempt.failed("client_gone");
        return;
    };
    let (mut outside, looks, early_out) = match outside {
        Outside::Dialled(stream, looks) => (stream, looks, Bytes::new()),
        Outside::Upgraded(upgrade) => match tokio::time::timeout(shared.limits.head, server_side(upgrade)).await {
            Ok(Ok((stream, early))) => (stream, false, early),
            _ => {
                exchange.attempt.failed("server_gone");
                return;
            }
        },
    };
    let ended = tokio::select! {
        biased;
        () = entered.cancel().cancelled() => Err(Ended::Cancelled),
        result = carry(shared, &mut inside, &mut outside, &entered, &exchange, silence, looks, early, early_out) => result,
    };
    match ended {
        Ok(()) => {}
        Err(ended) => {
            inside.reset();
            reset(&outside);
            match ended {
                Ended::Refused(verdict) => exchange.attempt.refused(verdict),
                Ended::Broken(reason) => exchange.attempt.failed(reason),
                Ended::Cancelled | Ended::Io => {}
            }
        }
    }
    // In this order: once it has left the board, it is closed.
    drop((inside, outside));
    drop(entered);
}

enum Ended {
    Refused(Verdict),
    Broken(&'static str),
    Cancelled,
    /// After bytes had been carried.
    Io,
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        tracing::debug!(%error, "a tunnel broke");
        Self::Io
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "the parts of one tunnel, of which none outlives this call"
)]
async fn carry(
    shared: &Shared,
    inside: &mut Accepted,
    outside: &mut TcpStream,
    entered: &Entered,
    exchange: &Exchange,
    silence: Silence,
    looks: bool,
    early: Bytes,
    early_out: Bytes,
) -> Result<(), Ended> {
    let attempt = &exchange.attempt;
    if looks {
        handshake(shared, inside, outside, entered, exchange, early.to_vec()).await?;
    } else {
        attempt.allowed();
        send(inside, &early_out).await?;
        attempt.received.fetch_add(early_out.len() as u64, Ordering::Relaxed);
        send(outside, &early).await?;
        attempt.sent.fetch_add(early.len() as u64, Ordering::Relaxed);
    }
    pump(inside, outside, silence, &attempt.sent, &attempt.received).await?;
    Ok(())
}

/// Carries a TLS handshake as far as it can be seen: nothing goes out before the ClientHello is judged, and if the
/// server asks for another one, that one is judged too.
async fn handshake(
    shared: &Shared,
    inside: &mut Accepted,
    outside: &mut TcpStream,
    entered: &Entered,
    exchange: &Exchange,
    early: Vec<u8>,
) -> Result<(), Ended> {
    let attempt = &exchange.attempt;
    let (hello, bytes, length) = client_hello(shared, inside, early).await?;
    attempt.server_name(hello.server_name());
    judge(entered, &hello)?;
    attempt.allowed();
    let (records, rest) = bytes.split_at_checked(length).unwrap_or((&bytes, &[]));
    forward(outside, records, &attempt.sent).await?;
    // What follows may hold a second ClientHello, which a client can send before it was asked.
    let (is_retry, answer) = tokio::time::timeout(shared.limits.response, server_hello(outside))
        .await
        .map_err(|_| Ended::Broken("response_timeout"))??;
    if !answer.is_empty() {
        forward(inside, &answer, &attempt.received).await?;
    }
    if !is_retry {
        forward(outside, rest, &attempt.sent).await?;
        return Ok(());
    }
    let second = second_hello(shared, inside, outside, exchange, rest.to_vec()).await?;
    let (second, bytes, length) = client_hello(shared, inside, second).await?;
    if second.server_name() != hello.server_name() {
        attempt.server_name(second.server_name());
        return Err(Ended::Refused(Verdict::refused("server_name_changed")));
    }
    judge(entered, &second)?;
    let (records, rest) = bytes.split_at_checked(length).unwrap_or((&bytes, &[]));
    forward(outside, records, &attempt.sent).await?;
    forward(outside, rest, &attempt.sent).await?;
    Ok(())
}

fn judge(entered: &Entered, hello: &ClientHello) -> Result<(), Ended> {
    let verdict = entered.saw_hello(hello.server_name().map(str::to_owned), hello.is_encrypted());
    if verdict.permitted {
        Ok(())
    } else {
        Err(Ended::Refused(verdict))
    }
}

/// A whole ClientHello, with everything that was received and how much of it the ClientHello takes.
async fn client_hello(
    shared: &Shared,
    inside: &mut Accepted,
    early: Vec<u8>,
) -> Result<(ClientHello, Vec<u8>, usize), Ended> {
    let read = async {
        let mut reader = HelloReader::new();
        let mut found = reader.push(&early);
        let mut buffer = [0; 4096];
        loop {
            match found {
                Ok(Some(hello)) => {
                    let (bytes, length) = reader.into_bytes();
                    return Ok((hello, bytes, length));
                }
                Ok(None) => {}
                Err(problem) => {
                    tracing::debug!(%problem, "a tunnel was refused");
                    return Err(Ended::Refused(Verdict::refused("no_client_hello")));
                }
            }
            match inside.read(&mut buffer).await {
                Ok(0) | Err(_) => return Err(Ended::Broken("client_gone")),
                Ok(length) => found = reader.push(buffer.get(..length).unwrap_or_default()),
            }
        }
    };
    match tokio::time::timeout(shared.limits.head, read).await {
        Ok(result) => result,
        Err(_) => Err(Ended::Broken("client_hello_timeout")),
    }
}

/// The beginning of the server's answer, and whether it asks for another ClientHello.
async fn server_hello(outside: &mut TcpStream) -> Result<(bool, Vec<u8>), Ended> {
    let mut answer = Vec::with_capacity(4096);
    loop {
        let kind = answer.first();
        if kind.is_some_and(|kind| *kind != 22) {
            return Ok((false, answer));
        }
        if let &[_, _, _, high, low, message, ..] = answer.as_slice() {
            let length = usize::from(u16::from_be_bytes([high, low]));
            if message != 2 {
                return Ok((false, answer));
            }
            if 5 + length < SERVER_HELLO_START {
                // In pieces so small that what it is cannot be told.
                return Err(Ended::Broken("server_hello"));
            }
        }
        if let Some(random) = answer.get(SERVER_HELLO_START - 32..SERVER_HELLO_START) {
            return Ok((random == RETRY_RANDOM, answer));
        }
        if outside.read_buf(&mut answer).await? == 0 {
            return Ok((false, answer));
        }
    }
}

/// Carries what a client may send before its second ClientHello, and returns what was received from there on.
async fn second_hello(
    shared: &Shared,
    inside: &mut Accepted,
    outside: &mut TcpStream,
    exchange: &Exchange,
    mut bytes: Vec<u8>,
) -> Result<Vec<u8>, Ended> {
    let mut carried = 0;
    let carry = async {
        loop {
            while let &[kind, _, _, high, low, ..] = bytes.as_slice() {
                let length = 5 + usize::from(u16::from_be_bytes([high, low]));
                if kind == 22 {
                    return Ok(bytes);
                }
                // A change of cipher spec that means nothing, and early data that the server has turned down.
                if !matches!(kind, 20 | 23) || length > 5 + MAX_CIPHERTEXT || carried + length > MAX_EARLY {
                    return Err(Ended::Refused(Verdict::refused("no_client_hello")));
                }
                let Some(record) = bytes.get(..length) else {
                    break;
                };
                forward(outside, record, &exchange.attempt.sent).await?;
                carried += length;
                bytes.drain(..length);
            }
            if inside.read_buf(&mut bytes).await? == 0 {
                return Err(Ended::Broken("client_gone"));
            }
        }
    };
    match tokio::time::timeout(shared.limits.head, carry).await {
        Ok(result) => result,
        Err(_) => Err(Ended::Broken("client_hello_timeout")),
    }
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    if bytes.is_empty() {
        Ok(())
    } else {
        stream.write_all(bytes).await
    }
}

async fn forward(
    stream: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
    count: &std::sync::atomic::AtomicU64,
) -> io::Result<()> {
    send(stream, bytes).await?;
    count.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(())
}

/// The client's connection, back from the HTTP library, and what it sent behind the head of its request.
async fn client_side(upgrade: OnUpgrade) -> Result<(Accepted, Bytes), ()> {
    let upgraded: Upgraded = upgrade.await.map_err(|_| ())?;
    let parts = upgraded.downcast::<TokioIo<Guarded<Accepted>>>().map_err(|_| ())?;
    let (stream, held) = parts.io.into_inner().into_parts();
    Ok((stream, join(parts.read_buf, held)))
}

async fn server_side(upgrade: OnUpgrade) -> Result<(TcpStream, Bytes), ()> {
    let upgraded: Upgraded = upgrade.await.map_err(|_| ())?;
    let parts = upgraded.downcast::<TokioIo<Lenient>>().map_err(|_| ())?;
    Ok((parts.io.into_inner().into_stream(), parts.read_buf))
}

fn join(first: Bytes, second: Bytes) -> Bytes {
    match (first.is_empty(), second.is_empty()) {
        (true, _) => second,
        (_, true) => first,
        _ => [first, second].concat().into(),
    }
}
