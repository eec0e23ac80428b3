//! Network policy.
