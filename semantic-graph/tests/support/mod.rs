//! Reading the recorded vectors, and comparing JSON regardless of key order.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

use semantic_graph::json::Value;

pub struct Case {
    pub name: String,
    pub kind: String,
    pub input: Value,
    pub expected: Value,
}

pub fn cases(file: &str) -> Vec<Case> {
    let path = format!("{}/tests/vectors/{file}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect(&path);
    let root: Value = text.parse().expect("vectors are JSON");
    root.get("cases")
        .and_then(Value::as_array)
        .expect("cases")
        .iter()
        .map(|case| Case {
            name: text_of(case, "name").to_owned(),
            kind: text_of(case, "kind").to_owned(),
            input: case.get("input").expect("input").clone(),
            expected: case.get("expected").expect("expected").clone(),
        })
        .collect()
}

pub fn text_of<'a>(value: &'a Value, key: &str) -> &'a str {
    value
        .get(key)
        .and_then(Value::as_str)
        .unwrap_or_else(|| panic!("no text `{key}` in {value}"))
}

pub fn items<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value
        .get(key)
        .and_then(Value::as_array)
        .unwrap_or_else(|| panic!("no array `{key}` in {value}"))
}

/// Equal values, regardless of the order of keys.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len()
                && x.iter()
                    .all(|(key, value)| y.iter().any(|(other, found)| other == key && same(value, found)))
        }
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
        _ => a == b,
    }
}

#[track_caller]
pub fn assert_same(name: &str, what: &str, found: &Value, expected: &Value) {
    assert!(
        same(found, expected),
        "{name}: {what}\n   found {found}\nexpected {expected}"
    );
}

pub fn object(members: Vec<(&str, Value)>) -> Value {
    Value::Object(members.into_iter().map(|(key, value)| (key.into(), value)).collect())
}

pub fn ints<I: Into<i64>>(numbers: impl IntoIterator<Item = I>) -> Value {
    Value::Array(numbers.into_iter().map(|n| Value::Int(n.into())).collect())
}
