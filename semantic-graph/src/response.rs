//! [`Response`] and [`TurnTokens`]: what a commit is given.

use crate::call::{FinishReason, Usage};
use crate::experts::{RoutedExperts, SamplingMask};
use crate::message::AssistantMessage;

/// What a model answered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Response {
    /// The message.
    pub message: AssistantMessage,
    /// Why the model stopped.
    pub finish_reason: Option<FinishReason>,
    /// Tokens, as the provider counts them.
    pub usage: Option<Usage>,
    /// Tokens, as they were rendered and sampled.
    pub tokens: Option<TurnTokens>,
}

impl Response {
    /// An answer of plain text, without tokens.
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self {
            message: AssistantMessage {
                content: Some(text.into()),
                ..AssistantMessage::default()
            },
            ..Self::default()
        }
    }
}

/// A half-open range of positions `[start, end)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First position.
    pub start: i64,
    /// One past the last position.
    pub end: i64,
}

/// Tokens of one exchange, as they were rendered and sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TurnTokens {
    /// The evaluated prompt.
    pub prompt_ids: Vec<u32>,
    /// What the model sampled.
    pub completion_ids: Vec<u32>,
    /// Natural-log probabilities of the completion.
    pub completion_logprobs: Vec<f64>,
    /// The prompt as the renderer emitted it, if that differs from `prompt_ids`.
    pub renderer_prompt_ids: Option<Vec<u32>>,
    /// Whether the prompt was built by extending a stored prefix, which then has to match exactly.
    pub bridged: bool,
    /// Per prompt message its range in the renderer's tokens; may be shorter than the prompt.
    pub message_spans: Option<Vec<Option<Span>>>,
    /// Per renderer token whether it is content.
    pub is_content: Option<Vec<bool>>,
    /// Where images were expanded in `prompt_ids`: `(offset, length)`.
    pub mm_placeholders: Option<Vec<(i64, i64)>>,
    /// Which renderer tokens are placeholders, and of what kind.
    pub mm_token_type_id_map: Vec<(u32, i64)>,
    /// Experts of prompt and completion from position `start` on.
    pub routed_experts: Option<ExpertRows>,
    /// Candidates of the completion's positions.
    pub sampling_mask: Option<SamplingMask>,
}

/// An expert array and the sequence position of its first row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertRows {
    /// The rows.
    pub array: RoutedExperts,
    /// Position of the first row in prompt and completion.
    pub start: i64,
}
