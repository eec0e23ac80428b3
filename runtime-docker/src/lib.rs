//! Docker and Podman sandboxes.
#![forbid(unsafe_code)]

mod auth;
mod capabilities;
mod config;
mod connect;
mod engine;
mod environment;
mod error;
mod exec;
mod gpu;
mod guest;
mod image;
mod provider;
mod runtime;
mod stream;
mod users;
mod wire;

pub use provider::{DockerConfig, DockerProvider, DockerRuntime, PodmanConfig, PodmanProvider, PodmanRuntime};
pub use runtime::ContainerRuntime;

pub use config::{ContainerConfig, EngineKind, ExecMode, Mount, PullPolicy, Ulimit};

/// The label by which the containers of a run are found; other tools use it too.
pub(crate) const RUN_LABEL: &str = "verifiers.run";

/// What our own labels start with.
pub(crate) const LABEL_PREFIX: &str = "runtime-sandbox.";

/// The label with our name for the box.
pub(crate) const NAME_LABEL: &str = "runtime-sandbox.name";

/// The one port that boxes forward outward by themselves.
pub(crate) const SERVICE_PORT: u16 = 8000;
