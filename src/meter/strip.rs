//! Takes out of a stream the usage that only we asked for.
//!
//! Exact token counts need `include_usage` (one more event at the end) or `continuous_usage_stats` (one more
//! member in every event). A client that did not ask must not see it: response bytes are the engine's, unchanged. So
//! the event, or the member with its comma, is cut out and everything around it is passed on as slices of the
//! received chunk.
//!
//! What is held back is the beginning of an event whose end has not arrived, because only its end tells whether it must go. An
//! event over the scanner's bound is not held: it passes as it is. An event that was split is passed on as the held part (copied)
//! and the slice that completes it.

use bytes::Bytes;

use super::stream::Forward;
use crate::openai::chunk::{self, Event, EventKind};
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
}

impl Cutter {
    pub(super) fn new(strip: Strip) -> Option<Self> {
        (strip != Strip::Nothing).then_some(Self { strip, dropped: false })
    }

    pub(super) fn begin<'c>(&'c mut self, chunk: &'c Bytes) -> Cut<'c> {
        Cut { cutter: self, chunk, run: 0, at: 0, out: Forward::new() }
    }

    fn verdict(&mut self, raw: &RawEvent<'_>, event: &Event) -> Verdict {
        if raw.oversize {
            return Verdict::Keep;
        }
        let drop_final = !matches!(self.strip, Strip::Continuous { keep_final: true });
        if event.kind == EventKind::Usage {
            if drop_final && !self.dropped {
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
    pub(super) fn event(&mut self, raw: &RawEvent<'_>, event: &Event) {
        let verdict = self.cutter.verdict(raw, event);
        if raw.split {
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
