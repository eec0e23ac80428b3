//! The other side: servers that keep every byte that they got.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

/// What arrived: one entry for each connection, in the order of their coming.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arrived(Arc<Mutex<Vec<Vec<u8>>>>);

impl Arrived {
    fn open(&self) -> usize {
        let mut all = self.0.lock().unwrap();
        all.push(Vec::new());
        all.len() - 1
    }

    fn add(&self, connection: usize, bytes: &[u8]) {
        self.0.lock().unwrap()[connection].extend_from_slice(bytes);
    }

    pub(crate) fn connections(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Everything, over all connections.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap().concat()).into_owned()
    }

    /// How many requests.
    pub(crate) fn requests(&self) -> usize {
        self.text().matches(" HTTP/1.").count()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.lock().unwrap().iter().map(Vec::len).sum()
    }
}

/// An HTTP server:
///
/// | path | answer |
/// | --- | --- |
/// | `/bytes/N` | N bytes |
/// | `/echo` | the body, as it comes, in chunks |
/// | `/count` | how many bytes the body had |
/// | `/refuse` | 413 without reading the body, then closes |
/// | `/once` | `once`, and closes the connection a moment later without having said so |
/// | `/hang` | nothing |
/// | `/redirect` | to `http://other.example/` |
/// | `/ws` | 101, then echoes |
/// | `/files/…` | what [`serve_files`] serves |
/// | anything else | `ok` |
pub(crate) async fn http(address: &str, port: u16) -> Arrived {
    let arrived = Arrived::default();
    let listener = bind(address, port).await;
    let kept = arrived.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, kept.clone()));
        }
    });
    arrived
}

pub(crate) async fn bind(address: &str, port: u16) -> TcpListener {
    TcpListener::bind((address.parse::<std::net::IpAddr>().unwrap(), port))
        .await
        .unwrap()
}

/// Serves HTTP on one connection of any kind.
pub(crate) async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(stream: S, arrived: Arrived) {
    let connection = arrived.open();
    let tee = Tee {
        stream,
        arrived,
        connection,
    };
    let once = Arc::new(tokio::sync::Notify::new());
    let closer = Arc::clone(&once);
    let service = service_fn(move |request| respond(request, Arc::clone(&once)));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.half_close(true);
    let serving = http.serve_connection(TokioIo::new(tee), service).with_upgrades();
    tokio::select! {
        _ = serving => {}
        () = closer.notified() => {}
    }
}

static FILES: OnceLock<PathBuf> = OnceLock::new();

/// Serves the files below `dir`, and `index.html` for a directory.
pub(crate) fn serve_files(dir: &Path) {
    FILES.set(dir.to_owned()).unwrap();
}

fn file(path: &str) -> Response<Sent> {
    let mut path = FILES.get().unwrap().join(path);
    if path.is_dir() {
        path.push("index.html");
    }
    let mut response = Response::new(full(""));
    match std::fs::read(&path) {
        Ok(bytes) => *response.body_mut() = full(bytes),
        Err(_) => *response.status_mut() = StatusCode::NOT_FOUND,
    }
    if path.extension().is_some_and(|extension| extension == "html") {
        let html = hyper::header::HeaderValue::from_static("text/html");
        response.headers_mut().insert("content-type", html);
    }
    response
}

type Sent = BoxBody<Bytes, hyper::Error>;

fn full(bytes: impl Into<Bytes>) -> Sent {
    Full::new(bytes.into())
        .map_err(|never: Infallible| match never {})
        .boxed()
}

async fn respond(mut request: Request<Incoming>, once: Arc<tokio::sync::Notify>) -> Result<Response<Sent>, Infallible> {
    let path = request.uri().path().to_owned();
    let mut response = match path.as_str() {
        "/echo" => {
            let body = request.into_body();
            return Ok(Response::new(body.boxed()));
        }
        "/count" => {
            let mut body = request.into_body();
            let mut count = 0;
            while let Some(Ok(frame)) = body.frame().await {
                count += frame.data_ref().map_or(0, Bytes::len);
            }
            Response::new(full(count.to_string()))
        }
        "/refuse" => {
            let mut response = Response::new(full("too large"));
            *response.status_mut() = StatusCode::PAYLOAD_TOO_LARGE;
            response
                .headers_mut()
                .insert("connection", hyper::header::HeaderValue::from_static("close"));
            response
        }
        "/once" => {
            tokio::spawn(async move {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                once.notify_one();
            });
            Response::new(full("once"))
        }
        path if path.starts_with("/files/") => file(path.trim_start_matches("/files/")),
        "/hang" => std::future::pending().await,
        "/redirect" => {
            let mut response = Response::new(full(""));
            *response.status_mut() = StatusCode::FOUND;
            response.headers_mut().insert(
                "location",
                hyper::header::HeaderValue::from_static("http://other.example/"),
            );
            response
        }
        "/ws" => {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                // Some tests ask for this path without an upgrade.
                let Ok(upgraded) = upgrade.await else { return };
                let mut stream = TokioIo::new(upgraded);
                let (mut read, mut write) = tokio::io::split(&mut stream);
                let _ = tokio::io::copy(&mut read, &mut write).await;
                let _ = write.shutdown().await;
            });
            let mut response = Response::new(Empty::new().map_err(|never: Infallible| match never {}).boxed());
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            let headers = response.headers_mut();
            headers.insert("upgrade", hyper::header::HeaderValue::from_static("websocket"));
            headers.insert("connection", hyper::header::HeaderValue::from_static("upgrade"));
            response
        }
        path => match path
            .strip_prefix("/bytes/")
            .map(|count| count.parse::<usize>().unwrap())
        {
            Some(count) => {
                let piece = Bytes::from(vec![b'x'; (64 << 10).min(count.max(1))]);
                let pieces = (0..count).step_by(piece.len()).map(move |at| {
                    let length = piece.len().min(count - at);
                    Ok(Frame::data(piece.slice(..length)))
                });
                let mut response = Response::new(BodyExt::boxed(StreamBody::new(Iter(pieces))));
                response.headers_mut().insert("content-length", count.into());
                return Ok(response);
            }
            None => Response::new(full("ok")),
        },
    };
    response
        .headers_mut()
        .insert("x-from", hyper::header::HeaderValue::from_static("upstream"));
    Ok(response)
}

struct Iter<I>(I);

impl<I: Iterator + Unpin> futures_core::Stream for Iter<I> {
    type Item = I::Item;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<I::Item>> {
        Poll::Ready(self.get_mut().0.next())
    }
}

/// A server that takes what comes and says nothing, on any protocol.
pub(crate) async fn silent(address: &str, port: u16) -> Arrived {
    let arrived = Arrived::default();
    let listener = bind(address, port).await;
    let kept = arrived.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let arrived = kept.clone();
            tokio::spawn(async move {
                let connection = arrived.open();
                let mut buffer = [0; 4096];
                while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                    arrived.add(connection, &buffer[..length]);
                }
            });
        }
    });
    arrived
}

/// A server that gives back what it gets, to the end.
pub(crate) async fn echo(address: &str, port: u16) -> Arrived {
    let arrived = Arrived::default();
    let listener = bind(address, port).await;
    let kept = arrived.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let arrived = kept.clone();
            tokio::spawn(async move {
                let connection = arrived.open();
                let (mut read, mut write) = stream.split();
                let mut buffer = vec![0; 64 << 10];
                while let Ok(length @ 1..) = read.read(&mut buffer).await {
                    arrived.add(connection, &buffer[..length]);
                    if write.write_all(&buffer[..length]).await.is_err() {
                        return;
                    }
                }
                let _ = write.shutdown().await;
            });
        }
    });
    arrived
}

/// A server that hands every connection to the test.
pub(crate) async fn manual(address: &str, port: u16) -> tokio::sync::mpsc::UnboundedReceiver<TcpStream> {
    let listener = bind(address, port).await;
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if sender.send(stream).is_err() {
                return;
            }
        }
    });
    receiver
}

struct Tee<S> {
    stream: S,
    arrived: Arrived,
    connection: usize,
}

impl<S: AsyncRead + Unpin> AsyncRead for Tee<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        let result = Pin::new(&mut this.stream).poll_read(context, out);
        this.arrived.add(this.connection, &out.filled()[before..]);
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Tee<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
