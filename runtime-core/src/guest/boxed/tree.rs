//! Directory trees as tar streams, through the guest: packed and unpacked on this side, entry by entry.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::guest::frame::FileKind;
use crate::guest::{FileWriter, OpenWrite};
use crate::{ByteStream, Error, ErrorKind, Result, stream_error};
use tar::{Archive, Builder, EntryType, Header};
use tokio::io::AsyncWriteExt;
use tokio::runtime::Handle;
use tokio_util::io::SyncIoBridge;

use super::GuestBox;

/// Bytes between the thread that packs and the task that reads.
const PIPE: usize = 1 << 20;

/// Files up to this size are read in one step.
const SMALL: u64 = 256 << 10;

/// Tells a thread that nobody waits for it any more.
struct GiveUp(Arc<AtomicBool>);

impl Drop for GiveUp {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl GuestBox {
    /// Unpacks a checked tar stream.
    ///
    /// # Errors
    /// Those of [`Runtime::upload_tar`](crate::Runtime::upload_tar).
    ///
    /// # Cancellation
    /// Ends at the next read of the stream; a part has been unpacked.
    pub async fn upload_tar(self: &Arc<Self>, dir: &Path, tar: ByteStream) -> Result<()> {
        self.create_dir(dir).await?;
        let (reader, mut writer) = tokio::io::duplex(PIPE);
        // Fed by this future, so that dropping it ends the thread's stream.
        let feed = async move {
            let mut tar = tokio::io::BufReader::with_capacity(128 << 10, tar);
            match tokio::io::copy_buf(&mut tar, &mut writer).await {
                // The thread gave up, and says why.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                Err(error) => Err(stream_error("unpacking", error)),
                Ok(_) => Ok(()),
            }
        };
        let guest = self.clone();
        let dir = dir.to_path_buf();
        let handle = Handle::current();
        let given_up = Arc::new(AtomicBool::new(false));
        let _guard = GiveUp(given_up.clone());
        let thread =
            tokio::task::spawn_blocking(move || guest.unpack(&handle, &dir, SyncIoBridge::new(reader), &given_up));
        let (fed, unpacked) = tokio::join!(feed, thread);
        match unpacked {
            Ok(result) => result?,
            Err(error) => return Err(Error::new(ErrorKind::Other, "a transfer's thread failed").with_source(error)),
        }
        fed
    }

    fn unpack(&self, handle: &Handle, dir: &Path, reader: impl Read, given_up: &AtomicBool) -> Result<()> {
        let bad = |error: io::Error| stream_error("reading the archive", error);
        let mut archive = Archive::new(reader);
        let mut directories: Vec<(PathBuf, u32)> = Vec::new();
        for entry in archive.entries().map_err(bad)? {
            if given_up.load(Ordering::Relaxed) {
                return Ok(());
            }
            let mut entry = entry.map_err(bad)?;
            let relative = entry.path().map_err(bad)?.into_owned();
            let target = dir.join(&relative);
            let mode = entry.header().mode().map_err(bad)? & 0o777;
            match entry.header().entry_type() {
                EntryType::Directory => {
                    handle.block_on(self.create_dir(&target))?;
                    directories.push((target, mode));
                }
                EntryType::Symlink => {
                    let link = entry.link_name().map_err(bad)?.unwrap_or_default().into_owned();
                    handle.block_on(async {
                        self.make_way(&target).await?;
                        self.link.symlink(&link, &target).await?;
                        self.give(&target).await
                    })?;
                }
                EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                    let size = entry.size();
                    let content = if size <= SMALL {
                        let mut bytes = Vec::new();
                        entry.read_to_end(&mut bytes).map_err(bad)?;
                        if (bytes.len() as u64) < size {
                            return Err(Error::new(
                                ErrorKind::ConnectionLost,
                                "the archive ends within an entry",
                            ));
                        }
                        Some(bytes)
                    } else {
                        None
                    };
                    let place = handle.block_on(self.make_place(&target, mode | 0o200))?;
                    match content {
                        Some(content) => handle.block_on(pour(place, &target, &content))?,
                        None => pour_large(handle, place, &target, &mut entry, size)?,
                    }
                    handle.block_on(async {
                        self.give(&target).await?;
                        self.link.chmod(&target, mode).await
                    })?;
                }
                // Headers of the format itself are not entries, and devices were refused before.
                _ => {}
            }
        }
        // A directory's own mode last: it may forbid writing into it.
        for (path, mode) in directories.into_iter().rev() {
            handle.block_on(self.link.chmod(&path, mode))?;
        }
        Ok(())
    }

    /// A new file in an entry's place.
    async fn make_place(&self, target: &Path, mode: u32) -> Result<FileWriter> {
        let how = OpenWrite {
            mode,
            exclusive: true,
            ..OpenWrite::default()
        };
        let mut attempts = 3;
        loop {
            self.make_way(target).await?;
            match self.link.open_write(target, how).await {
                // Made in between, such as by an upload that was given up a moment ago.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && attempts > 0 => attempts -= 1,
                opened => return opened,
            }
        }
    }

    /// Removes a file or link that is in an entry's place, and makes missing parents.
    async fn make_way(&self, target: &Path) -> Result<()> {
        match self.link.stat(target, false).await {
            Ok(info) if info.kind == FileKind::Directory => {
                let message = format!("unpacking {}: it is a directory", target.display());
                Err(Error::new(ErrorKind::WrongFileType, message))
            }
            Ok(_) => match self.link.remove(target, false).await {
                // Somebody else was faster.
                Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => match target.parent() {
                Some(parent) => self.create_dir(parent).await,
                None => Ok(()),
            },
            Err(error) => Err(error),
        }
    }

    /// Packs a directory.
    ///
    /// # Errors
    /// Those of [`Runtime::download_tar`](crate::Runtime::download_tar).
    pub async fn download_tar(self: &Arc<Self>, dir: &Path) -> Result<ByteStream> {
        if self.link.stat(dir, true).await?.kind != FileKind::Directory {
            return Err(Error::new(
                ErrorKind::WrongFileType,
                format!("{} is not a directory", dir.display()),
            ));
        }
        let (reader, writer) = tokio::io::duplex(PIPE);
        let guest = self.clone();
        let dir = dir.to_path_buf();
        let handle = Handle::current();
        let thread = tokio::task::spawn_blocking(move || guest.pack(&handle, &dir, SyncIoBridge::new(writer)));
        Ok(crate::feed::behind(reader, thread))
    }

    fn pack(&self, handle: &Handle, dir: &Path, writer: impl io::Write) -> Result<()> {
        let mut builder = Builder::new(writer);
        let mut pending = vec![PathBuf::new()];
        while let Some(parent) = pending.pop() {
            // `dir` itself may be a link to a directory; what is below is not followed.
            let mut entries = handle.block_on(self.link.list(&dir.join(&parent), usize::MAX))?;
            entries.sort_by(|a, b| a.name.cmp(&b.name));
            let mut children = Vec::new();
            for entry in entries {
                let relative = parent.join(&entry.name);
                let path = dir.join(&relative);
                let at = |error| stream_error(&format!("packing {}", path.display()), error);
                let mut header = Header::new_gnu();
                header.set_mode(entry.info.mode & 0o7777);
                header.set_mtime(u64::try_from(entry.info.mtime).unwrap_or(0));
                header.set_uid(0);
                header.set_gid(0);
                header.set_size(0);
                match entry.info.kind {
                    FileKind::Directory => {
                        header.set_entry_type(EntryType::Directory);
                        builder.append_data(&mut header, &relative, io::empty()).map_err(at)?;
                        children.push(relative);
                    }
                    FileKind::Symlink => {
                        header.set_entry_type(EntryType::Symlink);
                        let target = handle.block_on(self.link.readlink(&path))?;
                        builder.append_link(&mut header, &relative, &target).map_err(at)?;
                    }
                    FileKind::File if entry.info.size <= SMALL => {
                        let content = match handle.block_on(self.link.read(&path, SMALL)) {
                            Ok(content) => content,
                            // It was removed or replaced while we looked.
                            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::WrongFileType) => {
                                continue;
                            }
                            Err(error) => return Err(error),
                        };
                        header.set_size(content.len() as u64);
                        builder.append_data(&mut header, &relative, &content[..]).map_err(at)?;
                    }
                    FileKind::File => {
                        let reader = handle.block_on(self.link.open_read(&path))?;
                        let reader = SyncIoBridge::new_with_handle(Box::pin(reader), handle.clone());
                        header.set_size(entry.info.size);
                        // A file that changes while it is read still fills exactly the size that was announced.
                        let content = reader.take(entry.info.size).chain(io::repeat(0)).take(entry.info.size);
                        builder.append_data(&mut header, &relative, content).map_err(at)?;
                    }
                    _ => {}
                }
            }
            pending.extend(children.into_iter().rev());
        }
        let flushed = builder
            .into_inner()
            .and_then(|mut writer| io::Write::flush(&mut writer));
        flushed.map_err(|error| stream_error("packing", error))
    }
}

async fn pour(mut place: FileWriter, target: &Path, content: &[u8]) -> Result<()> {
    let written = place.write_all(content).await;
    written.map_err(|error| Error::io(format_args!("writing {}", target.display()), error))?;
    place.finish().await
}

fn pour_large(handle: &Handle, mut place: FileWriter, target: &Path, entry: &mut impl Read, size: u64) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut left = size;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let count = entry.read(&mut buffer[..most]);
        let count = count.map_err(|error| stream_error("reading the archive", error))?;
        if count == 0 {
            return Err(Error::new(
                ErrorKind::ConnectionLost,
                "the archive ends within an entry",
            ));
        }
        let written = handle.block_on(place.write_all(&buffer[..count]));
        written.map_err(|error| Error::io(format_args!("writing {}", target.display()), error))?;
        left -= count as u64;
    }
    handle.block_on(place.finish())
}
