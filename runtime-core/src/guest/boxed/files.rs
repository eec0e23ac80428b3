//! Files through the guest.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::guest::frame::{FileInfo, FileKind};
use crate::guest::{OpenWrite, WriteFile};
use crate::{
    ByteStream, Content, DirEntry, Env, Error, ErrorKind, Exec, FileType, Metadata, Result, StdinMode, WriteOptions,
    stream_error,
};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::GuestBox;

/// Most entries of a listing.
const MOST_ENTRIES: usize = 1_000_000;

/// Links that a write follows.
const MOST_LINKS: u32 = 40;

/// How long reading a FIFO or device may take in all.
const SPECIAL_READ_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn metadata(info: &FileInfo) -> Metadata {
    let since = Duration::new(info.mtime.unsigned_abs(), info.mtime_nsec.min(999_999_999));
    let modified = match info.mtime >= 0 {
        true => SystemTime::UNIX_EPOCH.checked_add(since),
        false => SystemTime::UNIX_EPOCH.checked_sub(Duration::from_secs(info.mtime.unsigned_abs())),
    };
    Metadata {
        file_type: match info.kind {
            FileKind::File => FileType::File,
            FileKind::Directory => FileType::Directory,
            FileKind::Symlink => FileType::Symlink,
            _ => FileType::Special,
        },
        size: info.size,
        mode: Some(info.mode & 0o7777),
        modified,
        link_target: None,
    }
}

impl GuestBox {
    /// What [`Runtime::stat`](crate::Runtime::stat) says.
    ///
    /// # Errors
    /// Those of the [`Runtime`](crate::Runtime) operation of this name.
    pub async fn stat(&self, path: &Path) -> Result<Metadata> {
        let mut found = metadata(&self.link.stat(path, false).await?);
        if found.is_symlink() {
            found.link_target = self.link.readlink(path).await.ok().map(PathBuf::from);
        }
        Ok(found)
    }

    /// What [`Runtime::list`](crate::Runtime::list) says.
    ///
    /// # Errors
    /// Those of the [`Runtime`](crate::Runtime) operation of this name.
    pub async fn list(&self, path: &Path) -> Result<Vec<DirEntry>> {
        let entries = self.link.list(path, MOST_ENTRIES).await?;
        let mut listed = Vec::with_capacity(entries.len());
        for entry in entries {
            listed.push(DirEntry {
                metadata: metadata(&entry.info),
                name: entry.name,
            });
        }
        Ok(listed)
    }

    /// Creates a directory with its parents; each new one belongs to the box's user.
    ///
    /// # Errors
    /// Those of the [`Runtime`](crate::Runtime) operation of this name.
    pub async fn create_dir(&self, path: &Path) -> Result<()> {
        let Some(user) = &self.user else {
            return self.link.mkdir(path, 0o755, true).await;
        };
        // What is created belongs to the user; what is there stays as it is.
        let mut missing = Vec::new();
        let mut at = Some(path);
        while let Some(dir) = at {
            match self.link.stat(dir, true).await {
                Ok(info) if info.kind == FileKind::Directory => break,
                Ok(_) => {
                    let message = format!("creating {}: {} is not a directory", path.display(), dir.display());
                    return Err(Error::new(ErrorKind::WrongFileType, message));
                }
                Err(error) if error.kind() == ErrorKind::NotFound => missing.push(dir),
                Err(error) => return Err(error),
            }
            at = dir.parent();
        }
        for dir in missing.into_iter().rev() {
            self.link.mkdir(dir, 0o755, true).await?;
            self.link.chown(dir, user.uid, user.gid).await?;
        }
        Ok(())
    }

    /// Removes a file, or a directory with what is in it.
    ///
    /// # Errors
    /// Those of the [`Runtime`](crate::Runtime) operation of this name.
    pub async fn remove(&self, path: &Path, recursive: bool) -> Result<()> {
        self.link.remove(path, recursive).await
    }

    /// Opens a file for reading; a FIFO or device is read by a program, up to `limit` bytes, within a deadline.
    ///
    /// # Errors
    /// Those of the [`Runtime`](crate::Runtime) operation of this name.
    pub async fn open(&self, path: &Path, limit: Option<u64>) -> Result<ByteStream> {
        match (self.link.open_read(path).await, limit) {
            (Ok(reader), None) => Ok(ByteStream::new(reader)),
            (Ok(reader), Some(limit)) => Ok(ByteStream::new(reader.take(limit))),
            (Err(error), Some(limit)) if error.kind() == ErrorKind::WrongFileType => {
                match self.link.stat(path, true).await {
                    Ok(info) if info.kind != FileKind::Directory && info.kind != FileKind::File => {
                        self.open_special(path, limit, error).await
                    }
                    _ => Err(error),
                }
            }
            (Err(error), _) => Err(error),
        }
    }

    /// A FIFO or device is read by a program that can be killed.
    async fn open_special(&self, path: &Path, limit: u64, refusal: Error) -> Result<ByteStream> {
        let argv = ["head", "-c", &limit.to_string(), "--"].map(Into::into);
        let exec = Exec {
            argv: argv.into_iter().chain([path.into()]).collect(),
            env: Env::new(),
            workdir: "/".into(),
            stdin: StdinMode::Null,
        };
        match self.spawn(&exec).await {
            Ok(process) => Ok(crate::feed::checked(
                process,
                format!("reading {}", path.display()),
                Some(SPECIAL_READ_TIMEOUT),
            )),
            Err(error) if error.kind() == ErrorKind::ProgramNotFound => Err(refusal),
            Err(error) => Err(error),
        }
    }

    /// Reads a file up to `limit` bytes.
    ///
    /// # Errors
    /// Those of the [`Runtime`](crate::Runtime) operation of this name.
    pub async fn read(&self, path: &Path, limit: u64) -> Result<Bytes> {
        match self.link.read(path, limit).await {
            // More than is wanted, or no regular file.
            Err(error) if matches!(error.kind(), ErrorKind::LimitExceeded | ErrorKind::WrongFileType) => {
                let stream = self.open(path, Some(limit)).await?;
                let mut content = Vec::new();
                let read = stream.take(limit).read_to_end(&mut content).await;
                read.map_err(|error| stream_error("reading", error))?;
                Ok(Bytes::from(content))
            }
            other => other,
        }
    }

    /// Where a write goes: through links, onto a regular file or onto nothing.
    async fn write_target(&self, path: &Path) -> Result<(PathBuf, Option<FileInfo>)> {
        let mut target = path.to_path_buf();
        for _ in 0..MOST_LINKS {
            let info = match self.link.stat(&target, false).await {
                Ok(info) => info,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    if let Some(parent) = target.parent() {
                        self.create_dir(parent).await?;
                    }
                    return Ok((target, None));
                }
                Err(error) => return Err(error),
            };
            match info.kind {
                FileKind::File => return Ok((target, Some(info))),
                FileKind::Symlink => {
                    let link = PathBuf::from(self.link.readlink(&target).await?);
                    target = target.parent().unwrap_or(Path::new("/")).join(link);
                }
                kind => {
                    let what = match kind {
                        FileKind::Directory => "a directory",
                        _ => "a FIFO, socket or device",
                    };
                    let message = format!("{} is {what}", path.display());
                    return Err(Error::new(ErrorKind::WrongFileType, message));
                }
            }
        }
        Err(Error::new(
            ErrorKind::Io,
            format!("{}: too many levels of symbolic links", path.display()),
        ))
    }

    /// Writes a file, through links, onto a regular file or onto nothing.
    ///
    /// # Errors
    /// Those of the [`Runtime`](crate::Runtime) operation of this name.
    pub async fn write(&self, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
        let (target, existing) = self.write_target(path).await?;
        if !options.atomic {
            self.fill(&target, content, false, 0o644).await?;
            if existing.is_none() {
                self.give(&target).await?;
            }
            return match options.mode {
                Some(mode) => self.link.chmod(&target, mode).await,
                None => Ok(()),
            };
        }
        let name = format!(".sandbox-{}.tmp", crate::names::random_hex(16));
        let mut temporary = Temporary {
            path: target.with_file_name(name),
            of: Some(self.link.clone()),
        };
        if let Err(error) = self.fill(&temporary.path, content, true, 0o644).await {
            // At once, as the caller may look.
            temporary.of = None;
            if let Err(error) = self.link.remove(&temporary.path, false).await
                && error.kind() != ErrorKind::NotFound
            {
                tracing::debug!(%error, "a temporary file stays in the box");
            }
            return Err(error);
        }
        match &existing {
            // As if the old file had been written into.
            Some(info) => self.link.chown(&temporary.path, info.uid, info.gid).await?,
            None => self.give(&temporary.path).await?,
        }
        // Without a mode an existing file keeps its own.
        if let Some(mode) = options.mode.or(existing.map(|info| info.mode & 0o7777)) {
            self.link.chmod(&temporary.path, mode).await?;
        }
        self.link.rename(&temporary.path, &target).await?;
        temporary.of = None;
        Ok(())
    }

    /// Gives what the guest created to the box's user.
    pub(super) async fn give(&self, path: &Path) -> Result<()> {
        match &self.user {
            Some(user) => self.link.chown(path, user.uid, user.gid).await,
            None => Ok(()),
        }
    }

    pub(super) async fn fill(&self, path: &Path, content: Content, exclusive: bool, mode: u32) -> Result<()> {
        match content {
            Content::Bytes(bytes) => {
                let how = WriteFile {
                    mode,
                    parents: false,
                    atomic: false,
                };
                self.link.write(path, bytes, how).await
            }
            Content::Stream(mut stream) => {
                let how = OpenWrite {
                    mode,
                    exclusive,
                    ..OpenWrite::default()
                };
                let mut writer = self.link.open_write(path, how).await?;
                let mut buffer = vec![0; 256 << 10];
                loop {
                    let count = stream.read(&mut buffer).await;
                    let count = count.map_err(|error| stream_error("writing", error))?;
                    if count == 0 {
                        break;
                    }
                    let written = writer.write_all(&buffer[..count]).await;
                    written.map_err(|error| Error::io(format_args!("writing {}", path.display()), error))?;
                }
                writer.finish().await
            }
        }
    }
}

/// A new file beside its destination, removed unless it takes its place.
struct Temporary {
    path: PathBuf,
    of: Option<crate::guest::Link>,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let Some(link) = self.of.take() else { return };
        let path = std::mem::take(&mut self.path);
        crate::detach(async move {
            if link.check().is_ok() {
                let _ = link.remove(&path, false).await;
            }
        });
    }
}
