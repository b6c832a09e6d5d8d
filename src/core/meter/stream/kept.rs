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
    /// Keeps at most this many bytes of the answer's text. The caller calls it before the first
    /// chunk. From then on the meter passes on only whole events. It withholds an error or `abort`
    /// after the first output, with all bytes after it: see [`StreamMeter::take_withheld`]. The
    /// caller passes these bytes on if no other engine continues the stream.
    pub fn keep_text(&mut self, most: usize) {
        if matches!(self.tally.dialect, Dialect::Choices | Dialect::Messages) {
            self.memo.keep_text(most);
            self.stripper = self.stripper.take().or_else(|| Stripper::new(Strip::PartsOnly));
        }
    }

    /// The text so far, if it is kept.
    #[inline]
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

    /// Tokens of the text so far. Empty events after the last text do not count: their tokens
    /// complete no character, and another engine generates them again.
    pub fn text_tokens(&self) -> u64 {
        self.tally.text_tokens()
    }

    /// Whether the engine has reported how many tokens the text has.
    pub fn has_counted_text(&self) -> bool {
        self.tally.tokens.is_some()
    }

    /// Whether every choice that began has a finish reason, and none was aborted.
    pub fn have_choices_finished(&self) -> bool {
        self.memo.choices().have_finished() && self.tally.stats.error.is_none()
    }

    /// Whether a choice, or a block of a message, has begun.
    pub fn have_choices_begun(&self) -> bool {
        self.memo.choices().have_begun()
    }

    /// Prepares the meter for the bytes of another engine that continues the text. An unfinished
    /// event, an error, and tokens after the last text are forgotten.
    pub fn resume(&mut self) {
        (self.sse, self.long, self.withheld) = (SseScanner::new(), None, None);
        self.tally.resume();
    }

    /// Whether the client received the beginning of an unfinished event, which was too long to be
    /// held.
    pub fn has_sent_part(&self) -> bool {
        self.sse.pending_oversize()
    }
}

impl Tally {
    /// Whether the event is an error in the middle of an answer, so that another engine could
    /// continue the answer.
    pub(super) fn is_cut_by(&self, event: &StreamEvent) -> bool {
        (event.kind == EventKind::Error || event.aborted) && self.first.is_some() && !self.stats.finished
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

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    const HEAD: &str = "\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\"";

    fn event(delta: &str, finish: &str) -> String {
        format!("data: {{{HEAD},\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":{finish}}}]}}\n\n")
    }

    fn word(text: &str) -> String {
        event(&format!("{{\"content\":\"{text}\"}}"), "null")
    }

    /// Feeds a stream in chunks of this size; returns the bytes passed on, and the meter.
    fn passed(strip: Strip, stream: &str, size: usize) -> (String, StreamMeter) {
        let mut meter = StreamMeter::new(Dialect::Choices, Instant::now(), strip);
        meter.keep_text(1_000);
        let mut out = Vec::new();
        for chunk in stream.as_bytes().chunks(size) {
            let pieces = meter.feed(Bytes::copy_from_slice(chunk), Instant::now());
            pieces.iter().for_each(|piece| out.extend_from_slice(piece));
            if meter.error().is_some() {
                break;
            }
        }
        (String::from_utf8(out).unwrap(), meter)
    }

    #[test]
    fn an_error_is_withheld_and_what_came_before_it_passes_as_whole_events() {
        let error = "data: {\"error\":{\"message\":\"died\",\"code\":500}}\n\n";
        let before = [event("{\"role\":\"assistant\",\"content\":\"\"}", "null"), word("a"), word(" b")].concat();
        for end in [error, &event("{\"content\":\"c\"}", "\"abort\"")] {
            for strip in [Strip::Nothing, Strip::InjectedUsage] {
                for size in [1, 7, 64, 5_000] {
                    let (passed, mut meter) = passed(strip, &format!("{before}{end}data: [DONE]\n\n"), size);
                    assert_eq!(passed, before, "{strip:?}, chunks of {size}");
                    let withheld = String::from_utf8(meter.take_withheld().unwrap().to_vec()).unwrap();
                    assert!(format!("{end}data: [DONE]\n\n").starts_with(&withheld), "{withheld}");
                    assert!(withheld.starts_with(end) && !meter.have_choices_finished());
                    assert_eq!((meter.kept().unwrap().raw().unwrap(), meter.text_tokens()), (&b"a b"[..], 2));
                }
            }
        }
    }

    #[test]
    fn the_next_engine_goes_on_where_the_text_ended() {
        let cut = [word("a"), word(" b"), word(""), word("")].concat() + &word(" c")[..40];
        for strip in [Strip::Nothing, Strip::InjectedUsage] {
            let (passed, mut meter) = passed(strip, &cut, 50);
            assert_eq!(passed, cut[..cut.len() - 40], "half an event is held");
            assert_eq!((meter.tokens(), meter.text_tokens()), (4, 2), "tokens without a character are lost");
            meter.resume();
            let rest = [word(" c"), event("{\"content\":\" d\"}", "\"stop\"")].concat() + "data: [DONE]\n\n";
            let mut out = Vec::new();
            for piece in meter.feed(Bytes::from(rest.clone()), Instant::now()).iter().chain(meter.finish().iter()) {
                out.extend_from_slice(piece);
            }
            assert_eq!(String::from_utf8(out).unwrap(), rest);
            let stats = meter.stats();
            assert_eq!((stats.token_events, stats.done, stats.error), (4, true, None));
            assert_eq!(meter.kept().unwrap().raw().unwrap(), b"a b c d");
        }
    }
}
