//! `/v1/responses`: OpenAI's newer API over the same engine, without a store (vLLM's default).
//!
//! `input` and `instructions` become a chat. Streams have named events with a sequence number and
//! no `[DONE]`.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::http::error_body::ErrorBody;
use crate::http::wire::{self, CompleteChoice, Finish, Piece, UsageCounts};
use crate::text::logprobs::quoted;
use crate::validate::json as body_json;
use crate::validate::pydantic::{self, FieldReader, ValidationErrors, shown};
use crate::validate::schema;
use crate::validate::{CalledTool, RequestBody};

/// The fields of a request that its response repeats, as JSON.
#[derive(Clone, Debug)]
pub(crate) struct EchoedFields {
    instructions: String,
    metadata: String,
    max_output_tokens: String,
    temperature: String,
    top_p: String,
    user: String,
    tool_choice: String,
    tools: String,
    presence_penalty: String,
    frequency_penalty: String,
}

pub(crate) fn read(bytes: &[u8]) -> Result<(RequestBody, EchoedFields), ErrorBody> {
    let mut fields = body_json::object(bytes)?;
    // vLLM adds this field before it validates, and error messages show it.
    fields.entry("request_id").or_insert_with(|| Value::from("resp"));
    let mut problems = ValidationErrors::default();
    pydantic::check(schema::RESPONSES, &fields, &mut problems);
    if let Some(value) = fields.get("input").filter(|value| !value.is_string() && !value.is_array()) {
        problems.add("string_type", "body.input", "Input should be a valid string", &shown(value), "");
        problems.add("list_type", "body.input", "Input should be a valid list", &shown(value), "");
    }
    if !problems.is_empty() {
        return Err(problems.refusal());
    }
    if fields.truth("background") {
        let message = "This vLLM engine does not support `store=True` and therefore does not support the background mode. \
                       To enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when \
                       launching the vLLM server.";
        return Err(invalid(400, "background", message.to_owned()));
    }
    if let Some(id) = fields.text("previous_response_id") {
        return Err(unknown(id));
    }
    let mut messages = Vec::new();
    if let Some(instructions) = fields.text("instructions") {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match fields.get("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => messages.extend(items.iter().map(|item| {
            let role = match item["type"].as_str() {
                Some("function_call") => "assistant",
                Some("function_call_output") => "tool",
                _ => item["role"].as_str().unwrap_or("user"),
            };
            json!({"role": role, "content": item_text(item)})
        })),
        _ => {}
    }
    let mut chat = Map::new();
    chat.insert("messages".into(), Value::Array(messages));
    for (from, to) in [("max_output_tokens", "max_completion_tokens")].into_iter().chain(
        ["model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"]
            .map(|name| (name, name)),
    ) {
        if let Some(value) = fields.get(from).filter(|value| !value.is_null()) {
            chat.insert(to.into(), value.clone());
        }
    }
    shape(&fields, &mut chat);
    let shown = |name: &str| fields.get(name).map_or("null".to_owned(), Value::to_string);
    let float = |name: &str, default: f64| format!("{:?}", fields.float(name).unwrap_or(default));
    let echo = EchoedFields {
        instructions: shown("instructions"),
        metadata: shown("metadata"),
        max_output_tokens: shown("max_output_tokens"),
        temperature: float("temperature", 1.0),
        top_p: float("top_p", 1.0),
        user: shown("user"),
        tool_choice: fields.get("tool_choice").map_or("\"none\"".to_owned(), Value::to_string),
        tools: fields.get("tools").filter(|tools| tools.is_array()).map_or("[]".to_owned(), Value::to_string),
        presence_penalty: float("presence_penalty", 0.0),
        frequency_penalty: float("frequency_penalty", 0.0),
    };
    Ok((RequestBody::of_chat(chat), echo))
}

/// Copies the fields that decide the shape of the output: tools, if one must be called, and the
/// format of the text.
fn shape(fields: &Map<String, Value>, chat: &mut Map<String, Value>) {
    if let Some(format) = fields.get("text").map(|text| &text["format"]).filter(|format| format.is_object()) {
        let schema = json!({"name": format["name"], "schema": format["schema"]});
        chat.insert("response_format".into(), json!({"type": format["type"], "json_schema": schema}));
    }
    let Some(choice) = fields.get("tool_choice").filter(|choice| *choice == "required" || choice.is_object()) else {
        return;
    };
    let tools = fields.get("tools").and_then(Value::as_array).into_iter().flatten();
    let tools: Vec<Value> = tools
        .filter(|tool| tool["type"] == "function")
        .map(|tool| {
            let function: Map<String, Value> = ["name", "description", "parameters"]
                .into_iter()
                .filter_map(|key| Some((key.to_owned(), tool.get(key)?.clone())))
                .collect();
            json!({"type": "function", "function": function})
        })
        .collect();
    let choice = match choice.is_object() {
        true => json!({"type": "function", "function": {"name": choice["name"]}}),
        false => choice.clone(),
    };
    chat.insert("tools".into(), Value::Array(tools));
    chat.insert("tool_choice".into(), choice);
}

/// The text of an input item: of a message, a call, or the result of a call.
fn item_text(item: &Value) -> Value {
    match &item["content"] {
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            Value::String(texts.join("\n"))
        }
        Value::Null => item.get("output").or(item.get("arguments")).cloned().unwrap_or(Value::Null),
        other => other.clone(),
    }
}

fn invalid(status: u16, param: &str, message: String) -> ErrorBody {
    ErrorBody { status, kind: "invalid_request_error", param: Some(param.to_owned()), message }
}

/// The error for any response id, because no response is stored.
pub(crate) fn unknown(id: &str) -> ErrorBody {
    invalid(404, "response_id", format!("Response with id '{id}' not found."))
}

fn call_status(finish: Finish) -> &'static str {
    if finish == Finish::Length { "incomplete" } else { "completed" }
}

#[derive(Debug)]
pub(crate) struct ResponsesWriter {
    id: String,
    item: String,
    created: u64,
    model: String,
    echo: EchoedFields,
    number: u64,
    /// The text so far. The last events repeat it.
    text: String,
    /// The tool that is called, if the text is the arguments of a call.
    call: Option<CalledTool>,
}

impl ResponsesWriter {
    /// `id`: without the prefix `resp_`.
    pub(crate) fn new(id: &str, created: u64, model: &str, limit: u32, mut echo: EchoedFields) -> Self {
        if echo.max_output_tokens == "null" {
            echo.max_output_tokens = limit.to_string();
        }
        let item = format!("msg_{:016x}", twox_hash::XxHash3_64::oneshot(id.as_bytes()));
        Self {
            id: format!("resp_{id}"),
            item,
            created,
            model: quoted(model),
            echo,
            number: 0,
            text: String::new(),
            call: None,
        }
    }

    fn event(&mut self, out: &mut String, name: &str, fields: &str) {
        let number = self.number;
        self.number += 1;
        let _ = write!(out, "event: {name}\ndata: {{{fields},\"sequence_number\":{number},\"type\":\"{name}\"}}\n\n");
    }

    /// A part of the output. `logprobs` is a list until the part is done, then null.
    fn part(text: &str, logprobs: &str) -> String {
        let text = quoted(text);
        format!("{{\"annotations\":[],\"text\":{text},\"type\":\"output_text\",\"logprobs\":{logprobs}}}")
    }

    fn message(&self, content: &str, status: &str) -> String {
        format!(
            "{{\"id\":\"{}\",\"content\":[{content}],\"role\":\"assistant\",\"status\":\"{status}\",\"type\":\"message\",\
             \"phase\":null}}",
            self.item
        )
    }

    fn response(&self, output: &str, finish: Option<Finish>, usage: Option<UsageCounts>) -> String {
        let EchoedFields {
            instructions,
            metadata,
            max_output_tokens,
            temperature,
            top_p,
            user,
            tool_choice,
            tools,
            ..
        } = &self.echo;
        let incomplete = match finish {
            Some(Finish::Length) => "{\"reason\":\"max_output_tokens\"}",
            _ => "null",
        };
        let status = match finish {
            None => "in_progress",
            Some(Finish::Length) => "incomplete",
            Some(_) => "completed",
        };
        let times = usage.and_then(|usage| usage.timing);
        let times = times.map_or_else(String::new, |times| format!(",\"metrics\":{}", wire::metrics(times, true)));
        let usage = usage.map_or("null".to_owned(), |usage| {
            let UsageCounts { prompt, completion, cached, .. } = usage;
            format!(
                "{{\"input_tokens\":{prompt},\"input_tokens_details\":{{\"cached_tokens\":{},\"cache_write_tokens\":0,\
                 \"input_tokens_per_turn\":[],\"cached_tokens_per_turn\":[]}},\"output_tokens\":{completion},\
                 \"output_tokens_details\":{{\"reasoning_tokens\":0,\"tool_output_tokens\":0,\"output_tokens_per_turn\":[],\
                 \"tool_output_tokens_per_turn\":[]}},\"total_tokens\":{}}}",
                cached.unwrap_or(0),
                prompt + completion
            )
        });
        format!(
            "{{\"id\":\"{}\",\"created_at\":{},\"incomplete_details\":{incomplete},\"instructions\":{instructions},\
             \"metadata\":{metadata},\"model\":{},\"object\":\"response\",\"output\":[{output}],\"parallel_tool_calls\":true,\
             \"temperature\":{temperature},\"tool_choice\":{tool_choice},\"tools\":{tools},\"top_p\":{top_p},\"background\":false,\
             \"max_output_tokens\":{max_output_tokens},\"max_tool_calls\":null,\"previous_response_id\":null,\
             \"prompt\":null,\"reasoning\":null,\"service_tier\":\"auto\",\"status\":\"{status}\",\"text\":null,\
             \"top_logprobs\":null,\"truncation\":\"disabled\",\"usage\":{usage},\"user\":{user}{times},\"presence_penalty\":{},\
             \"frequency_penalty\":{},\"kv_transfer_params\":null,\"ec_transfer_params\":null,\"input_messages\":null,\
             \"output_messages\":null}}",
            self.id, self.created, self.model, self.echo.presence_penalty, self.echo.frequency_penalty
        )
    }

    fn call_item_id(&self) -> String {
        self.item.replace("msg_", "fc_")
    }

    fn call_item(&self, call: &CalledTool, arguments: &str, status: &str) -> String {
        format!(
            "{{\"arguments\":{},\"call_id\":\"{}\",\"name\":{},\"type\":\"function_call\",\"id\":\"{}\",\"async\":null,\
             \"caller\":null,\"namespace\":null,\"status\":\"{status}\"}}",
            quoted(arguments),
            wire::call_id(&self.id, 0),
            quoted(&call.name),
            self.call_item_id()
        )
    }

    pub(crate) fn open(&mut self, out: &mut String, call: Option<&CalledTool>) {
        self.call = call.cloned();
        let response = format!("\"response\":{}", self.response("", None, None));
        self.event(out, "response.created", &response);
        self.event(out, "response.in_progress", &response);
        if let Some(call) = call {
            let item = format!("\"item\":{},\"output_index\":0", self.call_item(call, "", "in_progress"));
            return self.event(out, "response.output_item.added", &item);
        }
        let item = format!("\"item\":{},\"output_index\":0", self.message("", "in_progress"));
        self.event(out, "response.output_item.added", &item);
        let part = format!(
            "\"content_index\":0,\"item_id\":\"{}\",\"output_index\":0,\"part\":{}",
            self.item,
            Self::part("", "[]")
        );
        self.event(out, "response.content_part.added", &part);
    }

    pub(crate) fn content(&mut self, out: &mut String, piece: &Piece) {
        if piece.text.is_empty() {
            return;
        }
        self.text.push_str(&piece.text);
        if self.call.is_some() {
            let (text, id) = (quoted(&piece.text), self.call_item_id());
            let delta = format!("\"delta\":{text},\"item_id\":\"{id}\",\"output_index\":0");
            return self.event(out, "response.function_call_arguments.delta", &delta);
        }
        let delta = format!(
            "\"content_index\":0,\"delta\":{},\"item_id\":\"{}\",\"logprobs\":[],\"output_index\":0",
            quoted(&piece.text),
            self.item
        );
        self.event(out, "response.output_text.delta", &delta);
    }

    pub(crate) fn end(&mut self, out: &mut String, usage: UsageCounts, finish: Finish) {
        if let Some(call) = self.call.take() {
            return self.end_call(out, &call, usage, finish);
        }
        let (text, part) = (quoted(&self.text), Self::part(&self.text, "null"));
        let at = format!("\"content_index\":0,\"item_id\":\"{}\"", self.item);
        // In this event the sequence number comes before the text, which `event` cannot write.
        let number = self.number;
        self.number += 1;
        let name = "response.output_text.done";
        let _ = write!(
            out,
            "event: {name}\ndata: {{{at},\"logprobs\":[],\"output_index\":0,\"sequence_number\":{number},\"text\":{text},\
             \"type\":\"{name}\"}}\n\n"
        );
        self.event(out, "response.content_part.done", &format!("{at},\"output_index\":0,\"part\":{part}"));
        let message = self.message(&part, "completed");
        self.event(out, "response.output_item.done", &format!("\"item\":{message},\"output_index\":0"));
        let response = self.response(&message, Some(finish), Some(usage));
        self.event(out, "response.completed", &format!("\"response\":{response}"));
    }

    fn end_call(&mut self, out: &mut String, call: &CalledTool, usage: UsageCounts, finish: Finish) {
        let (id, status) = (self.call_item_id(), call_status(finish));
        let arguments = quoted(&self.text);
        let name = quoted(&call.name);
        let done = format!("\"arguments\":{arguments},\"item_id\":\"{id}\",\"name\":{name},\"output_index\":0");
        self.event(out, "response.function_call_arguments.done", &done);
        let item = self.call_item(call, &self.text, status);
        self.event(out, "response.output_item.done", &format!("\"item\":{item},\"output_index\":0"));
        let response = self.response(&item, Some(finish), Some(usage));
        self.event(out, "response.completed", &format!("\"response\":{response}"));
    }

    pub(crate) fn body(&self, choices: &[CompleteChoice], usage: UsageCounts) -> String {
        let piece = choices.first().map(|whole| &whole.piece);
        if let Some((piece, call)) = piece.and_then(|piece| Some((piece, piece.call.as_ref()?))) {
            let finish = piece.finish.unwrap_or(Finish::Length);
            let item = self.call_item(call, &piece.text, call_status(finish));
            return self.response(&item, Some(finish), Some(usage));
        }
        let part = Self::part(piece.map_or("", |piece| piece.text.as_str()), "null");
        let finish = piece.and_then(|piece| piece.finish).unwrap_or(Finish::Length);
        self.response(&self.message(&part, "completed"), Some(finish), Some(usage))
    }
}
