//! How a container comes to be, or is borrowed, and how its process 1 is reached.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use runtime_core::box_network::BoxNetwork;
use runtime_core::guest::{self, GuestBox, users};
use runtime_core::{Collect, Env, Error, ErrorKind, Exec, Result, Runtime, StdinMode};

use super::network::BoxNet;
use super::way::{self, Way};
use super::{Backend, ContainerRuntime, Ready, lock};
use crate::config::{EngineKind, ExecMode};
use crate::engine::Engine;
use crate::exec::{Commands, HostProcess};
use crate::guest::start;
use crate::image::Image;
use crate::wire::archive::{self, Entry};
use crate::wire::create::{self, Init};
use crate::{SERVICE_PORT, environment, gpu};

impl ContainerRuntime {
    /// The ways to try, the likeliest first.
    pub(super) fn ways(&self, engine: &Engine, image: &Image) -> Result<Vec<Way>> {
        let runs_here = image.architecture.is_empty() || image.architecture == architecture();
        let no_guest = match guest::availability() {
            Err(reason) => Some(format!("this build has none: {reason}")),
            Ok(_) if !runs_here => Some(format!("the image is for {}", image.architecture)),
            Ok(_) => None,
        };
        let guest_ways: &[Way] = if engine.endpoint.is_local() {
            &[Way::Socket, Way::Stdio]
        } else {
            &[Way::Stdio]
        };
        if self.config.is_restricted() {
            if let Some(reason) = no_guest {
                return Err(self.config.no_policy(&format!("without the guest, and {reason}")));
            }
            return Ok(match self.config.exec {
                ExecMode::Stdio => vec![Way::Stdio],
                _ => guest_ways.to_vec(),
            });
        }
        match (self.config.exec, no_guest) {
            (ExecMode::Engine, _) | (ExecMode::Auto, Some(_)) => Ok(vec![Way::Engine]),
            (ExecMode::Guest | ExecMode::Stdio, Some(reason)) => {
                Err(Error::unsupported(format!("`exec` asks for the guest, but {reason}")).with_field("exec"))
            }
            (ExecMode::Guest, None) => Ok(guest_ways.to_vec()),
            (ExecMode::Stdio, None) => Ok(vec![Way::Stdio]),
            (ExecMode::Auto, None) => {
                let known = way::known(&engine.endpoint, &image.architecture);
                Ok(known
                    .or(guest_ways.first().copied())
                    .unwrap_or(Way::Engine)
                    .after()
                    .to_vec())
            }
        }
    }

    pub(super) async fn create_one(&self, engine: &Engine, image: &Image, way: Way) -> Result<Ready> {
        let socket;
        let stdio;
        let init;
        match way {
            Way::Socket => {
                let parent = self.spec.cache.join(self.directories())?;
                let kept = self.spec.cache.create_dir("runtimes")?;
                let made = start::Socket::new(&parent, &self.name, &kept)?;
                init = made.init(self.kind);
                (socket, stdio) = (Some(made), None);
            }
            Way::Stdio => {
                let made = start::Stdio::new()?;
                init = made.init();
                (socket, stdio) = (None, Some(made));
            }
            Way::Engine => {
                init = Init::KeepAlive;
                (socket, stdio) = (None, None);
            }
        }
        let body = create::request(self.kind, &self.config, &self.spec, &image.id, &init)?;
        lock(&self.state).asked = true;
        let platform = self.config.platform.as_deref();
        let id = match engine.create(&self.name, platform, body).await {
            // The engine's own init is a program that not every host has. Without it orphans stay zombies.
            Err(error)
                if way == Way::Engine && self.config.init.is_none() && error.message().contains("init binary") =>
            {
                tracing::debug!(%error, "process 1 will not reap");
                let mut plain = self.config.clone();
                plain.init = Some(false);
                let body = create::request(self.kind, &plain, &self.spec, &image.id, &init)?;
                engine.create(&self.name, platform, body).await?
            }
            created => created?,
        };
        lock(&self.state).id = Some(id.clone());
        let user = self.config.user.as_deref().unwrap_or(&image.user);
        let image_env = environment::parse(&image.env);
        let link = match (socket, stdio) {
            (Some(socket), _) => socket.start(engine, &id).await?,
            (None, Some(stdio)) => stdio.start(engine, &id).await?,
            (None, None) => {
                let commands = self.start_engine_mode(engine, &id, user).await?;
                let service = self.published(engine, &id).await?;
                return Ok(Ready {
                    backend: Backend::Engine(Arc::new(commands)),
                    way,
                    image_env,
                    service: Some(service),
                    network: None,
                });
            }
        };
        let mut guest = GuestBox::new(link);
        guest
            .prepare(user, &environment::base(self.kind, &image_env, &id))
            .await?;
        let workdir = Path::new(self.config.workdir());
        // What is there already stays as it is, a link to a directory too.
        guest
            .create_dir(workdir)
            .await
            .map_err(|error| error.with_field("workdir"))?;
        if self.config.is_restricted() {
            guest.confine().await?;
        }
        let network = self.box_network(engine, &id, &guest, &image_env).await?;
        crate::guest::watch_end(&guest.link, engine.clone(), id, self.stopping.subscribe());
        Ok(Ready {
            backend: Backend::Guest(Arc::new(guest)),
            way,
            image_env,
            service: None,
            network: Some(network),
        })
    }

    async fn box_network(&self, engine: &Engine, id: &str, guest: &GuestBox, image_env: &Env) -> Result<BoxNet> {
        let inside = BoxNetwork::builder(self.spec.name.as_str(), guest.link.clone())
            .policy(self.config.policy())
            .image_env(image_env.clone())
            .start()
            .await?;
        let resolver = create::needs_blocked_resolver(self.kind, &self.config).then(|| guest.link.clone());
        Ok(BoxNet::new(engine.clone(), id.to_owned(), inside, resolver))
    }

    /// Makes the workdir, starts the container and looks at its process 1.
    async fn start_engine_mode(&self, engine: &Engine, id: &str, user: &str) -> Result<Commands> {
        self.upload_workdir(engine, id, user).await?;
        engine.start(id).await.map_err(|error| match error.kind() {
            ErrorKind::ProgramNotFound | ErrorKind::ProgramNotExecutable => without_sleep().with_source(error),
            _ => error,
        })?;
        self.commands(engine, id).await
    }

    async fn commands(&self, engine: &Engine, id: &str) -> Result<Commands> {
        let inspect = engine.inspect(id).await?;
        let state = inspect.and_then(|inspect| inspect.state).unwrap_or_default();
        if state.running != Some(true) {
            let code = state.exit_code.unwrap_or_default();
            return Err(match code {
                126 | 127 => without_sleep(),
                _ => Error::new(
                    ErrorKind::SandboxGone,
                    format!(
                        "the container ended at once with {code}: {}",
                        state.error.unwrap_or_default()
                    ),
                ),
            });
        }
        let init = match engine.endpoint.is_local() {
            true => state.pid.and_then(|pid| HostProcess::open(pid, id)),
            false => None,
        };
        Ok(Commands {
            engine: engine.clone(),
            container: id.to_owned(),
            init,
        })
    }

    /// A missing workdir, owned by the box's user, before anything runs.
    async fn upload_workdir(&self, engine: &Engine, id: &str, user: &str) -> Result<()> {
        let workdir = Path::new(self.config.workdir());
        let mut missing = Vec::new();
        let mut base = Path::new("/");
        for dir in workdir.ancestors() {
            if dir.parent().is_none() || engine.path_exists(id, dir).await? {
                base = dir;
                break;
            }
            missing.push(dir);
        }
        let Some(last) = missing.first().copied() else {
            return Ok(());
        };
        let owner = if users::is_root(user) {
            guest::User::default()
        } else {
            let file = |path: &'static str| async move {
                let content = engine.small_file(id, Path::new(path)).await?;
                Ok::<_, Error>(String::from_utf8_lossy(&content.unwrap_or_default()).into_owned())
            };
            users::resolve(user, &file("/etc/passwd").await?, &file("/etc/group").await?)?
        };
        let mut entries = Vec::new();
        for dir in missing.iter().rev() {
            let Ok(path) = dir.strip_prefix(base) else { continue };
            entries.push(Entry {
                path,
                mode: 0o755,
                owner: if *dir == last { (owner.uid, owner.gid) } else { (0, 0) },
                content: None,
            });
        }
        let uploaded = engine.upload(id, base, archive::pack(&entries)?).await;
        uploaded.map_err(|error| error.with_field("workdir"))
    }

    /// The port of this host behind which the engine serves the box's one port.
    async fn published(&self, engine: &Engine, id: &str) -> Result<u16> {
        let missing = || {
            Error::new(
                ErrorKind::Protocol,
                format!("the engine did not publish port {SERVICE_PORT}"),
            )
        };
        let inspect = engine.inspect(id).await?.ok_or_else(missing)?;
        let ports = inspect
            .network_settings
            .and_then(|network| network.ports)
            .unwrap_or_default();
        let bindings = ports
            .get(&format!("{SERVICE_PORT}/tcp"))
            .cloned()
            .flatten()
            .unwrap_or_default();
        bindings
            .iter()
            .find_map(|binding| binding.host_port.as_deref()?.parse().ok())
            .ok_or_else(missing)
    }

    /// Takes somebody else's running container.
    pub(super) async fn borrow(&self, engine: &Engine, container: &str) -> Result<Ready> {
        let found = engine.inspect(container).await?.ok_or_else(|| {
            let message = format!("{} has no container `{container}`", self.kind);
            Error::new(ErrorKind::NotFound, message).with_field("container")
        })?;
        let state = found.state.unwrap_or_default();
        if state.running != Some(true) {
            let message = format!("the container `{container}` does not run");
            return Err(Error::new(ErrorKind::SandboxGone, message).with_field("container"));
        }
        let id = found.id.unwrap_or_default();
        {
            let mut state = lock(&self.state);
            state.id = Some(id.clone());
            state.borrowed = true;
        }
        let config = found.config.unwrap_or_default();
        let user = config.user.unwrap_or_default();
        let image_env = environment::parse(&config.env.unwrap_or_default());
        if self.config.exec != ExecMode::Engine {
            match self.borrow_by_guest(engine, &id, &user, &image_env).await {
                Ok(guest) => {
                    let network = self.box_network(engine, &id, &guest, &image_env).await?;
                    return Ok(Ready {
                        backend: Backend::Guest(Arc::new(guest)),
                        way: Way::Stdio,
                        image_env,
                        service: None,
                        network: Some(network),
                    });
                }
                Err(error) if self.config.exec == ExecMode::Auto => {
                    tracing::info!(%error, container, "no guest can be started here: the engine's exec is used");
                }
                Err(error) => return Err(error),
            }
        }
        let commands = Arc::new(self.commands(engine, &id).await?);
        commands.create_dir(Path::new(self.config.workdir())).await?;
        Ok(Ready {
            service: self.published(engine, &id).await.ok(),
            backend: Backend::Engine(commands),
            way: Way::Engine,
            image_env,
            network: None,
        })
    }

    async fn borrow_by_guest(&self, engine: &Engine, id: &str, user: &str, image_env: &Env) -> Result<GuestBox> {
        let link = start::in_foreign(engine, id).await?;
        let mut guest = GuestBox::new(link);
        guest
            .prepare(user, &environment::base(self.kind, image_env, id))
            .await?;
        guest.create_dir(Path::new(self.config.workdir())).await?;
        Ok(guest)
    }
}

fn without_sleep() -> Error {
    Error::unsupported("engine mode keeps a container alive with the image's own `sleep`, which this image lacks")
        .with_field("exec")
}

/// This program's architecture as images name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

impl ContainerRuntime {
    /// Docker takes a number of GPUs only; whether they are of the wanted type is asked in the box.
    pub(super) async fn check_gpus(&self) -> Result<()> {
        let wanted = self.config.gpus()?;
        let Some(gpu_type) = wanted
            .gpu_type()
            .filter(|gpu_type| !gpu_type.is_empty() && wanted.is_requested())
        else {
            return Ok(());
        };
        if self.kind != EngineKind::Docker {
            return Ok(());
        }
        let exec = Exec {
            argv: gpu::QUERY.map(Into::into).to_vec(),
            env: Env::new(),
            workdir: "/".into(),
            stdin: StdinMode::Null,
        };
        let options = Collect {
            stdin: None,
            timeout: Some(Duration::from_secs(60)),
            output_limit: 64 << 10,
            sink: None,
        };
        let output = self.run(exec, options).await.map_err(|error| {
            let message = format!("cannot verify the type of the GPUs: {}", error.message());
            Error::new(error.kind(), message).with_field("gpu").with_source(error)
        })?;
        gpu::verify(gpu_type, wanted.count(), output.success(), &output.stdout_lossy())
    }
}
