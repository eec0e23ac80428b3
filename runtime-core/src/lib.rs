//! One contract for sandboxes.
#![forbid(unsafe_code)]

pub mod cache;
mod capability;
mod command;
mod error;
pub mod gpu;
pub mod limiter;
pub mod names;
pub mod network;
mod process;
pub mod retry;
pub mod scope;
#[cfg(test)]
mod test_log;
pub mod text;
pub mod uv;

pub use capability::{Capabilities, Egress, Expose};
pub use command::{
    Captured, Collect, Command, DEFAULT_OUTPUT_LIMIT, Env, Exec, ExitStatus, Output, OutputChunk, OutputStream,
    PartialOutput,
};
pub use error::{Boundary, Error, ErrorKind, Result, Retry};
pub use process::{Process, ProcessControl, ProcessHandle, ProcessStderr, ProcessStdin, ProcessStdout, Signal};
