//! Parses a response stream into messages. It shares no code with the gateway's parser
//! (`openai::sse`, `meter`), so a mistake there shows in the results.
//!
//! Lines end with LF or CRLF; a byte order mark may come first. A line `data: <JSON>` is one
//! message, and `data: [DONE]` is the end. JSON in several data lines is joined. Other lines are
//! ignored, except that after `event: error`, data without choices and usage is an error.
//!
//! As in `vllm bench serve`, `null` counts as absent, and some messages are *token events*. In
//! completions, `choices` must not be empty (the text may be). In chats, a delta must have
//! non-empty content, reasoning or calls, or empty content and no role, which excludes the first
//! chunk.
//!
//! A top-level `error` is a failure whatever the HTTP status. So is `finish_reason` `abort`, which
//! vLLM sends when it shuts down and which `vllm bench serve` counts as a success. Bounds:
//! [`MAX_LINE`], [`MAX_TEXT`], [`MAX_CHOICES`].

use std::borrow::Cow;

use memchr::memchr;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::load::body::Api;

/// The longest unfinished message, bytes.
pub const MAX_LINE: usize = 1 << 20;

/// The most bytes of a choice's text that are kept, about a million tokens.
pub const MAX_TEXT: usize = 4 << 20;

/// Number of choices that are distinguished. A higher index counts as the last of these choices.
pub const MAX_CHOICES: usize = 64;

/// One message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Whether this is a token event.
    pub token: bool,
    /// Prompt and completion tokens so far.
    pub usage: Option<Usage>,
    /// Whether the message has usage and no choice, so that only `[DONE]` follows.
    pub summary: bool,
    /// The error, if this is one.
    pub error: Option<StreamError>,
    /// Whether this is `[DONE]`.
    pub done: bool,
    /// Whether the server aborted the response (`finish_reason: abort`).
    pub aborted: bool,
    /// The choices mentioned: one bit for each index.
    pub choices: u64,
    /// The choices with a finish reason, as in `choices`.
    pub finished: u64,
}

/// Token counts by the server. An unreadable count is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated so far.
    pub completion_tokens: Option<u64>,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: Option<u64>,
}

impl Usage {
    fn read(raw: &RawValue) -> Option<Self> {
        let usage: serde_json::Map<String, serde_json::Value> = serde_json::from_str(raw.get()).ok()?;
        // Some servers write counts as floats.
        let count = |value: Option<&serde_json::Value>| {
            let value = value?;
            value.as_u64().or_else(|| value.as_f64().filter(|count| *count >= 0.0).map(|count| count as u64))
        };
        let details = usage.get("prompt_tokens_details");
        Some(Self {
            prompt_tokens: count(usage.get("prompt_tokens")),
            completion_tokens: count(usage.get("completion_tokens")),
            cached_tokens: count(details.and_then(|details| details.get("cached_tokens"))),
        })
    }
}

/// An error object inside a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamError {
    /// The error's `code`, if it is a number (vLLM: the HTTP status).
    pub code: Option<u16>,
}

/// Why a stream cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// A data line that is not the JSON of this API.
    #[error("a data line is not a JSON object of this API")]
    NotJson,
    /// A message longer than [`MAX_LINE`].
    #[error("a message is longer than {MAX_LINE} bytes")]
    TooLong,
}

/// Splits a stream into messages, whatever the read boundaries. A line is parsed before the blank
/// line after it, because vLLM writes each message on one line.
#[derive(Debug)]
pub struct EventReader {
    api: Api,
    unfinished: Vec<u8>,
    event: Event,
    texts: Option<Vec<ChoiceText>>,
}

#[derive(Debug, Default)]
struct Event {
    begun: bool,
    any_data: bool,
    error: bool,
    partial: Vec<u8>,
}

/// The output of one choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChoiceText {
    /// The text, without reasoning and calls.
    pub text: String,
    /// Reasoning, and the names and arguments of calls, which are tokens, too.
    pub other: String,
}

impl EventReader {
    /// A reader for one response stream.
    pub fn new(api: Api) -> Self {
        Self { api, unfinished: Vec::new(), event: Event::default(), texts: None }
    }

    /// Makes the reader keep the texts of the choices.
    #[must_use]
    pub fn keeping_text(self) -> Self {
        Self { texts: Some(Vec::new()), ..self }
    }

    /// The texts of the choices; `None` if they were not kept.
    pub fn into_texts(self) -> Option<Vec<ChoiceText>> {
        self.texts
    }

    /// Whether a data line was read.
    pub fn any_data(&self) -> bool {
        self.event.any_data
    }

    /// Reads the next piece and calls `each` for each message that it completes, in order.
    ///
    /// # Errors
    /// The piece cannot be read. `each` was called for the messages before the fault.
    pub fn feed(&mut self, mut piece: &[u8], mut each: impl FnMut(Message)) -> Result<(), EventError> {
        while let Some(end) = memchr(b'\n', piece) {
            let message = if self.unfinished.is_empty() {
                self.event.line(self.api, &piece[..end], self.texts.as_mut())?
            } else {
                self.keep(&piece[..end])?;
                let message = self.event.line(self.api, &self.unfinished, self.texts.as_mut());
                self.unfinished.clear();
                message?
            };
            if let Some(message) = message {
                each(message);
            }
            piece = &piece[end + 1..];
        }
        self.keep(piece)
    }

    /// Reads the end of the stream. As in `vllm bench serve`, a last line without an end counts.
    pub fn finish(&mut self, each: impl FnMut(Message)) -> Result<(), EventError> {
        self.feed(b"\n\n", each)
    }

    fn keep(&mut self, piece: &[u8]) -> Result<(), EventError> {
        if self.unfinished.len() + piece.len() > MAX_LINE {
            return Err(EventError::TooLong);
        }
        self.unfinished.extend_from_slice(piece);
        Ok(())
    }
}

impl Event {
    fn line(
        &mut self,
        api: Api,
        line: &[u8],
        texts: Option<&mut Vec<ChoiceText>>,
    ) -> Result<Option<Message>, EventError> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let line = if self.begun { line } else { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line) };
        self.begun = true;
        if line.is_empty() {
            self.error = false;
            return if self.partial.is_empty() { Ok(None) } else { Err(EventError::NotJson) };
        }
        if let Some(name) = line.strip_prefix(b"event:") {
            self.error = name.trim_ascii() == b"error";
        }
        let Some(value) = line.strip_prefix(b"data:") else { return Ok(None) };
        let value = value.trim_ascii();
        self.any_data = true;
        if value == b"[DONE]" {
            return Ok(Some(Message { done: true, ..Message::default() }));
        }
        if value.is_empty() {
            return Ok(None);
        }
        let value: Cow<'_, [u8]> = if self.partial.is_empty() {
            value.into()
        } else {
            self.partial.push(b'\n');
            self.partial.extend_from_slice(value);
            std::mem::take(&mut self.partial).into()
        };
        match read_message(api, &value, self.error, texts) {
            Some(message) => Ok(Some(message)),
            // A value that does not begin like an object cannot become one with more lines.
            None if value[0] != b'{' => Err(EventError::NotJson),
            None if value.len() > MAX_LINE => Err(EventError::TooLong),
            None => {
                self.partial = value.into_owned();
                Ok(None)
            }
        }
    }
}

/// `None` if the value is not an object, or is incomplete.
fn read_message(api: Api, value: &[u8], error: bool, texts: Option<&mut Vec<ChoiceText>>) -> Option<Message> {
    let chunk: Chunk<'_> = serde_json::from_slice(value).ok()?;
    let choices = chunk.choices.as_deref().unwrap_or_default();
    let delta = |choice: &Choice<'_>| choice.delta.as_ref().is_some_and(Delta::is_token);
    let mut message = Message {
        token: match api {
            Api::Completions => !choices.is_empty(),
            Api::Chat => choices.iter().any(delta),
        },
        usage: chunk.usage.and_then(Usage::read),
        ..Message::default()
    };
    message.summary = message.usage.is_some() && choices.is_empty();
    for choice in choices {
        let bit = 1 << choice.at();
        message.choices |= bit;
        let Some(reason) = choice.finish_reason.filter(|reason| reason.get() != "null") else { continue };
        message.finished |= bit;
        message.aborted |= reason.get() == "\"abort\"";
    }
    let failed = error && choices.is_empty() && message.usage.is_none();
    message.error = chunk.error.map(stream_error).or(failed.then_some(StreamError { code: None }));
    if let Some(texts) = texts {
        choices.iter().for_each(|choice| choice.say(texts));
    }
    Some(message)
}

/// vLLM always sends an object, but any value other than `null` is a failure.
fn stream_error(raw: &RawValue) -> StreamError {
    #[derive(Deserialize)]
    struct Coded {
        code: Option<u16>,
    }
    StreamError { code: serde_json::from_str::<Coded>(raw.get()).ok().and_then(|coded| coded.code) }
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    index: Option<&'a RawValue>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    role: Option<&'a RawValue>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow)]
    function_call: Option<&'a RawValue>,
}

fn present<'de: 'a, 'a, D: serde::Deserializer<'de>>(from: D) -> Result<Option<&'a RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

impl Choice<'_> {
    fn at(&self) -> usize {
        self.index.and_then(|index| index.get().parse::<usize>().ok()).unwrap_or(0).min(MAX_CHOICES - 1)
    }

    fn say(&self, texts: &mut Vec<ChoiceText>) {
        let at = self.at();
        if texts.len() <= at {
            texts.resize(at + 1, ChoiceText::default());
        }
        let string = |raw: Option<&RawValue>| serde_json::from_str::<String>(raw?.get()).ok();
        let push = |to: &mut String, said: Option<String>| {
            if let Some(said) = said.filter(|_| to.len() < MAX_TEXT) {
                to.push_str(&said);
            }
        };
        let ChoiceText { text, other } = &mut texts[at];
        push(text, string(self.text));
        let Some(delta) = &self.delta else { return };
        push(text, string(delta.content));
        // Some servers send the same text under both names.
        push(other, string(delta.reasoning).or_else(|| string(delta.reasoning_content)));
        let called = |raw: Option<&RawValue>| serde_json::from_str::<serde_json::Value>(raw?.get()).ok();
        let calls = called(delta.tool_calls).and_then(|calls| calls.as_array().cloned()).unwrap_or_default();
        let calls = calls.into_iter().map(|mut call| call["function"].take()).chain(called(delta.function_call));
        for function in calls {
            for part in ["name", "arguments"] {
                push(other, function[part].as_str().map(str::to_owned));
            }
        }
    }
}

impl Delta<'_> {
    fn is_token(&self) -> bool {
        let fields = [self.content, self.reasoning, self.reasoning_content, self.tool_calls, self.function_call];
        let says = fields.into_iter().flatten().any(|value| !is_empty(value));
        says || (self.role.is_none() && self.content.is_some_and(|content| content.get() == "\"\""))
    }
}

/// Whether the value counts as false in Python, the language of `vllm bench serve`.
fn is_empty(value: &RawValue) -> bool {
    matches!(value.get(), "\"\"" | "null" | "[]" | "{}" | "false" | "0")
}

#[cfg(test)]
mod tests;
