//! The input of the benchmarks: deterministic, and the same that the reference is timed with.

#![allow(dead_code, reason = "each benchmark takes a part")]

use std::fmt::Write;
use std::sync::Arc;

use semantic_graph::{EdgeType, Message, ModelCall, RequestId, Response, SemanticEdge, Span, Trace, TurnTokens, Usage};

const PER_CONVERSATION: usize = 100;

const LABELS: [&str; 5] = [
    "continuation",
    "subagent_call",
    "subagent_return",
    "agent_message",
    "subagent_cancel",
];

pub(crate) fn pad() -> String {
    "word ".repeat(40)
}

pub(crate) fn request(i: usize) -> RequestId {
    RequestId::new(&format!("r{i}")).expect("well formed")
}

/// One turn of the reference's shape (a): what a server is given.
pub(crate) struct Turn {
    pub(crate) conversation: usize,
    pub(crate) position: usize,
    pub(crate) user: Arc<Message>,
    pub(crate) answer: Response,
    pub(crate) call: ModelCall,
}

pub(crate) fn turns(count: usize) -> Vec<Turn> {
    let pad = pad();
    (0..count)
        .map(|i| {
            let (conversation, position) = (i / PER_CONVERSATION, i % PER_CONVERSATION);
            Turn {
                conversation,
                position,
                user: Arc::new(Message::user(&format!("question {conversation}.{position} {pad}"))),
                answer: Response::text(&format!("answer {conversation}.{position} {pad}")),
                call: ModelCall::default().with_request_id(request(i)).with_usage(Usage {
                    prompt_tokens: 50 * (position as i64 + 1),
                    completion_tokens: 50,
                    ..Usage::default()
                }),
            }
        })
        .collect()
}

/// How a caller hands in its prompts.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Prompts {
    /// Whole prompts of shared messages.
    Shared,
    /// Whole prompts, every message built anew for every turn, as from a request's JSON.
    Fresh,
    /// Only what is new.
    Tail,
}

/// Stores turns one after the other; the time that building fresh prompts takes is not a part of
/// `watch`.
pub(crate) fn store_turns(turns: &[Turn], prompts: Prompts, watch: &mut impl FnMut(&mut dyn FnMut())) -> Trace {
    let mut trace = Trace::new("bench");
    let mut prompt: Vec<Arc<Message>> = Vec::new();
    let mut tip = None;
    for turn in turns {
        if turn.position == 0 {
            prompt = vec![Arc::new(Message::system(&format!(
                "You are agent {}.",
                turn.conversation
            )))];
            tip = None;
        }
        prompt.push(Arc::clone(&turn.user));
        let given: Vec<Arc<Message>> = match prompts {
            Prompts::Fresh => prompt.iter().map(|m| Arc::new((**m).clone())).collect(),
            _ => Vec::new(),
        };
        let answer = turn.answer.clone();
        let mut call = turn.call.clone();
        let mut state = Some((given, answer));
        watch(&mut || {
            let Some((given, answer)) = state.take() else {
                return;
            };
            let pending = match (prompts, tip) {
                (Prompts::Shared, _) => trace.prepare_turn(prompt.iter().cloned(), vec![]),
                (Prompts::Fresh, _) => trace.prepare_turn(given, vec![]),
                (Prompts::Tail, Some(tip)) => trace.prepare_after(tip, [Arc::clone(&turn.user)], vec![]),
                (Prompts::Tail, None) => trace.prepare_turn(prompt.iter().cloned(), vec![]),
            }
            .expect("messages have an identity");
            let node = trace.commit(&pending, answer).expect("no tokens").node;
            call.node = Some(i64::from(node.get()));
            trace.push_call(std::mem::take(&mut call));
            tip = Some(node);
        });
        let node = tip.expect("a turn was stored");
        prompt.push(Arc::clone(&trace.nodes()[node.index()].message));
    }
    trace
}

/// Edge `k` of shape (b), as text.
pub(crate) fn edge_json(k: usize, turns: usize) -> String {
    let (source, target, label) = edge_parts(k, turns);
    format!(
        "{{\"source_request_id\": \"r{source}\", \"target_request_id\": \"r{target}\", \
         \"type\": \"{label}\"}}"
    )
}

fn edge_parts(k: usize, turns: usize) -> (usize, usize, String) {
    let lap = k / turns;
    let source = k % turns;
    let mut target = (k * 7919 + 13 + lap) % turns;
    if target == source {
        target = (target + 1) % turns;
    }
    let mut label = LABELS[k % 5].to_owned();
    if lap > 0 {
        let _ = write!(label, ":{lap}");
    }
    (source, target, label)
}

pub(crate) fn edges(count: usize, turns: usize) -> Vec<SemanticEdge> {
    (0..count)
        .map(|k| {
            let (source, target, label) = edge_parts(k, turns);
            let label = EdgeType::new(&label).expect("well formed");
            SemanticEdge::new(request(source), request(target), label).expect("two requests")
        })
        .collect()
}

/// The parts of edges as text, as a harness has them before it makes an edge.
pub(crate) struct EdgeTexts {
    text: String,
    ends: Vec<[usize; 3]>,
}

impl EdgeTexts {
    pub(crate) fn new(count: usize, turns: usize) -> Self {
        let mut text = String::new();
        let mut ends = Vec::with_capacity(count);
        for k in 0..count {
            let (source, target, label) = edge_parts(k, turns);
            let _ = write!(text, "r{source}");
            let source = text.len();
            let _ = write!(text, "r{target}");
            let target = text.len();
            text.push_str(&label);
            ends.push([source, target, text.len()]);
        }
        Self { text, ends }
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn edge(&self, k: usize) -> SemanticEdge {
        let start = k.checked_sub(1).map_or(0, |before| self.ends[before][2]);
        let [source, target, label] = self.ends[k];
        SemanticEdge::new(
            RequestId::new(&self.text[start..source]).expect("well formed"),
            RequestId::new(&self.text[source..target]).expect("well formed"),
            EdgeType::new(&self.text[target..label]).expect("well formed"),
        )
        .expect("two requests")
    }
}

/// All edges in one payload; where each edge ends.
pub(crate) fn payload(count: usize, turns: usize) -> (Vec<u8>, Vec<usize>) {
    let mut text = String::from("{\"edges\": [");
    let mut ends = Vec::with_capacity(count);
    for k in 0..count {
        if k > 0 {
            text.push_str(", ");
        }
        text.push_str(&edge_json(k, turns));
        ends.push(text.len());
    }
    (text.into_bytes(), ends)
}

/// Shape (c): one conversation, with or without tokens.
pub(crate) fn store_chain(count: usize, with_tokens: bool) -> Trace {
    let pad = pad();
    let mut trace = Trace::new("bench");
    let mut prompt: Vec<Arc<Message>> = vec![Arc::new(Message::system("You are one agent."))];
    let mut ids: Vec<u32> = (0..8).collect();
    let mut spans: Vec<Option<Span>> = vec![Some(Span { start: 0, end: 8 })];
    for t in 0..count {
        prompt.push(Arc::new(Message::user(&format!("question {t} {pad}"))));
        let mut answer = Response::text(&format!("answer {t} {pad}"));
        let mut completion = Vec::new();
        if with_tokens {
            let start = ids.len() as i64;
            ids.extend(std::iter::repeat_n((t % 50_000) as u32, 12));
            spans.push(Some(Span { start, end: start + 12 }));
            completion = (0..30).map(|j| ((t + j) % 50_000) as u32).collect();
            answer.tokens = Some(TurnTokens {
                prompt_ids: [&*ids, &[7, 7]].concat(),
                completion_ids: completion.clone(),
                completion_logprobs: vec![-0.5; 30],
                message_spans: Some(spans.clone()),
                ..TurnTokens::default()
            });
        }
        let pending = trace
            .prepare_turn(prompt.iter().cloned(), vec![])
            .expect("messages have an identity");
        let node = trace.commit(&pending, answer).expect("tokens fit").node;
        prompt.push(Arc::clone(&trace.nodes()[node.index()].message));
        if with_tokens {
            let start = ids.len() as i64;
            ids.extend_from_slice(&[7, 7]);
            ids.extend_from_slice(&completion);
            spans.push(Some(Span { start, end: start + 32 }));
        }
    }
    trace
}
