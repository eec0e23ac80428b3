//! One box of namespaces as a [`Runtime`].

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Map, Value};

use super::cgroup::{self, Limits, NoCgroup, Place};
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
use crate::network::{Policy, Routes, no_proxy_env};
use crate::process::Process;
use crate::runtime::{BoxSpec, Runtime};
use crate::subprocess::config::{CGROUP, ISOLATED, TAG};
use crate::subprocess::runtime::{CLAIM, DIR, OwnerIs, PARENT, create_directory, delete_directory};
use crate::subprocess::{SetupNetwork, SubprocessConfig};

/// The host's variables that a box gets. `PATH` only with the host's files.
const INHERITED: [&str; 4] = ["LANG", "LC_ALL", "LC_CTYPE", "TZ"];
/// Bytes of files in memory unless told otherwise: 4 GB.
const MEMORY_FILES: u64 = 4_000_000_000;
/// What a core's size limit must be so that the kernel neither writes one nor hands it to a program of the host.
const NO_CORE: u64 = 1;

/// How long the kernel has to end what setup left.
const PATIENCE: Duration = Duration::from_secs(30);

fn gigabytes(value: f64) -> u64 {
    (value * 1e9) as u64
}

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
    /// Where the groups of boxes go, if the configuration limits what a group can.
    place: OnceLock<Option<Result<Place, NoCgroup>>>,
    /// Programs start on the host's network at present.
    outside: AtomicBool,
    /// How many processes the last cut ended; `u32::MAX` before the first.
    ended: AtomicU32,
}

/// No cut yet.
const NO_CUT: u32 = u32::MAX;

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
            place: OnceLock::new(),
            outside: AtomicBool::new(false),
            ended: AtomicU32::new(NO_CUT),
        })
    }

    fn network(&self) -> Result<&BoxNetwork> {
        let missing = || Error::new(ErrorKind::Phase, "the box does not exist yet");
        self.network.get().ok_or_else(missing)
    }

    /// What a program gets besides the caller's variables: the way to the proxy.
    fn with_network(&self, mut exec: Exec, background: bool) -> Result<Exec> {
        let variables = match self.outside.load(Ordering::Acquire) {
            true => no_proxy_env(&self.base_environment(), &exec.env),
            false => self.network()?.environment(&exec.env, background),
        };
        exec.env = exec.env.layered(&variables);
        Ok(exec)
    }

    fn guest(&self) -> Result<&Arc<GuestBox>> {
        self.guest
            .get()
            .ok_or_else(|| Error::new(ErrorKind::Phase, "the box does not exist yet"))
    }

    /// What a group limits for all processes of the box together.
    fn group_limits(&self) -> Limits {
        Limits {
            cpu: self.config.cpu,
            memory: self.config.memory.map(gigabytes),
            pids: self.config.pids_limit,
        }
    }

    /// Where the groups of boxes go, if there is anything for a group to limit.
    fn place(&self) -> Option<&Result<Place, NoCgroup>> {
        let limits = self.group_limits();
        let find = || (!limits.is_empty()).then(|| Place::find(&limits));
        self.place.get_or_init(find).as_ref()
    }

    /// The group of this box.
    fn group(&self) -> Option<PathBuf> {
        let place = self.place()?.as_ref().ok()?;
        Some(place.group(&self.spec.name, &self.claim))
    }

    /// Makes the group, if there is to be one.
    fn make_group(&self) -> Result<Option<PathBuf>> {
        match self.place() {
            None => Ok(None),
            Some(Err(missing)) => {
                tracing::info!(%missing, "the box's limits hold for each process");
                Ok(None)
            }
            Some(Ok(place)) => {
                let group = place.group(&self.spec.name, &self.claim);
                place.create(&group, &self.group_limits())?;
                Ok(Some(group))
            }
        }
    }

    fn allow_host_network(&self, allow: bool) -> Result<()> {
        match &*lock(&self.state) {
            State::Ours(Some(keeper)) => keeper.allow_host_network(allow),
            _ => Err(Error::new(ErrorKind::SandboxGone, "the sandbox was deleted")),
        }
    }

    /// Has programs start on the host's network, where setup has that.
    async fn go_outside(&self) -> Result<()> {
        if self.config.setup_network != SetupNetwork::Host {
            return Ok(());
        }
        let guest = self.guest()?;
        self.allow_host_network(true)?;
        guest.link.enter_host_network().await?;
        guest.set_outside(true);
        self.outside.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends every process that has the host's network, and has programs start in the box's.
    async fn come_back(&self) -> Result<()> {
        if self.config.setup_network != SetupNetwork::Host {
            return Ok(());
        }
        let guest = self.guest()?;
        self.outside.store(false, Ordering::Release);
        guest.set_outside(false);
        self.allow_host_network(false)?;
        let left = tokio::time::timeout(PATIENCE, guest.link.leave_host_network()).await;
        let ended = left.map_err(|_| {
            let message = format!("processes of setup with the host's network have not ended within {PATIENCE:?}");
            Error::new(ErrorKind::NetworkPolicy, message)
        })??;
        // A cut that is repeated ends nobody.
        if ended > 0 || self.ended.load(Ordering::Relaxed) == NO_CUT {
            self.ended.store(ended, Ordering::Relaxed);
        }
        if ended > 0 {
            tracing::info!(ended, "the processes of setup had the host's network, and were ended");
        }
        Ok(())
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
        let group = self.group();
        // What the group does is not done twice: an address space is more than the memory in it.
        let each = |value: Option<u64>| value.filter(|_| group.is_none());
        let limits = [
            (resource::CORE, Some(NO_CORE)),
            (resource::CPU, self.config.cpu_seconds),
            (resource::FILE_SIZE, self.config.file_size.map(gigabytes)),
            (resource::PROCESSES, each(self.config.pids_limit)),
            (resource::ADDRESS_SPACE, each(self.config.memory.map(gigabytes))),
        ];
        let mut shown = view::shown(&self.config)?;
        let host_network = self.config.setup_network == SetupNetwork::Host;
        if let Some(servers) = host_network.then(|| view::name_servers(root.as_deref())).flatten()
            && !shown.iter().any(|known| known.path == servers.path)
        {
            shown.push(servers);
        }
        Ok(Plan {
            probe: false,
            stage: bytes(&self.dir),
            root: root.map(|root| bytes(&root)),
            layer: is_layered.then(|| (bytes(&self.dir.join("upper")), bytes(&self.dir.join("overlay")))),
            copied: false,
            work: Some(bytes(&self.dir.join("work"))),
            workdir: WORKDIR.as_bytes().to_vec(),
            hidden: List(hidden.iter().map(|path| bytes(path)).collect()),
            shown: List(shown),
            user: box_user(),
            limits: List(
                limits
                    .into_iter()
                    .filter_map(|(number, value)| Some((number, value?)))
                    .collect(),
            ),
            memory_files: self.config.memory.map_or(MEMORY_FILES, gigabytes),
            oom_events: group.map(|group| bytes(&cgroup::events(&group))),
            host_network,
            hostname: self.spec.name.clone().into_bytes(),
        })
    }

    /// Starts the guest, over a copy of the root where the kernel gives it no layer.
    async fn launch(&self, mut plan: Plan, group: Option<&Path>) -> Result<(Keeper, crate::guest::Link)> {
        let cache = self.spec.cache.clone();
        let program = blocking(move || launch::keep_program(&cache)).await?;
        let layered = launch::launch(program.clone(), &self.dir, &plan, group).await;
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
        launch::launch(program, &self.dir, &plan, group).await
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
        if let Some(place) = self.place() {
            let way = if place.is_ok() { "cgroup" } else { "rlimits" };
            details.insert("limits_by".to_owned(), Value::from(way));
        }
        if self.config.setup_network == SetupNetwork::Host {
            details.insert("setup_network".to_owned(), Value::from("host"));
            let ended = self.ended.load(Ordering::Relaxed);
            if ended != NO_CUT {
                details.insert("ended_at_cut".to_owned(), Value::from(ended));
            }
        }
        details
    }

    fn lease_context(&self) -> BTreeMap<String, String> {
        let mut context = BTreeMap::from([
            (DIR.to_owned(), self.dir.to_string_lossy().into_owned()),
            (CLAIM.to_owned(), self.claim.clone()),
        ]);
        if let Some(group) = self.group() {
            context.insert(CGROUP.to_owned(), group.to_string_lossy().into_owned());
        }
        context
    }

    async fn create(&self) -> Result<()> {
        let plan = self.plan()?;
        if let Some(Err(missing)) = self.place()
            && self.config.cpu.is_some()
        {
            let message = format!("a box cannot be held to a number of cores here: {missing}");
            let error = Error::unsupported(message).with_field("cpu");
            return Err(error.with_source(missing.clone()));
        }
        blocking(self.prepare()).await?;
        let group = self.make_group()?;
        let (keeper, link) = self.launch(plan, group.as_deref()).await?;
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
        self.go_outside().await
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
        if let Some(group) = self.group() {
            blocking(move || cgroup::remove(&group)).await?;
        }
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
        let told = self.network()?.host_url(url).await?;
        if self.outside.load(Ordering::Acquire) && told != url {
            // Setup reaches it as it is, and the execution phase by a relay elsewhere: no one URL holds for both.
            let message = format!("in the box's own network it is {told}: ask for it after the cut");
            return Err(Error::unsupported(message).with_field("url"));
        }
        Ok(told)
    }

    fn egress_log(&self) -> Option<crate::egress::EgressLog> {
        Some(self.network.get()?.log().clone())
    }

    async fn open_network(&self) -> Result<()> {
        // As a rule there is none to give back: setup has the proxy, as every other phase.
        self.network()?.open(self.go_outside()).await
    }

    async fn restrict_network(&self, policy: &Policy, routes: &Routes) -> Result<()> {
        self.network()?.close(policy, routes, self.come_back()).await
    }
}
