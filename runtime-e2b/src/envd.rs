//! [`Envd`]: the daemon in a box. Sends the requests of [`wire::process`](crate::wire::process),
//! [`wire::filesystem`](crate::wire::filesystem) and [`wire::files`](crate::wire::files).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use http::HeaderName;
use prost::Message;
use runtime_core::retry::{Failure, Idempotency, Retrier};
use runtime_core::{Error, ErrorKind, Result};
use tokio::time::Instant;

use crate::client::retrier;
use crate::endpoints::ENVD_PORT;
use crate::error;
use crate::http_client;
use crate::wire::Request;
use crate::wire::envelope::{Decoder, END_OF_STREAM};
use crate::wire::files;
use crate::wire::process::{self, Event, ProcessConfig, StartRequest, StartResponse};
use crate::wire::rpc::{self, KEEPALIVE, UNARY_TIMEOUT};

/// Everything is done as this user: the default one cannot install packages.
pub(crate) const USER: &str = "root";

/// What a call may take on this side: a little more than what envd is told.
const CALL_TIMEOUT: Duration = Duration::from_secs(65);

/// How long a stream may take to say its first word.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the end of an answer may take that has said all it has to say.
const FINISH: Duration = Duration::from_secs(1);

/// A stream that is silent for this long is dead.
const SILENCE: Duration = Duration::from_secs(2 * KEEPALIVE.as_secs() + 20);

/// How long the question whether a box is still there may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one of our own small scripts in the box may take.
const HELPER_TIMEOUT: Duration = Duration::from_secs(60);

/// What such a script may print.
const HELPER_OUTPUT: usize = 1 << 20;

const ACCESS_TOKEN: HeaderName = HeaderName::from_static("x-access-token");
const SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
const SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

/// envd of one box.
pub(crate) struct Envd {
    base: String,
    id: String,
    token: Option<String>,
    retrier: Retrier,
    /// The box turned out to have no `setsid`.
    lacks_setsid: AtomicBool,
}

impl fmt::Debug for Envd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Envd")
            .field("base", &self.base)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// What a script of ours said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

impl Envd {
    pub(crate) fn new(base: String, id: String, token: Option<String>) -> Result<Self> {
        Ok(Self {
            base,
            id,
            token,
            retrier: retrier()?,
            lacks_setsid: AtomicBool::new(false),
        })
    }

    /// Whether the box turned out to have no `setsid`.
    pub(crate) fn lacks_setsid(&self) -> bool {
        self.lacks_setsid.load(Ordering::Relaxed)
    }

    /// It did.
    pub(crate) fn set_lacks_setsid(&self) {
        self.lacks_setsid.store(true, Ordering::Relaxed);
    }

    fn builder(&self, request: &Request) -> Result<reqwest::RequestBuilder> {
        let url = format!("{}{}", self.base, request.path);
        let mut builder = http_client::client(&url)?
            .request(request.method.clone(), url)
            .header(SANDBOX_ID, &self.id)
            .header(SANDBOX_PORT, ENVD_PORT);
        if let Some(token) = &self.token {
            let mut token = http::HeaderValue::from_str(token)
                .map_err(|_| error::unreadable("the access token", "it is no header's value"))?;
            token.set_sensitive(true);
            builder = builder.header(ACCESS_TOKEN, token);
        }
        for (name, value) in &request.headers {
            builder = builder.header(name, value);
        }
        Ok(builder)
    }

    /// A call with one answer. `timeout` is `None` for calls that may block as long as a program does not read.
    pub(crate) async fn unary<R: Message + Default>(
        &self,
        operation: &'static str,
        idempotency: Idempotency,
        request: &Request,
        timeout: Option<Duration>,
    ) -> Result<R> {
        let called = self
            .retrier
            .run(operation, idempotency, |_| async {
                let mut builder = self.builder(request)?.body(request.body.clone());
                if let Some(timeout) = timeout {
                    builder = builder.timeout(timeout);
                }
                let response = builder.send().await.map_err(error::transport)?;
                let status = response.status().as_u16();
                let body = response.bytes().await.map_err(error::transport)?;
                if status != 200 {
                    return Err(answered(status, &body));
                }
                R::decode(body).map_err(|error| Failure::from(error::unreadable("the answer", error)))
            })
            .await;
        match called {
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.explain(error).await),
        }
    }

    /// A call that may be repeated, within the usual time.
    pub(crate) async fn call<R: Message + Default>(&self, operation: &'static str, request: &Request) -> Result<R> {
        self.unary(operation, Idempotency::Safe, request, Some(CALL_TIMEOUT))
            .await
    }

    /// Opens a stream of events.
    pub(crate) async fn stream(
        &self,
        operation: &'static str,
        idempotency: Idempotency,
        request: &Request,
    ) -> Result<Events> {
        let opened = self
            .retrier
            .run(operation, idempotency, |_| async {
                let builder = self.builder(request)?.body(request.body.clone());
                let sent = tokio::time::timeout(OPEN_TIMEOUT, builder.send()).await;
                let response = match sent {
                    Ok(sent) => sent.map_err(error::transport)?,
                    Err(_) => {
                        let message = format!("no answer within {OPEN_TIMEOUT:?}");
                        return Err(Failure::from(Error::new(ErrorKind::Timeout, message)));
                    }
                };
                let status = response.status().as_u16();
                if status != 200 {
                    let body = response.bytes().await.map_err(error::transport)?;
                    return Err(answered(status, &body));
                }
                let kind = response.headers().get(http::header::CONTENT_TYPE);
                if kind.is_none_or(|kind| !kind.as_bytes().starts_with(b"application/connect+proto")) {
                    return Err(error::unreadable("the stream", "its content type is none of Connect's").into());
                }
                Ok(Events {
                    response: Some(response),
                    decoder: Decoder::default(),
                    waiting_since: None,
                })
            })
            .await;
        match opened {
            Ok(events) => Ok(events),
            Err(error) => Err(self.explain(error).await),
        }
    }

    /// Streams input to a process: frames that follow the first, which names it. Returns when envd has written all of it,
    /// however long the program takes to read it. Never repeated.
    pub(crate) async fn stream_input(
        &self,
        pid: u32,
        frames: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    ) -> Result<()> {
        let first = futures_util::stream::iter([Ok(process::stream_input_start(pid))]);
        let sent = async {
            let body = reqwest::Body::wrap_stream(first.chain(frames));
            let response = self.builder(&process::stream_input())?.body(body).send().await;
            let response = response.map_err(error::transport)?;
            let status = response.status().as_u16();
            let body = response.bytes().await.map_err(error::transport)?;
            if status != 200 {
                return Err(answered(status, &body));
            }
            let mut decoder = Decoder::default();
            decoder.push(body);
            while let Some(frame) = decoder.next_frame().map_err(error::broken)? {
                if frame.flags & END_OF_STREAM != 0 {
                    return match rpc::parse_end(&frame.payload) {
                        Ok(None) => Ok(()),
                        Ok(Some(error)) => Err(error::rpc(&error).into()),
                        Err(why) => Err(error::unreadable("the end of the stream", why).into()),
                    };
                }
            }
            Err(error::cut_short().into())
        };
        match sent.await {
            Ok(()) => Ok(()),
            Err(failure) => Err(self.explain(error::into_error(failure)).await),
        }
    }

    /// Starts a program. Sent again only if it certainly never arrived.
    pub(crate) async fn start(&self, message: &StartRequest) -> Result<Events> {
        let request = process::start(message, USER);
        self.stream("start", Idempotency::OnlyIfUnsent, &request).await
    }

    /// Follows a running process from now on.
    pub(crate) async fn connect(&self, pid: u32) -> Result<Events> {
        self.stream("connect", Idempotency::Safe, &process::connect(pid)).await
    }

    /// Kills the program whose start was given up before its id was known, if it was started: by a word in its label or its arguments.
    pub(crate) async fn kill_by_word(&self, word: &str) -> Result<()> {
        let request = rpc::unary(
            "process.Process/List",
            &process::Empty {},
            rpc::Auth::None,
            Some(UNARY_TIMEOUT),
        );
        let listed: process::ListResponse = self.call("list processes", &request).await?;
        let has_word = |info: &process::ProcessInfo| {
            let is_label = info.tag.as_deref() == Some(word);
            is_label
                || info
                    .config
                    .as_ref()
                    .is_some_and(|config| config.args.iter().any(|arg| arg == word))
        };
        for found in listed.processes.iter().filter(|info| has_word(info)) {
            crate::process::kill_group(self, found.pid).await?;
        }
        Ok(())
    }

    /// Runs a small script of ours to its end. It must be harmless to run it twice, as a lost answer does.
    pub(crate) async fn script(&self, script: &str, args: &[&str]) -> Result<Said> {
        let mut words = vec!["-c".to_owned(), script.to_owned(), "sh".to_owned()];
        words.extend(args.iter().map(|arg| (*arg).to_owned()));
        let message = StartRequest {
            process: Some(ProcessConfig {
                cmd: "/bin/sh".to_owned(),
                args: words,
                envs: BTreeMap::new(),
                cwd: Some("/".to_owned()),
            }),
            stdin: Some(false),
            ..StartRequest::default()
        };
        match tokio::time::timeout(HELPER_TIMEOUT, self.script_once(&message)).await {
            Ok(said) => said,
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                format!("a script in the sandbox did not end within {HELPER_TIMEOUT:?}"),
            )),
        }
    }

    async fn script_once(&self, message: &StartRequest) -> Result<Said> {
        let said = self
            .retrier
            .run("script", Idempotency::Safe, |_| async {
                // Harmless to run again, so a lost start is as good as none.
                let mut events = self.start(message).await.map_err(again)?;
                let mut said = Said {
                    code: -1,
                    stdout: Vec::new(),
                    stderr: Vec::new(),
                };
                let mut ended = false;
                while let Some(event) = events.next().await.map_err(again)? {
                    match event {
                        Event::Data(data) => match data.output {
                            Some(process::Output::Stdout(bytes)) if said.stdout.len() < HELPER_OUTPUT => {
                                said.stdout.extend_from_slice(&bytes);
                            }
                            Some(process::Output::Stderr(bytes)) if said.stderr.len() < HELPER_OUTPUT => {
                                said.stderr.extend_from_slice(&bytes);
                            }
                            _ => {}
                        },
                        Event::End(end) => {
                            said.code = end.exit_code;
                            ended = true;
                        }
                        Event::Start(_) | Event::Keepalive(_) => {}
                    }
                }
                if ended {
                    Ok(said)
                } else {
                    Err(again(error::cut_short()))
                }
            })
            .await;
        match said {
            Ok(said) => Ok(said),
            Err(error) => Err(self.explain(error).await),
        }
    }

    /// A download, or a part of it. `None` for a part that begins behind the end.
    pub(crate) async fn download(
        &self,
        path: &str,
        offset: u64,
        limit: Option<u64>,
    ) -> Result<Option<reqwest::Response>> {
        let request = files::download(path, USER, offset, limit);
        let opened = self
            .retrier
            .run("download", Idempotency::Safe, |_| async {
                let sent = tokio::time::timeout(OPEN_TIMEOUT, self.builder(&request)?.send()).await;
                let response = match sent {
                    Ok(sent) => sent.map_err(error::transport)?,
                    Err(_) => {
                        let message = format!("no answer within {OPEN_TIMEOUT:?}");
                        return Err(Failure::from(Error::new(ErrorKind::Timeout, message)));
                    }
                };
                match response.status().as_u16() {
                    200 | 206 => Ok(Some(response)),
                    416 => Ok(None),
                    status => {
                        let body = response.bytes().await.map_err(error::transport)?;
                        Err(error::files(status, &body).into())
                    }
                }
            })
            .await;
        match opened {
            Ok(response) => Ok(response),
            Err(error) => Err(self.explain(error).await),
        }
    }

    /// An upload. Bytes in memory are sent again after a failure, as an upload replaces the whole file; a stream cannot.
    pub(crate) async fn upload(&self, path: &str, bytes: Bytes) -> Result<()> {
        let request = files::upload(path, USER);
        let sent = self
            .retrier
            .run("upload", Idempotency::Safe, |_| async {
                self.upload_once(&request, reqwest::Body::from(bytes.clone())).await
            })
            .await;
        match sent {
            Ok(()) => Ok(()),
            Err(error) => Err(self.explain(error).await),
        }
    }

    /// An upload of a stream.
    pub(crate) async fn upload_stream(&self, path: &str, body: reqwest::Body) -> Result<()> {
        let request = files::upload(path, USER);
        match self.upload_once(&request, body).await {
            Ok(()) => Ok(()),
            Err(failure) => Err(self.explain(error::into_error(failure)).await),
        }
    }

    async fn upload_once(&self, request: &Request, body: reqwest::Body) -> Result<(), Failure> {
        let response = self
            .builder(request)?
            .body(body)
            .send()
            .await
            .map_err(error::transport)?;
        let status = response.status().as_u16();
        let body = response.bytes().await.map_err(error::transport)?;
        if status == 200 {
            return Ok(());
        }
        Err(error::files(status, &body).into())
    }

    /// Whether the box is still there.
    ///
    /// # Errors
    /// [`SandboxGone`](ErrorKind::SandboxGone), or that nobody answered.
    pub(crate) async fn probe(&self) -> Result<()> {
        let builder = self.builder(&files::health())?.timeout(PROBE_TIMEOUT);
        let response = builder
            .send()
            .await
            .map_err(error::transport)
            .map_err(error::into_error)?;
        let status = response.status().as_u16();
        if (200..300).contains(&status) {
            return Ok(());
        }
        let body = response.bytes().await.unwrap_or_default();
        Err(error::rpc(&rpc::parse_error(status, &body)))
    }

    /// Finds out whether a broken connection means that the box is gone.
    pub(crate) async fn explain(&self, error: Error) -> Error {
        // Callers name what they wanted, rather than which call failed.
        let error = error.without_operation();
        if !matches!(error.kind(), ErrorKind::ConnectionLost | ErrorKind::Unavailable) {
            return error;
        }
        match self.probe().await {
            Err(gone) if gone.kind() == ErrorKind::SandboxGone => gone.with_source(error),
            _ => error,
        }
    }
}

/// A broken connection as a reason to try again.
fn again(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::ConnectionLost | ErrorKind::Unavailable => error.with_retry(runtime_core::Retry::Temporary).into(),
        _ => error.into(),
    }
}

/// An answer of an RPC path that is not 200.
fn answered(status: u16, body: &[u8]) -> Failure {
    let parsed = rpc::parse_error(status, body);
    let error = error::rpc(&parsed);
    // The edge answers these before anything reaches envd.
    let unsent = !parsed.from_rpc_layer && matches!(parsed.code, rpc::Code::ResourceExhausted);
    if unsent { Failure::unsent(error) } else { error.into() }
}

/// The time that a unary call is given on this side.
pub(crate) const fn call_timeout() -> Duration {
    assert!(CALL_TIMEOUT.as_secs() > UNARY_TIMEOUT.as_secs());
    CALL_TIMEOUT
}

/// A stream of events of a process.
#[derive(Debug)]
pub(crate) struct Events {
    /// Until it is finished.
    response: Option<reqwest::Response>,
    decoder: Decoder,
    /// Since when something is awaited, over however many calls.
    waiting_since: Option<Instant>,
}

impl Events {
    /// Nothing is awaited for now, so the other side cannot be silent.
    pub(crate) fn rest(&mut self) {
        self.waiting_since = None;
    }

    /// Reads what is left behind the last event, which is next to nothing, in the background: a connection whose answer
    /// was read to its end serves again.
    pub(crate) fn finish(&mut self) {
        let Some(mut response) = self.response.take() else {
            return;
        };
        tokio::spawn(async move {
            let rest = async { while let Ok(Some(_)) = response.chunk().await {} };
            let _ = tokio::time::timeout(FINISH, rest).await;
        });
    }

    /// The next event; `None` after the stream has said that it is complete. Events that we do not know are passed over.
    /// Cancel safe.
    ///
    /// # Errors
    /// What the other side says went wrong; [`ConnectionLost`](ErrorKind::ConnectionLost) for a stream that broke off or
    /// fell silent; [`Protocol`](ErrorKind::Protocol).
    pub(crate) async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            while let Some(frame) = self.decoder.next_frame().map_err(error::broken)? {
                if frame.flags & END_OF_STREAM != 0 {
                    self.finish();
                    return match rpc::parse_end(&frame.payload) {
                        Ok(None) => Ok(None),
                        Ok(Some(error)) => Err(error::rpc(&error)),
                        Err(why) => Err(error::unreadable("the end of the stream", why)),
                    };
                }
                let message =
                    StartResponse::decode(frame.payload).map_err(|error| error::unreadable("an event", error))?;
                if let Some(event) = message.into_event() {
                    return Ok(Some(event));
                }
            }
            let since = *self.waiting_since.get_or_insert_with(Instant::now);
            let Some(response) = self.response.as_mut() else {
                return Err(error::cut_short());
            };
            let chunk = match tokio::time::timeout_at(since + SILENCE, response.chunk()).await {
                Ok(Ok(chunk)) => {
                    self.waiting_since = None;
                    chunk
                }
                Ok(Err(broken)) => return Err(error::into_error(error::transport(broken))),
                Err(_) => return Err(error::silent()),
            };
            match chunk {
                Some(chunk) => self.decoder.push(chunk),
                None => return Err(error::cut_short()),
            }
        }
    }
}
