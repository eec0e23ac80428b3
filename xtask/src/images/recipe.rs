//! What each image consists of.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::rootfs::Rootfs;
use crate::host::{Host, is_installed};

/// Where Debian's static busybox is.
const BUSYBOX: &str = "/bin/busybox";

const PATH: &str = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Packages of the `debian` image, beyond the smallest installation.
const PACKAGES: &str = "ca-certificates,curl,git,iproute2,procps,python3,wget";

/// Changes to how [`Source::Debian`] is made that its packages do not tell.
const DEBIAN_VERSION: &str = "1";

/// One image.
pub(super) struct Recipe {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// Instructions for the import, as in a Dockerfile.
    pub(super) changes: Vec<String>,
    source: Source,
}

/// Where the root directory comes from.
enum Source {
    /// Entries around this machine's static busybox.
    Busybox(fn(Vec<u8>) -> Result<Rootfs>),
    /// `debootstrap`.
    Debian,
}

/// Every image.
pub(super) fn all() -> &'static [Recipe] {
    static ALL: OnceLock<Vec<Recipe>> = OnceLock::new();
    ALL.get_or_init(|| {
        let recipe = |name, about, changes: &[&str], source| Recipe {
            name,
            about,
            changes: changes.iter().map(|change| (*change).to_owned()).collect(),
            source,
        };
        vec![
            recipe(
                "busybox",
                "a shell and the usual small programs",
                &[PATH, "CMD [\"sh\"]"],
                Source::Busybox(busybox),
            ),
            recipe(
                "scratch",
                "one static program, /busybox, and nothing else: no shell in PATH, no /tmp, no passwd",
                &["CMD [\"/busybox\", \"true\"]"],
                Source::Busybox(|program| Ok(Rootfs::default().file("/busybox", 0o755, program))),
            ),
            recipe(
                "entrypoint",
                "an ENTRYPOINT that prints before it starts what it is given, and USER agent (1000)",
                &[
                    PATH,
                    "ENV FROM_IMAGE=yes",
                    "USER agent",
                    "WORKDIR /home/agent",
                    "ENTRYPOINT [\"/entrypoint\"]",
                    "CMD [\"sh\"]",
                ],
                Source::Busybox(entrypoint),
            ),
            recipe(
                "workdir",
                "a WORKDIR that exists, with files, modes and links in it, some of another owner",
                &[PATH, "WORKDIR /app", "CMD [\"sh\"]"],
                Source::Busybox(workdir),
            ),
            recipe(
                "login",
                "login profiles that print, change the directory and set variables",
                &[PATH, "ENV ENV=/root/.shrc", "CMD [\"sh\"]"],
                Source::Busybox(login),
            ),
            recipe(
                "debian",
                "Debian with python3, curl, wget and git",
                &[PATH, "CMD [\"bash\"]"],
                Source::Debian,
            ),
        ]
    })
}

impl Recipe {
    /// Identifies what [`build`](Self::build) would make.
    pub(super) fn digest(&self) -> Result<String> {
        let mut hasher = Sha256::new();
        for change in &self.changes {
            hasher.update(change.as_bytes());
            hasher.update(b"\n");
        }
        match self.source {
            Source::Busybox(rootfs) => rootfs(static_busybox()?)?.hash(&mut hasher),
            Source::Debian => {
                let debian = Debian::of_this_machine();
                hasher.update(format!("{DEBIAN_VERSION} {} {PACKAGES}", debian.suite).as_bytes());
            }
        }
        let digest = hasher.finalize();
        Ok(digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect())
    }

    /// Writes the archive of the root directory.
    pub(super) fn build(&self, to: &Path) -> Result<()> {
        match self.source {
            Source::Busybox(rootfs) => {
                let file = File::create(to).with_context(|| format!("writing {}", to.display()))?;
                rootfs(static_busybox()?)?.write(BufWriter::new(file))
            }
            Source::Debian => Debian::of_this_machine().build(to),
        }
    }
}

fn static_busybox() -> Result<Vec<u8>> {
    let hint = "install busybox-static";
    let program = fs::read(BUSYBOX).with_context(|| format!("{BUSYBOX} cannot be read: {hint}"))?;
    if !is_static(&program) {
        bail!("{BUSYBOX} needs a dynamic loader: {hint}");
    }
    Ok(program)
}

/// Whether a 64-bit ELF file asks for no loader.
fn is_static(program: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let number = |at: usize, length: usize| -> Option<usize> {
        let bytes = program.get(at..at.checked_add(length)?)?;
        Some(
            bytes
                .iter()
                .rev()
                .fold(0, |number, byte| number << 8 | usize::from(*byte)),
        )
    };
    let headers = || -> Option<bool> {
        let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        for index in 0..count {
            if number(table.checked_add(index * size)?, 4)? == PT_INTERP as usize {
                return Some(false);
            }
        }
        Some(true)
    };
    program.starts_with(b"\x7fELF\x02\x01") && headers() == Some(true)
}

fn busybox(program: Vec<u8>) -> Result<Rootfs> {
    let applets = Host::program(BUSYBOX, Path::new("/"))
        .arg("--list")
        .read()
        .context("asking busybox for its programs")?;
    let mut rootfs = Rootfs::default();
    for dir in [
        "bin", "dev", "etc", "home", "proc", "root", "run", "sbin", "sys", "usr", "usr/bin", "usr/sbin", "var",
    ] {
        rootfs = rootfs.dir(dir, 0o755);
    }
    rootfs = rootfs
        .dir("tmp", 0o1777)
        .dir("var/tmp", 0o1777)
        .file(
            "etc/passwd",
            0o644,
            "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n",
        )
        .file("etc/group", 0o644, "root:x:0:\nagent:x:1000:\n")
        .file("bin/busybox", 0o755, program)
        .link("usr/bin/env", "/bin/busybox");
    for applet in applets.lines().filter(|name| *name != "busybox") {
        rootfs = rootfs.link(&format!("bin/{applet}"), "busybox");
    }
    Ok(rootfs.owned_by(1000).dir("home/agent", 0o755).owned_by(0))
}

fn entrypoint(program: Vec<u8>) -> Result<Rootfs> {
    Ok(busybox(program)?.file("entrypoint", 0o755, "#!/bin/sh\necho the entrypoint ran\nexec \"$@\"\n"))
}

fn workdir(program: Vec<u8>) -> Result<Rootfs> {
    Ok(busybox(program)?
        .dir("app", 0o755)
        .file("app/data.txt", 0o644, "from the image\n")
        .file("app/read-only", 0o444, "kept\n")
        .link("app/link", "data.txt")
        .owned_by(1000)
        .dir("app/bin", 0o750)
        .file("app/bin/tool", 0o755, "#!/bin/sh\necho a tool of the image\n"))
}

fn login(program: Vec<u8>) -> Result<Rootfs> {
    let noise =
        |file: &str| format!("echo noise from {file}\necho noise from {file} >&2\ncd /tmp\nexport NOISE={file}\n");
    let mut rootfs = busybox(program)?.file("etc/profile", 0o644, noise("profile"));
    for file in [".profile", ".bash_profile", ".bashrc", ".shrc"] {
        rootfs = rootfs.file(&format!("root/{file}"), 0o644, noise(file));
    }
    Ok(rootfs)
}

/// A Debian to install, and where from.
struct Debian {
    suite: String,
    /// `None` is what debootstrap takes by itself.
    mirror: Option<String>,
}

impl Debian {
    /// The same release as this machine's, from where its apt gets packages; else the stable one.
    fn of_this_machine() -> Self {
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let fields: BTreeMap<&str, &str> = release.lines().filter_map(|line| line.split_once('=')).collect();
        match (fields.get("ID"), fields.get("VERSION_CODENAME")) {
            (Some(&"debian"), Some(suite)) => Self {
                suite: (*suite).to_owned(),
                mirror: mirror(suite),
            },
            _ => Self {
                suite: "stable".to_owned(),
                mirror: None,
            },
        }
    }

    fn build(&self, to: &Path) -> Result<()> {
        for program in ["debootstrap", "tar"] {
            if !is_installed(program) {
                bail!("install {program}");
            }
        }
        // Beside the archive: a temporary directory may be mounted without device files.
        let parent = to.parent().unwrap_or(Path::new("."));
        let dir = tempfile::Builder::new()
            .prefix(".debian-")
            .tempdir_in(parent)
            .context("making a directory")?;
        let root = dir.path().join("root");
        let mut debootstrap = Host::program("debootstrap", parent)
            .args(["--variant=minbase", &format!("--include={PACKAGES}"), &self.suite])
            .arg(&root);
        if let Some(mirror) = &self.mirror {
            debootstrap = debootstrap.arg(mirror);
        }
        debootstrap
            .read()
            .context("it needs root, and a mirror that it reaches")?;
        Host::program("tar", &root)
            .args(["--create", "--numeric-owner", "--one-file-system", "--sort=name"])
            // What packages leave that no test looks at.
            .args(
                [
                    "./var/cache/apt/*",
                    "./var/lib/apt/lists/*",
                    "./var/log/*",
                    "./dev/*",
                    "./proc/*",
                    "./sys/*",
                ]
                .map(exclude),
            )
            .args(
                [
                    "./usr/share/doc/*",
                    "./usr/share/man/*",
                    "./usr/share/locale/*",
                    "./usr/share/info/*",
                ]
                .map(exclude),
            )
            .args(["./usr/share/lintian/*", "__pycache__"].map(exclude))
            .arg("--file")
            .arg(to)
            .arg(".")
            .run()
    }
}

fn exclude(pattern: &str) -> String {
    format!("--exclude={pattern}")
}

/// Where this machine's apt gets the packages of a release.
fn mirror(suite: &str) -> Option<String> {
    let sites = Host::program("apt-get", Path::new("/"))
        .args(["indextargets", "--format", "$(RELEASE) $(SITE)", "Created-By: Packages"])
        .read()
        .ok()?;
    let site = sites
        .lines()
        .find_map(|line| line.split_once(' ').filter(|(release, _)| *release == suite))?;
    Some(site.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_program_that_asks_for_a_loader_is_not_static() {
        assert!(!is_static(b"#!/bin/sh\n"));
        assert!(!is_static(b"\x7fELF\x02\x01"));
        // The smallest header: no program headers at all.
        let mut header = b"\x7fELF\x02\x01".to_vec();
        header.resize(64, 0);
        assert!(is_static(&header));
        // One program header, which asks for a loader.
        header[32] = 64;
        header[54] = 56;
        header[56] = 1;
        header.resize(120, 0);
        header[64] = 3;
        assert!(!is_static(&header));
    }

    #[test]
    fn names_are_unique_and_every_image_says_what_it_is() {
        let names: BTreeSet<&str> = all().iter().map(|recipe| recipe.name).collect();
        assert_eq!(names.len(), all().len());
        assert!(all().iter().all(|recipe| !recipe.about.is_empty()));
    }
}
