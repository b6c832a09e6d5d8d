//! The meter of a stream that another engine may continue: it keeps the text, withholds an error,
//! and goes on with the bytes of the next engine.
//!
//! Bound: the bytes that the caller permits, and the scanner's longest event.

use bytes::Bytes;

use super::{StreamMeter, Tally};
use crate::meter::strip::{Strip, Stripper};
use crate::openai::event::{Dialect, EventKind, StreamEvent};
use crate::openai::kept_text::KeptText;
use crate::openai::sse::SseScanner;

impl StreamMeter {
    /// Keeps at most this many bytes of the answer's text; called before the first chunk. From then
    /// on only whole events are passed on. An error, or a finish reason `abort`, and the bytes
    /// behind it are withheld: see [`StreamMeter::take_withheld`]. The caller passes them on if no
    /// other engine continues the stream.
    pub fn keep_text(&mut self, most: usize) {
        if self.tally.dialect == Dialect::Choices {
            self.memo.keep_text(most);
            self.stripper = self.stripper.take().or_else(|| Stripper::new(Strip::PartsOnly));
        }
    }

    /// The text so far, if it is kept.
    pub fn kept(&self) -> Option<&KeptText> {
        self.memo.kept()
    }

    /// Keeps no text from now on.
    pub fn keep_nothing(&mut self) {
        self.memo.keep_nothing();
    }

    /// The bytes that were withheld, from the first error on.
    pub fn take_withheld(&mut self) -> Option<Bytes> {
        self.withheld.take()
    }

    /// Tokens of the text so far. Events without text behind the last text do not count: their
    /// tokens complete no character, and another engine generates them again.
    pub fn text_tokens(&self) -> u64 {
        self.tally.text_tokens()
    }

    /// Whether every choice that began has a finish reason, and none was aborted.
    pub fn have_choices_finished(&self) -> bool {
        self.memo.choices().have_finished() && self.tally.stats.error.is_none()
    }

    /// Prepares the meter for the bytes of another engine that continues the text. An unfinished
    /// event, an error and tokens behind the text are forgotten.
    pub fn resume(&mut self) {
        (self.sse, self.long, self.withheld) = (SseScanner::new(), None, None);
        self.tally.resume();
    }

    /// Whether the client has the beginning of an event whose end has not come: it is too long to
    /// be held.
    pub fn has_sent_part(&self) -> bool {
        self.sse.pending_oversize()
    }
}

impl Tally {
    /// Whether the event ends an answer that another engine could continue: an error in the middle.
    pub(super) fn is_cut_by(&self, event: &StreamEvent) -> bool {
        (event.aborted || event.kind == EventKind::Error) && self.first.is_some() && !self.stats.finished
    }

    fn text_tokens(&self) -> u64 {
        let events = self.stats.token_events;
        let with_text = if events > 0 && self.empty_run.1 == events { self.empty_run.0 } else { events };
        self.tokens.unwrap_or(with_text)
    }

    fn resume(&mut self) {
        let tokens = self.text_tokens();
        let Self { stats, .. } = self;
        if self.tokens.is_none() {
            stats.token_events = tokens;
        }
        stats.usage.completion = self.tokens;
        if stats.error.take().is_some() {
            (stats.error_before_content, stats.finished, stats.done) = (false, false, false);
            stats.answer.finish = None;
        }
    }
}
