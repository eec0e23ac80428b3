//! Storing turns: what has to hold whatever the turns are.
#![cfg(feature = "hash")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use proptest::prelude::*;
use semantic_graph::hash::{canonical_arguments, diff, message_digest};
use semantic_graph::json::Value;
use semantic_graph::{
    AssistantMessage, CommitError, Message, ModelCall, NodeId, RecordOptions, RequestId, Response, SemanticEdge,
    SemanticEdgeSet, Span, Tool, ToolCall, ToolCallKind, Trace, TurnTokens, Usage,
};

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        (0..3u8).prop_map(|i| Message::user(&format!("u{i}"))),
        (0..2u8).prop_map(|i| Message::system(&format!("s{i}"))),
        (0..2u8).prop_map(|i| Message::tool("c", &format!("t{i}"))),
        Just(Message::Assistant(AssistantMessage::default())),
        Just(Message::assistant("")),
        (0..2u8).prop_map(|i| Message::assistant(&format!("a{i}"))),
        (any::<bool>()).prop_map(|spaced| {
            let arguments = if spaced {
                "{ \"b\": 1, \"a\": 2 }"
            } else {
                "{\"a\":2,\"b\":1}"
            };
            Message::Assistant(AssistantMessage {
                tool_calls: Some(
                    [ToolCall {
                        id: "c".into(),
                        kind: ToolCallKind::Function,
                        name: "f".into(),
                        namespace: None,
                        arguments: arguments.into(),
                    }]
                    .into(),
                ),
                ..AssistantMessage::default()
            })
        }),
    ]
}

fn prompt() -> impl Strategy<Value = Vec<Message>> {
    prop::collection::vec(message(), 0..5)
}

fn tools(i: u8) -> Vec<Tool> {
    match i {
        0 => vec![],
        1 => vec![Tool::function("f")],
        _ => vec![Tool::function("f"), Tool::function("g")],
    }
}

fn answer(i: u8) -> Response {
    Response::text(&format!("answer {i}"))
}

/// The graph without its numbering: every path from a root, as a sorted list.
fn shape(trace: &Trace) -> Vec<String> {
    let mut shape: Vec<String> = (0..trace.nodes().len())
        .map(|i| {
            trace
                .path_to(NodeId::new(i as u32))
                .into_iter()
                .map(|id| {
                    let node = trace.node(id).unwrap();
                    format!(
                        "{}{}{}/",
                        node.tools().len(),
                        message_digest(&node.message).unwrap(),
                        if node.sampled { "*" } else { "" }
                    )
                })
                .collect()
        })
        .collect();
    shape.sort();
    shape
}

/// Random prompts rarely share beginnings; these do.
fn related_prompts() -> impl Strategy<Value = Vec<(Vec<Message>, u8, u8)>> {
    (
        prompt(),
        prop::collection::vec((0..5usize, prompt(), 0..2u8, 0..3u8), 1..6),
    )
        .prop_map(|(base, list)| {
            list.into_iter()
                .map(|(keep, rest, tools, answer)| {
                    let mut prompt: Vec<Message> = base.iter().take(keep).cloned().collect();
                    prompt.extend(rest);
                    (prompt, tools, answer)
                })
                .collect()
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// However concurrent turns are interleaved, the graph is the same up to its numbering.
    #[test]
    fn commits_in_any_interleaving_give_one_graph(
        turns in related_prompts(),
        order in any::<prop::sample::Index>(),
        late in prop::collection::vec(any::<bool>(), 6),
    ) {
        let mut one = Trace::new("t");
        for (prompt, set, text) in &turns {
            let pending = one.prepare_turn(prompt.clone(), tools(*set)).unwrap();
            one.commit(&pending, answer(*text)).unwrap();
        }
        // Some turns are prepared before anything is committed, the others just in time.
        let mut other = Trace::new("t");
        let early: Vec<_> = turns
            .iter()
            .zip(&late)
            .map(|((prompt, set, _), late)| {
                (!late).then(|| other.prepare_turn(prompt.clone(), tools(*set)).unwrap())
            })
            .collect();
        let first = order.index(turns.len());
        for i in (0..turns.len()).map(|i| (i + first) % turns.len()) {
            let (prompt, set, text) = &turns[i];
            let pending = match &early[i] {
                Some(pending) => pending.clone(),
                None => other.prepare_turn(prompt.clone(), tools(*set)).unwrap(),
            };
            other.commit(&pending, answer(*text)).unwrap();
        }
        prop_assert_eq!(shape(&one), shape(&other));
        prop_assert_eq!(one.num_turns(), turns.len());
    }

    /// Vouching for the beginning gives what matching it gives.
    #[test]
    fn both_ways_to_prepare_agree(turns in related_prompts(), keep in any::<prop::sample::Index>()) {
        let mut trace = Trace::new("t");
        for (prompt, set, text) in &turns {
            let whole = trace.prepare_turn(prompt.clone(), tools(*set)).unwrap();
            let path = whole.prefix_node_ids(&trace);
            if !path.is_empty() {
                let at = keep.index(path.len());
                let rest = prompt[at + 1..].to_vec();
                let short = trace.prepare_after(path[at], rest, tools(*set)).unwrap();
                prop_assert_eq!(short.tail_start(), whole.tail_start());
                prop_assert_eq!(short.prefix_tip(), whole.prefix_tip());
                prop_assert_eq!(short.path_len(), whole.path_len());
                prop_assert_eq!(short.prompt_len(), whole.prompt_len());
                prop_assert_eq!(short.tail(), whole.tail());
                let mut a = trace.clone();
                let mut b = trace.clone();
                let again = a.prepare_turn(prompt.clone(), tools(*set)).unwrap();
                let at = a.commit_at(&again, answer(*text), 0.0).unwrap();
                let rest = prompt[keep.index(path.len()) + 1..].to_vec();
                let short = b
                    .prepare_after(path[keep.index(path.len())], rest, tools(*set))
                    .unwrap();
                prop_assert_eq!(b.commit_at(&short, answer(*text), 0.0).unwrap(), at);
                prop_assert!(a == b);
            }
            trace.commit(&whole, answer(*text)).unwrap();
        }
    }

    /// Shared messages, fresh ones, and a trace that was written and read: all match alike.
    #[test]
    fn memory_of_digests_changes_no_answer(turns in related_prompts()) {
        let mut trace = Trace::new("t");
        for (prompt, set, text) in &turns {
            let pending = trace.prepare_turn(prompt.clone(), tools(*set)).unwrap();
            let record = trace.to_json(RecordOptions::LOSSLESS).unwrap();
            let fresh = Trace::from_json(record.as_bytes()).unwrap();
            let there = fresh.prepare_turn(prompt.clone(), tools(*set)).unwrap();
            prop_assert_eq!(
                pending.prefix_node_ids(&trace),
                there.prefix_node_ids(&fresh)
            );
            // The stored messages themselves, where they are stored.
            let shared: Vec<Arc<Message>> = prompt
                .iter()
                .enumerate()
                .map(|(i, message)| match pending.prefix_node_ids(&trace).get(i) {
                    Some(id) => Arc::clone(&trace.node(*id).unwrap().message),
                    None => Arc::new(message.clone()),
                })
                .collect();
            let by_pointer = trace.prepare_turn(shared, tools(*set)).unwrap();
            prop_assert_eq!(by_pointer.prefix_tip(), pending.prefix_tip());
            let longest = trace.message_prefix_len(prompt).unwrap();
            prop_assert!(longest >= pending.tail_start());
            trace.commit(&pending, answer(*text)).unwrap();
            prop_assert_eq!(trace.message_prefix_len(prompt).unwrap(), prompt.len());
        }
    }

    /// The tokens along the path of a turn are exactly its prompt and its completion.
    #[test]
    fn tokens_along_the_path_are_the_prompt_and_the_completion(
        turns in prop::collection::vec(
            (
                prompt(),
                prop::collection::vec(0..3u32, 0..8),
                prop::collection::vec(0..3u32, 0..4),
                prop::option::of(prop::collection::vec(prop::option::of((0..9i64, 0..9i64)), 0..6)),
                any::<bool>(),
            ),
            1..6,
        ),
    ) {
        let mut trace = Trace::new("t");
        let mut base: Vec<Message> = Vec::new();
        for (prompt, ids, completion, spans, go_on) in turns {
            let mut whole = if go_on { base.clone() } else { Vec::new() };
            whole.extend(prompt);
            let tokens = TurnTokens {
                prompt_ids: ids.clone(),
                completion_ids: completion.clone(),
                completion_logprobs: vec![-0.5; completion.len()],
                // Also spans that overlap, run backwards or leave the prompt.
                message_spans: spans.map(|spans| {
                    spans
                        .into_iter()
                        .map(|span| span.map(|(start, end)| Span { start, end }))
                        .collect()
                }),
                ..TurnTokens::default()
            };
            let pending = trace.prepare_turn(whole.clone(), vec![]).unwrap();
            let response = Response {
                tokens: Some(tokens),
                ..Response::text("x")
            };
            let node = trace.commit(&pending, response).unwrap().node;
            let branch = trace.branch(node).unwrap();
            prop_assert_eq!(branch.token_ids(), [ids, completion.clone()].concat());
            prop_assert_eq!(branch.sampled_mask().len(), branch.logprobs().len());
            let path = branch.node_ids();
            prop_assert_eq!(path.len(), whole.len() + 1);
            let own = trace.node(node).unwrap().tokens();
            prop_assert_eq!(own.sampled_len(), completion.len());
            base = whole;
            base.push(Message::assistant("x"));
        }
    }

    /// Counts that are kept up to date equal counts from scratch.
    #[test]
    fn counts_are_kept_up_to_date(
        turns in related_prompts(),
        calls in prop::collection::vec((0..24i64, 0..50i64, 0..9i64, any::<bool>()), 0..16),
    ) {
        let mut trace = Trace::new("t");
        let mut calls = calls.into_iter();
        let _ = trace.num_branches();
        for (prompt, set, text) in &turns {
            let pending = trace.prepare_turn(prompt.clone(), tools(*set)).unwrap();
            trace.commit(&pending, answer(*text)).unwrap();
            for (node, input, output, counted) in calls.by_ref().take(3) {
                // Late calls, calls for nodes still to come, calls without usage.
                trace.push_call(ModelCall {
                    node: Some(node),
                    usage: counted.then(|| {
                        Box::new(Usage {
                            prompt_tokens: input,
                            completion_tokens: output,
                            ..Usage::default()
                        })
                    }),
                    ..ModelCall::default()
                });
            }
            let fresh = trace.clone();
            prop_assert_eq!(trace.num_input_tokens(), fresh.num_input_tokens());
            prop_assert_eq!(trace.num_output_tokens(), fresh.num_output_tokens());
            prop_assert_eq!(trace.num_total_tokens(), fresh.num_total_tokens());
            prop_assert_eq!(trace.num_unique_output_tokens(), fresh.num_unique_output_tokens());
            let sum: i64 = trace.branches().map(|branch| branch.num_output_tokens()).sum();
            prop_assert_eq!(trace.num_output_tokens(), sum);
            prop_assert!(trace.leaves().eq(fresh.leaves()));
        }
    }

    #[test]
    fn a_trace_does_not_differ_from_itself_and_differences_mirror(
        a in related_prompts(),
        b in related_prompts(),
        common in related_prompts(),
    ) {
        let build = |own: &[(Vec<Message>, u8, u8)]| {
            let mut trace = Trace::new("t");
            for (i, (prompt, set, text)) in common.iter().chain(own).enumerate() {
                let pending = trace.prepare_turn(prompt.clone(), tools(*set)).unwrap();
                let mut response = answer(*text);
                response.tokens = i.is_multiple_of(2).then(|| TurnTokens {
                    prompt_ids: vec![1; own.len() % 3],
                    completion_ids: vec![7],
                    completion_logprobs: vec![-0.25 * own.len() as f64],
                    ..TurnTokens::default()
                });
                let node = trace.commit(&pending, response).unwrap().node;
                let request = RequestId::new(&format!("r{i}")).unwrap();
                trace.push_call(ModelCall::committed(node).with_request_id(request));
            }
            let mut set = SemanticEdgeSet::new();
            for i in 1..common.len() + own.len() {
                let [a, b] = [i - 1, i].map(|i| RequestId::new(&format!("r{i}")).unwrap());
                let label = if own.len().is_multiple_of(2) { "x" } else { "y" };
                let _ = set.push(SemanticEdge::new(a, b, label.try_into().unwrap()).unwrap());
            }
            trace.add_semantic_edges(&set).unwrap();
            trace
        };
        let (a, b) = (build(&a), build(&b));
        prop_assert!(diff(&a, &a).is_empty());
        prop_assert!(diff(&a, &a.clone()).is_empty());
        let there = diff(&a, &b);
        prop_assert_eq!(diff(&b, &a), there.clone().mirrored());
        if shape(&a) != shape(&b) {
            prop_assert!(!there.is_empty());
        }
        prop_assert!(!there.to_string().is_empty());
        prop_assert!(semantic_graph::json::to_string(&there).is_ok());
    }

    #[test]
    fn canonical_arguments_are_canonical(text in r#"[ \[\]{}",:0-9.eEaunl\\-]{0,24}"#) {
        let once = canonical_arguments(&text).into_owned();
        prop_assert_eq!(canonical_arguments(&once), &*once);
        prop_assert_eq!(text.parse::<Value>().is_ok(), once.parse::<Value>().is_ok());
    }
}

#[test]
fn a_turn_of_another_trace_is_refused() {
    let mut a = Trace::new("a");
    let mut b = Trace::new("a");
    let pending = a.prepare_turn([Message::user("x")], vec![]).unwrap();
    assert_eq!(b.commit(&pending, answer(0)), Err(CommitError::ForeignTurn));
    assert_eq!(b.commit_prompt(&pending), Err(CommitError::ForeignTurn));
    let mut copy = a.clone();
    assert_eq!(copy.commit(&pending, answer(0)), Err(CommitError::ForeignTurn));
    a.commit(&pending, answer(0)).unwrap();
    a.commit(&pending, answer(1)).unwrap();
    a.node_mut(NodeId::new(0)).unwrap().timestamp = 0.0;
    assert_eq!(a.commit(&pending, answer(0)), Err(CommitError::ForeignTurn));
    assert!(b.nodes().is_empty());
}

#[test]
fn differences_are_told_with_their_place() {
    let build = |second: &str, reply: &str| {
        let mut trace = Trace::new("t");
        let prompt = [Message::system("s"), Message::user("one"), Message::user(second)];
        let pending = trace.prepare_turn(prompt, vec![]).unwrap();
        trace.commit(&pending, Response::text(reply)).unwrap();
        trace
    };
    let found = diff(&build("two", "yes"), &build("other", "yes"));
    assert_eq!(found.only_a.len(), 2);
    assert_eq!(found.divergences.len(), 1);
    let divergence = &found.divergences[0];
    assert_eq!(divergence.parent_a, Some(NodeId::new(1)));
    assert_eq!(divergence.field, Some("content"));
    assert_eq!(divergence.a.as_ref().unwrap().excerpt, "two");
    assert_eq!(divergence.b.as_ref().unwrap().excerpt, "other");
    let text = found.to_string();
    assert!(
        text.contains("after node 1 (content):\n  - 2 user: two\n  + 2 user: other\n"),
        "{text}"
    );
}
