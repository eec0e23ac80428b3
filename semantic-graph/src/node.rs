//! [`MessageNode`]: one message of a trace with the tokens it appended.

use std::sync::Arc;

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};

use crate::code::{Code, Coded};
use crate::edge::ParentLink;
use crate::experts::{RoutedExperts, SamplingMask};
use crate::id::NodeId;
use crate::message::Message;
use crate::record::{Fields, Record, RecordOptions, Stream, serialize_as_record};
use crate::tool::Tool;

/// One message of a trace, kept once, with the tokens it appended and its causes.
#[derive(Clone, Debug, PartialEq)]
pub struct MessageNode {
    /// The message before this one in the exact conversation; none for a root.
    pub parent: Option<NodeId>,
    /// The tools offered to the conversation; only roots have them. Never an empty list.
    pub tools: Option<Arc<Vec<Tool>>>,
    /// Causes, in the order in which they were applied.
    pub semantic_parents: Vec<ParentLink>,
    /// The message.
    pub message: Arc<Message>,
    /// Whether the model produced it in a call of this trace.
    pub sampled: bool,
    /// Creation time, in seconds since the Unix epoch.
    pub timestamp: f64,
    /// Tokens and what belongs to them; none for a message without tokens.
    pub tokens: Option<Box<NodeTokens>>,
}

/// The tokens a message appended, and the streams parallel to them.
///
/// S is the number of `true` entries of `mask`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeTokens {
    /// Template scaffold before the message, and the message itself.
    pub token_ids: Vec<u32>,
    /// The renderer's ids where they differ (one placeholder per image); never written.
    pub renderer_token_ids: Option<Vec<u32>>,
    /// Whether the model sampled each token.
    pub mask: Vec<bool>,
    /// Whether each token is content; empty without attribution.
    pub is_content: Vec<bool>,
    /// Natural-log probabilities, length S.
    pub logprobs: Vec<f64>,
    /// Length S, or never computed.
    pub advantages: Option<Vec<f64>>,
    /// Length S, or never computed.
    pub reference_logprobs: Option<Vec<f64>>,
    /// Length S, or never computed.
    pub trainer_logprobs: Option<Vec<f64>>,
    /// Length S, or never computed; in nats.
    pub entropies: Option<Vec<f64>>,
    /// Named weights, each parallel to `token_ids`.
    pub loss_weights: Option<Vec<(Box<str>, Vec<f64>)>>,
    /// Experts per token; never written to JSON.
    pub routed_experts: Option<RoutedExperts>,
    /// Candidate tokens per sampled token; never written to JSON.
    pub sampling_mask: Option<SamplingMask>,
}

/// What a node without tokens has.
static NO_TOKENS: NodeTokens = NodeTokens {
    token_ids: Vec::new(),
    renderer_token_ids: None,
    mask: Vec::new(),
    is_content: Vec::new(),
    logprobs: Vec::new(),
    advantages: None,
    reference_logprobs: None,
    trainer_logprobs: None,
    entropies: None,
    loss_weights: None,
    routed_experts: None,
    sampling_mask: None,
};

impl NodeTokens {
    /// The renderer's ids: the same as `token_ids` unless they are kept apart.
    #[must_use]
    pub fn logical_ids(&self) -> &[u32] {
        self.renderer_token_ids.as_deref().unwrap_or(&self.token_ids)
    }

    /// S, the number of sampled tokens.
    #[must_use]
    pub fn sampled_len(&self) -> usize {
        self.mask.iter().filter(|sampled| **sampled).count()
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == NO_TOKENS
    }

    /// Every pair of lengths that should agree and does not.
    pub(crate) fn length_mismatches(&self) -> Vec<&'static str> {
        let tokens = self.token_ids.len();
        let sampled = self.sampled_len();
        let mut found = Vec::new();
        let mut check = |ok: bool, name| {
            if !ok {
                found.push(name);
            }
        };
        check(self.mask.len() == tokens, "mask");
        check(
            self.is_content.is_empty() || self.is_content.len() == tokens,
            "is_content",
        );
        check(self.logprobs.len() <= sampled, "logprobs");
        for (name, stream) in [
            ("advantages", &self.advantages),
            ("reference_logprobs", &self.reference_logprobs),
            ("trainer_logprobs", &self.trainer_logprobs),
            ("entropies", &self.entropies),
        ] {
            check(stream.as_ref().is_none_or(|values| values.len() <= sampled), name);
        }
        check(
            self.loss_weights
                .iter()
                .flatten()
                .all(|(_, weights)| weights.len() == tokens),
            "loss_weights",
        );
        found
    }
}

impl MessageNode {
    /// An unsampled node without tokens, created now.
    #[must_use]
    pub fn new(parent: Option<NodeId>, message: impl Into<Arc<Message>>) -> Self {
        Self {
            parent,
            tools: None,
            semantic_parents: Vec::new(),
            message: message.into(),
            sampled: false,
            timestamp: now(),
            tokens: None,
        }
    }

    /// The tools offered to the conversation; empty for all but roots.
    #[must_use]
    pub fn tools(&self) -> &[Tool] {
        self.tools.as_deref().map_or(&[], Vec::as_slice)
    }

    /// The tokens; an empty value for a node without any.
    #[must_use]
    pub fn tokens(&self) -> &NodeTokens {
        self.tokens.as_deref().unwrap_or(&NO_TOKENS)
    }
}

/// Seconds since the Unix epoch.
pub(crate) fn now() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

serialize_as_record!(MessageNode);

impl Record for MessageNode {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        let mut fields = Fields::open(serializer, options)?;
        fields.put_nullable("parent", &self.parent)?;
        if !self.tools().is_empty() {
            fields.put_records("tools", self.tools())?;
        }
        fields.put("semantic_parents", &self.semantic_parents)?;
        fields.put_record("message", &*self.message)?;
        fields.put("sampled", &self.sampled)?;
        fields.put("timestamp", &self.timestamp)?;
        let tokens = self.tokens();
        let decimals = options.float_decimals;
        fields.put("token_ids", &tokens.token_ids)?;
        fields.put("mask", &tokens.mask)?;
        fields.put("is_content", &tokens.is_content)?;
        fields.put("logprobs", &Stream(&tokens.logprobs, decimals))?;
        for (key, stream) in [
            ("advantages", &tokens.advantages),
            ("reference_logprobs", &tokens.reference_logprobs),
            ("trainer_logprobs", &tokens.trainer_logprobs),
            ("entropies", &tokens.entropies),
        ] {
            fields.put_nullable(key, &stream.as_deref().map(|s| Stream(s, decimals)))?;
        }
        fields.put_nullable("loss_weights", &tokens.loss_weights.as_ref().map(Weights))?;
        fields.end()
    }
}

struct Weights<'a>(&'a Vec<(Box<str>, Vec<f64>)>);

impl serde::Serialize for Weights<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, weights) in self.0 {
            map.serialize_entry(name, weights)?;
        }
        map.end()
    }
}

/// A number of a per-token stream; `null`, which is how JSON text has NaN, reads as NaN.
struct StreamValue(f64);

impl<'de> Deserialize<'de> for StreamValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = StreamValue;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number")
            }
            fn visit_f64<E>(self, number: f64) -> Result<StreamValue, E> {
                Ok(StreamValue(number))
            }
            fn visit_i64<E>(self, number: i64) -> Result<StreamValue, E> {
                Ok(StreamValue(number as f64))
            }
            fn visit_u64<E>(self, number: u64) -> Result<StreamValue, E> {
                Ok(StreamValue(number as f64))
            }
            fn visit_unit<E>(self) -> Result<StreamValue, E> {
                Ok(StreamValue(f64::NAN))
            }
        }
        deserializer.deserialize_f64(Number)
    }
}

/// A per-token stream.
#[derive(Default)]
struct Values(Vec<f64>);

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Values;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an array of numbers")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Values, A::Error> {
                let mut values = Vec::new();
                while let Some(StreamValue(value)) = seq.next_element()? {
                    values.push(value);
                }
                Ok(Values(values))
            }
        }
        deserializer.deserialize_seq(List)
    }
}

#[derive(Default)]
struct NamedWeights(Vec<(Box<str>, Vec<f64>)>);

impl<'de> Deserialize<'de> for NamedWeights {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = NamedWeights;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of arrays of numbers")
            }
            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<NamedWeights, A::Error> {
                let mut weights: Vec<(Box<str>, Vec<f64>)> = Vec::new();
                while let Some((name, Values(values))) = map.next_entry::<Box<str>, Values>()? {
                    match weights.iter_mut().find(|(known, _)| *known == name) {
                        Some((_, slot)) => *slot = values,
                        None => weights.push((name, values)),
                    }
                }
                Ok(NamedWeights(weights))
            }
        }
        deserializer.deserialize_map(Map)
    }
}

/// A parent number; a negative one is a broken parent rather than a broken number.
fn parent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<NodeId>, D::Error> {
    match Option::<i64>::deserialize(deserializer)? {
        None => Ok(None),
        Some(number) => match u32::try_from(number) {
            Ok(number) if number < u32::MAX => Ok(Some(NodeId::new(number))),
            _ => Err(de::Error::custom(Coded(
                Code::InvalidParent,
                "a parent is an earlier node",
            ))),
        },
    }
}

impl<'de> Deserialize<'de> for MessageNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Members {
            #[serde(default, deserialize_with = "parent")]
            parent: Option<NodeId>,
            #[serde(default)]
            tools: Vec<Tool>,
            #[serde(default)]
            semantic_parents: Vec<ParentLink>,
            message: Message,
            #[serde(default)]
            sampled: bool,
            timestamp: Option<f64>,
            #[serde(default)]
            token_ids: Vec<u32>,
            #[serde(default)]
            mask: Vec<bool>,
            #[serde(default)]
            is_content: Vec<bool>,
            #[serde(default)]
            logprobs: Values,
            advantages: Option<Values>,
            reference_logprobs: Option<Values>,
            trainer_logprobs: Option<Values>,
            entropies: Option<Values>,
            loss_weights: Option<NamedWeights>,
        }
        let mut read = Members::deserialize(deserializer)?;
        read.semantic_parents.shrink_to_fit();
        let stream = |values: Option<Values>| {
            values.map(|Values(mut values)| {
                values.shrink_to_fit();
                values
            })
        };
        let mut tokens = NodeTokens {
            token_ids: read.token_ids,
            renderer_token_ids: None,
            mask: read.mask,
            is_content: read.is_content,
            logprobs: read.logprobs.0,
            advantages: stream(read.advantages),
            reference_logprobs: stream(read.reference_logprobs),
            trainer_logprobs: stream(read.trainer_logprobs),
            entropies: stream(read.entropies),
            loss_weights: read.loss_weights.map(|weights| weights.0),
            routed_experts: None,
            sampling_mask: None,
        };
        tokens.token_ids.shrink_to_fit();
        tokens.mask.shrink_to_fit();
        tokens.is_content.shrink_to_fit();
        tokens.logprobs.shrink_to_fit();
        Ok(Self {
            parent: read.parent,
            tools: (!read.tools.is_empty()).then(|| Arc::new(read.tools)),
            semantic_parents: read.semantic_parents,
            message: Arc::new(read.message),
            sampled: read.sampled,
            timestamp: read.timestamp.unwrap_or_else(now),
            tokens: (!tokens.is_empty()).then(|| Box::new(tokens)),
        })
    }
}
