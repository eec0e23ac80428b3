//! The conformance suite on Podman, through the guest, over a socket.

#[path = "support/conformance.rs"]
mod conformance;
mod support;

fn main() -> std::process::ExitCode {
    conformance::main(
        runtime_docker::EngineKind::Podman,
        runtime_docker::ExecMode::Guest,
        "socket",
    )
}
