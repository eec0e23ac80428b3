//! [`Place`]: the thread on which everything of one box happens, as root in a mount namespace of its own.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::{mpsc, oneshot};

/// A variable in the environment of every process of a box, by which it is found where there are no namespaces.
pub(super) const MARKER: &str = "E2B_SANDBOX_ID";

#[derive(Debug)]
pub(super) struct Place {
    id: String,
    handle: tokio::runtime::Handle,
    stop: mpsc::Sender<()>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    /// The mount namespace, if it has its own.
    namespace: Option<PathBuf>,
    /// The home of users that this machine does not have, where boxes share its files.
    pub(super) shared_home: Option<PathBuf>,
    dir: PathBuf,
}

/// Whether boxes can have files of their own here.
pub(super) fn can_isolate(dir: &Path) -> bool {
    if !rustix::process::geteuid().is_root() {
        return false;
    }
    let dir = dir.join("probe");
    let tried = std::thread::spawn(move || std::fs::create_dir(&dir).and_then(|()| isolate(&dir)));
    tried.join().is_ok_and(|tried| tried.is_ok())
}

/// Gives this thread a root of its own: an overlay over the machine's, in memory. It goes with its last process.
#[allow(
    deprecated,
    reason = "the replacement is unsafe because of a flag that unshares descriptors, which is not used here"
)]
fn isolate(dir: &Path) -> io::Result<()> {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind_recursive, mount_change};
    use rustix::thread::{UnshareFlags, unshare};

    unshare(UnshareFlags::NEWNS)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("box", dir, "tmpfs", MountFlags::empty(), None)?;
    let (upper, work, root) = (dir.join("upper"), dir.join("work"), dir.join("root"));
    for part in [&upper, &work, &root] {
        std::fs::create_dir(part)?;
    }
    let options = format!("lowerdir=/,upperdir={},workdir={}", upper.display(), work.display());
    let options = std::ffi::CString::new(options)?;
    mount("box", &root, "overlay", MountFlags::empty(), Some(options.as_c_str()))?;
    for shared in ["proc", "dev", "sys"] {
        mount_bind_recursive(Path::new("/").join(shared), root.join(shared))?;
    }
    let tmp = root.join("tmp");
    mount("box", &tmp, "tmpfs", MountFlags::empty(), Some(c"mode=1777"))?;
    rustix::process::chroot(&root)?;
    std::env::set_current_dir("/")?;
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
    pub(super) async fn new(id: String, dir: PathBuf, isolated: bool) -> io::Result<Self> {
        let (ready, readied) = oneshot::channel();
        let (stop, mut stopped) = mpsc::channel::<()>(1);
        let mount_point = dir.clone();
        let thread = std::thread::Builder::new().name("e2b-box".into()).spawn(move || {
            let made = || {
                std::fs::create_dir(&mount_point)?;
                let namespace = if isolated {
                    isolate(&mount_point)?;
                    let thread = rustix::thread::gettid().as_raw_nonzero();
                    Some(std::fs::read_link(format!("/proc/self/task/{thread}/ns/mnt"))?)
                } else {
                    std::fs::create_dir_all(mount_point.join("home"))?;
                    None
                };
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                Ok::<_, io::Error>((runtime, namespace))
            };
            match made() {
                Ok((runtime, namespace)) => {
                    let _ = ready.send(Ok((runtime.handle().clone(), namespace)));
                    runtime.block_on(stopped.recv());
                    // Everything of the box goes, without waiting for what blocks.
                    runtime.shutdown_background();
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        })?;
        let (handle, namespace) = readied.await.map_err(io::Error::other)??;
        Ok(Self {
            id,
            handle,
            stop,
            thread: Mutex::new(Some(thread)),
            shared_home: namespace.is_none().then(|| dir.join("home")),
            namespace,
            dir,
        })
    }

    /// Runs something in the box. `None` when the box ends meanwhile.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        self.handle.spawn(work).await.ok()
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

    /// Ends the box: its processes first, as they may fork, then its thread and with it its namespace.
    pub(super) async fn end(&self) {
        for _ in 0..200 {
            let left: Vec<Pid> = self.processes();
            if left.is_empty() {
                break;
            }
            for pid in left {
                let _ = kill_process(pid, Signal::KILL);
            }
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        let _ = self.stop.try_send(());
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
