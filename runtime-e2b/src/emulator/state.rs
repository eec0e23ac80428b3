//! What the emulator knows.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use runtime_core::names::random_hex;

use super::boxes::EmulatedBox;
use super::fault::Faults;
use super::gateway::Names;
use super::home::Home;
use super::place::{self, Isolation};
use super::templates::Templates;
use crate::wire::template::BuildState;

const MAX_REQUESTS: usize = 100_000;

/// A box of the emulator.
#[derive(Debug, Clone, PartialEq)]
pub struct BoxInfo {
    /// Its id.
    pub id: String,
    /// Its labels.
    pub metadata: BTreeMap<String, String>,
    /// Whether it is paused.
    pub paused: bool,
    /// The last body of its network policy.
    pub network: Option<serde_json::Value>,
    /// How many seconds it has to live.
    pub seconds_left: u64,
}

/// A build of the emulator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildInfo {
    /// Name of its template.
    pub name: String,
    /// Its image.
    pub image: String,
    /// Its cores.
    pub cpu_count: u32,
    /// Its memory.
    pub memory_mb: u32,
    /// How far it is.
    pub state: BuildState,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) api_key: String,
    pub(super) isolation: Isolation,
    /// Names with addresses of their own.
    pub(super) names: Names,
    pub(super) faults: Faults,
    pub(super) templates: Arc<Templates>,
    /// Where boxes have what is not in a namespace.
    home: Home,
    boxes: Mutex<Vec<Arc<EmulatedBox>>>,
    /// The labels of every box that was ever created.
    creations: Mutex<Vec<BTreeMap<String, String>>>,
    max_lifetime: AtomicU64,
    envd_version: RwLock<String>,
    requests: Mutex<VecDeque<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    pub(super) fn new() -> io::Result<Self> {
        let home = Home::new()?;
        Ok(Self {
            api_key: format!("e2b_{}", random_hex(40)),
            isolation: place::probe(home.dir()),
            names: Names::default(),
            faults: Faults::new(),
            templates: Arc::new(Templates::new()),
            home,
            boxes: Mutex::default(),
            creations: Mutex::default(),
            max_lifetime: AtomicU64::new(86_400),
            envd_version: RwLock::new("0.6.13".to_owned()),
            requests: Mutex::default(),
        })
    }

    pub(super) fn dir(&self) -> &std::path::Path {
        self.home.dir()
    }

    pub(super) fn note(&self, request: String) {
        let mut requests = lock(&self.requests);
        if requests.len() >= MAX_REQUESTS {
            requests.pop_front();
        }
        requests.push_back(request);
    }

    pub(super) fn requests(&self) -> Vec<String> {
        lock(&self.requests).iter().cloned().collect()
    }

    pub(super) fn boxes(&self) -> Vec<Arc<EmulatedBox>> {
        lock(&self.boxes).clone()
    }

    pub(super) fn find(&self, id: &str) -> Option<Arc<EmulatedBox>> {
        // The old form has the client's id behind the box's.
        let id = id.split('-').next().unwrap_or(id);
        lock(&self.boxes).iter().find(|found| found.id == id).cloned()
    }

    pub(super) fn add(&self, made: Arc<EmulatedBox>) {
        lock(&self.creations).push(made.info().metadata);
        lock(&self.boxes).push(made);
    }

    /// Deletes a box with all that runs in it; whether there was one.
    pub(super) async fn delete(&self, id: &str) -> bool {
        let Some(found) = self.find(id) else { return false };
        lock(&self.boxes).retain(|other| other.id != found.id);
        found.end().await;
        true
    }

    pub(super) async fn delete_all(&self) {
        for found in self.boxes() {
            self.delete(&found.id).await;
        }
    }

    pub(super) fn creations(&self) -> Vec<BTreeMap<String, String>> {
        lock(&self.creations).clone()
    }

    pub(super) fn max_lifetime(&self) -> u64 {
        self.max_lifetime.load(Ordering::SeqCst)
    }

    pub(super) fn set_max_lifetime(&self, seconds: u64) {
        self.max_lifetime.store(seconds, Ordering::SeqCst);
    }

    pub(super) fn envd_version(&self) -> String {
        self.envd_version.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_envd_version(&self, version: String) {
        *self.envd_version.write().unwrap_or_else(PoisonError::into_inner) = version;
    }
}

/// A moment as RFC 3339.
pub(super) fn text_of(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or_default();
    crate::wire::rfc3339(seconds, i32::try_from(since.subsec_nanos()).unwrap_or_default())
}

/// Now as RFC 3339.
pub(super) fn now_text() -> String {
    text_of(SystemTime::now())
}
