//! Pictures contain everything, and nothing breaks out of them.
#![cfg(all(feature = "render", feature = "hash"))]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/agents.rs"]
mod agents;

use std::collections::HashMap;

use semantic_graph::render::{Format, MAX_EDGES, MAX_TEXT, RenderOptions, render_trace};
use semantic_graph::{EdgeFilter, EdgeType, Message, MessageNode, NodeId, ParentLink, Trace};

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

fn links(trace: &Trace) -> usize {
    trace.nodes().iter().map(|node| node.semantic_parents.len()).sum()
}

fn physical(trace: &Trace) -> usize {
    trace.nodes().iter().filter(|node| node.parent.is_some()).count()
}

#[test]
fn the_page_of_five_thousand_messages_contains_every_message_and_edge() {
    let run = agents::run(5000);
    let trace = &run.trace;
    assert!(trace.nodes().len() >= 5000);
    assert!(links(trace) > 2500);
    for format in [Format::Html, Format::Svg] {
        let page = render_trace(trace, format, &RenderOptions::default());
        assert_eq!(count(&page, "<path class=\"l l"), links(trace));
        assert_eq!(count(&page, "<path class=\"p"), physical(trace));
        assert_eq!(count(&page, "<g class=\"n "), trace.nodes().len());
        let mut drawn: HashMap<(u32, u32), usize> = HashMap::new();
        for line in page.lines().filter(|line| line.starts_with("<path class=\"l l")) {
            let number = |key: &str| -> u32 {
                let from = line.find(key).unwrap() + key.len();
                line[from..].split('"').next().unwrap().parse().unwrap()
            };
            *drawn.entry((number("data-s=\""), number("data-t=\""))).or_default() += 1;
        }
        for (i, node) in trace.nodes().iter().enumerate() {
            for link in &node.semantic_parents {
                let left = drawn.get_mut(&(link.node.get(), i as u32)).unwrap();
                *left = left.checked_sub(1).unwrap();
            }
        }
        assert!(drawn.values().all(|left| *left == 0));
    }
}

#[test]
fn the_page_needs_no_network_and_has_details_and_a_legend() {
    let run = agents::run(300);
    let page = render_trace(&run.trace, Format::Html, &RenderOptions::default());
    let addresses = page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "");
    assert_eq!(count(&addresses, "http"), 0);
    assert!(page.contains("default-src 'none'"));
    for label in ["continuation", "subagent_call", "subagent_return"] {
        assert!(page.contains(&format!("</span>{label}</label>")), "{label}");
    }
    // Each message's text and tokens are there, with the log-probabilities of what was sampled.
    let sampled = run.trace.nodes().iter().position(|node| node.sampled).unwrap();
    let node = &run.trace.nodes()[sampled];
    assert!(page.contains(&*node.message.text()));
    let id = node.tokens().token_ids[node.tokens().token_ids.len() - 1];
    let logprob = node.tokens().logprobs.last().unwrap();
    assert!(page.contains(&format!("*{id}({logprob:.2})")));
}

#[test]
fn the_same_trace_gives_the_same_bytes() {
    let a = agents::run(200);
    let b = agents::run(200);
    for format in [Format::Svg, Format::Html, Format::Dot, Format::Mermaid] {
        let options = RenderOptions::default();
        assert_eq!(
            render_trace(&a.trace, format, &options),
            render_trace(&b.trace, format, &options)
        );
    }
}

fn hostile() -> Trace {
    let text = "</script><script>alert(1)</script> \"quoted\" \\ #;|`[x]{y}(z)<b>&amp;\n\u{1}\u{2028}";
    let mut trace = Trace::new(text);
    let mut node = MessageNode::new(None, Message::user(text));
    node.timestamp = 0.0;
    let root = trace.push_node(node).unwrap();
    let mut reply = MessageNode::new(Some(root), Message::assistant(text));
    reply.sampled = true;
    reply.semantic_parents = vec![ParentLink {
        node: root,
        label: EdgeType::new("a:b.c-d_e").unwrap(),
    }];
    trace.push_node(reply).unwrap();
    trace.node_mut(root).unwrap().semantic_parents = vec![ParentLink {
        node: NodeId::new(1),
        label: EdgeType::continuation(),
    }];
    trace
}

#[test]
fn text_cannot_break_out_of_a_picture() {
    let trace = hostile();
    let options = RenderOptions {
        excerpt: 500,
        ..RenderOptions::default()
    };
    let page = render_trace(&trace, Format::Html, &options);
    assert_eq!(count(&page, "<script>"), 1);
    assert_eq!(count(&page, "</script>"), 1);
    let svg = render_trace(&trace, Format::Svg, &options);
    assert!(!svg.contains("<script"));
    assert!(!svg.contains('\u{1}'));
    let dot = render_trace(&trace, Format::Dot, &options);
    for line in dot.lines() {
        let quotes = line.replace("\\\\", "").replace("\\\"", "").matches('"').count();
        assert!(quotes.is_multiple_of(2), "{line}");
    }
    let mermaid = render_trace(&trace, Format::Mermaid, &options);
    for line in mermaid.lines().filter(|line| line.contains("user")) {
        let inner = line.split_once('"').unwrap().1.rsplit_once('"').unwrap().0;
        assert!(!inner.contains(['"', '`', '|', '{', '(', '[', '\\']), "{inner}");
    }
}

#[test]
fn loops_are_marked() {
    let trace = hostile();
    let dot = render_trace(&trace, Format::Dot, &RenderOptions::default());
    assert_eq!(count(&dot, "color=\"#d00000\""), 2);
    let page = render_trace(&trace, Format::Html, &RenderOptions::default());
    assert!(page.contains("1 loops"));
    assert_eq!(page.lines().filter(|line| line.contains(" o\" data-s")).count(), 2);
}

#[test]
fn options_choose_what_is_drawn() {
    let run = agents::run(200);
    let trace = &run.trace;
    let dot = |options: RenderOptions| render_trace(trace, Format::Dot, &options);
    let nodes = |text: &str| text.lines().filter(|line| line.contains("shape=")).count();

    let full = dot(RenderOptions::default());
    assert_eq!(nodes(&full), trace.nodes().len());
    assert_eq!(count(&full, " -> "), physical(trace) + links(trace));
    assert_eq!(
        count(&full, "subgraph"),
        trace.nodes().iter().filter(|node| node.parent.is_none()).count()
    );

    let turns = dot(RenderOptions {
        turns_only: true,
        ..RenderOptions::default()
    });
    assert_eq!(nodes(&turns), trace.num_turns());

    let calls = dot(RenderOptions {
        links: EdgeFilter::only([EdgeType::subagent_call()]),
        cluster: false,
        ..RenderOptions::default()
    });
    assert_eq!(count(&calls, "subgraph"), 0);
    assert_eq!(
        count(&calls, "style=dashed"),
        trace
            .nodes()
            .iter()
            .flat_map(|node| &node.semantic_parents)
            .filter(|link| link.label == "subagent_call")
            .count()
    );

    let plain = dot(RenderOptions {
        excerpt: 0,
        ..RenderOptions::default()
    });
    assert!(!plain.contains("You are main"));

    let collapsed = dot(RenderOptions {
        collapse: true,
        links: EdgeFilter::only([]),
        ..RenderOptions::default()
    });
    assert!(nodes(&collapsed) < trace.nodes().len() / 3);
    let messages: usize = collapsed
        .lines()
        .filter(|line| line.contains("shape="))
        .map(|line| match line.split_once(" messages") {
            Some((before, _)) => before.rsplit(' ').next().unwrap().parse().unwrap(),
            None => 1,
        })
        .sum();
    assert_eq!(messages, trace.nodes().len());
}

#[test]
fn refused_compactions_are_greyed() {
    let run = agents::run(1500);
    let refused = run.trace.branches().filter(|branch| !branch.is_trainable()).count();
    assert!(refused > 0);
    let dot = render_trace(&run.trace, Format::Dot, &RenderOptions::default());
    assert_eq!(count(&dot, "fillcolor=\"#d0d0d0\""), refused);
    let page = render_trace(&run.trace, Format::Html, &RenderOptions::default());
    assert_eq!(count(&page, "<g class=\"n a x\""), refused);
}

#[test]
fn mermaid_stays_within_its_limits_or_says_so() {
    let small = render_trace(&agents::run(100).trace, Format::Mermaid, &RenderOptions::default());
    assert!(small.starts_with("flowchart TD\n"));
    let mut chain = Trace::new("chain");
    let mut parent = None;
    for i in 0..2000 {
        let node = MessageNode::new(parent, Message::user(&format!("message {i}")));
        parent = Some(chain.push_node(node).unwrap());
    }
    let short = render_trace(&chain, Format::Mermaid, &RenderOptions::default());
    assert!(short.starts_with("%% runs of messages are collapsed"));
    assert!(short.len() < MAX_TEXT && count(&short, "-->") < MAX_EDGES);
    assert!(short.contains("1998 messages"));
    let large = render_trace(&agents::run(3000).trace, Format::Mermaid, &RenderOptions::default());
    assert!(large.starts_with("%% "));
    assert!(large.contains("set maxEdges"));
}

#[test]
fn a_very_long_path_is_drawn_without_recursion() {
    let mut chain = Trace::new("chain");
    let mut parent = None;
    let message = std::sync::Arc::new(Message::user("x"));
    for _ in 0..200_000 {
        let node = MessageNode::new(parent, std::sync::Arc::clone(&message));
        parent = Some(chain.push_node(node).unwrap());
    }
    let options = RenderOptions {
        collapse: true,
        ..RenderOptions::default()
    };
    let dot = render_trace(&chain, Format::Dot, &options);
    assert_eq!(dot.lines().filter(|line| line.contains("shape=")).count(), 3);
}
