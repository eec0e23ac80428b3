//! [`message_digest`] and [`tools_digest`]: when are two messages, or two lists of tools, the same.

use std::borrow::Cow;
use std::fmt;

use blake2b_simd::{Params, State};

use crate::code::{Code, Coded};
use crate::json::{self, Object, Style, Value, parse_value};
use crate::message::{AssistantMessage, Content, Message, Part, ToolCall, ToolCallKind, state_kind, unidentifiable};
use crate::record::{RecordOptions, With};
use crate::tool::Tool;

/// A BLAKE2b digest of 16 bytes, shown in lower-case hex.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 16]);

impl Digest {
    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The identity of an empty list of tools.
    pub(crate) fn of_no_tools() -> Self {
        let mut hasher = Hasher::new();
        hasher.bytes(b"[]");
        hasher.finish()
    }

    /// Half of the digest, for tables.
    pub(crate) fn head(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl serde::Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A message without an identity: a provider state item has a shape that cannot be hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityError {
    reason: &'static str,
}

impl IdentityError {
    /// [`Code::InvalidProviderState`].
    #[must_use]
    pub fn code(&self) -> Code {
        Code::InvalidProviderState
    }
}

impl fmt::Display for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Coded(self.code(), self.reason).fmt(f)
    }
}

impl std::error::Error for IdentityError {}

/// BLAKE2b-128 over texts, or over plain bytes.
pub(crate) struct Hasher(State);

impl Hasher {
    pub(crate) fn new() -> Self {
        Self(Params::new().hash_length(16).to_state())
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// A text and its length, so that no two lists of texts are confused.
    fn text(&mut self, text: &str) {
        self.0.update(&(text.len() as u64).to_be_bytes());
        self.0.update(text.as_bytes());
    }

    pub(crate) fn finish(&self) -> Digest {
        let mut digest = [0; 16];
        digest.copy_from_slice(&self.0.finalize().as_bytes()[..16]);
        Digest(digest)
    }
}

/// The identity of a message.
///
/// Differences that no model sees do not count: absent or empty content, tool calls, namespaces
/// and provider state; the layout of JSON arguments; the name on a tool result; provider state
/// that only repeats what the message says. O(bytes of the message).
///
/// # Errors
/// [`IdentityError`] for provider state that the reference cannot hash either. Messages that were
/// read from JSON never have it.
pub fn message_digest(message: &Message) -> Result<Digest, IdentityError> {
    let mut hasher = Hasher::new();
    match message {
        Message::System { content } => {
            hasher.text("SystemMessage");
            hash_content(&mut hasher, content);
        }
        Message::User { content } => {
            hasher.text("UserMessage");
            hash_content(&mut hasher, content);
        }
        Message::Assistant(message) => {
            hasher.text("AssistantMessage");
            hash_assistant(&mut hasher, message)?;
        }
        Message::Tool(message) => {
            hasher.text("ToolMessage");
            hash_content(&mut hasher, &message.content);
            hasher.text("tool_call_id");
            hasher.text(&message.tool_call_id);
        }
    }
    Ok(hasher.finish())
}

fn hash_content(hasher: &mut Hasher, content: &Content) {
    match content {
        Content::Text(text) => {
            hasher.text("content_text");
            hasher.text(text);
        }
        Content::Parts(parts) => {
            hasher.text("content_parts");
            for part in parts {
                let (kind, text) = match part {
                    Part::Text(text) => ("text", text),
                    Part::ImageUrl(url) => ("image_url", url),
                };
                hasher.text(kind);
                hasher.text(text);
            }
        }
    }
}

fn hash_assistant(hasher: &mut Hasher, message: &AssistantMessage) -> Result<(), IdentityError> {
    hasher.text("content_text");
    hasher.text(message.content.as_deref().unwrap_or_default());
    if let Some(reasoning) = &message.reasoning_content {
        hasher.text("reasoning_content");
        hasher.text(reasoning);
    }
    let calls = message.tool_calls.as_deref().unwrap_or_default();
    for item in message.provider_state.iter().flatten() {
        if let Some(reason) = unidentifiable(item) {
            return Err(IdentityError { reason });
        }
        hash_state_item(hasher, item, calls);
    }
    for call in calls {
        hasher.text("tool_call");
        hasher.text(call.kind.as_str());
        hasher.text(&call.id);
        hasher.text(&call.name);
        hasher.text(call.namespace.as_deref().unwrap_or_default());
        match call.kind {
            ToolCallKind::Function => hasher.text(&canonical_arguments(&call.arguments)),
            ToolCallKind::Custom => hasher.text(&call.arguments),
        }
    }
    Ok(())
}

/// Keys of a provider state item that say something the message does not.
const OPAQUE_KEYS: [&str; 4] = ["encrypted_content", "signature", "data", "phase"];

fn hash_state_item(hasher: &mut Hasher, item: &Value, calls: &[ToolCall]) {
    let kind = state_kind(item);
    let mut opaque: Object = OPAQUE_KEYS
        .iter()
        .filter_map(|key| Some((*key, item.get(key)?)))
        .filter(|(_, value)| !value.is_null())
        .map(|(key, value)| (key.into(), value.clone()))
        .collect();
    if kind == "message"
        && let Some(parts) = item.get("content").and_then(Value::as_array)
    {
        let unusual: Vec<Value> = parts
            .iter()
            .filter(|part| {
                !matches!(
                    part.get("type").and_then(Value::as_str),
                    Some("input_text" | "output_text")
                )
            })
            .cloned()
            .collect();
        if !unusual.is_empty() {
            opaque.push(("content".into(), Value::Array(unusual)));
        }
    }
    let represented = match kind {
        "message" | "reasoning" => true,
        "function_call" | "custom_tool_call" => {
            let call_id = item.get("call_id").and_then(Value::as_str);
            calls.iter().any(|call| Some(&*call.id) == call_id)
        }
        _ => false,
    };
    if represented && opaque.is_empty() {
        return;
    }
    hasher.text("provider_state");
    hasher.text(kind);
    let text = if represented {
        Value::Object(opaque).to_text(Style::CANONICAL_SPACED)
    } else {
        item.to_text(Style::CANONICAL_SPACED)
    };
    hasher.text(&text);
}

/// The text of a function call's arguments that counts for identity.
///
/// JSON (as Python's `json` reads it) in sorted, compact, ASCII form; anything else unchanged.
#[must_use]
pub fn canonical_arguments(arguments: &str) -> Cow<'_, str> {
    match parse_value(arguments) {
        Ok(value) => Cow::Owned(value.to_text(Style::CANONICAL)),
        Err(_) => Cow::Borrowed(arguments),
    }
}

/// The identity of a list of tools; that of none equals that of an empty list.
#[must_use]
pub fn tools_digest(tools: &[Tool]) -> Digest {
    let options = RecordOptions {
        float_decimals: None,
        exclude_none: true,
    };
    // Tools hold only what JSON can express, so writing them cannot fail.
    let value = json::to_value(&With(tools, options)).unwrap_or_default();
    let mut hasher = Hasher::new();
    hasher.bytes(value.to_text(Style::CANONICAL).as_bytes());
    hasher.finish()
}
