//! One box of the embedded runtime.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::task::spawn_blocking;

use crate::capability::Capabilities;
use crate::command::Exec;
use crate::error::{Error, ErrorKind, Result};
use crate::files::{ByteStream, Content, DirEntry, Metadata, WriteOptions};
use crate::lease::crash::crash_point;
use crate::process::Process;
use crate::runtime::{BoxSpec, Runtime};
use crate::subprocess::changes::Changes;
use crate::subprocess::config::{CAPABILITIES, TAG};
use crate::subprocess::files;
use crate::subprocess::process::Groups;
use crate::subprocess::spawn::{self, Launch, Stdio};
use crate::tree;

/// The variable in a program's environment by which what left its process group is found again.
pub(crate) const MARKER: &str = "RUNTIME_SANDBOX_DIR";

/// Where boxes live below the cache directory.
pub(super) const PARENT: &str = "runtimes/subprocess";

/// What a lease says of a box: its directory, and the claim that tells this box from another of the same name.
pub(crate) const DIR: &str = "dir";
pub(crate) const CLAIM: &str = "claim";

/// How long a group may take to obey SIGTERM, and then to be gone after SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// How long reading a FIFO or device may take in all.
const SPECIAL_READ_TIMEOUT: Duration = Duration::from_secs(5);

/// A box that is a directory and process groups of this machine.
pub struct SubprocessRuntime {
    spec: BoxSpec,
    dir: PathBuf,
    /// Random; beside the directory while it is this box's.
    claim: String,
    groups: Arc<Groups>,
    directory: Arc<Mutex<Directory>>,
    changes: Changes,
}

/// Whose the directory of the box is. Its creation and its deletion may meet: the thread that creates it goes on when
/// the executor that asked for it is gone.
enum Directory {
    /// Not ours, as far as is known: it does not exist yet, or somebody else made it.
    Foreign,
    /// We made it.
    Ours,
    /// Deleted, or never to be made.
    Gone,
}

impl SubprocessRuntime {
    /// The handle on a box that does not exist yet.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a cache directory that cannot be one.
    pub fn new(spec: BoxSpec) -> Result<Self> {
        let dir = spec.cache.join(PARENT)?.join(&spec.name);
        Ok(Self {
            spec,
            dir,
            claim: crate::names::random_id(),
            groups: Arc::new(Groups::default()),
            directory: Arc::new(Mutex::new(Directory::Foreign)),
            changes: Changes::default(),
        })
    }

    /// A box whose directory is gone is dead, and must not come back to life by a write that creates parents.
    fn check_alive(&self) -> Result<()> {
        if !self.groups.is_closed() && self.dir.is_dir() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::SandboxGone,
            "the directory of the sandbox is gone",
        ))
    }

    /// Makes a change in a thread for it. One that is abandoned goes on, and what comes after waits for its end.
    async fn change(&self, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        self.changes.settled().await;
        self.check_alive()?;
        let (_waiting, working) = self.changes.begin();
        blocking(move || {
            let _working = working;
            work()
        })
        .await
    }

    fn launch(&self, exec: Exec, stdio: Stdio) -> Result<Launch> {
        self.groups.start_one();
        self.check_alive()?;
        spawn::launch(&self.groups, exec, stdio, &self.dir)
    }
}

#[async_trait]
impl Runtime for SubprocessRuntime {
    fn provider(&self) -> &'static str {
        TAG
    }

    fn id(&self) -> Option<String> {
        Some(self.dir.to_string_lossy().into_owned())
    }

    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn workdir(&self) -> PathBuf {
        self.dir.clone()
    }

    fn lease_context(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            (DIR.to_owned(), self.dir.to_string_lossy().into_owned()),
            (CLAIM.to_owned(), self.claim.clone()),
        ])
    }

    async fn create(&self) -> Result<()> {
        let cache = self.spec.cache.clone();
        let (dir, claim) = (self.dir.clone(), self.claim.clone());
        let directory = self.directory.clone();
        blocking(move || {
            cache.create_dir(PARENT)?;
            let mut directory = directory.lock().unwrap_or_else(PoisonError::into_inner);
            if let Directory::Gone = *directory {
                return Err(Error::new(ErrorKind::SandboxGone, "the sandbox was deleted already"));
            }
            create_directory(&dir, &claim)?;
            *directory = Directory::Ours;
            Ok(())
        })
        .await
    }

    async fn delete(&self) -> Result<()> {
        self.groups.close();
        let directory = self.directory.clone();
        let ours = blocking(move || {
            let mut directory = directory.lock().unwrap_or_else(PoisonError::into_inner);
            // A create that found somebody else's directory must not delete it, and one that comes later must not
            // make one.
            if let Directory::Foreign = *directory {
                *directory = Directory::Gone;
            }
            Ok(matches!(*directory, Directory::Ours))
        });
        if !ours.await? {
            return Ok(());
        }
        self.groups.end(GRACE).await;
        let owner = OwnerIs::Alive {
            started: self.groups.any_started(),
        };
        delete_directory(&self.spec.name, &self.dir, &self.claim, owner).await
    }

    async fn spawn(&self, exec: Exec) -> Result<Process> {
        self.changes.settled().await;
        let stdio = Stdio::pipes(exec.stdin);
        self.launch(exec, stdio).map(Launch::into_process)
    }

    async fn spawn_background(&self, exec: Exec, log: &Path) -> Result<()> {
        self.changes.settled().await;
        self.check_alive()?;
        let log = log.to_path_buf();
        let log = blocking(move || files::open_log(&log)).await?;
        let launch = self.launch(exec, Stdio::log(log))?;
        self.groups.keep(launch.control);
        Ok(())
    }

    async fn alive(&self) -> Result<()> {
        self.check_alive()
    }

    async fn open(&self, path: &Path, limit: Option<u64>) -> Result<ByteStream> {
        self.changes.settled().await;
        let path = path.to_path_buf();
        let shown = path.clone();
        match blocking(move || files::open(&path, limit)).await? {
            files::Opened::Regular(stream) => Ok(stream),
            files::Opened::Special => {
                let Some(limit) = limit else {
                    return Err(Error::new(
                        ErrorKind::WrongFileType,
                        "a FIFO, socket or device is read only with a limit",
                    ));
                };
                // Opening it here would block a thread, so a program that can be killed does.
                let argv = ["head", "-c", &limit.to_string(), "--"]
                    .map(Into::into)
                    .into_iter()
                    .chain([shown.into()]);
                let exec = Exec {
                    argv: argv.collect(),
                    env: crate::Env::new(),
                    workdir: self.dir.clone(),
                    stdin: crate::StdinMode::Null,
                };
                let process = self.spawn(exec).await?;
                Ok(files::special(process, SPECIAL_READ_TIMEOUT))
            }
        }
    }

    async fn read(&self, path: &Path, limit: u64) -> Result<Bytes> {
        self.changes.settled().await;
        let regular = path.to_path_buf();
        match blocking(move || files::read(&regular, limit)).await? {
            Some(content) => Ok(content),
            None => crate::runtime::read_to_end(self.open(path, Some(limit)).await?, limit).await,
        }
    }

    async fn write(&self, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
        self.changes.settled().await;
        self.check_alive()?;
        files::write(&self.changes, path, content, options).await
    }

    async fn stat(&self, path: &Path) -> Result<Metadata> {
        self.changes.settled().await;
        let path = path.to_path_buf();
        blocking(move || files::stat(&path)).await
    }

    async fn list(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.changes.settled().await;
        let path = path.to_path_buf();
        blocking(move || files::list(&path)).await
    }

    async fn create_dir(&self, path: &Path) -> Result<()> {
        let path = path.to_path_buf();
        self.change(move || {
            fs::create_dir_all(&path).map_err(|error| Error::io(format_args!("creating {}", path.display()), error))
        })
        .await
    }

    async fn remove(&self, path: &Path, recursive: bool) -> Result<()> {
        let path = path.to_path_buf();
        self.change(move || files::remove(&path, recursive)).await
    }

    async fn upload_tar(&self, dir: &Path, tar: ByteStream) -> Result<()> {
        self.changes.settled().await;
        self.check_alive()?;
        let (_waiting, working) = self.changes.begin();
        tree::unpack(tar, dir.to_path_buf(), working).await
    }

    async fn download_tar(&self, dir: &Path) -> Result<ByteStream> {
        self.changes.settled().await;
        let dir = dir.to_path_buf();
        let (stream, half) = blocking(move || tree::pack(dir)).await?;
        Ok(half.behind(stream))
    }

    async fn expose(&self, port: u16) -> Result<String> {
        Ok(format!("http://127.0.0.1:{port}"))
    }
}

/// Runs blocking file work on a thread for it.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    match spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(Error::new(ErrorKind::Other, "a file operation's thread failed").with_source(error)),
    }
}

/// A symbolic link beside the directory of a box, whose target is the box's claim: made in one step with its content,
/// before the directory, and removed after it.
fn claim_path(dir: &Path) -> PathBuf {
    let mut name = OsString::from(".claim-");
    name.push(dir.file_name().unwrap_or_default());
    dir.with_file_name(name)
}

/// Two boxes must never share a directory, so this one must be new.
pub(super) fn create_directory(dir: &Path, claim: &str) -> Result<()> {
    let explain = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => Error::new(
            ErrorKind::AlreadyExists,
            format!("a sandbox of this name exists already: {}", dir.display()),
        )
        .with_field("name"),
        _ => Error::io(format_args!("creating {}", dir.display()), error),
    };
    let claim_path = claim_path(dir);
    crash_point!("claim");
    std::os::unix::fs::symlink(claim, &claim_path).map_err(explain)?;
    crash_point!("claimed");
    fs::create_dir(dir).map_err(|error| {
        let _ = fs::remove_file(&claim_path);
        explain(error)
    })?;
    crash_point!("directory");
    Ok(())
}

/// Who a box is deleted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OwnerIs {
    Alive {
        /// It started programs, so there may be something to search all processes for.
        started: bool,
    },
    /// Killed at any moment: between fork and exec, too.
    Dead,
}

/// Kills what still runs for the box of this directory and claim, and removes the directory. A directory that is gone,
/// or has become another box's, is a success; one that does not look like a box of this name is refused.
pub(crate) async fn delete_directory(name: &str, dir: &Path, claim: &str, owner: OwnerIs) -> Result<()> {
    let is_box = dir.is_absolute()
        && dir.file_name().is_some_and(|file| file == name)
        && dir.parent().is_some_and(|parent| parent.ends_with(PARENT));
    if !is_box {
        return Err(Error::invalid_argument(
            "dir",
            format!("{} is not the directory of a sandbox", dir.display()),
        ));
    }
    let (dir, claim) = (dir.to_path_buf(), claim.to_owned());
    blocking(move || {
        let claim_path = claim_path(&dir);
        match fs::read_link(&claim_path) {
            Ok(owner) if owner == Path::new(&claim) => {}
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::io(format_args!("reading {}", claim_path.display()), error)),
        }
        #[cfg(all(target_os = "linux", not(portable_processes)))]
        if owner != (OwnerIs::Alive { started: false }) {
            crate::subprocess::marker::kill_marked(MARKER, &dir)?;
        }
        crash_point!("killed");
        files::remove_box(&dir)?;
        crash_point!("removed");
        // What its owner had forked and not yet executed shows the marker only now.
        #[cfg(all(target_os = "linux", not(portable_processes)))]
        if owner == OwnerIs::Dead {
            crate::subprocess::marker::kill_marked(MARKER, &dir)?;
        }
        match fs::remove_file(&claim_path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format_args!("removing {}", claim_path.display()), error))
            }
            _ => {
                crash_point!("unclaimed");
                Ok(())
            }
        }
    })
    .await
}
