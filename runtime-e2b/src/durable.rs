//! Durable programs: they outlive every connection, are started once, and lose not a byte.
//!
//! The program's output goes to files in the box, its status to another, which is the truth. A stream only tells when
//! there is something to read; when it breaks, another takes its place, and the files are read on from the byte where it
//! broke. The directory of the files is made by the program's shell and by nobody else, so that whoever makes it first
//! decides whether the program is started: the shell, or a caller who lost sight of the start and wants to be sure.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use runtime_core::names::random_id;
use runtime_core::{
    Captured, Collect, Content, Error, ErrorKind, Exec, ExitStatus, Output, OutputChunk, OutputStream, PartialOutput,
    Result, Signal, StdinMode,
};
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;

use crate::envd::{Envd, Events, USER};
use crate::error;
use crate::files::{Download, Scratch, upload};
use crate::launch::{Launch, Mode};
use crate::process::{self, Begun, exit_status, kill_group};
use crate::watch::Watch;
use crate::wire::filesystem::{self, EntryResponse};
use crate::wire::process::{self as wire, Event, ProcessConfig, StartRequest};

/// How often a stream that broke is taken up again without getting anywhere.
const RECONNECTS: u32 = 5;

/// The wait before the first of them; it doubles.
const RECONNECT_DELAY: Duration = Duration::from_millis(250);

/// How often a quiet stream makes us look at the status by ourselves.
const LOOK: Duration = Duration::from_secs(60);

/// How often a program is started that certainly was not.
const STARTS: u32 = 3;

/// How long a killed program may take to be gone.
const KILL_GRACE: Duration = Duration::from_secs(10);

/// Shows what is appended to both files, each from a byte on. What `tail` or the shell has to say itself (that it cannot
/// watch any more files, say) must not come between the program's bytes.
const FOLLOW: &str = r#"if command -v setsid >/dev/null 2>&1 && [ -z "$F" ]; then F=1 exec setsid /bin/sh -c "$0" "$0" "$@"; fi
exec 3>&2 2>/dev/null
tail -c +"$1" -f "$3/stdout" 3>&- & tail -c +"$2" -f "$3/stderr" >&3 3>&- & wait"#;

/// Runs a program to its end.
pub(crate) async fn run(
    envd: Arc<Envd>,
    watch: Arc<Watch>,
    exec: Exec,
    options: Collect,
    login: bool,
) -> Result<Output> {
    let Collect {
        stdin,
        timeout,
        output_limit,
        sink,
    } = options;
    let mut exec = exec;
    exec.stdin = StdinMode::Null;
    let input = match stdin {
        Some(bytes) => {
            let scratch = Scratch::new(envd.clone(), format!("/tmp/.vf-stdin-{}", random_id()));
            upload(&envd, scratch.path(), Content::Bytes(bytes)).await?;
            Some(scratch)
        }
        None => None,
    };
    let started = tokio::time::Instant::now();
    let input_path = input.as_ref().map(|input| input.path().to_owned());
    let program = Program::start(envd.clone(), watch, exec, input_path, login).await?;
    let mut output = Gathered::new(output_limit, sink);
    let deadline = async {
        match timeout {
            Some(timeout) => tokio::time::sleep_until(started + timeout).await,
            None => std::future::pending().await,
        }
    };
    let ended = tokio::select! {
        biased;
        ended = program.watch_end(&mut output) => ended,
        () = deadline => Err(Error::new(
            ErrorKind::Timeout,
            format!("the program did not end within {:?} and was killed", timeout.unwrap_or_default()),
        )),
    };
    let ended = match ended {
        // What a dying box kills must not look like the end of a program.
        Ok(status) if status.signal() == Some(Signal::KILL.number()) => match envd.probe().await {
            Err(gone) if gone.kind() == ErrorKind::SandboxGone => Err(gone),
            _ => Ok(status),
        },
        ended => ended,
    };
    let result = match ended {
        Ok(status) => match program.read_rest(&mut output).await {
            Ok(()) => Ok(status),
            Err(error) => Err(error),
        },
        Err(error) if error.kind() == ErrorKind::Timeout => {
            program.kill().await;
            // What was printed by then is in the files.
            let _ = program.read_rest(&mut output).await;
            Err(error)
        }
        Err(error) => Err(envd.explain(error).await),
    };
    if result.is_ok() {
        program.clean_up().await;
        if let Some(input) = input {
            input.remove().await;
        }
    }
    // Only now: whoever listens takes the end of the channel for the end of the program.
    let (stdout, stderr) = output.finish();
    match result {
        Ok(status) => Ok(Output { status, stdout, stderr }),
        Err(error) => Err(error.with_partial_output(PartialOutput { stdout, stderr })),
    }
}

/// A program that was started. Dropping it kills the program and removes its files.
struct Program {
    envd: Arc<Envd>,
    watch: Arc<Watch>,
    pid: u32,
    dir: String,
    /// The stream that the start gave, until somebody waits on it.
    events: std::sync::Mutex<Option<Begun>>,
    /// Files are there to be removed.
    files: Option<Scratch>,
    running: std::sync::atomic::AtomicBool,
}

impl Program {
    /// Starts it, in a task of its own: a start that is given up half-way would leave it unknown.
    async fn start(envd: Arc<Envd>, watch: Arc<Watch>, exec: Exec, input: Option<String>, login: bool) -> Result<Self> {
        let started = tokio::spawn(async move {
            let mut attempt = 1;
            let (dir, pid, begun) = loop {
                let dir = format!("/tmp/vf-program-{}", random_id());
                let mode = Mode::Durable {
                    dir: &dir,
                    stdin: input.as_deref(),
                };
                let launch = Launch::new(&exec, mode, login)?;
                let lost = match process::begin(&envd, &exec, &launch).await {
                    Ok(begun) => break (dir, begun.pid, Some(begun)),
                    Err(error) if is_drop(&error) || error.kind() == ErrorKind::Timeout => error,
                    Err(error) => return Err(error),
                };
                match find(&envd, &dir).await {
                    Ok(Found::Running(pid)) => break (dir, pid, None),
                    // It never starts now, so another may. The directory stays: it is what keeps a late one from starting.
                    Ok(Found::Never) if attempt < STARTS => attempt += 1,
                    Ok(Found::Never) => {
                        let message = format!("the program was not started: {}", lost.message());
                        return Err(Error::new(ErrorKind::ConnectionLost, message).with_source(lost));
                    }
                    Err(error) => return Err(error.with_source(lost)),
                }
            };
            Ok(Self {
                files: Some(Scratch::new(envd.clone(), dir.clone())),
                envd,
                watch,
                pid,
                dir,
                events: std::sync::Mutex::new(begun),
                running: std::sync::atomic::AtomicBool::new(true),
            })
        });
        match started.await {
            Ok(program) => program,
            Err(error) => {
                Err(Error::new(ErrorKind::Cancelled, "the start of the program was cut short").with_source(error))
            }
        }
    }

    /// Waits for the end, gathering output meanwhile if somebody wants it.
    async fn watch_end(&self, output: &mut Gathered) -> Result<ExitStatus> {
        let ended = self.wait();
        let status = if output.is_streamed() {
            let mut ended = std::pin::pin!(ended);
            tokio::select! {
                biased;
                status = &mut ended => status,
                // Only an error ends it.
                error = self.follow(output) => {
                    tracing::debug!(%error, "e2b: the output of a program is read at its end instead");
                    ended.await
                }
            }
        } else {
            ended.await
        };
        if status.is_ok() {
            self.running.store(false, std::sync::atomic::Ordering::SeqCst);
        }
        status
    }

    /// Waits for the end: by the stream, or, where it breaks, by another; the status file is the truth.
    async fn wait(&self) -> Result<ExitStatus> {
        let begun = self
            .events
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        let (mut events, mut said) = match begun {
            Some(begun) => (Some(begun.events), begun.stderr),
            None => (None, Vec::new()),
        };
        let mut failures = 0;
        loop {
            let drop = match &mut events {
                Some(stream) => match self.read_stream(stream, &mut said).await {
                    Ok(Some(status)) => {
                        if let Some(events) = &mut events {
                            events.finish();
                        }
                        return Ok(status);
                    }
                    Ok(None) => error::cut_short(),
                    Err(error) => error,
                },
                None => error::cut_short(),
            };
            // The file first: a program that has ended needs no stream.
            if let Some(status) = self.status().await? {
                return Ok(status);
            }
            if !is_drop(&drop) && drop.kind() != ErrorKind::NotFound {
                return Err(drop);
            }
            loop {
                failures += 1;
                if failures > RECONNECTS {
                    return Err(Error::new(
                        ErrorKind::ConnectionLost,
                        format!("the connection to the program is lost: {}", drop.message()),
                    )
                    .with_source(drop));
                }
                tokio::time::sleep(RECONNECT_DELAY * (1 << (failures - 1).min(6))).await;
                match self.envd.connect(self.pid).await {
                    Ok(stream) => {
                        // A new stream is a fresh budget for the next drop, but only once it says something.
                        events = Some(stream);
                        break;
                    }
                    Err(error) if error.kind() == ErrorKind::SandboxGone => return Err(error),
                    Err(error) => {
                        if let Some(status) = self.status().await? {
                            return Ok(status);
                        }
                        tracing::debug!(%error, failures, "e2b: a durable program is not reached");
                    }
                }
            }
            if let Some(stream) = &mut events
                && let Ok(Some(Event::Start(_))) = stream.next().await
            {
                failures = 0;
            }
        }
    }

    /// Reads a stream of the program's shell to the status. `None` if the shell ended without one.
    async fn read_stream(&self, stream: &mut Events, said: &mut Vec<u8>) -> Result<Option<ExitStatus>> {
        let mut ended = None;
        loop {
            let event = match tokio::time::timeout(LOOK, stream.next()).await {
                Ok(event) => event?,
                Err(_) => match self.status().await? {
                    Some(status) => return Ok(Some(status)),
                    None => continue,
                },
            };
            match event {
                Some(Event::Data(data)) => {
                    if let Some(wire::Output::Stderr(bytes)) = data.output {
                        said.extend_from_slice(&bytes);
                    }
                }
                Some(Event::End(end)) => ended = Some(end),
                Some(Event::Start(_) | Event::Keepalive(_)) => {}
                None => break,
            }
            // The shell says the status once, in a line of its own.
            if let Some(status) = parse_status(said) {
                return Ok(Some(status));
            }
            if ended.is_some() {
                break;
            }
        }
        if let Some(status) = self.status().await? {
            return Ok(Some(status));
        }
        // The shell itself was killed, with its group or for lack of memory, before it could write the status.
        match ended.map(|end| exit_status(&end)).transpose()? {
            Some(status) if status.signal().is_some() => Ok(Some(status)),
            Some(status) => Err(error::unreadable(
                "the end of the program",
                format_args!("its shell ended with {status} and left no status"),
            )),
            None => Ok(None),
        }
    }

    /// The status file: `None` while the program runs.
    async fn status(&self) -> Result<Option<ExitStatus>> {
        match self.read_file("status", 0, Some(64)).await {
            Ok(text) => Ok(parse_status(&text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) if is_drop(&error) || error.kind() == ErrorKind::Timeout => {
                tracing::debug!(%error, "e2b: the status of a program is not known now");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn read_file(&self, name: &str, offset: u64, limit: Option<u64>) -> Result<Vec<u8>> {
        let path = format!("{}/{name}", self.dir);
        let mut download = Download::new(self.envd.clone(), path, offset, limit).await?;
        let mut content = Vec::new();
        let read = download.read_to_end(&mut content).await;
        read.map_err(|error| runtime_core::stream_error("reading", error))?;
        Ok(content)
    }

    /// Sends output on as it is written, over as many streams as it takes. Returns only when that cannot be done.
    async fn follow(&self, output: &mut Gathered) -> Error {
        let mut failures = 0;
        loop {
            let before = output.position();
            let error = match self.follow_once(output).await {
                Ok(()) => error::cut_short(),
                Err(error) => error,
            };
            if output.position() != before {
                failures = 0;
            }
            failures += 1;
            if !is_drop(&error) || failures > RECONNECTS {
                return error;
            }
            tokio::time::sleep(RECONNECT_DELAY * (1 << (failures - 1).min(6))).await;
        }
    }

    async fn follow_once(&self, output: &mut Gathered) -> Result<()> {
        output.flush().await;
        let (out, err) = output.position();
        let message = StartRequest {
            process: Some(ProcessConfig {
                cmd: "/bin/sh".to_owned(),
                args: vec![
                    "-c".to_owned(),
                    FOLLOW.to_owned(),
                    FOLLOW.to_owned(),
                    // tail counts bytes from 1.
                    (out + 1).to_string(),
                    (err + 1).to_string(),
                    self.dir.clone(),
                ],
                ..ProcessConfig::default()
            }),
            stdin: Some(false),
            ..StartRequest::default()
        };
        let mut events = self.envd.start(&message).await?;
        let mut follower = Follower {
            envd: self.envd.clone(),
            pid: None,
        };
        while let Some(event) = events.next().await? {
            match event {
                Event::Start(start) => follower.pid = Some(start.pid),
                Event::Data(data) => {
                    match data.output {
                        Some(wire::Output::Stdout(bytes)) => output.add(OutputStream::Stdout, bytes),
                        Some(wire::Output::Stderr(bytes)) => output.add(OutputStream::Stderr, bytes),
                        Some(wire::Output::Pty(_)) | None => {}
                    }
                    output.flush().await;
                }
                Event::End(_) | Event::Keepalive(_) => {}
            }
        }
        Ok(())
    }

    /// Reads what the files have beyond what was gathered, over as many connections as it takes.
    async fn read_rest(&self, output: &mut Gathered) -> Result<()> {
        for (which, name) in [(OutputStream::Stdout, "stdout"), (OutputStream::Stderr, "stderr")] {
            let mut failures = 0;
            loop {
                let before = output.position_of(which);
                let error = match self.read_rest_of(which, name, output).await {
                    Ok(()) => break,
                    Err(error) => error,
                };
                if output.position_of(which) != before {
                    failures = 0;
                }
                failures += 1;
                if !is_drop(&error) || failures > RECONNECTS {
                    return Err(error);
                }
                tokio::time::sleep(RECONNECT_DELAY * (1 << (failures - 1).min(6))).await;
            }
        }
        Ok(())
    }

    async fn read_rest_of(&self, which: OutputStream, name: &str, output: &mut Gathered) -> Result<()> {
        output.flush().await;
        let path = format!("{}/{name}", self.dir);
        let wanted = output.wanted(which);
        let position = output.position_of(which);
        let mut download = match Download::new(self.envd.clone(), path.clone(), position, wanted).await {
            Ok(download) => download,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut read = 0;
        loop {
            let mut chunk = BytesMut::with_capacity(64 << 10);
            let count = download.read_buf(&mut chunk).await;
            if count.map_err(|error| runtime_core::stream_error("reading", error))? == 0 {
                break;
            }
            read += chunk.len() as u64;
            output.add(which, chunk.freeze());
            output.flush().await;
        }
        if wanted.is_some_and(|wanted| read >= wanted) {
            // More than is kept may be there; only its length matters.
            let entry: EntryResponse = self.envd.call("stat", &filesystem::stat(&path, USER)).await?;
            let size = entry
                .entry
                .map_or(0, |entry| u64::try_from(entry.size).unwrap_or_default());
            output.skip(which, size.saturating_sub(output.position_of(which)));
        }
        Ok(())
    }

    async fn kill(&self) {
        let killed = async {
            kill_group(&self.envd, self.pid).await?;
            // The zombie of the leader would do, but its children write to the files until they are gone.
            while self.watch.is_zombie(self.pid).await {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok::<(), Error>(())
        };
        match tokio::time::timeout(KILL_GRACE, killed).await {
            Ok(Ok(())) => self.running.store(false, std::sync::atomic::Ordering::SeqCst),
            Ok(Err(error)) => tracing::debug!(%error, "e2b: a program could not be killed"),
            Err(_) => tracing::debug!("e2b: a killed program is still there"),
        }
    }

    async fn clean_up(mut self) {
        if let Some(files) = self.files.take() {
            files.remove().await;
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !*self.running.get_mut() {
            return;
        }
        let (envd, pid, files) = (self.envd.clone(), self.pid, self.files.take());
        runtime_core::detach(async move {
            if let Err(error) = kill_group(&envd, pid).await {
                tracing::debug!(%error, "e2b: a dropped program could not be killed");
            }
            if let Some(files) = files {
                files.remove().await;
            }
        });
    }
}

/// The program that shows the output: killed with its stream, or it would wait for more for ever.
struct Follower {
    envd: Arc<Envd>,
    pid: Option<u32>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        let Some(pid) = self.pid else { return };
        let envd = self.envd.clone();
        runtime_core::detach(async move {
            let _ = kill_group(&envd, pid).await;
        });
    }
}

/// Whether a connection broke, so that nothing is known about the other end.
fn is_drop(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionLost | ErrorKind::Unavailable)
}

/// What became of a start whose answer was lost.
enum Found {
    /// It runs, or has run, under this id.
    Running(u32),
    /// It never will.
    Never,
}

/// After a start whose answer was lost: finds the program, or makes sure that it never starts.
async fn find(envd: &Arc<Envd>, dir: &str) -> Result<Found> {
    let claimed: Result<EntryResponse> = envd.call("claim", &filesystem::make_dir(dir, USER)).await;
    match claimed {
        // Ours: whatever arrives late finds it taken.
        Ok(_) => return Ok(Found::Never),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    for attempt in 0..RECONNECTS {
        let pid = async {
            let mut text = String::new();
            let mut download = Download::new(envd.clone(), format!("{dir}/pid"), 0, Some(32)).await?;
            let read = download.read_to_string(&mut text).await;
            read.map_err(|error| runtime_core::stream_error("reading", error))?;
            text.strip_suffix('\n')
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| error::unreadable("the process id", "it is not written yet"))
        };
        match pid.await {
            Ok(pid) => return Ok(Found::Running(pid)),
            Err(error) => tracing::debug!(%error, attempt, "e2b: a program's id is not known yet"),
        }
        tokio::time::sleep(RECONNECT_DELAY * (1 << attempt)).await;
    }
    Err(Error::new(
        ErrorKind::ConnectionLost,
        "a program was started, but its id cannot be learned",
    ))
}

/// A whole line with a number. What a shell has folded into it is a signal again.
fn parse_status(text: &[u8]) -> Option<ExitStatus> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('\n')?;
    text.lines().last()?.parse().ok().map(ExitStatus::from_shell_code)
}

/// What was read of both streams.
struct Gathered {
    stdout: Kept,
    stderr: Kept,
    limit: u64,
    sink: Option<mpsc::Sender<OutputChunk>>,
    /// A chunk that is counted and kept, and not sent on yet.
    pending: Option<OutputChunk>,
}

#[derive(Default)]
struct Kept {
    bytes: BytesMut,
    position: u64,
}

impl Gathered {
    fn new(limit: u64, sink: Option<mpsc::Sender<OutputChunk>>) -> Self {
        Self {
            stdout: Kept::default(),
            stderr: Kept::default(),
            limit,
            sink,
            pending: None,
        }
    }

    fn is_streamed(&self) -> bool {
        self.sink.is_some()
    }

    fn kept(&mut self, which: OutputStream) -> &mut Kept {
        match which {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        }
    }

    fn position(&self) -> (u64, u64) {
        (self.stdout.position, self.stderr.position)
    }

    fn position_of(&self, which: OutputStream) -> u64 {
        match which {
            OutputStream::Stdout => self.stdout.position,
            OutputStream::Stderr => self.stderr.position,
        }
    }

    /// How much of a stream is still wanted; `None` is all of it.
    fn wanted(&self, which: OutputStream) -> Option<u64> {
        if self.is_streamed() {
            return None;
        }
        Some(self.limit.saturating_sub(self.position_of(which)).max(1))
    }

    /// Counts and keeps a chunk, and makes it the pending one. The one before must have been flushed.
    fn add(&mut self, stream: OutputStream, bytes: Bytes) {
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        let kept = self.kept(stream);
        let room = limit.saturating_sub(kept.bytes.len());
        kept.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
        kept.position += bytes.len() as u64;
        if self.sink.is_some() && !bytes.is_empty() {
            self.pending = Some(OutputChunk { stream, bytes });
        }
    }

    /// Counts bytes that are not read.
    fn skip(&mut self, which: OutputStream, count: u64) {
        self.kept(which).position += count;
    }

    /// Sends the pending chunk. Cancel safe: it leaves only with the permit.
    async fn flush(&mut self) {
        if self.pending.is_none() {
            return;
        }
        let Some(sink) = self.sink.clone() else { return };
        // Nobody may listen any more.
        let Ok(permit) = sink.reserve().await else {
            self.pending = None;
            self.sink = None;
            return;
        };
        if let Some(chunk) = self.pending.take() {
            permit.send(chunk);
        }
    }

    fn finish(self) -> (Captured, Captured) {
        let captured = |kept: Kept| Captured {
            dropped: kept.position - kept.bytes.len() as u64,
            bytes: kept.bytes.freeze(),
        };
        (captured(self.stdout), captured(self.stderr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn words_of_the_follower_itself_are_not_output() {
        use std::io::Read;
        use std::os::unix::fs::PermissionsExt;
        use std::os::unix::process::CommandExt;
        use std::process::{Command, Stdio};

        let dir = tempfile::tempdir().expect("a directory");
        let path = std::env::var("PATH").expect("a search path");
        let noisy = format!("#!/bin/sh\necho noise >&2\nPATH='{path}'\nexec tail \"$@\"\n");
        std::fs::write(dir.path().join("tail"), noisy).expect("written");
        std::fs::set_permissions(dir.path().join("tail"), std::fs::Permissions::from_mode(0o755)).expect("executable");
        std::fs::write(dir.path().join("stdout"), "0123").expect("written");
        std::fs::write(dir.path().join("stderr"), "abcdef").expect("written");
        let mut child = Command::new("/bin/sh")
            .args(["-c", FOLLOW, FOLLOW, "2", "4"])
            .arg(dir.path())
            // Already in a group of its own.
            .env("F", "1")
            .env("PATH", format!("{}:{path}", dir.path().display()))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("a shell");
        let (mut out, mut err) = ([0; 3], [0; 3]);
        child.stdout.take().expect("piped").read_exact(&mut out).expect("read");
        child.stderr.take().expect("piped").read_exact(&mut err).expect("read");
        let group = format!("-{}", child.id());
        let killed = Command::new("kill").args(["-9", "--", &group]).status().expect("kill");
        assert!(killed.success());
        child.wait().expect("an end");
        assert_eq!((&out, &err), (b"123", b"def"));
    }

    #[test]
    fn only_a_whole_line_is_a_status() {
        assert_eq!(parse_status(b""), None);
        assert_eq!(parse_status(b"1"), None, "half of 17");
        assert_eq!(parse_status(b"17\n"), Some(ExitStatus::exited(17)));
        assert_eq!(parse_status(b"137\n"), Some(ExitStatus::signaled(9)));
        assert_eq!(
            parse_status(b"Killed\n137\n"),
            Some(ExitStatus::signaled(9)),
            "shells comment"
        );
        assert_eq!(parse_status(b"x\n"), None);
    }

    #[tokio::test]
    async fn a_chunk_whose_sending_was_cut_short_is_sent_once() {
        let (sender, mut receiver) = mpsc::channel(1);
        let mut output = Gathered::new(4, Some(sender));
        output.add(OutputStream::Stdout, Bytes::from_static(b"abc"));
        output.flush().await;
        output.add(OutputStream::Stdout, Bytes::from_static(b"def"));
        // The channel is full: the flush is given up.
        assert!(tokio::time::timeout(Duration::ZERO, output.flush()).await.is_err());
        assert_eq!(&receiver.recv().await.expect("first").bytes[..], b"abc");
        output.flush().await;
        output.flush().await;
        assert_eq!(&receiver.recv().await.expect("second").bytes[..], b"def");
        assert_eq!(output.position(), (6, 0));
        let (stdout, _) = output.finish();
        assert_eq!((&stdout.bytes[..], stdout.dropped), (&b"abcd"[..], 2));
        assert!(receiver.recv().await.is_none());
    }
}
