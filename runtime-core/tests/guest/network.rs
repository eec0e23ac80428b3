//! Connections into the box, listeners inside it, and what the box's network is.

use std::net::SocketAddr;

use runtime_core::ErrorKind;
use runtime_core::guest::SpawnOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::*;

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

over_both_links! {
    async fn a_dialled_connection_carries_bytes_both_ways_and_half_closes(guest: Guest) {
        let server = TcpListener::bind(any_port()).await.unwrap();
        let mut inside = within(guest.link.dial(server.local_addr().unwrap())).await.unwrap();
        let (mut outside, _) = within(server.accept()).await.unwrap();
        inside.write_all(b"to the box").await.unwrap();
        inside.shutdown().await.unwrap();
        let mut received = String::new();
        within(outside.read_to_string(&mut received)).await.unwrap();
        assert_eq!(received, "to the box");
        outside.write_all(b"and back").await.unwrap();
        drop(outside);
        received.clear();
        within(inside.read_to_string(&mut received)).await.unwrap();
        assert_eq!(received, "and back");
    }

    async fn a_connection_to_nobody_is_refused(guest: Guest) {
        let server = TcpListener::bind(any_port()).await.unwrap();
        let address = server.local_addr().unwrap();
        drop(server);
        let error = within(guest.link.dial(address)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }

    async fn a_listener_inside_is_served_outside(guest: Guest) {
        let mut listener = within(guest.link.listen(any_port())).await.unwrap();
        let address = listener.local_addr();
        assert_ne!(address.port(), 0);
        for round in 0..200u32 {
            let mut client = within(TcpStream::connect(address)).await.unwrap();
            let (mut server, peer) = within(listener.accept()).await.unwrap();
            assert_eq!(peer, client.local_addr().unwrap());
            client.write_all(&round.to_le_bytes()).await.unwrap();
            client.shutdown().await.unwrap();
            let mut received = Vec::new();
            within(server.read_to_end(&mut received)).await.unwrap();
            assert_eq!(received, round.to_le_bytes());
            server.write_all(b"ok").await.unwrap();
            server.shutdown().await.unwrap();
            received.clear();
            within(client.read_to_end(&mut received)).await.unwrap();
            assert_eq!(received, b"ok");
        }
        let error = within(guest.link.listen(address)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "the port is taken: {error}");
        drop(listener);
        // A new one gets the port once the old one is closed there.
        within(async {
            while guest.link.listen(address).await.is_err() {}
        })
        .await;
    }

    async fn megabytes_flow_through_a_connection_and_an_idle_reader_holds_them_back(guest: Guest) {
        let server = TcpListener::bind(any_port()).await.unwrap();
        let inside = within(guest.link.dial(server.local_addr().unwrap())).await.unwrap();
        let (mut outside, _) = within(server.accept()).await.unwrap();
        let (mut read_inside, mut write_inside) = tokio::io::split(inside);
        let sent: Vec<u8> = (0..16u32 << 18).flat_map(u32::to_le_bytes).collect();
        let copy = sent.clone();
        let echo = tokio::spawn(async move {
            let (mut reader, mut writer) = outside.split();
            tokio::io::copy(&mut reader, &mut writer).await.unwrap();
            writer.shutdown().await.unwrap();
        });
        let writing = tokio::spawn(async move {
            write_inside.write_all(&copy).await.unwrap();
            write_inside.shutdown().await.unwrap();
        });
        let mut received = Vec::new();
        within(read_inside.read_to_end(&mut received)).await.unwrap();
        assert!(received == sent);
        writing.await.unwrap();
        echo.await.unwrap();
    }

    async fn the_network_is_reported(guest: Guest) {
        let network = within(guest.link.network()).await.unwrap();
        assert!(network.interfaces.iter().any(|interface| interface.name == b"lo"), "{network:?}");
        assert!(!network.truncated);
        let here = std::fs::read_dir("/sys/class/net").unwrap().count();
        assert_eq!(network.interfaces.len(), here);
    }

    async fn a_restricted_program_gets_no_socket_that_no_namespace_confines(guest: Guest) {
        let program = std::env::current_exe().unwrap();
        let probe = |restricted: bool| {
            let mut exec = exec([program.to_str().unwrap(), "--exact", "network::print_socket_families", "--nocapture"]);
            exec.env.set("PRINT_SOCKET_FAMILIES", if restricted { "restricted" } else { "free" });
            exec
        };
        let families = async |restricted| {
            let process = guest.link.spawn(&probe(restricted), &SpawnOptions::default()).await.unwrap();
            let (status, stdout, _) = within(collect(process)).await;
            assert!(status.success());
            let text = String::from_utf8(stdout).unwrap();
            text.lines().find_map(|line| line.split_once("families:")).unwrap().1.trim().to_owned()
        };
        let free = families(false).await;
        guest.link.configure(None, true).await.unwrap();
        assert_eq!(families(true).await, "1 2 10 16");
        guest.link.configure(None, false).await.unwrap();
        assert_eq!(families(false).await, free, "the filter was for those in between alone");
    }
}

/// Not a test of its own: what the one above runs in the box. Prints the address families that give a socket.
#[test]
fn print_socket_families() {
    use rustix::net::{AddressFamily, SocketType, socket};
    if std::env::var_os("PRINT_SOCKET_FAMILIES").is_none() {
        return;
    }
    let works = |family: &u16| {
        [
            SocketType::STREAM,
            SocketType::DGRAM,
            SocketType::RAW,
            SocketType::SEQPACKET,
        ]
        .into_iter()
        .any(|kind| socket(AddressFamily::from_raw(*family), kind, None).is_ok())
    };
    let found: Vec<String> = (1..46).filter(works).map(|family| family.to_string()).collect();
    println!("families:{}", found.join(" "));
}
