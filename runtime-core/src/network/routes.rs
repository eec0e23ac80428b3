//! [`Routes`]: the framework's own origins, which stay reachable whatever the policy says.

use std::fmt;

use serde::Serialize;

use super::destination::{Bracketed, Destination, Scheme};
use super::host::HostPattern;
use super::rule::Rule;
use crate::error::{Error, Result};

/// The most routes at a time.
const MAX_ROUTES: usize = 1024;

/// Scheme, host and port of a service of the framework.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Origin(Destination);

impl Origin {
    /// Its scheme.
    pub fn scheme(&self) -> Scheme {
        self.0.scheme()
    }

    /// Its name or address, without brackets.
    pub fn host(&self) -> &str {
        self.0.host()
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.0.port()
    }

    /// It as a destination.
    pub fn destination(&self) -> &Destination {
        &self.0
    }

    /// Whether it is on this very machine.
    pub fn is_loopback(&self) -> bool {
        self.0.is_loopback()
    }
}

/// `https://a.com:443`.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}:{}", self.scheme(), Bracketed(self.host()), self.port())
    }
}

impl Serialize for Origin {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The origins of the framework's own services: the model endpoint, tool servers. Each once, in the order given.
///
/// ```
/// use runtime_core::network::{Routes, Scheme};
///
/// let routes = Routes::new(["https://model.example/v1?key=k", "wss://model.example/stream", "http://127.0.0.1:9000"])?;
/// let origins: Vec<String> = routes.iter().map(|origin| origin.to_string()).collect();
/// assert_eq!(origins, ["https://model.example:443", "http://127.0.0.1:9000"]);
/// # Ok::<(), runtime_core::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Routes(Vec<Origin>);

impl Routes {
    /// No route.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// The origins of these URLs: `http`, `https`, `ws` (which is `http`), `wss` (which is `https`), or `tcp` with a
    /// port. User information, path, query and fragment do not matter.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) with the field `routes[2]`; the message never repeats the
    /// URL, which may carry a secret.
    pub fn new<S: AsRef<str>>(urls: impl IntoIterator<Item = S>) -> Result<Self> {
        let mut origins = Vec::new();
        for (index, url) in urls.into_iter().enumerate() {
            let error = |message: String| Error::invalid_argument(format!("routes[{index}]"), message);
            if index >= MAX_ROUTES {
                return Err(Error::invalid_argument(
                    "routes",
                    format!("more than {MAX_ROUTES} routes"),
                ));
            }
            let origin = parse(url.as_ref()).map_err(error)?;
            if !origins.contains(&origin) {
                origins.push(origin);
            }
        }
        Ok(Self(origins))
    }

    /// The origins.
    pub fn iter(&self) -> std::slice::Iter<'_, Origin> {
        self.0.iter()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The route that `destination` is.
    pub fn find(&self, destination: &Destination) -> Option<&Origin> {
        self.0.iter().find(|origin| origin.0 == *destination)
    }

    /// What a tunnel to `host` and `port` carries: plain HTTP if a route says so, else TLS.
    pub fn tunnel_scheme(&self, host: &str, port: u16) -> Scheme {
        match self.find(&Destination::new(Scheme::Http, host, port)) {
            Some(_) => Scheme::Http,
            None => Scheme::Https,
        }
    }
}

/// Each origin once, in the order given.
impl FromIterator<Origin> for Routes {
    fn from_iter<I: IntoIterator<Item = Origin>>(origins: I) -> Self {
        let mut routes = Vec::new();
        for origin in origins {
            if !routes.contains(&origin) {
                routes.push(origin);
            }
        }
        Self(routes)
    }
}

impl<'a> IntoIterator for &'a Routes {
    type Item = &'a Origin;
    type IntoIter = std::slice::Iter<'a, Origin>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

fn parse(url: &str) -> Result<Origin, String> {
    // A rule with a scheme and a plain host is what is wanted, so its parser does the work.
    let rule = authority_of(url).and_then(|authority| Rule::parse(authority).map_err(|problem| problem.to_string()))?;
    let (scheme, default_port) = match rule.scheme() {
        Some("http" | "ws") => (Scheme::Http, Some(80)),
        Some("https" | "wss") => (Scheme::Https, Some(443)),
        Some("tcp") => (Scheme::Tcp, None),
        Some(_) => return Err("its scheme is none of http, https, ws, wss and tcp".to_owned()),
        None => return Err("it is no URL: it has no scheme".to_owned()),
    };
    let host = match rule.host() {
        Some(HostPattern::Name(name)) => name.clone(),
        Some(HostPattern::Address(address)) => address.to_string(),
        Some(HostPattern::Empty) | None => return Err("it has no host".to_owned()),
        Some(_) => return Err("a route is one host, without wildcards".to_owned()),
    };
    match rule.explicit_port().or(default_port) {
        Some(0) => Err("nothing listens on port 0".to_owned()),
        Some(port) => Ok(Origin(Destination::new(scheme, &host, port))),
        None => Err("a tcp route needs a port".to_owned()),
    }
}

/// `scheme://authority` of a URL, so that a long or unusual path is no reason to refuse a route.
fn authority_of(url: &str) -> Result<&str, String> {
    let start = url.find("://").ok_or("it is no URL: it has no scheme")? + 3;
    let length = url.get(start..).and_then(|rest| rest.find(['/', '?', '#']));
    let end = length.map_or(url.len(), |length| start + length);
    Ok(url.get(..end).unwrap_or(url))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn urls_become_origins_once_each() {
        let routes = Routes::new([
            "HTTPS://A.com./x?y#z",
            "https://a.com:443",
            "wss://a.com",
            "http://user:secret@a.com",
            "ws://[::1]:9000/s",
            "tcp://db:5432",
            "https://a.com/a path/with·unicode",
        ])
        .unwrap();
        let origins: Vec<String> = routes.iter().map(Origin::to_string).collect();
        assert_eq!(
            origins,
            [
                "https://a.com:443",
                "http://a.com:80",
                "http://[::1]:9000",
                "tcp://db:5432"
            ]
        );
        assert_eq!(serde_json::to_value(&routes).unwrap()[2], "http://[::1]:9000");
    }

    #[test]
    fn a_wrong_url_is_refused_by_its_place_and_without_its_text() {
        for url in [
            "",
            "a.com",
            "://a.com",
            "ftp://a.com",
            "https://",
            "https:///x",
            "https://*.a.com",
            "https://a.com:70000",
            "https://a.com:0",
            "tcp://db",
            "https://::1",
            "https://[x]",
            "https://a b",
            "https://u:hunter2@a.com:x",
        ] {
            let error = Routes::new(["https://ok.example", url]).unwrap_err();
            assert_eq!(
                (error.kind(), error.field()),
                (ErrorKind::InvalidArgument, Some("routes[1]")),
                "{url}"
            );
            assert!(!format!("{error} {error:?}").contains("hunter2"));
        }
    }

    #[test]
    fn a_route_is_exactly_its_scheme_host_and_port() {
        let routes = Routes::new(["http://svc:9000"]).unwrap();
        let found = |scheme, host, port| routes.find(&Destination::new(scheme, host, port)).is_some();
        assert!(found(Scheme::Http, "SVC.", 9000));
        assert!(!found(Scheme::Https, "svc", 9000));
        assert!(!found(Scheme::Http, "svc", 9001));
        assert!(!found(Scheme::Http, "a.svc", 9000));
        assert_eq!(routes.tunnel_scheme("svc", 9000), Scheme::Http);
        assert_eq!(routes.tunnel_scheme("svc", 443), Scheme::Https);
    }

    #[test]
    fn the_number_of_routes_is_bounded() {
        let urls = |count: usize| (0..count).map(|port| format!("http://a:{}", port + 1));
        assert_eq!(Routes::new(urls(1024)).unwrap().len(), 1024);
        assert_eq!(Routes::new(urls(1025)).unwrap_err().field(), Some("routes"));
    }
}
