//! Engine mode: programs through the Engine API's exec.

mod background;
pub(crate) mod files;
mod host;
mod paced;
mod process;
mod request;
mod start_failure;
mod streams;

pub(crate) use host::HostProcess;
pub(crate) use process::Commands;
