//! Directory trees as tar streams: packed, checked and unpacked so that nothing leaves the directory.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Component, Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tar::{Archive, Builder, EntryType, Header};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::io::SyncIoBridge;

use crate::error::{Error, ErrorKind, Result};
use crate::files::{ByteStream, stream_error};

/// Bytes between the thread that packs and the task that reads.
const PIPE: usize = 256 << 10;

/// Bytes that cross between a thread and a task at once: each crossing costs a change of threads, and the headers of
/// small files are many.
const BLOCK: usize = 64 << 10;

/// A blocking half of a transfer.
pub(crate) struct Half(JoinHandle<Result<()>>);

impl Half {
    /// From a task that does the other half.
    #[cfg(feature = "subprocess")]
    pub(crate) fn of(task: JoinHandle<Result<()>>) -> Self {
        Self(task)
    }

    /// The stream with this half's error at its end instead of an early, silent one.
    #[cfg(feature = "subprocess")]
    pub(crate) fn behind(self, stream: ByteStream) -> ByteStream {
        ByteStream::new(Behind {
            stream,
            half: Some(self.0),
        })
    }

    /// Waits for the blocking half and says what went wrong in it. A pipe that the other half closed is not an error
    /// of this half.
    pub(crate) async fn finish(self) -> Result<()> {
        match self.0.await {
            Ok(Err(error)) if error.kind() == ErrorKind::ConnectionLost => Ok(()),
            Ok(result) => result,
            Err(error) => Err(Error::new(ErrorKind::Other, "a transfer's thread failed").with_source(error)),
        }
    }
}

/// A stream that ends with the error of what fed it. Dropping it ends the feeder at its next write.
#[cfg(feature = "subprocess")]
struct Behind {
    stream: ByteStream,
    half: Option<JoinHandle<Result<()>>>,
}

#[cfg(feature = "subprocess")]
impl AsyncRead for Behind {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buf) {
            Poll::Ready(Ok(())) if buf.filled().len() == before && buf.remaining() > 0 => {}
            other => return other,
        }
        let Some(half) = &mut self.half else {
            return Poll::Ready(Ok(()));
        };
        let Poll::Ready(joined) = Pin::new(half).poll(cx) else {
            return Poll::Pending;
        };
        self.half = None;
        Poll::Ready(match joined {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(io::Error::other(error)),
            Err(error) => Err(io::Error::other(error)),
        })
    }
}

#[cfg(feature = "subprocess")]
impl Drop for Behind {
    fn drop(&mut self) {
        if let Some(half) = &self.half {
            half.abort();
        }
    }
}

/// Packs a directory of this host.
///
/// # Errors
/// [`NotFound`](ErrorKind::NotFound), [`WrongFileType`](ErrorKind::WrongFileType).
pub(crate) fn pack(dir: PathBuf) -> Result<(ByteStream, Half)> {
    let metadata = fs::metadata(&dir).map_err(|error| Error::io(dir.display(), error))?;
    if !metadata.is_dir() {
        return Err(Error::new(
            ErrorKind::WrongFileType,
            format!("{} is not a directory", dir.display()),
        ));
    }
    let (reader, writer) = tokio::io::duplex(PIPE);
    let bridge = BufWriter::with_capacity(BLOCK, SyncIoBridge::new(writer));
    let thread = tokio::task::spawn_blocking(move || pack_into(&dir, bridge));
    Ok((ByteStream::new(reader), Half(thread)))
}

/// Passes a tar stream on, entry by entry, up to the first that must not be unpacked.
pub(crate) fn check(tar: ByteStream) -> (ByteStream, Half) {
    let (reader, writer) = tokio::io::duplex(PIPE);
    let (guarded, cancel) = Cancellable::new(tar);
    let input = BufReader::with_capacity(BLOCK, SyncIoBridge::new(guarded));
    let output = BufWriter::with_capacity(BLOCK, SyncIoBridge::new(writer));
    let thread = tokio::task::spawn_blocking(move || check_into(input, output));
    (
        ByteStream::new(Owning {
            inner: reader,
            _cancel: cancel,
        }),
        Half(thread),
    )
}

/// Unpacks a tar stream into a directory of this host, created if missing. Nothing is written outside it.
///
/// # Errors
/// [`Protocol`](ErrorKind::Protocol) for an archive that tries to leave it, and what kept it from being written.
///
/// # Cancellation
/// Dropping the future ends the unpacking with the entry at hand, in its thread; what was unpacked stays. `held` is
/// dropped when the thread is done.
pub(crate) async fn unpack(tar: ByteStream, dir: PathBuf, held: impl Send + 'static) -> Result<()> {
    let (guarded, cancel) = Cancellable::new(tar);
    let input = WhileWanted {
        inner: BufReader::with_capacity(BLOCK, SyncIoBridge::new(guarded)),
        wanted: Arc::new(()),
    };
    let wanted = input.wanted.clone();
    let thread = tokio::task::spawn_blocking(move || {
        let _held = held;
        unpack_from(input, &dir)
    });
    let result = match thread.await {
        Ok(result) => result,
        Err(error) => Err(Error::new(ErrorKind::Other, "a transfer's thread failed").with_source(error)),
    };
    drop((cancel, wanted));
    result
}

/// A reader that fails once nobody else holds `wanted`, whatever is buffered.
struct WhileWanted<R> {
    inner: R,
    wanted: Arc<()>,
}

impl<R: Read> Read for WhileWanted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if Arc::strong_count(&self.wanted) < 2 {
            return Err(given_up());
        }
        self.inner.read(buf)
    }
}

fn given_up() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the transfer was given up")
}

/// A reader that fails once the other end of its channel is dropped, so that a blocked thread ends with its caller.
struct Cancellable<R> {
    inner: R,
    cancelled: oneshot::Receiver<()>,
}

impl<R> Cancellable<R> {
    fn new(inner: R) -> (Self, oneshot::Sender<()>) {
        let (sender, cancelled) = oneshot::channel();
        (Self { inner, cancelled }, sender)
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Cancellable<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if Pin::new(&mut self.cancelled).poll(cx).is_ready() {
            return Poll::Ready(Err(given_up()));
        }
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

/// A reader that keeps the sender of a [`Cancellable`].
struct Owning<R> {
    inner: R,
    _cancel: oneshot::Sender<()>,
}

impl<R: AsyncRead + Unpin> AsyncRead for Owning<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

/// Packs a directory: regular files, directories and symbolic links, in the order of their names. What is neither is
/// left out.
pub(crate) fn pack_into(dir: &Path, writer: impl Write) -> Result<()> {
    let mut builder = Builder::new(writer);
    builder.follow_symlinks(false);
    let mut pending = vec![PathBuf::new()];
    while let Some(parent) = pending.pop() {
        let full = dir.join(&parent);
        let at = |error| Error::io(format_args!("packing {}", full.display()), error);
        let mut names: Vec<OsString> = fs::read_dir(&full)
            .map_err(at)?
            .map(|entry| Ok(entry?.file_name()))
            .collect::<io::Result<_>>()
            .map_err(at)?;
        names.sort();
        // Children are pushed in reverse, so that directories come out in order.
        let mut children = Vec::new();
        for name in names {
            let relative = parent.join(&name);
            let path = dir.join(&relative);
            let at = |error| Error::io(format_args!("packing {}", path.display()), error);
            let metadata = fs::symlink_metadata(&path).map_err(at)?;
            let mut header = Header::new_gnu();
            header.set_metadata(&metadata);
            header.set_uid(0);
            header.set_gid(0);
            if metadata.is_dir() {
                header.set_entry_type(EntryType::Directory);
                header.set_size(0);
                builder.append_data(&mut header, &relative, io::empty()).map_err(at)?;
                children.push(relative);
            } else if metadata.is_symlink() {
                let target = fs::read_link(&path).map_err(at)?;
                header.set_entry_type(EntryType::Symlink);
                header.set_size(0);
                builder.append_link(&mut header, &relative, &target).map_err(at)?;
            } else if metadata.is_file() {
                let file = open_regular(&path).map_err(at)?;
                let size = file.metadata().map_err(at)?.len();
                header.set_size(size);
                // A file that changes while it is read still fills exactly the size that was announced.
                let content = file.take(size).chain(io::repeat(0)).take(size);
                builder.append_data(&mut header, &relative, content).map_err(at)?;
            }
        }
        pending.extend(children.into_iter().rev());
    }
    builder
        .into_inner()
        .and_then(|mut writer| writer.flush())
        .map_err(|error| stream_error("packing", error))
}

/// Opens a regular file: not through a link, and without waiting for the other end if it was swapped for a FIFO.
fn open_regular(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
        options.custom_flags(flags.bits() as i32);
    }
    let file = options.open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no longer a regular file"));
    }
    Ok(file)
}

/// Passes entries on until one must not be unpacked.
fn check_into(reader: impl Read, writer: impl Write) -> Result<()> {
    let mut archive = Archive::new(reader);
    let mut builder = Builder::new(writer);
    let mut guard = Guard::default();
    for entry in archive.entries().map_err(bad_archive)? {
        let mut entry = entry.map_err(bad_archive)?;
        let Some(checked) = guard
            .check(&entry)
            .map_err(|reason| Error::invalid_argument("tar", reason))?
        else {
            continue;
        };
        let mut header = entry.header().clone();
        let sent = match &checked.link {
            Some(target) => {
                header.set_size(0);
                builder.append_link(&mut header, &checked.path, target)
            }
            None => {
                header.set_size(entry.size());
                if checked.kind == EntryType::Regular {
                    header.set_entry_type(EntryType::Regular);
                }
                let size = entry.size();
                let mut counted = Counted {
                    inner: &mut entry,
                    read: 0,
                };
                let sent = builder.append_data(&mut header, &checked.path, &mut counted);
                if sent.is_ok() && counted.read < size {
                    return Err(Error::invalid_argument("tar", "the archive ends within an entry"));
                }
                sent
            }
        };
        sent.map_err(|error| stream_error("passing the archive on", error))?;
    }
    builder
        .into_inner()
        .and_then(|mut writer| writer.flush())
        .map_err(|error| stream_error("passing the archive on", error))
}

struct Counted<R> {
    inner: R,
    read: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buf)?;
        self.read += count as u64;
        Ok(count)
    }
}

/// Unpacks entries into a directory of this host. Every entry is checked, and its parent must really be inside.
pub(crate) fn unpack_from(reader: impl Read, dir: &Path) -> Result<()> {
    let at = |path: &Path, error| Error::io(format_args!("unpacking {}", path.display()), error);
    fs::create_dir_all(dir).map_err(|error| at(dir, error))?;
    let dir = dir.canonicalize().map_err(|error| at(dir, error))?;
    let mut archive = Archive::new(reader);
    let mut guard = Guard::default();
    let mut directories = Vec::new();
    for entry in archive.entries().map_err(bad_archive)? {
        let mut entry = entry.map_err(bad_archive)?;
        let escape = |reason: String| Error::new(ErrorKind::Protocol, format!("the archive is refused: {reason}"));
        let Some(checked) = guard.check(&entry).map_err(escape)? else {
            continue;
        };
        let target = dir.join(&checked.path);
        let parent = target.parent().unwrap_or(&dir).to_path_buf();
        // The guard knows the archive's own links; these are the ones that were on disk before.
        create_parents(&dir, &parent).map_err(|error| at(&parent, error))?;
        if !parent
            .canonicalize()
            .map_err(|error| at(&parent, error))?
            .starts_with(&dir)
        {
            return Err(escape(format!(
                "`{}` is below a link that leaves the directory",
                checked.path.display()
            )));
        }
        match checked.kind {
            EntryType::Directory => {
                match fs::create_dir(&target) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(at(&target, error)),
                    Err(_) if fs::symlink_metadata(&target).is_ok_and(|metadata| metadata.is_symlink()) => {
                        return Err(escape(format!("`{}` is a link already", checked.path.display())));
                    }
                    _ => {}
                }
                directories.push((target, checked.mode));
            }
            EntryType::Symlink => {
                remove_existing(&target).map_err(|error| at(&target, error))?;
                let link = checked.link.as_deref().unwrap_or(Path::new(""));
                symlink(link, &target).map_err(|error| at(&target, error))?;
            }
            _ => {
                remove_existing(&target).map_err(|error| at(&target, error))?;
                let mut file = create_new(&target, checked.mode).map_err(|error| at(&target, error))?;
                let size = entry.size();
                let copied = io::copy(&mut entry, &mut file).map_err(|error| at(&target, error))?;
                if copied < size {
                    return Err(Error::new(
                        ErrorKind::ConnectionLost,
                        "the archive ends within an entry",
                    ));
                }
                set_mode(&target, checked.mode).map_err(|error| at(&target, error))?;
                if let Ok(seconds) = entry.header().mtime() {
                    let _ = file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds));
                }
            }
        }
    }
    // A directory's own mode last: it may forbid writing into it.
    for (path, mode) in directories.into_iter().rev() {
        set_mode(&path, mode).map_err(|error| at(&path, error))?;
    }
    Ok(())
}

/// Creates missing directories below `root`, never through a link.
fn create_parents(root: &Path, parent: &Path) -> io::Result<()> {
    let Ok(relative) = parent.strip_prefix(root) else {
        return Ok(());
    };
    let mut path = root.to_path_buf();
    for part in relative {
        path.push(part);
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn remove_existing(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            Err(io::Error::new(io::ErrorKind::IsADirectory, "a directory is in the way"))
        }
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn create_new(path: &Path, mode: u32) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(mode | 0o200);
    }
    let _ = mode;
    options.open(path)
}

#[cfg(unix)]
fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

#[cfg(not(unix))]
fn set_mode(_: &Path, _: u32) -> io::Result<()> {
    Ok(())
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "no symbolic links on this platform",
    ))
}

fn bad_archive(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Error::new(ErrorKind::ConnectionLost, "the transfer was given up"),
        io::ErrorKind::UnexpectedEof => Error::invalid_argument("tar", "the archive ends within an entry"),
        _ => match error.get_ref() {
            Some(inner) if inner.is::<Error>() => stream_error("reading the archive", error),
            _ => Error::invalid_argument("tar", format!("not a tar archive: {error}")),
        },
    }
}

/// What an entry is, once it is known to stay inside.
struct Checked {
    path: PathBuf,
    kind: EntryType,
    link: Option<PathBuf>,
    /// Permission bits without setuid, setgid and sticky.
    mode: u32,
}

/// Refuses entries that would leave the directory, through the archive's own links too.
#[derive(Default)]
struct Guard {
    links: HashSet<PathBuf>,
}

impl Guard {
    /// `Ok(None)` for entries that carry nothing: the directory itself, global headers.
    fn check<R: Read>(&mut self, entry: &tar::Entry<'_, R>) -> std::result::Result<Option<Checked>, String> {
        let raw = entry.path().map_err(|error| error.to_string())?;
        let shown = raw.display().to_string();
        let mut path = PathBuf::new();
        for component in raw.components() {
            match component {
                Component::Normal(part) => path.push(part),
                Component::CurDir => {}
                Component::ParentDir => return Err(format!("`{shown}` has a `..`")),
                Component::RootDir | Component::Prefix(_) => return Err(format!("`{shown}` is absolute")),
            }
        }
        let kind = match entry.header().entry_type() {
            EntryType::Directory => EntryType::Directory,
            EntryType::Symlink => EntryType::Symlink,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => EntryType::Regular,
            EntryType::XGlobalHeader => return Ok(None),
            EntryType::Link => return Err(format!("`{shown}` is a hard link; pack with links dereferenced")),
            other => {
                return Err(format!(
                    "`{shown}` is neither a file, a directory nor a symbolic link ({other:?})"
                ));
            }
        };
        if path.as_os_str().is_empty() {
            return match kind {
                EntryType::Directory => Ok(None),
                _ => Err(format!("`{shown}` names the directory itself")),
            };
        }
        if let Some(link) = path.ancestors().find(|ancestor| self.links.contains(*ancestor)) {
            return Err(format!(
                "`{shown}` is at or below the symbolic link `{}` of the archive",
                link.display()
            ));
        }
        let link = if kind == EntryType::Symlink {
            let target = entry.link_name().map_err(|error| error.to_string())?;
            let target = target.ok_or_else(|| format!("`{shown}` is a link to nowhere"))?;
            self.links.insert(path.clone());
            Some(target.into_owned())
        } else {
            None
        };
        let mode = entry.header().mode().unwrap_or(0o644) & 0o777;
        Ok(Some(Checked { path, kind, link, mode }))
    }
}
