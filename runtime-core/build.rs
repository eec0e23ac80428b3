//! Builds the guest, the static program that is process 1 of a box, and leaves it where the crate embeds it.
//!
//! Only with the feature `guest`. One call of the same compiler on `guest/main.rs`, which needs nothing but `std`: no
//! network, no registry, no nested cargo. When it cannot be built the crate is built without it, and
//! `guest::availability()` says why.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_GUEST").is_none() || variable("CARGO_CFG_TARGET_OS") != "linux" {
        return;
    }
    println!("cargo::rerun-if-changed=guest");
    println!("cargo::rerun-if-changed=src/guest/encoding.rs");
    println!("cargo::rerun-if-changed=src/guest/frame.rs");
    println!("cargo::rerun-if-changed=src/guest/plan.rs");
    println!("cargo::rerun-if-env-changed=RUSTC_LINKER");

    let out = PathBuf::from(variable("OUT_DIR"));
    let text = match build(&out) {
        Ok(program) => format!(
            "pub(super) static PROGRAM: Result<&[u8], &str> = Ok(include_bytes!({:?}));\n",
            program.display().to_string()
        ),
        Err(reason) => {
            println!("cargo::warning=the guest could not be built, so boxes will be slower: {reason}");
            format!("pub(super) static PROGRAM: Result<&[u8], &str> = Err({reason:?});\n")
        }
    };
    if let Err(error) = fs::write(out.join("guest_program.rs"), text) {
        println!("cargo::error=cannot write to OUT_DIR: {error}");
    }
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_default()
}

fn build(out: &Path) -> Result<PathBuf, String> {
    let architecture = variable("CARGO_CFG_TARGET_ARCH");
    if variable("CARGO_CFG_TARGET_POINTER_WIDTH") != "64" || variable("CARGO_CFG_TARGET_ENDIAN") != "little" {
        return Err(format!(
            "it runs on 64-bit little-endian machines, which {architecture} is not"
        ));
    }
    let target = variable("TARGET");
    let musl = match architecture.as_str() {
        "riscv64" => "riscv64gc-unknown-linux-musl".to_owned(),
        other => format!("{other}-unknown-linux-musl"),
    };
    let mut failures = Vec::new();
    for candidate in [&musl, &target] {
        if *candidate == musl && failures.is_empty() && !is_installed(&musl) {
            failures.push(format!("{musl}: the target is not installed"));
            continue;
        }
        match compile(candidate, *candidate == target, out) {
            Ok(program) => return Ok(program),
            Err(failure) => failures.push(format!("{candidate}: {failure}")),
        }
    }
    Err(failures.join("; "))
}

/// Whether the compiler has a standard library for the target.
fn is_installed(target: &str) -> bool {
    let output = Command::new(variable("RUSTC"))
        .args(["--print", "target-libdir", "--target", target])
        .output();
    output.is_ok_and(|output| {
        let directory = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        output.status.success()
            && fs::read_dir(directory).is_ok_and(|entries| {
                let mut names = entries.flatten().map(|entry| entry.file_name());
                names.any(|name| name.to_string_lossy().starts_with("libstd-"))
            })
    })
}

fn compile(target: &str, is_ours: bool, out: &Path) -> Result<PathBuf, String> {
    let program = out.join("guest");
    // `CARGO_MANIFEST_DIR` and not a relative path: a vendored copy is built from elsewhere.
    let source = Path::new(&variable("CARGO_MANIFEST_DIR")).join("guest/main.rs");
    let mut command = Command::new(variable("RUSTC"));
    command
        .args(["--edition", "2024", "--crate-name", "guest", "--crate-type", "bin"])
        .args(["--target", target, "--cap-lints", "allow"])
        .args([
            "-C",
            "opt-level=z",
            "-C",
            "lto=fat",
            "-C",
            "codegen-units=1",
            "-C",
            "panic=abort",
        ])
        .args(["-C", "strip=symbols", "-C", "target-feature=+crt-static"])
        .arg("-o")
        .arg(&program)
        .arg(source)
        .current_dir(out);
    // The linker that cargo was told to use for the target of this build.
    if let Some(linker) = env::var_os("RUSTC_LINKER").filter(|_| is_ours) {
        let mut argument = OsString::from("linker=");
        argument.push(linker);
        command.arg("-C").arg(argument);
    }
    let output = command
        .output()
        .map_err(|error| format!("{}: {error}", variable("RUSTC")))?;
    if output.status.success() {
        return Ok(program);
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let first = text
        .lines()
        .find(|line| line.starts_with("error"))
        .unwrap_or("the compiler failed");
    Err(first.to_owned())
}
