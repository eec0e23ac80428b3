//! A process is killed at random moments while it provisions, uses and stops boxes; one reap must find everything.
#![cfg(all(feature = "subprocess", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::sync::Arc;

use runtime_core::conformance::{Torture, play_role};
use runtime_core::subprocess::{SubprocessConfig, SubprocessProvider};

#[test]
fn a_process_killed_at_300_random_moments_leaves_nothing_after_one_reap() {
    if play_role(|| SubprocessConfig::default().into()) {
        return;
    }
    let mut torture = Torture::new("a_process_killed_at_300_random_moments_leaves_nothing_after_one_reap");
    torture.at_once = 20;
    torture.latest = std::time::Duration::from_millis(200);
    let tally = torture.run(Arc::new(SubprocessProvider), |scene| {
        let dirs = [&scene.cache, &scene.other].map(|cache| cache.join("runtimes/subprocess"));
        let entries = dirs.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten();
        // Directories of boxes, and the claims on their names.
        entries
            .map(|entry| entry.unwrap().path().display().to_string())
            .collect()
    });
    println!("{}", tally.unwrap());
}
