//! After a whole run nothing of it is left: run last, under the run's `VF_RUN_ID`.

mod support;

use runtime_docker::EngineKind;
use support::{client, config, image, is_there};

#[test]
fn no_container_of_this_run_is_left() {
    let Ok(run) = std::env::var("VF_RUN_ID") else {
        eprintln!("SKIPPED: left_behind: without VF_RUN_ID, containers of this run are not told from others");
        return;
    };
    for kind in [EngineKind::Docker, EngineKind::Podman] {
        if !is_there(kind) {
            continue;
        }
        let filter = format!("label=verifiers.run={run}");
        let left = client(
            kind,
            &["ps", "--all", "--filter", &filter, "--format", "{{.Names}} {{.Status}}"],
        );
        assert_eq!(left.expect("a list"), "", "{kind}");
        // What made the boxes is still there to make others.
        let image = image(kind, "busybox");
        assert_eq!(
            config(kind, "busybox", runtime_docker::ExecMode::Auto).image,
            Some(image)
        );
        assert_eq!(
            support::containers_of(kind, "no-such-box").expect("a list"),
            Vec::<String>::new()
        );
    }
}
