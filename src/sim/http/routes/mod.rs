//! The routes of `vllm serve`, and `/sim/fault`, which only the simulator has.
//!
//! | route | purpose |
//! |---|---|
//! | `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages` | generate |
//! | `/v1/models`, `/v1/load_lora_adapter`, `/v1/unload_lora_adapter`, `/adapters` | models |
//! | `/tokenize`, `/detokenize`, `/v1/messages/count_tokens` | tokens |
//! | `/v1/embeddings` | synthetic embeddings |
//! | `/health`, `/ping`, `/version`, `/load`, `/metrics` | state |
//! | `/sleep`, `/pause`, `/reset_prefix_cache` and so on | for operators, see `dev.rs` |
//! | `/health_generate`, `/v1/loads`, `/server_info`, `/model_info` | SGLang's, see `sglang.rs` |
//! | `POST /sim/fault` | body: a fault as `fault.rs` writes it, bare or as `{"fault": "..."}` |
//!
//! As in vLLM, `--api-key` guards only routes under `/v1`, `/v2`, `/inference` and `/cohere`.

mod dev;
mod generating;
mod table;
mod tokens;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use hyper::body::Incoming;
use hyper::header::{ALLOW, AUTHORIZATION, CONTENT_LENGTH, HeaderValue, LOCATION, ORIGIN, SERVER, VARY};
use hyper::{Method, Request, StatusCode};
use serde_json::{Value, json};

use crate::http::error_body::ErrorBody;
use crate::http::generate::fresh_id;
use crate::http::reply::{Reply, body, json_reply, read, require_json, text_reply};
use crate::http::response_body::Disconnect;
use crate::http::{models, responses, sglang};
use crate::observe::{http_metrics, metrics_page};
use crate::real_time::rank::Rank;
use crate::real_time::state::ServerState;

pub(crate) use table::listed;

use table::Target;

/// Prefixes that `--api-key` guards.
const GUARDED: [&str; 4] = ["/v1", "/v2", "/inference", "/cohere"];

/// Handles one request. A disconnect is an error of the service, so hyper closes without a
/// response.
pub(super) async fn handle(
    shared: Arc<ServerState>,
    peer: SocketAddr,
    request: Request<Incoming>,
) -> Result<Reply, Disconnect> {
    let began = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let size = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok()).unwrap_or(0);
    let client_id = request.headers().get("x-request-id").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let template = match table::find(&shared.config, &method, &path) {
        Target::Route(template, _) | Target::Redirect(template, _) => Some(template),
        _ => None,
    };
    let reply = route(&shared, request).await;
    if matches!(&reply, Err(error) if error.is_client_gone()) {
        return Err(Disconnect);
    }
    let mut reply = reply.unwrap_or_else(|error| match shared.config.sglang {
        Some(_) => body(status_of(&error), "application/json", sglang::error(&error)),
        None => error_reply(&error),
    });
    reply.headers_mut().insert(SERVER, HeaderValue::from_static("uvicorn"));
    if shared.config.request_id_headers {
        // Every response has an id: the client's id, or a new one.
        let id = client_id.unwrap_or_else(|| fresh_uuid(&shared));
        if let Ok(value) = HeaderValue::from_str(&id) {
            reply.headers_mut().insert("x-request-id", value);
        }
    }
    reply.headers_mut().entry(VARY).or_insert(HeaderValue::from_static("Origin"));
    shared.requests.lock().count(template, method.as_str(), reply.status().as_u16(), began.elapsed(), size);
    shared.config.log.access(peer, method.as_str(), &path, reply.status());
    Ok(reply)
}

fn fresh_uuid(shared: &ServerState) -> String {
    fresh_id(shared) + &fresh_id(shared)
}

fn status_of(error: &ErrorBody) -> StatusCode {
    StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

fn error_reply(error: &ErrorBody) -> Reply {
    body(status_of(error), "application/json", error.json())
}

async fn route(shared: &Arc<ServerState>, request: Request<Incoming>) -> Result<Reply, ErrorBody> {
    let path = request.uri().path().to_owned();
    let preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key("access-control-request-method");
    if preflight && request.headers().contains_key(ORIGIN) {
        return Ok(disallowed());
    }
    if GUARDED.iter().any(|prefix| path.starts_with(prefix)) && !authorized(shared, &request) {
        return Ok(body(StatusCode::UNAUTHORIZED, "application/json", r#"{"error":"Unauthorized"}"#.into()));
    }
    match table::find(&shared.config, request.method(), &path) {
        Target::Unknown => Err(ErrorBody::detail(404, "Not Found")),
        Target::NotAllowed(methods) => {
            let mut reply = error_reply(&ErrorBody::detail(405, "Method Not Allowed"));
            if let Ok(allow) = HeaderValue::from_str(&methods.join(", ")) {
                reply.headers_mut().insert(ALLOW, allow);
            }
            Ok(reply)
        }
        Target::Redirect(_, bare) => {
            let host = request.headers().get("host").and_then(|host| host.to_str().ok()).unwrap_or_default();
            let query = request.uri().query().map_or(String::new(), |query| format!("?{query}"));
            let mut reply = body(StatusCode::TEMPORARY_REDIRECT, "", String::new());
            if let Ok(location) = HeaderValue::from_str(&format!("http://{host}{bare}{query}")) {
                reply.headers_mut().insert(LOCATION, location);
            }
            Ok(reply)
        }
        Target::Route(template, parameter) => dispatch(shared, template, parameter, request).await,
    }
}

async fn dispatch(
    shared: &Arc<ServerState>,
    template: &'static str,
    parameter: &str,
    request: Request<Incoming>,
) -> Result<Reply, ErrorBody> {
    match template {
        "/health" | "/ping" => Ok(health(shared)),
        "/health_generate" => Ok(sglang::health(shared).await),
        "/ready" => Ok(health(shared)),
        "/v1/loads" => Ok(sglang::loads(shared)),
        "/server_info" | "/get_server_info" if shared.config.sglang.is_some() => Ok(sglang::server_info(shared)),
        "/model_info" | "/get_model_info" => Ok(sglang::model_info(shared)),
        "/version" => Ok(json_reply(&json!({"version": shared.config.version.to_string()}))),
        "/load" => {
            let load = if shared.config.track_load { shared.load.load(Ordering::Relaxed) } else { 0 };
            Ok(json_reply(&json!({"server_load": load})))
        }
        "/metrics" => Ok(metrics(shared)),
        "/kv_event_sources" => Ok(json_reply(&json!({}))),
        "/docs" | "/redoc" | "/docs/oauth2-redirect" => {
            let page =
                "<!DOCTYPE html>\n<html><head><title>FastAPI</title></head><body>a simulated server</body></html>\n";
            Ok(body(StatusCode::OK, "text/html; charset=utf-8", page.to_owned()))
        }
        "/openapi.json" => Ok(json_reply(&openapi(shared))),
        "/v1/models" => Ok(body(StatusCode::OK, "application/json", models::list(shared))),
        "/v1/responses/{response_id}" | "/v1/responses/{response_id}/cancel" => Err(responses::unknown(parameter)),
        "/v1/load_lora_adapter" => {
            require_json(&request)?;
            models::load(shared, &read(request).await?).await.map(text_reply)
        }
        "/v1/unload_lora_adapter" => {
            require_json(&request)?;
            models::unload(shared, &read(request).await?).map(text_reply)
        }
        "/adapters" => {
            let sent = read(request).await?;
            let value: Value = serde_json::from_slice(&sent).unwrap_or_default();
            let (name, source) = (&value["name"], &value["src"]);
            models::load(shared, json!({"lora_name": name, "lora_path": source}).to_string().as_bytes()).await?;
            Ok(text_reply(format!("Adapter {} registered", name.as_str().unwrap_or_default())))
        }
        "/adapters/{adapter_name}" => {
            let name = parameter;
            models::remove(shared, name)?;
            Ok(text_reply(format!("Adapter {name} unregistered")))
        }
        "/is_scaling_elastic_ep" => Ok(json_reply(&json!({"is_scaling_elastic_ep": false}))),
        "/sim/fault" => fault(shared, request).await,
        "/tokenize" | "/detokenize" | "/v1/embeddings" => tokens::handle(shared, template, request).await,
        _ if template.ends_with("render") || template.starts_with("/inference/") => Err(scale_out(shared)),
        "/v1/systemone" | "/generative_scoring" | "/scale_elastic_ep" => {
            generating::unsupported(template, request).await
        }
        _ if template.starts_with("/v1/") || template == "/invocations" => {
            generating::handle(shared, template, request).await
        }
        _ => {
            let query = request.uri().query().map(str::to_owned);
            let sent = read(request).await?;
            dev::handle(shared, template, query.as_deref(), &sent).await
        }
    }
}

fn disallowed() -> Reply {
    let mut reply = body(StatusCode::BAD_REQUEST, "text/plain; charset=utf-8", "Disallowed CORS origin".to_owned());
    let headers = reply.headers_mut();
    let vary =
        "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, Access-Control-Request-Private-Network";
    headers.insert(VARY, HeaderValue::from_static(vary));
    let methods = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY";
    headers.insert("access-control-allow-methods", HeaderValue::from_static(methods));
    headers.insert("access-control-max-age", HeaderValue::from_static("600"));
    reply
}

fn scale_out(shared: &ServerState) -> ErrorBody {
    if shared.config.scale_out {
        let message = "the simulator does not render or take tokens; leave --enable-scale-out away".to_owned();
        return ErrorBody { status: 501, kind: "NotImplementedError", param: None, message };
    }
    let message =
        "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.".to_owned();
    ErrorBody { status: 403, kind: "PermissionDeniedError", param: None, message }
}

fn openapi(shared: &ServerState) -> Value {
    let paths: serde_json::Map<String, Value> = listed(&shared.config)
        .map(|(path, methods)| {
            let methods = methods.iter().map(|method| (method.to_lowercase(), json!({"responses": {"200": {}}})));
            (path.to_owned(), Value::Object(methods.collect()))
        })
        .collect();
    json!({"openapi": "3.1.0", "info": {"title": "FastAPI", "version": "0.1.0"}, "paths": paths})
}

fn authorized(shared: &ServerState, request: &Request<Incoming>) -> bool {
    let keys = &shared.config.api_keys;
    let sent = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let sent = sent.and_then(|value| value.strip_prefix("Bearer "));
    keys.is_empty() || sent.is_some_and(|sent| keys.iter().any(|key| key == sent))
}

fn health(shared: &ServerState) -> Reply {
    let status = if shared.dead.is_cancelled() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    body(status, "", String::new())
}

fn metrics(shared: &ServerState) -> Reply {
    if shared.garbage.load(Ordering::Relaxed) {
        return body(StatusCode::OK, "text/plain", "vllm:num_requests_running{ NaN\n\u{0}<html>\n".into());
    }
    let config = &shared.config;
    let facts = metrics_page::Facts {
        version: config.version,
        model: config.names.first().map_or("", String::as_str),
        rank: 0,
        blocks: config.engine.num_blocks,
        max_loras: config.engine.max_loras,
        max_model_len: config.max_model_len,
        started: shared.started,
        prefix_caching: config.engine.prefix_caching,
        utilisation: config.utilisation,
        cache_dtype: if config.profile.layout.fp8_kv { "fp8" } else { "auto" },
        show_hidden: config.show_hidden,
    };
    let mut out = String::new();
    http_metrics::process(&mut out, shared.started);
    // The statistics are copied, because rendering takes longer than a step may wait for the lock.
    let stats = |rank: &Arc<Rank>| rank.stats.lock().clone();
    if config.sglang.is_some() {
        out.push_str(&sglang::metrics(shared, &stats(&shared.ranks[0])));
    } else if config.log_stats {
        let page = |(rank, own)| metrics_page::engine(&stats(own), metrics_page::Facts { rank, ..facts });
        let pages: Vec<String> = shared.ranks.iter().enumerate().map(page).collect();
        out.push_str(&metrics_page::merged(&pages));
    }
    shared.requests.lock().render(&mut out, shared.started);
    body(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", out)
}

async fn fault(shared: &ServerState, request: Request<Incoming>) -> Result<Reply, ErrorBody> {
    let bytes = read(request).await?;
    let text = match serde_json::from_slice::<Value>(&bytes) {
        Ok(value) => value["fault"].as_str().unwrap_or_default().to_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).trim().to_owned(),
    };
    let fault = text.parse().map_err(|error| ErrorBody::bad_request(Some("fault"), format!("{error}")))?;
    shared.fault(fault);
    Ok(json_reply(&json!({"fault": text})))
}
