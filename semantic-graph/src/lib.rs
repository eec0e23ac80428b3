#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod account;
mod apply;
mod branch;
mod call;
mod causal;
mod check;
mod code;
mod component;
mod derived;
mod edge;
mod experts;
mod feed;
mod header;
mod id;
pub mod json;
mod load;
mod message;
mod names;
mod node;
mod record;
mod response;
mod stats;
mod tool;
mod trace;

#[cfg(feature = "hash")]
pub mod hash;
#[cfg(feature = "render")]
pub mod render;
#[cfg(feature = "store")]
pub mod store;

pub use account::Limits;
pub use apply::{ApplyError, NewLink};
pub use branch::{Branch, StreamError};
pub use call::{CallError, FinishReason, ModelCall, Policy, Sampling, TimeSpan, Usage};
pub use causal::{CausalEdge, CausalGraph, Cause, EdgeFilter, Loop};
pub use check::{Place, Problem};
pub use code::Code;
pub use component::Components;
pub use edge::{AcpInfo, EDGE_SET_METADATA_KEY, EdgeError, ParentLink, SemanticEdge, SemanticEdgeSet, Violation};
pub use experts::{ArrayError, ElementType, RoutedExperts, SamplingMask};
pub use feed::EdgeFeed;
pub use header::{HeaderError, REQUEST_ID_HEADER, is_request_id_header, take_request_id};
pub use id::{EdgeType, InvalidName, MAX_NAME_LEN, NodeId, RequestId};
pub use load::LoadOptions;
pub use message::{AssistantMessage, Content, Message, Part, Role, ToolCall, ToolCallKind, ToolMessage};
pub use node::{MessageNode, NodeTokens};
pub use record::RecordOptions;
pub use response::{ExpertRows, Response, Span, TurnTokens};
pub use stats::Stats;
pub use tool::Tool;
pub use trace::Trace;

#[cfg(feature = "hash")]
pub use hash::{BridgeAnchor, CommitError, PendingTurn};
