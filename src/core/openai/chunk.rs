//! Reads one event of a stream, in each of the dialects.
//!
//! Output is text, reasoning, a refusal or a tool call that is not empty, or a finish reason. A
//! chunk with only a role or an empty delta is not output. The output of every choice counts.
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
use super::engine_times;
use super::event::{Dialect, EventKind, StreamEvent};
use super::fast;
pub use super::fast::Memo;
use super::not_continued::NotContinued;
use super::patch::MemberSpan;
use super::response::{self, Answer, FinishReason, FlatError, UpstreamError};
use super::scan::{JsonKind, ScanError, Scanner, Span};
use super::sse::Fields;
use output::{Output, PINGS, output, place};
use typed::Typed;

mod output;
mod typed;

/// The last event of the choices dialect.
const DONE: &[u8] = b"[DONE]";

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
    // A comment has no fields, and a ping may have only a name, so both lack data.
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
    let is_of_answer = match read.kind {
        EventKind::Content | EventKind::Empty => true,
        // In Messages, the first event has the message's identity, and the end of a block ends the
        // text.
        EventKind::Lifecycle | EventKind::Part => dialect == Dialect::Messages,
        _ => false,
    };
    if let (Some(kept), Some(output)) = (memo.kept_mut(), output)
        && is_of_answer
        && !read.aborted
    {
        kept.note_first(event);
        match output {
            Ok(span) => kept.push(&data[span.start..span.end]),
            Err(NotContinued::UsageUnknown) => kept.close(),
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

/// The span of the member `usage` with its comma, in an event of the choices dialect. Without these
/// bytes the event reads as if usage had not been requested. `None` if there is no such member.
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

    /// Takes the next part, or the whole event.
    pub(super) fn read(&mut self, part: &[u8]) -> Result<(), ScanError> {
        let mut scanner = Scanner::new(part);
        match self {
            Self::Choices(reader) => reader.read(&mut scanner)?,
            Self::Typed(_, typed) => typed.read(&mut scanner)?,
        }
        scanner.end()
    }

    /// For an event that was read in one part: the place of the text, or the reason why the event
    /// has output that cannot be continued. `None` if answers of the dialect are never continued.
    fn output(&self) -> Option<Result<Span, NotContinued>> {
        match self {
            Self::Choices(reader) => Some(reader.output.known()),
            Self::Typed(Dialect::Messages, typed) => Some(typed.output().known()),
            Self::Typed(..) => None,
        }
    }

    /// The event that all parts make up. `name`: the event's name in SSE.
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
                    Dialect::Messages | Dialect::Choices | Dialect::Plain => {
                        let event = typed.message();
                        if event.kind == EventKind::Part || event.text > 0 || event.finish {
                            memo.note(0, event.text > 0, event.finish);
                        }
                        event
                    }
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
                        output.add(choice.index, choice.output);
                        if choice.index < MAX_CHOICES && choices.len() < MAX_CHOICES as usize {
                            choices.push(choice);
                        }
                        Ok::<_, ScanError>(())
                    })?;
                }
                b"usage" => event.usage = response::usage(scanner)?,
                b"metrics" => event.times = engine_times::read(scanner)?,
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
            self.output.set_text(place(scanner, text));
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

#[cfg(test)]
mod tests;
