//! A Docker engine of the test's own, which may be stopped.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub(crate) struct Daemon {
    dir: TempDir,
    live_restore: bool,
    child: Option<Child>,
}

impl Daemon {
    /// An engine with the image `sandbox-test/busybox`, or why there is none.
    pub(crate) fn start(live_restore: bool) -> Result<Self, String> {
        let dir = TempDir::with_prefix("sandbox-dockerd-").map_err(|error| error.to_string())?;
        let mut daemon = Self {
            dir,
            live_restore,
            child: None,
        };
        daemon.up()?;
        let (host, image) = (daemon.host(), "sandbox-test/busybox:latest");
        let copy = format!("docker save {image} | docker --host {host} load");
        let copied = Command::new("sh").args(["-c", &copy]).stdin(Stdio::null()).output();
        match copied {
            Ok(output) if output.status.success() => Ok(daemon),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn host(&self) -> String {
        format!("unix://{}", self.path("engine.sock").display())
    }

    /// The engine's own client.
    pub(crate) fn client(&self, arguments: &[&str]) -> Result<String, String> {
        let output = Command::new("docker")
            .arg("--host")
            .arg(self.host())
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }

    pub(crate) fn up(&mut self) -> Result<(), String> {
        // Whatever the machine configures for its own engine does not count here.
        let config = format!(r#"{{"live-restore": {}}}"#, self.live_restore);
        std::fs::write(self.path("config.json"), config).map_err(|error| error.to_string())?;
        let log = std::fs::File::create(self.path("log")).map_err(|error| error.to_string())?;
        // In a network namespace of its own: it would take the bridge of the machine's engine away.
        let child = Command::new("unshare")
            .args(["--net", "dockerd", "--config-file"])
            .arg(self.path("config.json"))
            .arg("--data-root")
            .arg(self.path("data"))
            .arg("--exec-root")
            .arg(self.path("exec"))
            .arg("--pidfile")
            .arg(self.path("pid"))
            .arg("--host")
            .arg(self.host())
            .args([
                "--bridge=none",
                "--iptables=false",
                "--ip6tables=false",
                "--storage-driver=vfs",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.child = Some(child.map_err(|error| format!("dockerd: {error}"))?);
        let until = Instant::now() + Duration::from_secs(60);
        while self.client(&["version"]).is_err() {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            if ended.is_some() || Instant::now() > until {
                let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
                let tail: Vec<_> = log.lines().rev().take(3).collect();
                return Err(format!("dockerd does not come up: {tail:?}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Ends the engine as its service manager would.
    pub(crate) fn down(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let _ = Command::new("kill").arg(child.id().to_string()).status();
        let _ = child.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(left) = self.client(&["ps", "--all", "--quiet"]) {
            for id in left.lines() {
                let _ = self.client(&["rm", "--force", id]);
            }
        }
        self.down();
        // Namespaces and layers that it mounted there.
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let prefix = self.dir.path().to_string_lossy().into_owned();
        for line in mounts.lines().rev() {
            if let Some(at) = line.split(' ').nth(1).filter(|at| at.starts_with(&prefix)) {
                let _ = Command::new("umount").args(["--lazy", at]).status();
            }
        }
    }
}
