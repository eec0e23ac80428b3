//! How the guest is to build the box around itself, where no engine does: see `isolation` of the embedded runtime.
//!
//! Compiled into both sides, as [`frame`](super::frame) is. The plan is the first thing that the host says on the link,
//! before the guest's hello: its length as `u32`, and the body. It uses `std` alone and performs no I/O.

use super::encoding::{Input, List, Malformed, Wire};

/// Longest plan.
pub(crate) const MAX_PLAN: usize = 1 << 20;
/// What a line begins with that tells the host of a failed step: `isolation:STEP:ERRNO:TEXT`.
pub(crate) const FAILURE_PREFIX: &str = "isolation:";

macro_rules! plan {
    ($( $(#[$meta:meta])* $name:ident { $( $(#[$doc:meta])* $field:ident : $ty:ty ),* $(,)? } )*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub(crate) struct $name { $( $(#[$doc])* pub(crate) $field: $ty ),* }

        impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $( self.$field.put(out); )*
            }
            fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
                Ok(Self { $( $field: Wire::take(input)? ),* })
            }
        }
    )*};
}

plan! {
    /// A path of the host that is seen in the box under the same name.
    Shown {
        /// Where it is seen.
        path: Vec<u8>,
        /// Where it is, links resolved.
        source: Vec<u8>,
        /// Whether the box may change it.
        writable: bool,
    }

    /// The box to build.
    Plan {
        /// Only see whether it can be built, and end.
        probe: bool,
        /// An existing directory of the host to mount over, in the guest's own mount namespace.
        stage: Vec<u8>,
        /// The directory that becomes the root, under a private layer. Without it: the host's files, read-only.
        root: Option<Vec<u8>>,
        /// Directories of the host for the private layer: what is changed, and overlayfs's own.
        layer: Option<(Vec<u8>, Vec<u8>)>,
        /// The root is a copy that belongs to this box alone.
        copied: bool,
        /// The directory of the host that is the box's workdir.
        work: Option<Vec<u8>>,
        /// Where the box sees its workdir.
        workdir: Vec<u8>,
        /// Paths of the host that are not seen.
        hidden: List<Vec<u8>>,
        /// Paths of the host that are seen all the same.
        shown: List<Shown>,
        /// User and group to become, for a guest that was started by root.
        user: Option<u32>,
        /// Resource limits of programs: `RLIMIT_*` number and value.
        limits: List<(u32, u64)>,
        /// Most bytes in the box's memory file systems.
        memory_files: u64,
        /// The file of the box's cgroup that counts kills for lack of memory.
        oom_events: Option<Vec<u8>>,
        /// Programs may be started on the host's network: see `Request::HostNetwork`.
        host_network: bool,
        /// The box's host name.
        hostname: Vec<u8>,
    }
}
