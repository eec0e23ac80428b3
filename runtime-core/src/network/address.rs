//! [`AddressKind`]: whether an address is globally routable, and if not, what it is.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What an address is for. Only [`Global`](Self::Global) may be dialled on behalf of a box: a public name that
/// resolves to anything else would be a way into this host, its network, or its cloud platform.
///
/// Stricter than the registries of IANA where it costs nothing: every address that embeds another (IPv4-mapped,
/// NAT64, 6to4, Teredo) is refused whatever it embeds, and of IPv6 only 2000::/3, which is all that is handed out. A
/// NAT64 prefix that a network chose for itself cannot be recognised; name it in a block list, which is also applied to
/// resolved addresses.
///
/// ```
/// use runtime_core::network::AddressKind;
///
/// assert!(AddressKind::of("93.184.215.14".parse()?).is_global());
/// assert_eq!(AddressKind::of("169.254.169.254".parse()?), AddressKind::LinkLocal);
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AddressKind {
    /// Globally routable unicast.
    Global,
    /// 0.0.0.0/8 and `::`: this host on this network.
    Unspecified,
    /// 127.0.0.0/8 and `::1`.
    Loopback,
    /// 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16.
    Private,
    /// 100.64.0.0/10: between a carrier and its customers.
    CarrierNat,
    /// 169.254.0.0/16 and fe80::/10, metadata services among them.
    LinkLocal,
    /// fc00::/7.
    UniqueLocal,
    /// fec0::/10, long deprecated.
    SiteLocal,
    /// 224.0.0.0/4 and ff00::/8.
    Multicast,
    /// 255.255.255.255.
    Broadcast,
    /// 192.0.2.0/24, 198.51.100.0/24, 203.0.113.0/24, 2001:db8::/32, 3fff::/20.
    Documentation,
    /// 198.18.0.0/15 and 2001:2::/48.
    Benchmark,
    /// 192.0.0.0/24 and the rest of 2001::/23.
    ProtocolAssignment,
    /// 192.88.99.0/24: relays of 6to4.
    SixToFourRelay,
    /// 168.63.129.16: public by its number, but answered by the cloud platform under this host.
    Platform,
    /// 240.0.0.0/4 and all of IPv6 that is outside 2000::/3 and has no other name here.
    Reserved,
    /// ::ffff:0:0/96.
    V4Mapped,
    /// ::/96.
    V4Compatible,
    /// 64:ff9b::/96, translated to IPv4 by the network.
    Nat64,
    /// 64:ff9b:1::/48, the same with local addresses.
    LocalNat64,
    /// 2002::/16.
    SixToFour,
    /// 2001::/32.
    Teredo,
    /// 100::/64 and 100:0:0:1::/64: thrown away by routers.
    Discard,
    /// 5f00::/16: segment routing identifiers.
    SegmentRouting,
}

type Table<A> = &'static [(A, u8, AddressKind)];

/// First match wins.
const V4: Table<Ipv4Addr> = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8, AddressKind::Unspecified),
    (Ipv4Addr::new(10, 0, 0, 0), 8, AddressKind::Private),
    (Ipv4Addr::new(100, 64, 0, 0), 10, AddressKind::CarrierNat),
    (Ipv4Addr::new(127, 0, 0, 0), 8, AddressKind::Loopback),
    (Ipv4Addr::new(168, 63, 129, 16), 32, AddressKind::Platform),
    (Ipv4Addr::new(169, 254, 0, 0), 16, AddressKind::LinkLocal),
    (Ipv4Addr::new(172, 16, 0, 0), 12, AddressKind::Private),
    (Ipv4Addr::new(192, 0, 0, 0), 24, AddressKind::ProtocolAssignment),
    (Ipv4Addr::new(192, 0, 2, 0), 24, AddressKind::Documentation),
    (Ipv4Addr::new(192, 88, 99, 0), 24, AddressKind::SixToFourRelay),
    (Ipv4Addr::new(192, 168, 0, 0), 16, AddressKind::Private),
    (Ipv4Addr::new(198, 18, 0, 0), 15, AddressKind::Benchmark),
    (Ipv4Addr::new(198, 51, 100, 0), 24, AddressKind::Documentation),
    (Ipv4Addr::new(203, 0, 113, 0), 24, AddressKind::Documentation),
    (Ipv4Addr::new(224, 0, 0, 0), 4, AddressKind::Multicast),
    (Ipv4Addr::new(255, 255, 255, 255), 32, AddressKind::Broadcast),
    (Ipv4Addr::new(240, 0, 0, 0), 4, AddressKind::Reserved),
];

/// First match wins.
const V6: Table<Ipv6Addr> = &[
    (Ipv6Addr::UNSPECIFIED, 128, AddressKind::Unspecified),
    (Ipv6Addr::LOCALHOST, 128, AddressKind::Loopback),
    (Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96, AddressKind::V4Mapped),
    (Ipv6Addr::UNSPECIFIED, 96, AddressKind::V4Compatible),
    (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96, AddressKind::Nat64),
    (
        Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0),
        48,
        AddressKind::LocalNat64,
    ),
    (Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0), 63, AddressKind::Discard),
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32, AddressKind::Teredo),
    (Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0), 48, AddressKind::Benchmark),
    (
        Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0),
        23,
        AddressKind::ProtocolAssignment,
    ),
    (
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0),
        32,
        AddressKind::Documentation,
    ),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16, AddressKind::SixToFour),
    (
        Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0),
        20,
        AddressKind::Documentation,
    ),
    (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3, AddressKind::Global),
    (
        Ipv6Addr::new(0x5f00, 0, 0, 0, 0, 0, 0, 0),
        16,
        AddressKind::SegmentRouting,
    ),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, AddressKind::UniqueLocal),
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10, AddressKind::LinkLocal),
    (Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0), 10, AddressKind::SiteLocal),
    (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8, AddressKind::Multicast),
];

impl AddressKind {
    /// The kind of `address`.
    pub fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => V4
                .iter()
                .find(|(net, bits, _)| (address.to_bits() ^ net.to_bits()).leading_zeros() >= u32::from(*bits))
                .map_or(Self::Global, |(_, _, kind)| *kind),
            IpAddr::V6(address) => V6
                .iter()
                .find(|(net, bits, _)| (address.to_bits() ^ net.to_bits()).leading_zeros() >= u32::from(*bits))
                .map_or(Self::Reserved, |(_, _, kind)| *kind),
        }
    }

    /// Whether a box may be connected to it.
    pub fn is_global(self) -> bool {
        self == Self::Global
    }

    /// The first address that is not globally routable. One bad address refuses a name: mixed answers are an attack.
    pub fn first_non_global(addresses: impl IntoIterator<Item = IpAddr>) -> Option<(IpAddr, Self)> {
        addresses
            .into_iter()
            .map(|address| (address, Self::of(address)))
            .find(|(_, kind)| !kind.is_global())
    }
}

impl fmt::Display for AddressKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Global => "global",
            Self::Unspecified => "unspecified",
            Self::Loopback => "loopback",
            Self::Private => "private",
            Self::CarrierNat => "carrier NAT",
            Self::LinkLocal => "link-local",
            Self::UniqueLocal => "unique local",
            Self::SiteLocal => "site-local",
            Self::Multicast => "multicast",
            Self::Broadcast => "broadcast",
            Self::Documentation => "for documentation",
            Self::Benchmark => "for benchmarks",
            Self::ProtocolAssignment => "a protocol assignment",
            Self::SixToFourRelay => "a 6to4 relay",
            Self::Platform => "the cloud platform's",
            Self::Reserved => "reserved",
            Self::V4Mapped => "IPv4-mapped",
            Self::V4Compatible => "IPv4-compatible",
            Self::Nat64 => "NAT64",
            Self::LocalNat64 => "local NAT64",
            Self::SixToFour => "6to4",
            Self::Teredo => "Teredo",
            Self::Discard => "discarded",
            Self::SegmentRouting => "segment routing",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipnet::IpNet;
    use proptest::prelude::*;

    fn kind(text: &str) -> AddressKind {
        AddressKind::of(text.parse().unwrap())
    }

    /// Every block with its first and last address and the neighbours on both sides.
    #[test]
    fn every_block_begins_and_ends_where_the_registries_say() {
        use AddressKind::*;
        for (before, first, last, after, expected) in [
            (None, "0.0.0.0", "0.255.255.255", Some("1.0.0.0"), Unspecified),
            (
                Some("9.255.255.255"),
                "10.0.0.0",
                "10.255.255.255",
                Some("11.0.0.0"),
                Private,
            ),
            (
                Some("100.63.255.255"),
                "100.64.0.0",
                "100.127.255.255",
                Some("100.128.0.0"),
                CarrierNat,
            ),
            (
                Some("126.255.255.255"),
                "127.0.0.0",
                "127.255.255.255",
                Some("128.0.0.0"),
                Loopback,
            ),
            (
                Some("168.63.129.15"),
                "168.63.129.16",
                "168.63.129.16",
                Some("168.63.129.17"),
                Platform,
            ),
            (
                Some("169.253.255.255"),
                "169.254.0.0",
                "169.254.255.255",
                Some("169.255.0.0"),
                LinkLocal,
            ),
            (
                Some("172.15.255.255"),
                "172.16.0.0",
                "172.31.255.255",
                Some("172.32.0.0"),
                Private,
            ),
            (
                Some("191.255.255.255"),
                "192.0.0.0",
                "192.0.0.255",
                Some("192.0.1.0"),
                ProtocolAssignment,
            ),
            (
                Some("192.0.1.255"),
                "192.0.2.0",
                "192.0.2.255",
                Some("192.0.3.0"),
                Documentation,
            ),
            (
                Some("192.88.98.255"),
                "192.88.99.0",
                "192.88.99.255",
                Some("192.88.100.0"),
                SixToFourRelay,
            ),
            (
                Some("192.167.255.255"),
                "192.168.0.0",
                "192.168.255.255",
                Some("192.169.0.0"),
                Private,
            ),
            (
                Some("198.17.255.255"),
                "198.18.0.0",
                "198.19.255.255",
                Some("198.20.0.0"),
                Benchmark,
            ),
            (
                Some("198.51.99.255"),
                "198.51.100.0",
                "198.51.100.255",
                Some("198.51.101.0"),
                Documentation,
            ),
            (
                Some("203.0.112.255"),
                "203.0.113.0",
                "203.0.113.255",
                Some("203.0.114.0"),
                Documentation,
            ),
            (Some("223.255.255.255"), "224.0.0.0", "239.255.255.255", None, Multicast),
            (None, "240.0.0.0", "255.255.255.254", None, Reserved),
            (None, "255.255.255.255", "255.255.255.255", None, Broadcast),
            (None, "::", "::", None, Unspecified),
            (None, "::1", "::1", None, Loopback),
            (None, "::2", "::ffff:ffff", None, V4Compatible),
            (None, "::ffff:0:0", "::ffff:ffff:ffff", None, V4Mapped),
            (None, "64:ff9b::", "64:ff9b::ffff:ffff", None, Nat64),
            (
                None,
                "64:ff9b:1::",
                "64:ff9b:1:ffff:ffff:ffff:ffff:ffff",
                None,
                LocalNat64,
            ),
            (None, "100::", "100:0:0:1:ffff:ffff:ffff:ffff", None, Discard),
            (None, "2001::", "2001:0:ffff:ffff:ffff:ffff:ffff:ffff", None, Teredo),
            (
                None,
                "2001:1::",
                "2001:1:ffff:ffff:ffff:ffff:ffff:ffff",
                None,
                ProtocolAssignment,
            ),
            (None, "2001:2::", "2001:2:0:ffff:ffff:ffff:ffff:ffff", None, Benchmark),
            (
                None,
                "2001:2:1::",
                "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff",
                Some("2001:200::"),
                ProtocolAssignment,
            ),
            (
                Some("2001:db7:ffff:ffff:ffff:ffff:ffff:ffff"),
                "2001:db8::",
                "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff",
                Some("2001:db9::"),
                Documentation,
            ),
            (
                Some("2001:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
                "2002::",
                "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                Some("2003::"),
                SixToFour,
            ),
            (
                Some("3ffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
                "3fff::",
                "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff",
                Some("3fff:1000::"),
                Documentation,
            ),
            (
                None,
                "4000::",
                "5eff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                None,
                Reserved,
            ),
            (
                None,
                "5f00::",
                "5f00:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                None,
                SegmentRouting,
            ),
            (
                None,
                "5f01::",
                "fbff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                None,
                Reserved,
            ),
            (
                None,
                "fc00::",
                "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                None,
                UniqueLocal,
            ),
            (
                None,
                "fe00::",
                "fe7f:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                None,
                Reserved,
            ),
            (
                None,
                "fe80::",
                "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                None,
                LinkLocal,
            ),
            (
                None,
                "fec0::",
                "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                None,
                SiteLocal,
            ),
            (
                None,
                "ff00::",
                "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                None,
                Multicast,
            ),
        ] {
            assert_eq!(kind(first), expected, "{first}");
            assert_eq!(kind(last), expected, "{last}");
            for neighbour in [before, after].into_iter().flatten() {
                assert_eq!(kind(neighbour), Global, "{neighbour}");
            }
        }
    }

    #[test]
    fn well_known_metadata_services_are_refused() {
        for text in [
            "169.254.169.254", // most clouds
            "169.254.170.2",   // container credentials
            "fd00:ec2::254",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
            "fe80::a9fe:a9fe",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::1",
        ] {
            assert!(!kind(text).is_global(), "{text}");
        }
    }

    #[test]
    fn public_addresses_are_global() {
        for text in [
            "1.1.1.1",
            "8.8.8.8",
            "93.184.215.14",
            "151.101.0.223",
            "2606:4700::1111",
            "2a04:4e42::223",
            "2001:4860:4860::8888",
        ] {
            assert_eq!(kind(text), AddressKind::Global, "{text}");
        }
    }

    #[test]
    fn one_bad_address_among_good_ones_is_found() {
        let addresses = ["1.1.1.1", "10.0.0.1", "127.0.0.1"].map(|text| text.parse::<IpAddr>().unwrap());
        let found = AddressKind::first_non_global(addresses);
        assert_eq!(found, Some((addresses[1], AddressKind::Private)));
        assert_eq!(AddressKind::first_non_global(addresses[..1].iter().copied()), None);
    }

    #[test]
    fn the_table_agrees_with_what_the_standard_library_knows() {
        let check = |address: IpAddr| {
            let kind = AddressKind::of(address);
            assert_eq!(address.is_loopback(), kind == AddressKind::Loopback, "{address}");
            assert_eq!(address.is_multicast(), kind == AddressKind::Multicast, "{address}");
            match address {
                IpAddr::V4(v4) => {
                    assert_eq!(v4.is_private(), kind == AddressKind::Private, "{address}");
                    assert_eq!(v4.is_link_local(), kind == AddressKind::LinkLocal, "{address}");
                    assert_eq!(v4.is_broadcast(), kind == AddressKind::Broadcast, "{address}");
                    assert_eq!(v4.is_documentation(), kind == AddressKind::Documentation, "{address}");
                }
                IpAddr::V6(v6) => {
                    assert_eq!(v6.is_unique_local(), kind == AddressKind::UniqueLocal, "{address}");
                    assert_eq!(v6.is_unicast_link_local(), kind == AddressKind::LinkLocal, "{address}");
                    assert_eq!(
                        v6.to_ipv4_mapped().is_some(),
                        kind == AddressKind::V4Mapped,
                        "{address}"
                    );
                }
            }
        };
        // One address of every /16 of both families, and every first octet's edges.
        for high in 0..=u16::MAX {
            check(IpAddr::V4(Ipv4Addr::from_bits(u32::from(high) << 16 | 0x0101)));
            check(IpAddr::V6(Ipv6Addr::new(high, 0, 0, 0, 0, 0, 0, 0x1234)));
        }
    }

    proptest! {
        #[test]
        fn nothing_global_lies_in_a_refused_network(bits: u128, low: u32) {
            const REFUSED: [&str; 14] = [
                "::/3", "4000::/2", "8000::/1", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "0.0.0.0/8",
                "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "192.168.0.0/16", "224.0.0.0/3",
            ];
            for address in [IpAddr::V6(Ipv6Addr::from_bits(bits)), IpAddr::V4(Ipv4Addr::from_bits(low))] {
                let refused = REFUSED.iter().any(|net| net.parse::<IpNet>().unwrap().contains(&address));
                prop_assert!(!(refused && AddressKind::of(address).is_global()), "{}", address);
            }
        }
    }
}
