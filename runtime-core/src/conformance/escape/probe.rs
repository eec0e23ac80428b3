//! What tries to get out of a box, and what waits outside to see whether it did. A program of its own: the escape suite
//! compiles it, static, with `std` and the C library alone.
//!
//! An attempt ends with 0 if it worked as far as this side can tell. A receiver prints a line for what arrived.
#![allow(unsafe_code, reason = "system calls that std lacks")]

use std::ffi::{c_int, c_long, c_void};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::exit;
use std::time::{Duration, Instant};

unsafe extern "C" {
    fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn connect(fd: c_int, address: *const c_void, length: u32) -> c_int;
    fn bind(fd: c_int, address: *const c_void, length: u32) -> c_int;
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, length: u32) -> c_int;
    fn sendto(fd: c_int, bytes: *const c_void, length: usize, flags: c_int, address: *const c_void, size: u32) -> isize;
    fn recv(fd: c_int, bytes: *mut c_void, length: usize, flags: c_int) -> isize;
    fn unshare(flags: c_int) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn if_nametoindex(name: *const std::ffi::c_char) -> u32;
}

const AF_INET: c_int = 2;
const AF_INET6: c_int = 10;
const AF_PACKET: c_int = 17;
const STREAM: c_int = 1;
const DGRAM: c_int = 2;
const RAW: c_int = 3;
const SOL_SOCKET: c_int = 1;
const PATIENCE: Duration = Duration::from_millis(1500);
const TOKEN: &[u8] = b"escape-";

fn fail(what: &str) -> ! {
    eprintln!("{what}: {}", std::io::Error::last_os_error());
    exit(1)
}

fn address(of: SocketAddr) -> Vec<u8> {
    let mut raw = Vec::new();
    match of.ip() {
        IpAddr::V4(ip) => {
            raw.extend((AF_INET as u16).to_ne_bytes());
            raw.extend(of.port().to_be_bytes());
            raw.extend(ip.octets());
            raw.extend([0; 8]);
        }
        IpAddr::V6(ip) => {
            raw.extend((AF_INET6 as u16).to_ne_bytes());
            raw.extend(of.port().to_be_bytes());
            raw.extend([0; 4]);
            raw.extend(ip.octets());
            let scope = match of {
                SocketAddr::V6(v6) => v6.scope_id(),
                SocketAddr::V4(_) => 0,
            };
            raw.extend(scope.to_ne_bytes());
        }
    }
    raw
}

fn option(fd: &OwnedFd, level: c_int, name: c_int, value: &[u8]) -> bool {
    unsafe { setsockopt(fd.as_raw_fd(), level, name, value.as_ptr().cast(), value.len() as u32) == 0 }
}

fn patient(fd: &OwnedFd) {
    let mut time = [0u8; 16];
    time[..8].copy_from_slice(&(PATIENCE.as_secs() as i64).to_ne_bytes());
    time[8..].copy_from_slice(&i64::from(PATIENCE.subsec_micros()).to_ne_bytes());
    for name in [20, 21] {
        option(fd, SOL_SOCKET, name, &time);
    }
}

fn open(to: SocketAddr, kind: c_int, protocol: c_int) -> OwnedFd {
    let family = if to.is_ipv4() { AF_INET } else { AF_INET6 };
    let fd = unsafe { socket(family, kind, protocol) };
    if fd < 0 {
        fail("socket");
    }
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    patient(&fd);
    fd
}

/// `dev=NAME`, `from=IP`, `protocol=N`, `broadcast`, `fastopen`.
fn prepare(fd: &OwnedFd, options: &[String]) {
    for one in options {
        let done = match one.split_once('=') {
            Some(("dev", name)) => option(fd, SOL_SOCKET, 25, name.as_bytes()),
            Some(("from", ip)) => {
                let from = address(SocketAddr::new(ip.parse().expect("an address"), 0));
                unsafe { bind(fd.as_raw_fd(), from.as_ptr().cast(), from.len() as u32) == 0 }
            }
            None if one == "broadcast" => option(fd, SOL_SOCKET, 6, &1i32.to_ne_bytes()),
            _ => true,
        };
        if !done {
            fail(one);
        }
    }
}

fn protocol(options: &[String]) -> c_int {
    let found = options.iter().find_map(|one| one.strip_prefix("protocol="));
    found.map_or(0, |number| number.parse().expect("a number"))
}

fn send(fd: &OwnedFd, bytes: &[u8], flags: c_int, to: Option<&[u8]>) {
    let (pointer, length) = to.map_or((std::ptr::null(), 0), |to| (to.as_ptr(), to.len() as u32));
    let sent = unsafe { sendto(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags, pointer.cast(), length) };
    if sent < 0 {
        fail("send");
    }
}

fn receive(fd: &OwnedFd) -> Vec<u8> {
    let mut buffer = [0; 2048];
    let got = unsafe { recv(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    if got <= 0 {
        fail("receive");
    }
    buffer[..got as usize].to_vec()
}

fn tcp(to: SocketAddr, token: &str, options: &[String]) {
    let fd = open(to, STREAM, protocol(options));
    prepare(&fd, options);
    let raw = address(to);
    if options.iter().any(|one| one == "fastopen") {
        send(&fd, format!("{token}\n").as_bytes(), 0x2000_0000, Some(&raw));
    } else {
        if unsafe { connect(fd.as_raw_fd(), raw.as_ptr().cast(), raw.len() as u32) } < 0 {
            fail("connect");
        }
        send(&fd, format!("{token}\n").as_bytes(), 0, None);
    }
    receive(&fd);
}

fn udp(to: SocketAddr, token: &str, options: &[String]) {
    let fd = open(to, DGRAM, protocol(options));
    prepare(&fd, options);
    send(&fd, token.as_bytes(), 0, Some(&address(to)));
    if !options.iter().any(|one| one == "deaf") {
        receive(&fd);
    }
}

fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]))).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}

/// An echo request by a datagram socket, or a raw one.
fn ping(to: IpAddr, token: &str, kind: c_int) {
    let v4 = to.is_ipv4();
    let mut packet = vec![if v4 { 8 } else { 128 }, 0, 0, 0, 0x12, 0x34, 0, 1];
    packet.extend(token.as_bytes());
    let sum = checksum(&packet);
    packet[2..4].copy_from_slice(&sum.to_be_bytes());
    let to = SocketAddr::new(to, 0);
    let fd = open(to, kind, if v4 { 1 } else { 58 });
    send(&fd, &packet, 0, Some(&address(to)));
    receive(&fd);
}

fn packet_socket(interface: Option<&str>) -> OwnedFd {
    let fd = unsafe { socket(AF_PACKET, RAW, c_int::from(3u16.to_be())) };
    if fd < 0 {
        fail("packet socket");
    }
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    if let Some(interface) = interface {
        let raw = link_address(interface);
        if unsafe { bind(fd.as_raw_fd(), raw.as_ptr().cast(), raw.len() as u32) } < 0 {
            fail("bind");
        }
    }
    fd
}

fn link_address(interface: &str) -> Vec<u8> {
    let name = std::ffi::CString::new(interface).expect("a name");
    let index = unsafe { if_nametoindex(name.as_ptr()) };
    if index == 0 {
        fail("no such interface");
    }
    let mut raw = Vec::new();
    raw.extend((AF_PACKET as u16).to_ne_bytes());
    raw.extend(3u16.to_be_bytes());
    raw.extend(index.to_ne_bytes());
    raw.extend([0, 0, 0, 6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]);
    raw
}

fn frame(interface: &str, token: &str) {
    let fd = packet_socket(Some(interface));
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 0, 9, 0x88, 0xb5]);
    frame.extend(token.as_bytes());
    frame.resize(frame.len().max(60), 0);
    send(&fd, &frame, 0, Some(&link_address(interface)));
}

/// A query for a name; any answer is one.
fn dns(to: SocketAddr, name: &str, over_tcp: bool) {
    let mut query = vec![0x77, 0x77, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        query.push(label.len() as u8);
        query.extend(label.as_bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    let fd = open(to, if over_tcp { STREAM } else { DGRAM }, 0);
    let raw = address(to);
    if unsafe { connect(fd.as_raw_fd(), raw.as_ptr().cast(), raw.len() as u32) } < 0 {
        fail("connect");
    }
    if over_tcp {
        let mut framed = (query.len() as u16).to_be_bytes().to_vec();
        framed.extend(&query);
        query = framed;
    }
    send(&fd, &query, 0, None);
    receive(&fd);
}

/// A socket of a family that no network namespace confines, or none has a use for.
fn family(number: &str) {
    let number: c_int = number.parse().expect("a number");
    for kind in [STREAM, DGRAM, RAW, 5] {
        if unsafe { socket(number, kind, 0) } >= 0 {
            return;
        }
    }
    fail("socket")
}

/// Talks for as long as it lives: on a connection and a socket of before, and on new ones. What to say is in a file.
fn hold(to: SocketAddr, file: &str) {
    let mut old = TcpStream::connect_timeout(&to, PATIENCE).unwrap_or_else(|_| fail("connect"));
    let datagrams = UdpSocket::bind("0.0.0.0:0").unwrap_or_else(|_| fail("bind"));
    datagrams.connect(to).unwrap_or_else(|_| fail("connect"));
    println!("held");
    loop {
        let token = std::fs::read_to_string(file).unwrap_or_default();
        let token = token.trim();
        let _ = old.write_all(format!("{token}-tcp\n").as_bytes());
        let _ = datagrams.send(format!("{token}-udp").as_bytes());
        if let Ok(mut new) = TcpStream::connect_timeout(&to, Duration::from_millis(200)) {
            let _ = new.write_all(format!("{token}-new\n").as_bytes());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Standard input to a port of this box's loopback, at once or a byte at a time; the answer to standard output.
fn talk(port: &str, wait: &str, drips: bool) {
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).expect("standard input");
    let wait = Duration::from_millis(wait.parse().expect("a number"));
    let to = SocketAddr::new([127, 0, 0, 1].into(), port.parse().expect("a port"));
    let Ok(mut stream) = TcpStream::connect_timeout(&to, PATIENCE) else {
        fail("connect")
    };
    let until = Instant::now() + wait;
    if drips {
        for byte in bytes {
            if stream.write_all(&[byte]).is_err() || Instant::now() > until {
                break;
            }
        }
        while Instant::now() < until && stream.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(200));
        }
    } else {
        // In parts: an answer may come, and a connection end, before all is written.
        for part in bytes.chunks(16 << 10) {
            if stream.write_all(part).is_err() {
                break;
            }
        }
    }
    let _ = stream.set_read_timeout(Some(Duration::from_millis(50)));
    let mut buffer = [0; 4096];
    let mut answer = Vec::new();
    let mut open = true;
    while open && Instant::now() < until {
        match stream.read(&mut buffer) {
            Ok(0) => open = false,
            Ok(count) => answer.extend(&buffer[..count]),
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(_) => open = false,
        }
    }
    if drips && !open {
        fail("closed");
    }
    std::io::stdout().write_all(&answer).expect("standard output");
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

/// Servers on these ports, on every address, that print and echo what comes.
fn serve(tcp: &str, udp: &str) {
    let ports = |list: &str| list.split(',').filter_map(|port| port.parse::<u16>().ok()).collect::<Vec<_>>();
    for port in ports(tcp) {
        let listener = TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
        let listener = listener.unwrap_or_else(|_| fail("listen"));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let (mut reader, mut writer) = (&stream, &stream);
                    let mut buffer = [0; 4096];
                    while let Ok(count @ 1..) = reader.read(&mut buffer) {
                        say(&format!("tcp {port} {}", String::from_utf8_lossy(&buffer[..count]).escape_debug()));
                        let _ = writer.write_all(b"here\n");
                    }
                });
            }
        });
    }
    for port in ports(udp) {
        let socket = UdpSocket::bind(("::", port)).or_else(|_| UdpSocket::bind(("0.0.0.0", port)));
        let socket = socket.unwrap_or_else(|_| fail("bind"));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok((count, from)) = socket.recv_from(&mut buffer) {
                say(&format!("udp {port} {}", String::from_utf8_lossy(&buffer[..count]).escape_debug()));
                if port == 53 {
                    // An answer, if only by its first bit.
                    buffer[2] |= 0x80;
                }
                let _ = socket.send_to(&buffer[..count], from);
            }
        });
    }
    say("ready");
    let mut nothing = [0; 1];
    let _ = std::io::stdin().read(&mut nothing);
}

/// Prints every frame that has a token in it, and, without one, every frame from these hardware addresses.
fn watch(interface: &str, known: &[String]) {
    let fd = packet_socket(Some(interface));
    say("ready");
    let mut buffer = vec![0; 65536];
    loop {
        let got = unsafe { recv(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        let Ok(got) = usize::try_from(got) else { continue };
        let frame = &buffer[..got];
        let from: Vec<String> = frame.iter().skip(6).take(6).map(|byte| format!("{byte:02x}")).collect();
        let from = from.join(":");
        let token = frame.windows(TOKEN.len()).position(|window| window == TOKEN).map(|at| {
            let rest = frame[at..].iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'-');
            rest.map(|byte| char::from(*byte)).collect::<String>()
        });
        match token {
            Some(token) => say(&format!("frame {from} {token}")),
            None if known.contains(&from) => {
                let start: Vec<String> = frame.iter().skip(12).take(40).map(|byte| format!("{byte:02x}")).collect();
                say(&format!("frame {from} without-token {}", start.concat()));
            }
            None => {}
        }
    }
}

fn abstract_address(name: &str) -> Vec<u8> {
    let mut raw = 1u16.to_ne_bytes().to_vec();
    raw.push(0);
    raw.extend(name.as_bytes());
    raw
}

fn main() {
    let all: Vec<String> = std::env::args().skip(1).collect();
    let all_str: Vec<&str> = all.iter().map(String::as_str).collect();
    let place = |text: &str| text.parse::<SocketAddr>().expect("an address and a port");
    match all_str.as_slice() {
        ["tcp", to, token, ..] => tcp(place(to), token, &all[3..]),
        ["udp", to, token, ..] => udp(place(to), token, &all[3..]),
        ["ping", to, token] => ping(to.parse().expect("an address"), token, DGRAM),
        ["raw", to, token] => ping(to.parse().expect("an address"), token, RAW),
        ["frame", interface, token] => frame(interface, token),
        ["dns", to, name] => dns(place(to), name, false),
        ["dns", to, name, "tcp"] => dns(place(to), name, true),
        ["family", number] => family(number),
        ["uring"] => {
            if unsafe { syscall(425, 4 as c_long, [0u8; 256].as_mut_ptr()) } < 0 {
                fail("io_uring_setup");
            }
        }
        ["namespace", to, token] => {
            // CLONE_NEWUSER and CLONE_NEWNET
            if unsafe { unshare(0x1000_0000 | 0x4000_0000) } < 0 && unsafe { unshare(0x4000_0000) } < 0 {
                fail("unshare");
            }
            tcp(place(to), token, &[]);
        }
        ["join", to, group, token] => {
            let to = place(to);
            let fd = open(to, DGRAM, 0);
            let group: std::net::Ipv4Addr = group.parse().expect("a group");
            let mut request = group.octets().to_vec();
            request.extend([0; 4]);
            if !option(&fd, 0, 35, &request) {
                fail("join");
            }
            send(&fd, token.as_bytes(), 0, Some(&address(to)));
        }
        ["abstract", name, token] => {
            let fd = unsafe { OwnedFd::from_raw_fd(socket(1, STREAM, 0).max(0)) };
            let raw = abstract_address(name);
            if unsafe { connect(fd.as_raw_fd(), raw.as_ptr().cast(), raw.len() as u32) } < 0 {
                fail("connect");
            }
            send(&fd, token.as_bytes(), 0, None);
        }
        ["hold", to, file] => hold(place(to), file),
        ["talk", port, wait] => talk(port, wait, false),
        ["drip", port, wait] => talk(port, wait, true),
        ["serve", tcp, udp] => serve(tcp, udp),
        ["watch", interface, ..] => watch(interface, &all[2..]),
        _ => {
            eprintln!("usage: see the source");
            exit(2);
        }
    }
}
