//! Boxes of the emulator whose owner is gone.
#![cfg(all(feature = "emulator", target_os = "linux"))]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::Provider;
use runtime_core::cache::CacheDir;
use runtime_core::lease::Outcome;
use runtime_core::{Orphan, ReapOptions, Registry, Report, RuntimeConfig, Sandbox, reap};
use runtime_e2b::emulator::{Action, Fault};
use runtime_e2b::{ApiKey, E2bConfig};

/// The test that is the owner of a box in a process of its own, and dies.
const DIES: &str = "an_owner_that_dies_leaves_its_box_to_the_reaper";
const CHILD: &str = "SANDBOX_TEST_CHILD";

/// A box of this name and lifetime whose owner has died.
fn orphan(provider: &Provider, name: &str, lifetime: u64) {
    use std::os::unix::process::ExitStatusExt as _;
    let before = provider.emulator.boxes().len();
    let output = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", DIES, "--nocapture"])
        .envs(provider.emulator.variables())
        .env("SANDBOX_CACHE_DIR", provider.cache.path())
        .env(CHILD, format!("{name} {lifetime}"))
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(6), "{said}");
    assert_eq!(provider.emulator.boxes().len(), before + 1, "{said}");
}

async fn reap_as(config: &E2bConfig, cache: &Path) -> Report {
    let mut registry = Registry::new();
    registry.register(config.provider().expect("a provider"));
    let options = ReapOptions {
        cache: CacheDir::at(cache),
        timeout: Duration::from_secs(5),
        ..ReapOptions::default()
    };
    reap(&registry, options).await.expect("a readable directory")
}

fn outcomes(report: &Report) -> Vec<Outcome> {
    report.boxes.iter().map(|reaped| reaped.outcome).collect()
}

#[test]
fn an_owner_that_dies_leaves_its_box_to_the_reaper() {
    let executor = tokio::runtime::Runtime::new().expect("an executor");
    if let Ok(what) = std::env::var(CHILD) {
        let (name, lifetime) = what.split_once(' ').expect("two words");
        let config = E2bConfig {
            timeout: lifetime.parse().expect("seconds"),
            ..E2bConfig::default()
        };
        let _sandbox = executor
            .block_on(Sandbox::builder(config).name(name).provision())
            .expect("a box");
        std::process::abort();
    }
    let Some(provider) = Provider::start() else { return };
    orphan(&provider, "orphan", 3600);
    let report = executor.block_on(reap_as(&provider.emulator.config(), provider.cache.path()));
    assert_eq!(outcomes(&report), [Outcome::Deleted], "{report}");
    assert_eq!(report.boxes[0].expires_at, Some(report.boxes[0].created_at + 3600));
    assert!(provider.emulator.boxes().is_empty());
    assert_eq!(
        std::fs::read_dir(provider.cache.path().join("leases"))
            .expect("a directory")
            .count(),
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_and_an_absent_provider_keep_the_lease_for_another_reap() {
    let Some(provider) = Provider::start() else { return };
    orphan(&provider, "orphan", 3600);
    let right = provider.emulator.config();
    let wrong = E2bConfig {
        api_key: Some(ApiKey::new("e2b_of_somebody_else")),
        ..right.clone()
    };
    let report = reap_as(&wrong, provider.cache.path()).await;
    assert_eq!(outcomes(&report), [Outcome::Unauthorized], "{report}");
    assert!(!format!("{report:?}").contains("e2b_of_somebody_else"));
    for action in [
        Action::answer(503, "down"),
        Action::Close,
        Action::Delay(Duration::from_secs(30)),
    ] {
        provider
            .emulator
            .inject(Fault::new("DELETE /sandboxes", u32::MAX, action));
        let report = reap_as(&right, provider.cache.path()).await;
        assert_eq!(outcomes(&report), [Outcome::Unreachable], "{report}");
        provider.emulator.clear_faults();
        assert_eq!(provider.emulator.boxes().len(), 1);
    }
    let report = reap_as(&right, provider.cache.path()).await;
    assert_eq!(outcomes(&report), [Outcome::Deleted], "{report}");
    assert!(provider.emulator.boxes().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_past_its_own_lifetime_is_gone_once_the_provider_says_so() {
    let Some(provider) = Provider::start() else { return };
    orphan(&provider, "orphan", 1);
    while !provider.emulator.boxes().is_empty() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The clock of leases counts seconds.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let config = provider.emulator.config();
    // It is not believed to be gone: the provider is asked.
    provider
        .emulator
        .inject(Fault::new("DELETE /sandboxes", u32::MAX, Action::answer(503, "down")));
    let report = reap_as(&config, provider.cache.path()).await;
    assert_eq!(outcomes(&report), [Outcome::Unreachable], "{report}");
    provider.emulator.clear_faults();
    let report = reap_as(&config, provider.cache.path()).await;
    assert_eq!(outcomes(&report), [Outcome::Expired], "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn boxes_of_dead_owners_go_before_the_first_provision_if_asked_for() {
    let Some(provider) = Provider::start() else { return };
    orphan(&provider, "orphan", 3600);
    // The key is that of the configuration: the environment has none.
    assert!(std::env::var_os("E2B_API_KEY").is_none());
    let builder = provider.builder(provider.emulator.config());
    let sandbox = builder.reap_orphans(true).provision().await.expect("a box");
    let names: Vec<_> = provider
        .emulator
        .boxes()
        .iter()
        .map(|found| found.metadata["name"].clone())
        .collect();
    assert_eq!(names, [sandbox.name()]);
    sandbox.stop().await.expect("stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_id_a_box_is_found_by_its_key_or_by_name_and_run_however_late_it_comes() {
    let Some(provider) = Provider::start() else { return };
    let config = provider.emulator.config();
    let spec = |name: &str, run: &str| runtime_core::BoxSpec {
        name: name.into(),
        run_scope: runtime_core::scope::RunScope::new(run).expect("a scope"),
        env: runtime_core::Env::new(),
        cache: CacheDir::at(provider.cache.path()),
    };
    let build = |name: &str, run: &str| config.build(spec(name, run)).expect("a handle");
    let same_name = build("mine", "another run");
    let same_run = build("another", "run");
    let twin = build("mine", "run");
    let mine = build("mine", "run");
    for runtime in [&same_name, &same_run, &twin] {
        runtime.create().await.expect("created");
    }
    // What the emulator has accepted comes late, whether or not somebody waits.
    let late = Action::Delay(Duration::from_millis(1500));
    provider.emulator.inject(Fault::new("POST /v2/sandboxes$", 1, late));
    let create = mine.clone();
    let creation = tokio::spawn(async move { create.create().await });
    while provider
        .emulator
        .requests()
        .iter()
        .filter(|line| *line == "POST /v2/sandboxes")
        .count()
        < 4
    {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let by = |context| Orphan {
        name: "mine".into(),
        id: None,
        run_scope: "run".into(),
        context,
    };
    let reaper: Arc<dyn runtime_core::Provider> = config.provider().expect("a provider");
    reaper.delete_orphan(&by(mine.lease_context())).await.expect("deleted");
    let left = || -> Vec<_> { provider.emulator.boxes().into_iter().map(|found| found.id).collect() };
    let ids = [&same_name, &same_run, &twin].map(|runtime| runtime.id().expect("created"));
    assert_eq!(left(), ids);
    // Its box is deleted under it, before or after it was ready.
    let _ = creation.await.expect("joined");
    let mut without_key = twin.lease_context();
    without_key.remove("create").expect("a key");
    reaper.delete_orphan(&by(without_key)).await.expect("deleted");
    assert_eq!(left(), ids[..2]);
    for runtime in [same_name, same_run] {
        runtime.delete().await.expect("deleted");
    }
}
