//! One box of namespaces as a [`Runtime`].

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Map, Value};

use super::launch::{self, Keeper, blocking, bytes};
use super::{WORKDIR, box_user, copy, view};
use crate::box_network::BoxNetwork;
use crate::capability::Capabilities;
use crate::collect::collect;
use crate::command::{Collect, Env, Exec, Output};
use crate::config::RuntimeConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::files::{ByteStream, Content, DirEntry, Metadata, WriteOptions};
use crate::guest::GuestBox;
use crate::guest::frame::List;
use crate::guest::plan::Plan;
use crate::network::{Policy, Routes};
use crate::process::Process;
use crate::runtime::{BoxSpec, Runtime};
use crate::subprocess::SubprocessConfig;
use crate::subprocess::config::{ISOLATED, TAG};
use crate::subprocess::runtime::{CLAIM, DIR, OwnerIs, PARENT, create_directory, delete_directory};

/// The host's variables that a box gets. `PATH` only with the host's files.
const INHERITED: [&str; 4] = ["LANG", "LC_ALL", "LC_CTYPE", "TZ"];
/// Bytes of files in memory unless told otherwise: 4 GB.
const MEMORY_FILES: u64 = 4_000_000_000;
/// What a core's size limit must be so that the kernel neither writes one nor hands it to a program of the host.
const NO_CORE: u64 = 1;

mod resource {
    pub(super) const CPU: u32 = 0;
    pub(super) const FILE_SIZE: u32 = 1;
    pub(super) const CORE: u32 = 4;
    pub(super) const PROCESSES: u32 = 6;
    pub(super) const ADDRESS_SPACE: u32 = 9;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whose the directory of the box is, and the process that keeps the box.
#[derive(Debug, Default)]
enum State {
    #[default]
    Nothing,
    /// The directory is ours; there is a keeper once the box stands.
    Ours(Option<Keeper>),
    /// Deleted, or never to be made.
    Gone,
}

/// One box of namespaces.
pub struct IsolatedRuntime {
    config: SubprocessConfig,
    spec: BoxSpec,
    dir: PathBuf,
    /// Random; beside the directory while it is this box's.
    claim: String,
    state: Arc<Mutex<State>>,
    guest: OnceLock<Arc<GuestBox>>,
    network: OnceLock<BoxNetwork>,
    layered: OnceLock<&'static str>,
}

impl IsolatedRuntime {
    /// The handle on a box that does not exist yet.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a cache directory that cannot be one.
    pub(crate) fn new(config: SubprocessConfig, spec: BoxSpec) -> Result<Self> {
        let dir = spec.cache.join(PARENT)?.join(&spec.name);
        Ok(Self {
            config,
            spec,
            dir,
            claim: crate::names::random_id(),
            state: Arc::default(),
            guest: OnceLock::new(),
            network: OnceLock::new(),
            layered: OnceLock::new(),
        })
    }

    fn network(&self) -> Result<&BoxNetwork> {
        let missing = || Error::new(ErrorKind::Phase, "the box does not exist yet");
        self.network.get().ok_or_else(missing)
    }

    /// What a program gets besides the caller's variables: the way to the proxy.
    fn with_network(&self, mut exec: Exec, background: bool) -> Result<Exec> {
        let variables = self.network()?.environment(&exec.env, background);
        exec.env = exec.env.layered(&variables);
        Ok(exec)
    }

    fn guest(&self) -> Result<&Arc<GuestBox>> {
        self.guest
            .get()
            .ok_or_else(|| Error::new(ErrorKind::Phase, "the box does not exist yet"))
    }

    /// Makes the directory of the box, and in it those for what the box changes.
    fn prepare(&self) -> impl FnOnce() -> Result<()> + Send + 'static {
        let (dir, claim, cache) = (self.dir.clone(), self.claim.clone(), self.spec.cache.clone());
        let (state, is_layered) = (self.state.clone(), self.config.root_directory().is_some());
        move || {
            cache.create_dir(PARENT)?;
            let mut state = lock(&state);
            if let State::Gone = *state {
                return Err(Error::new(ErrorKind::SandboxGone, "the sandbox was deleted already"));
            }
            create_directory(&dir, &claim)?;
            *state = State::Ours(None);
            let user = box_user();
            launch::make_for(user, &dir.join("work"))?;
            if is_layered {
                launch::make_for(user, &dir.join("upper"))?;
                launch::make_for(user, &dir.join("overlay"))?;
                // It becomes the root's mode.
                let mode = fs::Permissions::from_mode(0o755);
                let upper = dir.join("upper");
                fs::set_permissions(&upper, mode)
                    .map_err(|error| Error::io(format_args!("creating {}", upper.display()), error))?;
            }
            Ok(())
        }
    }

    fn plan(&self) -> Result<Plan> {
        let variable = |name: &str| std::env::var_os(name);
        let root = match self.config.root_directory() {
            None => None,
            Some(root) => {
                let wrong = |error| super::wrong("root".to_owned(), root, &error);
                let root = fs::canonicalize(root).map_err(wrong)?;
                if !root.is_dir() {
                    return Err(Error::invalid_config(
                        "root",
                        format!("{} is not a directory", root.display()),
                    ));
                }
                Some(root)
            }
        };
        let hidden = match &root {
            None => view::hidden(variable, view::home(), self.spec.cache.path()),
            Some(_) => Vec::new(),
        };
        let is_layered = root.is_some();
        let gigabytes = |value: f64| (value * 1e9) as u64;
        let limits = [
            (resource::CORE, Some(NO_CORE)),
            (resource::CPU, self.config.cpu_seconds),
            (resource::FILE_SIZE, self.config.file_size.map(gigabytes)),
            (resource::PROCESSES, self.config.pids_limit),
            (resource::ADDRESS_SPACE, self.config.memory.map(gigabytes)),
        ];
        Ok(Plan {
            probe: false,
            stage: bytes(&self.dir),
            root: root.map(|root| bytes(&root)),
            layer: is_layered.then(|| (bytes(&self.dir.join("upper")), bytes(&self.dir.join("overlay")))),
            copied: false,
            work: Some(bytes(&self.dir.join("work"))),
            workdir: WORKDIR.as_bytes().to_vec(),
            hidden: List(hidden.iter().map(|path| bytes(path)).collect()),
            shown: List(view::shown(&self.config)?),
            user: box_user(),
            limits: List(
                limits
                    .into_iter()
                    .filter_map(|(number, value)| Some((number, value?)))
                    .collect(),
            ),
            memory_files: self.config.memory.map_or(MEMORY_FILES, gigabytes),
            hostname: self.spec.name.clone().into_bytes(),
        })
    }

    /// Starts the guest, over a copy of the root where the kernel gives it no layer.
    async fn launch(&self, mut plan: Plan) -> Result<(Keeper, crate::guest::Link)> {
        let cache = self.spec.cache.clone();
        let program = blocking(move || launch::keep_program(&cache)).await?;
        let layered = launch::launch(program.clone(), &self.dir, &plan).await;
        let error = match (layered, &plan.root) {
            (Err(error), Some(_)) if launch::is_about_the_layer(&error) => error,
            (launched, root) => {
                if root.is_some() {
                    let _ = self.layered.set("overlay");
                }
                return launched;
            }
        };
        tracing::info!(%error, "the kernel gives the box no layer over its root: it gets a copy");
        let (from, to) = (self.config.root.clone(), self.dir.join("root"));
        plan.root = Some(bytes(&to));
        plan.layer = None;
        plan.copied = true;
        blocking(move || {
            let user = box_user();
            let from =
                fs::canonicalize(&from).map_err(|error| super::wrong("root".to_owned(), Path::new(&from), &error))?;
            copy::tree(&from, &to, user.is_some())?;
            std::os::unix::fs::chown(&to, user, user).map_err(|error| Error::io("giving the root to the box", error))
        })
        .await?;
        let _ = self.layered.set("copy");
        launch::launch(program, &self.dir, &plan).await
    }

    /// The variables under the caller's.
    fn base_environment(&self) -> Env {
        let mut env = Env::new();
        let path = self.config.root_directory().is_none().then_some("PATH");
        for name in INHERITED.into_iter().chain(path) {
            if let Some(value) = std::env::var_os(name) {
                env.set(name, value);
            }
        }
        env
    }
}

#[async_trait]
impl Runtime for IsolatedRuntime {
    fn provider(&self) -> &'static str {
        TAG
    }

    fn id(&self) -> Option<String> {
        Some(self.dir.to_string_lossy().into_owned())
    }

    fn capabilities(&self) -> Capabilities {
        ISOLATED
    }

    fn workdir(&self) -> PathBuf {
        WORKDIR.into()
    }

    fn details(&self) -> Map<String, Value> {
        let mut details = Map::new();
        details.insert("isolation".to_owned(), Value::from("namespaces"));
        if let Some(way) = self.layered.get() {
            details.insert("root_by".to_owned(), Value::from(*way));
        }
        details
    }

    fn lease_context(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            (DIR.to_owned(), self.dir.to_string_lossy().into_owned()),
            (CLAIM.to_owned(), self.claim.clone()),
        ])
    }

    async fn create(&self) -> Result<()> {
        let plan = self.plan()?;
        blocking(self.prepare()).await?;
        let (keeper, link) = self.launch(plan).await?;
        match &mut *lock(&self.state) {
            State::Ours(place) => *place = Some(keeper),
            // Deleted meanwhile; the keeper ends the box as it is dropped.
            _ => return Err(Error::new(ErrorKind::SandboxGone, "the sandbox was deleted already")),
        }
        let mut guest = GuestBox::new(link);
        guest.outside = box_user();
        let base = self.base_environment();
        guest.prepare("", &base).await?;
        let network = BoxNetwork::builder(self.spec.name.as_str(), guest.link.clone())
            .policy(self.config.policy().unwrap_or_default())
            .proxied(true)
            .image_env(base)
            .start()
            .await?;
        let _ = self.network.set(network);
        let _ = self.guest.set(Arc::new(guest));
        Ok(())
    }

    async fn delete(&self) -> Result<()> {
        if let Some(guest) = self.guest.get() {
            guest.close();
        }
        if let Some(network) = self.network.get() {
            network.stop().await;
        }
        let state = self.state.clone();
        let (dir, name, claim) = (self.dir.clone(), self.spec.name.clone(), self.claim.clone());
        let ours = blocking(move || {
            let mut state = lock(&state);
            match &mut *state {
                State::Nothing => {
                    *state = State::Gone;
                    Ok(false)
                }
                State::Gone => Ok(false),
                State::Ours(keeper) => match keeper.take() {
                    Some(keeper) => keeper.end().map(|()| true),
                    None => Ok(true),
                },
            }
        });
        if !ours.await? {
            return Ok(());
        }
        // With the keeper, every process of the box is gone.
        delete_directory(&name, &dir, &claim, OwnerIs::Alive { started: false }).await?;
        *lock(&self.state) = State::Gone;
        Ok(())
    }

    async fn spawn(&self, exec: Exec) -> Result<Process> {
        let exec = self.with_network(exec, false)?;
        self.guest()?.spawn(&exec).await
    }

    async fn run(&self, exec: Exec, options: Collect) -> Result<Output> {
        let exec = self.with_network(exec, false)?;
        let guest = self.guest()?;
        match collect(guest.spawn(&exec).await?, options).await {
            // Its streams broke with the link: the reason is the box's end.
            Err(mut error) if error.kind() == ErrorKind::ConnectionLost => {
                let partial = error.take_partial_output().unwrap_or_default();
                let error = guest.link.check().err().unwrap_or(error);
                Err(error.with_partial_output(partial))
            }
            ended => ended,
        }
    }

    async fn spawn_background(&self, exec: Exec, log: &Path) -> Result<()> {
        let exec = self.with_network(exec, true)?;
        self.guest()?.spawn_background(&exec, log).await
    }

    async fn alive(&self) -> Result<()> {
        self.guest()?.link.ping().await
    }

    async fn open(&self, path: &Path, limit: Option<u64>) -> Result<ByteStream> {
        self.guest()?.open(path, limit).await
    }

    async fn read(&self, path: &Path, limit: u64) -> Result<Bytes> {
        self.guest()?.read(path, limit).await
    }

    async fn write(&self, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
        self.guest()?.write(path, content, options).await
    }

    async fn stat(&self, path: &Path) -> Result<Metadata> {
        self.guest()?.stat(path).await
    }

    async fn list(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.guest()?.list(path).await
    }

    async fn create_dir(&self, path: &Path) -> Result<()> {
        self.guest()?.create_dir(path).await
    }

    async fn remove(&self, path: &Path, recursive: bool) -> Result<()> {
        self.guest()?.remove(path, recursive).await
    }

    async fn upload_tar(&self, dir: &Path, tar: ByteStream) -> Result<()> {
        self.guest()?.upload_tar(dir, tar).await
    }

    async fn download_tar(&self, dir: &Path) -> Result<ByteStream> {
        self.guest()?.download_tar(dir).await
    }

    async fn expose(&self, port: u16) -> Result<String> {
        self.guest()?.expose(port).await
    }

    async fn host_url(&self, url: &str) -> Result<String> {
        self.network()?.host_url(url).await
    }

    fn egress_log(&self) -> Option<crate::egress::EgressLog> {
        Some(self.network.get()?.log().clone())
    }

    async fn open_network(&self) -> Result<()> {
        // There is none to give back: setup has the proxy, as every other phase.
        self.network()?.open(async { Ok(()) }).await
    }

    async fn restrict_network(&self, policy: &Policy, routes: &Routes) -> Result<()> {
        self.network()?.close(policy, routes, async { Ok(()) }).await
    }
}
