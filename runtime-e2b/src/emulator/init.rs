//! [`Init`]: process 1 of a box. It collects what others leave behind, and the kernel ends all processes of the box with it.

use std::io::{self, BufRead as _, BufReader, Read as _};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{Mode, OFlags, openat};

/// Shows the box its own processes, says so, and lives until its standard input ends, which it does with the emulator.
/// A shell that waits for one of its children collects all of them. Should somebody in the box kill that one, there is
/// another.
const PROGRAM: &str = "mount -t proc proc /proc && echo up && exec >/dev/null 2>&1 && until cat; do :; done";

#[derive(Debug)]
pub(super) struct Init {
    child: Mutex<Option<(Child, ChildStdin)>>,
    /// The processes of this machine.
    machine: OwnedFd,
}

impl Init {
    /// Starts it. The calling thread has just taken a process id namespace for its children. `machine` is a directory of
    /// the processes of this machine.
    pub(super) fn start(machine: OwnedFd) -> io::Result<Self> {
        let mut child = Command::new("/bin/sh")
            .args(["-c", PROGRAM])
            .env_clear()
            .env("PATH", super::process::SERVICE_PATH)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let mut said = String::new();
        if let Some(stdout) = stdout {
            BufReader::new(stdout).read_line(&mut said)?;
        }
        let (Some(stdin), "up\n") = (stdin, said.as_str()) else {
            let mut why = String::new();
            let _ = child.kill();
            if let Some(mut stderr) = stderr {
                let _ = stderr.read_to_string(&mut why);
            }
            let _ = child.wait();
            return Err(io::Error::other(format!(
                "process 1 of a box does not start: {}",
                why.trim()
            )));
        };
        Ok(Self {
            child: Mutex::new(Some((child, stdin))),
            machine,
        })
    }

    fn child(&self) -> MutexGuard<'_, Option<(Child, ChildStdin)>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The id by which the box knows a process of this machine, until that has been waited for.
    pub(super) fn id_inside(&self, pid: u32) -> Option<u32> {
        let status = openat(
            &self.machine,
            format!("{pid}/status"),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let mut text = [0; 4096];
        let count = rustix::io::read(status.ok()?, &mut text).ok()?;
        let text = std::str::from_utf8(&text[..count]).ok()?;
        let ids = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        ids.split_whitespace().last()?.parse().ok()
    }

    /// Kills it, and with it every process of the box.
    pub(super) fn kill(&self) {
        if let Some((child, _)) = &mut *self.child() {
            let _ = child.kill();
        }
    }

    /// Waits for its end, which is the end of all: it comes when all that were started have been waited for. Blocks.
    pub(super) fn end(&self) {
        if let Some((mut child, stdin)) = self.child().take() {
            let _ = child.kill();
            drop(stdin);
            let _ = child.wait();
        }
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        self.kill();
    }
}
