//! What the admin port answers: one table of paths, who may ask, and the errors.
//!
//! Bodies of requests are never read; nothing here takes one. Errors are JSON:
//! `{"error":{"code":..,"message":..}}`, with `problems` when a configuration was refused.
//!
//! A page of somebody else's, open in the operator's browser, must not be able to change anything here: a POST that a
//! browser marks as coming from another origin is refused (`cross_origin`), whether or not there is a token.
//! Tokens are compared in constant time, by their digests, so that not even their length shows.

use std::sync::Arc;

use http::header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, ORIGIN};
use http::header::{HeaderName, HeaderValue, REFERRER_POLICY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use serde_json::json;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::ask::{self, decode};
use super::{BackendRestartError, Control, ReloadError};
use crate::fleet::{ChangeStarted, RestartError};

/// The live page; whole, without any external resource.
const PAGE: &str = include_str!("ui/index.html");
/// What the page may do: run what stands in it and ask this very server, nothing else.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                           img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Prometheus' text format.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The admin API of one gateway.
#[derive(Clone)]
pub struct Admin {
    control: Arc<dyn Control>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").finish_non_exhaustive()
    }
}

/// Answers are small texts.
pub type Answer = Response<String>;

/// What a path means.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Route {
    Page,
    Metrics,
    Health,
    Status,
    Reload,
    SetDraining { pool: String, backend: String, draining: bool },
    Restart { pool: String, backend: String },
}

impl Route {
    fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/" => Self::Page,
            "/metrics" => Self::Metrics,
            "/health" => Self::Health,
            "/admin/status" => Self::Status,
            "/admin/reload" => Self::Reload,
            _ => {
                // Names may contain a slash, which then comes encoded.
                let mut parts = path.strip_prefix("/admin/backends/")?.split('/');
                let (pool, backend, action) = (decode(parts.next()?)?, decode(parts.next()?)?, parts.next()?);
                if parts.next().is_some() {
                    return None;
                }
                match action {
                    "drain" => Self::SetDraining { pool, backend, draining: true },
                    "enable" => Self::SetDraining { pool, backend, draining: false },
                    "restart" => Self::Restart { pool, backend },
                    _ => return None,
                }
            }
        })
    }

    fn allows(&self, method: &Method) -> bool {
        match self {
            Self::Page | Self::Metrics | Self::Health | Self::Status => matches!(*method, Method::GET | Method::HEAD),
            Self::Reload | Self::SetDraining { .. } | Self::Restart { .. } => *method == Method::POST,
        }
    }

    fn allowed(&self) -> &'static str {
        if self.allows(&Method::GET) { "GET, HEAD" } else { "POST" }
    }

    fn needs_token(&self) -> bool {
        !matches!(self, Self::Page | Self::Metrics | Self::Health)
    }
}

impl Admin {
    /// An API that asks `control`.
    pub fn new(control: Arc<dyn Control>) -> Self {
        Self { control }
    }

    /// Answers one request.
    pub async fn answer<B>(&self, request: &Request<B>) -> Answer {
        let Some(route) = Route::of(request.uri().path()) else {
            let message =
                format!("there is no {} here; see /, /metrics, /health and /admin/status", request.uri().path());
            return error(StatusCode::NOT_FOUND, "not_found", &message);
        };
        if !route.allows(request.method()) {
            let message = format!("{} takes {}", request.uri().path(), route.allowed());
            let mut answer = error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", &message);
            answer.headers_mut().insert(ALLOW, HeaderValue::from_static(route.allowed()));
            return answer;
        }
        if request.method() == Method::POST && !same_origin(request.headers()) {
            let message = "a page of another origin may not change anything here; use the live page, curl or sluice";
            return error(StatusCode::FORBIDDEN, "cross_origin", message);
        }
        if route.needs_token() && !self.may(request.headers()) {
            let message = "send the admin token as Authorization: Bearer TOKEN (auth.admin_token in the configuration)";
            let mut answer = error(StatusCode::UNAUTHORIZED, "unauthorized", message);
            answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return answer;
        }
        // Reading files, and the locks that requests use, are not for the threads that serve connections.
        let (admin, query) = (self.clone(), request.uri().query().unwrap_or_default().to_owned());
        match tokio::task::spawn_blocking(move || admin.act(route, &query)).await {
            Ok(answer) => answer,
            Err(failed) => {
                tracing::error!(error = %failed, "an admin request failed");
                error(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "internal",
                    "this request failed inside the gateway; see its log",
                )
            }
        }
    }

    fn act(&self, route: Route, query: &str) -> Answer {
        match route {
            Route::Page => page(),
            Route::Metrics => text(StatusCode::OK, METRICS_TYPE, self.control.metrics()),
            Route::Health => json(StatusCode::OK, &json!({ "status": "ok" })),
            Route::Status => json(StatusCode::OK, &self.control.status()),
            Route::Reload => self.reload(),
            Route::SetDraining { pool, backend, draining } => self.set_draining(&pool, &backend, draining),
            Route::Restart { pool, backend } => self.restart(&pool, &backend, query),
        }
    }

    fn reload(&self) -> Answer {
        let problem = match self.control.reload() {
            Ok(changes) => return json(StatusCode::OK, &json!({ "changes": changes })),
            Err(problem) => problem,
        };
        let said = problem.to_string();
        match problem {
            ReloadError::Problems(problems) => {
                let body = json!({ "error": { "code": "invalid_config", "message": said, "problems": problems } });
                json(StatusCode::UNPROCESSABLE_ENTITY, &body)
            }
            ReloadError::Busy => error(StatusCode::CONFLICT, "reload_busy", &said),
            ReloadError::NoFile => error(StatusCode::CONFLICT, "no_config_file", &said),
        }
    }

    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> Answer {
        match self.control.set_draining(pool, backend, draining) {
            Ok(()) => {
                tracing::info!(pool, backend, draining, "rotation changed through the admin api");
                json(StatusCode::OK, &json!({ "pool": pool, "backend": backend, "draining": draining }))
            }
            Err(unknown) => error(StatusCode::NOT_FOUND, "no_such_backend", &unknown.to_string()),
        }
    }

    fn restart(&self, pool: &str, backend: &str, query: &str) -> Answer {
        let ask = match ask::read(query) {
            Ok(ask) => ask,
            Err(wrong) => return error(StatusCode::BAD_REQUEST, "bad_request", &wrong.to_string()),
        };
        tracing::info!(pool, backend, query, "restart asked for through the admin api");
        let refused = match self.control.restart(pool, backend, ask) {
            Ok(ChangeStarted { change, notices }) => {
                let begun = json!({ "pool": pool, "backend": backend, "change": change, "notices": notices });
                return json(StatusCode::ACCEPTED, &begun);
            }
            Err(refused) => refused,
        };
        let (status, code) = match &refused {
            BackendRestartError::Unknown(_) => (StatusCode::NOT_FOUND, "no_such_backend"),
            BackendRestartError::Cannot(RestartError::NotManaged(_)) => (StatusCode::CONFLICT, "not_managed"),
            BackendRestartError::Cannot(
                RestartError::ChangeInProgress(_) | RestartError::Refused(_) | RestartError::Outdated,
            ) => (StatusCode::CONFLICT, "busy"),
            BackendRestartError::Cannot(RestartError::Blocked(_)) => (StatusCode::CONFLICT, "no_replacement_capacity"),
            BackendRestartError::Cannot(RestartError::InvalidSettings(_)) => {
                (StatusCode::UNPROCESSABLE_ENTITY, "bad_settings")
            }
        };
        tracing::warn!(pool, backend, "restart refused: {refused}");
        error(status, code, &refused.to_string())
    }

    fn may(&self, headers: &HeaderMap) -> bool {
        let Some(wanted) = self.control.admin_token() else { return true };
        let given = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
        let bearer = given.len() > 7 && given[..7].eq_ignore_ascii_case(b"bearer ");
        bearer && bool::from(digest(&given[7..]).ct_eq(&digest(wanted.expose().as_bytes())))
    }
}

fn digest(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

/// Whether a browser does not say that the request comes from elsewhere. Other clients say nothing.
fn same_origin(headers: &HeaderMap) -> bool {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("null"));
    let site = text(HeaderName::from_static("sec-fetch-site")).unwrap_or("none");
    if !matches!(site, "none" | "same-origin") {
        return false;
    }
    match text(ORIGIN) {
        None => true,
        Some(origin) => origin.split_once("://").is_some_and(|(_, host)| Some(host) == text(HOST)),
    }
}

fn page() -> Answer {
    let mut answer = text(StatusCode::OK, "text/html; charset=utf-8", PAGE.to_owned());
    answer.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY));
    answer.headers_mut().insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    answer
}

fn error(status: StatusCode, code: &str, message: &str) -> Answer {
    json(status, &json!({ "error": { "code": code, "message": message } }))
}

fn json(status: StatusCode, body: &impl serde::Serialize) -> Answer {
    // Cannot fail: every shape has string keys and no number that JSON does not know turns up as a key.
    let body = serde_json::to_string(body).unwrap_or_default();
    text(status, "application/json", body + "\n")
}

fn text(status: StatusCode, kind: &'static str, body: String) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_path_may_be_encoded() {
        let found = Route::of("/admin/backends/a%2Fb/gpu%3a0/enable");
        let wanted = Route::SetDraining { pool: "a/b".into(), backend: "gpu:0".into(), draining: false };
        assert_eq!(found, Some(wanted));
        for path in
            ["/admin/backends/a/b/c/drain", "/admin/backends//b/drain", "/admin/backends/a/%2/drain", "/Metrics"]
        {
            assert_eq!(Route::of(path), None, "{path}");
        }
    }
}
