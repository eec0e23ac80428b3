//! A socket in front of the engine's own, which can be made to misbehave.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use tempfile::TempDir;

/// What the front does to a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Takes connections and answers nothing.
    Stall,
    /// Creates are carried out; their answers are lost.
    LoseCreate,
    /// Creates ask for a name that is taken.
    TakenName,
}

pub(crate) struct Front {
    fault: Arc<AtomicU8>,
    socket: PathBuf,
    _dir: TempDir,
}

impl Front {
    /// `taken`: the name of a container that exists, as long as ours are.
    pub(crate) fn new(engine: &Path, taken: &str) -> Self {
        let dir = TempDir::with_prefix("sandbox-front-").expect("a directory");
        let socket = dir.path().join("engine.sock");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let fault = Arc::new(AtomicU8::new(Fault::None as u8));
        let (seen, engine, taken) = (fault.clone(), engine.to_owned(), taken.to_owned());
        thread::spawn(move || {
            let held = Mutex::new(Vec::new());
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                let fault = seen.load(Ordering::SeqCst);
                if fault == Fault::Stall as u8 {
                    held.lock().expect("a lock").push(client);
                    continue;
                }
                let (engine, taken) = (engine.clone(), taken.clone());
                thread::spawn(move || carry(client, &engine, fault, &taken));
            }
        });
        Self {
            fault,
            socket,
            _dir: dir,
        }
    }

    pub(crate) fn host(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    pub(crate) fn set(&self, fault: Fault) {
        self.fault.store(fault as u8, Ordering::SeqCst);
    }
}

fn carry(mut client: UnixStream, engine: &Path, fault: u8, taken: &str) {
    let Ok(mut inside) = UnixStream::connect(engine) else {
        return;
    };
    let mut head = vec![0; 64 << 10];
    let Ok(count) = client.read(&mut head) else { return };
    head.truncate(count);
    let is_create = head.starts_with(b"POST") && head.windows(18).any(|part| part == b"/containers/create");
    if is_create && fault == Fault::TakenName as u8 {
        let at = head.windows(5).position(|part| part == b"name=").expect("a name") + 5;
        head[at..at + taken.len()].copy_from_slice(taken.as_bytes());
    }
    if inside.write_all(&head).is_err() {
        return;
    }
    let (mut from, mut to) = (
        client.try_clone().expect("a duplicate"),
        inside.try_clone().expect("a duplicate"),
    );
    thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    if is_create && fault == Fault::LoseCreate as u8 {
        // The engine has answered, so the container is there.
        let _ = inside.read(&mut [0; 1]);
        let _ = client.shutdown(Shutdown::Both);
        return;
    }
    let _ = std::io::copy(&mut inside, &mut client);
    let _ = client.shutdown(Shutdown::Write);
}
