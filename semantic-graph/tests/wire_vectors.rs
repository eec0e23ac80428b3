//! Recorded answers for what needs no graph: validation, headers, rounding.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use semantic_graph::json::{self, Segment, Value};
use semantic_graph::{
    AcpInfo, Message, MessageNode, ModelCall, NodeTokens, ParentLink, RecordOptions, SemanticEdge, SemanticEdgeSet,
    Tool, Trace, take_request_id,
};
use support::*;

fn reread<T>(value: &Value) -> Result<Value, json::Error>
where
    T: serde::de::DeserializeOwned + serde::Serialize,
{
    let from_tree = json::from_value::<T>(value);
    let from_text = json::from_str::<T>(&json::to_string(value).unwrap());
    match (from_tree, from_text) {
        (Ok(a), Ok(b)) => {
            let a = json::to_value(&a).unwrap();
            assert_eq!(a, json::to_value(&b).unwrap());
            Ok(a)
        }
        (Err(a), Err(b)) => {
            assert_eq!(a.code(), b.code(), "{value}");
            Err(b)
        }
        (a, b) => panic!("tree and text disagree on {value}: {:?} {:?}", a.err(), b.err()),
    }
}

fn validate(schema: &str, value: &Value) -> Result<Value, json::Error> {
    match schema {
        "SemanticEdgeSet" => reread::<SemanticEdgeSet>(value),
        "SemanticEdge" => reread::<SemanticEdge>(value),
        "ParentLink" => reread::<ParentLink>(value),
        "ACPInfo" => reread::<AcpInfo>(value),
        "MessageNode" => reread::<WithoutTimestamp>(value),
        "Message" => reread::<Message>(value),
        "ModelCall" => reread::<ModelCall>(value),
        "Tool" => reread::<Tool>(value),
        other => panic!("unknown schema {other}"),
    }
}

/// The vectors show nodes without their creation time, and with the two binary fields.
struct WithoutTimestamp(MessageNode);

impl<'de> serde::Deserialize<'de> for WithoutTimestamp {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        MessageNode::deserialize(deserializer).map(Self)
    }
}

impl serde::Serialize for WithoutTimestamp {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        assert!(self.0.tokens().routed_experts.is_none());
        assert!(self.0.tokens().sampling_mask.is_none());
        let Ok(Value::Object(mut members)) = json::to_value(&self.0) else {
            panic!("a node is an object")
        };
        members.retain(|(key, _)| *key != "timestamp");
        members.push(("routed_experts".into(), Value::Null));
        members.push(("sampling_mask".into(), Value::Null));
        Value::Object(members).serialize(serializer)
    }
}

#[test]
fn values_are_accepted_and_refused_as_recorded() {
    let cases = cases("validation");
    assert_eq!(cases.len(), 60);
    for case in cases {
        let schema = text_of(&case.input, "schema");
        let value = case.input.get("value").unwrap();
        let ok = case.expected.get("ok") == Some(&Value::Bool(true));
        match validate(schema, value) {
            Ok(found) => {
                assert!(ok, "{}: accepted {value}", case.name);
                assert_same(&case.name, "value", &found, case.expected.get("value").unwrap());
            }
            Err(error) => {
                assert!(!ok, "{}: refused {error}", case.name);
                let classes: Vec<&str> = items(&case.expected, "errors")
                    .iter()
                    .map(|error| text_of(error, "class"))
                    .collect();
                assert!(
                    classes.contains(&error.code().as_str()),
                    "{}: {error}, expected one of {classes:?}",
                    case.name
                );
            }
        }
    }
}

fn path_of(error: &Value) -> Vec<Segment> {
    items(error, "path")
        .iter()
        .map(|step| match step {
            Value::Int(index) => Segment::Index(*index as usize),
            step => Segment::Key(step.as_str().unwrap().to_owned()),
        })
        .collect()
}

#[test]
fn every_violation_of_an_edge_set_is_reported_with_its_path() {
    let mut refused = 0;
    for case in cases("validation") {
        if text_of(&case.input, "schema") != "SemanticEdgeSet" {
            continue;
        }
        let value = case.input.get("value").unwrap();
        match SemanticEdgeSet::validate(value) {
            Ok(set) => {
                assert_eq!(case.expected.get("ok"), Some(&Value::Bool(true)), "{}", case.name);
                assert_eq!(set, json::from_value::<SemanticEdgeSet>(value).unwrap());
            }
            Err(found) => {
                refused += 1;
                let mut found: Vec<_> = found
                    .into_iter()
                    .map(|violation| (violation.path, violation.code.as_str().to_owned()))
                    .collect();
                let mut expected: Vec<_> = items(&case.expected, "errors")
                    .iter()
                    .map(|error| (path_of(error), text_of(error, "class").to_owned()))
                    .collect();
                found.sort();
                expected.sort();
                assert_eq!(found, expected, "{}", case.name);
            }
        }
    }
    assert!(refused >= 20, "{refused}");
}

#[test]
fn the_first_violation_has_its_path() {
    for case in cases("validation") {
        let schema = text_of(&case.input, "schema");
        if ![
            "SemanticEdgeSet",
            "SemanticEdge",
            "ParentLink",
            "ACPInfo",
            "MessageNode",
        ]
        .contains(&schema)
        {
            continue;
        }
        let Err(error) = validate(schema, case.input.get("value").unwrap()) else {
            continue;
        };
        let found = (error.path(), error.code().as_str());
        assert!(
            items(&case.expected, "errors")
                .iter()
                .any(|expected| (path_of(expected), text_of(expected, "class")) == found),
            "{}: {error}",
            case.name
        );
    }
}

#[test]
fn headers_are_taken_as_recorded() {
    let cases = cases("headers");
    assert_eq!(cases.len(), 21);
    for case in cases {
        let mut headers: Vec<(String, String)> = items(&case.input, "headers")
            .iter()
            .map(|pair| {
                let pair = pair.as_array().unwrap();
                (
                    pair[0].as_str().unwrap().to_owned(),
                    pair[1].as_str().unwrap().to_owned(),
                )
            })
            .collect();
        let result = take_request_id(&mut headers);
        if let Some(error) = case.expected.get("error") {
            assert_eq!(
                result.unwrap_err().code().as_str(),
                error.as_str().unwrap(),
                "{}",
                case.name
            );
            assert!(
                headers
                    .iter()
                    .all(|(name, _)| !semantic_graph::is_request_id_header(name))
            );
            continue;
        }
        let id = result.unwrap();
        let id = id.as_ref().map_or(Value::Null, |id| id.as_str().into());
        assert_same(&case.name, "id", &id, case.expected.get("request_id").unwrap());
        // The recording collapses repeats of one spelling to the last value.
        let mut forwarded: Vec<(String, String)> = Vec::new();
        for (name, value) in headers {
            match forwarded.iter_mut().find(|(known, _)| *known == name) {
                Some((_, slot)) => *slot = value,
                None => forwarded.push((name, value)),
            }
        }
        let forwarded = Value::Array(
            forwarded
                .iter()
                .map(|(name, value)| Value::Array(vec![name.as_str().into(), value.as_str().into()]))
                .collect(),
        );
        let expected = case.expected.get("forwarded").unwrap();
        assert_same(&case.name, "forwarded", &forwarded, expected);
    }
}

#[test]
fn streams_are_rounded_as_recorded() {
    let cases = cases("rounding");
    assert_eq!(cases.len(), 8);
    for case in cases {
        let number = |value: &Value| match value {
            Value::Float(number) => *number,
            Value::Int(number) => *number as f64,
            other => panic!("{other}"),
        };
        let mut trace = Trace::new("t");
        let mut node = MessageNode::new(None, Message::assistant("x"));
        node.tokens = Some(Box::new(NodeTokens {
            logprobs: items(&case.input, "values").iter().map(number).collect(),
            ..NodeTokens::default()
        }));
        trace.push_node(node).unwrap();
        let options = match case.input.get("decimals") {
            Some(Value::Int(decimals)) => RecordOptions {
                float_decimals: Some(u8::try_from(*decimals).unwrap()),
                ..RecordOptions::default()
            },
            Some(Value::Null) => RecordOptions::LOSSLESS,
            _ => RecordOptions::default(),
        };
        let record: Value = trace.to_json(options).unwrap().parse().unwrap();
        let found: Vec<u64> = items(&items(&record, "nodes")[0], "logprobs")
            .iter()
            .map(|value| number(value).to_bits())
            .collect();
        let expected: Vec<u64> = items(&case.expected, "values")
            .iter()
            .map(|value| number(value).to_bits())
            .collect();
        assert_eq!(found, expected, "{}", case.name);
    }
}
