//! Rules for the text of the files.

use anyhow::Result;

use super::{Fault, File, House};

/// Past this many lines, tests aside, a file is two.
const MAX_LINES: usize = 800;

/// Words that say that something is left undone or switched off. Put together here, so that this file may name them.
const UNFINISHED: &[(&str, &str)] = &[
    (concat!("to", "do!("), "unfinished code"),
    (concat!("unimpl", "emented!("), "unfinished code"),
    (concat!("db", "g!("), "a debugging aid"),
    (concat!("#[ign", "ore"), "a test that is switched off"),
    (concat!("allow(dead", "_code"), "code that nobody uses"),
];

pub(super) fn sizes(house: &House) -> Result<Vec<Fault>> {
    Ok(house
        .files
        .iter()
        .filter(|file| file.is_rust())
        .filter_map(too_long)
        .collect())
}

fn too_long(file: &File) -> Option<Fault> {
    let is_test = file.path.components().any(|part| part.as_os_str() == "tests")
        || file.path.file_stem().is_some_and(|stem| stem == "tests");
    let lines = lines_without_tests(&file.text);
    let what = format!("{lines} lines without tests: past {MAX_LINES} it is two files");
    (!is_test && lines > MAX_LINES).then(|| Fault::new(file.path.display(), what))
}

/// Lines outside modules that are compiled for tests alone.
fn lines_without_tests(text: &str) -> usize {
    let mut count = 0;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let opens_tests = line == "#[cfg(test)]"
            && lines
                .peek()
                .is_some_and(|next| next.starts_with("mod ") && next.ends_with('{'));
        if opens_tests {
            // rustfmt ends a module of the top level with a brace of its own.
            lines.by_ref().find(|line| *line == "}");
        } else {
            count += 1;
        }
    }
    count
}

pub(super) fn unfinished(house: &House) -> Result<Vec<Fault>> {
    let files = house.files.iter().filter(|file| file.is_rust());
    Ok(files.flat_map(|file| find(file, UNFINISHED)).collect())
}

pub(super) fn machine_paths(house: &House) -> Result<Vec<Fault>> {
    let root = house.workspace.root.display().to_string();
    let mut words = vec![(concat!("/wo", "rk/"), "a path of one machine")];
    // A short one, such as `/src`, is in many a file for reasons of its own.
    if house.workspace.root.components().count() > 3 {
        words.push((root.as_str(), "the path of this clone"));
    }
    Ok(house.files.iter().flat_map(|file| find(file, &words)).collect())
}

/// What several test programs share need not all be used by each of them, if it says so.
fn is_argued_for(file: &File, line: &str, word: &str) -> bool {
    let is_shared = file
        .path
        .components()
        .any(|part| part.as_os_str() == "tests" || part.as_os_str() == "benches");
    word.ends_with("_code") && is_shared && line.contains("reason = ")
}

/// The lines of a file that hold one of the words.
fn find(file: &File, words: &[(&str, &str)]) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (number, line) in file.text.lines().enumerate() {
        for (word, what) in words {
            if let Some(at) = line.find(word)
                // `net/work/` is no path from the root.
                && !(word.starts_with('/') && line[..at].ends_with(|c: char| c.is_alphanumeric()))
                && !is_argued_for(file, line, word)
            {
                let place = format!("{}:{}", file.path.display(), number + 1);
                faults.push(Fault::new(place, format!("{what}: `{word}`")));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: String) -> File {
        File {
            path: path.into(),
            text,
        }
    }

    #[test]
    fn a_file_of_more_than_800_lines_is_told_but_its_tests_do_not_count() {
        let code = "x\n".repeat(800);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "    y\n".repeat(500));
        assert_eq!(too_long(&file("a.rs", format!("{code}{tests}"))), None);
        let fault = too_long(&file("a.rs", format!("{code}{tests}x\n"))).expect("too long");
        assert!(fault.what.starts_with("801 lines"), "{fault}");
        assert_eq!(too_long(&file("a/tests/b.rs", code.repeat(2))), None);
        assert_eq!(too_long(&file("a/tests.rs", code.repeat(2))), None);
    }

    #[test]
    fn unfinished_code_is_found_with_its_line() {
        for (word, _) in UNFINISHED {
            let faults = find(&file("a.rs", format!("fn a() {{\n    {word}\n")), UNFINISHED);
            assert_eq!(faults.len(), 1, "{word}");
            assert_eq!(faults[0].place, "a.rs:2");
        }
    }

    #[test]
    fn shared_parts_of_tests_may_be_unused_with_a_reason_and_nothing_else_may() {
        let line = |reason: &str| format!("#![{}{reason})]", UNFINISHED[4].0);
        let faults = |path: &str, reason: &str| find(&file(path, line(reason)), UNFINISHED).len();
        assert_eq!(faults("a/tests/common/mod.rs", ", reason = \"each uses a part\""), 0);
        assert_eq!(faults("a/tests/common/mod.rs", ""), 1);
        assert_eq!(faults("a/src/lib.rs", ", reason = \"later\""), 1);
    }

    #[test]
    fn a_path_from_the_root_is_found_and_the_end_of_another_is_not() {
        let words = [("/here/", "a path")];
        assert_eq!(find(&file("a", "see /here/x".into()), &words).len(), 1);
        assert_eq!(find(&file("a", "see also there/here/x".into()), &words), []);
    }
}
