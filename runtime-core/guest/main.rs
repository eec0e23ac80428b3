//! The guest: process 1 of a box, and the host's hands inside it.
//!
//! It starts programs, reaps them and every orphan, opens files, listens and dials, and passes what it opened to the
//! host as a descriptor, so that no byte of a program's input or output goes through it. It trusts the host, parses
//! nothing but the host's frames, and does nothing that the host could do.
//!
//! Usage: `guest --socket PATH`, `guest --stdio`, or `guest --isolate` with a socket as standard input, on which the
//! plan of the box comes that it is to make around itself; with the one-time token in `SANDBOX_GUEST_TOKEN`.

#[cfg(target_os = "linux")]
mod command;
#[cfg(target_os = "linux")]
#[path = "../src/guest/encoding.rs"]
#[allow(unreachable_pub, reason = "public in the library, which shares the file")]
mod encoding;
#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
#[path = "../src/guest/frame.rs"]
#[allow(unreachable_pub, reason = "public in the library, which shares the file")]
mod frame;
#[cfg(target_os = "linux")]
mod hand;
#[cfg(target_os = "linux")]
mod isolate;
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "system calls that std lacks; each use says why it is sound")]
mod namespaces;
#[cfg(target_os = "linux")]
mod netlink;
#[cfg(target_os = "linux")]
mod oom;
#[cfg(target_os = "linux")]
mod passwd;
#[cfg(target_os = "linux")]
#[path = "../src/guest/plan.rs"]
mod plan;
#[cfg(target_os = "linux")]
mod port;
#[cfg(target_os = "linux")]
mod seccomp;
#[cfg(target_os = "linux")]
mod server;
#[cfg(target_os = "linux")]
mod streams;
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "system calls that std lacks; each use says why it is sound")]
mod sys;

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("the guest runs on Linux only");
    std::process::exit(1);
}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    match start::run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            // The container's log is where a person looks when its process 1 has died.
            eprintln!("sandbox guest: {error}");
            std::process::ExitCode::from(70)
        }
    }
}

#[cfg(target_os = "linux")]
mod start {
    use std::collections::BTreeMap;
    use std::ffi::{CString, OsString};
    use std::fs::OpenOptions;
    use std::io;
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::ffi::OsStringExt;
    use std::os::unix::net::UnixStream;

    use crate::command::Spawner;
    use crate::frame::{Event, MAGIC, TOKEN_LEN, TOKEN_VARIABLE, VERSION};
    use crate::isolate;
    use crate::oom::OomWatch;
    use crate::port::Port;
    use crate::server::Server;
    use crate::sys;

    pub(crate) fn run() -> io::Result<()> {
        let mut arguments = std::env::args_os().skip(1);
        let mode = arguments.next().unwrap_or_default();
        let inside = match mode.to_str() {
            Some("--isolate") => {
                sys::close_inherited();
                Some(isolate::enter().map_err(|failure| io::Error::other(failure.line()))?)
            }
            _ => None,
        };
        // First of all, while nothing else runs in the box.
        sys::set_not_dumpable()?;
        if inside.is_none() {
            sys::close_inherited();
        }
        let (token, env) = take_environment()?;
        let signals = sys::take_signals(&[])?;
        let is_init = std::process::id() == 1;
        if !is_init {
            sys::set_subreaper()?;
        }
        let descriptor_limit = sys::raise_descriptor_limit();
        let null: OwnedFd = OpenOptions::new().read(true).write(true).open("/dev/null")?.into();

        let mut limits = Vec::new();
        let mut hand = None;
        let mut oom_events = None;
        let is_isolated = inside.is_some();
        let mut port = match (inside, mode.to_str(), arguments.next()) {
            (Some(inside), ..) => {
                // The second copy of the socket, which programs must not get.
                sys::replace_stdio(null.as_fd())?;
                limits = inside.limits;
                hand = inside.hand;
                oom_events = inside.oom_events;
                Port::socket(inside.socket.into())
            }
            (None, Some("--socket"), Some(path)) => {
                let socket = UnixStream::connect(&path)
                    .map_err(|error| io::Error::new(error.kind(), format!("connect to {}: {error}", path.display())))?;
                Port::socket(socket.into())
            }
            (None, Some("--stdio"), None) => {
                let (input, output) = sys::take_stdio()?;
                sys::replace_stdio(null.as_fd())?;
                Port::stdio(input, output)?
            }
            _ => return Err(io::Error::other("usage: guest --socket PATH | --stdio | --isolate")),
        };
        port.send(
            0,
            &Event::Hello {
                magic: MAGIC,
                version: VERSION,
                token,
                pid: std::process::id(),
            },
        );
        // A directory that the host unmounts or removes later must not be held.
        std::env::set_current_dir("/")?;
        let mut spawner = Spawner::new(env, null, descriptor_limit);
        if is_isolated {
            spawner.isolate(&limits, hand)?;
        }
        let oom = oom_events.map_or_else(OomWatch::find, OomWatch::of);
        Server::new(port, signals, spawner, is_init, oom).run()
    }

    type Environment = BTreeMap<Vec<u8>, Vec<u8>>;

    /// The token, and the environment without it. Its text is overwritten where the kernel shows it.
    fn take_environment() -> io::Result<([u8; TOKEN_LEN], Environment)> {
        let mut env: Environment = std::env::vars_os()
            .map(|(name, value): (OsString, OsString)| (name.into_vec(), value.into_vec()))
            .collect();
        let digits = env.remove(TOKEN_VARIABLE.as_bytes());
        sys::wipe_variable(&CString::new(TOKEN_VARIABLE)?);
        let token = digits.as_deref().and_then(decode_hex);
        token
            .map(|token| (token, env))
            .ok_or_else(|| io::Error::other(format!("{TOKEN_VARIABLE} is missing or malformed")))
    }

    fn decode_hex(digits: &[u8]) -> Option<[u8; TOKEN_LEN]> {
        let text = std::str::from_utf8(digits).ok()?;
        let mut token = [0; TOKEN_LEN];
        if text.len() != 2 * TOKEN_LEN || !text.is_ascii() {
            return None;
        }
        for (byte, at) in token.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
        }
        Some(token)
    }
}
