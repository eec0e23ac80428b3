//! [`Case`]: one behaviour, and what it asks of a provider.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::capability::{Capabilities, Expose};
use crate::conformance::context::Context;
use crate::conformance::verdict::Verdict;

/// A flag of [`Capabilities`] that a case may need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Capability {
    /// [`Capabilities::local`].
    Local,
    /// [`Capabilities::live_processes`].
    LiveProcesses,
    /// [`Capabilities::stdin_eof`].
    StdinEof,
    /// [`Capabilities::group_signals`].
    GroupSignals,
    /// [`Capabilities::kills_leftovers`].
    KillsLeftovers,
    /// [`Capabilities::start_failures`].
    StartFailures,
    /// [`Capabilities::kills_escaped`].
    KillsEscaped,
    /// [`Capabilities::back_pressure`].
    BackPressure,
    /// [`Capabilities::non_utf8_argv`].
    NonUtf8Argv,
    /// [`Capabilities::exit_signals`].
    ExitSignals,
    /// [`Capabilities::atomic_write`].
    AtomicWrite,
    /// [`Capabilities::file_modes`].
    FileModes,
    /// [`Capabilities::symlinks`].
    Symlinks,
    /// [`Capabilities::special_file_reads`].
    SpecialFileReads,
    /// [`Capabilities::inherits_host_env`].
    InheritsHostEnv,
    /// [`Capabilities::private_filesystem`].
    PrivateFilesystem,
    /// [`Capabilities::expose`] is not [`Expose::Nothing`].
    Expose,
    /// [`Capabilities::expose`] is [`Expose::AnyPort`].
    ExposeAnyPort,
    /// [`Capabilities::egress`] is not [`Egress::Unrestricted`](crate::Egress::Unrestricted).
    Egress,
    /// [`Capabilities::pause`].
    Pause,
}

impl Capability {
    /// Whether a provider with these capabilities has it.
    pub fn is_in(self, capabilities: &Capabilities) -> bool {
        match self {
            Self::Local => capabilities.local,
            Self::LiveProcesses => capabilities.live_processes,
            Self::StdinEof => capabilities.stdin_eof,
            Self::GroupSignals => capabilities.group_signals,
            Self::KillsLeftovers => capabilities.kills_leftovers,
            Self::StartFailures => capabilities.start_failures,
            Self::KillsEscaped => capabilities.kills_escaped,
            Self::BackPressure => capabilities.back_pressure,
            Self::NonUtf8Argv => capabilities.non_utf8_argv,
            Self::ExitSignals => capabilities.exit_signals,
            Self::AtomicWrite => capabilities.atomic_write,
            Self::FileModes => capabilities.file_modes,
            Self::Symlinks => capabilities.symlinks,
            Self::SpecialFileReads => capabilities.special_file_reads,
            Self::InheritsHostEnv => capabilities.inherits_host_env,
            Self::PrivateFilesystem => capabilities.private_filesystem,
            Self::Expose => capabilities.expose != Expose::Nothing,
            Self::ExposeAnyPort => capabilities.expose == Expose::AnyPort,
            Self::Egress => capabilities.restrictable(),
            Self::Pause => capabilities.pause,
        }
    }

    /// Its name in reports, in `snake_case`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::LiveProcesses => "live_processes",
            Self::StdinEof => "stdin_eof",
            Self::GroupSignals => "group_signals",
            Self::KillsLeftovers => "kills_leftovers",
            Self::StartFailures => "start_failures",
            Self::KillsEscaped => "kills_escaped",
            Self::BackPressure => "back_pressure",
            Self::NonUtf8Argv => "non_utf8_argv",
            Self::ExitSignals => "exit_signals",
            Self::AtomicWrite => "atomic_write",
            Self::FileModes => "file_modes",
            Self::Symlinks => "symlinks",
            Self::SpecialFileReads => "special_file_reads",
            Self::InheritsHostEnv => "inherits_host_env",
            Self::PrivateFilesystem => "private_filesystem",
            Self::Expose => "expose",
            Self::ExposeAnyPort => "expose_any_port",
            Self::Egress => "egress",
            Self::Pause => "pause",
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

pub(crate) type Run = fn(Context) -> Pin<Box<dyn Future<Output = Verdict>>>;

/// What is tested of a gap that a provider declares.
#[derive(Clone, Copy)]
pub(crate) enum Gap {
    /// The case itself must not pass.
    CaseFails,
    /// This must pass instead: the call is refused, or does what a provider without the capability does.
    Probe(Run),
    /// Nothing: whether the case passes is chance there.
    Untested,
}

/// One behaviour that every provider has, or says that it lacks.
#[derive(Clone, Copy)]
pub struct Case {
    pub(crate) name: &'static str,
    pub(crate) needs: &'static [Capability],
    pub(crate) gap: Gap,
    pub(crate) deadline: Duration,
    pub(crate) alone: bool,
    pub(crate) run: Run,
}

impl Case {
    pub(crate) const fn new(name: &'static str, run: Run) -> Self {
        Self {
            name,
            needs: &[],
            gap: Gap::Untested,
            deadline: Duration::from_secs(60),
            alone: false,
            run,
        }
    }

    /// The case needs these, and must not pass without them.
    pub(crate) const fn needs(mut self, needs: &'static [Capability]) -> Self {
        self.needs = needs;
        self.gap = Gap::CaseFails;
        self
    }

    /// Without what the case needs, this must pass instead.
    pub(crate) const fn or_else(mut self, probe: Run) -> Self {
        self.gap = Gap::Probe(probe);
        self
    }

    /// Without what the case needs, nothing can be said.
    pub(crate) const fn gap_untested(mut self) -> Self {
        self.gap = Gap::Untested;
        self
    }

    pub(crate) const fn deadline(mut self, seconds: u64) -> Self {
        self.deadline = Duration::from_secs(seconds);
        self
    }

    /// Runs while no other case does: it is heavy.
    pub(crate) const fn alone(mut self) -> Self {
        self.alone = true;
        self
    }

    /// Its name: the room and the behaviour, such as `exec/exit-codes-0-to-255`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What a provider must have for it.
    pub fn capabilities(&self) -> &'static [Capability] {
        self.needs
    }

    /// How long it may take before it counts as hung.
    pub fn time_limit(&self) -> Duration {
        self.deadline
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .field("capabilities", &self.needs)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// A case from its name and an `async fn(Context) -> Verdict`.
macro_rules! case {
    ($name:literal, $run:path) => {
        $crate::conformance::case::Case::new($name, |context| Box::pin($run(context)))
    };
}

/// The probe of a gap, for [`Case::or_else`].
macro_rules! probe {
    ($run:path) => {
        |context| Box::pin($run(context))
    };
}

pub(crate) use {case, probe};
