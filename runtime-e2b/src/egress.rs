//! What E2B takes as egress rules, and how a policy is said in them.

use std::net::IpAddr;

use ipnet::IpNet;
use runtime_core::{Error, ErrorKind, Result};
use serde_json::{Value, json};

/// The deny entry that closes everything. The provider wants exactly this text beside an allow list of names.
const EVERYTHING: &str = "0.0.0.0/0";

/// The hole that every E2B policy has, in words.
pub(crate) const EXCEPTIONS: &str = "connections that were open before the policy came into force go on; with a host \
    name allowed, DNS to the provider's resolver is open; host names are judged on ports 80 and 443 only; IPv6 rules do \
    nothing";

/// Checks both lists.
pub(crate) fn validate(allow: &[String], block: &[String]) -> Result<()> {
    let open = matches!(allow, [only] if only == "*");
    if allow.is_empty() || block.iter().any(|rule| rule == "*") {
        return Ok(());
    }
    if !open && !block.is_empty() {
        return Err(Error::invalid_config(
            "block",
            "an allow list and a block list exclude each other: to block, allow must be [\"*\"]",
        ));
    }
    for (index, rule) in block.iter().enumerate() {
        if !is_address(rule) {
            return Err(Error::invalid_config(
                format!("block[{index}]"),
                format!("E2B blocks IP addresses and networks only, not {rule:?}"),
            ));
        }
        check_specified("block", index, rule)?;
    }
    for (index, rule) in allow.iter().enumerate().filter(|(_, rule)| *rule != "*") {
        if is_address(rule) {
            check_specified("allow", index, rule)?;
        } else if !is_host(rule) {
            return Err(Error::invalid_config(
                format!("allow[{index}]"),
                format!(
                    "E2B allows IP addresses, networks, and host names with at most a leading \"*.\", without scheme, \
                     port and path; not {rule:?}"
                ),
            ));
        }
    }
    Ok(())
}

/// An address, or a network with or without host bits.
fn is_address(rule: &str) -> bool {
    rule.parse::<IpAddr>().is_ok() || rule.parse::<IpNet>().is_ok()
}

/// The provider refuses the unspecified address in every form but `0.0.0.0/0`.
fn check_specified(list: &str, index: usize, rule: &str) -> Result<()> {
    let unspecified = match rule.parse::<IpNet>() {
        Ok(net) => net.addr().is_unspecified(),
        Err(_) => rule.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified()),
    };
    if unspecified && rule != EVERYTHING {
        return Err(Error::invalid_config(
            format!("{list}[{index}]"),
            format!("E2B refuses {rule:?}: of the unspecified addresses it takes only \"{EVERYTHING}\""),
        ));
    }
    Ok(())
}

fn is_host(rule: &str) -> bool {
    let name = rule.strip_prefix("*.").unwrap_or(rule);
    !name.is_empty()
        && name.len() <= 253
        && name.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        })
}

/// The update that opens the network.
pub(crate) fn open() -> Value {
    json!({ "allow_internet_access": true })
}

/// The update that puts a policy in force. `route_hosts` stay reachable.
///
/// # Errors
/// [`NetworkPolicy`](ErrorKind::NetworkPolicy) for a route whose address the policy blocks: the provider lets nothing
/// but an allow list except it, and both lists together would not mean what the policy says.
pub(crate) fn restrict(allow: &[String], block: &[String], route_hosts: &[String]) -> Result<Value> {
    let framework_only = allow.is_empty() || block.iter().any(|rule| rule == "*");
    if !framework_only && allow.iter().any(|rule| rule == "*") {
        if block.is_empty() {
            return Ok(open());
        }
        let nets: Vec<IpNet> = block.iter().filter_map(|rule| network(rule)).collect();
        let blocked = |host: &&String| {
            host.parse::<IpAddr>()
                .is_ok_and(|address| nets.iter().any(|net| net.contains(&address)))
        };
        if let Some(host) = route_hosts.iter().find(blocked) {
            return Err(Error::new(
                ErrorKind::NetworkPolicy,
                format!("the policy blocks {host}, which the program needs to reach its framework"),
            ));
        }
        return Ok(json!({ "denyOut": unique(block.iter()) }));
    }
    let allowed: &[String] = if framework_only { &[] } else { allow };
    let entries = unique(route_hosts.iter().chain(allowed));
    if entries.is_empty() {
        return Ok(json!({ "allow_internet_access": false }));
    }
    Ok(json!({ "allowOut": entries, "denyOut": [EVERYTHING] }))
}

fn network(rule: &str) -> Option<IpNet> {
    rule.parse::<IpNet>()
        .ok()
        .or_else(|| rule.parse::<IpAddr>().ok().map(IpNet::from))
}

/// Each entry once, lower-cased, in the order of first sight.
fn unique<'a>(entries: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    for entry in entries {
        let entry = entry.to_ascii_lowercase();
        if !kept.contains(&entry) {
            kept.push(entry);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(rules: &[&str]) -> Vec<String> {
        rules.iter().map(|rule| (*rule).to_owned()).collect()
    }

    fn refused(allow: &[&str], block: &[&str]) -> String {
        let error = validate(&list(allow), &list(block)).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
        error.field().expect("a field").to_owned()
    }

    #[test]
    fn what_the_provider_cannot_enforce_is_refused_by_field() {
        for allow in [
            "https://a.com",
            "a.com:443",
            "a.com/x",
            "a.com.",
            "a.*.com",
            "*a.com",
            "-a.com",
            "a-.com",
            "a..com",
            "",
            "a_b.com",
            "0.0.0.0",
            "::",
            "::/0",
            "0.0.0.0/8",
            "[::1]",
            "é.com",
            "*.",
        ] {
            assert_eq!(refused(&["ok.com", allow], &[]), "allow[1]", "{allow:?}");
        }
        for block in ["a.com", "*.a.com", "1.2.3.4:80", "1.2.3", "0.0.0.0", ""] {
            assert_eq!(refused(&["*"], &["10.0.0.1", block]), "block[1]", "{block:?}");
        }
        assert_eq!(refused(&["a.com"], &["1.2.3.4"]), "block");
    }

    #[test]
    fn what_the_provider_enforces_is_accepted() {
        let allow = [
            "a.com",
            "*.a.com",
            "1.2.3.4",
            "10.1.2.3/8",
            "2001:db8::/32",
            "2001:db8::1",
            "localhost",
            "A.Com",
        ];
        validate(&list(&allow), &[]).expect("fine");
        validate(
            &list(&["*"]),
            &list(&["1.2.3.4/32", "10.1.2.3/8", "2001:db8::1", "0.0.0.0/0"]),
        )
        .expect("fine");
        validate(&[], &list(&["a.com"])).expect("framework only: the lists are not looked at");
        validate(&list(&["*"]), &list(&["*"])).expect("framework only");
        validate(&list(&["*", "a.com"]), &[]).expect("open");
    }

    #[test]
    fn a_policy_becomes_one_of_four_bodies() {
        let cases = [
            (&["*"][..], &[][..], &[][..], json!({"allow_internet_access": true})),
            (&["*"], &["1.2.3.4/32"], &["h.net"], json!({"denyOut": ["1.2.3.4/32"]})),
            (
                &["a.example", "1.1.1.1"],
                &[],
                &["h.net"],
                json!({"allowOut": ["h.net", "a.example", "1.1.1.1"], "denyOut": ["0.0.0.0/0"]}),
            ),
            (
                &["A.com", "a.com"],
                &[],
                &["a.com"],
                json!({"allowOut": ["a.com"], "denyOut": ["0.0.0.0/0"]}),
            ),
            (&[], &["*"], &[], json!({"allow_internet_access": false})),
            (
                &[],
                &["*"],
                &["h.net"],
                json!({"allowOut": ["h.net"], "denyOut": ["0.0.0.0/0"]}),
            ),
            (&["*"], &["*"], &[], json!({"allow_internet_access": false})),
        ];
        for (allow, block, routes, body) in cases {
            assert_eq!(
                restrict(&list(allow), &list(block), &list(routes)).expect("fine"),
                body,
                "{allow:?} {block:?}"
            );
        }
        assert_eq!(open(), json!({"allow_internet_access": true}));
    }

    #[test]
    fn a_policy_that_blocks_its_own_framework_is_refused() {
        let error = restrict(&list(&["*"]), &list(&["10.0.0.0/8"]), &list(&["10.1.2.3"])).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::NetworkPolicy);
        restrict(&list(&["*"]), &list(&["10.0.0.0/8"]), &list(&["11.1.2.3", "h.net"])).expect("fine");
    }
}
