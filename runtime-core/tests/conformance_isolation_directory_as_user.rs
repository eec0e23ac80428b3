//! The conformance suite on boxes of namespaces with a root file system of their own, for somebody who is not root.

mod subprocess_target;

use std::process::ExitCode;

use subprocess_target::{Subprocess, as_user, isolation};

fn main() -> ExitCode {
    as_user::only(|| {
        isolation::run("conformance_isolation_directory_as_user", || {
            runtime_core::conformance::main(Subprocess::isolated_in_directory)
        })
    })
}
