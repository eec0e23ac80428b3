//! Whether boxes of namespaces can be made where the tests run.

use std::process::ExitCode;

/// What `suite` does, where it can be done. Elsewhere it is skipped, which under CI is a failure.
#[cfg(target_os = "linux")]
pub(crate) fn run(name: &str, suite: impl FnOnce() -> ExitCode) -> ExitCode {
    let missing = match runtime_core::subprocess::isolation::availability() {
        Ok(()) if busybox().is_some() => return suite(),
        Ok(()) => "there is no static busybox here: apt-get install busybox-static".to_owned(),
        Err(unavailable) => unavailable.to_string(),
    };
    if std::env::var_os("CI").is_some_and(|ci| ci == "true") {
        eprintln!("{name}: {missing}");
        return ExitCode::FAILURE;
    }
    println!("SKIPPED: {name}: {missing}");
    ExitCode::SUCCESS
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn run(name: &str, _suite: impl FnOnce() -> ExitCode) -> ExitCode {
    println!("SKIPPED: {name}: there are no namespaces on this system");
    ExitCode::SUCCESS
}

/// The program that a root file system is made of.
pub(crate) fn busybox() -> Option<&'static str> {
    let places = ["/bin/busybox", "/usr/bin/busybox"];
    places.into_iter().find(|place| std::path::Path::new(place).is_file())
}
