//! Directory trees: to the box and back, and archives that try to get out.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use tar::{Builder, EntryType, Header};
use tokio::io::AsyncReadExt;

use crate::conformance::case::{Capability, Case, case};
use crate::conformance::context::{Context, each, refused, refused_field, sh};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::ErrorKind;
use crate::files::ByteStream;

const MODES: &[Capability] = &[Capability::FileModes];
const LINKS: &[Capability] = &[Capability::Symlinks];

pub(super) const CASES: &[Case] = &[
    case!("trees/a-tree-comes-back-as-it-went", round_trip),
    case!("trees/modes-come-back", modes).needs(MODES),
    case!("trees/symbolic-links-come-back-unfollowed", links).needs(LINKS),
    case!("trees/odd-names-come-back", odd_names),
    case!("trees/long-paths-come-back", long_paths),
    case!("trees/an-empty-tree-is-a-directory", empty),
    case!("trees/ten-thousand-small-files", ten_thousand).deadline(400),
    case!("trees/a-large-file-in-a-tree", large_file).deadline(180),
    case!("trees/an-upload-joins-what-is-there", upload_joins),
    case!("trees/a-download-joins-what-is-there", download_joins),
    case!("trees/a-tree-into-the-workdir-itself", into_workdir),
    case!("trees/uploads-and-downloads-at-once", at_once),
    case!("trees/read-only-directories-come-back", read_only_directories).needs(MODES),
    case!("trees/what-is-missing-is-typed", missing),
    case!("trees/a-file-is-no-tree", not_a_tree),
    case!("trees/special-files-are-left-out", special_files),
    case!("trees/setuid-does-not-come-along", setuid).needs(MODES),
    case!("trees/the-tar-of-a-download-has-relative-paths", download_tar),
    case!("trees/an-archive-with-dot-dot-is-refused", escape_dot_dot),
    case!("trees/an-archive-with-an-absolute-path-is-refused", escape_absolute),
    case!("trees/an-archive-with-an-entry-below-its-link-is-refused", escape_link),
    case!("trees/an-archive-with-a-hard-link-is-refused", escape_hard_link),
    case!("trees/an-archive-with-a-device-or-fifo-is-refused", escape_device),
    case!("trees/a-truncated-archive-is-refused", truncated),
    case!("trees/garbage-is-no-archive", garbage),
    case!(
        "trees/a-download-does-not-write-through-links-of-the-host",
        download_through_link
    ),
];

/// What a path is, to compare trees by.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Node {
    Directory(u32),
    File(u32, Vec<u8>),
    Link(PathBuf),
}

/// Every path below `dir`.
pub(super) fn snapshot(dir: &Path) -> Result<BTreeMap<PathBuf, Node>, Failure> {
    let mut nodes = BTreeMap::new();
    let mut pending = vec![dir.to_path_buf()];
    while let Some(parent) = pending.pop() {
        for entry in fs::read_dir(&parent)? {
            let path = entry?.path();
            let metadata = fs::symlink_metadata(&path)?;
            let mode = metadata.mode() & 0o7777;
            let node = if metadata.is_symlink() {
                Node::Link(fs::read_link(&path)?)
            } else if metadata.is_dir() {
                pending.push(path.clone());
                Node::Directory(mode)
            } else {
                Node::File(mode, fs::read(&path)?)
            };
            nodes.insert(path.strip_prefix(dir)?.to_path_buf(), node);
        }
    }
    Ok(nodes)
}

fn same_tree(got: &Path, want: &Path) -> Verdict {
    let (got, want) = (snapshot(got)?, snapshot(want)?);
    for (path, node) in &want {
        ensure_eq!(got.get(path), Some(node), "{}", path.display());
    }
    for path in got.keys() {
        ensure!(want.contains_key(path), "{} came from nowhere", path.display());
    }
    Ok(())
}

fn put(path: &Path, content: impl AsRef<[u8]>, mode: u32) -> Verdict {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, content)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// A tree of `files` files in directories of ten.
pub(super) fn make_tree(dir: &Path, files: usize) -> Verdict {
    for n in 0..files {
        let path = dir.join(format!("dir-{}/sub-{}/file-{n}", n / 100, n / 10 % 10));
        put(&path, format!("content of {n}\n").repeat(n % 40), 0o644)?;
    }
    Ok(())
}

/// Uploads `local`, downloads it again and compares.
async fn there_and_back(cx: &Context, local: &Path) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.upload_dir(local, "tree").await?;
    let back = cx.scratch().join("back");
    sandbox.download_dir("tree", &back).await?;
    same_tree(&back, local)
}

async fn round_trip(cx: Context) -> Verdict {
    let local = cx.scratch().join("local");
    let every_byte: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    put(&local.join("binary"), every_byte, 0o644)?;
    put(&local.join("empty"), "", 0o644)?;
    put(&local.join("one/two/three/deep"), "deep", 0o644)?;
    fs::create_dir_all(local.join("empty dir/empty dir"))?;
    let mut deep = local.clone();
    for n in 0..60 {
        deep.push(format!("level-{n}"));
    }
    put(&deep.join("bottom"), "bottom", 0o644)?;
    there_and_back(&cx, &local).await?;
    // And the box sees what was sent.
    let sandbox = cx.sandbox().await?;
    sandbox.upload_dir(&local, "tree").await?;
    ensure_eq!(
        sh(
            &sandbox,
            "cat tree/one/two/three/deep; wc -c <tree/empty; ls -A 'tree/empty dir'"
        )
        .await?
        .replace(' ', ""),
        "deep0\nemptydir\n"
    );
    Ok(())
}

async fn modes(cx: Context) -> Verdict {
    let local = cx.scratch().join("local");
    for mode in [0o644, 0o755, 0o600, 0o444, 0o700, 0o777, 0o640] {
        put(&local.join(format!("file-{mode:o}")), "x", mode)?;
    }
    for mode in [0o755, 0o700, 0o750, 0o777] {
        let dir = local.join(format!("dir-{mode:o}"));
        put(&dir.join("inner"), "x", 0o644)?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(mode))?;
    }
    there_and_back(&cx, &local).await
}

async fn links(cx: Context) -> Verdict {
    let local = cx.scratch().join("local");
    put(&local.join("dir/file"), "content", 0o644)?;
    symlink("dir/file", local.join("to-file"))?;
    symlink("dir", local.join("to-dir"))?;
    symlink("missing", local.join("dangling"))?;
    symlink("/etc/hostname", local.join("absolute"))?;
    symlink("../../../outside", local.join("dir/upward"))?;
    symlink("self", local.join("self"))?;
    symlink("größe \n x", local.join("odd"))?;
    symlink("l/".repeat(150), local.join("long"))?;
    there_and_back(&cx, &local).await
}

async fn odd_names(cx: Context) -> Verdict {
    let local = cx.scratch().join("local");
    let long = "n".repeat(255);
    for name in [
        "with space",
        "new\nline",
        "größe-東京-🦀",
        "-rf",
        "--help",
        "'quote\"",
        "$(id)",
        "*",
        "back\\slash",
        "...",
        "tab\t",
        &long,
    ] {
        put(&local.join(name), name, 0o644)?;
        put(&local.join("dir").join(name).join(name), name, 0o644)?;
    }
    there_and_back(&cx, &local).await
}

async fn long_paths(cx: Context) -> Verdict {
    let local = cx.scratch().join("local");
    let mut path = local.clone();
    // Around the limits of the old header: 100 bytes for a name, 155 for what is before it.
    for length in [99, 100, 101, 154, 155, 156, 200] {
        path.push("d".repeat(length));
        put(&path.join("f".repeat(length)), length.to_string(), 0o644)?;
    }
    there_and_back(&cx, &local).await
}

async fn empty(cx: Context) -> Verdict {
    let local = cx.scratch().join("local");
    fs::create_dir(&local)?;
    there_and_back(&cx, &local).await
}

async fn ten_thousand(cx: Context) -> Verdict {
    let local = cx.scratch().join("local");
    make_tree(&local, 10_000)?;
    there_and_back(&cx, &local).await
}

async fn large_file(cx: Context) -> Verdict {
    let local = cx.scratch().join("local");
    let content: Vec<u8> = (0..48_u32 << 18).flat_map(u32::to_le_bytes).collect();
    put(&local.join("large"), content, 0o644)?;
    put(&local.join("small"), "after it", 0o644)?;
    there_and_back(&cx, &local).await
}

async fn upload_joins(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "mkdir -p tree/dir; echo old >tree/dir/both; echo box >tree/dir/box; echo kept >tree/kept",
    )
    .await?;
    let local = cx.scratch().join("local");
    put(&local.join("dir/both"), "new\n", 0o644)?;
    put(&local.join("dir/host"), "host\n", 0o644)?;
    for _ in 0..2 {
        sandbox.upload_dir(&local, "tree").await?;
        let seen = sh(&sandbox, "cat tree/dir/both tree/dir/box tree/dir/host tree/kept").await?;
        ensure_eq!(seen, "new\nbox\nhost\nkept\n");
    }
    Ok(())
}

async fn download_joins(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "mkdir -p tree/dir; echo new >tree/dir/both; echo box >tree/dir/box",
    )
    .await?;
    let local = cx.scratch().join("local");
    put(&local.join("dir/both"), "old and longer\n", 0o644)?;
    put(&local.join("dir/host"), "host\n", 0o644)?;
    for _ in 0..2 {
        sandbox.download_dir("tree", &local).await?;
        ensure_eq!(fs::read_to_string(local.join("dir/both"))?, "new\n");
        ensure_eq!(fs::read_to_string(local.join("dir/box"))?, "box\n");
        ensure_eq!(fs::read_to_string(local.join("dir/host"))?, "host\n");
    }
    // Missing parents are made.
    let deep = cx.scratch().join("a/b/c");
    sandbox.download_dir("tree/dir", &deep).await?;
    ensure_eq!(fs::read_to_string(deep.join("box"))?, "box\n");
    Ok(())
}

async fn into_workdir(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let local = cx.scratch().join("local");
    make_tree(&local, 20)?;
    sandbox.upload_dir(&local, ".").await?;
    let back = cx.scratch().join("back");
    sandbox.download_dir(sandbox.workdir(), &back).await?;
    same_tree(&back, &local)
}

async fn at_once(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let local = cx.scratch().join("local");
    make_tree(&local, 60)?;
    each(8, 0..8, |n| {
        let view = sandbox.view();
        let local = local.clone();
        let back = cx.scratch().join(format!("back-{n}"));
        async move {
            view.upload_dir(&local, format!("tree-{n}")).await?;
            view.download_dir(format!("tree-{n}"), &back).await?;
            same_tree(&back, &local)
        }
    })
    .await
}

async fn read_only_directories(cx: Context) -> Verdict {
    let local = cx.scratch().join("local");
    let back = cx.scratch().join("back");
    put(&local.join("dir/sub/file"), "x", 0o444)?;
    let dirs = ["dir/sub", "dir"];
    let set = |root: &Path, mode: u32| -> Verdict {
        for dir in dirs {
            let path = root.join(dir);
            if path.exists() {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            }
        }
        Ok(())
    };
    set(&local, 0o555)?;
    let result = async {
        let sandbox = cx.sandbox().await?;
        sandbox.upload_dir(&local, "tree").await?;
        sandbox.download_dir("tree", &back).await?;
        same_tree(&back, &local)
    }
    .await;
    // So that the scratch directory can be removed.
    for root in [&local, &back] {
        let _ = fs::set_permissions(root.join("dir"), fs::Permissions::from_mode(0o755));
        set(root, 0o755)?;
    }
    result
}

async fn missing(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let nowhere = cx.scratch().join("missing");
    refused(sandbox.upload_dir(&nowhere, "tree").await, ErrorKind::NotFound)?;
    refused(sandbox.stat("tree").await, ErrorKind::NotFound)?;
    refused(sandbox.download_dir("missing", &nowhere).await, ErrorKind::NotFound)?;
    refused(sandbox.download_tar("missing").await, ErrorKind::NotFound)?;
    Ok(())
}

async fn not_a_tree(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", "x").await?;
    let local = cx.scratch().join("file");
    put(&local, "x", 0o644)?;
    refused(sandbox.upload_dir(&local, "tree").await, ErrorKind::WrongFileType)?;
    refused(
        sandbox.download_dir("file", cx.scratch().join("back")).await,
        ErrorKind::WrongFileType,
    )?;
    fs::create_dir(cx.scratch().join("dir"))?;
    let onto_file = sandbox.upload_dir(cx.scratch().join("dir"), "file").await;
    ensure!(onto_file.is_err(), "a file became a directory");
    ensure_eq!(&sandbox.read("file").await?[..], b"x");
    let onto_file = sandbox.download_dir(".", &local).await;
    ensure!(onto_file.is_err(), "a file of the host became a directory");
    ensure_eq!(fs::read_to_string(&local)?, "x");
    Ok(())
}

async fn special_files(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "mkdir tree; mkfifo tree/fifo; echo x >tree/file").await?;
    let back = cx.scratch().join("back");
    sandbox.download_dir("tree", &back).await?;
    let names: Vec<_> = snapshot(&back)?.into_keys().collect();
    ensure_eq!(names, [PathBuf::from("file")]);
    Ok(())
}

async fn setuid(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "mkdir tree; echo x >tree/file; chmod 4755 tree/file; mkdir tree/dir; chmod 2755 tree/dir",
    )
    .await?;
    let back = cx.scratch().join("back");
    sandbox.download_dir("tree", &back).await?;
    ensure_eq!(
        fs::metadata(back.join("file"))?.mode() & 0o7000,
        0,
        "the file's special bits"
    );
    // A directory of the host may have its own reasons for setgid.
    ensure_eq!(
        fs::metadata(back.join("dir"))?.mode() & 0o5000,
        0,
        "the directory's special bits"
    );
    Ok(())
}

async fn download_tar(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "mkdir -p tree/dir; echo x >tree/dir/file").await?;
    let mut bytes = Vec::new();
    sandbox.download_tar("tree").await?.read_to_end(&mut bytes).await?;
    let mut archive = tar::Archive::new(&bytes[..]);
    let mut files = Vec::new();
    for entry in archive.entries()? {
        let entry = entry?;
        let path = entry.path()?.into_owned();
        ensure!(path.is_relative(), "{} is absolute", path.display());
        if entry.header().entry_type().is_file() {
            files.push(path.components().collect::<PathBuf>());
        }
    }
    let files: Vec<_> = files
        .iter()
        .map(|path| path.strip_prefix(".").unwrap_or(path))
        .collect();
    ensure_eq!(files, [Path::new("dir/file")]);
    Ok(())
}

/// An archive of one good file, then what `bad` adds, then another good file.
fn archive(bad: impl FnOnce(&mut Builder<Vec<u8>>) -> std::io::Result<()>) -> Result<Vec<u8>, Failure> {
    let mut builder = Builder::new(Vec::new());
    add(&mut builder, b"before", EntryType::Regular, b"", b"good")?;
    bad(&mut builder)?;
    add(&mut builder, b"after", EntryType::Regular, b"", b"good")?;
    Ok(builder.into_inner()?)
}

/// Adds an entry whose name and link the crate would not take.
fn add(
    builder: &mut Builder<Vec<u8>>,
    name: &[u8],
    kind: EntryType,
    link: &[u8],
    content: &[u8],
) -> std::io::Result<()> {
    let mut header = Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    header.set_cksum();
    builder.append(&header, content)
}

/// The archive must be refused, with nothing of the bad entry or of later ones written.
async fn is_refused(cx: &Context, bytes: Vec<u8>, outside: &[&str]) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let uploaded = sandbox.upload_tar(ByteStream::from_bytes(bytes), "inner/tree").await;
    refused_field(uploaded, ErrorKind::InvalidArgument, "tar")?;
    for path in outside.iter().chain(&["inner/tree/after"]) {
        refused(sandbox.stat(path).await, ErrorKind::NotFound)?;
    }
    Ok(())
}

async fn escape_dot_dot(cx: Context) -> Verdict {
    for name in [&b"../escaped"[..], b"dir/../../escaped", b"..", b"dir/.."] {
        let bytes = archive(|builder| add(builder, name, EntryType::Regular, b"", b"bad"))?;
        is_refused(&cx, bytes, &["inner/escaped", "escaped"]).await?;
    }
    Ok(())
}

async fn escape_absolute(cx: Context) -> Verdict {
    let outside = format!("/tmp/escaped-{}", crate::names::random_hex(12));
    let bytes = archive(|builder| add(builder, outside.as_bytes(), EntryType::Regular, b"", b"bad"))?;
    is_refused(&cx, bytes, &[&outside]).await
}

async fn escape_link(cx: Context) -> Verdict {
    for target in [&b".."[..], b"../..", b"/tmp"] {
        let bytes = archive(|builder| {
            add(builder, b"link", EntryType::Symlink, target, b"")?;
            add(builder, b"link/escaped", EntryType::Regular, b"", b"bad")
        })?;
        is_refused(&cx, bytes, &["inner/escaped", "escaped", "/tmp/escaped"]).await?;
    }
    // The link itself may not be written through either.
    let bytes = archive(|builder| {
        add(builder, b"link", EntryType::Symlink, b"../escaped", b"")?;
        add(builder, b"link", EntryType::Regular, b"", b"bad")
    })?;
    is_refused(&cx, bytes, &["inner/escaped"]).await
}

async fn escape_hard_link(cx: Context) -> Verdict {
    for target in [&b"/etc/passwd"[..], b"../outside", b"before"] {
        let bytes = archive(|builder| add(builder, b"hard", EntryType::Link, target, b""))?;
        is_refused(&cx, bytes, &["inner/tree/hard"]).await?;
    }
    Ok(())
}

async fn escape_device(cx: Context) -> Verdict {
    for kind in [EntryType::Char, EntryType::Block, EntryType::Fifo] {
        let bytes = archive(|builder| add(builder, b"special", kind, b"", b""))?;
        is_refused(&cx, bytes, &["inner/tree/special"]).await?;
    }
    Ok(())
}

async fn truncated(cx: Context) -> Verdict {
    let mut builder = Builder::new(Vec::new());
    add(&mut builder, b"file", EntryType::Regular, b"", &[b'x'; 100_000])?;
    let bytes = builder.into_inner()?;
    // In a header, right after one, in the content.
    for length in [100, 512, 513, 5000, 100_000] {
        let sandbox = cx.sandbox().await?;
        let uploaded = sandbox
            .upload_tar(ByteStream::from_bytes(bytes[..length].to_vec()), "tree")
            .await;
        refused_field(uploaded, ErrorKind::InvalidArgument, "tar")
            .map_err(|failure| Failure::new(format_args!("cut to {length} bytes: {failure}")))?;
    }
    Ok(())
}

async fn garbage(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for bytes in [vec![b'g'; 5000], vec![0xff; 512], b"short".to_vec()] {
        let uploaded = sandbox.upload_tar(ByteStream::from_bytes(bytes), "tree").await;
        refused_field(uploaded, ErrorKind::InvalidArgument, "tar")?;
    }
    Ok(())
}

async fn download_through_link(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "mkdir -p tree/dir other; echo bad >tree/dir/file; echo bad >other/name",
    )
    .await?;
    let (local, outside) = (cx.scratch().join("local"), cx.scratch().join("outside"));
    fs::create_dir_all(&local)?;
    put(&outside.join("file"), "good", 0o644)?;
    // A directory of the box over a link of the host.
    symlink(&outside, local.join("dir"))?;
    refused(sandbox.download_dir("tree", &local).await, ErrorKind::Protocol)?;
    ensure_eq!(fs::read_to_string(outside.join("file"))?, "good");
    // A file over a link takes the link's place.
    symlink(outside.join("file"), local.join("name"))?;
    sandbox.download_dir("other", &local).await?;
    ensure_eq!(fs::read_to_string(outside.join("file"))?, "good");
    ensure_eq!(fs::read_to_string(local.join("name"))?, "bad\n");
    ensure!(
        !fs::symlink_metadata(local.join("name"))?.is_symlink(),
        "the link is still there"
    );
    Ok(())
}
