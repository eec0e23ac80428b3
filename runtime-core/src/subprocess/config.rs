//! Configuration of the embedded runtime.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::capability::{Capabilities, Egress, Expose};
use crate::config::{RuntimeConfig, from_fields, tagged};
use crate::error::{Error, Result};
use crate::network::Policy;
use crate::registry::{Orphan, Provider};
use crate::runtime::{BoxSpec, Runtime};
use crate::subprocess::runtime::{CLAIM, DIR, OwnerIs, SubprocessRuntime, delete_directory};

pub(crate) const TAG: &str = "subprocess";

/// What a box of the embedded runtime is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Isolation {
    /// A directory and process groups: nothing is kept from its programs.
    #[default]
    None,
    /// Namespaces of its own for users, processes, mounts, network, IPC and host name: see
    /// [`isolation`](crate::subprocess::isolation). Linux, with the feature `isolation`.
    Namespaces,
}

/// Which network the setup of a box of namespaces has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SetupNetwork {
    /// The box's own, with the proxy as the one way out, open to everything but this host's loopback.
    #[default]
    Proxy,
    /// This host's, raw: see [`isolation`](crate::subprocess::isolation#setup-on-the-hosts-network). Less isolated, and no
    /// process of the setup outlives it.
    Host,
}

/// Configuration of the embedded runtime.
///
/// All fields but `isolation` need `isolation = "namespaces"`, and are refused without it.
///
/// ```
/// use runtime_core::{RuntimeConfig, subprocess::SubprocessConfig};
/// assert_eq!(SubprocessConfig::default().to_value(), serde_json::json!({"type": "subprocess"}));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct SubprocessConfig {
    /// What a box is. Default: `none`.
    #[serde(skip_serializing_if = "is_default")]
    pub isolation: Isolation,
    /// What the box has as its root: `host`, the files of this machine, read-only and without what is hidden; or the
    /// absolute path of a directory with a root file system, which all boxes share and none changes. Default: `host`.
    #[serde(skip_serializing_if = "is_host")]
    pub root: String,
    /// Absolute paths of this machine that the box sees, read-only, although they are hidden by default or not part of
    /// its root. Default: none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expose_paths: Vec<String>,
    /// Absolute paths of this machine that the box sees and may change, as far as its user may. Default: none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub writable_paths: Vec<String>,
    /// Destinations that the execution phase may reach, through the proxy: see [`network`](crate::network). Default:
    /// `["*"]`, everything. In setup a box reaches everything in any case.
    #[serde(skip_serializing_if = "is_everything")]
    pub allow: Vec<String>,
    /// Destinations that the execution phase must not reach. Default: none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub block: Vec<String>,
    /// Which network the programs of setup have. Default: `proxy`.
    #[serde(skip_serializing_if = "is_proxy")]
    pub setup_network: SetupNetwork,
    /// Processor cores that the box's processes use together at most; fractions are fine. Needs a cgroup of version 2 that
    /// was delegated to the owner, and is refused where there is none: see
    /// [`isolation`](crate::subprocess::isolation#limits). Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<f64>,
    /// Memory of the whole box, in GB, where there is a delegated cgroup of version 2; elsewhere the address space of each
    /// program, and the most that the box's files in memory take. Default: no limit for programs, 4 GB for files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<f64>,
    /// Processor time of each process, in seconds; it is killed when it is used up. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_seconds: Option<u64>,
    /// Processes and threads of the box at once. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids_limit: Option<u64>,
    /// Size of a file that a program writes, in GB. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_size: Option<f64>,
}

/// The kernel gives a group no less than 1 ms of 100.
const LEAST_CPU: f64 = 0.01;

/// The value of `root` for the files of this machine.
pub(crate) const HOST: &str = "host";

fn is_default(isolation: &Isolation) -> bool {
    *isolation == Isolation::default()
}

fn is_proxy(network: &SetupNetwork) -> bool {
    *network == SetupNetwork::default()
}

fn is_host(root: &str) -> bool {
    root == HOST
}

fn is_everything(allow: &[String]) -> bool {
    allow == ["*"]
}

impl Default for SubprocessConfig {
    fn default() -> Self {
        Self {
            isolation: Isolation::default(),
            root: HOST.to_owned(),
            expose_paths: Vec::new(),
            writable_paths: Vec::new(),
            allow: vec!["*".to_owned()],
            block: Vec::new(),
            setup_network: SetupNetwork::default(),
            cpu: None,
            memory: None,
            cpu_seconds: None,
            pids_limit: None,
            file_size: None,
        }
    }
}

impl SubprocessConfig {
    /// Boxes of namespaces, with the files of this machine.
    pub fn namespaces() -> Self {
        Self {
            isolation: Isolation::Namespaces,
            ..Self::default()
        }
    }

    /// The directory that is the root, unless it is the host's.
    pub(crate) fn root_directory(&self) -> Option<&Path> {
        (self.root != HOST).then_some(Path::new(&self.root))
    }

    /// The first field that says something about a box that has none of it.
    fn idle_field(&self) -> Option<&'static str> {
        let default = Self::default();
        [
            ("root", self.root != default.root),
            ("expose_paths", self.expose_paths != default.expose_paths),
            ("writable_paths", self.writable_paths != default.writable_paths),
            ("setup_network", self.setup_network != default.setup_network),
            ("cpu", self.cpu.is_some()),
            ("memory", self.memory.is_some()),
            ("cpu_seconds", self.cpu_seconds.is_some()),
            ("pids_limit", self.pids_limit.is_some()),
            ("file_size", self.file_size.is_some()),
        ]
        .into_iter()
        .find_map(|(field, is_set)| is_set.then_some(field))
    }

    fn network_policy(&self) -> Policy {
        let (allow, block) = (self.allow.iter(), self.block.iter());
        Policy::unchecked(allow.map(String::as_str), block.map(String::as_str))
    }

    fn check_fields(&self) -> Result<()> {
        self.network_policy().validate()?;
        if self.isolation == Isolation::None {
            if self.network_policy().is_restricted() {
                let field = if self.block.is_empty() { "allow" } else { "block" };
                let message = "a box of the embedded runtime has the host's network, which nobody can restrict; with \
                               `isolation = \"namespaces\"` it has one of its own";
                return Err(Error::unsupported(message).with_field(field));
            }
            return match self.idle_field() {
                Some(field) => Err(Error::invalid_config(
                    field,
                    "a box of the embedded runtime has this only with `isolation = \"namespaces\"`",
                )),
                None => Ok(()),
            };
        }
        if let Some(root) = self.root_directory() {
            absolute("root", root, "`host`, or the absolute path of a directory")?;
        }
        for (field, paths) in [
            ("expose_paths", &self.expose_paths),
            ("writable_paths", &self.writable_paths),
        ] {
            for (index, path) in paths.iter().enumerate() {
                absolute(
                    format!("{field}[{index}]"),
                    Path::new(path),
                    "an absolute path without `..`, and not `/`",
                )?;
            }
        }
        for (field, gigabytes) in [("memory", self.memory), ("file_size", self.file_size)] {
            if gigabytes.is_some_and(|value| !(value.is_finite() && value > 0.0)) {
                return Err(Error::invalid_config(field, "is a number of GB, more than 0"));
            }
        }
        if self.cpu.is_some_and(|cores| !(cores.is_finite() && cores >= LEAST_CPU)) {
            return Err(Error::invalid_config(
                "cpu",
                format!("is a number of cores, {LEAST_CPU} at least"),
            ));
        }
        for (field, number) in [("cpu_seconds", self.cpu_seconds), ("pids_limit", self.pids_limit)] {
            if number == Some(0) {
                return Err(Error::invalid_config(field, "must be 1 at least"));
            }
        }
        Ok(())
    }
}

/// Checks that a path is absolute, leads somewhere and does not go up.
fn absolute(field: impl Into<std::borrow::Cow<'static, str>>, path: &Path, what: &'static str) -> Result<()> {
    use std::path::Component;
    let mut components = path.components();
    let is_fine = components.next() == Some(Component::RootDir)
        && path.components().count() > 1
        && components.all(|component| matches!(component, Component::Normal(_)))
        && !path.as_os_str().as_encoded_bytes().contains(&0);
    match is_fine {
        true => Ok(()),
        false => Err(Error::invalid_config(field, format!("must be {what}"))),
    }
}

impl RuntimeConfig for SubprocessConfig {
    fn tag(&self) -> &'static str {
        TAG
    }

    fn validate(&self) -> Result<()> {
        self.check_fields()?;
        #[cfg(not(all(feature = "isolation", target_os = "linux")))]
        if self.isolation != Isolation::None {
            let message = "`namespaces` needs Linux and the feature `isolation` of `runtime-core`";
            return Err(Error::unsupported(message).with_field("isolation"));
        }
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        match self.isolation {
            Isolation::None => CAPABILITIES,
            Isolation::Namespaces => ISOLATED,
        }
    }

    fn policy(&self) -> Option<Policy> {
        (self.isolation == Isolation::Namespaces).then(|| self.network_policy())
    }

    fn cuts_always(&self) -> bool {
        self.setup_network == SetupNetwork::Host
    }

    fn to_value(&self) -> Value {
        tagged(TAG, self)
    }

    fn build(&self, spec: BoxSpec) -> Result<Arc<dyn Runtime>> {
        self.validate()?;
        match self.isolation {
            #[cfg(all(feature = "isolation", target_os = "linux"))]
            Isolation::Namespaces => Ok(Arc::new(super::isolation::IsolatedRuntime::new(self.clone(), spec)?)),
            _ => Ok(Arc::new(SubprocessRuntime::new(spec)?)),
        }
    }

    fn provider(&self) -> Option<Arc<dyn Provider>> {
        Some(Arc::new(SubprocessProvider))
    }

    fn boxed_clone(&self) -> Box<dyn RuntimeConfig> {
        Box::new(self.clone())
    }
}

/// The largest argument or variable that Linux takes: 32 pages, the final NUL included.
const MAX_ARGUMENT: u64 = if cfg!(target_os = "linux") {
    (128 << 10) - 1
} else {
    (256 << 10) - 1
};

pub(crate) const CAPABILITIES: Capabilities = Capabilities {
    local: true,
    live_processes: true,
    stdin_eof: true,
    group_signals: true,
    kills_leftovers: true,
    // What left its group is found by a marker in its environment, which only Linux shows.
    kills_escaped: cfg!(all(target_os = "linux", not(portable_processes))),
    back_pressure: true,
    independent_streams: true,
    non_utf8_argv: true,
    non_utf8_paths: true,
    exit_signals: true,
    program_exit_signals: true,
    start_failures: true,
    max_argument_bytes: Some(MAX_ARGUMENT),
    atomic_write: true,
    file_modes: true,
    symlinks: true,
    special_file_reads: true,
    inherits_host_env: true,
    expose: Expose::AnyPort,
    ..Capabilities::minimal()
};

/// A box of namespaces.
pub(crate) const ISOLATED: Capabilities = Capabilities {
    // Whatever left its group is in the box's own process namespace.
    kills_escaped: true,
    max_argv_bytes: Some(3 << 19),
    inherits_host_env: false,
    private_filesystem: true,
    egress: Egress::Enforced,
    ..CAPABILITIES
};

/// What a lease calls the cgroup of a box.
pub(crate) const CGROUP: &str = "cgroup";

/// Removes the cgroup of a dead owner's box.
#[cfg(all(feature = "isolation", target_os = "linux"))]
async fn remove_group(group: std::path::PathBuf) -> Result<()> {
    super::runtime::blocking(move || super::isolation::cgroup::remove(&group)).await
}

#[cfg(not(all(feature = "isolation", target_os = "linux")))]
async fn remove_group(_: std::path::PathBuf) -> Result<()> {
    Err(Error::unsupported(
        "the box has a cgroup, which the feature `isolation` of `runtime-core` removes",
    ))
}

/// The embedded runtime as a [`Provider`].
#[derive(Debug, Clone, Copy, Default)]
pub struct SubprocessProvider;

#[async_trait]
impl Provider for SubprocessProvider {
    fn tag(&self) -> &'static str {
        TAG
    }

    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn parse(&self, fields: Map<String, Value>) -> Result<Box<dyn RuntimeConfig>> {
        Ok(Box::new(from_fields::<SubprocessConfig>(TAG, fields)?))
    }

    async fn delete_orphan(&self, orphan: &Orphan) -> Result<()> {
        let fact = |name: &'static str| {
            let missing = || Error::invalid_argument("context", format!("the lease does not say the box's `{name}`"));
            orphan.context.get(name).ok_or_else(missing)
        };
        delete_directory(&orphan.name, Path::new(fact(DIR)?), fact(CLAIM)?, OwnerIs::Dead).await?;
        match orphan.context.get(CGROUP) {
            Some(group) => remove_group(group.into()).await,
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use serde_json::json;

    fn checked(value: Value) -> Result<SubprocessConfig> {
        let Value::Object(fields) = value else { unreachable!() };
        from_fields::<SubprocessConfig>(TAG, fields).and_then(|config| config.check_fields().map(|()| config))
    }

    #[test]
    fn what_needs_isolation_is_refused_by_its_name_without_it() {
        for (field, value) in [
            ("root", json!("/srv/root")),
            ("expose_paths", json!(["/opt"])),
            ("writable_paths", json!(["/opt"])),
            ("setup_network", json!("host")),
            ("cpu", json!(1.5)),
            ("memory", json!(1.0)),
            ("cpu_seconds", json!(1)),
            ("pids_limit", json!(10)),
            ("file_size", json!(0.5)),
        ] {
            let error = checked(json!({field: value})).expect_err(field);
            assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidConfig, Some(field)));
            checked(json!({field: value, "isolation": "namespaces"})).expect(field);
        }
        for (field, value) in [
            ("allow", json!([])),
            ("allow", json!(["a.com"])),
            ("block", json!(["a.com"])),
        ] {
            let error = checked(json!({field: value})).expect_err(field);
            assert_eq!((error.kind(), error.field()), (ErrorKind::Unsupported, Some(field)));
            let config = checked(json!({field: value, "isolation": "namespaces"})).expect(field);
            assert!(config.policy().is_some_and(|policy| policy.is_restricted()));
        }
        assert!(SubprocessConfig::default().policy().is_none());
        checked(json!({"allow": ["*"], "block": [], "root": "host", "isolation": "none"})).expect("what it is anyway");
    }

    #[test]
    fn a_value_that_cannot_be_is_refused_by_its_place() {
        for (fields, place) in [
            (json!({"root": "relative"}), "root"),
            (json!({"root": "/"}), "root"),
            (json!({"root": "/srv/../etc"}), "root"),
            (json!({"expose_paths": ["/opt", "opt"]}), "expose_paths[1]"),
            (json!({"writable_paths": ["/"]}), "writable_paths[0]"),
            (json!({"memory": 0.0}), "memory"),
            (json!({"file_size": -1.0}), "file_size"),
            (json!({"cpu": 0.0}), "cpu"),
            (json!({"cpu": 0.001}), "cpu"),
            (json!({"setup_network": "bridge"}), "setup_network"),
            (json!({"cpu_seconds": 0}), "cpu_seconds"),
            (json!({"pids_limit": 0}), "pids_limit"),
            (json!({"allow": ["::1"]}), "allow[0]"),
            (json!({"isolation": "vm"}), "isolation"),
        ] {
            let mut fields = fields;
            if fields.get("isolation").is_none() {
                fields["isolation"] = json!("namespaces");
            }
            let error = checked(fields.clone()).expect_err(&fields.to_string());
            assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidConfig, Some(place)));
        }
    }

    #[test]
    fn a_config_says_only_what_is_not_the_default() {
        let config = SubprocessConfig::namespaces();
        assert_eq!(
            config.to_value(),
            json!({"type": "subprocess", "isolation": "namespaces"})
        );
    }
}
