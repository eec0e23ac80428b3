//! Standard input for Podman's exec, no faster than the program reads it.
//!
//! Podman gives up a program's whole connection, its output too, when the program ends with input on the way to it. So
//! what the program does not read is kept here: only what its pipe holds is on the way. What remains is the moment in
//! which a piece is handed on; [`is_broken_off`](super::start_failure::is_broken_off) tells when it was met.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::sleep;

use super::host::HostProcess;

/// Bytes that are handed on between two looks at the pipe. Podman's socket alone takes twelve times as much.
const PIECE: usize = 16 << 10;

/// Bytes in the program's pipe from which on nothing is added.
const ENOUGH: u64 = 32 << 10;

/// How long a piece may take to the program's pipe.
const TRANSIT: Duration = Duration::from_millis(1);

/// How long a program may take to end without ever having been given anything.
const FIRST: Duration = Duration::from_millis(50);

/// The longest time between two looks at a pipe that stays full.
const MOST_PATIENCE: Duration = Duration::from_millis(20);

/// Hands `from` on to `to` until its end, at the pace at which `process` reads, and closes `to`. Ends early with the
/// process, or when nobody reads `to` any more.
pub(super) async fn forward(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    process: Option<Arc<HostProcess>>,
) {
    let mut piece = bytes::BytesMut::with_capacity(PIECE);
    let mut unseen = 0;
    let mut is_first = true;
    loop {
        piece.clear();
        match (&mut from).take(PIECE as u64).read_buf(&mut piece).await {
            Ok(0) | Err(_) => break,
            Ok(count) => unseen += count,
        }
        if let Some(process) = &process {
            if std::mem::take(&mut is_first) {
                sleep(FIRST).await;
            }
            let mut patience = TRANSIT;
            while unread(process).is_some_and(|bytes| bytes > ENOUGH) {
                sleep(patience).await;
                patience = (patience * 2).min(MOST_PATIENCE);
            }
            if !process.is_alive() {
                return;
            }
        }
        if to.write_all(&piece).await.is_err() || to.flush().await.is_err() {
            return;
        }
        if unseen >= PIECE {
            unseen = 0;
            sleep(TRANSIT).await;
        }
    }
    let _ = to.shutdown().await;
}

/// Bytes that the program has not read from the pipe that is its standard input. `None` if it is another thing, or the
/// program has ended.
fn unread(process: &HostProcess) -> Option<u64> {
    // The program decides what its descriptor 0 is: nothing is opened that is not known to be a pipe.
    let found = rustix::fs::open(process.descriptor(0), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    if !process.is_alive() || FileType::from_raw_mode(rustix::fs::fstat(&found).ok()?.st_mode) != FileType::Fifo {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let path = format!("/proc/self/fd/{}", rustix::fd::AsRawFd::as_raw_fd(&found.as_fd()));
    let pipe = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    rustix::io::ioctl_fionread(&pipe).ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn process(child: &std::process::Child) -> Arc<HostProcess> {
        Arc::new(HostProcess::of_child(child.id()).expect("it runs"))
    }

    /// A program with a pipe for its input.
    fn start(program: &[&str]) -> std::process::Child {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().expect("started")
    }

    fn input(child: &mut std::process::Child) -> tokio::net::unix::pipe::Sender {
        let stdin = std::os::fd::OwnedFd::from(child.stdin.take().expect("a pipe"));
        tokio::net::unix::pipe::Sender::from_owned_fd(stdin).expect("a pipe")
    }

    #[tokio::test]
    async fn a_program_that_reads_nothing_gets_no_more_than_its_pipe_holds() {
        let mut child = start(&["sleep", "1000"]);
        let to = input(&mut child);
        let process = process(&child);
        let (mut ours, theirs) = tokio::io::duplex(1 << 20);
        let forwarded = tokio::spawn(forward(theirs, to, Some(process.clone())));
        ours.write_all(&[7; 1 << 20]).await.expect("taken");
        while unread(&process).is_none_or(|bytes| bytes <= ENOUGH) {
            sleep(TRANSIT).await;
        }
        sleep(MOST_PATIENCE * 3).await;
        let held = unread(&process).expect("a pipe");
        assert!(held <= ENOUGH + PIECE as u64, "{held}");
        assert!(!forwarded.is_finished());
        child.kill().expect("killed");
        child.wait().expect("ended");
        // The rest is not handed on.
        forwarded.await.expect("ended");
    }

    #[tokio::test]
    async fn all_bytes_arrive_with_the_end() {
        let mut child = start(&["wc", "-c"]);
        let to = input(&mut child);
        let process = process(&child);
        let bytes = vec![7; 1 << 20];
        forward(&bytes[..], to, Some(process)).await;
        let output = child.wait_with_output().expect("ended");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), (1 << 20).to_string());
    }

    #[tokio::test]
    async fn what_is_no_pipe_is_not_opened() {
        let mut child = Command::new("sleep")
            .arg("1000")
            .stdin(Stdio::null())
            .spawn()
            .expect("started");
        assert_eq!(unread(&process(&child)), None);
        child.kill().expect("killed");
        child.wait().expect("ended");
    }
}
