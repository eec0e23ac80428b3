//! The table of providers against capabilities.

use std::fmt::Write;

use runtime_core::{Capabilities, Registry};
use serde_json::{Map, Value, json};

/// Capabilities in the order of the table, with what each is called there.
const ROWS: &[(&str, &str)] = &[
    ("local", "on this machine"),
    ("live_processes", "live processes"),
    ("stdin_eof", "EOF on stdin"),
    ("group_signals", "signals to the whole process group"),
    ("kills_leftovers", "leftover processes killed"),
    ("kills_escaped", "daemons killed with the box"),
    ("back_pressure", "back pressure reaches the program"),
    ("independent_streams", "stdout and stderr independent"),
    ("non_utf8_argv", "any bytes in argv and environment"),
    ("non_utf8_paths", "any bytes in file names"),
    ("exit_signals", "signals told from exit codes"),
    ("program_exit_signals", "the same for the main program"),
    ("start_failures", "failed starts told from exit codes 126 and 127"),
    ("oom_detection", "out of memory told from SIGKILL"),
    ("max_argv_bytes", "argv and environment, bytes"),
    ("max_argument_bytes", "one argument, bytes"),
    ("max_live_processes", "live processes at once"),
    ("atomic_write", "atomic file writes"),
    ("file_modes", "file modes"),
    ("symlinks", "symbolic links in trees"),
    ("special_file_reads", "bounded reads of FIFOs and devices"),
    ("inherits_host_env", "inherits the host's environment"),
    ("private_filesystem", "private file system"),
    ("expose", "ports reachable from outside"),
    ("egress", "network policy"),
    ("pause", "pause and resume"),
    ("gpu", "GPUs"),
    ("max_lifetime_seconds", "lifetime limit, seconds"),
];

/// The column of the embedded runtime's boxes of namespaces.
const ISOLATED: &str = "subprocess, namespaces";

/// Providers by tag, each with its capabilities as JSON.
pub(crate) struct Table {
    providers: Vec<(&'static str, Map<String, Value>)>,
}

impl Table {
    pub(crate) fn of(registry: &Registry) -> Self {
        let mut providers = Vec::new();
        for provider in registry.providers() {
            providers.push((provider.tag(), as_map(&provider.capabilities())));
            // What the embedded runtime can do is another thing with isolation, where this build has that.
            let isolated = json!({"type": provider.tag(), "isolation": "namespaces"});
            if let Ok(config) = registry.parse(isolated) {
                providers.push((ISOLATED, as_map(&config.capabilities())));
            }
        }
        Self { providers }
    }

    pub(crate) fn json(&self) -> Value {
        let providers = self.providers.iter();
        Value::Object(
            providers
                .map(|(tag, map)| ((*tag).to_owned(), Value::Object(map.clone())))
                .collect(),
        )
    }

    pub(crate) fn markdown(&self) -> String {
        let mut text = String::from("| |");
        for (tag, _) in &self.providers {
            let _ = write!(text, " {tag} |");
        }
        text.push_str("\n| --- |");
        text.push_str(&" :---: |".repeat(self.providers.len()));
        text.push('\n');
        for row in self.rows() {
            let _ = writeln!(text, "| {} |", row.join(" | "));
        }
        text
    }

    pub(crate) fn text(&self) -> String {
        let mut rows = vec![vec![String::new()]];
        rows[0].extend(self.providers.iter().map(|(tag, _)| (*tag).to_owned()));
        rows.extend(self.rows());
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
        let mut text = String::new();
        for row in &rows {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:width$}"))
                .collect();
            let _ = writeln!(text, "{}", cells.join("  ").trim_end());
        }
        text
    }

    fn rows(&self) -> impl Iterator<Item = Vec<String>> + '_ {
        ROWS.iter().map(|(key, label)| {
            let mut row = vec![(*label).to_owned()];
            row.extend(self.providers.iter().map(|(_, map)| cell(map.get(*key))));
            row
        })
    }
}

fn as_map(capabilities: &Capabilities) -> Map<String, Value> {
    match serde_json::to_value(capabilities) {
        Ok(Value::Object(map)) => map,
        other => unreachable!("capabilities are a plain struct, not {other:?}"),
    }
}

/// One capability of one provider, for people.
fn cell(value: Option<&Value>) -> String {
    match value {
        Some(Value::Bool(true)) => "yes".to_owned(),
        Some(Value::Bool(false)) => "–".to_owned(),
        None | Some(Value::Null) => "no limit of ours".to_owned(),
        Some(Value::String(name)) => match name.as_str() {
            "unrestricted" | "nothing" => "–".to_owned(),
            other => other.replace('_', " "),
        },
        Some(Value::Object(map)) => {
            let parts: Vec<String> = map.iter().map(|(name, value)| variant(name, value)).collect();
            parts.join(", ")
        }
        Some(other) => other.to_string(),
    }
}

/// An enum variant that carries something.
fn variant(name: &str, value: &Value) -> String {
    match (name, value) {
        ("enforced_by_provider", Value::Object(fields)) => match fields.get("exceptions").and_then(Value::as_str) {
            Some(exceptions) if !exceptions.is_empty() => format!("by the provider, except {exceptions}"),
            _ => "by the provider".to_owned(),
        },
        (name, value) => format!("{} {value}", name.replace('_', " ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_capability_of_the_code_has_its_row_and_no_row_is_without_one() {
        let named: BTreeSet<String> = ROWS.iter().map(|(key, _)| (*key).to_owned()).collect();
        let real: BTreeSet<String> = as_map(&Capabilities::minimal()).keys().cloned().collect();
        assert_eq!(named, real);
        assert_eq!(named.len(), ROWS.len());
    }

    #[test]
    fn cells_say_in_words_what_the_code_says() {
        let show = |text: &str| cell(Some(&serde_json::from_str(text).expect("JSON")));
        assert_eq!(show("true"), "yes");
        assert_eq!(show("false"), "–");
        assert_eq!(show("null"), "no limit of ours");
        assert_eq!(show("131071"), "131071");
        assert_eq!(show("\"any_port\""), "any port");
        assert_eq!(show("\"unrestricted\""), "–");
        assert_eq!(show("\"enforced\""), "enforced");
        assert_eq!(show("{\"port\": 8000}"), "port 8000");
        assert_eq!(
            show("{\"enforced_by_provider\": {\"exceptions\": \"DNS\"}}"),
            "by the provider, except DNS"
        );
    }

    #[cfg(feature = "subprocess")]
    #[test]
    fn the_three_forms_tell_the_same() {
        let table = Table::of(&crate::providers::registry());
        assert!(
            table.markdown().contains("| live processes | yes |"),
            "{}",
            table.markdown()
        );
        assert!(
            table.text().lines().any(|line| line.starts_with("live processes  ")),
            "{}",
            table.text()
        );
        assert_eq!(table.json()["subprocess"]["live_processes"], true);
    }
}
