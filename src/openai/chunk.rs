//! What one event of a stream means, in each of the four dialects.
//!
//! The meter needs little of an event: does it carry output, does it finish, does it report usage, is it
//! an error, is it the end? [`read`] answers that. Output is text, reasoning, a refusal or a tool call that is not empty, or
//! a finish reason; a chunk with only a role or an empty delta is not output (the definition of TTFT in the contract).
//! All choices count alike, whatever their index.
//!
//! Dialects: `choices` (chat, completions and transcriptions differ only in where the text is), Responses (`response.*`
//! events; the terminal one has the usage) and Messages (Anthropic: usage in `message_start` and `message_delta`).
//!
//! The shapes that vLLM sends thousands of times in a row are recognised by [`super::fast`]; everything else
//! is scanned here. Both give the same result; a property test holds them to it. An event that cannot be read is
//! `Other`: we look on, the client judges.

use super::answer::{self, FlatError, StreamError, TokenUsage};
use super::fast;
pub use super::fast::Memo;
use super::route::Route;
use super::scan::{Kind, ScanError, Scanner, Span};
use super::sse::Fields;

/// The language in which a stream's events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `choices[].delta` or `choices[].text`, ended by `[DONE]`.
    Choices,
    /// OpenAI Responses: `event: response.*`.
    Responses,
    /// Anthropic Messages.
    Messages,
}

impl Dialect {
    /// The dialect of a route's streams. Routes that never stream get [`Dialect::Choices`], where errors look the same.
    pub const fn of(route: Route) -> Self {
        match route {
            Route::Responses => Self::Responses,
            Route::Messages => Self::Messages,
            _ => Self::Choices,
        }
    }
}

/// What kind of event it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventKind {
    /// Output: text, reasoning, tool call or (with choices) a finish reason.
    Content,
    /// Part of the answer, but without output: a role, an empty delta, the frame of a message.
    Empty,
    /// Usage and no choices: the event that `include_usage` causes.
    Usage,
    /// An error.
    Error,
    /// The end: `[DONE]`, `message_stop`.
    Done,
    /// Anything else: comments, pings, what cannot be read.
    #[default]
    Other,
}

/// One event, understood.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// Its kind.
    pub kind: EventKind,
    /// Whether it says why the answer ends (a finish reason, a stop reason, a terminal response).
    pub finish: bool,
    /// Usage that it reports; on content events only with continuous usage.
    pub usage: Option<TokenUsage>,
    /// The error, on [`EventKind::Error`].
    pub error: Option<Box<StreamError>>,
}

/// Reads one event, given with its lines (see [`RawEvent::bytes`](super::sse::RawEvent)).
pub fn read(dialect: Dialect, event: &[u8]) -> Event {
    read_next(dialect, event, &mut Memo::default())
}

/// The same for the next event of a stream, recognising what repeats from event to event. `memo` belongs to the stream.
pub fn read_next(dialect: Dialect, event: &[u8], memo: &mut Memo) -> Event {
    if dialect == Dialect::Choices
        && let Some(event) = fast::choices(event, memo)
    {
        return event;
    }
    read_slowly(dialect, event)
}

/// The same without the fast path; for comparison in tests and benches.
pub fn read_slowly(dialect: Dialect, event: &[u8]) -> Event {
    let fields = Fields::of(event);
    let Some(data) = fields.data else { return Event::default() };
    if *data == *b"[DONE]" {
        return Event { kind: EventKind::Done, ..Event::default() };
    }
    let read = match dialect {
        Dialect::Choices => choices(&data),
        Dialect::Responses => typed(&data, fields.name).map(Typed::response),
        Dialect::Messages => typed(&data, fields.name).map(Typed::message),
    };
    read.unwrap_or_default()
}

/// Where the member `usage` stands in an event of the choices dialect, with the comma that belongs to it:
/// what to cut so that the event reads as if usage had not been asked for. `None` when it is not there.
pub fn usage_member(event: &[u8]) -> Option<Span> {
    let json = memchr::memchr(b'{', event)?;
    let mut scanner = Scanner::new(&event[json..]);
    let mut first = true;
    let mut before = 1;
    let mut found = None;
    let scanned = scanner.object(|scanner, key| {
        let is_usage = &*key.bytes() == b"usage";
        scanner.skip()?;
        if is_usage {
            found = Some((first, Span { start: before, end: scanner.position() }));
        }
        (first, before) = (false, scanner.position());
        Ok::<_, ScanError>(())
    });
    scanned.ok()?;
    let (first, mut span) = found?;
    span = Span { start: span.start + json, end: span.end + json };
    // The comma stands before the member, except before the first one: then the one behind it goes.
    if first {
        let blanks = event[span.end..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        if event.get(span.end + blanks) == Some(&b',') {
            span.end += blanks + 1;
        }
    }
    Some(span)
}

fn choices(data: &[u8]) -> Result<Event, ScanError> {
    let mut event = Event::default();
    let mut flat = FlatError::default();
    let mut error = None;
    let (mut any, mut content) = (false, false);
    let mut scanner = Scanner::new(data);
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"choices" if scanner.kind()? == Kind::Array => {
                scanner.array(|scanner| {
                    any = true;
                    let (has_content, finish) = choice(scanner)?;
                    content |= has_content;
                    event.finish |= finish;
                    Ok::<_, ScanError>(())
                })?;
            }
            b"usage" => event.usage = answer::usage(scanner)?,
            b"error" => error = answer::error(scanner)?,
            key => flat.member(scanner, key)?,
        }
        Ok::<_, ScanError>(())
    })?;
    scanner.end()?;
    event.error = error.or(flat.found()).map(Box::new);
    event.kind = match () {
        () if event.error.is_some() => EventKind::Error,
        () if content || event.finish => EventKind::Content,
        () if any => EventKind::Empty,
        () if event.usage.is_some() => EventKind::Usage,
        () => EventKind::Other,
    };
    Ok(event)
}

/// Whether a choice has content, and whether it has a finish reason.
fn choice(scanner: &mut Scanner<'_>) -> Result<(bool, bool), ScanError> {
    let (mut content, mut finish) = (false, false);
    if scanner.kind()? != Kind::Object {
        return scanner.skip().map(|_| (false, false));
    }
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"delta" if scanner.kind()? == Kind::Object => {
                scanner.object(|scanner, key| {
                    match &*key.bytes() {
                        b"content" | b"reasoning" | b"reasoning_content" | b"tool_calls" | b"function_call"
                        | b"refusal" => content |= is_filled(scanner)?,
                        _ => drop(scanner.skip()?),
                    }
                    Ok::<_, ScanError>(())
                })?;
            }
            b"text" => content |= is_filled(scanner)?,
            b"finish_reason" => finish |= is_filled(scanner)?,
            _ => drop(scanner.skip()?),
        }
        Ok::<_, ScanError>(())
    })?;
    Ok((content, finish))
}

/// Takes a value and tells whether it is a text, list or object that is not empty.
fn is_filled(scanner: &mut Scanner<'_>) -> Result<bool, ScanError> {
    Ok(match scanner.kind()? {
        Kind::String => !scanner.text()?.raw.is_empty(),
        Kind::Array | Kind::Object => {
            let raw = scanner.skip_raw()?;
            raw[1..raw.len() - 1].iter().any(|byte| !byte.is_ascii_whitespace())
        }
        _ => scanner.skip().map(|_| false)?,
    })
}

/// The members of an event that says its own type.
#[derive(Default)]
struct Typed {
    name: String,
    filled: bool,
    stopped: bool,
    usage: Option<TokenUsage>,
    error: Option<StreamError>,
    flat: FlatError,
}

fn typed(data: &[u8], name: Option<&[u8]>) -> Result<Typed, ScanError> {
    let mut typed = Typed { name: String::from_utf8_lossy(name.unwrap_or_default()).into_owned(), ..Typed::default() };
    let mut scanner = Scanner::new(data);
    scanner.object(|scanner, key| {
        let key = key.bytes();
        match &*key {
            b"type" if scanner.kind()? == Kind::String => typed.name = scanner.text()?.decode().into_owned(),
            b"delta" => delta(scanner, &mut typed)?,
            b"usage" => typed.usage = answer::usage(scanner)?.or(typed.usage),
            b"error" => typed.error = answer::error(scanner)?,
            b"response" | b"message" if scanner.kind()? == Kind::Object => {
                scanner.object(|scanner, key| {
                    match &*key.bytes() {
                        b"usage" => typed.usage = answer::usage(scanner)?.or(typed.usage),
                        b"error" => typed.error = answer::error(scanner)?,
                        _ => drop(scanner.skip()?),
                    }
                    Ok::<_, ScanError>(())
                })?;
            }
            key => typed.flat.member(scanner, key)?,
        }
        Ok::<_, ScanError>(())
    })?;
    scanner.end()?;
    Ok(typed)
}

/// A text (Responses) or an object with text, thinking, partial JSON or a stop reason (Messages).
fn delta(scanner: &mut Scanner<'_>, typed: &mut Typed) -> Result<(), ScanError> {
    if scanner.kind()? != Kind::Object {
        typed.filled |= is_filled(scanner)?;
        return Ok(());
    }
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"text" | b"thinking" | b"partial_json" => typed.filled |= is_filled(scanner)?,
            b"stop_reason" => typed.stopped |= is_filled(scanner)?,
            _ => drop(scanner.skip()?),
        }
        Ok::<_, ScanError>(())
    })?;
    Ok(())
}

impl Typed {
    fn response(self) -> Event {
        let usage = self.usage;
        match self.name.as_str() {
            "response.completed" | "response.incomplete" => {
                Event { kind: EventKind::Usage, finish: true, usage, error: None }
            }
            "response.failed" | "error" => self.failed(),
            name if name.ends_with(".delta") && self.filled => {
                Event { kind: EventKind::Content, usage, ..Event::default() }
            }
            _ if self.error.is_some() => self.failed(),
            name if name.starts_with("response.") => Event { kind: EventKind::Empty, ..Event::default() },
            _ => Event::default(),
        }
    }

    fn message(self) -> Event {
        let usage = self.usage;
        let event = |kind, finish| Event { kind, finish, usage, error: None };
        match self.name.as_str() {
            "content_block_delta" if self.filled => event(EventKind::Content, false),
            "message_start" | "content_block_start" | "content_block_delta" | "content_block_stop" => {
                event(EventKind::Empty, false)
            }
            "message_delta" => event(EventKind::Usage, self.stopped),
            "message_stop" => event(EventKind::Done, false),
            _ if self.name == "error" || self.error.is_some() => self.failed(),
            _ => Event::default(),
        }
    }

    fn failed(self) -> Event {
        let error = self.error.unwrap_or_else(|| self.flat.into_fields());
        Event { kind: EventKind::Error, finish: false, usage: self.usage, error: Some(Box::new(error)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn chat(data: &str) -> Event {
        read(Dialect::Choices, format!("data: {data}\n\n").as_bytes())
    }

    fn kind(data: &str) -> EventKind {
        chat(data).kind
    }

    #[test]
    fn output_is_what_the_contract_calls_output() {
        use EventKind::{Content, Empty};
        let delta =
            |delta: &str| kind(&format!(r#"{{"choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}"#));
        assert_eq!(delta(r#"{"role":"assistant","content":""}"#), Empty);
        assert_eq!(delta(r#"{"content":""}"#), Empty);
        assert_eq!(delta(r#"{"content":null}"#), Empty);
        assert_eq!(delta(r#"{"tool_calls":[]}"#), Empty);
        assert_eq!(delta("{}"), Empty);
        for filled in [
            r#"{"content":"a"}"#,
            r#"{"content":" "}"#,
            r#"{"reasoning":"a"}"#,
            r#"{"reasoning_content":"a"}"#,
            r#"{"tool_calls":[{"index":0}]}"#,
            r#"{"function_call":{"name":"f"}}"#,
        ] {
            assert_eq!(delta(filled), Content, "{filled}");
        }
        let last = chat(r#"{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}"#);
        assert_eq!((last.kind, last.finish), (Content, true));
        assert_eq!(kind(r#"{"choices":[{"index":0,"text":"","finish_reason":null}]}"#), Empty);
        assert_eq!(kind(r#"{"choices":[{"index":1,"text":"x","finish_reason":null}]}"#), Content);
    }

    #[test]
    fn usage_errors_and_the_end_are_told_apart() {
        let usage = chat(r#"{"choices":[],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2}}"#);
        assert_eq!(usage.kind, EventKind::Usage);
        assert_eq!(usage.usage, Some(TokenUsage { prompt: Some(5), completion: Some(2), cached: None }));
        let error = chat(r#"{"error":{"message":"busy","type":"x","param":null,"code":503}}"#);
        assert_eq!((error.kind, error.error.unwrap().code), (EventKind::Error, Some(503)));
        let flat = chat(r#"{"object":"error","message":"old","type":"x","param":null,"code":500}"#);
        assert_eq!((flat.kind, flat.error.unwrap().code), (EventKind::Error, Some(500)));
        assert_eq!(kind("[DONE]"), EventKind::Done);
        assert_eq!(read(Dialect::Choices, b": keep-alive\n\n").kind, EventKind::Other);
        assert_eq!(kind(r#"{"choices":[{"delta":{"content":"a"#), EventKind::Other);
        let talk = kind(r#"{"choices":[{"index":0,"delta":{"content":"{\"error\":1}"},"finish_reason":null}]}"#);
        assert_eq!(talk, EventKind::Content);
    }

    #[test]
    fn responses_events_are_understood() {
        let of =
            |name: &str, data: &str| read(Dialect::Responses, format!("event: {name}\ndata: {data}\n\n").as_bytes());
        let delta = of(
            "response.output_text.delta",
            r#"{"type":"response.output_text.delta","delta":"a","sequence_number":4}"#,
        );
        assert_eq!(delta.kind, EventKind::Content);
        assert_eq!(
            of("response.created", r#"{"type":"response.created","response":{"usage":null,"error":null}}"#).kind,
            EventKind::Empty
        );
        let end = of(
            "response.completed",
            r#"{"type":"response.completed","response":{"usage":{"input_tokens":5,"output_tokens":2}}}"#,
        );
        assert!(end.finish);
        assert_eq!(end.usage, Some(TokenUsage { prompt: Some(5), completion: Some(2), cached: None }));
        let failed = of(
            "response.failed",
            r#"{"type":"response.failed","response":{"error":{"code":"server_error","message":"m"}}}"#,
        );
        assert_eq!((failed.kind, failed.error.unwrap().message.as_str()), (EventKind::Error, "m"));
        let error = of("error", r#"{"type":"error","code":"503","message":"m"}"#);
        assert_eq!(error.error.unwrap().code, Some(503));
    }

    #[test]
    fn anthropic_events_are_understood() {
        let of = |data: &str| read(Dialect::Messages, format!("event: x\ndata: {data}\n\n").as_bytes());
        let start =
            of(r#"{"type":"message_start","message":{"content":[],"usage":{"input_tokens":9,"output_tokens":0}}}"#);
        assert_eq!((start.kind, start.usage.unwrap().prompt), (EventKind::Empty, Some(9)));
        assert_eq!(
            of(r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}"#).kind,
            EventKind::Content
        );
        assert_eq!(
            of(r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":""}}"#).kind,
            EventKind::Empty
        );
        let end = of(r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":3}}"#);
        assert_eq!((end.finish, end.usage.unwrap().completion), (true, Some(3)));
        assert_eq!(of(r#"{"type":"message_stop"}"#).kind, EventKind::Done);
        assert_eq!(of(r#"{"type":"ping"}"#).kind, EventKind::Other);
        let error = of(r#"{"type":"error","error":{"type":"overloaded_error","message":"m"}}"#);
        assert_eq!(error.kind, EventKind::Error);
    }

    #[test]
    fn cutting_usage_leaves_valid_json_without_it() {
        for (json, want) in [
            (r#"{"id":"x","usage":{"a":1}}"#, r#"{"id":"x"}"#),
            (r#"{"usage":{"a":1},"id":"x"}"#, r#"{"id":"x"}"#),
            (r#"{"a":[{"usage":1}], "usage" : {"a":1} ,"id":"x"}"#, r#"{"a":[{"usage":1}] ,"id":"x"}"#),
            (r#"{"usage":7}"#, "{}"),
        ] {
            let event = format!("data: {json}\n\n");
            let span = usage_member(event.as_bytes()).unwrap();
            let cut = format!("{}{}", &event[..span.start], &event[span.end..]);
            assert_eq!(cut, format!("data: {want}\n\n"));
        }
        assert_eq!(usage_member(b"data: {\"id\":1}\n\n"), None);
    }

    fn event() -> impl Strategy<Value = String> {
        let text = prop_oneof![
            Just(String::new()),
            ".{1,8}",
            Just("\"}],\"choices\":[{".to_owned()),
            Just("\\\u{1f600}\n".to_owned())
        ];
        let text = text.prop_map(|text| Value::from(text).to_string());
        let null = prop_oneof![
            Just("\"logprobs\":null"),
            Just("\"finish_reason\":null"),
            Just("\"token_ids\":null"),
            Just("\"stop_reason\":null"),
            Just("\"finish_reason\":\"stop\""),
            Just("\"stop_reason\":7"),
        ];
        let tail = prop_oneof![
            Just(""),
            Just(",\"usage\":null"),
            Just(",\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}"),
            Just(",\"usage\":{\"prompt_tokens\":03,\"total_tokens\":5,\"completion_tokens\":2}"),
            Just(
                ",\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2,\"prompt_tokens_details\":null}"
            ),
            Just(",\"error\":null"),
            Just(",\"error\":{\"code\":503}"),
            Just(",\"kv_transfer_params\":null"),
        ];
        let keys = prop_oneof![
            Just(("chat.completion.chunk", "\"delta\":{\"content\":", "}")),
            Just(("chat.completion.chunk", "\"delta\":{\"reasoning\":", "}")),
            Just(("chat.completion.chunk", "\"delta\":{\"role\":\"assistant\",\"content\":", "}")),
            Just(("text_completion", "\"text\":", "")),
            Just(("text_completion", "\"delta\":{\"content\":", "}")),
        ];
        let tails = prop::collection::vec(tail, 0..3);
        (keys, text, prop::collection::vec(null, 0..4), tails, 0u32..3, any::<prop::sample::Index>(), 0u8..12).prop_map(
            |((object, open, close), text, nulls, tails, index, at, damage)| {
                let nulls: String = nulls.iter().map(|null| format!(",{null}")).collect();
                let mut event = format!(
                    "data: {{\"id\":\"chatcmpl-1\",\"object\":\"{object}\",\"created\":17,\"model\":\"m\",\"choices\":[{{\"index\":{index},{open}{text}{close}{nulls}}}]{}}}\n\n",
                    tails.concat()
                );
                // Sometimes one character is lost or doubled.
                let at = event.char_indices().nth(at.index(event.chars().count())).map_or(0, |(at, _)| at);
                match damage {
                    0 => drop(event.remove(at)),
                    1 => event.insert(at, event[at..].chars().next().unwrap_or('x')),
                    _ => {}
                }
                event
            },
        )
    }

    proptest! {
        #[test]
        fn the_fast_path_says_what_the_slow_one_says(event in event()) {
            if let Some(fast) = fast::choices(event.as_bytes(), &mut Memo::default()) {
                prop_assert_eq!(fast, read_slowly(Dialect::Choices, event.as_bytes()), "{}", event);
            }
        }

        #[test]
        fn what_is_remembered_of_a_stream_changes_no_reading(events in prop::collection::vec(event(), 1..6)) {
            let mut memo = Memo::default();
            for event in events.iter().chain(&events) {
                let got = read_next(Dialect::Choices, event.as_bytes(), &mut memo);
                prop_assert_eq!(got, read_slowly(Dialect::Choices, event.as_bytes()), "{}", event);
            }
        }

        #[test]
        fn scanning_agrees_with_a_tree(event in event()) {
            let data = event.strip_prefix("data: ").map(str::trim_end).unwrap_or_default();
            let Ok(tree) = serde_json::from_str::<Value>(data) else { return Ok(()) };
            let Some(choice) = tree["choices"].get(0) else { return Ok(()) };
            let filled = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
            let content = filled(&choice["text"]) || filled(&choice["delta"]["content"]) || filled(&choice["delta"]["reasoning"]);
            let got = read(Dialect::Choices, event.as_bytes());
            prop_assume!(!event.contains("finish_reason\":null") || !event.contains("finish_reason\":\"stop"));
            let want = if tree["error"].is_object() { EventKind::Error }
                else if content || filled(&choice["finish_reason"]) { EventKind::Content }
                else { EventKind::Empty };
            prop_assert_eq!(got.kind, want, "{}", event);
        }

        #[test]
        fn arbitrary_events_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..120), event in event()) {
            for dialect in [Dialect::Choices, Dialect::Responses, Dialect::Messages] {
                let _ = read(dialect, &bytes);
                let _ = read(dialect, event.as_bytes());
            }
            let _ = usage_member(&bytes);
        }
    }

    #[test]
    fn the_usual_events_take_the_fast_path() {
        for event in [
            "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":17,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" a\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n",
            "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":17,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"reasoning\":\" a\"},\"logprobs\":null,\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}}\n\n",
            "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":17,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\" a\",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null,\"token_ids\":null}],\"usage\":null}\n\n",
        ] {
            assert_eq!(
                fast::choices(event.as_bytes(), &mut Memo::default()),
                Some(read_slowly(Dialect::Choices, event.as_bytes())),
                "{event}"
            );
            assert_eq!(fast::choices(event.as_bytes(), &mut Memo::default()).unwrap().kind, EventKind::Content);
        }
    }
}
