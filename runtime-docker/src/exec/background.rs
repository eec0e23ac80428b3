//! Servers in engine mode: started by an exec that belongs to the engine, their output in a file of the box.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use runtime_core::{Error, ErrorKind, Exec, Result, StdinMode};
use tokio::io::AsyncReadExt;

use super::process::Commands;
use runtime_core::feed::{message_error, outcome};

/// The log, then the program. Says `+` once the log is open and the program is there. Codes that are ours: 74 the log
/// cannot be, 76 it is no file, 126 and 127 as a shell's.
const SCRIPT: &str = r#"
    log=$1
    shift
    case $log in */*) parent=${log%/*};; *) parent=.;; esac
    [ -z "$parent" ] || mkdir -p -- "$parent" || exit 74
    if [ -e "$log" ] && ! [ -f "$log" ]; then echo 'Not a regular file' >&2; exit 76; fi
    : >>"$log" || exit 74
    case $1 in
        */*) [ -e "$1" ] || exit 127; [ -f "$1" ] && [ -x "$1" ] || exit 126;;
        *)
            found=
            rest=$PATH:
            while [ -n "$rest" ]; do
                dir=${rest%%:*}
                rest=${rest#*:}
                [ -f "${dir:-.}/$1" ] && found=126
                [ -f "${dir:-.}/$1" ] && [ -x "${dir:-.}/$1" ] && found=0 && break
            done
            [ "$found" = 0 ] || exit "${found:-127}";;
    esac
    echo +
    exec >>"$log" 2>&1 </dev/null
    exec "$@"
"#;

impl Commands {
    /// Starts a server; it lives until the container is removed.
    pub(crate) async fn spawn_background(self: &Arc<Self>, mut exec: Exec, log: &Path) -> Result<()> {
        let program = exec.argv.first().cloned().unwrap_or_default();
        let argv = ["sh", "-c", SCRIPT, "sh"].map(OsString::from);
        let given = std::mem::take(&mut exec.argv);
        exec.argv = argv.into_iter().chain([log.into()]).chain(given).collect();
        exec.stdin = StdinMode::Null;
        let (mut process, keep) = self.spawn_owned_by_engine(exec).await?;
        let mut said = [0];
        if let Some(stdout) = &mut process.stdout
            && stdout.read_exact(&mut said).await.is_ok()
            && &said == b"+"
        {
            keep();
            return Ok(());
        }
        let (status, _, stderr) = outcome(&mut process).await?;
        let program = program.display();
        Err(match status.code() {
            Some(127) => Error::new(
                ErrorKind::ProgramNotFound,
                format!("{program}: no such program in the box"),
            ),
            Some(126) => Error::new(
                ErrorKind::ProgramNotExecutable,
                format!("{program}: the box cannot execute it"),
            ),
            _ => message_error(&format!("opening the log {}", log.display()), &stderr),
        })
    }
}
