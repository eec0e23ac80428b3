//! [`Decision`]: whether a destination may be reached, and what decided.

use std::fmt;
use std::net::IpAddr;

use super::address::AddressKind;
use super::routes::Origin;
use super::rule::Rule;

/// Whether a destination may be reached, and what decided. Its `Display` is a line for a log, without user information.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decision<'a> {
    /// Permitted by this allow rule.
    AllowedBy(&'a Rule),
    /// Permitted because it is a route of the framework, which no policy can block.
    Route(&'a Origin),
    /// Refused by this block rule, or by one that is no rule and therefore blocks everything.
    BlockedBy(&'a Rule),
    /// Refused because no allow rule matches.
    NotAllowed,
    /// Refused because a tunnel to another port than 443 needs a rule that names its scheme.
    TunnelPort,
    /// Refused because it is this very machine.
    Loopback,
    /// Refused because the host is neither a name nor an address.
    MalformedHost,
    /// Refused because the name resolves to an address that is not globally routable.
    NonGlobal(IpAddr, AddressKind),
    /// Refused because the name resolves to nothing.
    NoAddress,
}

impl<'a> Decision<'a> {
    /// Whether the destination may be reached.
    pub fn is_permitted(&self) -> bool {
        matches!(self, Self::AllowedBy(_) | Self::Route(_))
    }

    /// The rule that decided, if one did.
    pub fn rule(&self) -> Option<&'a Rule> {
        match self {
            Self::AllowedBy(rule) | Self::BlockedBy(rule) => Some(rule),
            _ => None,
        }
    }

    /// Whether an allow rule could change the answer: the others are refused whatever the policy says, or by a block.
    pub fn could_be_allowed(&self) -> bool {
        matches!(self, Self::NotAllowed | Self::TunnelPort)
    }

    /// The reason in `snake_case`, as it appears in logs and JSON reports.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::AllowedBy(_) => "allowed_by_rule",
            Self::Route(_) => "framework_route",
            Self::BlockedBy(_) => "blocked_by_rule",
            Self::NotAllowed => "not_allowed",
            Self::TunnelPort => "tunnel_port",
            Self::Loopback => "loopback",
            Self::MalformedHost => "malformed_host",
            Self::NonGlobal(..) => "non_global_address",
            Self::NoAddress => "no_address",
        }
    }
}

impl fmt::Display for Decision<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllowedBy(rule) => write!(f, "allowed by {}", rule.shown()),
            Self::Route(origin) => write!(f, "allowed as the framework route {origin}"),
            Self::BlockedBy(rule) => match rule.problem() {
                Some(problem) => write!(f, "refused: the block rule {} is broken: {problem}", rule.shown()),
                None => write!(f, "refused: blocked by {}", rule.shown()),
            },
            Self::NotAllowed => f.write_str("refused: no allow rule matches"),
            Self::TunnelPort => {
                f.write_str("refused: a tunnel to a port other than 443 needs a rule that names its scheme")
            }
            Self::Loopback => f.write_str("refused: loopback"),
            Self::MalformedHost => f.write_str("refused: the host is neither a name nor an address"),
            Self::NonGlobal(address, kind) => write!(f, "refused: resolves to {address}, which is {kind}"),
            Self::NoAddress => f.write_str("refused: resolves to no address"),
        }
    }
}
