//! Takes out of a stream the usage that only we asked for.
//!
//! Exact token counts need `include_usage` (one more event at the end) or `continuous_usage_stats` (one more
//! member in every event). A client that did not ask must not see it: response bytes are the engine's, unchanged. So
//! the event, or the member with its comma, is cut out and everything around it is passed on as slices of the
//! received chunk.
//!
//! Asking for usage also takes something away: vLLM (0.32) then writes `system_fingerprint` into the usage event instead
//! of into the event with the finish reason. A client that did not ask gets it where it would have been: the finish event is held
//! until the next event, which the engine writes in the same step, and the fingerprint of a usage event that is taken
//! out is put back at its end. That is exact for one sequence; for several, usage is not injected (their first
//! finish comes long before the usage event).
//!
//! What is held back besides is the beginning of an event whose end has not arrived, because only its end tells whether it must go. An
//! event over the scanner's bound is not held: it passes as it is. An event that was split is passed on as the held part (copied)
//! and the slice that completes it.

use bytes::Bytes;

use super::forward::Forward;
use crate::openai::chunk;
use crate::openai::event::{EventKind, StreamEvent};
use crate::openai::sse::RawEvent;

/// What to take out of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strip {
    /// Nothing: the client asked for what it gets.
    #[default]
    Nothing,
    /// The one usage event at the end, which `include_usage` has caused.
    InjectedUsage,
    /// The member `usage` of every event with choices.
    Continuous {
        /// Whether the client asked for the usage event at the end, so that this one stays.
        keep_final: bool,
    },
}

/// What is remembered between chunks.
#[derive(Clone, Debug)]
pub(super) struct Cutter {
    strip: Strip,
    dropped: bool,
    /// The event with the finish reason, until the next event has come.
    held: Vec<u8>,
}

impl Cutter {
    pub(super) fn new(strip: Strip) -> Option<Self> {
        (strip != Strip::Nothing).then_some(Self { strip, dropped: false, held: Vec::new() })
    }

    pub(super) fn begin<'c>(&'c mut self, chunk: &'c Bytes) -> Cut<'c> {
        Cut { cutter: self, chunk, run: 0, at: 0, out: Forward::new() }
    }

    /// What is held when the stream has ended.
    pub(super) fn release(&mut self) -> Bytes {
        std::mem::take(&mut self.held).into()
    }

    /// Whether the usage event at the end is ours to take out.
    fn drops_final(&self) -> bool {
        !matches!(self.strip, Strip::Continuous { keep_final: true })
    }

    fn verdict(&mut self, raw: &RawEvent<'_>, event: &StreamEvent) -> Verdict {
        if raw.oversize {
            return Verdict::Keep;
        }
        if event.kind == EventKind::Usage {
            if self.drops_final() && !self.dropped {
                self.dropped = true;
                return Verdict::Drop;
            }
            return Verdict::Keep;
        }
        if event.usage.is_none() || self.strip == Strip::InjectedUsage {
            return Verdict::Keep;
        }
        match chunk::usage_member(raw.bytes) {
            Some(span) => Verdict::Cut(span.start, span.end),
            None => Verdict::Keep,
        }
    }
}

enum Verdict {
    Keep,
    Drop,
    Cut(usize, usize),
}

/// The cutting of one chunk.
pub(super) struct Cut<'c> {
    cutter: &'c mut Cutter,
    chunk: &'c Bytes,
    /// Where the bytes begin that pass unchanged and were not yet put out.
    run: usize,
    /// Where the current event begins.
    at: usize,
    out: Forward,
}

impl Cut<'_> {
    /// The next event that ended in the chunk.
    pub(super) fn event(&mut self, raw: &RawEvent<'_>, event: &StreamEvent) {
        let verdict = self.cutter.verdict(raw, event);
        if !self.cutter.held.is_empty() {
            let fingerprint = matches!(verdict, Verdict::Drop).then(|| fingerprint(raw.bytes)).flatten();
            let held = self.cutter.release();
            self.pass(self.at);
            self.put(fingerprint.map_or(held.clone(), |value| with_fingerprint(&held, value)));
        }
        if event.finish && event.kind != EventKind::Done && !raw.oversize && self.cutter.drops_final() {
            self.hold(raw, &verdict);
        } else if raw.split {
            self.split(raw, &verdict);
        } else {
            match verdict {
                Verdict::Keep => {}
                Verdict::Drop => self.leave_out(self.at, raw.end),
                Verdict::Cut(start, end) => self.leave_out(self.at + start, self.at + end),
            }
        }
        self.at = raw.end;
    }

    /// The chunk is at its end. An unfinished event stays behind, unless it is too long to be held: then what was held
    /// of it (`released`) and the rest of the chunk pass.
    pub(super) fn end(mut self, oversize: bool, released: Vec<u8>) -> Forward {
        self.pass(self.at);
        if oversize {
            // A released event was held from chunks before this one, or began in it.
            self.put(released.into());
            self.run = self.at;
            self.pass(self.chunk.len());
        }
        self.out
    }

    /// An event of which only the last part is in this chunk; always the first one to end in it.
    fn split(&mut self, raw: &RawEvent<'_>, verdict: &Verdict) {
        match *verdict {
            Verdict::Keep => {
                let held = if raw.oversize { raw.bytes } else { &raw.bytes[..raw.bytes.len() - raw.end] };
                self.put(Bytes::copy_from_slice(held));
            }
            Verdict::Drop => self.run = raw.end,
            Verdict::Cut(start, end) => {
                self.put(Bytes::from([&raw.bytes[..start], &raw.bytes[end..]].concat()));
                self.run = raw.end;
            }
        }
    }

    /// Keeps a whole event back until the next one has come.
    fn hold(&mut self, raw: &RawEvent<'_>, verdict: &Verdict) {
        self.cutter.held = match *verdict {
            Verdict::Cut(start, end) => [&raw.bytes[..start], &raw.bytes[end..]].concat(),
            Verdict::Keep | Verdict::Drop => raw.bytes.to_vec(),
        };
        self.pass(self.at);
        self.run = raw.end;
    }

    fn leave_out(&mut self, start: usize, end: usize) {
        self.pass(start);
        self.run = end;
    }

    fn pass(&mut self, end: usize) {
        if self.run < end {
            self.put(self.chunk.slice(self.run..end));
        }
        self.run = end;
    }

    fn put(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.out.push(piece);
        }
    }
}

/// The raw value of `system_fingerprint` in an event; vLLM writes it as a plain string.
fn fingerprint(event: &[u8]) -> Option<&[u8]> {
    let value = memchr::memmem::find(event, FINGERPRINT)? + FINGERPRINT.len();
    let rest = event.get(value..)?;
    let end = rest.strip_prefix(b"\"")?.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    (rest[end + 1] == b'"').then(|| &rest[..end + 2])
}

/// The event with the fingerprint as its last member, unless it has one.
fn with_fingerprint(event: &Bytes, value: &[u8]) -> Bytes {
    match event.iter().rposition(|byte| *byte == b'}') {
        Some(close) if memchr::memmem::find(event, FINGERPRINT).is_none() => {
            Bytes::from([&event[..close], b",", FINGERPRINT, value, &event[close..]].concat())
        }
        _ => event.clone(),
    }
}

const FINGERPRINT: &[u8] = b"\"system_fingerprint\":";

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::meter::StreamMeter;
    use crate::openai::Dialect;

    /// A stream captured from vLLM 0.32, with what differs from run to run made equal.
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
    fn what_vllm_says_with_injected_usage_becomes_what_it_says_without() {
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
        assert_eq!(stripped(cut, Strip::InjectedUsage, 50), cut, "a held event is given up at the end");
    }

    #[test]
    fn usage_the_client_asked_for_stays_where_it_is() {
        let usage = captured("chat-stream-usage");
        assert_eq!(stripped(&usage, Strip::Nothing, 50), usage);
        let continuous = captured("chat-stream-continuous");
        assert_eq!(stripped(&continuous, Strip::Continuous { keep_final: true }, 33), usage);
    }
}
