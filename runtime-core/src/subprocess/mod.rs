//! The embedded runtime: a box is a directory and the process groups of this machine. **It isolates nothing** unless it
//! is asked to: an absolute path is a path of the host, and the network is the host's. With
//! `isolation = "namespaces"` a box is one indeed: see [`isolation`].
//!
//! Without isolation:
//!
//! Programs see the host's environment without variables whose name contains `API_KEY`, under the sandbox's own
//! variables. Each runs in its own process group; what it leaves in the group is killed when it ends. At
//! [`stop`](crate::Sandbox::stop) every group gets SIGTERM, 5 s later SIGKILL, and on Linux what left its group is found
//! by a marker in its environment.

mod changes;
mod config;
mod files;
#[cfg(all(feature = "isolation", target_os = "linux"))]
pub mod isolation;
#[cfg(all(target_os = "linux", not(portable_processes)))]
mod marker;
mod process;
mod runtime;
mod signals;
mod spawn;

pub use config::{Isolation, SetupNetwork, SubprocessConfig, SubprocessProvider};
#[cfg(all(test, target_os = "linux"))]
pub(crate) use runtime::MARKER;
pub use runtime::SubprocessRuntime;
