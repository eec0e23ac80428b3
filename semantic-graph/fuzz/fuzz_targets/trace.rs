//! Records: whatever is read is written, read back, and drawn and counted without a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use semantic_graph::hash::diff;
use semantic_graph::render::{Format, RenderOptions, render_trace};
use semantic_graph::{EdgeFilter, NodeId, RecordOptions, Trace};

fuzz_target!(|data: &[u8]| {
    let Ok(mut trace) = Trace::from_json(data) else {
        return;
    };
    let text = trace.to_json(RecordOptions::LOSSLESS).expect("a trace is JSON");
    let again = Trace::from_json(text.as_bytes()).expect("what was written is read");
    let twice = again.to_json(RecordOptions::LOSSLESS).expect("a trace is JSON");
    assert_eq!(text, twice);
    assert!(diff(&trace, &again).is_empty() || text.contains("null"));
    let _ = (trace.check(), trace.stats(), trace.transcript(), trace.usage());
    let filter = EdgeFilter::all().with_physical();
    let order = trace.causal().causal_order(&filter);
    assert_eq!(order.iter().flatten().count(), trace.nodes().len());
    for branch in trace.branches() {
        let _ = (branch.is_trainable(), branch.logprobs(), branch.mm_token_type_ids());
        let _ = (branch.num_input_tokens(), branch.loss_weights("a"));
    }
    for format in [Format::Svg, Format::Html, Format::Dot, Format::Mermaid] {
        let _ = render_trace(&trace, format, &RenderOptions::default());
    }
    let prompt: Vec<_> = trace
        .nodes()
        .last()
        .map(|_| trace.path_to(NodeId::new(trace.nodes().len() as u32 - 1)))
        .unwrap_or_default()
        .into_iter()
        .filter_map(|id| Some(trace.node(id)?.message.clone()))
        .collect();
    if let Ok(pending) = trace.prepare_turn(prompt, vec![]) {
        let before = trace.nodes().len();
        trace
            .commit(&pending, semantic_graph::Response::text("x"))
            .expect("no tokens can disagree");
        assert!(trace.nodes().len() > before);
    }
});
