//! The hook at process exit, and the exit without hooks.

use std::sync::Once;

/// Ends the process at once: no hooks, no destructors.
#[allow(
    unsafe_code,
    reason = "`std::process::exit` runs the hooks, waits for a thread that is exiting already, and so cannot end a \
              process that hangs in one of them. `_exit` is async-signal-safe, may be called from any thread and touches \
              no memory of ours"
)]
pub(crate) fn now(code: i32) -> ! {
    // SAFETY: it takes an integer and does not return.
    unsafe { libc::_exit(code) }
}

/// Arms the hook, once.
#[allow(
    unsafe_code,
    reason = "there is no safe way to run code after `main` returned or `exit` was called, and without it the last \
              dropped sandboxes of a program would outlive it. `atexit` may be called from any thread; the handler is a \
              plain `extern \"C\"` function that neither unwinds nor calls `exit`, as the C standard asks"
)]
pub(crate) fn arm() {
    extern "C" fn handler() {
        // Unwinding out of an `extern "C"` function would abort the process.
        let _ = std::panic::catch_unwind(crate::background::at_exit);
        let _ = std::panic::catch_unwind(crate::lease::at_exit);
        let _ = std::panic::catch_unwind(crate::shutdown::at_exit);
    }

    static ARMED: Once = Once::new();
    ARMED.call_once(|| {
        // SAFETY: `handler` has the type that `atexit` asks for and lives as long as the program.
        if unsafe { libc::atexit(handler) } != 0 {
            tracing::warn!("no hook at process exit: sandboxes dropped at the very end are left to their leases");
        }
    });
}
