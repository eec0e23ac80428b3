//! Where state that outlives one process is kept on this machine.

use std::ffi::OsString;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result};

/// The environment variable that moves the cache directory.
pub const CACHE_DIR_VAR: &str = "SANDBOX_CACHE_DIR";

/// The root of the cache. Naming it touches no disk and cannot fail; directories under it come into being when they
/// are asked for.
///
/// It is, in this order: the path that the program chose, `$SANDBOX_CACHE_DIR`, `<home>/.cache/verifiers`, and where no
/// home directory is known `<temp>/.cache/verifiers`.
///
/// ```
/// use runtime_core::cache::CacheDir;
///
/// let cache = CacheDir::at("/var/cache/boxes");
/// assert_eq!(cache.join("limiter").unwrap(), std::path::Path::new("/var/cache/boxes/limiter"));
/// assert_eq!(cache.join("../x").unwrap_err().field(), Some("path"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CacheDir(PathBuf);

impl CacheDir {
    /// The cache of this user, from the environment.
    pub fn from_env() -> Self {
        Self::choose(
            None,
            std::env::var_os(CACHE_DIR_VAR),
            std::env::home_dir(),
            std::env::temp_dir(),
        )
    }

    /// A cache at `path`; a relative one is taken from the current directory of now, not of later.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(absolute(path.into()))
    }

    /// A cache at `path` if a configuration names one (an empty path does not), else [`from_env`](Self::from_env).
    pub fn resolve(path: Option<&Path>) -> Self {
        Self::choose(
            path,
            std::env::var_os(CACHE_DIR_VAR),
            std::env::home_dir(),
            std::env::temp_dir(),
        )
    }

    fn choose(explicit: Option<&Path>, variable: Option<OsString>, home: Option<PathBuf>, temp: PathBuf) -> Self {
        let explicit = explicit.map(Path::as_os_str).filter(|path| !path.is_empty());
        let variable = variable.as_deref().filter(|path| !path.is_empty());
        if let Some(path) = explicit.or(variable) {
            return Self::at(path);
        }
        // A relative or empty home is none: it would scatter caches over the directories that programs start in.
        let home = home.filter(|home| home.is_absolute()).unwrap_or(temp);
        Self(absolute(home).join(".cache").join("verifiers"))
    }

    /// The root.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of `relative` under the root. Nothing is created.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) naming `path`: empty, absolute, with `..` or NUL.
    pub fn join(&self, relative: impl AsRef<Path>) -> Result<PathBuf> {
        let relative = relative.as_ref();
        crate::command::check_path("path", relative)?;
        let only_names = relative
            .components()
            .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        if !only_names {
            return Err(Error::invalid_argument(
                "path",
                format!("{relative:?} must be a relative path without \"..\""),
            ));
        }
        Ok(self.0.join(relative))
    }

    /// The directory `relative` under the root, created with its parents where missing. What is created is for the
    /// owner alone (mode 0700); what exists keeps its mode. Blocks on the disk.
    ///
    /// # Errors
    /// Those of [`join`](Self::join); [`PermissionDenied`](crate::ErrorKind::PermissionDenied),
    /// [`WrongFileType`](crate::ErrorKind::WrongFileType) and other errors of the disk.
    pub fn create_dir(&self, relative: impl AsRef<Path>) -> Result<PathBuf> {
        let path = self.join(relative)?;
        create_private_dir(&path)
            .map_err(|error| Error::io(format_args!("create cache directory {}", path.display()), error))?;
        Ok(path)
    }
}

impl Default for CacheDir {
    fn default() -> Self {
        Self::from_env()
    }
}

fn absolute(path: PathBuf) -> PathBuf {
    // Fails only for an empty path or a current directory that was removed: then the path is as good as it gets.
    std::path::absolute(&path).unwrap_or(path)
}

/// Creates `path` and its missing parents with mode 0700. An existing directory is fine, anything else is not.
pub(crate) fn create_private_dir(path: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path).map_err(|error| {
        // Says what is there rather than that something is.
        if error.kind() == io::ErrorKind::AlreadyExists {
            io::Error::new(io::ErrorKind::NotADirectory, "exists and is not a directory")
        } else {
            error
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn chosen(explicit: Option<&str>, variable: Option<&str>, home: Option<&str>) -> PathBuf {
        CacheDir::choose(
            explicit.map(Path::new),
            variable.map(Into::into),
            home.map(Into::into),
            "/temp".into(),
        )
        .0
    }

    #[test]
    fn the_program_wins_over_the_environment_and_that_over_the_home() {
        assert_eq!(chosen(Some("/a"), Some("/b"), Some("/home/u")), Path::new("/a"));
        assert_eq!(chosen(None, Some("/b"), Some("/home/u")), Path::new("/b"));
        assert_eq!(
            chosen(None, None, Some("/home/u")),
            Path::new("/home/u/.cache/verifiers")
        );
    }

    #[test]
    fn empty_values_count_as_absent() {
        assert_eq!(
            chosen(Some(""), Some(""), Some("/home/u")),
            Path::new("/home/u/.cache/verifiers")
        );
    }

    #[test]
    fn without_a_usable_home_it_is_in_the_temp_directory() {
        for home in [None, Some(""), Some("relative/home")] {
            assert_eq!(
                chosen(None, None, home),
                Path::new("/temp/.cache/verifiers"),
                "{home:?}"
            );
        }
    }

    #[test]
    fn a_relative_override_is_fixed_to_the_directory_of_now() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(chosen(None, Some("boxes"), None), here.join("boxes"));
        assert_eq!(CacheDir::at("boxes").path(), here.join("boxes"));
    }

    #[test]
    fn naming_the_root_from_this_process_creates_nothing_and_is_absolute() {
        assert!(CacheDir::from_env().path().is_absolute());
        let dir = tempfile::tempdir().unwrap();
        let cache = CacheDir::resolve(Some(&dir.path().join("new")));
        assert_eq!(cache.path(), dir.path().join("new"));
        cache.join("a/b").unwrap();
        assert!(!cache.path().exists());
    }

    #[test]
    fn paths_that_leave_the_root_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let cache = CacheDir::at(dir.path());
        for path in ["", "/etc", "..", "a/../../b", "a\0b"] {
            let error = cache.create_dir(path).expect_err(path);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{path:?}");
            assert_eq!(error.field(), Some("path"), "{path:?}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_can_be_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let cache = CacheDir::at(dir.path());
        let first = cache.create_dir("runtimes/scripts").unwrap();
        std::fs::write(first.join("kept"), "x").unwrap();
        assert_eq!(cache.create_dir("runtimes/scripts").unwrap(), first);
        assert!(first.join("kept").exists());
    }

    #[test]
    fn a_file_in_the_way_is_a_typed_error() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("limiter"), "x").unwrap();
        let cache = CacheDir::at(dir.path());
        for path in ["limiter", "limiter/below"] {
            let error = cache.create_dir(path).expect_err(path);
            assert_eq!(error.kind(), ErrorKind::WrongFileType, "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn created_directories_belong_to_their_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let cache = CacheDir::at(dir.path().join("root"));
        let deepest = cache.create_dir("a/b").unwrap();
        for path in [deepest.as_path(), deepest.parent().unwrap(), cache.path()] {
            let mode = std::fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700, "{}", path.display());
        }
    }
}
