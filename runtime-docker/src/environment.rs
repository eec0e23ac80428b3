//! What programs find in their environment: the image's variables, and loopback past any proxy.

use std::ffi::OsStr;

use runtime_core::Env;

use crate::config::EngineKind;

/// Both spellings that programs look for.
pub(crate) const NO_PROXY: [&str; 2] = ["NO_PROXY", "no_proxy"];

/// Never to be reached through a proxy: servers beside the program, and this host.
const DIRECT: [&str; 3] = ["localhost", "127.0.0.1", "host.docker.internal"];

/// `NAME=value` lines as an environment.
pub(crate) fn parse(lines: &[String]) -> Env {
    lines.iter().filter_map(|line| line.split_once('=')).collect()
}

/// What an exec of the engine has besides the caller's variables. `HOME` is the user's and comes later.
pub(crate) fn base(kind: EngineKind, image: &Env, id: &str) -> Env {
    let hostname: String = id.chars().take(12).collect();
    let mut own = Env::from_iter([("HOSTNAME", hostname.as_str())]);
    if kind == EngineKind::Podman {
        own.set("container", "podman");
    }
    own.layered(image)
}

/// The hosts that are reached without a proxy: the image's and the caller's, in order, and loopback.
pub(crate) fn no_proxy(image: &Env, caller: &Env) -> String {
    let mut hosts: Vec<&str> = Vec::new();
    let given = [image, caller]
        .into_iter()
        .flat_map(|env| NO_PROXY.iter().filter_map(|name| env.get(name)));
    for host in given
        .filter_map(OsStr::to_str)
        .flat_map(|value| value.split(','))
        .chain(DIRECT)
    {
        let host = host.trim();
        if !host.is_empty() && !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    hosts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_direct_whatever_the_image_and_the_caller_say() {
        let none = Env::new();
        assert_eq!(no_proxy(&none, &none), "localhost,127.0.0.1,host.docker.internal");
        let image = Env::from_iter([("no_proxy", "intra, ,b"), ("NO_PROXY", "a")]);
        let caller = Env::from_iter([("NO_PROXY", "c,a,localhost")]);
        assert_eq!(
            no_proxy(&image, &caller),
            "a,intra,b,c,localhost,127.0.0.1,host.docker.internal"
        );
    }

    #[test]
    fn the_images_variables_win_over_the_engines() {
        let image = parse(&[
            "PATH=/bin".into(),
            "HOSTNAME=mine".into(),
            "EMPTY=".into(),
            "odd".into(),
        ]);
        let base = base(EngineKind::Podman, &image, "0123456789abcdef");
        let all: Vec<_> = base
            .iter()
            .map(|(name, value)| format!("{}={}", name.display(), value.display()))
            .collect();
        assert_eq!(all, ["EMPTY=", "HOSTNAME=mine", "PATH=/bin", "container=podman"]);
    }
}
