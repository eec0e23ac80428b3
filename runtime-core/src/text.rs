//! Helpers for messages that people read: the nearest valid name, the end of a long output.

use std::borrow::Cow;

/// Longer names are not compared: nobody means one of ours with them, and comparing costs the product of the lengths.
const MAX_COMPARED: usize = 128;

/// The candidate that `name` is most likely a misspelling of, or `None` when none is near. Case, `-` and `_` do not
/// count as differences; on a tie the earlier candidate wins.
///
/// ```
/// use runtime_core::text::nearest;
///
/// assert_eq!(nearest("memroy", ["image", "memory", "workdir"]), Some("memory"));
/// assert_eq!(nearest("colour", ["image", "memory", "workdir"]), None);
/// ```
pub fn nearest<'a, I, S>(name: &str, candidates: I) -> Option<&'a str>
where
    I: IntoIterator<Item = &'a S>,
    S: AsRef<str> + ?Sized + 'a,
{
    if name.is_empty() || name.len() > MAX_COMPARED {
        return None;
    }
    let wanted = folded(name);
    let mut best: Option<(usize, &'a str)> = None;
    for candidate in candidates {
        let candidate = candidate.as_ref();
        if candidate.is_empty() || candidate.len() > MAX_COMPARED {
            continue;
        }
        let distance = strsim::damerau_levenshtein(&wanted, &folded(candidate));
        // One slip in a short word, one in three letters of a longer one.
        let allowed = (wanted.chars().count().max(candidate.chars().count()) / 3).max(1);
        // A single letter that differs from a single letter is not a misspelling of it.
        let shares_nothing = distance >= wanted.chars().count().max(candidate.chars().count());
        if distance <= allowed && !shares_nothing && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

fn folded(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
}

/// `; did you mean "memory"?` for the nearest candidate, or nothing: to be put behind an error message.
///
/// ```
/// use runtime_core::text::did_you_mean;
///
/// let message = format!("unknown field \"memroy\"{}", did_you_mean("memroy", ["memory"]));
/// assert_eq!(message, "unknown field \"memroy\"; did you mean \"memory\"?");
/// ```
pub fn did_you_mean<'a, I, S>(name: &str, candidates: I) -> String
where
    I: IntoIterator<Item = &'a S>,
    S: AsRef<str> + ?Sized + 'a,
{
    match nearest(name, candidates) {
        Some(candidate) => format!("; did you mean {candidate:?}?"),
        None => String::new(),
    }
}

/// The last `max_bytes` bytes of an output as text for an error message: trailing white space removed, a cut marked
/// by a leading `…`, never starting inside a character, invalid UTF-8 replaced.
///
/// ```
/// use runtime_core::text::tail;
///
/// assert_eq!(tail(b"short\n", 100), "short");
/// assert_eq!(tail(b"0123456789", 4), "\u{2026}6789");
/// ```
pub fn tail(bytes: &[u8], max_bytes: usize) -> Cow<'_, str> {
    let bytes = bytes.trim_ascii_end();
    if bytes.len() <= max_bytes {
        return String::from_utf8_lossy(bytes);
    }
    let mut kept = &bytes[bytes.len() - max_bytes..];
    // At most three bytes can be the rest of a character that was cut.
    for _ in 0..3 {
        match kept {
            [0x80..=0xbf, rest @ ..] => kept = rest,
            _ => break,
        }
    }
    Cow::Owned(format!("\u{2026}{}", String::from_utf8_lossy(kept)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: [&str; 6] = ["image", "workdir", "memory", "allow", "block", "network_allow"];

    #[test]
    fn a_slip_of_the_fingers_is_understood() {
        for (typed, meant) in [
            ("imgae", "image"),
            ("Image", "image"),
            ("workDir", "workdir"),
            ("work_dir", "workdir"),
            ("alow", "allow"),
            ("blocks", "block"),
            ("network-allow", "network_allow"),
            ("network_alow", "network_allow"),
        ] {
            assert_eq!(nearest(typed, FIELDS), Some(meant), "{typed}");
        }
    }

    #[test]
    fn a_different_word_gets_no_suggestion() {
        for typed in ["", "x", "gpu", "timeout", "colour", &"memory".repeat(100)] {
            assert_eq!(nearest(typed, FIELDS), None, "{typed}");
        }
        assert_eq!(nearest("a", ["b"]), None);
        assert_eq!(nearest("memory", Vec::<&'static str>::new()), None);
        assert_eq!(did_you_mean("gpu", FIELDS), "");
    }

    #[test]
    fn the_nearest_wins_and_the_first_of_equals() {
        assert_eq!(nearest("dockr", ["docks", "docker"]), Some("docks"));
        assert_eq!(nearest("docke", ["rocket", "docker"]), Some("docker"));
        let owned = vec!["podman".to_owned()];
        assert_eq!(nearest("podmam", &owned), Some("podman"));
    }

    #[test]
    fn a_tail_never_starts_inside_a_character() {
        let text = "aé€😀z";
        for max in 0..=text.len() {
            let shown = tail(text.as_bytes(), max);
            assert!(!shown.contains('\u{fffd}'), "{max}: {shown}");
            assert!(text.ends_with(shown.trim_start_matches('…')), "{max}: {shown}");
        }
        assert_eq!(tail(text.as_bytes(), 5), "…😀z");
        assert_eq!(tail(text.as_bytes(), 4), "…z");
    }

    #[test]
    fn a_tail_of_invalid_bytes_is_bounded_and_replaced() {
        assert_eq!(tail(&[0xff, b'a'], 9), "\u{fffd}a");
        assert_eq!(tail(&[0x80; 10], 5), "…\u{fffd}\u{fffd}");
        assert_eq!(tail(b"line\r\n \n", 9), "line");
        assert_eq!(tail(b"", 0), "");
    }
}
