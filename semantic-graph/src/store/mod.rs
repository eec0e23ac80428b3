//! Traces on disk (feature `store`).
//!
//! A store is a file of lines, one record each, that is only ever appended to. A crash costs at
//! most the record being written: a line that is torn at the end is recognised by its checksum and
//! dropped. A turn is one record, so that no reader sees half of one.
//!
//! ```text
//! {"s":0,"c":"8a9136aa","r":{"t":"open","header":{…}}}
//! {"s":1,"c":"…","r":{"t":"turn","nodes":[…],"calls":[…]}}
//! {"s":2,"c":"…","r":{"t":"links","links":[[5,2,"subagent_return"]]}}
//! ```
//!
//! `s` counts the records, `c` is the CRC-32C of the bytes of `r`. Floats keep all digits;
//! infinities are written as `1e999`. Expert arrays, sampling masks and the renderer's ids are not
//! stored, as in every JSON form of a trace.
//!
//! With the feature `zstd` the file can be a sequence of compressed frames of such lines.
//! [`Reader`] reads record by record in constant memory; [`load`] builds the trace; [`Writer`]
//! appends. [`Episodes`] and [`write_episode`] read and write the reference's `traces.jsonl`.
//!
//! ```
//! use semantic_graph::store::{Options, Writer, load};
//! use semantic_graph::{Message, Response, Trace};
//!
//! let dir = tempfile::tempdir()?;
//! let path = dir.path().join("run.jsonl");
//! let mut trace = Trace::new("run");
//! let mut writer = Writer::create(&path, &trace, Options::default())?;
//! let turn = trace.prepare_turn([Message::user("hello")], vec![])?;
//! trace.commit(&turn, Response::text("hi"))?;
//! writer.sync(&trace)?;
//! drop(writer);
//! assert_eq!(load(&path)?.trace, trace);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod builder;
mod episode;
mod error;
mod input;
mod line;
mod reader;
mod writer;

pub use episode::{Episode, Episodes, read_traces, write_episode};
pub use error::StoreError;
pub use line::{Record, Seal};
pub use reader::{Loaded, Reader, Torn, load, recover};
pub use writer::{Options, SyncPolicy, Writer, compact};
