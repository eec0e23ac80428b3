//! Relays of a box by what they are for, and the URLs that lead to them.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::{BoxNetwork, listen_near};
use crate::egress::Older;
use crate::error::{Error, ErrorKind, Result};
use crate::network::{Destination, EgressPolicy, Origin, Policy, Routes, Scheme};

/// A service outside the box that is reached by a relay.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    destination: Destination,
    /// The framework's own. `None`: by a rule of the policy.
    origin: Option<Origin>,
}

/// Services are the same behind the same host and port, whatever the scheme; and one loopback is as good as another
/// name of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key(String, u16);

impl Wanted {
    pub(super) fn of_url(url: &str) -> Result<Self> {
        let routes = Routes::new([url]).map_err(|error| {
            let message = error.message().to_owned();
            Error::invalid_argument("url", message)
        })?;
        routes
            .iter()
            .next()
            .map(Self::route)
            .ok_or_else(|| Error::invalid_argument("url", "it is no URL"))
    }

    fn route(origin: &Origin) -> Self {
        Self {
            destination: origin.destination().clone(),
            origin: Some(origin.clone()),
        }
    }

    /// For messages. A destination has no user information.
    pub(super) fn origin(&self) -> &Destination {
        &self.destination
    }

    /// Whether the box cannot reach it by itself or by the proxy.
    pub(super) fn needs_door(&self, restricted: bool) -> bool {
        self.destination.is_loopback() || (restricted && self.destination.scheme() == Scheme::Tcp)
    }

    /// Where a relay listens if it can.
    fn listens_at(&self) -> SocketAddr {
        let address = self.destination.address().filter(IpAddr::is_loopback);
        SocketAddr::new(address.unwrap_or(Ipv4Addr::LOCALHOST.into()), self.destination.port())
    }

    fn key(&self) -> Key {
        let host = match self.destination.is_loopback() {
            true => self.listens_at().ip().to_string(),
            false => self.destination.host().to_owned(),
        };
        Key(host, self.destination.port())
    }
}

/// What an execution phase needs relays for.
pub(super) struct Needed {
    doors: Vec<Wanted>,
    /// The routes, those that were given as the box sees them put back as this host knows them.
    pub(super) routes: Routes,
}

/// The relays of a box.
#[derive(Debug, Default)]
pub(super) struct Doors {
    open: HashMap<Key, SocketAddr>,
    /// What was ever told to a program, so that a URL of setup holds after the cut.
    promised: HashMap<Key, (SocketAddr, Origin)>,
    /// The services that setup may reach.
    granted: Vec<Origin>,
}

impl Doors {
    pub(super) fn find(&self, wanted: &Wanted) -> Option<SocketAddr> {
        self.open.get(&wanted.key()).copied()
    }

    /// The relays went with the policy that they belonged to. The ports that were promised stay so.
    pub(super) fn forget_all(&mut self) {
        self.open.clear();
        self.granted.clear();
    }

    /// A relay while the box's network is open.
    pub(super) async fn open_in_setup(&mut self, network: &BoxNetwork, wanted: &Wanted) -> Result<SocketAddr> {
        let Some(origin) = &wanted.origin else {
            return Err(Error::new(ErrorKind::Other, "setup has no rules"));
        };
        let key = wanted.key();
        let listener = match self.promised.get(&key) {
            Some((promised, _)) => listen_near(&network.link, *promised).await?,
            None => listen_near(&network.link, wanted.listens_at()).await?,
        };
        if !self.granted.contains(origin) {
            self.granted.push(origin.clone());
        }
        let routes: Routes = self.granted.iter().cloned().collect();
        let policy = match network.port {
            Some(_) => EgressPolicy::setup_with(routes),
            None => EgressPolicy::execution(Policy::framework_only(), routes),
        };
        network.proxy.switch(policy, Older::Recheck).await;
        let address = network.proxy.relay_route(listener, origin)?.address();
        self.open.insert(key.clone(), address);
        self.promised.insert(key, (address, origin.clone()));
        Ok(address)
    }

    /// What `policy` and `routes` need relays for.
    pub(super) fn needed(&self, policy: &Policy, routes: &Routes) -> Needed {
        let routes: Routes = routes.iter().map(|origin| self.as_host_knows(origin)).collect();
        let mut doors: Vec<Wanted> = routes.iter().map(Wanted::route).collect();
        doors.retain(|wanted| wanted.needs_door(true));
        doors.extend(policy.relays().into_iter().map(|destination| Wanted {
            destination,
            origin: None,
        }));
        Needed { doors, routes }
    }

    /// A route that [`BoxNetwork::host_url`] made of another one, as that one.
    fn as_host_knows(&self, origin: &Origin) -> Origin {
        let key = Wanted::route(origin).key();
        if !origin.is_loopback() || self.promised.contains_key(&key) {
            return origin.clone();
        }
        let at = Wanted::route(origin).listens_at();
        let promised = self.promised.values().find(|(address, _)| *address == at);
        promised.map_or_else(|| origin.clone(), |(_, known)| known.clone())
    }

    /// The relays of the execution phase, whose policy is in force already.
    pub(super) async fn open_for_execution(&mut self, network: &BoxNetwork, needed: Needed) -> Result<()> {
        self.forget_all();
        for wanted in needed.doors {
            let key = wanted.key();
            if self.open.contains_key(&key) {
                continue;
            }
            let listener = match self.promised.get(&key) {
                Some((promised, _)) => network.link.listen(*promised).await.map_err(|error| {
                    let message = format!("the relay to {} cannot listen where it was promised", wanted.origin());
                    Error::new(ErrorKind::NetworkPolicy, message).with_source(error)
                })?,
                None => listen_near(&network.link, wanted.listens_at()).await?,
            };
            let relay = match &wanted.origin {
                Some(origin) => network.proxy.relay_route(listener, origin),
                None => network.proxy.relay(listener, &wanted.destination),
            };
            // A rule that a block rule overrides gets no relay.
            match relay {
                Ok(relay) => {
                    self.open.insert(key.clone(), relay.address());
                    if let Some(origin) = wanted.origin {
                        self.promised.insert(key, (relay.address(), origin));
                    }
                }
                Err(error) if wanted.origin.is_none() => tracing::debug!(%error, "no relay"),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// `url` with its host and port replaced by those of a relay, as far as they differ.
pub(super) fn rewrite(url: &str, address: SocketAddr) -> Result<String> {
    let bad = || Error::invalid_argument("url", "it is no URL");
    let start = url.find("://").ok_or_else(bad)? + 3;
    let end = url
        .get(start..)
        .and_then(|rest| rest.find(['/', '?', '#']))
        .map_or(url.len(), |length| start + length);
    let (head, authority, tail) = (
        url.get(..start).ok_or_else(bad)?,
        url.get(start..end).ok_or_else(bad)?,
        url.get(end..).ok_or_else(bad)?,
    );
    let (user, place) = match authority.rfind('@') {
        Some(at) => authority.split_at(at + 1),
        None => ("", authority),
    };
    let wanted = Wanted::of_url(url)?;
    // `localhost` stays what it is: cookies, certificates and the Host header know it by that name.
    let keeps_host = match wanted.destination.address() {
        Some(own) => own == address.ip(),
        None => wanted.destination.host() == "localhost" && address.ip() == IpAddr::from(Ipv4Addr::LOCALHOST),
    };
    if keeps_host && wanted.destination.port() == address.port() {
        return Ok(url.to_owned());
    }
    let host = match place
        .rfind(':')
        .filter(|colon| !place.get(*colon..).unwrap_or("").contains(']'))
    {
        Some(colon) => place.get(..colon).unwrap_or(place),
        None => place,
    };
    let host = if keeps_host {
        host.to_owned()
    } else {
        SocketAddr::new(address.ip(), 0).ip().to_string()
    };
    let host = if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]")
    } else {
        host
    };
    Ok(format!("{head}{user}{host}:{}{tail}", address.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_changes_only_where_it_must() {
        for (url, address, expected) in [
            (
                "http://127.0.0.1:9000/v1?x=127.0.0.1:9000",
                "127.0.0.1:9000",
                "http://127.0.0.1:9000/v1?x=127.0.0.1:9000",
            ),
            (
                "http://127.0.0.1:9000/v1?x=127.0.0.1:9000",
                "127.0.0.1:41",
                "http://127.0.0.1:41/v1?x=127.0.0.1:9000",
            ),
            ("https://localhost/a#b", "127.0.0.1:443", "https://localhost/a#b"),
            ("https://localhost/a#b", "127.0.0.1:5000", "https://localhost:5000/a#b"),
            ("http://u:p@LOCALHOST:80", "127.0.0.1:5000", "http://u:p@LOCALHOST:5000"),
            ("ws://[::1]:70/s", "[::1]:70", "ws://[::1]:70/s"),
            ("ws://[::1]:70/s", "[::1]:71", "ws://[::1]:71/s"),
            ("ws://[::1]:70/s", "127.0.0.1:70", "ws://127.0.0.1:70/s"),
            ("http://a.localhost:80?q", "127.0.0.1:80", "http://127.0.0.1:80?q"),
            ("tcp://db.example:5432", "127.0.0.1:5432", "tcp://127.0.0.1:5432"),
        ] {
            assert_eq!(
                rewrite(url, address.parse().unwrap()).unwrap(),
                expected,
                "{url} {address}"
            );
        }
        for url in ["", "127.0.0.1:9000", "file:///x", "http://"] {
            assert_eq!(Wanted::of_url(url).unwrap_err().field(), Some("url"), "{url}");
        }
    }

    #[test]
    fn names_of_one_loopback_are_one_service() {
        let key = |url| Wanted::of_url(url).unwrap().key();
        assert_eq!(key("http://localhost:9000"), key("wss://127.0.0.1:9000/x"));
        assert_ne!(key("http://localhost:9000"), key("http://[::1]:9000"));
        assert_ne!(key("http://localhost:9000"), key("http://localhost:9001"));
        assert_ne!(key("tcp://a:5432"), key("tcp://b:5432"));
    }
}
