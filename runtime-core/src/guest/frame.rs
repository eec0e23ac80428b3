//! What host and guest say to each other: small, length-prefixed, bounded frames.
//!
//! This file, and `encoding` beside it, are compiled into both sides: the host has it as `guest::frame`, the guest
//! program includes it by path. It uses `std` alone and performs no I/O.
//!
//! A frame is a header of [`HEADER_LEN`] bytes (body length `u32`, kind `u8`, number of descriptors that travel with
//! it `u8`, two zero bytes, tag `u32`) and a body. Integers are little-endian. A tag ties a reply to its request, and
//! names a stream in stream frames. Every length is checked against what is there before anything is allocated.

use std::fmt;
use std::net::SocketAddr;

pub use super::encoding::{Input, List, Malformed, Wire};

/// Version of the protocol. Both sides must have the same: the host brings the guest along.
pub const VERSION: u16 = 3;
/// First bytes of the guest's [`Event::Hello`].
pub const MAGIC: [u8; 4] = *b"SBXg";
/// Bytes of a frame's header.
pub const HEADER_LEN: usize = 12;
/// Longest body from host to guest: more than the kernel takes as arguments and environment of one program.
pub const MAX_REQUEST: usize = 4 << 20;
/// Longest body from guest to host.
pub const MAX_EVENT: usize = 256 << 10;
/// Most bytes of a stream in one frame.
pub const MAX_CHUNK: usize = 64 << 10;
/// Bytes that may be under way on a stream in one direction before the receiver grants more.
pub const WINDOW: u32 = 256 << 10;
/// Connections that a relayed listener may hand over before the host grants more.
pub const ACCEPT_WINDOW: u32 = 64;
/// Most descriptors that travel with one frame.
pub const MAX_FDS: usize = 3;
/// Most entries of a directory in one frame.
pub const MAX_ENTRIES: u16 = 256;
/// Bytes of the one-time token.
pub const TOKEN_LEN: usize = 32;
/// Set in the numbers of streams that the guest opens (accepted connections); clear in those of the host.
pub const GUEST_STREAM: u32 = 1 << 31;
/// The variable that carries the one-time token to the guest, as hexadecimal digits.
pub const TOKEN_VARIABLE: &str = "SANDBOX_GUEST_TOKEN";
/// Buffer that a reader keeps while nothing large is under way.
const IDLE_BUFFER: usize = 16 << 10;

/// Where a standard stream of a program goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stdio {
    /// `/dev/null`.
    Null,
    /// The next of the descriptors that travel with the request.
    Passed,
    /// A stream of this number on the link.
    Stream(u32),
    /// Appended to this file in the box, which is created if missing.
    Append(Vec<u8>),
}

impl Wire for Stdio {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Null => out.push(0),
            Self::Passed => out.push(1),
            Self::Stream(id) => {
                out.push(2);
                id.put(out);
            }
            Self::Append(path) => {
                out.push(3);
                path.put(out);
            }
        }
    }
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        match u8::take(input)? {
            0 => Ok(Self::Null),
            1 => Ok(Self::Passed),
            2 => Ok(Self::Stream(u32::take(input)?)),
            3 => Ok(Self::Append(Vec::take(input)?)),
            _ => Err(Malformed("unknown standard stream")),
        }
    }
}

macro_rules! codes {
    ($(#[$meta:meta])* $name:ident, $error:literal, { $( $(#[$doc:meta])* $code:literal => $variant:ident ),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $( $(#[$doc])* $variant ),* }

        impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(match self { $( Self::$variant => $code ),* });
            }
            fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
                match u8::take(input)? {
                    $( $code => Ok(Self::$variant), )*
                    _ => Err(Malformed($error)),
                }
            }
        }
    };
}

codes! {
    /// At which step an operation failed.
    Step, "unknown step", {
        /// The operation has one step.
        0 => Only,
        /// Making the process.
        1 => Fork,
        /// Starting a session of its own.
        2 => Session,
        /// Connecting the standard streams.
        3 => Stdio,
        /// Setting the groups or the user.
        4 => User,
        /// Entering the working directory.
        5 => Chdir,
        /// Installing the system call filter.
        6 => Filter,
        /// Executing the program.
        7 => Exec,
        /// It is not a regular file.
        8 => FileType,
    }
}

codes! {
    /// What a path is.
    FileKind, "unknown file type", {
        /// A regular file.
        0 => File,
        /// A directory.
        1 => Directory,
        /// A symbolic link.
        2 => Symlink,
        /// A FIFO.
        3 => Fifo,
        /// A Unix socket.
        4 => Socket,
        /// A block device.
        5 => BlockDevice,
        /// A character device.
        6 => CharDevice,
    }
}

macro_rules! records {
    ($( $(#[$meta:meta])* $name:ident { $( $(#[$doc:meta])* $field:ident : $ty:ty ),* $(,)? } )*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name { $( $(#[$doc])* pub $field: $ty ),* }

        impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $( self.$field.put(out); )*
            }
            fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
                Ok(Self { $( $field: Wire::take(input)? ),* })
            }
        }
    )*};
}

records! {
    /// The user that a program runs as, by number.
    User {
        /// User id.
        uid: u32,
        /// Primary group id.
        gid: u32,
        /// Supplementary group ids.
        groups: List<u32>,
    }

    /// What `lstat` says about a path.
    FileInfo {
        /// What it is.
        kind: FileKind,
        /// Permission bits, 12 of them.
        mode: u32,
        /// Bytes.
        size: u64,
        /// Modification time, seconds since 1970.
        mtime: i64,
        /// Nanoseconds of the modification time.
        mtime_nsec: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    }

    /// One entry of a directory.
    Entry {
        /// Its name: bytes, never a path.
        name: Vec<u8>,
        /// What `lstat` says.
        info: FileInfo,
    }

    /// A network interface.
    Interface {
        /// Its number.
        index: u32,
        /// `IFF_*` bits.
        flags: u32,
        /// Its name.
        name: Vec<u8>,
    }

    /// A route of the box's network namespace.
    Route {
        /// Address family: 2 is IPv4, 10 is IPv6.
        family: u8,
        /// `RTN_*`: 1 is unicast, 2 is local.
        kind: u8,
        /// Routing table: 254 is main, 255 is local.
        table: u32,
        /// Number of the interface that packets leave by; 0 if none.
        interface: u32,
        /// Length of the destination's prefix in bits; 0 is the default route.
        prefix: u8,
        /// The destination's address; empty for a default route.
        destination: Vec<u8>,
    }
}

impl Interface {
    /// Whether it is switched on (`IFF_UP`). One that is not carries no packet.
    pub fn is_up(&self) -> bool {
        self.flags & 1 != 0
    }

    /// Whether it is a loopback (`IFF_LOOPBACK`), which the kernel decides. Its name could be anything's.
    pub fn is_loopback(&self) -> bool {
        self.flags & 8 != 0
    }
}

/// One direction of the protocol.
pub trait Message: Sized {
    /// Longest body.
    const MAX: usize;
    /// The kind in the header.
    fn kind(&self) -> u8;
    /// Appends the body.
    fn put_body(&self, out: &mut Vec<u8>);
    /// Reads a body.
    ///
    /// # Errors
    /// When the kind is unknown or the body is not one of its kind.
    fn take_body(kind: u8, input: &mut Input<'_>) -> Result<Self, Malformed>;
}

macro_rules! messages {
    ($(#[$meta:meta])* $name:ident, $max:expr, {
        $( $(#[$vdoc:meta])* $kind:literal => $variant:ident { $( $(#[$fdoc:meta])* $field:ident : $ty:ty ),* $(,)? } ),* $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, PartialEq, Eq)]
        pub enum $name { $( $(#[$vdoc])* $variant { $( $(#[$fdoc])* $field: $ty ),* } ),* }

        impl Message for $name {
            const MAX: usize = $max;
            fn kind(&self) -> u8 {
                match self { $( Self::$variant { .. } => $kind ),* }
            }
            fn put_body(&self, out: &mut Vec<u8>) {
                match self { $( Self::$variant { $( $field ),* } => { $( $field.put(out); )* } ),* }
            }
            fn take_body(kind: u8, input: &mut Input<'_>) -> Result<Self, Malformed> {
                match kind {
                    $( $kind => Ok(Self::$variant { $( $field: Wire::take(input)? ),* }), )*
                    _ => Err(Malformed("unknown kind of message")),
                }
            }
        }

        /// The name alone: contents may be secrets.
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $( Self::$variant { .. } => stringify!($variant) ),* })
            }
        }
    };
}

messages! {
    /// From host to guest.
    Request, MAX_REQUEST, {
        /// Sets how programs are started from now on.
        1 => Configure {
            /// Environment under that of each program; `None` keeps the guest's own.
            env: Option<List<(Vec<u8>, Vec<u8>)>>,
            /// Refuse address families that no network namespace confines.
            restrict: bool,
            /// `oom_score_adj` of programs.
            oom_score_adj: i32,
        },
        /// Starts a program in a session of its own. Answers `Started`, then `Exited`, or `Failed`.
        2 => Spawn {
            /// Program and arguments.
            argv: List<Vec<u8>>,
            /// Variables over the base environment.
            env: List<(Vec<u8>, Vec<u8>)>,
            /// Working directory.
            cwd: Vec<u8>,
            /// Another user than the guest's.
            user: Option<User>,
            /// Standard input.
            stdin: Stdio,
            /// Standard output.
            stdout: Stdio,
            /// Standard error.
            stderr: Stdio,
        },
        /// Sends a signal to the group of a program.
        3 => Signal {
            /// The tag of its `Spawn`.
            target: u32,
            /// Signal number.
            signal: i32,
        },
        /// Kills what is left of a program's group and forgets it after its end. No answer. An unknown tag is ignored.
        4 => Release {
            /// The tag of its `Spawn`.
            target: u32,
        },
        /// Gives up a request under way (`Dial`, `Remove`), which then fails, or a listing. No answer of its own.
        5 => Cancel {
            /// The tag of the request.
            target: u32,
        },
        /// Opens a regular file. Answers `Opened`.
        6 => Open {
            /// Absolute path.
            path: Vec<u8>,
            /// Open for writing, else for reading.
            write: bool,
            /// Create if missing.
            create: bool,
            /// Fail if it exists.
            exclusive: bool,
            /// Cut to nothing.
            truncate: bool,
            /// Write at the end.
            append: bool,
            /// Permission bits of a new file.
            mode: u32,
            /// The stream that carries the bytes; 0 passes the descriptor.
            stream: u32,
        },
        /// Answers `Info`.
        7 => Stat {
            /// Absolute path.
            path: Vec<u8>,
            /// Follow a symbolic link at its end.
            follow: bool,
        },
        /// Lists a directory. Answers `Entries`.
        8 => List {
            /// Absolute path.
            path: Vec<u8>,
        },
        /// The next page of a listing. Answers `Entries`.
        9 => ListMore {
            /// The tag of its `List`.
            target: u32,
        },
        /// Makes a directory.
        10 => Mkdir {
            /// Absolute path.
            path: Vec<u8>,
            /// Permission bits.
            mode: u32,
            /// Make missing parents; one that exists is fine.
            parents: bool,
        },
        /// Removes a file, a link or a directory.
        11 => Remove {
            /// Absolute path.
            path: Vec<u8>,
            /// With everything below it.
            recursive: bool,
        },
        /// Renames, replacing the target.
        12 => Rename {
            /// From.
            from: Vec<u8>,
            /// To.
            to: Vec<u8>,
        },
        /// Makes a symbolic link.
        13 => Symlink {
            /// What it says.
            target: Vec<u8>,
            /// Where it is.
            path: Vec<u8>,
        },
        /// Reads a symbolic link. Answers `Target`.
        14 => Readlink {
            /// Absolute path.
            path: Vec<u8>,
        },
        /// Sets permission bits, following symbolic links.
        15 => Chmod {
            /// Absolute path.
            path: Vec<u8>,
            /// Permission bits.
            mode: u32,
        },
        /// Sets owner and group, not following a symbolic link.
        16 => Chown {
            /// Absolute path.
            path: Vec<u8>,
            /// Owner.
            uid: u32,
            /// Group.
            gid: u32,
        },
        /// Listens on a TCP address inside. Answers `Listening`.
        17 => Listen {
            /// The address.
            address: SocketAddr,
            /// The stream number of the listener; 0 passes the descriptor.
            stream: u32,
        },
        /// Connects to a TCP address inside. Answers `Connected`.
        18 => Dial {
            /// The address.
            address: SocketAddr,
            /// The stream that carries the bytes; 0 passes the descriptor.
            stream: u32,
        },
        /// Asks for interfaces and routes. Answers `Network`.
        19 => Stats {},
        /// Reports every interface other than `lo` that is up, now and from now on. Answers `Done`, then `Appeared`.
        20 => Watch {},
        /// Answers `Pong`.
        21 => Ping {},
        /// Ends every program and the guest.
        22 => Shutdown {},
        /// Makes the engine's resolver at 127.0.0.11 unreachable in the box, or reachable again. Answers `Done`.
        23 => Resolver {
            /// Whether it can be reached.
            reachable: bool,
        },
        /// Programs start on the host's network from now on, which answers `Done`; or on the box's again, which ends every
        /// process of the box that may have the other, and answers `Emptied` when none is left.
        24 => HostNetwork {
            /// On the host's.
            open: bool,
        },
        /// Bytes for a stream (the tag).
        32 => Data {
            /// At most [`MAX_CHUNK`].
            bytes: Vec<u8>,
        },
        /// The host can take this much more of a stream (the tag), or this many more connections of a listener.
        33 => Credit {
            /// Bytes or connections.
            amount: u32,
        },
        /// The host sends no more on a stream (the tag).
        34 => Eof {},
        /// The host gives a stream or a relayed listener (the tag) up. The guest answers `Closed`.
        35 => Reset {},
    }
}

messages! {
    /// From guest to host.
    Event, MAX_EVENT, {
        /// The first frame of all. Its layout is the same in every version of the protocol.
        64 => Hello {
            /// [`MAGIC`].
            magic: [u8; 4],
            /// [`VERSION`].
            version: u16,
            /// The one-time token.
            token: [u8; TOKEN_LEN],
            /// The guest's process id in the box.
            pid: u32,
        },
        /// It is done.
        65 => Done {},
        /// It failed.
        66 => Failed {
            /// The system's error number.
            errno: i32,
            /// Where.
            step: Step,
        },
        /// The program runs.
        67 => Started {
            /// Its process id in the box.
            pid: u32,
        },
        /// The program has ended and is reaped.
        68 => Exited {
            /// Exit code, unless a signal ended it.
            code: i32,
            /// The signal that ended it, else 0.
            signal: i32,
            /// The kernel killed it, or a process of it, for lack of memory.
            oom: bool,
        },
        /// The file is open.
        69 => Opened {
            /// Its size, for a buffer; not to be trusted.
            size: u64,
        },
        /// What `stat` said.
        70 => Info {
            /// It.
            info: FileInfo,
        },
        /// A page of a directory.
        71 => Entries {
            /// At most [`MAX_ENTRIES`].
            entries: List<Entry>,
            /// There is more to ask for.
            more: bool,
        },
        /// What a symbolic link says.
        72 => Target {
            /// It.
            path: Vec<u8>,
        },
        /// The listener listens.
        73 => Listening {
            /// With the port that the system chose, if it had to.
            address: SocketAddr,
        },
        /// The connection stands.
        74 => Connected {},
        /// Interfaces and routes.
        75 => Network {
            /// Every interface.
            interfaces: List<Interface>,
            /// Every route.
            routes: List<Route>,
            /// There are more than these.
            truncated: bool,
        },
        /// An interface other than `lo` is up. The tag is that of `Watch`.
        76 => Appeared {
            /// It.
            interface: Interface,
        },
        /// The answer to `Ping`.
        77 => Pong {},
        /// A relayed listener (the tag) has accepted.
        78 => Accepted {
            /// The new stream, with [`GUEST_STREAM`] set.
            stream: u32,
            /// Who connected.
            peer: SocketAddr,
        },
        /// No process has the host's network.
        79 => Emptied {
            /// How many processes were ended.
            ended: u32,
        },
        /// Bytes of a stream (the tag).
        96 => Output {
            /// At most [`MAX_CHUNK`].
            bytes: Vec<u8>,
        },
        /// The guest can take this much more of a stream (the tag).
        97 => Grant {
            /// Bytes.
            amount: u32,
        },
        /// Nothing more comes on a stream (the tag); it can still be written.
        98 => End {},
        /// A stream or relayed listener (the tag) is no more. The guest never names it again.
        99 => Closed {
            /// 0 after an orderly end, else the system's error number.
            errno: i32,
        },
    }
}

/// Encodes one frame.
///
/// # Errors
/// When the body is longer than the other side takes.
pub fn encode<M: Message>(tag: u32, fds: u8, message: &M) -> Result<Vec<u8>, Malformed> {
    let mut out = vec![0; HEADER_LEN];
    message.put_body(&mut out);
    let len = out.len() - HEADER_LEN;
    if len > M::MAX {
        return Err(Malformed("a message is too long"));
    }
    out[..4].copy_from_slice(&(len as u32).to_le_bytes());
    out[4] = message.kind();
    out[5] = fds;
    out[8..HEADER_LEN].copy_from_slice(&tag.to_le_bytes());
    Ok(out)
}

/// A frame as it was read.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<M> {
    /// The tag.
    pub tag: u32,
    /// How many descriptors travel with it.
    pub fds: usize,
    /// The message.
    pub message: M,
}

/// Cuts frames out of a stream of bytes. Holds at most one frame and a read's worth of bytes.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Decoder {
    /// An empty decoder.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether no byte waits.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Room for the next read, never empty. Call [`filled`](Self::filled) afterwards.
    pub fn spare(&mut self) -> &mut [u8] {
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
            if self.buffer.len() > MAX_CHUNK + IDLE_BUFFER {
                self.buffer = Vec::new();
            }
        }
        let wanted = match self.header() {
            // Checked by `next_frame` before more is read; capped here so that nothing depends on it.
            Some((len, ..)) => HEADER_LEN + len.min(MAX_REQUEST),
            None => HEADER_LEN,
        };
        if self.start > 0 && self.buffer.len() - self.start < wanted.max(IDLE_BUFFER) {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let needed = (self.start + wanted.max(IDLE_BUFFER)).max(self.end + 1);
        if self.buffer.len() < needed {
            self.buffer.resize(needed, 0);
        }
        &mut self.buffer[self.end..]
    }

    /// That many bytes of [`spare`](Self::spare) were filled.
    pub fn filled(&mut self, count: usize) {
        self.end = (self.end + count).min(self.buffer.len());
    }

    fn header(&self) -> Option<(usize, u8, u8, u16, u32)> {
        let mut input = Input(&self.buffer[self.start..self.end]);
        let len = u32::take(&mut input).ok()? as usize;
        let kind = u8::take(&mut input).ok()?;
        let fds = u8::take(&mut input).ok()?;
        let zero = u16::take(&mut input).ok()?;
        Some((len, kind, fds, zero, u32::take(&mut input).ok()?))
    }

    /// The next whole frame, if it is there.
    ///
    /// # Errors
    /// When the bytes break the protocol. The decoder must not be used afterwards.
    pub fn next_frame<M: Message>(&mut self) -> Result<Option<Frame<M>>, Malformed> {
        let Some((len, kind, fds, zero, tag)) = self.header() else {
            return Ok(None);
        };
        if len > M::MAX {
            return Err(Malformed("a frame is too long"));
        }
        if zero != 0 {
            return Err(Malformed("a frame's reserved bytes are not zero"));
        }
        if usize::from(fds) > MAX_FDS {
            return Err(Malformed("a frame announces too many descriptors"));
        }
        let Some(body) = self.buffer[self.start + HEADER_LEN..self.end].get(..len) else {
            return Ok(None);
        };
        let mut input = Input(body);
        let message = M::take_body(kind, &mut input)?;
        if !input.0.is_empty() {
            return Err(Malformed("a body has bytes too many"));
        }
        self.start += HEADER_LEN + len;
        Ok(Some(Frame {
            tag,
            fds: usize::from(fds),
            message,
        }))
    }
}
