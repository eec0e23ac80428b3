//! A real guest, and scripted false ones, against the host's end of the link.
#![cfg(all(feature = "guest", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "helpers outside of test functions fail the test too")]

mod cancellation;
mod files;
mod hostile;
mod isolation;
mod mutation;
mod network;
mod processes;
mod support;
