//! Plain requests.

use crate::upstream::{self, Arrived};
use crate::world::{FORBIDDEN, GOOD, GOOD6, OTHER, World, field, isolated, policy};

async fn good(port: u16) -> Arrived {
    upstream::http(GOOD, port).await
}

isolated! {
    async fn an_allowed_request_arrives_in_origin_form_for_its_own_host() {
        let arrived = good(80).await;
        let world = World::allow(&["good.example"]).await;
        let fields = "Accept: x\r\nConnection: keep-alive, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: 1\r\nTE: trailers\r\n\
                      Proxy-Connection: keep-alive\r\nUpgrade: h2c\r\nCookie: a=b\r\n";
        let mut raw = world.connect().await;
        raw.send(world.request("GET http://GOOD.example./path?query=1", fields)).await;
        let answer = raw.answer().await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "ok"));
        assert_eq!(answer.field("x-from"), Some("upstream"));
        let text = arrived.text();
        assert!(text.starts_with("GET /path?query=1 HTTP/1.1\r\n"), "{text}");
        assert_eq!(field(&text, "host"), Some("good.example"));
        assert_eq!((field(&text, "accept"), field(&text, "cookie")), (Some("x"), Some("a=b")));
        for gone in ["proxy-authorization", "connection", "keep-alive", "x-secret", "te", "proxy-connection", "upgrade"] {
            assert_eq!(field(&text, gone), None, "{gone}");
        }
    }
}

isolated! {
    async fn every_decision_on_plain_requests_is_as_specified() {
        let servers = [good(80).await, good(8080).await, upstream::http(OTHER, 80).await];
        let world = World::allow(&["good.example", "http://api.good.example"]).await;
        let mut before = 0;
        for (line, status) in [
            ("GET http://good.example/", 200),
            ("GET http://good.example:8080/", 200),
            ("GET http://api.good.example/", 200),
            ("HEAD http://good.example/", 200),
            ("GET http://good.example?x", 200),
            ("GET http://api.good.example:8080/", 403),
            ("GET http://other.example/", 403),
            ("GET http://sub.good.example/", 403),
            ("GET http://93.184.215.14/", 403),
            ("GET http://good.example.evil.net/", 403),
            ("GET http://localhost/", 403),
            ("GET http://127.0.0.1/", 403),
            ("GET http://[::1]/", 403),
            ("GET http://10.0.0.1/", 403),
            ("GET http://good%2eexample/", 400),
            ("GET https://good.example/", 403),
            ("GET ftp://good.example/", 403),
            ("GET ws://good.example/", 403),
            ("GET /", 403),
            ("GET /http://good.example/", 403),
            ("OPTIONS *", 403),
            ("GET http://user:pw@good.example/", 400),
            ("GET http://good.example:99999/", 400),
            ("GET http://good.example:0x50/", 400),
            ("GET http://", 400),
            ("GET good.example:80", 403),
        ] {
            let mut raw = world.connect().await;
            raw.send(world.request(line, "")).await;
            assert_eq!(raw.head().await.status, status, "{line}");
            let now = servers.iter().map(Arrived::requests).sum();
            assert_eq!(now, before + usize::from(status == 200), "{line}: what arrived");
            before = now;
        }
        assert_eq!(servers[2].connections(), 0);
    }
}

isolated! {
    async fn routes_are_reached_whatever_the_policy_says_and_loopback_never_is() {
        let svc = upstream::http("10.0.0.1", 9000).await;
        let own = upstream::http("127.0.0.1", 9000).await;
        let world = World::new(policy(&[], &[], &["http://svc:9000", "http://127.0.0.1:9000"])).await;
        world.names.set("svc", &[&["10.0.0.1"]]);
        assert_eq!(world.ask("GET http://svc:9000/").await.status, 200);
        for refused in ["http://svc/", "http://svc:9001/", "http://127.0.0.1:9000/", "http://localhost:9000/", "http://10.0.0.1:9000/"] {
            assert_eq!(world.ask(&format!("GET {refused}")).await.status, 403, "{refused}");
        }
        assert_eq!((svc.requests(), own.connections()), (1, 0));
    }
}

isolated! {
    async fn setup_reaches_private_networks_but_not_this_host() {
        let private = upstream::http("10.0.0.1", 80).await;
        let own = upstream::http("127.0.0.1", 80).await;
        let world = World::new(runtime_core::network::EgressPolicy::setup()).await;
        world.names.set("mirror.internal", &[&["10.0.0.1"]]);
        for (name, address) in [("trick.internal", "127.0.0.1"), ("zero.internal", "0.0.0.0"), ("2130706433", "127.0.0.1")] {
            world.names.set(name, &[&[address]]);
            assert_eq!(world.ask(&format!("GET http://{name}/")).await.status, 403, "{name}");
        }
        assert_eq!(world.ask("GET http://mirror.internal/").await.status, 200);
        assert_eq!((private.requests(), own.connections()), (1, 0));
    }
}

isolated! {
    async fn names_that_lead_to_addresses_of_no_business_are_refused_and_nothing_arrives() {
        let good = good(80).await;
        let world = World::new(policy(&["*"], &["blocked.example", "198.41.0.0/16"], &[])).await;
        let other = upstream::http(OTHER, 80).await;
        for address in FORBIDDEN {
            let arrived = upstream::http(address, 80).await;
            world.names.set("trick.example", &[&[address]]);
            assert_eq!(world.ask("GET http://trick.example/").await.status, 403, "{address}");
            // One bad address spoils the good ones.
            world.names.set("mixed.example", &[&[GOOD, address]]);
            assert_eq!(world.ask("GET http://mixed.example/").await.status, 403, "mixed {address}");
            assert_eq!(arrived.connections(), 0, "{address}");
        }
        for address in ["::ffff:93.184.215.14", "64:ff9b::5db8:d70e", "2002:5db8:d70e::1", "224.0.0.1", "255.255.255.255", "0.0.0.0"] {
            world.names.set("trick.example", &[&[address]]);
            assert_eq!(world.ask("GET http://trick.example/").await.status, 403, "{address}");
        }
        // A blocked network behind a name that is not blocked.
        assert_eq!(world.ask("GET http://other.example/").await.status, 403);
        assert_eq!((good.connections(), other.connections()), (0, 0));
        assert_eq!(world.ask("GET http://good.example/").await.status, 200);
    }
}

isolated! {
    async fn a_name_that_changes_its_answer_is_asked_once_and_dialled_where_it_was_checked() {
        let good = good(80).await;
        let metadata = upstream::http("169.254.169.254", 80).await;
        let world = World::allow(&["rebind.example"]).await;
        world.names.set("rebind.example", &[&[GOOD], &["169.254.169.254"]]);
        let mut raw = world.connect().await;
        raw.send(world.request("GET http://rebind.example/", "")).await;
        assert_eq!(raw.answer().await.status, 200);
        assert_eq!(world.names.asked(), ["rebind.example"]);
        // Another connection asks again, and is refused.
        assert_eq!(world.ask("GET http://rebind.example/").await.status, 403);
        assert_eq!((good.requests(), metadata.connections()), (1, 0));
    }
}

isolated! {
    async fn a_name_that_is_refused_is_not_even_asked_for() {
        let world = World::allow(&["good.example"]).await;
        for line in ["GET http://c2VjcmV0.evil.example/", "CONNECT c2VjcmV0.evil.example:443"] {
            assert_eq!(world.ask(line).await.status, 403);
        }
        assert!(world.names.asked().is_empty());
    }
}

isolated! {
    async fn the_second_address_is_tried_when_the_first_refuses() {
        let good = good(80).await;
        let world = World::allow(&["two.example", "six.example", "nowhere.example"]).await;
        world.names.set("two.example", &[&[OTHER, GOOD]]);
        assert_eq!(world.ask("GET http://two.example/").await.status, 200);
        let six = upstream::http(GOOD6, 80).await;
        world.names.set("six.example", &[&[GOOD6]]);
        assert_eq!(world.ask("GET http://six.example/").await.status, 200);
        world.names.set("nowhere.example", &[&[OTHER]]);
        assert_eq!(world.ask("GET http://nowhere.example/").await.status, 502);
        assert_eq!(world.ask("GET http://unknown.nowhere.example/").await.status, 403);
        assert_eq!((good.requests(), six.requests()), (1, 1));
    }
}

isolated! {
    async fn an_address_literal_of_ipv6_has_its_brackets_in_host() {
        let six = upstream::http(GOOD6, 8080).await;
        let world = World::allow(&["[2606:4700::1111]"]).await;
        assert_eq!(world.ask("GET http://[2606:4700::1111]:8080/x").await.status, 200);
        assert_eq!(field(&six.text(), "host"), Some("[2606:4700::1111]:8080"));
        assert!(world.names.asked().is_empty());
    }
}

isolated! {
    async fn credentials_are_asked_for_and_only_this_box_has_them() {
        let arrived = good(80).await;
        let world = World::allow(&["good.example"]).await;
        let stranger = World::allow(&["good.example"]).await;
        let request = |auth: &str| format!("GET http://good.example/ HTTP/1.1\r\nHost: x\r\n{auth}\r\n");
        let mut raw = world.connect().await;
        // All on one connection: being turned away does not cost it.
        for wrong in [
            String::new(),
            "Proxy-Authorization: Basic dmVyaWZpZXJzOndyb25n\r\n".to_owned(),
            stranger.auth(),
            world.auth().replace("Basic", "Bearer"),
            world.auth().replace("Proxy-Authorization", "Authorization"),
            format!("{}{}", world.auth(), world.auth()),
        ] {
            raw.send(request(&wrong)).await;
            let answer = raw.answer().await;
            assert_eq!(answer.status, 407, "{wrong}");
            assert_eq!(answer.field("proxy-authenticate"), Some("Basic realm=\"verifiers\""));
            raw.send(format!("CONNECT good.example:443 HTTP/1.1\r\n{wrong}\r\n")).await;
            assert_eq!(raw.answer().await.status, 407, "{wrong}");
        }
        assert_eq!(arrived.connections(), 0);
        raw.send(request(&world.auth())).await;
        assert_eq!(raw.answer().await.status, 200);
        // A renewed token turns the old one away.
        let old = world.auth();
        world.proxy.renew_token().unwrap();
        raw.send(request(&old)).await;
        assert_eq!(raw.answer().await.status, 407);
        raw.send(request(&world.auth())).await;
        assert_eq!(raw.answer().await.status, 200);
    }
}

isolated! {
    async fn connections_are_kept_on_both_sides_and_per_destination() {
        let arrived = good(80).await;
        let elsewhere = good(8080).await;
        let world = World::allow(&["good.example"]).await;
        let mut raw = world.connect().await;
        for _ in 0..10 {
            raw.send(world.request("GET http://good.example/", "")).await;
            assert_eq!(raw.answer().await.text(), "ok");
        }
        assert_eq!((arrived.connections(), arrived.requests()), (1, 10));
        raw.send(world.request("GET http://good.example:8080/", "")).await;
        assert_eq!(raw.answer().await.status, 200);
        raw.send(world.request("POST http://good.example/count", "Content-Length: 3\r\n") + "abc").await;
        assert_eq!(raw.answer().await.text(), "3");
        assert_eq!((arrived.connections(), elsewhere.connections()), (2, 1));
    }
}

isolated! {
    async fn a_kept_connection_that_the_server_closed_costs_no_request() {
        let arrived = good(80).await;
        let world = World::allow(&["good.example"]).await;
        let mut raw = world.connect().await;
        for pause in [0, 0, 19, 20, 21, 60] {
            raw.send(world.request("GET http://good.example/once", "")).await;
            assert_eq!(raw.answer().await.text(), "once");
            tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
        }
        assert!(arrived.connections() >= 2);
    }
}

isolated! {
    async fn pipelined_requests_are_each_judged() {
        let arrived = good(80).await;
        let other = upstream::http(OTHER, 80).await;
        let world = World::allow(&["good.example"]).await;
        let mut raw = world.connect().await;
        let all = [
            world.request("GET http://good.example/1", ""),
            world.request("GET http://other.example/2", ""),
            world.request("POST http://good.example/count", "Content-Length: 5\r\n") + "hello",
            world.request("POST http://good.example/count", "Transfer-Encoding: chunked\r\n") + "3\r\nabc\r\n0\r\n\r\n",
            "GET http://good.example/4 HTTP/1.1\r\n\r\n".to_owned(),
            world.request("GET http://good.example/5", ""),
        ];
        raw.send(all.concat()).await;
        let mut statuses = Vec::new();
        for _ in 0..6 {
            let answer = raw.answer().await;
            statuses.push((answer.status, answer.text()));
        }
        let expected = [(200, "ok"), (403, ""), (200, "5"), (200, "3"), (407, ""), (200, "ok")];
        assert_eq!(statuses, expected.map(|(status, text)| (status, text.to_owned())));
        assert_eq!((arrived.requests(), other.connections()), (4, 0));
    }
}

isolated! {
    async fn clients_of_http_1_0_are_served() {
        let arrived = good(80).await;
        let world = World::allow(&["good.example"]).await;
        let mut raw = world.connect().await;
        raw.send(format!("GET http://good.example/bytes/100000 HTTP/1.0\r\n{}\r\n", world.auth())).await;
        let answer = raw.answer().await;
        assert!(answer.head.starts_with("HTTP/1.0 200"), "{}", answer.head);
        assert_eq!(answer.body.len(), 100_000);
        assert!(raw.rest().await.is_empty());
        assert!(arrived.text().starts_with("GET /bytes/100000 HTTP/1.1\r\n"));
        // A body of unknown length has to end with the connection.
        let mut raw = world.connect().await;
        let body = "x".repeat(1000);
        raw.send(format!(
            "POST http://good.example/echo HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 1000\r\n{}\r\n{body}",
            world.auth()
        ))
        .await;
        let answer = raw.answer().await;
        assert_eq!((answer.field("transfer-encoding"), answer.text()), (None, body));
    }
}

isolated! {
    async fn bodies_stream_both_ways_while_the_request_goes_on() {
        let arrived = good(80).await;
        let world = World::allow(&["good.example"]).await;
        let mut raw = world.connect().await;
        raw.send(world.request("POST http://good.example/echo", "Transfer-Encoding: chunked\r\n")).await;
        raw.send("3\r\none\r\n").await;
        assert_eq!(raw.head().await.field("transfer-encoding"), Some("chunked"));
        let mut echoed = vec![0; 8];
        use tokio::io::AsyncReadExt as _;
        for word in ["one", "two", "six"] {
            if word != "one" {
                raw.send(format!("3;ext=1\r\n{word}\r\n")).await;
            }
            raw.0.read_exact(&mut echoed).await.unwrap();
            assert_eq!(echoed, format!("3\r\n{word}\r\n").as_bytes());
        }
        raw.send("0\r\nX-Trailer: t\r\n\r\n").await;
        raw.0.read_exact(&mut echoed[..5]).await.unwrap();
        assert_eq!(&echoed[..5], b"0\r\n\r\n");
        assert!(!arrived.text().to_lowercase().contains("x-trailer"));
    }
}

isolated! {
    async fn a_hundred_mebibytes_go_up_and_down() {
        use tokio::io::AsyncReadExt as _;
        const SIZE: usize = 100 << 20;
        let arrived = good(80).await;
        let world = World::allow(&["good.example"]).await;
        let mut raw = world.connect().await;
        raw.send(world.request(&format!("GET http://good.example/bytes/{SIZE}"), "")).await;
        let head = raw.head().await;
        assert_eq!(head.field("content-length"), Some(SIZE.to_string().as_str()));
        let mut buffer = vec![0; 1 << 20];
        let mut left = SIZE;
        while left > 0 {
            let length = raw.0.read(&mut buffer).await.unwrap();
            assert!(length > 0 && buffer[..length].iter().all(|byte| *byte == b'x'));
            left -= length;
        }
        for fields in [format!("Content-Length: {SIZE}\r\n"), "Transfer-Encoding: chunked\r\n".to_owned()] {
            raw.send(world.request("POST http://good.example/count", &fields)).await;
            let piece = vec![b'y'; 1 << 20];
            for _ in 0..SIZE / piece.len() {
                if fields.starts_with("Transfer") {
                    raw.send("100000\r\n").await;
                    raw.send(&piece).await;
                    raw.send("\r\n").await;
                } else {
                    raw.send(&piece).await;
                }
            }
            if fields.starts_with("Transfer") {
                raw.send("0\r\n\r\n").await;
            }
            assert_eq!(raw.answer().await.text(), SIZE.to_string());
        }
        assert!(arrived.bytes() > 2 * SIZE);
    }
}

isolated! {
    async fn an_expected_100_is_answered_by_the_proxy_and_not_passed_on() {
        let arrived = good(80).await;
        let world = World::allow(&["good.example"]).await;
        let mut raw = world.connect().await;
        raw.send(world.request("POST http://good.example/count", "Expect: 100-continue\r\nContent-Length: 5\r\n")).await;
        assert_eq!(raw.head().await.status, 100);
        raw.send("hello").await;
        assert_eq!(raw.answer().await.text(), "5");
        assert_eq!(field(&arrived.text(), "expect"), None);
        raw.send(world.request("POST http://good.example/count", "Expect: a-miracle\r\nContent-Length: 0\r\n")).await;
        assert_eq!(raw.answer().await.status, 417);
        // Refused before anything is asked for.
        let mut raw = world.connect().await;
        raw.send(world.request("POST http://other.example/", "Expect: 100-continue\r\nContent-Length: 5\r\n")).await;
        assert_eq!(raw.head().await.status, 403);
        assert_eq!(arrived.requests(), 1);
    }
}

isolated! {
    async fn an_answer_that_comes_before_the_end_of_the_request_is_delivered() {
        let _server = good(80).await;
        let world = World::allow(&["good.example"]).await;
        for round in 0..20 {
            let mut raw = world.connect().await;
            raw.send(world.request("POST http://good.example/refuse", "Content-Length: 50000000\r\n")).await;
            // A client that sends everything before it listens.
            let piece = vec![0; 1 << 16];
            for _ in 0..50_000_000 / piece.len() / (1 + round % 2 * 7) {
                raw.try_send(&piece).await;
            }
            let answer = raw.answer().await;
            assert_eq!((answer.status, answer.text().as_str()), (413, "too large"), "round {round}");
        }
    }
}

isolated! {
    async fn a_redirect_to_a_refused_host_is_passed_on_and_leads_nowhere() {
        let _server = good(80).await;
        let other = upstream::http(OTHER, 80).await;
        let world = World::allow(&["good.example"]).await;
        let answer = world.ask("GET http://good.example/redirect").await;
        assert_eq!((answer.status, answer.field("location")), (302, Some("http://other.example/")));
        assert_eq!(world.ask("GET http://other.example/").await.status, 403);
        assert_eq!(other.connections(), 0);
    }
}

isolated! {
    async fn a_thousand_requests_at_64_in_flight_all_succeed() {
        let arrived = good(80).await;
        let world = std::sync::Arc::new(World::allow(&["good.example"]).await);
        let mut tasks = tokio::task::JoinSet::new();
        for worker in 0..64 {
            let world = std::sync::Arc::clone(&world);
            tasks.spawn(async move {
                let mut raw = world.connect().await;
                let count = 1000 / 64 + usize::from(worker < 1000 % 64);
                for round in 0..count {
                    // Now and then over a new connection.
                    if round % 5 == 4 {
                        raw = world.connect().await;
                    }
                    raw.send(world.request("GET http://good.example/bytes/1000", "")).await;
                    let answer = raw.answer().await;
                    assert_eq!((answer.status, answer.body.len()), (200, 1000));
                }
                count
            });
        }
        let total: usize = tasks.join_all().await.into_iter().sum();
        assert_eq!((total, arrived.requests()), (1000, 1000));
    }
}

isolated! {
    async fn more_connections_than_fit_wait_for_those_that_are_idle() {
        let arrived = good(80).await;
        let mut limits = runtime_core::egress::Limits::default();
        limits.connections = 4;
        let world = World::with(policy(&["good.example"], &[], &[]), limits).await;
        let mut kept = Vec::new();
        for _ in 0..20 {
            let mut raw = world.connect().await;
            raw.send(world.request("GET http://good.example/", "")).await;
            assert_eq!(raw.answer().await.status, 200);
            kept.push(raw);
        }
        assert_eq!(arrived.requests(), 20);
    }
}
