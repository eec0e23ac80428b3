//! Whatever arrives in a tunnel, in whatever pieces: no panic, the same answer, the same bytes back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use runtime_core::egress::HelloReader;

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, bytes) = input;
    let mut whole = HelloReader::new();
    let expected = whole.push(bytes);
    let mut reader = HelloReader::new();
    let mut found = Ok(None);
    for part in bytes.chunks(usize::from(piece) + 1) {
        found = reader.push(part);
        if !matches!(found, Ok(None)) {
            break;
        }
    }
    assert_eq!(found, expected);
    if let Ok(Some(hello)) = found {
        let (back, length) = reader.into_bytes();
        assert!(bytes.starts_with(&back) && length <= back.len());
        // The records alone say the same.
        assert_eq!(HelloReader::new().push(&back[..length]), Ok(Some(hello)));
    }
});
