//! [`Template`]: the image and resources that boxes boot from, and its one build.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fs2::FileExt as _;
use runtime_core::cache::CacheDir;
use runtime_core::{Error, ErrorKind, Result};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::client::ControlPlane;
use crate::config::E2bConfig;
use crate::wire::template::{Build, BuildRequest, BuildState};

/// Part of the digest; raised when the build's recipe changes.
const SCHEMA: u32 = 1;

/// Directory of the locks below the cache.
const LOCKS: &str = "e2b-template-locks";

/// How often a lock that somebody else holds is tried.
const LOCK_INTERVAL: Duration = Duration::from_millis(100);

/// How often a build is asked about.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The first question comes sooner: small images are built from a cache.
const FIRST_POLL: Duration = Duration::from_millis(100);

/// How long a build may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Lines of a failed build's log that go into the error.
const SHOWN_LINES: usize = 20;

/// A template by what is in it. The same name everywhere, so that one build serves all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template {
    pub(crate) name: String,
    image: String,
    cpu_count: u32,
    memory_mb: u32,
}

impl Template {
    /// The template of a configuration.
    ///
    /// # Errors
    /// [`InvalidConfig`](ErrorKind::InvalidConfig) naming `cpu` or `memory`.
    pub(crate) fn of(config: &E2bConfig) -> Result<Self> {
        let cpu_count = cpu_count(config.cpu)?;
        let memory_mb = memory_mb(config.memory)?;
        Ok(Self {
            name: name(&config.image, config.cpu, config.memory),
            image: config.image.clone(),
            cpu_count,
            memory_mb,
        })
    }

    /// Makes sure that a ready build exists, building it if not. One build at a time on this machine; where another
    /// machine builds too, whoever wins is fine.
    pub(crate) async fn ensure(&self, api: &ControlPlane, cache: &CacheDir) -> Result<()> {
        let reference = format!("{}:default", self.name);
        // Most of the time it is there, and then no lock is needed.
        if api.template_exists(&reference).await? {
            return Ok(());
        }
        let lock = BuildLock::acquire(cache.clone(), format!("{}.lock", self.name)).await?;
        let built = async {
            if api.template_exists(&reference).await? {
                return Ok(());
            }
            match self.build(api).await {
                Ok(()) => Ok(()),
                // Another machine's build may have superseded ours and succeeded.
                Err(error) => match self.built_elsewhere(api, &reference).await {
                    true => Ok(()),
                    false => Err(error),
                },
            }
        };
        let result = built.await;
        drop(lock);
        result
    }

    async fn built_elsewhere(&self, api: &ControlPlane, reference: &str) -> bool {
        for delay in [0, 1, 2] {
            tokio::time::sleep(Duration::from_secs(delay)).await;
            if api.template_exists(reference).await.unwrap_or(false) {
                return true;
            }
        }
        false
    }

    async fn build(&self, api: &ControlPlane) -> Result<()> {
        tracing::info!(template = %self.name, image = %self.image, "e2b: building a template, once for all");
        let build = api
            .request_build(&BuildRequest {
                name: self.name.clone(),
                cpu_count: self.cpu_count,
                memory_mb: self.memory_mb,
            })
            .await?;
        api.start_build(&build, &self.image).await?;
        match tokio::time::timeout(BUILD_TIMEOUT, self.wait(api, &build)).await {
            Ok(result) => result,
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "template {} was not built within {BUILD_TIMEOUT:?}; the build goes on",
                    self.name
                ),
            )),
        }
    }

    async fn wait(&self, api: &ControlPlane, build: &Build) -> Result<()> {
        let mut log: Vec<String> = Vec::new();
        let mut lines = 0;
        let mut delay = FIRST_POLL;
        loop {
            let status = api.build_status(build, lines).await?;
            lines += status.log_entries.len();
            let full_page = status.log_entries.len() >= 100;
            for entry in status.log_entries {
                tracing::debug!(template = %self.name, level = entry.level, "{}", entry.message);
                log.push(entry.message);
            }
            if log.len() > SHOWN_LINES {
                log.drain(..log.len() - SHOWN_LINES);
            }
            match status.status {
                BuildState::Ready => return Ok(()),
                // The last lines are the ones that matter, so all of them are read first.
                BuildState::Error if full_page => continue,
                BuildState::Error => {
                    let reason = status.reason.map(|reason| reason.message).unwrap_or_default();
                    let log = if log.is_empty() {
                        String::new()
                    } else {
                        format!("; last lines of its log:\n{}", log.join("\n"))
                    };
                    return Err(Error::new(
                        ErrorKind::Other,
                        format!(
                            "template {} of image {} was not built: {reason}{log}",
                            self.name, self.image
                        ),
                    ));
                }
                BuildState::Waiting | BuildState::Building | BuildState::Unknown => {}
            }
            if !full_page {
                tokio::time::sleep(delay).await;
                delay = (delay * 2).min(POLL_INTERVAL);
            }
        }
    }
}

fn cpu_count(cpu: f64) -> Result<u32> {
    let refuse = |why: &str| Err(Error::invalid_config("cpu", format!("E2B boxes {why}, not {cpu}")));
    if !(1.0..=1024.0).contains(&cpu) {
        return refuse("have at least 1 core");
    }
    if cpu.fract() != 0.0 {
        return refuse("require whole CPU cores");
    }
    // In range, and whole.
    let count = cpu as u32;
    if count != 1 && count % 2 == 1 {
        return refuse("require 1 or an even number of cores");
    }
    Ok(count)
}

fn memory_mb(memory: f64) -> Result<u32> {
    let refuse = |why: &str| {
        Err(Error::invalid_config(
            "memory",
            format!("E2B boxes {why}, not {memory} GB"),
        ))
    };
    if !(0.125..=4096.0).contains(&memory) {
        return refuse("have at least 0.125 GB");
    }
    let megabytes = memory * 1024.0;
    if megabytes.fract() != 0.0 || megabytes % 2.0 != 0.0 {
        return refuse("must resolve to an even whole number of MB");
    }
    Ok(megabytes as u32)
}

/// The name that every tool derives for the same image and resources. Keys are in the order of the alphabet, numbers
/// are floats.
fn name(image: &str, cpu: f64, memory: f64) -> String {
    #[derive(Serialize)]
    struct Key<'a> {
        cpu: f64,
        image: &'a str,
        memory: f64,
        schema: u32,
    }
    let key = Key {
        cpu,
        image,
        memory,
        schema: SCHEMA,
    };
    let text = serde_json::to_vec(&key).expect("plain data");
    let digest = Sha256::digest(&text);
    let hex: String = digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    format!("vf-{hex}")
}

/// The lock of a build, held by an open file: it goes with the process.
#[derive(Debug)]
struct BuildLock {
    _file: File,
}

impl BuildLock {
    /// Waits for the lock without holding a thread.
    async fn acquire(cache: CacheDir, name: String) -> Result<Self> {
        let opened = tokio::task::spawn_blocking(move || {
            let path = cache.create_dir(LOCKS)?.join(name);
            let file = open_private(&path)
                .map_err(|error| Error::io(format_args!("opening the lock {}", path.display()), error))?;
            Ok((file, path))
        });
        let (file, path): (File, PathBuf) = match opened.await {
            Ok(opened) => opened?,
            Err(error) => return Err(Error::new(ErrorKind::Cancelled, "the lock was not opened").with_source(error)),
        };
        loop {
            match file.try_lock_exclusive() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(error) if error.raw_os_error() == fs2::lock_contended_error().raw_os_error() => {
                    tokio::time::sleep(LOCK_INTERVAL).await;
                }
                Err(error) => return Err(Error::io(format_args!("locking {}", path.display()), error)),
            }
        }
    }
}

fn open_private(path: &std::path::Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_other_tools_derive() {
        assert_eq!(name("python:3.11-slim", 2.0, 1.0), "vf-0b8d428bf0aac599a412420e");
        assert_eq!(name("ubuntu:22.04", 4.0, 0.5), "vf-f41ac2db68d727ad2323baf4");
    }

    #[test]
    fn resources_become_what_the_provider_counts_in() {
        let template = |cpu, memory| {
            Template::of(&E2bConfig {
                cpu,
                memory,
                ..E2bConfig::default()
            })
        };
        for (cpu, memory, wanted) in [(1.0, 1.0, (1, 1024)), (4.0, 0.5, (4, 512)), (2.0, 0.125, (2, 128))] {
            let template = template(cpu, memory).expect("fine");
            assert_eq!((template.cpu_count, template.memory_mb), wanted);
        }
        for cpu in [0.0, 0.5, 2.5, 3.0, -2.0, f64::NAN, f64::INFINITY] {
            assert_eq!(template(cpu, 1.0).expect_err("refused").field(), Some("cpu"), "{cpu}");
        }
        for memory in [0.0, 0.1, 0.126, 0.3, f64::NAN] {
            assert_eq!(
                template(2.0, memory).expect_err("refused").field(),
                Some("memory"),
                "{memory}"
            );
        }
    }
}
