//! URLs of files that carry their own permission.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use http::{Method, Request};
use sha2::{Digest as _, Sha256};

use super::server::Query;

/// What a URL for this use is signed with.
fn signature(path: &str, operation: &str, user: &str, token: &str, expires: Option<&str>) -> String {
    let mut text = format!("{path}:{operation}:{user}:{token}");
    if let Some(expires) = expires {
        text.push(':');
        text.push_str(expires);
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// Whether a request for a file has a signature that is right and has not expired.
pub(super) fn is_good<B>(request: &Request<B>, token: &str) -> bool {
    let query = Query::of(request);
    let Some(given) = query.get("signature") else {
        return false;
    };
    let expires = query.get("signature_expiration");
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    if expires.is_some_and(|expires| expires.parse::<u64>().map_or(true, |expires| expires < now)) {
        return false;
    }
    let operation = if request.method() == Method::GET {
        "read"
    } else {
        "write"
    };
    let user = query.get("username").unwrap_or_default();
    given == signature(query.get("path").unwrap_or_default(), operation, user, token, expires)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_the_measured_ones() {
        assert_eq!(
            signature("/a b", "write", "", "envd-tok-abc", None),
            "v1_JkyWSybIorQKCBmr6Glg1zubwKxtXN1R8r0SLFE5g+U"
        );
        assert_eq!(
            signature("/a b", "read", "root", "envd-tok-abc", Some("1796045340")),
            "v1_BMhIe/Qh3SULhuHVubLAKSksaYHOfjgbBCxoSLG1MVw"
        );
    }

    #[test]
    fn a_signature_is_for_one_path_one_use_and_its_time() {
        let good = signature("/a", "read", "root", "tok", Some("4000000000"));
        let good = crate::wire::percent(&good);
        let ask = |method: &str, uri: &str| {
            let request = Request::builder().method(method).uri(uri).body(()).expect("a request");
            is_good(&request, "tok")
        };
        let rest = format!("username=root&signature={good}&signature_expiration=4000000000");
        assert!(ask("GET", &format!("/files?path=/a&{rest}")));
        assert!(!ask("POST", &format!("/files?path=/a&{rest}")));
        assert!(!ask("GET", &format!("/files?path=/b&{rest}")));
        assert!(!ask("GET", "/files?path=/a&username=root"));
        let old = crate::wire::percent(&signature("/a", "read", "", "tok", Some("1000")));
        assert!(!ask(
            "GET",
            &format!("/files?path=/a&signature={old}&signature_expiration=1000")
        ));
    }
}
