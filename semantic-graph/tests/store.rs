//! Stores survive what happens to files.
#![cfg(feature = "store")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use semantic_graph::json::Value;
use semantic_graph::store::{
    Episode, Episodes, Options, Reader, Record, StoreError, SyncPolicy, Writer, compact, load, read_traces, recover,
    write_episode,
};
use semantic_graph::{
    EdgeType, Message, ModelCall, RecordOptions, RequestId, Response, SemanticEdge, SemanticEdgeSet, Trace, TurnTokens,
    Usage,
};

fn request(i: usize) -> RequestId {
    RequestId::new(&format!("r{i}")).unwrap()
}

/// A turn of a growing conversation, with tokens and numbers that are easily lost.
fn take_turn(trace: &mut Trace, i: usize) {
    let user = Message::user(&format!("question {i} \u{1f600}\n"));
    let pending = match trace.nodes().len().checked_sub(1) {
        None => trace.prepare_turn([user], vec![]),
        Some(last) => trace.prepare_after(semantic_graph::NodeId::new(last as u32), [user], vec![]),
    }
    .unwrap();
    let mut response = Response::text(&format!("answer {i}"));
    if i.is_multiple_of(2) {
        response.tokens = Some(TurnTokens {
            prompt_ids: trace.branches().last().map_or(vec![], |b| b.token_ids()),
            completion_ids: vec![i as u32, 7],
            completion_logprobs: vec![-0.123_456_789_012_345_67, f64::NEG_INFINITY],
            ..TurnTokens::default()
        });
    }
    let node = trace.commit(&pending, response).unwrap().node;
    trace.push_call(
        ModelCall::committed(node)
            .with_request_id(request(i))
            .with_usage(Usage {
                prompt_tokens: 10,
                completion_tokens: 2,
                cost: Some(0.1),
                ..Usage::default()
            }),
    );
}

fn edges(turns: usize) -> SemanticEdgeSet {
    let mut set = SemanticEdgeSet::new();
    for i in 1..turns {
        for (a, b, label) in [(i - 1, i, "continuation"), (i, i - 1, "vendor:back")] {
            let label = EdgeType::new(label).unwrap();
            set.push(SemanticEdge::new(request(a), request(b), label).unwrap())
                .unwrap();
        }
    }
    set
}

/// Writes a run as it happens; the states after each record.
fn write_run(path: &Path, turns: usize, options: Options) -> (Trace, Vec<Trace>) {
    let mut trace = Trace::new("run");
    let mut writer = Writer::create(path, &trace, options).unwrap();
    let mut states = vec![trace.clone()];
    for i in 0..turns {
        take_turn(&mut trace, i);
        writer.sync(&trace).unwrap();
        states.push(trace.clone());
        let added = trace.add_semantic_edges(&edges(i + 1)).unwrap();
        if !added.is_empty() {
            writer.links(&trace, &added).unwrap();
            states.push(trace.clone());
        }
    }
    trace.is_completed = true;
    trace.stop_condition = Some("max_turns".to_owned());
    trace
        .set_carried("info", "{\"big\":123456789012345678901234567890}".parse().unwrap())
        .unwrap();
    writer.sync(&trace).unwrap();
    states.push(trace.clone());
    writer.seal(&trace).unwrap();
    states.push(trace.clone());
    (trace, states)
}

#[test]
fn a_run_is_read_back_without_loss() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let (trace, _) = write_run(&path, 6, Options::default());
    let loaded = load(&path).unwrap();
    assert_eq!(loaded.trace, trace);
    assert!(loaded.sealed);
    assert_eq!(loaded.torn, None);
    assert_eq!(
        loaded.trace.to_json(RecordOptions::LOSSLESS).unwrap(),
        trace.to_json(RecordOptions::LOSSLESS).unwrap()
    );
}

#[test]
fn a_file_cut_at_any_byte_holds_the_state_after_some_whole_record() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let (_, states) = write_run(&path, 4, Options::default());
    let whole = fs::read(&path).unwrap();
    let ends: Vec<usize> = (0..whole.len()).filter(|i| whole[*i] == b'\n').collect();
    assert_eq!(ends.len(), states.len());
    let cut = dir.path().join("cut.jsonl");
    for len in 0..=whole.len() {
        fs::write(&cut, &whole[..len]).unwrap();
        let records = ends.iter().filter(|end| **end < len).count();
        let loaded = load(&cut).unwrap();
        match records.checked_sub(1) {
            None => assert_eq!(loaded.trace, Trace::new("")),
            Some(last) => assert_eq!(loaded.trace, states[last], "{len} bytes"),
        }
        let clean = len == 0 || whole[len - 1] == b'\n';
        assert_eq!(loaded.torn.is_none(), clean, "{len} bytes");
    }
}

#[test]
fn writing_goes_on_after_a_crash() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let mut trace = Trace::new("run");
    let mut writer = Writer::create(&path, &trace, Options::default()).unwrap();
    take_turn(&mut trace, 0);
    writer.sync(&trace).unwrap();
    drop(writer);
    let good = fs::metadata(&path).unwrap().len();
    fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .unwrap()
        .write_all(b"{\"s\":2,\"c\":\"0000")
        .unwrap();
    let (mut writer, mut again) = Writer::open(&path, Options::default()).unwrap();
    assert_eq!(again, trace);
    assert_eq!(fs::metadata(&path).unwrap().len(), good);
    take_turn(&mut again, 1);
    writer.sync(&again).unwrap();
    drop(writer);
    let loaded = load(&path).unwrap();
    assert_eq!(loaded.trace, again);
    assert_eq!(loaded.torn, None);
}

#[test]
fn damage_in_the_middle_is_an_error_with_its_place_and_recovery_keeps_what_is_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let (_, states) = write_run(&path, 4, Options::default());
    let whole = fs::read(&path).unwrap();
    let ends: Vec<usize> = (0..whole.len()).filter(|i| whole[*i] == b'\n').collect();
    for (record, state) in states.iter().enumerate().take(states.len() - 2) {
        let start = ends[record] + 1;
        // Somewhere within the next record.
        let mut damaged = whole.clone();
        let at = start + (ends[record + 1] - start) / 2;
        damaged[at] ^= 1;
        fs::write(&path, &damaged).unwrap();
        match load(&path) {
            Err(StoreError::Corrupt { offset, .. }) => assert_eq!(offset as usize, start),
            other => panic!("{other:?}"),
        }
        let (trace, failure) = recover(&path).unwrap();
        assert!(matches!(failure, Some(StoreError::Corrupt { .. })));
        assert_eq!(trace, *state);
        assert_eq!(fs::read(&path).unwrap(), &whole[..start]);
        assert_eq!(load(&path).unwrap().trace, *state);
    }
}

#[test]
fn a_missing_record_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    write_run(&path, 3, Options::default());
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let mut without = lines.clone();
    without.remove(2);
    fs::write(&path, without.join("\n") + "\n").unwrap();
    match load(&path) {
        Err(StoreError::Corrupt { reason, .. }) => {
            assert_eq!(reason, "record 3 where 2 should be");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn records_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.jsonl");
    let open = r#"{"t":"open","header":{"id":"x"}}"#;
    let node = r#"{"message":{"role":"user","content":"a"},"timestamp":0}"#;
    for (records, reason) in [
        (vec![r#"{"t":"links","links":[]}"#.to_owned()], "the first record"),
        (vec![open.to_owned(), open.to_owned()], "the first record"),
        (
            vec![open.to_owned(), r#"{"t":"links","links":[[0,1,"x"]]}"#.to_owned()],
            "a link between missing nodes",
        ),
        (
            vec![
                open.to_owned(),
                format!(
                    r#"{{"t":"turn","nodes":[{}]}}"#,
                    node.replace("{\"m", "{\"parent\":0,\"m")
                ),
            ],
            "the parent of node 0",
        ),
        (
            vec![
                open.to_owned(),
                r#"{"t":"seal","seal":{"nodes":1,"calls":0,"links":0,"digest":""}}"#.to_owned(),
            ],
            "the seal counts 1 nodes",
        ),
        (vec![open.to_owned(), r#"{"t":"dance"}"#.to_owned()], "unknown_variant"),
    ] {
        let mut text = String::new();
        for (i, record) in records.iter().enumerate() {
            let checksum = crc32c::crc32c(record.as_bytes());
            text += &format!("{{\"s\":{i},\"c\":\"{checksum:08x}\",\"r\":{record}}}\n");
        }
        fs::write(&path, text).unwrap();
        match load(&path) {
            Err(StoreError::Invalid { reason: found, .. }) => {
                assert!(found.contains(reason), "{found}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn only_one_writer_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let trace = Trace::new("run");
    let writer = Writer::create(&path, &trace, Options::default()).unwrap();
    for result in [
        Writer::open(&path, Options::default()).map(|_| ()),
        compact(&path, Options::default()),
        recover(&path).map(|_| ()),
    ] {
        assert!(matches!(result, Err(StoreError::Locked)), "{result:?}");
    }
    assert!(Writer::create(&path, &trace, Options::default()).is_err());
    drop(writer);
    assert!(Writer::open(&path, Options::default()).is_ok());
}

#[test]
fn a_sealed_store_takes_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let mut trace = Trace::new("run");
    let mut writer = Writer::create(&path, &trace, Options::default()).unwrap();
    writer.seal(&trace).unwrap();
    take_turn(&mut trace, 0);
    assert!(matches!(writer.sync(&trace), Err(StoreError::Sealed)));
    drop(writer);
    assert!(matches!(
        Writer::open(&path, Options::default()),
        Err(StoreError::Sealed)
    ));
}

#[test]
fn a_trace_that_lost_nodes_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let mut trace = Trace::new("run");
    take_turn(&mut trace, 0);
    let mut writer = Writer::create(&path, &trace, Options::default()).unwrap();
    assert!(matches!(writer.sync(&Trace::new("run")), Err(StoreError::Diverged(_))));
}

#[test]
fn compaction_keeps_the_trace_and_shortens_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let mut trace = Trace::new("run");
    let mut writer = Writer::create(&path, &trace, Options::default()).unwrap();
    for i in 0..20 {
        take_turn(&mut trace, i);
        trace.stop_condition = Some(format!("state {i}"));
        writer.sync(&trace).unwrap();
        let added = trace.add_semantic_edges(&edges(i + 1)).unwrap();
        writer.links(&trace, &added).unwrap();
    }
    drop(writer);
    let before = fs::metadata(&path).unwrap().len();
    compact(&path, Options::default()).unwrap();
    assert!(fs::metadata(&path).unwrap().len() < before);
    assert_eq!(load(&path).unwrap().trace, trace);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    let (mut writer, mut trace) = Writer::open(&path, Options::default()).unwrap();
    take_turn(&mut trace, 20);
    writer.sync(&trace).unwrap();
    drop(writer);
    assert_eq!(load(&path).unwrap().trace, trace);
}

#[test]
fn links_that_came_before_their_nodes_were_stored_are_written_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let mut trace = Trace::new("run");
    let mut writer = Writer::create(&path, &trace, Options::default()).unwrap();
    take_turn(&mut trace, 0);
    writer.sync(&trace).unwrap();
    take_turn(&mut trace, 1);
    let added = trace.add_semantic_edges(&edges(2)).unwrap();
    assert!(matches!(writer.links(&trace, &added), Err(StoreError::Diverged(_))));
    writer.sync(&trace).unwrap();
    writer.links(&trace, &added).unwrap();
    drop(writer);
    assert_eq!(load(&path).unwrap().trace, trace);
}

#[test]
fn a_growing_file_is_followed_record_by_record() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    write_run(&path, 3, Options::default());
    let whole = fs::read(&path).unwrap();
    let growing = dir.path().join("growing.jsonl");
    let mut file = fs::File::create(&growing).unwrap();
    let mut reader = Reader::open(&growing).unwrap();
    let mut records = 0;
    for (i, byte) in whole.iter().enumerate() {
        file.write_all(&[*byte]).unwrap();
        match reader.next_record().unwrap() {
            Some(record) => {
                assert_eq!(*byte, b'\n');
                assert_eq!(matches!(record, Record::Open { .. }), records == 0);
                records += 1;
                assert_eq!(reader.valid_len(), i as u64 + 1);
            }
            None => assert_ne!(*byte, b'\n'),
        }
    }
    assert_eq!(records, whole.iter().filter(|byte| **byte == b'\n').count());
    assert_eq!(reader.torn(), None);
}

#[test]
fn every_sync_policy_writes_the_same_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    let mut first = Trace::new("run");
    for i in 0..4 {
        take_turn(&mut first, i);
    }
    for (i, sync) in [
        SyncPolicy::EveryRecord,
        SyncPolicy::EveryTurn,
        SyncPolicy::Interval(Duration::ZERO),
        SyncPolicy::Never,
    ]
    .into_iter()
    .enumerate()
    {
        let path = dir.path().join(format!("{i}.jsonl"));
        let options = Options {
            sync,
            ..Options::default()
        };
        let mut writer = Writer::create(&path, &first, options).unwrap();
        writer.seal(&first).unwrap();
        files.push(fs::read(&path).unwrap());
    }
    assert!(files.iter().all(|file| *file == files[0]));
}

#[test]
fn episodes_go_to_the_reference_and_back() {
    let mut trace = Trace::new("one");
    for i in 0..3 {
        take_turn(&mut trace, i);
    }
    trace
        .set_carried("task", "{\"type\":\"T\",\"x\":null}".parse().unwrap())
        .unwrap();
    let episode = Episode {
        traces: vec![trace.clone(), Trace::new("two")],
        extra: vec![("id".into(), Value::from("e"))],
    };
    let mut file = b"\n".to_vec();
    write_episode(&mut file, &episode).unwrap();
    file.extend_from_slice(b"  \n");
    write_episode(&mut file, &Episode::default()).unwrap();
    let read: Vec<Episode> = Episodes::new(&*file).map(Result::unwrap).collect();
    assert_eq!(read.len(), 2);
    assert_eq!(read[1], Episode::default());
    assert_eq!(read[0].extra, episode.extra);
    assert_eq!(
        read[0].traces[0].to_json(RecordOptions::STORED).unwrap(),
        trace.to_json(RecordOptions::STORED).unwrap()
    );
    let nodes = read[0].traces[0].nodes();
    assert_eq!(nodes[1].tokens().logprobs[0], -0.1235);
    assert!(nodes[1].tokens().logprobs[1].is_nan(), "null is what JSON has");
}

#[test]
fn traces_are_read_from_any_kind_of_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let (trace, _) = write_run(&path, 3, Options::default());
    assert_eq!(read_traces(&path).unwrap(), std::slice::from_ref(&trace));

    let record = trace.to_json(RecordOptions::STORED).unwrap();
    let pretty: serde_json::Value = serde_json::from_str(&record).unwrap();
    fs::write(&path, serde_json::to_string_pretty(&pretty).unwrap()).unwrap();
    let read = read_traces(&path).unwrap();
    assert_eq!(read.len(), 1);
    assert_eq!(read[0].nodes().len(), trace.nodes().len());

    let mut lines = b"\n".to_vec();
    for _ in 0..2 {
        let episode = Episode {
            traces: vec![trace.clone(), Trace::new("other")],
            extra: vec![],
        };
        write_episode(&mut lines, &episode).unwrap();
    }
    fs::write(&path, &lines).unwrap();
    assert_eq!(read_traces(&path).unwrap().len(), 4);
    fs::write(&path, "no trace").unwrap();
    assert!(matches!(read_traces(&path), Err(StoreError::Json(_))));
}

#[cfg(feature = "zstd")]
mod compressed {
    use super::*;

    const COMPRESSED: Options = Options {
        sync: SyncPolicy::EveryTurn,
        zstd_level: Some(3),
    };

    #[test]
    fn a_compressed_run_is_read_back_without_loss_and_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.jsonl.zst");
        let mut trace = Trace::new("run");
        let mut writer = Writer::create(&path, &trace, COMPRESSED).unwrap();
        for i in 0..5 {
            take_turn(&mut trace, i);
            writer.sync(&trace).unwrap();
        }
        drop(writer);
        assert_eq!(load(&path).unwrap().trace, trace);
        let (mut writer, mut trace) = Writer::open(&path, Options::default()).unwrap();
        take_turn(&mut trace, 5);
        writer.sync(&trace).unwrap();
        drop(writer);
        assert_eq!(load(&path).unwrap().trace, trace);
        assert_eq!(fs::read(&path).unwrap()[..4], [0x28, 0xb5, 0x2f, 0xfd]);
    }

    #[test]
    fn a_compressed_file_cut_at_any_byte_holds_the_state_after_some_frame() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.jsonl.zst");
        let (_, states) = write_run(&path, 3, COMPRESSED);
        let whole = fs::read(&path).unwrap();
        let cut = dir.path().join("cut");
        let mut seen = 0;
        for len in 4..=whole.len() {
            fs::write(&cut, &whole[..len]).unwrap();
            let loaded = load(&cut).unwrap();
            let state = states.iter().position(|state| *state == loaded.trace);
            if loaded.trace == Trace::new("") {
                assert_eq!(seen, 0);
                continue;
            }
            let state = state.unwrap();
            assert!(state >= seen, "the state never goes back");
            seen = state;
            let (writer, trace) = match Writer::open(&cut, Options::default()) {
                Ok(opened) => opened,
                Err(StoreError::Sealed) => continue,
                Err(error) => panic!("{error}"),
            };
            assert_eq!(trace, loaded.trace);
            drop(writer);
            assert_eq!(load(&cut).unwrap().torn, None);
        }
        assert_eq!(seen + 2, states.len(), "the last two states are equal");
    }

    #[test]
    fn compaction_changes_between_plain_and_compressed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let (trace, _) = write_run(&path, 30, Options::default());
        let plain = fs::metadata(&path).unwrap().len();
        compact(&path, COMPRESSED).unwrap();
        assert!(fs::metadata(&path).unwrap().len() * 4 < plain);
        let loaded = load(&path).unwrap();
        assert_eq!(loaded.trace, trace);
        assert!(loaded.sealed);
        compact(&path, Options::default()).unwrap();
        assert_eq!(load(&path).unwrap().trace, trace);
    }

    #[test]
    fn recovery_of_a_compressed_file_writes_the_good_part_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.jsonl.zst");
        let (_, states) = write_run(&path, 6, COMPRESSED);
        let mut whole = fs::read(&path).unwrap();
        let middle = whole.len() / 2;
        whole[middle] ^= 0x55;
        fs::write(&path, &whole).unwrap();
        assert!(load(&path).is_err());
        let (trace, failure) = recover(&path).unwrap();
        assert!(failure.is_some());
        assert!(states.contains(&trace));
        assert!(!trace.nodes().is_empty());
        assert_eq!(load(&path).unwrap().trace, trace);
    }
}

#[test]
fn files_of_other_kinds_are_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notes");
    let beginnings: [&[u8]; 8] = [
        b"important notes",
        b"important notes\nmore\n",
        b"{\"traces\":[]}\n",
        b"[]",
        b"\n",
        b"(\xb5/ no frame",
        b"\xff\xfe",
        b"{\"s\":1,\"c\":\"00000000\",\"r\":{}}",
    ];
    for content in beginnings {
        std::fs::write(&path, content).unwrap();
        let shown = String::from_utf8_lossy(content);
        assert!(matches!(load(&path), Err(StoreError::NotAStore)), "{shown}");
        assert!(matches!(recover(&path), Err(StoreError::NotAStore)), "{shown}");
        let opened = Writer::open(&path, Options::default());
        assert!(matches!(opened, Err(StoreError::NotAStore)), "{shown}");
        assert!(compact(&path, Options::default()).is_err(), "{shown}");
        assert_eq!(std::fs::read(&path).unwrap(), content);
    }
    // The torn beginning of a store is one, down to nothing at all.
    let whole = br#"{"s":0,"c":"00000000","r":{"t":"open""#;
    for end in 0..whole.len() {
        std::fs::write(&path, &whole[..end]).unwrap();
        assert!(load(&path).unwrap().trace.nodes().is_empty(), "{end}");
    }
}

#[test]
fn a_damaged_episode_is_not_taken_for_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("traces.jsonl");
    std::fs::write(&path, "{\"traces\":[{\"nodes\":[{}]}]}\n").unwrap();
    assert!(matches!(read_traces(&path), Err(StoreError::Json(_))));
}
