//! Applying edge sets, against a plain model of the rules.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use proptest::prelude::*;
use semantic_graph::{
    EdgeFeed, EdgeType, Message, MessageNode, ModelCall, NodeId, RequestId, SemanticEdge, SemanticEdgeSet, Trace, json,
};

const NAMES: usize = 8;

/// Harnesses that publish side by side: more than a trace remembers the sets of.
const HARNESSES: usize = 6;
const LABELS: [&str; 4] = ["continuation", "compaction", "x", "compaction_attempt"];

fn request(i: usize) -> RequestId {
    RequestId::new(&format!("r{i}")).unwrap()
}

fn edge(source: usize, target: usize, label: usize) -> SemanticEdge {
    SemanticEdge::new(request(source), request(target), EdgeType::new(LABELS[label]).unwrap()).unwrap()
}

/// Nodes by turns unsampled and sampled, each a root.
fn add_nodes(trace: &mut Trace, count: usize) {
    for i in 0..count {
        let mut node = MessageNode::new(None, Message::assistant(&format!("m{i}")));
        node.sampled = !trace.nodes().len().is_multiple_of(4);
        trace.push_node(node).unwrap();
    }
}

/// A trace whose requests 0..n each have a turn of their own.
fn committed(n: usize) -> Trace {
    let mut trace = Trace::new("t");
    for i in 0..n {
        let mut node = MessageNode::new(None, Message::assistant(&format!("m{i}")));
        node.sampled = true;
        let id = trace.push_node(node).unwrap();
        trace.push_call(ModelCall::committed(id).with_request_id(request(i)));
    }
    trace
}

/// The rules, without any memory: the links on each node afterwards, or the refusal's name.
fn model(trace: &Trace, set: &[SemanticEdge]) -> Result<Vec<Vec<(u32, String)>>, &'static str> {
    let mut bound = std::collections::HashMap::new();
    for call in trace.calls() {
        let (Some(name), Some(node)) = (call.request_id(), call.node) else {
            continue;
        };
        if node < 0 || node as usize >= trace.nodes().len() {
            return Err("invalid_message_node");
        }
        if !trace.nodes()[node as usize].sampled {
            return Err("not_sampled");
        }
        bound.insert(name.clone(), node as u32);
    }
    let mut links: Vec<Vec<(u32, String)>> = trace
        .nodes()
        .iter()
        .map(|node| {
            node.semantic_parents
                .iter()
                .map(|link| (link.node.get(), link.label.to_string()))
                .collect()
        })
        .collect();
    let mut seen = Vec::new();
    for edge in set {
        let source = *bound.get(edge.source()).ok_or("uncommitted_request")?;
        let target = *bound.get(edge.target()).ok_or("uncommitted_request")?;
        if source == target {
            return Err("resolved_self_edge");
        }
        let resolved = (target, source, edge.label().to_string());
        if seen.contains(&resolved) {
            return Err("duplicate_resolved_edge");
        }
        let link = (source, edge.label().to_string());
        if !links[target as usize].contains(&link) {
            links[target as usize].push(link);
        }
        seen.push(resolved);
    }
    Ok(links)
}

fn links(trace: &Trace) -> Vec<Vec<(u32, String)>> {
    trace
        .nodes()
        .iter()
        .map(|node| {
            node.semantic_parents
                .iter()
                .map(|link| (link.node.get(), link.label.to_string()))
                .collect()
        })
        .collect()
}

fn distinct_edges(max: usize) -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
    prop::collection::vec((0..NAMES, 0..NAMES, 0..LABELS.len()), 0..max).prop_map(|list| {
        let mut kept: Vec<(usize, usize, usize)> = Vec::new();
        for (source, target, label) in list {
            if source != target && !kept.contains(&(source, target, label)) {
                kept.push((source, target, label));
            }
        }
        kept
    })
}

#[derive(Clone, Debug)]
enum Step {
    Nodes(usize),
    Call { name: usize, node: i64 },
    Failed { name: usize },
    Extend(usize, Vec<(usize, usize, usize)>),
    Fresh(Vec<(usize, usize, usize)>),
    Prefix(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (1..4usize).prop_map(Step::Nodes),
        1 => (0..NAMES, 0..14i64).prop_map(|(name, node)| Step::Call { name, node }),
        // Nodes that were sampled.
        4 => (0..NAMES, 0..3i64, 1..4i64).prop_map(|(name, four, one)| Step::Call { name, node: 4 * four + one }),
        1 => (0..NAMES).prop_map(|name| Step::Failed { name }),
        8 => (0..HARNESSES, distinct_edges(4)).prop_map(|(harness, list)| Step::Extend(harness, list)),
        2 => distinct_edges(8).prop_map(Step::Fresh),
        1 => (0..HARNESSES, 0..20usize).prop_map(|(harness, len)| Step::Prefix(harness, len)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever was applied before, and however: the result is what the plain rules give.
    #[test]
    fn every_history_ends_as_the_rules_say(steps in prop::collection::vec(step(), 1..40)) {
        let mut trace = Trace::new("t");
        add_nodes(&mut trace, 12);
        for name in 0..NAMES - 1 {
            let node = [1, 2, 3, 5, 6, 7, 9][name];
            trace.push_call(ModelCall::committed(NodeId::new(node)).with_request_id(request(name)));
        }
        let mut growing: Vec<SemanticEdgeSet> = (0..HARNESSES).map(|_| SemanticEdgeSet::new()).collect();
        for step in steps {
            let set: SemanticEdgeSet = match step {
                Step::Nodes(count) => {
                    add_nodes(&mut trace, count);
                    continue;
                }
                Step::Call { name, node } => {
                    // Now and then a node that does not exist, or was not sampled.
                    trace.push_call(ModelCall {
                        node: Some(node),
                        ..ModelCall::default()
                    }.with_request_id(request(name)));
                    if model(&trace, &[]).is_err() {
                        let expected = model(&trace, growing[0].edges()).unwrap_err();
                        let before = trace.clone();
                        let error = trace.add_semantic_edges(&growing[0]).unwrap_err();
                        prop_assert_eq!(error.code(), expected);
                        prop_assert!(trace == before);
                        if node < trace.nodes().len() as i64 {
                            trace.calls_mut().pop();
                        } else {
                            // It becomes valid later, or never.
                            let len = node as usize + 2 - trace.nodes().len();
                            add_nodes(&mut trace, len);
                            if model(&trace, &[]).is_err() {
                                trace.calls_mut().pop();
                            }
                        }
                    }
                    continue;
                }
                Step::Failed { name } => {
                    trace.push_call(ModelCall::default().with_request_id(request(name)));
                    continue;
                }
                Step::Extend(harness, list) => {
                    let growing = &mut growing[harness];
                    for (source, target, label) in list {
                        // What would be refused is published once, and not again.
                        let mut tried = growing.edges().to_vec();
                        tried.push(edge(source, target, label));
                        let Ok(set) = SemanticEdgeSet::from_edges(tried) else {
                            continue;
                        };
                        if let Err(expected) = model(&trace, set.edges()) {
                            let before = trace.clone();
                            prop_assert_eq!(trace.add_semantic_edges(&set).unwrap_err().code(), expected);
                            prop_assert!(trace == before);
                        } else {
                            growing.push(edge(source, target, label)).unwrap();
                        }
                    }
                    let expected = model(&trace, growing.edges());
                    let before = trace.clone();
                    match (trace.add_semantic_edges(growing), expected) {
                        (Ok(_), Ok(expected)) => prop_assert_eq!(links(&trace), expected),
                        (Err(error), Err(expected)) => {
                            prop_assert_eq!(error.code(), expected);
                            prop_assert!(trace == before);
                        }
                        (found, expected) => prop_assert!(false, "{found:?} {expected:?}"),
                    }
                    continue;
                }
                Step::Fresh(list) => SemanticEdgeSet::from_edges(
                    list.into_iter().map(|(s, t, l)| edge(s, t, l)).collect(),
                ).unwrap(),
                Step::Prefix(harness, len) => SemanticEdgeSet::from_edges(
                    growing[harness].edges().iter().take(len).cloned().collect(),
                ).unwrap(),
            };
            let expected = model(&trace, set.edges());
            let before = trace.clone();
            match (trace.add_semantic_edges(&set), expected) {
                (Ok(added), Ok(expected)) => {
                    prop_assert_eq!(links(&trace), expected);
                    let count = |trace: &Trace| links(trace).iter().map(Vec::len).sum::<usize>();
                    prop_assert_eq!(added.len(), count(&trace) - count(&before));
                }
                (Err(error), Err(expected)) => {
                    prop_assert_eq!(error.code(), expected);
                    prop_assert!(trace == before);
                }
                (found, expected) => prop_assert!(false, "{found:?} {expected:?}"),
            }
        }
    }

    /// Replaying any sequence of beginnings gives the graph of the final set, however the sets
    /// arrive.
    #[test]
    fn replaying_beginnings_equals_applying_the_whole_once(
        list in distinct_edges(40),
        cuts in prop::collection::vec(0..41usize, 0..10),
    ) {
        let all: Vec<SemanticEdge> = list.iter().map(|(s, t, l)| edge(*s, *t, *l)).collect();
        let whole = SemanticEdgeSet::from_edges(all.clone()).unwrap();
        let mut once = committed(NAMES);
        once.add_semantic_edges(&whole).unwrap();

        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(all.len())).collect();
        cuts.sort_unstable();
        cuts.push(all.len());

        let mut anew = committed(NAMES);
        let mut grown = committed(NAMES);
        let mut fed = committed(NAMES);
        for i in 0..NAMES {
            for trace in [&mut anew, &mut grown, &mut fed] {
                let time = once.nodes()[i].timestamp;
                trace.node_mut(NodeId::new(i as u32)).unwrap().timestamp = time;
            }
        }
        let mut set = SemanticEdgeSet::new();
        let mut feed = EdgeFeed::new();
        for cut in cuts {
            let part = SemanticEdgeSet::from_edges(all[..cut].to_vec()).unwrap();
            anew.add_semantic_edges(&part).unwrap();
            for edge in &all[set.len()..cut] {
                set.push(edge.clone()).unwrap();
            }
            grown.add_semantic_edges(&set).unwrap();
            let text = json::to_string(&part).unwrap();
            fed.add_semantic_edges(feed.read(text.as_bytes()).unwrap()).unwrap();
        }
        prop_assert!(anew == once);
        prop_assert!(grown == once);
        prop_assert!(fed == once);
        // And again, in another order, changes nothing.
        let mut reversed = all;
        reversed.reverse();
        let reversed = SemanticEdgeSet::from_edges(reversed).unwrap();
        prop_assert_eq!(once.add_semantic_edges(&reversed).unwrap(), vec![]);
    }

    /// A feed and a fresh parse agree on every text, valid or not.
    #[test]
    fn a_feed_never_disagrees_with_a_fresh_parse(
        texts in prop::collection::vec((distinct_edges(6), 0..40usize, any::<bool>()), 1..6),
    ) {
        let mut feed = EdgeFeed::new();
        let mut accepted = SemanticEdgeSet::new();
        let mut before: Vec<(usize, usize, usize)> = Vec::new();
        for (list, cut, damage) in texts {
            before.extend(list);
            let edges: Vec<String> = before
                .iter()
                .map(|(s, t, l)| json::to_string(&edge(*s, *t, *l)).unwrap())
                .collect();
            let mut text = format!("{{\"edges\":[{}]}}", edges.join(","));
            if damage {
                let keep = text.len().saturating_sub(cut);
                text.truncate(keep);
            }
            match (feed.read(text.as_bytes()), json::from_str::<SemanticEdgeSet>(&text)) {
                (Ok(a), Ok(b)) => {
                    prop_assert_eq!(a, &b);
                    accepted = b;
                }
                (Err(a), Err(b)) => prop_assert_eq!(a.code(), b.code()),
                (a, b) => prop_assert!(false, "{a:?} {b:?}"),
            }
            prop_assert_eq!(feed.set(), &accepted);
        }
    }
}

#[test]
fn a_target_with_very_many_causes_keeps_them_apart() {
    let mut trace = committed(200);
    let set = |from: usize, to: usize| {
        let mut edges = Vec::new();
        for source in from..to {
            for label in ["a", "b"] {
                let label = EdgeType::new(label).unwrap();
                edges.push(SemanticEdge::new(request(source), request(0), label).unwrap());
            }
        }
        SemanticEdgeSet::from_edges(edges).unwrap()
    };
    assert_eq!(trace.add_semantic_edges(&set(1, 100)).unwrap().len(), 198);
    assert_eq!(trace.add_semantic_edges(&set(50, 200)).unwrap().len(), 200);
    assert_eq!(trace.add_semantic_edges(&set(1, 200)).unwrap().len(), 0);
    assert_eq!(trace.nodes()[0].semantic_parents.len(), 398);
}
