//! The frame readers of both sides against bytes that nobody meant.

use proptest::prelude::*;
use runtime_core::guest::frame::{
    Decoder, Entry, Event, FileInfo, FileKind, HEADER_LEN, Interface, List, MAX_FDS, Malformed, Message, Request,
    Route, Stdio, Step, User, encode,
};

fn file_info() -> FileInfo {
    FileInfo {
        kind: FileKind::Symlink,
        mode: 0o777,
        size: 1 << 40,
        mtime: -5,
        mtime_nsec: 7,
        uid: 1,
        gid: 2,
    }
}

/// One of each kind of request.
fn requests() -> Vec<Request> {
    let path = || b"/some/path".to_vec();
    let address = std::net::SocketAddr::V6(std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 80, 0, 3));
    vec![
        Request::Configure {
            env: Some(List(vec![(b"A".to_vec(), b"B".to_vec())])),
            restrict: true,
            oom_score_adj: -7,
        },
        Request::Spawn {
            argv: List(vec![b"sh".to_vec(), b"-c".to_vec(), vec![0xff; 300]]),
            env: List(vec![(b"A".to_vec(), Vec::new())]),
            cwd: b"/".to_vec(),
            user: Some(User {
                uid: 1,
                gid: 2,
                groups: List(vec![3, 4]),
            }),
            stdin: Stdio::Null,
            stdout: Stdio::Stream(9),
            stderr: Stdio::Append(path()),
        },
        Request::Signal { target: 3, signal: 15 },
        Request::Release { target: 3 },
        Request::Cancel { target: 3 },
        Request::Open {
            path: path(),
            write: true,
            create: true,
            exclusive: false,
            truncate: true,
            append: false,
            mode: 0o644,
            stream: 5,
        },
        Request::Stat {
            path: path(),
            follow: true,
        },
        Request::List { path: path() },
        Request::ListMore { target: 1 },
        Request::Mkdir {
            path: path(),
            mode: 0o755,
            parents: true,
        },
        Request::Remove {
            path: path(),
            recursive: true,
        },
        Request::Rename {
            from: path(),
            to: path(),
        },
        Request::Symlink {
            target: path(),
            path: path(),
        },
        Request::Readlink { path: path() },
        Request::Chmod {
            path: path(),
            mode: 0o600,
        },
        Request::Chown {
            path: path(),
            uid: 1,
            gid: 2,
        },
        Request::Listen { address, stream: 0 },
        Request::Dial {
            address: "127.0.0.1:1".parse().unwrap(),
            stream: 3,
        },
        Request::Stats {},
        Request::Watch {},
        Request::Resolver { reachable: true },
        Request::HostNetwork { open: true },
        Request::Ping {},
        Request::Shutdown {},
        Request::Data { bytes: vec![1; 1000] },
        Request::Credit { amount: 5 },
        Request::Eof {},
        Request::Reset {},
    ]
}

/// One of each kind of event.
fn events() -> Vec<Event> {
    let interface = || Interface {
        index: 1,
        flags: 2,
        name: b"lo".to_vec(),
    };
    vec![
        Event::Hello {
            magic: *b"SBXg",
            version: 1,
            token: [7; 32],
            pid: 1,
        },
        Event::Done {},
        Event::Failed {
            errno: 2,
            step: Step::Chdir,
        },
        Event::Started { pid: 1 },
        Event::Exited {
            code: 1,
            signal: 0,
            oom: true,
        },
        Event::Opened { size: 5 },
        Event::Info { info: file_info() },
        Event::Entries {
            entries: List(vec![
                Entry {
                    name: b"x".to_vec(),
                    info: file_info()
                };
                3
            ]),
            more: true,
        },
        Event::Target { path: b"t".to_vec() },
        Event::Listening {
            address: "[::1]:80".parse().unwrap(),
        },
        Event::Connected {},
        Event::Network {
            interfaces: List(vec![interface()]),
            routes: List(vec![Route {
                family: 2,
                kind: 1,
                table: 254,
                interface: 2,
                prefix: 24,
                destination: vec![10, 0, 0, 0],
            }]),
            truncated: false,
        },
        Event::Appeared { interface: interface() },
        Event::Pong {},
        Event::Emptied { ended: 3 },
        Event::Accepted {
            stream: 1 << 31,
            peer: "1.2.3.4:5".parse().unwrap(),
        },
        Event::Output { bytes: vec![2; 1000] },
        Event::Grant { amount: 1 },
        Event::End {},
        Event::Closed { errno: 32 },
    ]
}

/// Feeds bytes in pieces and counts frames until the end or a breach. Checks what must hold for any input.
fn feed<M: Message>(bytes: &[u8], piece: usize) -> (usize, Option<Malformed>) {
    let mut decoder = Decoder::new();
    let mut frames = 0;
    for piece in bytes.chunks(piece.max(1)) {
        let mut rest = piece;
        while !rest.is_empty() {
            let spare = decoder.spare();
            let count = spare.len().min(rest.len());
            assert!(count > 0, "a reader always has room");
            assert!(
                spare.len() <= M::MAX + HEADER_LEN + (64 << 10),
                "and never more than a frame and a little"
            );
            spare[..count].copy_from_slice(&rest[..count]);
            decoder.filled(count);
            rest = &rest[count..];
            loop {
                match decoder.next_frame::<M>() {
                    Ok(None) => break,
                    Err(breach) => return (frames, Some(breach)),
                    Ok(Some(frame)) => {
                        assert!(frame.fds <= MAX_FDS);
                        frames += 1;
                        // What was read says the same when it is written.
                        let again = encode(frame.tag, frame.fds as u8, &frame.message).unwrap();
                        let mut second = Decoder::new();
                        let mut at = 0;
                        while at < again.len() {
                            let spare = second.spare();
                            let count = spare.len().min(again.len() - at);
                            spare[..count].copy_from_slice(&again[at..at + count]);
                            second.filled(count);
                            at += count;
                        }
                        let same = second.next_frame::<M>().unwrap().unwrap();
                        assert!(same.tag == frame.tag && same.fds == frame.fds);
                        assert_eq!(encode(same.tag, same.fds as u8, &same.message).unwrap(), again);
                    }
                }
            }
        }
    }
    (frames, None)
}

fn all<M: Message>(messages: &[M]) -> Vec<u8> {
    (1..)
        .zip(messages)
        .flat_map(|(tag, message)| encode(tag, 0, message).unwrap())
        .collect()
}

#[test]
fn every_message_survives_the_wire_in_pieces_of_any_size() {
    let (requests, events) = (requests(), events());
    for piece in [1, 2, 3, 7, 12, 13, 64, 1000, 1 << 20] {
        assert_eq!(feed::<Request>(&all(&requests), piece), (requests.len(), None));
        assert_eq!(feed::<Event>(&all(&events), piece), (events.len(), None));
    }
}

#[test]
fn every_prefix_of_a_frame_waits_for_the_rest() {
    for event in events() {
        let bytes = encode(1, 0, &event).unwrap();
        for len in 0..bytes.len() {
            assert_eq!(feed::<Event>(&bytes[..len], usize::MAX), (0, None));
        }
    }
}

#[test]
fn breaches_are_named() {
    let frame = |len: u32, kind: u8, fds: u8, zero: u16, body: &[u8]| {
        let mut bytes = len.to_le_bytes().to_vec();
        bytes.extend([kind, fds]);
        bytes.extend(zero.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
        bytes.extend(body);
        bytes
    };
    let breach = |bytes: &[u8]| feed::<Event>(bytes, usize::MAX).1.map(|breach| breach.0);
    assert_eq!(breach(&frame(u32::MAX, 65, 0, 0, b"")), Some("a frame is too long"));
    assert_eq!(
        breach(&frame((256 << 10) + 1, 65, 0, 0, b"")),
        Some("a frame is too long")
    );
    assert_eq!(
        breach(&frame(0, 65, 200, 0, b"")),
        Some("a frame announces too many descriptors")
    );
    assert_eq!(
        breach(&frame(0, 65, 0, 1, b"")),
        Some("a frame's reserved bytes are not zero")
    );
    assert_eq!(
        breach(&frame(0, 1, 0, 0, b"")),
        Some("unknown kind of message"),
        "a request is not an event"
    );
    assert_eq!(breach(&frame(1, 65, 0, 0, b"x")), Some("a body has bytes too many"));
    assert_eq!(breach(&frame(2, 67, 0, 0, b"xx")), Some("a body ends early"));
    // A list that claims more entries than it has bytes, and a string that does.
    assert_eq!(
        breach(&frame(5, 71, 0, 0, b"\xff\xff\xff\xff\0")),
        Some("a list is longer than its body")
    );
    assert_eq!(
        breach(&frame(5, 72, 0, 0, b"\xff\xff\xff\xffx")),
        Some("a body ends early")
    );
    assert_eq!(
        breach(&frame(9, 68, 0, 0, b"\0\0\0\0\0\0\0\0\x02")),
        Some("a flag is neither 0 nor 1")
    );
}

#[test]
fn a_message_beyond_the_limit_is_not_encoded() {
    assert!(
        encode(
            1,
            0,
            &Request::Data {
                bytes: vec![0; 4 << 20]
            }
        )
        .is_err()
    );
    assert!(
        encode(
            1,
            0,
            &Event::Output {
                bytes: vec![0; 256 << 10]
            }
        )
        .is_err()
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_break_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..4096), piece in 1usize..600) {
        feed::<Event>(&bytes, piece);
        feed::<Request>(&bytes, piece);
    }

    #[test]
    fn mutated_frames_break_nothing(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        piece in 1usize..600,
    ) {
        let mutate = |mut bytes: Vec<u8>| {
            for (at, byte) in &changes {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            let keep = cut.index(bytes.len()) + 1;
            bytes.truncate(keep);
            bytes
        };
        feed::<Event>(&mutate(all(&events())), piece);
        feed::<Request>(&mutate(all(&requests())), piece);
    }
}
