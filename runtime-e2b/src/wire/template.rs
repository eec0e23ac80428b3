//! The control plane: templates and their builds.

use http::Method;
use serde::{Deserialize, Serialize};

use super::{Request, percent};

/// Asks for a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildRequest {
    /// Name of the template, perhaps with a tag.
    pub name: String,
    /// Cores: 1 or even.
    #[serde(rename = "cpuCount", default = "default_cpu")]
    pub cpu_count: u32,
    /// Memory in MB: even.
    #[serde(rename = "memoryMB", default = "default_memory")]
    pub memory_mb: u32,
}

fn default_cpu() -> u32 {
    2
}

fn default_memory() -> u32 {
    1024
}

/// A build that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// The template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// The build.
    #[serde(rename = "buildID")]
    pub build_id: String,
}

/// How far a build is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BuildState {
    /// Asked for, not started.
    Waiting,
    /// Running.
    Building,
    /// Usable.
    Ready,
    /// Failed, or superseded by another build.
    Error,
    /// Something that we do not know.
    #[serde(other)]
    Unknown,
}

/// A line of a build's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// The line.
    #[serde(default)]
    pub message: String,
    /// `debug`, `info`, `warn`, `error`.
    #[serde(default)]
    pub level: String,
    /// RFC 3339.
    #[serde(default)]
    pub timestamp: String,
}

/// Why a build failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// In words.
    #[serde(default)]
    pub message: String,
}

/// The status of a build, with the log lines from the offset that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuildStatus {
    /// How far it is.
    pub status: BuildState,
    /// At most 100 lines.
    #[serde(default)]
    pub log_entries: Vec<LogEntry>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
}

/// Whether a ready build has this name and tag. Without a tag it would only say that somebody once asked for one.
pub fn exists(reference: &str) -> Request {
    Request::new(Method::GET, format!("/templates/aliases/{}", percent(reference)))
}

/// Asks for a build; older ones of the same name that have not started fail.
pub fn request_build(message: &BuildRequest) -> Request {
    Request::new(Method::POST, "/v3/templates").json(message)
}

/// Starts a build from an image.
pub fn start_build(build: &Build, image: &str) -> Request {
    let path = format!(
        "/v2/templates/{}/builds/{}",
        percent(&build.template_id),
        percent(&build.build_id)
    );
    let body = serde_json::json!({ "fromImage": image, "force": false, "steps": [] });
    Request::new(Method::POST, path).json(&body)
}

/// The status of a build.
pub fn build_status(build: &Build, logs_offset: usize) -> Request {
    let path = format!(
        "/templates/{}/builds/{}/status?logsOffset={logs_offset}&limit=100",
        percent(&build.template_id),
        percent(&build.build_id)
    );
    Request::new(Method::GET, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_has_its_measured_requests() {
        assert_eq!(exists("vf-abc:default").path, "/templates/aliases/vf-abc%3Adefault");
        let message = BuildRequest {
            name: "vf-abc".into(),
            cpu_count: 2,
            memory_mb: 1024,
        };
        assert_eq!(
            &request_build(&message).body[..],
            br#"{"name":"vf-abc","cpuCount":2,"memoryMB":1024}"#
        );
        let build = Build {
            template_id: "t".into(),
            build_id: "b".into(),
        };
        let start = start_build(&build, "python:3.11-slim");
        assert_eq!(start.path, "/v2/templates/t/builds/b");
        let body: serde_json::Value = serde_json::from_slice(&start.body).expect("JSON");
        assert_eq!(
            body,
            serde_json::json!({"fromImage": "python:3.11-slim", "force": false, "steps": []})
        );
        assert_eq!(
            build_status(&build, 7).path,
            "/templates/t/builds/b/status?logsOffset=7&limit=100"
        );
    }

    #[test]
    fn an_unknown_state_is_not_an_error_of_parsing() {
        let status: BuildStatus = serde_json::from_str(r#"{"status":"snapshotting","logs":[]}"#).expect("parses");
        assert_eq!(status.status, BuildState::Unknown);
    }
}
