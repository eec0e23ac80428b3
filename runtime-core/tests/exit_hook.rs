//! A program that ends takes its boxes along, however it ends: `main` returns, `exit` is called, a panic unwinds.
//!
//! Its own harness: the cases are children of this program.

use std::path::Path;
use std::process::{Command, Stdio};

use runtime_core::Sandbox;
use runtime_core::cache::CacheDir;
use runtime_core::subprocess::SubprocessConfig;

/// Ways to end, and the exit code of each.
const WAYS: [(&str, i32); 5] = [("return", 0), ("exit", 3), ("panic", 101), ("forget", 0), ("task", 0)];

fn main() {
    if let Some(way) = std::env::args()
        .nth(1)
        .and_then(|arg| arg.strip_prefix("child=").map(str::to_owned))
    {
        return child(&way);
    }
    let own = std::env::current_exe().expect("this program");
    // All at once: the program in each box takes its time to die.
    let children = WAYS.map(|(way, code)| {
        let dir = tempfile::tempdir().expect("a directory");
        let mut command = Command::new(&own);
        command.arg(format!("child={way}")).env("SANDBOX_CACHE_DIR", dir.path());
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a child");
        (way, code, dir, child)
    });
    for (way, code, dir, child) in children {
        let output = child.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{way}: {text}");
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("provisioned"),
            "{way}: {text}"
        );
        assert_eq!(boxes(dir.path()), 0, "{way} left its box behind: {text}");
        println!("test ends_by_{way} ... ok");
    }
    println!(
        "test result: ok. {} passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        WAYS.len()
    );
}

fn boxes(cache: &Path) -> usize {
    std::fs::read_dir(cache.join("runtimes/subprocess"))
        .expect("boxes were here")
        .count()
}

fn child(way: &str) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let builder = Sandbox::builder(SubprocessConfig::default()).cache(CacheDir::from_env());
    let sandbox = runtime.block_on(builder.provision()).expect("a sandbox");
    // A program that ignores SIGTERM is still running when the process ends.
    let script = "trap '' TERM; while :; do sleep 0.05; done";
    runtime
        .block_on(sandbox.run_background(["sh", "-c", script], "log"))
        .expect("a server");
    println!("provisioned");
    match way {
        "return" => drop(sandbox),
        "exit" => {
            std::mem::forget(sandbox);
            std::process::exit(3);
        }
        "panic" => panic!("on purpose"),
        "forget" => std::mem::forget(sandbox),
        "task" => {
            runtime.spawn(async move {
                let _ = sandbox.run(["sleep", "600"]).await;
            });
            std::mem::forget(runtime);
        }
        other => unreachable!("{other}"),
    }
}
