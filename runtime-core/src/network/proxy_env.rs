//! [`ProxyAddress`]: the proxy, and the environment that points programs to it.

use std::ffi::OsStr;
use std::fmt;

use crate::command::Env;

use super::destination::Bracketed;

/// The user name of the proxy's Basic authentication. Only the token is secret.
pub const PROXY_USER: &str = "verifiers";

const PROXY_NAMES: [&str; 4] = ["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"];
const NO_PROXY_NAMES: [&str; 2] = ["NO_PROXY", "no_proxy"];

/// What never goes through a proxy: servers inside the box and on its host.
const DIRECT: [&str; 3] = ["localhost", "127.0.0.1", "host.docker.internal"];

/// Where the proxy of a box listens, as the box sees it, and the token that it asks for. `Debug` hides the token.
#[derive(Clone, PartialEq, Eq)]
pub struct ProxyAddress {
    host: String,
    port: u16,
    token: String,
}

impl ProxyAddress {
    /// The proxy at `host` (a name, or an address without brackets) and `port`. The token must be safe in a URL, as
    /// URL-safe base64 is.
    pub fn new(host: impl Into<String>, port: u16, token: impl Into<String>) -> Self {
        Self {
            host: host.into(),
            port,
            token: token.into(),
        }
    }

    /// The variables for one program: `HTTP_PROXY` and `HTTPS_PROXY` with credentials, and `NO_PROXY` with loopback,
    /// in both spellings. They are laid *over* what the caller set.
    ///
    /// ```
    /// use runtime_core::network::ProxyAddress;
    /// let env = ProxyAddress::new("127.0.0.1", 3128, "T").env();
    /// assert_eq!(env.get("https_proxy").unwrap(), "http://verifiers:T@127.0.0.1:3128");
    /// assert_eq!(env.get("NO_PROXY").unwrap(), "localhost,127.0.0.1,host.docker.internal");
    /// ```
    pub fn env(&self) -> Env {
        let url = format!(
            "http://{PROXY_USER}:{}@{}:{}",
            self.token,
            Bracketed(&self.host),
            self.port
        );
        let direct = DIRECT.join(",");
        let proxies = PROXY_NAMES.map(|name| (name, url.clone()));
        proxies
            .into_iter()
            .chain(NO_PROXY_NAMES.map(|name| (name, direct.clone())))
            .collect()
    }
}

impl fmt::Debug for ProxyAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProxyAddress({}:{}, token hidden)", Bracketed(&self.host), self.port)
    }
}

/// When a program needs the proxy's variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyUse {
    /// The box has a policy that puts something out of reach.
    pub restricted: bool,
    /// The network of the box is closed.
    pub cut: bool,
    /// The program is a background server, which may outlive the phase that it was started in.
    pub background: bool,
}

impl ProxyUse {
    /// The variables to lay over the program's environment, which is made of the image's and the caller's.
    ///
    /// A restricted box that is cut, and every background server of a restricted box, gets the proxy: it has to be
    /// using it by the time that the cut comes. Anything else goes direct and gets [`no_proxy_env`].
    pub fn env(self, proxy: &ProxyAddress, image: &Env, caller: &Env) -> Env {
        if self.restricted && (self.cut || self.background) {
            proxy.env()
        } else {
            no_proxy_env(image, caller)
        }
    }
}

/// `NO_PROXY` and `no_proxy` with the entries of the image and of the caller, in both spellings and in this order, and
/// loopback at the end; each entry once. Without it a proxy that is baked into an image would capture servers inside
/// the box.
///
/// ```
/// use runtime_core::{Env, network::no_proxy_env};
/// let image = Env::from_iter([("NO_PROXY", "corp.example, ,localhost")]);
/// let caller = Env::from_iter([("no_proxy", "a.com,corp.example")]);
/// let env = no_proxy_env(&image, &caller);
/// assert_eq!(env.get("NO_PROXY").unwrap(), "corp.example,localhost,a.com,127.0.0.1,host.docker.internal");
/// assert_eq!(env.get("no_proxy"), env.get("NO_PROXY"));
/// ```
pub fn no_proxy_env(image: &Env, caller: &Env) -> Env {
    let written = [image, caller]
        .into_iter()
        .flat_map(|env| NO_PROXY_NAMES.map(|name| env.get(name)))
        .flatten()
        .map(OsStr::to_string_lossy);
    let mut entries: Vec<String> = Vec::new();
    for list in written.chain(DIRECT.map(Into::into)) {
        for entry in list.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            if !entries.iter().any(|known| known == entry) {
                entries.push(entry.to_owned());
            }
        }
    }
    let value = entries.join(",");
    NO_PROXY_NAMES.map(|name| (name, value.clone())).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(env: &Env) -> Vec<String> {
        env.iter()
            .map(|(name, _)| name.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn the_proxy_is_given_to_whoever_lives_behind_the_cut() {
        let proxy = ProxyAddress::new("127.0.0.1", 3128, "T");
        for (restricted, cut, background, proxied) in [
            (true, true, false, true),
            (true, true, true, true),
            (true, false, true, true),
            (true, false, false, false),
            (false, false, false, false),
            (false, false, true, false),
            (false, true, true, false),
        ] {
            let situation = ProxyUse {
                restricted,
                cut,
                background,
            };
            let env = situation.env(&proxy, &Env::new(), &Env::new());
            assert_eq!(env.get("HTTP_PROXY").is_some(), proxied, "{situation:?}");
            assert_eq!(env.get("NO_PROXY").unwrap(), "localhost,127.0.0.1,host.docker.internal");
        }
    }

    #[test]
    fn the_variables_override_what_the_caller_set() {
        let proxy = ProxyAddress::new("::1", 3128, "T");
        let caller = Env::from_iter([("HTTP_PROXY", "http://elsewhere"), ("no_proxy", "*"), ("KEEP", "1")]);
        let situation = ProxyUse {
            restricted: true,
            cut: true,
            background: false,
        };
        let env = caller.layered(&situation.env(&proxy, &Env::new(), &caller));
        assert_eq!(env.get("HTTP_PROXY").unwrap(), "http://verifiers:T@[::1]:3128");
        assert_eq!(env.get("no_proxy").unwrap(), "localhost,127.0.0.1,host.docker.internal");
        assert_eq!(env.get("KEEP").unwrap(), "1");
        assert_eq!(
            names(&proxy.env()),
            [
                "HTTPS_PROXY",
                "HTTP_PROXY",
                "NO_PROXY",
                "http_proxy",
                "https_proxy",
                "no_proxy"
            ]
        );
    }

    #[test]
    fn an_open_box_keeps_its_exceptions_and_gets_no_proxy() {
        let image = Env::from_iter([("NO_PROXY", "a, b,,"), ("no_proxy", "c"), ("HTTP_PROXY", "http://corp")]);
        let caller = Env::from_iter([("NO_PROXY", "d,a"), ("no_proxy", " e ")]);
        let env = no_proxy_env(&image, &caller);
        assert_eq!(names(&env), ["NO_PROXY", "no_proxy"]);
        assert_eq!(
            env.get("no_proxy").unwrap(),
            "a,b,c,d,e,localhost,127.0.0.1,host.docker.internal"
        );
    }

    #[test]
    fn the_token_is_not_printed() {
        let proxy = ProxyAddress::new("127.0.0.1", 3128, "hunter2");
        assert_eq!(format!("{proxy:?}"), "ProxyAddress(127.0.0.1:3128, token hidden)");
        assert!(!format!("{:?}", proxy.env()).contains("hunter2"));
    }
}
