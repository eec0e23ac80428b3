//! The other side, in a process of its own: the emulator, and a bare HTTP server to compare with.

use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use runtime_e2b::emulator::{Action, Emulator, Fault};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// Serves until its standard input ends, and does what it says: `token ID`, `delay MILLISECONDS`, `starts PROGRAM...`,
/// `clear`.
pub(crate) fn serve() {
    let emulator = Emulator::start().expect("loopback");
    // The directory goes with this function.
    let (bare, _dir) = bare();
    println!(
        "{} {} {} {} {bare}",
        emulator.is_isolated(),
        emulator.api_key(),
        emulator.api_url(),
        emulator.sandbox_url()
    );
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("starts", words)) => println!("{}", starts(words)),
            Some(("token", id)) => println!("{}", emulator.access_token(id).unwrap_or_default()),
            Some(("delay", millis)) => {
                let delay = Duration::from_millis(millis.parse().expect("a number"));
                // The first fault that fits decides.
                emulator.clear_faults();
                for call in ["/process.Process/SendInput", "/process.Process/StreamInput"] {
                    emulator.inject(Fault::new(call, u32::MAX, Action::Delay(delay)));
                }
                println!();
            }
            _ => {
                emulator.clear_faults();
                println!();
            }
        }
        std::io::stdout().flush().expect("read");
    }
}

/// Starts of a program per second, with its output read, by this process and with nothing else to do.
fn starts(words: &str) -> f64 {
    let argv: Vec<String> = words.split('\t').map(str::to_owned).collect();
    let executor = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("an executor");
    executor.block_on(async {
        let started = std::time::Instant::now();
        let workers = (0..crate::IN_FLIGHT).map(|_| {
            let argv = argv.clone();
            tokio::spawn(async move {
                for _ in 0..crate::STARTS / crate::IN_FLIGHT {
                    let mut command = tokio::process::Command::new(&argv[0]);
                    // As in a new box: a login shell finds no profiles of this machine's owner.
                    command.env("HOME", "/nonexistent");
                    let output = command.args(&argv[1..]).stdin(std::process::Stdio::null()).output();
                    assert_eq!(output.await.expect("started").stdout, b"hi\n");
                }
            })
        });
        for worker in workers.collect::<Vec<_>>() {
            worker.await.expect("joined");
        }
        (crate::STARTS / crate::IN_FLIGHT * crate::IN_FLIGHT) as f64 / started.elapsed().as_secs_f64()
    })
}

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// A server of one file, in memory as the boxes of the emulator are: `POST` writes it, `GET` reads it. Its URL and
/// directory.
fn bare() -> (String, tempfile::TempDir) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    listener.set_nonblocking(true).expect("a listener");
    let url = format!("http://{}/", listener.local_addr().expect("bound"));
    let dir = tempfile::Builder::new()
        .prefix("e2b-bench-")
        .tempdir_in("/dev/shm")
        .expect("a directory in memory");
    let path = dir.path().join("file");
    std::thread::spawn(move || {
        let executor = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("an executor");
        executor.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            loop {
                let (stream, _) = listener.accept().await.expect("a connection");
                let _ = stream.set_nodelay(true);
                let path = path.clone();
                tokio::spawn(async move {
                    let service = hyper::service::service_fn(move |request| answer(path.clone(), request));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
    });
    (url, dir)
}

async fn answer(path: PathBuf, request: hyper::Request<Incoming>) -> std::io::Result<hyper::Response<Body>> {
    if request.method() == hyper::Method::POST {
        let mut file = tokio::fs::File::create(&path).await?;
        let mut body = request.into_body();
        while let Some(frame) = body.frame().await {
            if let Ok(bytes) = frame.map_err(std::io::Error::other)?.into_data() {
                file.write_all(&bytes).await?;
            }
        }
        file.flush().await?;
        let nothing = Full::new(Bytes::new()).map_err(|never| match never {}).boxed_unsync();
        return Ok(hyper::Response::new(nothing));
    }
    let file = tokio::fs::File::open(&path).await?;
    let length = file.metadata().await?.len();
    let chunks = futures_util::stream::try_unfold(file, |mut file| async move {
        let mut chunk = bytes::BytesMut::with_capacity(256 << 10);
        let count = file.read_buf(&mut chunk).await?;
        Ok((count > 0).then(|| (Frame::data(chunk.freeze()), file)))
    });
    let mut response = hyper::Response::new(StreamBody::new(chunks).boxed_unsync());
    response.headers_mut().insert("content-length", length.into());
    Ok(response)
}
