//! [`Target`]: a provider under test.

use async_trait::async_trait;

use crate::cache::CacheDir;
use crate::config::RuntimeConfig;

/// A provider under test: how to get its boxes, and how to see from outside what is left of them.
#[async_trait]
pub trait Target: Send + Sync + 'static {
    /// What the report calls it.
    fn name(&self) -> &str;

    /// The configuration of one box. Called for each box.
    fn config(&self) -> Box<dyn RuntimeConfig>;

    /// The configuration of a box whose execution phase may reach only this, where policies are enforced by us or
    /// refused: then with `allow` as the field that is named.
    fn restricted(&self, allow: &[&str]) -> Option<Box<dyn RuntimeConfig>> {
        let _ = allow;
        None
    }

    /// Where boxes keep what outlives the process.
    fn cache(&self) -> CacheDir {
        CacheDir::from_env()
    }

    /// How many times as long as usual a case may take, for a provider whose every operation is slow.
    fn patience(&self) -> u32 {
        1
    }

    /// Whether output may be lost, and told to be by [`ConnectionLost`](crate::ErrorKind::ConnectionLost), when a program
    /// ends with unread input. An engine's own fault that nothing outside of it can mend.
    fn tells_of_lost_output(&self) -> bool {
        false
    }

    /// Whether a second box of the same name is refused while the first lives.
    fn names_are_unique(&self) -> bool {
        false
    }

    /// What exists of these boxes, seen from outside: a directory, a process, a container, a sandbox in the provider's
    /// list. Called after their teardown, repeatedly until it is empty or patience ends.
    ///
    /// # Errors
    /// Why it could not be asked.
    async fn leftovers(&self, boxes: &[BoxRef]) -> Result<Vec<String>, String>;

    /// Whether [`kill_box`](Self::kill_box) works.
    fn can_kill_box(&self) -> bool {
        false
    }

    /// Makes a box die behind our back, as a provider's own timeout or a crashed engine would.
    ///
    /// # Errors
    /// Why it could not be killed.
    async fn kill_box(&self, target: &BoxRef) -> Result<(), String> {
        let _ = target;
        Err("this target cannot kill a box".to_owned())
    }
}

/// A box that a case made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoxRef {
    /// Our name for it.
    pub name: String,
    /// The provider's id, if the case lived to learn it.
    pub id: Option<String>,
}
