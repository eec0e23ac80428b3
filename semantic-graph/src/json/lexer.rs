//! Tokens of JSON text, and [`parse_value`], which needs no recursion.

use std::collections::HashMap;

use super::{Error, JsonString, MAX_DEPTH, Object, Value};
use crate::code::Code;

/// Longest integer literal, in digits; the reference's reader refuses longer ones.
const MAX_INT_DIGITS: usize = 4300;

/// A string token.
pub(super) enum Text<'a, 's> {
    /// Without escapes: a piece of the input.
    Plain(&'a str),
    /// With escapes, in generalised UTF-8.
    Unescaped(&'s [u8]),
}

/// A number token.
#[derive(Clone, Copy)]
pub(super) struct Number<'a> {
    pub(super) text: &'a str,
    pub(super) is_float: bool,
}

impl Number<'_> {
    pub(super) fn to_f64(self) -> f64 {
        match self.text {
            "Infinity" => f64::INFINITY,
            "-Infinity" => f64::NEG_INFINITY,
            // Rust reads "NaN" itself, and overflow as infinity, as Python does.
            text => text.parse().unwrap_or(f64::NAN),
        }
    }

    pub(super) fn to_value(self) -> Value {
        if self.is_float {
            Value::Float(self.to_f64())
        } else if let Ok(number) = self.text.parse::<i64>() {
            Value::Int(number)
        } else {
            Value::BigInt(self.text.into())
        }
    }
}

pub(super) struct Lexer<'a> {
    text: &'a str,
    pub(super) pos: usize,
}

/// Whether any byte of the word is a quote, a backslash or below U+0020.
fn has_special(word: u64) -> bool {
    const LOW: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    let zero = |x: u64| x.wrapping_sub(LOW) & !x;
    let quote = zero(word ^ (LOW * u64::from(b'"')));
    let slash = zero(word ^ (LOW * u64::from(b'\\')));
    let control = word.wrapping_sub(LOW * 0x20) & !word;
    (quote | slash | control) & HIGH != 0
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, pos: 0 }
    }

    pub(super) fn text(&self) -> &'a str {
        self.text
    }

    fn bytes(&self) -> &'a [u8] {
        self.text.as_bytes()
    }

    #[inline]
    pub(super) fn byte(&self) -> Option<u8> {
        self.bytes().get(self.pos).copied()
    }

    #[inline]
    pub(super) fn peek(&mut self) -> Option<u8> {
        loop {
            match self.byte() {
                Some(b' ' | b'\n' | b'\t' | b'\r') => self.pos += 1,
                other => return other,
            }
        }
    }

    pub(super) fn error(&self, detail: &str) -> Error {
        Error::new(Code::InvalidJson, detail).at_offset(self.pos)
    }

    pub(super) fn too_deep(&self) -> Error {
        Error::new(Code::TooDeep, format!("more than {MAX_DEPTH} levels")).at_offset(self.pos)
    }

    pub(super) fn expect(&mut self, byte: u8) -> Result<(), Error> {
        if self.peek() == Some(byte) {
            self.pos += 1;
            Ok(())
        } else {
            Err(self.error(&format!("expected `{}`", byte as char)))
        }
    }

    pub(super) fn literal(&mut self, word: &str) -> Result<(), Error> {
        if self.bytes()[self.pos..].starts_with(word.as_bytes()) {
            self.pos += word.len();
            Ok(())
        } else {
            Err(self.error("not a JSON value"))
        }
    }

    /// Only white space may follow.
    pub(super) fn end(&mut self) -> Result<(), Error> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.error("text after the value")),
        }
    }

    /// Moves to the first byte from here on that ends a run of plain string text.
    #[inline]
    fn skip_plain(&mut self) {
        let bytes = self.bytes();
        while let Some(chunk) = bytes.get(self.pos..self.pos + 8) {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            if has_special(u64::from_le_bytes(word)) {
                break;
            }
            self.pos += 8;
        }
        while let Some(&byte) = bytes.get(self.pos) {
            if byte == b'"' || byte == b'\\' || byte < 0x20 {
                break;
            }
            self.pos += 1;
        }
    }

    /// Reads a string whose opening quote is the next byte.
    pub(super) fn string<'s>(&mut self, scratch: &'s mut Vec<u8>) -> Result<Text<'a, 's>, Error> {
        self.pos += 1;
        let start = self.pos;
        self.skip_plain();
        if self.byte() == Some(b'"') {
            let text = &self.text[start..self.pos];
            self.pos += 1;
            return Ok(Text::Plain(text));
        }
        scratch.clear();
        scratch.extend_from_slice(&self.bytes()[start..self.pos]);
        loop {
            match self.byte() {
                Some(b'"') => {
                    self.pos += 1;
                    return Ok(Text::Unescaped(scratch));
                }
                Some(b'\\') => {
                    self.pos += 1;
                    self.escape(scratch)?;
                }
                Some(_) => return Err(self.error("control character in a string")),
                None => return Err(self.error("string without end")),
            }
            let from = self.pos;
            self.skip_plain();
            scratch.extend_from_slice(&self.bytes()[from..self.pos]);
        }
    }

    fn escape(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        let byte = self.byte().ok_or_else(|| self.error("string without end"))?;
        self.pos += 1;
        out.push(match byte {
            b'"' | b'\\' | b'/' => byte,
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                let mut code = self.hex4()?;
                if (0xd800..0xdc00).contains(&code) && self.bytes()[self.pos..].starts_with(b"\\u") {
                    let back = self.pos;
                    self.pos += 2;
                    let low = self.hex4()?;
                    if (0xdc00..0xe000).contains(&low) {
                        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                    } else {
                        self.pos = back;
                    }
                }
                push_code_point(out, code);
                return Ok(());
            }
            _ => {
                self.pos -= 1;
                return Err(self.error("unknown escape"));
            }
        });
        Ok(())
    }

    fn hex4(&mut self) -> Result<u32, Error> {
        let digits = self
            .bytes()
            .get(self.pos..self.pos + 4)
            .ok_or_else(|| self.error("\\u needs four hex digits"))?;
        let mut code = 0;
        for &digit in digits {
            let value = (digit as char)
                .to_digit(16)
                .ok_or_else(|| self.error("\\u needs four hex digits"))?;
            code = code * 16 + value;
        }
        self.pos += 4;
        Ok(code)
    }

    /// Reads a number, or one of the literals `NaN`, `Infinity`, `-Infinity`.
    pub(super) fn number(&mut self) -> Result<Number<'a>, Error> {
        let bytes = self.bytes();
        let start = self.pos;
        let digits = |mut at: usize| {
            while bytes.get(at).is_some_and(u8::is_ascii_digit) {
                at += 1;
            }
            at
        };
        let special = |lexer: &mut Self, word: &str| {
            lexer.literal(word)?;
            Ok(Number {
                text: &lexer.text[start..lexer.pos],
                is_float: true,
            })
        };
        match bytes.get(start) {
            Some(b'N') => return special(self, "NaN"),
            Some(b'I') => return special(self, "Infinity"),
            _ => {}
        }
        let mut at = start + usize::from(bytes.get(start) == Some(&b'-'));
        let int_start = at;
        match bytes.get(at) {
            Some(b'0') => at += 1,
            Some(b'1'..=b'9') => at = digits(at),
            Some(b'I') => return special(self, "-Infinity"),
            _ => return Err(self.error("not a JSON value")),
        }
        let int_end = at;
        let mut is_float = false;
        if bytes.get(at) == Some(&b'.') {
            let end = digits(at + 1);
            if end == at + 1 {
                self.pos = end;
                return Err(self.error("a fraction needs a digit"));
            }
            at = end;
            is_float = true;
        }
        if matches!(bytes.get(at), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
            let end = digits(at + 1 + sign);
            if end == at + 1 + sign {
                self.pos = end;
                return Err(self.error("an exponent needs a digit"));
            }
            at = end;
            is_float = true;
        }
        if !is_float && int_end - int_start > MAX_INT_DIGITS {
            return Err(self.error("an integer of more than 4300 digits"));
        }
        self.pos = at;
        Ok(Number {
            text: &self.text[start..at],
            is_float,
        })
    }

    /// Passes over one value and checks it; no recursion.
    pub(super) fn skip_value(&mut self, scratch: &mut Vec<u8>, depth: usize) -> Result<(), Error> {
        // One entry per open container: whether it is an object.
        let mut open: Vec<bool> = Vec::new();
        loop {
            match self.peek() {
                Some(b @ (b'[' | b'{')) => {
                    self.pos += 1;
                    if depth + open.len() >= MAX_DEPTH {
                        return Err(self.too_deep());
                    }
                    let object = b == b'{';
                    if self.peek() == Some(if object { b'}' } else { b']' }) {
                        self.pos += 1;
                    } else {
                        open.push(object);
                        if object {
                            self.skip_key(scratch)?;
                        }
                        continue;
                    }
                }
                Some(b'"') => {
                    self.string(scratch)?;
                }
                Some(b't') => self.literal("true")?,
                Some(b'f') => self.literal("false")?,
                Some(b'n') => self.literal("null")?,
                Some(_) => {
                    self.number()?;
                }
                None => return Err(self.error("value expected")),
            }
            loop {
                let Some(&object) = open.last() else {
                    return Ok(());
                };
                match self.peek() {
                    Some(b',') => {
                        self.pos += 1;
                        if object {
                            self.skip_key(scratch)?;
                        }
                        break;
                    }
                    Some(b'}') if object => self.pos += 1,
                    Some(b']') if !object => self.pos += 1,
                    _ => return Err(self.error("expected `,` or the end of the container")),
                }
                open.pop();
            }
        }
    }

    fn skip_key(&mut self, scratch: &mut Vec<u8>) -> Result<(), Error> {
        if self.peek() != Some(b'"') {
            return Err(self.error("expected a key"));
        }
        self.string(scratch)?;
        self.expect(b':')
    }
}

/// Appends a code point, surrogates included, in generalised UTF-8.
fn push_code_point(out: &mut Vec<u8>, code: u32) {
    match char::from_u32(code) {
        Some(c) => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        None => out.extend_from_slice(&[
            0xe0 | (code >> 12) as u8,
            0x80 | (code >> 6 & 0x3f) as u8,
            0x80 | (code & 0x3f) as u8,
        ]),
    }
}

/// Keeps each key at its first position with its last value.
pub(super) fn last_of_each_key(members: Object) -> Object {
    let repeated = if members.len() <= 8 {
        (1..members.len()).any(|i| members[..i].iter().any(|(key, _)| *key == members[i].0))
    } else {
        let mut seen = std::collections::HashSet::with_capacity(members.len());
        !members.iter().all(|(key, _)| seen.insert(key))
    };
    if !repeated {
        return members;
    }
    let mut place: HashMap<JsonString, usize> = HashMap::with_capacity(members.len());
    let mut kept: Object = Vec::with_capacity(members.len());
    for (key, value) in members {
        match place.get(&key) {
            Some(&at) => kept[at].1 = value,
            None => {
                place.insert(key.clone(), kept.len());
                kept.push((key, value));
            }
        }
    }
    kept
}

enum Open {
    Array(Vec<Value>),
    Object(Object, JsonString),
}

/// Parses one JSON text.
///
/// # Errors
/// [`Code::InvalidJson`], or [`Code::TooDeep`] past [`MAX_DEPTH`] levels; with the byte offset.
pub(crate) fn parse_value(text: &str) -> Result<Value, Error> {
    let mut lexer = Lexer::new(text);
    let mut scratch = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    loop {
        let mut value = match lexer.peek() {
            Some(b'[') => {
                lexer.pos += 1;
                if open.len() >= MAX_DEPTH {
                    return Err(lexer.too_deep());
                }
                if lexer.peek() == Some(b']') {
                    lexer.pos += 1;
                    Value::Array(Vec::new())
                } else {
                    open.push(Open::Array(Vec::new()));
                    continue;
                }
            }
            Some(b'{') => {
                lexer.pos += 1;
                if open.len() >= MAX_DEPTH {
                    return Err(lexer.too_deep());
                }
                if lexer.peek() == Some(b'}') {
                    lexer.pos += 1;
                    Value::Object(Vec::new())
                } else {
                    let key = read_key(&mut lexer, &mut scratch)?;
                    open.push(Open::Object(Vec::new(), key));
                    continue;
                }
            }
            Some(b'"') => Value::String(read_string(&mut lexer, &mut scratch)?),
            Some(b't') => lexer.literal("true").map(|()| Value::Bool(true))?,
            Some(b'f') => lexer.literal("false").map(|()| Value::Bool(false))?,
            Some(b'n') => lexer.literal("null").map(|()| Value::Null)?,
            Some(_) => lexer.number()?.to_value(),
            None => return Err(lexer.error("value expected")),
        };
        loop {
            match open.pop() {
                None => {
                    lexer.end()?;
                    return Ok(value);
                }
                Some(Open::Array(mut items)) => {
                    items.push(value);
                    match lexer.peek() {
                        Some(b',') => {
                            lexer.pos += 1;
                            open.push(Open::Array(items));
                            break;
                        }
                        Some(b']') => {
                            lexer.pos += 1;
                            value = Value::Array(items);
                        }
                        _ => return Err(lexer.error("expected `,` or `]`")),
                    }
                }
                Some(Open::Object(mut members, key)) => {
                    members.push((key, value));
                    match lexer.peek() {
                        Some(b',') => {
                            lexer.pos += 1;
                            let key = read_key(&mut lexer, &mut scratch)?;
                            open.push(Open::Object(members, key));
                            break;
                        }
                        Some(b'}') => {
                            lexer.pos += 1;
                            value = Value::Object(last_of_each_key(members));
                        }
                        _ => return Err(lexer.error("expected `,` or `}`")),
                    }
                }
            }
        }
    }
}

fn read_string(lexer: &mut Lexer<'_>, scratch: &mut Vec<u8>) -> Result<JsonString, Error> {
    Ok(match lexer.string(scratch)? {
        Text::Plain(text) => text.into(),
        Text::Unescaped(bytes) => JsonString::from_wtf8(bytes),
    })
}

fn read_key(lexer: &mut Lexer<'_>, scratch: &mut Vec<u8>) -> Result<JsonString, Error> {
    if lexer.peek() != Some(b'"') {
        return Err(lexer.error("expected a key"));
    }
    let key = read_string(lexer, scratch)?;
    lexer.expect(b':')?;
    Ok(key)
}
