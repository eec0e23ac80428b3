//! The request that prepares an exec.

use bollard::models::ExecConfig;
use runtime_core::{Error, Exec, Result, StdinMode};

/// The variable by which a program and what it started are found in the box.
pub(crate) const MARKER: &str = "RUNTIME_SANDBOX_EXEC";

/// The request for this program, its processes marked.
///
/// # Errors
/// [`InvalidArgument`](runtime_core::ErrorKind::InvalidArgument) naming what is not UTF-8: the engine takes JSON.
pub(crate) fn request(exec: &Exec, marker: &str) -> Result<ExecConfig> {
    let text = |field: String, value: &std::ffi::OsStr| match value.to_str() {
        Some(value) => Ok(value.to_owned()),
        None => Err(Error::invalid_argument(field, "the engine takes UTF-8 only")),
    };
    let argv = exec.argv.iter().enumerate();
    let argv = argv.map(|(index, argument)| text(format!("argv[{index}]"), argument));
    let mut env = vec![format!("{MARKER}={marker}")];
    for (name, value) in exec.env.iter() {
        let field = format!("env.{}", name.to_string_lossy());
        env.push(format!("{}={}", text(field.clone(), name)?, text(field, value)?));
    }
    Ok(ExecConfig {
        attach_stdin: Some(exec.stdin == StdinMode::Piped),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        cmd: Some(argv.collect::<Result<_>>()?),
        env: Some(env),
        working_dir: Some(text("workdir".to_owned(), exec.workdir.as_os_str())?),
        ..ExecConfig::default()
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    use runtime_core::Env;
    use serde_json::json;

    use super::*;

    fn exec(argv: Vec<OsString>, env: Env) -> Exec {
        Exec {
            argv,
            env,
            workdir: "/app".into(),
            stdin: StdinMode::Null,
        }
    }

    #[test]
    fn a_program_is_asked_for_verbatim() {
        let exec = exec(vec!["echo".into(), "$HOME 'x'".into()], Env::from_iter([("A", "b=c")]));
        let request = serde_json::to_value(request(&exec, "m").expect("a request")).expect("JSON");
        assert_eq!(
            request,
            json!({
                "AttachStdin": false, "AttachStdout": true, "AttachStderr": true, "Cmd": ["echo", "$HOME 'x'"],
                "Env": ["RUNTIME_SANDBOX_EXEC=m", "A=b=c"], "WorkingDir": "/app",
            })
        );
    }

    #[test]
    fn what_json_cannot_carry_is_named() {
        let raw = || OsString::from_vec(vec![0xff]);
        let argv = request(&exec(vec!["a".into(), raw()], Env::new()), "m").expect_err("no UTF-8");
        assert_eq!(argv.field(), Some("argv[1]"));
        let env = request(&exec(vec!["a".into()], Env::from_iter([("X", raw())])), "m");
        assert_eq!(env.expect_err("no UTF-8").field(), Some("env.X"));
    }
}
