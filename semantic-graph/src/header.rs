//! Taking the request id out of a request's headers.

use std::fmt;

use crate::code::{Code, Coded};
use crate::id::RequestId;

/// The header in which a harness sends a request id. It is private: it never goes upstream.
pub const REQUEST_ID_HEADER: &str = "X-ACP-Model-Request-ID";

/// A request id header whose value is not a request id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderError;

impl HeaderError {
    /// [`Code::InvalidRequestId`].
    #[must_use]
    pub fn code(&self) -> Code {
        Code::InvalidRequestId
    }

    /// The HTTP status a server answers with: 400.
    #[must_use]
    pub fn status(&self) -> u16 {
        400
    }
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Coded(
            self.code(),
            format_args!("the {REQUEST_ID_HEADER} header is not a request id"),
        )
        .fmt(f)
    }
}

impl std::error::Error for HeaderError {}

/// Whether a header is the private one.
#[must_use]
pub fn is_request_id_header(name: &str) -> bool {
    name.eq_ignore_ascii_case(REQUEST_ID_HEADER)
}

/// Removes the private header and reads the request id from it.
///
/// Every occurrence is removed, in any case, also when this fails; the last one counts. The other
/// headers keep their order, their case and their repeats.
///
/// # Errors
/// [`HeaderError`] if the last occurrence is not a request id.
///
/// ```
/// # use semantic_graph::take_request_id;
/// let mut headers = vec![("Accept", "*/*"), ("x-acp-model-request-id", "r1")];
/// let id = take_request_id(&mut headers)?;
/// assert_eq!(id.unwrap(), "r1");
/// assert_eq!(headers, [("Accept", "*/*")]);
/// # Ok::<(), semantic_graph::HeaderError>(())
/// ```
pub fn take_request_id<N, V>(headers: &mut Vec<(N, V)>) -> Result<Option<RequestId>, HeaderError>
where
    N: AsRef<str>,
    V: AsRef<[u8]>,
{
    let mut last = None;
    headers.retain(|(name, value)| {
        let private = is_request_id_header(name.as_ref());
        if private {
            last = Some(parse(value.as_ref()));
        }
        !private
    });
    last.transpose()
}

fn parse(value: &[u8]) -> Result<RequestId, HeaderError> {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| RequestId::new(text).ok())
        .ok_or(HeaderError)
}
