//! What a program in a closed box may try to get out: Docker, the guest over a socket.

#[path = "support/escape.rs"]
mod escape;
mod support;

fn main() -> std::process::ExitCode {
    escape::main(
        runtime_docker::EngineKind::Docker,
        runtime_docker::ExecMode::Guest,
        "socket",
    )
}
