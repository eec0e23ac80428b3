//! A made-up run: a main agent, its subagents, compactions, cancels and second tries.

#![allow(dead_code, unreachable_pub, reason = "each user takes a part")]

use std::sync::Arc;

use semantic_graph::{
    AssistantMessage, EdgeType, FinishReason, Message, ModelCall, NodeId, RequestId, Response, SemanticEdge,
    SemanticEdgeSet, ToolCall, ToolCallKind, Trace, TurnTokens, Usage,
};

struct Agent {
    name: String,
    tip: Option<NodeId>,
    system: String,
    /// The request of the last turn.
    last: Option<RequestId>,
    turns: usize,
}

pub struct Run {
    pub trace: Trace,
    pub edges: SemanticEdgeSet,
    requests: usize,
    seed: u64,
}

const WORDS: [&str; 16] = [
    "the", "parser", "reads", "one", "line", "then", "checks", "its", "length", "because", "tests", "fail", "when",
    "buffers", "are", "empty",
];

impl Run {
    fn random(&mut self, below: usize) -> usize {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.seed >> 33) as usize % below
    }

    fn sentence(&mut self, words: usize) -> String {
        let words: Vec<&str> = (0..words).map(|_| WORDS[self.random(WORDS.len())]).collect();
        words.join(" ")
    }

    fn turn(&mut self, agent: &mut Agent, input: Message) -> RequestId {
        let answer = self.sentence(12);
        let mut messages: Vec<Arc<Message>> = Vec::new();
        if agent.tip.is_none() {
            messages.push(Message::system(&agent.system).into());
        }
        messages.push(input.into());
        let pending = match agent.tip {
            Some(tip) => self.trace.prepare_after(tip, messages, vec![]),
            None => self.trace.prepare_turn(messages, vec![]),
        }
        .expect("messages have an identity");
        let prefix: Vec<u32> = match agent.tip.and_then(|tip| self.trace.branch(tip)) {
            Some(branch) => branch.token_ids(),
            None => Vec::new(),
        };
        let mut prompt_ids = prefix;
        for _ in 0..6 {
            prompt_ids.push(self.random(50_000) as u32);
        }
        let completion_ids: Vec<u32> = (0..12).map(|_| self.random(50_000) as u32).collect();
        let logprobs = (0..12).map(|_| -(self.random(300) as f64) / 100.0).collect();
        agent.turns += 1;
        let calls = agent.turns.is_multiple_of(3).then(|| {
            [ToolCall {
                id: format!("call_{}", self.requests).into(),
                kind: ToolCallKind::Function,
                name: "shell".into(),
                namespace: None,
                arguments: "{\"command\": \"cargo test -- --nocapture\"}".into(),
            }]
            .into()
        });
        let response = Response {
            message: AssistantMessage {
                content: Some(format!("{}: {answer}", agent.name).into()),
                tool_calls: calls,
                ..AssistantMessage::default()
            },
            finish_reason: Some(FinishReason::Stop),
            usage: None,
            tokens: Some(TurnTokens {
                prompt_ids,
                completion_ids,
                completion_logprobs: logprobs,
                ..TurnTokens::default()
            }),
        };
        let at = 1_700_000_000.0 + self.requests as f64;
        let node = self
            .trace
            .commit_at(&pending, response, at)
            .expect("tokens extend the prefix")
            .node;
        let request = RequestId::new(&format!("req-{}", self.requests)).expect("well formed");
        self.requests += 1;
        self.trace.push_call(
            ModelCall::committed(node)
                .with_request_id(request.clone())
                .with_usage(Usage {
                    prompt_tokens: 100 + agent.turns as i64 * 20,
                    completion_tokens: 12,
                    ..Usage::default()
                }),
        );
        if let Some(last) = agent.last.replace(request.clone()) {
            self.edge(&last, &request, EdgeType::continuation());
        }
        agent.tip = Some(node);
        request
    }

    fn edge(&mut self, source: &RequestId, target: &RequestId, label: EdgeType) {
        let edge = SemanticEdge::new(source.clone(), target.clone(), label).expect("two requests");
        // A repeated edge says nothing new.
        let _ = self.edges.push(edge);
    }
}

fn agent(name: &str) -> Agent {
    Agent {
        name: name.to_owned(),
        tip: None,
        system: format!("You are {name}. Work carefully."),
        last: None,
        turns: 0,
    }
}

/// A run of at least `nodes` messages.
pub fn run(nodes: usize) -> Run {
    let mut run = Run {
        trace: Trace::new("made-up run"),
        edges: SemanticEdgeSet::new(),
        requests: 0,
        seed: 7,
    };
    let mut main = agent("main");
    let mut started = 0;
    while run.trace.nodes().len() < nodes {
        let text = run.sentence(8);
        let call = run.turn(&mut main, Message::user(&text));
        // Subagents work in turns, so that their messages interleave.
        let team = 1 + run.random(4);
        let mut agents: Vec<Agent> = (0..team)
            .map(|_| {
                started += 1;
                agent(&format!("worker {started}"))
            })
            .collect();
        let rounds = 3 + run.random(12);
        for round in 0..rounds {
            for i in 0..team {
                let text = run.sentence(10);
                let input = if round % 3 == 2 {
                    Message::tool("call", &text)
                } else {
                    Message::user(&text)
                };
                let request = run.turn(&mut agents[i], input);
                if round == 0 {
                    run.edge(&call, &request, EdgeType::subagent_call());
                }
                if run.random(9) == 0 {
                    let other = run.random(team);
                    if let Some(peer) = agents[other].last.clone().filter(|peer| *peer != request) {
                        run.edge(&peer, &request, EdgeType::agent_message());
                    }
                }
                if run.random(30) == 0 {
                    // The caller stops the worker because of what it said: a loop.
                    run.edge(&request, &call, EdgeType::agent_message());
                    run.edge(&call, &request, EdgeType::subagent_cancel());
                }
            }
        }
        let text = run.sentence(6);
        let merged = run.turn(&mut main, Message::tool("call", &text));
        for worker in &agents {
            if let Some(last) = &worker.last {
                run.edge(last, &merged, EdgeType::subagent_return());
            }
        }
        if main.turns.is_multiple_of(10) {
            // Two summaries are tried, and the second is continued from in a new conversation.
            let before = main.tip;
            let from = main.last.clone();
            let mut summary = None;
            for _ in 0..2 {
                main.tip = before;
                main.last.clone_from(&from);
                let request = run.turn(&mut main, Message::user("Summarise the work so far."));
                run.edge(&merged, &request, EdgeType::compaction_attempt());
                summary = Some(request);
            }
            let mut next = agent("main");
            let request = run.turn(&mut next, Message::user("Summary: so far, so good. Go on."));
            if let Some(summary) = summary {
                run.edge(&summary, &request, EdgeType::compaction());
            }
            if run.random(2) == 0 {
                let label = EdgeType::new("vendor:checkpoint").expect("well formed");
                run.edge(&merged, &request, label);
            }
            main = next;
        }
    }
    run.trace
        .add_semantic_edges(&run.edges)
        .expect("all requests were committed");
    run
}
