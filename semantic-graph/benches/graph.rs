//! `cargo bench -p semantic-graph --bench graph`: single operations.

mod workload;

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use semantic_graph::hash::{canonical_arguments, message_digest};
use semantic_graph::{EdgeFeed, EdgeFilter, Message, NodeId, RecordOptions, SemanticEdgeSet, Trace, json};
use workload::{Prompts, edges, payload, store_chain, store_turns, turns};

fn run(count: usize) -> Trace {
    store_turns(&turns(count), Prompts::Shared, &mut |step| step())
}

fn storing_turns(c: &mut Criterion) {
    let mut group = c.benchmark_group("turns");
    group.sample_size(10);
    for count in [2_500, 5_000, 10_000] {
        let input = turns(count);
        group.throughput(Throughput::Elements(count as u64));
        for (name, prompts) in [
            ("shared", Prompts::Shared),
            ("fresh", Prompts::Fresh),
            ("tail", Prompts::Tail),
        ] {
            group.bench_with_input(BenchmarkId::new(name, count), &input, |b, input| {
                b.iter(|| store_turns(input, prompts, &mut |step| step()));
            });
        }
    }
    group.finish();
}

fn one_long_conversation(c: &mut Criterion) {
    let mut group = c.benchmark_group("chain");
    group.sample_size(10);
    for count in [500, 1_000] {
        for (name, tokens) in [("text", false), ("tokens", true)] {
            group.bench_function(BenchmarkId::new(name, count), |b| {
                b.iter(|| store_chain(count, tokens));
            });
        }
    }
    group.finish();
}

fn cumulative_updates(c: &mut Criterion) {
    let mut group = c.benchmark_group("updates");
    group.sample_size(10);
    for scale in [1, 2] {
        let (turn_count, updates, count) = (2_500 * scale, 500 * scale, 5_000 * scale);
        let trace = run(turn_count);
        let all = edges(count, turn_count);
        let (text, ends) = payload(count, turn_count);
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(BenchmarkId::new("growing set", count), |b| {
            b.iter_batched(
                || (trace.clone(), SemanticEdgeSet::new()),
                |(mut trace, mut set)| {
                    for update in 1..=updates {
                        for edge in &all[set.len()..update * count / updates] {
                            set.push(edge.clone()).expect("edges differ");
                        }
                        trace.add_semantic_edges(&set).expect("all are committed");
                    }
                    trace
                },
                BatchSize::LargeInput,
            );
        });
        group.bench_function(BenchmarkId::new("payloads", count), |b| {
            b.iter_batched(
                || (trace.clone(), EdgeFeed::new(), text.clone()),
                |(mut trace, mut feed, mut text)| {
                    for update in 1..=updates {
                        let end = ends[update * count / updates - 1];
                        let kept = [text[end], text[end + 1]];
                        text[end] = b']';
                        text[end + 1] = b'}';
                        let set = feed.read(&text[..end + 2]).expect("valid");
                        trace.add_semantic_edges(set).expect("all are committed");
                        text[end..end + 2].copy_from_slice(&kept);
                        if update == updates {
                            break;
                        }
                    }
                    trace
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

fn identity(c: &mut Criterion) {
    let message = Message::user(&"word ".repeat(2_000));
    let mut group = c.benchmark_group("identity");
    group.throughput(Throughput::Bytes(10_000));
    group.bench_function("message of 10 kB", |b| {
        b.iter(|| message_digest(black_box(&message)));
    });
    let arguments = format!(
        "{{\"path\": \"src/lib.rs\", \"lines\": [1, 2, 3.5], \"text\": \"{}\"}}",
        "line\\n".repeat(100)
    );
    group.throughput(Throughput::Bytes(arguments.len() as u64));
    group.bench_function("arguments", |b| {
        b.iter(|| canonical_arguments(black_box(&arguments)).len());
    });
    group.finish();
}

fn records(c: &mut Criterion) {
    let mut trace = run(10_000);
    let set = SemanticEdgeSet::from_edges(edges(20_000, 10_000)).expect("edges differ");
    trace.add_semantic_edges(&set).expect("all are committed");
    let text = trace.to_json(RecordOptions::STORED).expect("JSON");
    let mut group = c.benchmark_group("record");
    group.sample_size(10);
    group.throughput(Throughput::Bytes(text.len() as u64));
    group.bench_function("write", |b| {
        b.iter(|| trace.to_json(RecordOptions::STORED).map(|text| text.len()));
    });
    group.bench_function("read", |b| {
        b.iter(|| Trace::from_json(text.as_bytes()).map(|trace| trace.nodes().len()));
    });
    group.bench_function("read as opaque JSON", |b| {
        b.iter(|| text.parse::<json::Value>().is_ok());
    });
    group.finish();

    let mut group = c.benchmark_group("queries");
    let all = EdgeFilter::all();
    let graph = trace.causal();
    group.bench_function("ancestors", |b| {
        b.iter(|| graph.ancestors(NodeId::new(20_000), &all).len());
    });
    group.bench_function("components", |b| b.iter(|| graph.components(&all).len()));
    group.bench_function("causal order", |b| {
        b.iter(|| graph.causal_order(&all).len());
    });
    group.bench_function("token counts", |b| {
        b.iter(|| (trace.num_input_tokens(), trace.num_output_tokens()));
    });
    group.finish();
}

criterion_group!(
    benches,
    storing_turns,
    one_long_conversation,
    cumulative_updates,
    identity,
    records
);
criterion_main!(benches);
