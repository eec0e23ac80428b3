//! [`Trace::stats`]: what a trace consists of, in one pass.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Serialize;

use crate::causal::EdgeFilter;
use crate::id::NodeId;
use crate::trace::Trace;

/// What a trace consists of. All maps are sorted, so equal traces give equal JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Messages by role.
    pub messages: BTreeMap<&'static str, u64>,
    /// Sampled messages.
    pub turns: u64,
    /// Conversations.
    pub roots: u64,
    /// Paths from a root to a leaf.
    pub branches: u64,
    /// Most children of one message.
    pub max_children: u64,
    /// Messages on the longest path.
    pub max_depth: u64,
    /// Tokens that are stored.
    pub stored_tokens: u64,
    /// Tokens of all branches, shared beginnings counted once for each.
    pub branch_tokens: u64,
    /// Tokens the model sampled.
    pub sampled_tokens: u64,
    /// Tokens that are content, where that is known.
    pub content_tokens: u64,
    /// Equal messages under one parent that differ in tokens: re-tokenised history.
    pub token_breaks: u64,
    /// Tokens stored again because of that.
    pub repeated_tokens: u64,
    /// Links by label.
    pub links: BTreeMap<String, u64>,
    /// Most causes of one message.
    pub max_causes: u64,
    /// Most effects of one message.
    pub max_effects: u64,
    /// Sizes of the loops that links form, largest first.
    pub loops: Vec<u64>,
    /// Compaction attempts that were continued from.
    pub compactions_accepted: u64,
    /// Compaction attempts that were not.
    pub compactions_refused: u64,
    /// Calls by finish reason; `none` for those without.
    pub calls: BTreeMap<&'static str, u64>,
    /// Calls with an error.
    pub failed_calls: u64,
    /// Request ids with more than one call.
    pub retried_requests: u64,
    /// Input tokens that were read from a cache, as a share of all input tokens.
    pub cached_share: Option<f64>,
    /// Time spent in calls, in seconds.
    pub model_seconds: f64,
}

impl Trace {
    /// Counts everything. O(nodes + links + calls).
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = Stats {
            turns: self.num_turns() as u64,
            branches: self.num_branches() as u64,
            ..Stats::default()
        };
        self.count_nodes(&mut stats);
        self.count_links(&mut stats);
        self.count_calls(&mut stats);
        stats
    }

    fn count_nodes(&self, stats: &mut Stats) {
        let mut children = vec![0u64; self.nodes.len()];
        let mut depth: Vec<u64> = Vec::with_capacity(self.nodes.len());
        let mut path: Vec<u64> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            *stats.messages.entry(node.message.role().as_str()).or_default() += 1;
            let tokens = node.tokens();
            let own = tokens.token_ids.len() as u64;
            stats.stored_tokens += own;
            stats.sampled_tokens += tokens.sampled_len() as u64;
            stats.content_tokens += tokens.is_content.iter().filter(|c| **c).count() as u64;
            let (above, before) = match node.parent {
                None => {
                    stats.roots += 1;
                    (0, 0)
                }
                Some(parent) => {
                    children[parent.index()] += 1;
                    (depth[parent.index()], path[parent.index()])
                }
            };
            depth.push(above + 1);
            path.push(before + own);
        }
        stats.max_children = children.iter().copied().max().unwrap_or(0);
        stats.max_depth = depth.iter().copied().max().unwrap_or(0);
        stats.branch_tokens = self.leaves().map(|leaf| path[leaf.index()]).sum();
        self.count_token_breaks(stats);
    }

    /// Siblings of equal messages, one of them with other tokens than the first.
    fn count_token_breaks(&self, stats: &mut Stats) {
        let mut first: HashMap<(Option<NodeId>, String), NodeId> = HashMap::new();
        // Only parents with several children can have equal ones.
        let mut seen_parent: HashSet<Option<NodeId>> = HashSet::new();
        let mut several: HashSet<Option<NodeId>> = HashSet::new();
        for node in &self.nodes {
            if !seen_parent.insert(node.parent) {
                several.insert(node.parent);
            }
        }
        for (i, node) in self.nodes.iter().enumerate() {
            if !several.contains(&node.parent) {
                continue;
            }
            let Ok(text) = crate::json::to_string(&*node.message) else {
                continue;
            };
            let id = NodeId::new(i as u32);
            let earlier = *first.entry((node.parent, text)).or_insert(id);
            let tokens = &node.tokens().token_ids;
            if earlier != id && *tokens != self.nodes[earlier.index()].tokens().token_ids {
                stats.token_breaks += 1;
                stats.repeated_tokens += tokens.len() as u64;
            }
        }
    }

    fn count_links(&self, stats: &mut Stats) {
        let mut effects = vec![0u64; self.nodes.len()];
        let mut attempts = HashSet::new();
        let mut accepted = HashSet::new();
        for (i, node) in self.nodes.iter().enumerate() {
            stats.max_causes = stats.max_causes.max(node.semantic_parents.len() as u64);
            for link in &node.semantic_parents {
                match stats.links.get_mut(link.label.as_str()) {
                    Some(count) => *count += 1,
                    None => {
                        stats.links.insert(link.label.as_str().to_owned(), 1);
                    }
                }
                if let Some(count) = effects.get_mut(link.node.index()) {
                    *count += 1;
                }
                match link.label.as_str() {
                    "compaction_attempt" => {
                        attempts.insert(NodeId::new(i as u32));
                    }
                    "compaction" => {
                        accepted.insert(link.node);
                    }
                    _ => {}
                }
            }
        }
        stats.max_effects = effects.into_iter().max().unwrap_or(0);
        stats.compactions_accepted = attempts.intersection(&accepted).count() as u64;
        stats.compactions_refused = attempts.difference(&accepted).count() as u64;
        stats.loops = self
            .causal()
            .loops(&EdgeFilter::all())
            .iter()
            .map(|found| found.nodes.len() as u64)
            .collect();
        stats.loops.sort_unstable_by(|a, b| b.cmp(a));
    }

    fn count_calls(&self, stats: &mut Stats) {
        let mut per_request: HashMap<&str, u64> = HashMap::new();
        let (mut cached, mut input) = (0i64, 0i64);
        for call in &self.calls {
            let reason = call.finish_reason.map_or("none", |reason| reason.as_str());
            *stats.calls.entry(reason).or_default() += 1;
            stats.failed_calls += u64::from(call.error.is_some());
            if let Some(request_id) = call.request_id() {
                *per_request.entry(request_id.as_str()).or_default() += 1;
            }
            if let Some(usage) = &call.usage {
                cached = cached.saturating_add(usage.cached_input_tokens.unwrap_or(0));
                input = input.saturating_add(usage.input_tokens());
            }
            stats.model_seconds += (call.time.end - call.time.start).max(0.0);
        }
        stats.retried_requests = per_request.values().filter(|count| **count > 1).count() as u64;
        stats.cached_share = (input > 0).then(|| cached as f64 / input as f64);
    }
}
