//! Making sure that the engine has an image: one pull for all who ask for it at once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use bollard::Docker;
use bollard::models::ImageInspect;
use bollard::query_parameters::CreateImageOptionsBuilder;
use futures_util::StreamExt;
use runtime_core::{Error, ErrorKind, Result};

use crate::auth;
use crate::config::{EngineKind, PullPolicy};
use crate::connect::{Endpoint, Surroundings};
use crate::error::from_api;

/// A pull that makes no progress for this long is given up.
const PULL_STALL: Duration = Duration::from_secs(300);

/// What the container takes over from its image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Image {
    /// The content's id.
    pub(crate) id: String,
    /// `NAME=value`.
    pub(crate) env: Vec<String>,
    /// `user[:group]`; empty is root.
    pub(crate) user: String,
    /// Architecture as Go names it.
    pub(crate) architecture: String,
}

impl Image {
    fn from_inspect(inspect: ImageInspect) -> Self {
        let config = inspect.config.unwrap_or_default();
        Self {
            id: inspect.id.unwrap_or_default(),
            env: config.env.unwrap_or_default(),
            user: config.user.unwrap_or_default(),
            architecture: inspect.architecture.unwrap_or_default(),
        }
    }
}

type Flights = HashMap<(Endpoint, String, Option<String>), Weak<tokio::sync::Mutex<()>>>;

/// Pulls in flight, by engine and reference.
static FLIGHTS: Mutex<Option<Flights>> = Mutex::new(None);

fn flight(endpoint: &Endpoint, reference: &str, platform: Option<&str>) -> Arc<tokio::sync::Mutex<()>> {
    let mut flights = FLIGHTS.lock().unwrap_or_else(PoisonError::into_inner);
    let flights = flights.get_or_insert_default();
    flights.retain(|_, flight| flight.strong_count() > 0);
    let key = (endpoint.clone(), reference.to_owned(), platform.map(str::to_owned));
    if let Some(flight) = flights.get(&key).and_then(Weak::upgrade) {
        return flight;
    }
    let flight = Arc::new(tokio::sync::Mutex::new(()));
    flights.insert(key, Arc::downgrade(&flight));
    flight
}

/// Makes sure that the engine has the image.
///
/// # Errors
/// [`NotFound`](ErrorKind::NotFound) for an image that is neither here nor may or can be pulled,
/// [`Unauthorized`](ErrorKind::Unauthorized), [`Timeout`](ErrorKind::Timeout) for a pull without progress.
///
/// # Cancellation
/// The engine goes on with a pull that was asked for; what it has it keeps.
pub(crate) async fn ensure(
    client: &Docker,
    kind: EngineKind,
    endpoint: &Endpoint,
    reference: &str,
    platform: Option<&str>,
    policy: PullPolicy,
) -> Result<Image> {
    if policy != PullPolicy::Always
        && let Some(image) = inspect(client, kind, reference).await?
    {
        return Ok(image);
    }
    if policy == PullPolicy::Never {
        let message = format!("{kind} does not have the image `{reference}`, and `pull` is `never`");
        return Err(Error::new(ErrorKind::NotFound, message).with_field("image"));
    }
    let flight = flight(endpoint, reference, platform);
    let waited = flight.try_lock().is_err();
    let _landed = flight.lock().await;
    // Whoever waited finds the image that the first one pulled.
    if (waited || policy == PullPolicy::Missing)
        && let Some(image) = inspect(client, kind, reference).await?
    {
        return Ok(image);
    }
    pull(client, kind, reference, platform).await?;
    match inspect(client, kind, reference).await? {
        Some(image) => Ok(image),
        None => Err(Error::new(
            ErrorKind::NotFound,
            format!("`{reference}` is gone right after it was pulled"),
        )
        .with_field("image")),
    }
}

async fn inspect(client: &Docker, kind: EngineKind, reference: &str) -> Result<Option<Image>> {
    match client.inspect_image(reference).await {
        Ok(inspect) => Ok(Some(Image::from_inspect(inspect))),
        Err(error) => match from_api(kind, "looking at the image", error) {
            error if error.kind() == ErrorKind::NotFound => Ok(None),
            error => Err(error.with_field("image")),
        },
    }
}

async fn pull(client: &Docker, kind: EngineKind, reference: &str, platform: Option<&str>) -> Result<()> {
    let credentials = auth::credentials(reference, &auth_files(kind)).await?;
    // A reference without tag or digest would pull every tag.
    let name = reference.rsplit('/').next().unwrap_or(reference);
    let full = if name.contains([':', '@']) {
        reference.to_owned()
    } else {
        format!("{reference}:latest")
    };
    let mut options = CreateImageOptionsBuilder::default().from_image(&full);
    if let Some(platform) = platform {
        options = options.platform(platform);
    }
    tracing::info!(image = reference, engine = %kind, "pulling");
    let started = tokio::time::Instant::now();
    let mut progress = client.create_image(Some(options.build()), None, credentials);
    loop {
        let next = tokio::time::timeout(PULL_STALL, progress.next()).await;
        let Ok(next) = next else {
            let message = format!("the pull of `{reference}` made no progress for {PULL_STALL:?}");
            return Err(Error::new(ErrorKind::Timeout, message).with_field("image"));
        };
        match next {
            None => break,
            Some(Err(error)) => {
                return Err(from_api(kind, &format!("pulling `{reference}`"), error).with_field("image"));
            }
            Some(Ok(step)) => {
                let detail = step.progress_detail.unwrap_or_default();
                tracing::debug!(
                    image = reference,
                    layer = step.id.unwrap_or_default(),
                    status = step.status.unwrap_or_default(),
                    bytes = detail.current,
                    of = detail.total,
                    "pulling"
                );
            }
        }
    }
    tracing::info!(image = reference, engine = %kind, seconds = started.elapsed().as_secs_f64(), "pulled");
    Ok(())
}

/// Where credentials are looked for, in this order.
fn auth_files(kind: EngineKind) -> Vec<PathBuf> {
    let mut files = Vec::new();
    if kind == EngineKind::Podman {
        files.extend(std::env::var_os("REGISTRY_AUTH_FILE").map(PathBuf::from));
        files.extend(std::env::var_os("XDG_RUNTIME_DIR").map(|dir| PathBuf::from(dir).join("containers/auth.json")));
    }
    files.extend(
        Surroundings::current()
            .docker_config()
            .map(|dir| dir.join("config.json")),
    );
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn askers_for_one_image_share_a_flight_and_others_do_not() {
        let endpoint = Endpoint::Unix("/x".into());
        let first = flight(&endpoint, "a", None);
        assert!(Arc::ptr_eq(&first, &flight(&endpoint, "a", None)));
        assert!(!Arc::ptr_eq(&first, &flight(&endpoint, "b", None)));
        assert!(!Arc::ptr_eq(&first, &flight(&endpoint, "a", Some("linux/arm64"))));
        assert!(!Arc::ptr_eq(&first, &flight(&Endpoint::Unix("/y".into()), "a", None)));
    }
}
