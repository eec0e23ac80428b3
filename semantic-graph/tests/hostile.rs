//! Inputs that are too deep, too large, or nonsense: refused or handled, never a crash.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use proptest::prelude::*;
use semantic_graph::json::{self, MAX_DEPTH, Value};
use semantic_graph::{
    AcpInfo, Code, LoadOptions, Message, MessageNode, ModelCall, ParentLink, RecordOptions, SemanticEdge,
    SemanticEdgeSet, Tool, Trace, Usage,
};

fn nested(open: &str, close: &str, depth: usize) -> String {
    format!("{}{}", open.repeat(depth), close.repeat(depth))
}

#[test]
fn nesting_is_read_up_to_the_limit_and_refused_beyond() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let inner = if open == "[" { "" } else { "1" };
        let text = |depth: usize| format!("{}{inner}{}", open.repeat(depth), close.repeat(depth));
        let value: Value = text(MAX_DEPTH).parse().unwrap();
        assert_eq!(json::to_string(&value).unwrap(), text(MAX_DEPTH));
        assert_eq!(text(MAX_DEPTH + 1).parse::<Value>().unwrap_err().code(), Code::TooDeep);
        let millions = open.repeat(3_000_000);
        assert_eq!(millions.parse::<Value>().unwrap_err().code(), Code::TooDeep);
    }
}

#[test]
fn every_place_for_opaque_json_refuses_what_is_too_deep() {
    let deep = nested("[", "]", 2_000_000);
    let refused = |text: String| -> Code {
        match json::from_str::<Trace>(&text) {
            Ok(_) => panic!("accepted"),
            Err(error) => error.code(),
        }
    };
    let node = |message: &str| format!("{{\"nodes\":[{{\"message\":{message}}}]}}");
    for text in [
        format!("{{\"info\":{deep}}}"),
        format!("{{\"unknown\":{deep}}}"),
        format!("{{\"num_input_tokens\":{deep}}}"),
        format!("{{\"tools\":[{{\"name\":\"f\",\"parameters\":{{\"a\":{deep}}}}}]}}"),
        format!("{{\"tools\":[{{\"name\":\"f\",\"x\":{deep}}}]}}"),
        format!("{{\"calls\":[{{\"sampling\":{{\"x\":{deep}}}}}]}}"),
        node(&format!("{{\"role\":\"user\",\"content\":\"a\",\"x\":{deep}}}")),
        node(&format!("{{\"content\":{deep},\"role\":\"user\"}}")),
        node(&format!(
            "{{\"role\":\"assistant\",\"provider_state\":[{{\"a\":{deep}}}]}}"
        )),
    ] {
        assert_eq!(refused(text), Code::TooDeep);
    }
    let edges = format!("{{\"edges\":{deep}}}");
    assert!(json::from_str::<SemanticEdgeSet>(&edges).is_err());
}

#[test]
fn deep_arguments_are_kept_as_text() {
    let arguments = nested("[", "]", 100_000);
    let text = format!(
        "{{\"role\":\"assistant\",\"tool_calls\":[{{\"id\":\"c\",\"name\":\"f\",\"arguments\":\"{arguments}\"}}]}}"
    );
    let message: Message = json::from_str(&text).unwrap();
    assert_eq!(*message.tool_calls()[0].arguments, *arguments);
    #[cfg(feature = "hash")]
    {
        use semantic_graph::hash::{canonical_arguments, message_digest};
        assert_eq!(canonical_arguments(&arguments), arguments);
        assert!(message_digest(&message).is_ok());
        let spaced = nested("[ ", "]", MAX_DEPTH);
        assert_eq!(canonical_arguments(&spaced), nested("[", "]", MAX_DEPTH));
    }
}

#[test]
fn messages_of_a_hundred_megabytes_go_through() {
    let text = "word \\n \u{e9} ".repeat(10_000_000);
    assert!(text.len() >= 100_000_000);
    let mut trace = Trace::new("big");
    trace.push_node(MessageNode::new(None, Message::user(&text))).unwrap();
    let record = trace.to_json(RecordOptions::LOSSLESS).unwrap();
    let again = Trace::from_json(record.as_bytes()).unwrap();
    assert!(again.nodes()[0].message == trace.nodes()[0].message);
    let limited = LoadOptions {
        max_bytes: 100_000_000,
        ..LoadOptions::default()
    };
    let error = Trace::from_json_with(record.as_bytes(), limited).unwrap_err();
    assert_eq!(error.code(), Code::LimitExceeded);
}

#[test]
fn broken_parents_and_links_are_refused_when_loading() {
    let node = |extra: &str| format!("{{\"message\":{{\"role\":\"user\",\"content\":\"a\"}}{extra}}}");
    let load = |nodes: &[String]| {
        json::from_str::<Trace>(&format!("{{\"nodes\":[{}]}}", nodes.join(",")))
            .map_err(|error| error.code())
            .map(|trace| trace.nodes().len())
    };
    let plain = node("");
    assert_eq!(load(&[plain.clone(), node(",\"parent\":0")]), Ok(2));
    for bad in ["0", "1", "7", "-1", "4294967295", "4294967296"] {
        let parent = node(&format!(",\"parent\":{bad}"));
        assert_eq!(load(&[parent, plain.clone()]), Err(Code::InvalidParent), "{bad}");
    }
    let link = |to: &str| node(&format!(",\"semantic_parents\":[{{\"node\":{to},\"type\":\"x\"}}]"));
    assert_eq!(load(&[link("1"), plain.clone()]), Ok(2));
    assert_eq!(load(&[link("2"), plain.clone()]), Err(Code::InvalidLink));
    assert_eq!(load(&[link("-1"), plain]), Err(Code::NegativeNode));
}

#[test]
fn strict_loading_refuses_what_is_usually_tolerated() {
    let text = |node: &str| format!("{{\"nodes\":[{{\"message\":{{\"role\":\"user\",\"content\":\"a\"}},{node}}}]}}");
    let strict = LoadOptions {
        strict: true,
        ..LoadOptions::default()
    };
    for (node, code) in [
        ("\"semantic_parents\":[{\"node\":0,\"type\":\"x\"}]", Code::SelfLink),
        ("\"token_ids\":[1,2],\"mask\":[true]", Code::LengthMismatch),
        (
            "\"token_ids\":[1],\"mask\":[true],\"is_content\":[true,true]",
            Code::LengthMismatch,
        ),
        (
            "\"token_ids\":[1],\"mask\":[false],\"logprobs\":[0.5]",
            Code::LengthMismatch,
        ),
        ("\"loss_weights\":{\"a\":[1.0]}", Code::LengthMismatch),
    ] {
        let text = text(node);
        assert!(Trace::from_json(text.as_bytes()).is_ok());
        let error = Trace::from_json_with(text.as_bytes(), strict).unwrap_err();
        assert_eq!(error.code(), code, "{node}");
    }
    let twice = "{\"nodes\":[{\"message\":{\"role\":\"user\",\"content\":\"a\"}},\
        {\"message\":{\"role\":\"user\",\"content\":\"a\"},\"semantic_parents\":[\
        {\"node\":0,\"type\":\"x\"},{\"node\":0,\"type\":\"x\"}]}]}";
    assert_eq!(
        Trace::from_json(twice.as_bytes()).unwrap().nodes()[1]
            .semantic_parents
            .len(),
        2
    );
    let error = Trace::from_json_with(twice.as_bytes(), strict).unwrap_err();
    assert_eq!(error.code(), Code::DuplicateLink);
}

#[test]
fn text_with_lone_surrogates_is_refused_and_opaque_json_keeps_it() {
    for message in [
        r#"{"role":"user","content":"\ud800"}"#,
        r#"{"role":"user","content":[{"type":"text","text":"a\udc00"}]}"#,
        r#"{"role":"assistant","reasoning_content":"\ud83d"}"#,
        r#"{"role":"tool","tool_call_id":"\udfff","content":""}"#,
        r#"{"content":"\ud800","role":"user"}"#,
    ] {
        let error = json::from_str::<Message>(message).unwrap_err();
        assert_eq!(error.code(), Code::InvalidText, "{message}");
    }
    let kept = r#"{"role":"assistant","content":null,"reasoning_content":null,"tool_calls":null,"provider_state":[{"a\udc00":"\ud800 é","n":-0.0,"i":123456789012345678901234567890,"f":1e+22}]}"#;
    let message: Message = json::from_str(kept).unwrap();
    assert_eq!(json::to_string(&message).unwrap(), kept);
}

#[test]
fn arrays_are_not_taken_for_records() {
    fn both<T: serde::de::DeserializeOwned>(text: &str, other_formats_too: bool) {
        match json::from_str::<T>(text) {
            Ok(_) => panic!("{text} was accepted"),
            Err(error) => assert_eq!(error.code(), Code::WrongType, "{text}"),
        }
        let value: Value = text.parse().unwrap();
        assert!(json::from_value::<T>(&value).is_err());
        if other_formats_too {
            assert!(serde_json::from_str::<T>(text).is_err());
        }
    }
    both::<SemanticEdgeSet>("[[]]", true);
    both::<SemanticEdgeSet>(r#"{"edges":[["a","b","x"]]}"#, true);
    both::<SemanticEdge>(r#"["a","b","x"]"#, true);
    both::<ParentLink>(r#"[0,"x"]"#, true);
    both::<AcpInfo>(r#"["a"]"#, true);
    both::<Message>(r#"["user","a"]"#, true);
    both::<Trace>("[[]]", true);
    both::<MessageNode>(r#"[null,[],[],{"role":"user","content":"a"}]"#, false);
    both::<ModelCall>("[0]", false);
    both::<Usage>("[1,2]", false);
    both::<Message>(
        r#"{"role":"assistant","tool_calls":[["c","function","f",null,"{}"]]}"#,
        false,
    );
    both::<Message>(
        r#"{"role":"user","content":[{"type":"image_url","image_url":["u"]}]}"#,
        false,
    );
}

#[test]
fn provider_state_without_identity_is_refused() {
    for (item, ok) in [
        (r#"{"type":5}"#, false),
        (r#"{"type":["x"]}"#, false),
        (r#"{"type":true}"#, false),
        (r#"{"type":0.5}"#, false),
        (r#"{"type":0}"#, true),
        (r#"{"type":[]}"#, true),
        (r#"{"type":false}"#, true),
        (r#"{"type":null,"role":"assistant","content":["x"]}"#, false),
        (r#"{"type":"message","content":[{}]}"#, true),
        (r#"{"type":"other","content":["x"]}"#, true),
    ] {
        let text = format!("{{\"role\":\"assistant\",\"provider_state\":[{item}]}}");
        match json::from_str::<Message>(&text) {
            Ok(_) => assert!(ok, "{item}"),
            Err(error) => {
                assert!(!ok, "{item}");
                assert_eq!(error.code(), Code::InvalidProviderState);
            }
        }
    }
}

#[test]
fn other_formats_of_serde_work_too() {
    let text = r#"{"role":"assistant","content":"x","reasoning_content":null,"tool_calls":[{"id":"c","type":"custom","name":"f","namespace":null,"arguments":"raw"}],"provider_state":[{"a":1,"b":1.5,"c":18446744073709551615}]}"#;
    let by_serde: Message = serde_json::from_str(text).unwrap();
    let by_us: Message = json::from_str(text).unwrap();
    assert_eq!(by_serde, by_us);
    assert_eq!(serde_json::to_string(&by_us).unwrap(), text);
    let mut trace = Trace::new("t");
    trace.push_node(MessageNode::new(None, by_us)).unwrap();
    let record = serde_json::to_value(trace.to_record(RecordOptions::LOSSLESS)).unwrap();
    let again: Trace = serde_json::from_value(record).unwrap();
    assert!(again == trace);
    let error = serde_json::from_str::<ParentLink>("{\"node\":-1,\"type\":\"x\"}").unwrap_err();
    assert!(error.to_string().starts_with("negative_node: "), "{error}");
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        "-?[1-9][0-9]{25,40}".prop_map(|digits| Value::BigInt(digits.into())),
        any::<f64>()
            .prop_filter("finite", |number| number.is_finite())
            .prop_map(Value::Float),
        ".*".prop_map(|text| Value::from(&*text)),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::Array),
            prop::collection::btree_map(".{0,4}", inner, 0..6)
                .prop_map(|members| { Value::Object(members.into_iter().map(|(k, v)| (k.into(), v)).collect()) }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn opaque_json_survives_a_round_trip(value in value()) {
        let text = json::to_string(&value).unwrap();
        prop_assert_eq!(text.parse::<Value>().unwrap(), value.clone());
        prop_assert_eq!(json::from_str::<Value>(&text).unwrap(), value.clone());
        prop_assert_eq!(json::to_value(&value).unwrap(), value);
        // Another reader takes it for JSON too.
        prop_assert!(serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok());
    }

    #[test]
    fn texts_are_json_to_us_when_they_are_to_others(
        text in r#"[ \[\]{}",:0-9.eE+\-truefalsn\\u]{0,24}"#,
    ) {
        let ours = text.parse::<Value>().is_ok();
        let typed = json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
        // Out-of-range floats are infinite to us, as in Python, and an error to serde_json; so
        // only the shape is compared.
        let theirs = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
        prop_assert_eq!(ours, typed);
        prop_assert_eq!(ours, theirs);
    }

    #[test]
    fn no_bytes_break_a_reader(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = json::from_slice::<SemanticEdgeSet>(&bytes);
        let _ = json::from_slice::<Trace>(&bytes);
        let _ = json::from_slice::<MessageNode>(&bytes);
        let _ = json::from_slice::<ModelCall>(&bytes);
        let _ = json::from_slice::<Tool>(&bytes);
    }

    #[test]
    fn no_damage_to_a_record_breaks_its_reader(
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let case = &support::cases("records")[1];
        let record = case.expected.get("record").unwrap();
        let mut text = json::to_vec(record).unwrap();
        let at = at.index(text.len());
        text[at] = byte;
        if let Ok(trace) = Trace::from_json(&text) {
            // Whatever it is now, it is written and read back.
            let again = trace.to_json(RecordOptions::LOSSLESS).unwrap();
            prop_assert!(Trace::from_json(again.as_bytes()).is_ok());
            let _ = (trace.check(), trace.stats(), trace.num_total_tokens());
        }
        text.truncate(cut.index(text.len()));
        prop_assert!(Trace::from_json(&text).is_err());
    }
}
