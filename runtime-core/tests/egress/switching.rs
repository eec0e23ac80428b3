//! Policies that are switched, relays, deadlines, and the log.

use std::sync::Arc;
use std::time::Duration;

use runtime_core::ErrorKind;
use runtime_core::egress::{EgressKind, EgressProxy, Limits, Older, Outcome};
use runtime_core::network::{Destination, EgressPolicy, Policy, Routes, Scheme};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::grpc;
use crate::tls::{hello, sni};
use crate::upstream;
use crate::world::{GOOD, OTHER, Raw, World, isolated, next, policy};

/// Whether nothing more comes out of a connection, not even its end.
async fn is_open(raw: &mut Raw) -> bool {
    tokio::time::timeout(Duration::from_millis(200), raw.0.read(&mut [0; 1]))
        .await
        .is_err()
}

async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

isolated! {
    async fn the_cut_closes_what_setup_opened_before_it_returns() {
        let mut tunnels = upstream::manual("10.0.0.1", 443).await;
        let http = upstream::http("10.0.0.1", 80).await;
        let good = upstream::silent(GOOD, 443).await;
        let world = World::new(EgressPolicy::setup()).await;
        world.names.set("inside.internal", &[&["10.0.0.1"]]);
        let (status, mut tunnel) = world.tunnel("inside.internal:443").await;
        assert_eq!(status, 200);
        tunnel.send(hello(&[sni(&["inside.internal"])], 999)).await;
        let (_, mut allowed_later) = world.tunnel("good.example:443").await;
        let mut server = tunnels.recv().await.unwrap();
        let mut kept = world.connect().await;
        kept.send(world.request("GET http://inside.internal/", "")).await;
        assert_eq!(kept.answer().await.status, 200);
        let mut waiting = world.connect().await;
        waiting.send(world.request("GET http://inside.internal/hang", "")).await;
        crate::tunnels::until(|| http.requests() == 2).await;
        assert_eq!(world.proxy.open_connections(), 4);

        world.switch(policy(&["good.example"], &[], &[]), Older::Close).await;
        assert_eq!(world.proxy.open_connections(), 0);
        for raw in [&mut tunnel, &mut allowed_later] {
            assert!(raw.0.read(&mut [0; 1]).await.is_err(), "reset");
        }
        let mut rest = Vec::new();
        assert!(server.read_to_end(&mut rest).await.is_err(), "reset on the other side too");
        assert_eq!(waiting.answer().await.status, 502);
        // The connection to the proxy itself stays, under the new policy.
        kept.send(world.request("GET http://inside.internal/", "")).await;
        assert_eq!(kept.answer().await.status, 403);
        assert_eq!((http.requests(), good.bytes()), (2, 0));
    }
}

isolated! {
    async fn a_switch_closes_what_it_refuses_and_leaves_the_rest() {
        let _good = upstream::echo(GOOD, 443).await;
        let _other = upstream::echo(OTHER, 443).await;
        let world = World::allow(&["good.example", "other.example", "93.184.215.14", "198.41.0.4"]).await;
        let mut open = Vec::new();
        for (to, name) in [
            ("good.example:443", "good.example"),
            ("other.example:443", "other.example"),
            ("93.184.215.14:443", "other.example"),
            ("198.41.0.4:443", "198.41.0.4"),
        ] {
            let (_, mut raw) = world.tunnel(to).await;
            let bytes = hello(&[sni(&[name])], 999);
            raw.send(&bytes).await;
            let mut echoed = vec![0; bytes.len()];
            raw.0.read_exact(&mut echoed).await.unwrap();
            open.push(raw);
        }
        world.switch(policy(&["good.example", "93.184.215.14"], &[], &[]), Older::Recheck).await;
        let mut left = Vec::new();
        for raw in &mut open {
            left.push(is_open(raw).await);
        }
        // The third was for an address that is still allowed, but its server name no longer is.
        assert_eq!(left, [true, false, false, false]);
        open[0].send("still").await;
        let mut echoed = [0; 5];
        open[0].0.read_exact(&mut echoed).await.unwrap();
        assert_eq!(&echoed, b"still");
        // By address, too: what a new block list names.
        world.switch(policy(&["*"], &["93.184.0.0/16"], &[]), Older::Recheck).await;
        assert!(!is_open(&mut open[0]).await);
        assert_eq!(world.proxy.open_connections(), 0);
    }
}

isolated! {
    async fn no_request_slips_through_while_policies_are_switched() {
        let good = upstream::http(GOOD, 80).await;
        let world = Arc::new(World::new(EgressPolicy::closed()).await);
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let world = Arc::clone(&world);
            tasks.spawn(async move {
                let mut raw = world.connect().await;
                for _ in 0..100 {
                    raw.send(world.request("GET http://good.example/", "")).await;
                    let status = raw.answer().await.status;
                    assert!(matches!(status, 200 | 403 | 502), "{status}");
                }
            });
        }
        for round in 0..50 {
            let open = policy(&["good.example"], &[], &[]);
            world.switch(open, Older::Recheck).await;
            tokio::task::yield_now().await;
            world.switch(EgressPolicy::closed(), if round % 2 == 0 { Older::Close } else { Older::Recheck }).await;
            assert_eq!(world.proxy.open_connections(), 0);
            // Every connection is gone, so nothing more can arrive.
            let before = good.requests();
            tokio::time::sleep(Duration::from_millis(2)).await;
            assert_eq!(good.requests(), before, "round {round}");
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    }
}

isolated! {
    async fn a_route_on_this_host_is_relayed_to_on_its_own_terms() {
        let own = upstream::http("127.0.0.1", 9000).await;
        let secret = upstream::http("127.0.0.1", 9001).await;
        let routes = ["http://127.0.0.1:9000"];
        let world = World::new(policy(&[], &[], &routes)).await;
        let origins = Routes::new(routes).unwrap();
        let route = origins.iter().next().unwrap();
        let relay = world.proxy.relay_route(listener().await, route).unwrap();
        let mut log = world.proxy.log().subscribe();
        let mut raw = Raw(TcpStream::connect(relay.address()).await.unwrap());
        // No credentials, and whatever the request says, it stays with the one service.
        raw.send("GET http://127.0.0.1:9001/ HTTP/1.1\r\nHost: 127.0.0.1:9001\r\n\r\n").await;
        assert_eq!(raw.answer().await.text(), "ok");
        raw.send("GET /bytes/2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
        assert_eq!(raw.answer().await.text(), "xx");
        assert!(raw.rest().await.is_empty());
        drop(raw);
        assert_eq!((own.requests(), secret.connections()), (2, 0));
        let event = next(&mut log).await;
        assert_eq!((event.kind, event.outcome, event.reason), (EgressKind::Relay, Outcome::Allowed, "framework_route"));
        assert!(event.sent > 0 && event.received > 0);
        // The framework's own routes are no part of an allowlist.
        assert!(world.proxy.log().used().is_empty());
        // What is no route gets no relay.
        let others = Routes::new(["http://127.0.0.1:9001"]).unwrap();
        let error = world.proxy.relay_route(listener().await, others.iter().next().unwrap()).unwrap_err();
        assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("destination")));
    }
}

isolated! {
    async fn websockets_and_streams_in_both_directions_pass_a_relay() {
        let _own = upstream::http("127.0.0.1", 9000).await;
        let routes = Routes::new(["http://127.0.0.1:9000"]).unwrap();
        let world = World::new(EgressPolicy::execution(Policy::framework_only(), routes.clone())).await;
        let relay = world.proxy.relay_route(listener().await, routes.iter().next().unwrap()).unwrap();
        let mut raw = Raw(TcpStream::connect(relay.address()).await.unwrap());
        raw.send("GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n").await;
        assert_eq!(raw.head().await.status, 101);
        for message in ["one", "two", "six"] {
            raw.send(message).await;
            let mut echoed = [0; 3];
            raw.0.read_exact(&mut echoed).await.unwrap();
            assert_eq!(echoed, message.as_bytes());
        }
        // A call that streams both ways, as gRPC does: each answer comes before the next question.
        let mut raw = Raw(TcpStream::connect(relay.address()).await.unwrap());
        raw.send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n").await;
        assert_eq!(raw.head().await.status, 200);
        for message in ["one", "two", "six"] {
            let mut echoed = [0; 8];
            raw.0.read_exact(&mut echoed).await.unwrap();
            assert_eq!(&echoed[3..6], message.as_bytes());
            let next = if message == "one" { "two" } else { "six" };
            raw.send(format!("3\r\n{next}\r\n")).await;
        }
        raw.0.shutdown().await.unwrap();
    }
}

isolated! {
    async fn grpc_passes_relays_of_routes_and_of_rules() {
        let (_, own) = grpc::server(("127.0.0.1", 9000)).await;
        let (_, good) = grpc::server((GOOD, 50051)).await;
        let routes = Routes::new(["http://127.0.0.1:9000"]).unwrap();
        let policy = Policy::new(["tcp://good.example:50051"], []).unwrap();
        let world = World::new(EgressPolicy::execution(policy.clone(), routes.clone())).await;
        let route = world.proxy.relay_route(listener().await, routes.iter().next().unwrap()).unwrap();
        let rule = world.proxy.relay(listener().await, &policy.relays()[0]).unwrap();
        for (relay, calls) in [(route, own), (rule, good)] {
            let stream = TcpStream::connect(relay.address()).await.unwrap();
            grpc::exercise(stream, &calls).await;
        }
        assert!(world.proxy.log().refused().is_empty());
    }
}

isolated! {
    async fn a_relay_of_a_rule_is_checked_for_every_connection() {
        let database = upstream::echo(GOOD, 5432).await;
        let private = upstream::echo("10.0.0.1", 5432).await;
        let world = World::allow(&["tcp://db.example:5432"]).await;
        world.names.set("db.example", &[&[GOOD], &["10.0.0.1"]]);
        let relays = world.proxy.log().clone();
        let destination = Policy::new(["tcp://db.example:5432"], []).unwrap().relays().remove(0);
        let relay = world.proxy.relay(listener().await, &destination).unwrap();
        let mut raw = Raw(TcpStream::connect(relay.address()).await.unwrap());
        raw.send("query").await;
        raw.0.shutdown().await.unwrap();
        assert_eq!(raw.rest().await, b"query");
        // The name has changed its answer. The reset may come while the client is still connecting.
        if let Ok(stream) = TcpStream::connect(relay.address()).await {
            let mut raw = Raw(stream);
            raw.try_send("query").await;
            assert!(raw.rest().await.is_empty());
        }
        crate::tunnels::until(|| relays.refused().len() == 1 && relays.used().len() == 1).await;
        assert_eq!((database.text().as_str(), private.connections()), ("query", 0));
        assert_eq!(relays.used().iter().map(ToString::to_string).collect::<Vec<_>>(), ["tcp://db.example:5432"]);
        assert_eq!(relays.refused()[0].reason, "non_global_address");
        // The rule grants the relay and nothing else.
        assert_eq!(world.tunnel("db.example:5432").await.0, 403);
        assert_eq!(world.ask("GET http://db.example:5432/").await.status, 403);
        for (host, port) in [("db.example", 5433), ("other.example", 5432)] {
            let other = Destination::new(Scheme::Tcp, host, port);
            assert!(world.proxy.relay(listener().await, &other).is_err());
        }
    }
}

isolated! {
    async fn relays_of_earlier_policies_end_with_their_listeners() {
        let _own = upstream::echo("127.0.0.1", 9000).await;
        let _database = upstream::echo(GOOD, 5432).await;
        let routes = Routes::new(["http://127.0.0.1:9000"]).unwrap();
        let first = Policy::new(["tcp://good.example:5432", "tcp://good.example:5433"], []).unwrap();
        let world = World::new(EgressPolicy::execution(first.clone(), routes.clone())).await;
        let route = world.proxy.relay_route(listener().await, routes.iter().next().unwrap()).unwrap();
        let [kept, lost] = [0, 1].map(|index| first.relays()[index].clone());
        let kept = world.proxy.relay(listener().await, &kept).unwrap();
        let lost = world.proxy.relay(listener().await, &lost).unwrap();
        let mut open = Raw(TcpStream::connect(kept.address()).await.unwrap());
        open.send("x").await;
        open.0.read_u8().await.unwrap();

        let second = Policy::new(["tcp://good.example:5432"], []).unwrap();
        world.switch(EgressPolicy::execution(second.clone(), Routes::none()), Older::Recheck).await;
        assert_eq!((route.is_closed(), kept.is_closed(), lost.is_closed()), (true, false, true));
        for gone in [&route, &lost] {
            assert!(TcpStream::connect(gone.address()).await.is_err());
        }
        open.send("y").await;
        assert_eq!(open.0.read_u8().await.unwrap(), b'y');

        world.switch(EgressPolicy::execution(second, Routes::none()), Older::Close).await;
        assert!(kept.is_closed() && TcpStream::connect(kept.address()).await.is_err());
        assert!(open.0.read_u8().await.is_err());
        assert_eq!(world.proxy.open_connections(), 0);
    }
}

fn quick() -> Limits {
    let mut limits = Limits::default();
    let short = Duration::from_millis(100);
    (limits.head, limits.keep_alive, limits.resolve, limits.connect) = (short, short, short, short);
    (limits.body, limits.response, limits.linger) = (short, short, short);
    limits
}

isolated! {
    async fn a_client_that_dawdles_is_dropped_at_every_step() {
        let good = upstream::http(GOOD, 80).await;
        let tunnelled = upstream::silent(GOOD, 443).await;
        let world = World::with(policy(&["good.example"], &[], &[]), quick()).await;
        let get = world.request("GET http://good.example/", "");
        let first_half = &get[..get.len() / 2];
        let body = world.request("POST http://good.example/count", "Content-Length: 9\r\n") + "some";
        let chunked = world.request("POST http://good.example/count", "Transfer-Encoding: chunked\r\n") + "4\r\nso";
        for (what, bytes) in [
            ("nothing", ""),
            ("half a head", first_half),
            ("a head without its end", get.strip_suffix("\r\n").unwrap()),
            ("half a body", body.as_str()),
            ("half a chunk", chunked.as_str()),
        ] {
            let mut raw = world.connect().await;
            raw.send(bytes).await;
            let rest = String::from_utf8_lossy(&raw.rest().await).into_owned();
            assert!(!rest.contains(" 200 "), "{what}: {rest}");
        }
        assert_eq!(good.requests(), 2, "the heads whose bodies never ended");
        // A byte now and then is no progress of a head.
        let mut raw = world.connect().await;
        let drip = async {
            for byte in get.as_bytes() {
                if raw.0.write_all(&[*byte]).await.is_err() {
                    return true;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            false
        };
        assert!(drip.await, "the drip was cut off");
        // Between CONNECT and the end of the ClientHello.
        for bytes in [&b""[..], b"\x16", &hello(&[sni(&["good.example"])], 9)[..30]] {
            let (_, mut raw) = world.tunnel("good.example:443").await;
            raw.send(bytes).await;
            assert!(raw.rest().await.is_empty());
        }
        assert_eq!((good.requests(), tunnelled.bytes()), (2, 0));
        // An idle connection after an answer.
        let mut raw = world.connect().await;
        raw.send(&get).await;
        assert_eq!(raw.answer().await.status, 200);
        assert!(raw.rest().await.is_empty());
    }
}

isolated! {
    async fn a_server_or_resolver_that_dawdles_is_given_up() {
        let _good = upstream::http(GOOD, 80).await;
        let mut manual = upstream::manual(OTHER, 80).await;
        let route = upstream::http("10.0.0.1", 9000).await;
        let world = World::with(policy(&["*.example"], &[], &["http://10.0.0.1:9000"]), quick()).await;
        assert_eq!(world.ask("GET http://never.example/").await.status, 504);
        assert_eq!(world.ask("GET http://good.example/hang").await.status, 504);
        let mut raw = world.connect().await;
        raw.send(world.request("GET http://other.example/", "")).await;
        let mut server = manual.recv().await.unwrap();
        assert!(server.read(&mut [0; 4096]).await.unwrap() > 0);
        server.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf").await.unwrap();
        assert_eq!(raw.head().await.status, 200);
        assert_eq!(raw.rest().await, b"half");
        // A route of the framework may take its time.
        let mut raw = world.connect().await;
        raw.send(world.request("GET http://10.0.0.1:9000/hang", "")).await;
        crate::tunnels::until(|| route.requests() == 1).await;
        assert!(tokio::time::timeout(Duration::from_millis(500), raw.0.read(&mut [0; 1])).await.is_err());
    }
}

isolated! {
    async fn a_client_that_goes_away_takes_its_request_along() {
        let mut servers = upstream::manual(GOOD, 80).await;
        let world = World::allow(&["good.example"]).await;
        let mut raw = world.connect().await;
        raw.send(world.request("GET http://good.example/", "")).await;
        let mut server = servers.recv().await.unwrap();
        let mut buffer = [0; 4096];
        assert!(server.read(&mut buffer).await.unwrap() > 0);
        drop(raw);
        assert!(matches!(server.read(&mut buffer).await, Ok(0) | Err(_)));
        crate::tunnels::until(|| world.proxy.open_connections() == 0).await;
    }
}

isolated! {
    async fn bad_answers_are_502_and_half_answers_end_in_an_error() {
        let mut servers = upstream::manual(GOOD, 80).await;
        let world = World::allow(&["good.example"]).await;
        for (answer, status) in [
            ("", 502),
            ("nonsense\r\n\r\n", 502),
            ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 502),
            ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", 502),
            ("HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", 204),
            ("HTTP/1.0 200 OK\r\n\r\nuntil the end", 200),
        ] {
            let mut raw = world.connect().await;
            raw.send(world.request("GET http://good.example/", "Connection: close\r\n")).await;
            let mut server = servers.recv().await.unwrap();
            let mut buffer = [0; 4096];
            assert!(server.read(&mut buffer).await.unwrap() > 0);
            server.write_all(answer.as_bytes()).await.unwrap();
            drop(server);
            let got = raw.answer().await;
            assert_eq!(got.status, status, "{answer:?}");
            if status == 200 {
                assert_eq!(got.text(), "until the end");
            }
        }
    }
}

isolated! {
    async fn the_log_tells_every_attempt_and_no_secret() {
        let _good = upstream::http(GOOD, 80).await;
        let world = World::allow(&["good.example"]).await;
        let mut log = world.proxy.log().subscribe();
        let mut raw = world.connect().await;
        raw.send(world.request("POST http://good.example/count?key=hunter2", "Content-Length: 5\r\nCookie: hunter2\r\n") + "hello").await;
        assert_eq!(raw.answer().await.text(), "5");
        let event = next(&mut log).await;
        assert_eq!((event.kind, event.outcome, event.status), (EgressKind::Request, Outcome::Allowed, Some(200)));
        assert_eq!((event.method.as_deref(), event.destination.as_deref()), (Some("POST"), Some("http://good.example:80")));
        assert_eq!((event.sent, event.received, event.generation), (5, 1, 0));
        assert_eq!((event.proxy.as_str(), event.rule.as_deref()), ("box", Some("good.example")));
        let mut text = format!("{event:?}");
        for (line, outcome, reason) in [
            ("GET http://other.example/?hunter2", Outcome::Refused, "not_allowed"),
            ("GET http://127.0.0.1/?hunter2", Outcome::Refused, "loopback"),
            ("CONNECT good.example:444", Outcome::Refused, "tunnel_port"),
            ("GET https://good.example/hunter2", Outcome::Refused, "absolute_https"),
            ("GET http://good.example:81/", Outcome::Failed, "unreachable"),
        ] {
            let _ = world.ask(line).await;
            let event = next(&mut log).await;
            assert_eq!((event.outcome, event.reason), (outcome, reason), "{line}");
            text += &format!("{event:?}{}", serde_json::to_string(&*event).unwrap());
        }
        let mut raw = world.connect().await;
        raw.send("GET http://good.example/ HTTP/1.1\r\nProxy-Authorization: Basic aHVudGVyMg==\r\n\r\n").await;
        let _ = raw.answer().await;
        let event = next(&mut log).await;
        assert_eq!((event.reason, event.status), ("unauthenticated", Some(407)));
        text += &format!("{event:?} {:?}", world.proxy);
        let token = world.url();
        let token = token.split(['@', ':']).nth(2).unwrap();
        assert!(!text.contains("hunter2") && !text.contains(token) && !text.contains("aHVudGVyMg"), "{text}");
        let proposals: Vec<_> = world.proxy.log().refused().into_iter().map(|refusal| refusal.proposal.map(|rule| rule.to_string())).collect();
        let rule = |text: &str| Some(text.to_owned());
        assert_eq!(proposals, [rule("http://other.example"), None, rule("https://good.example:444")]);
        assert_eq!(world.proxy.log().used().iter().map(ToString::to_string).collect::<Vec<_>>(), ["http://good.example"]);
    }
}

isolated! {
    async fn dropping_a_proxy_or_stopping_it_closes_everything() {
        let _server = upstream::echo("10.0.0.1", 9000).await;
        for drop_it in [true, false] {
            let World { proxy, port, .. } = World::new(policy(&[], &[], &["http://10.0.0.1:9000"])).await;
            let routes = Routes::new(["http://10.0.0.1:9000"]).unwrap();
            let relay = proxy.relay_route(listener().await, routes.iter().next().unwrap()).unwrap();
            let mut relayed = Raw(TcpStream::connect(relay.address()).await.unwrap());
            relayed.send("x").await;
            relayed.0.read_u8().await.unwrap();
            let mut idle = Raw(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
            if drop_it {
                drop(proxy);
            } else {
                proxy.stop().await;
                proxy.stop().await;
                assert_eq!(proxy.open_connections(), 0);
                assert!(TcpStream::connect(("127.0.0.1", port)).await.is_err());
            }
            assert!(idle.rest().await.is_empty() && relayed.rest().await.is_empty());
        }
    }
}

isolated! {
    async fn a_proxy_without_room_is_not_built() {
        let mut limits = Limits::default();
        limits.connections = 0;
        let error = EgressProxy::builder("box").limits(limits).build().unwrap_err();
        assert_eq!(error.field(), Some("limits.connections"));
    }
}
