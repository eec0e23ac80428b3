//! [`Message`]: one message of a conversation, with its parts and tool calls.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::ser::Serializer;

use crate::code::{Code, Coded};
use crate::json::{self, Value};
use crate::record::{Fields, Record, RecordOptions, serialize_as_record};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The instructions.
    System,
    /// The user, or the environment.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

const ROLES: &[&str] = &["system", "user", "assistant", "tool"];

impl Role {
    /// The role as it stands in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        ROLES[self as usize]
    }

    fn from_name(name: &str) -> Option<Self> {
        [Role::System, Role::User, Role::Assistant, Role::Tool]
            .into_iter()
            .find(|role| role.as_str() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// Instructions to the model.
    System {
        /// Text or parts.
        content: Content,
    },
    /// From the user or the environment.
    User {
        /// Text or parts.
        content: Content,
    },
    /// From the model.
    Assistant(AssistantMessage),
    /// The result of a tool call.
    Tool(ToolMessage),
}

/// A message from the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AssistantMessage {
    /// Visible text.
    pub content: Option<Box<str>>,
    /// Visible reasoning; an empty text differs from none.
    pub reasoning_content: Option<Box<str>>,
    /// Calls the model asked for.
    pub tool_calls: Option<Box<[ToolCall]>>,
    /// Native items that the provider wants back verbatim; each is a JSON object.
    pub provider_state: Option<Box<[Value]>>,
}

/// The result of a tool call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolMessage {
    /// Which call is answered.
    pub tool_call_id: Box<str>,
    /// Text or parts.
    pub content: Content,
    /// The tool's name; not a part of the message's identity.
    pub name: Option<Box<str>>,
}

/// Text, or a list of parts.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Plain text.
    Text(Box<str>),
    /// Parts in order.
    Parts(Box<[Part]>),
}

/// A piece of a message's content.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text.
    Text(Box<str>),
    /// An image by URL, which may be a `data:` URL.
    ImageUrl(Box<str>),
}

/// A call the model asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The provider's handle; may repeat within a conversation.
    pub id: Box<str>,
    /// Whether the arguments are JSON or free text.
    pub kind: ToolCallKind,
    /// The tool.
    pub name: Box<str>,
    /// The tool's namespace.
    pub namespace: Option<Box<str>>,
    /// Exactly what the model emitted.
    pub arguments: Box<str>,
}

/// Whether a call's arguments are JSON or free text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolCallKind {
    /// Arguments are JSON (if the model managed to emit it).
    #[default]
    Function,
    /// Arguments are free text.
    Custom,
}

impl ToolCallKind {
    /// The kind as it stands in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ToolCallKind::Function => "function",
            ToolCallKind::Custom => "custom",
        }
    }
}

impl Message {
    /// A system message of plain text.
    #[must_use]
    pub fn system(text: &str) -> Self {
        Message::System {
            content: Content::Text(text.into()),
        }
    }

    /// A user message of plain text.
    #[must_use]
    pub fn user(text: &str) -> Self {
        Message::User {
            content: Content::Text(text.into()),
        }
    }

    /// An assistant message of plain text.
    #[must_use]
    pub fn assistant(text: &str) -> Self {
        Message::Assistant(AssistantMessage {
            content: Some(text.into()),
            ..AssistantMessage::default()
        })
    }

    /// A tool result of plain text.
    #[must_use]
    pub fn tool(tool_call_id: &str, text: &str) -> Self {
        Message::Tool(ToolMessage {
            tool_call_id: tool_call_id.into(),
            content: Content::Text(text.into()),
            name: None,
        })
    }

    /// Who speaks.
    #[must_use]
    pub fn role(&self) -> Role {
        match self {
            Message::System { .. } => Role::System,
            Message::User { .. } => Role::User,
            Message::Assistant(_) => Role::Assistant,
            Message::Tool(_) => Role::Tool,
        }
    }

    /// The text: itself, or the text parts joined by newlines; nothing for no content.
    #[must_use]
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            Message::System { content } | Message::User { content } => content.text(),
            Message::Assistant(message) => message.content.as_deref().unwrap_or_default().into(),
            Message::Tool(message) => message.content.text(),
        }
    }

    /// The calls of an assistant message; empty for every other one.
    #[must_use]
    pub fn tool_calls(&self) -> &[ToolCall] {
        match self {
            Message::Assistant(message) => message.tool_calls.as_deref().unwrap_or_default(),
            _ => &[],
        }
    }
}

impl From<AssistantMessage> for Message {
    fn from(message: AssistantMessage) -> Self {
        Message::Assistant(message)
    }
}

impl Content {
    /// The text: itself, or the text parts joined by newlines.
    #[must_use]
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            Content::Text(text) => Cow::Borrowed(text),
            Content::Parts(parts) => {
                let texts: Vec<&str> = parts
                    .iter()
                    .filter_map(|part| match part {
                        Part::Text(text) => Some(&**text),
                        Part::ImageUrl(_) => None,
                    })
                    .collect();
                Cow::Owned(texts.join("\n"))
            }
        }
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Content::Text(text.into())
    }
}

// ---- writing ----

serialize_as_record!(Message, ToolCall, Content, Part);

impl Record for Message {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        fields.put("role", self.role().as_str())?;
        match self {
            Message::System { content } | Message::User { content } => {
                fields.put_record("content", content)?;
            }
            Message::Assistant(message) => {
                fields.put_nullable("content", &message.content)?;
                fields.put_nullable("reasoning_content", &message.reasoning_content)?;
                match &message.tool_calls {
                    Some(calls) => fields.put_records("tool_calls", calls)?,
                    None => fields.put_nullable("tool_calls", &None::<()>)?,
                }
                fields.put_nullable("provider_state", &message.provider_state)?;
            }
            Message::Tool(message) => {
                fields.put("tool_call_id", &message.tool_call_id)?;
                fields.put_record("content", &message.content)?;
                fields.put_nullable("name", &message.name)?;
            }
        }
        fields.end()
    }
}

impl Record for Content {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        match self {
            Content::Text(text) => serializer.serialize_str(text),
            Content::Parts(parts) => serde::Serialize::serialize(&crate::record::With(&**parts, options), serializer),
        }
    }
}

impl Record for Part {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        match self {
            Part::Text(text) => {
                fields.put("type", "text")?;
                fields.put("text", text)?;
            }
            Part::ImageUrl(url) => {
                fields.put("type", "image_url")?;
                fields.put("image_url", &ImageUrl { url })?;
            }
        }
        fields.end()
    }
}

#[derive(serde::Serialize)]
struct ImageUrl<'a> {
    url: &'a str,
}

impl Record for ToolCall {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        fields.put("id", &self.id)?;
        fields.put("type", self.kind.as_str())?;
        fields.put("name", &self.name)?;
        fields.put_nullable("namespace", &self.namespace)?;
        fields.put("arguments", &self.arguments)?;
        fields.end()
    }
}

// ---- reading ----

/// Stores a value that may come once.
pub(crate) fn once<T, E: de::Error>(slot: &mut Option<T>, key: &'static str, value: T) -> Result<(), E> {
    if slot.replace(value).is_some() {
        return Err(E::duplicate_field(key));
    }
    Ok(())
}

/// Reads a member that was kept as opaque JSON because its meaning was not known yet.
fn late<T: de::DeserializeOwned, E: de::Error>(key: &str, value: &Value) -> Result<T, E> {
    json::from_value(value)
        .map_err(|error| E::custom(Coded(error.code(), format_args!("in `{key}`: {}", error.detail()))))
}

impl<'de> Deserialize<'de> for Role {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Role;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a role")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Role, E> {
                Role::from_name(text).ok_or_else(|| E::unknown_variant(text, ROLES))
            }
        }
        deserializer.deserialize_str(Name)
    }
}

#[derive(serde::Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum MessageKey {
    Role,
    Content,
    ReasoningContent,
    ToolCalls,
    ProviderState,
    ToolCallId,
    Name,
    #[serde(other)]
    Other,
}

impl MessageKey {
    fn belongs_to(&self, role: Role) -> bool {
        match self {
            MessageKey::Content => true,
            MessageKey::ReasoningContent | MessageKey::ToolCalls | MessageKey::ProviderState => role == Role::Assistant,
            MessageKey::ToolCallId | MessageKey::Name => role == Role::Tool,
            MessageKey::Role | MessageKey::Other => false,
        }
    }
}

/// What was read of a message so far.
#[derive(Default)]
struct Draft {
    content: Option<Content>,
    assistant_content: Option<Option<Box<str>>>,
    reasoning_content: Option<Option<Box<str>>>,
    tool_calls: Option<Option<Box<[ToolCall]>>>,
    provider_state: Option<Option<ProviderState>>,
    tool_call_id: Option<Box<str>>,
    name: Option<Option<Box<str>>>,
}

/// Where a member's value comes from.
trait Source<E> {
    fn take<T: de::DeserializeOwned>(&mut self) -> Result<T, E>;
}

struct Live<'a, A>(&'a mut A);

impl<'de, A: MapAccess<'de>> Source<A::Error> for Live<'_, A> {
    fn take<T: de::DeserializeOwned>(&mut self) -> Result<T, A::Error> {
        self.0.next_value()
    }
}

struct Kept<'a>(&'a str, &'a Value);

impl<E: de::Error> Source<E> for Kept<'_> {
    fn take<T: de::DeserializeOwned>(&mut self) -> Result<T, E> {
        late(self.0, self.1)
    }
}

impl Draft {
    fn member<E: de::Error>(&mut self, role: Role, key: &MessageKey, source: &mut impl Source<E>) -> Result<(), E> {
        match key {
            MessageKey::Content if role == Role::Assistant => {
                once(&mut self.assistant_content, "content", source.take()?)
            }
            MessageKey::Content => once(&mut self.content, "content", source.take()?),
            MessageKey::ReasoningContent => once(&mut self.reasoning_content, "reasoning_content", source.take()?),
            MessageKey::ToolCalls => once(&mut self.tool_calls, "tool_calls", source.take()?),
            MessageKey::ProviderState => once(&mut self.provider_state, "provider_state", source.take()?),
            MessageKey::ToolCallId => once(&mut self.tool_call_id, "tool_call_id", source.take()?),
            MessageKey::Name => once(&mut self.name, "name", source.take()?),
            MessageKey::Role | MessageKey::Other => Ok(()),
        }
    }

    fn finish<E: de::Error>(self, role: Role) -> Result<Message, E> {
        let content = self.content.ok_or_else(|| E::missing_field("content"));
        Ok(match role {
            Role::System => Message::System { content: content? },
            Role::User => Message::User { content: content? },
            Role::Assistant => Message::Assistant(AssistantMessage {
                content: self.assistant_content.flatten(),
                reasoning_content: self.reasoning_content.flatten(),
                tool_calls: self.tool_calls.flatten(),
                provider_state: self.provider_state.flatten().map(|state| state.0),
            }),
            Role::Tool => Message::Tool(ToolMessage {
                tool_call_id: self.tool_call_id.ok_or_else(|| E::missing_field("tool_call_id"))?,
                content: content?,
                name: self.name.flatten(),
            }),
        })
    }
}

/// Provider state items, which have to be objects.
struct ProviderState(Box<[Value]>);

impl<'de> Deserialize<'de> for ProviderState {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let items = Vec::<Value>::deserialize(deserializer)?;
        if items.iter().any(|item| item.as_object().is_none()) {
            return Err(de::Error::custom(Coded(
                Code::WrongType,
                "a provider state item has to be an object",
            )));
        }
        if let Some(reason) = items.iter().find_map(unidentifiable) {
            return Err(de::Error::custom(Coded(Code::InvalidProviderState, reason)));
        }
        Ok(Self(items.into()))
    }
}

/// The kind of a provider state item: its type, or what its role says.
pub(crate) fn state_kind(item: &Value) -> &str {
    match item.get("type").and_then(Value::as_str) {
        Some(kind) if !kind.is_empty() => kind,
        _ => match item.get("role").and_then(Value::as_str) {
            Some("assistant") => "message",
            _ => "",
        },
    }
}

/// Why a provider state item has no identity; none if it has one.
pub(crate) fn unidentifiable(item: &Value) -> Option<&'static str> {
    let odd_type = match item.get("type") {
        None | Some(Value::Null | Value::Bool(false) | Value::Int(0)) => false,
        Some(Value::String(text)) => text.as_str().is_none(),
        Some(Value::Float(number)) => *number != 0.0,
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(members)) => !members.is_empty(),
        Some(_) => true,
    };
    if odd_type {
        return Some("the type of a provider state item is not a text");
    }
    let content = item.get("content").and_then(Value::as_array);
    if state_kind(item) == "message" && content.is_some_and(|parts| parts.iter().any(|part| part.as_object().is_none()))
    {
        return Some("the content of a provider state message has an item that is no object");
    }
    None
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Message;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a message")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message, A::Error> {
                let mut role: Option<Role> = None;
                let mut draft = Draft::default();
                let mut kept: Vec<(MessageKey, Value)> = Vec::new();
                while let Some(key) = map.next_key::<MessageKey>()? {
                    match (&key, role) {
                        (MessageKey::Role, _) => once(&mut role, "role", map.next_value()?)?,
                        (MessageKey::Other, _) => {
                            map.next_value::<IgnoredAny>()?;
                        }
                        (_, Some(role)) if key.belongs_to(role) => {
                            draft.member(role, &key, &mut Live(&mut map))?;
                        }
                        (_, Some(_)) => {
                            map.next_value::<IgnoredAny>()?;
                        }
                        (_, None) => {
                            let value = map.next_value()?;
                            kept.push((key, value));
                        }
                    }
                }
                let role = role.ok_or_else(|| de::Error::missing_field("role"))?;
                for (key, value) in &kept {
                    if key.belongs_to(role) {
                        draft.member::<A::Error>(role, key, &mut Kept("message", value))?;
                    }
                }
                draft.finish(role)
            }
        }
        deserializer.deserialize_map(Members)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrParts;
        impl<'de> Visitor<'de> for TextOrParts {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("text or a list of parts")
            }

            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.into()))
            }

            fn visit_string<E>(self, text: String) -> Result<Content, E> {
                Ok(Content::Text(text.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(Content::Parts(parts.into()))
            }
        }
        deserializer.deserialize_any(TextOrParts)
    }
}

const PART_TYPES: &[&str] = &["text", "image_url"];

#[derive(serde::Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum PartKey {
    Type,
    Text,
    ImageUrl,
    #[serde(other)]
    Other,
}

#[derive(serde::Deserialize)]
struct ImageUrlOwned {
    url: Box<str>,
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Part;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a content part")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Part, A::Error> {
                let mut kind: Option<Box<str>> = None;
                let mut text: Option<Box<str>> = None;
                let mut image: Option<ImageUrlOwned> = None;
                let mut kept: Vec<(PartKey, Value)> = Vec::new();
                while let Some(key) = map.next_key::<PartKey>()? {
                    match (&key, kind.as_deref()) {
                        (PartKey::Type, _) => {
                            let name: Box<str> = map.next_value()?;
                            if !PART_TYPES.contains(&&*name) {
                                return Err(de::Error::unknown_variant(&name, PART_TYPES));
                            }
                            once(&mut kind, "type", name)?;
                        }
                        (PartKey::Text, Some("text")) => {
                            once(&mut text, "text", map.next_value()?)?;
                        }
                        (PartKey::ImageUrl, Some("image_url")) => {
                            once(&mut image, "image_url", map.next_value()?)?;
                        }
                        (PartKey::Text | PartKey::ImageUrl, None) => {
                            let value = map.next_value()?;
                            kept.push((key, value));
                        }
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                let is_text = match kind.as_deref() {
                    Some(kind) => kind == "text",
                    None => return Err(de::Error::missing_field("type")),
                };
                for (key, value) in &kept {
                    match key {
                        PartKey::Text if is_text => once(&mut text, "text", late("text", value)?)?,
                        PartKey::ImageUrl if !is_text => {
                            once(&mut image, "image_url", late("image_url", value)?)?;
                        }
                        _ => {}
                    }
                }
                if is_text {
                    text.map(Part::Text).ok_or_else(|| de::Error::missing_field("text"))
                } else {
                    image
                        .map(|image| Part::ImageUrl(image.url))
                        .ok_or_else(|| de::Error::missing_field("image_url"))
                }
            }
        }
        deserializer.deserialize_map(Members)
    }
}

impl<'de> Deserialize<'de> for ToolCallKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = ToolCallKind;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a tool call type")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<ToolCallKind, E> {
                match text {
                    "function" => Ok(ToolCallKind::Function),
                    "custom" => Ok(ToolCallKind::Custom),
                    other => Err(E::unknown_variant(other, &["function", "custom"])),
                }
            }
        }
        deserializer.deserialize_str(Name)
    }
}

impl<'de> Deserialize<'de> for ToolCall {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Members {
            id: Box<str>,
            #[serde(default, rename = "type")]
            kind: ToolCallKind,
            name: Box<str>,
            #[serde(default)]
            namespace: Option<Box<str>>,
            arguments: Box<str>,
        }
        let members = Members::deserialize(deserializer)?;
        Ok(Self {
            id: members.id,
            kind: members.kind,
            name: members.name,
            namespace: members.namespace,
            arguments: members.arguments,
        })
    }
}
