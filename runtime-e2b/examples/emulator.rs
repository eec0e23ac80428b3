//! Runs the emulator until it is interrupted or its standard input ends, and prints the variables that point clients at it.
//!
//! `cargo xtask emulate e2b` does the same with options.

use tokio::signal::unix::{SignalKind, signal};

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let (mut int, mut term) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let emulator = runtime_e2b::emulator::Emulator::start()?;
    emulator.fail_image("bad-image", "no such image");
    for (name, value) in emulator.variables() {
        println!("export {name}={value}");
    }
    if !emulator.is_isolated() {
        eprintln!("boxes share the files of this machine: run as root for a mount namespace per box");
    }
    // Until its standard input ends, so that whoever started it ends it by going away.
    let (gone, went) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = gone.send(());
    });
    tokio::select! {
        _ = int.recv() => {}
        _ = term.recv() => {}
        _ = went => {}
    }
    Ok(())
}
