//! Recognises refusals by one engine that say nothing about other engines: the engine lacks the
//! model, the route or the data-parallel rank, has too low a context limit, or its core has died.
//!
//! A refusal is recognised by status and by the texts of vLLM since 0.6 and of other
//! OpenAI-compatible servers. An engine may repeat text of the client, so a text counts only if it
//! begins like the engine's own message. No client can make an engine look as if it served less.
//! Bounds: [`PEEK_BYTES`] of a response are read, in [`PEEK_TIME`] at most. All bytes read are
//! passed on if the request goes to no other engine.

use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;

use super::exchange::ResponseHead;
use sluice_core::vllm::failure::CORE_DIED;

/// The most bytes of a refusal that are read before it is judged.
pub(super) const PEEK_BYTES: usize = 64 << 10;
/// How long the body of a refusal may take.
pub(super) const PEEK_TIME: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Model,
    Route,
    /// The data-parallel rank of the backend.
    Rank,
    /// The length of the prompt; with the engine's limit in tokens, if the engine gives one.
    Length(Option<u64>),
}

/// Whether a response with this head may say that another engine could serve the request.
pub(super) fn may_be(head: &ResponseHead) -> bool {
    let known = [404, 405, 400, 500];
    known.contains(&head.status.as_u16()) && !head.is_coded()
}

/// Whether a body of status 500 says that the engine core has died: vLLM's API server outlives the
/// core for a moment. Any other 500 may be the request's fault.
pub(super) fn is_dead(body: &[u8]) -> bool {
    EngineError::read(body).message.starts_with(CORE_DIED)
}

/// The property that the engine lacks, according to the response.
pub(super) fn judge(status: StatusCode, body: &[u8]) -> Option<Refused> {
    let error = EngineError::read(body);
    match status {
        StatusCode::METHOD_NOT_ALLOWED => Some(Refused::Route),
        StatusCode::NOT_FOUND => not_found(body, &error),
        StatusCode::BAD_REQUEST => bad_request(&error),
        _ => None,
    }
}

/// Beginnings of messages about an unknown model. A message that has the model's name elsewhere may
/// be about something else.
const STARTS: [&str; 7] = ["the model", "model", "lora", "the lora", "unknown model", "no such model", "no model"];

fn not_found(body: &[u8], error: &EngineError) -> Option<Refused> {
    let message = error.message.to_ascii_lowercase();
    let names_model = STARTS.iter().any(|start| message.starts_with(start));
    let is_missing = ["not exist", "not found", "no such", "unknown"].iter().any(|words| message.contains(words));
    if error.is_about_model() || (names_model && is_missing) {
        return Some(Refused::Model);
    }
    // The answers to unknown paths of FastAPI, and of servers that send no body.
    let nothing = body.trim_ascii().is_empty() || matches!(&*message, "not found" | "404 page not found");
    nothing.then_some(Refused::Route)
}

/// Beginnings of messages that give the context limit; the number follows the second text.
const LIMITS: [(&str, &str); 6] = [
    ("this model's maximum context length is", "maximum context length is "),
    ("'max_tokens' or 'max_completion_tokens' is too large", "maximum context length is "),
    ("max_tokens=", "max_model_len="),
    ("the decoder prompt", "maximum model length of "),
    ("the prompt (", "maximum model length of "),
    ("the input (", "context length ("),
];

/// Whether the engine says that it does not have the rank which the gateway chose. No client
/// chooses a rank.
pub(super) fn lacks_rank(message: &str) -> bool {
    message.starts_with("data_parallel_rank ") && message.contains("is out of range")
}

fn bad_request(error: &EngineError) -> Option<Refused> {
    if error.is_about_model() {
        return Some(Refused::Model);
    }
    let message = error.message.to_ascii_lowercase();
    if lacks_rank(&message) {
        return Some(Refused::Rank);
    }
    if let Some((_, before)) = LIMITS.iter().find(|(start, _)| message.starts_with(start)) {
        let number = message.find(before).map(|at| &message[at + before.len()..]);
        let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
        let limit = number.and_then(|text| text[..digits(text)].parse().ok());
        // A message with this beginning but without a limit is another complaint.
        return limit.filter(|limit| *limit > 0).map(|limit| Refused::Length(Some(limit)));
    }
    if error.code == "context_length_exceeded" || error.kind == "exceed_context_size_error" {
        return Some(Refused::Length(None));
    }
    let starts = ["the model does not support ", "this model does not support "];
    (starts.iter().any(|start| message.starts_with(start)) && message.contains(" api")).then_some(Refused::Route)
}

/// An error as engines send it: `{"error":{..}}` of OpenAI and Anthropic, `{"object":"error",..}`
/// of older vLLMs, `{"detail":".."}` of FastAPI, or plain text.
#[derive(Debug, Default)]
struct EngineError {
    message: String,
    kind: String,
    code: String,
    param: String,
}

impl EngineError {
    fn read(body: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Body {
            error: Option<serde_json::Value>,
            #[serde(flatten)]
            rest: serde_json::Map<String, serde_json::Value>,
        }
        let Ok(read) = serde_json::from_slice::<Body>(body) else {
            let message = String::from_utf8_lossy(body).trim().to_owned();
            return Self { message, ..Self::default() };
        };
        let members = match read.error {
            Some(serde_json::Value::Object(members)) => members,
            Some(serde_json::Value::String(message)) => return Self { message, ..Self::default() },
            _ => read.rest,
        };
        let text = |name: &str| members.get(name).and_then(|value| value.as_str()).unwrap_or_default().to_owned();
        let message = if members.contains_key("message") { text("message") } else { text("detail") };
        Self { message, kind: text("type"), code: text("code"), param: text("param") }
    }

    fn is_about_model(&self) -> bool {
        self.code == "model_not_found" || (self.param == "model" && self.kind == "NotFoundError")
    }
}

#[cfg(test)]
mod tests;
