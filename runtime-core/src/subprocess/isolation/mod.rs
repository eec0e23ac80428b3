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
//! user-mode page faults. Process 1 cannot be traced, read or killed from inside.
//!
//! Groups of an ordinary owner stay with the programs: the kernel lets nobody but root drop them. What a group of the
//! owner's may read on the visible part of the file system, they may.
//!
//! # Limits
//!
//! `cpu_seconds` and `file_size` are resource limits (`setrlimit`) of each process. The others hold for the box as a whole
//! where a cgroup of version 2 with their controllers was delegated to the owner: a service or scope of systemd's with
//! `Delegate=yes`, a user's own manager (`systemd-run --user --scope`), or root. [`cgroups`] tells whether that is so.
//!
//! | field | with a delegated cgroup | without |
//! | --- | --- | --- |
//! | `cpu` | `cpu.max` | **refused**, before anything is created: nothing else holds a box to a number of cores |
//! | `memory` | `memory.max`, without swap; a kill for it is told | address space of *each* program, and of the files in memory: many programs may take more together |
//! | `pids_limit` | `pids.max` | processes of the box's user in its user namespace; where root owns the box, of user 65533 in it |
//!
//! `info()["limits_by"]` says which of the two a box got. The group is removed with the box, and by the reaper for a dead
//! owner's.
//!
//! # Setup on the host's network
//!
//! With `setup_network = "host"` the programs of setup have this host's network, raw: its loopback, its routes, every
//! protocol, and **its abstract Unix sockets**, as any other program of the same user. Everything else is the box's: its
//! files, its process numbers, its user, its filter. That is less isolated, for setups that are trusted and cannot use a
//! proxy; `info()["setup_network"]` says so.
//!
//! - Those programs, background servers included, are not in the box's network: they listen on the host's loopback, where
//!   `expose` finds them while setup lasts, and can collide with others. They get no proxy's variables. `host_url` leaves
//!   URLs as they are.
//! - **No process of setup outlives it.** At `prepare_execution` the guest kills every process of the box in one step,
//!   forked and re-parented ones included, and waits until the kernel shows none but itself. Until then it starts nothing. A
//!   socket of the host's network cannot be handed on: with its last holder it is closed, and a descriptor that is under
//!   way in a socket goes with both of its ends. So start the servers of the execution phase after the cut. Whoever holds
//!   a live process sees it end by SIGKILL; `info()["ended_at_cut"]` is how many there were.
//! - Programs of the execution phase are started by process 1, in the box's network, with nothing but `lo` and the relays.
//!   This holds with `allow = ["*"]`, too. `prepare_setup` opens the host's network for another setup, once no program of
//!   the execution phase runs; its background servers stay in the box's network, and end at the next cut.
//! - With `root = "host"`, and in a root that has no `/etc/resolv.conf` or an ordinary file there, the box sees the host's.
//!
//! # How it ends
//! With its owner, at once and without help: the kernel ends the box when the host process is killed, whatever moment
//! that is, and its mounts with it. What stays is the directory with its workdir, which the lease is for.
//!
//! # What it is not
//! The kernel is shared. This is no boundary against somebody who exploits the kernel.

pub(super) mod cgroup;
mod copy;
mod diagnosis;
mod launch;
mod runtime;
mod view;

use std::path::Path;

use crate::cache::CacheDir;
use crate::error::{Error, Result};

pub use cgroup::NoCgroup;
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

/// Whether `cpu`, `memory` and `pids_limit` of a box can be enforced for all of its processes together, by a cgroup of
/// version 2. Reads some small files.
///
/// # Errors
/// What is missing. `cpu` is then refused, and `memory` and `pids_limit` are resource limits of each process.
pub fn cgroups() -> Result<(), NoCgroup> {
    let all = cgroup::Limits {
        cpu: Some(1.0),
        memory: Some(1 << 30),
        pids: Some(1),
    };
    cgroup::Place::find(&all).map(drop)
}

/// Who the programs of a box are, where it is not who the owner is.
fn box_user() -> Option<u32> {
    rustix::process::geteuid().is_root().then_some(BOX_USER)
}

/// An error about a field of the configuration that a look at the machine has shown.
fn wrong(field: String, path: &Path, error: &std::io::Error) -> Error {
    Error::invalid_config(field, format!("{}: {error}", path.display()))
}
