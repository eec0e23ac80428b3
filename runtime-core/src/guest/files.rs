//! Files of the box: opened by the guest, read and written here through the descriptor.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use rustix::buffer::spare_capacity;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::frame::{Event, FileInfo, Request};
use super::link::Link;
use super::session::{Baggage, system_error};
use super::stdio::{MuxStream, Side, finish};
use crate::command::check_path;
use crate::error::{Error, ErrorKind, Result};

/// Bytes that one read or write of a descriptor moves.
const CHUNK: usize = 1 << 20;
/// Removing a large tree takes long. It can be cancelled.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(600);

/// How a whole file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteFile {
    /// Permission bits of a new file, subject to the guest's umask.
    pub mode: u32,
    /// Make missing parent directories.
    pub parents: bool,
    /// Write to a temporary file in the same directory and rename it, so that readers see the old or the new content
    /// and nothing between. Else an existing file is cut and rewritten.
    pub atomic: bool,
}

impl Default for WriteFile {
    fn default() -> Self {
        Self {
            mode: 0o644,
            parents: true,
            atomic: false,
        }
    }
}

/// How a file is opened for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenWrite {
    /// Permission bits of a new file.
    pub mode: u32,
    /// Create it if missing.
    pub create: bool,
    /// Fail if it exists.
    pub exclusive: bool,
    /// Cut it to nothing.
    pub truncate: bool,
    /// Write at its end.
    pub append: bool,
}

impl Default for OpenWrite {
    fn default() -> Self {
        Self {
            mode: 0o644,
            create: true,
            exclusive: false,
            truncate: true,
            append: false,
        }
    }
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Its name: one component, never `.` or `..`, never with a slash or NUL.
    pub name: OsString,
    /// What `lstat` said about it.
    pub info: FileInfo,
}

enum Opened {
    File(File, u64),
    Stream(MuxStream, u64),
}

/// Reads a file of the box from its beginning. Dropping it closes it.
pub struct FileReader(ReaderInner);

enum ReaderInner {
    File(tokio::fs::File),
    Stream(MuxStream),
}

impl AsyncRead for FileReader {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            ReaderInner::File(file) => Pin::new(file).poll_read(context, buf),
            ReaderInner::Stream(stream) => Pin::new(stream).poll_read(context, buf),
        }
    }
}

impl std::fmt::Debug for FileReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FileReader")
    }
}

/// Writes a file of the box. Call [`finish`](Self::finish) to learn that everything has been written; dropping it
/// without leaves what was written until then.
pub struct FileWriter(WriterInner);

enum WriterInner {
    File(tokio::fs::File),
    Stream(MuxStream),
}

impl FileWriter {
    /// Writes what is buffered and closes the file.
    ///
    /// # Errors
    /// When something could not be written, such as [`ResourceExhausted`](ErrorKind::ResourceExhausted) on a full disk.
    pub async fn finish(self) -> Result<()> {
        let result = match self.0 {
            WriterInner::File(mut file) => file.flush().await,
            WriterInner::Stream(stream) => finish(stream).await,
        };
        result.map_err(|error| Error::io("write a file of the box", error))
    }
}

impl AsyncWrite for FileWriter {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            WriterInner::File(file) => Pin::new(file).poll_write(context, bytes),
            WriterInner::Stream(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            WriterInner::File(file) => Pin::new(file).poll_flush(context),
            WriterInner::Stream(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            WriterInner::File(file) => Pin::new(file).poll_shutdown(context),
            WriterInner::Stream(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

impl std::fmt::Debug for FileWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FileWriter")
    }
}

/// Checks that a descriptor is a regular file, open the right way, and makes sure that no read of it waits.
fn check_file(fd: &OwnedFd, write: bool) -> Result<(), String> {
    let stat = fstat(fd).map_err(|error| error.to_string())?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err("not a regular file".to_owned());
    }
    let flags = fcntl_getfl(fd).map_err(|error| error.to_string())?;
    let access = flags & OFlags::ACCMODE;
    let fits = access == OFlags::RDWR || access == if write { OFlags::WRONLY } else { OFlags::RDONLY };
    if !fits || flags.contains(OFlags::PATH) {
        return Err("a file that is not open for what was asked".to_owned());
    }
    fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(|error| error.to_string())
}

fn raw(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

/// Stops a transfer on the blocking pool when the future that waits for it is dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Removes a temporary file unless it was renamed.
struct Temporary<'a> {
    link: &'a Link,
    path: PathBuf,
    keep: bool,
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.keep {
            self.link.remove_later(&self.path);
        }
    }
}

impl Link {
    async fn open(&self, path: &Path, write: Option<OpenWrite>) -> Result<Opened> {
        check_path("path", path)?;
        let session = self.session();
        let mut baggage = Baggage::default();
        let mut relay = None;
        if !session.passes {
            let stream = session.stream(if write.is_some() { Side::Write } else { Side::Read })?;
            baggage.streams.push(stream.id());
            relay = Some(stream);
        }
        let how = write.unwrap_or(OpenWrite {
            mode: 0,
            create: false,
            exclusive: false,
            truncate: false,
            append: false,
        });
        let request = Request::Open {
            path: raw(path),
            write: write.is_some(),
            create: how.create || how.exclusive,
            exclusive: how.exclusive,
            truncate: how.truncate,
            append: how.append,
            mode: how.mode,
            stream: relay.as_ref().map_or(0, MuxStream::id),
        };
        let answer = session.call(&request, baggage).await?;
        match (answer.event, answer.descriptor, relay) {
            (Event::Opened { size }, Some(fd), None) => {
                check_file(&fd, write.is_some()).map_err(|what| session.wrong_descriptor(what))?;
                Ok(Opened::File(fd.into(), size))
            }
            (Event::Opened { size }, None, Some(stream)) => Ok(Opened::Stream(stream, size)),
            (Event::Failed { errno, step }, ..) => Err(system_error(format!("open {}", path.display()), errno, step)),
            (other, ..) => Err(session.unexpected(&other)),
        }
    }

    /// Opens a regular file for reading. A FIFO, device or directory is
    /// [`WrongFileType`](ErrorKind::WrongFileType); it is not opened.
    ///
    /// # Errors
    /// What opening gives.
    pub async fn open_read(&self, path: &Path) -> Result<FileReader> {
        Ok(FileReader(match self.open(path, None).await? {
            Opened::File(file, _) => ReaderInner::File(tokio::fs::File::from_std(file)),
            Opened::Stream(stream, _) => ReaderInner::Stream(stream),
        }))
    }

    /// Opens a regular file for writing.
    ///
    /// # Errors
    /// What opening gives.
    pub async fn open_write(&self, path: &Path, how: OpenWrite) -> Result<FileWriter> {
        Ok(FileWriter(match self.open(path, Some(how)).await? {
            Opened::File(file, _) => WriterInner::File(tokio::fs::File::from_std(file)),
            Opened::Stream(stream, _) => WriterInner::Stream(stream),
        }))
    }

    /// Reads a whole regular file of at most `max_bytes` bytes. Dropping the future stops the transfer.
    ///
    /// # Errors
    /// [`LimitExceeded`](ErrorKind::LimitExceeded) when there is more, however large the file claimed to be; at most
    /// `max_bytes` + 1 bytes are read. Otherwise what opening and reading give.
    pub async fn read(&self, path: &Path, max_bytes: u64) -> Result<Bytes> {
        let what = format!("read {}", path.display());
        let bytes = match self.open(path, None).await? {
            Opened::File(file, size) => {
                let stop = Arc::new(AtomicBool::new(false));
                let guard = CancelOnDrop(stop.clone());
                let reading = tokio::task::spawn_blocking(move || read_file(&file, size, max_bytes, &stop));
                let result = reading.await.unwrap_or_else(|error| Err(io::Error::other(error)));
                drop(guard);
                result
            }
            Opened::Stream(stream, size) => {
                let mut bytes = Vec::with_capacity(first_capacity(size, max_bytes));
                let result = stream.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes).await;
                result.map(|_| bytes)
            }
        };
        let bytes = bytes.map_err(|error| self.data_error(what.clone(), error))?;
        if bytes.len() as u64 > max_bytes {
            return Err(Error::new(
                ErrorKind::LimitExceeded,
                format!("{what}: the file has more than the allowed {max_bytes} bytes"),
            ));
        }
        Ok(bytes.into())
    }

    /// Writes a whole file. Dropping the future stops the transfer; a temporary file is then removed.
    ///
    /// # Errors
    /// What opening, writing and renaming give.
    pub async fn write(&self, path: &Path, bytes: Bytes, how: WriteFile) -> Result<()> {
        check_path("path", path)?;
        if !how.atomic {
            let open = OpenWrite {
                mode: how.mode,
                ..OpenWrite::default()
            };
            return self.write_to(path, path, open, bytes, how.parents).await;
        }
        let mut temporary = Temporary {
            link: self,
            path: temporary_name(path)?,
            keep: false,
        };
        let open = OpenWrite {
            mode: how.mode,
            exclusive: true,
            ..OpenWrite::default()
        };
        self.write_to(&temporary.path, path, open, bytes, how.parents).await?;
        self.rename(&temporary.path, path).await?;
        temporary.keep = true;
        Ok(())
    }

    async fn write_to(&self, path: &Path, named: &Path, open: OpenWrite, bytes: Bytes, parents: bool) -> Result<()> {
        let what = format!("write {}", named.display());
        let opened = match self.open(path, Some(open)).await {
            Err(error) if parents && error.kind() == ErrorKind::NotFound => {
                let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) else {
                    return Err(error);
                };
                self.mkdir(parent, 0o755, true).await?;
                self.open(path, Some(open)).await?
            }
            other => other?,
        };
        let result = match opened {
            Opened::File(file, _) => {
                let stop = Arc::new(AtomicBool::new(false));
                let guard = CancelOnDrop(stop.clone());
                let writing = tokio::task::spawn_blocking(move || write_file(&file, &bytes, &stop));
                let result = writing.await.unwrap_or_else(|error| Err(io::Error::other(error)));
                drop(guard);
                result
            }
            Opened::Stream(mut stream, _) => match stream.write_all(&bytes).await {
                Ok(()) => finish(stream).await,
                Err(error) => Err(error),
            },
        };
        result.map_err(|error| self.data_error(what, error))
    }

    /// An error while bytes moved: the link's own, if it has ended.
    fn data_error(&self, what: String, error: io::Error) -> Error {
        match self.session().check() {
            Err(failure) => failure,
            Ok(()) => Error::io(what, error),
        }
    }

    /// What a path is.
    ///
    /// # Errors
    /// What `lstat` gives, or `stat` with `follow`.
    pub async fn stat(&self, path: &Path, follow: bool) -> Result<FileInfo> {
        check_path("path", path)?;
        let request = Request::Stat {
            path: raw(path),
            follow,
        };
        match self.session().call(&request, Baggage::default()).await?.event {
            Event::Info { info } => Ok(info),
            Event::Failed { errno, step } => Err(system_error(format!("stat {}", path.display()), errno, step)),
            other => Err(self.session().unexpected(&other)),
        }
    }

    /// The entries of a directory, in no order.
    ///
    /// # Errors
    /// [`LimitExceeded`](ErrorKind::LimitExceeded) when it has more than `max_entries`; otherwise what reading a
    /// directory gives.
    pub async fn list(&self, path: &Path, max_entries: usize) -> Result<Vec<DirEntry>> {
        check_path("path", path)?;
        let session = self.session();
        let tag = session.number();
        // Forgotten by the guest at its end, or when this is dropped before.
        let mut listing = Listing { link: self, tag: None };
        let mut request = Request::List { path: raw(path) };
        let mut found = Vec::new();
        loop {
            let baggage = Baggage {
                tag: matches!(request, Request::List { .. }).then_some(tag),
                ..Baggage::default()
            };
            let (entries, more) = match session.call(&request, baggage).await?.event {
                Event::Entries { entries, more } => (entries.0, more),
                Event::Failed { errno, step } => {
                    return Err(system_error(format!("list {}", path.display()), errno, step));
                }
                other => return Err(session.unexpected(&other)),
            };
            listing.tag = more.then_some(tag);
            for entry in entries {
                let name = OsString::from_vec(entry.name);
                if !is_file_name(&name) {
                    return Err(session.broke("a name in a directory that cannot be one"));
                }
                found.push(DirEntry { name, info: entry.info });
            }
            if found.len() > max_entries {
                return Err(Error::new(
                    ErrorKind::LimitExceeded,
                    format!("list {}: more than the allowed {max_entries} entries", path.display()),
                ));
            }
            if !more {
                return Ok(found);
            }
            request = Request::ListMore { target: tag };
        }
    }

    /// Makes a directory; with `parents` also those above it, and one that exists is fine.
    ///
    /// # Errors
    /// What making a directory gives.
    pub async fn mkdir(&self, path: &Path, mode: u32, parents: bool) -> Result<()> {
        check_path("path", path)?;
        let request = Request::Mkdir {
            path: raw(path),
            mode,
            parents,
        };
        self.change(&request, format!("make directory {}", path.display()))
            .await
    }

    /// Removes a file, link or empty directory; with `recursive` a directory with everything below it, following no
    /// link. Dropping the future stops it.
    ///
    /// # Errors
    /// What removing gives.
    pub async fn remove(&self, path: &Path, recursive: bool) -> Result<()> {
        check_path("path", path)?;
        let request = Request::Remove {
            path: raw(path),
            recursive,
        };
        let what = format!("remove {}", path.display());
        self.session().call_for_done(&request, what, REMOVE_TIMEOUT).await
    }

    /// Renames, replacing a file that is there.
    ///
    /// # Errors
    /// What renaming gives.
    pub async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        check_path("from", from)?;
        check_path("to", to)?;
        let request = Request::Rename {
            from: raw(from),
            to: raw(to),
        };
        self.change(&request, format!("rename {} to {}", from.display(), to.display()))
            .await
    }

    /// Makes a symbolic link at `path` that says `target`.
    ///
    /// # Errors
    /// What making a link gives.
    pub async fn symlink(&self, target: &Path, path: &Path) -> Result<()> {
        check_path("target", target)?;
        check_path("path", path)?;
        let request = Request::Symlink {
            target: raw(target),
            path: raw(path),
        };
        self.change(&request, format!("make link {}", path.display())).await
    }

    /// What a symbolic link says. It is text from the box: never use it as a path of this machine.
    ///
    /// # Errors
    /// What reading a link gives.
    pub async fn readlink(&self, path: &Path) -> Result<OsString> {
        check_path("path", path)?;
        let request = Request::Readlink { path: raw(path) };
        match self.session().call(&request, Baggage::default()).await?.event {
            Event::Target { path } if path.len() <= 4096 => Ok(OsString::from_vec(path)),
            Event::Failed { errno, step } => Err(system_error(format!("read link {}", path.display()), errno, step)),
            other => Err(self.session().unexpected(&other)),
        }
    }

    /// Sets permission bits.
    ///
    /// # Errors
    /// What `chmod` gives.
    pub async fn chmod(&self, path: &Path, mode: u32) -> Result<()> {
        check_path("path", path)?;
        let request = Request::Chmod { path: raw(path), mode };
        self.change(&request, format!("set the mode of {}", path.display()))
            .await
    }

    /// Sets owner and group of a path, not following a link.
    ///
    /// # Errors
    /// What `lchown` gives.
    pub async fn chown(&self, path: &Path, uid: u32, gid: u32) -> Result<()> {
        check_path("path", path)?;
        let request = Request::Chown {
            path: raw(path),
            uid,
            gid,
        };
        self.change(&request, format!("set the owner of {}", path.display()))
            .await
    }

    async fn change(&self, request: &Request, what: String) -> Result<()> {
        let timeout = self.session().timeout;
        self.session().call_for_done(request, what, timeout).await
    }

    /// Removes a file without waiting for it.
    fn remove_later(&self, path: &Path) {
        let session = self.session().clone();
        let request = Request::Remove {
            path: raw(path),
            recursive: false,
        };
        // Without an executor there is nobody to hear the answer, and the process is about to end anyway.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let timeout = session.timeout;
                if let Err(error) = session
                    .call_for_done(&request, "remove a temporary file", timeout)
                    .await
                    && error.kind() != ErrorKind::NotFound
                {
                    tracing::debug!(%error, "a temporary file stays in the box");
                }
            });
        }
    }
}

/// Tells the guest that nobody reads a listing any more.
struct Listing<'a> {
    link: &'a Link,
    tag: Option<u32>,
}

impl Drop for Listing<'_> {
    fn drop(&mut self) {
        if let Some(target) = self.tag {
            self.link.session().post(target, &Request::Cancel { target });
        }
    }
}

fn is_file_name(name: &OsString) -> bool {
    let bytes = name.as_bytes();
    !bytes.is_empty()
        && bytes.len() <= 255
        && bytes != b"."
        && bytes != b".."
        && !bytes.contains(&b'/')
        && !bytes.contains(&0)
}

/// A name beside `path` that nothing else uses.
fn temporary_name(path: &Path) -> Result<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    if path.file_name().is_none() {
        return Err(Error::invalid_argument("path", "the path does not end in a file name"));
    }
    let salt = super::listener::random::<8>().map_err(|error| Error::io("read random bytes", error))?;
    let name = format!(
        ".{:016x}-{:x}.tmp",
        u64::from_le_bytes(salt),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    Ok(path.with_file_name(name))
}

/// Room for what the file claims to have, within reason: the claim is not to be trusted.
fn first_capacity(size: u64, max_bytes: u64) -> usize {
    // One more than the size, so that the end is seen without growing.
    usize::try_from(size.min(max_bytes).min(64 << 20) + 1).unwrap_or(0)
}

fn read_file(file: &File, size: u64, max_bytes: u64, stop: &AtomicBool) -> io::Result<Vec<u8>> {
    let wanted = max_bytes.saturating_add(1);
    let mut bytes = Vec::with_capacity(first_capacity(size, max_bytes));
    while (bytes.len() as u64) < wanted && !stop.load(Ordering::Relaxed) {
        if bytes.capacity() == bytes.len() {
            let left = usize::try_from(wanted - bytes.len() as u64).unwrap_or(CHUNK);
            bytes.reserve(left.min(CHUNK));
        }
        // At an offset of our own: the guest shares the descriptor's.
        let offset = bytes.len() as u64;
        match rustix::io::pread(file, spare_capacity(&mut bytes), offset) {
            Ok(0) => break,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

fn write_file(file: &File, bytes: &[u8], stop: &AtomicBool) -> io::Result<()> {
    let mut offset = 0;
    for chunk in bytes.chunks(CHUNK) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        file.write_all_at(chunk, offset)?;
        offset += chunk.len() as u64;
    }
    Ok(())
}
