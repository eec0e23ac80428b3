//! One line of a store: framing, checksum, and [`Record`].

use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::error::StoreError;
use crate::call::ModelCall;
use crate::id::{EdgeType, NodeId};
use crate::json::{self, NonFinite, Value};
use crate::node::MessageNode;
use crate::record::{RecordOptions, With};

/// What one line says.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Record {
    /// The first line: the trace without nodes and calls.
    Open {
        /// Members of the trace's record.
        header: Value,
    },
    /// New nodes, and the calls that were recorded with them.
    Turn {
        /// In order; the first gets the next free id.
        nodes: Vec<MessageNode>,
        /// In order.
        calls: Vec<ModelCall>,
    },
    /// New links: target, source, label.
    Links(Vec<(NodeId, NodeId, EdgeType)>),
    /// Members of the header that changed.
    Set {
        /// The members and their new values.
        fields: Value,
    },
    /// The last line of a finished trace.
    Seal(Seal),
}

/// Counts and digest of a finished trace.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Seal {
    /// How many nodes.
    pub nodes: u64,
    /// How many calls.
    pub calls: u64,
    /// How many links.
    pub links: u64,
    /// BLAKE2b-128 of everything, in hex.
    pub digest: String,
}

/// The options with which nodes and calls are stored.
pub(super) const STORED: RecordOptions = RecordOptions {
    float_decimals: None,
    exclude_none: true,
};

/// What is written, without owning it.
pub(super) enum RecordRef<'a> {
    Open(&'a Value),
    Turn(&'a [MessageNode], &'a [ModelCall]),
    Links(&'a [(NodeId, NodeId, EdgeType)]),
    Set(&'a Value),
    Seal(&'a Seal),
}

/// A node without its links, which have records of their own.
pub(super) struct Unlinked<'a>(pub(super) &'a [MessageNode]);

impl Serialize for Unlinked<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeSeq;
        let mut seq = serializer.serialize_seq(Some(self.0.len()))?;
        for node in self.0 {
            if node.semantic_parents.is_empty() {
                seq.serialize_element(&With(node, STORED))?;
            } else {
                let bare = MessageNode {
                    semantic_parents: Vec::new(),
                    ..node.clone()
                };
                seq.serialize_element(&With(&bare, STORED))?;
            }
        }
        seq.end()
    }
}

impl Serialize for RecordRef<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self {
            RecordRef::Open(header) => {
                map.serialize_entry("t", "open")?;
                map.serialize_entry("header", header)?;
            }
            RecordRef::Turn(nodes, calls) => {
                map.serialize_entry("t", if nodes.is_empty() { "call" } else { "turn" })?;
                if !nodes.is_empty() {
                    map.serialize_entry("nodes", &Unlinked(nodes))?;
                }
                if !calls.is_empty() {
                    map.serialize_entry("calls", &With(*calls, STORED))?;
                }
            }
            RecordRef::Links(links) => {
                map.serialize_entry("t", "links")?;
                map.serialize_entry("links", links)?;
            }
            RecordRef::Set(fields) => {
                map.serialize_entry("t", "set")?;
                map.serialize_entry("fields", fields)?;
            }
            RecordRef::Seal(seal) => {
                map.serialize_entry("t", "seal")?;
                map.serialize_entry("seal", seal)?;
            }
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Record {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum Kind {
            Open,
            Turn,
            Call,
            Links,
            Set,
            Seal,
        }
        #[derive(serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Members {
            t: Kind,
            header: Option<Value>,
            #[serde(default)]
            nodes: Vec<MessageNode>,
            #[serde(default)]
            calls: Vec<ModelCall>,
            links: Option<Vec<(NodeId, NodeId, EdgeType)>>,
            fields: Option<Value>,
            seal: Option<Seal>,
        }
        let members = Members::deserialize(deserializer)?;
        let missing = <D::Error as de::Error>::missing_field;
        Ok(match members.t {
            Kind::Open => Record::Open {
                header: members.header.ok_or_else(|| missing("header"))?,
            },
            Kind::Turn | Kind::Call => Record::Turn {
                nodes: members.nodes,
                calls: members.calls,
            },
            Kind::Links => Record::Links(members.links.ok_or_else(|| missing("links"))?),
            Kind::Set => Record::Set {
                fields: members.fields.ok_or_else(|| missing("fields"))?,
            },
            Kind::Seal => Record::Seal(members.seal.ok_or_else(|| missing("seal"))?),
        })
    }
}

/// Appends a line.
pub(super) fn write_line(out: &mut Vec<u8>, sequence: u64, record: &RecordRef<'_>) -> Result<(), StoreError> {
    let mut body = Vec::new();
    json::to_writer_buf(&mut body, record, NonFinite::Overflow)?;
    let checksum = crc32c::crc32c(&body);
    out.extend_from_slice(format!("{{\"s\":{sequence},\"c\":\"{checksum:08x}\",\"r\":").as_bytes());
    out.extend_from_slice(&body);
    out.extend_from_slice(b"}\n");
    Ok(())
}

/// Takes a line, without its newline, apart and checks it: the sequence number and the record's
/// text.
pub(super) fn open_line(line: &[u8]) -> Result<(u64, &str), String> {
    let text = std::str::from_utf8(line).map_err(|_| "not UTF-8".to_owned())?;
    let parts = || {
        let (sequence, rest) = text.strip_prefix("{\"s\":")?.split_once(",\"c\":\"")?;
        let (checksum, rest) = rest.split_once("\",\"r\":")?;
        Some((sequence, checksum, rest.strip_suffix('}')?))
    };
    let (sequence, checksum, body) = parts().ok_or("not a record line")?;
    let plain = !sequence.is_empty() && sequence.bytes().all(|b| b.is_ascii_digit());
    let sequence = sequence.parse().ok().filter(|_| plain).ok_or("bad sequence number")?;
    let expected = u32::from_str_radix(checksum, 16)
        .ok()
        .filter(|_| checksum.len() == 8)
        .ok_or("bad checksum")?;
    if crc32c::crc32c(body.as_bytes()) != expected {
        return Err("the checksum does not match".to_owned());
    }
    Ok((sequence, body))
}
