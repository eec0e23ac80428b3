//! From the renderer's tokens to the evaluated ones.

use super::commit::CommitError;
use crate::response::{Span, TurnTokens};

/// A range in both token spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) logical_start: usize,
    pub(super) logical_end: usize,
}

/// Attribution of a prompt, in both token spaces.
#[derive(Debug)]
pub(super) struct Attribution {
    /// Per message its tokens; messages past the end have none.
    pub(super) spans: Vec<Option<Range>>,
    /// Per evaluated token whether it is content; none without attribution.
    pub(super) is_content: Option<Vec<bool>>,
}

/// Projects spans and content flags.
pub(super) fn project(tokens: &TurnTokens, type_map: &[(u32, i64)]) -> Result<Attribution, CommitError> {
    let spans = tokens.message_spans.as_deref().unwrap_or_default();
    let flags = tokens.is_content.as_deref();
    let logical = match &tokens.renderer_prompt_ids {
        Some(logical) if *logical != tokens.prompt_ids => logical,
        _ => {
            let len = tokens.prompt_ids.len();
            let clamp = |at: i64| usize::try_from(at).unwrap_or(0).min(len);
            return Ok(Attribution {
                spans: spans
                    .iter()
                    .map(|span| {
                        span.map(|span| Range {
                            start: clamp(span.start),
                            end: clamp(span.end),
                            logical_start: clamp(span.start),
                            logical_end: clamp(span.end),
                        })
                    })
                    .collect(),
                is_content: flags.filter(|flags| flags.len() == len).map(<[bool]>::to_vec),
            });
        }
    };
    let offsets = offsets(tokens, logical, type_map)?;
    let spans = spans
        .iter()
        .enumerate()
        .map(|(message, span)| match span {
            None => Ok(None),
            Some(span) => map_span(*span, &offsets)
                .map(Some)
                .ok_or(CommitError::SpanOutOfRange { message, span: *span }),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let is_content = match flags.filter(|flags| !flags.is_empty()) {
        None => None,
        Some(flags) if flags.len() != logical.len() => {
            return Err(CommitError::ContentLengthMismatch {
                flags: flags.len(),
                tokens: logical.len(),
            });
        }
        Some(flags) => Some(
            flags
                .iter()
                .zip(offsets.windows(2))
                .flat_map(|(flag, range)| std::iter::repeat_n(*flag, range[1] - range[0]))
                .collect(),
        ),
    };
    Ok(Attribution { spans, is_content })
}

fn map_span(span: Span, offsets: &[usize]) -> Option<Range> {
    let start = usize::try_from(span.start).ok()?;
    let end = usize::try_from(span.end).ok()?;
    if start > end {
        return None;
    }
    Some(Range {
        start: *offsets.get(start)?,
        end: *offsets.get(end)?,
        logical_start: start,
        logical_end: end,
    })
}

/// Where each logical token begins among the evaluated ones, and the end.
fn offsets(tokens: &TurnTokens, logical: &[u32], type_map: &[(u32, i64)]) -> Result<Vec<usize>, CommitError> {
    let Some(placeholders) = tokens.mm_placeholders.as_deref().filter(|_| !type_map.is_empty()) else {
        return Err(CommitError::MissingPlaceholders);
    };
    let is_placeholder: std::collections::HashSet<u32> = type_map.iter().map(|(id, _)| *id).collect();
    let prompt = &tokens.prompt_ids;
    let mut left = placeholders.iter();
    let mut cursor = 0usize;
    let mut offsets = Vec::with_capacity(logical.len() + 1);
    for (position, id) in logical.iter().enumerate() {
        offsets.push(cursor);
        if is_placeholder.contains(id) {
            let misaligned = CommitError::PlaceholderMisaligned { position };
            let &(offset, length) = left.next().ok_or(misaligned.clone())?;
            if usize::try_from(offset) != Ok(cursor) || length < 1 {
                return Err(misaligned);
            }
            let length = usize::try_from(length).map_err(|_| misaligned.clone())?;
            cursor = cursor
                .checked_add(length)
                .filter(|cursor| *cursor <= prompt.len())
                .ok_or(CommitError::PromptMisaligned { position })?;
        } else {
            if prompt.get(cursor) != Some(id) {
                return Err(CommitError::PromptMisaligned { position });
            }
            cursor += 1;
        }
    }
    offsets.push(cursor);
    if cursor != prompt.len() || left.next().is_some() {
        return Err(CommitError::PromptMisaligned {
            position: logical.len(),
        });
    }
    Ok(offsets)
}
