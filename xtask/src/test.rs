//! `cargo xtask test`: every test of the workspace, with a count of what passed, failed and was skipped.

mod tally;

use std::io::{BufRead, BufReader, IsTerminal};
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::host::{Host, exit_code};
use crate::requirements::{self, Requirement};
use crate::workspace::Workspace;

pub(crate) use tally::Tally;

/// Runs every test of the workspace, doc tests included, and counts what was skipped
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only tests whose name contains this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Only tests of this crate. Repeatable
    #[arg(long, short, value_name = "CRATE")]
    package: Vec<String>,
}

pub(crate) fn execute(args: Args) -> ExitCode {
    exit_code(test(&args))
}

fn test(args: &Args) -> Result<bool> {
    let workspace = Workspace::load()?;
    let absent = tell_requirements(&args.package);
    let mut tally = run(&workspace, &args.package, args.filter.as_deref())?;
    tally.fail_for(absent);
    print!("{}", tally.closing());
    Ok(tally.is_green())
}

/// Everything: what `ci` runs.
///
/// # Errors
/// When cargo cannot be started.
pub(crate) fn everything(workspace: &Workspace) -> Result<Tally> {
    let absent = tell_requirements(&[]);
    let mut tally = run(workspace, &[], None)?;
    tally.fail_for(absent);
    Ok(tally)
}

/// Says what the tests will find on this machine. Returns what they must not do without.
fn tell_requirements(packages: &[String]) -> Vec<String> {
    let ci = requirements::under_ci();
    let mut failures = Vec::new();
    for requirement in requirements::ALL {
        let wanted = packages.is_empty()
            || requirement
                .needed_by
                .iter()
                .any(|name| packages.iter().any(|p| p == name));
        match requirement.probe() {
            Ok(version) => println!("present: {} {version}", requirement.name),
            Err(_) if !requirement.is_needed() || !wanted => {
                println!("absent:  {}, which no test needs", requirement.name)
            }
            Err(reason) => {
                println!("ABSENT:  {}: {reason}; {}", requirement.name, requirement.remedy);
                println!("         tests of {} will be skipped", requirement.needed_by.join(", "));
                if ci {
                    failures.push(format!("{} is absent under CI: {reason}", requirement.name));
                }
            }
        }
    }
    failures
}

/// Runs tests of the workspace and reads what comes of them.
fn run(workspace: &Workspace, packages: &[String], filter: Option<&str>) -> Result<Tally> {
    let mut cargo = Host::cargo(&workspace.root).args(["test", "--all-features", "--no-fail-fast"]);
    if packages.is_empty() {
        cargo = cargo.arg("--workspace");
    }
    for package in packages {
        cargo = cargo.args(["--package", package]);
    }
    if let Some(filter) = filter {
        cargo = cargo.arg(filter);
    }
    count(cargo)
}

/// Runs a `cargo test` command, passes its output on without the noise of tests that passed, and counts.
///
/// # Errors
/// When it cannot be started.
pub(crate) fn count(cargo: Host) -> Result<Tally> {
    let shown = cargo.shown().to_owned();
    // One pipe for both streams, so that the names of the programs stay in front of what they say.
    let (output, both) = std::io::pipe().context("making a pipe")?;
    let colour = std::io::stderr().is_terminal() && std::env::var_os("CARGO_TERM_COLOR").is_none();
    let cargo = if colour {
        cargo.env("CARGO_TERM_COLOR", "always")
    } else {
        cargo
    };
    // A test that was skipped says so on its captured output, which is shown for failed tests only unless asked for.
    let mut command = cargo.args(["--", "--show-output"]).into_command();
    command.stdout(both.try_clone().context("making a pipe")?).stderr(both);
    let mut child = command.spawn().with_context(|| format!("starting `{shown}`"))?;
    // The command holds the writing ends; without them the end of the output is seen.
    drop(command);
    let mut tally = Tally::default();
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    while reader
        .read_until(b'\n', &mut line)
        .context("reading what the tests say")?
        > 0
    {
        let text = String::from_utf8_lossy(&line);
        if let Some(shown) = tally.line(text.trim_end_matches('\n')) {
            println!("{shown}");
        }
        line.clear();
    }
    let status = child.wait().with_context(|| format!("waiting for `{shown}`"))?;
    tally.ended(status.success());
    if requirements::under_ci() {
        let needed = |name: &str| Requirement::named(name).is_some_and(Requirement::is_needed);
        let skipped: Vec<String> = tally
            .skipped()
            .filter(|skip| skip.requirement().is_some_and(needed))
            .map(|skip| format!("{} was skipped under CI", skip.test))
            .collect();
        tally.fail_for(skipped);
    }
    Ok(tally)
}
