//! Leases and the reaper, with a provider that counts.

mod boxes;
#[cfg(all(feature = "subprocess", target_os = "linux"))]
mod crashes;
mod files;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value};

use crate::cache::CacheDir;
use crate::capability::Capabilities;
use crate::config::RuntimeConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::journal::{DIRECTORY, Journal};
use crate::lease::reaper::{Outcome, ReapOptions, Report, reap};
use crate::lease::record::tests::record;
use crate::lease::record::{Event, Owner, Record};
use crate::registry::{Orphan, Provider, Registry};
use crate::scope::RunScope;

const TAG: &str = "counting";

/// What a deletion answers.
#[derive(Clone)]
enum Answer {
    Gone,
    Fails(ErrorKind),
    Panics,
    Never,
}

/// Counts the deletions of each name.
struct Counting {
    local: bool,
    answers: Mutex<BTreeMap<String, Answer>>,
    deleted: Mutex<Vec<Orphan>>,
}

impl Counting {
    fn new() -> Arc<Self> {
        Self::with_local(false)
    }

    fn with_local(local: bool) -> Arc<Self> {
        Arc::new(Self {
            local,
            answers: Mutex::default(),
            deleted: Mutex::default(),
        })
    }

    fn registry(self: &Arc<Self>) -> Registry {
        let mut registry = Registry::new();
        registry.register(self.clone());
        registry
    }

    fn answer(&self, name: &str, answer: Answer) {
        self.answers.lock().unwrap().insert(name.to_owned(), answer);
    }

    /// Names in order, one for each deletion.
    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.deleted.lock().unwrap().iter().map(|o| o.name.clone()).collect();
        names.sort();
        names
    }
}

#[async_trait]
impl Provider for Counting {
    fn tag(&self) -> &'static str {
        TAG
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            local: self.local,
            ..Capabilities::minimal()
        }
    }

    fn parse(&self, _: Map<String, Value>) -> Result<Box<dyn RuntimeConfig>> {
        Err(Error::unsupported("these boxes are only deleted"))
    }

    async fn delete_orphan(&self, orphan: &Orphan) -> Result<()> {
        let answer = self.answers.lock().unwrap().get(&orphan.name).cloned();
        match answer.unwrap_or(Answer::Gone) {
            Answer::Gone => {
                self.deleted.lock().unwrap().push(orphan.clone());
                Ok(())
            }
            Answer::Fails(kind) => Err(Error::new(kind, "as the test wants it")),
            Answer::Panics => panic!("as the test wants it"),
            Answer::Never => std::future::pending().await,
        }
    }
}

struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn leases(&self) -> PathBuf {
        self.dir.path().join(DIRECTORY)
    }

    fn cache(&self) -> CacheDir {
        CacheDir::at(self.dir.path())
    }

    fn journal(&self) -> Journal {
        Journal::create(self.leases()).unwrap()
    }

    /// The journal of an owner that died with these boxes.
    fn dead(&self, records: impl IntoIterator<Item = Record>) -> PathBuf {
        let journal = self.journal();
        for record in records {
            begin(&journal, record);
        }
        journal.die()
    }

    fn options(&self) -> ReapOptions {
        ReapOptions {
            cache: self.cache(),
            ..ReapOptions::default()
        }
    }

    async fn reap(&self, provider: &Arc<Counting>) -> Report {
        reap(&provider.registry(), self.options()).await.unwrap()
    }

    /// Every file of the lease directory with its content.
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = std::fs::read_dir(self.leases()).unwrap();
        let read = |path: &Path| std::fs::read(path).unwrap_or_default();
        entries
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name().into_string().unwrap(), read(&entry.path())))
            .collect()
    }
}

fn begin(journal: &Journal, record: Record) -> u64 {
    journal.begin(record).unwrap().expect("an open journal").0
}

/// A lease of this process.
fn own(name: &str) -> Record {
    Record {
        owner: Owner::current(),
        ..record(name)
    }
}

fn outcomes(report: &Report) -> BTreeMap<&str, Outcome> {
    let boxes = report.boxes.iter();
    boxes.map(|reaped| (reaped.name.as_str(), reaped.outcome)).collect()
}

#[tokio::test]
async fn boxes_of_the_dead_are_deleted_by_what_was_known_and_those_of_the_living_are_not() {
    let bench = Bench::new();
    let provider = Counting::new();
    let living = bench.journal();
    begin(&living, own("living"));
    let dead = bench.journal();
    begin(&dead, record("nameless"));
    let known = begin(&dead, record("known"));
    dead.learn_id(known, "i-7").unwrap();
    let over = begin(&dead, record("over"));
    dead.finish(over).unwrap();
    dead.die();

    let report = bench.reap(&provider).await;

    let deleted = provider.deleted.lock().unwrap().clone();
    let orphan = |name: &str, id: Option<&str>| Orphan {
        name: name.into(),
        id: id.map(Into::into),
        run_scope: "run/1".into(),
        context: record("").context,
    };
    assert_eq!(deleted.len(), 2, "{deleted:?}");
    assert!(deleted.contains(&orphan("nameless", None)), "{deleted:?}");
    assert!(deleted.contains(&orphan("known", Some("i-7"))), "{deleted:?}");
    assert_eq!((report.deleted(), report.remaining().count()), (2, 0));
    assert_eq!((report.living_owners, report.living_boxes), (1, 1));
    assert_eq!(bench.files().len(), 1, "the journal of the living alone is left");

    living.die();
    assert_eq!(bench.reap(&provider).await.deleted(), 1);
    assert_eq!(bench.files().len(), 0);
}

#[tokio::test]
async fn a_box_that_cannot_be_deleted_keeps_its_lease_and_says_why() {
    let bench = Bench::new();
    let provider = Counting::new();
    provider.answer("away", Answer::Fails(ErrorKind::Unavailable));
    provider.answer("locked", Answer::Fails(ErrorKind::Unauthorized));
    provider.answer("broken", Answer::Fails(ErrorKind::Other));
    provider.answer("panic", Answer::Panics);
    provider.answer("silent", Answer::Never);
    let mut foreign = record("foreign");
    foreign.provider = "e2b".into();
    let names = ["away", "locked", "broken", "panic", "silent", "fine"];
    bench.dead(names.map(record).into_iter().chain([foreign]));

    let options = ReapOptions {
        timeout: Duration::from_millis(50),
        ..bench.options()
    };
    let report = reap(&provider.registry(), options).await.unwrap();
    let expected = BTreeMap::from([
        ("away", Outcome::Unreachable),
        ("locked", Outcome::Unauthorized),
        ("broken", Outcome::Failed),
        ("panic", Outcome::Failed),
        ("silent", Outcome::Unreachable),
        ("fine", Outcome::Expired),
        ("foreign", Outcome::UnknownProvider),
    ]);
    assert_eq!(outcomes(&report), expected);
    for reaped in report.remaining() {
        assert!(reaped.error.is_some(), "{reaped:?}");
    }
    let unknown = report.boxes.iter().find(|reaped| reaped.name == "foreign").unwrap();
    assert!(
        unknown.error.as_deref().unwrap().contains("feature `e2b`"),
        "{:?}",
        unknown.error
    );
    let shown = report.to_string();
    assert!(
        shown.contains("counting away: left: the provider cannot be reached"),
        "{shown}"
    );
    assert!(shown.contains("1 deleted, 6 left"), "{shown}");

    provider.answers.lock().unwrap().clear();
    let report = bench.reap(&provider).await;
    assert_eq!((report.deleted(), report.remaining().count()), (5, 1));
    assert_eq!(
        provider.names(),
        ["away", "broken", "fine", "locked", "panic", "silent"],
        "each exactly once"
    );
}

#[tokio::test]
async fn a_dry_run_changes_nothing() {
    let bench = Bench::new();
    let provider = Counting::new();
    let path = bench.dead([record("a"), record("b")]);
    bench.dead([]);
    // A torn line and an unborn file would be cleared away, too.
    let mut torn = std::fs::read(&path).unwrap();
    torn.extend_from_slice(b"0123");
    std::fs::write(&path, torn).unwrap();
    std::fs::write(bench.leases().join(".new-x"), "").unwrap();
    let before = bench.files();
    let options = ReapOptions {
        dry_run: true,
        ..bench.options()
    };
    let report = reap(&provider.registry(), options).await.unwrap();
    assert_eq!(
        outcomes(&report),
        BTreeMap::from([("a", Outcome::WouldDelete), ("b", Outcome::WouldDelete)])
    );
    assert_eq!((report.deleted(), provider.names().len()), (0, 0));
    assert!(report.to_string().contains("2 would be deleted"), "{report}");
    assert_eq!(bench.files(), before);
    assert_eq!(bench.reap(&provider).await.deleted(), 2);
    assert_eq!(bench.files().len(), 0);
}

#[tokio::test]
async fn filters_hold_back_by_age_and_by_run() {
    let bench = Bench::new();
    let provider = Counting::new();
    let now = crate::lease::record::unix_seconds(std::time::SystemTime::now());
    let young = Record {
        created_at: now,
        ..record("young")
    };
    let future = Record {
        created_at: now + 9999,
        ..record("future")
    };
    let other = Record {
        run_scope: "run/2".into(),
        ..record("other")
    };
    bench.dead([young, future, other, record("old")]);
    let options = ReapOptions {
        older_than: Some(Duration::from_secs(3600)),
        run_scope: Some(RunScope::new("run/1").unwrap()),
        ..bench.options()
    };
    let report = reap(&provider.registry(), options).await.unwrap();
    assert_eq!(provider.names(), ["old"]);
    assert_eq!((report.boxes.len(), report.filtered), (1, 3));
    let report = bench.reap(&provider).await;
    assert_eq!((report.deleted(), report.filtered), (3, 0));
    assert_eq!(provider.names(), ["future", "old", "other", "young"]);
}

#[tokio::test]
async fn an_expired_box_is_confirmed_and_not_believed() {
    let bench = Bench::new();
    let provider = Counting::new();
    let endless = Record {
        expires_at: None,
        ..record("endless")
    };
    let lasting = Record {
        expires_at: Some(u64::MAX),
        ..record("lasting")
    };
    bench.dead([record("expired"), endless, lasting]);
    provider.answer("expired", Answer::Fails(ErrorKind::Unavailable));
    let report = bench.reap(&provider).await;
    assert_eq!(
        outcomes(&report),
        BTreeMap::from([
            ("expired", Outcome::Unreachable),
            ("endless", Outcome::Deleted),
            ("lasting", Outcome::Deleted)
        ])
    );
    provider.answer("expired", Answer::Gone);
    let report = bench.reap(&provider).await;
    assert_eq!(outcomes(&report), BTreeMap::from([("expired", Outcome::Expired)]));
}

#[tokio::test]
async fn a_name_that_a_living_owner_uses_is_not_deleted_unless_ids_or_contexts_tell_the_two_apart() {
    let bench = Bench::new();
    let provider = Counting::new();
    let living = bench.journal();
    let key = begin(&living, own("twin"));
    living.learn_id(key, "i-1").unwrap();
    let other_id = Record {
        id: Some("i-2".into()),
        ..record("twin")
    };
    let other_run = Record {
        run_scope: "run/2".into(),
        ..record("twin")
    };
    let other_key = Record {
        context: BTreeMap::from([("create".into(), "0123".into())]),
        ..record("twin")
    };
    bench.dead([record("twin"), other_id, other_run, other_key]);
    let report = bench.reap(&provider).await;
    let in_use: Vec<_> = report.remaining().map(|reaped| reaped.outcome).collect();
    assert_eq!((report.deleted(), in_use), (3, vec![Outcome::InUse]));
    living.finish(key).unwrap();
    assert_eq!(bench.reap(&provider).await.deleted(), 1);
}

#[tokio::test]
async fn boxes_on_another_machine_are_left_to_it_where_only_it_can_delete_them() {
    let bench = Bench::new();
    let away = || {
        let mut record = record("away");
        record.owner.machine = "another/0123".into();
        record
    };
    let local = Counting::with_local(true);
    bench.dead([away()]);
    let report = bench.reap(&local).await;
    assert_eq!(outcomes(&report), BTreeMap::from([("away", Outcome::OtherMachine)]));
    let options = ReapOptions {
        other_machines: true,
        ..bench.options()
    };
    let report = reap(&local.registry(), options).await.unwrap();
    assert_eq!((report.deleted(), bench.files().len()), (1, 0));

    bench.dead([away()]);
    let remote = Counting::new();
    assert_eq!(bench.reap(&remote).await.deleted(), 1, "a provider's API is everywhere");
}

#[tokio::test]
async fn a_journal_cut_off_at_any_byte_is_reaped_for_what_it_holds_and_goes() {
    let events = |records: &[(u64, &str)]| -> Vec<Event> {
        let lease = |(key, name): &(u64, &str)| Event::Lease {
            key: *key,
            record: Box::new(record(name)),
        };
        records.iter().map(lease).collect()
    };
    let mut script = events(&[(0, "a"), (1, "b")]);
    script.push(Event::Id {
        key: 1,
        id: "i-1".into(),
    });
    script.push(Event::Gone { key: 0 });
    script.extend(events(&[(2, "c")]));
    let lines: Vec<String> = script.iter().map(|event| event.line().unwrap()).collect();
    let bytes = lines.concat().into_bytes();
    for end in 0..=bytes.len() {
        let bench = Bench::new();
        std::fs::create_dir(bench.leases()).unwrap();
        std::fs::write(bench.leases().join("1-cut.journal"), &bytes[..end]).unwrap();
        let complete = bytes[..end].iter().filter(|byte| **byte == b'\n').count();
        let expected: &[&str] = match complete {
            0 => &[],
            1 => &["a"],
            2 | 3 => &["a", "b"],
            4 => &["b"],
            _ => &["b", "c"],
        };
        let provider = Counting::new();
        // One deletion fails at first, so that the reaper's own lines follow the cut.
        provider.answer("b", Answer::Fails(ErrorKind::Unavailable));
        let report = bench.reap(&provider).await;
        assert_eq!(report.boxes.len(), expected.len(), "cut at {end}");
        provider.answer("b", Answer::Gone);
        let report = bench.reap(&provider).await;
        assert_eq!(report.damaged, [], "cut at {end}");
        assert_eq!(provider.names(), expected, "cut at {end}");
        assert_eq!(bench.files().len(), 0, "cut at {end}");
    }
}

#[tokio::test]
async fn a_damaged_journal_gives_what_it_can_and_is_reported_until_somebody_removes_it() {
    let bench = Bench::new();
    let provider = Counting::new();
    let path = bench.dead([record("a"), record("b"), record("c")]);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    // What is no file at all cannot be read.
    let odd = bench.leases().join("odd.journal");
    std::fs::create_dir(&odd).unwrap();

    for round in 0..2 {
        let report = bench.reap(&provider).await;
        assert_eq!(provider.names(), ["a", "c"], "round {round}");
        let mut damaged: Vec<_> = report.damaged.iter().map(|d| (d.path.clone(), d.lines)).collect();
        damaged.sort();
        let mut expected = [(path.clone(), 1), (odd.clone(), 0)];
        expected.sort();
        assert_eq!(damaged, expected, "round {round}");
        assert!(report.to_string().contains("1 damaged lines"), "{report}");
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_dir(&odd).unwrap();
    assert_eq!(bench.reap(&provider).await, Report::default());
}

#[tokio::test]
async fn without_any_lease_there_is_nothing_to_do_and_nothing_is_made() {
    let bench = Bench::new();
    let provider = Counting::new();
    assert_eq!(bench.reap(&provider).await, Report::default());
    assert!(!bench.leases().exists());
    std::fs::write(bench.leases(), "in the way").unwrap();
    let error = reap(&provider.registry(), bench.options()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongFileType);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_reapers_beside_a_living_owner_delete_every_orphan_exactly_once_a_hundred_times() {
    let bench = Bench::new();
    let living = Arc::new(bench.journal());
    let stays = begin(&living, own("stays"));
    for round in 0..100 {
        let provider = Counting::new();
        let mut expected = Vec::new();
        for owner in 0..3 {
            let names: Vec<_> = (0..4).map(|n| format!("o{round}-{owner}-{n}")).collect();
            bench.dead(names.iter().map(|name| record(name)));
            expected.extend(names);
        }
        let owner = tokio::task::spawn_blocking({
            let living = living.clone();
            move || {
                for n in 0..20 {
                    let key = begin(&living, own(&format!("live{n}")));
                    living.learn_id(key, "i-1").unwrap();
                    living.finish(key).unwrap();
                }
            }
        });
        let registry = provider.registry();
        let reaper = || {
            let (registry, options) = (registry.clone(), bench.options());
            tokio::spawn(async move { reap(&registry, options).await })
        };
        let (first, second) = (reaper(), reaper());
        let reports = [first.await.unwrap().unwrap(), second.await.unwrap().unwrap()];
        owner.await.unwrap();
        expected.sort();
        assert_eq!(provider.names(), expected, "round {round}: {reports:?}");
        for report in reports {
            assert_eq!(report.remaining().count(), 0, "round {round}: {report:?}");
            assert_eq!(report.damaged, [], "round {round}");
        }
        assert_eq!(bench.files().len(), 1, "round {round}: the living owner's");
    }
    living.finish(stays).unwrap();
}
