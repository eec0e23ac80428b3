//! The workspace's front door.
fn main() {}
