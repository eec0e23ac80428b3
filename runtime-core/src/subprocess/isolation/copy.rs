//! A root file system of a box's own, where the kernel gives it no layer over the shared one.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, lchown, symlink};
use std::path::Path;

use crate::error::{Error, Result};

/// Copies a tree: directories, files and symbolic links with their modes, and as root with their owners. FIFOs, sockets
/// and devices are left out: none of them is of use in a box. Hard links become files of their own.
pub(super) fn tree(from: &Path, to: &Path, as_root: bool) -> Result<()> {
    let mut pending = vec![(from.to_path_buf(), to.to_path_buf())];
    let mut modes = Vec::new();
    while let Some((from, to)) = pending.pop() {
        let fail = |error: io::Error| Error::io(format_args!("copying {}", from.display()), error);
        let found = fs::symlink_metadata(&from).map_err(fail)?;
        let kind = found.file_type();
        if kind.is_dir() {
            fs::DirBuilder::new().mode(0o700).create(&to).map_err(fail)?;
            for entry in fs::read_dir(&from).map_err(fail)? {
                let name = entry.map_err(fail)?.file_name();
                pending.push((from.join(&name), to.join(&name)));
            }
        } else if kind.is_symlink() {
            symlink(fs::read_link(&from).map_err(fail)?, &to).map_err(fail)?;
        } else if kind.is_file() {
            fs::copy(&from, &to).map_err(fail)?;
        } else {
            continue;
        }
        if as_root {
            lchown(&to, Some(found.uid()), Some(found.gid())).map_err(fail)?;
        }
        if !kind.is_symlink() {
            modes.push((to, found.permissions()));
        }
    }
    // Afterwards: a directory that may not be written is filled first, and a change of owner takes bits away.
    for (path, mode) in modes.into_iter().rev() {
        fs::set_permissions(&path, mode)
            .map_err(|error| Error::io(format_args!("copying to {}", path.display()), error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_tree_is_copied_as_it_is_and_stays_as_it_was() {
        let place = tempfile::tempdir().unwrap();
        let from = place.path().join("from");
        fs::create_dir_all(from.join("usr/bin")).unwrap();
        fs::write(from.join("usr/bin/tool"), "#!").unwrap();
        fs::set_permissions(from.join("usr/bin/tool"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(from.join("usr/bin"), fs::Permissions::from_mode(0o555)).unwrap();
        symlink("usr/bin", from.join("bin")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
        let to = place.path().join("to");
        tree(&from, &to, rustix::process::geteuid().is_root()).unwrap();
        assert_eq!(fs::read(to.join("bin/tool")).unwrap(), b"#!");
        assert_eq!(
            fs::metadata(to.join("bin/tool")).unwrap().permissions().mode() & 0o7777,
            0o755
        );
        assert_eq!(
            fs::metadata(to.join("usr/bin")).unwrap().permissions().mode() & 0o7777,
            0o555
        );
        assert_eq!(fs::read_link(to.join("bin")).unwrap(), Path::new("usr/bin"));
        assert!(!to.join("socket").exists());
        for dir in [&from, &to] {
            fs::set_permissions(dir.join("usr/bin"), fs::Permissions::from_mode(0o755)).unwrap();
        }
    }
}
