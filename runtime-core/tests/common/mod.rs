//! Children of tests, and what boxes of the embedded runtime leave behind.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Tells a child of a test which cache directory to work in.
pub(crate) const CACHE: &str = "LEASE_TEST_CACHE";
/// Tells it what to do.
pub(crate) const ROLE: &str = "LEASE_TEST_ROLE";

/// The role and the cache directory, in a child.
pub(crate) fn role() -> Option<(String, PathBuf)> {
    let role = std::env::var(ROLE).ok()?;
    Some((role, std::env::var_os(CACHE)?.into()))
}

/// This test program, to run the test `name` alone, in a role.
pub(crate) fn child(name: &str, role: &str, cache: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture", "--quiet"])
        .env(ROLE, role)
        .env(CACHE, cache)
        .env("VF_RUN_ID", "lease-test")
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command
}

/// What is left of boxes in a cache, but for those of these names: directories, claims, journals, processes.
pub(crate) fn leftovers(cache: &Path, spared: &[&str]) -> Vec<String> {
    let is_spared = |text: &str| spared.iter().any(|name| text.ends_with(name));
    let mut left = Vec::new();
    for dir in ["runtimes/subprocess", "leases"] {
        let entries = std::fs::read_dir(cache.join(dir)).into_iter().flatten();
        let paths = entries.map(|entry| entry.unwrap().path().display().to_string());
        left.extend(paths.filter(|path| !is_spared(path)));
    }
    left.extend(
        processes(cache)
            .into_iter()
            .filter(|(_, dir)| !is_spared(dir))
            .map(|(pid, dir)| format!("{pid} of {dir}")),
    );
    left
}

/// The programs that run in boxes of a cache, each with the directory of its box.
pub(crate) fn processes(cache: &Path) -> Vec<(String, String)> {
    let marker = format!("RUNTIME_SANDBOX_DIR={}", cache.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap() {
        let path = entry.unwrap().path();
        let Ok(environ) = std::fs::read(path.join("environ")) else {
            continue;
        };
        for variable in environ
            .split(|byte| *byte == 0)
            .filter(|v| v.starts_with(marker.as_bytes()))
        {
            found.push((
                path.display().to_string(),
                String::from_utf8_lossy(variable).into_owned(),
            ));
        }
    }
    found
}
