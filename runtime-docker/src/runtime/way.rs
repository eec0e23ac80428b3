//! The ways to a box, and the first that worked on each engine.

use std::collections::HashMap;
use std::sync::Mutex;

use runtime_core::{Error, ErrorKind};

use super::lock;
use crate::connect::Endpoint;

/// How a box is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Way {
    Socket,
    Stdio,
    Engine,
}

impl Way {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Socket => "socket",
            Self::Stdio => "stdio",
            Self::Engine => "engine",
        }
    }

    pub(super) fn after(self) -> &'static [Way] {
        match self {
            Self::Socket => &[Self::Socket, Self::Stdio, Self::Engine],
            Self::Stdio => &[Self::Stdio, Self::Engine],
            Self::Engine => &[Self::Engine],
        }
    }
}

/// The first way that worked, by engine and architecture.
static WAYS: Mutex<Option<HashMap<(Endpoint, String), Way>>> = Mutex::new(None);

/// The way that worked on this engine for images of this architecture.
pub(super) fn known(endpoint: &Endpoint, architecture: &str) -> Option<Way> {
    let key = (endpoint.clone(), architecture.to_owned());
    lock(&WAYS).as_ref()?.get(&key).copied()
}

/// Keeps a way that worked.
pub(super) fn remember(endpoint: &Endpoint, architecture: &str, way: Way) {
    let key = (endpoint.clone(), architecture.to_owned());
    lock(&WAYS).get_or_insert_default().insert(key, way);
}

/// What a failed way may be followed by another for: not what would fail there too.
pub(super) fn is_about_the_way(error: &Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::InvalidConfig
            | ErrorKind::InvalidArgument
            | ErrorKind::Unauthorized
            | ErrorKind::RateLimited
            | ErrorKind::ResourceExhausted
            | ErrorKind::AlreadyExists
            | ErrorKind::NotFound
    ) || error.message().contains("mount")
}
