//! What is to be done, checked as far as it can be before anything is created.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use runtime_core::config::{value_from_env, value_from_json, value_from_toml, value_from_url};
use runtime_core::{Command, Egress, Env, Error, ErrorKind, Registry, Result, RuntimeConfig};
use serde_json::{Map, Value, json};

use super::{Args, refuse};

/// A checked command line.
pub(super) struct Plan {
    pub(super) config: Box<dyn RuntimeConfig>,
    pub(super) name: Option<String>,
    pub(super) env: Env,
    pub(super) command: Command,
    /// Where relative paths of the program start, if not in the sandbox's working directory.
    pub(super) workdir: Option<PathBuf>,
    pub(super) timeout: Option<std::time::Duration>,
    pub(super) uploads: Vec<Copy>,
    pub(super) downloads: Vec<Copy>,
    pub(super) stdin: bool,
    pub(super) json: bool,
    /// What was decided for the caller, to be told.
    pub(super) notice: Option<&'static str>,
    pub(super) record_egress: bool,
}

/// One transfer between this machine and the box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) from: PathBuf,
    pub(super) to: PathBuf,
}

impl Plan {
    pub(super) fn new(args: Args, registry: &Registry) -> Result<Self> {
        let uploads = args.upload.iter().map(|arg| upload(arg)).collect::<Result<_>>()?;
        let downloads = args.download.iter().map(|arg| download(arg)).collect::<Result<_>>()?;
        let env = environment(&args.env)?;
        if let Some(name) = &args.name {
            runtime_core::names::validate_sandbox_name(name)?;
        }
        let Configured {
            config,
            workdir,
            notice,
        } = configure(&args, registry)?;
        let mut command = Command::new(args.argv);
        if let Some(dir) = &workdir {
            command = command.workdir(dir);
        }
        if let Some(timeout) = args.timeout {
            command = command.timeout(timeout);
        }
        command.validate()?;
        Ok(Self {
            config,
            name: args.name,
            env,
            command,
            workdir,
            timeout: args.timeout,
            uploads,
            downloads,
            stdin: args.stdin,
            json: args.json,
            notice,
            record_egress: args.record_egress,
        })
    }

    /// A path in the box, relative to where the program runs.
    pub(super) fn in_box(&self, path: &Path) -> PathBuf {
        match &self.workdir {
            Some(dir) => dir.join(path),
            None => path.to_path_buf(),
        }
    }
}

/// The configuration, the working directory if it is not a part of it, and what the caller should know.
struct Configured {
    config: Box<dyn RuntimeConfig>,
    workdir: Option<PathBuf>,
    notice: Option<&'static str>,
}

fn configure(args: &Args, registry: &Registry) -> Result<Configured> {
    let mut fields = base(args)?;
    let tag = match fields.get("type") {
        Some(Value::String(tag)) => tag.clone(),
        // Says what is wrong with it.
        _ => {
            let config = registry.parse(Value::Object(fields))?;
            return Ok(Configured {
                config,
                workdir: None,
                notice: None,
            });
        }
    };
    let provider = registry.provider(&tag)?;
    let notice = isolate(args, &tag, &mut fields)?;
    for (field, hosts) in [("allow", &args.allow), ("block", &args.block)] {
        if hosts.is_empty() {
            continue;
        }
        let restrictable = match fields.get("isolation") {
            Some(_) => registry
                .parse(Value::Object(fields.clone()))?
                .capabilities()
                .restrictable(),
            None => provider.capabilities().restrictable(),
        };
        if !restrictable {
            return Err(cannot_restrict(field, &tag, registry));
        }
        fields.insert(field.to_owned(), Value::from(hosts.clone()));
    }
    if args.record_egress {
        let egress = match fields.get("isolation") {
            Some(_) => registry.parse(Value::Object(fields.clone()))?.capabilities().egress,
            None => provider.capabilities().egress,
        };
        if egress != Egress::Enforced {
            let message = format!("`{tag}` has no proxy of ours, which is what records");
            return Err(Error::unsupported(message)
                .with_field("record-egress")
                .with_provider(tag));
        }
        let is = |field: &str, open: Value| fields.get(field).is_none_or(|rules| *rules == open);
        if is("allow", json!(["*"])) && is("block", json!([])) {
            // A policy, so that everything goes through the proxy; it blocks what cannot exist.
            fields.insert("block".to_owned(), json!(["egress-is-recorded.invalid"]));
        }
    }
    if let Some(image) = &args.image {
        fields.insert("image".to_owned(), Value::from(image.clone()));
    }
    let config = registry.parse(Value::Object(fields.clone()))?;
    let Some(dir) = &args.workdir else {
        return Ok(Configured {
            config,
            workdir: None,
            notice,
        });
    };
    // Where the provider gives a box a working directory of its own, it is that; else it is the program's alone.
    match (config.to_value().get("workdir"), dir.to_str()) {
        (Some(_), Some(text)) => {
            fields.insert("workdir".to_owned(), Value::from(text));
            let config = registry.parse(Value::Object(fields))?;
            Ok(Configured {
                config,
                workdir: None,
                notice,
            })
        }
        (Some(_), None) => Err(refuse("workdir", "it is not UTF-8, which this provider asks for")),
        (None, _) => Ok(Configured {
            config,
            workdir: Some(dir.clone()),
            notice,
        }),
    }
}

/// Gives the embedded runtime's box a network of its own where one is to be restricted, and says so.
fn isolate(args: &Args, tag: &str, fields: &mut Map<String, Value>) -> Result<Option<&'static str>> {
    let wanted = !args.allow.is_empty() || !args.block.is_empty() || args.record_egress;
    if tag != "subprocess" || !wanted || fields.contains_key("isolation") {
        return Ok(None);
    }
    isolation_is_available().map_err(|reason| {
        let field = match (args.allow.is_empty(), args.block.is_empty()) {
            (false, _) => "allow",
            (_, false) => "block",
            _ => "record-egress",
        };
        let message = format!("to restrict or record the network, the sandbox needs namespaces of its own: {reason}");
        Error::unsupported(message)
            .with_field(field)
            .with_provider(tag.to_owned())
    })?;
    fields.insert("isolation".to_owned(), Value::from("namespaces"));
    Ok(Some(
        "the network is to be restricted or recorded, so the sandbox gets namespaces of its own (isolation = \"namespaces\")",
    ))
}

#[cfg(all(feature = "subprocess", target_os = "linux"))]
fn isolation_is_available() -> std::result::Result<(), String> {
    runtime_core::subprocess::isolation::availability().map_err(|unavailable| unavailable.to_string())
}

#[cfg(not(all(feature = "subprocess", target_os = "linux")))]
fn isolation_is_available() -> std::result::Result<(), String> {
    Err("they need Linux, and the feature `subprocess` of xtask".to_owned())
}

/// The configuration without the options that set single fields.
fn base(args: &Args) -> Result<Map<String, Value>> {
    let mut fields = match &args.config {
        Some(path) => from_file(path)?,
        None => Map::new(),
    };
    if let Some(url) = &args.runtime {
        fields.extend(as_fields(value_from_url(url)?)?);
    } else if args.config.is_none() {
        let vars: Vec<(String, String)> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        let vars = vars.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        fields = match value_from_env("SANDBOX", vars)? {
            Some(value) => as_fields(value)?,
            None => as_fields(value_from_url("subprocess")?)?,
        };
    }
    Ok(fields)
}

fn from_file(path: &Path) -> Result<Map<String, Value>> {
    let about = |error: Error| error.with_operation(format!("reading {}", path.display()));
    let text = fs::read_to_string(path)
        .map_err(|error| about(Error::io("the file cannot be read", error).with_field("config")))?;
    let value = match path.extension().and_then(OsStr::to_str) {
        Some("toml") => value_from_toml(&text).map_err(about)?,
        Some("json") => value_from_json(&text).map_err(about)?,
        _ => return Err(refuse("config", "the file's name must end in .toml or .json")),
    };
    as_fields(value).map_err(about)
}

fn as_fields(value: Value) -> Result<Map<String, Value>> {
    match value {
        Value::Object(fields) => Ok(fields),
        _ => Err(Error::invalid_config(
            "type",
            "a configuration is an object with a `type`",
        )),
    }
}

/// A policy for a provider that enforces none: says who would.
fn cannot_restrict(field: &'static str, tag: &str, registry: &Registry) -> Error {
    let able: Vec<&str> = registry
        .providers()
        .filter(|provider| provider.capabilities().restrictable())
        .map(|provider| provider.tag())
        .collect();
    let able = match able.as_slice() {
        [] => "no provider that is compiled in can: build xtask with one that does".to_owned(),
        able => format!("choose one that can with --runtime: {}", able.join(", ")),
    };
    Error::unsupported(format!(
        "`{tag}` cannot restrict the network, so the program would run with it open; {able}; or leave --{field} out"
    ))
    .with_field(field)
    .with_provider(tag.to_owned())
}

fn environment(args: &[OsString]) -> Result<Env> {
    let mut env = Env::new();
    for arg in args {
        let bytes = arg.as_bytes();
        match bytes.iter().position(|byte| *byte == b'=') {
            Some(at) => env.set(OsStr::from_bytes(&bytes[..at]), OsStr::from_bytes(&bytes[at + 1..])),
            None => match std::env::var_os(arg) {
                Some(value) => env.set(arg, value),
                None => {
                    return Err(Error::invalid_argument(
                        format!("env.{}", arg.to_string_lossy()),
                        "it has no value here to pass on: give NAME=VALUE",
                    ));
                }
            },
        }
    }
    env.validate()?;
    Ok(env)
}

/// Splits at the last colon that has something before it.
fn split(arg: &OsStr) -> (PathBuf, Option<PathBuf>) {
    let bytes = arg.as_bytes();
    match bytes.iter().rposition(|byte| *byte == b':') {
        Some(at) if at > 0 => {
            let to = OsString::from_vec(bytes[at + 1..].to_vec());
            (OsStr::from_bytes(&bytes[..at]).into(), Some(to.into()))
        }
        _ => (arg.into(), None),
    }
}

fn upload(arg: &OsStr) -> Result<Copy> {
    let (from, to) = match split(arg) {
        // A name with a colon that is there as a whole is meant as a whole.
        _ if Path::new(arg).exists() => (PathBuf::from(arg), None),
        split => split,
    };
    let metadata = fs::metadata(&from).map_err(|error| Error::io(from.display(), error).with_field("upload"))?;
    let to = match to {
        Some(to) if !to.as_os_str().is_empty() => to,
        Some(_) => return Err(refuse("upload", "nothing follows the colon: where should it go?")),
        None if metadata.is_dir() => PathBuf::from("."),
        None => from.file_name().map(PathBuf::from).unwrap_or_default(),
    };
    if !metadata.is_dir() && !metadata.is_file() {
        let message = format!("{} is neither a directory nor a regular file", from.display());
        return Err(Error::new(ErrorKind::WrongFileType, message).with_field("upload"));
    }
    Ok(Copy { from, to })
}

fn download(arg: &OsStr) -> Result<Copy> {
    let (from, to) = split(arg);
    if from.as_os_str().is_empty() {
        return Err(refuse("download", "the path is empty"));
    }
    let to = match to {
        Some(to) if !to.as_os_str().is_empty() => to,
        Some(_) => return Err(refuse("download", "nothing follows the colon: where should it go?")),
        None => match from.file_name() {
            Some(name) => PathBuf::from(name),
            None => {
                let message = format!("{} has no name of its own: give PATH:LOCAL", from.display());
                return Err(refuse("download", message));
            }
        },
    };
    Ok(Copy { from, to })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(from: &str, to: &str) -> Copy {
        Copy {
            from: from.into(),
            to: to.into(),
        }
    }

    #[test]
    fn the_last_colon_of_a_download_separates() {
        let ok = |arg: &str| download(arg.as_ref()).expect("well formed");
        assert_eq!(ok("out"), copy("out", "out"));
        assert_eq!(ok("/a/out"), copy("/a/out", "out"));
        assert_eq!(ok("a:b:c"), copy("a:b", "c"));
        for unclear in ["", ".", "/", "a:", ".."] {
            let error = download(unclear.as_ref()).expect_err(unclear);
            assert_eq!(error.field(), Some("download"), "{unclear}");
        }
    }

    #[test]
    fn an_upload_goes_to_the_working_directory_unless_told_otherwise() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("a:b");
        fs::write(&file, "x").expect("written");
        let shown = dir.path().to_str().expect("UTF-8");
        let ok = |arg: String| upload(arg.as_ref()).expect("well formed");
        assert_eq!(ok(shown.to_owned()), copy(shown, "."));
        assert_eq!(ok(format!("{shown}:src")), copy(shown, "src"));
        assert_eq!(ok(format!("{shown}/a:b")), copy(&format!("{shown}/a:b"), "a:b"));
        assert_eq!(ok(format!("{shown}/a:b:c")), copy(&format!("{shown}/a:b"), "c"));
        for wrong in [format!("{shown}/none"), format!("{shown}:"), String::new()] {
            assert_eq!(
                upload(wrong.as_ref()).expect_err("refused").field(),
                Some("upload"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn variables_are_split_at_the_first_equals_sign() {
        let env = environment(&["A=b=c".into(), "EMPTY=".into()]).expect("well formed");
        assert_eq!(env, Env::from_iter([("A", "b=c"), ("EMPTY", "")]));
        assert_eq!(environment(&["=x".into()]).expect_err("no name").field(), Some("env."));
        let unset = environment(&["SURELY_NOT_SET_ANYWHERE".into()]).expect_err("no value");
        assert_eq!(unset.field(), Some("env.SURELY_NOT_SET_ANYWHERE"));
    }
}
