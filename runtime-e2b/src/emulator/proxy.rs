//! Ports of a box: requests passed on to what listens there.

use std::io;

use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::server::{Answer, json};

/// Passes a request on to a port of the network that this thread is in: the box's, or this machine's if boxes have none.
pub(super) async fn pass(id: &str, port: u16, mut request: Request<Incoming>, path: &str) -> Answer {
    let closed = || {
        let body = serde_json::json!({
            "sandboxId": id, "message": "The sandbox is running but port is not open", "port": port, "code": 502
        });
        json(StatusCode::BAD_GATEWAY, &body)
    };
    let Ok(stream) = TcpStream::connect(("127.0.0.1", port)).await else {
        return closed();
    };
    let Ok((mut sender, connection)) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await else {
        return closed();
    };
    tokio::spawn(connection);
    let Ok(uri) = path.parse() else { return closed() };
    *request.uri_mut() = uri;
    match sender.send_request(request).await {
        Ok(response) => response.map(|body| body.map_err(io::Error::other).boxed_unsync()),
        Err(_) => closed(),
    }
}
