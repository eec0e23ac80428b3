//! Configuration of E2B boxes, and where the provider is reached.

use std::sync::Arc;

use async_trait::async_trait;
use runtime_core::config::{from_fields, tagged};
use runtime_core::network::Policy;
use runtime_core::{
    BoxSpec, Capabilities, Egress, Error, Expose, Orphan, Pacing, Provider, Result, Runtime, RuntimeConfig,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::api_key::ApiKey;
use crate::egress;
use crate::endpoints::{Endpoints, Variables};
use crate::runtime::E2bRuntime;
use crate::template::Template;

pub(crate) const TAG: &str = "e2b";

/// The port that services for the outside listen on by convention.
pub(crate) const SERVICE_PORT: u16 = 8000;

/// Longest life of a box on the paid plan.
const DEFAULT_TIMEOUT: u64 = 86_400;

/// Configuration of E2B boxes.
///
/// ```
/// use runtime_core::RuntimeConfig;
/// use runtime_e2b::E2bConfig;
///
/// let config = E2bConfig { image: "debian:12".into(), cpu: 4.0, ..E2bConfig::default() };
/// config.validate().unwrap();
/// let error = E2bConfig { cpu: 3.0, ..E2bConfig::default() }.validate().unwrap_err();
/// assert_eq!(error.field(), Some("cpu"));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct E2bConfig {
    /// A public, Debian-based image; its template is built at first use. Default: `python:3.11-slim`.
    pub image: String,
    /// Absolute working directory. Default: `/app`.
    pub workdir: Option<String>,
    /// Cores: 1 or an even number. Default: 2.
    pub cpu: f64,
    /// Memory in GB (1024 MB); an even number of MB, at least 0.125. Default: 1.
    pub memory: f64,
    /// Disk in GB. Advisory: the provider decides. Default: 5.
    pub disk: f64,
    /// Creations per second for all processes of a run together; null or 0 for no limit. Default: 1.
    pub creates_per_sec: Option<f64>,
    /// What may be reached in the execution phase: addresses, networks, host names. Default: `["*"]`.
    pub allow: Vec<String>,
    /// What may not be: addresses and networks. Default: nothing.
    pub block: Vec<String>,
    /// The life of the box in seconds, after which the provider deletes it. Default: 86,400, which needs the paid plan.
    pub timeout: u64,
    /// Run programs through `bash -l`, for templates whose `PATH` exists only in a login profile. Default: false.
    pub login_shell: bool,
    /// The API key. Default: `$E2B_API_KEY`. Never written out with the configuration.
    #[serde(skip_serializing)]
    pub api_key: Option<ApiKey>,
    /// Domain of the service. Default: `$E2B_DOMAIN`, else `e2b.app`.
    pub domain: Option<String>,
    /// Base URL of the control plane. Default: `$E2B_API_URL`, else `https://api.<domain>`.
    pub api_url: Option<String>,
    /// Base URL of envd, for every box. Default: `$E2B_SANDBOX_URL`, else a host per box.
    pub sandbox_url: Option<String>,
    /// URL of a port of a box, with `{port}` and perhaps `{id}` and `{domain}` in it. Default: `https://{port}-{id}.{domain}`.
    pub port_url: Option<String>,
}

impl Default for E2bConfig {
    fn default() -> Self {
        Self {
            image: "python:3.11-slim".into(),
            workdir: None,
            cpu: 2.0,
            memory: 1.0,
            disk: 5.0,
            creates_per_sec: Some(1.0),
            allow: vec!["*".into()],
            block: Vec::new(),
            timeout: DEFAULT_TIMEOUT,
            login_shell: false,
            api_key: None,
            domain: None,
            api_url: None,
            sandbox_url: None,
            port_url: None,
        }
    }
}

impl E2bConfig {
    pub(crate) fn workdir_or_default(&self) -> &str {
        self.workdir.as_deref().unwrap_or("/app")
    }

    fn validate_fields(&self) -> Result<()> {
        let refuse = |field: &'static str, message: String| Err(Error::invalid_config(field, message));
        if self.image.is_empty() || !self.image.bytes().all(|byte| byte.is_ascii_graphic()) {
            return refuse("image", format!("{:?} is no reference of an image", self.image));
        }
        let workdir = self.workdir_or_default();
        if !workdir.starts_with('/') || workdir.contains('\0') || workdir.split('/').any(|part| part == "..") {
            return refuse(
                "workdir",
                format!("{workdir:?} must be an absolute path without \"..\""),
            );
        }
        Template::of(self)?;
        if !(self.disk > 0.0 && self.disk.is_finite()) {
            return refuse("disk", format!("disk must be positive, not {}", self.disk));
        }
        if self.creates_per_sec.is_some_and(|rate| !rate.is_finite()) {
            return refuse("creates_per_sec", "the rate must be a number".into());
        }
        if !(1..=i32::MAX as u64).contains(&self.timeout) {
            return refuse(
                "timeout",
                format!("the life of a box is 1 to {} seconds, not {}", i32::MAX, self.timeout),
            );
        }
        if self.api_key.as_ref().is_some_and(|key| !key.is_well_formed()) {
            return refuse("api_key", "the key is empty or has characters that no key has".into());
        }
        Endpoints::resolve(self, &Variables::default())?;
        egress::validate(&self.allow, &self.block)
    }
}

pub(crate) fn capabilities(timeout: u64) -> Capabilities {
    let mut can = Capabilities::minimal();
    can.live_processes = true;
    can.stdin_eof = true;
    can.group_signals = true;
    can.back_pressure = true;
    can.exit_signals = true;
    can.max_argument_bytes = Some((128 << 10) - 1);
    can.atomic_write = true;
    can.file_modes = true;
    can.symlinks = true;
    can.special_file_reads = true;
    can.private_filesystem = true;
    can.expose = Expose::AnyPort;
    can.egress = Egress::EnforcedByProvider {
        exceptions: egress::EXCEPTIONS,
    };
    can.pause = true;
    can.max_lifetime_seconds = Some(timeout);
    can
}

impl RuntimeConfig for E2bConfig {
    fn tag(&self) -> &'static str {
        TAG
    }

    fn validate(&self) -> Result<()> {
        self.validate_fields().map_err(|error| error.with_provider(TAG))
    }

    fn capabilities(&self) -> Capabilities {
        capabilities(self.timeout)
    }

    fn policy(&self) -> Option<Policy> {
        let policy = Policy::unchecked(
            self.allow.iter().map(String::as_str),
            self.block.iter().map(String::as_str),
        );
        // Lists that exclude each other were refused before anybody asks.
        policy.normalized().ok()
    }

    fn pacing(&self) -> Option<Pacing> {
        let per_second = self.creates_per_sec.filter(|rate| *rate > 0.0)?;
        Some(Pacing {
            bucket: "e2b-sandbox",
            per_second,
        })
    }

    fn to_value(&self) -> Value {
        tagged(TAG, self)
    }

    fn build(&self, spec: BoxSpec) -> Result<Arc<dyn Runtime>> {
        let endpoints = Endpoints::resolve(self, &Variables::from_env())?;
        Ok(Arc::new(E2bRuntime::new(self.clone(), endpoints, spec)?))
    }

    fn provider(&self) -> Option<Arc<dyn Provider>> {
        Some(Arc::new(Configured(self.clone())))
    }

    fn boxed_clone(&self) -> Box<dyn RuntimeConfig> {
        Box::new(self.clone())
    }
}

/// The provider with the key and the endpoints of a configuration.
struct Configured(E2bConfig);

#[async_trait]
impl Provider for Configured {
    fn tag(&self) -> &'static str {
        TAG
    }

    fn capabilities(&self) -> Capabilities {
        E2bProvider.capabilities()
    }

    fn parse(&self, fields: Map<String, Value>) -> Result<Box<dyn RuntimeConfig>> {
        E2bProvider.parse(fields)
    }

    async fn delete_orphan(&self, orphan: &Orphan) -> Result<()> {
        let endpoints = Endpoints::of_orphan(orphan, &self.0, &Variables::from_env())?;
        crate::runtime::delete_orphan(endpoints, orphan).await
    }
}

/// E2B as a [`Provider`].
#[derive(Debug, Clone, Copy, Default)]
pub struct E2bProvider;

#[async_trait]
impl Provider for E2bProvider {
    fn tag(&self) -> &'static str {
        TAG
    }

    fn capabilities(&self) -> Capabilities {
        capabilities(DEFAULT_TIMEOUT)
    }

    fn parse(&self, fields: Map<String, Value>) -> Result<Box<dyn RuntimeConfig>> {
        let config: E2bConfig = from_fields(TAG, fields)?;
        config.validate()?;
        Ok(Box::new(config))
    }

    async fn delete_orphan(&self, orphan: &Orphan) -> Result<()> {
        Configured(E2bConfig::default()).delete_orphan(orphan).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime_core::ErrorKind;
    use serde_json::json;

    fn parse(value: Value) -> Result<Box<dyn RuntimeConfig>> {
        let Value::Object(fields) = value else {
            panic!("an object")
        };
        E2bProvider.parse(fields)
    }

    #[test]
    fn every_wrong_field_is_named_before_anything_is_sent() {
        for (field, value) in [
            ("image", json!("")),
            ("image", json!("a b")),
            ("workdir", json!("app")),
            ("workdir", json!("/a/../b")),
            ("cpu", json!(0)),
            ("cpu", json!(0.5)),
            ("cpu", json!(2.5)),
            ("cpu", json!(3)),
            ("cpu", json!(-2)),
            ("memory", json!(0.1)),
            ("memory", json!(0.3)),
            ("memory", json!(0.126)),
            ("disk", json!(0)),
            ("timeout", json!(0)),
            ("timeout", json!(1_u64 << 40)),
            ("api_key", json!("")),
            ("api_url", json!("ftp://x")),
            ("sandbox_url", json!("127.0.0.1:80")),
            ("domain", json!("https://e2b.app")),
            ("port_url", json!("https://e2b.app")),
            ("block[0]", json!(["a.com"])),
            ("allow[0]", json!(["https://a.com"])),
            ("workdri", json!("/x")),
        ] {
            let name = field.split('[').next().expect("a name");
            let error = parse(json!({ name: value })).expect_err(field);
            assert_eq!(
                (error.kind(), error.field()),
                (ErrorKind::InvalidConfig, Some(field)),
                "{value}"
            );
        }
    }

    #[test]
    fn defaults_are_the_documented_ones_and_the_key_is_never_written() {
        let config = parse(json!({"api_key": "e2b_secret"})).expect("fine");
        let value = config.to_value();
        assert_eq!(
            value,
            json!({
                "type": "e2b", "image": "python:3.11-slim", "workdir": null, "cpu": 2.0, "memory": 1.0, "disk": 5.0,
                "creates_per_sec": 1.0, "allow": ["*"], "block": [], "timeout": 86400, "login_shell": false,
                "domain": null, "api_url": null, "sandbox_url": null, "port_url": null
            })
        );
        assert!(!format!("{config:?}").contains("e2b_secret"));
        assert_eq!(
            config.pacing(),
            Some(Pacing {
                bucket: "e2b-sandbox",
                per_second: 1.0
            })
        );
    }

    #[test]
    fn no_rate_is_no_pacing() {
        for rate in [json!(null), json!(0), json!(-1)] {
            assert_eq!(parse(json!({"creates_per_sec": rate})).expect("fine").pacing(), None);
        }
    }
}
