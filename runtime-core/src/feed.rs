//! Streams that end with the failure of what feeds them, for providers that stream through programs.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::command::ExitStatus;
use crate::error::{Error, ErrorKind, Result};
use crate::files::{ByteStream, stream_error};
use crate::process::Process;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::task::JoinHandle;

/// Bytes between a program and the reader of its output.
const PIPE: usize = 1 << 20;

/// Most of a program's messages that is kept.
const MESSAGES: u64 = 8 << 10;

/// The end of `reader` is the success of `feeder`, or its error. Dropping the stream ends the feeder.
pub fn behind(reader: DuplexStream, feeder: JoinHandle<Result<()>>) -> ByteStream {
    ByteStream::new(Behind {
        reader: Some(reader),
        feeder: Some(feeder),
    })
}

struct Behind {
    reader: Option<DuplexStream>,
    feeder: Option<JoinHandle<Result<()>>>,
}

impl AsyncRead for Behind {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(reader) = &mut self.reader {
            let before = buf.filled().len();
            match Pin::new(reader).poll_read(cx, buf) {
                Poll::Ready(Ok(())) if buf.filled().len() == before && buf.remaining() > 0 => self.reader = None,
                other => return other,
            }
        }
        let Some(feeder) = &mut self.feeder else {
            return Poll::Ready(Ok(()));
        };
        let Poll::Ready(joined) = Pin::new(feeder).poll(cx) else {
            return Poll::Pending;
        };
        self.feeder = None;
        Poll::Ready(match joined {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(io::Error::other(error)),
            Err(error) => Err(io::Error::other(error)),
        })
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        if let Some(feeder) = &self.feeder {
            feeder.abort();
        }
    }
}

/// What a program's last messages mean.
pub fn message_error(what: &str, stderr: &[u8]) -> Error {
    const KINDS: [(&str, ErrorKind); 11] = [
        ("No such file", ErrorKind::NotFound),
        ("Not a directory", ErrorKind::WrongFileType),
        ("Is a directory", ErrorKind::WrongFileType),
        ("Not a regular file", ErrorKind::WrongFileType),
        ("Permission denied", ErrorKind::PermissionDenied),
        ("Operation not permitted", ErrorKind::PermissionDenied),
        ("Read-only file system", ErrorKind::PermissionDenied),
        ("File exists", ErrorKind::AlreadyExists),
        ("No space left", ErrorKind::ResourceExhausted),
        ("Disk quota exceeded", ErrorKind::ResourceExhausted),
        ("Cannot allocate memory", ErrorKind::ResourceExhausted),
    ];
    let text = crate::text::tail(stderr, 500);
    let text = text.trim();
    let kind = KINDS
        .iter()
        .find(|(words, _)| text.contains(words))
        .map(|(_, kind)| *kind);
    Error::new(kind.unwrap_or(ErrorKind::Io), format!("{what}: {text}"))
}

/// Reads what a program still prints, a little of it, and its end.
///
/// # Errors
/// Those of [`Process::wait`].
pub async fn outcome(process: &mut Process) -> Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    async fn short(stream: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
        let mut text = Vec::new();
        if let Some(mut stream) = stream {
            let _ = (&mut stream).take(MESSAGES).read_to_end(&mut text).await;
            let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
        }
        text
    }
    let (stdout, stderr) = tokio::join!(short(process.stdout.take()), short(process.stderr.take()));
    Ok((process.wait().await?, stdout, stderr))
}

/// The rest of a program's standard output as a stream that ends with the program's failure, if it fails. Dropping the
/// stream kills the program.
pub fn checked(mut process: Process, what: String, timeout: Option<Duration>) -> ByteStream {
    let (reader, mut writer) = tokio::io::duplex(PIPE);
    let task = tokio::spawn(async move {
        let copy = async {
            if let Some(mut stdout) = process.stdout.take() {
                let mut buffer = vec![0; 128 << 10];
                loop {
                    let count = stdout
                        .read(&mut buffer)
                        .await
                        .map_err(|error| stream_error(&what, error))?;
                    if count == 0 || writer.write_all(&buffer[..count]).await.is_err() {
                        break;
                    }
                }
            }
            let (status, _, stderr) = outcome(&mut process).await?;
            match status.success() {
                true => Ok(()),
                false => Err(message_error(&what, &stderr)),
            }
        };
        let copied = match timeout {
            None => copy.await,
            Some(timeout) => tokio::time::timeout(timeout, copy).await.unwrap_or_else(|_| {
                let message = format!("{what}: the special file gave no end within {timeout:?}");
                Err(Error::new(ErrorKind::Timeout, message))
            }),
        };
        drop(writer);
        copied
    });
    behind(reader, task)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_their_kinds() {
        let kind = |text: &str| message_error("x", text.as_bytes()).kind();
        assert_eq!(
            kind("cat: can't open 'x': No such file or directory"),
            ErrorKind::NotFound
        );
        assert_eq!(
            kind("sh: can't create x: Read-only file system"),
            ErrorKind::PermissionDenied
        );
        assert_eq!(
            kind("cat: write error: No space left on device"),
            ErrorKind::ResourceExhausted
        );
        assert_eq!(kind("rmdir: 'x': Directory not empty"), ErrorKind::Io);
    }

    #[tokio::test]
    async fn a_stream_ends_with_its_feeders_error() {
        let (reader, mut writer) = tokio::io::duplex(16);
        let feeder = tokio::spawn(async move {
            writer.write_all(b"part").await.expect("read");
            drop(writer);
            Err(Error::new(ErrorKind::ConnectionLost, "broke"))
        });
        let mut stream = behind(reader, feeder);
        let mut part = [0; 4];
        stream.read_exact(&mut part).await.expect("a part");
        assert_eq!(&part, b"part");
        let error = stream.read_u8().await.expect_err("the feeder's");
        assert_eq!(stream_error("x", error).kind(), ErrorKind::ConnectionLost);
    }
}
