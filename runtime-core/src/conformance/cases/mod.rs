//! The cases, a room for each part of the contract.

mod cancel;
mod deadlines;
mod env;
mod exec;
mod files;
mod lifecycle;
mod live;
mod network;
mod paths;
mod secrets;
mod servers;
mod streams;
mod trees;

use crate::conformance::case::Case;

/// Every case, in the order of the rooms.
pub fn cases() -> Vec<Case> {
    [
        exec::CASES,
        env::CASES,
        streams::CASES,
        deadlines::CASES,
        live::CASES,
        files::CASES,
        paths::CASES,
        trees::CASES,
        servers::CASES,
        network::CASES,
        lifecycle::CASES,
        cancel::CASES,
        secrets::CASES,
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_case_has_a_name_of_its_own_in_the_form_room_slash_behaviour() {
        let mut names = HashSet::new();
        for case in cases() {
            let Some((room, behaviour)) = case.name.split_once('/') else {
                panic!("{} names no room", case.name);
            };
            let plain = |part: &str| {
                !part.is_empty()
                    && part
                        .bytes()
                        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            };
            assert!(plain(room) && plain(behaviour), "{}", case.name);
            assert!(names.insert(case.name), "{} is there twice", case.name);
        }
    }
}
