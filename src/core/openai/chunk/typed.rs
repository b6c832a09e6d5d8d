//! Events with a type: Responses, Anthropic's Messages and Cohere's chats.
//!
//! The type is in the member `type`, or only in the name of the event. For Messages the place of
//! the text is noted as well, so that another engine can continue the text.

use super::super::engine_times::{self, EngineTimes};
use super::super::event::{EventKind, StreamEvent};
use super::super::not_continued::NotContinued;
use super::super::response::{self, Answer, FinishReason, FlatError, TokenUsage, UpstreamError};
use super::super::scan::{JsonKind, ScanError, Scanner};
use super::output::{Output, PINGS, output, place};

/// The members of an event with a type (Responses, Messages, Cohere).
#[derive(Clone, Debug, Default)]
pub(in crate::openai) struct Typed {
    pub(super) name: String,
    /// Bytes of output.
    text: u64,
    stopped: Option<FinishReason>,
    usage: Option<TokenUsage>,
    times: Option<EngineTimes>,
    error: Option<UpstreamError>,
    flat: FlatError,
    output: Output,
}

impl Typed {
    pub(super) fn read(&mut self, scanner: &mut Scanner<'_>) -> Result<(), ScanError> {
        scanner.object(|scanner, key| {
            let key = key.bytes();
            match &*key {
                b"type" if scanner.kind()? == JsonKind::String => self.name = scanner.text()?.decode().into_owned(),
                b"delta" => delta(scanner, self)?,
                b"content_block" if scanner.kind()? == JsonKind::Object => self.block(scanner)?,
                b"usage" => self.usage = response::usage(scanner)?.or(self.usage),
                b"error" => self.error = response::error(scanner)?,
                b"response" | b"message" if scanner.kind()? == JsonKind::Object => {
                    scanner.object(|scanner, key| {
                        match &*key.bytes() {
                            b"usage" => self.usage = response::usage(scanner)?.or(self.usage),
                            b"error" => self.error = response::error(scanner)?,
                            b"metrics" => self.times = engine_times::read(scanner)?,
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

    /// Takes output other than text. Returns the length as written.
    fn other(&mut self, scanner: &mut Scanner<'_>, why: NotContinued) -> Result<u64, ScanError> {
        let bytes = output(scanner)?;
        if bytes > 0 {
            self.output.why_not.get_or_insert(why);
        }
        Ok(bytes)
    }

    /// Reads a content block that an Anthropic message begins.
    fn block(&mut self, scanner: &mut Scanner<'_>) -> Result<(), ScanError> {
        scanner.object(|scanner, key| {
            match (&*key.bytes(), scanner.kind()?) {
                (b"type", JsonKind::String) => {
                    let why = match &*scanner.text()?.bytes() {
                        b"text" => return Ok::<_, ScanError>(()),
                        b"thinking" | b"redacted_thinking" => NotContinued::Reasoning,
                        _ => NotContinued::ToolCall,
                    };
                    self.output.why_not.get_or_insert(why);
                }
                (b"text", JsonKind::String) => {
                    let bytes = scanner.text()?.raw.len();
                    self.output.set_text(place(scanner, bytes));
                }
                _ => drop(scanner.skip()?),
            }
            Ok(())
        })?;
        Ok(())
    }

    /// The text of an event of Anthropic's Messages. After the end of a block only usage follows.
    pub(super) fn output(&self) -> Output {
        let why_not = (self.name == "content_block_stop").then_some(NotContinued::UsageUnknown);
        Output { why_not: self.output.why_not.or(why_not), ..self.output }
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
            b"text" if scanner.kind()? == JsonKind::String => {
                let bytes = scanner.text()?.raw.len();
                typed.text += bytes as u64;
                typed.output.set_text(place(scanner, bytes));
            }
            b"text" => typed.text += typed.other(scanner, NotContinued::Unreadable)?,
            b"thinking" => typed.text += typed.other(scanner, NotContinued::Reasoning)?,
            b"partial_json" => typed.text += typed.other(scanner, NotContinued::ToolCall)?,
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
    pub(super) fn response(self) -> StreamEvent {
        let (usage, times, text) = (self.usage, self.times, self.text);
        let mut answer = Answer { refused: self.name == "response.refusal.delta" && text > 0, ..Answer::default() };
        match self.name.as_str() {
            "response.completed" | "response.incomplete" => {
                // An incomplete response counts as cut at the length limit. Its other possible
                // reason is a content filter, which vLLM lacks.
                let reason = if self.name == "response.completed" { FinishReason::Stop } else { FinishReason::Length };
                answer.finished(reason);
                StreamEvent { kind: EventKind::Usage, finish: true, answer, usage, times, ..StreamEvent::default() }
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

    /// Returns a function that makes an event from a kind and the values read.
    fn of_kind(&self) -> impl Fn(EventKind, bool) -> StreamEvent + use<> {
        let (usage, text) = (self.usage, self.text);
        let mut answer = Answer::default();
        if let Some(reason) = self.stopped {
            answer.finished(reason);
        }
        move |kind, finish| StreamEvent { kind, finish, text, answer, usage, ..StreamEvent::default() }
    }

    pub(super) fn message(self) -> StreamEvent {
        let (text, event) = (self.text, self.of_kind());
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

    pub(super) fn cohere(self) -> StreamEvent {
        let (text, event) = (self.text, self.of_kind());
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
