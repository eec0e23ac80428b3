//! Which box a task gets: its requirements against a config ([`resolve`]), and against a box that is already running
//! ([`check_borrowed`]).

use std::collections::HashSet;
use std::fmt;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::error::{Boundary, Error, ErrorKind, Result};
use crate::network::{Policy, Rule};

/// A field of a config, as placement sees it. Whether it was set counts, and not whether its value is the default:
/// an operator who writes the default value means it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting<T> {
    /// This kind of config has no such field.
    Missing,
    /// The operator did not set it.
    Unset,
    /// The operator set it.
    Set(T),
}

impl<T> Setting<T> {
    /// `Set` or `Unset`, of a field that the config has.
    pub fn from_option(value: Option<T>) -> Self {
        value.map_or(Self::Unset, Self::Set)
    }

    /// The value, if one is set.
    pub fn get(&self) -> Option<&T> {
        match self {
            Self::Set(value) => Some(value),
            _ => None,
        }
    }

    /// Whether the config has the field.
    pub fn is_supported(&self) -> bool {
        !matches!(self, Self::Missing)
    }
}

/// What a task asks for, or what a config has: cores, memory and disk in GB, GPUs as a specification such as `A100:2`.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceSettings {
    /// CPU cores.
    pub cpu: Setting<f64>,
    /// Memory in GB.
    pub memory: Setting<f64>,
    /// Disk in GB.
    pub disk: Setting<f64>,
    /// `A100`, `A100:2`, `2`.
    pub gpu: Setting<String>,
}

impl ResourceSettings {
    /// None of them is a field of the config.
    pub const MISSING: Self = Self {
        cpu: Setting::Missing,
        memory: Setting::Missing,
        disk: Setting::Missing,
        gpu: Setting::Missing,
    };
    /// All are fields of the config and none is set.
    pub const UNSET: Self = Self {
        cpu: Setting::Unset,
        memory: Setting::Unset,
        disk: Setting::Unset,
        gpu: Setting::Unset,
    };
}

/// A config of some provider, reduced to what decides about placement.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacementConfig {
    /// The `type` tag of the config.
    pub tag: &'static str,
    /// Whether a network policy can be enforced.
    pub restrictable: bool,
    /// The policy. [`Policy::open`] where it cannot be restricted.
    pub policy: Policy,
    /// The image. [`Setting::Missing`] where boxes are no containers.
    pub image: Setting<String>,
    /// The working directory inside the box.
    pub workdir: Setting<String>,
    /// The resources.
    pub resources: ResourceSettings,
}

impl PlacementConfig {
    /// A container-like config of which nothing is set.
    pub fn container(tag: &'static str, restrictable: bool) -> Self {
        Self {
            tag,
            restrictable,
            policy: Policy::open(),
            image: Setting::Unset,
            workdir: Setting::Unset,
            resources: ResourceSettings::UNSET,
        }
    }

    /// A config whose boxes are directories and processes of this machine: no image, no policy, no resources.
    pub fn local(tag: &'static str) -> Self {
        Self {
            tag,
            restrictable: false,
            policy: Policy::open(),
            image: Setting::Missing,
            workdir: Setting::Missing,
            resources: ResourceSettings::MISSING,
        }
    }

    /// With this policy.
    #[must_use]
    pub fn with_policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    fn is_restricted(&self) -> bool {
        self.restrictable && self.policy.is_restricted()
    }
}

/// What a task requires of its box. Everything is optional; the default requires nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TaskRequirements {
    /// The image that it runs in.
    pub image: Option<String>,
    /// Its working directory.
    pub workdir: Option<String>,
    /// CPU cores.
    pub cpu: Option<f64>,
    /// Memory in GB.
    pub memory: Option<f64>,
    /// Disk in GB.
    pub disk: Option<f64>,
    /// GPUs, such as `A100:2`.
    pub gpu: Option<String>,
    /// Its `network_allow` and `network_block`.
    pub network: Policy,
}

impl TaskRequirements {
    /// A task that requires nothing but this policy.
    pub fn with_network(network: Policy) -> Self {
        Self {
            network,
            ..Self::default()
        }
    }
}

/// A requirement that is not met although the task goes on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Note {
    /// The config has no such field, so what the task asks for is ignored.
    Ignored {
        /// The tag of the config.
        tag: &'static str,
        /// `cpu`, `memory`, `disk`, `gpu` or `workdir`.
        requirement: &'static str,
    },
    /// A borrowed box has something else than the task asks for.
    Differs {
        /// `image`, `workdir`, `cpu`, `memory`, `disk` or `gpu`.
        requirement: &'static str,
        /// What the task asks for.
        wanted: String,
        /// What the box has, if it is known.
        found: Option<String>,
    },
}

impl Note {
    /// Warns through `tracing`: about an ignored requirement once in the life of this process, about a difference
    /// every time.
    pub fn log(&self) {
        static SEEN: LazyLock<Mutex<HashSet<(&'static str, &'static str)>>> = LazyLock::new(Mutex::default);
        if let Self::Ignored { tag, requirement } = self
            && !SEEN
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert((tag, requirement))
        {
            return;
        }
        tracing::warn!("{self}");
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ignored { tag, requirement } => {
                write!(f, "{tag} has no {requirement}: the task's {requirement} is ignored")
            }
            Self::Differs {
                requirement,
                wanted,
                found: Some(found),
            } => {
                write!(
                    f,
                    "the borrowed box has the {requirement} {found}, the task asks for {wanted}"
                )
            }
            Self::Differs {
                requirement,
                wanted,
                found: None,
            } => {
                write!(
                    f,
                    "the task asks for the {requirement} {wanted}, the borrowed box was made without it"
                )
            }
        }
    }
}

/// A task resolved onto a config.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// The config with the task's values where the operator had set none.
    pub config: PlacementConfig,
    /// What the config cannot meet.
    pub notes: Vec<Note>,
}

/// Resolves what a task requires onto an operator's config: what the operator set wins over the task, and the task over
/// the defaults. The image is always the task's. Network policies are intersected, so a task can only narrow.
///
/// `check` is the validation of the config's kind for a policy ([`Policy::validate`] for our own enforcer). It judges
/// the task's lists, so that what a provider cannot enforce does not vanish in the intersection, and then the result.
///
/// # Errors
/// [`InvalidConfig`](ErrorKind::InvalidConfig) with a field such as `network_allow[2]` for the task's lists and for two
/// rules that cannot be intersected, `allow` or `block` for a result that does not hold; [`Unsupported`](ErrorKind::Unsupported) for
/// an image on a config without images and for a policy on a config that cannot be restricted.
///
/// ```
/// use runtime_core::network::Policy;
/// use runtime_core::placement::{PlacementConfig, TaskRequirements, resolve};
///
/// let operator = PlacementConfig::container("docker", true).with_policy(Policy::new(["*.example.com"], [])?);
/// let task = TaskRequirements {
///     image: Some("python:3.13".into()),
///     ..TaskRequirements::with_network(Policy::new(["api.example.com", "a.com"], [])?)
/// };
/// let resolved = resolve(&operator, &task, Policy::validate)?;
/// assert_eq!(resolved.config.policy.to_string(), "allow [api.example.com]");
/// assert_eq!(resolved.config.image.get().map(String::as_str), Some("python:3.13"));
/// # Ok::<(), runtime_core::Error>(())
/// ```
pub fn resolve(
    base: &PlacementConfig,
    task: &TaskRequirements,
    check: impl Fn(&Policy) -> Result<()>,
) -> Result<Resolved> {
    let mut config = base.clone();
    let mut notes = Vec::new();
    if let Some(image) = &task.image {
        if !base.image.is_supported() {
            return Err(no_images(base.tag).with_field("image"));
        }
        config.image = Setting::Set(image.clone());
    }
    {
        let mut fill = Fill {
            tag: base.tag,
            notes: &mut notes,
        };
        fill.field("workdir", &mut config.workdir, task.workdir.as_ref());
        fill.field("cpu", &mut config.resources.cpu, task.cpu.as_ref());
        fill.field("memory", &mut config.resources.memory, task.memory.as_ref());
        fill.field("disk", &mut config.resources.disk, task.disk.as_ref());
        fill.field("gpu", &mut config.resources.gpu, task.gpu.as_ref());
    }
    if task.network.is_restricted() {
        if !base.restrictable {
            return Err(Error::unsupported(format!(
                "{} cannot enforce a network policy, and the task has one",
                base.tag
            ))
            .with_boundary(Boundary::Other)
            .with_field("network_allow"));
        }
        config.policy = merge(&task.network, &base.policy, check)?;
    }
    Ok(Resolved { config, notes })
}

struct Fill<'a> {
    tag: &'static str,
    notes: &'a mut Vec<Note>,
}

impl Fill<'_> {
    fn field<T: Clone>(&mut self, requirement: &'static str, setting: &mut Setting<T>, wanted: Option<&T>) {
        let Some(wanted) = wanted else { return };
        match setting {
            Setting::Missing => self.notes.push(Note::Ignored {
                tag: self.tag,
                requirement,
            }),
            Setting::Unset => *setting = Setting::Set(wanted.clone()),
            Setting::Set(_) => {}
        }
    }
}

/// The task's policy merged over the operator's. Errors about the task's lists name the task's fields.
fn merge(task: &Policy, base: &Policy, check: impl Fn(&Policy) -> Result<()>) -> Result<Policy> {
    let of_the_task = |error: Error| match error.field() {
        Some(field) if field.starts_with("allow") || field.starts_with("block") => {
            let field = format!("network_{field}");
            error.with_field(field)
        }
        _ => error,
    };
    check(task).map_err(of_the_task)?;
    let task = task.normalized().map_err(of_the_task)?;
    let base = base.normalized()?;
    let merged = Policy::intersect(&task, &base).map_err(|error| {
        // A rule of the task is at fault, or the two sides together.
        if error.field().is_some_and(|field| field.contains('[')) {
            of_the_task(error)
        } else {
            error
        }
    })?;
    check(&merged)?;
    Ok(merged)
}

fn no_images(tag: &str) -> Error {
    Error::unsupported(format!("the task needs an image, and {tag} boxes are no containers"))
        .with_boundary(Boundary::Other)
}

/// A box that is already running, as somebody else set it up.
#[derive(Debug, Clone, Copy)]
pub struct BorrowedBox<'a> {
    /// Its config.
    pub config: &'a PlacementConfig,
    /// Whether it was stopped.
    pub stopped: bool,
}

/// Checks whether a task may run in a box that somebody else started. The box is taken as it stands: its policy has to
/// be *the same* as the one that the task would get from the borrower's own config. A wider one would give it
/// destinations that it must not have, a narrower one may lack some that it needs.
///
/// Policies are compared by the meaning of their rules: `https://a.com` is `https://a.com:443`, in any order. Another
/// image, workdir or size is a [`Note`] and no refusal: to share that world is why a box is borrowed.
///
/// `check` is as in [`resolve`].
///
/// # Errors
/// All are the caller's ([`Boundary::Other`]): [`SandboxGone`](ErrorKind::SandboxGone) for a stopped box;
/// [`Unsupported`](ErrorKind::Unsupported) if the box cannot be restricted at all, or has no image and the task needs one;
/// [`InvalidArgument`](ErrorKind::InvalidArgument) (field `runtime`) if it is of another kind than the borrower's config
/// or has another policy, quoting both; and what [`resolve`] returns for lists that do not go together.
pub fn check_borrowed(
    borrower: &PlacementConfig,
    task: &TaskRequirements,
    target: BorrowedBox<'_>,
    check: impl Fn(&Policy) -> Result<()>,
) -> Result<Vec<Note>> {
    if target.stopped {
        return Err(
            Error::new(ErrorKind::SandboxGone, "the box to borrow was stopped already").with_boundary(Boundary::Other),
        );
    }
    let found = target.config;
    if task.network.is_restricted() || borrower.is_restricted() {
        check_policy(borrower, task, found, check)?;
    }
    if task.image.is_some() && !found.image.is_supported() {
        return Err(no_images(found.tag).with_field("image"));
    }
    Ok(differences(task, found))
}

fn check_policy(
    borrower: &PlacementConfig,
    task: &TaskRequirements,
    found: &PlacementConfig,
    check: impl Fn(&Policy) -> Result<()>,
) -> Result<()> {
    if !found.restrictable {
        return Err(Error::unsupported(format!(
            "the {} box supports no network policy, and one is required: provision a box of its own",
            found.tag
        ))
        .with_boundary(Boundary::Other)
        .with_field("runtime"));
    }
    if borrower.restrictable && borrower.tag != found.tag {
        return Err(Error::invalid_argument(
            "runtime",
            format!(
                "a network policy for {} cannot be asked of a {} box",
                borrower.tag, found.tag
            ),
        ));
    }
    let expected = if !task.network.is_restricted() {
        borrower.policy.clone()
    } else if borrower.restrictable {
        merge(&task.network, &borrower.policy, check)?
    } else {
        merge(&task.network, &Policy::open(), check)?
    };
    if expected.is_equivalent(&found.policy) {
        return Ok(());
    }
    Err(Error::invalid_argument(
        "runtime",
        format!(
            "the box was made with the policy {}, the task requires {}",
            quoted(&found.policy),
            quoted(&expected)
        ),
    ))
}

/// Both lists, as they are compared.
fn quoted(policy: &Policy) -> String {
    let list = |rules: &[Rule]| {
        rules
            .iter()
            .map(|rule| format!("{rule:?}"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    format!("allow=[{}] block=[{}]", list(&policy.allow), list(&policy.block))
}

fn differences(task: &TaskRequirements, found: &PlacementConfig) -> Vec<Note> {
    let resources = &found.resources;
    [
        difference("image", task.image.as_ref(), &found.image),
        difference("workdir", task.workdir.as_ref(), &found.workdir),
        difference("cpu", task.cpu.as_ref(), &resources.cpu),
        difference("memory", task.memory.as_ref(), &resources.memory),
        difference("disk", task.disk.as_ref(), &resources.disk),
        difference("gpu", task.gpu.as_ref(), &resources.gpu),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn difference<T: PartialEq + fmt::Display>(
    requirement: &'static str,
    wanted: Option<&T>,
    found: &Setting<T>,
) -> Option<Note> {
    let wanted = wanted.filter(|wanted| found.get() != Some(wanted))?;
    Some(Note::Differs {
        requirement,
        wanted: wanted.to_string(),
        found: found.get().map(T::to_string),
    })
}

#[cfg(test)]
mod tests;
