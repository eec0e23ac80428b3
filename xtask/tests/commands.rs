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
