//! Files in engine mode: by the box's own `sh`, `cat`, `head`, `stat`, `find`, `mv`, `rm` and `tar`.
//!
//! The engine's archive API would need none of these, but it writes as root, not in one step, and past file systems that
//! are mounted in the box. A program in the box sees and may what any other program there sees and may.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use runtime_core::{
    ByteStream, Collect, Content, DirEntry, Env, Error, ErrorKind, Exec, FileType, Metadata, Output, Process,
    ProcessStdout, Result, StdinMode, WriteOptions, stream_error,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::io::SyncIoBridge;

use super::process::Commands;
use runtime_core::feed::{checked, message_error, outcome};

/// Most bytes of a listing.
const LISTING: u64 = 64 << 20;

/// How long reading a FIFO or device may take in all.
const SPECIAL_READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest answer that comes before a file's bytes.
const HEADER: u64 = 64;

/// A script with its arguments.
fn script(text: &str, arguments: &[&OsStr], stdin: StdinMode) -> Exec {
    let argv = ["sh", "-c", text, "sh"].map(OsString::from);
    Exec {
        argv: argv.into_iter().chain(arguments.iter().map(OsString::from)).collect(),
        // Messages are read, so they must be the ones that we know.
        env: Env::from_iter([("LC_ALL", "C")]),
        workdir: PathBuf::from("/"),
        stdin,
    }
}

/// The tools of the box are missing: nothing that the caller asked for is.
fn without_shell(error: Error) -> Error {
    match error.kind() {
        ErrorKind::ProgramNotFound | ErrorKind::ProgramNotExecutable => Error::unsupported(
            "in engine mode files need a shell and the usual tools in the image; `exec = \"guest\"` does not",
        )
        .with_source(error),
        _ => error,
    }
}

impl Commands {
    async fn scripted(self: &Arc<Self>, text: &str, arguments: &[&OsStr], limit: u64) -> Result<Output> {
        let process = self.spawn_collected(script(text, arguments, StdinMode::Null)).await?;
        let options = Collect {
            stdin: None,
            timeout: None,
            output_limit: limit,
            sink: None,
        };
        runtime_core::collect(process, options).await.map_err(without_shell)
    }

    async fn change(self: &Arc<Self>, what: &str, text: &str, arguments: &[&OsStr]) -> Result<()> {
        let output = self.scripted(text, arguments, 64 << 10).await?;
        match output.success() {
            true => Ok(()),
            false => Err(message_error(what, &output.stderr.bytes)),
        }
    }

    pub(crate) async fn stat(self: &Arc<Self>, path: &Path) -> Result<Metadata> {
        const TEXT: &str = r#"stat -c '%f %s %Y' -- "$1" && if [ -L "$1" ]; then readlink -- "$1"; fi"#;
        let output = self.scripted(TEXT, &[path.as_os_str()], 64 << 10).await?;
        if !output.success() {
            return Err(message_error(
                &format!("looking at {}", path.display()),
                &output.stderr.bytes,
            ));
        }
        let text = &output.stdout.bytes[..];
        let line_end = text.iter().position(|byte| *byte == b'\n').unwrap_or(text.len());
        let (line, rest) = text.split_at(line_end);
        let mut metadata = std::str::from_utf8(line)
            .ok()
            .and_then(describe)
            .ok_or_else(odd_listing)?;
        let target = rest.strip_prefix(b"\n").unwrap_or_default();
        if metadata.is_symlink() {
            let target = target.strip_suffix(b"\n").unwrap_or(target);
            metadata.link_target = Some(PathBuf::from(OsString::from_vec(target.to_vec())));
        }
        Ok(metadata)
    }

    pub(crate) async fn list(self: &Arc<Self>, path: &Path) -> Result<Vec<DirEntry>> {
        // A name has no slash, so the slash after it ends it whatever it consists of.
        const TEXT: &str = r#"cd -- "$1" || exit; find . ! -name . -prune -exec stat -c '%f %s %Y %n/' -- {} +"#;
        let output = self.scripted(TEXT, &[path.as_os_str()], LISTING).await?;
        if output.stdout.dropped > 0 {
            let message = format!("listing {}: more than {LISTING} bytes of names", path.display());
            return Err(Error::new(ErrorKind::LimitExceeded, message));
        }
        let vanished = |stderr: &[u8]| {
            String::from_utf8_lossy(stderr)
                .lines()
                .all(|line| line.contains("No such file"))
        };
        if !output.success() && (output.stdout.bytes.is_empty() || !vanished(&output.stderr.bytes)) {
            let error = message_error(&format!("listing {}", path.display()), &output.stderr.bytes);
            // A shell says of a file that it cannot change to it, not always why.
            if error.kind() == ErrorKind::Io && !self.stat(path).await?.is_dir() {
                return Err(Error::new(ErrorKind::WrongFileType, error.message().to_owned()));
            }
            return Err(error);
        }
        parse_listing(&output.stdout.bytes).ok_or_else(odd_listing)
    }

    pub(crate) async fn create_dir(self: &Arc<Self>, path: &Path) -> Result<()> {
        let what = &format!("creating {}", path.display());
        self.change(what, r#"mkdir -p -- "$1""#, &[path.as_os_str()]).await
    }

    pub(crate) async fn remove(self: &Arc<Self>, path: &Path, recursive: bool) -> Result<()> {
        const TEXT: &str = r#"
            [ -e "$1" ] || [ -L "$1" ] || { stat -- "$1" >/dev/null; exit 1; }
            if [ "$2" = all ]; then rm -rf -- "$1"
            elif [ -d "$1" ] && ! [ -L "$1" ]; then rmdir -- "$1"
            else rm -f -- "$1"; fi
        "#;
        let what = &format!("removing {}", path.display());
        let how = OsStr::new(if recursive { "all" } else { "one" });
        self.change(what, TEXT, &[path.as_os_str(), how]).await
    }

    pub(crate) async fn open(self: &Arc<Self>, path: &Path, limit: Option<u64>) -> Result<ByteStream> {
        // The first line says what it is; then come the bytes.
        const TEXT: &str = r#"
            if [ -d "$1" ]; then echo 'Is a directory' >&2; exit 1
            elif [ -f "$1" ]; then [ -r "$1" ] || { cat -- "$1"; exit 1; }; echo F
            elif [ -e "$1" ]; then [ -n "$2" ] || { echo 'Not a regular file' >&2; exit 1; }; echo S
            else stat -L -- "$1" >/dev/null; exit 1; fi
            if [ -n "$2" ]; then exec head -c "$2" -- "$1"; else exec cat -- "$1"; fi
        "#;
        let bound = limit
            .map(|limit| limit.min(i64::MAX as u64).to_string())
            .unwrap_or_default();
        let arguments = [path.as_os_str(), OsStr::new(&bound)];
        let mut process = self.spawn_collected(script(TEXT, &arguments, StdinMode::Null)).await?;
        let what = format!("reading {}", path.display());
        let Some(mut stdout) = process.stdout.take() else {
            return Err(odd_listing());
        };
        let mut header = Vec::new();
        while header.last() != Some(&b'\n') && (header.len() as u64) < HEADER {
            match stdout.read_u8().await {
                Ok(byte) => header.push(byte),
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(stream_error(&what, error)),
            }
        }
        match &header[..] {
            b"F\n" => Ok(with_rest(process, stdout, what, None)),
            b"S\n" => Ok(with_rest(process, stdout, what, Some(SPECIAL_READ_TIMEOUT))),
            _ => Err(failure_of(&mut process, &what).await),
        }
    }

    pub(crate) async fn read(self: &Arc<Self>, path: &Path, limit: u64) -> Result<bytes::Bytes> {
        let stream = self.open(path, Some(limit)).await?;
        let mut content = Vec::new();
        let read = stream.take(limit).read_to_end(&mut content).await;
        read.map_err(|error| stream_error("reading", error))?;
        Ok(content.into())
    }

    pub(crate) async fn write(self: &Arc<Self>, path: &Path, content: Content, options: WriteOptions) -> Result<()> {
        let what = format!("writing {}", path.display());
        let mode = options.mode.map(|mode| format!("{mode:o}")).unwrap_or_default();
        let temporary = format!(".sandbox-{}.tmp", runtime_core::names::random_hex(16));
        // Whatever becomes of this future, the temporary file does not stay.
        let mut undo = RemoveTemporary {
            commands: options.atomic.then(|| self.clone()),
            path: path.with_file_name(&temporary).into_os_string(),
        };
        let how = if options.atomic { temporary } else { String::new() };
        let size = match &content {
            Content::Bytes(bytes) => bytes.len().to_string(),
            Content::Stream(_) => String::new(),
        };
        let arguments = [path.as_os_str(), OsStr::new(&how), OsStr::new(&mode), OsStr::new(&size)];
        let mut process = self
            .spawn_collected(script(WRITE, &arguments, StdinMode::Piped))
            .await?;
        let fed = async {
            let Some(mut stdin) = process.stdin.take() else {
                return Ok(0);
            };
            let written = match content {
                Content::Bytes(bytes) => match stdin.write_all(&bytes).await {
                    Ok(()) => bytes.len() as u64,
                    // The script says why it reads no further.
                    Err(_) => 0,
                },
                Content::Stream(mut stream) => copy_in(&mut stream, &mut stdin)
                    .await
                    .map_err(|e| stream_error(&what, e))?,
            };
            let _ = stdin.shutdown().await;
            Ok::<_, Error>(written)
        };
        let written = match fed.await {
            Ok(written) => written,
            Err(error) => {
                // The caller's stream failed: nothing of it stays, and the caller may look at once.
                let _ = process.kill().await;
                drop(process);
                if let Some(commands) = undo.commands.take() {
                    let _ = commands.remove(Path::new(&undo.path), false).await;
                }
                return Err(error);
            }
        };
        let (status, stdout, stderr) = outcome(&mut process).await.map_err(without_shell)?;
        if !status.success() {
            // The script has removed it.
            undo.commands = None;
            return Err(message_error(&what, &stderr));
        }
        if size.is_empty() && options.atomic {
            // How long a stream is, is known only now.
            let target = stdout.strip_suffix(b"\n").unwrap_or(&stdout);
            let written = written.to_string();
            let temporary = OsStr::from_bytes(target);
            let arguments = [path.as_os_str(), temporary, OsStr::new(&mode), OsStr::new(&written)];
            temporary.clone_into(&mut undo.path);
            let committed = self.change(&what, COMMIT, &arguments).await;
            undo.commands = None;
            return committed;
        }
        undo.commands = None;
        Ok(())
    }

    pub(crate) async fn upload_tar(self: &Arc<Self>, dir: &Path, tar: ByteStream) -> Result<()> {
        const TEXT: &str = r#"mkdir -p -- "$1" && cd -- "$1" && tar -xf -"#;
        let what = format!("unpacking into {}", dir.display());
        let mut process = self
            .spawn_collected(script(TEXT, &[dir.as_os_str()], StdinMode::Piped))
            .await?;
        let mut tar = tar;
        if let Some(mut stdin) = process.stdin.take() {
            copy_in(&mut tar, &mut stdin)
                .await
                .map_err(|error| stream_error(&what, error))?;
            let _ = stdin.shutdown().await;
        }
        let (status, _, stderr) = outcome(&mut process).await.map_err(without_shell)?;
        match status.success() {
            true => Ok(()),
            false => Err(message_error(&what, &stderr)),
        }
    }

    pub(crate) async fn download_tar(self: &Arc<Self>, dir: &Path) -> Result<ByteStream> {
        const TEXT: &str = r#"
            [ -e "$1" ] || { stat -- "$1" >/dev/null; exit 1; }
            [ -d "$1" ] || { echo 'Not a directory' >&2; exit 1; }
            cd -- "$1" && echo D && exec tar -cf - .
        "#;
        let what = format!("packing {}", dir.display());
        let mut process = self
            .spawn_collected(script(TEXT, &[dir.as_os_str()], StdinMode::Null))
            .await?;
        let Some(mut stdout) = process.stdout.take() else {
            return Err(odd_listing());
        };
        let mut header = [0; 2];
        match stdout.read_exact(&mut header).await {
            Ok(_) if &header == b"D\n" => {}
            _ => return Err(failure_of(&mut process, &what).await),
        }
        // The box's `tar` packs special files too, and a file's second name as a link.
        let packed = with_rest(process, stdout, what, None);
        let (reader, writer) = tokio::io::duplex(1 << 20);
        let executor = tokio::runtime::Handle::current();
        let commands = self.clone();
        let dir = dir.to_path_buf();
        let filter = tokio::task::spawn_blocking(move || {
            let content = |path: &Path| executor.block_on(commands.read(&dir.join(path), u64::MAX));
            filter_tree(
                SyncIoBridge::new_with_handle(packed, executor.clone()),
                SyncIoBridge::new_with_handle(writer, executor.clone()),
                content,
            )
        });
        Ok(runtime_core::feed::behind(reader, filter))
    }
}

/// Passes files, directories and symbolic links on; a file's second name becomes a file with `content`.
fn filter_tree(input: impl Read, output: impl Write, content: impl Fn(&Path) -> Result<bytes::Bytes>) -> Result<()> {
    let bad = |error: std::io::Error| stream_error("packing", error);
    let mut archive = tar::Archive::new(input);
    let mut builder = tar::Builder::new(output);
    for entry in archive.entries().map_err(bad)? {
        let mut entry = entry.map_err(bad)?;
        let path = entry.path().map_err(bad)?.into_owned();
        let path = path.strip_prefix(".").unwrap_or(&path);
        if path.as_os_str().is_empty() {
            continue;
        }
        let mut header = entry.header().clone();
        match header.entry_type() {
            tar::EntryType::Symlink => {
                let target = entry.link_name().map_err(bad)?.unwrap_or_default().into_owned();
                header.set_size(0);
                builder.append_link(&mut header, path, &target).map_err(bad)?;
            }
            tar::EntryType::Directory => {
                header.set_size(0);
                builder.append_data(&mut header, path, std::io::empty()).map_err(bad)?;
            }
            tar::EntryType::Link => {
                let content = content(path)?;
                header.set_entry_type(tar::EntryType::Regular);
                header.set_size(content.len() as u64);
                builder.append_data(&mut header, path, &content[..]).map_err(bad)?;
            }
            tar::EntryType::Regular | tar::EntryType::Continuous => {
                header.set_size(entry.size());
                builder.append_data(&mut header, path, &mut entry).map_err(bad)?;
            }
            _ => {}
        }
    }
    builder.into_inner().and_then(|mut output| output.flush()).map_err(bad)
}

/// Path, name of a temporary file (empty: in place), mode (may be empty), size (empty: a stream, committed later).
/// Prints the temporary file's path where it is committed later. Links are followed; nothing but files is replaced.
const WRITE: &str = r#"
    # Podman loses what a program says that ends before its input does.
    refuse() { [ -z "$1" ] || echo "$1" >&2; cat >/dev/null; exit 1; }
    target=$1
    case $target in */*) parent=${target%/*};; *) parent=.;; esac
    [ -z "$parent" ] || mkdir -p -- "$parent" || refuse
    if [ -L "$target" ]; then target=$(readlink -f -- "$target") || refuse 'No such file: a link that leads nowhere'; fi
    if [ -d "$target" ]; then refuse 'Is a directory'; fi
    if [ -e "$target" ] && ! [ -f "$target" ]; then refuse 'Not a regular file'; fi
    if [ -z "$2" ]; then
        cat >"$target" && { [ -z "$3" ] || chmod "$3" -- "$target"; }
        exit
    fi
    case $target in */*) temporary=${target%/*}/$2;; *) temporary=$2;; esac
    cat >"$temporary" || { rm -f -- "$temporary"; refuse; }
    mode=$3
    [ -n "$mode" ] || ! [ -e "$target" ] || mode=$(stat -c %a -- "$target")
    [ -z "$mode" ] || chmod "$mode" -- "$temporary" || { rm -f -- "$temporary"; exit 1; }
    if [ -z "$4" ]; then printf '%s\n' "$temporary"; exit; fi
    if [ "$(stat -c %s -- "$temporary")" = "$4" ] && mv -f -- "$temporary" "$target"; then exit 0; fi
    rm -f -- "$temporary"
    echo 'the content did not arrive as a whole' >&2
    exit 1
"#;

/// Path, temporary file, mode, size that it must have.
const COMMIT: &str = r#"
    target=$1
    if [ -L "$target" ]; then target=$(readlink -f -- "$target") || exit; fi
    if [ "$(stat -c %s -- "$2")" = "$4" ] && mv -f -- "$2" "$target"; then exit 0; fi
    rm -f -- "$2"
    echo 'the content did not arrive as a whole' >&2
    exit 1
"#;

/// Removes a temporary file whose writer went away.
struct RemoveTemporary {
    commands: Option<Arc<Commands>>,
    path: OsString,
}

impl Drop for RemoveTemporary {
    fn drop(&mut self) {
        if let Some(commands) = self.commands.take() {
            let path = PathBuf::from(std::mem::take(&mut self.path));
            runtime_core::detach(async move {
                let _ = commands.remove(&path, false).await;
            });
        }
    }
}

fn odd_listing() -> Error {
    Error::new(
        ErrorKind::Protocol,
        "the tools of the box give no answer that can be read",
    )
}

/// From `%f %s %Y`: raw mode in hexadecimal, size, seconds.
fn describe(line: &str) -> Option<Metadata> {
    let mut fields = line.splitn(3, ' ');
    let raw = u32::from_str_radix(fields.next()?, 16).ok()?;
    let size = fields.next()?.parse().ok()?;
    let modified: i64 = fields.next()?.trim_end().parse().ok()?;
    let file_type = match raw & 0o170_000 {
        0o100_000 => FileType::File,
        0o040_000 => FileType::Directory,
        0o120_000 => FileType::Symlink,
        _ => FileType::Special,
    };
    let since = Duration::from_secs(modified.unsigned_abs());
    let modified = match modified >= 0 {
        true => SystemTime::UNIX_EPOCH.checked_add(since),
        false => SystemTime::UNIX_EPOCH.checked_sub(since),
    };
    Some(Metadata {
        file_type,
        size,
        mode: Some(raw & 0o7777),
        modified,
        link_target: None,
    })
}

/// Records `%f %s %Y ./name/`, each ended by a newline.
fn parse_listing(mut text: &[u8]) -> Option<Vec<DirEntry>> {
    let mut entries = Vec::new();
    while !text.is_empty() {
        let start = text.windows(3).position(|part| part == b" ./")?;
        let metadata = describe(std::str::from_utf8(text.get(..start)?).ok()?)?;
        text = text.get(start + 3..)?;
        let end = text.iter().position(|byte| *byte == b'/')?;
        let name = text.get(..end)?;
        text = text.get(end + 1..)?.strip_prefix(b"\n")?;
        if name.is_empty() {
            return None;
        }
        entries.push(DirEntry {
            name: OsString::from_vec(name.to_vec()),
            metadata,
        });
    }
    Some(entries)
}

/// Copies until the end of the source. A program that stops reading is not this side's error: it says why.
async fn copy_in(source: &mut ByteStream, sink: &mut (impl tokio::io::AsyncWrite + Unpin)) -> std::io::Result<u64> {
    let mut buffer = vec![0; 128 << 10];
    let mut total = 0;
    loop {
        let count = source.read(&mut buffer).await?;
        if count == 0 || sink.write_all(&buffer[..count]).await.is_err() {
            return Ok(total);
        }
        total += count as u64;
    }
}

/// The rest of a program's output.
fn with_rest(mut process: Process, stdout: ProcessStdout, what: String, timeout: Option<Duration>) -> ByteStream {
    process.stdout = Some(stdout);
    checked(process, what, timeout)
}

async fn failure_of(process: &mut Process, what: &str) -> Error {
    match outcome(process).await {
        Ok((.., stderr)) => message_error(what, &stderr),
        Err(error) => without_shell(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_read_whatever_the_names_consist_of() {
        let text = b"81a4 12 1700000000 ./a b\n81a4 9 1 /\n41ed 4096 -5 .///\n";
        assert!(parse_listing(text).is_none(), "a name without its mark");
        let text = b"81a4 12 1700000000 ./a b\nc/\n41ed 4096 -5 ./\xff/\na1ff 3 7 ./-l/\n";
        let entries = parse_listing(text).expect("entries");
        let names: Vec<_> = entries.iter().map(|entry| entry.name.as_bytes()).collect();
        assert_eq!(names, [&b"a b\nc"[..], b"\xff", b"-l"]);
        let kinds: Vec<_> = entries.iter().map(|entry| entry.metadata.file_type).collect();
        assert_eq!(kinds, [FileType::File, FileType::Directory, FileType::Symlink]);
        assert_eq!((entries[0].metadata.size, entries[0].metadata.mode), (12, Some(0o644)));
        assert!(entries[1].metadata.modified < Some(SystemTime::UNIX_EPOCH));
    }
}
