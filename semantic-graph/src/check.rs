//! [`Trace::check`]: everything that is inconsistent in a trace.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::code::Code;
use crate::id::{NodeId, RequestId};
use crate::trace::Trace;

/// Where a problem is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At a node.
    Node(NodeId),
    /// At a call, by position.
    Call(usize),
}

/// Something inconsistent in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What kind.
    pub code: Code,
    /// Where.
    pub place: Place,
    /// In words.
    pub detail: String,
    error: bool,
}

impl Problem {
    /// Whether strict loading refuses a trace with it; the others are only remarkable.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.error
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::Node(node) => write!(f, "{}: node {node}: {}", self.code, self.detail),
            Place::Call(call) => write!(f, "{}: call {call}: {}", self.code, self.detail),
        }
    }
}

struct Report(Vec<Problem>);

impl Report {
    fn add(&mut self, code: Code, place: Place, error: bool, detail: impl Into<String>) {
        self.0.push(Problem {
            code,
            place,
            detail: detail.into(),
            error,
        });
    }
}

impl Trace {
    /// Lists everything inconsistent: parents, links, array lengths, calls, request ids, tools,
    /// clocks. Never fails, whatever the trace holds.
    #[must_use]
    pub fn check(&self) -> Vec<Problem> {
        let mut report = Report(Vec::new());
        self.check_nodes(&mut report);
        self.check_calls(&mut report);
        report.0
    }

    fn check_nodes(&self, report: &mut Report) {
        let mut roots_with_tools = false;
        let mut roots_without = Vec::new();
        for (i, node) in self.nodes.iter().enumerate() {
            let id = NodeId::new(i as u32);
            let place = Place::Node(id);
            match node.parent {
                Some(parent) if parent >= id => {
                    report.add(
                        Code::InvalidParent,
                        place,
                        true,
                        format!("parent {parent} is not an earlier node"),
                    );
                }
                Some(parent) => {
                    if self.nodes[parent.index()].timestamp > node.timestamp {
                        report.add(Code::InvalidParent, place, false, "it is older than its parent");
                    }
                    if !node.tools().is_empty() {
                        report.add(Code::UnknownField, place, false, "only roots have tools of their own");
                    }
                }
                None if node.tools().is_empty() => roots_without.push(place),
                None => roots_with_tools = true,
            }
            let mut seen = HashSet::new();
            for link in &node.semantic_parents {
                if link.node.index() >= self.nodes.len() {
                    report.add(
                        Code::InvalidLink,
                        place,
                        true,
                        format!("its cause {} does not exist", link.node),
                    );
                } else if link.node == id {
                    report.add(Code::SelfLink, place, true, "it is its own cause");
                }
                if !seen.insert(link) {
                    report.add(
                        Code::DuplicateLink,
                        place,
                        true,
                        format!("the link from {} ({}) is there twice", link.node, link.label),
                    );
                }
            }
            for name in node.tokens().length_mismatches() {
                report.add(
                    Code::LengthMismatch,
                    place,
                    true,
                    format!("`{name}` does not fit the tokens"),
                );
            }
        }
        if roots_with_tools {
            for place in roots_without {
                report.add(Code::MissingField, place, false, "this root has no tools, others do");
            }
        }
    }

    fn check_calls(&self, report: &mut Report) {
        let mut bound: HashMap<&RequestId, i64> = HashMap::new();
        for (i, call) in self.calls.iter().enumerate() {
            let place = Place::Call(i);
            let Some(node) = call.node else { continue };
            let found = usize::try_from(node).ok().and_then(|index| self.nodes.get(index));
            match found {
                None => report.add(
                    Code::InvalidLink,
                    place,
                    true,
                    format!("its node {node} does not exist"),
                ),
                Some(found) if !found.sampled => report.add(
                    Code::InvalidLink,
                    place,
                    true,
                    format!("its node {node} was not sampled"),
                ),
                Some(_) => {}
            }
            if let Some(request_id) = call.request_id()
                && bound.insert(request_id, node).is_some_and(|old| old != node)
            {
                report.add(
                    Code::InvalidRequestId,
                    place,
                    false,
                    format!("request `{request_id}` was bound to another node before"),
                );
            }
        }
    }
}
