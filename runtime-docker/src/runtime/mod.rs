//! One container as a [`Runtime`].

mod network;
mod orphan;
mod provision;
mod way;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use runtime_core::egress::EgressLog;
use runtime_core::guest::{GuestBox, Rendezvous};
use runtime_core::network::{Policy, Routes, no_proxy_env};
use runtime_core::{
    BoxSpec, ByteStream, Capabilities, Collect, Content, DirEntry, Env, Error, ErrorKind, Exec, Metadata, Output,
    PartialOutput, Process, Result, Runtime, WriteOptions, collect,
};
use serde_json::{Map, Value};
use tokio::sync::watch;

use self::network::BoxNet;
pub(crate) use self::orphan::delete_orphan;
use self::way::Way;
use crate::config::{ContainerConfig, EngineKind, ExecMode};
use crate::connect::{self, Surroundings};
use crate::engine::Engine;
use crate::exec::Commands;
use crate::{SERVICE_PORT, capabilities, image};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enum Backend {
    Guest(Arc<GuestBox>),
    Engine(Arc<Commands>),
}

/// What is known once the box can be used.
struct Ready {
    backend: Backend,
    way: Way,
    /// `NO_PROXY` entries that the image brings.
    image_env: Env,
    service: Option<u16>,
    /// Only with a guest.
    network: Option<BoxNet>,
}

#[derive(Default)]
struct State {
    engine: Option<Engine>,
    id: Option<String>,
    /// A creation was asked for; whether there is a container is not known without its id.
    asked: bool,
    borrowed: bool,
}

/// One container of Docker or Podman.
pub struct ContainerRuntime {
    kind: EngineKind,
    config: ContainerConfig,
    spec: BoxSpec,
    /// Our name for the container, unique on every engine.
    name: String,
    state: Mutex<State>,
    ready: OnceLock<Ready>,
    stopping: watch::Sender<bool>,
}

impl ContainerRuntime {
    /// The handle on a container that does not exist yet.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) naming `allow` or `block` for a network policy that cannot be enforced:
    /// in engine mode and on a container that is somebody else's.
    pub(crate) fn new(kind: EngineKind, config: ContainerConfig, spec: BoxSpec) -> Result<Self> {
        config.check_policy()?;
        Ok(Self {
            kind,
            config,
            spec,
            name: runtime_core::names::random_object_name(),
            state: Mutex::default(),
            ready: OnceLock::new(),
            stopping: watch::Sender::new(false),
        })
    }

    /// What belongs to boxes of this engine on this host: the parent of their directories.
    fn directories(&self) -> PathBuf {
        Path::new("runtimes").join(self.kind.tag())
    }

    fn ready(&self) -> Result<&Ready> {
        self.ready
            .get()
            .ok_or_else(|| Error::new(ErrorKind::Phase, "the container does not exist yet"))
    }

    fn backend(&self) -> Result<&Backend> {
        Ok(&self.ready()?.backend)
    }

    /// The program's environment: what callers give, and the way to the network, past it or through our proxy.
    fn environment(&self, mut exec: Exec, background: bool) -> Result<Exec> {
        let ready = self.ready()?;
        let variables = match &ready.network {
            Some(network) => network.environment(&exec.env, background),
            None => no_proxy_env(&ready.image_env, &exec.env),
        };
        exec.env = exec.env.layered(&variables);
        Ok(exec)
    }

    /// The network of a box with a guest.
    fn network(&self) -> Result<&BoxNet> {
        let network = self.ready()?.network.as_ref();
        network.ok_or_else(|| self.config.no_policy("in engine mode, which has no guest to prove it"))
    }

    /// Removes what a way that did not work has left.
    async fn clear(&self, engine: &Engine) -> Result<()> {
        let id = lock(&self.state).id.clone();
        if let Some(id) = id {
            engine.delete(&id).await?;
            let mut state = lock(&self.state);
            state.id = None;
            state.asked = false;
        }
        self.remove_directory()
    }

    fn remove_directory(&self) -> Result<()> {
        let directory = self.spec.cache.join(self.directories())?.join(&self.name);
        Rendezvous::remove_directory(&directory)
    }
}

#[async_trait]
impl Runtime for ContainerRuntime {
    fn provider(&self) -> &'static str {
        self.kind.tag()
    }

    fn id(&self) -> Option<String> {
        let state = lock(&self.state);
        Some(state.id.as_ref()?.chars().take(12).collect())
    }

    fn capabilities(&self) -> Capabilities {
        match self.ready.get().map(|ready| (ready.way, &ready.backend)) {
            None => capabilities::of(self.kind, &self.config),
            Some((Way::Engine, Backend::Engine(commands))) => {
                capabilities::engine(self.kind, commands.is_local(), Some(&commands.engine.endpoint))
            }
            Some(_) => capabilities::of_guest(&self.config),
        }
    }

    fn workdir(&self) -> PathBuf {
        self.config.workdir().into()
    }

    fn details(&self) -> Map<String, Value> {
        let mut details = Map::new();
        details.insert("container".to_owned(), Value::from(self.name.clone()));
        let state = lock(&self.state);
        details.insert("borrowed".to_owned(), Value::from(state.borrowed));
        if let Some(engine) = &state.engine {
            details.insert("engine".to_owned(), Value::from(engine.endpoint.address()));
        }
        if let Some(ready) = self.ready.get() {
            details.insert("exec_mode".to_owned(), Value::from(ready.way.name()));
        }
        details
    }

    fn lease_context(&self) -> BTreeMap<String, String> {
        if self.config.container.is_some() {
            return BTreeMap::from([(orphan::BORROWED.to_owned(), "true".to_owned())]);
        }
        let reference = self.config.image.as_deref().unwrap_or(self.kind.default_image());
        let mut context = BTreeMap::from([
            (orphan::CONTAINER.to_owned(), self.name.clone()),
            (orphan::IMAGE.to_owned(), reference.to_owned()),
        ]);
        if let Ok(Some(endpoint)) = connect::find(self.kind, self.config.host.as_deref(), &Surroundings::current()) {
            context.insert(orphan::HOST.to_owned(), endpoint.address());
            // Whoever reaps may have another environment and stand elsewhere.
            if let Some(certs) = endpoint.certs().and_then(|certs| std::path::absolute(certs).ok()) {
                context.insert(orphan::CERTS.to_owned(), certs.to_string_lossy().into_owned());
            }
        }
        if let Ok(directories) = self.spec.cache.join(self.directories()) {
            let directory = directories.join(&self.name);
            context.insert(orphan::DIRECTORY.to_owned(), directory.to_string_lossy().into_owned());
        }
        context
    }

    async fn create(&self) -> Result<()> {
        let engine = Engine::connect(self.kind, self.config.host.as_deref()).await?;
        lock(&self.state).engine = Some(engine.clone());
        if let Some(container) = &self.config.container {
            let ready = self.borrow(&engine, container).await?;
            let _ = self.ready.set(ready);
            return Ok(());
        }
        let reference = self.config.image.as_deref().unwrap_or(self.kind.default_image());
        let platform = self.config.platform.as_deref();
        let image = image::ensure(
            &engine.client,
            self.kind,
            &engine.endpoint,
            reference,
            platform,
            self.config.pull,
        );
        let image = image.await?;
        let ways = self.ways(&engine, &image)?;
        let mut failed = None;
        for way in ways {
            match self.create_one(&engine, &image, way).await {
                Ok(ready) => {
                    if self.config.exec == ExecMode::Auto {
                        way::remember(&engine.endpoint, &image.architecture, way);
                    }
                    let _ = self.ready.set(ready);
                    self.check_gpus().await?;
                    return Ok(());
                }
                Err(error) if way::is_about_the_way(&error) => {
                    tracing::info!(%error, way = way.name(), engine = %self.kind, "this way to the box does not work here");
                    self.clear(&engine).await?;
                    failed = failed.or(Some(error));
                }
                Err(error) => return Err(error),
            }
        }
        Err(failed.unwrap_or_else(|| Error::unsupported("there is no way to a box on this engine")))
    }

    async fn delete(&self) -> Result<()> {
        self.stopping.send_replace(true);
        let (engine, id, asked, borrowed) = {
            let state = lock(&self.state);
            (state.engine.clone(), state.id.clone(), state.asked, state.borrowed)
        };
        let backend = self.ready.get().map(|ready| &ready.backend);
        if borrowed {
            if let Some(Backend::Guest(guest)) = backend {
                leave(guest).await;
            }
            return Ok(());
        }
        if let Some(engine) = engine {
            let id = match id {
                Some(id) => Some(id),
                None if asked => engine.find_ours(&self.name, &self.spec.name, true).await?,
                None => None,
            };
            if let Some(id) = id {
                engine.delete(&id).await?;
            }
        }
        if let Some(Backend::Guest(guest)) = backend {
            guest.close();
        }
        if let Some(network) = self.ready.get().and_then(|ready| ready.network.as_ref()) {
            network.stop().await;
        }
        self.remove_directory()
    }

    async fn spawn(&self, exec: Exec) -> Result<Process> {
        let exec = self.environment(exec, false)?;
        match self.backend()? {
            Backend::Guest(guest) => guest.spawn(&exec).await,
            Backend::Engine(commands) => commands.spawn(exec).await,
        }
    }

    async fn run(&self, exec: Exec, mut options: Collect) -> Result<Output> {
        let exec = self.environment(exec, false)?;
        let started = tokio::time::Instant::now();
        let starts = async {
            match self.backend()? {
                Backend::Guest(guest) => guest.spawn(&exec).await,
                Backend::Engine(commands) => commands.spawn_collected(exec).await,
            }
        };
        // An engine that stalls must not outlast the caller's deadline.
        let process = match options.timeout {
            None => starts.await?,
            Some(timeout) => match tokio::time::timeout(timeout, starts).await {
                Ok(process) => process?,
                Err(_) => {
                    let message = format!("the program was not started within {timeout:?}");
                    return Err(Error::new(ErrorKind::Timeout, message).with_partial_output(PartialOutput::default()));
                }
            },
        };
        options.timeout = options.timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        match (collect(process, options).await, self.backend()?) {
            // Its streams broke with the link: the reason is the box's end.
            (Err(mut error), Backend::Guest(guest)) if error.kind() == ErrorKind::ConnectionLost => {
                Err(match (guest.link.check(), error.take_partial_output()) {
                    (Err(gone), partial) => gone.with_partial_output(partial.unwrap_or_default()),
                    (Ok(()), Some(partial)) => error.with_partial_output(partial),
                    (Ok(()), None) => error,
                })
            }
            (ended, _) => ended,
        }
    }

    async fn spawn_background(&self, exec: Exec, log: &Path) -> Result<()> {
        let exec = self.environment(exec, true)?;
        match self.backend()? {
            Backend::Guest(guest) => guest.spawn_background(&exec, log).await,
            Backend::Engine(commands) => commands.spawn_background(exec, log).await,
        }
    }

    async fn alive(&self) -> Result<()> {
        match self.backend()? {
            Backend::Guest(guest) => guest.link.ping().await,
            Backend::Engine(commands) => match commands.engine.is_running(&commands.container).await? {
                true => Ok(()),
                false => Err(Error::new(
                    ErrorKind::SandboxGone,
                    "the container does not run any more",
                )),
            },
        }
    }

    async fn open(&self, path: &Path, limit: Option<u64>) -> Result<ByteStream> {
        match self.backend()? {
            Backend::Guest(guest) => guest.open(path, limit).await,
            Backend::Engine(commands) => commands.open(path, limit).await,
        }
    }

    async fn read(&self, path: &Path, limit: u64) -> Result<Bytes> {
        match self.backend()? {
            Backend::Guest(guest) => guest.read(path, limit).await,
            Backend::Engine(commands) => commands.read(path, limit).await,
        }
    }

    async fn write(&self, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
        match self.backend()? {
            Backend::Guest(guest) => guest.write(path, content, options).await,
            Backend::Engine(commands) => commands.write(path, content, options).await,
        }
    }

    async fn stat(&self, path: &Path) -> Result<Metadata> {
        match self.backend()? {
            Backend::Guest(guest) => guest.stat(path).await,
            Backend::Engine(commands) => commands.stat(path).await,
        }
    }

    async fn list(&self, path: &Path) -> Result<Vec<DirEntry>> {
        match self.backend()? {
            Backend::Guest(guest) => guest.list(path).await,
            Backend::Engine(commands) => commands.list(path).await,
        }
    }

    async fn create_dir(&self, path: &Path) -> Result<()> {
        match self.backend()? {
            Backend::Guest(guest) => guest.create_dir(path).await,
            Backend::Engine(commands) => commands.create_dir(path).await,
        }
    }

    async fn remove(&self, path: &Path, recursive: bool) -> Result<()> {
        match self.backend()? {
            Backend::Guest(guest) => guest.remove(path, recursive).await,
            Backend::Engine(commands) => commands.remove(path, recursive).await,
        }
    }

    async fn upload_tar(&self, dir: &Path, tar: ByteStream) -> Result<()> {
        match self.backend()? {
            Backend::Guest(guest) => guest.upload_tar(dir, tar).await,
            Backend::Engine(commands) => commands.upload_tar(dir, tar).await,
        }
    }

    async fn download_tar(&self, dir: &Path) -> Result<ByteStream> {
        match self.backend()? {
            Backend::Guest(guest) => guest.download_tar(dir).await,
            Backend::Engine(commands) => commands.download_tar(dir).await,
        }
    }

    async fn expose(&self, port: u16) -> Result<String> {
        let ready = self.ready()?;
        match (&ready.backend, ready.service) {
            (Backend::Guest(guest), _) => guest.expose(port).await,
            (Backend::Engine(commands), Some(service)) if port == SERVICE_PORT => {
                let host = commands.engine.endpoint.published_at();
                let host = host.ok_or_else(|| {
                    Error::unsupported("in engine mode a box publishes its port on the engine's host alone")
                })?;
                Ok(format!("http://{host}:{service}"))
            }
            _ => Err(Error::unsupported(format!(
                "in engine mode a box publishes only port {SERVICE_PORT}"
            ))),
        }
    }

    async fn host_url(&self, url: &str) -> Result<String> {
        match &self.ready()?.network {
            Some(network) => network.host_url(url).await,
            None => Ok(url.to_owned()),
        }
    }

    fn egress_log(&self) -> Option<EgressLog> {
        let network = self.ready.get()?.network.as_ref()?;
        self.config.is_restricted().then(|| network.log())
    }

    async fn open_network(&self) -> Result<()> {
        self.network()?.open().await
    }

    async fn restrict_network(&self, policy: &Policy, routes: &Routes) -> Result<()> {
        self.network()?.close(policy, routes).await
    }

    fn published_port(&self) -> Option<u16> {
        Some(SERVICE_PORT)
    }
}

/// Leaves somebody else's container as it was found, but for what was done in it.
async fn leave(guest: &GuestBox) {
    const PATIENCE: Duration = Duration::from_secs(10);
    let left = async {
        let _ = guest.link.remove(Path::new("/.sandbox"), true).await;
        let _ = guest.link.shutdown(PATIENCE).await;
    };
    let _ = tokio::time::timeout(PATIENCE, left).await;
    guest.close();
}
