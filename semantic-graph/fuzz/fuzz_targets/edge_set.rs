//! Edge sets: every reader agrees, and applying never panics.
#![no_main]

use libfuzzer_sys::fuzz_target;
use semantic_graph::json::{self, Value};
use semantic_graph::{EdgeFeed, Message, MessageNode, ModelCall, SemanticEdgeSet, Trace};

fuzz_target!(|data: &[u8]| {
    // Two payloads, so that the second can go on from the first.
    let (first, second) = match data.iter().position(|byte| *byte == 0) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (data, data),
    };
    let mut trace = Trace::new("fuzz");
    let mut feed = EdgeFeed::new();
    for payload in [first, second] {
        let typed = json::from_slice::<SemanticEdgeSet>(payload);
        let opaque = json::from_slice::<Value>(payload);
        match (&typed, &opaque) {
            (Ok(set), Ok(value)) => {
                assert_eq!(SemanticEdgeSet::validate(value).as_ref(), Ok(set));
                for name in set.edges().iter().flat_map(|e| [e.source(), e.target()]) {
                    let mut node = MessageNode::new(None, Message::assistant("x"));
                    node.sampled = true;
                    if let Ok(id) = trace.push_node(node) {
                        trace.push_call(ModelCall::committed(id).with_request_id(name.clone()));
                    }
                }
            }
            // A repeated key is refused by the typed reader, and settled by the opaque one: from
            // the settled value, both have to agree.
            (Err(_), Ok(value)) => assert_eq!(
                json::from_value::<SemanticEdgeSet>(value).is_ok(),
                SemanticEdgeSet::validate(value).is_ok()
            ),
            (Ok(_), Err(error)) => panic!("typed but not JSON: {error}"),
            (Err(_), Err(_)) => {}
        }
        match (feed.read(payload), typed) {
            (Ok(a), Ok(b)) => {
                assert_eq!(*a, b);
                let before = trace.clone();
                if trace.add_semantic_edges(a).is_err() {
                    assert!(trace == before);
                }
            }
            (Err(a), Err(b)) => assert_eq!(a.code(), b.code()),
            (a, b) => panic!("{a:?} {b:?}"),
        }
    }
});
