//! Environment variables: values, layers, views, and what is inherited.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use crate::command::{Command, Env};
use crate::conformance::case::{Capability, Case, case, probe};
use crate::conformance::context::{Context, refused_field, sh, succeeded};
use crate::conformance::harness::{HOST_API_KEY, HOST_VARIABLE};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::ErrorKind;
use crate::view::View;

pub(super) const CASES: &[Case] = &[
    case!("env/values-arrive-verbatim", values),
    case!("env/non-utf8-values-arrive", non_utf8)
        .needs(&[Capability::NonUtf8Argv])
        .or_else(probe!(non_utf8_refused)),
    case!("env/a-thousand-variables", thousand),
    case!("env/a-commands-layer-wins-over-the-sandboxes", layers),
    case!("env/a-commands-layer-is-for-that-command", one_command),
    case!("env/views-see-their-own-variables-only", views),
    case!("env/path-is-exactly-what-was-set", path_exact),
    case!("env/bad-names-and-values-are-refused-by-field", refused_names),
    case!("env/a-bad-variable-of-a-sandbox-creates-nothing", refused_sandbox),
    case!("env/a-variable-too-large-is-refused-or-arrives", too_large),
    case!("env/api-keys-of-the-host-are-never-seen", host_keys),
    case!("env/other-variables-of-the-host-are-inherited", host_inherited)
        .needs(&[Capability::InheritsHostEnv])
        .or_else(probe!(host_hidden)),
];

/// The value of one variable in the box, byte by byte; `None` if it is not set.
async fn value_of(view: &View, name: &str) -> Result<Option<Vec<u8>>, Failure> {
    let script = format!("if [ -n \"${{{name}+set}}\" ]; then printf =%s \"${name}\"; fi");
    let output = view.run(Command::shell(script)).await?;
    succeeded(&output, name)?;
    Ok(output.stdout.bytes.strip_prefix(b"=").map(<[u8]>::to_vec))
}

async fn values(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let values = [
        ("EQUALS", "a=b=c"),
        ("LINES", "one\ntwo\n"),
        ("EMPTY", ""),
        ("SPACES", "  a  b  "),
        ("QUOTES", "'\"`$HOME\\"),
        ("UNICODE", "größe 東京 🦀"),
        ("CONTROL", "\u{1}\t\r\u{1b}"),
        ("_lower_1", "x"),
    ];
    let view = sandbox.with_env(values.into_iter().collect())?;
    for (name, value) in values {
        let seen = value_of(&view, name).await?;
        ensure_eq!(seen.as_deref(), Some(value.as_bytes()), "{name} of the sandbox");
        let script = format!("printf =%s \"${name}\"");
        let output = sandbox.run(Command::shell(script).env(name, value)).await?;
        ensure_eq!(
            &output.stdout.bytes[..],
            format!("={value}").as_bytes(),
            "{name} of the command"
        );
    }
    Ok(())
}

async fn non_utf8(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let bytes: Vec<u8> = (1..=255).collect();
    let command = Command::shell("printf %s \"$RAW\"").env("RAW", OsString::from_vec(bytes.clone()));
    let output = sandbox.run(command).await?;
    ensure_eq!(&output.stdout.bytes[..], &bytes[..]);
    Ok(())
}

async fn non_utf8_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::new(["true"]).env("RAW", OsString::from_vec(vec![0xff]));
    refused_field(sandbox.run(command).await, ErrorKind::InvalidArgument, "env.RAW")?;
    Ok(())
}

async fn thousand(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let env: Env = (0..1000).map(|n| (format!("MANY_{n}"), format!("value {n}"))).collect();
    let view = sandbox.with_env(env)?;
    let count = sh(&view, "env | grep -c '^MANY_[0-9]*=value [0-9]*$'").await?;
    ensure_eq!(count, "1000\n");
    ensure_eq!(value_of(&view, "MANY_999").await?.as_deref(), Some(&b"value 999"[..]));
    Ok(())
}

async fn layers(cx: Context) -> Verdict {
    let sandbox = cx.builder().env("A", "sandbox").env("B", "sandbox").provision().await?;
    let print = Command::shell("echo \"$A $B $C\"");
    let output = sandbox.run(print.clone()).await?;
    ensure_eq!(output.stdout_lossy(), "sandbox sandbox \n");
    let output = sandbox.run(print.env("B", "command").env("C", "command")).await?;
    ensure_eq!(output.stdout_lossy(), "sandbox command command\n");
    // An empty value is a value.
    let output = sandbox
        .run(Command::shell("echo \"[${A-unset}]\"").env("A", ""))
        .await?;
    ensure_eq!(output.stdout_lossy(), "[]\n");
    Ok(())
}

async fn one_command(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let set = Command::shell("echo \"$ONCE\"").env("ONCE", "here");
    ensure_eq!(sandbox.run(set).await?.stdout_lossy(), "here\n");
    ensure_eq!(value_of(&sandbox, "ONCE").await?, None);
    Ok(())
}

async fn views(cx: Context) -> Verdict {
    let sandbox = cx
        .builder()
        .env("OWNER", "owner")
        .env("BOTH", "owner")
        .provision()
        .await?;
    let one = sandbox.with_env(Env::from_iter([("ONE", "1"), ("BOTH", "one")]))?;
    let two = sandbox.with_env(Env::from_iter([("TWO", "2")]))?;
    let nested = one.with_env(Env::from_iter([("NESTED", "n")]))?;
    let print = "echo ${OWNER-} ${BOTH-} ${ONE-} ${TWO-} ${NESTED-}";
    ensure_eq!(sh(&sandbox, print).await?, "owner owner\n", "the owner");
    ensure_eq!(sh(&one, print).await?, "one 1\n", "a view");
    ensure_eq!(sh(&two, print).await?, "2\n", "another view");
    ensure_eq!(sh(&nested, print).await?, "n\n", "a view of a view");
    // The box is the same.
    sh(&one, "echo shared >file").await?;
    ensure_eq!(&two.read("file").await?[..], b"shared\n");
    ensure_eq!(one.name(), sandbox.name());
    ensure_eq!(one.id(), sandbox.id());
    Ok(())
}

async fn path_exact(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let path = format!("{}:/usr/bin:/bin:/sbin", sandbox.workdir().display());
    let view = sandbox.with_env(Env::from_iter([("PATH", path.as_str())]))?;
    ensure_eq!(value_of(&view, "PATH").await?.as_deref(), Some(path.as_bytes()));
    let unset = value_of(&sandbox, "PATH").await?;
    ensure!(
        unset.is_some_and(|path| !path.is_empty()),
        "without one of ours, PATH is the box's own"
    );
    Ok(())
}

async fn refused_names(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for (name, value, field) in [
        ("", "x", "env."),
        ("A=B", "x", "env.A=B"),
        ("NUL\0", "x", "env.NUL\\0"),
        ("NAME", "conformance-secret\0", "env.NAME"),
    ] {
        let command = Command::new(["true"]).env(name, value);
        let error = refused_field(sandbox.run(command).await, ErrorKind::InvalidArgument, field)?;
        ensure!(
            !format!("{error} {error:?}").contains("conformance-secret"),
            "a value in an error"
        );
        let view = sandbox.with_env(Env::from_iter([(name, value)]));
        refused_field(view.map(|_| ()), ErrorKind::InvalidArgument, field)?;
    }
    Ok(())
}

async fn refused_sandbox(cx: Context) -> Verdict {
    let builder = cx.builder().env("A=B", "x");
    refused_field(
        builder.provision().await.map(|_| ()),
        ErrorKind::InvalidArgument,
        "env.A=B",
    )?;
    let builder = cx.builder().env("A", "conformance-secret\0");
    let error = refused_field(
        builder.provision().await.map(|_| ()),
        ErrorKind::InvalidArgument,
        "env.A",
    )?;
    ensure!(
        !format!("{error} {error:?}").contains("conformance-secret"),
        "a value in an error"
    );
    Ok(())
}

async fn too_large(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("printf %s \"$LARGE\" | wc -c").env("LARGE", "x".repeat(1 << 20));
    match sandbox.run(command).await {
        Ok(output) => ensure_eq!(output.stdout_lossy().trim(), (1 << 20).to_string()),
        Err(error) => {
            ensure_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            let field = error.field().unwrap_or("");
            ensure!(
                matches!(field, "env.LARGE" | "argv"),
                "the error names {field:?}: {error}"
            );
        }
    }
    Ok(())
}

fn on_this_host(variable: (&str, &str)) -> Verdict {
    match std::env::var(variable.0) {
        Ok(value) if value == variable.1 => Ok(()),
        _ => Err(Failure::skip(format_args!("{} is not set on the host", variable.0))),
    }
}

async fn host_keys(cx: Context) -> Verdict {
    on_this_host(HOST_API_KEY)?;
    let sandbox = cx.sandbox().await?;
    let seen = sh(&sandbox, "env").await?;
    ensure!(!seen.contains(HOST_API_KEY.1), "an API key of the host is in the box");
    // What a caller passes on purpose is passed.
    let command = Command::shell(format!("echo \"${}\"", HOST_API_KEY.0)).env(HOST_API_KEY.0, "on purpose");
    ensure_eq!(sandbox.run(command).await?.stdout_lossy(), "on purpose\n");
    Ok(())
}

async fn host_inherited(cx: Context) -> Verdict {
    on_this_host(HOST_VARIABLE)?;
    let sandbox = cx.sandbox().await?;
    let seen = value_of(&sandbox, HOST_VARIABLE.0).await?;
    ensure_eq!(seen.as_deref(), Some(HOST_VARIABLE.1.as_bytes()));
    let command = Command::shell(format!("echo \"${}\"", HOST_VARIABLE.0)).env(HOST_VARIABLE.0, "over");
    ensure_eq!(sandbox.run(command).await?.stdout_lossy(), "over\n");
    Ok(())
}

async fn host_hidden(cx: Context) -> Verdict {
    on_this_host(HOST_VARIABLE)?;
    let sandbox = cx.sandbox().await?;
    ensure_eq!(value_of(&sandbox, HOST_VARIABLE.0).await?, None);
    Ok(())
}
