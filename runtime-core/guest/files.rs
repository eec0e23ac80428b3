//! File operations. None of them follows what the box says further than the kernel does, none of them blocks on a
//! FIFO or a device, and all of them are bounded in memory.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions, Permissions, ReadDir};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crate::frame::{Entry, FileInfo, FileKind, MAX_ENTRIES, MAX_EVENT, Step};
use crate::sys;

/// `ELOOP` and friends come from the kernel; these two are ours.
pub(crate) const EMFILE: i32 = 24;
pub(crate) const EINVAL: i32 = 22;

/// Most listings that are under way at once.
const MAX_LISTINGS: usize = 64;

/// An error number and where it arose.
pub(crate) type Failure = (Step, i32);

/// The failure of an operation with one step.
pub(crate) fn failure(error: io::Error) -> Failure {
    (Step::Only, error.raw_os_error().unwrap_or(EINVAL))
}

pub(crate) fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// How a file is opened.
pub(crate) struct Open {
    pub(crate) write: bool,
    pub(crate) create: bool,
    pub(crate) exclusive: bool,
    pub(crate) truncate: bool,
    pub(crate) append: bool,
    pub(crate) mode: u32,
}

/// Opens a regular file and nothing else. A FIFO is told by its name first, so that its writer does not wake, and by
/// the descriptor again, because the name may have changed meanwhile.
pub(crate) fn open(path: &Path, how: &Open) -> Result<(File, u64), Failure> {
    const NOT_REGULAR: Failure = (Step::FileType, EINVAL);
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => return Err(NOT_REGULAR),
        Err(error) if error.kind() != io::ErrorKind::NotFound || !how.create => return Err(failure(error)),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options
        .read(!how.write)
        .write(how.write && !how.append)
        .append(how.write && how.append)
        .truncate(how.truncate && !how.append)
        .mode(how.mode)
        .custom_flags(sys::O_NONBLOCK);
    if how.exclusive {
        options.create_new(true);
    } else {
        options.create(how.create);
    }
    let file = options.open(path).map_err(failure)?;
    let metadata = file.metadata().map_err(failure)?;
    if metadata.is_file() {
        Ok((file, metadata.len()))
    } else {
        Err(NOT_REGULAR)
    }
}

pub(crate) fn stat(path: &Path, follow: bool) -> Result<FileInfo, Failure> {
    let metadata = if follow {
        fs::metadata(path)
    } else {
        fs::symlink_metadata(path)
    };
    metadata.map(|metadata| info(&metadata)).map_err(failure)
}

fn info(metadata: &Metadata) -> FileInfo {
    let kind = metadata.file_type();
    FileInfo {
        kind: if kind.is_dir() {
            FileKind::Directory
        } else if kind.is_symlink() {
            FileKind::Symlink
        } else if kind.is_fifo() {
            FileKind::Fifo
        } else if kind.is_socket() {
            FileKind::Socket
        } else if kind.is_block_device() {
            FileKind::BlockDevice
        } else if kind.is_char_device() {
            FileKind::CharDevice
        } else {
            FileKind::File
        },
        mode: metadata.mode() & 0o7777,
        size: metadata.len(),
        mtime: metadata.mtime(),
        mtime_nsec: metadata.mtime_nsec() as u32,
        uid: metadata.uid(),
        gid: metadata.gid(),
    }
}

/// Listings that the host has not read to their end.
#[derive(Default)]
pub(crate) struct Listings(HashMap<u32, ReadDir>);

impl Listings {
    pub(crate) fn start(&mut self, tag: u32, path: &Path) -> Result<(Vec<Entry>, bool), Failure> {
        if self.0.len() >= MAX_LISTINGS {
            return Err((Step::Only, EMFILE));
        }
        self.0.insert(tag, fs::read_dir(path).map_err(failure)?);
        self.more(tag)
    }

    /// The next page, and whether there is another.
    pub(crate) fn more(&mut self, tag: u32) -> Result<(Vec<Entry>, bool), Failure> {
        let directory = self.0.get_mut(&tag).ok_or((Step::Only, EINVAL))?;
        let mut entries = Vec::new();
        let mut bytes = 0;
        let result = loop {
            if entries.len() == usize::from(MAX_ENTRIES) || bytes > MAX_EVENT / 2 {
                break Ok(true);
            }
            match directory.next() {
                None => break Ok(false),
                Some(Err(error)) => break Err(failure(error)),
                // One that was removed since the directory was read is not there.
                Some(Ok(entry)) => {
                    if let Ok(metadata) = entry.metadata() {
                        let name = entry.file_name().as_bytes().to_vec();
                        bytes += name.len() + 64;
                        entries.push(Entry {
                            name,
                            info: info(&metadata),
                        });
                    }
                }
            }
        };
        if !matches!(result, Ok(true)) {
            self.0.remove(&tag);
        }
        result.map(|more| (entries, more))
    }

    pub(crate) fn forget(&mut self, tag: u32) {
        self.0.remove(&tag);
    }
}

pub(crate) fn mkdir(path: &Path, mode: u32, parents: bool) -> Result<(), Failure> {
    fs::DirBuilder::new()
        .mode(mode)
        .recursive(parents)
        .create(path)
        .map_err(failure)
}

/// Removes one thing, or one thing with everything below it.
pub(crate) fn remove(path: &Path, recursive: bool) -> Result<(), Failure> {
    let metadata = fs::symlink_metadata(path).map_err(failure)?;
    let result = match (metadata.is_dir(), recursive) {
        (true, true) => fs::remove_dir_all(path),
        (true, false) => fs::remove_dir(path),
        (false, _) => fs::remove_file(path),
    };
    result.map_err(failure)
}

pub(crate) fn chmod(path: &Path, mode: u32) -> Result<(), Failure> {
    fs::set_permissions(path, Permissions::from_mode(mode & 0o7777)).map_err(failure)
}

/// Opens a log file of a program: created as its user, appended to.
pub(crate) fn open_log(path: &Path, owner: Option<(u32, u32)>) -> Result<File, Failure> {
    let mut how = Open {
        write: true,
        create: true,
        exclusive: true,
        truncate: false,
        append: true,
        mode: 0o644,
    };
    if let Ok((file, _)) = open(path, &how) {
        if let Some((uid, gid)) = owner {
            std::os::unix::fs::fchown(&file, Some(uid), Some(gid)).map_err(failure)?;
        }
        return Ok(file);
    }
    how.exclusive = false;
    open(path, &how).map(|(file, _)| file)
}
