//! [`Names`]: from request ids to small numbers.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

use crate::id::RequestId;

/// For keys that are hashes already.
#[derive(Debug, Default)]
pub(crate) struct Hashed(u64);

impl Hasher for Hashed {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(crate) type ByHash = BuildHasherDefault<Hashed>;

/// Numbers by name. The names themselves are kept by the user, who finds them by number.
///
/// Growing moves hashes, not names: nothing is hashed twice and no name is looked at again.
#[derive(Debug, Default)]
pub(crate) struct Names<S = RandomState> {
    hasher: S,
    by_hash: HashMap<u64, u32, ByHash>,
    /// Names whose hash is that of another name.
    others: HashMap<RequestId, u32>,
}

impl<S: BuildHasher> Names<S> {
    pub(crate) fn hash(&self, name: &RequestId) -> u64 {
        self.hasher.hash_one(name)
    }

    /// The first number with this hash, to be confirmed.
    pub(crate) fn likely(&self, hash: u64) -> Option<u32> {
        self.by_hash.get(&hash).copied()
    }

    /// The number of a name, whose hash gave `likely`.
    pub(crate) fn confirm<'a>(
        &self,
        likely: u32,
        name: &RequestId,
        name_of: impl Fn(u32) -> &'a RequestId,
    ) -> Option<u32> {
        if name_of(likely) == name {
            return Some(likely);
        }
        self.others.get(name).copied()
    }

    /// The number of a name, which is `next` if the name is new.
    pub(crate) fn get_or_insert<'a>(
        &mut self,
        name: &RequestId,
        next: u32,
        name_of: impl Fn(u32) -> &'a RequestId,
    ) -> u32 {
        let number = *self.by_hash.entry(self.hasher.hash_one(name)).or_insert(next);
        if number == next || name_of(number) == name {
            return number;
        }
        *self.others.entry(name.clone()).or_insert(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number_all<S: BuildHasher + Default>() {
        let mut names = Names::<S>::default();
        let mut known: Vec<RequestId> = Vec::new();
        for lap in 0..2 {
            for i in 0..100 {
                let name = RequestId::new(&format!("r{i}")).unwrap();
                let likely = names.likely(names.hash(&name));
                let before = likely.and_then(|likely| names.confirm(likely, &name, |number| &known[number as usize]));
                assert_eq!(before, (lap == 1).then_some(i));
                let next = known.len() as u32;
                let number = names.get_or_insert(&name, next, |number| &known[number as usize]);
                assert_eq!(number, i);
                if number == next {
                    known.push(name);
                }
            }
        }
    }

    #[test]
    fn every_name_has_a_number_of_its_own() {
        number_all::<RandomState>();
    }

    /// Gives two hashes in all.
    #[derive(Default)]
    struct Poor(u8);

    impl Hasher for Poor {
        fn write(&mut self, bytes: &[u8]) {
            self.0 ^= bytes.iter().fold(0, |sum, byte| sum ^ byte);
        }
        fn finish(&self) -> u64 {
            u64::from(self.0 & 1)
        }
    }

    #[test]
    fn names_with_equal_hashes_are_told_apart() {
        number_all::<BuildHasherDefault<Poor>>();
    }
}
