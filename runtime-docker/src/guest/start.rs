//! The ways to a guest: over a socket in a mounted directory, over the container's stdio, over an exec's stdio.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bollard::container::{AttachContainerResults, LogOutput};
use bollard::exec::{StartExecOptions, StartExecResults};
use bollard::models::ExecConfig;
use bollard::query_parameters::{AttachContainerOptionsBuilder, LogsOptionsBuilder, WaitContainerOptions};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use runtime_core::guest::{self, Link, LinkOptions, Rendezvous, SOCKET_ARGUMENTS, Token};
use runtime_core::{Error, ErrorKind, Result};
use tokio_util::io::StreamReader;

use crate::config::EngineKind;
use crate::engine::Engine;
use crate::wire::archive::{self, Entry};
use crate::wire::create::Init;

/// How long a started container's guest may take to be there.
const GUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A container that ends before is asked for its reason; one whose guest is there costs no question.
const PATIENCE: Duration = Duration::from_millis(500);

/// Where the guest is in the box.
const DIRECTORY: &str = ".sandbox";

/// What a container needs for a guest over a socket.
pub(crate) struct Socket {
    rendezvous: Rendezvous,
}

impl Socket {
    /// Makes `parent/name` for one box; `kept` is where the program is kept.
    pub(crate) fn new(parent: &Path, name: &str, kept: &Path) -> Result<Self> {
        Ok(Self {
            rendezvous: Rendezvous::new(parent, name, kept)?,
        })
    }

    /// How the container is created.
    pub(crate) fn init(&self, kind: EngineKind) -> Init {
        // A host with SELinux keeps containers from files that are not labelled for them.
        let relabel = kind == EngineKind::Podman && Path::new("/sys/fs/selinux/enforce").exists();
        let options = if relabel { "ro,z" } else { "ro" };
        Init::Guest {
            args: SOCKET_ARGUMENTS.map(str::to_owned).to_vec(),
            entrypoint: super::program_path().to_string_lossy().into_owned(),
            env: vec![variable(self.rendezvous.token())],
            binds: vec![format!(
                "{}:/{DIRECTORY}:{options}",
                self.rendezvous.directory().display()
            )],
            stdio: false,
        }
    }

    /// Starts the container and waits for its guest.
    pub(crate) async fn start(self, engine: &Engine, id: &str) -> Result<Link> {
        engine.start(id).await?;
        let accepted = self.rendezvous.accept(GUEST_TIMEOUT, LinkOptions::default());
        tokio::select! {
            link = accepted => link,
            reason = ended_early(engine, id) => Err(reason),
        }
    }
}

/// Resolves with the reason when a container ends that should not.
async fn ended_early(engine: &Engine, id: &str) -> Error {
    tokio::time::sleep(PATIENCE).await;
    let mut ends = engine.client.wait_container(id, None::<WaitContainerOptions>);
    let code = match ends.next().await {
        Some(Ok(end)) => Some(end.status_code),
        Some(Err(bollard::errors::Error::DockerContainerWaitError { code, .. })) => Some(code),
        // It could not be asked: the guest's own deadline decides.
        _ => None,
    };
    match code {
        Some(code) => Error::new(
            ErrorKind::Other,
            format!("the guest ended at once with {code}: {}", last_words(engine, id).await),
        ),
        None => std::future::pending().await,
    }
}

/// The end of a container's log.
async fn last_words(engine: &Engine, id: &str) -> String {
    let options = LogsOptionsBuilder::default()
        .stdout(true)
        .stderr(true)
        .tail("5")
        .build();
    let mut logs = engine.client.logs(id, Some(options));
    let mut text = Vec::new();
    while let Some(Ok(line)) = logs.next().await {
        text.extend_from_slice(line.as_ref());
        if text.len() > 4096 {
            break;
        }
    }
    runtime_core::text::tail(&text, 500).trim().to_owned()
}

fn variable(token: &Token) -> String {
    let (name, value) = token.variable();
    format!("{name}={value}")
}

/// The program as an archive for `/`.
fn program() -> Result<Vec<u8>> {
    let content = guest::availability().map_err(super::unavailable)?;
    let path = PathBuf::from(DIRECTORY);
    let directory = Entry {
        path: &path,
        mode: 0o755,
        owner: (0, 0),
        content: None,
    };
    let file = Entry {
        path: &path.join("guest"),
        mode: 0o555,
        owner: (0, 0),
        content: Some(content),
    };
    archive::pack(&[directory, file])
}

/// What a container needs for a guest over its stdio.
pub(crate) struct Stdio {
    token: Token,
}

impl Stdio {
    pub(crate) fn new() -> Result<Self> {
        guest::availability().map_err(super::unavailable)?;
        Ok(Self {
            token: Token::generate()?,
        })
    }

    /// How the container is created.
    pub(crate) fn init(&self) -> Init {
        Init::Guest {
            args: vec!["--stdio".to_owned()],
            entrypoint: super::program_path().to_string_lossy().into_owned(),
            env: vec![variable(&self.token)],
            binds: Vec::new(),
            stdio: true,
        }
    }

    /// Copies the program into the created container, starts it and takes over its stdio.
    pub(crate) async fn start(self, engine: &Engine, id: &str) -> Result<Link> {
        engine.upload(id, Path::new("/"), program()?).await?;
        let options = AttachContainerOptionsBuilder::default()
            .stdin(true)
            .stdout(true)
            .stderr(true)
            .stream(true)
            .build();
        let attached = engine.client.attach_container(id, Some(options)).await;
        let AttachContainerResults { output, input } =
            attached.map_err(|error| engine.error("attaching to the container", error))?;
        engine.start(id).await?;
        let options = LinkOptions {
            handshake_timeout: GUEST_TIMEOUT,
            ..LinkOptions::default()
        };
        let link = Link::over_stdio(stdout_of(output), input, &self.token, options);
        tokio::select! {
            link = link => link,
            reason = ended_early(engine, id) => Err(reason),
        }
    }
}

/// Starts a guest in somebody else's running container.
pub(crate) async fn in_foreign(engine: &Engine, id: &str) -> Result<Link> {
    engine.upload(id, Path::new("/"), program()?).await?;
    let token = Token::generate()?;
    let config = ExecConfig {
        attach_stdin: Some(true),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        cmd: Some(vec![
            super::program_path().to_string_lossy().into_owned(),
            "--stdio".to_owned(),
        ]),
        env: Some(vec![variable(&token)]),
        user: Some("0".to_owned()),
        ..ExecConfig::default()
    };
    let created = engine.client.create_exec(id, config).await;
    let created = created.map_err(|error| engine.error("preparing the guest", error))?;
    let options = StartExecOptions {
        output_capacity: Some(256 << 10),
        ..StartExecOptions::default()
    };
    let started = engine.client.start_exec(&created.id, Some(options)).await;
    match started.map_err(|error| engine.error("starting the guest", error))? {
        StartExecResults::Attached { output, input } => {
            let options = LinkOptions {
                handshake_timeout: GUEST_TIMEOUT,
                ..LinkOptions::default()
            };
            Link::over_stdio(stdout_of(output), input, &token, options).await
        }
        StartExecResults::Detached => Err(Error::new(
            ErrorKind::Protocol,
            "the engine did not attach to the guest",
        )),
    }
}

/// Standard output of what is attached to. What it says on standard error goes to our log.
fn stdout_of(
    output: impl Stream<Item = std::result::Result<LogOutput, bollard::errors::Error>> + Send + Unpin + 'static,
) -> impl tokio::io::AsyncRead + Send + Unpin + 'static {
    let bytes = output.filter_map(|item| {
        std::future::ready(match item {
            Ok(LogOutput::StdOut { message } | LogOutput::Console { message }) => {
                Some(Ok::<Bytes, std::io::Error>(message))
            }
            Ok(LogOutput::StdErr { message }) => {
                tracing::debug!(text = %runtime_core::text::tail(&message, 500), "the guest says");
                None
            }
            Ok(LogOutput::StdIn { .. }) => None,
            Err(error) => Some(Err(std::io::Error::other(error))),
        })
    });
    StreamReader::new(bytes)
}
