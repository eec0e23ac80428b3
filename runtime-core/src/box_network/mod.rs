//! [`BoxNetwork`]: the network of one box from the host's side, for every provider whose boxes have a guest.
//!
//! Whoever makes boxes knows how to take a network away and how to give it back; everything else is the same for
//! containers and for namespaces, and is here:
//!
//! | what | how |
//! | --- | --- |
//! | the proxy | an [`EgressProxy`] on a listener that the guest makes on `lo`; served by this process |
//! | the framework's own services on this host | a relay for each, listening inside on the *same port* where that is free |
//! | `tcp://host:port` rules and routes | a relay for each, found by [`BoxNetwork::host_url`] |
//! | the programs' environment | [`BoxNetwork::environment`] |
//! | that the network is closed | [`BoxNetwork::verify`]: the box's kernel knows `lo` and nothing else, and nobody answers where engines put their resolver |
//! | that it stays closed | interfaces are watched from the cut on; one that appears ends the box |
//!
//! # For a provider
//!
//! ```no_run
//! # use runtime_core::{box_network::BoxNetwork, guest::GuestBox, network::{Policy, Routes}, Env, Exec, Result};
//! # async fn provider(mut guest: GuestBox, policy: Policy, routes: Routes, mut exec: Exec) -> Result<()> {
//! # async fn take_the_network_away() -> Result<()> { Ok(()) }
//! # async fn give_it_back() -> Result<()> { Ok(()) }
//! // In `create`, once the link stands. Programs of the box are confined from the first on.
//! guest.confine().await?;
//! let network = BoxNetwork::builder("box-1", guest.link.clone()).policy(policy.clone()).start().await?;
//! // In `restrict_network`. Returns only when the network is proven closed; otherwise nothing may be started.
//! network.close(&policy, &routes, take_the_network_away()).await?;
//! // In `spawn`, `run` and `spawn_background`.
//! let variables = network.environment(&exec.env, false);
//! exec.env = exec.env.layered(&variables);
//! // In `open_network`.
//! network.open(give_it_back()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! A box that has no network from its first moment is [`proxied`](Builder::proxied): its setup goes through the proxy
//! too, and there is nothing to take away (`async { Ok(()) }`).

mod doors;

use std::fmt;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;

use crate::command::Env;
use crate::egress::{EgressLog, EgressProxy, Limits, Older};
use crate::error::{Error, ErrorKind, Result};
use crate::guest::{Link, Network};
use crate::network::{EgressPolicy, Policy, ProxyUse, Resolver, Routes, SystemResolver};

use doors::Doors;

/// How long the box's kernel may take to show that the network is gone.
const SETTLE: Duration = Duration::from_secs(5);

/// Where Docker's resolver listens in a container, whatever the container is connected to.
const ENGINE_RESOLVER: (Ipv4Addr, u16) = (Ipv4Addr::new(127, 0, 0, 11), 53);

static RESOLVER: OnceLock<Arc<dyn Resolver>> = OnceLock::new();

/// Sets who turns names into addresses for every box of this process whose builder does not say otherwise: for a host
/// behind split DNS, and for tests. Before the first box.
///
/// # Errors
/// [`Phase`](ErrorKind::Phase) when a box has been made already, or it was set before.
pub fn set_resolver(resolver: Arc<dyn Resolver>) -> Result<()> {
    let set = RESOLVER.set(resolver);
    set.map_err(|_| Error::new(ErrorKind::Phase, "boxes of this process have a resolver already"))
}

/// The resolver that boxes share unless they bring their own.
fn shared_resolver() -> Arc<dyn Resolver> {
    RESOLVER.get_or_init(|| Arc::new(SystemResolver::new())).clone()
}

/// Makes a [`BoxNetwork`].
#[derive(Debug)]
pub struct Builder {
    name: Arc<str>,
    link: Link,
    restricted: bool,
    proxied: bool,
    image_env: Env,
    resolver: Option<Arc<dyn Resolver>>,
    limits: Limits,
    log: EgressLog,
}

impl Builder {
    /// The policy of the box's configuration. Only whether it restricts anything matters here: a box that is restricted
    /// has a proxy from its first moment on, which its background servers use. Default: an open one.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.restricted = policy.is_restricted();
        self
    }

    /// The box has no way out but the proxy in setup either, so that setup's programs get its variables. Default: no.
    #[must_use]
    pub fn proxied(mut self, proxied: bool) -> Self {
        self.proxied = proxied;
        self
    }

    /// Variables that the image brings, whose `NO_PROXY` is kept in a box that is open.
    #[must_use]
    pub fn image_env(mut self, env: Env) -> Self {
        self.image_env = env;
        self
    }

    /// Who turns names into addresses. Default: the process's, see [`set_resolver`]; this host, if none was set.
    #[must_use]
    pub fn resolver(mut self, resolver: Arc<dyn Resolver>) -> Self {
        self.resolver = Some(resolver);
        self
    }

    /// Deadlines and bounds of proxy and relays.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Where decisions are told.
    #[must_use]
    pub fn log(mut self, log: EgressLog) -> Self {
        self.log = log;
        self
    }

    /// Makes the proxy's listener in the box, if the box is restricted, and serves it. The policy is that of setup.
    ///
    /// # Errors
    /// What listening in the box gives.
    ///
    /// # Cancellation
    /// A listener that was made is closed.
    pub async fn start(self) -> Result<BoxNetwork> {
        let has_proxy = self.restricted || self.proxied;
        let policy = if has_proxy {
            EgressPolicy::setup()
        } else {
            EgressPolicy::closed()
        };
        let proxy = EgressProxy::builder(self.name)
            .policy(policy)
            .resolver(self.resolver.unwrap_or_else(shared_resolver))
            .limits(self.limits)
            .log(self.log)
            .build()?;
        let port = if has_proxy {
            let listener = self.link.listen((Ipv4Addr::LOCALHOST, 0).into()).await?;
            Some(proxy.serve(listener)?.port())
        } else {
            None
        };
        Ok(BoxNetwork {
            link: self.link,
            proxy,
            port,
            restricted: self.restricted,
            proxied: self.proxied,
            image_env: self.image_env,
            state: Mutex::new(State {
                phase: Phase::Open,
                watch: None,
            }),
            doors: tokio::sync::Mutex::new(Doors::default()),
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// A change is under way or has failed.
    Unsettled,
    Closed,
}

struct State {
    phase: Phase,
    watch: Option<AbortHandle>,
}

/// The network of one box. See the [module](self).
///
/// Dropping it closes the proxy, every relay and every connection through them, and the watch; the box's own network
/// stays as it is.
pub struct BoxNetwork {
    link: Link,
    proxy: EgressProxy,
    /// Where the proxy listens on the box's loopback.
    port: Option<u16>,
    restricted: bool,
    proxied: bool,
    image_env: Env,
    state: Mutex<State>,
    /// Also serialises whatever changes ways out of the box.
    doors: tokio::sync::Mutex<Doors>,
}

impl BoxNetwork {
    /// The network of the box that logs call `name`, whose guest answers on `link`.
    pub fn builder(name: impl Into<Arc<str>>, link: Link) -> Builder {
        Builder {
            name: name.into(),
            link,
            restricted: false,
            proxied: false,
            image_env: Env::new(),
            resolver: None,
            limits: Limits::default(),
            log: EgressLog::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the network was proven closed by [`close`](Self::close) and was not opened since.
    pub fn is_closed(&self) -> bool {
        self.state().phase == Phase::Closed
    }

    /// What was asked for, and what became of it.
    pub fn log(&self) -> &EgressLog {
        self.proxy.log()
    }

    /// The variables to lay over those of a program that starts now: the proxy's for programs of a closed box and for
    /// every background server of a restricted one; otherwise `NO_PROXY` with loopback.
    pub fn environment(&self, caller: &Env, background: bool) -> Env {
        let Some(port) = self.port else {
            return crate::network::no_proxy_env(&self.image_env, caller);
        };
        let situation = ProxyUse {
            restricted: true,
            cut: self.proxied || self.state().phase != Phase::Open,
            background,
        };
        let proxy = self.proxy.address(Ipv4Addr::LOCALHOST.to_string(), port);
        situation.env(&proxy, &self.image_env, caller)
    }

    /// The URL by which a program in the box reaches what this host knows as `url`, and the way there.
    ///
    /// A service on loopback of this host gets a relay: a listener on the box's loopback, on the same port where that
    /// is free, so that as a rule the URL stays as it is. So does a `tcp://host:port` URL in a restricted box. Others
    /// stay as they are: the box reaches them directly or by the proxy.
    ///
    /// In an open box every service may be asked for. What is asked for in setup and is not among the routes of
    /// [`close`](Self::close) is closed by it.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) naming `url` for what is no URL of a service, and for a service
    /// that a closed box may not reach. What listening in the box gives.
    pub async fn host_url(&self, url: &str) -> Result<String> {
        let mut doors = self.doors.lock().await;
        let wanted = doors::Wanted::of_url(url)?;
        if !wanted.needs_door(self.restricted) {
            return Ok(url.to_owned());
        }
        let phase = self.state().phase;
        if let Some(address) = doors.find(&wanted) {
            return doors::rewrite(url, address);
        }
        if self.restricted && phase != Phase::Open {
            return Err(Error::invalid_argument(
                "url",
                format!("{} is no route of the policy in force", wanted.origin()),
            ));
        }
        let address = doors.open_in_setup(self, &wanted).await?;
        doors::rewrite(url, address)
    }

    /// Puts `policy` in force, with `routes` left open: takes the network away by awaiting `cut`, has the box's own
    /// kernel prove that it is gone, closes every connection and relay of setup, opens those that `policy` and `routes`
    /// name, and watches that no interface appears. Only when it has returned may an untrusted program start. May be
    /// called again, with another policy and other routes; `cut` must then be harmless.
    ///
    /// Routes are URLs as this host knows them, or as [`host_url`](Self::host_url) gave them. A route on loopback is a
    /// service *of this host*: one inside the box needs no route, and naming it would open the host's port of that
    /// number to the program.
    ///
    /// # Errors
    /// [`NetworkPolicy`](ErrorKind::NetworkPolicy), or what `cut` or the link says. Proxy and relays then permit
    /// nothing until another `close` or [`open`](Self::open) succeeds.
    ///
    /// # Cancellation
    /// As after a failure.
    pub async fn close(&self, policy: &Policy, routes: &Routes, cut: impl Future<Output = Result<()>>) -> Result<()> {
        let mut doors = self.doors.lock().await;
        self.unsettle();
        // Whatever happens from here on, nothing is permitted unless all of it succeeds.
        let mut undo = Undo(Some(self));
        let closed = async {
            cut.await?;
            self.verify().await?;
            let needed = doors.needed(policy, routes);
            let execution = EgressPolicy::execution(policy.clone(), needed.routes.clone());
            self.proxy.switch(execution, Older::Close).await;
            doors.open_for_execution(self, needed).await?;
            self.watch().await?;
            // Between the first look and the watch somebody may have been quick.
            self.check_interfaces().await
        };
        match closed.await {
            Ok(()) => {
                undo.0 = None;
                self.state().phase = Phase::Closed;
                Ok(())
            }
            Err(error) => {
                doors.forget_all();
                drop(undo);
                self.proxy.switch(EgressPolicy::closed(), Older::Close).await;
                Err(error)
            }
        }
    }

    /// Opens the network for another trusted setup, by awaiting `connect`. What the programs before had open through
    /// the proxy is closed, and the proxy's token is another one: a background server of an earlier setup that is to
    /// use the proxy has to be started again.
    ///
    /// # Errors
    /// What `connect` says; the network then counts as neither open nor closed.
    pub async fn open(&self, connect: impl Future<Output = Result<()>>) -> Result<()> {
        let mut doors = self.doors.lock().await;
        self.unsettle();
        doors.forget_all();
        self.proxy.switch(EgressPolicy::closed(), Older::Close).await;
        self.proxy.renew_token()?;
        connect.await?;
        if self.port.is_some() {
            self.proxy.switch(EgressPolicy::setup(), Older::Close).await;
        }
        self.state().phase = Phase::Open;
        Ok(())
    }

    /// Asks the box's kernel whether the network is closed: no interface is up but `lo`, no route leads anywhere else,
    /// and nobody answers at 127.0.0.11, where Docker's resolver stays in a container that was disconnected from a
    /// network of its user's.
    ///
    /// # Errors
    /// [`NetworkPolicy`](ErrorKind::NetworkPolicy) naming what is left.
    pub async fn verify(&self) -> Result<()> {
        self.check_interfaces().await?;
        match self.link.dial(ENGINE_RESOLVER.into()).await {
            Ok(_) => Err(open_still(
                "something answers at 127.0.0.11, where engines have their resolver",
            )),
            // Nobody does, unless it is only the link that failed.
            Err(_) => self.link.check(),
        }
    }

    async fn check_interfaces(&self) -> Result<()> {
        let until = tokio::time::Instant::now() + SETTLE;
        loop {
            let network = self.link.network().await?;
            if network.is_cut() {
                return Ok(());
            }
            if tokio::time::Instant::now() >= until {
                return Err(open_still(leftovers(&network)));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Ends the box when an interface appears.
    async fn watch(&self) -> Result<()> {
        let mut watch = self.link.watch_interfaces().await?;
        let link = self.link.clone();
        let task = tokio::spawn(async move {
            // An error is the end of the link or of this watch.
            if let Ok(interface) = watch.next().await {
                let name = shown(&interface.name);
                tracing::error!(interface = name, "a closed box has got a network, and is ended");
                link.give_up(format_args!("the interface {name} appeared"));
            }
        });
        if let Some(earlier) = self.state().watch.replace(task.abort_handle()) {
            earlier.abort();
        }
        Ok(())
    }

    fn unsettle(&self) {
        let mut state = self.state();
        state.phase = Phase::Unsettled;
        if let Some(watch) = state.watch.take() {
            watch.abort();
        }
    }

    /// Closes proxy and relays, and waits until they are gone.
    pub async fn stop(&self) {
        self.unsettle();
        self.proxy.stop().await;
    }
}

impl Drop for BoxNetwork {
    fn drop(&mut self) {
        self.unsettle();
    }
}

impl fmt::Debug for BoxNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoxNetwork")
            .field("phase", &self.state().phase)
            .field("restricted", &self.restricted)
            .field("proxy", &self.proxy)
            .finish_non_exhaustive()
    }
}

/// Shuts the proxy when a change is given up half-way.
struct Undo<'a>(Option<&'a BoxNetwork>);

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if let Some(network) = self.0.take() {
            network.unsettle();
            network.proxy.switch_now(EgressPolicy::closed(), Older::Close);
        }
    }
}

fn open_still(what: impl fmt::Display) -> Error {
    Error::new(
        ErrorKind::NetworkPolicy,
        format!("the network of the box is not closed: {what}"),
    )
}

/// What is left of a network, in words. Names are text from the box.
fn leftovers(network: &Network) -> String {
    let up: Vec<String> = network
        .interfaces
        .iter()
        .filter(|interface| !interface.is_loopback() && interface.is_up())
        .take(4)
        .map(|interface| shown(&interface.name))
        .collect();
    match up.is_empty() {
        true => format!("{} routes lead out of it", network.routes.len()),
        false => format!("{} is up", up.join(", ")),
    }
}

fn shown(name: &[u8]) -> String {
    name.escape_ascii().to_string().chars().take(64).collect()
}

/// A listener of the box on its loopback: on this port if it is free, else on another one.
async fn listen_near(link: &Link, address: SocketAddr) -> Result<crate::guest::Listener> {
    // A box may have no IPv6.
    let same_port = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), address.port());
    for place in [Some(address), (same_port != address).then_some(same_port)]
        .into_iter()
        .flatten()
    {
        match link.listen(place).await {
            Ok(listener) => return Ok(listener),
            Err(error) => {
                link.check()?;
                tracing::debug!(%error, %place, "the relay listens elsewhere");
            }
        }
    }
    link.listen((Ipv4Addr::LOCALHOST, 0).into()).await
}
