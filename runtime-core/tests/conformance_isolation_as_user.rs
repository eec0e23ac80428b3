//! The conformance suite on boxes of namespaces with the host's files, for somebody who is not root.

mod subprocess_target;

use std::process::ExitCode;

use subprocess_target::{Subprocess, as_user, isolation};

fn main() -> ExitCode {
    as_user::only(|| {
        isolation::run("conformance_isolation_as_user", || {
            runtime_core::conformance::main(Subprocess::isolated)
        })
    })
}
