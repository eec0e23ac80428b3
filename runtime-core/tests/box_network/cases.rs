use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use runtime_core::box_network::BoxNetwork;
use runtime_core::guest::SpawnOptions;
use runtime_core::network::{Policy, Routes};
use runtime_core::{Env, ErrorKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::*;
use crate::world::{GOOD, Names, OTHER, isolated};

const KINDS: [Kind; 2] = [Kind::Socket, Kind::Stdio];

/// A box that has a network of its own: one interface, which `cut` takes away.
struct Box {
    guest: Guest,
    network: BoxNetwork,
}

fn in_namespaces(program: &Path) -> Command {
    let mut command = Command::new("unshare");
    let script = format!(
        "ip link set lo up; ip link add net0 type veth peer name peer0; ip link set net0 up; ip addr add 10.9.8.7/24 dev net0; \
         exec {} \"$@\"",
        program.display()
    );
    command.args([
        "--pid",
        "--net",
        "--mount-proc",
        "--fork",
        "--kill-child",
        "sh",
        "-ec",
        &script,
        "guest",
    ]);
    command
}

impl Box {
    async fn start(kind: Kind, policy: &Policy) -> Self {
        let guest = Guest::start_with(kind, in_namespaces).await;
        let names = Names::default();
        names.set("good.example", &[&[GOOD]]);
        names.set("other.example", &[&[OTHER]]);
        names.set("private.example", &[&["10.0.0.1"]]);
        let network = BoxNetwork::builder("box", guest.link.clone())
            .policy(policy.clone())
            .resolver(Arc::new(names));
        let network = within(network.start()).await.unwrap();
        Self { guest, network }
    }

    async fn cut(&self) {
        self.guest.shell("ip link del net0 2>/dev/null || true").await;
    }

    async fn close(&self, policy: &Policy, routes: &[&str]) -> runtime_core::Result<()> {
        let routes = Routes::new(routes).unwrap();
        let cut = async {
            self.cut().await;
            Ok(())
        };
        within(self.network.close(policy, &routes, cut)).await
    }

    /// What a program that starts now makes of a script, in its environment.
    async fn run(&self, script: &str) -> (Option<i32>, String) {
        self.run_in(script, self.network.environment(&Env::new(), false)).await
    }

    async fn run_in(&self, script: &str, env: Env) -> (Option<i32>, String) {
        let mut exec = exec(["sh", "-c", script]);
        exec.env = env;
        let process = within(self.guest.link.spawn(&exec, &SpawnOptions::default()))
            .await
            .unwrap();
        let (status, stdout, _) = within(collect(process)).await;
        (status.code(), String::from_utf8_lossy(&stdout).trim().to_owned())
    }
}

/// A server that answers every request with its name and closes; counts are in the log of the proxy.
async fn server(address: (&str, u16), body: Vec<u8>) -> u16 {
    let listener = TcpListener::bind(address).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let body = body.clone();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.windows(4).any(|four| four == b"\r\n\r\n") {
                    if stream.read_buf(&mut head).await.unwrap_or(0) == 0 {
                        return;
                    }
                }
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                );
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.write_all(&body).await;
                let _ = stream.shutdown().await;
                let mut rest = [0; 64];
                while stream.read(&mut rest).await.is_ok_and(|count| count > 0) {}
            });
        }
    });
    port
}

const STATUS: &str = "curl -sS -m 20 -o /dev/null -w '%{http_code}'";

isolated! {
    async fn a_box_counts_as_closed_only_without_interfaces_and_the_engines_resolver() {
        for kind in KINDS {
            let policy = Policy::framework_only();
            let with = Box::start(kind, &policy).await;
            let left = within(with.network.close(&policy, &Routes::none(), async { Ok(()) })).await.unwrap_err();
            assert_eq!(left.kind(), ErrorKind::NetworkPolicy);
            assert!(left.message().contains("net0"), "{left}");
            assert!(!with.network.is_closed());
            with.guest.shell("ip link set net0 down").await;
            // A port that answers like Docker's resolver.
            let listener = with.guest.link.listen((Ipv4Addr::new(127, 0, 0, 11), 53).into()).await.unwrap();
            let left = with.close(&policy, &[]).await.unwrap_err();
            assert_eq!(left.kind(), ErrorKind::NetworkPolicy);
            assert!(left.message().contains("127.0.0.11"), "{left}");
            drop(listener);
            with.close(&policy, &[]).await.unwrap();
            assert!(with.network.is_closed());
            // Again, and with the interface gone already.
            with.close(&policy, &[]).await.unwrap();
        }
    }

    async fn a_cut_that_fails_leaves_nothing_permitted() {
        let policy = Policy::new(["good.example"], []).unwrap();
        server((GOOD, 80), b"good".to_vec()).await;
        let with = Box::start(Kind::Socket, &policy).await;
        let failed = async { Err(runtime_core::Error::new(ErrorKind::Unavailable, "the engine is away")) };
        let error = within(with.network.close(&policy, &Routes::none(), failed)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(!with.network.is_closed());
        assert_eq!(with.run(&format!("{STATUS} http://good.example/")).await, (Some(0), "403".to_owned()));
        // Given up half-way.
        let none = Routes::none();
        let pending = with.network.close(&policy, &none, std::future::pending());
        tokio::time::timeout(std::time::Duration::from_millis(50), pending).await.unwrap_err();
        assert_eq!(with.run(&format!("{STATUS} http://good.example/")).await, (Some(0), "403".to_owned()));
        with.close(&policy, &[]).await.unwrap();
        assert_eq!(with.run(&format!("{STATUS} http://good.example/")).await, (Some(0), "200".to_owned()));
    }

    async fn an_interface_that_appears_ends_the_box() {
        for kind in KINDS {
            let policy = Policy::framework_only();
            let with = Box::start(kind, &policy).await;
            with.close(&policy, &[]).await.unwrap();
            let _running = with.guest.link.spawn(&exec(["ip", "link", "add", "evil0", "up", "type", "veth", "peer", "name", "evil1"]), &SpawnOptions::default()).await;
            let error = within(with.guest.link.ended()).await;
            assert_eq!(error.kind(), ErrorKind::NetworkPolicy);
            assert!(error.message().contains("evil0"), "{error}");
        }
    }

    async fn programs_reach_what_the_policy_allows_and_their_servers_outlive_the_cut() {
        let policy = Policy::new(["good.example", "private.example"], []).unwrap();
        server((GOOD, 80), b"good".to_vec()).await;
        server((OTHER, 80), b"other".to_vec()).await;
        server(("10.0.0.1", 80), b"private".to_vec()).await;
        for kind in KINDS {
            let with = Box::start(kind, &policy).await;
            let caller = Env::from_iter([("HTTP_PROXY", "http://elsewhere"), ("no_proxy", "a")]);
            let setup = with.network.environment(&caller, false);
            assert_eq!(setup.get("HTTP_PROXY"), None);
            assert!(setup.get("NO_PROXY").unwrap().to_str().unwrap().starts_with("a,localhost"));
            let server = with.network.environment(&Env::new(), true);
            // Setup may use everything, private networks too.
            for name in ["good", "other", "private"] {
                let script = format!("{STATUS} http://{name}.example/");
                assert_eq!(with.run_in(&script, server.clone()).await, (Some(0), "200".to_owned()), "{name}");
            }
            with.close(&policy, &[]).await.unwrap();
            for (name, status) in [("good", "200"), ("other", "403"), ("private", "403")] {
                let script = format!("{STATUS} http://{name}.example/");
                assert_eq!(with.run(&script).await, (Some(0), status.to_owned()), "{name}");
                assert_eq!(with.run_in(&script, server.clone()).await, (Some(0), status.to_owned()), "{name}");
            }
            let proposal = with.network.log().refused().into_iter().find(|refusal| refusal.destination.contains("other.example"));
            assert!(proposal.is_some());
            // Another setup: whoever has the old token is turned away.
            let old = with.network.environment(&Env::new(), false);
            within(with.network.open(async { Ok(()) })).await.unwrap();
            assert_eq!(with.run_in(&format!("{STATUS} http://other.example/"), old).await, (Some(0), "407".to_owned()));
            assert_eq!(with.network.environment(&Env::new(), false).get("http_proxy"), None);
            let server = with.network.environment(&Env::new(), true);
            assert_eq!(with.run_in(&format!("{STATUS} http://other.example/"), server).await, (Some(0), "200".to_owned()));
            with.close(&Policy::framework_only(), &[]).await.unwrap();
            assert_eq!(with.run(&format!("{STATUS} http://good.example/")).await, (Some(0), "403".to_owned()));
        }
    }

    async fn services_of_the_host_are_reached_by_relays_on_the_same_port_where_it_is_free() {
        let first = server(("127.0.0.1", 0), b"first".to_vec()).await;
        let second = server(("127.0.0.1", 0), b"second".to_vec()).await;
        let third = server(("127.0.0.1", 0), b"third".to_vec()).await;
        for kind in KINDS {
            let with = Box::start(kind, &Policy::framework_only()).await;
            let policy = Policy::framework_only();
            let taken = with.guest.link.listen((Ipv4Addr::LOCALHOST, second).into()).await.unwrap();
            let one = format!("http://localhost:{first}/v1?q=1");
            assert_eq!(with.network.host_url(&one).await.unwrap(), one);
            let two = with.network.host_url(&format!("http://127.0.0.1:{second}/v1")).await.unwrap();
            assert!(!two.contains(&format!(":{second}/")) && two.ends_with("/v1"), "{two}");
            let three = with.network.host_url(&format!("http://127.0.0.1:{third}/")).await.unwrap();
            for (url, body) in [(&one, "first"), (&two, "second"), (&three, "third")] {
                assert_eq!(with.run(&format!("curl -sS '{url}'")).await, (Some(0), body.to_owned()));
            }
            // One as the host knows it, one as the box does; the third is no route.
            with.close(&policy, &[&format!("http://localhost:{first}"), &two]).await.unwrap();
            for (url, body) in [(&one, "first"), (&two, "second")] {
                assert_eq!(with.run(&format!("curl -sS '{url}'")).await, (Some(0), body.to_owned()), "{kind:?}");
            }
            assert_eq!(with.run(&format!("curl -sS '{three}'")).await.0, Some(7), "nobody listens there");
            let error = with.network.host_url(&format!("http://127.0.0.1:{third}/")).await.unwrap_err();
            assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("url")));
            assert_eq!(with.network.host_url("https://a.example/x").await.unwrap(), "https://a.example/x");
            // Other routes instead.
            with.close(&policy, &[&format!("http://127.0.0.1:{third}")]).await.unwrap();
            assert_eq!(with.run(&format!("curl -sS '{three}'")).await, (Some(0), "third".to_owned()));
            assert_eq!(with.run(&format!("curl -sS '{one}'")).await.0, Some(7));
            drop(taken);
        }
    }

    async fn a_relay_by_a_rule_leads_to_its_place_alone() {
        let policy = Policy::new(["tcp://good.example:4321"], []).unwrap();
        server((GOOD, 4321), b"database".to_vec()).await;
        server((OTHER, 4321), b"other".to_vec()).await;
        for kind in KINDS {
            let with = Box::start(kind, &policy).await;
            let early = with.network.host_url("tcp://good.example:4321").await.unwrap();
            assert_eq!(early, "tcp://127.0.0.1:4321");
            with.close(&policy, &[]).await.unwrap();
            assert_eq!(with.network.host_url("tcp://good.example:4321").await.unwrap(), early);
            assert_eq!(with.run("curl -sS http://127.0.0.1:4321/").await, (Some(0), "database".to_owned()));
            assert!(with.network.host_url("tcp://other.example:4321").await.is_err());
        }
    }

    async fn nothing_is_lost_at_the_end_of_a_connection() {
        let policy = Policy::new(["good.example"], []).unwrap();
        let length = 8 << 20;
        let port = server(("127.0.0.1", 0), vec![b'x'; length]).await;
        server((GOOD, 80), vec![b'y'; length]).await;
        for kind in KINDS {
            let with = Box::start(kind, &policy).await;
            with.close(&policy, &[&format!("http://127.0.0.1:{port}")]).await.unwrap();
            for url in [format!("http://127.0.0.1:{port}/"), "http://good.example/".to_owned()] {
                let script = format!("curl -sS -m 60 '{url}' | wc -c");
                assert_eq!(with.run(&script).await, (Some(0), length.to_string()), "{kind:?} {url}");
            }
        }
    }

    async fn an_open_box_reaches_services_of_the_host_and_has_no_proxy() {
        let port = server(("127.0.0.1", 0), b"service".to_vec()).await;
        for kind in KINDS {
            let with = Box::start(kind, &Policy::open()).await;
            let url = with.network.host_url(&format!("http://127.0.0.1:{port}/")).await.unwrap();
            assert_eq!(with.run(&format!("curl -sS '{url}'")).await, (Some(0), "service".to_owned()));
            assert_eq!(with.network.environment(&Env::new(), true).get("http_proxy"), None);
            assert_eq!(with.network.host_url("tcp://a.example:1").await.unwrap(), "tcp://a.example:1");
        }
    }
}
