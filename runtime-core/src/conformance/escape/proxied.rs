//! What is said to the proxy.

use base64::Engine;

use super::attempts::Cut;

/// A way to ask. `{token}` is the attempt's, `{auth}` the box's own `Proxy-Authorization` line, `{other-auth}` the value
/// of another box's.
#[derive(Debug, Clone, Copy)]
pub(super) enum Request {
    /// A GET with the box's token.
    Get(&'static str),
    /// The same, and the name's second answer is a private address.
    Rebind(&'static str),
    /// These bytes.
    Head(&'static str),
    /// CONNECT, and a ClientHello with these names.
    Tunnel(&'static str, &'static [&'static str], Cut),
    LongLine,
    ForeignHost,
    Pipelined,
    Redirect,
    /// A CONNECT to a relay.
    Relay,
    /// These bytes, and one more every now and then.
    Drip(&'static str),
    DripHello,
}

/// What the answers are judged by.
pub(super) struct Ask<'a> {
    pub(super) token: &'a str,
    /// The box's `user:token`.
    pub(super) credentials: &'a str,
    /// Another box's.
    pub(super) other: &'a str,
}

impl Ask<'_> {
    fn text(&self, template: &str) -> Vec<u8> {
        let basic = |credentials: &str| {
            let encoded = base64::engine::general_purpose::STANDARD.encode(credentials);
            format!("Basic {encoded}")
        };
        let auth = format!("Proxy-Authorization: {}\r\n", basic(self.credentials));
        template
            .replace("{auth}", &auth)
            .replace("{other-auth}", &basic(self.other))
            .replace("{token}", self.token)
            .into_bytes()
    }

    /// The bytes of one request.
    pub(super) fn bytes(&self, request: Request) -> Vec<u8> {
        match request {
            Request::Get(url) | Request::Rebind(url) => {
                let host = url.split('/').nth(2).unwrap_or_default();
                self.text(&format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n{{auth}}Connection: close\r\n\r\n"))
            }
            Request::Head(text) | Request::Drip(text) => self.text(text),
            Request::Tunnel(to, names, cut) => {
                let mut bytes = self.text(&format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{{auth}}\r\n"));
                let names: Vec<String> = names.iter().map(|name| name.replace("{token}", self.token)).collect();
                bytes.extend(client_hello(&names, cut));
                bytes
            }
            Request::LongLine => {
                let long = "x".repeat(1 << 20);
                self.text(&format!("GET http://good.example/{{token}}{long} HTTP/1.1\r\nHost: good.example\r\n{{auth}}\r\n"))
            }
            Request::ForeignHost => self.text(
                "GET http://good.example/foreign HTTP/1.1\r\nHost: {token}.other.example\r\n{auth}Connection: close\r\n\r\n",
            ),
            Request::Pipelined => self.text(
                "GET http://good.example/first HTTP/1.1\r\nHost: good.example\r\n{auth}\r\n\
                 GET http://other.example/{token} HTTP/1.1\r\nHost: other.example\r\n{auth}Connection: close\r\n\r\n",
            ),
            Request::Redirect => self.text(
                "GET http://good.example/redirect HTTP/1.1\r\nHost: good.example\r\n{auth}\r\n\
                 GET http://other.example/{token}-redirected HTTP/1.1\r\nHost: other.example\r\n{auth}\
                 Connection: close\r\n\r\n",
            ),
            Request::Relay => {
                self.text("CONNECT 127.0.0.1:4111 HTTP/1.1\r\nHost: 127.0.0.1:4111\r\n{auth}\r\n{token}-relay\n")
            }
            Request::DripHello => {
                let mut bytes = self.text("CONNECT good.example:443 HTTP/1.1\r\nHost: good.example\r\n{auth}\r\n");
                bytes.extend([22, 3, 1, 2, 0, 1]);
                bytes
            }
        }
    }
}

/// A ClientHello of TLS 1.2 with these names.
fn client_hello(names: &[String], cut: Cut) -> Vec<u8> {
    fn counted(length: usize, bytes: &[u8]) -> Vec<u8> {
        let count = (bytes.len() as u32).to_be_bytes();
        [&count[4 - length..], bytes].concat()
    }
    let extension = |kind: u16, content: &[u8]| [&kind.to_be_bytes()[..], &counted(2, content)].concat();
    let mut extensions = Vec::new();
    if !names.is_empty() {
        let entries: Vec<u8> = names
            .iter()
            .flat_map(|name| [vec![0], counted(2, name.as_bytes())].concat())
            .collect();
        extensions.extend(extension(0, &counted(2, &entries)));
    }
    if cut == Cut::Encrypted {
        let outer = [&[0, 0, 1, 0, 1, 7][..], &counted(2, &[9; 32]), &counted(2, &[8; 64])].concat();
        extensions.extend(extension(0xfe0d, &outer));
    }
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 0x01, 1, 0]);
    body.extend(counted(2, &extensions));
    let message = [&[1][..], &counted(3, &body)].concat();
    let piece = if cut == Cut::Records { 16 } else { message.len() };
    message
        .chunks(piece)
        .flat_map(|part| [&[22, 3, 1][..], &counted(2, part)].concat())
        .collect()
}
