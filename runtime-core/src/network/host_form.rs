//! [`HostForm`]: the spellings of a host that hosted providers accept.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::host::MAX_HOST_BYTES;

/// A host as hosted providers accept it in their lists: a DNS name, perhaps with a leading `*.`, an address, or a
/// network. No scheme, port, path, user information, trailing dot, or other wildcard. What else a provider wants
/// (only networks in a block list, no IPv6, ports) its own crate checks on top.
///
/// ```
/// use runtime_core::network::{HostForm, HostFormProblem};
///
/// assert_eq!(HostForm::parse("*.Example.com")?.to_string(), "*.example.com");
/// assert!(HostForm::parse("10.1.2.3/8")?.has_host_bits());
/// assert_eq!(HostForm::parse("a.com:443"), Err(HostFormProblem::Port));
/// assert_eq!(HostForm::parse("10.0.0.256"), Err(HostFormProblem::Address));
/// # Ok::<(), HostFormProblem>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum HostForm {
    /// A name in lower case, without the `*.`.
    Name {
        /// `example.com`
        name: String,
        /// Whether `*.` stood before it.
        wildcard: bool,
    },
    /// An address.
    Address(IpAddr),
    /// A network, with the host bits that were written.
    Network(IpNet),
}

/// Why a text is not a [`HostForm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum HostFormProblem {
    /// Nothing at all.
    #[error("it is empty")]
    Empty,
    /// A scheme.
    #[error("it has a scheme, and this provider knows only hosts")]
    Scheme,
    /// User information.
    #[error("it has user information")]
    UserInfo,
    /// A path, query or fragment that is not the size of a network.
    #[error("it has a path, query or fragment, or a network size that is none")]
    Path,
    /// A port.
    #[error("it has a port")]
    Port,
    /// Brackets or a `*` other than the leading `*.`.
    #[error("a wildcard can only be a leading \"*.\"")]
    Wildcard,
    /// Something with digits that is no address.
    #[error("it looks like an address, but is none")]
    Address,
    /// A label that is empty, longer than 63, begins or ends with `-`, or has another character than letters, digits
    /// and `-`; a name longer than 253; a trailing dot.
    #[error("it is no DNS name: labels are 1 to 63 letters, digits and inner hyphens")]
    Label,
}

impl HostForm {
    /// Parses one entry.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn parse(text: &str) -> Result<Self, HostFormProblem> {
        if text.is_empty() {
            return Err(HostFormProblem::Empty);
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        if let Ok(network) = text.parse() {
            return Ok(Self::Network(network));
        }
        if text.contains("://") {
            return Err(HostFormProblem::Scheme);
        }
        if text.contains('@') {
            return Err(HostFormProblem::UserInfo);
        }
        if text.contains(['/', '?', '#']) {
            return Err(HostFormProblem::Path);
        }
        if text.contains(['[', ']']) {
            return Err(HostFormProblem::Address);
        }
        if text.contains(':') {
            return Err(HostFormProblem::Port);
        }
        let (wildcard, name) = match text.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, text),
        };
        if name.contains('*') {
            return Err(HostFormProblem::Wildcard);
        }
        if !is_dns_name(name) {
            return Err(HostFormProblem::Label);
        }
        // No top-level domain is a number, and resolvers read such names as addresses.
        if name
            .rsplit('.')
            .next()
            .is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()))
        {
            return Err(HostFormProblem::Address);
        }
        Ok(Self::Name {
            name: name.to_ascii_lowercase(),
            wildcard,
        })
    }

    /// Whether it is a network whose address has bits beyond its size, as in `10.1.2.3/8`.
    pub fn has_host_bits(&self) -> bool {
        matches!(self, Self::Network(network) if network.addr() != network.network())
    }

    /// Whether it is an address or a network, not a name.
    pub fn is_numeric(&self) -> bool {
        !matches!(self, Self::Name { .. })
    }

    /// Whether it is an IPv6 address or network.
    pub fn is_ipv6(&self) -> bool {
        matches!(self, Self::Address(IpAddr::V6(_)) | Self::Network(IpNet::V6(_)))
    }
}

impl fmt::Display for HostForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name { name, wildcard: true } => write!(f, "*.{name}"),
            Self::Name { name, wildcard: false } => f.write_str(name),
            Self::Address(address) => write!(f, "{address}"),
            Self::Network(network) => write!(f, "{network}"),
        }
    }
}

/// Labels of 1 to 63 letters, digits and inner hyphens, 253 bytes in all.
fn is_dns_name(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    name.len() <= MAX_HOST_BYTES && name.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_addresses_and_networks_are_told_apart() {
        let label = "a".repeat(63);
        for (text, shown, numeric, ipv6) in [
            ("a.com", "a.com", false, false),
            ("A.Com", "a.com", false, false),
            ("*.a.com", "*.a.com", false, false),
            ("localhost", "localhost", false, false),
            ("xn--bcher-kva.example", "xn--bcher-kva.example", false, false),
            ("1.a", "1.a", false, false),
            (&label, &label, false, false),
            ("10.0.0.5", "10.0.0.5", true, false),
            ("10.1.2.3/8", "10.1.2.3/8", true, false),
            ("0.0.0.0/0", "0.0.0.0/0", true, false),
            ("::1", "::1", true, true),
            ("fd00::/8", "fd00::/8", true, true),
        ] {
            let form = HostForm::parse(text).unwrap();
            assert_eq!(form.to_string(), shown);
            assert_eq!((form.is_numeric(), form.is_ipv6()), (numeric, ipv6), "{text}");
        }
        assert!(HostForm::parse("10.1.2.3/8").unwrap().has_host_bits());
        assert!(!HostForm::parse("10.0.0.0/8").unwrap().has_host_bits());
    }

    #[test]
    fn everything_else_is_refused_for_its_own_reason() {
        use HostFormProblem::*;
        let long_label = "a".repeat(64);
        let long_name = ["a".repeat(60).as_str(); 5].join(".");
        for (text, problem) in [
            ("", Empty),
            ("https://a.com", Scheme),
            ("user@a.com", UserInfo),
            ("a.com/path", Path),
            ("a.com?", Path),
            ("10.0.0.0/33", Path),
            ("10.0.0.0/", Path),
            ("fd00::/129", Path),
            ("a.com:443", Port),
            ("10.0.0.5:80", Port),
            ("10.0.0.5:80-90", Port),
            ("[::1]", Address),
            ("10.0.0.256", Address),
            ("127.1", Address),
            ("*", Wildcard),
            ("*.*.com", Wildcard),
            ("a*.com", Wildcard),
            ("*a.com", Wildcard),
            ("*.", Label),
            ("a.com.", Label),
            ("a..com", Label),
            (".a.com", Label),
            ("-a.com", Label),
            ("a-.com", Label),
            ("my_db.com", Label),
            ("b\u{fc}cher.example", Label),
            (" a.com", Label),
            (&long_label, Label),
            (&long_name, Label),
        ] {
            assert_eq!(HostForm::parse(text), Err(problem), "{text:?}");
        }
    }
}
