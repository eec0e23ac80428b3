//! The intersection of two rules: what both of them match.

use super::host::HostPattern;
use super::rule::{Form, Rule, RuleProblem};

impl Rule {
    /// The rule that matches what both match; `None` when that is nothing. Of two ports or schemes of which one is
    /// open the other is taken; path and user information are dropped.
    ///
    /// # Errors
    /// The problem of a text that is no rule; [`NotComparable`](RuleProblem::NotComparable) for a rule without a host,
    /// and for one that has a path and no scheme or is a network, unless the texts are equal;
    /// [`GlobOverlap`](RuleProblem::GlobOverlap) for two patterns of which neither is provably inside the other.
    pub fn intersect(&self, other: &Rule) -> Result<Option<Rule>, RuleProblem> {
        if self == other {
            return Ok(Some(self.clone()));
        }
        let (left, right) = (self.form()?, other.form()?);
        for form in [left, right] {
            let bare = form.scheme.is_none();
            if form.host == HostPattern::Empty || (bare && (!form.tail.is_empty() || is_network(form))) {
                return Err(RuleProblem::NotComparable);
            }
        }
        if differ(&left.scheme, &right.scheme) || differ(&left.port(), &right.port()) || is_half_tcp(left, right) {
            return Ok(None);
        }
        let Some(host) = left.host.intersect(&right.host).map_err(|_| RuleProblem::GlobOverlap)? else {
            return Ok(None);
        };
        let both = Form {
            scheme: left.scheme.clone().or_else(|| right.scheme.clone()),
            host,
            explicit_port: left.port().or(right.port()),
            user_info: false,
            tail: String::new(),
        };
        Ok(Some(Rule::new(both.to_string())))
    }
}

fn is_network(form: &Form) -> bool {
    matches!(form.host, HostPattern::Network(_))
}

/// Whether both say something and not the same.
fn differ<T: PartialEq>(left: &Option<T>, right: &Option<T>) -> bool {
    matches!((left, right), (Some(left), Some(right)) if left != right)
}

/// A tcp rule and one without a scheme, which does not speak of tcp unless it is `*`.
fn is_half_tcp(left: &Form, right: &Form) -> bool {
    let tcp = |form: &Form| form.scheme.as_deref() == Some("tcp");
    let silent = |form: &Form| form.scheme.is_none() && !form.is_unbounded();
    (tcp(left) && silent(right)) || (tcp(right) && silent(left))
}
