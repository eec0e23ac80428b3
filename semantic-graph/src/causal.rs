//! [`CausalGraph`]: questions about which node caused which.

use std::collections::HashMap;
use std::sync::OnceLock;

use crate::edge::ParentLink;
use crate::id::{EdgeType, NodeId};
use crate::node::MessageNode;

const NONE: u32 = u32::MAX;

/// Which edges a question follows.
///
/// ```
/// use semantic_graph::{EdgeFilter, EdgeType};
/// let all = EdgeFilter::all();
/// let returns = EdgeFilter::only([EdgeType::subagent_return()]).with_physical();
/// # let _ = (all, returns);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeFilter {
    labels: Selection,
    physical: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Selection {
    All,
    Only(Vec<EdgeType>),
    Except(Vec<EdgeType>),
}

impl EdgeFilter {
    /// Links of every label; no physical edges.
    #[must_use]
    pub fn all() -> Self {
        Self {
            labels: Selection::All,
            physical: false,
        }
    }

    /// Links of these labels.
    pub fn only(labels: impl IntoIterator<Item = EdgeType>) -> Self {
        Self {
            labels: Selection::Only(labels.into_iter().collect()),
            physical: false,
        }
    }

    /// Links of every label but these.
    pub fn except(labels: impl IntoIterator<Item = EdgeType>) -> Self {
        Self {
            labels: Selection::Except(labels.into_iter().collect()),
            physical: false,
        }
    }

    /// The same and the physical edges, from each message to the next.
    #[must_use]
    pub fn with_physical(mut self) -> Self {
        self.physical = true;
        self
    }

    /// The same without the physical edges.
    #[must_use]
    pub fn without_physical(mut self) -> Self {
        self.physical = false;
        self
    }

    /// Whether physical edges are followed.
    #[must_use]
    pub fn follows_physical(&self) -> bool {
        self.physical
    }

    /// Whether links of this label are followed.
    #[must_use]
    pub fn follows(&self, label: &EdgeType) -> bool {
        match &self.labels {
            Selection::All => true,
            Selection::Only(labels) => labels.contains(label),
            Selection::Except(labels) => !labels.contains(label),
        }
    }
}

impl Default for EdgeFilter {
    fn default() -> Self {
        Self::all()
    }
}

/// Why one node comes after another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// It is the next message of the conversation.
    Physical,
    /// A link says so.
    Semantic(EdgeType),
}

/// One edge of the causal graph.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CausalEdge {
    /// The cause.
    pub source: NodeId,
    /// The effect.
    pub target: NodeId,
    /// How.
    pub cause: Cause,
}

/// Nodes that cause each other in a circle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Ascending.
    pub nodes: Vec<NodeId>,
    /// The edges within the loop, by target, then in the order on the target.
    pub edges: Vec<CausalEdge>,
}

/// Adjacency lists in three flat arrays.
#[derive(Debug, Default)]
struct Adjacency {
    start: Vec<u32>,
    node: Vec<u32>,
    /// Empty for physical edges.
    label: Vec<u32>,
}

impl Adjacency {
    fn range(&self, node: u32) -> std::ops::Range<usize> {
        self.start[node as usize] as usize..self.start[node as usize + 1] as usize
    }
}

/// The other direction, for questions about effects.
#[derive(Debug)]
struct Forward {
    links: Adjacency,
    children: Adjacency,
}

/// Which node caused which.
///
/// The graph has an edge from source to target for each link, and, if the [`EdgeFilter`] asks for
/// it, from each message to the next. Every question is O(nodes + edges) and needs no recursion.
#[derive(Debug)]
pub struct CausalGraph {
    labels: Vec<EdgeType>,
    parent: Vec<u32>,
    backward: Adjacency,
    forward: OnceLock<Forward>,
}

/// A set of nodes as bits.
pub(crate) struct NodeSet(Vec<u64>);

impl NodeSet {
    pub(crate) fn new(len: usize) -> Self {
        Self(vec![0; len.div_ceil(64)])
    }

    /// Adds a node; whether it is new.
    #[inline]
    pub(crate) fn insert(&mut self, node: u32) -> bool {
        let word = &mut self.0[node as usize / 64];
        let bit = 1 << (node % 64);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// Visits the nodes, ascending.
    fn each(&self, mut visit: impl FnMut(u32)) {
        for (i, word) in self.0.iter().enumerate() {
            let mut word = *word;
            while word != 0 {
                visit(i as u32 * 64 + word.trailing_zeros());
                word &= word - 1;
            }
        }
    }

    fn to_vec(&self) -> Vec<NodeId> {
        let count: u32 = self.0.iter().map(|word| word.count_ones()).sum();
        let mut nodes = Vec::with_capacity(count as usize);
        self.each(|node| nodes.push(NodeId::new(node)));
        nodes
    }
}

/// What a walk has reached, and where it goes on.
struct Front {
    seen: NodeSet,
    /// Reached and not visited yet; none while that is read off the sets.
    list: Option<Vec<u32>>,
}

impl Front {
    #[inline]
    fn reach(&mut self, node: u32) {
        if self.seen.insert(node)
            && let Some(list) = &mut self.list
        {
            list.push(node);
        }
    }

    fn next(&mut self) -> Option<u32> {
        self.list.as_mut()?.pop()
    }

    fn len(&self) -> usize {
        self.list.as_ref().map_or(0, Vec::len)
    }
}

/// A filter, with the labels resolved to this graph's numbers.
pub(crate) struct Follow {
    labels: Vec<bool>,
    every_label: bool,
    pub(crate) physical: bool,
}

impl Follow {
    fn label(&self, label: u32) -> bool {
        self.every_label || self.labels[label as usize]
    }
}

impl CausalGraph {
    pub(crate) fn build(nodes: &[MessageNode]) -> Self {
        let mut labels: Vec<EdgeType> = Vec::new();
        let mut by_label: HashMap<EdgeType, u32> = HashMap::new();
        let edges = nodes.iter().map(|node| node.semantic_parents.len()).sum();
        let mut backward = Adjacency {
            start: Vec::with_capacity(nodes.len() + 1),
            node: Vec::with_capacity(edges),
            label: Vec::with_capacity(edges),
        };
        let mut parent = Vec::with_capacity(nodes.len());
        for node in nodes {
            backward.start.push(backward.node.len() as u32);
            parent.push(node.parent.map_or(NONE, NodeId::get));
            for link in &node.semantic_parents {
                let known = labels
                    .iter()
                    .take(8)
                    .position(|label| label.same_allocation(&link.label));
                let label = match known {
                    Some(known) => known as u32,
                    None => *by_label.entry(link.label.clone()).or_insert_with(|| {
                        labels.push(link.label.clone());
                        labels.len() as u32 - 1
                    }),
                };
                backward.node.push(link.node.get());
                backward.label.push(label);
            }
        }
        backward.start.push(backward.node.len() as u32);
        Self {
            labels,
            parent,
            backward,
            forward: OnceLock::new(),
        }
    }

    /// How many nodes the graph has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parent.len()
    }

    /// Whether the graph has no nodes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parent.is_empty()
    }

    /// How many links the graph has.
    #[must_use]
    pub fn num_links(&self) -> usize {
        self.backward.node.len()
    }

    /// Every label that occurs, in order of first appearance.
    #[must_use]
    pub fn labels(&self) -> &[EdgeType] {
        &self.labels
    }

    pub(crate) fn follow(&self, filter: &EdgeFilter) -> Follow {
        let labels: Vec<bool> = self.labels.iter().map(|label| filter.follows(label)).collect();
        Follow {
            every_label: labels.iter().all(|follows| *follows),
            labels,
            physical: filter.physical,
        }
    }

    fn forward(&self) -> &Forward {
        self.forward.get_or_init(|| {
            let n = self.len();
            let mut links = Adjacency {
                start: vec![0; n + 1],
                node: vec![0; self.num_links()],
                label: vec![0; self.num_links()],
            };
            let mut children = Adjacency {
                start: vec![0; n + 1],
                node: vec![0; self.parent.iter().filter(|parent| **parent != NONE).count()],
                label: Vec::new(),
            };
            for source in &self.backward.node {
                links.start[*source as usize + 1] += 1;
            }
            for parent in self.parent.iter().filter(|parent| **parent != NONE) {
                children.start[*parent as usize + 1] += 1;
            }
            for i in 0..n {
                links.start[i + 1] += links.start[i];
                children.start[i + 1] += children.start[i];
            }
            let mut next_link = links.start.clone();
            let mut next_child = children.start.clone();
            for target in 0..n as u32 {
                for at in self.backward.range(target) {
                    let slot = &mut next_link[self.backward.node[at] as usize];
                    links.node[*slot as usize] = target;
                    links.label[*slot as usize] = self.backward.label[at];
                    *slot += 1;
                }
                let parent = self.parent[target as usize];
                if parent != NONE {
                    let slot = &mut next_child[parent as usize];
                    children.node[*slot as usize] = target;
                    *slot += 1;
                }
            }
            Forward { links, children }
        })
    }

    #[inline]
    fn each_effect(&self, node: u32, follow: &Follow, mut visit: impl FnMut(u32)) {
        let forward = self.forward();
        for at in forward.links.range(node) {
            if follow.label(forward.links.label[at]) {
                visit(forward.links.node[at]);
            }
        }
        if follow.physical {
            for child in &forward.children.node[forward.children.range(node)] {
                visit(*child);
            }
        }
    }

    #[inline]
    fn each_cause(&self, node: u32, follow: &Follow, mut visit: impl FnMut(u32)) {
        let range = self.backward.range(node);
        if follow.every_label {
            for source in &self.backward.node[range] {
                visit(*source);
            }
        } else {
            for at in range {
                if follow.labels[self.backward.label[at] as usize] {
                    visit(self.backward.node[at]);
                }
            }
        }
        if follow.physical && self.parent[node as usize] != NONE {
            visit(self.parent[node as usize]);
        }
    }

    /// Effects of a node, ascending; with the number of the label, or `NONE` for the next message.
    pub(crate) fn effects(&self, node: u32, follow: &Follow, out: &mut Vec<(u32, u32)>) {
        let forward = self.forward();
        out.clear();
        for at in forward.links.range(node) {
            if follow.label(forward.links.label[at]) {
                out.push((forward.links.node[at], forward.links.label[at]));
            }
        }
        if follow.physical {
            let range = forward.children.range(node);
            if !range.is_empty() {
                out.extend(forward.children.node[range].iter().map(|child| (*child, NONE)));
                // Stable: of several edges to one node, links come before the physical one.
                out.sort_by_key(|(target, _)| *target);
            }
        }
    }

    fn cause(&self, label: u32) -> Cause {
        if label == NONE {
            Cause::Physical
        } else {
            Cause::Semantic(self.labels[label as usize].clone())
        }
    }

    fn contains(&self, node: NodeId) -> bool {
        node.index() < self.len()
    }

    /// The edges into a node: the links in their order, then the physical one.
    #[must_use]
    pub fn parents(&self, node: NodeId, filter: &EdgeFilter) -> Vec<CausalEdge> {
        if !self.contains(node) {
            return Vec::new();
        }
        let follow = self.follow(filter);
        let mut edges: Vec<CausalEdge> = self
            .backward
            .range(node.get())
            .filter(|at| follow.label(self.backward.label[*at]))
            .map(|at| CausalEdge {
                source: NodeId::new(self.backward.node[at]),
                target: node,
                cause: self.cause(self.backward.label[at]),
            })
            .collect();
        let parent = self.parent[node.index()];
        if follow.physical && parent != NONE {
            edges.push(CausalEdge {
                source: NodeId::new(parent),
                target: node,
                cause: Cause::Physical,
            });
        }
        edges
    }

    /// The edges out of a node, by ascending target.
    #[must_use]
    pub fn children(&self, node: NodeId, filter: &EdgeFilter) -> Vec<CausalEdge> {
        if !self.contains(node) {
            return Vec::new();
        }
        let follow = self.follow(filter);
        let mut effects = Vec::new();
        self.effects(node.get(), &follow, &mut effects);
        effects
            .into_iter()
            .map(|(target, label)| CausalEdge {
                source: node,
                target: NodeId::new(target),
                cause: self.cause(label),
            })
            .collect()
    }

    /// Every node from which at least one edge leads here, directly or not, ascending. A node is
    /// its own ancestor if it lies on a loop.
    #[must_use]
    pub fn ancestors(&self, node: NodeId, filter: &EdgeFilter) -> Vec<NodeId> {
        if !self.contains(node) {
            return Vec::new();
        }
        let follow = self.follow(filter);
        self.closure(node, |at, front| {
            self.each_cause(at, &follow, |source| front.reach(source));
        })
    }

    /// Every node to which at least one edge leads from here, directly or not, ascending.
    #[must_use]
    pub fn descendants(&self, node: NodeId, filter: &EdgeFilter) -> Vec<NodeId> {
        if !self.contains(node) {
            return Vec::new();
        }
        let follow = self.follow(filter);
        self.closure(node, |at, front| {
            self.each_effect(at, &follow, |target| front.reach(target));
        })
    }

    /// Everything that is reached from a node in one step or more.
    ///
    /// A small front is a list. A large one is found by passing over the sets in order of memory,
    /// which is several times faster than visiting nodes as they come.
    fn closure(&self, node: NodeId, step: impl Fn(u32, &mut Front)) -> Vec<NodeId> {
        let limit = self.len() / 64;
        let mut front = Front {
            seen: NodeSet::new(self.len()),
            list: Some(Vec::new()),
        };
        step(node.get(), &mut front);
        let mut done = NodeSet::new(self.len());
        loop {
            while let Some(at) = front.next() {
                done.insert(at);
                step(at, &mut front);
                if front.len() > limit {
                    break;
                }
            }
            if front.len() == 0 {
                return front.seen.to_vec();
            }
            front.list = None;
            for word in 0..done.0.len() {
                loop {
                    let open = front.seen.0[word] & !done.0[word];
                    if open == 0 {
                        break;
                    }
                    done.0[word] |= open & open.wrapping_neg();
                    step(word as u32 * 64 + open.trailing_zeros(), &mut front);
                }
            }
            // What was reached behind the pass.
            let mut left = NodeSet(front.seen.0.clone());
            for (left, done) in left.0.iter_mut().zip(&done.0) {
                *left &= !done;
            }
            let mut list = Vec::new();
            left.each(|at| list.push(at));
            front.list = Some(list);
        }
    }

    /// Whether at least one edge leads from `source` to `target`, directly or not.
    #[must_use]
    pub fn reaches(&self, source: NodeId, target: NodeId, filter: &EdgeFilter) -> bool {
        self.why(source, target, filter).is_some()
    }

    /// A shortest chain of edges from `source` to `target`; of several, the one through smaller
    /// nodes.
    #[must_use]
    pub fn why(&self, source: NodeId, target: NodeId, filter: &EdgeFilter) -> Option<Vec<CausalEdge>> {
        if !self.contains(source) || !self.contains(target) {
            return None;
        }
        let follow = self.follow(filter);
        let mut came_from: HashMap<u32, (u32, u32)> = HashMap::new();
        let mut queue = std::collections::VecDeque::from([source.get()]);
        let mut effects = Vec::new();
        'search: while let Some(at) = queue.pop_front() {
            self.effects(at, &follow, &mut effects);
            for &(next, label) in &effects {
                if let std::collections::hash_map::Entry::Vacant(slot) = came_from.entry(next) {
                    slot.insert((at, label));
                    if next == target.get() {
                        break 'search;
                    }
                    queue.push_back(next);
                }
            }
        }
        let mut chain = Vec::new();
        let mut at = target.get();
        loop {
            let &(from, label) = came_from.get(&at)?;
            chain.push(CausalEdge {
                source: NodeId::new(from),
                target: NodeId::new(at),
                cause: self.cause(label),
            });
            at = from;
            if at == source.get() {
                break;
            }
        }
        chain.reverse();
        Some(chain)
    }

    /// Links whose cause was created after their effect; legal, and worth a look.
    #[must_use]
    pub fn backward_links(&self) -> Vec<CausalEdge> {
        let mut found = Vec::new();
        for target in 0..self.len() as u32 {
            for at in self.backward.range(target) {
                if self.backward.node[at] > target {
                    found.push(CausalEdge {
                        source: NodeId::new(self.backward.node[at]),
                        target: NodeId::new(target),
                        cause: self.cause(self.backward.label[at]),
                    });
                }
            }
        }
        found
    }
}

impl From<&ParentLink> for Cause {
    fn from(link: &ParentLink) -> Self {
        Cause::Semantic(link.label.clone())
    }
}
