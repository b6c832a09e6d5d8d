//! Continues an answer of Anthropic's Messages API as a chat: vLLM continues a message only on the
//! chat route, and itself serves a message as a chat.
//!
//! [`as_chat`] makes the chat that vLLM would make of the request. It refuses everything but texts,
//! because how tools, images and thinking become a chat differs between versions and templates.
//! [`Events`] makes the events of a message from the events of the chat. Both run only after an
//! engine has failed or while it leaves, so they parse whole documents.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_core::openai::NotContinued;
use sluice_core::openai::sse::Fields;

/// Members that mean the same in a message and in a chat.
const SAME: [&str; 7] = ["model", "max_tokens", "temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs"];
/// vLLM leaves out a text of the system prompt that begins like this.
const LEFT_OUT: &str = "x-anthropic-billing-header";

/// The chat that asks for the same answer as the message `body`.
///
/// # Errors
/// [`NotContinued::Translation`]: the message has more than texts.
pub(in crate::flow) fn as_chat(body: &[u8]) -> Result<Bytes, NotContinued> {
    let mut message: Map<String, Value> = serde_json::from_slice(body).map_err(|_| NotContinued::Unreadable)?;
    let mut messages = Vec::new();
    let system = texts(message.remove("system").unwrap_or_default())?.concat();
    if system.contains(LEFT_OUT) {
        return Err(NotContinued::Translation);
    }
    if !system.is_empty() {
        messages.push(json!({"role": "system", "content": system}));
    }
    let Some(Value::Array(turns)) = message.remove("messages") else { return Err(NotContinued::Unreadable) };
    for mut turn in turns {
        let role = taken(&mut turn, "role");
        if !matches!(role.as_str(), Some("user" | "assistant")) {
            return Err(NotContinued::Translation);
        }
        let content = match taken(&mut turn, "content") {
            Value::String(text) => Value::String(text),
            blocks => match <[String; 1]>::try_from(texts(blocks)?) {
                Ok([text]) => Value::String(text),
                Err(texts) if texts.is_empty() => return Err(NotContinued::Translation),
                Err(texts) => texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect(),
            },
        };
        messages.push(json!({"role": role, "content": content}));
    }
    let mut chat = json!({"messages": messages, "stream": true, "stream_options": {"include_usage": true}});
    for (name, value) in message {
        match name.as_str() {
            "stop_sequences" => chat["stop"] = value,
            same if SAME.contains(&same) => chat[same] = value,
            _ => {}
        }
    }
    Ok(Bytes::from(chat.to_string()))
}

/// A member of an object; null if the value has none.
fn taken(value: &mut Value, member: &str) -> Value {
    value.get_mut(member).map(Value::take).unwrap_or_default()
}

/// The texts of a content, without empty ones.
fn texts(content: Value) -> Result<Vec<String>, NotContinued> {
    let blocks = match content {
        Value::Null => return Ok(Vec::new()),
        Value::String(text) => return Ok(vec![text]),
        Value::Array(blocks) => blocks,
        _ => return Err(NotContinued::Translation),
    };
    let mut texts = Vec::new();
    for mut block in blocks {
        match taken(&mut block, "text") {
            Value::String(text) if block["type"] == "text" => texts.push(text),
            _ => return Err(NotContinued::Translation),
        }
    }
    texts.retain(|text| !text.is_empty());
    Ok(texts)
}

fn is_empty(value: &Value) -> bool {
    value.is_null() || [json!(""), json!([])].contains(value)
}

/// The parts of a message's first events on which the last events depend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Begun {
    usage: Map<String, Value>,
    /// Whether the block of the text has begun.
    has_block: bool,
}

#[derive(Deserialize)]
struct Start {
    message: StartOfMessage,
}

#[derive(Deserialize)]
struct StartOfMessage {
    id: String,
    model: String,
    #[serde(default)]
    usage: Map<String, Value>,
}

impl Begun {
    /// Reads the first event of a message. Also returns the message's id and model, as JSON.
    pub(super) fn of(first: &[u8], has_block: bool) -> Result<(String, String, Self), NotContinued> {
        let fields = Fields::of(first);
        let data = fields.data.ok_or(NotContinued::Unreadable)?;
        let Start { message } = serde_json::from_slice(&data).map_err(|_| NotContinued::Unreadable)?;
        let quoted = |text: String| Value::String(text).to_string();
        Ok((quoted(message.id), quoted(message.model), Self { usage: message.usage, has_block }))
    }

    fn end_block(&mut self) -> String {
        self.has_block = false;
        block_stop()
    }

    /// The events that end the message. Their usage counts the whole answer.
    pub(super) fn end(&self, reason: &str, stop: &Value, (prompt, completion): (u64, u64)) -> String {
        let mut usage = self.usage.clone();
        usage.entry("input_tokens").or_insert(json!(prompt));
        usage.insert("output_tokens".to_owned(), json!(completion));
        let block = if self.has_block { block_stop() } else { String::new() };
        let delta = json!({"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": usage});
        block + &event("message_delta", delta)
    }
}

fn block_stop() -> String {
    event("content_block_stop", json!({"index": 0}))
}

/// The event that ends the stream of a message.
pub(super) fn stop() -> String {
    event("message_stop", json!({}))
}

/// An event of a message, with its name also as type.
fn event(name: &str, mut members: Value) -> String {
    members["type"] = json!(name);
    format!("event: {name}\ndata: {members}\n\n")
}

/// Makes the events of a message from the events of the chat that continues it.
#[derive(Debug)]
pub(super) struct Events {
    begun: Begun,
    /// The reason for the end and the stop string that was met; `end_turn` and null until the
    /// engine has named them.
    ended: (&'static str, Value),
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Map<String, Value>,
    finish_reason: Option<String>,
    #[serde(default)]
    stop_reason: Value,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u64,
    completion_tokens: Option<u64>,
}

impl Events {
    pub(super) fn new(begun: Begun) -> Self {
        Self { begun, ended: ("end_turn", Value::Null) }
    }

    /// The events for the data of one event of the chat.
    ///
    /// # Errors
    /// The engine's output is no text.
    pub(super) fn of(&mut self, data: &[u8]) -> Result<String, NotContinued> {
        if data.trim_ascii() == b"[DONE]" {
            return Ok(stop());
        }
        let chunk: Chunk = serde_json::from_slice(data).map_err(|_| NotContinued::Unreadable)?;
        if let Some(error) = chunk.error.filter(|error| !error.is_null()) {
            return Ok(event("error", json!({"error": error})));
        }
        let (mut events, is_usage) = (String::new(), chunk.choices.is_empty());
        for Choice { delta, finish_reason, stop_reason } in chunk.choices {
            for (name, value) in delta {
                match value {
                    _ if name == "role" => {}
                    Value::String(text) if name == "content" && !text.is_empty() => events += &self.text(&text),
                    value if is_empty(&value) => {}
                    _ => return Err(NotContinued::Differs),
                }
            }
            // Ending the block also means that no other engine can add to the text.
            if finish_reason.as_deref().is_some_and(|reason| reason != "abort") && self.begun.has_block {
                events += &self.begun.end_block();
            }
            match (finish_reason.as_deref(), stop_reason) {
                (None, _) => {}
                (Some("abort"), _) => {
                    let error = json!({"type": "api_error", "message": "the engine has aborted the request"});
                    events += &event("error", json!({"error": error}));
                }
                (Some("length"), _) => self.ended = ("max_tokens", Value::Null),
                (Some(_), stop @ Value::String(_)) => self.ended = ("stop_sequence", stop),
                (Some(_), _) => self.ended = ("end_turn", Value::Null),
            }
        }
        // The usage of the whole answer comes in a separate event at the end.
        if let Some(Usage { prompt_tokens, completion_tokens: Some(completion) }) = chunk.usage
            && is_usage
        {
            events += &self.begun.end(self.ended.0, &self.ended.1, (prompt_tokens, completion));
        }
        Ok(events)
    }

    fn text(&mut self, text: &str) -> String {
        let block = json!({"index": 0, "content_block": {"type": "text", "text": ""}});
        let start = if self.begun.has_block { String::new() } else { event("content_block_start", block) };
        self.begun.has_block = true;
        start + &event("content_block_delta", json!({"index": 0, "delta": {"type": "text_delta", "text": text}}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(message: &Value) -> Result<Value, NotContinued> {
        as_chat(message.to_string().as_bytes()).map(|chat| serde_json::from_slice(&chat).unwrap())
    }

    #[test]
    fn a_message_of_texts_becomes_the_chat_that_vllm_makes_of_it() {
        let text = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
        let message = json!({
            "model": "m", "max_tokens": 9, "stop_sequences": ["END"], "temperature": 0.5, "top_k": 3, "stream": true,
            "metadata": {"user_id": "u"}, "system": [text("Be "), text(""), text("brief.")],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [text("yes")]},
                {"role": "user", "content": [text("a"), text("b")]},
            ],
        });
        let want = json!({
            "model": "m", "max_tokens": 9, "stop": ["END"], "temperature": 0.5, "top_k": 3, "stream": true,
            "stream_options": {"include_usage": true},
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
        });
        assert_eq!(chat(&message), Ok(want));
        let plain = json!({"model": "m", "max_tokens": 1, "system": "s", "messages": []});
        assert_eq!(chat(&plain).unwrap()["messages"], json!([{"role": "system", "content": "s"}]));
    }

    #[test]
    fn all_but_texts_is_refused() {
        let image = json!({"type": "image", "source": {"type": "url", "url": "x"}});
        for turn in [
            json!({"role": "user", "content": [image]}),
            json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}),
            json!({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}),
            json!({"role": "system", "content": "x"}),
            json!({"role": "user", "content": [{"type": "text", "text": ""}]}),
            json!({"role": "user", "content": 7}),
            json!({"role": "user", "content": ["text"]}),
            json!("user"),
        ] {
            assert_eq!(chat(&json!({"messages": [turn]})), Err(NotContinued::Translation), "{turn}");
        }
        let billed = json!({"system": "x-anthropic-billing-header: a", "messages": []});
        assert_eq!(chat(&billed), Err(NotContinued::Translation));
        assert_eq!(as_chat(b"{\"messages\":1}"), Err(NotContinued::Unreadable));
    }

    fn begun(has_block: bool) -> Begun {
        let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg-1\",\
                     \"model\":\"m\",\"usage\":{\"input_tokens\":20,\"output_tokens\":0,\"cache_read_input_tokens\":16}}}\n";
        let (id, model, begun) = Begun::of(start.as_bytes(), has_block).unwrap();
        assert_eq!((id.as_str(), model.as_str()), ("\"msg-1\"", "\"m\""));
        begun
    }

    /// Name and data of the events for these data of a chat.
    fn events(has_block: bool, chat: &[Value]) -> Result<Vec<Value>, NotContinued> {
        let mut events = Events::new(begun(has_block));
        let mut found = Vec::new();
        for data in chat {
            let text = events.of(data.as_str().map_or(data.to_string(), str::to_owned).as_bytes())?;
            for event in text.split_terminator("\n\n") {
                let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
                let data: Value = serde_json::from_str(data).unwrap();
                assert_eq!(data["type"], name);
                found.push(data);
            }
        }
        Ok(found)
    }

    fn delta(delta: Value, finish: Value, stop: Value) -> Value {
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop}]})
    }

    #[test]
    fn the_events_of_a_chat_become_events_of_the_message() {
        let usage = json!({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 7}});
        for (finish, stop, reason, sequence) in [
            ("stop", json!(null), "end_turn", json!(null)),
            ("stop", json!(151643), "end_turn", json!(null)),
            ("stop", json!("END"), "stop_sequence", json!("END")),
            ("length", json!(null), "max_tokens", json!(null)),
        ] {
            let chat = [
                delta(json!({"content": "b", "tool_calls": [], "reasoning": null}), json!(null), json!(null)),
                delta(json!({"content": ""}), json!(finish), stop),
                usage.clone(),
                json!("[DONE]"),
            ];
            let want = [
                json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}}),
                json!({"type": "content_block_stop", "index": 0}),
                json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": {"input_tokens": 20, "output_tokens": 7, "cache_read_input_tokens": 16}}),
                json!({"type": "message_stop"}),
            ];
            assert_eq!(events(true, &chat).unwrap(), want);
            let without_block = events(false, &chat).unwrap();
            let start =
                json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}});
            assert_eq!((&without_block[0], &without_block[1..]), (&start, &want[..]));
        }
    }

    #[test]
    fn the_block_ends_with_the_finish_reason_so_that_nothing_is_added() {
        let found = events(true, &[delta(json!({"content": "b"}), json!("stop"), json!(null))]).unwrap();
        let kinds: Vec<&str> = found.iter().filter_map(|event| event["type"].as_str()).collect();
        assert_eq!(kinds, ["content_block_delta", "content_block_stop"]);
    }

    #[test]
    fn errors_pass_and_output_that_is_no_text_does_not_fit() {
        let error = json!({"message": "no", "type": "InternalServerError", "code": 500});
        let found = events(true, &[json!({"error": error})]).unwrap();
        assert_eq!(found, [json!({"type": "error", "error": error})]);
        let aborted = events(true, &[delta(json!({}), json!("abort"), json!(null))]).unwrap();
        assert_eq!(aborted[0]["type"], "error");
        for other in [json!({"reasoning": "hm"}), json!({"tool_calls": [{"index": 0}]})] {
            assert_eq!(events(true, &[delta(other, json!(null), json!(null))]), Err(NotContinued::Differs));
        }
    }
}
