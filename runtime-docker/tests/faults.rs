//! What goes wrong around a box, on real engines: each fault has its type, and none leaves anything behind.

#[path = "support/boxes.rs"]
mod boxes;
#[path = "support/daemon.rs"]
mod daemon;
#[path = "support/front.rs"]
mod front;
mod support;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

use boxes::{KINDS, cache, everywhere, leases, provision};
use daemon::Daemon;
use front::{Fault, Front};
use runtime_core::cache::CacheDir;
use runtime_core::{Command, ErrorKind, Sandbox};
use runtime_docker::{ContainerConfig, DockerConfig, EngineKind, ExecMode, PullPolicy};
use support::{client, config, containers_of, image, is_there};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Ends a test that would hang.
async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(Duration::from_secs(60), future).await;
    ended.unwrap_or_else(|_| panic!("{what} hangs"))
}

/// An engine of the test's own; Docker alone, as Podman has no process that boxes depend on.
fn own_engine(live_restore: bool) -> Option<Daemon> {
    if !is_there(EngineKind::Docker) {
        return None;
    }
    match Daemon::start(live_restore) {
        Ok(daemon) => Some(daemon),
        Err(reason) => {
            eprintln!("SKIPPED: engine restart: no engine of our own: {reason}");
            assert!(
                std::env::var_os("CI").is_none(),
                "an engine must start under CI: {reason}"
            );
            None
        }
    }
}

fn on(daemon: &Daemon, exec: ExecMode) -> ContainerConfig {
    let mut config = config(EngineKind::Docker, "busybox", exec);
    config.host = Some(daemon.host());
    config.network = Some("none".into());
    config
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_restarted_takes_its_boxes_along_and_their_leases_stay_until_it_is_back() {
    let Some(mut daemon) = own_engine(false) else { return };
    let cache = cache();
    let sandbox = provision(EngineKind::Docker, on(&daemon, ExecMode::Guest), &cache)
        .await
        .expect("a box");
    let mut live = sandbox.spawn(["sleep", "1000"]).await.expect("a process");
    daemon.down();
    let ended = in_time("wait", live.wait()).await.expect_err("its box is gone");
    assert_eq!(ended.kind(), ErrorKind::SandboxGone, "{ended}");
    let run = in_time("run", sandbox.run(["true"]))
        .await
        .expect_err("its box is gone");
    assert_eq!(run.kind(), ErrorKind::SandboxGone, "{run}");
    let stop = in_time("stop", sandbox.stop()).await.expect_err("nobody to ask");
    assert_eq!(stop.kind(), ErrorKind::Unavailable, "{stop}");
    assert_eq!(
        leases(cache.path()).await,
        1,
        "what was not confirmed stays on the books"
    );
    daemon.up().expect("the engine again");
    in_time("stop", sandbox.stop()).await.expect("a stop");
    assert_eq!(leases(cache.path()).await, 0);
    assert_eq!(daemon.client(&["ps", "--all", "--quiet"]).expect("a list"), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_on_an_engine_with_live_restore_works_on_while_the_engine_is_away() {
    let Some(mut daemon) = own_engine(true) else { return };
    let cache = cache();
    let sandbox = provision(EngineKind::Docker, on(&daemon, ExecMode::Guest), &cache)
        .await
        .expect("a box");
    let mut live = sandbox.spawn(["cat"]).await.expect("a process");
    daemon.down();
    let (mut stdin, mut stdout) = (live.stdin.take().expect("stdin"), live.stdout.take().expect("stdout"));
    let echo = async {
        stdin.write_all(b"on").await.expect("a write");
        let mut answer = [0; 2];
        stdout.read_exact(&mut answer).await.expect("an answer");
        answer
    };
    assert_eq!(&in_time("echo", echo).await, b"on");
    let output = in_time("run", sandbox.run(["echo", "still"])).await.expect("a run");
    assert_eq!(output.stdout_lossy(), "still\n");
    sandbox.write("file", "content").await.expect("a write");
    daemon.up().expect("the engine again");
    assert_eq!(&sandbox.read("file").await.expect("a read")[..], b"content");
    in_time("stop", sandbox.stop()).await.expect("a stop");
    assert_eq!(daemon.client(&["ps", "--all", "--quiet"]).expect("a list"), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn process_1_that_is_killed_from_outside_is_the_end_of_the_box_and_is_typed() {
    for (kind, exec) in everywhere() {
        let cache = cache();
        let sandbox = provision(kind, config(kind, "busybox", exec), &cache)
            .await
            .expect("a box");
        let mut live = sandbox.spawn(["sleep", "1000"]).await.expect("a process");
        let running = tokio::spawn({
            let view = sandbox.view();
            async move { view.run(["sleep", "1000"]).await }
        });
        let ids = containers_of(kind, sandbox.name()).expect("a list");
        let pid = client(kind, &["inspect", "--format", "{{.State.Pid}}", &ids[0]]).expect("a pid");
        let killed = std::process::Command::new("kill").args(["-9", &pid]).status();
        assert!(killed.expect("kill").success());
        for (what, error) in [
            ("wait", in_time("wait", live.wait()).await.map(drop)),
            ("run", in_time("run", running).await.expect("a task").map(drop)),
            ("a later run", in_time("run", sandbox.run(["true"])).await.map(drop)),
            ("alive", in_time("alive", sandbox.alive()).await),
        ] {
            let error = error.expect_err(what);
            assert_eq!(error.kind(), ErrorKind::SandboxGone, "{kind} {exec:?} {what}: {error}");
        }
        in_time("stop", sandbox.stop()).await.expect("a stop");
        assert_eq!(
            containers_of(kind, sandbox.name()).expect("a list"),
            Vec::<String>::new()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_whose_memory_is_gone_ends_typed_and_never_hangs() {
    for kind in KINDS.into_iter().filter(|kind| is_there(*kind)) {
        let cache = cache();
        let mut small = config(kind, "busybox", ExecMode::Guest);
        small.memory = Some(0.03);
        small.tmpfs = [("/full".to_owned(), "size=64m".to_owned())].into();
        let sandbox = provision(kind, small, &cache).await.expect("a box");
        // Files of a tmpfs stay when their writer is killed, so that there is no memory for anybody afterwards.
        let fill = Command::shell("cat /dev/zero >/full/file");
        let mut outcomes = Vec::new();
        for _ in 0..20 {
            outcomes.push(match in_time("run", sandbox.run(fill.clone())).await {
                Ok(output) => {
                    assert!(!output.success(), "{kind}: there was no room for it");
                    assert!(
                        output.status.signal() != Some(9) || output.status.oom_killed(),
                        "{kind}"
                    );
                    "killed"
                }
                Err(error) if error.kind() == ErrorKind::SandboxGone => "gone",
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::ResourceExhausted, "{kind}: {error}");
                    "refused"
                }
            });
        }
        assert!(outcomes.iter().any(|outcome| *outcome != "refused"), "{outcomes:?}");
        in_time("stop", sandbox.stop()).await.expect("a stop");
        assert_eq!(
            containers_of(kind, sandbox.name()).expect("a list"),
            Vec::<String>::new()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_in_the_box_is_typed_and_leaves_no_half_of_a_file() {
    for (kind, exec) in everywhere() {
        let cache = cache();
        let mut small = config(kind, "busybox", exec);
        small.tmpfs = [("/small".to_owned(), "size=1m,mode=1777".to_owned())].into();
        let sandbox = provision(kind, small, &cache).await.expect("a box");
        sandbox.write("/small/before", "kept").await.expect("there is room");
        let large = vec![7_u8; 3 << 20];
        let error = in_time("write", sandbox.write("/small/large", large)).await;
        let error = error.expect_err("there is no room");
        assert_eq!(error.kind(), ErrorKind::ResourceExhausted, "{kind} {exec:?}: {error}");
        let names: Vec<_> = sandbox.list("/small").await.expect("a list");
        let names: Vec<_> = names.into_iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["before"], "{kind} {exec:?}");
        sandbox
            .write("/small/after", "fits")
            .await
            .expect("there is room again");
        assert_eq!(&sandbox.read("/small/before").await.expect("a read")[..], b"kept");
        let program = sandbox.run(Command::shell("head -c 3000000 /dev/zero >/small/more"));
        assert!(!in_time("run", program).await.expect("a result").success());
        sandbox.stop().await.expect("a stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_image_is_not_pulled_against_the_policy() {
    for kind in KINDS.into_iter().filter(|kind| is_there(*kind)) {
        let cache = cache();
        let mut missing = config(kind, "busybox", ExecMode::Auto);
        missing.image = Some(image(kind, "no-such-image"));
        missing.pull = PullPolicy::Never;
        let error = provision(kind, missing, &cache).await.expect_err("no image");
        assert_eq!((error.kind(), error.field()), (ErrorKind::NotFound, Some("image")));
        assert!(
            error.message().contains("pull"),
            "it says why nobody looked further: {error}"
        );
        assert_eq!(leases(cache.path()).await, 0);
    }
}

/// The socket of the engine, if it is one.
fn socket_of(kind: EngineKind) -> Option<String> {
    // What our own service of Podman listens on is private.
    (kind == EngineKind::Docker && is_there(kind)).then(|| "/var/run/docker.sock".to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_stalls_meets_the_operations_deadline_and_the_box_is_deleted_once_it_answers() {
    let Some(socket) = socket_of(EngineKind::Docker) else {
        return;
    };
    let (front, cache) = (Front::new(Path::new(&socket), ""), cache());
    for exec in [ExecMode::Guest, ExecMode::Engine] {
        let mut config = config(EngineKind::Docker, "busybox", exec);
        config.host = Some(front.host());
        let sandbox = provision(EngineKind::Docker, config, &cache).await.expect("a box");
        front.set(Fault::Stall);
        let run = sandbox.run(Command::new(["echo", "x"]).timeout(Duration::from_secs(1)));
        match (exec, in_time("run", run).await) {
            // Nothing of it goes through the engine.
            (ExecMode::Guest, result) => assert_eq!(result.expect("a run").stdout_lossy(), "x\n"),
            (_, result) => assert_eq!(result.expect_err("no answer").kind(), ErrorKind::Timeout),
        }
        if exec == ExecMode::Guest {
            let stop = in_time("stop", sandbox.stop()).await.expect_err("no answer");
            assert_eq!(stop.kind(), ErrorKind::Timeout, "{stop}");
            assert_eq!(leases(cache.path()).await, 1);
        }
        front.set(Fault::None);
        in_time("stop", sandbox.stop()).await.expect("a stop");
        assert_eq!(leases(cache.path()).await, 0);
        let left = containers_of(EngineKind::Docker, sandbox.name()).expect("a list");
        assert_eq!(left, Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_whose_creation_was_not_answered_is_found_and_deleted() {
    let Some(socket) = socket_of(EngineKind::Docker) else {
        return;
    };
    let (front, cache) = (Front::new(Path::new(&socket), ""), cache());
    front.set(Fault::LoseCreate);
    for exec in [ExecMode::Guest, ExecMode::Stdio, ExecMode::Engine] {
        let mut config = config(EngineKind::Docker, "busybox", exec);
        config.host = Some(front.host());
        let name = format!("unanswered-{}", runtime_core::names::random_hex(8));
        let made = Sandbox::builder(DockerConfig(config))
            .name(&name)
            .cache(CacheDir::at(cache.path()))
            .provision();
        let error = in_time("provision", made).await.expect_err("no answer");
        assert!(error.is_retryable(), "{error}");
        let left = containers_of(EngineKind::Docker, &name).expect("a list");
        assert_eq!(left, Vec::<String>::new(), "{exec:?}");
        assert_eq!(leases(cache.path()).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_taken_is_typed_and_its_holder_is_left_alone() {
    let Some(socket) = socket_of(EngineKind::Docker) else {
        return;
    };
    let taken = runtime_core::names::random_object_name();
    let image = image(EngineKind::Docker, "busybox");
    let holder = client(EngineKind::Docker, &["create", "--name", &taken, &image, "sh"]).expect("a container");
    let (front, cache) = (Front::new(Path::new(&socket), &taken), cache());
    front.set(Fault::TakenName);
    let mut config = config(EngineKind::Docker, "busybox", ExecMode::Guest);
    config.host = Some(front.host());
    let error = in_time("provision", provision(EngineKind::Docker, config, &cache)).await;
    let error = error.expect_err("the name is taken");
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    let still = client(EngineKind::Docker, &["inspect", "--format", "{{.Id}}", &holder]);
    assert_eq!(still.expect("it is still there"), holder);
    client(EngineKind::Docker, &["rm", &holder]).expect("a removal");
    assert_eq!(leases(cache.path()).await, 0);
}

/// The socket that the child of the next test uses.
const DENIED_SOCKET: &str = "SANDBOX_TEST_DENIED_SOCKET";

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_without_permission_says_what_to_do() {
    if let Ok(socket) = std::env::var(DENIED_SOCKET) {
        let cache = cache();
        let mut config = config(EngineKind::Docker, "busybox", ExecMode::Auto);
        config.host = Some(format!("unix://{socket}"));
        let error = provision(EngineKind::Docker, config, &cache)
            .await
            .expect_err("no permission");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert!(!error.is_retryable(), "asking again changes nothing");
        assert!(error.message().contains("group `docker`"), "{error}");
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: a_socket_without_permission: only root can become somebody else");
        return;
    }
    let dir = cache();
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(dir.path(), all.clone()).expect("open to all");
    let socket = dir.path().join("engine.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).expect("closed to others");
    // The build's directory may not be open to others.
    let program = dir.path().join("program");
    std::fs::copy(std::env::current_exe().expect("this program"), &program).expect("a copy");
    std::fs::set_permissions(&program, all).expect("open to all");
    let child = std::process::Command::new(&program)
        .args(["--exact", "a_socket_without_permission_says_what_to_do", "--nocapture"])
        .current_dir("/tmp")
        .env_clear()
        .env(DENIED_SOCKET, &socket)
        .uid(65534)
        .gid(65534)
        .output()
        .expect("a child");
    let text = String::from_utf8_lossy(&child.stderr);
    assert!(
        child.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&child.stdout)
    );
}
