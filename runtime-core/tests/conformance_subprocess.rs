//! The conformance suite on the embedded runtime, each case a test.

mod subprocess_target;

use std::process::ExitCode;

fn main() -> ExitCode {
    runtime_core::conformance::main(subprocess_target::Subprocess::new)
}
