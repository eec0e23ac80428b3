//! The two engines, by their command lines: importing an archive is all that is asked of them.

use std::fmt;
use std::path::Path;

use anyhow::Result;

use crate::host::Host;
use crate::requirements::Requirement;

/// The label that tells which recipe an image is from.
const LABEL: &str = "sandbox-test.recipe";

/// A container engine of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Engine {
    /// Docker
    Docker,
    /// Podman
    Podman,
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }

    /// The engine's version, or why it does not answer.
    pub(super) fn version(self) -> Result<String, String> {
        match Requirement::named(self.name()) {
            Some(requirement) => requirement.probe(),
            None => Err(format!("{self} is not known")),
        }
    }

    /// The engines that answer.
    pub(super) fn answering() -> Vec<Self> {
        [Self::Docker, Self::Podman]
            .into_iter()
            .filter(|engine| engine.version().is_ok())
            .collect()
    }

    fn call(self) -> Host {
        Host::program(self.name(), Path::new("."))
    }

    /// Whether it has an image of this name from this recipe.
    pub(super) fn has(self, image: &str, digest: &str) -> bool {
        let format = format!("{{{{index .Config.Labels \"{LABEL}\"}}}}");
        let label = self
            .call()
            .args(["image", "inspect", "--format", &format, image])
            .read();
        label.is_ok_and(|label| label.trim() == digest)
    }

    /// The id of an image, if it has one of this name.
    fn id(self, image: &str) -> Option<String> {
        let id = self
            .call()
            .args(["image", "inspect", "--format", "{{.Id}}", image])
            .read();
        id.ok().map(|id| id.trim().to_owned())
    }

    /// Makes an image of an archive of its root directory. An older one of this name goes.
    pub(super) fn import(self, archive: &Path, image: &str, digest: &str, changes: &[String]) -> Result<()> {
        let mut call = self
            .call()
            .arg("import")
            .args(["--change", &format!("LABEL {LABEL}={digest}")]);
        for change in changes {
            call = call.args(["--change", change]);
        }
        let older = self.id(image);
        call.arg(archive).arg(image).read()?;
        if let Some(older) = older.filter(|older| Some(older) != self.id(image).as_ref()) {
            // One that a container still uses stays.
            let _ = self.call().args(["image", "rm", &older]).read();
        }
        Ok(())
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
