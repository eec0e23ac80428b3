//! The serde reader: [`from_str`], [`from_slice`], [`from_value`].

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::lexer::{Lexer, Number, Text};
use super::{Error, JsonString, MAX_DEPTH, RAW_TOKEN, Segment, Value};
use crate::code::Code;

/// Reads one value from JSON text.
///
/// # Errors
/// [`Error`] with the code, the path into the value and the byte offset.
pub fn from_str<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Error> {
    let mut reader = Reader::new(text);
    let value = T::deserialize(&mut reader).map_err(|error| error.at_offset(reader.offset()))?;
    reader.end()?;
    Ok(value)
}

/// Reads one value from JSON bytes.
///
/// # Errors
/// As [`from_str`]; bytes that are not UTF-8 are [`Code::InvalidText`].
pub fn from_slice<'de, T: Deserialize<'de>>(bytes: &'de [u8]) -> Result<T, Error> {
    let text = std::str::from_utf8(bytes)
        .map_err(|error| Error::new(Code::InvalidText, "the text is not UTF-8").at_offset(error.valid_up_to()))?;
    from_str(text)
}

/// Reads a typed value from a [`Value`].
///
/// # Errors
/// [`Error`] with the code and the path into the value.
pub fn from_value<'de, T: Deserialize<'de>>(value: &'de Value) -> Result<T, Error> {
    T::deserialize(value)
}

/// A serde deserializer over JSON text.
pub(crate) struct Reader<'de> {
    lexer: Lexer<'de>,
    scratch: Vec<u8>,
    depth: usize,
}

impl<'de> Reader<'de> {
    pub(crate) fn new(text: &'de str) -> Self {
        Self {
            lexer: Lexer::new(text),
            scratch: Vec::new(),
            depth: 0,
        }
    }

    pub(crate) fn offset(&self) -> usize {
        self.lexer.pos
    }

    pub(crate) fn peek(&mut self) -> Option<u8> {
        self.lexer.peek()
    }

    pub(crate) fn expect(&mut self, byte: u8) -> Result<(), Error> {
        self.lexer.expect(byte)
    }

    /// Only white space may follow.
    pub(crate) fn end(&mut self) -> Result<(), Error> {
        self.lexer.end()
    }

    fn enter(&mut self) -> Result<(), Error> {
        self.lexer.pos += 1;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.lexer.too_deep());
        }
        Ok(())
    }

    fn number<V: Visitor<'de>>(&mut self, visitor: V) -> Result<V::Value, Error> {
        visit_number(self.lexer.number()?, visitor)
    }

    fn string<V: Visitor<'de>>(&mut self, visitor: V) -> Result<V::Value, Error> {
        match self.lexer.string(&mut self.scratch)? {
            Text::Plain(text) => visitor.visit_borrowed_str(text),
            Text::Unescaped(bytes) => visitor.visit_str(real_text(bytes)?),
        }
    }
}

fn real_text(bytes: &[u8]) -> Result<&str, Error> {
    std::str::from_utf8(bytes).map_err(|_| Error::new(Code::InvalidText, "a lone surrogate is not text"))
}

fn visit_number<'de, V: Visitor<'de>>(number: Number<'_>, visitor: V) -> Result<V::Value, Error> {
    if number.is_float {
        visitor.visit_f64(number.to_f64())
    } else if let Ok(value) = number.text.parse::<u64>() {
        visitor.visit_u64(value)
    } else if let Ok(value) = number.text.parse::<i64>() {
        visitor.visit_i64(value)
    } else if let Ok(value) = number.text.parse::<i128>() {
        visitor.visit_i128(value)
    } else {
        Err(Error::new(Code::WrongType, "the integer needs more than 128 bits"))
    }
}

impl<'de> Deserializer<'de> for &mut Reader<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.lexer.peek() {
            Some(b'{') => {
                self.enter()?;
                let value = visitor.visit_map(Container {
                    reader: self,
                    first: true,
                    count: 0,
                    key: (0, 0),
                })?;
                self.depth -= 1;
                self.lexer.expect(b'}')?;
                Ok(value)
            }
            Some(b'[') => {
                self.enter()?;
                let value = visitor.visit_seq(Container {
                    reader: self,
                    first: true,
                    count: 0,
                    key: (0, 0),
                })?;
                self.depth -= 1;
                self.lexer.expect(b']')?;
                Ok(value)
            }
            Some(b'"') => self.string(visitor),
            Some(b't') => {
                self.lexer.literal("true")?;
                visitor.visit_bool(true)
            }
            Some(b'f') => {
                self.lexer.literal("false")?;
                visitor.visit_bool(false)
            }
            Some(b'n') => {
                self.lexer.literal("null")?;
                visitor.visit_unit()
            }
            Some(_) => self.number(visitor),
            None => Err(self.lexer.error("value expected")),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.lexer.peek() == Some(b'n') {
            self.lexer.literal("null")?;
            visitor.visit_none()
        } else {
            visitor.visit_some(self)
        }
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.lexer.peek() {
            Some(b'-' | b'0'..=b'9' | b'N' | b'I') => {
                let number = self.lexer.number()?;
                visitor.visit_f64(number.to_f64())
            }
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Error> {
        if name == RAW_TOKEN {
            self.lexer.peek();
            let start = self.lexer.pos;
            self.lexer.skip_value(&mut self.scratch, self.depth)?;
            let raw = &self.lexer.text()[start..self.lexer.pos];
            return visitor.visit_borrowed_bytes(raw.as_bytes());
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.lexer.skip_value(&mut self.scratch, self.depth)?;
        visitor.visit_unit()
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.lexer.peek() {
            Some(b'"') => match self.lexer.string(&mut self.scratch)? {
                Text::Plain(text) => visitor.visit_enum(text.into_deserializer()),
                Text::Unescaped(bytes) => visitor.visit_enum(real_text(bytes)?.to_owned().into_deserializer()),
            },
            Some(b'{') => {
                self.enter()?;
                let value = visitor.visit_enum(Variant { reader: self })?;
                self.depth -= 1;
                self.lexer.expect(b'}')?;
                Ok(value)
            }
            _ => Err(Error::new(Code::WrongType, "expected a name").at_offset(self.lexer.pos)),
        }
    }

    /// Records have names; serde's derived readers would also take an array of their members.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.lexer.peek() {
            Some(b'[') => Err(Error::new(Code::WrongType, "expected an object").at_offset(self.lexer.pos)),
            _ => self.deserialize_any(visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier
    }
}

struct Container<'a, 'de> {
    reader: &'a mut Reader<'de>,
    first: bool,
    count: usize,
    /// Where the current key's token starts and ends.
    key: (usize, usize),
}

impl Container<'_, '_> {
    /// Whether another item follows; passes over the separator.
    fn advance(&mut self, close: u8) -> Result<bool, Error> {
        match self.reader.lexer.peek() {
            Some(byte) if byte == close => Ok(false),
            Some(b',') if !self.first => {
                self.reader.lexer.pos += 1;
                if self.reader.lexer.peek() == Some(close) {
                    return Err(self.reader.lexer.error("trailing comma"));
                }
                Ok(true)
            }
            Some(_) if self.first => {
                self.first = false;
                Ok(true)
            }
            _ => Err(self.reader.lexer.error("expected `,` or the end")),
        }
    }

    #[cold]
    fn in_key(&self, error: Error) -> Error {
        let (start, end) = self.key;
        let key = super::parse_value(&self.reader.lexer.text()[start..end])
            .ok()
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_default();
        error.inside(Segment::Key(key)).at_offset(self.reader.lexer.pos)
    }
}

impl<'de> SeqAccess<'de> for Container<'_, 'de> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        if !self.advance(b']')? {
            return Ok(None);
        }
        self.count += 1;
        match seed.deserialize(&mut *self.reader) {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(error
                .inside(Segment::Index(self.count - 1))
                .at_offset(self.reader.lexer.pos)),
        }
    }
}

impl<'de> MapAccess<'de> for Container<'_, 'de> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        if !self.advance(b'}')? {
            return Ok(None);
        }
        if self.reader.lexer.byte() != Some(b'"') {
            return Err(self.reader.lexer.error("expected a key"));
        }
        let start = self.reader.lexer.pos;
        let key = seed.deserialize(Key(self.reader))?;
        self.key = (start, self.reader.lexer.pos);
        self.reader.lexer.expect(b':')?;
        Ok(Some(key))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        match seed.deserialize(&mut *self.reader) {
            Ok(value) => Ok(value),
            Err(error) => Err(self.in_key(error)),
        }
    }
}

/// An object key: a string, which may stand for an integer.
struct Key<'a, 'de>(&'a mut Reader<'de>);

macro_rules! integer_keys {
    ($($method:ident $visit:ident $ty:ty),*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            let text = match self.0.lexer.string(&mut self.0.scratch)? {
                Text::Plain(text) => text,
                Text::Unescaped(bytes) => real_text(bytes)?,
            };
            match text.parse::<$ty>() {
                Ok(number) => visitor.$visit(number),
                Err(_) => Err(Error::new(Code::WrongType, "the key is not an integer")),
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for Key<'_, 'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.0.string(visitor)
    }

    integer_keys! {
        deserialize_u32 visit_u32 u32,
        deserialize_u64 visit_u64 u64,
        deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64
    }

    forward_to_deserialize_any! {
        bool i8 i16 i128 u8 u16 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

struct Variant<'a, 'de> {
    reader: &'a mut Reader<'de>,
}

impl<'de> EnumAccess<'de> for Variant<'_, 'de> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Error> {
        if self.reader.lexer.peek() != Some(b'"') {
            return Err(self.reader.lexer.error("expected a key"));
        }
        let value = seed.deserialize(Key(self.reader))?;
        self.reader.lexer.expect(b':')?;
        Ok((value, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_, 'de> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        de::Deserialize::deserialize(self.reader)
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self.reader)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _len: usize, visitor: V) -> Result<V::Value, Error> {
        self.reader.deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(self, _fields: &'static [&'static str], visitor: V) -> Result<V::Value, Error> {
        self.reader.deserialize_any(visitor)
    }
}

impl<'de> IntoDeserializer<'de, Error> for &'de Value {
    type Deserializer = Self;
    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> IntoDeserializer<'de, Error> for &'de JsonString {
    type Deserializer = &'de JsonString;
    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! integer_text_keys {
    ($($method:ident $visit:ident $ty:ty),*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            match real_text(self.as_bytes())?.parse::<$ty>() {
                Ok(number) => visitor.$visit(number),
                Err(_) => Err(Error::new(Code::WrongType, "the key is not an integer")),
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for &'de JsonString {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_borrowed_str(real_text(self.as_bytes())?)
    }

    integer_text_keys! {
        deserialize_u32 visit_u32 u32,
        deserialize_u64 visit_u64 u64,
        deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64
    }

    forward_to_deserialize_any! {
        bool i8 i16 i128 u8 u16 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> Deserializer<'de> for &'de Value {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Value::Null => visitor.visit_unit(),
            Value::Bool(flag) => visitor.visit_bool(*flag),
            Value::Int(number) => match u64::try_from(*number) {
                Ok(number) => visitor.visit_u64(number),
                Err(_) => visitor.visit_i64(*number),
            },
            Value::BigInt(digits) => visit_number(
                Number {
                    text: digits,
                    is_float: false,
                },
                visitor,
            ),
            Value::Float(number) => visitor.visit_f64(*number),
            Value::String(text) => text.deserialize_any(visitor),
            Value::Array(items) => SeqDeserializer::new(items.iter()).deserialize_any(visitor),
            Value::Object(members) => {
                MapDeserializer::new(members.iter().map(|(key, value)| (key, value))).deserialize_any(visitor)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Value::Null => visitor.visit_none(),
            other => visitor.visit_some(other),
        }
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Value::Int(number) => visitor.visit_f64(*number as f64),
            Value::BigInt(digits) => visitor.visit_f64(digits.parse().unwrap_or(f64::NAN)),
            other => other.deserialize_any(visitor),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Error> {
        if name == RAW_TOKEN {
            let text = self.to_text(super::Style {
                non_finite: super::NonFinite::Literal,
                ..super::Style::RECORD
            });
            return visitor.visit_bytes(text.as_bytes());
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self {
            Value::String(text) => visitor.visit_enum(real_text(text.as_bytes())?.into_deserializer()),
            _ => Err(Error::new(Code::WrongType, "expected a name")),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self {
            Value::Array(_) => Err(Error::new(Code::WrongType, "expected an object")),
            other => other.deserialize_any(visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}
