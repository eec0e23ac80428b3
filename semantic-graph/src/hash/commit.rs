//! Commits: a prompt and its answer become nodes.

use std::fmt;
use std::sync::Arc;

use super::digest::{Digest, IdentityError, message_digest};
use super::prepare::PendingTurn;
use super::project::{Attribution, Range, project};
use crate::experts::RoutedExperts;
use crate::id::NodeId;
use crate::message::Message;
use crate::node::{MessageNode, NodeTokens, now};
use crate::response::{ExpertRows, Response, Span, TurnTokens};
use crate::trace::Trace;

/// Why a turn was not committed. The trace is as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommitError {
    /// The turn was prepared on another trace, or before an edit of this one.
    ForeignTurn,
    /// The trace cannot hold that many nodes.
    TraceFull,
    /// The answer has no identity.
    Identity(IdentityError),
    /// The prompt claims to extend the stored tokens and does not.
    BridgePrefixMismatch {
        /// The first stored node whose tokens differ.
        node: NodeId,
    },
    /// The renderer's tokens differ from the evaluated ones, and nothing says how.
    MissingPlaceholders,
    /// A placeholder token has no expansion, or one at another place.
    PlaceholderMisaligned {
        /// Position among the renderer's tokens.
        position: usize,
    },
    /// A text token differs, or the two sequences do not end together.
    PromptMisaligned {
        /// Position among the renderer's tokens.
        position: usize,
    },
    /// A message's tokens are outside the prompt.
    SpanOutOfRange {
        /// Position of the message.
        message: usize,
        /// The range it claims.
        span: Span,
    },
    /// There are content flags, but not one per token.
    ContentLengthMismatch {
        /// How many flags.
        flags: usize,
        /// How many tokens.
        tokens: usize,
    },
}

impl CommitError {
    /// The stable name of the refusal.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            CommitError::ForeignTurn => "foreign_turn",
            CommitError::TraceFull => "limit_exceeded",
            CommitError::Identity(_) => "invalid_provider_state",
            CommitError::BridgePrefixMismatch { .. } => "bridge_prefix_mismatch",
            CommitError::MissingPlaceholders => "missing_placeholders",
            CommitError::PlaceholderMisaligned { .. } => "placeholder_misaligned",
            CommitError::PromptMisaligned { .. } => "prompt_misaligned",
            CommitError::SpanOutOfRange { .. } => "span_out_of_range",
            CommitError::ContentLengthMismatch { .. } => "content_length_mismatch",
        }
    }
}

impl fmt::Display for CommitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.code())?;
        match self {
            CommitError::ForeignTurn => f.write_str("the turn does not belong to this trace"),
            CommitError::TraceFull => f.write_str("a trace has fewer than 2^32 nodes"),
            CommitError::Identity(error) => error.fmt(f),
            CommitError::BridgePrefixMismatch { node } => {
                write!(f, "the prompt does not extend the tokens of node {node}")
            }
            CommitError::MissingPlaceholders => f.write_str("the evaluated prompt differs from the rendered one"),
            CommitError::PlaceholderMisaligned { position } => {
                write!(f, "no expansion fits the placeholder at {position}")
            }
            CommitError::PromptMisaligned { position } => {
                write!(f, "the prompts part at rendered token {position}")
            }
            CommitError::SpanOutOfRange { message, span } => {
                write!(f, "message {message} claims tokens {}..{}", span.start, span.end)
            }
            CommitError::ContentLengthMismatch { flags, tokens } => {
                write!(f, "{flags} content flags for {tokens} tokens")
            }
        }
    }
}

impl std::error::Error for CommitError {}

/// What a commit added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The sampled node.
    pub node: NodeId,
    /// All new nodes, the sampled one last.
    pub new_nodes: Vec<NodeId>,
}

/// Where a commit stands in both token sequences.
#[derive(Clone, Copy, Default)]
struct Cursor {
    evaluated: usize,
    logical: usize,
}

/// The tokens of the turn, ready to be cut up.
struct Prompt<'a> {
    tokens: &'a TurnTokens,
    logical: &'a [u32],
    /// Whether both sequences are the same.
    same: bool,
    attribution: Attribution,
}

impl Prompt<'_> {
    fn span(&self, message: usize) -> Option<Range> {
        self.attribution.spans.get(message).copied().flatten()
    }

    /// Where a message's tokens end; the cursor never moves backwards.
    fn end(&self, message: usize, from: Cursor) -> Cursor {
        match self.span(message) {
            None => from,
            Some(span) => Cursor {
                evaluated: span.end.max(from.evaluated),
                logical: span.logical_end.max(from.logical),
            },
        }
    }

    /// Where the next attributed message after `message` begins.
    fn bound(&self, message: usize, from: Cursor) -> Cursor {
        let next = self
            .attribution
            .spans
            .get(message + 1..)
            .unwrap_or_default()
            .iter()
            .flatten()
            .next();
        match next {
            Some(span) => Cursor {
                evaluated: span.start.max(from.evaluated),
                logical: span.logical_start.max(from.logical),
            },
            None => Cursor {
                evaluated: self.tokens.prompt_ids.len(),
                logical: self.logical.len(),
            },
        }
    }

    /// Whether a node's tokens are what comes next.
    fn continues_with(&self, from: Cursor, node: &NodeTokens) -> bool {
        self.tokens.prompt_ids[from.evaluated..].starts_with(&node.token_ids)
            && ((self.same && from.evaluated == from.logical && node.renderer_token_ids.is_none())
                || self.logical[from.logical..].starts_with(node.logical_ids()))
    }

    fn advance(from: Cursor, node: &NodeTokens) -> Cursor {
        Cursor {
            evaluated: from.evaluated + node.token_ids.len(),
            logical: from.logical + node.logical_ids().len(),
        }
    }

    /// The tokens of an unsampled node.
    fn cut(&self, from: Cursor, to: Cursor) -> Option<Box<NodeTokens>> {
        let ids = &self.tokens.prompt_ids[from.evaluated..to.evaluated];
        let logical = &self.logical[from.logical..to.logical];
        if ids.is_empty() && logical.is_empty() {
            return None;
        }
        Some(Box::new(NodeTokens {
            token_ids: ids.to_vec(),
            renderer_token_ids: (ids != logical).then(|| logical.to_vec()),
            mask: vec![false; ids.len()],
            is_content: self
                .attribution
                .is_content
                .as_ref()
                .map(|flags| flags[from.evaluated..to.evaluated].to_vec())
                .unwrap_or_default(),
            ..NodeTokens::default()
        }))
    }

    /// The tokens of the sampled node.
    fn cut_answer(&self, from: Cursor) -> NodeTokens {
        let completion = &self.tokens.completion_ids;
        let scaffold = &self.tokens.prompt_ids[from.evaluated..];
        let logical = &self.logical[from.logical..];
        let mut mask = vec![false; scaffold.len()];
        mask.resize(scaffold.len() + completion.len(), true);
        NodeTokens {
            token_ids: [scaffold, completion].concat(),
            renderer_token_ids: (scaffold != logical).then(|| [logical, completion].concat()),
            // The scaffold before an answer is never content, whatever its flags say.
            is_content: match self.attribution.is_content {
                Some(_) => mask.clone(),
                None => Vec::new(),
            },
            mask,
            logprobs: self.tokens.completion_logprobs.clone(),
            ..NodeTokens::default()
        }
    }
}

impl Trace {
    /// Stores a prompt and its answer, now.
    ///
    /// What other turns stored in the meantime is used where identity and tokens agree. The
    /// sampled node is always new. O(new messages), and with tokens O(tokens of the prompt).
    ///
    /// # Errors
    /// [`CommitError`]; the trace is then exactly as before.
    pub fn commit(&mut self, turn: &PendingTurn, response: Response) -> Result<Committed, CommitError> {
        self.commit_at(turn, response, now())
    }

    /// The same at a given time, in seconds since the Unix epoch.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn commit_at(
        &mut self,
        turn: &PendingTurn,
        response: Response,
        timestamp: f64,
    ) -> Result<Committed, CommitError> {
        self.admit(turn)?;
        let message = Message::Assistant(response.message);
        let digest = message_digest(&message).map_err(CommitError::Identity)?;
        let plan = self.plan(turn, response.tokens.as_ref())?;
        // Nothing below can fail.
        let first_new = self.nodes.len();
        if let Some(tokens) = response.tokens.as_ref()
            && !tokens.mm_token_type_id_map.is_empty()
        {
            self.mm_token_type_id_map.clone_from(&tokens.mm_token_type_id_map);
        }
        let mut tip = plan.tip;
        let mut cursor = plan.cursor;
        for (i, (message, digest)) in plan.rest.into_iter().enumerate() {
            let mut node = MessageNode::new(tip, message);
            node.timestamp = timestamp;
            if let Some(prompt) = &plan.prompt {
                let end = prompt.end(plan.len + i, cursor);
                node.tokens = prompt.cut(cursor, end);
                cursor = end;
            }
            tip = Some(self.append_keyed(turn, node, digest));
        }
        let mut node = MessageNode::new(tip, message);
        node.timestamp = timestamp;
        node.sampled = true;
        if let Some(prompt) = &plan.prompt {
            let mut answer = prompt.cut_answer(cursor);
            answer.sampling_mask = prompt.tokens.sampling_mask.clone().filter(|mask| {
                let listed: i64 = mask.counts.iter().map(|count| i64::from(*count)).sum();
                mask.counts.len() == answer.sampled_len() && listed == mask.ids.len() as i64
            });
            if !answer.is_empty() {
                node.tokens = Some(Box::new(answer));
            }
        }
        let node = self.append_keyed(turn, node, digest);
        let experts = response
            .tokens
            .as_ref()
            .and_then(|tokens| tokens.routed_experts.as_ref());
        if let Some(rows) = experts {
            self.spread_experts(rows, plan.tip, plan.cursor.evaluated, first_new);
        }
        self.register_tools(&turn.tools);
        Ok(Committed {
            node,
            new_nodes: (first_new..=node.index()).filter_map(NodeId::from_index).collect(),
        })
    }

    /// Stores a prompt alone, for a request that was stopped before the model saw it. Returns the
    /// new nodes.
    ///
    /// # Errors
    /// [`CommitError::ForeignTurn`] or [`CommitError::TraceFull`].
    pub fn commit_prompt(&mut self, turn: &PendingTurn) -> Result<Vec<NodeId>, CommitError> {
        self.admit(turn)?;
        let timestamp = now();
        let mut tip = turn.prefix_tip;
        let mut added = Vec::new();
        let from = turn.prefix_len - turn.base;
        for (message, digest) in turn.messages[from..].iter().zip(&turn.digests[from..]) {
            let known = self
                .key_index()
                .variants(&self.nodes, tip, turn.tools_digest, *digest)
                .next();
            let node = match known {
                Some(known) => known,
                None => {
                    let mut node = MessageNode::new(tip, Arc::clone(message));
                    node.timestamp = timestamp;
                    let node = self.append_keyed(turn, node, *digest);
                    added.push(node);
                    node
                }
            };
            tip = Some(node);
        }
        self.register_tools(&turn.tools);
        Ok(added)
    }

    fn admit(&self, turn: &PendingTurn) -> Result<(), CommitError> {
        if turn.stamp != self.stamp {
            return Err(CommitError::ForeignTurn);
        }
        if self.nodes.len() + turn.prompt_len() + 1 >= u32::MAX as usize {
            return Err(CommitError::TraceFull);
        }
        self.key_index();
        Ok(())
    }

    fn append_keyed(&mut self, turn: &PendingTurn, mut node: MessageNode, digest: Digest) -> NodeId {
        if let Some(index) = self.index.get_mut() {
            let tools = match node.parent {
                None => index.tool_list(&turn.tools),
                Some(_) => 0,
            };
            if node.parent.is_none() && !turn.tools.is_empty() {
                node.tools = Some(Arc::clone(&turn.tools));
            }
            index.add(&node, Some(digest), tools);
        }
        self.append_node(node)
    }
}

/// What a commit will do.
struct Plan<'a> {
    /// The last node that is kept.
    tip: Option<NodeId>,
    /// How many messages are kept.
    len: usize,
    cursor: Cursor,
    /// Messages that become nodes.
    rest: Vec<(Arc<Message>, Digest)>,
    prompt: Option<Prompt<'a>>,
}

impl Trace {
    fn plan<'a>(&self, turn: &PendingTurn, tokens: Option<&'a TurnTokens>) -> Result<Plan<'a>, CommitError> {
        let mut plan = Plan {
            tip: turn.prefix_tip,
            len: turn.prefix_len,
            cursor: Cursor::default(),
            rest: Vec::new(),
            prompt: None,
        };
        let mut path = Vec::new();
        if let Some(tokens) = tokens {
            let type_map = if tokens.mm_token_type_id_map.is_empty() {
                &self.mm_token_type_id_map
            } else {
                &tokens.mm_token_type_id_map
            };
            let logical = tokens.renderer_prompt_ids.as_deref().unwrap_or(&tokens.prompt_ids);
            let mut prompt = Prompt {
                tokens,
                logical,
                same: *logical == *tokens.prompt_ids,
                attribution: Attribution {
                    spans: Vec::new(),
                    is_content: None,
                },
            };
            path = turn.prefix_node_ids(self);
            self.trim(&mut plan, &path, &prompt)?;
            prompt.attribution = project(tokens, type_map)?;
            plan.prompt = Some(prompt);
        }
        // Messages of the prefix whose tokens differ are looked for again, and stored again.
        let again: Vec<(Arc<Message>, Digest)> = path
            .iter()
            .enumerate()
            .take(turn.base)
            .skip(plan.len)
            .filter_map(|(_, id)| {
                let digest = self.key_index().digest(*id)?;
                Some((Arc::clone(&self.nodes[id.index()].message), digest))
            })
            .collect();
        let own = plan.len.saturating_sub(turn.base);
        let mut rest = again.into_iter().chain(
            turn.messages[own..]
                .iter()
                .cloned()
                .zip(turn.digests[own..].iter().copied()),
        );
        for (message, digest) in rest.by_ref() {
            let Some(found) = self.absorb(&plan, turn.tools_digest, digest) else {
                plan.rest.push((message, digest));
                break;
            };
            if plan.prompt.is_some() {
                plan.cursor = Prompt::advance(plan.cursor, self.nodes[found.index()].tokens());
            }
            plan.tip = Some(found);
            plan.len += 1;
        }
        plan.rest.extend(rest);
        Ok(plan)
    }

    /// Cuts the prefix where its tokens stop being the prompt's.
    fn trim(&self, plan: &mut Plan<'_>, path: &[NodeId], prompt: &Prompt<'_>) -> Result<(), CommitError> {
        let mut cursor = Cursor::default();
        for (i, id) in path.iter().enumerate() {
            let tokens = self.nodes[id.index()].tokens();
            if !prompt.continues_with(cursor, tokens) {
                if prompt.tokens.bridged {
                    return Err(CommitError::BridgePrefixMismatch { node: *id });
                }
                plan.len = i;
                plan.tip = i.checked_sub(1).map(|last| path[last]);
                break;
            }
            cursor = Prompt::advance(cursor, tokens);
        }
        plan.cursor = cursor;
        Ok(())
    }

    /// The stored node that is the next message of the prompt, tokens included.
    fn absorb(&self, plan: &Plan<'_>, tools: Digest, digest: Digest) -> Option<NodeId> {
        let mut variants = self.key_index().variants(&self.nodes, plan.tip, tools, digest);
        let Some(prompt) = &plan.prompt else {
            return variants.next();
        };
        let tokens = |id: &NodeId| self.nodes[id.index()].tokens();
        let from = plan.cursor;
        if prompt.span(plan.len).is_some() {
            let end = prompt.end(plan.len, from);
            let ids = &prompt.tokens.prompt_ids[from.evaluated..end.evaluated];
            let logical = &prompt.logical[from.logical..end.logical];
            return variants.find(|id| *ids == *tokens(id).token_ids && *logical == *tokens(id).logical_ids());
        }
        let bound = prompt.bound(plan.len, from);
        let mut best: Option<(usize, NodeId)> = None;
        // Newest first, so that of equally long ones the newest stays.
        for id in variants {
            let candidate = tokens(&id);
            let to = Prompt::advance(from, candidate);
            if to.evaluated <= bound.evaluated
                && to.logical <= bound.logical
                && prompt.continues_with(from, candidate)
                && best.is_none_or(|(longest, _)| candidate.token_ids.len() > longest)
            {
                best = Some((candidate.token_ids.len(), id));
            }
        }
        best.map(|(_, id)| id)
    }

    /// Gives each new node its rows, and repairs the last row of the turn before.
    fn spread_experts(&mut self, rows: &ExpertRows, prefix_tip: Option<NodeId>, path_len: usize, first_new: usize) {
        let array = &rows.array;
        let total = array.rows() as i64;
        let mut off = (path_len as i64).saturating_sub(rows.start);
        if (1..=total).contains(&off) {
            let row = array.slice(off as usize - 1, off as usize);
            self.repair_experts(prefix_tip, &row);
        }
        let last = self.nodes.len() - 1;
        for at in first_new..self.nodes.len() {
            let Some(tokens) = &mut self.nodes[at].tokens else {
                continue;
            };
            let count = tokens.token_ids.len() as i64;
            let end = off.saturating_add(count);
            let own: Option<RoutedExperts> = if count == 0 || off < 0 {
                None
            } else if end <= total {
                Some(array.slice(off as usize, end as usize))
            } else if at == last && end == total + 1 && total > 0 && off <= total {
                let mut own = array.slice(off as usize, total as usize);
                own.append(&array.slice(total as usize - 1, total as usize));
                Some(own)
            } else {
                None
            };
            tokens.routed_experts = own;
            off = end;
        }
    }

    fn repair_experts(&mut self, prefix_tip: Option<NodeId>, row: &RoutedExperts) {
        let mut at = prefix_tip;
        while let Some(id) = at {
            let node = &mut self.nodes[id.index()];
            if node.tokens().token_ids.is_empty() {
                at = node.parent;
                continue;
            }
            if let Some(stored) = node
                .tokens
                .as_mut()
                .filter(|_| node.sampled)
                .and_then(|tokens| tokens.routed_experts.as_mut())
                && stored.rows() > 0
                && stored.same_inner_shape(row)
            {
                stored.replace_last(row);
            }
            return;
        }
    }
}
