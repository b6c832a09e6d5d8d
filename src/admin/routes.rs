//! The actions of the admin port's routes, and errors. [`route`](super::route) has the paths and
//! methods.
//!
//! A body is read only if the route needs one: JSON, at most [`BODY_MAX`] bytes within
//! [`BODY_TIME`]. Errors are JSON: `{"error":{"code":..,"message":..}}`, with `problems` if a
//! configuration or an experiment was refused. Every request but `/health` passes
//! [`access`](super::access) first.

use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use http::header::{WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Bytes};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::access::Denied;
use super::body::AdminBody;
use super::control::Control;
use super::engine_log::{self, LogQuery};
use super::error::{BackendRestartError, ReloadError};
use super::events::{Events, STREAMS_MAX};
use super::experiments::{ExperimentError, ExperimentRoute};
use super::restart_query;
use super::route::Route;
use super::snapshot::RequestLists;
use super::tuner::TunerRoute;
use super::ui;
use crate::fleet::{ChangeStarted, RestartBlocked, RestartError};
use crate::telemetry::{FINISHED_MAX, Resolution};

/// Prometheus' text format.
const TEXT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// OpenMetrics.
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Largest request body in bytes: an experiment with many keys has a few KiB.
const BODY_MAX: usize = 64 << 10;
/// Time limit for sending the body.
const BODY_TIME: Duration = Duration::from_secs(10);
/// Most handlers of one kind at once; further requests wait on their connections.
const HANDLERS_MAX: usize = 16;

/// The admin API of one gateway.
#[derive(Clone)]
pub struct Admin {
    control: Arc<dyn Control>,
    events: Arc<Events>,
    /// Limits handlers that read. Handlers whose clients have left count until they end.
    reading: Arc<Semaphore>,
    /// Limits handlers that change something. A restart may take minutes.
    changing: Arc<Semaphore>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").finish_non_exhaustive()
    }
}

/// The response to an admin request.
pub type AdminResponse = Response<AdminBody>;

impl Admin {
    /// The API over `control`.
    pub fn new(control: Arc<dyn Control>) -> Self {
        let handlers = || Arc::new(Semaphore::new(HANDLERS_MAX));
        let events = Events::new(Arc::clone(&control));
        Self { control, events, reading: handlers(), changing: handlers() }
    }

    /// Handles one request.
    pub async fn respond<B>(&self, request: Request<B>) -> AdminResponse
    where
        B: Body<Data = Bytes>,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let Some(route) = Route::of(request.uri().path(), request.method()) else {
            let path = request.uri().path();
            let hint = match path == "/ready" || path.starts_with("/v1/") {
                true => "it is for the client port (server.listen)",
                false => "see /, /metrics, /health and /admin/status",
            };
            return error(StatusCode::NOT_FOUND, "not_found", &format!("there is no route {path}; {hint}"));
        };
        if !route.methods().contains(request.method()) {
            let allowed = route.methods().iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
            let message = format!("{} takes {allowed}", request.uri().path());
            let mut response = error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", &message);
            if let Ok(allowed) = HeaderValue::try_from(allowed) {
                response.headers_mut().insert(ALLOW, allowed);
            }
            return response;
        }
        if let Err(reason) = self.control.access().check(&request, route.protection()) {
            return denied(&reason);
        }
        // On the connection's thread, so that probes are answered while many handlers run.
        match route {
            Route::Health => return health(),
            Route::Events => return self.listen(),
            _ => {}
        }
        // Other handlers block: reloads read files, and the status takes locks that requests use.
        let (admin, query) = (self.clone(), request.uri().query().unwrap_or_default().to_owned());
        let open_metrics = wants_open_metrics(request.headers());
        let body = match route.takes_body() {
            true => match read_object(request.into_body()).await {
                Ok(body) => body,
                Err(refused) => return refused.response(),
            },
            false => Map::new(),
        };
        let room = if route.is_change() { &self.changing } else { &self.reading };
        let room = Arc::clone(room).acquire_owned().await;
        let handler = move || {
            let _room = room;
            admin.act(route, &query, body, open_metrics)
        };
        match tokio::task::spawn_blocking(handler).await {
            Ok(response) => response,
            Err(failed) => {
                tracing::error!(error = %failed, "a handler of the admin api panicked");
                error(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "internal",
                    "the gateway failed to handle this request; see its log",
                )
            }
        }
    }

    fn act(&self, route: Route, query: &str, body: Map<String, Value>, open_metrics: bool) -> AdminResponse {
        if route.is_for_the_leader()
            && let Some(why) = self.control.another_leads()
        {
            return error(StatusCode::CONFLICT, "not_leading", &why);
        }
        match route {
            Route::Page => file(&ui::PAGE),
            Route::File(of_page) => file(of_page),
            Route::Events => self.listen(),
            Route::History => {
                let [recent, hour] =
                    [Resolution::Fine, Resolution::Coarse].map(|each| self.control.telemetry().history(each));
                json(StatusCode::OK, &json!({ "recent": recent, "hour": hour }))
            }
            Route::Findings => json(StatusCode::OK, &self.control.diagnosis()),
            Route::Requests(None) => json(StatusCode::OK, &RequestLists::of(&*self.control)),
            Route::Requests(Some(id)) => self.requests(&id),
            Route::Metrics if open_metrics => {
                text(StatusCode::OK, OPEN_METRICS_TYPE, self.control.telemetry().open_metrics())
            }
            Route::Metrics => text(StatusCode::OK, TEXT_TYPE, self.control.telemetry().page()),
            Route::Health => health(),
            Route::Status => json(StatusCode::OK, &self.control.status()),
            Route::Reload => self.reload(),
            Route::SetDraining { pool, backend, draining } => self.set_draining(&pool, &backend, draining),
            Route::Restart { pool, backend } => self.restart(&pool, &backend, query),
            Route::EngineLog { pool, backend } => self.engine_log(&pool, &backend, query),
            Route::Experiments(route) => self.experiments(route, body),
            Route::Tuner(route) => self.tuner(route),
            Route::Feedback(id) => self.feedback(&id, &body),
        }
    }

    fn listen(&self) -> AdminResponse {
        let Some(stream) = self.events.listen() else {
            let message = format!("{STREAMS_MAX} clients receive events, which is the limit; close a live page");
            let mut response = error(StatusCode::SERVICE_UNAVAILABLE, "too_many_streams", &message);
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("10"));
            return response;
        };
        text(StatusCode::OK, "text/event-stream", AdminBody::Events(stream))
    }

    fn requests(&self, id: &str) -> AdminResponse {
        match self.control.telemetry().requests(id) {
            found if found.is_empty() => {
                let message = format!(
                    "no request with this id is among the last {FINISHED_MAX} that are over; the id is in the response header \
                     x-request-id, and a request can be found as soon as it is over"
                );
                error(StatusCode::NOT_FOUND, "no_such_request", &message)
            }
            found => json(StatusCode::OK, &json!({ "requests": found })),
        }
    }

    fn reload(&self) -> AdminResponse {
        let problem = match self.control.reload() {
            Ok(changes) => return json(StatusCode::OK, &json!({ "changes": changes })),
            Err(problem) => problem,
        };
        let message = problem.to_string();
        match problem {
            ReloadError::Problems(problems) => {
                let body = json!({ "error": { "code": "invalid_config", "message": message, "problems": problems } });
                json(StatusCode::UNPROCESSABLE_ENTITY, &body)
            }
            ReloadError::NoFile => error(StatusCode::CONFLICT, "no_config_file", &message),
        }
    }

    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> AdminResponse {
        match self.control.set_draining(pool, backend, draining) {
            Ok(()) => {
                tracing::info!(pool, backend, draining, "rotation changed through the admin api");
                json(StatusCode::OK, &json!({ "pool": pool, "backend": backend, "draining": draining }))
            }
            Err(unknown) => error(StatusCode::NOT_FOUND, "no_such_backend", &unknown.to_string()),
        }
    }

    fn engine_log(&self, pool: &str, backend: &str, query: &str) -> AdminResponse {
        let LogQuery { after, most } = match LogQuery::parse(query) {
            Ok(parsed) => parsed,
            Err(wrong) => return error(StatusCode::BAD_REQUEST, "bad_request", &wrong.to_string()),
        };
        match self.control.engine_log(pool, backend, after, most) {
            Ok(lines) => json(StatusCode::OK, &lines),
            Err(refused) => {
                let (status, code) = engine_log::refusal(&refused);
                error(status, code, &refused.to_string())
            }
        }
    }

    fn tuner(&self, route: TunerRoute) -> AdminResponse {
        let TunerRoute::Order(order) = route else { return json(StatusCode::OK, &self.control.tuner()) };
        tracing::info!(?order, "order for the tuner through the admin api");
        match self.control.order_tuner(order) {
            Ok(report) => json(StatusCode::OK, &report),
            Err(refused) => {
                let (status, code) = refused.status();
                error(status, code, &refused.to_string())
            }
        }
    }

    fn experiments(&self, route: ExperimentRoute, body: Map<String, Value>) -> AdminResponse {
        let result = match route {
            ExperimentRoute::List => return json(StatusCode::OK, &self.control.experiments()),
            ExperimentRoute::Show(name) => self.control.experiment(&name),
            ExperimentRoute::Put(name) => {
                tracing::info!(name, "experiment created or replaced through the admin api");
                self.control.put_experiment(&name, body)
            }
            ExperimentRoute::Remove(name) => match self.control.remove_experiment(&name) {
                Ok(()) => {
                    tracing::info!(name, "experiment removed through the admin api");
                    return json(StatusCode::OK, &json!({ "removed": name }));
                }
                Err(refused) => Err(refused),
            },
            ExperimentRoute::Order(name, order) => {
                tracing::info!(name, ?order, "order for an experiment through the admin api");
                self.control.order(&name, order)
            }
        };
        match result {
            Ok(report) => json(StatusCode::OK, &report),
            Err(refused) => refusal(&refused),
        }
    }

    fn feedback(&self, request_id: &str, body: &Map<String, Value>) -> AdminResponse {
        let good = match body.get("good") {
            Some(Value::Bool(good)) if body.len() == 1 => *good,
            _ => {
                let message = "the body is not a rating; send {\"good\": true} or {\"good\": false}";
                return error(StatusCode::BAD_REQUEST, "bad_request", message);
            }
        };
        match self.control.rate(request_id, good) {
            Ok(arm) => json(StatusCode::OK, &json!({ "arm": arm, "good": good })),
            Err(refused) => refusal(&refused),
        }
    }

    fn restart(&self, pool: &str, backend: &str, query: &str) -> AdminResponse {
        let request = match restart_query::parse(query) {
            Ok(request) => request,
            Err(wrong) => return error(StatusCode::BAD_REQUEST, "bad_request", &wrong.to_string()),
        };
        let access = self.control.access();
        if let Some(reason) = request.set.keys().find_map(|flag| access.check_flag(flag).err()) {
            tracing::warn!(pool, backend, "restart refused: {reason}");
            return denied(&reason);
        }
        // Without the values, which may be secrets.
        let flags = request.set.keys().map(String::as_str).collect::<Vec<_>>().join(" ");
        tracing::info!(pool, backend, flags, "restart requested through the admin api");
        let refused = match self.control.restart(pool, backend, request) {
            Ok(ChangeStarted { change, notices }) => {
                let begun = json!({ "pool": pool, "backend": backend, "change": change, "notices": notices });
                return json(StatusCode::ACCEPTED, &begun);
            }
            Err(refused) => refused,
        };
        let (status, code) = match &refused {
            BackendRestartError::Unknown(_) => (StatusCode::NOT_FOUND, "no_such_backend"),
            BackendRestartError::Cannot(error) => match error {
                RestartError::NotManaged(_) => (StatusCode::CONFLICT, "not_managed"),
                RestartError::InvalidSettings(_) => (StatusCode::UNPROCESSABLE_ENTITY, "bad_settings"),
                RestartError::Secret(_) => (StatusCode::FORBIDDEN, "flag_not_allowed"),
                RestartError::Blocked(RestartBlocked::Irreplaceable(_)) => {
                    (StatusCode::CONFLICT, "no_replacement_capacity")
                }
                RestartError::NotSaved(_) => (StatusCode::INTERNAL_SERVER_ERROR, "not_saved"),
                RestartError::Blocked(_) | RestartError::ShuttingDown | RestartError::Outdated => {
                    (StatusCode::CONFLICT, "busy")
                }
            },
        };
        tracing::warn!(pool, backend, "restart refused: {refused}");
        error(status, code, &refused.to_string())
    }
}

fn refusal(refused: &ExperimentError) -> AdminResponse {
    let ((status, code), message) = (refused.status(), refused.to_string());
    match refused.problems() {
        [] => error(status, code, &message),
        problems => json(status, &json!({ "error": { "code": code, "message": message, "problems": problems } })),
    }
}

/// Why a body is refused.
#[derive(Debug, thiserror::Error)]
enum BodyError {
    #[error("the body is larger than {BODY_MAX} bytes")]
    TooLarge,
    #[error("the body did not arrive within {} s", BODY_TIME.as_secs())]
    TooSlow,
    #[error("the body could not be read: {0}")]
    Unreadable(Box<dyn std::error::Error + Send + Sync>),
    #[error("the body is not a JSON object: {0}")]
    NotAnObject(serde_json::Error),
}

impl BodyError {
    fn response(&self) -> AdminResponse {
        let (status, code) = match self {
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
            Self::TooSlow => (StatusCode::REQUEST_TIMEOUT, "body_timeout"),
            Self::Unreadable(_) | Self::NotAnObject(_) => (StatusCode::BAD_REQUEST, "bad_request"),
        };
        error(status, code, &self.to_string())
    }
}

/// Reads a body, which must be a JSON object.
async fn read_object<B>(body: B) -> Result<Map<String, Value>, BodyError>
where
    B: Body<Data = Bytes>,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let read = timeout(BODY_TIME, Limited::new(body, BODY_MAX).collect()).await.map_err(|_| BodyError::TooSlow)?;
    let bytes = read.map_err(|failed| match failed.is::<LengthLimitError>() {
        true => BodyError::TooLarge,
        false => BodyError::Unreadable(failed),
    })?;
    serde_json::from_slice(&bytes.to_bytes()).map_err(BodyError::NotAnObject)
}

fn health() -> AdminResponse {
    json(StatusCode::OK, &json!({ "status": "ok" }))
}

fn denied(reason: &Denied) -> AdminResponse {
    let (status, code) = reason.status();
    let mut response = error(status, code, &reason.to_string());
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

fn file(&(_, kind, content): &ui::File) -> AdminResponse {
    let mut response = text(StatusCode::OK, kind, content);
    ui::restrict(response.headers_mut());
    response
}

fn error(status: StatusCode, code: &str, message: &str) -> AdminResponse {
    json(status, &json!({ "error": { "code": code, "message": message } }))
}

fn json(status: StatusCode, body: &impl serde::Serialize) -> AdminResponse {
    // Cannot fail: all keys are strings.
    let body = serde_json::to_string(body).unwrap_or_default();
    text(status, "application/json", body + "\n")
}

/// Whether the client accepts OpenMetrics, as Prometheus does, and does not prefer plain text.
fn wants_open_metrics(headers: &HeaderMap) -> bool {
    let all = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let (mut open, mut plain) = (0.0_f32, 0.0_f32);
    for one in all {
        let mut parts = one.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default();
        let weight = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
        let weight = weight.map_or(1.0, |weight| weight.parse().unwrap_or(0.0));
        if kind.eq_ignore_ascii_case("application/openmetrics-text") {
            open = open.max(weight);
        } else if kind.eq_ignore_ascii_case("text/plain") {
            plain = plain.max(weight);
        }
    }
    open > 0.0 && open >= plain
}

fn text(status: StatusCode, kind: &'static str, body: impl Into<AdminBody>) -> AdminResponse {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_path_may_be_encoded() {
        let of = |path: &str| Route::of(path, &Method::POST);
        let found = of("/admin/backends/a%2Fb/gpu%3a0/enable");
        let wanted = Route::SetDraining { pool: "a/b".into(), backend: "gpu:0".into(), draining: false };
        assert_eq!(found, Some(wanted));
        for path in
            ["/admin/backends/a/b/c/drain", "/admin/backends//b/drain", "/admin/backends/a/%2/drain", "/Metrics"]
        {
            assert_eq!(of(path), None, "{path}");
        }
    }
}
