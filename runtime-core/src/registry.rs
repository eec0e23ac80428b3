//! Providers by tag, and the error that lists what is compiled in.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value};

use crate::capability::Capabilities;
use crate::config::{RuntimeConfig, split_tag};
use crate::error::{Error, Result};
use crate::text::nearest;

/// Tags of the providers of this workspace, and the crate and feature that bring each.
const KNOWN: &[(&str, &str, &str)] = &[
    ("subprocess", "runtime-core", "subprocess"),
    ("docker", "runtime-docker", "docker"),
    ("podman", "runtime-docker", "docker"),
    ("e2b", "runtime-e2b", "e2b"),
    ("modal", "runtime-modal", "modal"),
    ("prime", "runtime-prime", "prime"),
];

/// A provider: how its configurations are read, and how its orphans are deleted.
#[async_trait]
pub trait Provider: Send + Sync + 'static {
    /// The tag, unique among providers.
    fn tag(&self) -> &'static str;

    /// What a box of the default configuration can do.
    fn capabilities(&self) -> Capabilities;

    /// Reads a configuration from the fields beside `type`, and validates it.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::ErrorKind::InvalidConfig) naming the field.
    fn parse(&self, fields: Map<String, Value>) -> Result<Box<dyn RuntimeConfig>>;

    /// Deletes a box whose owner died: by id, or by name where the owner died before it learned the id. A box that is
    /// gone, or never was, is a success.
    ///
    /// # Errors
    /// Only when the box may still exist: the provider cannot be reached, credentials are missing.
    async fn delete_orphan(&self, orphan: &Orphan) -> Result<()>;
}

/// What is known of a box whose owner died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// Our unique name for the box, tagged on it at creation.
    pub name: String,
    /// The provider's id, if its owner lived to learn it.
    pub id: Option<String>,
    /// The run that it belonged to.
    pub run_scope: String,
    /// What the runtime's [`lease_context`](crate::Runtime::lease_context) said.
    pub context: BTreeMap<String, String>,
}

/// The providers that a program was built with.
///
/// ```
/// use runtime_core::Registry;
/// use serde_json::json;
///
/// let registry = Registry::with_builtin();
/// let config = registry.parse(json!({"type": "subprocess"})).unwrap();
/// assert_eq!(config.tag(), "subprocess");
///
/// let error = registry.parse(json!({"type": "subproces"})).unwrap_err();
/// assert!(error.to_string().contains("did you mean `subprocess`?"));
/// ```
#[derive(Clone, Default)]
pub struct Registry {
    providers: BTreeMap<&'static str, Arc<dyn Provider>>,
}

impl Registry {
    /// No providers.
    pub fn new() -> Self {
        Self::default()
    }

    /// The providers of this crate that are compiled in: the embedded runtime.
    pub fn with_builtin() -> Self {
        #[allow(unused_mut, reason = "nothing to add without the feature")]
        let mut registry = Self::new();
        #[cfg(feature = "subprocess")]
        registry.register(Arc::new(crate::subprocess::SubprocessProvider));
        registry
    }

    /// Adds a provider, replacing one of the same tag.
    pub fn register(&mut self, provider: Arc<dyn Provider>) {
        self.providers.insert(provider.tag(), provider);
    }

    /// The provider of this tag.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::ErrorKind::InvalidConfig) naming `type`: it lists the tags that are compiled in and,
    /// for a known provider that is not, the crate and feature that bring it.
    pub fn provider(&self, tag: &str) -> Result<Arc<dyn Provider>> {
        if let Some(provider) = self.providers.get(tag) {
            return Ok(provider.clone());
        }
        let compiled = self.tags().collect::<Vec<_>>();
        let listed = if compiled.is_empty() {
            "none".to_owned()
        } else {
            compiled.join(", ")
        };
        let hint = match KNOWN.iter().find(|(known, ..)| *known == tag) {
            Some((_, name, feature)) => {
                format!("it is not compiled in: depend on the crate `{name}` or turn on the feature `{feature}`")
            }
            None => match nearest(
                tag,
                compiled.iter().copied().chain(KNOWN.iter().map(|(known, ..)| *known)),
            ) {
                Some(near) => format!("did you mean `{near}`?"),
                None => "no such provider".to_owned(),
            },
        };
        Err(Error::invalid_config(
            "type",
            format!("`{tag}`: {hint} (compiled in: {listed})"),
        ))
    }

    /// Reads and validates a configuration with its tag under `type`.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::ErrorKind::InvalidConfig) naming the field.
    pub fn parse(&self, value: Value) -> Result<Box<dyn RuntimeConfig>> {
        let (tag, fields) = split_tag(value)?;
        let config = self.provider(&tag)?.parse(fields)?;
        config.validate()?;
        Ok(config)
    }

    /// The tags that are compiled in.
    pub fn tags(&self) -> impl Iterator<Item = &'static str> {
        self.providers.keys().copied()
    }

    /// The providers that are compiled in.
    pub fn providers(&self) -> impl Iterator<Item = &Arc<dyn Provider>> {
        self.providers.values()
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.providers.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_tag_lists_what_is_compiled_in_and_what_would_bring_a_known_one() {
        let registry = Registry::with_builtin();
        let error = registry.provider("e2b").err().expect("not compiled in");
        assert_eq!(error.field(), Some("type"));
        assert!(
            error.message().contains("crate `runtime-e2b`") && error.message().contains("feature `e2b`"),
            "{error}"
        );
        #[cfg(feature = "subprocess")]
        assert!(error.message().contains("compiled in: subprocess"), "{error}");
        let error = registry.provider("dokcer").err().expect("unknown");
        assert!(error.message().contains("did you mean `docker`?"), "{error}");
        let error = Registry::new().provider("zzzzzzzz").err().expect("unknown");
        assert!(error.message().contains("compiled in: none"), "{error}");
    }
}
