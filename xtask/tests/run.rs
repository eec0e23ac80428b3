//! `xtask run` as people use it: the built program, real signals, real files.
#![cfg(all(feature = "subprocess", target_os = "linux"))]

mod support;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use serde_json::{Value, json};
use support::{World, code, line, stderr, stdout};

/// The embedded runtime without isolation, asked for.
const OPEN: &str = "subprocess://?isolation=none";

fn shell(script: &str) -> [&str; 3] {
    ["sh", "-c", script]
}

#[test]
fn output_passes_byte_for_byte_and_nothing_of_ours_is_in_it() {
    let world = World::new();
    let output = world.run(&[], &shell(r"printf 'a\000\377b'; printf '\376\n' >&2"));
    assert_eq!(code(&output), 0);
    assert_eq!(output.stdout, b"a\0\xffb");
    assert_eq!(output.stderr, b"\xfe\n");
    world.assert_nothing_left();
}

#[test]
fn large_output_on_both_streams_arrives_in_full() {
    let world = World::new();
    let output = world.run(
        &[],
        &shell("head -c 20000000 /dev/zero & head -c 20000000 /dev/zero >&2; wait"),
    );
    assert_eq!(
        (code(&output), output.stdout.len(), output.stderr.len()),
        (0, 20_000_000, 20_000_000)
    );
}

#[test]
fn the_exit_code_of_the_program_is_ours() {
    let world = World::new();
    for (script, expected) in [
        ("exit 0", 0),
        ("exit 42", 42),
        ("exit 255", 255),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
        ("kill -SEGV $$", 139),
    ] {
        let output = world.run(&[], &shell(script));
        assert_eq!((code(&output), stderr(&output)), (expected, String::new()), "{script}");
    }
    world.assert_nothing_left();
}

#[test]
fn a_missing_program_is_127_and_one_without_the_x_bit_is_126() {
    let world = World::new();
    let output = world.run(&[], &["surely-no-such-program"]);
    assert_eq!(code(&output), 127);
    assert!(
        stderr(&output).contains("kind: program_not_found\n"),
        "{}",
        stderr(&output)
    );
    let file = world.write("plain", "#!/bin/sh\n");
    let output = world.run(&[], &[file.to_str().expect("text")]);
    assert_eq!(code(&output), 126);
    assert!(
        stderr(&output).contains("hint: give the file its x bit"),
        "{}",
        stderr(&output)
    );
    world.assert_nothing_left();
}

#[test]
fn a_program_that_is_too_slow_is_killed_with_all_that_it_started() {
    let world = World::new();
    let output = world.run(&["--timeout", "0.5"], &shell("echo before; sleep 60 & sleep 60"));
    assert_eq!(code(&output), 124);
    assert_eq!(stdout(&output), "before\n");
    let said = stderr(&output);
    assert!(
        said.starts_with("error: the program did not end within 500ms and was killed\n"),
        "{said}"
    );
    assert!(said.contains("hint: give it longer with --timeout"), "{said}");
    world.assert_nothing_left();
}

#[test]
fn standard_input_is_empty_unless_it_is_passed_on_and_output_comes_while_the_program_runs() {
    let world = World::new();
    let mut running = world.start(&[], &["cat"]);
    let mut stdin = running.stdin.take().expect("a pipe");
    stdin.write_all(b"unseen").expect("room in the pipe");
    let output = running.finish();
    assert_eq!((code(&output), stdout(&output)), (0, String::new()));

    let mut running = world.start(&["--stdin"], &shell("echo ready; read word; echo got $word; cat"));
    assert_eq!(running.line(), "ready");
    let mut stdin = running.stdin.take().expect("a pipe");
    stdin.write_all(b"one\n").expect("it reads");
    assert_eq!(running.line(), "got one");
    stdin.write_all(b"two\n\xff").expect("it reads");
    drop(stdin);
    let output = running.finish();
    assert_eq!((code(&output), &output.stdout[..]), (0, &b"two\n\xff"[..]));
    world.assert_nothing_left();
}

#[test]
fn a_program_that_ends_before_its_input_does_is_not_waited_for() {
    let world = World::new();
    // The pipe stays open while the run ends.
    let mut running = world.start(&["--stdin"], &shell("exit 7"));
    let stdin = running.stdin.take();
    let output = running.finish();
    drop(stdin);
    assert_eq!(code(&output), 7);
}

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let world = World::new();
    let mut running = world.start(&[], &["yes"]);
    assert_eq!(running.line(), "y");
    running.stdout = None;
    let output = running.finish();
    assert_eq!((code(&output), stderr(&output)), (141, String::new()));
    world.assert_nothing_left();
}

#[test]
fn variables_reach_the_program() {
    let world = World::new();
    let mut command = world.xtask([
        "run",
        "--env",
        "A=1=2",
        "--env",
        "PASSED",
        "--",
        "sh",
        "-c",
        "echo $A $PASSED",
    ]);
    let output = command.env("PASSED", "on").output().expect("xtask runs");
    assert_eq!(stdout(&output), "1=2 on\n");
}

#[test]
fn a_directory_and_a_file_go_in_and_results_come_out() {
    let world = World::new();
    world.write("src/run.sh", "#!/bin/sh\ncat data/in extra > out/result\nexit 3\n");
    std::fs::set_permissions(world.path("src/run.sh"), PermissionsExt::from_mode(0o755)).expect("set");
    world.write("src/data/in", "in\n");
    std::os::unix::fs::symlink("data/in", world.path("src/link")).expect("linked");
    world.write("extra", "more\n");
    let options = [
        "--upload",
        "src:job",
        "--upload",
        "extra",
        "--workdir",
        "here",
        "--download",
        "out",
        "--download",
        "out/result:copy",
    ];
    let output = world.run(
        &options,
        &shell("mkdir out && mv extra job && cd job && ln -s ../out out && ./run.sh"),
    );
    assert_eq!((code(&output), stderr(&output)), (3, String::new()));
    assert_eq!(world.read("out/result"), "in\nmore\n");
    assert_eq!(world.read("copy"), "in\nmore\n");

    let output = world.run(
        &[
            "--upload",
            "src",
            "--download",
            "link:from-link",
            "--download",
            "run.sh:kept/",
        ],
        &shell("readlink link"),
    );
    assert_eq!(
        (code(&output), stdout(&output)),
        (0, "data/in\n".to_owned()),
        "{}",
        stderr(&output)
    );
    assert_eq!(world.read("from-link"), "in\n");
    let kept = std::fs::metadata(world.path("kept/run.sh")).expect("downloaded");
    assert_eq!(kept.permissions().mode() & 0o777, 0o755);
    world.assert_nothing_left();
}

#[test]
fn results_that_are_not_there_make_a_success_a_failure_and_leave_a_failure_as_it_is() {
    let world = World::new();
    for (script, expected) in [("exit 0", 125), ("exit 9", 9)] {
        let output = world.run(&["--download", "nothing"], &shell(script));
        assert_eq!(code(&output), expected);
        assert!(stderr(&output).contains("kind: not_found\n"), "{}", stderr(&output));
    }
    assert!(!world.path("nothing").exists());
    world.assert_nothing_left();
}

#[test]
fn a_configuration_comes_from_a_file_of_either_kind_from_the_environment_and_from_a_url() {
    let world = World::new();
    world.write("box.toml", "type = \"subprocess\"\n");
    world.write("box.json", "{\"type\": \"subprocess\"}");
    for options in [
        ["--config", "box.toml"],
        ["--config", "box.json"],
        ["--runtime", "subprocess"],
        ["--runtime", "subprocess://"],
    ] {
        let output = world.run(&options, &["echo", "x"]);
        assert_eq!((code(&output), stdout(&output)), (0, "x\n".to_owned()), "{options:?}");
    }
    let mut command = world.xtask(["run", "--", "true"]);
    let output = command.env("SANDBOX_TYPE", "nonesuch").output().expect("xtask runs");
    assert_eq!(code(&output), 125);
    assert!(stderr(&output).contains("`nonesuch`"), "{}", stderr(&output));
}

/// Bad input with the field that its error must name.
#[test]
fn bad_input_is_refused_with_the_field_that_is_wrong_and_nothing_is_created() {
    let world = World::new();
    world.write("unknown.toml", "type = \"subprocess\"\nmemry = 2\n");
    world.write("unknown.json", r#"{"type": "subprocess", "memry": 2}"#);
    world.write("nul.json", r#"{"type": "sub\u0000process"}"#);
    world.write("untyped.json", r#"{"image": "x"}"#);
    world.write("number.json", r#"{"type": 3}"#);
    world.write("list.json", "[1]");
    world.write("bad.toml", "type = ");
    world.write("box.yaml", "type: subprocess");
    let long = "n".repeat(256);
    let program: &[&str] = &["true"];
    let cases: &[(&[&str], &[&str], &str)] = &[
        (&["--runtime", "nonesuch"], program, "field: type"),
        (&["--runtime", "subproces"], program, "did you mean `subprocess`?"),
        (&["--runtime", "://x"], program, "field: type"),
        (&["--runtime", ""], program, "field: type"),
        (&["--runtime", "subprocess://?memry=2"], program, "field: memry"),
        (&["--runtime", "subprocess://?a=1&a=2"], program, "field: a"),
        (&["--config", "unknown.toml"], program, "field: memry"),
        (&["--config", "unknown.json"], program, "field: memry"),
        (&["--config", "nul.json"], program, "field: type"),
        (&["--config", "untyped.json"], program, "field: type"),
        (&["--config", "number.json"], program, "field: type"),
        (&["--config", "list.json"], program, "field: type"),
        (&["--config", "bad.toml"], program, "operation: reading bad.toml"),
        (&["--config", "missing.toml"], program, "field: config"),
        (&["--config", "box.yaml"], program, "field: config"),
        (&["--image", "x"], program, "field: image"),
        (&["--runtime", OPEN, "--allow", "example.org"], program, "field: allow"),
        (&["--runtime", OPEN, "--block", "example.org"], program, "field: block"),
        (&["--allow", "exa mple"], program, "field: allow[0]"),
        (&["--env", "=x"], program, "field: env."),
        (
            &["--env", "SURELY_NOT_SET_ANYWHERE"],
            program,
            "field: env.SURELY_NOT_SET_ANYWHERE",
        ),
        (&["--name", "../x"], program, "field: name"),
        (&["--name", ""], program, "field: name"),
        (&["--name", &long], program, "field: name"),
        (&["--workdir", &long], program, "field: workdir"),
        (&["--workdir", ""], program, "--workdir"),
        (&["--upload", "missing"], program, "field: upload"),
        (&["--upload", "/dev/null"], program, "field: upload"),
        (&["--upload", "box.yaml:"], program, "field: upload"),
        (&["--download", "."], program, "field: download"),
        (&["--download", "x:"], program, "field: download"),
        (&[], &[], "field: argv"),
        (&[], &[""], "field: argv[0]"),
        (&["--timeout", "0"], program, "--timeout"),
        (&["--timeout", "-1"], program, "--timeout"),
        (&["--timeout", "inf"], program, "--timeout"),
        (&["--timeout", "NaN"], program, "--timeout"),
        (&["--timeout", "soon"], program, "--timeout"),
        (&["--bogus"], program, "--bogus"),
    ];
    for (options, argv, expected) in cases {
        let output = world.run(options, argv);
        let said = stderr(&output);
        assert_eq!(code(&output), 125, "{options:?} {argv:?}: {said}");
        assert!(
            said.contains(expected),
            "{options:?} {argv:?} must name `{expected}`: {said}"
        );
        assert_eq!(stdout(&output), "", "{options:?}");
        world.assert_nothing_left();
    }
}

#[test]
fn a_policy_that_the_provider_cannot_enforce_is_refused_with_what_to_do() {
    let world = World::new();
    let output = world.run(&["--runtime", OPEN, "--allow", "example.org"], &["true"]);
    let said = stderr(&output);
    assert!(said.contains("`subprocess` cannot restrict the network"), "{said}");
    assert!(
        said.contains("kind: unsupported\n") && said.contains("or leave --allow out"),
        "{said}"
    );
}

#[test]
fn a_policy_gives_the_embedded_runtime_a_network_of_its_own_and_says_so() {
    let world = World::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    listener.set_nonblocking(true).expect("a mode");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let script = format!(
        "echo $0 $(ls /sys/class/net); curl -s -m 20 -o /dev/null -w '%{{http_code}} ' {url}
         curl -s -m 20 -o /dev/null -w '%{{http_code}}' --noproxy '' {url}; exit 7"
    );
    let output = world.run(&["--allow", "example.org"], &["sh", "-c", &script, "in"]);
    let said = stderr(&output);
    if said.contains("to change that: ") && std::env::var_os("CI").is_none() {
        println!("SKIPPED: a_policy_gives_the_embedded_runtime_a_network_of_its_own_and_says_so: {said}");
        return;
    }
    assert_eq!(code(&output), 7, "{said}");
    assert!(said.contains("isolation = \"namespaces\""), "{said}");
    // Nothing of this host answers directly, and the proxy refuses it.
    assert_eq!(stdout(&output), "in lo\n000 403");
    assert!(listener.accept().is_err(), "something arrived");
    world.assert_nothing_left();
}

#[test]
fn a_name_that_is_taken_is_refused_and_the_other_box_lives_on() {
    let world = World::new();
    let mut first = world.start(&["--name", "mine", "--stdin"], &shell("echo ready; read x; echo $x"));
    assert_eq!(first.line(), "ready");
    let output = world.run(&["--name", "mine"], &["true"]);
    assert_eq!(code(&output), 125);
    assert!(
        stderr(&output).contains("hint: choose another --name"),
        "{}",
        stderr(&output)
    );
    first
        .stdin
        .take()
        .expect("a pipe")
        .write_all(b"alive\n")
        .expect("it reads");
    let output = first.finish();
    assert_eq!((code(&output), stdout(&output)), (0, "alive\n".to_owned()));
    world.assert_nothing_left();
}

fn parsed(output: &std::process::Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stdout(output)))
}

#[test]
fn json_tells_how_it_ended_with_the_output_and_the_time_of_each_phase() {
    let world = World::new();
    let output = world.run(
        &["--json", "--name", "told"],
        &shell(r"echo é; printf '\377' >&2; exit 3"),
    );
    assert_eq!((code(&output), stderr(&output)), (3, String::new()));
    let report = parsed(&output);
    assert_eq!(report["status"], "exited");
    assert_eq!(
        (&report["exit_code"], &report["code"], &report["signal"]),
        (&json!(3), &json!(3), &Value::Null)
    );
    assert_eq!(report["stdout"], json!({"text": "é\n", "dropped_bytes": 0}));
    assert_eq!(report["stderr"], json!({"base64": "/w==", "dropped_bytes": 0}));
    assert_eq!(
        (&report["error"], &report["further_errors"]),
        (&Value::Null, &json!([]))
    );
    assert_eq!(
        (&report["sandbox"]["type"], &report["sandbox"]["name"]),
        (&json!("subprocess"), &json!("told"))
    );
    let seconds = report["seconds"].as_object().expect("an object");
    for phase in ["provision", "setup", "restrict", "run", "stop", "total"] {
        assert!(
            seconds[phase].as_f64().is_some_and(|seconds| seconds >= 0.0),
            "{phase}: {seconds:?}"
        );
    }
}

#[test]
fn json_tells_signals_timeouts_and_errors_apart() {
    let world = World::new();
    let report = parsed(&world.run(&["--json"], &shell("kill -KILL $$")));
    assert_eq!(
        (
            &report["status"],
            &report["signal"],
            &report["code"],
            &report["exit_code"]
        ),
        (&json!("signaled"), &json!(9), &Value::Null, &json!(137))
    );
    let report = parsed(&world.run(&["--json", "--timeout", "0.3"], &shell("echo so far; sleep 60")));
    assert_eq!(
        (&report["status"], &report["exit_code"]),
        (&json!("timeout"), &json!(124))
    );
    assert_eq!(report["stdout"]["text"], "so far\n");
    assert_eq!(report["error"]["kind"], "timeout");
    let report = parsed(&world.run(&["--json", "--runtime", "nonesuch"], &["true"]));
    assert_eq!(
        (&report["status"], &report["exit_code"]),
        (&json!("failed"), &json!(125))
    );
    assert_eq!(
        (&report["error"]["kind"], &report["error"]["field"]),
        (&json!("invalid_config"), &json!("type"))
    );
    assert_eq!(report["sandbox"], Value::Null);
    let report = parsed(&world.run(&["--json"], &["surely-no-such-program"]));
    assert_eq!(
        (&report["exit_code"], &report["error"]["provider"]),
        (&json!(127), &json!("subprocess"))
    );
    let report = parsed(&world.run(&["--json", "--download", "a", "--download", "b"], &["true"]));
    assert_eq!(
        (&report["status"], &report["exit_code"]),
        (&json!("exited"), &json!(125))
    );
    assert_eq!(
        (
            &report["error"]["kind"],
            report["further_errors"].as_array().map(Vec::len)
        ),
        (&json!("not_found"), Some(1))
    );
    world.assert_nothing_left();
}

#[test]
fn the_first_interrupt_tears_the_sandbox_down() {
    for (signal, expected) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let world = World::new();
        let mut running = world.start(&[], &shell("echo ready; sleep 60 & sleep 60"));
        assert_eq!(running.line(), "ready");
        assert_eq!(world.boxes().len(), 1);
        running.signal(signal);
        let output = running.finish();
        assert_eq!(code(&output), expected);
        assert_eq!(
            stderr(&output),
            "stopping the sandbox; interrupt again to leave it to `cargo xtask reap`\n"
        );
        world.assert_nothing_left();
    }
}

#[test]
fn an_interrupt_is_told_in_json_too() {
    let world = World::new();
    let fifo = world.fifo("ready");
    // The program has no other way to tell that it runs: its output is in the report.
    let script = format!("echo x > '{}'; sleep 60", fifo.display());
    let running = world.start(&["--json"], &shell(&script));
    assert_eq!(world.read("ready"), "x\n");
    running.signal(Signal::INT);
    let output = running.finish();
    assert_eq!(code(&output), 130);
    let report = parsed(&output);
    assert_eq!(
        (&report["status"], &report["exit_code"]),
        (&json!("interrupted"), &json!(130))
    );
    world.assert_nothing_left();
}

#[test]
fn the_second_interrupt_leaves_at_once_whatever_we_wait_for() {
    let world = World::new();
    let fifo = world.fifo("ready");
    // Nobody reads our standard output, and it is full: the report cannot be written.
    let (_reader, writer) = full_pipe();
    let script = format!("echo x > '{}'; sleep 60", fifo.display());
    let mut running = world.start_into(&["--json"], &shell(&script), writer);
    assert_eq!(world.read("ready"), "x\n");
    running.signal(Signal::INT);
    assert_eq!(
        line(&mut running.stderr),
        "stopping the sandbox; interrupt again to leave it to `cargo xtask reap`"
    );
    running.signal(Signal::INT);
    assert_eq!(code(&running.finish()), 130);
}

/// What `xtask reap` made of the boxes of this world.
fn reaped(world: &World) -> Value {
    let output = world.xtask(["reap", "--json"]).output().expect("xtask runs");
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    parsed(&output)
}

#[test]
fn a_box_that_the_second_interrupt_left_is_found_and_deleted_by_reap() {
    for (signal, expected) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let world = World::new();
        // Many files, so that deleting the box takes longer than a second signal.
        let many = "mkdir many; i=0; while [ $i -lt 10000 ]; do : >many/$i; i=$((i + 1)); done; echo ready; sleep 60";
        let mut running = world.start(&[], &shell(many));
        assert_eq!(running.line(), "ready");
        running.signal(signal);
        assert!(line(&mut running.stderr).starts_with("stopping the sandbox"));
        let second = std::time::Instant::now();
        running.signal(signal);
        assert_eq!(running.end(), expected);
        println!("left {:?} after the second signal", second.elapsed());
        assert_eq!(world.boxes().len(), 1, "it was not waited for");
        let report = reaped(&world);
        assert_eq!(report["boxes"][0]["outcome"], "deleted", "{report}");
        assert_eq!(report["boxes"].as_array().map(Vec::len), Some(1));
        world.assert_nothing_left();
    }
}

#[cfg(feature = "docker")]
mod docker {
    use super::*;
    use support::Engine;

    const IMAGE: &str = "docker://sandbox-test/busybox:latest?pull=never";

    #[test]
    fn the_first_interrupt_removes_the_container() {
        let world = World::new();
        let Some(engine) = Engine::start(&world) else { return };
        for (signal, expected) in [(Signal::INT, 130), (Signal::TERM, 143)] {
            let runtime = format!("{IMAGE}&host={}", engine.host());
            let mut running = world.start(&["--runtime", &runtime], &shell("echo ready; sleep 60"));
            assert_eq!(running.line(), "ready", "{}", running.rest_of_stderr());
            assert_eq!(engine.containers(&world).len(), 1);
            running.signal(signal);
            let output = running.finish();
            assert_eq!(code(&output), expected, "{}", stderr(&output));
            assert_eq!(engine.containers(&world), Vec::<String>::new());
            assert_eq!(reaped(&world)["boxes"], json!([]));
        }
    }

    #[test]
    fn a_container_that_the_second_interrupt_left_is_found_and_deleted_by_reap() {
        let world = World::new();
        let Some(engine) = Engine::start(&world) else { return };
        for (signal, expected) in [(Signal::INT, 130), (Signal::TERM, 143)] {
            let runtime = format!("{IMAGE}&host={}", engine.host());
            let mut running = world.start(&["--runtime", &runtime], &shell("echo ready; sleep 60"));
            assert_eq!(running.line(), "ready", "{}", running.rest_of_stderr());
            // The engine takes its time over the deletion.
            engine.hold_deletions(true);
            running.signal(signal);
            assert!(line(&mut running.stderr).starts_with("stopping the sandbox"));
            let second = std::time::Instant::now();
            running.signal(signal);
            assert_eq!(running.end(), expected);
            println!("left {:?} after the second signal", second.elapsed());
            assert_eq!(engine.containers(&world).len(), 1, "it was not waited for");
            engine.hold_deletions(false);
            let report = reaped(&world);
            assert_eq!(report["boxes"][0]["outcome"], "deleted", "{report}");
            assert_eq!(engine.containers(&world), Vec::<String>::new());
        }
    }
}

/// A pipe that takes no more bytes.
fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).expect("a pipe");
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    // Writing to it blocks from now on.
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::empty()).expect("set");
    (reader, writer)
}
