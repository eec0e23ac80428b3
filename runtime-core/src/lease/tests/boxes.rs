//! The lease in the life of a sandbox, with a runtime whose creation and deletion do as the test says.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::{Notify, Semaphore};

use super::*;
use crate::command::Exec;
use crate::files::{ByteStream, Content, DirEntry, Metadata, WriteOptions};
use crate::lease::record::Contents;
use crate::lease::{Durability, LeasePolicy};
use crate::process::Process;
use crate::runtime::{BoxSpec, Runtime};
use crate::sandbox::Sandbox;

/// What one box does, and what was seen of it.
struct Script {
    /// A creation gets its id, announces it and waits for a permit before it ends.
    slow: bool,
    /// It never says its id.
    silent: bool,
    creation_fails: bool,
    deletion_fails: AtomicBool,
    deletion_panics: bool,
    local: bool,
    has_id: Notify,
    go_on: Semaphore,
    known: AtomicBool,
    deletions: AtomicUsize,
    /// The leases on the disk when the creation began.
    at_creation: Mutex<Vec<Record>>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            slow: false,
            silent: false,
            creation_fails: false,
            deletion_fails: AtomicBool::new(false),
            deletion_panics: false,
            local: false,
            has_id: Notify::new(),
            go_on: Semaphore::new(0),
            known: AtomicBool::new(false),
            deletions: AtomicUsize::new(0),
            at_creation: Mutex::default(),
        }
    }
}

#[derive(Clone)]
struct Config(Arc<Script>);

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Config")
    }
}

impl RuntimeConfig for Config {
    fn tag(&self) -> &'static str {
        TAG
    }

    fn validate(&self) -> Result<()> {
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::minimal()
    }

    fn to_value(&self) -> Value {
        Value::Null
    }

    fn build(&self, spec: BoxSpec) -> Result<Arc<dyn Runtime>> {
        Ok(Arc::new(Scripted {
            script: self.0.clone(),
            spec,
        }))
    }

    fn boxed_clone(&self) -> Box<dyn RuntimeConfig> {
        Box::new(self.clone())
    }
}

struct Scripted {
    script: Arc<Script>,
    spec: BoxSpec,
}

#[async_trait]
impl Runtime for Scripted {
    fn provider(&self) -> &'static str {
        TAG
    }

    fn id(&self) -> Option<String> {
        self.script.known.load(Ordering::SeqCst).then(|| "i-1".to_owned())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            local: self.script.local,
            max_lifetime_seconds: Some(3600),
            ..Capabilities::minimal()
        }
    }

    fn workdir(&self) -> PathBuf {
        "/".into()
    }

    fn lease_context(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("region".into(), "here".into())])
    }

    async fn create(&self) -> Result<()> {
        *self.script.at_creation.lock().unwrap() = on_disk(self.spec.cache.path());
        if self.script.slow {
            self.script.known.store(!self.script.silent, Ordering::SeqCst);
            tokio::task::yield_now().await;
            self.script.has_id.notify_one();
            self.script.go_on.acquire().await.unwrap().forget();
        }
        if self.script.creation_fails {
            return Err(Error::new(ErrorKind::Other, "as the test wants it"));
        }
        Ok(())
    }

    async fn delete(&self) -> Result<()> {
        self.script.deletions.fetch_add(1, Ordering::SeqCst);
        assert!(!self.script.deletion_panics, "as the test wants it");
        if self.script.deletion_fails.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Other, "as the test wants it"));
        }
        Ok(())
    }

    async fn spawn(&self, _: Exec) -> Result<Process> {
        Err(Error::unsupported("a box without programs"))
    }

    async fn spawn_background(&self, _: Exec, _: &Path) -> Result<()> {
        Err(Error::unsupported("a box without programs"))
    }

    async fn alive(&self) -> Result<()> {
        Ok(())
    }

    async fn open(&self, _: &Path, _: Option<u64>) -> Result<ByteStream> {
        Err(Error::unsupported("a box without files"))
    }

    async fn write(&self, _: &Path, _: Content, _: WriteOptions) -> Result<()> {
        Err(Error::unsupported("a box without files"))
    }

    async fn stat(&self, _: &Path) -> Result<Metadata> {
        Err(Error::unsupported("a box without files"))
    }

    async fn list(&self, _: &Path) -> Result<Vec<DirEntry>> {
        Err(Error::unsupported("a box without files"))
    }

    async fn create_dir(&self, _: &Path) -> Result<()> {
        Err(Error::unsupported("a box without files"))
    }

    async fn remove(&self, _: &Path, _: bool) -> Result<()> {
        Err(Error::unsupported("a box without files"))
    }

    async fn upload_tar(&self, _: &Path, _: ByteStream) -> Result<()> {
        Err(Error::unsupported("a box without files"))
    }

    async fn download_tar(&self, _: &Path) -> Result<ByteStream> {
        Err(Error::unsupported("a box without files"))
    }

    async fn expose(&self, _: u16) -> Result<String> {
        Err(Error::unsupported("a box without ports"))
    }
}

/// The leases in the files of a cache, whoever holds them.
fn on_disk(cache: &Path) -> Vec<Record> {
    let Ok(entries) = std::fs::read_dir(cache.join(DIRECTORY)) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| std::fs::read(entry.unwrap().path()).ok())
        .flat_map(|bytes| Contents::read(&bytes).leases.into_values())
        .collect()
}

fn builder(script: &Arc<Script>, bench: &Bench) -> crate::sandbox::Builder {
    Sandbox::builder(Config(script.clone()))
        .cache(bench.cache())
        .run_scope(RunScope::new("run/1").unwrap())
}

#[tokio::test]
async fn the_lease_is_on_the_disk_before_the_creation_and_gone_after_the_deletion() {
    for durability in [Durability::Auto, Durability::Process, Durability::Machine] {
        let bench = Bench::new();
        let script = Arc::new(Script::default());
        let sandbox = builder(&script, &bench)
            .name("one")
            .env("SECRET_TOKEN", "hunter2hunter2")
            .lease_durability(durability)
            .provision()
            .await
            .unwrap();
        let seen = script.at_creation.lock().unwrap().clone();
        assert_eq!(seen.len(), 1);
        let lease = &seen[0];
        assert_eq!((lease.provider.as_str(), lease.name.as_str()), (TAG, "one"));
        assert_eq!((lease.run_scope.as_str(), &lease.id), ("run/1", &None));
        assert_eq!(lease.context, BTreeMap::from([("region".into(), "here".into())]));
        assert_eq!(lease.expires_at, Some(lease.created_at + 3600));
        assert_eq!(lease.owner, crate::lease::record::Owner::current());
        for (name, content) in bench.files() {
            let text = String::from_utf8(content).unwrap();
            assert!(!text.contains("hunter2"), "{name}: {text}");
        }
        assert_eq!(on_disk(bench.dir.path()).len(), 1);
        sandbox.stop().await.unwrap();
        assert_eq!(on_disk(bench.dir.path()), []);
    }
}

#[tokio::test]
async fn the_id_is_on_the_disk_while_the_creation_still_goes_on() {
    let bench = Bench::new();
    let script = Arc::new(Script {
        slow: true,
        ..Script::default()
    });
    let provision = tokio::spawn(builder(&script, &bench).provision());
    script.has_id.notified().await;
    // The write is on a thread of its own.
    while on_disk(bench.dir.path())[0].id.is_none() {
        tokio::task::yield_now().await;
    }
    assert_eq!(on_disk(bench.dir.path())[0].id.as_deref(), Some("i-1"));
    script.go_on.add_permits(1);
    drop(provision.await.unwrap().unwrap());
}

#[tokio::test]
async fn a_failed_creation_deletes_and_ends_its_lease_and_keeps_it_if_the_deletion_fails_too() {
    let bench = Bench::new();
    let script = Arc::new(Script {
        slow: true,
        creation_fails: true,
        go_on: Semaphore::new(2),
        ..Script::default()
    });
    assert!(builder(&script, &bench).provision().await.is_err());
    assert_eq!(script.deletions.load(Ordering::SeqCst), 1);
    assert_eq!(on_disk(bench.dir.path()), []);

    script.known.store(false, Ordering::SeqCst);
    script.deletion_fails.store(true, Ordering::SeqCst);
    assert!(builder(&script, &bench).name("kept").provision().await.is_err());
    let provider = Counting::new();
    let report = bench.reap(&provider).await;
    assert_eq!(report.deleted(), 1, "although its owner lives: {report}");
    let deleted = provider.deleted.lock().unwrap().clone();
    assert_eq!(
        (deleted[0].name.as_str(), deleted[0].id.as_deref()),
        ("kept", Some("i-1"))
    );
}

#[tokio::test]
async fn a_stop_that_fails_leaves_the_lease_to_the_reaper_and_one_that_succeeds_later_takes_it_back() {
    let bench = Bench::new();
    let script = Arc::new(Script::default());
    let sandbox = builder(&script, &bench).provision().await.unwrap();
    script.deletion_fails.store(true, Ordering::SeqCst);
    sandbox.stop().await.unwrap_err();
    assert_eq!(on_disk(bench.dir.path()).len(), 1);
    script.deletion_fails.store(false, Ordering::SeqCst);
    sandbox.stop().await.unwrap();
    assert_eq!(on_disk(bench.dir.path()), []);
}

#[tokio::test]
async fn a_provider_that_panics_in_a_deletion_fails_the_stop_and_keeps_the_lease() {
    let bench = Bench::new();
    let script = Arc::new(Script {
        deletion_panics: true,
        ..Script::default()
    });
    let sandbox = builder(&script, &bench).provision().await.unwrap();
    let error = sandbox.stop().await.unwrap_err();
    assert!(error.message().contains("panicked"), "{error}");
    assert_eq!(on_disk(bench.dir.path()).len(), 1);
}

#[tokio::test]
async fn a_panic_of_the_task_that_holds_a_sandbox_deletes_its_box() {
    let bench = Bench::new();
    let script = Arc::new(Script::default());
    let sandbox = builder(&script, &bench).provision().await.unwrap();
    let view = sandbox.view();
    let task = tokio::spawn(async move {
        let _sandbox = sandbox;
        panic!("as the test wants it");
    });
    assert!(task.await.unwrap_err().is_panic());
    view.shared.stopped().await.unwrap();
    assert_eq!(script.deletions.load(Ordering::SeqCst), 1);
    assert_eq!(on_disk(bench.dir.path()), []);
}

#[tokio::test]
async fn a_stop_during_the_creation_waits_for_the_box_and_then_deletes_it() {
    let bench = Bench::new();
    let script = Arc::new(Script {
        slow: true,
        ..Script::default()
    });
    let provision = tokio::spawn(builder(&script, &bench).name("in-creation").provision());
    script.has_id.notified().await;
    let shared = live("in-creation");
    shared.begin_stop();
    shared.stop_requested().await;
    assert_eq!(script.deletions.load(Ordering::SeqCst), 0, "there may be no box yet");
    script.go_on.add_permits(1);
    shared.stopped().await.unwrap();
    assert_eq!(script.deletions.load(Ordering::SeqCst), 1);
    assert_eq!(on_disk(bench.dir.path()), []);
    // The sandbox comes back, stopped.
    let sandbox = provision.await.unwrap().unwrap();
    assert_eq!(sandbox.phase(), crate::Phase::Stopped);
}

fn live(name: &str) -> Arc<crate::sandbox::Shared> {
    let mut live = crate::background::live().into_iter();
    live.find(|shared| shared.name == name).expect("it is registered")
}

#[tokio::test]
async fn a_creation_that_was_cut_short_leaves_its_lease_unless_the_id_was_learned() {
    for learned in [false, true] {
        let bench = Bench::new();
        // Without an id the deletion that finds nothing proves nothing: the box may come to be after it.
        let script = Arc::new(Script {
            slow: true,
            silent: !learned,
            ..Script::default()
        });
        let error = builder(&script, &bench)
            .boot_timeout(Duration::from_millis(20))
            .provision()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let left = bench.reap(&Counting::new()).await;
        assert_eq!(left.deleted(), usize::from(!learned), "learned: {learned}");
        assert_eq!(on_disk(bench.dir.path()), []);
    }
}

#[tokio::test]
async fn without_room_for_a_lease_provisioning_refuses_or_goes_on_as_configured() {
    let bench = Bench::new();
    std::fs::write(bench.leases(), "in the way").unwrap();
    let script = Arc::new(Script::default());
    let error = builder(&script, &bench).name("refused").provision().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lease);
    assert_eq!((error.provider(), error.sandbox()), (Some(TAG), Some("refused")));
    assert!(error.message().contains("SANDBOX_CACHE_DIR"), "{error}");
    assert_eq!(script.deletions.load(Ordering::SeqCst), 0, "nothing was created");
    for policy in [LeasePolicy::BestEffort, LeasePolicy::Off] {
        let sandbox = builder(&script, &bench).leases(policy).provision().await.unwrap();
        sandbox.stop().await.unwrap();
    }
    assert_eq!(script.deletions.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn with_leases_off_nothing_is_written() {
    let bench = Bench::new();
    let script = Arc::new(Script::default());
    let sandbox = builder(&script, &bench)
        .leases(LeasePolicy::Off)
        .provision()
        .await
        .unwrap();
    assert!(!bench.leases().exists());
    sandbox.stop().await.unwrap();
}

#[test]
fn a_provision_that_nobody_waits_for_leaves_no_lease() {
    let bench = Bench::new();
    let executor = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    executor.block_on(async {
        for polls in 0..8 {
            let script = Arc::new(Script::default());
            let mut provision = Box::pin(builder(&script, &bench).provision());
            for _ in 0..polls {
                let poll =
                    |context: &mut std::task::Context<'_>| std::task::Poll::Ready(provision.as_mut().poll(context));
                if std::future::poll_fn(poll).await.is_ready() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
    });
    // Waits for what writes leases.
    drop(executor);
    while !on_disk(bench.dir.path()).is_empty() {
        std::thread::yield_now();
    }
}

#[cfg(all(feature = "subprocess", target_os = "linux"))]
#[tokio::test]
async fn orphans_are_reaped_before_the_first_provision_if_asked_for() {
    use crate::subprocess::{SubprocessConfig, SubprocessProvider};
    let bench = Bench::new();
    let cache = bench.cache();
    let claim = "0123";
    let dir = cache.create_dir("runtimes/subprocess/fixed-name").unwrap();
    std::os::unix::fs::symlink(claim, dir.with_file_name(".claim-fixed-name")).unwrap();
    let mut orphan = record("fixed-name");
    orphan.provider = SubprocessProvider.tag().into();
    orphan.context = BTreeMap::from([
        ("dir".into(), dir.to_string_lossy().into_owned()),
        ("claim".into(), claim.into()),
    ]);
    bench.dead([orphan]);
    let again = || {
        Sandbox::builder(SubprocessConfig::default())
            .cache(bench.cache())
            .name("fixed-name")
    };
    let error = again().provision().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    let sandbox = again().reap_orphans(true).provision().await.unwrap();
    sandbox.stop().await.unwrap();
    assert_eq!(on_disk(bench.dir.path()), []);
}

#[cfg(all(feature = "subprocess", target_os = "linux"))]
#[tokio::test]
async fn the_lease_of_a_refused_name_does_not_delete_the_box_that_has_it() {
    use crate::subprocess::SubprocessConfig;
    let bench = Bench::new();
    // Without a lease of its own, so that nothing but its claim protects it.
    let sandbox = Sandbox::builder(SubprocessConfig::default())
        .cache(bench.cache())
        .name("taken")
        .leases(LeasePolicy::Off)
        .provision()
        .await
        .unwrap();
    let mut refused = record("taken");
    refused.provider = "subprocess".into();
    refused.context = BTreeMap::from([
        ("dir".into(), sandbox.workdir().to_string_lossy().into_owned()),
        ("claim".into(), "of-the-refused".into()),
    ]);
    bench.dead([refused]);
    let report = reap(&Registry::with_builtin(), bench.options()).await.unwrap();
    assert_eq!((report.deleted(), bench.files().len()), (1, 0), "{report}");
    assert!(sandbox.run(["true"]).await.unwrap().success());
    sandbox.stop().await.unwrap();
}
