//! `cargo xtask ci`: everything that must be green before a change lands.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::host::{Host, exit_code, is_installed};
use crate::test::Tally;
use crate::workspace::Workspace;

/// Runs everything that must be green before a change lands
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only these steps. Repeatable
    #[arg(long, value_enum)]
    only: Vec<Step>,
    /// Lint and document only these crates. Repeatable
    #[arg(long, short, value_name = "CRATE")]
    package: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Step {
    /// rustfmt
    Fmt,
    /// The rules that no compiler checks
    Tidy,
    /// Clippy with no feature, with each alone, with all
    Clippy,
    /// rustdoc without a warning
    Doc,
    /// Licences, sources and banned crates
    Deny,
    /// Each provider copied out and tested by itself
    Vendor,
    /// Every test
    Test,
}

const ALL: [Step; 7] = [
    Step::Fmt,
    Step::Tidy,
    Step::Clippy,
    Step::Doc,
    Step::Deny,
    Step::Vendor,
    Step::Test,
];

/// How a step went.
enum Outcome {
    Green,
    Red,
    /// Not done, and why.
    Left(String),
}

impl From<bool> for Outcome {
    fn from(green: bool) -> Self {
        if green { Self::Green } else { Self::Red }
    }
}

pub(crate) fn execute(args: Args) -> ExitCode {
    exit_code(ci(&args))
}

fn ci(args: &Args) -> Result<bool> {
    let workspace = Workspace::load()?;
    let mut tests = None;
    let mut lines = Vec::new();
    let mut green = true;
    for step in ALL {
        if !args.only.is_empty() && !args.only.contains(&step) {
            continue;
        }
        let name = step.name();
        println!("==> {name}");
        let started = Instant::now();
        // A step that cannot be made is one that failed; the others are made all the same.
        let outcome = step.run(&workspace, args, &mut tests).unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            Outcome::Red
        });
        lines.push(summary(name, &outcome, started.elapsed()));
        green &= !matches!(outcome, Outcome::Red);
    }
    println!("==> summary");
    for line in lines {
        println!("{line}");
    }
    if let Some(tests) = tests {
        print!("{}", tests.closing());
    }
    Ok(green)
}

fn summary(name: &str, outcome: &Outcome, took: Duration) -> String {
    let seconds = took.as_secs_f64();
    match outcome {
        Outcome::Green => format!("ok    {name} ({seconds:.0} s)"),
        Outcome::Red => format!("FAIL  {name} ({seconds:.0} s)"),
        Outcome::Left(why) => format!("LEFT  {name}: {why}"),
    }
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Fmt => "fmt",
            Self::Tidy => "tidy",
            Self::Clippy => "clippy",
            Self::Doc => "doc",
            Self::Deny => "deny",
            Self::Vendor => "vendor",
            Self::Test => "test",
        }
    }

    fn run(self, workspace: &Workspace, args: &Args, tests: &mut Option<Tally>) -> Result<Outcome> {
        let cargo = || Host::cargo(&workspace.root);
        let packages = || {
            let chosen = |name: &str| args.package.is_empty() || args.package.iter().any(|package| package == name);
            workspace.packages.iter().filter(move |package| chosen(&package.name))
        };
        Ok(match self {
            Self::Fmt => cargo().args(["fmt", "--all", "--check"]).succeeds()?.into(),
            Self::Tidy => crate::tidy::check(false)?.into(),
            Self::Clippy => {
                let mut green = true;
                for package in packages() {
                    for features in package.feature_matrix() {
                        println!("    {} {}", package.name, features.join(" "));
                        green &= cargo()
                            .args([
                                "clippy",
                                "--quiet",
                                "--locked",
                                "--all-targets",
                                "--package",
                                &package.name,
                            ])
                            .args(&features)
                            .args(["--", "--deny", "warnings"])
                            .succeeds()?;
                    }
                }
                green.into()
            }
            Self::Doc => {
                let names = packages().flat_map(|package| ["--package", package.name.as_str()]);
                let doc = cargo()
                    .args(["doc", "--quiet", "--locked", "--no-deps", "--all-features"])
                    .args(names);
                doc.env("RUSTDOCFLAGS", "--deny warnings").succeeds()?.into()
            }
            Self::Deny => match is_installed("cargo-deny") {
                // The advisories need a database from outside; the workflow checks them.
                true => cargo()
                    .args(["deny", "--all-features", "check", "--hide-inclusion-graph"])
                    // The list of allowed licences may be longer than what is used today.
                    .args(["--allow", "license-not-encountered", "licenses", "bans", "sources"])
                    .succeeds()?
                    .into(),
                false => Outcome::Left("cargo-deny is not installed: cargo install cargo-deny --locked".to_owned()),
            },
            Self::Vendor => {
                let mut green = true;
                for (provider, _) in crate::providers::FEATURES {
                    let tally = crate::vendor_check::check(workspace, provider)?;
                    print!("{}", tally.closing());
                    green &= tally.is_green();
                }
                green.into()
            }
            Self::Test => {
                let tally = crate::test::everything(workspace)?;
                let green = tally.is_green();
                *tests = Some(tally);
                green.into()
            }
        })
    }
}
