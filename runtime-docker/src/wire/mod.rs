//! Requests as values: what is asked of the engine, without asking it.

pub(crate) mod archive;
pub(crate) mod create;
