//! The file of a journal: who holds it, how it grows, what happens when it goes away or the disk is full.

use super::*;
use crate::lease::journal::SUFFIX;

#[tokio::test]
async fn ten_thousand_leases_take_one_descriptor_and_one_file() {
    let bench = Bench::new();
    let journal = bench.journal();
    let keys: Vec<u64> = (0..10_000)
        .map(|n| begin(&journal, record(&format!("box-{n}"))))
        .collect();
    assert_eq!(bench.files().len(), 1);
    #[cfg(target_os = "linux")]
    {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        let ours = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        assert_eq!(ours.filter(|path| path.starts_with(bench.leases())).count(), 1);
    }
    for key in &keys[..9_990] {
        journal.finish(*key).unwrap();
    }
    let full = journal.len();
    assert!(full < 300 << 10, "rewritten without what is over: {full} bytes");
    journal.die();
    assert_eq!(bench.reap(&Counting::new()).await.deleted(), 10);
}

#[tokio::test]
async fn a_journal_of_many_short_lives_stays_small_and_keeps_the_long_ones() {
    let bench = Bench::new();
    let provider = Counting::new();
    let journal = bench.journal();
    let long = begin(&journal, own("long"));
    let mut largest = 0;
    for n in 0..5_000 {
        let key = begin(&journal, own("short"));
        journal.learn_id(key, "i-short").unwrap();
        if n == 2_500 {
            journal.learn_id(long, "i-long").unwrap();
        }
        journal.finish(key).unwrap();
        largest = largest.max(journal.len());
        if n % 1000 == 0 {
            assert_eq!(bench.reap(&provider).await.living_boxes, 1);
        }
    }
    assert!(largest < 300 << 10, "{largest} bytes");
    journal.die();
    bench.reap(&provider).await;
    let deleted = provider.deleted.lock().unwrap().clone();
    let ids: Vec<_> = deleted.iter().map(|o| (o.name.as_str(), o.id.as_deref())).collect();
    assert_eq!(ids, [("long", Some("i-long"))]);
}

#[tokio::test]
async fn when_the_cache_directory_is_emptied_the_next_lease_brings_the_living_ones_back() {
    let bench = Bench::new();
    let journal = bench.journal();
    begin(&journal, own("before"));
    std::fs::remove_dir_all(bench.leases()).unwrap();
    begin(&journal, own("after"));
    let provider = Counting::new();
    let report = bench.reap(&provider).await;
    assert_eq!((report.living_owners, report.living_boxes), (1, 2), "and it is locked");
    journal.die();
    bench.reap(&provider).await;
    assert_eq!(provider.names(), ["after", "before"]);
}

#[test]
fn the_end_of_the_last_lease_does_not_bring_a_removed_directory_back() {
    let bench = Bench::new();
    let journal = bench.journal();
    let key = begin(&journal, record("last"));
    std::fs::remove_dir_all(bench.leases()).unwrap();
    journal.finish(key).unwrap();
    assert!(!bench.leases().exists());
}

#[test]
fn a_failed_write_is_an_error_and_does_not_spoil_the_next_line() {
    let bench = Bench::new();
    let journal = bench.journal();
    begin(&journal, record("before"));
    journal.break_writes();
    assert!(journal.begin(record("refused")).is_err());
    journal.mend_writes();
    // Half a line that could not be cut off.
    let mut content = std::fs::read(journal.path()).unwrap();
    content.extend_from_slice(b"0123456789abcdef {\"ev");
    std::fs::write(journal.path(), content).unwrap();
    begin(&journal, record("after"));
    let contents = crate::lease::record::Contents::read(&std::fs::read(journal.path()).unwrap());
    let names: Vec<_> = contents.leases.values().map(|record| record.name.as_str()).collect();
    assert_eq!((names, contents.damaged), (vec!["before", "after"], 1));
}

#[test]
fn a_lease_that_is_no_address_but_a_document_is_refused() {
    let bench = Bench::new();
    let journal = bench.journal();
    let mut large = record("large");
    large.context.insert("document".into(), "x".repeat(70_000));
    assert_eq!(
        journal.begin(large).unwrap_err().kind(),
        std::io::ErrorKind::InvalidInput
    );
    assert_eq!(journal.len(), 0);
}

#[tokio::test]
async fn a_child_does_not_inherit_the_lock() {
    let bench = Bench::new();
    let journal = bench.journal();
    begin(&journal, record("parent"));
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    journal.die();
    let report = bench.reap(&Counting::new()).await;
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((report.deleted(), report.living_owners), (1, 0));
}

#[test]
fn a_process_has_one_journal_for_a_cache_and_closes_the_idle_ones_of_others() {
    let (one, two) = (Bench::new(), Bench::new());
    // Other tests of this process open caches at the same time, and close this one while it is idle.
    let (first, key) = loop {
        let journal = Journal::of(&one.cache()).unwrap();
        if let Some((key, _)) = journal.begin(record("a")).unwrap() {
            break (journal, key);
        }
    };
    let second = Journal::of(&two.cache()).unwrap();
    assert!(Arc::ptr_eq(&first, &Journal::of(&one.cache()).unwrap()), "in use");
    first.finish(key).unwrap();
    drop(second);
    // Asking for a third closes what is idle.
    let three = Bench::new();
    Journal::of(&three.cache()).unwrap();
    assert_eq!(one.files().len(), 0);
    assert!(first.begin(record("late")).unwrap().is_none(), "closed");
    assert!(!Arc::ptr_eq(&first, &Journal::of(&one.cache()).unwrap()));
}

#[test]
fn a_forked_child_does_not_write_to_its_parents_journal() {
    let bench = Bench::new();
    let mut inherited = bench.journal();
    inherited.set_pid(1);
    let inherited = Arc::new(inherited);
    crate::lease::journal::adopt(inherited.clone());
    let own = Journal::of(&bench.cache()).unwrap();
    assert!(!Arc::ptr_eq(&own, &inherited));
    assert_eq!(bench.files().len(), 2);
}

#[tokio::test]
async fn a_lease_that_was_left_is_reaped_although_its_owner_lives() {
    let bench = Bench::new();
    let provider = Counting::new();
    let journal = bench.journal();
    begin(&journal, own("kept"));
    let key = begin(&journal, record("left"));
    journal.learn_id(key, "i-9").unwrap();
    let path = journal.leave(key).unwrap().expect("it was live");
    assert!(path.to_string_lossy().ends_with(SUFFIX));
    assert!(journal.leave(key).unwrap().is_none(), "once");
    let report = bench.reap(&provider).await;
    assert_eq!(report.living_boxes, 1);
    let deleted = provider.deleted.lock().unwrap().clone();
    assert_eq!(deleted.len(), 1);
    assert_eq!(
        (deleted[0].name.as_str(), deleted[0].id.as_deref()),
        ("left", Some("i-9"))
    );
    assert!(!path.exists());
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_journal_of_another_user_is_reported_and_not_obeyed() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: root: only root can give a file to another user");
        return;
    }
    let bench = Bench::new();
    let provider = Counting::new();
    let journal = bench.dead([record("theirs")]);
    std::os::unix::fs::chown(&journal, Some(65534), None).unwrap();
    let report = bench.reap(&provider).await;
    assert_eq!((report.boxes.len(), provider.names().len()), (0, 0), "{report}");
    let error = report.damaged[0].error.as_deref().unwrap();
    assert!(error.contains("user 65534"), "{error}");
    std::os::unix::fs::chown(&journal, Some(0), None).unwrap();
    assert_eq!(bench.reap(&provider).await.deleted(), 1);
}

#[tokio::test]
async fn files_that_are_no_journal_yet_go_and_files_that_are_none_stay() {
    let bench = Bench::new();
    std::fs::create_dir(bench.leases()).unwrap();
    std::fs::write(bench.leases().join(".new-dead"), "half").unwrap();
    std::fs::write(bench.leases().join("notes.txt"), "mine").unwrap();
    let held = std::fs::File::create(bench.leases().join(".new-held")).unwrap();
    fs2::FileExt::try_lock_exclusive(&held).unwrap();
    let report = bench.reap(&Counting::new()).await;
    assert_eq!((report.living_owners, report.damaged.len()), (0, 0));
    assert_eq!(
        bench.files().into_keys().collect::<Vec<_>>(),
        [".new-held", "notes.txt"]
    );
}

#[cfg(unix)]
#[test]
fn journals_are_for_their_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new();
    let journal = bench.journal();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(journal.path()), mode(&bench.leases())), (0o600, 0o700));
}

#[test]
fn a_flush_serves_all_that_were_written_before_it() {
    let bench = Bench::new();
    let journal = bench.journal();
    let first = journal.begin(record("a")).unwrap().unwrap().1;
    let second = journal.begin(record("b")).unwrap().unwrap().1;
    assert!(first < second);
    assert!(journal.flushed() < first);
    journal.flush(first).unwrap();
    assert!(journal.flushed() >= second);
}
