//! Guest mode: everything in the box through the link to its process 1.

mod expose;
mod files;
pub(crate) mod start;
mod tree;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use runtime_core::guest::frame::FileKind;
use runtime_core::guest::{self, Link, SpawnOptions};
use runtime_core::{Env, Error, ErrorKind, Exec, Process, Result, StdinMode};

use crate::engine::Engine;
use crate::users::Ids;

pub(crate) use expose::Exposures;

/// A box through its guest.
pub(crate) struct GuestBox {
    pub(crate) link: Link,
    /// The image's user, unless that is who the guest runs as.
    pub(crate) user: Option<Ids>,
    /// The variables under those of the caller.
    base: Env,
    /// Servers, which end with the box.
    background: Mutex<Vec<Process>>,
    exposures: Exposures,
}

impl GuestBox {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            user: None,
            base: Env::new(),
            background: Mutex::default(),
            exposures: Exposures::default(),
        }
    }

    /// Finds out who the programs run as, and gives programs the image's variables, as an exec of the engine would.
    pub(crate) async fn prepare(&mut self, user: &str, base: &Env) -> Result<()> {
        self.link.configure(Some(base), false).await?;
        self.base = base.clone();
        if crate::users::is_root(user) {
            return Ok(());
        }
        let passwd = self.text("/etc/passwd").await?;
        let group = self.text("/etc/group").await?;
        let ids = crate::users::resolve(user, &passwd, &group)?;
        self.user = (ids != Ids::default()).then_some(ids);
        Ok(())
    }

    async fn text(&self, path: &str) -> Result<String> {
        match self.link.read(Path::new(path), 4 << 20).await {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::WrongFileType) => Ok(String::new()),
            Err(error) => Err(error),
        }
    }

    fn options(&self, stdin: StdinMode) -> SpawnOptions {
        SpawnOptions {
            stdin: stdin == StdinMode::Piped,
            user: self.user.as_ref().map(|ids| guest::User {
                uid: ids.uid,
                gid: ids.gid,
                groups: ids.groups.clone(),
            }),
            ..SpawnOptions::default()
        }
    }

    pub(crate) async fn spawn(&self, exec: &Exec) -> Result<Process> {
        self.start(exec, &self.options(exec.stdin)).await
    }

    async fn start(&self, exec: &Exec, options: &SpawnOptions) -> Result<Process> {
        match self.link.spawn(exec, options).await {
            Err(error) if error.kind() == ErrorKind::ProgramNotFound && self.has_program(exec).await => {
                // The kernel says the same of a script whose interpreter is missing.
                let program = exec
                    .argv
                    .first()
                    .map(|program| program.display().to_string())
                    .unwrap_or_default();
                Err(Error::new(
                    ErrorKind::ProgramNotExecutable,
                    format!("{program}: its interpreter or loader is missing in the box"),
                ))
            }
            started => started,
        }
    }

    /// Whether the program is there, as a program's path or in the search path.
    async fn has_program(&self, exec: &Exec) -> bool {
        let Some(program) = exec.argv.first().map(Path::new) else {
            return false;
        };
        if program.as_os_str().as_encoded_bytes().contains(&b'/') {
            return self.link.stat(&exec.workdir.join(program), true).await.is_ok();
        }
        let path = exec.env.get("PATH").or(self.base.get("PATH"));
        for dir in path.map(std::env::split_paths).into_iter().flatten() {
            if self
                .link
                .stat(&exec.workdir.join(dir).join(program), true)
                .await
                .is_ok()
            {
                return true;
            }
        }
        false
    }

    pub(crate) async fn spawn_background(&self, exec: &Exec, log: &Path) -> Result<()> {
        match self.link.stat(log, true).await {
            Ok(info) if info.kind == FileKind::File => {}
            Ok(_) => {
                let message = format!("the log {} is no file", log.display());
                return Err(Error::new(ErrorKind::WrongFileType, message));
            }
            Err(_) => {
                if let Some(parent) = log.parent() {
                    self.create_dir(parent).await?;
                }
            }
        }
        let options = SpawnOptions {
            output: guest::Output::Log(log.to_path_buf()),
            ..self.options(StdinMode::Null)
        };
        let process = self.start(exec, &options).await?;
        let mut background = self.background.lock().unwrap_or_else(PoisonError::into_inner);
        background.retain_mut(|process| matches!(process.try_wait(), Ok(None)));
        background.push(process);
        Ok(())
    }

    pub(crate) async fn expose(&self, port: u16) -> Result<String> {
        self.exposures.url(&self.link, port).await
    }

    /// Ends what this side holds of a box that is gone or about to be.
    pub(crate) fn close(&self) {
        self.exposures.close();
        self.link.close();
        self.background.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Says it loudly when process 1 of a box ends although nobody asked for it.
pub(crate) fn watch_end(link: &Link, engine: Engine, container: String, expected: tokio::sync::watch::Receiver<bool>) {
    let link = link.clone();
    tokio::spawn(async move {
        let error = link.ended().await;
        if *expected.borrow() {
            return;
        }
        let state = engine
            .inspect(&container)
            .await
            .ok()
            .flatten()
            .and_then(|inspect| inspect.state);
        let (code, oom) = state.map_or((None, false), |state| (state.exit_code, state.oom_killed == Some(true)));
        tracing::error!(container, %error, exit_code = code, oom_killed = oom, "the box has died");
    });
}

/// A relative path in the engine's directory for the box.
pub(crate) fn program_path() -> PathBuf {
    PathBuf::from("/.sandbox/guest")
}

/// The error where a way of reaching the guest is not there.
pub(crate) fn unavailable(reason: impl std::fmt::Display) -> Error {
    Error::unsupported(format!("this build has no guest program: {reason}"))
}
