//! Reading and writing files: sizes, limits, names, special files, modes.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};

use crate::conformance::case::{Capability, Case, case, probe};
use crate::conformance::context::{Context, each, refused, refused_field, sh};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::{Error, ErrorKind};
use crate::files::{ByteStream, WriteOptions};
use crate::view::View;

const MODES: &[Capability] = &[Capability::FileModes];

pub(super) const CASES: &[Case] = &[
    case!("files/what-is-written-is-read", round_trip),
    case!("files/programs-and-calls-see-the-same-files", shared_with_programs),
    case!("files/an-empty-file", empty),
    case!("files/a-hundred-mebibytes", hundred_mebibytes)
        .deadline(240)
        .alone(),
    case!("files/a-stream-is-written-to-its-end", stream_in).deadline(120),
    case!("files/a-file-is-read-as-a-stream", stream_out).deadline(120),
    case!("files/a-stream-that-fails-fails-the-write", stream_fails),
    case!("files/odd-names", odd_names).deadline(180),
    case!("files/non-utf8-names", non_utf8_names)
        .needs(&[Capability::NonUtf8Argv])
        .gap_untested(),
    case!("files/names-that-cannot-be-are-refused", bad_names),
    case!("files/relative-paths-are-under-the-workdir", relative_paths),
    case!("files/a-missing-file-is-typed", missing),
    case!("files/a-directory-is-no-file", directory),
    case!("files/a-limit-that-fits-exactly", limit_fits),
    case!("files/a-limit-that-is-exceeded", limit_exceeded),
    case!("files/a-limit-of-zero", limit_zero),
    case!("files/a-fifo-is-read-within-bounds", fifo)
        .needs(&[Capability::SpecialFileReads])
        .or_else(probe!(special_refused)),
    case!("files/a-fifo-without-a-writer-does-not-hang", fifo_silent).deadline(120),
    case!("files/dev-zero-is-read-within-bounds", dev_zero)
        .needs(&[Capability::SpecialFileReads])
        .or_else(probe!(special_refused)),
    case!("files/a-symbolic-link-is-followed-for-reading", read_through_link),
    case!("files/symbolic-links-in-a-circle-are-an-error", link_loop),
    case!("files/writing-creates-parents", creates_parents),
    case!("files/writing-replaces-all-of-the-old-content", replaces),
    case!("files/writing-goes-through-a-symbolic-link", write_through_link),
    case!("files/writing-onto-a-directory-is-refused", write_onto_directory),
    case!("files/writing-onto-a-fifo-or-device-is-refused", write_onto_special),
    case!("files/a-reader-never-sees-a-part-of-a-write", atomic)
        .needs(&[Capability::AtomicWrite])
        .gap_untested()
        .deadline(120),
    case!("files/writers-at-once-leave-one-whole-content", writers)
        .needs(&[Capability::AtomicWrite])
        .gap_untested(),
    case!("files/writing-in-place-keeps-hard-links", in_place),
    case!("files/a-mode-is-set", mode_set).needs(MODES),
    case!("files/an-existing-mode-is-kept", mode_kept).needs(MODES),
    case!("files/a-mode-beyond-twelve-bits-is-refused", mode_refused),
    case!("files/a-read-only-file", read_only),
    case!("files/an-unreadable-file-is-typed", unreadable),
    case!("files/sixty-four-writes-and-reads-at-once", many_at_once).deadline(300),
];

async fn round_trip(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let every_byte: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    let contents: [&[u8]; 7] = [
        b"x",
        b"no newline",
        b"\0",
        b"\n",
        b"\xff\xfe\0\r\n",
        b"'; exit 1; '",
        &every_byte,
    ];
    for content in contents {
        sandbox.write("file", content.to_vec()).await?;
        ensure_eq!(&sandbox.read("file").await?[..], content);
        ensure_eq!(sandbox.stat("file").await?.size, content.len() as u64);
    }
    // Sizes around those that buffers and frames have.
    for size in [
        4095, 4096, 4097, 65_535, 65_536, 65_537, 262_143, 262_144, 262_145, 1_048_577,
    ] {
        let content: Vec<u8> = (0..size).map(|n| (n % 251) as u8).collect();
        sandbox.write("file", content.clone()).await?;
        ensure!(sandbox.read("file").await? == content, "{size} bytes came back damaged");
    }
    Ok(())
}

async fn shared_with_programs(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("from-host", "host\n").await?;
    ensure_eq!(sh(&sandbox, "cat from-host").await?, "host\n");
    sh(&sandbox, r"printf 'box\n' >from-box").await?;
    ensure_eq!(&sandbox.read("from-box").await?[..], b"box\n");
    sh(&sandbox, "rm from-host; echo longer than before >from-box").await?;
    refused(sandbox.read("from-host").await, ErrorKind::NotFound)?;
    ensure_eq!(&sandbox.read("from-box").await?[..], b"longer than before\n");
    Ok(())
}

async fn empty(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("empty", "").await?;
    ensure!(sandbox.read("empty").await?.is_empty(), "an empty file has no bytes");
    ensure_eq!(sandbox.stat("empty").await?.size, 0);
    let mut seen = Vec::new();
    sandbox.open("empty").await?.read_to_end(&mut seen).await?;
    ensure!(seen.is_empty(), "{seen:?}");
    sandbox.write("streamed", ByteStream::from_bytes("")).await?;
    ensure_eq!(sh(&sandbox, "wc -c <streamed").await?.trim(), "0");
    Ok(())
}

async fn hundred_mebibytes(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    // Blocks that differ, so that one that is lost or comes twice is seen.
    let mut content = Vec::new();
    for n in 0..25_u32 << 10 {
        content.extend_from_slice(&n.to_le_bytes().repeat(1 << 10));
    }
    let content = Bytes::from(content);
    sandbox.write("large", content.clone()).await?;
    ensure_eq!(sh(&sandbox, "wc -c <large").await?.trim(), (100 << 20).to_string());
    let back = sandbox.read("large").await?;
    ensure!(back == content, "100 MiB came back damaged ({} bytes)", back.len());
    Ok(())
}

async fn stream_in(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let content = Bytes::from((0..20_u32 << 18).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
    sandbox.write("file", ByteStream::from_bytes(content.clone())).await?;
    ensure!(sandbox.read("file").await? == content, "20 MiB came back damaged");
    // A stream that comes in pieces, with a mode and in place.
    let (mut writer, reader) = tokio::io::duplex(1000);
    let feed = tokio::spawn(async move {
        for n in 0..5000 {
            tokio::io::AsyncWriteExt::write_all(&mut writer, format!("{n}\n").as_bytes()).await?;
        }
        Ok::<_, std::io::Error>(())
    });
    let options = WriteOptions {
        atomic: false,
        ..WriteOptions::default()
    };
    sandbox.write_with("file", ByteStream::new(reader), options).await?;
    feed.await??;
    let want: String = (0..5000).map(|n| format!("{n}\n")).collect();
    ensure_eq!(&sandbox.read("file").await?[..], want.as_bytes());
    Ok(())
}

async fn stream_out(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "yes 'a line' | head -c 20000000 >file").await?;
    let mut stream = sandbox.open("file").await?;
    let mut seen = Vec::new();
    stream.read_to_end(&mut seen).await?;
    ensure_eq!(seen.len(), 20_000_000);
    ensure!(
        seen.chunks(7).all(|line| b"a line\n".starts_with(line)),
        "it came back damaged"
    );
    // One that is not read to its end costs nothing.
    let mut stream = sandbox.open("file").await?;
    let mut start = [0; 7];
    stream.read_exact(&mut start).await?;
    drop(stream);
    ensure_eq!(&start, b"a line\n");
    Ok(())
}

/// Gives some bytes, then an error.
struct Failing(bool);

impl AsyncRead for Failing {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut TaskContext<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if std::mem::replace(&mut self.0, true) {
            return Poll::Ready(Err(std::io::Error::other(Error::new(
                ErrorKind::QuotaExceeded,
                "the source failed",
            ))));
        }
        buf.put_slice(b"a part");
        Poll::Ready(Ok(()))
    }
}

async fn stream_fails(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", "old").await?;
    let written = sandbox.write("file", ByteStream::new(Failing(false))).await;
    refused(written, ErrorKind::QuotaExceeded)?;
    if cx.capabilities().atomic_write {
        ensure_eq!(&sandbox.read("file").await?[..], b"old");
        ensure_eq!(sh(&sandbox, "ls -A").await?, "file\n", "nothing half written stays");
    }
    Ok(())
}

const ODD_NAMES: [&str; 19] = [
    "with space",
    " leading and trailing ",
    "new\nline",
    "tab\tand\rreturn",
    "größe-東京-🦀",
    "e\u{301} is not \u{e9}",
    "-rf",
    "--",
    "--help",
    "'single'",
    "\"double\"",
    "$(touch made-by-a-shell) `id` $HOME",
    "*?[a]",
    "back\\slash",
    ";&|<>",
    "~",
    "...",
    "#{}!%,:@^",
    "\u{1}\u{1b}[31m",
];

async fn odd_name(view: &View, name: &Path) -> Verdict {
    let content = name.as_os_str().as_encoded_bytes().to_vec();
    view.write(name, content.clone()).await?;
    ensure_eq!(&view.read(name).await?[..], &content[..], "{name:?}");
    ensure!(view.stat(name).await?.is_file(), "{name:?} is a file");
    let dir = Path::new("dir").join(name);
    view.write(dir.join(name), content.clone()).await?;
    let listed = view.list(&dir).await?;
    ensure!(
        listed.len() == 1 && listed[0].name == name.as_os_str(),
        "{name:?} is listed as {listed:?}"
    );
    view.remove(dir.join(name)).await?;
    view.remove(&dir).await?;
    Ok(())
}

async fn odd_names(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.create_dir("dir").await?;
    let long = "n".repeat(255);
    for name in ODD_NAMES.into_iter().chain([long.as_str()]) {
        odd_name(&sandbox, Path::new(name)).await?;
    }
    let mut listed: Vec<_> = sandbox.list(".").await?.into_iter().map(|entry| entry.name).collect();
    let mut want: Vec<OsString> = ODD_NAMES
        .into_iter()
        .chain([long.as_str(), "dir"])
        .map(Into::into)
        .collect();
    ensure!(listed.is_sorted(), "the list is sorted by name");
    listed.sort();
    want.sort();
    ensure_eq!(listed, want);
    Ok(())
}

async fn non_utf8_names(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for name in [b"caf\xe9".to_vec(), vec![0xff], b"\xc3\x28".to_vec()] {
        odd_name(&sandbox, Path::new(&OsString::from_vec(name))).await?;
    }
    Ok(())
}

async fn bad_names(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let too_long = "n".repeat(256);
    let too_deep = "d/".repeat(2100) + "f";
    for path in ["", "a\0b", &too_long, &too_deep] {
        let kind = ErrorKind::InvalidArgument;
        refused_field(sandbox.read(path).await, kind, "path")?;
        refused_field(sandbox.write(path, "x").await, kind, "path")?;
        refused_field(sandbox.stat(path).await, kind, "path")?;
        refused_field(sandbox.list(path).await, kind, "path")?;
        refused_field(sandbox.create_dir(path).await, kind, "path")?;
        refused_field(sandbox.remove_all(path).await, kind, "path")?;
        refused_field(sandbox.upload_dir(cx.scratch(), path).await, kind, "path")?;
    }
    Ok(())
}

async fn relative_paths(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("a/b", "relative").await?;
    let absolute = sandbox.workdir().join("a/b");
    ensure_eq!(&sandbox.read(&absolute).await?[..], b"relative");
    sandbox.write(&absolute, "absolute").await?;
    for path in ["a/b", "./a/b", "a//b", "a/./b", "a/../a/b"] {
        ensure_eq!(&sandbox.read(path).await?[..], b"absolute", "{path}");
    }
    Ok(())
}

async fn missing(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for path in ["missing", "missing/too", "/no/such/file"] {
        refused(sandbox.read(path).await, ErrorKind::NotFound)?;
        refused(sandbox.read_up_to(path, 10).await, ErrorKind::NotFound)?;
        refused(sandbox.open(path).await, ErrorKind::NotFound)?;
        refused(sandbox.stat(path).await, ErrorKind::NotFound)?;
        refused(sandbox.list(path).await, ErrorKind::NotFound)?;
        refused(sandbox.remove(path).await, ErrorKind::NotFound)?;
        refused(sandbox.remove_all(path).await, ErrorKind::NotFound)?;
    }
    let error = refused(sandbox.read("missing").await, ErrorKind::NotFound)?;
    ensure!(
        error.operation().is_some_and(|operation| operation.contains("missing")),
        "it names the file: {error}"
    );
    ensure_eq!(error.sandbox(), Some(sandbox.name()));
    Ok(())
}

async fn directory(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.create_dir("dir").await?;
    refused(sandbox.read("dir").await, ErrorKind::WrongFileType)?;
    refused(sandbox.read_up_to("dir", 0).await, ErrorKind::WrongFileType)?;
    refused(sandbox.open("dir").await, ErrorKind::WrongFileType)?;
    sandbox.write("file", "x").await?;
    // And a file is no directory.
    refused(sandbox.list("file").await, ErrorKind::WrongFileType)?;
    for result in [
        sandbox.read("file/below").await.err(),
        sandbox.write("file/below", "x").await.err(),
    ] {
        let error = result.ok_or_else(|| Failure::new("there is something below a file"))?;
        ensure!(
            matches!(
                error.kind(),
                ErrorKind::WrongFileType | ErrorKind::NotFound | ErrorKind::AlreadyExists
            ),
            "{error}"
        );
    }
    Ok(())
}

async fn limit_fits(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for size in [1_u64, 1000, 262_144, 262_145, 1 << 20] {
        sandbox.write("file", vec![b'x'; usize::try_from(size)?]).await?;
        for limit in [size, size + 1, size * 2, u64::MAX] {
            ensure_eq!(
                sandbox.read_up_to("file", limit).await?.len() as u64,
                size,
                "{size} bytes, at most {limit}"
            );
        }
    }
    Ok(())
}

async fn limit_exceeded(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for size in [2_usize, 1000, 262_145, 3 << 20] {
        sandbox.write("file", vec![b'x'; size]).await?;
        for limit in [1, size as u64 / 2, size as u64 - 1] {
            let error = refused(sandbox.read_up_to("file", limit).await, ErrorKind::LimitExceeded)?;
            ensure!(
                error.message().contains(&limit.to_string()),
                "it names the limit: {error}"
            );
        }
    }
    // A file whose size a program chose, and that would not fit on any disk.
    sh(
        &sandbox,
        "dd if=/dev/zero of=sparse bs=1 count=1 seek=1099511627776 2>/dev/null || echo skipped >sparse",
    )
    .await?;
    refused(sandbox.read_up_to("sparse", 3).await, ErrorKind::LimitExceeded)?;
    refused(sandbox.read_up_to("sparse", 7).await, ErrorKind::LimitExceeded)?;
    Ok(())
}

async fn limit_zero(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("empty", "").await?;
    sandbox.write("file", "x").await?;
    ensure!(
        sandbox.read_up_to("empty", 0).await?.is_empty(),
        "nothing fits into nothing"
    );
    refused(sandbox.read_up_to("file", 0).await, ErrorKind::LimitExceeded)?;
    refused(sandbox.read_up_to("missing", 0).await, ErrorKind::NotFound)?;
    Ok(())
}

async fn fifo(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "mkfifo fifo").await?;
    sandbox
        .run_background(["sh", "-c", "printf hello >fifo"], "log")
        .await?;
    ensure_eq!(&sandbox.read_up_to("fifo", 100).await?[..], b"hello");
    sandbox.run_background(["sh", "-c", "yes >fifo"], "log").await?;
    refused(sandbox.read_up_to("fifo", 1000).await, ErrorKind::LimitExceeded)?;
    Ok(())
}

async fn fifo_silent(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "mkfifo fifo").await?;
    let read = sandbox.read_up_to("fifo", 10).await;
    ensure!(read.is_err(), "nobody wrote: {read:?}");
    let opened = sandbox.open("fifo").await;
    refused(opened, ErrorKind::WrongFileType)?;
    sh(&sandbox, "true").await?;
    Ok(())
}

async fn dev_zero(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for limit in [0, 10, 100_000] {
        refused(sandbox.read_up_to("/dev/zero", limit).await, ErrorKind::LimitExceeded)?;
    }
    ensure!(
        sandbox.read_up_to("/dev/null", 10).await?.is_empty(),
        "/dev/null is empty"
    );
    refused(sandbox.open("/dev/zero").await, ErrorKind::WrongFileType)?;
    Ok(())
}

async fn special_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "mkfifo fifo").await?;
    for path in ["fifo", "/dev/zero"] {
        refused(sandbox.read_up_to(path, 10).await, ErrorKind::WrongFileType)?;
        refused(sandbox.open(path).await, ErrorKind::WrongFileType)?;
    }
    Ok(())
}

async fn read_through_link(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("dir/target", "content").await?;
    sh(
        &sandbox,
        "ln -s dir/target link; ln -s dir dirlink; ln -s missing dangling",
    )
    .await?;
    ensure_eq!(&sandbox.read("link").await?[..], b"content");
    ensure_eq!(&sandbox.read("dirlink/target").await?[..], b"content");
    refused(sandbox.read("dangling").await, ErrorKind::NotFound)?;
    refused(sandbox.read("dirlink").await, ErrorKind::WrongFileType)?;
    Ok(())
}

async fn link_loop(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "ln -s b a; ln -s a b; ln -s self self").await?;
    for path in ["a", "self", "a/below"] {
        ensure!(sandbox.read(path).await.is_err(), "{path} was read");
        ensure!(sandbox.write(path, "x").await.is_err(), "{path} was written");
    }
    ensure!(sandbox.stat("a").await?.is_symlink(), "a link in a circle is a link");
    sandbox.remove("a").await?;
    refused(sandbox.stat("a").await, ErrorKind::NotFound)?;
    Ok(())
}

async fn creates_parents(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("one/two/three/-four/file", "deep").await?;
    ensure_eq!(&sandbox.read("one/two/three/-four/file").await?[..], b"deep");
    let absolute = sandbox.workdir().join("five/six");
    sandbox.write(&absolute, "x").await?;
    ensure_eq!(sh(&sandbox, "cat five/six").await?, "x");
    Ok(())
}

async fn replaces(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for atomic in [true, false] {
        let options = WriteOptions {
            atomic,
            ..WriteOptions::default()
        };
        sandbox.write_with("file", vec![b'x'; 100_000], options).await?;
        sandbox.write_with("file", "short", options).await?;
        ensure_eq!(&sandbox.read("file").await?[..], b"short", "atomic: {atomic}");
        sandbox.write_with("file", "", options).await?;
        ensure!(sandbox.read("file").await?.is_empty(), "atomic: {atomic}");
    }
    ensure_eq!(sh(&sandbox, "ls -A").await?, "file\n", "nothing else stays");
    Ok(())
}

async fn write_through_link(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("dir/target", "old").await?;
    let absolute = sandbox.workdir().join("dir/new");
    let links = format!(
        "ln -s dir/target link; ln -s link second; ln -s '{}' dangling",
        absolute.display()
    );
    sh(&sandbox, links).await?;
    sandbox.write("second", "new").await?;
    ensure_eq!(&sandbox.read("dir/target").await?[..], b"new");
    ensure!(sandbox.stat("link").await?.is_symlink(), "the link is still one");
    ensure!(
        sandbox.stat("second").await?.is_symlink(),
        "the other link is still one"
    );
    sandbox.write("dangling", "made").await?;
    ensure!(
        sandbox.stat("dangling").await?.is_symlink(),
        "the dangling link is still one"
    );
    ensure_eq!(&sandbox.read("dir/new").await?[..], b"made");
    Ok(())
}

async fn write_onto_directory(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("dir/file", "x").await?;
    for atomic in [true, false] {
        let options = WriteOptions {
            atomic,
            ..WriteOptions::default()
        };
        refused(sandbox.write_with("dir", "y", options).await, ErrorKind::WrongFileType)?;
    }
    ensure_eq!(&sandbox.read("dir/file").await?[..], b"x");
    ensure_eq!(
        sh(&sandbox, "ls -A . dir").await?,
        ".:\ndir\n\ndir:\nfile\n",
        "nothing else stays"
    );
    Ok(())
}

async fn write_onto_special(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "mkfifo fifo; ln -s fifo link").await?;
    for atomic in [true, false] {
        let options = WriteOptions {
            atomic,
            ..WriteOptions::default()
        };
        for path in ["fifo", "link", "/dev/null"] {
            refused(sandbox.write_with(path, "y", options).await, ErrorKind::WrongFileType)?;
        }
    }
    ensure_eq!(
        sh(&sandbox, "test -p fifo && test -c /dev/null && echo same").await?,
        "same\n"
    );
    Ok(())
}

async fn atomic(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let contents = [vec![b'a'; 2_000_000], vec![b'b'; 1_000_000]];
    sandbox.write("file", contents[0].clone()).await?;
    let script = "until [ -e enough ]; do wc -c <file; done | sort -u";
    let view = sandbox.view();
    let inside = tokio::spawn(async move { sh(&view, script).await });
    let view = sandbox.view();
    let wanted = contents.clone();
    let outside = tokio::spawn(async move {
        for _ in 0..40 {
            let seen = view.read("file").await?;
            ensure!(
                wanted.iter().any(|content| seen == content),
                "a reader saw a part: {} bytes",
                seen.len()
            );
        }
        Ok(())
    });
    for n in 0..40 {
        sandbox.write("file", contents[n % 2].clone()).await?;
    }
    outside.await??;
    sandbox.write("enough", "").await?;
    let sizes = inside.await??;
    let odd: Vec<&str> = (sizes.lines().map(str::trim))
        .filter(|size| !matches!(*size, "2000000" | "1000000"))
        .collect();
    ensure!(odd.is_empty(), "a program saw files of {odd:?} bytes");
    Ok(())
}

async fn writers(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    each(16, b'a'..=b'p', |byte| {
        let view = sandbox.view();
        async move { Ok(view.write("file", vec![byte; 300_000]).await?) }
    })
    .await?;
    let content = sandbox.read("file").await?;
    ensure_eq!(content.len(), 300_000);
    ensure!(content.iter().all(|byte| *byte == content[0]), "a mixture of contents");
    ensure_eq!(sh(&sandbox, "ls -A").await?, "file\n", "nothing else stays");
    Ok(())
}

async fn in_place(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", "old content").await?;
    sh(&sandbox, "ln file hard").await?;
    let options = WriteOptions {
        atomic: false,
        ..WriteOptions::default()
    };
    sandbox.write_with("file", "new", options).await?;
    ensure_eq!(&sandbox.read("hard").await?[..], b"new");
    Ok(())
}

async fn mode_set(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for atomic in [true, false] {
        for mode in [0o600, 0o644, 0o755, 0o700, 0o777, 0o400, 0o4755] {
            let path = format!("file-{mode:o}-{atomic}");
            let options = WriteOptions {
                mode: Some(mode),
                atomic,
            };
            sandbox.write_with(&path, "#!/bin/sh\nexit 0\n", options).await?;
            ensure_eq!(sandbox.stat(&path).await?.mode, Some(mode), "{path}");
            let runnable = sh(&sandbox, format!("if [ -x {path} ]; then echo yes; else echo no; fi")).await?;
            ensure_eq!(runnable == "yes\n", mode & 0o100 != 0, "{path} is runnable");
        }
    }
    // An existing file gets the mode that is asked for.
    sandbox
        .write_with("file-600-true", "x", WriteOptions::mode(0o751))
        .await?;
    ensure_eq!(sandbox.stat("file-600-true").await?.mode, Some(0o751));
    Ok(())
}

async fn mode_kept(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for atomic in [true, false] {
        let options = WriteOptions { mode: None, atomic };
        for mode in [0o755, 0o640, 0o700] {
            sandbox.write_with("file", "old", WriteOptions::mode(mode)).await?;
            sandbox.write_with("file", "new", options).await?;
            ensure_eq!(sandbox.stat("file").await?.mode, Some(mode), "atomic: {atomic}");
        }
    }
    Ok(())
}

async fn mode_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for mode in [0o10_000, 0o100_644, u32::MAX] {
        let written = sandbox.write_with("file", "x", WriteOptions::mode(mode)).await;
        refused_field(written, ErrorKind::InvalidArgument, "mode")?;
    }
    refused(sandbox.stat("file").await, ErrorKind::NotFound)?;
    Ok(())
}

async fn is_root(view: &View) -> Result<bool, Failure> {
    Ok(sh(view, "id -u").await?.trim() == "0")
}

async fn read_only(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("file", "old").await?;
    sh(&sandbox, "chmod 444 file").await?;
    ensure_eq!(&sandbox.read("file").await?[..], b"old");
    let in_place = WriteOptions {
        atomic: false,
        ..WriteOptions::default()
    };
    let written = sandbox.write_with("file", "in place", in_place).await;
    if is_root(&sandbox).await? {
        written?;
    } else {
        refused(written, ErrorKind::PermissionDenied)?;
        ensure_eq!(&sandbox.read("file").await?[..], b"old");
    }
    sandbox.remove("file").await?;
    refused(sandbox.stat("file").await, ErrorKind::NotFound)?;
    Ok(())
}

async fn unreadable(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    if is_root(&sandbox).await? {
        return Err(Failure::skip(
            "programs of the box are root, for whom nothing is unreadable",
        ));
    }
    sandbox.write("file", "x").await?;
    sandbox.write("dir/file", "x").await?;
    sh(&sandbox, "chmod 000 file; chmod 500 dir").await?;
    refused(sandbox.read("file").await, ErrorKind::PermissionDenied)?;
    refused(sandbox.read_up_to("file", 1).await, ErrorKind::PermissionDenied)?;
    refused(sandbox.write("dir/new", "x").await, ErrorKind::PermissionDenied)?;
    refused(sandbox.remove("dir/file").await, ErrorKind::PermissionDenied)?;
    Ok(())
}

async fn many_at_once(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    each(64, 0..64_usize, |n| {
        let view = sandbox.view();
        async move {
            let content = vec![n as u8; 10_000 + n];
            for round in 0..4 {
                let path = format!("dir-{}/file-{n}-{round}", n % 5);
                view.write(&path, content.clone()).await?;
                ensure!(view.read(&path).await? == content, "{path} came back damaged");
            }
            Ok(())
        }
    })
    .await?;
    let count = tokio::time::timeout(Duration::from_secs(30), sh(&sandbox, "ls dir-* | grep -c file")).await??;
    ensure_eq!(count.trim(), "256");
    Ok(())
}
