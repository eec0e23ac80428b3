//! JSON text: escapes, numbers, and [`Style`].

use super::Value;

/// What becomes of a number that JSON has no spelling for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NonFinite {
    /// `null`, as records have it.
    Null,
    /// `NaN`, `Infinity`, `-Infinity`: what Python's `json` writes.
    Literal,
    /// Infinities as `1e999` and `-1e999`, which every reader takes for infinity; NaN as `null`.
    Overflow,
}

/// How JSON text is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Between items and members.
    pub item_separator: &'static str,
    /// Between a key and its value.
    pub key_separator: &'static str,
    /// Members in code point order of their keys rather than in their own.
    pub sort_keys: bool,
    /// Everything outside `0x20..=0x7e` as an escape.
    pub ascii: bool,
    /// Numbers that are not finite.
    pub non_finite: NonFinite,
}

impl Style {
    /// Compact text as in records.
    pub const RECORD: Style = Style {
        item_separator: ",",
        key_separator: ":",
        sort_keys: false,
        ascii: false,
        non_finite: NonFinite::Null,
    };
    /// Compact text that loses no number.
    pub const LOSSLESS: Style = Style {
        non_finite: NonFinite::Overflow,
        ..Style::RECORD
    };
    /// Sorted and without blanks: the form of tool arguments and tool lists that is hashed.
    pub const CANONICAL: Style = Style {
        item_separator: ",",
        key_separator: ":",
        sort_keys: true,
        ascii: true,
        non_finite: NonFinite::Literal,
    };
    /// Sorted with blanks: the form of provider state that is hashed.
    pub const CANONICAL_SPACED: Style = Style {
        item_separator: ", ",
        key_separator: ": ",
        ..Style::CANONICAL
    };
}

/// The shortest digits that give `number` back, laid out as Python does.
///
/// Fixed notation while the decimal exponent is within -4 to 15, with `.0` if integral; else
/// scientific with a sign and two or more exponent digits. NaN and the infinities have Python's
/// JSON names.
#[must_use]
pub fn python_float(number: f64) -> String {
    let mut out = Vec::new();
    write_float(&mut out, number, NonFinite::Literal);
    String::from_utf8(out).unwrap_or_default()
}

pub(super) fn write_float(out: &mut Vec<u8>, number: f64, non_finite: NonFinite) {
    if !number.is_finite() {
        let text: &str = match (non_finite, number.is_nan(), number > 0.0) {
            (NonFinite::Literal, true, _) => "NaN",
            (NonFinite::Literal, false, true) => "Infinity",
            (NonFinite::Literal, false, false) => "-Infinity",
            (NonFinite::Overflow, false, true) => "1e999",
            (NonFinite::Overflow, false, false) => "-1e999",
            (NonFinite::Null, _, _) | (NonFinite::Overflow, true, _) => "null",
        };
        out.extend_from_slice(text.as_bytes());
        return;
    }
    // `{:e}` gives the shortest digits: `d[.ddd]e[-]x`.
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", mantissa),
    };
    let (first, rest) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    out.extend_from_slice(sign.as_bytes());
    if (-4..16).contains(&exponent) {
        if exponent < 0 {
            out.extend_from_slice(b"0.");
            out.extend(std::iter::repeat_n(b'0', (-exponent - 1) as usize));
            out.extend_from_slice(first.as_bytes());
            out.extend_from_slice(rest.as_bytes());
        } else {
            let whole = exponent as usize;
            out.extend_from_slice(first.as_bytes());
            if rest.len() > whole {
                out.extend_from_slice(&rest.as_bytes()[..whole]);
                out.push(b'.');
                out.extend_from_slice(&rest.as_bytes()[whole..]);
            } else {
                out.extend_from_slice(rest.as_bytes());
                out.extend(std::iter::repeat_n(b'0', whole - rest.len()));
                out.extend_from_slice(b".0");
            }
        }
    } else {
        out.extend_from_slice(first.as_bytes());
        if !rest.is_empty() {
            out.push(b'.');
            out.extend_from_slice(rest.as_bytes());
        }
        let text = format!(
            "e{}{:02}",
            if exponent < 0 { '-' } else { '+' },
            exponent.unsigned_abs()
        );
        out.extend_from_slice(text.as_bytes());
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

fn push_u16(out: &mut Vec<u8>, unit: u32) {
    out.extend_from_slice(b"\\u");
    for shift in [12, 8, 4, 0] {
        out.push(HEX[(unit >> shift & 0xf) as usize]);
    }
}

/// Writes generalised UTF-8 as a JSON string with its quotes.
pub(super) fn write_string(out: &mut Vec<u8>, bytes: &[u8], ascii: bool) {
    out.push(b'"');
    let mut from = 0;
    let mut at = 0;
    while at < bytes.len() {
        let byte = bytes[at];
        let plain = byte >= 0x20 && byte != b'"' && byte != b'\\' && if ascii { byte < 0x7f } else { byte != 0xed };
        if plain {
            at += 1;
            continue;
        }
        let (code, len) = decode(&bytes[at..]);
        if !ascii && !(0xd800..0xe000).contains(&code) && byte >= 0x20 && byte == 0xed {
            at += len;
            continue;
        }
        out.extend_from_slice(&bytes[from..at]);
        match code {
            0x22 => out.extend_from_slice(b"\\\""),
            0x5c => out.extend_from_slice(b"\\\\"),
            0x0a => out.extend_from_slice(b"\\n"),
            0x0d => out.extend_from_slice(b"\\r"),
            0x09 => out.extend_from_slice(b"\\t"),
            0x0c => out.extend_from_slice(b"\\f"),
            0x08 => out.extend_from_slice(b"\\b"),
            0x10000.. => {
                push_u16(out, 0xd800 + ((code - 0x10000) >> 10));
                push_u16(out, 0xdc00 + ((code - 0x10000) & 0x3ff));
            }
            _ => push_u16(out, code),
        }
        at += len;
        from = at;
    }
    out.extend_from_slice(&bytes[from..]);
    out.push(b'"');
}

/// The first code point of generalised UTF-8, and its length.
fn decode(bytes: &[u8]) -> (u32, usize) {
    let cont = |i: usize| u32::from(bytes.get(i).copied().unwrap_or(0)) & 0x3f;
    let first = u32::from(bytes[0]);
    match first {
        0..0x80 => (first, 1),
        0x80..0xe0 => ((first & 0x1f) << 6 | cont(1), 2),
        0xe0..0xf0 => ((first & 0xf) << 12 | cont(1) << 6 | cont(2), 3),
        _ => ((first & 7) << 18 | cont(1) << 12 | cont(2) << 6 | cont(3), 4),
    }
}

/// Writes one value. Recursion is as deep as the value, which the parser bounds.
pub(crate) fn write_value(out: &mut Vec<u8>, value: &Value, style: Style) {
    match value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Bool(true) => out.extend_from_slice(b"true"),
        Value::Bool(false) => out.extend_from_slice(b"false"),
        Value::Int(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::BigInt(digits) => out.extend_from_slice(digits.as_bytes()),
        Value::Float(number) => write_float(out, *number, style.non_finite),
        Value::String(text) => write_string(out, text.as_bytes(), style.ascii),
        Value::Array(items) => {
            out.push(b'[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.extend_from_slice(style.item_separator.as_bytes());
                }
                write_value(out, item, style);
            }
            out.push(b']');
        }
        Value::Object(members) => {
            out.push(b'{');
            let mut write = |i: usize, (key, value): &(super::JsonString, Value)| {
                if i > 0 {
                    out.extend_from_slice(style.item_separator.as_bytes());
                }
                write_string(out, key.as_bytes(), style.ascii);
                out.extend_from_slice(style.key_separator.as_bytes());
                write_value(out, value, style);
            };
            if style.sort_keys {
                let mut sorted: Vec<_> = members.iter().collect();
                sorted.sort_by(|a, b| a.0.cmp(&b.0));
                for (i, member) in sorted.into_iter().enumerate() {
                    write(i, member);
                }
            } else {
                for (i, member) in members.iter().enumerate() {
                    write(i, member);
                }
            }
            out.push(b'}');
        }
    }
}
