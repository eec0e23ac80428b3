//! [`E2bRuntime`]: one box.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use runtime_core::names::random_id;
use runtime_core::network::{Policy, Routes};
use runtime_core::{
    BoxSpec, ByteStream, Capabilities, Collect, Content, DirEntry, Env, Error, ErrorKind, Exec, Metadata, Orphan,
    Output, Process, Result, Retry, Runtime, StdinMode, WriteOptions,
};
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::client::{ControlPlane, CreateFailure};
use crate::config::{E2bConfig, SERVICE_PORT, TAG, capabilities};
use crate::durable;
use crate::egress;
use crate::endpoints::Endpoints;
use crate::envd::Envd;
use crate::error;
use crate::files;
use crate::launch::{Launch, Mode, path_text};
use crate::process;
use crate::template::Template;
use crate::watch::Watch;
use crate::wire::control::{CreateRequest, Created};
use crate::wire::process::Event;

/// The oldest envd that takes uploads as plain bytes, and closes standard input.
const OLDEST_ENVD: [u32; 3] = [0, 5, 7];

/// How long a fresh box may take until its envd answers.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a box whose creation was lost is looked for: it may appear in the list a while after it was accepted.
const SEARCH: [Duration; 6] = [
    Duration::ZERO,
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
];

/// How long a deletion waits for the answer to a creation that is under way.
const CREATE_GRACE: Duration = Duration::from_secs(75);

/// How long a deletion may take in all.
const DELETE_TIMEOUT: Duration = Duration::from_secs(180);

/// Labels on every box.
const RUNTIME_LABEL: (&str, &str) = ("runtime", "verifiers");
const NAME_LABEL: &str = "name";
const RUN_LABEL: &str = "run";
const CREATE_LABEL: &str = "create";

/// A box that exists.
#[derive(Debug, Clone)]
struct Live {
    id: String,
    domain: Option<String>,
    envd: Arc<Envd>,
    watch: Arc<Watch>,
}

/// How far a creation is.
#[derive(Debug, Clone, Default)]
enum Creation {
    /// Nothing was sent.
    #[default]
    NotSent,
    /// It is under way.
    Sent,
    /// This box.
    Made(Live),
    /// Nothing was created, for certain.
    Refused,
    /// Perhaps something was.
    Unknown,
}

/// One box of E2B.
#[derive(Debug)]
pub(crate) struct E2bRuntime {
    config: E2bConfig,
    spec: BoxSpec,
    api: Arc<ControlPlane>,
    template: Template,
    create_key: String,
    creation: Arc<watch::Sender<Creation>>,
    /// The id, kept after the box is gone.
    id: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl E2bRuntime {
    pub(crate) fn new(config: E2bConfig, endpoints: Endpoints, spec: BoxSpec) -> Result<Self> {
        Ok(Self {
            template: Template::of(&config)?,
            api: Arc::new(ControlPlane::new(endpoints)?),
            config,
            spec,
            create_key: random_id(),
            creation: Arc::new(watch::Sender::new(Creation::NotSent)),
            id: Mutex::new(None),
        })
    }

    fn live(&self) -> Result<Live> {
        match &*self.creation.borrow() {
            Creation::Made(live) => Ok(live.clone()),
            _ => Err(Error::new(ErrorKind::Phase, "the sandbox is not created")),
        }
    }

    fn message(&self) -> CreateRequest {
        let labels = [
            RUNTIME_LABEL,
            (NAME_LABEL, &self.spec.name),
            (RUN_LABEL, self.spec.run_scope.id()),
            (CREATE_LABEL, &self.create_key),
        ];
        CreateRequest {
            template_id: self.template.name.clone(),
            timeout: Some(self.config.timeout),
            metadata: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            env_vars: BTreeMap::new(),
            secure: None,
            allow_internet_access: None,
            network: None,
        }
    }

    /// Sends the create, in a task of its own: its answer is awaited even if nobody else does.
    async fn send_create(&self) -> Result<Created> {
        let (api, message, key) = (self.api.clone(), self.message(), self.create_key.clone());
        let creation = self.creation.clone();
        let lifetime = self.config.timeout;
        creation.send_replace(Creation::Sent);
        let sent = tokio::spawn(async move {
            let result = match api.create(&message, &key).await {
                Ok(created) => Ok(created),
                Err(CreateFailure::Refused(error)) => {
                    creation.send_replace(Creation::Refused);
                    return Err(error);
                }
                Err(CreateFailure::Unknown(lost)) => adopt(&api, &key, lifetime, lost).await,
            };
            match result {
                Ok(created) => match live(api.endpoints(), &created) {
                    Ok(live) => {
                        creation.send_replace(Creation::Made(live));
                        Ok(created)
                    }
                    Err(error) => {
                        creation.send_replace(Creation::Unknown);
                        Err(error)
                    }
                },
                Err(error) => {
                    creation.send_replace(Creation::Unknown);
                    Err(error)
                }
            }
        });
        match sent.await {
            Ok(result) => result,
            Err(error) => {
                self.creation.send_replace(Creation::Unknown);
                Err(Error::new(ErrorKind::Cancelled, "the creation was cut short").with_source(error))
            }
        }
    }

    async fn make_ready(&self, created: &Created) -> Result<()> {
        if !at_least(&created.envd_version, OLDEST_ENVD) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "template {} has envd {}, which is older than {}: build it anew",
                    self.template.name,
                    created.envd_version,
                    OLDEST_ENVD.map(|part| part.to_string()).join(".")
                ),
            ));
        }
        let live = self.live()?;
        let workdir = self.workdir();
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            match files::create_dir(&live.envd, &workdir).await {
                Ok(()) => return Ok(()),
                // A box that has just booted may not listen yet.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::ConnectionLost)
                        && Instant::now() < deadline =>
                {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Starts a program of ours, such as `head`.
    async fn own_program(&self, live: &Live, argv: Vec<OsString>) -> Result<Process> {
        let exec = Exec {
            argv,
            env: Env::new(),
            workdir: PathBuf::from("/"),
            stdin: StdinMode::Null,
        };
        process::spawn(live.envd.clone(), live.watch.clone(), exec, false).await
    }
}

/// The handles on a box from what the create or connect said.
fn live(endpoints: &Endpoints, created: &Created) -> Result<Live> {
    let is_id = !created.sandbox_id.is_empty()
        && created
            .sandbox_id
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if !is_id {
        return Err(error::unreadable("the created sandbox", "its id is none"));
    }
    let domain = created.domain.clone().filter(|domain| !domain.is_empty());
    let base = endpoints.envd_url(&created.sandbox_id, domain.as_deref());
    let envd = Arc::new(Envd::new(
        base,
        created.sandbox_id.clone(),
        created.envd_access_token.clone(),
    )?);
    Ok(Live {
        id: created.sandbox_id.clone(),
        domain,
        watch: Watch::new(envd.clone()),
        envd,
    })
}

/// After a create whose answer was lost: the box that came of it, if one did. It is never created a second time.
async fn adopt(api: &ControlPlane, key: &str, lifetime: u64, lost: Error) -> Result<Created> {
    for delay in SEARCH {
        tokio::time::sleep(delay).await;
        match api.list(&[(CREATE_LABEL, key)]).await {
            Ok(boxes) => {
                if let Some(found) = boxes.first() {
                    tracing::debug!(id = found.sandbox_id, error = %lost, "e2b: found the box of a lost creation");
                    return api.connect(&found.sandbox_id, lifetime).await;
                }
            }
            Err(error) => tracing::debug!(%error, "e2b: the box of a lost creation cannot be looked for"),
        }
    }
    // The provider refused it in so many words, or it did not arrive.
    Err(lost.with_retry(Retry::Permanent))
}

/// Whether a dotted version is at least this one. What is no version is taken for a new one.
fn at_least(version: &str, oldest: [u32; 3]) -> bool {
    let mut parts = [0; 3];
    for (slot, part) in parts.iter_mut().zip(version.split('.')) {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        match digits.parse() {
            Ok(number) => *slot = number,
            Err(_) => return true,
        }
    }
    parts >= oldest
}

/// Deletes every box with these labels. Says whether there was one.
async fn delete_labelled(api: &ControlPlane, labels: &[(&str, &str)]) -> Result<bool> {
    let mut any = false;
    let wanted = [&[RUNTIME_LABEL], labels].concat();
    for found in api.list(&wanted).await? {
        // A control plane that does not know the filter would list the boxes of others.
        let has = |(name, value): &(&str, &str)| found.metadata.get(*name).is_some_and(|found| found == value);
        if wanted.iter().all(has) {
            api.kill(&found.sandbox_id).await?;
            any = true;
        }
    }
    Ok(any)
}

/// Deletes the box of a dead owner.
pub(crate) async fn delete_orphan(endpoints: Endpoints, orphan: &Orphan) -> Result<()> {
    let api = ControlPlane::new(endpoints)?;
    if let Some(id) = &orphan.id {
        return api.kill(id).await;
    }
    let by_name = [(NAME_LABEL, orphan.name.as_str()), (RUN_LABEL, &orphan.run_scope)];
    let by_key = orphan
        .context
        .get(CREATE_LABEL)
        .map(|key| [(CREATE_LABEL, key.as_str())]);
    let labels = by_key.as_ref().map_or(&by_name[..], |by_key| &by_key[..]);
    // Its owner may have died right after it asked, and the box comes all the same.
    for delay in SEARCH {
        tokio::time::sleep(delay).await;
        if delete_labelled(&api, labels).await? && by_key.is_some() {
            // A key makes one box.
            break;
        }
    }
    Ok(())
}

#[async_trait]
impl Runtime for E2bRuntime {
    fn provider(&self) -> &'static str {
        TAG
    }

    fn id(&self) -> Option<String> {
        let mut id = lock(&self.id);
        if let Creation::Made(live) = &*self.creation.borrow() {
            *id = Some(live.id.clone());
        }
        id.clone()
    }

    fn capabilities(&self) -> Capabilities {
        capabilities(self.config.timeout)
    }

    fn workdir(&self) -> PathBuf {
        PathBuf::from(self.config.workdir_or_default())
    }

    fn details(&self) -> Map<String, Value> {
        Map::from_iter([("template".to_owned(), Value::from(self.template.name.clone()))])
    }

    fn lease_context(&self) -> BTreeMap<String, String> {
        let mut context = self.api.endpoints().lease_context();
        context.insert(CREATE_LABEL.to_owned(), self.create_key.clone());
        context
    }

    async fn create(&self) -> Result<()> {
        self.template.ensure(&self.api, &self.spec.cache).await?;
        let created = self.send_create().await?;
        self.make_ready(&created).await
    }

    async fn delete(&self) -> Result<()> {
        let delete = async {
            let mut creation = self.creation.subscribe();
            // A creation under way will say what there is to delete. If its executor is gone, it will not.
            let settled = async {
                let settled = creation.wait_for(|creation| !matches!(creation, Creation::Sent)).await;
                settled.map_or(Creation::Unknown, |state| state.clone())
            };
            let state = tokio::time::timeout(CREATE_GRACE, settled)
                .await
                .unwrap_or(Creation::Unknown);
            let id = lock(&self.id).clone();
            match (state, id) {
                (Creation::Made(Live { id, .. }), _) | (_, Some(id)) => {
                    *lock(&self.id) = Some(id.clone());
                    self.api.kill(&id).await
                }
                (Creation::NotSent | Creation::Refused, None) => Ok(()),
                (Creation::Sent | Creation::Unknown, None) => {
                    delete_labelled(&self.api, &[(CREATE_LABEL, &self.create_key)])
                        .await
                        .map(drop)
                }
            }
        };
        match tokio::time::timeout(DELETE_TIMEOUT, delete).await {
            Ok(result) => result,
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                format!("the sandbox was not deleted within {DELETE_TIMEOUT:?}"),
            )
            .with_retry(Retry::Temporary)),
        }
    }

    async fn spawn(&self, exec: Exec) -> Result<Process> {
        let live = self.live()?;
        process::spawn(live.envd, live.watch, exec, self.config.login_shell).await
    }

    async fn run(&self, exec: Exec, options: Collect) -> Result<Output> {
        let live = self.live()?;
        let mut exec = exec;
        exec.stdin = match options.stdin {
            Some(_) => StdinMode::Piped,
            None => StdinMode::Null,
        };
        process::run(live.envd, live.watch, exec, options, self.config.login_shell).await
    }

    async fn run_program(&self, exec: Exec, options: Collect) -> Result<Output> {
        let live = self.live()?;
        durable::run(live.envd, live.watch, exec, options, self.config.login_shell).await
    }

    async fn spawn_background(&self, exec: Exec, log: &Path) -> Result<()> {
        let live = self.live()?;
        let log = path_text(log, "log")?;
        let mode = Mode::Background { log };
        let launch = Launch::new(&exec, mode, self.config.login_shell)?;
        let started = tokio::spawn(async move {
            let mut begun = process::begin(&live.envd, &exec, &launch).await?;
            // The shell ends at once, and its code says whether the log could be opened.
            loop {
                match begun.events.next().await? {
                    Some(Event::End(end)) => return process::exit_status(&end),
                    Some(_) => {}
                    None => return Err(error::unreadable("the start of the server", "its shell has no end")),
                }
            }
        });
        let status = match started.await {
            Ok(status) => status?,
            Err(error) => {
                return Err(Error::new(ErrorKind::Cancelled, "the start was cut short").with_source(error));
            }
        };
        let kind = match status.code() {
            Some(0) => return Ok(()),
            Some(124) => ErrorKind::WrongFileType,
            _ => ErrorKind::Io,
        };
        Err(Error::new(
            kind,
            format!("the server was not started: its log cannot be written ({status})"),
        ))
    }

    async fn alive(&self) -> Result<()> {
        let said = self.live()?.envd.script("exit 0", &[]).await?;
        match said.code {
            0 => Ok(()),
            code => Err(Error::new(
                ErrorKind::SandboxGone,
                format!("the sandbox runs no programs any more (exit code {code})"),
            )),
        }
    }

    async fn open(&self, path: &Path, limit: Option<u64>) -> Result<ByteStream> {
        let live = self.live()?;
        files::open(&live.envd, path, limit, |argv| self.own_program(&live, argv)).await
    }

    async fn write(&self, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
        files::write(&self.live()?.envd, path, content, options).await
    }

    async fn stat(&self, path: &Path) -> Result<Metadata> {
        files::stat(&self.live()?.envd, path).await
    }

    async fn list(&self, path: &Path) -> Result<Vec<DirEntry>> {
        files::list(&self.live()?.envd, path).await
    }

    async fn create_dir(&self, path: &Path) -> Result<()> {
        files::create_dir(&self.live()?.envd, path).await
    }

    async fn remove(&self, path: &Path, recursive: bool) -> Result<()> {
        files::remove(&self.live()?.envd, path, recursive).await
    }

    async fn upload_tar(&self, dir: &Path, tar: ByteStream) -> Result<()> {
        files::upload_tar(&self.live()?.envd, dir, tar).await
    }

    async fn download_tar(&self, dir: &Path) -> Result<ByteStream> {
        let live = self.live()?;
        let argv = files::tar_command(&live.envd, dir).await?;
        files::output_stream(self.own_program(&live, argv).await?)
    }

    async fn expose(&self, port: u16) -> Result<String> {
        let live = self.live()?;
        Ok(self.api.endpoints().port_url(port, &live.id, live.domain.as_deref()))
    }

    fn published_port(&self) -> Option<u16> {
        Some(SERVICE_PORT)
    }

    async fn open_network(&self) -> Result<()> {
        self.api.network(&self.live()?.id, &egress::open()).await
    }

    async fn restrict_network(&self, policy: &Policy, routes: &Routes) -> Result<()> {
        let live = self.live()?;
        let rules = |rules: &[runtime_core::network::Rule]| -> Vec<String> {
            rules.iter().map(|rule| rule.as_str().to_owned()).collect()
        };
        let (allow, block) = (rules(&policy.allow), rules(&policy.block));
        egress::validate(&allow, &block)?;
        // What is on the box's own loopback needs no grant.
        let hosts: Vec<String> = routes
            .iter()
            .filter(|origin| !origin.is_loopback())
            .map(|origin| origin.host().to_owned())
            .collect();
        let body = egress::restrict(&allow, &block, &hosts)?;
        self.api.network(&live.id, &body).await
    }

    async fn extend_lifetime(&self, seconds: u64) -> Result<()> {
        // A connect only ever extends; setting the lifetime could shorten it.
        self.api.connect(&self.live()?.id, seconds.max(1)).await.map(drop)
    }

    async fn pause(&self) -> Result<()> {
        self.api.pause(&self.live()?.id).await
    }

    async fn resume(&self) -> Result<()> {
        let created = self.api.connect(&self.live()?.id, self.config.timeout).await?;
        // Its token and address may be new.
        let live = live(self.api.endpoints(), &created)?;
        self.creation.send_replace(Creation::Made(live));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for (version, wanted) in [
            ("0.5.7", true),
            ("0.5.10", true),
            ("0.6", true),
            ("1", true),
            ("0.5.6", false),
            ("0.0.9", false),
            ("0.5", false),
            ("0.6.13-dirty", true),
            ("", true),
            ("dev", true),
        ] {
            assert_eq!(at_least(version, OLDEST_ENVD), wanted, "{version:?}");
        }
    }
}
