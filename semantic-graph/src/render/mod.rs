//! Pictures of traces (feature `render`).
//!
//! [`Format::Dot`] and [`Format::Mermaid`] are for other programs; [`Format::Svg`] and
//! [`Format::Html`] are for people: lanes per conversation, messages from top to bottom, links as
//! coloured curves. The HTML page needs no network and shows a message's text and tokens under
//! the pointer.
//!
//! The same trace always gives the same bytes. Nothing here recurses.

mod dot;
mod html;
mod layout;
mod mermaid;
mod svg;
mod text;
mod view;

use std::fmt;
use std::str::FromStr;

use crate::causal::EdgeFilter;
use crate::trace::Trace;

pub use mermaid::{MAX_EDGES, MAX_TEXT};

/// What a trace is drawn as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A picture.
    Svg,
    /// A page with the picture, a legend and details under the pointer.
    Html,
    /// Input of Graphviz.
    Dot,
    /// Input of Mermaid.
    Mermaid,
}

/// A format that does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownFormat(String);

impl fmt::Display for UnknownFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is none of svg, html, dot, mermaid", self.0)
    }
}

impl std::error::Error for UnknownFormat {}

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        match name {
            "svg" => Ok(Format::Svg),
            "html" => Ok(Format::Html),
            "dot" => Ok(Format::Dot),
            "mermaid" => Ok(Format::Mermaid),
            other => Err(UnknownFormat(other.to_owned())),
        }
    }
}

/// What is drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderOptions {
    /// Characters of text per message; 0 for none.
    pub excerpt: usize,
    /// Draw a run of messages without branches and links as one node (DOT and Mermaid).
    pub collapse: bool,
    /// Draw a box around each root's messages (DOT and Mermaid).
    pub cluster: bool,
    /// Draw only what the model sampled; what is between becomes an edge.
    pub turns_only: bool,
    /// Links to draw.
    pub links: EdgeFilter,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            excerpt: 40,
            collapse: false,
            cluster: true,
            turns_only: false,
            links: EdgeFilter::all(),
        }
    }
}

/// Draws a trace.
///
/// ```
/// use semantic_graph::render::{Format, RenderOptions, render_trace};
/// use semantic_graph::{Message, MessageNode, Trace};
/// let mut trace = Trace::new("t");
/// trace.push_node(MessageNode::new(None, Message::user("hello"))).ok();
/// let dot = render_trace(&trace, Format::Dot, &RenderOptions::default());
/// assert!(dot.starts_with("digraph"));
/// ```
#[must_use]
pub fn render_trace(trace: &Trace, format: Format, options: &RenderOptions) -> String {
    match format {
        Format::Svg => svg::svg(trace, options),
        Format::Html => html::html(trace, options),
        Format::Dot => dot::dot(trace, options),
        Format::Mermaid => mermaid::mermaid(trace, options),
    }
}
