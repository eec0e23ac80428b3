//! [`PendingTurn`]: how much of a prompt a trace already has.

use std::fmt;
use std::sync::Arc;

use super::digest::{Digest, IdentityError, message_digest};
use super::index::KeyIndex;
use crate::id::NodeId;
use crate::message::Message;
use crate::tool::Tool;
use crate::trace::Trace;

/// A prompt that was matched with a trace and waits for its answer.
///
/// Several may be open at once, and may be committed in any order. A pending turn belongs to the
/// trace that made it, until a node of that trace is edited.
#[derive(Clone, Debug)]
pub struct PendingTurn {
    pub(super) stamp: u64,
    /// The prompt's messages, from position `base` on.
    pub(super) messages: Vec<Arc<Message>>,
    /// Their identities.
    pub(super) digests: Vec<Digest>,
    /// How many messages the caller vouched for; they are the path to `prefix_tip` or a part of it.
    pub(super) base: usize,
    pub(super) tools: Arc<Vec<Tool>>,
    pub(super) tools_digest: Digest,
    pub(super) prefix_tip: Option<NodeId>,
    pub(super) prefix_len: usize,
    path_len: u64,
    renderer_path_len: u64,
}

/// Why a prompt cannot be matched.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrepareError {
    /// A message has no identity.
    Identity {
        /// Its position in the prompt.
        message: usize,
        /// Why.
        error: IdentityError,
    },
    /// The node to continue from does not exist.
    UnknownNode(NodeId),
}

impl fmt::Display for PrepareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PrepareError::Identity { message, error } => write!(f, "message {message}: {error}"),
            PrepareError::UnknownNode(node) => write!(f, "node {node} does not exist"),
        }
    }
}

impl std::error::Error for PrepareError {}

/// The stored tokens that a new prompt may extend, in the renderer's ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BridgeAnchor {
    /// Everything before the last completion.
    pub prompt_ids: Vec<u32>,
    /// The last completion.
    pub completion_ids: Vec<u32>,
}

/// How many children are compared with a message before it is hashed.
const LIKELY_CHILDREN: usize = 4;

impl PendingTurn {
    /// How many of the prompt's first messages are stored already.
    #[must_use]
    pub fn tail_start(&self) -> usize {
        self.prefix_len
    }

    /// The node of the last stored message.
    #[must_use]
    pub fn prefix_tip(&self) -> Option<NodeId> {
        self.prefix_tip
    }

    /// The messages that are not stored yet.
    #[must_use]
    pub fn tail(&self) -> &[Arc<Message>] {
        &self.messages[self.prefix_len - self.base..]
    }

    /// How many messages the prompt has.
    #[must_use]
    pub fn prompt_len(&self) -> usize {
        self.base + self.messages.len()
    }

    /// The tools offered with the prompt.
    #[must_use]
    pub fn tools(&self) -> &[Tool] {
        &self.tools
    }

    /// Evaluated tokens along the stored prefix.
    #[must_use]
    pub fn path_len(&self) -> u64 {
        self.path_len
    }

    /// Logical tokens along the stored prefix.
    #[must_use]
    pub fn renderer_path_len(&self) -> u64 {
        self.renderer_path_len
    }

    /// The nodes of the stored prefix, from the root on.
    #[must_use]
    pub fn prefix_node_ids(&self, trace: &Trace) -> Vec<NodeId> {
        self.prefix_tip.map(|tip| trace.path_to(tip)).unwrap_or_default()
    }

    /// The stored tokens that the prompt may be rendered onto. None unless the prefix ends in a
    /// sampled completion with a prompt before it.
    #[must_use]
    pub fn bridge_anchor(&self, trace: &Trace) -> Option<BridgeAnchor> {
        let last = trace.node(self.prefix_tip?)?;
        let sampled = last.tokens().sampled_len();
        if !last.sampled || sampled == 0 {
            return None;
        }
        let mut prompt_ids = Vec::with_capacity(self.renderer_path_len as usize);
        for id in self.prefix_node_ids(trace) {
            prompt_ids.extend_from_slice(trace.node(id)?.tokens().logical_ids());
        }
        let own = last.tokens().logical_ids().len();
        let completion_ids = prompt_ids.split_off(prompt_ids.len() - sampled.min(own));
        if prompt_ids.is_empty() || completion_ids.is_empty() {
            return None;
        }
        Some(BridgeAnchor {
            prompt_ids,
            completion_ids,
        })
    }
}

impl Trace {
    pub(super) fn key_index(&self) -> &KeyIndex {
        self.index.get_or_init(|| KeyIndex::build(&self.nodes))
    }

    /// Matches a prompt with what is stored. Changes nothing.
    ///
    /// O(messages) comparisons; only messages that are not stored are hashed, and a message that
    /// is stored is compared by pointer first, then by content. Hand in the [`Arc`]s that
    /// [`crate::MessageNode::message`] holds to pay only for the tail.
    ///
    /// # Errors
    /// [`PrepareError::Identity`] for provider state that cannot be hashed.
    pub fn prepare_turn<M: Into<Arc<Message>>>(
        &self,
        prompt: impl IntoIterator<Item = M>,
        tools: impl Into<Arc<Vec<Tool>>>,
    ) -> Result<PendingTurn, PrepareError> {
        let tools = tools.into();
        let tools_digest = self.key_index().tools_digest(&tools);
        self.match_prompt(None, prompt.into_iter().map(Into::into).collect(), tools, tools_digest)
    }

    /// Matches the rest of a prompt whose beginning is, as the caller knows, the path to `node`.
    /// O(rest of the prompt). `tools` are those offered with the prompt, as in
    /// [`prepare_turn`](Self::prepare_turn), and give the same result as the whole prompt would.
    ///
    /// # Errors
    /// As [`prepare_turn`](Self::prepare_turn), and [`PrepareError::UnknownNode`].
    pub fn prepare_after<M: Into<Arc<Message>>>(
        &self,
        node: NodeId,
        tail: impl IntoIterator<Item = M>,
        tools: impl Into<Arc<Vec<Tool>>>,
    ) -> Result<PendingTurn, PrepareError> {
        if node.index() >= self.nodes.len() {
            return Err(PrepareError::UnknownNode(node));
        }
        let tools = tools.into();
        let tools_digest = self.key_index().tools_digest(&tools);
        self.match_prompt(
            Some(node),
            tail.into_iter().map(Into::into).collect(),
            tools,
            tools_digest,
        )
    }

    fn match_prompt(
        &self,
        after: Option<NodeId>,
        messages: Vec<Arc<Message>>,
        tools: Arc<Vec<Tool>>,
        tools_digest: Digest,
    ) -> Result<PendingTurn, PrepareError> {
        let index = self.key_index();
        let base = after.map_or(0, |node| index.depth(node));
        let mut tip = after;
        let mut prefix_len = base;
        let mut digests = Vec::with_capacity(messages.len());
        let mut matching = true;
        for (i, message) in messages.iter().enumerate() {
            let nearby = if matching { self.nearby(tip, message) } else { None };
            let digest = match nearby.and_then(|(id, _)| index.digest(id)) {
                Some(digest) => digest,
                None => message_digest(message).map_err(|error| PrepareError::Identity {
                    message: base + i,
                    error,
                })?,
            };
            digests.push(digest);
            if !matching {
                continue;
            }
            let found = match nearby {
                Some((id, true)) => Some(id),
                _ => index.variants(&self.nodes, tip, tools_digest, digest).next(),
            };
            match found {
                Some(found) => {
                    tip = Some(found);
                    prefix_len += 1;
                }
                None => matching = false,
            }
        }
        let (path_len, renderer_path_len) = tip.map_or((0, 0), |tip| index.path_tokens(tip));
        Ok(PendingTurn {
            stamp: self.stamp,
            messages,
            digests,
            base,
            tools,
            tools_digest,
            prefix_tip: tip,
            prefix_len,
            path_len,
            renderer_path_len,
        })
    }

    /// A stored message that equals `message` and may follow `tip`; and whether it is for sure the
    /// newest node of its key, as the newest child is.
    fn nearby(&self, tip: Option<NodeId>, message: &Arc<Message>) -> Option<(NodeId, bool)> {
        let same = |id: &NodeId| {
            let known = &self.nodes[id.index()].message;
            Arc::ptr_eq(known, message) || known == message
        };
        match tip {
            Some(tip) => self
                .derived()
                .children(tip)
                .take(LIKELY_CHILDREN)
                .enumerate()
                .find(|(_, id)| same(id))
                .map(|(age, id)| (id, age == 0)),
            None => self.key_index().likely_roots().find(same).map(|id| (id, false)),
        }
    }

    /// The longest beginning of a prompt that some path from some root has, whatever the tools and
    /// whichever tokens its messages have.
    ///
    /// # Errors
    /// [`PrepareError::Identity`] for provider state that cannot be hashed.
    pub fn message_prefix_len(&self, prompt: &[Message]) -> Result<usize, PrepareError> {
        let index = self.key_index();
        let no_tools = Digest::of_no_tools();
        let mut front: Vec<NodeId> = Vec::new();
        for (i, message) in prompt.iter().enumerate() {
            let digest = message_digest(message).map_err(|error| PrepareError::Identity { message: i, error })?;
            let next: Vec<NodeId> = if i == 0 {
                index.roots(digest).iter().map(|id| NodeId::new(*id)).collect()
            } else {
                front
                    .iter()
                    .flat_map(|tip| index.variants(&self.nodes, Some(*tip), no_tools, digest))
                    .collect()
            };
            if next.is_empty() {
                return Ok(i);
            }
            front = next;
        }
        Ok(prompt.len())
    }
}
