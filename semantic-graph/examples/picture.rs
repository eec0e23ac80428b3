//! Draws a made-up run: `picture FORMAT [MESSAGES]` prints SVG, HTML, DOT or Mermaid.

#[path = "../tests/support/agents.rs"]
mod agents;

use semantic_graph::render::{Format, RenderOptions, render_trace};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let format: Format = args.next().as_deref().unwrap_or("html").parse()?;
    let nodes = match args.next() {
        Some(number) => number.parse()?,
        None => 300,
    };
    let run = agents::run(nodes);
    print!("{}", render_trace(&run.trace, format, &RenderOptions::default()));
    Ok(())
}
