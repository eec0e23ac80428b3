//! `xtask images` against a real engine.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::{Command, Output};

/// Whether there is an engine; says so loudly when there is none, and then `xtask test` counts a skip.
fn docker_answers() -> bool {
    let answer = Command::new("docker")
        .args(["version", "--format", "{{.Server.Version}}"])
        .output();
    let reason = match answer {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().replace('\n', " "),
        Err(error) => error.to_string(),
    };
    println!("SKIPPED: docker: {reason}");
    false
}

fn text(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

fn build(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command
        .current_dir(root)
        .args(["images", "--engine", "docker", "--only", name]);
    text(&command.output().expect("xtask runs"))
}

/// What a container of the image prints, both streams together being asked for by the command itself.
fn printed(name: &str, argv: &[&str]) -> String {
    build(name);
    let image = format!("sandbox-test/{name}:latest");
    let mut command = Command::new("docker");
    command.args(["run", "--rm", "--network", "none", &image]).args(argv);
    text(&command.output().expect("docker runs"))
}

#[test]
fn an_image_that_is_there_from_the_same_recipe_is_left_alone() {
    if docker_answers() {
        build("busybox");
        assert_eq!(build("busybox"), "docker: sandbox-test/busybox:latest is current\n");
        assert_eq!(
            printed("busybox", &["sh", "-c", "echo $PATH; stat -c %a /tmp; id -u"]),
            PRINTED
        );
    }
}

const PRINTED: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n1777\n0\n";

#[test]
fn the_image_of_one_program_has_that_program_and_no_other_file() {
    if docker_answers() {
        // The engine itself puts files into /etc, and empty ones elsewhere.
        let argv = [
            "/busybox", "find", "/", "-xdev", "-type", "f", "-size", "+0", "!", "-path", "/etc/*",
        ];
        assert_eq!(printed("scratch", &argv), "/busybox\n");
    }
}

#[test]
fn the_image_with_an_entrypoint_runs_it_as_its_user() {
    if docker_answers() {
        let expected = "the entrypoint ran\nagent 1000 /home/agent yes\n";
        let script = "echo $(id -un) $(id -u) $PWD $FROM_IMAGE";
        assert_eq!(printed("entrypoint", &["sh", "-c", script]), expected);
    }
}

#[test]
fn the_image_with_a_working_directory_has_its_files_links_modes_and_owners() {
    if docker_answers() {
        let script = "pwd; cat link; stat -c '%n %a %u' read-only bin bin/tool; bin/tool";
        let expected = "/app\nfrom the image\nread-only 444 0\nbin 750 1000\nbin/tool 755 1000\na tool of the image\n";
        assert_eq!(printed("workdir", &["sh", "-c", script]), expected);
    }
}

#[test]
fn the_image_with_noisy_profiles_makes_noise_in_a_login_shell_alone() {
    if docker_answers() {
        assert_eq!(printed("login", &["sh", "-c", "echo quiet"]), "quiet\n");
        let expected = "noise from profile\nnoise from .profile\n/tmp .profile\n";
        assert_eq!(printed("login", &["sh", "-lc", "echo $PWD $NOISE"]), expected);
    }
}
