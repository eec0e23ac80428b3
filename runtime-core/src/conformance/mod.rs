//! The suite that every provider runs: the specification of a box, as a program.
//!
//! A provider implements [`Target`] in its tests and hands it to [`main`], in a test target with `harness = false`.
//! Each behaviour is then a named test of `cargo test`, with libtest's own arguments (`--list`, filters, `--exact`,
//! `--skip`, `--test-threads`, `--nocapture`) and `--json FILE` for the report as data:
//!
//! ```no_run
//! use runtime_core::conformance::{BoxRef, Target, async_trait};
//! use runtime_core::{Registry, RuntimeConfig};
//!
//! struct Local;
//!
//! #[async_trait]
//! impl Target for Local {
//!     fn name(&self) -> &str {
//!         "subprocess"
//!     }
//!
//!     fn config(&self) -> Box<dyn RuntimeConfig> {
//!         let config = serde_json::json!({"type": "subprocess"});
//!         Registry::with_builtin().parse(config).expect("it is compiled in")
//!     }
//!
//!     async fn leftovers(&self, _boxes: &[BoxRef]) -> Result<Vec<String>, String> {
//!         Ok(Vec::new()) // Ask the machine or the provider what still exists of these boxes.
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     runtime_core::conformance::main(|| Local)
//! }
//! ```
//!
//! # What an outcome means
//! A case names the [`Capability`] that it needs. Where the provider declares it, the case passes or fails. Where it
//! does not, the case is [`Unsupported`](Outcome::Unsupported), which is not a pass, and the *gap* is tested instead:
//! the call must be refused as its documentation says, or the case itself must fail. A gap that is declared but passes
//! is a failure too: somebody would work around something that is not there.
//!
//! Every case runs in boxes of its own, on a thread and an executor of its own, under a deadline: a hang is a failure.
//! When it has passed, nothing of its boxes may be left ([`Target::leftovers`]). Nothing else is timed.
//!
//! The cases use `sh` and the tools that a busybox image has.
//!
//! # Killed processes
//! [`Torture`] is the other half: it kills processes that own boxes, and looks for what is left after one
//! [`reap`](crate::reap).

mod case;
mod cases;
mod context;
#[cfg(all(feature = "guest", feature = "egress", target_os = "linux"))]
pub mod escape;
mod harness;
mod log;
mod report;
mod runner;
mod target;
#[cfg(target_os = "linux")]
mod torture;
mod verdict;

pub use async_trait::async_trait;

pub use case::{Capability, Case};
pub use cases::cases;
pub use context::Context;
pub use harness::main;
pub use report::{CaseReport, Outcome, Report, Summary};
pub use runner::{Options, run, run_case};
pub use target::{BoxRef, Target};
#[cfg(target_os = "linux")]
pub use torture::{Scene, Tally, Torture, play_role};
pub use verdict::{Failure, Verdict};
