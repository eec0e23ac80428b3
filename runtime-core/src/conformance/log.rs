//! What is logged, for the cases that look for secrets.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Metadata, Subscriber};

/// Collects every span and event, at every level, as text.
#[derive(Clone, Default)]
pub(crate) struct Log {
    text: Arc<Mutex<String>>,
    spans: Arc<AtomicU64>,
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
        self.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn write(&self, what: &str, fields: impl FnOnce(&mut dyn Visit)) {
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        text.push_str(what);
        fields(&mut Fields(&mut text));
        text.push('\n');
    }
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
        Id::from_u64(self.spans.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        self.write("record", |fields| values.record(fields));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        self.write("event", |fields| event.record(fields));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
