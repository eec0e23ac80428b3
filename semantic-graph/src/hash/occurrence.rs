//! [`occurrence_keys`]: which call a tool result answers, where call ids repeat.

use std::collections::HashMap;

use super::digest::{Digest, Hasher, IdentityError, message_digest};
use crate::message::Message;

/// Names one occurrence of a tool result within a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OccurrenceKey {
    /// Position of the result among the messages.
    pub position: usize,
    /// Identity of everything up to the call it answers.
    pub prefix: Digest,
    /// The provider's id of that call.
    pub call_id: Box<str>,
}

/// The key of every tool result whose call is in the conversation.
///
/// Providers reuse call ids, so a result is named by the id together with what led to the call.
///
/// # Errors
/// [`IdentityError`] if a message has no identity.
pub fn occurrence_keys<'a>(
    messages: impl IntoIterator<Item = &'a Message>,
) -> Result<Vec<OccurrenceKey>, IdentityError> {
    let mut running = Hasher::new();
    let mut calls: HashMap<&str, Digest> = HashMap::new();
    let mut keys = Vec::new();
    for (position, message) in messages.into_iter().enumerate() {
        running.bytes(message_digest(message)?.to_string().as_bytes());
        match message {
            Message::Assistant(_) => {
                let prefix = running.finish();
                for call in message.tool_calls() {
                    calls.insert(&call.id, prefix);
                }
            }
            Message::Tool(result) => {
                if let Some(prefix) = calls.get(&*result.tool_call_id) {
                    keys.push(OccurrenceKey {
                        position,
                        prefix: *prefix,
                        call_id: result.tool_call_id.clone(),
                    });
                }
            }
            _ => {}
        }
    }
    Ok(keys)
}
