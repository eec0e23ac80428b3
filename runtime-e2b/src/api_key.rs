//! [`ApiKey`]: a credential that does not show itself.

use std::fmt;

use serde::Deserialize;

/// An API key. It is read from configurations, never written to one, and its `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct ApiKey(String);

impl ApiKey {
    /// Wraps a key.
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    pub(crate) fn expose(&self) -> &str {
        &self.0
    }

    /// Whether it can be the value of a header.
    pub(crate) fn is_well_formed(&self) -> bool {
        !self.0.is_empty() && self.0.bytes().all(|byte| byte.is_ascii_graphic())
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::ApiKey;

    #[test]
    fn a_key_never_shows_itself() {
        assert_eq!(format!("{:?}", ApiKey::new("e2b_123")), "ApiKey(…)");
        assert!(ApiKey::new("e2b_123").is_well_formed());
        for wrong in ["", "a b", "a\n", "é"] {
            assert!(!ApiKey::new(wrong).is_well_formed(), "{wrong:?}");
        }
    }
}
