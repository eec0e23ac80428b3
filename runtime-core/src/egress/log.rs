//! [`EgressLog`]: what a box asked for, and what became of it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::network::{Decision, Destination, Rule};

/// How many attempts a reader of the stream may be behind before it loses the oldest.
const STREAM: usize = 256;
/// How many different destinations are told apart in the sums.
const MAX_SUMS: usize = 4096;

/// How a box asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EgressKind {
    /// A plain HTTP request.
    Request,
    /// CONNECT.
    Tunnel,
    /// A plain HTTP request that became a WebSocket.
    Upgrade,
    /// A connection to a relay.
    Relay,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The policy permits it, and the other side was reached.
    Allowed,
    /// Not permitted. Nothing was sent.
    Refused,
    /// Permitted, but the other side was not reached or broke off before it answered.
    Failed,
}

/// One attempt, told when it is over. Holds no path, no query, no header and no credential.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EgressEvent {
    /// The name of the box's proxy, as its builder was told.
    pub proxy: String,
    /// When it began.
    pub at: SystemTime,
    /// Which of the policies that were switched on one after the other decided.
    pub generation: u64,
    /// How the box asked.
    pub kind: EgressKind,
    /// The method of a request.
    pub method: Option<String>,
    /// Scheme, host and port, such as `https://a.com:443`, escaped where a program chose odd bytes. `None` for a
    /// request that named none.
    pub destination: Option<String>,
    /// The server name of the TLS handshake in a tunnel.
    pub server_name: Option<String>,
    /// What became of it.
    pub outcome: Outcome,
    /// Why, in `snake_case`: the [`Decision`]'s name, or what went wrong.
    pub reason: &'static str,
    /// The rule that decided, in its canonical spelling.
    pub rule: Option<String>,
    /// The allow rule that would have admitted what was refused.
    pub proposal: Option<Rule>,
    /// The status that the box was answered with, if it was answered.
    pub status: Option<u16>,
    /// Bytes of content from the box.
    pub sent: u64,
    /// Bytes of content to the box.
    pub received: u64,
    /// How long it took.
    pub duration: Duration,
}

/// What a box was refused, summed up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Refusal {
    /// Scheme, host and port.
    pub destination: String,
    /// Why, in `snake_case`.
    pub reason: &'static str,
    /// How often.
    pub count: u64,
    /// The allow rule that would admit it; `None` if none can.
    pub proposal: Option<Rule>,
}

/// The decisions of one proxy: a stream that loses its oldest entries rather than memory, exact sums by destination,
/// and `tracing`. Cheap to clone.
#[derive(Clone, Default)]
pub struct EgressLog(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Made for the first reader: most boxes have none.
    stream: OnceLock<broadcast::Sender<Arc<EgressEvent>>>,
    sums: Mutex<Sums>,
}

#[derive(Default)]
struct Sums {
    by: HashMap<Destination, Vec<Sum>>,
    /// How many there are in all.
    len: usize,
    /// Attempts that found no place in the sums.
    uncounted: u64,
}

struct Sum {
    outcome: Outcome,
    reason: &'static str,
    count: u64,
    order: usize,
    framework: bool,
    proposal: Option<Rule>,
}

impl EgressLog {
    /// A stream of what happens from now on. A reader that falls more than 256 attempts behind loses the oldest and is
    /// told how many: [`RecvError::Lagged`](broadcast::error::RecvError::Lagged). Dropping the receiver is all there is
    /// to unsubscribing.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<EgressEvent>> {
        self.0.stream.get_or_init(|| broadcast::Sender::new(STREAM)).subscribe()
    }

    /// What was refused, in the order in which it was first asked for.
    pub fn refused(&self) -> Vec<Refusal> {
        let sums = self.sums();
        let all = sums
            .by
            .iter()
            .flat_map(|(to, sums)| sums.iter().map(move |sum| (to, sum)));
        let mut refused: Vec<_> = all.filter(|(_, sum)| sum.outcome == Outcome::Refused).collect();
        refused.sort_by_key(|(_, sum)| sum.order);
        let refusal = |(destination, sum): (&Destination, &Sum)| Refusal {
            destination: destination.to_string(),
            reason: sum.reason,
            count: sum.count,
            proposal: sum.proposal.clone(),
        };
        refused.into_iter().map(refusal).collect()
    }

    /// The rules that admit exactly what was reached, the framework's own routes aside: a ready allowlist, sorted.
    pub fn used(&self) -> Vec<Rule> {
        let sums = self.sums();
        let was_used = |sum: &Sum| sum.outcome == Outcome::Allowed && !sum.framework;
        let used = sums.by.iter().filter(|(_, sums)| sums.iter().any(was_used));
        let mut rules: Vec<Rule> = used.filter_map(|(destination, _)| destination.rule()).collect();
        rules.sort_by(|left, right| left.as_str().cmp(right.as_str()));
        rules.dedup();
        rules
    }

    /// Attempts that are in neither list, because a box asked for more different destinations than are kept.
    pub fn uncounted(&self) -> u64 {
        self.sums().uncounted
    }

    fn sums(&self) -> std::sync::MutexGuard<'_, Sums> {
        self.0.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, destination: &Destination, outcome: Outcome, verdict: &Verdict) {
        let mut sums = self.sums();
        let sums = &mut *sums;
        let known = sums.by.get_mut(destination);
        let same = |sum: &&mut Sum| sum.outcome == outcome && sum.reason == verdict.reason;
        if let Some(sum) = known.and_then(|known| known.iter_mut().find(same)) {
            sum.count += 1;
        } else if sums.len < MAX_SUMS {
            let sum = Sum {
                outcome,
                reason: verdict.reason,
                count: 1,
                order: sums.len,
                framework: verdict.framework,
                proposal: verdict.proposal.as_deref().cloned(),
            };
            sums.len += 1;
            sums.by.entry(destination.clone()).or_default().push(sum);
        } else {
            sums.uncounted += 1;
        }
    }

    fn publish(&self, event: impl FnOnce() -> EgressEvent) {
        let stream = self.0.stream.get().filter(|stream| stream.receiver_count() > 0);
        let traced = tracing::enabled!(target: "runtime_core::egress", tracing::Level::DEBUG);
        if stream.is_none() && !traced {
            return;
        }
        let event = event();
        if traced {
            tracing::debug!(
                target: "runtime_core::egress",
                proxy = %event.proxy,
                generation = event.generation,
                kind = ?event.kind,
                method = event.method,
                destination = event.destination,
                server_name = event.server_name.as_deref().map(|name| name.escape_debug().to_string()),
                outcome = ?event.outcome,
                reason = event.reason,
                rule = event.rule,
                status = event.status,
                sent = event.sent,
                received = event.received,
                duration = ?event.duration,
                "egress"
            );
        }
        if let Some(stream) = stream {
            // Nobody listening any more is no fault.
            let _ = stream.send(Arc::new(event));
        }
    }
}

impl fmt::Debug for EgressLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EgressLog({} sums)", self.sums().len)
    }
}

/// A decision that outlives the policy that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) permitted: bool,
    pub(super) reason: &'static str,
    framework: bool,
    rule: Option<String>,
    proposal: Option<Box<Rule>>,
}

impl Verdict {
    /// `asked` is what would have to be allowed.
    pub(super) fn new(decision: &Decision<'_>, asked: &Destination) -> Self {
        let proposal = decision
            .could_be_allowed()
            .then(|| asked.rule())
            .flatten()
            .map(Box::new);
        Self {
            permitted: decision.is_permitted(),
            reason: decision.as_str(),
            framework: matches!(decision, Decision::Route(_)),
            // A text that is no rule may hold a secret anywhere.
            rule: decision
                .rule()
                .filter(|rule| rule.problem().is_none())
                .map(|rule| rule.canonical().into_owned()),
            proposal,
        }
    }

    /// A refusal that no rule can change.
    pub(super) fn refused(reason: &'static str) -> Self {
        Self {
            permitted: false,
            reason,
            framework: false,
            rule: None,
            proposal: None,
        }
    }

    /// Permitted because the framework asked for it itself.
    pub(super) fn framework() -> Self {
        Self {
            permitted: true,
            reason: "framework_route",
            framework: true,
            rule: None,
            proposal: None,
        }
    }

    /// Whether it is the framework's own.
    pub(super) fn is_framework(&self) -> bool {
        self.framework
    }
}

/// An attempt that is going on. Dropping it tells the log how it ended.
pub(super) struct Attempt {
    log: EgressLog,
    proxy: Arc<str>,
    at: SystemTime,
    started: Instant,
    state: Mutex<Told>,
    pub(super) sent: std::sync::atomic::AtomicU64,
    pub(super) received: std::sync::atomic::AtomicU64,
}

struct Told {
    kind: EgressKind,
    generation: u64,
    method: Option<String>,
    destination: Option<Destination>,
    server_name: Option<String>,
    outcome: Outcome,
    verdict: Verdict,
    status: Option<u16>,
}

impl Attempt {
    pub(super) fn new(log: &EgressLog, proxy: &Arc<str>, kind: EgressKind) -> Self {
        Self {
            log: log.clone(),
            proxy: Arc::clone(proxy),
            at: SystemTime::now(),
            started: Instant::now(),
            state: Mutex::new(Told {
                kind,
                generation: 0,
                method: None,
                destination: None,
                server_name: None,
                outcome: Outcome::Failed,
                verdict: Verdict::refused("cancelled"),
                status: None,
            }),
            sent: 0.into(),
            received: 0.into(),
        }
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn method(&self, method: &str) {
        self.told().method = Some(method.to_owned());
    }

    pub(super) fn kind(&self, kind: EgressKind) {
        self.told().kind = kind;
    }

    pub(super) fn wants(&self, destination: &Destination, generation: u64) {
        let mut told = self.told();
        told.destination = Some(destination.clone());
        told.generation = generation;
    }

    pub(super) fn server_name(&self, name: Option<&str>) {
        self.told().server_name = name.map(str::to_owned);
    }

    /// Permitted by this; allowed once the other side is reached.
    pub(super) fn permitted(&self, verdict: Verdict) {
        self.told().verdict = verdict;
    }

    pub(super) fn allowed(&self) {
        self.told().outcome = Outcome::Allowed;
    }

    pub(super) fn refused(&self, verdict: Verdict) {
        let mut told = self.told();
        told.outcome = Outcome::Refused;
        told.verdict = verdict;
    }

    pub(super) fn failed(&self, reason: &'static str) {
        let mut told = self.told();
        told.outcome = Outcome::Failed;
        told.verdict.reason = reason;
    }

    pub(super) fn status(&self, status: u16) {
        self.told().status = Some(status);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let told = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (sent, received) = (*self.sent.get_mut(), *self.received.get_mut());
        // First, so that whoever hears of it finds it in the sums.
        if let Some(destination) = &told.destination {
            self.log.count(destination, told.outcome, &told.verdict);
        }
        self.log.publish(|| EgressEvent {
            proxy: self.proxy.to_string(),
            at: self.at,
            generation: told.generation,
            kind: told.kind,
            method: told.method.take(),
            destination: told.destination.as_ref().map(ToString::to_string),
            server_name: told.server_name.take(),
            outcome: told.outcome,
            reason: told.verdict.reason,
            rule: told.verdict.rule.clone(),
            proposal: told.verdict.proposal.as_deref().cloned(),
            status: told.status,
            sent,
            received,
            duration: self.started.elapsed(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::{Policy, Scheme};

    fn attempt(log: &EgressLog, host: &str, outcome: Outcome) {
        let policy = Policy::new(["good.example"], []).unwrap();
        let destination = Destination::new(Scheme::Https, host, 443);
        let attempt = Attempt::new(log, &Arc::from("box"), EgressKind::Tunnel);
        attempt.wants(&destination, 1);
        let verdict = Verdict::new(&policy.decide(&destination), &destination);
        match outcome {
            Outcome::Allowed => {
                attempt.permitted(verdict);
                attempt.allowed();
            }
            Outcome::Refused => attempt.refused(verdict),
            Outcome::Failed => attempt.failed("unreachable"),
        }
    }

    #[tokio::test]
    async fn an_attempt_is_told_with_its_rule_or_the_rule_that_it_lacked() {
        let log = EgressLog::default();
        let mut stream = log.subscribe();
        attempt(&log, "good.example", Outcome::Allowed);
        attempt(&log, "bad.example", Outcome::Refused);
        attempt(&log, "bad.example", Outcome::Refused);
        let event = stream.recv().await.unwrap();
        assert_eq!((event.outcome, event.reason), (Outcome::Allowed, "allowed_by_rule"));
        assert_eq!(event.rule.as_deref(), Some("good.example"));
        assert_eq!(event.destination.as_deref(), Some("https://good.example:443"));
        let event = stream.recv().await.unwrap();
        assert_eq!((event.outcome, event.reason), (Outcome::Refused, "not_allowed"));
        assert_eq!(event.proposal.as_ref().map(Rule::as_str), Some("https://bad.example"));
        let refused = log.refused();
        assert_eq!(refused.len(), 1);
        assert_eq!((refused[0].count, refused[0].reason), (2, "not_allowed"));
        assert_eq!(
            log.used().iter().map(Rule::as_str).collect::<Vec<_>>(),
            ["https://good.example"]
        );
    }

    #[tokio::test]
    async fn a_slow_reader_loses_the_oldest_and_is_told_how_many() {
        let log = EgressLog::default();
        let mut stream = log.subscribe();
        for _ in 0..STREAM + 10 {
            attempt(&log, "good.example", Outcome::Allowed);
        }
        let lost = stream.recv().await.unwrap_err();
        assert_eq!(lost, broadcast::error::RecvError::Lagged(10));
        assert!(stream.recv().await.is_ok());
    }

    #[test]
    fn the_sums_are_bounded_and_say_what_they_left_out() {
        let log = EgressLog::default();
        for number in 0..MAX_SUMS + 5 {
            attempt(&log, &format!("h{number}.example"), Outcome::Refused);
        }
        assert_eq!((log.refused().len(), log.uncounted()), (MAX_SUMS, 5));
        assert_eq!(log.refused()[7].destination, "https://h7.example:443");
    }

    #[test]
    fn attempts_reach_tracing() {
        let ((), text) = crate::test_log::captured(|| attempt(&EgressLog::default(), "bad.example", Outcome::Refused));
        assert!(
            text.contains("not_allowed") && text.contains("https://bad.example:443"),
            "{text}"
        );
    }
}
