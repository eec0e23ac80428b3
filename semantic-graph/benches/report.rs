//! `cargo bench -p semantic-graph --bench report`: the figures the crate is held to, in one run.
//!
//! Environment:
//! - `SEMANTIC_GRAPH_BASELINE`: a JSON file with the reference's times (`median.turns`,
//!   `median.edges`, `median.chain`, `median.chain_tokens`); ratios are shown if it is there.
//! - `SEMANTIC_GRAPH_ONLY`: some of `turns,updates,chain,large`; all by default.
//! - `SEMANTIC_GRAPH_NODES`: messages of the large trace, 1,000,000 by default.
//!
//! Times are processor time of this process, and the best of several runs: both are what a shared
//! machine distorts least. Everything timed runs on one thread and waits for nothing.

mod workload;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use semantic_graph::json::{self, Value};
use semantic_graph::store::{Options, Reader, SyncPolicy, Writer, load};
use semantic_graph::{
    EdgeFeed, EdgeFilter, EdgeType, Message, MessageNode, ModelCall, NodeId, ParentLink, SemanticEdge, SemanticEdgeSet,
    Trace,
};
use workload::{EdgeTexts, Prompts, edges, pad, payload, request, store_chain, store_turns, turns};

/// A point in the processor time of this process.
struct Instant(Duration);

impl Instant {
    fn now() -> Self {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Self(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    fn elapsed(&self) -> Duration {
        Self::now().0 - self.0
    }
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("generate") => return generate(args[2].as_ref(), args[3].parse()?),
        Some("load") => return measure_load(args[2].as_ref()),
        Some("updates") => return measure_updates(&args[2], args[3].parse()?, args[4].parse()?),
        // For tools that count instructions and cache misses, with which the clock may not work.
        Some("count") => return publish(Way::Growing, args[2].parse()?, args[3].parse()?, &mut || ()),
        // `cargo test --benches` runs this too; it measures nothing then.
        Some("--bench") => {}
        _ => return Ok(()),
    }
    let baseline = baseline()?;
    let baseline = |path: &[&str]| -> Option<f64> {
        let mut at = baseline.as_ref()?;
        for key in path {
            at = at.get(key)?;
        }
        match at {
            Value::Float(number) => Some(*number),
            Value::Int(number) => Some(*number as f64),
            _ => None,
        }
    };
    let only = std::env::var("SEMANTIC_GRAPH_ONLY").unwrap_or_default();
    let wanted = |part: &str| only.is_empty() || only.split(',').any(|name| name == part);
    if wanted("turns") {
        report_turns(&baseline);
    }
    if wanted("updates") {
        report_updates(&baseline)?;
    }
    if wanted("chain") {
        report_chain(&baseline);
    }
    if wanted("large") {
        report_large()?;
    }
    Ok(())
}

fn baseline() -> Outcome<Option<Value>> {
    let Ok(path) = std::env::var("SEMANTIC_GRAPH_BASELINE") else {
        println!("no SEMANTIC_GRAPH_BASELINE: no ratios to the reference");
        return Ok(None);
    };
    let root: Value = std::fs::read_to_string(path)?.parse()?;
    Ok(root.get("median").cloned())
}

fn best(runs: usize, mut run: impl FnMut() -> Duration) -> f64 {
    (0..runs).map(|_| run().as_secs_f64()).fold(f64::INFINITY, f64::min)
}

fn ratio(reference: Option<f64>, seconds: f64) -> String {
    match reference {
        Some(reference) => format!("{:>8.0}x the reference", reference / seconds),
        None => String::new(),
    }
}

fn time_turns(count: usize, prompts: Prompts) -> f64 {
    let input = turns(count);
    best(5, || {
        let mut spent = Duration::ZERO;
        let trace = store_turns(&input, prompts, &mut |step| {
            let start = Instant::now();
            step();
            spent += start.elapsed();
        });
        assert_eq!(trace.num_turns(), count);
        spent
    })
}

fn report_turns(baseline: &dyn Fn(&[&str]) -> Option<f64>) {
    println!("\nturns: 10,000 in conversations of 100, no tokens (prepare, commit, record the call)");
    let reference = baseline(&["turns", "prepare_s"])
        .zip(baseline(&["turns", "commit_s"]))
        .map(|(prepare, commit)| prepare + commit);
    for (name, prompts) in [
        ("whole prompts, shared messages", Prompts::Shared),
        ("whole prompts, fresh messages", Prompts::Fresh),
        ("only the tail", Prompts::Tail),
    ] {
        let one = time_turns(10_000, prompts);
        let two = time_turns(20_000, prompts);
        println!(
            "  {name:<32} {:>8.2} µs per turn  doubled: {:.2}x{}",
            one * 1e6 / 10_000.0,
            two / one,
            ratio(reference, one)
        );
    }
}

/// Updates that are timed together.
const STRETCH: usize = 125;

/// How updates reach a trace.
#[derive(Clone, Copy)]
enum Way {
    /// One set to which edges are added as they arrive.
    Growing,
    /// Payloads that repeat all edges, through a feed.
    Payloads,
    /// No graph: comparing each payload with the one before, which is the least that reading
    /// payloads can cost.
    Floor,
}

const WAYS: [(&str, Way); 3] = [
    ("growing", Way::Growing),
    ("payloads", Way::Payloads),
    ("floor", Way::Floor),
];

/// One update. Out of line, so that valgrind can tell it from its surroundings.
#[inline(never)]
fn publish_growing(trace: &mut Trace, set: &mut SemanticEdgeSet, parts: &EdgeTexts, len: usize) -> Outcome<()> {
    for k in set.len()..len {
        set.push(parts.edge(k))?;
    }
    trace.add_semantic_edges(set)?;
    Ok(())
}

/// How many instructions the updates of a growing set take; none without valgrind.
fn count_instructions(turn_count: usize, updates: usize) -> Outcome<Option<f64>> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg("--toggle-collect=report::publish_growing*")
        .arg(std::env::current_exe()?)
        .args(["count", &turn_count.to_string(), &updates.to_string()])
        .output();
    let Ok(output) = output else { return Ok(None) };
    let text = String::from_utf8_lossy(&output.stderr);
    let count = text.lines().find_map(|line| line.split("Collected : ").nth(1));
    Ok(count
        .and_then(|count| count.trim().parse().ok())
        .filter(|count| *count > 0.0))
}

/// Does `updates` updates of ten edges; `lap` is called after every stretch of them.
fn publish(way: Way, turn_count: usize, updates: usize, lap: &mut dyn FnMut()) -> Outcome<()> {
    let count = 10 * updates;
    let mut trace = store_turns(&turns(turn_count), Prompts::Shared, &mut |step| step());
    let parts = EdgeTexts::new(count, turn_count);
    let (mut text, ends) = payload(count, turn_count);
    text.extend_from_slice(b"]}");
    let mut set = SemanticEdgeSet::new();
    let mut feed = EdgeFeed::new();
    let mut before: Vec<u8> = Vec::new();
    lap();
    for update in 1..=updates {
        let end = ends[10 * update - 1];
        match way {
            Way::Growing => publish_growing(&mut trace, &mut set, &parts, 10 * update)?,
            Way::Payloads => {
                let kept = [text[end], text[end + 1]];
                text[end..end + 2].copy_from_slice(b"]}");
                trace.add_semantic_edges(feed.read(&text[..end + 2])?)?;
                text[end..end + 2].copy_from_slice(&kept);
            }
            Way::Floor => {
                assert!(text[..end].starts_with(&before));
                before.extend_from_slice(&text[before.len()..end]);
            }
        }
        if update % STRETCH == 0 {
            lap();
        }
    }
    let links: usize = trace.nodes().iter().map(|node| node.semantic_parents.len()).sum();
    assert_eq!(links, if matches!(way, Way::Floor) { 0 } else { count });
    Ok(())
}

/// Prints the time of every stretch, in nanoseconds.
fn measure_updates(way: &str, turn_count: usize, updates: usize) -> Outcome<()> {
    let way = WAYS.iter().find(|(name, _)| *name == way).ok_or("no such way")?.1;
    let mut laps = Vec::new();
    publish(way, turn_count, updates, &mut || laps.push(Instant::now()))?;
    for lap in laps.windows(2) {
        println!("{}", (lap[1].0 - lap[0].0).as_nanos());
    }
    Ok(())
}

/// Seconds for updates of each number, each in a process of its own that has done nothing else.
///
/// A run of some milliseconds does not get through on a busy machine without losing its caches to
/// somebody, and the longer it is, the more often. So what counts is the best time of every
/// stretch, and runs of all kinds take turns.
fn time_updates(runs: usize, kinds: &[(&str, usize, usize)]) -> Outcome<Vec<f64>> {
    let me = std::env::current_exe()?;
    let mut best: Vec<Vec<u64>> = vec![Vec::new(); kinds.len()];
    for _ in 0..runs {
        for (best, (way, turn_count, updates)) in best.iter_mut().zip(kinds) {
            let output = Command::new(&me)
                .args(["updates", way, &turn_count.to_string(), &updates.to_string()])
                .output()?;
            if !output.status.success() {
                return Err(format!("{way}: {}", String::from_utf8_lossy(&output.stderr)).into());
            }
            let laps = std::str::from_utf8(&output.stdout)?
                .lines()
                .map(str::parse)
                .collect::<Result<Vec<u64>, _>>()?;
            best.resize(laps.len(), u64::MAX);
            best.iter_mut().zip(laps).for_each(|(best, lap)| *best = lap.min(*best));
        }
    }
    Ok(best.iter().map(|laps| laps.iter().sum::<u64>() as f64 / 1e9).collect())
}

/// Every update is a set of its own, as another parser would make it; making it is not timed.
fn time_foreign_sets(trace: &Trace, updates: usize, count: usize, turn_count: usize) -> f64 {
    let all = edges(count, turn_count);
    let mut trace = trace.clone();
    let mut spent = Duration::ZERO;
    for update in 1..=updates {
        let set = all[..update * count / updates]
            .iter()
            .map(|edge| {
                SemanticEdge::new(edge.source().clone(), edge.target().clone(), edge.label().clone())
                    .expect("two requests")
            })
            .collect();
        let set = SemanticEdgeSet::from_edges(set).expect("edges differ");
        let start = Instant::now();
        trace.add_semantic_edges(&set).expect("all are committed");
        spent += start.elapsed();
    }
    spent.as_secs_f64()
}

fn report_updates(baseline: &dyn Fn(&[&str]) -> Option<f64>) -> Outcome<()> {
    println!("\nupdates: 2,000 cumulative sets growing to 20,000 edges over 10,000 turns");
    let reference = baseline(&["edges", "validate_s"])
        .zip(baseline(&["edges", "apply_s"]))
        .map(|(validate, apply)| validate + apply);
    let kinds = [
        ("growing", 10_000, 2_000),
        ("growing", 10_000, 4_000),
        ("growing", 20_000, 4_000),
    ];
    let growing = time_updates(40, &kinds)?;
    println!(
        "  {:<32} {:>8.2} ms in all     doubled: {:.2}x{}",
        "one set that grows",
        growing[0] * 1e3,
        growing[1] / growing[0],
        ratio(reference, growing[0])
    );
    println!(
        "  {:<32} {:>8.2} ms in all     {:.2}x the above",
        "  with twice the turns, too",
        growing[2] * 1e3,
        growing[2] / growing[0],
    );
    let counts = [(10_000, 2_000), (10_000, 4_000), (20_000, 4_000)]
        .into_iter()
        .map(|(turn_count, updates)| count_instructions(turn_count, updates))
        .collect::<Outcome<Option<Vec<f64>>>>()?;
    match counts {
        Some(counts) => println!(
            "  {:<32} {:>8.2} million       doubled: {:.2}x, with twice the turns {:.2}x",
            "  instructions",
            counts[0] / 1e6,
            counts[1] / counts[0],
            counts[2] / counts[0]
        ),
        None => println!("  no valgrind: instructions are not counted"),
    }
    let kinds = [
        ("payloads", 10_000, 2_000),
        ("floor", 10_000, 2_000),
        ("payloads", 20_000, 4_000),
        ("floor", 20_000, 4_000),
    ];
    let times = time_updates(10, &kinds)?;
    let (one, floor, two, floor_two) = (times[0], times[1], times[2], times[3]);
    println!(
        "  {:<32} {:>8.2} ms in all     doubled: {:.2}x{}",
        "JSON payloads (1.5 GB, 6 GB)",
        one * 1e3,
        two / one,
        ratio(reference, one)
    );
    println!(
        "  {:<32} {:>8.2} ms in all     doubled: {:.2}x   payloads take {:.2} and {:.2} times this",
        "  comparing their bytes alone",
        floor * 1e3,
        floor_two / floor,
        one / floor,
        two / floor_two
    );
    println!(
        "  {:<32} {:>8.2} ms in all     doubled: {:.2}x",
        "  the rest of it",
        (one - floor) * 1e3,
        (two - floor_two) / (one - floor)
    );
    let small = store_turns(&turns(10_000), Prompts::Shared, &mut |step| step());
    let one = time_foreign_sets(&small, 2_000, 20_000, 10_000);
    println!(
        "  {:<32} {:>8.2} ms in all{:19}{}",
        "unrelated sets, applying only",
        one * 1e3,
        "",
        ratio(baseline(&["edges", "apply_s"]), one)
    );
    Ok(())
}

fn report_chain(baseline: &dyn Fn(&[&str]) -> Option<f64>) {
    println!("\nchain: one conversation of 1,000 turns (the caller's own work included)");
    for (name, tokens, key) in [
        ("without tokens", false, "chain"),
        ("with tokens", true, "chain_tokens"),
    ] {
        let time = |count| {
            best(5, || {
                let start = Instant::now();
                let trace = store_chain(count, tokens);
                let spent = start.elapsed();
                assert_eq!(trace.nodes().len(), 2 * count + 1);
                spent
            })
        };
        let one = time(1_000);
        println!(
            "  {name:<32} {:>8.2} ms in all{:19}{}",
            one * 1e3,
            "",
            ratio(baseline(&[key, "total_s"]), one)
        );
    }
}

fn report_large() -> Outcome<()> {
    let nodes = std::env::var("SEMANTIC_GRAPH_NODES").unwrap_or_else(|_| "1000000".to_owned());
    println!("\nlarge: {nodes} messages, three links for each");
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("large.jsonl");
    let me = std::env::current_exe()?;
    for job in ["generate", "load"] {
        let status = Command::new(&me).arg(job).arg(&path).arg(&nodes).status()?;
        if !status.success() {
            return Err(format!("{job} failed: {status}").into());
        }
    }
    Ok(())
}

/// Writes a store: conversations of 100 messages, and links from anywhere to anywhere.
fn generate(path: &Path, nodes: usize) -> Outcome<()> {
    let pad = pad();
    let labels = [
        EdgeType::continuation(),
        EdgeType::subagent_call(),
        EdgeType::agent_message(),
    ];
    let mut trace = Trace::new("large");
    for i in 0..nodes {
        let (conversation, position) = (i / 100, i % 100);
        let parent = (position > 0).then(|| NodeId::new(i as u32 - 1));
        let message = match position {
            0 => Message::system(&format!("You are agent {conversation}.")),
            p if p % 2 == 1 => Message::user(&format!("question {conversation}.{p} {pad}")),
            p => Message::assistant(&format!("answer {conversation}.{p} {pad}")),
        };
        let mut node = MessageNode::new(parent, message);
        node.sampled = position > 0 && position % 2 == 0;
        node.timestamp = 1_700_000_000.0 + i as f64;
        let sampled = node.sampled;
        let id = trace.push_node(node).map_err(|_| "the parent exists")?;
        if sampled {
            trace.push_call(ModelCall::committed(id).with_request_id(request(i)));
        }
    }
    for i in 0..nodes {
        let node = trace.node_mut(NodeId::new(i as u32)).ok_or("the node exists")?;
        node.semantic_parents = (0..3)
            .map(|k| ParentLink {
                node: NodeId::new(((i * 7919 + k * 104_729 + 13) % nodes) as u32),
                label: labels[k].clone(),
            })
            .collect();
    }
    let options = Options {
        sync: SyncPolicy::Never,
        ..Options::default()
    };
    Writer::create(path, &trace, options)?.seal(&trace)?;
    Ok(())
}

/// Resident memory in bytes.
fn resident() -> Outcome<f64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: f64 = statm.split(' ').nth(1).ok_or("statm has a second field")?.parse()?;
    Ok(pages * 4096.0)
}

fn measure_load(path: &Path) -> Outcome<()> {
    let bytes = std::fs::metadata(path)?.len() as f64;
    // Bring the file into the page cache, as the first reader would have.
    std::io::copy(&mut std::fs::File::open(path)?, &mut std::io::sink())?;
    let before = resident()?;
    let start = Instant::now();
    let trace = load(path)?.trace;
    let first = start.elapsed().as_secs_f64();
    let after = resident()?;
    let messages: usize = trace
        .nodes()
        .iter()
        .map(|node| json::to_vec(&*node.message).map(|text| text.len()))
        .sum::<Result<usize, _>>()?;
    println!(
        "  load a file of {:.0} MB           {:>8.2} s             {:.0} MB/s",
        bytes / 1e6,
        first,
        bytes / 1e6 / first
    );
    println!(
        "  memory                           {:>8.0} MB            {:.2}x the messages' JSON ({:.0} MB)",
        (after - before) / 1e6,
        (after - before) / messages as f64,
        messages as f64 / 1e6
    );
    let all = EdgeFilter::all();
    let last = NodeId::new(trace.nodes().len() as u32 - 1);
    let start = Instant::now();
    let found = trace.causal().ancestors(last, &all).len();
    let cold = start.elapsed().as_secs_f64();
    let warm = best(10, || {
        let start = Instant::now();
        assert_eq!(trace.causal().ancestors(last, &all).len(), found);
        start.elapsed()
    });
    println!(
        "  ancestors ({found} of them)     {:>8.2} ms            the first time, with the index: {:.0} ms",
        warm * 1e3,
        cold * 1e3
    );
    let start = Instant::now();
    let groups = trace.causal().components(&all).len();
    println!(
        "  components ({groups} of them)        {:>8.0} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    println!(
        "  memory with the causal index     {:>8.0} MB            {:.2}x",
        (resident()? - before) / 1e6,
        (resident()? - before) / messages as f64
    );
    drop(trace);
    let start = Instant::now();
    let mut reader = Reader::open(path)?;
    let mut records = 0;
    while reader.next_record()?.is_some() {
        records += 1;
    }
    let streamed = start.elapsed().as_secs_f64();
    println!(
        "  stream {records} records          {:>8.2} s             {:.0} MB/s",
        streamed,
        bytes / 1e6 / streamed
    );
    Ok(())
}
