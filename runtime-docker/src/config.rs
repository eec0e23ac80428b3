//! Configuration of Docker and Podman boxes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path};

use runtime_core::gpu::GpuSpec;
use runtime_core::network::Policy;
use runtime_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Which engine runs the containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// Docker.
    Docker,
    /// Podman, through its Docker-compatible API.
    Podman,
}

impl EngineKind {
    /// The provider's tag.
    pub fn tag(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }

    /// The image of a configuration that names none. Podman's is fully qualified, as its short names may ask or fail.
    pub fn default_image(self) -> &'static str {
        match self {
            Self::Docker => "python:3.11-slim",
            Self::Podman => "docker.io/library/python:3.11-slim",
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Docker => "Docker",
            Self::Podman => "Podman",
        })
    }
}

/// How commands reach the container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExecMode {
    /// The guest over a socket, else over stdio, else the Engine API: the first that works on this engine.
    #[default]
    Auto,
    /// The guest, or a typed error.
    Guest,
    /// The guest over the container's stdio, as remote engines need it, or a typed error.
    Stdio,
    /// The Engine API's exec. A network policy is refused.
    Engine,
}

/// When an image is pulled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PullPolicy {
    /// Before every creation.
    Always,
    /// When the engine does not have it.
    #[default]
    Missing,
    /// Never: an image that the engine does not have is an error.
    Never,
}

/// Something of the host or of the engine that the container sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// Absolute path on the engine's host, or the name of a volume.
    pub source: String,
    /// Absolute path in the container.
    pub target: String,
    /// Whether the container can only read it.
    #[serde(default)]
    pub read_only: bool,
}

/// A limit of the container's processes, as `setrlimit` names them (`nofile`, `nproc`, `core`, …).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ulimit {
    /// Its name.
    pub name: String,
    /// The limit in force.
    pub soft: i64,
    /// How far a process may raise it. Default: `soft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hard: Option<i64>,
}

/// Configuration of a container. Used through [`DockerConfig`](crate::DockerConfig) and
/// [`PodmanConfig`](crate::PodmanConfig).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ContainerConfig {
    /// Image reference. Default: `python:3.11-slim`, for Podman fully qualified.
    pub image: Option<String>,
    /// Absolute working directory, created if missing. Default: `/app`.
    pub workdir: Option<String>,
    /// CPU cores. Default: no limit.
    pub cpu: Option<f64>,
    /// Memory in GB (2^30 bytes), a hard limit without swap. Default: no limit.
    pub memory: Option<f64>,
    /// GPUs: `2`, `A100`, `A100:2`. Default: none.
    pub gpu: Option<String>,
    /// Disk in GB. Advisory: not enforced.
    pub disk: Option<f64>,
    /// Destinations that the execution phase may reach. Default: `["*"]`, everything.
    pub allow: Vec<String>,
    /// Destinations that the execution phase may not reach. Default: none.
    pub block: Vec<String>,
    /// How commands reach the container. Default: `auto`.
    pub exec: ExecMode,
    /// When the image is pulled. Default: `missing`.
    pub pull: PullPolicy,
    /// Platform of the image, such as `linux/arm64`. Default: the engine's.
    pub platform: Option<String>,
    /// Mounts from the engine's host.
    pub mounts: Vec<Mount>,
    /// Memory file systems: absolute path in the container to mount options (`size=64m,mode=1777`, may be empty).
    pub tmpfs: BTreeMap<String, String>,
    /// `user` or `user:group`, names or numbers. Default: the image's.
    pub user: Option<String>,
    /// Labels besides our own.
    pub labels: BTreeMap<String, String>,
    /// Size of `/dev/shm` in GB. Default: the engine's, 64 MB as a rule.
    pub shm_size: Option<f64>,
    /// Most processes and threads in the container. Default: the engine's.
    pub pids_limit: Option<i64>,
    /// Limits of its processes.
    pub ulimits: Vec<Ulimit>,
    /// OCI runtime that the engine knows by this name, such as `runsc` or `kata`. Default: the engine's.
    pub oci_runtime: Option<String>,
    /// Name of the network during setup. Default: `bridge`.
    pub network: Option<String>,
    /// The engine's own init as process 1. Only with `exec = "engine"`, where nothing else reaps orphans. Default: on.
    pub init: Option<bool>,
    /// Name or id of a running container to use instead of creating one. It stays somebody else's: it is never removed,
    /// and what describes a new container is ignored but for `workdir`.
    pub container: Option<String>,
    /// Address of the engine: `unix:///path`, `tcp://host:port`. Default: as the engine's own client finds it.
    pub host: Option<String>,
}

impl Default for ContainerConfig {
    fn default() -> Self {
        Self {
            image: None,
            workdir: None,
            cpu: None,
            memory: None,
            gpu: None,
            disk: None,
            allow: vec!["*".to_owned()],
            block: Vec::new(),
            exec: ExecMode::default(),
            pull: PullPolicy::default(),
            platform: None,
            mounts: Vec::new(),
            tmpfs: BTreeMap::new(),
            user: None,
            labels: BTreeMap::new(),
            shm_size: None,
            pids_limit: None,
            ulimits: Vec::new(),
            oci_runtime: None,
            network: None,
            init: None,
            container: None,
            host: None,
        }
    }
}

/// The least memory that engines accept: 6 MB.
const LEAST_MEMORY: u64 = 6 << 20;

impl ContainerConfig {
    /// A container of this image.
    pub fn new(image: impl Into<String>) -> Self {
        Self {
            image: Some(image.into()),
            ..Self::default()
        }
    }

    /// Somebody else's running container, by name or id.
    pub fn attach(container: impl Into<String>) -> Self {
        Self {
            container: Some(container.into()),
            ..Self::default()
        }
    }

    /// The network policy as it is written.
    pub(crate) fn policy(&self) -> Policy {
        Policy::unchecked(
            self.allow.iter().map(String::as_str),
            self.block.iter().map(String::as_str),
        )
    }

    /// Whether the execution phase may not reach everything.
    pub fn is_restricted(&self) -> bool {
        self.policy().is_restricted()
    }

    /// The error for a policy that cannot be enforced for this reason.
    pub(crate) fn no_policy(&self, reason: &str) -> Error {
        let field = if self.block.is_empty() { "allow" } else { "block" };
        Error::unsupported(format!("a network policy cannot be enforced {reason}")).with_field(field)
    }

    /// Checks that a policy, if there is one, can be enforced on a box of this configuration.
    ///
    /// # Errors
    /// [`Unsupported`](runtime_core::ErrorKind::Unsupported) naming `allow` or `block`.
    pub(crate) fn check_policy(&self) -> Result<()> {
        if !self.is_restricted() {
            return Ok(());
        }
        if self.container.is_some() {
            return Err(self.no_policy("on a container that is somebody else's"));
        }
        if self.exec == ExecMode::Engine {
            return Err(self.no_policy("in engine mode, which has no guest to prove it"));
        }
        Ok(())
    }

    /// The working directory.
    pub fn workdir(&self) -> &str {
        self.workdir.as_deref().unwrap_or("/app")
    }

    /// The limit of memory in bytes.
    pub fn memory_bytes(&self) -> Option<u64> {
        self.memory.map(gigabytes)
    }

    /// The GPUs asked for.
    ///
    /// # Errors
    /// [`InvalidConfig`](runtime_core::ErrorKind::InvalidConfig) naming `gpu`.
    pub fn gpus(&self) -> Result<GpuSpec> {
        GpuSpec::parse(self.gpu.as_deref())
    }

    /// Checks every field, without I/O.
    ///
    /// # Errors
    /// [`InvalidConfig`](runtime_core::ErrorKind::InvalidConfig) naming the field.
    pub fn validate(&self) -> Result<()> {
        if let Some(image) = &self.image
            && (image.is_empty() || image.contains(|c: char| c.is_whitespace() || c.is_control()))
        {
            return Err(Error::invalid_config(
                "image",
                "an image reference is not empty and has no blanks",
            ));
        }
        absolute("workdir", self.workdir())?;
        self.policy().validate()?;
        if self.container.as_deref().is_some_and(|name| {
            name.is_empty()
                || !name
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
        }) {
            return Err(Error::invalid_config("container", "is the name or id of a container"));
        }
        for (field, value) in [
            ("cpu", self.cpu),
            ("memory", self.memory),
            ("disk", self.disk),
            ("shm_size", self.shm_size),
        ] {
            if let Some(value) = value
                && !(value.is_finite() && value > 0.0)
            {
                return Err(Error::invalid_config(
                    field,
                    format!("must be more than 0, not {value}"),
                ));
            }
        }
        if self.cpu.is_some_and(|cores| cores < 0.01) {
            return Err(Error::invalid_config("cpu", "engines take 0.01 cores at least"));
        }
        if self.memory_bytes().is_some_and(|bytes| bytes < LEAST_MEMORY) {
            return Err(Error::invalid_config("memory", "engines take 6 MB (0.006 GB) at least"));
        }
        self.gpus()?;
        if let Some(limit) = self.pids_limit.filter(|limit| *limit < 1) {
            return Err(Error::invalid_config(
                "pids_limit",
                format!("must be 1 at least, not {limit}"),
            ));
        }
        for (index, mount) in self.mounts.iter().enumerate() {
            let is_volume = !mount.source.is_empty()
                && mount
                    .source
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
            if !is_volume {
                absolute(format!("mounts[{index}].source"), &mount.source)?;
            }
            absolute(format!("mounts[{index}].target"), &mount.target)?;
        }
        for target in self.tmpfs.keys() {
            absolute("tmpfs", target)?;
        }
        for (index, ulimit) in self.ulimits.iter().enumerate() {
            if ulimit.name.is_empty() || !ulimit.name.bytes().all(|byte| byte.is_ascii_lowercase()) {
                return Err(Error::invalid_config(
                    format!("ulimits[{index}].name"),
                    "is a name such as `nofile`",
                ));
            }
        }
        for name in self.labels.keys() {
            if name.is_empty() || name.starts_with(crate::LABEL_PREFIX) {
                return Err(Error::invalid_config(
                    "labels",
                    format!("`{name}` is empty or one of our own labels"),
                ));
            }
        }
        if self
            .network
            .as_deref()
            .is_some_and(|network| network == "host" || network.starts_with("container:"))
        {
            return Err(Error::invalid_config(
                "network",
                "the container needs a network of its own",
            ));
        }
        if let Some(platform) = &self.platform
            && !(platform.split('/').count() <= 3 && platform.split('/').all(|part| !part.is_empty()))
        {
            return Err(Error::invalid_config("platform", "is `os/architecture[/variant]`"));
        }
        if self.init == Some(true) && self.exec != ExecMode::Engine {
            return Err(Error::invalid_config(
                "init",
                "the guest is process 1; `init` goes with `exec = \"engine\"`",
            ));
        }
        Ok(())
    }
}

/// Bytes of this many GB (2^30), rounded.
pub(crate) fn gigabytes(gb: f64) -> u64 {
    // A float converts to an integer by saturating.
    (gb * f64::from(1 << 30)).round() as u64
}

fn absolute(field: impl Into<std::borrow::Cow<'static, str>>, path: &str) -> Result<()> {
    let parsed = Path::new(path);
    let dotted = parsed.components().any(|part| matches!(part, Component::ParentDir));
    if !parsed.is_absolute() || dotted || path.contains(['\0', '\n']) {
        return Err(Error::invalid_config(
            field,
            format!("{path:?} must be an absolute path without `..`"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use runtime_core::ErrorKind;
    use serde_json::{Value, json};

    use super::*;

    fn parse(fields: Value) -> Result<ContainerConfig> {
        let Value::Object(fields) = fields else {
            panic!("fields")
        };
        let config: ContainerConfig = runtime_core::config::from_fields("docker", fields)?;
        config.validate()?;
        Ok(config)
    }

    #[test]
    fn the_defaults_are_valid_and_open() {
        let config = parse(json!({})).expect("defaults");
        assert_eq!(config, ContainerConfig::default());
        assert_eq!(
            (config.workdir(), config.allow.as_slice()),
            ("/app", ["*".to_owned()].as_slice())
        );
        assert_eq!(EngineKind::Podman.default_image(), "docker.io/library/python:3.11-slim");
    }

    #[test]
    fn every_bad_field_is_named() {
        for (fields, field) in [
            (json!({"image": ""}), "image"),
            (json!({"image": "a b"}), "image"),
            (json!({"workdir": "app"}), "workdir"),
            (json!({"workdir": "/a/../b"}), "workdir"),
            (json!({"cpu": 0}), "cpu"),
            (json!({"cpu": 0.001}), "cpu"),
            (json!({"memory": -1}), "memory"),
            (json!({"memory": 0.001}), "memory"),
            (json!({"memory": "2"}), "memory"),
            (json!({"disk": 0}), "disk"),
            (json!({"shm_size": -0.5}), "shm_size"),
            (json!({"gpu": "A100:x"}), "gpu"),
            (json!({"pids_limit": 0}), "pids_limit"),
            (json!({"exec": "ssh"}), "exec"),
            (json!({"pull": "maybe"}), "pull"),
            (
                json!({"mounts": [{"source": "../x", "target": "/x"}]}),
                "mounts[0].source",
            ),
            (json!({"mounts": [{"source": "/x", "target": "x"}]}), "mounts[0].target"),
            (
                json!({"mounts": [{"source": "/x", "target": "/x", "ro": true}]}),
                "mounts[0].ro",
            ),
            (json!({"tmpfs": {"tmp": ""}}), "tmpfs"),
            (json!({"ulimits": [{"name": "NOFILE", "soft": 1}]}), "ulimits[0].name"),
            (json!({"labels": {"runtime-sandbox.name": "x"}}), "labels"),
            (json!({"network": "host"}), "network"),
            (json!({"network": "container:x"}), "network"),
            (json!({"platform": "linux//arm"}), "platform"),
            (json!({"init": true}), "init"),
            (json!({"container": "a/b"}), "container"),
            (json!({"imgae": "x"}), "imgae"),
            (json!({"allow": ["a.com", "::1"]}), "allow[1]"),
            (json!({"block": ["a.com:x"]}), "block[0]"),
            (json!({"allow": ["a.com"], "block": ["b.com"]}), "block"),
        ] {
            let error = parse(fields.clone()).expect_err(&fields.to_string());
            assert_eq!(
                (error.kind(), error.field()),
                (ErrorKind::InvalidConfig, Some(field)),
                "{error}"
            );
        }
    }

    #[test]
    fn a_policy_is_refused_where_nothing_can_prove_it() {
        for (fields, field) in [
            (json!({"allow": [], "exec": "engine"}), "allow"),
            (json!({"block": ["a.com"], "container": "x"}), "block"),
        ] {
            let error = parse(fields).expect("valid").check_policy().expect_err("refused");
            assert_eq!((error.kind(), error.field()), (ErrorKind::Unsupported, Some(field)));
        }
        for fields in [
            json!({"exec": "engine"}),
            json!({"container": "x"}),
            json!({"allow": ["a.com"], "exec": "stdio"}),
        ] {
            parse(fields).expect("valid").check_policy().expect("enforceable");
        }
    }

    #[test]
    fn gigabytes_are_powers_of_two() {
        assert_eq!(gigabytes(1.0), 1 << 30);
        assert_eq!(gigabytes(0.5), 1 << 29);
        assert_eq!(gigabytes(f64::MAX), u64::MAX);
    }
}
