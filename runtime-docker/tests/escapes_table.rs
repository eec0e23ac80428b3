//! The table of attempts in the documentation is the one that is tried.

#[test]
fn the_documented_attempts_are_those_of_the_suite() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/ESCAPES.md");
    let document = std::fs::read_to_string(path).expect("ESCAPES.md");
    let table = runtime_core::conformance::escape::table();
    if !document.contains(&table) {
        let head = document.split("| # |").next().unwrap_or_default();
        let wanted = format!("{head}{table}");
        let file = tempfile::NamedTempFile::with_prefix("ESCAPES-").expect("a file");
        std::fs::write(file.path(), wanted).expect("a file");
        let (_, kept) = file.keep().expect("a file");
        panic!(
            "ESCAPES.md differs from the suite; what it should be is in {}",
            kept.display()
        );
    }
}
