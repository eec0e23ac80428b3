//! The conformance suite against the emulator, each case a test.

use std::process::ExitCode;

use runtime_core::RuntimeConfig;
use runtime_core::cache::CacheDir;
use runtime_core::conformance::{self, BoxRef, Target, async_trait};
use runtime_e2b::emulator::Emulator;
use tempfile::TempDir;

struct Emulated {
    emulator: Emulator,
    cache: TempDir,
}

#[async_trait]
impl Target for Emulated {
    fn name(&self) -> &str {
        "e2b"
    }

    fn config(&self) -> Box<dyn RuntimeConfig> {
        Box::new(self.emulator.config())
    }

    fn cache(&self) -> CacheDir {
        CacheDir::at(self.cache.path())
    }

    async fn leftovers(&self, boxes: &[BoxRef]) -> Result<Vec<String>, String> {
        let left = self.emulator.boxes();
        let of = |known: &BoxRef| {
            left.iter()
                .filter(|found| found.metadata.get("name") == Some(&known.name))
                .map(|found| found.id.clone())
                .collect()
        };
        Ok(boxes.iter().flat_map(|known| -> Vec<String> { of(known) }).collect())
    }

    fn can_kill_box(&self) -> bool {
        true
    }

    async fn kill_box(&self, target: &BoxRef) -> Result<(), String> {
        let id = target.id.as_deref().ok_or("its id is not known")?;
        self.emulator.kill_box(id).await
    }
}

fn main() -> ExitCode {
    let emulator = match Emulator::start() {
        Ok(emulator) => emulator,
        Err(error) => {
            eprintln!("the emulator does not start: {error}");
            return ExitCode::FAILURE;
        }
    };
    if !emulator.is_isolated() {
        eprintln!("SKIPPED: conformance on the E2B emulator needs root, for a mount namespace per box");
        return ExitCode::from(u8::from(std::env::var_os("CI").is_some()));
    }
    let cache = tempfile::tempdir().expect("a directory for locks");
    conformance::main(move || Emulated { emulator, cache })
}
