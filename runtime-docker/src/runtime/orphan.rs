//! Boxes whose owner died.

use std::path::{Path, PathBuf};

use runtime_core::guest::Rendezvous;
use runtime_core::{Error, ErrorKind, Result};

use crate::config::EngineKind;
use crate::engine::{self, Engine};

/// Deletes a box whose owner died.
///
/// # Errors
/// [`PermissionDenied`](ErrorKind::PermissionDenied) for a container without our label, and what the engine says.
pub(crate) async fn delete_orphan(kind: EngineKind, orphan: &runtime_core::Orphan) -> Result<()> {
    let engine = Engine::connect(kind, orphan.context.get("host").map(String::as_str)).await?;
    let named = orphan.context.get("container");
    for target in orphan.id.iter().chain(named) {
        match engine.inspect(target).await? {
            None => {}
            Some(found) if engine::is_ours(&found, &orphan.name) => {
                engine.delete(found.id.as_deref().unwrap_or(target)).await?;
            }
            Some(_) => {
                return Err(Error::new(
                    ErrorKind::PermissionDenied,
                    format!(
                        "the container {target} does not carry the label of `{}`: it is not deleted",
                        orphan.name
                    ),
                ));
            }
        }
    }
    // The owner may have died before it learned anything.
    for id in engine.labelled(&orphan.name).await? {
        engine.delete(&id).await?;
    }
    if let (Some(directory), Some(name)) = (orphan.context.get("dir").map(PathBuf::from), named) {
        let parent = Path::new("runtimes").join(kind.tag());
        let is_box = directory.is_absolute()
            && directory.file_name().is_some_and(|file| file == name.as_str())
            && directory.parent().is_some_and(|found| found.ends_with(parent));
        if is_box {
            Rendezvous::remove_directory(&directory)?;
        }
    }
    Ok(())
}
