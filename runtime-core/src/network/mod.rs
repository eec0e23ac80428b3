//! Network policy.

/// x
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy;
impl Policy {
    /// x
    pub fn is_restricted(&self) -> bool {
        false
    }
}
/// x
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Routes;
