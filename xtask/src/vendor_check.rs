//! `cargo xtask vendor-check`: that one provider can be copied out of this repository and lives.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use toml::{Table, Value};

use crate::host::{Host, exit_code};
use crate::test::{Tally, count};
use crate::workspace::Workspace;

/// Copies runtime-core and one provider into a workspace of their own, and builds and tests that offline
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The provider: `subprocess` (which is runtime-core alone), `docker`, ...
    provider: String,
}

pub(crate) fn execute(args: Args) -> ExitCode {
    exit_code(Workspace::load().and_then(|workspace| {
        let tally = check(&workspace, &args.provider)?;
        print!("{}", tally.closing());
        Ok(tally.is_green())
    }))
}

/// Builds and tests a copy of one provider.
///
/// # Errors
/// For an unknown provider, and when the copy cannot be made.
pub(crate) fn check(workspace: &Workspace, provider: &str) -> Result<Tally> {
    let mut names = vec!["runtime-core".to_owned()];
    let own = workspace.provider_crate(provider)?.name.clone();
    if own != "runtime-core" {
        names.push(own);
    }
    let copy = tempfile::Builder::new()
        .prefix("vendored-")
        .tempdir()
        .context("making a directory")?;
    vendor(workspace, &names, copy.path())?;
    println!("testing {} alone", names.join(" and "));
    let cargo = Host::cargo(copy.path())
        // Built once for all providers, and apart from the workspace, whose lock it must not wait for.
        .env("CARGO_TARGET_DIR", workspace.target_dir.join("vendor-check"))
        .args(["test", "--offline", "--workspace", "--all-features", "--no-fail-fast"]);
    count(cargo)
}

/// Copies crates into a workspace of their own, as somebody would who vendors them.
fn vendor(workspace: &Workspace, names: &[String], to: &Path) -> Result<()> {
    let manifest = fs::read_to_string(workspace.root.join("Cargo.toml")).context("reading the root's manifest")?;
    fs::write(to.join("Cargo.toml"), root_manifest(&manifest, names)?).context("writing the manifest")?;
    // The same versions as here.
    fs::copy(workspace.root.join("Cargo.lock"), to.join("Cargo.lock")).context("copying the lock file")?;
    for name in names {
        let package = workspace
            .package(name)
            .with_context(|| format!("there is no crate {name}"))?;
        copy_tree(package.dir(), &to.join(name))?;
    }
    Ok(())
}

/// The root's manifest with these crates alone.
fn root_manifest(text: &str, names: &[String]) -> Result<String> {
    let mut manifest: Table = text.parse().context("the root's manifest")?;
    let workspace = manifest
        .get_mut("workspace")
        .and_then(Value::as_table_mut)
        .context("the root's manifest has no [workspace]")?;
    workspace.insert("members".to_owned(), Value::from(names.to_vec()));
    workspace.remove("default-members");
    if let Some(dependencies) = workspace.get_mut("dependencies").and_then(Value::as_table_mut) {
        dependencies.retain(|name, value| value.get("path").is_none() || names.iter().any(|kept| kept == name));
    }
    toml::to_string(&manifest).context("writing the manifest")
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let about = || format!("copying {}", from.display());
    fs::create_dir_all(to).with_context(about)?;
    for entry in fs::read_dir(from).with_context(about)? {
        let entry = entry.with_context(about)?;
        let target = to.join(entry.file_name());
        let kind = entry.file_type().with_context(about)?;
        if kind.is_dir() {
            if entry.file_name() != "target" {
                copy_tree(&entry.path(), &target)?;
            }
        } else if kind.is_symlink() {
            let points_to = fs::read_link(entry.path()).with_context(about)?;
            std::os::unix::fs::symlink(points_to, target).with_context(about)?;
        } else {
            fs::copy(entry.path(), target).with_context(about)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copied_workspace_has_the_copied_crates_and_no_others() {
        let text = "[workspace]\nmembers = [\"a\", \"b\", \"xtask\"]\ndefault-members = [\"a\"]\n\
                    [workspace.dependencies]\na = { path = \"a\" }\nb = { path = \"b\" }\nserde = \"1\"\n\
                    [profile.dev]\ndebug = 0\n";
        let names = ["a".to_owned()];
        let manifest: Table = root_manifest(text, &names).expect("written").parse().expect("TOML");
        assert_eq!(manifest["workspace"]["members"], Value::from(names.to_vec()));
        assert!(manifest["workspace"].get("default-members").is_none());
        let dependencies = manifest["workspace"]["dependencies"].as_table().expect("a table");
        assert_eq!(dependencies.keys().collect::<Vec<_>>(), ["a", "serde"]);
        assert_eq!(manifest["profile"]["dev"]["debug"], Value::from(0));
    }
}
