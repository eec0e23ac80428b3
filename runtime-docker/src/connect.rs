//! Finding the engine: environment, contexts, well-known sockets, and for Podman a service of our own.

use std::collections::HashMap;
use std::env;
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bollard::errors::Error as ApiError;
use bollard::{ClientVersion, Docker};
use runtime_core::{Error, ErrorKind, Result};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::config::EngineKind;
use crate::error::from_api;

/// The newest API that we speak, and the oldest that has what we need.
const NEWEST: ClientVersion = ClientVersion {
    major_version: 1,
    minor_version: 50,
};
const OLDEST: ClientVersion = ClientVersion {
    major_version: 1,
    minor_version: 41,
};

/// How long the engine may take to answer one request.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// How often an engine behind TLS is asked for its version when the connection breaks.
const VERSION_ATTEMPTS: usize = 5;

/// How long a service of our own may take to be there.
const SERVICE_START: Duration = Duration::from_secs(20);

/// After how many idle seconds a service that we started ends by itself, should we not live to end it.
const SERVICE_IDLE: u32 = 300;

/// Where an engine listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Endpoint {
    /// A socket of this host.
    Unix(PathBuf),
    /// Plain HTTP.
    Tcp(String),
    /// HTTP over TLS, with the directory of `ca.pem`, `cert.pem` and `key.pem`.
    Tls(String, PathBuf),
}

impl Endpoint {
    /// The address as it would be configured.
    pub(crate) fn address(&self) -> String {
        match self {
            Self::Unix(path) => format!("unix://{}", path.display()),
            Self::Tcp(address) | Self::Tls(address, _) => format!("tcp://{address}"),
        }
    }

    /// Where this host reaches the ports that containers publish: on the engine's loopback, so nowhere for an engine
    /// whose address is another host's.
    pub(crate) fn published_at(&self) -> Option<&'static str> {
        let here = match self {
            Self::Unix(_) => true,
            Self::Tcp(address) | Self::Tls(address, _) => {
                let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
                let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
                host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
            }
        };
        here.then_some("127.0.0.1")
    }

    /// The directory of its certificates.
    pub(crate) fn certs(&self) -> Option<&Path> {
        match self {
            Self::Tls(_, certs) => Some(certs),
            Self::Unix(_) | Self::Tcp(_) => None,
        }
    }

    /// Whether the engine's containers are processes of this host, as far as the address tells.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    fn client(&self, kind: EngineKind, version: &ClientVersion) -> Result<Docker> {
        let timeout = REQUEST_TIMEOUT.as_secs();
        let client = match self {
            Self::Unix(path) => Docker::connect_with_unix(&path.to_string_lossy(), timeout, version),
            Self::Tcp(address) => Docker::connect_with_http(&format!("tcp://{address}"), timeout, version),
            #[cfg(feature = "tls")]
            Self::Tls(address, certs) => crate::tls::client(address, certs, timeout, version)?,
            #[cfg(not(feature = "tls"))]
            Self::Tls(..) => {
                let message = "the engine wants TLS: turn on the feature `tls` of `runtime-docker`";
                return Err(Error::unsupported(message));
            }
        };
        client.map_err(|error| from_api(kind, "connecting", error))
    }
}

/// The variables that decide where the engine is; a value so that tests bring their own.
#[derive(Debug, Clone, Default)]
pub(crate) struct Surroundings {
    pub(crate) vars: HashMap<String, String>,
    pub(crate) home: Option<PathBuf>,
}

impl Surroundings {
    pub(crate) fn current() -> Self {
        const NAMES: [&str; 7] = [
            "DOCKER_HOST",
            "DOCKER_CONTEXT",
            "DOCKER_CONFIG",
            "DOCKER_CERT_PATH",
            "DOCKER_TLS_VERIFY",
            "CONTAINER_HOST",
            "XDG_RUNTIME_DIR",
        ];
        let vars = NAMES
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), env::var(name).ok()?)))
            .collect();
        Self {
            vars,
            home: env::home_dir(),
        }
    }

    fn var(&self, name: &str) -> Option<&str> {
        self.vars
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }

    /// The directory of the Docker client's configuration.
    pub(crate) fn docker_config(&self) -> Option<PathBuf> {
        match self.var("DOCKER_CONFIG") {
            Some(dir) => Some(dir.into()),
            None => self.home.as_ref().map(|home| home.join(".docker")),
        }
    }
}

/// Reads an address as `DOCKER_HOST` has it.
fn parse(address: &str, certs: Option<PathBuf>) -> Result<Endpoint> {
    if let Some(path) = address.strip_prefix("unix://") {
        return Ok(Endpoint::Unix(path.into()));
    }
    let rest = ["tcp://", "http://", "https://"]
        .iter()
        .find_map(|scheme| address.strip_prefix(scheme));
    match rest.map(|rest| rest.trim_end_matches('/')) {
        Some("") | None => {
            let message = if address.starts_with("ssh://") {
                "engines over ssh are not supported: forward the socket with `ssh -L` and name it with unix://"
            } else {
                "an engine's address is unix:///path or tcp://host:port"
            };
            Err(Error::invalid_config("host", format!("`{address}`: {message}")))
        }
        Some(rest) => match certs {
            Some(certs) => Ok(Endpoint::Tls(rest.to_owned(), certs)),
            None if address.starts_with("https://") => Err(Error::invalid_config(
                "host",
                "TLS needs DOCKER_CERT_PATH with ca.pem, cert.pem and key.pem",
            )),
            None => Ok(Endpoint::Tcp(rest.to_owned())),
        },
    }
}

/// Where the configuration and the surroundings say that the engine is; `None` is a Podman without a service.
pub(crate) fn find(kind: EngineKind, host: Option<&str>, from: &Surroundings) -> Result<Option<Endpoint>> {
    let certs = || -> Option<PathBuf> {
        from.var("DOCKER_TLS_VERIFY")?;
        from.var("DOCKER_CERT_PATH")
            .map(PathBuf::from)
            .or_else(|| from.docker_config())
    };
    if let Some(host) = host {
        return parse(host, certs()).map(Some);
    }
    let runtime_dir = from.var("XDG_RUNTIME_DIR").map(PathBuf::from);
    match kind {
        EngineKind::Docker => {
            if let Some(host) = from.var("DOCKER_HOST") {
                return parse(host, certs()).map(Some);
            }
            if let Some(endpoint) = context(from)? {
                return Ok(Some(endpoint));
            }
            let system = PathBuf::from("/var/run/docker.sock");
            let rootless = runtime_dir.map(|dir| dir.join("docker.sock"));
            match rootless {
                Some(rootless) if !system.exists() && rootless.exists() => Ok(Some(Endpoint::Unix(rootless))),
                _ => Ok(Some(Endpoint::Unix(system))),
            }
        }
        EngineKind::Podman => {
            if let Some(host) = from.var("CONTAINER_HOST") {
                return parse(host, None).map(Some);
            }
            let root = rustix::process::geteuid().is_root();
            let socket = if root {
                Some(PathBuf::from("/run/podman/podman.sock"))
            } else {
                runtime_dir.map(|dir| dir.join("podman/podman.sock"))
            };
            Ok(socket.filter(|socket| socket.exists()).map(Endpoint::Unix))
        }
    }
}

#[derive(Deserialize)]
struct ClientConfig {
    #[serde(rename = "currentContext")]
    current_context: Option<String>,
}

#[derive(Deserialize)]
struct ContextMeta {
    #[serde(rename = "Endpoints")]
    endpoints: HashMap<String, ContextEndpoint>,
}

#[derive(Deserialize)]
struct ContextEndpoint {
    #[serde(rename = "Host")]
    host: Option<String>,
}

/// The endpoint of the Docker context in use, if one is.
fn context(from: &Surroundings) -> Result<Option<Endpoint>> {
    let Some(dir) = from.docker_config() else {
        return Ok(None);
    };
    let name = match from.var("DOCKER_CONTEXT") {
        Some(name) => name.to_owned(),
        None => {
            let Ok(text) = std::fs::read_to_string(dir.join("config.json")) else {
                return Ok(None);
            };
            match serde_json::from_str::<ClientConfig>(&text) {
                Ok(ClientConfig {
                    current_context: Some(name),
                }) => name,
                Ok(_) => return Ok(None),
                Err(error) => {
                    let message = format!("{} is not valid: {error}", dir.join("config.json").display());
                    return Err(Error::invalid_config("host", message));
                }
            }
        }
    };
    if name.is_empty() || name == "default" {
        return Ok(None);
    }
    let id = runtime_core::names::hex(&Sha256::digest(name.as_bytes()));
    let bad = |detail: String| Error::invalid_config("host", format!("the Docker context `{name}` {detail}"));
    let path = dir.join("contexts/meta").join(&id).join("meta.json");
    let text = std::fs::read_to_string(&path).map_err(|error| bad(format!("cannot be read: {error}")))?;
    let meta: ContextMeta = serde_json::from_str(&text).map_err(|error| bad(format!("is not valid: {error}")))?;
    let host = meta
        .endpoints
        .get("docker")
        .and_then(|endpoint| endpoint.host.as_deref());
    let host = host.ok_or_else(|| bad("names no engine".to_owned()))?;
    let certs = dir.join("contexts/tls").join(&id).join("docker");
    // Never plain where a certificate is missing.
    parse(host, certs.is_dir().then_some(certs)).map(Some)
}

/// Answers about endpoints that do not change while the process lives.
static VERSIONS: Mutex<Option<HashMap<Endpoint, (usize, usize)>>> = Mutex::new(None);

/// A client for the engine of this kind, its API version negotiated (once per endpoint).
///
/// # Errors
/// [`Unavailable`](ErrorKind::Unavailable), [`PermissionDenied`](ErrorKind::PermissionDenied) with the fix,
/// [`Unsupported`](ErrorKind::Unsupported) for an engine that is too old.
pub(crate) async fn connect(kind: EngineKind, host: Option<&str>) -> Result<(Docker, Endpoint)> {
    let endpoint = match find(kind, host, &Surroundings::current())? {
        Some(endpoint) => endpoint,
        None => Endpoint::Unix(podman_service().await?),
    };
    Ok((client_of(kind, &endpoint).await?, endpoint))
}

/// A client for an engine that a lease names, with the certificates that its box was made with.
///
/// # Errors
/// As [`connect`].
pub(crate) async fn connect_again(kind: EngineKind, host: &str, certs: PathBuf) -> Result<(Docker, Endpoint)> {
    let endpoint = parse(host, Some(certs))?;
    Ok((client_of(kind, &endpoint).await?, endpoint))
}

async fn client_of(kind: EngineKind, endpoint: &Endpoint) -> Result<Docker> {
    let known = lock(&VERSIONS)
        .as_ref()
        .and_then(|versions| versions.get(endpoint).copied());
    if let Some((major_version, minor_version)) = known {
        let version = ClientVersion {
            major_version,
            minor_version,
        };
        return endpoint.client(kind, &version);
    }
    let client = endpoint.client(kind, &NEWEST)?;
    let mut attempts = 1;
    let client = loop {
        let error = match client.clone().negotiate_version().await {
            Ok(client) => break client,
            Err(error) => error,
        };
        // An engine that refuses our certificate does so after the handshake, and what comes of the request may be known
        // before the reason is read.
        let broke = matches!(&error, ApiError::HyperLegacyError { err } if !err.is_connect());
        let error = from_api(kind, "asking for the version", error);
        if !(broke && error.is_retryable() && endpoint.certs().is_some() && attempts < VERSION_ATTEMPTS) {
            return Err(error);
        }
        attempts += 1;
    };
    let version = client.client_version();
    if version < OLDEST {
        return Err(Error::unsupported(format!(
            "{kind} speaks API {version}; 1.41 or newer is needed"
        )));
    }
    lock(&VERSIONS)
        .get_or_insert_default()
        .insert(endpoint.clone(), (version.major_version, version.minor_version));
    Ok(client)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A `podman system service` that this process owns.
struct Service {
    child: Child,
    socket: PathBuf,
}

/// The socket of Podman's API where no service runs: one of our own, started on demand and again when it has ended. It
/// ends by itself when nobody uses it.
async fn podman_service() -> Result<PathBuf> {
    static SERVICE: OnceLock<tokio::sync::Mutex<Option<Service>>> = OnceLock::new();
    let mut service = SERVICE.get_or_init(Default::default).lock().await;
    if let Some(running) = service.as_mut()
        && matches!(running.child.try_wait(), Ok(None))
    {
        return Ok(running.socket.clone());
    }
    let directory = service_dir()?;
    let socket = directory.join("podman.sock");
    // A shell beside it reads from a pipe that ends with this process, however it ends; then it ends the whole group.
    const SCRIPT: &str = r#"
        exec 3<&0
        { read -r _ <&3; rm -rf -- "$2"; kill -TERM $$; sleep 5; kill -KILL 0; } &
        exec podman system service --time "$3" "unix://$1" </dev/null 3<&-
    "#;
    let log = directory.join("log");
    let messages = std::fs::File::create(&log).map_err(|error| Error::io("starting `podman system service`", error))?;
    if !is_installed("podman") {
        return Err(Error::new(ErrorKind::Unavailable, "Podman is not installed"));
    }
    let mut child = Command::new("sh")
        .args(["-c", SCRIPT, "sh"])
        .args([&socket, &directory])
        .arg(SERVICE_IDLE.to_string())
        // It would hand them to every container.
        .env_remove("HTTP_PROXY")
        .env_remove("HTTPS_PROXY")
        .env_remove("FTP_PROXY")
        .env_remove("http_proxy")
        .env_remove("https_proxy")
        .env_remove("ftp_proxy")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        // Not a pipe: it would end with the executor that reads it, and Podman with its next message.
        .stderr(messages)
        .process_group(0)
        .spawn()
        .map_err(|error| Error::io("starting `podman system service`", error))?;
    let up = async {
        loop {
            if tokio::net::UnixStream::connect(&socket).await.is_ok() {
                return Ok(());
            }
            if let Ok(Some(status)) = child.try_wait() {
                let text = std::fs::read(&log).unwrap_or_default();
                let tail = runtime_core::text::tail(&text, 500).into_owned();
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    format!("`podman system service` ended ({status}): {tail}"),
                ));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    match tokio::time::timeout(SERVICE_START, up).await {
        Ok(result) => result?,
        Err(_) => {
            let message = format!("`podman system service` was not there within {SERVICE_START:?}");
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
    }
    *service = Some(Service {
        child,
        socket: socket.clone(),
    });
    Ok(socket)
}

fn is_installed(program: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// A private directory for the socket of our own service.
fn service_dir() -> Result<PathBuf> {
    let parent = match env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(dir) if dir.is_dir() => dir,
        _ => env::temp_dir(),
    };
    let dir = parent.join(format!(
        "sandbox-podman-{}-{}",
        std::process::id(),
        runtime_core::names::random_hex(8)
    ));
    private_dir(&dir)?;
    Ok(dir)
}

fn private_dir(dir: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(dir)
        .map_err(|error| Error::io(format_args!("creating {}", dir.display()), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &[(&str, &str)], home: &Path) -> Surroundings {
        let vars = vars
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        Surroundings {
            vars,
            home: Some(home.to_owned()),
        }
    }

    #[test]
    fn the_configured_host_wins_over_the_environment_and_that_over_the_context() {
        let home = tempfile::tempdir().expect("a directory");
        let id = runtime_core::names::hex(&Sha256::digest(b"remote"));
        let meta = home.path().join(".docker/contexts/meta").join(&id);
        std::fs::create_dir_all(&meta).expect("created");
        std::fs::write(
            home.path().join(".docker/config.json"),
            r#"{"currentContext":"remote"}"#,
        )
        .expect("written");
        let text = r#"{"Name":"remote","Endpoints":{"docker":{"Host":"tcp://10.1.2.3:2375"}}}"#;
        std::fs::write(meta.join("meta.json"), text).expect("written");
        let find = |host, vars: &[(&str, &str)]| find(EngineKind::Docker, host, &with(vars, home.path()));

        assert_eq!(
            find(None, &[]).expect("context"),
            Some(Endpoint::Tcp("10.1.2.3:2375".into()))
        );
        let vars = [("DOCKER_HOST", "unix:///env.sock")];
        assert_eq!(
            find(None, &vars).expect("environment"),
            Some(Endpoint::Unix("/env.sock".into()))
        );
        assert_eq!(
            find(Some("unix:///c.sock"), &vars).expect("config"),
            Some(Endpoint::Unix("/c.sock".into()))
        );
        let default = find(None, &[("DOCKER_CONTEXT", "default")]).expect("default");
        assert_eq!(default, Some(Endpoint::Unix("/var/run/docker.sock".into())));
        let error = find(None, &[("DOCKER_CONTEXT", "gone")]).expect_err("no such context");
        assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidConfig, Some("host")));

        let certs = home.path().join(".docker/contexts/tls").join(&id).join("docker");
        std::fs::create_dir_all(&certs).expect("created");
        assert_eq!(
            find(None, &[]).expect("context"),
            Some(Endpoint::Tls("10.1.2.3:2375".into(), certs))
        );
    }

    #[test]
    fn tls_is_asked_for_by_variable_and_certificates_have_a_default_place() {
        let home = tempfile::tempdir().expect("a directory");
        let vars = [("DOCKER_HOST", "tcp://h:2376"), ("DOCKER_TLS_VERIFY", "1")];
        let expected = Endpoint::Tls("h:2376".into(), home.path().join(".docker"));
        assert_eq!(
            find(EngineKind::Docker, None, &with(&vars, home.path())).expect("found"),
            Some(expected)
        );
        let vars = [vars[0], vars[1], ("DOCKER_CERT_PATH", "/certs")];
        let expected = Endpoint::Tls("h:2376".into(), "/certs".into());
        assert_eq!(
            find(EngineKind::Docker, None, &with(&vars, home.path())).expect("found"),
            Some(expected)
        );
    }

    #[test]
    fn addresses_that_cannot_be_used_say_why() {
        for address in ["ssh://host", "npipe:////./pipe/docker", "", "tcp://", "https://h:2376"] {
            let error = parse(address, None).expect_err(address);
            assert_eq!(
                (error.kind(), error.field()),
                (ErrorKind::InvalidConfig, Some("host")),
                "{address}"
            );
        }
    }

    #[test]
    fn ports_are_published_where_the_engine_is() {
        for here in [
            "localhost:2375",
            "127.0.0.1:2375",
            "127.0.0.2:1",
            "[::1]:2375",
            "localhost",
        ] {
            assert_eq!(Endpoint::Tcp(here.into()).published_at(), Some("127.0.0.1"), "{here}");
        }
        for elsewhere in ["10.1.2.3:2375", "h:2375", "[2001:db8::1]:2375", "10.1.2.3"] {
            assert_eq!(
                Endpoint::Tls(elsewhere.into(), "/certs".into()).published_at(),
                None,
                "{elsewhere}"
            );
        }
    }

    #[test]
    fn podman_is_found_by_its_own_variable() {
        let home = tempfile::tempdir().expect("a directory");
        let vars = [("CONTAINER_HOST", "unix:///p.sock"), ("DOCKER_HOST", "unix:///d.sock")];
        let found = find(EngineKind::Podman, None, &with(&vars, home.path())).expect("found");
        assert_eq!(found, Some(Endpoint::Unix("/p.sock".into())));
    }
}
