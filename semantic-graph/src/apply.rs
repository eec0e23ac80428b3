//! Applying edge sets: [`ApplyError`], [`NewLink`], and the memory that makes replays cheap.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::call::ModelCall;
use crate::edge::{ParentLink, SemanticEdge, SemanticEdgeSet};
use crate::id::{EdgeType, NodeId, RequestId};
use crate::node::MessageNode;

/// A link that an edge set added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewLink {
    /// The effect; the link is on this node.
    pub target: NodeId,
    /// The cause.
    pub source: NodeId,
    /// The kind of cause.
    pub label: EdgeType,
}

/// Why an edge set was refused. The graph is as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ApplyError {
    /// A call with a request id names a node that does not exist.
    InvalidMessageNode {
        /// Position of the call.
        call: usize,
        /// The number it names.
        node: i64,
        /// Its request id.
        request_id: RequestId,
    },
    /// A call with a request id names a node that the model did not sample.
    NotSampled {
        /// Position of the call.
        call: usize,
        /// The node it names.
        node: NodeId,
        /// Its request id.
        request_id: RequestId,
    },
    /// An edge names a request without a committed call.
    UncommittedRequest {
        /// Position of the edge in the set.
        edge: usize,
        /// The request.
        request_id: RequestId,
    },
    /// Both ends of an edge are the same node.
    ResolvedSelfEdge {
        /// Position of the edge in the set.
        edge: usize,
        /// The node.
        node: NodeId,
    },
    /// Two edges of the set are the same once they are resolved.
    DuplicateResolvedEdge {
        /// Position of the later edge in the set.
        edge: usize,
        /// The link both stand for.
        link: NewLink,
    },
}

impl ApplyError {
    /// The stable name of the refusal.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            ApplyError::InvalidMessageNode { .. } => "invalid_message_node",
            ApplyError::NotSampled { .. } => "not_sampled",
            ApplyError::UncommittedRequest { .. } => "uncommitted_request",
            ApplyError::ResolvedSelfEdge { .. } => "resolved_self_edge",
            ApplyError::DuplicateResolvedEdge { .. } => "duplicate_resolved_edge",
        }
    }
}

impl fmt::Display for ApplyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.code())?;
        match self {
            ApplyError::InvalidMessageNode { call, node, request_id } => write!(
                f,
                "call {call} (`{request_id}`) names node {node}, which does not exist"
            ),
            ApplyError::NotSampled { call, node, request_id } => write!(
                f,
                "call {call} (`{request_id}`) names node {node}, which was not sampled"
            ),
            ApplyError::UncommittedRequest { edge, request_id } => write!(
                f,
                "edge {edge} names request `{request_id}`, which has no committed turn"
            ),
            ApplyError::ResolvedSelfEdge { edge, node } => {
                write!(f, "both ends of edge {edge} are node {node}")
            }
            ApplyError::DuplicateResolvedEdge { edge, link } => write!(
                f,
                "edge {edge} repeats an earlier edge of the set: {} -> {} ({})",
                link.source, link.target, link.label
            ),
        }
    }
}

impl std::error::Error for ApplyError {}

/// A request id and the node it currently stands for.
#[derive(Debug)]
struct Binding {
    name: RequestId,
    node: NodeId,
    /// The call that bound it.
    call: usize,
    /// Whether the last accepted set uses it.
    in_list: bool,
}

/// An edge of the last accepted set, by position in `bindings` and `labels`.
#[derive(Clone, Copy, Debug)]
struct Listed {
    source: u32,
    target: u32,
    label: u32,
}

/// Target, source, label: a resolved edge.
type Triple = (u32, u32, u32);

/// Targets with more links than this get a set of their links.
const SCAN_LIMIT: usize = 16;

/// What is remembered between two sets.
#[derive(Debug, Default)]
pub(crate) struct Applier {
    calls_seen: usize,
    /// Calls that named no usable node when last looked at, ascending.
    invalid: Vec<usize>,
    bindings: Vec<Binding>,
    by_name: HashMap<RequestId, u32>,
    labels: Vec<EdgeType>,
    by_label: HashMap<EdgeType, u32>,
    /// The last accepted set.
    list: Vec<Listed>,
    lineage: u64,
    /// The same, resolved.
    resolved: HashSet<Triple>,
    /// Whether an id of the list was bound to another node since.
    stale: bool,
    /// Links of targets with many links: source and label.
    crowded: HashMap<u32, HashSet<(u32, u32)>>,
}

/// One edge that passed.
struct Passed {
    listed: Listed,
    triple: Triple,
    is_new: bool,
}

impl Applier {
    pub(crate) fn apply(
        &mut self,
        nodes: &mut [MessageNode],
        calls: &[ModelCall],
        set: &SemanticEdgeSet,
    ) -> Result<Vec<NewLink>, ApplyError> {
        self.bind(nodes, calls)?;
        let edges = set.edges();
        let replayed = self.replayed(set);
        if replayed == Some(edges.len()) && edges.len() < self.list.len() {
            return Ok(Vec::new());
        }
        let start = replayed.unwrap_or(0);
        let mut seen = match replayed {
            Some(_) => std::mem::take(&mut self.resolved),
            None => HashSet::new(),
        };
        let mut passed = Vec::with_capacity(edges.len() - start);
        for (i, edge) in edges.iter().enumerate().skip(start) {
            match self.check(nodes, i, edge, &seen) {
                Ok(edge) => {
                    seen.insert(edge.triple);
                    passed.push(edge);
                }
                Err(error) => {
                    if replayed.is_some() {
                        for edge in &passed {
                            seen.remove(&edge.triple);
                        }
                        self.resolved = seen;
                    }
                    return Err(error);
                }
            }
        }
        self.resolved = seen;
        if replayed.is_none() {
            for listed in self.list.drain(..) {
                self.bindings[listed.source as usize].in_list = false;
                self.bindings[listed.target as usize].in_list = false;
            }
            self.stale = false;
        }
        self.lineage = set.lineage();
        let mut added = Vec::new();
        for edge in passed {
            self.bindings[edge.listed.source as usize].in_list = true;
            self.bindings[edge.listed.target as usize].in_list = true;
            self.list.push(edge.listed);
            if edge.is_new {
                added.push(self.link(nodes, edge.triple));
            }
        }
        Ok(added)
    }

    /// Brings the bindings up to date with the calls.
    fn bind(&mut self, nodes: &[MessageNode], calls: &[ModelCall]) -> Result<(), ApplyError> {
        let waiting = std::mem::take(&mut self.invalid);
        let new = self.calls_seen..calls.len();
        self.calls_seen = calls.len();
        let mut first_error = None;
        for call in waiting.into_iter().chain(new) {
            let (Some(request_id), Some(node)) = (calls[call].request_id(), calls[call].node) else {
                continue;
            };
            let found = usize::try_from(node)
                .ok()
                .and_then(|index| nodes.get(index).zip(NodeId::from_index(index)));
            let error = match found {
                Some((target, id)) if target.sampled => {
                    self.bind_one(request_id, id, call);
                    continue;
                }
                Some((_, node)) => ApplyError::NotSampled {
                    call,
                    node,
                    request_id: request_id.clone(),
                },
                None => ApplyError::InvalidMessageNode {
                    call,
                    node,
                    request_id: request_id.clone(),
                },
            };
            self.invalid.push(call);
            first_error.get_or_insert(error);
        }
        first_error.map_or(Ok(()), Err)
    }

    fn bind_one(&mut self, name: &RequestId, node: NodeId, call: usize) {
        if let Some(&slot) = self.by_name.get(name) {
            let binding = &mut self.bindings[slot as usize];
            // A call whose node appeared late must not undo what a later call bound.
            if binding.call <= call {
                binding.call = call;
                if binding.node != node {
                    binding.node = node;
                    self.stale |= binding.in_list;
                }
            }
        } else {
            self.by_name.insert(name.clone(), self.bindings.len() as u32);
            self.bindings.push(Binding {
                name: name.clone(),
                node,
                call,
                in_list: false,
            });
        }
    }

    /// How many edges of the set need no work because the last accepted set began with them; none
    /// if the two differ within their common length.
    fn replayed(&self, set: &SemanticEdgeSet) -> Option<usize> {
        if self.stale {
            return None;
        }
        let edges = set.edges();
        let common = edges.len().min(self.list.len());
        let same = set.lineage() == self.lineage
            || self
                .list
                .iter()
                .zip(edges)
                .all(|(listed, edge)| self.is_same(*listed, edge));
        same.then_some(common)
    }

    fn is_same(&self, listed: Listed, edge: &SemanticEdge) -> bool {
        self.bindings[listed.source as usize].name == *edge.source()
            && self.bindings[listed.target as usize].name == *edge.target()
            && self.labels[listed.label as usize] == *edge.label()
    }

    fn check(
        &mut self,
        nodes: &[MessageNode],
        index: usize,
        edge: &SemanticEdge,
        seen: &HashSet<Triple>,
    ) -> Result<Passed, ApplyError> {
        let bound = |name: &RequestId| {
            self.by_name
                .get(name)
                .copied()
                .ok_or_else(|| ApplyError::UncommittedRequest {
                    edge: index,
                    request_id: name.clone(),
                })
        };
        let source = bound(edge.source())?;
        let target = bound(edge.target())?;
        let source_node = self.bindings[source as usize].node;
        let target_node = self.bindings[target as usize].node;
        if source_node == target_node {
            return Err(ApplyError::ResolvedSelfEdge {
                edge: index,
                node: source_node,
            });
        }
        let label = self.label(edge.label());
        let triple = (target_node.get(), source_node.get(), label);
        if seen.contains(&triple) {
            return Err(ApplyError::DuplicateResolvedEdge {
                edge: index,
                link: NewLink {
                    target: target_node,
                    source: source_node,
                    label: edge.label().clone(),
                },
            });
        }
        Ok(Passed {
            listed: Listed { source, target, label },
            triple,
            is_new: !self.on_graph(nodes, triple),
        })
    }

    fn label(&mut self, label: &EdgeType) -> u32 {
        if let Some(&known) = self.by_label.get(label) {
            return known;
        }
        let next = self.labels.len() as u32;
        self.labels.push(label.clone());
        self.by_label.insert(label.clone(), next);
        next
    }

    fn on_graph(&mut self, nodes: &[MessageNode], (target, source, label): Triple) -> bool {
        let links = &nodes[target as usize].semantic_parents;
        if links.len() <= SCAN_LIMIT {
            let wanted = &self.labels[label as usize];
            return links
                .iter()
                .any(|link| link.node.get() == source && link.label == *wanted);
        }
        if !self.crowded.contains_key(&target) {
            let links = links
                .iter()
                .map(|link| (link.node.get(), self.label(&link.label)))
                .collect();
            self.crowded.insert(target, links);
        }
        self.crowded[&target].contains(&(source, label))
    }

    fn link(&mut self, nodes: &mut [MessageNode], (target, source, label): Triple) -> NewLink {
        let label_name = self.labels[label as usize].clone();
        nodes[target as usize].semantic_parents.push(ParentLink {
            node: NodeId::new(source),
            label: label_name.clone(),
        });
        if let Some(links) = self.crowded.get_mut(&target) {
            links.insert((source, label));
        }
        NewLink {
            target: NodeId::new(target),
            source: NodeId::new(source),
            label: label_name,
        }
    }
}
