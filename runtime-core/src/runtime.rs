//! What a provider implements: the raw operations on one box, and nothing that is the same for everybody.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Map, Value};
use tokio::io::AsyncReadExt;

use crate::cache::CacheDir;
use crate::capability::Capabilities;
use crate::collect::collect;
use crate::command::{Collect, Env, Exec, Output};
use crate::error::{Error, Result};
use crate::files::{ByteStream, Content, DirEntry, Metadata, WriteOptions, stream_error};
use crate::network::{Policy, Routes};
use crate::process::Process;
use crate::scope::RunScope;

/// Who a box is: decided by [`Sandbox`](crate::Sandbox) before a provider builds its [`Runtime`].
#[derive(Debug, Clone)]
pub struct BoxSpec {
    /// Our name for the box, unique on this account as far as we can make it: the reaper finds the box by it.
    pub name: String,
    /// The run that the box belongs to; tagged on the box.
    pub run_scope: RunScope,
    /// The sandbox's variables, for providers that pass them at creation too. Never written to disk.
    pub env: Env,
    /// Where files that outlive the process may be kept.
    pub cache: CacheDir,
}

/// One box of one provider. Object safe; every method takes `&self`.
///
/// [`Sandbox`](crate::Sandbox) calls it with arguments that are checked, an environment that is layered and paths that
/// are absolute, and only while the box is in a phase that allows the call. It adds phases, cancellation safety,
/// limits, leases and tracing, so that a provider does not.
///
/// # Cancellation
/// Any future may be dropped at any await. `create` is driven to its end in the background when its caller goes away. It
/// is dropped only when it outlasts the boot timeout, when the box is being stopped and it takes longer than some
/// seconds more, or when the executor itself goes away; `delete` follows. A dropped `run` must kill what it started, as far as the
/// provider can.
/// In a box on this machine, a dropped change of files has ended before the next operation on the box begins: what
/// comes after has the last word.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// The provider's tag, such as `docker`.
    fn provider(&self) -> &'static str;

    /// The provider's id of the box: set as soon as it is known, and kept after the box is gone.
    fn id(&self) -> Option<String>;

    /// What this box can do.
    fn capabilities(&self) -> Capabilities;

    /// Absolute working directory in the box. Final once `create` has returned.
    fn workdir(&self) -> PathBuf;

    /// Facts about the box for its record, such as a template's name. Never a secret.
    fn details(&self) -> Map<String, Value> {
        Map::new()
    }

    /// What somebody needs, besides credentials, to find and delete this box after our death: endpoint, region,
    /// socket path. Never a secret. What is unique to this box, such as the key of its creation, belongs here too: leases
    /// of the same name whose contexts differ are taken for those of different boxes.
    fn lease_context(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// Creates the box under the name of its [`BoxSpec`], ready for commands, its workdir in place, its network open.
    ///
    /// # Errors
    /// A failed create may leave something behind: the caller follows it with [`delete`](Self::delete).
    async fn create(&self) -> Result<()>;

    /// Deletes the box by id, or by name where the id is not known. A box that is gone, or never was, is a success.
    /// Works on any executor, may be called more than once, and has a deadline of its own.
    ///
    /// # Errors
    /// Only when the box may still exist.
    async fn delete(&self) -> Result<()>;

    /// Starts a program with piped stdout and stderr, and stdin as [`Exec::stdin`] says.
    ///
    /// # Errors
    /// [`ProgramNotFound`](crate::ErrorKind::ProgramNotFound),
    /// [`ProgramNotExecutable`](crate::ErrorKind::ProgramNotExecutable), or what kept it from starting.
    async fn spawn(&self, exec: Exec) -> Result<Process>;

    /// Runs a program to its end. The default spawns it and collects its output.
    ///
    /// # Errors
    /// As [`spawn`](Self::spawn), and [`Timeout`](crate::ErrorKind::Timeout) with the partial output.
    async fn run(&self, exec: Exec, options: Collect) -> Result<Output> {
        collect(self.spawn(exec).await?, options).await
    }

    /// Runs the main program: as [`run`](Self::run), but it must survive what the provider's transport does to a long
    /// command, and must never be started twice.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    async fn run_program(&self, exec: Exec, options: Collect) -> Result<Output> {
        self.run(exec, options).await
    }

    /// Starts a server that lives until the box is deleted, stdin empty, both outputs appended to `log` (an absolute
    /// path in the box, created if missing).
    ///
    /// # Errors
    /// As [`spawn`](Self::spawn).
    async fn spawn_background(&self, exec: Exec, log: &Path) -> Result<()>;

    /// Asks whether the box still runs programs.
    ///
    /// # Errors
    /// Why it does not, or could not be asked.
    async fn alive(&self) -> Result<()>;

    /// Opens a file for reading, at most `limit` bytes of it; the limit is applied in the box.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound), [`WrongFileType`](crate::ErrorKind::WrongFileType) for a directory,
    /// and for a FIFO or device that is not readable within bounds.
    async fn open(&self, path: &Path, limit: Option<u64>) -> Result<ByteStream>;

    /// Reads the first `limit` bytes of a file into memory. The default reads what [`open`](Self::open) gives.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    async fn read(&self, path: &Path, limit: u64) -> Result<Bytes> {
        read_to_end(self.open(path, Some(limit)).await?, limit).await
    }

    /// Writes a file, creating missing parent directories.
    ///
    /// # Errors
    /// What kept it from being written. Without [`WriteOptions::atomic`] a part of it may have been.
    async fn write(&self, path: &Path, content: Content, options: WriteOptions) -> Result<()>;

    /// Facts about a path; a symbolic link is not followed.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) and what kept it from being looked at.
    async fn stat(&self, path: &Path) -> Result<Metadata>;

    /// The entries of a directory in no particular order, without `.` and `..`.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound), [`WrongFileType`](crate::ErrorKind::WrongFileType).
    async fn list(&self, path: &Path) -> Result<Vec<DirEntry>>;

    /// Creates a directory and its parents; an existing one is fine.
    ///
    /// # Errors
    /// What kept it from being created.
    async fn create_dir(&self, path: &Path) -> Result<()>;

    /// Removes a file, a symbolic link, or a directory (`recursive`, or empty).
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound), and what kept it from being removed.
    async fn remove(&self, path: &Path, recursive: bool) -> Result<()>;

    /// Unpacks a tar stream into a directory, created if missing. The stream was checked: no entry leaves the
    /// directory.
    ///
    /// # Errors
    /// What kept it from being unpacked; a part of it may have been.
    async fn upload_tar(&self, dir: &Path, tar: ByteStream) -> Result<()>;

    /// Packs a directory as a tar stream, entry paths relative to it, modes and symbolic links kept.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound), [`WrongFileType`](crate::ErrorKind::WrongFileType).
    async fn download_tar(&self, dir: &Path) -> Result<ByteStream>;

    /// A URL on which `port` of the box is reached from this host.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) for a port that this provider cannot expose.
    async fn expose(&self, port: u16) -> Result<String>;

    /// The port that the box forwards outward by itself, fixed at creation.
    fn published_port(&self) -> Option<u16> {
        None
    }

    /// The URL that a program in the box uses for a URL of this host, and the way to it: a service on this host's
    /// loopback may need a listener inside the box. The default changes nothing.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a URL that cannot be translated.
    async fn host_url(&self, url: &str) -> Result<String> {
        Ok(url.to_owned())
    }

    /// Opens the network for trusted setup. Called when a restricted box is to be set up again.
    ///
    /// # Errors
    /// What kept it closed.
    async fn open_network(&self) -> Result<()> {
        Ok(())
    }

    /// Closes the network but for what `policy` allows and `routes` need. Returns only when it is in force.
    ///
    /// # Errors
    /// [`NetworkPolicy`](crate::ErrorKind::NetworkPolicy): it is not in force, and no program may start.
    async fn restrict_network(&self, policy: &Policy, routes: &Routes) -> Result<()> {
        let _ = (policy, routes);
        Err(Error::unsupported("this provider cannot restrict the network"))
    }

    /// What the box asked its proxy and relays for, and what became of it, where there are any of ours.
    #[cfg(feature = "egress")]
    fn egress_log(&self) -> Option<crate::egress::EgressLog> {
        None
    }

    /// Extends the provider's own lifetime of the box to at least `seconds` from now, where it has one.
    ///
    /// # Errors
    /// What kept it from being extended.
    async fn extend_lifetime(&self, seconds: u64) -> Result<()> {
        let _ = seconds;
        Ok(())
    }

    /// Pauses the box.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) unless [`Capabilities::pause`].
    async fn pause(&self) -> Result<()> {
        Err(Error::unsupported("this provider cannot pause a box"))
    }

    /// Resumes a paused box.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) unless [`Capabilities::pause`].
    async fn resume(&self) -> Result<()> {
        Err(Error::unsupported("this provider cannot resume a box"))
    }
}

/// Reads at most `limit` bytes of a stream into memory.
pub(crate) async fn read_to_end(stream: ByteStream, limit: u64) -> Result<Bytes> {
    let mut content = Vec::new();
    stream
        .take(limit)
        .read_to_end(&mut content)
        .await
        .map_err(|error| stream_error("reading", error))?;
    Ok(Bytes::from(content))
}
