//! The actions of the admin port: each calls [`Control`] and makes the response.
//!
//! [`route`](super::route) has the paths and requirements, so an action gets only requests that may
//! be served. Actions except [`Actions::listen`] run on threads that may block.

use std::sync::Arc;

use http::StatusCode;
use http::header::{HeaderValue, RETRY_AFTER};
use serde_json::{Map, Value, json};

use super::answer::{AdminResponse, denied, error, json, refusal, text};
use super::body::AdminBody;
use super::control::Control;
use super::engine_log::{self, LogQuery};
use super::error::{BackendRestartError, ReloadError};
use super::events::{Events, STREAMS_MAX};
use super::experiments::{ExperimentError, Order};
use super::restart::{RestartBegun, RestartOptions};
use super::tuner::TunerOrder;
use sluice_fleet::{ChangeStarted, RestartBlocked, RestartError};
use sluice_gateway::experiment::ExperimentReport;
use sluice_gateway::telemetry::{FINISHED_MAX, Resolution};

const TEXT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(super) struct Actions {
    pub(super) control: Arc<dyn Control>,
    pub(super) events: Arc<Events>,
}

impl Actions {
    pub(super) fn metrics(&self, open_metrics: bool) -> AdminResponse {
        let telemetry = self.control.telemetry();
        match open_metrics {
            true => text(StatusCode::OK, OPEN_METRICS_TYPE, telemetry.open_metrics()),
            false => text(StatusCode::OK, TEXT_TYPE, telemetry.page()),
        }
    }

    pub(super) fn history(&self) -> AdminResponse {
        let [recent, hour] = [Resolution::Fine, Resolution::Coarse].map(|each| self.control.telemetry().history(each));
        json(StatusCode::OK, &json!({ "recent": recent, "hour": hour }))
    }

    pub(super) fn listen(&self) -> AdminResponse {
        let Some(stream) = self.events.listen() else {
            let message = format!("{STREAMS_MAX} clients receive events, which is the limit; close a live page");
            let mut response = error(StatusCode::SERVICE_UNAVAILABLE, "too_many_streams", &message);
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("10"));
            return response;
        };
        text(StatusCode::OK, "text/event-stream", AdminBody::Events(stream))
    }

    pub(super) fn requests(&self, id: &str) -> AdminResponse {
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

    pub(super) fn reload(&self) -> AdminResponse {
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

    pub(super) fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> AdminResponse {
        match self.control.set_draining(pool, backend, draining) {
            Ok(()) => {
                tracing::info!(pool, backend, draining, "rotation changed through the admin api");
                json(StatusCode::OK, &json!({ "pool": pool, "backend": backend, "draining": draining }))
            }
            Err(unknown) => error(StatusCode::NOT_FOUND, "no_such_backend", &unknown.to_string()),
        }
    }

    pub(super) fn engine_log(&self, pool: &str, backend: &str, query: &str) -> AdminResponse {
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

    pub(super) fn order_tuner(&self, order: TunerOrder) -> AdminResponse {
        tracing::info!(?order, "order for the tuner through the admin api");
        match self.control.order_tuner(order) {
            Ok(report) => json(StatusCode::OK, &report),
            Err(refused) => {
                let (status, code) = refused.status();
                error(status, code, &refused.to_string())
            }
        }
    }

    pub(super) fn experiment(&self, name: &str) -> AdminResponse {
        reported(self.control.experiment(name))
    }

    pub(super) fn put_experiment(&self, name: &str, keys: Map<String, Value>) -> AdminResponse {
        tracing::info!(name, "experiment created or replaced through the admin api");
        reported(self.control.put_experiment(name, keys))
    }

    pub(super) fn remove_experiment(&self, name: &str) -> AdminResponse {
        match self.control.remove_experiment(name) {
            Ok(()) => {
                tracing::info!(name, "experiment removed through the admin api");
                json(StatusCode::OK, &json!({ "removed": name }))
            }
            Err(refused) => refusal(&refused),
        }
    }

    pub(super) fn order(&self, name: &str, order: Order) -> AdminResponse {
        tracing::info!(name, ?order, "order for an experiment through the admin api");
        reported(self.control.order(name, order))
    }

    pub(super) fn feedback(&self, request_id: &str, body: &Map<String, Value>) -> AdminResponse {
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

    pub(super) fn restart(&self, pool: &str, backend: &str, body: Map<String, Value>, query: &str) -> AdminResponse {
        let request = match RestartOptions::read(body, query) {
            Ok(request) => request,
            Err(wrong) => return error(StatusCode::BAD_REQUEST, "bad_request", &wrong.to_string()),
        };
        let (access, engine) = (self.control.access(), self.control.engine_kind(pool, backend));
        if let Some(reason) = request.set.keys().find_map(|flag| access.check_flag(engine, flag).err()) {
            tracing::warn!(pool, backend, "restart refused: {reason}");
            return denied(&reason);
        }
        // Only the names of the flags are logged, because values may be secrets.
        let flags = request.set.keys().map(String::as_str).collect::<Vec<_>>().join(" ");
        tracing::info!(pool, backend, flags, "restart requested through the admin api");
        match self.control.restart(pool, backend, request) {
            Ok(ChangeStarted { change, notices }) => {
                let (pool, backend) = (pool.to_owned(), backend.to_owned());
                json(StatusCode::ACCEPTED, &RestartBegun { backend, change, notices, pool })
            }
            Err(refused) => {
                tracing::warn!(pool, backend, "restart refused: {refused}");
                let (status, code) = restart_refusal(&refused);
                error(status, code, &refused.to_string())
            }
        }
    }
}

fn reported(result: Result<ExperimentReport, ExperimentError>) -> AdminResponse {
    match result {
        Ok(report) => json(StatusCode::OK, &report),
        Err(refused) => refusal(&refused),
    }
}

fn restart_refusal(refused: &BackendRestartError) -> (StatusCode, &'static str) {
    match refused {
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
    }
}
