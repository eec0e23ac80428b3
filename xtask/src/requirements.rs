//! What tests need of the machine, and whether it is there.
//!
//! A test that lacks something prints `SKIPPED: NAME: reason` and returns, where NAME is one of these. Under `CI=true`
//! that is a failure for what some crate needs: nothing may pass there because it was not looked at.

use std::path::Path;

use crate::host::{Host, is_installed};

/// Something that a machine has or lacks.
pub(crate) struct Requirement {
    /// As tests name it.
    pub(crate) name: &'static str,
    /// How to bring it.
    pub(crate) remedy: &'static str,
    /// Crates whose tests need it. A crate adds itself here; from then on CI must have it.
    pub(crate) needed_by: &'static [&'static str],
    probe: fn() -> Result<String, String>,
}

/// Everything that tests may need.
pub(crate) const ALL: &[Requirement] = &[
    Requirement {
        name: "docker",
        remedy: "install docker.io and start dockerd",
        needed_by: &["runtime-docker", "xtask"],
        probe: docker,
    },
    Requirement {
        name: "podman",
        remedy: "install podman",
        needed_by: &["runtime-docker"],
        probe: podman,
    },
    Requirement {
        name: "pip",
        remedy: "install python3-pip",
        needed_by: &["runtime-docker"],
        probe: || ask("/usr/bin/pip", &["--version"]),
    },
    Requirement {
        name: "e2b-sdk",
        remedy: "pip install e2b",
        needed_by: &[],
        probe: || python_package("e2b"),
    },
    Requirement {
        name: "modal-sdk",
        remedy: "pip install modal",
        needed_by: &[],
        probe: || python_package("modal"),
    },
    Requirement {
        name: "prime-sdk",
        remedy: "pip install prime-sandboxes",
        needed_by: &[],
        probe: || python_package("prime_sandboxes"),
    },
];

impl Requirement {
    /// The version that is there, or why there is none.
    pub(crate) fn probe(&self) -> Result<String, String> {
        (self.probe)()
    }

    /// Whether a run under CI must have it.
    pub(crate) fn is_needed(&self) -> bool {
        !self.needed_by.is_empty()
    }

    /// The requirement of this name.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|requirement| requirement.name == name)
    }
}

/// Whether this runs where nothing may be skipped.
pub(crate) fn under_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true" || value == "1")
}

fn docker() -> Result<String, String> {
    ask("docker", &["version", "--format", "{{.Server.Version}}"])
}

fn podman() -> Result<String, String> {
    ask("podman", &["version", "--format", "{{.Client.Version}}"])
}

fn python_package(module: &str) -> Result<String, String> {
    // Finding a module does not run it.
    let script = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)";
    ask("python3", &["-c", script, module])
        .map(|_| "installed".to_owned())
        .map_err(|_| format!("python3 has no module {module}"))
}

fn ask(program: &str, args: &[&str]) -> Result<String, String> {
    if !is_installed(program) {
        return Err(format!("{program} is not installed"));
    }
    match Host::program(program, Path::new(".")).args(args).read() {
        Ok(version) => Ok(version.trim().to_owned()),
        Err(error) => Err(error.to_string().lines().last().unwrap_or("no answer").to_owned()),
    }
}
