//! CONNECT, TLS inside it, and WebSockets.

use std::time::Duration;

use runtime_core::egress::{EgressKind, Limits, Older, Outcome};
use runtime_core::network::EgressPolicy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::tls::{self, Authority, hello, sni};
use crate::upstream;
use crate::world::{FORBIDDEN, GOOD, OTHER, World, isolated, next, policy};

isolated! {
    async fn https_works_through_a_tunnel() {
        let authority = Authority::new();
        let arrived = tls::https(GOOD, 443, authority.server(&["good.example"])).await;
        let world = World::allow(&["good.example"]).await;
        let mut log = world.proxy.log().subscribe();
        let (status, raw) = world.tunnel("GOOD.example:443").await;
        assert_eq!(status, 200);
        let mut stream = tls::handshake(authority.client(), "good.example", raw.0).await.unwrap();
        stream.write_all(b"GET /bytes/3 HTTP/1.1\r\nHost: good.example\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.ends_with(b"\r\n\r\nxxx"));
        assert_eq!(arrived.requests(), 1);
        drop(stream);
        let event = next(&mut log).await;
        assert_eq!((event.outcome, event.kind, event.status), (Outcome::Allowed, EgressKind::Tunnel, Some(200)));
        assert_eq!(event.server_name.as_deref(), Some("good.example"));
        assert_eq!(event.rule.as_deref(), Some("good.example"));
        assert!(event.sent > 100 && event.received > 100);
    }
}

isolated! {
    async fn tunnels_are_decided_as_specified() {
        let servers = [
            upstream::silent(GOOD, 443).await,
            upstream::silent(GOOD, 8443).await,
            upstream::silent(GOOD, 80).await,
            upstream::silent(OTHER, 443).await,
        ];
        let allow = ["good.example", "https://api.good.example:8443", "http://third.example:80"];
        let world = World::allow(&allow).await;
        for (to, status) in [
            ("good.example:443", 200),
            ("good.example", 200),
            ("api.good.example:8443", 200),
            ("good.example:8443", 403),
            ("good.example:80", 403),
            ("third.example:80", 403),
            ("api.good.example:443", 403),
            ("other.example:443", 403),
            ("93.184.215.14:443", 403),
            ("127.0.0.1:443", 403),
            ("[::1]:443", 403),
            ("localhost:443", 403),
            ("10.0.0.1:443", 403),
            ("good.example:99999", 400),
            ("good.example:443x", 400),
            ("user@good.example:443", 400),
            ("https://good.example:443", 400),
            ("/", 400),
        ] {
            assert_eq!(world.tunnel(to).await.0, status, "{to}");
        }
        // Tunnels were opened, and nothing was said in any.
        assert_eq!(servers.iter().map(upstream::Arrived::bytes).sum::<usize>(), 0);
        assert_eq!(servers[3].connections(), 0);
        let open = World::new(policy(&["*"], &["x.com"], &[])).await;
        assert_eq!(open.tunnel("good.example:8443").await.0, 200);
        assert_eq!(open.tunnel("other.example:444").await.0, 502);
    }
}

isolated! {
    async fn addresses_of_no_business_get_no_tunnel() {
        let world = World::allow(&["*.example"]).await;
        for address in FORBIDDEN {
            let arrived = upstream::silent(address, 443).await;
            world.names.set("trick.example", &[&[GOOD, address]]);
            assert_eq!(world.tunnel("trick.example:443").await.0, 403, "{address}");
            assert_eq!(arrived.connections(), 0, "{address}");
        }
    }
}

/// Sends these bytes into a tunnel to `to` and returns whether the tunnel was closed on them.
async fn closed_by(world: &World, to: &str, bytes: &[u8]) -> bool {
    let (status, mut raw) = world.tunnel(to).await;
    assert_eq!(status, 200);
    raw.try_send(bytes).await;
    // Closed at once, or else never: the server says nothing.
    tokio::time::timeout(Duration::from_millis(500), raw.rest())
        .await
        .is_ok()
}

isolated! {
    async fn no_byte_goes_out_before_the_server_name_is_judged() {
        let arrived = upstream::silent(GOOD, 443).await;
        let world = World::allow(&["good.example", "api.good.example", "93.184.215.14"]).await;
        let ech = (0xfe0d, vec![0; 32]);
        let refused: Vec<(&str, Vec<u8>)> = vec![
            ("another name", hello(&[sni(&["other.example"])], 999)),
            ("another name over fragments", hello(&[sni(&["other.example"])], 1)),
            ("a parent", hello(&[sni(&["example"])], 999)),
            ("a subdomain", hello(&[sni(&["x.good.example"])], 999)),
            ("none", hello(&[], 999)),
            ("two names", hello(&[sni(&["good.example", "other.example"])], 999)),
            ("two lists", hello(&[sni(&["good.example"]), sni(&["other.example"])], 999)),
            ("an empty name", hello(&[sni(&[""])], 999)),
            ("a NUL", hello(&[sni(&["good.example\0.other.example"])], 999)),
            ("an encrypted hello", hello(&[sni(&["good.example"]), ech.clone()], 999)),
            ("loopback", hello(&[sni(&["localhost"])], 999)),
            ("two hellos in a record", {
                let one = hello(&[sni(&["good.example"])], 999);
                let two = hello(&[sni(&["other.example"])], 999);
                let length = u16::try_from(one.len() + two.len() - 10).unwrap().to_be_bytes();
                [&[22, 3, 1], &length[..], &one[5..], &two[5..]].concat()
            }),
            ("HTTP", b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n".to_vec()),
            ("SSH", b"SSH-2.0-OpenSSH_9.0\r\n".to_vec()),
            ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()),
            ("SSL 2", vec![0x80, 0x2e, 1, 0, 2, 0, 0x15]),
            ("an alert", vec![21, 3, 1, 0, 2, 2, 40]),
        ];
        for (what, bytes) in &refused {
            assert!(closed_by(&world, "good.example:443", bytes).await, "{what}");
            assert_eq!(arrived.bytes(), 0, "{what}");
        }
        let mut expected = Vec::new();
        for (to, bytes) in [
            ("good.example:443", hello(&[sni(&["good.example"])], 999)),
            ("good.example:443", hello(&[sni(&["GOOD.Example."])], 1)),
            ("good.example:443", hello(&[(10, vec![0, 2, 0, 29]), sni(&["api.good.example"])], 5)),
            ("93.184.215.14:443", hello(&[], 999)),
            ("93.184.215.14:443", hello(&[sni(&["good.example"])], 999)),
        ] {
            let more = [&bytes[..], b"\x17\x03\x03\x00\x01x"].concat();
            assert!(!closed_by(&world, to, &more).await, "{to}");
            // What follows the hello waits until the server has answered.
            expected.extend(bytes);
        }
        assert_eq!(arrived.bytes(), expected.len());
    }
}

isolated! {
    async fn refusals_inside_a_tunnel_are_logged_with_the_rule_that_they_lacked() {
        let _arrived = upstream::silent(GOOD, 443).await;
        let world = World::allow(&["good.example"]).await;
        let mut log = world.proxy.log().subscribe();
        assert!(closed_by(&world, "good.example:443", &hello(&[sni(&["other.example"])], 99)).await);
        let event = next(&mut log).await;
        assert_eq!((event.outcome, event.reason), (Outcome::Refused, "not_allowed"));
        assert_eq!(event.server_name.as_deref(), Some("other.example"));
        assert_eq!(event.proposal.as_ref().map(|rule| rule.as_str()), Some("https://other.example"));
        assert!(closed_by(&world, "good.example:443", &hello(&[sni(&["good.example"]), (0xfe0d, vec![])], 99)).await);
        let event = next(&mut log).await;
        assert_eq!((event.outcome, event.reason, event.sent), (Outcome::Refused, "encrypted_client_hello", 0));
        assert_eq!(world.proxy.log().refused().len(), 2);
        assert!(world.proxy.log().used().is_empty());
    }
}

isolated! {
    async fn an_open_policy_does_not_mind_an_encrypted_hello() {
        let _arrived = upstream::silent(GOOD, 443).await;
        let bytes = hello(&[sni(&["good.example"]), (0xfe0d, vec![0; 9])], 999);
        let world = World::new(EgressPolicy::setup()).await;
        assert!(!closed_by(&world, "good.example:443", &bytes).await);
        let world = World::new(policy(&["*"], &["x.com"], &[])).await;
        assert!(closed_by(&world, "good.example:443", &bytes).await);
    }
}

isolated! {
    async fn a_server_that_asks_for_a_second_hello_gets_it_if_it_names_the_same_host() {
        let authority = Authority::new();
        let _arrived = tls::https(GOOD, 443, authority.retrying_server(&["good.example"])).await;
        let world = World::allow(&["good.example"]).await;
        let (_, raw) = world.tunnel("good.example:443").await;
        let mut stream = tls::handshake(authority.client(), "good.example", raw.0).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: good.example\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.ends_with(b"ok"));
        assert_eq!(stream.get_ref().1.handshake_kind(), Some(rustls::HandshakeKind::FullWithHelloRetryRequest));
    }
}

/// A ServerHello with this random, as a record.
fn server_hello(random: [u8; 32]) -> Vec<u8> {
    let body = [&[3, 3], &random[..], &[0, 0x13, 1, 0, 0, 0]].concat();
    let message = [&[2, 0, 0, u8::try_from(body.len()).unwrap()], &body[..]].concat();
    [&[22, 3, 3, 0, u8::try_from(message.len()).unwrap()], &message[..]].concat()
}

const RETRY: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91, 0xc2, 0xa2, 0x11,
    0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];

isolated! {
    async fn a_second_hello_for_another_host_is_not_passed_on() {
        let mut servers = upstream::manual(GOOD, 443).await;
        let world = World::allow(&["good.example", "third.example"]).await;
        let first = hello(&[sni(&["good.example"])], 999);
        let spec = [20, 3, 3, 0, 1, 1];
        let early = [23, 3, 3, 0, 2, 9, 9];
        for (second, passed) in [
            (hello(&[sni(&["good.example"])], 999), true),
            (hello(&[sni(&["other.example"])], 999), false),
            (hello(&[sni(&["third.example"])], 999), false),
            (hello(&[], 999), false),
        ] {
            let (_, mut raw) = world.tunnel("good.example:443").await;
            let mut server = servers.recv().await.unwrap();
            // All at once, as one who knows what the server is going to say.
            raw.send([&first[..], &spec, &early, &second, b"more"].concat()).await;
            let mut got = vec![0; first.len()];
            server.read_exact(&mut got).await.unwrap();
            assert_eq!(got, first);
            server.write_all(&server_hello(RETRY)).await.unwrap();
            let expected = [&spec[..], &early, &second, b"more"].concat();
            let expected = if passed { &expected[..] } else { &expected[..spec.len() + early.len()] };
            let mut got = vec![0; expected.len()];
            server.read_exact(&mut got).await.unwrap();
            assert_eq!(got, expected);
            if !passed {
                // Reset, and nothing more.
                assert!(matches!(server.read(&mut [0; 64]).await, Err(_) | Ok(0)));
            }
        }
    }
}

isolated! {
    async fn after_an_ordinary_server_hello_everything_passes() {
        let mut servers = upstream::manual(GOOD, 443).await;
        let world = World::allow(&["good.example"]).await;
        let (_, mut raw) = world.tunnel("good.example:443").await;
        let mut server = servers.recv().await.unwrap();
        let first = hello(&[sni(&["good.example"])], 999);
        raw.send([&first[..], b"early"].concat()).await;
        let answer = server_hello([9; 32]);
        server.write_all(&answer).await.unwrap();
        let mut got = vec![0; answer.len()];
        raw.0.read_exact(&mut got).await.unwrap();
        assert_eq!(got, answer);
        let mut got = vec![0; first.len() + 5];
        server.read_exact(&mut got).await.unwrap();
        assert!(got.ends_with(b"early"));
        // An alert in place of a ServerHello passes too.
        let (_, mut raw) = world.tunnel("good.example:443").await;
        let mut server = servers.recv().await.unwrap();
        raw.send(&first).await;
        server.write_all(&[21, 3, 3, 0, 2, 2, 40]).await.unwrap();
        server.shutdown().await.unwrap();
        assert_eq!(raw.rest().await, [21, 3, 3, 0, 2, 2, 40]);
    }
}

isolated! {
    async fn a_plain_route_may_be_tunnelled_to_and_half_closes_are_kept() {
        let arrived = upstream::echo("10.0.0.1", 9000).await;
        let world = World::new(policy(&[], &[], &["http://svc:9000"])).await;
        world.names.set("svc", &[&["10.0.0.1"]]);
        let mut raw = world.connect().await;
        // Bytes right behind the head belong to the tunnel, whatever they look like.
        raw.send(world.request("CONNECT svc:9000", "") + "GET / HTTP/1.1\r\n\r\n").await;
        assert_eq!(raw.head().await.status, 200);
        raw.send("and then").await;
        raw.0.shutdown().await.unwrap();
        assert_eq!(raw.rest().await, b"GET / HTTP/1.1\r\n\r\nand then");
        assert_eq!(arrived.text(), "GET / HTTP/1.1\r\n\r\nand then");
        // The other direction first.
        let mut servers = upstream::manual("10.0.0.1", 9001).await;
        world.switch(policy(&[], &[], &["http://svc:9001"]), Older::Close).await;
        let (_, mut raw) = world.tunnel("svc:9001").await;
        let mut server = servers.recv().await.unwrap();
        server.write_all(b"greeting").await.unwrap();
        server.shutdown().await.unwrap();
        assert_eq!(raw.rest().await, b"greeting");
        raw.send("late").await;
        raw.0.shutdown().await.unwrap();
        let mut late = Vec::new();
        server.read_to_end(&mut late).await.unwrap();
        assert_eq!(late, b"late");
    }
}

isolated! {
    async fn a_hundred_mebibytes_go_through_a_tunnel_unchanged() {
        const SIZE: usize = 100 << 20;
        let _arrived = upstream::bind("10.0.0.1", 1).await;
        let mut servers = upstream::manual("10.0.0.1", 9000).await;
        let world = World::new(policy(&[], &[], &["http://10.0.0.1:9000"])).await;
        let (_, raw) = world.tunnel("10.0.0.1:9000").await;
        let server = servers.recv().await.unwrap();
        let pattern: Vec<u8> = (0..251u8).cycle().take(1 << 20).collect();
        let send = async |mut half: tokio::net::tcp::OwnedWriteHalf| {
            for _ in 0..SIZE >> 20 {
                half.write_all(&pattern).await.unwrap();
            }
            half.shutdown().await.unwrap();
        };
        let receive = async |mut half: tokio::net::tcp::OwnedReadHalf| {
            let mut buffer = vec![0; 1 << 20];
            for _ in 0..SIZE >> 20 {
                half.read_exact(&mut buffer).await.unwrap();
                assert!(buffer == pattern);
            }
            assert_eq!(half.read(&mut buffer).await.unwrap(), 0);
        };
        let ((client_read, client_write), (server_read, server_write)) = (raw.0.into_split(), server.into_split());
        tokio::join!(send(client_write), receive(server_read), send(server_write), receive(client_read));
    }
}

isolated! {
    async fn a_reset_on_one_side_is_a_reset_on_the_other() {
        let mut servers = upstream::manual("10.0.0.1", 9000).await;
        let world = World::new(policy(&[], &[], &["http://10.0.0.1:9000"])).await;
        let (_, mut raw) = world.tunnel("10.0.0.1:9000").await;
        let server = servers.recv().await.unwrap();
        server.set_zero_linger().unwrap();
        drop(server);
        assert_eq!(raw.0.read(&mut [0; 1]).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    }
}

isolated! {
    async fn a_tunnel_that_is_silent_is_given_up_but_not_one_to_a_route() {
        let _allowed = upstream::silent(GOOD, 443).await;
        let _route = upstream::silent("10.0.0.1", 9000).await;
        let mut limits = Limits::default();
        limits.response = Duration::from_millis(100);
        limits.tunnel = Duration::from_millis(100);
        limits.half_closed = Duration::from_millis(100);
        let world = World::with(policy(&["good.example"], &[], &["http://10.0.0.1:9000"]), limits).await;
        let (_, mut to_route) = world.tunnel("10.0.0.1:9000").await;
        let (_, mut raw) = world.tunnel("good.example:443").await;
        raw.send(hello(&[sni(&["good.example"])], 999)).await;
        assert!(raw.0.read(&mut [0; 1]).await.is_err());
        let open = tokio::time::timeout(Duration::from_millis(500), to_route.0.read(&mut [0; 1])).await;
        assert!(open.is_err(), "{open:?}");
    }
}

const WEBSOCKET: &str = "Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nSec-WebSocket-Key: x\r\n";

isolated! {
    async fn a_websocket_needs_what_a_tunnel_needs() {
        let arrived = upstream::http(GOOD, 80).await;
        let world = World::allow(&["http://good.example", "api.good.example"]).await;
        let mut raw = world.connect().await;
        raw.send(world.request("GET http://good.example/ws", WEBSOCKET) + "early").await;
        let answer = raw.head().await;
        assert_eq!((answer.status, answer.field("upgrade")), (101, Some("websocket")));
        raw.send(" and late").await;
        let mut got = vec![0; 14];
        raw.0.read_exact(&mut got).await.unwrap();
        assert_eq!(got, b"early and late");
        raw.0.shutdown().await.unwrap();
        assert!(raw.rest().await.is_empty());
        let before = arrived.requests();
        // A rule without a scheme grants requests, and no stream of anything.
        assert_eq!(ask_websocket(&world, "http://api.good.example/ws").await, 403);
        assert_eq!(ask_websocket(&world, "http://other.example/ws").await, 403);
        assert_eq!(arrived.requests(), before);
        assert_eq!(world.ask("GET http://api.good.example/").await.status, 200);
    }
}

async fn ask_websocket(world: &World, url: &str) -> u16 {
    let mut raw = world.connect().await;
    raw.send(world.request(&format!("GET {url}"), WEBSOCKET)).await;
    raw.head().await.status
}

isolated! {
    async fn a_websocket_that_the_server_declines_leaves_an_ordinary_connection() {
        let arrived = upstream::http(GOOD, 80).await;
        let other = upstream::http(OTHER, 80).await;
        let world = World::allow(&["http://good.example"]).await;
        let mut raw = world.connect().await;
        // What is pipelined behind it is a request, and judged as one.
        let smuggled = world.request("GET http://other.example/", "");
        raw.send(world.request("GET http://good.example/no", WEBSOCKET) + &smuggled).await;
        assert_eq!(raw.answer().await.text(), "ok");
        assert_eq!(raw.answer().await.status, 403);
        raw.send(world.request("GET http://good.example/", "")).await;
        assert_eq!(raw.answer().await.text(), "ok");
        assert_eq!((arrived.requests(), other.connections()), (2, 0));
    }
}

isolated! {
    async fn other_upgrades_and_unasked_switches_do_not_happen() {
        let arrived = upstream::http(GOOD, 80).await;
        let world = World::allow(&["http://good.example"]).await;
        for fields in [
            "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
            "Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
            "Upgrade: websocket\r\n",
            "Upgrade: websocket, h2c\r\nConnection: Upgrade\r\n",
        ] {
            let mut raw = world.connect().await;
            raw.send(world.request("GET http://good.example/ws", fields)).await;
            // The server switches although nobody asked it to.
            assert_eq!(raw.answer().await.status, 502, "{fields}");
            let mut raw = world.connect().await;
            let body = format!("{fields}Content-Length: 5\r\n");
            raw.send(world.request("POST http://good.example/count", &body) + "hello").await;
            assert_eq!(raw.answer().await.text(), "5");
        }
        assert!(!arrived.text().to_lowercase().contains("upgrade"));
        assert!(!arrived.text().to_lowercase().contains("http2-settings"));
    }
}

isolated! {
    async fn many_tunnels_end_and_leave_nothing() {
        let _server = upstream::echo("10.0.0.1", 9000).await;
        let world = World::new(policy(&[], &[], &["http://10.0.0.1:9000"])).await;
        for _ in 0..50 {
            let (_, mut raw) = world.tunnel("10.0.0.1:9000").await;
            raw.send("x").await;
            raw.0.shutdown().await.unwrap();
            assert_eq!(raw.rest().await, b"x");
        }
        until(|| world.proxy.open_connections() == 0).await;
        world.proxy.stop().await;
        assert!(tokio::net::TcpStream::connect(("127.0.0.1", world.port)).await.is_err());
    }
}

/// Waits for something that happens in another task.
pub(crate) async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}
