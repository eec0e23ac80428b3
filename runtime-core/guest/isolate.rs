//! A box without an engine: the guest makes the namespaces, mounts what the box sees, and becomes its process 1.
//!
//! Two processes. The first, the *keeper*, stays outside: a child of the host, it makes the second, waits for it, and
//! kills it when the host's end of the link is closed. The second is process 1; it dies with the keeper. So whichever
//! of host, keeper and guest is killed at whatever moment, the kernel ends the box with all of its processes and mounts.
//!
//! Everything of the host that the box is to see is taken hold of first, as mounts that are not mounted anywhere. Then
//! the root is changed, and they are mounted inside the new one, where no symbolic link can lead back.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::files;
use crate::frame::{Input, Wire};
use crate::hand::{Hand, Namespaces, Starter};
use crate::namespaces as ns;
use crate::plan::{FAILURE_PREFIX, MAX_PLAN, Plan};
use crate::sys::{self, POLLHUP, POLLIN, PollFd};

/// Directories of the host's root that the box has its own of, or does not have.
const OWN: [&str; 8] = ["proc", "sys", "dev", "run", "tmp", "root", "home", "lost+found"];
/// Device nodes that harm nobody.
const NODES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// Parts of `/proc` through which one box could reach another or the host, were a kernel to check less than it does.
const PROC_READ_ONLY: [&str; 4] = ["sys", "irq", "bus", "sysrq-trigger"];
const PROC_MASKED: [&str; 3] = ["kcore", "keys", "key-users"];

/// A step that failed, by the name that the host knows it by.
pub(crate) struct Failure {
    step: &'static str,
    what: String,
    error: io::Error,
}

type Step<T> = Result<T, Failure>;

trait At<T> {
    fn at(self, step: &'static str, what: impl AsRef<Path>) -> Step<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, step: &'static str, what: impl AsRef<Path>) -> Step<T> {
        self.map_err(|error| Failure {
            step,
            what: what.as_ref().display().to_string(),
            error,
        })
    }
}

impl Failure {
    /// The line for the host.
    pub(crate) fn line(&self) -> String {
        let errno = self.error.raw_os_error().unwrap_or(0);
        let what = self.what.replace(['\n', '\r'], " ");
        format!("{FAILURE_PREFIX}{}:{errno}:{what}: {}", self.step, self.error)
    }
}

/// Process 1 of a box that stands.
pub(crate) struct Inside {
    pub(crate) socket: UnixStream,
    pub(crate) limits: Vec<(u32, u64)>,
    /// The file that counts kills for lack of memory.
    pub(crate) oom_events: Option<File>,
    /// The keeper, where it starts programs on the host's network.
    pub(crate) hand: Option<Hand>,
}

/// Builds the box. Returns in process 1 only; the keeper leaves with its exit code, and so does a probe.
pub(crate) fn enter() -> Step<Inside> {
    let mut socket: UnixStream = sys::take_socket().at("link", "standard input")?;
    let plan = receive(&mut socket).at("link", "the plan")?;
    let (uid, gid) = ns::ids();
    let (box_uid, box_gid) = plan.user.map_or((uid, gid), |id| (id, id));
    let limits = limits(&plan);
    // Root makes the mounts as what it is, and enters a user namespace afterwards. Anybody else needs one to make them.
    let as_root = plan.user.is_some();
    if !as_root {
        ns::leave(ns::NEW_USER).at("user", "a new user namespace")?;
        map_ids(Path::new("/proc/self"), uid, gid).at("map", "the ids of the user namespace")?;
    }
    ns::leave(ns::NEW_PID).at("pid", "a new pid namespace")?;
    let (ours, theirs) = UnixStream::pair().at("link", "a pair of sockets")?;
    if let Some(pid) = ns::split().at("fork", "process 1")? {
        drop(theirs);
        let outside = plan.host_network.then_some(&limits[..]);
        keep(pid, socket, ours, as_root.then_some((box_uid, box_gid)), outside);
    }
    drop(ours);
    ns::die_with_parent().at("parent", "the signal of the parent's death")?;
    let sockets = host_sockets();
    let kinds = ns::NEW_MOUNTS | ns::NEW_NET | ns::NEW_IPC | ns::NEW_UTS;
    ns::leave(kinds).at("namespaces", "new mount, network, IPC and UTS namespaces")?;
    // A kernel without cgroup namespaces has nothing to hide by one.
    let _ = ns::leave(ns::NEW_CGROUP);
    // Nothing of the host's is seen once the box is built.
    let oom_events = plan
        .oom_events
        .as_ref()
        .and_then(|events| File::open(path(events)).ok());
    build(&plan, &sockets, box_uid, box_gid)?;
    ns::raise_loopback().at("loopback", "lo")?;
    ns::set_host_name(&plan.hostname).at("hostname", "the host name")?;
    let mut keeper = theirs;
    if as_root {
        lock_proc()?;
        ns::drop_groups().at("user", "no groups")?;
        ns::leave(ns::NEW_USER).at("user", "a new user namespace")?;
    }
    turn(&mut keeper).at("map", "the ids of the user namespace")?;
    if as_root {
        ns::become_user(box_uid, box_gid).at("user", "the box's user")?;
    } else {
        // No program gets a user namespace of its own, whatever a filter overlooks.
        let _ = fs::write("/proc/sys/user/max_user_namespaces", "0");
        lock_proc()?;
    }
    ns::drop_capabilities().at("capabilities", "no capabilities")?;
    // Both are forgotten when credentials change, so they come last; the keeper's answer says that it still lives.
    ns::die_with_parent().at("parent", "the signal of the parent's death")?;
    sys::set_not_dumpable().at("dumpable", "process 1")?;
    turn(&mut keeper).at("parent", "the keeper")?;
    if plan.probe {
        std::process::exit(0);
    }
    Ok(Inside {
        socket,
        limits,
        oom_events,
        hand: plan.host_network.then(|| Hand::new(keeper)),
    })
}

/// The resource limits of programs.
fn limits(plan: &Plan) -> Vec<(u32, u64)> {
    const NPROC: u32 = 6;
    // The guest itself counts as a process of the user; so does the keeper where it is in the user's name and namespace,
    // and with it the process by which it starts a program.
    let overhead = match (plan.user.is_some(), plan.host_network) {
        (true, false) => 1,
        (false, false) => 2,
        (_, true) => 3,
    };
    let limits = plan.limits.0.iter().map(|&(resource, value)| match resource {
        NPROC => (resource, value.saturating_add(overhead)),
        _ => (resource, value),
    });
    limits.collect()
}

fn receive(socket: &mut UnixStream) -> io::Result<Plan> {
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_PLAN {
        return Err(io::Error::other("the plan is too long"));
    }
    let mut body = vec![0; length];
    socket.read_exact(&mut body)?;
    let mut input = Input(&body);
    let plan = Plan::take(&mut input).map_err(io::Error::other)?;
    match input.0.is_empty() {
        true => Ok(plan),
        false => Err(io::Error::other("the plan has a tail")),
    }
}

fn map_ids(process: &Path, uid: u32, gid: u32) -> io::Result<()> {
    let write = |name: &str, text: String| {
        fs::OpenOptions::new()
            .write(true)
            .open(process.join(name))?
            .write_all(text.as_bytes())
    };
    write("setgroups", "deny".to_owned())?;
    write("uid_map", format!("{uid} {uid} 1"))?;
    write("gid_map", format!("{gid} {gid} 1"))
}

/// Asks the keeper for something and waits until it is done.
fn turn(keeper: &mut UnixStream) -> io::Result<()> {
    keeper.write_all(b"?")?;
    let mut answer = [0];
    keeper.read_exact(&mut answer)
}

/// The keeper's life. `map` is the box's user, for a box that root makes; `outside` are the limits of programs, where the
/// keeper is to start them on the host's network.
fn keep(
    pid: i32,
    link: UnixStream,
    mut inside: UnixStream,
    map: Option<(u32, u32)>,
    outside: Option<&[(u32, u64)]>,
) -> ! {
    // Before the box stands, from when on the host may send some.
    let signals = outside.and_then(|_| sys::take_signals(&[sys::SIGUSR1, sys::SIGUSR2]).ok());
    let served = (|| {
        let mut question = [0];
        inside.read_exact(&mut question)?;
        if let Some((uid, gid)) = map {
            map_ids(Path::new(&format!("/proc/{pid}")), uid, gid)?;
            ns::drop_groups()?;
        }
        if outside.is_some() {
            Namespaces::of(pid, map.is_some())?.join()?;
        }
        if let Some((uid, gid)) = map {
            ns::become_user(uid, gid)?;
        }
        ns::drop_capabilities()?;
        ns::set_dumpable();
        inside.write_all(b"!")?;
        inside.read_exact(&mut question)?;
        inside.write_all(b"!")
    })();
    let mut starter = match (&served, outside) {
        (Ok(()), Some(limits)) => Starter::new(inside, limits).ok(),
        _ => None,
    };
    if let Err(error) = served {
        // At the end of the conversation it is on its way out, and says why itself.
        if error.kind() != io::ErrorKind::UnexpectedEof {
            let failed = Err::<(), _>(error).at("map", "the ids of the user namespace");
            if let Err(failure) = failed {
                eprintln!("{}", failure.line());
            }
            let _ = sys::send_signal(pid, sys::SIGKILL);
        }
        std::process::exit(ns::wait_for(pid).into());
    }
    // Nothing of this process keeps the host's pipe open, or a directory that somebody may want to unmount.
    let _ = std::env::set_current_dir("/");
    let Ok(child) = sys::process_descriptor(pid) else {
        let _ = sys::send_signal(pid, sys::SIGKILL);
        std::process::exit(ns::wait_for(pid).into());
    };
    // A number below zero is not looked at.
    let number = |fd: Option<std::os::fd::BorrowedFd<'_>>| fd.map_or(-1, |fd| fd.as_raw_fd());
    // Whether the host allows programs on its network.
    let mut allowed = false;
    loop {
        let mut fds = [
            (link.as_raw_fd(), 0),
            (child.as_raw_fd(), POLLIN),
            (number(starter.as_ref().map(Starter::socket)), POLLIN),
            (number(signals.as_ref().map(AsFd::as_fd)), POLLIN),
        ]
        .map(|(fd, events)| PollFd { fd, events, revents: 0 });
        let failed = sys::wait_ready(&mut fds, -1).is_err();
        if fds[1].revents != 0 {
            break;
        }
        // All that were sent before a request, whether or not they were there when the wait began.
        let asked = asked_to_end(signals.as_ref(), &mut allowed);
        let broken = fds[2].revents != 0 && starter.as_mut().is_some_and(|starter| starter.serve(allowed).is_err());
        if failed || asked || broken || fds[0].revents & POLLHUP != 0 {
            // The guest sees it too; this is for one that cannot look.
            let _ = sys::send_signal(pid, sys::SIGKILL);
            break;
        }
    }
    std::process::exit(ns::wait_for(pid).into());
}

/// Whether a signal came that would have ended the keeper, did it not block them for the programs that it starts. Others
/// say whether the host allows that. The host waits until one is seen before it sends the other.
fn asked_to_end(signals: Option<&OwnedFd>, allowed: &mut bool) -> bool {
    let mut asked = false;
    while let Some(received) = signals.and_then(|signals| sys::next_signal(signals.as_fd())) {
        match received.signal {
            sys::SIGUSR1 => *allowed = false,
            sys::SIGUSR2 => *allowed = true,
            signal => asked |= signal != sys::SIGCHLD,
        }
    }
    asked
}

/// A mount that waits for its place.
struct Waiting {
    tree: OwnedFd,
    place: PathBuf,
    is_dir: bool,
}

fn take(source: &Path, place: PathBuf, attributes: u64) -> Step<Waiting> {
    let is_dir = fs::symlink_metadata(source).at("source", source)?.is_dir();
    let tree = ns::clone_tree(source).at("source", source)?;
    ns::narrow(tree.as_fd(), attributes).at("narrow", source)?;
    Ok(Waiting { tree, place, is_dir })
}

fn path(bytes: &[u8]) -> PathBuf {
    files::path(bytes).to_path_buf()
}

fn build(plan: &Plan, sockets: &[PathBuf], uid: u32, gid: u32) -> Step<()> {
    const OF_HOST: u64 = ns::READ_ONLY | ns::NO_SUID | ns::NO_DEV;
    const OF_BOX: u64 = ns::NO_SUID | ns::NO_DEV;
    ns::make_mounts_private().at("private", "/")?;
    let mut waiting = Vec::new();
    let mut links = Vec::new();
    if plan.root.is_none() {
        for entry in fs::read_dir("/").at("source", "/")?.flatten() {
            let name = entry.file_name();
            if OWN.iter().any(|own| name == *own) {
                continue;
            }
            let place = Path::new("/").join(&name);
            match entry.file_type() {
                Ok(kind) if kind.is_symlink() => links.extend(fs::read_link(&place).map(|to| (to, place))),
                // A directory that this user may not even look at is left out, like one that vanishes.
                Ok(kind) if kind.is_dir() || kind.is_file() => waiting.extend(take(&place, place.clone(), OF_HOST)),
                _ => {}
            }
        }
    }
    let mut late = Vec::new();
    for shown in &plan.shown.0 {
        let attributes = if shown.writable { OF_BOX } else { OF_HOST };
        late.push(take(&path(&shown.source), path(&shown.path), attributes)?);
    }
    if let Some(work) = &plan.work {
        late.push(take(&path(work), path(&plan.workdir), OF_BOX)?);
    }
    let mut nodes = Vec::new();
    for node in NODES {
        let place = Path::new("/dev").join(node);
        // One of the host's that is missing is missing here.
        if let Ok(tree) = ns::clone_tree(&place) {
            ns::narrow(tree.as_fd(), ns::NO_SUID | ns::NO_EXEC).at("narrow", &place)?;
            nodes.push((tree, place));
        }
    }

    // Made here, because an ordinary user gets them only where there are others that show everything.
    let proc = ns::new_tree(c"proc", OF_BOX | ns::NO_EXEC, &[]).at("proc", "/proc")?;
    // Where the kernel refuses one (a container whose engine covers parts of it), the box has none.
    let sys = ns::new_tree(c"sysfs", OF_HOST | ns::NO_EXEC, &[]).ok();

    let memory = CString::new(format!("mode=0755,size={},nr_inodes=1m", plan.memory_files)).unwrap_or_default();
    let stage = path(&plan.stage);
    match &plan.root {
        None => ns::mount_new(c"tmpfs", &stage, OF_BOX, &memory).at("tmpfs", &stage)?,
        Some(root) => {
            let root = path(root);
            let tree = match &plan.layer {
                Some((upper, work)) => {
                    let open = |path: PathBuf| File::open(&path).at("overlay", &path);
                    let (lower, upper, work) = (open(root.clone())?, open(path(upper))?, open(path(work))?);
                    ns::overlay(lower.as_fd(), upper.as_fd(), work.as_fd()).at("overlay", &root)?
                }
                None => {
                    let tree = ns::clone_tree(&root).at("source", &root)?;
                    let attributes = if plan.copied { OF_BOX } else { OF_HOST };
                    ns::narrow(tree.as_fd(), attributes).at("narrow", &root)?;
                    tree
                }
            };
            ns::attach(tree.as_fd(), &stage).at("root", &root)?;
        }
    }
    std::env::set_current_dir(&stage).at("root", &stage)?;
    ns::enter_root().at("root", "the new root")?;

    // From here on every path is one of the box.
    if plan.root.is_none() {
        chown("/", Some(uid), Some(gid)).at("root", "/")?;
        for (to, place) in links {
            symlink(to, &place).at("root", &place)?;
        }
        for Waiting { tree, place, is_dir } in waiting {
            put(&tree, &place, is_dir)?;
        }
    }
    for (name, mode) in [
        ("proc", 0o555),
        ("sys", 0o555),
        ("dev", 0o755),
        ("run", 0o755),
        ("tmp", 0o1777),
    ] {
        directory(&Path::new("/").join(name), mode, uid, gid)?;
    }
    let dev = Path::new("/dev");
    ns::mount_new(c"tmpfs", dev, ns::NO_SUID | ns::NO_EXEC, &memory).at("tmpfs", dev)?;
    chown(dev, Some(uid), Some(gid)).at("tmpfs", dev)?;
    devices(uid, gid)?;
    for (tree, place) in nodes {
        put(&tree, &place, false)?;
    }
    if plan.root.is_none() {
        directory(Path::new("/home"), 0o755, uid, gid)?;
        directory(Path::new("/root"), 0o755, uid, gid)?;
        for hidden in &plan.hidden.0 {
            hide(&path(hidden), uid, gid)?;
        }
    }
    ns::attach(proc.as_fd(), Path::new("/proc")).at("proc", "/proc")?;
    if let Some(sys) = sys {
        ns::attach(sys.as_fd(), Path::new("/sys")).at("sys", "/sys")?;
    }
    let named: Vec<PathBuf> = late.iter().map(|waiting| waiting.place.clone()).collect();
    for Waiting { tree, place, is_dir } in late {
        parents(&place, uid, gid)?;
        put(&tree, &place, is_dir)?;
    }
    // Whoever names a socket wants it; whoever names a directory wants the files.
    for socket in sockets.iter().filter(|socket| !named.contains(socket)) {
        mask(socket);
    }
    Ok(())
}

/// A directory for the box's user, unless there is one.
fn directory(place: &Path, mode: u32, uid: u32, gid: u32) -> Step<()> {
    match fs::DirBuilder::new().mode(0o755).create(place) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        made => made.at("directory", place)?,
    }
    fs::set_permissions(place, fs::Permissions::from_mode(mode)).at("directory", place)?;
    chown(place, Some(uid), Some(gid)).at("directory", place)
}

/// The directories above a place, where they are missing.
fn parents(place: &Path, uid: u32, gid: u32) -> Step<()> {
    let missing: Vec<&Path> = place.ancestors().skip(1).take_while(|above| !above.exists()).collect();
    for above in missing.into_iter().rev() {
        directory(above, 0o755, uid, gid)?;
    }
    Ok(())
}

/// Mounts a tree at a place, which is made if missing.
fn put(tree: &OwnedFd, place: &Path, is_dir: bool) -> Step<()> {
    if fs::symlink_metadata(place).is_err() {
        if is_dir {
            fs::DirBuilder::new()
                .mode(0o755)
                .create(place)
                .at("mountpoint", place)?;
        } else {
            fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o644)
                .open(place)
                .at("mountpoint", place)?;
        }
    }
    ns::attach(tree.as_fd(), place).at("mount", place)
}

/// Covers what is at a path of the host by something empty.
fn hide(place: &Path, uid: u32, gid: u32) -> Step<()> {
    match fs::symlink_metadata(place) {
        Ok(found) if found.is_dir() => {
            let options = format!("mode=0755,uid={uid},gid={gid},size=64m,nr_inodes=64k");
            let options = CString::new(options).unwrap_or_default();
            ns::mount_new(c"tmpfs", place, ns::NO_SUID | ns::NO_DEV, &options).at("hide", place)
        }
        Ok(found) if !found.is_symlink() => ns::attach(nothing()?.as_fd(), place).at("hide", place),
        // Not in the box, but a home directory is expected to be there.
        Err(_) if place.parent() == Some(Path::new("/home")) => directory(place, 0o755, uid, gid),
        _ => Ok(()),
    }
}

/// A mount of something that cannot be opened: a device where there are none.
fn nothing() -> Step<OwnedFd> {
    let tree = ns::clone_tree(Path::new("/dev/null")).at("hide", "/dev/null")?;
    let attributes = ns::READ_ONLY | ns::NO_EXEC | ns::NO_SUID | ns::NO_DEV;
    ns::narrow(tree.as_fd(), attributes).at("hide", "/dev/null")?;
    Ok(tree)
}

/// Where servers of the host listen. A read-only mount keeps nobody from connecting to a socket.
fn host_sockets() -> Vec<PathBuf> {
    let text = fs::read("/proc/net/unix").unwrap_or_default();
    let lines = text.split(|byte| *byte == b'\n');
    let paths = lines.filter_map(|line| line.iter().position(|byte| *byte == b'/').and_then(|at| line.get(at..)));
    let mut paths: Vec<PathBuf> = paths.map(path).collect();
    paths.sort();
    paths.dedup();
    paths
}

/// Covers a socket, if it is one and the box can see it.
fn mask(place: &Path) {
    if fs::symlink_metadata(place).is_ok_and(|found| found.file_type().is_socket())
        && let Ok(nothing) = nothing()
    {
        let _ = ns::attach(nothing.as_fd(), place);
    }
}

fn devices(uid: u32, gid: u32) -> Step<()> {
    let dev = Path::new("/dev");
    directory(&dev.join("shm"), 0o1777, uid, gid)?;
    directory(&dev.join("pts"), 0o755, uid, gid)?;
    ns::mount_new(
        c"devpts",
        &dev.join("pts"),
        ns::NO_SUID | ns::NO_EXEC,
        c"newinstance,ptmxmode=0666,mode=0600",
    )
    .at("devpts", "/dev/pts")?;
    for (name, to) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        symlink(to, dev.join(name)).at("dev", dev.join(name))?;
    }
    Ok(())
}

/// Makes the kernel's switches in `/proc` read-only and covers what tells of others. A user without capabilities could
/// do nothing with most of them anyway.
fn lock_proc() -> Step<()> {
    let present = |name: &&str| Path::new("/proc").join(name);
    for place in PROC_READ_ONLY.iter().map(present).filter(|place| place.exists()) {
        let tree = ns::clone_tree(&place).at("proc", &place)?;
        ns::narrow(tree.as_fd(), ns::READ_ONLY | ns::NO_SUID | ns::NO_DEV | ns::NO_EXEC).at("proc", &place)?;
        ns::attach(tree.as_fd(), &place).at("proc", &place)?;
    }
    for place in PROC_MASKED.iter().map(present).filter(|place| place.exists()) {
        ns::attach(nothing()?.as_fd(), &place).at("proc", &place)?;
    }
    Ok(())
}
