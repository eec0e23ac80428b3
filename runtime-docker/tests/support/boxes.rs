//! Boxes of tests on real engines: where they are made, in which ways, and what they leave on the books.
#![allow(dead_code, reason = "each test program uses a part of it")]

#[path = "ways.rs"]
pub(crate) mod ways;

use std::path::Path;

use runtime_core::cache::CacheDir;
use runtime_core::{ReapOptions, Registry, Result, RuntimeConfig, Sandbox};
use runtime_docker::{ContainerConfig, DockerConfig, EngineKind, ExecMode, PodmanConfig};
use tempfile::TempDir;

use crate::support::is_there;

pub(crate) const KINDS: [EngineKind; 2] = [EngineKind::Docker, EngineKind::Podman];

pub(crate) fn boxed(kind: EngineKind, config: ContainerConfig) -> Box<dyn RuntimeConfig> {
    match kind {
        EngineKind::Docker => DockerConfig(config).into(),
        EngineKind::Podman => PodmanConfig(config).into(),
    }
}

/// A cache of the test's own.
pub(crate) fn cache() -> TempDir {
    TempDir::with_prefix("sandbox-docker-").expect("a directory")
}

pub(crate) async fn provision(kind: EngineKind, config: ContainerConfig, cache: &TempDir) -> Result<Sandbox> {
    Sandbox::builder(boxed(kind, config))
        .cache(CacheDir::at(cache.path()))
        .provision()
        .await
}

/// Every engine that is there, in every way that is asked for.
pub(crate) fn everywhere() -> impl Iterator<Item = (EngineKind, ExecMode)> {
    const WAYS: [(ExecMode, &str); 3] = [
        (ExecMode::Guest, "socket"),
        (ExecMode::Stdio, "stdio"),
        (ExecMode::Engine, "engine"),
    ];
    KINDS
        .into_iter()
        .filter(|kind| is_there(*kind))
        .flat_map(|kind| WAYS.map(|(exec, way)| (kind, exec, way)))
        .filter(|(_, _, way)| ways::is_way_asked_for(way))
        .map(|(kind, exec, _)| (kind, exec))
}

/// The boxes that a reaper of this cache would delete or that a living process holds.
pub(crate) async fn leases(cache: &Path) -> usize {
    let options = ReapOptions {
        cache: CacheDir::at(cache),
        dry_run: true,
        ..Default::default()
    };
    let report = runtime_core::reap(&Registry::default(), options).await;
    let report = report.expect("a report");
    report.boxes.len() + report.living_boxes
}
