//! `/tokenize`, `/detokenize`, `/v1/embeddings`.
//!
//! Tokens come from the model's tokenizer or, if the model is only a name, from
//! [`crate::text::words`]. Embeddings are synthetic vectors.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use serde_json::{Map, Value, json};

use crate::http::error_body::ErrorBody;
use crate::http::generate::{fresh_id, resolve_model};
use crate::http::reply::{Reply, body, json_reply, read, require_json};
use crate::real_time::state::ServerState;
use crate::text::logprobs::quoted;
use crate::unix_time::unix_time;
use crate::validate::pydantic::{self, FieldReader, ValidationErrors, shown};
use crate::validate::{json as body_json, schema};
use sluice_core::base::Rng;

const EMBEDDING: usize = 64;

pub(super) async fn handle(
    shared: &Arc<ServerState>,
    template: &str,
    request: Request<Incoming>,
) -> Result<Reply, ErrorBody> {
    require_json(&request)?;
    let fields = body_json::object(&read(request).await?)?;
    match template {
        "/tokenize" => tokenize(shared, &fields),
        "/detokenize" => detokenize(shared, &fields),
        _ => embeddings(shared, &fields),
    }
}

/// Checks that the body has a prompt or messages. If both are missing or wrong, both errors are
/// reported.
fn check_tokenize(fields: &Map<String, Value>) -> Result<(), ErrorBody> {
    let mut problems = ValidationErrors::default();
    let prompt = fields.get("prompt");
    let messages = fields.get("messages");
    if prompt.is_some_and(Value::is_string) || messages.is_some_and(Value::is_array) {
        return Ok(());
    }
    match prompt {
        None => problems.missing("body.prompt", fields.len()),
        Some(value) => problems.add("string_type", "body.prompt", "Input should be a valid string", &shown(value), ""),
    }
    match messages {
        None => problems.missing("body.messages", fields.len()),
        Some(value) => problems.add("list_type", "body.messages", "Input should be a valid list", &shown(value), ""),
    }
    Err(problems.refusal())
}

fn tokenize(shared: &ServerState, fields: &Map<String, Value>) -> Result<Reply, ErrorBody> {
    check_tokenize(fields)?;
    resolve_model(shared, fields.text("model").filter(|name| !name.is_empty()))?;
    let texts = &shared.config.texts;
    let ids = if fields.get("messages").is_some_and(Value::is_array) {
        texts.of_chat(fields, shared.config.names.first().map_or("", String::as_str), u32::MAX)?.ids.to_vec()
    } else {
        let special = fields.get("add_special_tokens").is_none() || fields.truth("add_special_tokens");
        texts.vocabulary.encode(fields.text("prompt").unwrap_or_default(), special)
    };
    let strings = fields.truth("return_token_strs").then(|| {
        let pieces: Vec<String> = texts.vocabulary.pieces(&ids).iter().map(|piece| quoted(piece)).collect();
        format!("[{}]", pieces.join(","))
    });
    let text = format!(
        "{{\"count\":{},\"max_model_len\":{},\"tokens\":{},\"token_strs\":{}}}",
        ids.len(),
        shared.config.max_model_len,
        json!(ids),
        strings.unwrap_or_else(|| "null".to_owned())
    );
    Ok(body(StatusCode::OK, "application/json", text))
}

fn detokenize(shared: &ServerState, fields: &Map<String, Value>) -> Result<Reply, ErrorBody> {
    let mut problems = ValidationErrors::default();
    pydantic::check(schema::DETOKENIZE, fields, &mut problems);
    if !problems.is_empty() {
        return Err(problems.refusal());
    }
    resolve_model(shared, fields.text("model").filter(|name| !name.is_empty()))?;
    let number = |value: &Value| value.as_u64().or_else(|| value.as_str()?.trim().parse().ok());
    let items = fields.get("tokens").and_then(Value::as_array).into_iter().flatten();
    let ids: Vec<u32> = items.filter_map(number).filter_map(|id| u32::try_from(id).ok()).collect();
    Ok(json_reply(&json!({"prompt": shared.config.texts.vocabulary.decode(&ids, false)})))
}

/// Vectors of length 1 that depend only on the input.
fn embeddings(shared: &ServerState, fields: &Map<String, Value>) -> Result<Reply, ErrorBody> {
    let model = resolve_model(shared, fields.text("model").filter(|name| !name.is_empty()))?.name;
    let inputs = match fields.get("input") {
        None | Some(Value::Null) => {
            let mut problems = ValidationErrors::default();
            problems.missing("body.input", fields.len());
            return Err(problems.refusal());
        }
        Some(Value::Array(items)) if items.iter().any(|item| !item.is_number()) => items.clone(),
        Some(other) => vec![other.clone()],
    };
    let mut tokens = 0;
    let vectors = inputs.iter().enumerate().map(|(index, input)| {
        tokens += match input {
            Value::String(text) => shared.config.texts.vocabulary.count(text, true),
            Value::Array(ids) => ids.len(),
            _ => 1,
        };
        let mut rng = Rng::new(twox_hash::XxHash3_64::oneshot(input.to_string().as_bytes()));
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
