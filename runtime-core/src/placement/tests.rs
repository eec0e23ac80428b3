use super::*;

fn policy(allow: &[&str], block: &[&str]) -> Policy {
    Policy::new(allow.iter().copied(), block.iter().copied()).unwrap()
}

fn container(tag: &'static str, allow: &[&str], block: &[&str]) -> PlacementConfig {
    PlacementConfig::container(tag, true).with_policy(policy(allow, block))
}

fn borrow(borrower: &PlacementConfig, task: &TaskRequirements, found: &PlacementConfig) -> Result<Vec<Note>> {
    check_borrowed(
        borrower,
        task,
        BorrowedBox {
            config: found,
            stopped: false,
        },
        Policy::validate,
    )
}

#[test]
fn borrowing_follows_the_worked_examples() {
    let subprocess = PlacementConfig::local("subprocess");
    let open = || container("docker", &["*"], &[]);
    let docker = |allow: &[&str]| container("docker", allow, &[]);
    let any = (&["*"][..], &[][..]);
    for (borrower, (allow, block), found, refused) in [
        (open(), any, docker(&["a.com"]), None),
        (open(), (&["a.com"], &[]), docker(&["a.com"]), None),
        (open(), (&["a.com"], &[]), open(), Some(ErrorKind::InvalidArgument)),
        (
            open(),
            (&["a.com"], &[]),
            container("podman", &["a.com"], &[]),
            Some(ErrorKind::InvalidArgument),
        ),
        (docker(&["a.com", "b.com"]), (&["b.com"], &[]), docker(&["b.com"]), None),
        (
            docker(&["a.com", "b.com"]),
            any,
            docker(&["a.com"]),
            Some(ErrorKind::InvalidArgument),
        ),
        (
            subprocess.clone(),
            (&["a.com"], &[]),
            container("modal", &["a.com"], &[]),
            None,
        ),
        (subprocess.clone(), (&[], &[]), docker(&[]), None),
        (docker(&[]), any, subprocess.clone(), Some(ErrorKind::Unsupported)),
        (
            open(),
            (&["*"], &["x.com"]),
            container("docker", &["*"], &["x.com"]),
            None,
        ),
    ] {
        let task = TaskRequirements::with_network(policy(allow, block));
        let outcome = borrow(&borrower, &task, &found).map_err(|error| error.kind());
        assert_eq!(
            outcome.as_ref().err(),
            refused.as_ref(),
            "{borrower:?} {allow:?} {block:?} {found:?}"
        );
    }
}

#[test]
fn a_stopped_box_is_refused_to_the_caller_before_anything_else() {
    let docker = container("docker", &[], &[]);
    let target = BorrowedBox {
        config: &PlacementConfig::local("subprocess"),
        stopped: true,
    };
    let error = check_borrowed(&docker, &TaskRequirements::default(), target, Policy::validate).unwrap_err();
    assert_eq!(
        (error.kind(), error.stop_condition()),
        (ErrorKind::SandboxGone, "error")
    );
}

#[test]
fn without_a_policy_of_task_or_borrower_the_network_is_not_looked_at() {
    let task = TaskRequirements::default();
    for found in [
        container("docker", &[], &[]),
        PlacementConfig::local("subprocess"),
        container("modal", &["a.com"], &[]),
    ] {
        for borrower in [container("podman", &["*"], &[]), PlacementConfig::local("subprocess")] {
            assert_eq!(borrow(&borrower, &task, &found).unwrap(), []);
        }
    }
    // Lists of a config that cannot be restricted restrict nothing.
    let odd = PlacementConfig {
        policy: policy(&["a.com"], &[]),
        ..PlacementConfig::local("subprocess")
    };
    assert!(borrow(&odd, &task, &container("docker", &["b.com"], &[])).is_ok());
}

#[test]
fn policies_are_compared_by_their_meaning_and_both_are_quoted() {
    let open = container("docker", &["*"], &[]);
    let task = TaskRequirements::with_network(policy(&["https://A.com", "b.com."], &[]));
    assert!(borrow(&open, &task, &container("docker", &["b.com", "https://a.com:443"], &[])).is_ok());
    for other in [
        &["b.com", "https://a.com:444"][..],
        &["b.com"],
        &["b.com", "a.com"],
        &["b.com", "https://a.com", "c.com"],
    ] {
        let error = borrow(&open, &task, &container("docker", other, &[])).unwrap_err();
        assert_eq!((error.field(), error.boundary()), (Some("runtime"), Boundary::Other));
        assert!(
            error.message().contains("https://A.com") && error.message().contains(other[0]),
            "{error}"
        );
    }
}

#[test]
fn a_task_with_an_image_needs_a_container_and_only_hears_about_another_one() {
    let open = container("docker", &["*"], &[]);
    let task = TaskRequirements {
        image: Some("python:3.13".into()),
        ..TaskRequirements::default()
    };
    let error = borrow(&open, &task, &PlacementConfig::local("subprocess")).unwrap_err();
    assert_eq!((error.kind(), error.field()), (ErrorKind::Unsupported, Some("image")));

    let mut found = open.clone();
    found.image = Setting::Set("debian:13".into());
    let notes = borrow(&open, &task, &found).unwrap();
    assert_eq!(
        notes,
        [Note::Differs {
            requirement: "image",
            wanted: "python:3.13".into(),
            found: Some("debian:13".into())
        }]
    );
    assert_eq!(
        notes[0].to_string(),
        "the borrowed box has the image debian:13, the task asks for python:3.13"
    );
    found.image = Setting::Set("python:3.13".into());
    assert_eq!(borrow(&open, &task, &found).unwrap(), []);
}

#[test]
fn ignored_requirements_of_a_borrowed_box_are_told() {
    let task = TaskRequirements {
        workdir: Some("/w".into()),
        cpu: Some(2.0),
        memory: Some(4.0),
        disk: Some(8.0),
        gpu: Some("A100".into()),
        ..TaskRequirements::default()
    };
    let mut found = container("docker", &["*"], &[]);
    found.workdir = Setting::Set("/w".into());
    found.resources.cpu = Setting::Set(1.0);
    let notes = borrow(&PlacementConfig::local("subprocess"), &task, &found).unwrap();
    let told: Vec<String> = notes.iter().map(Note::to_string).collect();
    assert_eq!(
        told,
        [
            "the borrowed box has the cpu 1, the task asks for 2",
            "the task asks for the memory 4, the borrowed box was made without it",
            "the task asks for the disk 8, the borrowed box was made without it",
            "the task asks for the gpu A100, the borrowed box was made without it",
        ]
    );
}

fn wishes() -> TaskRequirements {
    TaskRequirements {
        image: Some("task:1".into()),
        workdir: Some("/task".into()),
        cpu: Some(2.0),
        memory: Some(4.0),
        disk: Some(8.0),
        gpu: Some("A100:2".into()),
        network: Policy::open(),
    }
}

#[test]
fn the_task_fills_what_the_operator_left_open() {
    let resolved = resolve(&PlacementConfig::container("docker", true), &wishes(), Policy::validate).unwrap();
    assert_eq!(resolved.notes, []);
    let config = resolved.config;
    assert_eq!(config.image, Setting::Set("task:1".into()));
    assert_eq!(config.workdir, Setting::Set("/task".into()));
    let expected = ResourceSettings {
        cpu: Setting::Set(2.0),
        memory: Setting::Set(4.0),
        disk: Setting::Set(8.0),
        gpu: Setting::Set("A100:2".into()),
    };
    assert_eq!(config.resources, expected);
}

#[test]
fn what_the_operator_set_wins_also_when_it_is_the_default() {
    let mut base = PlacementConfig::container("docker", true);
    base.image = Setting::Set("operator:1".into());
    base.workdir = Setting::Set("/app".into());
    base.resources = ResourceSettings {
        cpu: Setting::Set(1.0),
        memory: Setting::Set(2.0),
        disk: Setting::Set(3.0),
        gpu: Setting::Set(String::new()),
    };
    let config = resolve(&base, &wishes(), Policy::validate).unwrap().config;
    assert_eq!(
        config,
        PlacementConfig {
            image: Setting::Set("task:1".into()),
            ..base.clone()
        }
    );
    let nothing = resolve(&base, &TaskRequirements::default(), Policy::validate).unwrap();
    assert_eq!(
        nothing,
        Resolved {
            config: base,
            notes: Vec::new()
        }
    );
}

#[test]
fn what_a_config_does_not_know_is_ignored_and_told() {
    let base = PlacementConfig::local("subprocess");
    let error = resolve(&base, &wishes(), Policy::validate).unwrap_err();
    assert_eq!((error.kind(), error.field()), (ErrorKind::Unsupported, Some("image")));

    let task = TaskRequirements {
        image: None,
        ..wishes()
    };
    let resolved = resolve(&base, &task, Policy::validate).unwrap();
    assert_eq!(resolved.config, base);
    let told: Vec<String> = resolved.notes.iter().map(Note::to_string).collect();
    assert_eq!(told[0], "subprocess has no workdir: the task's workdir is ignored");
    assert_eq!(told.len(), 5);
}

#[test]
fn a_note_about_a_kind_of_config_is_logged_once() {
    use std::io;
    use std::sync::Arc;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let sink = Sink::default();
    let writer = sink.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || {
        let ignored = |requirement| Note::Ignored {
            tag: "logged-once",
            requirement,
        };
        let differs = Note::Differs {
            requirement: "cpu",
            wanted: "7".into(),
            found: None,
        };
        for note in [
            ignored("cpu"),
            ignored("cpu"),
            ignored("disk"),
            differs.clone(),
            differs,
        ] {
            note.log();
        }
    });
    let log = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    assert_eq!(log.matches("logged-once has no cpu").count(), 1);
    assert_eq!(log.matches("logged-once has no disk").count(), 1);
    assert_eq!(log.matches("asks for the cpu 7").count(), 2);
}

#[test]
fn network_policies_are_intersected_and_never_replaced() {
    let base = container("docker", &["*.a.com"], &[]);
    let config = |allow: &[&str]| {
        resolve(
            &base,
            &TaskRequirements::with_network(policy(allow, &[])),
            Policy::validate,
        )
        .unwrap()
        .config
    };
    assert_eq!(config(&["*"]).policy, base.policy);
    assert_eq!(config(&["x.a.com", "b.com"]).policy, policy(&["x.a.com"], &[]));
    assert_eq!(config(&["b.com"]).policy, Policy::framework_only());
    assert_eq!(config(&[]).policy, Policy::framework_only());
}

#[test]
fn a_policy_on_a_config_that_cannot_be_restricted_is_refused() {
    let task = TaskRequirements::with_network(policy(&["a.com"], &[]));
    for base in [
        PlacementConfig::local("subprocess"),
        PlacementConfig::container("apptainer", false),
    ] {
        let error = resolve(&base, &task, Policy::validate).unwrap_err();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::Unsupported, Some("network_allow"))
        );
    }
    assert!(
        resolve(
            &PlacementConfig::local("subprocess"),
            &TaskRequirements::default(),
            Policy::validate
        )
        .is_ok()
    );
}

#[test]
fn errors_name_the_field_of_whoever_wrote_it() {
    let field = |base: &PlacementConfig, allow: &[&str], block: &[&str]| {
        let network = Policy {
            allow: allow.iter().map(|text| Rule::new(*text)).collect(),
            block: block.iter().map(|text| Rule::new(*text)).collect(),
        };
        let error = resolve(base, &TaskRequirements::with_network(network), Policy::validate).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
        error.field().map(str::to_owned).unwrap()
    };
    let open = container("docker", &["*"], &[]);
    assert_eq!(field(&open, &["a.com", "::1"], &[]), "network_allow[1]");
    assert_eq!(field(&open, &["*"], &["ws://x"]), "network_block[0]");
    assert_eq!(field(&open, &["a.com"], &["b.com"]), "network_block");
    assert_eq!(
        field(&container("docker", &["b*.com"], &[]), &["b.com", "a*.com"], &[]),
        "network_allow[1]"
    );
    // The task's allow list and the operator's block list do not go together: neither is wrong by itself.
    assert_eq!(
        field(&container("docker", &["*"], &["x.com"]), &["a.com"], &[]),
        "block"
    );
}

#[test]
fn the_check_of_the_provider_judges_the_task_and_the_result() {
    // A provider that knows no schemes.
    let no_scheme = |policy: &Policy| match policy.allow.iter().position(|rule| rule.scheme().is_some()) {
        Some(index) => Err(Error::invalid_config(format!("allow[{index}]"), "no schemes here")),
        None => Ok(()),
    };
    let base = container("modal", &["a.com"], &[]);
    // It would have vanished in the intersection.
    let task = TaskRequirements::with_network(policy(&["a.com", "https://b.com"], &[]));
    assert_eq!(
        resolve(&base, &task, no_scheme).unwrap_err().field(),
        Some("network_allow[1]")
    );
    let base = container("modal", &["https://a.com"], &[]);
    let task = TaskRequirements::with_network(policy(&["a.com"], &[]));
    assert_eq!(resolve(&base, &task, no_scheme).unwrap_err().field(), Some("allow[0]"));
}
