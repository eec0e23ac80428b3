//! envd's package `filesystem`.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;

use http::{Request, StatusCode};
use hyper::body::Incoming;

use super::envd::{
    Box, Codec, RpcFailure, User, Users, failed_stream, framed, keepalive, message, resolve, unary, unimplemented,
};
use super::server::{Answer, failure};
use super::watching;
use crate::wire::filesystem::{
    EntryInfo, EntryResponse, FileType, ListDirRequest, ListDirResponse, MoveRequest, PathRequest, Timestamp,
};
use crate::wire::process::Empty;
use crate::wire::rpc::Code;
use crate::wire::watch::WatchDirRequest;

pub(super) async fn handle(found: &Box, users: &Users, method: &str, request: Request<Incoming>) -> Answer {
    let Some((codec, streaming)) = Codec::of(request.headers()) else {
        return failure(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unknown content type");
    };
    if streaming != (method == "WatchDir") {
        return failure(StatusCode::UNSUPPORTED_MEDIA_TYPE, "wrong content type for this method");
    }
    let user = match users.of_call(request.headers()) {
        Ok(user) => user,
        Err(failure) if streaming => return failed_stream(codec, &failure),
        Err(failure) => return unary::<Empty>(codec, Err(failure)),
    };
    match method {
        "WatchDir" => {
            let ping = keepalive(request.headers());
            let watched = match framed::<WatchDirRequest>(codec, request).await {
                Ok(message) => watching::stream(codec, &message, &user, ping),
                Err(failure) => Err(failure),
            };
            watched.unwrap_or_else(|failure| failed_stream(codec, &failure))
        }
        "CreateWatcher" => unary(
            codec,
            message(codec, request)
                .await
                .and_then(|message| found.watchers.create(&message, &user)),
        ),
        "GetWatcherEvents" => unary(
            codec,
            message(codec, request)
                .await
                .and_then(|message| found.watchers.events(&message)),
        ),
        "RemoveWatcher" => unary(
            codec,
            message(codec, request)
                .await
                .and_then(|message| found.watchers.remove(&message)),
        ),
        "Stat" => unary(
            codec,
            message(codec, request).await.and_then(|message| stat(&message, &user)),
        ),
        "MakeDir" => unary(
            codec,
            message(codec, request)
                .await
                .and_then(|message| make_dir(&message, &user)),
        ),
        "Remove" => unary(
            codec,
            message(codec, request)
                .await
                .and_then(|message| remove(&message, &user)),
        ),
        "Move" => unary(
            codec,
            message(codec, request)
                .await
                .and_then(|message| rename(&message, &user)),
        ),
        "ListDir" => unary(
            codec,
            message(codec, request)
                .await
                .and_then(|message| list_dir(&message, &user)),
        ),
        _ => unary::<Empty>(codec, Err(unimplemented(method))),
    }
}

fn failed(what: &str, path: &str, error: &io::Error) -> RpcFailure {
    let code = match error.kind() {
        io::ErrorKind::NotFound => Code::NotFound,
        io::ErrorKind::NotADirectory => Code::InvalidArgument,
        _ => Code::Internal,
    };
    RpcFailure::new(code, format!("{what} '{path}': {error}"))
}

fn kind(metadata: &Metadata) -> FileType {
    if metadata.is_dir() {
        FileType::Directory
    } else if metadata.is_file() {
        FileType::File
    } else if metadata.file_type().is_symlink() {
        FileType::Symlink
    } else {
        FileType::Unspecified
    }
}

/// Permission bits as `ls` shows them.
fn permissions(metadata: &Metadata) -> String {
    let kind = metadata.file_type();
    let first = match () {
        () if kind.is_dir() => 'd',
        () if kind.is_symlink() => 'L',
        () if kind.is_fifo() => 'p',
        () if kind.is_socket() => 'S',
        () if kind.is_char_device() || kind.is_block_device() => 'D',
        () => '-',
    };
    let bits = "rwxrwxrwx".chars().enumerate().map(|(place, letter)| {
        let is_set = metadata.mode() & (0o400 >> place) != 0;
        if is_set { letter } else { '-' }
    });
    std::iter::once(first).chain(bits).collect()
}

/// The name of an id, or the id.
fn name_of(file: &str, id: u32) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let found = text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, number) = (fields.next()?, fields.nth(1)?);
        (number.parse() == Ok(id)).then(|| name.to_owned())
    });
    found.unwrap_or_else(|| id.to_string())
}

pub(super) fn entry(path: &str) -> io::Result<EntryInfo> {
    let metadata = fs::symlink_metadata(path)?;
    let is_link = metadata.file_type().is_symlink();
    // The type of what a link leads to, and the facts of the link.
    let r#type = match fs::metadata(path) {
        Ok(target) => kind(&target),
        Err(_) => kind(&metadata),
    };
    let target = is_link.then(|| {
        let target = fs::canonicalize(path).or_else(|_| fs::read_link(path));
        target.map_or_else(|_| path.to_owned(), |target| target.to_string_lossy().into_owned())
    });
    let name = Path::new(path)
        .file_name()
        .map_or_else(|| "/".into(), |name| name.to_string_lossy().into_owned());
    Ok(EntryInfo {
        name,
        r#type: r#type as i32,
        path: path.to_owned(),
        size: i64::try_from(metadata.size()).unwrap_or(i64::MAX),
        mode: metadata.mode() & 0o7777,
        permissions: permissions(&metadata),
        owner: name_of("/etc/passwd", metadata.uid()),
        group: name_of("/etc/group", metadata.gid()),
        modified_time: Some(Timestamp {
            seconds: metadata.mtime(),
            nanos: i32::try_from(metadata.mtime_nsec()).unwrap_or_default(),
        }),
        symlink_target: target,
        metadata: Default::default(),
    })
}

fn respond(path: &str) -> Result<EntryResponse, RpcFailure> {
    let entry = entry(path).map_err(|error| failed("cannot stat", path, &error))?;
    Ok(EntryResponse { entry: Some(entry) })
}

fn stat(message: &PathRequest, user: &User) -> Result<EntryResponse, RpcFailure> {
    respond(&resolve(&message.path, user))
}

/// Makes a directory with its parents, each new one the user's.
pub(super) fn make_dirs(path: &Path, user: &User) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        make_dirs(parent, user)?;
    }
    match fs::create_dir(path) {
        Ok(()) => {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
            chown(path, Some(user.uid), Some(user.gid))
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

fn make_dir(message: &PathRequest, user: &User) -> Result<EntryResponse, RpcFailure> {
    let path = resolve(&message.path, user);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_dir() => {
            return Err(RpcFailure::new(
                Code::AlreadyExists,
                format!("directory already exists: {path}"),
            ));
        }
        Ok(_) => {
            let message = format!("path already exists but it is not a directory: {path}");
            return Err(RpcFailure::new(Code::InvalidArgument, message));
        }
        Err(_) => {}
    }
    let path_ref = Path::new(&path);
    if let Some(parent) = path_ref.parent() {
        make_dirs(parent, user).map_err(|error| failed("cannot create", &path, &error))?;
    }
    // The last one by itself: whoever makes it first is told so.
    match fs::create_dir(path_ref) {
        Ok(()) => {
            let _ = chown(path_ref, Some(user.uid), Some(user.gid));
            respond(&path)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(RpcFailure::new(
            Code::AlreadyExists,
            format!("directory already exists: {path}"),
        )),
        Err(error) => Err(failed("cannot create", &path, &error)),
    }
}

fn remove(message: &PathRequest, user: &User) -> Result<Empty, RpcFailure> {
    let path = resolve(&message.path, user);
    let removed = match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&path),
        Ok(_) => fs::remove_file(&path),
        Err(error) => Err(error),
    };
    match removed {
        Ok(()) => Ok(Empty {}),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Empty {}),
        Err(error) => Err(failed("cannot remove", &path, &error)),
    }
}

fn rename(message: &MoveRequest, user: &User) -> Result<EntryResponse, RpcFailure> {
    let (source, destination) = (resolve(&message.source, user), resolve(&message.destination, user));
    fs::symlink_metadata(&source).map_err(|error| failed("cannot move", &source, &error))?;
    if let Some(parent) = Path::new(&destination).parent() {
        make_dirs(parent, user).map_err(|error| failed("cannot create", &destination, &error))?;
    }
    fs::rename(&source, &destination).map_err(|error| failed("cannot move", &source, &error))?;
    respond(&destination)
}

fn list_dir(message: &ListDirRequest, user: &User) -> Result<ListDirResponse, RpcFailure> {
    let path = resolve(&message.path, user);
    let metadata = fs::metadata(&path).map_err(|error| failed("cannot list", &path, &error))?;
    if !metadata.is_dir() {
        return Err(RpcFailure::new(
            Code::InvalidArgument,
            format!("path is not a directory: {path}"),
        ));
    }
    let mut entries = Vec::new();
    walk(&path, message.depth.max(1), &mut entries).map_err(|error| failed("cannot list", &path, &error))?;
    Ok(ListDirResponse { entries })
}

fn walk(dir: &str, depth: u32, entries: &mut Vec<EntryInfo>) -> io::Result<()> {
    let mut names: Vec<_> = fs::read_dir(dir)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    for name in names {
        let path = format!("{}/{name}", dir.trim_end_matches('/'));
        // It may be gone by now.
        let Ok(found) = entry(&path) else { continue };
        let descend = depth > 1 && found.symlink_target.is_none() && found.r#type == FileType::Directory as i32;
        entries.push(found);
        if descend {
            walk(&path, depth - 1, entries)?;
        }
    }
    Ok(())
}
