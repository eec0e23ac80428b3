//! Where host and guest meet: a private directory with the program and a socket, one connection, one token.

use std::fmt;
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::net::UnixListener;

use super::frame::{TOKEN_LEN, TOKEN_VARIABLE};
use super::link::{Link, LinkOptions};
use super::session::Failure;
use crate::error::{Error, ErrorKind, Result};

/// Name of the program in the directory.
const PROGRAM_NAME: &str = "guest";
/// Name of the socket in the directory.
const SOCKET_NAME: &str = "socket";

/// What follows the program's path in the entrypoint of a box whose engine mounts the directory of a [`Rendezvous`]
/// at `/.sandbox`.
pub const SOCKET_ARGUMENTS: [&str; 2] = ["--socket", "/.sandbox/socket"];

/// The one-time secret by which the guest proves itself. Its `Debug` shows nothing.
#[derive(Clone)]
pub struct Token([u8; TOKEN_LEN]);

impl Token {
    /// A new random token.
    ///
    /// # Errors
    /// When the system gives no random bytes.
    pub fn generate() -> Result<Self> {
        let bytes = random().map_err(|error| Error::io("read random bytes", error))?;
        Ok(Self(bytes))
    }

    /// The variable that carries it to the guest.
    pub fn variable(&self) -> (&'static str, String) {
        let digits = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        (TOKEN_VARIABLE, digits)
    }

    /// Compares in a time that does not depend on where they differ.
    pub(super) fn matches(&self, other: &[u8; TOKEN_LEN]) -> bool {
        let difference = self
            .0
            .iter()
            .zip(other)
            .fold(0, |sum, (a, b)| std::hint::black_box(sum | (a ^ b)));
        difference == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Random bytes of the system.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A directory for one box, and a socket in it on which that box's guest is awaited once.
///
/// Mount [`directory`](Self::directory) read-only into the box at `/.sandbox`, make `/.sandbox/guest` with
/// [`SOCKET_ARGUMENTS`] its entrypoint, and put [`Token::variable`] into its environment. Then
/// [`accept`](Self::accept). Dropping it removes the directory's socket; the directory itself stays for as long as the
/// box has it mounted, and is removed with [`remove_directory`](Self::remove_directory) or by its owner.
#[derive(Debug)]
pub struct Rendezvous {
    directory: PathBuf,
    listener: UnixListener,
    token: Token,
}

impl Rendezvous {
    /// Makes the directory `parent/name` with the program and the socket. `parent` is made or must be private to this
    /// user (mode 0700): it is what keeps other users of this machine away. `cache` is where the program is kept, one
    /// copy for all boxes. Must be called on a runtime.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) without the program; otherwise what making files gives.
    pub fn new(parent: &Path, name: &str, cache: &Path) -> Result<Self> {
        let program = program()?;
        make_private(parent)?;
        let directory = parent.join(name);
        let fail = |error| Error::io(format!("prepare {}", directory.display()), error);
        fs::DirBuilder::new().mode(0o755).create(&directory).map_err(fail)?;
        let result = (|| {
            // Explicitly, because the process's umask may say otherwise, and the box may run as any user.
            fs::set_permissions(&directory, Permissions::from_mode(0o755)).map_err(fail)?;
            let kept = keep_program(cache, program)?;
            let place = directory.join(PROGRAM_NAME);
            // A second name for the same file; a copy where the two are on different file systems.
            if fs::hard_link(&kept, &place).is_err() {
                fs::copy(&kept, &place).map_err(fail)?;
            }
            let listener = bind(&directory).map_err(fail)?;
            Ok(Self {
                directory: directory.clone(),
                listener,
                token: Token::generate()?,
            })
        })();
        if result.is_err() {
            // The error at hand says more than one about cleaning up would.
            let _ = fs::remove_dir_all(&directory);
        }
        result
    }

    /// Keeps the program in a cache, and says where.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) without the program; otherwise what making files gives.
    #[cfg(feature = "isolation")]
    pub(crate) fn keep_program(cache: &Path) -> Result<PathBuf> {
        keep_program(cache, program()?)
    }

    /// The directory to mount.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The token that the guest must bring.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Waits for the guest. The first connection is the only one: whatever comes of it, the socket is closed and
    /// removed. Dropping the future closes and removes it too.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout) when nobody connects within `deadline`; [`Protocol`](ErrorKind::Protocol) when
    /// who connects is not our guest.
    pub async fn accept(self, deadline: Duration, options: LinkOptions) -> Result<Link> {
        let accepted = tokio::time::timeout(deadline, self.listener.accept()).await;
        let (socket, _) = accepted
            .map_err(|_| {
                Error::new(
                    ErrorKind::Timeout,
                    format!("the guest did not connect within {deadline:?}: the box may not have started"),
                )
            })?
            .map_err(|error| Error::io("accept the guest's connection", error))?;
        let token = self.token.clone();
        drop(self);
        Link::over_socket(socket, &token, options).await
    }

    /// Removes a directory that [`Rendezvous::new`] made, after the box is gone. One that is gone is fine.
    ///
    /// # Errors
    /// What removing files gives.
    pub fn remove_directory(directory: &Path) -> Result<()> {
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format!("remove {}", directory.display()), error))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        // Gone already is fine, and nobody could be told of anything else.
        let _ = fs::remove_file(self.directory.join(SOCKET_NAME));
    }
}

/// Makes a directory that only this user may enter, or checks that it is one.
fn make_private(directory: &Path) -> Result<()> {
    let fail = |error| Error::io(format!("prepare {}", directory.display()), error);
    fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(directory)
        .map_err(fail)?;
    let mode = fs::symlink_metadata(directory).map_err(fail)?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(Error::new(
            ErrorKind::PermissionDenied,
            format!(
                "{} has mode {:o}, but must be private to this user (0700)",
                directory.display(),
                mode & 0o7777
            ),
        ));
    }
    Ok(())
}

/// Binds the socket through the open directory, because an address of a Unix socket is short and a path may be long.
fn bind(directory: &Path) -> io::Result<UnixListener> {
    let handle = File::open(directory)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", handle.as_raw_fd())).join(SOCKET_NAME);
    let listener = UnixListener::bind(path)?;
    // The box may run as any user; the private directory above and the token are what protects it.
    fs::set_permissions(directory.join(SOCKET_NAME), Permissions::from_mode(0o666))?;
    Ok(listener)
}

fn program() -> Result<&'static [u8]> {
    super::availability().map_err(|reason| Error::unsupported(format!("this build has no guest program: {reason}")))
}

/// Writes the program into the cache unless it is there, under a name that its content determines.
fn keep_program(cache: &Path, program: &[u8]) -> Result<PathBuf> {
    // Once in a process: the program is a part of it.
    static DIGEST: OnceLock<String> = OnceLock::new();
    let hexadecimal = || {
        Sha256::digest(program)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    };
    let digest = DIGEST.get_or_init(hexadecimal);
    let directory = cache.join("guest");
    let place = directory.join(digest);
    let fail = |error| Error::io(format!("keep the guest program in {}", directory.display()), error);
    if fs::read(&place).is_ok_and(|kept| kept == program) {
        return Ok(place);
    }
    fs::create_dir_all(&directory).map_err(fail)?;
    let salt = u64::from_le_bytes(random().map_err(fail)?);
    let temporary = directory.join(format!("{digest}.{salt:016x}.tmp"));
    let result = (|| {
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o555)
            .open(&temporary)?;
        file.write_all(program)?;
        file.set_permissions(Permissions::from_mode(0o555))?;
        // Closed before it gets its name: a file that is open for writing cannot be executed.
        drop(file);
        fs::rename(&temporary, &place)
    })();
    if let Err(error) = result {
        let _ = fs::remove_file(&temporary);
        return Err(fail(error));
    }
    Ok(place)
}

/// The failure for a guest that is not ours.
pub(super) fn stranger(what: impl fmt::Display) -> Error {
    Failure::protocol(what).error()
}
