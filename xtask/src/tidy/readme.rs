//! READMEs: that they are there, and that what is generated or copied in them is current.

use std::fs;

use anyhow::{Context, Result};

use super::{Fault, House};
use crate::providers::{Table, registry};

const ROOT: &str = "README.md";
const CORE: &str = "runtime-core/README.md";
const CORE_LIB: &str = "runtime-core/src/lib.rs";

/// Around the generated table.
const TABLE: (&str, &str) = ("<!-- capabilities -->\n", "<!-- /capabilities -->");
/// Around the example, which is a doc test of the core.
const EXAMPLE: (&str, &str) = ("<!-- example -->\n", "<!-- /example -->");

pub(super) fn present(house: &House) -> Result<Vec<Fault>> {
    let missing = house.workspace.packages.iter().filter(|package| {
        !fs::read_to_string(package.dir().join(ROOT)).is_ok_and(|text| text.trim_start().starts_with("# "))
    });
    Ok(missing
        .map(|package| Fault::new(&package.name, "has no README.md with a title"))
        .collect())
}

pub(super) fn table(house: &House) -> Result<Vec<Fault>> {
    let absent = missing_providers(house);
    if !absent.is_empty() {
        let what = format!(
            "this xtask was built without {}: it cannot know the whole table",
            absent.join(", ")
        );
        return Ok(vec![Fault::new(ROOT, what)]);
    }
    compare(
        house,
        ROOT,
        TABLE,
        &Table::of(&registry()).markdown(),
        "run `cargo xtask tidy --fix`",
    )
}

/// Providers of the default build that this one lacks.
fn missing_providers(house: &House) -> Vec<&str> {
    let Some(xtask) = house.workspace.package("xtask") else {
        return Vec::new();
    };
    let wanted = xtask.features.get("default").into_iter().flatten().map(String::as_str);
    let built = crate::providers::FEATURES;
    wanted
        .filter(|name| built.iter().any(|(known, on)| known == name && !on))
        .collect()
}

pub(super) fn example(house: &House) -> Result<Vec<Fault>> {
    let Some(tested) = house.file(CORE).and_then(|file| between(&file.text, EXAMPLE)) else {
        return Ok(vec![Fault::new(CORE, "has no example between its marks")]);
    };
    let mut faults = compare(house, ROOT, EXAMPLE, tested, "run `cargo xtask tidy --fix`")?;
    if !tested.trim_start().starts_with("```rust\n") {
        faults.push(Fault::new(CORE, "the example is no Rust that a doc test runs"));
    }
    if !house
        .file(CORE_LIB)
        .is_some_and(|file| file.text.contains("include_str!(\"../README.md\")"))
    {
        faults.push(Fault::new(CORE_LIB, "does not include its README in the doc tests"));
    }
    Ok(faults)
}

/// Rewrites the root README's generated parts.
pub(super) fn fix(house: &House) -> Result<()> {
    let path = house.workspace.root.join(ROOT);
    let mut text = fs::read_to_string(&path).with_context(|| format!("reading {ROOT}"))?;
    let core = fs::read_to_string(house.workspace.root.join(CORE)).with_context(|| format!("reading {CORE}"))?;
    let example = between(&core, EXAMPLE).with_context(|| format!("{CORE} has no example between its marks"))?;
    for (marks, content) in [(TABLE, Table::of(&registry()).markdown().as_str()), (EXAMPLE, example)] {
        text = replaced(&text, marks, content).with_context(|| format!("{ROOT} has no `{}`", marks.0.trim_end()))?;
    }
    fs::write(&path, text).with_context(|| format!("writing {ROOT}"))
}

fn compare(house: &House, path: &str, marks: (&str, &str), wanted: &str, what_to_do: &str) -> Result<Vec<Fault>> {
    let found = house.file(path).and_then(|file| between(&file.text, marks));
    Ok(match found {
        Some(found) if found == wanted => Vec::new(),
        Some(_) => vec![Fault::new(
            path,
            format!("what follows `{}` is not current: {what_to_do}", marks.0.trim_end()),
        )],
        None => vec![Fault::new(path, format!("has no `{}`", marks.0.trim_end()))],
    })
}

fn between<'a>(text: &'a str, (start, end): (&str, &str)) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    rest.split_once(end).map(|(inner, _)| inner)
}

fn replaced(text: &str, (start, end): (&str, &str), content: &str) -> Option<String> {
    let (before, rest) = text.split_once(start)?;
    let (_, after) = rest.split_once(end)?;
    Some(format!("{before}{start}{content}{end}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_between_the_marks_is_found_and_replaced_and_nothing_else_is_touched() {
        let text = "a\n<!-- capabilities -->\nold\n<!-- /capabilities -->\nb\n";
        assert_eq!(between(text, TABLE), Some("old\n"));
        let new = replaced(text, TABLE, "new\n").expect("marked");
        assert_eq!(new, "a\n<!-- capabilities -->\nnew\n<!-- /capabilities -->\nb\n");
        assert_eq!(between("no marks", TABLE), None);
        assert_eq!(replaced("no marks", TABLE, "x"), None);
    }
}
