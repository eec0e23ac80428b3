//! The network of a box: its packets go to an interface whose other end is this process, but for connections, which its
//! kernel turns to a listener of this process.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};

use rustix::net::{AddressFamily, SocketType, socket};
use tokio_tun::Tun;

/// The box's own address; no other box sees it.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);

/// Bytes of a packet.
pub(super) const MTU: u16 = 1500;

const NEW_LINK: u16 = 16;
const NEW_ROUTE: u16 = 24;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const REQUEST: u16 = 0x5;
/// `NLM_F_CREATE | NLM_F_EXCL`.
const CREATE: u16 = 0x600;
const ERROR: u16 = 2;

fn other(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// The ends of a box's network that are in this process.
pub(super) struct WayOut {
    /// What is not TCP.
    pub(super) interface: Tun,
    /// Every connection that is not to the box itself.
    pub(super) connections: TcpListener,
}

/// Turns the loopback interface of this thread's network namespace on, and makes its way out. On an executor.
pub(super) fn make() -> io::Result<WayOut> {
    // A new namespace has nothing but loopback, so it is the first.
    set_up(1)?;
    let mut made = Tun::builder()
        .name("eth0")
        .mtu(i32::from(MTU))
        .address(ADDRESS)
        .netmask(NETMASK)
        .up()
        .build()
        .map_err(other)?;
    let tun = made.pop().ok_or_else(|| io::Error::other("no interface was made"))?;
    default_route(tun.index().map_err(other)?)?;
    let connections = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    connections.set_nonblocking(true)?;
    redirect(connections.local_addr()?.port())?;
    Ok(WayOut {
        interface: tun,
        connections,
    })
}

/// Turns connections to elsewhere to this port.
fn redirect(port: u16) -> io::Result<()> {
    let rules = format!(
        "table ip e2b {{ chain output {{ type nat hook output priority -100; \
         ip daddr {{ 127.0.0.0/8, {ADDRESS} }} return; meta l4proto tcp redirect to :{port}; }}; }}"
    );
    let output = Command::new("nft")
        .arg(rules)
        .env("PATH", super::process::SERVICE_PATH)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| io::Error::new(error.kind(), format!("nft: {error}")))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(other(format_args!(
            "nft: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

fn set_up(index: u32) -> io::Result<()> {
    let mut body = vec![0; 4];
    body.extend(index.to_ne_bytes());
    // The flag, and which flags are meant.
    body.extend(1u32.to_ne_bytes());
    body.extend(1u32.to_ne_bytes());
    tell(NEW_LINK, REQUEST, &body)
}

/// Everything goes by this interface.
fn default_route(interface: u32) -> io::Result<()> {
    const IPV4: u8 = 2;
    const TABLE_MAIN: u8 = 254;
    const PROTOCOL_STATIC: u8 = 4;
    const SCOPE_LINK: u8 = 253;
    const UNICAST: u8 = 1;
    const OUTPUT: u16 = 4;
    let mut body = vec![IPV4, 0, 0, 0, TABLE_MAIN, PROTOCOL_STATIC, SCOPE_LINK, UNICAST];
    body.extend([0; 4]);
    body.extend(8u16.to_ne_bytes());
    body.extend(OUTPUT.to_ne_bytes());
    body.extend(interface.to_ne_bytes());
    tell(NEW_ROUTE, REQUEST | CREATE, &body)
}

/// Sends a message to the kernel, and reads whether it did what it says.
fn tell(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(16 + body.len()).map_err(other)?;
    let mut message = Vec::with_capacity(16 + body.len());
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    let kernel = socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    rustix::io::write(&kernel, &message)?;
    let mut answer = [0; 1024];
    let count = rustix::io::read(&kernel, &mut answer)?;
    let answer = &answer[..count];
    let word = |at: usize| answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    let is_answer = answer.get(4..6).is_some_and(|kind| kind == ERROR.to_ne_bytes());
    match word(16).map(i32::from_ne_bytes).filter(|_| is_answer) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
        None => Err(io::Error::other("netlink did not answer")),
    }
}
