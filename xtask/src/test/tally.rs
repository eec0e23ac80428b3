//! Reads what test programs print, and counts.

/// How a test says that it could not look: `SKIPPED: REQUIREMENT: reason`.
const SKIPPED: &str = "SKIPPED: ";

/// A test that could not look at what it is for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Skip {
    pub(crate) test: String,
    pub(crate) reason: String,
}

impl Skip {
    /// What it lacked, if it says so.
    pub(crate) fn requirement(&self) -> Option<&str> {
        self.reason.split_once(':').map(|(name, _)| name.trim())
    }
}

/// Where in the output of a test program a line is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Section {
    #[default]
    Progress,
    /// What passing tests printed.
    Successes,
    /// What failing tests printed.
    Failures,
}

/// Counts over several test programs.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    passed: usize,
    failed: usize,
    ignored: usize,
    skips: Vec<Skip>,
    faults: Vec<String>,
    section: Section,
    current: String,
}

impl Tally {
    /// Reads one line; returns what is to be shown of it.
    pub(super) fn line(&mut self, line: &str) -> Option<String> {
        if let Some(counts) = line.strip_prefix("test result: ") {
            self.section = Section::Progress;
            self.add(counts);
            return Some(line.to_owned());
        }
        match line {
            "successes:" => {
                self.section = Section::Successes;
                return None;
            }
            "failures:" => self.section = Section::Failures,
            _ => {}
        }
        if let Some(name) = line
            .strip_prefix("---- ")
            .and_then(|rest| rest.strip_suffix(" stdout ----"))
        {
            name.clone_into(&mut self.current);
        }
        if self.section != Section::Failures
            && let Some(reason) = line.strip_prefix(SKIPPED)
        {
            let test = match self.section {
                Section::Successes => std::mem::take(&mut self.current),
                // A test program with a main of its own says it as it goes.
                _ => "a test".to_owned(),
            };
            // A test that lacks two things is skipped once.
            if test.is_empty() {
                return None;
            }
            let shown = format!("test {test} ... {line}");
            self.skips.push(Skip {
                test,
                reason: reason.to_owned(),
            });
            return Some(shown);
        }
        (self.section != Section::Successes).then(|| line.to_owned())
    }

    /// `ok. 12 passed; 0 failed; 1 ignored; ...`
    fn add(&mut self, counts: &str) {
        let count = |what: &str| {
            let words: Vec<&str> = counts.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
            let number = words.windows(2).find(|pair| pair[1] == what).map(|pair| pair[0]);
            number.and_then(|number| number.parse::<usize>().ok()).unwrap_or(0)
        };
        self.passed += count("passed");
        self.failed += count("failed");
        self.ignored += count("ignored");
    }

    /// The command that ran the tests has ended.
    pub(super) fn ended(&mut self, success: bool) {
        if !success && self.failed == 0 {
            self.faults
                .push("the tests did not run to their end: see above".to_owned());
        }
    }

    /// Counts failures that no test program counts.
    pub(crate) fn fail_for(&mut self, faults: impl IntoIterator<Item = String>) {
        self.faults.extend(faults);
    }

    /// Tests that could not look at what they are for.
    pub(crate) fn skipped(&self) -> impl Iterator<Item = &Skip> {
        self.skips.iter()
    }

    /// Whether something ran and nothing failed.
    pub(crate) fn is_green(&self) -> bool {
        self.failed == 0 && self.faults.is_empty()
    }

    /// What was skipped and why, what else went wrong, and the line with the counts.
    pub(crate) fn closing(&self) -> String {
        let mut text = String::new();
        for skip in &self.skips {
            text.push_str(&format!("skipped: {}: {}\n", skip.test, skip.reason));
        }
        for fault in &self.faults {
            text.push_str(&format!("FAILED: {fault}\n"));
        }
        // The test program takes a skipped test for one that passed.
        let passed = self.passed.saturating_sub(self.skips.len());
        let failed = self.failed + self.faults.len();
        let skipped = self.skips.len() + self.ignored;
        text.push_str(&format!("{passed} passed, {failed} failed, {skipped} skipped\n"));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &str) -> (Tally, Vec<String>) {
        let mut tally = Tally::default();
        let shown = output.lines().filter_map(|line| tally.line(line)).collect();
        (tally, shown)
    }

    #[test]
    fn counts_add_up_over_test_programs() {
        let (tally, _) = read(
            "test result: ok. 11 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s\n\
             test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s\n",
        );
        assert_eq!(tally.closing(), "13 passed, 3 failed, 1 skipped\n");
        assert!(!tally.is_green());
    }

    #[test]
    fn a_test_that_says_that_it_was_skipped_did_not_pass() {
        let (tally, shown) = read(
            "running 3 tests\ntest a ... ok\ntest b ... ok\n\nsuccesses:\n\n---- a stdout ----\nnoise\n\
             SKIPPED: docker: no engine\nSKIPPED: podman: no engine\n\n---- b stdout ----\nmore noise\n\n\n\
             successes:\n    a\n    b\n\ntest result: ok. 2 passed; 0 failed; 0 ignored;\n",
        );
        assert_eq!(
            tally.closing(),
            "skipped: a: docker: no engine\n1 passed, 0 failed, 1 skipped\n"
        );
        assert_eq!(tally.skipped().next().and_then(Skip::requirement), Some("docker"));
        assert!(
            shown.contains(&"test a ... SKIPPED: docker: no engine".to_owned()),
            "{shown:?}"
        );
        assert!(!shown.iter().any(|line| line.contains("noise")), "{shown:?}");
    }

    #[test]
    fn what_a_failing_test_printed_is_shown_in_full_and_is_no_skip() {
        let (tally, shown) = read(
            "failures:\n\n---- a stdout ----\nSKIPPED: docker: x\npanicked\n\nfailures:\n    a\n\n\
             test result: FAILED. 0 passed; 1 failed; 0 ignored;\n",
        );
        assert_eq!(tally.closing(), "0 passed, 1 failed, 0 skipped\n");
        assert!(shown.contains(&"panicked".to_owned()));
    }

    #[test]
    fn a_build_that_failed_is_a_failure_although_no_test_failed() {
        let mut tally = Tally::default();
        tally.ended(false);
        assert!(!tally.is_green());
        assert!(
            tally.closing().ends_with("0 passed, 1 failed, 0 skipped\n"),
            "{}",
            tally.closing()
        );
    }
}
