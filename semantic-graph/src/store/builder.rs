//! [`Builder`]: from records to a trace.

use super::line::{Record, STORED, Seal, Unlinked};
use crate::edge::ParentLink;
use crate::hash::{Digest, Hasher};
use crate::json::{self, NonFinite, Value};
use crate::load::{Header, Labels};
use crate::record::With;
use crate::trace::Trace;

/// Builds a trace from its records.
#[derive(Debug)]
pub(super) struct Builder {
    pub(super) header: Value,
    pub(super) trace: Trace,
    pub(super) sealed: bool,
    labels: Labels,
    opened: bool,
}

impl Builder {
    pub(super) fn new() -> Self {
        Self {
            header: Value::Object(Vec::new()),
            trace: Trace::new(""),
            sealed: false,
            labels: Labels::default(),
            opened: false,
        }
    }

    /// Applies one record.
    pub(super) fn apply(&mut self, record: Record) -> Result<(), String> {
        if self.opened == matches!(record, Record::Open { .. }) {
            return Err("the first record, and no other, opens the trace".to_owned());
        }
        if self.sealed {
            return Err("a record after the seal".to_owned());
        }
        match record {
            Record::Open { header } => {
                self.opened = true;
                self.set_header(header)
            }
            Record::Turn { nodes, calls } => {
                for node in nodes {
                    let next = self.trace.nodes.len();
                    if next >= u32::MAX as usize {
                        return Err("more than 2^32 nodes".to_owned());
                    }
                    if node.parent.is_some_and(|parent| parent.index() >= next) {
                        return Err(format!("the parent of node {next} is not an earlier node"));
                    }
                    if !node.semantic_parents.is_empty() {
                        return Err(format!("node {next} has links of its own"));
                    }
                    self.trace.nodes.push(node);
                }
                self.trace.calls.extend(calls);
                Ok(())
            }
            Record::Links(links) => {
                let len = self.trace.nodes.len();
                for at in 0..links.len() {
                    // Links of one target usually come together: make exactly the room they need.
                    let target = links[at].0;
                    if at == 0 || links[at - 1].0 != target {
                        let run = links[at..].iter().take_while(|link| link.0 == target).count();
                        if let Some(node) = self.trace.nodes.get_mut(target.index())
                            && node.semantic_parents.is_empty()
                        {
                            node.semantic_parents.reserve_exact(run);
                        }
                    }
                    let (_, source, ref label) = links[at];
                    if target.index() >= len || source.index() >= len {
                        return Err(format!("a link between missing nodes: {source} -> {target}"));
                    }
                    let label = self.labels.share(label.clone());
                    self.trace.nodes[target.index()]
                        .semantic_parents
                        .push(ParentLink { node: source, label });
                }
                Ok(())
            }
            Record::Set { fields } => {
                let (Value::Object(members), Value::Object(fields)) = (&mut self.header, fields) else {
                    return Err("fields are an object".to_owned());
                };
                for (key, value) in fields {
                    match members.iter_mut().find(|(known, _)| *known == key) {
                        Some((_, slot)) => *slot = value,
                        None => members.push((key, value)),
                    }
                }
                let header = std::mem::take(&mut self.header);
                self.set_header(header)
            }
            Record::Seal(seal) => {
                let counted = count(&self.trace);
                if (seal.nodes, seal.calls, seal.links) != counted {
                    return Err(format!(
                        "the seal counts {} nodes, {} calls and {} links; there are {counted:?}",
                        seal.nodes, seal.calls, seal.links
                    ));
                }
                self.sealed = true;
                Ok(())
            }
        }
    }

    fn set_header(&mut self, header: Value) -> Result<(), String> {
        let read: Trace = json::from_value(&header).map_err(|error| error.to_string())?;
        let nodes = std::mem::take(&mut self.trace.nodes);
        let calls = std::mem::take(&mut self.trace.calls);
        self.trace = read;
        self.trace.nodes = nodes;
        self.trace.calls = calls;
        self.header = header;
        Ok(())
    }

    /// The trace, without room to spare.
    pub(super) fn finish(mut self) -> Trace {
        for node in &mut self.trace.nodes {
            node.semantic_parents.shrink_to_fit();
        }
        self.trace.nodes.shrink_to_fit();
        self.trace.calls.shrink_to_fit();
        self.trace
    }
}

/// Nodes, calls and links.
fn count(trace: &Trace) -> (u64, u64, u64) {
    let links: usize = trace.nodes.iter().map(|node| node.semantic_parents.len()).sum();
    (trace.nodes.len() as u64, trace.calls.len() as u64, links as u64)
}

/// Counts and digest of a trace.
pub(super) fn seal(trace: &Trace) -> Result<Seal, json::Error> {
    let (nodes, calls, links) = count(trace);
    Ok(Seal {
        nodes,
        calls,
        links,
        digest: state_digest(trace)?.to_string(),
    })
}

/// A digest of everything that is stored of a trace.
pub(super) fn state_digest(trace: &Trace) -> Result<Digest, json::Error> {
    let mut hasher = Hasher::new();
    let mut text = Vec::new();
    let mut add = |value: &dyn Fn(&mut Vec<u8>) -> Result<(), json::Error>| {
        text.clear();
        value(&mut text)?;
        text.push(b'\n');
        hasher.bytes(&text);
        Ok::<_, json::Error>(())
    };
    add(&|out| json::to_writer_buf(out, &Header(trace), NonFinite::Overflow))?;
    for node in &trace.nodes {
        add(&|out| {
            let nodes = Unlinked(std::slice::from_ref(node));
            json::to_writer_buf(out, &nodes, NonFinite::Overflow)?;
            json::to_writer_buf(out, &node.semantic_parents, NonFinite::Overflow)
        })?;
    }
    for call in &trace.calls {
        add(&|out| json::to_writer_buf(out, &With(call, STORED), NonFinite::Overflow))?;
    }
    Ok(hasher.finish())
}
