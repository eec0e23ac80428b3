//! Directory watches of envd's package `filesystem`.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Response;
use runtime_core::names::random_id;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::io::unix::AsyncFd;

use super::envd::{Codec, RpcFailure, User, end_frame, resolve};
use super::filesystem::entry;
use super::server::{Answer, Piece, channel};
use crate::wire::process::{Empty, KeepAlive};
use crate::wire::rpc::Code;
use crate::wire::watch::{
    EventType, FilesystemEvent, WatchDirRequest, WatchDirResponse, WatchEvent, Watcher, WatcherEvents,
};

/// Changes that are remembered until somebody asks for them.
const MAX_EVENTS: usize = 10_000;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The watchers of a box that are asked rather than listened to.
#[derive(Debug, Default)]
pub(super) struct Watchers(Mutex<BTreeMap<String, Kept>>);

#[derive(Debug)]
struct Kept {
    events: Arc<Mutex<Vec<FilesystemEvent>>>,
    task: tokio::task::AbortHandle,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watchers {
    pub(super) fn create(&self, message: &WatchDirRequest, user: &User) -> Result<Watcher, RpcFailure> {
        let mut watch = Watch::new(message, user)?;
        let events = Arc::new(Mutex::new(Vec::new()));
        let kept = events.clone();
        let task = tokio::spawn(async move {
            while let Ok(event) = watch.next().await {
                let mut kept = lock(&kept);
                if kept.len() < MAX_EVENTS {
                    kept.push(event);
                }
            }
        });
        let watcher_id = random_id();
        let task = task.abort_handle();
        lock(&self.0).insert(watcher_id.clone(), Kept { events, task });
        Ok(Watcher { watcher_id })
    }

    pub(super) fn events(&self, message: &Watcher) -> Result<WatcherEvents, RpcFailure> {
        let watchers = lock(&self.0);
        let kept = watchers.get(&message.watcher_id).ok_or_else(|| unknown(message))?;
        let events = std::mem::take(&mut *lock(&kept.events));
        Ok(WatcherEvents { events })
    }

    pub(super) fn remove(&self, message: &Watcher) -> Result<Empty, RpcFailure> {
        let removed = lock(&self.0).remove(&message.watcher_id);
        removed.map(|_| Empty {}).ok_or_else(|| unknown(message))
    }
}

fn unknown(message: &Watcher) -> RpcFailure {
    RpcFailure::new(
        Code::NotFound,
        format!("watcher with id {} not found", message.watcher_id),
    )
}

/// A stream of changes.
pub(super) fn stream(
    codec: Codec,
    message: &WatchDirRequest,
    user: &User,
    ping: Duration,
) -> Result<Answer, RpcFailure> {
    let mut watch = Watch::new(message, user)?;
    let (sender, body) = channel(1);
    tokio::spawn(async move {
        let frame = |event| Piece::Bytes(codec.frame(&WatchDirResponse { event: Some(event) }));
        if sender.send(frame(WatchEvent::Start(Empty {}))).await.is_err() {
            return;
        }
        loop {
            let event = match tokio::time::timeout(ping, watch.next()).await {
                Ok(Ok(event)) => WatchEvent::Filesystem(event),
                Ok(Err(error)) => {
                    let failure = RpcFailure::new(Code::Internal, format!("watcher error: {error}"));
                    let _ = sender.send(Piece::Bytes(end_frame(Some(&failure)))).await;
                    let _ = sender.send(Piece::End).await;
                    return;
                }
                Err(_) => WatchEvent::Keepalive(KeepAlive {}),
            };
            if sender.send(frame(event)).await.is_err() {
                return;
            }
        }
    });
    let mut answer = Response::new(body);
    answer
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, codec.stream_type());
    Ok(answer)
}

/// A directory, and perhaps those below it.
struct Watch {
    inotify: AsyncFd<OwnedFd>,
    root: PathBuf,
    /// Watched directories, relative to the first.
    dirs: HashMap<i32, PathBuf>,
    recursive: bool,
    include_entry: bool,
    coming: std::collections::VecDeque<(PathBuf, EventType)>,
}

impl Watch {
    fn new(message: &WatchDirRequest, user: &User) -> Result<Self, RpcFailure> {
        let path = resolve(&message.path, user);
        let failed = |error: io::Error| {
            let code = match error.kind() {
                io::ErrorKind::NotFound => Code::NotFound,
                _ => Code::Internal,
            };
            RpcFailure::new(code, format!("error watching '{path}': {error}"))
        };
        let metadata = std::fs::metadata(&path).map_err(failed)?;
        if !metadata.is_dir() {
            return Err(RpcFailure::new(
                Code::InvalidArgument,
                format!("path {path} is not a directory"),
            ));
        }
        let inotify =
            inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        let mut watch = Self {
            inotify: register(inotify).map_err(failed)?,
            root: PathBuf::from(&path),
            dirs: HashMap::new(),
            recursive: message.recursive,
            include_entry: message.include_entry,
            coming: std::collections::VecDeque::new(),
        };
        watch.add(Path::new(""), false).map_err(failed)?;
        Ok(watch)
    }

    /// Watches a directory; with `announce`, what is in it already is new.
    fn add(&mut self, dir: &Path, announce: bool) -> io::Result<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR;
        let full = self.root.join(dir);
        let number = inotify::add_watch(self.inotify.get_ref(), &full, flags)?;
        self.dirs.insert(number, dir.to_owned());
        if !self.recursive {
            return Ok(());
        }
        for found in std::fs::read_dir(&full)?.filter_map(Result::ok) {
            let below = dir.join(found.file_name());
            if announce {
                self.coming.push_back((below.clone(), EventType::Create));
            }
            if found.file_type().is_ok_and(|kind| kind.is_dir()) {
                // It may be gone by now.
                let _ = self.add(&below, announce);
            }
        }
        Ok(())
    }

    async fn next(&mut self) -> io::Result<FilesystemEvent> {
        loop {
            if let Some((name, kind)) = self.coming.pop_front() {
                let facts = self.include_entry.then(|| self.root.join(&name));
                return Ok(FilesystemEvent {
                    name: name.to_string_lossy().into_owned(),
                    r#type: kind as i32,
                    entry: facts.and_then(|path| entry(&path.to_string_lossy()).ok()),
                });
            }
            let mut ready = self.inotify.readable().await?;
            let found = read(ready.get_inner());
            ready.clear_ready();
            drop(ready);
            for (number, events, name) in found? {
                self.take_in(number, events, &name);
            }
        }
    }

    fn take_in(&mut self, number: i32, events: ReadFlags, name: &Path) {
        if events.contains(ReadFlags::IGNORED) {
            self.dirs.remove(&number);
            return;
        }
        let Some(dir) = self.dirs.get(&number) else { return };
        if name.as_os_str().is_empty() {
            // About the directory itself, which its parent's watch tells.
            return;
        }
        let name = dir.join(name);
        let arrived = events.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
        for (flags, kind) in [
            (ReadFlags::CREATE | ReadFlags::MOVED_TO, EventType::Create),
            (ReadFlags::MODIFY, EventType::Write),
            (ReadFlags::DELETE, EventType::Remove),
            (ReadFlags::MOVED_FROM, EventType::Rename),
            (ReadFlags::ATTRIB, EventType::Chmod),
        ] {
            if events.intersects(flags) {
                self.coming.push_back((name.clone(), kind));
            }
        }
        if arrived && self.recursive && events.contains(ReadFlags::ISDIR) {
            // It may be gone by now.
            let _ = self.add(&name, true);
        }
    }
}

#[allow(
    deprecated,
    reason = "the replacement is unsafe because of types that lie about their descriptor, which an owned one does not"
)]
fn register(inotify: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(inotify)
}

/// All that has happened by now.
fn read(inotify: &OwnedFd) -> io::Result<Vec<(i32, ReadFlags, PathBuf)>> {
    let mut buffer = [MaybeUninit::uninit(); 16 << 10];
    let mut reader = inotify::Reader::new(inotify, &mut buffer);
    let mut found = Vec::new();
    loop {
        match reader.next() {
            Ok(event) => {
                let name = event.file_name().map_or(&b""[..], |name| name.to_bytes());
                let name = PathBuf::from(std::ffi::OsStr::from_bytes(name));
                found.push((event.wd(), event.events(), name));
            }
            Err(rustix::io::Errno::AGAIN) => return Ok(found),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
