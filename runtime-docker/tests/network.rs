//! Boxes with a network policy on real engines: what the cut takes away, what stays, and what happens when it fails.

#[path = "support/boxes.rs"]
mod boxes;
mod support;

use std::time::Duration;

use boxes::{KINDS, cache, provision};
use runtime_core::network::Routes;
use runtime_core::{Command, ErrorKind, Phase, Sandbox};
use runtime_docker::{ContainerConfig, EngineKind, ExecMode};
use support::{client, config, containers_of, is_there};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn everywhere() -> impl Iterator<Item = (EngineKind, ExecMode)> {
    let ways = [("socket", ExecMode::Guest), ("stdio", ExecMode::Stdio)];
    KINDS.into_iter().filter(|kind| is_there(*kind)).flat_map(move |kind| {
        ways.into_iter()
            .filter(|(name, _)| boxes::ways::is_way_asked_for(name))
            .map(move |(_, way)| (kind, way))
    })
}

fn closed(kind: EngineKind, way: ExecMode) -> ContainerConfig {
    let mut config = config(kind, "busybox", way);
    config.allow = Vec::new();
    config
}

async fn text(sandbox: &Sandbox, script: &str) -> String {
    let output = sandbox
        .run(Command::shell(script).timeout(Duration::from_secs(30)))
        .await;
    let output = output.expect(script);
    assert!(output.success(), "{script}: {}", output.stderr_lossy());
    output.stdout_lossy().trim_end().to_owned()
}

fn id(sandbox: &Sandbox) -> String {
    sandbox.id().expect("an id")
}

const INTERFACES: &str = "ls /sys/class/net | xargs; wc -l </proc/net/route | tr -d ' '";

/// A server of this host that says its name to whoever connects.
async fn service(name: &'static str) -> u16 {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{name}",
                    name.len()
                );
                let _ = stream.write_all(answer.as_bytes()).await;
            });
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn the_network_is_open_in_setup_closed_for_the_program_and_opened_again() {
    for (kind, way) in everywhere() {
        let cache = cache();
        let sandbox = provision(kind, closed(kind, way), &cache).await.expect("a box");
        sandbox.prepare_setup().await.expect("setup");
        assert!(text(&sandbox, INTERFACES).await.contains("eth0"), "{kind} {way:?}");
        assert_eq!(text(&sandbox, "echo $http_proxy$HTTPS_PROXY").await, "");
        // A server of setup, which survives and has the proxy's variables.
        let server = "echo $http_proxy >proxy; echo $$ >pid; while :; do echo up | nc -l -p 8000; done";
        sandbox
            .run_background(["sh", "-c", server], "server.log")
            .await
            .expect("a server");
        sandbox.prepare_execution(Routes::none()).await.expect("a cut");
        assert_eq!(sandbox.phase(), Phase::Executing);
        assert_eq!(text(&sandbox, INTERFACES).await, "lo\n1", "{kind} {way:?}");
        let proxy = text(&sandbox, "echo $http_proxy").await;
        assert!(
            proxy.starts_with("http://verifiers:") && proxy.contains("@127.0.0.1:"),
            "{proxy}"
        );
        assert_eq!(text(&sandbox, "cat proxy; kill -0 $(cat pid)").await, proxy);
        assert_eq!(
            text(&sandbox, "echo $NO_PROXY").await,
            "localhost,127.0.0.1,host.docker.internal"
        );
        // The engine agrees, and the server is still reached.
        let networks = client(
            kind,
            &[
                "inspect",
                "--format",
                "{{len .NetworkSettings.Networks}}",
                &id(&sandbox),
            ],
        );
        assert_eq!(networks.as_deref(), Ok("0"));
        let url = sandbox.expose(8000).await.expect("a port");
        let address = url.strip_prefix("http://").expect("a URL");
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("a connection");
        let mut said = String::new();
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_string(&mut said)).await;
        read.expect("an answer").expect("an answer");
        assert_eq!(said, "up\n");
        // Once more changes nothing.
        sandbox.prepare_execution(Routes::none()).await.expect("a cut");
        assert_eq!(text(&sandbox, INTERFACES).await, "lo\n1");
        sandbox.prepare_setup().await.expect("another setup");
        assert!(text(&sandbox, INTERFACES).await.contains("eth"), "{kind} {way:?}");
        sandbox.prepare_execution(Routes::none()).await.expect("another cut");
        assert_eq!(text(&sandbox, INTERFACES).await, "lo\n1");
        let name = sandbox.name().to_owned();
        sandbox.stop().await.expect("a stop");
        assert_eq!(containers_of(kind, &name), Ok(Vec::new()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_of_the_host_are_reached_before_and_after_the_cut_and_others_are_not() {
    let (one, other) = (service("one").await, service("other").await);
    for (kind, way) in everywhere() {
        let cache = cache();
        let sandbox = provision(kind, closed(kind, way), &cache).await.expect("a box");
        let [one, other] = [one, other].map(|port| format!("http://127.0.0.1:{port}/"));
        let inside = sandbox.host_url(&one).await.expect("a way");
        assert_eq!(inside, one, "the port is free in the box");
        let second = sandbox.host_url(&other).await.expect("a way");
        assert_eq!(
            text(
                &sandbox,
                &format!("wget -Y off -q -O- {inside}; wget -Y off -q -O- {second}")
            )
            .await,
            "oneother"
        );
        sandbox
            .prepare_execution(Routes::new([&one]).expect("a route"))
            .await
            .expect("a cut");
        assert_eq!(
            text(&sandbox, &format!("wget -Y off -q -O- {inside}")).await,
            "one",
            "{kind} {way:?}"
        );
        assert_eq!(
            text(&sandbox, &format!("wget -Y off -q -O- {second} || echo no")).await,
            "no"
        );
        sandbox.stop().await.expect("a stop");
        // A box without a policy reaches them too.
        let open = provision(kind, config(kind, "busybox", way), &cache)
            .await
            .expect("a box");
        let inside = open.host_url(&one).await.expect("a way");
        assert_eq!(text(&open, &format!("wget -Y off -q -O- {inside}")).await, "one");
        open.stop().await.expect("a stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_of_the_users_is_closed_with_the_engines_resolver_and_given_back() {
    for (kind, way) in everywhere() {
        let cache = cache();
        let network = format!("sandbox-test-{}", std::process::id());
        let _ = client(kind, &["network", "rm", &network]);
        client(kind, &["network", "create", &network]).expect("a network");
        let mut wanted = closed(kind, way);
        wanted.network = Some(network.clone());
        let sandbox = provision(kind, wanted, &cache).await.expect("a box");
        let resolver = "timeout 5 nc 127.0.0.11 53 </dev/null 2>/dev/null && echo there || echo away";
        let has_resolver = text(&sandbox, resolver).await == "there";
        assert_eq!(has_resolver, kind == EngineKind::Docker, "what is to be blocked");
        sandbox.prepare_execution(Routes::none()).await.expect("a cut");
        assert_eq!(text(&sandbox, INTERFACES).await, "lo\n1", "{kind} {way:?}");
        assert_eq!(text(&sandbox, resolver).await, "away");
        // Its programs have no capability to change that.
        assert!(
            text(&sandbox, "ip route del blackhole 127.0.0.11 table local 2>&1 || true")
                .await
                .contains("not permitted")
        );
        sandbox.prepare_setup().await.expect("another setup");
        let present = client(
            kind,
            &[
                "inspect",
                "--format",
                "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}",
                &id(&sandbox),
            ],
        );
        assert_eq!(present.as_deref(), Ok(network.as_str()));
        assert_eq!(text(&sandbox, resolver).await == "there", has_resolver);
        sandbox.stop().await.expect("a stop");
        client(kind, &["network", "rm", &network]).expect("no network");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_that_fails_lets_nothing_start_and_the_box_can_still_be_deleted() {
    for (kind, way) in everywhere() {
        let cache = cache();
        let sandbox = provision(kind, closed(kind, way), &cache).await.expect("a box");
        // An interface that is not the engine's.
        let pid = client(kind, &["inspect", "--format", "{{.State.Pid}}", &id(&sandbox)]).expect("a pid");
        let nsenter = |arguments: &[&str]| {
            let status = std::process::Command::new("nsenter")
                .args(["-t", &pid, "-n", "ip"])
                .args(arguments)
                .status();
            status.is_ok_and(|status| status.success())
        };
        if !nsenter(&["link", "add", "extra0", "up", "type", "veth", "peer", "name", "extra1"]) {
            eprintln!("SKIPPED: {kind}: an interface needs root and iproute2");
            assert!(std::env::var_os("CI").is_none());
            return;
        }
        let error = sandbox.prepare_execution(Routes::none()).await.expect_err("not closed");
        assert_eq!(error.kind(), ErrorKind::NetworkPolicy, "{error}");
        assert!(error.message().contains("extra0"), "{error}");
        assert_eq!(sandbox.phase(), Phase::Unsettled);
        assert_eq!(
            sandbox.run(["true"]).await.expect_err("refused").kind(),
            ErrorKind::NetworkPolicy
        );
        assert!(nsenter(&["link", "del", "extra0"]));
        sandbox.prepare_execution(Routes::none()).await.expect("a cut");
        // And one that comes later ends the box.
        assert!(nsenter(&[
            "link", "add", "extra0", "up", "type", "veth", "peer", "name", "extra1"
        ]));
        let ended = tokio::time::timeout(Duration::from_secs(30), async {
            while sandbox.run(["true"]).await.is_ok() {}
            sandbox.run(["true"]).await.expect_err("a box that is given up")
        });
        let error = ended.await.expect("the box ends");
        assert_eq!(error.kind(), ErrorKind::NetworkPolicy, "{error}");
        let name = sandbox.name().to_owned();
        sandbox.stop().await.expect("a stop");
        assert_eq!(containers_of(kind, &name), Ok(Vec::new()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_nothing_can_prove_is_refused_before_anything_exists() {
    for kind in KINDS.into_iter().filter(|kind| is_there(*kind)) {
        let cache = cache();
        let mut borrowed = ContainerConfig::attach("no-such-container");
        borrowed.allow = Vec::new();
        for config in [closed(kind, ExecMode::Engine), borrowed] {
            let error = provision(kind, config, &cache).await.expect_err("refused");
            assert_eq!(
                (error.kind(), error.field()),
                (ErrorKind::Unsupported, Some("allow")),
                "{error}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_box_that_somebody_connects_again_is_ended() {
    for (kind, way) in everywhere() {
        let cache = cache();
        let sandbox = provision(kind, closed(kind, way), &cache).await.expect("a box");
        sandbox.prepare_execution(Routes::none()).await.expect("a cut");
        let network = match kind {
            EngineKind::Docker => "bridge",
            EngineKind::Podman => "podman",
        };
        client(kind, &["network", "connect", network, &id(&sandbox)]).expect("a connection");
        let ended = tokio::time::timeout(Duration::from_secs(30), async {
            while sandbox.run(["true"]).await.is_ok() {}
            sandbox.run(["true"]).await.expect_err("a box that is given up")
        });
        assert_eq!(
            ended.await.expect("the box ends").kind(),
            ErrorKind::NetworkPolicy,
            "{kind} {way:?}"
        );
        sandbox.stop().await.expect("a stop");
    }
}
