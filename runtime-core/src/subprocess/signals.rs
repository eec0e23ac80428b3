//! Programs start with the default action for every signal, whatever the owner ignores.
//!
//! What a process ignores, a program that it executes ignores too: under `nohup`, or as a background job of a shell
//! without job control, no program of a box could be ended by SIGHUP or SIGINT. The standard library empties the mask of
//! blocked signals and sees to SIGPIPE, but to no other.

/// The signals that this process ignores, which a program would ignore too. SIGPIPE is left to the standard library.
#[allow(
    unsafe_code,
    reason = "the standard library and rustix have no question for the action of a signal. The call with a null action \
              only asks; it may be made from any thread, for any number, and fills in the one structure that it is given"
)]
fn ignored() -> Vec<libc::c_int> {
    /// Every signal there is, those of real time included; a number that is none is refused by the system.
    const LAST: libc::c_int = 64;
    let is_ignored = |signal: &libc::c_int| {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: a null pointer for the new action is allowed, and the other points to room for the old one. All zeros
        // is a valid `sigaction`, so that it may be read whether it was filled in or not.
        let action = unsafe {
            libc::sigaction(*signal, std::ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        action.sa_sigaction == libc::SIG_IGN
    };
    (1..=LAST)
        .filter(|signal| *signal != libc::SIGPIPE && is_ignored(signal))
        .collect()
}

/// Has the program start with the default action for every signal.
///
/// Only an owner that ignores any pays for it: between fork and exec something has to be done then, so that the system's
/// faster way to start a program is not open.
#[allow(
    unsafe_code,
    reason = "there is no safe way to act between fork and exec. The closure owns a list made before the fork and calls \
              nothing but `signal`, which is async-signal-safe, and neither allocates, locks nor unwinds"
)]
pub(super) fn set_to_default(command: &mut tokio::process::Command) {
    let ignored = ignored();
    if ignored.is_empty() {
        return;
    }
    // SAFETY: see above. What it changes are the actions of the child alone.
    unsafe {
        command.pre_exec(move || {
            for signal in &ignored {
                libc::signal(*signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
}
