//! The frame readers of host and guest: no panic, bounded memory, and what was read says the same when written again.
//! The first byte chooses the reader and the size of the pieces in which the rest arrives.
#![no_main]

use libfuzzer_sys::fuzz_target;
use runtime_core::guest::frame::{Decoder, Event, HEADER_LEN, MAX_FDS, Message, Request, encode};

fn feed<M: Message>(bytes: &[u8], piece: usize) {
    let mut decoder = Decoder::new();
    for mut rest in bytes.chunks(piece) {
        while !rest.is_empty() {
            let spare = decoder.spare();
            assert!(!spare.is_empty() && spare.len() <= M::MAX + HEADER_LEN + (64 << 10));
            let count = spare.len().min(rest.len());
            spare[..count].copy_from_slice(&rest[..count]);
            decoder.filled(count);
            rest = &rest[count..];
            loop {
                match decoder.next_frame::<M>() {
                    Ok(None) => break,
                    Err(_) => return,
                    Ok(Some(frame)) => {
                        assert!(frame.fds <= MAX_FDS);
                        let again = encode(frame.tag, frame.fds as u8, &frame.message).expect("it was short enough");
                        let mut second = Decoder::new();
                        let mut left = &again[..];
                        while !left.is_empty() {
                            let spare = second.spare();
                            let count = spare.len().min(left.len());
                            spare[..count].copy_from_slice(&left[..count]);
                            second.filled(count);
                            left = &left[count..];
                        }
                        let same = second.next_frame::<M>().expect("it is well-formed").expect("it is whole");
                        assert_eq!(encode(same.tag, same.fds as u8, &same.message).expect("as before"), again);
                    }
                }
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, bytes)) = bytes.split_first() else {
        return;
    };
    let piece = usize::from(choice >> 1) * 8 + 1;
    if choice & 1 == 0 {
        feed::<Event>(bytes, piece);
    } else {
        feed::<Request>(bytes, piece);
    }
});
