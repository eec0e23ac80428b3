//! Canonical arguments: the canonical form is its own canonical form.
#![no_main]

use libfuzzer_sys::fuzz_target;
use semantic_graph::hash::canonical_arguments;
use semantic_graph::json::Value;

fuzz_target!(|text: &str| {
    let once = canonical_arguments(text).into_owned();
    assert_eq!(canonical_arguments(&once), once);
    if let Ok(value) = text.parse::<Value>() {
        assert!(once.is_ascii());
        assert!(once.parse::<Value>().is_ok(), "{value}");
    } else {
        assert_eq!(once, text);
    }
});
