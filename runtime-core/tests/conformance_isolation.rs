//! The conformance suite on boxes of namespaces with the host's files.

mod subprocess_target;

use std::process::ExitCode;

use subprocess_target::{Subprocess, isolation};

fn main() -> ExitCode {
    isolation::run("conformance_isolation", || {
        runtime_core::conformance::main(Subprocess::isolated)
    })
}
