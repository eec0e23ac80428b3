//! The conformance suite's view of an engine.

use std::process::ExitCode;
use std::sync::Arc;

use runtime_core::RuntimeConfig;
use runtime_core::cache::CacheDir;
use runtime_core::conformance::{self, BoxRef, Target, async_trait};
use runtime_docker::{DockerConfig, EngineKind, ExecMode, PodmanConfig};
use tempfile::TempDir;

use crate::support;

#[path = "ways.rs"]
mod ways;

struct Engine {
    kind: EngineKind,
    exec: ExecMode,
    name: String,
    cache: Arc<TempDir>,
    /// The engine's file system is fuse-overlayfs, which needs four bytes of each name for itself.
    has_short_names: bool,
}

impl Engine {
    fn boxed(&self, allow: &[&str]) -> Box<dyn RuntimeConfig> {
        let mut config = support::config(self.kind, "busybox", self.exec);
        if self.has_short_names {
            // That file system takes names of 251 bytes only.
            config.tmpfs.insert("/app".to_owned(), "exec,mode=755".to_owned());
        }
        config.allow = allow.iter().map(|&rule| rule.to_owned()).collect();
        match self.kind {
            EngineKind::Docker => Box::new(DockerConfig(config)),
            EngineKind::Podman => Box::new(PodmanConfig(config)),
        }
    }
}

#[async_trait]
impl Target for Engine {
    fn name(&self) -> &str {
        &self.name
    }

    fn config(&self) -> Box<dyn RuntimeConfig> {
        self.boxed(&["*"])
    }

    fn restricted(&self, allow: &[&str]) -> Option<Box<dyn RuntimeConfig>> {
        Some(self.boxed(allow))
    }

    fn patience(&self) -> u32 {
        // The Engine API takes its time for each program, and a file is several.
        if self.exec == ExecMode::Engine { 4 } else { 1 }
    }

    fn tells_of_lost_output(&self) -> bool {
        // Its sockets lose what is on the way when input is left unread.
        self.kind == EngineKind::Podman && self.exec == ExecMode::Engine
    }

    fn cache(&self) -> CacheDir {
        CacheDir::at(self.cache.path())
    }

    async fn leftovers(&self, boxes: &[BoxRef]) -> Result<Vec<String>, String> {
        let mut left = Vec::new();
        for known in boxes {
            for id in support::containers_of(self.kind, &known.name)? {
                left.push(format!("container {id} of {}", known.name));
            }
        }
        Ok(left)
    }

    fn can_kill_box(&self) -> bool {
        true
    }

    async fn kill_box(&self, target: &BoxRef) -> Result<(), String> {
        for id in support::containers_of(self.kind, &target.name)? {
            support::client(self.kind, &["kill", &id])?;
        }
        Ok(())
    }
}

/// Whether this suite is to run. `SANDBOX_TEST_SUITES` names the suites by engine and way, such as `podman/stdio`;
/// without it the engines and ways that every other test looks at are the suites' too.
fn is_wanted(kind: EngineKind, way: &str) -> bool {
    const SUITES: &str = "SANDBOX_TEST_SUITES";
    if std::env::var_os(SUITES).is_none() {
        return ways::is_way_asked_for(way) && support::is_there(kind);
    }
    let suite = format!("{}/{way}", kind.tag());
    let asked = support::is_asked_for(SUITES, &suite);
    if !asked {
        eprintln!("SKIPPED: not asked for: {SUITES} has no {suite}");
    }
    asked && support::has_images(kind)
}

/// Runs the suite on an engine, in a way.
pub(crate) fn main(kind: EngineKind, exec: ExecMode, way: &str) -> ExitCode {
    let only_lists = std::env::args().any(|argument| argument == "--list");
    let is_wanted = only_lists || is_wanted(kind, way);
    if !is_wanted {
        return ExitCode::SUCCESS;
    }
    let name = format!("{} over {way}", kind.tag());
    let cache = match tempfile::Builder::new().prefix("sandbox-conformance-").tempdir() {
        Ok(cache) => Arc::new(cache),
        Err(error) => {
            eprintln!("no directory for the cache: {error}");
            return ExitCode::FAILURE;
        }
    };
    let driver = match kind {
        EngineKind::Docker => "{{.Driver}}",
        EngineKind::Podman => "{{.Store.GraphDriverName}}",
    };
    let driver = support::client(kind, &["info", "--format", driver]);
    let has_short_names = driver.is_ok_and(|driver| driver == "fuse-overlayfs");
    let code = conformance::main({
        let cache = cache.clone();
        move || Engine {
            kind,
            exec,
            name: name.clone(),
            cache: cache.clone(),
            has_short_names,
        }
    });
    // Each box had a directory of its own there.
    let parent = cache.path().join("runtimes").join(kind.tag());
    let left: Vec<_> = std::fs::read_dir(parent).into_iter().flatten().flatten().collect();
    if !left.is_empty() {
        eprintln!("directories are left behind: {left:?}");
        return ExitCode::FAILURE;
    }
    code
}
