//! Programs of the emulator end by signals that its owner ignores, as a service started in the background of a script
//! does.

use tokio::signal::unix::{SignalKind, signal};

/// Handles what this process ignores by doing nothing, for good. To the process that is the same; but what is ignored is
/// ignored by the programs that it starts, too, and what is handled is not. On a runtime.
pub(super) fn handle_ignored() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    for kind in [
        SignalKind::hangup(),
        SignalKind::interrupt(),
        SignalKind::quit(),
        SignalKind::terminate(),
    ] {
        // One that cannot be handled stays ignored.
        if is_ignored(&status, kind) {
            drop(signal(kind));
        }
    }
}

fn is_ignored(status: &str, kind: SignalKind) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (kind.as_raw_value() - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        let status = "SigBlk:\t0000000000000007\nSigIgn:\t0000000000001003\nSigCgt:\t0000000000000004\n";
        assert!(is_ignored(status, SignalKind::hangup()));
        assert!(is_ignored(status, SignalKind::interrupt()));
        assert!(!is_ignored(status, SignalKind::quit()));
        assert!(!is_ignored(status, SignalKind::terminate()));
        assert!(!is_ignored("", SignalKind::interrupt()));
    }
}
