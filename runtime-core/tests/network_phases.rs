//! Changes of the network: what may run when, whatever fails or is cut short. The provider here is the embedded runtime
//! behind one that pretends to restrict.
#![cfg(feature = "subprocess")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use runtime_core::cache::CacheDir;
use runtime_core::layer::{ChaosLayer, Fault, Operation};
use runtime_core::network::{Policy, Routes};
use runtime_core::subprocess::{SubprocessConfig, SubprocessRuntime};
use runtime_core::{
    BoxSpec, ByteStream, Capabilities, Content, DirEntry, Error, ErrorKind, Exec, Metadata, Phase, Process, Result,
    Runtime, RuntimeConfig, Sandbox, WriteOptions,
};
use serde_json::Value;

#[derive(Debug, Clone)]
struct Restricted(Policy);

impl RuntimeConfig for Restricted {
    fn tag(&self) -> &'static str {
        "restricted"
    }

    fn validate(&self) -> Result<()> {
        self.0.validate()
    }

    fn capabilities(&self) -> Capabilities {
        SubprocessConfig::default().capabilities()
    }

    fn policy(&self) -> Option<Policy> {
        Some(self.0.clone())
    }

    fn to_value(&self) -> Value {
        Value::Null
    }

    fn build(&self, spec: BoxSpec) -> Result<Arc<dyn Runtime>> {
        Ok(Arc::new(Pretender(SubprocessRuntime::new(spec)?)))
    }

    fn boxed_clone(&self) -> Box<dyn RuntimeConfig> {
        Box::new(self.clone())
    }
}

/// Says yes to every policy; the faults come from a layer above it.
struct Pretender(SubprocessRuntime);

#[async_trait]
impl Runtime for Pretender {
    fn provider(&self) -> &'static str {
        "restricted"
    }
    fn id(&self) -> Option<String> {
        self.0.id()
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    fn workdir(&self) -> PathBuf {
        self.0.workdir()
    }
    async fn create(&self) -> Result<()> {
        self.0.create().await
    }
    async fn delete(&self) -> Result<()> {
        self.0.delete().await
    }
    async fn spawn(&self, exec: Exec) -> Result<Process> {
        self.0.spawn(exec).await
    }
    async fn spawn_background(&self, exec: Exec, log: &Path) -> Result<()> {
        self.0.spawn_background(exec, log).await
    }
    async fn alive(&self) -> Result<()> {
        self.0.alive().await
    }
    async fn open(&self, path: &Path, limit: Option<u64>) -> Result<ByteStream> {
        self.0.open(path, limit).await
    }
    async fn write(&self, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
        self.0.write(path, content, options).await
    }
    async fn stat(&self, path: &Path) -> Result<Metadata> {
        self.0.stat(path).await
    }
    async fn list(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.0.list(path).await
    }
    async fn create_dir(&self, path: &Path) -> Result<()> {
        self.0.create_dir(path).await
    }
    async fn remove(&self, path: &Path, recursive: bool) -> Result<()> {
        self.0.remove(path, recursive).await
    }
    async fn upload_tar(&self, dir: &Path, tar: ByteStream) -> Result<()> {
        self.0.upload_tar(dir, tar).await
    }
    async fn download_tar(&self, dir: &Path) -> Result<ByteStream> {
        self.0.download_tar(dir).await
    }
    async fn expose(&self, port: u16) -> Result<String> {
        self.0.expose(port).await
    }
    async fn open_network(&self) -> Result<()> {
        Ok(())
    }
    async fn restrict_network(&self, _: &Policy, _: &Routes) -> Result<()> {
        Ok(())
    }
}

async fn provision(chaos: &ChaosLayer, dir: &Path) -> Sandbox {
    let policy = Policy::new(["example.com"], []).expect("a policy");
    let builder = Sandbox::builder(Restricted(policy))
        .cache(CacheDir::at(dir))
        .layer(chaos.clone());
    builder.provision().await.expect("a sandbox")
}

#[tokio::test]
async fn after_a_cut_that_failed_no_program_starts_until_one_succeeds() {
    let (chaos, dir) = (ChaosLayer::new(), tempfile::tempdir().expect("a directory"));
    let sandbox = provision(&chaos, dir.path()).await;
    let broken = Error::new(ErrorKind::NetworkPolicy, "half of it is in force");
    chaos.handle().next(Operation::Network, Fault::LoseAnswer(broken));
    let error = sandbox
        .prepare_execution(Routes::default())
        .await
        .expect_err("it failed");
    assert_eq!(
        (error.kind(), error.operation()),
        (ErrorKind::NetworkPolicy, Some("prepare_execution"))
    );
    assert_eq!(sandbox.phase(), Phase::Unsettled);
    let runs = chaos.handle().calls(Operation::Run);
    for error in [
        sandbox.run(["true"]).await.expect_err("refused"),
        sandbox.run_program(["true"]).await.expect_err("refused"),
        sandbox.spawn(["true"]).await.expect_err("refused"),
        sandbox.run_background(["true"], "log").await.expect_err("refused"),
    ] {
        assert_eq!(error.kind(), ErrorKind::NetworkPolicy);
    }
    assert_eq!(
        chaos.handle().calls(Operation::Run),
        runs,
        "nothing reached the provider"
    );
    // What failed can be looked into, and tried again.
    sandbox.write("note", "x").await.expect("files stay reachable");
    sandbox
        .prepare_execution(Routes::default())
        .await
        .expect("the second attempt");
    assert_eq!(sandbox.phase(), Phase::Executing);
    assert!(sandbox.run(["true"]).await.expect("allowed").success());
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_cut_whose_caller_went_away_goes_on_and_nothing_starts_before_it_is_done() {
    let (chaos, dir) = (ChaosLayer::new(), tempfile::tempdir().expect("a directory"));
    let sandbox = provision(&chaos, dir.path()).await;
    chaos
        .handle()
        .next(Operation::Network, Fault::Delay(Duration::from_millis(400)));
    let cut = sandbox.prepare_execution(Routes::default());
    assert!(tokio::time::timeout(Duration::from_millis(5), cut).await.is_err());
    assert_eq!(
        sandbox.run(["true"]).await.expect_err("not yet").kind(),
        ErrorKind::NetworkPolicy
    );
    while sandbox.phase() != Phase::Executing {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(sandbox.run(["true"]).await.expect("now").success());
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn a_change_waits_for_the_one_before_it_although_its_caller_went_away() {
    let (chaos, dir) = (ChaosLayer::new(), tempfile::tempdir().expect("a directory"));
    let sandbox = provision(&chaos, dir.path()).await;
    chaos
        .handle()
        .next(Operation::Network, Fault::Delay(Duration::from_millis(400)));
    let cut = sandbox.prepare_execution(Routes::default());
    assert!(tokio::time::timeout(Duration::from_millis(5), cut).await.is_err());
    sandbox.prepare_setup().await.expect("opened after the cut");
    assert_eq!(
        (sandbox.phase(), chaos.handle().calls(Operation::Network)),
        (Phase::Setup, 2)
    );
    // The cut that was cut short must not close the box behind the setup's back.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(sandbox.phase(), Phase::Setup);
    sandbox.stop().await.expect("stopped");
}

#[tokio::test]
async fn the_network_is_not_opened_under_a_running_program_and_opened_after_it() {
    let (chaos, dir) = (ChaosLayer::new(), tempfile::tempdir().expect("a directory"));
    let sandbox = provision(&chaos, dir.path()).await;
    sandbox.prepare_execution(Routes::default()).await.expect("restricted");
    let program = sandbox.spawn(["sleep", "60"]).await.expect("started");
    let cuts = chaos.handle().calls(Operation::Network);
    assert_eq!(
        sandbox.prepare_setup().await.expect_err("it runs").kind(),
        ErrorKind::Phase
    );
    assert_eq!(
        chaos.handle().calls(Operation::Network),
        cuts,
        "the network was not touched"
    );
    drop(program);
    sandbox.prepare_setup().await.expect("opened");
    assert_eq!(
        (sandbox.phase(), chaos.handle().calls(Operation::Network)),
        (Phase::Setup, cuts + 1)
    );
    sandbox.stop().await.expect("stopped");
}

#[tokio::test(start_paused = true)]
async fn a_cut_that_hangs_fails_at_its_deadline_and_stays_unsettled() {
    let (chaos, dir) = (ChaosLayer::new(), tempfile::tempdir().expect("a directory"));
    let sandbox = provision(&chaos, dir.path()).await;
    chaos.handle().next(Operation::Network, Fault::Hang);
    let error = sandbox
        .prepare_execution(Routes::default())
        .await
        .expect_err("it hangs");
    assert_eq!((error.kind(), sandbox.phase()), (ErrorKind::Timeout, Phase::Unsettled));
}
