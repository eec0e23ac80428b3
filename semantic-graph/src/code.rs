//! [`Code`]: the stable name of every way in which data can be refused.

use std::fmt;

/// The stable, machine-readable name of a refusal.
///
/// The text form (`self_edge`, `wrong_type`, …) is part of the API: it is what a server puts in a
/// response and what another implementation can compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Code {
    /// A request id has a wrong character, or is empty or longer than 128 bytes.
    InvalidRequestId,
    /// An edge type has a wrong character, a wrong first one, or a wrong length.
    InvalidEdgeType,
    /// An object has a key that its type does not know.
    UnknownField,
    /// An object lacks a required key.
    MissingField,
    /// An object names one of its keys twice.
    DuplicateField,
    /// A value has another JSON type than the one expected; nothing is coerced.
    WrongType,
    /// A node number is below zero.
    NegativeNode,
    /// A tag (`role`, part `type`, tool call `type`, finish reason) names nothing known.
    UnknownVariant,
    /// An edge starts and ends at one request.
    SelfEdge,
    /// Two edges of one set are equal in source, target and type.
    DuplicateEdge,
    /// A text holds a lone surrogate where real text is required.
    InvalidText,
    /// JSON is nested deeper than [`crate::json::MAX_DEPTH`].
    TooDeep,
    /// The text is not JSON.
    InvalidJson,
    /// A provider state item has a shape that cannot be hashed.
    InvalidProviderState,
    /// A node's parent is not an earlier node.
    InvalidParent,
    /// A link names a node that does not exist.
    InvalidLink,
    /// The same link occurs twice on one node.
    DuplicateLink,
    /// A node is linked to itself.
    SelfLink,
    /// Two arrays that belong together differ in length.
    LengthMismatch,
    /// The record has a version that this crate does not read.
    UnsupportedVersion,
    /// A configured maximum was passed.
    LimitExceeded,
}

impl Code {
    const ALL: [(Code, &'static str); 21] = [
        (Code::InvalidRequestId, "invalid_request_id"),
        (Code::InvalidEdgeType, "invalid_edge_type"),
        (Code::UnknownField, "unknown_field"),
        (Code::MissingField, "missing_field"),
        (Code::DuplicateField, "duplicate_field"),
        (Code::WrongType, "wrong_type"),
        (Code::NegativeNode, "negative_node"),
        (Code::UnknownVariant, "unknown_variant"),
        (Code::SelfEdge, "self_edge"),
        (Code::DuplicateEdge, "duplicate_edge"),
        (Code::InvalidText, "invalid_text"),
        (Code::TooDeep, "too_deep"),
        (Code::InvalidJson, "invalid_json"),
        (Code::InvalidProviderState, "invalid_provider_state"),
        (Code::InvalidParent, "invalid_parent"),
        (Code::InvalidLink, "invalid_link"),
        (Code::DuplicateLink, "duplicate_link"),
        (Code::SelfLink, "self_link"),
        (Code::LengthMismatch, "length_mismatch"),
        (Code::UnsupportedVersion, "unsupported_version"),
        (Code::LimitExceeded, "limit_exceeded"),
    ];

    /// The name in snake case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        // The table is in declaration order, which a test holds it to.
        Self::ALL[self as usize].1
    }

    /// The code with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, text)| *text == name).map(|(code, _)| *code)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A message that carries its code through any serde format: `code: detail`.
pub(crate) struct Coded<D>(pub(crate) Code, pub(crate) D);

impl<D: fmt::Display> fmt::Display for Coded<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0, self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_own_name_and_is_found_by_it() {
        for (i, (code, name)) in Code::ALL.iter().enumerate() {
            assert_eq!(*code as usize, i);
            assert_eq!(code.as_str(), *name);
            assert_eq!(Code::from_name(name), Some(*code));
        }
        assert_eq!(Code::from_name("self_edg"), None);
    }
}
