//! The control plane: sandboxes.

use std::collections::BTreeMap;
use std::fmt;

use http::{HeaderName, Method};
use serde::{Deserialize, Serialize};

use super::{Request, percent};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Which generation of the create and connect calls a control plane has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// `/sandboxes`: self-hosted control planes.
    V1,
    /// `/v2/sandboxes`: the hosted service.
    V2,
}

/// Create.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CreateRequest {
    /// Id or name of a template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Lifetime from now, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u64>,
    /// Labels, by which the box is found again.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Variables of every process. Ours go with each command instead.
    #[serde(rename = "envVars", default)]
    pub env_vars: BTreeMap<String, String>,
    /// Ask for an access token; only in the first generation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// Whether the box may reach the internet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Egress rules at creation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<serde_json::Value>,
}

/// What create and connect answer. Its `Debug` does not show the tokens.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Created {
    /// The box.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Its template.
    #[serde(rename = "templateID", default)]
    pub template_id: String,
    /// Old form of the id.
    #[serde(rename = "clientID", default)]
    pub client_id: String,
    /// Version of its envd.
    #[serde(default)]
    pub envd_version: String,
    /// Credential for envd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Domain of its hosts.
    #[serde(default)]
    pub domain: Option<String>,
}

impl fmt::Debug for Created {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Created")
            .field("sandbox_id", &self.sandbox_id)
            .field("template_id", &self.template_id)
            .field("envd_version", &self.envd_version)
            .field("domain", &self.domain)
            .finish_non_exhaustive()
    }
}

/// One box of the list, or of info.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    /// The box.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Its template.
    #[serde(rename = "templateID", default)]
    pub template_id: String,
    /// `running` or `paused`.
    #[serde(default)]
    pub state: String,
    /// Its labels.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// When its life ends, RFC 3339.
    #[serde(default)]
    pub end_at: String,
}

/// Create a box.
pub fn create(generation: Generation, message: &CreateRequest, idempotency_key: &str) -> Request {
    let path = match generation {
        Generation::V1 => "/sandboxes",
        Generation::V2 => "/v2/sandboxes",
    };
    Request::new(Method::POST, path)
        .json(message)
        .header(IDEMPOTENCY_KEY, idempotency_key)
}

/// Connect to a box, which resumes a paused one and makes it live at least `timeout` seconds from now.
pub fn connect(generation: Generation, id: &str, timeout: u64) -> Request {
    let prefix = match generation {
        Generation::V1 => "/sandboxes",
        Generation::V2 => "/v2/sandboxes",
    };
    let body = serde_json::json!({ "timeout": timeout });
    Request::new(Method::POST, format!("{prefix}/{}/connect", percent(id))).json(&body)
}

/// Facts about a box.
pub fn info(id: &str) -> Request {
    Request::new(Method::GET, format!("/sandboxes/{}", percent(id)))
}

/// One page of the boxes with these labels, running or paused.
pub fn list(metadata: &[(&str, &str)], next: Option<&str>) -> Request {
    let pairs: Vec<String> = metadata
        .iter()
        .map(|(name, value)| format!("{}={}", percent(name), percent(value)))
        .collect();
    let mut path = "/v2/sandboxes?state=running%2Cpaused&limit=100".to_owned();
    if !pairs.is_empty() {
        // A query within a query: the pairs are encoded, and then all of it is.
        path.push_str("&metadata=");
        path.push_str(&percent(&pairs.join("&")));
    }
    if let Some(next) = next {
        path.push_str("&nextToken=");
        path.push_str(&percent(next));
    }
    Request::new(Method::GET, path)
}

/// Delete a box.
pub fn kill(id: &str) -> Request {
    Request::new(Method::DELETE, format!("/sandboxes/{}", percent(id)))
}

/// Pause a box.
pub fn pause(id: &str) -> Request {
    Request::new(Method::POST, format!("/sandboxes/{}/pause", percent(id))).json(&serde_json::json!({}))
}

/// Replace the egress rules of a box.
pub fn network(id: &str, body: &serde_json::Value) -> Request {
    Request::new(Method::PUT, format!("/sandboxes/{}/network", percent(id))).json(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_create_has_its_measured_body() {
        let message = CreateRequest {
            template_id: "vf-abc".into(),
            timeout: Some(86_400),
            metadata: [("name", "n1"), ("runtime", "verifiers")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into(),
            env_vars: BTreeMap::new(),
            secure: None,
            allow_internet_access: None,
            network: None,
        };
        let request = create(Generation::V2, &message, "k-1");
        assert_eq!((request.method, request.path.as_str()), (Method::POST, "/v2/sandboxes"));
        assert_eq!(
            std::str::from_utf8(&request.body).expect("text"),
            r#"{"templateID":"vf-abc","timeout":86400,"metadata":{"name":"n1","runtime":"verifiers"},"envVars":{}}"#
        );
        assert!(request.headers.contains(&(IDEMPOTENCY_KEY, "k-1".into())));
        assert_eq!(create(Generation::V1, &message, "k").path, "/sandboxes");
    }

    #[test]
    fn labels_are_encoded_twice() {
        assert_eq!(
            list(&[("name", "a b"), ("x", "1")], Some("t=")).path,
            "/v2/sandboxes?state=running%2Cpaused&limit=100&metadata=name%3Da%2520b%26x%3D1&nextToken=t%3D"
        );
    }

    #[test]
    fn a_created_box_never_shows_its_token() {
        let created: Created = serde_json::from_str(
            r#"{"sandboxID":"i1","templateID":"t","clientID":"c","envdVersion":"0.6.13","envdAccessToken":"secret","domain":null,"new":1}"#,
        )
        .expect("unknown fields are fine");
        assert_eq!(created.envd_access_token.as_deref(), Some("secret"));
        assert!(!format!("{created:?}").contains("secret"));
    }
}
