//! [`Resolver`]: names to addresses.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::Semaphore;

use crate::error::{Error, ErrorKind, Result};

/// Turns a name and a port into socket addresses.
///
/// Whoever asks checks *all* addresses and dials only those that were checked, without asking again: a name may answer
/// differently the second time.
#[async_trait]
pub trait Resolver: fmt::Debug + Send + Sync + 'static {
    /// The addresses of `name`, in the order in which they should be tried, each with `port`. At least one.
    ///
    /// An address literal resolves to itself. The caller sets the deadline; dropping the future gives the answer up
    /// and leaves nothing behind that the caller has to clean up.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) for a name that has no address, [`Io`](ErrorKind::Io) if the system cannot tell.
    async fn resolve(&self, name: &str, port: u16) -> Result<Vec<SocketAddr>>;
}

/// The resolver of this host, as `getaddrinfo` sees it.
///
/// A lookup occupies a thread of the blocking pool until the system answers, also when its future was dropped. So
/// that a box which asks for many slow names cannot take all of them, at most [`LOOKUPS`](Self::LOOKUPS) run at a time
/// for one `SystemResolver` and its clones; more wait for their turn.
#[derive(Debug, Clone)]
pub struct SystemResolver {
    turns: Arc<Semaphore>,
}

impl SystemResolver {
    /// Lookups that run at the same time.
    pub const LOOKUPS: usize = 32;

    /// The resolver of this host.
    pub fn new() -> Self {
        Self {
            turns: Arc::new(Semaphore::new(Self::LOOKUPS)),
        }
    }
}

impl Default for SystemResolver {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Resolver for SystemResolver {
    async fn resolve(&self, name: &str, port: u16) -> Result<Vec<SocketAddr>> {
        let what = || format!("resolve {}", name.escape_debug());
        let closed = |_| Error::new(ErrorKind::Cancelled, "the resolver is closed");
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(closed)?;
        let asked = name.to_owned();
        // What `tokio::net::lookup_host` does, except that the turn ends with the thread and not with the future.
        let lookup = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            (asked.as_str(), port)
                .to_socket_addrs()
                .map(Iterator::collect::<Vec<_>>)
        });
        let addresses = lookup
            .await
            .map_err(|error| Error::new(ErrorKind::Other, what()).with_source(error))?
            .map_err(|error| Error::io(what(), error))?;
        if addresses.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, format!("{}: no address", what())));
        }
        Ok(addresses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn address_literals_resolve_to_themselves() {
        let resolver: Arc<dyn Resolver> = Arc::new(SystemResolver::new());
        for (name, expected) in [
            ("127.0.0.1", "127.0.0.1:80"),
            ("::1", "[::1]:80"),
            ("10.1.2.3", "10.1.2.3:80"),
        ] {
            assert_eq!(
                resolver.resolve(name, 80).await.unwrap(),
                vec![expected.parse::<SocketAddr>().unwrap()]
            );
        }
    }

    #[tokio::test]
    async fn localhost_is_loopback() {
        let addresses = SystemResolver::new().resolve("localhost", 443).await.unwrap();
        assert!(
            addresses
                .iter()
                .all(|address| address.ip().is_loopback() && address.port() == 443)
        );
    }

    #[tokio::test]
    async fn a_name_that_cannot_be_asked_for_is_an_error_and_not_a_panic() {
        let error = SystemResolver::new().resolve("a\0b", 80).await.unwrap_err();
        assert!(error.message().starts_with("resolve a\\0b"), "{error}");
    }

    #[tokio::test]
    async fn a_dropped_lookup_gives_its_turn_back() {
        let resolver = SystemResolver::new();
        for _ in 0..SystemResolver::LOOKUPS * 2 {
            let mut lookup = resolver.resolve("127.0.0.1", 80);
            // Polled once, so that it holds a turn, and then dropped.
            let started = std::future::poll_fn(|context| {
                let _ = lookup.as_mut().poll(context);
                std::task::Poll::Ready(())
            });
            started.await;
        }
        assert!(resolver.resolve("127.0.0.1", 80).await.is_ok());
        let all = u32::try_from(SystemResolver::LOOKUPS).unwrap();
        let every_turn = resolver.turns.acquire_many(all).await;
        assert!(every_turn.is_ok());
    }
}
