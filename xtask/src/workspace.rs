//! Where the workspace is and what it consists of.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::host::Host;

/// One crate of the workspace.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) manifest_path: PathBuf,
    /// Feature names with what each turns on.
    pub(crate) features: BTreeMap<String, Vec<String>>,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) targets: Vec<Target>,
}

/// One entry of a crate's dependency tables.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// Set for a crate of this workspace.
    pub(crate) path: Option<PathBuf>,
    pub(crate) optional: bool,
}

/// Something that cargo builds from a crate.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: Vec<String>,
}

impl Package {
    /// The crate's directory.
    pub(crate) fn dir(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(&self.manifest_path)
    }

    /// Its features but `default`, in the order of their names.
    pub(crate) fn feature_names(&self) -> impl Iterator<Item = &str> {
        self.features
            .keys()
            .map(String::as_str)
            .filter(|name| *name != "default")
    }

    /// The feature sets that must build: none, each alone, all. As arguments for cargo.
    pub(crate) fn feature_matrix(&self) -> Vec<Vec<String>> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let names: Vec<&str> = self.feature_names().collect();
        let mut matrix = vec![words(&["--no-default-features"])];
        if names.len() > 1 {
            matrix.extend(
                names
                    .iter()
                    .map(|name| words(&["--no-default-features", "--features", name])),
            );
        }
        if !names.is_empty() {
            matrix.push(words(&["--all-features"]));
        }
        matrix
    }

    /// Whether cargo builds something of this kind from it, such as `bench`.
    pub(crate) fn has_target(&self, kind: &str) -> bool {
        self.targets
            .iter()
            .any(|target| target.kind.iter().any(|own| own == kind))
    }
}

/// The workspace that this program was built from.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target_dir: PathBuf,
    pub(crate) packages: Vec<Package>,
}

impl Workspace {
    /// The root directory, found from the current directory upward, so that a moved binary still works.
    pub(crate) fn find_root() -> Result<PathBuf> {
        let here = std::env::current_dir().context("the current directory is gone")?;
        here.ancestors()
            .find(|dir| dir.join("runtime-core").is_dir() && dir.join("Cargo.toml").is_file())
            .map(Path::to_path_buf)
            .with_context(|| format!("{} is not inside the workspace", here.display()))
    }

    /// Asks cargo.
    pub(crate) fn load() -> Result<Self> {
        Self::load_from(&Self::find_root()?)
    }

    /// Asks cargo about the workspace at `root`.
    pub(crate) fn load_from(root: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Metadata {
            packages: Vec<Package>,
            target_directory: PathBuf,
        }
        let text = Host::cargo(root)
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .read()?;
        let mut metadata: Metadata = serde_json::from_str(&text).context("reading what cargo metadata says")?;
        metadata.packages.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self {
            root: root.to_path_buf(),
            target_dir: metadata.target_directory,
            packages: metadata.packages,
        })
    }

    /// The crate of this name.
    pub(crate) fn package(&self, name: &str) -> Option<&Package> {
        self.packages.iter().find(|package| package.name == name)
    }

    /// The names of all crates.
    pub(crate) fn names(&self) -> BTreeSet<&str> {
        self.packages.iter().map(|package| package.name.as_str()).collect()
    }

    /// The crate that holds a provider: its own, or `runtime-core` for the embedded one.
    ///
    /// # Errors
    /// Names the providers that there are.
    pub(crate) fn provider_crate(&self, provider: &str) -> Result<&Package> {
        let name = match provider {
            "subprocess" => "runtime-core".to_owned(),
            "podman" => "runtime-docker".to_owned(),
            other => format!("runtime-{other}"),
        };
        self.package(&name).with_context(|| {
            let own = self
                .packages
                .iter()
                .filter_map(|package| package.name.strip_prefix("runtime-"));
            let known: Vec<_> = ["subprocess"]
                .into_iter()
                .chain(own.filter(|name| *name != "core"))
                .collect();
            format!(
                "there is no provider `{provider}` in this workspace; there are: {}",
                known.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(features: &[&str]) -> Package {
        Package {
            name: "x".into(),
            manifest_path: "x/Cargo.toml".into(),
            features: features.iter().map(|name| ((*name).to_owned(), Vec::new())).collect(),
            dependencies: Vec::new(),
            targets: Vec::new(),
        }
    }

    #[test]
    fn the_feature_matrix_is_none_then_each_alone_then_all() {
        let matrix = |features: &[&str]| -> Vec<String> {
            package(features)
                .feature_matrix()
                .iter()
                .map(|set| set.join(" "))
                .collect()
        };
        assert_eq!(matrix(&[]), ["--no-default-features"]);
        assert_eq!(matrix(&["default", "a"]), ["--no-default-features", "--all-features"]);
        assert_eq!(
            matrix(&["a", "b", "default"]),
            [
                "--no-default-features",
                "--no-default-features --features a",
                "--no-default-features --features b",
                "--all-features"
            ]
        );
    }
}
