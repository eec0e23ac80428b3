//! [`Sandbox`]: the box that people hold. Adds to a [`Runtime`] what is the same for every provider.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tracing::Instrument;

use crate::background;
use crate::cache::CacheDir;
use crate::command::Env;
use crate::config::RuntimeConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::layer::Layer;
use crate::lease::{Durability, Lease, LeasePolicy, Leasing};
use crate::network::{Policy, Routes};
use crate::runtime::{BoxSpec, Runtime};
use crate::scope::RunScope;
use crate::view::View;

/// How long a provision may take unless told otherwise: 20 minutes, since a first use may build an image.
const DEFAULT_BOOT_TIMEOUT: Duration = Duration::from_secs(20 * 60);

/// How long a change of the network may take in all.
const NETWORK_TIMEOUT: Duration = Duration::from_secs(120);

/// How often a failing delete is tried again before it is left to the lease.
const DELETE_ATTEMPTS: u32 = 5;

/// How long a creation that is under way may go on when its box is being stopped. A request that was sent is better
/// waited for: the box that it makes is then known.
const CREATE_GRACE: Duration = Duration::from_secs(10);

/// Where a box is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// Being created.
    Starting,
    /// Created; the network is open.
    Started,
    /// Claimed for trusted setup; the network is open.
    Setup,
    /// The policy is in force (or there is none) and untrusted programs may run.
    Executing,
    /// A change of the network was cut short or failed: no program may start until one succeeds.
    Unsettled,
    /// Being deleted.
    Stopping,
    /// Deleted, or given up on.
    Stopped,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Starting => "starting",
            Self::Started => "started",
            Self::Setup => "setup",
            Self::Executing => "executing",
            Self::Unsettled => "unsettled",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        })
    }
}

/// Prepares a [`Sandbox`].
pub struct Builder {
    config: Box<dyn RuntimeConfig>,
    name: Option<String>,
    env: Env,
    run_scope: Option<RunScope>,
    cache: CacheDir,
    boot_timeout: Duration,
    layers: Vec<Arc<dyn Layer>>,
    leasing: Leasing,
    reap_orphans: bool,
}

impl Builder {
    /// Our name for the box: letters, digits, `.`, `_` and `-`, at most 63. Default: `vf-` and twelve hex digits.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets a variable for every command of the box.
    #[must_use]
    pub fn env(mut self, name: impl Into<std::ffi::OsString>, value: impl Into<std::ffi::OsString>) -> Self {
        self.env.set(name, value);
        self
    }

    /// Sets all variables for every command of the box.
    #[must_use]
    pub fn envs(mut self, env: Env) -> Self {
        self.env = env;
        self
    }

    /// The run that the box belongs to. Default: `$VF_RUN_ID`, or one minted for this process.
    #[must_use]
    pub fn run_scope(mut self, scope: RunScope) -> Self {
        self.run_scope = Some(scope);
        self
    }

    /// Where files that outlive the process are kept. Default: [`CacheDir::from_env`].
    #[must_use]
    pub fn cache(mut self, cache: CacheDir) -> Self {
        self.cache = cache;
        self
    }

    /// How long the creation may take in all. Default: 20 minutes.
    #[must_use]
    pub fn boot_timeout(mut self, timeout: Duration) -> Self {
        self.boot_timeout = timeout;
        self
    }

    /// Puts a [layer](crate::layer) around the provider. The first one added is the outermost.
    #[must_use]
    pub fn layer(mut self, layer: impl Layer) -> Self {
        self.layers.push(Arc::new(layer));
        self
    }

    /// What to do when no lease can be written for the box. Default: it is not created.
    #[must_use]
    pub fn leases(mut self, policy: LeasePolicy) -> Self {
        self.leasing.policy = policy;
        self
    }

    /// Which death the lease must survive before the box is created. Default: that of the machine for boxes that
    /// outlive it, that of the process for boxes on this machine.
    #[must_use]
    pub fn lease_durability(mut self, durability: Durability) -> Self {
        self.leasing.durability = durability;
        self
    }

    /// Deletes boxes of dead owners first, once in a process and cache directory and for at most 30 s: those of the
    /// embedded runtime and of this configuration's provider. What cannot be deleted is logged. Default: no.
    #[must_use]
    pub fn reap_orphans(mut self, reap: bool) -> Self {
        self.reap_orphans = reap;
        self
    }

    /// Creates the box.
    ///
    /// # Errors
    /// [`InvalidConfig`](ErrorKind::InvalidConfig), [`InvalidArgument`](ErrorKind::InvalidArgument) and
    /// [`Lease`](ErrorKind::Lease) before anything is created; otherwise what the provider says, after what it left behind was deleted.
    ///
    /// # Cancellation
    /// When the future is dropped, a create that was sent is finished in the background and its box deleted.
    pub async fn provision(self) -> Result<Sandbox> {
        let Self {
            config,
            name,
            env,
            run_scope,
            cache,
            boot_timeout,
            layers,
            leasing,
            reap_orphans,
        } = self;
        let tag = config.tag();
        let refused = |error: Error| error.with_operation("provision").with_provider(tag);
        config.validate().map_err(refused)?;
        env.validate().map_err(refused)?;
        let name = match name {
            Some(name) => {
                crate::names::validate_sandbox_name(&name).map_err(refused)?;
                name
            }
            None => crate::names::random_sandbox_name(),
        };
        let executor = Handle::try_current().map_err(|_| {
            refused(Error::new(
                ErrorKind::Phase,
                "a sandbox is provisioned on a tokio runtime",
            ))
        })?;
        let spec = BoxSpec {
            name: name.clone(),
            run_scope: run_scope.unwrap_or_else(|| RunScope::current().clone()),
            env: env.clone(),
            cache,
        };
        crate::shutdown::refuse_new().map_err(refused)?;
        let runtime = config.build(spec.clone()).map_err(refused)?;
        let runtime = layers.iter().rev().fold(runtime, |inner, layer| layer.wrap(inner));
        if reap_orphans {
            crate::lease::reap_once(&*config, &spec.cache).await;
        }
        let lease = Lease::begin(leasing, &spec, &*runtime).await;
        let lease = lease.map_err(|error| refused(error.with_sandbox(&name, None)))?;
        // From here on the box is owned by `sandbox`: wherever this task ends, the box does too.
        let sandbox = Sandbox {
            view: View::new(Shared::new(runtime, config, spec.name.clone(), lease), env),
        };
        let span = tracing::info_span!("provision", provider = tag, sandbox = %name);
        let (sender, receiver) = oneshot::channel();
        let task = async move {
            let result = sandbox.create(&spec, boot_timeout).await;
            let created = match result {
                Ok(()) => Ok(sandbox),
                Err(error) => {
                    // Nothing may be left behind by a failed create.
                    let _ = sandbox.stop().await;
                    Err(error)
                }
            };
            // If nobody waits any more, the box comes back, is dropped, and that tears it down.
            drop(sender.send(created));
        };
        executor.spawn(task.instrument(span));
        match receiver.await {
            Ok(result) => result.map_err(refused),
            Err(_) => Err(refused(Error::new(
                ErrorKind::Cancelled,
                "the executor went away during the creation",
            ))),
        }
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("config", &self.config)
            .field("name", &self.name)
            .field("env", &self.env)
            .field("layers", &self.layers.len())
            .finish_non_exhaustive()
    }
}

/// A box and its whole life. Dropping it tears the box down.
///
/// Everything that one does *in* a box is on [`View`], to which a `Sandbox` dereferences: run programs, move files,
/// reach ports. The `Sandbox` itself is the ownership: there is one, and only it can [`stop`](Self::stop).
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use runtime_core::{Sandbox, subprocess::SubprocessConfig};
///
/// let sandbox = Sandbox::builder(SubprocessConfig::default()).env("GREETING", "hello").provision().await?;
/// sandbox.write("in.txt", "42\n").await?;
/// let output = sandbox.run(["sh", "-c", "echo $GREETING; cat in.txt; exit 3"]).await?;
/// assert_eq!(output.stdout_lossy(), "hello\n42\n");
/// assert_eq!(output.code(), Some(3));
/// sandbox.stop().await?;
/// # Ok::<(), runtime_core::Error>(()) }).unwrap();
/// ```
///
/// # Dropping
/// A dropped `Sandbox` is deleted in the background: inside an executor, outside one, and while one shuts down. At
/// process exit a hook waits up to 30 s for these deletions. Call [`stop`](Self::stop) to wait for the deletion and to
/// learn of its failure.
pub struct Sandbox {
    view: View,
}

impl Sandbox {
    /// Starts to build a box of this configuration.
    pub fn builder(config: impl Into<Box<dyn RuntimeConfig>>) -> Builder {
        Builder {
            config: config.into(),
            name: None,
            env: Env::new(),
            run_scope: None,
            cache: CacheDir::from_env(),
            boot_timeout: DEFAULT_BOOT_TIMEOUT,
            layers: Vec::new(),
            leasing: Leasing::default(),
            reap_orphans: false,
        }
    }

    /// A handle for other tasks. It shares the box and cannot stop it; once the box is stopped its calls fail.
    pub fn view(&self) -> View {
        self.view.clone()
    }

    /// Claims the box for trusted setup, its network open. In a box that was restricted, the network is opened again.
    ///
    /// # Errors
    /// [`Phase`](ErrorKind::Phase) while a program of the execution phase still runs: it must not see the network open.
    /// Background servers do not count.
    ///
    /// # Cancellation
    /// The change goes on in the background; until it has succeeded no program may start.
    pub async fn prepare_setup(&self) -> Result<()> {
        let shared = &self.view.shared;
        let serial = shared.network.clone().lock_owned().await;
        let reopen = shared
            .enter_setup()
            .map_err(|error| self.view.context(error, "prepare_setup"))?;
        if !reopen {
            return Ok(());
        }
        let runtime = shared.runtime.clone();
        let change = async move { runtime.open_network().await };
        self.change_network("prepare_setup", serial, Phase::Setup, change).await
    }

    /// Puts the configured network policy in force, with `routes` (URLs that the program needs to reach its framework)
    /// left open. Returns only when it is in force: an untrusted program may start after this and not before.
    ///
    /// # Errors
    /// [`NetworkPolicy`](ErrorKind::NetworkPolicy) when it could not be applied; no program may start then.
    ///
    /// # Cancellation
    /// The change goes on in the background; until it has succeeded no program may start.
    pub async fn prepare_execution(&self, routes: Routes) -> Result<()> {
        let shared = &self.view.shared;
        let serial = shared.network.clone().lock_owned().await;
        let policy = shared
            .enter_execution()
            .map_err(|error| self.view.context(error, "prepare_execution"))?;
        let Some(policy) = policy else { return Ok(()) };
        let runtime = shared.runtime.clone();
        let change = async move { runtime.restrict_network(&policy, &routes).await };
        self.change_network("prepare_execution", serial, Phase::Executing, change)
            .await
    }

    /// Deletes the box and waits until it is gone. Idempotent: later calls wait for the same deletion, or, if that
    /// failed, start another.
    ///
    /// # Errors
    /// When the box may still exist, with [`Retry::Exhausted`](crate::Retry::Exhausted). Its lease stays, and the
    /// reaper goes on.
    ///
    /// # Cancellation
    /// The deletion goes on although its caller went away.
    pub async fn stop(&self) -> Result<()> {
        self.view.shared.begin_stop();
        self.view
            .shared
            .stopped()
            .await
            .map_err(|error| self.view.context(error, "stop"))
    }

    async fn create(&self, spec: &BoxSpec, boot_timeout: Duration) -> Result<()> {
        let shared = &self.view.shared;
        let prepare = async {
            if let Some(pacing) = shared.config.pacing() {
                let limiter = crate::limiter::Limiter::builder(pacing.bucket)
                    .per_second(pacing.per_second)
                    .dir(spec.cache.join("limiter")?)
                    .scope(spec.run_scope.clone())
                    .build()?;
                limiter.acquire().await?;
            }
            match &shared.lease {
                Some(lease) => lease.activate().await,
                None => Ok(()),
            }
        };
        let create = async {
            tokio::select! {
                prepared = prepare => prepared?,
                () = shared.stop_requested() => return Err(out_of_order(Phase::Stopping)),
            }
            let creation = shared.begin_creation()?;
            let create = async {
                match &shared.lease {
                    Some(lease) => lease.record_id(&*shared.runtime, shared.runtime.create()).await,
                    None => shared.runtime.create().await,
                }
            };
            let given_up = async {
                shared.stop_requested().await;
                tokio::time::sleep(CREATE_GRACE).await;
            };
            tokio::select! {
                created = create => {
                    creation.ended();
                    created
                }
                () = given_up => Err(out_of_order(Phase::Stopping)),
            }
        };
        match tokio::time::timeout(boot_timeout, create).await {
            Ok(created) => created?,
            Err(_) => {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("the box was not ready within {boot_timeout:?}"),
                ));
            }
        }
        shared.set_phase(Phase::Starting, Phase::Started);
        tracing::debug!(id = shared.runtime.id(), "created");
        Ok(())
    }

    /// Runs a change of the network to its end although the caller may go away.
    async fn change_network(
        &self,
        operation: &'static str,
        serial: tokio::sync::OwnedMutexGuard<()>,
        then: Phase,
        change: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<()> {
        let shared = self.view.shared.clone();
        let task = async move {
            // Held until the change is done, whoever still waits for it: no other may begin before.
            let _serial = serial;
            let result = match tokio::time::timeout(NETWORK_TIMEOUT, change).await {
                Ok(result) => result,
                Err(_) => Err(Error::new(
                    ErrorKind::Timeout,
                    format!("not in force within {NETWORK_TIMEOUT:?}"),
                )),
            };
            if result.is_ok() {
                shared.set_phase(Phase::Unsettled, then);
            }
            result
        };
        let span = tracing::info_span!(
            "network",
            operation,
            provider = self.view.provider(),
            sandbox = self.view.name()
        );
        let result = match tokio::spawn(task.instrument(span)).await {
            Ok(result) => result,
            Err(error) => {
                Err(Error::new(ErrorKind::Cancelled, "the change of the network was cut short").with_source(error))
            }
        };
        result.map_err(|error| self.view.context(error, operation))
    }
}

impl Deref for Sandbox {
    type Target = View;

    fn deref(&self) -> &View {
        &self.view
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.view.shared.begin_stop();
    }
}

impl fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandbox")
            .field("provider", &self.provider())
            .field("name", &self.name())
            .field("id", &self.id())
            .field("phase", &self.phase())
            .finish()
    }
}

/// The state of a box that its owner, its views and the background thread share.
pub(crate) struct Shared {
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) config: Box<dyn RuntimeConfig>,
    pub(crate) name: String,
    lease: Option<Arc<Lease>>,
    creation: watch::Sender<Creation>,
    state: Mutex<State>,
    /// Serialises changes of the network.
    network: Arc<tokio::sync::Mutex<()>>,
    /// Turns true before teardown begins; operations in flight give up on it.
    stopping: watch::Sender<bool>,
    outcome: watch::Sender<Option<Result<()>>>,
}

/// How far the create call got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Creation {
    /// Nothing was asked for.
    Unasked,
    Running,
    /// It said how it ended.
    Ended,
    /// Nobody waited for its end: a box may yet come to be.
    CutShort,
}

/// A create call under way.
struct Creating<'a>(&'a Shared);

impl Creating<'_> {
    fn ended(self) {
        self.0.creation.send_replace(Creation::Ended);
    }
}

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        self.0.creation.send_if_modified(|creation| {
            let cut = *creation == Creation::Running;
            if cut {
                *creation = Creation::CutShort;
            }
            cut
        });
    }
}

struct State {
    phase: Phase,
    /// Programs in flight that were started in the execution phase.
    executing: usize,
    registration: Option<u64>,
}

impl Shared {
    fn new(runtime: Arc<dyn Runtime>, config: Box<dyn RuntimeConfig>, name: String, lease: Option<Lease>) -> Arc<Self> {
        let shared = Arc::new(Self {
            runtime,
            config,
            name,
            lease: lease.map(Arc::new),
            creation: watch::Sender::new(Creation::Unasked),
            state: Mutex::new(State {
                phase: Phase::Starting,
                executing: 0,
                registration: None,
            }),
            network: Arc::default(),
            stopping: watch::Sender::new(false),
            outcome: watch::Sender::new(None),
        });
        let registration = background::register(Arc::downgrade(&shared));
        shared.state().registration = Some(registration);
        shared
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn phase(&self) -> Phase {
        self.state().phase
    }

    /// Moves from one phase to another, unless the box is somewhere else by now (being stopped).
    fn set_phase(&self, from: Phase, to: Phase) {
        let mut state = self.state();
        if state.phase == from {
            state.phase = to;
        }
    }

    /// The create call is about to be made, unless the box is being stopped.
    fn begin_creation(&self) -> Result<Creating<'_>> {
        let state = self.state();
        if state.phase != Phase::Starting {
            return Err(out_of_order(state.phase));
        }
        // A signal after this look finds the box among the live ones.
        crate::shutdown::refuse_new()?;
        self.creation.send_replace(Creation::Running);
        Ok(Creating(self))
    }

    /// Waits until the create call has ended, one way or another.
    async fn creation_settled(&self) -> Creation {
        let mut creation = self.creation.subscribe();
        let settled = creation.wait_for(|creation| *creation != Creation::Running);
        // It gives itself up after the grace; where its executor stands still, even that does not happen.
        match tokio::time::timeout(CREATE_GRACE + Duration::from_secs(1), settled).await {
            Ok(Ok(creation)) => *creation,
            _ => Creation::CutShort,
        }
    }

    fn enter_setup(&self) -> Result<bool> {
        let mut state = self.state();
        match state.phase {
            Phase::Started | Phase::Setup => {
                state.phase = Phase::Setup;
                Ok(false)
            }
            Phase::Executing | Phase::Unsettled if state.executing > 0 => Err(Error::new(
                ErrorKind::Phase,
                format!(
                    "{} programs of the execution phase still run; the network stays closed",
                    state.executing
                ),
            )),
            Phase::Executing if self.restriction().is_none() => {
                state.phase = Phase::Setup;
                Ok(false)
            }
            Phase::Executing | Phase::Unsettled => {
                state.phase = Phase::Unsettled;
                Ok(true)
            }
            phase => Err(out_of_order(phase)),
        }
    }

    fn enter_execution(&self) -> Result<Option<Policy>> {
        let mut state = self.state();
        match state.phase {
            Phase::Started | Phase::Setup | Phase::Executing | Phase::Unsettled => {
                let restriction = self.restriction();
                state.phase = if restriction.is_some() {
                    Phase::Unsettled
                } else {
                    Phase::Executing
                };
                Ok(restriction)
            }
            phase => Err(out_of_order(phase)),
        }
    }

    /// The policy to enforce, if there is one that restricts anything, or something else to take away.
    fn restriction(&self) -> Option<Policy> {
        let cuts_always = self.config.cuts_always();
        self.config
            .policy()
            .filter(|policy| cuts_always || policy.is_restricted())
    }

    /// Whether operations may use the box, and whether a program may start in it.
    pub(crate) fn check_usable(&self, starts_program: bool) -> Result<()> {
        check_usable(self.phase(), starts_program)
    }

    /// Counts a program that starts now, until the guard is dropped.
    pub(crate) fn program(self: &Arc<Self>) -> Result<Running> {
        let mut state = self.state();
        check_usable(state.phase, true)?;
        let counted = state.phase == Phase::Executing;
        if counted {
            state.executing += 1;
        }
        Ok(Running {
            shared: self.clone(),
            counted,
        })
    }

    /// Resolves when the box is being stopped.
    pub(crate) async fn stop_requested(&self) {
        let mut stopping = self.stopping.subscribe();
        // The sender lives as long as `self`.
        let _ = stopping.wait_for(|stopping| *stopping).await;
    }

    /// Starts the deletion on the background thread unless it runs or is done.
    pub(crate) fn begin_stop(self: &Arc<Self>) {
        let pending = background::Pending::new();
        {
            let mut state = self.state();
            let failed = matches!(&*self.outcome.borrow(), Some(Err(_)));
            match state.phase {
                Phase::Stopping => return,
                Phase::Stopped if !failed => return,
                _ => state.phase = Phase::Stopping,
            }
            self.outcome.send_replace(None);
        }
        self.stopping.send_replace(true);
        let shared = self.clone();
        let span = tracing::info_span!("stop", provider = self.runtime.provider(), sandbox = %self.name);
        background::submit(pending, async move { shared.tear_down().await }.instrument(span));
    }

    async fn tear_down(self: Arc<Self>) {
        let creation = self.creation_settled().await;
        let result = if creation == Creation::Unasked {
            Ok(())
        } else {
            self.delete().await
        };
        if let Some(lease) = &self.lease {
            // A create call that nobody waited for may make a box after the deletion found none.
            if result.is_ok() && (creation != Creation::CutShort || lease.id_learned()) {
                lease.finish().await;
            } else {
                lease.leave().await;
            }
        }
        let registration = {
            let mut state = self.state();
            state.phase = Phase::Stopped;
            state.registration.take()
        };
        if let Some(id) = registration {
            background::unregister(id);
        }
        self.outcome.send_replace(Some(result));
    }

    /// Deletes the box, with patience.
    async fn delete(&self) -> Result<()> {
        let mut attempt = 1;
        loop {
            let runtime = self.runtime.clone();
            // Its own task, so that a panic of the provider is a failure and not the end of the teardown.
            let deleted = tokio::spawn(async move { runtime.delete().await }.in_current_span());
            let deleted = deleted.await.unwrap_or_else(|error| {
                Err(Error::new(ErrorKind::Other, "the provider panicked in a deletion").with_source(error))
            });
            match deleted {
                Ok(()) => return Ok(()),
                Err(error) if error.is_retryable() && attempt < DELETE_ATTEMPTS => {
                    tracing::debug!(%error, attempt, "the box could not be deleted yet");
                    let delay = error.retry_after().unwrap_or(Duration::from_millis(100 << attempt));
                    tokio::time::sleep(delay.min(Duration::from_secs(5))).await;
                    attempt += 1;
                }
                Err(error) => {
                    tracing::warn!(%error, "the box may still exist");
                    return Err(error.with_retry(crate::error::Retry::Exhausted));
                }
            }
        }
    }

    /// Waits for the deletion that was begun.
    pub(crate) async fn stopped(&self) -> Result<()> {
        let mut outcome = self.outcome.subscribe();
        // The sender lives as long as `self`.
        match outcome.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(result)) => result.clone(),
            _ => Err(Error::new(ErrorKind::Cancelled, "the deletion was given up")),
        }
    }

    /// The record of the box: its configuration with what was learned of it.
    pub(crate) fn info(&self) -> Map<String, Value> {
        let mut info = match self.config.to_value() {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        info.insert(
            "workdir".to_owned(),
            Value::from(self.runtime.workdir().to_string_lossy()),
        );
        info.insert("id".to_owned(), self.runtime.id().map_or(Value::Null, Value::from));
        info.entry("borrowed").or_insert(Value::Bool(false));
        info.insert("name".to_owned(), Value::from(self.name.clone()));
        info.extend(self.runtime.details());
        info
    }
}

fn check_usable(phase: Phase, starts_program: bool) -> Result<()> {
    match phase {
        Phase::Started | Phase::Setup | Phase::Executing => Ok(()),
        Phase::Unsettled if !starts_program => Ok(()),
        Phase::Unsettled => Err(Error::new(
            ErrorKind::NetworkPolicy,
            "a change of the network is going on or has failed: no program may start until one succeeds",
        )),
        phase => Err(out_of_order(phase)),
    }
}

fn out_of_order(phase: Phase) -> Error {
    match phase {
        Phase::Stopping | Phase::Stopped => Error::new(ErrorKind::Phase, "the sandbox is stopped"),
        phase => Error::new(ErrorKind::Phase, format!("the sandbox is {phase}")),
    }
}

/// A program in flight, counted if it was started in the execution phase.
pub(crate) struct Running {
    shared: Arc<Shared>,
    counted: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.counted {
            self.shared.state().executing -= 1;
        }
    }
}
