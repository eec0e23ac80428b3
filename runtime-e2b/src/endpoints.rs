//! [`Endpoints`]: where the provider is reached, and with which key.

use std::collections::BTreeMap;

use runtime_core::{Error, ErrorKind, Orphan, Result};

use crate::api_key::ApiKey;
use crate::config::E2bConfig;

const DEFAULT_DOMAIN: &str = "e2b.app";

/// The port of envd in every box.
pub(crate) const ENVD_PORT: u16 = 49983;

/// The environment variables that the provider documents.
#[derive(Debug, Default)]
pub(crate) struct Variables {
    api_key: Option<ApiKey>,
    domain: Option<String>,
    api_url: Option<String>,
    sandbox_url: Option<String>,
}

impl Variables {
    pub(crate) fn from_env() -> Self {
        let read = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self {
            api_key: read("E2B_API_KEY").map(ApiKey::new),
            domain: read("E2B_DOMAIN"),
            api_url: read("E2B_API_URL"),
            sandbox_url: read("E2B_SANDBOX_URL"),
        }
    }
}

/// Where the provider is reached.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Endpoints {
    /// Base URL of the control plane, without a trailing slash.
    pub(crate) api_url: String,
    /// Base URL of envd for every box, if there is one.
    pub(crate) sandbox_url: Option<String>,
    pub(crate) domain: String,
    pub(crate) port_url: String,
    pub(crate) api_key: Option<ApiKey>,
}

impl Endpoints {
    /// What the configuration says, else the environment, else the hosted service.
    pub(crate) fn resolve(config: &E2bConfig, variables: &Variables) -> Result<Self> {
        let domain = choose(&config.domain, &variables.domain).unwrap_or_else(|| DEFAULT_DOMAIN.to_owned());
        let is_domain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':');
        if domain.is_empty() || !domain.chars().all(is_domain) {
            return Err(Error::invalid_config("domain", format!("{domain:?} is no domain")));
        }
        let api_url = match choose(&config.api_url, &variables.api_url) {
            Some(url) => base_url("api_url", &url)?,
            None => format!("https://api.{domain}"),
        };
        let sandbox_url = choose(&config.sandbox_url, &variables.sandbox_url)
            .map(|url| base_url("sandbox_url", &url))
            .transpose()?;
        let port_url = match &config.port_url {
            Some(pattern) if pattern.contains("{port}") => {
                base_url(
                    "port_url",
                    &pattern
                        .replace("{port}", "1")
                        .replace("{id}", "i")
                        .replace("{domain}", "d"),
                )?;
                pattern.clone()
            }
            Some(pattern) => {
                return Err(Error::invalid_config(
                    "port_url",
                    format!("{pattern:?} must have {{port}} in it"),
                ));
            }
            None => "https://{port}-{id}.{domain}".to_owned(),
        };
        Ok(Self {
            api_url,
            sandbox_url,
            domain,
            port_url,
            api_key: config.api_key.clone().or_else(|| variables.api_key.clone()),
        })
    }

    /// Where the box of a dead owner is deleted. Its lease names the control plane, but a key goes only where the
    /// configuration, the environment, the provider's own domain or this machine is.
    pub(crate) fn of_orphan(orphan: &Orphan, config: &E2bConfig, variables: &Variables) -> Result<Self> {
        let mut endpoints = Self::resolve(config, variables)?;
        let Some(api_url) = orphan.context.get("api_url") else {
            return Ok(endpoints);
        };
        let api_url = base_url("api_url", api_url)?;
        if api_url != endpoints.api_url {
            if !is_trusted(&api_url) {
                return Err(Error::new(
                    ErrorKind::Unauthorized,
                    format!(
                        "the lease names the control plane {api_url}; set E2B_API_URL to it to say that the key may go there"
                    ),
                ));
            }
            endpoints.api_url = api_url;
        }
        Ok(endpoints)
    }

    pub(crate) fn lease_context(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("api_url".to_owned(), self.api_url.clone())])
    }

    /// The key.
    pub(crate) fn key(&self) -> Result<&ApiKey> {
        match &self.api_key {
            Some(key) if key.is_well_formed() => Ok(key),
            Some(_) => Err(Error::new(
                ErrorKind::Unauthorized,
                "E2B_API_KEY has characters that no key has",
            )),
            None => Err(Error::new(
                ErrorKind::Unauthorized,
                "no API key: set E2B_API_KEY, or `api_key` in the configuration",
            )),
        }
    }

    /// Base URL of envd of a box. `domain` is what the create said.
    pub(crate) fn envd_url(&self, id: &str, domain: Option<&str>) -> String {
        match &self.sandbox_url {
            Some(url) => url.clone(),
            None => format!("https://{ENVD_PORT}-{id}.{}", domain.unwrap_or(&self.domain)),
        }
    }

    /// URL of a port of a box.
    pub(crate) fn port_url(&self, port: u16, id: &str, domain: Option<&str>) -> String {
        self.port_url
            .replace("{port}", &port.to_string())
            .replace("{id}", id)
            .replace("{domain}", domain.unwrap_or(&self.domain))
    }
}

fn choose(config: &Option<String>, variable: &Option<String>) -> Option<String> {
    config.clone().or_else(|| variable.clone())
}

fn is_trusted(url: &str) -> bool {
    let Ok(url) = reqwest::Url::parse(url) else {
        return false;
    };
    let host = url.host_str().unwrap_or_default();
    let own = host == DEFAULT_DOMAIN || host.ends_with(&format!(".{DEFAULT_DOMAIN}"));
    (own && url.scheme() == "https") || is_loopback(&url)
}

/// Whether a URL names this machine.
pub(crate) fn is_loopback(url: &reqwest::Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// A base URL without its trailing slash.
fn base_url(field: &'static str, text: &str) -> Result<String> {
    let refuse = |why: String| Error::invalid_config(field, why);
    let url = reqwest::Url::parse(text).map_err(|error| refuse(format!("{text:?} is no URL: {error}")))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(refuse(format!("{text:?} must be an http or https URL")));
    }
    if url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() || url.password().is_some() {
        return Err(refuse("a base URL has no user, query and fragment".into()));
    }
    Ok(text.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables() -> Variables {
        Variables {
            api_key: Some(ApiKey::new("from_env")),
            domain: Some("foo.test:8443".into()),
            api_url: None,
            sandbox_url: None,
        }
    }

    #[test]
    fn urls_are_built_by_plain_concatenation() {
        let endpoints = Endpoints::resolve(&E2bConfig::default(), &variables()).expect("fine");
        assert_eq!(endpoints.api_url, "https://api.foo.test:8443");
        assert_eq!(endpoints.envd_url("i1", None), "https://49983-i1.foo.test:8443");
        assert_eq!(endpoints.envd_url("i1", Some("bar.test")), "https://49983-i1.bar.test");
        assert_eq!(endpoints.port_url(8000, "i1", None), "https://8000-i1.foo.test:8443");
        let hosted = Endpoints::resolve(&E2bConfig::default(), &Variables::default()).expect("fine");
        assert_eq!(hosted.api_url, "https://api.e2b.app");
        assert_eq!(hosted.key().expect_err("none").kind(), ErrorKind::Unauthorized);
    }

    #[test]
    fn the_configuration_wins_over_the_environment() {
        let config = E2bConfig {
            api_key: Some(ApiKey::new("own")),
            api_url: Some("http://127.0.0.1:1/".into()),
            sandbox_url: Some("http://127.0.0.1:2".into()),
            port_url: Some("http://127.0.0.1:3/p/{port}/{id}".into()),
            ..E2bConfig::default()
        };
        let endpoints = Endpoints::resolve(&config, &variables()).expect("fine");
        assert_eq!(endpoints.key().expect("own").expose(), "own");
        assert_eq!(endpoints.api_url, "http://127.0.0.1:1");
        assert_eq!(endpoints.envd_url("i1", Some("x")), "http://127.0.0.1:2");
        assert_eq!(endpoints.port_url(80, "i1", None), "http://127.0.0.1:3/p/80/i1");
    }

    #[test]
    fn a_lease_does_not_decide_where_the_key_goes() {
        let orphan = |url: &str| Orphan {
            name: "n".into(),
            id: None,
            run_scope: "r".into(),
            context: [("api_url".to_owned(), url.to_owned())].into(),
        };
        for url in ["https://evil.test", "http://api.e2b.app", "https://e2b.app.evil.test"] {
            let error = Endpoints::of_orphan(&orphan(url), &E2bConfig::default(), &variables()).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Unauthorized);
            let config = E2bConfig {
                api_url: Some(url.into()),
                ..E2bConfig::default()
            };
            let chosen = Endpoints::of_orphan(&orphan(url), &config, &variables()).expect(url);
            assert_eq!(chosen.api_url, url);
        }
        for url in [
            "https://api.e2b.app",
            "http://127.0.0.1:9",
            "http://[::1]:9",
            "https://api.foo.test:8443",
        ] {
            assert_eq!(
                Endpoints::of_orphan(&orphan(url), &E2bConfig::default(), &variables())
                    .expect(url)
                    .api_url,
                url
            );
        }
    }
}
