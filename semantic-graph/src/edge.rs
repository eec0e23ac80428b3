//! [`SemanticEdge`], [`SemanticEdgeSet`], [`ParentLink`] and [`AcpInfo`]: the strict wire types.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize};

use crate::code::{Code, Coded};
use crate::id::{EdgeType, NodeId, RequestId};
use crate::json::{self, Segment, Value};
use crate::names::ByHash;

/// Key of the metadata object under which a harness publishes an edge set.
pub const EDGE_SET_METADATA_KEY: &str = "ai.prime.acp/semantic-edges-v1";

/// The request id that a model request carried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AcpInfo {
    /// The id.
    pub request_id: RequestId,
}

impl<'de> Deserialize<'de> for AcpInfo {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(DeriveDeserialize)]
        #[serde(deny_unknown_fields)]
        struct Members {
            request_id: RequestId,
        }
        let Members { request_id } = from_object(deserializer)?;
        Ok(Self { request_id })
    }
}

/// Reads a record from an object and from nothing else: in many formats, the readers that serde
/// derives also take an array of the members.
fn from_object<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    struct Object<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }
    deserializer.deserialize_map(Object(PhantomData))
}

/// One published cause and effect: the turn of one request made the turn of another happen.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct SemanticEdge {
    source_request_id: RequestId,
    target_request_id: RequestId,
    #[serde(rename = "type")]
    label: EdgeType,
}

impl SemanticEdge {
    /// An edge from `source` to `target`.
    ///
    /// # Errors
    /// [`EdgeError`] with [`Code::SelfEdge`] if both are the same request.
    pub fn new(source: RequestId, target: RequestId, label: EdgeType) -> Result<Self, EdgeError> {
        if source == target {
            return Err(EdgeError {
                code: Code::SelfEdge,
                request: source,
            });
        }
        Ok(Self {
            source_request_id: source,
            target_request_id: target,
            label,
        })
    }

    /// The request whose turn is the cause.
    #[must_use]
    pub fn source(&self) -> &RequestId {
        &self.source_request_id
    }

    /// The request whose turn is the effect.
    #[must_use]
    pub fn target(&self) -> &RequestId {
        &self.target_request_id
    }

    /// The kind of cause.
    #[must_use]
    pub fn label(&self) -> &EdgeType {
        &self.label
    }
}

impl<'de> Deserialize<'de> for SemanticEdge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(DeriveDeserialize)]
        #[serde(deny_unknown_fields)]
        struct Members {
            source_request_id: RequestId,
            target_request_id: RequestId,
            #[serde(rename = "type")]
            label: EdgeType,
        }
        let members: Members = from_object(deserializer)?;
        Self::new(members.source_request_id, members.target_request_id, members.label).map_err(de::Error::custom)
    }
}

/// An edge that cannot exist, or cannot join a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeError {
    code: Code,
    request: RequestId,
}

impl EdgeError {
    /// [`Code::SelfEdge`] or [`Code::DuplicateEdge`].
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }

    /// The edge's source.
    #[must_use]
    pub fn request(&self) -> &RequestId {
        &self.request
    }
}

impl fmt::Display for EdgeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.code {
            Code::SelfEdge => "an edge cannot end at its own source",
            _ => "the set has this edge already",
        };
        Coded(self.code, format_args!("{what} (`{}`)", self.request)).fmt(f)
    }
}

impl std::error::Error for EdgeError {}

/// All edges that a harness published so far; no two are equal, loops are welcome.
///
/// A set that only grows (through [`push`](Self::push) or an [`crate::EdgeFeed`]) is recognised by
/// the trace that applied it before, which then looks at the new edges alone.
#[derive(Serialize)]
pub struct SemanticEdgeSet {
    edges: Vec<SemanticEdge>,
    /// Hashes of the edges, for duplicates; built when first needed.
    #[serde(skip)]
    known: HashSet<u64, ByHash>,
    #[serde(skip)]
    hasher: RandomState,
    /// Names this value's history: the same lineage with more edges has the same beginning.
    #[serde(skip)]
    lineage: u64,
}

fn new_lineage() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl SemanticEdgeSet {
    /// An empty set.
    #[must_use]
    pub fn new() -> Self {
        Self {
            edges: Vec::new(),
            known: HashSet::default(),
            hasher: RandomState::new(),
            lineage: new_lineage(),
        }
    }

    /// A set of these edges, in this order.
    ///
    /// # Errors
    /// [`EdgeError`] with [`Code::DuplicateEdge`] if two are equal.
    pub fn from_edges(edges: Vec<SemanticEdge>) -> Result<Self, EdgeError> {
        let mut seen = HashSet::with_capacity(edges.len());
        if let Some(twice) = edges.iter().find(|edge| !seen.insert(*edge)) {
            return Err(EdgeError {
                code: Code::DuplicateEdge,
                request: twice.source().clone(),
            });
        }
        Ok(Self {
            edges,
            known: HashSet::default(),
            hasher: RandomState::new(),
            lineage: new_lineage(),
        })
    }

    /// Appends an edge.
    ///
    /// # Errors
    /// [`EdgeError`] with [`Code::DuplicateEdge`]; the set is then unchanged.
    pub fn push(&mut self, edge: SemanticEdge) -> Result<(), EdgeError> {
        if self.known.is_empty() {
            self.known = self.edges.iter().map(|edge| self.hasher.hash_one(edge)).collect();
        }
        // A new hash is a new edge; for a known one the edges themselves decide.
        if !self.known.insert(self.hasher.hash_one(&edge)) && self.edges.contains(&edge) {
            return Err(EdgeError {
                code: Code::DuplicateEdge,
                request: edge.source_request_id,
            });
        }
        self.edges.push(edge);
        Ok(())
    }

    /// Takes back the edges from `len` on; afterwards this is a set of its own.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.edges.truncate(len);
        self.known.clear();
        self.lineage = new_lineage();
    }

    /// The edges in order.
    #[must_use]
    pub fn edges(&self) -> &[SemanticEdge] {
        &self.edges
    }

    /// How many edges there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.edges.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.edges.is_empty()
    }

    pub(crate) fn lineage(&self) -> u64 {
        self.lineage
    }

    /// The set that a response's metadata object carries under [`EDGE_SET_METADATA_KEY`]; none if
    /// the key is absent.
    ///
    /// # Errors
    /// [`json::Error`] if there is a value and it is not an edge set.
    pub fn from_metadata(metadata: &Value) -> Result<Option<Self>, json::Error> {
        metadata.get(EDGE_SET_METADATA_KEY).map(json::from_value).transpose()
    }

    /// Reads a set and reports everything that is wrong with it, not only the first thing.
    ///
    /// # Errors
    /// Every [`Violation`], in the order of the text.
    pub fn validate(value: &Value) -> Result<Self, Vec<Violation>> {
        let mut found = Vec::new();
        let mut edges = Vec::new();
        match value.as_object() {
            None => found.push(Violation::new(&[], Code::WrongType)),
            Some(members) => {
                for (key, _) in members {
                    if *key != "edges" {
                        found.push(Violation::new(&[key_segment(key)], Code::UnknownField));
                    }
                }
                let at = Segment::Key("edges".to_owned());
                match value.get("edges") {
                    None => found.push(Violation::new(&[at], Code::MissingField)),
                    Some(Value::Array(items)) => {
                        for (i, item) in items.iter().enumerate() {
                            let path = [at.clone(), Segment::Index(i)];
                            edges.extend(validate_edge(item, &path, &mut found));
                        }
                    }
                    Some(_) => found.push(Violation::new(&[at], Code::WrongType)),
                }
            }
        }
        if !found.is_empty() {
            return Err(found);
        }
        Self::from_edges(edges).map_err(|error| vec![Violation::new(&[], error.code())])
    }
}

fn key_segment(key: &json::JsonString) -> Segment {
    Segment::Key(String::from_utf8_lossy(key.as_bytes()).into_owned())
}

fn validate_edge(item: &Value, path: &[Segment; 2], found: &mut Vec<Violation>) -> Option<SemanticEdge> {
    let below = |key: &str| {
        let mut path = path.to_vec();
        path.push(Segment::Key(key.to_owned()));
        path
    };
    let Some(members) = item.as_object() else {
        found.push(Violation::new(path, Code::WrongType));
        return None;
    };
    let before = found.len();
    for (key, _) in members {
        if !["source_request_id", "target_request_id", "type"]
            .iter()
            .any(|known| *key == *known)
        {
            let key = String::from_utf8_lossy(key.as_bytes());
            found.push(Violation::new(&below(&key), Code::UnknownField));
        }
    }
    let mut text = |key: &str| match item.get(key) {
        None => {
            found.push(Violation::new(&below(key), Code::MissingField));
            None
        }
        Some(Value::String(text)) => Some(text.as_str().unwrap_or("\u{fffd}")),
        Some(_) => {
            found.push(Violation::new(&below(key), Code::WrongType));
            None
        }
    };
    let source = text("source_request_id");
    let target = text("target_request_id");
    let label = text("type");
    let mut check = |key: &str, code: Option<Code>| {
        if let Some(code) = code {
            found.push(Violation::new(&below(key), code));
        }
    };
    let source = source.map(RequestId::new);
    let target = target.map(RequestId::new);
    let label = label.map(EdgeType::new);
    let refusal = |name: &Option<Result<RequestId, crate::InvalidName>>| match name {
        Some(Err(error)) => Some(error.code()),
        _ => None,
    };
    check("source_request_id", refusal(&source));
    check("target_request_id", refusal(&target));
    if let Some(Err(error)) = &label {
        check("type", Some(error.code()));
    }
    let (Some(Ok(source)), Some(Ok(target)), Some(Ok(label))) = (source, target, label) else {
        return None;
    };
    if found.len() > before {
        return None;
    }
    match SemanticEdge::new(source, target, label) {
        Ok(edge) => Some(edge),
        Err(error) => {
            found.push(Violation::new(path, error.code()));
            None
        }
    }
}

/// One thing that is wrong with a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Where, outermost step first.
    pub path: Vec<Segment>,
    /// What.
    pub code: Code,
}

impl Violation {
    fn new(path: &[Segment], code: Code) -> Self {
        Self {
            path: path.to_vec(),
            code,
        }
    }
}

impl Default for SemanticEdgeSet {
    fn default() -> Self {
        Self::new()
    }
}

impl Clone for SemanticEdgeSet {
    /// The clone may grow differently, so it has a lineage of its own.
    fn clone(&self) -> Self {
        Self {
            edges: self.edges.clone(),
            known: HashSet::default(),
            hasher: RandomState::new(),
            lineage: new_lineage(),
        }
    }
}

impl PartialEq for SemanticEdgeSet {
    fn eq(&self, other: &Self) -> bool {
        self.edges == other.edges
    }
}

impl Eq for SemanticEdgeSet {}

impl fmt::Debug for SemanticEdgeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.edges).finish()
    }
}

impl<'de> Deserialize<'de> for SemanticEdgeSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(DeriveDeserialize)]
        #[serde(deny_unknown_fields)]
        struct Members {
            edges: Vec<SemanticEdge>,
        }
        let members: Members = from_object(deserializer)?;
        Self::from_edges(members.edges).map_err(de::Error::custom)
    }
}

/// A resolved edge, kept on the target node: which node caused it, and how.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ParentLink {
    /// The node that is the cause.
    pub node: NodeId,
    /// The kind of cause.
    #[serde(rename = "type")]
    pub label: EdgeType,
}

impl<'de> Deserialize<'de> for ParentLink {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(DeriveDeserialize)]
        #[serde(deny_unknown_fields)]
        struct Members {
            node: NodeId,
            #[serde(rename = "type")]
            label: EdgeType,
        }
        let Members { node, label } = from_object(deserializer)?;
        Ok(Self { node, label })
    }
}
