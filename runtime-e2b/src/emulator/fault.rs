//! [`Fault`]: misbehaviour on request.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use runtime_core::retry::Jitter;

/// What goes wrong, for which requests, and how often.
#[derive(Debug, Clone)]
pub struct Fault {
    /// The requests that it is about: a part of `METHOD /path?query`; with a `$` behind it, its end.
    pub request: String,
    /// So many of them are spared first.
    pub skip: u32,
    /// So many go wrong; `u32::MAX` for all.
    pub times: u32,
    /// And of those only this part, at random.
    pub probability: f64,
    /// What happens.
    pub action: Action,
}

/// What goes wrong.
#[derive(Debug, Clone)]
pub enum Action {
    /// Another answer, and nothing is done.
    Answer {
        /// Its status.
        status: u16,
        /// Its body; JSON if it begins with a brace.
        body: String,
        /// Its headers.
        headers: Vec<(String, String)>,
    },
    /// Nothing is done, and the connection is closed without an answer.
    Close,
    /// It is done, and the connection is closed without an answer.
    LoseAnswer,
    /// It is done late.
    Delay(Duration),
    /// The body of the answer breaks off after so many bytes, at random within this range.
    Drop(Range<u64>),
    /// The body of the answer falls silent after so many bytes, for ever.
    Stall(u64),
    /// The answer is a stream of frames, and breaks off after so many.
    DropFrames(u64),
    /// The answer is a stream of frames, and falls silent after so many, for ever.
    StallFrames(u64),
    /// The answer is a stream of frames, and its first one comes behind its second, as older daemons let it.
    Reorder,
    /// The body of the answer comes in chunks of so many bytes, which are no frames' boundaries.
    Rechunk(usize),
    /// The answer is a stream of frames, and claims that its frames are compressed.
    ClaimCompressed,
}

impl Fault {
    /// The next `times` requests that contain `request` go wrong.
    pub fn new(request: impl Into<String>, times: u32, action: Action) -> Self {
        Self {
            request: request.into(),
            skip: 0,
            times,
            probability: 1.0,
            action,
        }
    }

    /// Spares the first ones.
    #[must_use]
    pub fn skip(mut self, skip: u32) -> Self {
        self.skip = skip;
        self
    }

    /// Only this part of them goes wrong.
    #[must_use]
    pub fn probability(mut self, probability: f64) -> Self {
        self.probability = probability;
        self
    }
}

impl Action {
    /// An answer of this status.
    pub fn answer(status: u16, body: impl Into<String>) -> Self {
        Self::Answer {
            status,
            body: body.into(),
            headers: Vec::new(),
        }
    }
}

/// What is to happen to one request.
#[derive(Debug, Clone)]
pub(super) enum Verdict {
    Answer(u16, String, Vec<(String, String)>),
    Close,
    LoseAnswer,
    Delay(Duration),
    Distort(Distortion),
}

/// What is to happen to the body of an answer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Distortion {
    Bytes { left: u64, breaks: bool },
    Frames { left: u64, breaks: bool },
    Reorder,
    Rechunk(usize),
    ClaimCompressed,
}

#[derive(Debug)]
pub(super) struct Faults {
    injected: Mutex<Vec<Fault>>,
    random: Jitter,
}

impl Faults {
    pub(super) fn new() -> Self {
        Self {
            injected: Mutex::default(),
            random: Jitter::seeded(0x5eed),
        }
    }

    pub(super) fn inject(&self, fault: Fault) {
        self.injected.lock().unwrap_or_else(PoisonError::into_inner).push(fault);
    }

    pub(super) fn clear(&self) {
        self.injected.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// What happens to this request; the first fault that is about it decides.
    pub(super) fn judge(&self, request: &str) -> Option<Verdict> {
        let mut injected = self.injected.lock().unwrap_or_else(PoisonError::into_inner);
        for fault in injected.iter_mut() {
            let is_about_it = match fault.request.strip_suffix('$') {
                Some(end) => request.ends_with(end),
                None => request.contains(&fault.request),
            };
            if fault.times == 0 || !is_about_it {
                continue;
            }
            if fault.skip > 0 {
                fault.skip -= 1;
                continue;
            }
            if self.random.fraction() >= fault.probability {
                continue;
            }
            if fault.times != u32::MAX {
                fault.times -= 1;
            }
            return Some(match &fault.action {
                Action::Answer { status, body, headers } => Verdict::Answer(*status, body.clone(), headers.clone()),
                Action::Close => Verdict::Close,
                Action::LoseAnswer => Verdict::LoseAnswer,
                Action::Delay(delay) => Verdict::Delay(*delay),
                Action::Drop(range) => {
                    let span = range.end.saturating_sub(range.start) as f64;
                    Verdict::Distort(Distortion::Bytes {
                        left: range.start + (span * self.random.fraction()) as u64,
                        breaks: true,
                    })
                }
                Action::Stall(after) => Verdict::Distort(Distortion::Bytes {
                    left: *after,
                    breaks: false,
                }),
                Action::DropFrames(after) => Verdict::Distort(Distortion::Frames {
                    left: *after,
                    breaks: true,
                }),
                Action::StallFrames(after) => Verdict::Distort(Distortion::Frames {
                    left: *after,
                    breaks: false,
                }),
                Action::Reorder => Verdict::Distort(Distortion::Reorder),
                Action::Rechunk(size) => Verdict::Distort(Distortion::Rechunk((*size).max(1))),
                Action::ClaimCompressed => Verdict::Distort(Distortion::ClaimCompressed),
            });
        }
        None
    }
}
