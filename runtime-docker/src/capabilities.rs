//! What boxes can do, by how they are reached.

use runtime_core::{Capabilities, Egress, Expose};

use crate::SERVICE_PORT;
use crate::config::{ContainerConfig, EngineKind, ExecMode};
use crate::connect::{self, Endpoint, Surroundings};

/// The largest argument or variable that Linux takes: 32 pages, the final NUL included.
const MAX_ARGUMENT: u64 = (128 << 10) - 1;

/// Argument and variables together, the image's variables and the kernel's own needs left aside.
const MAX_ARGV: u64 = 3 << 19;

/// Through the guest.
pub(crate) fn guest() -> Capabilities {
    let mut can = Capabilities::minimal();
    can.local = true;
    can.live_processes = true;
    can.stdin_eof = true;
    can.group_signals = true;
    can.kills_leftovers = true;
    can.kills_escaped = true;
    can.back_pressure = true;
    can.independent_streams = true;
    can.non_utf8_argv = true;
    can.non_utf8_paths = true;
    can.exit_signals = true;
    can.program_exit_signals = true;
    can.start_failures = true;
    can.oom_detection = true;
    can.max_argv_bytes = Some(MAX_ARGV);
    can.max_argument_bytes = Some(MAX_ARGUMENT);
    can.atomic_write = true;
    can.file_modes = true;
    can.symlinks = true;
    can.special_file_reads = true;
    can.private_filesystem = true;
    can.expose = Expose::AnyPort;
    can.egress = Egress::Enforced;
    can.gpu = true;
    can
}

/// Through the Engine API's exec. `host_processes`: the box's processes are processes of this host. An engine without an
/// endpoint is a service of our own that is not there yet.
pub(crate) fn engine(kind: EngineKind, host_processes: bool, endpoint: Option<&Endpoint>) -> Capabilities {
    let mut can = guest();
    can.local = endpoint.is_none_or(Endpoint::is_local);
    // What a program leaves behind is found through procfs.
    can.kills_leftovers = host_processes;
    // Both streams share a connection, and requests are JSON.
    can.independent_streams = false;
    can.non_utf8_argv = false;
    can.non_utf8_paths = false;
    // Engines fold signals into codes.
    can.exit_signals = false;
    can.program_exit_signals = false;
    // Docker tells what the kernel refuses to start as code 1, Podman says why.
    can.start_failures = kind == EngineKind::Podman;
    can.oom_detection = false;
    can.expose = match endpoint.map(Endpoint::published_at) {
        Some(None) => Expose::Nothing,
        None | Some(Some(_)) => Expose::Port(SERVICE_PORT),
    };
    can.egress = Egress::Unrestricted;
    can
}

/// Through the guest, for this configuration.
pub(crate) fn of_guest(config: &ContainerConfig) -> Capabilities {
    let mut can = guest();
    if config.container.is_some() {
        // What it is connected to is its owner's business.
        can.egress = Egress::Unrestricted;
    }
    can
}

/// What is promised before the box exists.
pub(crate) fn of(kind: EngineKind, config: &ContainerConfig) -> Capabilities {
    let guest_is_there = runtime_core::guest::availability().is_ok();
    match config.exec {
        ExecMode::Engine => {
            let found = connect::find(kind, config.host.as_deref(), &Surroundings::current());
            let endpoint = found.ok().flatten();
            let local = endpoint.as_ref().is_none_or(Endpoint::is_local);
            engine(kind, local, endpoint.as_ref())
        }
        ExecMode::Auto if !guest_is_there => engine(kind, true, None),
        ExecMode::Auto | ExecMode::Guest | ExecMode::Stdio => of_guest(config),
    }
}
