//! Eight processes with eight tasks each want a template that does not exist: one of them builds it.

use std::process::{Command, ExitCode};

use runtime_core::Sandbox;
use runtime_core::cache::CacheDir;
use runtime_e2b::E2bConfig;
use runtime_e2b::emulator::Emulator;

fn executor() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("an executor")
}

/// One of the processes: its configuration and cache are its arguments.
fn child(config: &str, key: &str, cache: &str) -> ExitCode {
    let mut fields: serde_json::Map<_, _> = serde_json::from_str(config).expect("JSON");
    fields.remove("type");
    fields.insert("api_key".into(), key.into());
    let config: E2bConfig = serde_json::from_value(fields.into()).expect("a configuration");
    executor().block_on(async {
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let builder = Sandbox::builder(config.clone()).cache(CacheDir::at(cache));
                tokio::spawn(async move {
                    let sandbox = builder.provision().await?;
                    sandbox.stop().await
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("joined").expect("a box");
        }
    });
    ExitCode::SUCCESS
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let [_, mode, config, key, cache] = args.as_slice()
        && mode == "child"
    {
        return child(config, key, cache);
    }
    let emulator = Emulator::start().expect("loopback");
    emulator.set_build_time(std::time::Duration::from_secs(2));
    let cache = tempfile::tempdir().expect("a directory");
    let config = runtime_core::RuntimeConfig::to_value(&emulator.config()).to_string();
    let itself = std::env::current_exe().expect("a path");
    let children: Vec<_> = (0..8)
        .map(|_| {
            let mut command = Command::new(&itself);
            command.args(["child", &config, emulator.api_key()]).arg(cache.path());
            command.spawn().expect("a process")
        })
        .collect();
    for mut child in children {
        assert!(child.wait().expect("waited").success());
    }
    let builds = emulator.builds();
    assert_eq!(builds.len(), 1, "{builds:?}");
    assert_eq!(
        (builds[0].cpu_count, builds[0].memory_mb, builds[0].image.as_str()),
        (2, 1024, "python:3.11-slim")
    );
    assert_eq!(builds[0].name, "vf-0b8d428bf0aac599a412420e");
    assert_eq!(emulator.created(), 64);
    assert!(emulator.boxes().is_empty());
    println!("8 processes with 8 tasks each: 1 build, {} boxes", emulator.created());
    ExitCode::SUCCESS
}
