//! The egress proxy.

mod body;
mod client_hello;
mod dial;
mod forward;
mod framing;
mod guard;
mod lenient;
mod limits;
mod live;
mod log;
mod proxy;
mod pump;
mod relay;
mod token;
mod tunnel;

pub use client_hello::{ClientHello, HelloProblem, HelloReader};
pub use framing::{Framing, FramingProblem, MAX_HEAD, Step};
pub use limits::Limits;
pub use live::Older;
pub use log::{EgressEvent, EgressKind, EgressLog, Outcome, Refusal};
pub use proxy::{EgressProxy, ProxyBuilder};
pub use relay::Relay;
