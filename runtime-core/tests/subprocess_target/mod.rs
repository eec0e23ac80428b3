//! The embedded runtime as a target of the conformance suite.

use std::fs;
use std::path::{Path, PathBuf};

use runtime_core::RuntimeConfig;
use runtime_core::cache::CacheDir;
use runtime_core::conformance::{BoxRef, Target, async_trait};
use runtime_core::subprocess::SubprocessConfig;
use tempfile::TempDir;

/// Boxes in a cache directory of their own.
pub(crate) struct Subprocess {
    cache: TempDir,
}

impl Subprocess {
    pub(crate) fn new() -> Self {
        Self {
            cache: tempfile::tempdir().expect("a directory for the boxes"),
        }
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.cache.path().join("runtimes/subprocess").join(name)
    }
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

fn program_exists(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

#[async_trait]
impl Target for Subprocess {
    fn name(&self) -> &str {
        "subprocess"
    }

    fn config(&self) -> Box<dyn RuntimeConfig> {
        Box::new(SubprocessConfig::default())
    }

    fn cache(&self) -> CacheDir {
        CacheDir::at(self.cache.path())
    }

    fn has_program(&self, program: &str) -> bool {
        program_exists(program)
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
        // What happens to a box whose directory somebody cleans up: its files go, and its programs with them.
        let dir = self.dir(&target.name);
        fs::remove_dir_all(&dir).map_err(|error| error.to_string())?;
        for pid in processes_of(&dir) {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        Ok(())
    }
}
