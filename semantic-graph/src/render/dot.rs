//! Graphviz DOT.

use std::fmt::Write;

use super::RenderOptions;
use super::text::{colours, dot_string};
use super::view::View;
use crate::message::Role;
use crate::trace::Trace;

pub(super) fn dot(trace: &Trace, options: &RenderOptions) -> String {
    let view = View::new(trace, options);
    let colours = colours(view.labels.iter().map(|label| label.as_str()));
    let mut out = String::new();
    let _ = writeln!(out, "digraph {} {{", dot_string(&trace.id));
    out.push_str("  rankdir=TB;\n  node [fontname=\"Helvetica\", fontsize=10];\n");
    out.push_str("  edge [fontname=\"Helvetica\", fontsize=9];\n");
    for (root, shapes) in view.clusters() {
        if options.cluster {
            let _ = writeln!(out, "  subgraph cluster_{root} {{");
            let _ = writeln!(
                out,
                "    color=\"#cccccc\"; label={};",
                dot_string(&format!("root {root}"))
            );
        }
        for at in shapes {
            let shape = &view.shapes[at];
            let label = if shape.excerpt.is_empty() {
                shape.title.clone()
            } else {
                format!("{}\n{}", shape.title, shape.excerpt)
            };
            let form = match shape.role {
                Role::System => "octagon",
                Role::User => "box",
                Role::Assistant => "ellipse",
                Role::Tool => "note",
            };
            let fill = match (shape.refused, shape.sampled) {
                (true, _) => ", style=filled, fillcolor=\"#d0d0d0\", fontcolor=\"#606060\"",
                (false, true) => ", style=filled, fillcolor=\"#dbeafe\"",
                (false, false) => "",
            };
            let _ = writeln!(
                out,
                "  n{} [label={}, shape={form}{fill}];",
                shape.first,
                dot_string(&label)
            );
        }
        if options.cluster {
            out.push_str("  }\n");
        }
    }
    for line in &view.lines {
        let (source, target) = (view.shapes[line.source].first, view.shapes[line.target].first);
        match &line.label {
            None => {
                let _ = writeln!(out, "  n{source} -> n{target};");
            }
            Some(label) => {
                let colour = view
                    .labels
                    .iter()
                    .position(|known| known == label)
                    .map_or("#000000", |at| colours[at]);
                let stroke = if line.in_loop {
                    "color=\"#d00000\", penwidth=2".to_owned()
                } else {
                    format!("color=\"{colour}\"")
                };
                let _ = writeln!(
                    out,
                    "  n{source} -> n{target} [label={}, style=dashed, constraint=false, \
                     fontcolor=\"{colour}\", {stroke}];",
                    dot_string(label.as_str())
                );
            }
        }
    }
    out.push_str("}\n");
    out
}
