//! What goes over the wire, without any I/O: a request is a value that a test compares.

pub mod control;
pub mod envelope;
pub mod files;
pub mod filesystem;
mod json;
#[cfg(feature = "emulator")]
pub(crate) use json::rfc3339;
pub mod process;
pub mod rpc;
pub mod template;
pub mod watch;

use bytes::Bytes;
use http::{HeaderName, Method};

/// One HTTP request without its base URL and credentials, which the client adds.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The method.
    pub method: Method,
    /// Path and query, percent-encoded, with a leading slash.
    pub path: String,
    /// Headers beyond those that every request carries.
    pub headers: Vec<(HeaderName, String)>,
    /// The body; empty is none.
    pub body: Bytes,
}

impl Request {
    /// A request without headers and body.
    pub fn new(method: Method, path: impl Into<String>) -> Self {
        Self {
            method,
            path: path.into(),
            headers: Vec::new(),
            body: Bytes::new(),
        }
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: HeaderName, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Sets a JSON body.
    #[must_use]
    pub fn json<T: serde::Serialize>(mut self, body: &T) -> Self {
        // Fails only for maps with keys that are no strings, which no message of ours has.
        self.body = Bytes::from(serde_json::to_vec(body).expect("a request is plain data"));
        self.header(http::header::CONTENT_TYPE, "application/json")
    }
}

/// Percent-encodes everything but unreserved characters, so that the text is one path segment or query value.
pub fn percent(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
            _ => {
                const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
                encoded.push('%');
                encoded.push(char::from(DIGITS[usize::from(byte >> 4)]));
                encoded.push(char::from(DIGITS[usize::from(byte & 15)]));
            }
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::percent;

    #[test]
    fn a_reference_is_one_path_segment() {
        assert_eq!(percent("vf-abc:default"), "vf-abc%3Adefault");
        assert_eq!(percent("team/a b+é~"), "team%2Fa%20b%2B%C3%A9~");
    }
}
