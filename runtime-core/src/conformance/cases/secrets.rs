//! What is secret stays out of logs, errors and `Debug`.

use std::time::Duration;

use crate::command::{Command, Env};
use crate::conformance::case::{Case, case};
use crate::conformance::context::Context;
use crate::conformance::log::Log;
use crate::conformance::verdict::{Failure, Verdict, ensure};
use crate::error::Error;

pub(super) const CASES: &[Case] = &[
    case!("secrets/no-value-of-a-variable-is-logged", logs),
    case!("secrets/no-value-of-a-variable-is-in-an-error", errors),
    case!("secrets/no-value-of-a-variable-is-shown-by-debug", debug),
];

const SECRET: &str = "conformance-secret-7c1d";

fn env() -> Env {
    Env::from_iter([("TOKEN", SECRET), ("OTHER_API_KEY", SECRET)])
}

/// One call of each kind, some of which fail, with secrets in every layer.
async fn every_call(cx: &Context) -> Result<Vec<Error>, Failure> {
    let sandbox = cx.builder().envs(env()).provision().await?;
    let view = sandbox.with_env(env())?;
    let secret = |command: Command| command.env("TOKEN", SECRET).stdin(SECRET);
    let mut errors = Vec::new();
    sandbox.prepare_setup().await?;
    sandbox.write("file", SECRET).await?;
    view.read("file").await?;
    sandbox
        .run(secret(Command::shell("cat; echo \"$TOKEN\"; exit 3")))
        .await?;
    errors.extend(view.run_program(secret(Command::new(["no-such-program"]))).await.err());
    errors.extend(
        sandbox
            .run(secret(Command::new(["true"]).workdir("missing")))
            .await
            .err(),
    );
    errors.extend(
        sandbox
            .run(secret(Command::new(["true"]).env("BAD=", SECRET)))
            .await
            .err(),
    );
    errors.extend(
        sandbox
            .run(secret(Command::new(["true"]).env("BAD", format!("{SECRET}\0"))))
            .await
            .err(),
    );
    let large = format!("{SECRET}{}", "x".repeat(8 << 20));
    errors.extend(
        sandbox
            .run(secret(Command::new(["true"]).env("LARGE", large)))
            .await
            .err(),
    );
    let slow = Command::shell("echo $TOKEN; sleep 1000").timeout(Duration::from_millis(200));
    errors.extend(sandbox.run(secret(slow)).await.err());
    sandbox.run_background(secret(Command::shell("echo up")), "log").await?;
    errors.extend(
        sandbox
            .run_background(secret(Command::new(["no-such-program"])), "log")
            .await
            .err(),
    );
    match sandbox.spawn(secret(Command::new(["cat"]))).await {
        Ok(mut process) => drop(process.kill().await?),
        Err(error) => errors.push(error),
    }
    errors.extend(sandbox.read("missing").await.err());
    sandbox.prepare_execution(Default::default()).await?;
    sandbox.stop().await?;
    errors.extend(sandbox.run(secret(Command::new(["true"]))).await.err());
    errors.extend(cx.builder().env("BAD", format!("{SECRET}\0")).provision().await.err());
    Ok(errors)
}

async fn logs(cx: Context) -> Verdict {
    // On one thread with an executor of its own, so that all of it is seen.
    let log = Log::default();
    let (seen, context) = (log.clone(), cx.clone());
    let thread = std::thread::Builder::new().spawn(move || {
        let _guard = seen.install();
        let executor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        executor.block_on(every_call(&context))?;
        Verdict::Ok(())
    })?;
    tokio::task::spawn_blocking(move || thread.join())
        .await?
        .map_err(|_| Failure::new("the thread panicked"))??;
    let text = log.text();
    for wanted in ["operation=", "sandbox=", "provider=", "bytes=", "outcome="] {
        ensure!(
            text.contains(wanted),
            "the log has no {wanted}, so it says nothing: {text}"
        );
    }
    ensure!(text.contains("conf-"), "the log does not name the box");
    let line = text.lines().find(|line| line.contains(SECRET));
    ensure!(line.is_none(), "a secret was logged: {}", line.unwrap_or_default());
    Ok(())
}

async fn errors(cx: Context) -> Verdict {
    let errors = every_call(&cx).await?;
    ensure!(errors.len() >= 9, "only {} calls failed", errors.len());
    for mut error in errors {
        // What a program printed is the caller's to see.
        error.take_partial_output();
        let mut text = format!("{error} {error:?} {error:#?}");
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text.push_str(&format!(" {cause} {cause:?}"));
            source = cause.source();
        }
        ensure!(!text.contains(SECRET), "a secret in an error: {error}");
    }
    Ok(())
}

async fn debug(cx: Context) -> Verdict {
    let builder = cx.builder().envs(env());
    let mut text = format!("{builder:?}");
    let sandbox = builder.provision().await?;
    let view = sandbox.with_env(env())?;
    let command = Command::new(["cat"]).env("TOKEN", SECRET).stdin(SECRET);
    text.push_str(&format!(
        "{sandbox:?} {sandbox:#?} {view:?} {view:#?} {command:?} {:?}",
        sandbox.info()
    ));
    ensure!(text.contains("TOKEN"), "the names are shown");
    ensure!(!text.contains(SECRET), "a secret is shown: {text}");
    Ok(())
}
