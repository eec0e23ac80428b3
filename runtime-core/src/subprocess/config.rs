//! Configuration of the embedded runtime.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::capability::{Capabilities, Expose};
use crate::config::{RuntimeConfig, from_fields, tagged};
use crate::error::{Error, Result};
use crate::registry::{Orphan, Provider};
use crate::runtime::{BoxSpec, Runtime};
use crate::subprocess::runtime::{CLAIM, DIR, OwnerIs, SubprocessRuntime, delete_directory};

pub(crate) const TAG: &str = "subprocess";

/// Configuration of the embedded runtime. It has no fields: image, workdir and limits need a container.
///
/// ```
/// use runtime_core::{RuntimeConfig, subprocess::SubprocessConfig};
/// assert_eq!(SubprocessConfig::default().to_value(), serde_json::json!({"type": "subprocess"}));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SubprocessConfig {}

impl RuntimeConfig for SubprocessConfig {
    fn tag(&self) -> &'static str {
        TAG
    }

    fn validate(&self) -> Result<()> {
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn to_value(&self) -> Value {
        tagged(TAG, self)
    }

    fn build(&self, spec: BoxSpec) -> Result<Arc<dyn Runtime>> {
        Ok(Arc::new(SubprocessRuntime::new(spec)?))
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
        delete_directory(&orphan.name, Path::new(fact(DIR)?), fact(CLAIM)?, OwnerIs::Dead).await
    }
}
