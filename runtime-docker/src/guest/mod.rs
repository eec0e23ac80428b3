//! Guest mode: everything in the box through the link to its process 1.

pub(crate) mod start;

use std::path::PathBuf;

use runtime_core::Error;
use runtime_core::guest::Link;

use crate::engine::Engine;

/// Says it loudly when process 1 of a box ends although nobody asked for it.
pub(crate) fn watch_end(link: &Link, engine: Engine, container: String, expected: tokio::sync::watch::Receiver<bool>) {
    let link = link.clone();
    tokio::spawn(async move {
        let error = link.ended().await;
        if *expected.borrow() {
            return;
        }
        let state = engine
            .inspect(&container)
            .await
            .ok()
            .flatten()
            .and_then(|inspect| inspect.state);
        let (code, oom) = state.map_or((None, false), |state| (state.exit_code, state.oom_killed == Some(true)));
        tracing::error!(container, %error, exit_code = code, oom_killed = oom, "the box has died");
    });
}

/// A relative path in the engine's directory for the box.
pub(crate) fn program_path() -> PathBuf {
    PathBuf::from("/.sandbox/guest")
}

/// The error where a way of reaching the guest is not there.
pub(crate) fn unavailable(reason: impl std::fmt::Display) -> Error {
    Error::unsupported(format!("this build has no guest program: {reason}"))
}
