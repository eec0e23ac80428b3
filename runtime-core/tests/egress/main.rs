//! The egress proxy against real sockets, in network namespaces of the tests' own. Evidence is what arrived.
#![cfg(target_os = "linux")]

mod clients;
mod requests;
mod smuggling;
mod switching;
mod tls;
mod tunnels;
mod upstream;
mod world;
