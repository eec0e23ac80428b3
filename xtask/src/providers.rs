//! `cargo xtask providers`: what each provider can do, from the code.

mod table;

use std::process::ExitCode;

use runtime_core::Registry;

pub(crate) use table::Table;

/// Every provider that is compiled in. A provider crate adds itself here, behind the feature of its name.
pub(crate) fn registry() -> Registry {
    Registry::with_builtin()
}

/// The features that bring providers, and whether each is compiled in.
pub(crate) const FEATURES: &[(&str, bool)] = &[("subprocess", cfg!(feature = "subprocess"))];

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
