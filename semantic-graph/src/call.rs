//! [`ModelCall`]: one exchange with a provider, successful or not.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::Serializer;

use crate::edge::AcpInfo;
use crate::id::{NodeId, RequestId};
use crate::json::Value;
use crate::message::once;
use crate::record::{Fields, Record, RecordOptions, serialize_as_record};

/// One exchange with a provider, successful or not.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
pub struct ModelCall {
    /// The node the call produced; none for a call that failed. Out-of-range numbers can occur in
    /// records and are found when edges are applied.
    #[serde(default)]
    pub node: Option<i64>,
    /// The model's name.
    #[serde(default)]
    pub model: Option<Box<str>>,
    /// Sampling parameters.
    #[serde(default)]
    pub sampling: Option<Box<Sampling>>,
    /// The path that was requested.
    #[serde(default)]
    pub endpoint: Option<Box<str>>,
    /// Why the model stopped.
    #[serde(default)]
    pub finish_reason: Option<FinishReason>,
    /// Tokens.
    #[serde(default)]
    pub usage: Option<Box<Usage>>,
    /// When it ran.
    #[serde(default)]
    pub time: TimeSpan,
    /// Why it failed.
    #[serde(default)]
    pub error: Option<Box<CallError>>,
    /// Which rule stopped it, and what in the request broke the rule.
    #[serde(default)]
    pub policy: Option<Box<Policy>>,
    /// The request id the harness sent along.
    #[serde(default)]
    pub acp: Option<AcpInfo>,
}

impl ModelCall {
    /// A call that produced `node`.
    #[must_use]
    pub fn committed(node: NodeId) -> Self {
        Self {
            node: Some(i64::from(node.get())),
            ..Self::default()
        }
    }

    /// The same with a request id.
    #[must_use]
    pub fn with_request_id(mut self, request_id: RequestId) -> Self {
        self.acp = Some(AcpInfo { request_id });
        self
    }

    /// The same with usage.
    #[must_use]
    pub fn with_usage(mut self, usage: Usage) -> Self {
        self.usage = Some(Box::new(usage));
        self
    }

    /// The request id, if there is one.
    #[must_use]
    pub fn request_id(&self) -> Option<&RequestId> {
        self.acp.as_ref().map(|acp| &acp.request_id)
    }
}

/// Sampling parameters: the common ones, and whatever else the request had.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampling {
    /// Temperature.
    pub temperature: Option<f64>,
    /// Nucleus mass, 0 to 1.
    pub top_p: Option<f64>,
    /// How hard the model should think.
    pub reasoning_effort: Option<Box<str>>,
    /// Completion limit in tokens; also read from `max_completion_tokens`.
    pub max_tokens: Option<i64>,
    /// Other keys, kept.
    pub extra: Vec<(Box<str>, Value)>,
}

/// Why a model stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// It was done.
    Stop,
    /// It reached a limit.
    Length,
    /// It called tools.
    ToolCalls,
}

impl FinishReason {
    /// The reason as it stands in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        }
    }
}

/// Tokens of one call, or of several added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize)]
pub struct Usage {
    /// Prompt tokens, without those read from a cache.
    pub prompt_tokens: i64,
    /// Completion tokens, reasoning included.
    pub completion_tokens: i64,
    /// Prompt tokens read from a cache.
    #[serde(default)]
    pub cached_input_tokens: Option<i64>,
    /// Completion tokens that were reasoning.
    #[serde(default)]
    pub reasoning_tokens: Option<i64>,
    /// Price, in US dollars.
    #[serde(default)]
    pub cost: Option<f64>,
}

impl Usage {
    /// Prompt tokens, cached ones included.
    #[must_use]
    pub fn input_tokens(&self) -> i64 {
        self.prompt_tokens.saturating_add(self.cached_input_tokens.unwrap_or(0))
    }

    /// Input and completion.
    #[must_use]
    pub fn total_tokens(&self) -> i64 {
        self.input_tokens().saturating_add(self.completion_tokens)
    }

    /// The sum of several; a nullable count is null only if it is null in all. None of none.
    #[must_use]
    pub fn aggregate<'a>(usages: impl IntoIterator<Item = &'a Usage>) -> Option<Usage> {
        fn add<T>(sum: &mut Option<T>, next: Option<T>, plus: impl Fn(T, T) -> T)
        where
            T: Copy,
        {
            *sum = match (*sum, next) {
                (Some(a), Some(b)) => Some(plus(a, b)),
                (a, b) => a.or(b),
            };
        }
        let mut sum: Option<Usage> = None;
        for usage in usages {
            match &mut sum {
                None => sum = Some(*usage),
                Some(sum) => {
                    sum.prompt_tokens = sum.prompt_tokens.saturating_add(usage.prompt_tokens);
                    sum.completion_tokens = sum.completion_tokens.saturating_add(usage.completion_tokens);
                    add(
                        &mut sum.cached_input_tokens,
                        usage.cached_input_tokens,
                        i64::saturating_add,
                    );
                    add(&mut sum.reasoning_tokens, usage.reasoning_tokens, i64::saturating_add);
                    add(&mut sum.cost, usage.cost, |a, b| a + b);
                }
            }
        }
        sum
    }
}

/// When something began and ended, in seconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TimeSpan {
    /// Begin.
    #[serde(default)]
    pub start: f64,
    /// End.
    #[serde(default)]
    pub end: f64,
}

/// Why a call failed.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
pub struct CallError {
    /// The kind of error.
    #[serde(rename = "type")]
    pub kind: Box<str>,
    /// The provider's words.
    #[serde(default)]
    pub message: Box<str>,
    /// HTTP status.
    #[serde(default)]
    pub status_code: Option<i64>,
    /// Where it was raised.
    #[serde(default)]
    pub traceback: Option<Box<str>>,
}

/// Which rule stopped a call.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Policy {
    /// The rule.
    pub code: Box<str>,
    /// JSON pointers into the request.
    #[serde(default)]
    pub paths: Vec<Box<str>>,
}

serialize_as_record!(ModelCall, Usage, Sampling, CallError);

impl Record for ModelCall {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        fields.put_nullable("node", &self.node)?;
        fields.put_nullable("model", &self.model)?;
        fields.put_record_nullable("sampling", &self.sampling)?;
        fields.put_nullable("endpoint", &self.endpoint)?;
        fields.put_nullable("finish_reason", &self.finish_reason)?;
        fields.put_record_nullable("usage", &self.usage)?;
        fields.put("time", &self.time)?;
        fields.put_record_nullable("error", &self.error)?;
        fields.put_nullable("policy", &self.policy)?;
        fields.put_nullable("acp", &self.acp)?;
        fields.end()
    }
}

impl Record for Usage {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        fields.put("prompt_tokens", &self.prompt_tokens)?;
        fields.put("completion_tokens", &self.completion_tokens)?;
        fields.put_nullable("cached_input_tokens", &self.cached_input_tokens)?;
        fields.put_nullable("reasoning_tokens", &self.reasoning_tokens)?;
        fields.put_nullable("cost", &self.cost)?;
        fields.end()
    }
}

impl Record for Sampling {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        fields.put_nullable("temperature", &self.temperature)?;
        fields.put_nullable("top_p", &self.top_p)?;
        fields.put_nullable("reasoning_effort", &self.reasoning_effort)?;
        fields.put_nullable("max_tokens", &self.max_tokens)?;
        for (key, value) in &self.extra {
            if value.is_null() && options.exclude_none {
                continue;
            }
            fields.put(key, value)?;
        }
        fields.end()
    }
}

impl Record for CallError {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        fields.put("type", &self.kind)?;
        fields.put("message", &self.message)?;
        fields.put_nullable("status_code", &self.status_code)?;
        fields.put_nullable("traceback", &self.traceback)?;
        fields.end()
    }
}

impl<'de> Deserialize<'de> for Sampling {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Sampling;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("sampling parameters")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Sampling, A::Error> {
                let mut temperature = None;
                let mut top_p = None;
                let mut reasoning_effort = None;
                let mut max_tokens: Option<Option<i64>> = None;
                let mut alias: Option<Option<i64>> = None;
                let mut extra: Vec<(Box<str>, Value)> = Vec::new();
                while let Some(key) = map.next_key::<Box<str>>()? {
                    match &*key {
                        "temperature" => once(&mut temperature, "temperature", map.next_value()?)?,
                        "top_p" => once(&mut top_p, "top_p", map.next_value()?)?,
                        "reasoning_effort" => {
                            once(&mut reasoning_effort, "reasoning_effort", map.next_value()?)?;
                        }
                        "max_tokens" => once(&mut max_tokens, "max_tokens", map.next_value()?)?,
                        "max_completion_tokens" => {
                            once(&mut alias, "max_completion_tokens", map.next_value()?)?;
                        }
                        _ => {
                            let value = map.next_value()?;
                            match extra.iter_mut().find(|(known, _)| *known == key) {
                                Some((_, slot)) => *slot = value,
                                None => extra.push((key, value)),
                            }
                        }
                    }
                }
                Ok(Sampling {
                    temperature: temperature.flatten(),
                    top_p: top_p.flatten(),
                    reasoning_effort: reasoning_effort.flatten(),
                    max_tokens: max_tokens.or(alias).flatten(),
                    extra,
                })
            }
        }
        deserializer.deserialize_map(Members)
    }
}
