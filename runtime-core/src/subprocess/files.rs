//! Files of the host, for the embedded runtime.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::OFlags;
use tokio::io::AsyncReadExt;

use crate::error::{Error, ErrorKind, Result};
use crate::files::{ByteStream, Content, DirEntry, FileType, Metadata, WriteOptions, stream_error};
use crate::process::Process;
use crate::subprocess::changes::Changes;

/// Files up to this size are read at once.
const SMALL: u64 = 256 << 10;

fn at(what: &str, path: &Path, error: io::Error) -> Error {
    Error::io(format_args!("{what} {}", path.display()), error)
}

pub(crate) enum Opened {
    Regular(ByteStream),
    /// A FIFO, a socket or a device: opening it could block, or wake its writer.
    Special,
}

/// Opens a regular file without ever waiting for the other end of a FIFO that takes its place.
fn open_regular(path: &Path) -> Result<Option<(fs::File, u64)>> {
    let metadata = fs::metadata(path).map_err(|error| at("opening", path, error))?;
    if metadata.is_dir() {
        return Err(Error::new(
            ErrorKind::WrongFileType,
            format!("{} is a directory", path.display()),
        ));
    }
    if !metadata.is_file() {
        return Ok(None);
    }
    let mut options = fs::OpenOptions::new();
    options.read(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path).map_err(|error| at("opening", path, error))?;
    let metadata = file.metadata().map_err(|error| at("opening", path, error))?;
    if !metadata.is_file() {
        return Err(Error::new(
            ErrorKind::WrongFileType,
            format!("{} was replaced while it was opened", path.display()),
        ));
    }
    Ok(Some((file, metadata.len())))
}

pub(crate) fn open(path: &Path, limit: Option<u64>) -> Result<Opened> {
    let Some((file, size)) = open_regular(path)? else {
        return Ok(Opened::Special);
    };
    let limit = limit.unwrap_or(u64::MAX);
    if size.min(limit) <= SMALL && size > 0 {
        // Most files are small: no thread per read for them.
        let content = read_file(file, size, limit.min(SMALL + 1)).map_err(|error| at("reading", path, error))?;
        if content.len() as u64 <= SMALL {
            return Ok(Opened::Regular(ByteStream::from_bytes(content)));
        }
        return Ok(Opened::Regular(stream(reopen(path)?, limit)));
    }
    Ok(Opened::Regular(stream(file, limit)))
}

fn reopen(path: &Path) -> Result<fs::File> {
    match open_regular(path)? {
        Some((file, _)) => Ok(file),
        None => Err(Error::new(
            ErrorKind::WrongFileType,
            format!("{} was replaced", path.display()),
        )),
    }
}

fn stream(file: fs::File, limit: u64) -> ByteStream {
    ByteStream::new(tokio::fs::File::from_std(file).take(limit))
}

fn read_file(file: fs::File, size: u64, limit: u64) -> io::Result<Vec<u8>> {
    // One byte more than expected, so that the end is seen without growing.
    let capacity = usize::try_from(size.min(limit)).unwrap_or(0).saturating_add(1);
    let mut content = Vec::new();
    content
        .try_reserve(capacity)
        .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    file.take(limit).read_to_end(&mut content)?;
    Ok(content)
}

/// Reads a regular file, at most `limit` bytes. `None` for a special file.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Option<Bytes>> {
    let Some((file, size)) = open_regular(path)? else {
        return Ok(None);
    };
    read_file(file, size, limit)
        .map(|content| Some(Bytes::from(content)))
        .map_err(|error| at("reading", path, error))
}

/// The output of a program that reads a special file, with a deadline over all of it.
pub(crate) fn special(mut process: Process, timeout: Duration) -> ByteStream {
    let (reader, mut writer) = tokio::io::duplex(64 << 10);
    let stdout = process.stdout.take();
    let copy = async move {
        if let Some(mut stdout) = stdout {
            tokio::io::copy(&mut stdout, &mut writer)
                .await
                .map_err(|error| stream_error("reading", error))?;
        }
        let stderr = read_short(process.stderr.take()).await;
        match process.wait().await? {
            status if status.success() => Ok(()),
            _ => Err(Error::new(ErrorKind::Io, crate::text::tail(&stderr, 500).into_owned())),
        }
    };
    let task = tokio::spawn(async move {
        match tokio::time::timeout(timeout, copy).await {
            Ok(result) => result,
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                format!("the special file gave no end within {timeout:?}"),
            )),
        }
    });
    crate::tree::Half::of(task).behind(ByteStream::new(reader))
}

async fn read_short(stderr: Option<crate::process::ProcessStderr>) -> Vec<u8> {
    let mut text = Vec::new();
    if let Some(stderr) = stderr {
        let _ = stderr.take(4096).read_to_end(&mut text).await;
    }
    text
}

/// Opens a log for appending, with its parents; never waits for the reader of a FIFO.
pub(crate) fn open_log(path: &Path) -> Result<fs::File> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|error| at("creating", parent, error))?;
    }
    let mut options = fs::OpenOptions::new();
    options
        .append(true)
        .create(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path).map_err(|error| at("opening", path, error))?;
    let metadata = file.metadata().map_err(|error| at("opening", path, error))?;
    if !metadata.is_file() {
        return Err(Error::new(
            ErrorKind::WrongFileType,
            format!("the log {} is not a file", path.display()),
        ));
    }
    Ok(file)
}

/// Where a write goes: through symbolic links, and never onto something that is no regular file.
fn write_target(path: &Path) -> Result<(PathBuf, Option<fs::Metadata>)> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|error| at("creating", parent, error))?;
    }
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {
            let target = fs::canonicalize(path).map_err(|error| at("writing", path, error))?;
            Ok((target, Some(metadata)))
        }
        Ok(metadata) => {
            let what = if metadata.is_dir() {
                "a directory"
            } else {
                "a FIFO, socket or device"
            };
            Err(Error::new(
                ErrorKind::WrongFileType,
                format!("{} is {what}", path.display()),
            ))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => match fs::read_link(path) {
            // A link to a file that does not exist yet.
            Ok(target) => Ok((path.parent().unwrap_or(Path::new("/")).join(target), None)),
            Err(_) => Ok((path.to_path_buf(), None)),
        },
        Err(error) => Err(at("writing", path, error)),
    }
}

/// A new file beside its destination, removed unless it takes its place.
struct Replacement {
    temporary: PathBuf,
    target: PathBuf,
    armed: bool,
}

impl Replacement {
    fn create(target: PathBuf) -> Result<(Self, fs::File)> {
        let name = format!(".sandbox-{}.tmp", crate::names::random_hex(16));
        let temporary = target.with_file_name(name);
        let file = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary)
            .map_err(|error| at("writing", &target, error))?;
        Ok((
            Self {
                temporary,
                target,
                armed: true,
            },
            file,
        ))
    }

    fn commit(mut self, file: fs::File, mode: Option<u32>) -> Result<()> {
        if let Some(mode) = mode {
            file.set_permissions(fs::Permissions::from_mode(mode))
                .map_err(|error| at("writing", &self.target, error))?;
        }
        drop(file);
        fs::rename(&self.temporary, &self.target).map_err(|error| at("writing", &self.target, error))?;
        self.armed = false;
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if self.armed {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

pub(crate) async fn write(changes: &Changes, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
    let (_waiting, working) = changes.begin();
    let path = path.to_path_buf();
    match content {
        Content::Bytes(bytes) => {
            let task = tokio::task::spawn_blocking(move || {
                let _working = working;
                let mut destination = Destination::open(&path, options)?;
                destination
                    .file
                    .write_all(&bytes)
                    .map_err(|error| at("writing", &path, error))?;
                destination.finish()
            });
            joined(task.await)
        }
        Content::Stream(mut stream) => {
            let shown = path.clone();
            let (_opening, held) = changes.begin();
            let opened = tokio::task::spawn_blocking(move || {
                let _held = held;
                Destination::open(&path, options)
            });
            let Destination {
                file,
                replacement,
                mode,
            } = joined(opened.await)?;
            let mut file = tokio::fs::File::from_std(file);
            tokio::io::copy(&mut stream, &mut file)
                .await
                .map_err(|error| stream_error("writing", error))?;
            tokio::io::AsyncWriteExt::flush(&mut file)
                .await
                .map_err(|error| at("writing", &shown, error))?;
            let file = file.into_std().await;
            let finished = tokio::task::spawn_blocking(move || {
                let _working = working;
                Destination {
                    file,
                    replacement,
                    mode,
                }
                .finish()
            });
            joined(finished.await)
        }
    }
}

fn joined<T>(result: std::result::Result<Result<T>, tokio::task::JoinError>) -> Result<T> {
    match result {
        Ok(result) => result,
        Err(error) => Err(Error::new(ErrorKind::Other, "a file operation's thread failed").with_source(error)),
    }
}

struct Destination {
    file: fs::File,
    replacement: Option<Replacement>,
    mode: Option<u32>,
}

impl Destination {
    fn open(path: &Path, options: WriteOptions) -> Result<Self> {
        let (target, existing) = write_target(path)?;
        if options.atomic {
            let (replacement, file) = Replacement::create(target)?;
            // Without a mode an existing file keeps its own.
            let mode = options
                .mode
                .or_else(|| existing.map(|metadata| metadata.mode() & 0o7777));
            return Ok(Self {
                file,
                replacement: Some(replacement),
                mode,
            });
        }
        let mut open = fs::OpenOptions::new();
        open.write(true)
            .create(true)
            .truncate(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32);
        let file = open.open(&target).map_err(|error| at("writing", path, error))?;
        Ok(Self {
            file,
            replacement: None,
            mode: options.mode,
        })
    }

    fn finish(self) -> Result<()> {
        match (self.replacement, self.mode) {
            (Some(replacement), mode) => replacement.commit(self.file, mode),
            (None, Some(mode)) => self
                .file
                .set_permissions(fs::Permissions::from_mode(mode))
                .map_err(|error| Error::io("setting the mode", error)),
            (None, None) => Ok(()),
        }
    }
}

fn describe(path: &Path, metadata: &fs::Metadata) -> Metadata {
    let kind = metadata.file_type();
    let file_type = if kind.is_file() {
        FileType::File
    } else if kind.is_dir() {
        FileType::Directory
    } else if kind.is_symlink() {
        FileType::Symlink
    } else {
        FileType::Special
    };
    let link_target = if kind.is_symlink() {
        fs::read_link(path).ok()
    } else {
        None
    };
    Metadata {
        file_type,
        size: metadata.len(),
        mode: Some(metadata.mode() & 0o7777),
        modified: metadata.modified().ok(),
        link_target,
    }
}

pub(crate) fn stat(path: &Path) -> Result<Metadata> {
    let metadata = fs::symlink_metadata(path).map_err(|error| at("looking at", path, error))?;
    Ok(describe(path, &metadata))
}

pub(crate) fn list(path: &Path) -> Result<Vec<DirEntry>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(path).map_err(|error| at("listing", path, error))? {
        let entry = entry.map_err(|error| at("listing", path, error))?;
        match entry.metadata() {
            Ok(metadata) => {
                entries.push(DirEntry {
                    name: entry.file_name(),
                    metadata: describe(&entry.path(), &metadata),
                });
            }
            // It was removed while we looked.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at("listing", &entry.path(), error)),
        }
    }
    Ok(entries)
}

pub(crate) fn remove(path: &Path, recursive: bool) -> Result<()> {
    let metadata = fs::symlink_metadata(path).map_err(|error| at("removing", path, error))?;
    let removed = match (metadata.is_dir(), recursive) {
        (false, _) => fs::remove_file(path),
        (true, false) => fs::remove_dir(path),
        (true, true) => fs::remove_dir_all(path),
    };
    removed.map_err(|error| at("removing", path, error))
}

/// Removes a box's directory. Directories without write permission in it are made removable first.
pub(crate) fn remove_box(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(_) => make_removable(dir),
    }
    match fs::remove_dir_all(dir) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(at("removing", dir, error)),
    }
}

fn make_removable(dir: &Path) {
    let mut pending = vec![dir.to_path_buf()];
    while let Some(dir) = pending.pop() {
        let _ = fs::set_permissions(&dir, fs::Permissions::from_mode(0o700));
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        pending.extend(entries.filter_map(|entry| {
            let entry = entry.ok()?;
            entry.file_type().ok()?.is_dir().then(|| entry.path())
        }));
    }
}
