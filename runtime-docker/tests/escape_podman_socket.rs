//! What a program in a closed box may try to get out: Podman, the guest over a socket.

#[path = "support/escape.rs"]
mod escape;
mod support;

fn main() -> std::process::ExitCode {
    escape::main(
        runtime_docker::EngineKind::Podman,
        runtime_docker::ExecMode::Guest,
        "socket",
    )
}
