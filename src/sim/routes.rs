//! Routes of `vllm serve`, one function each, and the two that only a simulator has.
//!
//! | route | what |
//! |---|---|
//! | `/v1/chat/completions`, `/v1/completions` | generate |
//! | `/v1/models`, `/v1/load_lora_adapter`, `/v1/unload_lora_adapter` | names |
//! | `/tokenize`, `/detokenize`, `/v1/embeddings` | text and made-up numbers |
//! | `/health`, `/ping`, `/version`, `/load`, `/metrics` | state |
//! | `POST /sim/fault` | body: a fault as `fault.rs` writes it, bare or as `{"fault": "..."}` |
//!
//! With `--api-key`, routes under `/v1` and `/v2` need it; the others are open, as in vLLM.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, SERVER};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};

use super::answer::{Cut, broken_body};
use super::driver::Shared;
use super::generate::{resolve_model, start, unix_time};
use super::models;
use super::protocol::{Generate, Kind};
use super::server::MAX_BODY;
use super::text;
use super::wire::ErrorBody;
use crate::base::Rng;

/// Dimensions of a made-up embedding.
const EMBEDDING: usize = 64;
/// The version that this simulator looks like.
const VERSION: &str = "0.33.0";

pub(super) type Reply = Response<UnsyncBoxBody<Bytes, Cut>>;

/// Answers one request. A cut connection is an error of the service: hyper then closes without an answer.
pub(super) async fn handle(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Reply, Cut> {
    let reply = route(&shared, request).await;
    if matches!(&reply, Err(error) if error.status == 0) {
        return Err(Cut);
    }
    let mut reply = reply.unwrap_or_else(|error| {
        let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        body(status, "application/json", error.json())
    });
    reply.headers_mut().insert(SERVER, HeaderValue::from_static("uvicorn"));
    Ok(reply)
}

async fn route(shared: &Arc<Shared>, request: Request<Incoming>) -> Result<Reply, ErrorBody> {
    let path = request.uri().path().trim_end_matches('/').to_owned();
    if (path.starts_with("/v1") || path.starts_with("/v2")) && !authorized(shared, &request) {
        return Ok(body(StatusCode::UNAUTHORIZED, "application/json", r#"{"error":"Unauthorized"}"#.into()));
    }
    let get = request.method() == Method::GET;
    let post = request.method() == Method::POST;
    match path.as_str() {
        "/health" if get => Ok(health(shared)),
        "/ping" if get || post => Ok(health(shared)),
        "/version" if get => Ok(json_reply(&json!({"version": VERSION}))),
        "/load" if get => {
            let load = if shared.config.track_load { shared.load.load(Ordering::Relaxed) } else { 0 };
            Ok(json_reply(&json!({"server_load": load})))
        }
        "/metrics" if get => Ok(metrics(shared)),
        "/v1/models" if get => Ok(body(StatusCode::OK, "application/json", models::list(shared))),
        "/v1/chat/completions" if post => generate(shared, Kind::Chat, request).await,
        "/v1/completions" if post => generate(shared, Kind::Completion, request).await,
        "/v1/embeddings" if post => embeddings(shared, &read_json(request).await?),
        "/tokenize" if post => tokenize(shared, request).await,
        "/detokenize" if post => detokenize(&read_json(request).await?),
        "/v1/load_lora_adapter" if post => models::load(shared, &read_json(request).await?).map(text_reply),
        "/v1/unload_lora_adapter" if post => models::unload(shared, &read_json(request).await?).map(text_reply),
        "/sim/fault" if post => fault(shared, request).await,
        known if KNOWN.contains(&known) => Err(ErrorBody {
            status: 405,
            kind: "Method Not Allowed",
            param: None,
            message: "Method Not Allowed".into(),
        }),
        _ => Err(ErrorBody { status: 404, kind: "Not Found", param: None, message: "Not Found".into() }),
    }
}

/// Routes that exist, for 405 instead of 404.
const KNOWN: &[&str] = &[
    "/health",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/sim/fault",
];

fn body(status: StatusCode, content_type: &'static str, text: String) -> Reply {
    let full = Full::new(Bytes::from(text)).map_err(|never: Infallible| match never {});
    let mut reply = Response::new(full.boxed_unsync());
    *reply.status_mut() = status;
    if !content_type.is_empty() {
        reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    reply
}

fn json_reply(value: &Value) -> Reply {
    body(StatusCode::OK, "application/json", value.to_string())
}

fn text_reply(text: String) -> Reply {
    body(StatusCode::OK, "text/plain; charset=utf-8", text)
}

fn authorized(shared: &Shared, request: &Request<Incoming>) -> bool {
    let keys = &shared.config.api_keys;
    let sent = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let sent = sent.and_then(|value| value.strip_prefix("Bearer "));
    keys.is_empty() || sent.is_some_and(|sent| keys.iter().any(|key| key == sent))
}

fn health(shared: &Shared) -> Reply {
    let status = if shared.dead.is_cancelled() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    body(status, "", String::new())
}

fn metrics(shared: &Shared) -> Reply {
    if shared.garbage.load(Ordering::Relaxed) {
        return body(StatusCode::OK, "text/plain", "vllm:num_requests_running{ NaN\n\u{0}<html>\n".into());
    }
    let config = &shared.config;
    let page = shared.stats.lock().render(
        config.names.first().map_or("", String::as_str),
        config.engine.num_blocks,
        config.engine.max_loras,
        config.max_model_len,
        unix_time(),
    );
    body(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", page)
}

async fn read(request: Request<Incoming>) -> Result<Bytes, ErrorBody> {
    match Limited::new(request.into_body(), MAX_BODY).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(ErrorBody {
            status: 413,
            kind: "Request Entity Too Large",
            param: None,
            message: format!("the body is larger than {MAX_BODY} bytes"),
        }),
        // The client left while it sent: nobody reads an answer.
        Err(_) => Err(cut()),
    }
}

/// Marks an answer that is never written.
fn cut() -> ErrorBody {
    ErrorBody { status: 0, kind: "", param: None, message: String::new() }
}

async fn read_json(request: Request<Incoming>) -> Result<Value, ErrorBody> {
    let bytes = read(request).await?;
    serde_json::from_slice(&bytes).map_err(|error| {
        let text = format!("{{'type': 'json_invalid', 'loc': 'body', 'msg': 'JSON decode error', 'input': '{error}'}}");
        ErrorBody::invalid(&[("body".into(), text)])
    })
}

fn missing(field: &str) -> ErrorBody {
    let at = format!("body.{field}");
    let text = format!("{{'type': 'missing', 'loc': '{at}', 'msg': 'Field required', 'input': '<dict>'}}");
    ErrorBody::invalid(&[(at, text)])
}

async fn generate(shared: &Arc<Shared>, kind: Kind, request: Request<Incoming>) -> Result<Reply, ErrorBody> {
    require_json(&request)?;
    let header = request.headers().get("x-request-id").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let bytes = read(request).await?;
    let parsed = Generate::parse(kind, &bytes, shared.config.max_model_len)?;
    let id = header.or_else(|| parsed.request_id.clone()).unwrap_or_else(|| fresh_id(shared));
    let answer = start(shared, &parsed, &id)?;
    let mut reply = if parsed.stream {
        let mut reply = Response::new(answer.boxed_unsync());
        let sse = HeaderValue::from_static("text/event-stream; charset=utf-8");
        reply.headers_mut().insert(CONTENT_TYPE, sse);
        reply
    } else {
        let text = answer.complete().await.map_err(|broken| broken_body(&broken))?;
        if shared.garbage.load(Ordering::Relaxed) {
            return Ok(body(StatusCode::OK, "application/json", "<html>\u{0}not what you asked for".into()));
        }
        body(StatusCode::OK, "application/json", text)
    };
    if shared.config.request_id_headers
        && let Ok(value) = HeaderValue::from_str(&id)
    {
        reply.headers_mut().insert("x-request-id", value);
    }
    Ok(reply)
}

/// 16 hex digits, different for each request of a process.
fn fresh_id(shared: &Shared) -> String {
    let count = shared.next_id.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}", Rng::new(count ^ unix_time().rotate_left(32) ^ shared.config.seed).next_u64())
}

fn require_json(request: &Request<Incoming>) -> Result<(), ErrorBody> {
    let sent = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if sent.is_some_and(|sent| sent.to_ascii_lowercase().starts_with("application/json")) {
        return Ok(());
    }
    let message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed".to_owned();
    Err(ErrorBody { status: 400, kind: "Bad Request", param: None, message })
}

async fn tokenize(shared: &Shared, request: Request<Incoming>) -> Result<Reply, ErrorBody> {
    let value = read_json(request).await?;
    resolve_model(shared, value["model"].as_str())?;
    let ids = if let Some(prompt) = value["prompt"].as_str() {
        let mut ids = text::ids(prompt);
        if value["add_special_tokens"].as_bool().unwrap_or(true) {
            ids.insert(0, 0);
        }
        ids
    } else if value["messages"].is_array() {
        let bytes = json!({"messages": value["messages"]}).to_string();
        let parsed = Generate::parse(Kind::Chat, bytes.as_bytes(), u32::MAX)?;
        let prompt = parsed.prompts.first().ok_or_else(|| missing("messages"))?;
        (0..prompt.tokens).map(|position| text::token(prompt.seed, position)).collect()
    } else {
        return Err(missing("prompt"));
    };
    let max_model_len = shared.config.max_model_len;
    let count = ids.len();
    let tokens = json!(ids);
    let text =
        format!("{{\"count\":{count},\"max_model_len\":{max_model_len},\"tokens\":{tokens},\"token_strs\":null}}");
    Ok(body(StatusCode::OK, "application/json", text))
}

fn detokenize(value: &Value) -> Result<Reply, ErrorBody> {
    let ids = value["tokens"].as_array().ok_or_else(|| missing("tokens"))?;
    let text: String =
        ids.iter().filter_map(Value::as_u64).map(|id| text::word_of((id % text::VOCABULARY) as u32)).collect();
    Ok(json_reply(&json!({"prompt": text})))
}

/// Vectors of unit length that depend on the text alone.
fn embeddings(shared: &Shared, value: &Value) -> Result<Reply, ErrorBody> {
    let (model, _) = resolve_model(shared, value["model"].as_str())?;
    let inputs = match &value["input"] {
        Value::Array(items) if items.iter().any(|item| !item.is_number()) => items.clone(),
        Value::Null => return Err(missing("input")),
        other => vec![other.clone()],
    };
    let mut tokens = 0;
    let vectors = inputs.iter().enumerate().map(|(index, input)| {
        tokens += match input {
            Value::String(text) => text::count(text) + 1,
            Value::Array(ids) => ids.len(),
            _ => 1,
        };
        let mut rng = Rng::new(xxhash_rust::xxh3::xxh3_64(input.to_string().as_bytes()));
        let raw: Vec<f64> = (0..EMBEDDING).map(|_| rng.unit() - 0.5).collect();
        let norm = raw.iter().map(|x| x * x).sum::<f64>().sqrt();
        let vector: Vec<f64> = raw.into_iter().map(|x| x / norm).collect();
        json!({"index": index, "object": "embedding", "embedding": vector})
    });
    let data: Vec<Value> = vectors.collect();
    let usage =
        json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": null});
    let id = format!("embd-{}", fresh_id(shared));
    Ok(json_reply(&json!({
        "id": id, "object": "list", "created": unix_time(), "model": model, "data": data, "usage": usage
    })))
}

async fn fault(shared: &Shared, request: Request<Incoming>) -> Result<Reply, ErrorBody> {
    let bytes = read(request).await?;
    let text = match serde_json::from_slice::<Value>(&bytes) {
        Ok(value) => value["fault"].as_str().unwrap_or_default().to_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).trim().to_owned(),
    };
    let fault = text.parse().map_err(|error| ErrorBody::bad_request(Some("fault"), format!("{error}")))?;
    shared.fault(fault);
    Ok(json_reply(&json!({"fault": text})))
}
