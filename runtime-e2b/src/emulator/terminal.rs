//! A program at a pseudo terminal.

use std::io;

use pty_process::{OwnedReadPty, OwnedWritePty, Size};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, ChildStdin, Command};

use crate::wire::process::PtySize;

/// What goes into a program.
#[derive(Debug)]
pub(super) enum Feed {
    Pipe(ChildStdin),
    Terminal(OwnedWritePty),
}

impl Feed {
    pub(super) async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Pipe(pipe) => {
                pipe.write_all(bytes).await?;
                pipe.flush().await
            }
            Self::Terminal(terminal) => terminal.write_all(bytes).await,
        }
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Changes the size of a terminal; whether it is one.
    pub(super) fn resize(&self, size: PtySize) -> io::Result<bool> {
        let Self::Terminal(terminal) = self else {
            return Ok(false);
        };
        terminal.resize(dimensions(size)).map_err(io::Error::other)?;
        Ok(true)
    }
}

fn dimensions(size: PtySize) -> Size {
    let short = |count: u32| u16::try_from(count).unwrap_or(u16::MAX);
    Size::new(short(size.rows), short(size.cols))
}

/// Starts a command that leads a session of its own at a new terminal.
pub(super) fn spawn(command: Command, size: PtySize) -> io::Result<(Child, OwnedReadPty, OwnedWritePty)> {
    let (terminal, program_side) = pty_process::open().map_err(io::Error::other)?;
    terminal.resize(dimensions(size)).map_err(io::Error::other)?;
    let child = pty_process::Command::from(command)
        .spawn(program_side)
        .map_err(io::Error::other)?;
    let (output, input) = terminal.into_split();
    Ok((child, output, input))
}
