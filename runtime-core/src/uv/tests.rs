use super::*;

const SOURCE: &str = "# /// script\n# dependencies = [\"six\"]\n# ///\nprint('hi')\n";

fn prepared() -> PreparedScript {
    PreparedScript {
        path: "/tmp/vf-scripts/d.py".into(),
        interpreter: "/root/.cache/uv/env-1/bin/python3".into(),
        venv: "/root/.cache/uv/env-1".into(),
    }
}

fn output(stdout: &str) -> Output {
    Output {
        status: crate::ExitStatus::exited(0),
        stdout: crate::Captured {
            bytes: Bytes::copy_from_slice(stdout.as_bytes()),
            dropped: 0,
        },
        stderr: crate::Captured::default(),
    }
}

#[test]
fn a_script_is_stored_under_the_digest_of_its_exact_bytes() {
    let script = Script::new("abc");
    let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(script.digest(), digest);
    assert_eq!(
        script.path_in(BOX_SCRIPTS_DIR),
        PathBuf::from(format!("/tmp/vf-scripts/{digest}.py"))
    );
    assert_ne!(Script::new("abc\n").digest(), digest);
    assert!(!format!("{:?}", Script::new("print('hunter2')")).contains("hunter2"));
}

#[test]
fn an_upload_has_its_own_name_beside_the_script() {
    let (one, two) = (upload_path(Path::new("/d/x.py")), upload_path(Path::new("/d/x.py")));
    assert_ne!(one, two);
    let name = one.to_str().unwrap();
    let random = name.strip_prefix("/d/x.py.").unwrap().strip_suffix(".tmp").unwrap();
    assert_eq!(random.len(), 32);
}

#[test]
fn argv_with_and_without_activation() {
    assert_eq!(
        prepared().argv(false),
        ["/root/.cache/uv/env-1/bin/python3", "/tmp/vf-scripts/d.py"]
    );
    let argv = prepared().argv(true);
    assert_eq!(argv[..2], ["sh", "-c"]);
    assert_eq!(
        argv[3..],
        [
            "uv-script",
            "/root/.cache/uv/env-1",
            "/root/.cache/uv/env-1/bin/python3",
            "/tmp/vf-scripts/d.py"
        ]
    );
    let command = prepared().command(["--flag", "a b"]);
    assert_eq!(command.argv()[7..], ["--flag", "a b"]);
}

#[test]
fn the_interpreter_is_the_last_line_of_the_output() {
    let from = |stdout| PreparedScript::from_output("/s.py".into(), &output(stdout));
    for stdout in [
        "/venv/bin/python3\n",
        "/venv/bin/python3",
        "Using CPython\n/venv/bin/python3\r\n\n",
    ] {
        let prepared = from(stdout).unwrap();
        assert_eq!(prepared.interpreter(), Path::new("/venv/bin/python3"), "{stdout:?}");
        assert_eq!(prepared.venv(), Path::new("/venv"), "{stdout:?}");
    }
    for stdout in [
        "",
        "\n",
        "python3\n",
        "/\n",
        "/venv/bin/python3\nwarning: x\n",
        "/python3",
    ] {
        let error = from(stdout).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{stdout:?}");
        assert_eq!(error.boundary(), Boundary::Other, "{stdout:?}");
    }
}

#[test]
fn a_pinned_binary_must_have_its_digest() {
    let digest = "BA7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let binary = UvBinary::pinned("abc", digest).unwrap();
    assert_eq!(
        binary.path_in("/s"),
        PathBuf::from(format!("/s/uv-{}/uv", digest.to_lowercase()))
    );
    let error = UvBinary::pinned("abd", digest).unwrap_err();
    assert_eq!(error.field(), Some("uv_sha256"));
}

#[test]
fn secrets_are_blanked_by_name_and_in_urls() {
    let env = Env::from_iter([
        ("HF_TOKEN", "hf_12345"),
        ("UV_INDEX_URL", "https://user:pw@index/simple"),
        ("UV_PYTHON", "3.12.1"),
        ("EMPTY_KEY", ""),
        ("SHORT_KEY", "a"),
    ]);
    let text = "a hf_12345 https://user:pw@index/simple 3.12.1".to_owned();
    assert_eq!(without_secrets(text, &env), "a *** *** 3.12.1");
}

#[cfg(unix)]
mod in_a_box;
