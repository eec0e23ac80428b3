//! [`Layout`]: where each message goes.
//!
//! A lane is a conversation, or the part of a branch after it left another one. Rows run with
//! causality: a message is below the one before it, and the first message of a conversation is
//! below the turn that caused it. Lanes that do not overlap in rows may share a column.

use super::view::roots;
use crate::id::NodeId;
use crate::trace::Trace;

/// A conversation, or the part of a branch after it left another one.
pub(super) struct Lane {
    pub(super) column: u32,
    /// The first message.
    pub(super) first: NodeId,
    /// The last message.
    pub(super) last: NodeId,
    pub(super) first_row: u32,
    pub(super) last_row: u32,
    /// The root above the lane.
    pub(super) root: NodeId,
}

/// Where a message goes.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) lane: u32,
    pub(super) row: u32,
}

/// Where each message goes.
pub(super) struct Layout {
    pub(super) lanes: Vec<Lane>,
    pub(super) places: Vec<Place>,
    pub(super) columns: u32,
    pub(super) rows: u32,
}

impl Layout {
    pub(super) fn new(trace: &Trace) -> Self {
        let nodes = trace.nodes();
        let roots = roots(trace);
        let start = start_causes(trace);
        let mut places: Vec<Place> = Vec::with_capacity(nodes.len());
        let mut lanes: Vec<Lane> = Vec::new();
        for (i, node) in nodes.iter().enumerate() {
            let id = NodeId::new(i as u32);
            let below = |cause: NodeId| places[cause.index()].row + 1;
            let causes = node
                .semantic_parents
                .iter()
                .map(|link| link.node)
                .chain(start[i].iter().copied())
                .filter(|cause| *cause < id)
                .map(below)
                .max()
                .unwrap_or(0);
            let row = node.parent.map_or(0, below).max(causes);
            let continued = node
                .parent
                .map(|parent| places[parent.index()].lane)
                .filter(|lane| Some(lanes[*lane as usize].last) == node.parent);
            let lane = match continued {
                Some(lane) => lane,
                None => {
                    lanes.push(Lane {
                        column: 0,
                        first: id,
                        last: id,
                        first_row: row,
                        last_row: row,
                        root: roots[i],
                    });
                    lanes.len() as u32 - 1
                }
            };
            lanes[lane as usize].last = id;
            lanes[lane as usize].last_row = row;
            places.push(Place { lane, row });
        }
        pull_down(trace, &mut places);
        for lane in &mut lanes {
            lane.first_row = places[lane.first.index()].row;
            lane.last_row = places[lane.last.index()].row;
        }
        let columns = pack(&mut lanes, &places, trace);
        Self {
            rows: places.iter().map(|place| place.row + 1).max().unwrap_or(0),
            lanes,
            places,
            columns,
        }
    }
}

/// Moves messages that no link ends at down to the message that follows them: what a turn was given
/// is drawn with the turn, not with the one before.
fn pull_down(trace: &Trace, places: &mut [Place]) {
    let nodes = trace.nodes();
    let mut next_row = vec![u32::MAX; nodes.len()];
    for i in (0..nodes.len()).rev() {
        let follower = next_row[i];
        if !nodes[i].sampled && nodes[i].semantic_parents.is_empty() && follower != u32::MAX {
            places[i].row = places[i].row.max(follower - 1);
        }
        if let Some(parent) = nodes[i].parent {
            let slot = &mut next_row[parent.index()];
            *slot = (*slot).min(places[i].row);
        }
    }
}

/// For each root the causes of the first turn below it: they are what began the conversation.
fn start_causes(trace: &Trace) -> Vec<Vec<NodeId>> {
    let nodes = trace.nodes();
    let mut causes = vec![Vec::new(); nodes.len()];
    let mut seen = vec![false; nodes.len()];
    let roots = roots(trace);
    for (i, node) in nodes.iter().enumerate() {
        let root = roots[i].index();
        if node.sampled && !std::mem::replace(&mut seen[root], true) {
            causes[root] = node.semantic_parents.iter().map(|link| link.node).collect();
        }
    }
    causes
}

/// Gives each lane the first column, from that of the lane it left on, that is free in its rows.
fn pack(lanes: &mut [Lane], places: &[Place], trace: &Trace) -> u32 {
    let mut order: Vec<usize> = (0..lanes.len()).collect();
    order.sort_by_key(|lane| (lanes[*lane].first_row, *lane));
    // Per column the rows that are taken, as the end of the last lane; lanes come by first row.
    let mut free_from: Vec<u32> = Vec::new();
    for at in order {
        let (first_row, last_row) = (lanes[at].first_row, lanes[at].last_row);
        let left = trace.nodes()[lanes[at].first.index()].parent.map_or(0, |parent| {
            let lane = places[parent.index()].lane as usize;
            lanes[lane].column as usize + 1
        });
        let column = (left..free_from.len())
            .find(|column| free_from[*column] <= first_row)
            .unwrap_or(free_from.len().max(left));
        if free_from.len() <= column {
            free_from.resize(column + 1, 0);
        }
        // One row for the title of the next lane and one to keep the two apart.
        free_from[column] = last_row + 3;
        lanes[at].column = column as u32;
    }
    free_from.len() as u32
}
