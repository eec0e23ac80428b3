//! [`RecordOptions`]: the forms in which a trace is written, and the machinery behind them.

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

/// How a record is written.
///
/// ```
/// use semantic_graph::RecordOptions;
/// assert_eq!(RecordOptions::default().float_decimals, Some(4));
/// assert!(RecordOptions::STORED.exclude_none);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordOptions {
    /// Decimals of the compact per-token streams (log-probabilities, advantages, entropies);
    /// `None` keeps every digit.
    pub float_decimals: Option<u8>,
    /// Leave out model fields that are null.
    pub exclude_none: bool,
}

impl RecordOptions {
    /// Full form with every digit: what the `Serialize` implementations write.
    pub const LOSSLESS: Self = Self {
        float_decimals: None,
        exclude_none: false,
    };
    /// The compact form that the reference puts into `traces.jsonl`.
    pub const STORED: Self = Self {
        float_decimals: Some(4),
        exclude_none: true,
    };
}

impl Default for RecordOptions {
    /// Full form, four decimals.
    fn default() -> Self {
        Self {
            float_decimals: Some(4),
            exclude_none: false,
        }
    }
}

/// A type whose JSON depends on [`RecordOptions`].
pub(crate) trait Record {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error>;
}

impl<T: Record> Record for std::sync::Arc<T> {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        (**self).write(serializer, options)
    }
}

impl<T: Record> Record for Box<T> {
    fn write<S: Serializer>(&self, serializer: S, options: RecordOptions) -> Result<S::Ok, S::Error> {
        (**self).write(serializer, options)
    }
}

/// A value together with its options, as serde wants it.
pub(crate) struct With<'a, T: ?Sized>(pub(crate) &'a T, pub(crate) RecordOptions);

impl<T: Record> Serialize for With<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.write(serializer, self.1)
    }
}

impl<T: Record> Serialize for With<'_, [T]> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.0.len()))?;
        for item in self.0 {
            seq.serialize_element(&With(item, self.1))?;
        }
        seq.end()
    }
}

/// Implements `Serialize` as the full, lossless form.
macro_rules! serialize_as_record {
    ($($ty:ty),* $(,)?) => {$(
        impl serde::Serialize for $ty {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $crate::record::Record::write(
                    self,
                    serializer,
                    $crate::record::RecordOptions::LOSSLESS,
                )
            }
        }
    )*};
}
pub(crate) use serialize_as_record;

/// The members of one object being written.
pub(crate) struct Fields<M> {
    map: M,
    options: RecordOptions,
}

impl<M: SerializeMap> Fields<M> {
    pub(crate) fn open<S>(serializer: S, options: RecordOptions) -> Result<Self, S::Error>
    where
        S: Serializer<SerializeMap = M>,
    {
        Ok(Self {
            map: serializer.serialize_map(None)?,
            options,
        })
    }

    pub(crate) fn put<T: Serialize + ?Sized>(&mut self, key: &str, value: &T) -> Result<(), M::Error> {
        self.map.serialize_entry(key, value)
    }

    pub(crate) fn put_nullable<T: Serialize>(&mut self, key: &str, value: &Option<T>) -> Result<(), M::Error> {
        if value.is_none() && self.options.exclude_none {
            return Ok(());
        }
        self.put(key, value)
    }

    pub(crate) fn put_record<T: Record>(&mut self, key: &str, value: &T) -> Result<(), M::Error> {
        let options = self.options;
        self.put(key, &With(value, options))
    }

    pub(crate) fn put_records<T: Record>(&mut self, key: &str, values: &[T]) -> Result<(), M::Error> {
        let options = self.options;
        self.put(key, &With(values, options))
    }

    pub(crate) fn put_record_nullable<T: Record>(&mut self, key: &str, value: &Option<T>) -> Result<(), M::Error> {
        let options = self.options;
        self.put_nullable(key, &value.as_ref().map(|value| With(value, options)))
    }

    pub(crate) fn end(self) -> Result<M::Ok, M::Error> {
        self.map.end()
    }
}

/// Rounds to `decimals` places: the exact binary value, ties to even, as Python's `round`.
pub(crate) fn round_decimals(value: f64, decimals: u8) -> f64 {
    if !value.is_finite() {
        return value;
    }
    // From 2^53 on there is no fraction left to round.
    if value.abs() >= 9_007_199_254_740_992.0 {
        return value;
    }
    format!("{value:.*}", usize::from(decimals)).parse().unwrap_or(value)
}

/// A per-token stream, rounded while it is written.
pub(crate) struct Stream<'a>(pub(crate) &'a [f64], pub(crate) Option<u8>);

impl Serialize for Stream<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.0.len()))?;
        for &value in self.0 {
            let value = match self.1 {
                Some(decimals) => round_decimals(value, decimals),
                None => value,
            };
            seq.serialize_element(&value)?;
        }
        seq.end()
    }
}
