//! envd's plain HTTP endpoints for the bytes of files, and its health.

use http::Method;

use super::{Request, percent};

/// A download, or its part from `offset` on and at most `limit` bytes.
pub fn download(path: &str, user: &str, offset: u64, limit: Option<u64>) -> Request {
    let mut request = Request::new(Method::GET, target(path, user)).header(http::header::ACCEPT_ENCODING, "identity");
    if offset > 0 || limit.is_some() {
        // Both ends are inclusive; nothing at all cannot be asked for.
        let range = match limit {
            Some(limit) => format!("bytes={offset}-{}", offset.saturating_add(limit.max(1)) - 1),
            None => format!("bytes={offset}-"),
        };
        request = request.header(http::header::RANGE, range);
    }
    request
}

/// An upload; the client adds the body. Missing parents are created.
pub fn upload(path: &str, user: &str) -> Request {
    Request::new(Method::POST, target(path, user)).header(http::header::CONTENT_TYPE, "application/octet-stream")
}

/// Whether envd is there.
pub fn health() -> Request {
    Request::new(Method::GET, "/health")
}

fn target(path: &str, user: &str) -> String {
    format!("/files?username={}&path={}", percent(user), percent(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounded_read_asks_for_no_more_than_it_may_have() {
        let range = |request: Request| {
            request
                .headers
                .into_iter()
                .find(|(name, _)| name == http::header::RANGE)
                .map(|(_, value)| value)
        };
        assert_eq!(range(download("/a b", "root", 0, None)), None);
        assert_eq!(range(download("/a", "root", 0, Some(10))), Some("bytes=0-9".into()));
        assert_eq!(range(download("/a", "root", 5, Some(10))), Some("bytes=5-14".into()));
        assert_eq!(range(download("/a", "root", 5, None)), Some("bytes=5-".into()));
        assert_eq!(
            range(download("/a", "root", 1, Some(u64::MAX))),
            Some(format!("bytes=1-{}", u64::MAX - 1))
        );
        assert_eq!(
            download("/a b", "root", 0, None).path,
            "/files?username=root&path=%2Fa%20b"
        );
    }
}
