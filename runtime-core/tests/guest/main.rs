//! A real guest, and scripted false ones, against the host's end of the link.
#![cfg(all(feature = "guest", target_os = "linux"))]

mod cancellation;
mod files;
mod hostile;
mod isolation;
mod mutation;
mod network;
mod processes;
mod support;
