//! One bucket file: the next free slot of a limiter, shared by every process that opens it.
//!
//! The file holds seconds since the epoch in ASCII decimal digits, as short as they read back to the same number. Other
//! programs share it, so nothing else may be written to it. What we know besides is the file's modification time, which
//! is the clock at which the last reservation was made: when that lies in the future, the clock was set back since, and
//! the queue is moved back with it instead of stalling everybody until the old time comes around again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::Clock;

/// More digits than this are no number of seconds.
const MAX_CONTENT: u64 = 64;
/// Clocks that are this close are the same: file systems round their time stamps.
const CLOCK_TOLERANCE: f64 = 1.0;
/// The wall clock and the monotonic clock are read one after the other; a smaller difference is noise.
const CLOCK_NOISE: f64 = 0.001;
/// Buckets that nobody has used for this long are removed.
pub(super) const SWEEP_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);
/// A sweep looks at this many directory entries at most.
const SWEEP_ENTRIES: usize = 10_000;

/// How a bucket fills and drains.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// Seconds between two slots.
    pub(super) interval: f64,
    /// A file that claims a longer queue than this many seconds is wrong.
    pub(super) max_backlog: f64,
    /// How long to wait for the file's lock.
    pub(super) lock_timeout: Duration,
}

/// Both clocks at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reading {
    pub(super) wall: f64,
    pub(super) monotonic: Instant,
}

impl Reading {
    pub(super) fn of(clock: &dyn Clock) -> Self {
        Self {
            wall: unix_seconds(clock.now()),
            monotonic: clock.monotonic(),
        }
    }

    /// The next slot from what the file says and from what this process has reserved itself. The latter is on the
    /// monotonic clock, and so survives a lost file and a clock that jumps forward.
    pub(super) fn next_slot(&self, stored: Option<f64>, own_next: Option<Instant>) -> f64 {
        let slot = self.wall.max(stored.unwrap_or(self.wall));
        let ahead = own_next.map_or(0.0, |next| next.saturating_duration_since(self.monotonic).as_secs_f64());
        let own = self.wall + ahead;
        if own > slot + CLOCK_NOISE { own } else { slot }
    }
}

pub(super) fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Takes the next slot of the bucket at `path`. Blocks on the disk and, for at most the lock timeout, on other processes.
pub(super) fn reserve(
    path: &Path,
    clock: &dyn Clock,
    own_next: Option<Instant>,
    rules: &Rules,
) -> io::Result<(f64, Reading)> {
    let mut file = open_locked(path, rules.lock_timeout)?;
    let now = Reading::of(clock);
    let stored = read(&mut file, path, &now, rules)?;
    let slot = now.next_slot(stored, own_next);
    write(&mut file, slot + rules.interval)?;
    // Only the owner may set it; for others the kernel has just done so, by the same clock in all but tests.
    let _ = file.set_modified(UNIX_EPOCH + Duration::from_secs_f64(now.wall));
    Ok((slot, now))
}

/// Opens the file, creating it where missing, and locks it. The lock ends with the file handle.
fn open_locked(path: &Path, timeout: Duration) -> io::Result<File> {
    let deadline = std::time::Instant::now() + timeout;
    loop {
        let file = open(path)?;
        lock(&file, deadline)?;
        if !is_unlinked(&file)? {
            return Ok(file);
        }
        // Swept away between open and lock: the queue goes on in a new file.
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // Neither follow a link out of the directory nor hang on a FIFO.
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        options.mode(0o600).custom_flags(flags.bits().cast_signed());
    }
    let file = options.open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::IsADirectory, "not a regular file"))
    }
}

/// Waits for the exclusive lock. Polled, because flock(2) has no deadline and a thread that waits in it can neither be
/// cancelled nor left behind; holders keep it for the time of one small write.
fn lock(file: &File, deadline: std::time::Instant) -> io::Result<()> {
    let mut pause = Duration::from_micros(500);
    loop {
        match fs2::FileExt::try_lock_exclusive(file) {
            Ok(()) => return Ok(()),
            Err(error) if error.raw_os_error() == fs2::lock_contended_error().raw_os_error() => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        if std::time::Instant::now() >= deadline {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "another process holds the lock and does not let go",
            ));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

#[cfg(unix)]
fn is_unlinked(file: &File) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    Ok(file.metadata()?.nlink() == 0)
}

#[cfg(not(unix))]
fn is_unlinked(_: &File) -> io::Result<bool> {
    // An open file cannot be removed there.
    Ok(false)
}

/// The stored slot; `None` for a bucket that was never used or that is not to be believed.
fn read(file: &mut File, path: &Path, now: &Reading, rules: &Rules) -> io::Result<Option<f64>> {
    let mut content = Vec::new();
    file.take(MAX_CONTENT + 1).read_to_end(&mut content)?;
    if content.is_empty() {
        return Ok(None);
    }
    let Some(mut stored) = parse(&content) else {
        tracing::warn!(file = %path.display(), "limiter: the bucket file is corrupt; its queue starts anew");
        return Ok(None);
    };
    let written = file.metadata()?.modified().map(unix_seconds).unwrap_or(now.wall);
    let set_back = written - now.wall;
    if set_back > CLOCK_TOLERANCE && stored > now.wall {
        tracing::warn!(
            file = %path.display(),
            seconds = set_back,
            "limiter: the clock was set back; the queue moves with it"
        );
        stored -= set_back;
    }
    if stored - now.wall > rules.max_backlog {
        tracing::warn!(
            file = %path.display(),
            seconds = stored - now.wall,
            "limiter: the bucket file claims an impossible queue; it starts anew"
        );
        return Ok(None);
    }
    Ok(Some(stored))
}

/// A finite decimal number, white space around it allowed.
fn parse(content: &[u8]) -> Option<f64> {
    if content.len() as u64 > MAX_CONTENT {
        return None;
    }
    let text = str::from_utf8(content).ok()?.trim();
    // `f64` also reads words such as "inf" and "nan".
    let numeric = text
        .bytes()
        .all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'E' | b'+' | b'-'));
    let number: f64 = if numeric { text.parse().ok()? } else { return None };
    number.is_finite().then_some(number)
}

fn write(file: &mut File, next: f64) -> io::Result<()> {
    // `Debug` is the shortest form that reads back to the same number, with a ".0" where it has no fraction.
    let content = format!("{next:?}");
    // The new content is in place before the old tail goes, so that a crash in between never leaves an empty file.
    file.rewind()?;
    file.write_all(content.as_bytes())?;
    file.set_len(content.len() as u64)?;
    file.sync_data()
}

/// Removes bucket files beside `own` that nobody has used for [`SWEEP_AFTER`], whose queue is over and that nobody has
/// locked. Best effort; returns how many went.
pub(super) fn sweep(own: &Path, clock: &dyn Clock) -> usize {
    let Some(Ok(entries)) = own.parent().map(fs::read_dir) else {
        return 0;
    };
    let now = unix_seconds(clock.now());
    let is_old = |metadata: &fs::Metadata| {
        let modified = metadata.modified().map(unix_seconds);
        metadata.is_file() && modified.is_ok_and(|modified| now - modified > SWEEP_AFTER.as_secs_f64())
    };
    let mut removed = 0;
    for entry in entries.take(SWEEP_ENTRIES).flatten() {
        let path = entry.path();
        let is_bucket = path.extension().is_some_and(|extension| extension == "bucket");
        if path == own || !is_bucket || !entry.metadata().is_ok_and(|metadata| is_old(&metadata)) {
            continue;
        }
        let Ok(mut file) = open(&path) else { continue };
        let is_free = fs2::FileExt::try_lock_exclusive(&file).is_ok();
        let mut content = Vec::new();
        let is_read = (&mut file).take(MAX_CONTENT + 1).read_to_end(&mut content).is_ok();
        let is_over = parse(&content).is_none_or(|next| next <= now);
        // Looked at again under the lock: somebody may have used it in between.
        let still_old = file.metadata().is_ok_and(|metadata| is_old(&metadata));
        if is_free && is_read && is_over && still_old && fs::remove_file(&path).is_ok() {
            removed += 1;
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_other_programs_write_them() {
        for (content, seconds) in [
            ("1764513636.25", 1_764_513_636.25),
            ("1764513636.0", 1_764_513_636.0),
            ("1764513636", 1_764_513_636.0),
            (" 1764513636.5\n", 1_764_513_636.5),
            ("1.5e9", 1.5e9),
            ("0", 0.0),
            ("-3.5", -3.5),
        ] {
            assert_eq!(parse(content.as_bytes()), Some(seconds), "{content}");
        }
    }

    #[test]
    fn what_is_no_finite_number_is_not_read() {
        for content in [
            "nan", "inf", "-inf", "infinity", "1e999", "abc", "1 2", "1_000", "0x10", "1,5", ".", "-", "\0", " ",
        ] {
            assert_eq!(parse(content.as_bytes()), None, "{content:?}");
        }
        assert_eq!(parse(&[0xff, b'1']), None);
        assert_eq!(parse(&[b'0'; 64]), Some(0.0));
        assert_eq!(parse(&[b'0'; 65]), None);
    }

    #[test]
    fn numbers_are_written_as_short_as_they_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b");
        for (seconds, content) in [
            (1_764_513_636.0, "1764513636.0"),
            (1_764_513_636.1, "1764513636.1"),
            (1_764_513_636.123_456_7, "1764513636.1234567"),
            (0.5, "0.5"),
        ] {
            let mut file = open(&path).unwrap();
            write(&mut file, seconds).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
            assert_eq!(parse(content.as_bytes()), Some(seconds));
        }
    }
}
