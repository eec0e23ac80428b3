//! One contract for sandboxes: the trait that providers implement, and the [`Sandbox`] that people hold.
//!
//! A program that runs agents, rollouts, evaluations or untrusted code needs a *box*: start it, set it up with the
//! network open, close the network, run the program, read the results, and be certain that the box is gone afterwards,
//! whatever happened. This crate is that life, the same for every provider; a provider crate adds where boxes come from.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use std::time::Duration;
//! use runtime_core::{Command, Sandbox, network::Routes, subprocess::SubprocessConfig};
//!
//! let sandbox = Sandbox::builder(SubprocessConfig::default()).env("LANG", "C").provision().await?;
//!
//! // Trusted setup: the network is open.
//! sandbox.prepare_setup().await?;
//! sandbox.write("solve.sh", "sort -n numbers > sorted\n").await?;
//! sandbox.write("numbers", "10\n9\n").await?;
//!
//! // From here on only what the configured policy and the framework's routes allow gets out.
//! sandbox.prepare_execution(Routes::default()).await?;
//! let output = sandbox.run_program(Command::new(["sh", "solve.sh"]).timeout(Duration::from_secs(60))).await?;
//! assert!(output.success());
//! assert_eq!(&sandbox.read_up_to("sorted", 1 << 20).await?[..], b"9\n10\n");
//!
//! // Waits until the box is gone. Dropping `sandbox` would do it too, in the background.
//! sandbox.stop().await?;
//! # Ok::<(), runtime_core::Error>(()) }).unwrap();
//! ```
//!
//! # The tour
//!
//! | to | see |
//! | --- | --- |
//! | start, restrict and stop a box | [`Sandbox`], [`Builder`], [`Phase`] |
//! | run programs and move files in it | [`View`], [`Command`], [`Output`], [`Process`] |
//! | choose the provider at run time | [`Registry`], [`config`] |
//! | know what a provider can do | [`Capabilities`] |
//! | act on an error | [`Error`], [`ErrorKind`], [`Retry`], [`Boundary`] |
//! | say what a box may reach | [`network`] |
//! | bound, retry or break operations | [`layer`], [`retry`], [`limiter`] |
//! | place a task in a configuration or in a box that runs | [`placement`] |
//! | run a PEP 723 script | [`uv`] |
//! | write a provider | [`Runtime`], [`RuntimeConfig`], [`Provider`] |
//!
//! # Features
//!
//! - `subprocess` (default): the embedded runtime, whose boxes are directories and process groups of this machine.
//! - `conformance`: the suite that every provider runs.
//! - `isolation`: boxes of namespaces for the embedded runtime, with a network policy. Linux.
//! - `guest`: the program that is process 1 of a box, and the host's end of the link to it.
//! - `egress`: the proxy and the relays through which a closed box reaches what its policy allows; with `guest`, a
//!   box's whole network as [`box_network::BoxNetwork`].
#![deny(unsafe_code)]

mod background;
#[cfg(all(feature = "guest", feature = "egress", target_os = "linux"))]
pub mod box_network;
pub mod cache;
mod capability;
mod collect;
mod command;
pub mod config;
#[cfg(all(feature = "conformance", unix))]
pub mod conformance;
#[cfg(feature = "egress")]
pub mod egress;
mod error;
mod exit;
pub mod feed;
mod files;
pub mod gpu;
#[cfg(all(feature = "guest", target_os = "linux"))]
pub mod guest;
pub mod layer;
pub mod lease;
pub mod limiter;
pub mod names;
pub mod network;
pub mod placement;
mod process;
mod registry;
pub mod retry;
mod runtime;
mod sandbox;
pub mod scope;
pub mod shutdown;
#[cfg(all(feature = "subprocess", unix))]
pub mod subprocess;
#[cfg(test)]
mod test_log;
pub mod text;
mod tree;
pub mod uv;
mod view;

pub use background::detach;
pub use capability::{Capabilities, Egress, Expose};
pub use collect::collect;
pub use command::{
    Captured, Collect, Command, DEFAULT_OUTPUT_LIMIT, Env, Exec, ExitStatus, Output, OutputChunk, OutputStream,
    PartialOutput, StdinMode,
};
pub use config::{Pacing, RuntimeConfig};
pub use error::{Boundary, Error, ErrorKind, Result, Retry};
pub use files::{ByteStream, Content, DirEntry, FileType, Metadata, WriteOptions, stream_error};
pub use lease::{Durability, LeasePolicy, ReapOptions, Report, reap};
pub use process::{Process, ProcessControl, ProcessHandle, ProcessStderr, ProcessStdin, ProcessStdout, Signal};
pub use registry::{Orphan, Provider, Registry};
pub use runtime::{BoxSpec, Runtime};
pub use sandbox::{Builder, Phase, Sandbox};
pub use view::{DEFAULT_READ_LIMIT, View};

/// The example of the README is a test.
#[cfg(all(doctest, feature = "subprocess", unix))]
#[doc = include_str!("../README.md")]
struct Readme;
