//! [`KeyIndex`]: finding the node that a message would be.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::digest::{Digest, message_digest, tools_digest};
use crate::id::NodeId;
use crate::node::MessageNode;
use crate::tool::Tool;

const NONE: u32 = u32::MAX;

/// The keys are halves of digests: good enough as they are.
#[derive(Default)]
pub(crate) struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// Finds nodes by parent and message identity, and by tools for roots.
#[derive(Debug, Default)]
pub(crate) struct KeyIndex {
    /// Per node; none for a message without identity, which is never found.
    digests: Vec<Option<Digest>>,
    /// For each key's short form, the newest node. Different keys may share a short form.
    newest: HashMap<u64, u32, BuildHasherDefault<AsIs>>,
    /// Per node the next older one of the same short form.
    older: Vec<u32>,
    /// Which tool list each root has.
    tools_of_root: HashMap<u32, u32>,
    tool_lists: Vec<(Arc<Vec<Tool>>, Digest)>,
    roots_by_message: HashMap<Digest, Vec<u32>>,
    newest_roots: Vec<u32>,
    /// Tokens from the root to each node, and the same for logical tokens.
    path_tokens: Vec<(u64, u64)>,
    /// Messages from the root to each node, itself included.
    depth: Vec<u32>,
}

/// How many recent roots are compared with a first message before it is hashed.
const RECENT_ROOTS: usize = 4;

impl KeyIndex {
    pub(crate) fn build(nodes: &[MessageNode]) -> Self {
        let mut index = Self {
            digests: Vec::with_capacity(nodes.len()),
            older: Vec::with_capacity(nodes.len()),
            path_tokens: Vec::with_capacity(nodes.len()),
            depth: Vec::with_capacity(nodes.len()),
            ..Self::default()
        };
        let empty = Arc::new(Vec::new());
        for node in nodes {
            let digest = message_digest(&node.message).ok();
            let tools = node.tools.as_ref().unwrap_or(&empty);
            let tools = match node.parent {
                None => index.tool_list(tools),
                Some(_) => 0,
            };
            index.add(node, digest, tools);
        }
        index
    }

    /// The number of a tool list, which is added if it is new.
    pub(crate) fn tool_list(&mut self, tools: &Arc<Vec<Tool>>) -> u32 {
        let known = self
            .tool_lists
            .iter()
            .position(|(known, _)| Arc::ptr_eq(known, tools) || known == tools);
        if let Some(known) = known {
            return known as u32;
        }
        let digest = tools_digest(tools);
        if let Some(known) = self.tool_lists.iter().position(|(_, known)| *known == digest) {
            return known as u32;
        }
        self.tool_lists.push((Arc::clone(tools), digest));
        self.tool_lists.len() as u32 - 1
    }

    /// The identity of a tool list.
    pub(crate) fn tools_digest(&self, tools: &Arc<Vec<Tool>>) -> Digest {
        self.tool_lists
            .iter()
            .find(|(known, _)| Arc::ptr_eq(known, tools) || known == tools)
            .map_or_else(|| tools_digest(tools), |(_, digest)| *digest)
    }

    fn short(parent: Option<NodeId>, tools: Option<Digest>, message: Digest) -> u64 {
        let place = match (parent, tools) {
            (Some(parent), _) => (u64::from(parent.get()) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            (None, Some(tools)) => tools.head(),
            (None, None) => 0,
        };
        message.head() ^ place
    }

    /// The node `nodes.len()` is being appended.
    pub(crate) fn add(&mut self, node: &MessageNode, digest: Option<Digest>, tools: u32) {
        let id = self.digests.len() as u32;
        self.digests.push(digest);
        let mut path = node.parent.map_or((0, 0), |parent| self.path_tokens[parent.index()]);
        path.0 += node.tokens().token_ids.len() as u64;
        path.1 += node.tokens().logical_ids().len() as u64;
        self.path_tokens.push(path);
        self.depth
            .push(node.parent.map_or(1, |parent| self.depth[parent.index()] + 1));
        self.older.push(NONE);
        let Some(digest) = digest else { return };
        let tools_digest = match node.parent {
            Some(_) => None,
            None => {
                self.tools_of_root.insert(id, tools);
                self.roots_by_message.entry(digest).or_default().push(id);
                if self.newest_roots.len() == RECENT_ROOTS {
                    self.newest_roots.remove(0);
                }
                self.newest_roots.push(id);
                Some(self.tool_lists[tools as usize].1)
            }
        };
        let short = Self::short(node.parent, tools_digest, digest);
        if let Some(before) = self.newest.insert(short, id) {
            self.older[id as usize] = before;
        }
    }

    pub(crate) fn digest(&self, node: NodeId) -> Option<Digest> {
        self.digests.get(node.index()).copied().flatten()
    }

    /// Tokens from the root to a node: evaluated ones, and logical ones.
    pub(crate) fn path_tokens(&self, node: NodeId) -> (u64, u64) {
        self.path_tokens.get(node.index()).copied().unwrap_or((0, 0))
    }

    /// Messages from the root to a node, itself included.
    pub(crate) fn depth(&self, node: NodeId) -> usize {
        self.depth.get(node.index()).map_or(0, |depth| *depth as usize)
    }

    /// All nodes with a key, newest first.
    pub(crate) fn variants<'a>(
        &'a self,
        nodes: &'a [MessageNode],
        parent: Option<NodeId>,
        tools: Digest,
        message: Digest,
    ) -> impl Iterator<Item = NodeId> + 'a {
        let tools = parent.is_none().then_some(tools);
        let mut at = self
            .newest
            .get(&Self::short(parent, tools, message))
            .copied()
            .unwrap_or(NONE);
        std::iter::from_fn(move || {
            while at != NONE {
                let id = at;
                at = self.older[id as usize];
                let node = &nodes[id as usize];
                let same = self.digests[id as usize] == Some(message)
                    && node.parent == parent
                    && tools.is_none_or(|tools| {
                        self.tools_of_root
                            .get(&id)
                            .is_some_and(|list| self.tool_lists[*list as usize].1 == tools)
                    });
                if same {
                    return Some(NodeId::new(id));
                }
            }
            None
        })
    }

    /// Roots with a message, whatever their tools.
    pub(crate) fn roots(&self, message: Digest) -> &[u32] {
        self.roots_by_message.get(&message).map_or(&[], Vec::as_slice)
    }

    /// A few roots that a conversation is likely to start with.
    pub(crate) fn likely_roots(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.newest_roots.iter().rev().map(|root| NodeId::new(*root))
    }
}
