//! The reference's `traces.jsonl`: one episode per line.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};

use super::error::StoreError;
use crate::json::{self, Value};
use crate::message::once;
use crate::record::{RecordOptions, With};
use crate::trace::Trace;

/// One line of a `traces.jsonl`: the traces of an episode, and whatever else it has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Episode {
    /// The traces.
    pub traces: Vec<Trace>,
    /// Other members, carried through.
    pub extra: Vec<(Box<str>, Value)>,
}

impl serde::Serialize for Episode {
    /// Writes compact records with four decimals, as the reference does.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (key, value) in &self.extra {
            map.serialize_entry(key, value)?;
        }
        map.serialize_entry("traces", &With(&*self.traces, RecordOptions::STORED))?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for Episode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Episode;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an episode")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Episode, A::Error> {
                let mut traces: Option<Vec<Trace>> = None;
                let mut extra: Vec<(Box<str>, Value)> = Vec::new();
                while let Some(key) = map.next_key::<Box<str>>()? {
                    if &*key == "traces" {
                        once(&mut traces, "traces", map.next_value()?)?;
                        continue;
                    }
                    let value = map.next_value()?;
                    match extra.iter_mut().find(|(known, _)| *known == key) {
                        Some((_, slot)) => *slot = value,
                        None => extra.push((key, value)),
                    }
                }
                Ok(Episode {
                    traces: traces.ok_or_else(|| serde::de::Error::missing_field("traces"))?,
                    extra,
                })
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// The episodes of a `traces.jsonl`, one in memory at a time.
#[derive(Debug)]
pub struct Episodes<R> {
    inner: R,
    line: Vec<u8>,
}

impl<R: BufRead> Episodes<R> {
    /// Reads from `inner`.
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            line: Vec::new(),
        }
    }
}

impl<R: BufRead> Iterator for Episodes<R> {
    type Item = Result<Episode, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            self.line.clear();
            match self.inner.read_until(b'\n', &mut self.line) {
                Ok(0) => return None,
                Ok(_) if self.line.trim_ascii().is_empty() => {}
                Ok(_) => return Some(json::from_slice(&self.line).map_err(StoreError::from)),
                Err(error) => return Some(Err(error.into())),
            }
        }
    }
}

/// Appends one episode as a line, in one write.
///
/// # Errors
/// [`StoreError::Io`].
pub fn write_episode(out: &mut impl Write, episode: &Episode) -> Result<(), StoreError> {
    let mut line = json::to_vec(episode)?;
    line.push(b'\n');
    out.write_all(&line)?;
    Ok(())
}

/// Reads the traces of a file of any kind: a store (compressed or not), a `traces.jsonl`, or one
/// record as JSON.
///
/// # Errors
/// [`StoreError`] as for the kind of file that the beginning suggests.
pub fn read_traces(path: impl AsRef<Path>) -> Result<Vec<Trace>, StoreError> {
    let path = path.as_ref();
    let mut file = BufReader::new(File::open(path)?);
    let beginning = file.fill_buf()?;
    if beginning.starts_with(b"{\"s\":") || beginning.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        return Ok(vec![super::load(path)?.trace]);
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    // An episode has its traces under a key that a record does not have.
    let first = text
        .split(|byte| *byte == b'\n')
        .find(|line| !line.trim_ascii().is_empty())
        .unwrap_or_default();
    let is_episode = json::from_slice::<Episode>(first).is_ok()
        || json::from_slice::<Value>(first).is_ok_and(|line| line.get("traces").is_some());
    if is_episode {
        let mut traces = Vec::new();
        for episode in Episodes::new(&*text) {
            traces.extend(episode?.traces);
        }
        return Ok(traces);
    }
    Ok(vec![Trace::from_json(&text)?])
}
