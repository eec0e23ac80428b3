//! [`EdgeFeed`]: reading cumulative edge sets as they arrive.

use crate::code::Code;
use crate::edge::SemanticEdgeSet;
use crate::json::{self, Error, Reader};

/// Reads the edge sets of one harness, each of which repeats the earlier ones.
///
/// A payload that begins with the bytes of the previous one is parsed from its first new edge on,
/// and grows the set in place, so that [`crate::Trace::add_semantic_edges`] sees only what is new.
/// Anything else is read from the start.
///
/// ```
/// # use semantic_graph::EdgeFeed;
/// let mut feed = EdgeFeed::new();
/// let edge = r#"{"source_request_id":"a","target_request_id":"b","type":"continuation"}"#;
/// let back = r#"{"source_request_id":"b","target_request_id":"a","type":"subagent_return"}"#;
/// assert_eq!(feed.read(format!(r#"{{"edges":[{edge}]}}"#).as_bytes())?.len(), 1);
/// assert_eq!(feed.read(format!(r#"{{"edges":[{edge},{back}]}}"#).as_bytes())?.len(), 2);
/// # Ok::<(), semantic_graph::json::Error>(())
/// ```
#[derive(Debug)]
pub struct EdgeFeed {
    set: SemanticEdgeSet,
    /// The accepted payload up to the end of its last edge; empty if it cannot be resumed.
    accepted: Vec<u8>,
    max_edges: usize,
    max_bytes: usize,
}

impl Default for EdgeFeed {
    fn default() -> Self {
        Self::new()
    }
}

impl EdgeFeed {
    /// A feed without limits.
    #[must_use]
    pub fn new() -> Self {
        Self::with_limits(usize::MAX, usize::MAX)
    }

    /// A feed that refuses payloads with more edges or bytes.
    #[must_use]
    pub fn with_limits(max_edges: usize, max_bytes: usize) -> Self {
        Self {
            set: SemanticEdgeSet::new(),
            accepted: Vec::new(),
            max_edges,
            max_bytes,
        }
    }

    /// The last set that was accepted.
    #[must_use]
    pub fn set(&self) -> &SemanticEdgeSet {
        &self.set
    }

    /// Reads a payload, the JSON of a [`SemanticEdgeSet`].
    ///
    /// # Errors
    /// [`Error`] as for the set itself, or [`Code::LimitExceeded`]; the last accepted set stays.
    pub fn read(&mut self, payload: &[u8]) -> Result<&SemanticEdgeSet, Error> {
        if payload.len() > self.max_bytes {
            return Err(Error::new(
                Code::LimitExceeded,
                format!("more than {} bytes", self.max_bytes),
            ));
        }
        if !self.accepted.is_empty() && payload.starts_with(&self.accepted) {
            let before = self.set.len();
            match self.resume(payload) {
                Some(end) if self.set.len() <= self.max_edges => {
                    self.accepted.extend_from_slice(&payload[self.accepted.len()..end]);
                    return Ok(&self.set);
                }
                _ if self.set.len() > before => self.set.truncate(before),
                _ => {}
            }
        }
        // Reading from the start also gives errors their full path.
        let set: SemanticEdgeSet = json::from_slice(payload)?;
        if set.len() > self.max_edges {
            return Err(Error::new(
                Code::LimitExceeded,
                format!("more than {} edges", self.max_edges),
            ));
        }
        self.set = set;
        self.accepted.clear();
        if let Some(end) = end_of_last_edge(payload) {
            self.accepted.extend_from_slice(&payload[..end]);
        }
        Ok(&self.set)
    }

    /// Adds the edges after the accepted ones; where the last one ends. None if anything is odd.
    fn resume(&mut self, payload: &[u8]) -> Option<usize> {
        let base = self.accepted.len();
        let text = std::str::from_utf8(payload.get(base..)?).ok()?;
        let mut reader = Reader::new(text);
        let mut end = 0;
        while reader.peek() == Some(b',') {
            reader.expect(b',').ok()?;
            let edge = serde::Deserialize::deserialize(&mut reader).ok()?;
            self.set.push(edge).ok()?;
            end = reader.offset();
        }
        reader.expect(b']').ok()?;
        reader.expect(b'}').ok()?;
        reader.end().ok()?;
        Some(base + end)
    }
}

/// Where the last edge of a valid, non-empty payload ends.
fn end_of_last_edge(payload: &[u8]) -> Option<usize> {
    // A valid set has one key, so what follows its last edge is `]`, `}` and white space.
    let trim = |end: usize, byte: u8| {
        let rest = payload[..end].trim_ascii_end();
        (rest.last() == Some(&byte)).then(|| rest.len() - 1)
    };
    let end = trim(trim(payload.len(), b'}')?, b']')?;
    let end = payload[..end].trim_ascii_end().len();
    (payload.get(end - 1) == Some(&b'}')).then_some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(source: &str, target: &str) -> String {
        format!(r#"{{"source_request_id":"{source}","target_request_id":"{target}","type":"x"}}"#)
    }

    #[test]
    fn every_way_of_growing_gives_the_set_that_a_fresh_parse_gives() {
        let payloads = [
            r#"{"edges":[]}"#.to_owned(),
            format!(r#"{{"edges":[{}]}}"#, edge("a", "b")),
            format!(r#"{{"edges":[{},{}]}} "#, edge("a", "b"), edge("b", "a")),
            format!("{{\"edges\":[{},{} ] }}", edge("a", "b"), edge("b", "a")),
            format!(r#"{{"edges":[{} , {}]}}"#, edge("a", "b"), edge("c", "a")),
            format!(r#"{{"edges":[{}]}}"#, edge("z", "b")),
        ];
        let mut feed = EdgeFeed::new();
        for payload in &payloads {
            let fresh: SemanticEdgeSet = json::from_str(payload).unwrap();
            assert_eq!(feed.read(payload.as_bytes()).unwrap(), &fresh, "{payload}");
        }
    }

    #[test]
    fn a_refused_payload_leaves_the_accepted_set() {
        let mut feed = EdgeFeed::with_limits(2, 1000);
        let good = format!(r#"{{"edges":[{}]}}"#, edge("a", "b"));
        feed.read(good.as_bytes()).unwrap();
        let twice = format!(r#"{{"edges":[{},{}]}}"#, edge("a", "b"), edge("a", "b"));
        let error = feed.read(twice.as_bytes()).unwrap_err();
        assert_eq!(error.code(), Code::DuplicateEdge);
        let extra = format!(r#"{{"edges":[{},{}],"x":1}}"#, edge("a", "b"), edge("b", "a"));
        assert_eq!(feed.read(extra.as_bytes()).unwrap_err().code(), Code::UnknownField);
        let many = format!(
            r#"{{"edges":[{},{},{}]}}"#,
            edge("a", "b"),
            edge("b", "a"),
            edge("c", "a")
        );
        assert_eq!(feed.read(many.as_bytes()).unwrap_err().code(), Code::LimitExceeded);
        assert_eq!(feed.set(), &json::from_str::<SemanticEdgeSet>(&good).unwrap());
        let torn = &many[..many.len() - 4];
        assert_eq!(feed.read(torn.as_bytes()).unwrap_err().code(), Code::InvalidJson);
        assert_eq!(feed.set().len(), 1);
    }
}
