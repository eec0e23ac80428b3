//! `cargo xtask providers`: what each provider can do, from the code.

mod table;

use std::process::ExitCode;

use runtime_core::Registry;

pub(crate) use table::Table;

/// Every provider that is compiled in. A provider crate adds itself here, behind the feature of its name.
pub(crate) fn registry() -> Registry {
    #[allow(unused_mut, reason = "nothing to add without a provider's feature")]
    let mut registry = Registry::with_builtin();
    #[cfg(feature = "docker")]
    registry.register(std::sync::Arc::new(runtime_docker::DockerProvider));
    #[cfg(feature = "docker")]
    registry.register(std::sync::Arc::new(runtime_docker::PodmanProvider));
    #[cfg(feature = "e2b")]
    registry.register(std::sync::Arc::new(runtime_e2b::E2bProvider));
    registry
}

/// The features that bring providers, and whether each is compiled in.
pub(crate) const FEATURES: &[(&str, bool)] = &[
    ("subprocess", cfg!(feature = "subprocess")),
    ("docker", cfg!(feature = "docker")),
    ("e2b", cfg!(feature = "e2b")),
];

/// Shows what each provider can do
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How to print it
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Format {
    /// Aligned columns
    Text,
    /// The table of the README
    Markdown,
    /// One object per provider
    Json,
}

pub(crate) fn execute(args: Args) -> ExitCode {
    let table = Table::of(&registry());
    match args.format {
        Format::Text => print!("{}", table.text()),
        Format::Markdown => print!("{}", table.markdown()),
        Format::Json => println!("{:#}", table.json()),
    }
    ExitCode::SUCCESS
}
