//! Boxes of namespaces: what they see, their limits, their network, and what they leave.
#![cfg(all(feature = "isolation", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "helpers outside of test functions fail the test too")]

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use runtime_core::cache::CacheDir;
use runtime_core::network::Routes;
use runtime_core::subprocess::{SubprocessConfig, isolation};
use runtime_core::{ErrorKind, Sandbox};
use tempfile::TempDir;

/// Whether there can be boxes; says loudly if not.
fn is_available(test: &str) -> bool {
    match isolation::availability() {
        Ok(()) => true,
        Err(unavailable) => {
            assert!(std::env::var_os("CI").is_none(), "{test}: {unavailable}");
            println!("SKIPPED: {test}: {unavailable}");
            false
        }
    }
}

async fn provision(cache: &TempDir, config: SubprocessConfig) -> Sandbox {
    let builder = Sandbox::builder(config).cache(CacheDir::at(cache.path()));
    builder.provision().await.unwrap()
}

async fn shell(sandbox: &Sandbox, script: &str) -> String {
    let output = sandbox.run(["sh", "-c", script]).await.unwrap();
    format!("{}{}", output.stdout_lossy(), output.stderr_lossy())
        .trim_end()
        .to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_sees_what_is_shown_and_keeps_what_it_may_write() {
    if !is_available("a_box_sees_what_is_shown_and_keeps_what_it_may_write") {
        return;
    }
    let (cache, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(outside.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let at = |name: &str| outside.path().join(name).to_str().unwrap().to_owned();
    for name in ["read", "write", "write/below"] {
        fs::create_dir(at(name)).unwrap();
        fs::set_permissions(at(name), fs::Permissions::from_mode(0o777)).unwrap();
    }
    fs::write(at("file"), "one\n").unwrap();
    fs::write(at("read/x"), "two\n").unwrap();
    let mut config = SubprocessConfig::namespaces();
    config.expose_paths = vec![at("file"), at("read"), at("write/below")];
    config.writable_paths = vec![at("write")];
    let sandbox = provision(&cache, config).await;
    let script = format!(
        "cat {0}/file {0}/read/x; echo three > {0}/write/y; echo no > {0}/write/below/z || echo refused; pwd; hostname",
        outside.path().display()
    );
    let said = shell(&sandbox, &script).await;
    let lines: Vec<&str> = said.lines().filter(|line| !line.starts_with("sh:")).collect();
    let info = sandbox.info();
    let name = info["name"].as_str().unwrap();
    assert_eq!(lines, ["one", "two", "refused", isolation::WORKDIR, name], "{said}");
    assert_eq!(info["isolation"], "namespaces");
    assert_eq!(fs::read_to_string(at("write/y")).unwrap(), "three\n");
    assert_eq!(fs::read_dir(at("write/below")).unwrap().count(), 0);
    // A terminal of its own, and the usual names in /dev.
    assert_eq!(
        shell(
            &sandbox,
            "echo x > /dev/null; echo y > /dev/stderr; head -c 3 /dev/zero | wc -c; ls /dev/pts"
        )
        .await,
        "3\nptmx\ny"
    );
    sandbox.stop().await.unwrap();
    assert_eq!(
        fs::read_dir(cache.path().join("runtimes/subprocess")).unwrap().count(),
        0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_are_held_to_their_limits() {
    if !is_available("programs_are_held_to_their_limits") {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut config = SubprocessConfig::namespaces();
    config.memory = Some(0.2);
    config.cpu_seconds = Some(1);
    config.pids_limit = Some(8);
    config.file_size = Some(0.001);
    let sandbox = provision(&cache, config).await;
    let limits = shell(&sandbox, "ulimit -v; ulimit -t; ulimit -f; ulimit -H -v").await;
    assert_eq!(limits, "195312\n1\n1953\n195312");
    // 1 MB, and SIGXFSZ for more.
    let large = sandbox
        .run(["dd", "if=/dev/zero", "of=large", "bs=1000", "count=1001"])
        .await
        .unwrap();
    assert!(!large.success());
    assert_eq!(sandbox.stat("large").await.unwrap().size, 1_000_000);
    // Files in memory count too.
    let memory = sandbox.run([
        "sh",
        "-c",
        "for n in 1 2 3; do dd if=/dev/zero of=/tmp/$n bs=1000 count=999 || exit 9; done",
    ]);
    assert_eq!(memory.await.unwrap().code(), Some(0));
    // No more processes than allowed, of which the shell is one; the box lives on.
    let many = shell(
        &sandbox,
        "for n in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5 & done; jobs | wc -l",
    )
    .await;
    assert!(many.contains("ork") || many.contains("Resource temporarily"), "{many}");
    // A loop is ended by the kernel.
    let busy = sandbox.run(["sh", "-c", "while :; do :; done"]).await.unwrap();
    assert!(busy.status.signal().is_some(), "{:?}", busy.status);
    assert_eq!(shell(&sandbox, "echo alive").await, "alive");
    sandbox.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_network_is_lo_and_the_proxy_in_every_phase() {
    if !is_available("the_network_is_lo_and_the_proxy_in_every_phase") {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut config = SubprocessConfig::namespaces();
    config.allow = vec!["allowed.example".to_owned()];
    let forbidden = TcpListener::bind("127.0.0.1:0").unwrap();
    forbidden.set_nonblocking(true).unwrap();
    let service = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = |listener: &TcpListener| format!("http://{}/", listener.local_addr().unwrap());
    let (closed, route) = (url(&forbidden), url(&service));
    let answering = std::thread::spawn(move || {
        use std::io::{Read, Write};
        for _ in 0..2 {
            let (mut stream, _) = service.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi";
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let sandbox = provision(&cache, config).await;
    let attempts = format!(
        "cat /proc/net/dev | grep -c : ; cat /proc/net/route | wc -l; echo $HTTP_PROXY | grep -c @127.0.0.1:
         curl -s -m 20 -o /dev/null -w '%{{http_code}}\\n' {closed}
         curl -s -m 20 -o /dev/null -w '%{{http_code}}\\n' --noproxy '' {closed}"
    );
    sandbox.prepare_setup().await.unwrap();
    assert_eq!(shell(&sandbox, &attempts).await, "1\n1\n1\n000\n403");
    // The framework's own service gets a way, on its own port.
    let inside = sandbox.host_url(&route).await.unwrap();
    assert_eq!(inside, route);
    assert_eq!(shell(&sandbox, &format!("curl -s -m 20 {inside}")).await, "hi");
    sandbox.prepare_execution(Routes::new([&route]).unwrap()).await.unwrap();
    assert_eq!(shell(&sandbox, &attempts).await, "1\n1\n1\n000\n403");
    assert_eq!(shell(&sandbox, &format!("curl -s -m 20 {inside}")).await, "hi");
    let refused = "curl -s -m 20 -o /dev/null -w '%{http_code}' http://elsewhere.example/";
    assert_eq!(shell(&sandbox, refused).await, "403");
    // Opened for another setup, and closed again.
    sandbox.prepare_setup().await.unwrap();
    sandbox.prepare_execution(Routes::none()).await.unwrap();
    let gone = format!("curl -s -m 20 -o /dev/null -w '%{{http_code}}' {inside}");
    assert_eq!(shell(&sandbox, &gone).await, "000");
    answering.join().unwrap();
    assert!(
        forbidden.accept().is_err(),
        "something arrived at a service that is no route"
    );
    sandbox.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_is_refused_by_its_field_and_leaves_nothing() {
    if !is_available("what_cannot_be_is_refused_by_its_field_and_leaves_nothing") {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let file = cache.path().join("file");
    fs::write(&file, "").unwrap();
    let with = |change: &dyn Fn(&mut SubprocessConfig)| {
        let mut config = SubprocessConfig::namespaces();
        change(&mut config);
        config
    };
    for (config, field) in [
        (with(&|config| config.root = "/no/such/root".into()), "root"),
        (with(&|config| config.root = file.to_str().unwrap().into()), "root"),
        (
            with(&|config| config.expose_paths = vec!["/no/such/path".into()]),
            "expose_paths[0]",
        ),
        (
            with(&|config| config.writable_paths = vec!["/etc".into(), "/no".into()]),
            "writable_paths[1]",
        ),
    ] {
        let builder = Sandbox::builder(config).cache(CacheDir::at(cache.path()));
        let error = builder.provision().await.err().unwrap();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::InvalidConfig, Some(field)),
            "{error}"
        );
        let boxes = cache.path().join("runtimes/subprocess");
        assert!(!boxes.exists() || fs::read_dir(boxes).unwrap().count() == 0);
    }
}

/// A delegated cgroup holds the box as a whole; without one, what needs it is refused before anything is made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_hold_for_the_box_where_a_cgroup_is_delegated_and_cpu_is_refused_elsewhere() {
    const NAME: &str = "limits_hold_for_the_box_where_a_cgroup_is_delegated_and_cpu_is_refused_elsewhere";
    if !is_available(NAME) {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut config = SubprocessConfig::namespaces();
    (config.memory, config.pids_limit) = (Some(0.25), Some(20));
    let limited = config.clone();
    config.cpu = Some(0.5);
    if let Err(missing) = isolation::cgroups() {
        // That is no fault of most machines, CI's among them: this half is what they have.
        println!("SKIPPED: {NAME}, the cgroup itself: {missing}");
        let builder = Sandbox::builder(config).cache(CacheDir::at(cache.path()));
        let error = builder.provision().await.err().unwrap();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::Unsupported, Some("cpu")),
            "{error}"
        );
        assert!(error.message().contains(&missing.to_string()), "{error}");
        let boxes = cache.path().join("runtimes/subprocess");
        assert!(!boxes.exists() || fs::read_dir(boxes).unwrap().count() == 0);
        let sandbox = provision(&cache, limited).await;
        assert_eq!(sandbox.info()["limits_by"], "rlimits");
        assert_eq!(
            shell(&sandbox, "ulimit -v").await,
            "244140",
            "KiB of address space of each program"
        );
        sandbox.stop().await.unwrap();
        return;
    }
    let sandbox = provision(&cache, config).await;
    assert_eq!(sandbox.info()["limits_by"], "cgroup");
    assert_eq!(shell(&sandbox, "ulimit -v").await, "unlimited");
    // Two programs, neither of which has more than the box may have.
    let fill = "head -c 200000000 /dev/zero | tail & head -c 200000000 /dev/zero | tail; wait";
    let filled = sandbox
        .run(["sh", "-c", &format!("({fill}) >/dev/null; kill -KILL $$")])
        .await
        .unwrap();
    assert!(filled.status.signal().is_some());
    let many = shell(
        &sandbox,
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22; do sleep 5 & done",
    )
    .await;
    assert!(many.contains("ork"), "{many}");
    assert_eq!(shell(&sandbox, "echo alive").await, "alive");
    sandbox.stop().await.unwrap();
}

/// The first test of a machine that refuses: this process has no user namespaces to give.
#[test]
fn a_machine_that_refuses_is_told_from_one_that_does_not() {
    if std::env::var_os("ISOLATION_REFUSED").is_some() {
        let unavailable = isolation::availability().expect_err("there are none");
        println!("unavailable: {unavailable}");
        return;
    }
    if !is_available("a_machine_that_refuses_is_told_from_one_that_does_not") {
        return;
    }
    // In a user namespace in which no further one may be made.
    let own = std::env::current_exe().unwrap();
    let script = "echo 0 > /proc/sys/user/max_user_namespaces && exec \"$0\" --exact --nocapture \
                  a_machine_that_refuses_is_told_from_one_that_does_not";
    let output = Command::new("unshare")
        .args(["--user", "--map-current-user", "--keep-caps", "sh", "-c", script])
        .arg(own)
        .env("ISOLATION_REFUSED", "1")
        .output();
    let Ok(output) = output.inspect_err(|error| println!("SKIPPED: a_machine_that_refuses: unshare: {error}")) else {
        return;
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("unavailable: "), "{said}");
    assert!(said.contains("user.max_user_namespaces=15000"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_is_shared_by_all_and_copied_by_none() {
    if !is_available("a_root_is_shared_by_all_and_copied_by_none") {
        return;
    }
    let Some(busybox) = ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .find(|path| Path::new(path).is_file())
    else {
        println!("SKIPPED: a_root_is_shared_by_all_and_copied_by_none: there is no busybox");
        return;
    };
    let (cache, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(root.path().join("bin")).unwrap();
    fs::copy(busybox, root.path().join("bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", root.path().join("bin/sh")).unwrap();
    fs::write(root.path().join("large"), vec![7; 4 << 20]).unwrap();
    let mut config = SubprocessConfig::namespaces();
    config.root = root.path().to_str().unwrap().to_owned();
    let mut boxes = Vec::new();
    for _ in 0..8 {
        boxes.push(provision(&cache, config.clone()).await);
    }
    for sandbox in &boxes {
        assert_eq!(sandbox.info()["root_by"], "overlay");
        assert_eq!(
            shell(sandbox, "busybox wc -c < /large; echo mine > /own; busybox rm /large").await,
            "4194304"
        );
    }
    let used: u64 = walk(&cache.path().join("runtimes/subprocess"));
    assert!(used < 64 << 10, "{used} bytes for eight boxes");
    assert_eq!(fs::metadata(root.path().join("large")).unwrap().len(), 4 << 20);
    for sandbox in boxes {
        sandbox.stop().await.unwrap();
    }
}

/// Takes a mount off when a test ends, however it does.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_kernel_gives_no_layer_the_root_is_copied() {
    const NAME: &str = "where_the_kernel_gives_no_layer_the_root_is_copied";
    if !is_available(NAME) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let at = |name: &str| place.path().join(name);
    for name in ["lower", "upper", "work", "merged", "root", "root/bin"] {
        fs::create_dir(at(name)).unwrap();
    }
    let busybox = ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .find(|path| Path::new(path).is_file());
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        at("lower").display(),
        at("upper").display(),
        at("work").display()
    );
    // What is on a layer itself cannot be the upper part of another.
    let mounted = Command::new("mount")
        .args(["-t", "overlay", "overlay", "-o", &options])
        .arg(at("merged"))
        .output()
        .is_ok_and(|output| output.status.success());
    let Some(busybox) = busybox.filter(|_| mounted) else {
        println!("SKIPPED: {NAME}: it needs root, who may mount, and busybox");
        return;
    };
    let merged = at("merged");
    let _mounted = Mounted(&merged);
    fs::copy(busybox, at("root/bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", at("root/bin/sh")).unwrap();
    let mut config = SubprocessConfig::namespaces();
    config.root = at("root").to_str().unwrap().to_owned();
    fs::create_dir(at("root/tmp")).unwrap();
    fs::set_permissions(at("root/tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    let sandbox = Sandbox::builder(config)
        .cache(CacheDir::at(&merged))
        .provision()
        .await
        .unwrap();
    assert_eq!(sandbox.info()["root_by"], "copy");
    let script = "echo mine > /own; busybox cat /own; busybox mv /own /tmp/own; pwd";
    assert_eq!(shell(&sandbox, script).await, "mine\n/sandbox");
    sandbox.stop().await.unwrap();
    assert!(at("root/bin/sh").exists() && !at("root/own").exists());
    assert_eq!(fs::read_dir(merged.join("runtimes/subprocess")).unwrap().count(), 0);
}

/// Bytes of all files below a directory.
fn walk(dir: &Path) -> u64 {
    let mut sum = 0;
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let info = entry.metadata().unwrap();
        sum += if info.is_dir() { walk(&entry.path()) } else { info.len() };
    }
    sum
}
