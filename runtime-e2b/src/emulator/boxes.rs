//! [`EmulatedBox`]: one box.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use runtime_core::names::random_id;
use serde_json::{Value, json};

use super::gateway::CurrentRules;
use super::place::Place;
use super::process::Processes;
use super::rules::Rules;
use super::state::{BoxInfo, State, text_of};
use super::watching::Watchers;

#[derive(Debug)]
pub(super) struct EmulatedBox {
    pub(super) id: String,
    pub(super) template_id: String,
    alias: String,
    pub(super) token: String,
    pub(super) env: BTreeMap<String, String>,
    pub(super) processes: Processes,
    pub(super) watchers: Watchers,
    envd_version: String,
    metadata: BTreeMap<String, String>,
    started: SystemTime,
    rules: CurrentRules,
    place: Mutex<Option<Arc<Place>>>,
    life: Mutex<Life>,
}

#[derive(Debug)]
struct Life {
    ends: Instant,
    paused: bool,
    auto_pause: bool,
    network: Option<Value>,
    allow_internet_access: Option<bool>,
}

/// What a create asks for.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) template: (String, String),
    pub(super) timeout: u64,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) auto_pause: bool,
    pub(super) allow_internet_access: Option<bool>,
    pub(super) network: Option<Value>,
    pub(super) rules: CurrentRules,
}

impl EmulatedBox {
    pub(super) fn new(state: &State, id: String, place: Place, order: Order) -> Arc<Self> {
        Arc::new(Self {
            template_id: order.template.0,
            alias: order.template.1,
            token: random_id(),
            env: order.env,
            processes: Processes::default(),
            watchers: Watchers::default(),
            envd_version: state.envd_version(),
            metadata: order.metadata,
            started: SystemTime::now(),
            rules: order.rules,
            place: Mutex::new(Some(Arc::new(place))),
            life: Mutex::new(Life {
                ends: Instant::now() + Duration::from_secs(order.timeout),
                paused: false,
                auto_pause: order.auto_pause,
                network: order.network,
                allow_internet_access: order.allow_internet_access,
            }),
            id,
        })
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it runs, while it does.
    pub(super) fn place(&self) -> Option<Arc<Place>> {
        if self.life().paused {
            return None;
        }
        self.place.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it with all that runs in it.
    pub(super) async fn end(&self) {
        let place = self.place.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.processes.close();
        if let Some(place) = place {
            place.end().await;
        }
    }

    pub(super) fn info(&self) -> BoxInfo {
        let life = self.life();
        BoxInfo {
            id: self.id.clone(),
            metadata: self.metadata.clone(),
            paused: life.paused,
            network: life.network.clone(),
            seconds_left: life
                .ends
                .saturating_duration_since(Instant::now())
                .as_secs_f64()
                .round() as u64,
        }
    }

    /// What create and connect answer.
    pub(super) fn created(&self) -> Value {
        json!({
            "sandboxID": self.id, "templateID": self.template_id, "clientID": "emulated", "alias": self.alias,
            "envdVersion": self.envd_version, "envdAccessToken": self.token, "domain": null
        })
    }

    /// What info and list answer.
    pub(super) fn described(&self) -> Value {
        let life = self.life();
        let left = life.ends.saturating_duration_since(Instant::now());
        let mut described = json!({
            "sandboxID": self.id, "templateID": self.template_id, "clientID": "emulated", "alias": self.alias,
            "envdVersion": self.envd_version, "envdAccessToken": self.token, "domain": null,
            "startedAt": text_of(self.started), "endAt": text_of(SystemTime::now() + left),
            "cpuCount": 2, "memoryMB": 1024, "diskSizeMB": 5120, "metadata": self.metadata,
            "state": if life.paused { "paused" } else { "running" },
        });
        if let Some(network) = &life.network {
            described["network"] = network.clone();
        }
        if let Some(allow) = life.allow_internet_access {
            described["allowInternetAccess"] = json!(allow);
        }
        described
    }

    pub(super) fn has_labels(&self, labels: &[(String, String)]) -> bool {
        labels
            .iter()
            .all(|(name, value)| self.metadata.get(name) == Some(value))
    }

    pub(super) fn is_paused(&self) -> bool {
        self.life().paused
    }

    /// Sets the end of its life; with `extend`, only ever later.
    pub(super) fn set_timeout(&self, seconds: u64, extend: bool) {
        let ends = Instant::now() + Duration::from_secs(seconds);
        let mut life = self.life();
        if !extend || ends > life.ends {
            life.ends = ends;
        }
    }

    /// Replaces the network policy. It holds for what is connected from now on.
    pub(super) fn set_network(&self, body: Value) {
        *self.rules.write().unwrap_or_else(PoisonError::into_inner) = Rules::of(Some(&body), None);
        self.life().network = Some(body);
    }

    /// Freezes it; whether it ran.
    pub(super) fn pause(&self) -> bool {
        {
            let mut life = self.life();
            if life.paused {
                return false;
            }
            life.paused = true;
        }
        if let Some(place) = &*self.place.lock().unwrap_or_else(PoisonError::into_inner) {
            place.signal(rustix::process::Signal::STOP);
        }
        self.processes.cut();
        true
    }

    /// Thaws it; whether it was paused.
    pub(super) fn resume(&self) -> bool {
        if !std::mem::replace(&mut self.life().paused, false) {
            return false;
        }
        if let Some(place) = &*self.place.lock().unwrap_or_else(PoisonError::into_inner) {
            place.signal(rustix::process::Signal::CONT);
        }
        true
    }

    /// Lives until its time is up.
    pub(super) async fn live(self: Arc<Self>, state: Arc<State>) {
        loop {
            let (ends, auto_pause, paused) = {
                let life = self.life();
                (life.ends, life.auto_pause, life.paused)
            };
            if state.find(&self.id).is_none() {
                return;
            }
            if Instant::now() >= ends && !paused {
                if auto_pause {
                    self.pause();
                } else {
                    state.delete(&self.id).await;
                    return;
                }
            }
            // Its end may be moved, so it is looked at often enough.
            let left = ends.saturating_duration_since(Instant::now());
            tokio::time::sleep(left.clamp(Duration::from_millis(20), Duration::from_millis(500))).await;
        }
    }
}
