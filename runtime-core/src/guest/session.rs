//! The state of one link: requests under way, programs, streams, and what a frame from the guest does to them.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::frame::{Event, GUEST_STREAM, Interface, Message, Request, Step, encode};
use super::net::Incoming;
use super::outbox::{Outbox, Outgoing, lock};
use super::process::Child;
use super::stdio::{MuxStream, Side, StreamState};
use crate::command::ExitStatus;
use crate::error::{Error, ErrorKind, Result};

/// Bytes of requests that may wait for the guest to read them. Further requests wait for room.
const BUDGET: usize = 8 << 20;
/// Given-up requests whose answer is still due. A guest that owes more does not answer at all.
const MAX_ABANDONED: usize = 4096;

/// Why a link ended. Everything that was under way, and everything that comes, fails with it.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    kind: ErrorKind,
    message: String,
}

impl Failure {
    /// The guest broke the protocol.
    pub(super) fn protocol(what: impl std::fmt::Display) -> Self {
        Self {
            kind: ErrorKind::Protocol,
            message: format!("the guest broke the protocol, and its link was closed: {what}"),
        }
    }

    /// The guest is gone.
    pub(super) fn gone(what: impl std::fmt::Display) -> Self {
        Self {
            kind: ErrorKind::SandboxGone,
            message: format!("the link to the guest, process 1 of the box, has ended: {what}"),
        }
    }

    /// The box got a network although its policy gives it none.
    #[cfg(feature = "egress")]
    pub(super) fn policy(what: impl std::fmt::Display) -> Self {
        Self {
            kind: ErrorKind::NetworkPolicy,
            message: format!("the box was given up, because its network is not closed any more: {what}"),
        }
    }

    pub(super) fn error(&self) -> Error {
        Error::new(self.kind, self.message.clone())
    }
}

/// The answer to a request.
pub(super) struct Answer {
    pub(super) event: Event,
    pub(super) descriptor: Option<OwnedFd>,
}

/// A request under way.
struct Call {
    /// `None` once nobody waits.
    reply: Option<oneshot::Sender<Answer>>,
    /// The program that it starts.
    child: Option<Arc<Child>>,
    /// The streams that exist if it succeeds.
    streams: Vec<u32>,
}

/// A relayed listener.
struct Relay {
    sender: mpsc::Sender<Incoming>,
    /// The guest was told of it, and will say when it is closed.
    announced: bool,
}

#[derive(Default)]
struct Table {
    failure: Option<Failure>,
    next: u32,
    calls: HashMap<u32, Call>,
    abandoned: usize,
    children: HashMap<u32, Arc<Child>>,
    streams: HashMap<u32, Arc<StreamState>>,
    listeners: HashMap<u32, Relay>,
    watch: Option<(u32, mpsc::Sender<Interface>)>,
}

impl Table {
    /// A number that nothing on this link uses.
    fn number(&mut self) -> u32 {
        loop {
            self.next = (self.next % (GUEST_STREAM - 1)) + 1;
            let used = self.calls.contains_key(&self.next)
                || self.children.contains_key(&self.next)
                || self.streams.contains_key(&self.next)
                || self.listeners.contains_key(&self.next);
            if !used {
                return self.next;
            }
        }
    }
}

/// What the reader and all users of a link share.
pub(super) struct Session {
    table: Mutex<Table>,
    outbox: Outbox,
    budget: Arc<Semaphore>,
    ended: watch::Sender<Option<Failure>>,
    /// Descriptors can be passed: a Unix socket.
    pub(super) passes: bool,
    pub(super) timeout: Duration,
}

/// What a request brings along besides its frame.
#[derive(Default)]
pub(super) struct Baggage {
    pub(super) descriptors: Vec<OwnedFd>,
    pub(super) child: Option<Arc<Child>>,
    pub(super) streams: Vec<u32>,
    pub(super) tag: Option<u32>,
}

impl Session {
    pub(super) fn new(outbox: Outbox, passes: bool, timeout: Duration) -> Self {
        Self {
            table: Mutex::default(),
            outbox,
            budget: Arc::new(Semaphore::new(BUDGET)),
            ended: watch::Sender::new(None),
            passes,
            timeout,
        }
    }

    pub(super) fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Ends the link. Only the first reason counts.
    pub(super) fn fail(&self, failure: Failure) {
        let (children, streams, calls, listeners, watch) = {
            let mut table = lock(&self.table);
            if table.failure.is_some() {
                return;
            }
            table.failure = Some(failure.clone());
            (
                std::mem::take(&mut table.children),
                std::mem::take(&mut table.streams),
                std::mem::take(&mut table.calls),
                std::mem::take(&mut table.listeners),
                table.watch.take(),
            )
        };
        tracing::debug!(reason = %failure.message, "link to the guest ended");
        self.outbox.close();
        self.budget.close();
        for child in children
            .values()
            .chain(calls.values().filter_map(|call| call.child.as_ref()))
        {
            child.end(Err(failure.clone()));
        }
        for stream in streams.values() {
            stream.fail();
        }
        self.ended.send_replace(Some(failure));
        // Dropping the senders wakes those who wait, who then find the failure.
        drop((calls, listeners, watch));
    }

    /// The error of an ended link.
    pub(super) fn failure(&self) -> Error {
        match &lock(&self.table).failure {
            Some(failure) => failure.error(),
            None => Failure::gone("an operation was dropped").error(),
        }
    }

    /// Whether the link has ended.
    pub(super) fn check(&self) -> Result<()> {
        match &lock(&self.table).failure {
            Some(failure) => Err(failure.error()),
            None => Ok(()),
        }
    }

    /// Waits for the end of the link.
    pub(super) async fn ended(&self) -> Error {
        let mut receiver = self.ended.subscribe();
        match receiver.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(failure)) => failure.error(),
            _ => self.failure(),
        }
    }

    /// Closes the link for a reply that does not belong to its request.
    pub(super) fn unexpected(&self, event: &Event) -> Error {
        self.broke(format_args!("{event:?} does not answer what was asked"))
    }

    /// Closes the link for another breach.
    pub(super) fn broke(&self, what: impl std::fmt::Display) -> Error {
        self.fail(Failure::protocol(what));
        self.failure()
    }

    /// Closes the link for a descriptor that is not what was asked for.
    pub(super) fn wrong_descriptor(&self, what: impl std::fmt::Display) -> Error {
        self.broke(format_args!("a descriptor is not what was asked for: {what}"))
    }

    /// Sends a frame that nobody waits for: signals on drop, credit, the end of a stream. Never blocks.
    pub(super) fn post(&self, tag: u32, request: &Request) {
        if let Ok(bytes) = encode(tag, 0, request)
            && let Err(error) = self.outbox.push(Outgoing::new(bytes, Vec::new(), None))
        {
            self.fail(Failure::gone(error));
        }
    }

    /// Sends bytes of a stream.
    pub(super) fn post_data(&self, stream: &Arc<StreamState>, bytes: &[u8]) -> usize {
        let Ok(frame) = encode(stream.id(), 0, &Request::Data { bytes: bytes.to_vec() }) else {
            return 0;
        };
        let len = frame.len();
        if let Err(error) = self.outbox.push(Outgoing::data(frame, stream.clone())) {
            self.fail(Failure::gone(error));
        }
        len
    }

    /// A number for a request that must be known before it is sent.
    pub(super) fn number(&self) -> u32 {
        lock(&self.table).number()
    }

    /// A new stream of the host's.
    pub(super) fn stream(self: &Arc<Self>, side: Side) -> Result<MuxStream> {
        let mut table = lock(&self.table);
        if let Some(failure) = &table.failure {
            return Err(failure.error());
        }
        let id = table.number();
        let state = Arc::new(StreamState::new(id));
        table.streams.insert(id, state.clone());
        Ok(MuxStream::new(self.clone(), state, side))
    }

    /// Forgets a stream that the guest was never told of.
    pub(super) fn forget_stream(&self, id: u32) {
        lock(&self.table).streams.remove(&id);
    }

    /// Closes a relayed listener in the guest, if the guest was told of it, and else forgets it.
    pub(super) fn give_up_listener(&self, id: u32) {
        {
            let mut table = lock(&self.table);
            match table.listeners.get(&id) {
                Some(relay) if !relay.announced => {
                    table.listeners.remove(&id);
                    return;
                }
                Some(_) => {}
                None => return,
            }
        }
        self.post(id, &Request::Reset {});
    }

    /// A new relayed listener of the host's.
    pub(super) fn relayed_listener(&self, sender: mpsc::Sender<Incoming>) -> Result<u32> {
        let mut table = lock(&self.table);
        if let Some(failure) = &table.failure {
            return Err(failure.error());
        }
        let id = table.number();
        let announced = false;
        table.listeners.insert(id, Relay { sender, announced });
        Ok(id)
    }

    /// Sets who hears of interfaces.
    pub(super) fn set_watch(&self, tag: u32, sender: mpsc::Sender<Interface>) {
        lock(&self.table).watch = Some((tag, sender));
    }

    /// Sends a request and waits for its answer, at most for the link's timeout.
    ///
    /// When the future is dropped the answer is awaited by nobody, and what the request had started is given up.
    pub(super) async fn call(self: &Arc<Self>, request: &Request, baggage: Baggage) -> Result<Answer> {
        self.call_within(request, baggage, self.timeout).await
    }

    /// As [`call`](Self::call), with another deadline.
    pub(super) async fn call_within(
        self: &Arc<Self>,
        request: &Request,
        baggage: Baggage,
        timeout: Duration,
    ) -> Result<Answer> {
        tokio::time::timeout(timeout, self.call_unbounded(request, baggage))
            .await
            .unwrap_or_else(|_| {
                Err(Error::new(
                    ErrorKind::Timeout,
                    format!("the guest did not answer {request:?} within {timeout:?}"),
                ))
            })
    }

    async fn call_unbounded(self: &Arc<Self>, request: &Request, baggage: Baggage) -> Result<Answer> {
        let Baggage {
            descriptors,
            child,
            streams,
            tag,
        } = baggage;
        let tag = tag.unwrap_or_else(|| self.number());
        let bytes = encode(tag, descriptors.len() as u8, request).map_err(|_| {
            Error::invalid_argument(
                "argv",
                format!("a request may have {} bytes, and this one has more", Request::MAX),
            )
        })?;
        let room = self.budget.clone().acquire_many_owned(bytes.len() as u32).await;
        let room = room.map_err(|_| self.failure())?;
        let (sender, receiver) = oneshot::channel();
        let spawns = child.is_some();
        {
            let mut table = lock(&self.table);
            if let Some(failure) = &table.failure {
                return Err(failure.error());
            }
            for id in &streams {
                if let Some(stream) = table.streams.get(id) {
                    stream.announce();
                }
                if let Some(relay) = table.listeners.get_mut(id) {
                    relay.announced = true;
                }
            }
            let call = Call {
                reply: Some(sender),
                child,
                streams,
            };
            table.calls.insert(tag, call);
        }
        let waiting = Waiting {
            session: self,
            tag,
            spawns,
        };
        if let Err(error) = self.outbox.push(Outgoing::new(bytes, descriptors, Some(room))) {
            self.fail(Failure::gone(error));
        }
        let answer = receiver.await.map_err(|_| self.failure())?;
        std::mem::forget(waiting);
        Ok(answer)
    }

    /// The outcome of a request that has no result.
    pub(super) async fn call_for_done(
        self: &Arc<Self>,
        request: &Request,
        what: impl std::fmt::Display,
        timeout: Duration,
    ) -> Result<()> {
        match self.call_within(request, Baggage::default(), timeout).await?.event {
            Event::Done {} => Ok(()),
            Event::Failed { errno, step } => Err(system_error(what, errno, step)),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Does what a frame of the guest says.
    pub(super) fn receive(
        self: &Arc<Self>,
        tag: u32,
        event: Event,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<(), Failure> {
        let brings = matches!(
            event,
            Event::Opened { .. } | Event::Listening { .. } | Event::Connected {}
        );
        if descriptors.len() != usize::from(brings && self.passes) {
            return Err(Failure::protocol(format_args!(
                "{event:?} came with {} descriptors",
                descriptors.len()
            )));
        }
        match event {
            Event::Hello { .. } => Err(Failure::protocol("a second Hello")),
            Event::Exited { code, signal, oom } => self.exited(tag, code, signal, oom),
            Event::Appeared { interface } => self.appeared(tag, interface),
            Event::Output { bytes } => self.with_stream(tag, |stream| stream.output(Bytes::from(bytes))),
            Event::Grant { amount } => self.with_stream(tag, |stream| stream.grant(amount)),
            Event::End {} => self.with_stream(tag, StreamState::end),
            Event::Closed { errno } => self.closed(tag, errno),
            Event::Accepted { stream, peer } => self.accepted(tag, stream, peer),
            event => {
                let answer = Answer {
                    event,
                    descriptor: descriptors.pop(),
                };
                self.answered(tag, answer)
            }
        }
    }

    fn answered(&self, tag: u32, answer: Answer) -> Result<(), Failure> {
        if let Event::Failed { errno, .. } = answer.event
            && !(1..=4095).contains(&errno)
        {
            return Err(Failure::protocol("an error number that does not exist"));
        }
        let mut table = lock(&self.table);
        let Some(call) = table.calls.remove(&tag) else {
            return Err(Failure::protocol(format_args!(
                "{:?} answers nothing that was asked",
                answer.event
            )));
        };
        if let Event::Failed { .. } = answer.event {
            for id in call.streams {
                if let Some(stream) = table.streams.remove(&id) {
                    stream.fail();
                }
                table.listeners.remove(&id);
            }
        }
        if let Event::Started { pid } = answer.event {
            let Some(child) = call.child.filter(|_| pid > 0 && pid <= i32::MAX as u32) else {
                return Err(Failure::protocol("Started for what starts nothing"));
            };
            child.started(pid);
            table.children.insert(tag, child);
        }
        match call.reply {
            None => table.abandoned -= 1,
            // Whoever waited may be gone just now; what came for it is dropped, which closes it.
            Some(reply) => drop(reply.send(answer)),
        }
        Ok(())
    }

    fn exited(&self, tag: u32, code: i32, signal: i32, oom: bool) -> Result<(), Failure> {
        let status = match (code, signal) {
            (0..=255, 0) => ExitStatus::exited(code),
            (0, 1..=64) => ExitStatus::signaled(signal),
            _ => return Err(Failure::protocol("an exit status that does not exist")),
        };
        let child = lock(&self.table).children.remove(&tag);
        let child = child.ok_or_else(|| Failure::protocol("the end of a program that does not run"))?;
        child.end(Ok(status.with_oom_killed(oom)));
        Ok(())
    }

    fn appeared(&self, tag: u32, interface: Interface) -> Result<(), Failure> {
        let mut table = lock(&self.table);
        match &table.watch {
            Some((watch, sender)) if *watch == tag => {
                if let Err(mpsc::error::TrySendError::Closed(_)) = sender.try_send(interface) {
                    table.watch = None;
                }
                Ok(())
            }
            // The watch was given up.
            None => Ok(()),
            Some(_) => Err(Failure::protocol("an interface for a watch that was not set")),
        }
    }

    fn with_stream(&self, id: u32, act: impl FnOnce(&StreamState) -> Result<(), Failure>) -> Result<(), Failure> {
        let stream = lock(&self.table).streams.get(&id).cloned();
        act(&*stream.ok_or_else(|| Failure::protocol("a stream that does not exist"))?)
    }

    fn closed(&self, id: u32, errno: i32) -> Result<(), Failure> {
        if !(0..=4095).contains(&errno) {
            return Err(Failure::protocol("an error number that does not exist"));
        }
        let mut table = lock(&self.table);
        if table.listeners.remove(&id).is_some() {
            return Ok(());
        }
        let stream = table.streams.remove(&id);
        drop(table);
        stream
            .ok_or_else(|| Failure::protocol("a stream that does not exist"))?
            .close(errno);
        Ok(())
    }

    fn accepted(self: &Arc<Self>, tag: u32, id: u32, peer: std::net::SocketAddr) -> Result<(), Failure> {
        let mut table = lock(&self.table);
        if id & GUEST_STREAM == 0 || table.streams.contains_key(&id) {
            return Err(Failure::protocol("a stream number that is not the guest's to give"));
        }
        let sender = table.listeners.get(&tag).map(|relay| relay.sender.clone());
        let sender = sender.ok_or_else(|| Failure::protocol("a connection to a listener that does not exist"))?;
        let state = Arc::new(StreamState::new(id));
        state.announce();
        table.streams.insert(id, state.clone());
        drop(table);
        let stream = MuxStream::new(self.clone(), state, Side::Both);
        match sender.try_send(Incoming { stream, peer }) {
            // Closed: the listener was given up meanwhile, and dropping the stream resets it.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(Failure::protocol("more connections than were asked for")),
        }
    }
}

/// Gives a request up when its future is dropped.
struct Waiting<'a> {
    session: &'a Arc<Session>,
    tag: u32,
    spawns: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let abandoned = {
            let mut table = lock(&self.session.table);
            if let Some(call) = table.calls.get_mut(&self.tag) {
                call.reply = None;
                table.abandoned += 1;
            }
            table.abandoned
        };
        // A program that has started, or starts when the guest gets to it, is killed.
        let target = self.tag;
        let request = if self.spawns {
            Request::Release { target }
        } else {
            Request::Cancel { target }
        };
        self.session.post(target, &request);
        if abandoned > MAX_ABANDONED {
            self.session.fail(Failure::protocol("it does not answer"));
        }
    }
}

/// The error for an error number of the guest's system.
pub(super) fn system_error(what: impl std::fmt::Display, errno: i32, step: Step) -> Error {
    if step == Step::FileType {
        return Error::new(ErrorKind::WrongFileType, format!("{what}: it is not a regular file"));
    }
    Error::io(what, std::io::Error::from_raw_os_error(errno))
}
