//! A root directory as a tar archive, made without root: owners and modes are only written down.

use std::io::Write;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// One entry of a root directory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    /// From the root, without a leading slash.
    path: String,
    kind: Kind,
    mode: u32,
    owner: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Directory,
    File(Vec<u8>),
    Link(String),
}

/// What will be the root directory of an image, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Rootfs {
    entries: Vec<Entry>,
    owner: u64,
}

impl Rootfs {
    /// Entries that follow belong to this user and group.
    pub(super) fn owned_by(mut self, owner: u64) -> Self {
        self.owner = owner;
        self
    }

    pub(super) fn dir(self, path: &str, mode: u32) -> Self {
        self.entry(path, Kind::Directory, mode)
    }

    pub(super) fn file(self, path: &str, mode: u32, content: impl Into<Vec<u8>>) -> Self {
        self.entry(path, Kind::File(content.into()), mode)
    }

    pub(super) fn link(self, path: &str, target: &str) -> Self {
        self.entry(path, Kind::Link(target.to_owned()), 0o777)
    }

    fn entry(mut self, path: &str, kind: Kind, mode: u32) -> Self {
        self.entries.push(Entry {
            path: path.trim_start_matches('/').to_owned(),
            kind,
            mode,
            owner: self.owner,
        });
        self
    }

    /// Adds all that goes into the archive to a digest.
    pub(super) fn hash(&self, hasher: &mut Sha256) {
        for entry in &self.entries {
            let (kind, content): (u8, &[u8]) = match &entry.kind {
                Kind::Directory => (b'd', &[]),
                Kind::File(content) => (b'f', content),
                Kind::Link(target) => (b'l', target.as_bytes()),
            };
            // Lengths in front, so that no two root directories give the same bytes.
            let head = format!(
                "{} {} {} {} {}\n",
                char::from(kind),
                entry.mode,
                entry.owner,
                entry.path.len(),
                content.len()
            );
            hasher.update(head.as_bytes());
            hasher.update(entry.path.as_bytes());
            hasher.update(content);
        }
    }

    /// Writes the archive. The same root directory gives the same bytes.
    pub(super) fn write(&self, to: impl Write) -> Result<()> {
        let mut archive = Builder::new(to);
        for entry in &self.entries {
            let mut header = Header::new_gnu();
            header.set_mode(entry.mode);
            header.set_uid(entry.owner);
            header.set_gid(entry.owner);
            header.set_mtime(0);
            header.set_size(0);
            let about = || format!("packing {}", entry.path);
            match &entry.kind {
                Kind::Directory => {
                    header.set_entry_type(EntryType::Directory);
                    let path = format!("{}/", entry.path);
                    archive
                        .append_data(&mut header, path, std::io::empty())
                        .with_context(about)?;
                }
                Kind::File(content) => {
                    header.set_size(content.len() as u64);
                    archive
                        .append_data(&mut header, &entry.path, &content[..])
                        .with_context(about)?;
                }
                Kind::Link(target) => {
                    header.set_entry_type(EntryType::Symlink);
                    archive
                        .append_link(&mut header, &entry.path, target)
                        .with_context(about)?;
                }
            }
        }
        archive.into_inner()?.flush().context("writing the archive")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn sample() -> Rootfs {
        Rootfs::default()
            .dir("/app", 0o755)
            .owned_by(1000)
            .file("/app/tool", 0o750, "x\n")
            .link("/app/link", "tool")
    }

    fn digest(rootfs: &Rootfs) -> [u8; 32] {
        let mut hasher = Sha256::new();
        rootfs.hash(&mut hasher);
        hasher.finalize().into()
    }

    #[test]
    fn the_archive_has_the_entries_with_their_owners_and_modes() {
        let mut bytes = Vec::new();
        sample().write(&mut bytes).expect("written");
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut seen = Vec::new();
        for entry in archive.entries().expect("an archive") {
            let mut entry = entry.expect("an entry");
            let mut content = String::new();
            entry.read_to_string(&mut content).expect("text");
            let header = entry.header();
            let link = entry.link_name().expect("text").map(|link| link.display().to_string());
            seen.push((
                entry.path().expect("text").display().to_string(),
                header.mode().expect("a mode"),
                header.uid().expect("a user"),
                link,
                content,
            ));
        }
        assert_eq!(
            seen,
            [
                ("app/".into(), 0o755, 0, None, String::new()),
                ("app/tool".into(), 0o750, 1000, None, "x\n".into()),
                ("app/link".into(), 0o777, 1000, Some("tool".into()), String::new()),
            ]
        );
    }

    #[test]
    fn any_change_gives_another_digest() {
        let digests = [
            digest(&sample()),
            digest(&sample().file("/x", 0o644, "")),
            digest(&sample().file("/x", 0o755, "")),
            digest(&sample().file("/x", 0o644, "y")),
            digest(&sample().owned_by(0).file("/x", 0o644, "")),
            digest(&sample().dir("/x", 0o644)),
            digest(&sample().link("/x", "y")),
        ];
        for (index, one) in digests.iter().enumerate() {
            assert!(!digests[..index].contains(one), "{index}");
        }
        assert_eq!(digest(&sample()), digest(&sample()));
    }
}
