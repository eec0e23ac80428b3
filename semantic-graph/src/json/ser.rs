//! The serde writer: [`to_string`], [`to_vec`], [`to_value`].

use serde::ser::{self, Serialize, Serializer};

use super::write::{write_float, write_string};
use super::{Error, NonFinite, RAW_TOKEN, Value};
use crate::code::Code;

/// Writes compact JSON text; numbers that are not finite become `null`.
///
/// # Errors
/// [`Error`] if the value refuses to be written, or a map key is neither text nor integer.
pub fn to_string<T: Serialize + ?Sized>(value: &T) -> Result<String, Error> {
    let bytes = to_vec(value)?;
    String::from_utf8(bytes).map_err(|_| Error::new(Code::InvalidText, "not UTF-8"))
}

/// As [`to_string`], in bytes.
///
/// # Errors
/// As [`to_string`].
pub fn to_vec<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, Error> {
    let mut out = Vec::new();
    to_writer_buf(&mut out, value, NonFinite::Null)?;
    Ok(out)
}

/// Appends compact JSON text to `out`.
///
/// # Errors
/// As [`to_string`]; `out` may then hold a part of the text.
pub fn to_writer_buf<T: Serialize + ?Sized>(out: &mut Vec<u8>, value: &T, non_finite: NonFinite) -> Result<(), Error> {
    value.serialize(&mut Writer { out, non_finite })
}

/// Turns any serialisable value into a [`Value`].
///
/// # Errors
/// As [`to_string`].
pub fn to_value<T: Serialize + ?Sized>(value: &T) -> Result<Value, Error> {
    let mut out = Vec::new();
    to_writer_buf(&mut out, value, NonFinite::Overflow)?;
    let text = String::from_utf8(out).map_err(|_| Error::new(Code::InvalidText, "not UTF-8"))?;
    super::parse_value(&text)
}

struct Writer<'a> {
    out: &'a mut Vec<u8>,
    non_finite: NonFinite,
}

struct Open<'a, 'b> {
    writer: &'b mut Writer<'a>,
    first: bool,
    close: &'static [u8],
}

impl<'a, 'b> Open<'a, 'b> {
    fn new(writer: &'b mut Writer<'a>, open: &[u8], close: &'static [u8]) -> Self {
        writer.out.extend_from_slice(open);
        Self {
            writer,
            first: true,
            close,
        }
    }

    fn separate(&mut self) {
        if !std::mem::replace(&mut self.first, false) {
            self.writer.out.push(b',');
        }
    }

    fn item<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.separate();
        value.serialize(&mut *self.writer)
    }

    fn member<T: Serialize + ?Sized>(&mut self, key: &str, value: &T) -> Result<(), Error> {
        self.separate();
        write_string(self.writer.out, key.as_bytes(), false);
        self.writer.out.push(b':');
        value.serialize(&mut *self.writer)
    }

    fn finish(self) {
        self.writer.out.extend_from_slice(self.close);
    }
}

/// `-?digits` of any integer type, without an allocation.
fn write_int(out: &mut Vec<u8>, negative: bool, mut rest: u128) {
    let mut digits = [0u8; 40];
    let mut at = digits.len();
    while rest > u128::from(u64::MAX) {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let mut rest = rest as u64;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if negative {
        out.push(b'-');
    }
    out.extend_from_slice(&digits[at..]);
}

macro_rules! integers {
    ($($method:ident $ty:ty),*) => {$(
        fn $method(self, number: $ty) -> Result<(), Error> {
            #[allow(unused_comparisons, clippy::cast_lossless, reason = "one macro for all widths")]
            let negative = number < 0;
            let magnitude = if negative {
                (number as i128).unsigned_abs()
            } else {
                number as u128
            };
            write_int(self.out, negative, magnitude);
            Ok(())
        }
    )*};
}

impl<'a, 'b> Serializer for &'b mut Writer<'a> {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = Open<'a, 'b>;
    type SerializeTuple = Open<'a, 'b>;
    type SerializeTupleStruct = Open<'a, 'b>;
    type SerializeTupleVariant = Open<'a, 'b>;
    type SerializeMap = Open<'a, 'b>;
    type SerializeStruct = Open<'a, 'b>;
    type SerializeStructVariant = Open<'a, 'b>;

    integers! {
        serialize_i8 i8, serialize_i16 i16, serialize_i32 i32, serialize_i64 i64,
        serialize_i128 i128, serialize_u8 u8, serialize_u16 u16, serialize_u32 u32,
        serialize_u64 u64, serialize_u128 u128
    }

    fn serialize_bool(self, flag: bool) -> Result<(), Error> {
        self.out.extend_from_slice(if flag { b"true" } else { b"false" });
        Ok(())
    }

    fn serialize_f32(self, number: f32) -> Result<(), Error> {
        self.serialize_f64(f64::from(number))
    }

    fn serialize_f64(self, number: f64) -> Result<(), Error> {
        write_float(self.out, number, self.non_finite);
        Ok(())
    }

    fn serialize_char(self, c: char) -> Result<(), Error> {
        self.serialize_str(c.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, text: &str) -> Result<(), Error> {
        write_string(self.out, text.as_bytes(), false);
        Ok(())
    }

    fn serialize_bytes(self, bytes: &[u8]) -> Result<(), Error> {
        bytes.serialize(self)
    }

    fn serialize_none(self) -> Result<(), Error> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), Error> {
        self.out.extend_from_slice(b"null");
        Ok(())
    }

    fn serialize_unit_struct(self, _name: &'static str) -> Result<(), Error> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _name: &'static str, _index: u32, variant: &'static str) -> Result<(), Error> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, name: &'static str, value: &T) -> Result<(), Error> {
        if name == RAW_TOKEN {
            // The value is a string whose text is the JSON: write it plainly, then drop the
            // quotes and undo the escapes by reading it back.
            let mut quoted = Vec::new();
            value.serialize(&mut Writer {
                out: &mut quoted,
                non_finite: self.non_finite,
            })?;
            let raw: String = super::from_slice(&quoted)?;
            self.out.extend_from_slice(raw.as_bytes());
            return Ok(());
        }
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        let mut open = Open::new(self, b"{", b"}");
        open.member(variant, value)?;
        open.finish();
        Ok(())
    }

    fn serialize_seq(self, _len: Option<usize>) -> Result<Open<'a, 'b>, Error> {
        Ok(Open::new(self, b"[", b"]"))
    }

    fn serialize_tuple(self, _len: usize) -> Result<Open<'a, 'b>, Error> {
        Ok(Open::new(self, b"[", b"]"))
    }

    fn serialize_tuple_struct(self, _name: &'static str, _len: usize) -> Result<Open<'a, 'b>, Error> {
        Ok(Open::new(self, b"[", b"]"))
    }

    fn serialize_tuple_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Open<'a, 'b>, Error> {
        self.out.push(b'{');
        write_string(self.out, variant.as_bytes(), false);
        Ok(Open::new(self, b":[", b"]}"))
    }

    fn serialize_map(self, _len: Option<usize>) -> Result<Open<'a, 'b>, Error> {
        Ok(Open::new(self, b"{", b"}"))
    }

    fn serialize_struct(self, _name: &'static str, _len: usize) -> Result<Open<'a, 'b>, Error> {
        Ok(Open::new(self, b"{", b"}"))
    }

    fn serialize_struct_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Open<'a, 'b>, Error> {
        self.out.push(b'{');
        write_string(self.out, variant.as_bytes(), false);
        Ok(Open::new(self, b":{", b"}}"))
    }
}

macro_rules! sequences {
    ($($trait:ident $method:ident),*) => {$(
        impl ser::$trait for Open<'_, '_> {
            type Ok = ();
            type Error = Error;
            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
                self.item(value)
            }
            fn end(self) -> Result<(), Error> {
                self.finish();
                Ok(())
            }
        }
    )*};
}

sequences! {
    SerializeSeq serialize_element,
    SerializeTuple serialize_element,
    SerializeTupleStruct serialize_field,
    SerializeTupleVariant serialize_field
}

macro_rules! structs {
    ($($trait:ident),*) => {$(
        impl ser::$trait for Open<'_, '_> {
            type Ok = ();
            type Error = Error;
            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                key: &'static str,
                value: &T,
            ) -> Result<(), Error> {
                self.member(key, value)
            }
            fn end(self) -> Result<(), Error> {
                self.finish();
                Ok(())
            }
        }
    )*};
}

structs! { SerializeStruct, SerializeStructVariant }

impl ser::SerializeMap for Open<'_, '_> {
    type Ok = ();
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Error> {
        self.separate();
        let start = self.writer.out.len();
        key.serialize(&mut *self.writer)?;
        match self.writer.out.get(start) {
            Some(b'"') => {}
            Some(b'-' | b'0'..=b'9') => {
                self.writer.out.insert(start, b'"');
                self.writer.out.push(b'"');
            }
            _ => {
                return Err(Error::new(Code::WrongType, "a key is neither text nor an integer"));
            }
        }
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.writer.out.push(b':');
        value.serialize(&mut *self.writer)
    }

    fn end(self) -> Result<(), Error> {
        self.finish();
        Ok(())
    }
}
