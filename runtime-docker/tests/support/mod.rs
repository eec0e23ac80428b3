//! What the tests on real engines share: which engine, which way, and what is left behind.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::process::{Command, Stdio};
use std::sync::OnceLock;

use runtime_docker::{ContainerConfig, EngineKind, ExecMode};

/// The images of `cargo xtask images`.
pub(crate) fn image(kind: EngineKind, name: &str) -> String {
    match kind {
        EngineKind::Docker => format!("sandbox-test/{name}:latest"),
        EngineKind::Podman => format!("localhost/sandbox-test/{name}:latest"),
    }
}

/// The engine's own client, for looking at what is there from outside.
pub(crate) fn client(kind: EngineKind, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(kind.tag())
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{}: {error}", kind.tag()))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

/// Whether a comma-separated variable asks for something; unset asks for everything.
pub(crate) fn is_asked_for(variable: &str, what: &str) -> bool {
    std::env::var(variable).map_or(true, |list| list.split(',').any(|item| item.trim() == what))
}

/// Whether the engine is there with the test images. Where it is not, says so loudly; under CI that is a failure,
/// unless `SANDBOX_TEST_ENGINES` names the engines to look at and this is none of them.
pub(crate) fn is_there(kind: EngineKind) -> bool {
    if !is_asked_for("SANDBOX_TEST_ENGINES", kind.tag()) {
        eprintln!("SKIPPED: not asked for: SANDBOX_TEST_ENGINES has no {}", kind.tag());
        return false;
    }
    has_images(kind)
}

/// As [`is_there`], whatever `SANDBOX_TEST_ENGINES` says.
pub(crate) fn has_images(kind: EngineKind) -> bool {
    static THERE: OnceLock<[Result<(), String>; 2]> = OnceLock::new();
    let there = THERE.get_or_init(|| {
        [EngineKind::Docker, EngineKind::Podman].map(|kind| {
            client(
                kind,
                &["image", "inspect", "--format", "{{.Id}}", &image(kind, "busybox")],
            )
            .map(|_| ())
        })
    });
    match &there[usize::from(kind == EngineKind::Podman)] {
        Ok(()) => true,
        Err(reason) => {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("tests").to_owned();
            eprintln!("SKIPPED: {test}: {kind} with the images of `cargo xtask images` is needed: {reason}");
            assert!(
                std::env::var_os("CI").is_none(),
                "{kind} must be there under CI: {reason}"
            );
            false
        }
    }
}

/// A configuration of a small box.
pub(crate) fn config(kind: EngineKind, name: &str, exec: ExecMode) -> ContainerConfig {
    let mut config = ContainerConfig::new(image(kind, name));
    config.exec = exec;
    config.pull = runtime_docker::PullPolicy::Never;
    config
}

/// Ids of the containers of a box, running or not.
#[allow(dead_code, reason = "the escape suite has no use for it")]
pub(crate) fn containers_of(kind: EngineKind, name: &str) -> Result<Vec<String>, String> {
    let filter = format!("label=runtime-sandbox.name={name}");
    let listed = client(kind, &["ps", "--all", "--quiet", "--no-trunc", "--filter", &filter])?;
    Ok(listed.lines().map(str::to_owned).collect())
}
