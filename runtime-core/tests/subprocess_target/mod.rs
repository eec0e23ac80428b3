//! The embedded runtime as a target of the conformance suite, without isolation and with it.
#![allow(dead_code, reason = "each test program uses a part of this")]

pub(crate) mod as_user;
pub(crate) mod isolation;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use runtime_core::RuntimeConfig;
use runtime_core::cache::CacheDir;
use runtime_core::conformance::{BoxRef, Target, async_trait};
use runtime_core::subprocess::SubprocessConfig;
use tempfile::TempDir;

/// Boxes in a cache directory of their own.
pub(crate) struct Subprocess {
    cache: TempDir,
    name: &'static str,
    config: SubprocessConfig,
    /// Holds the root file system that all boxes share.
    _root: Option<TempDir>,
}

impl Subprocess {
    pub(crate) fn new() -> Self {
        Self {
            cache: tempfile::tempdir().expect("a directory for the boxes"),
            name: "subprocess",
            config: SubprocessConfig::default(),
            _root: None,
        }
    }

    /// Boxes of namespaces with the host's files.
    pub(crate) fn isolated() -> Self {
        Self {
            name: "subprocess-namespaces",
            config: SubprocessConfig::namespaces(),
            ..Self::new()
        }
    }

    /// Boxes of namespaces with a root file system of busybox.
    pub(crate) fn isolated_in_directory() -> Self {
        let root = tempfile::tempdir().expect("a directory for the root");
        busybox_root(root.path());
        let mut config = SubprocessConfig::namespaces();
        config.root = root.path().to_str().expect("UTF-8").to_owned();
        Self {
            name: "subprocess-namespaces-directory",
            config,
            _root: Some(root),
            ..Self::new()
        }
    }

    /// The configuration of its boxes.
    pub(crate) fn settings(&self) -> SubprocessConfig {
        self.config.clone()
    }

    fn is_isolated(&self) -> bool {
        self.config != SubprocessConfig::default()
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.cache.path().join("runtimes/subprocess").join(name)
    }
}

/// Fills a directory with a root file system: busybox under the names of all of its programs.
pub(crate) fn busybox_root(dir: &Path) {
    let busybox = isolation::busybox().expect("these tests need a static busybox");
    for name in ["bin", "etc", "usr", "tmp", "root", "var"] {
        fs::create_dir(dir.join(name)).expect("a directory of the root");
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("a mode");
    fs::set_permissions(dir.join("tmp"), fs::Permissions::from_mode(0o1777)).expect("a mode");
    fs::copy(busybox, dir.join("bin/busybox")).expect("a copy of busybox");
    let list = std::process::Command::new(busybox)
        .arg("--list")
        .output()
        .expect("busybox");
    for applet in String::from_utf8_lossy(&list.stdout)
        .lines()
        .filter(|name| *name != "busybox")
    {
        std::os::unix::fs::symlink("busybox", dir.join("bin").join(applet)).expect("a link");
    }
    fs::write(dir.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").expect("a list of users");
    fs::write(dir.join("etc/group"), "root:x:0:\n").expect("a list of groups");
}

/// Processes that carry the box's directory in their environment, whatever group they are in. Linux only.
fn processes_of(dir: &Path) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let wanted = [b"RUNTIME_SANDBOX_DIR=", dir.as_os_str().as_encoded_bytes()].concat();
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|variable| variable == wanted))
        })
        .collect()
}

/// Process 1 of the box of namespaces whose directory this is, as this host numbers it.
pub(crate) fn processes_in(dir: &Path) -> Option<u32> {
    let keepers = processes_of(dir);
    let mut children = keepers.iter().flat_map(|pid| children_of(*pid));
    children.next()?.parse().ok()
}

fn children_of(pid: i32) -> Vec<String> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().map(str::to_owned).collect()
}

/// Whether a process is there and no zombie.
fn runs(pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status
        .rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[async_trait]
impl Target for Subprocess {
    fn name(&self) -> &str {
        self.name
    }

    fn config(&self) -> Box<dyn RuntimeConfig> {
        Box::new(self.config.clone())
    }

    fn restricted(&self, allow: &[&str]) -> Option<Box<dyn RuntimeConfig>> {
        let mut config = self.config.clone();
        config.allow = allow.iter().map(|&rule| rule.to_owned()).collect();
        Some(Box::new(config))
    }

    fn cache(&self) -> CacheDir {
        CacheDir::at(self.cache.path())
    }

    fn names_are_unique(&self) -> bool {
        true
    }

    async fn leftovers(&self, boxes: &[BoxRef]) -> Result<Vec<String>, String> {
        let mut left = Vec::new();
        for known in boxes {
            let dir = self.dir(&known.name);
            if dir.exists() {
                left.push(format!("the directory {}", dir.display()));
            }
            left.extend(
                processes_of(&dir)
                    .into_iter()
                    .map(|pid| format!("process {pid} of {}", known.name)),
            );
        }
        Ok(left)
    }

    fn can_kill_box(&self) -> bool {
        true
    }

    async fn kill_box(&self, target: &BoxRef) -> Result<(), String> {
        // What happens to a box whose directory somebody cleans up: its files go, and its programs with them. One of
        // namespaces dies with the process that keeps it.
        let dir = self.dir(&target.name);
        if self.is_isolated() {
            let keepers = processes_of(&dir);
            let inside: Vec<String> = keepers.iter().flat_map(|pid| children_of(*pid)).collect();
            for pid in keepers {
                if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
            while inside.iter().any(|pid| runs(pid)) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            return Ok(());
        }
        fs::remove_dir_all(&dir).map_err(|error| error.to_string())?;
        for pid in processes_of(&dir) {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        Ok(())
    }
}
