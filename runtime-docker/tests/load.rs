//! Many boxes and many commands at once. Alone in its process, as it counts descriptors.

#[path = "support/boxes.rs"]
mod boxes;
mod support;

use boxes::{cache, leases};
use runtime_core::Sandbox;
use runtime_core::cache::CacheDir;
use runtime_docker::{DockerConfig, EngineKind, ExecMode};
use support::{config, containers_of, is_there};

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_boxes_at_once_take_twenty_thousand_commands_and_leave_nothing() {
    const BOXES: usize = 64;
    const COMMANDS: usize = 20_000;
    const IN_FLIGHT: usize = 256;
    if !is_there(EngineKind::Docker) || !boxes::ways::is_way_asked_for("socket") {
        return;
    }
    let cache = cache();
    let made = (0..BOXES).map(|_| {
        let config = config(EngineKind::Docker, "busybox", ExecMode::Guest);
        let builder = Sandbox::builder(DockerConfig(config)).cache(CacheDir::at(cache.path()));
        tokio::spawn(builder.provision())
    });
    let mut sandboxes = Vec::new();
    for made in made.collect::<Vec<_>>() {
        sandboxes.push(made.await.expect("a task").expect("a box"));
    }
    // All that boxes hold is open now; commands must not add to it.
    let descriptors = || std::fs::read_dir("/proc/self/fd").expect("a list").count();
    let before = descriptors();
    let mut running = tokio::task::JoinSet::new();
    for number in 0..COMMANDS {
        if running.len() >= IN_FLIGHT {
            running.join_next().await.expect("one").expect("a task");
        }
        let view = sandboxes[number % BOXES].view();
        running.spawn(async move {
            let output = view.run(["echo", &number.to_string()]).await.expect("a run");
            assert!(output.success());
            assert_eq!(output.stdout_lossy(), format!("{number}\n"));
        });
    }
    while let Some(ended) = running.join_next().await {
        ended.expect("a task");
    }
    assert_eq!(descriptors(), before);
    let names: Vec<_> = sandboxes.iter().map(|sandbox| sandbox.name().to_owned()).collect();
    let stopping: Vec<_> = sandboxes
        .into_iter()
        .map(|sandbox| tokio::spawn(async move { sandbox.stop().await }))
        .collect();
    for stopped in stopping {
        stopped.await.expect("a task").expect("a stop");
    }
    for name in names {
        assert_eq!(
            containers_of(EngineKind::Docker, &name).expect("a list"),
            Vec::<String>::new()
        );
    }
    assert_eq!(leases(cache.path()).await, 0);
}
