//! Every way in which the provider fails, and what is made of it.
#![cfg(all(feature = "emulator", target_os = "linux"))]

mod common;

use std::time::Duration;

use common::Provider;
use runtime_core::network::Routes;
use runtime_core::{Command, ErrorKind, Retry, WriteOptions};
use runtime_e2b::emulator::{Action, Fault};
use runtime_e2b::{ApiKey, E2bConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

macro_rules! provider {
    () => {
        match Provider::start() {
            Some(provider) => provider,
            None => return,
        }
    };
}

#[tokio::test]
async fn a_wrong_key_is_unauthorized_and_not_shown() {
    let provider = provider!();
    let config = E2bConfig {
        api_key: Some(ApiKey::new("e2b_wrong_secret")),
        ..provider.emulator.config()
    };
    let error = provider.builder(config).provision().await.expect_err("refused");
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Unauthorized, Retry::Permanent)
    );
    assert!(!format!("{error} {error:?}").contains("wrong_secret"));
}

#[tokio::test]
async fn a_lifetime_beyond_the_plan_is_a_quota() {
    let provider = provider!();
    provider.emulator.set_max_lifetime(3600);
    let error = provider
        .builder(provider.emulator.config())
        .provision()
        .await
        .expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::QuotaExceeded);
    assert!(error.message().contains("1 hours"), "{error}");
    assert_eq!(provider.emulator.created(), 0);
    let config = E2bConfig {
        timeout: 3600,
        ..provider.emulator.config()
    };
    let sandbox = provider.builder(config).provision().await.expect("within the plan");
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_failed_build_tells_the_end_of_its_log() {
    let provider = provider!();
    provider.emulator.fail_image("no/such:image", "manifest unknown");
    let config = E2bConfig {
        image: "no/such:image".into(),
        ..provider.emulator.config()
    };
    let error = provider.builder(config).provision().await.expect_err("not built");
    assert_eq!(error.kind(), ErrorKind::Other);
    assert!(error.message().contains("manifest unknown"), "{error}");
    assert!(error.message().contains("pulling no/such:image"), "{error}");
    assert_eq!(provider.emulator.created(), 0);
}

#[tokio::test]
async fn an_old_daemon_is_refused_and_its_box_deleted() {
    let provider = provider!();
    provider.emulator.set_envd_version("0.4.1");
    let error = provider
        .builder(provider.emulator.config())
        .provision()
        .await
        .expect_err("too old");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(provider.emulator.boxes().is_empty());
}

#[tokio::test]
async fn a_box_that_dies_during_a_command_is_gone() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    let mut process = sandbox
        .spawn(["sh", "-c", "echo up; exec sleep 600"])
        .await
        .expect("started");
    let mut stdout = process.stdout.take().expect("not taken");
    let mut stderr = process.stderr.take().expect("not taken");
    let mut up = [0; 3];
    stdout.read_exact(&mut up).await.expect("printed");
    let view = sandbox.view();
    let run = tokio::spawn(async move { view.run(["sleep", "600"]).await });
    let view = sandbox.view();
    let program = tokio::spawn(async move { view.run_program(["sleep", "600"]).await });
    // Both have arrived when both are listed.
    while provider
        .emulator
        .requests()
        .iter()
        .filter(|line| line.contains("/Start"))
        .count()
        < 3
    {
        tokio::task::yield_now().await;
    }
    provider
        .emulator
        .kill_box(&sandbox.id().expect("an id"))
        .await
        .expect("there");
    for outcome in [run.await.expect("joined"), program.await.expect("joined")] {
        assert_eq!(outcome.expect_err("the box is gone").kind(), ErrorKind::SandboxGone);
    }
    // Once on each stream, and then the end.
    for stream in [
        &mut stdout as &mut (dyn tokio::io::AsyncRead + Unpin + Send),
        &mut stderr,
    ] {
        let mut rest = Vec::new();
        let error = stream.read_to_end(&mut rest).await.expect_err("told");
        assert_eq!(runtime_core::stream_error("x", error).kind(), ErrorKind::SandboxGone);
        assert_eq!(stream.read_to_end(&mut rest).await.expect("at its end"), 0);
    }
    assert_eq!(
        process.wait().await.expect_err("unknown").kind(),
        ErrorKind::SandboxGone
    );
    assert_eq!(
        sandbox.read("/etc/passwd").await.expect_err("gone").kind(),
        ErrorKind::SandboxGone
    );
    assert_eq!(sandbox.alive().await.expect_err("gone").kind(), ErrorKind::SandboxGone);
    sandbox.stop().await.expect("gone is stopped");
}

#[tokio::test]
async fn a_box_whose_time_is_up_is_gone() {
    let provider = provider!();
    let config = E2bConfig {
        timeout: 1,
        ..provider.emulator.config()
    };
    let sandbox = provider.builder(config).provision().await.expect("a box");
    let error = sandbox.run(["sleep", "600"]).await.expect_err("its time is up");
    assert_eq!(error.kind(), ErrorKind::SandboxGone);
    assert!(provider.emulator.boxes().is_empty());
}

#[tokio::test]
async fn a_broken_stream_is_a_lost_connection_once_on_each_pipe_and_the_program_is_killed() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    provider
        .emulator
        .inject(Fault::new("POST /process.Process/Start", 1, Action::Drop(400..401)));
    let script = "echo $$ >pid; while :; do echo 0123456789; sleep 0.01; done";
    let mut process = sandbox.spawn(["sh", "-c", script]).await.expect("started");
    let mut seen = Vec::new();
    let mut stdout = process.stdout.take().expect("not taken");
    let error = stdout.read_to_end(&mut seen).await.expect_err("broken");
    assert_eq!(runtime_core::stream_error("x", error).kind(), ErrorKind::ConnectionLost);
    assert!(!seen.is_empty() && seen.len() < 400);
    assert_eq!(stdout.read_to_end(&mut seen).await.expect("told once"), 0);
    assert_eq!(
        process.wait().await.expect_err("unknown").kind(),
        ErrorKind::ConnectionLost
    );
    gone(&sandbox).await;
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_stream_that_falls_silent_is_a_lost_connection_and_the_program_is_killed() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    provider
        .emulator
        .inject(Fault::new("POST /process.Process/Start", 1, Action::StallFrames(3)));
    let script = "echo $$ >pid; echo up; while :; do echo more; sleep 0.05; done";
    let mut process = sandbox.spawn(["sh", "-c", script]).await.expect("started");
    let mut up = [0; 3];
    let mut stdout = process.stdout.take().expect("not taken");
    stdout.read_exact(&mut up).await.expect("printed");
    silence().await;
    let error = stdout.read_to_end(&mut Vec::new()).await.expect_err("silent");
    assert_eq!(runtime_core::stream_error("x", error).kind(), ErrorKind::ConnectionLost);
    let error = process.wait().await.expect_err("unknown");
    assert_eq!(error.kind(), ErrorKind::ConnectionLost);
    assert!(error.message().contains("silent"), "{error}");
    gone(&sandbox).await;
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_durable_program_whose_stream_falls_silent_is_taken_up_by_another() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    provider
        .emulator
        .inject(Fault::new("POST /process.Process/Start", 1, Action::StallFrames(2)));
    let view = sandbox.view();
    let script = "echo $$ >pid; until [ -e go ]; do sleep 0.05; done; exit 3";
    let running = tokio::spawn(async move { view.run_program(["sh", "-c", script]).await });
    written(&sandbox, "pid").await;
    silence().await;
    while !provider
        .emulator
        .requests()
        .iter()
        .any(|line| line.contains("/Connect"))
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    sandbox.write("go", "").await.expect("written");
    let output = running.await.expect("joined").expect("taken up");
    assert_eq!(output.code(), Some(3));
    sandbox.stop().await.expect("stopped");
}

/// Waits until the program that wrote its id to `pid` is gone: a killed one is there until it is reaped.
async fn gone(sandbox: &runtime_core::Sandbox) {
    let script = "i=0; while [ $i -lt 600 ]; do kill -0 \"$(cat pid)\" 2>/dev/null || exit 0; sleep 0.05; i=$((i + 1)); done; exit 1";
    let gone = sandbox.run(["sh", "-c", script]).await.expect("ran");
    assert!(gone.success(), "it must not run on unwatched");
}

/// The content of a file, once it has one.
async fn written(sandbox: &runtime_core::Sandbox, path: &str) -> String {
    loop {
        match sandbox.read(path).await {
            Ok(content) if !content.is_empty() => return String::from_utf8_lossy(&content).trim().to_owned(),
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Lets more time pass than a stream may be silent for, in steps that are far shorter than that.
async fn silence() {
    tokio::time::pause();
    for _ in 0..14 {
        tokio::time::advance(Duration::from_secs(10)).await;
        // What became due is done in real time.
        tokio::time::resume();
        tokio::time::sleep(Duration::from_millis(20)).await;
        tokio::time::pause();
    }
    tokio::time::resume();
}

#[tokio::test]
async fn the_channel_of_a_durable_program_ends_no_sooner_than_the_program() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    let slow = Action::Delay(Duration::from_millis(300));
    provider
        .emulator
        .inject(Fault::new("/filesystem.Filesystem/Remove", 1, slow));
    let (sink, mut chunks) = tokio::sync::mpsc::channel(4);
    let command = Command::new(["sh", "-c", "echo told; exit 3"]).stream_to(sink);
    let mut running = std::pin::pin!(sandbox.run_program(command));
    let mut told = Vec::new();
    let output = loop {
        tokio::select! {
            biased;
            output = &mut running => break output.expect("ran"),
            chunk = chunks.recv() => told.extend_from_slice(&chunk.expect("the program still runs").bytes),
        }
    };
    assert_eq!((&told[..], output.code()), (&b"told\n"[..], Some(3)));
    assert!(chunks.recv().await.is_none());
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn frames_are_read_however_they_arrive_and_refused_when_they_lie() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    let script = "printf 'a\\377b'; printf err >&2; exit 5";
    for action in [Action::Rechunk(1), Action::Rechunk(3), Action::Reorder] {
        let fault = Fault::new("/process.Process/Start", 1, action.clone());
        provider.emulator.inject(fault.clone());
        let output = sandbox.run(["sh", "-c", script]).await.expect("ran");
        assert_eq!(
            (&output.stdout.bytes[..], &output.stderr.bytes[..], output.code()),
            (&b"a\xffb"[..], &b"err"[..], Some(5)),
            "{action:?}"
        );
        provider.emulator.inject(fault);
        let mut process = sandbox.spawn(["sh", "-c", script]).await.expect("started");
        let mut stdout = Vec::new();
        let mut pipe = process.stdout.take().expect("not taken");
        pipe.read_to_end(&mut stdout).await.expect("read");
        assert_eq!(
            (stdout, process.wait().await.expect("ended").code()),
            (b"a\xffb".to_vec(), Some(5))
        );
    }
    let lie = Fault::new("/process.Process/Start", 1, Action::ClaimCompressed);
    provider.emulator.inject(lie);
    let error = sandbox.run(["true"]).await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Protocol);
    provider
        .emulator
        .inject(Fault::new("/process.Process/Start", 1, Action::DropFrames(2)));
    let error = sandbox
        .run(["sh", "-c", "echo up; sleep 600"])
        .await
        .expect_err("broken off");
    assert_eq!(error.kind(), ErrorKind::ConnectionLost);
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_box_without_setsid_runs_commands_all_the_same() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    sandbox.run(["rm", "/usr/bin/setsid"]).await.expect("removed");
    for _ in 0..2 {
        let command = Command::new(["sh", "-c", "cat; exit 127"]).stdin("in");
        let output = sandbox.run(command).await.expect("ran");
        assert_eq!((output.stdout_lossy().as_ref(), output.code()), ("in", Some(127)));
        let error = sandbox.run(["no-such-program"]).await.expect_err("missing");
        assert_eq!(error.kind(), ErrorKind::ProgramNotFound);
    }
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn an_unreachable_daemon_is_unavailable() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    let body = r#"{"sandboxId":"i1","message":"The sandbox is running but port is not open","port":49983,"code":502}"#;
    provider.emulator.inject(Fault::new(
        "/process.Process/Start",
        u32::MAX,
        Action::answer(502, body),
    ));
    let error = sandbox.run(["true"]).await.expect_err("not there");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    provider.emulator.clear_faults();
    let nothing = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = nothing.local_addr().expect("bound");
    drop(nothing);
    let config = E2bConfig {
        api_url: Some(format!("http://{address}")),
        ..provider.emulator.config()
    };
    let error = provider.builder(config).provision().await.expect_err("nobody listens");
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Unavailable, Retry::Exhausted)
    );
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_full_disk_is_told_and_leaves_the_old_content() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    sandbox.write("f", "old").await.expect("written");
    let full = Action::answer(507, r#"{"code":507,"message":"not enough disk space available"}"#);
    provider.emulator.inject(Fault::new("POST /files", 1, full));
    let error = sandbox.write("f", "new").await.expect_err("full");
    assert_eq!(error.kind(), ErrorKind::ResourceExhausted);
    assert_eq!(&sandbox.read("f").await.expect("read")[..], b"old");
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_policy_that_is_refused_starts_no_program() {
    let provider = provider!();
    let config = E2bConfig {
        allow: vec!["a.com".into()],
        ..provider.emulator.config()
    };
    let sandbox = provider.builder(config).provision().await.expect("a box");
    let refusal = Action::answer(400, r#"{"code":400,"message":"invalid egress"}"#);
    provider.emulator.inject(Fault::new("PUT /sandboxes", 1, refusal));
    let routes = Routes::new(["https://model.example/v1"]).expect("routes");
    let error = sandbox.prepare_execution(routes.clone()).await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::NetworkPolicy);
    assert_eq!(
        sandbox.run(["true"]).await.expect_err("closed").kind(),
        ErrorKind::NetworkPolicy
    );
    sandbox.prepare_execution(routes).await.expect("applied");
    assert_eq!(
        provider.emulator.boxes()[0].network,
        Some(serde_json::json!({"allowOut": ["model.example", "a.com"], "denyOut": ["0.0.0.0/0"]}))
    );
    assert!(sandbox.run(["true"]).await.expect("open for programs").success());
    sandbox.prepare_setup().await.expect("reopened");
    assert_eq!(
        provider.emulator.boxes()[0].network,
        Some(serde_json::json!({"allow_internet_access": true}))
    );
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn every_policy_arrives_as_the_provider_takes_it() {
    let provider = provider!();
    let cases = [
        (
            &["*"][..],
            &["10.0.0.0/8", "1.2.3.4"][..],
            &["https://model.example/v1"][..],
            serde_json::json!({"denyOut": ["10.0.0.0/8", "1.2.3.4"]}),
        ),
        (
            &["a.com", "*.b.com", "1.1.1.0/24"],
            &[],
            &["https://model.example/v1", "http://127.0.0.1:9"],
            serde_json::json!({"allowOut": ["model.example", "a.com", "*.b.com", "1.1.1.0/24"], "denyOut": ["0.0.0.0/0"]}),
        ),
        (
            &[],
            &[],
            &["https://model.example/v1"],
            serde_json::json!({"allowOut": ["model.example"], "denyOut": ["0.0.0.0/0"]}),
        ),
        (
            &["*"],
            &["*"],
            &["http://localhost:9"],
            serde_json::json!({"allow_internet_access": false}),
        ),
    ];
    for (allow, block, routes, wanted) in cases {
        let list = |rules: &[&str]| rules.iter().map(|rule| (*rule).to_owned()).collect();
        let config = E2bConfig {
            allow: list(allow),
            block: list(block),
            ..provider.emulator.config()
        };
        let sandbox = provider.builder(config).provision().await.expect("a box");
        let network = || provider.emulator.boxes()[0].network.clone();
        assert_eq!(network(), None, "it is created open");
        let routes = Routes::new(routes.iter().copied()).expect("routes");
        sandbox.prepare_execution(routes).await.expect("applied");
        assert_eq!(network(), Some(wanted), "{allow:?} {block:?}");
        sandbox.prepare_setup().await.expect("opened");
        assert_eq!(network(), Some(serde_json::json!({"allow_internet_access": true})));
        sandbox.stop().await.expect("stopped");
    }
    let before = provider.emulator.requests().len();
    for (allow, block, field) in [
        ("https://a.com", None, "allow[0]"),
        ("a.com:443", None, "allow[0]"),
        ("*", Some("a.com"), "block[0]"),
        ("a.com", Some("1.2.3.4"), "block"),
    ] {
        let config = E2bConfig {
            allow: vec![allow.into()],
            block: block.into_iter().map(Into::into).collect(),
            ..provider.emulator.config()
        };
        let error = provider.builder(config).provision().await.expect_err("refused");
        assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidConfig, Some(field)));
    }
    assert_eq!(provider.emulator.requests().len(), before, "nothing is sent");
}

#[tokio::test]
async fn what_is_refused_for_now_is_tried_again_and_created_once() {
    let provider = provider!();
    let slow = Action::Answer {
        status: 429,
        body: r#"{"code":429,"message":"rate limit"}"#.into(),
        headers: vec![("Retry-After".into(), "0".into())],
    };
    provider.emulator.inject(Fault::new("POST /v2/sandboxes", 2, slow));
    let full = Action::answer(503, r#"{"code":503,"message":"no capacity"}"#);
    provider.emulator.inject(Fault::new("POST /v2/sandboxes", 1, full));
    let sandbox = provider.sandbox().await;
    assert_eq!(provider.emulator.created(), 1);
    sandbox.stop().await.expect("stopped");
    let never = Action::Answer {
        status: 503,
        body: r#"{"code":503,"message":"no"}"#.into(),
        headers: vec![("Should-Retry".into(), "false".into())],
    };
    provider
        .emulator
        .inject(Fault::new("POST /v2/sandboxes", u32::MAX, never));
    let before = provider
        .emulator
        .requests()
        .iter()
        .filter(|line| *line == "POST /v2/sandboxes")
        .count();
    provider
        .builder(provider.emulator.config())
        .provision()
        .await
        .expect_err("refused for good");
    let after = provider
        .emulator
        .requests()
        .iter()
        .filter(|line| *line == "POST /v2/sandboxes")
        .count();
    assert_eq!(after - before, 1);
}

#[tokio::test]
async fn an_ambiguous_refusal_of_a_create_is_never_repeated() {
    let provider = provider!();
    for (status, body) in [
        (500, r#"{"code":500,"message":"x"}"#),
        (504, "upstream timeout"),
        (502, "<html>"),
    ] {
        provider
            .emulator
            .inject(Fault::new("POST /v2/sandboxes", 1, Action::answer(status, body)));
        let error = provider
            .builder(provider.emulator.config())
            .provision()
            .await
            .expect_err("ambiguous");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{status}");
    }
    assert_eq!(
        provider
            .emulator
            .requests()
            .iter()
            .filter(|line| *line == "POST /v2/sandboxes")
            .count(),
        3
    );
    assert_eq!(provider.emulator.created(), 0);
}

#[tokio::test]
async fn a_control_plane_of_the_first_generation_is_served_too() {
    let provider = provider!();
    provider.emulator.inject(Fault::new(
        "/v2/sandboxes",
        u32::MAX,
        Action::answer(404, "404 page not found"),
    ));
    let sandbox = provider.sandbox().await;
    assert!(
        provider
            .emulator
            .requests()
            .iter()
            .any(|line| line == "POST /sandboxes")
    );
    assert!(sandbox.run(["true"]).await.expect("ran").success());
    sandbox
        .extend_lifetime(Duration::from_secs(80_000))
        .await
        .expect("connect of the first generation");
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_download_that_breaks_off_is_taken_up_where_it_was() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    let content: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    sandbox.write("big", content.clone()).await.expect("written");
    provider
        .emulator
        .inject(Fault::new("GET /files", 6, Action::Drop(100_000..2_000_000)));
    let read = sandbox.read("big").await.expect("read");
    assert!(read[..] == content[..], "a byte is wrong");
    assert!(
        provider
            .emulator
            .requests()
            .iter()
            .filter(|line| line.starts_with("GET /files"))
            .count()
            > 6
    );
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_box_is_paused_and_goes_on_where_it_was() {
    let provider = provider!();
    let sandbox = provider.sandbox().await;
    sandbox
        .write_with("kept", "kept", WriteOptions::mode(0o640))
        .await
        .expect("written");
    sandbox.pause().await.expect("paused");
    assert!(provider.emulator.boxes()[0].paused);
    assert_eq!(
        sandbox.run(["true"]).await.expect_err("asleep").kind(),
        ErrorKind::SandboxGone
    );
    sandbox.resume().await.expect("resumed");
    assert_eq!(&sandbox.read("kept").await.expect("read")[..], b"kept");
    assert_eq!(sandbox.stat("kept").await.expect("facts").mode, Some(0o640));
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_life_is_extended_and_never_shortened() {
    let provider = provider!();
    let config = E2bConfig {
        timeout: 1000,
        ..provider.emulator.config()
    };
    let sandbox = provider.builder(config).provision().await.expect("a box");
    sandbox
        .extend_lifetime(Duration::from_secs(10))
        .await
        .expect("no change");
    assert!(provider.emulator.boxes()[0].seconds_left > 900);
    sandbox
        .extend_lifetime(Duration::from_secs(5000))
        .await
        .expect("extended");
    assert!(provider.emulator.boxes()[0].seconds_left > 4900);
    let error = sandbox
        .extend_lifetime(Duration::from_secs(1_000_000))
        .await
        .expect_err("beyond the plan");
    assert_eq!(error.kind(), ErrorKind::QuotaExceeded);
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn an_exposed_port_is_reached_through_the_edge() {
    let provider = provider!();
    let config = E2bConfig {
        port_url: Some(provider.emulator.port_url()),
        ..provider.emulator.config()
    };
    let sandbox = provider.builder(config).provision().await.expect("a box");
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = free.local_addr().expect("bound").port();
    drop(free);
    sandbox.write("index.html", "served").await.expect("written");
    let server = Command::new(["python3", "-m", "http.server", "--bind", "127.0.0.1", &port.to_string()]);
    sandbox.run_background(server, "server.log").await.expect("started");
    let url = sandbox.expose(port).await.expect("a URL");
    let address = url
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once('/'))
        .expect("http");
    let request = format!(
        "GET /{}/index.html HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        address.1
    );
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    loop {
        let mut stream = tokio::net::TcpStream::connect(address.0)
            .await
            .expect("the emulator listens");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("answered");
        if answer.ends_with("served") {
            break;
        }
        assert!(answer.contains("port is not open"), "{answer}");
        assert!(tokio::time::Instant::now() < deadline, "the server does not come up");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_login_shell_brings_its_path_and_none_of_its_noise() {
    let provider = provider!();
    let config = E2bConfig {
        login_shell: true,
        ..provider.emulator.config()
    };
    let sandbox = provider.builder(config).provision().await.expect("a box");
    let profile = "echo noise; echo noise >&2; export PATH=$PATH:/opt/own; export FROM_PROFILE=yes; set -x\n";
    sandbox.write("/root/.bash_profile", profile).await.expect("written");
    let script = "printf '%s %s' \"$FROM_PROFILE\" \"$PATH\"; printf 'e\\377' >&2; exit 3";
    let output = sandbox.run(["sh", "-c", script]).await.expect("ran");
    let stdout = output.stdout_lossy();
    assert!(stdout.starts_with("yes ") && stdout.ends_with(":/opt/own"), "{stdout}");
    assert_eq!((&output.stderr.bytes[..], output.code()), (&b"e\xff"[..], Some(3)));
    let path = "/usr/bin:/bin:/mine";
    let output = sandbox
        .run(Command::new(["sh", "-c", "printf %s \"$PATH\""]).env("PATH", path))
        .await
        .expect("ran");
    assert_eq!(output.stdout_lossy(), path);
    let output = sandbox
        .run_program(["sh", "-c", "echo $FROM_PROFILE; exit 4"])
        .await
        .expect("ran");
    assert_eq!((output.stdout_lossy().as_ref(), output.code()), ("yes\n", Some(4)));
    let error = sandbox.run(["no-such-program"]).await.expect_err("missing");
    assert_eq!(error.kind(), ErrorKind::ProgramNotFound);
    sandbox.stop().await.expect("stopped");
}
