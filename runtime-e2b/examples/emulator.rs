//! Runs the emulator until it is interrupted, and prints the variables that point clients at it.

fn main() -> std::io::Result<()> {
    let emulator = runtime_e2b::emulator::Emulator::start()?;
    emulator.fail_image("bad-image", "no such image");
    for (name, value) in emulator.variables() {
        println!("export {name}={value}");
    }
    if !emulator.is_isolated() {
        eprintln!("boxes share the files of this machine: run as root for a mount namespace per box");
    }
    // Until its standard input ends, so that whoever started it ends it by going away.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}
