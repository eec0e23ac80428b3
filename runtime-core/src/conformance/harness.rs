//! The suite as a test program: libtest's arguments, one line per case.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use crate::conformance::cases::cases;
use crate::conformance::report::{CaseReport, Outcome};
use crate::conformance::runner::{Options, run_with};
use crate::conformance::target::Target;

/// A variable of the host that every run has, so that a case can tell whether boxes inherit it.
pub(crate) const HOST_VARIABLE: (&str, &str) = ("CONFORMANCE_HOST_VARIABLE", "of-the-host");

/// A variable of the host that no box may ever see.
pub(crate) const HOST_API_KEY: (&str, &str) = ("CONFORMANCE_HOST_Api_Key", "conformance-secret-of-the-host");

struct Arguments {
    options: Options,
    list: bool,
    ignored_only: bool,
    quiet: bool,
    json: Option<PathBuf>,
}

impl Arguments {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut parsed = Self {
            options: Options::default(),
            list: false,
            ignored_only: false,
            quiet: false,
            json: None,
        };
        if let Ok(threads) = std::env::var("RUST_TEST_THREADS") {
            parsed.options.concurrency = number("RUST_TEST_THREADS", &threads)?;
        }
        let mut arguments = arguments.peekable();
        while let Some(argument) = arguments.next() {
            if !argument.starts_with('-') {
                parsed.options.filter.push(argument);
                continue;
            }
            let (name, inline) = match argument.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (argument, None),
            };
            let mut value = || {
                let value = inline.clone().or_else(|| arguments.next());
                value.ok_or_else(|| format!("{name} needs a value"))
            };
            match name.as_str() {
                "--list" => parsed.list = true,
                "--exact" => parsed.options.exact = true,
                "--ignored" => parsed.ignored_only = true,
                "-q" | "--quiet" => parsed.quiet = true,
                "--skip" => parsed.options.skip.push(value()?),
                "--test-threads" => parsed.options.concurrency = number(&name, &value()?)?,
                "--patience" => parsed.options.patience = number(&name, &value()?)?,
                "--json" => parsed.json = Some(value()?.into()),
                // What these ask for is the case already, or means nothing here.
                "--include-ignored" | "--nocapture" | "--no-capture" | "--show-output" | "--test" => {}
                "--format" | "--color" | "--logfile" | "-Z" | "--report-time" => drop(value()?),
                _ => return Err(format!("unknown argument {name}")),
            }
        }
        Ok(parsed)
    }
}

fn number<N: std::str::FromStr + PartialOrd + From<u8>>(name: &str, text: &str) -> Result<N, String> {
    match text.parse::<N>() {
        Ok(number) if number >= N::from(1) => Ok(number),
        _ => Err(format!("{name} is a number of at least 1, not {text:?}")),
    }
}

/// Runs the suite as the `main` of a test target with `harness = false`.
///
/// Takes libtest's arguments, `--json FILE` for the report as data, and `--patience N`, which multiplies every
/// deadline. On Unix the program first executes itself anew, with a variable and an API key in its environment by which
/// the cases see what boxes inherit; so the target is made after that, by `make`.
pub fn main<T: Target>(make: impl FnOnce() -> T) -> ExitCode {
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    if arguments.list {
        list(&arguments);
        return ExitCode::SUCCESS;
    }
    if arguments.ignored_only {
        println!("\nno case is ignored\n");
        return ExitCode::SUCCESS;
    }
    with_host_variables();
    let target = make();
    let chosen = cases().iter().filter(|case| arguments.options.chooses(case)).count();
    println!("\nrunning {chosen} cases against {}", target.name());
    let quiet = arguments.quiet;
    let report = run_with(Arc::new(target), &arguments.options, &|case| {
        if !quiet || case.outcome == Outcome::Failed {
            println!("{}", line(case));
        }
    });
    if report.summary().failed > 0 {
        println!("\nfailures:");
        for failure in report.failures() {
            println!("    {}: {}", failure.name, failure.message);
        }
    }
    println!("\n{}: {}\n", report.target, report.summary());
    if let Some(path) = arguments.json
        && let Err(error) = std::fs::write(&path, format!("{:#}\n", report.to_json()))
    {
        eprintln!("{}: {error}", path.display());
        return ExitCode::FAILURE;
    }
    match report.summary().failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(101),
    }
}

fn line(case: &CaseReport) -> String {
    let seconds = case.duration.as_secs_f64();
    let line = match case.outcome {
        Outcome::Passed => format!("test {} ... ok ({seconds:.2} s)", case.name),
        Outcome::Failed => format!("test {} ... FAILED ({seconds:.2} s)\n    {}", case.name, case.message),
        Outcome::Unsupported => format!("test {} ... unsupported ({})", case.name, case.message),
        Outcome::Skipped => format!("test {} ... SKIPPED ({})", case.name, case.message),
    };
    line.trim_end().to_owned()
}

fn list(arguments: &Arguments) {
    let chosen = cases().into_iter().filter(|case| arguments.options.chooses(case));
    let mut count = 0;
    for case in chosen.filter(|_| !arguments.ignored_only) {
        println!("{}: test", case.name);
        count += 1;
    }
    if !arguments.quiet {
        println!("\n{count} tests, 0 benchmarks");
    }
}

/// Starts this program anew with the variables set, since a running one cannot safely set its own.
fn with_host_variables() {
    #[cfg(unix)]
    if std::env::var_os(HOST_VARIABLE.0).is_none()
        && let Ok(program) = std::env::current_exe()
    {
        use std::os::unix::process::CommandExt;
        let error = std::process::Command::new(program)
            .args(std::env::args_os().skip(1))
            .envs([HOST_VARIABLE, HOST_API_KEY])
            .exec();
        // Only the cases that look for the variables are poorer for it.
        eprintln!("the host's variables cannot be set: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Arguments, String> {
        Arguments::parse(arguments.iter().map(|argument| (*argument).to_owned()))
    }

    #[test]
    fn takes_the_arguments_that_cargo_test_and_nextest_pass() {
        let parsed = parse(&[
            "exec/",
            "--skip",
            "argv",
            "--test-threads=3",
            "--nocapture",
            "--format",
            "terse",
        ])
        .unwrap();
        assert_eq!(parsed.options.filter, ["exec/"]);
        assert_eq!(parsed.options.skip, ["argv"]);
        assert_eq!(parsed.options.concurrency, 3);
        assert!(
            parse(&["--list", "--format", "terse", "--ignored"])
                .unwrap()
                .ignored_only
        );
        assert!(parse(&["--test-threads", "0"]).is_err());
        assert!(parse(&["--skip"]).is_err());
        assert!(parse(&["--tset"]).is_err());
    }

    #[test]
    fn an_exact_filter_is_the_whole_name() {
        let chosen = |arguments: &[&str]| {
            let options = parse(arguments).unwrap().options;
            cases().iter().filter(|case| options.chooses(case)).count()
        };
        assert_eq!(chosen(&["--exact", "exec/exit-codes-0-to-255"]), 1);
        assert_eq!(chosen(&["--exact", "exec/exit-codes"]), 0);
        assert!(chosen(&["exec/"]) > 5 && chosen(&["exec/"]) < chosen(&[]));
        assert_eq!(chosen(&["exec/", "--skip", "exec"]), 0);
    }
}
