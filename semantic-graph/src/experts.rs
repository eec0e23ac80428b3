//! [`RoutedExperts`] and [`SamplingMask`]: binary per-token data of mixture models.

use std::fmt;

/// The element type of an expert array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// 8 bits, unsigned.
    U8,
    /// 16 bits, unsigned.
    U16,
    /// 16 bits, signed.
    I16,
    /// 32 bits, signed.
    I32,
    /// 64 bits, signed.
    I64,
}

impl ElementType {
    /// Size of one element in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            ElementType::U8 => 1,
            ElementType::U16 | ElementType::I16 => 2,
            ElementType::I32 => 4,
            ElementType::I64 => 8,
        }
    }

    /// The name that array libraries give it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            ElementType::U8 => "uint8",
            ElementType::U16 => "uint16",
            ElementType::I16 => "int16",
            ElementType::I32 => "int32",
            ElementType::I64 => "int64",
        }
    }

    /// The type with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::U8, Self::U16, Self::I16, Self::I32, Self::I64]
            .into_iter()
            .find(|ty| ty.as_str() == name)
    }

    /// The narrowest type that holds every value of both.
    #[must_use]
    pub fn widened(self, other: Self) -> Self {
        use ElementType::{I16, I32, U16};
        match (self, other) {
            (a, b) if a == b => a,
            (U16, I16) | (I16, U16) => I32,
            (a, b) if a.size() >= b.size() => a,
            (_, b) => b,
        }
    }

    fn range(self) -> (i64, i64) {
        match self {
            ElementType::U8 => (0, 255),
            ElementType::U16 => (0, 65_535),
            ElementType::I16 => (-32_768, 32_767),
            ElementType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
            ElementType::I64 => (i64::MIN, i64::MAX),
        }
    }
}

/// Data that does not make an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayError {
    what: &'static str,
}

impl fmt::Display for ArrayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed array: {}", self.what)
    }
}

impl std::error::Error for ArrayError {}

/// Which experts each token was routed to: an array of `[tokens, layers, top_k]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedExperts {
    element: ElementType,
    layers: usize,
    top_k: usize,
    /// Little endian.
    data: Vec<u8>,
}

impl RoutedExperts {
    /// An array from its little-endian bytes.
    ///
    /// # Errors
    /// [`ArrayError`] if a row has no elements or the bytes do not fill whole rows.
    pub fn from_bytes(element: ElementType, layers: usize, top_k: usize, data: Vec<u8>) -> Result<Self, ArrayError> {
        let row = layers
            .checked_mul(top_k)
            .and_then(|n| n.checked_mul(element.size()))
            .filter(|row| *row > 0)
            .ok_or(ArrayError { what: "empty rows" })?;
        if !data.len().is_multiple_of(row) {
            return Err(ArrayError {
                what: "the bytes do not fill whole rows",
            });
        }
        Ok(Self {
            element,
            layers,
            top_k,
            data,
        })
    }

    /// An array from its numbers, row after row.
    ///
    /// # Errors
    /// [`ArrayError`] as in [`from_bytes`](Self::from_bytes), or if a number does not fit.
    pub fn from_values(element: ElementType, layers: usize, top_k: usize, values: &[i64]) -> Result<Self, ArrayError> {
        let (low, high) = element.range();
        if values.iter().any(|value| !(low..=high).contains(value)) {
            return Err(ArrayError {
                what: "a number does not fit its type",
            });
        }
        let mut data = Vec::with_capacity(values.len() * element.size());
        for value in values {
            data.extend_from_slice(&value.to_le_bytes()[..element.size()]);
        }
        Self::from_bytes(element, layers, top_k, data)
    }

    /// The element type.
    #[must_use]
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Rows (tokens), layers, experts per layer.
    #[must_use]
    pub fn shape(&self) -> [usize; 3] {
        [self.rows(), self.layers, self.top_k]
    }

    /// How many tokens the array covers.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.data.len() / self.row_bytes()
    }

    /// The little-endian bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// All numbers, row after row.
    #[must_use]
    pub fn values(&self) -> Vec<i64> {
        let signed = self.element.range().0 < 0;
        self.data
            .chunks_exact(self.element.size())
            .map(|chunk| {
                let fill = if signed && chunk.last().is_some_and(|b| b & 0x80 != 0) {
                    0xff
                } else {
                    0
                };
                let mut bytes = [fill; 8];
                bytes[..chunk.len()].copy_from_slice(chunk);
                i64::from_le_bytes(bytes)
            })
            .collect()
    }

    fn row_bytes(&self) -> usize {
        self.layers * self.top_k * self.element.size()
    }

    pub(crate) fn same_inner_shape(&self, other: &Self) -> bool {
        self.layers == other.layers && self.top_k == other.top_k
    }

    /// Rows `from..to`; both have to be inside.
    #[cfg(feature = "hash")]
    pub(crate) fn slice(&self, from: usize, to: usize) -> Self {
        let row = self.row_bytes();
        Self {
            data: self.data[from * row..to * row].to_vec(),
            ..Self {
                data: Vec::new(),
                ..*self
            }
        }
    }

    pub(crate) fn to_element(&self, element: ElementType) -> Self {
        if element == self.element {
            return self.clone();
        }
        let mut data = Vec::with_capacity(self.data.len() / self.element.size() * element.size());
        for value in self.values() {
            data.extend_from_slice(&value.to_le_bytes()[..element.size()]);
        }
        Self {
            element,
            layers: self.layers,
            top_k: self.top_k,
            data,
        }
    }

    /// Appends the rows of `other`, which has to have the same inner shape.
    pub(crate) fn append(&mut self, other: &Self) {
        let element = self.element.widened(other.element);
        if element != self.element {
            *self = self.to_element(element);
        }
        self.data.extend_from_slice(&other.to_element(element).data);
    }

    /// Replaces the last row by the only row of `row`.
    #[cfg(feature = "hash")]
    pub(crate) fn replace_last(&mut self, row: &Self) {
        let keep = self.rows().saturating_sub(1);
        let mut repaired = self.slice(0, keep);
        repaired.append(row);
        *self = repaired;
    }
}

/// Which tokens were candidates at each sampled position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplingMask {
    /// Candidates of all positions, one position after the other.
    pub ids: Vec<i32>,
    /// How many candidates each position has.
    pub counts: Vec<i32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "hash")]
    #[test]
    fn rows_survive_widening_with_their_signs() {
        let mut a = RoutedExperts::from_values(ElementType::U8, 1, 2, &[1, 255, 3, 4]).unwrap();
        let b = RoutedExperts::from_values(ElementType::I16, 1, 2, &[-5, 300]).unwrap();
        a.replace_last(&b);
        assert_eq!(a.element(), ElementType::I16);
        assert_eq!(a.values(), [1, 255, -5, 300]);
        assert_eq!(a.shape(), [2, 1, 2]);
        assert_eq!(ElementType::U16.widened(ElementType::I16), ElementType::I32);
    }

    #[test]
    fn malformed_arrays_are_refused() {
        assert!(RoutedExperts::from_bytes(ElementType::U8, 2, 2, vec![0; 5]).is_err());
        assert!(RoutedExperts::from_bytes(ElementType::U8, 0, 2, vec![]).is_err());
        assert!(RoutedExperts::from_bytes(ElementType::U8, usize::MAX, 2, vec![]).is_err());
        assert!(RoutedExperts::from_values(ElementType::U8, 1, 1, &[256]).is_err());
    }
}
