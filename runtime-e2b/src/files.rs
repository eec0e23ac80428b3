//! Files of a box: envd's file endpoint for bytes, its RPC for facts, and small scripts for what neither has.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Buf as _, Bytes};
use futures_util::{Stream, StreamExt as _};
use runtime_core::names::random_hex;
use runtime_core::{
    ByteStream, Content, DirEntry, Error, ErrorKind, FileType, Metadata, Process, Result, WriteOptions, stream_error,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};

use crate::envd::{Envd, USER};
use crate::error;
use crate::launch::path_text;
use crate::process::read_out;
use crate::wire::filesystem::{self as wire, EntryInfo, EntryResponse, FileType as WireType, ListDirResponse};
use crate::wire::process::Empty;

/// How long a FIFO or a device may take to give what was asked for.
pub(crate) const SPECIAL_READ_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a download may stand still.
const IDLE: Duration = Duration::from_secs(60);

/// How often a download that broke off is taken up again without getting anywhere.
const RESUMES: u32 = 5;

/// Puts a finished upload in the place of a file: follows symbolic links, keeps mode and owner of what is there.
const REPLACE: &str = r#"t=$1 d=$2 m=$3
fail() { rm -f -- "$t"; echo "$2" >&2; exit "$1"; }
if [ -L "$d" ]; then d=$(readlink -f -- "$d") || fail 24 "the symbolic link leads nowhere"; fi
if [ -d "$d" ]; then fail 21 "it is a directory"; fi
if [ -e "$d" ]; then
[ -f "$d" ] || fail 22 "it is no regular file"
[ -n "$m" ] || m=$(stat -c %a -- "$d") || fail 23 "its mode cannot be read"
chown -- "$(stat -c %u:%g -- "$d")" "$t" 2>/dev/null
fi
if [ -n "$m" ]; then chmod -- "$m" "$t" || fail 23 "its mode cannot be set"; fi
mv -f -- "$t" "$d" || fail 23 "it cannot be replaced"
"#;

/// Facts about a path, as envd has them.
async fn entry(envd: &Envd, path: &str) -> Result<EntryInfo> {
    let answer: EntryResponse = envd.call("stat", &wire::stat(path, USER)).await?;
    answer
        .entry
        .ok_or_else(|| error::unreadable("the facts about a path", "there are none"))
}

fn metadata(entry: &EntryInfo) -> Metadata {
    let file_type = if entry.symlink_target.is_some() {
        FileType::Symlink
    } else {
        match WireType::try_from(entry.r#type) {
            Ok(WireType::File) => FileType::File,
            Ok(WireType::Directory) => FileType::Directory,
            Ok(WireType::Symlink) => FileType::Symlink,
            Ok(WireType::Unspecified) | Err(_) => FileType::Special,
        }
    };
    let modified = entry.modified_time.as_ref().and_then(|time| {
        let nanos = Duration::from_nanos(u64::try_from(time.nanos).ok()?);
        match u64::try_from(time.seconds) {
            Ok(seconds) => UNIX_EPOCH.checked_add(Duration::from_secs(seconds) + nanos),
            Err(_) => SystemTime::checked_sub(&UNIX_EPOCH, Duration::from_secs(time.seconds.unsigned_abs()))?
                .checked_add(nanos),
        }
    });
    Metadata {
        file_type,
        size: u64::try_from(entry.size).unwrap_or_default(),
        mode: Some(entry.mode & 0o7777),
        modified,
        link_target: None,
    }
}

/// What a path leads to.
enum Source {
    /// A regular file with something in it.
    File,
    /// A regular file that says it is empty: it is, or it is one of the kernel's.
    Empty,
    /// A FIFO, a socket or a device.
    Special,
}

async fn source(envd: &Envd, path: &str) -> Result<Source> {
    let entry = entry(envd, path).await?;
    // envd does not follow a symbolic link, but tells the type of what it leads to. The size is the link's own.
    match WireType::try_from(entry.r#type) {
        Ok(WireType::Directory) => Err(Error::new(ErrorKind::WrongFileType, format!("{path} is a directory"))),
        Ok(WireType::File) if entry.size > 0 => Ok(Source::File),
        Ok(WireType::File) => Ok(Source::Empty),
        // A link that leads nowhere.
        Ok(WireType::Symlink) => Err(Error::new(ErrorKind::NotFound, format!("{path} leads nowhere"))),
        Ok(WireType::Unspecified) | Err(_) => Ok(Source::Special),
    }
}

/// Opens a file. `reader` starts a program of the box for what the file endpoint cannot read.
pub(crate) async fn open<F, Fut>(envd: &Arc<Envd>, path: &Path, limit: Option<u64>, reader: F) -> Result<ByteStream>
where
    F: FnOnce(Vec<OsString>) -> Fut,
    Fut: Future<Output = Result<Process>>,
{
    let text = path_text(path, "path")?.to_owned();
    match (source(envd, &text).await?, limit) {
        (_, Some(0)) => Ok(ByteStream::from_bytes(Bytes::new())),
        (Source::File, limit) => Ok(ByteStream::new(Download::new(envd.clone(), text, 0, limit).await?)),
        (Source::Special, None) => Err(Error::new(
            ErrorKind::WrongFileType,
            "a FIFO, socket or device is read only with a limit",
        )),
        (Source::Empty | Source::Special, limit) => {
            let limit = limit.unwrap_or(1 << 30);
            let argv = ["head", "-c", &limit.to_string(), "--"].map(OsString::from);
            let process = reader(argv.into_iter().chain([path.into()]).collect()).await?;
            let read = tokio::time::timeout(SPECIAL_READ_TIMEOUT, read_out(process, limit)).await;
            let (status, content, said) = read.map_err(|_| {
                Error::new(
                    ErrorKind::Timeout,
                    format!("{text} did not give {limit} bytes within {SPECIAL_READ_TIMEOUT:?}"),
                )
            })??;
            if !status.success() && content.is_empty() {
                let said = String::from_utf8_lossy(&said).trim().to_owned();
                return Err(Error::new(ErrorKind::Io, format!("{text} cannot be read: {said}")));
            }
            Ok(ByteStream::from_bytes(content))
        }
    }
}

type Opening = Pin<Box<dyn Future<Output = Result<Option<reqwest::Response>>> + Send>>;

/// A download that takes itself up again where it broke off.
pub(crate) struct Download {
    envd: Arc<Envd>,
    path: String,
    offset: u64,
    /// How much is still wanted.
    left: Option<u64>,
    state: State,
    failures: u32,
    idle: Pin<Box<tokio::time::Sleep>>,
}

enum State {
    Opening(Opening),
    Reading {
        body: Pin<Box<dyn Stream<Item = reqwest::Result<Bytes>> + Send>>,
        chunk: Bytes,
        /// How much this answer still promises.
        promised: Option<u64>,
    },
    Done,
}

impl Download {
    /// Opens a file at an offset. Behind its end there is nothing to read.
    pub(crate) async fn new(envd: Arc<Envd>, path: String, offset: u64, limit: Option<u64>) -> Result<Self> {
        let response = envd.download(&path, offset, limit).await?;
        let mut download = Self {
            envd,
            path,
            offset,
            left: limit,
            state: State::Done,
            failures: 0,
            idle: Box::pin(tokio::time::sleep(IDLE)),
        };
        download.begin(response)?;
        Ok(download)
    }

    fn begin(&mut self, response: Option<reqwest::Response>) -> Result<()> {
        let Some(response) = response else {
            self.state = State::Done;
            return Ok(());
        };
        let asked_for_part = self.offset > 0 || self.left.is_some();
        if asked_for_part && response.status() != reqwest::StatusCode::PARTIAL_CONTENT && self.offset > 0 {
            // The whole file instead of its rest: envd does that for an empty one.
            if response.content_length() != Some(0) {
                return Err(error::unreadable(
                    "the file",
                    "a part was asked for and the whole was sent",
                ));
            }
            self.state = State::Done;
            return Ok(());
        }
        let promised = response.content_length();
        self.state = State::Reading {
            body: Box::pin(response.bytes_stream()),
            chunk: Bytes::new(),
            promised,
        };
        self.idle.as_mut().reset(tokio::time::Instant::now() + IDLE);
        Ok(())
    }

    fn reopen(&mut self, why: Error) -> Result<()> {
        self.failures += 1;
        if self.failures > RESUMES {
            return Err(why);
        }
        tracing::debug!(error = %why, offset = self.offset, "e2b: taking up a download again");
        let (envd, path, offset, left) = (self.envd.clone(), self.path.clone(), self.offset, self.left);
        self.state = State::Opening(Box::pin(async move { envd.download(&path, offset, left).await }));
        Ok(())
    }
}

impl AsyncRead for Download {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.left == Some(0) || buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            match &mut this.state {
                State::Done => return Poll::Ready(Ok(())),
                State::Opening(opening) => {
                    let response = ready!(opening.as_mut().poll(cx)).map_err(io::Error::other)?;
                    this.begin(response).map_err(io::Error::other)?;
                }
                State::Reading { body, chunk, promised } => {
                    if !chunk.is_empty() {
                        let wanted = this
                            .left
                            .map_or(usize::MAX, |left| usize::try_from(left).unwrap_or(usize::MAX));
                        let count = chunk.len().min(buf.remaining()).min(wanted);
                        buf.put_slice(&chunk[..count]);
                        chunk.advance(count);
                        this.offset += count as u64;
                        if let Some(left) = &mut this.left {
                            *left -= count as u64;
                        }
                        return Poll::Ready(Ok(()));
                    }
                    let broken = match body.poll_next_unpin(cx) {
                        Poll::Ready(Some(Ok(next))) => {
                            if let Some(promised) = promised {
                                *promised = promised.saturating_sub(next.len() as u64);
                            }
                            if !next.is_empty() {
                                this.failures = 0;
                            }
                            *chunk = next;
                            this.idle.as_mut().reset(tokio::time::Instant::now() + IDLE);
                            continue;
                        }
                        Poll::Ready(None) if promised.is_none_or(|promised| promised == 0) => {
                            this.state = State::Done;
                            continue;
                        }
                        Poll::Ready(None) => error::cut_short(),
                        Poll::Ready(Some(Err(broken))) => error::into_error(error::transport(broken)),
                        Poll::Pending => {
                            ready!(this.idle.as_mut().poll(cx));
                            Error::new(ErrorKind::Timeout, format!("the download stood still for {IDLE:?}"))
                        }
                    };
                    this.reopen(broken).map_err(io::Error::other)?;
                }
            }
        }
    }
}

/// A stream as the body of an upload. An error of the stream is kept for its caller, since the request hides it.
fn body_of(stream: ByteStream) -> (reqwest::Body, Arc<std::sync::Mutex<Option<Error>>>) {
    let failure = Arc::new(std::sync::Mutex::new(None));
    let kept = failure.clone();
    let body = tokio_util::io::ReaderStream::with_capacity(stream, 64 << 10).map(move |read| {
        read.map_err(|error| {
            let error = stream_error("reading what is to be written", error);
            *kept.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error.clone());
            io::Error::other(error)
        })
    });
    (reqwest::Body::wrap_stream(body), failure)
}

/// Uploads to a path, in place.
pub(crate) async fn upload(envd: &Envd, path: &str, content: Content) -> Result<()> {
    match content {
        Content::Bytes(bytes) => envd.upload(path, bytes).await,
        Content::Stream(stream) => {
            let (body, failure) = body_of(stream);
            let sent = envd.upload_stream(path, body).await;
            let failure = failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            match failure {
                Some(failure) => Err(failure),
                None => sent,
            }
        }
    }
}

/// Removes a temporary file of ours in the box, whatever happens to whoever made it.
pub(crate) struct Scratch {
    envd: Arc<Envd>,
    path: String,
    armed: bool,
}

impl Scratch {
    pub(crate) fn new(envd: Arc<Envd>, path: String) -> Self {
        Self {
            envd,
            path,
            armed: true,
        }
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// It is gone already, or somebody else's.
    pub(crate) fn disarm(&mut self) {
        self.armed = false;
    }

    /// Removes it now.
    pub(crate) async fn remove(mut self) {
        let removed: Result<Empty> = self.envd.call("remove", &wire::remove(&self.path, USER)).await;
        if let Err(error) = removed {
            tracing::debug!(%error, path = self.path, "e2b: a temporary file stays in the sandbox");
        }
        self.armed = false;
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.armed {
            let (envd, path) = (self.envd.clone(), self.path.clone());
            runtime_core::detach(async move {
                let _: Result<Empty> = envd.call("remove", &wire::remove(&path, USER)).await;
            });
        }
    }
}

/// Writes a file.
pub(crate) async fn write(envd: &Arc<Envd>, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
    let text = path_text(path, "path")?;
    let mode = options.mode.map(|mode| format!("{mode:o}")).unwrap_or_default();
    if options.atomic {
        let (dir, name) = text.rsplit_once('/').unwrap_or(("", text));
        // A name may have 255 bytes; ours must too.
        let kept: String = name.chars().take(40).collect();
        let mut scratch = Scratch::new(envd.clone(), format!("{dir}/.{kept}.{}.tmp", random_hex(16)));
        upload(envd, scratch.path(), content).await?;
        let said = envd.script(REPLACE, &[scratch.path(), text, &mode]).await?;
        let why = || format!("{text}: {}", String::from_utf8_lossy(&said.stderr).trim());
        match said.code {
            0 => {
                scratch.disarm();
                return Ok(());
            }
            21 | 22 => return Err(Error::new(ErrorKind::WrongFileType, why())),
            24 => return Err(Error::new(ErrorKind::NotFound, why())),
            _ => return Err(Error::new(ErrorKind::Io, why())),
        }
    }
    match source(envd, text).await {
        Ok(Source::Special) => {
            return Err(Error::new(
                ErrorKind::WrongFileType,
                format!("{text} is no regular file"),
            ));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    upload(envd, text, content).await?;
    if mode.is_empty() {
        return Ok(());
    }
    let said = envd.script("chmod -- \"$1\" \"$2\"", &[&mode, text]).await?;
    if said.code == 0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Io,
        format!(
            "the mode of {text} cannot be set: {}",
            String::from_utf8_lossy(&said.stderr).trim()
        ),
    ))
}

pub(crate) async fn stat(envd: &Envd, path: &Path) -> Result<Metadata> {
    let text = path_text(path, "path")?;
    let mut facts = metadata(&entry(envd, text).await?);
    if facts.is_symlink() {
        // envd tells where it leads in the end, rather than what it says.
        let said = envd.script("readlink -n -- \"$1\"", &[text]).await?;
        let target = (said.code == 0).then(|| PathBuf::from(OsString::from_vec(said.stdout)));
        facts.link_target = target;
    }
    Ok(facts)
}

pub(crate) async fn list(envd: &Envd, path: &Path) -> Result<Vec<DirEntry>> {
    let text = path_text(path, "path")?;
    let answer: Result<ListDirResponse> = envd.call("list", &wire::list_dir(text, USER)).await;
    match answer {
        Ok(answer) => Ok(answer
            .entries
            .iter()
            .map(|entry| DirEntry {
                name: entry.name.clone().into(),
                metadata: metadata(entry),
            })
            .collect()),
        Err(error) if error.kind() == ErrorKind::InvalidArgument => {
            Err(Error::new(ErrorKind::WrongFileType, format!("{text} is no directory")).with_source(error))
        }
        Err(error) => Err(error),
    }
}

pub(crate) async fn create_dir(envd: &Envd, path: &Path) -> Result<()> {
    let text = path_text(path, "path")?;
    let made: Result<EntryResponse> = envd.call("create_dir", &wire::make_dir(text, USER)).await;
    match made {
        Ok(_) => Ok(()),
        // Something is there, or in the way.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => match entry(envd, text).await {
            Ok(there) if there.r#type == WireType::Directory as i32 => Ok(()),
            _ => Err(error),
        },
        Err(error) if error.kind() == ErrorKind::InvalidArgument => {
            Err(Error::new(ErrorKind::AlreadyExists, format!("{text} is there and is no directory")).with_source(error))
        }
        Err(error) => Err(error),
    }
}

pub(crate) async fn remove(envd: &Envd, path: &Path, recursive: bool) -> Result<()> {
    let text = path_text(path, "path")?;
    // envd removes everything, and says nothing when there is nothing.
    let entry = entry(envd, text).await?;
    if metadata(&entry).is_dir() && !recursive {
        let said = envd.script("rmdir -- \"$1\"", &[text]).await?;
        return match said.code {
            0 => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Io,
                format!(
                    "{text} cannot be removed: {}",
                    String::from_utf8_lossy(&said.stderr).trim()
                ),
            )),
        };
    }
    envd.call::<Empty>("remove", &wire::remove(text, USER)).await.map(drop)
}

/// Unpacks a tar stream: uploaded as a file, as standard input of a program goes over the wire in small calls.
pub(crate) async fn upload_tar(envd: &Arc<Envd>, dir: &Path, tar: ByteStream) -> Result<()> {
    const UNPACK: &str = r#"mkdir -p -- "$2" && exec tar -x -p -o -f "$1" -C "$2""#;
    let dir = path_text(dir, "path")?;
    let scratch = Scratch::new(envd.clone(), format!("/tmp/.vf-tar-{}", random_hex(32)));
    upload(envd, scratch.path(), Content::Stream(tar)).await?;
    let said = envd.script(UNPACK, &[scratch.path(), dir]).await?;
    scratch.remove().await;
    if said.code == 0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Io,
        format!(
            "the archive cannot be unpacked in {dir}: {}",
            runtime_core::text::tail(&said.stderr, 500)
        ),
    ))
}

/// Packs the files, directories and symbolic links of `$1`.
const PACK: &str = r#"cd -- "$1" || exit 2
if command -v find >/dev/null 2>&1; then
find . \( -type f -o -type d -o -type l \) -print0 | tar -c -f - --null --no-recursion -T -
else tar -c -f - .
fi"#;

/// Checks that a directory can be packed, and says how.
pub(crate) async fn tar_command(envd: &Envd, dir: &Path) -> Result<Vec<OsString>> {
    let text = path_text(dir, "path")?;
    match WireType::try_from(entry(envd, text).await?.r#type) {
        Ok(WireType::Directory) => Ok(["sh", "-c", PACK, "sh", text].map(OsString::from).to_vec()),
        _ => Err(Error::new(ErrorKind::WrongFileType, format!("{text} is no directory"))),
    }
}

/// The output of a program as a stream that fails if the program does.
pub(crate) fn output_stream(mut process: Process) -> Result<ByteStream> {
    let (Some(stdout), Some(stderr)) = (process.stdout.take(), process.stderr.take()) else {
        return Err(error::unreadable("the program", "it has no output"));
    };
    // What tar complains about is small; its beginning is enough.
    let said = tokio::spawn(async move {
        let mut said = Vec::new();
        let mut stderr = stderr;
        let _ = (&mut stderr).take(4096).read_to_end(&mut said).await;
        let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
        said
    });
    let ending = async move {
        let status = process.wait().await?;
        // 1 is tar's word for files that changed while they were read.
        if matches!(status.code(), Some(0 | 1)) {
            return Ok(());
        }
        let said = said.await.unwrap_or_default();
        Err(Error::new(
            ErrorKind::Io,
            format!(
                "the directory cannot be packed: {}",
                String::from_utf8_lossy(&said).trim()
            ),
        ))
    };
    Ok(ByteStream::new(Packed {
        stdout,
        ending: Some(Box::pin(ending)),
    }))
}

type Ending = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// Standard output, and at its end the question how the program ended. Owns the program: dropping it kills it.
struct Packed {
    stdout: runtime_core::ProcessStdout,
    ending: Option<Ending>,
}

impl AsyncRead for Packed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stdout).poll_read(cx, buf))?;
        if buf.filled().len() == before
            && buf.remaining() > 0
            && let Some(ending) = &mut self.ending
        {
            let ended = ready!(ending.as_mut().poll(cx));
            self.ending = None;
            ended.map_err(io::Error::other)?;
        }
        Poll::Ready(Ok(()))
    }
}
