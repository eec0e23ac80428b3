//! `cargo xtask bench`: the benchmarks of one crate or of all.

use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::host::{Host, exit_code};
use crate::workspace::{Package, Workspace};

/// Runs the benchmarks of one crate or of all, built with optimisation
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which: `core`, `graph`, a provider such as `docker`, or the name of a crate [default: all]
    suite: Option<String>,
    /// Passed on to the benchmark programs, such as a filter
    #[arg(last = true)]
    args: Vec<String>,
}

pub(crate) fn execute(args: Args) -> ExitCode {
    exit_code(bench(&args))
}

fn bench(args: &Args) -> Result<bool> {
    let workspace = Workspace::load()?;
    let with_benches: Vec<&Package> = workspace
        .packages
        .iter()
        .filter(|package| package.has_target("bench"))
        .collect();
    let chosen: Vec<&Package> = match &args.suite {
        None => with_benches.clone(),
        Some(suite) => with_benches
            .iter()
            .copied()
            .filter(|package| is_suite(package, suite))
            .collect(),
    };
    if chosen.is_empty() {
        let names: Vec<&str> = with_benches.iter().map(|package| package.name.as_str()).collect();
        let what = args.suite.as_deref().unwrap_or("any crate");
        bail!(
            "there are no benchmarks of {what}; there are: {}",
            if names.is_empty() {
                "none yet".into()
            } else {
                names.join(", ")
            }
        );
    }
    for package in chosen {
        let mut cargo = Host::cargo(&workspace.root).args(["bench", "--all-features", "--package", &package.name]);
        // Each by name: the default would run unit tests as benchmarks too, which take other arguments.
        for target in package
            .targets
            .iter()
            .filter(|target| target.kind.iter().any(|kind| kind == "bench"))
        {
            cargo = cargo.args(["--bench", &target.name]);
        }
        cargo.arg("--").args(&args.args).run()?;
    }
    Ok(true)
}

fn is_suite(package: &Package, suite: &str) -> bool {
    let short = match suite {
        "graph" => "semantic-graph".to_owned(),
        "podman" => "runtime-docker".to_owned(),
        other => format!("runtime-{other}"),
    };
    package.name == suite || package.name == short
}
