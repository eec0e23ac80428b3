//! Docker and Podman as providers: their configurations, their tags, their orphans.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use async_trait::async_trait;
use runtime_core::config::{from_fields, tagged};
use runtime_core::network::Policy;
use runtime_core::{BoxSpec, Capabilities, Orphan, Provider, Result, Runtime, RuntimeConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{ContainerConfig, EngineKind};
use crate::runtime::{ContainerRuntime, delete_orphan};
use crate::{capabilities, config};

macro_rules! engine {
    ($kind:expr, $config:ident, $provider:ident, $runtime:ident, $name:literal, $example:literal) => {
        #[doc = concat!("Configuration of a ", $name, " box: a [`ContainerConfig`].")]
        ///
        /// ```
        #[doc = concat!("use runtime_docker::", stringify!($config), ";")]
        /// use runtime_core::RuntimeConfig;
        ///
        #[doc = concat!("let mut config = ", stringify!($config), "::new(", $example, ");")]
        /// config.memory = Some(0.5);
        /// config.pids_limit = Some(100);
        /// config.validate().unwrap();
        /// assert_eq!(config.workdir(), "/app");
        /// ```
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $config(pub ContainerConfig);

        impl $config {
            /// A box of this image.
            pub fn new(image: impl Into<String>) -> Self {
                Self(ContainerConfig::new(image))
            }

            #[doc = concat!("A running container of ", $name, " that somebody else owns, by name or id. It is never removed by us.")]
            pub fn attach(container: impl Into<String>) -> Self {
                Self(ContainerConfig::attach(container))
            }

            /// The handle on a box that does not exist yet, for those who bring their own life cycle.
            ///
            /// # Errors
            /// As [`RuntimeConfig::build`].
            pub fn runtime(&self, spec: BoxSpec) -> Result<$runtime> {
                ContainerRuntime::new($kind, self.0.clone(), spec)
            }
        }

        impl Deref for $config {
            type Target = ContainerConfig;

            fn deref(&self) -> &ContainerConfig {
                &self.0
            }
        }

        impl DerefMut for $config {
            fn deref_mut(&mut self) -> &mut ContainerConfig {
                &mut self.0
            }
        }

        impl From<ContainerConfig> for $config {
            fn from(config: ContainerConfig) -> Self {
                Self(config)
            }
        }

        impl RuntimeConfig for $config {
            fn tag(&self) -> &'static str {
                $kind.tag()
            }

            fn validate(&self) -> Result<()> {
                self.0.validate()
            }

            fn capabilities(&self) -> Capabilities {
                capabilities::of($kind, &self.0)
            }

            fn policy(&self) -> Option<Policy> {
                Some(self.0.policy())
            }

            fn to_value(&self) -> Value {
                tagged($kind.tag(), &self.0)
            }

            fn build(&self, spec: BoxSpec) -> Result<Arc<dyn Runtime>> {
                Ok(Arc::new(self.runtime(spec)?))
            }

            fn provider(&self) -> Option<Arc<dyn Provider>> {
                Some(Arc::new($provider))
            }

            fn boxed_clone(&self) -> Box<dyn RuntimeConfig> {
                Box::new(self.clone())
            }
        }

        #[doc = concat!("One container of ", $name, ".")]
        pub type $runtime = ContainerRuntime;

        #[doc = concat!($name, " as a [`Provider`].")]
        #[derive(Debug, Clone, Copy, Default)]
        pub struct $provider;

        #[async_trait]
        impl Provider for $provider {
            fn tag(&self) -> &'static str {
                $kind.tag()
            }

            fn capabilities(&self) -> Capabilities {
                capabilities::of($kind, &ContainerConfig::default())
            }

            fn parse(&self, fields: Map<String, Value>) -> Result<Box<dyn RuntimeConfig>> {
                let config: config::ContainerConfig = from_fields($kind.tag(), fields)?;
                config.validate()?;
                Ok(Box::new($config(config)))
            }

            async fn delete_orphan(&self, orphan: &Orphan) -> Result<()> {
                delete_orphan($kind, orphan).await
            }
        }
    };
}

engine!(
    EngineKind::Docker,
    DockerConfig,
    DockerProvider,
    DockerRuntime,
    "Docker",
    "\"python:3.11-slim\""
);
engine!(
    EngineKind::Podman,
    PodmanConfig,
    PodmanProvider,
    PodmanRuntime,
    "Podman",
    "\"docker.io/library/python:3.11-slim\""
);
