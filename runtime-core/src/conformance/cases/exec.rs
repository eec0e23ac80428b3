//! Running programs to their end: argv, exit status, workdir, what cannot start.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use crate::command::{Command, ExitStatus};
use crate::conformance::case::{Capability, Case, case, probe};
use crate::conformance::context::{Context, each, refused, refused_field, sh, succeeded};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::ErrorKind;
use crate::files::WriteOptions;
use crate::view::View;

pub(super) const CASES: &[Case] = &[
    case!("exec/exit-codes-0-to-255", exit_codes).deadline(180),
    case!("exec/death-by-signal-is-told", death_by_signal)
        .needs(&[Capability::ExitSignals])
        .or_else(probe!(death_by_signal_as_a_code)),
    case!("exec/a-shells-126-and-127-are-results", shell_codes),
    case!("exec/run-program-is-run", run_program),
    case!("exec/argv-arrives-verbatim", argv_verbatim),
    case!("exec/argv-is-never-given-to-a-shell", no_shell),
    case!("exec/argv-non-utf8-arrives", argv_non_utf8)
        .needs(&[Capability::NonUtf8Argv])
        .or_else(probe!(argv_non_utf8_refused)),
    case!("exec/argv-of-ten-thousand-arguments", many_arguments),
    case!("exec/argv-of-a-mebibyte-arrives-or-is-refused", mebibyte_of_argv),
    case!(
        "exec/an-argument-of-a-mebibyte-arrives-or-is-refused",
        mebibyte_argument
    ),
    case!("exec/argv-beyond-every-limit-is-refused", argv_beyond_limits),
    case!("exec/the-declared-limits-of-argv-are-exact", declared_limits),
    case!("exec/empty-argv-is-refused", empty_argv),
    case!("exec/nul-is-refused-by-field", nul_refused),
    case!("exec/a-missing-program-is-typed", missing_program),
    case!("exec/a-program-without-x-bit-is-typed", not_executable),
    case!("exec/a-missing-interpreter-is-typed", missing_interpreter)
        .needs(&[Capability::StartFailures])
        .gap_untested(),
    case!("exec/a-file-of-no-executable-format-is-typed-or-a-script", no_format)
        .needs(&[Capability::StartFailures])
        .gap_untested(),
    case!("exec/a-program-that-was-just-written-starts", just_written).deadline(120),
    case!("exec/workdir-by-default", workdir_default),
    case!("exec/workdir-override-relative-and-absolute", workdir_override),
    case!("exec/workdir-missing-is-typed", workdir_missing),
    case!("exec/program-path-relative-to-workdir", relative_program),
    case!("exec/program-is-found-in-the-given-path", program_in_path),
    case!("exec/a-program-that-kills-its-group-kills-nobody-else", kills_own_group),
    case!("exec/two-hundred-at-once", two_hundred).deadline(180).alone(),
    case!("exec/one-after-another-share-files", share_files),
];

async fn exit_codes(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    each(8, 0..=255, |code: i32| {
        let view = sandbox.view();
        async move {
            let output = view.run(Command::shell(format!("exit {code}"))).await?;
            ensure_eq!(output.status, ExitStatus::exited(code), "exit {code}");
            ensure_eq!(output.success(), code == 0, "success of exit {code}");
            Ok(())
        }
    })
    .await
}

/// Signals that end a program, without core files. Not QUIT, which the shell of busybox ignores.
const FATAL: [(&str, i32); 7] = [
    ("HUP", 1),
    ("INT", 2),
    ("ABRT", 6),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("TERM", 15),
];

async fn death_by_signal(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for (name, number) in FATAL {
        let script = format!("ulimit -c 0; kill -{name} $$; sleep 10");
        let output = sandbox.run(Command::shell(script)).await?;
        ensure_eq!(output.status, ExitStatus::signaled(number), "kill -{name}");
        ensure!(!output.success(), "death by {name} is no success");
    }
    // A shell that outlives its child folds the signal into its own code, and that is a code.
    let output = sandbox.run(Command::shell("sh -c 'kill -TERM $$'; exit $?")).await?;
    ensure_eq!(output.status, ExitStatus::exited(143));
    Ok(())
}

async fn death_by_signal_as_a_code(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for (name, number) in FATAL {
        let script = format!("ulimit -c 0; kill -{name} $$; sleep 10");
        let output = sandbox.run(Command::shell(script)).await?;
        ensure_eq!(output.status.shell_code(), 128 + number, "kill -{name}");
    }
    Ok(())
}

async fn shell_codes(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for (script, code) in [
        ("exit 126", 126),
        ("exit 127", 127),
        ("no-such-program-at-all", 127),
        ("exit 128", 128),
        ("exit 255", 255),
    ] {
        let output = sandbox.run(Command::shell(script)).await?;
        ensure_eq!(output.code(), Some(code), "{script}");
    }
    Ok(())
}

async fn run_program(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("echo x >>runs; cat; echo err >&2; exit 7").stdin("in");
    let output = sandbox.run_program(command).await?;
    ensure_eq!(output.code(), Some(7));
    ensure_eq!(&output.stdout.bytes[..], b"in");
    ensure_eq!(&output.stderr.bytes[..], b"err\n");
    ensure_eq!(&sandbox.read("runs").await?[..], b"x\n", "it ran once");
    Ok(())
}

/// Prints its arguments, each followed by NUL.
const ECHO_ARGS: &str = r#"for argument in "$@"; do printf '%s\0' "$argument"; done"#;

async fn echoed(view: &View, arguments: Vec<OsString>) -> Verdict {
    let want: Vec<u8> = (arguments.iter())
        .flat_map(|argument| argument.as_encoded_bytes().iter().copied().chain([0]))
        .collect();
    let command = Command::shell(ECHO_ARGS).arg("sh").args(arguments);
    let output = view.run(command).await?;
    succeeded(&output, "echo of arguments")?;
    ensure_eq!(&output.stdout.bytes[..], &want[..], "arguments");
    Ok(())
}

async fn argv_verbatim(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let arguments = [
        "plain",
        "",
        " ",
        "two words",
        "'single'",
        "\"double\"",
        "`backtick`",
        "$HOME ${HOME} $(id) $$",
        "back\\slash\\n",
        "new\nline\n",
        "\ttab\r",
        "-n",
        "--",
        "--help",
        "-",
        "*",
        "?[a-z]{a,b}",
        "~",
        "!history",
        "#comment",
        ";&|<>()",
        "%s%d%n",
        "a=b",
        "größe 東京 🦀 \u{202e}",
        "\u{1}\u{1b}[31m\u{7f}",
        "",
    ];
    echoed(&sandbox, arguments.map(OsString::from).to_vec()).await
}

async fn no_shell(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let output = sandbox
        .run(["echo", "$HOME; touch made-by-a-shell", "&&", "exit", "3"])
        .await?;
    ensure_eq!(&output.stdout.bytes[..], b"$HOME; touch made-by-a-shell && exit 3\n");
    refused(sandbox.stat("made-by-a-shell").await, ErrorKind::NotFound)?;
    // A program's name is a name, not a line for a shell.
    refused(sandbox.run(["echo hello"]).await, ErrorKind::ProgramNotFound)?;
    Ok(())
}

async fn argv_non_utf8(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let every_byte = (1..=255).collect();
    let arguments = [vec![0xff, 0xfe], b"caf\xe9".to_vec(), every_byte].map(OsString::from_vec);
    echoed(&sandbox, arguments.to_vec()).await
}

async fn argv_non_utf8_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::new(["echo", "x"]).arg(OsString::from_vec(vec![0xff]));
    refused_field(sandbox.run(command).await, ErrorKind::InvalidArgument, "argv[2]")?;
    Ok(())
}

async fn many_arguments(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("echo $#; shift 9999; echo $1").arg("sh");
    let output = sandbox.run(command.args((1..=10_000).map(|n| n.to_string()))).await?;
    succeeded(&output, "ten thousand arguments")?;
    ensure_eq!(&output.stdout.bytes[..], b"10000\n10000\n");
    Ok(())
}

/// Either the program got all of it, or the call was refused for `argv`, before anything ran.
async fn arrives_or_is_refused(view: &View, arguments: Vec<String>) -> Verdict {
    let count = arguments.len();
    let bytes: usize = arguments.iter().map(String::len).sum();
    let script = "echo ran >ran; echo $#; printf %s \"$@\" | wc -c";
    let command = Command::shell(script).arg("sh").args(arguments);
    match view.run(command).await {
        Ok(output) => {
            succeeded(&output, "count of arguments")?;
            let counted: Vec<String> = output.stdout_lossy().split_whitespace().map(str::to_owned).collect();
            ensure_eq!(counted, [count.to_string(), bytes.to_string()], "count and bytes");
            Ok(())
        }
        Err(error) => {
            ensure_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            let field = error.field().unwrap_or("");
            ensure!(
                field.starts_with("argv"),
                "the error names {field:?}, not argv: {error}"
            );
            refused(view.stat("ran").await, ErrorKind::NotFound)?;
            Ok(())
        }
    }
}

async fn mebibyte_of_argv(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    arrives_or_is_refused(&sandbox, vec!["x".repeat(64 << 10); 16]).await
}

async fn mebibyte_argument(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    arrives_or_is_refused(&sandbox, vec!["x".repeat(1 << 20)]).await
}

async fn argv_beyond_limits(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::new(["true"]).args(vec!["x".repeat(100_000); 100]);
    let error = refused(sandbox.run(command).await, ErrorKind::InvalidArgument)?;
    let field = error.field().unwrap_or("");
    ensure!(
        field.starts_with("argv"),
        "the error names {field:?}, not argv: {error}"
    );
    sh(&sandbox, "true").await?;
    Ok(())
}

async fn declared_limits(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let capabilities = cx.capabilities();
    let count = |argument: String| Command::shell("printf %s \"$1\" | wc -c").arg("sh").arg(argument);
    if let Some(limit) = capabilities.max_argument_bytes {
        let limit = usize::try_from(limit)?;
        let output = sandbox.run(count("x".repeat(limit))).await?;
        ensure_eq!(output.stdout_lossy().trim(), limit.to_string(), "the largest argument");
        let too_large = sandbox.run(count("x".repeat(limit + 1))).await;
        refused_field(too_large, ErrorKind::InvalidArgument, "argv[4]")?;
        // A variable is its name, `=` and its value.
        let variable = |bytes: usize| Command::shell("printf %s \"$LARGE\" | wc -c").env("LARGE", "x".repeat(bytes));
        let output = sandbox.run(variable(limit - 6)).await?;
        ensure_eq!(
            output.stdout_lossy().trim(),
            (limit - 6).to_string(),
            "the largest variable"
        );
        let too_large = sandbox.run(variable(limit - 5)).await;
        refused_field(too_large, ErrorKind::InvalidArgument, "env.LARGE")?;
    }
    if let Some(limit) = capabilities.max_argv_bytes {
        let largest = capabilities.max_argument_bytes.unwrap_or(limit).min(limit);
        let pieces = usize::try_from(limit / largest.max(1) + 1)?;
        let too_large = Command::new(["true"]).args(vec!["x".repeat(usize::try_from(largest)?); pieces]);
        refused_field(sandbox.run(too_large).await, ErrorKind::InvalidArgument, "argv")?;
    }
    Ok(())
}

async fn empty_argv(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let nothing = Command::new(Vec::<String>::new());
    refused_field(sandbox.run(nothing.clone()).await, ErrorKind::InvalidArgument, "argv")?;
    refused_field(sandbox.run([""]).await, ErrorKind::InvalidArgument, "argv[0]")?;
    refused_field(
        sandbox.run_program(nothing.clone()).await,
        ErrorKind::InvalidArgument,
        "argv",
    )?;
    refused_field(
        sandbox.run_background(nothing, "log").await,
        ErrorKind::InvalidArgument,
        "argv",
    )?;
    Ok(())
}

async fn nul_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let run = |command: Command| sandbox.run(command);
    let kind = ErrorKind::InvalidArgument;
    refused_field(run(Command::new(["echo", "a", "b\0c"])).await, kind, "argv[2]")?;
    refused_field(run(Command::new(["tr\0ue"])).await, kind, "argv[0]")?;
    refused_field(run(Command::new(["true"]).env("A\0", "x")).await, kind, "env.A\\0")?;
    refused_field(run(Command::new(["true"]).env("A", "x\0")).await, kind, "env.A")?;
    refused_field(run(Command::new(["true"]).workdir("a\0b")).await, kind, "workdir")?;
    refused_field(sandbox.read("a\0b").await, kind, "path")?;
    refused_field(sandbox.write("a\0b", "x").await, kind, "path")?;
    refused_field(sandbox.run_background(["true"], "a\0b").await, kind, "path")?;
    Ok(())
}

async fn missing_program(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for program in [
        "no-such-program",
        "/no/such/program",
        "./no-such-program",
        "/dev/null/program",
    ] {
        let error = refused(sandbox.run([program]).await, ErrorKind::ProgramNotFound)?;
        ensure!(
            error.sandbox() == Some(sandbox.name()),
            "the error names its sandbox: {error}"
        );
        ensure!(!error.is_retryable(), "trying again does not help: {error}");
    }
    refused(
        sandbox.run_program(["no-such-program"]).await,
        ErrorKind::ProgramNotFound,
    )?;
    Ok(())
}

async fn not_executable(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox
        .write_with("plain", "#!/bin/sh\n", WriteOptions::mode(0o644))
        .await?;
    sandbox.create_dir("directory").await?;
    for program in ["./plain", "./directory", "/"] {
        refused(sandbox.run([program]).await, ErrorKind::ProgramNotExecutable)?;
    }
    Ok(())
}

async fn missing_interpreter(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "#!/no/such/interpreter\n";
    sandbox.write_with("script", script, WriteOptions::mode(0o755)).await?;
    refused(sandbox.run(["./script"]).await, ErrorKind::ProgramNotExecutable)?;
    Ok(())
}

async fn no_format(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox
        .write_with("garbage", "\u{7f}ELF is not all of it", WriteOptions::mode(0o755))
        .await?;
    refused(sandbox.run(["./garbage"]).await, ErrorKind::ProgramNotExecutable)?;
    // `execvp` gives a text without `#!` to a shell; `execve` does not. Both are told apart from a missing program.
    sandbox
        .write_with("text", "exit 5\n", WriteOptions::mode(0o755))
        .await?;
    match sandbox.run(["./text"]).await {
        Ok(output) => ensure_eq!(output.code(), Some(5)),
        Err(error) => ensure_eq!(error.kind(), ErrorKind::ProgramNotExecutable, "{error}"),
    }
    Ok(())
}

async fn just_written(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    each(8, 0..50, |n: i32| {
        let view = sandbox.view();
        async move {
            let program = format!("./program-{n}");
            let script = format!("#!/bin/sh\nexit {n}\n");
            view.write_with(&program, script, WriteOptions::mode(0o700)).await?;
            let output = view.run([&program]).await?;
            ensure_eq!(output.code(), Some(n), "{program}");
            Ok(())
        }
    })
    .await
}

async fn workdir_default(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let workdir = sandbox.workdir();
    ensure!(workdir.is_absolute(), "{} is not absolute", workdir.display());
    // The path may have symbolic links in it, so files are compared rather than names.
    sh(&sandbox, "echo here >marker").await?;
    let read = sandbox.read(workdir.join("marker")).await?;
    ensure_eq!(&read[..], b"here\n");
    ensure_eq!(sh(&sandbox, "ls -A").await?, "marker\n", "a new workdir is empty");
    Ok(())
}

async fn workdir_override(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.create_dir("sub dir/deeper").await?;
    let pwd = Command::shell("echo here >marker");
    succeeded(&sandbox.run(pwd.clone().workdir("sub dir/deeper")).await?, "relative")?;
    ensure_eq!(&sandbox.read("sub dir/deeper/marker").await?[..], b"here\n");
    let absolute = sandbox.workdir().join("sub dir");
    succeeded(&sandbox.run(pwd.workdir(absolute)).await?, "absolute")?;
    ensure_eq!(&sandbox.read("sub dir/marker").await?[..], b"here\n");
    let output = sandbox.run(Command::new(["pwd"]).workdir("/")).await?;
    ensure_eq!(&output.stdout.bytes[..], b"/\n");
    // The override is for one command.
    ensure_eq!(sh(&sandbox, "ls -A").await?, "sub dir\n");
    Ok(())
}

async fn workdir_missing(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = |dir: &str| Command::new(["true"]).workdir(dir);
    refused_field(sandbox.run(command("missing")).await, ErrorKind::NotFound, "workdir")?;
    refused_field(
        sandbox.run(command("/no/such/dir")).await,
        ErrorKind::NotFound,
        "workdir",
    )?;
    refused_field(sandbox.run(command("")).await, ErrorKind::InvalidArgument, "workdir")?;
    Ok(())
}

async fn relative_program(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "#!/bin/sh\necho \"$0 $1\"\n";
    sandbox
        .write_with("bin/tool", script, WriteOptions::mode(0o755))
        .await?;
    let output = sandbox.run(["bin/tool", "x"]).await?;
    succeeded(&output, "bin/tool")?;
    ensure!(output.stdout_lossy().ends_with("bin/tool x\n"), "{:?}", output.stdout);
    let output = sandbox.run(Command::new(["./tool", "y"]).workdir("bin")).await?;
    ensure!(output.stdout_lossy().ends_with("/tool y\n"), "{:?}", output.stdout);
    // Relative to where the command runs, not to the box's workdir.
    let elsewhere = Command::new(["bin/tool"]).workdir("bin");
    refused(sandbox.run(elsewhere).await, ErrorKind::ProgramNotFound)?;
    Ok(())
}

async fn program_in_path(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "#!/bin/sh\necho mine\n";
    sandbox
        .write_with("tools/sandbox-tool", script, WriteOptions::mode(0o755))
        .await?;
    refused(sandbox.run(["sandbox-tool"]).await, ErrorKind::ProgramNotFound)?;
    let path = format!("{}:/usr/bin:/bin", sandbox.workdir().join("tools").display());
    let output = sandbox.run(Command::new(["sandbox-tool"]).env("PATH", path)).await?;
    ensure_eq!(&output.stdout.bytes[..], b"mine\n");
    let nowhere = Command::new(["sh", "-c", "true"]).env("PATH", "/no/such/dir");
    refused(sandbox.run(nowhere).await, ErrorKind::ProgramNotFound)?;
    Ok(())
}

async fn kills_own_group(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let view = sandbox.view();
    let other = tokio::spawn(async move { view.run(Command::shell("echo up >up; sleep 2; exit 9")).await });
    sh(&sandbox, "until [ -e up ]; do sleep 0.05; done").await?;
    let output = sandbox.run(Command::shell("kill -TERM 0; sleep 10")).await?;
    ensure!(!output.success(), "it killed itself: {output:?}");
    let other = other.await??;
    ensure_eq!(other.code(), Some(9), "the other one is untouched");
    sh(&sandbox, "true").await?;
    Ok(())
}

async fn two_hundred(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    each(200, 0..200, |n: i32| {
        let view = sandbox.view();
        async move {
            let script = format!("echo out-{n}; echo err-{n} >&2; cat >in-{n}; exit {}", n % 256);
            let output = view.run(Command::shell(script).stdin(format!("in-{n}"))).await?;
            ensure_eq!(output.code(), Some(n % 256));
            ensure_eq!(output.stdout_lossy(), format!("out-{n}\n"));
            ensure_eq!(output.stderr_lossy(), format!("err-{n}\n"));
            Ok(())
        }
    })
    .await?;
    let count = sh(&sandbox, "cat in-* | wc -c").await?;
    let want: usize = (0..200).map(|n| format!("in-{n}").len()).sum();
    ensure_eq!(count.trim(), want.to_string());
    Ok(())
}

async fn share_files(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for n in 0..10 {
        sh(&sandbox, format!("echo {n} >>log")).await?;
    }
    let log = sh(&sandbox, "cat log").await?;
    let want: String = (0..10).map(|n| format!("{n}\n")).collect();
    ensure_eq!(log, want);
    let other = cx.sandbox().await?;
    if other.workdir() == sandbox.workdir() && !cx.capabilities().private_filesystem {
        return Err(Failure::new("two boxes share a workdir"));
    }
    ensure_eq!(sh(&other, "ls -A").await?, "", "another box has its own files");
    Ok(())
}
