//! [`Branch`]: the path from a root to one leaf, which is what a training sample is made of.

use std::fmt;

use crate::call::Usage;
use crate::experts::{RoutedExperts, SamplingMask};
use crate::id::NodeId;
use crate::message::Message;
use crate::node::{MessageNode, NodeTokens};
use crate::trace::Trace;

/// The path from a root to one node, usually a leaf.
///
/// Counts and flags are O(1); everything that returns a vector walks the path.
#[derive(Clone, Copy, Debug)]
pub struct Branch<'a> {
    trace: &'a Trace,
    leaf: NodeId,
}

/// An array on a node that does not fit the node's tokens, or its neighbours' arrays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamError {
    /// The node.
    pub node: NodeId,
    /// The array.
    pub stream: String,
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "length_mismatch: `{}` of node {} does not fit the branch's tokens",
            self.stream, self.node
        )
    }
}

impl std::error::Error for StreamError {}

impl<'a> Branch<'a> {
    pub(crate) fn new(trace: &'a Trace, leaf: NodeId) -> Self {
        Self { trace, leaf }
    }

    /// The last node.
    #[must_use]
    pub fn leaf(&self) -> NodeId {
        self.leaf
    }

    /// The nodes from the root to the leaf.
    #[must_use]
    pub fn node_ids(&self) -> Vec<NodeId> {
        self.trace.path_to(self.leaf)
    }

    fn nodes(&self) -> Vec<&'a MessageNode> {
        self.node_ids()
            .into_iter()
            .map(|id| &self.trace.nodes[id.index()])
            .collect()
    }

    /// The messages from the root to the leaf.
    #[must_use]
    pub fn messages(&self) -> Vec<&'a Message> {
        self.nodes().into_iter().map(|node| &*node.message).collect()
    }

    /// For each node that has one, the last call recorded for it, as a position in
    /// [`Trace::calls`].
    #[must_use]
    pub fn calls(&self) -> Vec<usize> {
        self.node_ids()
            .into_iter()
            .filter_map(|id| self.trace.derived().last_call(id))
            .collect()
    }

    /// Whether the branch is a training sample: its leaf is not a refused compaction attempt.
    #[must_use]
    pub fn is_trainable(&self) -> bool {
        self.trace.derived().is_trainable(self.leaf)
    }

    /// Input tokens, each call's growth over the one before.
    #[must_use]
    pub fn num_input_tokens(&self) -> i64 {
        self.trace.derived().totals(self.leaf).input
    }

    /// Completion tokens.
    #[must_use]
    pub fn num_output_tokens(&self) -> i64 {
        self.trace.derived().totals(self.leaf).output
    }

    /// Input and completion tokens of the last call.
    #[must_use]
    pub fn num_total_tokens(&self) -> i64 {
        self.trace.derived().totals(self.leaf).last_total
    }

    /// The calls' usage added up.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        Usage::aggregate(
            self.calls()
                .into_iter()
                .filter_map(|call| self.trace.calls[call].usage.as_deref()),
        )
    }

    /// All token ids.
    #[must_use]
    pub fn token_ids(&self) -> Vec<u32> {
        self.concat(|tokens| &tokens.token_ids)
    }

    /// Per token whether the model sampled it.
    #[must_use]
    pub fn sampled_mask(&self) -> Vec<bool> {
        self.concat(|tokens| &tokens.mask)
    }

    fn concat<T: Copy>(&self, part: impl Fn(&NodeTokens) -> &[T]) -> Vec<T> {
        let mut all = Vec::new();
        for node in self.nodes() {
            all.extend_from_slice(part(node.tokens()));
        }
        all
    }

    /// Natural-log probabilities per token; 0 where the model did not sample.
    #[must_use]
    pub fn logprobs(&self) -> Vec<f64> {
        self.spread(|tokens| Some(&tokens.logprobs)).unwrap_or_default()
    }

    /// Advantages per token; none if never computed.
    #[must_use]
    pub fn advantages(&self) -> Option<Vec<f64>> {
        self.spread(|tokens| tokens.advantages.as_deref())
    }

    /// Log probabilities under the reference model; none if never computed.
    #[must_use]
    pub fn reference_logprobs(&self) -> Option<Vec<f64>> {
        self.spread(|tokens| tokens.reference_logprobs.as_deref())
    }

    /// Log probabilities under the trained model; none if never computed.
    #[must_use]
    pub fn trainer_logprobs(&self) -> Option<Vec<f64>> {
        self.spread(|tokens| tokens.trainer_logprobs.as_deref())
    }

    /// Entropies in nats; none if never computed.
    #[must_use]
    pub fn entropies(&self) -> Option<Vec<f64>> {
        self.spread(|tokens| tokens.entropies.as_deref())
    }

    /// Puts a node's k-th value at its k-th sampled position; none if no node has values.
    fn spread(&self, part: impl Fn(&NodeTokens) -> Option<&[f64]>) -> Option<Vec<f64>> {
        let mut any = false;
        let mut all = Vec::new();
        for node in self.nodes() {
            let tokens = node.tokens();
            let values = part(tokens);
            any |= values.is_some();
            let mut values = values.unwrap_or_default().iter();
            all.extend(tokens.mask.iter().map(|sampled| {
                if *sampled {
                    values.next().copied().unwrap_or(0.0)
                } else {
                    0.0
                }
            }));
        }
        any.then_some(all)
    }

    /// Named loss weights per token, zeros for nodes without; none if no node has them.
    ///
    /// # Errors
    /// [`StreamError`] if a node's weights are not parallel to its tokens.
    pub fn loss_weights(&self, name: &str) -> Result<Option<Vec<f64>>, StreamError> {
        let mut any = false;
        let mut all = Vec::new();
        for id in self.node_ids() {
            let tokens = self.trace.nodes[id.index()].tokens();
            let weights = tokens.loss_weights.iter().flatten().find(|(known, _)| **known == *name);
            match weights {
                Some((_, weights)) if weights.len() == tokens.token_ids.len() => {
                    any = true;
                    all.extend_from_slice(weights);
                }
                Some(_) => {
                    return Err(StreamError {
                        node: id,
                        stream: name.to_owned(),
                    });
                }
                None => all.extend(std::iter::repeat_n(0.0, tokens.token_ids.len())),
            }
        }
        Ok(any.then_some(all))
    }

    /// Per token its multimodal type, 0 for text; none if there is nothing but text.
    #[must_use]
    pub fn mm_token_type_ids(&self) -> Option<Vec<i64>> {
        let map: std::collections::HashMap<u32, i64> = self.trace.mm_token_type_id_map.iter().copied().collect();
        if map.is_empty() {
            return None;
        }
        let types: Vec<i64> = self
            .token_ids()
            .into_iter()
            .map(|id| map.get(&id).copied().unwrap_or(0))
            .collect();
        types.iter().any(|ty| *ty != 0).then_some(types)
    }

    /// Experts per token; none unless every node with tokens has them.
    ///
    /// # Errors
    /// [`StreamError`] if two nodes' rows have different shapes.
    pub fn routed_experts(&self) -> Result<Option<RoutedExperts>, StreamError> {
        let mut all: Option<RoutedExperts> = None;
        for id in self.node_ids() {
            let tokens = self.trace.nodes[id.index()].tokens();
            if tokens.token_ids.is_empty() {
                continue;
            }
            let Some(rows) = &tokens.routed_experts else {
                return Ok(None);
            };
            match &mut all {
                None => all = Some(rows.clone()),
                Some(all) if all.same_inner_shape(rows) => all.append(rows),
                Some(_) => {
                    return Err(StreamError {
                        node: id,
                        stream: "routed_experts".to_owned(),
                    });
                }
            }
        }
        Ok(all)
    }

    /// Candidate tokens per position, none where the model did not sample; none if no node has
    /// them.
    #[must_use]
    pub fn sampling_mask(&self) -> Option<SamplingMask> {
        let mut any = false;
        let mut all = SamplingMask::default();
        for node in self.nodes() {
            let tokens = node.tokens();
            let mut counts = [].iter();
            if let Some(mask) = &tokens.sampling_mask {
                any = true;
                all.ids.extend_from_slice(&mask.ids);
                counts = mask.counts.iter();
            }
            all.counts.extend(tokens.mask.iter().map(|sampled| {
                if *sampled {
                    counts.next().copied().unwrap_or(0)
                } else {
                    0
                }
            }));
        }
        any.then_some(all)
    }
}
