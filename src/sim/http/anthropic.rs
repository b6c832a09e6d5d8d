//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the same engine.
//!
//! A request becomes a chat: `system` is its first message, text blocks are joined. Errors in the fields have OpenAI's
//! shape, later ones Anthropic's, as in vLLM.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::http::error_body::ErrorBody;
use crate::http::wire::{CompleteChoice, Finish, Piece, UsageCounts};
use crate::text::logprobs::quoted;
use crate::validate::RequestBody;
use crate::validate::pydantic::{self, ValidationErrors};
use crate::validate::{json as body_json, schema};

/// Converts a body to a chat.
///
/// # Errors
/// vLLM's, for a body whose fields are wrong.
pub(crate) fn read(bytes: &[u8], counting: bool) -> Result<RequestBody, ErrorBody> {
    let fields = body_json::object(bytes)?;
    let mut problems = ValidationErrors::default();
    pydantic::check(if counting { schema::COUNT_TOKENS } else { schema::MESSAGES }, &fields, &mut problems);
    if let Some(most) = fields.get("max_tokens").and_then(Value::as_i64).filter(|most| *most < 1) {
        let text = "max_tokens must be positive";
        let context = format!("'error': ValueError('{text}')");
        problems.add("value_error", "body.max_tokens", &format!("Value error, {text}"), &most.to_string(), &context);
    }
    if !problems.is_empty() {
        return Err(problems.refusal());
    }
    let mut messages = Vec::new();
    if let Some(system) = fields.get("system").and_then(joined) {
        messages.push(json!({"role": "system", "content": system}));
    }
    for message in fields.get("messages").and_then(Value::as_array).into_iter().flatten() {
        let content = joined(&message["content"]).unwrap_or_default();
        messages.push(json!({"role": message["role"], "content": content}));
    }
    let mut chat = Map::new();
    chat.insert("messages".into(), Value::Array(messages));
    for (from, to) in [
        ("model", "model"),
        ("max_tokens", "max_tokens"),
        ("stream", "stream"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("stop_sequences", "stop"),
        ("cache_salt", "cache_salt"),
    ] {
        if let Some(value) = fields.get(from).filter(|value| !value.is_null()) {
            chat.insert(to.into(), value.clone());
        }
    }
    Ok(RequestBody::of_chat(chat))
}

/// A string, or the joined texts of blocks.
fn joined(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(blocks) => {
            Some(blocks.iter().filter_map(|block| block["text"].as_str()).collect::<Vec<_>>().join("\n"))
        }
        _ => None,
    }
}

/// An error in Anthropic's shape.
pub(crate) fn error_body(error: &ErrorBody) -> String {
    let kind = json!(error.kind);
    format!("{{\"type\":\"error\",\"error\":{{\"type\":{kind},\"message\":{}}}}}", json!(error.message))
}

/// An error inside a stream.
pub(crate) fn error_event(error: &ErrorBody) -> String {
    format!("event: error\ndata: {}\n\n", error_body(error))
}

/// Writes one response.
#[derive(Debug)]
pub(crate) struct MessagesWriter {
    id: String,
    model: String,
}

fn reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "\"max_tokens\"",
        Finish::Stop | Finish::Abort => "\"end_turn\"",
    }
}

fn event(out: &mut String, name: &str, fields: &str) {
    let _ = write!(out, "event: {name}\ndata: {{\"type\":\"{name}\"{fields}}}\n\n");
}

impl MessagesWriter {
    pub(crate) fn new(id: String, model: &str) -> Self {
        Self { id, model: quoted(model) }
    }

    pub(crate) fn open(&self, out: &mut String, usage: UsageCounts) {
        let message = format!(
            ",\"message\":{{\"id\":\"{}\",\"type\":\"message\",\"role\":\"assistant\",\"content\":[],\"model\":{},\
             \"stop_reason\":null,\"stop_sequence\":null,\"usage\":{{\"input_tokens\":{},\"output_tokens\":0}}}}",
            self.id, self.model, usage.prompt
        );
        event(out, "message_start", &message);
        event(out, "content_block_start", ",\"content_block\":{\"type\":\"text\",\"text\":\"\"},\"index\":0");
    }

    pub(crate) fn content(&self, out: &mut String, piece: &Piece) {
        if !piece.text.is_empty() {
            let delta = format!(",\"delta\":{{\"type\":\"text_delta\",\"text\":{}}},\"index\":0", quoted(&piece.text));
            event(out, "content_block_delta", &delta);
        }
    }

    pub(crate) fn end(&self, out: &mut String, usage: UsageCounts, finish: Finish) {
        event(out, "content_block_stop", ",\"index\":0");
        let delta = format!(
            ",\"delta\":{{\"stop_reason\":{},\"stop_sequence\":null}},\"usage\":{{\"input_tokens\":{},\"output_tokens\":{}}}",
            reason(finish),
            usage.prompt,
            usage.completion
        );
        event(out, "message_delta", &delta);
        event(out, "message_stop", "");
    }

    pub(crate) fn body(&self, choices: &[CompleteChoice], usage: UsageCounts) -> String {
        let piece = choices.first().map(|whole| &whole.piece);
        let text = quoted(piece.map_or("", |piece| piece.text.as_str()));
        let finish = piece.and_then(|piece| piece.finish).unwrap_or(Finish::Length);
        format!(
            "{{\"id\":\"{}\",\"type\":\"message\",\"role\":\"assistant\",\"content\":[{{\"type\":\"text\",\"text\":{text}}}],\
             \"model\":{},\"stop_reason\":{},\"usage\":{{\"input_tokens\":{},\"output_tokens\":{}}}}}",
            self.id,
            self.model,
            reason(finish),
            usage.prompt,
            usage.completion
        )
    }
}
