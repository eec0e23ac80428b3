//! A process is killed at random moments while it provisions, uses and stops containers; one reap must find everything.

mod support;

use std::sync::Arc;
use std::time::Duration;

use runtime_core::conformance::{Scene, Torture, play_role};
use runtime_docker::{DockerConfig, DockerProvider, EngineKind, ExecMode};
use support::{client, config, is_there};

const KIND: EngineKind = EngineKind::Docker;

/// Containers of the run, and whatever is below the caches but for the one copy of the guest.
fn left(scene: &Scene) -> Vec<String> {
    let filter = format!("label=verifiers.run={}", scene.run_scope);
    let format = "{{.ID}} {{.Names}} {{.State}}";
    let containers = client(
        KIND,
        &["ps", "--all", "--no-trunc", "--filter", &filter, "--format", format],
    );
    let mut left: Vec<String> = containers.expect("a list").lines().map(str::to_owned).collect();
    for cache in [&scene.cache, &scene.other] {
        let below = |dir: &str| std::fs::read_dir(cache.join(dir)).into_iter().flatten().flatten();
        for entry in below("runtimes")
            .chain(below("runtimes/docker"))
            .chain(below("runtimes/guest"))
        {
            left.push(entry.path().display().to_string());
        }
    }
    left
}

#[test]
fn a_process_killed_at_300_random_moments_leaves_no_container_after_one_reap() {
    let config = || {
        let mut config = config(KIND, "busybox", ExecMode::Guest);
        // Closed in the execution phase, so that what closes it is killed as well.
        config.allow = Vec::new();
        DockerConfig(config).into()
    };
    if play_role(config) || !is_there(KIND) {
        return;
    }
    let mut torture = Torture::new("a_process_killed_at_300_random_moments_leaves_no_container_after_one_reap");
    torture.at_once = 15;
    torture.boxes = 1;
    torture.latest = Duration::from_millis(2000);
    let kept = |scene: &Scene| {
        let mut left = left(scene);
        // What is kept for all boxes to come stays.
        left.retain(|line| !line.contains("/runtimes/guest/") || line.ends_with(".tmp"));
        left.retain(|line| {
            !["/runtimes/docker", "/runtimes/guest"]
                .iter()
                .any(|kept| line.ends_with(kept))
        });
        left
    };
    println!(
        "{}",
        torture.run(Arc::new(DockerProvider), kept).expect("nothing is left")
    );
}
