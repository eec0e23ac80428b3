//! `cargo xtask images`: images for tests, built from this machine's Debian packages without any registry.
//!
//! Each image is a tar archive that an engine imports. Archives are kept in `.image-cache`, named after a digest of
//! their recipe; an image that an engine already has from the same recipe is left alone.

mod engine;
mod recipe;
mod rootfs;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::host::exit_code;
use crate::workspace::Workspace;

use engine::Engine;
use recipe::Recipe;

/// Builds the images that tests use, from this machine's Debian packages and without any registry
///
/// They are named sandbox-test/NAME:latest. Needs busybox-static, for `debian` also debootstrap and root.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this image. Repeatable
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Only for this engine [default: each that answers]
    #[arg(long, value_enum)]
    engine: Option<Engine>,
    /// Say what there is to build, and build nothing
    #[arg(long)]
    list: bool,
}

pub(crate) fn execute(args: Args) -> ExitCode {
    exit_code(images(&args).map(|()| true))
}

fn images(args: &Args) -> Result<()> {
    let chosen = choose(&args.only)?;
    if args.list {
        for recipe in chosen {
            println!("{:<12}{}", recipe.name, recipe.about);
        }
        return Ok(());
    }
    let engines = match args.engine {
        Some(engine) => {
            engine.version().map_err(|reason| anyhow::anyhow!("{reason}"))?;
            vec![engine]
        }
        None => Engine::answering(),
    };
    if engines.is_empty() {
        bail!("neither docker nor podman answers: install one and start it");
    }
    let cache = Workspace::find_root()?.join(".image-cache");
    for recipe in chosen {
        let digest = recipe.digest()?;
        for engine in &engines {
            let image = format!("sandbox-test/{}:latest", recipe.name);
            if engine.has(&image, &digest) {
                println!("{engine}: {image} is current");
                continue;
            }
            let archive = archive(recipe, &digest, &cache)?;
            engine.import(&archive, &image, &digest, &recipe.changes)?;
            println!("{engine}: {image} imported");
        }
    }
    Ok(())
}

fn choose(only: &[String]) -> Result<Vec<&'static Recipe>> {
    let all = recipe::all();
    if only.is_empty() {
        return Ok(all.iter().collect());
    }
    only.iter()
        .map(|name| {
            all.iter().find(|recipe| recipe.name == name).with_context(|| {
                let names: Vec<&str> = all.iter().map(|recipe| recipe.name).collect();
                format!("there is no image `{name}`; there are: {}", names.join(", "))
            })
        })
        .collect()
}

/// The archive of a recipe, from the cache or built.
fn archive(recipe: &Recipe, digest: &str, cache: &Path) -> Result<PathBuf> {
    let path = cache.join(format!("{}-{digest}.tar", recipe.name));
    if path.is_file() {
        return Ok(path);
    }
    println!("building {}", recipe.name);
    fs::create_dir_all(cache).with_context(|| format!("making {}", cache.display()))?;
    let part = tempfile::Builder::new()
        .prefix(".part-")
        .tempfile_in(cache)
        .context("making a file in the cache")?;
    recipe
        .build(part.path())
        .with_context(|| format!("building {}", recipe.name))?;
    // Archives of older recipes are of no use any more.
    for entry in fs::read_dir(cache).context("reading the cache")?.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let older = name.strip_prefix(recipe.name).and_then(|rest| rest.strip_prefix('-'));
        let older = older.and_then(|rest| rest.strip_suffix(".tar"));
        if older.is_some_and(|digest| digest.bytes().all(|byte| byte.is_ascii_hexdigit())) {
            let _ = fs::remove_file(entry.path());
        }
    }
    part.persist(&path).context("keeping the archive")?;
    Ok(path)
}
