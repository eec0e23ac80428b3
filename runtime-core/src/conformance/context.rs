//! [`Context`]: what a case has at hand.

use std::fmt::Debug;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::capability::Capabilities;
use crate::command::{Command, Output};
use crate::config::RuntimeConfig;
use crate::conformance::target::{BoxRef, Target};
use crate::conformance::verdict::{Failure, Verdict};
use crate::error::{Error, ErrorKind};
use crate::sandbox::{Builder, Sandbox};
use crate::view::View;

/// The target, the boxes that the case makes, and a scratch directory of this host. Cheap to clone.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    target: Arc<dyn Target>,
    boxes: Mutex<Vec<BoxRef>>,
    scratch: TempDir,
}

impl Context {
    pub(crate) fn new(target: Arc<dyn Target>) -> Result<Self, Failure> {
        Ok(Self(Arc::new(Inner {
            target,
            boxes: Mutex::new(Vec::new()),
            scratch: tempfile::Builder::new().prefix("conformance-").tempdir()?,
        })))
    }

    /// The provider under test.
    pub fn target(&self) -> &dyn Target {
        &*self.0.target
    }

    /// What its boxes declare.
    pub fn capabilities(&self) -> Capabilities {
        self.0.target.config().capabilities()
    }

    /// A directory of this host, removed with the case.
    pub fn scratch(&self) -> &Path {
        self.0.scratch.path()
    }

    /// The builder of a box with a name of its own.
    pub fn builder(&self) -> Builder {
        self.builder_named(format!("conf-{}", crate::names::random_hex(16)))
    }

    /// The builder of a box of this name.
    pub fn builder_named(&self, name: impl Into<String>) -> Builder {
        self.builder_with(name.into(), self.0.target.config())
    }

    /// The builder of a box of this configuration.
    pub fn builder_of(&self, config: Box<dyn RuntimeConfig>) -> Builder {
        self.builder_with(format!("conf-{}", crate::names::random_hex(16)), config)
    }

    fn builder_with(&self, name: String, config: Box<dyn RuntimeConfig>) -> Builder {
        self.boxes().push(BoxRef {
            name: name.clone(),
            id: None,
        });
        Sandbox::builder(config).name(name).cache(self.0.target.cache())
    }

    /// A fresh box.
    ///
    /// # Errors
    /// What the provider says.
    pub async fn sandbox(&self) -> Result<Sandbox, Error> {
        let sandbox = self.builder().provision().await?;
        self.learn(&sandbox);
        Ok(sandbox)
    }

    /// Remembers the id of a box.
    pub fn learn(&self, view: &View) {
        let mut boxes = self.boxes();
        if let Some(known) = boxes.iter_mut().find(|known| known.name == view.name()) {
            known.id = view.id();
        }
    }

    /// A box of this case, as the target's hooks know it.
    pub fn box_ref(&self, view: &View) -> BoxRef {
        BoxRef {
            name: view.name().to_owned(),
            id: view.id(),
        }
    }

    fn boxes(&self) -> MutexGuard<'_, Vec<BoxRef>> {
        self.0.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nothing is left of the boxes of this case.
    ///
    /// # Errors
    /// What is left when patience ends.
    pub async fn all_gone(&self, patience: Duration) -> Verdict {
        let boxes = self.boxes().clone();
        if boxes.is_empty() {
            return Ok(());
        }
        let deadline = Instant::now() + patience;
        loop {
            let left = self.0.target.leftovers(&boxes).await.map_err(Failure::new)?;
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Failure::new(format_args!("left behind: {}", left.join("; "))));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Runs `work` for each item, at most `limit` at once.
///
/// # Errors
/// The first that failed; the others are dropped.
pub(crate) async fn each<T, F>(
    limit: usize,
    items: impl IntoIterator<Item = T>,
    mut work: impl FnMut(T) -> F,
) -> Verdict
where
    F: Future<Output = Verdict> + Send + 'static,
{
    let mut running = JoinSet::new();
    for item in items {
        if running.len() >= limit
            && let Some(ended) = running.join_next().await
        {
            ended??;
        }
        running.spawn(work(item));
    }
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(())
}

/// Runs a shell script that must exit with 0, and returns what it printed.
pub(crate) async fn sh(view: &View, script: impl AsRef<str>) -> Result<String, Failure> {
    let script = script.as_ref();
    let output = view.run(Command::shell(script)).await?;
    succeeded(&output, script)?;
    Ok(String::from_utf8(output.stdout.bytes.to_vec())?)
}

/// The output must be of a program that exited with 0.
#[track_caller]
pub(crate) fn succeeded(output: &Output, what: &str) -> Verdict {
    if output.success() {
        return Ok(());
    }
    Err(Failure::new(format_args!("`{what}` failed: {output:?}")))
}

/// The call must fail with this kind. Returns its error.
#[track_caller]
pub(crate) fn refused<T: Debug>(result: Result<T, Error>, kind: ErrorKind) -> Result<Error, Failure> {
    match result {
        Err(error) if error.kind() == kind => Ok(error),
        Err(error) => Err(Failure::new(format_args!("want an error of kind {kind}, got: {error}"))),
        Ok(value) => Err(Failure::new(format_args!(
            "want an error of kind {kind}, got {}",
            super::verdict::shown(&value)
        ))),
    }
}

/// The call must fail with this kind, naming this field.
#[track_caller]
pub(crate) fn refused_field<T: Debug>(
    result: Result<T, Error>,
    kind: ErrorKind,
    field: &str,
) -> Result<Error, Failure> {
    let error = refused(result, kind)?;
    if error.field() == Some(field) {
        return Ok(error);
    }
    Err(Failure::new(format_args!(
        "want an error that names `{field}`, got {:?}: {error}",
        error.field()
    )))
}

/// Tells whether programs still run, without polling: they hold a FIFO open, and a reader of it sees the end when the
/// last of them is gone (a zombie is).
pub(crate) struct Pulse(PathBuf);

impl Pulse {
    /// Makes the FIFO.
    pub(crate) async fn new(view: &View) -> Result<Self, Failure> {
        let path = view.workdir().join(format!(".pulse-{}", crate::names::random_hex(8)));
        let output = view.run(Command::new(["mkfifo"]).arg(&path)).await?;
        succeeded(&output, "mkfifo")?;
        Ok(Self(path))
    }

    /// What a script starts with to be counted, with all its children.
    pub(crate) fn hold(&self) -> String {
        format!("exec 9<>'{}'; ", self.0.display())
    }

    /// Every program that was counted must be gone, now or within a generous while.
    #[track_caller]
    pub(crate) fn gone<'a>(&'a self, view: &'a View) -> impl Future<Output = Verdict> + 'a {
        let place = std::panic::Location::caller();
        async move {
            match self.listen(view, Duration::from_secs(60)).await? {
                true => Ok(()),
                false => Err(Failure::new(format_args!(
                    "what was started still runs (asked at line {})",
                    place.line()
                ))),
            }
        }
    }

    /// Whether all programs end within `patience`.
    pub(crate) async fn listen(&self, view: &View, patience: Duration) -> Result<bool, Failure> {
        // Opened for both first, since opening for reading alone waits for a writer.
        let script = format!("exec 3<>'{0}'; exec 4<'{0}'; exec 3>&-; exec cat <&4", self.0.display());
        match view.run(Command::shell(script).timeout(patience)).await {
            Ok(output) => succeeded(&output, "cat").map(|()| true),
            Err(error) if error.kind() == ErrorKind::Timeout => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Polls `future` until it is ready or has asked to be woken `polls` times; then it is dropped.
pub(crate) async fn cut_short<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut left = polls;
    std::future::poll_fn(|cx| {
        if left == 0 {
            return std::task::Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
            std::task::Poll::Pending if left == 0 => std::task::Poll::Ready(None),
            std::task::Poll::Pending => std::task::Poll::Pending,
        }
    })
    .await
}
