//! `cargo xtask tidy`: the rules of the house that no compiler checks.

mod arrows;
mod features;
mod manifests;
mod readme;
mod sources;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::host::Host;
use crate::workspace::Workspace;

/// Checks the rules of the house that no compiler checks
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rewrite what is generated: the table of the README and its example
    #[arg(long)]
    fix: bool,
}

/// Something that is not as it should be.
#[derive(Debug, PartialEq, Eq)]
struct Fault {
    place: String,
    what: String,
}

impl Fault {
    fn new(place: impl fmt::Display, what: impl Into<String>) -> Self {
        Self {
            place: place.to_string(),
            what: what.into(),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

/// One text file of the repository.
struct File {
    /// From the root.
    path: PathBuf,
    text: String,
}

impl File {
    fn is_rust(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == "rs")
    }

    fn is_below(&self, dir: impl AsRef<Path>) -> bool {
        self.path.starts_with(dir)
    }
}

/// The repository as the checks see it.
struct House {
    workspace: Workspace,
    files: Vec<File>,
}

impl House {
    fn load() -> Result<Self> {
        let workspace = Workspace::load()?;
        let listed = Host::program("git", &workspace.root)
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .read()
            .context("listing the files of the repository")?;
        let mut files = Vec::new();
        for name in listed.split('\0').filter(|name| !name.is_empty()) {
            let path = PathBuf::from(name);
            // What is deleted and not yet committed is listed too; what is no text has no rules.
            if let Ok(text) = fs::read_to_string(workspace.root.join(&path)) {
                files.push(File { path, text });
            }
        }
        Ok(Self { workspace, files })
    }

    fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == Path::new(path))
    }
}

type Check = fn(&House) -> Result<Vec<Fault>>;

const CHECKS: &[(&str, Check)] = &[
    ("files have one subject and end before line 800", sources::sizes),
    ("nothing is left undone or switched off", sources::unfinished),
    ("no path of one machine is mentioned", sources::machine_paths),
    ("dependencies point one way", arrows::dependencies),
    ("no provider names another", arrows::names),
    ("manifests inherit from the workspace", manifests::inherited),
    ("the workflow has every crate", manifests::workflow),
    ("features bring no more than they say", features::honest),
    ("every crate has a README", readme::present),
    ("the README's table is what the code says", readme::table),
    ("the README's example is the one that is tested", readme::example),
];

pub(crate) fn execute(args: Args) -> ExitCode {
    crate::host::exit_code(check(args.fix))
}

/// Runs every check; true when there is no fault.
///
/// # Errors
/// When a check could not be made.
pub(crate) fn check(fix: bool) -> Result<bool> {
    if fix {
        readme::fix(&House::load()?)?;
    }
    let house = House::load()?;
    let mut clean = true;
    for (name, check) in CHECKS {
        let faults = check(&house).with_context(|| format!("checking that {name}"))?;
        println!("{} {name}", if faults.is_empty() { "ok  " } else { "FAIL" });
        for fault in &faults {
            println!("     {fault}");
        }
        clean &= faults.is_empty();
    }
    Ok(clean)
}
