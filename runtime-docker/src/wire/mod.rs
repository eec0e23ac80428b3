//! Requests as values: what is asked of the engine, without asking it.

pub(crate) mod create;
pub(crate) mod archive;
