//! Who may know whom: providers know the core, the front door knows everybody, nobody knows anybody else.

use anyhow::Result;

use super::{Fault, House};
use crate::workspace::Package;

/// The only file of the core that names providers: for the error that says which crate would bring one.
const NAMES_PROVIDERS: &str = "runtime-core/src/registry.rs";

fn is_provider(name: &str) -> bool {
    name.starts_with("runtime-") && name != "runtime-core"
}

pub(super) fn dependencies(house: &House) -> Result<Vec<Fault>> {
    let packages = house.workspace.packages.iter();
    Ok(packages.flat_map(wrong_arrows).collect())
}

fn wrong_arrows(package: &Package) -> Vec<Fault> {
    let mut faults = Vec::new();
    for dependency in package
        .dependencies
        .iter()
        .filter(|dependency| dependency.path.is_some())
    {
        let (from, to) = (package.name.as_str(), dependency.name.as_str());
        let allowed = from == "xtask" || (is_provider(from) && to == "runtime-core");
        if !allowed {
            faults.push(Fault::new(from, format!("must not depend on {to}")));
        }
        // Whoever wants one provider must not have to build the others.
        if from == "xtask" && to != "runtime-core" && !dependency.optional {
            faults.push(Fault::new(
                from,
                format!("{to} must be optional, behind a feature of its own"),
            ));
        }
    }
    faults
}

pub(super) fn names(house: &House) -> Result<Vec<Fault>> {
    let all: Vec<&str> = house
        .workspace
        .names()
        .into_iter()
        .filter(|name| is_provider(name))
        .collect();
    let mut faults = Vec::new();
    for package in house
        .workspace
        .packages
        .iter()
        .filter(|package| package.name.starts_with("runtime-"))
    {
        let dir = package
            .dir()
            .strip_prefix(&house.workspace.root)
            .unwrap_or(package.dir());
        let others: Vec<&str> = all.iter().copied().filter(|name| *name != package.name).collect();
        for file in house.files.iter().filter(|file| file.is_below(dir)) {
            let is_source = file.is_rust() || file.path.ends_with("Cargo.toml");
            if is_source && file.path.to_str() != Some(NAMES_PROVIDERS) {
                let named = others.iter().filter(|name| mentions(&file.text, name));
                faults.extend(named.map(|name| Fault::new(file.path.display(), format!("names {name}"))));
            }
        }
    }
    Ok(faults)
}

/// Whether a text names a crate, as a package or as a path.
fn mentions(text: &str, name: &str) -> bool {
    text.contains(name) || text.contains(&name.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Dependency;

    fn faults(from: &str, to: &str, optional: bool) -> usize {
        let package = Package {
            name: from.into(),
            manifest_path: "Cargo.toml".into(),
            features: Default::default(),
            dependencies: vec![Dependency {
                name: to.into(),
                path: Some(to.into()),
                optional,
            }],
            targets: Vec::new(),
        };
        wrong_arrows(&package).len()
    }

    #[test]
    fn arrows_point_from_providers_to_the_core_and_from_the_front_door_to_all() {
        assert_eq!(faults("runtime-docker", "runtime-core", false), 0);
        assert_eq!(faults("xtask", "runtime-core", false), 0);
        assert_eq!(faults("xtask", "runtime-docker", true), 0);
        assert_eq!(faults("xtask", "runtime-docker", false), 1);
        assert_eq!(faults("runtime-docker", "runtime-e2b", false), 1);
        assert_eq!(faults("runtime-core", "runtime-docker", true), 1);
        assert_eq!(faults("semantic-graph", "runtime-core", false), 1);
        assert_eq!(faults("runtime-e2b", "xtask", false), 1);
    }

    #[test]
    fn a_crate_is_named_by_its_package_or_by_its_path() {
        assert!(mentions("use runtime_e2b::Config;", "runtime-e2b"));
        assert!(mentions("runtime-e2b = { path = \"x\" }", "runtime-e2b"));
        assert!(!mentions("runtime_core::Sandbox", "runtime-e2b"));
    }
}
