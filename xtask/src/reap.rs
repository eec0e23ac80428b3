//! `cargo xtask reap`: deletes boxes whose owner died.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use runtime_core::cache::CacheDir;
use runtime_core::lease::{Outcome, ReapOptions, Report, reap};
use runtime_core::scope::RunScope;

use crate::host::exit_code;
use crate::providers::registry;

/// Deletes boxes whose owning process died, and never one whose owner lives
///
/// Exits with 1 when a box may be left.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only say what would be deleted
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
    /// Only boxes that were created at least this long ago, such as 90s, 15m, 2h
    #[arg(long, value_parser = duration)]
    older_than: Option<Duration>,
    /// Only boxes of this run
    #[arg(long)]
    run_scope: Option<String>,
    /// Boxes of other machines that share the cache directory, too
    #[arg(long)]
    other_machines: bool,
    /// The cache directory whose leases are read [default: $SANDBOX_CACHE_DIR, or ~/.cache/verifiers]
    #[arg(long)]
    cache: Option<PathBuf>,
}

fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let seconds = match unit {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86400,
        other => return Err(format!("`{other}` is no unit: use s, m, h or d")),
    };
    let number: u64 = number.parse().map_err(|_| format!("`{number}` is no whole number"))?;
    number
        .checked_mul(seconds)
        .map(Duration::from_secs)
        .ok_or_else(|| "too long".to_owned())
}

pub(crate) fn execute(args: Args) -> ExitCode {
    exit_code(run(&args))
}

fn run(args: &Args) -> Result<bool> {
    let mut options = ReapOptions {
        cache: CacheDir::resolve(args.cache.as_deref()),
        dry_run: args.dry_run,
        older_than: args.older_than,
        other_machines: args.other_machines,
        ..ReapOptions::default()
    };
    options.run_scope = args.run_scope.clone().map(RunScope::new).transpose()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("no executor")?;
    let report = runtime.block_on(reap(&registry(), options))?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", lines(&report));
    }
    let left = report.remaining().filter(|_| !args.dry_run).count();
    let unreadable = report.damaged.len();
    if left > 0 || unreadable > 0 {
        let left = many(left, "box", "boxes");
        let unreadable = many(unreadable, "unreadable journal", "unreadable journals");
        bail!("left: {left}, {unreadable}");
    }
    Ok(true)
}

fn lines(report: &Report) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    // Writing to a string cannot fail.
    for reaped in &report.boxes {
        let _ = write!(text, "{} {}", reaped.provider, reaped.name);
        if let Some(id) = reaped.id.as_deref().filter(|id| *id != reaped.name) {
            let _ = write!(text, " ({id})");
        }
        let _ = write!(text, ", run {}: {}", reaped.run_scope, reaped.outcome);
        if let Some(error) = &reaped.error {
            let _ = write!(text, ": {error}");
        }
        text.push('\n');
    }
    for damage in &report.damaged {
        let detail = damage
            .error
            .clone()
            .unwrap_or_else(|| format!("{} lines make no sense", damage.lines));
        let _ = writeln!(
            text,
            "{}: {detail}; look for boxes by hand, then remove the file",
            damage.path.display()
        );
    }
    let orphans = many(report.boxes.len(), "orphan", "orphans");
    let _ = match report.dry_run {
        true => {
            let would = report
                .boxes
                .iter()
                .filter(|reaped| reaped.outcome == Outcome::WouldDelete);
            write!(text, "{} of {orphans} would be deleted", would.count())
        }
        false => write!(text, "{} of {orphans} deleted", report.deleted()),
    };
    if report.filtered > 0 {
        let _ = write!(text, ", {} held back by the filters", report.filtered);
    }
    let processes = many(report.living_owners, "living process", "living processes");
    let boxes = many(report.living_boxes, "box", "boxes");
    let _ = writeln!(text, "; {processes} with {boxes} left alone");
    text
}

fn many(count: usize, one: &str, more: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { more })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in [
            "",
            "h",
            "1w",
            "-1s",
            "1.5h",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
