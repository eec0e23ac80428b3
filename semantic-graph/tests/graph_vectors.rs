//! Recorded answers for identity, scenarios and records.
#![cfg(feature = "hash")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::HashMap;

use semantic_graph::hash::{canonical_arguments, message_digest, occurrence_keys, tools_digest};
use semantic_graph::json::{self, Value};
use semantic_graph::{
    ElementType, ExpertRows, Limits, Message, ModelCall, NodeId, NodeTokens, PendingTurn, RecordOptions, Response,
    RoutedExperts, SamplingMask, SemanticEdgeSet, Span, Tool, Trace, TurnTokens, Usage,
};
use support::*;

fn message(value: &Value) -> Message {
    json::from_value(value).unwrap_or_else(|error| panic!("{value}: {error}"))
}

fn messages(value: &Value) -> Vec<Message> {
    value.as_array().unwrap().iter().map(message).collect()
}

fn tools(value: Option<&Value>) -> Vec<Tool> {
    match value {
        None | Some(Value::Null) => Vec::new(),
        Some(value) => json::from_value(value).unwrap(),
    }
}

#[test]
fn messages_have_their_recorded_identity() {
    let cases = cases("message_hash");
    assert_eq!(cases.len(), 58);
    let hash = |value: &Value| message_digest(&message(value)).unwrap().to_string();
    for case in cases {
        if case.kind == "hash" {
            let found = hash(case.input.get("message").unwrap());
            assert_eq!(found, text_of(&case.expected, "hash"), "{}", case.name);
        } else {
            let a = hash(case.input.get("a").unwrap());
            let b = hash(case.input.get("b").unwrap());
            assert_eq!(a, text_of(&case.expected, "hash_a"), "{}", case.name);
            assert_eq!(b, text_of(&case.expected, "hash_b"), "{}", case.name);
            let equal = case.expected.get("equal") == Some(&Value::Bool(true));
            assert_eq!(a == b, equal, "{}", case.name);
        }
    }
}

#[test]
fn arguments_have_their_recorded_canonical_form() {
    let cases = cases("canonical_arguments");
    assert_eq!(cases.len(), 59);
    for case in cases {
        assert_eq!(
            canonical_arguments(text_of(&case.input, "arguments")),
            text_of(&case.expected, "canonical"),
            "{}",
            case.name
        );
    }
}

#[test]
fn tool_lists_have_their_recorded_identity() {
    let cases = cases("tools_hash");
    assert_eq!(cases.len(), 12);
    let hash = |value: Option<&Value>| tools_digest(&tools(value)).to_string();
    for case in cases {
        if case.kind == "tools_hash" {
            let found = hash(case.input.get("tools"));
            assert_eq!(found, text_of(&case.expected, "hash"), "{}", case.name);
        } else {
            let a = hash(case.input.get("a"));
            let b = hash(case.input.get("b"));
            assert_eq!(a, text_of(&case.expected, "hash_a"), "{}", case.name);
            assert_eq!(b, text_of(&case.expected, "hash_b"), "{}", case.name);
        }
    }
}

#[test]
fn tool_results_have_their_recorded_occurrence_keys() {
    let cases = cases("occurrence_keys");
    assert_eq!(cases.len(), 5);
    for case in cases {
        let messages = messages(case.input.get("messages").unwrap());
        let keys = occurrence_keys(&messages).unwrap();
        let found = Value::Array(
            keys.iter()
                .map(|key| {
                    Value::Array(vec![
                        Value::Int(key.position as i64),
                        key.prefix.to_string().as_str().into(),
                        (&*key.call_id).into(),
                    ])
                })
                .collect(),
        );
        assert_same(&case.name, "keys", &found, case.expected.get("keys").unwrap());
    }
}

fn numbers<T: TryFrom<i64>>(value: &Value) -> Vec<T> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|n| T::try_from(n.as_i64().unwrap()).ok().unwrap())
        .collect()
}

fn floats(value: &Value) -> Vec<f64> {
    json::from_value(value).unwrap()
}

fn pair(value: &Value) -> (i64, i64) {
    let pair: Vec<i64> = numbers(value);
    (pair[0], pair[1])
}

fn experts(value: &Value) -> ExpertRows {
    let rows = items(value, "rows");
    let layers = rows[0].as_array().unwrap();
    let top_k = layers[0].as_array().unwrap().len();
    let values: Vec<i64> = rows
        .iter()
        .flat_map(|row| row.as_array().unwrap())
        .flat_map(numbers::<i64>)
        .collect();
    let element = match value.get("dtype") {
        Some(name) => ElementType::from_name(name.as_str().unwrap()).unwrap(),
        None => ElementType::U8,
    };
    ExpertRows {
        array: RoutedExperts::from_values(element, layers.len(), top_k, &values).unwrap(),
        start: value.get("start").map_or(0, |start| start.as_i64().unwrap()),
    }
}

fn sampling_mask(value: &Value) -> SamplingMask {
    if let Some(rows) = value.get("rows") {
        let rows: Vec<Vec<i32>> = rows.as_array().unwrap().iter().map(numbers).collect();
        return SamplingMask {
            ids: rows.concat(),
            counts: rows.iter().map(|row| row.len() as i32).collect(),
        };
    }
    SamplingMask {
        ids: numbers(value.get("ids").unwrap()),
        counts: numbers(value.get("counts").unwrap()),
    }
}

fn turn_tokens(value: &Value) -> TurnTokens {
    let mut tokens = TurnTokens::default();
    for (key, value) in value.as_object().unwrap() {
        if value.is_null() {
            continue;
        }
        match key.as_str().unwrap() {
            "prompt_ids" => tokens.prompt_ids = numbers(value),
            "completion_ids" => tokens.completion_ids = numbers(value),
            "completion_logprobs" => tokens.completion_logprobs = floats(value),
            "renderer_prompt_ids" => tokens.renderer_prompt_ids = Some(numbers(value)),
            "bridged" => tokens.bridged = *value == Value::Bool(true),
            "message_spans" => {
                let span = |value: &Value| {
                    (!value.is_null()).then(|| {
                        let (start, end) = pair(value);
                        Span { start, end }
                    })
                };
                tokens.message_spans = Some(value.as_array().unwrap().iter().map(span).collect());
            }
            "is_content" => tokens.is_content = Some(json::from_value(value).unwrap()),
            "mm_placeholders" => {
                tokens.mm_placeholders = Some(value.as_array().unwrap().iter().map(pair).collect());
            }
            "mm_token_type_id_map" => {
                tokens.mm_token_type_id_map = value
                    .as_object()
                    .unwrap()
                    .iter()
                    .map(|(id, ty)| (id.as_str().unwrap().parse().unwrap(), ty.as_i64().unwrap()))
                    .collect();
            }
            "routed_experts" => tokens.routed_experts = Some(experts(value)),
            "sampling_mask" => tokens.sampling_mask = Some(sampling_mask(value)),
            other => panic!("unknown token field {other}"),
        }
    }
    tokens
}

fn response(value: &Value) -> Response {
    let Message::Assistant(message) = message(value.get("message").unwrap()) else {
        panic!("a response is from the assistant")
    };
    Response {
        message,
        finish_reason: value
            .get("finish_reason")
            .and_then(|reason| json::from_value(reason).unwrap()),
        usage: None,
        tokens: value.get("tokens").filter(|tokens| !tokens.is_null()).map(turn_tokens),
    }
}

fn node_ids(ids: &[NodeId]) -> Value {
    ints(ids.iter().map(|id| id.get()))
}

fn error(code: &str) -> Value {
    object(vec![("error", code.into())])
}

/// The steps of a scenario; `loads` tells which options a reload writes with.
struct Run {
    trace: Trace,
    turns: HashMap<String, PendingTurn>,
}

impl Run {
    fn new(input: &Value) -> Self {
        let trace = match input.get("trace") {
            Some(record) => json::from_value(record).unwrap(),
            None => Trace::new("trace"),
        };
        Self {
            trace,
            turns: HashMap::new(),
        }
    }

    fn step(&mut self, op: &Value) -> Value {
        let turn = op.get("turn").and_then(Value::as_str);
        let trace = &mut self.trace;
        match text_of(op, "op") {
            "prepare" => {
                let pending = trace
                    .prepare_turn(messages(op.get("prompt").unwrap()), tools(op.get("tools")))
                    .unwrap();
                let anchor = match pending.bridge_anchor(trace) {
                    None => Value::Null,
                    Some(anchor) => object(vec![
                        ("prompt_ids", ints(anchor.prompt_ids)),
                        ("completion_ids", ints(anchor.completion_ids)),
                    ]),
                };
                let result = object(vec![
                    ("prefix_node_ids", node_ids(&pending.prefix_node_ids(trace))),
                    ("tail_start", Value::Int(pending.tail_start() as i64)),
                    ("path_len", Value::Int(pending.path_len() as i64)),
                    ("renderer_path_len", Value::Int(pending.renderer_path_len() as i64)),
                    ("bridge_anchor", anchor),
                ]);
                self.turns.insert(turn.unwrap().to_owned(), pending);
                result
            }
            "commit" => {
                let before = trace.clone();
                let pending = &self.turns[turn.unwrap()];
                match trace.commit(pending, response(op.get("response").unwrap())) {
                    Ok(committed) => object(vec![
                        ("assistant_id", Value::Int(i64::from(committed.node.get()))),
                        ("new_node_ids", node_ids(&committed.new_nodes)),
                    ]),
                    Err(refusal) => {
                        assert!(*trace == before, "a refused commit changed the trace");
                        error(refusal.code())
                    }
                }
            }
            "commit_prompt" => {
                let added = trace.commit_prompt(&self.turns[turn.unwrap()]).unwrap();
                object(vec![("new_node_ids", node_ids(&added))])
            }
            "prefix_len" => {
                let prompt = messages(op.get("prompt").unwrap());
                let len = trace.message_prefix_len(&prompt).unwrap();
                object(vec![("len", Value::Int(len as i64))])
            }
            "call" => {
                let call: ModelCall = json::from_value(op.get("call").unwrap()).unwrap();
                trace.push_call(call);
                object(vec![])
            }
            "edges" => {
                let set: SemanticEdgeSet = json::from_value(op.get("edge_set").unwrap()).unwrap();
                let before = trace.clone();
                match trace.add_semantic_edges(&set) {
                    Ok(mut added) => {
                        added.sort_by_key(|link| link.target);
                        let added = added
                            .iter()
                            .map(|link| {
                                object(vec![
                                    ("target", Value::Int(i64::from(link.target.get()))),
                                    ("source", Value::Int(i64::from(link.source.get()))),
                                    ("type", link.label.as_str().into()),
                                ])
                            })
                            .collect();
                        object(vec![("added", Value::Array(added))])
                    }
                    Err(refusal) => {
                        assert!(*trace == before, "a refused set changed the trace");
                        error(refusal.code())
                    }
                }
            }
            "annotate" => {
                let node = NodeId::new(op.get("node").unwrap().as_i64().unwrap() as u32);
                let fields = op.get("fields").unwrap().as_object().unwrap();
                trace.annotate(node, |tokens| annotate(tokens, fields)).unwrap();
                // Masks and ids are set too, which changes what is computed from them.
                let mut whole = trace.node(node).unwrap().tokens().clone();
                for (key, value) in fields {
                    if *key == "token_ids" {
                        whole.token_ids = numbers(value);
                    }
                }
                if whole != *trace.node(node).unwrap().tokens() {
                    trace.node_mut(node).unwrap().tokens = Some(Box::new(whole));
                }
                object(vec![])
            }
            "set" => {
                let value = op.get("value").unwrap();
                match text_of(op, "field") {
                    "stop_condition" => {
                        trace.stop_condition = value.as_str().map(str::to_owned);
                    }
                    "root_reply" => trace.root_reply = value.as_str().map(str::to_owned),
                    "is_completed" => trace.is_completed = *value == Value::Bool(true),
                    "is_timeout" => trace.is_timeout = *value == Value::Bool(true),
                    "ok" => trace.ok = *value == Value::Bool(true),
                    other => panic!("unknown field {other}"),
                }
                object(vec![])
            }
            "limits" => {
                let limits: Limits = json::from_value(op.get("limits").unwrap()).unwrap();
                let reached = trace.reached(&limits).map_or(Value::Null, Value::from);
                object(vec![("reached", reached)])
            }
            "reload" => {
                let options = RecordOptions {
                    float_decimals: None,
                    exclude_none: op.get("exclude_none") == Some(&Value::Bool(true)),
                };
                let text = trace.to_json(options).unwrap();
                self.trace = Trace::from_json(text.as_bytes()).unwrap();
                self.turns.clear();
                object(vec![])
            }
            other => panic!("unknown step {other}"),
        }
    }
}

fn annotate(tokens: &mut NodeTokens, fields: &json::Object) {
    for (key, value) in fields {
        let stream = || (!value.is_null()).then(|| floats(value));
        match key.as_str().unwrap() {
            "advantages" => tokens.advantages = stream(),
            "reference_logprobs" => tokens.reference_logprobs = stream(),
            "trainer_logprobs" => tokens.trainer_logprobs = stream(),
            "entropies" => tokens.entropies = stream(),
            "logprobs" => tokens.logprobs = floats(value),
            "mask" => tokens.mask = json::from_value(value).unwrap(),
            "is_content" => tokens.is_content = json::from_value(value).unwrap(),
            "token_ids" => {}
            "loss_weights" => {
                tokens.loss_weights = Some(
                    value
                        .as_object()
                        .unwrap()
                        .iter()
                        .map(|(name, weights)| (name.as_str().unwrap().into(), floats(weights)))
                        .collect(),
                );
            }
            other => panic!("unknown annotation {other}"),
        }
    }
}

fn mask_value(mask: &SamplingMask) -> Value {
    object(vec![
        ("ids", ints(mask.ids.iter().copied())),
        ("counts", ints(mask.counts.iter().copied())),
    ])
}

fn experts_value(rows: &RoutedExperts) -> Value {
    let [_, layers, top_k] = rows.shape();
    let values = rows.values();
    let nested = values
        .chunks(layers * top_k)
        .map(|row| Value::Array(row.chunks(top_k).map(|k| ints(k.iter().copied())).collect()))
        .collect();
    object(vec![
        ("dtype", rows.element().as_str().into()),
        ("rows", Value::Array(nested)),
    ])
}

fn bools(flags: &[bool]) -> Value {
    Value::Array(flags.iter().map(|flag| Value::Bool(*flag)).collect())
}

fn float_values(values: &[f64]) -> Value {
    Value::Array(values.iter().map(|value| Value::Float(*value)).collect())
}

fn nullable(values: Option<Vec<f64>>) -> Value {
    values.map_or(Value::Null, |values| float_values(&values))
}

fn usage_value(usage: Option<Usage>) -> Value {
    usage.map_or(Value::Null, |usage| json::to_value(&usage).unwrap())
}

fn tool_names(tools: &[Tool]) -> Value {
    Value::Array(tools.iter().map(|tool| (&*tool.name).into()).collect())
}

fn node_value(trace: &Trace, index: usize) -> Value {
    let node = &trace.nodes()[index];
    let tokens = node.tokens();
    let mut members = vec![
        (
            "parent",
            node.parent.map_or(Value::Null, |id| Value::Int(i64::from(id.get()))),
        ),
        ("role", node.message.role().as_str().into()),
        ("sampled", Value::Bool(node.sampled)),
        (
            "hash",
            message_digest(&node.message).unwrap().to_string().as_str().into(),
        ),
    ];
    if !node.tools().is_empty() {
        members.push(("tools", tool_names(node.tools())));
    }
    if !node.semantic_parents.is_empty() {
        let links = node
            .semantic_parents
            .iter()
            .map(|link| Value::Array(vec![Value::Int(i64::from(link.node.get())), link.label.as_str().into()]))
            .collect();
        members.push(("semantic_parents", Value::Array(links)));
    }
    if !tokens.token_ids.is_empty() {
        members.push(("token_ids", ints(tokens.token_ids.iter().copied())));
        members.push(("mask", bools(&tokens.mask)));
        members.push(("is_content", bools(&tokens.is_content)));
        members.push(("logprobs", float_values(&tokens.logprobs)));
    }
    if tokens.logical_ids() != tokens.token_ids {
        members.push(("logical_ids", ints(tokens.logical_ids().iter().copied())));
    }
    if let Some(rows) = &tokens.routed_experts {
        members.push(("routed_experts", experts_value(rows)));
    }
    if let Some(mask) = &tokens.sampling_mask {
        members.push(("sampling_mask", mask_value(mask)));
    }
    object(members)
}

fn final_value(trace: &Trace, views: &[Value]) -> Value {
    let views: Vec<&str> = views.iter().map(|view| view.as_str().unwrap()).collect();
    let has = |view: &str| views.contains(&view);
    let branches = trace
        .branches()
        .map(|branch| {
            let calls: Vec<i64> = branch.calls().iter().map(|call| *call as i64).collect();
            let mut members = vec![
                ("node_ids", node_ids(&branch.node_ids())),
                ("calls", ints(calls)),
                ("trainable", Value::Bool(branch.is_trainable())),
                ("num_input_tokens", Value::Int(branch.num_input_tokens())),
                ("num_output_tokens", Value::Int(branch.num_output_tokens())),
                ("num_total_tokens", Value::Int(branch.num_total_tokens())),
            ];
            if has("tokens") {
                members.push(("token_ids", ints(branch.token_ids())));
                members.push(("sampled_mask", bools(&branch.sampled_mask())));
                members.push(("logprobs", float_values(&branch.logprobs())));
                members.push(("advantages", nullable(branch.advantages())));
                members.push((
                    "mm_token_type_ids",
                    branch.mm_token_type_ids().map_or(Value::Null, ints),
                ));
            }
            if has("usage") {
                members.push(("usage", usage_value(branch.usage())));
            }
            if has("routed_experts") {
                members.push((
                    "routed_experts",
                    branch
                        .routed_experts()
                        .unwrap()
                        .map_or(Value::Null, |rows| experts_value(&rows)),
                ));
            }
            if has("sampling_mask") {
                members.push((
                    "sampling_mask",
                    branch.sampling_mask().map_or(Value::Null, |mask| mask_value(&mask)),
                ));
            }
            for view in &views {
                match *view {
                    "reference_logprobs" => {
                        members.push((view, nullable(branch.reference_logprobs())));
                    }
                    "trainer_logprobs" => {
                        members.push((view, nullable(branch.trainer_logprobs())));
                    }
                    "entropies" => members.push((view, nullable(branch.entropies()))),
                    _ => {
                        if let Some(name) = view.strip_prefix("loss_weights:") {
                            let weights = match branch.loss_weights(name) {
                                Ok(weights) => nullable(weights),
                                Err(_) => error("length_mismatch"),
                            };
                            members.push((view, weights));
                        }
                    }
                }
            }
            object(members)
        })
        .collect();
    let leaves: Vec<NodeId> = trace.leaves().collect();
    let mut members = vec![
        (
            "nodes",
            Value::Array((0..trace.nodes().len()).map(|i| node_value(trace, i)).collect()),
        ),
        ("leaves", node_ids(&leaves)),
        ("branches", Value::Array(branches)),
        ("num_turns", Value::Int(trace.num_turns() as i64)),
        ("num_branches", Value::Int(trace.num_branches() as i64)),
        ("num_input_tokens", Value::Int(trace.num_input_tokens())),
        ("num_output_tokens", Value::Int(trace.num_output_tokens())),
        ("num_total_tokens", Value::Int(trace.num_total_tokens())),
        ("is_truncated", Value::Bool(trace.is_truncated())),
        ("tools", tool_names(trace.tools())),
    ];
    if !trace.mm_token_type_id_map().is_empty() {
        let record = json::to_value(trace).unwrap();
        members.push((
            "mm_token_type_id_map",
            record.get("mm_token_type_id_map").unwrap().clone(),
        ));
    }
    if has("usage") {
        members.push(("usage", usage_value(trace.usage())));
    }
    if has("text") {
        members.push(("transcript", trace.transcript().as_str().into()));
        members.push(("last_reply", trace.last_reply().into()));
    }
    object(members)
}

/// What is kept up to date step by step has to equal what a fresh trace computes.
fn assert_up_to_date(name: &str, trace: &Trace, views: &[Value], found: &Value) {
    let fresh = trace.clone();
    assert_same(name, "computed anew", &final_value(&fresh, views), found);
}

fn run_scenarios(file: &str, count: usize) {
    let cases = cases(file);
    assert_eq!(cases.len(), count);
    for case in cases {
        let mut run = Run::new(&case.input);
        let views = match case.input.get("views") {
            Some(views) => views.as_array().unwrap(),
            None => &[],
        };
        // Force everything that is computed to be kept up to date from the start.
        let _ = (run.trace.num_branches(), run.trace.causal().len());
        let expected = items(&case.expected, "ops");
        for (i, op) in items(&case.input, "ops").iter().enumerate() {
            let found = run.step(op);
            assert_same(&case.name, &format!("step {i} {op}"), &found, &expected[i]);
        }
        let found = final_value(&run.trace, views);
        let expected = case.expected.get("final").unwrap();
        for (key, value) in expected.as_object().unwrap() {
            let key = key.as_str().unwrap();
            let found = found.get(key).unwrap_or(&Value::Null);
            if let (Some(found), Some(expected)) = (found.as_array(), value.as_array()) {
                for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                    assert_same(&case.name, &format!("{key} {i}"), found, expected);
                }
            }
            assert_same(&case.name, key, found, value);
        }
        assert_same(&case.name, "final state", &found, expected);
        assert_up_to_date(&case.name, &run.trace, views, &found);
    }
}

macro_rules! scenarios {
    ($($test:ident $file:literal $count:literal),* $(,)?) => {$(
        #[test]
        fn $test() {
            run_scenarios($file, $count);
        }
    )*};
}

scenarios! {
    edge_sets_are_applied_as_recorded "edge_application" 41,
    turns_are_stored_as_recorded "turns" 33,
    tokens_are_attributed_as_recorded "tokens" 45,
    branches_are_trainable_as_recorded "trainable" 11,
    tokens_are_counted_as_recorded "accounting" 20,
    mixed_scenarios_end_as_recorded "random_scenarios" 150,
}

#[test]
fn records_are_written_as_recorded() {
    let cases = cases("records");
    assert_eq!(cases.len(), 10);
    for case in cases {
        let mut run = Run::new(&case.input);
        for op in items(&case.input, "ops") {
            run.step(op);
        }
        for i in 0..run.trace.nodes().len() {
            let id = NodeId::new(i as u32);
            run.trace.node_mut(id).unwrap().timestamp = 1_700_000_000.0 + i as f64;
        }
        let options = RecordOptions {
            float_decimals: match case.input.get("float_decimals") {
                None => Some(4),
                Some(Value::Null) => None,
                Some(decimals) => Some(decimals.as_i64().unwrap() as u8),
            },
            exclude_none: case.input.get("exclude_none") == Some(&Value::Bool(true)),
        };
        let text = run.trace.to_json(options).unwrap();
        let found: Value = text.parse().unwrap();
        let expected = case.expected.get("record").unwrap();
        assert_same(&case.name, "record", &found, expected);
        // A record that is read and written again is the same text.
        let again = Trace::from_json(text.as_bytes()).unwrap();
        assert_eq!(again.to_json(options).unwrap(), text, "{}", case.name);
    }
}
