//! A guest that somebody has taken over. Each breach is a typed error within a deadline, and nothing hangs.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use runtime_core::guest::frame::{
    Decoder, Entry, Event, FileInfo, FileKind, GUEST_STREAM, Interface, List, MAGIC, MAX_CHUNK, Request, Step, VERSION,
    WINDOW, encode,
};
use runtime_core::guest::{Link, LinkOptions, Rendezvous, SpawnOptions, Token};
use runtime_core::{Error, ErrorKind};
use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{LONG, exec, within};

/// The false guest's side of a link.
struct Script {
    socket: UnixStream,
    decoder: Decoder,
}

impl Script {
    fn new(socket: UnixStream) -> Self {
        socket.set_read_timeout(Some(LONG)).unwrap();
        Self {
            socket,
            decoder: Decoder::new(),
        }
    }

    /// Sends bytes; that nobody listens any more is fine.
    fn raw(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    fn send(&mut self, tag: u32, event: &Event) {
        self.raw(&encode(tag, 0, event).unwrap());
    }

    /// Sends an event that announces `announced` descriptors, with those in `passed`.
    fn pass(&mut self, tag: u32, event: &Event, announced: u8, passed: &[OwnedFd]) {
        let bytes = encode(tag, announced, event).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = passed.iter().map(AsFd::as_fd).collect();
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        let _ = rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    /// The next request of the host; `None` when it has closed the link. Descriptors that come along are dropped.
    fn next(&mut self) -> Option<(u32, Request)> {
        loop {
            if let Some(frame) = self.decoder.next_frame::<Request>().unwrap() {
                return Some((frame.tag, frame.message));
            }
            match self.socket.read(self.decoder.spare()) {
                Ok(count) if count > 0 => self.decoder.filled(count),
                _ => return None,
            }
        }
    }

    /// Reads until the host closes the link.
    fn until_closed(&mut self) {
        while self.next().is_some() {}
    }
}

fn hello(token: &Token) -> Event {
    let (_, digits) = token.variable();
    let byte = |at: usize| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap();
    Event::Hello {
        magic: MAGIC,
        version: VERSION,
        token: std::array::from_fn(byte),
        pid: 1,
    }
}

fn options() -> LinkOptions {
    LinkOptions {
        handshake_timeout: Duration::from_millis(500),
        request_timeout: Duration::from_secs(20),
    }
}

/// What comes of an introduction.
async fn introduce(script: impl FnOnce(&mut Script, &Token) + Send + 'static) -> Result<Link, Error> {
    let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
    let theirs = theirs.into_std().unwrap();
    theirs.set_nonblocking(false).unwrap();
    let token = Token::generate().unwrap();
    let copy = token.clone();
    let thread = std::thread::spawn(move || {
        let mut guest = Script::new(theirs);
        script(&mut guest, &copy);
    });
    let result = within(Link::over_socket(ours, &token, options())).await;
    if result.is_err() {
        within(tokio::task::spawn_blocking(move || thread.join().unwrap()))
            .await
            .unwrap();
    }
    result
}

/// A link over a socket to a guest that introduces itself and then follows the script.
async fn socket_link(script: impl FnOnce(&mut Script) + Send + 'static) -> (Link, JoinHandle<()>) {
    socket_link_with(options(), script).await
}

async fn socket_link_with(
    options: LinkOptions,
    script: impl FnOnce(&mut Script) + Send + 'static,
) -> (Link, JoinHandle<()>) {
    let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
    let token = Token::generate().unwrap();
    let thread = play(theirs, &token, script);
    (within(Link::over_socket(ours, &token, options)).await.unwrap(), thread)
}

/// The same over byte streams.
async fn stdio_link(script: impl FnOnce(&mut Script) + Send + 'static) -> (Link, JoinHandle<()>) {
    let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
    let token = Token::generate().unwrap();
    let thread = play(theirs, &token, script);
    let (reader, writer) = ours.into_split();
    (
        within(Link::over_stdio(reader, writer, &token, options()))
            .await
            .unwrap(),
        thread,
    )
}

fn play(
    socket: tokio::net::UnixStream,
    token: &Token,
    script: impl FnOnce(&mut Script) + Send + 'static,
) -> JoinHandle<()> {
    let socket = socket.into_std().unwrap();
    socket.set_nonblocking(false).unwrap();
    let hello = hello(token);
    std::thread::spawn(move || {
        let mut guest = Script::new(socket);
        guest.send(0, &hello);
        script(&mut guest);
    })
}

async fn join(thread: JoinHandle<()>) {
    within(tokio::task::spawn_blocking(move || thread.join().unwrap()))
        .await
        .unwrap();
}

fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

fn open(path: &str, flags: OFlags) -> OwnedFd {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

fn memfd(content: &[u8]) -> OwnedFd {
    let fd = rustix::fs::memfd_create("content", MemfdFlags::CLOEXEC).unwrap();
    std::fs::File::from(fd.try_clone().unwrap()).write_all(content).unwrap();
    fd
}

#[tokio::test]
async fn who_is_not_our_guest_is_turned_away() {
    let kind = |result: Result<Link, Error>| result.map(drop).unwrap_err().kind();
    let other = Token::generate().unwrap();
    let result = introduce(move |guest, _| guest.send(0, &hello(&other))).await;
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.message().contains("token"), "{error}");

    let result = introduce(|guest, token| {
        let Event::Hello { magic, token, pid, .. } = hello(token) else {
            unreachable!()
        };
        guest.send(
            0,
            &Event::Hello {
                magic,
                version: VERSION + 1,
                token,
                pid,
            },
        );
    });
    let error = result.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.message().contains(&format!("version {}", VERSION + 1)), "{error}");

    let result = introduce(|guest, token| {
        let Event::Hello {
            version, token, pid, ..
        } = hello(token)
        else {
            unreachable!()
        };
        guest.send(
            0,
            &Event::Hello {
                magic: *b"HTTP",
                version,
                token,
                pid,
            },
        );
    });
    assert_eq!(kind(result.await), ErrorKind::Protocol);
    assert_eq!(
        kind(introduce(|guest, _| guest.send(0, &Event::Pong {})).await),
        ErrorKind::Protocol
    );
    assert_eq!(
        kind(introduce(|guest, _| guest.raw(b"GET / HTTP/1.1\r\n\r\n")).await),
        ErrorKind::Protocol
    );
    let with_descriptor = introduce(|guest, token| guest.pass(0, &hello(token), 1, &[memfd(b"")]));
    assert_eq!(kind(with_descriptor.await), ErrorKind::Protocol);
    assert_eq!(kind(introduce(|_, _| ()).await), ErrorKind::SandboxGone);
    let half = introduce(|guest, token| guest.raw(&encode(0, 0, &hello(token)).unwrap()[..20]));
    assert_eq!(kind(half.await), ErrorKind::SandboxGone);
    let silent = introduce(|guest, _| guest.until_closed());
    assert_eq!(kind(silent.await), ErrorKind::Timeout);
}

#[tokio::test]
async fn nobody_gets_in_after_the_first() {
    let directory = tempfile::tempdir().unwrap();
    let rendezvous = Rendezvous::new(
        &directory.path().join("private"),
        "box",
        &directory.path().join("cache"),
    )
    .unwrap();
    let path = rendezvous.directory().join("socket");
    let mut first = Script::new(UnixStream::connect(&path).unwrap());
    // Queued before the first is accepted.
    let mut second = UnixStream::connect(&path).unwrap();
    first.send(0, &hello(rendezvous.token()));
    let link = within(rendezvous.accept(LONG, options())).await.unwrap();
    assert!(!path.exists(), "the socket is gone");
    assert!(UnixStream::connect(&path).is_err());
    second.set_read_timeout(Some(LONG)).unwrap();
    assert!(
        !matches!(second.read(&mut [0]), Ok(1)),
        "the second is closed without a word"
    );
    let ping = tokio::spawn(async move { link.ping().await });
    let answered = tokio::task::spawn_blocking(move || {
        let (tag, _) = first.next().unwrap();
        first.send(tag, &Event::Pong {});
        first
    });
    within(ping).await.unwrap().unwrap();
    answered.await.unwrap();
}

#[tokio::test]
async fn a_first_with_a_wrong_token_spoils_the_rendezvous() {
    let directory = tempfile::tempdir().unwrap();
    let rendezvous = Rendezvous::new(
        &directory.path().join("private"),
        "box",
        &directory.path().join("cache"),
    )
    .unwrap();
    let place = rendezvous.directory().to_path_buf();
    let mut first = Script::new(UnixStream::connect(place.join("socket")).unwrap());
    first.send(0, &hello(&Token::generate().unwrap()));
    let error = within(rendezvous.accept(LONG, options())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(
        UnixStream::connect(place.join("socket")).is_err(),
        "there is no second try"
    );
    Rendezvous::remove_directory(&place).unwrap();
    assert!(!place.exists());
    Rendezvous::remove_directory(&place).unwrap();
}

#[tokio::test]
async fn a_guest_that_never_comes_is_waited_for_until_the_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let rendezvous = Rendezvous::new(
        &directory.path().join("private"),
        "box",
        &directory.path().join("cache"),
    )
    .unwrap();
    let place = rendezvous.directory().join("socket");
    let error = within(rendezvous.accept(Duration::from_millis(50), options()))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(!place.exists());
}

#[tokio::test]
async fn a_parent_directory_that_others_may_enter_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let parent = directory.path().join("open");
    std::fs::create_dir(&parent).unwrap();
    std::fs::set_permissions(&parent, std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Rendezvous::new(&parent, "box", directory.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert_eq!(std::fs::read_dir(&parent).unwrap().count(), 0);
}

/// Every operation that is under way when the guest sends these bytes, and every later one, fails as a breach.
async fn is_a_breach(name: &str, bytes: Vec<u8>) {
    for over_socket in [true, false] {
        let sent = bytes.clone();
        let script = move |guest: &mut Script| {
            // All three are under way.
            for _ in 0..3 {
                guest.next().unwrap();
            }
            guest.raw(&sent);
            guest.until_closed();
        };
        let (link, thread) = if over_socket {
            socket_link(script).await
        } else {
            stdio_link(script).await
        };
        let (true_, sleep) = (exec(["true"]), SpawnOptions::default());
        let (spawned, pinged, read) = within(async {
            tokio::join!(
                link.spawn(&true_, &sleep),
                link.ping(),
                link.read(Path::new("/etc/passwd"), 10)
            )
        })
        .await;
        for error in [
            spawned.map(drop).unwrap_err(),
            pinged.unwrap_err(),
            read.map(drop).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Protocol, "{name}: {error}");
        }
        assert_eq!(link.ping().await.unwrap_err().kind(), ErrorKind::Protocol, "{name}");
        assert_eq!(within(link.ended()).await.kind(), ErrorKind::Protocol, "{name}");
        join(thread).await;
    }
}

#[tokio::test]
async fn frames_that_break_the_protocol_end_the_link_and_everything_under_way() {
    let frame = |tag, event: &Event| encode(tag, 0, event).unwrap();
    let mut oversized = frame(1, &Event::Done {});
    oversized[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    is_a_breach("oversized", oversized).await;
    let mut announcing = frame(1, &Event::Done {});
    announcing[5] = 1;
    is_a_breach("announces a descriptor that does not come", announcing).await;
    let mut unknown = frame(1, &Event::Done {});
    unknown[4] = 200;
    is_a_breach("unknown kind", unknown).await;
    is_a_breach("answer to nothing", frame(999_999, &Event::Done {})).await;
    is_a_breach("answer with tag 0", frame(0, &Event::Pong {})).await;
    is_a_breach("second Hello", frame(0, &hello(&Token::generate().unwrap()))).await;
    is_a_breach(
        "end of nothing",
        frame(
            77_777,
            &Event::Exited {
                code: 0,
                signal: 0,
                oom: false,
            },
        ),
    )
    .await;
    is_a_breach("interface for no watch", {
        let interface = Interface {
            index: 2,
            flags: 0,
            name: b"eth0".to_vec(),
        };
        // Without a watch it is nobody's; what follows is the breach.
        [
            frame(5, &Event::Appeared { interface }),
            frame(999_999, &Event::Done {}),
        ]
        .concat()
    })
    .await;
    is_a_breach("bytes of no stream", frame(55_555, &Event::Output { bytes: vec![1] })).await;
    is_a_breach("credit for no stream", frame(55_555, &Event::Grant { amount: 1 })).await;
    is_a_breach("end of no stream", frame(55_555, &Event::End {})).await;
    is_a_breach("close of no stream", frame(55_555, &Event::Closed { errno: 0 })).await;
    let peer = "127.0.0.1:1".parse().unwrap();
    is_a_breach(
        "connection to no listener",
        frame(
            55_555,
            &Event::Accepted {
                stream: GUEST_STREAM | 1,
                peer,
            },
        ),
    )
    .await;
}

#[tokio::test]
async fn a_frame_cut_off_by_the_end_is_a_box_that_is_gone() {
    let (link, thread) = socket_link(|guest| {
        guest.next().unwrap();
        let bytes = encode(1, 0, &Event::Target { path: vec![1; 1000] }).unwrap();
        guest.raw(&bytes[..500]);
    })
    .await;
    assert_eq!(within(link.ping()).await.unwrap_err().kind(), ErrorKind::SandboxGone);
    join(thread).await;
}

/// One answer to one request, for which the host must close the link.
async fn breaks_with<T>(
    answer: impl FnOnce(u32, &mut Script) + Send + 'static,
    request: impl AsyncFnOnce(&Link) -> Result<T, Error>,
) -> Error {
    let (link, thread) = socket_link(move |guest| {
        let (tag, _) = guest.next().unwrap();
        answer(tag, guest);
        guest.until_closed();
    })
    .await;
    let error = within(request(&link)).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert_eq!(within(link.ended()).await.kind(), ErrorKind::Protocol);
    join(thread).await;
    error
}

#[tokio::test]
async fn answers_that_do_not_fit_the_question_are_breaches() {
    breaks_with(
        |tag, guest| guest.send(tag, &Event::Done {}),
        async |link| link.ping().await,
    )
    .await;
    breaks_with(
        |tag, guest| guest.send(tag, &Event::Pong {}),
        async |link| link.network().await,
    )
    .await;
    breaks_with(
        |tag, guest| guest.send(tag, &Event::Started { pid: 5 }),
        async |link| link.ping().await,
    )
    .await;
    let spawn = async |link: &Link| link.spawn(&exec(["true"]), &SpawnOptions::default()).await;
    breaks_with(|tag, guest| guest.send(tag, &Event::Started { pid: 0 }), spawn).await;
    breaks_with(|tag, guest| guest.send(tag, &Event::Started { pid: u32::MAX }), spawn).await;
    breaks_with(|tag, guest| guest.send(tag, &Event::Done {}), spawn).await;
    for errno in [0, -1, 4096, i32::MAX] {
        let failed = Event::Failed {
            errno,
            step: Step::Exec,
        };
        breaks_with(move |tag, guest| guest.send(tag, &failed), spawn).await;
    }
    let list = async |link: &Link| link.list(Path::new("/"), 100).await;
    for name in [&b""[..], b".", b"..", b"a/b", b"/etc/passwd", b"a\0", &[b'x'; 256]] {
        let info = FileInfo {
            kind: FileKind::File,
            mode: 0,
            size: 0,
            mtime: 0,
            mtime_nsec: 0,
            uid: 0,
            gid: 0,
        };
        let entries = Event::Entries {
            entries: List(vec![Entry {
                name: name.to_vec(),
                info,
            }]),
            more: false,
        };
        breaks_with(move |tag, guest| guest.send(tag, &entries), list).await;
    }
    let long = Event::Target { path: vec![b'x'; 5000] };
    breaks_with(
        move |tag, guest| guest.send(tag, &long),
        async |link| link.readlink(Path::new("/x")).await,
    )
    .await;
}

#[tokio::test]
async fn exit_statuses_that_do_not_exist_are_breaches() {
    for (code, signal) in [(256, 0), (-1, 0), (0, 65), (0, -9), (1, 9), (i32::MIN, i32::MAX)] {
        let (link, thread) = socket_link(move |guest| {
            let (tag, _) = guest.next().unwrap();
            guest.send(tag, &Event::Started { pid: 5 });
            guest.send(
                tag,
                &Event::Exited {
                    code,
                    signal,
                    oom: false,
                },
            );
            guest.until_closed();
        })
        .await;
        let ended = async {
            match link.spawn(&exec(["true"]), &SpawnOptions::default()).await {
                Ok(mut process) => process.wait().await.unwrap_err().kind(),
                Err(error) => error.kind(),
            }
        };
        assert_eq!(within(ended).await, ErrorKind::Protocol);
        join(thread).await;
    }
}

#[tokio::test]
async fn a_listing_without_end_stops_at_the_limit() {
    let (link, thread) = socket_link(|guest| {
        let mut number = 0;
        while let Some((tag, request)) = guest.next() {
            if matches!(request, Request::List { .. } | Request::ListMore { .. }) {
                let info = FileInfo {
                    kind: FileKind::File,
                    mode: 0,
                    size: 0,
                    mtime: 0,
                    mtime_nsec: 0,
                    uid: 0,
                    gid: 0,
                };
                number += 1;
                let name = format!("file-{number}").into_bytes();
                guest.send(
                    tag,
                    &Event::Entries {
                        entries: List(vec![Entry { name, info }; 100]),
                        more: true,
                    },
                );
            }
        }
    })
    .await;
    let error = within(link.list(Path::new("/"), 10_000)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    drop(link);
    join(thread).await;
}

#[tokio::test]
async fn a_descriptor_that_is_not_a_regular_file_is_a_breach() {
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
    let fifo = fifo.to_str().unwrap().to_owned();
    type Make = Box<dyn Fn() -> OwnedFd>;
    let wrong: Vec<(&str, Make)> = vec![
        ("directory", Box::new(|| open("/", OFlags::RDONLY))),
        ("device", Box::new(|| open("/dev/zero", OFlags::RDONLY))),
        ("null", Box::new(|| open("/dev/null", OFlags::RDWR))),
        ("fifo", Box::new(move || open(&fifo, OFlags::RDWR))),
        ("socket", Box::new(|| tcp_pair().0.into())),
        ("path only", Box::new(|| open("/etc/passwd", OFlags::PATH))),
        (
            "event",
            Box::new(|| rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()),
        ),
    ];
    for (name, make) in wrong {
        let fd = make();
        let answer = move |tag, guest: &mut Script| guest.pass(tag, &Event::Opened { size: 1 }, 1, &[fd]);
        let error = breaks_with(answer, async |link| link.read(Path::new("/x"), 100).await).await;
        assert!(error.message().contains("descriptor"), "{name}: {error}");
        let fd = make();
        let answer = move |tag, guest: &mut Script| guest.pass(tag, &Event::Opened { size: 1 }, 1, &[fd]);
        breaks_with(answer, async |link| {
            link.write(
                Path::new("/x"),
                "data".into(),
                runtime_core::guest::WriteFile::default(),
            )
            .await
        })
        .await;
    }
    let answer = |tag, guest: &mut Script| {
        guest.pass(
            tag,
            &Event::Opened { size: 1 },
            1,
            &[open("/etc/passwd", OFlags::RDONLY)],
        );
    };
    breaks_with(answer, async |link| {
        link.write(
            Path::new("/x"),
            "data".into(),
            runtime_core::guest::WriteFile::default(),
        )
        .await
    })
    .await;
}

#[tokio::test]
async fn a_descriptor_that_is_not_the_right_socket_is_a_breach() {
    let wrong_connection: Vec<fn() -> OwnedFd> = vec![
        || UdpSocket::bind("127.0.0.1:0").unwrap().into(),
        || UnixStream::pair().unwrap().0.into(),
        || TcpListener::bind("127.0.0.1:0").unwrap().into(),
        || rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap(),
        || memfd(b""),
        || open("/dev/null", OFlags::RDWR),
        || rustix::pipe::pipe().unwrap().0,
    ];
    let address: SocketAddr = "127.0.0.1:1".parse().unwrap();
    for make in wrong_connection {
        let answer = move |tag, guest: &mut Script| guest.pass(tag, &Event::Connected {}, 1, &[make()]);
        breaks_with(answer, async |link| link.dial(address).await).await;
    }
    let wrong_listener: Vec<fn() -> OwnedFd> = vec![
        || tcp_pair().0.into(),
        || UdpSocket::bind("127.0.0.1:0").unwrap().into(),
        || memfd(b""),
        || {
            let directory = tempfile::tempdir().unwrap();
            std::os::unix::net::UnixListener::bind(directory.path().join("s"))
                .unwrap()
                .into()
        },
    ];
    for make in wrong_listener {
        let answer = move |tag, guest: &mut Script| guest.pass(tag, &Event::Listening { address }, 1, &[make()]);
        breaks_with(answer, async |link| link.listen(address).await).await;
    }
}

#[tokio::test]
async fn descriptors_in_the_wrong_number_are_breaches() {
    let read = async |link: &Link| link.read(Path::new("/x"), 100).await;
    breaks_with(|tag, guest| guest.send(tag, &Event::Opened { size: 1 }), read).await;
    let two = |tag, guest: &mut Script| guest.pass(tag, &Event::Opened { size: 1 }, 2, &[memfd(b"a"), memfd(b"b")]);
    breaks_with(two, read).await;
    let unannounced = |tag, guest: &mut Script| guest.pass(tag, &Event::Opened { size: 1 }, 0, &[memfd(b"a")]);
    breaks_with(unannounced, read).await;
    let ping = async |link: &Link| link.ping().await;
    breaks_with(|tag, guest| guest.pass(tag, &Event::Pong {}, 1, &[memfd(b"a")]), ping).await;
    let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let many = |tag, guest: &mut Script| {
        let all: Vec<OwnedFd> = (0..200).map(|_| open("/dev/null", OFlags::RDONLY)).collect();
        guest.pass(tag, &Event::Opened { size: 1 }, 1, &all);
    };
    breaks_with(many, read).await;
    crate::support::eventually("all 200 are closed", || {
        std::fs::read_dir("/proc/self/fd").unwrap().count() < before + 150
    })
    .await;
}

#[tokio::test]
async fn a_file_that_lies_about_its_size_or_changes_it_is_bounded() {
    let (link, thread) = socket_link(|guest| {
        let (tag, _) = guest.next().unwrap();
        guest.pass(tag, &Event::Opened { size: u64::MAX }, 1, &[memfd(b"small")]);
        let (tag, _) = guest.next().unwrap();
        guest.pass(tag, &Event::Opened { size: 0 }, 1, &[memfd(&[1; 5000])]);
        let (tag, _) = guest.next().unwrap();
        // It grows for as long as it is read.
        let growing = memfd(&[1; 1 << 20]);
        let mut file = std::fs::File::from(growing.try_clone().unwrap());
        guest.pass(tag, &Event::Opened { size: 10 }, 1, &[growing]);
        for _ in 0..64 {
            file.write_all(&[1; 1 << 20]).unwrap();
        }
        let (tag, _) = guest.next().unwrap();
        let shrinking = memfd(&[1; 1 << 20]);
        let file = std::fs::File::from(shrinking.try_clone().unwrap());
        guest.pass(tag, &Event::Opened { size: 1 << 20 }, 1, &[shrinking]);
        for len in (0..1024).rev() {
            file.set_len(len << 10).unwrap();
        }
        guest.until_closed();
    })
    .await;
    let path = Path::new("/x");
    assert_eq!(within(link.read(path, u64::MAX)).await.unwrap(), "small");
    assert_eq!(within(link.read(path, u64::MAX)).await.unwrap(), vec![1; 5000]);
    assert_eq!(
        within(link.read(path, 100_000)).await.unwrap_err().kind(),
        ErrorKind::LimitExceeded
    );
    assert!(within(link.read(path, u64::MAX)).await.unwrap().len() <= 1 << 20);
    drop(link);
    join(thread).await;
}

#[tokio::test]
async fn a_guest_that_never_answers_costs_each_request_its_deadline_and_no_more() {
    let options = LinkOptions {
        request_timeout: Duration::from_millis(50),
        ..options()
    };
    let (link, thread) = socket_link_with(options, Script::until_closed).await;
    let path = Path::new("/x");
    let (program, how) = (exec(["true"]), SpawnOptions::default());
    assert_eq!(
        within(link.spawn(&program, &how)).await.unwrap_err().kind(),
        ErrorKind::Timeout
    );
    assert_eq!(within(link.ping()).await.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(within(link.read(path, 1)).await.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(
        within(link.stat(path, true)).await.unwrap_err().kind(),
        ErrorKind::Timeout
    );
    assert_eq!(within(link.list(path, 1)).await.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(
        within(link.dial("127.0.0.1:1".parse().unwrap()))
            .await
            .unwrap_err()
            .kind(),
        ErrorKind::Timeout
    );
    assert_eq!(
        within(link.listen("127.0.0.1:1".parse().unwrap()))
            .await
            .unwrap_err()
            .kind(),
        ErrorKind::Timeout
    );
    assert_eq!(within(link.network()).await.unwrap_err().kind(), ErrorKind::Timeout);
    link.check().unwrap();
    // What it owes is bounded as well.
    let mut last = ErrorKind::Timeout;
    for _ in 0..100 {
        let mut pings = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let link = link.clone();
            pings.spawn(async move { link.ping().await.unwrap_err().kind() });
        }
        while let Some(kind) = within(pings.join_next()).await {
            last = kind.unwrap();
        }
        if last != ErrorKind::Timeout {
            break;
        }
    }
    assert_eq!(last, ErrorKind::Protocol);
    join(thread).await;
}

#[tokio::test]
async fn a_late_answer_to_a_request_that_was_given_up_is_no_breach() {
    let options = LinkOptions {
        request_timeout: Duration::from_millis(100),
        ..options()
    };
    let (link, thread) = socket_link_with(options, |guest| {
        let (first, _) = guest.next().unwrap();
        // The host gives it up and says so.
        let (_, cancel) = guest.next().unwrap();
        assert!(cancel == Request::Cancel { target: first });
        guest.pass(first, &Event::Opened { size: 1 }, 1, &[memfd(b"late")]);
        let (spawn, _) = guest.next().unwrap();
        let (_, release) = guest.next().unwrap();
        assert!(release == Request::Release { target: spawn });
        guest.send(spawn, &Event::Started { pid: 7 });
        guest.send(
            spawn,
            &Event::Exited {
                code: 0,
                signal: 9,
                oom: false,
            },
        );
        let (ping, _) = guest.next().unwrap();
        guest.send(ping, &Event::Pong {});
        guest.until_closed();
    })
    .await;
    assert_eq!(
        within(link.read(Path::new("/x"), 1)).await.unwrap_err().kind(),
        ErrorKind::Timeout
    );
    let (program, how) = (exec(["true"]), SpawnOptions::default());
    assert_eq!(
        within(link.spawn(&program, &how)).await.unwrap_err().kind(),
        ErrorKind::Timeout
    );
    within(link.ping()).await.unwrap();
    drop(link);
    join(thread).await;
}

#[tokio::test]
async fn a_guest_that_does_not_read_holds_requests_back_in_bounded_memory() {
    let options = LinkOptions {
        request_timeout: Duration::from_millis(300),
        ..options()
    };
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let (link, thread) = socket_link_with(options, move |_| stopped.recv().unwrap()).await;
    let mut spawns = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let link = link.clone();
        spawns.spawn(async move {
            let mut large = exec(["true"]);
            large.env = runtime_core::Env::from_iter([("LARGE", "x".repeat(1 << 20))]);
            link.spawn(&large, &SpawnOptions::default()).await.unwrap_err().kind()
        });
    }
    while let Some(kind) = within(spawns.join_next()).await {
        assert_eq!(kind.unwrap(), ErrorKind::Timeout);
    }
    stop.send(()).unwrap();
    join(thread).await;
    assert_eq!(within(link.ended()).await.kind(), ErrorKind::SandboxGone);
}

/// The host runs on one thread here: if a read blocked, the timer could not fire.
#[tokio::test]
async fn a_shared_socket_that_is_switched_to_blocking_does_not_block_the_host() {
    let (send, receive) = std::sync::mpsc::channel();
    let (link, thread) = socket_link(move |guest| {
        let (tag, _) = guest.next().unwrap();
        let (inner, outer) = tcp_pair();
        guest.pass(tag, &Event::Connected {}, 1, &[inner.try_clone().unwrap().into()]);
        send.send((inner, outer)).unwrap();
        guest.until_closed();
    })
    .await;
    let mut connection = within(link.dial("127.0.0.1:1".parse().unwrap())).await.unwrap();
    let (mut kept, mut outer) = within(tokio::task::spawn_blocking(move || receive.recv().unwrap()))
        .await
        .unwrap();
    outer.write_all(b"x").unwrap();
    // The host's poller has seen it; then the guest takes it away, through its own duplicate.
    tokio::time::sleep(Duration::from_millis(50)).await;
    kept.set_nonblocking(false).unwrap();
    assert_eq!(kept.read(&mut [0]).unwrap(), 1);
    let mut buffer = [0];
    let read = tokio::time::timeout(Duration::from_millis(100), connection.read(&mut buffer)).await;
    assert!(read.is_err(), "there is nothing to read");
    // Writing more than fits does not block either.
    let flood = vec![0; 64 << 20];
    assert!(
        tokio::time::timeout(Duration::from_millis(200), connection.write_all(&flood))
            .await
            .is_err()
    );
    drop(link);
    join(thread).await;
}

#[tokio::test]
async fn a_stream_that_breaks_its_rules_ends_a_link_over_stdio() {
    type Misdeed = fn(u32, &mut Script);
    let misdeeds: [(&str, Misdeed); 6] = [
        ("more than its window", |stream, guest| {
            for _ in 0..WINDOW as usize / MAX_CHUNK + 1 {
                guest.send(
                    stream,
                    &Event::Output {
                        bytes: vec![1; MAX_CHUNK],
                    },
                );
            }
        }),
        ("a chunk too large", |stream, guest| {
            guest.send(
                stream,
                &Event::Output {
                    bytes: vec![1; MAX_CHUNK + 1],
                },
            );
        }),
        ("an empty chunk", |stream, guest| {
            guest.send(stream, &Event::Output { bytes: Vec::new() })
        }),
        ("bytes after the end", |stream, guest| {
            guest.send(stream, &Event::End {});
            guest.send(stream, &Event::Output { bytes: vec![1] });
        }),
        ("bytes after the close", |stream, guest| {
            guest.send(stream, &Event::Closed { errno: 0 });
            guest.send(stream, &Event::Output { bytes: vec![1] });
        }),
        ("an error number that does not exist", |stream, guest| {
            guest.send(stream, &Event::Closed { errno: 5000 });
        }),
    ];
    for (name, misdeed) in misdeeds {
        let (link, thread) = stdio_link(move |guest| {
            let (tag, request) = guest.next().unwrap();
            let Request::Open { stream, .. } = request else {
                panic!("not what was asked")
            };
            assert_ne!(stream, 0);
            guest.send(tag, &Event::Opened { size: 5 });
            misdeed(stream, guest);
            guest.until_closed();
        })
        .await;
        let reading = async {
            let reader = link.open_read(Path::new("/x")).await;
            let ended = link.ended().await;
            drop(reader);
            ended
        };
        assert_eq!(within(reading).await.kind(), ErrorKind::Protocol, "{name}");
        join(thread).await;
    }
}

#[tokio::test]
async fn a_relayed_listener_gives_no_more_connections_than_were_asked_for() {
    let peer: SocketAddr = "127.0.0.1:1".parse().unwrap();
    let (link, thread) = stdio_link(move |guest| {
        let (tag, request) = guest.next().unwrap();
        let Request::Listen { stream: listener, .. } = request else {
            panic!("not what was asked")
        };
        guest.send(tag, &Event::Listening { address: peer });
        for number in 0..100 {
            guest.send(
                listener,
                &Event::Accepted {
                    stream: GUEST_STREAM | number,
                    peer,
                },
            );
        }
        guest.until_closed();
    })
    .await;
    let listener = within(link.listen(peer)).await;
    assert_eq!(within(link.ended()).await.kind(), ErrorKind::Protocol);
    drop(listener);
    join(thread).await;
    for stream in [5, GUEST_STREAM | 1] {
        let (link, thread) = stdio_link(move |guest| {
            let (tag, request) = guest.next().unwrap();
            let Request::Listen { stream: listener, .. } = request else {
                panic!("not what was asked")
            };
            guest.send(tag, &Event::Listening { address: peer });
            // Not the guest's to give, or given twice.
            guest.send(listener, &Event::Accepted { stream, peer });
            guest.send(listener, &Event::Accepted { stream, peer });
            guest.until_closed();
        })
        .await;
        let listener = within(link.listen(peer)).await;
        assert_eq!(within(link.ended()).await.kind(), ErrorKind::Protocol);
        drop(listener);
        join(thread).await;
    }
}

#[tokio::test]
async fn credit_without_end_makes_the_host_hold_no_more() {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let (link, thread) = stdio_link(move |guest| {
        let (tag, request) = guest.next().unwrap();
        let Request::Open { stream, .. } = request else {
            panic!("not what was asked")
        };
        guest.send(tag, &Event::Opened { size: 0 });
        for _ in 0..100 {
            guest.send(stream, &Event::Grant { amount: u32::MAX });
        }
        // And reads nothing.
        stopped.recv().unwrap();
    })
    .await;
    let how = runtime_core::guest::OpenWrite::default();
    let mut writer = within(link.open_write(Path::new("/x"), how)).await.unwrap();
    let chunk = vec![0; 64 << 10];
    let mut taken = 0;
    while let Ok(result) = tokio::time::timeout(Duration::from_millis(200), writer.write(&chunk)).await {
        taken += result.unwrap();
        assert!(taken < 4 << 20, "it takes and takes");
    }
    stop.send(()).unwrap();
    join(thread).await;
}
