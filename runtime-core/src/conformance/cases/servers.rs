//! Servers in the background, and ports.

use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::capability::Expose;
use crate::command::Command;
use crate::conformance::case::{Capability, Case, case, probe};
use crate::conformance::context::{Context, Pulse, refused, refused_field, sh};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::ErrorKind;
use crate::sandbox::Sandbox;
use crate::view::View;

pub(super) const CASES: &[Case] = &[
    case!("servers/a-log-has-both-outputs", log),
    case!("servers/a-log-is-appended-to", log_appended),
    case!("servers/a-log-may-be-relative-or-absolute", log_paths),
    case!("servers/a-log-that-cannot-be-is-refused", log_refused),
    case!("servers/a-server-outlives-the-call-that-started-it", outlives),
    case!("servers/a-server-dies-with-the-box", dies_with_box),
    case!(
        "servers/a-server-that-ignores-term-dies-with-the-box",
        deaf_dies_with_box
    ),
    case!("servers/a-daemon-dies-with-the-box", daemon_dies)
        .needs(&[Capability::KillsEscaped])
        .gap_untested(),
    case!("servers/a-servers-stdin-is-empty", stdin),
    case!("servers/environment-and-workdir-apply", env_and_workdir),
    case!("servers/what-cannot-start-is-typed", cannot_start),
    case!("servers/a-server-that-ends-is-no-concern-of-the-box", ends),
    case!("servers/twenty-at-once", twenty),
    case!("servers/an-exposed-port-is-reached", expose)
        .needs(&[Capability::Expose])
        .or_else(probe!(expose_refused)),
    case!("servers/a-port-that-cannot-be-exposed-is-refused", expose_some_refused),
    case!("servers/the-published-port-is-the-declared-one", published_port),
    case!("servers/a-url-of-the-host-stays-one", host_url),
];

/// Waits, in the box, until a condition of the shell holds.
async fn until(view: &View, condition: &str) -> Verdict {
    sh(view, format!("until {condition}; do sleep 0.05; done"))
        .await
        .map(|_| ())
}

async fn log(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = r"echo out; echo err >&2; printf '\377\0end'; touch done; sleep 1000";
    sandbox.run_background(["sh", "-c", script], "server.log").await?;
    until(&sandbox, "[ -e done ]").await?;
    ensure_eq!(&sandbox.read("server.log").await?[..], b"out\nerr\n\xff\0end");
    Ok(())
}

async fn log_appended(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("server.log", "before\n").await?;
    for n in 0..3 {
        let script = format!("echo server {n}; touch done-{n}; sleep 1000");
        sandbox.run_background(["sh", "-c", &script], "server.log").await?;
        until(&sandbox, &format!("[ -e done-{n} ]")).await?;
    }
    ensure_eq!(
        sh(&sandbox, "cat server.log").await?,
        "before\nserver 0\nserver 1\nserver 2\n"
    );
    Ok(())
}

async fn log_paths(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.create_dir("sub").await?;
    // Relative to the box's workdir, wherever the server itself runs; missing parents are made.
    let server = |n: i32| Command::shell(format!("echo {n}; touch \"$DONE\"; sleep 1000")).workdir("sub");
    let done = sandbox.workdir().join("done");
    sandbox
        .run_background(server(1).env("DONE", &done), "logs/deep/-one.log")
        .await?;
    until(&sandbox, "[ -e done ]").await?;
    ensure_eq!(&sandbox.read("logs/deep/-one.log").await?[..], b"1\n");
    let absolute = sandbox.workdir().join("logs/two.log");
    let done = sandbox.workdir().join("done-2");
    sandbox.run_background(server(2).env("DONE", &done), &absolute).await?;
    until(&sandbox, "[ -e done-2 ]").await?;
    ensure_eq!(&sandbox.read("logs/two.log").await?[..], b"2\n");
    Ok(())
}

async fn log_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sh(&sandbox, "mkdir dir; touch file").await?;
    for path in ["dir", "file/below"] {
        let started = sandbox.run_background(["touch", "started"], path).await;
        let error = started
            .err()
            .ok_or_else(|| Failure::new(format_args!("{path} is no log")))?;
        ensure!(
            matches!(
                error.kind(),
                ErrorKind::WrongFileType | ErrorKind::AlreadyExists | ErrorKind::NotFound
            ),
            "{error}"
        );
    }
    refused_field(
        sandbox.run_background(["true"], "").await,
        ErrorKind::InvalidArgument,
        "path",
    )?;
    refused(sandbox.stat("started").await, ErrorKind::NotFound)?;
    Ok(())
}

async fn outlives(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let pulse = Pulse::new(&sandbox).await?;
    let script = format!(
        "{}while :; do [ ! -e ask ] || mv ask answer; sleep 0.05; done",
        pulse.hold()
    );
    sandbox.run_background(Command::shell(script), "log").await?;
    for _ in 0..5 {
        sh(&sandbox, "rm -f answer; touch ask").await?;
        until(&sandbox, "[ -e answer ]").await?;
    }
    ensure!(
        !pulse.listen(&sandbox, Duration::from_millis(300)).await?,
        "it still runs"
    );
    Ok(())
}

async fn dies_with_box(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "echo up; (sleep 1000; :) & sh -c 'sleep 1000; :' & wait";
    sandbox.run_background(["sh", "-c", script], "log").await?;
    until(&sandbox, "[ -s log ]").await?;
    sandbox.stop().await?;
    cx.all_gone(Duration::from_secs(10)).await
}

async fn deaf_dies_with_box(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    let script = "trap '' TERM HUP INT; echo up; (while :; do sleep 1; done) & while :; do sleep 1; done";
    sandbox.run_background(["sh", "-c", script], "log").await?;
    until(&sandbox, "[ -s log ]").await?;
    sandbox.stop().await?;
    cx.all_gone(Duration::from_secs(10)).await
}

async fn daemon_dies(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    // Whoever starts it waits for it: until it has left the group, it is killed with the group.
    let daemon = |n: i32| {
        format!(
            "setsid sh -c 'trap \"\" TERM HUP; echo up >daemon-{n}; while :; do sleep 1; done' >/dev/null 2>&1 & \
             until [ -s daemon-{n} ]; do sleep 0.05; done"
        )
    };
    sh(&sandbox, daemon(1)).await?;
    sandbox.run_background(Command::shell(daemon(2)), "log").await?;
    until(&sandbox, "[ -s daemon-2 ]").await?;
    sandbox.stop().await?;
    cx.all_gone(Duration::from_secs(10)).await
}

async fn stdin(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.run_background(["sh", "-c", "wc -c; touch done"], "log").await?;
    until(&sandbox, "[ -e done ]").await?;
    ensure_eq!(sh(&sandbox, "cat log").await?.trim(), "0");
    Ok(())
}

async fn env_and_workdir(cx: Context) -> Verdict {
    let sandbox = cx.builder().env("A", "sandbox").env("B", "sandbox").provision().await?;
    sandbox.create_dir("sub").await?;
    let command = Command::shell("echo \"$A $B\"; touch marker")
        .env("B", "command")
        .workdir("sub");
    sandbox.run_background(command, "log").await?;
    until(&sandbox, "[ -e sub/marker ]").await?;
    ensure_eq!(sh(&sandbox, "cat log").await?, "sandbox command\n");
    Ok(())
}

async fn cannot_start(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("plain", "text").await?;
    refused(
        sandbox.run_background(["no-such-program"], "log").await,
        ErrorKind::ProgramNotFound,
    )?;
    refused(
        sandbox.run_background(["./plain"], "log").await,
        ErrorKind::ProgramNotExecutable,
    )?;
    let elsewhere = Command::new(["true"]).workdir("missing");
    refused_field(
        sandbox.run_background(elsewhere, "log").await,
        ErrorKind::NotFound,
        "workdir",
    )?;
    Ok(())
}

async fn ends(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for n in 0..5 {
        sandbox
            .run_background(["sh", "-c", &format!("touch ended-{n}; exit {n}")], "log")
            .await?;
    }
    until(&sandbox, "[ $(ls ended-* 2>/dev/null | wc -l) -eq 5 ]").await?;
    sandbox.alive().await?;
    ensure_eq!(sh(&sandbox, "echo fine").await?, "fine\n");
    Ok(())
}

async fn twenty(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for n in 0..20 {
        let script = format!("echo {n}; touch up-{n}; sleep 1000");
        sandbox
            .run_background(["sh", "-c", &script], format!("log-{n}"))
            .await?;
    }
    until(&sandbox, "[ $(ls up-* 2>/dev/null | wc -l) -eq 20 ]").await?;
    ensure_eq!(
        sh(&sandbox, "cat log-* | sort -n | tr '\\n' ' '")
            .await?
            .split_whitespace()
            .count(),
        20
    );
    Ok(())
}

/// A port that a server of the box can have.
fn a_port(cx: &Context) -> Result<u16, Failure> {
    let capabilities = cx.capabilities();
    match capabilities.expose {
        Expose::Port(port) => Ok(port),
        // The box may share this host's ports, so that a fixed one may be taken.
        _ if capabilities.local => Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port()),
        _ => Ok(8000),
    }
}

/// A server of the files in `dir`, of what the box has.
async fn http_server(sandbox: &Sandbox, dir: &str, port: u16) -> Result<Command, Failure> {
    let python = ["python3", "-m", "http.server", "--bind", "0.0.0.0", "--directory", dir];
    let busybox = ["busybox", "httpd", "-f", "-h", dir, "-p"];
    for (probe, server, address) in [
        ("command -v python3", &python[..], port.to_string()),
        (
            "busybox --list | grep -qx httpd",
            &busybox[..],
            format!("0.0.0.0:{port}"),
        ),
    ] {
        if sandbox.run(["sh", "-c", probe]).await?.status.success() {
            return Ok(Command::new(server).arg(address));
        }
    }
    Err(Failure::skip("the box has neither python3 nor busybox to serve with"))
}

/// The body of a GET; plain HTTP, one request per connection.
async fn get(url: &str, path: &str) -> Result<Vec<u8>, Failure> {
    let Some(rest) = url.strip_prefix("http://") else {
        return Err(Failure::skip(format_args!("the suite does not speak TLS to {url}")));
    };
    let (authority, base) = rest.split_once('/').unwrap_or((rest, ""));
    // A provider may have its ports below a path.
    let base = format!("/{base}");
    let base = base.trim_end_matches('/');
    let address = match authority.contains(':') {
        true => authority.to_owned(),
        false => format!("{authority}:80"),
    };
    let mut connection = TcpStream::connect(&address).await?;
    let request = format!("GET {base}{path} HTTP/1.0\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).await?;
    let mut response = Vec::new();
    connection.read_to_end(&mut response).await?;
    let end = response.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.ok_or_else(|| Failure::new("no response of HTTP"))?;
    if !response.starts_with(b"HTTP/1") || !response[..end].windows(5).any(|window| window == b" 200 ") {
        return Err(Failure::new(String::from_utf8_lossy(&response[..end])));
    }
    Ok(response[end + 4..].to_vec())
}

async fn expose(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    sandbox.write("served/hello.txt", "hello from the box").await?;
    let port = a_port(&cx)?;
    let server = http_server(&sandbox, "served", port).await?;
    sandbox.run_background(server, "log").await?;
    let url = sandbox.expose(port).await?;
    // A server is reached some time after it was started, and says so to nobody.
    let body = loop {
        match get(&url, "/hello.txt").await {
            Ok(body) => break body,
            Err(failure) if failure.is_skip() => return Err(failure),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    ensure_eq!(&body[..], b"hello from the box");
    ensure_eq!(sandbox.expose(port).await?, url, "asked again");
    Ok(())
}

async fn expose_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    refused(sandbox.expose(8000).await, ErrorKind::Unsupported)?;
    Ok(())
}

async fn expose_some_refused(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    refused_field(sandbox.expose(0).await, ErrorKind::InvalidArgument, "port")?;
    match cx.capabilities().expose {
        Expose::AnyPort => {
            for port in [1, 8000, 65_535] {
                let url = sandbox.expose(port).await?;
                ensure!(url.starts_with("http://") || url.starts_with("https://"), "{url}");
            }
        }
        Expose::Port(only) => {
            refused(sandbox.expose(only ^ 1).await, ErrorKind::Unsupported)?;
        }
        Expose::Nothing => {
            refused(sandbox.expose(8000).await, ErrorKind::Unsupported)?;
        }
    }
    Ok(())
}

async fn published_port(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    match (cx.capabilities().expose, sandbox.published_port()) {
        (Expose::Port(only), published) => ensure_eq!(published, Some(only)),
        (Expose::Nothing, published) => ensure_eq!(published, None),
        (Expose::AnyPort, Some(port)) => drop(sandbox.expose(port).await?),
        (Expose::AnyPort, None) => {}
    }
    Ok(())
}

async fn host_url(cx: Context) -> Verdict {
    let sandbox = cx.sandbox().await?;
    for url in ["http://127.0.0.1:8123/path?query=1", "https://example.com/x"] {
        let seen = sandbox.host_url(url).await?;
        let (scheme, path) = match url.contains("8123") {
            true => ("http://", ":8123/path?query=1"),
            false => ("https://example.com", "/x"),
        };
        ensure!(seen.starts_with(scheme) && seen.ends_with(path), "{url} became {seen}");
    }
    Ok(())
}
