//! [`Destination`]: where a connection wants to go, in one comparable spelling.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use serde::Serialize;

use super::host::{MAX_HOST_BYTES, is_loopback_name};
use super::rule::Rule;

/// How a program talks to a destination, as far as an enforcer can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheme {
    /// Plain HTTP.
    Http,
    /// TLS.
    Https,
    /// Any bytes over TCP, through a relay.
    Tcp,
}

impl Scheme {
    /// The name as it stands in a rule.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
            Self::Tcp => "tcp",
        }
    }

    /// The port that a URL of this scheme means when it names none; TCP has none.
    pub const fn default_port(self) -> Option<u16> {
        match self {
            Self::Http => Some(80),
            Self::Https => Some(443),
            Self::Tcp => None,
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where a connection wants to go.
///
/// The host is lower-cased, its trailing dots and IPv6 brackets are gone, and an address has its shortest spelling,
/// with IPv4 taken out of an IPv4-mapped address. So two spellings of one host cannot be told apart by a rule.
///
/// ```
/// use runtime_core::network::{Destination, Scheme};
///
/// let destination = Destination::new(Scheme::Https, "API.Example.com.", 443);
/// assert_eq!(destination.host(), "api.example.com");
/// assert_eq!(destination.to_string(), "https://api.example.com:443");
/// assert_eq!(Destination::new(Scheme::Http, "[::ffff:10.0.0.5]", 80).host(), "10.0.0.5");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Destination {
    scheme: Scheme,
    host: String,
    address: Option<IpAddr>,
    port: u16,
    well_formed: bool,
}

impl Destination {
    /// A destination from what a program asked for. Never fails: a host that no resolver should be asked for makes
    /// a destination that is not [well formed](Self::is_well_formed), and which every policy refuses.
    pub fn new(scheme: Scheme, host: &str, port: u16) -> Self {
        let literal = host
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .filter(|inner| inner.parse::<Ipv6Addr>().is_ok());
        let bare = literal.unwrap_or(host).trim_end_matches('.');
        match bare.parse::<IpAddr>() {
            Ok(address) => {
                let address = address.to_canonical();
                Self {
                    scheme,
                    host: address.to_string(),
                    address: Some(address),
                    port,
                    well_formed: true,
                }
            }
            Err(_) => {
                let well_formed = !bare.is_empty()
                    && bare.len() <= MAX_HOST_BYTES
                    && bare
                        .bytes()
                        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_'));
                Self {
                    scheme,
                    host: bare.to_ascii_lowercase(),
                    address: None,
                    port,
                    well_formed,
                }
            }
        }
    }

    /// The same destination under another scheme.
    #[must_use]
    pub fn with_scheme(mut self, scheme: Scheme) -> Self {
        self.scheme = scheme;
        self
    }

    /// How the program talks to it.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The name or address, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The address, when the host is one and not a name.
    pub fn address(&self) -> Option<IpAddr> {
        self.address
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether the host is an address or a name of letters, digits, dots, hyphens and underscores, of at most 253
    /// bytes. Anything else is refused by every policy, `*` included: percent signs, Unicode and the like are ways to
    /// spell a blocked name differently.
    pub fn is_well_formed(&self) -> bool {
        self.well_formed
    }

    /// Whether it is this very machine by its name or address: `localhost`, `*.localhost`, 127.0.0.0/8, `::1`.
    /// Spellings that only a resolver understands (`127.1`, `2130706433`) are caught after resolution.
    pub fn is_loopback(&self) -> bool {
        match self.address {
            Some(address) => address.is_loopback(),
            None => is_loopback_name(&self.host),
        }
    }

    /// The narrowest rule that admits this destination, for messages and recorded allowlists; `None` for a host that
    /// no rule can name.
    ///
    /// ```
    /// use runtime_core::network::{Destination, Scheme};
    /// let rule = Destination::new(Scheme::Https, "a.com", 443).rule();
    /// assert_eq!(rule.map(|rule| rule.to_string()).as_deref(), Some("https://a.com"));
    /// ```
    pub fn rule(&self) -> Option<Rule> {
        if !self.well_formed {
            return None;
        }
        let mut text = format!("{}://{}", self.scheme, Bracketed(&self.host));
        if self.scheme.default_port() != Some(self.port) {
            text.push_str(&format!(":{}", self.port));
        }
        Some(Rule::new(text))
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.well_formed {
            write!(f, "{}://{}:{}", self.scheme, Bracketed(&self.host), self.port)
        } else {
            // Bytes that somebody else chose, on their way into a log.
            let shown: String = self.host.chars().take(80).collect();
            write!(f, "{}://{}:{}", self.scheme, shown.escape_debug(), self.port)
        }
    }
}

/// A host as it stands in a URL: IPv6 in brackets.
pub(super) struct Bracketed<'a>(pub(super) &'a str);

impl fmt::Display for Bracketed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.contains(':') {
            write!(f, "[{}]", self.0)
        } else {
            f.write_str(self.0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host_of(text: &str) -> String {
        Destination::new(Scheme::Https, text, 443).host().to_owned()
    }

    #[test]
    fn spellings_of_one_host_are_one_destination() {
        for text in ["example.com", "EXAMPLE.COM", "Example.com.", "example.com..."] {
            assert_eq!(host_of(text), "example.com", "{text}");
        }
        for text in ["::1", "[::1]", "0:0:0:0:0:0:0:1", "[0000::0001]"] {
            assert_eq!(host_of(text), "::1", "{text}");
        }
        for text in ["10.0.0.5", "10.0.0.5.", "::ffff:10.0.0.5", "[::FFFF:0a00:0005]"] {
            assert_eq!(host_of(text), "10.0.0.5", "{text}");
        }
    }

    #[test]
    fn hosts_that_no_resolver_should_see_are_not_well_formed() {
        let long = "a".repeat(254);
        for text in [
            "",
            ".",
            "a b",
            "a\0b",
            "ex%61mple.com",
            "ｅxample.com",
            "a/b",
            "a@b",
            "*",
            "fe80::1%eth0",
            "[x]",
            &long,
        ] {
            assert!(!Destination::new(Scheme::Https, text, 443).is_well_formed(), "{text:?}");
        }
        for text in ["a", "my_db", "xn--bcher-kva.example", "2130706433", "[2001:db8::1]"] {
            assert!(Destination::new(Scheme::Https, text, 443).is_well_formed(), "{text:?}");
        }
    }

    #[test]
    fn loopback_is_known_by_name_and_by_address() {
        for text in [
            "localhost",
            "LOCALHOST.",
            "a.localhost",
            "127.0.0.1",
            "127.255.255.254",
            "::1",
            "::ffff:127.0.0.1",
        ] {
            assert!(Destination::new(Scheme::Http, text, 80).is_loopback(), "{text}");
        }
        for text in [
            "localhost.com",
            "notlocalhost",
            "0.0.0.0",
            "127.1",
            "2130706433",
            "128.0.0.1",
        ] {
            assert!(!Destination::new(Scheme::Http, text, 80).is_loopback(), "{text}");
        }
    }

    #[test]
    fn the_rule_of_a_destination_admits_it_and_nothing_beside_it() {
        for (scheme, host, port, expected) in [
            (Scheme::Https, "a.com", 443, "https://a.com"),
            (Scheme::Https, "a.com", 8443, "https://a.com:8443"),
            (Scheme::Http, "A.com.", 80, "http://a.com"),
            (Scheme::Http, "::1", 443, "http://[::1]:443"),
            (Scheme::Tcp, "db", 5432, "tcp://db:5432"),
        ] {
            let destination = Destination::new(scheme, host, port);
            let rule = destination.rule().unwrap();
            assert_eq!(rule.as_str(), expected);
            assert!(rule.matches(&destination));
            assert!(!rule.matches(&Destination::new(scheme, host, port + 1)));
            assert!(!rule.matches(&Destination::new(scheme, "b.com", port)));
        }
        assert_eq!(Destination::new(Scheme::Https, "a b", 443).rule(), None);
    }

    #[test]
    fn foreign_bytes_do_not_reach_a_log_as_they_are() {
        let text = Destination::new(Scheme::Https, "a\nb\u{1b}[31m", 1).to_string();
        assert_eq!(text, "https://a\\nb\\u{1b}[31m:1");
        assert!(Destination::new(Scheme::Https, &"\n".repeat(9999), 1).to_string().len() < 200);
    }
}
