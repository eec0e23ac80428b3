//! Deletes the boxes of processes that died: `cargo run -p runtime-core --example reap -- [--dry-run] [--json]`.
//!
//! A program with more providers registers them first; here it is the embedded runtime alone.

use runtime_core::{ReapOptions, Registry, reap};

#[tokio::main(flavor = "current_thread")]
async fn main() -> runtime_core::Result<()> {
    let flag = |name: &str| std::env::args().any(|argument| argument == name);
    let options = ReapOptions {
        dry_run: flag("--dry-run"),
        ..ReapOptions::default()
    };
    let report = reap(&Registry::with_builtin(), options).await?;
    if flag("--json") {
        println!("{}", serde_json::json!(report));
    } else {
        println!("{report}");
    }
    Ok(())
}
