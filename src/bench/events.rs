//! What the bytes of a streamed answer mean to a client.
//!
//! A reader of its own, on purpose: the gateway meters streams with `openai::sse` and `meter`, and a
//! mistake there must not hide itself by being made again on the side that checks.
//!
//! Framing: lines end with LF or CRLF; a line `data: <JSON>` is one message, `data: [DONE]` ends the
//! stream; comments (`:` keep-alives), `event:` lines and blank lines carry nothing. vLLM writes each
//! message on one line, so a line that is complete is read at once, without waiting for the blank
//! line behind it. At most [`MAX_LINE`] bytes of an unfinished line are kept.
//!
//! A message is a *token event*, as `vllm bench serve` counts them:
//!
//! - completions: `choices` is not empty (the text may be);
//! - chat: some choice's delta has reasoning, tool calls, a function call or content, where empty
//!   content counts only without a role. So the opening role chunk is not an event.
//!
//! A message with a top-level `error` is a failure whatever the HTTP status was.

use memchr::memchr;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::workload::Api;

/// The longest line kept while its end has not arrived: far above any event of a generation.
pub const MAX_LINE: usize = 1 << 20;

/// What one message said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// It carried tokens (see the module's rule).
    pub token: bool,
    /// It carried usage: prompt and completion tokens so far.
    pub usage: Option<Usage>,
    /// It was an error.
    pub error: Option<StreamError>,
    /// It was the end of the stream.
    pub done: bool,
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

/// Cuts a stream into messages, whatever pieces it arrives in.
#[derive(Debug)]
pub struct EventReader {
    api: Api,
    unfinished: Vec<u8>,
}

impl EventReader {
    /// A reader for the stream of one answer.
    pub fn new(api: Api) -> Self {
        Self { api, unfinished: Vec::new() }
    }

    /// Reads the next piece and hands over each message that it completes, in order.
    ///
    /// # Errors
    /// The piece cannot be read; messages before the fault have been handed over.
    pub fn feed(&mut self, mut piece: &[u8], mut each: impl FnMut(Message)) -> Result<(), EventError> {
        while let Some(end) = memchr(b'\n', piece) {
            let message = if self.unfinished.is_empty() {
                read_line(self.api, &piece[..end])?
            } else {
                self.keep(&piece[..end])?;
                let message = read_line(self.api, &self.unfinished);
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

fn read_line(api: Api, line: &[u8]) -> Result<Option<Message>, EventError> {
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
    Ok(Some(Message { token, usage: chunk.usage, error: chunk.error.map(stream_error), done: false }))
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
    delta: Option<Delta<'a>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    role: Option<IgnoredAny>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    reasoning: Option<IgnoredAny>,
    reasoning_content: Option<IgnoredAny>,
    tool_calls: Option<IgnoredAny>,
    function_call: Option<IgnoredAny>,
}

impl Delta<'_> {
    fn is_token(&self) -> bool {
        let thought_or_call = self.reasoning.is_some()
            || self.reasoning_content.is_some()
            || self.tool_calls.is_some()
            || self.function_call.is_some();
        let says = self.content.is_some_and(|content| content.get() != "\"\"" || self.role.is_none());
        thought_or_call || says
    }
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

    const TOKEN: Message = Message { token: true, usage: None, error: None, done: false };
    const NOTHING: Message = Message { token: false, usage: None, error: None, done: false };
    const DONE: Message = Message { token: false, usage: None, error: None, done: true };

    const COMPLETION: &[u8] = b": keep-alive\n\n\
        data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":null}]}\n\n\
        data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\" a\",\"finish_reason\":\"length\"}]}\r\n\r\n\
        data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}}\n\n\
        data: [DONE]\n\n";

    fn completion_messages() -> Vec<Message> {
        let usage = Message { usage: Some(Usage { prompt_tokens: 3, completion_tokens: 2 }), ..NOTHING };
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
