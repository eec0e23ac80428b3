//! Processes of containers as processes of this host: found, watched and signalled through procfs and pidfds.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::request::MARKER;

/// How often a group is looked for again while it still has members.
const ROUNDS: u32 = 50;

/// A process of a container, by a descriptor that keeps meaning it.
pub(crate) struct HostProcess {
    pid: Pid,
    pidfd: OwnedFd,
}

impl HostProcess {
    /// The process of this id, if it is one of this container.
    pub(crate) fn open(pid: i64, container: &str) -> Option<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
        // Looked at after it was opened: the id is its own as long as it lives.
        is_of(pid, container).then_some(Self { pid, pidfd })
    }

    /// A child of this process, for tests.
    #[cfg(test)]
    pub(super) fn of_child(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)?;
        Ok(Self { pid, pidfd })
    }

    /// Its id on this host.
    pub(crate) fn id(&self) -> i64 {
        self.pid.as_raw_nonzero().get().into()
    }

    /// Where what it has open under this number is found.
    pub(super) fn descriptor(&self, number: u32) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{number}", self.pid))
    }

    /// Its id in the container's own namespace.
    pub(crate) fn inner_pid(&self) -> Option<u32> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        field(&status, "NSpid:")?.split_whitespace().next_back()?.parse().ok()
    }

    /// Whether it has not ended.
    pub(crate) fn is_alive(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(0))
    }

    /// Waits for its end.
    pub(crate) async fn ended(&self) -> io::Result<()> {
        let watched = watch(self.pidfd.try_clone()?)?;
        let _ = watched.readable().await?;
        Ok(())
    }

    /// Signals the process group that it leads.
    pub(crate) fn signal_group(&self, signal: i32) -> rustix::io::Result<()> {
        let signal = Signal::from_named_raw(signal).ok_or(rustix::io::Errno::INVAL)?;
        if !self.is_alive() {
            return Err(rustix::io::Errno::SRCH);
        }
        rustix::process::kill_process_group(self.pid, signal)
    }
}

#[allow(
    deprecated,
    reason = "the replacement is unsafe and asks for a descriptor that stays the same, which an `OwnedFd` does"
)]
fn watch(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(pidfd, Interest::READABLE)
}

/// Whether a process of this host belongs to the container, by its control groups.
fn is_of(pid: Pid, container: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|groups| groups.contains(container))
}

/// The process with this mark that came into the container from outside: the leader of what was started with it.
/// Blocks for some milliseconds.
pub(crate) fn marked_leader(container: &str, marker: &str) -> Option<HostProcess> {
    processes().find_map(|pid| {
        let (state, group, _) = stat(pid)?;
        let is_leader = group == i64::from(pid.as_raw_nonzero().get()) && !matches!(state, 'Z' | 'X');
        let wanted = || is_of(pid, container) && is_marked(pid, marker) && is_from_outside(pid) == Some(true);
        if !is_leader || !wanted() {
            return None;
        }
        // Looked at again once a descriptor keeps its id its own.
        let process = HostProcess::open(pid.as_raw_nonzero().get().into(), container)?;
        wanted().then_some(process)
    })
}

/// Whether the parent of a process is in fewer process namespaces than itself.
fn is_from_outside(pid: Pid) -> Option<bool> {
    let status = |pid: &str| fs::read_to_string(format!("/proc/{pid}/status")).ok();
    let depth = |status: &str| Some(field(status, "NSpid:")?.split_whitespace().count());
    let own = status(&pid.to_string())?;
    Some(depth(&status(field(&own, "PPid:")?)?)? < depth(&own)?)
}

/// The value of a line of a status file.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim())
}

/// What is left of a program in a container.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Leftovers<'a> {
    /// Members of the process group that this process of the host led.
    Group(i64),
    /// Processes with this mark in sessions without a leader: members of the program's own, whose id nobody learned.
    Marked(&'a str),
}

/// Kills what is left of a program that has ended. Blocks for some milliseconds.
pub(crate) fn kill_leftovers(container: &str, leftovers: Leftovers<'_>) {
    for _ in 0..ROUNDS {
        let mut found = false;
        for pid in processes() {
            if !matches(pid, container, leftovers) {
                continue;
            }
            // Looked at again through a descriptor, so that the kill cannot hit another one.
            let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
                continue;
            };
            if matches(pid, container, leftovers) {
                found |= rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).is_ok();
            }
        }
        if !found {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn processes() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.ok()?.file_name().to_str()?.parse().ok()?))
}

/// State, process group and session of a process.
fn stat(pid: Pid) -> Option<(char, i64, i64)> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(text: &str) -> Option<(char, i64, i64)> {
    // The name in parentheses may contain anything.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.chars().next()?;
    let group = fields.nth(1)?.parse().ok()?;
    let session = fields.next()?.parse().ok()?;
    Some((state, group, session))
}

fn matches(pid: Pid, container: &str, leftovers: Leftovers<'_>) -> bool {
    let Some((state, group, session)) = stat(pid) else {
        return false;
    };
    if matches!(state, 'Z' | 'X') {
        return false;
    }
    match leftovers {
        Leftovers::Group(leader) => group == leader && is_of(pid, container),
        Leftovers::Marked(marker) => {
            let leader = i32::try_from(session).ok().and_then(Pid::from_raw);
            let led = leader
                .and_then(stat)
                .is_some_and(|(state, ..)| !matches!(state, 'Z' | 'X'));
            !led && is_of(pid, container) && is_marked(pid, marker)
        }
    }
}

fn is_marked(pid: Pid, marker: &str) -> bool {
    let wanted = format!("{MARKER}={marker}");
    fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environ| {
        environ
            .split(|byte| *byte == 0)
            .any(|variable| variable == wanted.as_bytes())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_a_status_file_is_found_by_its_name() {
        let status = "Name:\tsh\nPPid:\t17\nNSpid:\t99\t4\n";
        assert_eq!(field(status, "PPid:"), Some("17"));
        assert_eq!(field(status, "NSpid:"), Some("99\t4"));
        assert_eq!(field(status, "Pid:"), None);
        let own = rustix::process::getpid();
        assert_eq!(is_from_outside(own), Some(false));
    }

    #[test]
    fn a_name_with_parentheses_does_not_confuse_the_fields() {
        assert_eq!(parse_stat("7 (a) b) S 1 5 6 0 -1"), Some(('S', 5, 6)));
        assert_eq!(parse_stat("7 (a"), None);
    }
}
