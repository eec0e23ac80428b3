//! What a box can do, as data: a plain struct that is known before anything is created.

use serde::Serialize;

/// Flags and limits of a provider, or of one box as configured.
///
/// What a box cannot do is refused before any I/O. The conformance suite picks its cases by these flags, and a flag
/// that is off although the case passes is a failure too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Capabilities {
    /// The box is on this machine: it and services of this host exchange loopback URLs without a public tunnel.
    pub local: bool,
    /// Programs with open stdin, stdout and stderr ([`View::spawn`](crate::View::spawn)).
    pub live_processes: bool,
    /// Closing stdin of a live process is EOF in the box.
    pub stdin_eof: bool,
    /// Signals reach the whole process group and not only its leader.
    pub group_signals: bool,
    /// What a program leaves behind in its process group is killed when the program ends.
    pub kills_leftovers: bool,
    /// What left its process group (a daemon) dies with the box at the latest.
    pub kills_escaped: bool,
    /// A pipe that nobody reads holds its writer back, so that a live process costs bounded memory.
    pub back_pressure: bool,
    /// Stdout and stderr of a live process are independent: an unread one never blocks the other. Where it is off, both
    /// share a connection, and an unread stream blocks the other once it has grown to some MiB.
    pub independent_streams: bool,
    /// Every byte value passes in argv and environment, not only UTF-8.
    pub non_utf8_argv: bool,
    /// Every byte value passes in file names, not only UTF-8.
    pub non_utf8_paths: bool,
    /// Death by a signal is told from an exit code above 128.
    pub exit_signals: bool,
    /// And for [`run_program`](crate::View::run_program) too, whose status may take another way.
    pub program_exit_signals: bool,
    /// What the kernel refuses to start (a script without its interpreter, a file of no format) is told from a program
    /// that exits with 126 or 127.
    pub start_failures: bool,
    /// A kill for lack of memory is told from an ordinary SIGKILL.
    pub oom_detection: bool,
    /// Largest argv and environment together, in bytes; `None` if only the kernel of the box knows.
    pub max_argv_bytes: Option<u64>,
    /// Largest single argument or variable, in bytes.
    pub max_argument_bytes: Option<u64>,
    /// How many live processes one box may have at once; `None` is no limit of ours.
    pub max_live_processes: Option<u32>,
    /// A write replaces the file in one step: no reader sees a part of it.
    pub atomic_write: bool,
    /// Permission bits can be set and are reported.
    pub file_modes: bool,
    /// Symbolic links survive the transfer of a directory tree.
    pub symlinks: bool,
    /// Reading a FIFO or a device with a limit is bounded instead of refused.
    pub special_file_reads: bool,
    /// The box sees the environment of this host (without API keys) below the sandbox's own variables.
    pub inherits_host_env: bool,
    /// Files outside the workdir are private to the box.
    pub private_filesystem: bool,
    /// Which ports can be reached from outside.
    pub expose: Expose,
    /// What can be said about outgoing traffic.
    pub egress: Egress,
    /// The box can be paused and resumed.
    pub pause: bool,
    /// GPUs can be asked for.
    pub gpu: bool,
    /// The provider deletes the box by itself after at most this many seconds.
    pub max_lifetime_seconds: Option<u64>,
}

/// Which ports of a box can be reached from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Expose {
    /// None.
    Nothing,
    /// Only this one, declared when the box is created.
    Port(u16),
    /// Any.
    AnyPort,
}

/// Who enforces a network policy, and where it has holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Egress {
    /// Nobody: a policy is refused.
    Unrestricted,
    /// The box has no way out but a proxy and relays of ours.
    Enforced,
    /// The provider enforces it, with the named exceptions.
    EnforcedByProvider {
        /// Traffic that gets out although the policy does not allow it, in words.
        exceptions: &'static str,
    },
}

impl Capabilities {
    /// A box that can do nothing but run programs to their end. Providers switch on what they have.
    pub const fn minimal() -> Self {
        Self {
            local: false,
            live_processes: false,
            stdin_eof: false,
            group_signals: false,
            kills_leftovers: false,
            kills_escaped: false,
            back_pressure: false,
            independent_streams: false,
            non_utf8_argv: false,
            non_utf8_paths: false,
            exit_signals: false,
            program_exit_signals: false,
            start_failures: false,
            oom_detection: false,
            max_argv_bytes: None,
            max_argument_bytes: None,
            max_live_processes: None,
            atomic_write: false,
            file_modes: false,
            symlinks: false,
            special_file_reads: false,
            inherits_host_env: false,
            private_filesystem: false,
            expose: Expose::Nothing,
            egress: Egress::Unrestricted,
            pause: false,
            gpu: false,
            max_lifetime_seconds: None,
        }
    }

    /// Whether a network policy can be applied.
    pub fn restrictable(&self) -> bool {
        !matches!(self.egress, Egress::Unrestricted)
    }
}
