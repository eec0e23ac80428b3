//! JSON as graphs of model conversations need it.
//!
//! Tool arguments and provider state come from programs whose JSON is wider than what Rust's
//! usual types hold: integers of any size that must stay integers, `1` and `1.0` as different
//! things, strings with lone surrogates. [`Value`] holds all of it. The parser works without
//! recursion and stops at [`MAX_DEPTH`] levels, so hostile nesting cannot overflow a stack.
//!
//! [`from_str`], [`from_slice`], [`to_string`] and [`to_vec`] serve every serde type of this crate
//! and lose nothing. Other serde formats work too; there, integers beyond 64 bits depend on what
//! the format can express.

mod de;
mod error;
mod lexer;
mod ser;
mod value;
mod write;

pub use de::{from_slice, from_str, from_value};
pub use error::{Error, Segment};
pub use ser::{to_string, to_value, to_vec, to_writer_buf};
pub use value::{JsonString, Object, Value};
pub use write::{NonFinite, Style, python_float};

pub(crate) use de::Reader;
pub(crate) use lexer::parse_value;
pub(crate) use write::write_value;

/// How deeply arrays and objects may nest.
///
/// The reference implementation gives up near 1,000 levels too, with an exception.
pub const MAX_DEPTH: usize = 1000;

/// Name under which a [`Value`] asks the reader of this module for raw JSON text.
pub(crate) const RAW_TOKEN: &str = "$semantic_graph::json::raw";
