//! [`Tool`]: a tool that the model was offered.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::Serializer;

use crate::code::{Code, Coded};
use crate::json::{Object, Value};
use crate::message::once;
use crate::record::{Fields, Record, RecordOptions, serialize_as_record};

/// A tool that the model was offered.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// `function` by default.
    pub kind: Box<str>,
    /// The name the model calls.
    pub name: Box<str>,
    /// A namespace around the name.
    pub namespace: Option<Box<str>>,
    /// For the model.
    pub description: Box<str>,
    /// A JSON schema of the arguments.
    pub parameters: Object,
    /// Whether the provider enforces the schema.
    pub strict: Option<bool>,
    /// Keys this crate does not know, kept and written after the known ones.
    pub extra: Vec<(Box<str>, Value)>,
}

impl Tool {
    /// A function tool without description or parameters.
    #[must_use]
    pub fn function(name: &str) -> Self {
        Self {
            kind: "function".into(),
            name: name.into(),
            namespace: None,
            description: "".into(),
            parameters: Vec::new(),
            strict: None,
            extra: Vec::new(),
        }
    }

    /// Whether both are the same entry of a trace's registry: name, namespace and type agree.
    #[must_use]
    pub fn same_entry(&self, other: &Self) -> bool {
        self.name == other.name && self.namespace == other.namespace && self.kind == other.kind
    }
}

serialize_as_record!(Tool);

impl Record for Tool {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        fields.put("type", &self.kind)?;
        fields.put("name", &self.name)?;
        fields.put_nullable("namespace", &self.namespace)?;
        fields.put("description", &self.description)?;
        fields.put("parameters", &ObjectRef(&self.parameters))?;
        fields.put_nullable("strict", &self.strict)?;
        for (key, value) in &self.extra {
            if value.is_null() && options.exclude_none {
                continue;
            }
            fields.put(key, value)?;
        }
        fields.end()
    }
}

/// Writes an object without cloning it.
struct ObjectRef<'a>(&'a Object);

impl serde::Serialize for ObjectRef<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de> Deserialize<'de> for Tool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Tool;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a tool")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tool, A::Error> {
                let mut kind = None;
                let mut name = None;
                let mut namespace: Option<Option<Box<str>>> = None;
                let mut description = None;
                let mut parameters: Option<Value> = None;
                let mut strict: Option<Option<bool>> = None;
                let mut extra: Vec<(Box<str>, Value)> = Vec::new();
                while let Some(key) = map.next_key::<Box<str>>()? {
                    match &*key {
                        "type" => once(&mut kind, "type", map.next_value()?)?,
                        "name" => once(&mut name, "name", map.next_value()?)?,
                        "namespace" => once(&mut namespace, "namespace", map.next_value()?)?,
                        "description" => once(&mut description, "description", map.next_value()?)?,
                        "parameters" => once(&mut parameters, "parameters", map.next_value()?)?,
                        "strict" => once(&mut strict, "strict", map.next_value()?)?,
                        _ => {
                            let value = map.next_value()?;
                            match extra.iter_mut().find(|(known, _)| *known == key) {
                                Some((_, slot)) => *slot = value,
                                None => extra.push((key, value)),
                            }
                        }
                    }
                }
                Ok(Tool {
                    kind: kind.unwrap_or_else(|| "function".into()),
                    name: name.ok_or_else(|| de::Error::missing_field("name"))?,
                    namespace: namespace.flatten(),
                    description: description.unwrap_or_default(),
                    parameters: match parameters {
                        None => Vec::new(),
                        Some(Value::Object(members)) => members,
                        Some(_) => {
                            return Err(de::Error::custom(Coded(
                                Code::WrongType,
                                "`parameters` has to be an object",
                            )));
                        }
                    },
                    strict: strict.flatten(),
                    extra,
                })
            }
        }
        deserializer.deserialize_map(Members)
    }
}
