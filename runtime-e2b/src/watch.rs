//! [`Watch`]: finds out that a program has ended while what it left behind holds its output open.
//!
//! envd says that a program has ended only when both its pipes are at their end, which a grandchild may put off for hours.
//! Until then the program is a zombie of envd, which one look at `/proc` tells. One look serves all programs of a box that
//! are asked about at the same time.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::watch;

use crate::envd::Envd;

/// How long questions are gathered.
const GATHER: Duration = Duration::from_millis(20);

/// Prints the ids of those of its arguments that are zombies.
const LOOK: &str = r#"for p; do if read -r s 2>/dev/null </proc/"$p"/stat; then s=${s##*) }; case $s in Z*) echo "$p";; esac; fi; done"#;

type Answer = Option<Arc<HashSet<u32>>>;

/// Asks about the programs of one box.
#[derive(Debug)]
pub(crate) struct Watch {
    envd: Arc<Envd>,
    open: Mutex<Option<Question>>,
    /// One look at a time: whoever asks meanwhile is served by the next.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Question {
    pids: Vec<u32>,
    answer: watch::Sender<Answer>,
}

impl Watch {
    pub(crate) fn new(envd: Arc<Envd>) -> Arc<Self> {
        Arc::new(Self {
            envd,
            open: Mutex::new(None),
            turn: tokio::sync::Mutex::new(()),
        })
    }

    /// Whether the program has ended without being reaped. `false` where that cannot be told.
    pub(crate) async fn is_zombie(self: &Arc<Self>, pid: u32) -> bool {
        let mut answer = self.ask(pid);
        let answered = answer.wait_for(Option::is_some).await;
        answered.is_ok_and(|zombies| zombies.as_ref().is_some_and(|zombies| zombies.contains(&pid)))
    }

    fn ask(self: &Arc<Self>, pid: u32) -> watch::Receiver<Answer> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(question) = open.as_mut() {
            question.pids.push(pid);
            return question.answer.subscribe();
        }
        let answer = watch::Sender::new(None);
        let receiver = answer.subscribe();
        *open = Some(Question {
            pids: vec![pid],
            answer,
        });
        let watch = Arc::downgrade(self);
        tokio::spawn(look(watch));
        receiver
    }
}

async fn look(watch: Weak<Watch>) {
    tokio::time::sleep(GATHER).await;
    let Some(watch) = watch.upgrade() else { return };
    let _turn = watch.turn.lock().await;
    let question = watch.open.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(question) = question else { return };
    let pids: Vec<String> = question.pids.iter().map(u32::to_string).collect();
    let pids: Vec<&str> = pids.iter().map(String::as_str).collect();
    let zombies = match watch.envd.script(LOOK, &pids).await {
        Ok(said) => String::from_utf8_lossy(&said.stdout)
            .lines()
            .filter_map(|line| line.trim().parse().ok())
            .collect(),
        Err(error) => {
            tracing::debug!(%error, "e2b: could not look at the programs of a sandbox");
            HashSet::new()
        }
    };
    question.answer.send_replace(Some(Arc::new(zombies)));
}
