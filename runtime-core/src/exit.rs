//! The hook at process exit.

use std::sync::Once;

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
    }

    static ARMED: Once = Once::new();
    ARMED.call_once(|| {
        // SAFETY: `handler` has the type that `atexit` asks for and lives as long as the program.
        if unsafe { libc::atexit(handler) } != 0 {
            tracing::warn!("no hook at process exit: sandboxes dropped at the very end are left to their leases");
        }
    });
}
