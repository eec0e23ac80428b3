//! A process is killed at random moments while it provisions, uses and stops boxes of the emulator, which lives on; one
//! reap must find everything.
#![cfg(all(feature = "emulator", target_os = "linux"))]

mod common;

use std::collections::HashSet;
use std::time::Duration;

use common::Provider;
use runtime_core::RuntimeConfig;
use runtime_core::conformance::{Torture, play_role};
use runtime_e2b::E2bConfig;
use runtime_e2b::emulator::{Action, Fault};

/// The environment says where the emulator is.
fn config() -> Box<dyn RuntimeConfig> {
    let config = E2bConfig {
        creates_per_sec: None,
        ..E2bConfig::default()
    };
    config.into()
}

#[test]
fn a_process_killed_at_300_random_moments_leaves_no_sandbox_after_one_reap() {
    if play_role(config) {
        return;
    }
    let Some(provider) = Provider::start() else { return };
    let emulator = &provider.emulator;
    // Some answers are late: their sandbox comes to be after its owner has died.
    let late = Fault::new(
        "POST /v2/sandboxes$",
        u32::MAX,
        Action::Delay(Duration::from_millis(700)),
    );
    emulator.inject(late.probability(0.2));
    let mut torture = Torture::new("a_process_killed_at_300_random_moments_leaves_no_sandbox_after_one_reap");
    torture.at_once = 60;
    torture.boxes = 1;
    torture.latest = Duration::from_millis(2000);
    let variables = emulator.variables().into_iter();
    torture.env = variables.map(|(name, value)| (name.to_owned(), value)).collect();
    let with_key = emulator.config().provider().expect("a provider");
    let tally = torture.run(with_key, |_| {
        emulator.boxes().into_iter().map(|found| found.id).collect()
    });
    println!("{}", tally.expect("nothing is left"));
    let creations = emulator.creations();
    let keys: HashSet<_> = creations.iter().map(|labels| labels["create"].clone()).collect();
    println!("{} sandboxes were created", creations.len());
    assert_eq!(keys.len(), creations.len(), "none is doubled");
}
