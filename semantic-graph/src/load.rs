//! Reading and writing whole traces as records.

use std::collections::HashMap;
use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};

use crate::call::ModelCall;
use crate::code::{Code, Coded};
use crate::id::EdgeType;
use crate::json::{self, Error, Value};
use crate::message::once;
use crate::node::MessageNode;
use crate::record::{Fields, Record, RecordOptions, serialize_as_record};
use crate::tool::Tool;
use crate::trace::Trace;

/// The keys of a record in the order in which the reference writes them.
const KEYS: &[&str] = &[
    "version",
    "id",
    "verifiers",
    "task",
    "agent",
    "tools",
    "nodes",
    "calls",
    "mm_token_type_id_map",
    "request_rewrites",
    "response_rewrites",
    "rewards",
    "metrics",
    "info",
    "root_reply",
    "extra_usage",
    "is_completed",
    "ok",
    "stop_condition",
    "is_timeout",
    "errors",
    "timing",
];

/// Computed keys: written, and ignored when read.
const COMPUTED: &[&str] = &["num_input_tokens", "num_output_tokens", "num_total_tokens"];

/// The version of records.
const VERSION: i64 = 1;

/// Whether this crate has a field or method of its own for a key.
pub(crate) fn is_owned_key(key: &str) -> bool {
    COMPUTED.contains(&key)
        || matches!(
            key,
            "version"
                | "id"
                | "tools"
                | "nodes"
                | "calls"
                | "mm_token_type_id_map"
                | "root_reply"
                | "is_completed"
                | "ok"
                | "stop_condition"
                | "is_timeout"
        )
}

/// How strictly a record is read, and how much of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Refuse what is usually tolerated: duplicate links, self links, arrays of wrong lengths.
    pub strict: bool,
    /// Most nodes.
    pub max_nodes: usize,
    /// Most bytes.
    pub max_bytes: usize,
}

impl Default for LoadOptions {
    /// Tolerant and unlimited.
    fn default() -> Self {
        Self {
            strict: false,
            max_nodes: usize::MAX,
            max_bytes: usize::MAX,
        }
    }
}

impl Trace {
    /// Reads a record, in full or compact form.
    ///
    /// # Errors
    /// [`Error`] with its code, path and byte offset; among the codes are
    /// [`Code::InvalidParent`] and [`Code::InvalidLink`].
    pub fn from_json(text: &[u8]) -> Result<Self, Error> {
        json::from_slice(text)
    }

    /// The same with limits, or strictly.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json); also [`Code::LimitExceeded`], and in strict mode
    /// whatever [`check`](Self::check) calls an error.
    pub fn from_json_with(text: &[u8], options: LoadOptions) -> Result<Self, Error> {
        if text.len() > options.max_bytes {
            return Err(Error::new(
                Code::LimitExceeded,
                format!("more than {} bytes", options.max_bytes),
            ));
        }
        let trace = Self::from_json(text)?;
        if trace.nodes.len() > options.max_nodes {
            return Err(Error::new(
                Code::LimitExceeded,
                format!("more than {} nodes", options.max_nodes),
            ));
        }
        if options.strict
            && let Some(problem) = trace.check().into_iter().find(|found| found.is_error())
        {
            return Err(Error::new(problem.code, problem.to_string()));
        }
        Ok(trace)
    }

    /// The record as JSON text.
    ///
    /// # Errors
    /// None that the types of this crate can cause; see [`json::to_string`].
    pub fn to_json(&self, options: RecordOptions) -> Result<String, Error> {
        json::to_string(&self.to_record(options))
    }

    /// The record, for any serde format.
    pub fn to_record(&self, options: RecordOptions) -> impl serde::Serialize + '_ {
        crate::record::With(self, options)
    }
}

serialize_as_record!(Trace);

impl Record for Trace {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        self.write_members(&mut fields, options, true)?;
        fields.put("num_input_tokens", &self.num_input_tokens())?;
        fields.put("num_output_tokens", &self.num_output_tokens())?;
        fields.put("num_total_tokens", &self.num_total_tokens())?;
        fields.end()
    }
}

impl Trace {
    /// Writes the members in their order, with or without nodes and calls.
    fn write_members<M: SerializeMap>(
        &self,
        fields: &mut Fields<M>,
        options: RecordOptions,
        with_graph: bool,
    ) -> Result<(), M::Error> {
        for &key in KEYS {
            match key {
                "version" => fields.put(key, &VERSION)?,
                "id" => fields.put(key, &self.id)?,
                "tools" => fields.put_records(key, &self.tools)?,
                "nodes" if with_graph => fields.put_records(key, &self.nodes)?,
                "calls" if with_graph => fields.put_records(key, &self.calls)?,
                "nodes" | "calls" => {}
                "mm_token_type_id_map" => fields.put(key, &IntMap(&self.mm_token_type_id_map))?,
                "root_reply" => fields.put_nullable(key, &self.root_reply)?,
                "is_completed" => fields.put(key, &self.is_completed)?,
                "ok" => fields.put(key, &self.ok)?,
                "stop_condition" => fields.put_nullable(key, &self.stop_condition)?,
                "is_timeout" => fields.put(key, &self.is_timeout)?,
                _ => {
                    if let Some(value) = self.carried(key)
                        && !(value.is_null() && options.exclude_none)
                    {
                        fields.put(key, value)?;
                    }
                }
            }
        }
        for (key, value) in &self.carried {
            if !KEYS.contains(&&**key) {
                fields.put(key, value)?;
            }
        }
        Ok(())
    }
}

/// A trace without nodes, calls and counts.
#[cfg(feature = "store")]
pub(crate) struct Header<'a>(pub(crate) &'a Trace);

#[cfg(feature = "store")]
impl serde::Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, RecordOptions::LOSSLESS)?;
        self.0.write_members(&mut fields, RecordOptions::LOSSLESS, false)?;
        fields.end()
    }
}

/// A map of integers, whose JSON has string keys.
pub(crate) struct IntMap<'a>(pub(crate) &'a [(u32, i64)]);

impl serde::Serialize for IntMap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

/// The same, when it is read.
#[derive(Default)]
pub(crate) struct IntMapOwned(pub(crate) Vec<(u32, i64)>);

impl<'de> Deserialize<'de> for IntMapOwned {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = IntMapOwned;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of integers")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<IntMapOwned, A::Error> {
                let mut entries: Vec<(u32, i64)> = Vec::new();
                let mut place: HashMap<u32, usize> = HashMap::new();
                while let Some((key, value)) = map.next_entry::<u32, i64>()? {
                    match place.get(&key) {
                        Some(&at) => entries[at].1 = value,
                        None => {
                            place.insert(key, entries.len());
                            entries.push((key, value));
                        }
                    }
                }
                Ok(IntMapOwned(entries))
            }
        }
        deserializer.deserialize_map(Map)
    }
}

/// Shares the texts of labels outside the usual ones, which are shared already.
#[derive(Debug, Default)]
pub(crate) struct Labels(HashMap<EdgeType, EdgeType>);

impl Labels {
    pub(crate) fn share(&mut self, label: EdgeType) -> EdgeType {
        if label.is_shared() {
            return label;
        }
        self.0.entry(label.clone()).or_insert(label).clone()
    }
}

/// Nodes, each with a parent before it.
struct Nodes;

impl<'de> DeserializeSeed<'de> for Nodes {
    type Value = Vec<MessageNode>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Nodes {
    type Value = Vec<MessageNode>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of nodes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut nodes: Vec<MessageNode> = Vec::new();
        let mut labels = Labels::default();
        while let Some(mut node) = seq.next_element::<MessageNode>()? {
            if nodes.len() >= u32::MAX as usize {
                return Err(de::Error::custom(Coded(
                    Code::LimitExceeded,
                    "a trace has fewer than 2^32 nodes",
                )));
            }
            if node.parent.is_some_and(|parent| parent.index() >= nodes.len()) {
                return Err(de::Error::custom(Coded(
                    Code::InvalidParent,
                    format_args!("the parent of node {} is not an earlier node", nodes.len()),
                )));
            }
            for link in &mut node.semantic_parents {
                link.label = labels.share(link.label.clone());
            }
            nodes.push(node);
        }
        for (i, node) in nodes.iter().enumerate() {
            if let Some(link) = node
                .semantic_parents
                .iter()
                .find(|link| link.node.index() >= nodes.len())
            {
                return Err(de::Error::custom(Coded(
                    Code::InvalidLink,
                    format_args!("node {i} is linked to node {}, which is missing", link.node),
                )));
            }
        }
        Ok(nodes)
    }
}

impl<'de> Deserialize<'de> for Trace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Members)
    }
}

struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Trace;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a trace")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Trace, A::Error> {
        let mut id: Option<String> = None;
        let mut version: Option<i64> = None;
        let mut tools: Option<Vec<Tool>> = None;
        let mut nodes = None;
        let mut calls: Option<Vec<ModelCall>> = None;
        let mut mm_map: Option<IntMapOwned> = None;
        let mut root_reply: Option<Option<String>> = None;
        let mut stop_condition: Option<Option<String>> = None;
        let mut is_completed = None;
        let mut ok = None;
        let mut is_timeout = None;
        let mut carried: Vec<(Box<str>, Value)> = Vec::new();
        while let Some(key) = map.next_key::<Box<str>>()? {
            match &*key {
                "version" => once(&mut version, "version", map.next_value()?)?,
                "id" => once(&mut id, "id", map.next_value()?)?,
                "tools" => once(&mut tools, "tools", map.next_value()?)?,
                "nodes" => once(&mut nodes, "nodes", map.next_value_seed(Nodes)?)?,
                "calls" => once(&mut calls, "calls", map.next_value()?)?,
                "mm_token_type_id_map" => {
                    once(&mut mm_map, "mm_token_type_id_map", map.next_value()?)?;
                }
                "root_reply" => once(&mut root_reply, "root_reply", map.next_value()?)?,
                "stop_condition" => once(&mut stop_condition, "stop_condition", map.next_value()?)?,
                "is_completed" => once(&mut is_completed, "is_completed", map.next_value()?)?,
                "ok" => once(&mut ok, "ok", map.next_value()?)?,
                "is_timeout" => once(&mut is_timeout, "is_timeout", map.next_value()?)?,
                other if COMPUTED.contains(&other) => {
                    map.next_value::<de::IgnoredAny>()?;
                }
                _ => {
                    let value = map.next_value()?;
                    match carried.iter_mut().find(|(known, _)| *known == key) {
                        Some((_, slot)) => *slot = value,
                        None => carried.push((key, value)),
                    }
                }
            }
        }
        if let Some(other) = version.filter(|version| *version != VERSION) {
            return Err(de::Error::custom(Coded(
                Code::UnsupportedVersion,
                format_args!("version {other}; this crate reads {VERSION}"),
            )));
        }
        let mut trace = Trace::new(id.unwrap_or_default());
        trace.tools = tools.unwrap_or_default();
        trace.nodes = nodes.unwrap_or_default();
        trace.nodes.shrink_to_fit();
        trace.calls = calls.unwrap_or_default();
        trace.calls.shrink_to_fit();
        trace.mm_token_type_id_map = mm_map.unwrap_or_default().0;
        trace.root_reply = root_reply.flatten();
        trace.stop_condition = stop_condition.flatten();
        trace.is_completed = is_completed.unwrap_or_default();
        trace.ok = ok.unwrap_or_default();
        trace.is_timeout = is_timeout.unwrap_or_default();
        trace.carried = carried;
        Ok(trace)
    }
}
