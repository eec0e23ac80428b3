//! From a step that failed to what is missing on this machine, and the command that would bring it.

use std::fmt;
use std::fs;

use crate::error::{Error, ErrorKind};

const EPERM: i32 = 1;
const EACCES: i32 = 13;
const ENOSPC: i32 = 28;
const ENOSYS: i32 = 38;

/// Why boxes of namespaces cannot be made here.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unavailable {
    /// What is missing, in words.
    pub reason: String,
    /// The command that would bring it, where one is known.
    pub fix: Option<String>,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        match &self.fix {
            Some(fix) => write!(f, "; to change that: {fix}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Unavailable {}

/// A step of making a box that failed.
#[derive(Debug)]
pub(super) struct StepFailed {
    pub(super) step: String,
    pub(super) errno: i32,
    pub(super) text: String,
}

impl fmt::Display for StepFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for StepFailed {}

impl StepFailed {
    /// What the guest's last words say, if they are of this kind.
    pub(super) fn parse(words: &str) -> Option<Self> {
        let line = words
            .lines()
            .find_map(|line| Some(line.split_once(crate::guest::plan::FAILURE_PREFIX)?.1))?;
        let mut parts = line.splitn(3, ':');
        Some(Self {
            step: parts.next()?.to_owned(),
            errno: parts.next()?.parse().ok()?,
            text: parts.next()?.to_owned(),
        })
    }

    /// The error for the owner of the box.
    pub(super) fn into_error(self) -> Error {
        let field = match &*self.step {
            "mountpoint" | "mount" => Some("expose_paths"),
            "overlay" | "source" => Some("root"),
            _ => None,
        };
        if let (Some(field), false) = (field, is_refusal(self.errno)) {
            let message = format!("the box cannot be built: {}", self.text);
            return Error::invalid_config(field, message).with_source(self);
        }
        let found = diagnose(&self, &read);
        Error::unsupported(format!("a box of namespaces cannot be made: {found}"))
            .with_field("isolation")
            .with_source(self)
    }
}

fn is_refusal(errno: i32) -> bool {
    matches!(errno, EPERM | EACCES | ENOSPC | ENOSYS)
}

/// What keeps boxes from being made, from the error of making one.
pub(super) fn of(error: &Error) -> Unavailable {
    let step = std::error::Error::source(error).and_then(|source| source.downcast_ref::<StepFailed>());
    match step {
        Some(step) => diagnose(step, &read),
        None => Unavailable {
            reason: match error.kind() {
                ErrorKind::Unsupported => error.message().to_owned(),
                _ => error.to_string(),
            },
            fix: None,
        },
    }
}

fn read(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// `setting` reads a file of the kernel's; `None` if there is none.
fn diagnose(failed: &StepFailed, setting: &dyn Fn(&str) -> Option<String>) -> Unavailable {
    let known = |reason: &str, fix: &str| Unavailable {
        reason: format!("{reason} ({})", failed.text.trim()),
        fix: Some(fix.to_owned()),
    };
    let is = |path: &str, value: &str| setting(path).as_deref() == Some(value);
    if failed.errno == ENOSYS {
        return Unavailable {
            reason: format!("the kernel is older than 5.12 ({})", failed.text.trim()),
            fix: None,
        };
    }
    if failed.step == "proc" && is_refusal(failed.errno) {
        return known(
            "this process is in a container whose engine covers parts of /proc, so the kernel allows no fresh one",
            "start that container with --security-opt systempaths=unconfined (Docker) or --security-opt unmask=ALL \
             (Podman)",
        );
    }
    if is("/proc/sys/user/max_user_namespaces", "0") {
        return known(
            "user namespaces are switched off",
            "sudo sysctl -w user.max_user_namespaces=15000",
        );
    }
    if is("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        return known(
            "user namespaces are switched off for ordinary users",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        );
    }
    if is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") && is_refusal(failed.errno) {
        return known(
            "AppArmor keeps ordinary users from using the namespaces that they make",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        );
    }
    match (&*failed.step, failed.errno) {
        (_, ENOSPC) => known(
            "there are as many namespaces as the kernel allows",
            "sudo sysctl -w user.max_user_namespaces=15000 user.max_net_namespaces=15000",
        ),
        ("user" | "pid" | "namespaces" | "map" | "private", EPERM | EACCES) => known(
            "this process may not make namespaces, as in a container with its engine's usual filter",
            "start that container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined",
        ),
        (step, _) => Unavailable {
            reason: format!("the step `{step}` failed: {}", failed.text.trim()),
            fix: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fix(step: &str, errno: i32, settings: &[(&str, &str)]) -> Option<String> {
        let words = format!("noise\nsandbox guest: isolation:{step}:{errno}:a thing: it failed\n");
        let failed = StepFailed::parse(&words).expect("of our kind");
        assert_eq!(
            (&*failed.step, failed.errno, &*failed.text),
            (step, errno, "a thing: it failed")
        );
        let setting = |path: &str| {
            let found = settings.iter().find(|(name, _)| path.ends_with(name));
            found.map(|(_, value)| (*value).to_owned())
        };
        diagnose(&failed, &setting).fix
    }

    #[test]
    fn every_known_obstacle_has_its_remedy() {
        for (step, errno, settings, wanted) in [
            (
                "user",
                28,
                &[("max_user_namespaces", "0")][..],
                "user.max_user_namespaces",
            ),
            (
                "user",
                1,
                &[("unprivileged_userns_clone", "0")],
                "kernel.unprivileged_userns_clone=1",
            ),
            (
                "pid",
                1,
                &[("apparmor_restrict_unprivileged_userns", "1")],
                "apparmor_restrict_unprivileged_userns=0",
            ),
            ("namespaces", 28, &[], "max_net_namespaces"),
            ("user", 1, &[], "seccomp=unconfined"),
            (
                "proc",
                1,
                &[("apparmor_restrict_unprivileged_userns", "0")],
                "systempaths=unconfined",
            ),
        ] {
            let fix = fix(step, errno, settings).expect(step);
            assert!(fix.contains(wanted), "{step}: {fix}");
        }
        assert_eq!(fix("narrow", 38, &[]), None);
        assert_eq!(fix("loopback", 5, &[]), None);
        assert!(StepFailed::parse("sandbox guest: something else").is_none());
    }

    #[test]
    fn what_the_configuration_caused_names_its_field() {
        let failed = |step: &str, errno| StepFailed {
            step: step.to_owned(),
            errno,
            text: "x".to_owned(),
        };
        let error = failed("mount", 20).into_error();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::InvalidConfig, Some("expose_paths"))
        );
        let error = failed("user", 1).into_error();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::Unsupported, Some("isolation"))
        );
        assert!(of(&error).reason.contains("namespaces") && of(&error).fix.is_some());
    }
}
