//! What the tests against the emulator share.
#![allow(dead_code, reason = "each test program uses a part of it")]

use runtime_core::cache::CacheDir;
use runtime_core::{Builder, Sandbox};
use runtime_e2b::E2bConfig;
use runtime_e2b::emulator::Emulator;
use tempfile::TempDir;

/// An emulator and a cache of its own. `None`, said loudly, where boxes cannot have files of their own.
pub(crate) struct Provider {
    pub(crate) emulator: Emulator,
    pub(crate) cache: TempDir,
}

impl Provider {
    pub(crate) fn start() -> Option<Self> {
        let emulator = Emulator::start().expect("loopback");
        if !emulator.is_isolated() {
            eprintln!("SKIPPED: the E2B emulator needs root, for a mount namespace per box");
            assert!(std::env::var_os("CI").is_none(), "this must not be skipped in CI");
            return None;
        }
        let cache = tempfile::tempdir().expect("a directory");
        Some(Self { emulator, cache })
    }

    pub(crate) fn builder(&self, config: E2bConfig) -> Builder {
        Sandbox::builder(config).cache(CacheDir::at(self.cache.path()))
    }

    pub(crate) async fn sandbox(&self) -> Sandbox {
        self.builder(self.emulator.config()).provision().await.expect("a box")
    }
}
