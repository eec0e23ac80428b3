//! [`Place`]: the threads on which everything of one box happens, as root in namespaces of its own.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::{mpsc, oneshot};

use super::gateway::{self, CurrentRules, Outside};
use super::init::Init;
use super::interface;

/// How long the kernel may take to end the processes of a box.
const END: Duration = Duration::from_secs(5);

/// A variable in the environment of every process of a box, by which it is found where there are no namespaces.
pub(super) const MARKER: &str = "E2B_SANDBOX_ID";

/// What each box of an emulator has of its own: whatever this machine permits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Isolation {
    /// Files: a mount namespace whose root is an overlay over this machine's.
    pub files: bool,
    /// Processes: a process id namespace. Boxes do not see each other's, and none outlives its box.
    pub processes: bool,
    /// A network: a namespace with one way out, on which the network policy is enforced.
    pub network: bool,
    /// Why there is not more, for a person; empty if there is all of it.
    pub missing: Vec<String>,
}

/// A thread that runs what it is given, in its namespaces.
#[derive(Debug)]
struct Room {
    handle: tokio::runtime::Handle,
    stop: mpsc::Sender<()>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Room {
    /// Makes the namespaces on a thread of their own, and an executor in them; then, on that, starts what goes on.
    async fn new<T: Send + 'static>(
        make: impl FnOnce() -> io::Result<T> + Send + 'static,
        start: impl FnOnce(&T) -> io::Result<()> + Send + 'static,
    ) -> io::Result<(Self, T)> {
        let (ready, readied) = oneshot::channel();
        let (stop, mut stopped) = mpsc::channel::<()>(1);
        let thread = std::thread::Builder::new().name("e2b-box".into()).spawn(move || {
            let made = || {
                let made = make()?;
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(async { start(&made) })?;
                Ok::<_, io::Error>((runtime, made))
            };
            match made() {
                Ok((runtime, made)) => {
                    let _ = ready.send(Ok((runtime.handle().clone(), made)));
                    runtime.block_on(stopped.recv());
                    // Everything of the box goes, without waiting for what blocks.
                    runtime.shutdown_background();
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        })?;
        let (handle, made) = readied.await.map_err(io::Error::other)??;
        let room = Self {
            handle,
            stop,
            thread: Mutex::new(Some(thread)),
        };
        Ok((room, made))
    }

    async fn end(&self) {
        let _ = self.stop.try_send(());
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

#[derive(Debug)]
pub(super) struct Place {
    id: String,
    /// Where files are handled, and the box's network.
    files: Room,
    /// Where processes are started, if they have a namespace. Its thread cannot make threads.
    processes: Option<Room>,
    init: Option<Arc<Init>>,
    /// The mount namespace, if it has its own.
    namespace: Option<PathBuf>,
    /// The home of users that this machine does not have, where boxes share its files.
    pub(super) shared_home: Option<PathBuf>,
    dir: PathBuf,
}

/// What boxes can have of their own here, found out by trying.
pub(super) fn probe(dir: &Path) -> Isolation {
    let mut found = Isolation::default();
    if !rustix::process::geteuid().is_root() {
        found.missing.push("namespaces need root".to_owned());
        return found;
    }
    let mut attempt = |name: &str, wanted: Isolation| {
        let dir = dir.join(name);
        let tried = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                std::fs::create_dir(&dir)?;
                isolate(&dir, &wanted)?;
                if wanted.network {
                    interface::make()?;
                }
                if wanted.processes {
                    unshare(rustix::thread::UnshareFlags::NEWPID)?;
                    Init::start(machine()?)?.end();
                }
                Ok::<_, io::Error>(())
            })
        });
        let tried = tried
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the attempt failed")));
        tried
            .inspect_err(|error| found.missing.push(format!("no {name} of their own: {error}")))
            .is_ok()
    };
    let with = |processes, network| Isolation {
        files: true,
        processes,
        network,
        missing: Vec::new(),
    };
    let files = attempt("files", with(false, false));
    let processes = files && attempt("processes", with(true, false));
    let network = files && attempt("network", with(false, true));
    (found.files, found.processes, found.network) = (files, processes, network);
    found
}

/// The processes that this thread sees.
fn machine() -> io::Result<OwnedFd> {
    std::fs::File::open("/proc").map(OwnedFd::from)
}

#[allow(
    deprecated,
    reason = "the replacement is unsafe because of a flag that unshares descriptors, which is not used here"
)]
fn unshare(flags: rustix::thread::UnshareFlags) -> io::Result<()> {
    rustix::thread::unshare(flags).map_err(Into::into)
}

/// Gives this thread a root of its own: an overlay over the machine's, in memory; and a network with loopback, which is
/// off, if it is to have one. They go with their last process.
fn isolate(dir: &Path, wanted: &Isolation) -> io::Result<()> {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind_recursive, mount_change};
    use rustix::thread::UnshareFlags;

    unshare(UnshareFlags::NEWNS)?;
    if wanted.network {
        unshare(UnshareFlags::NEWNET)?;
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("box", dir, "tmpfs", MountFlags::empty(), None)?;
    let (upper, work, root) = (dir.join("upper"), dir.join("work"), dir.join("root"));
    for part in [&upper, &work, &root] {
        std::fs::create_dir(part)?;
    }
    let options = format!("lowerdir=/,upperdir={},workdir={}", upper.display(), work.display());
    let options = std::ffi::CString::new(options)?;
    mount("box", &root, "overlay", MountFlags::empty(), Some(options.as_c_str()))?;
    for shared in ["proc", "dev"] {
        mount_bind_recursive(Path::new("/").join(shared), root.join(shared))?;
    }
    match wanted.network {
        true => mount("sysfs", root.join("sys"), "sysfs", MountFlags::empty(), None)?,
        false => mount_bind_recursive("/sys", root.join("sys"))?,
    }
    let tmp = root.join("tmp");
    mount("box", &tmp, "tmpfs", MountFlags::empty(), Some(c"mode=1777"))?;
    rustix::process::chroot(&root)?;
    std::env::set_current_dir("/")?;
    if wanted.network {
        // It may be a link to what is kept outside.
        let _ = std::fs::remove_file("/etc/resolv.conf");
        std::fs::write("/etc/resolv.conf", format!("nameserver {}\n", super::rules::RESOLVER))?;
    }
    // The user that images have.
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    if !passwd.lines().any(|line| line.starts_with("user:")) {
        std::fs::write(
            "/etc/passwd",
            // First, so that its id is its name even where this machine gives the id to somebody else.
            format!("user:x:1000:1000::/home/user:/bin/bash\n{passwd}"),
        )?;
        let group = std::fs::read_to_string("/etc/group").unwrap_or_default();
        std::fs::write("/etc/group", format!("user:x:1000:\n{group}"))?;
    }
    std::fs::create_dir_all("/home/user")?;
    std::os::unix::fs::chown("/home/user", Some(1000), Some(1000))
}

impl Place {
    pub(super) async fn new(
        id: String,
        dir: PathBuf,
        isolation: &Isolation,
        outside: Outside,
        rules: CurrentRules,
    ) -> io::Result<Self> {
        let (mount_point, wanted) = (dir.clone(), isolation.clone());
        let wants_network = isolation.network;
        let (files, namespace) = Room::new(
            move || {
                std::fs::create_dir(&mount_point)?;
                if !wanted.files {
                    std::fs::create_dir_all(mount_point.join("home"))?;
                    return Ok(None);
                }
                isolate(&mount_point, &wanted)?;
                let thread = rustix::thread::gettid().as_raw_nonzero();
                std::fs::read_link(format!("/proc/self/task/{thread}/ns/mnt")).map(Some)
            },
            move |_| {
                if wants_network {
                    gateway::serve(interface::make()?, outside, rules)?;
                }
                Ok(())
            },
        )
        .await?;
        let mut place = Self {
            id,
            files,
            processes: None,
            init: None,
            shared_home: namespace.is_none().then(|| dir.join("home")),
            namespace,
            dir,
        };
        if isolation.processes
            && let Err(error) = place.make_processes().await
        {
            place.end().await;
            return Err(error);
        }
        Ok(place)
    }

    /// Makes the thread that starts processes, from within the box.
    async fn make_processes(&mut self) -> io::Result<()> {
        // Before the box's own covers it.
        let machine = machine()?;
        // A thread has the namespaces of the one that makes it.
        let made = self.run(async move {
            Room::new(
                move || {
                    unshare(rustix::thread::UnshareFlags::NEWPID)?;
                    Init::start(machine)
                },
                |_| Ok(()),
            )
            .await
        });
        let (room, init) = made.await.unwrap_or_else(|| Err(io::Error::other("the box ended")))?;
        self.processes = Some(room);
        self.init = Some(Arc::new(init));
        Ok(())
    }

    /// Runs something in the box. `None` when the box ends meanwhile.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        self.files.handle.spawn(work).await.ok()
    }

    /// Runs something that starts processes, and nothing that blocks. `None` when the box ends meanwhile.
    pub(super) async fn run_process<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let room = self.processes.as_ref().unwrap_or(&self.files);
        room.handle.spawn(work).await.ok()
    }

    /// The id by which the box knows a process of this machine.
    pub(super) fn id_inside(&self, pid: u32) -> Option<u32> {
        match &self.init {
            Some(init) => init.id_inside(pid),
            None => Some(pid),
        }
    }

    /// The processes of the box.
    fn processes(&self) -> Vec<Pid> {
        let Ok(entries) = std::fs::read_dir("/proc") else {
            return Vec::new();
        };
        let marker = format!("{MARKER}={}", self.id);
        let own = std::process::id();
        entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
            .filter(|pid| u32::try_from(*pid) != Ok(own))
            .filter(|pid| match &self.namespace {
                Some(namespace) => {
                    std::fs::read_link(format!("/proc/{pid}/ns/mnt")).is_ok_and(|other| other == *namespace)
                }
                None => std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|env| {
                    env.split(|byte| *byte == 0)
                        .any(|variable| variable == marker.as_bytes())
                }),
            })
            .filter_map(Pid::from_raw)
            .collect()
    }

    /// Signals every process of the box.
    pub(super) fn signal(&self, signal: Signal) {
        for pid in self.processes() {
            let _ = kill_process(pid, signal);
        }
    }

    /// Ends the box: its processes first, as they may fork, then its threads and with them its namespaces.
    pub(super) async fn end(&self) {
        match &self.init {
            // The kernel ends the rest with it.
            Some(init) => {
                init.kill();
                let init = init.clone();
                let ended = tokio::task::spawn_blocking(move || init.end());
                let _ = tokio::time::timeout(END, ended).await;
            }
            None => self.end_one_by_one().await,
        }
        if let Some(room) = &self.processes {
            room.end().await;
        }
        self.files.end().await;
        let _ = std::fs::remove_dir_all(&self.dir);
    }

    async fn end_one_by_one(&self) {
        for _ in 0..200 {
            let left: Vec<Pid> = self.processes();
            if left.is_empty() {
                break;
            }
            for pid in left {
                let _ = kill_process(pid, Signal::KILL);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}
