//! The front door of the workspace: `cargo xtask COMMAND`.
//!
//! Each command is one file that defines `Args` (whose doc comment is the command's help) and `execute`. To add one,
//! write the file, and name it in the two lists below.
#![forbid(unsafe_code)]

mod bench;
mod ci;
#[cfg(all(feature = "emulate", target_os = "linux"))]
mod emulate;
#[cfg(feature = "graph")]
mod graph;
mod host;
mod images;
mod providers;
mod reap;
mod requirements;
mod run;
mod test;
mod tidy;
mod vendor_check;
mod workspace;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

/// Lists the commands once: the enum that clap parses, and who carries out each.
macro_rules! commands {
    ($($(#[$meta:meta])* $module:ident => $name:ident),* $(,)?) => {
        #[derive(clap::Subcommand)]
        enum Command {
            $($(#[$meta])* $name(Box<$module::Args>),)*
        }

        impl Command {
            fn execute(self) -> ExitCode {
                match self {
                    $($(#[$meta])* Self::$name(args) => $module::execute(*args),)*
                }
            }
        }
    };
}

commands! {
    run => Run,
    test => Test,
    ci => Ci,
    images => Images,
    providers => Providers,
    reap => Reap,
    #[cfg(feature = "graph")]
    graph => Graph,
    #[cfg(all(feature = "emulate", target_os = "linux"))]
    emulate => Emulate,
    bench => Bench,
    tidy => Tidy,
    vendor_check => VendorCheck,
}

/// The front door of the workspace.
#[derive(Parser)]
#[command(
    bin_name = "cargo xtask",
    disable_help_subcommand = true,
    arg_required_else_help = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What a wrong command line exits with. `run` passes its program's codes on, so it keeps its own apart from them.
fn usage_exit_code(args: &[OsString]) -> u8 {
    match args.get(1).and_then(|arg| arg.to_str()) {
        Some("run") => run::OWN_FAILURE,
        _ => 2,
    }
}

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    match Cli::try_parse_from(&args) {
        Ok(cli) => cli.command.execute(),
        Err(error) => {
            // Nobody is left to tell when this fails.
            let _ = error.print();
            match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
                _ => ExitCode::from(usage_exit_code(&args)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed_and_every_command_has_help() {
        let cli = Cli::command();
        cli.clone().debug_assert();
        for command in cli.get_subcommands() {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
        }
    }
}
