//! A box through its guest: what a provider's [`Runtime`](crate::Runtime) needs, in terms of the [`Link`].

mod expose;
mod files;
mod tree;
pub mod users;

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use super::frame::FileKind;
use super::{Link, Output, SpawnOptions, User};
use crate::command::{Env, Exec};
use crate::error::{Error, ErrorKind, Result};
use crate::process::Process;

use expose::Exposures;

/// A box through its guest: programs, files, trees and ports as a [`Runtime`](crate::Runtime) gives them, in a box
/// that is reached by a [`Link`].
pub struct GuestBox {
    /// The link to the box's process 1.
    pub link: Link,
    /// Who programs run as and created files belong to, unless that is who the guest runs as.
    pub user: Option<User>,
    /// Who on this host the box's programs are, where that is not who this process is.
    pub outside: Option<u32>,
    /// The variables under those of the caller.
    base: Env,
    /// Servers, which end with the box.
    background: Mutex<Vec<Process>>,
    exposures: Exposures,
}

impl GuestBox {
    /// A box whose guest answers on `link`, running as whom the guest runs.
    pub fn new(link: Link) -> Self {
        Self {
            link,
            user: None,
            outside: None,
            base: Env::new(),
            background: Mutex::default(),
            exposures: Exposures::default(),
        }
    }

    /// Finds out who the programs run as, and gives programs the image's variables, as an exec of the engine would.
    ///
    /// # Errors
    /// [`InvalidConfig`](ErrorKind::InvalidConfig) naming `user` for one that the box does not have.
    pub async fn prepare(&mut self, user: &str, base: &Env) -> Result<()> {
        self.link.configure(Some(base), false).await?;
        self.base = base.clone();
        if users::is_root(user) {
            return Ok(());
        }
        let passwd = self.text("/etc/passwd").await?;
        let group = self.text("/etc/group").await?;
        let ids = users::resolve(user, &passwd, &group)?;
        self.user = (ids != User::default()).then_some(ids);
        Ok(())
    }

    /// Keeps programs that start from now on, as long as the box lives, from sockets of the families that no network
    /// namespace confines and from new privileges through set-user-ID programs. For a box with a network policy, after
    /// [`prepare`](Self::prepare) and before its first program: what setup starts lives on into the execution phase.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) where the guest has no filter for its architecture.
    pub async fn confine(&self) -> Result<()> {
        self.link.configure(Some(&self.base), true).await
    }

    async fn text(&self, path: &str) -> Result<String> {
        match self.link.read(Path::new(path), 4 << 20).await {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::WrongFileType) => Ok(String::new()),
            Err(error) => Err(error),
        }
    }

    fn options(&self) -> SpawnOptions {
        SpawnOptions {
            user: self.user.clone(),
            pipes_belong_to: self.outside,
            ..SpawnOptions::default()
        }
    }

    /// Starts a program.
    ///
    /// # Errors
    /// Start failures, told apart: a missing program, one that cannot be executed, a missing workdir.
    ///
    /// # Cancellation
    /// A program that was started is killed.
    pub async fn spawn(&self, exec: &Exec) -> Result<Process> {
        self.start(exec, &self.options()).await
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

    /// Starts a server that lives as long as the box, its output appended to `log`.
    ///
    /// # Errors
    /// As [`spawn`](Self::spawn), and [`WrongFileType`](ErrorKind::WrongFileType) for a log that is no regular file.
    pub async fn spawn_background(&self, exec: &Exec, log: &Path) -> Result<()> {
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
            output: Output::Log(log.to_path_buf()),
            ..self.options()
        };
        let process = self.start(exec, &options).await?;
        let mut background = self.background.lock().unwrap_or_else(PoisonError::into_inner);
        background.retain_mut(|process| matches!(process.try_wait(), Ok(None)));
        background.push(process);
        Ok(())
    }

    /// A URL on loopback of this host behind which every connection is dialled to `port` in the box.
    ///
    /// # Errors
    /// [`Io`](ErrorKind::Io) where this host gives no listener.
    pub async fn expose(&self, port: u16) -> Result<String> {
        self.exposures.url(&self.link, port).await
    }

    /// Whether the box's programs are on this host's network at present, where the ports that they listen on are then.
    #[cfg(feature = "isolation")]
    pub(crate) fn set_outside(&self, outside: bool) {
        self.exposures.set_outside(outside);
    }

    /// Ends what this side holds of a box that is gone or about to be.
    pub fn close(&self) {
        self.exposures.close();
        self.link.close();
        self.background.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
