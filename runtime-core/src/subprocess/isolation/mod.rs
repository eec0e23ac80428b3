//! Boxes of namespaces: isolation by the kernel alone, without a daemon, an image or root.
//!
//! With `isolation = "namespaces"` a box of the embedded runtime is the [guest](crate::guest) as process 1 of user,
//! process, mount, network, IPC, UTS and cgroup namespaces of its own, made in some milliseconds by an ordinary user as
//! well as by root. [`availability`] tells whether this machine lets it, and if not, which command would.
//!
//! # What a box sees
//! - **Files.** With `root = "host"`, the files of this machine, read-only, but for those that are hidden: `/home`,
//!   `/root` and the owner's home directory wherever it is, `/run`, `/mnt`, `/media`, temporary directories, the cache
//!   directory of this crate, the state of container engines and of Kubernetes, and the files and sockets that
//!   variables such as `SSH_AUTH_SOCK`, `KUBECONFIG` or `DOCKER_HOST` point to. In their places are private, empty,
//!   writable directories in memory. Sockets that servers of this machine listen on are covered. `expose_paths` and
//!   `writable_paths` open more. With `root = DIR`, that directory and nothing else, under a private layer: boxes share
//!   the tree and leave it as it is (overlayfs; where the kernel refuses that, a copy).
//! - **A workdir** at [`WORKDIR`], private `/tmp` and `/dev/shm`, a `/dev` with the nodes that harm nobody, a fresh
//!   `/proc` and a read-only `/sys` of its own network.
//! - **Processes**: its own. **Environment**: none of the host's but `PATH` (with the host's files), `LANG`, `TZ`.
//! - **Network**: nothing but `lo`, in every phase. What leaves the box goes through the [proxy](crate::egress) that this
//!   process serves on it, to which `HTTP_PROXY` and its like point: in setup to anywhere but this host's loopback, after
//!   the cut to what `allow`, `block` and the routes say. A program that does not speak to a proxy has no network.
//!
//! # What its programs may do
//! They run as the user that the owner is, and as [`BOX_USER`] where the owner is root: nobody's files are theirs then,
//! and a path in `writable_paths` must be writable for that user. They have no capability and cannot gain any
//! (`no_new_privs`), see no other user id, and a system call filter refuses what a namespace does not confine: socket
//! families beyond Unix, IP and netlink, new namespaces, mounting, keyrings, BPF, io_uring, performance events,
//! user-mode page faults. Process 1 cannot be traced, read or killed from inside. `memory`, `cpu_seconds`, `pids_limit`
//! and `file_size` are resource limits.
//!
//! Groups of an ordinary owner stay with the programs: the kernel lets nobody but root drop them. What a group of the
//! owner's may read on the visible part of the file system, they may.
//!
//! # How it ends
//! With its owner, at once and without help: the kernel ends the box when the host process is killed, whatever moment
//! that is, and its mounts with it. What stays is the directory with its workdir, which the lease is for.
//!
//! # What it is not
//! The kernel is shared. This is no boundary against somebody who exploits the kernel.

mod copy;
mod diagnosis;
mod launch;
mod runtime;
mod view;

use std::path::Path;

use crate::cache::CacheDir;
use crate::error::{Error, Result};

pub use diagnosis::Unavailable;
pub use runtime::IsolatedRuntime;

/// Where a box sees its workdir.
pub const WORKDIR: &str = "/sandbox";

/// Whom programs run as, by user and group id, where root owns the box. Nothing on the host should belong to it.
pub const BOX_USER: u32 = 65_533;

/// Whether boxes of namespaces can be made here, found out by making one, in some milliseconds.
///
/// Blocks the thread meanwhile. The program of the guest is kept in the cache directory that the environment says.
///
/// # Errors
/// What is missing, and the command that would bring it, where one is known.
pub fn availability() -> Result<(), Unavailable> {
    let plan = launch::probe_plan();
    let result = launch::keep_program(&CacheDir::from_env()).and_then(|program| launch::probe(&program, &plan));
    result.map_err(|error| diagnosis::of(&error))
}

/// Who the programs of a box are, where it is not who the owner is.
fn box_user() -> Option<u32> {
    rustix::process::geteuid().is_root().then_some(BOX_USER)
}

/// An error about a field of the configuration that a look at the machine has shown.
fn wrong(field: String, path: &Path, error: &std::io::Error) -> Error {
    Error::invalid_config(field, format!("{}: {error}", path.display()))
}
