//! Programs start with the default action for every signal, whatever the owner ignores.
//!
//! What a process ignores, a program that it executes ignores too: under `nohup`, or as a background job of a shell
//! without job control, no program of a box could be ended by SIGHUP or SIGINT. The standard library empties the mask of
//! blocked signals and sees to SIGPIPE, but to no other.

use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

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

/// A program as the kernel takes it, made before a fork: afterwards nothing may be allocated.
struct Image {
    program: CString,
    /// The pointers below point into these.
    _strings: Vec<CString>,
    /// Addresses, because pointers may not be sent to another thread.
    argv: Vec<usize>,
    env: Vec<usize>,
}

impl Image {
    /// `None` for what holds a NUL byte, which the standard library refuses before it forks.
    fn new(program: &Path, argv: &[OsString], env: &[(OsString, OsString)]) -> Option<Self> {
        let argv = argv.iter().map(|argument| argument.as_bytes().to_vec());
        let env = env
            .iter()
            .map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat());
        let split = argv.len();
        let strings: Vec<CString> = argv
            .chain(env)
            .map(|bytes| CString::new(bytes).ok())
            .collect::<Option<_>>()?;
        // What a `CString` points to stays where it is.
        let addresses = |strings: &[CString]| -> Vec<usize> {
            let addresses = strings.iter().map(|string| string.as_ptr() as usize);
            addresses.chain([0]).collect()
        };
        let (argv, env) = strings.split_at_checked(split)?;
        let (argv, env) = (addresses(argv), addresses(env));
        Some(Self {
            program: CString::new(program.as_os_str().as_bytes()).ok()?,
            _strings: strings,
            argv,
            env,
        })
    }
}

/// Has the program start with the default action for every signal.
///
/// Only an owner that ignores any pays for it: between fork and exec something has to be done then, so that the system's
/// faster way to start a program is not open. The program is executed here, too: what the standard library calls on that
/// slower way gives a file that is of no executable format to a shell.
#[allow(
    unsafe_code,
    reason = "there is no safe way to act between fork and exec. The closure owns lists made before the fork and calls \
              nothing but `signal` and `execve`, which are async-signal-safe, and neither allocates, locks nor unwinds"
)]
pub(super) fn set_to_default(
    command: &mut tokio::process::Command,
    program: &Path,
    argv: &[OsString],
    env: &[(OsString, OsString)],
) {
    let ignored = ignored();
    if ignored.is_empty() {
        return;
    }
    let Some(image) = Image::new(program, argv, env) else {
        return;
    };
    // SAFETY: see above. What it changes are the actions of the child alone. `execve` gets NUL-terminated strings, and
    // lists of such that end with a null pointer, all owned by `image`, which the closure owns.
    unsafe {
        command.pre_exec(move || {
            for signal in &ignored {
                libc::signal(*signal, libc::SIG_DFL);
            }
            let Image { program, argv, env, .. } = &image;
            libc::execve(program.as_ptr(), argv.as_ptr().cast(), env.as_ptr().cast());
            Err(io::Error::last_os_error())
        });
    }
}
