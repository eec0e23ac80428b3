//! One engine: the requests about containers that the rest is made of.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use bollard::Docker;
use bollard::models::{ContainerCreateBody, ContainerInspectResponse};
use bollard::query_parameters::{
    ContainerArchiveInfoOptionsBuilder, CreateContainerOptionsBuilder, DownloadFromContainerOptionsBuilder,
    KillContainerOptionsBuilder, RemoveContainerOptionsBuilder, UploadToContainerOptionsBuilder,
};
use bytes::Bytes;
use futures_util::StreamExt;
use runtime_core::{Error, ErrorKind, Result};

use crate::NAME_LABEL;
use crate::config::EngineKind;
use crate::connect::{self, Endpoint};
use crate::error::from_api;

/// How long the deletion of a container may take.
pub(crate) const DELETE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long to look for a container whose creation was asked for and not answered.
const LATE_ARRIVAL: Duration = Duration::from_secs(5);

/// How long a container may be in a state that the protocol does not have.
const BETWEEN_STATES: Duration = Duration::from_secs(10);

/// A file that is read through the archive API has at most this many bytes.
const SMALL_FILE: usize = 4 << 20;

/// An engine and how it is reached. Cheap to clone. Every request opens a connection of its own, so that an engine
/// outlives the executor that it was connected on.
#[derive(Clone)]
pub(crate) struct Engine {
    pub(crate) kind: EngineKind,
    pub(crate) client: Docker,
    pub(crate) endpoint: Endpoint,
}

impl Engine {
    /// Finds the engine and agrees on a version.
    ///
    /// # Errors
    /// As [`connect::connect`].
    pub(crate) async fn connect(kind: EngineKind, host: Option<&str>) -> Result<Self> {
        let (client, endpoint) = connect::connect(kind, host).await?;
        Ok(Self { kind, client, endpoint })
    }

    /// The engine that a lease names.
    ///
    /// # Errors
    /// As [`connect::connect`].
    pub(crate) async fn connect_again(kind: EngineKind, host: Option<&str>, certs: Option<&str>) -> Result<Self> {
        let (Some(host), Some(certs)) = (host, certs) else {
            return Self::connect(kind, host).await;
        };
        let (client, endpoint) = connect::connect_again(kind, host, certs.into()).await?;
        Ok(Self { kind, client, endpoint })
    }

    /// What an error of the client means.
    pub(crate) fn error(&self, what: &str, error: bollard::errors::Error) -> Error {
        from_api(self.kind, what, error)
    }

    /// Creates a container and returns its id.
    pub(crate) async fn create(&self, name: &str, platform: Option<&str>, body: ContainerCreateBody) -> Result<String> {
        let mut options = CreateContainerOptionsBuilder::default().name(name);
        if let Some(platform) = platform {
            options = options.platform(platform);
        }
        let created = self.client.create_container(Some(options.build()), body).await;
        let created = created.map_err(|error| self.error("creating the container", error))?;
        for warning in created.warnings {
            tracing::debug!(warning, "the engine warns");
        }
        Ok(created.id)
    }

    /// Starts a container.
    pub(crate) async fn start(&self, id: &str) -> Result<()> {
        let started = self.client.start_container(id, None).await;
        started.map_err(|error| self.error("starting the container", error))
    }

    /// What the engine says of a container; `None` if it has none of this id or name.
    pub(crate) async fn inspect(&self, id: &str) -> Result<Option<ContainerInspectResponse>> {
        let until = tokio::time::Instant::now() + BETWEEN_STATES;
        loop {
            let error = match self.client.inspect_container(id, None).await {
                Ok(inspect) => return Ok(Some(inspect)),
                Err(error) => error,
            };
            // Podman has states of its own for a container that has ended and is not cleaned up yet.
            let is_between = matches!(error, bollard::errors::Error::JsonDataError { .. });
            if is_between && tokio::time::Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            return match self.error("looking at the container", error) {
                error if error.kind() == ErrorKind::NotFound => Ok(None),
                error => Err(error),
            };
        }
    }

    /// Whether the container runs. One that is gone does not.
    pub(crate) async fn is_running(&self, id: &str) -> Result<bool> {
        let inspect = self.inspect(id).await?;
        let state = inspect.and_then(|inspect| inspect.state);
        Ok(state.is_some_and(|state| state.running == Some(true) && state.paused != Some(true)))
    }

    /// Whether a path exists in the container, started or not.
    pub(crate) async fn path_exists(&self, id: &str, path: &Path) -> Result<bool> {
        let options = ContainerArchiveInfoOptionsBuilder::default().path(&path.to_string_lossy());
        match self.client.get_container_archive_info(id, Some(options.build())).await {
            Ok(_) => Ok(true),
            Err(error) => match self.error("looking for a path", error) {
                error if error.kind() == ErrorKind::NotFound => Ok(false),
                error => Err(error),
            },
        }
    }

    /// Unpacks a tar archive in the container, started or not.
    pub(crate) async fn upload(&self, id: &str, dir: &Path, tar: Vec<u8>) -> Result<()> {
        let options = UploadToContainerOptionsBuilder::default().path(&dir.to_string_lossy());
        let body = bollard::body_full(Bytes::from(tar));
        let uploaded = self.client.upload_to_container(id, Some(options.build()), body).await;
        uploaded.map_err(|error| self.error("copying into the container", error))
    }

    /// Reads a small file of the container, started or not; `None` if there is none.
    pub(crate) async fn small_file(&self, id: &str, path: &Path) -> Result<Option<Vec<u8>>> {
        let options = DownloadFromContainerOptionsBuilder::default().path(&path.to_string_lossy());
        let mut stream = self.client.download_from_container(id, Some(options.build()));
        let mut archive = Vec::new();
        while let Some(chunk) = stream.next().await {
            match chunk {
                Ok(chunk) if archive.len() + chunk.len() <= SMALL_FILE => archive.extend_from_slice(&chunk),
                Ok(_) => {
                    let message = format!("{} in the container is too large to be read", path.display());
                    return Err(Error::new(ErrorKind::LimitExceeded, message));
                }
                Err(error) => match self.error("reading from the container", error) {
                    error if error.kind() == ErrorKind::NotFound => return Ok(None),
                    error => return Err(error),
                },
            }
        }
        crate::wire::archive::first_file(&archive)
    }

    /// Kills and removes a container with its anonymous volumes, and returns when it is gone. One that is gone already
    /// is a success.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout) after [`DELETE_TIMEOUT`], and what the engine says: it may still exist.
    pub(crate) async fn delete(&self, id: &str) -> Result<()> {
        match tokio::time::timeout(DELETE_TIMEOUT, self.delete_unbounded(id)).await {
            Ok(deleted) => deleted,
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                format!("the container was not gone within {DELETE_TIMEOUT:?}"),
            )),
        }
    }

    async fn delete_unbounded(&self, id: &str) -> Result<()> {
        if self.kind == EngineKind::Podman {
            // Its removal would first ask process 1 to end and wait for ten seconds.
            let options = KillContainerOptionsBuilder::default().signal("SIGKILL").build();
            if let Err(error) = self.client.kill_container(id, Some(options)).await {
                let error = self.error("killing the container", error);
                tracing::trace!(%error, "not killed");
            }
        }
        let mut delay = Duration::from_millis(10);
        loop {
            let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
            let Err(error) = self.client.remove_container(id, Some(options)).await else {
                return Ok(());
            };
            let error = self.error("removing the container", error);
            match error.kind() {
                ErrorKind::NotFound => return Ok(()),
                // Somebody else removes it at this moment, or it is between two states.
                ErrorKind::AlreadyExists | ErrorKind::SandboxGone => {}
                ErrorKind::Other if self.inspect(id).await?.is_none() => return Ok(()),
                _ => return Err(error),
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(Duration::from_millis(500));
            if self.inspect(id).await?.is_none() {
                return Ok(());
            }
        }
    }

    /// The id of the container of this engine name that is ours by its label. `may_come` is for one whose creation was
    /// asked for and not answered: it may still turn up.
    ///
    /// # Errors
    /// What keeps the engine from telling.
    pub(crate) async fn find_ours(&self, container: &str, name: &str, may_come: bool) -> Result<Option<String>> {
        let until = tokio::time::Instant::now() + LATE_ARRIVAL;
        loop {
            if let Some(found) = self.inspect(container).await? {
                return Ok(is_ours(&found, name).then_some(found.id).flatten());
            }
            if !may_come || tokio::time::Instant::now() > until {
                return Ok(None);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Ids of all containers with these labels.
    pub(crate) async fn labelled(&self, labels: &[(&str, &str)]) -> Result<Vec<String>> {
        let labels = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let filters = HashMap::from([("label".to_owned(), labels)]);
        let options = bollard::query_parameters::ListContainersOptionsBuilder::default()
            .all(true)
            .filters(&filters)
            .build();
        let listed = self.client.list_containers(Some(options)).await;
        let listed = listed.map_err(|error| self.error("listing containers", error))?;
        Ok(listed.into_iter().filter_map(|container| container.id).collect())
    }
}

/// Whether a container carries our label with this name.
pub(crate) fn is_ours(container: &ContainerInspectResponse, name: &str) -> bool {
    let labels = container.config.as_ref().and_then(|config| config.labels.as_ref());
    labels.and_then(|labels| labels.get(NAME_LABEL)).map(String::as_str) == Some(name)
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("kind", &self.kind)
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}
