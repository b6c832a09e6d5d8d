//! Responses of the admin port: texts, JSON and errors.
//!
//! An error is JSON: `{"error":{"code":..,"message":..}}`, with `problems` if a configuration or an
//! experiment was refused. Caches may store no response.

use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS};
use http::{Response, StatusCode};
use serde_json::json;

use super::access::Denied;
use super::body::AdminBody;
use super::experiments::ExperimentError;
use super::ui;

pub(super) type AdminResponse = Response<AdminBody>;

pub(super) fn health() -> AdminResponse {
    json(StatusCode::OK, &json!({ "status": "ok" }))
}

pub(super) fn denied(reason: &Denied) -> AdminResponse {
    let (status, code) = reason.status();
    let mut response = error(status, code, &reason.to_string());
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

pub(super) fn file(&(_, kind, content): &ui::File) -> AdminResponse {
    let mut response = text(StatusCode::OK, kind, content);
    ui::restrict(response.headers_mut());
    response
}

pub(super) fn error(status: StatusCode, code: &str, message: &str) -> AdminResponse {
    json(status, &json!({ "error": { "code": code, "message": message } }))
}

pub(super) fn json(status: StatusCode, body: &impl serde::Serialize) -> AdminResponse {
    // This cannot fail, because all keys are strings.
    let body = serde_json::to_string(body).unwrap_or_default();
    text(status, "application/json", body + "\n")
}

pub(super) fn text(status: StatusCode, kind: &'static str, body: impl Into<AdminBody>) -> AdminResponse {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

pub(super) fn refusal(refused: &ExperimentError) -> AdminResponse {
    let ((status, code), message) = (refused.status(), refused.to_string());
    match refused.problems() {
        [] => error(status, code, &message),
        problems => json(status, &json!({ "error": { "code": code, "message": message, "problems": problems } })),
    }
}
