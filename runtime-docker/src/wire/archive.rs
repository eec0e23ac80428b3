//! Tar archives as the engine's archive API takes and gives them.

use std::io::Read;
use std::path::Path;

use runtime_core::{Error, ErrorKind, Result};
use tar::{Archive, Builder, EntryType, Header};

/// A directory or file for [`pack`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    /// Relative path.
    pub(crate) path: &'a Path,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Owner and group.
    pub(crate) owner: (u32, u32),
    /// Content of a file; `None` is a directory.
    pub(crate) content: Option<&'a [u8]>,
}

/// An archive of these entries.
///
/// # Errors
/// A path that does not fit into an archive.
pub(crate) fn pack(entries: &[Entry<'_>]) -> Result<Vec<u8>> {
    let mut builder = Builder::new(Vec::new());
    for entry in entries {
        let content = entry.content.unwrap_or_default();
        let mut header = Header::new_gnu();
        header.set_entry_type(match entry.content {
            Some(_) => EntryType::Regular,
            None => EntryType::Directory,
        });
        header.set_mode(entry.mode);
        header.set_uid(entry.owner.0.into());
        header.set_gid(entry.owner.1.into());
        header.set_size(content.len() as u64);
        let appended = builder.append_data(&mut header, entry.path, content);
        appended.map_err(|error| Error::io(format_args!("packing {}", entry.path.display()), error))?;
    }
    builder.into_inner().map_err(|error| Error::io("packing", error))
}

/// The content of the first regular file of an archive.
///
/// # Errors
/// [`Protocol`](ErrorKind::Protocol) for what is no archive.
pub(crate) fn first_file(archive: &[u8]) -> Result<Option<Vec<u8>>> {
    let bad = |error| Error::new(ErrorKind::Protocol, "the engine's archive cannot be read").with_source(error);
    let mut archive = Archive::new(archive);
    for entry in archive.entries().map_err(bad)? {
        let mut entry = entry.map_err(bad)?;
        if entry.header().entry_type() == EntryType::Regular {
            let mut content = Vec::new();
            entry.read_to_end(&mut content).map_err(bad)?;
            return Ok(Some(content));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_found_again() {
        let dir = Entry {
            path: Path::new("a"),
            mode: 0o755,
            owner: (1000, 7),
            content: None,
        };
        let file = Entry {
            path: Path::new("a/b"),
            content: Some(b"text"),
            ..dir.clone()
        };
        let packed = pack(&[dir, file]).expect("an archive");
        assert_eq!(first_file(&packed).expect("readable"), Some(b"text".to_vec()));
        let mut archive = Archive::new(&packed[..]);
        let first = archive.entries().expect("entries").next().expect("one").expect("good");
        assert_eq!(first.header().entry_type(), EntryType::Directory);
        assert_eq!(
            (first.header().uid().ok(), first.header().gid().ok()),
            (Some(1000), Some(7))
        );
    }

    #[test]
    fn an_archive_without_a_file_has_none_and_noise_is_an_error() {
        assert_eq!(first_file(&pack(&[]).expect("an archive")).expect("readable"), None);
        let noise = first_file(&[7; 1024]).expect_err("noise");
        assert_eq!(noise.kind(), ErrorKind::Protocol);
    }
}
