//! Programs in the box: started by the guest, with pipes of this process as their standard streams.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use async_trait::async_trait;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe;
use tokio::sync::watch;

use super::frame::{self, Event, Request, Stdio, Step};
use super::link::Link;
use super::session::{Baggage, Failure, Session, system_error};
use super::stdio::Side;
use crate::command::{Exec, ExitStatus, StdinMode, check_path};
use crate::error::{Error, ErrorKind, Result};
use crate::process::{Process, ProcessControl, ProcessStderr, ProcessStdin, ProcessStdout, Signal};

const ESRCH: i32 = 3;

/// The user that a program runs as, by number. The default is root.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids, in the order of `/etc/group`.
    pub groups: Vec<u32>,
}

/// Where the output of a program goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Output {
    /// To the [`Process`]'s `stdout` and `stderr`.
    #[default]
    Pipes,
    /// Both are appended to this file in the box; a relative path is under the workdir. `stdout` and `stderr` of the
    /// [`Process`] are then `None`.
    Log(PathBuf),
    /// Nowhere.
    Null,
}

/// How a program is started, beyond what an [`Exec`] says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpawnOptions {
    /// Where output goes.
    pub output: Output,
    /// Another user than the guest's own.
    pub user: Option<User>,
    /// Whose, by user and group id of this host, the pipes of a link that passes descriptors are. A program that runs as
    /// somebody else than this process can open them again by name (`/dev/stderr`) only then. Needs root.
    pub pipes_belong_to: Option<u32>,
}

/// What is known of a program.
pub(super) struct Child {
    pid: AtomicU32,
    status: watch::Sender<Option<Result<ExitStatus, Failure>>>,
}

impl Child {
    fn new() -> Self {
        Self {
            pid: AtomicU32::new(0),
            status: watch::Sender::new(None),
        }
    }

    pub(super) fn started(&self, pid: u32) {
        self.pid.store(pid, Ordering::Relaxed);
    }

    pub(super) fn end(&self, status: Result<ExitStatus, Failure>) {
        self.status.send_replace(Some(status));
    }
}

/// One standard stream, as both sides see it.
enum End<T> {
    None,
    Pipe(T),
    Stream(super::stdio::MuxStream),
}

impl Link {
    /// Starts a program.
    ///
    /// `exec.env` is laid over the base environment of the box. A name without a slash is looked up in the `PATH` that
    /// results. The program leads a session of its own. Dropping the future kills what it has started.
    ///
    /// # Errors
    /// [`ProgramNotFound`](ErrorKind::ProgramNotFound), [`ProgramNotExecutable`](ErrorKind::ProgramNotExecutable); for
    /// the workdir what opening a directory gives, with the field `workdir`; otherwise as every request.
    pub async fn spawn(&self, exec: &Exec, options: &SpawnOptions) -> Result<Process> {
        let session = self.session();
        let tag = session.number();
        let child = Arc::new(Child::new());
        let mut baggage = Baggage {
            child: Some(child.clone()),
            tag: Some(tag),
            ..Baggage::default()
        };
        let (stdin, stdin_end) = match exec.stdin {
            StdinMode::Piped => input(session, &mut baggage)?,
            StdinMode::Null => (Stdio::Null, End::None),
        };
        let (stdout, stdout_end, stderr, stderr_end) = match &options.output {
            Output::Null => (Stdio::Null, End::None, Stdio::Null, End::None),
            Output::Log(path) => {
                check_path("log", path)?;
                let log = Stdio::Append(path.as_os_str().as_bytes().to_vec());
                (log.clone(), End::None, log, End::None)
            }
            Output::Pipes => {
                let (stdout, stdout_end) = output(session, &mut baggage)?;
                let (stderr, stderr_end) = output(session, &mut baggage)?;
                (stdout, stdout_end, stderr, stderr_end)
            }
        };
        if let Some(id) = options.pipes_belong_to {
            let (uid, gid) = (rustix::fs::Uid::from_raw(id), rustix::fs::Gid::from_raw(id));
            for pipe in &baggage.descriptors {
                rustix::fs::fchown(pipe, Some(uid), Some(gid))
                    .map_err(|error| Error::io("give a pipe to the box's user", error.into()))?;
            }
        }
        let bytes = |text: &OsStr| text.as_bytes().to_vec();
        let request = Request::Spawn {
            argv: frame::List(exec.argv.iter().map(|argument| bytes(argument)).collect()),
            env: frame::List(
                exec.env
                    .iter()
                    .map(|(name, value)| (bytes(name), bytes(value)))
                    .collect(),
            ),
            cwd: bytes(exec.workdir.as_os_str()),
            user: options.user.as_ref().map(|user| frame::User {
                uid: user.uid,
                gid: user.gid,
                groups: frame::List(user.groups.clone()),
            }),
            stdin,
            stdout,
            stderr,
        };
        match session.call(&request, baggage).await?.event {
            Event::Started { .. } => {}
            Event::Failed { errno, step } => return Err(spawn_error(exec, errno, step)),
            other => return Err(session.unexpected(&other)),
        }
        // From here on dropping it kills the program.
        let control = GuestProcess {
            session: session.clone(),
            tag,
            child,
            released: AtomicBool::new(false),
        };
        Ok(Process::new(
            match stdin_end {
                End::None => None,
                End::Pipe(pipe) => Some(ProcessStdin::new(pipe)),
                End::Stream(stream) => Some(ProcessStdin::new(stream)),
            },
            match stdout_end {
                End::None => None,
                End::Pipe(pipe) => Some(ProcessStdout::new(pipe)),
                End::Stream(stream) => Some(ProcessStdout::new(stream)),
            },
            match stderr_end {
                End::None => None,
                End::Pipe(pipe) => Some(ProcessStderr::new(pipe)),
                End::Stream(stream) => Some(ProcessStderr::new(stream)),
            },
            Arc::new(control),
        ))
    }
}

fn make_pipe() -> Result<(OwnedFd, OwnedFd)> {
    pipe_with(PipeFlags::CLOEXEC).map_err(|error| Error::io("make a pipe", error.into()))
}

fn input(session: &Arc<Session>, baggage: &mut Baggage) -> Result<(Stdio, End<pipe::Sender>)> {
    if !session.passes {
        let stream = session.stream(Side::Write)?;
        baggage.streams.push(stream.id());
        return Ok((Stdio::Stream(stream.id()), End::Stream(stream)));
    }
    let (theirs, ours) = make_pipe()?;
    baggage.descriptors.push(theirs);
    let ours = pipe::Sender::from_owned_fd(ours).map_err(|error| Error::io("use a pipe", error))?;
    Ok((Stdio::Passed, End::Pipe(ours)))
}

fn output(session: &Arc<Session>, baggage: &mut Baggage) -> Result<(Stdio, End<pipe::Receiver>)> {
    if !session.passes {
        let stream = session.stream(Side::Read)?;
        baggage.streams.push(stream.id());
        return Ok((Stdio::Stream(stream.id()), End::Stream(stream)));
    }
    let (ours, theirs) = make_pipe()?;
    baggage.descriptors.push(theirs);
    let ours = pipe::Receiver::from_owned_fd(ours).map_err(|error| Error::io("use a pipe", error))?;
    Ok((Stdio::Passed, End::Pipe(ours)))
}

fn spawn_error(exec: &Exec, errno: i32, step: Step) -> Error {
    const ENOENT: i32 = 2;
    const ENOEXEC: i32 = 8;
    const EACCES: i32 = 13;
    const EISDIR: i32 = 21;
    const ETXTBSY: i32 = 26;
    const ELIBBAD: i32 = 80;
    let program = exec
        .argv
        .first()
        .map(|name| name.display().to_string())
        .unwrap_or_default();
    let system = std::io::Error::from_raw_os_error(errno);
    match (step, errno) {
        (Step::Exec, ENOENT) => Error::new(
            ErrorKind::ProgramNotFound,
            format!("{program}: no such program in the box, or its interpreter is missing"),
        ),
        (Step::Exec, EACCES | ENOEXEC | EISDIR | ETXTBSY | ELIBBAD) => Error::new(
            ErrorKind::ProgramNotExecutable,
            format!("{program}: the box cannot execute it: {system}"),
        ),
        (Step::Chdir, _) => {
            let what = format!("enter the working directory {}", exec.workdir.display());
            Error::io(what, system).with_field("workdir")
        }
        (Step::Filter, _) => Error::new(
            ErrorKind::Unsupported,
            format!("the box's kernel refuses the system call filter: {system}"),
        ),
        // No process or no memory left.
        (Step::Fork, _) => Error::new(ErrorKind::ResourceExhausted, format!("start {program}: {system}")),
        (Step::Stdio, _) => Error::io(format!("connect the standard streams of {program}"), system),
        (Step::User, _) => Error::io(format!("become another user to start {program}"), system).with_field("user"),
        _ => system_error(format!("start {program}"), errno, step),
    }
}

struct GuestProcess {
    session: Arc<Session>,
    tag: u32,
    child: Arc<Child>,
    released: AtomicBool,
}

impl GuestProcess {
    /// Kills what is left of the group and lets the guest forget it.
    fn release(&self) {
        if !self.released.swap(true, Ordering::Relaxed) {
            self.session.post(self.tag, &Request::Release { target: self.tag });
        }
    }
}

impl Drop for GuestProcess {
    fn drop(&mut self) {
        self.release();
    }
}

#[async_trait]
impl ProcessControl for GuestProcess {
    fn pid(&self) -> Option<u32> {
        match self.child.pid.load(Ordering::Relaxed) {
            0 => None,
            pid => Some(pid),
        }
    }

    async fn wait(&self) -> Result<ExitStatus> {
        let mut receiver = self.child.status.subscribe();
        match receiver.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(Ok(status))) => Ok(*status),
            Ok(Some(Err(failure))) => Err(failure.error()),
            _ => Err(self.session.failure()),
        }
    }

    fn try_wait(&self) -> Result<Option<ExitStatus>> {
        match &*self.child.status.borrow() {
            None => Ok(None),
            Some(Ok(status)) => Ok(Some(*status)),
            Some(Err(failure)) => Err(failure.error()),
        }
    }

    async fn signal(&self, signal: Signal) -> Result<()> {
        if self.try_wait()?.is_some() {
            return Ok(());
        }
        let request = Request::Signal {
            target: self.tag,
            signal: signal.number(),
        };
        match self.session.call(&request, Baggage::default()).await?.event {
            // It has ended meanwhile.
            Event::Done {} | Event::Failed { errno: ESRCH, .. } => Ok(()),
            Event::Failed { errno, step } => Err(system_error("signal a program", errno, step)),
            other => Err(self.session.unexpected(&other)),
        }
    }

    fn start_kill(&self) {
        self.release();
    }

    async fn finish(&self) {
        self.release();
    }
}
