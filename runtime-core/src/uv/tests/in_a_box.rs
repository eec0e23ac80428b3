//! Real shells run the real preparation on this machine, with a `uv` of ours and nothing else to download with.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Stdio;

use tokio::sync::Semaphore;

use super::super::*;
use super::SOURCE;

/// Programs that a preparation may use and that every box has. What is not here does not exist.
const TOOLS: [&str; 9] = ["sh", "mv", "rm", "mkdir", "cat", "chmod", "mktemp", "basename", "cp"];

/// Writes its arguments down, makes an interpreter that tells what it was run with, and is noisy.
const FAKE_UV: &str = r#"#!/bin/sh
echo "$* offline=$UV_OFFLINE uv=$0" >>"$HOME/uv.log"
venv="$HOME/envs/$(basename "$3" .py)"
if [ "$1" = python ]; then venv="$HOME/envs/$(basename "$4" .py)"; fi
case "$1 $2" in
"sync --script")
    if [ -e "$HOME/uv-fails" ]; then
        cat "$HOME/uv-fails" >&2
        exit 2
    fi
    echo "Resolved 1 package"
    mkdir -p "$venv/bin"
    cat >"$venv/bin/python3" <<'EOF'
#!/bin/sh
echo "venv=$VIRTUAL_ENV"
echo "path=$PATH"
echo "install=$UV_INSTALL_DIR depth=$UV_RUN_RECURSION_DEPTH offline=$UV_OFFLINE"
for arg in "$@"; do echo "arg=$arg"; done
cat "$1"
EOF
    chmod 755 "$venv/bin/python3"
    ;;
"python find")
    echo "Using CPython 3.12"
    echo "$venv/bin/python3"
    ;;
*) exit 64 ;;
esac
"#;

const PERMITS: u32 = 1000;

/// A box that is a temporary directory of this machine.
struct LocalBox {
    dir: tempfile::TempDir,
    /// Commands wait here while a test holds the permits.
    gate: Semaphore,
    /// Gains a permit with every command that comes to the gate.
    arrived: Semaphore,
}

impl LocalBox {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("uv test ").tempdir().unwrap();
        let this = Self {
            dir,
            gate: Semaphore::new(PERMITS as usize),
            arrived: Semaphore::new(0),
        };
        fs::create_dir_all(this.home()).unwrap();
        fs::create_dir_all(this.tools()).unwrap();
        for tool in TOOLS {
            this.add_tool(tool);
        }
        this
    }

    fn with_uv() -> Self {
        let this = Self::new();
        this.add_program("uv", FAKE_UV);
        this
    }

    fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    fn tools(&self) -> PathBuf {
        self.dir.path().join("tools")
    }

    fn scripts_dir(&self) -> PathBuf {
        self.dir.path().join("scripts")
    }

    fn scripts(&self) -> Scripts {
        Scripts::new(self.scripts_dir())
    }

    fn add_tool(&self, name: &str) {
        let found = ["/usr/bin", "/bin"]
            .iter()
            .map(|dir| Path::new(dir).join(name))
            .find(|path| path.exists());
        symlink(found.expect(name), self.tools().join(name)).unwrap();
    }

    fn add_program(&self, name: &str, source: &str) {
        write_by_child(&self.tools().join(name), source.as_bytes(), 0o755).unwrap();
    }

    /// Writes down that it was called, then does `then`.
    fn add_installer(&self, name: &str, then: &str) {
        let source = format!("#!/bin/sh\necho \"{name} $*\" >>\"$HOME/install.log\"\n{then}\n");
        self.add_program(name, &source);
    }

    /// A shell command that puts the fake `uv` where user programs go.
    fn install_uv(&self) -> String {
        let uv = self.dir.path().join("uv-to-install");
        write_by_child(&uv, FAKE_UV.as_bytes(), 0o755).unwrap();
        format!(
            "mkdir -p \"$HOME/.local/bin\" && cp '{}' \"$HOME/.local/bin/uv\"",
            uv.display()
        )
    }

    fn log(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.home().join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// How often an environment was built.
    fn syncs(&self) -> usize {
        self.log("uv.log")
            .iter()
            .filter(|line| line.starts_with("sync "))
            .count()
    }

    fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.scripts_dir())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// Another process writes the file: a process that forks on one thread while it writes a program on another cannot run
/// that program ("text file busy").
fn write_by_child(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    let mut child = std::process::Command::new("sh")
        .args([
            "-c",
            "mkdir -p -- \"$(dirname -- \"$1\")\" && cat >\"$1\" && chmod \"$2\" \"$1\"",
            "write",
        ])
        .arg(path)
        .arg(format!("{mode:o}"))
        .stdin(Stdio::piped())
        .spawn()?;
    child.stdin.take().unwrap().write_all(bytes)?;
    assert!(child.wait()?.success());
    Ok(())
}

#[async_trait]
impl ScriptHost for LocalBox {
    async fn write(&self, path: &Path, bytes: Bytes, mode: u32) -> Result<()> {
        write_by_child(path, &bytes, mode).map_err(|error| Error::io("write", error))
    }

    async fn read(&self, path: &Path, max_bytes: u64) -> Result<Bytes> {
        let bytes = fs::read(path).map_err(|error| Error::io("read", error))?;
        if bytes.len() as u64 > max_bytes {
            return Err(Error::new(ErrorKind::LimitExceeded, "too long"));
        }
        Ok(bytes.into())
    }

    async fn run(&self, command: Command) -> Result<Output> {
        command.validate()?;
        self.arrived.add_permits(1);
        let _permit = self.gate.acquire().await.unwrap();
        let program = self.tools().join(&command.argv()[0]);
        let output = tokio::process::Command::new(program)
            .args(&command.argv()[1..])
            .env_clear()
            .env("PATH", self.tools())
            .env("HOME", self.home())
            .env("TMPDIR", self.home())
            .envs(command.env_map().iter())
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Error::new(ErrorKind::ProgramNotFound, "no such program"),
                _ => Error::io("run", error),
            })?;
        let captured = |bytes: Vec<u8>| crate::Captured {
            bytes: bytes.into(),
            dropped: 0,
        };
        Ok(Output {
            status: output.status.into(),
            stdout: captured(output.stdout),
            stderr: captured(output.stderr),
        })
    }
}

#[tokio::test]
async fn a_script_is_published_and_its_environment_is_built_online() {
    let host = LocalBox::with_uv();
    let script = Script::new(SOURCE);
    let env = Env::from_iter([("UV_OFFLINE", "true")]);
    let prepared = host.scripts().prepare(&host, &script, &env).await.unwrap();

    let path = script.path_in(host.scripts_dir());
    assert_eq!(prepared.path(), path);
    assert_eq!(fs::read_to_string(&path).unwrap(), SOURCE);
    assert_eq!(host.files(), [format!("{}.py", script.digest())]);
    let venv = host.home().join("envs").join(script.digest());
    assert_eq!(prepared.venv(), venv);
    assert_eq!(prepared.interpreter(), venv.join("bin/python3"));
    let uv = host.tools().join("uv");
    assert_eq!(
        host.log("uv.log"),
        [
            format!(
                "sync --script {} -q --no-config offline=false uv={}",
                path.display(),
                uv.display()
            ),
            format!(
                "python find --script {} --no-config offline=false uv={}",
                path.display(),
                uv.display()
            ),
        ]
    );
    assert_eq!(host.log("install.log"), [""; 0]);
}

#[tokio::test]
async fn running_activates_the_environment_and_keeps_the_callers_variables() {
    let host = LocalBox::with_uv();
    let script = Script::new("the script's own text\n");
    let env = Env::from_iter([("UV_OFFLINE", "true")]);
    let args = ["--x", "two words", "", "line\nbreak", "$HOME"];
    let output = host.scripts().run(&host, &script, &env, args).await.unwrap();
    assert!(output.success(), "{}", output.stderr_lossy());
    let venv = host.home().join("envs").join(script.digest());
    let local_bin = host.home().join(".local/bin");
    let path = script.path_in(host.scripts_dir());
    assert_eq!(
        output.stdout_lossy(),
        format!(
            "venv={venv}\npath={venv}/bin:{local}:{tools}\ninstall={local} depth=1 offline=true\n\
             arg={path}\narg=--x\narg=two words\narg=\narg=line\nbreak\narg=$HOME\nthe script's own text\n",
            venv = venv.display(),
            local = local_bin.display(),
            tools = host.tools().display(),
            path = path.display(),
        )
    );
}

#[tokio::test]
async fn without_activation_nothing_of_the_environment_leaks() {
    let host = LocalBox::with_uv();
    let prepared = host
        .scripts()
        .prepare(&host, &Script::new(SOURCE), &Env::new())
        .await
        .unwrap();
    let output = host.run(Command::new(prepared.argv(false))).await.unwrap();
    let path = format!("venv=\npath={}\ninstall= depth= offline=\n", host.tools().display());
    assert!(output.stdout_lossy().starts_with(&path), "{}", output.stdout_lossy());
}

#[tokio::test]
async fn a_prepared_script_is_found_again() {
    let host = LocalBox::with_uv();
    let scripts = host.scripts();
    let first = scripts.prepare(&host, &Script::new(SOURCE), &Env::new()).await.unwrap();
    let second = scripts.prepare(&host, &Script::new(SOURCE), &Env::new()).await.unwrap();
    assert_eq!(first, second);
    assert_eq!(host.syncs(), 1);
    scripts
        .prepare(&host, &Script::new("other"), &Env::new())
        .await
        .unwrap();
    assert_eq!(host.syncs(), 2);
}

#[tokio::test]
async fn many_who_want_the_same_script_prepare_it_once() {
    let host = Arc::new(LocalBox::with_uv());
    let scripts = Arc::new(host.scripts());
    let mut callers = Vec::new();
    for _ in 0..20 {
        let (host, scripts) = (Arc::clone(&host), Arc::clone(&scripts));
        callers.push(tokio::spawn(async move {
            scripts.prepare(&*host, &Script::new(SOURCE), &Env::new()).await
        }));
    }
    for caller in callers {
        caller.await.unwrap().unwrap();
    }
    assert_eq!(host.syncs(), 1);
    assert_eq!(host.files().len(), 1);
}

#[tokio::test]
async fn different_scripts_do_not_wait_for_each_other() {
    let host = LocalBox::with_uv();
    let scripts = host.scripts();
    let closed = host.gate.acquire_many(PERMITS).await.unwrap();
    let (one, two) = (Script::new("one"), Script::new("two"));
    let env = Env::new();
    let both = async { tokio::join!(scripts.prepare(&host, &one, &env), scripts.prepare(&host, &two, &env)) };
    let open = async {
        let _both = host.arrived.acquire_many(2).await.unwrap();
        drop(closed);
    };
    let ((one, two), ()) = tokio::join!(both, open);
    assert_ne!(one.unwrap().path(), two.unwrap().path());
}

#[tokio::test]
async fn a_cancelled_preparation_lets_the_next_one_in() {
    let host = LocalBox::with_uv();
    let scripts = host.scripts();
    let (script, env) = (Script::new(SOURCE), Env::new());
    let closed = host.gate.acquire_many(PERMITS).await.unwrap();
    tokio::select! {
        _ = scripts.prepare(&host, &script, &env) => panic!("the gate is closed"),
        _ = host.arrived.acquire() => {}
    }
    drop(closed);
    scripts.prepare(&host, &script, &env).await.unwrap();
    assert_eq!(host.syncs(), 1);
    // The upload of the cancelled one is all that it left.
    let left: Vec<String> = host.files().into_iter().filter(|name| name.ends_with(".tmp")).collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert!(left[0].starts_with(script.digest()));
}

#[tokio::test]
async fn a_script_that_was_tampered_with_is_prepared_again() {
    type Tamper = fn(&PreparedScript);
    let tampers: [(&str, Tamper); 7] = [
        ("changed", |script| fs::write(script.path(), "evil").unwrap()),
        ("appended to", |script| {
            fs::write(script.path(), format!("{SOURCE}evil")).unwrap()
        }),
        ("emptied", |script| fs::write(script.path(), "").unwrap()),
        ("removed", |script| fs::remove_file(script.path()).unwrap()),
        ("a directory", |script| {
            fs::remove_file(script.path()).unwrap();
            fs::create_dir_all(script.path().join("full")).unwrap();
        }),
        ("a link to a directory", |script| {
            fs::remove_file(script.path()).unwrap();
            symlink(script.venv(), script.path()).unwrap();
        }),
        ("without its interpreter", |script| {
            fs::remove_file(script.interpreter()).unwrap()
        }),
    ];
    for (what, tamper) in tampers {
        let host = LocalBox::with_uv();
        let scripts = host.scripts();
        let script = Script::new(SOURCE);
        let first = scripts.prepare(&host, &script, &Env::new()).await.unwrap();
        tamper(&first);
        let second = scripts.prepare(&host, &script, &Env::new()).await.unwrap();
        assert_eq!(second, first, "{what}");
        assert_eq!(host.syncs(), 2, "{what}");
        assert!(fs::symlink_metadata(second.path()).unwrap().is_file(), "{what}");
        assert_eq!(fs::read_to_string(second.path()).unwrap(), SOURCE, "{what}");
        assert!(second.interpreter().exists(), "{what}");
        assert!(second.venv().exists(), "{what}");
        assert_eq!(host.files().len(), 1, "{what}");
    }
}

#[tokio::test]
async fn a_failure_carries_the_end_of_its_stderr_without_secrets_and_is_not_remembered() {
    let host = LocalBox::with_uv();
    let scripts = host.scripts();
    let script = Script::new(SOURCE);
    let env = Env::from_iter([("INDEX_PASSWORD", "hunter2")]);
    let noise = "x".repeat(5000);
    let fails = host.home().join("uv-fails");
    fs::write(&fails, format!("{noise}\nno solution found; tried hunter2\n")).unwrap();
    let error = scripts.prepare(&host, &script, &env).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other);
    assert_eq!(error.boundary(), Boundary::Other);
    assert!(
        error
            .operation()
            .is_some_and(|operation| operation.contains(script.digest()))
    );
    let message = error.message();
    assert!(message.contains("exit code 2"), "{message}");
    assert!(message.ends_with("no solution found; tried ***"), "{message}");
    assert!(message.len() < 2200, "{} bytes", message.len());
    assert!(!format!("{error:?}").contains("hunter2"));

    fs::remove_file(fails).unwrap();
    scripts.prepare(&host, &script, &env).await.unwrap();
}

#[tokio::test]
async fn without_uv_it_is_installed_by_the_first_way_that_works() {
    // A downloader that leaves the installer in the file which both `curl -fsSL -o FILE URL` and `wget -q -O FILE URL`
    // have as their third argument.
    let downloader = |host: &LocalBox| {
        let installer = format!("echo installer >>\"$HOME/install.log\"; {}", host.install_uv());
        format!("printf '%s\\n' '{}' >\"$3\"", installer.replace('\'', "'\\''"))
    };
    // Every way, with what the log says afterwards.
    type Setup = fn(&LocalBox, &str);
    let ways: [(&str, Setup, &[&str]); 6] = [
        (
            "pip",
            |host, _| host.add_installer("python3", &host.install_uv()),
            &["python3 -m pip install --user --quiet --upgrade --disable-pip-version-check uv"],
        ),
        (
            "curl, as pip fails",
            |host, download| {
                host.add_installer("python3", "echo externally managed; exit 1");
                host.add_installer("curl", download);
            },
            &["python3 ", "curl -fsSL -o ", "installer"],
        ),
        (
            "curl, as pip puts it elsewhere",
            |host, download| {
                host.add_installer("python3", "exit 0");
                host.add_installer("curl", download);
            },
            &["python3 ", "curl -fsSL -o ", "installer"],
        ),
        (
            "wget",
            |host, download| host.add_installer("wget", download),
            &["wget -q -O ", "installer"],
        ),
        (
            "apt-get",
            |host, download| {
                host.add_installer("curl-to-install", download);
                let curl = host.tools().join("curl");
                let move_it = format!(
                    "if [ $1 = install ]; then mv '{0}-to-install' '{0}'; fi",
                    curl.display()
                );
                host.add_installer("apt-get", &move_it);
            },
            &["apt-get update -qq", "apt-get install -y ", "curl", "installer"],
        ),
        (
            "apk",
            |host, download| {
                host.add_installer("curl-to-install", download);
                let curl = host.tools().join("curl");
                host.add_installer("apk", &format!("mv '{0}-to-install' '{0}'", curl.display()));
            },
            &["apk add -q --no-cache curl ca-certificates", "curl", "installer"],
        ),
    ];
    for (what, setup, expected) in ways {
        let host = LocalBox::new();
        setup(&host, &downloader(&host));
        let prepared = host
            .scripts()
            .prepare(&host, &Script::new(SOURCE), &Env::new())
            .await
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(prepared.interpreter().exists(), "{what}");
        let log = host.log("install.log");
        assert_eq!(log.len(), expected.len(), "{what}: {log:?}");
        for (line, start) in log.iter().zip(expected) {
            assert!(line.starts_with(start), "{what}: {log:?}");
        }
        let uv = host.home().join(".local/bin/uv");
        assert!(
            host.log("uv.log")[0].ends_with(&format!("uv={}", uv.display())),
            "{what}"
        );
    }
}

#[tokio::test]
async fn a_download_that_breaks_off_is_not_run() {
    let host = LocalBox::new();
    host.add_installer("curl", "echo 'echo ran >>\"$HOME/install.log\"' >\"$3\"; exit 18");
    let scripts = host.scripts().with_uv(UvSource::Bootstrap {
        installer_url: "https://mirror.example/uv.sh".into(),
    });
    let error = scripts
        .prepare(&host, &Script::new(SOURCE), &Env::new())
        .await
        .unwrap_err();
    assert!(error.message().contains("https://mirror.example/uv.sh"), "{error}");
    let log = host.log("install.log");
    assert_eq!(log.len(), 1, "{log:?}");
    assert!(log[0].ends_with(" https://mirror.example/uv.sh"), "{log:?}");
    let left: Vec<_> = fs::read_dir(host.home())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["install.log"]);
}

#[tokio::test]
async fn a_box_that_offers_no_way_to_get_uv_says_so() {
    let host = LocalBox::new();
    let error = host
        .scripts()
        .prepare(&host, &Script::new(SOURCE), &Env::new())
        .await
        .unwrap_err();
    assert!(error.message().contains("uv is not installed"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Other);
}

#[tokio::test]
async fn a_shipped_binary_is_used_and_nothing_is_installed() {
    for has_sha256sum in [true, false] {
        let host = LocalBox::new();
        if has_sha256sum {
            host.add_tool("sha256sum");
        }
        host.add_installer("python3", "exit 0");
        let binary = UvBinary::new(FAKE_UV);
        let scripts = host.scripts().with_uv(UvSource::Binary(binary.clone()));
        scripts.prepare(&host, &Script::new("one"), &Env::new()).await.unwrap();
        let path = binary.path_in(host.scripts_dir());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o755);
        let shipped = fs::metadata(&path).unwrap();
        assert_eq!(host.log("install.log"), [""; 0]);
        assert!(host.log("uv.log")[0].ends_with(&format!("uv={}", path.display())));

        // The next script uses the same one, but not one that was changed.
        scripts.prepare(&host, &Script::new("two"), &Env::new()).await.unwrap();
        let is_same = |a: &fs::Metadata, b: &fs::Metadata| {
            use std::os::unix::fs::MetadataExt;
            a.ino() == b.ino()
        };
        let again = fs::metadata(&path).unwrap();
        assert!(is_same(&shipped, &again) || !has_sha256sum);
        fs::write(&path, "#!/bin/sh\nexit 99\n").unwrap();
        scripts
            .prepare(&host, &Script::new("three"), &Env::new())
            .await
            .unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), FAKE_UV);
        let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "no upload is left");
    }
}

#[tokio::test]
async fn errors_of_the_box_are_passed_on_as_they_are() {
    /// Its files are gone with it.
    struct Gone(LocalBox, ErrorKind);

    #[async_trait]
    impl ScriptHost for Gone {
        async fn write(&self, path: &Path, bytes: Bytes, mode: u32) -> Result<()> {
            self.0.write(path, bytes, mode).await
        }

        async fn read(&self, _: &Path, _: u64) -> Result<Bytes> {
            Err(Error::new(self.1, "read"))
        }

        async fn run(&self, command: Command) -> Result<Output> {
            self.0.run(command).await
        }
    }

    for (kind, is_passed_on) in [
        (ErrorKind::SandboxGone, true),
        (ErrorKind::ConnectionLost, true),
        (ErrorKind::NotFound, false),
        (ErrorKind::LimitExceeded, false),
    ] {
        let host = Gone(LocalBox::with_uv(), kind);
        let scripts = host.0.scripts();
        let script = Script::new(SOURCE);
        scripts.prepare(&host, &script, &Env::new()).await.unwrap();
        let again = scripts.prepare(&host, &script, &Env::new()).await;
        match again {
            Err(error) => assert!(is_passed_on && error.kind() == kind, "{kind}: {error}"),
            Ok(_) => assert!(!is_passed_on && host.0.syncs() == 2, "{kind}"),
        }
    }
}
