//! [`diff`]: how two traces differ.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;

use serde::Serialize;

use super::digest::{Digest, message_digest, tools_digest};
use crate::call::{ModelCall, Usage};
use crate::id::{EdgeType, NodeId};
use crate::message::{Message, Role};
use crate::trace::Trace;

/// Characters of text that a divergence shows.
const EXCERPT: usize = 60;

/// How two traces, *a* and *b*, differ. Empty for equal ones; times are not compared.
///
/// Nodes are matched by what leads to them: tools, then messages from the root on; among equal
/// siblings, the first with the first.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diff {
    /// Nodes without a match in *b*.
    pub only_a: Vec<NodeId>,
    /// Nodes without a match in *a*.
    pub only_b: Vec<NodeId>,
    /// Where conversations part: the first messages that differ.
    pub divergences: Vec<Divergence>,
    /// Matched nodes with different tokens.
    pub tokens: Vec<TokenChange>,
    /// Matched nodes with the same tokens and different log-probabilities.
    pub logprobs: Vec<LogprobChange>,
    /// Links of matched nodes that only *b* has.
    pub links_added: Vec<LinkChange>,
    /// Links of matched nodes that only *a* has.
    pub links_removed: Vec<LinkChange>,
    /// Matched nodes whose common links are in another order.
    pub links_reordered: Vec<(NodeId, NodeId)>,
    /// Matched nodes whose last calls differ.
    pub calls: Vec<CallChange>,
    /// Matched leaves that are a training sample in one trace only.
    pub trainable: Vec<TrainableChange>,
    /// Counts that differ.
    pub counts: Vec<CountChange>,
}

/// Where conversations part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// The last common node in *a*; none if even the roots differ.
    pub parent_a: Option<NodeId>,
    /// The last common node in *b*.
    pub parent_b: Option<NodeId>,
    /// What follows in *a*.
    pub a: Option<Side>,
    /// What follows in *b*.
    pub b: Option<Side>,
    /// The first thing that differs: `role`, `content`, `tools`, …; none if one side ends.
    pub field: Option<&'static str>,
}

/// One side of a divergence.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Side {
    /// The node.
    pub node: NodeId,
    /// Who speaks.
    pub role: &'static str,
    /// The beginning of the message.
    pub excerpt: String,
}

/// Matched nodes with different tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenChange {
    /// In *a*.
    pub a: NodeId,
    /// In *b*.
    pub b: NodeId,
    /// The first position, among the node's tokens, that differs in id or in being sampled.
    pub first_index: usize,
}

/// Matched nodes with different log-probabilities.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LogprobChange {
    /// In *a*.
    pub a: NodeId,
    /// In *b*.
    pub b: NodeId,
    /// The largest absolute difference; infinite if one side has more values.
    pub max_difference: f64,
}

/// A link that only one trace has. Its source is a node of that trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkChange {
    /// The target in *a*.
    pub target_a: NodeId,
    /// The target in *b*.
    pub target_b: NodeId,
    /// The source, in the trace that has the link.
    pub source: NodeId,
    /// The kind of cause.
    pub label: EdgeType,
}

/// Matched nodes whose last calls differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallChange {
    /// In *a*.
    pub a: NodeId,
    /// In *b*.
    pub b: NodeId,
    /// What differs: `call` (one has none), `usage`, `finish_reason`, `error`, `model`.
    pub fields: Vec<&'static str>,
}

/// Matched leaves that are a training sample in one trace only.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainableChange {
    /// In *a*.
    pub a: NodeId,
    /// In *b*.
    pub b: NodeId,
    /// Whether it is one in *a*.
    pub in_a: bool,
    /// Whether it is one in *b*.
    pub in_b: bool,
}

/// A count that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CountChange {
    /// What is counted.
    pub name: &'static str,
    /// In *a*.
    pub a: i64,
    /// In *b*.
    pub b: i64,
}

impl Diff {
    /// Whether nothing differs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The difference seen from the other side.
    #[must_use]
    pub fn mirrored(self) -> Self {
        let swap_links = |links: Vec<LinkChange>| {
            by(
                links
                    .into_iter()
                    .map(|link| LinkChange {
                        target_a: link.target_b,
                        target_b: link.target_a,
                        ..link
                    })
                    .collect(),
                |link| link.target_a,
            )
        };
        let swap_divergence = |d: Divergence| Divergence {
            parent_a: d.parent_b,
            parent_b: d.parent_a,
            a: d.b,
            b: d.a,
            field: d.field,
        };
        let swap_tokens = |t: TokenChange| TokenChange { a: t.b, b: t.a, ..t };
        let swap_logprobs = |l: LogprobChange| LogprobChange { a: l.b, b: l.a, ..l };
        let swap_call = |c: CallChange| CallChange { a: c.b, b: c.a, ..c };
        let swap_trainable = |t: TrainableChange| TrainableChange {
            a: t.b,
            b: t.a,
            in_a: t.in_b,
            in_b: t.in_a,
        };
        let swap_count = |c: CountChange| CountChange { a: c.b, b: c.a, ..c };
        Self {
            only_a: self.only_b,
            only_b: self.only_a,
            divergences: by(self.divergences.into_iter().map(swap_divergence).collect(), |d| {
                d.parent_a
            }),
            tokens: by(self.tokens.into_iter().map(swap_tokens).collect(), |t| t.a),
            logprobs: by(self.logprobs.into_iter().map(swap_logprobs).collect(), |l| l.a),
            links_added: swap_links(self.links_removed),
            links_removed: swap_links(self.links_added),
            links_reordered: by(
                self.links_reordered.into_iter().map(|(a, b)| (b, a)).collect(),
                |pair| pair.0,
            ),
            calls: by(self.calls.into_iter().map(swap_call).collect(), |c| c.a),
            trainable: by(self.trainable.into_iter().map(swap_trainable).collect(), |t| t.a),
            counts: self.counts.into_iter().map(swap_count).collect(),
        }
    }
}

/// Sorts by a node of *a*, which is the order that [`diff`] gives.
fn by<T, K: Ord>(mut list: Vec<T>, key: impl Fn(&T) -> K) -> Vec<T> {
    list.sort_by_key(key);
    list
}

impl fmt::Display for Diff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return writeln!(f, "no differences");
        }
        for count in &self.counts {
            writeln!(f, "{}: {} -> {}", count.name, count.a, count.b)?;
        }
        for divergence in &self.divergences {
            match divergence.parent_a {
                Some(parent) => write!(f, "after node {parent}")?,
                None => write!(f, "from the start")?,
            }
            writeln!(f, " ({}):", divergence.field.unwrap_or("only one side goes on"))?;
            for (sign, side) in [('-', &divergence.a), ('+', &divergence.b)] {
                if let Some(side) = side {
                    writeln!(f, "  {sign} {} {}: {}", side.node, side.role, side.excerpt)?;
                }
            }
        }
        for change in &self.tokens {
            writeln!(
                f,
                "tokens of {} and {} differ from position {}",
                change.a, change.b, change.first_index
            )?;
        }
        for change in &self.logprobs {
            writeln!(
                f,
                "log-probabilities of {} and {} differ by up to {}",
                change.a, change.b, change.max_difference
            )?;
        }
        for (sign, links) in [('-', &self.links_removed), ('+', &self.links_added)] {
            for link in links {
                let target = if sign == '-' { link.target_a } else { link.target_b };
                writeln!(f, "{sign} link {} -> {target} ({})", link.source, link.label)?;
            }
        }
        for (a, b) in &self.links_reordered {
            writeln!(f, "links of {a} and {b} are in another order")?;
        }
        for change in &self.calls {
            writeln!(
                f,
                "calls of {} and {} differ in {}",
                change.a,
                change.b,
                change.fields.join(", ")
            )?;
        }
        for change in &self.trainable {
            writeln!(
                f,
                "leaf {} / {} is a training sample: {} -> {}",
                change.a, change.b, change.in_a, change.in_b
            )?;
        }
        Ok(())
    }
}

/// A node's identity among its siblings; none for a message without one.
type Key = (Option<NodeId>, Option<Digest>, Option<Digest>);

fn keys(trace: &Trace) -> Vec<(Option<Digest>, Option<Digest>)> {
    trace
        .nodes()
        .iter()
        .map(|node| {
            let tools = node.parent.is_none().then(|| tools_digest(node.tools()));
            (tools, message_digest(&node.message).ok())
        })
        .collect()
}

/// Which node of `b` each node of `a` is, and the other way round.
struct Matching {
    to_b: Vec<Option<NodeId>>,
    to_a: Vec<Option<NodeId>>,
}

fn match_nodes(a: &Trace, b: &Trace) -> Matching {
    let mut waiting: HashMap<Key, VecDeque<NodeId>> = HashMap::new();
    for (i, (node, (tools, digest))) in a.nodes().iter().zip(keys(a)).enumerate() {
        if digest.is_some() {
            waiting
                .entry((node.parent, tools, digest))
                .or_default()
                .push_back(NodeId::new(i as u32));
        }
    }
    let mut to_b = vec![None; a.nodes().len()];
    let mut to_a: Vec<Option<NodeId>> = Vec::with_capacity(b.nodes().len());
    for (i, (node, (tools, digest))) in b.nodes().iter().zip(keys(b)).enumerate() {
        let parent = match node.parent {
            None => Some(None),
            Some(parent) => to_a[parent.index()].map(Some),
        };
        let found = parent
            .and_then(|parent| waiting.get_mut(&(parent, tools, digest)))
            .and_then(VecDeque::pop_front);
        if let Some(found) = found {
            to_b[found.index()] = Some(NodeId::new(i as u32));
        }
        to_a.push(found);
    }
    Matching { to_b, to_a }
}

/// Compares two traces. O(size of both).
#[must_use]
pub fn diff(a: &Trace, b: &Trace) -> Diff {
    let matching = match_nodes(a, b);
    let unmatched = |of: &[Option<NodeId>]| {
        of.iter()
            .enumerate()
            .filter(|(_, other)| other.is_none())
            .map(|(i, _)| NodeId::new(i as u32))
            .collect::<Vec<_>>()
    };
    let mut diff = Diff {
        only_a: unmatched(&matching.to_b),
        only_b: unmatched(&matching.to_a),
        ..Diff::default()
    };
    diff.divergences = divergences(a, b, &matching, &diff);
    for (i, other) in matching.to_b.iter().enumerate() {
        if let Some(other) = other {
            compare_nodes(a, b, NodeId::new(i as u32), *other, &matching, &mut diff);
        }
    }
    compare_counts(a, b, &mut diff);
    diff
}

fn divergences(a: &Trace, b: &Trace, matching: &Matching, diff: &Diff) -> Vec<Divergence> {
    // First messages that differ, by the last common node (in a), in order of appearance.
    let mut forks: Vec<(Option<NodeId>, Vec<NodeId>, Vec<NodeId>)> = Vec::new();
    let mut place: HashMap<Option<NodeId>, usize> = HashMap::new();
    let mut fork = |parent: Option<NodeId>| {
        *place.entry(parent).or_insert_with(|| {
            forks.push((parent, Vec::new(), Vec::new()));
            forks.len() - 1
        })
    };
    let mut found: Vec<(usize, bool, NodeId)> = Vec::new();
    for id in &diff.only_a {
        let parent = a.nodes()[id.index()].parent;
        if parent.is_none_or(|parent| matching.to_b[parent.index()].is_some()) {
            found.push((fork(parent), true, *id));
        }
    }
    for id in &diff.only_b {
        let parent = b.nodes()[id.index()].parent;
        match parent {
            None => found.push((fork(None), false, *id)),
            Some(parent) => {
                if let Some(in_a) = matching.to_a[parent.index()] {
                    found.push((fork(Some(in_a)), false, *id));
                }
            }
        }
    }
    for (at, in_a, id) in found {
        if in_a {
            forks[at].1.push(id);
        } else {
            forks[at].2.push(id);
        }
    }
    forks.sort_by_key(|(parent, _, _)| *parent);
    let mut divergences = Vec::new();
    for (parent, in_a, in_b) in forks {
        for i in 0..in_a.len().max(in_b.len()) {
            let (at_a, at_b) = (in_a.get(i).copied(), in_b.get(i).copied());
            divergences.push(Divergence {
                parent_a: parent,
                parent_b: parent.and_then(|parent| matching.to_b[parent.index()]),
                a: at_a.map(|id| side(a, id)),
                b: at_b.map(|id| side(b, id)),
                field: at_a.zip(at_b).map(|(at_a, at_b)| first_difference(a, b, at_a, at_b)),
            });
        }
    }
    divergences
}

fn side(trace: &Trace, id: NodeId) -> Side {
    let message = &trace.nodes()[id.index()].message;
    let text = message.text();
    let mut excerpt: String = text
        .chars()
        .take(EXCERPT)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.chars().nth(EXCERPT).is_some() {
        excerpt.push('…');
    }
    Side {
        node: id,
        role: message.role().as_str(),
        excerpt,
    }
}

fn first_difference(a: &Trace, b: &Trace, at_a: NodeId, at_b: NodeId) -> &'static str {
    let (a, b) = (&a.nodes()[at_a.index()], &b.nodes()[at_b.index()]);
    if a.message.role() != b.message.role() {
        return "role";
    }
    let same = message_digest(&a.message) == message_digest(&b.message);
    if same {
        // Equal messages are apart only because of their tools, or because one is there twice.
        return if a.tools() == b.tools() { "repetition" } else { "tools" };
    }
    match (&*a.message, &*b.message) {
        (Message::Assistant(a), Message::Assistant(b)) => {
            if a.content.as_deref().unwrap_or_default() != b.content.as_deref().unwrap_or_default() {
                "content"
            } else if a.reasoning_content != b.reasoning_content {
                "reasoning_content"
            } else if a.tool_calls.as_deref().unwrap_or_default() != b.tool_calls.as_deref().unwrap_or_default() {
                "tool_calls"
            } else {
                "provider_state"
            }
        }
        (Message::Tool(a), Message::Tool(b)) if a.tool_call_id != b.tool_call_id => "tool_call_id",
        _ => "content",
    }
}

fn compare_nodes(a: &Trace, b: &Trace, at_a: NodeId, at_b: NodeId, matching: &Matching, diff: &mut Diff) {
    let (node_a, node_b) = (&a.nodes()[at_a.index()], &b.nodes()[at_b.index()]);
    let (tokens_a, tokens_b) = (node_a.tokens(), node_b.tokens());
    if tokens_a.token_ids != tokens_b.token_ids || tokens_a.mask != tokens_b.mask {
        let same = |i: &usize| {
            tokens_a.token_ids.get(*i) == tokens_b.token_ids.get(*i) && tokens_a.mask.get(*i) == tokens_b.mask.get(*i)
        };
        let len = tokens_a.token_ids.len().max(tokens_b.token_ids.len());
        diff.tokens.push(TokenChange {
            a: at_a,
            b: at_b,
            first_index: (0..len).find(|i| !same(i)).unwrap_or(len),
        });
    } else {
        let max_difference = largest_difference(&tokens_a.logprobs, &tokens_b.logprobs);
        if max_difference > 0.0 {
            diff.logprobs.push(LogprobChange {
                a: at_a,
                b: at_b,
                max_difference,
            });
        }
    }
    compare_links(a, b, at_a, at_b, matching, diff);
    let fields = call_differences(
        a.derived().last_call(at_a).map(|call| &a.calls()[call]),
        b.derived().last_call(at_b).map(|call| &b.calls()[call]),
    );
    if !fields.is_empty() {
        diff.calls.push(CallChange {
            a: at_a,
            b: at_b,
            fields,
        });
    }
    let is_leaf = |trace: &Trace, id| trace.derived().children(id).next().is_none();
    let (in_a, in_b) = (a.derived().is_trainable(at_a), b.derived().is_trainable(at_b));
    if in_a != in_b && is_leaf(a, at_a) && is_leaf(b, at_b) {
        diff.trainable.push(TrainableChange {
            a: at_a,
            b: at_b,
            in_a,
            in_b,
        });
    }
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    a.iter()
        .zip(b)
        .map(|(a, b)| {
            if a == b || (a.is_nan() && b.is_nan()) {
                0.0
            } else if a.is_nan() || b.is_nan() {
                f64::INFINITY
            } else {
                (a - b).abs()
            }
        })
        .fold(0.0, f64::max)
}

fn compare_links(a: &Trace, b: &Trace, at_a: NodeId, at_b: NodeId, matching: &Matching, diff: &mut Diff) {
    let links_a = &a.nodes()[at_a.index()].semantic_parents;
    let links_b = &b.nodes()[at_b.index()].semantic_parents;
    // Both in terms of b's nodes.
    let in_b: Vec<(NodeId, &EdgeType)> = links_b.iter().map(|l| (l.node, &l.label)).collect();
    let of_a: Vec<Option<(NodeId, &EdgeType)>> = links_a
        .iter()
        .map(|link| Some((matching.to_b[link.node.index()]?, &link.label)))
        .collect();
    let set_b: HashSet<_> = in_b.iter().collect();
    let set_a: HashSet<_> = of_a.iter().flatten().collect();
    let change = |source, label: &EdgeType| LinkChange {
        target_a: at_a,
        target_b: at_b,
        source,
        label: label.clone(),
    };
    for (link, translated) in links_a.iter().zip(&of_a) {
        if translated.as_ref().is_none_or(|link| !set_b.contains(link)) {
            diff.links_removed.push(change(link.node, &link.label));
        }
    }
    for link in &in_b {
        if !set_a.contains(link) {
            diff.links_added.push(change(link.0, link.1));
        }
    }
    let common_a = of_a.iter().flatten().filter(|link| set_b.contains(link));
    let common_b = in_b.iter().filter(|link| set_a.contains(link));
    if !common_a.eq(common_b) {
        diff.links_reordered.push((at_a, at_b));
    }
}

fn call_differences(a: Option<&ModelCall>, b: Option<&ModelCall>) -> Vec<&'static str> {
    let (a, b) = match (a, b) {
        (None, None) => return Vec::new(),
        (Some(a), Some(b)) => (a, b),
        _ => return vec!["call"],
    };
    let mut fields = Vec::new();
    if a.model != b.model {
        fields.push("model");
    }
    if a.usage != b.usage {
        fields.push("usage");
    }
    if a.finish_reason != b.finish_reason {
        fields.push("finish_reason");
    }
    if a.error != b.error {
        fields.push("error");
    }
    fields
}

fn compare_counts(a: &Trace, b: &Trace, diff: &mut Diff) {
    let roles =
        |trace: &Trace, role: Role| trace.nodes().iter().filter(|node| node.message.role() == role).count() as i64;
    let failed = |trace: &Trace| trace.calls().iter().filter(|c| c.error.is_some()).count() as i64;
    let completions = |trace: &Trace| trace.usage().map_or(0, |usage: Usage| usage.completion_tokens);
    let trainable = |trace: &Trace| trace.branches().filter(|b| b.is_trainable()).count() as i64;
    let counts: [(&'static str, i64, i64); 12] = [
        ("nodes", a.nodes().len() as i64, b.nodes().len() as i64),
        ("calls", a.calls().len() as i64, b.calls().len() as i64),
        ("failed calls", failed(a), failed(b)),
        ("turns", a.num_turns() as i64, b.num_turns() as i64),
        ("branches", a.num_branches() as i64, b.num_branches() as i64),
        ("training samples", trainable(a), trainable(b)),
        ("tool results", roles(a, Role::Tool), roles(b, Role::Tool)),
        ("links", a.causal().num_links() as i64, b.causal().num_links() as i64),
        ("input tokens", a.num_input_tokens(), b.num_input_tokens()),
        ("output tokens", a.num_output_tokens(), b.num_output_tokens()),
        ("total tokens", a.num_total_tokens(), b.num_total_tokens()),
        ("completion tokens", completions(a), completions(b)),
    ];
    for (name, a, b) in counts {
        if a != b {
            diff.counts.push(CountChange { name, a, b });
        }
    }
}
