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

    /// Creates the box.
    ///
    /// # Errors
    /// [`InvalidConfig`](ErrorKind::InvalidConfig) and [`InvalidArgument`](ErrorKind::InvalidArgument) before anything
    /// is created; otherwise what the provider says, after what it left behind was deleted.
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
        let runtime = config.build(spec.clone()).map_err(refused)?;
        let runtime = layers.iter().rev().fold(runtime, |inner, layer| layer.wrap(inner));
        // From here on the box is owned by `sandbox`: wherever this task ends, the box does too.
        let sandbox = Sandbox {
            view: View::new(Shared::new(runtime, config, spec.name.clone()), env),
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
        let _serial = shared.network.lock().await;
        let reopen = shared
            .enter_setup()
            .map_err(|error| self.view.context(error, "prepare_setup"))?;
        if !reopen {
            return Ok(());
        }
        let runtime = shared.runtime.clone();
        let change = async move { runtime.open_network().await };
        self.change_network("prepare_setup", Phase::Setup, change).await
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
        let _serial = shared.network.lock().await;
        let policy = shared
            .enter_execution()
            .map_err(|error| self.view.context(error, "prepare_execution"))?;
        let Some(policy) = policy else { return Ok(()) };
        let runtime = shared.runtime.clone();
        let change = async move { runtime.restrict_network(&policy, &routes).await };
        self.change_network("prepare_execution", Phase::Executing, change).await
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
        let create = async {
            if let Some(pacing) = shared.config.pacing() {
                let limiter = crate::limiter::Limiter::builder(pacing.bucket)
                    .per_second(pacing.per_second)
                    .dir(spec.cache.join("limiter")?)
                    .scope(spec.run_scope.clone())
                    .build()?;
                limiter.acquire().await?;
            }
            shared.runtime.create().await
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
        then: Phase,
        change: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<()> {
        let shared = self.view.shared.clone();
        let task = async move {
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
    state: Mutex<State>,
    /// Serialises changes of the network.
    network: tokio::sync::Mutex<()>,
    /// Turns true before teardown begins; operations in flight give up on it.
    stopping: watch::Sender<bool>,
    outcome: watch::Sender<Option<Result<()>>>,
}

struct State {
    phase: Phase,
    /// Programs in flight that were started in the execution phase.
    executing: usize,
    registration: Option<u64>,
}

impl Shared {
    fn new(runtime: Arc<dyn Runtime>, config: Box<dyn RuntimeConfig>, name: String) -> Arc<Self> {
        let shared = Arc::new(Self {
            runtime,
            config,
            name,
            state: Mutex::new(State {
                phase: Phase::Starting,
                executing: 0,
                registration: None,
            }),
            network: tokio::sync::Mutex::new(()),
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

    /// The policy to enforce, if there is one that restricts anything.
    fn restriction(&self) -> Option<Policy> {
        self.config.policy().filter(Policy::is_restricted)
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
        background::detach(async move { shared.tear_down().await }.instrument(span));
    }

    async fn tear_down(self: Arc<Self>) {
        let mut attempt = 1;
        let result = loop {
            match self.runtime.delete().await {
                Ok(()) => break Ok(()),
                Err(error) if error.is_retryable() && attempt < DELETE_ATTEMPTS => {
                    tracing::debug!(%error, attempt, "the box could not be deleted yet");
                    let delay = error.retry_after().unwrap_or(Duration::from_millis(100 << attempt));
                    tokio::time::sleep(delay.min(Duration::from_secs(5))).await;
                    attempt += 1;
                }
                Err(error) => {
                    tracing::warn!(%error, "the box may still exist");
                    break Err(error.with_retry(crate::error::Retry::Exhausted));
                }
            }
        };
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

    /// Waits for the deletion that was begun.
    async fn stopped(&self) -> Result<()> {
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
