//! Boxes whose owner died.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use bollard::models::ContainerCreateBody;
use runtime_core::guest::Rendezvous;
use runtime_core::{Error, ErrorKind, Orphan, Result};

use crate::config::EngineKind;
use crate::engine::Engine;
use crate::{NAME_LABEL, RUN_LABEL};

/// Our own name for the container, by which it is found.
pub(super) const CONTAINER: &str = "container";
/// The address of its engine.
pub(super) const HOST: &str = "host";
/// The directory of the certificates for it.
pub(super) const CERTS: &str = "certs";
/// The directory of its guest.
pub(super) const DIRECTORY: &str = "dir";
/// The reference of its image.
pub(super) const IMAGE: &str = "image";
/// There is no container of ours: it is somebody else's.
pub(super) const BORROWED: &str = "borrowed";

/// Deletes a box whose owner died.
///
/// # Errors
/// [`PermissionDenied`](ErrorKind::PermissionDenied) for a container without our labels, and what the engine says.
pub(crate) async fn delete_orphan(kind: EngineKind, orphan: &Orphan) -> Result<()> {
    let fact = |name: &str| orphan.context.get(name).map(String::as_str);
    if fact(BORROWED).is_some() {
        return Ok(());
    }
    let engine = Engine::connect_again(kind, fact(HOST), fact(CERTS)).await?;
    let labels = [(RUN_LABEL, orphan.run_scope.as_str()), (NAME_LABEL, &orphan.name)];
    let container = fact(CONTAINER);
    let mut found = false;
    for target in orphan.id.as_deref().into_iter().chain(container) {
        found |= delete_ours(&engine, target, &labels).await?;
    }
    match (container, fact(IMAGE)) {
        (Some(_), _) if found => {}
        // The creation may still be under way.
        (Some(container), Some(image)) => forestall(&engine, container, image, &labels).await?,
        _ => {
            for id in engine.labelled(&labels).await? {
                engine.delete(&id).await?;
            }
        }
    }
    if let (Some(directory), Some(name)) = (fact(DIRECTORY).map(PathBuf::from), container) {
        let parent = Path::new("runtimes").join(kind.tag());
        let is_box = directory.is_absolute()
            && directory.file_name().is_some_and(|file| file == name)
            && directory.parent().is_some_and(|found| found.ends_with(parent));
        if is_box {
            Rendezvous::remove_directory(&directory)?;
        }
    }
    Ok(())
}

/// Deletes the container of this id or name if it is ours by its labels; whether there was one.
async fn delete_ours(engine: &Engine, target: &str, labels: &[(&str, &str)]) -> Result<bool> {
    let Some(found) = engine.inspect(target).await? else {
        return Ok(false);
    };
    let config = found.config.as_ref();
    let has = config.and_then(|config| config.labels.as_ref());
    let is_ours = |(name, value): &(&str, &str)| has.and_then(|has| has.get(*name)).is_some_and(|found| found == value);
    if !labels.iter().all(is_ours) {
        let message = format!("the container {target} does not carry the labels of this box: it is not deleted");
        return Err(Error::new(ErrorKind::PermissionDenied, message));
    }
    engine.delete(found.id.as_deref().unwrap_or(target)).await?;
    Ok(true)
}

/// Makes certain that no container of this name comes to be any more. The owner died while it may have been asking for
/// it, and an engine finishes a creation although nobody waits for the answer. It reserves the name first, so whoever
/// gets the name knows that there is no other.
async fn forestall(engine: &Engine, container: &str, image: &str, labels: &[(&str, &str)]) -> Result<()> {
    /// How long a request that was sent may be on its way to where the name is reserved.
    const HOLD: std::time::Duration = std::time::Duration::from_millis(500);
    /// How long a creation may take once it has the name.
    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

    let labels_of_ours = labels
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let body = ContainerCreateBody {
        image: Some(image.to_owned()),
        // It is never started.
        entrypoint: Some(vec!["true".to_owned()]),
        // Should we die while we hold the name, the next reaper finds it.
        labels: Some(labels_of_ours.collect::<HashMap<_, _>>()),
        ..ContainerCreateBody::default()
    };
    let until = tokio::time::Instant::now() + PATIENCE;
    loop {
        match engine.create(container, None, body.clone()).await {
            Ok(id) => {
                tokio::time::sleep(HOLD).await;
                return engine.delete(&id).await;
            }
            // Without its image the other cannot come to be either.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) if is_taken(&error) => {
                if delete_ours(engine, container, labels).await? {
                    return Ok(());
                }
                if tokio::time::Instant::now() > until {
                    let message = format!("a container was being created, and did not come to be within {PATIENCE:?}");
                    return Err(Error::new(ErrorKind::Timeout, message).with_source(error));
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Whether another container has, or is about to have, the name. Podman says so with a 500 while it is about to.
fn is_taken(error: &Error) -> bool {
    error.kind() == ErrorKind::AlreadyExists || error.message().contains("already in use")
}
