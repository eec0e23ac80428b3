//! From a spawn request to a running program.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use crate::files::{self, EINVAL, Failure};
use crate::frame::{List, Stdio, Step, User};
use crate::hand::Hand;
use crate::passwd;
use crate::seccomp::{self, Strictness};
use crate::streams::Streams;
use crate::sys::{self, ChildStack, Plan, RLimit, SockFilter};

/// Where programs without a slash in their name are looked for when nothing sets `PATH`; the engines' default.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const EPERM: i32 = 1;
const ENOSYS: i32 = 38;
const ETXTBSY: i32 = 26;
/// How often starting a file that somebody still writes to is tried again.
const BUSY_ATTEMPTS: u32 = 20;

/// A request to start a program.
pub(crate) struct Spawn {
    pub(crate) argv: List<Vec<u8>>,
    pub(crate) env: List<(Vec<u8>, Vec<u8>)>,
    pub(crate) cwd: Vec<u8>,
    pub(crate) user: Option<User>,
    pub(crate) stdio: [Stdio; 3],
}

/// What all programs of this box have in common.
pub(crate) struct Spawner {
    env: BTreeMap<Vec<u8>, Vec<u8>>,
    filter: Option<Vec<SockFilter>>,
    /// The box is of this program's own making: the stricter filter, always.
    isolated: bool,
    limits: Vec<(i32, RLimit)>,
    /// Who starts programs on the host's network, in a box that may have it.
    hand: Option<Hand>,
    /// Programs start there.
    outside: bool,
    oom_score_adj: CString,
    descriptor_limit: Option<RLimit>,
    null: OwnedFd,
    stack: ChildStack,
}

impl Spawner {
    pub(crate) fn new(env: BTreeMap<Vec<u8>, Vec<u8>>, null: OwnedFd, descriptor_limit: Option<RLimit>) -> Self {
        Self {
            env,
            filter: None,
            isolated: false,
            limits: Vec::new(),
            hand: None,
            outside: false,
            oom_score_adj: c"0".to_owned(),
            descriptor_limit,
            null,
            stack: ChildStack::new(),
        }
    }

    /// What programs of a box of the guest's own making have in common.
    pub(crate) fn isolate(&mut self, limits: &[(u32, u64)], hand: Option<Hand>) -> io::Result<()> {
        let filter = seccomp::filter(Strictness::Box);
        self.filter = Some(filter.ok_or_else(|| io::Error::other("there is no filter for this architecture"))?);
        self.isolated = true;
        self.limits = both(limits);
        self.hand = hand;
        Ok(())
    }

    /// Has programs start on the host's network from now on, or not. The keeper must have been told the same.
    pub(crate) fn go_outside(&mut self, outside: bool) -> Result<(), Failure> {
        self.outside = false;
        let may = match &mut self.hand {
            Some(hand) => hand.may_start()?,
            None if outside => return Err((Step::Only, ENOSYS)),
            None => false,
        };
        if may != outside {
            return Err((Step::Only, EPERM));
        }
        self.outside = outside;
        Ok(())
    }

    /// Whether they do.
    pub(crate) fn is_outside(&self) -> bool {
        self.outside
    }

    pub(crate) fn configure(
        &mut self,
        env: Option<List<(Vec<u8>, Vec<u8>)>>,
        restrict: bool,
        oom_score_adj: i32,
    ) -> Result<(), Failure> {
        let strictness = match (self.isolated, restrict) {
            (true, _) => Some(Strictness::Box),
            (false, true) => Some(Strictness::Network),
            (false, false) => None,
        };
        let filter = match strictness {
            Some(strictness) => Some(seccomp::filter(strictness).ok_or((Step::Filter, ENOSYS))?),
            None => None,
        };
        self.oom_score_adj = CString::new(oom_score_adj.clamp(-1000, 1000).to_string()).unwrap_or_default();
        self.filter = filter;
        if let Some(env) = env {
            self.env = env.0.into_iter().collect();
        }
        Ok(())
    }

    /// Starts a program whose standard streams are among `passed` or become streams of the link.
    pub(crate) fn spawn(&mut self, spawn: Spawn, passed: Vec<OwnedFd>, streams: &mut Streams) -> Result<i32, Failure> {
        let mut env = self.env.clone();
        env.extend(spawn.env.0);
        let uid = spawn.user.as_ref().map_or_else(sys::user_id, |user| user.uid);
        env.entry(b"PATH".to_vec()).or_insert_with(|| DEFAULT_PATH.to_vec());
        env.entry(b"HOME".to_vec()).or_insert_with(|| passwd::home(uid));

        let argv = c_strings(spawn.argv.0)?;
        let program = argv.first().ok_or((Step::Exec, EINVAL))?;
        let candidates = candidates(program, env.get(&b"PATH"[..]).map_or(DEFAULT_PATH, Vec::as_slice))?;
        let cwd = c_string(spawn.cwd)?;
        let env = c_strings(env.into_iter().map(|(mut name, value)| {
            name.push(b'=');
            name.extend(value);
            name
        }))?;

        let owner = spawn.user.as_ref().map(|user| (user.uid, user.gid));
        let mut ends = Ends::default();
        let base = files::path(cwd.to_bytes());
        let mut passed = passed.into_iter();
        for (index, stdio) in (0..).zip(&spawn.stdio) {
            ends.connect(index, stdio, &mut passed, base, owner)?;
        }
        let null = self.null.as_fd();
        let plan = Plan {
            candidates: &candidates,
            argv: &argv,
            env: &env,
            cwd: &cwd,
            user: spawn.user.as_ref().map(|user| (user.uid, user.gid, &user.groups.0[..])),
            stdio: ends.child.each_ref().map(|end| end.as_ref().map_or(null, AsFd::as_fd)),
            oom_score_adj: &self.oom_score_adj,
            filter: self.filter.as_deref(),
            descriptor_limit: self.descriptor_limit,
            limits: &self.limits,
        };
        let mut attempt = 0;
        let pid = loop {
            let started = match &mut self.hand {
                Some(hand) if self.outside => hand.spawn(&plan),
                _ => sys::spawn(&plan, &mut self.stack),
            };
            match started {
                // Whoever has just written it through a descriptor that the guest passed may have forked meanwhile, and
                // the fork holds that descriptor until it executes.
                Err((Step::Exec, ETXTBSY)) if attempt < BUSY_ATTEMPTS => {
                    attempt += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                started => break started?,
            }
        };
        for (id, reader, writer) in ends.ours {
            if let Err(errno) = streams.add(id, reader, writer) {
                // It started, but cannot be connected: it must not run.
                let _ = sys::send_signal(-pid, sys::SIGKILL);
                return Err((Step::Stdio, errno));
            }
        }
        Ok(pid)
    }
}

/// Limits by their number, soft and hard the same.
pub(crate) fn both(limits: &[(u32, u64)]) -> Vec<(i32, RLimit)> {
    let both = |value| RLimit {
        soft: value,
        hard: value,
    };
    limits
        .iter()
        .map(|&(number, value)| (number as i32, both(value)))
        .collect()
}

/// The two sides of the standard streams.
#[derive(Default)]
struct Ends {
    child: [Option<OwnedFd>; 3],
    ours: Vec<(u32, Option<OwnedFd>, Option<OwnedFd>)>,
}

impl Ends {
    fn connect(
        &mut self,
        index: usize,
        stdio: &Stdio,
        passed: &mut impl Iterator<Item = OwnedFd>,
        base: &Path,
        owner: Option<(u32, u32)>,
    ) -> Result<(), Failure> {
        let fail = |error: io::Error| (Step::Stdio, error.raw_os_error().unwrap_or(EINVAL));
        let end = match stdio {
            Stdio::Null => None,
            Stdio::Passed => Some(passed.next().ok_or((Step::Stdio, EINVAL))?),
            Stdio::Stream(id) => {
                let (reader, writer) = io::pipe().map_err(fail)?;
                if index == 0 {
                    self.ours.push((*id, None, Some(writer.into())));
                    Some(reader.into())
                } else {
                    self.ours.push((*id, Some(reader.into()), None));
                    Some(writer.into())
                }
            }
            Stdio::Append(path) => {
                let file = files::open_log(&base.join(files::path(path)), owner);
                Some(file.map_err(|(_, errno)| (Step::Stdio, errno))?.into())
            }
        };
        if let Some(slot) = self.child.get_mut(index) {
            *slot = end;
        }
        Ok(())
    }
}

fn c_string(bytes: Vec<u8>) -> Result<CString, Failure> {
    CString::new(bytes).map_err(|_| (Step::Exec, EINVAL))
}

fn c_strings(list: impl IntoIterator<Item = Vec<u8>>) -> Result<Vec<CString>, Failure> {
    list.into_iter().map(c_string).collect()
}

/// Paths at which the program may be: itself if it has a slash, else one for each directory of `PATH`.
fn candidates(program: &CString, path: &[u8]) -> Result<Vec<CString>, Failure> {
    let name = program.to_bytes();
    if name.contains(&b'/') {
        return Ok(vec![program.clone()]);
    }
    if name.is_empty() {
        return Err((Step::Exec, 2));
    }
    c_strings(path.split(|byte| *byte == b':').map(|directory| {
        let mut candidate = if directory.is_empty() {
            b".".to_vec()
        } else {
            directory.to_vec()
        };
        candidate.push(b'/');
        candidate.extend(name);
        candidate
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_looked_for_in_path_unless_it_has_a_slash() {
        let found = |program: &str, path: &str| -> Vec<String> {
            candidates(&CString::new(program).unwrap(), path.as_bytes())
                .unwrap()
                .into_iter()
                .map(|candidate| candidate.into_string().unwrap())
                .collect()
        };
        assert_eq!(found("ls", "/bin:/usr/bin"), ["/bin/ls", "/usr/bin/ls"]);
        assert_eq!(found("./ls", "/bin"), ["./ls"]);
        assert_eq!(found("ls", ":/bin"), ["./ls", "/bin/ls"]);
        assert_eq!(candidates(&CString::default(), b"/bin"), Err((Step::Exec, 2)));
    }
}
