//! What a dropped future leaves behind: nothing.

use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use runtime_core::ErrorKind;
use runtime_core::guest::{SpawnOptions, WriteFile};
use tokio::io::AsyncWriteExt;

use crate::support::*;

/// Polls a future so many times, yielding between, and drops it.
async fn poll_times<F: Future>(times: usize, future: F) {
    let mut future = Box::pin(future);
    for _ in 0..times {
        let polled = std::future::poll_fn(|context| Poll::Ready(future.poll_unpin(context))).await;
        if polled.is_ready() {
            return;
        }
        tokio::task::yield_now().await;
    }
}

fn children_of(guest: &Guest) -> usize {
    let path = format!("/proc/{0}/task/{0}/children", guest.id());
    std::fs::read_to_string(path).unwrap().split_whitespace().count()
}

/// Descriptors of the guest.
fn descriptors_of(guest: &Guest) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", guest.id())).unwrap().count()
}

over_both_links! {
    async fn a_dropped_spawn_kills_what_it_started(guest: Guest) {
        for times in 0..60 {
            let sleeping = piped(["sleep", "100000"]);
            poll_times(times % 6, guest.link.spawn(&sleeping, &SpawnOptions::default())).await;
        }
        // The guest has read everything before it answers this.
        guest.link.ping().await.unwrap();
        eventually("no program is left", || children_of(&guest) == 0).await;
        assert!(guest.run(["true"]).await.0.success());
    }

    async fn dropped_requests_leave_no_descriptor_behind(guest: Guest) {
        let path = guest.path("file");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = server.local_addr().unwrap();
        guest.run(["true"]).await;
        let before = descriptors_of(&guest);
        for times in 0..60 {
            let times = times % 6;
            poll_times(times, guest.link.read(&path, u64::MAX)).await;
            poll_times(times, guest.link.open_read(&path)).await;
            poll_times(times, guest.link.dial(address)).await;
            poll_times(times, guest.link.listen("127.0.0.1:0".parse().unwrap())).await;
            poll_times(times, guest.link.list(std::path::Path::new("/usr/bin"), 100_000)).await;
            poll_times(times, guest.link.ping()).await;
        }
        guest.link.ping().await.unwrap();
        eventually("all are closed", || descriptors_of(&guest) <= before).await;
    }

    async fn a_dropped_atomic_write_leaves_no_temporary_file(guest: Guest) {
        let content = Bytes::from(vec![1; 1 << 20]);
        let how = WriteFile { atomic: true, ..WriteFile::default() };
        for times in 0..40 {
            poll_times(times % 10, guest.link.write(&guest.path("file"), content.clone(), how)).await;
        }
        let left = || std::fs::read_dir(guest.directory.path()).unwrap().flatten()
            .filter(|entry| entry.file_name().to_string_lossy().ends_with(".tmp")).count();
        guest.link.ping().await.unwrap();
        eventually("none is left", || left() == 0).await;
        if guest.path("file").exists() {
            assert_eq!(std::fs::read(guest.path("file")).unwrap().len(), 1 << 20);
        }
    }

    async fn a_dropped_dial_is_given_up(guest: Guest) {
        // A listener whose queue is full lets a connection wait.
        let server = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
        rustix::net::bind(&server, &std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
        rustix::net::listen(&server, 0).unwrap();
        let address = std::net::TcpListener::from(server.try_clone().unwrap()).local_addr().unwrap();
        let mut queued = Vec::new();
        while let Ok(Ok(connection)) =
            tokio::time::timeout(Duration::from_millis(300), tokio::net::TcpStream::connect(address)).await
        {
            queued.push(connection);
        }
        let before = descriptors_of(&guest);
        let dialling = guest.link.dial(address);
        assert!(tokio::time::timeout(Duration::from_millis(50), dialling).await.is_err());
        guest.link.ping().await.unwrap();
        assert_eq!(descriptors_of(&guest), before, "the guest closed its attempt");
    }

    async fn a_dropped_wait_disturbs_nothing(guest: Guest) {
        let mut cat = guest.spawn(["cat"]).await;
        let handle = cat.handle();
        for _ in 0..10 {
            poll_times(2, handle.wait()).await;
        }
        let mut stdin = cat.stdin.take().unwrap();
        stdin.write_all(b"still there").await.unwrap();
        drop(stdin);
        let both = async { tokio::join!(handle.wait(), handle.wait()) };
        let (first, second) = within(both).await;
        assert!(first.unwrap().success() && second.unwrap().success());
    }

    async fn a_removal_under_way_is_stopped_with_its_future(guest: Guest) {
        let tree = guest.path("tree");
        for directory in 0..50 {
            let directory = tree.join(directory.to_string());
            std::fs::create_dir_all(&directory).unwrap();
            for file in 0..100 {
                std::fs::write(directory.join(file.to_string()), "").unwrap();
            }
        }
        poll_times(2, guest.link.remove(&tree, true)).await;
        guest.link.ping().await.unwrap();
        eventually("its helper is gone", || children_of(&guest) == 0).await;
        match guest.link.remove(&tree, true).await {
            Ok(()) => {}
            // It had finished before it was stopped.
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
        }
        assert!(!tree.exists());
    }
}
