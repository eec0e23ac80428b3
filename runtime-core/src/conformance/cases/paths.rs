//! Looking at, listing, making and removing paths.

use crate::conformance::case::{Capability, Case, case};
use crate::conformance::context::{Context, refused, refused_field, sh};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::ErrorKind;
use crate::files::FileType;

pub(super) const CASES: &[Case] = &[
    case!("paths/stat-tells-what-a-path-is", stat),
    case!("paths/stat-tells-modes", stat_modes).needs(&[Capability::FileModes]),
    case!("paths/list-tells-all-entries-in-order", list),
    case!("paths/list-of-an-empty-directory", list_empty),
    case!("paths/list-of-five-thousand-entries", list_many).deadline(120),
    case!("paths/list-follows-a-link-to-a-directory", list_link),
    case!("paths/create-dir-makes-parents-and-may-exist", create_dir),
    case!("paths/create-dir-onto-a-file-is-refused", create_dir_onto_file),
    case!("paths/remove-takes-files-links-and-empty-directories", remove),
    case!("paths/remove-of-a-full-directory-is-refused", remove_full),
    case!("paths/remove-all-does-not-follow-links", remove_all),
    case!("paths/the-root-is-not-removed", remove_root),
];

async fn stat(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", "12345").await?;
    sh(
        &sandbox,
        "mkdir dir; ln -s file link; ln -s missing dangling; mkfifo fifo",
    )
    .await?;
    let file = sandbox.stat("file").await?;
    ensure_eq!((file.file_type, file.size), (FileType::File, 5));
    ensure_eq!(sandbox.stat("dir").await?.file_type, FileType::Directory);
    ensure_eq!(sandbox.stat(".").await?.file_type, FileType::Directory);
    ensure_eq!(sandbox.stat("/").await?.file_type, FileType::Directory);
    ensure_eq!(sandbox.stat("fifo").await?.file_type, FileType::Special);
    ensure_eq!(sandbox.stat("/dev/null").await?.file_type, FileType::Special);
    for (path, target) in [("link", "file"), ("dangling", "missing")] {
        let link = sandbox.stat(path).await?;
        ensure_eq!(link.file_type, FileType::Symlink, "{path}");
        if let Some(told) = link.link_target {
            ensure_eq!(told.to_str(), Some(target), "{path}");
        }
    }
    Ok(())
}

async fn stat_modes(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "touch file; chmod 640 file; mkdir dir; chmod 1750 dir").await?;
    ensure_eq!(sandbox.stat("file").await?.mode, Some(0o640));
    ensure_eq!(sandbox.stat("dir").await?.mode, Some(0o1750));
    let listed: Vec<_> = sandbox
        .list(".")
        .await?
        .into_iter()
        .map(|entry| entry.metadata.mode)
        .collect();
    ensure_eq!(listed, [Some(0o1750), Some(0o640)]);
    Ok(())
}

async fn list(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "mkdir b; echo 123 >a; ln -s a d; mkfifo c; touch .hidden b/inner",
    )
    .await?;
    let entries = sandbox.list(".").await?;
    let listed: Vec<_> = (entries.iter())
        .map(|entry| (entry.name.to_string_lossy().into_owned(), entry.metadata.file_type))
        .collect();
    let want = [
        (".hidden", FileType::File),
        ("a", FileType::File),
        ("b", FileType::Directory),
        ("c", FileType::Special),
        ("d", FileType::Symlink),
    ];
    ensure_eq!(listed, want.map(|(name, kind)| (name.to_owned(), kind)));
    ensure_eq!(entries[1].metadata.size, 4);
    Ok(())
}

async fn list_empty(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.create_dir("empty").await?;
    ensure!(sandbox.list("empty").await?.is_empty(), "nothing is in it");
    Ok(())
}

async fn list_many(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "mkdir many; cd many; i=0; while [ $i -lt 5000 ]; do : >entry-$i; i=$((i+1)); done",
    )
    .await?;
    let entries = sandbox.list("many").await?;
    ensure_eq!(entries.len(), 5000);
    ensure!(entries.is_sorted_by(|a, b| a.name < b.name), "sorted, each once");
    sandbox.remove_all("many").await?;
    Ok(())
}

async fn list_link(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "mkdir dir; touch dir/inner; ln -s dir link; ln -s inner dir/again",
    )
    .await?;
    let names: Vec<_> = sandbox
        .list("link")
        .await?
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    ensure_eq!(names, ["again", "inner"]);
    Ok(())
}

async fn create_dir(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for _ in 0..2 {
        sandbox.create_dir("one/two/-three").await?;
        ensure!(sandbox.stat("one/two/-three").await?.is_dir(), "it is a directory");
    }
    sandbox.write("one/two/-three/file", "kept").await?;
    sandbox.create_dir("one/two").await?;
    sandbox.create_dir("one/two/-three").await?;
    ensure_eq!(&sandbox.read("one/two/-three/file").await?[..], b"kept");
    sandbox.create_dir(sandbox.workdir().join("absolute")).await?;
    ensure!(sandbox.stat("absolute").await?.is_dir(), "it is a directory");
    Ok(())
}

async fn create_dir_onto_file(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", "x").await?;
    for path in ["file", "file/below"] {
        let error = match sandbox.create_dir(path).await {
            Ok(()) => return Err(Failure::new(format_args!("{path} became a directory"))),
            Err(error) => error,
        };
        ensure!(
            matches!(error.kind(), ErrorKind::WrongFileType | ErrorKind::AlreadyExists),
            "{error}"
        );
    }
    ensure_eq!(&sandbox.read("file").await?[..], b"x");
    Ok(())
}

async fn remove(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "touch file; mkdir dir empty; touch dir/kept; ln -s dir link; ln -s missing dangling; mkfifo fifo",
    )
    .await?;
    for path in ["file", "empty", "link", "dangling", "fifo"] {
        sandbox.remove(path).await?;
        refused(sandbox.stat(path).await, ErrorKind::NotFound)?;
        refused(sandbox.remove(path).await, ErrorKind::NotFound)?;
    }
    ensure_eq!(sh(&sandbox, "ls -A . dir").await?, ".:\ndir\n\ndir:\nkept\n");
    Ok(())
}

async fn remove_full(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("dir/file", "x").await?;
    ensure!(sandbox.remove("dir").await.is_err(), "a full directory was removed");
    ensure_eq!(&sandbox.read("dir/file").await?[..], b"x");
    sandbox.remove_all("dir").await?;
    refused(sandbox.stat("dir").await, ErrorKind::NotFound)?;
    Ok(())
}

async fn remove_all(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(
        &sandbox,
        "mkdir -p kept tree/deep/er; echo 1 >kept/file; touch tree/deep/er/file tree/-rf; \
         ln -s ../kept tree/link; ln -s ../kept/file tree/filelink; ln -s kept toplink; mkfifo tree/fifo",
    )
    .await?;
    sandbox.remove_all("tree").await?;
    sandbox.remove_all("toplink").await?;
    ensure_eq!(sh(&sandbox, "ls -A . kept").await?, ".:\nkept\n\nkept:\nfile\n");
    ensure_eq!(&sandbox.read("kept/file").await?[..], b"1\n");
    sandbox.write("single", "x").await?;
    sandbox.remove_all("single").await?;
    refused(sandbox.stat("single").await, ErrorKind::NotFound)?;
    Ok(())
}

async fn remove_root(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    // Refused by what the path says, before anything is asked of the box.
    for path in ["/", "//", "/.", "/..", "/usr/..", "..", "dir/.."] {
        refused_field(sandbox.remove(path).await, ErrorKind::InvalidArgument, "path")?;
    }
    sh(&sandbox, "true").await?;
    Ok(())
}
