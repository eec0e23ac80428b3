//! [`Policy`]: an allow list and a block list.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::decision::Decision;
use super::destination::{Destination, Scheme};
use super::routes::Routes;
use super::rule::{Rule, RuleList, RuleProblem};
use crate::error::{Error, Result};

/// The most rules of one list, and of an intersection.
pub const MAX_RULES: usize = 4096;

/// What a box may reach in its execution phase: the fields `allow` (default `["*"]`) and `block` (default `[]`) of a
/// config.
///
/// The lists are as they were written until [`normalized`](Self::normalized). Asking a policy is safe in either state:
/// a block always wins, and a block rule that cannot be parsed blocks everything.
///
/// ```
/// use runtime_core::ErrorKind;
/// use runtime_core::network::{Mode, Policy, Scheme};
///
/// let policy: Policy = serde_json::from_str(r#"{"block": ["example.com"]}"#).unwrap();
/// assert_eq!(policy.mode(), Mode::DenyList);
/// assert!(policy.permits(Scheme::Https, "example.org", 443).is_permitted());
/// let refused = policy.permits(Scheme::Https, "api.example.com", 443);
/// assert_eq!(refused.rule().map(|rule| rule.as_str()), Some("example.com"));
///
/// let error = Policy::new(["a.com", "::1"], []).unwrap_err();
/// assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidConfig, Some("allow[1]")));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// What may be reached.
    pub allow: Vec<Rule>,
    /// What may not be. Covers subdomains.
    pub block: Vec<Rule>,
}

/// The four things that a policy can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Everything may be reached.
    Open,
    /// Everything but what `block` names.
    DenyList,
    /// Only what `allow` names.
    AllowList,
    /// Nothing but the framework's own routes.
    FrameworkOnly,
}

impl Default for Policy {
    fn default() -> Self {
        Self::open()
    }
}

impl Policy {
    /// Everything may be reached.
    pub fn open() -> Self {
        Self {
            allow: vec![Rule::any()],
            block: Vec::new(),
        }
    }

    /// Nothing but the framework's own routes.
    pub fn framework_only() -> Self {
        Self {
            allow: Vec::new(),
            block: vec![Rule::any()],
        }
    }

    /// The lists as they are: neither checked nor normalised.
    pub fn unchecked<A: Into<Rule>, B: Into<Rule>>(
        allow: impl IntoIterator<Item = A>,
        block: impl IntoIterator<Item = B>,
    ) -> Self {
        Self {
            allow: allow.into_iter().map(Into::into).collect(),
            block: block.into_iter().map(Into::into).collect(),
        }
    }

    /// A policy that is [valid](Self::validate), in its normal form.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn new<'a>(allow: impl IntoIterator<Item = &'a str>, block: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let policy = Self::unchecked(allow, block);
        policy.validate()?;
        policy.normalized()
    }

    /// Checks every rule with [`Rule::check`] and that the lists go together.
    ///
    /// Providers that enforce by themselves accept other forms (E2B bare IPv6 addresses, Prime port ranges): they
    /// check rules in their own way and call [`normalized`](Self::normalized).
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::ErrorKind::InvalidConfig); the field is `allow[3]` or `block[0]` for a rule.
    pub fn validate(&self) -> Result<()> {
        self.check_lengths()?;
        for (list, rules) in [(RuleList::Allow, &self.allow), (RuleList::Block, &self.block)] {
            for (index, rule) in rules.iter().enumerate() {
                rule.check(list)
                    .map_err(|problem| rule_error(list, index, rule, problem))?;
            }
        }
        self.normalized().map(drop)
    }

    /// The normal form: nothing allowed and everything blocked are both framework-only. Rules are kept as they are,
    /// and are not checked.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::ErrorKind::InvalidConfig) for a block list beside an allow list other than `["*"]`
    /// (field `block`): providers offer one or the other, so a mixture cannot be enforced everywhere; and for a list
    /// of more than [`MAX_RULES`].
    pub fn normalized(&self) -> Result<Self> {
        self.check_lengths()?;
        if self.allow.is_empty() || self.block.iter().any(Rule::is_any) {
            return Ok(Self::framework_only());
        }
        let open = matches!(self.allow.as_slice(), [only] if only.is_any());
        if !open && !self.block.is_empty() {
            return Err(Error::invalid_config(
                RuleList::Block.as_str(),
                "an allow list and a block list exclude each other: to block, allow must be [\"*\"]",
            ));
        }
        Ok(self.clone())
    }

    fn check_lengths(&self) -> Result<()> {
        for (list, rules) in [(RuleList::Allow, &self.allow), (RuleList::Block, &self.block)] {
            if rules.len() > MAX_RULES {
                return Err(too_many(list));
            }
        }
        Ok(())
    }

    /// Which of the four it is, once normalised.
    pub fn mode(&self) -> Mode {
        if self.allow.is_empty() || self.block.iter().any(Rule::is_any) {
            Mode::FrameworkOnly
        } else if !self.allow.iter().any(Rule::is_any) {
            Mode::AllowList
        } else if self.block.is_empty() {
            Mode::Open
        } else {
            Mode::DenyList
        }
    }

    /// Whether anything is out of reach.
    pub fn is_restricted(&self) -> bool {
        self.mode() != Mode::Open
    }

    /// Whether `host` may be reached at `port` with `scheme`, and which rule decides: refused if a block rule covers it
    /// or one of its parent domains, else permitted if an allow rule matches it.
    pub fn permits(&self, scheme: Scheme, host: &str, port: u16) -> Decision<'_> {
        self.decide(&Destination::new(scheme, host, port))
    }

    /// [`permits`](Self::permits) for a destination.
    pub fn decide(&self, destination: &Destination) -> Decision<'_> {
        if !destination.is_well_formed() {
            return Decision::MalformedHost;
        }
        let blocks = |rule: &&Rule| rule.problem().is_some() || rule.covers(destination);
        if let Some(rule) = self.block.iter().find(blocks) {
            return Decision::BlockedBy(rule);
        }
        match self.allow.iter().find(|rule| rule.matches(destination)) {
            Some(rule) => Decision::AllowedBy(rule),
            None => Decision::NotAllowed,
        }
    }

    /// The block rule that names `address`, alone or by its network, so that a blocked address is not reached through
    /// a name that resolves to it.
    pub fn blocks_address(&self, destination: &Destination, address: IpAddr) -> Option<&Rule> {
        self.block.iter().find(|rule| rule.covers_address(destination, address))
    }

    /// The places that `tcp` rules ask a relay for, each once.
    pub fn relays(&self) -> Vec<Destination> {
        let mut seen = HashSet::new();
        self.allow
            .iter()
            .filter_map(Rule::relay)
            .filter(|relay| seen.insert(relay.clone()))
            .collect()
    }

    /// What both the task's and the operator's policy permit, in its normal form.
    ///
    /// Allow lists are intersected rule by rule in the order of the task; block lists are joined, the task's first.
    /// Never permits a scheme, host and port that either side refuses. One thing can be wider: `a.com` meets
    /// `https://a.com:8443` in the latter, which names a scheme and so grants a [tunnel](super::EgressPolicy::decide)
    /// to the odd port, which `a.com` alone does not.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::ErrorKind::InvalidConfig): lists of either side, or of the result, that exclude each
    /// other; two rules whose intersection is not known (field: the task's, such as `allow[0]`); a result of more than
    /// [`MAX_RULES`].
    pub fn intersect(task: &Policy, base: &Policy) -> Result<Self> {
        let (task, base) = (task.normalized()?, base.normalized()?);
        let allow = if task.allow.iter().any(Rule::is_any) {
            base.allow
        } else if base.allow.iter().any(Rule::is_any) {
            task.allow
        } else {
            intersect_lists(&task.allow, &base.allow)?
        };
        let block = unique(task.block.into_iter().chain(base.block));
        Self { allow, block }.normalized()
    }

    /// Whether both mean the same: the same set of [canonical](Rule::canonical) rules in each list of the normal
    /// form, in any order. Lists without a normal form are equal to nothing.
    pub fn is_equivalent(&self, other: &Policy) -> bool {
        fn canonical(rules: &[Rule]) -> BTreeSet<String> {
            rules.iter().map(|rule| rule.canonical().into_owned()).collect()
        }
        match (self.normalized(), other.normalized()) {
            (Ok(left), Ok(right)) => match (left.mode(), right.mode()) {
                // `["*", "a.com"]` is `["*"]`.
                (Mode::Open, Mode::Open) => true,
                _ => {
                    canonical(&left.allow) == canonical(&right.allow)
                        && canonical(&left.block) == canonical(&right.block)
                }
            },
            _ => false,
        }
    }

    /// The hosts of the framework's routes, without loopback, and then the allow rules, each once: the entries that a
    /// provider with one flat allowlist needs.
    pub fn entries(&self, routes: &Routes) -> Vec<String> {
        let routes = routes
            .iter()
            .filter(|origin| !origin.is_loopback())
            .map(|origin| origin.host().to_owned());
        unique(routes.chain(self.allow.iter().map(|rule| rule.as_str().to_owned())))
    }
}

/// `allow [a.com, b.com]`, `block [x.com]`, `open`, `framework only`.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, rules) = match self.mode() {
            Mode::Open => return f.write_str("open"),
            Mode::FrameworkOnly => return f.write_str("framework only"),
            Mode::AllowList => ("allow", &self.allow),
            Mode::DenyList => ("block", &self.block),
        };
        write!(f, "{name} [")?;
        for (index, rule) in rules.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{}", rule.shown())?;
        }
        f.write_str("]")
    }
}

fn intersect_lists(task: &[Rule], base: &[Rule]) -> Result<Vec<Rule>> {
    let mut seen = HashSet::new();
    let mut both = Vec::new();
    for (index, left) in task.iter().enumerate() {
        for right in base {
            let found = left.intersect(right).map_err(|problem| {
                Error::invalid_config(
                    field(RuleList::Allow, index),
                    format!("{} and {}: {problem}", left.shown(), right.shown()),
                )
            })?;
            if let Some(rule) = found
                && seen.insert(rule.clone())
            {
                if both.len() == MAX_RULES {
                    return Err(too_many(RuleList::Allow));
                }
                both.push(rule);
            }
        }
    }
    Ok(both)
}

fn unique<T: Clone + Eq + std::hash::Hash>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = HashSet::new();
    items.filter(|item| seen.insert(item.clone())).collect()
}

fn field(list: RuleList, index: usize) -> String {
    format!("{}[{index}]", list.as_str())
}

fn rule_error(list: RuleList, index: usize, rule: &Rule, problem: RuleProblem) -> Error {
    Error::invalid_config(field(list, index), format!("{}: {problem}", rule.shown())).with_source(problem)
}

fn too_many(list: RuleList) -> Error {
    Error::invalid_config(list.as_str(), format!("more than {MAX_RULES} rules"))
}
