//! What is logged, for the cases that look for secrets.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Metadata, Subscriber};
use tracing_core::span::Current;

/// Collects every span and event of one thread, at every level, as text.
#[derive(Clone, Default)]
pub(crate) struct Log {
    text: Arc<Mutex<String>>,
    spans: Arc<AtomicU64>,
    names: Arc<Mutex<HashMap<u64, &'static Metadata<'static>>>>,
    entered: Arc<Mutex<Vec<Id>>>,
}

impl Log {
    /// Collects what this thread logs until the guard is dropped.
    pub(crate) fn install(&self) -> DefaultGuard {
        // While there is but one subscriber, `tracing` asks the one of the thread that first reaches a call site
        // whether anybody listens there, and remembers the answer. A second one that lives on makes it ask all.
        static SECOND: OnceLock<Dispatch> = OnceLock::new();
        SECOND.get_or_init(|| Dispatch::new(Log::default()));
        tracing::subscriber::set_default(self.clone())
    }

    pub(crate) fn text(&self) -> String {
        lock(&self.text).clone()
    }

    fn write(&self, what: &str, fields: impl FnOnce(&mut dyn Visit)) {
        let mut text = lock(&self.text);
        text.push_str(what);
        fields(&mut Fields(&mut text));
        text.push('\n');
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, " {field}={value:?}");
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.write(span.metadata().name(), |fields| span.record(fields));
        let id = self.spans.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.names).insert(id, span.metadata());
        Id::from_u64(id)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        self.write("record", |fields| values.record(fields));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        self.write("event", |fields| event.record(fields));
    }

    fn enter(&self, span: &Id) {
        lock(&self.entered).push(span.clone());
    }

    fn exit(&self, _: &Id) {
        lock(&self.entered).pop();
    }

    fn current_span(&self) -> Current {
        let Some(id) = lock(&self.entered).last().cloned() else {
            return Current::none();
        };
        match lock(&self.names).get(&id.into_u64()) {
            Some(metadata) => Current::new(id, metadata),
            None => Current::none(),
        }
    }
}
