//! Standard input of a live process: a pipe to a task that sends it on, in order.
//!
//! What trickles is sent by a call for each piece, which is acknowledged. Where input comes faster than calls are
//! answered, it is streamed within one call, so that the distance to the box does not limit it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use runtime_core::retry::Idempotency;
use runtime_core::{ProcessStdin, Result};
use tokio::io::{AsyncRead, DuplexStream, ReadBuf};
use tokio::sync::watch;

use super::Ended;
use crate::envd::{Envd, call_timeout};
use crate::wire::process::{self as wire, Empty};

/// Bytes that are sent at once.
const PIECE: usize = 64 << 10;

/// Bytes that are looked for at once.
const SCRATCH: usize = 8 << 10;

/// A stream of input is ended, and so acknowledged, when nothing was written for this long.
const LULL: Duration = Duration::from_millis(100);

/// Makes the writing end, and the task behind it, which goes when the process ends.
pub(super) fn feed(envd: Arc<Envd>, pid: u32, mut ended: watch::Receiver<Ended>) -> ProcessStdin {
    let (ours, theirs) = tokio::io::duplex(PIECE);
    tokio::spawn(async move {
        tokio::select! {
            sent = send(&envd, pid, ours) => if let Err(error) = sent {
                // The reading end goes with this task, so the writer's pipe breaks. The end of the program says the rest.
                tracing::debug!(%error, pid, "e2b: standard input ends");
            },
            _ = ended.wait_for(Option::is_some) => {}
        }
    });
    ProcessStdin::new(theirs)
}

async fn send(envd: &Envd, pid: u32, ours: DuplexStream) -> Result<()> {
    let ours = Arc::new(tokio::sync::Mutex::new(ours));
    loop {
        let piece = read_piece(&ours).await;
        let piece = piece.map_err(|error| runtime_core::stream_error("reading stdin", error))?;
        if piece.is_empty() {
            break;
        }
        if piece.len() + SCRATCH <= PIECE {
            let request = wire::send_input(pid, piece);
            // No time limit: a program that does not read holds the call.
            let _: Empty = envd
                .unary("write stdin", Idempotency::OnlyIfUnsent, &request, None)
                .await?;
        } else if stream(envd, pid, piece, &ours).await? {
            break;
        }
    }
    let _: Empty = envd
        .unary(
            "close stdin",
            Idempotency::Safe,
            &wire::close_stdin(pid),
            Some(call_timeout()),
        )
        .await?;
    Ok(())
}

/// Streams what comes until there is a lull or the end; whether it was the end.
async fn stream(envd: &Envd, pid: u32, first: Bytes, ours: &Arc<tokio::sync::Mutex<DuplexStream>>) -> Result<bool> {
    let at_end = Arc::new(AtomicBool::new(false));
    let state = (ours.clone(), Some(first), at_end.clone());
    let pieces = futures_util::stream::unfold(state, |(ours, first, at_end)| async move {
        let piece = match first {
            Some(first) => Ok(first),
            None => match tokio::time::timeout(LULL, read_piece(&ours)).await {
                Ok(piece) => piece,
                Err(_) => return None,
            },
        };
        if piece.as_ref().is_ok_and(Bytes::is_empty) {
            at_end.store(true, Ordering::SeqCst);
            return None;
        }
        Some((piece.map(wire::stream_input_data), (ours, None, at_end)))
    });
    envd.stream_input(pid, pieces).await?;
    Ok(at_end.load(Ordering::SeqCst))
}

/// The next piece; empty at the end. Cancel safe. An idle process holds no buffer: it is made when there is something to
/// put in.
async fn read_piece(ours: &tokio::sync::Mutex<DuplexStream>) -> io::Result<Bytes> {
    let mut ours = ours.lock().await;
    let mut piece = BytesMut::new();
    std::future::poll_fn(|cx| poll_piece(&mut *ours, &mut piece, cx)).await?;
    Ok(piece.freeze())
}

/// Reads what is there.
fn poll_piece(
    reader: &mut (impl AsyncRead + Unpin),
    piece: &mut BytesMut,
    cx: &mut Context<'_>,
) -> Poll<io::Result<()>> {
    let mut scratch = [std::mem::MaybeUninit::uninit(); SCRATCH];
    loop {
        let mut buf = ReadBuf::uninit(&mut scratch);
        match Pin::new(&mut *reader).poll_read(cx, &mut buf) {
            Poll::Ready(Ok(())) => {
                if buf.filled().is_empty() {
                    return Poll::Ready(Ok(()));
                }
                piece.extend_from_slice(buf.filled());
                if piece.len() + SCRATCH > PIECE {
                    return Poll::Ready(Ok(()));
                }
            }
            Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            Poll::Pending if piece.is_empty() => return Poll::Pending,
            Poll::Pending => return Poll::Ready(Ok(())),
        }
    }
}
