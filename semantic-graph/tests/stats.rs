//! Statistics and checks of a small run whose numbers are known.
#![cfg(feature = "hash")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use semantic_graph::json::{self, Value};
use semantic_graph::{
    CallError, Code, FinishReason, Message, ModelCall, NodeId, Place, RequestId, Response, SemanticEdgeSet, Span,
    TimeSpan, Trace, TurnTokens, Usage,
};

fn request(i: usize) -> RequestId {
    RequestId::new(&format!("r{i}")).unwrap()
}

fn small_run() -> Trace {
    let mut trace = Trace::new("t");
    let tokens = |prompt: Vec<u32>, spans: Vec<Option<Span>>| TurnTokens {
        is_content: Some(vec![true; prompt.len()]),
        prompt_ids: prompt,
        completion_ids: vec![9, 9],
        completion_logprobs: vec![-1.0, -1.0],
        message_spans: Some(spans),
        ..TurnTokens::default()
    };
    let span = |start, end| Some(Span { start, end });
    let turns = [
        (
            vec![Message::system("s"), Message::user("q")],
            tokens(vec![1, 2, 3], vec![span(0, 1), span(1, 3)]),
        ),
        // The user's message is rendered differently: another node for the same message.
        (
            vec![Message::system("s"), Message::user("q")],
            tokens(vec![1, 5], vec![span(0, 1), span(1, 2)]),
        ),
        (vec![Message::user("other")], tokens(vec![7], vec![span(0, 1)])),
    ];
    for (i, (prompt, tokens)) in turns.into_iter().enumerate() {
        let pending = trace.prepare_turn(prompt, vec![]).unwrap();
        let response = Response {
            tokens: Some(tokens),
            ..Response::text(&format!("answer {i}"))
        };
        let node = trace.commit(&pending, response).unwrap().node;
        let mut call = ModelCall::committed(node)
            .with_request_id(request(i))
            .with_usage(Usage {
                prompt_tokens: 6,
                completion_tokens: 2,
                cached_input_tokens: Some(2),
                ..Usage::default()
            });
        call.finish_reason = Some(FinishReason::Stop);
        call.time = TimeSpan { start: 1.0, end: 3.5 };
        trace.push_call(call);
    }
    let mut failed = ModelCall::default().with_request_id(request(0));
    failed.error = Some(Box::new(CallError {
        kind: "RateLimit".into(),
        ..CallError::default()
    }));
    trace.push_call(failed);
    let set: SemanticEdgeSet = json::from_str(
        r#"{"edges":[
        {"source_request_id":"r0","target_request_id":"r1","type":"compaction_attempt"},
        {"source_request_id":"r0","target_request_id":"r2","type":"compaction_attempt"},
        {"source_request_id":"r2","target_request_id":"r0","type":"compaction"}]}"#,
    )
    .unwrap();
    trace.add_semantic_edges(&set).unwrap();
    trace
}

#[test]
fn a_run_is_counted() {
    let stats = small_run().stats();
    assert_eq!(stats.messages["system"], 1);
    assert_eq!(stats.messages["user"], 3);
    assert_eq!(stats.messages["assistant"], 3);
    assert_eq!((stats.turns, stats.roots, stats.branches), (3, 2, 3));
    assert_eq!((stats.max_children, stats.max_depth), (2, 3));
    assert_eq!(stats.stored_tokens, 3 + 2 + 1 + 2 + 1 + 2);
    assert_eq!(stats.branch_tokens, 5 + 4 + 3);
    assert_eq!(stats.sampled_tokens, 6);
    assert_eq!(stats.content_tokens, 3 + 2 + 1 + 2 + 1 + 2);
    assert_eq!((stats.token_breaks, stats.repeated_tokens), (1, 1));
    assert_eq!(stats.links["compaction_attempt"], 2);
    assert_eq!(stats.links["compaction"], 1);
    assert_eq!((stats.max_causes, stats.max_effects), (1, 2));
    assert_eq!(stats.loops, [2]);
    assert_eq!((stats.compactions_accepted, stats.compactions_refused), (1, 1));
    assert_eq!(stats.calls["stop"], 3);
    assert_eq!(stats.calls["none"], 1);
    assert_eq!((stats.failed_calls, stats.retried_requests), (1, 1));
    assert_eq!(stats.cached_share, Some(0.25));
    assert_eq!(stats.model_seconds, 7.5);
    let text: Value = json::to_value(&stats).unwrap();
    assert_eq!(text.get("turns"), Some(&Value::Int(3)));
}

#[test]
fn an_empty_trace_is_counted_too() {
    let stats = Trace::new("t").stats();
    assert_eq!(stats, semantic_graph::Stats::default());
}

#[test]
fn a_sound_trace_has_no_problems_and_each_fault_is_found() {
    let sound = small_run();
    assert_eq!(sound.check(), []);
    let problems = |edit: &dyn Fn(&mut Trace)| {
        let mut trace = sound.clone();
        edit(&mut trace);
        trace
            .check()
            .into_iter()
            .map(|problem| (problem.code, problem.place, problem.is_error()))
            .collect::<Vec<_>>()
    };
    let node = |i| Place::Node(NodeId::new(i));
    assert_eq!(
        problems(&|trace| {
            let links = &mut trace.node_mut(NodeId::new(2)).unwrap().semantic_parents;
            let twice = links[0].clone();
            links.push(twice);
        }),
        [(Code::DuplicateLink, node(2), true)]
    );
    assert_eq!(
        problems(&|trace| {
            trace.node_mut(NodeId::new(2)).unwrap().semantic_parents[0].node = NodeId::new(2);
        }),
        [(Code::SelfLink, node(2), true)]
    );
    assert_eq!(
        problems(&|trace| {
            trace.node_mut(NodeId::new(2)).unwrap().semantic_parents[0].node = NodeId::new(77);
        }),
        [(Code::InvalidLink, node(2), true)]
    );
    assert_eq!(
        problems(&|trace| {
            trace.node_mut(NodeId::new(1)).unwrap().timestamp = 0.0;
        })[0],
        (Code::InvalidParent, node(1), false)
    );
    assert_eq!(
        problems(&|trace| {
            trace.annotate(NodeId::new(2), |tokens| {
                tokens.mask.pop();
                tokens.advantages = Some(vec![0.0; 9]);
            });
        })
        .len(),
        3,
        "mask, log-probabilities (one sampled token is gone) and advantages"
    );
    for (node, code) in [(99, Code::InvalidLink), (-1, Code::InvalidLink), (0, Code::InvalidLink)] {
        assert_eq!(
            problems(&|trace| {
                trace.push_call(ModelCall {
                    node: Some(node),
                    ..ModelCall::default()
                });
            }),
            [(code, Place::Call(4), true)]
        );
    }
    assert_eq!(
        problems(&|trace| {
            let other = trace.calls()[1].node;
            trace.push_call(
                ModelCall {
                    node: other,
                    ..ModelCall::default()
                }
                .with_request_id(request(0)),
            );
        }),
        [(Code::InvalidRequestId, Place::Call(4), false)]
    );
}

#[test]
fn edge_sets_are_found_in_metadata() {
    let metadata: Value = r#"{"other":1,"ai.prime.acp/semantic-edges-v1":{"edges":[]}}"#.parse().unwrap();
    assert_eq!(
        SemanticEdgeSet::from_metadata(&metadata).unwrap(),
        Some(SemanticEdgeSet::new())
    );
    let metadata: Value = "{\"other\":1}".parse().unwrap();
    assert_eq!(SemanticEdgeSet::from_metadata(&metadata).unwrap(), None);
    let metadata: Value = r#"{"ai.prime.acp/semantic-edges-v1":null}"#.parse().unwrap();
    assert_eq!(
        SemanticEdgeSet::from_metadata(&metadata).unwrap_err().code(),
        Code::WrongType
    );
}
