//! Live processes: one stream of envd, split into two pipes with bounded memory.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Buf as _, Bytes};
use runtime_core::retry::Idempotency;
use runtime_core::{
    Error, ErrorKind, Exec, ExitStatus, Process, ProcessControl, ProcessStderr, ProcessStdin, ProcessStdout, Result,
    Signal,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::envd::{Envd, Events, call_timeout};
use crate::error;
use crate::launch::{self, Beginning, Launch, Mode};
use crate::watch::Watch;
use crate::wire::process::{self as wire, Empty, EndEvent, Event, Output, SignalKind};

/// Unread bytes of a stream at which envd, and so the program, is held back. More than a pipe holds, so that a program
/// whose output would fit into one ends without a reader.
const HOLD: usize = 128 << 10;

/// Unread bytes of a stream at which it is held back even while the other stream's reader waits for more. Both share a
/// connection, so somebody has to give way.
const HOLD_STARVING: usize = 16 << 20;

/// Bytes that are sent to standard input at once.
const INPUT_CHUNK: usize = 64 << 10;

/// How long a program may take to get past its launcher.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(60);

/// After this much silence the box is asked whether the program has ended; doubles up to [`MAX_LOOK`].
const FIRST_LOOK: Duration = Duration::from_millis(500);

/// And after this long whether there is silence or not; doubles likewise.
const BUSY_LOOK: Duration = Duration::from_secs(5);

/// The longest time between two such questions.
const MAX_LOOK: Duration = Duration::from_secs(15);

/// How long envd may take to let go of the pipes of an ended program.
const LET_GO: Duration = Duration::from_secs(10);

/// Signals a group by its leader, or the leader alone where it could not be made one.
const SIGNAL_GROUP: &str =
    r#"kill -s "$1" -- "-$2" 2>/dev/null || kill -s "$1" -- "$2" 2>/dev/null || [ ! -d "/proc/$2" ]"#;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The status of an ended program.
pub(crate) fn exit_status(end: &EndEvent) -> Result<ExitStatus> {
    if let Some(name) = end.status.strip_prefix("signal: ") {
        let name = name.trim_end_matches(" (core dumped)");
        return match signal_number(name) {
            Some(number) => Ok(ExitStatus::signaled(number)),
            None => Err(error::unreadable(
                "the end of the program",
                format_args!("unknown signal {name:?}"),
            )),
        };
    }
    if end.exited || end.status.starts_with("exit status ") {
        return Ok(ExitStatus::exited(end.exit_code));
    }
    Err(error::unreadable(
        "the end of the program",
        format_args!("it says {:?}", end.status),
    ))
}

/// Signals by the names that envd's language gives them.
const SIGNALS: [(&str, i32); 31] = [
    ("hangup", 1),
    ("interrupt", 2),
    ("quit", 3),
    ("illegal instruction", 4),
    ("trace/breakpoint trap", 5),
    ("aborted", 6),
    ("bus error", 7),
    ("floating point exception", 8),
    ("killed", 9),
    ("user defined signal 1", 10),
    ("segmentation fault", 11),
    ("user defined signal 2", 12),
    ("broken pipe", 13),
    ("alarm clock", 14),
    ("terminated", 15),
    ("stack fault", 16),
    ("child exited", 17),
    ("continued", 18),
    ("stopped (signal)", 19),
    ("stopped", 20),
    ("stopped (tty input)", 21),
    ("stopped (tty output)", 22),
    ("urgent I/O condition", 23),
    ("CPU time limit exceeded", 24),
    ("file size limit exceeded", 25),
    ("virtual timer expired", 26),
    ("profiling timer expired", 27),
    ("window changed", 28),
    ("I/O possible", 29),
    ("power failure", 30),
    ("bad system call", 31),
];

fn signal_number(name: &str) -> Option<i32> {
    let known = SIGNALS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, number)| *number);
    known.or_else(|| name.strip_prefix("signal ")?.parse().ok())
}

/// The name that envd's language gives a signal.
#[cfg(feature = "emulator")]
pub(crate) fn signal_name(number: i32) -> String {
    match SIGNALS.iter().find(|(_, known)| *known == number) {
        Some((name, _)) => (*name).to_owned(),
        None => format!("signal {number}"),
    }
}

/// Signals the group of a program.
pub(crate) async fn signal_group(envd: &Envd, pid: u32, signal: Signal) -> Result<()> {
    let said = envd
        .script(SIGNAL_GROUP, &[&signal.number().to_string(), &pid.to_string()])
        .await?;
    if said.code == 0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Other,
        format!(
            "the process group {pid} could not be signalled (exit code {})",
            said.code
        ),
    ))
}

/// Kills the group of a program, and lets envd know, so that it does not wait for pipes that somebody else holds.
pub(crate) async fn kill_group(envd: &Envd, pid: u32) -> Result<()> {
    let killed = signal_group(envd, pid, Signal::KILL).await;
    let told = let_go(envd, pid, SignalKind::Sigkill).await;
    // Either is enough to end the leader.
    killed.or(told)
}

/// Sends a signal by envd. An ended program does not notice; envd stops waiting for the end of its pipes.
async fn let_go(envd: &Envd, pid: u32, signal: SignalKind) -> Result<()> {
    match envd.call::<Empty>("signal", &wire::send_signal(pid, signal)).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// A program past its launcher.
pub(crate) struct Begun {
    pub(crate) events: Events,
    pub(crate) pid: u32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

/// Starts a program and waits until it runs.
///
/// Not cancel safe: a start that is given up half-way may or may not have happened. Callers drive it to its end.
pub(crate) async fn begin(envd: &Envd, exec: &Exec, launch: &Launch) -> Result<Begun> {
    let begun = async {
        let mut events = envd.start(&launch.message).await?;
        let beginning = read_beginning(&mut events, launch, exec).await;
        match beginning {
            Ok((pid, beginning)) => {
                let (stdout, stderr) = beginning.into_rest();
                Ok(Begun {
                    events,
                    pid,
                    stdout,
                    stderr,
                })
            }
            Err(error) => Err(envd.explain(error).await),
        }
    };
    let result = match tokio::time::timeout(BEGIN_TIMEOUT, begun).await {
        Ok(result) => result,
        Err(_) => Err(Error::new(
            ErrorKind::Timeout,
            format!("the program did not start within {BEGIN_TIMEOUT:?}"),
        )),
    };
    let error = match result {
        Ok(begun) => return Ok(begun),
        Err(error) => error,
    };
    Err(explain_start(error, exec))
}

async fn read_beginning(events: &mut Events, launch: &Launch, exec: &Exec) -> Result<(u32, Beginning)> {
    let mut pid = None;
    let mut beginning = Beginning::of(launch);
    let mut ended = None;
    loop {
        match events.next().await? {
            Some(Event::Start(start)) => pid = Some(start.pid),
            Some(Event::Data(data)) => match data.output {
                Some(Output::Stdout(bytes)) => beginning.stdout(&bytes),
                Some(Output::Stderr(bytes)) => beginning.stderr(&bytes),
                Some(Output::Pty(_)) | None => {}
            },
            Some(Event::End(end)) => ended = Some(end),
            Some(Event::Keepalive(_)) => {}
            None => {
                let noise = String::from_utf8_lossy(&beginning.noise()).into_owned();
                let status = ended.map(|end| end.status).unwrap_or_default();
                return Err(Error::new(
                    ErrorKind::Other,
                    format!(
                        "the shell that starts programs ended before it could ({status}): {}",
                        runtime_core::text::tail(noise.as_bytes(), 500)
                    ),
                ));
            }
        }
        if let Some(verdict) = beginning.verdict() {
            if let Some(refused) = launch::refused(verdict, exec) {
                return Err(refused);
            }
            if let Some(pid) = pid {
                return Ok((pid, beginning));
            }
        }
        if beginning.is_hopeless() {
            return Err(error::unreadable(
                "the start of the program",
                "too much noise comes before it",
            ));
        }
    }
}

/// envd names neither a missing directory nor too long a vector by a code of its own.
fn explain_start(error: Error, exec: &Exec) -> Error {
    if error.kind() != ErrorKind::InvalidArgument || error.field().is_some() {
        return error;
    }
    let lower = error.message().to_ascii_lowercase();
    if lower.contains("argument list too long") {
        return Error::invalid_argument("argv", "argv and environment are larger than the sandbox takes");
    }
    if lower.contains("cwd") || lower.contains("directory") {
        return Error::new(
            ErrorKind::NotFound,
            format!("the working directory {} does not exist", exec.workdir.display()),
        )
        .with_field("workdir")
        .with_source(error);
    }
    error
}

/// One of the two pipes.
#[derive(Debug, Default)]
struct Pipe {
    chunks: VecDeque<Bytes>,
    length: usize,
    /// Nothing more comes; an error is told once.
    closed: bool,
    failure: Option<Error>,
    /// The reader waits for bytes.
    reader: Option<Waker>,
    /// The reader is gone, so what comes is thrown away.
    abandoned: bool,
}

impl Pipe {
    fn push(&mut self, bytes: Bytes) {
        if self.abandoned || bytes.is_empty() {
            return;
        }
        self.length += bytes.len();
        self.chunks.push_back(bytes);
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    fn close(&mut self, failure: Option<Error>) {
        self.closed = true;
        self.failure = failure;
        self.wake();
    }

    fn is_starving(&self) -> bool {
        self.length == 0 && self.reader.is_some()
    }
}

#[derive(Debug, Default)]
struct Pipes {
    stdout: Pipe,
    stderr: Pipe,
    /// The task that fills them, while it is held back.
    pump: Option<Waker>,
    /// The program is at its end, so nobody is held back any more.
    draining: bool,
}

impl Pipes {
    /// Lets everything in that is still to come.
    fn drain(&mut self) {
        self.draining = true;
        self.wake_pump();
    }

    fn may_fill(&self) -> bool {
        if self.draining {
            return true;
        }
        let holds =
            |full: &Pipe, other: &Pipe| full.length >= HOLD_STARVING || (full.length >= HOLD && !other.is_starving());
        !holds(&self.stdout, &self.stderr) && !holds(&self.stderr, &self.stdout)
    }

    fn wake_pump(&mut self) {
        if let Some(pump) = self.pump.take() {
            pump.wake();
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Which {
    Stdout,
    Stderr,
}

/// The reading end of one pipe.
struct Reader {
    pipes: Arc<Mutex<Pipes>>,
    which: Which,
}

impl Reader {
    fn pipe(pipes: &mut Pipes, which: Which) -> &mut Pipe {
        match which {
            Which::Stdout => &mut pipes.stdout,
            Which::Stderr => &mut pipes.stderr,
        }
    }
}

impl AsyncRead for Reader {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut pipes = lock(&self.pipes);
        let pipe = Self::pipe(&mut pipes, self.which);
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if let Some(chunk) = pipe.chunks.front_mut() {
            let count = chunk.len().min(buf.remaining());
            buf.put_slice(&chunk[..count]);
            chunk.advance(count);
            if chunk.is_empty() {
                pipe.chunks.pop_front();
            }
            pipe.length -= count;
            if pipe.chunks.is_empty() {
                // An idle process keeps nothing.
                pipe.chunks = VecDeque::new();
            }
            pipes.wake_pump();
            return Poll::Ready(Ok(()));
        }
        if pipe.closed {
            return match pipe.failure.take() {
                Some(failure) => Poll::Ready(Err(io::Error::other(failure))),
                None => Poll::Ready(Ok(())),
            };
        }
        let known = pipe.reader.as_ref().is_some_and(|reader| reader.will_wake(cx.waker()));
        if !known {
            pipe.reader = Some(cx.waker().clone());
        }
        // The other pipe may be full, and may grow further now that somebody waits for this one.
        pipes.wake_pump();
        Poll::Pending
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut pipes = lock(&self.pipes);
        let pipe = Self::pipe(&mut pipes, self.which);
        pipe.abandoned = true;
        pipe.chunks = VecDeque::new();
        pipe.length = 0;
        pipe.reader = None;
        pipes.wake_pump();
    }
}

type Ended = Option<Result<ExitStatus>>;

/// What a handle on a process does.
struct Control {
    envd: Arc<Envd>,
    pid: u32,
    pipes: Arc<Mutex<Pipes>>,
    ended: watch::Receiver<Ended>,
}

#[async_trait]
impl ProcessControl for Control {
    fn pid(&self) -> Option<u32> {
        Some(self.pid)
    }

    async fn wait(&self) -> Result<ExitStatus> {
        let mut ended = self.ended.clone();
        let status = match ended.wait_for(Option::is_some).await {
            Ok(status) => status.clone(),
            Err(_) => None,
        };
        status.unwrap_or_else(|| {
            Err(Error::new(
                ErrorKind::Cancelled,
                "the executor of the process went away",
            ))
        })
    }

    fn try_wait(&self) -> Result<Option<ExitStatus>> {
        self.ended.borrow().clone().transpose()
    }

    async fn signal(&self, signal: Signal) -> Result<()> {
        if self.ended.borrow().is_some() {
            return Ok(());
        }
        let sent = if signal == Signal::KILL {
            let killed = kill_group(&self.envd, self.pid).await;
            lock(&self.pipes).drain();
            killed
        } else {
            signal_group(&self.envd, self.pid, signal).await
        };
        match sent {
            // The race with a natural end is lost without regret.
            Err(_) if self.ended.borrow().is_some() => Ok(()),
            sent => sent,
        }
    }

    fn start_kill(&self) {
        if self.ended.borrow().is_some() {
            return;
        }
        let (envd, pid, pipes) = (self.envd.clone(), self.pid, self.pipes.clone());
        runtime_core::detach(async move {
            if let Err(error) = kill_group(&envd, pid).await
                && error.kind() != ErrorKind::SandboxGone
            {
                tracing::debug!(%error, pid, "e2b: a dropped process could not be killed");
            }
            lock(&pipes).drain();
        });
    }
}

/// Starts a live process. Driven to its end by a task of its own: when nobody waits for it any more, it is killed.
pub(crate) async fn spawn(envd: Arc<Envd>, watch: Arc<Watch>, exec: Exec, login_shell: bool) -> Result<Process> {
    let launch = Launch::new(&exec, Mode::Live, login_shell)?;
    let started = tokio::spawn(async move {
        let begun = match begin(&envd, &exec, &launch).await {
            Ok(begun) => begun,
            Err(error) => {
                if matches!(error.kind(), ErrorKind::ConnectionLost | ErrorKind::Timeout) {
                    // It may run by now, and nobody would know.
                    let _ = envd.kill_by_word(&launch.word).await;
                }
                return Err(error);
            }
        };
        Ok(attach(envd, watch, begun, exec.stdin == runtime_core::StdinMode::Piped))
    });
    match started.await {
        Ok(process) => process,
        Err(error) => {
            Err(Error::new(ErrorKind::Cancelled, "the start of the program was cut short").with_source(error))
        }
    }
}

fn attach(envd: Arc<Envd>, watch: Arc<Watch>, begun: Begun, has_stdin: bool) -> Process {
    let (sender, ended) = watch::channel(None);
    let pipes = Arc::new(Mutex::new(Pipes::default()));
    {
        let mut pipes = lock(&pipes);
        pipes.stdout.push(begun.stdout.into());
        pipes.stderr.push(begun.stderr.into());
    }
    let pump = Pump {
        envd: envd.clone(),
        watch,
        pid: begun.pid,
        pipes: pipes.clone(),
    };
    tokio::spawn(pump.run(begun.events, sender));
    let stdin = has_stdin.then(|| feed(envd.clone(), begun.pid, ended.clone()));
    let reader = |which| Reader {
        pipes: pipes.clone(),
        which,
    };
    let control = Control {
        envd,
        pid: begun.pid,
        pipes: pipes.clone(),
        ended,
    };
    Process::new(
        stdin,
        Some(ProcessStdout::new(reader(Which::Stdout))),
        Some(ProcessStderr::new(reader(Which::Stderr))),
        Arc::new(control),
    )
}

/// The task that reads the stream of a process.
struct Pump {
    envd: Arc<Envd>,
    watch: Arc<Watch>,
    pid: u32,
    pipes: Arc<Mutex<Pipes>>,
}

impl Pump {
    async fn run(self, events: Events, ended: watch::Sender<Ended>) {
        let outcome = match self.drive(events).await {
            // What a dying box kills must not look like the end of a program.
            Ok(status) if status.signal() == Some(Signal::KILL.number()) => match self.envd.probe().await {
                Err(gone) if gone.kind() == ErrorKind::SandboxGone => Err(gone),
                _ => Ok(status),
            },
            Ok(status) => Ok(status),
            Err(error) => Err(self.envd.explain(error).await),
        };
        if let Err(error) = &outcome
            && error.kind() != ErrorKind::SandboxGone
        {
            // What is not watched any more must not run on.
            let _ = kill_group(&self.envd, self.pid).await;
        }
        // First the status, so that whoever sees the end of a stream finds it.
        let failure = outcome.as_ref().err().cloned();
        ended.send_replace(Some(outcome));
        let mut pipes = lock(&self.pipes);
        pipes.stdout.close(failure.clone());
        pipes.stderr.close(failure);
    }

    async fn drive(&self, mut events: Events) -> Result<ExitStatus> {
        let mut last_event = Instant::now();
        let mut last_look = last_event;
        let mut quiet_look = FIRST_LOOK;
        let mut busy_look = BUSY_LOOK;
        let mut let_go_by: Option<Instant> = None;
        // The question whether the program has ended, while it is asked.
        let mut asked = None;
        loop {
            let look_at = match let_go_by {
                Some(deadline) => deadline,
                None => (last_event.max(last_look) + quiet_look).min(last_look + busy_look),
            };
            let event = tokio::select! {
                event = self.next(&mut events) => event?,
                ended = answer(&mut asked) => {
                    asked = None;
                    last_look = Instant::now();
                    if ended {
                        let_go_by = Some(Instant::now() + LET_GO);
                    }
                    continue;
                }
                () = tokio::time::sleep_until(look_at), if asked.is_none() => {
                    if let_go_by.is_some() {
                        let why = "the program has ended, but envd does not say how";
                        return Err(error::unreadable("the end of the program", why));
                    }
                    quiet_look = (quiet_look * 2).min(MAX_LOOK);
                    busy_look = (busy_look * 2).min(MAX_LOOK);
                    // The stream is read on meanwhile.
                    asked = Some(Box::pin(self.release_if_ended()));
                    continue;
                }
            };
            last_event = Instant::now();
            match event {
                Some(Event::Data(data)) => {
                    quiet_look = FIRST_LOOK;
                    let mut pipes = lock(&self.pipes);
                    match data.output {
                        Some(Output::Stdout(bytes)) => pipes.stdout.push(bytes),
                        Some(Output::Stderr(bytes)) => pipes.stderr.push(bytes),
                        Some(Output::Pty(_)) | None => {}
                    }
                }
                // Both pipes are at their end, and the last frame tells nothing more.
                Some(Event::End(end)) => return exit_status(&end),
                Some(Event::Start(_) | Event::Keepalive(_)) => {}
                None => return Err(error::unreadable("the stream", "it is complete, but has no end")),
            }
        }
    }

    /// The next event, once there is room for it. Cancel safe.
    async fn next(&self, events: &mut Events) -> Result<Option<Event>> {
        self.room().await;
        events.next().await
    }

    /// Whether the program has ended. Then envd is told not to wait for whoever else holds its pipes, and what is still
    /// in them is read whether somebody wants it or not: it is bounded, and the status comes behind it.
    async fn release_if_ended(&self) -> bool {
        if !self.watch.is_zombie(self.pid).await {
            return false;
        }
        lock(&self.pipes).drain();
        // Harmless to a zombie.
        if let Err(error) = let_go(&self.envd, self.pid, SignalKind::Sigterm).await {
            tracing::debug!(%error, "e2b: envd does not let go of an ended program");
        }
        true
    }

    /// Waits until there is room for more output.
    async fn room(&self) {
        std::future::poll_fn(|cx| {
            let mut pipes = lock(&self.pipes);
            if pipes.may_fill() {
                return Poll::Ready(());
            }
            pipes.pump = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// The answer to a question, if one is asked; never, if none is.
async fn answer<F: Future>(asked: &mut Option<Pin<Box<F>>>) -> F::Output {
    match asked {
        Some(question) => question.await,
        None => std::future::pending().await,
    }
}

/// Standard input: a pipe to a task that sends it on, one piece at a time, as calls have no order among themselves.
fn feed(envd: Arc<Envd>, pid: u32, mut ended: watch::Receiver<Ended>) -> ProcessStdin {
    let (ours, theirs) = tokio::io::duplex(INPUT_CHUNK);
    tokio::spawn(async move {
        let send = async {
            let mut ours = ours;
            loop {
                let mut piece = bytes::BytesMut::with_capacity(0);
                // An idle process holds no buffer: it is made when there is something to put in.
                std::future::poll_fn(|cx| poll_readable(&mut ours, &mut piece, cx)).await?;
                if piece.is_empty() {
                    break;
                }
                let request = wire::send_input(pid, piece.freeze());
                // No time limit: a program that does not read holds the call.
                let sent: Result<Empty> = envd
                    .unary("write stdin", Idempotency::OnlyIfUnsent, &request, None)
                    .await;
                sent.map_err(io::Error::other)?;
            }
            let closed: Result<Empty> = envd
                .unary(
                    "close stdin",
                    Idempotency::Safe,
                    &wire::close_stdin(pid),
                    Some(call_timeout()),
                )
                .await;
            closed.map_err(io::Error::other)?;
            Ok::<(), io::Error>(())
        };
        tokio::select! {
            sent = send => if let Err(error) = sent {
                // The reading end goes with this task, so the writer's pipe breaks. The end of the program says the rest.
                tracing::debug!(%error, pid, "e2b: standard input ends");
            },
            _ = ended.wait_for(Option::is_some) => {}
        }
    });
    ProcessStdin::new(theirs)
}

/// Reads what is there into a buffer that is made for it.
fn poll_readable(
    reader: &mut (impl AsyncRead + Unpin),
    piece: &mut bytes::BytesMut,
    cx: &mut Context<'_>,
) -> Poll<io::Result<()>> {
    let mut scratch = [std::mem::MaybeUninit::uninit(); 8 << 10];
    loop {
        let mut buf = ReadBuf::uninit(&mut scratch);
        match Pin::new(&mut *reader).poll_read(cx, &mut buf) {
            Poll::Ready(Ok(())) => {
                if buf.filled().is_empty() {
                    return Poll::Ready(Ok(()));
                }
                piece.extend_from_slice(buf.filled());
                if piece.len() + scratch.len() > INPUT_CHUNK {
                    return Poll::Ready(Ok(()));
                }
            }
            Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            Poll::Pending if piece.is_empty() => return Poll::Pending,
            Poll::Pending => return Poll::Ready(Ok(())),
        }
    }
}

/// Reads a process to its end into memory, at most `limit` bytes of its standard output; with the first of its standard
/// error for a message.
pub(crate) async fn read_out(mut process: Process, limit: u64) -> Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    let mut out = Vec::new();
    let mut err = Vec::new();
    if let (Some(stdout), Some(stderr)) = (process.stdout.take(), process.stderr.take()) {
        let mut stdout = stdout.take(limit);
        let mut stderr = stderr.take(4096);
        let (read, _) = tokio::join!(stdout.read_to_end(&mut out), stderr.read_to_end(&mut err));
        read.map_err(|error| runtime_core::stream_error("reading", error))?;
    }
    let status = process.wait().await?;
    Ok((status, out, err))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(code: i32, exited: bool, status: &str) -> EndEvent {
        EndEvent {
            exit_code: code,
            exited,
            status: status.to_owned(),
            error: None,
        }
    }

    #[test]
    fn an_end_is_a_code_or_a_signal_and_never_made_up() {
        assert_eq!(
            exit_status(&end(0, true, "exit status 0")).expect("ended"),
            ExitStatus::exited(0)
        );
        assert_eq!(
            exit_status(&end(137, true, "exit status 137")).expect("ended"),
            ExitStatus::exited(137)
        );
        assert_eq!(
            exit_status(&end(-1, false, "signal: killed")).expect("ended"),
            ExitStatus::signaled(9)
        );
        let dumped = end(-1, false, "signal: segmentation fault (core dumped)");
        assert_eq!(exit_status(&dumped).expect("ended"), ExitStatus::signaled(11));
        assert_eq!(
            exit_status(&end(-1, false, "signal: signal 34")).expect("ended"),
            ExitStatus::signaled(34)
        );
        assert_eq!(
            exit_status(&end(0, false, "")).expect_err("says nothing").kind(),
            ErrorKind::Protocol
        );
        assert_eq!(
            exit_status(&end(-1, false, "signal: odd")).expect_err("unknown").kind(),
            ErrorKind::Protocol
        );
    }

    #[tokio::test]
    async fn a_full_pipe_holds_unless_the_other_reader_waits() {
        let pipes = Arc::new(Mutex::new(Pipes::default()));
        let mut stdout = Reader {
            pipes: pipes.clone(),
            which: Which::Stdout,
        };
        let stderr = Reader {
            pipes: pipes.clone(),
            which: Which::Stderr,
        };
        lock(&pipes).stderr.push(Bytes::from(vec![0; HOLD]));
        assert!(!lock(&pipes).may_fill());
        let mut byte = [0];
        let waits = std::future::poll_fn(|cx| {
            let mut buf = ReadBuf::new(&mut byte);
            Poll::Ready(Pin::new(&mut stdout).poll_read(cx, &mut buf).is_pending())
        });
        assert!(waits.await);
        assert!(lock(&pipes).may_fill(), "the reader of the other pipe waits");
        lock(&pipes).stderr.push(Bytes::from(vec![0; HOLD_STARVING]));
        assert!(!lock(&pipes).may_fill(), "memory is bounded all the same");
        drop(stderr);
        assert!(lock(&pipes).may_fill(), "nobody reads it any more");
    }

    #[tokio::test]
    async fn a_failure_is_told_once_on_each_pipe() {
        let pipes = Arc::new(Mutex::new(Pipes::default()));
        let mut stdout = Reader {
            pipes: pipes.clone(),
            which: Which::Stdout,
        };
        lock(&pipes).stdout.push(Bytes::from_static(b"ab"));
        lock(&pipes)
            .stdout
            .close(Some(Error::new(ErrorKind::SandboxGone, "gone")));
        let mut read = Vec::new();
        let error = stdout.read_to_end(&mut read).await.expect_err("told");
        assert_eq!(runtime_core::stream_error("x", error).kind(), ErrorKind::SandboxGone);
        assert_eq!(read, b"ab");
        assert_eq!(stdout.read_to_end(&mut read).await.expect("at its end"), 0);
    }
}
