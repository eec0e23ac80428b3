//! [`EgressProxy`]: the proxy of one box, and its relays.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::forward::{Client, answer};
use super::framing::MAX_HEAD;
use super::guard::{Gate, Guarded};
use super::inside::{Accepted, Listen};
use super::limits::Limits;
use super::live::{Board, Older};
use super::log::EgressLog;
use super::relay::Relay;
use super::token::Token;
use super::tunnel;
use crate::error::{Error, Result};
use crate::network::{Destination, EgressPolicy, Origin, ProxyAddress, Resolver, SystemResolver};

/// The egress proxy of one box, and its relays: one policy, one token, one log.
///
/// It has no listener of its own making: whoever makes boxes hands it some, made inside a box or on this host. It must
/// be used on a tokio runtime with time and io, which then carries its connections. Dropping it closes everything;
/// [`stop`](Self::stop) also waits.
///
/// ```
/// use runtime_core::egress::{EgressProxy, Older};
/// use runtime_core::network::{EgressPolicy, Policy, Routes};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> runtime_core::Result<()> {
/// let proxy = EgressProxy::builder("box-1").policy(EgressPolicy::setup()).build()?;
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
/// let port = proxy.serve(listener)?.port();
/// let env = proxy.address("127.0.0.1", port).env();
/// assert!(env.get("https_proxy").is_some());
///
/// // The cut: from here on only PyPI, and nothing that setup opened.
/// let policy = Policy::new(["https://pypi.org", "https://files.pythonhosted.org"], [])?;
/// proxy.switch(EgressPolicy::execution(policy, Routes::none()), Older::Close).await;
/// // … the program runs …
/// for refusal in proxy.log().refused() {
///     println!("refused {}; to allow it: {:?}", refusal.destination, refusal.proposal);
/// }
/// proxy.stop().await;
/// # Ok(())
/// # }
/// ```
pub struct EgressProxy {
    shared: Arc<Shared>,
}

/// What every connection of one box needs.
pub(super) struct Shared {
    pub(super) name: Arc<str>,
    pub(super) board: Arc<Board>,
    pub(super) resolver: Arc<dyn Resolver>,
    pub(super) limits: Arc<Limits>,
    pub(super) log: EgressLog,
    pub(super) token: Mutex<Token>,
    pub(super) stop: CancellationToken,
    pub(super) tasks: TaskTracker,
}

/// Makes an [`EgressProxy`].
#[derive(Debug)]
pub struct ProxyBuilder {
    name: Arc<str>,
    policy: EgressPolicy,
    resolver: Option<Arc<dyn Resolver>>,
    limits: Limits,
    log: EgressLog,
}

impl ProxyBuilder {
    /// The policy to start with. Default: [`EgressPolicy::closed`].
    #[must_use]
    pub fn policy(mut self, policy: EgressPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Who turns names into addresses. Default: this host. Share one [`SystemResolver`] among the boxes of a process.
    #[must_use]
    pub fn resolver(mut self, resolver: Arc<dyn Resolver>) -> Self {
        self.resolver = Some(resolver);
        self
    }

    /// Deadlines and bounds.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Where decisions are told, for instance one log for several boxes.
    #[must_use]
    pub fn log(mut self, log: EgressLog) -> Self {
        self.log = log;
        self
    }

    /// The proxy, with a token of its own.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a limit of no connections;
    /// [`ResourceExhausted`](crate::ErrorKind::ResourceExhausted) if the system has no random numbers.
    pub fn build(self) -> Result<EgressProxy> {
        if self.limits.connections == 0 || self.limits.connections > Semaphore::MAX_PERMITS {
            return Err(Error::invalid_argument("limits.connections", "must be at least 1"));
        }
        let resolver = self.resolver.unwrap_or_else(|| Arc::new(SystemResolver::new()));
        Ok(EgressProxy {
            shared: Arc::new(Shared {
                name: self.name,
                board: Arc::new(Board::new(self.policy)),
                resolver,
                limits: Arc::new(self.limits),
                log: self.log,
                token: Mutex::new(Token::random()?),
                stop: CancellationToken::new(),
                tasks: TaskTracker::new(),
            }),
        })
    }
}

impl EgressProxy {
    /// A proxy for the box that logs call `name`.
    pub fn builder(name: impl Into<Arc<str>>) -> ProxyBuilder {
        ProxyBuilder {
            name: name.into(),
            policy: EgressPolicy::closed(),
            resolver: None,
            limits: Limits::default(),
            log: EgressLog::default(),
        }
    }

    /// Serves HTTP proxy clients that connect to `listener`, until the proxy stops. Returns where it listens.
    ///
    /// # Errors
    /// What the system says of a listener that has no address.
    pub fn serve(&self, listener: impl Listen) -> Result<SocketAddr> {
        let address = listener
            .address()
            .map_err(|error| Error::io("the proxy's listener", error))?;
        let shared = Arc::clone(&self.shared);
        let crowded = Arc::new(Notify::new());
        self.shared.tasks.spawn(async move {
            let stop = shared.stop.clone();
            accept(listener, &stop, shared.limits.connections, &crowded, |stream, slot| {
                let task = connection(Arc::clone(&shared), stream, Arc::clone(&crowded), slot);
                shared.tasks.spawn(task);
            })
            .await;
        });
        Ok(address)
    }

    /// Connects whoever connects to `listener` with the framework's own `route`, bytes for bytes, wherever its address
    /// is: this host's loopback, a private network. The route has to be one of the policy's, and the relay ends when
    /// another policy is switched on that lacks it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the policy has no such route.
    pub fn relay_route(&self, listener: impl Listen, route: &Origin) -> Result<Relay> {
        Relay::start(&self.shared, listener, route.destination(), true)
    }

    /// Connects whoever connects to `listener` with `destination`, which a `tcp://host:port` rule of the policy has to
    /// allow (see [`Policy::relays`](crate::network::Policy::relays)). Its addresses are checked for every connection.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the policy refuses it.
    pub fn relay(&self, listener: impl Listen, destination: &Destination) -> Result<Relay> {
        Relay::start(&self.shared, listener, destination, false)
    }

    /// Switches to another policy, as a whole: every request, name and connection is judged by one policy. Connections
    /// and relays of earlier policies are closed as `older` says, and are gone when this returns.
    ///
    /// The switch itself is made at the first poll. Dropping the future after that only gives up the waiting.
    pub async fn switch(&self, policy: EgressPolicy, older: Older) {
        tracing::debug!(proxy = %self.shared.name, policy = %policy.policy(), ?older, "the egress policy is switched");
        self.shared.board.switch(policy, older).await;
    }

    /// [`switch`](Self::switch) without waiting for what it closes.
    #[cfg(all(feature = "guest", target_os = "linux"))]
    pub(crate) fn switch_now(&self, policy: EgressPolicy, older: Older) {
        self.shared.board.replace(policy, older);
    }

    /// Makes another token, so that programs which hold the old one are turned away (open connections stay). For a
    /// second setup in a box whose first program may have left something behind.
    ///
    /// # Errors
    /// [`ResourceExhausted`](crate::ErrorKind::ResourceExhausted) if the system has no random numbers; the old token
    /// then stays.
    pub fn renew_token(&self) -> Result<()> {
        *self.shared.token.lock().unwrap_or_else(PoisonError::into_inner) = Token::random()?;
        Ok(())
    }

    /// What programs need to know to use the proxy, at the address by which the box reaches a listener.
    pub fn address(&self, host: impl Into<String>, port: u16) -> ProxyAddress {
        let token = self.shared.token.lock().unwrap_or_else(PoisonError::into_inner);
        ProxyAddress::new(host, port, token.text())
    }

    /// What was asked for, and what became of it.
    pub fn log(&self) -> &EgressLog {
        &self.shared.log
    }

    /// How many connections outward and relays there are.
    pub fn open_connections(&self) -> usize {
        self.shared.board.len()
    }

    /// Closes listeners, connections and relays, and waits until they are gone. May be called again. Dropping the
    /// future leaves everything to be closed without it.
    pub async fn stop(&self) {
        self.shared.stop.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

impl Drop for EgressProxy {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

/// Without the token.
impl fmt::Debug for EgressProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EgressProxy")
            .field("name", &self.shared.name)
            .field("open_connections", &self.open_connections())
            .finish_non_exhaustive()
    }
}

/// Accepts connections, at most `limit` at a time, until `stop`. `crowded` is told when somebody has to wait.
pub(super) async fn accept(
    mut listener: impl Listen,
    stop: &CancellationToken,
    limit: usize,
    crowded: &Notify,
    mut each: impl FnMut(Accepted, OwnedSemaphorePermit),
) {
    let slots = Arc::new(Semaphore::new(limit));
    loop {
        let slot = match Arc::clone(&slots).try_acquire_owned() {
            Ok(slot) => slot,
            Err(_) => {
                crowded.notify_waiters();
                tokio::select! {
                    () = stop.cancelled() => return,
                    slot = Arc::clone(&slots).acquire_owned() => match slot {
                        Ok(slot) => slot,
                        Err(_) => return,
                    },
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.next() => match accepted {
                Ok(stream) => {
                    stream.set_up();
                    each(stream, slot);
                }
                Err(_) if listener.is_closed() => return,
                Err(error) => {
                    // Mostly a want of descriptors, which passes. One of a connection that is gone already is harmless.
                    tracing::warn!(%error, "a connection from a box could not be accepted");
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = tokio::time::sleep(Duration::from_millis(50)) => {}
                    }
                }
            },
        }
    }
}

/// One client: requests one after the other, or a tunnel at the end of them.
async fn connection(shared: Arc<Shared>, stream: Accepted, crowded: Arc<Notify>, _slot: OwnedSemaphorePermit) {
    let gate = Arc::new(Gate::default());
    let guarded = Guarded::new(stream, Arc::clone(&shared.limits), Arc::clone(&gate));
    let client = Arc::new(Client::new(Arc::clone(&shared), gate));
    let service = {
        let client = Arc::clone(&client);
        service_fn(move |request| answer(Arc::clone(&client), request))
    };
    let served = {
        let mut http = http1::Builder::new();
        // The deadlines of heads and of idleness are those of `Guarded`, which knows one from the other.
        http.timer(TokioTimer::new())
            .header_read_timeout(None)
            .max_buf_size(2 * MAX_HEAD);
        let mut serving = Box::pin(http.serve_connection(TokioIo::new(guarded), service).with_upgrades());
        let mut told = false;
        loop {
            tokio::select! {
                result = serving.as_mut() => break result,
                () = shared.stop.cancelled() => return,
                () = crowded.notified(), if !told => {
                    told = true;
                    serving.as_mut().graceful_shutdown();
                }
            }
        }
    };
    if let Err(error) = served {
        tracing::debug!(proxy = %shared.name, %error, "a connection from the box ended");
    }
    let switched = client.take_switched();
    drop(client);
    if let Some(switched) = switched {
        tokio::select! {
            () = shared.stop.cancelled() => {}
            () = tunnel::run(&shared, switched) => {}
        }
    }
}
