//! Loops and causal order: strongly connected components of a [`CausalGraph`].

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::causal::{CausalEdge, CausalGraph, Cause, EdgeFilter, Follow, Loop};
use crate::id::{NodeId, RequestId};
use crate::trace::Trace;

/// The strongly connected components, numbered by their smallest member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Components {
    /// The component of each node.
    of: Vec<u32>,
    /// Members of all components, one component after the other.
    members: Vec<NodeId>,
    /// Where each component begins in `members`, and the end.
    start: Vec<u32>,
}

impl Components {
    /// How many components there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.start.len() - 1
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The component of a node.
    #[must_use]
    pub fn of(&self, node: NodeId) -> Option<usize> {
        self.of.get(node.index()).map(|component| *component as usize)
    }

    /// The nodes of a component, ascending.
    #[must_use]
    pub fn members(&self, component: usize) -> &[NodeId] {
        match (self.start.get(component), self.start.get(component + 1)) {
            (Some(&from), Some(&to)) => &self.members[from as usize..to as usize],
            _ => &[],
        }
    }
}

const UNSEEN: u32 = u32::MAX;

impl CausalGraph {
    /// The strongly connected components (Tarjan's algorithm, without recursion).
    #[must_use]
    pub fn components(&self, filter: &EdgeFilter) -> Components {
        let follow = self.follow(filter);
        let raw = self.tarjan(&follow);
        // Number by smallest member: the first node of a component in ascending order names it.
        let mut number: HashMap<u32, u32> = HashMap::new();
        let of: Vec<u32> = raw
            .iter()
            .map(|component| {
                let next = number.len() as u32;
                *number.entry(*component).or_insert(next)
            })
            .collect();
        let mut start = vec![0u32; number.len() + 1];
        for component in &of {
            start[*component as usize + 1] += 1;
        }
        for i in 1..start.len() {
            start[i] += start[i - 1];
        }
        let mut next = start.clone();
        let mut members = vec![NodeId::new(0); of.len()];
        for (node, component) in of.iter().enumerate() {
            let slot = &mut next[*component as usize];
            members[*slot as usize] = NodeId::new(node as u32);
            *slot += 1;
        }
        Components { of, members, start }
    }

    fn tarjan(&self, follow: &Follow) -> Vec<u32> {
        let n = self.len();
        let mut index = vec![UNSEEN; n];
        let mut low = vec![0u32; n];
        let mut component = vec![UNSEEN; n];
        let mut stack: Vec<u32> = Vec::new();
        let mut next_index = 0;
        let mut next_component = 0;
        // A visit in progress: the node, and its effects that are still to be looked at.
        let mut visits: Vec<(u32, Vec<(u32, u32)>)> = Vec::new();
        let mut spare: Vec<Vec<(u32, u32)>> = Vec::new();
        for root in 0..n as u32 {
            if index[root as usize] != UNSEEN {
                continue;
            }
            let mut enter = Some(root);
            loop {
                if let Some(node) = enter.take() {
                    index[node as usize] = next_index;
                    low[node as usize] = next_index;
                    next_index += 1;
                    stack.push(node);
                    let mut effects = spare.pop().unwrap_or_default();
                    self.effects(node, follow, &mut effects);
                    visits.push((node, effects));
                }
                let Some((node, effects)) = visits.last_mut() else {
                    break;
                };
                let node = *node as usize;
                if let Some((next, _)) = effects.pop() {
                    let next_at = next as usize;
                    if index[next_at] == UNSEEN {
                        enter = Some(next);
                    } else if component[next_at] == UNSEEN {
                        low[node] = low[node].min(index[next_at]);
                    }
                    continue;
                }
                if low[node] == index[node] {
                    while let Some(member) = stack.pop() {
                        component[member as usize] = next_component;
                        if member as usize == node {
                            break;
                        }
                    }
                    next_component += 1;
                }
                if let Some((_, effects)) = visits.pop() {
                    spare.push(effects);
                }
                if let Some((before, _)) = visits.last() {
                    let before = *before as usize;
                    low[before] = low[before].min(low[node]);
                }
            }
        }
        component
    }

    /// The components with more than one node, by smallest member.
    #[must_use]
    pub fn loops(&self, filter: &EdgeFilter) -> Vec<Loop> {
        let components = self.components(filter);
        (0..components.len())
            .map(|component| components.members(component))
            .filter(|members| members.len() > 1)
            .map(|members| {
                let component = components.of(members[0]);
                let edges = members
                    .iter()
                    .flat_map(|node| self.parents(*node, filter))
                    .filter(|edge| components.of(edge.source) == component)
                    .collect();
                Loop {
                    nodes: members.to_vec(),
                    edges,
                }
            })
            .collect()
    }

    /// All nodes, causes before effects; each loop is one group, ascending. Where the causes leave
    /// a choice, the group with the smallest node comes first.
    #[must_use]
    pub fn causal_order(&self, filter: &EdgeFilter) -> Vec<Vec<NodeId>> {
        let follow = self.follow(filter);
        let components = self.components(filter);
        let mut waiting = vec![0u32; components.len()];
        let mut effects = Vec::new();
        let each = |component: usize, effects: &mut Vec<(u32, u32)>, visit: &mut dyn FnMut(u32)| {
            for node in components.members(component) {
                self.effects(node.get(), &follow, effects);
                for (target, _) in effects.iter() {
                    let target = components.of[*target as usize];
                    if target as usize != component {
                        visit(target);
                    }
                }
            }
        };
        for component in 0..components.len() {
            each(component, &mut effects, &mut |target| {
                waiting[target as usize] += 1;
            });
        }
        let mut ready: BinaryHeap<Reverse<u32>> = (0..components.len() as u32)
            .filter(|component| waiting[*component as usize] == 0)
            .map(Reverse)
            .collect();
        let mut order = Vec::with_capacity(components.len());
        while let Some(Reverse(component)) = ready.pop() {
            order.push(components.members(component as usize).to_vec());
            each(component as usize, &mut effects, &mut |target| {
                let count = &mut waiting[target as usize];
                *count -= 1;
                if *count == 0 {
                    ready.push(Reverse(target));
                }
            });
        }
        order
    }
}

impl Trace {
    /// The node each request id stands for: that of its last call with a sampled node.
    #[must_use]
    pub fn requests(&self) -> HashMap<RequestId, NodeId> {
        let mut bound = HashMap::new();
        for call in &self.calls {
            let node = call
                .node
                .and_then(|node| u32::try_from(node).ok())
                .map(NodeId::new)
                .filter(|id| self.node(*id).is_some_and(|node| node.sampled));
            if let (Some(request_id), Some(node)) = (call.request_id(), node) {
                bound.insert(request_id.clone(), node);
            }
        }
        bound
    }

    /// The requests whose turns a turn depended on, directly or not, in the order of their nodes.
    /// None if the request has no committed turn.
    #[must_use]
    pub fn depended_on(&self, request: &RequestId, filter: &EdgeFilter) -> Option<Vec<RequestId>> {
        self.related_requests(request, |graph, node| graph.ancestors(node, filter))
    }

    /// The requests whose turns depended on a turn, directly or not, in the order of their nodes.
    /// None if the request has no committed turn.
    #[must_use]
    pub fn led_to(&self, request: &RequestId, filter: &EdgeFilter) -> Option<Vec<RequestId>> {
        self.related_requests(request, |graph, node| graph.descendants(node, filter))
    }

    fn related_requests(
        &self,
        request: &RequestId,
        nodes: impl Fn(&CausalGraph, NodeId) -> Vec<NodeId>,
    ) -> Option<Vec<RequestId>> {
        let bound = self.requests();
        let node = *bound.get(request)?;
        let mut names: HashMap<NodeId, Vec<RequestId>> = HashMap::new();
        for (name, node) in &bound {
            names.entry(*node).or_default().push(name.clone());
        }
        for names in names.values_mut() {
            names.sort();
        }
        Some(
            nodes(self.causal(), node)
                .into_iter()
                .filter_map(|id| names.remove(&id))
                .flatten()
                .collect(),
        )
    }

    /// Why one turn happened after another: a shortest chain of edges between their nodes.
    #[must_use]
    pub fn why(&self, source: &RequestId, target: &RequestId, filter: &EdgeFilter) -> Option<Vec<CausalEdge>> {
        let bound = self.requests();
        self.causal().why(*bound.get(source)?, *bound.get(target)?, filter)
    }
}

impl CausalEdge {
    /// The label, or `parent` for the next message of a conversation.
    #[must_use]
    pub fn label(&self) -> &str {
        match &self.cause {
            Cause::Physical => "parent",
            Cause::Semantic(label) => label.as_str(),
        }
    }
}
