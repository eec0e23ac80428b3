//! The control plane: sends the requests of [`wire::control`](crate::wire::control) and
//! [`wire::template`](crate::wire::template).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName};
use runtime_core::retry::{Failure, Idempotency, Retrier, RetryPolicy};
use runtime_core::{Error, ErrorKind, Result};
use serde::de::DeserializeOwned;

use crate::endpoints::Endpoints;
use crate::error::{self, Subject};
use crate::http_client;
use crate::wire::Request;
use crate::wire::control::{self, CreateRequest, Created, Generation, Listed};
use crate::wire::template::{self, Build, BuildRequest, BuildStatus};

/// What one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Pages of a list that are followed at most: 100,000 boxes.
const MAX_PAGES: usize = 1000;

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// How requests of this crate are repeated.
pub(crate) fn retrier() -> Result<Retrier> {
    Retrier::new(RetryPolicy {
        max_elapsed: Duration::from_secs(60),
        base_delay: Duration::from_millis(200),
        max_delay: Duration::from_secs(10),
        ..RetryPolicy::default()
    })
}

/// What the control plane answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    fn json<T: DeserializeOwned>(&self, what: &str) -> Result<T> {
        serde_json::from_slice(&self.body).map_err(|error| error::unreadable(what, error))
    }
}

/// Why a create did not give a box.
#[derive(Debug)]
pub(crate) enum CreateFailure {
    /// Nothing was created, for certain.
    Refused(Error),
    /// A box may have been created.
    Unknown(Error),
}

/// The control plane.
#[derive(Debug)]
pub(crate) struct ControlPlane {
    endpoints: Endpoints,
    retrier: Retrier,
    /// Whether it turned out to have the first generation of calls only.
    is_v1: AtomicBool,
}

impl ControlPlane {
    pub(crate) fn new(endpoints: Endpoints) -> Result<Self> {
        endpoints.key()?;
        Ok(Self {
            endpoints,
            retrier: retrier()?,
            is_v1: AtomicBool::new(false),
        })
    }

    pub(crate) fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// One attempt, whatever the status.
    async fn attempt(&self, request: &Request) -> Result<Answer, Failure> {
        let url = format!("{}{}", self.endpoints.api_url, request.path);
        let mut builder = http_client::client(&url)?
            .request(request.method.clone(), url)
            .timeout(REQUEST_TIMEOUT)
            .header(API_KEY, self.endpoints.key()?.expose());
        for (name, value) in &request.headers {
            builder = builder.header(name, value);
        }
        if !request.body.is_empty() {
            builder = builder.body(request.body.clone());
        }
        let response = builder.send().await.map_err(error::transport)?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let body = response.bytes().await.map_err(error::transport)?;
        Ok(Answer { status, headers, body })
    }

    /// Sends a request until an answer is a success or of `expected` status.
    async fn call(
        &self,
        operation: &'static str,
        subject: Subject,
        idempotency: Idempotency,
        request: &Request,
        expected: &[u16],
    ) -> Result<Answer> {
        self.retrier
            .run(operation, idempotency, |_| async {
                let answer = self.attempt(request).await?;
                if (200..300).contains(&answer.status) || expected.contains(&answer.status) {
                    return Ok(answer);
                }
                Err(error::control_plane(
                    subject,
                    answer.status,
                    &answer.headers,
                    &answer.body,
                ))
            })
            .await
    }

    fn generation(&self) -> Generation {
        if self.is_v1.load(Ordering::Relaxed) {
            Generation::V1
        } else {
            Generation::V2
        }
    }

    /// Whether an answer says that this control plane does not have the second generation of a call, rather than that it
    /// does not have the thing that was asked for.
    fn lacks_v2(&self, answer: &Answer) -> bool {
        let no_route = match answer.status {
            405 => true,
            404 => match serde_json::from_slice::<serde_json::Value>(&answer.body) {
                Ok(body) => {
                    let message = body
                        .get("message")
                        .and_then(|message| message.as_str())
                        .unwrap_or_default();
                    message.contains("no matching operation")
                }
                Err(_) => true,
            },
            _ => false,
        };
        let lacks = no_route && !self.is_v1.load(Ordering::Relaxed);
        if lacks {
            self.is_v1.store(true, Ordering::Relaxed);
        }
        lacks
    }

    /// Creates a box. Sent again only after an answer that proves that nothing was created.
    pub(crate) async fn create(&self, message: &CreateRequest, key: &str) -> Result<Created, CreateFailure> {
        let refused_at_last = AtomicBool::new(false);
        let created = self
            .retrier
            .run("create", Idempotency::OnlyIfUnsent, |_| async {
                self.create_once(message, key).await.map_err(|(failure, refused)| {
                    refused_at_last.store(refused || failure.is_unsent(), Ordering::Relaxed);
                    failure
                })
            })
            .await;
        created.map_err(|error| match refused_at_last.into_inner() {
            true => CreateFailure::Refused(error),
            false => CreateFailure::Unknown(error),
        })
    }

    /// One create. An error says beside itself whether nothing was created.
    async fn create_once(&self, message: &CreateRequest, key: &str) -> Result<Created, (Failure, bool)> {
        loop {
            let generation = self.generation();
            let mut message = message.clone();
            if generation == Generation::V1 {
                message.secure = Some(true);
            }
            let request = control::create(generation, &message, key);
            let answer = self.attempt(&request).await.map_err(|failure| (failure, false))?;
            if (200..300).contains(&answer.status) {
                return answer
                    .json("the created sandbox")
                    .map_err(|error| (error.into(), false));
            }
            if self.lacks_v2(&answer) {
                continue;
            }
            let failure = error::control_plane(Subject::Template, answer.status, &answer.headers, &answer.body);
            // 408, 409 and 5xx may have created; every other refusal has not.
            let refused = (400..500).contains(&answer.status) && !matches!(answer.status, 408 | 409);
            return Err((failure, refused));
        }
    }

    /// Connects to a box: resumes a paused one, extends its life to at least `timeout` seconds from now.
    pub(crate) async fn connect(&self, id: &str, timeout: u64) -> Result<Created> {
        loop {
            let request = control::connect(self.generation(), id, timeout);
            let answer = self
                .call("connect", Subject::Sandbox, Idempotency::Safe, &request, &[404, 405])
                .await?;
            if self.lacks_v2(&answer) {
                continue;
            }
            if !(200..300).contains(&answer.status) {
                let failure = error::control_plane(Subject::Sandbox, 404, &answer.headers, &answer.body);
                return Err(error::into_error(failure));
            }
            return answer.json("the connected sandbox");
        }
    }

    /// The boxes with these labels.
    pub(crate) async fn list(&self, metadata: &[(&str, &str)]) -> Result<Vec<Listed>> {
        let mut boxes = Vec::new();
        let mut next: Option<String> = None;
        for _ in 0..MAX_PAGES {
            let request = control::list(metadata, next.as_deref());
            let answer = self
                .call("list", Subject::Sandbox, Idempotency::Safe, &request, &[])
                .await?;
            boxes.extend(answer.json::<Vec<Listed>>("the list of sandboxes")?);
            let token = answer.headers.get("x-next-token").and_then(|token| token.to_str().ok());
            match token.filter(|token| !token.is_empty()) {
                Some(token) => next = Some(token.to_owned()),
                None => break,
            }
        }
        Ok(boxes)
    }

    /// Deletes a box. One that is gone is a success.
    pub(crate) async fn kill(&self, id: &str) -> Result<()> {
        let request = control::kill(id);
        self.call("kill", Subject::Sandbox, Idempotency::Safe, &request, &[404])
            .await
            .map(drop)
    }

    /// Pauses a box. One that is paused is a success.
    pub(crate) async fn pause(&self, id: &str) -> Result<()> {
        let request = control::pause(id);
        self.call("pause", Subject::Sandbox, Idempotency::Safe, &request, &[409])
            .await
            .map(drop)
    }

    /// Replaces the egress rules of a box.
    pub(crate) async fn network(&self, id: &str, body: &serde_json::Value) -> Result<()> {
        let request = control::network(id, body);
        let answer = self
            .call("network", Subject::Sandbox, Idempotency::Safe, &request, &[])
            .await;
        answer.map(drop).map_err(|error| match error.kind() {
            ErrorKind::SandboxGone | ErrorKind::Unauthorized => error,
            _ => Error::new(
                ErrorKind::NetworkPolicy,
                format!("the egress policy could not be applied: {}", error.message()),
            )
            .with_retry(error.retry())
            .with_source(error),
        })
    }

    /// Whether a ready build has this name and tag. One that is somebody else's counts: a create says the rest.
    pub(crate) async fn template_exists(&self, reference: &str) -> Result<bool> {
        let request = template::exists(reference);
        let answer = self
            .call(
                "template exists",
                Subject::Template,
                Idempotency::Safe,
                &request,
                &[403, 404],
            )
            .await?;
        Ok(answer.status != 404)
    }

    /// Asks for a build. Never sent twice: a second request would supersede the first.
    pub(crate) async fn request_build(&self, message: &BuildRequest) -> Result<Build> {
        let request = template::request_build(message);
        self.call(
            "request build",
            Subject::Template,
            Idempotency::OnlyIfUnsent,
            &request,
            &[],
        )
        .await?
        .json("the requested build")
    }

    /// Starts a build.
    pub(crate) async fn start_build(&self, build: &Build, image: &str) -> Result<()> {
        let request = template::start_build(build, image);
        self.call(
            "start build",
            Subject::Template,
            Idempotency::OnlyIfUnsent,
            &request,
            &[],
        )
        .await
        .map(drop)
    }

    /// The status of a build.
    pub(crate) async fn build_status(&self, build: &Build, logs_offset: usize) -> Result<BuildStatus> {
        let request = template::build_status(build, logs_offset);
        self.call("build status", Subject::Template, Idempotency::Safe, &request, &[])
            .await?
            .json("the status of the build")
    }
}
