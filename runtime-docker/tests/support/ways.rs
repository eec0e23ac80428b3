//! Which ways to a box are looked at.

/// Whether this way is asked for: `SANDBOX_TEST_WAYS` narrows it to some of `socket`, `stdio`, `engine`.
pub(crate) fn is_way_asked_for(way: &str) -> bool {
    let asked = crate::support::is_asked_for("SANDBOX_TEST_WAYS", way);
    if !asked {
        eprintln!("SKIPPED: not asked for: SANDBOX_TEST_WAYS has no {way}");
    }
    asked
}
