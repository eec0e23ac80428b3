//! Stores: reading anything ends in a trace or a typed error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use semantic_graph::store::{Episodes, Reader};

fuzz_target!(|data: &[u8]| {
    if let Ok(mut reader) = Reader::new(data) {
        while let Ok(Some(_)) = reader.next_record() {}
        assert!(reader.valid_len() <= data.len() as u64);
        let _ = reader.torn();
    }
    for episode in Episodes::new(data).take(100) {
        let _ = episode;
    }
});
