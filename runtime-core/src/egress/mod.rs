//! The egress proxy and the relays: how a box whose network is closed reaches what its policy allows.
//!
//! The box has nothing but `lo`. Whoever makes boxes gives an [`EgressProxy`] listeners made *inside* the box; this
//! process serves them, asks an [`EgressPolicy`](crate::network::EgressPolicy), and does the connecting. It knows no
//! provider and works the same on a listener of this host.
//!
//! | way out | for | what is looked at |
//! | --- | --- | --- |
//! | [`EgressProxy::serve`], absolute form | plain HTTP/1.0 and 1.1 | every request; written anew, in origin form, with its own `Host` |
//! | the same, CONNECT | TLS, and routes of plain HTTP | the server name of the ClientHello, before a byte goes out |
//! | the same, `Upgrade: websocket` | WebSockets without TLS | as a request, and needs what a CONNECT needs |
//! | [`EgressProxy::relay_route`] | the framework's own services, this host's loopback too | nothing: one listener, one place |
//! | [`EgressProxy::relay`] | `tcp://host:port` rules | the addresses, for each connection |
//!
//! A name is resolved here, once; every address has to pass, and one of exactly those is dialled.
//! [`EgressProxy::switch`] replaces the policy as a whole, and what the new one refuses is closed when it returns.
//! [`EgressLog`] tells what was asked for and which rule would admit what was refused.
//!
//! # What a program may try, and what stops it
//!
//! Each line is tested in `tests/egress` by what arrived at the other side: nothing. What the closed network itself
//! stops (other protocols, raw sockets, other families, old connections) is the business of whoever closes it.
//!
//! | # | attempt | stopped by |
//! | --- | --- | --- |
//! | 1 | no token, a wrong one, another box's, two, the right one in the wrong field | 407; compared in constant time |
//! | 2 | a token of an earlier setup | [`EgressProxy::renew_token`] |
//! | 3 | a host, port or scheme that no rule names; a look-alike of one that is named | the policy, for each request |
//! | 4 | a second request pipelined behind an allowed one, or sent later on the same connection | the policy, for each request |
//! | 5 | DNS as a channel: a name that is refused | not resolved at all |
//! | 6 | an address literal: loopback, private, link-local, metadata, `[::1]`, v4-mapped | the policy; the check of addresses |
//! | 7 | `localhost`, `*.localhost`, `2130706433`, `127.1` | the policy; the check of addresses |
//! | 8 | a public name that resolves to a loopback, private, link-local, CGNAT, multicast, v4-mapped, NAT64, 6to4 or platform address | the check of addresses |
//! | 9 | the same among good addresses | one bad address refuses all |
//! | 10 | a name that changes its answer between check and dial | one resolution; the checked addresses are dialled |
//! | 11 | a blocked network behind an allowed name | block rules are applied to addresses |
//! | 12 | CONNECT to another port than 443 | needs a rule that names the scheme, or a route |
//! | 13 | CONNECT to an allowed host with another server name in TLS; a parent's or a subdomain's | [`HelloReader`], then the policy |
//! | 14 | no server name | refused, unless the tunnel is to an allowed address |
//! | 15 | two names, two lists of names, two messages in a record | refused |
//! | 16 | a ClientHello over many records, in mixed case, with a trailing dot | read as what it is |
//! | 17 | an encrypted ClientHello | refused under any restriction |
//! | 18 | a second ClientHello, after a HelloRetryRequest, for another name | held back until the server has answered; must name the same |
//! | 19 | something else than TLS in a tunnel: HTTP, SSH, HTTP/2, SSL 2 | refused at its first wrong byte |
//! | 20 | a length beside chunks, two lengths, equal or not, odd spellings of a length | [`Framing`]: 400, closed |
//! | 21 | another coding than `chunked`, folded fields, bare CR or LF, NUL, a space before the colon | [`Framing`]: 400, closed |
//! | 22 | malformed chunks, hidden extensions and trailers | [`Framing`]; bodies are framed anew, trailers dropped |
//! | 23 | a request line or field of 1 MiB, thousands of fields | 64 KiB and 100 fields: 400, closed |
//! | 24 | `Host` other than the target, two of them | replaced; 400 |
//! | 25 | `Connection: content-length, host, transfer-encoding` | those are not for a client to remove |
//! | 26 | absolute `https`, origin form, `*`, unknown schemes | 403 |
//! | 27 | user information, odd ports, percent-encoding in a target | 400 |
//! | 28 | the preface of HTTP/2, `Upgrade: h2c` and others | 400; the field is dropped |
//! | 29 | a WebSocket that the server declines, with a request hidden behind it | judged as the request that it is |
//! | 30 | a switch of protocols that nobody asked for | 502 |
//! | 31 | a redirect to a refused host | passed on; the next request is judged |
//! | 32 | a relay used to reach another port or host | a relay has one destination |
//! | 33 | a relay's name that comes to resolve to a private address | checked for each connection |
//! | 34 | a connection, tunnel, relay or kept-alive request from before the cut | [`Older::Close`]: reset on both sides |
//! | 35 | a request that races with the switch | entered and judged under one lock |
//! | 36 | dawdling: in a head, a body, a chunk, a ClientHello, between requests; servers and resolvers that dawdle | [`Limits`] |
//! | 37 | connections without end | [`Limits::connections`]; idle ones make room |
//!
//! Not stopped, because it cannot be seen: what happens inside an allowed TLS connection (domain fronting by the `Host`
//! in it, renegotiation), and what an allowed host does with what it is sent.

mod body;
mod client_hello;
mod deadline;
mod dial;
mod forward;
mod framing;
mod guard;
mod inside;
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
pub use inside::{Accepted, Carried, Listen};
pub use limits::Limits;
pub use live::Older;
pub use log::{EgressEvent, EgressKind, EgressLog, Outcome, Refusal};
pub use proxy::{EgressProxy, ProxyBuilder};
pub use relay::Relay;
