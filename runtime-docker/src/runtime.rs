//! One container as a [`Runtime`].

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use runtime_core::guest::{self, Rendezvous};
use runtime_core::{
    BoxSpec, ByteStream, Capabilities, Collect, Content, DirEntry, Env, Error, ErrorKind, Exec, Metadata, Output,
    PartialOutput, Process, Result, Runtime, StdinMode, WriteOptions, collect,
};
use serde_json::{Map, Value};
use tokio::sync::watch;

use crate::capabilities;
use crate::config::{ContainerConfig, EngineKind, ExecMode};
use crate::connect::{self, Endpoint, Surroundings};
use crate::engine::{self, Engine};
use crate::exec::{Commands, HostProcess};
use crate::guest::{GuestBox, start};
use crate::image::{self, Image};
use crate::wire::archive::{self, Entry};
use crate::wire::create::{self, Init};
use crate::{SERVICE_PORT, environment, gpu, users};

/// How a box is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Way {
    Socket,
    Stdio,
    Engine,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Socket => "socket",
            Self::Stdio => "stdio",
            Self::Engine => "engine",
        }
    }

    fn after(self) -> &'static [Way] {
        match self {
            Self::Socket => &[Self::Socket, Self::Stdio, Self::Engine],
            Self::Stdio => &[Self::Stdio, Self::Engine],
            Self::Engine => &[Self::Engine],
        }
    }
}

/// The first way that worked, by engine and architecture.
static WAYS: Mutex<Option<HashMap<(Endpoint, String), Way>>> = Mutex::new(None);

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
    /// [`Unsupported`](ErrorKind::Unsupported) naming `allow` or `block` for a network policy.
    pub(crate) fn new(kind: EngineKind, config: ContainerConfig, spec: BoxSpec) -> Result<Self> {
        config.refuse_policy()?;
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

    /// The program's environment: what callers give, and loopback past any proxy.
    fn environment(&self, mut exec: Exec) -> Result<Exec> {
        let image = &self.ready()?.image_env;
        for name in environment::NO_PROXY {
            let value = environment::no_proxy(image, &exec.env);
            exec.env.set(name, value);
        }
        Ok(exec)
    }

    /// The ways to try, the likeliest first.
    fn ways(&self, engine: &Engine, image: &Image) -> Result<Vec<Way>> {
        let runs_here = image.architecture.is_empty() || image.architecture == architecture();
        let no_guest = match guest::availability() {
            Err(reason) => Some(format!("this build has none: {reason}")),
            Ok(_) if !runs_here => Some(format!("the image is for {}", image.architecture)),
            Ok(_) => None,
        };
        let guest_ways: &[Way] = if engine.endpoint.is_local() {
            &[Way::Socket, Way::Stdio]
        } else {
            &[Way::Stdio]
        };
        match (self.config.exec, no_guest) {
            (ExecMode::Engine, _) | (ExecMode::Auto, Some(_)) => Ok(vec![Way::Engine]),
            (ExecMode::Guest | ExecMode::Stdio, Some(reason)) => {
                Err(Error::unsupported(format!("`exec` asks for the guest, but {reason}")).with_field("exec"))
            }
            (ExecMode::Guest, None) => Ok(guest_ways.to_vec()),
            (ExecMode::Stdio, None) => Ok(vec![Way::Stdio]),
            (ExecMode::Auto, None) => {
                let known = lock(&WAYS).as_ref().and_then(|ways| {
                    ways.get(&(engine.endpoint.clone(), image.architecture.clone()))
                        .copied()
                });
                Ok(known
                    .or(guest_ways.first().copied())
                    .unwrap_or(Way::Engine)
                    .after()
                    .to_vec())
            }
        }
    }

    async fn create_one(&self, engine: &Engine, image: &Image, way: Way) -> Result<Ready> {
        let socket;
        let stdio;
        let init;
        match way {
            Way::Socket => {
                let parent = self.spec.cache.join(self.directories())?;
                let kept = self.spec.cache.create_dir("runtimes")?;
                let made = start::Socket::new(&parent, &self.name, &kept)?;
                init = made.init(self.kind);
                (socket, stdio) = (Some(made), None);
            }
            Way::Stdio => {
                let made = start::Stdio::new()?;
                init = made.init();
                (socket, stdio) = (None, Some(made));
            }
            Way::Engine => {
                init = Init::KeepAlive;
                (socket, stdio) = (None, None);
            }
        }
        let body = create::request(self.kind, &self.config, &self.spec, &image.id, &init)?;
        lock(&self.state).asked = true;
        let platform = self.config.platform.as_deref();
        let id = match engine.create(&self.name, platform, body).await {
            // The engine's own init is a program that not every host has. Without it orphans stay zombies.
            Err(error)
                if way == Way::Engine && self.config.init.is_none() && error.message().contains("init binary") =>
            {
                tracing::debug!(%error, "process 1 will not reap");
                let mut plain = self.config.clone();
                plain.init = Some(false);
                let body = create::request(self.kind, &plain, &self.spec, &image.id, &init)?;
                engine.create(&self.name, platform, body).await?
            }
            created => created?,
        };
        lock(&self.state).id = Some(id.clone());
        let user = self.config.user.as_deref().unwrap_or(&image.user);
        let image_env = environment::parse(&image.env);
        let link = match (socket, stdio) {
            (Some(socket), _) => socket.start(engine, &id).await?,
            (None, Some(stdio)) => stdio.start(engine, &id).await?,
            (None, None) => {
                let commands = self.start_engine_mode(engine, &id, user).await?;
                let service = self.published(engine, &id).await?;
                return Ok(Ready {
                    backend: Backend::Engine(Arc::new(commands)),
                    way,
                    image_env,
                    service: Some(service),
                });
            }
        };
        let mut guest = GuestBox::new(link);
        guest
            .prepare(user, &environment::base(self.kind, &image_env, &id))
            .await?;
        let workdir = Path::new(self.config.workdir());
        // What is there already stays as it is, a link to a directory too.
        guest
            .create_dir(workdir)
            .await
            .map_err(|error| error.with_field("workdir"))?;
        crate::guest::watch_end(&guest.link, engine.clone(), id, self.stopping.subscribe());
        Ok(Ready {
            backend: Backend::Guest(Arc::new(guest)),
            way,
            image_env,
            service: None,
        })
    }

    /// Makes the workdir, starts the container and looks at its process 1.
    async fn start_engine_mode(&self, engine: &Engine, id: &str, user: &str) -> Result<Commands> {
        self.upload_workdir(engine, id, user).await?;
        engine.start(id).await.map_err(|error| match error.kind() {
            ErrorKind::ProgramNotFound | ErrorKind::ProgramNotExecutable => without_sleep().with_source(error),
            _ => error,
        })?;
        self.commands(engine, id).await
    }

    async fn commands(&self, engine: &Engine, id: &str) -> Result<Commands> {
        let inspect = engine.inspect(id).await?;
        let state = inspect.and_then(|inspect| inspect.state).unwrap_or_default();
        if state.running != Some(true) {
            let code = state.exit_code.unwrap_or_default();
            return Err(match code {
                126 | 127 => without_sleep(),
                _ => Error::new(
                    ErrorKind::SandboxGone,
                    format!(
                        "the container ended at once with {code}: {}",
                        state.error.unwrap_or_default()
                    ),
                ),
            });
        }
        let init = match engine.endpoint.is_local() {
            true => state.pid.and_then(|pid| HostProcess::open(pid, id)),
            false => None,
        };
        Ok(Commands {
            engine: engine.clone(),
            container: id.to_owned(),
            init,
        })
    }

    /// A missing workdir, owned by the box's user, before anything runs.
    async fn upload_workdir(&self, engine: &Engine, id: &str, user: &str) -> Result<()> {
        let workdir = Path::new(self.config.workdir());
        let mut missing = Vec::new();
        let mut base = Path::new("/");
        for dir in workdir.ancestors() {
            if dir.parent().is_none() || engine.path_exists(id, dir).await? {
                base = dir;
                break;
            }
            missing.push(dir);
        }
        let Some(last) = missing.first().copied() else {
            return Ok(());
        };
        let owner = if users::is_root(user) {
            users::Ids::default()
        } else {
            let file = |path: &'static str| async move {
                let content = engine.small_file(id, Path::new(path)).await?;
                Ok::<_, Error>(String::from_utf8_lossy(&content.unwrap_or_default()).into_owned())
            };
            users::resolve(user, &file("/etc/passwd").await?, &file("/etc/group").await?)?
        };
        let mut entries = Vec::new();
        for dir in missing.iter().rev() {
            let Ok(path) = dir.strip_prefix(base) else { continue };
            entries.push(Entry {
                path,
                mode: 0o755,
                owner: if *dir == last { (owner.uid, owner.gid) } else { (0, 0) },
                content: None,
            });
        }
        let uploaded = engine.upload(id, base, archive::pack(&entries)?).await;
        uploaded.map_err(|error| error.with_field("workdir"))
    }

    /// The port of this host behind which the engine serves the box's one port.
    async fn published(&self, engine: &Engine, id: &str) -> Result<u16> {
        let missing = || {
            Error::new(
                ErrorKind::Protocol,
                format!("the engine did not publish port {SERVICE_PORT}"),
            )
        };
        let inspect = engine.inspect(id).await?.ok_or_else(missing)?;
        let ports = inspect
            .network_settings
            .and_then(|network| network.ports)
            .unwrap_or_default();
        let bindings = ports
            .get(&format!("{SERVICE_PORT}/tcp"))
            .cloned()
            .flatten()
            .unwrap_or_default();
        bindings
            .iter()
            .find_map(|binding| binding.host_port.as_deref()?.parse().ok())
            .ok_or_else(missing)
    }

    /// Takes somebody else's running container.
    async fn borrow(&self, engine: &Engine, container: &str) -> Result<Ready> {
        let found = engine.inspect(container).await?.ok_or_else(|| {
            let message = format!("{} has no container `{container}`", self.kind);
            Error::new(ErrorKind::NotFound, message).with_field("container")
        })?;
        let state = found.state.unwrap_or_default();
        if state.running != Some(true) {
            let message = format!("the container `{container}` does not run");
            return Err(Error::new(ErrorKind::SandboxGone, message).with_field("container"));
        }
        let id = found.id.unwrap_or_default();
        {
            let mut state = lock(&self.state);
            state.id = Some(id.clone());
            state.borrowed = true;
        }
        let config = found.config.unwrap_or_default();
        let user = config.user.unwrap_or_default();
        let image_env = environment::parse(&config.env.unwrap_or_default());
        if self.config.exec != ExecMode::Engine {
            match self.borrow_by_guest(engine, &id, &user, &image_env).await {
                Ok(guest) => {
                    return Ok(Ready {
                        backend: Backend::Guest(Arc::new(guest)),
                        way: Way::Stdio,
                        image_env,
                        service: None,
                    });
                }
                Err(error) if self.config.exec == ExecMode::Auto => {
                    tracing::info!(%error, container, "no guest can be started here: the engine's exec is used");
                }
                Err(error) => return Err(error),
            }
        }
        let commands = Arc::new(self.commands(engine, &id).await?);
        commands.create_dir(Path::new(self.config.workdir())).await?;
        Ok(Ready {
            service: self.published(engine, &id).await.ok(),
            backend: Backend::Engine(commands),
            way: Way::Engine,
            image_env,
        })
    }

    async fn borrow_by_guest(&self, engine: &Engine, id: &str, user: &str, image_env: &Env) -> Result<GuestBox> {
        let link = start::in_foreign(engine, id).await?;
        let mut guest = GuestBox::new(link);
        guest
            .prepare(user, &environment::base(self.kind, image_env, id))
            .await?;
        guest.create_dir(Path::new(self.config.workdir())).await?;
        Ok(guest)
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

/// What a failed way may be followed by another for: not what would fail there too.
fn is_about_the_way(error: &Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::InvalidConfig
            | ErrorKind::InvalidArgument
            | ErrorKind::Unauthorized
            | ErrorKind::RateLimited
            | ErrorKind::ResourceExhausted
            | ErrorKind::AlreadyExists
            | ErrorKind::NotFound
    ) || error.message().contains("mount")
}

fn without_sleep() -> Error {
    Error::unsupported("engine mode keeps a container alive with the image's own `sleep`, which this image lacks")
        .with_field("exec")
}

/// This program's architecture as images name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
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
                capabilities::engine(commands.is_local(), commands.engine.endpoint.is_local())
            }
            Some(_) => capabilities::guest(),
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
        let mut context = BTreeMap::from([("container".to_owned(), self.name.clone())]);
        if let Ok(Some(endpoint)) = connect::find(self.kind, self.config.host.as_deref(), &Surroundings::current()) {
            context.insert("host".to_owned(), endpoint.address());
        }
        if let Ok(directories) = self.spec.cache.join(self.directories()) {
            let directory = directories.join(&self.name);
            context.insert("dir".to_owned(), directory.to_string_lossy().into_owned());
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
                        let key = (engine.endpoint.clone(), image.architecture.clone());
                        lock(&WAYS).get_or_insert_default().insert(key, way);
                    }
                    let _ = self.ready.set(ready);
                    self.check_gpus().await?;
                    return Ok(());
                }
                Err(error) if is_about_the_way(&error) => {
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
        self.remove_directory()
    }

    async fn spawn(&self, exec: Exec) -> Result<Process> {
        let exec = self.environment(exec)?;
        match self.backend()? {
            Backend::Guest(guest) => guest.spawn(&exec).await,
            Backend::Engine(commands) => commands.spawn(exec).await,
        }
    }

    async fn run(&self, exec: Exec, mut options: Collect) -> Result<Output> {
        let exec = self.environment(exec)?;
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
        let exec = self.environment(exec)?;
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
                let host = commands.engine.endpoint.host();
                Ok(format!("http://{host}:{service}"))
            }
            _ => Err(Error::unsupported(format!(
                "in engine mode a box publishes only port {SERVICE_PORT}"
            ))),
        }
    }

    fn published_port(&self) -> Option<u16> {
        Some(SERVICE_PORT)
    }
}

impl ContainerRuntime {
    /// Docker takes a number of GPUs only; whether they are of the wanted type is asked in the box.
    async fn check_gpus(&self) -> Result<()> {
        let wanted = self.config.gpus()?;
        let Some(gpu_type) = wanted
            .gpu_type()
            .filter(|gpu_type| !gpu_type.is_empty() && wanted.is_requested())
        else {
            return Ok(());
        };
        if self.kind != EngineKind::Docker {
            return Ok(());
        }
        let exec = Exec {
            argv: gpu::QUERY.map(Into::into).to_vec(),
            env: Env::new(),
            workdir: "/".into(),
            stdin: StdinMode::Null,
        };
        let options = Collect {
            stdin: None,
            timeout: Some(Duration::from_secs(60)),
            output_limit: 64 << 10,
            sink: None,
        };
        let output = self.run(exec, options).await.map_err(|error| {
            let message = format!("cannot verify the type of the GPUs: {}", error.message());
            Error::new(error.kind(), message).with_field("gpu").with_source(error)
        })?;
        gpu::verify(gpu_type, wanted.count(), output.success(), &output.stdout_lossy())
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
