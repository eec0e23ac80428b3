//! [`View`]: the nodes and edges that are drawn, after the options were applied.

use std::collections::HashMap;

use super::RenderOptions;
use super::text::excerpt;
use crate::causal::Cause;
use crate::id::{EdgeType, NodeId};
use crate::message::Role;
use crate::trace::Trace;

/// One drawn node: a message, or a run of messages.
pub(super) struct Shape {
    /// First and last message.
    pub(super) first: NodeId,
    pub(super) last: NodeId,
    pub(super) count: usize,
    pub(super) role: Role,
    pub(super) sampled: bool,
    /// The leaf of a branch that is no training sample.
    pub(super) refused: bool,
    /// The root of its conversation.
    pub(super) root: NodeId,
    pub(super) title: String,
    pub(super) excerpt: String,
}

/// One drawn edge between two shapes.
pub(super) struct Line {
    pub(super) source: usize,
    pub(super) target: usize,
    /// None for a physical edge.
    pub(super) label: Option<EdgeType>,
    /// Whether it is a part of a loop.
    pub(super) in_loop: bool,
}

/// What is drawn.
pub(super) struct View {
    pub(super) shapes: Vec<Shape>,
    pub(super) lines: Vec<Line>,
    /// The labels that occur, in order of first appearance.
    pub(super) labels: Vec<EdgeType>,
}

impl View {
    pub(super) fn new(trace: &Trace, options: &RenderOptions) -> Self {
        let nodes = trace.nodes();
        let roots = roots(trace);
        let owner = owners(trace, options);
        let mut shape_of: Vec<Option<usize>> = vec![None; nodes.len()];
        let mut shapes: Vec<Shape> = Vec::new();
        for (i, node) in nodes.iter().enumerate() {
            let id = NodeId::new(i as u32);
            match owner[i] {
                Owner::Hidden => {}
                Owner::Joins(other) => {
                    let shape = shape_of[other.index()];
                    shape_of[i] = shape;
                    if let Some(shape) = shape.and_then(|at| shapes.get_mut(at)) {
                        shape.last = id;
                        shape.count += 1;
                        shape.title = format!("{}–{} · {} messages", shape.first, id, shape.count);
                        shape.excerpt.clear();
                    }
                }
                Owner::Itself => {
                    shape_of[i] = Some(shapes.len());
                    shapes.push(Shape {
                        first: id,
                        last: id,
                        count: 1,
                        role: node.message.role(),
                        sampled: node.sampled,
                        refused: !trace.derived().is_trainable(id) && trace.derived().is_leaf(id),
                        root: roots[i],
                        title: format!("{id} {}", node.message.role()),
                        excerpt: excerpt(&node.message, options.excerpt),
                    });
                }
            }
        }
        let mut view = Self {
            shapes,
            lines: Vec::new(),
            labels: Vec::new(),
        };
        view.add_physical(trace, &shape_of);
        view.add_links(trace, options, &shape_of);
        view
    }

    fn add_physical(&mut self, trace: &Trace, shape_of: &[Option<usize>]) {
        for (i, node) in trace.nodes().iter().enumerate() {
            let Some(target) = shape_of[i] else { continue };
            if self.shapes[target].first.index() != i {
                continue;
            }
            // The nearest message above that is drawn.
            let mut at = node.parent;
            while let Some(parent) = at {
                if let Some(source) = shape_of[parent.index()] {
                    self.lines.push(Line {
                        source,
                        target,
                        label: None,
                        in_loop: false,
                    });
                    break;
                }
                at = trace.nodes()[parent.index()].parent;
            }
        }
    }

    fn add_links(&mut self, trace: &Trace, options: &RenderOptions, shape_of: &[Option<usize>]) {
        let graph = trace.causal();
        let components = graph.components(&options.links);
        let mut known: HashMap<EdgeType, ()> = HashMap::new();
        for (i, target) in shape_of.iter().enumerate() {
            let id = NodeId::new(i as u32);
            for edge in graph.parents(id, &options.links) {
                let (Some(target), Some(source)) = (*target, shape_of[edge.source.index()]) else {
                    continue;
                };
                let Cause::Semantic(label) = edge.cause else {
                    continue;
                };
                if known.insert(label.clone(), ()).is_none() {
                    self.labels.push(label.clone());
                }
                self.lines.push(Line {
                    source,
                    target,
                    label: Some(label),
                    in_loop: components.of(edge.source) == components.of(id),
                });
            }
        }
    }

    /// The roots that are drawn, each with its shapes.
    pub(super) fn clusters(&self) -> Vec<(NodeId, Vec<usize>)> {
        let mut clusters: Vec<(NodeId, Vec<usize>)> = Vec::new();
        let mut place: HashMap<NodeId, usize> = HashMap::new();
        for (i, shape) in self.shapes.iter().enumerate() {
            let at = *place.entry(shape.root).or_insert_with(|| {
                clusters.push((shape.root, Vec::new()));
                clusters.len() - 1
            });
            clusters[at].1.push(i);
        }
        clusters
    }
}

/// The root above each node.
pub(super) fn roots(trace: &Trace) -> Vec<NodeId> {
    let mut roots: Vec<NodeId> = Vec::with_capacity(trace.nodes().len());
    for (i, node) in trace.nodes().iter().enumerate() {
        roots.push(match node.parent {
            Some(parent) => roots[parent.index()],
            None => NodeId::new(i as u32),
        });
    }
    roots
}

enum Owner {
    /// It has a shape of its own.
    Itself,
    /// It is a part of the shape of the message before it.
    Joins(NodeId),
    Hidden,
}

fn owners(trace: &Trace, options: &RenderOptions) -> Vec<Owner> {
    let nodes = trace.nodes();
    let mut children = vec![0u32; nodes.len()];
    for node in nodes {
        if let Some(parent) = node.parent {
            children[parent.index()] += 1;
        }
    }
    // A message with a link is never a part of a run.
    let mut linked = vec![false; nodes.len()];
    if options.collapse {
        for (i, node) in nodes.iter().enumerate() {
            for link in &node.semantic_parents {
                if options.links.follows(&link.label) {
                    linked[i] = true;
                    linked[link.node.index()] = true;
                }
            }
        }
    }
    let plain = |i: usize| !linked[i] && nodes[i].parent.is_some() && children[i] == 1;
    nodes
        .iter()
        .enumerate()
        .map(|(i, node)| {
            if options.turns_only && !node.sampled {
                return Owner::Hidden;
            }
            match node.parent {
                Some(parent) if options.collapse && !options.turns_only && plain(i) && plain(parent.index()) => {
                    Owner::Joins(parent)
                }
                _ => Owner::Itself,
            }
        })
        .collect()
}
