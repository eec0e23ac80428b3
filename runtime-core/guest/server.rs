//! The loop of the guest: waits for the link, for signals, and for what it does for the host.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs as unix_fs;
use std::time::{Duration, Instant};

use crate::command::{Spawn, Spawner};
use crate::files::{self, EINVAL, EMFILE, Failure, Listings, Open, failure, path};
use crate::frame::{Event, Interface, List, Request, Step};
use crate::netlink::{self, LinkWatch};
use crate::oom::OomWatch;
use crate::port::Port;
use crate::streams::{Ready, Streams};
use crate::sys::{self, End, POLLIN, POLLOUT, PollFd};

/// How long programs have to end after the guest was asked to.
const GRACE: Duration = Duration::from_secs(5);
const MAX_DIALS: usize = 1024;
/// Most interfaces that are reported by one watch: the host fails the box at the first.
const MAX_REPORTS: usize = 16;
const ECANCELED: i32 = 125;
const ESRCH: i32 = 3;
const EBUSY: i32 = 16;

/// A child process under a tag of the host.
struct Child {
    pid: i32,
    /// It has been reaped; the entry is kept so that what is left of its group can be killed.
    ended: bool,
    /// The host wants to hear nothing but its end.
    released: bool,
    /// We have sent SIGKILL ourselves.
    killed: bool,
    /// A helper of ours, whose exit code is an error number, instead of a program.
    helper: bool,
}

struct Dial {
    socket: OwnedFd,
    stream: u32,
}

pub(crate) struct Server {
    port: Port,
    signals: OwnedFd,
    spawner: Spawner,
    is_init: bool,
    children: BTreeMap<u32, Child>,
    tags: BTreeMap<i32, u32>,
    dials: BTreeMap<u32, Dial>,
    listings: Listings,
    streams: Streams,
    watch: Option<(u32, LinkWatch, usize)>,
    oom: OomWatch,
    ending: Option<Instant>,
    /// Who waits until every process of the box has ended, and how many there were.
    emptying: Option<(Vec<u32>, u32)>,
}

impl Server {
    pub(crate) fn new(port: Port, signals: OwnedFd, spawner: Spawner, is_init: bool, oom: OomWatch) -> Self {
        Self {
            port,
            signals,
            spawner,
            is_init,
            children: BTreeMap::new(),
            tags: BTreeMap::new(),
            dials: BTreeMap::new(),
            listings: Listings::default(),
            streams: Streams::default(),
            watch: None,
            oom,
            ending: None,
            emptying: None,
        }
    }

    /// Serves until the host closes the link, asks for the end, or the engine stops the container.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let result = self.serve();
        // Whatever ended the loop: no program outlives the guest. In a container the kernel sees to the rest.
        for child in self.children.values() {
            if !child.ended {
                let _ = sys::send_signal(-child.pid, sys::SIGKILL);
            }
        }
        result
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            self.tell_when_empty();
            self.port.flush()?;
            if let Some(deadline) = self.ending {
                let running = self.children.values().any(|child| !child.ended);
                if (!running && !self.port.wants_to_write()) || Instant::now() >= deadline {
                    return Ok(());
                }
            }
            let (mut fds, owners) = self.interests();
            let timeout = match self.ending {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()).as_millis().min(5000) as i32 + 1,
                None => -1,
            };
            sys::wait_ready(&mut fds, timeout)?;
            for (fd, owner) in fds.iter().zip(owners) {
                if fd.revents != 0 && !self.handle(owner, fd.revents)? {
                    return Ok(());
                }
            }
        }
    }

    fn interests(&self) -> (Vec<PollFd>, Vec<Owner>) {
        let mut fds = Vec::with_capacity(8);
        let mut owners = Vec::with_capacity(8);
        let mut add = |owner, fd: i32, events| {
            owners.push(owner);
            fds.push(PollFd { fd, events, revents: 0 });
        };
        add(Owner::Signals, self.signals.as_raw_fd(), POLLIN);
        // While the host does not read, it gets no further answers: requests wait.
        if !self.port.is_full() {
            add(Owner::Input, self.port.input().as_raw_fd(), POLLIN);
        }
        if self.port.wants_to_write() {
            add(Owner::Output, self.port.output().as_raw_fd(), POLLOUT);
        }
        if let Some((_, watch, _)) = &self.watch {
            add(Owner::Links, watch.fd().as_raw_fd(), POLLIN);
        }
        for (&tag, dial) in &self.dials {
            add(Owner::Dial(tag), dial.socket.as_raw_fd(), POLLOUT);
        }
        let mut ready = Vec::new();
        self.streams.poll(&mut fds, &mut ready, self.port.is_full());
        owners.extend(ready.into_iter().map(Owner::Stream));
        (fds, owners)
    }

    /// Handles one ready descriptor; `false` ends the guest.
    fn handle(&mut self, owner: Owner, revents: i16) -> io::Result<bool> {
        match owner {
            Owner::Signals => self.on_signals(),
            Owner::Output => {}
            Owner::Links => self.on_links(),
            Owner::Dial(tag) => self.on_dialed(tag),
            Owner::Stream(ready) => self.streams.ready(ready, revents, &mut self.port),
            Owner::Input => {
                if !self.port.fill()? {
                    return Ok(false);
                }
                while let Some((tag, request, descriptors)) = self.port.next()? {
                    self.on_request(tag, request, descriptors);
                }
            }
        }
        Ok(true)
    }

    fn on_signals(&mut self) {
        while let Some(received) = sys::next_signal(self.signals.as_fd()) {
            // As process 1 only what comes from outside counts: a sender in the box has a number here, one in an
            // ancestor namespace has none, and nobody can forge it for signals of kind `SI_USER`.
            let from_outside = received.code == 0 && received.pid == 0;
            if received.signal != sys::SIGCHLD && (!self.is_init || from_outside) {
                self.begin_to_end();
            }
        }
        while let Some((pid, end)) = sys::reap() {
            self.on_reaped(pid, end);
        }
    }

    /// Asks every program to end.
    fn begin_to_end(&mut self) {
        if self.ending.is_some() {
            return;
        }
        self.ending = Some(Instant::now() + GRACE);
        if self.is_init {
            let _ = sys::send_signal(-1, sys::SIGTERM);
        } else {
            for child in self.children.values().filter(|child| !child.ended) {
                let _ = sys::send_signal(-child.pid, sys::SIGTERM);
            }
        }
    }

    fn on_reaped(&mut self, pid: i32, end: End) {
        let tag = self.tags.remove(&pid);
        let child = tag.and_then(|tag| self.children.get_mut(&tag));
        let killed = child.as_ref().is_some_and(|child| child.killed);
        let suspicious = match end {
            End::Signal(sys::SIGKILL) => !killed,
            End::Code(code) => code == 128 + sys::SIGKILL,
            End::Signal(_) => false,
        };
        let oom = self.oom.is_oom(suspicious);
        // Without an entry it was an orphan of the box: reaping it is all there is to do.
        let (Some(tag), Some(child)) = (tag, child) else {
            return;
        };
        child.ended = true;
        if child.helper {
            let event = match end {
                End::Code(0) => Event::Done {},
                End::Code(errno) => failed((Step::Only, errno)),
                End::Signal(_) => failed((Step::Only, ECANCELED)),
            };
            self.port.send(tag, &event);
            self.children.remove(&tag);
            return;
        }
        let (code, signal) = match end {
            End::Code(code) => (code, 0),
            End::Signal(signal) => (0, signal),
        };
        // Not a result of the program: it ends because the box does, and the link's end says so.
        let ends_with_the_box = self.ending.is_some() && matches!(signal, sys::SIGTERM | sys::SIGKILL);
        if !ends_with_the_box {
            self.port.send(tag, &Event::Exited { code, signal, oom });
        }
        if child.released {
            self.children.remove(&tag);
        }
    }

    fn on_links(&mut self) {
        let Some((tag, watch, left)) = &mut self.watch else {
            return;
        };
        let tag = *tag;
        let mut found = watch.read().unwrap_or_default();
        found.retain(leads_out);
        for interface in found {
            if *left == 0 {
                self.watch = None;
                return;
            }
            *left -= 1;
            self.port.send(tag, &Event::Appeared { interface });
        }
    }

    fn on_dialed(&mut self, tag: u32) {
        let Some(Dial { socket, stream }) = self.dials.remove(&tag) else {
            return;
        };
        match sys::socket_error(socket.as_fd()) {
            Err(error) => self.fail(tag, failure(error)),
            Ok(()) if stream == 0 => self.port.send_with(tag, &Event::Connected {}, Some(socket)),
            Ok(()) => match self.streams.add_socket(stream, TcpStream::from(socket)) {
                Ok(()) => self.port.send(tag, &Event::Connected {}),
                Err(errno) => self.fail(tag, (Step::Only, errno)),
            },
        }
    }

    fn fail(&mut self, tag: u32, failure: Failure) {
        self.port.send(tag, &failed(failure));
    }

    fn on_request(&mut self, tag: u32, request: Request, descriptors: Vec<OwnedFd>) {
        match self.answer(tag, request, descriptors) {
            Ok(Some(event)) => self.port.send(tag, &event),
            Ok(None) => {}
            Err(failure) => self.fail(tag, failure),
        }
    }

    /// Performs a request. `None` means that the answer was sent, comes later, or is not wanted.
    fn answer(&mut self, tag: u32, request: Request, descriptors: Vec<OwnedFd>) -> Result<Option<Event>, Failure> {
        let done = |result: io::Result<()>| result.map(|()| Some(Event::Done {})).map_err(failure);
        match request {
            Request::Configure {
                env,
                restrict,
                oom_score_adj,
            } => {
                self.spawner.configure(env, restrict, oom_score_adj)?;
                Ok(Some(Event::Done {}))
            }
            Request::Spawn {
                argv,
                env,
                cwd,
                user,
                stdin,
                stdout,
                stderr,
            } => {
                if self.emptying.is_some() {
                    return Err((Step::Fork, EBUSY));
                }
                let spawn = Spawn {
                    argv,
                    env,
                    cwd,
                    user,
                    stdio: [stdin, stdout, stderr],
                };
                let pid = self.spawner.spawn(spawn, descriptors, &mut self.streams)?;
                self.adopt(tag, pid, false);
                Ok(Some(Event::Started { pid: pid as u32 }))
            }
            Request::Signal { target, signal } => {
                let child = self.children.get_mut(&target).ok_or((Step::Only, ESRCH))?;
                if child.ended {
                    return Err((Step::Only, ESRCH));
                }
                child.killed |= signal == sys::SIGKILL;
                done(sys::send_signal(-child.pid, signal))
            }
            Request::Release { target } => {
                self.release(target);
                Ok(None)
            }
            Request::Cancel { target } => {
                self.cancel(target);
                Ok(None)
            }
            Request::Open {
                path: name,
                write,
                create,
                exclusive,
                truncate,
                append,
                mode,
                stream,
            } => {
                let how = Open {
                    write,
                    create,
                    exclusive,
                    truncate,
                    append,
                    mode,
                };
                let (file, size) = files::open(path(&name), &how)?;
                let opened = Event::Opened { size };
                if stream == 0 {
                    self.port.send_with(tag, &opened, Some(file.into()));
                } else {
                    let (reader, writer) = if write {
                        (None, Some(file.into()))
                    } else {
                        (Some(file.into()), None)
                    };
                    self.streams
                        .add(stream, reader, writer)
                        .map_err(|errno| (Step::Only, errno))?;
                    self.port.send(tag, &opened);
                }
                Ok(None)
            }
            Request::Stat { path: name, follow } => {
                let info = files::stat(path(&name), follow)?;
                Ok(Some(Event::Info { info }))
            }
            Request::List { path: name } => {
                let (entries, more) = self.listings.start(tag, path(&name))?;
                Ok(Some(Event::Entries {
                    entries: List(entries),
                    more,
                }))
            }
            Request::ListMore { target } => {
                let (entries, more) = self.listings.more(target)?;
                Ok(Some(Event::Entries {
                    entries: List(entries),
                    more,
                }))
            }
            Request::Mkdir {
                path: name,
                mode,
                parents,
            } => {
                files::mkdir(path(&name), mode, parents)?;
                Ok(Some(Event::Done {}))
            }
            Request::Remove { path: name, recursive } => {
                let target = path(&name);
                let is_tree = recursive && fs::symlink_metadata(target).is_ok_and(|metadata| metadata.is_dir());
                if is_tree {
                    // A large tree takes long, and nothing else may wait for it.
                    let helper = sys::fork_helper(|| match files::remove(target, true) {
                        Ok(()) => 0,
                        Err((_, errno)) => errno.clamp(1, 255),
                    });
                    self.adopt(tag, helper.map_err(failure)?, true);
                    return Ok(None);
                }
                files::remove(target, false)?;
                Ok(Some(Event::Done {}))
            }
            Request::Rename { from, to } => done(fs::rename(path(&from), path(&to))),
            Request::Symlink { target, path: name } => done(unix_fs::symlink(path(&target), path(&name))),
            Request::Readlink { path: name } => {
                let target = fs::read_link(path(&name)).map_err(failure)?;
                Ok(Some(Event::Target {
                    path: target.into_os_string().into_vec(),
                }))
            }
            Request::Chmod { path: name, mode } => {
                files::chmod(path(&name), mode)?;
                Ok(Some(Event::Done {}))
            }
            Request::Chown { path: name, uid, gid } => done(unix_fs::lchown(path(&name), Some(uid), Some(gid))),
            Request::Listen { address, stream } => self.listen(tag, address, stream),
            Request::Dial { address, stream } => {
                if self.dials.len() >= MAX_DIALS || self.dials.contains_key(&tag) {
                    return Err((Step::Only, EMFILE));
                }
                let socket = sys::start_connect(address).map_err(failure)?;
                self.dials.insert(tag, Dial { socket, stream });
                Ok(None)
            }
            Request::Stats {} => {
                let network = netlink::network().map_err(failure)?;
                Ok(Some(Event::Network {
                    interfaces: List(network.interfaces),
                    routes: List(network.routes),
                    truncated: network.truncated,
                }))
            }
            Request::Watch {} => {
                // Subscribed first, so that none falls between the two.
                let watch = LinkWatch::new().map_err(failure)?;
                let network = netlink::network().map_err(failure)?;
                self.watch = Some((tag, watch, MAX_REPORTS));
                self.port.send(tag, &Event::Done {});
                for interface in network.interfaces.into_iter().filter(leads_out).take(MAX_REPORTS) {
                    self.port.send(tag, &Event::Appeared { interface });
                }
                Ok(None)
            }
            Request::Resolver { reachable } => {
                netlink::set_resolver_reachable(reachable).map_err(failure)?;
                Ok(Some(Event::Done {}))
            }
            Request::HostNetwork { open: true } => {
                if self.emptying.is_some() {
                    return Err((Step::Only, EBUSY));
                }
                self.spawner.go_outside(true)?;
                Ok(Some(Event::Done {}))
            }
            Request::HostNetwork { open: false } => {
                self.leave_host_network(tag)?;
                Ok(None)
            }
            Request::Ping {} => Ok(Some(Event::Pong {})),
            Request::Shutdown {} => {
                self.begin_to_end();
                Ok(Some(Event::Done {}))
            }
            Request::Data { bytes } => {
                self.streams.data(tag, &bytes, &mut self.port);
                Ok(None)
            }
            Request::Credit { amount } => {
                self.streams.credit(tag, amount);
                Ok(None)
            }
            Request::Eof {} => {
                self.streams.eof(tag, &mut self.port);
                Ok(None)
            }
            Request::Reset {} => {
                self.streams.reset(tag, &mut self.port);
                Ok(None)
            }
        }
    }

    /// Ends every process but this one, if any may have the host's network, and answers once none is left.
    fn leave_host_network(&mut self, tag: u32) -> Result<(), Failure> {
        let was_outside = self.spawner.is_outside();
        let left = self.spawner.go_outside(false);
        if was_outside {
            for child in self.children.values_mut() {
                child.killed = true;
            }
            let ended = others().map_or(0, |others| others as u32);
            // To everything in the namespace but its process 1, in one step of the kernel's: a process that forks
            // meanwhile has its signal before the fork is through, which is then given up.
            let _ = sys::send_signal(-1, sys::SIGKILL);
            self.emptying = Some((Vec::new(), ended));
        }
        left?;
        match &mut self.emptying {
            Some((waiting, _)) => waiting.push(tag),
            None => self.port.send(tag, &Event::Emptied { ended: 0 }),
        }
        Ok(())
    }

    /// Whoever dies is reaped here, which is when this is asked again.
    fn tell_when_empty(&mut self) {
        if self.emptying.is_none() || others() != Some(0) {
            return;
        }
        if let Some((waiting, ended)) = self.emptying.take() {
            for tag in waiting {
                self.port.send(tag, &Event::Emptied { ended });
            }
        }
    }

    fn adopt(&mut self, tag: u32, pid: i32, helper: bool) {
        self.tags.insert(pid, tag);
        let child = Child {
            pid,
            ended: false,
            released: false,
            killed: false,
            helper,
        };
        self.children.insert(tag, child);
    }

    fn listen(&mut self, tag: u32, address: SocketAddr, stream: u32) -> Result<Option<Event>, Failure> {
        let listener = TcpListener::bind(address).map_err(failure)?;
        listener.set_nonblocking(true).map_err(failure)?;
        let address = listener.local_addr().map_err(failure)?;
        let listening = Event::Listening { address };
        if stream == 0 {
            self.port.send_with(tag, &listening, Some(listener.into()));
            return Ok(None);
        }
        self.streams
            .add_listener(stream, listener)
            .map_err(|errno| (Step::Only, errno))?;
        Ok(Some(listening))
    }

    /// Kills what is left of a program's group, and forgets the program once its end has been told.
    fn release(&mut self, target: u32) {
        let Some(child) = self.children.get_mut(&target) else {
            return;
        };
        if !child.ended {
            child.released = true;
            child.killed = true;
            let _ = sys::send_signal(-child.pid, sys::SIGKILL);
            return;
        }
        // The leader is gone. Its number stays reserved as long as the group has members, so a process of that
        // number means that the group was empty and the number belongs to somebody else now.
        if sys::send_signal(child.pid, 0).is_err() {
            let _ = sys::send_signal(-child.pid, sys::SIGKILL);
        }
        self.children.remove(&target);
    }

    fn cancel(&mut self, target: u32) {
        self.listings.forget(target);
        if self.dials.remove(&target).is_some() {
            self.fail(target, (Step::Only, ECANCELED));
        } else if let Some(child) = self.children.get(&target).filter(|child| child.helper) {
            let _ = sys::send_signal(child.pid, sys::SIGKILL);
        }
    }
}

/// How many processes there are in the box besides this one, those included that nobody has waited for yet.
fn others() -> Option<usize> {
    let own = std::process::id();
    let entries = fs::read_dir("/proc").ok()?;
    let mut count = 0;
    for entry in entries {
        let name = entry.ok()?.file_name();
        let pid = name.to_str().and_then(|name| name.parse::<u32>().ok());
        count += usize::from(pid.is_some_and(|pid| pid != own));
    }
    Some(count)
}

/// Whether packets could leave by it. One that is down carries nothing, and some kernels put tunnels that are down
/// into every namespace; when it comes up, the kernel announces it again.
fn leads_out(interface: &Interface) -> bool {
    !interface.is_loopback() && interface.is_up()
}

fn failed((step, errno): Failure) -> Event {
    Event::Failed {
        errno: if errno > 0 { errno } else { EINVAL },
        step,
    }
}

/// Whose a polled descriptor is.
enum Owner {
    Signals,
    Input,
    Output,
    Links,
    Dial(u32),
    Stream(Ready),
}
