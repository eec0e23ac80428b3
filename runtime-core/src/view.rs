//! [`View`]: what one does in a box.

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, Value};
use tracing::Instrument;
use tracing::field::Empty;

use crate::capability::{Capabilities, Expose};
use crate::command::{Command, Env, Exec, Output, StdinMode, check_path};
use crate::error::{Error, ErrorKind, Result};
use crate::files::{ByteStream, Content, DirEntry, Metadata, WriteOptions};
use crate::process::Process;
use crate::sandbox::{Phase, Shared};
use crate::tree;

/// Bytes that [`View::read`] returns at most: 1 GiB. Larger files are read with [`View::open`] or
/// [`View::read_up_to`].
pub const DEFAULT_READ_LIMIT: u64 = 1 << 30;

/// How long [`View::alive`] waits for an answer.
const ALIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// A handle on a box: runs programs, moves files, reaches ports. Cheap to clone; cannot stop the box.
///
/// All operations fail with [`Phase`](ErrorKind::Phase) once the box is stopped, and with
/// [`SandboxGone`](ErrorKind::SandboxGone) when it is stopped while they run.
#[derive(Clone)]
pub struct View {
    pub(crate) shared: Arc<Shared>,
    env: Arc<Env>,
}

impl View {
    pub(crate) fn new(shared: Arc<Shared>, env: Env) -> Self {
        Self {
            shared,
            env: Arc::new(env),
        }
    }

    /// Another handle on the same box with other variables: `env` replaces this handle's, so that what belongs to one
    /// task neither leaks to another nor comes from it. Variables that the provider had set at creation are overridden
    /// per command.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) naming a bad variable.
    pub fn with_env(&self, env: Env) -> Result<View> {
        env.validate().map_err(|error| self.context(error, "with_env"))?;
        Ok(View {
            shared: self.shared.clone(),
            env: Arc::new(env),
        })
    }

    /// The provider's tag.
    pub fn provider(&self) -> &'static str {
        self.shared.runtime.provider()
    }

    /// Our name for the box.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The provider's id, once it is known. Kept after the box is gone.
    pub fn id(&self) -> Option<String> {
        self.shared.runtime.id()
    }

    /// The record of the box, for traces: every field of its configuration, `type`, `name`, `id`, `workdir`, and what
    /// the provider learned. No secret.
    pub fn info(&self) -> Map<String, Value> {
        self.shared.info()
    }

    /// What this box can do.
    pub fn capabilities(&self) -> Capabilities {
        self.shared.runtime.capabilities()
    }

    /// Absolute working directory in the box.
    pub fn workdir(&self) -> PathBuf {
        self.shared.runtime.workdir()
    }

    /// Where the box is in its life.
    pub fn phase(&self) -> Phase {
        self.shared.phase()
    }

    /// Runs a short program to its end. A non-zero exit is a result.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// # use runtime_core::{Sandbox, subprocess::SubprocessConfig};
    /// # let sandbox = Sandbox::builder(SubprocessConfig::default()).provision().await?;
    /// use std::time::Duration;
    /// use runtime_core::{Command, ErrorKind};
    ///
    /// let slow = Command::new(["sh", "-c", "echo started; sleep 60"]).timeout(Duration::from_millis(300));
    /// let error = sandbox.run(slow).await.unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Timeout);
    /// assert_eq!(&error.partial_output().unwrap().stdout.bytes[..], b"started\n");
    /// # sandbox.stop().await?;
    /// # Ok::<(), runtime_core::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), [`ProgramNotFound`](ErrorKind::ProgramNotFound),
    /// [`ProgramNotExecutable`](ErrorKind::ProgramNotExecutable), [`Timeout`](ErrorKind::Timeout) with the partial
    /// output, [`SandboxGone`](ErrorKind::SandboxGone).
    ///
    /// # Cancellation
    /// Dropping the future kills the program's process group.
    pub async fn run(&self, command: impl Into<Command>) -> Result<Output> {
        self.run_as("run", command.into(), false).await
    }

    /// Runs the main program of a rollout. As [`run`](Self::run), but it survives what the provider's transport does to
    /// a long command, and nobody ever starts it twice.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancellation
    /// As [`run`](Self::run).
    pub async fn run_program(&self, command: impl Into<Command>) -> Result<Output> {
        self.run_as("run_program", command.into(), true).await
    }

    async fn run_as(&self, operation: &'static str, command: Command, program: bool) -> Result<Output> {
        let (running, exec, collect) = self.prepare(operation, command)?;
        let runtime = &self.shared.runtime;
        let ended = async {
            let _running = running;
            let output = match program {
                false => runtime.run(exec, collect).await?,
                true => runtime.run_program(exec, collect).await?,
            };
            let span = tracing::Span::current();
            span.record("bytes", output.stdout.bytes.len() + output.stderr.bytes.len());
            span.record("status", tracing::field::display(output.status));
            Ok(output)
        };
        self.operate(operation, ended).await
    }

    /// Starts a live process: stdin, stdout and stderr are pipes.
    ///
    /// # Errors
    /// As [`run`](Self::run), and [`Unsupported`](ErrorKind::Unsupported) without
    /// [`Capabilities::live_processes`].
    ///
    /// # Cancellation
    /// A process that was started by the time the future is dropped is killed. Dropping the [`Process`] kills it.
    pub async fn spawn(&self, command: impl Into<Command>) -> Result<Process> {
        if !self.capabilities().live_processes {
            return Err(self.context(Error::unsupported("this provider has no live processes"), "spawn"));
        }
        let (running, mut exec, _) = self.prepare("spawn", command.into())?;
        exec.stdin = StdinMode::Piped;
        let mut process = self.operate("spawn", self.shared.runtime.spawn(exec)).await?;
        process.attach(running);
        Ok(process)
    }

    /// Starts a server that lives until the box is stopped. Its output goes to `log`, a path in the box, relative to
    /// the workdir.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancellation
    /// The server may have been started; it ends with the box.
    pub async fn run_background(&self, command: impl Into<Command>, log: impl AsRef<Path>) -> Result<()> {
        let log = self.resolve("run_background", log.as_ref())?;
        let (running, mut exec, _) = self.prepare("run_background", command.into())?;
        // Servers outlive the phase that starts them, so they are not counted beyond their start.
        drop(running);
        exec.stdin = StdinMode::Null;
        self.operate("run_background", self.shared.runtime.spawn_background(exec, &log))
            .await
    }

    /// Asks whether the box still runs programs. Bounded: no answer in 30 s is an error.
    ///
    /// # Errors
    /// Why it does not, or could not be asked.
    pub async fn alive(&self) -> Result<()> {
        self.check("alive", false)?;
        let answer = async {
            match tokio::time::timeout(ALIVE_TIMEOUT, self.shared.runtime.alive()).await {
                Ok(answer) => answer,
                Err(_) => Err(Error::new(
                    ErrorKind::Timeout,
                    format!("no answer within {ALIVE_TIMEOUT:?}"),
                )),
            }
        };
        self.operate("alive", answer).await
    }

    /// Reads a whole file of at most 1 GiB.
    ///
    /// # Errors
    /// As [`read_up_to`](Self::read_up_to).
    pub async fn read(&self, path: impl AsRef<Path>) -> Result<Bytes> {
        self.read_up_to(path, DEFAULT_READ_LIMIT).await
    }

    /// Reads a whole file of at most `max_bytes`. The limit is applied in the box: a file whose size an untrusted
    /// program chose costs no more than that. FIFOs and devices never hang it.
    ///
    /// # Errors
    /// [`LimitExceeded`](ErrorKind::LimitExceeded) if there is more, [`NotFound`](ErrorKind::NotFound),
    /// [`WrongFileType`](ErrorKind::WrongFileType) for a directory.
    pub async fn read_up_to(&self, path: impl AsRef<Path>, max_bytes: u64) -> Result<Bytes> {
        let path = self.resolve("read", path.as_ref())?;
        let operation = format!("read {}", path.display());
        self.check(operation.clone(), false)?;
        let read = async {
            // One byte more than allowed tells an exact fit from an overflow.
            let content = self.shared.runtime.read(&path, max_bytes.saturating_add(1)).await?;
            if content.len() as u64 > max_bytes {
                return Err(Error::new(
                    ErrorKind::LimitExceeded,
                    format!("more than {max_bytes} bytes"),
                ));
            }
            tracing::Span::current().record("bytes", content.len());
            Ok(content)
        };
        self.operate(operation, read).await
    }

    /// Opens a file for streaming, without a limit on its size. For regular files.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound), [`WrongFileType`](ErrorKind::WrongFileType).
    pub async fn open(&self, path: impl AsRef<Path>) -> Result<ByteStream> {
        let path = self.resolve("open", path.as_ref())?;
        let operation = format!("open {}", path.display());
        self.check(operation.clone(), false)?;
        self.operate(operation, self.shared.runtime.open(&path, None)).await
    }

    /// Writes a file, creating missing parents, in one step where the provider can. A relative path is under the
    /// workdir.
    ///
    /// # Errors
    /// What kept it from being written.
    ///
    /// # Cancellation
    /// Where the provider writes atomically, the old content or the new; else perhaps a part of the new.
    pub async fn write(&self, path: impl AsRef<Path>, content: impl Into<Content>) -> Result<()> {
        self.write_with(path, content, WriteOptions::default()).await
    }

    /// As [`write`](Self::write), with permission bits or in place.
    ///
    /// # Errors
    /// As [`write`](Self::write), and [`InvalidArgument`](ErrorKind::InvalidArgument) for a mode above `0o7777`.
    ///
    /// # Cancellation
    /// As [`write`](Self::write).
    pub async fn write_with(
        &self,
        path: impl AsRef<Path>,
        content: impl Into<Content>,
        options: WriteOptions,
    ) -> Result<()> {
        let path = self.resolve("write", path.as_ref())?;
        let operation = format!("write {}", path.display());
        if let Some(mode) = options.mode.filter(|mode| *mode > 0o7777) {
            let error = Error::invalid_argument("mode", format!("{mode:#o} has more than the twelve permission bits"));
            return Err(self.context(error, operation));
        }
        self.check(operation.clone(), false)?;
        let content = content.into();
        let bytes = match &content {
            Content::Bytes(bytes) => Some(bytes.len()),
            Content::Stream(_) => None,
        };
        let write = async {
            tracing::Span::current().record("bytes", bytes);
            self.shared.runtime.write(&path, content, options).await
        };
        self.operate(operation, write).await
    }

    /// Facts about a path. A symbolic link is not followed.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) and what kept it from being looked at.
    pub async fn stat(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        let path = self.resolve("stat", path.as_ref())?;
        let operation = format!("stat {}", path.display());
        self.check(operation.clone(), false)?;
        self.operate(operation, self.shared.runtime.stat(&path)).await
    }

    /// The entries of a directory, sorted by name.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound), [`WrongFileType`](ErrorKind::WrongFileType).
    pub async fn list(&self, path: impl AsRef<Path>) -> Result<Vec<DirEntry>> {
        let path = self.resolve("list", path.as_ref())?;
        let operation = format!("list {}", path.display());
        self.check(operation.clone(), false)?;
        let mut entries = self.operate(operation, self.shared.runtime.list(&path)).await?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Creates a directory and its parents; an existing one is fine.
    ///
    /// # Errors
    /// What kept it from being created.
    pub async fn create_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = self.resolve("create_dir", path.as_ref())?;
        let operation = format!("create_dir {}", path.display());
        self.check(operation.clone(), false)?;
        self.operate(operation, self.shared.runtime.create_dir(&path)).await
    }

    /// Removes a file, a symbolic link or an empty directory.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound), and what kept it from being removed.
    pub async fn remove(&self, path: impl AsRef<Path>) -> Result<()> {
        self.remove_path(path.as_ref(), false).await
    }

    /// Removes a file, a symbolic link or a directory with all that is in it. Symbolic links in it are not followed.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub async fn remove_all(&self, path: impl AsRef<Path>) -> Result<()> {
        self.remove_path(path.as_ref(), true).await
    }

    async fn remove_path(&self, path: &Path, recursive: bool) -> Result<()> {
        let path = self.resolve("remove", path)?;
        let operation = format!("remove {}", path.display());
        self.check(operation.clone(), false)?;
        // No name at the end: the root, or a `..` that may lead to it.
        if path.file_name().is_none() {
            let error = Error::invalid_argument("path", "neither the root nor a path that ends in `..` is removed");
            return Err(self.context(error, operation));
        }
        self.operate(operation, self.shared.runtime.remove(&path, recursive))
            .await
    }

    /// Copies a directory of this host into the box: files, directories and symbolic links with their modes. What is
    /// there already is overwritten, what else is there stays.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) and [`WrongFileType`](ErrorKind::WrongFileType) for `local`, and what kept it
    /// from being read or written.
    ///
    /// # Cancellation
    /// A part may have been copied.
    pub async fn upload_dir(&self, local: impl AsRef<Path>, dir: impl AsRef<Path>) -> Result<()> {
        let dir = self.resolve("upload", dir.as_ref())?;
        let operation = format!("upload {}", dir.display());
        self.check(operation.clone(), false)?;
        let upload = async {
            let (stream, packed) = tree::pack(local.as_ref().to_path_buf())?;
            let uploaded = self.shared.runtime.upload_tar(&dir, stream).await;
            // What broke the packing is the cause of what it did to the upload.
            packed.finish().await?;
            uploaded
        };
        self.operate(operation, upload).await
    }

    /// Unpacks a tar stream into a directory of the box.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) naming the entry for an archive that leaves the directory: an
    /// absolute path, `..`, an entry below a symbolic link of the archive, a hard link or device. Nothing of the entry
    /// or of later ones is written.
    ///
    /// # Cancellation
    /// A part may have been unpacked.
    pub async fn upload_tar(&self, tar: ByteStream, dir: impl AsRef<Path>) -> Result<()> {
        let dir = self.resolve("upload", dir.as_ref())?;
        let operation = format!("upload {}", dir.display());
        self.check(operation.clone(), false)?;
        let upload = async {
            let (stream, checked) = tree::check(tar);
            let uploaded = self.shared.runtime.upload_tar(&dir, stream).await;
            checked.finish().await?;
            uploaded
        };
        self.operate(operation, upload).await
    }

    /// Copies a directory of the box to this host: files, directories and symbolic links with their modes, setuid and
    /// device entries left out. `local` is created if missing. The box is not trusted: nothing is written outside
    /// `local`, through links neither.
    ///
    /// # Errors
    /// [`Protocol`](ErrorKind::Protocol) for an archive that tries to leave `local`; otherwise what kept it from being
    /// read or written.
    ///
    /// # Cancellation
    /// A part may have been copied.
    pub async fn download_dir(&self, dir: impl AsRef<Path>, local: impl AsRef<Path>) -> Result<()> {
        let dir = self.resolve("download", dir.as_ref())?;
        let operation = format!("download {}", dir.display());
        self.check(operation.clone(), false)?;
        let download = async {
            let stream = self.shared.runtime.download_tar(&dir).await?;
            tree::unpack(stream, local.as_ref().to_path_buf(), ()).await
        };
        self.operate(operation, download).await
    }

    /// Packs a directory of the box as a tar stream, entry paths relative to it. The content is the box's and is not
    /// checked; [`download_dir`](Self::download_dir) unpacks safely.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound), [`WrongFileType`](ErrorKind::WrongFileType).
    pub async fn download_tar(&self, dir: impl AsRef<Path>) -> Result<ByteStream> {
        let dir = self.resolve("download", dir.as_ref())?;
        let operation = format!("download {}", dir.display());
        self.check(operation.clone(), false)?;
        self.operate(operation, self.shared.runtime.download_tar(&dir)).await
    }

    /// A URL on which `port` of the box is reached from this host.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) for a port that this provider cannot expose.
    pub async fn expose(&self, port: u16) -> Result<String> {
        self.check("expose", false)?;
        let supported = match self.capabilities().expose {
            Expose::Nothing => false,
            Expose::Port(only) => only == port,
            Expose::AnyPort => true,
        };
        if port == 0 {
            return Err(self.context(Error::invalid_argument("port", "0 is no port"), "expose"));
        }
        if !supported {
            let error = Error::unsupported(format!("this provider cannot expose port {port}"));
            return Err(self.context(error, "expose"));
        }
        self.operate("expose", self.shared.runtime.expose(port)).await
    }

    /// The port that the box forwards outward by itself, fixed at creation.
    pub fn published_port(&self) -> Option<u16> {
        self.shared.runtime.published_port()
    }

    /// The URL that a program in the box uses for a URL of this host, such as that of a service on loopback, and the
    /// way to it. In a box with a network policy, ask before [`prepare_execution`](crate::Sandbox::prepare_execution)
    /// and pass the host's URL among its routes: what is no route cannot be reached after it.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a URL that cannot be translated, or whose place the policy
    /// in force keeps out of reach.
    pub async fn host_url(&self, url: &str) -> Result<String> {
        self.check("host_url", false)?;
        self.operate("host_url", self.shared.runtime.host_url(url)).await
    }

    /// What the box asked our proxy and relays for, and what became of it: refused destinations with the rule that would
    /// admit each, and what was used as a ready allowlist. `None` where a policy is not enforced by us. Stays readable
    /// after the box is gone.
    #[cfg(feature = "egress")]
    pub fn egress_log(&self) -> Option<crate::egress::EgressLog> {
        self.shared.runtime.egress_log()
    }

    /// Extends the provider's own lifetime of the box to at least this long from now, where it has one.
    ///
    /// # Errors
    /// What kept it from being extended.
    pub async fn extend_lifetime(&self, lifetime: Duration) -> Result<()> {
        self.check("extend_lifetime", false)?;
        let seconds = lifetime.as_secs() + u64::from(lifetime.subsec_nanos() > 0);
        self.operate("extend_lifetime", self.shared.runtime.extend_lifetime(seconds))
            .await
    }

    /// Pauses the box.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) unless [`Capabilities::pause`].
    pub async fn pause(&self) -> Result<()> {
        self.check("pause", false)?;
        self.operate("pause", self.shared.runtime.pause()).await
    }

    /// Resumes a paused box.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) unless [`Capabilities::pause`].
    pub async fn resume(&self) -> Result<()> {
        self.check("resume", false)?;
        self.operate("resume", self.shared.runtime.resume()).await
    }

    /// Checks a command against what can be known before any I/O, and readies it.
    fn prepare(
        &self,
        operation: &'static str,
        command: Command,
    ) -> Result<(crate::sandbox::Running, Exec, crate::command::Collect)> {
        let checked = command
            .validate()
            .and_then(|()| {
                let (exec, collect) = command.into_parts(&self.env, &self.workdir());
                check_against(&self.capabilities(), &exec)?;
                Ok((exec, collect))
            })
            .and_then(|(exec, collect)| Ok((self.shared.program()?, exec, collect)));
        checked.map_err(|error| self.context(error, operation))
    }

    fn resolve(&self, operation: &'static str, path: &Path) -> Result<PathBuf> {
        check_path("path", path).map_err(|error| self.context(error, operation))?;
        Ok(self.workdir().join(path))
    }

    fn check(&self, operation: impl Into<Cow<'static, str>>, starts_program: bool) -> Result<()> {
        self.shared
            .check_usable(starts_program)
            .map_err(|error| self.context(error, operation))
    }

    /// Runs one operation: under a span, given up when the box is stopped, its error put in context.
    async fn operate<T>(
        &self,
        operation: impl Into<Cow<'static, str>>,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let operation = operation.into();
        let span = tracing::debug_span!(
            "sandbox",
            operation = &*operation,
            provider = self.provider(),
            sandbox = self.name(),
            bytes = Empty,
            status = Empty,
            outcome = Empty,
        );
        let watched = async {
            tokio::select! {
                // The stop first: it ends programs by a signal, which must not be told as how they ended by themselves.
                biased;
                () = self.shared.stop_requested() => {
                    Err(Error::new(ErrorKind::SandboxGone, "the sandbox was stopped while this ran"))
                }
                result = work => result,
            }
        };
        let result = watched.instrument(span.clone()).await;
        match result {
            Ok(value) => {
                span.record("outcome", "ok");
                Ok(value)
            }
            Err(error) => {
                span.record("outcome", error.kind().as_str());
                Err(self.context(error, operation))
            }
        }
    }

    pub(crate) fn context(&self, error: Error, operation: impl Into<Cow<'static, str>>) -> Error {
        error
            .with_operation(operation)
            .with_provider(self.provider())
            .with_sandbox(self.name(), self.id())
    }
}

/// Scripts are prepared in a box through its own operations; see [`uv`](crate::uv).
#[async_trait::async_trait]
impl crate::uv::ScriptHost for View {
    async fn write(&self, path: &Path, bytes: Bytes, mode: u32) -> Result<()> {
        self.write_with(path, bytes, WriteOptions::mode(mode)).await
    }

    async fn read(&self, path: &Path, max_bytes: u64) -> Result<Bytes> {
        self.read_up_to(path, max_bytes).await
    }

    async fn run(&self, command: Command) -> Result<Output> {
        View::run(self, command).await
    }
}

/// Refuses what the provider cannot carry, before any I/O.
fn check_against(capabilities: &Capabilities, exec: &Exec) -> Result<()> {
    if !capabilities.non_utf8_argv {
        if let Some(index) = exec.argv.iter().position(|arg| arg.to_str().is_none()) {
            return Err(Error::invalid_argument(
                format!("argv[{index}]"),
                "this provider takes UTF-8 arguments only",
            ));
        }
        if let Some((name, _)) = exec
            .env
            .iter()
            .find(|(name, value)| name.to_str().is_none() || value.to_str().is_none())
        {
            let field = format!("env.{}", name.to_string_lossy());
            return Err(Error::invalid_argument(
                field,
                "this provider takes UTF-8 variables only",
            ));
        }
    }
    if let Some(limit) = capabilities.max_argument_bytes {
        if let Some(index) = exec.argv.iter().position(|arg| arg.len() as u64 > limit) {
            return Err(Error::invalid_argument(
                format!("argv[{index}]"),
                format!(
                    "an argument has at most {limit} bytes here, not {}",
                    exec.argv[index].len()
                ),
            ));
        }
        if let Some((name, _)) = exec
            .env
            .iter()
            .find(|(name, value)| (name.len() + value.len() + 1) as u64 > limit)
        {
            return Err(Error::invalid_argument(
                format!("env.{}", name.to_string_lossy()),
                format!("a variable has at most {limit} bytes here, name included"),
            ));
        }
    }
    if let Some(limit) = capabilities.max_argv_bytes {
        let argv: u64 = exec.argv.iter().map(|arg| arg.len() as u64 + 1).sum();
        let env: u64 = exec
            .env
            .iter()
            .map(|(name, value)| (name.len() + value.len()) as u64 + 2)
            .sum();
        if argv + env > limit {
            return Err(Error::invalid_argument(
                "argv",
                format!("argv and variables have at most {limit} bytes here, not {}", argv + env),
            ));
        }
    }
    Ok(())
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View")
            .field("provider", &self.provider())
            .field("name", &self.name())
            .field("id", &self.id())
            .field("phase", &self.phase())
            .field("env", &self.env)
            .finish()
    }
}
