//! The attempts: what each tries, what it needs to work, and what stops it.

use super::proxied::Request;

/// One attempt to get out of a closed box.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attempt {
    pub(super) name: &'static str,
    /// In words, for the table.
    pub(super) tries: &'static str,
    pub(super) stopped_by: &'static str,
    pub(super) before: Before,
    pub(super) evidence: Evidence,
    pub(super) way: Way,
}

/// Where the attempt is shown to work before the cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    /// In the box itself.
    Box,
    /// In a box without a policy beside it: a restricted one is never allowed it.
    Open,
    /// Nowhere: it is stopped always, or this kernel lacks what it needs.
    Nowhere,
}

/// What tells that it worked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evidence {
    /// Its token arrived somewhere outside.
    Arrives,
    /// The program itself says so: there is nobody outside who could.
    Succeeds,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    /// The probe with these arguments. `{…}` are places.
    Probe(&'static [&'static str]),
    /// A shell script.
    Shell(&'static str),
    /// What a process of setup goes on doing; the suffix of its tokens.
    Held(&'static str),
    /// Bytes to the proxy.
    Proxy(Request),
}

const GONE: &str = "no interface and no route is left";
const FILTER: &str = "the guest's system call filter";
const NO_CAPABILITY: &str = "no capability for it, in the box and in what it starts";
const RESOLVER: &str = "the engine's resolver is gone or unreachable";

const fn direct(name: &'static str, tries: &'static str, probe: &'static [&'static str]) -> Attempt {
    Attempt {
        name,
        tries,
        stopped_by: GONE,
        before: Before::Box,
        evidence: Evidence::Arrives,
        way: Way::Probe(probe),
    }
}

const fn by(mut attempt: Attempt, stopped_by: &'static str) -> Attempt {
    attempt.stopped_by = stopped_by;
    attempt
}

const fn in_open(mut attempt: Attempt) -> Attempt {
    attempt.before = Before::Open;
    attempt
}

const fn never(mut attempt: Attempt) -> Attempt {
    attempt.before = Before::Nowhere;
    attempt
}

const fn local(mut attempt: Attempt) -> Attempt {
    attempt.evidence = Evidence::Succeeds;
    attempt
}

const fn family(name: &'static str, tries: &'static str, probe: &'static [&'static str]) -> Attempt {
    by(never(local(direct(name, tries, probe))), FILTER)
}

const fn shell(name: &'static str, tries: &'static str, script: &'static str) -> Attempt {
    Attempt {
        name,
        tries,
        stopped_by: NO_CAPABILITY,
        before: Before::Nowhere,
        evidence: Evidence::Succeeds,
        way: Way::Shell(script),
    }
}

const fn held(name: &'static str, tries: &'static str, suffix: &'static str) -> Attempt {
    Attempt {
        name,
        tries,
        stopped_by: "its interface is gone, and with it its way",
        before: Before::Box,
        evidence: Evidence::Arrives,
        way: Way::Held(suffix),
    }
}

const fn proxied(name: &'static str, tries: &'static str, stopped_by: &'static str, request: Request) -> Attempt {
    Attempt {
        name,
        tries,
        stopped_by,
        before: Before::Box,
        evidence: Evidence::Arrives,
        way: Way::Proxy(request),
    }
}

/// By the box's own network. Places: `{outside}` and `{outside6}` are public addresses, `{gateway}` and `{gateway6}` the
/// bridge's, `{peer}` another box's, `{dev}` the box's interface, `{own}` its address.
pub(super) const DIRECT: &[Attempt] = &[
    direct("tcp", "TCP to a public address", &["tcp", "{outside}:443", "{token}"]),
    direct("udp", "UDP to a public address", &["udp", "{outside}:443", "{token}"]),
    direct(
        "ping",
        "an ICMP echo by a datagram socket",
        &["ping", "{outside}", "{token}"],
    ),
    in_open(direct("raw", "ICMP by a raw socket", &["raw", "{outside}", "{token}"])),
    by(
        in_open(direct(
            "packet",
            "a frame by a packet socket",
            &["frame", "{dev}", "{token}"],
        )),
        FILTER,
    ),
    direct(
        "dns-udp",
        "a DNS query to a public resolver",
        &["dns", "8.8.8.8:53", "{token}.example"],
    ),
    direct(
        "dns-tcp",
        "the same over TCP",
        &["dns", "8.8.8.8:53", "{token}.example", "tcp"],
    ),
    direct(
        "gateway-tcp",
        "a service of the host on 0.0.0.0, at the bridge's address",
        &["tcp", "{gateway}:41230", "{token}"],
    ),
    direct(
        "gateway-udp",
        "the same over UDP",
        &["udp", "{gateway}:41230", "{token}"],
    ),
    local(direct(
        "gateway-ping",
        "an ICMP echo to the bridge",
        &["ping", "{gateway}", "{token}"],
    )),
    direct(
        "peer-tcp",
        "another box on the bridge",
        &["tcp", "{peer}:41230", "{token}"],
    ),
    direct("peer-udp", "the same over UDP", &["udp", "{peer}:41230", "{token}"]),
    direct(
        "metadata-tcp",
        "the metadata service",
        &["tcp", "169.254.169.254:80", "{token}"],
    ),
    direct(
        "metadata-udp",
        "the same over UDP",
        &["udp", "169.254.169.254:80", "{token}"],
    ),
    direct(
        "link-local",
        "another link-local address",
        &["tcp", "169.254.7.7:80", "{token}"],
    ),
    direct(
        "private",
        "a private address behind the gateway",
        &["tcp", "10.99.0.1:80", "{token}"],
    ),
    direct(
        "shared",
        "an address of the carriers' shared space",
        &["tcp", "100.64.0.1:80", "{token}"],
    ),
    direct(
        "broadcast",
        "a broadcast",
        &["udp", "255.255.255.255:41230", "{token}", "broadcast", "deaf"],
    ),
    direct(
        "subnet-broadcast",
        "a broadcast to the subnet",
        &["udp", "{broadcast}:41230", "{token}", "broadcast", "deaf"],
    ),
    direct(
        "multicast",
        "a multicast",
        &["udp", "224.0.0.251:5353", "{token}", "deaf"],
    ),
    direct(
        "multicast-join",
        "joining a multicast group",
        &["join", "224.0.0.99:41230", "224.0.0.99", "{token}"],
    ),
    direct(
        "bound-tcp",
        "TCP by a socket that is bound to the device",
        &["tcp", "{outside}:443", "{token}", "dev={dev}"],
    ),
    direct(
        "bound-udp",
        "UDP by such a socket",
        &["udp", "{gateway}:41230", "{token}", "dev={dev}"],
    ),
    direct(
        "own-address",
        "TCP from the address that the box had",
        &["tcp", "{outside}:443", "{token}", "from={own}"],
    ),
    direct(
        "fast-open",
        "data in a SYN",
        &["tcp", "{outside}:443", "{token}", "fastopen"],
    ),
    never(direct(
        "mptcp",
        "multipath TCP",
        &["tcp", "{outside}:443", "{token}", "protocol=262"],
    )),
    never(direct(
        "udp-lite",
        "UDP-Lite",
        &["udp", "{outside}:443", "{token}", "protocol=136", "deaf"],
    )),
    never(direct(
        "sctp",
        "SCTP",
        &["tcp", "{outside}:443", "{token}", "protocol=132"],
    )),
    direct(
        "tcp6",
        "TCP to a public IPv6 address",
        &["tcp", "[{outside6}]:443", "{token}"],
    ),
    direct("udp6", "UDP to one", &["udp", "[{outside6}]:443", "{token}"]),
    direct("ping6", "an ICMPv6 echo", &["ping", "{outside6}", "{token}"]),
    direct(
        "gateway6",
        "a service of the host at the bridge's IPv6 address",
        &["tcp", "[{gateway6}]:41230", "{token}"],
    ),
    direct(
        "neighbours6",
        "a multicast to all neighbours by IPv6",
        &["udp", "[ff02::1%{index}]:41230", "{token}", "deaf"],
    ),
    direct(
        "metadata6",
        "a metadata service by IPv6",
        &["tcp", "[fd00:ec2::254]:80", "{token}"],
    ),
    held("old-tcp", "a connection from before the cut", "-tcp"),
    held("old-udp", "a connected UDP socket from before the cut", "-udp"),
    held(
        "old-process",
        "a process from before the cut that connects anew",
        "-new",
    ),
    by(
        local(direct(
            "resolver-udp",
            "the engine's own resolver",
            &["dns", "{resolver}:53", "{peer-name}"],
        )),
        RESOLVER,
    ),
    by(
        local(direct(
            "resolver-tcp",
            "the same over TCP",
            &["dns", "{resolver}:53", "{peer-name}", "tcp"],
        )),
        RESOLVER,
    ),
    by(
        never(local(Attempt {
            way: Way::Shell(
                "set -- $(awk '$2 ~ /^0B00007F:/ {print $2}' /proc/net/udp); [ $# -gt 0 ] && {probe} dns 127.0.0.11:$((0x${1#*:})) {token}.example",
            ),
            ..direct(
                "resolver-port",
                "the resolver's port behind the engine's redirection",
                &[],
            )
        })),
        RESOLVER,
    ),
    by(
        never(direct(
            "abstract",
            "an abstract Unix socket of the host",
            &["abstract", "escape-host", "{token}"],
        )),
        "a network namespace has its own",
    ),
    family("vsock", "the hypervisor, by AF_VSOCK", &["family", "40"]),
    family("alg", "AF_ALG", &["family", "38"]),
    family("bluetooth", "AF_BLUETOOTH", &["family", "31"]),
    family("tipc", "AF_TIPC", &["family", "30"]),
    family("can", "AF_CAN", &["family", "29"]),
    family("rds", "AF_RDS", &["family", "21"]),
    family("xdp", "AF_XDP", &["family", "44"]),
    family("key", "AF_KEY", &["family", "15"]),
    family("qipcrtr", "AF_QIPCRTR", &["family", "42"]),
    by(family("uring", "sockets made by io_uring", &["uring"]), FILTER),
    by(
        never(direct(
            "namespace",
            "TCP from a network namespace of its own",
            &["namespace", "{outside}:443", "{token}"],
        )),
        "such a namespace has nothing either",
    ),
    shell(
        "interface",
        "adding an interface",
        "ip link add escape0 type veth peer name escape1",
    ),
    shell(
        "dummy",
        "adding an interface of another kind",
        "ip link add escape0 type bridge",
    ),
    shell(
        "tunnel",
        "adding a tunnel",
        "ip tunnel add escape0 mode ipip remote {outside} local 127.0.0.1",
    ),
    shell("route", "adding a route", "ip route add default dev lo"),
    shell("address", "adding an address to lo", "ip addr add {own}/32 dev lo"),
    shell(
        "host-namespace",
        "entering the host's network through /proc",
        "nsenter -t 1 -n {probe} tcp {outside}:443 {token} && nsenter --net=/proc/1/ns/net true && false",
    ),
    shell(
        "resolver-route",
        "giving the resolver its way back",
        "ip route del blackhole 127.0.0.11 table local",
    ),
];

const POLICY: &str = "the policy, for each request";
const ADDRESSES: &str = "the check of resolved addresses";
const FRAMING: &str = "strict framing";
const TUNNELS: &str = "the check of the ClientHello";
const TOKEN: &str = "407: the proxy's token";

/// Through the proxy and the relays. The policy allows `good.example` and every name here that is not `other.example`,
/// so that it is the address that is wrong.
pub(super) const PROXIED: &[Attempt] = &[
    never(proxied(
        "no-token",
        "the proxy without a token",
        TOKEN,
        Request::Head("GET http://good.example/{token} HTTP/1.1\r\nHost: good.example\r\n\r\n"),
    )),
    never(proxied(
        "wrong-token",
        "with a wrong token",
        TOKEN,
        Request::Head(
            "GET http://good.example/{token} HTTP/1.1\r\nHost: good.example\r\nProxy-Authorization: Basic dmVyaWZpZXJzOndyb25n\r\n\r\n",
        ),
    )),
    never(proxied(
        "other-token",
        "with another box's token",
        TOKEN,
        Request::Head(
            "GET http://good.example/{token} HTTP/1.1\r\nHost: good.example\r\nProxy-Authorization: {other-auth}\r\n\r\n",
        ),
    )),
    proxied(
        "refused-host",
        "a host that no rule allows",
        POLICY,
        Request::Get("http://other.example/{token}"),
    ),
    proxied(
        "look-alike",
        "a host that only ends like an allowed one",
        POLICY,
        Request::Get("http://notgood.example/{token}"),
    ),
    proxied(
        "literal",
        "an address literal",
        POLICY,
        Request::Get("http://10.0.0.1/{token}"),
    ),
    proxied(
        "literal-metadata",
        "the metadata service by its address",
        POLICY,
        Request::Get("http://169.254.169.254/{token}"),
    ),
    never(proxied(
        "literal-loopback",
        "this host's loopback",
        POLICY,
        Request::Get("http://127.0.0.1:4111/{token}"),
    )),
    never(proxied(
        "localhost",
        "this host by its name",
        POLICY,
        Request::Get("http://localhost:4111/{token}"),
    )),
    never(proxied(
        "odd-loopback",
        "this host in another spelling",
        POLICY,
        Request::Get("http://2130706433:4111/{token}"),
    )),
    proxied(
        "to-private",
        "an allowed name with a private address",
        ADDRESSES,
        Request::Get("http://ten.example/{token}"),
    ),
    never(proxied(
        "to-loopback",
        "one with a loopback address",
        ADDRESSES,
        Request::Get("http://loop.example:4111/{token}"),
    )),
    proxied(
        "to-link-local",
        "one with the metadata service's address",
        ADDRESSES,
        Request::Get("http://link.example/{token}"),
    ),
    proxied(
        "to-shared",
        "one with an address of the carriers' shared space",
        ADDRESSES,
        Request::Get("http://cgnat.example/{token}"),
    ),
    never(proxied(
        "to-multicast",
        "one with a multicast address",
        ADDRESSES,
        Request::Get("http://multi.example/{token}"),
    )),
    proxied(
        "to-mapped",
        "one with a v4-mapped private address",
        ADDRESSES,
        Request::Get("http://mapped.example/{token}"),
    ),
    proxied(
        "to-nat64",
        "one with a private address behind NAT64",
        ADDRESSES,
        Request::Get("http://nat64.example/{token}"),
    ),
    proxied(
        "mixed-answers",
        "one with a good and a bad address",
        ADDRESSES,
        Request::Get("http://mixed.example/{token}"),
    ),
    never(proxied(
        "rebinding",
        "one that changes its answer after the check",
        "the address that was checked is dialled",
        Request::Rebind("http://rebind.example/{token}"),
    )),
    proxied(
        "connect-literal",
        "CONNECT to an address literal",
        POLICY,
        Request::Tunnel("10.0.0.1:443", &["{token}.good.example"], Cut::Whole),
    ),
    proxied(
        "connect-private",
        "CONNECT to a name with a private address",
        ADDRESSES,
        Request::Tunnel("ten.example:443", &["{token}.ten.example"], Cut::Whole),
    ),
    proxied(
        "connect-port",
        "CONNECT to a port other than 443",
        POLICY,
        Request::Tunnel("good.example:22", &["{token}.good.example"], Cut::Whole),
    ),
    proxied(
        "connect-refused",
        "CONNECT to a refused host",
        POLICY,
        Request::Tunnel("other.example:443", &["{token}.other.example"], Cut::Whole),
    ),
    proxied(
        "sni-other",
        "an allowed tunnel with a refused name in TLS",
        TUNNELS,
        Request::Tunnel("good.example:443", &["{token}.other.example"], Cut::Whole),
    ),
    never(proxied(
        "sni-none",
        "no name in TLS",
        TUNNELS,
        Request::Tunnel("good.example:443", &[], Cut::Whole),
    )),
    never(proxied(
        "sni-two",
        "two names in TLS",
        TUNNELS,
        Request::Tunnel(
            "good.example:443",
            &["good.example", "{token}.other.example"],
            Cut::Whole,
        ),
    )),
    proxied(
        "sni-fragments",
        "a refused name over many records",
        TUNNELS,
        Request::Tunnel("good.example:443", &["{token}.other.example"], Cut::Records),
    ),
    proxied(
        "sni-case",
        "a refused name in mixed case with a trailing dot",
        TUNNELS,
        Request::Tunnel("good.example:443", &["{token}.OTHER.Example."], Cut::Whole),
    ),
    proxied(
        "sni-encrypted",
        "an encrypted ClientHello",
        TUNNELS,
        Request::Tunnel("good.example:443", &["{token}.good.example"], Cut::Encrypted),
    ),
    never(proxied(
        "not-tls",
        "HTTP in a tunnel",
        TUNNELS,
        Request::Head(
            "CONNECT good.example:443 HTTP/1.1\r\nHost: good.example\r\n{auth}\r\nGET /{token} HTTP/1.1\r\nHost: other.example\r\n\r\n",
        ),
    )),
    never(proxied(
        "absolute-https",
        "https in absolute form",
        POLICY,
        Request::Get("https://good.example/{token}"),
    )),
    never(proxied(
        "origin-form",
        "a request without a host to go to",
        POLICY,
        Request::Head("GET /{token} HTTP/1.1\r\nHost: other.example\r\n{auth}\r\n"),
    )),
    never(proxied(
        "two-framings",
        "a length beside chunks",
        FRAMING,
        Request::Head(
            "POST http://good.example/{token} HTTP/1.1\r\nHost: good.example\r\n{auth}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET http://other.example/{token} HTTP/1.1\r\n\r\n",
        ),
    )),
    never(proxied(
        "two-lengths",
        "two lengths",
        FRAMING,
        Request::Head(
            "POST http://good.example/{token} HTTP/1.1\r\nHost: good.example\r\n{auth}Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        ),
    )),
    never(proxied(
        "folded",
        "a folded field",
        FRAMING,
        Request::Head("GET http://good.example/{token} HTTP/1.1\r\nHost: good.example\r\n{auth}X: a\r\n b\r\n\r\n"),
    )),
    never(proxied(
        "bare-lf",
        "bare line feeds",
        FRAMING,
        Request::Head("GET http://good.example/{token} HTTP/1.1\nHost: good.example\n{auth}\n"),
    )),
    never(proxied(
        "bare-cr",
        "a bare carriage return",
        FRAMING,
        Request::Head("GET http://good.example/{token} HTTP/1.1\r\nHost: good.example\r\n{auth}X: a\rY: b\r\n\r\n"),
    )),
    never(proxied(
        "long-line",
        "a request line of 1 MiB",
        "64 KiB for a head",
        Request::LongLine,
    )),
    never(proxied(
        "http2",
        "the preface of HTTP/2",
        FRAMING,
        Request::Head("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{token}"),
    )),
    never(proxied(
        "smuggled-host",
        "a `Host` other than the target's",
        "`Host` is written anew",
        Request::ForeignHost,
    )),
    never(proxied(
        "pipelined",
        "a refused request behind an allowed one",
        POLICY,
        Request::Pipelined,
    )),
    never(proxied(
        "redirect",
        "a redirect from an allowed host to a refused one",
        POLICY,
        Request::Redirect,
    )),
    never(proxied(
        "relay-elsewhere",
        "a relay used to reach another port",
        "a relay has one destination",
        Request::Relay,
    )),
    never(proxied(
        "slow-head",
        "a head that never ends",
        "deadlines",
        Request::Drip("GET http://good.example/{token} HTTP/1.1\r\nHost: good.example\r\n{auth}X: "),
    )),
    never(proxied(
        "slow-hello",
        "a ClientHello that never ends",
        "deadlines",
        Request::DripHello,
    )),
];

/// How a ClientHello is put on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    Whole,
    Records,
    /// Whole, with an extension that hides another one.
    Encrypted,
}
