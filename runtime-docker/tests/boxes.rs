//! Boxes on real engines, in every way: what the conformance suite does not ask.

#[path = "support/boxes.rs"]
mod boxes;
mod support;

use std::time::Duration;

use boxes::{KINDS, cache, everywhere, provision};
use runtime_core::cache::CacheDir;
use runtime_core::{Command, ErrorKind, Sandbox};
use runtime_docker::{ContainerConfig, DockerConfig, EngineKind, ExecMode};
use support::{client, config, containers_of, image, is_there};

async fn text(sandbox: &Sandbox, script: &str) -> String {
    let output = sandbox.run(Command::shell(script)).await.expect(script);
    assert!(output.success(), "{script}: {}", output.stderr_lossy());
    output.stdout_lossy().trim_end().to_owned()
}

async fn gone(kind: EngineKind, name: &str) {
    assert_eq!(
        containers_of(kind, name).expect("a list"),
        Vec::<String>::new(),
        "{name} is left"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_way_to_a_box_is_told_and_the_likeliest_is_found() {
    for kind in KINDS.into_iter().filter(|kind| is_there(*kind)) {
        let cache = cache();
        for (exec, told) in [
            (ExecMode::Auto, "socket"),
            (ExecMode::Stdio, "stdio"),
            (ExecMode::Engine, "engine"),
        ] {
            let sandbox = provision(kind, config(kind, "busybox", exec), &cache)
                .await
                .expect("a box");
            assert_eq!(sandbox.info()["exec_mode"], told, "{kind} {exec:?}");
            assert_eq!(sandbox.info()["borrowed"], false);
            let name = sandbox.name().to_owned();
            sandbox.stop().await.expect("a stop");
            gone(kind, &name).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_images_user_environment_and_entrypoint_are_as_an_exec_of_the_engine_gives_them() {
    for (kind, exec) in everywhere() {
        let cache = cache();
        let mut wanted = config(kind, "entrypoint", exec);
        wanted.workdir = Some("/made/for/us".into());
        let sandbox = provision(kind, wanted, &cache).await.expect("a box");
        let seen = text(
            &sandbox,
            "id -u; id -g; echo $HOME; echo $FROM_IMAGE; pwd; stat -c '%u %g %a' .; echo x >file",
        )
        .await;
        assert_eq!(
            seen, "1000\n1000\n/home/agent\nyes\n/made/for/us\n1000 1000 755",
            "{kind} {exec:?}"
        );
        // Files that are written belong to the user as well, who can change them.
        sandbox.write("ours/written", "a").await.expect("a write");
        assert_eq!(
            text(
                &sandbox,
                "stat -c %u ours ours/written; echo b >>ours/written; cat ours/written"
            )
            .await,
            "1000\n1000\nab"
        );
        sandbox.stop().await.expect("a stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workdir_of_the_image_stays_as_it_is() {
    for (kind, exec) in everywhere() {
        let cache = cache();
        let plain = client(
            kind,
            &[
                "run",
                "--rm",
                "--entrypoint",
                "sh",
                &image(kind, "workdir"),
                "-c",
                "pwd; ls -lAn",
            ],
        );
        let plain = plain.expect("the engine's own view");
        let workdir = plain.lines().next().expect("a directory").to_owned();
        let mut wanted = config(kind, "workdir", exec);
        wanted.workdir = Some(workdir);
        let sandbox = provision(kind, wanted, &cache).await.expect("a box");
        assert_eq!(text(&sandbox, "pwd; ls -lAn").await, plain, "{kind} {exec:?}");
        sandbox.stop().await.expect("a stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_without_anything_works_through_the_guest_and_is_refused_without() {
    for (kind, exec) in everywhere() {
        let cache = cache();
        let made = provision(kind, config(kind, "scratch", exec), &cache).await;
        if exec == ExecMode::Engine {
            let error = made.expect_err("there is no `sleep`");
            assert_eq!(
                (error.kind(), error.field()),
                (ErrorKind::Unsupported, Some("exec")),
                "{error}"
            );
            continue;
        }
        let sandbox = made.expect("a box");
        sandbox.write("file", "content").await.expect("a write");
        let output = sandbox.run(["/busybox", "cat", "file"]).await.expect("a run");
        assert_eq!(output.stdout_lossy(), "content");
        sandbox.stop().await.expect("a stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_engine_cannot_give_is_typed_and_leaves_nothing() {
    for kind in KINDS.into_iter().filter(|kind| is_there(*kind)) {
        let cache = cache();
        let refused = |config: ContainerConfig| {
            let cache = &cache;
            async move {
                let error = provision(kind, config, cache).await.expect_err("a refusal");
                (error.kind(), error.field().map(str::to_owned))
            }
        };
        let busybox = || config(kind, "busybox", ExecMode::Auto);
        let mut missing = busybox();
        missing.image = Some(image(kind, "no-such-image"));
        assert_eq!(refused(missing).await, (ErrorKind::NotFound, Some("image".into())));
        let mut user = busybox();
        user.user = Some("nobody-of-this-name".into());
        assert_eq!(refused(user).await, (ErrorKind::InvalidConfig, Some("user".into())));
        let mut socket = busybox();
        socket.host = Some("unix:///no/such/socket".into());
        assert_eq!(refused(socket).await.0, ErrorKind::Unavailable);
        let mut nowhere = busybox();
        nowhere.network = Some("no-such-network".into());
        let (kind_of_error, _) = refused(nowhere).await;
        assert!(
            matches!(kind_of_error, ErrorKind::NotFound | ErrorKind::InvalidConfig),
            "{kind_of_error:?}"
        );
        let left: Vec<_> = std::fs::read_dir(cache.path().join("runtimes").join(kind.tag()))
            .into_iter()
            .flatten()
            .flatten()
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_never_answers_meets_the_boots_deadline() {
    let dir = cache();
    let path = dir.path().join("stalled.sock");
    // Connections are taken by the kernel, and nobody reads them.
    let _listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
    let mut stalled = ContainerConfig::new("x");
    stalled.host = Some(format!("unix://{}", path.display()));
    let made = Sandbox::builder(DockerConfig(stalled))
        .cache(CacheDir::at(dir.path()))
        .boot_timeout(Duration::from_millis(300))
        .provision()
        .await;
    assert_eq!(made.expect_err("no answer").kind(), ErrorKind::Timeout);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_is_removed_behind_our_back_is_gone_and_not_a_result() {
    for (kind, exec) in everywhere() {
        let cache = cache();
        let sandbox = provision(kind, config(kind, "busybox", exec), &cache)
            .await
            .expect("a box");
        let mut live = sandbox.spawn(["sleep", "1000"]).await.expect("a process");
        for id in containers_of(kind, sandbox.name()).expect("a list") {
            client(kind, &["rm", "--force", "--volumes", &id]).expect("a removal");
        }
        let ended = live.wait().await.expect_err("its box is gone");
        assert_eq!(ended.kind(), ErrorKind::SandboxGone, "{kind} {exec:?}: {ended}");
        let run = sandbox.run(["true"]).await.expect_err("its box is gone");
        assert_eq!(run.kind(), ErrorKind::SandboxGone, "{kind} {exec:?}: {run}");
        sandbox.alive().await.expect_err("its box is gone");
        sandbox.stop().await.expect("gone already is fine");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_of_the_box_are_reached_at_an_exposed_port() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    for (kind, exec) in everywhere() {
        let cache = cache();
        let sandbox = provision(kind, config(kind, "busybox", exec), &cache)
            .await
            .expect("a box");
        let serve = "while :; do nc -l -p 8000 -e cat; done";
        sandbox
            .run_background(Command::shell(serve), "log")
            .await
            .expect("a server");
        let url = sandbox.expose(8000).await.expect("a URL");
        assert_eq!(url, sandbox.expose(8000).await.expect("the same"), "{kind} {exec:?}");
        let address = url.strip_prefix("http://").expect("a URL").to_owned();
        let mut answer = [0; 4];
        loop {
            // Until the server listens.
            let Ok(mut stream) = tokio::net::TcpStream::connect(&address).await else {
                continue;
            };
            if stream.write_all(b"ping").await.is_ok() && stream.read_exact(&mut answer).await.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(&answer, b"ping");
        match (exec, sandbox.expose(8001).await) {
            (ExecMode::Engine, Err(error)) => assert_eq!(error.kind(), ErrorKind::Unsupported),
            (ExecMode::Engine, Ok(url)) => panic!("engine mode exposed 8001 as {url}"),
            (_, exposed) => drop(exposed.expect("any port")),
        }
        sandbox.stop().await.expect("a stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_meets_its_limit_and_the_box_lives_on() {
    for (kind, exec) in everywhere() {
        let cache = cache();
        let mut small = config(kind, "busybox", exec);
        small.pids_limit = Some(50);
        let sandbox = provision(kind, small, &cache).await.expect("a box");
        let bomb = "i=0; while [ $i -lt 200 ]; do sleep 1000 & i=$((i+1)); done; wait";
        let ended = sandbox.run(Command::shell(bomb).timeout(Duration::from_secs(5))).await;
        assert!(
            ended.map_or_else(|error| error.kind() == ErrorKind::Timeout, |output| !output.success()),
            "{kind} {exec:?}"
        );
        // Its group was killed, so there is room again, as soon as the last of it is reaped.
        let until = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            match sandbox.run(["echo", "fine"]).await {
                Ok(output) if output.success() => break assert_eq!(output.stdout_lossy(), "fine\n"),
                other => assert!(tokio::time::Instant::now() < until, "{kind} {exec:?}: {other:?}"),
            }
        }
        sandbox.stop().await.expect("a stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_takes_all_memory_is_told_from_one_that_was_killed() {
    for kind in KINDS.into_iter().filter(|kind| is_there(*kind)) {
        let cache = cache();
        let mut small = config(kind, "busybox", ExecMode::Guest);
        small.memory = Some(0.03);
        let sandbox = provision(kind, small, &cache).await.expect("a box");
        let eats = sandbox
            .run(Command::shell("exec tail /dev/zero"))
            .await
            .expect("a result");
        assert_eq!(
            (eats.status.signal(), eats.status.oom_killed()),
            (Some(9), true),
            "{kind}"
        );
        let killed = sandbox.run(Command::shell("kill -9 $$")).await.expect("a result");
        assert_eq!(
            (killed.status.signal(), killed.status.oom_killed()),
            (Some(9), false),
            "{kind}"
        );
        sandbox.stop().await.expect("a stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn somebody_elses_container_is_borrowed_and_stays() {
    for kind in KINDS.into_iter().filter(|kind| is_there(*kind)) {
        for exec in [ExecMode::Auto, ExecMode::Engine] {
            let cache = cache();
            let name = format!("borrowed-{}", runtime_core::names::random_hex(8));
            let id = client(
                kind,
                &[
                    "run",
                    "--detach",
                    "--rm",
                    "--name",
                    &name,
                    &image(kind, "busybox"),
                    "sleep",
                    "1000",
                ],
            );
            let id = id.expect("a container");
            let mut borrowed = ContainerConfig::attach(&name);
            borrowed.exec = exec;
            let sandbox = provision(kind, borrowed, &cache).await.expect("a box");
            assert_eq!(sandbox.info()["borrowed"], true);
            assert_eq!(sandbox.id().as_deref(), id.get(..12));
            assert_eq!(
                sandbox.info()["exec_mode"],
                if exec == ExecMode::Auto { "stdio" } else { "engine" },
                "{kind}"
            );
            sandbox.write("file", "ours").await.expect("a write");
            assert_eq!(text(&sandbox, "cat file; exit 0").await, "ours");
            sandbox.stop().await.expect("a stop");
            let inside = client(kind, &["exec", &id, "sh", "-c", "cat /app/file; ls -d /.sandbox; true"]);
            assert_eq!(
                inside.expect("it runs on"),
                "ours",
                "{kind} {exec:?}: nothing of ours stays"
            );
            client(kind, &["rm", "--force", &id]).expect("a removal");
        }
    }
}
