//! [`HelloReader`]: the first message of a TLS client, for the server name in it.

use std::fmt;

/// The longest message that is read. No client comes near; all extensions together cannot exceed 64 KiB.
const MAX_MESSAGE: usize = 64 << 10;
/// The most bytes that its records may take, so that a message in records of one byte each does not take six times as
/// much memory.
const MAX_RECORDS: usize = 128 << 10;
/// The longest plaintext record.
const MAX_RECORD: usize = 16 << 10;

const HANDSHAKE_RECORD: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
/// Encrypted ClientHello (RFC 9849), and the draft before it that had the name alone encrypted.
const ENCRYPTED_CLIENT_HELLO: [u16; 2] = [0xfe0d, 0xffce];

/// What a ClientHello says about whom it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientHello {
    server_name: Option<String>,
    encrypted: bool,
}

impl ClientHello {
    /// The server name, as it was sent.
    pub fn server_name(&self) -> Option<&str> {
        self.server_name.as_deref()
    }

    /// Whether it carries an encrypted ClientHello (or what a client sends so that nobody can tell): the name that
    /// counts may then be another one.
    pub fn is_encrypted(&self) -> bool {
        self.encrypted
    }
}

/// Why bytes are no ClientHello whose server name is certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum HelloProblem {
    /// Not the records of a TLS handshake.
    #[error("not a TLS handshake")]
    NotTls,
    /// A handshake that starts with another message, or a malformed one.
    #[error("not a well-formed ClientHello")]
    Malformed,
    /// More bytes than any client sends.
    #[error("the ClientHello is too long")]
    TooLong,
    /// More than one server name.
    #[error("more than one server name")]
    TwoNames,
    /// A server name that is empty, not ASCII, or of an unknown type.
    #[error("a malformed server name")]
    BadName,
}

/// Reads a ClientHello from bytes as they arrive, over any number of records, and keeps the bytes to pass them on
/// unchanged. Bounded memory, linear time.
#[derive(Default)]
pub struct HelloReader {
    raw: Vec<u8>,
    /// How much of `raw` belongs to records that were taken apart.
    read: usize,
    message: Vec<u8>,
}

impl HelloReader {
    /// Nothing read yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes more bytes. `None` while the message is not complete.
    ///
    /// # Errors
    /// Why there will be no ClientHello to trust.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Option<ClientHello>, HelloProblem> {
        self.raw.extend_from_slice(bytes);
        while let Some(header) = self.raw.get(self.read..) {
            check_record(header)?;
            let &[_, _, _, high, low, ..] = header else {
                break;
            };
            let length = usize::from(u16::from_be_bytes([high, low]));
            let Some(payload) = header.get(5..5 + length) else {
                break;
            };
            self.message.extend_from_slice(payload);
            self.read += 5 + length;
            if self.read > MAX_RECORDS {
                return Err(HelloProblem::TooLong);
            }
            if let &[kind, a, b, c, ..] = self.message.as_slice() {
                let length = 4 + usize::from(u16::from_be_bytes([b, c])) + (usize::from(a) << 16);
                if kind != CLIENT_HELLO {
                    return Err(HelloProblem::Malformed);
                }
                if length > MAX_MESSAGE {
                    return Err(HelloProblem::TooLong);
                }
                // Nothing may follow in the last record: it would be a message that nobody looked at.
                match self.message.len() {
                    have if have > length => return Err(HelloProblem::Malformed),
                    have if have == length => return parse(self.message.get(4..).unwrap_or_default()).map(Some),
                    _ => {}
                }
            }
        }
        Ok(None)
    }

    /// Everything that was pushed, and how much of it the ClientHello's records are.
    pub fn into_bytes(self) -> (Vec<u8>, usize) {
        (self.raw, self.read)
    }
}

/// The content is a stranger's.
impl fmt::Debug for HelloReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HelloReader({} bytes)", self.raw.len())
    }
}

/// Refuses what cannot become a handshake record, from its first byte on.
fn check_record(header: &[u8]) -> Result<(), HelloProblem> {
    let length = match *header {
        [_, _, _, high, low, ..] => Some(usize::from(u16::from_be_bytes([high, low]))),
        _ => None,
    };
    let is_tls = header.first().is_none_or(|kind| *kind == HANDSHAKE_RECORD)
        && header.get(1).is_none_or(|major| *major == 3)
        && header.get(2).is_none_or(|minor| *minor <= 4)
        && length.is_none_or(|length| (1..=MAX_RECORD).contains(&length));
    if is_tls { Ok(()) } else { Err(HelloProblem::NotTls) }
}

fn parse(message: &[u8]) -> Result<ClientHello, HelloProblem> {
    let mut rest = Reader(message);
    let version = rest.take(2)?;
    let _random = rest.take(32)?;
    let session = rest.vector8()?;
    let ciphers = rest.vector16()?;
    let compressions = rest.vector8()?;
    let sizes_fit = session.len() <= 32 && !ciphers.is_empty() && ciphers.len().is_multiple_of(2);
    if version.first() != Some(&3) || !sizes_fit || compressions.is_empty() {
        return Err(HelloProblem::Malformed);
    }
    let mut hello = ClientHello {
        server_name: None,
        encrypted: false,
    };
    // Clients of long ago have no extensions.
    if rest.0.is_empty() {
        return Ok(hello);
    }
    let mut extensions = Reader(rest.vector16()?);
    if !rest.0.is_empty() {
        return Err(HelloProblem::Malformed);
    }
    while !extensions.0.is_empty() {
        let kind = extensions.number()?;
        let content = extensions.vector16()?;
        if kind == SERVER_NAME {
            if hello.server_name.is_some() {
                return Err(HelloProblem::TwoNames);
            }
            hello.server_name = Some(server_name(content)?);
        }
        hello.encrypted |= ENCRYPTED_CLIENT_HELLO.contains(&kind);
    }
    Ok(hello)
}

fn server_name(content: &[u8]) -> Result<String, HelloProblem> {
    let mut content = Reader(content);
    let mut names = Reader(content.vector16()?);
    if !content.0.is_empty() {
        return Err(HelloProblem::Malformed);
    }
    let kind = names.take(1)?;
    let name = names.vector16()?;
    if !names.0.is_empty() {
        return Err(HelloProblem::TwoNames);
    }
    if kind != [0] || name.is_empty() || name.len() > 255 || !name.iter().all(u8::is_ascii_graphic) {
        return Err(HelloProblem::BadName);
    }
    String::from_utf8(name.to_vec()).map_err(|_| HelloProblem::BadName)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], HelloProblem> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(HelloProblem::Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u16, HelloProblem> {
        match *self.take(2)? {
            [high, low] => Ok(u16::from_be_bytes([high, low])),
            _ => Err(HelloProblem::Malformed),
        }
    }

    fn vector8(&mut self) -> Result<&'a [u8], HelloProblem> {
        match *self.take(1)? {
            [length] => self.take(usize::from(length)),
            _ => Err(HelloProblem::Malformed),
        }
    }

    fn vector16(&mut self) -> Result<&'a [u8], HelloProblem> {
        let length = self.number()?;
        self.take(usize::from(length))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A ClientHello made by hand: these extensions, in records of at most `record` bytes.
    pub(in super::super) fn hello(extensions: &[(u16, Vec<u8>)], record: usize) -> Vec<u8> {
        records(&message(extensions), record)
    }

    fn message(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 0x01, 1, 0]);
        let mut all = Vec::new();
        for (kind, content) in extensions {
            all.extend(kind.to_be_bytes());
            all.extend(u16::try_from(content.len()).unwrap().to_be_bytes());
            all.extend(content);
        }
        body.extend(u16::try_from(all.len()).unwrap().to_be_bytes());
        body.extend(all);
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        [&[CLIENT_HELLO], &length[1..], &body].concat()
    }

    fn records(message: &[u8], size: usize) -> Vec<u8> {
        let record = |part: &[u8]| {
            let length = u16::try_from(part.len()).unwrap().to_be_bytes();
            [&[HANDSHAKE_RECORD, 3, 1], &length[..], part].concat()
        };
        message.chunks(size).flat_map(record).collect()
    }

    /// The server name extension.
    pub(in super::super) fn sni(names: &[&str]) -> (u16, Vec<u8>) {
        let mut list = Vec::new();
        for name in names {
            list.push(0);
            list.extend(u16::try_from(name.len()).unwrap().to_be_bytes());
            list.extend(name.as_bytes());
        }
        let length = u16::try_from(list.len()).unwrap().to_be_bytes();
        (SERVER_NAME, [&length[..], &list].concat())
    }

    fn read(bytes: &[u8]) -> Result<Option<ClientHello>, HelloProblem> {
        let whole = HelloReader::new().push(bytes);
        let mut reader = HelloReader::new();
        let mut found = Ok(None);
        for byte in bytes {
            found = reader.push(&[*byte]);
            if !matches!(found, Ok(None)) {
                break;
            }
        }
        assert_eq!(found, whole, "byte by byte");
        whole
    }

    fn name(bytes: &[u8]) -> Option<String> {
        read(bytes).unwrap().unwrap().server_name
    }

    #[test]
    fn the_name_is_found_in_one_record_and_over_many() {
        for size in [1, 2, 3, 7, 50, 16384] {
            let bytes = hello(&[(10, vec![0, 2, 0, 29]), sni(&["Example.COM."])], size);
            assert_eq!(name(&bytes).as_deref(), Some("Example.COM."), "records of {size}");
        }
    }

    #[test]
    fn no_name_and_no_extensions_are_no_name() {
        assert_eq!(name(&hello(&[(10, vec![0, 2, 0, 29])], 99)), None);
        assert_eq!(name(&hello(&[], 99)), None);
        let mut old = message(&[]);
        old.truncate(old.len() - 2);
        old[3] -= 2;
        assert_eq!(name(&records(&old, 99)), None);
    }

    #[test]
    fn two_names_are_one_too_many_in_either_form() {
        assert_eq!(
            read(&hello(&[sni(&["a.com", "b.com"])], 99)),
            Err(HelloProblem::TwoNames)
        );
        assert_eq!(
            read(&hello(&[sni(&["a.com"]), (10, vec![]), sni(&["b.com"])], 99)),
            Err(HelloProblem::TwoNames)
        );
        assert_eq!(
            read(&hello(&[sni(&["a.com"]), sni(&["a.com"])], 99)),
            Err(HelloProblem::TwoNames)
        );
        // Two whole messages in one record: only one of them would have been looked at.
        let twice = [message(&[sni(&["a.com"])]), message(&[sni(&["b.com"])])].concat();
        assert_eq!(read(&records(&twice, 16384)), Err(HelloProblem::Malformed));
    }

    #[test]
    fn names_that_are_none_are_refused() {
        for bad in ["", "a b", "a\0b", "a\u{e9}", "\n"] {
            assert_eq!(read(&hello(&[sni(&[bad])], 99)), Err(HelloProblem::BadName), "{bad:?}");
        }
        let other_type = (SERVER_NAME, vec![0, 4, 1, 0, 1, b'a']);
        assert_eq!(read(&hello(&[other_type], 99)), Err(HelloProblem::BadName));
        for content in [
            vec![],
            vec![0],
            vec![0, 9, 0, 0, 1, b'a'],
            vec![0, 4, 0, 0, 1, b'a', 9],
            vec![0, 0],
        ] {
            assert_eq!(
                read(&hello(&[(SERVER_NAME, content.clone())], 99)),
                Err(HelloProblem::Malformed),
                "{content:?}"
            );
        }
    }

    #[test]
    fn an_encrypted_hello_is_recognised() {
        for kind in ENCRYPTED_CLIENT_HELLO {
            let bytes = hello(&[sni(&["outer.example"]), (kind, vec![0; 40])], 99);
            assert!(read(&bytes).unwrap().unwrap().is_encrypted());
        }
        assert!(!read(&hello(&[sni(&["a"])], 99)).unwrap().unwrap().is_encrypted());
    }

    #[test]
    fn what_is_not_tls_is_refused_at_its_first_wrong_byte() {
        for bytes in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"SSH-2.0",
            &[0x80, 0x2e, 1, 3, 1],
            &[21, 3, 1, 0, 2],
            &[23, 3, 3, 0, 1],
            &[22, 2],
            &[22, 3, 5],
            &[22, 3, 1, 0, 0],
            &[22, 3, 1, 0x40, 1],
            &[22, 3, 1, 0xff, 0xff],
        ] {
            assert_eq!(read(bytes), Err(HelloProblem::NotTls), "{bytes:?}");
        }
        // A record of another kind between two of the handshake.
        let mut bytes = hello(&[sni(&["a.com"])], 10);
        bytes.splice(15..15, [20, 3, 3, 0, 1, 1]);
        assert_eq!(read(&bytes), Err(HelloProblem::NotTls));
        // Another message first.
        assert_eq!(read(&[22, 3, 1, 0, 4, 2, 0, 0, 0]), Err(HelloProblem::Malformed));
    }

    #[test]
    fn the_length_is_bounded_in_what_is_said_and_in_what_is_sent() {
        let long = [&[CLIENT_HELLO, 1, 0, 0][..], &[0; 100]].concat();
        assert_eq!(read(&records(&long, 99)), Err(HelloProblem::TooLong));
        let mut reader = HelloReader::new();
        let drip = records(&message(&[(99, vec![0; 60000])]), 1);
        assert_eq!(reader.push(&drip), Err(HelloProblem::TooLong));
    }

    #[test]
    fn what_was_pushed_is_given_back_unchanged() {
        let mut reader = HelloReader::new();
        let bytes = hello(&[sni(&["a.com"])], 20);
        let more = [&bytes[..], b"early data"].concat();
        assert!(reader.push(&more).unwrap().is_some());
        assert_eq!(reader.into_bytes(), (more, bytes.len()));
    }

    proptest! {
        #[test]
        fn a_hello_cut_or_changed_anywhere_never_panics(at in 0usize..200, to: u8, cut in 0usize..200) {
            let mut bytes = hello(&[(10, vec![0, 2, 0, 29]), sni(&["api.example.com"]), (0xfe0d, vec![1, 2, 3])], 33);
            let at = at % bytes.len();
            bytes[at] = to;
            let _ = read(&bytes);
            bytes.truncate(cut);
            let _ = read(&bytes);
        }
    }
}
