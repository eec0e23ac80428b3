//! The conformance suite on Docker, through the Engine API's exec.

#[path = "support/conformance.rs"]
mod conformance;
mod support;

fn main() -> std::process::ExitCode {
    conformance::main(
        runtime_docker::EngineKind::Docker,
        runtime_docker::ExecMode::Engine,
        "engine",
    )
}
