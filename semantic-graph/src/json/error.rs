//! [`Error`]: what was wrong, where in the value, and where in the text.

use std::fmt;

use serde::{de, ser};

use crate::code::{Code, Coded};

/// One step of a path into a JSON value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Segment {
    /// An object key.
    Key(String),
    /// An array position.
    Index(usize),
}

/// Why JSON could not be read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(Box<Inner>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Inner {
    code: Code,
    detail: String,
    /// Innermost first.
    path: Vec<Segment>,
    offset: Option<usize>,
}

impl Error {
    pub(crate) fn new(code: Code, detail: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            code,
            detail: detail.into(),
            path: Vec::new(),
            offset: None,
        }))
    }

    pub(crate) fn at_offset(mut self, offset: usize) -> Self {
        self.0.offset.get_or_insert(offset);
        self
    }

    pub(crate) fn inside(mut self, segment: Segment) -> Self {
        self.0.path.push(segment);
        self
    }

    /// The stable name of what was wrong.
    #[must_use]
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// The same in words.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// Where in the value, outermost step first.
    #[must_use]
    pub fn path(&self) -> Vec<Segment> {
        self.0.path.iter().rev().cloned().collect()
    }

    /// Where in the text, in bytes, when text was read.
    #[must_use]
    pub fn offset(&self) -> Option<usize> {
        self.0.offset
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Coded(self.0.code, &self.0.detail).fmt(f)?;
        if !self.0.path.is_empty() {
            f.write_str(" at ")?;
            for segment in self.0.path.iter().rev() {
                match segment {
                    Segment::Key(key) => write!(f, "/{key}")?,
                    Segment::Index(index) => write!(f, "/{index}")?,
                }
            }
        }
        if let Some(offset) = self.0.offset {
            write!(f, " (byte {offset})")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

impl de::Error for Error {
    fn custom<T: fmt::Display>(message: T) -> Self {
        let text = message.to_string();
        match text
            .split_once(": ")
            .and_then(|(name, rest)| Some((Code::from_name(name)?, rest)))
        {
            Some((code, rest)) => Self::new(code, rest),
            None => Self::new(Code::WrongType, text),
        }
    }

    fn invalid_type(unexpected: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(Code::WrongType, format!("found {unexpected}, expected {expected}"))
    }

    fn invalid_value(unexpected: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::invalid_type(unexpected, expected)
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(Code::UnknownVariant, format!("`{variant}` is none of {expected:?}"))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self::new(Code::UnknownField, format!("the keys are {expected:?}")).inside(Segment::Key(field.to_owned()))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(Code::MissingField, "a required key is missing").inside(Segment::Key(field.to_owned()))
    }

    fn duplicate_field(field: &'static str) -> Self {
        Self::new(Code::DuplicateField, "the key occurs twice").inside(Segment::Key(field.to_owned()))
    }
}

impl ser::Error for Error {
    fn custom<T: fmt::Display>(message: T) -> Self {
        <Self as de::Error>::custom(message)
    }
}
