//! Files through the guest.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use bytes::Bytes;
use runtime_core::ErrorKind;
use runtime_core::guest::frame::FileKind;
use runtime_core::guest::{OpenWrite, WriteFile};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::*;

over_both_links! {
    async fn a_file_is_written_and_read_back(guest: Guest) {
        let path = guest.path("new/dir/file");
        let content: Bytes = (0..3_000_000u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>().into();
        within(guest.link.write(&path, content.clone(), WriteFile::default())).await.unwrap();
        assert!(std::fs::read(&path).unwrap() == content);
        assert!(within(guest.link.read(&path, u64::MAX)).await.unwrap() == content);
        guest.link.write(&path, Bytes::from_static(b"short"), WriteFile::default()).await.unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"short", "the old content is cut");
        guest.link.write(&path, Bytes::new(), WriteFile::default()).await.unwrap();
        assert_eq!(guest.link.read(&path, 0).await.unwrap(), Bytes::new());
    }

    async fn an_atomic_write_replaces_the_file_and_leaves_nothing_else(guest: Guest) {
        let path = guest.path("sub/file");
        std::fs::create_dir(guest.path("sub")).unwrap();
        std::fs::write(&path, "old").unwrap();
        let open_before = std::fs::File::open(&path).unwrap();
        let how = WriteFile { atomic: true, mode: 0o600, ..WriteFile::default() };
        within(guest.link.write(&path, Bytes::from_static(b"new"), how)).await.unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::io::read_to_string(open_before).unwrap(), "old", "who had it open keeps the old one");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(guest.path("sub")).unwrap().count(), 1);
        // The target is a directory: the rename fails, and the temporary file goes.
        let error = guest.link.write(&guest.path("sub"), Bytes::from_static(b"x"), how).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WrongFileType);
        let left = || std::fs::read_dir(guest.directory.path()).unwrap().flatten()
            .filter(|entry| entry.file_name().to_string_lossy().ends_with(".tmp")).count();
        eventually("the temporary file is removed", || left() == 0).await;
    }

    async fn a_limit_is_exact(guest: Guest) {
        let path = guest.path("file");
        std::fs::write(&path, vec![7; 1000]).unwrap();
        assert_eq!(guest.link.read(&path, 1000).await.unwrap().len(), 1000);
        assert_eq!(guest.link.read(&path, 1001).await.unwrap().len(), 1000);
        assert_eq!(guest.link.read(&path, 999).await.unwrap_err().kind(), ErrorKind::LimitExceeded);
        assert_eq!(guest.link.read(&path, 0).await.unwrap_err().kind(), ErrorKind::LimitExceeded);
        // Its size is said to be 0, but it has content.
        let status = Path::new("/proc/self/status");
        assert!(guest.link.read(status, 1 << 20).await.unwrap().starts_with(b"Name:"));
        assert_eq!(guest.link.read(status, 10).await.unwrap_err().kind(), ErrorKind::LimitExceeded);
    }

    async fn what_is_not_a_regular_file_is_refused_without_opening_it(guest: Guest) {
        let fifo = guest.path("fifo");
        guest.shell(&format!("mkfifo {}", fifo.display())).await;
        let marker = guest.path("woken");
        let script = format!("echo x > {}; touch {}", fifo.display(), marker.display());
        let _writer = guest.spawn(["sh", "-c", &script]).await;
        for path in [&fifo, Path::new("/dev/zero"), Path::new("/"), Path::new("/dev/null")] {
            let error = within(guest.link.read(path, 10)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WrongFileType, "{}", path.display());
            let error = within(guest.link.write(path, Bytes::from_static(b"x"), WriteFile::default())).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WrongFileType, "{}", path.display());
        }
        assert!(!marker.exists(), "the writer of the FIFO did not notice");
        let link = guest.path("link");
        symlink(&fifo, &link).unwrap();
        assert_eq!(guest.link.read(&link, 10).await.unwrap_err().kind(), ErrorKind::WrongFileType);
    }

    async fn errors_say_what_is_wrong(guest: Guest) {
        let missing = guest.path("missing");
        assert_eq!(guest.link.read(&missing, 1).await.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(guest.link.stat(&missing, true).await.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(guest.link.remove(&missing, true).await.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(guest.link.list(&missing, 1).await.unwrap_err().kind(), ErrorKind::NotFound);
        let how = WriteFile { parents: false, ..WriteFile::default() };
        let deep = missing.join("deep");
        assert_eq!(guest.link.write(&deep, Bytes::new(), how).await.unwrap_err().kind(), ErrorKind::NotFound);
        let error = guest.link.read(Path::new("a\0b"), 1).await.unwrap_err();
        assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("path")));
        let exclusive = OpenWrite { exclusive: true, ..OpenWrite::default() };
        std::fs::write(guest.path("there"), "").unwrap();
        let error = guest.link.open_write(&guest.path("there"), exclusive).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    }

    async fn a_full_disk_is_told_and_the_link_lives(guest: Guest) {
        // A limit on the size of files stands in for the disk.
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: mounting a small file system needs root");
            return;
        }
        let mount = guest.path("small");
        std::fs::create_dir(&mount).unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k", "none"]).arg(&mount).status().unwrap();
        if !mounted.success() {
            eprintln!("skipped: mounting is not allowed here");
            return;
        }
        let result = within(guest.link.write(&mount.join("f"), vec![1; 1 << 20].into(), WriteFile::default())).await;
        let unmounted = std::process::Command::new("umount").arg("-l").arg(&mount).status().unwrap();
        assert!(unmounted.success());
        assert_eq!(result.unwrap_err().kind(), ErrorKind::ResourceExhausted);
        guest.link.ping().await.unwrap();
    }

    async fn a_large_file_streams_in_both_directions(guest: Guest) {
        let path = guest.path("large");
        let mut writer = guest.link.open_write(&path, OpenWrite::default()).await.unwrap();
        let chunk = vec![42; 1 << 20];
        for _ in 0..32 {
            within(writer.write_all(&chunk)).await.unwrap();
        }
        within(writer.finish()).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 32 << 20);
        let mut reader = guest.link.open_read(&path).await.unwrap();
        let mut buffer = vec![0; 1 << 20];
        let mut total = 0;
        loop {
            let count = within(reader.read(&mut buffer)).await.unwrap();
            if count == 0 {
                break;
            }
            assert!(buffer[..count].iter().all(|byte| *byte == 42));
            total += count;
        }
        assert_eq!(total, 32 << 20);
        let append = OpenWrite { append: true, truncate: false, ..OpenWrite::default() };
        let mut writer = guest.link.open_write(&path, append).await.unwrap();
        writer.write_all(b"end").await.unwrap();
        writer.finish().await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), (32 << 20) + 3);
    }

    async fn directories_are_listed_whole_and_in_pages(guest: Guest) {
        let directory = guest.path("many");
        guest.link.mkdir(&directory, 0o750, false).await.unwrap();
        assert_eq!(std::fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o750);
        for number in 0..1500 {
            std::fs::write(directory.join(format!("file-{number:04}")), vec![0; number]).unwrap();
        }
        symlink("/nowhere", directory.join("link")).unwrap();
        std::fs::create_dir(directory.join("sub")).unwrap();
        let mut entries = within(guest.link.list(&directory, 2000)).await.unwrap();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(entries.len(), 1502);
        assert_eq!(entries[1499].name, "file-1499");
        assert_eq!((entries[1499].info.kind, entries[1499].info.size), (FileKind::File, 1499));
        assert_eq!((entries[1500].name.to_str(), entries[1500].info.kind), (Some("link"), FileKind::Symlink));
        assert_eq!((entries[1501].name.to_str(), entries[1501].info.kind), (Some("sub"), FileKind::Directory));
        let error = guest.link.list(&directory, 1501).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        // More listings that end early than the guest holds at once: each gives its place back.
        for _ in 0..100 {
            assert_eq!(guest.link.list(&directory, 10).await.unwrap_err().kind(), ErrorKind::LimitExceeded);
        }
        assert_eq!(guest.link.list(&directory, 2000).await.unwrap().len(), 1502);
    }

    async fn paths_are_changed_as_the_system_calls_change_them(guest: Guest) {
        let link = &guest.link;
        let path = |name: &str| guest.path(name);
        link.mkdir(&path("a/b/c"), 0o755, true).await.unwrap();
        link.mkdir(&path("a/b/c"), 0o755, true).await.unwrap();
        assert_eq!(link.mkdir(&path("a"), 0o755, false).await.unwrap_err().kind(), ErrorKind::AlreadyExists);
        std::fs::write(path("a/file"), "x").unwrap();
        link.rename(&path("a/file"), &path("a/renamed")).await.unwrap();
        link.symlink(Path::new("renamed"), &path("a/link")).await.unwrap();
        assert_eq!(link.readlink(&path("a/link")).await.unwrap(), "renamed");
        assert_eq!(link.stat(&path("a/link"), false).await.unwrap().kind, FileKind::Symlink);
        let info = link.stat(&path("a/link"), true).await.unwrap();
        assert_eq!((info.kind, info.size), (FileKind::File, 1));
        link.chmod(&path("a/renamed"), 0o4711).await.unwrap();
        assert_eq!(link.stat(&path("a/renamed"), false).await.unwrap().mode, 0o4711);
        if rustix::process::geteuid().is_root() {
            link.chown(&path("a/renamed"), 12, 34).await.unwrap();
            let info = link.stat(&path("a/renamed"), false).await.unwrap();
            assert_eq!((info.uid, info.gid), (12, 34));
        }
        assert_eq!(link.remove(&path("a"), false).await.unwrap_err().kind(), ErrorKind::Io, "it is not empty");
        link.remove(&path("a/link"), true).await.unwrap();
        assert!(path("a/renamed").exists(), "the link went, not what it says");
        symlink("/etc", path("a/etc")).unwrap();
        within(link.remove(&path("a"), true)).await.unwrap();
        assert!(!path("a").exists() && Path::new("/etc/passwd").exists());
    }
}
