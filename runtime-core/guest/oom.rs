//! Tells a kill for lack of memory from any other SIGKILL, by the `oom_kill` counter of the box's cgroup.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// How long a kill that was counted waits for the death that belongs to it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Which counted kills have found their victim.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    seen: u64,
    unclaimed: VecDeque<Instant>,
}

impl Ledger {
    /// Starts at the counter's value: what was killed before is nobody's here.
    fn starting_at(counter: u64) -> Self {
        Self {
            seen: counter,
            unclaimed: VecDeque::new(),
        }
    }

    /// Takes note of the counter.
    fn observe(&mut self, counter: u64, now: Instant) {
        let new = counter.saturating_sub(self.seen).min(64);
        self.seen = counter;
        self.unclaimed.extend((0..new).map(|_| now));
        while self.unclaimed.len() > 64
            || self
                .unclaimed
                .front()
                .is_some_and(|at| now.saturating_duration_since(*at) > PATIENCE)
        {
            self.unclaimed.pop_front();
        }
    }

    /// Claims one kill for a death that looks like one.
    fn claim(&mut self) -> bool {
        self.unclaimed.pop_front().is_some()
    }
}

/// The counter's file and the ledger.
#[derive(Debug, Default)]
pub(crate) struct OomWatch {
    file: Option<File>,
    ledger: Ledger,
}

impl OomWatch {
    /// Finds the counter of the cgroup that this process is in: version 2 or 1, in a namespace of its own or not.
    pub(crate) fn find() -> Self {
        let mut groups = String::new();
        if let Ok(file) = File::open("/proc/self/cgroup") {
            // Bounded, and best effort: without it the roots below are tried.
            let _ = file.take(64 << 10).read_to_string(&mut groups);
        }
        let file = candidates(&groups).into_iter().find_map(|path| {
            let file = File::open(path).ok()?;
            counter(&file).is_some().then_some(file)
        });
        Self::new(file)
    }

    /// The counter in this file.
    pub(crate) fn of(file: File) -> Self {
        Self::new(Some(file))
    }

    fn new(file: Option<File>) -> Self {
        let ledger = Ledger::starting_at(file.as_ref().and_then(counter).unwrap_or(0));
        Self { file, ledger }
    }

    /// Whether a death that looks like an out-of-memory kill (SIGKILL that we did not send, or a shell's 137) is one.
    /// Call it for every death, so that the counter's changes get their time.
    pub(crate) fn is_oom(&mut self, suspicious: bool) -> bool {
        let Some(counter) = self.file.as_ref().and_then(counter) else {
            return false;
        };
        self.ledger.observe(counter, Instant::now());
        suspicious && self.ledger.claim()
    }
}

/// Files that may hold the counter, the most specific first.
fn candidates(groups: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if controllers.split(',').any(|name| name == "memory") {
            paths.push(format!("/sys/fs/cgroup/memory{path}/memory.oom_control"));
            paths.push("/sys/fs/cgroup/memory/memory.oom_control".to_owned());
        } else if controllers.is_empty() {
            paths.push(format!("/sys/fs/cgroup{path}/memory.events"));
            paths.push(format!("/sys/fs/cgroup/unified{path}/memory.events"));
        }
    }
    paths.push("/sys/fs/cgroup/memory.events".to_owned());
    paths
}

/// Both versions write a line `oom_kill N`.
fn counter(file: &File) -> Option<u64> {
    let mut buffer = [0; 1024];
    let count = file.read_at(&mut buffer, 0).ok()?;
    parse(std::str::from_utf8(buffer.get(..count)?).ok()?)
}

fn parse(text: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))
        .and_then(|number| number.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_cgroup_versions_are_understood() {
        assert_eq!(
            parse("low 0\nhigh 0\nmax 5\noom 2\noom_kill 3\noom_group_kill 0\n"),
            Some(3)
        );
        assert_eq!(parse("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"), Some(7));
        assert_eq!(parse("oom_kill_disable 0\nunder_oom 0\n"), None);
    }

    #[test]
    fn the_counter_is_looked_for_where_the_process_is() {
        let paths = candidates("9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/docker/abc\n");
        assert_eq!(paths[0], "/sys/fs/cgroup/memory/docker/abc/memory.oom_control");
        assert!(paths.contains(&"/sys/fs/cgroup/docker/abc/memory.events".to_owned()));
        assert_eq!(candidates("garbage"), ["/sys/fs/cgroup/memory.events"]);
    }

    #[test]
    fn a_kill_is_claimed_once_and_forgotten_after_a_while() {
        let start = Instant::now();
        let mut ledger = Ledger::starting_at(4);
        ledger.observe(4, start);
        assert!(!ledger.claim(), "kills from before are not ours");
        ledger.observe(5, start);
        ledger.observe(5, start + Duration::from_secs(1));
        assert!(ledger.claim(), "counted before the death was seen");
        assert!(!ledger.claim());
        ledger.observe(6, start);
        ledger.observe(6, start + PATIENCE * 2);
        assert!(!ledger.claim(), "too old");
        ledger.observe(u64::MAX, start);
        assert!(ledger.unclaimed.len() <= 64, "bounded whatever the counter says");
    }
}
