//! Removes injected usage from a stream, so that the client receives the stream that it requested.
//!
//! Exact token counts need `include_usage` (one more event at the end) or `continuous_usage_stats`
//! (one more member in every event). If the client did not request them, the stripper removes the
//! event, or the member with a comma. All other bytes are forwarded as slices of the received
//! chunk.
//!
//! The beginning of an unfinished event is held, because only the end shows whether the event must
//! be removed. If the event stays, a copy of the held part is forwarded. An event over the
//! scanner's bound is forwarded unchanged and not held.

use bytes::Bytes;

use super::forward::Forward;
use crate::openai::chunk;
use crate::openai::event::{EventKind, StreamEvent};
use crate::openai::scan::Span;
use crate::openai::sse::RawEvent;

/// What to remove from a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strip {
    /// Nothing was injected.
    #[default]
    Nothing,
    /// Nothing was injected, but an unfinished event is held: if another engine continues the
    /// answer, that engine cannot complete an event that the first engine began.
    PartsOnly,
    /// Removes the usage event at the end, which the injected `include_usage` caused.
    InjectedUsage,
    /// Removes the member `usage` of every event with choices, and the usage event unless
    /// `keep_final`.
    Continuous {
        /// Whether the usage event at the end stays, because the client requested it.
        keep_final: bool,
    },
}

/// Removes injected usage from one stream, and keeps state between chunks.
///
/// vLLM (0.32) writes `system_fingerprint` into the last event: the usage event if usage was
/// requested, else the event with the finish reason. So the finish event is held until the next
/// event arrives, in the same engine step, and gets the fingerprint of a removed usage event. That
/// is exact for one sequence. For several sequences usage is not injected, because the first of
/// them may finish long before the usage event.
///
/// With `--enable-force-include-usage` an engine reports usage without a request for it. Usage on
/// an event with choices shows this if the gateway requested only the usage event. Then nothing is
/// removed, because the client would have received the usage anyway.
#[derive(Clone, Debug)]
pub(super) struct Stripper {
    strip: Strip,
    /// Whether the usage event at the end has been removed.
    final_removed: bool,
    /// Whether the engine reports usage in every event although only the usage event was requested.
    reports_unasked: bool,
    /// The event with the finish reason, until the next event arrives.
    held: Vec<u8>,
    /// The action for the last event of the stream, if no empty line ended it.
    last: Option<Action>,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    /// Forwarded unchanged.
    Keep,
    /// Removed.
    Remove,
    /// Forwarded without these bytes.
    RemovePart(Span),
    /// Held until the next event arrives, then forwarded without these bytes.
    Hold(Option<Span>),
}

impl Stripper {
    /// A stripper for a new stream; `None` for [`Strip::Nothing`].
    pub(super) fn new(strip: Strip) -> Option<Self> {
        (strip != Strip::Nothing).then_some(Self {
            strip,
            final_removed: false,
            reports_unasked: false,
            held: Vec::new(),
            last: None,
        })
    }

    pub(super) fn begin<'c>(&'c mut self, chunk: &'c Bytes) -> ChunkStripper<'c> {
        ChunkStripper { stripper: self, chunk, forwarded: 0, event_start: 0, out: Forward::new() }
    }

    pub(super) fn take_held(&mut self) -> Bytes {
        std::mem::take(&mut self.held).into()
    }

    /// Decides the action for an event that no empty line ended before the body did.
    pub(super) fn last_event(&mut self, bytes: &[u8], event: &StreamEvent) {
        let raw = RawEvent { bytes, end: bytes.len(), split: true, oversize: bytes.is_empty() };
        self.last = Some(self.action(&raw, event));
    }

    /// The part of the last event that goes to the client, if no empty line ended the event.
    pub(super) fn take_last(&mut self, bytes: &[u8]) -> Bytes {
        match self.last.take() {
            Some(Action::Remove) => Bytes::new(),
            Some(Action::RemovePart(span) | Action::Hold(Some(span))) => without(bytes, span).into(),
            Some(Action::Keep | Action::Hold(None)) | None => Bytes::copy_from_slice(bytes),
        }
    }

    fn action(&mut self, raw: &RawEvent<'_>, event: &StreamEvent) -> Action {
        if self.strip == Strip::PartsOnly {
            return Action::Keep;
        }
        let unrequested = self.strip == Strip::InjectedUsage && event.kind != EventKind::Usage && event.usage.is_some();
        self.reports_unasked |= unrequested;
        if raw.oversize || self.reports_unasked {
            return Action::Keep;
        }
        let removes_final = !matches!(self.strip, Strip::Continuous { keep_final: true });
        // A terminal event that also carries usage is never removed.
        if event.kind == EventKind::Usage && !event.finish && removes_final && !self.final_removed {
            self.final_removed = true;
            return Action::Remove;
        }
        let has_injected_member =
            self.strip != Strip::InjectedUsage && event.kind != EventKind::Usage && event.usage.is_some();
        let member = if has_injected_member { chunk::usage_member(raw.bytes) } else { None };
        if removes_final && event.finish && event.kind != EventKind::Done {
            return Action::Hold(member);
        }
        member.map_or(Action::Keep, Action::RemovePart)
    }
}

/// Assembles the bytes to forward for one chunk.
///
/// Bytes before `forwarded` are already in `out` or left out. Later bytes are forwarded in one
/// slice when other bytes must be inserted or left out, or when the chunk ends.
pub(super) struct ChunkStripper<'c> {
    stripper: &'c mut Stripper,
    chunk: &'c Bytes,
    forwarded: usize,
    event_start: usize,
    out: Forward,
}

impl ChunkStripper<'_> {
    pub(super) fn event(&mut self, raw: &RawEvent<'_>, event: &StreamEvent) {
        let action = self.stripper.action(raw, event);
        if !self.stripper.held.is_empty() {
            self.forward_held(raw, &action);
        }
        let start = self.event_start;
        match action {
            Action::Keep if raw.split => self.push(Bytes::copy_from_slice(held_part(raw))),
            Action::Keep => {}
            Action::Remove => self.leave_out(start, raw.end),
            Action::RemovePart(span) if raw.split => {
                self.push(without(raw.bytes, span).into());
                self.leave_out(start, raw.end);
            }
            Action::RemovePart(span) => self.leave_out(start + span.start, start + span.end),
            Action::Hold(span) => {
                self.stripper.held = without(raw.bytes, span.unwrap_or_default());
                self.leave_out(start, raw.end);
            }
        }
        self.event_start = raw.end;
    }

    /// Leaves out an event and the rest of the chunk, and returns their bytes.
    pub(super) fn cut(&mut self, raw: &RawEvent<'_>) -> Bytes {
        self.forward_to(self.event_start);
        self.forwarded = self.chunk.len();
        match raw.split {
            false => self.chunk.slice(self.event_start..),
            true => [raw.bytes, &self.chunk[raw.end..]].concat().into(),
        }
    }

    /// Ends the chunk and returns the bytes to forward. An unfinished event stays in the scanner.
    /// If it has become `oversize`, the earlier bytes (`released`) and the rest of the chunk are
    /// forwarded.
    pub(super) fn end(mut self, oversize: bool, released: Vec<u8>) -> Forward {
        self.forward_to(self.event_start);
        if oversize {
            self.push(released.into());
            self.forward_to(self.chunk.len());
        }
        self.out
    }

    /// Forwards the held finish event. If the next event is a usage event that is removed, the
    /// finish event gets its fingerprint.
    fn forward_held(&mut self, raw: &RawEvent<'_>, action: &Action) {
        self.forward_to(self.event_start);
        let held = self.stripper.take_held();
        let fingerprint = if matches!(action, Action::Remove) { fingerprint(raw.bytes) } else { None };
        self.push(match fingerprint {
            Some(value) => with_fingerprint(held, value),
            None => held,
        });
    }

    /// Forwards the chunk up to `start` and skips it up to `end`.
    fn leave_out(&mut self, start: usize, end: usize) {
        self.forward_to(start);
        self.forwarded = end;
    }

    fn forward_to(&mut self, end: usize) {
        if self.forwarded < end {
            self.push(self.chunk.slice(self.forwarded..end));
            self.forwarded = end;
        }
    }

    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.out.push(piece);
        }
    }
}

/// The part of a split event that came in earlier chunks.
fn held_part<'a>(raw: &RawEvent<'a>) -> &'a [u8] {
    if raw.oversize { raw.bytes } else { &raw.bytes[..raw.bytes.len() - raw.end] }
}

fn without(event: &[u8], span: Span) -> Vec<u8> {
    [&event[..span.start], &event[span.end..]].concat()
}

/// The raw value of `system_fingerprint` in an event; vLLM writes it as a plain string.
fn fingerprint(event: &[u8]) -> Option<&[u8]> {
    let value = memchr::memmem::find(event, FINGERPRINT)? + FINGERPRINT.len();
    let rest = event.get(value..)?;
    let end = rest.strip_prefix(b"\"")?.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    (rest[end + 1] == b'"').then(|| &rest[..end + 2])
}

/// The event with the fingerprint as the last member. An event that has a fingerprint stays
/// unchanged.
fn with_fingerprint(event: Bytes, value: &[u8]) -> Bytes {
    match event.iter().rposition(|byte| *byte == b'}') {
        Some(close) if memchr::memmem::find(&event, FINGERPRINT).is_none() => {
            Bytes::from([&event[..close], b",", FINGERPRINT, value, &event[close..]].concat())
        }
        _ => event,
    }
}

const FINGERPRINT: &[u8] = b"\"system_fingerprint\":";

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::meter::StreamMeter;
    use crate::openai::Dialect;

    /// A stream captured from vLLM 0.32. Id and time are replaced, because they differ from run to
    /// run.
    fn captured(name: &str) -> String {
        let path = format!("{}/../../tests/fixtures/vllm-0.32/{name}.sse", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let value = |key: &str, end: char| {
            let start = text.find(key).unwrap() + key.len();
            text[start..start + text[start..].find(end).unwrap()].to_owned()
        };
        let (id, created) = (value("\"id\":\"", '"'), value("\"created\":", ','));
        text.replace(&id, "ID").replace(&created, "0")
    }

    fn stripped(stream: &str, strip: Strip, chunk: usize) -> String {
        let mut meter = StreamMeter::new(Dialect::Choices, Instant::now(), strip);
        let mut out = Vec::new();
        for part in stream.as_bytes().chunks(chunk) {
            meter
                .feed(Bytes::copy_from_slice(part), Instant::now())
                .iter()
                .for_each(|piece| out.extend_from_slice(piece));
        }
        meter.finish().iter().for_each(|piece| out.extend_from_slice(piece));
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_stream_with_injected_usage_becomes_the_stream_without_it() {
        for kind in ["chat", "completion"] {
            let plain = captured(&format!("{kind}-stream-plain"));
            for (with, strip) in
                [("usage", Strip::InjectedUsage), ("continuous", Strip::Continuous { keep_final: false })]
            {
                let injected = captured(&format!("{kind}-stream-{with}"));
                assert_ne!(injected, plain);
                for chunk in [1, 7, 64, 300, injected.len()] {
                    assert_eq!(stripped(&injected, strip, chunk), plain, "{kind}, {with}, chunks of {chunk}");
                }
            }
        }
    }

    #[test]
    fn a_stream_without_usage_passes_as_it_is() {
        let plain = captured("chat-stream-plain");
        assert_eq!(stripped(&plain, Strip::InjectedUsage, 50), plain);
        let cut = &plain[..plain.len() - 40];
        assert_eq!(stripped(cut, Strip::InjectedUsage, 50), cut, "a held event is forwarded at the end");
    }

    #[test]
    fn usage_that_the_engine_reports_unasked_stays() {
        for name in ["chat-stream-continuous", "completion-stream-continuous"] {
            let unasked = captured(name);
            for chunk in [1, 64, unasked.len()] {
                assert_eq!(stripped(&unasked, Strip::InjectedUsage, chunk), unasked, "{name}, chunks of {chunk}");
            }
        }
    }

    #[test]
    fn usage_that_the_client_requested_stays() {
        let usage = captured("chat-stream-usage");
        assert_eq!(stripped(&usage, Strip::Nothing, 50), usage);
        let continuous = captured("chat-stream-continuous");
        assert_eq!(stripped(&continuous, Strip::Continuous { keep_final: true }, 33), usage);
    }
}
