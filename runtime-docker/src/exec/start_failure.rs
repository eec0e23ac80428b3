//! Why a program did not start, in the words of engines. They have no status for it: the text comes as the program's
//! own output, and the exit code is 126 or 127.

use runtime_core::{Error, ErrorKind};

/// The engine's message behind `output`, if it can be one. Only when the program also never had a process is it.
pub(crate) fn recognize(output: &[u8]) -> Option<Error> {
    let start = ["OCI runtime exec failed: ", "Error: "]
        .iter()
        .find_map(|start| output.strip_prefix(start.as_bytes()))?;
    let text = String::from_utf8_lossy(start);
    let text = text.trim_end();
    let about_exec = [
        "unable to start container process",
        "OCI ",
        "exec failed",
        "crun: ",
        "runc: ",
    ];
    if !about_exec.iter().any(|words| text.contains(words)) {
        return None;
    }
    let line = text.lines().next().unwrap_or_default();
    let detail = line
        .split_once("unable to start container process: ")
        .map_or(line, |(_, detail)| detail);
    let detail = [
        ": unknown",
        ": OCI runtime attempted to invoke a command that was not found",
        ": OCI permission denied",
    ]
    .iter()
    .fold(detail, |detail, end| detail.strip_suffix(end).unwrap_or(detail));
    Some(classify(detail))
}

/// The reason behind the whole output of a process that was to become `program`: an OCI runtime says there why the
/// kernel refused, and ends with a code of its own.
pub(crate) fn recognize_refusal(stderr: &[u8], program: &str) -> Option<Error> {
    let text = std::str::from_utf8(stderr).ok()?.strip_suffix('\n')?;
    let (path, reason) = text.strip_prefix("exec ")?.rsplit_once(": ")?;
    let is_it = path == program || (!program.contains('/') && path.rsplit('/').next() == Some(program));
    let kind = match reason {
        _ if !is_it => return None,
        // The program is there: its interpreter is not.
        "no such file or directory" | "permission denied" | "exec format error" | "is a directory" => {
            ErrorKind::ProgramNotExecutable
        }
        "text file busy" | "bad interpreter" | "accessing a corrupted shared library" => {
            ErrorKind::ProgramNotExecutable
        }
        "argument list too long" => ErrorKind::LimitExceeded,
        "resource temporarily unavailable" | "cannot allocate memory" => ErrorKind::ResourceExhausted,
        _ => return None,
    };
    Some(Error::new(kind, format!("{program}: {reason}")))
}

/// Whether Podman says here that it gave up a program's streams. Its monitor went away with input that nobody had read,
/// and a socket that ends so loses what is still on the way to Podman.
pub(crate) fn is_broken_off(stderr: &[u8]) -> bool {
    let text = std::str::from_utf8(stderr)
        .ok()
        .and_then(|text| text.strip_suffix('\n'));
    text.is_some_and(|text| {
        ["Error: read unixpacket ", "Error: write unixpacket "]
            .iter()
            .any(|start| text.starts_with(start))
            && [
                "/attach: read: connection reset by peer",
                "/attach: write: connection reset by peer",
                "/attach: write: broken pipe",
            ]
            .iter()
            .any(|end| text.ends_with(end))
    })
}

/// The kind of a message such as `exec: "x": executable file not found in $PATH`.
pub(crate) fn classify(detail: &str) -> Error {
    let missing = detail.contains("no such file or directory") || detail.contains("not found");
    let no_directory = detail.contains("not a directory");
    if detail.contains("chdir to cwd") || detail.contains("mkdir") && detail.contains("cwd") {
        let kind = match missing {
            true => ErrorKind::NotFound,
            false if no_directory => ErrorKind::WrongFileType,
            false => ErrorKind::PermissionDenied,
        };
        return Error::new(kind, detail.to_owned()).with_field("workdir");
    }
    let kind = if missing || no_directory {
        ErrorKind::ProgramNotFound
    } else if ["permission denied", "exec format error", "is a directory"]
        .iter()
        .any(|words| detail.contains(words))
    {
        ErrorKind::ProgramNotExecutable
    } else if detail.contains("resource temporarily unavailable") || detail.contains("cannot allocate memory") {
        ErrorKind::ResourceExhausted
    } else if detail.contains("container is not running") || detail.contains("cannot exec in a stopped") {
        ErrorKind::SandboxGone
    } else {
        ErrorKind::Other
    };
    Error::new(kind, detail.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_both_engines_are_told_apart() {
        use ErrorKind::{NotFound, ProgramNotExecutable, ProgramNotFound};
        const DOCKER: &str = "OCI runtime exec failed: exec failed: unable to start container process: ";
        const PODMAN: &str = "Error: runc: exec failed: unable to start container process: ";
        for (text, kind, field) in [
            (
                format!("{DOCKER}exec: \"x\": executable file not found in $PATH: unknown\r\n"),
                ProgramNotFound,
                None,
            ),
            (
                format!("{DOCKER}exec: \"/x\": stat /x: no such file or directory: unknown"),
                ProgramNotFound,
                None,
            ),
            (
                format!("{DOCKER}exec: \"/etc\": permission denied: unknown"),
                ProgramNotExecutable,
                None,
            ),
            (
                format!("{DOCKER}chdir to cwd (\"/x\") set in config.json failed: no such file or directory: unknown"),
                NotFound,
                Some("workdir"),
            ),
            (
                format!(
                    "{PODMAN}exec: \"x\": executable file not found in $PATH: OCI runtime attempted to invoke a command \
                     that was not found\nError: read unixpacket"
                ),
                ProgramNotFound,
                None,
            ),
            (
                format!("{PODMAN}exec: \"/x\": permission denied: OCI permission denied\n"),
                ProgramNotExecutable,
                None,
            ),
        ] {
            let error = recognize(text.as_bytes()).expect(&text);
            assert_eq!((error.kind(), error.field()), (kind, field), "{text}");
            assert!(!error.message().contains("OCI"), "{error}");
        }
    }

    #[test]
    fn a_refusal_of_the_kernel_is_recognized_by_the_programs_own_path() {
        let kind = |text: &str, program| recognize_refusal(text.as_bytes(), program).map(|error| error.kind());
        let refused = Some(ErrorKind::ProgramNotExecutable);
        assert_eq!(kind("exec ./script: no such file or directory\n", "./script"), refused);
        assert_eq!(kind("exec /bin/x: exec format error\n", "x"), refused);
        assert_eq!(
            kind("exec /bin/true: argument list too long\n", "true"),
            Some(ErrorKind::LimitExceeded)
        );
        for (text, program) in [
            ("exec ./other: exec format error\n", "./script"),
            ("exec /bin/x: exec format error", "x"),
            ("exec /bin/x: exec format error\nmore\n", "x"),
            ("exec /bin/x: no idea\n", "x"),
        ] {
            assert_eq!(kind(text, program), None, "{text}");
        }
    }

    #[test]
    fn podman_says_that_it_gave_the_streams_up() {
        for text in [
            "Error: read unixpacket @->/proc/self/fd/16/attach: read: connection reset by peer\n",
            "Error: write unixpacket @->/proc/self/fd/9/attach: write: broken pipe\n",
        ] {
            assert!(is_broken_off(text.as_bytes()), "{text}");
        }
        for text in [
            "",
            "Error: read unixpacket\n",
            "x\nError: read unixpacket @->/proc/self/fd/16/attach: read: connection reset by peer\n",
            "Error: read unixpacket @->/proc/self/fd/16/attach: read: connection reset by peer",
        ] {
            assert!(!is_broken_off(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn a_programs_own_words_are_not_the_engines() {
        for text in ["", "Error: file not found", "hello\nOCI runtime exec failed: ", "\u{1}"] {
            assert!(recognize(text.as_bytes()).is_none(), "{text}");
        }
    }
}
