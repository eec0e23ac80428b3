//! A client's bytes, read by `Framing` and by the HTTP library. What the one passes, the other has to read in the same
//! way: as many requests, each with as many bytes of body. That is what keeps requests from being smuggled.
#![no_main]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use libfuzzer_sys::fuzz_target;
use runtime_core::egress::{Framing, Step};

/// Bytes that may be passed on, as far as they make up whole requests, and how many bytes of data each request has.
fn read(bytes: &[u8], piece: usize) -> (Vec<u8>, Vec<usize>) {
    let (mut framing, mut buffer, mut passed) = (Framing::new(), Vec::new(), Vec::new());
    let mut requests = Vec::new();
    let (mut whole_length, mut whole_requests) = (0, 0);
    'all: for part in bytes.chunks(piece) {
        buffer.extend_from_slice(part);
        while !buffer.is_empty() {
            let data = framing.direct() > 0;
            let length = match framing.step(&buffer) {
                Ok(Step::More) => break,
                // What follows is no request if the answer is yes.
                Ok(Step::Head { switch: true, .. }) | Err(_) => break 'all,
                Ok(Step::Head { length, .. }) => {
                    requests.push(0);
                    length
                }
                Ok(Step::Pass(length)) => {
                    if data {
                        *requests.last_mut().expect("data follows a head") += length;
                    }
                    length
                }
            };
            passed.extend(buffer.drain(..length));
            if framing.is_between_requests() && !requests.is_empty() {
                (whole_length, whole_requests) = (passed.len(), requests.len());
            }
        }
    }
    passed.truncate(whole_length);
    requests.truncate(whole_requests);
    (passed, requests)
}

/// What the HTTP library makes of them; `None` in place of a request that it refuses.
fn served(bytes: Vec<u8>) -> Vec<usize> {
    let seen: Arc<Mutex<Vec<usize>>> = Arc::default();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let (client, server) = tokio::io::duplex(bytes.len() + 1);
        let record = Arc::clone(&seen);
        let service = service_fn(move |request: Request<Incoming>| {
            let record = Arc::clone(&record);
            async move {
                let mut body = request.into_body();
                let mut total = 0;
                while !body.is_end_stream() {
                    match body.frame().await {
                        Some(Ok(frame)) => total += frame.data_ref().map_or(0, Bytes::len),
                        Some(Err(error)) => panic!("a body that was passed is refused: {error}"),
                        None => break,
                    }
                }
                record.lock().expect("not poisoned").push(total);
                Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
            }
        });
        let (mut read, mut write) = tokio::io::split(client);
        tokio::io::AsyncWriteExt::write_all(&mut write, &bytes).await.expect("it fits");
        tokio::io::AsyncWriteExt::shutdown(&mut write).await.expect("shut down");
        let mut sink = tokio::io::sink();
        let mut http = hyper::server::conn::http1::Builder::new();
        http.half_close(true).max_buf_size(128 << 10);
        let serving = http.serve_connection(TokioIo::new(server), service);
        let (_, _) = tokio::join!(serving, tokio::io::copy(&mut read, &mut sink));
    });
    let seen = seen.lock().expect("not poisoned");
    seen.clone()
}

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, bytes) = input;
    let (passed, expected) = read(bytes, usize::from(piece) + 1);
    assert_eq!(read(bytes, usize::MAX), (passed.clone(), expected.clone()), "in pieces");
    if expected.is_empty() {
        return;
    }
    let seen = served(passed);
    // It may refuse one (a target that is no URI) or close after one, and then sees no more; never more, never others.
    assert!(expected.starts_with(&seen), "framing says {expected:?}, the library {seen:?}");
});
