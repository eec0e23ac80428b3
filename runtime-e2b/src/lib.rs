//! Sandboxes of [E2B](https://e2b.dev), spoken to directly: its control plane over REST, the daemon in each box (`envd`)
//! over Connect RPC.
//!
//! ```no_run
//! use runtime_core::Sandbox;
//! use runtime_e2b::E2bConfig;
//!
//! # async fn example() -> runtime_core::Result<()> {
//! // The key comes from `E2B_API_KEY`.
//! let config = E2bConfig { image: "python:3.12-slim".into(), ..E2bConfig::default() };
//! let sandbox = Sandbox::builder(config).provision().await?;
//! let output = sandbox.run(["python3", "-c", "print(6 * 7)"]).await?;
//! assert_eq!(&output.stdout.bytes[..], b"42\n");
//! sandbox.stop().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it does beyond the official client
//! - Programs run without a login shell: the argument vector, the environment and every byte of output are exact.
//! - [`run_program`](runtime_core::View::run_program) survives any number of broken connections without losing a byte,
//!   streams meanwhile, and never starts a program twice.
//! - A create is never sent twice: a box whose answer was lost is found by its labels.
//! - One build of a template for all processes of a machine.
//!
//! # What it cannot do
//! - Arguments, variables and file names are UTF-8.
//! - Stdout and stderr of a live process share a connection: one that is not read holds the other back once it has grown
//!   to 8 MiB.
//! - The status of a durable program comes from a shell: an exit code of 129 to 192 reads as a signal.
//! - The variables of the image, `PATH` among them, are not those of programs; pass what is needed, or turn on
//!   [`login_shell`](E2bConfig::login_shell).
//! - What a program leaves behind lives until the box is deleted.
#![forbid(unsafe_code)]

mod api_key;
mod client;
mod config;
mod durable;
mod egress;
#[cfg(all(feature = "emulator", target_os = "linux"))]
pub mod emulator;
mod endpoints;
mod envd;
mod error;
mod files;
mod http_client;
mod launch;
mod process;
mod runtime;
mod template;
mod watch;
pub mod wire;

pub use api_key::ApiKey;
pub use config::{E2bConfig, E2bProvider};
