//! envd's file endpoint.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::chown;
use std::path::Path;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::{GzDecoder, GzEncoder};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::envd::{User, Users, resolve};
use super::filesystem::make_dirs;
use super::server::{Answer, Piece, Query, channel, failure, json as answer, read};

const CHUNK: usize = 256 << 10;

/// The path and user that a request names.
fn target(users: &Users, request: &Request<Incoming>) -> Result<(Option<String>, User), Box<Answer>> {
    let query = Query::of(request);
    let name = query.get("username").filter(|name| !name.is_empty()).unwrap_or("user");
    let Some(user) = users.find(name) else {
        return Err(Box::new(failure(
            StatusCode::UNAUTHORIZED,
            format!("error looking up user '{name}'"),
        )));
    };
    let path = query.get("path").map(|path| resolve(path, &user));
    Ok((path, user))
}

fn failed(path: &str, error: &io::Error) -> Answer {
    let status = match error.kind() {
        io::ErrorKind::NotFound => StatusCode::NOT_FOUND,
        io::ErrorKind::IsADirectory => StatusCode::BAD_REQUEST,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    failure(status, format!("error opening '{path}': {error}"))
}

/// The part that a `Range` header asks for, both ends inclusive.
fn range(request: &Request<Incoming>, size: u64) -> Option<Result<(u64, u64), ()>> {
    let text = request
        .headers()
        .get(http::header::RANGE)?
        .to_str()
        .ok()?
        .strip_prefix("bytes=")?;
    if size == 0 {
        return None;
    }
    let (from, to) = text.split_once('-')?;
    let (from, to) = match (from.parse::<u64>(), to.parse::<u64>()) {
        (Ok(from), Ok(to)) => (from, to.min(size - 1)),
        (Ok(from), Err(_)) => (from, size - 1),
        (Err(_), Ok(last)) => (size.saturating_sub(last), size - 1),
        (Err(_), Err(_)) => return None,
    };
    Some(if from < size && from <= to {
        Ok((from, to))
    } else {
        Err(())
    })
}

pub(super) fn download(users: &Users, request: &Request<Incoming>) -> Answer {
    let (path, _) = match target(users, request) {
        Ok(target) => target,
        Err(refusal) => return *refusal,
    };
    let path = path.unwrap_or_default();
    let metadata = match fs::metadata(&path) {
        Ok(metadata) => metadata,
        Err(error) => return failed(&path, &error),
    };
    if metadata.is_dir() {
        return failure(StatusCode::BAD_REQUEST, format!("path '{path}' is a directory"));
    }
    if !metadata.is_file() {
        // The real one would wait for the other end for ever.
        return failure(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("'{path}' is no regular file"),
        );
    }
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) => return failed(&path, &error),
    };
    if wants_gzip(request) {
        return zipped(file);
    }
    let size = metadata.len();
    let (status, from, length) = match range(request, size) {
        None => (StatusCode::OK, 0, size),
        Some(Ok((from, to))) => (StatusCode::PARTIAL_CONTENT, from, to - from + 1),
        Some(Err(())) => {
            let mut refusal = failure(StatusCode::RANGE_NOT_SATISFIABLE, "invalid range: failed to overlap");
            let whole = HeaderValue::try_from(format!("bytes */{size}"));
            refusal
                .headers_mut()
                .extend(whole.map(|whole| (http::header::CONTENT_RANGE, whole)));
            return refusal;
        }
    };
    if file.seek(SeekFrom::Start(from)).is_err() {
        return failure(StatusCode::INTERNAL_SERVER_ERROR, "cannot seek");
    }
    let (sender, body) = channel(4);
    tokio::spawn(async move {
        let mut left = length;
        while left > 0 {
            let mut chunk = Vec::with_capacity(CHUNK);
            match (&mut file).take(left.min(CHUNK as u64)).read_to_end(&mut chunk) {
                // It became shorter meanwhile: what was promised cannot be kept.
                Ok(0) | Err(_) => return,
                Ok(count) => {
                    left -= count as u64;
                    if sender.send(Piece::Bytes(chunk.into())).await.is_err() {
                        return;
                    }
                }
            }
        }
        let _ = sender.send(Piece::End).await;
    });
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(http::header::CONTENT_LENGTH, HeaderValue::from(length));
    headers.insert(
        http::header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    if status == StatusCode::PARTIAL_CONTENT
        && let Ok(range) = HeaderValue::try_from(format!("bytes {from}-{}/{size}", from + length - 1))
    {
        headers.insert(http::header::CONTENT_RANGE, range);
    }
    answer
}

/// Opens a file for writing as envd does: in place, parents made, the user its owner.
fn open(path: &str, user: &User) -> Result<File, Box<Answer>> {
    let target = Path::new(path);
    if target.is_dir() {
        return Err(Box::new(failure(
            StatusCode::BAD_REQUEST,
            format!("path is a directory: {path}"),
        )));
    }
    if let Some(parent) = target.parent()
        && let Err(error) = make_dirs(parent, user)
    {
        return Err(Box::new(failure(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("error creating '{path}': {error}"),
        )));
    }
    let file = File::create(target).map_err(|error| Box::new(failed(path, &error)))?;
    let _ = chown(target, Some(user.uid), Some(user.gid));
    Ok(file)
}

fn written(path: &str) -> Value {
    let name = Path::new(path)
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    json!({ "path": path, "name": name, "type": "file" })
}

pub(super) async fn upload(users: &Users, request: Request<Incoming>) -> Answer {
    let (path, user) = match target(users, &request) {
        Ok(target) => target,
        Err(refusal) => return *refusal,
    };
    let kind = request
        .headers()
        .get(http::header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let kind = kind.unwrap_or_default().to_owned();
    let encoding = request.headers().get(http::header::CONTENT_ENCODING);
    let gzipped = match encoding.map(HeaderValue::as_bytes) {
        None | Some(b"identity") => false,
        Some(b"gzip") => true,
        Some(_) => return failure(StatusCode::BAD_REQUEST, "unsupported content encoding"),
    };
    if let Some(boundary) = kind
        .strip_prefix("multipart/form-data")
        .and_then(|rest| rest.split_once("boundary="))
    {
        let boundary = boundary.1.trim_matches('"').to_owned();
        let Ok(body) = read(request).await else {
            return failure(StatusCode::BAD_REQUEST, "no body");
        };
        let body = match gzipped {
            false => Ok(body),
            true => unzipped(&body),
        };
        return match body {
            Ok(body) => multipart(&body, &boundary, path, &user),
            Err(error) => failure(StatusCode::BAD_REQUEST, format!("the body cannot be unpacked: {error}")),
        };
    }
    if kind != "application/octet-stream" {
        return failure(StatusCode::BAD_REQUEST, format!("unsupported content type {kind:?}"));
    }
    let Some(path) = path else {
        return failure(StatusCode::BAD_REQUEST, "path is needed");
    };
    let file = match open(&path, &user) {
        Ok(file) => file,
        Err(refusal) => return *refusal,
    };
    let mut file = match gzipped {
        false => Target::Plain(file),
        true => Target::Unzipping(Box::new(GzDecoder::new(file))),
    };
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            return failure(StatusCode::BAD_REQUEST, "the body broke off");
        };
        if let Ok(bytes) = frame.into_data()
            && let Err(error) = file.write_all(&bytes)
        {
            return failed(&path, &error);
        }
    }
    if let Err(error) = file.finish() {
        return failure(StatusCode::BAD_REQUEST, format!("the body cannot be unpacked: {error}"));
    }
    answer(StatusCode::OK, &[written(&path)])
}

/// Where the bytes of an upload go.
enum Target {
    Plain(File),
    Unzipping(Box<GzDecoder<File>>),
}

impl Target {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(file) => file.write_all(bytes),
            Self::Unzipping(file) => file.write_all(bytes),
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Unzipping(file) => file.finish().map(drop),
        }
    }
}

fn unzipped(body: &[u8]) -> io::Result<Bytes> {
    let mut decoder = GzDecoder::new(Vec::new());
    decoder.write_all(body)?;
    decoder.finish().map(Bytes::from)
}

/// Whether the whole file may be sent compressed: it is asked for, and no part of it is.
fn wants_gzip(request: &Request<Incoming>) -> bool {
    let accepted = request.headers().get(http::header::ACCEPT_ENCODING);
    let accepted = accepted.and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut names = accepted.split(',').map(|part| {
        let mut words = part.split(';').map(str::trim);
        (words.next().unwrap_or_default(), words.next())
    });
    names.any(|(name, quality)| name.eq_ignore_ascii_case("gzip") && quality != Some("q=0"))
        && !request.headers().contains_key(http::header::RANGE)
}

/// Sends a file compressed, to its end whatever its length says.
fn zipped(mut file: File) -> Answer {
    let (sender, body) = channel(4);
    tokio::spawn(async move {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        let mut chunk = vec![0; CHUNK];
        loop {
            let packed = match file.read(&mut chunk) {
                Err(_) => return,
                Ok(0) => break,
                Ok(count) => encoder.write_all(&chunk[..count]),
            };
            let ready = std::mem::take(encoder.get_mut());
            if packed.is_err() || (!ready.is_empty() && sender.send(Piece::Bytes(ready.into())).await.is_err()) {
                return;
            }
        }
        let Ok(rest) = encoder.finish() else { return };
        if sender.send(Piece::Bytes(rest.into())).await.is_ok() {
            let _ = sender.send(Piece::End).await;
        }
    });
    let mut answer = Response::new(body);
    let headers = answer.headers_mut();
    headers.insert(http::header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    headers.insert(http::header::VARY, HeaderValue::from_static("Accept-Encoding"));
    headers.insert(
        http::header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    answer
}

/// The parts of a form: file name and content.
fn parts(body: &[u8], boundary: &str) -> Vec<(String, String, Bytes)> {
    let delimiter = format!("--{boundary}");
    let mut found = Vec::new();
    let mut rest = body;
    while let Some(start) = position(rest, delimiter.as_bytes()) {
        rest = &rest[start + delimiter.len()..];
        let Some(head_end) = position(rest, b"\r\n\r\n") else {
            break;
        };
        let head = String::from_utf8_lossy(&rest[..head_end]).into_owned();
        let content = &rest[head_end + 4..];
        let Some(end) = position(content, format!("\r\n{delimiter}").as_bytes()) else {
            break;
        };
        let parameter = |name: &str| {
            let (_, value) = head.split_once(&format!("{name}=\""))?;
            Some(value.split('"').next().unwrap_or_default().to_owned())
        };
        let name = parameter(" name").unwrap_or_default();
        found.push((
            name,
            parameter("filename").unwrap_or_default(),
            Bytes::copy_from_slice(&content[..end]),
        ));
        rest = &content[end + 2..];
    }
    found
}

fn position(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

fn multipart(body: &[u8], boundary: &str, path: Option<String>, user: &User) -> Answer {
    let files: Vec<_> = parts(body, boundary)
        .into_iter()
        .filter(|(name, ..)| name == "file")
        .collect();
    if path.is_some() && files.len() != 1 {
        return failure(StatusCode::BAD_REQUEST, "a path goes with exactly one file");
    }
    let mut entries = Vec::new();
    for (_, name, content) in files {
        let path = path.clone().unwrap_or_else(|| resolve(&name, user));
        let mut file = match open(&path, user) {
            Ok(file) => file,
            Err(refusal) => return *refusal,
        };
        if let Err(error) = file.write_all(&content) {
            return failed(&path, &error);
        }
        entries.push(written(&path));
    }
    answer(StatusCode::OK, &entries)
}
