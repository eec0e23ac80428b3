//! Token counts, limits, truncation and text of whole traces.

use crate::call::{FinishReason, Usage};
use crate::message::{Message, Role};
use crate::trace::Trace;

/// Bounds on a run; what is none is unbounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Sampled nodes.
    pub max_turns: Option<i64>,
    /// Tokens, see [`Trace::num_input_tokens`].
    pub max_input_tokens: Option<i64>,
    /// Tokens, see [`Trace::num_output_tokens`].
    pub max_output_tokens: Option<i64>,
    /// Tokens, see [`Trace::num_total_tokens`].
    pub max_total_tokens: Option<i64>,
}

/// Stop conditions that mean that a run was cut short.
const CUT_SHORT: [&str; 5] = [
    "max_turns",
    "max_input_tokens",
    "max_output_tokens",
    "max_total_tokens",
    "compaction_failed",
];

impl Trace {
    /// Input tokens: the growth of each call over the one before it on its path; what branches
    /// share counts once. O(1).
    #[must_use]
    pub fn num_input_tokens(&self) -> i64 {
        self.derived().input_tokens()
    }

    /// Completion tokens summed over the branches, so that what branches share counts once for
    /// each: this is what the reference counts. O(1).
    #[must_use]
    pub fn num_output_tokens(&self) -> i64 {
        self.derived().output_tokens()
    }

    /// Completion tokens of every turn once. O(1).
    #[must_use]
    pub fn num_unique_output_tokens(&self) -> i64 {
        self.derived().unique_output_tokens()
    }

    /// [`num_input_tokens`](Self::num_input_tokens) and the completions of all calls, failed and
    /// superseded ones included. O(1).
    #[must_use]
    pub fn num_total_tokens(&self) -> i64 {
        self.derived().total_tokens()
    }

    /// The usage of all calls added up.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        Usage::aggregate(self.calls.iter().filter_map(|call| call.usage.as_deref()))
    }

    /// The first limit that is reached, by name. O(1).
    #[must_use]
    pub fn reached(&self, limits: &Limits) -> Option<&'static str> {
        let turns = i64::try_from(self.num_turns()).unwrap_or(i64::MAX);
        [
            ("max_turns", limits.max_turns, turns),
            ("max_input_tokens", limits.max_input_tokens, self.num_input_tokens()),
            ("max_output_tokens", limits.max_output_tokens, self.num_output_tokens()),
            ("max_total_tokens", limits.max_total_tokens, self.num_total_tokens()),
        ]
        .into_iter()
        .find(|(_, limit, count)| limit.is_some_and(|limit| *count >= limit))
        .map(|(name, _, _)| name)
    }

    /// Whether the run was cut short: by a limit, or by the length of the last answer.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        if self
            .stop_condition
            .as_deref()
            .is_some_and(|condition| CUT_SHORT.contains(&condition))
        {
            return true;
        }
        self.calls
            .iter()
            .rev()
            .find(|call| call.error.is_none())
            .is_some_and(|call| call.finish_reason == Some(FinishReason::Length))
    }

    /// What the run answered, without white space around it.
    #[must_use]
    pub fn last_reply(&self) -> &str {
        let reply = self.root_reply.as_deref().or_else(|| {
            self.nodes.iter().rev().find_map(|node| match &*node.message {
                Message::Assistant(message) if node.sampled => Some(message.content.as_deref().unwrap_or_default()),
                _ => None,
            })
        });
        trim_like_python(reply.unwrap_or_default())
    }

    /// The last branch's messages.
    #[must_use]
    pub fn messages(&self) -> Vec<&Message> {
        self.derived()
            .last_leaf()
            .and_then(|leaf| self.branch(leaf))
            .map(|branch| branch.messages())
            .unwrap_or_default()
    }

    /// The last branch as text, one block per message.
    #[must_use]
    pub fn transcript(&self) -> String {
        let blocks: Vec<String> = self.messages().into_iter().map(block).collect();
        blocks.join("\n\n")
    }
}

/// Python's `strip` also takes the four ASCII separators, which Rust does not call white space.
fn trim_like_python(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

fn block(message: &Message) -> String {
    let mut lines = vec![match message {
        Message::Tool(tool) => match tool.name.as_deref().filter(|name| !name.is_empty()) {
            Some(name) => format!("[tool {name}]"),
            None => "[tool]".to_owned(),
        },
        other => format!("[{}]", other.role()),
    }];
    let text = message.text();
    if !text.is_empty() {
        lines.push(text.into_owned());
    }
    if message.role() == Role::Assistant {
        for call in message.tool_calls() {
            let namespace = match call.namespace.as_deref().filter(|name| !name.is_empty()) {
                Some(namespace) => format!("{namespace}."),
                None => String::new(),
            };
            lines.push(format!("[tool_call {namespace}{}({})]", call.name, call.arguments));
        }
    }
    lines.join("\n")
}
