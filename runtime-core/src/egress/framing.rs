//! [`Framing`]: where one request of a client ends and the next begins, read more strictly than HTTP asks for.
//!
//! Request smuggling needs two readers who disagree. The HTTP library is the only one whose reading counts, since it
//! writes every request anew; but it mends some of what is ambiguous (two equal lengths, a length beside chunks, a bare
//! line feed) where this reader refuses. It looks at every byte of a head before the library sees any, and passes on
//! only what has one meaning.

/// The longest head, request line and fields together, in bytes.
pub const MAX_HEAD: usize = 64 << 10;
/// The most fields in a head; the library's own limit.
const MAX_FIELDS: usize = 100;
/// The longest line between chunks, extension included, and the longest trailer section.
const MAX_CHUNK_LINE: usize = 1024;
const MAX_TRAILERS: usize = 8 << 10;
/// The longest method.
const MAX_METHOD: usize = 32;

/// What may be done with the bytes at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing before there are more.
    More,
    /// The first so many may be passed on.
    Pass(usize),
    /// The first so many are the head of a request; what comes after it depends on the answer.
    Head {
        /// Bytes of the head.
        length: usize,
        /// The request asks for another protocol on this connection (CONNECT, WebSocket), so what follows is a request
        /// only if that is refused.
        switch: bool,
    },
}

/// Why the bytes are no request with one meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum FramingProblem {
    /// More than [`MAX_HEAD`] bytes or too many fields.
    #[error("the head is too large")]
    HeadTooLarge,
    /// A line feed without, or a carriage return not in front of, the other.
    #[error("a line does not end in CR LF")]
    LineEnd,
    /// No `METHOD target HTTP/1.x`.
    #[error("the request line is malformed")]
    RequestLine,
    /// Another version than HTTP/1.0 and HTTP/1.1.
    #[error("only HTTP/1.0 and HTTP/1.1 are spoken")]
    Version,
    /// A name or value with a byte that it cannot have, or a folded line.
    #[error("a field is malformed")]
    Field,
    /// Lengths that are not one number, or a length beside chunks, or another coding than `chunked`.
    #[error("the length of the body is ambiguous")]
    BodyLength,
    /// A chunk whose size, end or trailer is malformed.
    #[error("a chunk is malformed")]
    Chunk,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before a request line, after so many empty lines.
    Head {
        empty_lines: u8,
    },
    /// In a body, or in the data of a chunk.
    Data {
        left: u64,
        chunked: bool,
    },
    /// At the end of a chunk's data.
    DataEnd,
    ChunkSize,
    Trailers {
        passed: usize,
    },
}

/// A reader of the bytes that a client sends. It holds none of them: what it is shown starts where the last
/// [`Step::Pass`] or [`Step::Head`] ended.
#[derive(Debug)]
pub struct Framing {
    place: Place,
    /// How much of the bytes at hand is known to hold no end of line.
    scanned: usize,
    /// Where the line starts that is being looked at, and what the lines before it said.
    line: usize,
    head: Option<Head>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Head {
    fields: usize,
    hosts: usize,
    is_10: bool,
    connect: bool,
    websocket: bool,
    length: Option<u64>,
    chunked: bool,
}

impl Default for Framing {
    fn default() -> Self {
        Self::new()
    }
}

impl Framing {
    /// At the start of a connection.
    pub fn new() -> Self {
        Self {
            place: Place::Head { empty_lines: 0 },
            scanned: 0,
            line: 0,
            head: None,
        }
    }

    /// Whether a message has been passed on completely and none of the next was seen.
    pub fn is_between_requests(&self) -> bool {
        matches!(self.place, Place::Head { .. }) && !self.is_in_head()
    }

    /// Whether a head has begun and is not complete.
    pub fn is_in_head(&self) -> bool {
        matches!(self.place, Place::Head { .. }) && (self.head.is_some() || self.scanned > 0)
    }

    /// How many bytes may be passed on without being looked at, when none are at hand.
    pub fn direct(&self) -> u64 {
        match self.place {
            Place::Data { left, .. } => left,
            _ => 0,
        }
    }

    /// Takes note of so many bytes that [`direct`](Self::direct) permitted.
    pub fn passed(&mut self, bytes: u64) {
        if let Place::Data { left, chunked } = self.place {
            self.place = data(left.saturating_sub(bytes), chunked);
        }
    }

    /// What may be done with `bytes`, which are all that was received and not yet passed on.
    ///
    /// # Errors
    /// What is wrong with them. The connection is then of no use any more.
    pub fn step(&mut self, bytes: &[u8]) -> Result<Step, FramingProblem> {
        match self.place {
            Place::Head { empty_lines } => self.head(bytes, empty_lines),
            Place::Data { left, .. } => {
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                self.passed(length as u64);
                Ok(if length == 0 { Step::More } else { Step::Pass(length) })
            }
            Place::DataEnd => match bytes {
                [] | [b'\r'] => Ok(Step::More),
                [b'\r', b'\n', ..] => {
                    self.place = Place::ChunkSize;
                    Ok(Step::Pass(2))
                }
                _ => Err(FramingProblem::Chunk),
            },
            Place::ChunkSize => {
                let Some(line) = self.next_line(bytes, MAX_CHUNK_LINE, FramingProblem::Chunk)? else {
                    return Ok(Step::More);
                };
                self.place = match chunk_size(line)? {
                    0 => Place::Trailers { passed: 0 },
                    left => Place::Data { left, chunked: true },
                };
                Ok(Step::Pass(line.len() + 2))
            }
            Place::Trailers { passed } => {
                let Some(line) = self.next_line(bytes, MAX_TRAILERS - passed, FramingProblem::Chunk)? else {
                    return Ok(Step::More);
                };
                let length = line.len() + 2;
                if line.is_empty() {
                    self.place = Place::Head { empty_lines: 0 };
                } else {
                    field(line)?;
                    let passed = passed + length;
                    if passed >= MAX_TRAILERS {
                        return Err(FramingProblem::Chunk);
                    }
                    self.place = Place::Trailers { passed };
                }
                Ok(Step::Pass(length))
            }
        }
    }

    fn head(&mut self, bytes: &[u8], empty_lines: u8) -> Result<Step, FramingProblem> {
        loop {
            let start = self.line;
            let rest = bytes.get(start..).unwrap_or_default();
            let mut scanned = self.scanned.saturating_sub(start);
            let found = line_of(rest, &mut scanned)?;
            self.scanned = start + scanned;
            // What a head can be is known before it is complete.
            if start + found.map_or(rest.len(), <[u8]>::len) > MAX_HEAD {
                return Err(FramingProblem::HeadTooLarge);
            }
            let Some(line) = found else {
                return match self.head {
                    None if !could_begin_request(rest) => Err(FramingProblem::RequestLine),
                    _ => Ok(Step::More),
                };
            };
            let end = start + line.len() + 2;
            (self.line, self.scanned) = (end, end);
            match (&mut self.head, line) {
                (None, []) if empty_lines == 0 => {
                    self.restart(Place::Head { empty_lines: 1 });
                    return Ok(Step::Pass(end));
                }
                (None, line) => self.head = Some(request_line(line)?),
                (Some(head), []) => {
                    let (place, switch) = head.body()?;
                    self.restart(place);
                    return Ok(Step::Head { length: end, switch });
                }
                (Some(head), line) => head.field(line)?,
            }
        }
    }

    fn restart(&mut self, place: Place) {
        *self = Self { place, ..Self::new() };
    }

    /// The first line of `bytes`, without its end.
    fn next_line<'a>(
        &mut self,
        bytes: &'a [u8],
        limit: usize,
        too_long: FramingProblem,
    ) -> Result<Option<&'a [u8]>, FramingProblem> {
        let line = line_of(bytes, &mut self.scanned)?;
        if line.map_or(bytes.len(), |line| line.len() + 2) > limit {
            return Err(too_long);
        }
        if line.is_some() {
            self.scanned = 0;
        }
        Ok(line)
    }
}

impl Head {
    fn field(&mut self, line: &[u8]) -> Result<(), FramingProblem> {
        self.fields += 1;
        if self.fields > MAX_FIELDS {
            return Err(FramingProblem::HeadTooLarge);
        }
        let (name, value) = field(line)?;
        if name.eq_ignore_ascii_case(b"content-length") {
            if self.length.is_some() || self.chunked {
                return Err(FramingProblem::BodyLength);
            }
            self.length = Some(decimal(value).ok_or(FramingProblem::BodyLength)?);
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if self.length.is_some() || self.chunked || self.is_10 || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(FramingProblem::BodyLength);
            }
            self.chunked = true;
        } else if name.eq_ignore_ascii_case(b"host") {
            self.hosts += 1;
            if self.hosts > 1 {
                return Err(FramingProblem::Field);
            }
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.websocket |= value.eq_ignore_ascii_case(b"websocket");
        }
        Ok(())
    }

    /// What follows this head, and whether that depends on the answer.
    fn body(&self) -> Result<(Place, bool), FramingProblem> {
        let left = self.length.unwrap_or(0);
        if self.connect && (self.chunked || left > 0) {
            return Err(FramingProblem::BodyLength);
        }
        let place = if self.chunked {
            Place::ChunkSize
        } else {
            data(left, false)
        };
        let no_body = matches!(place, Place::Head { .. });
        Ok((place, self.connect || (self.websocket && no_body && !self.is_10)))
    }
}

fn data(left: u64, chunked: bool) -> Place {
    match (left, chunked) {
        (0, true) => Place::DataEnd,
        (0, false) => Place::Head { empty_lines: 0 },
        (left, chunked) => Place::Data { left, chunked },
    }
}

/// The first line of `bytes` without its CR LF, or none yet. `scanned` bytes are known to hold no end.
fn line_of<'a>(bytes: &'a [u8], scanned: &mut usize) -> Result<Option<&'a [u8]>, FramingProblem> {
    let from = *scanned;
    let found = bytes
        .get(from..)
        .unwrap_or_default()
        .iter()
        .position(|byte| matches!(byte, b'\r' | b'\n'));
    match found.map(|at| at + from) {
        None => {
            *scanned = bytes.len();
            Ok(None)
        }
        Some(at) => match (bytes.get(at), bytes.get(at + 1)) {
            (Some(b'\r'), Some(b'\n')) => Ok(bytes.get(..at)),
            (Some(b'\r'), None) => {
                *scanned = at;
                Ok(None)
            }
            _ => Err(FramingProblem::LineEnd),
        },
    }
}

/// Whether this may become a request line: what certainly is none (a TLS handshake, noise) is refused at once.
fn could_begin_request(bytes: &[u8]) -> bool {
    let method = bytes.iter().take_while(|byte| is_token(**byte)).count();
    method <= MAX_METHOD && matches!(bytes.get(method), None | Some(b' ' | b'\r'))
}

fn request_line(line: &[u8]) -> Result<Head, FramingProblem> {
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(FramingProblem::RequestLine);
    };
    let method_ok = (1..=MAX_METHOD).contains(&method.len()) && method.iter().all(|byte| is_token(*byte));
    if !method_ok || target.is_empty() || !target.iter().all(u8::is_ascii_graphic) {
        return Err(FramingProblem::RequestLine);
    }
    let is_10 = match version {
        b"HTTP/1.1" => false,
        b"HTTP/1.0" => true,
        _ => return Err(FramingProblem::Version),
    };
    Ok(Head {
        is_10,
        connect: method == b"CONNECT",
        ..Head::default()
    })
}

fn field(line: &[u8]) -> Result<(&[u8], &[u8]), FramingProblem> {
    let colon = line.iter().position(|byte| *byte == b':');
    let (name, value) = colon
        .and_then(|colon| line.split_at_checked(colon))
        .ok_or(FramingProblem::Field)?;
    let value = value.get(1..).unwrap_or_default();
    let visible = |byte: &u8| matches!(byte, b'\t' | b' '..=b'~' | 0x80..=0xff);
    if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) || !value.iter().all(visible) {
        return Err(FramingProblem::Field);
    }
    Ok((name, trim(value)))
}

fn chunk_size(line: &[u8]) -> Result<u64, FramingProblem> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (digits, extension) = line.split_at_checked(digits).ok_or(FramingProblem::Chunk)?;
    let extension_ok = match extension {
        [] => true,
        [b';', rest @ ..] => rest.iter().all(|byte| matches!(byte, b'\t' | b' '..=b'~')),
        _ => false,
    };
    if !extension_ok || !(1..=15).contains(&digits.len()) {
        return Err(FramingProblem::Chunk);
    }
    let digits = std::str::from_utf8(digits).map_err(|_| FramingProblem::Chunk)?;
    u64::from_str_radix(digits, 16).map_err(|_| FramingProblem::Chunk)
}

fn decimal(value: &[u8]) -> Option<u64> {
    if !(1..=18).contains(&value.len()) || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(value).ok()?.parse().ok()
}

fn trim(value: &[u8]) -> &[u8] {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = value.iter().take_while(|byte| is_space(byte)).count();
    let value = value.get(start..).unwrap_or_default();
    let end = value.iter().rev().take_while(|byte| is_space(byte)).count();
    value.get(..value.len() - end).unwrap_or_default()
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What is passed on of `bytes` when they arrive in pieces of `piece`, and how it ends.
    fn read(bytes: &[u8], piece: usize) -> (Vec<Step>, Result<(), FramingProblem>) {
        let (mut framing, mut buffer, mut steps) = (Framing::new(), Vec::new(), Vec::new());
        for part in bytes.chunks(piece) {
            buffer.extend_from_slice(part);
            loop {
                let length = match framing.step(&buffer) {
                    Ok(Step::More) => break,
                    Ok(step @ (Step::Pass(length) | Step::Head { length, .. })) => {
                        steps.push(step);
                        length
                    }
                    Err(problem) => return (steps, Err(problem)),
                };
                buffer.drain(..length);
                if buffer.is_empty() {
                    break;
                }
            }
        }
        (steps, Ok(()))
    }

    fn problem(text: &str) -> Option<FramingProblem> {
        let whole = read(text.as_bytes(), usize::MAX).1;
        assert_eq!(read(text.as_bytes(), 1).1, whole, "in pieces: {text:?}");
        whole.err()
    }

    fn head(fields: &str) -> String {
        format!("POST http://a/ HTTP/1.1\r\nHost: a\r\n{fields}\r\n")
    }

    #[test]
    fn requests_are_told_apart_by_their_lengths() {
        let get = "GET http://a/ HTTP/1.1\r\n\r\n";
        let sized = format!("{}abc", head("Content-Length: 3\r\n"));
        let chunked = format!(
            "{}2;x=y\r\nab\r\n0\r\nTrailer: t\r\n\r\n",
            head("Transfer-Encoding: Chunked\r\n")
        );
        let all = format!("{get}{sized}\r\n{chunked}{get}");
        let heads = |steps: &[Step]| steps.iter().filter(|step| matches!(step, Step::Head { .. })).count();
        for piece in [1, 2, 3, 7, usize::MAX] {
            let (steps, end) = read(all.as_bytes(), piece);
            assert_eq!((heads(&steps), end), (4, Ok(())), "pieces of {piece}");
            let passed: usize = steps
                .iter()
                .map(|step| match step {
                    Step::Pass(length) | Step::Head { length, .. } => *length,
                    Step::More => 0,
                })
                .sum();
            assert_eq!(passed, all.len());
        }
    }

    #[test]
    fn whatever_has_two_readings_is_refused() {
        use FramingProblem::*;
        for (fields, expected) in [
            ("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", BodyLength),
            ("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", BodyLength),
            ("Content-Length: 3\r\nContent-Length: 3\r\n", BodyLength),
            ("Content-Length: 3\r\nContent-Length: 4\r\n", BodyLength),
            ("Content-Length: 3, 3\r\n", BodyLength),
            ("Content-Length: +3\r\n", BodyLength),
            ("Content-Length: 0x3\r\n", BodyLength),
            ("Content-Length: -1\r\n", BodyLength),
            ("Content-Length:\r\n", BodyLength),
            ("Content-Length: 3 4\r\n", BodyLength),
            ("Content-Length: 18446744073709551617\r\n", BodyLength),
            (
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
                BodyLength,
            ),
            ("Transfer-Encoding: gzip, chunked\r\n", BodyLength),
            ("Transfer-Encoding: chunked, identity\r\n", BodyLength),
            ("Transfer-Encoding: xchunked\r\n", BodyLength),
            ("Transfer-Encoding: \u{b}chunked\r\n", Field),
            ("Transfer-Encoding : chunked\r\n", Field),
            ("Content-Length : 3\r\n", Field),
            ("X: a\r\n folded\r\n", Field),
            ("X: a\r\n\tfolded\r\n", Field),
            ("X\r\n", Field),
            (": x\r\n", Field),
            ("X: a\0b\r\n", Field),
            ("X: a\u{7f}b\r\n", Field),
            ("X y: a\r\n", Field),
            ("Host: b\r\n", Field),
            ("X: a\nY: b\r\n", LineEnd),
            ("X: a\rY: b\r\n", LineEnd),
            ("X: a\r\r\n", LineEnd),
            ("\n", LineEnd),
        ] {
            assert_eq!(problem(&head(fields)), Some(expected), "{fields:?}");
        }
    }

    #[test]
    fn a_request_line_has_three_words_and_a_known_version() {
        use FramingProblem::*;
        for (line, expected) in [
            ("GET http://a/", RequestLine),
            ("GET  http://a/ HTTP/1.1", RequestLine),
            ("GET http://a/ HTTP/1.1 ", RequestLine),
            (" GET http://a/ HTTP/1.1", RequestLine),
            ("GET\thttp://a/\tHTTP/1.1", RequestLine),
            ("GET http://a/é HTTP/1.1", RequestLine),
            ("GET http://a/\0 HTTP/1.1", RequestLine),
            ("G@T http://a/ HTTP/1.1", RequestLine),
            ("GET http://a/ HTTP/1.2", Version),
            ("GET http://a/ HTTP/0.9", Version),
            ("GET http://a/ http/1.1", Version),
            ("GET http://a/ HTTP/2.0", Version),
            ("PRI * HTTP/2.0", Version),
            ("AVERYLONGMETHODTHATNOBODYHASEVERUSED * HTTP/1.1", RequestLine),
        ] {
            assert_eq!(
                problem(&format!("{line}\r\nHost: a\r\n\r\n")),
                Some(expected),
                "{line:?}"
            );
        }
        assert_eq!(problem("\u{16}\u{3}\u{1}"), Some(RequestLine));
        assert_eq!(problem("GET http://a/ HTTP/1.1\n\n"), Some(LineEnd));
        assert_eq!(problem("\r\nGET http://a/ HTTP/1.1\r\n\r\n"), None);
        assert_eq!(problem("\r\n\r\nGET http://a/ HTTP/1.1\r\n\r\n"), Some(RequestLine));
    }

    #[test]
    fn chunks_are_read_to_the_letter() {
        let of = |body: &str| problem(&format!("{}{body}", head("Transfer-Encoding: chunked\r\n")));
        for body in [
            "2\r\nab\r\n0\r\n\r\n",
            "0\r\n\r\n",
            "0000a; q=\"z\"\r\n0123456789\r\n0\r\nA: b\r\n\r\n",
        ] {
            assert_eq!(of(body), None, "{body:?}");
        }
        for body in [
            "\r\n",
            "g\r\n",
            "-1\r\n",
            "0x2\r\n",
            "2 \r\nab\r\n",
            " 2\r\nab\r\n",
            "2\r\nabc\r\n",
            "2\r\nab\n",
            "2;\u{1}\r\nab\r\n",
            "ffffffffffffffff\r\n",
        ] {
            assert_eq!(of(body), Some(FramingProblem::Chunk), "{body:?}");
        }
        assert_eq!(of("2\nab\r\n"), Some(FramingProblem::LineEnd));
        assert_eq!(of("0\r\n x\r\n\r\n"), Some(FramingProblem::Field));
        assert_eq!(of(&format!("1;{}\r\n", "x".repeat(2000))), Some(FramingProblem::Chunk));
        assert_eq!(
            of(&format!("0\r\n{}", "a: b\r\n".repeat(2000))),
            Some(FramingProblem::Chunk)
        );
    }

    #[test]
    fn heads_are_bounded_before_they_are_complete() {
        for text in [
            format!("GET http://a/{} HTTP/1.1\r\n\r\n", "x".repeat(1 << 20)),
            format!("GET http://a/{}", "x".repeat(MAX_HEAD)),
            head(&format!("X: {}\r\n", "x".repeat(MAX_HEAD))),
            head(&"X: y\r\n".repeat(MAX_FIELDS)),
        ] {
            assert_eq!(read(text.as_bytes(), 4096).1, Err(FramingProblem::HeadTooLarge));
        }
        assert_eq!(problem(&head(&"X: y\r\n".repeat(MAX_FIELDS - 1))), None);
    }

    #[test]
    fn a_request_for_another_protocol_stops_the_reading() {
        let switch = |text: &str| match read(text.as_bytes(), usize::MAX).0.first() {
            Some(Step::Head { switch, .. }) => *switch,
            other => panic!("{text:?}: {other:?}"),
        };
        assert!(switch("CONNECT a:443 HTTP/1.1\r\n\r\n"));
        assert!(switch("CONNECT a:443 HTTP/1.0\r\nContent-Length: 0\r\n\r\n"));
        assert!(switch("GET http://a/ HTTP/1.1\r\nUpgrade: WebSocket\r\n\r\n"));
        assert!(!switch("GET http://a/ HTTP/1.1\r\nUpgrade: h2c\r\n\r\n"));
        assert!(!switch(
            "POST http://a/ HTTP/1.1\r\nUpgrade: websocket\r\nContent-Length: 1\r\n\r\nx"
        ));
        for fields in ["Content-Length: 1", "Transfer-Encoding: chunked"] {
            let text = format!("CONNECT a:443 HTTP/1.1\r\n{fields}\r\n\r\n");
            assert_eq!(problem(&text), Some(FramingProblem::BodyLength));
        }
    }

    proptest! {
        /// Pieces do not matter, nothing panics, and nothing is passed on twice.
        #[test]
        fn any_bytes_in_any_pieces_read_the_same(
            parts in prop::collection::vec(prop::sample::select(&[
                "GET http://a/ HTTP/1.1\r\n", "Host: a\r\n", "\r\n", "Content-Length: 5\r\n", "5\r\nhello\r\n",
                "Transfer-Encoding: chunked\r\n", "0\r\n\r\n", "hello", "\n", "\r", " ", "\0", "CONNECT a:1 HTTP/1.1\r\n",
            ][..]), 0..12),
            piece in 1usize..9,
        ) {
            let bytes = parts.concat().into_bytes();
            let total = |steps: &[Step]| steps.iter().map(|step| match step {
                Step::Pass(length) | Step::Head { length, .. } => *length,
                Step::More => 0,
            }).sum::<usize>();
            let (whole, whole_end) = read(&bytes, usize::MAX);
            let (pieces, pieces_end) = read(&bytes, piece);
            prop_assert!(total(&whole) <= bytes.len());
            // Which of two faults is named depends on which was seen first.
            prop_assert_eq!(whole_end.is_err(), pieces_end.is_err());
            prop_assert_eq!(total(&whole), total(&pieces));
        }
    }
}
