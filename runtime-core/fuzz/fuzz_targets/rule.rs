//! The rule parser and everything that takes a rule's text: no panic, and what the parser promises about its result.
#![no_main]

use libfuzzer_sys::fuzz_target;
use runtime_core::network::{Destination, HostForm, HostPattern, Policy, Routes, Rule, RuleList, Scheme};

fuzz_target!(|text: &str| {
    // Two rules and a host: the intersection is what most of the code is about.
    let mut parts = text.splitn(3, '\n');
    let mut next = || parts.next().unwrap_or_default();
    let (left, right, host) = (Rule::new(next()), Rule::new(next()), next());
    let _ = (HostForm::parse(host), Routes::new([host]));

    for rule in [&left, &right] {
        let _ = (rule.caution(), rule.relay(), format!("{rule:?}"));
        let valid = [RuleList::Allow, RuleList::Block].map(|list| rule.check(list).is_ok());
        assert!(!(valid[0] || valid[1]) || rule.problem().is_none(), "valid but no rule");
        if rule.problem().is_none() && rule.host() != Some(&HostPattern::Empty) {
            let canonical = Rule::new(rule.canonical());
            assert_eq!(canonical.problem(), None, "a canonical spelling is a rule");
            assert_eq!(
                canonical.canonical(),
                rule.canonical(),
                "and its own canonical spelling"
            );
        }
    }

    let both = left.intersect(&right);
    let policy = Policy {
        allow: vec![left.clone()],
        block: vec![right.clone()],
    };
    for (scheme, port) in [(Scheme::Https, 443), (Scheme::Http, 80), (Scheme::Tcp, 5432)] {
        let destination = Destination::new(scheme, host, port);
        let _ = (destination.to_string(), policy.decide(&destination).to_string());
        if let Ok(both) = &both {
            let admitted = both.as_ref().is_some_and(|rule| rule.matches(&destination));
            assert_eq!(admitted, left.matches(&destination) && right.matches(&destination));
        }
        if let Some(rule) = destination.rule() {
            assert!(rule.matches(&destination), "the proposed rule admits its destination");
        }
        assert!(
            !left.matches(&destination) || left.covers(&destination),
            "a block is never narrower than an allow"
        );
    }
});
