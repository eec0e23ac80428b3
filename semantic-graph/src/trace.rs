//! [`Trace`]: the message graph of one run.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::apply::{Applier, ApplyError, NewLink};
use crate::branch::Branch;
use crate::call::ModelCall;
use crate::causal::CausalGraph;
use crate::derived::Derived;
use crate::edge::SemanticEdgeSet;
use crate::id::NodeId;
use crate::json::Value;
use crate::node::{MessageNode, NodeTokens};
use crate::tool::Tool;

/// The message graph of one run: every message once, the calls, and the causal links.
///
/// Nodes and calls are only ever appended. What is computed from them (leaves, token counts, the
/// key index, the causal adjacency) is built when first asked for and then kept up to date;
/// [`node_mut`](Self::node_mut) and [`calls_mut`](Self::calls_mut) throw it away.
#[derive(Debug)]
pub struct Trace {
    /// The trace's name.
    pub id: String,
    /// What the run answered, if that is not simply the last reply.
    pub root_reply: Option<String>,
    /// Whether the run came to its end.
    pub is_completed: bool,
    /// Whether the run ended without an error.
    pub ok: bool,
    /// Why the run stopped.
    pub stop_condition: Option<String>,
    /// Whether the run hit its time limit.
    pub is_timeout: bool,
    pub(crate) tools: Vec<Tool>,
    pub(crate) nodes: Vec<MessageNode>,
    pub(crate) calls: Vec<ModelCall>,
    pub(crate) mm_token_type_id_map: Vec<(u32, i64)>,
    /// Members of the record that this crate only carries.
    pub(crate) carried: Vec<(Box<str>, Value)>,

    /// Distinguishes this value from every other trace, and from itself before an edit.
    pub(crate) stamp: u64,
    derived: OnceLock<Derived>,
    causal: OnceLock<CausalGraph>,
    applier: Applier,
    #[cfg(feature = "hash")]
    pub(crate) index: OnceLock<crate::hash::KeyIndex>,
}

fn new_stamp() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Trace {
    /// An empty trace.
    #[must_use]
    pub fn new(id: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            root_reply: None,
            is_completed: false,
            ok: false,
            stop_condition: None,
            is_timeout: false,
            tools: Vec::new(),
            nodes: Vec::new(),
            calls: Vec::new(),
            mm_token_type_id_map: Vec::new(),
            carried: Vec::new(),
            stamp: new_stamp(),
            derived: OnceLock::new(),
            causal: OnceLock::new(),
            applier: Applier::default(),
            #[cfg(feature = "hash")]
            index: OnceLock::new(),
        }
    }

    /// All nodes; a node's id is its position.
    #[must_use]
    pub fn nodes(&self) -> &[MessageNode] {
        &self.nodes
    }

    /// One node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&MessageNode> {
        self.nodes.get(id.index())
    }

    /// All calls, in the order in which they ended.
    #[must_use]
    pub fn calls(&self) -> &[ModelCall] {
        &self.calls
    }

    /// Every tool seen: in order of first appearance, in its latest definition.
    #[must_use]
    pub fn tools(&self) -> &[Tool] {
        &self.tools
    }

    /// Which token ids are multimodal placeholders, and of what type.
    #[must_use]
    pub fn mm_token_type_id_map(&self) -> &[(u32, i64)] {
        &self.mm_token_type_id_map
    }

    /// A member of the record that this crate only carries (`task`, `rewards`, `info`, …).
    #[must_use]
    pub fn carried(&self, key: &str) -> Option<&Value> {
        self.carried
            .iter()
            .find(|(name, _)| **name == *key)
            .map(|(_, value)| value)
    }

    /// Sets a carried member.
    ///
    /// # Errors
    /// Gives the value back if the crate owns `key`, which then has a field or method of its own.
    pub fn set_carried(&mut self, key: &str, value: Value) -> Result<(), Value> {
        if crate::load::is_owned_key(key) {
            return Err(value);
        }
        match self.carried.iter_mut().find(|(name, _)| **name == *key) {
            Some((_, slot)) => *slot = value,
            None => self.carried.push((key.into(), value)),
        }
        Ok(())
    }

    /// Appends a call and returns its position. O(1) unless the call came late for an inner node.
    pub fn push_call(&mut self, call: ModelCall) -> usize {
        self.calls.push(call);
        if let Some(derived) = self.derived.get_mut() {
            derived.see_calls(&self.nodes, &self.calls);
        }
        self.calls.len() - 1
    }

    /// Appends nodes whose parents exist. The caller keeps other indexes up to date.
    pub(crate) fn append_node(&mut self, node: MessageNode) -> NodeId {
        // The number of nodes is checked before a commit starts.
        let id = NodeId::from_index(self.nodes.len()).unwrap_or(NodeId::new(u32::MAX));
        if let Some(derived) = self.derived.get_mut() {
            derived.see_node(id, &node);
            for link in &node.semantic_parents {
                derived.see_link(id, link.node, &link.label);
            }
            self.nodes.push(node);
            derived.see_early_call(&self.nodes, &self.calls, id);
        } else {
            self.nodes.push(node);
        }
        self.causal.take();
        id
    }

    /// Appends an already built node, for traces that come from elsewhere.
    ///
    /// # Errors
    /// Gives the node back if its parent or one of its links does not exist yet, or the trace is
    /// full (2³² − 1 nodes).
    #[allow(clippy::result_large_err, reason = "the caller gets its node back")]
    pub fn push_node(&mut self, mut node: MessageNode) -> Result<NodeId, MessageNode> {
        let next = self.nodes.len();
        let known = |id: NodeId| id.index() < next;
        if next >= u32::MAX as usize
            || !node.parent.is_none_or(known)
            || !node.semantic_parents.iter().all(|link| known(link.node))
        {
            return Err(node);
        }
        if node.tools().is_empty() {
            node.tools = None;
        }
        let id = self.append_node(node);
        self.forget_index();
        Ok(id)
    }

    /// A node to edit. Everything computed from nodes is thrown away, and pending turns of this
    /// trace can no longer be committed.
    pub fn node_mut(&mut self, id: NodeId) -> Option<&mut MessageNode> {
        if id.index() >= self.nodes.len() {
            return None;
        }
        self.forget();
        self.nodes.get_mut(id.index())
    }

    /// The calls to edit. Everything computed from them is thrown away.
    pub fn calls_mut(&mut self) -> &mut Vec<ModelCall> {
        self.forget();
        &mut self.calls
    }

    /// Edits a node's per-token streams (advantages, weights, …) in place; nothing is thrown away.
    ///
    /// The token ids themselves are restored if the edit touches them.
    pub fn annotate<R>(&mut self, id: NodeId, edit: impl FnOnce(&mut NodeTokens) -> R) -> Option<R> {
        let node = self.nodes.get_mut(id.index())?;
        let mut tokens = node.tokens.take().unwrap_or_default();
        let ids = std::mem::take(&mut tokens.token_ids);
        let logical = tokens.renderer_token_ids.take();
        tokens.token_ids.clone_from(&ids);
        let result = edit(&mut tokens);
        tokens.token_ids = ids;
        tokens.renderer_token_ids = logical;
        if !tokens.is_empty() {
            node.tokens = Some(tokens);
        }
        Some(result)
    }

    fn forget_index(&mut self) {
        #[cfg(feature = "hash")]
        self.index.take();
    }

    /// Throws away everything that is computed from nodes and calls.
    pub(crate) fn forget(&mut self) {
        self.stamp = new_stamp();
        self.derived.take();
        self.causal.take();
        self.applier = Applier::default();
        self.forget_index();
    }

    /// What is computed from nodes and calls, built when first needed.
    pub(crate) fn derived(&self) -> &Derived {
        self.derived.get_or_init(|| Derived::build(&self.nodes, &self.calls))
    }

    /// The causal graph over nodes. Built when first asked for, in O(nodes + links), and kept
    /// until nodes or links are added.
    #[must_use]
    pub fn causal(&self) -> &CausalGraph {
        self.causal.get_or_init(|| CausalGraph::build(&self.nodes))
    }

    /// Resolves the edges of a set to nodes and puts them on the target nodes as links.
    ///
    /// Sets are cumulative: what was applied before is recognised and skipped. A set that grew by
    /// pushing (see [`crate::EdgeFeed`]) costs O(new edges + new calls); one that was parsed anew
    /// is compared with the last one, without hashing or allocation.
    ///
    /// Returns the links that are new, in the set's order.
    ///
    /// # Errors
    /// [`ApplyError`]; the graph is then exactly as before.
    pub fn add_semantic_edges(&mut self, set: &SemanticEdgeSet) -> Result<Vec<NewLink>, ApplyError> {
        let added = self.applier.apply(&mut self.nodes, &self.calls, set)?;
        if !added.is_empty() {
            if let Some(derived) = self.derived.get_mut() {
                for link in &added {
                    derived.see_link(link.target, link.source, &link.label);
                }
            }
            self.causal.take();
        }
        Ok(added)
    }

    /// Nodes that are nobody's parent, ascending.
    pub fn leaves(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.derived().leaves()
    }

    /// How many branches there are: one per leaf. O(1).
    #[must_use]
    pub fn num_branches(&self) -> usize {
        self.derived().num_leaves()
    }

    /// How many nodes were sampled. O(1).
    #[must_use]
    pub fn num_turns(&self) -> usize {
        self.derived().num_sampled()
    }

    /// The branch that ends in `leaf`, which may be any node.
    #[must_use]
    pub fn branch(&self, leaf: NodeId) -> Option<Branch<'_>> {
        (leaf.index() < self.nodes.len()).then(|| Branch::new(self, leaf))
    }

    /// All branches, by ascending leaf.
    pub fn branches(&self) -> impl Iterator<Item = Branch<'_>> + '_ {
        self.leaves().map(|leaf| Branch::new(self, leaf))
    }

    /// The nodes from the root to `node`.
    #[must_use]
    pub fn path_to(&self, node: NodeId) -> Vec<NodeId> {
        let mut path = Vec::new();
        let mut at = Some(node);
        while let Some(id) = at {
            let Some(found) = self.node(id) else { break };
            path.push(id);
            at = found.parent;
        }
        path.reverse();
        path
    }

    /// Adds a turn's tools to the registry.
    #[cfg(feature = "hash")]
    pub(crate) fn register_tools(&mut self, tools: &[Tool]) {
        for tool in tools {
            match self.tools.iter_mut().find(|known| known.same_entry(tool)) {
                Some(known) => known.clone_from(tool),
                None => self.tools.push(tool.clone()),
            }
        }
    }
}

impl Clone for Trace {
    /// The clone is a trace of its own: pending turns of the original do not belong to it.
    fn clone(&self) -> Self {
        let mut clone = Trace::new(self.id.clone());
        clone.root_reply.clone_from(&self.root_reply);
        clone.is_completed = self.is_completed;
        clone.ok = self.ok;
        clone.stop_condition.clone_from(&self.stop_condition);
        clone.is_timeout = self.is_timeout;
        clone.tools.clone_from(&self.tools);
        clone.nodes.clone_from(&self.nodes);
        clone.calls.clone_from(&self.calls);
        clone.mm_token_type_id_map.clone_from(&self.mm_token_type_id_map);
        clone.carried.clone_from(&self.carried);
        clone
    }
}

impl PartialEq for Trace {
    /// Compares what a trace holds, not what was computed from it.
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
            && self.root_reply == other.root_reply
            && self.is_completed == other.is_completed
            && self.ok == other.ok
            && self.stop_condition == other.stop_condition
            && self.is_timeout == other.is_timeout
            && self.tools == other.tools
            && self.nodes == other.nodes
            && self.calls == other.calls
            && self.mm_token_type_id_map == other.mm_token_type_id_map
            && self.carried == other.carried
    }
}
