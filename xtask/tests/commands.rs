//! The other commands of the front door, as far as they are quick.

use std::path::Path;
use std::process::{Command, Output};

fn xtask(args: &[&str]) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.current_dir(root).args(args).output().expect("xtask runs")
}

fn told(output: &Output) -> (Option<i32>, String) {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    (output.status.code(), String::from_utf8(text).expect("text"))
}

#[test]
fn a_wrong_command_line_exits_with_2_and_help_with_0() {
    for args in [
        &[][..],
        &["nonesuch"],
        &["providers", "--format", "yaml"],
        &["images", "--engine", "lxc"],
    ] {
        assert_eq!(xtask(args).status.code(), Some(2), "{args:?}");
    }
    let (code, text) = told(&xtask(&["--help"]));
    assert_eq!(code, Some(0));
    for command in [
        "run",
        "test",
        "ci",
        "images",
        "providers",
        "reap",
        #[cfg(feature = "graph")]
        "graph",
        #[cfg(all(feature = "emulate", target_os = "linux"))]
        "emulate",
        "bench",
        "tidy",
        "vendor-check",
    ] {
        assert!(text.contains(&format!("\n  {command} ")), "{command}: {text}");
    }
}

#[test]
fn what_does_not_exist_is_answered_with_what_does() {
    for (args, expected) in [
        (&["bench", "nonesuch"][..], "there are no benchmarks of nonesuch"),
        (
            &["images", "--list", "--only", "nonesuch"],
            "there are: busybox, scratch, ",
        ),
        (&["vendor-check", "nonesuch"], "there are: subprocess"),
    ] {
        let (code, text) = told(&xtask(args));
        assert_eq!(code, Some(1), "{args:?}");
        assert!(text.contains(expected), "{args:?}: {text}");
    }
}

#[cfg(feature = "subprocess")]
#[test]
fn providers_tells_the_capabilities_in_each_form() {
    let (code, text) = told(&xtask(&["providers", "--format", "json"]));
    assert_eq!(code, Some(0));
    let table: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(table["subprocess"]["live_processes"], true);
    assert_eq!(table["subprocess"]["egress"], "unrestricted");
    let (_, text) = told(&xtask(&["providers", "--format", "markdown"]));
    assert!(
        text.starts_with("| | ") && text.contains("| live processes | "),
        "{text}"
    );
}

#[cfg(feature = "subprocess")]
#[test]
fn reap_deletes_the_box_of_a_run_that_was_killed_and_leaves_living_ones_alone() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    let cache = tempfile::tempdir().expect("a directory");
    let start = || {
        let mut child = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(["run", "--", "sh", "-c", "echo $RUNTIME_SANDBOX_DIR; exec sleep 600"])
            .env("SANDBOX_CACHE_DIR", cache.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("xtask runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("its directory");
        (child, std::path::PathBuf::from(line.trim_end()))
    };
    let (mut dead, orphan) = start();
    let (mut alive, living) = start();
    dead.kill().expect("killed");
    dead.wait().expect("gone");
    assert!(orphan.is_dir() && living.is_dir());

    let reap = |args: &[&str]| {
        let cache = cache.path().to_str().expect("text");
        let output = xtask(&[&["reap", "--json", "--cache", cache][..], args].concat());
        assert_eq!(
            output.status.code(),
            Some(0),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")
    };
    let report = reap(&["--dry-run"]);
    assert_eq!(
        (&report["boxes"][0]["outcome"], &report["living_boxes"]),
        (&"would_delete".into(), &1.into())
    );
    assert!(orphan.is_dir());
    assert_eq!(reap(&["--older-than", "1h"])["filtered"], 1);
    let report = reap(&[]);
    assert_eq!(report["boxes"][0]["outcome"], "deleted");
    assert!(!orphan.exists() && living.is_dir());
    assert_eq!(reap(&[])["boxes"], serde_json::json!([]));

    let interrupted = Command::new("kill")
        .args(["-INT", &alive.id().to_string()])
        .status()
        .expect("kill");
    assert!(interrupted.success());
    assert_eq!(alive.wait().expect("gone").code(), Some(130));
    assert!(!living.exists());
}

#[cfg(feature = "graph")]
#[test]
fn graph_draws_a_record_in_each_format() {
    let dir = tempfile::tempdir().expect("a directory");
    let trace = dir.path().join("trace.json");
    let record = r#"{"id":"t","nodes":[
        {"message":{"role":"user","content":"What is six by seven?"}},
        {"parent":0,"sampled":true,"message":{"role":"assistant","content":"42"}}
    ]}"#;
    std::fs::write(&trace, record).expect("written");
    let trace = trace.to_str().expect("text");
    for (name, start) in [
        ("p.html", "<!DOCTYPE html>"),
        ("p.svg", "<svg"),
        ("p.dot", "digraph"),
        ("p.mmd", ""),
    ] {
        let picture = dir.path().join(name);
        let output = xtask(&["graph", trace, "-o", picture.to_str().expect("text")]);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let text = std::fs::read_to_string(&picture).expect("drawn");
        assert!(
            text.to_lowercase().contains(&start.to_lowercase()) && text.contains("six by seven"),
            "{name}: {text}"
        );
    }
    let (code, text) = told(&xtask(&["graph", trace, "--select", "other"]));
    assert_eq!(code, Some(1));
    assert!(text.contains("there are: t"), "{text}");
}
