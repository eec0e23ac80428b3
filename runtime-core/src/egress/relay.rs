//! [`Relay`]: a listener inside, one destination outside, and bytes between them.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::dial::dial;
use super::inside::{Accepted, Listen};
use super::live::{Hello, Way};
use super::log::{Attempt, EgressKind, Verdict};
use super::proxy::{Shared, accept};
use super::pump::{Silence, pump, reset};
use crate::error::{Error, Result};
use crate::network::{Destination, Tunnel};

/// A relay that is running: connections to its listener lead to its one destination and nowhere else. It belongs to the
/// policy under which it was made; when that is replaced, it ends or stays as [`Older`](super::Older) says.
///
/// Dropping this value leaves the relay running, until the proxy stops.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    destination: Destination,
    cancel: CancellationToken,
}

impl Relay {
    pub(super) fn start(
        shared: &Arc<Shared>,
        listener: impl Listen,
        destination: &Destination,
        is_route: bool,
    ) -> Result<Self> {
        let address = listener
            .address()
            .map_err(|error| Error::io("the relay's listener", error))?;
        let way = Way {
            destination: Arc::new(destination.clone()),
            tunnel: Tunnel::No,
            addresses: Vec::new(),
            is_route,
            hello: Hello::None,
        };
        let refused = |verdict: Verdict| {
            let message = format!("no relay to {destination}: {}", verdict.reason);
            Error::invalid_argument("destination", message)
        };
        let (entered, _) = shared
            .board
            .enter(way.clone(), shared.stop.child_token())
            .map_err(refused)?;
        let cancel = entered.cancel().clone();
        let (task_shared, task_cancel) = (Arc::clone(shared), cancel.clone());
        shared.tasks.spawn(async move {
            let shared = task_shared;
            accept(
                listener,
                &task_cancel,
                shared.limits.connections,
                &Notify::new(),
                |stream, slot| {
                    let task = connection(Arc::clone(&shared), stream, way.clone(), task_cancel.clone());
                    shared.tasks.spawn(async move {
                        task.await;
                        drop(slot);
                    });
                },
            )
            .await;
            // Only now that the listener is closed has the relay left the board.
            drop(entered);
        });
        Ok(Self {
            address,
            destination: destination.clone(),
            cancel,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it leads.
    pub fn destination(&self) -> &Destination {
        &self.destination
    }

    /// Whether it has been closed, or is about to be.
    pub fn is_closed(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Closes the listener and its connections.
    pub fn close(self) {
        self.cancel.cancel();
    }
}

async fn connection(shared: Arc<Shared>, mut inside: Accepted, way: Way, relay: CancellationToken) {
    let attempt = Attempt::new(&shared.log, &shared.name, EgressKind::Relay);
    attempt.wants(&way.destination, shared.board.in_force().generation);
    let is_route = way.is_route;
    let mut dialled = match dial(&shared.board, &*shared.resolver, &shared.limits, &relay, way).await {
        Ok(dialled) => dialled,
        Err(no_way) => {
            no_way.tell(&attempt);
            // As if nobody listened.
            inside.reset();
            return;
        }
    };
    attempt.permitted(dialled.verdict);
    attempt.allowed();
    let silence = if is_route {
        Silence {
            open: None,
            half_closed: None,
        }
    } else {
        Silence {
            open: Some(shared.limits.tunnel),
            half_closed: Some(shared.limits.half_closed),
        }
    };
    let result = tokio::select! {
        () = dialled.entered.cancel().cancelled() => None,
        result = pump(&mut inside, &mut dialled.stream, silence, &attempt.sent, &attempt.received) => Some(result),
    };
    match result {
        None => {
            inside.reset();
            reset(&dialled.stream);
        }
        Some(Err(error)) => tracing::debug!(%error, "a relayed connection broke"),
        Some(Ok(())) => {}
    }
    // In this order: once it has left the board, it is closed.
    drop((inside, dialled.stream));
    drop(dialled.entered);
}
