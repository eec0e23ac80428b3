//! Questions about causes, against answers that are slow and obvious.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::needless_range_loop, reason = "both indexes of a matrix")]

use std::collections::BTreeSet;

use proptest::prelude::*;
use semantic_graph::{
    Cause, EdgeFilter, EdgeType, Message, MessageNode, ModelCall, NodeId, ParentLink, RequestId, Trace,
};

fn node(i: usize) -> NodeId {
    NodeId::new(i as u32)
}

#[derive(Clone, Debug)]
struct Graph {
    parents: Vec<Option<usize>>,
    links: Vec<(usize, usize, usize)>,
}

const LABELS: [&str; 3] = ["a", "b", "c"];

fn graph() -> impl Strategy<Value = Graph> {
    (1..14usize).prop_flat_map(|n| {
        let parents = (0..n)
            .map(|i| {
                if i == 0 {
                    Just(None).boxed()
                } else {
                    prop::option::of(0..i).boxed()
                }
            })
            .collect::<Vec<_>>();
        let links = prop::collection::vec((0..n, 0..n, 0..3usize), 0..24);
        (parents, links).prop_map(|(parents, links)| Graph { parents, links })
    })
}

fn build(graph: &Graph) -> Trace {
    let mut trace = Trace::new("t");
    for parent in &graph.parents {
        let mut new = MessageNode::new(parent.map(node), Message::assistant("x"));
        new.sampled = true;
        trace.push_node(new).unwrap();
    }
    for (source, target, label) in &graph.links {
        let link = ParentLink {
            node: node(*source),
            label: EdgeType::new(LABELS[*label]).unwrap(),
        };
        trace.node_mut(node(*target)).unwrap().semantic_parents.push(link);
    }
    trace
}

fn filters() -> Vec<EdgeFilter> {
    let a = EdgeType::new("a").unwrap();
    let c = EdgeType::new("c").unwrap();
    vec![
        EdgeFilter::all(),
        EdgeFilter::all().with_physical(),
        EdgeFilter::only([a.clone(), c]),
        EdgeFilter::except([a]).with_physical(),
        EdgeFilter::only([]),
    ]
}

/// All pairs that at least one edge connects, directly or not.
fn reachable(graph: &Graph, filter: &EdgeFilter) -> Vec<Vec<bool>> {
    let n = graph.parents.len();
    let mut reach = vec![vec![false; n]; n];
    for (source, target, label) in &graph.links {
        if filter.follows(&EdgeType::new(LABELS[*label]).unwrap()) {
            reach[*source][*target] = true;
        }
    }
    if filter.follows_physical() {
        for (i, parent) in graph.parents.iter().enumerate() {
            if let Some(parent) = parent {
                reach[*parent][i] = true;
            }
        }
    }
    for k in 0..n {
        for i in 0..n {
            for j in 0..n {
                reach[i][j] |= reach[i][k] && reach[k][j];
            }
        }
    }
    reach
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn ancestors_descendants_components_and_order_are_right(graph in graph()) {
        let trace = build(&graph);
        let causal = trace.causal();
        let n = graph.parents.len();
        for filter in filters() {
            let reach = reachable(&graph, &filter);
            let components = causal.components(&filter);
            for i in 0..n {
                let up: Vec<NodeId> = (0..n).filter(|j| reach[*j][i]).map(node).collect();
                let down: Vec<NodeId> = (0..n).filter(|j| reach[i][*j]).map(node).collect();
                prop_assert_eq!(causal.ancestors(node(i), &filter), up);
                prop_assert_eq!(causal.descendants(node(i), &filter), down);
                for j in 0..n {
                    prop_assert_eq!(causal.reaches(node(i), node(j), &filter), reach[i][j]);
                    let together = i == j || (reach[i][j] && reach[j][i]);
                    let same = components.of(node(i)) == components.of(node(j));
                    prop_assert_eq!(same, together);
                }
            }
            // Numbered by smallest member.
            let smallest: Vec<NodeId> =
                (0..components.len()).map(|c| components.members(c)[0]).collect();
            prop_assert!(smallest.windows(2).all(|pair| pair[0] < pair[1]));

            let order = causal.causal_order(&filter);
            let flat: BTreeSet<NodeId> = order.iter().flatten().copied().collect();
            prop_assert_eq!(flat.len(), n);
            let mut place = vec![0; n];
            for (at, group) in order.iter().enumerate() {
                for member in group {
                    place[member.index()] = at;
                }
            }
            for i in 0..n {
                for j in 0..n {
                    if reach[i][j] && !reach[j][i] {
                        prop_assert!(place[i] < place[j]);
                    }
                }
            }
            let loops = causal.loops(&filter);
            let in_loops: usize = loops.iter().map(|found| found.nodes.len()).sum();
            let expected = (0..n)
                .filter(|i| (0..n).any(|j| j != *i && reach[*i][j] && reach[j][*i]))
                .count();
            prop_assert_eq!(in_loops, expected);
            for found in &loops {
                for edge in &found.edges {
                    prop_assert!(found.nodes.contains(&edge.source));
                    prop_assert!(found.nodes.contains(&edge.target));
                }
            }
        }
    }

    #[test]
    fn a_shortest_chain_is_a_chain_and_shortest(graph in graph()) {
        let trace = build(&graph);
        let causal = trace.causal();
        let filter = EdgeFilter::all().with_physical();
        let n = graph.parents.len();
        for i in 0..n {
            // Distances, step by step.
            let mut distance: Vec<Option<usize>> = vec![None; n];
            let mut front = vec![node(i)];
            for step in 1..=n {
                let mut next = Vec::new();
                for at in front {
                    for edge in causal.children(at, &filter) {
                        let slot = &mut distance[edge.target.index()];
                        if slot.is_none() {
                            *slot = Some(step);
                            next.push(edge.target);
                        }
                    }
                }
                front = next;
            }
            for (j, distance) in distance.iter().enumerate() {
                let chain = causal.why(node(i), node(j), &filter);
                prop_assert_eq!(chain.as_ref().map(Vec::len), *distance);
                if let Some(chain) = chain {
                    prop_assert_eq!(chain[0].source, node(i));
                    prop_assert_eq!(chain[chain.len() - 1].target, node(j));
                    prop_assert!(chain.windows(2).all(|pair| pair[0].target == pair[1].source));
                    for edge in &chain {
                        prop_assert!(causal.parents(edge.target, &filter).contains(edge));
                    }
                }
            }
        }
    }
}

#[test]
fn large_and_small_fronts_are_walked_alike() {
    // Fans, chains in both directions and shortcuts, with fronts far above and below the limit
    // where the walk changes its manner.
    let n = 5_000;
    let mut links = Vec::new();
    for i in 0..n - 1 {
        match i % 1_000 {
            0 => links.extend((1..400).map(|k| (i, (i + k * 7) % n, 0))),
            k if k < 500 => links.push((i, i + 1, 1)),
            k => links.push((i + 1, (i + 3 * k) % n, 0)),
        }
        if i % 3 == 0 {
            links.push((n - 1 - i, (n + 20 - i) % n, 2));
        }
    }
    let trace = build(&Graph {
        parents: vec![None; n],
        links: links.clone(),
    });
    let mut forward = vec![Vec::new(); n];
    let mut backward = vec![Vec::new(); n];
    for (source, target, _) in links {
        forward[source].push(target);
        backward[target].push(source);
    }
    let plain = |next: &[Vec<usize>], from: usize| {
        let mut seen = BTreeSet::new();
        let mut pending = vec![from];
        while let Some(at) = pending.pop() {
            for other in &next[at] {
                if seen.insert(node(*other)) {
                    pending.push(*other);
                }
            }
        }
        seen.into_iter().collect::<Vec<_>>()
    };
    let all = EdgeFilter::all();
    for from in (0..n).step_by(97) {
        assert_eq!(trace.causal().ancestors(node(from), &all), plain(&backward, from));
        assert_eq!(trace.causal().descendants(node(from), &all), plain(&forward, from));
    }
}

#[test]
fn ties_go_to_the_smaller_nodes() {
    let trace = build(&Graph {
        parents: vec![None; 4],
        links: vec![(0, 2, 0), (0, 1, 1), (2, 3, 0), (1, 3, 1)],
    });
    let chain = trace.causal().why(node(0), node(3), &EdgeFilter::all()).unwrap();
    assert_eq!(chain[0].target, node(1));
    assert_eq!(chain[0].cause, Cause::Semantic(EdgeType::new("b").unwrap()));
    assert_eq!(trace.causal().why(node(3), node(0), &EdgeFilter::all()), None);
}

#[test]
fn a_turn_tells_what_it_depended_on_by_request() {
    let mut trace = build(&Graph {
        parents: vec![None, None, None, None],
        links: vec![(0, 1, 0), (1, 2, 1), (2, 1, 0), (3, 0, 2)],
    });
    let request = |i: usize| RequestId::new(&format!("r{i}")).unwrap();
    for i in 0..4 {
        trace.push_call(ModelCall::committed(node(i)).with_request_id(request(i)));
    }
    let all = EdgeFilter::all();
    let names = |list: Option<Vec<RequestId>>| list.unwrap().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(names(trace.depended_on(&request(2), &all)), ["r0", "r1", "r2", "r3"]);
    assert_eq!(names(trace.depended_on(&request(0), &all)), ["r3"]);
    assert_eq!(names(trace.led_to(&request(0), &all)), ["r1", "r2"]);
    let no_c = EdgeFilter::except([EdgeType::new("c").unwrap()]);
    assert_eq!(names(trace.depended_on(&request(0), &no_c)), [""; 0]);
    assert_eq!(trace.depended_on(&RequestId::new("other").unwrap(), &all), None);
    let why = trace.why(&request(3), &request(2), &all).unwrap();
    assert_eq!(why.iter().map(|edge| edge.label()).collect::<Vec<_>>(), ["c", "a", "b"]);
    // The link from 2 to 1 runs against creation.
    let backward = trace.causal().backward_links();
    assert_eq!(backward.len(), 2);
    assert!(backward.iter().all(|edge| edge.source > edge.target));
}

#[test]
fn a_very_long_chain_and_loop_need_no_stack() {
    let n = 200_000;
    let mut trace = Trace::new("t");
    let message = std::sync::Arc::new(Message::user("x"));
    let label = EdgeType::continuation();
    let mut parent = None;
    for i in 0..n {
        let mut new = MessageNode::new(parent, std::sync::Arc::clone(&message));
        if i > 0 {
            new.semantic_parents.push(ParentLink {
                node: node(i - 1),
                label: label.clone(),
            });
        }
        parent = Some(trace.push_node(new).unwrap());
    }
    let all = EdgeFilter::all();
    assert_eq!(trace.causal().ancestors(node(n - 1), &all).len(), n - 1);
    assert_eq!(trace.causal().components(&all).len(), n);
    assert_eq!(trace.causal().why(node(0), node(n - 1), &all).unwrap().len(), n - 1);
    trace.node_mut(node(0)).unwrap().semantic_parents.push(ParentLink {
        node: node(n - 1),
        label,
    });
    assert_eq!(trace.causal().components(&all).len(), 1);
    assert_eq!(trace.causal().causal_order(&all).len(), 1);
    assert_eq!(trace.num_branches(), 1);
}
