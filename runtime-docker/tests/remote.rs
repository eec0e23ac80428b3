//! An engine at a port, plain and over TLS: a forwarder in front of the engine's socket is the engine elsewhere.
#![cfg_attr(not(feature = "tls"), allow(dead_code, reason = "most of what is here is for TLS"))]

#[path = "support/boxes.rs"]
mod boxes;
#[path = "support/forwarder.rs"]
mod forwarder;
mod support;

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use boxes::{cache, leases};
use forwarder::{Authority, Forwarder};
use runtime_core::cache::CacheDir;
use runtime_core::{Command, ErrorKind, Result, Sandbox};
use runtime_docker::{ContainerConfig, DockerConfig, EngineKind, ExecMode, PodmanConfig};
use serde_json::{Value, json};
use support::{config, containers_of, is_there};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// What a child of these tests does: the environment is what finds the engine, and a process has one.
const SCENE: &str = "SANDBOX_TEST_SCENE";
/// Where it tells what came of it.
const TELLS: &str = "SANDBOX_TEST_TELLS";
/// The cache of its boxes.
const CACHE: &str = "SANDBOX_TEST_CACHE";

fn busybox(host: Option<String>, exec: ExecMode) -> ContainerConfig {
    busybox_of(EngineKind::Docker, host, exec)
}

fn busybox_of(kind: EngineKind, host: Option<String>, exec: ExecMode) -> ContainerConfig {
    let mut config = config(kind, "busybox", exec);
    config.host = host;
    config
}

async fn provision(config: ContainerConfig, cache: &Path) -> Result<Sandbox> {
    Sandbox::builder(DockerConfig(config))
        .cache(CacheDir::at(cache))
        .provision()
        .await
}

/// A box from its beginning to its end.
async fn a_whole_life(config: ContainerConfig, way: &str, engine: &str) {
    let cache = cache();
    let sandbox = provision(config, cache.path()).await.expect("a box");
    live(EngineKind::Docker, sandbox, way, engine).await;
    assert_eq!(leases(cache.path()).await, 0);
}

/// What a box does until its end.
async fn live(kind: EngineKind, sandbox: Sandbox, way: &str, engine: &str) {
    assert_eq!(sandbox.info()["exec_mode"], way);
    assert_eq!(sandbox.info()["engine"], engine);

    let output = sandbox.run(["echo", "hello"]).await.expect("a run");
    assert_eq!((output.success(), &*output.stdout_lossy()), (true, "hello\n"));
    let output = sandbox.run(["cat"].map(String::from)).await.expect("a run");
    assert_eq!((output.success(), &*output.stdout_lossy()), (true, ""));

    let mut live = sandbox.spawn(["cat"]).await.expect("a process");
    let (mut stdin, mut stdout) = (live.stdin.take().expect("stdin"), live.stdout.take().expect("stdout"));
    stdin.write_all(b"ping").await.expect("a write");
    let mut answer = [0; 4];
    stdout.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"ping");
    // The end of input crosses the connection alone: what is said afterwards still comes.
    stdin.write_all(b"last").await.expect("a write");
    stdin.shutdown().await.expect("an end");
    drop(stdin);
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).await.expect("the rest");
    assert_eq!(rest, b"last");
    assert!(live.wait().await.expect("a status").success());

    let content: Vec<u8> = (0..1_u32 << 20)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    sandbox.write("file", content.clone()).await.expect("a write");
    assert!(
        sandbox.read("file").await.expect("a read") == content,
        "1 MiB comes back as it went"
    );

    let serve = Command::shell("while :; do nc -l -p 8000 -e cat; done");
    sandbox.run_background(serve, "log").await.expect("a server");
    let url = sandbox.expose(8000).await.expect("a URL");
    assert_eq!(ping(url.strip_prefix("http://").expect("a URL")).await, *b"ping");

    sandbox.stop().await.expect("a stop");
    assert_eq!(
        containers_of(kind, sandbox.name()).expect("a list"),
        Vec::<String>::new()
    );
}

/// The answer of an echo server, once it listens.
async fn ping(address: &str) -> [u8; 4] {
    let mut answer = [0; 4];
    loop {
        if let Ok(mut stream) = tokio::net::TcpStream::connect(address).await
            && stream.write_all(b"ping").await.is_ok()
            && stream.read_exact(&mut answer).await.is_ok()
        {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The part of the child.
#[tokio::test(flavor = "multi_thread")]
async fn a_child_of_the_other_tests() {
    let Ok(scene) = std::env::var(SCENE) else { return };
    let variable = |name| std::env::var(name).expect(name);
    let cache = std::path::PathBuf::from(variable(CACHE));
    let told = match scene.split_once(' ').expect("a scene and the engine") {
        ("life", engine) => {
            a_whole_life(busybox(None, ExecMode::Auto), "stdio", engine).await;
            a_whole_life(busybox(None, ExecMode::Engine), "engine", engine).await;
            json!("lived")
        }
        ("abandon", _) => {
            let sandbox = provision(busybox(None, ExecMode::Engine), &cache).await.expect("a box");
            json!(sandbox.name())
        }
        ("fail", _) => {
            let error = provision(busybox(None, ExecMode::Auto), &cache)
                .await
                .expect_err("no engine");
            let (kind, field) = (format!("{:?}", error.kind()), error.field().map(str::to_owned));
            let told = json!([kind, field, error.is_retryable()]);
            assert_eq!(leases(&cache).await, 0);
            std::fs::write(variable(TELLS) + ".message", error.to_string()).expect("a file");
            told
        }
        _ => panic!("{scene}"),
    };
    std::fs::write(variable(TELLS), told.to_string()).expect("a file");
    if scene.starts_with("abandon") {
        // Nothing of it is tidied up.
        std::process::abort();
    }
}

struct Told {
    value: Value,
    message: String,
    cache: TempDir,
}

/// Plays a scene in a child with these variables and no other that finds an engine.
async fn child(scene: &str, engine: &str, variables: &[(&str, &Path)]) -> Told {
    let (dir, cache) = (cache(), cache());
    let tells = dir.path().join("tells");
    let child = tokio::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "a_child_of_the_other_tests", "--nocapture"])
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", dir.path())
        .env(SCENE, format!("{scene} {engine}"))
        .env(TELLS, &tells)
        .env(CACHE, cache.path())
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(120), child).await;
    let output = output.expect("a child that ends").expect("a child");
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success() || scene == "abandon", "{scene}: {said}");
    let told = std::fs::read(&tells).unwrap_or_else(|_| panic!("{scene}: {said}"));
    Told {
        value: serde_json::from_slice(&told).expect("JSON"),
        message: std::fs::read_to_string(dir.path().join("tells.message")).unwrap_or_default(),
        cache,
    }
}

/// A child's attempt at a box in vain: kind, field and whether to try again.
async fn failure(engine: &str, variables: &[(&str, &Path)]) -> (Value, String) {
    let told = child("fail", engine, variables).await;
    (told.value, told.message)
}

/// A directory of the Docker client with a context in use.
fn docker_config(host: &str) -> (TempDir, std::path::PathBuf) {
    use sha2::{Digest, Sha256};
    let dir = TempDir::with_prefix("sandbox-context-").expect("a directory");
    let id = runtime_core::names::hex(&Sha256::digest(b"elsewhere"));
    let meta = dir.path().join("contexts/meta").join(&id);
    std::fs::create_dir_all(&meta).expect("a directory");
    let current = json!({"currentContext": "elsewhere"});
    std::fs::write(dir.path().join("config.json"), current.to_string()).expect("a file");
    let named =
        json!({"Name": "elsewhere", "Metadata": {}, "Endpoints": {"docker": {"Host": host, "SkipTLSVerify": false}}});
    std::fs::write(meta.join("meta.json"), named.to_string()).expect("a file");
    let certs = dir.path().join("contexts/tls").join(id).join("docker");
    (dir, certs)
}

#[tokio::test(flavor = "multi_thread")]
async fn boxes_live_at_an_engine_behind_a_port() {
    if !is_there(EngineKind::Docker) {
        return;
    }
    let engine = Forwarder::plain().await;
    for (exec, way) in [
        (ExecMode::Auto, "stdio"),
        (ExecMode::Guest, "stdio"),
        (ExecMode::Stdio, "stdio"),
        (ExecMode::Engine, "engine"),
    ] {
        a_whole_life(busybox(Some(engine.host()), exec), way, &engine.host()).await;
    }
    assert!(engine.accepted() > 0);
}

/// Podman's service at a port of loopback, as of another machine.
async fn podman_at_a_port() -> (String, tokio::process::Child) {
    let address = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
        listener.local_addr().expect("bound")
    };
    let host = format!("tcp://{address}");
    let mut service = tokio::process::Command::new("podman")
        .args(["system", "service", "--time", "0", &host])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("podman");
    while tokio::net::TcpStream::connect(address).await.is_err() {
        assert!(service.try_wait().expect("a child").is_none(), "the service has ended");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    (host, service)
}

#[tokio::test(flavor = "multi_thread")]
async fn podman_behind_a_port_has_boxes_too() {
    if !is_there(EngineKind::Podman) {
        return;
    }
    let (host, mut service) = podman_at_a_port().await;
    for (exec, way) in [(ExecMode::Auto, "stdio"), (ExecMode::Engine, "engine")] {
        let cache = cache();
        let config = PodmanConfig(busybox_of(EngineKind::Podman, Some(host.clone()), exec));
        let builder = Sandbox::builder(config).cache(CacheDir::at(cache.path()));
        live(
            EngineKind::Podman,
            builder.provision().await.expect("a box"),
            way,
            &host,
        )
        .await;
        assert_eq!(leases(cache.path()).await, 0);
    }
    service.kill().await.expect("its end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_is_found_by_variable_and_by_context() {
    if !is_there(EngineKind::Docker) {
        return;
    }
    let engine = Forwarder::plain().await;
    let host = engine.host();
    assert_eq!(
        child("life", &host, &[("DOCKER_HOST", Path::new(&host))]).await.value,
        "lived"
    );
    let (context, _) = docker_config(&host);
    assert_eq!(
        child("life", &host, &[("DOCKER_CONFIG", context.path())]).await.value,
        "lived"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_where_nothing_listens_is_unavailable() {
    let closed: SocketAddr = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
        listener.local_addr().expect("bound")
    };
    for exec in [ExecMode::Auto, ExecMode::Engine] {
        let cache = cache();
        let error = provision(busybox(Some(format!("tcp://{closed}")), exec), cache.path()).await;
        let error = error.expect_err("nothing listens");
        assert_eq!(
            (error.kind(), error.is_retryable()),
            (ErrorKind::Unavailable, true),
            "{error}"
        );
        assert_eq!(leases(cache.path()).await, 0);
    }
    let host = format!("tcp://{closed}");
    let authority = Authority::new();
    let certs = authority.client(&authority);
    let (outcome, message) = failure(&host, &secured(&host, certs.path())).await;
    if cfg!(feature = "tls") {
        assert_eq!(outcome, json!(["Unavailable", null, true]), "{message}");
    } else {
        assert_eq!(outcome, json!(["Unsupported", null, false]), "{message}");
        assert!(message.contains("the feature `tls`"), "{message}");
    }
}

fn secured<'a>(host: &'a str, certs: &'a Path) -> [(&'static str, &'a Path); 3] {
    [
        ("DOCKER_HOST", Path::new(host)),
        ("DOCKER_TLS_VERIFY", Path::new("1")),
        ("DOCKER_CERT_PATH", certs),
    ]
}

#[cfg(feature = "tls")]
mod tls {
    use super::*;
    use runtime_docker::DockerProvider;
    use support::client;

    #[tokio::test(flavor = "multi_thread")]
    async fn boxes_live_at_an_engine_behind_tls_found_by_variables_and_by_context() {
        if !is_there(EngineKind::Docker) {
            return;
        }
        let authority = Authority::new();
        let engine = Forwarder::tls(&authority).await;
        let (host, certs) = (engine.host(), authority.client(&authority));
        let told = child("life", &host, &secured(&host, certs.path())).await;
        assert_eq!(told.value, "lived");
        let named = host.replace("127.0.0.1", "localhost");
        let (context, certs) = docker_config(&named);
        authority.write_client(&authority, &certs);
        let told = child("life", &named, &[("DOCKER_CONFIG", context.path())]).await;
        assert_eq!(told.value, "lived");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_box_that_was_left_behind_tls_is_reaped_by_who_has_no_context() {
        if !is_there(EngineKind::Docker) {
            return;
        }
        let authority = Authority::new();
        let engine = Forwarder::tls(&authority).await;
        let host = engine.host();
        let (context, certs) = docker_config(&host);
        authority.write_client(&authority, &certs);
        let told = child("abandon", &host, &[("DOCKER_CONFIG", context.path())]).await;
        let name = told.value.as_str().expect("a name");
        assert_eq!(containers_of(EngineKind::Docker, name).expect("a list").len(), 1);
        let mut registry = runtime_core::Registry::new();
        registry.register(std::sync::Arc::new(DockerProvider));
        let options = runtime_core::ReapOptions {
            cache: CacheDir::at(told.cache.path()),
            ..Default::default()
        };
        let report = runtime_core::reap(&registry, options).await.expect("a report");
        let left = containers_of(EngineKind::Docker, name).expect("a list");
        for id in &left {
            client(EngineKind::Docker, &["rm", "--force", id]).expect("a removal");
        }
        assert_eq!((report.deleted(), report.remaining().count()), (1, 0), "{report}");
        assert_eq!((left, leases(told.cache.path()).await), (Vec::new(), 0));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_client_that_the_engine_does_not_know_is_unauthorized() {
        let (authority, other) = (Authority::new(), Authority::new());
        let engine = Forwarder::tls(&authority).await;
        let (host, certs) = (engine.host(), other.client(&authority));
        let (outcome, message) = failure(&host, &secured(&host, certs.path())).await;
        assert_eq!(outcome, json!(["Unauthorized", null, false]), "{message}");
        assert!(message.contains("certificate"), "{message}");
        assert!(engine.accepted() > 0);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_engine_that_the_authority_did_not_sign_is_not_trusted_whatever_the_system_trusts() {
        let (authority, other) = (Authority::new(), Authority::new());
        let engine = Forwarder::tls(&other).await;
        let (host, certs) = (engine.host(), other.client(&authority));
        let system = other.client(&other);
        let system = system.path().join("ca.pem");
        let [address, verify, path] = secured(&host, certs.path());
        for variables in [
            vec![address, verify, path],
            vec![address, verify, path, ("SSL_CERT_FILE", &*system)],
        ] {
            let (outcome, message) = failure(&host, &variables).await;
            assert_eq!(outcome, json!(["Unavailable", null, false]), "{message}");
            assert!(message.contains("not trusted"), "{message}");
        }
        assert!(engine.accepted() > 0);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_engine_of_another_name_is_not_trusted() {
        let authority = Authority::new();
        let engine = Forwarder::tls_as(&authority, &["engine.example"]).await;
        let (host, certs) = (engine.host(), authority.client(&authority));
        let (outcome, message) = failure(&host, &secured(&host, certs.path())).await;
        assert_eq!(outcome, json!(["Unavailable", null, false]), "{message}");
        assert!(message.contains("not trusted"), "{message}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_port_that_does_not_speak_tls_is_unavailable() {
        if !is_there(EngineKind::Docker) {
            return;
        }
        let authority = Authority::new();
        let engine = Forwarder::plain().await;
        let (host, certs) = (engine.host(), authority.client(&authority));
        let (outcome, message) = failure(&host, &secured(&host, certs.path())).await;
        assert_eq!(outcome[0], "Unavailable", "{message}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn certificates_that_cannot_be_used_are_named_before_anybody_is_asked() {
        let (authority, other) = (Authority::new(), Authority::new());
        let engine = Forwarder::tls(&authority).await;
        let host = engine.host();
        for file in ["ca.pem", "cert.pem", "key.pem"] {
            for content in [
                None,
                Some(""),
                Some("no PEM"),
                Some("-----BEGIN PRIVATE KEY----- s3cret"),
            ] {
                let (context, context_certs) = docker_config(&host);
                let certs = authority.client(&authority);
                authority.write_client(&authority, &context_certs);
                for dir in [certs.path(), &context_certs] {
                    std::fs::remove_file(dir.join(file)).expect("it was there");
                    if let Some(content) = content {
                        std::fs::write(dir.join(file), content).expect("a file");
                    }
                }
                let by_context = [("DOCKER_CONFIG", context.path())];
                for variables in [&secured(&host, certs.path())[..], &by_context[..]] {
                    let (outcome, message) = failure(&host, variables).await;
                    assert_eq!(
                        outcome,
                        json!(["InvalidConfig", "host", false]),
                        "{file} {content:?}: {message}"
                    );
                    assert!(message.contains(file), "{file} {content:?}: {message}");
                    assert!(!message.contains("s3cret"), "{message}");
                }
            }
        }
        // A key that is another certificate's.
        let (certs, others) = (authority.client(&authority), other.client(&authority));
        std::fs::copy(others.path().join("key.pem"), certs.path().join("key.pem")).expect("copied");
        let (outcome, message) = failure(&host, &secured(&host, certs.path())).await;
        assert_eq!(outcome, json!(["InvalidConfig", "host", false]), "{message}");
        assert_eq!(engine.accepted(), 0);
    }
}
