//! Finding what left its process group, by a variable in its environment. Linux only.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::{Error, ErrorKind, Result};

/// How often the process table is searched before the rest is reported: something may fork faster than it is killed.
const ROUNDS: u32 = 200;

/// Kills every process of ours whose environment carries `name=dir`, until none is found.
///
/// # Errors
/// [`ResourceExhausted`](ErrorKind::ResourceExhausted) when new ones keep appearing.
pub(crate) fn kill_marked(name: &str, dir: &Path) -> Result<()> {
    let mut wanted = format!("{name}=").into_bytes();
    wanted.extend_from_slice(dir.as_os_str().as_encoded_bytes());
    for round in 0..ROUNDS {
        let mut found = 0;
        for pid in processes().map_err(|error| Error::io("reading /proc", error))? {
            // The descriptor pins the process: between the look and the kill its id cannot change hands.
            let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else {
                continue;
            };
            if is_marked(pid, &wanted) {
                found += 1;
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
            }
        }
        if found == 0 {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(if round < 20 { 2 } else { 20 }));
    }
    Err(Error::new(
        ErrorKind::ResourceExhausted,
        "processes of the sandbox appear faster than they are killed",
    ))
}

fn processes() -> io::Result<Vec<Pid>> {
    let own = std::process::id();
    let names = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    Ok(names
        .filter(|pid| pid.unsigned_abs() != own)
        .filter_map(Pid::from_raw)
        .collect())
}

/// Other users' processes cannot be read, and are not ours. Neither have zombies an environment.
fn is_marked(pid: Pid, wanted: &[u8]) -> bool {
    let Ok(environ) = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())) else {
        return false;
    };
    environ.split(|byte| *byte == 0).any(|variable| variable == wanted)
}
