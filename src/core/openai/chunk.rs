//! Reads one event of a stream, in each of the three dialects.
//!
//! The meter needs to know of an event: does it carry output, a finish reason, usage, an error, or the end of the stream?
//! Output is text, reasoning, a refusal or a tool call that is not empty, or a finish reason. A chunk
//! with only a role or an empty delta is not output (the contract's definition of TTFT). All choices count alike.
//!
//! Dialects: `choices` (chat, completions and transcriptions differ only in where the text is), Responses (`response.*`
//! events; the terminal one has the usage) and Messages (Anthropic: usage in `message_start` and `message_delta`).
//!
//! The shapes that vLLM sends thousands of times in a row are matched by [`super::fast`]; everything else is scanned here.
//! A property test checks that both give the same result. An event that cannot be read is `Other`: the gateway does not
//! validate responses.

use super::event::{Dialect, EventKind, StreamEvent};
use super::fast;
pub use super::fast::Memo;
use super::response::{self, Answer, FinishReason, FlatError, TokenUsage, UpstreamError};
use super::scan::{JsonKind, ScanError, Scanner, Span};
use super::sse::Fields;

/// Reads one event, given with its lines (see [`RawEvent::bytes`](super::sse::RawEvent)).
pub fn read(dialect: Dialect, event: &[u8]) -> StreamEvent {
    read_next(dialect, event, &mut Memo::default())
}

/// Reads the next event of a stream; faster than [`read`], because `memo` remembers what repeats from event to event.
pub fn read_next(dialect: Dialect, event: &[u8], memo: &mut Memo) -> StreamEvent {
    if dialect == Dialect::Choices
        && let Some(event) = fast::choices(event, memo)
    {
        return event;
    }
    read_by_scanning(dialect, event)
}

/// Reads one event without the fast path; for comparison in tests and benches.
pub fn read_by_scanning(dialect: Dialect, event: &[u8]) -> StreamEvent {
    let fields = Fields::of(event);
    let Some(data) = fields.data else { return StreamEvent::default() };
    if *data == *b"[DONE]" {
        return StreamEvent { kind: EventKind::Done, ..StreamEvent::default() };
    }
    let read = match dialect {
        Dialect::Choices => choices(&data),
        Dialect::Responses => typed(&data, fields.name).map(Typed::response),
        Dialect::Messages => typed(&data, fields.name).map(Typed::message),
    };
    read.unwrap_or_default()
}

/// The span of the member `usage` in an event of the choices dialect, with its comma: what to remove so that the event
/// reads as if usage had not been requested. `None` when there is no such member.
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

fn choices(data: &[u8]) -> Result<StreamEvent, ScanError> {
    let mut event = StreamEvent::default();
    let mut flat = FlatError::default();
    let mut error = None;
    let (mut any, mut content) = (false, false);
    let mut scanner = Scanner::new(data);
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"choices" if scanner.kind()? == JsonKind::Array => {
                scanner.array(|scanner| {
                    any = true;
                    let choice = choice(scanner)?;
                    content |= choice.content;
                    event.finish |= choice.finish;
                    event.aborted |= choice.aborted;
                    event.answer.update(choice.answer);
                    Ok::<_, ScanError>(())
                })?;
            }
            b"usage" => event.usage = response::usage(scanner)?,
            b"error" => error = response::error(scanner)?,
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

/// What one choice of an event carries.
#[derive(Default)]
struct Choice {
    content: bool,
    finish: bool,
    aborted: bool,
    answer: Answer,
}

fn choice(scanner: &mut Scanner<'_>) -> Result<Choice, ScanError> {
    let mut choice = Choice::default();
    if scanner.kind()? != JsonKind::Object {
        return scanner.skip().map(|_| choice);
    }
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"delta" if scanner.kind()? == JsonKind::Object => {
                scanner.object(|scanner, key| {
                    match &*key.bytes() {
                        b"content" | b"reasoning" | b"reasoning_content" | b"tool_calls" | b"function_call" => {
                            choice.content |= is_filled(scanner)?;
                        }
                        b"refusal" => {
                            let is_filled = is_filled(scanner)?;
                            choice.content |= is_filled;
                            choice.answer.refused |= is_filled;
                        }
                        _ => drop(scanner.skip()?),
                    }
                    Ok::<_, ScanError>(())
                })?;
            }
            b"text" => choice.content |= is_filled(scanner)?,
            b"finish_reason" if scanner.kind()? == JsonKind::String => {
                let reason = scanner.text()?.raw;
                if !reason.is_empty() {
                    choice.finish = true;
                    choice.answer.finished(FinishReason::of(reason));
                }
                choice.aborted |= reason == response::ABORT;
            }
            _ => drop(scanner.skip()?),
        }
        Ok::<_, ScanError>(())
    })?;
    Ok(choice)
}

/// Takes a value; returns whether it is a string, list or object that is not empty.
fn is_filled(scanner: &mut Scanner<'_>) -> Result<bool, ScanError> {
    Ok(match scanner.kind()? {
        JsonKind::String => !scanner.text()?.raw.is_empty(),
        JsonKind::Array | JsonKind::Object => {
            let raw = scanner.skip_raw()?;
            raw[1..raw.len() - 1].iter().any(|byte| !byte.is_ascii_whitespace())
        }
        _ => scanner.skip().map(|_| false)?,
    })
}

/// The members of an event that carries its own type (Responses, Messages).
#[derive(Default)]
struct Typed {
    name: String,
    filled: bool,
    stopped: Option<FinishReason>,
    usage: Option<TokenUsage>,
    error: Option<UpstreamError>,
    flat: FlatError,
}

fn typed(data: &[u8], name: Option<&[u8]>) -> Result<Typed, ScanError> {
    let mut typed = Typed { name: String::from_utf8_lossy(name.unwrap_or_default()).into_owned(), ..Typed::default() };
    let mut scanner = Scanner::new(data);
    scanner.object(|scanner, key| {
        let key = key.bytes();
        match &*key {
            b"type" if scanner.kind()? == JsonKind::String => typed.name = scanner.text()?.decode().into_owned(),
            b"delta" => delta(scanner, &mut typed)?,
            b"usage" => typed.usage = response::usage(scanner)?.or(typed.usage),
            b"error" => typed.error = response::error(scanner)?,
            b"response" | b"message" if scanner.kind()? == JsonKind::Object => {
                scanner.object(|scanner, key| {
                    match &*key.bytes() {
                        b"usage" => typed.usage = response::usage(scanner)?.or(typed.usage),
                        b"error" => typed.error = response::error(scanner)?,
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

/// Reads `delta`: a string (Responses) or an object with text, thinking, partial JSON or a stop reason (Messages).
fn delta(scanner: &mut Scanner<'_>, typed: &mut Typed) -> Result<(), ScanError> {
    if scanner.kind()? != JsonKind::Object {
        typed.filled |= is_filled(scanner)?;
        return Ok(());
    }
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"text" | b"thinking" | b"partial_json" => typed.filled |= is_filled(scanner)?,
            b"stop_reason" if scanner.kind()? == JsonKind::String => {
                let reason = scanner.text()?.raw;
                typed.stopped = (!reason.is_empty()).then(|| FinishReason::of(reason)).or(typed.stopped);
            }
            _ => drop(scanner.skip()?),
        }
        Ok::<_, ScanError>(())
    })?;
    Ok(())
}

impl Typed {
    fn response(self) -> StreamEvent {
        let usage = self.usage;
        let mut answer = Answer { refused: self.name == "response.refusal.delta" && self.filled, ..Answer::default() };
        match self.name.as_str() {
            "response.completed" | "response.incomplete" => {
                // The usual reason for an incomplete one; the other is a content filter, which vLLM does not have.
                let reason = if self.name == "response.completed" { FinishReason::Stop } else { FinishReason::Length };
                answer.finished(reason);
                StreamEvent { kind: EventKind::Usage, finish: true, answer, usage, ..StreamEvent::default() }
            }
            "response.failed" | "error" => self.failed(),
            name if name.ends_with(".delta") && self.filled => {
                StreamEvent { kind: EventKind::Content, answer, usage, ..StreamEvent::default() }
            }
            _ if self.error.is_some() => self.failed(),
            name if name.starts_with("response.") => StreamEvent { kind: EventKind::Empty, ..StreamEvent::default() },
            _ => StreamEvent::default(),
        }
    }

    fn message(self) -> StreamEvent {
        let usage = self.usage;
        let mut answer = Answer::default();
        if let Some(reason) = self.stopped {
            answer.finished(reason);
        }
        let event = |kind, finish| StreamEvent { kind, finish, answer, usage, ..StreamEvent::default() };
        match self.name.as_str() {
            "content_block_delta" if self.filled => event(EventKind::Content, false),
            "message_start" | "content_block_start" | "content_block_delta" | "content_block_stop" => {
                event(EventKind::Empty, false)
            }
            "message_delta" => event(EventKind::Usage, self.stopped.is_some()),
            "message_stop" => event(EventKind::Done, false),
            _ if self.name == "error" || self.error.is_some() => self.failed(),
            _ => StreamEvent::default(),
        }
    }

    fn failed(self) -> StreamEvent {
        let error = self.error.unwrap_or_else(|| self.flat.into_fields());
        StreamEvent {
            kind: EventKind::Error,
            usage: self.usage,
            error: Some(Box::new(error)),
            ..StreamEvent::default()
        }
    }
}

#[cfg(test)]
mod tests;
