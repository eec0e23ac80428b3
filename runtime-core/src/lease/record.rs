//! What a lease says, and how it is written: one line per event, each with its checksum.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::registry::Orphan;
use crate::runtime::{BoxSpec, Runtime};

/// Hex digits of the checksum before each line.
const CHECKSUM_DIGITS: usize = 16;

/// The longest line that is written. What a provider wants to remember of a box is an address, not a document.
pub(crate) const MAX_LINE: usize = 64 << 10;

/// All that is needed to find and delete one box, and to say whose it was. Never a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The provider's tag.
    pub(crate) provider: String,
    /// Our name for the box.
    pub(crate) name: String,
    pub(crate) run_scope: String,
    pub(crate) owner: Owner,
    /// Seconds since the epoch. Only filters and reports read it: no decision hangs on the clock.
    pub(crate) created_at: u64,
    /// What the runtime says that its deletion takes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) context: BTreeMap<String, String>,
    /// The provider's id, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    /// When the provider deletes the box by itself, in seconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) expires_at: Option<u64>,
}

impl Record {
    pub(crate) fn new(spec: &BoxSpec, runtime: &dyn Runtime) -> Self {
        let created_at = unix_seconds(SystemTime::now());
        let lifetime = runtime.capabilities().max_lifetime_seconds;
        Self {
            provider: runtime.provider().to_owned(),
            name: spec.name.clone(),
            run_scope: spec.run_scope.id().to_owned(),
            owner: Owner::current(),
            created_at,
            context: runtime.lease_context(),
            id: runtime.id(),
            expires_at: lifetime.map(|seconds| created_at.saturating_add(seconds)),
        }
    }

    /// What the provider is told when it is to delete the box.
    pub(crate) fn orphan(&self) -> Orphan {
        Orphan {
            name: self.name.clone(),
            id: self.id.clone(),
            run_scope: self.run_scope.clone(),
            context: self.context.clone(),
        }
    }
}

/// The process that a lease belongs to. For people: whether it lives is told by its lock alone, since process ids are
/// reused. The machine also tells a reaper what it can reach when machines share a cache directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    pub(crate) pid: u32,
    pub(crate) machine: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) boot_id: Option<String>,
    /// When the process started, in clock ticks since the machine's boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) started: Option<u64>,
}

impl Owner {
    pub(crate) fn current() -> Self {
        static CURRENT: OnceLock<Owner> = OnceLock::new();
        let read = || Self {
            pid: std::process::id(),
            machine: machine().to_owned(),
            boot_id: std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .ok()
                .map(|id| id.trim().to_owned()),
            started: std::fs::read_to_string("/proc/self/stat")
                .ok()
                .as_deref()
                .and_then(parse_stat)
                .map(|(_, started)| started),
        };
        let current = CURRENT.get_or_init(read);
        if current.pid == std::process::id() {
            current.clone()
        } else {
            // A forked child.
            read()
        }
    }
}

impl Owner {
    /// Whether the process is seen to run. That decides nothing but whether waiting a moment for its lock is worth it.
    pub(crate) fn seems_alive(&self) -> bool {
        if self.machine != machine() {
            return true;
        }
        match (
            self.started,
            std::fs::read_to_string(format!("/proc/{}/stat", self.pid)),
        ) {
            (Some(started), Ok(stat)) => {
                parse_stat(&stat).is_some_and(|(state, now)| now == started && !matches!(state, 'Z' | 'X'))
            }
            (Some(_), Err(error)) => error.kind() != std::io::ErrorKind::NotFound,
            (None, _) => true,
        }
    }
}

/// This machine, as far as it has a name of its own.
pub(crate) fn machine() -> &'static str {
    static MACHINE: OnceLock<String> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        match std::fs::read_to_string("/etc/machine-id") {
            Ok(id) if !id.trim().is_empty() => format!("{host}/{}", id.trim()),
            _ => host,
        }
    })
}

/// Fields 3 and 22 of `/proc/PID/stat`, the state and the start; the program's name before them may contain spaces and
/// parentheses.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

pub(crate) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// One line of a journal. `key` tells the leases of one journal apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// A box is about to be created.
    Lease { key: u64, record: Box<Record> },
    /// The provider has given it an id.
    Id { key: u64, id: String },
    /// Its deletion is confirmed, or it never came to be.
    Gone { key: u64 },
}

impl Event {
    /// The line, its end included.
    pub(crate) fn line(&self) -> serde_json::Result<String> {
        let json = serde_json::to_string(self)?;
        Ok(format!("{} {json}\n", checksum(json.as_bytes())))
    }
}

fn checksum(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let mut text = crate::names::hex(&digest);
    text.truncate(CHECKSUM_DIGITS);
    text
}

/// What a journal says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    /// The leases of boxes that may exist, by key.
    pub(crate) leases: BTreeMap<u64, Record>,
    /// Lines that are complete and make no sense. Each may have been a lease.
    pub(crate) damaged: usize,
    /// Bytes after the last line: their writer died in the middle of the write, so before it asked for a box.
    pub(crate) torn: usize,
}

impl Contents {
    pub(crate) fn read(bytes: &[u8]) -> Self {
        let mut contents = Self::default();
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line = &rest[..end];
            rest = &rest[end + 1..];
            if line.is_empty() {
                continue;
            }
            match parse(line) {
                Some(Event::Lease { key, record }) => {
                    contents.leases.insert(key, *record);
                }
                Some(Event::Id { key, id }) => {
                    if let Some(record) = contents.leases.get_mut(&key) {
                        record.id = Some(id);
                    }
                }
                Some(Event::Gone { key }) => {
                    contents.leases.remove(&key);
                }
                None => contents.damaged += 1,
            }
        }
        contents.torn = rest.len();
        contents
    }
}

fn parse(line: &[u8]) -> Option<Event> {
    let (sum, json) = line.split_at_checked(CHECKSUM_DIGITS)?;
    let json = json.strip_prefix(b" ")?;
    if checksum(json).as_bytes() != sum {
        return None;
    }
    serde_json::from_slice(json).ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn record(name: &str) -> Record {
        Record {
            provider: "counting".into(),
            name: name.into(),
            run_scope: "run/1".into(),
            // Of no process.
            owner: Owner {
                pid: u32::MAX,
                ..Owner::current()
            },
            created_at: 1_700_000_000,
            context: BTreeMap::from([("endpoint".into(), "a\nb\u{1f980}".into())]),
            id: None,
            expires_at: Some(1_700_003_600),
        }
    }

    fn lines(events: &[Event]) -> Vec<u8> {
        events
            .iter()
            .map(|event| event.line().unwrap())
            .collect::<String>()
            .into_bytes()
    }

    fn lease(key: u64, name: &str) -> Event {
        Event::Lease {
            key,
            record: Box::new(record(name)),
        }
    }

    #[test]
    fn what_was_written_is_read_back() {
        let bytes = lines(&[
            lease(0, "a"),
            lease(1, "b"),
            Event::Id {
                key: 1,
                id: "i-1".into(),
            },
            Event::Gone { key: 0 },
            // Comes late: the box is gone.
            Event::Id {
                key: 0,
                id: "i-0".into(),
            },
        ]);
        let contents = Contents::read(&bytes);
        let expected = Record {
            id: Some("i-1".into()),
            ..record("b")
        };
        assert_eq!(contents.leases, BTreeMap::from([(1, expected)]));
        assert_eq!((contents.damaged, contents.torn), (0, 0));
    }

    #[test]
    fn a_journal_cut_off_at_any_byte_loses_only_the_line_that_was_being_written() {
        let events = [
            lease(0, "a"),
            Event::Id {
                key: 0,
                id: "i-0".into(),
            },
            lease(1, "b"),
            Event::Gone { key: 0 },
            lease(2, "c"),
        ];
        let bytes = lines(&events);
        let mut complete = 0;
        for end in 0..=bytes.len() {
            if end > 0 && bytes[end - 1] == b'\n' {
                complete += 1;
            }
            let contents = Contents::read(&bytes[..end]);
            let whole = Contents::read(&lines(&events[..complete]));
            assert_eq!(contents.leases, whole.leases, "cut at {end}");
            assert_eq!(contents.damaged, 0, "cut at {end}");
            assert_eq!(contents.torn, end - lines(&events[..complete]).len(), "cut at {end}");
        }
        assert_eq!(complete, events.len());
    }

    #[test]
    fn a_flipped_bit_anywhere_damages_one_line_and_no_other_lease() {
        let bytes = lines(&[lease(0, "a"), lease(1, "b"), lease(2, "c")]);
        let first = lines(&[lease(0, "a")]).len();
        for at in first..2 * first - 1 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            let contents = Contents::read(&bytes);
            assert!(contents.damaged > 0, "flipped at {at}");
            assert_eq!(
                contents.leases.keys().copied().collect::<Vec<_>>(),
                [0, 2],
                "flipped at {at}"
            );
        }
        // The end of a line: two become one, and that one is damaged.
        let mut bytes = bytes;
        bytes[2 * first - 1] ^= 1;
        let contents = Contents::read(&bytes);
        assert_eq!((contents.damaged, contents.leases.len()), (1, 1));
    }

    #[test]
    fn zeros_and_noise_are_no_leases_and_are_counted() {
        assert_eq!(Contents::read(&[0; 4096]).torn, 4096);
        let contents = Contents::read(b"\n\nx\n0123456789abcdef {}\n\xff\xfe\n");
        assert_eq!((contents.leases.len(), contents.damaged, contents.torn), (0, 3, 0));
    }

    #[test]
    fn a_start_time_is_read_past_any_program_name() {
        let stat = "1234 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(parse_stat(stat), Some(('S', 4711)));
        assert_eq!(parse_stat("no parenthesis"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_id_alone_is_no_owner() {
        let own = Owner::current();
        assert!(own.boot_id.is_some() && own.seems_alive());
        let reused = Owner {
            started: own.started.map(|started| started + 1),
            ..own.clone()
        };
        assert!(!reused.seems_alive());
        let gone = Owner { pid: u32::MAX, ..own };
        assert!(!gone.seems_alive());
    }
}
