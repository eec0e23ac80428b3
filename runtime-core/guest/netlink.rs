//! The network namespace as the kernel tells it: interfaces, routes, and interfaces that appear later.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::frame::{Interface, Route};
use crate::sys;

const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
const NEW_ROUTE: u16 = 24;
const DELETE_ROUTE: u16 = 25;
const GET_ROUTE: u16 = 26;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const DUMP: u16 = 1 | 0x300;
const GROUP_LINK: u32 = 1;

/// Most interfaces and most routes that are reported.
const MAX_REPORTED: usize = 512;

/// Interfaces and routes, and whether there are more.
#[derive(Default)]
pub(crate) struct Network {
    pub(crate) interfaces: Vec<Interface>,
    pub(crate) routes: Vec<Route>,
    pub(crate) truncated: bool,
}

/// Asks the kernel.
pub(crate) fn network() -> io::Result<Network> {
    let mut network = Network::default();
    dump(GET_LINK, |kind, body| {
        if kind == NEW_LINK
            && let Some(interface) = interface(body)
        {
            push(&mut network.interfaces, interface, &mut network.truncated);
        }
    })?;
    dump(GET_ROUTE, |kind, body| {
        if kind == NEW_ROUTE
            && let Some(route) = route(body)
        {
            push(&mut network.routes, route, &mut network.truncated);
        }
    })?;
    Ok(network)
}

fn push<T>(list: &mut Vec<T>, item: T, truncated: &mut bool) {
    if list.len() < MAX_REPORTED {
        list.push(item);
    } else {
        *truncated = true;
    }
}

/// A route to nowhere for the one address at which Docker's resolver listens, in the table that makes 127.0.0.0/8 local:
/// the resolver's socket and the engine's rules stay, and nothing gets to them. Needs `CAP_NET_ADMIN`.
pub(crate) fn set_resolver_reachable(reachable: bool) -> io::Result<()> {
    const REQUEST: u16 = 1;
    const ACKNOWLEDGE: u16 = 4;
    const CREATE: u16 = 0x400;
    const AF_INET: u8 = 2;
    const TABLE_LOCAL: u8 = 255;
    const PROTOCOL_STATIC: u8 = 4;
    const SCOPE_UNIVERSE: u8 = 0;
    const BLACKHOLE: u8 = 6;
    const DESTINATION: u16 = 1;
    const EEXIST: i32 = 17;
    const ESRCH: i32 = 3;

    let (kind, flags, already) = match reachable {
        false => (NEW_ROUTE, REQUEST | ACKNOWLEDGE | CREATE | 0x200, EEXIST),
        true => (DELETE_ROUTE, REQUEST | ACKNOWLEDGE, ESRCH),
    };
    let mut message = Vec::with_capacity(36);
    message.extend(36u32.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([
        AF_INET,
        32,
        0,
        0,
        TABLE_LOCAL,
        PROTOCOL_STATIC,
        SCOPE_UNIVERSE,
        BLACKHOLE,
    ]);
    message.extend([0; 4]);
    message.extend(8u16.to_ne_bytes());
    message.extend(DESTINATION.to_ne_bytes());
    message.extend([127, 0, 0, 11]);

    let fd = sys::netlink(0)?;
    sys::write_fd(fd.as_fd(), &message)?;
    let mut buffer = vec![0; 4096];
    let count = sys::read_fd(fd.as_fd(), &mut buffer)?;
    let mut errno = None;
    each_message(buffer.get(..count).unwrap_or_default(), |kind, body| {
        if kind == ERROR {
            errno = word(body, 0).map(|code| (code as i32).wrapping_neg());
        }
        errno.is_none()
    });
    match errno {
        Some(0) => Ok(()),
        Some(errno) if errno == already => Ok(()),
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other("netlink did not answer")),
    }
}

/// Reports interfaces from its making on.
pub(crate) struct LinkWatch(OwnedFd);

impl LinkWatch {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = sys::netlink(GROUP_LINK)?;
        sys::set_nonblocking(fd.as_fd())?;
        Ok(Self(fd))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Interfaces that were announced since. When the kernel had to drop announcements, all there are.
    pub(crate) fn read(&self) -> io::Result<Vec<Interface>> {
        let mut buffer = vec![0; 32 << 10];
        let mut found = Vec::new();
        match sys::read_fd(self.fd(), &mut buffer) {
            Ok(count) => {
                each_message(buffer.get(..count).unwrap_or_default(), |kind, body| {
                    if kind == NEW_LINK && found.len() < MAX_REPORTED {
                        found.extend(interface(body));
                    }
                    true
                });
                Ok(found)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(found),
            Err(_) => Ok(network()?.interfaces),
        }
    }
}

fn dump(request: u16, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
    let fd = sys::netlink(0)?;
    // Header, then `ifinfomsg` (16 bytes) or `rtmsg` (12): all zero means every family.
    let mut message = Vec::with_capacity(32);
    message.extend(32u32.to_ne_bytes());
    message.extend(request.to_ne_bytes());
    message.extend(DUMP.to_ne_bytes());
    message.resize(32, 0);
    sys::write_fd(fd.as_fd(), &message)?;
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = sys::read_fd(fd.as_fd(), &mut buffer)?;
        let mut failed = false;
        let more = each_message(buffer.get(..count).unwrap_or_default(), |kind, body| {
            failed |= kind == ERROR;
            if kind == ERROR || kind == DONE {
                return false;
            }
            each(kind, body);
            true
        });
        if failed {
            return Err(io::Error::other("netlink refused the request"));
        }
        if !more || count == 0 {
            return Ok(());
        }
    }
}

/// Calls `each` with kind and body of every message until it says `false`; whether it never did.
fn each_message(mut buffer: &[u8], mut each: impl FnMut(u16, &[u8]) -> bool) -> bool {
    while let (Some(len), Some(kind)) = (word(buffer, 0), half(buffer, 4)) {
        let len = len as usize;
        let Some(body) = buffer.get(16..len) else {
            break;
        };
        if !each(kind, body) {
            return false;
        }
        buffer = buffer.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    true
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|chunk| u32::from_ne_bytes(*chunk))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|chunk| u16::from_ne_bytes(*chunk))
}

/// Kind and value of every attribute.
fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = half(rest, 0)? as usize;
        let kind = half(rest, 2)? & 0x3fff;
        let value = rest.get(4..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn interface(body: &[u8]) -> Option<Interface> {
    const NAME: u16 = 3;
    let name = attributes(body.get(16..)?).find(|(kind, _)| *kind == NAME)?.1;
    Some(Interface {
        index: word(body, 4)?,
        flags: word(body, 8)?,
        name: name.split(|byte| *byte == 0).next().unwrap_or_default().to_vec(),
    })
}

fn route(body: &[u8]) -> Option<Route> {
    const DESTINATION: u16 = 1;
    const INTERFACE: u16 = 4;
    const TABLE: u16 = 15;
    let [family, prefix, _, _, table, _, _, kind] = *body.first_chunk()?;
    let mut route = Route {
        family,
        kind,
        table: u32::from(table),
        interface: 0,
        prefix,
        destination: Vec::new(),
    };
    for (kind, value) in attributes(body.get(12..)?) {
        match kind {
            DESTINATION => route.destination = value.get(..16).unwrap_or(value).to_vec(),
            INTERFACE => route.interface = word(value, 0)?,
            TABLE => route.table = word(value, 0)?,
            _ => {}
        }
    }
    Some(route)
}
