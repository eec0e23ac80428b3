//! Process groups of the host, signalled and waited for without races with the reuse of their ids.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use rustix::process::{Pid, kill_process_group};
use tokio::process::Child;

use crate::command::ExitStatus;
use crate::error::{Error, ErrorKind, Result};
use crate::process::{ProcessControl, Signal};

#[cfg(all(target_os = "linux", not(portable_processes)))]
use linux::Watch;
#[cfg(not(all(target_os = "linux", not(portable_processes))))]
use portable::Watch;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process groups of one box.
#[derive(Default)]
pub(crate) struct Groups {
    running: Mutex<HashMap<u64, Weak<Control>>>,
    background: Mutex<Vec<Arc<Control>>>,
    next: AtomicU64,
    started: AtomicBool,
    closed: AtomicBool,
}

impl Groups {
    /// A program is about to be started. To be called before [`is_closed`](Self::is_closed) is asked: so either the
    /// start sees the end, or the end sees the start.
    pub(crate) fn start_one(&self) {
        self.started.store(true, Ordering::SeqCst);
    }

    /// Whether any program was ever to be started.
    pub(crate) fn any_started(&self) -> bool {
        self.started.load(Ordering::SeqCst)
    }

    /// No program starts any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Keeps a background server until the box ends.
    pub(crate) fn keep(&self, control: Arc<Control>) {
        let mut background = lock(&self.background);
        background.retain(|control| !control.reap());
        background.push(control);
    }

    /// Ends every group: SIGTERM, `grace`, SIGKILL, `grace`. No program starts any more.
    pub(crate) async fn end(&self, grace: Duration) {
        self.close();
        let running: Vec<Arc<Control>> = lock(&self.running).values().filter_map(Weak::upgrade).collect();
        for signal in [Signal::TERM, Signal::KILL] {
            for control in &running {
                let _ = control.signal_group(signal);
            }
            let ended = async {
                for control in &running {
                    control.watch.ended_elsewhere().await;
                }
            };
            if tokio::time::timeout(grace, ended).await.is_ok() {
                break;
            }
        }
        for control in &running {
            // Whoever outlived its leader.
            control.start_kill();
            control.reap();
        }
        lock(&self.background).clear();
    }
}

/// One process group, by its leader. The leader is reaped only when nobody will signal the group any more, so that the
/// kernel cannot give its id to somebody else in between.
pub(crate) struct Control {
    pid: Pid,
    watch: Watch,
    groups: Weak<Groups>,
    key: u64,
}

impl Control {
    pub(crate) fn start(child: Child, groups: &Arc<Groups>) -> Result<Arc<Self>> {
        let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Error::new(ErrorKind::Other, "a started program has no process id"))?;
        let watch = match Watch::new(child, pid) {
            Ok(watch) => watch,
            Err(error) => {
                let _ = kill_process_group(pid, rustix::process::Signal::KILL);
                return Err(Error::io("watching a program", error));
            }
        };
        let key = groups.next.fetch_add(1, Ordering::Relaxed);
        let control = Arc::new(Self {
            pid,
            watch,
            groups: Arc::downgrade(groups),
            key,
        });
        lock(&groups.running).insert(key, Arc::downgrade(&control));
        // The box was closed after we looked: its teardown may have missed this one.
        if groups.is_closed() {
            control.start_kill();
            return Err(Error::new(ErrorKind::SandboxGone, "the sandbox is being stopped"));
        }
        Ok(control)
    }

    /// Signals the group while its leader's id is still its own.
    fn signal_group(&self, signal: Signal) -> rustix::io::Result<()> {
        let Some(signal) = rustix::process::Signal::from_named_raw(signal.number()) else {
            return Err(rustix::io::Errno::INVAL);
        };
        self.watch
            .unless_reaped(|| kill_process_group(self.pid, signal))
            .unwrap_or(Ok(()))
    }

    /// Lets go of an ended leader; says whether it is gone.
    fn reap(&self) -> bool {
        self.watch.reap()
    }
}

#[async_trait]
impl ProcessControl for Control {
    fn pid(&self) -> Option<u32> {
        Some(self.pid.as_raw_nonzero().get().unsigned_abs())
    }

    async fn wait(&self) -> Result<ExitStatus> {
        self.watch
            .ended()
            .await
            .map_err(|error| Error::io("waiting for the program", error))
    }

    fn try_wait(&self) -> Result<Option<ExitStatus>> {
        self.watch
            .status()
            .map_err(|error| Error::io("waiting for the program", error))
    }

    async fn signal(&self, signal: Signal) -> Result<()> {
        if self.try_wait()?.is_some() {
            return Ok(());
        }
        match self.signal_group(signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            // The leader ended in the meantime.
            Err(_) if self.try_wait()?.is_some() => Ok(()),
            Err(error) => Err(Error::io("signalling the process group", error.into())),
        }
    }

    fn start_kill(&self) {
        let _ = self.signal_group(Signal::KILL);
    }

    async fn finish(&self) {
        self.start_kill();
        self.reap();
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Whoever held the handle is gone, so the group goes too. The leader is reaped by the executor.
        self.start_kill();
        self.reap();
        if let Some(groups) = self.groups.upgrade() {
            lock(&groups.running).remove(&self.key);
        }
    }
}

/// On Linux the end of the leader is seen through a pidfd, without reaping it.
#[cfg(all(target_os = "linux", not(portable_processes)))]
mod linux {
    use std::io;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::{Mutex, OnceLock};

    use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, pidfd_open, waitid};
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;
    use tokio::process::Child;

    use super::lock;
    use crate::command::ExitStatus;

    #[allow(
        deprecated,
        reason = "the replacement is unsafe and asks for a descriptor that stays the same, which an `OwnedFd` does; this \
                  one is in older releases of tokio too"
    )]
    fn watch(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
        AsyncFd::with_interest(pidfd, Interest::READABLE)
    }

    pub(crate) struct Watch {
        pidfd: AsyncFd<OwnedFd>,
        status: OnceLock<ExitStatus>,
        child: Mutex<Option<Child>>,
    }

    impl Watch {
        pub(super) fn new(child: Child, pid: Pid) -> io::Result<Self> {
            let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
            let pidfd = watch(pidfd)?;
            Ok(Self {
                pidfd,
                status: OnceLock::new(),
                child: Mutex::new(Some(child)),
            })
        }

        /// The status if the leader has ended. It stays a zombie.
        pub(super) fn status(&self) -> io::Result<Option<ExitStatus>> {
            if let Some(status) = self.status.get() {
                return Ok(Some(*status));
            }
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
            let ended = match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
                Ok(Some(ended)) => ended,
                Ok(None) => return Ok(None),
                // Reaped since we looked: whoever did so keeps the status before he lets go of the child.
                Err(error) => {
                    let _reaper = lock(&self.child);
                    return self.status.get().map(|status| Some(*status)).ok_or(error.into());
                }
            };
            let status = match (ended.exit_status(), ended.terminating_signal()) {
                (Some(code), _) => ExitStatus::exited(code),
                (None, Some(signal)) => ExitStatus::signaled(signal),
                (None, None) => return Ok(None),
            };
            Ok(Some(*self.status.get_or_init(|| status)))
        }

        pub(super) async fn ended(&self) -> io::Result<ExitStatus> {
            loop {
                if let Some(status) = self.status()? {
                    return Ok(status);
                }
                let mut ready = self.pidfd.readable().await?;
                if let Some(status) = self.status()? {
                    return Ok(status);
                }
                ready.clear_ready();
            }
        }

        /// Waits on the current executor, when the one that started the program may be gone.
        pub(super) async fn ended_elsewhere(&self) {
            let watched = self.pidfd.get_ref().try_clone();
            let Ok(pidfd) = watched.and_then(watch) else { return };
            let _ = pidfd.readable().await;
        }

        /// Runs `action` if the leader's id still is its own.
        pub(super) fn unless_reaped<T>(&self, action: impl FnOnce() -> T) -> Option<T> {
            lock(&self.child).as_ref().map(|_| action())
        }

        pub(super) fn reap(&self) -> bool {
            let mut child = lock(&self.child);
            let Some(running) = child.as_mut() else { return true };
            match running.try_wait() {
                Ok(None) => return false,
                Ok(Some(status)) => {
                    let _ = self.status.set(status.into());
                }
                Err(_) => {}
            }
            *child = None;
            true
        }
    }

    #[cfg(test)]
    mod tests {
        use std::sync::Arc;

        use super::*;

        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_status_survives_whoever_reaps_meanwhile() {
            for _ in 0..200 {
                let child = tokio::process::Command::new("sh").args(["-c", "exit 7"]).spawn();
                let child = child.expect("started");
                let pid = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
                let watch = Arc::new(Watch::new(child, pid.expect("an id")).expect("watched"));
                let reaper = std::thread::spawn({
                    let watch = watch.clone();
                    move || {
                        while !watch.reap() {
                            std::hint::spin_loop();
                        }
                    }
                });
                let status = loop {
                    if let Some(status) = watch.status().expect("known") {
                        break status;
                    }
                };
                assert_eq!(status.code(), Some(7));
                reaper.join().expect("reaped");
                assert_eq!(watch.ended().await.expect("known").code(), Some(7));
            }
        }
    }
}

/// Elsewhere a task waits for the leader and kills the rest of its group at once.
#[cfg(not(all(target_os = "linux", not(portable_processes))))]
mod portable {
    use std::io;
    use std::sync::{Arc, Mutex};

    use rustix::process::{Pid, Signal, kill_process_group};
    use tokio::process::Child;
    use tokio::sync::watch;

    use super::lock;
    use crate::command::ExitStatus;

    pub(crate) struct Watch {
        status: watch::Receiver<Option<ExitStatus>>,
        reaped: Arc<Mutex<bool>>,
    }

    impl Watch {
        pub(super) fn new(mut child: Child, pid: Pid) -> io::Result<Self> {
            let (sender, status) = watch::channel(None);
            let reaped = Arc::new(Mutex::new(false));
            let mark = reaped.clone();
            tokio::spawn(async move {
                if let Ok(ended) = child.wait().await {
                    *lock(&mark) = true;
                    let _ = kill_process_group(pid, Signal::KILL);
                    sender.send_replace(Some(ended.into()));
                }
            });
            Ok(Self { status, reaped })
        }

        pub(super) fn status(&self) -> io::Result<Option<ExitStatus>> {
            Ok(*self.status.borrow())
        }

        pub(super) async fn ended(&self) -> io::Result<ExitStatus> {
            let mut status = self.status.clone();
            let ended = status.wait_for(Option::is_some).await.map(|status| *status);
            ended
                .ok()
                .flatten()
                .ok_or_else(|| io::Error::other("the executor went away"))
        }

        pub(super) async fn ended_elsewhere(&self) {
            let _ = self.ended().await;
        }

        pub(super) fn unless_reaped<T>(&self, action: impl FnOnce() -> T) -> Option<T> {
            let reaped = lock(&self.reaped);
            (!*reaped).then(action)
        }

        pub(super) fn reap(&self) -> bool {
            *lock(&self.reaped)
        }
    }
}
