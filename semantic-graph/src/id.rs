//! Validated names and numbers: [`RequestId`], [`EdgeType`] and [`NodeId`].

use std::borrow::Borrow;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, LazyLock};

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};

use crate::code::{Code, Coded};

/// Longest request id or edge type, in bytes.
pub const MAX_NAME_LEN: usize = 128;

/// A name that is not a request id, or not an edge type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidName {
    code: Code,
}

impl InvalidName {
    /// [`Code::InvalidRequestId`] or [`Code::InvalidEdgeType`].
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }

    fn rule(&self) -> &'static str {
        match self.code {
            Code::InvalidEdgeType => "an edge type is an ASCII letter and up to 127 of A-Z a-z 0-9 . _ : -",
            _ => "a request id is 1 to 128 of A-Z a-z 0-9 . _ : -",
        }
    }
}

impl fmt::Display for InvalidName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Coded(self.code, self.rule()).fmt(f)
    }
}

impl std::error::Error for InvalidName {}

fn well_formed(text: &str) -> bool {
    (1..=MAX_NAME_LEN).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-'))
}

macro_rules! name_type {
    ($name:ident, $expecting:literal) => {
        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Whether two handles share one allocation; equal names need not.
            pub(crate) fn same_allocation(&self, other: &Self) -> bool {
                Arc::ptr_eq(&self.0, &other.0)
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.same_allocation(other) || self.as_str() == other.as_str()
            }
        }

        impl Eq for $name {}

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
                Some(self.cmp(other))
            }
        }

        impl Ord for $name {
            fn cmp(&self, other: &Self) -> std::cmp::Ordering {
                self.as_str().cmp(other.as_str())
            }
        }

        impl std::hash::Hash for $name {
            fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
                self.as_str().hash(state);
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                self.as_str()
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                self.as_str()
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.as_str() == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                self.as_str() == *other
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self.as_str(), f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidName;
            fn from_str(text: &str) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl TryFrom<&str> for $name {
            type Error = InvalidName;
            fn try_from(text: &str) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Name;
                impl Visitor<'_> for Name {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expecting)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        $name::new(text).map_err(E::custom)
                    }
                }
                deserializer.deserialize_str(Name)
            }
        }
    };
}

/// A correlation handle that a harness puts on a model request.
///
/// ASCII letters, digits and `. _ : -`, 1 to 128 bytes, case-sensitive, never normalised. Cloning
/// shares the text.
#[derive(Clone)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// Validates `text`.
    ///
    /// # Errors
    /// [`InvalidName`] with [`Code::InvalidRequestId`].
    pub fn new(text: &str) -> Result<Self, InvalidName> {
        if well_formed(text) {
            Ok(Self(text.into()))
        } else {
            Err(InvalidName {
                code: Code::InvalidRequestId,
            })
        }
    }
}

name_type!(RequestId, "a request id");

/// The label of a semantic edge.
///
/// An ASCII letter followed by letters, digits and `. _ : -`, at most 128 bytes, case-sensitive.
/// Any well-formed label is kept byte for byte; the ones in common use have constructors and share
/// one allocation per process.
#[derive(Clone)]
pub struct EdgeType(Arc<Box<str>>);

const KNOWN: [&str; 7] = [
    "continuation",
    "compaction_attempt",
    "compaction",
    "subagent_call",
    "subagent_return",
    "agent_message",
    "subagent_cancel",
];

static KNOWN_LABELS: LazyLock<[EdgeType; 7]> = LazyLock::new(|| KNOWN.map(|text| EdgeType(Arc::new(text.into()))));

impl EdgeType {
    /// Validates `text`.
    ///
    /// # Errors
    /// [`InvalidName`] with [`Code::InvalidEdgeType`].
    pub fn new(text: &str) -> Result<Self, InvalidName> {
        if let Some(i) = KNOWN.iter().position(|known| *known == text) {
            return Ok(KNOWN_LABELS[i].clone());
        }
        if well_formed(text) && text.as_bytes()[0].is_ascii_alphabetic() {
            Ok(Self(Arc::new(text.into())))
        } else {
            Err(InvalidName {
                code: Code::InvalidEdgeType,
            })
        }
    }

    /// Whether somebody else holds this very allocation, as is so for the usual labels.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// The next step of the same agent.
    #[must_use]
    pub fn continuation() -> Self {
        KNOWN_LABELS[0].clone()
    }

    /// A context summary was asked for; the target turn wrote it.
    #[must_use]
    pub fn compaction_attempt() -> Self {
        KNOWN_LABELS[1].clone()
    }

    /// A context summary was accepted; the source turn wrote it.
    #[must_use]
    pub fn compaction() -> Self {
        KNOWN_LABELS[2].clone()
    }

    /// A turn started a subagent.
    #[must_use]
    pub fn subagent_call() -> Self {
        KNOWN_LABELS[3].clone()
    }

    /// A subagent's result reached a turn.
    #[must_use]
    pub fn subagent_return() -> Self {
        KNOWN_LABELS[4].clone()
    }

    /// One agent wrote to another.
    #[must_use]
    pub fn agent_message() -> Self {
        KNOWN_LABELS[5].clone()
    }

    /// A turn stopped a subagent.
    #[must_use]
    pub fn subagent_cancel() -> Self {
        KNOWN_LABELS[6].clone()
    }
}

name_type!(EdgeType, "an edge type");

/// The position of a node in its trace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(NonZeroU32);

impl NodeId {
    /// The node at position `index`; a trace has no position 2³² − 1.
    #[must_use]
    pub const fn new(index: u32) -> Self {
        // One more than the position, so that no node is zero and `Option` needs no room.
        match NonZeroU32::new(index.wrapping_add(1)) {
            Some(number) => Self(number),
            None => Self(NonZeroU32::MAX),
        }
    }

    /// The position as an index into [`crate::Trace::nodes`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.get() as usize
    }

    /// The position as a number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0.get() - 1
    }

    /// The node at `index`, if that fits.
    pub(crate) fn from_index(index: usize) -> Option<Self> {
        u32::try_from(index).ok().map(Self::new)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({})", self.get())
    }
}

impl From<u32> for NodeId {
    fn from(index: u32) -> Self {
        Self::new(index)
    }
}

impl Serialize for NodeId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(self.get())
    }
}

impl<'de> Deserialize<'de> for NodeId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = NodeId;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a node number")
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<NodeId, E> {
                u32::try_from(number)
                    .ok()
                    .filter(|number| *number < u32::MAX)
                    .map(NodeId::new)
                    .ok_or(())
                    .map_err(|_| E::custom(Coded(Code::WrongType, "a node number needs 32 bits")))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<NodeId, E> {
                match u64::try_from(number) {
                    Ok(number) => self.visit_u64(number),
                    Err(_) => Err(E::custom(Coded(Code::NegativeNode, "a node number is at least 0"))),
                }
            }
        }
        deserializer.deserialize_u64(Number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_labels_share_one_allocation() {
        let a = EdgeType::new("compaction").unwrap();
        assert!(a.same_allocation(&EdgeType::compaction()));
        assert_eq!(a, "compaction");
        let all = [
            EdgeType::continuation(),
            EdgeType::compaction_attempt(),
            EdgeType::compaction(),
            EdgeType::subagent_call(),
            EdgeType::subagent_return(),
            EdgeType::agent_message(),
            EdgeType::subagent_cancel(),
        ];
        for (label, text) in all.iter().zip(KNOWN) {
            assert_eq!(label, &text);
        }
    }

    #[test]
    fn names_are_checked_as_a_whole() {
        for bad in ["", "a\n", " a", "a/b", "é", "\u{661}", &"x".repeat(129)] {
            assert_eq!(RequestId::new(bad).unwrap_err().code(), Code::InvalidRequestId);
            assert_eq!(EdgeType::new(bad).unwrap_err().code(), Code::InvalidEdgeType);
        }
        for bad in ["1a", "_a", "-", "."] {
            assert!(RequestId::new(bad).is_ok());
            assert_eq!(EdgeType::new(bad).unwrap_err().code(), Code::InvalidEdgeType);
        }
        assert!(RequestId::new(&"x".repeat(128)).is_ok());
    }
}
