//! Routes that generate text: OpenAI's three, Anthropic's, and SageMaker's `/invocations`.
//!
//! All requests become a [`GenerateRequest`]. The routes differ only in the format of the response.
//! A body is read completely before it is validated. The server limits the size.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Request, Response, StatusCode};
use serde_json::{Value, json};

use crate::http::error_body::ErrorBody;
use crate::http::generate::{ResolvedModel, fresh_id, resolve_model, start};
use crate::http::reply::{Reply, body, read, require_json};
use crate::http::response_body::broken_body;
use crate::http::response_writer::ResponseWriter;
use crate::http::wire::{ChunkWriter, UsageOptions};
use crate::http::{anthropic, responses};
use crate::real_time::state::ServerState;
use crate::unix_time::unix_time;
use crate::validate::pydantic::ValidationErrors;
use crate::validate::{GenerateRequest, RequestBody, RequestKind, ServerLimits, json as body_json};

pub(super) async fn handle(
    shared: &Arc<ServerState>,
    template: &str,
    request: Request<Incoming>,
) -> Result<Reply, ErrorBody> {
    require_json(&request)?;
    let (parts, sent) = request.into_parts();
    let sent = read(Request::from_parts(parts.clone(), sent)).await?;
    let headers = &parts.headers;
    match template {
        "/v1/chat/completions" => openai(shared, RequestKind::Chat, headers, &sent).await,
        "/v1/completions" => openai(shared, RequestKind::Completion, headers, &sent).await,
        "/invocations" => {
            let chat = serde_json::from_slice::<Value>(&sent).is_ok_and(|value| value.get("messages").is_some());
            openai(shared, if chat { RequestKind::Chat } else { RequestKind::Completion }, headers, &sent).await
        }
        "/v1/responses" => openai_responses(shared, headers, &sent).await,
        "/v1/messages" => {
            let body = anthropic::read(&sent, false)?;
            anthropic_messages(shared, headers, &body).await.or_else(anthropic_error)
        }
        _ => {
            let body = anthropic::read(&sent, true)?;
            count_tokens(shared, &body).or_else(anthropic_error)
        }
    }
}

fn anthropic_error(error: ErrorBody) -> Result<Reply, ErrorBody> {
    if error.is_client_gone() {
        return Err(error);
    }
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Ok(body(status, "application/json", anthropic::error_body(&error)))
}

fn prepare(
    shared: &ServerState,
    kind: RequestKind,
    body: &RequestBody,
    headers: &HeaderMap,
) -> Result<(ResolvedModel, GenerateRequest), ErrorBody> {
    let model = resolve_model(shared, body.model())?;
    if shared.dead.is_cancelled() {
        return Err(ErrorBody::dead());
    }
    let config = &shared.config;
    let limits = ServerLimits {
        max_model_len: config.max_model_len,
        max_logprobs: config.max_logprobs,
        auto_tools: config.auto_tools,
        name: config.names.first().map_or("", String::as_str),
    };
    let mut request = GenerateRequest::new(kind, body, &config.texts, limits)?;
    let number = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()?.trim().parse::<i64>().ok());
    request.rank = number("x-data-parallel-rank");
    request.session = headers.get("x-session-id").and_then(|value| value.to_str().ok()).map(Into::into);
    if let Some(rank) = request.rank.filter(|rank| !(0..i64::from(config.data_parallel)).contains(rank)) {
        let message = format!("data_parallel_rank {rank} is out of range [0, {}).", config.data_parallel);
        return Err(ErrorBody::bad_request(None, message));
    }
    if let Some(priority) = number("x-vllm-priority") {
        request.priority = priority;
    }
    if config.force_usage && request.stream {
        (request.include_usage, request.continuous_usage) = (true, true);
    }
    Ok((model, request))
}

fn request_id(shared: &ServerState, headers: &HeaderMap, body_id: Option<&String>) -> String {
    let header = headers.get("x-request-id").and_then(|value| value.to_str().ok()).map(str::to_owned);
    header.or_else(|| body_id.cloned()).unwrap_or_else(|| fresh_id(shared))
}

async fn openai(
    shared: &Arc<ServerState>,
    kind: RequestKind,
    headers: &HeaderMap,
    sent: &[u8],
) -> Result<Reply, ErrorBody> {
    let body = RequestBody::read(kind, sent)?;
    let (model, request) = prepare(shared, kind, &body, headers)?;
    let id = request_id(shared, headers, request.request_id.as_ref());
    let prefix = if kind == RequestKind::Chat { "chatcmpl" } else { "cmpl" };
    let usage = UsageOptions { at_end: request.include_usage, continuous: request.continuous_usage };
    let writer = ChunkWriter::new(kind, format!("{prefix}-{id}"), unix_time(), &model.name, &shared.fingerprint, usage);
    let writer = match &request.role {
        Some(role) => writer.with_role(role),
        None => writer,
    };
    let mut reply = send(shared, &request, &model, ResponseWriter::Chunks(writer)).await?;
    if !request.stream {
        report_load(shared, headers, &mut reply);
    }
    Ok(reply)
}

/// Adds the load of this engine as a header (ORCA), if the client requests it.
fn report_load(shared: &ServerState, headers: &HeaderMap, reply: &mut Reply) {
    let Some(wanted) = headers.get("endpoint-load-metrics-format").and_then(|value| value.to_str().ok()) else {
        return;
    };
    let gauges = shared.ranks.iter().map(|rank| rank.stats.lock().gauges);
    let (waiting, usage) = gauges.fold((0.0, 0.0_f64), |(waiting, usage), gauges| {
        (waiting + (gauges.waiting + gauges.deferred) as f64, usage.max(gauges.kv_usage))
    });
    let text = match wanted.to_lowercase().as_str() {
        "json" => format!(
            "JSON {{\"named_metrics\": {{\"num_requests_waiting\": {waiting:?}, \"kv_cache_usage_perc\": {usage:?}}}}}"
        ),
        "text" => {
            format!("TEXT named_metrics.num_requests_waiting={waiting:?}, named_metrics.kv_cache_usage_perc={usage:?}")
        }
        _ => return,
    };
    if let Ok(value) = HeaderValue::from_str(&text) {
        reply.headers_mut().insert("endpoint-load-metrics", value);
    }
}

async fn openai_responses(shared: &Arc<ServerState>, headers: &HeaderMap, sent: &[u8]) -> Result<Reply, ErrorBody> {
    let (body, echo) = responses::read(sent)?;
    let (model, request) = prepare(shared, RequestKind::Chat, &body, headers)?;
    let id = request_id(shared, headers, None);
    let limit = request.limits.first().copied().unwrap_or(0);
    let writer = responses::ResponsesWriter::new(&id, unix_time(), &model.name, limit, echo);
    send(shared, &request, &model, ResponseWriter::Responses(Box::new(writer))).await
}

async fn anthropic_messages(
    shared: &Arc<ServerState>,
    headers: &HeaderMap,
    body: &RequestBody,
) -> Result<Reply, ErrorBody> {
    let (model, request) = prepare(shared, RequestKind::Chat, body, headers)?;
    let id = format!("chatcmpl-{}", request_id(shared, headers, None));
    let writer = anthropic::MessagesWriter::new(id, &model.name);
    send(shared, &request, &model, ResponseWriter::Messages(writer)).await
}

fn count_tokens(shared: &ServerState, body: &RequestBody) -> Result<Reply, ErrorBody> {
    let model = resolve_model(shared, body.model())?;
    let tokens = shared.config.texts.of_chat(body.fields(), &model.name, u32::MAX)?.tokens();
    let text = format!("{{\"input_tokens\":{tokens},\"context_management\":{{\"original_input_tokens\":{tokens}}}}}");
    Ok(crate::http::reply::body(StatusCode::OK, "application/json", text))
}

async fn send(
    shared: &Arc<ServerState>,
    request: &GenerateRequest,
    model: &ResolvedModel,
    format: ResponseWriter,
) -> Result<Reply, ErrorBody> {
    let response = start(shared, request, model, format)?;
    if request.stream {
        let mut reply = Response::new(response.boxed_unsync());
        let sse = HeaderValue::from_static("text/event-stream; charset=utf-8");
        reply.headers_mut().insert(CONTENT_TYPE, sse);
        return Ok(reply);
    }
    let text = response.complete().await.map_err(|broken| broken_body(&broken))?;
    if shared.garbage.load(Ordering::Relaxed) {
        return Ok(body(StatusCode::OK, "application/json", "<html>\u{0}not what you asked for".into()));
    }
    Ok(body(StatusCode::OK, "application/json", text))
}

/// Handles routes that are not simulated: validates the required fields, then replies 501.
///
/// # Errors
/// Always.
pub(super) async fn unsupported(template: &str, request: Request<Incoming>) -> Result<Reply, ErrorBody> {
    require_json(&request)?;
    let fields = body_json::object(&read(request).await?)?;
    let needed: &[&str] = match template {
        "/v1/systemone" => &["state", "questions"],
        "/generative_scoring" => &["query", "items", "label_token_ids"],
        _ => &["new_data_parallel_size"],
    };
    let mut problems = ValidationErrors::default();
    for name in needed.iter().filter(|name| !fields.contains_key(**name)) {
        problems.missing(&format!("body.{name}"), fields.len());
    }
    if !problems.is_empty() {
        return Err(problems.refusal());
    }
    let message = format!("{} is not simulated", json!(template));
    Err(ErrorBody { status: 501, kind: "NotImplementedError", param: None, message })
}
