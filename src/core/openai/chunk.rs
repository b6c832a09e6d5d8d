//! Reads one event of a stream, in each of the dialects.
//!
//! Output is text, reasoning, a refusal or a tool call that is not empty, or a finish reason. A
//! chunk with only a role or an empty delta is not output. All choices count alike.
//!
//! Dialects: `choices` (chat, completions and transcriptions differ only in where the text is),
//! Responses (`response.*` events; the terminal event has the usage), Messages (Anthropic: usage in
//! `message_start` and `message_delta`) and Cohere (usage in `message-end`).
//!
//! [`super::fast`] matches the shape that vLLM sends thousands of times in a row; this file scans
//! every other event. A property test checks that both agree. An unreadable event is `Other`: the
//! gateway does not validate responses.

use smallvec::SmallVec;

use super::choices::MAX_CHOICES;
use super::event::{Dialect, EventKind, StreamEvent};
use super::fast;
pub use super::fast::Memo;
use super::not_continued::NotContinued;
use super::patch::MemberSpan;
use super::response::{self, Answer, FinishReason, FlatError, TokenUsage, UpstreamError};
use super::scan::{JsonKind, ScanError, Scanner, Span};
use super::sse::Fields;

/// The last event of the choices dialect.
const DONE: &[u8] = b"[DONE]";

/// Names of events that only keep the connection alive.
const PINGS: [&str; 5] = ["ping", "keepalive", "keep-alive", "keep_alive", "heartbeat"];

/// Reads one event, given as lines (see [`RawEvent::bytes`](super::sse::RawEvent)).
pub fn read(dialect: Dialect, event: &[u8]) -> StreamEvent {
    read_next(dialect, event, &mut Memo::default())
}

/// Reads the next event of a stream. Faster than [`read`], because `memo` remembers bytes that
/// repeat from event to event.
pub fn read_next(dialect: Dialect, event: &[u8], memo: &mut Memo) -> StreamEvent {
    if dialect == Dialect::Choices
        && let Some(event) = fast::choices(event, memo)
    {
        return event;
    }
    if dialect == Dialect::Plain {
        return plain(scan_next(dialect, event, memo), event.len());
    }
    scan_next(dialect, event, memo)
}

/// An event of [`Dialect::Plain`] with this many bytes: output, unless it is an error, a ping or an
/// end.
pub(crate) fn plain(event: StreamEvent, bytes: usize) -> StreamEvent {
    match event.kind {
        EventKind::Error | EventKind::Ping | EventKind::Done => event,
        _ => StreamEvent { kind: EventKind::Content, text: bytes as u64, ..StreamEvent::default() },
    }
}

/// Reads one event without the fast path, for comparison in tests and benches.
pub fn read_by_scanning(dialect: Dialect, event: &[u8]) -> StreamEvent {
    scan_next(dialect, event, &mut Memo::default())
}

fn scan_next(dialect: Dialect, event: &[u8], memo: &mut Memo) -> StreamEvent {
    let fields = Fields::of(event);
    // A comment has no fields; a ping may have only a name.
    let Some(data) = fields.data.filter(|data| !data.trim_ascii().is_empty()) else {
        return StreamEvent { kind: EventKind::Ping, ..StreamEvent::default() };
    };
    if data.trim_ascii() == DONE {
        return StreamEvent { kind: EventKind::Done, ..StreamEvent::default() };
    }
    let mut reader = EventReader::new(dialect);
    if reader.read(&data).is_err() {
        return StreamEvent::default();
    }
    let output = reader.output();
    let read = reader.event(fields.name.unwrap_or_default(), memo);
    if let (Some(kept), Some(output)) = (memo.kept_mut(), output)
        && matches!(read.kind, EventKind::Content | EventKind::Empty)
        && !read.aborted
    {
        kept.note_first(event);
        match output {
            Ok(span) => kept.push(&data[span.start..span.end]),
            Err(why) => kept.drop_for(why),
        }
    }
    read
}

/// Reads the data of an event in one piece or in several parts (see
/// [`Condenser`](super::condense::Condenser)).
#[derive(Clone, Debug)]
pub(super) enum EventReader {
    Choices(ChoicesReader),
    Typed(Dialect, Box<Typed>),
}

/// The span of the member `usage` with its comma, in an event of the choices dialect. Without it
/// the event reads as if usage had not been requested. `None` if there is no such member.
pub fn usage_member(event: &[u8]) -> Option<Span> {
    let json = memchr::memchr(b'{', event)?;
    let mut scanner = Scanner::new(&event[json..]);
    let (mut before, mut is_first) = (json + 1, true);
    let mut found = None;
    let scanned = scanner.object(|scanner, key| {
        let is_usage = &*key.bytes() == b"usage";
        scanner.skip()?;
        let end = json + scanner.position();
        if is_usage {
            found = Some(MemberSpan { span: Span { start: before, end }, is_first });
        }
        (before, is_first) = (end, false);
        Ok::<_, ScanError>(())
    });
    scanned.ok()?;
    Some(found?.removal(event))
}

impl EventReader {
    pub(super) fn new(dialect: Dialect) -> Self {
        match dialect {
            Dialect::Choices | Dialect::Plain => Self::Choices(ChoicesReader::default()),
            _ => Self::Typed(dialect, Box::default()),
        }
    }

    /// Takes the next part, or all of it.
    pub(super) fn read(&mut self, part: &[u8]) -> Result<(), ScanError> {
        let mut scanner = Scanner::new(part);
        match self {
            Self::Choices(reader) => reader.read(&mut scanner)?,
            Self::Typed(_, typed) => typed.read(&mut scanner)?,
        }
        scanner.end()
    }

    /// The place of the text in the only part, or why the event has more than a text.
    fn output(&self) -> Option<Result<Span, NotContinued>> {
        match self {
            Self::Choices(reader) => Some(reader.output.why_not.map_or(Ok(reader.output.text), Err)),
            Self::Typed(..) => None,
        }
    }

    /// The event that all parts make up, under this name.
    pub(super) fn event(self, name: &[u8], memo: &mut Memo) -> StreamEvent {
        match self {
            Self::Choices(reader) => reader.event(name, memo),
            Self::Typed(dialect, mut typed) => {
                if typed.name.is_empty() {
                    typed.name = String::from_utf8_lossy(name).into_owned();
                }
                match dialect {
                    Dialect::Responses => typed.response(),
                    Dialect::Cohere => typed.cohere(),
                    Dialect::Messages | Dialect::Choices | Dialect::Plain => typed.message(),
                }
            }
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct ChoicesReader {
    event: StreamEvent,
    flat: FlatError,
    error: Option<UpstreamError>,
    /// Whether there is a member `choices`.
    has_choices: bool,
    any: bool,
    content: bool,
    choices: SmallVec<[Choice; 1]>,
    output: Output,
    /// The member `type`, which events of this dialect normally lack.
    name: Option<String>,
}

impl ChoicesReader {
    fn read(&mut self, scanner: &mut Scanner<'_>) -> Result<(), ScanError> {
        let Self { event, flat, error, has_choices, any, content, choices, output, name } = self;
        scanner.object(|scanner, key| {
            match &*key.bytes() {
                b"choices" if scanner.kind()? == JsonKind::Array => {
                    *has_choices = true;
                    scanner.array(|scanner| {
                        *any = true;
                        let choice = choice(scanner)?;
                        *content |= choice.text > 0;
                        event.text += choice.text;
                        event.finish |= choice.finish;
                        event.aborted |= choice.aborted;
                        event.answer.update(choice.answer);
                        output.add(&choice);
                        if choice.index < MAX_CHOICES && choices.len() < MAX_CHOICES as usize {
                            choices.push(choice);
                        }
                        Ok::<_, ScanError>(())
                    })?;
                }
                b"usage" => event.usage = response::usage(scanner)?,
                b"error" => *error = response::error(scanner)?,
                b"type" if scanner.kind()? == JsonKind::String => {
                    *name = Some(scanner.text()?.decode().into_owned());
                }
                key => flat.member(scanner, key)?,
            }
            Ok::<_, ScanError>(())
        })?;
        Ok(())
    }

    fn event(self, name: &[u8], memo: &mut Memo) -> StreamEvent {
        let Self { mut event, flat, error, has_choices, any, content, choices, name: own, .. } = self;
        for choice in &choices {
            memo.note(choice.index, choice.text > 0, choice.finish);
        }
        event.error = error.or(flat.found()).map(Box::new);
        let own = own.unwrap_or_else(|| String::from_utf8_lossy(name).into_owned());
        event.kind = match () {
            () if event.error.is_some() => EventKind::Error,
            () if content || event.finish => EventKind::Content,
            () if any => EventKind::Empty,
            () if event.usage.is_some() => EventKind::Usage,
            () if PINGS.contains(&&*own) => EventKind::Ping,
            () if has_choices => EventKind::Lifecycle,
            // Transcriptions in OpenAI's form.
            () if own == "transcript.text.delta" => EventKind::Content,
            () if own == "transcript.text.done" => EventKind::Done,
            () => EventKind::Other,
        };
        event
    }
}

/// The output of an event, as far as another engine can continue it.
#[derive(Clone, Copy, Debug, Default)]
struct Output {
    /// The text, as in a JSON string: its place in the part.
    text: Span,
    /// Why the output is more than this text.
    why_not: Option<NotContinued>,
}

impl Output {
    fn set_text(&mut self, text: Span) {
        if !self.text.is_empty() {
            self.why_not.get_or_insert(NotContinued::Unreadable);
        }
        self.text = text;
    }

    fn add(&mut self, choice: &Choice) {
        let why_not = if choice.index == 0 { choice.output.why_not } else { Some(NotContinued::Choices) };
        self.why_not = self.why_not.or(why_not);
        if !choice.output.text.is_empty() {
            self.set_text(choice.output.text);
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Choice {
    index: u64,
    /// Bytes of output.
    text: u64,
    output: Output,
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
                scanner.object(|scanner, key| match &*key.bytes() {
                    b"content" => choice.take_text(scanner),
                    b"reasoning" | b"reasoning_content" => choice.take_other(scanner, NotContinued::Reasoning),
                    b"tool_calls" | b"function_call" => choice.take_other(scanner, NotContinued::ToolCall),
                    b"refusal" => {
                        let before = choice.text;
                        choice.take_other(scanner, NotContinued::Refusal)?;
                        choice.answer.refused |= choice.text > before;
                        Ok(())
                    }
                    _ => scanner.skip().map(drop),
                })?;
            }
            b"index" if scanner.kind()? == JsonKind::Number => {
                choice.index = response::digits(scanner.number()?).unwrap_or(MAX_CHOICES);
            }
            b"text" => choice.take_text(scanner)?,
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

impl Choice {
    fn take_text(&mut self, scanner: &mut Scanner<'_>) -> Result<(), ScanError> {
        if scanner.kind()? != JsonKind::String {
            return self.take_other(scanner, NotContinued::Unreadable);
        }
        let text = scanner.text()?.raw.len();
        if text > 0 {
            let end = scanner.position() - 1;
            self.output.set_text(Span { start: end - text, end });
            self.text += text as u64;
        }
        Ok(())
    }

    fn take_other(&mut self, scanner: &mut Scanner<'_>, why: NotContinued) -> Result<(), ScanError> {
        let text = output(scanner)?;
        self.text += text;
        if text > 0 {
            self.output.why_not.get_or_insert(why);
        }
        Ok(())
    }
}

/// Takes a value. Returns the length as written if it is a string, list or object that is not
/// empty, otherwise 0.
fn output(scanner: &mut Scanner<'_>) -> Result<u64, ScanError> {
    Ok(match scanner.kind()? {
        JsonKind::String => scanner.text()?.raw.len() as u64,
        JsonKind::Array | JsonKind::Object => {
            let raw = scanner.skip_raw()?;
            let is_filled = raw[1..raw.len() - 1].iter().any(|byte| !byte.is_ascii_whitespace());
            if is_filled { raw.len() as u64 } else { 0 }
        }
        _ => scanner.skip().map(|_| 0)?,
    })
}

/// The members of an event with a type (Responses, Messages, Cohere).
#[derive(Clone, Debug, Default)]
pub(super) struct Typed {
    name: String,
    /// Bytes of output.
    text: u64,
    stopped: Option<FinishReason>,
    usage: Option<TokenUsage>,
    error: Option<UpstreamError>,
    flat: FlatError,
}

impl Typed {
    fn read(&mut self, scanner: &mut Scanner<'_>) -> Result<(), ScanError> {
        scanner.object(|scanner, key| {
            let key = key.bytes();
            match &*key {
                b"type" if scanner.kind()? == JsonKind::String => self.name = scanner.text()?.decode().into_owned(),
                b"delta" => delta(scanner, self)?,
                b"usage" => self.usage = response::usage(scanner)?.or(self.usage),
                b"error" => self.error = response::error(scanner)?,
                b"response" | b"message" if scanner.kind()? == JsonKind::Object => {
                    scanner.object(|scanner, key| {
                        match &*key.bytes() {
                            b"usage" => self.usage = response::usage(scanner)?.or(self.usage),
                            b"error" => self.error = response::error(scanner)?,
                            _ => drop(scanner.skip()?),
                        }
                        Ok::<_, ScanError>(())
                    })?;
                }
                key => self.flat.member(scanner, key)?,
            }
            Ok::<_, ScanError>(())
        })?;
        Ok(())
    }
}

/// Reads `delta`: a string (Responses) or an object with text, thinking, partial JSON or a stop
/// reason (Messages, Cohere).
fn delta(scanner: &mut Scanner<'_>, typed: &mut Typed) -> Result<(), ScanError> {
    if scanner.kind()? != JsonKind::Object {
        typed.text += output(scanner)?;
        return Ok(());
    }
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"text" | b"thinking" | b"partial_json" => typed.text += output(scanner)?,
            // Cohere: text, thinking, plan or tool call.
            b"message" => typed.text += output(scanner)?,
            b"usage" => typed.usage = response::usage(scanner)?.or(typed.usage),
            b"stop_reason" | b"finish_reason" if scanner.kind()? == JsonKind::String => {
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
        let (usage, text) = (self.usage, self.text);
        let mut answer = Answer { refused: self.name == "response.refusal.delta" && text > 0, ..Answer::default() };
        match self.name.as_str() {
            "response.completed" | "response.incomplete" => {
                // The usual reason for an incomplete response. The other reason is a content
                // filter, which vLLM lacks.
                let reason = if self.name == "response.completed" { FinishReason::Stop } else { FinishReason::Length };
                answer.finished(reason);
                StreamEvent { kind: EventKind::Usage, finish: true, answer, usage, ..StreamEvent::default() }
            }
            "response.failed" | "error" => self.failed(),
            name if name.ends_with(".delta") && text > 0 => {
                StreamEvent { kind: EventKind::Content, text, answer, usage, ..StreamEvent::default() }
            }
            _ if self.error.is_some() => self.failed(),
            name => {
                let kind = match name {
                    "response.created" | "response.in_progress" | "response.queued" => EventKind::Lifecycle,
                    name if PINGS.contains(&name) => EventKind::Ping,
                    name if name.starts_with("response.") && name.ends_with(".delta") => EventKind::Empty,
                    name if name.starts_with("response.") => EventKind::Part,
                    _ => EventKind::Other,
                };
                StreamEvent { kind, ..StreamEvent::default() }
            }
        }
    }

    fn message(self) -> StreamEvent {
        let (usage, text) = (self.usage, self.text);
        let mut answer = Answer::default();
        if let Some(reason) = self.stopped {
            answer.finished(reason);
        }
        let event = |kind, finish| StreamEvent { kind, finish, text, answer, usage, ..StreamEvent::default() };
        match self.name.as_str() {
            "content_block_delta" if text > 0 => event(EventKind::Content, false),
            "message_start" => event(EventKind::Lifecycle, false),
            "content_block_delta" => event(EventKind::Empty, false),
            "content_block_start" | "content_block_stop" => event(EventKind::Part, false),
            "message_delta" => event(EventKind::Usage, self.stopped.is_some()),
            "message_stop" => event(EventKind::Done, false),
            _ if self.name == "error" || self.error.is_some() => self.failed(),
            name if PINGS.contains(&name) => event(EventKind::Ping, false),
            _ => StreamEvent::default(),
        }
    }

    fn cohere(self) -> StreamEvent {
        let (usage, text) = (self.usage, self.text);
        let mut answer = Answer::default();
        if let Some(reason) = self.stopped {
            answer.finished(reason);
        }
        let event = |kind, finish| StreamEvent { kind, finish, text, answer, usage, ..StreamEvent::default() };
        match self.name.as_str() {
            _ if self.error.is_some() => self.failed(),
            "content-delta" | "tool-plan-delta" | "tool-call-start" | "tool-call-delta" if text > 0 => {
                event(EventKind::Content, false)
            }
            "message-end" => event(EventKind::Usage, true),
            "message-start" => event(EventKind::Lifecycle, false),
            "content-delta" | "tool-plan-delta" | "tool-call-delta" => event(EventKind::Empty, false),
            name if name.ends_with("-start") || name.ends_with("-end") => event(EventKind::Part, false),
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
