//! One contract for sandboxes.
