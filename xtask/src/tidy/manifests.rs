//! Rules for manifests and for the workflow.

use anyhow::{Context, Result};
use toml::Table;

use super::{Fault, House};

const WORKFLOW: &str = ".github/workflows/ci.yml";

/// What every crate takes from the workspace.
const INHERITED: &[&str] = &["version", "edition", "rust-version", "license", "publish"];

pub(super) fn inherited(house: &House) -> Result<Vec<Fault>> {
    let mut faults = Vec::new();
    for package in &house.workspace.packages {
        let text = std::fs::read_to_string(&package.manifest_path)
            .with_context(|| format!("reading {}", package.manifest_path.display()))?;
        faults.extend(own_values(&package.name, &text)?);
    }
    Ok(faults)
}

fn own_values(name: &str, manifest: &str) -> Result<Vec<Fault>> {
    let manifest: Table = manifest.parse().with_context(|| format!("the manifest of {name}"))?;
    let inherits = |table: &str, key: Option<&str>| {
        let value = manifest.get(table);
        let value = match key {
            Some(key) => value.and_then(|table| table.get(key)),
            None => value,
        };
        value
            .and_then(|value| value.get("workspace"))
            .and_then(toml::Value::as_bool)
            == Some(true)
    };
    let mut faults = Vec::new();
    for key in INHERITED {
        if !inherits("package", Some(key)) {
            faults.push(Fault::new(
                name,
                format!("`{key}` must be inherited from the workspace"),
            ));
        }
    }
    if !inherits("lints", None) {
        faults.push(Fault::new(name, "lints must be inherited from the workspace"));
    }
    let described = manifest.get("package").and_then(|package| package.get("description"));
    if described.is_none() {
        faults.push(Fault::new(name, "it has no description"));
    }
    Ok(faults)
}

pub(super) fn workflow(house: &House) -> Result<Vec<Fault>> {
    let Some(workflow) = house.file(WORKFLOW) else {
        return Ok(vec![Fault::new(WORKFLOW, "is missing")]);
    };
    let names = house.workspace.names().into_iter();
    let missing = names.filter(|name| {
        !workflow
            .text
            .lines()
            .any(|line| line.contains(&format!("crate: {name}")))
    });
    Ok(missing
        .map(|name| Fault::new(WORKFLOW, format!("has no entry `crate: {name}`")))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_that_sets_what_it_should_inherit_is_told() {
        let inheriting: String = INHERITED
            .iter()
            .map(|key| format!("{key}.workspace = true\n"))
            .collect();
        let good = format!("[package]\nname = \"x\"\ndescription = \"y\"\n{inheriting}[lints]\nworkspace = true\n");
        assert_eq!(own_values("x", &good).expect("parses"), []);
        for bad in [
            good.replace("edition.workspace = true", "edition = \"2021\""),
            good.replace("license.workspace = true\n", ""),
            good.replace("[lints]\nworkspace = true\n", ""),
            good.replace("description = \"y\"\n", ""),
        ] {
            assert_eq!(own_values("x", &bad).expect("parses").len(), 1, "{bad}");
        }
    }
}
