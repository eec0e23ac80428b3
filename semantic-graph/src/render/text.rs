//! Text in pictures: excerpts and escapes.

use crate::message::Message;

/// The beginning of a message's text on one line, at most `limit` characters.
pub(super) fn excerpt(message: &Message, limit: usize) -> String {
    if limit == 0 {
        return String::new();
    }
    let mut text = message.text();
    if text.trim().is_empty()
        && let Some(call) = message.tool_calls().first()
    {
        text = format!("{}({})", call.name, call.arguments).into();
    }
    shorten(&text, limit)
}

/// `text` on one line, at most `limit` characters, with an ellipsis if something is missing.
pub(super) fn shorten(text: &str, limit: usize) -> String {
    let mut short = String::new();
    let mut count = 0;
    let mut blank = true;
    for c in text.chars() {
        let c = if c.is_whitespace() || c.is_control() { ' ' } else { c };
        if c == ' ' && blank {
            continue;
        }
        if count == limit {
            short.truncate(short.trim_end().len());
            short.push('…');
            return short;
        }
        blank = c == ' ';
        short.push(c);
        count += 1;
    }
    short.truncate(short.trim_end().len());
    short
}

/// For XML text and attributes. What XML cannot hold becomes U+FFFD.
pub(super) fn xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            '\u{0}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// For a quoted string of DOT.
pub(super) fn dot_string(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => {}
            '\0' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// For a quoted string of Mermaid, which knows entities and no backslashes.
pub(super) fn mermaid_string(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '#' | ';' | '<' | '>' | '&' | '\\' | '`' | '|' | '[' | ']' | '{' | '}' | '(' | ')' | '*' | '_' => {
                out.push_str(&format!("#{};", c as u32))
            }
            '\n' => out.push_str("<br/>"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// For a script's JSON inside HTML: nothing in it can end the script.
pub(super) fn script_string(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.push_str(&format!("\\u{:04x}", c as u32));
            }
            c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Colours that are told apart on white, also by most people with a colour vision deficiency.
const PALETTE: [&str; 12] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c2d04", "#6a3d9a", "#b15928", "#1b7837",
    "#e7298a", "#737373",
];

/// The usual labels always have the same colour; others get the next free one.
const USUAL: [&str; 7] = [
    "continuation",
    "subagent_call",
    "subagent_return",
    "agent_message",
    "compaction",
    "compaction_attempt",
    "subagent_cancel",
];

/// A colour for each label.
pub(super) fn colours<'a>(labels: impl IntoIterator<Item = &'a str>) -> Vec<&'static str> {
    let mut next = USUAL.len();
    labels
        .into_iter()
        .map(|label| match USUAL.iter().position(|usual| *usual == label) {
            Some(usual) => PALETTE[usual],
            None => {
                let colour = PALETTE[next % PALETTE.len()];
                next += 1;
                colour
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excerpts_are_one_line_and_count_characters() {
        assert_eq!(shorten("  a\n\n b\u{0}c ", 10), "a b c");
        assert_eq!(shorten("äöüß", 3), "äöü…");
        assert_eq!(shorten("äöü", 3), "äöü");
        assert_eq!(shorten("ab cd", 3), "ab…");
    }

    #[test]
    fn text_cannot_leave_its_place() {
        assert_eq!(
            xml("<a href=\"x\">'&\u{1}"),
            "&lt;a href=&quot;x&quot;&gt;&#39;&amp;\u{fffd}"
        );
        assert_eq!(dot_string("a\"b\\n\n"), "\"a\\\"b\\\\n\\n\"");
        assert_eq!(mermaid_string("#;\"<\n"), "\"#35;#59;#34;#60;<br/>\"");
        assert_eq!(script_string("</script>\u{2028}"), "\"\\u003c/script\\u003e\\u2028\"");
    }

    #[test]
    fn usual_labels_keep_their_colour() {
        assert_eq!(
            colours(["x", "compaction", "y", "continuation"]),
            [PALETTE[7], PALETTE[4], PALETTE[8], PALETTE[0]]
        );
    }
}
