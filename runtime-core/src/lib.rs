//! One contract for sandboxes.
#![forbid(unsafe_code)]

mod capability;
mod command;
mod error;
#[cfg(all(feature = "guest", target_os = "linux"))]
pub mod guest;
pub mod network;
mod process;

pub use capability::{Capabilities, Egress, Expose};
pub use command::{
    Captured, Collect, Command, DEFAULT_OUTPUT_LIMIT, Env, Exec, ExitStatus, Output, OutputChunk, OutputStream,
    PartialOutput,
};
pub use error::{Boundary, Error, ErrorKind, Result, Retry};
pub use process::{Process, ProcessControl, ProcessHandle, ProcessStderr, ProcessStdin, ProcessStdout, Signal};
