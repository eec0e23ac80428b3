//! One contract for sandboxes.
#![deny(unsafe_code)]

mod background;
pub mod cache;
mod capability;
mod collect;
mod command;
pub mod config;
#[cfg(all(feature = "conformance", unix))]
pub mod conformance;
mod error;
mod exit;
mod files;
pub mod gpu;
#[cfg(all(feature = "guest", target_os = "linux"))]
pub mod guest;
pub mod layer;
pub mod limiter;
pub mod names;
pub mod network;
mod process;
mod registry;
pub mod retry;
mod runtime;
mod sandbox;
pub mod scope;
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
pub use process::{Process, ProcessControl, ProcessHandle, ProcessStderr, ProcessStdin, ProcessStdout, Signal};
pub use registry::{Orphan, Provider, Registry};
pub use runtime::{BoxSpec, Runtime};
pub use sandbox::{Builder, Phase, Sandbox};
pub use view::{DEFAULT_READ_LIMIT, View};
