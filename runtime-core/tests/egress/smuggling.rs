//! Requests that two readers could read differently. None of them arrives.

use std::time::Duration;

use crate::upstream;
use crate::world::{GOOD, OTHER, World, isolated};

/// What a client may send after a request line, so that somebody else reads a second request where the proxy reads none.
fn attempts(world: &World) -> Vec<(&'static str, String)> {
    let auth = world.auth();
    let hidden = format!("GET http://other.example/hidden HTTP/1.1\r\nHost: other.example\r\n{auth}\r\n");
    let post = |fields: &str, body: &str| {
        format!("POST http://good.example/ HTTP/1.1\r\nHost: good.example\r\n{auth}{fields}\r\n{body}{hidden}")
    };
    let line = |line: &str| format!("{line}\r\nHost: good.example\r\n{auth}\r\n");
    let length = hidden.len() + 5;
    vec![
        (
            "length, then chunks",
            post(
                &format!("Content-Length: {length}\r\nTransfer-Encoding: chunked\r\n"),
                "0\r\n\r\n",
            ),
        ),
        (
            "chunks, then length",
            post(
                &format!("Transfer-Encoding: chunked\r\nContent-Length: {length}\r\n"),
                "0\r\n\r\n",
            ),
        ),
        (
            "two equal lengths",
            post("Content-Length: 0\r\nContent-Length: 0\r\n", ""),
        ),
        (
            "two lengths",
            post("Content-Length: 0\r\nContent-Length: 5\r\n", "hello"),
        ),
        ("two lengths in one field", post("Content-Length: 0, 5\r\n", "hello")),
        ("a signed length", post("Content-Length: +0\r\n", "")),
        ("a hexadecimal length", post("Content-Length: 0x0\r\n", "")),
        ("a huge length", post("Content-Length: 18446744073709551616\r\n", "")),
        (
            "a space before the colon",
            post(&format!("Content-Length : {length}\r\n"), ""),
        ),
        (
            "a space in Transfer-Encoding's name",
            post("Transfer-Encoding : chunked\r\n", "0\r\n\r\n"),
        ),
        (
            "an unknown coding",
            post("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"),
        ),
        (
            "chunks inside another coding",
            post("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"),
        ),
        (
            "two codings",
            post(
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
                "0\r\n\r\n",
            ),
        ),
        (
            "a vertical tab",
            post("Transfer-Encoding:\u{b}chunked\r\n", "0\r\n\r\n"),
        ),
        ("a folded field", post("X: y\r\n Content-Length: 9\r\n", "")),
        (
            "a folded coding",
            post("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n"),
        ),
        ("a bare line feed", post("X: y\nContent-Length: 9\r\n", "")),
        ("a bare carriage return", post("X: y\rContent-Length: 9\r\n", "")),
        ("a NUL", post("X: y\0\r\n", "")),
        ("a field without a colon", post("Content-Length\r\n", "")),
        ("two hosts", post("Host: other.example\r\n", "")),
        (
            "chunks of HTTP/1.0",
            format!("POST http://good.example/ HTTP/1.0\r\n{auth}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"),
        ),
        (
            "a CONNECT with a length",
            format!("CONNECT good.example:443 HTTP/1.1\r\n{auth}Content-Length: {length}\r\n\r\n{hidden}"),
        ),
        (
            "a CONNECT with chunks",
            format!("CONNECT good.example:443 HTTP/1.1\r\n{auth}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"),
        ),
        (
            "bare line feeds everywhere",
            format!(
                "GET http://good.example/ HTTP/1.1\nHost: good.example\n{}\n{hidden}",
                auth.replace('\r', "")
            ),
        ),
        (
            "the preface of HTTP/2",
            format!("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{hidden}"),
        ),
        ("a version of HTTP/2", line("GET http://good.example/ HTTP/2.0")),
        ("no version", line("GET http://good.example/")),
        ("a space in the target", line("GET http://good.example/ x HTTP/1.1")),
        ("a tab in the target", line("GET http://good.example/\tx HTTP/1.1")),
        (
            "a request line of 1 MiB",
            line(&format!("GET http://good.example/{} HTTP/1.1", "x".repeat(1 << 20))),
        ),
        ("a field of 1 MiB", post(&format!("X: {}\r\n", "x".repeat(1 << 20)), "")),
        ("ten thousand fields", post(&"X: y\r\n".repeat(10_000), "")),
        (
            "a TLS handshake",
            "\u{16}\u{3}\u{1}\u{0}\u{5}\u{1}\u{0}\u{0}\u{1}\u{0}".to_owned(),
        ),
    ]
}

isolated! {
    async fn a_request_with_two_readings_is_answered_400_and_the_connection_closed() {
        let good = upstream::http(GOOD, 80).await;
        let other = upstream::http(OTHER, 80).await;
        let world = World::allow(&["good.example", "other.example"]).await;
        for (what, bytes) in attempts(&world) {
            let mut raw = world.connect().await;
            let (mut read, mut write) = raw.0.split();
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let mut answer = Vec::new();
            let send = async {
                let _ = write.write_all(bytes.as_bytes()).await;
                let _ = write.shutdown().await;
            };
            let receive = read.read_to_end(&mut answer);
            let (received, ()) = tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(receive, send) })
                .await
                .unwrap_or_else(|_| panic!("{what}: the connection is closed"));
            let answer = String::from_utf8_lossy(&answer);
            assert!(answer.starts_with("HTTP/1.1 400 "), "{what}: {received:?} {answer}");
            assert_eq!(answer.matches("HTTP/1.").count(), 1, "{what}: one answer");
            assert_eq!((good.connections(), other.connections()), (0, 0), "{what}: nothing arrived");
        }
    }
}

isolated! {
    async fn a_malformed_chunk_ends_the_request_and_what_follows_is_nobodys() {
        let good = upstream::http(GOOD, 80).await;
        let world = World::allow(&["good.example"]).await;
        let hidden = world.request("GET http://good.example/hidden", "");
        for body in ["5\r\nhelloX", "5\nhello\r\n0\r\n\r\n", "-5\r\nhello\r\n", "5 \r\nhello\r\n0\r\n\r\n", "ffffffffffffffff1\r\n", "5\r\nhello\r\n0\r\nX: y\n\r\n"] {
            let mut raw = world.connect().await;
            raw.send(world.request("POST http://good.example/count", "Transfer-Encoding: chunked\r\n") + body + &hidden).await;
            let rest = String::from_utf8_lossy(&raw.rest().await).into_owned();
            assert!(!rest.contains(" 200 "), "{body:?}: {rest}");
        }
        assert!(!good.text().contains("/hidden"), "{}", good.text());
    }
}

isolated! {
    async fn what_arrives_is_framed_anew() {
        let good = upstream::http(GOOD, 80).await;
        let world = World::allow(&["good.example"]).await;
        let body = "5;x=\"GET / HTTP/1.1\"\r\nhello\r\n0\r\nX-Smuggled: 1\r\n\r\n";
        let fields = "Transfer-Encoding: chunked\r\nConnection: Content-Length, Host, transfer-encoding\r\n";
        let mut raw = world.connect().await;
        raw.send(world.request("POST http://good.example/count", fields) + body).await;
        assert_eq!(raw.answer().await.text(), "5");
        let text = good.text();
        assert!(text.ends_with("\r\n\r\n5\r\nhello\r\n0\r\n\r\n"), "{text}");
        assert!(text.contains("host: good.example\r\n") && !text.contains("muggled"), "{text}");
        // A body of a GET has its length.
        raw.send(world.request("GET http://good.example/count", "Content-Length: 5\r\n") + "hello").await;
        assert_eq!(raw.answer().await.text(), "5");
    }
}
