//! Applying edge sets: [`ApplyError`], [`NewLink`], and the memory that makes replays cheap.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::call::ModelCall;
use crate::edge::{ParentLink, SemanticEdge, SemanticEdgeSet};
use crate::id::{EdgeType, NodeId, RequestId};
use crate::names::Names;
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
    /// Which of the known lists use it, one bit for each.
    in_lists: u8,
}

/// An edge of an accepted set, by position in `bindings` and `labels`.
#[derive(Clone, Copy, Debug)]
struct Listed {
    source: u32,
    target: u32,
    label: u32,
}

/// Target, source, label: a resolved edge.
type Triple = (u32, u32, u32);

/// Targets with more links than this get a set of their links, and updates with more edges a set
/// of their edges; fewer are looked through.
const SCAN_LIMIT: usize = 16;

/// How many edges are looked up together.
const BATCH: usize = 16;

/// Labels that are looked through before one is hashed.
const LIKELY_LABELS: usize = 8;

/// Accepted sets that are remembered: the harnesses that may publish side by side without having
/// their sets looked at from the start each time.
const MAX_LISTS: usize = 4;

/// An accepted set.
#[derive(Debug, Default)]
struct List {
    edges: Vec<Listed>,
    lineage: u64,
    /// The same, resolved. Made when the first new edge is one that the graph has: all edges of the
    /// list are on the graph, so that any other edge cannot be one of them.
    resolved: Option<HashSet<Triple>>,
    /// Whether one of its ids was bound to another node since.
    stale: bool,
    /// When it was last used.
    used: u64,
}

/// What is remembered between two sets.
#[derive(Debug, Default)]
pub(crate) struct Applier {
    calls_seen: usize,
    /// Calls that named no usable node when last looked at, ascending.
    invalid: Vec<usize>,
    bindings: Vec<Binding>,
    by_name: Names,
    labels: Vec<EdgeType>,
    by_label: HashMap<EdgeType, u32>,
    lists: Vec<List>,
    /// Sets that were accepted.
    accepted: u64,
    /// Links of targets with many links: source and label.
    crowded: HashMap<u32, HashSet<(u32, u32)>>,
}

/// What is known of the ends of an edge.
#[derive(Clone, Copy, Default)]
struct Ends {
    source: Option<u32>,
    target: Option<u32>,
    /// Whether the target has links.
    has_links: bool,
}

/// One edge that passed.
struct Passed {
    listed: Listed,
    triple: Triple,
    is_new: bool,
}

/// The edges of an update that passed so far.
#[derive(Default)]
struct Update {
    passed: Vec<Passed>,
    /// All their triples, once there are many.
    triples: HashSet<Triple>,
}

impl Update {
    fn contains(&self, triple: Triple) -> bool {
        if self.passed.len() <= SCAN_LIMIT {
            self.passed.iter().any(|edge| edge.triple == triple)
        } else {
            self.triples.contains(&triple)
        }
    }

    fn push(&mut self, edge: Passed) {
        let triple = edge.triple;
        self.passed.push(edge);
        if self.passed.len() > SCAN_LIMIT {
            if self.triples.is_empty() {
                self.triples.extend(self.passed.iter().map(|edge| edge.triple));
            }
            self.triples.insert(triple);
        }
    }
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
        let known = self.known(set);
        let replayed = known.map_or(0, |slot| edges.len().min(self.lists[slot].edges.len()));
        let mut index = replayed;
        let mut update = Update::default();
        for edges in edges[index..].chunks(BATCH) {
            for (edge, ends) in edges.iter().zip(self.resolve(nodes, edges)) {
                let edge = self.check(nodes, (index, edge), ends, known, &update)?;
                update.push(edge);
                index += 1;
            }
        }
        let slot = known.unwrap_or_else(|| self.free_slot(set));
        self.accepted += 1;
        let list = &mut self.lists[slot];
        list.used = self.accepted;
        if edges.len() >= list.edges.len() {
            list.lineage = set.lineage();
        }
        if let Some(resolved) = &mut list.resolved {
            resolved.extend(update.passed.iter().map(|edge| edge.triple));
        }
        let mut added = Vec::new();
        for edge in update.passed {
            self.bindings[edge.listed.source as usize].in_lists |= 1 << slot;
            self.bindings[edge.listed.target as usize].in_lists |= 1 << slot;
            self.lists[slot].edges.push(edge.listed);
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
        let next = self.bindings.len() as u32;
        let bindings = &self.bindings;
        let slot = self
            .by_name
            .get_or_insert(name, next, |slot| &bindings[slot as usize].name);
        if slot == next {
            self.bindings.push(Binding {
                name: name.clone(),
                node,
                call,
                in_lists: 0,
            });
            return;
        }
        let binding = &mut self.bindings[slot as usize];
        // A call whose node appeared late must not undo what a later call bound.
        if binding.call <= call {
            binding.call = call;
            if binding.node != node {
                binding.node = node;
                for (slot, list) in self.lists.iter_mut().enumerate() {
                    list.stale |= binding.in_lists & 1 << slot != 0;
                }
            }
        }
    }

    /// The list that goes on as the set does, or that the set is the beginning of: whatever both
    /// have needs no work. None if there is no such list.
    fn known(&self, set: &SemanticEdgeSet) -> Option<usize> {
        let fresh = || self.lists.iter().enumerate().filter(|(_, list)| !list.stale);
        let same_lineage = fresh().find(|(_, list)| list.lineage == set.lineage());
        let known = same_lineage.or_else(|| {
            fresh()
                .filter(|(_, list)| {
                    let mut both = list.edges.iter().zip(set.edges());
                    both.all(|(listed, edge)| self.is_same(*listed, edge))
                })
                .max_by_key(|(_, list)| list.edges.len())
        });
        known.map(|(slot, _)| slot)
    }

    /// Makes an empty list for a set that goes on from none: instead of one that is of no more use,
    /// or the one that was not used for longest.
    fn free_slot(&mut self, set: &SemanticEdgeSet) -> usize {
        let lists = self.lists.iter().enumerate();
        let worst = lists
            .min_by_key(|(_, list)| (list.lineage != set.lineage(), !list.stale, list.used))
            .filter(|(_, list)| self.lists.len() == MAX_LISTS || list.stale || list.lineage == set.lineage());
        let Some((slot, _)) = worst else {
            self.lists.push(List::default());
            return self.lists.len() - 1;
        };
        let list = std::mem::take(&mut self.lists[slot]);
        for listed in list.edges {
            self.bindings[listed.source as usize].in_lists &= !(1 << slot);
            self.bindings[listed.target as usize].in_lists &= !(1 << slot);
        }
        slot
    }

    fn is_same(&self, listed: Listed, edge: &SemanticEdge) -> bool {
        self.bindings[listed.source as usize].name == *edge.source()
            && self.bindings[listed.target as usize].name == *edge.target()
            && self.labels[listed.label as usize] == *edge.label()
    }

    /// Looks up the ends of at most [`BATCH`] edges.
    ///
    /// In steps, each of which goes to one kind of memory for all edges, because what dominates is
    /// waiting for memory, and look-ups that do not depend on one another wait together.
    fn resolve(&self, nodes: &[MessageNode], edges: &[SemanticEdge]) -> [Ends; BATCH] {
        let mut ends = [Ends::default(); BATCH];
        let mut hashes = [(0, 0); BATCH];
        for (hashes, edge) in hashes.iter_mut().zip(edges) {
            *hashes = (self.by_name.hash(edge.source()), self.by_name.hash(edge.target()));
        }
        for (ends, hashes) in ends.iter_mut().zip(&hashes[..edges.len()]) {
            ends.source = self.by_name.likely(hashes.0);
            ends.target = self.by_name.likely(hashes.1);
        }
        for (ends, edge) in ends.iter_mut().zip(edges) {
            ends.source = self.confirm(ends.source, edge.source());
            ends.target = self.confirm(ends.target, edge.target());
        }
        for ends in &mut ends[..edges.len()] {
            let target = ends.target.map(|slot| self.bindings[slot as usize].node.index());
            ends.has_links = target.is_some_and(|target| !nodes[target].semantic_parents.is_empty());
        }
        ends
    }

    fn confirm(&self, likely: Option<u32>, name: &RequestId) -> Option<u32> {
        self.by_name
            .confirm(likely?, name, |slot| &self.bindings[slot as usize].name)
    }

    /// Checks an edge of a set. If the set goes on from a known list, its earlier edges are those of
    /// the list and of the update, else those of the update alone.
    fn check(
        &mut self,
        nodes: &[MessageNode],
        (index, edge): (usize, &SemanticEdge),
        ends: Ends,
        known: Option<usize>,
        update: &Update,
    ) -> Result<Passed, ApplyError> {
        let bound = |slot: Option<u32>, name: &RequestId| {
            slot.ok_or_else(|| ApplyError::UncommittedRequest {
                edge: index,
                request_id: name.clone(),
            })
        };
        let source = bound(ends.source, edge.source())?;
        let target = bound(ends.target, edge.target())?;
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
        let is_new = !(ends.has_links && self.on_graph(nodes, triple));
        if update.contains(triple) || (!is_new && known.is_some_and(|slot| self.in_list(slot, triple))) {
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
            is_new,
        })
    }

    fn in_list(&mut self, slot: usize, triple: Triple) -> bool {
        let node = |binding: u32| self.bindings[binding as usize].node.get();
        let list = &mut self.lists[slot];
        list.resolved
            .get_or_insert_with(|| {
                list.edges
                    .iter()
                    .map(|edge| (node(edge.target), node(edge.source), edge.label))
                    .collect()
            })
            .contains(&triple)
    }

    fn label(&mut self, label: &EdgeType) -> u32 {
        if let Some(known) = self.labels.iter().take(LIKELY_LABELS).position(|known| known == label) {
            return known as u32;
        }
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
