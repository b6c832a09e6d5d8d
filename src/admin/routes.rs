//! Serves one request of the admin port: finds the route, checks the request, runs the action.
//!
//! A body is read only if the route takes one: JSON, at most [`BODY_MAX`] bytes within
//! [`BODY_TIME`]. Bounds: [`HANDLERS_MAX`] handlers that read, and as many that change something.

use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, ALLOW, HeaderMap, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Bytes};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::access::Protection;
use super::actions::Actions;
use super::answer::{AdminResponse, denied, error};
use super::control::Control;
use super::events::Events;
use super::route::{Action, Ask, Route, TakesBody};

/// Largest body. An experiment with many keys has a few KiB.
const BODY_MAX: usize = 64 << 10;
const BODY_TIME: Duration = Duration::from_secs(10);
/// Most handlers of one kind at once. Further requests wait on their connections.
const HANDLERS_MAX: usize = 16;

/// The admin API of one gateway.
#[derive(Clone)]
pub struct Admin {
    actions: Arc<Actions>,
    /// Limits handlers that read. A handler counts until it ends, even if the client has left.
    reading: Arc<Semaphore>,
    /// Limits handlers that change something. The limit is separate, because a restart may take
    /// minutes.
    changing: Arc<Semaphore>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").finish_non_exhaustive()
    }
}

impl Admin {
    /// The API over `control`.
    pub fn new(control: Arc<dyn Control>) -> Self {
        let handlers = || Arc::new(Semaphore::new(HANDLERS_MAX));
        let events = Events::new(Arc::clone(&control));
        Self { actions: Arc::new(Actions { control, events }), reading: handlers(), changing: handlers() }
    }

    /// Handles one request.
    pub async fn respond<B>(&self, request: Request<B>) -> AdminResponse
    where
        B: Body<Data = Bytes>,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let path = request.uri().path();
        let Some(route) = Route::of(path, request.method()) else {
            let hint = match path == "/ready" || path.starts_with("/v1/") {
                true => "it is for the client port (server.listen)",
                false => "see /, /metrics, /health and /admin/status",
            };
            return error(StatusCode::NOT_FOUND, "not_found", &format!("there is no route {path}; {hint}"));
        };
        if !route.methods.contains(request.method()) {
            let allowed = route.methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
            let mut response =
                error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", &format!("{path} takes {allowed}"));
            if let Ok(allowed) = HeaderValue::try_from(allowed) {
                response.headers_mut().insert(ALLOW, allowed);
            }
            return response;
        }
        if let Err(reason) = self.actions.control.access().check(&request, route.protection) {
            return denied(&reason);
        }
        let action = match route.action {
            Action::AtOnce(action) => return action(&self.actions),
            Action::Blocking(action) => action,
        };
        let query = request.uri().query().unwrap_or_default().to_owned();
        let open_metrics = wants_open_metrics(request.headers());
        let body = match route.takes_body {
            TakesBody::No => Map::new(),
            takes => match read_object(request.into_body(), takes == TakesBody::IfSent).await {
                Ok(body) => body,
                Err(refused) => return refused.response(),
            },
        };
        let room = if route.protection == Protection::Change { &self.changing } else { &self.reading };
        let room = Arc::clone(room).acquire_owned().await;
        let actions = Arc::clone(&self.actions);
        let handler = move || {
            let _room = room;
            if route.is_for_the_leader
                && let Some(why) = actions.control.another_leads()
            {
                return error(StatusCode::CONFLICT, "not_leading", &why);
            }
            action(&actions, Ask { query, body, open_metrics })
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
}

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

/// Reads a JSON object. `if_sent`: no body counts as an empty object.
async fn read_object<B>(body: B, if_sent: bool) -> Result<Map<String, Value>, BodyError>
where
    B: Body<Data = Bytes>,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let read = timeout(BODY_TIME, Limited::new(body, BODY_MAX).collect()).await.map_err(|_| BodyError::TooSlow)?;
    let bytes = read.map_err(|failed| match failed.is::<LengthLimitError>() {
        true => BodyError::TooLarge,
        false => BodyError::Unreadable(failed),
    })?;
    let bytes = bytes.to_bytes();
    if if_sent && bytes.is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_slice(&bytes).map_err(BodyError::NotAnObject)
}

/// Whether the client accepts OpenMetrics and does not prefer plain text.
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
