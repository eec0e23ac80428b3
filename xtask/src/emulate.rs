//! `cargo xtask emulate`: a provider's service on loopback, for any client.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use runtime_e2b::emulator::Emulator;
use tokio::signal::unix::{SignalKind, signal};

use crate::host::exit_code;

/// Emulates a provider's service on loopback, and prints the variables that point clients at it
///
/// Runs until SIGINT or SIGTERM, and then deletes its boxes. With a command behind `--`, runs that with the variables
/// set, and ends with it and its exit code.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    provider: Provider,
}

#[derive(clap::Subcommand)]
enum Provider {
    /// E2B: its control plane, and an envd that runs real processes on this machine
    E2b(E2b),
}

#[derive(clap::Args)]
struct E2b {
    /// Port of the control plane [default: a free one]
    #[arg(long, default_value = "0", hide_default_value = true)]
    port: u16,
    /// Port of envd, and of the boxes' ports behind it [default: a free one]
    #[arg(long, default_value = "0", hide_default_value = true)]
    envd_port: u16,
    /// Let builds from this image fail. Repeatable
    #[arg(long, value_name = "IMAGE")]
    fail_image: Vec<String>,
    /// How long a template's build takes, in milliseconds
    #[arg(long, value_name = "MS", default_value = "50")]
    build_time: u64,
    /// The longest life of a box that the plan allows, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "86400")]
    max_lifetime: u64,
    /// The version that envd claims
    #[arg(long, value_name = "VERSION")]
    envd_version: Option<String>,
    /// Run this command with the variables set
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn execute(args: Args) -> ExitCode {
    let Provider::E2b(args) = args.provider;
    match e2b(&args) {
        Ok(code) => code,
        Err(error) => exit_code(Err(error)),
    }
}

fn e2b(args: &E2b) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("no executor")?;
    runtime.block_on(async {
        // Before there is anything to leave behind.
        let (mut int, mut term) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let emulator = Emulator::start_at(args.port, args.envd_port).context("the emulator does not start")?;
        emulator.set_build_time(Duration::from_millis(args.build_time));
        emulator.set_max_lifetime(args.max_lifetime);
        if let Some(version) = &args.envd_version {
            emulator.set_envd_version(version);
        }
        for image in &args.fail_image {
            emulator.fail_image(image, "no such image");
        }
        for missing in &emulator.isolation().missing {
            eprintln!("boxes share with this machine what they cannot have of their own: {missing}");
        }
        if !emulator.isolation().network {
            eprintln!("network policies are checked and recorded, and NOT enforced");
        }
        let command = match args.command.split_first() {
            None => {
                for (name, value) in emulator.variables() {
                    println!("export {name}={value}");
                }
                None
            }
            Some((program, rest)) => Some(
                tokio::process::Command::new(program)
                    .args(rest)
                    .envs(emulator.variables())
                    .env_remove("E2B_DEBUG")
                    .spawn()
                    .with_context(|| format!("{} cannot be started", program.display()))?,
            ),
        };
        let ended = async {
            match command {
                None => std::future::pending().await,
                // A signal from the terminal reaches it too; it says itself what comes of that.
                Some(mut command) => command.wait().await,
            }
        };
        tokio::select! {
            status = ended => {
                let code = status.context("the command's end was not seen")?.code().unwrap_or(128);
                Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
            }
            _ = int.recv() => Ok(ExitCode::SUCCESS),
            _ = term.recv() => Ok(ExitCode::SUCCESS),
        }
    })
}
