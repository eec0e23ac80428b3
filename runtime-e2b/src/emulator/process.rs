//! envd's package `process`: real processes.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use pty_process::OwnedReadPty;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::sync::{Notify, mpsc};

use super::envd::{
    Box, Codec, RpcFailure, User, Users, end_frame, failed_stream, framed, keepalive, message, resolve, unary,
    unimplemented,
};
use super::place::Place;
use super::server::{Answer, Piece, channel, failure, full};
use super::terminal::{self, Feed};
use crate::process::signal_name;
use crate::wire::envelope::{self, Decoder};
use crate::wire::process::{
    DataEvent, Empty, EndEvent, Event, Input, KeepAlive, ListResponse, Output, ProcessConfig, ProcessInfo,
    ProcessRequest, ProcessSelector, Selector, SendInputRequest, SendSignalRequest, SignalKind, StartEvent,
    StartRequest, StartResponse, StreamInputEvent, StreamInputRequest, UpdateRequest,
};
use crate::wire::rpc::Code;

/// One read of a pipe.
const READ: usize = 32 << 10;

/// One read of a terminal.
const READ_TERMINAL: usize = 16 << 10;

/// How long the end of a process is remembered.
const RETENTION: Duration = Duration::from_secs(30);

/// Chunks that a subscriber may be behind before it holds the process.
const BEHIND: usize = 64;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The processes of a box.
#[derive(Debug, Default)]
pub(super) struct Processes(
    Mutex<BTreeMap<u32, Arc<Process>>>,
    AtomicBool,
    /// Those that ended, oldest first.
    Mutex<VecDeque<Arc<Process>>>,
);

#[derive(Debug)]
struct Process {
    /// As the box knows it.
    pid: u32,
    /// As this machine does.
    outside: u32,
    config: ProcessConfig,
    tag: Option<String>,
    stdin: tokio::sync::Mutex<Option<Feed>>,
    has_stdin: bool,
    subscribers: Mutex<Vec<mpsc::Sender<Event>>>,
    ended: Mutex<Option<(EndEvent, Instant)>>,
    /// A signal was asked for, so its end is not waited for beyond its exit.
    signalled: Notify,
}

impl Processes {
    fn find(&self, selector: Option<&ProcessSelector>) -> Result<Arc<Process>, RpcFailure> {
        let processes = lock(&self.0);
        let found = match selector.and_then(|selector| selector.selector.as_ref()) {
            Some(Selector::Pid(pid)) => processes.get(pid),
            Some(Selector::Tag(tag)) => processes.values().find(|process| process.tag.as_ref() == Some(tag)),
            None => None,
        };
        let found = found.filter(|process| !process.is_forgotten());
        found
            .cloned()
            .ok_or_else(|| RpcFailure::new(Code::NotFound, "process not found"))
    }

    /// Forgets what ended long ago.
    fn forget(&self) {
        let mut ended = lock(&self.2);
        while ended.front().is_some_and(|oldest| oldest.is_forgotten()) {
            let Some(oldest) = ended.pop_front() else { return };
            let mut processes = lock(&self.0);
            // Its id may be another's by now.
            if processes
                .get(&oldest.pid)
                .is_some_and(|found| Arc::ptr_eq(found, &oldest))
            {
                processes.remove(&oldest.pid);
            }
        }
    }

    /// The box dies: nobody learns any more how its processes end, and nobody waits for what they still print.
    pub(super) fn close(&self) {
        self.1.store(true, Ordering::SeqCst);
        self.cut();
        for process in lock(&self.0).values() {
            process.signalled.notify_one();
        }
    }

    fn is_closed(&self) -> bool {
        self.1.load(Ordering::SeqCst)
    }

    /// Cuts every stream.
    pub(super) fn cut(&self) {
        for process in lock(&self.0).values() {
            lock(&process.subscribers).clear();
        }
    }
}

impl Process {
    fn is_forgotten(&self) -> bool {
        lock(&self.ended)
            .as_ref()
            .is_some_and(|(_, at)| at.elapsed() > RETENTION)
    }

    /// Gives every subscriber an event, waiting for each; forgets those that are gone.
    async fn publish(&self, event: Event) {
        let subscribers = lock(&self.subscribers).clone();
        let mut gone = false;
        for subscriber in subscribers {
            gone |= subscriber.send(event.clone()).await.is_err();
        }
        if gone {
            lock(&self.subscribers).retain(|subscriber| !subscriber.is_closed());
        }
    }

    fn signal(&self, signal: Signal) -> Result<(), RpcFailure> {
        let pid = i32::try_from(self.outside).ok().and_then(Pid::from_raw);
        let sent = pid.map(|pid| kill_process(pid, signal));
        self.signalled.notify_one();
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(RpcFailure::new(Code::Internal, "the process could not be signalled")),
        }
    }
}

pub(super) async fn handle(
    found: &Box,
    place: &Place,
    users: &Users,
    method: &str,
    request: Request<Incoming>,
) -> Answer {
    let Some((codec, streaming)) = Codec::of(request.headers()) else {
        return failure(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unknown content type");
    };
    if streaming != matches!(method, "Start" | "Connect" | "StreamInput") {
        return failure(StatusCode::UNSUPPORTED_MEDIA_TYPE, "wrong content type for this method");
    }
    match method {
        "Start" => start(found, place, users, codec, request).await,
        "Connect" => connect(found, codec, request).await,
        "StreamInput" => stream_input(found, codec, request).await,
        "List" => unary(codec, message::<Empty>(codec, request).await.map(|_| list(found))),
        "SendInput" => {
            let sent = match message::<SendInputRequest>(codec, request).await {
                Ok(message) => send_input(found, message).await,
                Err(failure) => Err(failure),
            };
            unary(codec, sent)
        }
        "Update" => {
            let updated = match message::<UpdateRequest>(codec, request).await {
                Ok(message) => resize(found, message).await,
                Err(failure) => Err(failure),
            };
            unary(codec, updated)
        }
        "CloseStdin" => {
            let closed = match message::<ProcessRequest>(codec, request).await {
                Ok(message) => match found.processes.find(message.process.as_ref()) {
                    Ok(process) => {
                        let mut stdin = process.stdin.lock().await;
                        if stdin.as_ref().is_some_and(Feed::is_terminal) {
                            Err(RpcFailure::new(
                                Code::Unknown,
                                "a terminal is closed by its end-of-transmission byte",
                            ))
                        } else {
                            *stdin = None;
                            Ok(Empty {})
                        }
                    }
                    Err(failure) => Err(failure),
                },
                Err(failure) => Err(failure),
            };
            unary(codec, closed)
        }
        "SendSignal" => {
            let sent = message::<SendSignalRequest>(codec, request).await.and_then(|message| {
                let process = found.processes.find(message.process.as_ref())?;
                let signal = match SignalKind::try_from(message.signal) {
                    Ok(SignalKind::Sigkill) => Signal::KILL,
                    Ok(SignalKind::Sigterm) => Signal::TERM,
                    _ => return Err(RpcFailure::new(Code::Unimplemented, "invalid signal")),
                };
                if lock(&process.ended).is_some() {
                    return Err(RpcFailure::new(Code::NotFound, "process not found"));
                }
                process.signal(signal).map(|()| Empty {})
            });
            unary(codec, sent)
        }
        _ => unary::<Empty>(codec, Err(unimplemented(method))),
    }
}

fn list(found: &Box) -> ListResponse {
    let processes = lock(&found.processes.0);
    let running = processes.values().filter(|process| lock(&process.ended).is_none());
    ListResponse {
        processes: running
            .map(|process| ProcessInfo {
                config: Some(process.config.clone()),
                pid: process.pid,
                tag: process.tag.clone(),
            })
            .collect(),
    }
}

fn deadline(headers: &HeaderMap) -> Result<Option<Duration>, RpcFailure> {
    let Some(value) = headers.get("connect-timeout-ms") else {
        return Ok(None);
    };
    let parsed = value
        .to_str()
        .ok()
        .filter(|text| text.len() <= 10)
        .and_then(|text| text.parse().ok());
    match parsed {
        Some(millis) => Ok(Some(Duration::from_millis(millis))),
        None => Err(RpcFailure::new(Code::InvalidArgument, "malformed timeout")),
    }
}

async fn start(found: &Box, place: &Place, users: &Users, codec: Codec, request: Request<Incoming>) -> Answer {
    let prepared = async {
        let user = users.of_call(request.headers())?;
        let (ping, limit) = (keepalive(request.headers()), deadline(request.headers())?);
        let message: StartRequest = framed(codec, request).await?;
        let (process, running) = spawn(found, place, &user, message)?;
        Ok((process, running, ping, limit))
    };
    let (process, running, ping, limit) = match prepared.await {
        Ok(prepared) => prepared,
        Err(failure) => return failed_stream(codec, &failure),
    };
    let answer = subscribe(&process, codec, ping, limit);
    tokio::spawn(supervise(found.clone(), process.clone(), running));
    if let Some(limit) = limit {
        tokio::spawn(async move {
            tokio::time::sleep(limit).await;
            if lock(&process.ended).is_none() {
                let _ = process.signal(Signal::KILL);
            }
        });
    }
    answer
}

async fn connect(found: &Box, codec: Codec, request: Request<Incoming>) -> Answer {
    let (ping, limit) = (keepalive(request.headers()), deadline(request.headers()));
    let process = match framed::<ProcessRequest>(codec, request).await {
        Ok(message) => found.processes.find(message.process.as_ref()),
        Err(failure) => Err(failure),
    };
    match (process, limit) {
        (Ok(process), Ok(limit)) => subscribe(&process, codec, ping, limit),
        (Err(failure), _) | (_, Err(failure)) => failed_stream(codec, &failure),
    }
}

/// A stream of what a process does from now on.
fn subscribe(process: &Arc<Process>, codec: Codec, ping: Duration, limit: Option<Duration>) -> Answer {
    let (events, mut coming) = mpsc::channel(BEHIND);
    let ended = {
        // Under the lock of the end, so that the end is either seen here or sent there.
        let ended = lock(&process.ended);
        if ended.is_none() {
            lock(&process.subscribers).push(events);
        }
        ended.as_ref().map(|(end, _)| end.clone())
    };
    let (sender, body) = channel(1);
    let pid = process.pid;
    tokio::spawn(async move {
        let frame = |event: Event| Piece::Bytes(codec.frame(&StartResponse::of(event)));
        let write = async {
            sender.send(frame(Event::Start(StartEvent { pid }))).await.ok()?;
            if let Some(end) = ended {
                sender.send(frame(Event::End(end))).await.ok()?;
            } else {
                loop {
                    match tokio::time::timeout(ping, coming.recv()).await {
                        Ok(Some(event)) => {
                            let is_end = matches!(event, Event::End(_));
                            sender.send(frame(event)).await.ok()?;
                            if is_end {
                                break;
                            }
                        }
                        // Cut: no last frame.
                        Ok(None) => return None,
                        Err(_) => sender.send(frame(Event::Keepalive(KeepAlive {}))).await.ok()?,
                    }
                }
            }
            sender.send(Piece::Bytes(end_frame(None))).await.ok()
        };
        let written = match limit {
            None => write.await,
            Some(limit) => match tokio::time::timeout(limit, write).await {
                Ok(written) => written,
                Err(_) => {
                    let failure = RpcFailure::new(Code::DeadlineExceeded, "context deadline exceeded");
                    sender.send(Piece::Bytes(end_frame(Some(&failure)))).await.ok()
                }
            },
        };
        if written.is_some() {
            let _ = sender.send(Piece::End).await;
        }
    });
    let mut answer = Response::new(body);
    answer
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, codec.stream_type());
    answer
}

/// The search path of envd's own service.
pub(super) const SERVICE_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The path of a program that can be started without a shell: an executable file that is no script, whose format might
/// need one.
fn executable(program: &str, path: &str, cwd: &str) -> Option<std::path::PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let can_start = |candidate: &std::path::PathBuf| {
        let is_executable =
            std::fs::metadata(candidate).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
        let mut magic = [0; 4];
        is_executable
            && std::fs::File::open(candidate).is_ok_and(|mut file| io::Read::read_exact(&mut file, &mut magic).is_ok())
            && &magic == b"\x7fELF"
    };
    let below = |dir: &str| std::path::Path::new(cwd).join(dir).join(program);
    match program.contains('/') {
        true => Some(below("")).filter(can_start),
        false => path.split(':').map(below).find(can_start),
    }
}

/// A started program, and what it prints.
struct Running {
    child: Child,
    terminal: Option<OwnedReadPty>,
}

fn spawn(
    found: &Box,
    place: &Place,
    user: &User,
    message: StartRequest,
) -> Result<(Arc<Process>, Running), RpcFailure> {
    let Some(config) = message.process else {
        return Err(RpcFailure::new(Code::InvalidArgument, "no process is given"));
    };
    let cwd = resolve(config.cwd.as_deref().unwrap_or_default(), user);
    if !std::path::Path::new(&cwd).is_dir() {
        return Err(RpcFailure::new(
            Code::InvalidArgument,
            format!("cwd '{cwd}' does not exist"),
        ));
    }
    let has_stdin = message.stdin.unwrap_or(true);
    // The real one starts everything through a shell that becomes the program. That is of no consequence but for what
    // cannot be started, which the shell tells by a line and a code; so only that needs it.
    let path = config.envs.get("PATH").or_else(|| found.env.get("PATH"));
    let program = executable(&config.cmd, path.map_or(SERVICE_PATH, String::as_str), &cwd);
    let mut command = match &program {
        Some(program) => {
            let mut command = Command::new(program);
            command.arg0(&config.cmd);
            command
        }
        None => {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", "exec \"$@\"", "--", &config.cmd]);
            command
        }
    };
    command
        .args(&config.args)
        .env_clear()
        .env("PATH", SERVICE_PATH)
        .env("HOME", &user.home)
        .env("USER", &user.name)
        .env("LOGNAME", &user.name)
        .envs(&found.env)
        .env("E2B_SANDBOX", "true")
        .env(super::place::MARKER, &found.id)
        .env("E2B_TEMPLATE_ID", &found.template_id)
        .envs(&config.envs)
        .current_dir(&cwd);
    if rustix::process::geteuid().is_root() && user.uid != 0 {
        command.uid(user.uid).gid(user.gid);
    }
    let started = match message.pty {
        Some(pty) => terminal::spawn(command, pty.size.unwrap_or_default())
            .map(|(child, output, input)| (child, Some(output), Some(Feed::Terminal(input)))),
        None => {
            let stdin = if has_stdin { Stdio::piped() } else { Stdio::null() };
            command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().map(|mut child| {
                let stdin = child.stdin.take().map(Feed::Pipe);
                (child, None, stdin)
            })
        }
    };
    let (child, terminal, stdin) =
        started.map_err(|error| RpcFailure::new(Code::InvalidArgument, format!("error starting process: {error}")))?;
    let outside = child.id().unwrap_or_default();
    let process = Arc::new(Process {
        pid: place.id_inside(outside).unwrap_or(outside),
        outside,
        config,
        tag: message.tag,
        stdin: tokio::sync::Mutex::new(stdin),
        has_stdin,
        subscribers: Mutex::default(),
        ended: Mutex::default(),
        signalled: Notify::new(),
    });
    found.processes.forget();
    lock(&found.processes.0).insert(process.pid, process.clone());
    Ok((process, Running { child, terminal }))
}

/// Publishes what a process prints until both pipes end; or, once it was signalled, until it has exited.
async fn supervise(found: Box, process: Arc<Process>, running: Running) {
    let Running { mut child, terminal } = running;
    if found.processes.is_closed() {
        process.signalled.notify_one();
    }
    let stdout = publish(&process, child.stdout.take(), READ, Output::Stdout);
    let stderr = publish(&process, child.stderr.take(), READ, Output::Stderr);
    let terminal = publish(&process, terminal, READ_TERMINAL, Output::Pty);
    // The process stays a zombie while its pipes are read, as it does with the real one.
    let exited = {
        let drained = async { tokio::join!(stdout, stderr, terminal) };
        tokio::select! {
            _ = drained => None,
            exited = async {
                process.signalled.notified().await;
                child.wait().await
            } => Some(exited),
        }
    };
    let exited = match exited {
        Some(exited) => exited,
        None => child.wait().await,
    };
    let Ok(status) = exited else { return };
    let end = end_event(status);
    let subscribers = {
        let mut ended = lock(&process.ended);
        *ended = Some((end.clone(), Instant::now()));
        std::mem::take(&mut *lock(&process.subscribers))
    };
    lock(&found.processes.2).push_back(process.clone());
    if found.processes.is_closed() {
        return;
    }
    for subscriber in subscribers {
        let _ = subscriber.send(Event::End(end.clone())).await;
    }
    *process.stdin.lock().await = None;
    drop(found);
}

async fn publish<R: AsyncRead + Unpin>(process: &Process, pipe: Option<R>, size: usize, wrap: fn(Bytes) -> Output) {
    let Some(mut pipe) = pipe else { return };
    loop {
        let mut chunk = BytesMut::with_capacity(size);
        match pipe.read_buf(&mut chunk).await {
            // A terminal that nobody has open any more says so by an error.
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let output = Some(wrap(chunk.freeze()));
                process.publish(Event::Data(DataEvent { output })).await;
            }
        }
    }
}

fn end_event(status: ExitStatus) -> EndEvent {
    match (status.code(), status.signal()) {
        (Some(code), _) => {
            let text = format!("exit status {code}");
            EndEvent {
                exit_code: code,
                exited: true,
                error: (code != 0).then(|| text.clone()),
                status: text,
            }
        }
        (None, signal) => {
            let dumped = if status.core_dumped() { " (core dumped)" } else { "" };
            let text = format!("signal: {}{dumped}", signal_name(signal.unwrap_or_default()));
            EndEvent {
                exit_code: -1,
                exited: false,
                error: Some(text.clone()),
                status: text,
            }
        }
    }
}

async fn write(process: &Process, input: Input) -> Result<(), RpcFailure> {
    let (bytes, for_terminal) = match input {
        Input::Stdin(bytes) => (bytes, false),
        Input::Pty(bytes) => (bytes, true),
    };
    let mut stdin = process.stdin.lock().await;
    let Some(stdin) = stdin.as_mut() else {
        let why = if process.has_stdin {
            "stdin was closed"
        } else {
            "stdin is not enabled"
        };
        return Err(RpcFailure::new(Code::Internal, why));
    };
    match (for_terminal, stdin.is_terminal()) {
        (true, false) => return Err(RpcFailure::new(Code::Internal, "not a terminal")),
        (false, true) => return Err(RpcFailure::new(Code::Internal, "a terminal has no stdin")),
        _ => {}
    }
    let written = stdin.write(&bytes).await;
    written.map_err(|error| RpcFailure::new(Code::Internal, format!("error writing to stdin: {error}")))
}

async fn resize(found: &Box, message: UpdateRequest) -> Result<Empty, RpcFailure> {
    let process = found.processes.find(message.process.as_ref())?;
    let stdin = process.stdin.lock().await;
    let Some((terminal, size)) = stdin.as_ref().zip(message.pty.and_then(|pty| pty.size)) else {
        return Ok(Empty {});
    };
    match terminal.resize(size) {
        Ok(true) => Ok(Empty {}),
        Ok(false) => Err(RpcFailure::new(Code::Internal, "not a terminal")),
        Err(error) => Err(RpcFailure::new(Code::Internal, format!("error resizing: {error}"))),
    }
}

async fn send_input(found: &Box, message: SendInputRequest) -> Result<Empty, RpcFailure> {
    let process = found.processes.find(message.process.as_ref())?;
    match message.input.and_then(|input| input.input) {
        Some(input) => write(&process, input).await.map(|()| Empty {}),
        None => Err(RpcFailure::new(Code::Unimplemented, "invalid input type")),
    }
}

async fn stream_input(found: &Box, codec: Codec, request: Request<Incoming>) -> Answer {
    let fed = async {
        let mut body = request.into_body();
        let mut decoder = Decoder::default();
        let mut process = None;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| RpcFailure::new(Code::Canceled, error.to_string()))?;
            if let Ok(bytes) = frame.into_data() {
                decoder.push(bytes);
            }
            while let Some(frame) = decoder
                .next_frame()
                .map_err(|_| RpcFailure::new(Code::InvalidArgument, "malformed envelope"))?
            {
                let message: StreamInputRequest = codec.decode(&frame.payload)?;
                match message.event {
                    Some(StreamInputEvent::Start(start)) => {
                        process = Some(found.processes.find(start.process.as_ref())?);
                    }
                    Some(StreamInputEvent::Data(data)) => {
                        let Some(process) = &process else {
                            return Err(RpcFailure::new(Code::InvalidArgument, "data before start"));
                        };
                        if let Some(input) = data.input.and_then(|input| input.input) {
                            write(process, input).await?;
                        }
                    }
                    Some(StreamInputEvent::Keepalive(_)) | None => {}
                }
            }
        }
        Ok(())
    };
    match fed.await {
        Ok(()) => {
            let mut bytes = BytesMut::from(&envelope::encode(0, &codec.encode(&Empty {}))[..]);
            bytes.extend_from_slice(&end_frame(None));
            let mut answer = Response::new(full(bytes.freeze()));
            answer
                .headers_mut()
                .insert(http::header::CONTENT_TYPE, codec.stream_type());
            answer
        }
        Err(failure) => failed_stream(codec, &failure),
    }
}
