//! Containers whose owner is gone, panicked, or had only borrowed them.

#[path = "support/boxes.rs"]
mod boxes;
mod support;

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use boxes::boxed;
use runtime_core::cache::CacheDir;
use runtime_core::lease::Outcome;
use runtime_core::names::random_hex;
use runtime_core::scope::RunScope;
use runtime_core::{Builder, ErrorKind, Orphan, Provider, ReapOptions, Registry, Report, Sandbox, reap};
use runtime_docker::{ContainerConfig, DockerProvider, EngineKind, ExecMode, PodmanProvider};
use support::{client, config, containers_of, image, is_there};
use tempfile::TempDir;

fn provider(kind: EngineKind) -> Arc<dyn Provider> {
    match kind {
        EngineKind::Docker => Arc::new(DockerProvider),
        EngineKind::Podman => Arc::new(PodmanProvider),
    }
}

fn engines() -> impl Iterator<Item = EngineKind> {
    [EngineKind::Docker, EngineKind::Podman]
        .into_iter()
        .filter(|kind| is_there(*kind))
}

fn builder(kind: EngineKind, cache: &Path) -> Builder {
    Sandbox::builder(boxed(kind, config(kind, "busybox", ExecMode::Auto))).cache(CacheDir::at(cache))
}

async fn reap_with(kind: EngineKind, cache: &Path) -> Report {
    let mut registry = Registry::new();
    registry.register(provider(kind));
    let options = ReapOptions {
        cache: CacheDir::at(cache),
        ..ReapOptions::default()
    };
    reap(&registry, options).await.expect("a readable directory")
}

/// Takes the lock from this process's leases, as its death would: the journals are others of the same content.
fn as_if_dead(cache: &Path) {
    for entry in std::fs::read_dir(cache.join("leases")).expect("leases") {
        let journal = entry.expect("a journal").path();
        let copy = cache.join("copy");
        std::fs::copy(&journal, &copy).expect("copied");
        std::fs::rename(&copy, &journal).expect("replaced");
    }
}

fn unique(what: &str) -> String {
    format!("{what}-{}", random_hex(8))
}

fn none() -> Vec<String> {
    Vec::new()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orphan_is_deleted_by_id_by_container_or_by_name_and_run_and_only_with_our_labels() {
    for kind in engines() {
        let run = unique("run");
        let orphan = |name: &str, id: Option<&str>, context: &[(&str, &str)]| Orphan {
            name: name.to_owned(),
            id: id.map(str::to_owned),
            run_scope: run.clone(),
            context: context
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        };
        let start = |name: &str, run: &str, container: &str| {
            let (name, run) = (format!("runtime-sandbox.name={name}"), format!("verifiers.run={run}"));
            let image = image(kind, "busybox");
            let arguments = [
                "run", "--detach", "--label", &name, "--label", &run, "--name", container, &image,
            ];
            client(kind, &[&arguments[..], &["sleep", "1000"]].concat()).expect("a container")
        };
        let image = image(kind, "busybox");
        for known in ["id", "container", "name"] {
            let (name, container) = (unique("orphan"), unique("vf"));
            let id = start(&name, &run, &container);
            // Somebody else's, of the same name and run.
            let spared = start(&name, if known == "name" { "another" } else { &run }, &unique("vf"));
            let context = [("container", container.as_str()), ("image", &image)];
            let dead = match known {
                "id" => orphan(&name, Some(&id[..12]), &context),
                "container" => orphan(&name, None, &context),
                _ => orphan(&name, None, &[]),
            };
            provider(kind).delete_orphan(&dead).await.expect("a deletion");
            assert_eq!(
                containers_of(kind, &name).expect("a list"),
                std::slice::from_ref(&spared),
                "{kind} by {known}"
            );
            provider(kind).delete_orphan(&dead).await.expect("gone already is fine");
            assert_eq!(
                containers_of(kind, &name).expect("a list"),
                std::slice::from_ref(&spared),
                "{kind} by {known}"
            );
            client(kind, &["rm", "--force", &spared]).expect("it was still there");
        }
        for (name, run) in [("mine", "another-run"), ("another-name", run.as_str())] {
            let other = start(name, run, &unique("vf"));
            let refused = provider(kind).delete_orphan(&orphan("mine", Some(&other), &[])).await;
            assert_eq!(refused.expect_err("not ours").kind(), ErrorKind::PermissionDenied);
            client(kind, &["rm", "--force", &other]).expect("it was still there");
        }
        // An image that is gone lets no late creation succeed either.
        let nowhere = [("container", "vf-none"), ("image", "sandbox-test/no-such-image:latest")];
        provider(kind)
            .delete_orphan(&orphan("mine", None, &nowhere))
            .await
            .expect("nothing");
    }
}

/// The engine goes on with a creation although nobody waits for its answer any more. Podman's own client is no client
/// but the engine itself.
#[tokio::test(flavor = "multi_thread")]
async fn creations_that_outlive_their_owner_leave_nothing() {
    for kind in engines().filter(|kind| *kind == EngineKind::Docker) {
        let run = unique("run");
        for delay in 0..10 {
            let (name, container) = (unique("late"), unique("vf"));
            let label = format!("runtime-sandbox.name={name}");
            let run_label = format!("verifiers.run={run}");
            let image = image(kind, "busybox");
            let mut creation = Command::new(kind.tag());
            creation.args([
                "create", "--name", &container, "--label", &label, "--label", &run_label, &image,
            ]);
            creation
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null());
            let mut creation = creation.spawn().expect("the engine's client");
            tokio::time::sleep(Duration::from_millis(delay * 15)).await;
            creation.kill().expect("killed");
            creation.wait().expect("gone");
            let orphan = Orphan {
                name: name.clone(),
                id: None,
                run_scope: run.clone(),
                context: [("container".to_owned(), container), ("image".to_owned(), image)].into(),
            };
            provider(kind).delete_orphan(&orphan).await.expect("a deletion");
            assert_eq!(
                containers_of(kind, &name).expect("a list"),
                none(),
                "{kind} after {delay}"
            );
        }
        // None came late.
        let filter = format!("label=verifiers.run={run}");
        assert_eq!(
            client(kind, &["ps", "--all", "--quiet", "--filter", &filter]).expect("a list"),
            ""
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_borrowed_container_outlives_its_borrower() {
    for kind in engines() {
        let cache = TempDir::with_prefix("sandbox-docker-").expect("a directory");
        let owner = builder(kind, &cache.path().join("owner"))
            .name("shared")
            .provision()
            .await
            .expect("a box");
        let container = owner.info()["container"].as_str().expect("a name").to_owned();
        let mut borrowed = ContainerConfig::attach(&container);
        borrowed.exec = ExecMode::Engine;
        let borrower = Sandbox::builder(boxed(kind, borrowed)).cache(CacheDir::at(cache.path().join("borrower")));
        // As much like the owner as can be.
        let borrower = borrower.name("shared").provision().await.expect("a borrowed box");
        as_if_dead(&cache.path().join("borrower"));
        let report = reap_with(kind, &cache.path().join("borrower")).await;
        assert_eq!((report.deleted(), report.remaining().count()), (1, 0), "{report}");
        assert!(owner.run(["true"]).await.expect("it lives").success());
        borrower.stop().await.expect("left");
        owner.stop().await.expect("stopped");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn boxes_of_dead_owners_go_before_the_first_provision_if_asked_for() {
    for kind in engines() {
        let cache = TempDir::with_prefix("sandbox-docker-").expect("a directory");
        let name = unique("orphan");
        owner_that_dies(kind, cache.path(), &name);
        let next = builder(kind, cache.path()).provision().await.expect("a box");
        assert_eq!(containers_of(kind, &name).expect("a list").len(), 1, "nobody asked");
        next.stop().await.expect("stopped");
        let next = builder(kind, cache.path())
            .reap_orphans(true)
            .provision()
            .await
            .expect("a box");
        assert_eq!(containers_of(kind, &name).expect("a list"), none(), "{kind}");
        next.stop().await.expect("stopped");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_cannot_be_reached_keeps_the_lease_for_another_reap() {
    for kind in engines() {
        let cache = TempDir::with_prefix("sandbox-docker-").expect("a directory");
        let name = unique("orphan");
        let socket = cache.path().join("engine.sock");
        let Some(engine) = socket_of(kind) else { continue };
        std::os::unix::fs::symlink(&engine, &socket).expect("linked");
        let mut config = config(kind, "busybox", ExecMode::Auto);
        config.host = Some(format!("unix://{}", socket.display()));
        let orphan = Sandbox::builder(boxed(kind, config))
            .cache(CacheDir::at(cache.path()))
            .name(&name);
        let orphan = orphan.provision().await.expect("a box");
        as_if_dead(cache.path());
        std::fs::remove_file(&socket).expect("unlinked");
        // Nothing is there, then somebody who does not speak, then somebody who hangs up.
        for listener in [None, Some(false), Some(true)] {
            let listening = listener.map(|hangs_up| Impostor::start(&socket, hangs_up));
            let report = tokio::time::timeout(Duration::from_secs(60), reap_briefly(kind, cache.path())).await;
            let report = report.expect("it has a deadline");
            let outcomes: Vec<_> = report.boxes.iter().map(|reaped| reaped.outcome).collect();
            assert_eq!(outcomes, [Outcome::Unreachable], "{kind}: {report}");
            assert!(report.boxes[0].error.is_some());
            drop(listening);
        }
        assert_eq!(containers_of(kind, &name).expect("a list").len(), 1);
        std::os::unix::fs::symlink(&engine, &socket).expect("linked");
        let report = reap_with(kind, cache.path()).await;
        assert_eq!((report.deleted(), report.remaining().count()), (1, 0), "{report}");
        assert_eq!(containers_of(kind, &name).expect("a list"), none());
        orphan.stop().await.expect("gone already is fine");
    }
}

/// The socket on which the engine listens already.
fn socket_of(kind: EngineKind) -> Option<std::path::PathBuf> {
    let socket = Path::new(match kind {
        EngineKind::Docker => "/var/run/docker.sock",
        EngineKind::Podman => "/run/podman/podman.sock",
    });
    socket.exists().then(|| socket.to_owned())
}

async fn reap_briefly(kind: EngineKind, cache: &Path) -> Report {
    let mut registry = Registry::new();
    registry.register(provider(kind));
    let options = ReapOptions {
        cache: CacheDir::at(cache),
        timeout: Duration::from_millis(500),
        ..ReapOptions::default()
    };
    reap(&registry, options).await.expect("a readable directory")
}

/// Listens where an engine did.
struct Impostor(std::path::PathBuf);

impl Impostor {
    fn start(socket: &Path, hangs_up: bool) -> Self {
        let listener = std::os::unix::net::UnixListener::bind(socket).expect("bound");
        std::thread::spawn(move || {
            let mut held = Vec::new();
            for stream in listener.incoming().flatten() {
                if !hangs_up {
                    held.push(stream);
                }
            }
        });
        Self(socket.to_owned())
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).expect("unlinked");
    }
}

const CHILD: &str = "SANDBOX_TEST_CHILD";

/// This program, to run one test alone as a child of it.
fn child(test: &str, cache: &Path, what: &str) -> Output {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, what)
        .env("SANDBOX_CACHE_DIR", cache)
        .output()
        .expect("it runs")
}

const DIES: &str = "an_owner_that_dies_leaves_its_box_to_the_reaper";

fn owner_that_dies(kind: EngineKind, cache: &Path, name: &str) {
    let output = child(DIES, cache, &format!("{kind} {name}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(6), "{said}");
    assert_eq!(containers_of(kind, name).expect("a list").len(), 1, "{said}");
}

#[test]
fn an_owner_that_dies_leaves_its_box_to_the_reaper() {
    let executor = tokio::runtime::Runtime::new().expect("an executor");
    if let Ok(what) = std::env::var(CHILD) {
        let kind = [EngineKind::Docker, EngineKind::Podman].into_iter();
        let (kind, name) = kind
            .filter_map(|kind| Some((kind, what.strip_prefix(&format!("{kind} "))?)))
            .next()
            .expect("an engine");
        let cache = CacheDir::from_env();
        let _sandbox = executor
            .block_on(builder(kind, cache.path()).name(name).provision())
            .expect("a box");
        std::process::abort();
    }
    for kind in engines() {
        let cache = TempDir::with_prefix("sandbox-docker-").expect("a directory");
        let name = unique("orphan");
        owner_that_dies(kind, cache.path(), &name);
        let report = executor.block_on(reap_with(kind, cache.path()));
        assert_eq!((report.deleted(), report.remaining().count()), (1, 0), "{report}");
        assert_eq!(containers_of(kind, &name).expect("a list"), none(), "{kind}");
        for left in ["leases".to_owned(), format!("runtimes/{}", kind.tag())] {
            let left = std::fs::read_dir(cache.path().join(left)).expect("a directory");
            assert_eq!(left.count(), 0, "{kind}");
        }
    }
}

#[test]
fn a_panic_in_main_or_in_a_task_leaves_no_container() {
    if let (Ok(run), Some(cache)) = (std::env::var(CHILD), std::env::var_os("SANDBOX_CACHE_DIR")) {
        return panic_twice(&run, Path::new(&cache));
    }
    if !is_there(EngineKind::Docker) {
        return;
    }
    let cache = TempDir::with_prefix("sandbox-docker-").expect("a directory");
    let run = unique("panic");
    let output = child("a_panic_in_main_or_in_a_task_leaves_no_container", cache.path(), &run);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(101), "{said}");
    assert!(said.contains("in a task") && said.contains("in main"), "{said}");
    let filter = format!("label=verifiers.run={run}");
    let left = client(EngineKind::Docker, &["ps", "--all", "--quiet", "--filter", &filter]);
    assert_eq!(left.expect("a list"), "", "{said}");
    let leases = std::fs::read_dir(cache.path().join("leases")).expect("leases were here");
    assert_eq!(leases.count(), 0);
}

fn panic_twice(run: &str, cache: &Path) {
    let executor = tokio::runtime::Runtime::new().expect("an executor");
    executor.block_on(async {
        let provision = || async {
            let scope = RunScope::new(run).expect("a scope");
            let builder = builder(EngineKind::Docker, cache).run_scope(scope);
            let sandbox = builder.provision().await.expect("a box");
            sandbox
                .run_background(["sleep", "1000"], "log")
                .await
                .expect("a server");
            sandbox
        };
        let (first, _second) = (provision().await, provision().await);
        let task = tokio::spawn(async move {
            let _first = first;
            panic!("in a task");
        });
        assert!(task.await.is_err());
        panic!("in main");
    });
}
