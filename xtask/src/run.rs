//! `cargo xtask run`: one program through the whole life of a sandbox.
//!
//! Provision, upload, setup, lock down, run, download, tear down. The program's output passes as it comes, byte for
//! byte, and its exit code is ours:
//!
//! | code | meaning |
//! | --- | --- |
//! | the program's | it ran to its end |
//! | 128 + N | signal N killed it |
//! | 124 | it was killed when `--timeout` passed |
//! | 125 | we failed: the command line, the provider, a transfer |
//! | 126 | the program is there and cannot be executed |
//! | 127 | there is no such program |
//! | 130, 143, 129 | SIGINT, SIGTERM or SIGHUP ended us |
//! | 141 | whoever read our output went away |

mod life;
mod output;
mod phases;
mod plan;
mod report;
mod transfer;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use runtime_core::{Error, ErrorKind};

use plan::Plan;
use report::Report;

/// What we exit with when we fail and not the program, as `docker run` does.
pub(crate) const OWN_FAILURE: u8 = 125;

/// Runs a program in a new sandbox and passes its output and exit code on
///
/// Exit codes: the program's own; 128 + N when signal N killed it; 124 after --timeout; 126 when it cannot be executed;
/// 127 when it does not exist; 125 when anything else failed; 130 after Ctrl-C. The first Ctrl-C tears the sandbox
/// down, a second one leaves at once, and leaves what is not gone yet to `cargo xtask reap`.
#[derive(clap::Args, Debug, Default)]
#[command(override_usage = "cargo xtask run [OPTIONS] -- ARGV...")]
pub(crate) struct Args {
    /// Provider, as TYPE or TYPE://IMAGE?FIELD=VALUE&... [default: $SANDBOX_TYPE and $SANDBOX_FIELD..., else
    /// subprocess]
    #[arg(long, value_name = "TYPE|URL")]
    runtime: Option<String>,
    /// Configuration of the sandbox, .toml or .json; the other options win over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Image that the sandbox starts from
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// Working directory of the program; a relative one is under the sandbox's own and made if missing
    #[arg(long, value_name = "DIR")]
    workdir: Option<PathBuf>,
    /// Variable for the program; NAME alone passes ours on. Repeatable
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<OsString>,
    /// Host that the program may reach; everything else is then closed. Repeatable. On the embedded runtime this gives
    /// the sandbox namespaces of its own
    #[arg(long, value_name = "HOST")]
    allow: Vec<String>,
    /// Host that the program must not reach. Repeatable
    #[arg(long, value_name = "HOST")]
    block: Vec<String>,
    /// At the end, print what the program reached as options for --allow. Without --allow and --block everything is open
    /// to it, through the proxy
    #[arg(long)]
    record_egress: bool,
    /// Directory or file to copy into the sandbox first, by default into the working directory. The last colon
    /// separates. Repeatable
    #[arg(long, value_name = "PATH[:DEST]")]
    upload: Vec<OsString>,
    /// Directory or file to copy out of the sandbox afterwards, whatever the program's exit code, by default into the
    /// current directory under its own name. The last colon separates. Repeatable
    #[arg(long, value_name = "PATH[:LOCAL]")]
    download: Vec<OsString>,
    /// Kill the program after this long; fractions are fine
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    timeout: Option<Duration>,
    /// Name of the sandbox [default: a random one]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Pass standard input on to the program; without this it is empty
    #[arg(long)]
    stdin: bool,
    /// Print one JSON object at the end instead of the program's output, which is in it
    ///
    /// Fields: status (exited, signaled, timeout, interrupted, failed), exit_code (ours), code and signal (the
    /// program's), oom_killed, stdout and stderr ({text} or, when it is not UTF-8, {base64}; with dropped_bytes past
    /// 128 MiB), seconds per phase, sandbox (its record), error and further_errors ({kind, message, provider, sandbox,
    /// operation, field, hint, ...}), egress (refused:
    /// {destination, reason, count, proposal} each, and used: rules; null without a policy that is enforced here).
    #[arg(long)]
    json: bool,
    /// Program and arguments
    #[arg(last = true, value_name = "ARGV")]
    argv: Vec<OsString>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err("it must be a positive number of seconds".to_owned()),
    }
}

pub(crate) fn execute(args: Args) -> ExitCode {
    let json = args.json;
    let report = match Plan::new(args, &crate::providers::registry()) {
        Ok(plan) => {
            if let Some(notice) = plan.notice {
                // Whoever has closed our standard error does not want to know.
                let _ = writeln!(std::io::stderr(), "{notice}");
            }
            drive(plan)
        }
        Err(error) => Report::refused(error.with_operation("run")),
    };
    let code = report.exit_code();
    if json {
        // A closed standard output is the reader's choice, and no reason to panic.
        let _ = writeln!(std::io::stdout(), "{:#}", report.json());
    } else {
        report.explain();
    }
    ExitCode::from(code)
}

fn drive(plan: Plan) -> Report {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Report::refused(Error::io("starting the executor", error)),
    };
    let report = runtime.block_on(life::live(plan));
    // A thread that is stuck in a file operation must not keep us.
    runtime.shutdown_background();
    report
}

/// An error of our own use, before anything was created.
fn refuse(field: &'static str, message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message).with_field(field)
}
