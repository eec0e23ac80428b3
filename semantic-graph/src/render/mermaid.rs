//! Mermaid flowcharts.

use std::fmt::Write;

use super::RenderOptions;
use super::text::{colours, mermaid_string};
use super::view::View;
use crate::message::Role;
use crate::trace::Trace;

/// Most edges that Mermaid draws unless it is configured otherwise.
pub const MAX_EDGES: usize = 500;

/// Most characters that Mermaid reads unless it is configured otherwise.
pub const MAX_TEXT: usize = 50_000;

/// Draws within Mermaid's limits if collapsing runs achieves that, and says so if nothing does.
pub(super) fn mermaid(trace: &Trace, options: &RenderOptions) -> String {
    let (full, edges) = draw(trace, options);
    if fits(&full, edges) {
        return full;
    }
    let mut smaller = options.clone();
    smaller.collapse = true;
    smaller.excerpt = 0;
    let (short, edges) = draw(trace, &smaller);
    if fits(&short, edges) {
        return format!("%% runs of messages are collapsed to stay within Mermaid's limits\n{short}");
    }
    format!(
        "%% {edges} edges, {} characters: set maxEdges and maxTextSize to draw this\n{full}",
        full.len()
    )
}

fn fits(text: &str, edges: usize) -> bool {
    edges <= MAX_EDGES && text.len() <= MAX_TEXT
}

fn draw(trace: &Trace, options: &RenderOptions) -> (String, usize) {
    let view = View::new(trace, options);
    let colours = colours(view.labels.iter().map(|label| label.as_str()));
    let mut out = String::from("flowchart TD\n");
    for (root, shapes) in view.clusters() {
        if options.cluster {
            let _ = writeln!(out, "  subgraph c{root}[\"root {root}\"]");
        }
        for at in shapes {
            let shape = &view.shapes[at];
            let label = if shape.excerpt.is_empty() {
                shape.title.clone()
            } else {
                format!("{}\n{}", shape.title, shape.excerpt)
            };
            let label = mermaid_string(&label);
            let (open, close) = match shape.role {
                Role::System => ("{{", "}}"),
                Role::User => ("[", "]"),
                Role::Assistant => ("(", ")"),
                Role::Tool => ("[/", "/]"),
            };
            let class = match (shape.refused, shape.sampled) {
                (true, _) => ":::refused",
                (false, true) => ":::sampled",
                (false, false) => "",
            };
            let _ = writeln!(out, "  n{}{open}{label}{close}{class}", shape.first);
        }
        if options.cluster {
            out.push_str("  end\n");
        }
    }
    for (i, line) in view.lines.iter().enumerate() {
        let (source, target) = (view.shapes[line.source].first, view.shapes[line.target].first);
        match &line.label {
            None => {
                let _ = writeln!(out, "  n{source} --> n{target}");
            }
            Some(label) => {
                let _ = writeln!(out, "  n{source} -. {} .-> n{target}", mermaid_string(label.as_str()));
                let colour = if line.in_loop {
                    "#d00000"
                } else {
                    view.labels
                        .iter()
                        .position(|known| known == label)
                        .map_or("#000000", |at| colours[at])
                };
                let _ = writeln!(out, "  linkStyle {i} stroke:{colour}");
            }
        }
    }
    out.push_str("  classDef sampled fill:#dbeafe,stroke:#1d4ed8\n");
    out.push_str("  classDef refused fill:#d0d0d0,color:#606060\n");
    (out, view.lines.len())
}
