//! The picture.

use std::collections::HashMap;
use std::fmt::Write;

use super::RenderOptions;
use super::layout::{Lane, Layout, Place};
use super::text::{colours, excerpt, shorten, xml};
use crate::causal::{Cause, EdgeFilter};
use crate::id::{EdgeType, NodeId};
use crate::message::Role;
use crate::node::MessageNode;
use crate::trace::Trace;

const LANE_WIDTH: u32 = 232;
const BOX_WIDTH: u32 = 184;
const BOX_HEIGHT: u32 = 20;
const ROW_HEIGHT: u32 = 30;
const LEFT: u32 = 30;
/// Room above the first row, for the titles of lanes.
const TOP: u32 = 34;
/// Height of one line of the legend.
const LEGEND_LINE: u32 = 18;

/// Everything that both forms of the picture need.
pub(super) struct Picture<'a> {
    trace: &'a Trace,
    options: &'a RenderOptions,
    layout: Layout,
    /// Labels that occur, and their colours.
    pub(super) labels: Vec<(EdgeType, &'static str)>,
    pub(super) links: usize,
    pub(super) loops: usize,
    top: u32,
}

struct Link {
    source: NodeId,
    target: NodeId,
    label: usize,
    in_loop: bool,
}

impl<'a> Picture<'a> {
    pub(super) fn new(trace: &'a Trace, options: &'a RenderOptions) -> Self {
        let mut labels: Vec<EdgeType> = Vec::new();
        for label in trace.causal().labels() {
            if options.links.follows(label) {
                labels.push(label.clone());
            }
        }
        let colours = colours(labels.iter().map(EdgeType::as_str));
        let labels = labels.into_iter().zip(colours).collect();
        Self {
            trace,
            options,
            layout: Layout::new(trace),
            labels,
            links: 0,
            loops: trace.causal().loops(&links_only(options)).len(),
            top: TOP,
        }
    }

    pub(super) fn width(&self) -> u32 {
        (LEFT + self.layout.columns * LANE_WIDTH + 20).max(420)
    }

    pub(super) fn height(&self) -> u32 {
        self.top + self.layout.rows * ROW_HEIGHT + 20
    }

    fn x(&self, place: Place) -> u32 {
        LEFT + self.layout.lanes[place.lane as usize].column * LANE_WIDTH
    }

    fn y(&self, place: Place) -> u32 {
        self.top + place.row * ROW_HEIGHT
    }

    fn place(&self, node: NodeId) -> Place {
        self.layout.places[node.index()]
    }

    fn collect_links(&self) -> Vec<Link> {
        let filter = links_only(self.options);
        let components = self.trace.causal().components(&filter);
        let numbers: HashMap<&EdgeType, usize> = self
            .labels
            .iter()
            .enumerate()
            .map(|(i, (label, _))| (label, i))
            .collect();
        let mut links = Vec::new();
        for i in 0..self.trace.nodes().len() {
            for edge in self.trace.causal().parents(NodeId::new(i as u32), &filter) {
                let Cause::Semantic(label) = &edge.cause else {
                    continue;
                };
                if let Some(label) = numbers.get(label) {
                    links.push(Link {
                        source: edge.source,
                        target: edge.target,
                        label: *label,
                        in_loop: components.of(edge.source) == components.of(edge.target),
                    });
                }
            }
        }
        links
    }

    /// The picture's content, without the enclosing element. `details` adds the text and tokens
    /// of each message as its title.
    pub(super) fn content(&mut self, details: bool) -> String {
        let mut out = String::new();
        self.markers(&mut out);
        self.lanes(&mut out);
        out.push_str("<g id=\"flow\">\n");
        self.physical(&mut out);
        out.push_str("</g>\n<g id=\"links\">\n");
        let links = self.collect_links();
        self.links = links.len();
        for link in &links {
            self.link(&mut out, link);
        }
        out.push_str("</g>\n<g id=\"nodes\">\n");
        for i in 0..self.trace.nodes().len() {
            self.node(&mut out, NodeId::new(i as u32), details);
        }
        out.push_str("</g>\n");
        out
    }

    fn markers(&self, out: &mut String) {
        out.push_str("<defs>");
        for (i, (_, colour)) in self.labels.iter().enumerate() {
            let _ = write!(
                out,
                "<marker id=\"m{i}\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"9\" \
                 markerHeight=\"9\" markerUnits=\"userSpaceOnUse\" orient=\"auto\">\
                 <path d=\"M0 0L8 4L0 8z\" fill=\"{colour}\"/></marker>"
            );
        }
        out.push_str("</defs>\n");
    }

    fn lanes(&self, out: &mut String) {
        out.push_str("<g id=\"lanes\">\n");
        for lane in &self.layout.lanes {
            let (x, top, bottom) = (
                LEFT + lane.column * LANE_WIDTH,
                self.top + lane.first_row * ROW_HEIGHT,
                self.top + lane.last_row * ROW_HEIGHT + BOX_HEIGHT,
            );
            let _ = writeln!(
                out,
                "<rect class=\"lane\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"6\"/>\
                 <text class=\"lt\" x=\"{x}\" y=\"{}\">{}</text>",
                x - 8,
                top - 20,
                BOX_WIDTH + 16,
                bottom - top + 26,
                top - 7,
                xml(&self.lane_title(lane))
            );
        }
        out.push_str("</g>\n");
    }

    fn lane_title(&self, lane: &Lane) -> String {
        let what = if lane.first == lane.root {
            format!("conversation {}", lane.root)
        } else {
            format!("branch of {}", lane.root)
        };
        let trainable = self.trace.branch(lane.last).is_some_and(|branch| branch.is_trainable());
        let refused = if trainable { "" } else { " · not trained" };
        format!("{what} · {}–{}{refused}", lane.first, lane.last)
    }

    fn physical(&self, out: &mut String) {
        for (i, node) in self.trace.nodes().iter().enumerate() {
            let Some(parent) = node.parent else { continue };
            let (from, to) = (self.place(parent), self.layout.places[i]);
            let (x1, y1) = (self.x(from) + 14, self.y(from) + BOX_HEIGHT);
            let (x2, y2) = (self.x(to) + 14, self.y(to));
            if x1 == x2 {
                let _ = writeln!(out, "<path class=\"p\" d=\"M{x1} {y1}V{y2}\"/>");
            } else {
                // Down beside the lane it leaves, then across just above where it arrives.
                let (x1, bend) = (x1 - 6, y2 - 5);
                let _ = writeln!(out, "<path class=\"p b\" d=\"M{x1} {y1}V{bend}H{x2}V{y2}\"/>");
            }
        }
    }

    fn link(&self, out: &mut String, link: &Link) {
        let (from, to) = (self.place(link.source), self.place(link.target));
        let (x1, x2) = (self.x(from), self.x(to));
        // Several links between two nodes, and links to neighbours, leave at different heights.
        let shift = |node: NodeId| 5 + (node.get() * 7 + link.label as u32 * 3) % 10;
        let y1 = self.y(from) + shift(link.target);
        let y2 = self.y(to) + shift(link.source);
        let path = if x1 == x2 {
            // An arc to the right of the lane; the further, the wider.
            let x = x1 + BOX_WIDTH;
            let reach = x + 14 + (y1.abs_diff(y2) / 12).min(LANE_WIDTH - BOX_WIDTH - 12);
            format!("M{x} {y1}C{reach} {y1} {reach} {y2} {x} {y2}")
        } else {
            let (x1, x2, c1, c2) = if x1 < x2 {
                let (x1, x2) = (x1 + BOX_WIDTH, x2);
                (x1, x2, i64::from(x1) + 30, i64::from(x2) - 30)
            } else {
                let (x1, x2) = (x1, x2 + BOX_WIDTH);
                (x1, x2, i64::from(x1) - 30, i64::from(x2) + 30)
            };
            format!("M{x1} {y1}C{c1} {y1} {c2} {y2} {x2} {y2}")
        };
        let (label, colour) = &self.labels[link.label];
        let in_loop = if link.in_loop { " o" } else { "" };
        let _ = writeln!(
            out,
            "<path class=\"l l{at}{in_loop}\" data-s=\"{source}\" data-t=\"{target}\" \
             stroke=\"{colour}\" marker-end=\"url(#m{at})\" d=\"{path}\">\
             <title>{source} → {target} {label}</title></path>",
            at = link.label,
            source = link.source,
            target = link.target,
        );
    }

    fn node(&self, out: &mut String, id: NodeId, details: bool) {
        let node = &self.trace.nodes()[id.index()];
        let place = self.place(id);
        let (x, y) = (self.x(place), self.y(place));
        let role = node.message.role();
        let class = match role {
            Role::System => "s",
            Role::User => "u",
            Role::Assistant if node.sampled => "a",
            Role::Assistant => "r",
            Role::Tool => "t",
        };
        let refused = self.trace.derived().is_leaf(id) && !self.trace.derived().is_trainable(id);
        let refused = if refused { " x" } else { "" };
        let title = if details {
            format!("<title>{}</title>", xml(&node_details(id, node, 400)))
        } else {
            String::new()
        };
        let number = id.to_string();
        // Some 5.8 pixels per character of the 10 pixel font.
        let room = (BOX_WIDTH as usize - 20) * 10 / 58 - number.len();
        let text = shorten(
            &excerpt(&node.message, self.options.excerpt),
            room.min(self.options.excerpt),
        );
        let _ = writeln!(
            out,
            "<g class=\"n {class}{refused}\" data-n=\"{id}\"><rect x=\"{x}\" y=\"{y}\" \
             width=\"{BOX_WIDTH}\" height=\"{BOX_HEIGHT}\" rx=\"4\"/><text x=\"{}\" y=\"{}\">\
             <tspan class=\"i\">{number}</tspan> {}</text>{title}</g>",
            x + 6,
            y + 14,
            xml(&text)
        );
    }
}

/// Physical edges are drawn anyway, and are no part of loops.
fn links_only(options: &RenderOptions) -> EdgeFilter {
    options.links.clone().without_physical()
}

/// What a message says, and its tokens, in plain text.
pub(super) fn node_details(id: NodeId, node: &MessageNode, limit: usize) -> String {
    let mut out = format!("{id} {}", node.message.role());
    if node.sampled {
        out.push_str(" (sampled)");
    }
    let tokens = node.tokens();
    if !tokens.token_ids.is_empty() {
        let _ = write!(
            out,
            " · {} tokens, {} sampled",
            tokens.token_ids.len(),
            tokens.sampled_len()
        );
    }
    let text = node.message.text();
    if !text.is_empty() {
        out.push('\n');
        out.extend(text.chars().take(limit));
        if text.chars().nth(limit).is_some() {
            out.push('…');
        }
    }
    for call in node.message.tool_calls() {
        let _ = write!(out, "\n→ {}({})", call.name, shorten(&call.arguments, 200));
    }
    out
}

/// How the picture looks.
pub(super) const STYLE: &str = "\
svg{font:10px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;background:#fff}\
.lane{fill:#f6f7f9;stroke:#e3e6ea}.lt{fill:#5b6470;font-size:10px;font-weight:600}\
.p{fill:none;stroke:#9aa3ad;stroke-width:1.5}.p.b{stroke:#c2c8cf}\
.l{fill:none;stroke-width:1.4;opacity:.66}.l.o{stroke-width:2.2;stroke-dasharray:6 3}\
.n rect{fill:#fff;stroke:#c3c9d0}.n text{fill:#1f2933}.n .i{fill:#6b7480;font-weight:600}\
.n.s rect{fill:#ede9fe;stroke:#b9acf0}.n.u rect{fill:#fff;stroke:#aab4bf}\
.n.a rect{fill:#dbeafe;stroke:#5b93e8}.n.r rect{fill:#fff;stroke:#5b93e8;stroke-dasharray:3 2}\
.n.t rect{fill:#fef3c7;stroke:#d9b34a}.n.x rect{fill:#d9dce0;stroke:#8b929a}\
.n.x text{fill:#6b7480}";

/// A picture that stands alone, with its legend.
pub(super) fn svg(trace: &Trace, options: &RenderOptions) -> String {
    let mut picture = Picture::new(trace, options);
    picture.top = TOP + LEGEND_LINE * (picture.labels.len() as u32 + 2);
    let content = picture.content(true);
    let mut out = String::new();
    let (width, height) = (picture.width(), picture.height());
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\"><title>{}</title><style>{STYLE}</style>",
        xml(&trace.id)
    );
    let _ = writeln!(
        out,
        "<text class=\"lt\" x=\"{LEFT}\" y=\"16\">{} · {} messages, {} links, {} loops</text>",
        xml(&trace.id),
        trace.nodes().len(),
        picture.links,
        picture.loops
    );
    for (i, (label, colour)) in picture.labels.iter().enumerate() {
        let y = 16 + LEGEND_LINE * (i as u32 + 1);
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {}h26\" stroke=\"{colour}\" stroke-width=\"2\" fill=\"none\"/>\
             <text x=\"{}\" y=\"{y}\">{label}</text>",
            y - 4,
            LEFT + 32
        );
    }
    out.push_str(&content);
    out.push_str("</svg>\n");
    out
}
