//! The egress proxy against real sockets, in network namespaces of the tests' own. Evidence is what arrived.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test that uses them")]

mod clients;
mod grpc;
mod requests;
mod smuggling;
mod switching;
mod tls;
mod tunnels;
mod upstream;
mod world;
