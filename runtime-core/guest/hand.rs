//! Programs on the host's network, for a setup that asks for it: the keeper, which has stayed there, starts them for
//! process 1.
//!
//! A process that has left a network cannot go back without privileges over it, so process 1, whose network is the box's,
//! can start nothing outside of it. The keeper never left. It joins everything else that the box has of its own, and for
//! each program goes on as two processes: the second, in the box's process namespace, starts the program and ends, so
//! that the kernel gives the program to process 1, which waits for it, signals it and ends it like any other.
//!
//! The keeper does so only while the host allows it, by signals that nobody in the box can send: a program that took process
//! 1 over after the cut would find the way shut.
//!
//! What is said is said in turn, one request and its answer at a time: three bytes, with a descriptor each, then a length
//! and a body; the answer is a process id in the box's numbers, or a step and an error number. Or a question mark, whether
//! a request would be served.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::files::{EINVAL, Failure};
use crate::frame::{Input, List, MAX_REQUEST, Step, Wire};
use crate::namespaces as ns;
use crate::seccomp::{self, Strictness};
use crate::sys::{self, ChildStack, POLLIN, POLLOUT, Plan, PollFd, RLimit, SockFilter};

const EPERM: i32 = 1;
const EAGAIN: i32 = 11;
const EPIPE: i32 = 32;
const ECANCELED: i32 = 125;

/// What introduces a descriptor, and the question whether programs may be started.
const DESCRIPTOR: u8 = b'f';
const QUESTION: u8 = b'?';

/// Process 1's end.
pub(crate) struct Hand(UnixStream);

impl Hand {
    pub(crate) fn new(keeper: UnixStream) -> Self {
        Self(keeper)
    }

    /// Whether the keeper is allowed to start programs. It has taken note of every signal from before the question then.
    pub(crate) fn may_start(&mut self) -> Result<bool, Failure> {
        let lost = |error: io::Error| (Step::Only, error.raw_os_error().unwrap_or(EPIPE));
        self.0.write_all(&[QUESTION]).map_err(lost)?;
        let mut answer = Answer::default();
        self.0.read_exact(&mut answer).map_err(lost)?;
        Ok(decode(answer).is_ok())
    }

    /// What [`sys::spawn`] does, on the host's network.
    pub(crate) fn spawn(&mut self, plan: &Plan<'_>) -> Result<i32, Failure> {
        let lost = |error: io::Error| (Step::Fork, error.raw_os_error().unwrap_or(EPIPE));
        let bytes = |strings: &[CString]| List(strings.iter().map(|string| string.to_bytes().to_vec()).collect());
        let mut body = Vec::new();
        bytes(plan.candidates).put(&mut body);
        bytes(plan.argv).put(&mut body);
        bytes(plan.env).put(&mut body);
        plan.cwd.to_bytes().to_vec().put(&mut body);
        plan.oom_score_adj.to_bytes().to_vec().put(&mut body);
        let length = (body.len() as u32).to_le_bytes();
        for stream in plan.stdio {
            send_descriptor(&self.0, stream).map_err(lost)?;
        }
        self.0
            .write_all(&length)
            .and_then(|()| self.0.write_all(&body))
            .map_err(lost)?;
        let mut answer = Answer::default();
        self.0.read_exact(&mut answer).map_err(lost)?;
        decode(answer)
    }
}

/// A step's number, and a process id or an error number.
type Answer = [u8; 5];
/// In place of a step: it runs.
const RUNS: u8 = 0xff;

fn encode(result: Result<i32, Failure>) -> Answer {
    let (kind, number) = match result {
        Ok(pid) => (RUNS, pid),
        Err((step, errno)) => {
            let mut code = Vec::new();
            step.put(&mut code);
            (code.first().copied().unwrap_or(0), errno)
        }
    };
    let [a, b, c, d] = number.to_le_bytes();
    [kind, a, b, c, d]
}

fn decode([kind, a, b, c, d]: Answer) -> Result<i32, Failure> {
    let number = i32::from_le_bytes([a, b, c, d]);
    if kind == RUNS {
        return Ok(number);
    }
    Err((Step::take(&mut Input(&[kind])).unwrap_or(Step::Fork), number))
}

fn send_descriptor(socket: &UnixStream, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        match sys::send(socket.as_fd(), &[DESCRIPTOR], Some(descriptor)) {
            Ok(_) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(EAGAIN) => wait(socket, POLLOUT)?,
            Err(error) => return Err(error),
        }
    }
}

/// The next descriptor, or the question.
fn receive_descriptor(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut descriptors = Vec::new();
    let mut byte = [0];
    loop {
        match sys::receive(socket.as_fd(), &mut byte, &mut descriptors) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) if byte == [QUESTION] => return Ok(None),
            Ok(_) => {
                return descriptors
                    .pop()
                    .map(Some)
                    .ok_or_else(|| io::ErrorKind::InvalidData.into());
            }
            Err(error) if error.raw_os_error() == Some(EAGAIN) => wait(socket, POLLIN)?,
            Err(error) => return Err(error),
        }
    }
}

fn wait(socket: &UnixStream, events: i16) -> io::Result<()> {
    let fd = socket.as_raw_fd();
    sys::wait_ready(&mut [PollFd { fd, events, revents: 0 }], -1)
}

/// The namespaces of process 1 that the keeper is to join, all but that of the network.
pub(crate) struct Namespaces {
    /// The mounts last: after them the host's `/proc` is out of reach.
    kinds: Vec<(File, i32)>,
    user: Option<File>,
}

impl Namespaces {
    /// Takes hold of those of the process; of that for users only if it is another one.
    pub(crate) fn of(pid: i32, with_user: bool) -> io::Result<Self> {
        let open = |name: &str| File::open(format!("/proc/{pid}/ns/{name}"));
        let mut kinds = Vec::new();
        // A kernel without cgroup namespaces has no such file.
        if let Ok(cgroup) = open("cgroup") {
            kinds.push((cgroup, ns::NEW_CGROUP));
        }
        for (name, kind) in [("uts", ns::NEW_UTS), ("ipc", ns::NEW_IPC), ("mnt", ns::NEW_MOUNTS)] {
            kinds.push((open(name)?, kind));
        }
        let user = match with_user {
            true => Some(open("user")?),
            false => None,
        };
        Ok(Self { kinds, user })
    }

    /// Joins them. The processes of this one are in the box's process namespace already.
    pub(crate) fn join(self) -> io::Result<()> {
        for (file, kind) in &self.kinds {
            ns::join(file.as_fd(), *kind)?;
        }
        match &self.user {
            Some(user) => ns::join(user.as_fd(), ns::NEW_USER),
            None => Ok(()),
        }
    }
}

/// The keeper's end.
pub(crate) struct Starter {
    socket: UnixStream,
    filter: Vec<SockFilter>,
    limits: Vec<(i32, RLimit)>,
    stack: ChildStack,
}

impl Starter {
    /// Starts programs under these limits, and the filter of a box.
    pub(crate) fn new(socket: UnixStream, limits: &[(u32, u64)]) -> io::Result<Self> {
        let filter = seccomp::filter(Strictness::Box);
        Ok(Self {
            socket,
            filter: filter.ok_or_else(|| io::Error::other("there is no filter for this architecture"))?,
            limits: crate::command::both(limits),
            stack: ChildStack::new(),
        })
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Serves one request, which waits, or refuses it.
    pub(crate) fn serve(&mut self, allowed: bool) -> io::Result<()> {
        let mut stdio = Vec::with_capacity(3);
        for _ in 0..3 {
            match receive_descriptor(&self.socket)? {
                Some(descriptor) => stdio.push(descriptor),
                None if stdio.is_empty() => {
                    let answer = if allowed { Ok(0) } else { Err((Step::Only, EPERM)) };
                    return self.socket.write_all(&encode(answer));
                }
                None => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        let mut length = [0; 4];
        self.socket.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        // What the host may ask for, the candidates of its program, and variables of the guest's.
        if length > 3 * MAX_REQUEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut body = vec![0; length];
        self.socket.read_exact(&mut body)?;
        let answer = match allowed {
            true => encode(self.start(&body, &stdio)),
            false => encode(Err((Step::Fork, EPERM))),
        };
        self.socket.write_all(&answer)
    }

    fn start(&mut self, body: &[u8], stdio: &[OwnedFd]) -> Result<i32, Failure> {
        let mut input = Input(body);
        let malformed = |_| (Step::Fork, EINVAL);
        let mut list = || -> Result<Vec<CString>, Failure> {
            let List(strings) = List::<Vec<u8>>::take(&mut input).map_err(malformed)?;
            strings.into_iter().map(c_string).collect()
        };
        let (candidates, argv, env) = (list()?, list()?, list()?);
        let cwd = c_string(Vec::take(&mut input).map_err(malformed)?)?;
        let oom_score_adj = c_string(Vec::take(&mut input).map_err(malformed)?)?;
        let [stdin, stdout, stderr] = stdio else {
            return Err((Step::Stdio, EINVAL));
        };
        let plan = Plan {
            candidates: &candidates,
            argv: &argv,
            env: &env,
            cwd: &cwd,
            user: None,
            stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
            oom_score_adj: &oom_score_adj,
            filter: Some(&self.filter),
            descriptor_limit: None,
            limits: &self.limits,
        };
        pass_on(&plan, &mut self.stack).map_err(|error| (Step::Fork, error.raw_os_error().unwrap_or(ECANCELED)))?
    }
}

/// Has a process in the box start the program and end.
fn pass_on(plan: &Plan<'_>, stack: &mut ChildStack) -> io::Result<Result<i32, Failure>> {
    let (mut ours, theirs) = io::pipe()?;
    // Nobody in the box may look into it, from its first moment on; the keeper itself a reaper finds by what it shows.
    sys::set_not_dumpable()?;
    let helper = sys::fork_helper(|| {
        let answer = encode(sys::spawn(plan, stack));
        i32::from((&theirs).write_all(&answer).is_err())
    });
    ns::set_dumpable();
    drop(theirs);
    let helper = helper?;
    let mut answer = Answer::default();
    let told = ours.read_exact(&mut answer);
    // Once it is waited for, the program is a child of process 1.
    ns::wait_for(helper);
    // Else somebody in the box has killed it. Whatever it had started by then ends with the setup.
    told.map(|()| decode(answer))
}

fn c_string(bytes: Vec<u8>) -> Result<CString, Failure> {
    CString::new(bytes).map_err(|_| (Step::Exec, EINVAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_comes_back_as_it_was() {
        for result in [
            Ok(1),
            Ok(i32::MAX),
            Err((Step::Exec, 2)),
            Err((Step::Chdir, 20)),
            Err((Step::Fork, 11)),
        ] {
            assert_eq!(decode(encode(result)), result);
        }
        assert_eq!(decode([0x7f, 5, 0, 0, 0]), Err((Step::Fork, 5)), "a step that is none");
    }

    #[test]
    fn descriptors_and_body_arrive_and_a_program_is_started() {
        let (one, two) = UnixStream::pair().unwrap();
        let served = std::thread::spawn(move || {
            let mut received = Vec::new();
            for _ in 0..3 {
                received.push(receive_descriptor(&two).unwrap().unwrap());
            }
            let mut two = two;
            let mut length = [0; 4];
            two.read_exact(&mut length).unwrap();
            let mut body = vec![0; u32::from_le_bytes(length) as usize];
            two.read_exact(&mut body).unwrap();
            let mut input = Input(&body);
            let lists: Vec<List<Vec<u8>>> = (0..3).map(|_| List::take(&mut input).unwrap()).collect();
            let rest: Vec<Vec<u8>> = (0..2).map(|_| Vec::take(&mut input).unwrap()).collect();
            two.write_all(&encode(Ok(77))).unwrap();
            (received.len(), lists, rest)
        });
        let null: OwnedFd = File::open("/dev/null").unwrap().into();
        let strings =
            |names: &[&str]| -> Vec<CString> { names.iter().map(|name| CString::new(*name).unwrap()).collect() };
        let (candidates, argv, env) = (
            strings(&["/bin/a", "/usr/bin/a"]),
            strings(&["a", "b"]),
            strings(&["X=1"]),
        );
        let plan = Plan {
            candidates: &candidates,
            argv: &argv,
            env: &env,
            cwd: c"/work",
            user: None,
            stdio: [null.as_fd(); 3],
            oom_score_adj: c"500",
            filter: None,
            descriptor_limit: None,
            limits: &[],
        };
        assert_eq!(Hand::new(one).spawn(&plan), Ok(77));
        let (count, lists, rest) = served.join().unwrap();
        assert_eq!((count, lists[0].0[1].as_slice()), (3, &b"/usr/bin/a"[..]));
        assert_eq!((lists[1].0.len(), lists[2].0[0].as_slice()), (2, &b"X=1"[..]));
        assert_eq!(rest, [b"/work".to_vec(), b"500".to_vec()]);
    }

    #[test]
    fn nothing_is_started_that_the_host_does_not_allow() {
        let (one, two) = UnixStream::pair().unwrap();
        let dir = std::env::temp_dir().join(format!("hand-{}", std::process::id()));
        let served = std::thread::spawn(move || {
            let mut starter = Starter::new(two, &[]).unwrap();
            for allowed in [false, true, false] {
                starter.serve(allowed).unwrap();
            }
        });
        let mut hand = Hand::new(one);
        assert_eq!(hand.may_start(), Ok(false));
        assert_eq!(hand.may_start(), Ok(true));
        let null: OwnedFd = File::open("/dev/null").unwrap().into();
        let made = CString::new(dir.to_str().unwrap()).unwrap();
        let plan = Plan {
            candidates: &[c"/bin/mkdir".to_owned()],
            argv: &[c"mkdir".to_owned(), made],
            env: &[],
            cwd: c"/",
            user: None,
            stdio: [null.as_fd(); 3],
            oom_score_adj: c"0",
            filter: None,
            descriptor_limit: None,
            limits: &[],
        };
        assert_eq!(hand.spawn(&plan), Err((Step::Fork, EPERM)));
        served.join().unwrap();
        assert!(!dir.exists());
        assert!(hand.may_start().is_err(), "the keeper is gone");
    }
}
