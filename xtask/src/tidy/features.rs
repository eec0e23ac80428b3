//! What a crate with no features brings along.

use std::collections::BTreeSet;

use anyhow::Result;

use super::{Fault, House};
use crate::host::Host;
use crate::workspace::Workspace;

/// What the smallest build of a crate may depend on.
enum Limit {
    /// Fewer than this many crates besides itself, and none of these.
    FewerThan(usize, &'static [&'static str]),
    /// Only these.
    Only(&'static [&'static str]),
}

/// HTTP clients and TLS.
const HEAVY: &[&str] = &[
    "reqwest",
    "hyper",
    "hyper-util",
    "h2",
    "ureq",
    "curl",
    "rustls",
    "openssl",
    "openssl-sys",
    "native-tls",
    "ring",
    "aws-lc-rs",
];

const LIMITS: &[(&str, Limit)] = &[
    ("runtime-core", Limit::FewerThan(59, HEAVY)),
    (
        "semantic-graph",
        Limit::Only(&[
            "serde",
            "serde_core",
            "serde_derive",
            "proc-macro2",
            "quote",
            "syn",
            "unicode-ident",
        ]),
    ),
];

pub(super) fn honest(house: &House) -> Result<Vec<Fault>> {
    let mut faults = Vec::new();
    for (name, limit) in LIMITS {
        let crates = tree(&house.workspace, name)?;
        faults.extend(limit.excess(&crates).into_iter().map(|what| Fault::new(name, what)));
    }
    Ok(faults)
}

impl Limit {
    fn excess(&self, crates: &BTreeSet<String>) -> Vec<String> {
        match self {
            Self::FewerThan(count, heavy) => {
                let brought = heavy.iter().filter(|name| crates.contains(**name));
                let mut excess: Vec<String> = brought
                    .map(|name| format!("brings {name} without any feature"))
                    .collect();
                if crates.len() >= *count {
                    excess.push(format!(
                        "{} crates without any feature, not fewer than {count}",
                        crates.len()
                    ));
                }
                excess
            }
            Self::Only(allowed) => crates
                .iter()
                .filter(|name| !allowed.contains(&name.as_str()))
                .map(|name| format!("brings {name} without any feature"))
                .collect(),
        }
    }
}

/// The crates that the smallest build of `package` needs, itself left out.
fn tree(workspace: &Workspace, package: &str) -> Result<BTreeSet<String>> {
    let listed = Host::cargo(&workspace.root)
        .args([
            "tree",
            "--locked",
            "-p",
            package,
            "--no-default-features",
            "-e",
            "normal",
        ])
        .args(["--prefix", "none", "--format", "{p}"])
        .read()?;
    let names = listed.lines().filter_map(|line| line.split_whitespace().next());
    Ok(names.filter(|name| *name != package).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crates(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn too_many_crates_and_forbidden_ones_are_told() {
        let limit = Limit::FewerThan(3, &["hyper"]);
        assert_eq!(limit.excess(&crates(&["tokio", "serde"])), Vec::<String>::new());
        assert_eq!(
            limit.excess(&crates(&["tokio", "hyper"])),
            ["brings hyper without any feature"]
        );
        assert_eq!(limit.excess(&crates(&["a", "b", "c"])).len(), 1);
        assert_eq!(
            Limit::Only(&["serde"]).excess(&crates(&["serde", "rand"])),
            ["brings rand without any feature"]
        );
    }
}
