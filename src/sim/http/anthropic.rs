//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the same engine.
//!
//! A request becomes a chat: `system` is the first message, and text blocks are joined. As in vLLM,
//! errors in the fields have OpenAI's shape, later errors Anthropic's.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::http::error_body::ErrorBody;
use crate::http::wire::{self, CompleteChoice, Finish, Piece, UsageCounts};
use crate::text::logprobs::quoted;
use crate::validate::pydantic::{self, ValidationErrors};
use crate::validate::{CalledTool, RequestBody};
use crate::validate::{json as body_json, schema};

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
    tools(&fields, &mut chat);
    Ok(RequestBody::of_chat(chat))
}

/// Copies the tools if `tool_choice` demands a call.
fn tools(fields: &Map<String, Value>, chat: &mut Map<String, Value>) {
    let choice = match fields.get("tool_choice").map(|choice| (choice, choice["type"].as_str().unwrap_or_default())) {
        Some((_, "any")) => json!("required"),
        Some((choice, "tool")) => json!({"type": "function", "function": {"name": choice["name"]}}),
        _ => return,
    };
    let tools = fields.get("tools").and_then(Value::as_array).into_iter().flatten().map(|tool| {
        let (name, text, schema) = (&tool["name"], &tool["description"], &tool["input_schema"]);
        json!({"type": "function", "function": {"name": name, "description": text, "parameters": schema}})
    });
    chat.insert("tools".into(), tools.collect());
    chat.insert("tool_choice".into(), choice);
}

fn joined(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(blocks) => {
            Some(blocks.iter().filter_map(|block| block["text"].as_str()).collect::<Vec<_>>().join("\n"))
        }
        _ => None,
    }
}

pub(crate) fn error_body(error: &ErrorBody) -> String {
    let kind = json!(error.kind);
    format!("{{\"type\":\"error\",\"error\":{{\"type\":{kind},\"message\":{}}}}}", json!(error.message))
}

pub(crate) fn error_event(error: &ErrorBody) -> String {
    format!("event: error\ndata: {}\n\n", error_body(error))
}

#[derive(Debug)]
pub(crate) struct MessagesWriter {
    id: String,
    model: String,
    call: Option<CalledTool>,
}

fn reason(finish: Finish, call: Option<&CalledTool>) -> &'static str {
    match finish {
        Finish::Length => "\"max_tokens\"",
        Finish::Stop if call.is_some() => "\"tool_use\"",
        Finish::Stop | Finish::Abort => "\"end_turn\"",
    }
}

fn event(out: &mut String, name: &str, fields: &str) {
    let _ = write!(out, "event: {name}\ndata: {{\"type\":\"{name}\"{fields}}}\n\n");
}

impl MessagesWriter {
    pub(crate) fn new(id: String, model: &str) -> Self {
        Self { id, model: quoted(model), call: None }
    }

    /// The content block of a call, with `input` as JSON.
    fn tool_use(&self, call: &CalledTool, input: &str) -> String {
        let (id, name) = (wire::call_id(&self.id, 0), quoted(&call.name));
        format!("{{\"type\":\"tool_use\",\"id\":\"{id}\",\"name\":{name},\"input\":{input}}}")
    }

    pub(crate) fn open(&mut self, out: &mut String, usage: UsageCounts, call: Option<&CalledTool>) {
        self.call = call.cloned();
        let message = format!(
            ",\"message\":{{\"id\":\"{}\",\"type\":\"message\",\"role\":\"assistant\",\"content\":[],\"model\":{},\
             \"stop_reason\":null,\"stop_sequence\":null,\"usage\":{{\"input_tokens\":{},\"output_tokens\":0}}}}",
            self.id, self.model, usage.prompt
        );
        event(out, "message_start", &message);
        let block = match call {
            Some(call) => self.tool_use(call, "{}"),
            None => "{\"type\":\"text\",\"text\":\"\"}".to_owned(),
        };
        event(out, "content_block_start", &format!(",\"content_block\":{block},\"index\":0"));
    }

    pub(crate) fn content(&self, out: &mut String, piece: &Piece) {
        if !piece.text.is_empty() {
            let (kind, field) = match self.call {
                Some(_) => ("input_json_delta", "partial_json"),
                None => ("text_delta", "text"),
            };
            let text = quoted(&piece.text);
            let delta = format!(",\"delta\":{{\"type\":\"{kind}\",\"{field}\":{text}}},\"index\":0");
            event(out, "content_block_delta", &delta);
        }
    }

    pub(crate) fn end(&self, out: &mut String, usage: UsageCounts, finish: Finish) {
        event(out, "content_block_stop", ",\"index\":0");
        let delta = format!(
            ",\"delta\":{{\"stop_reason\":{},\"stop_sequence\":null}},\"usage\":{{\"input_tokens\":{},\"output_tokens\":{}}}",
            reason(finish, self.call.as_ref()),
            usage.prompt,
            usage.completion
        );
        event(out, "message_delta", &delta);
        event(out, "message_stop", "");
    }

    pub(crate) fn body(&self, choices: &[CompleteChoice], usage: UsageCounts) -> String {
        let piece = choices.first().map(|whole| &whole.piece);
        let call = piece.and_then(|piece| piece.call.as_ref());
        let text = piece.map_or("", |piece| piece.text.as_str());
        let block = match call {
            // Arguments that were cut at the token limit are not JSON.
            Some(call) => self.tool_use(call, if serde_json::from_str::<Value>(text).is_ok() { text } else { "{}" }),
            None => format!("{{\"type\":\"text\",\"text\":{}}}", quoted(text)),
        };
        let finish = piece.and_then(|piece| piece.finish).unwrap_or(Finish::Length);
        format!(
            "{{\"id\":\"{}\",\"type\":\"message\",\"role\":\"assistant\",\"content\":[{block}],\
             \"model\":{},\"stop_reason\":{},\"usage\":{{\"input_tokens\":{},\"output_tokens\":{}}}}}",
            self.id,
            self.model,
            reason(finish, call),
            usage.prompt,
            usage.completion
        )
    }
}
