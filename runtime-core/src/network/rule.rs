//! [`Rule`]: one entry of an allow or block list.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::destination::{Destination, Scheme};
use super::host::{self, HostPattern, MAX_HOST_BYTES};

/// The longest text that is looked at; anything longer is a [problem](RuleProblem::TooLong).
const MAX_RULE_BYTES: usize = 2048;

/// One entry of an allow or block list.
///
/// ```text
/// rule = "*" | [scheme "://"] [userinfo "@"] host [":" port] [path] [query] [fragment]
/// host = name or glob | IPv4 | "[" IPv6 "]" | IPv4 "/" bits | "[" IPv6 "]" "/" bits
/// ```
///
/// With a scheme and without a port the scheme's port is meant; without a scheme any port, over HTTP and HTTPS. `*` in
/// a host crosses dots. A network (`10.0.0.0/8`, with a port `10.0.0.0/8:443`) takes no scheme and matches
/// destinations that are addresses. `tcp://host:port` asks for a relay of bytes to that one place.
///
/// A rule is a *text* and what the text means: [`Display`](fmt::Display) and serde keep the text as it was written,
/// equality is of the text, and a text that means nothing is still a rule, which [`Rule::problem`] tells and which
/// [`Policy::validate`](super::Policy::validate) refuses with the name of its place in the list. Compare
/// [`canonical`](Self::canonical) spellings to compare meanings. `Debug` hides user information.
///
/// ```
/// use runtime_core::network::{Destination, Rule, Scheme};
///
/// let rule = Rule::parse("HTTPS://*.Example.com")?;
/// assert_eq!((rule.scheme(), rule.port()), (Some("https"), Some(443)));
/// assert_eq!(rule.to_string(), "HTTPS://*.Example.com");
/// assert_eq!(rule.canonical(), "https://*.example.com:443");
/// assert!(rule.matches(&Destination::new(Scheme::Https, "api.example.com", 443)));
/// assert!(!rule.matches(&Destination::new(Scheme::Https, "example.com", 443)));
/// # Ok::<(), runtime_core::network::RuleProblem>(())
/// ```
#[derive(Clone)]
pub struct Rule {
    text: String,
    form: Result<Form, RuleProblem>,
}

/// What a text means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) scheme: Option<String>,
    pub(super) host: HostPattern,
    /// As written; see [`Rule::port`] for what it means.
    pub(super) explicit_port: Option<u16>,
    pub(super) user_info: bool,
    /// Anything from the first `/`, `?` or `#` on that did not make the host a network.
    pub(super) tail: String,
}

/// Why a text is no rule, or no rule that our own enforcer can keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum RuleProblem {
    /// More than 2048 bytes, or a host of more than 253.
    #[error("it is too long")]
    TooLong,
    /// A character that no rule has.
    #[error("it has a character that a rule cannot have (write names beyond ASCII in their xn-- form)")]
    Character,
    /// What stands before `://` is no scheme.
    #[error("what stands before \"://\" is not a scheme")]
    Scheme,
    /// Not a number from 0 to 65535.
    #[error("its port is not a number from 0 to 65535")]
    Port,
    /// An IPv6 address without brackets.
    #[error("an IPv6 address needs brackets, as in [::1]")]
    BareIpv6,
    /// Brackets around something else than an IPv6 address.
    #[error("brackets hold an IPv6 address and nothing else; there are no character classes")]
    Brackets,
    /// No host.
    #[error("it has no host")]
    NoHost,
    /// A scheme that nothing ever uses.
    #[error("its scheme is none of http, https and tcp, so it can never match")]
    UnknownScheme,
    /// A `?` or `#` that was not meant to start a query or fragment.
    #[error("'?' starts a query and '#' a fragment; a single-character wildcard does not exist")]
    Query,
    /// Something like a network, which is none.
    #[error("it looks like a network, but is not: write ADDRESS/BITS or ADDRESS/BITS:PORT, without a scheme")]
    Network,
    /// Digits where an address was meant, in a spelling that resolvers understand differently.
    #[error("its host looks like an address, but is not in the form 1.2.3.4")]
    NumericHost,
    /// An empty label.
    #[error("its host has an empty label (subdomains are written *.example.com)")]
    EmptyLabel,
    /// `*.`, or `*` with a path.
    #[error("everything is written \"*\" and nothing more")]
    DressedStar,
    /// A `tcp` rule without one place to relay to.
    #[error("a tcp rule needs one host, without wildcards, and a port")]
    Relay,
    /// A `tcp` rule in a block list.
    #[error("tcp rules ask for a relay, so they can only be allowed; block the host instead")]
    BlockedRelay,
    /// Two rules whose intersection is not known.
    #[error("cannot intersect: a rule without a host, or with a path and no scheme")]
    NotComparable,
    /// Two globs whose intersection is not known.
    #[error("cannot intersect: two patterns of which neither is inside the other")]
    GlobOverlap,
}

/// Which list a rule stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RuleList {
    /// What may be reached.
    Allow,
    /// What may not be.
    Block,
}

impl RuleList {
    /// The name of the config field.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Block => "block",
        }
    }
}

impl Rule {
    /// The rule of a text, whatever it is. See [`problem`](Self::problem).
    pub fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        let form = parse(&text);
        Self { text, form }
    }

    /// The rule of a text that is one.
    ///
    /// # Errors
    /// What is wrong with the text. Rules that can never match (`ws://a.com`, `https://`) do parse; [`check`](Self::check)
    /// refuses them.
    pub fn parse(text: &str) -> Result<Self, RuleProblem> {
        let rule = Self::new(text);
        match rule.form {
            Ok(_) => Ok(rule),
            Err(problem) => Err(problem),
        }
    }

    /// `*`: everything.
    pub fn any() -> Self {
        Self::new("*")
    }

    /// Why the text is no rule. Such a rule matches nothing; in a block list of a policy it blocks everything.
    pub fn problem(&self) -> Option<RuleProblem> {
        self.form.as_ref().err().copied()
    }

    /// Whether our own enforcer can keep this rule in `list`, to the letter.
    ///
    /// # Errors
    /// The problem of a text that is no rule, that can never match, or that means something else than it seems to.
    /// Providers that enforce by themselves have forms of their own and check those instead.
    pub fn check(&self, list: RuleList) -> Result<(), RuleProblem> {
        let form = self.form.as_ref().map_err(|problem| *problem)?;
        let scheme = form.scheme.as_deref();
        if !matches!(scheme, None | Some("http" | "https" | "tcp")) {
            return Err(RuleProblem::UnknownScheme);
        }
        let is_path = form.tail.starts_with('/');
        if !form.tail.is_empty() && (!is_path || (scheme.is_none() && form.tail.contains(['?', '#']))) {
            return Err(RuleProblem::Query);
        }
        let bits_like = form
            .tail
            .strip_prefix('/')
            .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()));
        match &form.host {
            HostPattern::Empty => return Err(RuleProblem::NoHost),
            HostPattern::Any if scheme.is_none() && form.explicit_port.is_none() && !self.is_any() => {
                return Err(RuleProblem::DressedStar);
            }
            HostPattern::Address(_) if bits_like || (scheme.is_none() && is_path) => return Err(RuleProblem::Network),
            HostPattern::Any | HostPattern::Glob(_) | HostPattern::Name(_) if bits_like && scheme.is_none() => {
                return Err(RuleProblem::Network);
            }
            HostPattern::Glob(text) | HostPattern::Name(text) => {
                if text.split('.').any(str::is_empty) {
                    return Err(RuleProblem::EmptyLabel);
                }
                if matches!(form.host, HostPattern::Name(_)) && ends_in_a_number(text) {
                    return Err(RuleProblem::NumericHost);
                }
            }
            _ => {}
        }
        if scheme == Some("tcp") {
            if list == RuleList::Block {
                return Err(RuleProblem::BlockedRelay);
            }
            if self.relay().is_none() {
                return Err(RuleProblem::Relay);
            }
        }
        Ok(())
    }

    /// What a reader of this rule might get wrong although it is valid; for a warning.
    pub fn caution(&self) -> Option<&'static str> {
        let form = self.form.as_ref().ok()?;
        if form.user_info {
            return Some("user information in a rule is ignored, and a rule is no place for a password");
        }
        if !matches!(form.tail.as_str(), "" | "/") {
            return Some("the path of a rule is ignored: the whole host is meant");
        }
        match &form.host {
            HostPattern::Glob(text) if !text.starts_with("*.") => {
                Some("'*' crosses dots and matches inside a label: *example.com also matches notexample.com")
            }
            _ => None,
        }
    }

    /// The text as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it is exactly `*`.
    pub fn is_any(&self) -> bool {
        self.text == "*"
    }

    /// The scheme in lower case, when it names one.
    pub fn scheme(&self) -> Option<&str> {
        self.form.as_ref().ok()?.scheme.as_deref()
    }

    /// The host. `None` for a text that is no rule.
    pub fn host(&self) -> Option<&HostPattern> {
        self.form.as_ref().ok().map(|form| &form.host)
    }

    /// The port that it is about: the one written, else with a scheme 443 for `https` and 80 for any other, else any
    /// (`None`).
    pub fn port(&self) -> Option<u16> {
        self.form.as_ref().ok()?.port()
    }

    /// The port that is written in it.
    pub fn explicit_port(&self) -> Option<u16> {
        self.form.as_ref().ok()?.explicit_port
    }

    /// Whether it carries user information, which means nothing.
    pub fn has_user_info(&self) -> bool {
        self.form.as_ref().is_ok_and(|form| form.user_info)
    }

    /// Path, query and fragment as written, empty if there are none. The bits of a network are not among them.
    pub fn path(&self) -> &str {
        self.form.as_ref().map_or("", |form| &form.tail)
    }

    /// The one place that a `tcp` rule asks a relay for.
    pub fn relay(&self) -> Option<Destination> {
        let form = self.form.as_ref().ok()?;
        match (form.scheme.as_deref(), &form.host, form.explicit_port) {
            (Some("tcp"), HostPattern::Name(_) | HostPattern::Address(_), Some(port)) if port != 0 => {
                Some(Destination::new(Scheme::Tcp, &form.host.text(), port))
            }
            _ => None,
        }
    }

    /// Whether it matches `destination` itself: the meaning of an allow rule. An allow never widens to subdomains.
    pub fn matches(&self, destination: &Destination) -> bool {
        let Ok(form) = &self.form else { return false };
        if destination.scheme() == Scheme::Tcp && form.scheme.is_none() && !form.is_unbounded() {
            // A rule without a scheme is about HTTP and HTTPS. It must not grant a tunnel for arbitrary bytes.
            return false;
        }
        form.speaks_of(destination) && form.host.matches(destination)
    }

    /// Whether it matches `destination` or a parent domain of it: the meaning of a block rule. A block is not evaded
    /// through a subdomain.
    pub fn covers(&self, destination: &Destination) -> bool {
        let Ok(form) = &self.form else { return false };
        form.speaks_of(destination) && (form.host.matches(destination) || form.host.is_parent_of(destination))
    }

    /// Whether it names `address`, alone or by its network, as something that `destination` may have resolved to.
    pub(super) fn covers_address(&self, destination: &Destination, address: IpAddr) -> bool {
        let Ok(form) = &self.form else { return false };
        form.speaks_of(destination) && form.host.names_address(address)
    }

    /// The spelling that two rules of the same meaning share: lower case, no trailing dot, the implied port written
    /// out, addresses in their shortest form, no path and no user information. A text that is no rule is returned as
    /// it is.
    ///
    /// ```
    /// use runtime_core::network::Rule;
    /// assert_eq!(Rule::new("https://A.com./x").canonical(), Rule::new("https://a.com:443").canonical());
    /// assert_ne!(Rule::new("a.com:443").canonical(), Rule::new("https://a.com:443").canonical());
    /// ```
    pub fn canonical(&self) -> Cow<'_, str> {
        match &self.form {
            Ok(form) => {
                let canonical = form.to_string();
                if canonical == self.text {
                    Cow::Borrowed(&self.text)
                } else {
                    Cow::Owned(canonical)
                }
            }
            Err(_) => Cow::Borrowed(&self.text),
        }
    }

    pub(super) fn form(&self) -> Result<&Form, RuleProblem> {
        self.form.as_ref().map_err(|problem| *problem)
    }

    /// The text for messages: without user information, bounded, control characters escaped.
    pub(super) fn shown(&self) -> String {
        const LIMIT: usize = 120;
        let (scheme, rest) = match self.text.find("://") {
            Some(at) => self.text.split_at(at + 3),
            None => ("", self.text.as_str()),
        };
        let (mask, rest) = match rest.rsplit_once('@') {
            Some((_, rest)) => ("***@", rest),
            None => ("", rest),
        };
        // A text that is no rule may have its secret anywhere before an '@'.
        let scheme = if mask.is_empty() || self.form.is_ok() {
            scheme
        } else {
            ""
        };
        let shown: String = scheme
            .chars()
            .chain(mask.chars())
            .chain(rest.chars())
            .take(LIMIT + 1)
            .collect();
        if shown.chars().count() > LIMIT {
            let cut: String = shown.chars().take(LIMIT).collect();
            format!("{}…", cut.escape_debug())
        } else {
            shown.escape_debug().to_string()
        }
    }
}

impl Form {
    /// See [`Rule::port`].
    pub(super) fn port(&self) -> Option<u16> {
        self.explicit_port.or(match self.scheme.as_deref() {
            Some("https") => Some(443),
            Some(_) => Some(80),
            None => None,
        })
    }

    /// Every host, scheme and port.
    pub(super) fn is_unbounded(&self) -> bool {
        self.scheme.is_none() && self.explicit_port.is_none() && self.host == HostPattern::Any
    }

    /// Whether scheme and port are those of the destination.
    fn speaks_of(&self, destination: &Destination) -> bool {
        destination.is_well_formed()
            && self
                .scheme
                .as_deref()
                .is_none_or(|scheme| scheme == destination.scheme().as_str())
            && self.port().is_none_or(|port| port == destination.port())
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(scheme) = &self.scheme {
            write!(f, "{scheme}://")?;
        }
        write!(f, "{}", self.host)?;
        if let Some(port) = self.port() {
            write!(f, ":{port}")?;
        }
        Ok(())
    }
}

fn parse(text: &str) -> Result<Form, RuleProblem> {
    if text.len() > MAX_RULE_BYTES {
        return Err(RuleProblem::TooLong);
    }
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(RuleProblem::Character);
    }
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme, rest)) if is_scheme(scheme) => (Some(scheme.to_ascii_lowercase()), rest),
        Some(_) => return Err(RuleProblem::Scheme),
        None => (None, text),
    };
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (user_info, host_and_port) = match authority.rsplit_once('@') {
        Some((_, rest)) => (true, rest),
        None => (false, authority),
    };
    let (host, explicit_port) = parse_host_and_port(host_and_port)?;
    let form = Form {
        scheme,
        host,
        explicit_port,
        user_info,
        tail: tail.to_owned(),
    };
    Ok(as_network(&form).unwrap_or(form))
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
}

fn parse_host_and_port(text: &str) -> Result<(HostPattern, Option<u16>), RuleProblem> {
    if let Some(inner) = text.strip_prefix('[') {
        let (inner, after) = inner.split_once(']').ok_or(RuleProblem::Brackets)?;
        let address = host::bracketed_address(inner).ok_or(RuleProblem::Brackets)?;
        let port = match after.strip_prefix(':') {
            Some(port) => parse_port(port)?,
            None if after.is_empty() => None,
            None => return Err(RuleProblem::Brackets),
        };
        return Ok((HostPattern::Address(address), port));
    }
    if text.contains(['[', ']']) {
        return Err(RuleProblem::Brackets);
    }
    if text.parse::<Ipv6Addr>().is_ok() {
        return Err(RuleProblem::BareIpv6);
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, parse_port(port)?),
        None => (text, None),
    };
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    if host.len() > MAX_HOST_BYTES {
        return Err(RuleProblem::TooLong);
    }
    if !host
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b'*'))
    {
        return Err(RuleProblem::Character);
    }
    Ok((HostPattern::classify(&host), port))
}

/// Nothing after the colon is no port, as in a URL.
fn parse_port(text: &str) -> Result<Option<u16>, RuleProblem> {
    if text.is_empty() {
        return Ok(None);
    }
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(RuleProblem::Port);
    }
    text.parse().map(Some).map_err(|_| RuleProblem::Port)
}

/// The form with its address and `/bits` or `/bits:port` read as a network, if that is what it is.
fn as_network(form: &Form) -> Option<Form> {
    let (None, HostPattern::Address(address)) = (&form.scheme, &form.host) else {
        return None;
    };
    let (bits, port) = match form.tail.strip_prefix('/')?.split_once(':') {
        Some((bits, port)) if form.explicit_port.is_none() => (bits, Some(parse_port(port).ok()??)),
        Some(_) => return None,
        None => (form.tail.strip_prefix('/')?, form.explicit_port),
    };
    if bits.len() > 3 || !bits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let network = host::network(*address, bits.parse().ok()?)?;
    Some(Form {
        host: HostPattern::Network(network),
        explicit_port: port,
        tail: String::new(),
        ..form.clone()
    })
}

/// Whether the last label is a number, decimal or hexadecimal: what resolvers read as an address.
fn ends_in_a_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let hexadecimal = last.strip_prefix("0x").unwrap_or("-");
    !last.is_empty()
        && (last.bytes().all(|byte| byte.is_ascii_digit()) || hexadecimal.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

impl FromStr for Rule {
    type Err = RuleProblem;

    fn from_str(text: &str) -> Result<Self, RuleProblem> {
        Self::parse(text)
    }
}

impl From<&str> for Rule {
    /// See [`Rule::new`].
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl From<String> for Rule {
    /// See [`Rule::new`].
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

impl PartialEq for Rule {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Rule {}

impl std::hash::Hash for Rule {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rule({})", self.shown())
    }
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Rule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::new)
    }
}
