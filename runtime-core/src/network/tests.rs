//! The tables of the network policy's specification, and its properties.

use proptest::prelude::*;

use super::*;
use crate::error::ErrorKind;

fn raw(allow: &[&str], block: &[&str]) -> Policy {
    let rules = |texts: &[&str]| texts.iter().map(|text| Rule::new(*text)).collect();
    Policy {
        allow: rules(allow),
        block: rules(block),
    }
}

fn to(scheme: &str, host: &str, port: u16) -> Destination {
    let scheme = match scheme {
        "http" => Scheme::Http,
        "https" => Scheme::Https,
        "tcp" => Scheme::Tcp,
        other => panic!("{other}"),
    };
    Destination::new(scheme, host, port)
}

#[test]
fn rules_parse_as_in_the_table() {
    for (text, scheme, host, port) in [
        ("example.com", None, "example.com", None),
        ("EXAMPLE.com.", None, "example.com", None),
        ("example.com:8443", None, "example.com", Some(8443)),
        ("https://example.com", Some("https"), "example.com", Some(443)),
        ("HTTPS://X.COM", Some("https"), "x.com", Some(443)),
        ("http://example.com", Some("http"), "example.com", Some(80)),
        ("ws://a.com", Some("ws"), "a.com", Some(80)),
        ("wss://a.com", Some("wss"), "a.com", Some(80)),
        ("ftp://a.com", Some("ftp"), "a.com", Some(80)),
        ("example.com/path", None, "example.com", None),
        ("10.0.0.0/8", None, "10.0.0.0/8", None),
        ("[::1]:8080", None, "[::1]", Some(8080)),
        ("*:443", None, "*", Some(443)),
        ("api-?.x.com", None, "api-", None),
        ("https://", Some("https"), "", Some(443)),
        // Beyond the table.
        ("10.1.2.3/8", None, "10.0.0.0/8", None),
        ("10.0.0.0/8:443", None, "10.0.0.0/8", Some(443)),
        ("10.0.0.0:443/8", None, "10.0.0.0/8", Some(443)),
        ("[fd00::1]/8", None, "[fd00::]/8", None),
        ("[::FFFF:10.0.0.5]:80", None, "10.0.0.5", Some(80)),
        ("[2001:0DB8:0:0::1]", None, "[2001:db8::1]", None),
        ("user:pw@a.com:80", None, "a.com", Some(80)),
        ("a.com\\@b.com", None, "b.com", None),
        ("a.com:", None, "a.com", None),
        ("https://a.com:", Some("https"), "a.com", Some(443)),
        ("a.com:00080", None, "a.com", Some(80)),
        ("tcp://db:5432", Some("tcp"), "db", Some(5432)),
    ] {
        let rule = Rule::parse(text).unwrap_or_else(|problem| panic!("{text}: {problem}"));
        assert_eq!(
            (rule.scheme(), rule.host().unwrap().to_string().as_str(), rule.port()),
            (scheme, host, port),
            "{text}"
        );
        assert_eq!(rule.to_string(), text);
    }
}

#[test]
fn what_is_no_rule_says_why() {
    use RuleProblem::*;
    let long = "a".repeat(2049);
    let long_host = "a.".repeat(127) + "ab";
    for (text, problem) in [
        ("::1", BareIpv6),
        ("2001:db8::1", BareIpv6),
        ("example.com:abc", Port),
        ("example.com:70000", Port),
        ("example.com:-1", Port),
        ("example.com:+80", Port),
        ("a.com:80:90", Port),
        ("10.0.0.5:80-90", Port),
        ("[a-c].x.com", Brackets),
        ("a[b].com", Brackets),
        ("[::1", Brackets),
        ("[::1]x", Brackets),
        ("[10.0.0.1]", Brackets),
        ("[fe80::1%eth0]", Brackets),
        ("://a.com", Scheme),
        ("1http://a.com", Scheme),
        ("a.com/x?u=http://b.com", Scheme),
        ("a b.com", Character),
        ("a.com\n", Character),
        ("a\0", Character),
        ("b\u{fc}cher.example", Character),
        ("a,b.com", Character),
        ("%61.com", Character),
        (&long, TooLong),
        (&long_host, TooLong),
    ] {
        assert_eq!(Rule::parse(text), Err(problem), "{text:?}");
        let rule = Rule::new(text);
        assert_eq!((rule.problem(), rule.as_str()), (Some(problem), text));
        assert!(!rule.matches(&to("https", "a.com", 443)) && !rule.covers(&to("https", "a.com", 443)));
    }
}

#[test]
fn rules_match_as_in_the_table() {
    for (rule, (scheme, host, port), plain, subdomains) in [
        ("example.com", ("https", "example.com", 443), true, true),
        ("example.com", ("https", "EXAMPLE.COM.", 443), true, true),
        ("example.com", ("http", "example.com", 80), true, true),
        ("example.com", ("https", "api.example.com", 443), false, true),
        ("example.com", ("https", "example.com.evil.net", 443), false, false),
        ("*.example.com", ("https", "api.example.com", 443), true, true),
        ("*.example.com", ("https", "a.b.example.com", 443), true, true),
        ("*.example.com", ("https", "example.com", 443), false, false),
        ("*example.com", ("https", "notexample.com", 443), true, true),
        ("*.com", ("https", "a.b.com", 443), true, true),
        ("https://example.com", ("http", "example.com", 80), false, false),
        ("https://example.com", ("https", "example.com", 8443), false, false),
        ("https://example.com/x?y", ("https", "example.com", 443), true, true),
        ("https://*.x.com:8443", ("https", "a.x.com", 8443), true, true),
        ("example.com:443", ("http", "example.com", 443), true, true),
        // The reference only carries networks, and answers no, no here. Ours understands them.
        ("10.0.0.0/8", ("http", "10.1.2.3", 80), true, true),
        ("10.0.0.0/8", ("http", "10.0.0.0", 80), true, true),
        ("10.0.0.5", ("http", "10.0.0.5", 80), true, true),
        ("[::1]:8080", ("http", "::1", 8080), true, true),
        ("*", ("https", "anything.example", 1), true, true),
        ("*", ("http", "::1", 80), true, true),
        // Beyond the table.
        ("10.0.0.0/8", ("http", "11.0.0.0", 80), false, false),
        ("10.0.0.0/8", ("http", "name.example", 80), false, false),
        ("10.0.0.0/8:443", ("http", "10.1.2.3", 80), false, false),
        ("10.0.0.0/8:443", ("https", "10.1.2.3", 443), true, true),
        ("10.0.0.0/8", ("http", "[::ffff:10.1.2.3]", 80), true, true),
        ("[fd00::]/8", ("http", "fd12::1", 80), true, true),
        ("[fd00::]/8", ("http", "10.0.0.1", 80), false, false),
        ("0.0.0.0/0", ("http", "::1", 80), false, false),
        ("10.0.0.5", ("http", "[::ffff:10.0.0.5]", 80), true, true),
        ("[2001:db8::1]", ("http", "2001:0db8:0:0:0:0:0:1", 80), true, true),
        ("10.*", ("http", "10.1.2.3", 80), true, true),
        ("10.*", ("http", "::ffff:10.1.2.3", 80), true, true),
        ("ws://a.com", ("http", "a.com", 80), false, false),
        ("https://", ("https", "a.com", 443), false, false),
        ("api-?.x.com", ("https", "api-1.x.com", 443), false, false),
        ("a.com", ("https", "xa.com", 443), false, false),
        ("tcp://db:5432", ("tcp", "db", 5432), true, true),
        ("tcp://db:5432", ("https", "db", 5432), false, false),
        // No scheme means HTTP and HTTPS, and for a block anything.
        ("db:5432", ("tcp", "db", 5432), false, true),
        ("*", ("tcp", "db", 5432), true, true),
    ] {
        let destination = to(scheme, host, port);
        let found = (
            Rule::new(rule).matches(&destination),
            Rule::new(rule).covers(&destination),
        );
        assert_eq!(found, (plain, subdomains), "{rule} on {destination}");
    }
}

#[test]
fn policies_are_normalised_as_in_the_table() {
    let only = raw(&[], &["*"]);
    for (allow, block, expected) in [
        (&[][..], &[][..], Some(only.clone())),
        (&[], &["x.com"], Some(only.clone())),
        (&["a.com"], &["*"], Some(only.clone())),
        (&["*"], &["*"], Some(only.clone())),
        (&["*"], &["x.com", "*"], Some(only)),
        (&["*"], &[], Some(raw(&["*"], &[]))),
        (&["*"], &["x.com", "y.com"], Some(raw(&["*"], &["x.com", "y.com"]))),
        (&["a.com"], &[], Some(raw(&["a.com"], &[]))),
        (&["*", "a.com"], &[], Some(raw(&["*", "a.com"], &[]))),
        (&["a.com", "a.com"], &[], Some(raw(&["a.com", "a.com"], &[]))),
        (&["a.com"], &["x.com"], None),
        (&["*", "a.com"], &["x.com"], None),
        (&["*", "*"], &["x.com"], None),
    ] {
        let found = raw(allow, block).normalized();
        match expected {
            Some(expected) => assert_eq!(found.unwrap(), expected, "{allow:?} {block:?}"),
            None => {
                let error = found.unwrap_err();
                assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidConfig, Some("block")));
            }
        }
    }
}

#[test]
fn the_four_modes_are_told_apart() {
    for (allow, block, mode, restricted, shown) in [
        (&["*"][..], &[][..], Mode::Open, false, "open"),
        (&["*", "a.com"], &[], Mode::Open, false, "open"),
        (
            &["*"],
            &["x.com", "y.com"],
            Mode::DenyList,
            true,
            "block [x.com, y.com]",
        ),
        (&["a.com"], &[], Mode::AllowList, true, "allow [a.com]"),
        (&[], &[], Mode::FrameworkOnly, true, "framework only"),
        (&["*"], &["*"], Mode::FrameworkOnly, true, "framework only"),
    ] {
        let policy = raw(allow, block);
        assert_eq!(
            (policy.mode(), policy.is_restricted()),
            (mode, restricted),
            "{allow:?} {block:?}"
        );
        assert_eq!(policy.normalized().unwrap().mode(), mode);
        assert_eq!(policy.to_string(), shown);
    }
}

#[test]
fn policies_permit_as_in_the_table_and_name_the_rule() {
    for (allow, block, (scheme, host, port), permitted, by) in [
        (
            &["*"][..],
            &["x.com"][..],
            ("https", "x.com", 443),
            false,
            Some("x.com"),
        ),
        (&["*"], &["x.com"], ("https", "a.x.com", 443), false, Some("x.com")),
        (&["*"], &["x.com"], ("https", "ax.com", 443), true, Some("*")),
        (&["*"], &["*.x.com"], ("https", "x.com", 443), true, Some("*")),
        (&["*"], &["*.x.com"], ("https", "a.x.com", 443), false, Some("*.x.com")),
        (&["*"], &["https://x.com"], ("http", "x.com", 80), true, Some("*")),
        (
            &["*"],
            &["https://x.com"],
            ("https", "a.x.com", 443),
            false,
            Some("https://x.com"),
        ),
        (&["*"], &["x.com:8080"], ("https", "x.com", 443), true, Some("*")),
        (&["a.com"], &[], ("https", "b.a.com", 443), false, None),
        (&["*.a.com"], &[], ("https", "b.a.com", 443), true, Some("*.a.com")),
        (&["*.a.com"], &[], ("https", "a.com", 443), false, None),
        (&[], &[], ("https", "a.com", 443), false, None),
        // Beyond the table.
        (&["b.com", "a.com"], &[], ("https", "a.com", 443), true, Some("a.com")),
        (
            &["*"],
            &["10.0.0.0/8"],
            ("http", "::ffff:10.9.9.9", 80),
            false,
            Some("10.0.0.0/8"),
        ),
        (&["a.com"], &["x.com"], ("https", "x.com", 443), false, Some("x.com")),
        (&["*"], &["*"], ("https", "a.com", 443), false, Some("*")),
    ] {
        let policy = raw(allow, block);
        let decision = policy.decide(&to(scheme, host, port));
        assert_eq!(
            decision.is_permitted(),
            permitted,
            "{allow:?} {block:?} {host}: {decision}"
        );
        assert_eq!(decision.rule().map(Rule::as_str), by, "{allow:?} {block:?} {host}");
    }
}

#[test]
fn a_block_rule_that_is_none_blocks_everything_and_an_allow_rule_that_is_none_nothing() {
    let policy = raw(&["*"], &["x.com:abc"]);
    let decision = policy.permits(Scheme::Https, "a.com", 443);
    assert_eq!(
        decision.to_string(),
        "refused: the block rule x.com:abc is broken: its port is not a number from 0 to 65535"
    );
    assert!(
        !raw(&["a.com:abc"], &[])
            .permits(Scheme::Https, "a.com", 443)
            .is_permitted()
    );
}

#[test]
fn a_host_that_is_none_is_refused_even_by_an_open_policy() {
    for host in ["", "a b", "ex%61mple.com", "\u{ff45}xample.com", "a\r\nb"] {
        assert_eq!(
            Policy::open().permits(Scheme::Http, host, 80),
            Decision::MalformedHost,
            "{host:?}"
        );
    }
}

/// The worked merges: number, base, task, result. `Err` says what the error is about.
#[test]
fn merges_come_out_as_worked() {
    type Lists = (&'static [&'static str], &'static [&'static str]);
    const FO: Lists = (&[], &["*"]);
    const OPEN: Lists = (&["*"], &[]);
    let rows: &[(u8, Lists, Lists, Result<Lists, &str>)] = &[
        (1, OPEN, OPEN, Ok(OPEN)),
        (2, OPEN, (&["a.com"], &[]), Ok((&["a.com"], &[]))),
        (3, (&["a.com"], &[]), OPEN, Ok((&["a.com"], &[]))),
        (
            4,
            (&["a.com", "b.com"], &[]),
            (&["b.com", "c.com"], &[]),
            Ok((&["b.com"], &[])),
        ),
        (5, (&["a.com"], &[]), (&["b.com"], &[]), Ok(FO)),
        (6, (&["*.a.com"], &[]), (&["x.a.com"], &[]), Ok((&["x.a.com"], &[]))),
        (7, (&["x.a.com"], &[]), (&["*.a.com"], &[]), Ok((&["x.a.com"], &[]))),
        (8, (&["*.a.com"], &[]), (&["a.com"], &[]), Ok(FO)),
        (9, (&["*.a.com"], &[]), (&["*.b.a.com"], &[]), Ok((&["*.b.a.com"], &[]))),
        (
            10,
            (&["https://a.com"], &[]),
            (&["a.com"], &[]),
            Ok((&["https://a.com:443"], &[])),
        ),
        (
            11,
            (&["a.com"], &[]),
            (&["https://a.com"], &[]),
            Ok((&["https://a.com:443"], &[])),
        ),
        (12, (&["http://a.com"], &[]), (&["https://a.com"], &[]), Ok(FO)),
        (13, (&["https://a.com"], &[]), (&["http://a.com:443"], &[]), Ok(FO)),
        (
            14,
            (&["a.com:8443"], &[]),
            (&["a.com"], &[]),
            Ok((&["a.com:8443"], &[])),
        ),
        (15, (&["a.com:8443"], &[]), (&["https://a.com"], &[]), Ok(FO)),
        (
            16,
            (&["https://a.com:8443"], &[]),
            (&["a.com:8443"], &[]),
            Ok((&["https://a.com:8443"], &[])),
        ),
        (
            17,
            (&["*.a.com"], &[]),
            (&["https://x.a.com"], &[]),
            Ok((&["https://x.a.com:443"], &[])),
        ),
        (
            18,
            (&["https://*.a.com"], &[]),
            (&["x.a.com:443"], &[]),
            Ok((&["https://x.a.com:443"], &[])),
        ),
        (
            19,
            (&["https://*.a.com"], &[]),
            (&["x.a.com"], &[]),
            Ok((&["https://x.a.com:443"], &[])),
        ),
        (
            20,
            (&["*.a.com:443"], &[]),
            (&["https://b.a.com"], &[]),
            Ok((&["https://b.a.com:443"], &[])),
        ),
        (
            21,
            (&["10.0.0.0/8"], &[]),
            (&["10.0.0.0/8"], &[]),
            Ok((&["10.0.0.0/8"], &[])),
        ),
        (
            22,
            (&["10.0.0.0/8"], &[]),
            (&["10.1.2.3"], &[]),
            Err("cannot intersect"),
        ),
        (23, (&["10.0.0.0/8"], &[]), (&["a.com"], &[]), Err("cannot intersect")),
        (24, (&["a.com/path"], &[]), (&["a.com"], &[]), Err("cannot intersect")),
        (
            25,
            (&["https://a.com/path"], &[]),
            (&["a.com"], &[]),
            Ok((&["https://a.com:443"], &[])),
        ),
        (
            26,
            (&["https://a.com/path"], &[]),
            (&["https://a.com/path"], &[]),
            Ok((&["https://a.com/path"], &[])),
        ),
        (
            27,
            (&["https://a.com/x"], &[]),
            (&["https://a.com/y"], &[]),
            Ok((&["https://a.com:443"], &[])),
        ),
        (
            28,
            (&["10.0.0.5"], &[]),
            (&["10.0.0.5:80"], &[]),
            Ok((&["10.0.0.5:80"], &[])),
        ),
        (
            29,
            (&["[::1]:80"], &[]),
            (&["http://[::1]"], &[]),
            Ok((&["http://[::1]:80"], &[])),
        ),
        (30, (&["::1"], &[]), (&["::1"], &[]), Ok((&["::1"], &[]))),
        (
            31,
            (&["::1"], &[]),
            (&["a.com"], &[]),
            Err("IPv6 address needs brackets"),
        ),
        (32, (&["a*.com"], &[]), (&["ab.com"], &[]), Ok((&["ab.com"], &[]))),
        (33, (&["a*.com"], &[]), (&["b*.com"], &[]), Err("two patterns")),
        (34, (&["a*.com"], &[]), (&["*.com"], &[]), Ok((&["a*.com"], &[]))),
        (35, (&["*.*.com"], &[]), (&["*.a.com"], &[]), Err("two patterns")),
        (
            36,
            (&["*.a.com", "b.com"], &[]),
            (&["x.a.com", "b.com"], &[]),
            Ok((&["x.a.com", "b.com"], &[])),
        ),
        (37, FO, (&["a.com"], &[]), Ok(FO)),
        (38, (&["a.com"], &[]), (&[], &[]), Ok(FO)),
        (39, OPEN, (&[], &[]), Ok(FO)),
        (
            40,
            (&["*"], &["x.com"]),
            (&["*"], &["y.com"]),
            Ok((&["*"], &["y.com", "x.com"])),
        ),
        (41, (&["*"], &["x.com"]), (&["*"], &["x.com"]), Ok((&["*"], &["x.com"]))),
        (42, (&["*"], &["x.com"]), (&["a.com"], &[]), Err("exclude each other")),
        (43, (&["a.com"], &[]), (&["*"], &["x.com"]), Err("exclude each other")),
        (44, OPEN, (&["a.com"], &["x.com"]), Err("exclude each other")),
        (45, OPEN, (&["*"], &["*"]), Ok(FO)),
        (46, (&["*"], &["x.com"]), OPEN, Ok((&["*"], &["x.com"]))),
        (47, (&["A.COM"], &[]), (&["a.com"], &[]), Ok((&["a.com"], &[]))),
        (48, (&["a.com."], &[]), (&["a.com"], &[]), Ok((&["a.com"], &[]))),
        (49, OPEN, (&["*", "a.com"], &[]), Ok(OPEN)),
        (50, (&["*", "a.com"], &[]), (&["b.com"], &[]), Ok((&["b.com"], &[]))),
        (
            51,
            (&["https://user@a.com"], &[]),
            (&["a.com"], &[]),
            Ok((&["https://a.com:443"], &[])),
        ),
        (
            52,
            (&["*.com"], &[]),
            (&["*.a.com", "*.net"], &[]),
            Ok((&["*.a.com"], &[])),
        ),
        (53, (&["a.com:0"], &[]), (&["a.com"], &[]), Ok((&["a.com:0"], &[]))),
        (54, (&["?.a.com"], &[]), (&["*.a.com"], &[]), Err("cannot intersect")),
        (55, (&["a.com"], &[]), (&["*:443"], &[]), Ok((&["a.com:443"], &[]))),
        (
            56,
            (&["https://*"], &[]),
            (&["a.com"], &[]),
            Ok((&["https://a.com:443"], &[])),
        ),
        (57, (&["http://*"], &[]), (&["https://a.com"], &[]), Ok(FO)),
    ];
    assert!(rows.iter().map(|row| row.0).eq(1..=57));
    for (number, base, task, expected) in rows {
        let found = Policy::intersect(&raw(task.0, task.1), &raw(base.0, base.1));
        match (found, expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, raw(expected.0, expected.1), "row {number}"),
            (Err(error), Err(about)) => {
                assert_eq!(error.kind(), ErrorKind::InvalidConfig, "row {number}");
                assert!(error.message().contains(about), "row {number}: {error}");
            }
            (found, expected) => panic!("row {number}: {found:?} instead of {expected:?}"),
        }
    }
}

#[test]
fn a_tcp_rule_survives_only_where_both_sides_ask_for_it() {
    let merge = |task: &[&str], base: &[&str]| Policy::intersect(&raw(task, &[]), &raw(base, &[])).unwrap();
    assert_eq!(merge(&["tcp://db:5432"], &["*"]), raw(&["tcp://db:5432"], &[]));
    assert_eq!(
        merge(&["tcp://db:5432"], &["tcp://db:5432/"]),
        raw(&["tcp://db:5432"], &[])
    );
    for other in [
        "db",
        "db:5432",
        "*:5432",
        "https://db:5432",
        "tcp://db:5433",
        "tcp://other:5432",
    ] {
        assert_eq!(merge(&["tcp://db:5432"], &[other]), Policy::framework_only(), "{other}");
        assert_eq!(merge(&[other], &["tcp://db:5432"]), Policy::framework_only(), "{other}");
    }
}

#[test]
fn relays_are_listed_once_each() {
    let policy = raw(&["tcp://DB:5432", "a.com", "tcp://db:5432/", "tcp://[::1]:6379"], &[]);
    let relays: Vec<String> = policy.relays().iter().map(Destination::to_string).collect();
    assert_eq!(relays, ["tcp://db:5432", "tcp://[::1]:6379"]);
}

#[test]
fn dead_and_misleading_rules_are_refused_by_their_place() {
    use RuleProblem::*;
    for (text, problem) in [
        ("::1", BareIpv6),
        ("a.com:abc", Port),
        ("[a-c].x.com", Brackets),
        ("ws://a.com", UnknownScheme),
        ("wss://a.com", UnknownScheme),
        ("ftp://a.com", UnknownScheme),
        ("https://", NoHost),
        ("", NoHost),
        ("/x", NoHost),
        ("?.a.com", Query),
        ("api-?.x.com", Query),
        ("https://api-?.x.com", Query),
        ("a.com/x?y", Query),
        ("a.com#x", Query),
        ("10.0.0.0/33", Network),
        ("10.0.0.0/8/", Network),
        ("10.0.0.0/x", Network),
        ("10.0.0.0:1/8:2", Network),
        ("https://10.0.0.0/8", Network),
        ("a.com/24", Network),
        ("10.*/8", Network),
        ("[fd00::]/129", Network),
        ("127.1", NumericHost),
        ("2130706433", NumericHost),
        ("0x7f.0x1", NumericHost),
        ("010.0.0.1", NumericHost),
        (".a.com", EmptyLabel),
        ("a..com", EmptyLabel),
        ("*.", DressedStar),
        ("*/x", DressedStar),
        ("tcp://db", Relay),
        ("tcp://*.db:5432", Relay),
        ("tcp://db:0", Relay),
        ("tcp://10.0.0.0/8", Network),
    ] {
        let error = raw(&["ok.example", text], &[]).validate().unwrap_err();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::InvalidConfig, Some("allow[1]")),
            "{text}"
        );
        assert_eq!(Rule::new(text).check(RuleList::Allow), Err(problem), "{text}");
        let error = raw(&["*"], &["ok.example", "ok.example", text]).validate().unwrap_err();
        assert_eq!(error.field(), Some("block[2]"), "{text}");
    }
    assert_eq!(Rule::new("tcp://db:1").check(RuleList::Block), Err(BlockedRelay));
    // Nothing is allowed here, and the block list is checked all the same.
    assert_eq!(raw(&[], &["::1"]).validate().unwrap_err().field(), Some("block[0]"));
    for text in [
        "*",
        "a.com",
        "*.a.com",
        "*a.com",
        "https://a.com/x?y",
        "a.com/x",
        "10.0.0.0/8",
        "[::1]:80",
        "my_db",
        "*:443",
        "tcp://db:5432",
    ] {
        assert_eq!(
            raw(&[text], &[]).validate().err().map(|error| error.to_string()),
            None,
            "{text}"
        );
    }
}

#[test]
fn rules_that_invite_mistakes_carry_a_caution() {
    for (text, cautious) in [
        ("*example.com", true),
        ("a*.com", true),
        ("https://a.com/x", true),
        ("user@a.com", true),
        ("*.example.com", false),
        ("https://a.com/", false),
        ("10.0.0.0/8", false),
        ("*", false),
        ("::1", false),
    ] {
        assert_eq!(Rule::new(text).caution().is_some(), cautious, "{text}");
    }
}

#[test]
fn the_lists_default_to_open_and_keep_their_text() {
    let policy: Policy = serde_json::from_str("{}").unwrap();
    assert_eq!(policy, Policy::open());
    let json = r#"{"allow":["HTTPS://A.com.","::1"],"block":[]}"#;
    let policy: Policy = serde_json::from_str(json).unwrap();
    assert_eq!(serde_json::to_string(&policy).unwrap(), json);
    // As it stands in a config.
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Config {
        image: String,
        #[serde(flatten)]
        network: Policy,
    }
    let config: Config = serde_json::from_str(r#"{"image":"x","block":["a.com"]}"#).unwrap();
    assert_eq!((config.image.as_str(), config.network), ("x", raw(&["*"], &["a.com"])));
    assert!(serde_json::from_str::<Config>(r#"{"image":"x","blok":[]}"#).is_err());
}

#[test]
fn equal_policies_are_equal_however_they_are_written() {
    let same = |left: (&[&str], &[&str]), right: (&[&str], &[&str])| {
        let (left, right) = (raw(left.0, left.1), raw(right.0, right.1));
        assert_eq!(left.is_equivalent(&right), right.is_equivalent(&left));
        left.is_equivalent(&right)
    };
    assert!(same(
        (&["a.com", "https://b.com"], &[]),
        (&["HTTPS://B.com:443", "A.com.", "a.com"], &[])
    ));
    assert!(same((&["*", "a.com"], &[]), (&["*"], &[])));
    assert!(same((&[], &[]), (&["*"], &["*"])));
    assert!(same((&["10.1.0.0/8"], &[]), (&["10.0.0.0/8"], &[])));
    assert!(!same((&["a.com"], &[]), (&["https://a.com"], &[])));
    assert!(!same((&["*"], &["a.com"]), (&["*"], &["b.com"])));
    assert!(!same((&["*"], &[]), (&["a.com"], &[])));
    assert!(!same((&["a.com"], &["x.com"]), (&["a.com"], &["x.com"])));
}

#[test]
fn providers_get_routes_and_rules_once_each() {
    let routes = Routes::new([
        "https://m.example/v1",
        "http://127.0.0.1:9000",
        "http://localhost",
        "https://t.example:444",
    ]);
    let entries = raw(&["a.com", "m.example", "a.com"], &[]).entries(&routes.unwrap());
    assert_eq!(entries, ["m.example", "t.example", "a.com"]);
}

#[test]
fn no_secret_of_a_rule_reaches_a_message() {
    for text in [
        "https://u:hunter2@a.com:abc",
        "u:hunter2@a.com:abc",
        "https://u:hunter2@a.com",
        "a b hunter2@",
        "https://u:hunter2@[::1",
    ] {
        let policy = raw(&["*"], &[text]);
        let decision = policy.permits(Scheme::Https, "a.com", 443);
        let printed = format!("{policy:?} {policy} {decision} {decision:?} {:?}", policy.validate());
        assert!(!printed.contains("hunter2"), "{printed}");
    }
    let long = format!("{}\u{1b}", "x".repeat(5000));
    assert!(raw(&[&long], &[]).validate().unwrap_err().to_string().len() < 400);
}

#[test]
fn lists_and_their_intersections_are_bounded() {
    let many = |count: usize| Policy {
        allow: (0..count).map(|index| Rule::new(format!("h{index}.com"))).collect(),
        block: Vec::new(),
    };
    assert!(many(MAX_RULES).validate().is_ok());
    assert_eq!(many(MAX_RULES + 1).validate().unwrap_err().field(), Some("allow"));
    assert_eq!(many(MAX_RULES + 1).normalized().unwrap_err().field(), Some("allow"));
    // A short list of ports and a short list of hosts have a long intersection.
    let ports = Policy {
        allow: (1..=100).map(|port| Rule::new(format!("*:{port}"))).collect(),
        block: Vec::new(),
    };
    assert_eq!(Policy::intersect(&many(40), &ports).unwrap().allow.len(), 4000);
    assert_eq!(Policy::intersect(&many(41), &ports).unwrap_err().field(), Some("allow"));
}

fn any_host() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(vec![
            "a.com", "b.com", "x.a.com", "y.x.a.com", "*.a.com", "*.x.a.com", "*.com", "*a.com", "a*.com", "x*m", "*", "A.COM.",
            "10.0.0.5", "10.1.2.3", "[::1]", "[::ffff:10.0.0.5]", "[2001:db8::1]", "10.*", "*.5",
        ]).prop_map(str::to_owned),
        1 => "[abx*.]{1,7}",
    ]
}

fn any_rule() -> impl Strategy<Value = String> {
    let scheme = prop::sample::select(vec!["", "", "", "https://", "http://", "tcp://", "HTTPS://", "ws://"]);
    let port = prop::sample::select(vec!["", "", "", ":443", ":80", ":8443", ":"]);
    let tail = prop::sample::select(vec!["", "", "", "", "", "/", "/x", "/8", "?q"]);
    (scheme, any_host(), port, tail).prop_map(|(scheme, host, port, tail)| format!("{scheme}{host}{port}{tail}"))
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let rules = |range| prop::collection::vec(any_rule().prop_map(Rule::new), range);
    prop_oneof![
        3 => rules(0..3).prop_map(|allow| Policy { allow, block: Vec::new() }),
        1 => rules(0..3).prop_map(|block| Policy { allow: vec![Rule::any()], block }),
    ]
}

fn any_destination() -> impl Strategy<Value = Destination> {
    let host = prop_oneof![
        4 => prop::sample::select(vec![
            "a.com", "b.com", "x.a.com", "y.x.a.com", "z.y.x.a.com", "ba.com", "ab.com", "A.com.", "10.0.0.5", "10.1.2.3",
            "::1", "::ffff:10.0.0.5", "::ffff:10.1.2.3", "2001:db8:0::1", "1.2.3.5",
        ]).prop_map(str::to_owned),
        1 => "[abx.]{1,7}",
    ];
    let scheme = prop::sample::select(vec![Scheme::Http, Scheme::Https, Scheme::Tcp]);
    let port = prop::sample::select(vec![80_u16, 443, 8443]);
    (scheme, host, port).prop_map(|(scheme, host, port)| Destination::new(scheme, &host, port))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn an_intersection_never_permits_what_either_side_denies(
        task in any_policy(),
        base in any_policy(),
        destinations in prop::collection::vec(any_destination(), 12),
    ) {
        if let Ok(both) = Policy::intersect(&task, &base) {
            for destination in &destinations {
                if both.decide(destination).is_permitted() {
                    prop_assert!(task.decide(destination).is_permitted(), "task refuses {destination}: {both:?}");
                    prop_assert!(base.decide(destination).is_permitted(), "base refuses {destination}: {both:?}");
                }
            }
        }
    }

    #[test]
    fn any_text_parses_or_says_why(text in "\\PC{0,40}|[a-c:/@?#\\[\\].*0-9%-]{0,30}", other in any_rule()) {
        let (rule, other) = (Rule::new(text.clone()), Rule::new(other));
        prop_assert_eq!(rule.as_str(), text.as_str());
        let _ = (rule.check(RuleList::Allow), rule.check(RuleList::Block), rule.caution(), rule.relay());
        let _ = (rule.intersect(&other), other.intersect(&rule), format!("{rule:?}"), HostForm::parse(&text));
        let destination = Destination::new(Scheme::Https, &text, 443);
        let _ = (rule.matches(&destination), rule.covers(&destination), destination.to_string(), Routes::new([&text]));
        if rule.problem().is_none() && rule.host() != Some(&HostPattern::Empty) {
            let canonical = Rule::new(rule.canonical());
            prop_assert_eq!(canonical.problem(), None);
            prop_assert_eq!(canonical.canonical(), rule.canonical());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn two_rules_intersect_to_what_both_match(left in any_rule(), right in any_rule(), destination in any_destination()) {
        let (left, right) = (Rule::new(left), Rule::new(right));
        if let Ok(both) = left.intersect(&right) {
            let expected = left.matches(&destination) && right.matches(&destination);
            let found = both.as_ref().is_some_and(|both| both.matches(&destination));
            prop_assert_eq!(found, expected, "{} and {} made {:?}: {}", left, right, both, destination);
        }
    }

    #[test]
    fn intersecting_is_the_same_from_both_sides(left in any_rule(), right in any_rule()) {
        let (left, right) = (Rule::new(left), Rule::new(right));
        let canonical = |rule: Option<Rule>| rule.map(|rule| rule.canonical().into_owned());
        prop_assert_eq!(left.intersect(&right).map(canonical).ok(), right.intersect(&left).map(canonical).ok());
    }

    #[test]
    fn what_is_permitted_without_a_block_rule_may_only_shrink_with_it(
        policy in any_policy(), block in any_rule(), destination in any_destination(),
    ) {
        let mut stricter = policy.clone();
        stricter.block.push(Rule::new(block));
        prop_assert!(policy.decide(&destination).is_permitted() || !stricter.decide(&destination).is_permitted());
    }

    #[test]
    fn normalising_twice_is_normalising_once(policy in any_policy(), extra in prop::collection::vec(any_rule(), 0..2)) {
        let mut policy = policy;
        policy.block.extend(extra.into_iter().map(Rule::new));
        if let Ok(once) = policy.normalized() {
            prop_assert_eq!(once.normalized().unwrap(), once.clone());
            prop_assert!(once.is_equivalent(&policy));
        }
    }

    #[test]
    fn normalising_changes_no_decision(policy in any_policy(), destination in any_destination()) {
        if let Ok(normal) = policy.normalized() {
            prop_assert_eq!(normal.decide(&destination).is_permitted(), policy.decide(&destination).is_permitted());
        }
    }

    #[test]
    fn a_canonical_spelling_is_its_own_and_means_the_same(text in any_rule(), destination in any_destination()) {
        let rule = Rule::new(text);
        if rule.problem().is_none() && rule.host() != Some(&HostPattern::Empty) {
            let canonical = Rule::new(rule.canonical());
            prop_assert_eq!(canonical.canonical(), rule.canonical());
            prop_assert_eq!(canonical.matches(&destination), rule.matches(&destination), "{} {}", rule, canonical);
            prop_assert_eq!(canonical.covers(&destination), rule.covers(&destination), "{} {}", rule, canonical);
        }
    }

    #[test]
    fn the_rule_that_is_proposed_for_a_destination_admits_it(destination in any_destination()) {
        prop_assert!(destination.rule().is_none_or(|rule| rule.matches(&destination)));
    }
}
