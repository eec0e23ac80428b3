//! What of this machine a box does not see, and what it sees all the same.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::guest::plan::Shown;
use crate::subprocess::SubprocessConfig;

/// Hidden wherever they are, besides what the box has its own of (`/home`, `/root`, `/run`, `/tmp`, `/dev`, `/proc`,
/// `/sys`).
const STATE: [&str; 14] = [
    "/mnt",
    "/media",
    "/var/tmp",
    "/var/lib/cloud",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/lib/kubelet",
    "/var/lib/rancher",
    "/etc/docker",
    "/etc/kubernetes",
    "/etc/rancher",
    "/etc/ssl/private",
    "/var/spool/cron",
];

/// Variables that point to directories, files and sockets with keys in or behind them.
const POINTERS: [&str; 21] = [
    "HOME",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "SSH_AUTH_SOCK",
    "GNUPGHOME",
    "GPG_AGENT_INFO",
    "KUBECONFIG",
    "DOCKER_HOST",
    "DOCKER_CONFIG",
    "DOCKER_CERT_PATH",
    "CONTAINER_HOST",
    "REGISTRY_AUTH_FILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AZURE_CONFIG_DIR",
    "CLOUDSDK_CONFIG",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "NETRC",
    "DBUS_SESSION_BUS_ADDRESS",
];

/// Files with credentials in directories that are needed otherwise.
const IN_DIRECTORIES: [(&str, &str); 3] = [
    ("CARGO_HOME", "credentials.toml"),
    ("CARGO_HOME", "credentials"),
    ("NPM_CONFIG_PREFIX", ".npmrc"),
];

/// Home directories of service users that are parts of the system.
const NEVER: [&str; 16] = [
    "/",
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/opt",
    "/proc",
    "/sbin",
    "/srv",
    "/sys",
    "/usr",
    "/usr/bin",
    "/usr/sbin",
    "/var",
];

/// What a box with the host's files does not see, parents before what is below them, which is left out.
pub(super) fn hidden(variable: impl Fn(&str) -> Option<OsString>, home: Option<PathBuf>, cache: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = STATE.iter().map(PathBuf::from).collect();
    paths.extend(home);
    paths.push(cache.to_path_buf());
    for name in POINTERS {
        let Some(value) = variable(name) else { continue };
        paths.extend(
            value
                .as_bytes()
                .split(|byte| *byte == b':' || *byte == b',' || *byte == b'=')
                .filter_map(pointed),
        );
    }
    for (name, file) in IN_DIRECTORIES {
        paths.extend(variable(name).map(|directory| Path::new(&directory).join(file)));
    }
    // Under the names that the kernel knows them by. What is not there has nothing to hide, but a home directory is
    // expected to be there.
    let mut paths: Vec<PathBuf> = paths
        .into_iter()
        .map(|path| fs::canonicalize(&path).unwrap_or(path))
        .filter(|path| path.is_absolute() && NEVER.iter().all(|never| path != Path::new(never)))
        .collect();
    paths.sort();
    paths.dedup_by(|later, earlier| later.starts_with(&*earlier));
    paths
}

/// The path in one part of a variable: plain, or of a URL such as `unix:///run/docker.sock`.
fn pointed(part: &[u8]) -> Option<PathBuf> {
    let path = match part.strip_prefix(b"//") {
        Some(rest) => rest,
        None => part,
    };
    path.starts_with(b"/")
        .then(|| PathBuf::from(std::ffi::OsStr::from_bytes(path)))
}

/// The home directory that the system's list of users gives for this process's user.
pub(super) fn home() -> Option<PathBuf> {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let wanted = rustix::process::geteuid().as_raw().to_string();
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_ours = fields.nth(2) == Some(&*wanted);
        let home = fields.nth(2)?;
        (is_ours && home.starts_with('/')).then(|| PathBuf::from(home))
    })
}

/// The host's list of name servers, for a box whose setup has the host's network: in a root that has one of its own that
/// is no ordinary file, that is left alone.
pub(super) fn name_servers(root: Option<&Path>) -> Option<Shown> {
    const PLACE: &str = "/etc/resolv.conf";
    let source = fs::canonicalize(PLACE).ok()?;
    let at = match root {
        // A link of the host's leads to where the box has something of its own, as a rule.
        None if source == Path::new(PLACE) => return None,
        None => source.clone(),
        Some(root) => {
            let known = fs::symlink_metadata(root.join("etc")).is_ok_and(|etc| etc.is_dir());
            let own = fs::symlink_metadata(root.join("etc/resolv.conf"));
            let fits = own.map_or(true, |own| own.is_file());
            (known && fits).then(|| PathBuf::from(PLACE))?
        }
    };
    Some(Shown {
        path: at.as_os_str().as_bytes().to_vec(),
        source: source.as_os_str().as_bytes().to_vec(),
        writable: false,
    })
}

/// What the configuration opens.
///
/// # Errors
/// [`InvalidConfig`](crate::ErrorKind::InvalidConfig) naming the path that is not there.
pub(super) fn shown(config: &SubprocessConfig) -> Result<Vec<Shown>> {
    let mut shown = Vec::new();
    for (field, paths, writable) in [
        ("expose_paths", &config.expose_paths, false),
        ("writable_paths", &config.writable_paths, true),
    ] {
        for (index, path) in paths.iter().enumerate() {
            let path = Path::new(path);
            let source =
                fs::canonicalize(path).map_err(|error| super::wrong(format!("{field}[{index}]"), path, &error))?;
            shown.push(Shown {
                path: path.as_os_str().as_bytes().to_vec(),
                source: source.as_os_str().as_bytes().to_vec(),
                writable,
            });
        }
    }
    // What is above is mounted first, so that it does not cover what is below.
    shown.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_variables_point_to_is_hidden_and_the_system_is_not() {
        let variables = |name: &str| {
            let value = match name {
                "HOME" => "/srv/people/anna",
                "SSH_AUTH_SOCK" => "/srv/people/anna/agent",
                "DOCKER_HOST" => "unix:///srv/engine.sock",
                "KUBECONFIG" => "/srv/kube/a:/srv/kube/b",
                "XDG_CONFIG_HOME" => "/usr",
                "DBUS_SESSION_BUS_ADDRESS" => "unix:path=/srv/bus,guid=77",
                "CARGO_HOME" => "/opt/cargo",
                "NETRC" => "relative",
                _ => return None,
            };
            Some(OsString::from(value))
        };
        let found = hidden(variables, Some("/usr/sbin".into()), Path::new("/srv/cache"));
        let ours: Vec<&Path> = found
            .iter()
            .map(PathBuf::as_path)
            .filter(|path| !STATE.iter().any(|state| path.starts_with(state)))
            .collect();
        let expected = [
            "/opt/cargo/credentials",
            "/opt/cargo/credentials.toml",
            "/srv/bus",
            "/srv/cache",
            "/srv/engine.sock",
            "/srv/kube/a",
            "/srv/kube/b",
            "/srv/people/anna",
        ];
        assert_eq!(ours, expected.map(Path::new));
    }

    #[test]
    fn a_path_that_is_not_there_is_named() {
        let mut config = SubprocessConfig::namespaces();
        config.expose_paths = vec!["/etc".into(), "/no/such/path".into()];
        let error = shown(&config).expect_err("missing");
        assert_eq!(error.field(), Some("expose_paths[1]"));
        config.expose_paths = vec!["/usr/lib".into()];
        config.writable_paths = vec!["/usr".into()];
        let order: Vec<(Vec<u8>, bool)> = shown(&config)
            .expect("both are there")
            .into_iter()
            .map(|shown| (shown.path, shown.writable))
            .collect();
        assert_eq!(order, [(b"/usr".to_vec(), true), (b"/usr/lib".to_vec(), false)]);
    }
}
