//! Configuration as data: the `type`-tagged envelope, and where it comes from.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::capability::Capabilities;
use crate::error::{Error, ErrorKind, Result};
use crate::network::Policy;
use crate::registry::Provider;
use crate::runtime::{BoxSpec, Runtime};
use crate::text::nearest;

/// How fast boxes may be created, for all processes of a run together.
#[derive(Debug, Clone, PartialEq)]
pub struct Pacing {
    /// Name of the shared bucket, such as `e2b-sandbox`.
    pub bucket: &'static str,
    /// Creations per second; more than 0.
    pub per_second: f64,
}

/// The configuration of one provider's boxes.
///
/// A provider implements it for its config struct, which deserialises with unknown fields rejected and documents the
/// unit and default of each field.
pub trait RuntimeConfig: fmt::Debug + Send + Sync + 'static {
    /// The provider's tag: the value of `type`.
    fn tag(&self) -> &'static str;

    /// Checks every field, without I/O.
    ///
    /// # Errors
    /// [`InvalidConfig`](ErrorKind::InvalidConfig) naming the field.
    fn validate(&self) -> Result<()>;

    /// What a box of this configuration can do.
    fn capabilities(&self) -> Capabilities;

    /// The network policy, where the provider can enforce one.
    fn policy(&self) -> Option<Policy> {
        None
    }

    /// Whether [`prepare_execution`](crate::Sandbox::prepare_execution) takes something away although the policy restricts
    /// nothing.
    fn cuts_always(&self) -> bool {
        false
    }

    /// How creation is paced, if it is.
    fn pacing(&self) -> Option<Pacing> {
        None
    }

    /// The configuration as JSON, with its tag under `type`.
    fn to_value(&self) -> Value;

    /// Makes the handle on a box that does not exist yet. No I/O beyond reading credentials.
    ///
    /// # Errors
    /// [`InvalidConfig`](ErrorKind::InvalidConfig), [`Unauthorized`](ErrorKind::Unauthorized).
    fn build(&self, spec: BoxSpec) -> Result<Arc<dyn Runtime>>;

    /// The provider of these boxes, to delete orphans through. Default: not known here, and orphans are left.
    fn provider(&self) -> Option<Arc<dyn Provider>> {
        None
    }

    /// A copy.
    fn boxed_clone(&self) -> Box<dyn RuntimeConfig>;
}

impl<C: RuntimeConfig> From<C> for Box<dyn RuntimeConfig> {
    fn from(config: C) -> Self {
        Box::new(config)
    }
}

impl Clone for Box<dyn RuntimeConfig> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Serialises a provider's config struct with its tag under `type`.
///
/// # Panics
/// Never for a struct of plain data; a config that does not serialise as a JSON object is a programming error.
pub fn tagged<C: Serialize>(tag: &'static str, config: &C) -> Value {
    let mut object = Map::new();
    object.insert("type".to_owned(), Value::from(tag));
    match serde_json::to_value(config) {
        Ok(Value::Object(fields)) => object.extend(fields),
        other => panic!("a config must serialise as an object, not {other:?}"),
    }
    Value::Object(object)
}

/// Splits the `type` tag off a configuration.
///
/// # Errors
/// [`InvalidConfig`](ErrorKind::InvalidConfig) naming `type`.
pub fn split_tag(value: Value) -> Result<(String, Map<String, Value>)> {
    let Value::Object(mut fields) = value else {
        return Err(Error::invalid_config(
            "type",
            "a runtime's configuration must be an object with a `type`",
        ));
    };
    match fields.remove("type") {
        Some(Value::String(tag)) => Ok((tag, fields)),
        Some(other) => Err(Error::invalid_config(
            "type",
            format!("`type` must be a string, not {other}"),
        )),
        None => Err(Error::invalid_config(
            "type",
            "`type` is missing: it names the provider",
        )),
    }
}

/// Deserialises a provider's config struct from the fields beside `type`. Does not validate.
///
/// # Errors
/// [`InvalidConfig`](ErrorKind::InvalidConfig) naming the field: an unknown one with the nearest valid name, a value of
/// the wrong type, a missing one.
pub fn from_fields<C: DeserializeOwned>(tag: &str, fields: Map<String, Value>) -> Result<C> {
    let known = field_names::<C>();
    if let Some(unknown) = fields.keys().find(|name| !known.contains(&name.as_str())) {
        let hint = match nearest(unknown, known.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known fields are {}", known.join(", ")),
        };
        return Err(
            Error::invalid_config(unknown.clone(), format!("`{tag}` has no such field; {hint}"))
                .with_provider(tag.to_owned()),
        );
    }
    serde_path_to_error::deserialize(Value::Object(fields)).map_err(|error| {
        let path = error.path().to_string();
        Error::invalid_config(path, error.into_inner().to_string()).with_provider(tag.to_owned())
    })
}

/// Reads a configuration from JSON text.
///
/// # Errors
/// [`InvalidConfig`](ErrorKind::InvalidConfig) with line and column.
pub fn value_from_json(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| Error::new(ErrorKind::InvalidConfig, format!("not valid JSON: {error}")))
}

/// Reads a configuration from TOML text.
///
/// # Errors
/// [`InvalidConfig`](ErrorKind::InvalidConfig) with the place.
pub fn value_from_toml(text: &str) -> Result<Value> {
    toml::from_str(text).map_err(|error| Error::new(ErrorKind::InvalidConfig, format!("not valid TOML: {error}")))
}

/// Reads a configuration from the short form `TYPE` or `TYPE://IMAGE?FIELD=VALUE&FIELD=VALUE`.
///
/// A value that reads as a JSON number, boolean, array or null is taken as that, anything else as a string.
///
/// ```
/// use serde_json::json;
/// let value = runtime_core::config::value_from_url("docker://debian:12?memory=2&workdir=/src").unwrap();
/// assert_eq!(value, json!({"type": "docker", "image": "debian:12", "memory": 2, "workdir": "/src"}));
/// ```
///
/// # Errors
/// [`InvalidConfig`](ErrorKind::InvalidConfig) for an empty tag, an empty field name or a field given twice.
pub fn value_from_url(url: &str) -> Result<Value> {
    let (tag, rest) = url.split_once("://").unwrap_or((url, ""));
    if tag.is_empty()
        || !tag
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    {
        return Err(Error::invalid_config(
            "type",
            format!("`{url}` does not start with a provider's tag"),
        ));
    }
    let mut fields = Map::new();
    fields.insert("type".to_owned(), Value::from(tag));
    let (image, query) = rest.split_once('?').unwrap_or((rest, ""));
    if !image.is_empty() {
        fields.insert("image".to_owned(), Value::from(image));
    }
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, text) = pair.split_once('=').unwrap_or((pair, "true"));
        let value = match serde_json::from_str(text) {
            Ok(value @ (Value::Number(_) | Value::Bool(_) | Value::Array(_) | Value::Null)) => value,
            _ => Value::from(text),
        };
        if name.is_empty() {
            return Err(Error::invalid_config("type", format!("a field of `{url}` has no name")));
        }
        if fields.insert(name.to_owned(), value).is_some() {
            return Err(Error::invalid_config(name.to_owned(), "the field is given twice"));
        }
    }
    Ok(Value::Object(fields))
}

/// Reads a configuration from environment variables: `PREFIX_TYPE` names the provider (or is a short form as
/// [`value_from_url`] reads it), and every other `PREFIX_FIELD` sets that field. `None` when `PREFIX_TYPE` is not set.
///
/// ```
/// use serde_json::json;
/// let vars = [("SANDBOX_TYPE", "docker"), ("SANDBOX_IMAGE", "debian:12"), ("SANDBOX_CPU", "1.5"), ("HOME", "/x")];
/// let value = runtime_core::config::value_from_env("SANDBOX", vars).unwrap();
/// assert_eq!(value, Some(json!({"type": "docker", "image": "debian:12", "cpu": 1.5})));
/// ```
///
/// # Errors
/// As [`value_from_url`].
pub fn value_from_env<'a>(prefix: &str, vars: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Option<Value>> {
    let mut tag = None;
    let mut fields = Map::new();
    for (name, text) in vars {
        let Some(field) = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_')) else {
            continue;
        };
        if field == "TYPE" {
            tag = Some(text);
        } else if field != "CACHE_DIR" {
            let value = match serde_json::from_str(text) {
                Ok(value @ (Value::Number(_) | Value::Bool(_) | Value::Array(_) | Value::Null)) => value,
                _ => Value::from(text),
            };
            fields.insert(field.to_ascii_lowercase(), value);
        }
    }
    let Some(tag) = tag else { return Ok(None) };
    let mut value = value_from_url(tag)?;
    if let Value::Object(object) = &mut value {
        object.extend(fields);
    }
    Ok(Some(value))
}

/// The names of a struct's fields, as serde reads them.
fn field_names<C: DeserializeOwned>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    let _ = C::deserialize(FieldNames(&mut names));
    names
}

/// A deserializer that only notes which fields a struct asks for.
struct FieldNames<'a>(&'a mut &'static [&'static str]);

impl<'de> serde::Deserializer<'de> for FieldNames<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: serde::de::Visitor<'de>>(self, _: V) -> std::result::Result<V::Value, Self::Error> {
        Err(serde::de::Error::custom("only names are wanted"))
    }

    fn deserialize_struct<V: serde::de::Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> std::result::Result<V::Value, Self::Error> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::json;

    #[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    struct Sample {
        image: Option<String>,
        memory: Option<f64>,
        allow: Vec<String>,
    }

    fn parse(value: Value) -> Result<Sample> {
        let (tag, fields) = split_tag(value)?;
        from_fields(&tag, fields)
    }

    #[test]
    fn an_unknown_field_is_answered_with_the_nearest_name() {
        let error = parse(json!({"type": "x", "memry": 1})).expect_err("unknown");
        assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidConfig, Some("memry")));
        assert!(error.message().contains("did you mean `memory`"), "{error}");
        let error = parse(json!({"type": "x", "qqqqqqqq": 1})).expect_err("unknown");
        assert!(error.message().contains("image, memory, allow"), "{error}");
    }

    #[test]
    fn a_value_of_the_wrong_type_names_its_place() {
        let error = parse(json!({"type": "x", "memory": "much"})).expect_err("wrong type");
        assert_eq!(error.field(), Some("memory"));
        let error = parse(json!({"type": "x", "allow": ["a", 3]})).expect_err("wrong type");
        assert_eq!(error.field(), Some("allow[1]"));
    }

    #[test]
    fn the_tag_is_required_and_a_string() {
        for value in [json!({}), json!({"type": 3}), json!([]), json!("x")] {
            assert_eq!(parse(value).expect_err("no tag").field(), Some("type"));
        }
    }

    #[test]
    fn a_config_survives_its_envelope() {
        let sample = Sample {
            image: Some("a".into()),
            memory: Some(2.5),
            allow: vec!["*".into()],
        };
        let value = tagged("x", &sample);
        assert_eq!(value["type"], "x");
        assert_eq!(parse(value).expect("own form"), sample);
        let toml = "type = \"x\"\nimage = \"a\"\nmemory = 2.5\nallow = [\"*\"]\n";
        assert_eq!(parse(value_from_toml(toml).expect("toml")).expect("own form"), sample);
        let json = r#"{"type":"x","image":"a","memory":2.5,"allow":["*"]}"#;
        assert_eq!(parse(value_from_json(json).expect("json")).expect("own form"), sample);
    }

    #[test]
    fn short_forms_with_mistakes_are_refused() {
        assert_eq!(value_from_url("://x").expect_err("no tag").field(), Some("type"));
        assert_eq!(
            value_from_url("docker://x?image=y").expect_err("twice").field(),
            Some("image")
        );
        assert_eq!(
            value_from_url("docker://x?=y").expect_err("no name").field(),
            Some("type")
        );
        assert_eq!(value_from_url("docker").expect("bare"), json!({"type": "docker"}));
        assert!(value_from_toml("type =").is_err() && value_from_json("{").is_err());
        assert_eq!(
            value_from_env("SANDBOX", [("SANDBOX_CPU", "1")]).expect("no type"),
            None
        );
    }
}
