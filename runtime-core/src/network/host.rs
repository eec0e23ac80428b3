//! [`HostPattern`]: the host of a rule, and what it matches.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

use super::destination::{Bracketed, Destination};

/// The longest name that DNS knows.
pub(super) const MAX_HOST_BYTES: usize = 253;

/// The host of a [`Rule`](super::Rule).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HostPattern {
    /// None, as in `https://`. Matches nothing.
    Empty,
    /// `*`: every host.
    Any,
    /// A name with `*` in it. `*` stands for any run of characters, dots included.
    Glob(String),
    /// A name.
    Name(String),
    /// An address.
    Address(IpAddr),
    /// A network, such as `10.0.0.0/8`. Matches the addresses in it, and never a name.
    Network(IpNet),
}

impl HostPattern {
    /// What `text`, lower-cased and without trailing dots, stands for.
    pub(super) fn classify(text: &str) -> Self {
        if text.is_empty() {
            Self::Empty
        } else if text == "*" {
            Self::Any
        } else if text.contains('*') {
            Self::Glob(text.to_owned())
        } else if let Ok(address) = text.parse::<IpAddr>() {
            Self::Address(address.to_canonical())
        } else {
            Self::Name(text.to_owned())
        }
    }

    /// Whether it matches the destination's host.
    pub fn matches(&self, destination: &Destination) -> bool {
        match self {
            Self::Empty => false,
            Self::Any => true,
            Self::Glob(pattern) => glob(pattern, destination.host()),
            Self::Name(name) => destination.address().is_none() && name == destination.host(),
            Self::Address(address) => destination.address() == Some(*address),
            Self::Network(network) => destination.address().is_some_and(|address| network.contains(&address)),
        }
    }

    /// Whether the destination's host is a subdomain of it.
    pub fn is_parent_of(&self, destination: &Destination) -> bool {
        let parent = match self {
            Self::Name(name) => name,
            Self::Address(address) => &address.to_string(),
            _ => return false,
        };
        destination
            .host()
            .strip_suffix(parent.as_str())
            .is_some_and(|rest| rest.ends_with('.'))
    }

    /// Whether the address itself is named, alone or by its network.
    pub(super) fn names_address(&self, address: IpAddr) -> bool {
        match self {
            Self::Address(own) => *own == address.to_canonical(),
            Self::Network(network) => network.contains(&address.to_canonical()),
            _ => false,
        }
    }

    /// The pattern `*.suffix` with no other `*`.
    fn is_suffix_pattern(&self) -> bool {
        matches!(self, Self::Glob(text) if text.strip_prefix("*.").is_some_and(|suffix| !suffix.contains('*')))
    }

    fn is_glob(&self) -> bool {
        matches!(self, Self::Glob(_))
    }

    fn covers_text(&self, text: &str) -> bool {
        matches!(self, Self::Glob(pattern) if glob(pattern, text))
    }

    /// The hosts that both match; `None` when there are none.
    ///
    /// # Errors
    /// [`Undecidable`] for two globs of which neither is provably inside the other.
    pub(super) fn intersect(&self, other: &Self) -> Result<Option<Self>, Undecidable> {
        if self == other || *other == Self::Any {
            return Ok(Some(self.clone()));
        }
        if *self == Self::Any {
            return Ok(Some(other.clone()));
        }
        if !self.is_glob() && !other.is_glob() {
            return Ok(None);
        }
        let (own_text, other_text) = (self.text(), other.text());
        if self.is_suffix_pattern() && self.covers_text(&other_text) {
            return Ok(Some(other.clone()));
        }
        if other.is_suffix_pattern() && other.covers_text(&own_text) {
            return Ok(Some(self.clone()));
        }
        match (self.is_glob(), other.is_glob()) {
            (true, false) => Ok(self.covers_text(&other_text).then(|| other.clone())),
            (false, true) => Ok(other.covers_text(&own_text).then(|| self.clone())),
            (true, true) if !(self.is_suffix_pattern() && other.is_suffix_pattern()) => Err(Undecidable),
            _ => Ok(None),
        }
    }

    /// As it is compared: without brackets.
    pub(super) fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Empty => Cow::Borrowed(""),
            Self::Any => Cow::Borrowed("*"),
            Self::Glob(text) | Self::Name(text) => Cow::Borrowed(text),
            Self::Address(address) => Cow::Owned(address.to_string()),
            Self::Network(network) => Cow::Owned(network.to_string()),
        }
    }
}

/// As it stands in a rule: IPv6 in brackets.
impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => Ok(()),
            Self::Any => f.write_str("*"),
            Self::Glob(text) | Self::Name(text) => f.write_str(text),
            Self::Address(address) => write!(f, "{}", Bracketed(&address.to_string())),
            Self::Network(network) => {
                write!(f, "{}/{}", Bracketed(&network.addr().to_string()), network.prefix_len())
            }
        }
    }
}

/// Whether two globs overlap cannot be decided.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Undecidable;

/// The network `address/prefix`: host bits cleared, and IPv4 taken out of the IPv4-mapped range, where destinations
/// are IPv4 too. `None` if the prefix is too long.
pub(super) fn network(address: IpAddr, prefix: u8) -> Option<IpNet> {
    let network = IpNet::new(address, prefix).ok()?.trunc();
    if let IpNet::V6(v6) = network
        && let Some(v4) = v6.addr().to_ipv4_mapped()
        && let Some(v4_prefix) = v6.prefix_len().checked_sub(96)
    {
        return Ipv4Net::new(v4, v4_prefix).ok().map(|net| IpNet::V4(net.trunc()));
    }
    Some(network)
}

/// `localhost` and everything below it, in lower case.
pub(super) fn is_loopback_name(host: &str) -> bool {
    host == "localhost" || host.ends_with(".localhost")
}

/// The address in `[...]`.
pub(super) fn bracketed_address(text: &str) -> Option<IpAddr> {
    text.parse::<Ipv6Addr>()
        .ok()
        .map(|address| IpAddr::V6(address).to_canonical())
}

/// Whether `text` matches `pattern`, where `*` stands for any run of bytes. At most `pattern.len() * text.len()`
/// steps and no recursion.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where to go on after the last `*`: the pattern behind it, and how much of the text it has eaten.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p + 1, t));
                p += 1;
            }
            Some(byte) if text.get(t) == Some(byte) => {
                p += 1;
                t += 1;
            }
            _ => match &mut star {
                Some((after, eaten)) => {
                    *eaten += 1;
                    (p, t) = (*after, *eaten);
                }
                None => return false,
            },
        }
    }
    pattern
        .get(p..)
        .is_some_and(|rest| rest.iter().all(|byte| *byte == b'*'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_star_stands_for_any_run_of_characters() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*", "a.b", true),
            ("a*", "a", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("*.a.com", ".a.com", true),
            ("*.a.com", "a.com", false),
            ("**", "x", true),
            ("", "", true),
            ("", "x", false),
            ("*a", "aab", false),
        ] {
            assert_eq!(glob(pattern, text), expected, "{pattern} on {text}");
        }
    }

    /// The definition, slow and obvious.
    fn reference(pattern: &[u8], text: &[u8]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some((b'*', rest)) => (0..=text.len()).any(|eaten| reference(rest, &text[eaten..])),
            Some((byte, rest)) => text.first() == Some(byte) && reference(rest, &text[1..]),
        }
    }

    proptest! {
        #[test]
        fn the_matcher_agrees_with_the_definition(pattern in "[ab*]{0,8}", text in "[ab]{0,8}") {
            prop_assert_eq!(glob(&pattern, &text), reference(pattern.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn hosts_in_an_intersection_match_both_sides(
            left in "[ab.*]{1,6}", right in "[ab.*]{1,6}", host in "[ab][ab.]{0,6}[ab]",
        ) {
            use crate::network::{Destination, Scheme};
            let (left, right) = (HostPattern::classify(&left), HostPattern::classify(&right));
            let destination = Destination::new(Scheme::Http, &host, 80);
            let both = left.matches(&destination) && right.matches(&destination);
            if let Ok(result) = left.intersect(&right) {
                let admitted = result.as_ref().is_some_and(|host| host.matches(&destination));
                // Neither more than both sides nor, where it is decided, less.
                prop_assert_eq!(admitted, both, "{:?} and {:?} made {:?}", left, right, result);
            }
        }
    }

    #[test]
    fn a_pattern_full_of_stars_takes_bounded_time() {
        let pattern = format!("{}b", "a*".repeat(120));
        assert!(!glob(&pattern, &"a".repeat(4096)));
    }

    #[test]
    fn networks_clear_host_bits_and_unmap_ipv4() {
        let net = |text: &str, prefix| network(text.parse().unwrap(), prefix).map(|net| net.to_string());
        assert_eq!(net("10.1.2.3", 8).as_deref(), Some("10.0.0.0/8"));
        assert_eq!(net("10.1.2.3", 33), None);
        assert_eq!(net("fd12::1", 8).as_deref(), Some("fd00::/8"));
        assert_eq!(net("::ffff:10.1.2.3", 104).as_deref(), Some("10.0.0.0/8"));
        assert_eq!(net("::ffff:10.1.2.3", 95).as_deref(), Some("::fffe:0:0/95"));
        assert_eq!(net("::1", 129), None);
    }
}
