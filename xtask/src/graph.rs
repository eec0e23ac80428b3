//! `cargo xtask graph`: draws a trace.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use semantic_graph::Trace;
use semantic_graph::render::{Format, RenderOptions, render_trace};
use semantic_graph::store::{load, read_traces};

use crate::host::exit_code;

/// Draws the message graph of a trace
///
/// TRACE is a store of the crate `semantic-graph`, a JSON record of one trace, or a `traces.jsonl`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The file with the trace
    trace: PathBuf,
    /// svg, html, dot or mermaid [default: by the name of the output, else html]
    #[arg(long)]
    format: Option<Format>,
    /// Where to write it [default: standard output]
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Which trace of the file, by its id or its number from 0 [default: the only one]
    #[arg(long)]
    select: Option<String>,
    /// Draw only what the model sampled
    #[arg(long)]
    turns_only: bool,
}

pub(crate) fn execute(args: Args) -> ExitCode {
    exit_code(draw(&args))
}

fn draw(args: &Args) -> Result<bool> {
    let by_name = args
        .output
        .as_deref()
        .and_then(Path::extension)
        .and_then(|extension| match extension.to_str() {
            Some("htm") => Some(Format::Html),
            Some("gv") => Some(Format::Dot),
            Some("mmd") => Some(Format::Mermaid),
            Some(name) => name.parse().ok(),
            None => None,
        });
    let format = args.format.or(by_name).unwrap_or(Format::Html);
    let trace = select(read(&args.trace)?, args.select.as_deref())?;
    let options = RenderOptions {
        turns_only: args.turns_only,
        ..RenderOptions::default()
    };
    let picture = render_trace(&trace, format, &options);
    match &args.output {
        Some(path) => std::fs::write(path, picture).with_context(|| format!("writing {}", path.display()))?,
        None => std::io::stdout()
            .write_all(picture.as_bytes())
            .context("writing the picture")?,
    }
    Ok(true)
}

/// What is in a file, told by its first line.
fn read(path: &Path) -> Result<Vec<Trace>> {
    let at = || format!("reading {}", path.display());
    let mut file = BufReader::new(File::open(path).with_context(at)?);
    let head = file.fill_buf().with_context(at)?;
    const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
    let is_store = head.starts_with(&ZSTD) || head.starts_with(br#"{"s":"#);
    if is_store {
        let loaded = load(path).with_context(at)?;
        if let Some(torn) = &loaded.torn {
            eprintln!(
                "{}: the end of the store is damaged and left out: {torn:?}",
                path.display()
            );
        }
        return Ok(vec![loaded.trace]);
    }
    read_traces(path).with_context(at)
}

fn select(mut traces: Vec<Trace>, wanted: Option<&str>) -> Result<Trace> {
    let listed = || {
        traces
            .iter()
            .map(|trace| trace.id.to_string())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let index = match wanted {
        None if traces.len() == 1 => 0,
        None if traces.is_empty() => bail!("there is no trace in the file"),
        None => bail!(
            "there are {} traces in the file: choose one with --select: {}",
            traces.len(),
            listed()
        ),
        Some(wanted) => {
            let by_id = traces.iter().position(|trace| *trace.id == *wanted);
            let by_number = wanted.parse().ok().filter(|number| *number < traces.len());
            by_id
                .or(by_number)
                .ok_or_else(|| anyhow!("no trace `{wanted}` in the file; there are: {}", listed()))?
        }
    };
    Ok(traces.swap_remove(index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_selected_by_id_or_number_and_a_choice_is_asked_for() {
        let traces = || vec![Trace::new("a"), Trace::new("b")];
        assert_eq!(&*select(traces(), Some("b")).expect("by id").id, "b");
        assert_eq!(&*select(traces(), Some("0")).expect("by number").id, "a");
        assert_eq!(&*select(vec![Trace::new("a")], None).expect("the only one").id, "a");
        assert!(
            select(traces(), Some("c"))
                .expect_err("none")
                .to_string()
                .contains("a, b")
        );
        assert!(
            select(traces(), None)
                .expect_err("two")
                .to_string()
                .contains("--select")
        );
        assert!(select(Vec::new(), None).is_err());
    }
}
