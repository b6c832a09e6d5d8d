//! Parses a response stream into messages.
//!
//! The gateway meters streams with `openai::sse` and `meter`. This parser shares no code with them, so that a mistake there
//! shows in the results.
//!
//! Framing: lines end with LF or CRLF. A line `data: <JSON>` is one message, and `data: [DONE]` ends the stream. Comments (`:`),
//! `event:` lines and blank lines are ignored. vLLM writes each message on one line, so a line is parsed as soon as it is
//! complete, without waiting for the blank line after it.
//!
//! These messages are *token events*, as in `vllm bench serve`:
//!
//! - completions: `choices` is not empty; the text may be;
//! - chat: the delta of a choice has non-empty content, reasoning, tool calls or function call, or it has empty content and no
//!   role. So the first chunk, which has the role, is not a token event.
//!
//! A message with a top-level `error` is a failure whatever the HTTP status was. So is a response that the server aborted
//! (`finish_reason` is `abort`, which vLLM sends when it shuts down); `vllm bench serve` counts that as a success. Bounds: at
//! most [`MAX_LINE`] bytes of an unfinished line are kept.

use memchr::memchr;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::load::body::Api;

/// The longest incomplete line that is kept, bytes: far longer than any event of a generation.
pub const MAX_LINE: usize = 1 << 20;

/// Bytes of a response's text after which no more of it is kept: about a million tokens.
pub const MAX_TEXT: usize = 4 << 20;

/// The content of one message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// It carried tokens, by the rule in the header.
    pub token: bool,
    /// It carried usage: prompt and completion tokens so far.
    pub usage: Option<Usage>,
    /// It was an error.
    pub error: Option<StreamError>,
    /// It was the end of the stream.
    pub done: bool,
    /// The server aborted the response (`finish_reason` is `abort`).
    pub aborted: bool,
}

/// Token counts as the server reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Tokens generated so far.
    #[serde(default)]
    pub completion_tokens: u64,
    /// Tokens of the prompt that were found in the prefix cache, if the server reports it.
    #[serde(default, rename = "prompt_tokens_details", deserialize_with = "cached_tokens")]
    pub cached_tokens: Option<u64>,
}

fn cached_tokens<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    struct Details {
        cached_tokens: Option<u64>,
    }
    Ok(Option::<Details>::deserialize(from)?.and_then(|details| details.cached_tokens))
}

/// An error object inside a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamError {
    /// Its `code`, when that is a number (vLLM puts the HTTP status there).
    pub code: Option<u16>,
}

/// Why a stream cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// A data line that is not the JSON of this API.
    #[error("a data line is not a JSON object of this API")]
    NotJson,
    /// A line longer than [`MAX_LINE`].
    #[error("a line is longer than {MAX_LINE} bytes")]
    TooLong,
}

/// Splits a stream into messages, whatever the boundaries of its reads.
#[derive(Debug)]
pub struct EventReader {
    api: Api,
    unfinished: Vec<u8>,
    /// The text so far, if it is to be kept.
    text: Option<String>,
}

impl EventReader {
    /// A reader for one response stream.
    pub fn new(api: Api) -> Self {
        Self { api, unfinished: Vec::new(), text: None }
    }

    /// Makes the reader keep the text of the first choice.
    #[must_use]
    pub fn keeping_text(self) -> Self {
        Self { text: Some(String::new()), ..self }
    }

    /// The text; `None` if it was not kept.
    pub fn into_text(self) -> Option<String> {
        self.text
    }

    /// Reads the next piece and calls `each` for each message that it completes, in order.
    ///
    /// # Errors
    /// The piece cannot be read. `each` was called for the messages before the fault.
    pub fn feed(&mut self, mut piece: &[u8], mut each: impl FnMut(Message)) -> Result<(), EventError> {
        while let Some(end) = memchr(b'\n', piece) {
            let message = if self.unfinished.is_empty() {
                read_line(self.api, &piece[..end], self.text.as_mut())?
            } else {
                self.keep(&piece[..end])?;
                let message = read_line(self.api, &self.unfinished, self.text.as_mut());
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

    fn keep(&mut self, piece: &[u8]) -> Result<(), EventError> {
        if self.unfinished.len() + piece.len() > MAX_LINE {
            return Err(EventError::TooLong);
        }
        self.unfinished.extend_from_slice(piece);
        Ok(())
    }
}

fn read_line(api: Api, line: &[u8], text: Option<&mut String>) -> Result<Option<Message>, EventError> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let Some(value) = line.strip_prefix(b"data:") else { return Ok(None) };
    let value = value.strip_prefix(b" ").unwrap_or(value);
    if value == b"[DONE]" {
        return Ok(Some(Message { done: true, ..Message::default() }));
    }
    let chunk: Chunk<'_> = serde_json::from_slice(value).map_err(|_| EventError::NotJson)?;
    let token = match api {
        Api::Completions => !chunk.choices.is_empty(),
        Api::Chat => chunk.choices.iter().any(|choice| choice.delta.as_ref().is_some_and(Delta::is_token)),
    };
    if let Some(text) = text {
        let said = chunk.choices.first().and_then(|choice| choice.text.or_else(|| choice.delta.as_ref()?.content));
        let said = said.and_then(|said| serde_json::from_str::<String>(said.get()).ok()).unwrap_or_default();
        if text.len() < MAX_TEXT {
            text.push_str(&said);
        }
    }
    let aborted = chunk.choices.iter().any(|choice| choice.finish_reason.is_some_and(|why| why.get() == "\"abort\""));
    Ok(Some(Message { token, usage: chunk.usage, error: chunk.error.map(stream_error), done: false, aborted }))
}

/// `error` is an object in every version of vLLM; anything else still means that it failed.
fn stream_error(raw: &RawValue) -> StreamError {
    #[derive(Deserialize)]
    struct Coded {
        code: Option<u16>,
    }
    StreamError { code: serde_json::from_str::<Coded>(raw.get()).ok().and_then(|coded| coded.code) }
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
}

/// `role` counts as present even when it is `null`.
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

impl Delta<'_> {
    fn is_token(&self) -> bool {
        let fields = [self.content, self.reasoning, self.reasoning_content, self.tool_calls, self.function_call];
        let says = fields.into_iter().flatten().any(|value| !is_empty(value));
        says || (self.role.is_none() && self.content.is_some_and(|content| content.get() == "\"\""))
    }
}

/// Values that are falsy in Python, the language of `vllm bench serve`.
fn is_empty(value: &RawValue) -> bool {
    matches!(value.get(), "\"\"" | "null" | "[]" | "{}" | "false" | "0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read_all(api: Api, pieces: &[&[u8]]) -> Result<Vec<Message>, EventError> {
        let mut reader = EventReader::new(api);
        let mut messages = Vec::new();
        for piece in pieces {
            reader.feed(piece, |message| messages.push(message))?;
        }
        Ok(messages)
    }

    const TOKEN: Message = Message { token: true, usage: None, error: None, done: false, aborted: false };
    const NOTHING: Message = Message { token: false, usage: None, error: None, done: false, aborted: false };
    const DONE: Message = Message { token: false, usage: None, error: None, done: true, aborted: false };

    const COMPLETION: &[u8] = b": keep-alive\n\n\
        data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":null}]}\n\n\
        data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\" a\",\"finish_reason\":\"length\"}]}\r\n\r\n\
        data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}}\n\n\
        data: [DONE]\n\n";

    fn completion_messages() -> Vec<Message> {
        let usage =
            Message { usage: Some(Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: None }), ..NOTHING };
        vec![TOKEN, TOKEN, usage, DONE]
    }

    #[test]
    fn a_completion_event_is_any_chunk_with_choices() {
        assert_eq!(read_all(Api::Completions, &[COMPLETION]), Ok(completion_messages()));
    }

    #[test]
    fn a_chat_event_has_content_reasoning_or_calls_and_the_role_chunk_is_none() {
        let of = |delta: &str| {
            let line = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":null}}]}}\n\n");
            read_all(Api::Chat, &[line.as_bytes()]).unwrap()[0]
        };
        assert_eq!(of(r#"{"role":"assistant","content":""}"#), NOTHING);
        assert_eq!(of(r#"{"content":null}"#), NOTHING);
        assert_eq!(of(r#"{"content":""}"#), TOKEN);
        assert_eq!(of(r#"{"content":"a\"b"}"#), TOKEN);
        assert_eq!(of(r#"{"reasoning":"hm"}"#), TOKEN);
        assert_eq!(of(r#"{"tool_calls":[{"index":0}]}"#), TOKEN);
        assert_eq!(of(r#"{"reasoning":"","content":null}"#), NOTHING);
        assert_eq!(of(r#"{"role":"assistant","content":"x"}"#), TOKEN);
        assert_eq!(of(r#"{"role":null,"content":""}"#), NOTHING);
        assert_eq!(of(r#"{"tool_calls":[]}"#), NOTHING);
    }

    #[test]
    fn the_text_is_kept_on_request() {
        let text = |api, stream: &[u8]| {
            let mut reader = EventReader::new(api).keeping_text();
            reader.feed(stream, |_| {}).unwrap();
            reader.into_text().unwrap()
        };
        assert_eq!(text(Api::Completions, COMPLETION), " a");
        let chat = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\\n\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n";
        assert_eq!(text(Api::Chat, chat), "a\nb");
    }

    #[test]
    fn cached_tokens_are_read_if_reported() {
        let line = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n";
        assert_eq!(read_all(Api::Chat, &[line]).unwrap()[0].usage.unwrap().cached_tokens, Some(8));
        let null = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"prompt_tokens_details\":null}}\n\n";
        assert_eq!(read_all(Api::Chat, &[null]).unwrap()[0].usage.unwrap().cached_tokens, None);
    }

    #[test]
    fn an_aborted_response_is_reported() {
        let line = b"data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\n";
        assert!(read_all(Api::Completions, &[line]).unwrap()[0].aborted);
    }

    #[test]
    fn an_error_object_is_seen_with_and_without_a_numeric_code() {
        let with = b"event: error\ndata: {\"error\":{\"message\":\"busy\",\"code\":503}}\n\n";
        let error = Message { error: Some(StreamError { code: Some(503) }), ..NOTHING };
        assert_eq!(read_all(Api::Chat, &[with]), Ok(vec![error]));
        let without = b"data: {\"error\":{\"message\":\"busy\",\"code\":\"upstream_broke\"}}\n\n";
        let error = Message { error: Some(StreamError { code: None }), ..NOTHING };
        assert_eq!(read_all(Api::Chat, &[without]), Ok(vec![error]));
    }

    #[test]
    fn garbage_and_endless_lines_are_errors() {
        assert_eq!(read_all(Api::Chat, &[b"data: <html>\n"]), Err(EventError::NotJson));
        let half = vec![b'x'; MAX_LINE / 2 + 1];
        assert_eq!(read_all(Api::Chat, &[&half, &half]), Err(EventError::TooLong));
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_messages(mut cuts in proptest::collection::vec(0..COMPLETION.len(), 0..12)) {
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut from = 0;
            for cut in cuts {
                pieces.push(&COMPLETION[from..cut]);
                from = cut;
            }
            pieces.push(&COMPLETION[from..]);
            prop_assert_eq!(read_all(Api::Completions, &pieces), Ok(completion_messages()));
        }
    }
}
