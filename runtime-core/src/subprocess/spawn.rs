//! Starting a program of the host.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::command::{Exec, StdinMode};
use crate::error::{Error, ErrorKind, Result};
use crate::process::{Process, ProcessStderr, ProcessStdin, ProcessStdout};
use crate::subprocess::process::{Control, Groups};
use crate::subprocess::runtime::MARKER;

/// Where a program is looked for when its environment has no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How often starting a file that somebody still writes to is tried again. Another thread's fork inherits a descriptor
/// that we just wrote an executable through, for the instant until its exec.
const BUSY_ATTEMPTS: u32 = 20;

/// Where a program's standard streams go.
pub(crate) struct Stdio {
    stdin: StdinMode,
    log: Option<fs::File>,
}

impl Stdio {
    pub(crate) fn pipes(stdin: StdinMode) -> Self {
        Self { stdin, log: None }
    }

    pub(crate) fn log(file: fs::File) -> Self {
        Self {
            stdin: StdinMode::Null,
            log: Some(file),
        }
    }
}

/// A program that was started.
pub(crate) struct Launch {
    stdin: Option<ProcessStdin>,
    stdout: Option<ProcessStdout>,
    stderr: Option<ProcessStderr>,
    pub(crate) control: Arc<Control>,
}

impl Launch {
    pub(crate) fn into_process(self) -> Process {
        Process::new(self.stdin, self.stdout, self.stderr, self.control)
    }
}

/// Starts a program in its own process group and adds it to `groups`.
pub(crate) fn launch(groups: &Arc<Groups>, exec: Exec, stdio: Stdio, dir: &Path) -> Result<Launch> {
    let env = environment(&exec, dir);
    let program = resolve(
        &exec,
        env.iter()
            .find(|(name, _)| name == "PATH")
            .map(|(_, value)| value.as_os_str()),
    )?;
    let mut command = tokio::process::Command::new(&program);
    command
        .arg0(&exec.argv[0])
        .args(&exec.argv[1..])
        .env_clear()
        .envs(env.iter().map(|(name, value)| (name, value)))
        .current_dir(&exec.workdir)
        .process_group(0)
        .stdin(match stdio.stdin {
            StdinMode::Null => std::process::Stdio::null(),
            StdinMode::Piped => std::process::Stdio::piped(),
        });
    match &stdio.log {
        None => {
            command
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped());
        }
        Some(log) => {
            let copy = || log.try_clone().map_err(|error| Error::io("opening the log", error));
            command.stdout(copy()?).stderr(copy()?);
        }
    }
    super::signals::set_to_default(&mut command, &program, &exec.argv, &env);
    let mut attempt = 0;
    let mut child = loop {
        match command.spawn() {
            Ok(child) => break child,
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && attempt < BUSY_ATTEMPTS => {
                attempt += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(explain(error, &exec, &program)),
        }
    };
    let stdin = child.stdin.take().map(ProcessStdin::new);
    let stdout = child.stdout.take().map(ProcessStdout::new);
    let stderr = child.stderr.take().map(ProcessStderr::new);
    let control = Control::start(child, groups)?;
    Ok(Launch {
        stdin,
        stdout,
        stderr,
        control,
    })
}

/// The host's variables without API keys, then the sandbox's and the command's, then the marker.
fn environment(exec: &Exec, dir: &Path) -> Vec<(OsString, OsString)> {
    let mut env: Vec<(OsString, OsString)> = std::env::vars_os()
        .filter(|(name, _)| !is_api_key(name) && exec.env.get(name).is_none())
        .chain(exec.env.iter().map(|(name, value)| (name.to_owned(), value.to_owned())))
        .collect();
    env.push((MARKER.into(), dir.into()));
    env
}

/// Whether a variable must not be inherited by programs that a model wrote.
fn is_api_key(name: &OsStr) -> bool {
    name.to_string_lossy().to_uppercase().contains("API_KEY")
}

/// Finds the program as `execvp` would, in the box's own `PATH`.
fn resolve(exec: &Exec, path: Option<&OsStr>) -> Result<PathBuf> {
    let program = &exec.argv[0];
    if program.as_encoded_bytes().contains(&b'/') {
        let full = exec.workdir.join(program);
        return match runnable(&full) {
            Ok(()) => Ok(full),
            Err(error) => Err(explain(error, exec, &full)),
        };
    }
    let path = path.unwrap_or(OsStr::new(DEFAULT_PATH));
    let mut denied = None;
    for dir in std::env::split_paths(path) {
        // An empty entry is the current directory, by tradition.
        let full = exec.workdir.join(dir).join(program);
        match runnable(&full) {
            Ok(()) => return Ok(full),
            // A directory of PATH that may not be searched has no programs for us.
            Err(_) if full.exists() => denied = Some(full),
            Err(_) => {}
        }
    }
    match denied {
        Some(full) => Err(explain(io::ErrorKind::PermissionDenied.into(), exec, &full)),
        None => Err(Error::new(
            ErrorKind::ProgramNotFound,
            format!("{} is not in PATH", program.to_string_lossy().escape_debug()),
        )),
    }
}

fn runnable(path: &Path) -> io::Result<()> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(rustix::fs::access(path, rustix::fs::Access::EXEC_OK)?)
}

/// Tells apart why a program did not start.
fn explain(error: io::Error, exec: &Exec, program: &Path) -> Error {
    if !exec.workdir.is_dir() {
        return Error::new(
            ErrorKind::NotFound,
            format!("the working directory {} does not exist", exec.workdir.display()),
        )
        .with_field("workdir");
    }
    let shown = program.display();
    let missing_parts = error.kind() == io::ErrorKind::NotFound && program.exists();
    // ENOEXEC has no kind of its own.
    const NO_FORMAT: i32 = 8;
    match error.kind() {
        io::ErrorKind::NotFound if missing_parts => Error::new(
            ErrorKind::ProgramNotExecutable,
            format!("{shown} exists, but its interpreter or loader does not"),
        ),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Error::new(ErrorKind::ProgramNotFound, format!("{shown} does not exist"))
        }
        io::ErrorKind::PermissionDenied => Error::new(
            ErrorKind::ProgramNotExecutable,
            format!("{shown} is not an executable file"),
        ),
        io::ErrorKind::ArgumentListTooLong => {
            Error::invalid_argument("argv", "argv and environment are larger than this system takes")
        }
        _ if error.raw_os_error() == Some(NO_FORMAT) => Error::new(
            ErrorKind::ProgramNotExecutable,
            format!("{shown} is of no executable format"),
        ),
        io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => Error::new(
            ErrorKind::ResourceExhausted,
            format!("no process could be made: {error}"),
        ),
        _ => Error::io(format_args!("starting {shown}"), error),
    }
}
