//! The few system calls that `std` lacks. All the unsafe code of the guest is in this file.
//!
//! The functions declared here are those of the C library that `std` is linked to anyway (glibc or musl), on 64-bit
//! little-endian Linux. Structures are laid out as the kernel has them, which both libraries share there.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::io;
use std::mem::size_of;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr;

use crate::frame::Step;

const EINTR: i32 = 4;
const ENOENT: i32 = 2;
const EACCES: i32 = 13;
const ENOTDIR: i32 = 20;
const ENAMETOOLONG: i32 = 36;
pub(crate) const EINPROGRESS: i32 = 115;

pub(crate) const SIGKILL: i32 = 9;
pub(crate) const SIGTERM: i32 = 15;
pub(crate) const SIGINT: i32 = 2;
pub(crate) const SIGCHLD: i32 = 17;
pub(crate) const SIGUSR1: i32 = 10;
pub(crate) const SIGUSR2: i32 = 12;

pub(crate) const POLLIN: i16 = 1;
pub(crate) const POLLOUT: i16 = 4;
pub(crate) const POLLERR: i16 = 8;
pub(crate) const POLLHUP: i16 = 16;

const PR_SET_DUMPABLE: c_int = 4;
const PR_SET_SECCOMP: c_int = 22;
const PR_CAPBSET_DROP: c_int = 24;
const PR_SET_CHILD_SUBREAPER: c_int = 36;
const PR_SET_NO_NEW_PRIVS: c_int = 38;

/// `CAP_NET_ADMIN` and `CAP_NET_RAW`: a guest may need the first, a restricted program neither.
const NETWORK_CAPABILITIES: [c_ulong; 2] = [12, 13];

const O_WRONLY: c_int = 1;
pub(crate) const O_NONBLOCK: c_int = 0o4000;
const O_CLOEXEC: c_int = 0o2_000_000;
const MSG_DONTWAIT: c_int = 0x40;
const MSG_CTRUNC: c_int = 0x8;
const MSG_NOSIGNAL: c_int = 0x4000;
const MSG_CMSG_CLOEXEC: c_int = 0x4000_0000;
const SOL_SOCKET: c_int = 1;
const SCM_RIGHTS: c_int = 1;
const SO_ERROR: c_int = 4;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const AF_NETLINK: c_int = 16;
const SOCK_STREAM: c_int = 1;
const SOCK_RAW: c_int = 3;
const RLIMIT_NOFILE: c_int = 7;

#[cfg(target_arch = "x86_64")]
mod number {
    pub(super) const SIGACTION: i64 = 13;
    pub(super) const SETGROUPS: i64 = 116;
    pub(super) const SETRESUID: i64 = 117;
    pub(super) const SETRESGID: i64 = 119;
}
/// The generic table: aarch64, riscv64, loongarch64.
#[cfg(not(target_arch = "x86_64"))]
mod number {
    pub(super) const SIGACTION: i64 = 134;
    pub(super) const SETGROUPS: i64 = 159;
    pub(super) const SETRESUID: i64 = 147;
    pub(super) const SETRESGID: i64 = 149;
}

/// Both C libraries reserve 1024 bits for a signal set; the kernel uses the first 64.
#[repr(C)]
struct SigSet([u64; 16]);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PollFd {
    pub(crate) fd: RawFd,
    pub(crate) events: i16,
    pub(crate) revents: i16,
}

#[repr(C)]
struct IoVec {
    base: *mut c_void,
    len: usize,
}

#[repr(C)]
struct MsgHdr {
    name: *mut c_void,
    name_len: u32,
    iov: *mut IoVec,
    iov_len: usize,
    control: *mut c_void,
    control_len: usize,
    flags: c_int,
}

/// Room for one control message with up to eight descriptors, aligned as `cmsghdr` needs it.
#[repr(C, align(8))]
struct Control([u8; 48]);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RLimit {
    pub(crate) soft: u64,
    pub(crate) hard: u64,
}

/// One instruction of a classic BPF program.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SockFilter {
    pub(crate) code: u16,
    pub(crate) jt: u8,
    pub(crate) jf: u8,
    pub(crate) k: u32,
}

#[repr(C)]
struct SockProgram {
    len: u16,
    filter: *const SockFilter,
}

#[repr(C)]
struct SockAddrNetlink {
    family: u16,
    pad: u16,
    pid: u32,
    groups: u32,
}

unsafe extern "C" {
    fn prctl(option: c_int, ...) -> c_int;
    fn poll(fds: *mut PollFd, count: c_ulong, timeout: c_int) -> c_int;
    fn sendmsg(fd: c_int, message: *const MsgHdr, flags: c_int) -> isize;
    fn recvmsg(fd: c_int, message: *mut MsgHdr, flags: c_int) -> isize;
    fn read(fd: c_int, buffer: *mut c_void, count: usize) -> isize;
    fn write(fd: c_int, buffer: *const c_void, count: usize) -> isize;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn close(fd: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    fn signalfd(fd: c_int, mask: *const SigSet, flags: c_int) -> c_int;
    fn sigfillset(set: *mut SigSet) -> c_int;
    fn sigemptyset(set: *mut SigSet) -> c_int;
    fn sigdelset(set: *mut SigSet, signal: c_int) -> c_int;
    fn sigaddset(set: *mut SigSet, signal: c_int) -> c_int;
    fn sigprocmask(how: c_int, set: *const SigSet, old: *mut SigSet) -> c_int;
    fn kill(pid: c_int, signal: c_int) -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn setsid() -> c_int;
    fn chdir(path: *const c_char) -> c_int;
    fn fork() -> c_int;
    fn clone(
        entry: extern "C" fn(*mut c_void) -> c_int,
        stack: *mut c_void,
        flags: c_int,
        argument: *mut c_void,
        ...
    ) -> c_int;
    fn execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    fn _exit(status: c_int) -> !;
    fn syscall(number: c_long, ...) -> c_long;
    fn getrlimit(resource: c_int, limit: *mut RLimit) -> c_int;
    fn setrlimit(resource: c_int, limit: *const RLimit) -> c_int;
    fn getenv(name: *const c_char) -> *mut c_char;
    fn geteuid() -> u32;
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn bind(fd: c_int, address: *const c_void, len: u32) -> c_int;
    fn connect(fd: c_int, address: *const c_void, len: u32) -> c_int;
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut u32) -> c_int;
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn check_len(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// The number of the calling thread's last error. Does not allocate.
fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Forbids others of the same user to trace this process, and to read its memory, environment and descriptors.
pub(crate) fn set_not_dumpable() -> io::Result<()> {
    // SAFETY: prctl with integers only; it takes its arguments as `unsigned long`.
    check(unsafe { prctl(PR_SET_DUMPABLE, 0 as c_ulong, 0 as c_ulong, 0 as c_ulong, 0 as c_ulong) }).map(drop)
}

/// Closes every descriptor that the guest was born with besides the standard three: they are nobody's business here,
/// and no program in the box may inherit them. To be called before anything is opened.
pub(crate) fn close_inherited() {
    const CLOSE_RANGE: c_long = 436;
    // SAFETY: nothing of this process owns a descriptor above 2 yet.
    unsafe {
        if syscall(CLOSE_RANGE, 3 as c_ulong, c_ulong::from(u32::MAX), 0 as c_ulong) < 0 {
            // A kernel before 5.9.
            for fd in 3..4096 {
                close(fd);
            }
        }
    }
}

/// Makes orphans of this process's descendants its own children, where it is not process 1.
pub(crate) fn set_subreaper() -> io::Result<()> {
    // SAFETY: as above.
    check(unsafe {
        prctl(
            PR_SET_CHILD_SUBREAPER,
            1 as c_ulong,
            0 as c_ulong,
            0 as c_ulong,
            0 as c_ulong,
        )
    })
    .map(drop)
}

/// Overwrites the value of a variable where the kernel put it at start, so that no copy of it stays in memory.
pub(crate) fn wipe_variable(name: &CStr) {
    // SAFETY: the guest is single-threaded, so nobody else reads or changes the environment; `getenv` returns a
    // NUL-terminated string in writable memory (the initial stack), of which only the bytes before NUL are written.
    unsafe {
        let mut at = getenv(name.as_ptr());
        while !at.is_null() && *at != 0 {
            ptr::write_volatile(at, b'0' as c_char);
            at = at.add(1);
        }
    }
}

/// Blocks every signal, forgets what the guest was born to ignore, so that programs ignore nothing, and returns a
/// descriptor on which SIGCHLD, SIGTERM, SIGINT and these further ones can be read.
pub(crate) fn take_signals(further: &[i32]) -> io::Result<OwnedFd> {
    const SIG_SETMASK: c_int = 2;
    let mut all = SigSet([0; 16]);
    let mut watched = SigSet([0; 16]);
    // SAFETY: both sets are valid, initialised memory of the size that either C library uses.
    unsafe {
        check(sigfillset(&mut all))?;
        // Faults of the guest itself must stay visible.
        for fault in [4, 5, 7, 8, 11] {
            check(sigdelset(&mut all, fault))?;
        }
        check(sigprocmask(SIG_SETMASK, &all, ptr::null_mut()))?;
        // A zeroed `sigaction` of the kernel's is the default action. By number, because the C library hides two
        // signals. Faults keep the handlers of `std`; KILL and STOP have none, and fail.
        let default = [0u64; 4];
        for signal in (1..=64).filter(|signal| ![7, 11].contains(signal)) {
            syscall(
                number::SIGACTION as c_long,
                signal as c_long,
                default.as_ptr(),
                ptr::null_mut::<u64>(),
                8 as c_long,
            );
        }
        check(sigemptyset(&mut watched))?;
        for signal in [SIGCHLD, SIGTERM, SIGINT].iter().chain(further) {
            check(sigaddset(&mut watched, *signal))?;
        }
        let fd = check(signalfd(-1, &watched, O_NONBLOCK | O_CLOEXEC))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// A signal that was received: its number, `si_code` and the sender's process id as seen from here.
pub(crate) struct Received {
    pub(crate) signal: i32,
    pub(crate) code: i32,
    pub(crate) pid: u32,
}

/// The next signal, if one is pending.
pub(crate) fn next_signal(fd: BorrowedFd<'_>) -> Option<Received> {
    let mut info = [0u8; 128];
    // SAFETY: the buffer is as large as one `signalfd_siginfo`.
    let count = unsafe { read(fd.as_raw_fd(), info.as_mut_ptr().cast(), info.len()) };
    if count != info.len() as isize {
        return None;
    }
    let word = |at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    Some(Received {
        signal: word(0) as i32,
        code: word(8) as i32,
        pid: word(12),
    })
}

/// Waits until one of the descriptors is ready or the time is over.
pub(crate) fn wait_ready(fds: &mut [PollFd], timeout_ms: i32) -> io::Result<()> {
    // SAFETY: pointer and length are those of one valid slice.
    let result = unsafe { poll(fds.as_mut_ptr(), fds.len() as c_ulong, timeout_ms) };
    match check(result) {
        Err(error) if error.raw_os_error() == Some(EINTR) => {
            for fd in fds {
                fd.revents = 0;
            }
            Ok(())
        }
        other => other.map(drop),
    }
}

/// Sends bytes on a socket without blocking, with at most one descriptor.
pub(crate) fn send(fd: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut iov = IoVec {
        base: bytes.as_ptr().cast_mut().cast(),
        len: bytes.len(),
    };
    let mut control = Control([0; 48]);
    let mut message = MsgHdr {
        name: ptr::null_mut(),
        name_len: 0,
        iov: &mut iov,
        iov_len: 1,
        control: ptr::null_mut(),
        control_len: 0,
        flags: 0,
    };
    if let Some(descriptor) = descriptor {
        control.0[..8].copy_from_slice(&20usize.to_ne_bytes());
        control.0[8..12].copy_from_slice(&SOL_SOCKET.to_ne_bytes());
        control.0[12..16].copy_from_slice(&SCM_RIGHTS.to_ne_bytes());
        control.0[16..20].copy_from_slice(&descriptor.as_raw_fd().to_ne_bytes());
        message.control = control.0.as_mut_ptr().cast();
        message.control_len = 24;
    }
    // SAFETY: all pointers in `message` refer to locals that outlive the call; the kernel only reads the bytes.
    check_len(unsafe { sendmsg(fd.as_raw_fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) })
}

/// Receives bytes from a socket without blocking, and the descriptors that come with them.
pub(crate) fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut iov = IoVec {
        base: buffer.as_mut_ptr().cast(),
        len: buffer.len(),
    };
    let mut control = Control([0; 48]);
    let mut message = MsgHdr {
        name: ptr::null_mut(),
        name_len: 0,
        iov: &mut iov,
        iov_len: 1,
        control: control.0.as_mut_ptr().cast(),
        control_len: control.0.len(),
        flags: 0,
    };
    // SAFETY: all pointers in `message` refer to locals or to `buffer`, with their true sizes.
    let count = check_len(unsafe { recvmsg(fd.as_raw_fd(), &mut message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) })?;
    let filled = &control.0[..message.control_len.min(control.0.len())];
    if let Some((head, rest)) = filled.split_at_checked(16) {
        let word = |at: usize| i32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let len = word(0) as usize;
        if word(8) == SOL_SOCKET && word(12) == SCM_RIGHTS {
            for fd in rest[..len.saturating_sub(16).min(rest.len())].chunks_exact(4) {
                let fd = RawFd::from_ne_bytes([fd[0], fd[1], fd[2], fd[3]]);
                // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
                descriptors.push(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
    }
    if message.flags & MSG_CTRUNC != 0 {
        return Err(io::Error::other("too many descriptors in one message"));
    }
    Ok(count)
}

/// Reads without taking ownership.
pub(crate) fn read_fd(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: pointer and length are those of one valid slice.
    check_len(unsafe { read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) })
}

/// Writes without taking ownership.
pub(crate) fn write_fd(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: pointer and length are those of one valid slice.
    check_len(unsafe { write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) })
}

/// Switches a descriptor to non-blocking operation.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    const F_GETFL: c_int = 3;
    const F_SETFL: c_int = 4;
    // SAFETY: fcntl with integers only.
    unsafe {
        let flags = check(fcntl(fd.as_raw_fd(), F_GETFL))?;
        check(fcntl(fd.as_raw_fd(), F_SETFL, flags | O_NONBLOCK)).map(drop)
    }
}

/// Sends a signal to a process, or to a group (negative), or to everything else (-1). Number 0 only asks.
pub(crate) fn send_signal(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { kill(pid, signal) }).map(drop)
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Code(i32),
    Signal(i32),
}

/// Reaps one child that has ended, if there is one.
pub(crate) fn reap() -> Option<(i32, End)> {
    const WNOHANG: c_int = 1;
    let mut status = 0;
    // SAFETY: `status` is a valid place for the result.
    let pid = unsafe { waitpid(-1, &mut status, WNOHANG) };
    if pid <= 0 {
        return None;
    }
    Some((
        pid,
        match status & 0x7f {
            0 => End::Code((status >> 8) & 0xff),
            signal => End::Signal(signal),
        },
    ))
}

/// The effective user id.
pub(crate) fn user_id() -> u32 {
    // SAFETY: has no preconditions.
    unsafe { geteuid() }
}

/// Raises the soft limit of open descriptors to the hard one; returns the limits as they were.
pub(crate) fn raise_descriptor_limit() -> Option<RLimit> {
    let mut limit = RLimit { soft: 0, hard: 0 };
    // SAFETY: `limit` is a valid place for the result, and valid to read from.
    unsafe {
        check(getrlimit(RLIMIT_NOFILE, &mut limit)).ok()?;
        let raised = RLimit {
            soft: limit.hard,
            hard: limit.hard,
        };
        check(setrlimit(RLIMIT_NOFILE, &raised)).ok()?;
    }
    Some(limit)
}

/// Everything that a child needs between its creation and its program, prepared beforehand: the child shares the
/// guest's memory and must not allocate.
pub(crate) struct Plan<'a> {
    /// Paths to try in turn.
    pub(crate) candidates: &'a [CString],
    pub(crate) argv: &'a [CString],
    pub(crate) env: &'a [CString],
    pub(crate) cwd: &'a CStr,
    /// User, group, supplementary groups.
    pub(crate) user: Option<(u32, u32, &'a [u32])>,
    pub(crate) stdio: [BorrowedFd<'a>; 3],
    /// Decimal digits for `/proc/self/oom_score_adj`.
    pub(crate) oom_score_adj: &'a CStr,
    pub(crate) filter: Option<&'a [SockFilter]>,
    pub(crate) descriptor_limit: Option<RLimit>,
    /// Further limits by their `RLIMIT_*` number, soft and hard.
    pub(crate) limits: &'a [(i32, RLimit)],
}

struct Shared<'a> {
    plan: &'a Plan<'a>,
    argv: *const *const c_char,
    env: *const *const c_char,
    failure: Option<(Step, i32)>,
}

/// A stack for children, used by one at a time: the guest stands still until the child has executed or ended.
pub(crate) struct ChildStack(Vec<u128>);

impl ChildStack {
    pub(crate) fn new() -> Self {
        Self(vec![0; (64 << 10) / size_of::<u128>()])
    }
}

/// Starts a program as `posix_spawn` does: the child borrows the guest's memory until it executes, so that nothing is
/// copied, and tells through that memory which step failed.
pub(crate) fn spawn(plan: &Plan<'_>, stack: &mut ChildStack) -> Result<i32, (Step, i32)> {
    const CLONE_VM: c_int = 0x100;
    const CLONE_VFORK: c_int = 0x4000;
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
    };
    let (argv, env) = (pointers(plan.argv), pointers(plan.env));
    let mut shared = Shared {
        plan,
        argv: argv.as_ptr(),
        env: env.as_ptr(),
        failure: None,
    };
    let top = stack.0.as_mut_ptr_range().end;
    // SAFETY: `top` is the aligned end of memory that nothing else uses. CLONE_VFORK suspends this thread (the only
    // one) until the child has executed or exited, so the child has exclusive use of that stack, of `shared` and of
    // everything that `plan` borrows, all of which outlive the call. All signals are blocked here and therefore in
    // the child, so no handler runs on the borrowed memory. Without CLONE_SIGHAND and CLONE_FILES the child changes
    // its own signal dispositions and descriptors only.
    let pid = unsafe {
        clone(
            run_child,
            top.cast(),
            CLONE_VM | CLONE_VFORK | SIGCHLD,
            (&raw mut shared).cast(),
        )
    };
    if pid < 0 {
        return Err((Step::Fork, errno()));
    }
    // SAFETY: `shared` is a live local. The child wrote to it through the pointer that it was given, so it is read
    // through memory and not from what the compiler may believe about it.
    let failure = unsafe { ptr::read_volatile(&raw const shared.failure) };
    match failure {
        None => Ok(pid),
        Some(failure) => {
            // It has exited; collect it before anybody else hears of it.
            // SAFETY: a null status is allowed.
            unsafe { waitpid(pid, ptr::null_mut(), 0) };
            Err(failure)
        }
    }
}

/// The child's side of [`spawn`]. Calls nothing that allocates, locks or depends on other threads.
extern "C" fn run_child(argument: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes a pointer to its `Shared`, which nobody else touches meanwhile.
    let shared = unsafe { &mut *argument.cast::<Shared<'_>>() };
    let failure = prepare_and_execute(shared);
    // SAFETY: as above. Volatile, because the reader is another process as far as the compiler can tell.
    unsafe {
        ptr::write_volatile(&raw mut shared.failure, Some(failure));
        _exit(127)
    }
}

fn prepare_and_execute(shared: &Shared<'_>) -> (Step, i32) {
    const SIG_SETMASK: c_int = 2;
    const SECCOMP_MODE_FILTER: c_ulong = 2;
    let plan = shared.plan;
    // SAFETY: plain system calls on integers and on NUL-terminated strings and arrays that `spawn` prepared. The raw
    // `set*id` calls are meant: the C library's would try to change other threads too.
    unsafe {
        if setsid() < 0 {
            return (Step::Session, errno());
        }
        // Descriptors that were received are above 2, because the guest keeps 0, 1 and 2 open, and close on exec.
        for (target, fd) in (0..).zip(&plan.stdio) {
            if dup2(fd.as_raw_fd(), target) < 0 {
                return (Step::Stdio, errno());
            }
        }
        // Best effort: without /proc the child keeps the guest's score.
        let score = open(c"/proc/self/oom_score_adj".as_ptr(), O_WRONLY | O_CLOEXEC);
        if score >= 0 {
            write(
                score,
                plan.oom_score_adj.as_ptr().cast(),
                plan.oom_score_adj.count_bytes(),
            );
            close(score);
        }
        if let Some(limit) = plan.descriptor_limit {
            setrlimit(RLIMIT_NOFILE, &limit);
        }
        if plan.filter.is_some() {
            // A guest that may not drop them is not root, and its children never come to have them.
            let zero: c_ulong = 0;
            for capability in NETWORK_CAPABILITIES {
                prctl(PR_CAPBSET_DROP, capability, zero, zero, zero);
            }
        }
        for (resource, limit) in plan.limits {
            if setrlimit(*resource, limit) < 0 {
                return (Step::User, errno());
            }
        }
        if let Some((uid, gid, groups)) = plan.user {
            let (uid, gid) = (c_long::from(uid), c_long::from(gid));
            if syscall(number::SETGROUPS as c_long, groups.len(), groups.as_ptr()) < 0
                || syscall(number::SETRESGID as c_long, gid, gid, gid) < 0
                || syscall(number::SETRESUID as c_long, uid, uid, uid) < 0
            {
                return (Step::User, errno());
            }
        }
        if chdir(plan.cwd.as_ptr()) < 0 {
            return (Step::Chdir, errno());
        }
        let none = SigSet([0; 16]);
        sigprocmask(SIG_SETMASK, &none, ptr::null_mut());
        if let Some(filter) = plan.filter {
            let program = SockProgram {
                len: filter.len() as u16,
                filter: filter.as_ptr(),
            };
            let zero: c_ulong = 0;
            if prctl(PR_SET_NO_NEW_PRIVS, 1 as c_ulong, zero, zero, zero) < 0
                || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &raw const program, zero, zero) < 0
            {
                return (Step::Filter, errno());
            }
        }
        let mut denied = false;
        for path in plan.candidates {
            execve(path.as_ptr(), shared.argv, shared.env);
            match errno() {
                ENOENT | ENOTDIR | ENAMETOOLONG => {}
                EACCES => denied = true,
                other => return (Step::Exec, other),
            }
        }
        (Step::Exec, if denied { EACCES } else { ENOENT })
    }
}

/// Runs `work` in a child of its own, whose exit code is what `work` returns.
pub(crate) fn fork_helper(work: impl FnOnce() -> i32) -> io::Result<i32> {
    // SAFETY: the guest has one thread, so the child may do whatever the guest may.
    match check(unsafe { fork() })? {
        0 => {
            let code = work();
            // SAFETY: ends the child without running the guest's exit handlers.
            unsafe { _exit(code) }
        }
        pid => Ok(pid),
    }
}

/// A netlink socket for routing messages, subscribed to `groups`.
pub(crate) fn netlink(groups: u32) -> io::Result<OwnedFd> {
    // SAFETY: integers only; the result is a new descriptor.
    let fd = unsafe { OwnedFd::from_raw_fd(check(socket(AF_NETLINK, SOCK_RAW | O_CLOEXEC, 0))?) };
    let address = SockAddrNetlink {
        family: AF_NETLINK as u16,
        pad: 0,
        pid: 0,
        groups,
    };
    let len = size_of::<SockAddrNetlink>() as u32;
    // SAFETY: pointer and length are those of one valid structure.
    check(unsafe { bind(fd.as_raw_fd(), (&raw const address).cast(), len) })?;
    Ok(fd)
}

/// Starts to connect. The result is there once the socket is writable: see [`socket_error`].
pub(crate) fn start_connect(address: SocketAddr) -> io::Result<OwnedFd> {
    let mut raw = [0u8; 28];
    let (family, len) = match address {
        SocketAddr::V4(v4) => {
            raw[4..8].copy_from_slice(&v4.ip().octets());
            (AF_INET, 16)
        }
        SocketAddr::V6(v6) => {
            raw[8..24].copy_from_slice(&v6.ip().octets());
            raw[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            (AF_INET6, 28)
        }
    };
    raw[..2].copy_from_slice(&family.to_ne_bytes());
    raw[2..4].copy_from_slice(&address.port().to_be_bytes());
    // SAFETY: integers only; the result is a new descriptor.
    let fd = unsafe {
        OwnedFd::from_raw_fd(check(socket(
            c_int::from(family),
            SOCK_STREAM | O_NONBLOCK | O_CLOEXEC,
            0,
        ))?)
    };
    // SAFETY: the first `len` bytes of `raw` are a socket address of this family.
    match check(unsafe { connect(fd.as_raw_fd(), raw.as_ptr().cast(), len) }) {
        Err(error) if error.raw_os_error() != Some(EINPROGRESS) => Err(error),
        _ => Ok(fd),
    }
}

/// The pending error of a socket.
pub(crate) fn socket_error(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as u32;
    // SAFETY: value and length are valid places of these sizes.
    check(unsafe { getsockopt(fd.as_raw_fd(), SOL_SOCKET, SO_ERROR, (&raw mut value).cast(), &mut len) })?;
    match value {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Takes descriptors 0 and 1, which the program that started the guest has given to it, for the link.
pub(crate) fn take_stdio() -> io::Result<(OwnedFd, OwnedFd)> {
    const F_DUPFD_CLOEXEC: c_int = 1030;
    // SAFETY: integers only; the results are new descriptors.
    unsafe {
        let input = OwnedFd::from_raw_fd(check(fcntl(0, F_DUPFD_CLOEXEC, 3 as c_uint))?);
        let output = OwnedFd::from_raw_fd(check(fcntl(1, F_DUPFD_CLOEXEC, 3 as c_uint))?);
        Ok((input, output))
    }
}

/// Takes descriptor 0, which is a socket of the program that started the guest, for the link.
pub(crate) fn take_socket() -> io::Result<UnixStream> {
    const F_DUPFD_CLOEXEC: c_int = 1030;
    // SAFETY: integers only; the result is a new descriptor.
    unsafe { Ok(UnixStream::from_raw_fd(check(fcntl(0, F_DUPFD_CLOEXEC, 3 as c_uint))?)) }
}

/// A descriptor that is readable once the child has ended.
pub(crate) fn process_descriptor(pid: i32) -> io::Result<OwnedFd> {
    const PIDFD_OPEN: c_long = 434;
    // SAFETY: integers only; the result is a new descriptor.
    unsafe {
        let fd = syscall(PIDFD_OPEN, c_long::from(pid), 0 as c_long);
        Ok(OwnedFd::from_raw_fd(check(fd as c_int)?))
    }
}

/// Puts `fd` in the place of descriptors 0 and 1.
pub(crate) fn replace_stdio(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: integers only. `std` has no buffered state on these descriptors that matters.
    unsafe {
        check(dup2(fd.as_raw_fd(), 0))?;
        check(dup2(fd.as_raw_fd(), 1)).map(drop)
    }
}
