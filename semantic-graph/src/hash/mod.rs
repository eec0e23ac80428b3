//! Message identity, prefix matching and commits (feature `hash`).

mod commit;
mod diff;
mod digest;
mod index;
mod occurrence;
mod prepare;
mod project;

pub use commit::{CommitError, Committed};
pub use diff::{
    CallChange, CountChange, Diff, Divergence, LinkChange, LogprobChange, Side, TokenChange, TrainableChange, diff,
};
#[cfg(feature = "store")]
pub(crate) use digest::Hasher;
pub use digest::{Digest, IdentityError, canonical_arguments, message_digest, tools_digest};
pub(crate) use index::KeyIndex;
pub use occurrence::{OccurrenceKey, occurrence_keys};
pub use prepare::{BridgeAnchor, PendingTurn, PrepareError};
