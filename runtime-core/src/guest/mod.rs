//! The guest: a small static program of ours that is process 1 of a box, and the host's end of the link to it.
//!
//! The host hands the program ([`availability`]) to the engine as the box's entrypoint, waits for it on a socket
//! ([`Rendezvous`]) or talks to it over a pair of byte streams ([`Link::over_stdio`]), and from then on runs
//! programs, opens files, listens and dials in the box through the [`Link`]. Over a socket, what the guest opened
//! arrives as a descriptor: a program's standard output *is* a pipe of this process, and no byte passes through the
//! engine, the guest or a frame. Over byte streams the same calls work through multiplexed streams with credit.
//!
//! # The guest is not trusted
//!
//! What runs in the box may have taken it over. Every size, count, tag and descriptor that comes from it is checked,
//! no path or text from it is used, and what breaks the protocol ends the link: every operation under way fails with
//! [`Protocol`](crate::ErrorKind::Protocol), every later one too. When the guest goes away it is
//! [`SandboxGone`](crate::ErrorKind::SandboxGone). Every request has a deadline ([`LinkOptions`]), and every future
//! here may be dropped: what it had started in the box is given up or killed.
//!
//! One thing a hostile guest can still do is to keep a duplicate of a *listener* that it passed and to take a
//! connection between the moment that this process sees it and the moment that it accepts it. Listeners are switched
//! to non-blocking operation immediately before each accept, so that this costs the box a connection and the host
//! nothing. Reads of files happen on the blocking pool, because a file may live on a file system that the box serves.

mod boxed;
mod encoding;
mod files;
pub mod frame;
mod link;
mod listener;
mod net;
mod outbox;
#[cfg(feature = "isolation")]
pub(crate) mod plan;
mod process;
mod session;
mod stdio;

pub use boxed::{GuestBox, users};
pub use files::{DirEntry, FileReader, FileWriter, OpenWrite, WriteFile};
pub use link::{InterfaceWatch, Link, LinkOptions, Network};
pub use listener::{Rendezvous, SOCKET_ARGUMENTS, Token};
pub use net::{Connection, Listener};
pub use process::{Output, SpawnOptions, User};

include!(concat!(env!("OUT_DIR"), "/guest_program.rs"));

/// The program, or why it is not there.
///
/// It is a static executable for Linux on the architecture that this crate was built for, made by the build script
/// with the compiler of this crate. It is missing when neither a musl target nor the C library's static archive was
/// there, or on an architecture that it does not run on.
///
/// # Errors
/// The reason, for a person.
pub fn availability() -> Result<&'static [u8], &'static str> {
    PROGRAM
}
