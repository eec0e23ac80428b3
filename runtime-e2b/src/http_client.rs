//! One HTTP client per executor.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use runtime_core::{Error, ErrorKind, Result};

use crate::endpoints::is_loopback;

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an idle connection is kept: far shorter than anything on the path keeps it.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// How many executors are remembered. A program has one or two.
const MAX_EXECUTORS: usize = 16;

type Key = (tokio::runtime::Id, bool);

/// The connections of a client live on the executor that made them, so a box that is torn down on another executor, while
/// its own no longer runs, must not use them. All boxes of an executor share a client.
static CLIENTS: LazyLock<Mutex<HashMap<Key, reqwest::Client>>> = LazyLock::new(Mutex::default);

/// The client of this executor for this URL. Always HTTP/1.1: a program's stream lives for hours, and many of them on one
/// HTTP/2 connection meet the edge's limits on streams and on empty frames.
pub(crate) fn client(url: &str) -> Result<reqwest::Client> {
    let executor = tokio::runtime::Handle::try_current()
        .map_err(|_| Error::new(ErrorKind::Phase, "requests are made on a tokio runtime"))?;
    let loopback = reqwest::Url::parse(url).is_ok_and(|url| is_loopback(&url));
    let key = (executor.id(), loopback);
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(client) = clients.get(&key) {
        return Ok(client.clone());
    }
    let mut builder = reqwest::Client::builder()
        .user_agent(concat!("runtime-e2b/", env!("CARGO_PKG_VERSION")))
        .http1_only()
        .redirect(reqwest::redirect::Policy::none())
        .tcp_nodelay(true)
        .tcp_keepalive(Duration::from_secs(30))
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(IDLE_TIMEOUT);
    if loopback {
        // A proxy of this machine's environment is for the outside.
        builder = builder.no_proxy();
    }
    let client = builder
        .build()
        .map_err(|error| Error::new(ErrorKind::Other, "the HTTP client cannot be set up").with_source(error))?;
    if clients.len() >= MAX_EXECUTORS {
        clients.clear();
    }
    clients.insert(key, client.clone());
    Ok(client)
}
