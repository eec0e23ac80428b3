//! A Python that has the official client.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// `$E2B_PYTHON`, or a virtual environment below the target directory, made if the package can be had. `None`, said
/// loudly, if not.
pub(crate) fn python() -> Option<PathBuf> {
    if let Some(python) = std::env::var_os("E2B_PYTHON") {
        return Some(python.into());
    }
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("e2b-sdk");
    let python = venv.join("bin/python");
    let has_client = || {
        let imported = Command::new(&python)
            .args(["-c", "import e2b"])
            .stderr(Stdio::null())
            .status();
        imported.is_ok_and(|status| status.success())
    };
    if has_client() {
        return Some(python);
    }
    let requirements = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk/requirements.txt");
    let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status();
    let installed = made.is_ok_and(|status| status.success())
        && Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "-r", requirements])
            .status()
            .is_ok_and(|status| status.success());
    if installed && has_client() {
        return Some(python);
    }
    eprintln!("SKIPPED: the official E2B client for Python cannot be installed");
    assert!(std::env::var_os("CI").is_none(), "this must not be skipped in CI");
    None
}
