//! Wrappers around any [`Runtime`]: [`RetryLayer`], [`DeadlineLayer`], [`LimitLayer`], [`ChaosLayer`].
//!
//! A layer sees each operation before and after the provider does, and knows nothing of any provider. The first layer
//! that is added is the outermost.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use std::time::Duration;
//! use runtime_core::layer::{DeadlineLayer, LimitLayer};
//! use runtime_core::{Sandbox, subprocess::SubprocessConfig};
//!
//! let limit = LimitLayer::new(64);
//! let sandbox = Sandbox::builder(SubprocessConfig::default())
//!     .layer(limit.clone())
//!     .layer(DeadlineLayer::new(Duration::from_secs(60)))
//!     .provision()
//!     .await?;
//! assert!(sandbox.run(["true"]).await?.success());
//! sandbox.stop().await?;
//! # Ok::<(), runtime_core::Error>(()) }).unwrap();
//! ```

mod chaos;
mod deadline;
mod limit;
mod retry;

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Map, Value};

pub use self::chaos::{ChaosHandle, ChaosLayer, Fault};
pub use self::deadline::DeadlineLayer;
pub use self::limit::LimitLayer;
pub use self::retry::RetryLayer;
use crate::capability::Capabilities;
use crate::command::{Collect, Exec, Output};
use crate::error::{Error, ErrorKind, Result};
use crate::files::{ByteStream, Content, DirEntry, Metadata, WriteOptions};
use crate::network::{Policy, Routes};
use crate::process::Process;
use crate::runtime::Runtime;

/// Puts something around a [`Runtime`].
pub trait Layer: Send + Sync + 'static {
    /// The wrapped runtime.
    fn wrap(&self, inner: Arc<dyn Runtime>) -> Arc<dyn Runtime>;
}

/// An operation of a [`Runtime`], as layers tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// [`Runtime::create`].
    Create,
    /// [`Runtime::delete`].
    Delete,
    /// [`Runtime::spawn`].
    Spawn,
    /// [`Runtime::run`].
    Run,
    /// [`Runtime::run_program`].
    RunProgram,
    /// [`Runtime::spawn_background`].
    SpawnBackground,
    /// [`Runtime::alive`].
    Alive,
    /// [`Runtime::open`] and [`Runtime::read`].
    Read,
    /// [`Runtime::write`].
    Write,
    /// [`Runtime::stat`].
    Stat,
    /// [`Runtime::list`].
    List,
    /// [`Runtime::create_dir`].
    CreateDir,
    /// [`Runtime::remove`].
    Remove,
    /// [`Runtime::upload_tar`].
    Upload,
    /// [`Runtime::download_tar`].
    Download,
    /// [`Runtime::expose`].
    Expose,
    /// [`Runtime::open_network`] and [`Runtime::restrict_network`].
    Network,
    /// [`Runtime::extend_lifetime`], [`Runtime::pause`] and [`Runtime::resume`].
    Lifetime,
}

impl Operation {
    /// Whether doing it twice is the same as doing it once. Nothing that starts a program is, and nothing that
    /// consumes a stream or creates a box.
    pub fn is_idempotent(self) -> bool {
        match self {
            Self::Delete
            | Self::Alive
            | Self::Read
            | Self::Stat
            | Self::List
            | Self::CreateDir
            | Self::Download
            | Self::Expose
            | Self::Network
            | Self::Lifetime => true,
            Self::Create
            | Self::Spawn
            | Self::Run
            | Self::RunProgram
            | Self::SpawnBackground
            | Self::Write
            | Self::Remove
            | Self::Upload => false,
        }
    }

    /// The name in `snake_case`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Delete => "delete",
            Self::Spawn => "spawn",
            Self::Run => "run",
            Self::RunProgram => "run_program",
            Self::SpawnBackground => "spawn_background",
            Self::Alive => "alive",
            Self::Read => "read",
            Self::Write => "write",
            Self::Stat => "stat",
            Self::List => "list",
            Self::CreateDir => "create_dir",
            Self::Remove => "remove",
            Self::Upload => "upload",
            Self::Download => "download",
            Self::Expose => "expose",
            Self::Network => "network",
            Self::Lifetime => "lifetime",
        }
    }
}

/// What a layer does around each operation.
trait Around: Send + Sync + 'static {
    /// Performs `attempt`, which for an idempotent operation may be called more than once.
    fn call<T: Send, F, Fut>(&self, operation: Operation, attempt: F) -> impl Future<Output = Result<T>> + Send
    where
        F: FnMut() -> Fut + Send,
        Fut: Future<Output = Result<T>> + Send;

    /// What becomes of a process that was started.
    fn process(&self, process: Process) -> Process {
        process
    }

    /// What becomes of a stream that was opened.
    fn stream(&self, stream: ByteStream) -> ByteStream {
        stream
    }
}

/// A runtime with something around each operation.
struct Wrapped<A> {
    inner: Arc<dyn Runtime>,
    around: A,
}

/// Hands an argument that can be given only once to the first attempt.
fn once<T>(argument: &mut Option<T>) -> Result<T> {
    argument.take().ok_or_else(|| {
        Error::new(
            ErrorKind::Other,
            "an operation that may be done once was attempted twice",
        )
    })
}

#[async_trait]
impl<A: Around> Runtime for Wrapped<A> {
    fn provider(&self) -> &'static str {
        self.inner.provider()
    }

    fn id(&self) -> Option<String> {
        self.inner.id()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn workdir(&self) -> PathBuf {
        self.inner.workdir()
    }

    fn details(&self) -> Map<String, Value> {
        self.inner.details()
    }

    fn lease_context(&self) -> BTreeMap<String, String> {
        self.inner.lease_context()
    }

    fn published_port(&self) -> Option<u16> {
        self.inner.published_port()
    }

    #[cfg(feature = "egress")]
    fn egress_log(&self) -> Option<crate::egress::EgressLog> {
        self.inner.egress_log()
    }

    async fn host_url(&self, url: &str) -> Result<String> {
        self.inner.host_url(url).await
    }

    async fn create(&self) -> Result<()> {
        self.around.call(Operation::Create, || self.inner.create()).await
    }

    async fn delete(&self) -> Result<()> {
        self.around.call(Operation::Delete, || self.inner.delete()).await
    }

    async fn spawn(&self, exec: Exec) -> Result<Process> {
        let mut exec = Some(exec);
        let attempt = || {
            let exec = once(&mut exec);
            async move { self.inner.spawn(exec?).await }
        };
        self.around
            .call(Operation::Spawn, attempt)
            .await
            .map(|process| self.around.process(process))
    }

    async fn run(&self, exec: Exec, options: Collect) -> Result<Output> {
        let mut argument = Some((exec, options));
        let attempt = || {
            let argument = once(&mut argument);
            async move {
                let (exec, options) = argument?;
                self.inner.run(exec, options).await
            }
        };
        self.around.call(Operation::Run, attempt).await
    }

    async fn run_program(&self, exec: Exec, options: Collect) -> Result<Output> {
        let mut argument = Some((exec, options));
        let attempt = || {
            let argument = once(&mut argument);
            async move {
                let (exec, options) = argument?;
                self.inner.run_program(exec, options).await
            }
        };
        self.around.call(Operation::RunProgram, attempt).await
    }

    async fn spawn_background(&self, exec: Exec, log: &Path) -> Result<()> {
        let mut exec = Some(exec);
        let attempt = || {
            let exec = once(&mut exec);
            async move { self.inner.spawn_background(exec?, log).await }
        };
        self.around.call(Operation::SpawnBackground, attempt).await
    }

    async fn alive(&self) -> Result<()> {
        self.around.call(Operation::Alive, || self.inner.alive()).await
    }

    async fn open(&self, path: &Path, limit: Option<u64>) -> Result<ByteStream> {
        let opened = self.around.call(Operation::Read, || self.inner.open(path, limit)).await;
        opened.map(|stream| self.around.stream(stream))
    }

    async fn read(&self, path: &Path, limit: u64) -> Result<Bytes> {
        self.around.call(Operation::Read, || self.inner.read(path, limit)).await
    }

    async fn write(&self, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
        let mut content = Some(content);
        let attempt = || {
            let content = once(&mut content);
            async move { self.inner.write(path, content?, options).await }
        };
        self.around.call(Operation::Write, attempt).await
    }

    async fn stat(&self, path: &Path) -> Result<Metadata> {
        self.around.call(Operation::Stat, || self.inner.stat(path)).await
    }

    async fn list(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.around.call(Operation::List, || self.inner.list(path)).await
    }

    async fn create_dir(&self, path: &Path) -> Result<()> {
        self.around
            .call(Operation::CreateDir, || self.inner.create_dir(path))
            .await
    }

    async fn remove(&self, path: &Path, recursive: bool) -> Result<()> {
        self.around
            .call(Operation::Remove, || self.inner.remove(path, recursive))
            .await
    }

    async fn upload_tar(&self, dir: &Path, tar: ByteStream) -> Result<()> {
        let mut tar = Some(tar);
        let attempt = || {
            let tar = once(&mut tar);
            async move { self.inner.upload_tar(dir, tar?).await }
        };
        self.around.call(Operation::Upload, attempt).await
    }

    async fn download_tar(&self, dir: &Path) -> Result<ByteStream> {
        let opened = self
            .around
            .call(Operation::Download, || self.inner.download_tar(dir))
            .await;
        opened.map(|stream| self.around.stream(stream))
    }

    async fn expose(&self, port: u16) -> Result<String> {
        self.around.call(Operation::Expose, || self.inner.expose(port)).await
    }

    async fn open_network(&self) -> Result<()> {
        self.around.call(Operation::Network, || self.inner.open_network()).await
    }

    async fn restrict_network(&self, policy: &Policy, routes: &Routes) -> Result<()> {
        self.around
            .call(Operation::Network, || self.inner.restrict_network(policy, routes))
            .await
    }

    async fn extend_lifetime(&self, seconds: u64) -> Result<()> {
        self.around
            .call(Operation::Lifetime, || self.inner.extend_lifetime(seconds))
            .await
    }

    async fn pause(&self) -> Result<()> {
        self.around.call(Operation::Lifetime, || self.inner.pause()).await
    }

    async fn resume(&self) -> Result<()> {
        self.around.call(Operation::Lifetime, || self.inner.resume()).await
    }
}
