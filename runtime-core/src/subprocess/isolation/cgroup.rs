//! Limits of a whole box by a cgroup of version 2, where the owner may make one.
//!
//! The group is made beside the owner's own, or in whatever group above it was delegated: one that the owner may change
//! and whose controllers reach what is below it. The kernel wants such a group to have no process of its own, so an owner
//! that sits in the delegated group itself finds none. The keeper is put into the box's group before it builds the box.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Access, access};

use crate::error::{Error, ErrorKind, Result};

/// What the names of boxes' groups begin with.
const PREFIX: &str = "sandbox-";
/// Microseconds for which `cpu.max` gives a share.
const PERIOD: u64 = 100_000;
/// How long the kernel may take to end what is left in a group.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a box gets no cgroup of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoCgroup {
    /// No hierarchy of version 2 is mounted in which this process is.
    NoHierarchy,
    /// The hierarchy of version 2 does not have these controllers; on most machines because those of version 1 do.
    NoControllers(Vec<&'static str>),
    /// No group above this process that has the controllers may be changed by it.
    NotDelegated,
    /// The group that was delegated has this process, or others, in it: the kernel then lets no controller reach below.
    Occupied(PathBuf),
}

impl fmt::Display for NoCgroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoHierarchy => f.write_str("no cgroup hierarchy of version 2 is mounted here"),
            Self::NoControllers(missing) => {
                let missing = missing.join(", ");
                write!(f, "the cgroup hierarchy of version 2 has no controller for {missing} here")
            }
            Self::NotDelegated => f.write_str(
                "no cgroup of version 2 is delegated to this process; `systemd-run --user --scope COMMAND` starts one in \
                 such a group",
            ),
            Self::Occupied(group) => write!(
                f,
                "the delegated cgroup {} has processes of its own; start this one in a group below it",
                group.display()
            ),
        }
    }
}

impl std::error::Error for NoCgroup {}

/// What a group is to limit.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Limits {
    /// Cores.
    pub(super) cpu: Option<f64>,
    /// Bytes.
    pub(super) memory: Option<u64>,
    /// Processes and threads.
    pub(super) pids: Option<u64>,
}

impl Limits {
    fn controllers(&self) -> Vec<&'static str> {
        [
            ("cpu", self.cpu.is_some()),
            ("memory", self.memory.is_some()),
            ("pids", self.pids.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, wanted)| wanted.then_some(name))
        .collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.controllers().is_empty()
    }
}

/// A group below which boxes may have groups with some controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    dir: PathBuf,
    /// Controllers that do not reach below it yet, and may.
    enable: Vec<&'static str>,
}

impl Place {
    /// Where the groups of this process's boxes go.
    pub(super) fn find(limits: &Limits) -> Result<Self, NoCgroup> {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let (mount, own) =
            hierarchy(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup")).ok_or(NoCgroup::NoHierarchy)?;
        Self::above(&mount, &own, limits)
    }

    /// The nearest fitting group, from that of this process upwards.
    fn above(mount: &Path, own: &Path, limits: &Limits) -> Result<Self, NoCgroup> {
        let wanted = limits.controllers();
        let known = words(&mount.join("cgroup.controllers"));
        let missing: Vec<&'static str> = wanted.iter().copied().filter(|name| !known.contains(*name)).collect();
        if !missing.is_empty() {
            return Err(NoCgroup::NoControllers(missing));
        }
        let mut occupied = None;
        for dir in own.ancestors().take_while(|dir| dir.starts_with(mount)) {
            let may = |path: &Path| access(path, Access::WRITE_OK).is_ok();
            if !may(dir) || !may(&dir.join("cgroup.procs")) {
                continue;
            }
            let below = words(&dir.join("cgroup.subtree_control"));
            let enable: Vec<&'static str> = wanted.iter().copied().filter(|name| !below.contains(*name)).collect();
            if enable.is_empty() {
                let dir = dir.to_path_buf();
                return Ok(Self { dir, enable });
            }
            let has = words(&dir.join("cgroup.controllers"));
            if !enable.iter().all(|name| has.contains(*name)) || !may(&dir.join("cgroup.subtree_control")) {
                continue;
            }
            // The root of all groups alone may have processes and controllers below it.
            let is_root = !dir.join("cgroup.type").exists();
            if is_root || words(&dir.join("cgroup.procs")).is_empty() {
                let dir = dir.to_path_buf();
                return Ok(Self { dir, enable });
            }
            occupied.get_or_insert_with(|| dir.to_path_buf());
        }
        Err(occupied.map_or(NoCgroup::NotDelegated, NoCgroup::Occupied))
    }

    /// Where the group of a box is, or is going to be.
    pub(super) fn group(&self, name: &str, claim: &str) -> PathBuf {
        let claim = claim.get(..8).unwrap_or(claim);
        self.dir.join(format!("{PREFIX}{name}-{claim}"))
    }

    /// Makes the group of a box.
    pub(super) fn create(&self, group: &Path, limits: &Limits) -> Result<()> {
        for name in &self.enable {
            write(&self.dir.join("cgroup.subtree_control"), &format!("+{name}"))?;
        }
        fs::create_dir(group).map_err(|error| Error::io(format_args!("creating {}", group.display()), error))?;
        let limited = limit(group, limits);
        if limited.is_err() {
            let _ = fs::remove_dir(group);
        }
        limited
    }
}

fn limit(group: &Path, limits: &Limits) -> Result<()> {
    if let Some(cores) = limits.cpu {
        let quota = (cores * PERIOD as f64).round() as u64;
        write(&group.join("cpu.max"), &format!("{} {PERIOD}", quota.max(1_000)))?;
    }
    if let Some(bytes) = limits.memory {
        write(&group.join("memory.max"), &bytes.to_string())?;
        // What is swapped out is not memory to the kernel. A machine without swap has no such file.
        let swap = group.join("memory.swap.max");
        if swap.exists() {
            write(&swap, "0")?;
        }
    }
    if let Some(count) = limits.pids {
        // The keeper, the guest, and the process by which the keeper starts a program.
        write(&group.join("pids.max"), &count.saturating_add(3).to_string())?;
    }
    Ok(())
}

/// Puts a process into a group.
pub(super) fn add(group: &Path, pid: u32) -> Result<()> {
    write(&group.join("cgroup.procs"), &pid.to_string())
}

/// The file that counts kills for lack of memory.
pub(super) fn events(group: &Path) -> PathBuf {
    group.join("memory.events")
}

/// Ends whatever is left in the group of a box, and removes it. One that is gone is fine. Blocks.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) for what cannot be such a group.
pub(crate) fn remove(group: &Path) -> Result<()> {
    let is_ours = group
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
    if !is_ours || !group.is_absolute() {
        return Err(Error::invalid_argument("cgroup", "it is no group of a sandbox"));
    }
    if !group.exists() {
        return Ok(());
    }
    if !group.join("cgroup.procs").exists() {
        return Err(Error::invalid_argument("cgroup", "it is no cgroup"));
    }
    // A kernel before 5.14 has no such file; nobody has left the box's process namespace, which has ended.
    let _ = fs::write(group.join("cgroup.kill"), "1");
    let until = Instant::now() + PATIENCE;
    loop {
        match fs::remove_dir(group) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            // The last of its processes are on their way out.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::ResourceBusy | io::ErrorKind::DirectoryNotEmpty
                ) && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => {
                let message = format!("removing {}", group.display());
                return Err(Error::new(ErrorKind::Io, message).with_source(error));
            }
        }
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|error| Error::io(format_args!("writing {}", path.display()), error))
}

fn words(path: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Where the hierarchy of version 2 is mounted, and the group of this process in it.
fn hierarchy(mounts: &str, groups: &str) -> Option<(PathBuf, PathBuf)> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        if kind.split(' ').next() != Some("cgroup2") {
            return None;
        }
        let mut fields = place.split(' ').skip(3);
        let (root, mount) = (fields.next()?, PathBuf::from(fields.next()?));
        // A mount may show a part of the hierarchy alone, in which this process need not be.
        let inside = Path::new(own).strip_prefix(root).ok()?;
        let is_below = !inside.components().any(|part| part == std::path::Component::ParentDir);
        is_below.then(|| (mount.clone(), mount.join(inside)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory tree with the files of groups that a kernel would have.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a directory"))
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        /// A group with these controllers, of which these reach below, and these processes.
        fn group(&self, path: &str, controllers: &str, below: &str, processes: &str) -> PathBuf {
            let dir = self.at(path);
            fs::create_dir_all(&dir).expect("a directory");
            for (name, text) in [
                ("cgroup.controllers", controllers),
                ("cgroup.subtree_control", below),
                ("cgroup.procs", processes),
            ] {
                fs::write(dir.join(name), text).expect("a file");
            }
            if !path.is_empty() {
                fs::write(dir.join("cgroup.type"), "domain\n").expect("a file");
            }
            dir
        }

        fn above(&self, own: &str, limits: &Limits) -> Result<Place, NoCgroup> {
            Place::above(self.0.path(), &self.at(own), limits)
        }
    }

    const ALL: Limits = Limits {
        cpu: Some(1.5),
        memory: Some(64_000_000),
        pids: Some(20),
    };

    fn text(path: PathBuf) -> String {
        fs::read_to_string(path).expect("a file")
    }

    #[test]
    fn the_group_of_this_process_is_found_in_the_mount_that_shows_it() {
        let mounts = "24 1 0:5 / /proc rw - proc proc rw\n\
                      30 24 0:26 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        let found = |groups| hierarchy(mounts, groups);
        let place = |own: &str| Some((PathBuf::from("/sys/fs/cgroup/unified"), PathBuf::from(own)));
        assert_eq!(found("5:pids:/x\n0::/\n"), place("/sys/fs/cgroup/unified"));
        assert_eq!(
            found("0::/user.slice/a.scope\n"),
            place("/sys/fs/cgroup/unified/user.slice/a.scope")
        );
        assert_eq!(found("0::/../other\n"), None, "outside of the namespace's part");
        assert_eq!(found("5:pids:/x\n"), None);
        let part = "30 24 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        assert_eq!(
            hierarchy(part, "0::/docker/abc/d\n"),
            Some(("/sys/fs/cgroup".into(), "/sys/fs/cgroup/d".into()))
        );
        assert_eq!(hierarchy(part, "0::/docker/xyz\n"), None);
    }

    #[test]
    fn the_nearest_group_whose_controllers_reach_below_is_taken() {
        let tree = Tree::new();
        let all = "cpuset cpu io memory pids\n";
        tree.group("", all, all, "1\n");
        tree.group("app", all, "cpu memory pids\n", "");
        tree.group("app/own", "cpu memory pids\n", "", "77\n");
        let place = tree.above("app/own", &ALL).expect("a place");
        assert_eq!((&place.dir, place.enable.len()), (&tree.at("app"), 0));
        // One without processes may pass its controllers on.
        tree.group("app", all, "memory\n", "");
        let place = tree.above("app/own", &ALL).expect("a place");
        assert_eq!(
            (place.dir.clone(), place.enable.clone()),
            (tree.at("app"), vec!["cpu", "pids"])
        );
        // One that has some may not; the root of all may.
        tree.group("app", all, "memory\n", "9\n");
        assert_eq!(tree.above("app/own", &ALL).expect("the root").dir, tree.at(""));
        tree.group("", all, "", "1\n");
        let place = tree.above("app/own", &ALL).expect("the root");
        assert_eq!((place.dir.clone(), place.enable.len()), (tree.at(""), 3));
    }

    #[test]
    fn what_is_missing_is_said() {
        let tree = Tree::new();
        tree.group("", "pids\n", "pids\n", "");
        tree.group("own", "pids\n", "", "7\n");
        let missing = tree.above("own", &ALL).expect_err("no controllers");
        assert_eq!(missing, NoCgroup::NoControllers(vec!["cpu", "memory"]));
        assert!(
            missing.to_string().ends_with("no controller for cpu, memory here"),
            "{missing}"
        );
        let pids = Limits {
            pids: Some(1),
            ..Limits::default()
        };
        assert_eq!(tree.above("own", &pids).expect("that one is there").dir, tree.at(""));
        // A delegated group below one that is not, with this process in it.
        fs::remove_file(tree.at("cgroup.procs")).expect("removed");
        assert_eq!(tree.above("own", &pids), Err(NoCgroup::Occupied(tree.at("own"))));
        fs::remove_file(tree.at("own/cgroup.procs")).expect("removed");
        assert_eq!(tree.above("own", &pids), Err(NoCgroup::NotDelegated));
    }

    #[test]
    fn a_group_gets_its_limits_and_its_process_and_goes_with_what_is_in_it() {
        let tree = Tree::new();
        tree.group("app", "cpu memory pids\n", "memory\n", "");
        tree.group("app/own", "", "", "77\n");
        fs::write(tree.at("cgroup.controllers"), "cpu memory pids\n").expect("a file");
        let place = tree.above("app/own", &ALL).expect("a place");
        let group = place.group("box", "0123456789abcdef");
        assert_eq!(group, tree.at("app/sandbox-box-01234567"));
        place.create(&group, &ALL).expect("made");
        // A kernel adds to what is there; the last word that was said is what a file keeps.
        assert_eq!(text(tree.at("app/cgroup.subtree_control")), "+pids");
        assert_eq!(text(group.join("cpu.max")), "150000 100000");
        assert_eq!(text(group.join("memory.max")), "64000000");
        assert_eq!(text(group.join("pids.max")), "23");
        assert!(place.create(&group, &ALL).is_err(), "somebody else's");
        add(&group, 4242).expect("added");
        assert_eq!(text(group.join("cgroup.procs")), "4242");

        let kill = group.join("cgroup.kill");
        let removal = std::thread::spawn({
            let group = group.clone();
            move || remove(&group)
        });
        // What the kernel does at that word: no process, and no file that keeps the directory.
        while !fs::read_to_string(&kill).is_ok_and(|said| said == "1") {
            std::thread::yield_now();
        }
        for entry in fs::read_dir(&group).expect("still there").flatten() {
            fs::remove_file(entry.path()).expect("removed");
        }
        removal.join().expect("no panic").expect("removed");
        assert!(!group.exists());
        remove(&group).expect("one that is gone is fine");
    }

    #[test]
    fn nothing_but_a_group_of_a_box_is_removed() {
        let tree = Tree::new();
        for name in ["other", "sandbox-without-files"] {
            fs::create_dir(tree.at(name)).expect("a directory");
            let error = remove(&tree.at(name)).expect_err(name);
            assert_eq!(error.field(), Some("cgroup"));
            assert!(tree.at(name).exists());
        }
        assert!(remove(Path::new("sandbox-relative")).is_err());
    }

    /// What a reaper does for a dead owner, with a group of this machine's, whose kernel it takes.
    #[tokio::test]
    async fn the_kernel_ends_what_is_in_the_group_of_a_dead_owners_box() {
        use crate::registry::{Orphan, Provider};
        use crate::subprocess::config::CGROUP;
        use crate::subprocess::runtime::{CLAIM, DIR};
        const NAME: &str = "the_kernel_ends_what_is_in_the_group_of_a_dead_owners_box";
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let found = hierarchy(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
        let group = found.map(|(_, own)| own.join(format!("{PREFIX}test-{}", std::process::id())));
        let Some(group) = group.filter(|group| fs::create_dir(group).is_ok()) else {
            println!("SKIPPED: {NAME}, all of it: no group can be made here");
            return;
        };
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let added = add(&group, child.id());
        let cache = tempfile::tempdir().expect("a directory");
        let dir = cache.path().join(crate::subprocess::runtime::PARENT).join("box");
        let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
        let orphan = Orphan {
            name: "box".to_owned(),
            id: None,
            run_scope: "run".to_owned(),
            context: [(DIR, text(&dir)), (CLAIM, "claim".to_owned()), (CGROUP, text(&group))]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
        };
        let deleted = crate::subprocess::SubprocessProvider.delete_orphan(&orphan).await;
        let _ = child.kill();
        let ended = child.wait().expect("its end");
        // An ordinary user may make groups where no process may be moved to.
        if added.is_ok() {
            deleted.expect("deleted");
            assert!(!group.exists() && !ended.success());
        } else {
            let _ = fs::remove_dir(&group);
            println!("SKIPPED: {NAME}, all of it: no process can be moved here");
        }
    }
}
