//! [`Rules`]: what a box may reach, judged as the provider does.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::Ipv4Net;
use serde_json::Value;

/// The resolver that boxes are told of. It may be asked wherever a name may be reached.
pub(super) const RESOLVER: Ipv4Addr = Ipv4Addr::new(8, 8, 8, 8);

/// Denied before everything else: network and length of its prefix.
const ALWAYS_DENIED: [([u8; 4], u8); 6] = [
    ([10, 0, 0, 0], 8),
    ([100, 64, 0, 0], 10),
    ([127, 0, 0, 0], 8),
    ([169, 254, 0, 0], 16),
    ([172, 16, 0, 0], 12),
    ([192, 168, 0, 0], 16),
];

/// The egress policy of a box. `allow` beats `deny`, whichever is longer; what neither names may pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Rules {
    allow: Vec<Ipv4Net>,
    names: Vec<String>,
    deny: Vec<Ipv4Net>,
}

/// A network, or a single address as one.
fn net(entry: &str) -> Option<Ipv4Net> {
    let address = || entry.parse::<Ipv4Addr>().ok().map(Ipv4Net::from);
    entry.parse().ok().or_else(address)
}

/// Whether nobody may ever go there.
pub(super) fn is_always_denied(address: Ipv4Addr) -> bool {
    let within = |(network, length): &([u8; 4], u8)| {
        Ipv4Net::new(Ipv4Addr::from(*network), *length).is_ok_and(|net| net.contains(&address))
    };
    ALWAYS_DENIED.iter().any(within)
}

impl Rules {
    /// Those of a body of the control plane that was found to be in order; `internet` is what was said beside it.
    pub(super) fn of(body: Option<&Value>, internet: Option<bool>) -> Self {
        let list = |name: &str| -> Vec<String> {
            let entries = body.and_then(|body| body.get(name)).and_then(Value::as_array);
            let text = |entries: &Vec<Value>| entries.iter().filter_map(Value::as_str).map(str::to_owned).collect();
            entries.map(text).unwrap_or_default()
        };
        let within = || body?.get("allow_internet_access")?.as_bool();
        let (allow, deny) = (list("allowOut"), list("denyOut"));
        Self {
            deny: match internet.or_else(within) {
                Some(false) => vec![Ipv4Net::default()],
                _ => deny.iter().filter_map(|entry| net(entry)).collect(),
            },
            names: allow
                .iter()
                .filter(|entry| net(entry).is_none())
                .map(|entry| entry.trim_end_matches('.').to_ascii_lowercase())
                .collect(),
            allow: allow.iter().filter_map(|entry| net(entry)).collect(),
        }
    }

    /// Whether names decide anything.
    pub(super) fn knows_names(&self) -> bool {
        !self.names.is_empty()
    }

    /// Whether a name is allowed: `*.example.com` is everything below it, and not itself.
    pub(super) fn allows_name(&self, name: &str) -> bool {
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        self.names.iter().any(|pattern| match pattern.strip_prefix('*') {
            Some("") => true,
            Some(rest) if rest.starts_with('.') => name.len() > rest.len() && name.ends_with(rest),
            _ => *pattern == name,
        })
    }

    /// Whether an address may be reached for itself.
    pub(super) fn allows_address(&self, address: IpAddr) -> bool {
        let IpAddr::V4(address) = address else { return false };
        if is_always_denied(address) {
            return false;
        }
        let among = |nets: &[Ipv4Net]| nets.iter().any(|net| net.contains(&address));
        among(&self.allow) || (address == RESOLVER && self.knows_names()) || !among(&self.deny)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn allows(rules: &Rules, address: &str) -> bool {
        rules.allows_address(address.parse().expect("an address"))
    }

    #[test]
    fn allow_beats_deny_and_private_networks_are_always_denied() {
        let open = Rules::of(None, None);
        assert_eq!(open, Rules::of(Some(&json!({})), Some(true)));
        for address in [
            "1.2.3.4",
            "9.255.255.255",
            "11.0.0.0",
            "172.32.0.1",
            "192.169.0.1",
            "100.128.0.1",
        ] {
            assert!(allows(&open, address), "{address}");
        }
        let named = [
            "10.0.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.31.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "::1",
        ];
        let generous = Rules::of(
            Some(&json!({ "allowOut": ["10.0.0.0/8", "127.0.0.1", "0.0.0.0/0"] })),
            None,
        );
        for address in named {
            assert!(!allows(&open, address) && !allows(&generous, address), "{address}");
        }
        assert!(!allows(&open, "2606:4700::1111"));
        let blocked = Rules::of(Some(&json!({ "denyOut": ["1.2.3.4", "5.6.0.0/16"] })), None);
        assert!(!allows(&blocked, "1.2.3.4") && !allows(&blocked, "5.6.7.8") && allows(&blocked, "1.2.3.5"));
        // The wider one is allowed, the narrower one denied: allowed all the same.
        let both = Rules::of(
            Some(&json!({ "allowOut": ["1.2.0.0/16"], "denyOut": ["1.2.3.4", "0.0.0.0/0"] })),
            None,
        );
        assert!(allows(&both, "1.2.3.4") && !allows(&both, "1.3.0.0"));
        let closed = json!({ "allow_internet_access": false, "allowOut": ["1.1.1.1"] });
        for closed in [Rules::of(Some(&closed), None), Rules::of(Some(&closed), Some(false))] {
            assert!(allows(&closed, "1.1.1.1") && !allows(&closed, "1.1.1.2") && !allows(&closed, "8.8.8.8"));
        }
    }

    #[test]
    fn names_are_exact_or_everything_below_and_bring_their_resolver() {
        let rules = Rules::of(
            Some(&json!({ "allowOut": ["Exact.example", "*.below.example"], "denyOut": ["0.0.0.0/0"] })),
            None,
        );
        for (name, allowed) in [
            ("exact.example", true),
            ("EXACT.example.", true),
            ("a.exact.example", false),
            ("below.example", false),
            ("a.b.below.example", true),
            ("xbelow.example", false),
            ("", false),
        ] {
            assert_eq!(rules.allows_name(name), allowed, "{name}");
        }
        assert!(allows(&rules, "8.8.8.8") && !allows(&rules, "8.8.4.4"));
        let everything = Rules::of(Some(&json!({ "allowOut": ["*"], "denyOut": ["0.0.0.0/0"] })), None);
        assert!(everything.allows_name("any.example"));
        assert!(!Rules::of(None, None).allows_name("any.example"));
    }
}
