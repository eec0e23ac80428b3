//! An engine for the escape suite: a network of its user's on a bridge of its own.

use std::path::PathBuf;
use std::process::{ExitCode, id};

use runtime_core::cache::CacheDir;
use runtime_core::conformance::async_trait;
use runtime_core::conformance::escape::{self, Lan, Place};
use runtime_core::{RuntimeConfig, Sandbox};
use runtime_docker::{DockerConfig, EngineKind, ExecMode, PodmanConfig};
use tempfile::TempDir;

use crate::support;

#[path = "ways.rs"]
mod ways;

struct Engine {
    kind: EngineKind,
    exec: ExecMode,
    name: String,
    network: String,
    bridge: String,
    subnet: [u8; 3],
    cache: TempDir,
}

impl Engine {
    fn new(kind: EngineKind, exec: ExecMode, way: &str) -> Result<Self, String> {
        let network = format!("sandbox-escape-{}", id());
        let subnet = [10, 213, u8::try_from(id() % 251).unwrap_or_default()];
        let [a, b, c] = subnet;
        let (range, gateway) = (format!("{a}.{b}.{c}.0/24"), format!("{a}.{b}.{c}.1"));
        let mut create = vec!["network", "create", "--subnet", &range, "--gateway", &gateway];
        let mut bridge = format!("escape{}", id() % 100_000_000);
        let named = format!("com.docker.network.bridge.name={bridge}");
        if kind == EngineKind::Docker {
            create.extend([
                "-o",
                &named,
                "-o",
                "com.docker.network.bridge.enable_ip_masquerade=false",
            ]);
        }
        create.push(&network);
        support::client(kind, &create)?;
        if kind == EngineKind::Podman {
            bridge = support::client(
                kind,
                &["network", "inspect", &network, "--format", "{{.NetworkInterface}}"],
            )?;
        }
        Ok(Self {
            kind,
            exec,
            name: format!("{} over {way}", kind.tag()),
            network,
            bridge,
            subnet,
            cache: TempDir::with_prefix("sandbox-escape-").map_err(|error| error.to_string())?,
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Err(error) = support::client(self.kind, &["network", "rm", &self.network]) {
            eprintln!("the network {} is left: {error}", self.network);
        }
    }
}

#[async_trait]
impl Lan for Engine {
    fn name(&self) -> &str {
        &self.name
    }

    fn config(&self, allow: &[&str]) -> Box<dyn RuntimeConfig> {
        let mut config = support::config(self.kind, "busybox", self.exec);
        config.network = Some(self.network.clone());
        config.allow = allow.iter().map(|&rule| rule.to_owned()).collect();
        match self.kind {
            EngineKind::Docker => Box::new(DockerConfig(config)),
            EngineKind::Podman => Box::new(PodmanConfig(config)),
        }
    }

    fn cache(&self) -> CacheDir {
        CacheDir::at(self.cache.path())
    }

    fn place(&self) -> Option<Place> {
        if self.kind == EngineKind::Podman {
            // In the suite's own namespace: what stays on the bridge keeps its source, as on Docker's.
            let [a, b, c] = self.subnet;
            let range = format!("{a}.{b}.{c}.0/24");
            let rule = ["-t", "nat", "-I", "POSTROUTING", "-s", &range, "-j", "ACCEPT"];
            let done = std::process::Command::new("iptables").args(rule).status();
            assert!(done.is_ok_and(|status| status.success()), "a rule against masquerading");
        }
        let namespace = match self.kind {
            EngineKind::Docker => escape::host_namespace(),
            // Its service is started by this process, in this process's namespace.
            EngineKind::Podman => PathBuf::from(format!("/proc/{}/ns/net", id())),
        };
        Some(Place {
            namespace,
            bridge: self.bridge.clone(),
            subnet: self.subnet,
        })
    }

    async fn process(&self, sandbox: &Sandbox) -> Result<u32, String> {
        let id = sandbox.id().ok_or("no id")?;
        let pid = support::client(self.kind, &["inspect", "--format", "{{.State.Pid}}", &id])?;
        pid.parse().map_err(|_| format!("no process: {pid}"))
    }
}

/// Runs the suite on an engine, in a way.
pub(crate) fn main(kind: EngineKind, exec: ExecMode, way: &str) -> ExitCode {
    let only_lists = std::env::args().any(|argument| argument == "--list");
    let is_wanted = only_lists || (ways::is_way_asked_for(way) && support::is_there(kind));
    if !is_wanted {
        return ExitCode::SUCCESS;
    }
    escape::main(|| Ok(Box::new(Engine::new(kind, exec, way)?)))
}
