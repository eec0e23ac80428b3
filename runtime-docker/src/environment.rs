//! What programs find in their environment besides the caller's variables.

use runtime_core::Env;

use crate::config::EngineKind;

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

#[cfg(test)]
mod tests {
    use super::*;

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
