//! What a program in a closed box may try to get out by the network: boxes of namespaces.

mod subprocess_target;

use std::process::ExitCode;

use subprocess_target::isolation;

#[cfg(target_os = "linux")]
mod boxes {
    use runtime_core::cache::CacheDir;
    use runtime_core::conformance::escape::{Lan, Place};
    use runtime_core::conformance::{Target, async_trait};
    use runtime_core::subprocess::SubprocessConfig;
    use runtime_core::{RuntimeConfig, Sandbox};

    use crate::subprocess_target::{Subprocess, processes_in};

    pub(super) struct Boxes(Subprocess);

    impl Boxes {
        pub(super) fn new() -> Self {
            Self(Subprocess::isolated_in_directory())
        }
    }

    #[async_trait]
    impl Lan for Boxes {
        fn name(&self) -> &str {
            "subprocess, namespaces"
        }

        fn config(&self, allow: &[&str]) -> Box<dyn RuntimeConfig> {
            let mut config: SubprocessConfig = self.0.settings();
            config.allow = allow.iter().map(|host| (*host).to_owned()).collect();
            Box::new(config)
        }

        fn cache(&self) -> CacheDir {
            self.0.cache()
        }

        fn place(&self) -> Option<Place> {
            None
        }

        async fn process(&self, sandbox: &Sandbox) -> Result<u32, String> {
            let id = sandbox.id().ok_or("the box has no id")?;
            processes_in(std::path::Path::new(&id)).ok_or_else(|| "there is no process 1".to_owned())
        }
    }
}

fn main() -> ExitCode {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: escape_isolation: it needs root, who makes the network that the attempts are to reach");
        return ExitCode::SUCCESS;
    }
    isolation::run("escape_isolation", || {
        #[cfg(target_os = "linux")]
        return runtime_core::conformance::escape::main(|| Ok(Box::new(boxes::Boxes::new())));
        #[cfg(not(target_os = "linux"))]
        ExitCode::SUCCESS
    })
}
