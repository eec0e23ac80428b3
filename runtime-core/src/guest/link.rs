//! The host's end of the link to a guest.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, Interest};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::frame::{self, Decoder, Event, Frame, Interface, MAGIC, MAX_FDS, Message, Request, Route, VERSION};
use super::listener::{Token, stranger};
use super::outbox::Outbox;
use super::session::{Baggage, Failure, Session, system_error};
use crate::command::Env;
use crate::error::{Error, ErrorKind, Result};

/// Descriptors that one read may bring. The kernel closes what is beyond, and says so.
const CONTROL_FDS: usize = 8;
/// `oom_score_adj` of programs: they go before the guest does.
const OOM_SCORE_ADJ: i32 = 300;

/// Deadlines of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkOptions {
    /// How long the guest has for its first words. Default: 10 s.
    pub handshake_timeout: Duration,
    /// How long the guest has to answer a request. Default: 30 s. Programs run and bytes flow for as long as they
    /// like; removing a tree has 10 minutes.
    pub request_timeout: Duration,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self {
            handshake_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(30),
        }
    }
}

/// Interfaces and routes of a box, as its kernel told the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// Every interface.
    pub interfaces: Vec<Interface>,
    /// Every route.
    pub routes: Vec<Route>,
    /// There are more than were reported.
    pub truncated: bool,
}

impl Network {
    /// Whether no interface is up but the loopback, and no route leads by anything else.
    pub fn is_cut(&self) -> bool {
        let loopback: Vec<u32> = self
            .interfaces
            .iter()
            .filter(|interface| interface.is_loopback())
            .map(|interface| interface.index)
            .collect();
        !self.truncated
            && self.interfaces.iter().all(|interface| loopback.contains(&interface.index) || !interface.is_up())
            // A route without an interface leads nowhere: unreachable, blackhole and their like.
            && self.routes.iter().all(|route| route.interface == 0 || loopback.contains(&route.interface))
    }
}

/// A link to one guest. Cheap to clone. When the last clone is dropped the link is closed, and a guest whose link is
/// closed ends itself and with it the box.
#[derive(Clone)]
pub struct Link(Arc<Inner>);

struct Inner {
    session: Arc<Session>,
    guest_pid: u32,
    tasks: [AbortHandle; 2],
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.session.fail(Failure::gone("it was closed by its owner"));
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("guest_pid", &self.0.guest_pid)
            .finish_non_exhaustive()
    }
}

impl Link {
    /// Takes over a socket on which a guest introduces itself. What it opens arrives as descriptors.
    ///
    /// # Errors
    /// [`Protocol`](ErrorKind::Protocol) when it is not our guest, or another version of it;
    /// [`Timeout`](ErrorKind::Timeout) when it says nothing; [`SandboxGone`](ErrorKind::SandboxGone) when it goes away.
    pub async fn over_socket(socket: UnixStream, token: &Token, options: LinkOptions) -> Result<Self> {
        let socket = Arc::new(socket);
        let mut reader = SocketReader {
            socket: socket.clone(),
            decoder: Decoder::new(),
            descriptors: VecDeque::new(),
        };
        let guest_pid = greet(&mut reader, token, options.handshake_timeout).await?;
        let session = Arc::new(Session::new(Outbox::new(Some(socket)), true, options.request_timeout));
        let writing = session.clone();
        let writer = tokio::spawn(async move {
            if let Err(error) = writing.outbox().drive_socket().await {
                writing.fail(Failure::gone(error));
            }
        });
        Ok(Self::start(session, reader, writer.abort_handle(), guest_pid))
    }

    /// Takes over a pair of byte streams, such as the standard output and input of a guest that was started with
    /// `--stdio`. What it opens is carried over them.
    ///
    /// # Errors
    /// As [`over_socket`](Self::over_socket).
    pub async fn over_stdio(
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        token: &Token,
        options: LinkOptions,
    ) -> Result<Self> {
        let mut reader = StreamReader {
            reader,
            decoder: Decoder::new(),
        };
        let guest_pid = greet(&mut reader, token, options.handshake_timeout).await?;
        let session = Arc::new(Session::new(Outbox::new(None), false, options.request_timeout));
        let writing = session.clone();
        let writer = tokio::spawn(async move {
            if let Err(error) = writing.outbox().drive_stream(writer).await {
                writing.fail(Failure::gone(error));
            }
        });
        Ok(Self::start(session, reader, writer.abort_handle(), guest_pid))
    }

    fn start(
        session: Arc<Session>,
        mut reader: impl FrameReader + 'static,
        writer: AbortHandle,
        guest_pid: u32,
    ) -> Self {
        let reading = session.clone();
        let reader = tokio::spawn(async move {
            let failure = loop {
                match reader.next().await {
                    Err(failure) => break failure,
                    Ok((frame, descriptors)) => {
                        if let Err(failure) = reading.receive(frame.tag, frame.message, descriptors) {
                            break failure;
                        }
                    }
                }
            };
            reading.fail(failure);
        });
        Self(Arc::new(Inner {
            session,
            guest_pid,
            tasks: [reader.abort_handle(), writer],
        }))
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.0.session
    }

    /// Whether descriptors are passed: the link is a socket.
    pub fn passes_descriptors(&self) -> bool {
        self.0.session.passes
    }

    /// The guest's process id as it sees itself; 1 in a container of its own.
    pub fn guest_pid(&self) -> u32 {
        self.0.guest_pid
    }

    /// Whether the link still stands.
    ///
    /// # Errors
    /// Why it has ended.
    pub fn check(&self) -> Result<()> {
        self.0.session.check()
    }

    /// Waits for the end of the link and returns its reason.
    pub async fn ended(&self) -> Error {
        self.0.session.ended().await
    }

    /// Closes the link now. The guest then kills its programs and ends.
    pub fn close(&self) {
        self.0.session.fail(Failure::gone("it was closed by its owner"));
    }

    /// Closes the link because the box's network is not closed any more.
    #[cfg(feature = "egress")]
    pub(crate) fn give_up(&self, why: impl std::fmt::Display) {
        self.0.session.fail(Failure::policy(why));
    }

    /// Sets how programs are started from now on: the environment under theirs (`None` keeps the guest's own, which is
    /// the image's), and whether address families that no network namespace confines are refused to them. A restricted
    /// program cannot gain privileges by executing a set-user-ID program.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) when the guest has no filter for its architecture.
    pub async fn configure(&self, env: Option<&Env>, restrict: bool) -> Result<()> {
        use std::os::unix::ffi::OsStrExt;
        let env = env.map(|env| {
            let pairs = env
                .iter()
                .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()));
            frame::List(pairs.collect())
        });
        let request = Request::Configure {
            env,
            restrict,
            oom_score_adj: OOM_SCORE_ADJ,
        };
        match self.session().call(&request, Baggage::default()).await?.event {
            Event::Done {} => Ok(()),
            Event::Failed { .. } => Err(Error::unsupported(
                "the guest has no system call filter for the box's architecture",
            )),
            other => Err(self.session().unexpected(&other)),
        }
    }

    /// Has programs start on the host's network from now on, in a box of namespaces that was made for that.
    ///
    /// # Errors
    /// What the guest says in any other box.
    #[cfg(feature = "isolation")]
    pub(crate) async fn enter_host_network(&self) -> Result<()> {
        let request = Request::HostNetwork { open: true };
        match self.session().call(&request, Baggage::default()).await?.event {
            Event::Done {} => Ok(()),
            Event::Failed { errno, step } => Err(system_error("start programs on the host's network", errno, step)),
            other => Err(self.session().unexpected(&other)),
        }
    }

    /// Has programs start on the box's own network again. Every process that may have the host's is ended; resolves when
    /// none is left in the box, to how many there were. Until then the guest starts no program. Harmless where it is so
    /// already.
    ///
    /// # Errors
    /// Why the guest does not answer.
    #[cfg(feature = "isolation")]
    pub(crate) async fn leave_host_network(&self) -> Result<u32> {
        let request = Request::HostNetwork { open: false };
        match self.session().call(&request, Baggage::default()).await?.event {
            Event::Emptied { ended } => Ok(ended),
            Event::Failed { errno, step } => Err(system_error("leave the host's network", errno, step)),
            other => Err(self.session().unexpected(&other)),
        }
    }

    /// Asks whether the guest answers.
    ///
    /// # Errors
    /// Why it does not.
    pub async fn ping(&self) -> Result<()> {
        match self.session().call(&Request::Ping {}, Baggage::default()).await?.event {
            Event::Pong {} => Ok(()),
            other => Err(self.session().unexpected(&other)),
        }
    }

    /// Interfaces and routes of the box.
    ///
    /// # Errors
    /// When the box's kernel refuses to tell.
    pub async fn network(&self) -> Result<Network> {
        match self.session().call(&Request::Stats {}, Baggage::default()).await?.event {
            Event::Network {
                interfaces,
                routes,
                truncated,
            } => Ok(Network {
                interfaces: interfaces.0,
                routes: routes.0,
                truncated,
            }),
            Event::Failed { errno, step } => Err(system_error("read the box's interfaces", errno, step)),
            other => Err(self.session().unexpected(&other)),
        }
    }

    /// Makes 127.0.0.11 unreachable in the box, where Docker's resolver stays when a container is disconnected from a
    /// network of its user's, or reachable again. May be repeated.
    ///
    /// # Errors
    /// [`PermissionDenied`](ErrorKind::PermissionDenied) for a guest without `CAP_NET_ADMIN`.
    pub async fn set_resolver_reachable(&self, reachable: bool) -> Result<()> {
        let request = Request::Resolver { reachable };
        match self.session().call(&request, Baggage::default()).await?.event {
            Event::Done {} => Ok(()),
            Event::Failed { errno, step } => Err(system_error("change the way to the box's resolver", errno, step)),
            other => Err(self.session().unexpected(&other)),
        }
    }

    /// Reports every interface but `lo` that is up in the box or comes up later. A later watch replaces an earlier one,
    /// and a watch reports a few at most: the first is reason enough to give the box up.
    ///
    /// # Errors
    /// When the box's kernel refuses to tell.
    pub async fn watch_interfaces(&self) -> Result<InterfaceWatch> {
        let session = self.session();
        let tag = session.number();
        let (sender, receiver) = mpsc::channel(16);
        session.set_watch(tag, sender);
        let baggage = Baggage {
            tag: Some(tag),
            ..Baggage::default()
        };
        match session.call(&Request::Watch {}, baggage).await?.event {
            Event::Done {} => Ok(InterfaceWatch {
                session: session.clone(),
                receiver,
            }),
            Event::Failed { errno, step } => Err(system_error("watch the box's interfaces", errno, step)),
            other => Err(session.unexpected(&other)),
        }
    }

    /// Asks every program of the box to end, gives them five seconds, and ends the guest. Resolves when the link has
    /// ended, or after the deadline.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout); the link is then closed, which ends the guest too.
    pub async fn shutdown(&self, deadline: Duration) -> Result<()> {
        let ended = async {
            // Whatever becomes of the answer: what counts is the end of the link.
            let _ = self
                .session()
                .call_within(&Request::Shutdown {}, Baggage::default(), deadline)
                .await;
            self.ended().await
        };
        if tokio::time::timeout(deadline, ended).await.is_err() {
            self.close();
            return Err(Error::new(
                ErrorKind::Timeout,
                format!("the guest did not end within {deadline:?}"),
            ));
        }
        Ok(())
    }
}

/// Interfaces as they appear. Dropping it ends the watch on this side.
pub struct InterfaceWatch {
    session: Arc<Session>,
    receiver: mpsc::Receiver<Interface>,
}

impl InterfaceWatch {
    /// The next interface. Its name is text from the box. Cancel safe.
    ///
    /// # Errors
    /// When the link has ended, or another watch took this one's place.
    pub async fn next(&mut self) -> Result<Interface> {
        match self.receiver.recv().await {
            Some(interface) => Ok(interface),
            None => {
                self.session.check()?;
                Err(Error::new(
                    ErrorKind::Cancelled,
                    "another watch has taken the place of this one",
                ))
            }
        }
    }
}

impl std::fmt::Debug for InterfaceWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InterfaceWatch")
    }
}

/// Hears the guest's first frame and checks who it is; returns its process id.
async fn greet(reader: &mut impl FrameReader, token: &Token, timeout: Duration) -> Result<u32> {
    let first = tokio::time::timeout(timeout, reader.next()).await.map_err(|_| {
        Error::new(
            ErrorKind::Timeout,
            format!("the guest connected, but did not introduce itself within {timeout:?}"),
        )
    })?;
    let (frame, descriptors) = first.map_err(|failure| failure.error())?;
    let Event::Hello {
        magic,
        version,
        token: brought,
        pid,
    } = frame.message
    else {
        return Err(stranger("its first words are not an introduction"));
    };
    if magic != MAGIC || !descriptors.is_empty() {
        return Err(stranger("its first words are not an introduction"));
    }
    if version != VERSION {
        return Err(stranger(format_args!(
            "it speaks version {version}, and this host {VERSION}"
        )));
    }
    if !token.matches(&brought) {
        return Err(stranger("it does not have the token"));
    }
    Ok(pid)
}

/// A frame and the descriptors that came with it.
type Received = (Frame<Event>, Vec<OwnedFd>);

/// Where frames come from.
trait FrameReader: Send {
    /// The next frame with its descriptors; the end of the link is a failure.
    fn next(&mut self) -> impl Future<Output = Result<Received, Failure>> + Send;
}

struct SocketReader {
    socket: Arc<UnixStream>,
    decoder: Decoder,
    descriptors: VecDeque<OwnedFd>,
}

impl SocketReader {
    fn take(&mut self) -> Result<Option<Received>, Failure> {
        let Some(frame) = self.decoder.next_frame::<Event>().map_err(Failure::protocol)? else {
            let pending = self.descriptors.len();
            if pending > MAX_FDS || (pending > 0 && self.decoder.is_empty()) {
                return Err(Failure::protocol("descriptors that no frame announced"));
            }
            return Ok(None);
        };
        if frame.fds > self.descriptors.len() {
            return Err(Failure::protocol("a frame without the descriptors that it announced"));
        }
        let descriptors = self.descriptors.drain(..frame.fds).collect();
        Ok(Some((frame, descriptors)))
    }
}

impl FrameReader for SocketReader {
    async fn next(&mut self) -> Result<Received, Failure> {
        loop {
            if let Some(found) = self.take()? {
                return Ok(found);
            }
            self.socket.readable().await.map_err(Failure::gone)?;
            let (socket, spare, descriptors) = (&self.socket, self.decoder.spare(), &mut self.descriptors);
            match socket.try_io(Interest::READABLE, || receive(socket, spare, descriptors)) {
                Ok((_, true)) => return Err(Failure::protocol("more descriptors at once than any frame has")),
                Ok((0, _)) => return Err(Failure::gone("the guest has closed it")),
                Ok((count, _)) => self.decoder.filled(count),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(Failure::gone(error)),
            }
        }
    }
}

/// Receives once; whether the kernel had to drop descriptors is the second value.
fn receive(socket: &UnixStream, buffer: &mut [u8], descriptors: &mut VecDeque<OwnedFd>) -> io::Result<(usize, bool)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(CONTROL_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            descriptors.extend(fds);
        }
    }
    Ok((received.bytes, received.flags.contains(ReturnFlags::CTRUNC)))
}

struct StreamReader<R> {
    reader: R,
    decoder: Decoder,
}

impl<R: AsyncRead + Send + Unpin> FrameReader for StreamReader<R> {
    async fn next(&mut self) -> Result<Received, Failure> {
        loop {
            if let Some(frame) = self.decoder.next_frame::<Event>().map_err(Failure::protocol)? {
                if frame.fds > 0 {
                    return Err(Failure::protocol("descriptors over a link that has none"));
                }
                return Ok((frame, Vec::new()));
            }
            match self.reader.read(self.decoder.spare()).await {
                Ok(0) => return Err(Failure::gone("the guest has closed it")),
                Ok(count) => self.decoder.filled(count),
                Err(error) => return Err(Failure::gone(error)),
            }
        }
    }
}

// A frame from the guest is at most this long, so that is what a reader holds.
const _: () = assert!(Event::MAX < Request::MAX);
