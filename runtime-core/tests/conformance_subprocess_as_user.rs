//! The conformance suite on the embedded runtime for somebody who is not root.

mod subprocess_target;

use std::process::ExitCode;

use subprocess_target::{Subprocess, as_user};

fn main() -> ExitCode {
    as_user::run(|| runtime_core::conformance::main(Subprocess::new))
}
