//! [`Value`]: opaque JSON that survives a round trip.

use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

use super::{MAX_DEPTH, RAW_TOKEN, Style, parse_value, write_value};
use crate::code::{Code, Coded};

/// A JSON string, which may hold lone surrogates (kept in generalised UTF-8, also called WTF-8).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JsonString(Box<[u8]>);

impl JsonString {
    /// From bytes that the lexer produced.
    pub(crate) fn from_wtf8(bytes: impl Into<Box<[u8]>>) -> Self {
        Self(bytes.into())
    }

    /// The text, unless it holds a lone surrogate.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }

    /// The text in generalised UTF-8; its byte order is the order of code points.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<&str> for JsonString {
    fn from(text: &str) -> Self {
        Self(text.as_bytes().into())
    }
}

impl From<String> for JsonString {
    fn from(text: String) -> Self {
        Self(text.into_bytes().into())
    }
}

impl PartialEq<str> for JsonString {
    fn eq(&self, other: &str) -> bool {
        *self.0 == *other.as_bytes()
    }
}

impl PartialEq<&str> for JsonString {
    fn eq(&self, other: &&str) -> bool {
        *self.0 == *other.as_bytes()
    }
}

impl fmt::Debug for JsonString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&String::from_utf8_lossy(&self.0), f)
    }
}

/// The members of an object in the order of their first appearance.
pub type Object = Vec<(JsonString, Value)>;

/// Any JSON value.
///
/// Equal values have equal text: `1`, `1.0`, `0.0` and `-0.0` all differ, and NaN equals itself.
#[derive(Clone, Debug, Default)]
pub enum Value {
    /// `null`
    #[default]
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number without fraction and exponent, within 64 bits.
    Int(i64),
    /// A number without fraction and exponent, beyond 64 bits: sign and digits.
    BigInt(Box<str>),
    /// Any other number; also the literals `NaN`, `Infinity` and `-Infinity`.
    Float(f64),
    /// A string.
    String(JsonString),
    /// An array.
    Array(Vec<Value>),
    /// An object; keys are unique, the last value of a repeated key won.
    Object(Object),
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Value::Null, Value::Null) => true,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::Int(a), Value::Int(b)) => a == b,
            (Value::BigInt(a), Value::BigInt(b)) => a == b,
            (Value::Float(a), Value::Float(b)) => a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
            (Value::String(a), Value::String(b)) => a == b,
            (Value::Array(a), Value::Array(b)) => a == b,
            (Value::Object(a), Value::Object(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Value {}

impl Value {
    /// The member `key` of an object.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.as_object()?
            .iter()
            .find(|(name, _)| *name == key)
            .map(|(_, value)| value)
    }

    /// The text of a string without lone surrogates.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(text) => text.as_str(),
            _ => None,
        }
    }

    /// The items of an array.
    #[must_use]
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Value::Array(items) => Some(items),
            _ => None,
        }
    }

    /// The members of an object.
    #[must_use]
    pub fn as_object(&self) -> Option<&Object> {
        match self {
            Value::Object(members) => Some(members),
            _ => None,
        }
    }

    /// The number, if it is an integer within 64 bits.
    #[must_use]
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Value::Int(number) => Some(*number),
            _ => None,
        }
    }

    /// Whether this is `null`.
    #[must_use]
    pub fn is_null(&self) -> bool {
        matches!(self, Value::Null)
    }

    /// JSON text in the given style.
    #[must_use]
    pub fn to_text(&self, style: Style) -> String {
        let mut out = Vec::new();
        write_value(&mut out, self, style);
        String::from_utf8(out).unwrap_or_default()
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(Style::RECORD))
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Value::String(text.into())
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Value::Int(number)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Value::Bool(flag)
    }
}

impl std::str::FromStr for Value {
    type Err = super::Error;
    fn from_str(text: &str) -> Result<Self, super::Error> {
        parse_value(text)
    }
}

/// A text that only the writer of this module takes as raw JSON; other formats see a string.
struct RawLeaf<'a>(&'a str);

impl Serialize for RawLeaf<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0)
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Value::Null => serializer.serialize_unit(),
            Value::Bool(flag) => serializer.serialize_bool(*flag),
            Value::Int(number) => serializer.serialize_i64(*number),
            Value::BigInt(digits) => {
                if let Ok(number) = digits.parse::<u64>() {
                    serializer.serialize_u64(number)
                } else if let Ok(number) = digits.parse::<i128>() {
                    serializer.serialize_i128(number)
                } else {
                    serializer.serialize_newtype_struct(RAW_TOKEN, &RawLeaf(digits))
                }
            }
            Value::Float(number) => serializer.serialize_f64(*number),
            Value::String(text) => serialize_text(text, serializer),
            Value::Array(items) => {
                let mut seq = serializer.serialize_seq(Some(items.len()))?;
                for item in items {
                    seq.serialize_element(item)?;
                }
                seq.end()
            }
            Value::Object(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                for (key, value) in members {
                    map.serialize_entry(key, value)?;
                }
                map.end()
            }
        }
    }
}

fn serialize_text<S: Serializer>(text: &JsonString, serializer: S) -> Result<S::Ok, S::Error> {
    match text.as_str() {
        Some(text) => serializer.serialize_str(text),
        None => {
            let mut out = Vec::new();
            super::write::write_string(&mut out, text.as_bytes(), false);
            let out = String::from_utf8(out).unwrap_or_default();
            serializer.serialize_newtype_struct(RAW_TOKEN, &RawLeaf(&out))
        }
    }
}

impl Serialize for JsonString {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize_text(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct(RAW_TOKEN, ValueVisitor { depth: 0 })
    }
}

struct ValueVisitor {
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for ValueVisitor {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if self.depth > MAX_DEPTH {
            return Err(de::Error::custom(Coded(Code::TooDeep, "nested too deep")));
        }
        deserializer.deserialize_any(self)
    }
}

/// What `serde_json` calls a number when it keeps its text.
const SERDE_JSON_NUMBER: &str = "$serde_json::private::Number";

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    /// Raw JSON text, from the reader of this module.
    fn visit_bytes<E: de::Error>(self, text: &[u8]) -> Result<Value, E> {
        let text = std::str::from_utf8(text).map_err(|_| E::custom(Coded(Code::InvalidText, "not UTF-8")))?;
        parse_value(text).map_err(|error| E::custom(Coded(error.code(), error.detail())))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        DeserializeSeed::deserialize(self, deserializer)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        DeserializeSeed::deserialize(self, deserializer)
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Value, E> {
        Ok(Value::Bool(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(match i64::try_from(number) {
            Ok(number) => Value::Int(number),
            Err(_) => Value::BigInt(number.to_string().into()),
        })
    }

    fn visit_i128<E>(self, number: i128) -> Result<Value, E> {
        Ok(match i64::try_from(number) {
            Ok(number) => Value::Int(number),
            Err(_) => Value::BigInt(number.to_string().into()),
        })
    }

    fn visit_u128<E>(self, number: u128) -> Result<Value, E> {
        Ok(match i64::try_from(number) {
            Ok(number) => Value::Int(number),
            Err(_) => Value::BigInt(number.to_string().into()),
        })
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::String(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(ValueVisitor { depth: self.depth + 1 })? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut members: Object = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if members.is_empty() && key == SERDE_JSON_NUMBER {
                let text: String = map.next_value()?;
                return parse_value(&text).map_err(|error| de::Error::custom(Coded(error.code(), error.detail())));
            }
            let value = map.next_value_seed(ValueVisitor { depth: self.depth + 1 })?;
            members.push((key.into(), value));
        }
        Ok(Value::Object(super::lexer::last_of_each_key(members)))
    }
}
