//! gRPC as it is on the wire: HTTP/2 with prior knowledge, messages behind their lengths, the status in the trailers.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::BodyExt;
use http_body_util::channel::{Channel, Sender};
use hyper::body::{Bytes, Incoming};
use hyper::header::{HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// What arrived at a server.
#[derive(Debug, Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<Arrived>>);

#[derive(Debug, Default)]
struct Arrived {
    connections: usize,
    messages: usize,
    bytes: usize,
    ended: usize,
    cancelled: usize,
}

/// Serves on every connection that comes: `/Refuse` is answered by trailers alone, anything else gives each message back
/// when it comes, and says at the end how many there were.
pub(crate) async fn server(address: (&str, u16)) -> (u16, Calls) {
    let listener = TcpListener::bind(address).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let calls = Calls::default();
    let kept = calls.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, kept.clone()));
        }
    });
    (port, calls)
}

/// Serves one connection of any kind.
pub(crate) async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(stream: S, calls: Calls) {
    calls.0.lock().unwrap().connections += 1;
    let service = service_fn(move |request| answer(request, calls.clone()));
    let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    let _ = http.serve_connection(TokioIo::new(stream), service).await;
}

async fn answer(request: Request<Incoming>, calls: Calls) -> Result<Response<Channel<Bytes, io::Error>>, Infallible> {
    let (mut sender, body) = Channel::new(1);
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/grpc"));
    if request.uri().path() == "/Refuse" {
        headers.insert("grpc-status", HeaderValue::from_static("5"));
        return Ok(response);
    }
    assert_eq!(request.headers()["te"], "trailers");
    tokio::spawn(async move {
        let mut messages = Messages::new(request.into_body());
        let mut count = 0;
        loop {
            let message = match messages.next().await {
                Ok(Some(message)) => message,
                Ok(None) => break,
                Err(_) => {
                    calls.0.lock().unwrap().cancelled += 1;
                    return;
                }
            };
            count += 1;
            {
                let mut arrived = calls.0.lock().unwrap();
                arrived.messages += 1;
                arrived.bytes += message.len();
            }
            // Whoever cancelled is told of by the other direction.
            let _ = sender.send_data(frame(&message)).await;
        }
        calls.0.lock().unwrap().ended += 1;
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        trailers.insert("x-messages", HeaderValue::from(count));
        let _ = sender.send_trailers(trailers).await;
    });
    Ok(response)
}

fn frame(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0], &length[..], message].concat().into()
}

/// The messages of a body, and its trailers after the last one.
struct Messages {
    body: Incoming,
    rest: Vec<u8>,
    trailers: Option<HeaderMap>,
}

impl Messages {
    fn new(body: Incoming) -> Self {
        Self {
            body,
            rest: Vec::new(),
            trailers: None,
        }
    }

    async fn next(&mut self) -> hyper::Result<Option<Vec<u8>>> {
        loop {
            if let Some((head, rest)) = self.rest.split_first_chunk::<5>() {
                assert_eq!(head[0], 0, "not compressed");
                let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
                if rest.len() >= length {
                    let message = rest[..length].to_vec();
                    self.rest.drain(..5 + length);
                    return Ok(Some(message));
                }
            }
            match self.body.frame().await.transpose()? {
                None => {
                    assert!(self.rest.is_empty(), "a body ends with a message");
                    return Ok(None);
                }
                Some(frame) => match frame.into_data() {
                    Ok(data) => self.rest.extend_from_slice(&data),
                    Err(frame) => self.trailers = frame.into_trailers().ok(),
                },
            }
        }
    }
}

#[derive(Clone)]
struct Client(hyper::client::conn::http2::SendRequest<Channel<Bytes, io::Error>>);

struct Call {
    sender: Sender<Bytes, io::Error>,
    headers: HeaderMap,
    messages: Messages,
}

impl Client {
    async fn call(&self, path: &str) -> Call {
        let (sender, body) = Channel::new(1);
        let request = Request::post(format!("http://service{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(body)
            .unwrap();
        let response = self.0.clone().send_request(request).await.unwrap();
        assert_eq!(response.status(), 200);
        let headers = response.headers().clone();
        let messages = Messages::new(response.into_body());
        Call {
            sender,
            headers,
            messages,
        }
    }
}

impl Call {
    /// Each answer comes before the next question.
    async fn ask(&mut self, message: &[u8]) {
        self.sender.send_data(frame(message)).await.unwrap();
        assert_eq!(self.messages.next().await.unwrap().as_deref(), Some(message));
    }

    /// The trailers, after this side has ended and the other one too.
    async fn end(mut self) -> (String, String) {
        drop(self.sender);
        assert_eq!(self.messages.next().await.unwrap(), None);
        let trailers = self.messages.trailers.expect("trailers");
        let text = |name: &str| trailers[name].to_str().unwrap().to_owned();
        (text("grpc-status"), text("x-messages"))
    }
}

/// What a gRPC client does over one connection: `stream`, which leads to the server that `calls` is of.
pub(crate) async fn exercise<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(stream: S, calls: &Calls) {
    const MESSAGE: usize = 100_000;
    const LARGE: usize = 160;
    const CALLS: usize = 50;
    let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let client = Client(sender);

    // One that stays open while all else happens.
    let mut open = client.call("/Both").await;
    open.ask(b"first").await;
    let mut abandoned = client.call("/Both").await;
    abandoned.ask(b"").await;
    abandoned.sender.abort(io::ErrorKind::Interrupted.into());
    while calls.0.lock().unwrap().cancelled == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let refused = client.call("/Refuse").await;
    assert_eq!(refused.headers["grpc-status"], "5");
    drop(refused);
    let mut many = JoinSet::new();
    for number in 0..CALLS {
        let client = client.clone();
        many.spawn(async move {
            let mut call = client.call("/Both").await;
            for round in 0..3 {
                call.ask(format!("call {number}, {round}").as_bytes()).await;
            }
            assert_eq!(call.end().await, ("0".to_owned(), "3".to_owned()));
        });
    }
    while let Some(done) = many.join_next().await {
        done.unwrap();
    }
    // More than any window holds, in both directions at once.
    let mut large = client.call("/Both").await;
    let message = vec![b'x'; MESSAGE];
    let (sent, piece) = (&mut large.sender, frame(&message));
    let send = async {
        for _ in 0..LARGE {
            sent.send_data(piece.clone()).await.unwrap();
        }
    };
    let receive = async {
        for _ in 0..LARGE {
            assert!(large.messages.next().await.unwrap().unwrap() == message);
        }
    };
    tokio::join!(send, receive);
    assert_eq!(large.end().await, ("0".to_owned(), LARGE.to_string()));
    for _ in 0..9 {
        open.ask(b"again").await;
    }
    assert_eq!(open.end().await, ("0".to_owned(), "10".to_owned()));
    drop(client);
    connection.await.unwrap().unwrap();

    let small: usize = (0..CALLS).map(|number| 3 * format!("call {number}, 0").len()).sum();
    let arrived = calls.0.lock().unwrap();
    assert_eq!(arrived.connections, 1);
    assert_eq!(arrived.messages, 1 + 1 + 3 * CALLS + LARGE + 9);
    assert_eq!(arrived.bytes, 5 + small + LARGE * MESSAGE + 9 * 5);
    assert_eq!((arrived.ended, arrived.cancelled), (CALLS + 2, 1));
}
