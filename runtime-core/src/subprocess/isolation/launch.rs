//! Starting a guest that makes its own box, and its end.

use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::task::spawn_blocking;

use super::diagnosis::StepFailed;
use crate::cache::CacheDir;
use crate::error::{Error, ErrorKind, Result};
use crate::guest::frame::Wire;
use crate::guest::plan::{MAX_PLAN, Plan};
use crate::guest::{Link, LinkOptions, Rendezvous, Token};
use crate::subprocess::runtime::MARKER;

/// How long the guest has to build the box. Many may be built at once on few processors.
const BUILD_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the kernel has to end a box.
const END_TIMEOUT: Duration = Duration::from_secs(30);
/// Most of the guest's last words that are read.
const LAST_WORDS: u64 = 4 << 10;
/// How often starting a file that somebody still writes to is tried again.
const BUSY_ATTEMPTS: u32 = 20;

/// The process that keeps a box: when it ends, the box does. Dropping it ends both.
#[derive(Debug)]
pub(super) struct Keeper(Child);

impl Keeper {
    /// Ends the box, and waits until none of its processes is left. Blocks.
    pub(super) fn end(mut self) -> Result<()> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        use rustix::process::{Pid, PidfdFlags, pidfd_open};
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        let ended = |error: io::Error| Error::io("waiting for the end of the box", error);
        // By the link it knows already. Being killed, it would leave before the box has ended.
        if let Some(pidfd) = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) {
            let timeout = Timespec {
                tv_sec: END_TIMEOUT.as_secs() as i64,
                tv_nsec: 0,
            };
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
            loop {
                match poll(&mut fds, Some(&timeout)) {
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(ended(error.into())),
                    Ok(0) => {
                        return Err(Error::new(
                            ErrorKind::Timeout,
                            format!("the kernel did not end the box within {END_TIMEOUT:?}"),
                        ));
                    }
                    Ok(_) => break,
                }
            }
        }
        self.0.wait().map_err(ended).map(drop)
    }

    /// Lets the keeper start programs on this host's network for the guest, or not. It takes note before any request of
    /// the guest's that is made after this returns.
    pub(super) fn allow_host_network(&self, allow: bool) -> Result<()> {
        use rustix::process::{Pid, Signal, kill_process};
        let signal = if allow { Signal::USR2 } else { Signal::USR1 };
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        // It is not waited for before the box's end, so the number is its own.
        let told = pid.map_or(Err(rustix::io::Errno::SRCH), |pid| kill_process(pid, signal));
        told.map_err(|error| Error::io("telling the keeper of the box about the network", error.into()))
    }

    /// What it said before it ended. Blocks until it has.
    fn last_words(mut self) -> String {
        let _ = self.0.kill();
        self.words()
    }

    /// The exit code and the last words of one that ends by itself. Blocks.
    fn finish(mut self) -> (Option<i32>, String) {
        let words = self.words();
        let status = self.0.wait().ok().and_then(|status| status.code());
        (status, words)
    }

    fn words(&mut self) -> String {
        let mut words = Vec::new();
        if let Some(stderr) = self.0.stderr.take() {
            let _ = stderr.take(LAST_WORDS).read_to_end(&mut words);
        }
        String::from_utf8_lossy(&words).into_owned()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // The box's process 1 dies of this one's death.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The guest's program in the cache.
pub(super) fn keep_program(cache: &CacheDir) -> Result<PathBuf> {
    Rendezvous::keep_program(&cache.create_dir("runtimes")?)
}

/// The plan of a box that is only to be tried.
pub(super) fn probe_plan() -> Plan {
    Plan {
        probe: true,
        // Any directory of this machine that is there; it is covered in the guest's namespace alone.
        stage: b"/usr".to_vec(),
        workdir: super::WORKDIR.as_bytes().to_vec(),
        user: super::box_user(),
        memory_files: 1 << 20,
        hostname: b"probe".to_vec(),
        ..Plan::default()
    }
}

/// Makes a box, and ends it. Blocks.
pub(super) fn probe(program: &Path, plan: &Plan) -> Result<()> {
    let (keeper, mut socket) = start(program, Path::new("/"), &Token::generate()?)?;
    let sent = encode(plan).and_then(|bytes| {
        io::Write::write_all(&mut socket, &bytes).map_err(|error| Error::io("sending the plan", error))
    });
    sent?;
    let _ = socket.set_read_timeout(Some(BUILD_TIMEOUT));
    // It says nothing, and ends.
    let _ = socket.read(&mut [0]);
    let (status, words) = keeper.finish();
    match (status, StepFailed::parse(&words)) {
        (Some(0), _) => Ok(()),
        (_, Some(failed)) => Err(failed.into_error()),
        _ => Err(Error::new(
            ErrorKind::Protocol,
            format!("the guest ended: {}", words.trim()),
        )),
    }
}

fn encode(plan: &Plan) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    plan.put(&mut body);
    if body.len() > MAX_PLAN {
        let message = "the paths take more room than the guest has for them";
        return Err(Error::invalid_config("expose_paths", message));
    }
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(body);
    Ok(bytes)
}

fn start(program: &Path, dir: &Path, token: &Token) -> Result<(Keeper, StdStream)> {
    let fail = |error: io::Error| Error::io("starting the guest", error);
    let (ours, theirs) = StdStream::pair().map_err(fail)?;
    let theirs = OwnedFd::from(theirs);
    let (name, value) = token.variable();
    let mut attempt = 0;
    loop {
        let mut command = Command::new(program);
        command
            .arg("--isolate")
            .env_clear()
            .env(name, &value)
            .env(MARKER, dir)
            .current_dir("/")
            // A terminal's Ctrl-C is for the owner, who ends the box in order.
            .process_group(0)
            .stdin(theirs.try_clone().map_err(fail)?)
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        match command.spawn() {
            Ok(child) => return Ok((Keeper(child), ours)),
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && attempt < BUSY_ATTEMPTS => {
                attempt += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(fail(error)),
        }
    }
}

/// Starts a guest that builds the box of this plan, whose directory is `dir`, in this cgroup.
///
/// # Errors
/// What the guest could not do, with the step that failed as its source.
///
/// # Cancellation
/// The box ends.
pub(super) async fn launch(program: PathBuf, dir: &Path, plan: &Plan, group: Option<&Path>) -> Result<(Keeper, Link)> {
    let token = Token::generate()?;
    let bytes = encode(plan)?;
    let (keeper, socket) = {
        let (dir, token, group) = (dir.to_path_buf(), token.clone(), group.map(Path::to_path_buf));
        blocking(move || {
            let started = start(&program, &dir, &token)?;
            // It waits for its plan, so whatever it makes is in the group, too.
            group.map_or(Ok(()), |group| super::cgroup::add(&group, started.0.0.id()))?;
            Ok(started)
        })
        .await?
    };
    let connected = async {
        let fail = |error: io::Error| Error::io("talking to the guest", error);
        socket.set_nonblocking(true).map_err(fail)?;
        let mut socket = UnixStream::from_std(socket).map_err(fail)?;
        socket.write_all(&bytes).await.map_err(fail)?;
        let options = LinkOptions {
            handshake_timeout: BUILD_TIMEOUT,
            ..LinkOptions::default()
        };
        Link::over_socket(socket, &token, options).await
    };
    match connected.await {
        Ok(link) => Ok((keeper, link)),
        Err(error) => {
            let words = blocking(move || Ok(keeper.last_words())).await?;
            Err(match StepFailed::parse(&words) {
                Some(failed) => failed.into_error(),
                None if words.trim().is_empty() => error,
                None => Error::new(error.kind(), format!("{}: {}", error.message(), words.trim())).with_source(error),
            })
        }
    }
}

/// Runs blocking work on a thread for it.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    match spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(Error::new(ErrorKind::Other, "a thread for files failed").with_source(error)),
    }
}

/// A path as a plan has it.
pub(super) fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

/// Makes a directory that belongs to the box's user.
pub(super) fn make_for(user: Option<u32>, dir: &Path) -> Result<()> {
    let fail = |error| Error::io(format_args!("creating {}", dir.display()), error);
    fs::create_dir(dir).map_err(fail)?;
    std::os::unix::fs::chown(dir, user, user).map_err(fail)
}

/// Whether the kernel refused the layer over the box's root, and nothing else.
pub(super) fn is_about_the_layer(error: &Error) -> bool {
    let step = std::error::Error::source(error).and_then(|source| source.downcast_ref::<StepFailed>());
    step.is_some_and(|failed| failed.step == "overlay")
}
