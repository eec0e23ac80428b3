//! The control plane.

use std::collections::BTreeMap;
use std::sync::Arc;

use http::{HeaderValue, Method, StatusCode};
use ipnet::IpNet;
use runtime_core::names::random_hex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::boxes::{EmulatedBox, Order};
use super::gateway::{CurrentRules, Outside};
use super::place::Place;
use super::rules::Rules;
use super::server::{Answer, Query, Whole, decode, empty, failure, json as answer, parse_query, read};
use super::state::State;

#[derive(Debug, Deserialize)]
struct CreateBody {
    #[serde(rename = "templateID")]
    template_id: String,
    timeout: Option<i64>,
    #[serde(default)]
    metadata: BTreeMap<String, String>,
    #[serde(rename = "envVars", default)]
    env_vars: BTreeMap<String, String>,
    #[serde(rename = "autoPause", default)]
    auto_pause: bool,
    allow_internet_access: Option<bool>,
    network: Option<Value>,
}

pub(super) async fn handle(state: &Arc<State>, request: Whole) -> Answer {
    let key = request.headers().get("x-api-key");
    if key.is_none_or(|key| key.as_bytes() != state.api_key.as_bytes()) {
        return failure(StatusCode::UNAUTHORIZED, "the API key is missing or wrong");
    }
    let path = request.uri().path().to_owned();
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let method = request.method().clone();
    match (method, parts.as_slice()) {
        (Method::POST, ["v2", "sandboxes"]) => create(state, request, 300).await,
        (Method::POST, ["sandboxes"]) => create(state, request, 15).await,
        (Method::GET, ["v2", "sandboxes"]) => list(state, &request),
        (Method::POST, ["v2", "sandboxes", id, "connect"] | ["sandboxes", id, "connect"]) => {
            connect(state, id, request).await
        }
        (Method::GET, ["sandboxes", id]) => match state.find(id) {
            Some(found) => answer(StatusCode::OK, &found.described()),
            None => unknown(id),
        },
        (Method::DELETE, ["sandboxes", id]) => match state.delete(id).await {
            true => empty(StatusCode::NO_CONTENT),
            false => unknown(id),
        },
        (Method::POST, ["sandboxes", id, "timeout"]) => set_timeout(state, id, request).await,
        (Method::POST, ["sandboxes", id, "pause"]) => match state.find(id) {
            Some(found) if found.pause() => empty(StatusCode::NO_CONTENT),
            Some(_) => failure(StatusCode::CONFLICT, "the sandbox is paused already"),
            None => unknown(id),
        },
        (Method::PUT, ["sandboxes", id, "network"]) => network(state, id, request).await,
        (Method::GET, ["templates", "aliases", reference]) => state.templates.exists(&decode(reference)),
        (Method::POST, ["v3", "templates"]) => state.templates.request(request).await,
        (Method::POST, ["v2", "templates", template, "builds", build]) => {
            state.templates.start(template, build, request).await
        }
        (Method::GET, ["templates", template, "builds", build, "status"]) => {
            state.templates.status(template, build, &request)
        }
        _ => failure(StatusCode::NOT_FOUND, "no matching operation was found"),
    }
}

fn unknown(id: &str) -> Answer {
    failure(
        StatusCode::NOT_FOUND,
        format!("sandbox {id:?} doesn't exist or you don't have access to it"),
    )
}

/// The lifetime, or why it is refused.
fn lifetime(state: &State, asked: Option<i64>, default: u64) -> Result<u64, Box<Answer>> {
    let seconds = match asked {
        None => default.min(state.max_lifetime()),
        Some(seconds) => match u64::try_from(seconds) {
            Ok(seconds) if seconds > 0 => seconds,
            _ => return Err(Box::new(failure(StatusCode::BAD_REQUEST, "timeout must be positive"))),
        },
    };
    if seconds > state.max_lifetime() {
        let hours = state.max_lifetime() / 3600;
        return Err(Box::new(failure(
            StatusCode::BAD_REQUEST,
            format!("Timeout cannot be greater than {hours} hours"),
        )));
    }
    Ok(seconds)
}

async fn create(state: &Arc<State>, request: Whole, default: u64) -> Answer {
    let Ok(body) = read(request).await else {
        return failure(StatusCode::BAD_REQUEST, "no body");
    };
    let Ok(body) = serde_json::from_slice::<CreateBody>(&body) else {
        return failure(StatusCode::BAD_REQUEST, "malformed body");
    };
    let timeout = match lifetime(state, body.timeout, default) {
        Ok(timeout) => timeout,
        Err(refusal) => return *refusal,
    };
    if let Some(Err(why)) = body.network.as_ref().map(check_network) {
        return failure(StatusCode::BAD_REQUEST, why);
    }
    let Some(template) = state.templates.ready(&body.template_id) else {
        return failure(
            StatusCode::NOT_FOUND,
            format!("template '{}' not found", body.template_id),
        );
    };
    let id = format!("i{}", random_hex(20));
    let rules = CurrentRules::new(Rules::of(body.network.as_ref(), body.allow_internet_access).into());
    let outside = Outside::here(state.names.clone());
    let place = Place::new(
        id.clone(),
        state.dir().join(&id),
        &state.isolation,
        outside,
        rules.clone(),
    );
    let place = match place.await {
        Ok(place) => place,
        Err(error) => {
            return failure(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("failed to place sandbox: {error}"),
            );
        }
    };
    let order = Order {
        template,
        timeout,
        metadata: body.metadata,
        env: body.env_vars,
        auto_pause: body.auto_pause,
        allow_internet_access: body.allow_internet_access,
        network: body.network,
        rules,
    };
    let made = EmulatedBox::new(state, id, place, order);
    state.add(made.clone());
    tokio::spawn(made.clone().live(state.clone()));
    answer(StatusCode::CREATED, &made.created())
}

fn list(state: &State, request: &Whole) -> Answer {
    let query = Query::of(request);
    // The parameter is a query of its own, encoded once more than the address is.
    let labels = parse_query(&decode(query.get("metadata").unwrap_or_default()));
    let states: Vec<&str> = match query.get("state") {
        Some(states) if !states.is_empty() => states.split(',').collect(),
        _ => vec!["running", "paused"],
    };
    let limit = query
        .get("limit")
        .and_then(|limit| limit.parse().ok())
        .unwrap_or(100)
        .clamp(1, 100);
    let start: usize = query.get("nextToken").and_then(|token| token.parse().ok()).unwrap_or(0);
    let all = state.boxes();
    let wanted: Vec<_> = all
        .iter()
        .filter(|found| states.contains(&if found.is_paused() { "paused" } else { "running" }))
        .filter(|found| found.has_labels(&labels))
        .collect();
    let page: Vec<Value> = wanted
        .iter()
        .skip(start)
        .take(limit)
        .map(|found| found.described())
        .collect();
    let mut answer = answer(StatusCode::OK, &page);
    if start + limit < wanted.len() {
        answer
            .headers_mut()
            .insert("x-next-token", HeaderValue::from(start + limit));
    }
    answer
        .headers_mut()
        .insert("x-total-running", HeaderValue::from(wanted.len()));
    answer
}

async fn timeout_of(request: Whole) -> Option<i64> {
    let body = read(request).await.ok()?;
    serde_json::from_slice::<Value>(&body).ok()?.get("timeout")?.as_i64()
}

async fn connect(state: &Arc<State>, id: &str, request: Whole) -> Answer {
    let timeout = match lifetime(state, timeout_of(request).await, 300) {
        Ok(timeout) => timeout,
        Err(refusal) => return *refusal,
    };
    let Some(found) = state.find(id) else {
        return unknown(id);
    };
    let resumed = found.resume();
    found.set_timeout(timeout, !resumed);
    answer(
        if resumed { StatusCode::CREATED } else { StatusCode::OK },
        &found.created(),
    )
}

async fn set_timeout(state: &Arc<State>, id: &str, request: Whole) -> Answer {
    let Some(seconds) = timeout_of(request).await else {
        return failure(StatusCode::BAD_REQUEST, "timeout is needed");
    };
    let Some(found) = state.find(id) else {
        return unknown(id);
    };
    if found.is_paused() {
        return failure(StatusCode::CONFLICT, "the sandbox is not running");
    }
    found.set_timeout(u64::try_from(seconds).unwrap_or(0).min(state.max_lifetime()), false);
    empty(StatusCode::NO_CONTENT)
}

async fn network(state: &Arc<State>, id: &str, request: Whole) -> Answer {
    let Ok(body) = read(request).await else {
        return failure(StatusCode::BAD_REQUEST, "no body");
    };
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return failure(StatusCode::BAD_REQUEST, "malformed body");
    };
    let Some(found) = state.find(id) else {
        return unknown(id);
    };
    if found.is_paused() {
        return failure(StatusCode::CONFLICT, "the sandbox is not running");
    }
    match check_network(&body) {
        Ok(()) => {
            found.set_network(body);
            empty(StatusCode::NO_CONTENT)
        }
        Err(why) => failure(StatusCode::BAD_REQUEST, why),
    }
}

/// What the provider refuses.
fn check_network(body: &Value) -> Result<(), String> {
    let list = |name: &str| -> Vec<String> {
        let entries = body.get(name).and_then(Value::as_array);
        let entries = entries.map(|entries| entries.iter().filter_map(Value::as_str).map(str::to_owned).collect());
        entries.unwrap_or_default()
    };
    let net = |entry: &str| -> Option<IpNet> {
        entry
            .parse::<IpNet>()
            .ok()
            .or_else(|| entry.parse::<std::net::IpAddr>().ok().map(IpNet::from))
    };
    let (allow, deny) = (list("allowOut"), list("denyOut"));
    for entry in &deny {
        match net(entry) {
            None => return Err(format!("denyOut takes IP addresses and CIDRs only, not {entry:?}")),
            Some(net) if net.addr().is_unspecified() && entry != "0.0.0.0/0" => {
                return Err(format!("unspecified address {entry:?}"));
            }
            Some(_) => {}
        }
    }
    let floor = deny.iter().any(|entry| entry == "0.0.0.0/0");
    for entry in &allow {
        match net(entry) {
            Some(net) if net.addr().is_unspecified() && entry != "0.0.0.0/0" => {
                return Err(format!("unspecified address {entry:?}"));
            }
            None if !floor => return Err("allowOut with domains needs denyOut with 0.0.0.0/0".to_owned()),
            _ => {}
        }
    }
    Ok(())
}

/// The answer of the edge for a box that is gone or asleep.
pub(super) fn gone(id: &str) -> Answer {
    let body = json!({ "sandboxId": id, "message": "The sandbox was not found", "code": 502 });
    answer(StatusCode::BAD_GATEWAY, &body)
}
