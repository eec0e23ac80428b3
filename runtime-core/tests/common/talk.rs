//! A child of a test that is spoken to.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus};

/// A running child that speaks in lines.
pub(crate) struct Talk {
    pub(crate) child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Talk {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Reads up to the line that ends with this word (the test harness writes on the same stream).
    pub(crate) fn expect(&mut self, word: &str) {
        let mut seen = Vec::new();
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            if line.ends_with(word) {
                return;
            }
            seen.push(line);
        }
        panic!("the child ended without {word:?}: {seen:?}");
    }

    /// Waits for the end; returns the rest of stderr, if it is piped.
    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        drop(self.child.stdin.take());
        let output = self.child.wait_with_output().unwrap();
        (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
    }
}
