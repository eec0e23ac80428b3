//! Docker and Podman sandboxes at the speed of a local process.
//!
//! ```no_run
//! use runtime_core::{Command, Sandbox};
//! use runtime_docker::DockerConfig;
//!
//! # async fn example() -> runtime_core::Result<()> {
//! let mut config = DockerConfig::new("python:3.11-slim");
//! config.memory = Some(2.0);
//! let sandbox = Sandbox::builder(config).env("STAGE", "test").provision().await?;
//! sandbox.upload_dir("task", "/app").await?;
//! let output = sandbox.run(Command::shell("python3 main.py; echo $STAGE")).await?;
//! println!("{} {}", output.status, output.stdout_lossy());
//! sandbox.stop().await
//! # }
//! ```
//!
//! # The tour
//! [`ContainerConfig`] is what a box can be told; [`DockerConfig`] and [`PodmanConfig`] are it with an engine, and
//! [`DockerProvider`] and [`PodmanProvider`] register them by tag. A box is reached through the *guest* of
//! [`runtime_core::guest`], over a socket or over the container's stdio, or through the Engine API's exec: see
//! [`ExecMode`]. `exec_mode` in a sandbox's record tells which it is.
//!
//! Nothing of this crate depends on a pooled connection: a box that was made on one executor can be deleted on another.
//!
//! # The network
//! With `allow` or `block` a box is *cut off* when [`Sandbox::prepare_execution`](runtime_core::Sandbox::prepare_execution)
//! is called: the container is disconnected from every network, the guest proves from inside that nothing but `lo` is
//! left, and what the policy and the framework's routes allow goes through a proxy and relays of this process, whose
//! listeners are on the box's loopback. See [`runtime_core::box_network`] and the crate's README.
#![forbid(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("runtime-docker runs on Linux; the engine may be elsewhere");

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
#[cfg(feature = "tls")]
mod tls;
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
