//! [`Home`]: the directory of an emulator, and what is left of emulators that were killed.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use fs2::FileExt as _;
use runtime_core::names::random_hex;
use rustix::process::{Pid, Signal, kill_process};

const PREFIX: &str = "e2b-emulator-";

/// Held by the emulator that owns the directory.
const LOCK: &str = "lock";

/// A directory of an emulator's own below the system's for temporary files, removed with it.
#[derive(Debug)]
pub(super) struct Home {
    dir: PathBuf,
    _lock: File,
}

impl Home {
    /// Makes one, after removing those whose emulators are dead.
    pub(super) fn new() -> io::Result<Self> {
        let parent = std::env::temp_dir();
        sweep(&parent);
        let dir = parent.join(format!("{PREFIX}{}", random_hex(16)));
        std::fs::create_dir(&dir)?;
        let made = || {
            // It is locked before it has its name, so that nobody finds it unlocked.
            let unnamed = dir.join("lock.new");
            let lock = File::create(&unnamed)?;
            lock.lock_exclusive()?;
            std::fs::rename(unnamed, dir.join(LOCK))?;
            Ok(lock)
        };
        match made() {
            Ok(lock) => Ok(Self { dir, _lock: lock }),
            Err(error) => {
                let _ = std::fs::remove_dir_all(&dir);
                Err(error)
            }
        }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Removes what killed emulators left: their boxes' processes, and their directories.
fn sweep(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.filter_map(Result::ok) {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let dir = entry.path();
        // One without a lock is being made.
        let is_lock = std::fs::symlink_metadata(dir.join(LOCK)).is_ok_and(|found| found.is_file());
        let Some(lock) = is_lock.then(|| File::open(dir.join(LOCK)).ok()).flatten() else {
            continue;
        };
        if lock.try_lock_exclusive().is_err() {
            continue;
        }
        end_processes(&dir);
        let _ = std::fs::remove_dir_all(&dir);
    }
}

/// Ends the processes of the boxes that had their files below this directory.
fn end_processes(dir: &Path) {
    let boxes: Vec<String> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .map(|id| format!("{}={id}", super::place::MARKER))
        .collect();
    let mount = format!("upperdir={}/", dir.display());
    let own = std::process::id();
    // Until none is found: they may fork meanwhile.
    for _ in 0..100 {
        let mut found = false;
        for entry in std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok) {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            if u32::try_from(pid) == Ok(own) {
                continue;
            }
            let has_mount =
                || std::fs::read_to_string(entry.path().join("mountinfo")).is_ok_and(|text| text.contains(&mount));
            let has_marker = || {
                std::fs::read(entry.path().join("environ")).is_ok_and(|environ| {
                    environ
                        .split(|byte| *byte == 0)
                        .any(|variable| boxes.iter().any(|marker| marker.as_bytes() == variable))
                })
            };
            let is_zombie = std::fs::read_to_string(entry.path().join("stat"))
                .is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')));
            if !is_zombie && (has_marker() || has_mount()) {
                found = true;
                if let Some(pid) = Pid::from_raw(pid) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
        if !found {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
