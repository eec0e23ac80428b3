//! A program through the Engine API's exec: its streams, its end, its signals.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bollard::container::LogOutput;
use bollard::exec::{StartExecOptions, StartExecResults};
use futures_util::{Stream, StreamExt};
use runtime_core::{
    Error, ErrorKind, Exec, ExitStatus, Process, ProcessControl, ProcessStderr, ProcessStdin, ProcessStdout, Result,
    Signal, StdinMode,
};
use tokio::io::{AsyncWrite, DuplexStream};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use super::host::{self, HostProcess, Leftovers};
use super::paced;
use super::request::{self, MARKER};
use super::start_failure;
use super::streams::{EofOnDrop, Sinks};
use crate::config::EngineKind;
use crate::engine::Engine;

/// Bytes of each stream that are kept while the other one is read. Both come over one connection, so an unread stream
/// holds the other back once it has this much.
const BUFFER: usize = 2 << 20;

/// Bytes of standard input that are kept for a program that does not read it yet.
const INPUT: usize = 64 << 10;

/// Bytes that the connection is read with.
const CHUNK: usize = 256 << 10;

/// A program that ends sooner costs no question about its process id.
const LAZY: Duration = Duration::from_millis(250);

/// How long the engine may take to have started a program.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Most bytes that are held back to see whether they are the engine's own words.
const MOST_HELD: usize = 64 << 10;

/// How long a status that looks like a refusal of the kernel may wait for its reason.
const REFUSAL_GRACE: Duration = Duration::from_millis(100);

/// Podman's code for a program of which it does not know whether it was started.
const UNKNOWN: i64 = 125;

/// How long a program of which the engine knows nothing is looked for.
const MARKED_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a status that looks like the box's death may wait for the news of it.
const DEATH_GRACE: Duration = Duration::from_millis(100);

type Output = Pin<Box<dyn Stream<Item = std::result::Result<LogOutput, bollard::errors::Error>> + Send>>;
type Input = Pin<Box<dyn AsyncWrite + Send>>;

/// What runs programs in one container.
pub(crate) struct Commands {
    pub(crate) engine: Engine,
    /// The container's whole id.
    pub(crate) container: String,
    /// Process 1 of the container, where it is a process of this host.
    pub(crate) init: Option<HostProcess>,
}

impl Commands {
    /// Whether processes of the container are processes of this host.
    pub(crate) fn is_local(&self) -> bool {
        self.init.is_some()
    }

    /// Starts a program and waits until it runs.
    ///
    /// # Cancellation
    /// What was started is killed.
    pub(crate) async fn spawn(self: &Arc<Self>, exec: Exec) -> Result<Process> {
        let (process, inner, _) = self.start(exec, true).await?;
        inner.started().await?;
        Ok(process)
    }

    /// Starts a program that will be collected: why it did not start, if it did not, is told by its `wait`.
    pub(crate) async fn spawn_collected(self: &Arc<Self>, exec: Exec) -> Result<Process> {
        Ok(self.start(exec, false).await?.0)
    }

    async fn start(self: &Arc<Self>, exec: Exec, find: bool) -> Result<(Process, Arc<Inner>, Arc<AtomicBool>)> {
        let marker = runtime_core::names::random_hex(16);
        let config = request::request(&exec, &marker)?;
        let piped = exec.stdin == StdinMode::Piped;
        let program = exec.argv.first().map(|program| program.to_string_lossy().into_owned());
        let created = self.engine.client.create_exec(&self.container, config).await;
        let created = created.map_err(|error| self.gone_if_missing("preparing a program", error))?;
        let inner = Arc::new(Inner {
            commands: self.clone(),
            exec: created.id,
            is_paced: piped && self.engine.kind == EngineKind::Podman,
            marker,
            program: program.unwrap_or_default(),
            state: Mutex::new(State::default()),
            phase: watch::Sender::new(Phase::Starting),
            eof: watch::Sender::new(false),
            killed: watch::Sender::new(false),
            wake: Notify::new(),
            task: OnceLock::new(),
        });
        // From here on a dropped future kills what may have been started.
        let armed = Arc::new(AtomicBool::new(true));
        let control = EngineProcess {
            inner: inner.clone(),
            armed: armed.clone(),
        };
        let (stdout, out) = tokio::io::duplex(BUFFER);
        let (stderr, err) = tokio::io::duplex(BUFFER);
        let (ready, attached) = oneshot::channel();
        let task = tokio::spawn({
            let inner = inner.clone();
            async move {
                let (output, input) = match inner.attach().await {
                    Ok(streams) => streams,
                    Err(error) => {
                        let _ = ready.send(Err(error));
                        return;
                    }
                };
                let input = EofOnDrop(Some(input));
                let (stdin, paced) = if inner.is_paced {
                    let (stdin, paced) = tokio::io::duplex(INPUT);
                    (Some(ProcessStdin::new(stdin)), Some((paced, input)))
                } else {
                    (piped.then(|| ProcessStdin::new(input)), None)
                };
                let _ = ready.send(Ok(stdin));
                let feed = async {
                    if let Some((from, to)) = paced {
                        inner.feed(from, to).await;
                    }
                };
                tokio::join!(
                    inner.forward(output, out, err),
                    inner.watch(find || inner.is_paced),
                    feed
                );
            }
        });
        // Not set before: this is the one place that sets it.
        let _ = inner.task.set(task.abort_handle());
        let stdin = attached.await.map_err(|_| lost())??;
        let process = Process::new(
            stdin,
            Some(ProcessStdout::new(stdout)),
            Some(ProcessStderr::new(stderr)),
            Arc::new(control),
        );
        Ok((process, inner, armed))
    }

    /// An error about a container or exec that does not exist means that the box is gone.
    fn gone_if_missing(&self, what: &str, error: bollard::errors::Error) -> Error {
        let error = self.engine.error(what, error);
        match error.kind() {
            ErrorKind::NotFound => Error::new(
                ErrorKind::SandboxGone,
                format!("the container is gone: {}", error.message()),
            ),
            _ => error,
        }
    }

    /// A status of a program that was killed may be the death of the box.
    async fn check_box(&self) -> Result<()> {
        if let Some(init) = &self.init {
            let _ = tokio::time::timeout(DEATH_GRACE, init.ended()).await;
            if init.is_alive() {
                return Ok(());
            }
        } else if self.engine.is_running(&self.container).await? {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::SandboxGone,
            "the container died while the program ran",
        ))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone)]
enum Phase {
    Starting,
    Running,
    Ended(Result<ExitStatus>),
}

#[derive(Default)]
struct State {
    /// Id of the leader on the engine's host, once it is known.
    leader: Option<i64>,
    /// And as a process of this host.
    process: Option<Arc<HostProcess>>,
    inner_pid: Option<u32>,
    /// Output that may be the engine's reason why nothing was started.
    suspicion: Option<Error>,
    /// All output so far, where it may be the kernel's reason for refusing the program.
    refusal: Option<Error>,
    /// A kill was begun that has not ended.
    is_dying: bool,
    /// Nobody can ask for the program any more.
    is_forgotten: bool,
    /// The engine broke the streams off, perhaps before all output had come.
    is_broken_off: bool,
}

/// What the engine says of an exec.
enum Seen {
    Starting,
    Running(i64),
    Ended { code: i64, leader: i64 },
}

struct Inner {
    commands: Arc<Commands>,
    exec: String,
    /// Podman loses output over unread input.
    is_paced: bool,
    marker: String,
    /// The first of its arguments.
    program: String,
    state: Mutex<State>,
    phase: watch::Sender<Phase>,
    eof: watch::Sender<bool>,
    /// SIGKILL was sent.
    killed: watch::Sender<bool>,
    /// Wakes the watch from its laziness.
    wake: Notify,
    /// Holds the connection to the program.
    task: OnceLock<AbortHandle>,
}

impl Inner {
    /// Starts the program, connected to its streams.
    async fn attach(&self) -> Result<(Output, Input)> {
        let options = StartExecOptions {
            detach: false,
            tty: false,
            output_capacity: Some(CHUNK),
        };
        let started = self.commands.engine.client.start_exec(&self.exec, Some(options)).await;
        match started.map_err(|error| self.commands.gone_if_missing("starting a program", error))? {
            StartExecResults::Attached { output, input } => Ok((output, input)),
            StartExecResults::Detached => Err(Error::new(
                ErrorKind::Protocol,
                "the engine did not attach to the program",
            )),
        }
    }

    /// Resolves when the program runs or has run.
    async fn started(&self) -> Result<()> {
        let mut phase = self.phase.subscribe();
        let waited =
            tokio::time::timeout(START_TIMEOUT, phase.wait_for(|phase| !matches!(phase, Phase::Starting))).await;
        match waited {
            Ok(Ok(phase)) => match &*phase {
                Phase::Ended(Err(error)) => Err(error.clone()),
                _ => Ok(()),
            },
            Ok(Err(_)) => Err(lost()),
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                format!("the engine did not start the program within {START_TIMEOUT:?}"),
            )),
        }
    }

    /// Takes the two streams apart. Output that looks like the engine's own words is held back until it is known.
    async fn forward(&self, mut output: Output, out: DuplexStream, err: DuplexStream) {
        let mut sinks = Sinks {
            out: Some(out),
            err: Some(err),
            killed: (self.commands.engine.kind == EngineKind::Podman).then(|| self.killed.subscribe()),
        };
        let mut held: Vec<LogOutput> = Vec::new();
        let mut held_bytes = 0;
        let mut is_first = true;
        loop {
            let next = if held.is_empty() {
                output.next().await
            } else {
                // Held back until the program is known to run, or its output ends.
                let mut phase = self.phase.subscribe();
                let runs = async { phase.wait_for(|phase| matches!(phase, Phase::Running)).await.is_ok() };
                let next = tokio::select! {
                    next = output.next() => Some(next),
                    _ = runs => None,
                };
                match next {
                    Some(next) => next,
                    None => {
                        for chunk in held.drain(..) {
                            sinks.write(chunk).await;
                        }
                        continue;
                    }
                }
            };
            match next {
                Some(Ok(LogOutput::StdErr { message })) if self.is_paced && start_failure::is_broken_off(&message) => {
                    lock(&self.state).is_broken_off = true;
                }
                Some(Ok(chunk)) => {
                    lock(&self.state).refusal = match &chunk {
                        LogOutput::StdErr { message } if is_first => {
                            start_failure::recognize_refusal(message, &self.program)
                        }
                        _ => None,
                    };
                    if std::mem::take(&mut is_first)
                        && let Some(reason) = start_failure::recognize(chunk.as_ref())
                    {
                        lock(&self.state).suspicion = Some(reason);
                        self.wake.notify_one();
                        held_bytes = chunk.as_ref().len();
                        held.push(chunk);
                    } else if !held.is_empty() && held_bytes < MOST_HELD {
                        held_bytes += chunk.as_ref().len();
                        held.push(chunk);
                    } else {
                        for chunk in held.drain(..) {
                            sinks.write(chunk).await;
                        }
                        sinks.write(chunk).await;
                    }
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "the stream of a program broke");
                    break;
                }
                None => break,
            }
        }
        self.eof.send_replace(true);
        if !held.is_empty() {
            let mut phase = self.phase.subscribe();
            let _ = phase
                .wait_for(|phase| matches!(phase, Phase::Ended(_)))
                .await
                .map(|_| ());
            let is_failure = matches!(self.end(), Some(Err(_)));
            if !is_failure {
                for chunk in held {
                    sinks.write(chunk).await;
                }
            }
        }
    }

    /// Hands standard input on as fast as the program reads it, until it ends.
    async fn feed(&self, from: DuplexStream, to: impl AsyncWrite + Unpin) {
        let mut phase = self.phase.subscribe();
        let mut ended = self.phase.subscribe();
        let feed = async {
            let started = phase.wait_for(|phase| !matches!(phase, Phase::Starting)).await;
            drop(started);
            let process = lock(&self.state).process.clone();
            paced::forward(from, to, process).await;
        };
        tokio::select! {
            // One that has ended is given nothing more.
            biased;
            _ = ended.wait_for(|phase| matches!(phase, Phase::Ended(_))) => {}
            () = feed => {}
        }
    }

    /// Learns the leader's process id, and how the program ended.
    async fn watch(&self, find: bool) {
        let mut eof = self.eof.subscribe();
        if !find {
            tokio::select! {
                _ = eof.wait_for(|eof| *eof) => {}
                () = self.wake.notified() => {}
                () = sleep(LAZY) => {}
            }
        }
        let mut delay = Duration::from_millis(2);
        let mut failures = 0;
        let end = loop {
            match self.look().await {
                Ok(Seen::Ended { code, leader }) => break self.judge(code, leader).await,
                Ok(Seen::Starting) => {}
                Ok(Seen::Running(leader)) => {
                    failures = 0;
                    if let Some(process) = self.learn(leader) {
                        // Awaited rather than asked for. A process of the host that cannot be watched is asked about.
                        if process.is_alive() && process.ended().await.is_ok() {
                            delay = Duration::from_millis(2);
                            continue;
                        }
                    } else if !*eof.borrow() {
                        // The engine is elsewhere: it is asked now and then, and when the streams end.
                        tokio::select! {
                            _ = eof.wait_for(|eof| *eof) => delay = Duration::from_millis(2),
                            () = sleep(Duration::from_millis(250)) => {}
                        }
                        continue;
                    }
                }
                Err(error) if error.is_retryable() && failures < 5 => failures += 1,
                Err(error) => break Err(error),
            }
            sleep(delay).await;
            delay = (delay * 3 / 2).min(Duration::from_millis(100));
        };
        self.phase.send_replace(Phase::Ended(end));
    }

    /// Asks the engine once.
    async fn look(&self) -> Result<Seen> {
        let inspect = self.commands.engine.client.inspect_exec(&self.exec).await;
        let inspect = inspect.map_err(|error| self.commands.gone_if_missing("asking about a program", error))?;
        let leader = inspect.pid.unwrap_or(0);
        match (inspect.running, inspect.exit_code) {
            (Some(true), _) if leader > 0 => Ok(Seen::Running(leader)),
            (Some(true), _) => Ok(Seen::Starting),
            // Podman has a code of 0 from the first, and tells what ended from what did not start by this.
            _ if self.commands.engine.kind == EngineKind::Podman && inspect.can_remove == Some(false) => {
                Ok(Seen::Starting)
            }
            (_, Some(code)) => Ok(Seen::Ended { code, leader }),
            _ => Ok(Seen::Starting),
        }
    }

    /// Remembers the leader. `None` where it is no process of this host.
    fn learn(&self, leader: i64) -> Option<Arc<HostProcess>> {
        let mut state = lock(&self.state);
        if state.leader.is_none() {
            state.leader = Some(leader);
            if self.commands.is_local()
                && let Some(process) = HostProcess::open(leader, &self.commands.container)
            {
                state.inner_pid = process.inner_pid();
                state.process = Some(Arc::new(process));
            }
        }
        let process = state.process.clone();
        drop(state);
        self.phase.send_if_modified(|phase| {
            let starts = matches!(phase, Phase::Starting);
            if starts {
                *phase = Phase::Running;
            }
            starts
        });
        process
    }

    /// What the end of the program means.
    async fn judge(&self, code: i64, leader: i64) -> Result<ExitStatus> {
        let code = i32::try_from(code)
            .map_err(|_| Error::new(ErrorKind::Protocol, format!("the engine gives {code} as an exit code")))?;
        let known = {
            let mut state = lock(&self.state);
            if state.leader.is_none() && leader > 0 {
                state.leader = Some(leader);
            }
            state.leader.is_some()
        };
        match code {
            // It had no process: the reason comes as output.
            125..=127 if !known => {
                let mut eof = self.eof.subscribe();
                let _ = tokio::time::timeout(Duration::from_secs(2), eof.wait_for(|eof| *eof)).await;
                if let Some(reason) = lock(&self.state).suspicion.take() {
                    return Err(reason);
                }
            }
            // The process was there, but never became the program.
            1 | 255 => {
                let mut eof = self.eof.subscribe();
                // What it said has arrived as a rule; a program that left its pipe to others is not waited for.
                let _ = tokio::time::timeout(REFUSAL_GRACE, eof.wait_for(|eof| *eof)).await;
                if let Some(reason) = lock(&self.state).refusal.take() {
                    return Err(reason);
                }
                if code == 255 {
                    self.commands.check_box().await?;
                }
            }
            // As after SIGKILL.
            137 => self.commands.check_box().await?,
            _ => {}
        }
        if self.is_paced {
            let mut eof = self.eof.subscribe();
            let _ = tokio::time::timeout(Duration::from_secs(2), eof.wait_for(|eof| *eof)).await;
            if lock(&self.state).is_broken_off {
                return Err(Error::new(
                    ErrorKind::ConnectionLost,
                    format!(
                        "Podman broke the streams off when the program ended with code {code} and unread input: output may \
                         be lost"
                    ),
                ));
            }
        }
        Ok(ExitStatus::exited(code))
    }

    fn end(&self) -> Option<Result<ExitStatus>> {
        match &*self.phase.borrow() {
            Phase::Ended(end) => Some(end.clone()),
            _ => None,
        }
    }

    /// Finds the leader with questions of its own: the task that watches may be gone with its executor.
    async fn find(&self) -> Result<()> {
        let until = Instant::now() + START_TIMEOUT;
        let mut delay = Duration::from_millis(5);
        while lock(&self.state).leader.is_none() && self.end().is_none() {
            match self.look().await? {
                Seen::Running(leader) => drop(self.learn(leader)),
                Seen::Ended { leader, .. } if leader > 0 => {
                    lock(&self.state).leader = Some(leader);
                    return Ok(());
                }
                Seen::Ended { code: UNKNOWN, .. } if self.commands.engine.kind == EngineKind::Podman => {
                    return self.find_marked().await;
                }
                Seen::Ended { .. } => return Ok(()),
                Seen::Starting if Instant::now() > until => {
                    return Err(Error::new(ErrorKind::Timeout, "the program has no process id yet"));
                }
                Seen::Starting => {
                    sleep(delay).await;
                    delay = (delay * 3 / 2).min(Duration::from_millis(100));
                }
            }
        }
        Ok(())
    }

    /// Finds the leader by its mark. Podman takes a program whose connection broke before it ran for ended, and starts it
    /// all the same.
    async fn find_marked(&self) -> Result<()> {
        if !self.commands.is_local() {
            return Ok(());
        }
        let until = Instant::now() + MARKED_TIMEOUT;
        let mut delay = Duration::from_millis(20);
        loop {
            let (container, marker) = (self.commands.container.clone(), self.marker.clone());
            let found = tokio::task::spawn_blocking(move || host::marked_leader(&container, &marker)).await;
            if let Ok(Some(process)) = found {
                let mut state = lock(&self.state);
                state.leader = Some(process.id());
                state.inner_pid = process.inner_pid();
                state.process = Some(Arc::new(process));
                return Ok(());
            }
            if Instant::now() > until || self.commands.init.as_ref().is_some_and(|init| !init.is_alive()) {
                return Ok(());
            }
            sleep(delay).await;
            delay = (delay * 3 / 2).min(Duration::from_secs(1));
        }
    }

    /// Signals the group of the program.
    async fn signal_group(&self, signal: Signal) -> Result<()> {
        self.find().await?;
        if signal == Signal::KILL {
            self.killed.send_replace(true);
        }
        let process = lock(&self.state).process.clone();
        if let Some(process) = process {
            match process.signal_group(signal.number()) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => return Ok(()),
                // A user who may use the engine, but not signal its processes.
                Err(rustix::io::Errno::PERM) => {}
                Err(error) => return Err(Error::io("signalling the process group", error.into())),
            }
        }
        self.signal_in_box(signal).await
    }

    /// Signals the group by a program in the box, which finds it by its mark.
    async fn signal_in_box(&self, signal: Signal) -> Result<()> {
        // The leader leads its session too. Without one it has ended, and what is left has a session without a leader.
        const SCRIPT: &str = r#"
            for dir in /proc/[0-9]*; do
                tr '\0' '\n' <"$dir/environ" 2>/dev/null | grep -qxF -- "$2" || continue
                read -r stat <"$dir/stat" 2>/dev/null || continue
                pid=${dir#/proc/}
                set -- "$1" "$2" ${stat##*) }
                [ "$6" = "$pid" ] || continue
                [ "$4" = 0 ] && leader=$pid
            done
            [ -n "$leader" ] && { kill -"$1" -"$leader" 2>/dev/null || kill -"$1" "$leader"; }
        "#;
        let mark = format!("{MARKER}={}", self.marker);
        let number = signal.number().to_string();
        let argv = ["sh", "-c", SCRIPT, "sh", &number, &mark].map(Into::into).to_vec();
        let exec = Exec {
            argv,
            env: runtime_core::Env::new(),
            workdir: "/".into(),
            stdin: StdinMode::Null,
        };
        let status = Box::pin(self.commands.quiet(exec)).await?;
        if status.success() || self.end().is_some() || !matches!(self.look().await, Ok(Seen::Running(_))) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Other,
            "the box has no means to signal the program",
        ))
    }

    /// Kills what is left of the group after its leader's end.
    async fn kill_leftovers(self: &Arc<Self>) {
        if !self.commands.is_local() {
            return;
        }
        let inner = self.clone();
        let killed = tokio::task::spawn_blocking(move || {
            let leader = lock(&inner.state).leader;
            let leftovers = match leader {
                Some(leader) => Leftovers::Group(leader),
                None => Leftovers::Marked(&inner.marker),
            };
            host::kill_leftovers(&inner.commands.container, leftovers);
        });
        let _ = killed.await;
    }

    /// Kills the program and what is left of its group, on whatever executor.
    async fn kill(self: Arc<Self>) {
        if self.end().is_none()
            && let Err(error) = self.signal_group(Signal::KILL).await
        {
            tracing::debug!(%error, "a program may run on in the box");
        }
        self.kill_leftovers().await;
        let mut state = lock(&self.state);
        state.is_dying = false;
        self.hang_up_if_unwanted(&state);
    }

    /// Ends the connection to a program that nobody can ask for, but not while it is being killed: Podman would lose sight
    /// of one that is still to start.
    fn hang_up_if_unwanted(&self, state: &State) {
        if state.is_forgotten
            && !state.is_dying
            && let Some(task) = self.task.get()
        {
            task.abort();
        }
    }
}

impl Commands {
    /// Starts a program that the call of the closure leaves to the engine: it is then not killed with its handle.
    pub(super) async fn spawn_owned_by_engine(
        self: &Arc<Self>,
        exec: Exec,
    ) -> Result<(Process, impl FnOnce() + use<>)> {
        let (process, _, armed) = self.start(exec, false).await?;
        Ok((process, move || armed.store(false, Ordering::SeqCst)))
    }

    /// Runs a program of ours without anybody watching its output.
    async fn quiet(self: &Arc<Self>, exec: Exec) -> Result<ExitStatus> {
        let mut process = self.spawn_collected(exec).await?;
        process.wait().await
    }
}

fn lost() -> Error {
    Error::new(
        ErrorKind::ConnectionLost,
        "nobody watches the program any more: its executor went away",
    )
}

struct EngineProcess {
    inner: Arc<Inner>,
    /// Whether a kill is still owed.
    armed: Arc<AtomicBool>,
}

#[async_trait]
impl ProcessControl for EngineProcess {
    fn pid(&self) -> Option<u32> {
        lock(&self.inner.state).inner_pid
    }

    async fn wait(&self) -> Result<ExitStatus> {
        let mut phase = self.inner.phase.subscribe();
        let ended = phase.wait_for(|phase| matches!(phase, Phase::Ended(_))).await;
        match ended.as_deref() {
            Ok(Phase::Ended(end)) => end.clone(),
            _ => Err(lost()),
        }
    }

    fn try_wait(&self) -> Result<Option<ExitStatus>> {
        self.inner.end().transpose()
    }

    async fn signal(&self, signal: Signal) -> Result<()> {
        if self.inner.end().is_some() {
            return Ok(());
        }
        self.inner.signal_group(signal).await
    }

    fn start_kill(&self) {
        if self.armed.swap(false, Ordering::SeqCst) {
            lock(&self.inner.state).is_dying = true;
            runtime_core::detach(self.inner.clone().kill());
        }
    }

    async fn finish(&self) {
        self.armed.store(false, Ordering::SeqCst);
        self.inner.kill_leftovers().await;
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        self.start_kill();
        let mut state = lock(&self.inner.state);
        state.is_forgotten = true;
        self.inner.hang_up_if_unwanted(&state);
    }
}
