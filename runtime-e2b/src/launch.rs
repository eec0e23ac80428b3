//! How a program is started in a box: the few words of shell before it, and what they say.
//!
//! envd starts an argument vector as it is, but it neither says whether the program exists (only that a shell exited with
//! 127) nor gives it a process group of its own. So, for a live process, a launcher looks the program up as `execvp` would, says on standard
//! error whether it can be run, and replaces itself by it under `setsid`, which keeps the process id and makes it a
//! group's. What it says begins with a random word, so that what a shell or a profile printed before is told apart.
//!
//! A command that is run to its end needs no word at its start: `setsid` alone is put before it, and only when it ends
//! with one of the two codes of a program that cannot be started, a question asked afterwards tells which it was. That
//! saves the box the start of a shell for each command.

use std::collections::BTreeMap;
use std::path::Path;

use runtime_core::names::random_id;
use runtime_core::{Error, ErrorKind, Exec, Result, StdinMode};

use crate::wire::process::{ProcessConfig, StartRequest};

/// Looks up `$1`: sets `r` to `+`, or to `f` (not found) or `x` (not executable).
const LOOK_UP: &str = r#"r=f
case $1 in
*/*) if [ -f "$1" ]; then r=x; if [ -x "$1" ]; then r=+; fi; elif [ -e "$1" ]; then r=x; fi;;
*) set -f; i=$IFS; IFS=:
for d in $PATH; do f=${d:-.}/$1
if [ -f "$f" ]; then if [ -x "$f" ]; then r=+; break; fi; r=x; fi; done
IFS=$i; set +f;;
esac
"#;

/// Says `r`, and ends unless it is `+`. In a login shell the word ends the noise on both streams.
const SAY: &str = r#"if [ -n "$l" ]; then printf '%s' "$t" 
fi
printf '%s%s\n' "$t" "$r" >&2
case $r in f) exit 127;; x) exit 126;; esac
"#;

/// Becomes the program.
const BECOME: &str = "if command -v setsid >/dev/null 2>&1; then exec setsid \"$@\"; fi\nexec \"$@\"\n";

/// Starts the program in a session of its own and ends.
const DETACH: &str = r#"[ ! -d "$g" ] && mkdir -p -- "${g%/*}" || exit 124
true >>"$g" || exit 125
if command -v setsid >/dev/null 2>&1; then setsid "$@" </dev/null >>"$g" 2>&1 &
else "$@" </dev/null >>"$g" 2>&1 &
fi
"#;

/// The durable program: its output goes to files below `$b`, its status to a file that is renamed into place, and to
/// standard error for whoever still listens. The directory is made by exactly one: us, or somebody who wants to be sure
/// that we never start.
const DURABLE_CLAIM: &str = r#"mkdir -m 700 -- "$b" || { printf '%sc\n' "$t" >&2; exit 125; }
echo $$ >"$b/pid"
: >"$b/stdout"; : >"$b/stderr"
"#;
const DURABLE_RUN: &str = r#"if [ -n "$n" ]; then exec <"$n"; fi
"$@" >"$b/stdout" 2>"$b/stderr"
s=$?
echo "$s" >"$b/status.new" && mv -f -- "$b/status.new" "$b/status"
echo "$s" >&2
exit 0
"#;

/// The variable that carries `PATH` past a login profile.
const PATH_VARIABLE: &str = "VF_RUNTIME_PATH";

/// Puts the caller's `PATH` back after a login profile, and stops the tracing that one may have turned on.
const RESTORE_PATH: &str = "set +x\nif [ -n \"${VF_RUNTIME_PATH+x}\" ]; then PATH=$VF_RUNTIME_PATH; export PATH; unset \
                            VF_RUNTIME_PATH; fi\n";

/// Gives a program a process group of its own and becomes it. It is there in every distribution that templates are built
/// from.
const SETSID: &str = "/usr/bin/setsid";

/// What a program is started as.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mode<'a> {
    /// The process of the stream.
    Live,
    /// The process of the stream, without anything that tells how its start went.
    Direct,
    /// A server that outlives it, with its output in this file.
    Background { log: &'a str },
    /// A program whose output and status are files below this directory.
    Durable { dir: &'a str, stdin: Option<&'a str> },
}

/// A program that is to be started, and how its beginning is recognised.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) message: StartRequest,
    /// The random word.
    pub(crate) word: String,
    /// Whether the word comes on standard output too.
    pub(crate) on_stdout: bool,
    /// Whether it says how the start went.
    pub(crate) says: bool,
}

/// What kept a program from being started, as asked afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Nothing: the code was its own.
    None,
    /// It is one that [`refused`] tells.
    Program(Verdict),
    /// There is no `setsid`.
    NoSetsid,
}

/// The program that asks why another one could not be started. It is to be run where that one would have been.
pub(crate) fn asking(exec: &Exec) -> Exec {
    let script = format!("{LOOK_UP}[ -x {SETSID} ] || r=s\nprintf %s \"$r\"\n");
    let program = exec.argv.first().cloned().unwrap_or_default();
    Exec {
        argv: vec!["/bin/sh".into(), "-c".into(), script.into(), "sh".into(), program],
        env: exec.env.clone(),
        workdir: exec.workdir.clone(),
        stdin: StdinMode::Null,
    }
}

/// What [`asking`] printed.
pub(crate) fn answered(said: &[u8]) -> Option<Refusal> {
    match said {
        b"+" => Some(Refusal::None),
        b"f" => Some(Refusal::Program(Verdict::NotFound)),
        b"x" => Some(Refusal::Program(Verdict::NotExecutable)),
        b"s" => Some(Refusal::NoSetsid),
        _ => None,
    }
}

impl Launch {
    /// Prepares a program.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for text that is not UTF-8.
    pub(crate) fn new(exec: &Exec, mode: Mode<'_>, login_shell: bool) -> Result<Self> {
        let word = format!("vf-{}:", random_id());
        let mut envs = BTreeMap::new();
        for (name, value) in exec.env.iter() {
            let field = || format!("env.{}", name.to_string_lossy());
            let utf8 = |text: &std::ffi::OsStr| text.to_str().map(str::to_owned).ok_or_else(|| not_utf8(field()));
            envs.insert(utf8(name)?, utf8(value)?);
        }
        if matches!(mode, Mode::Direct) {
            let args = exec.argv.iter().enumerate().map(|(index, arg)| {
                let arg = arg.to_str().ok_or_else(|| not_utf8(format!("argv[{index}]")))?;
                Ok(arg.to_owned())
            });
            let message = StartRequest {
                process: Some(ProcessConfig {
                    cmd: SETSID.to_owned(),
                    args: args.collect::<Result<_>>()?,
                    envs,
                    cwd: Some(path_text(&exec.workdir, "workdir")?.to_owned()),
                }),
                stdin: Some(exec.stdin == StdinMode::Piped),
                tag: Some(word.clone()),
                ..StartRequest::default()
            };
            return Ok(Self {
                message,
                word,
                on_stdout: false,
                says: false,
            });
        }
        let mut script = String::new();
        if login_shell {
            script.push_str(RESTORE_PATH);
            if let Some(path) = envs.get("PATH").cloned() {
                envs.insert(PATH_VARIABLE.to_owned(), path);
            }
        }
        // Positional: the word, and what the mode needs, are taken off before the program's own words.
        script.push_str("t=$1 l=$2 g=$3 b=$3 n=$4; shift 4\n");
        script.push_str(LOOK_UP);
        let (third, fourth) = match mode {
            Mode::Live | Mode::Direct => {
                script.push_str(SAY);
                script.push_str(BECOME);
                ("", "")
            }
            Mode::Background { log } => {
                script.push_str(SAY);
                script.push_str(DETACH);
                (log, "")
            }
            Mode::Durable { dir, stdin } => {
                script.push_str("if [ $r = + ]; then\n");
                script.push_str(DURABLE_CLAIM);
                script.push_str("fi\n");
                script.push_str(SAY);
                script.push_str(DURABLE_RUN);
                (dir, stdin.unwrap_or_default())
            }
        };
        let mut args = if login_shell {
            vec!["-l".to_owned(), "-c".to_owned(), script, "sh".to_owned()]
        } else {
            vec!["-c".to_owned(), script, "sh".to_owned()]
        };
        let login = if login_shell { "1" } else { "" };
        args.extend([word.as_str(), login, third, fourth].map(str::to_owned));
        for (index, arg) in exec.argv.iter().enumerate() {
            let arg = arg.to_str().ok_or_else(|| not_utf8(format!("argv[{index}]")))?;
            args.push(arg.to_owned());
        }
        let shell = if login_shell { "/bin/bash" } else { "/bin/sh" };
        let (cmd, args) = match mode {
            // The group of a durable program is its shell's.
            Mode::Durable { .. } => {
                let mut words = vec![
                    "-c".to_owned(),
                    "if command -v setsid >/dev/null 2>&1; then exec setsid \"$@\"; fi; exec \"$@\"".to_owned(),
                    "sh".to_owned(),
                    shell.to_owned(),
                ];
                words.extend(args);
                ("/bin/sh", words)
            }
            Mode::Live | Mode::Direct | Mode::Background { .. } => (shell, args),
        };
        let message = StartRequest {
            process: Some(ProcessConfig {
                cmd: cmd.to_owned(),
                args,
                envs,
                cwd: Some(path_text(&exec.workdir, "workdir")?.to_owned()),
            }),
            stdin: Some(exec.stdin == StdinMode::Piped),
            ..StartRequest::default()
        };
        Ok(Self {
            message,
            word,
            on_stdout: login_shell,
            says: true,
        })
    }
}

fn not_utf8(field: String) -> Error {
    Error::invalid_argument(field, "this provider takes UTF-8 only")
}

/// A path as text, which is all that the protocol carries.
pub(crate) fn path_text<'a>(path: &'a Path, field: &'static str) -> Result<&'a str> {
    path.to_str().ok_or_else(|| not_utf8(field.to_owned()))
}

/// How far the launcher has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The program runs from here on.
    Runs,
    /// It does not exist.
    NotFound,
    /// It cannot be executed.
    NotExecutable,
    /// Somebody made sure that it is never started.
    Claimed,
}

/// Longest noise of a shell or profile that is looked through.
const MAX_NOISE: usize = 1 << 20;

/// Looks for what the launcher says among what comes before.
#[derive(Debug)]
pub(crate) struct Beginning {
    word: Vec<u8>,
    stderr: Vec<u8>,
    stdout: Vec<u8>,
    wants_stdout: bool,
    verdict: Option<Verdict>,
    stdout_begun: bool,
}

impl Beginning {
    pub(crate) fn of(launch: &Launch) -> Self {
        Self {
            word: launch.word.clone().into_bytes(),
            stderr: Vec::new(),
            stdout: Vec::new(),
            wants_stdout: launch.on_stdout,
            verdict: (!launch.says).then_some(Verdict::Runs),
            stdout_begun: !launch.on_stdout,
        }
    }

    /// Adds standard output.
    pub(crate) fn stdout(&mut self, bytes: &[u8]) {
        self.stdout.extend_from_slice(bytes);
        if !self.stdout_begun
            && let Some(at) = find(&self.stdout, &self.word)
        {
            self.stdout.drain(..at + self.word.len());
            self.stdout_begun = true;
        }
    }

    /// Adds standard error.
    pub(crate) fn stderr(&mut self, bytes: &[u8]) {
        self.stderr.extend_from_slice(bytes);
        if self.verdict.is_some() {
            return;
        }
        let Some(at) = find(&self.stderr, &self.word) else {
            return;
        };
        let said = at + self.word.len();
        let verdict = match self.stderr.get(said..said + 2) {
            Some(b"+\n") => Verdict::Runs,
            Some(b"f\n") => Verdict::NotFound,
            Some(b"x\n") => Verdict::NotExecutable,
            Some(b"c\n") => Verdict::Claimed,
            _ => return,
        };
        self.stderr.drain(..said + 2);
        self.verdict = Some(verdict);
    }

    /// The verdict, once everything before the program is past.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        // A program that is not run prints nothing, so nobody needs to wait for its output to begin.
        self.verdict
            .filter(|verdict| *verdict != Verdict::Runs || self.stdout_begun)
    }

    /// Whether the noise has grown beyond what is looked through.
    pub(crate) fn is_hopeless(&self) -> bool {
        self.verdict().is_none() && self.stderr.len().max(self.stdout.len()) > MAX_NOISE
    }

    /// What the program printed already, on standard output and standard error.
    pub(crate) fn into_rest(self) -> (Vec<u8>, Vec<u8>) {
        (self.stdout, self.stderr)
    }

    /// All that was printed, for the error when nothing began.
    pub(crate) fn noise(&self) -> Vec<u8> {
        let mut noise = if self.wants_stdout {
            self.stdout.clone()
        } else {
            Vec::new()
        };
        noise.extend_from_slice(&self.stderr);
        noise
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// The error for a verdict that is none to go on with.
pub(crate) fn refused(verdict: Verdict, exec: &Exec) -> Option<Error> {
    let program = exec
        .argv
        .first()
        .map(|program| program.to_string_lossy().into_owned())
        .unwrap_or_default();
    match verdict {
        Verdict::Runs => None,
        Verdict::NotFound => Some(Error::new(
            ErrorKind::ProgramNotFound,
            format!("there is no program {program:?} in the sandbox"),
        )),
        Verdict::NotExecutable => Some(Error::new(
            ErrorKind::ProgramNotExecutable,
            format!("{program:?} cannot be executed"),
        )),
        Verdict::Claimed => Some(Error::new(
            ErrorKind::AlreadyExists,
            "the directory of the program could not be made: was it started before?",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exec(argv: &[&str]) -> Exec {
        Exec {
            argv: argv.iter().map(Into::into).collect(),
            env: [("A", "1")].into_iter().collect(),
            workdir: "/".into(),
            stdin: StdinMode::Null,
        }
    }

    /// Runs a launch on this machine as envd would.
    fn run(launch: &Launch) -> std::process::Output {
        let config = launch.message.process.clone().expect("a program");
        std::process::Command::new(&config.cmd)
            .args(&config.args)
            .envs(&config.envs)
            .current_dir(config.cwd.expect("a directory"))
            .stdin(std::process::Stdio::null())
            .output()
            .expect("a shell")
    }

    fn launched(argv: &[&str], login: bool) -> (Option<Verdict>, Vec<u8>, Vec<u8>, Option<i32>) {
        let launch = Launch::new(&exec(argv), Mode::Live, login).expect("text");
        let output = run(&launch);
        let mut beginning = Beginning::of(&launch);
        // Byte by byte: the word may be cut anywhere.
        for byte in output.stdout.chunks(1) {
            beginning.stdout(byte);
        }
        for byte in output.stderr.chunks(1) {
            beginning.stderr(byte);
        }
        let verdict = beginning.verdict();
        let (stdout, stderr) = beginning.into_rest();
        (verdict, stdout, stderr, output.status.code())
    }

    #[test]
    fn arguments_and_bytes_pass_untouched() {
        let awkward = ["printf", "%s\\n", "", "a b", "*", "$HOME", "'\"", "-n", "é\n"];
        for login in [false, true] {
            let (verdict, stdout, stderr, code) = launched(&awkward, login);
            assert_eq!(verdict, Some(Verdict::Runs));
            assert_eq!(stdout, "\na b\n*\n$HOME\n'\"\n-n\né\n\n".as_bytes());
            assert_eq!((stderr, code), (Vec::new(), Some(0)));
        }
        let script = "printf '\\377\\000x'; printf 'e\\376' >&2; exit 7";
        let (_, stdout, stderr, code) = launched(&["sh", "-c", script], false);
        assert_eq!(
            (stdout, stderr, code),
            (b"\xff\0x".to_vec(), b"e\xfe".to_vec(), Some(7))
        );
    }

    #[test]
    fn a_program_that_cannot_run_is_told_from_one_that_exits_with_127() {
        for login in [false, true] {
            assert_eq!(launched(&["no-such-program"], login).0, Some(Verdict::NotFound));
            assert_eq!(launched(&["/no/such/program"], login).0, Some(Verdict::NotFound));
            assert_eq!(launched(&["/etc/passwd"], login).0, Some(Verdict::NotExecutable));
            assert_eq!(launched(&["/etc"], login).0, Some(Verdict::NotExecutable));
            let (verdict, .., code) = launched(&["sh", "-c", "exit 127"], login);
            assert_eq!((verdict, code), (Some(Verdict::Runs), Some(127)));
        }
    }

    #[test]
    fn a_program_leads_its_own_group() {
        let (_, stdout, ..) = launched(&["sh", "-c", "echo $$; ps -o pgid= -p $$"], false);
        let text = String::from_utf8(stdout).expect("text");
        let ids: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(ids.len(), 2, "{text}");
        assert_eq!(ids[0], ids[1]);
    }

    #[test]
    fn a_durable_program_writes_its_files_and_starts_once() {
        let parent = tempfile::tempdir().expect("a directory");
        let dir = parent.path().join("p");
        let dir = dir.to_str().expect("text");
        let input = parent.path().join("in");
        std::fs::write(&input, "fed").expect("written");
        let argv = exec(&["sh", "-c", "cat; echo err >&2; exit 5"]);
        let mode = Mode::Durable {
            dir,
            stdin: input.to_str(),
        };
        let launch = Launch::new(&argv, mode, false).expect("text");
        let output = run(&launch);
        let mut beginning = Beginning::of(&launch);
        beginning.stderr(&output.stderr);
        assert_eq!(beginning.verdict(), Some(Verdict::Runs));
        assert_eq!(beginning.into_rest().1, b"5\n");
        let read = |name: &str| std::fs::read_to_string(format!("{dir}/{name}")).expect(name);
        assert_eq!(
            (read("stdout"), read("stderr"), read("status")),
            ("fed".into(), "err\n".into(), "5\n".into())
        );
        let again = run(&launch);
        let mut beginning = Beginning::of(&launch);
        beginning.stderr(&again.stderr);
        assert_eq!(beginning.verdict(), Some(Verdict::Claimed));
    }
}
