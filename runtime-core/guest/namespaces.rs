//! The system calls that make a box out of a process: namespaces, mounts, credentials, limits.
//!
//! Only calls on integers, descriptors and NUL-terminated strings; nothing here keeps or follows a pointer.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

pub(crate) const NEW_MOUNTS: c_int = 0x0002_0000;
pub(crate) const NEW_CGROUP: c_int = 0x0200_0000;
pub(crate) const NEW_UTS: c_int = 0x0400_0000;
pub(crate) const NEW_IPC: c_int = 0x0800_0000;
pub(crate) const NEW_USER: c_int = 0x1000_0000;
pub(crate) const NEW_PID: c_int = 0x2000_0000;
pub(crate) const NEW_NET: c_int = 0x4000_0000;

pub(crate) const READ_ONLY: u64 = 0x1;
pub(crate) const NO_SUID: u64 = 0x2;
pub(crate) const NO_DEV: u64 = 0x4;
pub(crate) const NO_EXEC: u64 = 0x8;

const AT_FDCWD: c_int = -100;
const AT_RECURSIVE: c_uint = 0x8000;
const AT_EMPTY_PATH: c_uint = 0x1000;
const AT_SYMLINK_NOFOLLOW: c_uint = 0x100;
const CLOEXEC: c_uint = 0o2_000_000;

/// Since Linux 5.1 every architecture has the same numbers; two older ones differ.
mod number {
    use super::c_long;
    pub(super) const OPEN_TREE: c_long = 428;
    pub(super) const MOVE_MOUNT: c_long = 429;
    pub(super) const FSOPEN: c_long = 430;
    pub(super) const FSCONFIG: c_long = 431;
    pub(super) const FSMOUNT: c_long = 432;
    pub(super) const MOUNT_SETATTR: c_long = 442;
    #[cfg(target_arch = "x86_64")]
    pub(super) const PIVOT_ROOT: c_long = 155;
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) const PIVOT_ROOT: c_long = 41;
    #[cfg(target_arch = "x86_64")]
    pub(super) const CAPSET: c_long = 126;
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) const CAPSET: c_long = 91;
    #[cfg(target_arch = "x86_64")]
    pub(super) const SETGROUPS: c_long = 116;
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) const SETGROUPS: c_long = 159;
    #[cfg(target_arch = "x86_64")]
    pub(super) const SETRESUID: c_long = 117;
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) const SETRESUID: c_long = 147;
    #[cfg(target_arch = "x86_64")]
    pub(super) const SETRESGID: c_long = 119;
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) const SETRESGID: c_long = 149;
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn unshare(flags: c_int) -> c_int;
    fn setns(fd: c_int, kind: c_int) -> c_int;
    fn fork() -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn mount(
        source: *const c_char,
        target: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_void,
    ) -> c_int;
    fn umount2(target: *const c_char, flags: c_int) -> c_int;
    fn prctl(option: c_int, ...) -> c_int;
    fn sethostname(name: *const c_char, len: usize) -> c_int;
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
    fn geteuid() -> u32;
    fn getegid() -> u32;
}

fn check(result: c_long) -> io::Result<c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result as c_int)
    }
}

/// A path as the kernel takes it.
pub(crate) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// The effective user and group.
pub(crate) fn ids() -> (u32, u32) {
    // SAFETY: no preconditions.
    unsafe { (geteuid(), getegid()) }
}

/// Leaves the namespaces of these kinds for new ones (process ids: for the children).
pub(crate) fn leave(kinds: c_int) -> io::Result<()> {
    // SAFETY: an integer only. The process has one thread.
    check(unsafe { unshare(kinds) }.into()).map(drop)
}

/// Joins the namespace that this file of `/proc/PID/ns` stands for.
pub(crate) fn join(namespace: BorrowedFd<'_>, kind: c_int) -> io::Result<()> {
    // SAFETY: integers only. The process has one thread.
    check(unsafe { setns(namespace.as_raw_fd(), kind) }.into()).map(drop)
}

/// Goes on as two processes; `None` is the new one.
pub(crate) fn split() -> io::Result<Option<i32>> {
    // SAFETY: the process has one thread, so the child may do whatever its parent may.
    let pid = check(unsafe { fork() }.into())?;
    Ok((pid > 0).then_some(pid))
}

/// Waits for the end of a child and returns its exit code.
pub(crate) fn wait_for(pid: i32) -> u8 {
    let mut status = 0;
    loop {
        // SAFETY: `status` is a valid place for the result.
        if unsafe { waitpid(pid, &mut status, 0) } == pid {
            return match status & 0x7f {
                0 => (status >> 8) as u8,
                signal => 128 + signal as u8,
            };
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return 1;
        }
    }
}

/// Changes of mounts stay in this namespace, and those outside do not come in.
pub(crate) fn make_mounts_private() -> io::Result<()> {
    const RECURSIVE_PRIVATE: c_ulong = 0x4000 | 0x4_0000;
    // SAFETY: the string is static; the other pointers may be null for this operation.
    check(unsafe { mount(ptr::null(), c"/".as_ptr(), ptr::null(), RECURSIVE_PRIVATE, ptr::null()) }.into()).map(drop)
}

/// Mounts a file system of the kernel's own.
pub(crate) fn mount_new(kind: &CStr, target: &Path, attributes: u64, options: &CStr) -> io::Result<()> {
    let target = c_path(target)?;
    // SAFETY: four NUL-terminated strings that outlive the call. The low flags of `mount` are those of the attributes.
    let result = unsafe {
        mount(
            kind.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            attributes as c_ulong,
            options.as_ptr().cast(),
        )
    };
    check(result.into()).map(drop)
}

/// A private layer over a directory, not mounted anywhere yet.
pub(crate) fn overlay(lower: BorrowedFd<'_>, upper: BorrowedFd<'_>, work: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut options = Vec::new();
    for (name, directory) in [(c"lowerdir", lower), (c"upperdir", upper), (c"workdir", work)] {
        // By descriptor, because overlayfs gives colons and commas in a path a meaning.
        let path = c_path(Path::new(&format!("/proc/self/fd/{}", directory.as_raw_fd())))?;
        options.push((name, Some(path)));
    }
    // What an ordinary user may set on files of the layer.
    options.push((c"userxattr", None));
    new_tree(c"overlay", NO_SUID | NO_DEV, &options)
}

/// A file system of the kernel's own, not mounted anywhere yet.
pub(crate) fn new_tree(kind: &CStr, attributes: u64, options: &[(&CStr, Option<CString>)]) -> io::Result<OwnedFd> {
    const SET_FLAG: c_uint = 0;
    const SET_STRING: c_uint = 1;
    const CREATE: c_uint = 6;
    let nothing = ptr::null::<c_char>();
    // SAFETY: strings that outlive their calls, and integers. The results are new descriptors.
    unsafe {
        let context = OwnedFd::from_raw_fd(check(syscall(number::FSOPEN, kind.as_ptr(), 1 as c_uint))?);
        let fd = context.as_raw_fd();
        for (name, value) in options {
            let (command, value) = match value {
                Some(value) => (SET_STRING, value.as_ptr()),
                None => (SET_FLAG, nothing),
            };
            check(syscall(number::FSCONFIG, fd, command, name.as_ptr(), value, 0 as c_int))?;
        }
        check(syscall(number::FSCONFIG, fd, CREATE, nothing, nothing, 0 as c_int))?;
        let tree = check(syscall(number::FSMOUNT, fd, 1 as c_uint, attributes as c_uint))?;
        Ok(OwnedFd::from_raw_fd(tree))
    }
}

/// A second view of a tree of mounts, not mounted anywhere yet. A symbolic link at the end is not followed.
pub(crate) fn clone_tree(path: &Path) -> io::Result<OwnedFd> {
    const CLONE: c_uint = 1;
    let path = c_path(path)?;
    let flags = CLONE | CLOEXEC | AT_RECURSIVE | AT_SYMLINK_NOFOLLOW;
    // SAFETY: a string that outlives the call, and integers. The result is a new descriptor.
    unsafe {
        Ok(OwnedFd::from_raw_fd(check(syscall(
            number::OPEN_TREE,
            AT_FDCWD,
            path.as_ptr(),
            flags,
        ))?))
    }
}

/// Takes rights away from a tree of mounts.
pub(crate) fn narrow(tree: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    // `mount_attr`: set, clear, propagation, user namespace.
    let request: [u64; 4] = [attributes, 0, 0, 0];
    // SAFETY: the structure is valid, and its true size is given.
    let result = unsafe {
        syscall(
            number::MOUNT_SETATTR,
            tree.as_raw_fd(),
            c"".as_ptr(),
            AT_EMPTY_PATH | AT_RECURSIVE,
            request.as_ptr(),
            size_of_val(&request),
        )
    };
    check(result).map(drop)
}

/// Mounts a tree that is not mounted yet.
pub(crate) fn attach(tree: BorrowedFd<'_>, target: &Path) -> io::Result<()> {
    const EMPTY_SOURCE: c_uint = 0x4;
    const FOLLOW_TARGET: c_uint = 0x10;
    let target = c_path(target)?;
    // SAFETY: strings that outlive the call, and integers.
    let result = unsafe {
        syscall(
            number::MOVE_MOUNT,
            tree.as_raw_fd(),
            c"".as_ptr(),
            AT_FDCWD,
            target.as_ptr(),
            EMPTY_SOURCE | FOLLOW_TARGET,
        )
    };
    check(result).map(drop)
}

/// Makes the current directory, a mount of its own, the root, and lets go of the one before.
pub(crate) fn enter_root() -> io::Result<()> {
    const DETACH: c_int = 2;
    // SAFETY: static strings. Old and new root on the same place: the old one then lies on top, and is taken off.
    unsafe {
        check(syscall(number::PIVOT_ROOT, c".".as_ptr(), c".".as_ptr()))?;
        check(umount2(c".".as_ptr(), DETACH).into())?;
    }
    std::env::set_current_dir("/")
}

/// Gives up all supplementary groups.
pub(crate) fn drop_groups() -> io::Result<()> {
    // SAFETY: an empty list of groups.
    check(unsafe { syscall(number::SETGROUPS, 0 as c_long, ptr::null::<u32>()) }).map(drop)
}

/// Gives up group and user for others.
pub(crate) fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    let (uid, gid) = (c_long::from(uid), c_long::from(gid));
    // SAFETY: integers only.
    unsafe {
        check(syscall(number::SETRESGID, gid, gid, gid))?;
        check(syscall(number::SETRESUID, uid, uid, uid)).map(drop)
    }
}

/// Gives up every capability, for ever and for every program that is executed.
pub(crate) fn drop_capabilities() -> io::Result<()> {
    const PR_CAPBSET_DROP: c_int = 24;
    const PR_SET_NO_NEW_PRIVS: c_int = 38;
    const PR_CAP_AMBIENT: c_int = 47;
    const CLEAR_ALL: c_ulong = 4;
    const VERSION_3: u32 = 0x2008_0522;
    let zero: c_ulong = 0;
    // SAFETY: integers; a header and two records as version 3 has them, all zero.
    unsafe {
        for capability in 0..64 as c_ulong {
            // They are numbered without gaps: the first that this kernel does not know is the last. A process that has
            // none left may not do this, and executes nothing that could bring one back.
            if prctl(PR_CAPBSET_DROP, capability, zero, zero, zero) < 0 {
                break;
            }
        }
        check(prctl(PR_CAP_AMBIENT, CLEAR_ALL, zero, zero, zero).into())?;
        let header = [VERSION_3, 0];
        let none = [0u32; 6];
        check(syscall(number::CAPSET, header.as_ptr(), none.as_ptr()))?;
        check(prctl(PR_SET_NO_NEW_PRIVS, 1 as c_ulong, zero, zero, zero).into()).map(drop)
    }
}

/// SIGKILL for this process when the one that made it dies. Forgotten when credentials change.
pub(crate) fn die_with_parent() -> io::Result<()> {
    const PR_SET_PDEATHSIG: c_int = 1;
    let zero: c_ulong = 0;
    // SAFETY: integers only.
    check(unsafe { prctl(PR_SET_PDEATHSIG, 9 as c_ulong, zero, zero, zero) }.into()).map(drop)
}

/// Lets the owner's other processes read this one's environment, by which a reaper finds it.
pub(crate) fn set_dumpable() {
    const PR_SET_DUMPABLE: c_int = 4;
    let zero: c_ulong = 0;
    // SAFETY: integers only. Without it a reaper that is not root does not find the process, which dies all the same.
    unsafe {
        prctl(PR_SET_DUMPABLE, 1 as c_ulong, zero, zero, zero);
    }
}

/// Names the host.
pub(crate) fn set_host_name(name: &[u8]) -> io::Result<()> {
    // SAFETY: pointer and length are those of one valid slice.
    check(unsafe { sethostname(name.as_ptr().cast(), name.len()) }.into()).map(drop)
}

/// Switches the loopback interface on.
pub(crate) fn raise_loopback() -> io::Result<()> {
    const AF_INET: c_int = 2;
    const DGRAM_CLOEXEC: c_int = 2 | 0o2_000_000;
    const SET_FLAGS: c_ulong = 0x8914;
    const UP: i16 = 1;
    // `ifreq`: a name of 16 bytes and a union of 24.
    let mut request = [0u8; 40];
    request[..2].copy_from_slice(b"lo");
    request[16..18].copy_from_slice(&UP.to_ne_bytes());
    // SAFETY: the request is as large as the kernel reads; the socket is a new descriptor.
    unsafe {
        let socket = OwnedFd::from_raw_fd(check(socket(AF_INET, DGRAM_CLOEXEC, 0).into())?);
        check(ioctl(socket.as_raw_fd(), SET_FLAGS, request.as_ptr()).into()).map(drop)
    }
}
