//! [`Token`]: what a program must show to use its box's proxy.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use hyper::header::HeaderValue;
use subtle::ConstantTimeEq;

use crate::error::{Error, ErrorKind, Result};
use crate::network::PROXY_USER;

/// 32 random bytes, as 43 characters that need no escape in a URL. `Debug` hides them.
#[derive(Clone)]
pub(super) struct Token {
    text: String,
    /// The credentials of Basic authentication that carry it.
    expected: String,
}

impl Token {
    /// # Errors
    /// [`ResourceExhausted`](ErrorKind::ResourceExhausted) if the system has no random numbers.
    pub(super) fn random() -> Result<Self> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)
            .map_err(|_| Error::new(ErrorKind::ResourceExhausted, "the system has no random numbers"))?;
        let text = URL_SAFE_NO_PAD.encode(bytes);
        let expected = STANDARD.encode(format!("{PROXY_USER}:{text}"));
        Ok(Self { text, expected })
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether a `Proxy-Authorization` carries this token. Takes the same time for every value of the same length.
    pub(super) fn admits(&self, value: &HeaderValue) -> bool {
        let bytes = value.as_bytes();
        let scheme = bytes.iter().position(|byte| *byte == b' ').unwrap_or(bytes.len());
        let (scheme, credentials) = bytes.split_at(scheme);
        scheme.eq_ignore_ascii_case(b"basic") && bool::from(credentials.trim_ascii().ct_eq(self.expected.as_bytes()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn basic(text: &str) -> HeaderValue {
        HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(text))).unwrap()
    }

    #[test]
    fn only_the_token_itself_is_admitted() {
        let (token, other) = (Token::random().unwrap(), Token::random().unwrap());
        let with = |user: &str, token: &Token| basic(&format!("{user}:{}", token.text()));
        assert!(token.admits(&with(PROXY_USER, &token)));
        let lower = with(PROXY_USER, &token).to_str().unwrap().replace("Basic ", "basic  ");
        assert!(token.admits(&HeaderValue::from_str(&lower).unwrap()));
        for wrong in [
            with(PROXY_USER, &other),
            with("root", &token),
            basic(&format!("{PROXY_USER}:{}", &token.text()[1..])),
            basic(&format!("{PROXY_USER}:{}x", token.text())),
            basic(""),
            HeaderValue::from_static("Basic"),
            HeaderValue::from_static(""),
            HeaderValue::from_str(&format!("Bearer {}", token.text())).unwrap(),
        ] {
            assert!(!token.admits(&wrong));
        }
    }

    #[test]
    fn tokens_are_43_url_safe_characters_and_stay_hidden() {
        let token = Token::random().unwrap();
        assert_eq!(token.text().len(), 43);
        assert!(
            token
                .text()
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        );
        assert!(!format!("{token:?}").contains(token.text()));
    }
}
