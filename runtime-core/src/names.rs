//! Names of sandboxes and of what belongs to them: random ones, and the rule for those that callers choose.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use crate::error::{Error, Result};

/// Bytes in the longest name that every provider takes: a DNS label, and a container label's value.
pub const MAX_SANDBOX_NAME: usize = 63;

/// A sandbox's name when the caller chose none: `vf-` and 12 hex digits.
pub fn random_sandbox_name() -> String {
    format!("vf-{}", random_hex(12))
}

/// A name for an object that shares a namespace with everybody on a machine, such as a container: `vf-` and 32 hex
/// digits. Never derived from a caller's name, so that deleting by it cannot hit somebody else's object.
pub fn random_object_name() -> String {
    format!("vf-{}", random_id())
}

/// 32 lowercase hex digits, unique for all practical purposes.
pub fn random_id() -> String {
    random_hex(32)
}

/// `digits` random lowercase hex digits.
pub fn random_hex(digits: usize) -> String {
    let mut bytes = vec![0; digits.div_ceil(2)];
    fill_random(&mut bytes);
    let mut text = hex(&bytes);
    text.truncate(digits);
    text
}

/// 64 random bits, such as a seed.
pub(crate) fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    fill_random(&mut bytes);
    u64::from_ne_bytes(bytes)
}

/// Bytes as lowercase hex digits.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 15)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect()
}

fn fill_random(bytes: &mut [u8]) {
    if getrandom::fill(bytes).is_err() {
        fill_unique(bytes);
    }
}

/// For a machine whose random source is unreadable (no `/dev`, a seccomp filter). Names must be unique, not secret, so
/// that is no reason to fail: the process, the time, a counter and the hasher's keys are mixed instead.
fn fill_unique(bytes: &mut [u8]) {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    for chunk in bytes.chunks_mut(8) {
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        hasher.write_u64(CALLS.fetch_add(1, Ordering::Relaxed));
        if let Ok(time) = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH) {
            hasher.write_u128(time.as_nanos());
        }
        chunk.copy_from_slice(&hasher.finish().to_ne_bytes()[..chunk.len()]);
    }
}

/// Checks a sandbox name that a caller chose. Every provider takes what passes: 1 to [`MAX_SANDBOX_NAME`] bytes of
/// ASCII letters, digits, `.`, `_` and `-`, the first a letter or digit. It is safe as a file name, too.
///
/// ```
/// use runtime_core::names::validate_sandbox_name;
///
/// validate_sandbox_name("task-7.attempt_2").unwrap();
/// assert_eq!(validate_sandbox_name("../etc").unwrap_err().field(), Some("name"));
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) naming the field `name`.
pub fn validate_sandbox_name(name: &str) -> Result<()> {
    let refuse = |message: String| Err(Error::invalid_argument("name", message));
    if name.is_empty() {
        return refuse("a sandbox's name must not be empty".into());
    }
    if name.len() > MAX_SANDBOX_NAME {
        return refuse(format!(
            "a sandbox's name has at most {MAX_SANDBOX_NAME} bytes, not {}",
            name.len()
        ));
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if let Some(wrong) = name.chars().find(|c| !allowed(*c)) {
        return refuse(format!(
            "a sandbox's name has letters, digits, '.', '_' and '-' only, not {wrong:?}"
        ));
    }
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return refuse(format!(
            "a sandbox's name starts with a letter or digit, unlike {name:?}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::ErrorKind;

    fn is_hex(text: &str) -> bool {
        text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    }

    #[test]
    fn random_names_have_their_documented_shape() {
        let name = random_sandbox_name();
        assert_eq!(name.len(), 15);
        assert!(name.strip_prefix("vf-").is_some_and(is_hex), "{name}");
        let name = random_object_name();
        assert_eq!(name.len(), 35);
        assert!(name.strip_prefix("vf-").is_some_and(is_hex), "{name}");
        for digits in [0, 1, 7, 12, 33] {
            let text = random_hex(digits);
            assert!(text.len() == digits && is_hex(&text), "{text}");
        }
    }

    #[test]
    fn our_own_names_pass_our_own_rule() {
        validate_sandbox_name(&random_sandbox_name()).unwrap();
        validate_sandbox_name(&random_object_name()).unwrap();
        validate_sandbox_name(&random_id()).unwrap();
        validate_sandbox_name(&"a".repeat(MAX_SANDBOX_NAME)).unwrap();
        validate_sandbox_name("debug-12-0a1b2c3d").unwrap();
    }

    #[test]
    fn names_do_not_repeat_with_or_without_a_random_source() {
        let names: HashSet<String> = (0..10_000).map(|_| random_sandbox_name()).collect();
        assert_eq!(names.len(), 10_000);
        let fallback: HashSet<[u8; 8]> = (0..10_000)
            .map(|_| {
                let mut bytes = [0; 8];
                fill_unique(&mut bytes);
                bytes
            })
            .collect();
        assert_eq!(fallback.len(), 10_000);
    }

    #[test]
    fn a_name_that_some_provider_would_refuse_names_the_field() {
        let long = "a".repeat(MAX_SANDBOX_NAME + 1);
        for name in [
            "", ".", "..", "-x", "_x", ".x", "a/b", "a b", "a\nb", "a\0b", "ä", "a:b", "../a", &long,
        ] {
            let error = validate_sandbox_name(name).expect_err(name);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name:?}");
            assert_eq!(error.field(), Some("name"), "{name:?}");
        }
    }

    #[test]
    fn hex_digits_come_in_the_order_of_the_bytes() {
        assert_eq!(hex(&[0x00, 0x1f, 0xab, 0xff]), "001fabff");
    }
}
