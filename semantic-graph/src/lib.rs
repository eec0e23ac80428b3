//! The message graph of a rollout with typed causal edges.
#![forbid(unsafe_code)]
