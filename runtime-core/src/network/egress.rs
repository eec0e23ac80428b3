//! [`EgressPolicy`]: what a proxy asks before it connects on behalf of a box.

use std::net::IpAddr;

use super::address::AddressKind;
use super::decision::Decision;
use super::destination::{Destination, Scheme};
use super::policy::Policy;
use super::routes::Routes;
use super::rule::Rule;

/// Policy, routes and the guard against private addresses, switched as a whole when the phase of a box changes.
///
/// A proxy asks twice: [`decide`](Self::decide) before it resolves a name, [`decide_resolved`](Self::decide_resolved)
/// with every address that it may dial.
///
/// ```
/// use runtime_core::network::{Destination, EgressPolicy, Policy, Routes, Scheme, Tunnel};
///
/// let policy = Policy::new(["a.com"], [])?;
/// let egress = EgressPolicy::execution(policy, Routes::new(["https://model.example"])?);
/// let to = Destination::new(Scheme::Https, "a.com", 443);
/// assert!(egress.decide(&to, Tunnel::Yes).is_permitted());
/// assert!(egress.decide_resolved(&to, &["93.184.215.14".parse().unwrap()]).is_permitted());
/// // A public name that leads into the host's own network:
/// assert!(!egress.decide_resolved(&to, &["10.0.0.1".parse().unwrap()]).is_permitted());
/// # Ok::<(), runtime_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressPolicy {
    policy: Policy,
    routes: Routes,
    allow_non_global: bool,
}

/// Whether the destination is reached through a tunnel, whose content the proxy does not read (CONNECT).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tunnel {
    /// A tunnel.
    Yes,
    /// A request that the proxy reads and sends on, or a relay that a rule asked for.
    No,
}

impl EgressPolicy {
    /// For trusted setup: everything, private networks too, but not this host's loopback.
    pub fn setup() -> Self {
        Self {
            policy: Policy::open(),
            routes: Routes::none(),
            allow_non_global: true,
        }
    }

    /// [`setup`](Self::setup) with services of the framework, which may be on this host's loopback.
    pub fn setup_with(routes: Routes) -> Self {
        Self {
            routes,
            ..Self::setup()
        }
    }

    /// Nothing at all, until something else is switched on.
    pub fn closed() -> Self {
        Self::execution(Policy::framework_only(), Routes::none())
    }

    /// For the program: what the policy and the framework's routes allow.
    pub fn execution(policy: Policy, routes: Routes) -> Self {
        Self {
            policy,
            routes,
            allow_non_global: false,
        }
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The framework's routes.
    pub fn routes(&self) -> &Routes {
        &self.routes
    }

    /// Whether `destination` may be asked for, before its name is resolved.
    pub fn decide(&self, destination: &Destination, tunnel: Tunnel) -> Decision<'_> {
        if !destination.is_well_formed() {
            return Decision::MalformedHost;
        }
        let route = self.routes.find(destination);
        if tunnel == Tunnel::Yes && destination.port() != 443 && route.is_none() && !self.grants_tunnel(destination) {
            return Decision::TunnelPort;
        }
        if destination.is_loopback() {
            return Decision::Loopback;
        }
        match route {
            Some(origin) => Decision::Route(origin),
            None => self.policy.decide(destination),
        }
    }

    /// A tunnel to an odd port can carry anything, so a rule without a scheme does not grant one.
    fn grants_tunnel(&self, destination: &Destination) -> bool {
        self.policy
            .allow
            .iter()
            .any(|rule: &Rule| rule.is_any() || (rule.scheme().is_some() && rule.matches(destination)))
    }

    /// Whether `destination`, which [`decide`](Self::decide) permitted, may be dialled at all of `addresses`: the
    /// answer of the one resolution whose addresses are then dialled. Every one has to be globally routable and not
    /// blocked by its address, except for the framework's own routes and in setup.
    pub fn decide_resolved(&self, destination: &Destination, addresses: &[IpAddr]) -> Decision<'_> {
        let by_name = match self.routes.find(destination) {
            Some(origin) => Decision::Route(origin),
            None => self.policy.decide(destination),
        };
        if !by_name.is_permitted() {
            return by_name;
        }
        if addresses.is_empty() {
            return Decision::NoAddress;
        }
        if matches!(by_name, Decision::Route(_)) {
            return by_name;
        }
        if !self.allow_non_global
            && let Some((address, kind)) = AddressKind::first_non_global(addresses.iter().copied())
        {
            return Decision::NonGlobal(address, kind);
        }
        if self.allow_non_global && addresses.iter().any(|address| is_own(*address)) {
            return Decision::Loopback;
        }
        match addresses
            .iter()
            .find_map(|address| self.policy.blocks_address(destination, *address))
        {
            Some(rule) => Decision::BlockedBy(rule),
            None => by_name,
        }
    }

    /// Whether the server name in a TLS handshake may be spoken to inside a tunnel that was made for `destination`: a
    /// permitted tunnel must not front for a name that is refused. Without a server name only a tunnel to an address
    /// passes.
    pub fn decide_server_name(&self, destination: &Destination, server_name: Option<&str>) -> Decision<'_> {
        match server_name {
            Some(name) => self.decide(&Destination::new(Scheme::Https, name, destination.port()), Tunnel::Yes),
            None if destination.address().is_some() => self.decide(destination, Tunnel::Yes),
            None => Decision::MalformedHost,
        }
    }
}

/// An address that leads back to this host: loopback, and the unspecified address, which systems dial as loopback.
fn is_own(address: IpAddr) -> bool {
    matches!(
        AddressKind::of(address.to_canonical()),
        AddressKind::Loopback | AddressKind::Unspecified
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn egress(allow: &[&str], block: &[&str], routes: &[&str]) -> EgressPolicy {
        let policy = Policy::new(allow.iter().copied(), block.iter().copied()).unwrap();
        EgressPolicy::execution(policy, Routes::new(routes).unwrap())
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn tunnels_and_routes_are_decided_as_specified() {
        use Scheme::{Http, Https};
        use Tunnel::{No, Yes};
        for (allow, block, routes, scheme, host, port, tunnel, permitted) in [
            (&["a.com"][..], &[][..], &[][..], Https, "a.com", 443, Yes, true),
            (&["a.com"], &[], &[], Https, "a.com", 8443, Yes, false),
            (&["a.com:8443"], &[], &[], Https, "a.com", 8443, Yes, false),
            (&["https://a.com:8443"], &[], &[], Https, "a.com", 8443, Yes, true),
            (&["*"], &["x.com"], &[], Https, "b.com", 8443, Yes, true),
            (&["a.com"], &[], &[], Https, "a.com", 80, Yes, false),
            (&["a.com"], &[], &[], Http, "a.com", 8080, No, true),
            (&[], &[], &["http://svc:9000"], Http, "svc", 9000, Yes, true),
            (&[], &[], &["http://svc:9000"], Https, "svc", 9000, Yes, false),
            (&["*"], &["x.com"], &["https://x.com"], Https, "x.com", 443, Yes, true),
            (&[], &[], &["http://127.0.0.1:9000"], Http, "127.0.0.1", 9000, No, false),
        ] {
            let egress = egress(allow, block, routes);
            let decision = egress.decide(&Destination::new(scheme, host, port), tunnel);
            assert_eq!(
                decision.is_permitted(),
                permitted,
                "{allow:?} {routes:?} {host}:{port}: {decision}"
            );
        }
    }

    #[test]
    fn loopback_is_refused_in_every_phase_and_under_every_policy() {
        for egress in [
            EgressPolicy::setup(),
            EgressPolicy::closed(),
            egress(&["*"], &[], &["http://localhost"]),
        ] {
            for host in [
                "localhost",
                "a.localhost.",
                "127.0.0.1",
                "127.9.9.9",
                "[::1]",
                "::ffff:127.0.0.1",
            ] {
                let destination = Destination::new(Scheme::Http, host, 80);
                assert_eq!(egress.decide(&destination, Tunnel::No), Decision::Loopback, "{host}");
            }
        }
    }

    #[test]
    fn a_name_is_refused_for_one_bad_address_and_for_none() {
        let egress = egress(&["a.com"], &[], &["https://model.example"]);
        let to = Destination::new(Scheme::Https, "a.com", 443);
        assert!(
            egress
                .decide_resolved(&to, &[ip("1.1.1.1"), ip("2606:4700::1111")])
                .is_permitted()
        );
        assert_eq!(
            egress.decide_resolved(&to, &[ip("1.1.1.1"), ip("169.254.169.254")]),
            Decision::NonGlobal(ip("169.254.169.254"), AddressKind::LinkLocal)
        );
        assert_eq!(egress.decide_resolved(&to, &[]), Decision::NoAddress);
        // The framework's own services may be in the private network, and are never blocked.
        let route = Destination::new(Scheme::Https, "model.example", 443);
        assert!(egress.decide_resolved(&route, &[ip("10.0.0.1")]).is_permitted());
        // What the policy refuses is not permitted by a good address.
        let other = Destination::new(Scheme::Https, "b.com", 443);
        assert_eq!(egress.decide_resolved(&other, &[ip("1.1.1.1")]), Decision::NotAllowed);
    }

    #[test]
    fn setup_reaches_private_networks_but_not_this_host() {
        let egress = EgressPolicy::setup();
        let to = Destination::new(Scheme::Https, "mirror.internal", 443);
        assert!(egress.decide_resolved(&to, &[ip("10.0.0.1")]).is_permitted());
        for own in ["127.0.0.1", "0.0.0.0", "::", "::1", "::ffff:127.0.0.1"] {
            assert_eq!(egress.decide_resolved(&to, &[ip(own)]), Decision::Loopback, "{own}");
        }
    }

    #[test]
    fn a_blocked_network_is_blocked_behind_a_name_too() {
        let egress = egress(
            &["*"],
            &["93.184.0.0/16", "https://1.1.1.1"],
            &["https://route.example"],
        );
        let refused = |scheme, host, address| {
            let to = Destination::new(scheme, host, if scheme == Scheme::Http { 80 } else { 443 });
            egress
                .decide_resolved(&to, &[ip("8.8.8.8"), ip(address)])
                .rule()
                .map(|rule| rule.to_string())
        };
        assert_eq!(
            refused(Scheme::Https, "a.com", "93.184.215.14").as_deref(),
            Some("93.184.0.0/16")
        );
        assert_eq!(
            refused(Scheme::Https, "1572395042", "93.184.1.1").as_deref(),
            Some("93.184.0.0/16")
        );
        assert_eq!(
            refused(Scheme::Https, "a.com", "1.1.1.1").as_deref(),
            Some("https://1.1.1.1")
        );
        // The scheme of a rule counts here as well.
        assert_eq!(refused(Scheme::Http, "a.com", "1.1.1.1").as_deref(), Some("*"));
        assert_eq!(refused(Scheme::Https, "route.example", "93.184.215.14"), None);
    }

    #[test]
    fn the_server_name_is_judged_like_a_host() {
        let egress = egress(&["a.com", "https://1.1.1.1"], &[], &[]);
        let by_name = Destination::new(Scheme::Https, "a.com", 443);
        let by_address = Destination::new(Scheme::Https, "1.1.1.1", 443);
        assert!(egress.decide_server_name(&by_name, Some("A.COM.")).is_permitted());
        assert!(!egress.decide_server_name(&by_name, Some("b.com")).is_permitted());
        assert!(!egress.decide_server_name(&by_name, Some("")).is_permitted());
        assert!(!egress.decide_server_name(&by_name, None).is_permitted());
        assert!(egress.decide_server_name(&by_address, None).is_permitted());
        assert!(!egress.decide_server_name(&by_address, Some("b.com")).is_permitted());
    }

    #[test]
    fn closed_permits_nothing() {
        let to = Destination::new(Scheme::Https, "a.com", 443);
        assert!(!EgressPolicy::closed().decide(&to, Tunnel::Yes).is_permitted());
        assert!(
            !EgressPolicy::closed()
                .decide_resolved(&to, &[ip("1.1.1.1")])
                .is_permitted()
        );
    }
}
