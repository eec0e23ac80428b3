//! Registry credentials, from where the engine's own client keeps them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bollard::auth::DockerCredentials;
use runtime_core::{Error, ErrorKind, Result};
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// The registry of references that name none.
const DOCKER_HUB: &str = "docker.io";

/// The name under which clients keep the credentials of Docker Hub.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

/// How long a credential helper may take; some ask a keychain.
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Deserialize, Default)]
#[serde(default)]
struct AuthFile {
    auths: HashMap<String, AuthEntry>,
    #[serde(rename = "credHelpers")]
    helpers: HashMap<String, String>,
    #[serde(rename = "credsStore")]
    store: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct AuthEntry {
    auth: Option<String>,
    identitytoken: Option<String>,
}

#[derive(Deserialize)]
struct HelperAnswer {
    #[serde(rename = "Username")]
    username: String,
    #[serde(rename = "Secret")]
    secret: String,
}

/// The registry that an image reference names.
pub(crate) fn registry(reference: &str) -> &str {
    match reference.split_once('/') {
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => first,
        _ => DOCKER_HUB,
    }
}

/// The credentials for an image's registry, from the first of `files` that has some.
///
/// # Errors
/// [`InvalidConfig`](ErrorKind::InvalidConfig) for a file that is not valid, and what a credential helper reports.
/// Never with a secret.
pub(crate) async fn credentials(reference: &str, files: &[PathBuf]) -> Result<Option<DockerCredentials>> {
    let registry = registry(reference);
    for path in files {
        let Ok(text) = std::fs::read_to_string(path) else {
            continue;
        };
        let file: AuthFile = serde_json::from_str(&text).map_err(|error| {
            // The error's own text may quote what is in the file.
            let place = format!("line {}, column {}", error.line(), error.column());
            Error::invalid_config("image", format!("{} is not valid at {place}", path.display()))
        })?;
        if let Some(found) = from_file(&file, registry).await? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

async fn from_file(file: &AuthFile, registry: &str) -> Result<Option<DockerCredentials>> {
    let keys: &[&str] = if registry == DOCKER_HUB {
        &[DOCKER_HUB_KEY, "docker.io", "index.docker.io", "registry-1.docker.io"]
    } else {
        &[registry]
    };
    for key in keys {
        if let Some(helper) = file.helpers.get(*key) {
            return ask(helper, key).await;
        }
    }
    let matches = |entry: &str, key: &str| {
        let bare = |name: &str| {
            let name = name
                .strip_prefix("https://")
                .or_else(|| name.strip_prefix("http://"))
                .unwrap_or(name);
            name.split('/').next().unwrap_or(name).to_owned()
        };
        entry == key || bare(entry) == bare(key)
    };
    for key in keys {
        let Some((name, entry)) = file.auths.iter().find(|(name, _)| matches(name, key)) else {
            continue;
        };
        if let Some(token) = entry.identitytoken.clone().filter(|token| !token.is_empty()) {
            return Ok(Some(DockerCredentials {
                identitytoken: Some(token),
                serveraddress: Some(name.clone()),
                ..DockerCredentials::default()
            }));
        }
        if let Some(auth) = entry.auth.as_deref().filter(|auth| !auth.is_empty()) {
            return decode(name, auth).map(Some);
        }
    }
    match &file.store {
        Some(store) => {
            for key in keys {
                if let Some(found) = ask(store, key).await? {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        }
        None => Ok(None),
    }
}

fn decode(server: &str, auth: &str) -> Result<DockerCredentials> {
    let bad = || Error::invalid_config("image", format!("the stored credentials for {server} are not valid"));
    let bytes = STANDARD.decode(auth).map_err(|_| bad())?;
    let text = String::from_utf8(bytes).map_err(|_| bad())?;
    let (username, password) = text.split_once(':').ok_or_else(bad)?;
    Ok(DockerCredentials {
        username: Some(username.to_owned()),
        password: Some(password.trim_end_matches('\0').to_owned()),
        serveraddress: Some(server.to_owned()),
        ..DockerCredentials::default()
    })
}

/// Asks a credential helper. One that knows nothing of the registry is no error.
async fn ask(helper: &str, server: &str) -> Result<Option<DockerCredentials>> {
    let program = format!("docker-credential-{helper}");
    if !helper
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
    {
        return Err(Error::invalid_config(
            "image",
            format!("`{helper}` is no name of a credential helper"),
        ));
    }
    let failed = |detail: String| Error::new(ErrorKind::Unauthorized, format!("`{program}` {detail}"));
    let run = async {
        let mut child = Command::new(&program)
            .arg("get")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| failed(format!("cannot be run: {error}")))?;
        if let Some(mut stdin) = child.stdin.take() {
            let _ = stdin.write_all(server.as_bytes()).await;
        }
        child
            .wait_with_output()
            .await
            .map_err(|error| failed(format!("cannot be run: {error}")))
    };
    let output = match tokio::time::timeout(HELPER_TIMEOUT, run).await {
        Ok(output) => output?,
        Err(_) => return Err(failed(format!("gave no answer within {HELPER_TIMEOUT:?}"))),
    };
    if !output.status.success() {
        return Ok(None);
    }
    let answer: HelperAnswer =
        serde_json::from_slice(&output.stdout).map_err(|_| failed("gave an answer that is not valid".to_owned()))?;
    let mut credentials = DockerCredentials {
        serveraddress: Some(server.to_owned()),
        ..DockerCredentials::default()
    };
    if answer.username == "<token>" {
        credentials.identitytoken = Some(answer.secret);
    } else {
        credentials.username = Some(answer.username);
        credentials.password = Some(answer.secret);
    }
    Ok(Some(credentials))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_reference_names_its_registry() {
        for (reference, expected) in [
            ("debian", "docker.io"),
            ("library/debian:12", "docker.io"),
            ("ghcr.io/x/y", "ghcr.io"),
            ("localhost/x", "localhost"),
            ("host:5000/x@sha256:00", "host:5000"),
        ] {
            assert_eq!(registry(reference), expected);
        }
    }

    async fn look(text: &str, reference: &str) -> Result<Option<DockerCredentials>> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.json");
        std::fs::write(&path, text).expect("written");
        credentials(reference, &[dir.path().join("missing"), path]).await
    }

    #[tokio::test]
    async fn stored_credentials_are_found_under_every_spelling_of_the_registry() {
        let auth = STANDARD.encode("me:pa:ss");
        let text = format!(r#"{{"auths":{{"https://ghcr.io/v2/":{{"auth":"{auth}"}}}}}}"#);
        let found = look(&text, "ghcr.io/x/y").await.expect("valid").expect("found");
        assert_eq!(
            (found.username.as_deref(), found.password.as_deref()),
            (Some("me"), Some("pa:ss"))
        );
        assert!(look(&text, "quay.io/x/y").await.expect("valid").is_none());
        let text = format!(r#"{{"auths":{{"{DOCKER_HUB_KEY}":{{"auth":"{auth}"}}}}}}"#);
        assert!(look(&text, "debian").await.expect("valid").is_some());
        let text = r#"{"auths":{"r.io":{"identitytoken":"t"}}}"#;
        let found = look(text, "r.io/x").await.expect("valid").expect("found");
        assert_eq!(found.identitytoken.as_deref(), Some("t"));
    }

    #[tokio::test]
    async fn a_broken_file_is_named_and_nothing_of_it_is_shown() {
        for text in [
            r#"{"auths":{"r.io":{"auth": secret}}}"#,
            r#"{"auths":{"r.io":{"auth":"c2VjcmV0"}}}"#,
        ] {
            let error = look(text, "r.io/x").await.expect_err("broken");
            assert_eq!(error.kind(), ErrorKind::InvalidConfig);
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
        }
    }

    #[tokio::test]
    async fn a_helper_that_is_missing_or_misnamed_is_a_typed_error() {
        let text = r#"{"credHelpers":{"r.io":"no-such-helper-here"}}"#;
        let error = look(text, "r.io/x").await.expect_err("missing");
        assert_eq!(error.kind(), ErrorKind::Unauthorized);
        let text = r#"{"credHelpers":{"r.io":"../evil"}}"#;
        assert_eq!(
            look(text, "r.io/x").await.expect_err("misnamed").kind(),
            ErrorKind::InvalidConfig
        );
    }

    #[test]
    fn a_helpers_answer_is_taken() {
        // Its own process group of tests may not change PATH for others, so the helper is run by a child of its own.
        let dir = tempfile::tempdir().expect("a directory");
        let helper = dir.path().join("docker-credential-fake");
        let script =
            "#!/bin/sh\nread -r server || true\necho \"{\\\"Username\\\":\\\"u\\\",\\\"Secret\\\":\\\"s\\\"}\"\n";
        std::fs::write(&helper, script).expect("written");
        std::fs::set_permissions(&helper, std::fs::Permissions::from_mode(0o755)).expect("set");
        let output = std::process::Command::new(&helper)
            .arg("get")
            .stdin(Stdio::null())
            .output()
            .expect("run");
        let answer: HelperAnswer = serde_json::from_slice(&output.stdout).expect("valid");
        assert_eq!((answer.username.as_str(), answer.secret.as_str()), ("u", "s"));
    }
}
