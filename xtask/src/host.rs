//! Programs of this machine that the commands call: cargo, git, the engines.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

/// A program of this machine, about to be called.
pub(crate) struct Host {
    command: Command,
    shown: String,
}

impl Host {
    /// A program, run in `dir`, with nothing on standard input.
    pub(crate) fn program(program: impl AsRef<OsStr>, dir: &Path) -> Self {
        let mut command = Command::new(program.as_ref());
        command.current_dir(dir).stdin(Stdio::null());
        Self {
            shown: program.as_ref().to_string_lossy().into_owned(),
            command,
        }
    }

    /// The cargo that built this program.
    pub(crate) fn cargo(dir: &Path) -> Self {
        let mut host = Self::program(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), dir);
        host.shown = "cargo".to_owned();
        // What cargo set for this program is not meant for another cargo.
        for (name, _) in std::env::vars_os() {
            let name_text = name.to_string_lossy();
            if name_text.starts_with("CARGO_PKG_") || name_text.starts_with("CARGO_MANIFEST_") {
                host.command.env_remove(&name);
            }
        }
        host
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.shown.push(' ');
        self.shown.push_str(&arg.as_ref().to_string_lossy());
        self.command.arg(arg);
        self
    }

    pub(crate) fn args<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(self, args: I) -> Self {
        args.into_iter().fold(self, Self::arg)
    }

    pub(crate) fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.command.env(name, value.into());
        self
    }

    /// What was called, for messages.
    pub(crate) fn shown(&self) -> &str {
        &self.shown
    }

    /// The command as std has it, for callers that read its output while it runs.
    pub(crate) fn into_command(self) -> Command {
        self.command
    }

    /// Runs it with the terminal's output; false when it failed.
    pub(crate) fn succeeds(mut self) -> Result<bool> {
        let status = self
            .command
            .status()
            .with_context(|| format!("starting `{}`", self.shown))?;
        Ok(status.success())
    }

    /// Runs it with the terminal's output.
    ///
    /// # Errors
    /// When it cannot be started or fails.
    pub(crate) fn run(self) -> Result<()> {
        let shown = self.shown.clone();
        if !self.succeeds()? {
            bail!("`{shown}` failed");
        }
        Ok(())
    }

    /// Runs it and returns what it printed.
    ///
    /// # Errors
    /// When it cannot be started or fails: with the end of what it said.
    pub(crate) fn read(mut self) -> Result<String> {
        let output = self
            .command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .output()
            .with_context(|| format!("starting `{}`", self.shown))?;
        if !output.status.success() {
            let said = runtime_core::text::tail(&output.stderr, 2000).into_owned();
            bail!("`{}` failed ({}): {said}", self.shown, output.status);
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Whether a program of this name is in `PATH`.
pub(crate) fn is_installed(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// What a command exits with: 0 for true, 1 for false and for an error, which is printed with its causes.
pub(crate) fn exit_code(result: Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
