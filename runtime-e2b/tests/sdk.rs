//! The official Python client against the emulator, and the same operations through this crate.
#![cfg(all(feature = "emulator", target_os = "linux"))]

mod common;
#[path = "common/python.rs"]
mod python;

use std::process::Stdio;
use std::time::Duration;

use common::Provider;
use runtime_core::{Command, Sandbox, WriteOptions};
use serde_json::{Value, json};

/// What the script found, after it passed.
async fn conversation(provider: &Provider) -> Option<Value> {
    let python = python::python()?;
    provider.emulator.fail_image("bad-image", "no such image");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk/conversation.py");
    let output = tokio::process::Command::new(python)
        .arg(script)
        .envs(provider.emulator.variables())
        .env_remove("E2B_DEBUG")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(300), output)
        .await
        .expect("it ends")
        .expect("python runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let checks = said.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(checks >= 60, "only {checks} checks were made");
    let results = said
        .lines()
        .find_map(|line| line.strip_prefix("RESULTS "))
        .expect("results");
    Some(serde_json::from_str(results).expect("JSON"))
}

async fn text(sandbox: &Sandbox, command: Command) -> String {
    String::from_utf8(sandbox.run(command).await.expect("ran").stdout.bytes.to_vec()).expect("text")
}

/// The same operations as the script's, through this crate.
async fn ours(sandbox: &Sandbox) -> Value {
    let sh = |script: &str| Command::new(["sh", "-c", script]);
    let two = sandbox.run(sh("echo out; echo err >&2")).await.expect("ran");
    let root = "/root/sdk";
    sandbox
        .write(format!("{root}/deep/down/a b.txt"), "content")
        .await
        .expect("written");
    let every: Vec<u8> = (0..=255).cycle().take(256 * 40).collect();
    sandbox.write(format!("{root}/bytes"), every).await.expect("written");
    let bytes = sandbox.read(format!("{root}/bytes")).await.expect("read");
    sandbox.create_dir(format!("{root}/dir/sub")).await.expect("made");
    let names: Vec<String> = sandbox
        .list(root)
        .await
        .expect("listed")
        .into_iter()
        .map(|entry| entry.name.into_string().expect("text"))
        .collect();
    sandbox
        .write_with(format!("{root}/moved"), "", WriteOptions::mode(0o751))
        .await
        .expect("written");
    sandbox
        .run(["ln", "-s", "/root/sdk/moved", "/root/sdk/link"])
        .await
        .expect("linked");
    let link = sandbox.stat(format!("{root}/link")).await.expect("facts");
    let killed = sandbox
        .spawn(["sleep", "30"])
        .await
        .expect("started")
        .kill()
        .await
        .expect("killed");
    let hex: String = bytes.iter().take(32).map(|byte| format!("{byte:02x}")).collect();
    json!({
        "two streams": [two.stdout_lossy(), two.stderr_lossy(), two.code()],
        "exit 7": sandbox.run(sh("exit 7")).await.expect("ran").code(),
        "variable": text(sandbox, sh("printf %s \"$WORD\"").env("WORD", "a b*é")).await,
        "cwd": text(sandbox, sh("pwd").workdir("/usr")).await,
        "big": sandbox.run(sh("head -c 300000 /dev/zero | tr '\\0' x")).await.expect("ran").stdout.bytes.len(),
        "unicode": text(sandbox, sh("printf 'é€😀'")).await,
        // The official client knows no signals.
        "killed": if killed.signal() == Some(9) { -1 } else { 0 },
        "stdin": text(sandbox, sh("cat; echo end").stdin("to cat\n")).await,
        "text": String::from_utf8_lossy(&sandbox.read(format!("{root}/deep/down/a b.txt")).await.expect("read")),
        "bytes": hex,
        "names": names,
        "size": sandbox.stat(format!("{root}/deep/down/a b.txt")).await.expect("facts").size,
        "link": link.link_target.expect("a link"),
        "mode": sandbox.stat(format!("{root}/moved")).await.expect("facts").mode,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_client_is_content_and_both_clients_see_the_same() {
    let Some(provider) = Provider::start() else { return };
    let Some(theirs) = conversation(&provider).await else {
        return;
    };
    assert!(provider.emulator.boxes().is_empty(), "it left boxes behind");
    let sandbox = provider.sandbox().await;
    let ours = ours(&sandbox).await;
    sandbox.stop().await.expect("stopped");
    let theirs = theirs.as_object().expect("an object");
    for (what, value) in theirs {
        assert_eq!(&ours[what], value, "{what}");
    }
    assert_eq!(theirs.len(), ours.as_object().expect("an object").len());
}
