//! The guest where it belongs: as process 1 of namespaces of its own, and under a memory limit. Needs root.

use std::path::{Path, PathBuf};
use std::process::Command;

use runtime_core::ErrorKind;
use runtime_core::guest::SpawnOptions;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::support::*;

/// Whether namespaces can be made here; says loudly if not.
fn namespaces_work() -> bool {
    let works = rustix::process::geteuid().is_root()
        && Command::new("unshare")
            .args(["--pid", "--net", "--mount-proc", "--fork", "true"])
            .status()
            .is_ok_and(|status| status.success());
    if !works {
        eprintln!("SKIPPED: making namespaces needs root and util-linux's `unshare`");
    }
    works
}

fn in_namespaces(program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--net", "--mount-proc", "--fork", "--kill-child"])
        .arg(program);
    command
}

/// The guest's process id outside: the child of `unshare`.
async fn outer_pid(guest: &Guest) -> i32 {
    let path = format!("/proc/{0}/task/{0}/children", guest.id());
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_inside_can_end_stop_or_inspect_process_1() {
    if !namespaces_work() {
        return;
    }
    for kind in [Kind::Socket, Kind::Stdio] {
        let guest = Guest::start_with(kind, in_namespaces).await;
        assert_eq!(guest.link.guest_pid(), 1);
        for signal in [
            "KILL", "TERM", "INT", "STOP", "SEGV", "USR1", "HUP", "QUIT", "ABRT", "34",
        ] {
            guest.shell(&format!("kill -{signal} 1")).await;
        }
        guest
            .shell("kill -KILL -1 || true; kill -TERM -- -1 || true; exit 0")
            .await;
        guest.link.ping().await.unwrap();
        // Root in the box with the capabilities that the engines leave it.
        let script = "for file in mem fd/3 environ maps root exe; do
                          if cat /proc/1/$file >/dev/null 2>&1 || readlink /proc/1/$file; then echo $file; fi
                      done; ls /proc/1/fd/ | while read fd; do readlink /proc/1/fd/$fd; done; true";
        let kept = "--bounding-set=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,\
                    +net_bind_service,+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap";
        let (status, stdout, _) = guest
            .run(["setpriv", kept, "--inh-caps=-all", "sh", "-c", script])
            .await;
        if status.code() == Some(127) {
            eprintln!("SKIPPED: no `setpriv` here");
            continue;
        }
        assert_eq!(String::from_utf8_lossy(&stdout), "", "nothing of process 1 can be read");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_orphan_of_the_namespace_is_reaped_and_all_die_with_the_guest() {
    if !namespaces_work() {
        return;
    }
    let guest = Guest::start_with(Kind::Socket, in_namespaces).await;
    guest
        .shell("for i in 1 2 3 4 5 6 7 8; do (setsid sh -c 'exec sleep 0.02' >/dev/null 2>&1 &); done")
        .await;
    let pid = outer_pid(&guest).await;
    let children = format!("/proc/{pid}/task/{pid}/children");
    eventually("no zombie is left", || {
        std::fs::read_to_string(&children).unwrap().trim().is_empty()
    })
    .await;
    guest.shell("setsid sh -c 'sleep 100000 &' >/dev/null 2>&1").await;
    let orphan: i32 = std::fs::read_to_string(&children).unwrap().trim().parse().unwrap();
    guest.link.close();
    eventually("the kernel has ended the namespace", || {
        !Path::new(&format!("/proc/{orphan}")).exists()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_can_still_stop_process_1() {
    if !namespaces_work() {
        return;
    }
    let guest = Guest::start_with(Kind::Socket, in_namespaces).await;
    let mut process = guest
        .spawn([
            "sh",
            "-c",
            "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done",
        ])
        .await;
    let mut line = String::new();
    within(BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line))
        .await
        .unwrap();
    let pid = rustix::process::Pid::from_raw(outer_pid(&guest).await).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(within(process.wait()).await.unwrap().code(), Some(5));
    assert_eq!(within(guest.link.ended()).await.kind(), ErrorKind::SandboxGone);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_is_cut_says_so_and_an_interface_that_appears_is_told() {
    if !namespaces_work() {
        return;
    }
    let has_ip = Command::new("ip")
        .arg("-V")
        .output()
        .is_ok_and(|output| output.status.success());
    if !has_ip {
        eprintln!("SKIPPED: no `ip` here");
        return;
    }
    for kind in [Kind::Socket, Kind::Stdio] {
        let guest = Guest::start_with(kind, in_namespaces).await;
        guest.shell("PATH=$PATH:/sbin:/usr/sbin; ip link set lo up").await;
        let network = guest.link.network().await.unwrap();
        assert!(network.is_cut(), "{network:?}");
        assert!(
            network.routes.iter().any(|route| route.kind == 2),
            "the local route of lo is there"
        );
        let mut watch = guest.link.watch_interfaces().await.unwrap();
        // The loopback of the box can be served from here.
        let mut listener = guest.link.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let mut client = guest.link.dial(listener.local_addr()).await.unwrap();
        let (mut server, _) = within(listener.accept()).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut client, b"hello")
            .await
            .unwrap();
        let mut buffer = [0; 5];
        within(tokio::io::AsyncReadExt::read_exact(&mut server, &mut buffer))
            .await
            .unwrap();
        assert_eq!(&buffer, b"hello");
        assert!(
            std::net::TcpStream::connect(listener.local_addr()).is_err(),
            "it is not the host's loopback"
        );

        guest
            .shell("PATH=$PATH:/sbin:/usr/sbin; ip link set lo down; ip link set lo up")
            .await;
        let added = "PATH=$PATH:/sbin:/usr/sbin; ip link add probe0 type veth peer name probe1";
        let raised = "PATH=$PATH:/sbin:/usr/sbin; ip link set probe0 up";
        guest.shell(added).await;
        assert!(
            guest.link.network().await.unwrap().is_cut(),
            "one that is down carries nothing"
        );
        guest.shell(raised).await;
        let appeared = within(watch.next()).await.unwrap();
        assert!(appeared.name.starts_with(b"probe"), "{appeared:?}");
        assert!(!guest.link.network().await.unwrap().is_cut());
        // A watch that is set later hears of what is there.
        let mut second = guest.link.watch_interfaces().await.unwrap();
        assert!(within(second.next()).await.unwrap().name.starts_with(b"probe"));
        loop {
            match within(watch.next()).await {
                Ok(interface) => assert!(interface.name.starts_with(b"probe")),
                Err(error) => break assert_eq!(error.kind(), ErrorKind::Cancelled),
            }
        }
        // A name proves nothing.
        let renamed = "PATH=$PATH:/sbin:/usr/sbin; ip link set lo down; ip link set lo name lo1; ip link set lo1 up
                       ip link set probe0 down; ip link set probe0 name lo; ip link set lo up";
        guest.shell(renamed).await;
        assert!(!guest.link.network().await.unwrap().is_cut());
        guest.shell("PATH=$PATH:/sbin:/usr/sbin; ip link del lo").await;
        assert!(guest.link.network().await.unwrap().is_cut());
    }
}

/// A memory cgroup of 48 MiB, of whichever version is here.
struct MemoryLimit(PathBuf);

impl MemoryLimit {
    fn new() -> Option<Self> {
        let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let of = |controller: &str| {
            groups.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let found = fields.next()?.split(',').any(|name| name == controller);
                found.then(|| fields.next().unwrap_or_default().to_owned())
            })
        };
        let name = format!("guest-test-{}", std::process::id());
        let (place, file) = match (of("memory"), of("")) {
            (Some(path), _) => (format!("/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"),
            (None, Some(path)) => (format!("/sys/fs/cgroup{path}"), "memory.max"),
            _ => return None,
        };
        let limit = Self(Path::new(&place).join(name));
        std::fs::create_dir(&limit.0).ok()?;
        std::fs::write(limit.0.join(file), (48 << 20).to_string()).ok()?;
        Some(limit)
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        for _ in 0..200 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_for_lack_of_memory_is_told_from_any_other() {
    let Some(limit) = MemoryLimit::new() else {
        eprintln!("SKIPPED: no memory cgroup can be made here");
        return;
    };
    let procs = limit.0.join("cgroup.procs");
    let guest = Guest::start_with(Kind::Socket, |program| {
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"echo $$ > "$0" && exec "$@""#])
            .arg(&procs)
            .arg(program);
        command
    })
    .await;
    guest.link.configure(None, false).await.unwrap();
    for _ in 0..2 {
        let (status, ..) = guest.run(["tail", "/dev/zero"]).await;
        assert_eq!((status.signal(), status.oom_killed()), (Some(9), true));
        let (status, ..) = guest.run(["sh", "-c", "kill -KILL $$"]).await;
        assert_eq!((status.signal(), status.oom_killed()), (Some(9), false));
        // A shell that outlives its child says 137.
        let (status, ..) = guest.run(["sh", "-c", "tail /dev/zero; exit $?"]).await;
        assert_eq!((status.code(), status.oom_killed()), (Some(137), true));
        let (status, ..) = guest.run(["sh", "-c", "exit 137"]).await;
        assert_eq!((status.code(), status.oom_killed()), (Some(137), false));
        let mut process = guest
            .link
            .spawn(&exec(["sleep", "1000"]), &SpawnOptions::default())
            .await
            .unwrap();
        assert!(!process.kill().await.unwrap().oom_killed(), "we killed it");
    }
    drop(guest);
    drop(limit);
}
