//! Live processes: one stream of envd, split into two pipes with bounded memory.

mod exit;
mod pipes;
mod stdin;

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use runtime_core::{
    Collect, Error, ErrorKind, Exec, ExitStatus, Output, Process, ProcessControl, ProcessStderr, ProcessStdout, Result,
    Signal, collect,
};
use tokio::io::AsyncReadExt as _;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::envd::{Envd, Events};
use crate::error;
use crate::launch::{self, Beginning, Launch, Mode, Refusal};
use crate::watch::Watch;
use crate::wire::process::{self as wire, Empty, Event, SignalKind};
pub(crate) use exit::exit_status;
#[cfg(feature = "emulator")]
pub(crate) use exit::signal_name;
use pipes::{Pipes, Reader, Which, lock};

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
                Some(wire::Output::Stdout(bytes)) => beginning.stdout(&bytes),
                Some(wire::Output::Stderr(bytes)) => beginning.stderr(&bytes),
                Some(wire::Output::Pty(_)) | None => {}
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

/// Starts a live process.
pub(crate) async fn spawn(envd: Arc<Envd>, watch: Arc<Watch>, exec: Exec, login_shell: bool) -> Result<Process> {
    let launch = Launch::new(&exec, Mode::Live, login_shell)?;
    start(envd, watch, exec, launch).await
}

/// Runs a command to its end. Whether it could be started is asked only when its code says that perhaps it was not.
pub(crate) async fn run(
    envd: Arc<Envd>,
    watch: Arc<Watch>,
    exec: Exec,
    options: Collect,
    login_shell: bool,
) -> Result<Output> {
    // What is streamed cannot be taken back, so it must be known to be the program's own.
    if login_shell || options.sink.is_some() || envd.lacks_setsid() {
        return collect(spawn(envd, watch, exec, login_shell).await?, options).await;
    }
    let launch = Launch::new(&exec, Mode::Direct, login_shell)?;
    let (argv, again) = (
        exec.clone(),
        Collect {
            stdin: options.stdin.clone(),
            timeout: options.timeout,
            output_limit: options.output_limit,
            sink: None,
        },
    );
    let process = start(envd.clone(), watch.clone(), exec, launch).await?;
    let output = collect(process, options).await?;
    if !matches!(output.status.code(), Some(126 | 127)) {
        return Ok(output);
    }
    let question = launch::asking(&argv);
    let launch = Launch::new(&question, Mode::Live, false)?;
    let (_, said, _) = read_out(start(envd.clone(), watch.clone(), question, launch).await?, 16).await?;
    match launch::answered(&said) {
        Some(Refusal::None) => Ok(output),
        Some(Refusal::Program(verdict)) => match launch::refused(verdict, &argv) {
            Some(refused) => Err(refused),
            None => Ok(output),
        },
        Some(Refusal::NoSetsid) => {
            envd.set_lacks_setsid();
            collect(spawn(envd, watch, argv, false).await?, again).await
        }
        None => Err(error::unreadable(
            "why the program ended",
            format_args!("the question is answered with {:?}", String::from_utf8_lossy(&said)),
        )),
    }
}

/// Starts a process, driven to its end by a task of its own: when nobody waits for it any more, it is killed.
async fn start(envd: Arc<Envd>, watch: Arc<Watch>, exec: Exec, launch: Launch) -> Result<Process> {
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
    let stdin = has_stdin.then(|| stdin::feed(envd.clone(), begun.pid, ended.clone()));
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
                        Some(wire::Output::Stdout(bytes)) => pipes.stdout.push(bytes),
                        Some(wire::Output::Stderr(bytes)) => pipes.stderr.push(bytes),
                        Some(wire::Output::Pty(_)) | None => {}
                    }
                }
                // Both pipes are at their end, and the last frame tells nothing more.
                Some(Event::End(end)) => {
                    events.finish();
                    return exit_status(&end);
                }
                Some(Event::Start(_) | Event::Keepalive(_)) => {}
                None => return Err(error::unreadable("the stream", "it is complete, but has no end")),
            }
        }
    }

    /// The next event, once there is room for it. Cancel safe.
    async fn next(&self, events: &mut Events) -> Result<Option<Event>> {
        if !lock(&self.pipes).may_fill() {
            // It is not the other side that is silent.
            events.rest();
            self.room().await;
        }
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
