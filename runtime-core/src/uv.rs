//! Python scripts that declare their own dependencies (PEP 723), prepared by `uv` while the network is still open.
//!
//! A script is stored in the box under the digest of its content, because `uv` keys a script's environment by the
//! script's path: the same content finds the same environment again. [`Scripts`] remembers what is prepared in one box,
//! prepares each script once however many ask, and looks again before it relies on that: a program that ran in between
//! may have changed the file.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use tokio::sync::Mutex as AsyncMutex;

use crate::command::{Command, Env, Output};
use crate::error::{Boundary, Error, ErrorKind, Result};
use crate::names::{hex, random_id};
use crate::text::tail;

/// Where scripts are kept in a box that has a file system of its own.
pub const BOX_SCRIPTS_DIR: &str = "/tmp/vf-scripts";
/// Where scripts of boxes on this machine's file system are kept, under the [cache](crate::cache::CacheDir).
pub const CACHE_SCRIPTS_DIR: &str = "runtimes/scripts";
/// Where the standalone installer of `uv` is fetched from, unless told otherwise.
pub const INSTALLER_URL: &str = "https://astral.sh/uv/install.sh";
/// How long a preparation may take, unless told otherwise: it downloads interpreters and packages.
pub const PREPARE_TIMEOUT: Duration = Duration::from_secs(900);

const PREPARE: &str = include_str!("uv/prepare.sh");
const ACTIVATE: &str = include_str!("uv/activate.sh");
/// Renames $1 to $2, whatever $2 is by now.
const PUBLISH: &str = "if [ -d \"$2\" ]; then rm -rf -- \"$2\"; fi; exec mv -f -- \"$1\" \"$2\"";
/// Bytes of standard error in an error message.
const SHOWN_STDERR: usize = 2000;

/// The few things that a box must do for scripts.
#[async_trait]
pub trait ScriptHost: Send + Sync {
    /// Writes a file, creating its parents, with these permission bits.
    async fn write(&self, path: &Path, bytes: Bytes, mode: u32) -> Result<()>;

    /// Reads a whole file of at most `max_bytes`; a longer one is [`LimitExceeded`](ErrorKind::LimitExceeded). Must not
    /// hang on a FIFO or a device.
    async fn read(&self, path: &Path, max_bytes: u64) -> Result<Bytes>;

    /// Runs a command to its end, with the box's environment under the command's.
    async fn run(&self, command: Command) -> Result<Output>;
}

/// The text of a script and its digest. Cheap to clone.
///
/// ```
/// use runtime_core::uv::Script;
///
/// let script = Script::new("# /// script\n# dependencies = []\n# ///\nprint('hi')\n");
/// assert_eq!(script.digest().len(), 64);
/// assert_eq!(script.path_in("/tmp/vf-scripts").extension().unwrap(), "py");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Script {
    bytes: Bytes,
    digest: Arc<str>,
}

impl Script {
    /// A script with exactly these bytes.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let digest = hex(&Sha256::digest(&bytes)).into();
        Self { bytes, digest }
    }

    /// The bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// SHA-256 of the bytes in lowercase hex digits.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Where the script is stored under `dir`.
    pub fn path_in(&self, dir: impl AsRef<Path>) -> PathBuf {
        dir.as_ref().join(format!("{}.py", self.digest))
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Script")
            .field("digest", &self.digest)
            .field("bytes", &self.bytes.len())
            .finish()
    }
}

/// A script that can run without a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedScript {
    path: PathBuf,
    interpreter: PathBuf,
    venv: PathBuf,
}

impl PreparedScript {
    /// The script's path in the box.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The Python interpreter of the script's environment.
    pub fn interpreter(&self) -> &Path {
        &self.interpreter
    }

    /// The script's environment.
    pub fn venv(&self) -> &Path {
        &self.venv
    }

    /// What to run; the script's own arguments go behind it.
    ///
    /// With `activate`, programs that the script starts find the environment's own programs first, and `uv`. Without,
    /// nothing of the environment leaks into them.
    pub fn argv(&self, activate: bool) -> Vec<OsString> {
        let mut argv: Vec<OsString> = Vec::with_capacity(7);
        if activate {
            argv.extend(["sh", "-c", ACTIVATE, "uv-script"].map(OsString::from));
            argv.push(self.venv.clone().into());
        }
        argv.push(self.interpreter.clone().into());
        argv.push(self.path.clone().into());
        argv
    }

    /// The command that runs the script, its environment activated, with these arguments.
    pub fn command<I, S>(&self, args: I) -> Command
    where
        I: IntoIterator<Item = S>,
        S: Into<OsString>,
    {
        Command::new(self.argv(true)).args(args)
    }

    /// From what `uv python find` printed.
    fn from_output(path: PathBuf, output: &Output) -> Result<Self> {
        let unusable = |line: &[u8]| {
            Error::new(
                ErrorKind::Protocol,
                format!(
                    "uv named no interpreter of a virtual environment, but {:?}",
                    tail(line, 200)
                ),
            )
            .with_boundary(Boundary::Other)
        };
        let stdout = output.stdout.bytes.trim_ascii_end();
        let line = stdout.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
        if !line.starts_with(b"/") {
            return Err(unusable(line));
        }
        let interpreter = box_path(line);
        match interpreter.parent().and_then(Path::parent) {
            Some(venv) => Ok(Self {
                path,
                venv: venv.to_path_buf(),
                interpreter,
            }),
            None => Err(unusable(line)),
        }
    }
}

#[cfg(unix)]
fn box_path(bytes: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    PathBuf::from(std::ffi::OsStr::from_bytes(bytes))
}

#[cfg(not(unix))]
fn box_path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(String::from_utf8_lossy(bytes).into_owned())
}

/// A static `uv` program to be shipped into boxes, so that none has to be installed from the network there. Cheap to
/// clone.
#[derive(Clone)]
pub struct UvBinary {
    bytes: Bytes,
    digest: Arc<str>,
}

impl UvBinary {
    /// The program's bytes, for the operating system and the processor of the box.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let digest = hex(&Sha256::digest(&bytes)).into();
        Self { bytes, digest }
    }

    /// The same, if the bytes have the pinned SHA-256 digest.
    ///
    /// # Errors
    /// [`InvalidConfig`](ErrorKind::InvalidConfig) naming `uv_sha256`.
    pub fn pinned(bytes: impl Into<Bytes>, sha256: &str) -> Result<Self> {
        let binary = Self::new(bytes);
        if binary.digest.eq_ignore_ascii_case(sha256) {
            return Ok(binary);
        }
        Err(Error::invalid_config(
            "uv_sha256",
            format!(
                "the uv binary has the digest {}, not the pinned {sha256}",
                binary.digest
            ),
        ))
    }

    /// Where the program is stored under `dir`.
    pub fn path_in(&self, dir: impl AsRef<Path>) -> PathBuf {
        dir.as_ref().join(format!("uv-{}", self.digest)).join("uv")
    }
}

impl fmt::Debug for UvBinary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UvBinary")
            .field("digest", &self.digest)
            .field("bytes", &self.bytes.len())
            .finish()
    }
}

/// Where a box gets `uv` from.
#[derive(Debug, Clone)]
pub enum UvSource {
    /// The box's own, else from `pip`, else from the standalone installer at this URL.
    Bootstrap {
        /// Where the installer is.
        installer_url: String,
    },
    /// This one.
    Binary(UvBinary),
}

impl Default for UvSource {
    fn default() -> Self {
        Self::Bootstrap {
            installer_url: INSTALLER_URL.into(),
        }
    }
}

type Memo = Arc<AsyncMutex<Option<PreparedScript>>>;

/// The scripts of one box, or of all boxes that share one scripts directory.
pub struct Scripts {
    dir: PathBuf,
    uv: UvSource,
    timeout: Duration,
    memos: Mutex<HashMap<Arc<str>, Memo>>,
    /// Held while the `uv` binary is checked and shipped.
    shipping: AsyncMutex<()>,
}

impl Scripts {
    /// Scripts in the directory `dir` of the box, an absolute path.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            uv: UvSource::default(),
            timeout: PREPARE_TIMEOUT,
            memos: Mutex::default(),
            shipping: AsyncMutex::default(),
        }
    }

    /// Takes `uv` from `source`.
    #[must_use]
    pub fn with_uv(mut self, source: UvSource) -> Self {
        self.uv = source;
        self
    }

    /// Ends a preparation after this long (default: [`PREPARE_TIMEOUT`]).
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Makes `script` ready to run without a network, or finds that it is.
    ///
    /// `env` is laid over the box's environment for the preparation, with `UV_OFFLINE=false` on top: a task may keep its
    /// program offline, but preparing is what has to go online.
    ///
    /// # Cancellation
    /// Dropping the future drops the command that is running in the box and lets the next caller prepare the script. An
    /// upload that was not published yet may stay behind as `<script>.<32 hex digits>.tmp`.
    ///
    /// # Errors
    /// Those of the host. An error at [`Boundary::Other`] (so that the caller's
    /// [`at_boundary`](Error::at_boundary) decides whose fault it is) with the end of the standard error, secrets of `env`
    /// blanked, when the preparation fails; [`Protocol`](ErrorKind::Protocol) when `uv` names no interpreter;
    /// [`Timeout`](ErrorKind::Timeout) when it takes too long.
    pub async fn prepare(&self, host: &dyn ScriptHost, script: &Script, env: &Env) -> Result<PreparedScript> {
        self.prepare_once(host, script, env)
            .await
            .map_err(|error| error.with_operation(format!("prepare script {}", script.digest)))
    }

    /// Prepares `script` if need be and runs it, activated, with `args`.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare) and of the host. A script that fails is an [`Output`].
    pub async fn run<I, S>(&self, host: &dyn ScriptHost, script: &Script, env: &Env, args: I) -> Result<Output>
    where
        I: IntoIterator<Item = S> + Send,
        S: Into<OsString>,
    {
        let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
        let prepared = self.prepare(host, script, env).await?;
        host.run(prepared.command(args).envs(env.iter())).await
    }

    async fn prepare_once(&self, host: &dyn ScriptHost, script: &Script, env: &Env) -> Result<PreparedScript> {
        let memo = self.memo(script);
        // Held to the end: whoever asks for the same script meanwhile waits and then finds it prepared.
        let mut memo = memo.lock().await;
        if let Some(prepared) = &*memo {
            if is_intact(host, script, prepared).await? {
                return Ok(prepared.clone());
            }
            tracing::warn!(digest = %script.digest, "uv: a prepared script was changed or removed; preparing it again");
            *memo = None;
        }
        let path = script.path_in(&self.dir);
        let (uv, installer_url) = match &self.uv {
            UvSource::Bootstrap { installer_url } => (PathBuf::new(), installer_url.as_str()),
            UvSource::Binary(binary) => (self.ship(host, binary).await?, ""),
        };
        let upload = upload_path(&path);
        host.write(&upload, script.bytes.clone(), 0o644).await?;
        let command = Command::shell(PREPARE)
            .arg("uv-prepare")
            .arg(upload)
            .arg(&path)
            .arg(uv)
            .arg(installer_url)
            .envs(env.iter())
            .env("UV_OFFLINE", "false")
            .timeout(self.timeout);
        let output = host.run(command).await?;
        if !output.success() {
            return Err(failure("the script's environment could not be prepared", &output, env));
        }
        let prepared = PreparedScript::from_output(path, &output)?;
        *memo = Some(prepared.clone());
        Ok(prepared)
    }

    fn memo(&self, script: &Script) -> Memo {
        let mut memos = self.memos.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(memos.entry(Arc::clone(&script.digest)).or_default())
    }

    /// Makes sure that the box has exactly this binary, and returns where.
    async fn ship(&self, host: &dyn ScriptHost, binary: &UvBinary) -> Result<PathBuf> {
        let path = binary.path_in(&self.dir);
        let _shipping = self.shipping.lock().await;
        // Where the box has no `sha256sum`, the binary goes there again: that costs time, reading it back would, too.
        let check = Command::new(["sha256sum", "--"]).arg(&path).timeout(self.timeout);
        let found = match host.run(check).await {
            Ok(output) if output.success() => output.stdout.bytes,
            Ok(_) => Bytes::new(),
            Err(error) if error.kind() == ErrorKind::ProgramNotFound => Bytes::new(),
            Err(error) => return Err(error),
        };
        if found.split(|byte| *byte == b' ').next() == Some(binary.digest.as_bytes()) {
            return Ok(path);
        }
        let upload = upload_path(&path);
        host.write(&upload, binary.bytes.clone(), 0o755).await?;
        let publish = Command::shell(PUBLISH)
            .arg("uv-publish")
            .arg(upload)
            .arg(&path)
            .timeout(self.timeout);
        let output = host.run(publish).await?;
        if !output.success() {
            return Err(failure("the uv binary could not be put in place", &output, &Env::new()));
        }
        Ok(path)
    }
}

impl fmt::Debug for Scripts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scripts")
            .field("dir", &self.dir)
            .field("uv", &self.uv)
            .finish_non_exhaustive()
    }
}

/// A name beside `path` that nobody else writes to.
fn upload_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.tmp", random_id()));
    name.into()
}

/// Whether the script's bytes are still the ones that were prepared, and its interpreter is still there. The bytes are
/// compared here and not by a program of the box, which may have been changed as well.
async fn is_intact(host: &dyn ScriptHost, script: &Script, prepared: &PreparedScript) -> Result<bool> {
    match host.read(&prepared.path, script.bytes.len() as u64).await {
        Ok(bytes) if bytes == script.bytes => {}
        Ok(_) => return Ok(false),
        Err(error) => match error.kind() {
            ErrorKind::NotFound
            | ErrorKind::WrongFileType
            | ErrorKind::LimitExceeded
            | ErrorKind::PermissionDenied
            | ErrorKind::Io
            | ErrorKind::Other => return Ok(false),
            // Says something about the box, not about the file.
            _ => return Err(error),
        },
    }
    let check = Command::shell("[ -x \"$1\" ]")
        .arg("uv-check")
        .arg(&prepared.interpreter)
        .timeout(Duration::from_secs(60));
    Ok(host.run(check).await?.success())
}

fn failure(what: &str, output: &Output, env: &Env) -> Error {
    // More than is shown, so that a secret is blanked before it may be cut in two.
    let stderr = tail(&output.stderr.bytes, 32 * SHOWN_STDERR);
    let stderr = without_secrets(stderr.into_owned(), env);
    let shown = tail(stderr.as_bytes(), SHOWN_STDERR);
    Error::new(ErrorKind::Other, format!("{what} ({}): {shown}", output.status)).with_boundary(Boundary::Other)
}

/// Blanks the values of variables that look like secrets: by their name, or as a URL with credentials.
fn without_secrets(mut text: String, env: &Env) -> String {
    const WORDS: [&str; 6] = ["KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL", "AUTH"];
    for (name, value) in env.iter() {
        let name = name.to_string_lossy().to_uppercase();
        let value = value.to_string_lossy();
        let has_credentials = value.split_once("://").is_some_and(|(_, rest)| rest.contains('@'));
        if value.len() >= 4 && (has_credentials || WORDS.iter().any(|word| name.contains(word))) {
            text = text.replace(&*value, "***");
        }
    }
    text
}

#[cfg(test)]
mod tests;
