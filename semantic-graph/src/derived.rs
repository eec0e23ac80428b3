//! [`Derived`]: leaves, path totals and link facts, kept up to date as a trace grows.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::call::ModelCall;
use crate::id::{EdgeType, NodeId};
use crate::node::MessageNode;

const NONE: u32 = u32::MAX;

/// Token accounting along the path from a root to one node.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PathTotals {
    /// Total of the last call with usage on the path.
    pub(crate) last_total: i64,
    /// Sum of the input increments.
    pub(crate) input: i64,
    /// Sum of the completions.
    pub(crate) output: i64,
    /// The input increment of this node's own call.
    increment: i64,
    /// The completion of this node's own call.
    completion: i64,
}

/// What is computed from nodes and calls.
#[derive(Debug, Default)]
pub(crate) struct Derived {
    first_child: Vec<u32>,
    next_sibling: Vec<u32>,
    leaves: BTreeSet<u32>,
    sampled: usize,
    /// Per node the last call recorded for it.
    last_call: Vec<u32>,
    /// The same for nodes that do not exist yet.
    early_calls: HashMap<u32, u32>,
    calls_seen: usize,
    totals: Vec<PathTotals>,
    /// Sum of all increments.
    input: i128,
    /// Sum of the completions of the nodes' calls.
    output: i128,
    /// Sum over the branches of their completions.
    branch_output: i128,
    /// Sum of the completions of all calls.
    completions: i128,
    /// Sources of accepted compactions.
    compaction_sources: HashSet<u32>,
    /// Targets of compaction attempts.
    attempts: HashSet<u32>,
}

fn clamp(sum: i128) -> i64 {
    i64::try_from(sum).unwrap_or(if sum > 0 { i64::MAX } else { i64::MIN })
}

impl Derived {
    pub(crate) fn build(nodes: &[MessageNode], calls: &[ModelCall]) -> Self {
        let mut derived = Self::default();
        for (i, node) in nodes.iter().enumerate() {
            derived.see_node(NodeId::new(i as u32), node);
            for link in &node.semantic_parents {
                derived.see_link(NodeId::new(i as u32), link.node, &link.label);
            }
        }
        // All calls first, then one pass in node order: parents come before children.
        for (i, call) in calls.iter().enumerate() {
            derived.note_call(i, call);
        }
        for i in 0..nodes.len() {
            derived.recompute_one(nodes, calls, i as u32);
        }
        derived
    }

    /// A node was, or is about to be, appended; its links are told separately.
    pub(crate) fn see_node(&mut self, id: NodeId, node: &MessageNode) {
        let id = id.get();
        self.first_child.push(NONE);
        self.next_sibling.push(NONE);
        self.last_call.push(NONE);
        let mut totals = PathTotals::default();
        if let Some(parent) = node.parent {
            let parent = parent.index();
            let was_leaf = self.first_child[parent] == NONE;
            self.next_sibling[id as usize] = self.first_child[parent];
            self.first_child[parent] = id;
            totals = self.totals[parent];
            totals.increment = 0;
            totals.completion = 0;
            if was_leaf {
                self.leaves.remove(&(parent as u32));
                self.branch_output -= i128::from(totals.output);
            }
        }
        self.leaves.insert(id);
        self.branch_output += i128::from(totals.output);
        self.totals.push(totals);
        self.sampled += usize::from(node.sampled);
    }

    /// The node was appended; a call may have named it before it existed.
    pub(crate) fn see_early_call(&mut self, nodes: &[MessageNode], calls: &[ModelCall], id: NodeId) {
        if let Some(call) = self.early_calls.remove(&id.get()) {
            self.last_call[id.index()] = call;
            self.recompute(nodes, calls, id.get());
        }
    }

    pub(crate) fn see_link(&mut self, target: NodeId, source: NodeId, label: &EdgeType) {
        match label.as_str() {
            "compaction" => {
                self.compaction_sources.insert(source.get());
            }
            "compaction_attempt" => {
                self.attempts.insert(target.get());
            }
            _ => {}
        }
    }

    /// Calls were appended.
    pub(crate) fn see_calls(&mut self, nodes: &[MessageNode], calls: &[ModelCall]) {
        for (i, call) in calls.iter().enumerate().skip(self.calls_seen) {
            if let Some(node) = self.note_call(i, call) {
                self.recompute(nodes, calls, node);
            }
        }
    }

    /// Takes note of one call; the node it belongs to, if that exists.
    fn note_call(&mut self, index: usize, call: &ModelCall) -> Option<u32> {
        self.calls_seen = index + 1;
        if let Some(usage) = &call.usage {
            self.completions += i128::from(usage.completion_tokens);
        }
        let node = u32::try_from(call.node?).ok()?;
        match self.last_call.get_mut(node as usize) {
            Some(slot) => {
                *slot = index as u32;
                Some(node)
            }
            None => {
                self.early_calls.insert(node, index as u32);
                None
            }
        }
    }

    /// Computes the totals of `root` again, and of everything below it that this changes.
    fn recompute(&mut self, nodes: &[MessageNode], calls: &[ModelCall], root: u32) {
        let mut pending = vec![root];
        while let Some(id) = pending.pop() {
            if !self.recompute_one(nodes, calls, id) {
                continue;
            }
            let mut child = self.first_child[id as usize];
            while child != NONE {
                pending.push(child);
                child = self.next_sibling[child as usize];
            }
        }
    }

    /// Computes the totals of one node from its parent's; whether its children see a difference.
    fn recompute_one(&mut self, nodes: &[MessageNode], calls: &[ModelCall], id: u32) -> bool {
        let at = id as usize;
        let before = self.totals[at];
        let mut now = nodes[at]
            .parent
            .map_or(PathTotals::default(), |parent| self.totals[parent.index()]);
        now.increment = 0;
        now.completion = 0;
        let usage = calls
            .get(self.last_call[at] as usize)
            .and_then(|call| call.usage.as_deref());
        if let Some(usage) = usage {
            now.increment = usage.input_tokens().saturating_sub(now.last_total).max(0);
            now.completion = usage.completion_tokens;
            now.last_total = usage.total_tokens();
            now.input = now.input.saturating_add(now.increment);
            now.output = now.output.saturating_add(now.completion);
        }
        self.totals[at] = now;
        self.input += i128::from(now.increment) - i128::from(before.increment);
        self.output += i128::from(now.completion) - i128::from(before.completion);
        if self.first_child[at] == NONE {
            self.branch_output += i128::from(now.output) - i128::from(before.output);
        }
        now.last_total != before.last_total || now.input != before.input || now.output != before.output
    }

    pub(crate) fn leaves(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.leaves.iter().map(|leaf| NodeId::new(*leaf))
    }

    pub(crate) fn last_leaf(&self) -> Option<NodeId> {
        self.leaves.last().map(|leaf| NodeId::new(*leaf))
    }

    pub(crate) fn num_leaves(&self) -> usize {
        self.leaves.len()
    }

    pub(crate) fn num_sampled(&self) -> usize {
        self.sampled
    }

    /// The children of a node, newest first.
    #[cfg(feature = "hash")]
    pub(crate) fn children(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let mut at = self.first_child.get(node.index()).copied().unwrap_or(NONE);
        std::iter::from_fn(move || {
            let id = at;
            (id != NONE).then(|| {
                at = self.next_sibling[id as usize];
                NodeId::new(id)
            })
        })
    }

    pub(crate) fn last_call(&self, node: NodeId) -> Option<usize> {
        let call = *self.last_call.get(node.index())?;
        (call != NONE).then_some(call as usize)
    }

    pub(crate) fn totals(&self, node: NodeId) -> PathTotals {
        self.totals.get(node.index()).copied().unwrap_or_default()
    }

    pub(crate) fn input_tokens(&self) -> i64 {
        clamp(self.input)
    }

    pub(crate) fn unique_output_tokens(&self) -> i64 {
        clamp(self.output)
    }

    pub(crate) fn output_tokens(&self) -> i64 {
        clamp(self.branch_output)
    }

    pub(crate) fn total_tokens(&self) -> i64 {
        clamp(self.input + self.completions)
    }

    /// Whether a node is nobody's parent.
    #[cfg(feature = "render")]
    pub(crate) fn is_leaf(&self, node: NodeId) -> bool {
        self.leaves.contains(&node.get())
    }

    /// Whether a branch that ends here is a training sample.
    pub(crate) fn is_trainable(&self, leaf: NodeId) -> bool {
        !self.attempts.contains(&leaf.get()) || self.compaction_sources.contains(&leaf.get())
    }
}
