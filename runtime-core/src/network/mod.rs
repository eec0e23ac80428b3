//! Which destinations a box may talk to once its network is closed: rules, policies, routes, and the checks that an
//! enforcer makes. Pure code: nothing here opens a connection, and only [`SystemResolver`] asks the system anything.
//!
//! | name | what it is |
//! | --- | --- |
//! | [`Rule`] | one entry of an allow or block list, such as `*.example.com`, `https://a.com`, `10.0.0.0/8` |
//! | [`Policy`] | the two lists of a config: normalised, validated, intersected, asked with [`Policy::permits`] |
//! | [`Routes`] | the framework's own origins, which no policy can block |
//! | [`Destination`] | where a connection wants to go, in one comparable spelling |
//! | [`EgressPolicy`] | what a proxy asks: policy and routes and the guard against private addresses |
//! | [`AddressKind`] | whether an address is globally routable, and if not, what it is |
//! | [`HostForm`] | the spellings of a host that hosted providers accept |
//! | [`Resolver`] | names to addresses, so that tests and split DNS bring their own |
//! | [`ProxyAddress`] | the proxy, and the environment that points programs to it |
//!
//! ```
//! use runtime_core::network::{Policy, Scheme};
//!
//! let operator = Policy::new(["*.example.com", "pypi.org"], [])?;
//! let task = Policy::new(["https://api.example.com", "crates.io"], [])?;
//! let policy = Policy::intersect(&task, &operator)?;
//!
//! assert_eq!(policy.to_string(), "allow [https://api.example.com:443]");
//! assert!(policy.permits(Scheme::Https, "API.example.com.", 443).is_permitted());
//! let refused = policy.permits(Scheme::Https, "crates.io", 443);
//! assert_eq!(refused.to_string(), "refused: no allow rule matches");
//! # Ok::<(), runtime_core::Error>(())
//! ```

mod address;
mod decision;
mod destination;
mod egress;
mod host;
mod host_form;
mod intersect;
mod policy;
mod proxy_env;
mod resolver;
mod routes;
mod rule;

pub use address::AddressKind;
pub use decision::Decision;
pub use destination::{Destination, Scheme};
pub use egress::{EgressPolicy, Tunnel};
pub use host::HostPattern;
pub use host_form::{HostForm, HostFormProblem};
pub use policy::{MAX_RULES, Mode, Policy};
pub use proxy_env::{PROXY_USER, ProxyAddress, ProxyUse, no_proxy_env};
pub use resolver::{Resolver, SystemResolver};
pub use routes::{Origin, Routes};
pub use rule::{Rule, RuleList, RuleProblem};

#[cfg(test)]
mod tests;
