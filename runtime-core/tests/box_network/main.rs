//! The network of a box from the host's side: real guests in network namespaces, over both kinds of link, and an outside
//! that is a namespace too.
#![cfg(all(feature = "guest", feature = "egress", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "helpers outside of test functions fail the test too")]

mod cases;
#[path = "../guest/support.rs"]
#[allow(
    dead_code,
    unused_macros,
    unused_imports,
    reason = "shared with the tests of the guest"
)]
mod support;
#[path = "../egress/world.rs"]
#[allow(
    dead_code,
    unused_macros,
    unused_imports,
    reason = "shared with the tests of the egress proxy"
)]
mod world;
