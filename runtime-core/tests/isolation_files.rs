//! Ways out of a box of namespaces by files, processes and the kernel, each tried, with the host looked at afterwards:
//! what counts is what was read and what was changed, not what a program in the box was told.
//!
//! As root and as an ordinary user, with the host's files and with a root file system of the box's own.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod subprocess_target;

use std::process::ExitCode;

use subprocess_target::{as_user, isolation};

fn main() -> ExitCode {
    #[cfg(target_os = "linux")]
    if let Some(kind) = std::env::args()
        .nth(1)
        .and_then(|argument| argument.strip_prefix("probe=").map(str::to_owned))
    {
        return probe::run(&kind);
    }
    if std::env::args().any(|argument| argument == "--list") {
        println!("nothing_of_the_host_is_read_or_changed: test");
        return ExitCode::SUCCESS;
    }
    isolation::run("isolation_files", || {
        #[cfg(target_os = "linux")]
        attempts::run();
        println!("test nothing_of_the_host_is_read_or_changed ... ok");
        if rustix::process::geteuid().is_root() {
            return as_user::run(|| ExitCode::SUCCESS);
        }
        println!("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        ExitCode::SUCCESS
    })
}

#[cfg(target_os = "linux")]
mod attempts {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::path::{Path, PathBuf};
    use std::process::{Child, Command, Stdio};

    use runtime_core::cache::CacheDir;
    use runtime_core::subprocess::SubprocessConfig;
    use runtime_core::{ErrorKind, Sandbox};
    use tempfile::TempDir;

    use crate::subprocess_target::busybox_root;

    /// What nobody in a box may ever print. In two parts, so that an attempt does not contain it.
    const SECRET: [&str; 2] = ["the-host-", "knows-this"];

    /// What can be tried with a shell, whatever the root is. `$W` is the host's directory with `ro` (shown), `rw`
    /// (writable) and `secret` (not shown), `$V` the process id of a program of the host, `$P` this host's own.
    const EVERYWHERE: &[(&str, &str)] = &[
        ("dot-dot beside a shown path", "cat $W/ro/../secret/key"),
        ("dot-dot above the root", "cat /../../../../../..$W/secret/key"),
        ("dot-dot out of the workdir", "cat ../../../../../..$W/secret/key"),
        ("a link in the workdir", "ln -s $W/secret/key l1; cat l1"),
        (
            "a link in a writable path",
            "ln -sf $W/secret/key $W/rw/l2; cat $W/rw/l2; rm $W/rw/l2",
        ),
        (
            "a link through the root of a process",
            "ln -s /proc/self/root$W/secret/key l3; cat l3",
        ),
        (
            "the root of process 1",
            "cat /proc/1/root$W/secret/key; ls /proc/1/root/ && echo OPEN",
        ),
        (
            "the working directory of process 1",
            "ls /proc/1/cwd/ && echo OPEN; cat /proc/1/cwd$W/secret/key",
        ),
        (
            "the program of process 1",
            "cat /proc/1/exe >/dev/null && echo OPEN; echo x > /proc/1/exe && echo OPEN",
        ),
        ("the environment of process 1", "cat /proc/1/environ && echo OPEN"),
        (
            "the memory of process 1",
            "cat /proc/1/maps && echo OPEN; dd if=/proc/1/mem bs=1 count=1 && echo OPEN",
        ),
        (
            "descriptors of process 1",
            "ls /proc/1/fd/ && echo OPEN; cat /proc/1/fd/* && echo OPEN",
        ),
        (
            "descriptors of every process",
            "for fd in /proc/[0-9]*/fd/*; do case $(readlink $fd) in /proc/*|/dev/*|pipe:*|socket:*|'') ;; \
             *) echo OPEN $fd $(readlink $fd);; esac; done",
        ),
        (
            "inherited descriptors",
            "for fd in 3 4 5 6 7 8 9; do ls -l /proc/$$/fd/$fd && echo OPEN; done",
        ),
        (
            "every process's root",
            "for root in /proc/[0-9]*/root; do cat $root$W/secret/key; done",
        ),
        (
            "processes of the host",
            "test -e /proc/$P && grep -l marker-of-the-suite /proc/[0-9]*/cmdline && echo OPEN",
        ),
        (
            "a signal to a process of the host",
            "kill -9 $V; kill -9 $P; kill -9 -$V",
        ),
        ("a signal to everybody", "kill -9 -1"),
        ("a signal to process 1", "kill -9 1; kill -15 1; kill -11 1; kill -19 1"),
        (
            "namespaces of process 1",
            "for n in mnt pid net user ipc uts; do readlink /proc/1/ns/$n && echo OPEN; done",
        ),
        (
            "entering namespaces",
            "nsenter -t 1 -m true && echo OPEN; nsenter -t $P -m cat $W/secret/key",
        ),
        (
            "a new user namespace",
            "unshare -U true && echo OPEN; unshare -Ur true && echo OPEN",
        ),
        (
            "a user namespace, then mounts",
            "unshare -Urm sh -c 'mount -o remount,rw,bind $W/ro; echo x > $W/ro/file'",
        ),
        (
            "a new mount namespace",
            "unshare -m true && echo OPEN; unshare -n true && echo OPEN; unshare -p true && echo OPEN",
        ),
        (
            "mapping more ids",
            "echo '0 0 4294967295' > /proc/self/uid_map && echo OPEN; echo allow > /proc/self/setgroups && echo OPEN",
        ),
        (
            "remounting read-write",
            "mount -o remount,rw $W/ro; mount -o remount,rw,bind $W/ro; echo x > $W/ro/file",
        ),
        (
            "taking mounts off",
            "umount $W/ro; umount -l $W/ro; umount -l /proc/sys; umount -l /dev; ls $W/secret && echo OPEN",
        ),
        (
            "binding over",
            "mount --bind $W/rw $W/ro && echo OPEN; mount -t tmpfs t /tmp && echo OPEN",
        ),
        ("a fresh proc", "mkdir -p p; mount -t proc proc p && echo OPEN"),
        (
            "changing the root",
            "mkdir -p c; chroot c && echo OPEN; chroot /proc/1/root cat $W/secret/key; pivot_root . c && echo OPEN",
        ),
        (
            "writing a shown file",
            "echo x > $W/ro/file; echo x >> $W/ro/file; cp /dev/null $W/ro/file",
        ),
        (
            "removing and renaming shown files",
            "rm -f $W/ro/file; rm -rf $W/ro; mv $W/ro/file $W/ro/file2; mv $W/ro $W/r; mkdir $W/ro/d",
        ),
        (
            "modes, owners and times of shown files",
            "chmod 777 $W/ro/file $W/ro; chown $(id -u) $W/ro/file; touch $W/ro/file",
        ),
        (
            "a hard link to a shown file",
            "ln $W/ro/file $W/rw/h && echo OPEN; ln $W/ro/file h && echo OPEN; rm -f $W/rw/h",
        ),
        (
            "a link of the host to what is not shown",
            "cat $W/ro/to-secret; cat $W/ro/dir-to-secret/key",
        ),
        (
            "device nodes of the host",
            "for d in mem kmem port kmsg vda sda nvme0n1 loop0 loop-control fuse kvm mapper net uinput; do \
             test -e /dev/$d && echo OPEN $d; done; dmesg && echo OPEN",
        ),
        (
            "new device nodes",
            "for p in . /tmp /dev /dev/shm $W/rw; do mknod $p/n1 b 254 0 && echo OPEN; mknod $p/n2 c 1 1 && echo OPEN; done",
        ),
        (
            "set-user-ID programs",
            "cp $(command -v busybox) $W/rw/s; chmod 6755 $W/rw/s; $W/rw/s id; rm -f $W/rw/s; su -c true root </dev/null && echo OPEN; \
             for p in /usr/bin/passwd /usr/bin/newuidmap /usr/bin/sudo /bin/mount; do test -u $p && $p --help; done >/dev/null 2>&1; \
             grep -E '^NoNewPrivs:.1$' /proc/self/status >/dev/null || echo OPEN",
        ),
        (
            "capabilities",
            "grep -E '^Cap(Inh|Prm|Eff|Bnd|Amb):' /proc/self/status | grep -v 0000000000000000 && echo OPEN",
        ),
        (
            "other users",
            "for u in 0 1 65534; do test $u = $(id -u) || setpriv --reuid $u true && test $u != $(id -u) && echo OPEN; done",
        ),
        (
            "switches of the kernel",
            "for s in kernel/core_pattern kernel/hostname kernel/modprobe kernel/panic vm/overcommit_memory vm/drop_caches fs/file-max \
             user/max_user_namespaces net/ipv4/ip_forward; do (echo 1 > /proc/sys/$s) && echo OPEN $s; done",
        ),
        ("sysrq", "echo h > /proc/sysrq-trigger && echo OPEN"),
        (
            "other handles in proc",
            "cat /proc/kcore && echo OPEN; cat /proc/keys && echo OPEN; ls /proc/scsi/x",
        ),
        (
            "scores of process 1",
            "echo 1000 > /proc/1/oom_score_adj && echo OPEN; echo -1000 > /proc/self/oom_score_adj && echo OPEN",
        ),
        (
            "sysfs",
            "for f in /sys/kernel/uevent_helper /sys/power/state /sys/fs/cgroup/cgroup.procs /sys/kernel/mm/ksm/run; do \
             (echo 1 > $f) && echo OPEN $f; done; ls /sys/class/net | grep -v '^lo$' && echo OPEN",
        ),
        (
            "shared memory",
            "ls -A /dev/shm | grep . && echo OPEN; echo x > /dev/shm/from-$N",
        ),
        (
            "temporary directories",
            "test -e $W/secret && echo OPEN; test -e $CACHE && echo OPEN; echo x > /tmp/from-$N",
        ),
        ("the host's name", "hostname taken && echo OPEN"),
        (
            "a server's socket",
            "for s in $W/ro/server; do test -S $s && echo OPEN; done",
        ),
        (
            "loading modules",
            "insmod /lib/modules/x.ko && echo OPEN; modprobe loop && echo OPEN; reboot -f && echo OPEN",
        ),
        (
            "raw sockets",
            "ping -c 1 -w 1 127.0.0.1 >/dev/null && : ; arping -c 1 -I lo 127.0.0.1 && echo OPEN; ifconfig lo down && echo OPEN; ip link add d type dummy && echo OPEN",
        ),
        (
            "swapping the root's names",
            "for p in /proc /sys /dev /sandbox; do mv $p $p.old && echo OPEN; rmdir $p && echo OPEN; done",
        ),
    ];

    /// With the host's files.
    const HOST: &[(&str, &str)] = &[
        (
            "home directories",
            "ls -A $HOME_OF_HOST | grep -v ^$N && echo OPEN; ls -A /root /home/* 2>/dev/null | grep -v : | grep . && echo OPEN",
        ),
        (
            "runtime directories",
            "find /run /var/run/ -type s | grep . && echo OPEN; ls /run/docker.sock /var/run/docker.sock && echo OPEN",
        ),
        (
            "what only root may read",
            "cat /etc/shadow /etc/gshadow /etc/ssh/ssh_host_*_key && echo OPEN; grep '^root:' /etc/shadow && echo OPEN",
        ),
        (
            "state of engines",
            "ls -A /var/lib/docker /var/lib/containers /var/tmp | grep -v ':$' | grep . && echo OPEN",
        ),
        (
            "files of the system",
            "echo x >> /etc/passwd && echo OPEN; touch /usr/bin/x && echo OPEN; rm -f /etc/hostname && echo OPEN; echo x > /boot/x && echo OPEN",
        ),
        ("the cache with other boxes", "ls -A $CACHE | grep . && echo OPEN"),
    ];

    /// With a root of the box's own: it may be changed, and the tree that all share stays as it is.
    const DIRECTORY: &[(&str, &str)] = &[
        (
            "replacing shared files",
            "echo 'x:x' > /etc/passwd; rm -f /etc/group; mv /bin/ls /bin/sl; echo x > /bin/new; chmod 777 /etc",
        ),
        (
            "replacing shared directories",
            "rm -rf /var; mkdir /var; mv /usr /usr2; ln -s / /usr; mkdir /added; echo x > /added/x",
        ),
        (
            "the layers below",
            "ls /upper /overlay /work $CACHE && echo OPEN; grep -o 'lowerdir=[^,]*' /proc/self/mountinfo | grep tmp && echo OPEN",
        ),
        (
            "whiteouts",
            "for p in /etc /bin; do mknod $p/w c 0 0; done; setfattr -n trusted.overlay.opaque -v y /etc && echo OPEN",
        ),
        (
            "the host's files",
            "ls /boot /srv /opt /lib/modules && echo OPEN; cat $W/secret/key",
        ),
    ];

    /// What takes system calls, made by this program inside a box with the host's files.
    const PROBES: &[&str] = &[
        "trace",
        "peek",
        "userns",
        "clone3",
        "keyring",
        "bpf",
        "io_uring",
        "perf",
        "userfault",
        "new-mounts",
        "handle",
        "vsock",
        "alg",
        "packet",
        "setns",
        "terminal",
        "abstract",
    ];

    struct World {
        dir: TempDir,
        root: TempDir,
        cache: TempDir,
        victim: Child,
        server: UnixListener,
        abstract_server: UnixListener,
        /// Attempts that told of something.
        found: RefCell<Vec<String>>,
    }

    pub(super) fn run() {
        let world = World::new();
        let executor = tokio::runtime::Runtime::new().unwrap();
        executor.block_on(async {
            let mut config = SubprocessConfig::namespaces();
            world.show(&mut config);
            let own = std::env::current_exe().unwrap();
            config.expose_paths.push(own.to_str().unwrap().to_owned());
            let sandbox = world.provision(config).await;
            for attempt in EVERYWHERE.iter().chain(HOST) {
                world.attempt("host", &sandbox, attempt).await;
            }
            for probe in PROBES {
                world.probe(&sandbox, &own, probe).await;
            }
            world.interface("host", &sandbox).await;
            sandbox.stop().await.unwrap();

            let mut config = SubprocessConfig::namespaces();
            world.show(&mut config);
            config.root = world.root.path().to_str().unwrap().to_owned();
            let sandbox = world.provision(config.clone()).await;
            for attempt in EVERYWHERE.iter().chain(DIRECTORY) {
                world.attempt("directory", &sandbox, attempt).await;
            }
            world.interface("directory", &sandbox).await;
            // Another box sees nothing of what this one did.
            let other = world.provision(config).await;
            let seen = other
                .run(["sh", "-c", "ls -d /added; head -n 1 /etc/passwd; ls -d /bin/ls"])
                .await
                .unwrap();
            assert_eq!(seen.stdout_lossy(), "root:x:0:0:root:/root:/bin/sh\n/bin/ls\n");
            other.stop().await.unwrap();
            sandbox.stop().await.unwrap();
        });
        let found = world.found.take();
        drop(world);
        assert!(found.is_empty(), "{}", found.join("\n"));
        let count = 2 * EVERYWHERE.len() + HOST.len() + DIRECTORY.len() + PROBES.len();
        println!(
            "{count} attempts and the file interface, as user {}",
            rustix::process::geteuid().as_raw()
        );
    }

    impl World {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join(name);
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
            for name in ["ro", "rw", "secret"] {
                fs::create_dir(at(name)).unwrap();
            }
            // Whoever the box's programs are, nothing but the box keeps them from it.
            for (name, mode) in [("ro", 0o777), ("rw", 0o777), ("secret", 0o777)] {
                fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
            }
            fs::write(at("secret/key"), SECRET.concat()).unwrap();
            fs::write(at("ro/file"), "as it was").unwrap();
            for name in ["secret/key", "ro/file"] {
                fs::set_permissions(at(name), fs::Permissions::from_mode(0o666)).unwrap();
            }
            symlink(at("secret/key"), at("ro/to-secret")).unwrap();
            symlink(at("secret"), at("ro/dir-to-secret")).unwrap();
            let server = UnixListener::bind(at("ro/server")).unwrap();
            server.set_nonblocking(true).unwrap();
            fs::set_permissions(at("ro/server"), fs::Permissions::from_mode(0o777)).unwrap();
            let name = dir.path().file_name().unwrap().as_encoded_bytes().to_vec();
            use std::os::linux::net::SocketAddrExt;
            let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
            let abstract_server = UnixListener::bind_addr(&address).unwrap();
            abstract_server.set_nonblocking(true).unwrap();
            let root = tempfile::tempdir().unwrap();
            busybox_root(root.path());
            let victim = Command::new("sh")
                .args(["-c", "while :; do sleep 100; done", "marker-of-the-suite"])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            Self {
                dir,
                root,
                cache: tempfile::tempdir().unwrap(),
                victim,
                server,
                abstract_server,
                found: RefCell::default(),
            }
        }

        fn show(&self, config: &mut SubprocessConfig) {
            let at = |name: &str| self.dir.path().join(name).to_str().unwrap().to_owned();
            config.expose_paths = vec![at("ro")];
            config.writable_paths = vec![at("rw")];
        }

        async fn provision(&self, config: SubprocessConfig) -> Sandbox {
            Sandbox::builder(config)
                .cache(CacheDir::at(self.cache.path()))
                .env("W", self.dir.path())
                .env("N", self.dir.path().file_name().unwrap())
                .env("V", self.victim.id().to_string())
                .env("P", std::process::id().to_string())
                .env("CACHE", self.cache.path())
                .env("HOME_OF_HOST", std::env::var_os("HOME").unwrap_or_default())
                .provision()
                .await
                .unwrap()
        }

        /// All that must not change: what is shown, what is not, the shared root.
        fn snapshot(&self) -> BTreeMap<PathBuf, (u32, u32, u64, i64, Vec<u8>)> {
            let mut found = BTreeMap::new();
            let mut pending = vec![
                self.dir.path().join("ro"),
                self.dir.path().join("secret"),
                self.root.path().to_path_buf(),
            ];
            while let Some(path) = pending.pop() {
                let info = fs::symlink_metadata(&path).unwrap();
                let content = if info.is_dir() {
                    pending.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                    Vec::new()
                } else if info.is_file() && info.len() < 4096 {
                    fs::read(&path).unwrap()
                } else {
                    Vec::new()
                };
                let mtime = if info.is_file() { info.mtime_nsec() } else { 0 };
                found.insert(path, (info.mode(), info.uid(), info.len(), mtime, content));
            }
            found
        }

        async fn attempt(&self, root: &str, sandbox: &Sandbox, (name, script): &(&str, &str)) {
            let before = self.snapshot();
            // Killed with everything else by some; what it said until then counts.
            let output = sandbox.run(["sh", "-c", *script]).await.unwrap();
            let said = format!("{}{}", output.stdout_lossy(), output.stderr_lossy());
            if said.contains(&SECRET.concat()) || said.contains("OPEN") {
                self.found.borrow_mut().push(format!("{root}: {name}: {said}"));
            }
            assert_eq!(self.snapshot(), before, "{root}: {name}: the host was changed");
            self.assert_untouched(root, name);
            let alive = sandbox.run(["sh", "-c", "echo alive"]).await;
            assert_eq!(
                alive.unwrap().stdout_lossy(),
                "alive\n",
                "{root}: {name}: the box does not live on"
            );
        }

        async fn probe(&self, sandbox: &Sandbox, own: &Path, kind: &str) {
            let name = self.dir.path().file_name().unwrap().to_str().unwrap();
            let argument = format!("probe={kind}");
            let output = sandbox.run([own.to_str().unwrap(), &argument, name]).await.unwrap();
            let said = format!("{}{}", output.stdout_lossy(), output.stderr_lossy());
            if output.code() != Some(0) || !said.contains("refused") {
                self.found.borrow_mut().push(format!("{kind}: {said}"));
            }
            self.assert_untouched("host", kind);
            assert_eq!(sandbox.run(["true"]).await.unwrap().code(), Some(0), "{kind}");
        }

        /// What the host does at the box's request must not lead it out either.
        async fn interface(&self, root: &str, sandbox: &Sandbox) {
            let key = self.dir.path().join("secret/key");
            let script = "rm -rf links; mkdir links; cd links; ln -s $W/secret/key read; ln -s $W/secret/new write; \
                          ln -s $W/secret dir; ln -s /proc/1/root/etc root; mkfifo fifo; echo here > plain";
            assert_eq!(sandbox.run(["sh", "-c", script]).await.unwrap().code(), Some(0));
            let before = self.snapshot();
            let read = sandbox
                .read("links/read")
                .await
                .expect_err("it leads nowhere in the box");
            assert_eq!(read.kind(), ErrorKind::NotFound, "{root}");
            assert!(sandbox.read(&key).await.is_err(), "{root}");
            // The guest's root is the box's.
            let passwd = sandbox.read("links/root/passwd").await.unwrap();
            assert_eq!(passwd, sandbox.read("/etc/passwd").await.unwrap(), "{root}");
            assert!(sandbox.list("links/dir").await.is_err(), "{root}");
            // In the box they may write where they like; on the host nothing comes of it.
            let _ = sandbox.write("links/write", "x").await;
            let _ = sandbox.write(self.dir.path().join("ro/file"), "x").await;
            let _ = sandbox.write("links/root/passwd", "x").await;
            let _ = sandbox.remove(self.dir.path().join("ro")).await;
            let down = tempfile::tempdir().unwrap();
            let _ = sandbox.download_dir("links", down.path().join("tree")).await;
            for entry in fs::read_dir(down.path().join("tree")).into_iter().flatten().flatten() {
                let info = fs::symlink_metadata(entry.path()).unwrap();
                let content = if info.is_file() {
                    fs::read_to_string(entry.path()).unwrap()
                } else {
                    String::new()
                };
                assert!(!content.contains(SECRET[1]), "{root}: {}", entry.path().display());
            }
            assert_eq!(self.snapshot(), before, "{root}: through the file interface");
            self.assert_untouched(root, "the file interface");
        }

        fn assert_untouched(&self, root: &str, name: &str) {
            let status = fs::read_to_string(format!("/proc/{}/stat", self.victim.id())).unwrap_or_default();
            let lives = status
                .rsplit_once(") ")
                .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X', 'T']));
            assert!(lives, "{root}: {name}: a program of the host was reached: {status}");
            assert!(
                self.server.accept().is_err(),
                "{root}: {name}: a server of the host was reached"
            );
            assert!(
                self.abstract_server.accept().is_err(),
                "{root}: {name}: a server of the host was reached"
            );
            let mark = format!("from-{}", self.dir.path().file_name().unwrap().to_str().unwrap());
            for place in ["/dev/shm", "/tmp", "/var/tmp"] {
                assert!(
                    !Path::new(place).join(&mark).exists(),
                    "{root}: {name}: it is in the host's {place}"
                );
            }
        }
    }

    impl Drop for World {
        fn drop(&mut self) {
            let _ = self.victim.kill();
            let _ = self.victim.wait();
        }
    }
}

/// What this program tries when it is a program of a box.
#[cfg(target_os = "linux")]
#[allow(
    unsafe_code,
    reason = "system calls that a box must refuse, with integers and null pointers"
)]
mod probe {
    use std::io;
    use std::process::ExitCode;

    /// Makes the attempt; says `refused` and why, or what it got.
    pub(super) fn run(kind: &str) -> ExitCode {
        match attempt(kind) {
            Ok(got) => {
                println!("{kind}: got {got}");
                ExitCode::FAILURE
            }
            Err(error) => {
                println!("{kind}: refused: {error}");
                ExitCode::SUCCESS
            }
        }
    }

    fn check(result: libc::c_long) -> io::Result<libc::c_long> {
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(result)
        }
    }

    fn attempt(kind: &str) -> io::Result<libc::c_long> {
        const NONE: usize = 0;
        // SAFETY: integers, null pointers, and structures on the stack with their true sizes. None of these calls
        // changes memory of this process in a way that Rust could notice, and it ends right afterwards.
        unsafe {
            match kind {
                "trace" => check(libc::ptrace(libc::PTRACE_SEIZE, 1, NONE, NONE)),
                "peek" => {
                    let mut buffer = [0u8; 8];
                    let ours = libc::iovec {
                        iov_base: buffer.as_mut_ptr().cast(),
                        iov_len: 8,
                    };
                    let theirs = libc::iovec {
                        iov_base: 0x40_0000 as *mut libc::c_void,
                        iov_len: 8,
                    };
                    check(libc::process_vm_readv(1, &ours, 1, &theirs, 1, 0) as libc::c_long)
                }
                "userns" => check(libc::unshare(libc::CLONE_NEWUSER).into()),
                "clone3" => {
                    // `clone_args` with CLONE_NEWUSER.
                    let mut arguments = [0u64; 11];
                    arguments[0] = libc::CLONE_NEWUSER as u64;
                    arguments[4] = libc::SIGCHLD as u64;
                    check(libc::syscall(
                        libc::SYS_clone3,
                        arguments.as_ptr(),
                        size_of_val(&arguments),
                    ))
                }
                "keyring" => {
                    let join = check(libc::syscall(libc::SYS_keyctl, 1, NONE));
                    let add = libc::syscall(libc::SYS_add_key, c"user".as_ptr(), c"x".as_ptr(), c"y".as_ptr(), 1, -3);
                    join.or(check(add))
                }
                "bpf" => {
                    // A map of one entry.
                    let attributes: [u32; 32] =
                        std::array::from_fn(|index| if index < 4 { [2, 4, 4, 1][index] } else { 0 });
                    check(libc::syscall(
                        libc::SYS_bpf,
                        0,
                        attributes.as_ptr(),
                        size_of_val(&attributes),
                    ))
                }
                "io_uring" => {
                    let mut parameters = [0u64; 32];
                    check(libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()))
                }
                "perf" => {
                    // A software clock of this process itself.
                    let mut attributes = [0u32; 32];
                    attributes[0] = 1;
                    attributes[1] = 128;
                    check(libc::syscall(
                        libc::SYS_perf_event_open,
                        attributes.as_ptr(),
                        0,
                        -1,
                        -1,
                        0,
                    ))
                }
                "userfault" => check(libc::syscall(libc::SYS_userfaultfd, 1)),
                "new-mounts" => {
                    let opened = check(libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), 0));
                    let cloned = libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, c"/".as_ptr(), 1);
                    opened.or(check(cloned))
                }
                "handle" => {
                    let handle = [8u32, 1, 2, 0];
                    let at = libc::open(c"/".as_ptr(), libc::O_RDONLY);
                    check(libc::syscall(
                        libc::SYS_open_by_handle_at,
                        at,
                        handle.as_ptr(),
                        libc::O_RDONLY,
                    ))
                }
                "vsock" => check(libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0).into()),
                "alg" => check(libc::socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0).into()),
                "packet" => check(libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0).into()),
                "setns" => {
                    let own = libc::open(c"/proc/self/ns/mnt".as_ptr(), libc::O_RDONLY);
                    check(libc::setns(own, 0).into())
                }
                "terminal" => {
                    let terminal = libc::open(c"/dev/ptmx".as_ptr(), libc::O_RDWR | libc::O_NOCTTY);
                    check(libc::ioctl(terminal, libc::TIOCSTI, c"x".as_ptr()).into())
                }
                "abstract" => {
                    use std::os::linux::net::SocketAddrExt;
                    let name = std::env::args().nth(2).unwrap_or_default();
                    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
                    std::os::unix::net::UnixStream::connect_addr(&address).map(|_| 0)
                }
                other => panic!("no such probe: {other}"),
            }
        }
    }
}
