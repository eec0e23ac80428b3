//! `xtask run` with a network policy, on Docker: what is refused is summed up, with what would admit it.
#![cfg(all(feature = "docker", target_os = "linux"))]

mod support;

use std::process::{Command, Stdio};

use support::{World, code, stderr, stdout};

/// Whether Docker and its test image are there.
fn is_there() -> bool {
    let asked = std::env::var("SANDBOX_TEST_ENGINES").map_or(true, |engines| engines.contains("docker"));
    let image = ["image", "inspect", "sandbox-test/busybox:latest"];
    let there = asked
        && Command::new("docker")
            .args(image)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
    if !there {
        eprintln!("SKIPPED: xtask run with a policy: Docker with the images of `cargo xtask images` is needed");
        assert!(!asked || std::env::var_os("CI").is_none(), "CI has Docker");
    }
    there
}

/// `xtask run OPTIONS -- sh -c SCRIPT` where `good.example` is a web server of a public address: both are of a namespace
/// of its own, with nothing else in it.
fn run(world: &World, options: &str, script: &str) -> std::process::Output {
    let hosts = world.write(
        "hosts",
        "127.0.0.1 localhost\n93.184.215.14 good.example\n198.41.0.4 other.example\n",
    );
    let script_file = world.write("script.sh", script);
    let page = world.write("www/index.html", "a page");
    let steps = format!(
        "ip link set lo up; ip addr add 93.184.215.14/32 dev lo; ip addr add 198.41.0.4/32 dev lo; \
         mount --bind {} /etc/hosts; cd {}; \
         python3 -m http.server 80 >/dev/null 2>&1 & server=$!; trap 'kill $server' EXIT; \
         until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 80))' 2>/dev/null; do :; done; \
         {} run --runtime docker --image sandbox-test/busybox:latest {options} --upload {}:/script.sh -- sh /script.sh",
        hosts.display(),
        page.parent().expect("a directory").display(),
        env!("CARGO_BIN_EXE_xtask"),
        script_file.display(),
    );
    let output = world
        .xtask(["--version"])
        .get_envs()
        .fold(&mut Command::new("unshare"), |command, (name, value)| match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        })
        .args(["--net", "--mount", "sh", "-ec", &steps])
        .stdin(Stdio::null())
        .output();
    output.expect("unshare")
}

#[test]
fn what_is_refused_is_summed_up_with_the_rule_that_would_admit_it() {
    if !is_there() {
        return;
    }
    let world = World::new();
    let script = "wget -q -O- http://good.example/; for i in 1 2; do wget -q -O- http://other.example/x; done; exit 7";
    let output = run(&world, "--allow http://good.example", script);
    let said = stderr(&output);
    assert_eq!((code(&output), stdout(&output).as_str()), (7, "a page"), "{said}");
    assert!(said.contains("refused by the network policy:\n"), "{said}");
    let line = "  http://other.example:80 (not_allowed, 2 times); to admit it: --allow http://other.example\n";
    assert!(said.contains(line), "{said}");
    assert!(!said.contains("good.example"), "{said}");
    // What is proposed is what admits.
    let output = run(
        &world,
        "--allow http://good.example --allow http://other.example",
        script,
    );
    assert_eq!(code(&output), 7);
    assert!(!stderr(&output).contains("refused"), "{}", stderr(&output));

    let output = run(&world, "--block other.example --json", script);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["egress"]["refused"][0]["destination"], "http://other.example:80");
    assert_eq!(report["egress"]["refused"][0]["count"], 2);
    assert_eq!(report["egress"]["used"], serde_json::json!(["http://good.example"]));
}

#[test]
fn what_was_reached_is_recorded_as_an_allowlist() {
    if !is_there() {
        return;
    }
    let world = World::new();
    let script = "wget -q -O- http://good.example/; wget -q -O /dev/null http://other.example/; exit 0";
    let output = run(&world, "--record-egress", script);
    let said = stderr(&output);
    assert_eq!((code(&output), stdout(&output).as_str()), (0, "a page"), "{said}");
    let recorded = "reached over the network, as an allowlist:\n  --allow http://good.example\n  \
                    --allow http://other.example\n";
    assert!(said.contains(recorded), "{said}");
    // On the embedded runtime too, which gets namespaces for it.
    let output = world.run(&["--record-egress"], &["true"]);
    let said = stderr(&output);
    assert_eq!(code(&output), 0, "{said}");
    assert!(said.contains("namespaces"), "{said}");
    assert!(said.ends_with("nothing was reached over the network\n"), "{said}");
}
