//! The conformance suite on boxes of namespaces with a root file system of their own.

mod subprocess_target;

use std::process::ExitCode;

use subprocess_target::{Subprocess, isolation};

fn main() -> ExitCode {
    isolation::run("conformance_isolation_directory", || {
        runtime_core::conformance::main(Subprocess::isolated_in_directory)
    })
}
