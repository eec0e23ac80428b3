//! [`Board`]: the policy in force, and every connection outward that it or an earlier one permitted.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::log::Verdict;
use crate::network::{Destination, EgressPolicy, Tunnel};

/// A policy and its place in the order of those that were switched on.
#[derive(Debug)]
pub(super) struct InForce {
    pub(super) policy: EgressPolicy,
    pub(super) generation: u64,
}

/// What happens to connections of earlier policies when another one is switched on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Older {
    /// Those that the new policy refuses are closed.
    Recheck,
    /// All are closed, whatever the new policy says, and so are relays. For the cut: what setup opened carries nothing
    /// any more.
    Close,
}

/// Where a connection leads, as far as a policy is asked.
#[derive(Debug, Clone)]
pub(super) struct Way {
    pub(super) destination: Arc<Destination>,
    pub(super) tunnel: Tunnel,
    /// What it was resolved to; empty for a listener, which dials nothing itself.
    pub(super) addresses: Vec<IpAddr>,
    /// A relay that the framework asked for itself: permitted as long as it is a route.
    pub(super) is_route: bool,
    pub(super) hello: Hello,
}

/// What is known about the TLS handshake in a tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Hello {
    /// There is none to look at.
    None,
    /// It has not come yet.
    Awaited,
    /// It was for this name, and perhaps has another one encrypted in it.
    Seen { name: Option<String>, encrypted: bool },
}

impl Way {
    pub(super) fn judge(&self, policy: &EgressPolicy) -> Verdict {
        if self.is_route {
            return match policy.routes().find(&self.destination) {
                Some(_) => Verdict::framework(),
                None => Verdict::refused("not_a_route"),
            };
        }
        let decision = policy.decide(&self.destination, self.tunnel);
        if !decision.is_permitted() {
            return Verdict::new(&decision, &self.destination);
        }
        let verdict = match self.addresses.as_slice() {
            [] => Verdict::new(&decision, &self.destination),
            addresses => Verdict::new(&policy.decide_resolved(&self.destination, addresses), &self.destination),
        };
        match &self.hello {
            Hello::Seen { encrypted: true, .. } if verdict.permitted && policy.policy().is_restricted() => {
                Verdict::refused("encrypted_client_hello")
            }
            Hello::Seen { name, .. } if verdict.permitted => {
                let decision = policy.decide_server_name(&self.destination, name.as_deref());
                if decision.is_permitted() {
                    return verdict;
                }
                match name {
                    Some(name) => {
                        let asked = Destination::new(self.destination.scheme(), name, self.destination.port());
                        Verdict::new(&decision, &asked)
                    }
                    None => Verdict::refused("no_server_name"),
                }
            }
            _ => verdict,
        }
    }
}

/// Policy and connections of one box.
#[derive(Debug)]
pub(super) struct Board {
    inner: Mutex<Inner>,
    gone: Notify,
}

#[derive(Debug)]
struct Inner {
    in_force: Arc<InForce>,
    entries: HashMap<u64, Entry>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    way: Way,
    cancel: CancellationToken,
}

impl Board {
    pub(super) fn new(policy: EgressPolicy) -> Self {
        let in_force = Arc::new(InForce { policy, generation: 0 });
        Self {
            inner: Mutex::new(Inner {
                in_force,
                entries: HashMap::new(),
                next: 0,
            }),
            gone: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn in_force(&self) -> Arc<InForce> {
        Arc::clone(&self.lock().in_force)
    }

    /// How many connections and relays there are.
    pub(super) fn len(&self) -> usize {
        self.lock().entries.len()
    }

    /// Enters a connection that is about to be opened, if the policy that is in force *now* permits it. From here on a
    /// switch that refuses it cancels it.
    pub(super) fn enter(self: &Arc<Self>, way: Way, cancel: CancellationToken) -> Result<(Entered, Verdict), Verdict> {
        let mut inner = self.lock();
        let verdict = way.judge(&inner.in_force.policy);
        if !verdict.permitted {
            return Err(verdict);
        }
        let (id, generation) = (inner.next, inner.in_force.generation);
        inner.next += 1;
        let entry = Entry {
            way,
            cancel: cancel.clone(),
        };
        inner.entries.insert(id, entry);
        let entered = Entered {
            board: Arc::clone(self),
            id,
            generation,
            cancel,
        };
        Ok((entered, verdict))
    }

    /// Switches to `policy` and cancels what it refuses. Returns what was cancelled.
    pub(super) fn replace(&self, policy: EgressPolicy, older: Older) -> Vec<u64> {
        let mut inner = self.lock();
        let generation = inner.in_force.generation + 1;
        inner.in_force = Arc::new(InForce { policy, generation });
        let in_force = Arc::clone(&inner.in_force);
        let mut cancelled = Vec::new();
        for (id, entry) in &mut inner.entries {
            if older == Older::Close || !entry.way.judge(&in_force.policy).permitted {
                entry.cancel.cancel();
                cancelled.push(*id);
            }
        }
        cancelled
    }

    /// Switches to `policy`, and waits until what it refuses is closed. The switch itself happens before the first
    /// wait: a future that is dropped has switched if it was polled at all.
    pub(super) async fn switch(&self, policy: EgressPolicy, older: Older) {
        let cancelled = self.replace(policy, older);
        loop {
            let gone = self.gone.notified();
            tokio::pin!(gone);
            gone.as_mut().enable();
            if !cancelled.iter().any(|id| self.lock().entries.contains_key(id)) {
                return;
            }
            gone.await;
        }
    }
}

/// A connection's place on the board, until dropped.
#[derive(Debug)]
pub(super) struct Entered {
    board: Arc<Board>,
    id: u64,
    generation: u64,
    cancel: CancellationToken,
}

impl Entered {
    /// The policy that permitted it.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Done once a policy refuses it, or the proxy stops.
    pub(super) fn cancel(&self) -> &CancellationToken {
        &self.cancel
    }

    /// Adds what the TLS handshake said, and judges by the policy in force now.
    pub(super) fn saw_hello(&self, name: Option<String>, encrypted: bool) -> Verdict {
        let mut inner = self.board.lock();
        let in_force = Arc::clone(&inner.in_force);
        match inner.entries.get_mut(&self.id) {
            Some(_) if self.cancel.is_cancelled() => Verdict::refused("policy_changed"),
            Some(entry) => {
                entry.way.hello = Hello::Seen { name, encrypted };
                entry.way.judge(&in_force.policy)
            }
            None => Verdict::refused("policy_changed"),
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.board.lock().entries.remove(&self.id);
        self.board.gone.notify_waiters();
    }
}
