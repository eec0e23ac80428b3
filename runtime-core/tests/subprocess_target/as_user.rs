//! Running a test program anew as somebody who is not root.
#![allow(dead_code, reason = "each test program uses a part of this")]

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// `nobody`, nearly everywhere; no account is needed.
const USER: u32 = 65_534;
/// Set for the program that was started anew.
const COPY: &str = "STARTED_AS_USER";

/// What `suite` does, as an unprivileged user: where the tests run as root, they start themselves anew.
pub(crate) fn run(suite: impl FnOnce() -> ExitCode) -> ExitCode {
    if !rustix::process::geteuid().is_root() {
        return suite();
    }
    match as_user() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("the suite cannot be started as user {USER}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The same, for a suite that another target runs as whoever the tests run as: nobody is to run it twice.
pub(crate) fn only(suite: impl FnOnce() -> ExitCode) -> ExitCode {
    match rustix::process::geteuid().is_root() || std::env::var_os(COPY).is_some() {
        true => run(suite),
        false => {
            println!("an ordinary user runs the tests, and with them this suite under its other name");
            ExitCode::SUCCESS
        }
    }
}

/// Starts a copy of this program, which the user can read wherever it was built, with a directory that is the user's.
fn as_user() -> io::Result<ExitCode> {
    let home = tempfile::tempdir()?;
    fs::set_permissions(home.path(), fs::Permissions::from_mode(0o755))?;
    let program = home.path().join("suite");
    fs::copy(std::env::current_exe()?, &program)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let scratch = home.path().join("scratch");
    fs::create_dir(&scratch)?;
    chown(&scratch, Some(USER), Some(USER))?;
    // Dropping the user id drops the groups too.
    let status = Command::new(&program)
        .args(std::env::args_os().skip(1))
        .env("TMPDIR", &scratch)
        .env("HOME", &scratch)
        .env(COPY, "1")
        .current_dir(&scratch)
        .gid(USER)
        .uid(USER)
        .status()?;
    Ok(match status.code() {
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    })
}
