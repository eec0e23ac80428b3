//! Templates and their builds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use runtime_core::names::{random_hex, random_id};
use serde::Deserialize;
use serde_json::json;

use super::server::{Answer, Query, Whole, empty, failure, json as answer, read};
use super::state::{BuildInfo, now_text};
use crate::wire::template::{BuildRequest, BuildState};

/// Templates of one team.
#[derive(Debug)]
pub(super) struct Templates(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    templates: Vec<Template>,
    builds: Vec<Build>,
    build_time: Duration,
    failing: HashMap<String, String>,
}

#[derive(Debug)]
struct Template {
    id: String,
    alias: String,
    /// Ready builds by their tag.
    tags: HashMap<String, String>,
}

#[derive(Debug)]
struct Build {
    id: String,
    template: String,
    tag: String,
    state: BuildState,
    reason: String,
    log: Vec<String>,
    info: BuildInfo,
}

#[derive(Debug, Deserialize)]
struct StartBody {
    #[serde(rename = "fromImage")]
    from_image: Option<String>,
    #[serde(rename = "fromTemplate")]
    from_template: Option<String>,
    #[serde(default)]
    steps: Vec<serde_json::Value>,
}

impl Templates {
    /// With the template that the official client uses by default.
    pub(super) fn new() -> Self {
        let base = Template {
            id: "base0000000000000000".into(),
            alias: "base".into(),
            tags: [("default".to_owned(), "base".to_owned())].into(),
        };
        Self(Mutex::new(Inner {
            templates: vec![base],
            builds: Vec::new(),
            build_time: Duration::from_millis(50),
            failing: HashMap::new(),
        }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn builds(&self) -> Vec<BuildInfo> {
        let inner = self.inner();
        let infos = inner.builds.iter().map(|build| BuildInfo {
            state: build.state,
            ..build.info.clone()
        });
        infos.collect()
    }

    pub(super) fn set_build_time(&self, time: Duration) {
        self.inner().build_time = time;
    }

    pub(super) fn fail_image(&self, image: String, reason: String) {
        self.inner().failing.insert(image, reason);
    }

    /// The template of a reference that boxes can boot from: its id and alias.
    pub(super) fn ready(&self, reference: &str) -> Option<(String, String)> {
        let (name, tag) = split(reference);
        let inner = self.inner();
        let template = inner
            .templates
            .iter()
            .find(|template| template.alias == name || template.id == name)?;
        template
            .tags
            .contains_key(tag.unwrap_or("default"))
            .then(|| (template.id.clone(), template.alias.clone()))
    }

    /// `GET /templates/aliases/{reference}`.
    pub(super) fn exists(&self, reference: &str) -> Answer {
        let (name, tag) = split(reference);
        let inner = self.inner();
        let found = inner.templates.iter().find(|template| template.alias == name);
        match (found, tag) {
            // Without a tag it only says that somebody once asked for a build.
            (Some(template), None) => answer(StatusCode::OK, &json!({ "templateID": template.id, "public": false })),
            (Some(template), Some(tag)) if template.tags.contains_key(tag) => {
                answer(StatusCode::OK, &json!({ "templateID": template.id, "public": false }))
            }
            _ => failure(StatusCode::NOT_FOUND, format!("template '{reference}' not found")),
        }
    }

    /// `POST /v3/templates`.
    pub(super) async fn request(&self, request: Whole) -> Answer {
        let Ok(body) = read(request).await else {
            return failure(StatusCode::BAD_REQUEST, "no body");
        };
        let Ok(message) = serde_json::from_slice::<BuildRequest>(&body) else {
            return failure(StatusCode::BAD_REQUEST, "malformed body");
        };
        if message.cpu_count == 0 || (message.cpu_count != 1 && message.cpu_count % 2 != 0) {
            return failure(StatusCode::BAD_REQUEST, "CPU count must be 1 or even");
        }
        if message.memory_mb < 128 || message.memory_mb % 2 != 0 {
            return failure(StatusCode::BAD_REQUEST, "memory must be at least 128 MB and even");
        }
        let (name, tag) = split(&message.name);
        let is_name = |text: &str| {
            !text.is_empty()
                && text
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte))
        };
        if !is_name(&name) || tag.is_some_and(|tag| !is_name(tag)) {
            return failure(StatusCode::BAD_REQUEST, "malformed template name");
        }
        let tag = tag.unwrap_or("default").to_owned();
        let mut inner = self.inner();
        let id = match inner.templates.iter().find(|template| template.alias == name) {
            Some(template) => template.id.clone(),
            None => {
                let id = random_hex(20);
                inner.templates.push(Template {
                    id: id.clone(),
                    alias: name.clone(),
                    tags: HashMap::new(),
                });
                id
            }
        };
        supersede(&mut inner, &id, &tag, BuildState::Waiting);
        let build = random_id();
        inner.builds.push(Build {
            id: build.clone(),
            template: id.clone(),
            tag: tag.clone(),
            state: BuildState::Waiting,
            reason: String::new(),
            log: Vec::new(),
            info: BuildInfo {
                name: name.clone(),
                image: String::new(),
                cpu_count: message.cpu_count,
                memory_mb: message.memory_mb,
                state: BuildState::Waiting,
            },
        });
        let body = json!({
            "templateID": id, "buildID": build, "public": false, "names": [name], "tags": [tag], "aliases": [name]
        });
        answer(StatusCode::ACCEPTED, &body)
    }

    /// `POST /v2/templates/{template}/builds/{build}`.
    pub(super) async fn start(self: &Arc<Self>, template: &str, build: &str, request: Whole) -> Answer {
        let Ok(body) = read(request).await else {
            return failure(StatusCode::BAD_REQUEST, "no body");
        };
        let Ok(message) = serde_json::from_slice::<StartBody>(&body) else {
            return failure(StatusCode::BAD_REQUEST, "malformed body");
        };
        let Some(image) = message.from_image.or(message.from_template) else {
            return failure(StatusCode::BAD_REQUEST, "fromImage or fromTemplate is needed");
        };
        let time = {
            let mut inner = self.inner();
            let time = inner.build_time;
            let found = inner
                .builds
                .iter()
                .position(|found| found.id == build && found.template == template);
            let Some(found) = found else {
                return failure(StatusCode::BAD_REQUEST, "unknown build");
            };
            if inner.builds[found].state != BuildState::Waiting {
                return failure(StatusCode::BAD_REQUEST, "build is not in waiting state");
            }
            let tag = inner.builds[found].tag.clone();
            supersede(&mut inner, template, &tag, BuildState::Building);
            let build = &mut inner.builds[found];
            build.state = BuildState::Building;
            build.info.image = image.clone();
            build.log.push(format!("FROM {image}"));
            build
                .log
                .extend(message.steps.iter().map(|step| format!("step {step}")));
            time
        };
        let (templates, build) = (self.clone(), build.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            templates.finish(&build, &image);
        });
        empty(StatusCode::ACCEPTED)
    }

    fn finish(&self, id: &str, image: &str) {
        let mut inner = self.inner();
        let failed = inner.failing.get(image).cloned();
        let Some(build) = inner.builds.iter_mut().find(|build| build.id == id) else {
            return;
        };
        if build.state != BuildState::Building {
            return;
        }
        if let Some(reason) = failed {
            build.log.push(format!("pulling {image}: {reason}"));
            build.state = BuildState::Error;
            build.reason = reason;
            return;
        }
        build.log.push("done".to_owned());
        build.state = BuildState::Ready;
        let (template, tag) = (build.template.clone(), build.tag.clone());
        if let Some(template) = inner.templates.iter_mut().find(|found| found.id == template) {
            template.tags.insert(tag, id.to_owned());
        }
    }

    /// `GET /templates/{template}/builds/{build}/status`.
    pub(super) fn status(&self, template: &str, build: &str, request: &Whole) -> Answer {
        let query = Query::of(request);
        let number = |name: &str| query.get(name)?.parse().ok();
        let (offset, limit): (usize, usize) = (number("logsOffset").unwrap_or(0), number("limit").unwrap_or(100));
        let inner = self.inner();
        let Some(found) = inner
            .builds
            .iter()
            .find(|found| found.id == build && found.template == template)
        else {
            return failure(StatusCode::BAD_REQUEST, "unknown build");
        };
        let lines = found.log.iter().skip(offset).take(limit.min(100));
        let entries: Vec<_> = lines
            .clone()
            .map(|line| json!({ "timestamp": now_text(), "message": line, "level": "info" }))
            .collect();
        let mut body = json!({
            "templateID": template, "buildID": build, "status": found.state,
            "logs": lines.collect::<Vec<_>>(), "logEntries": entries
        });
        if found.state == BuildState::Error {
            body["reason"] = json!({ "message": found.reason });
        }
        answer(StatusCode::OK, &body)
    }
}

/// A later build ends earlier ones of the same template and tag that are in `state`.
fn supersede(inner: &mut Inner, template: &str, tag: &str, state: BuildState) {
    let older = inner
        .builds
        .iter_mut()
        .filter(|build| build.template == template && build.tag == tag && build.state == state);
    for build in older {
        build.state = BuildState::Error;
        build.reason = "superseded by a newer build".to_owned();
    }
}

/// A reference's name, lower-cased, and its tag.
fn split(reference: &str) -> (String, Option<&str>) {
    let (name, tag) = match reference.split_once(':') {
        Some((name, tag)) => (name, Some(tag)),
        None => (reference, None),
    };
    let name = name.rsplit('/').next().unwrap_or(name);
    (name.trim().to_ascii_lowercase(), tag)
}
