//! Measures TTFT, ITL, TPOT and E2EL of a stream on the forwarded bytes. No other code defines
//! them.
//!
//! Times count from the moment at which the gateway had received the whole request.
//!
//! - TTFT: to the first event with output or a finish reason.
//! - Event ITL: gaps between such events. Gaps of zero, between events of one chunk, count too.
//! - Token ITL, used instead if events carry cumulative usage: the gap since the last event with
//!   new tokens, divided by the number of new tokens, counted once for each.
//! - E2EL: to the last event that carries choices.
//! - TPOT: (E2EL - TTFT) / (completion tokens - 1), from two tokens on.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::forward::Forward;
use super::histogram::ItlHistogram;
use super::slo::Timings;
pub use super::strip::Strip;
use super::strip::Stripper;
use super::usage::{SeenOutput, UsageBounds};
use crate::openai::chunk::{self, Memo};
use crate::openai::engine_times::EngineTimes;
use crate::openai::event::{Dialect, EventKind, StreamEvent};
use crate::openai::long_event::LongEvent;
use crate::openai::not_continued::NotContinued;
use crate::openai::response::{Answer, TokenUsage, UpstreamError};
use crate::openai::sse::{RawEvent, Scanned, SseScanner};

/// The meter of one stream. A chunk that splits no event costs no allocation and no lock. Events of
/// any size are read; see [`LongEvent`].
///
/// Unless `strip` is [`Strip::Nothing`], the meter holds an unfinished event until the event ends.
/// If it may remove a usage event, it holds the finish event until the next event.
/// [`StreamMeter::finish`] returns the rest.
///
/// A stream is complete when the end was seen (`[DONE]`, `message_stop`, a terminal response), or
/// when the body ends in order and every choice that began has a finish reason
/// ([`StreamMeter::end_of_body`]). The end of the body always completes a stream of a job.
#[derive(Clone, Debug)]
pub struct StreamMeter {
    sse: SseScanner,
    /// The open event, if it is too long to be assembled.
    long: Option<Box<LongEvent>>,
    stripper: Option<Stripper>,
    tally: Tally,
    memo: Memo,
    /// While the text is kept: the bytes from the first error on, which the client has not
    /// received.
    withheld: Option<Bytes>,
}

/// Measurements of one stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StreamStats {
    /// Time to first token; `None` if no output came.
    pub ttft: Option<Duration>,
    /// End-to-end latency; `None` if no event carried choices.
    pub e2el: Option<Duration>,
    /// Time per output token; `None` below two tokens or without usage.
    pub tpot: Option<Duration>,
    /// Gaps between output events, or between tokens if `token_itl`.
    pub itl: ItlHistogram,
    /// Whether `itl` counts tokens (continuous usage) and not events.
    pub token_itl: bool,
    /// Token counts that the stream reported, within the bounds.
    pub usage: TokenUsage,
    /// The times that the engine measured, if it reported them.
    pub times: Option<EngineTimes>,
    /// Events with output.
    pub content_events: u64,
    /// Events that carried tokens: events with output, and empty events after the first output,
    /// each for a token that completes no character. Fewer than the tokens if the engine puts
    /// several into an event.
    pub token_events: u64,
    /// All events, comments included.
    pub events: u64,
    /// Events that were too long to be assembled and were read piece by piece.
    pub oversize_events: u64,
    /// Whether a finish reason was seen.
    pub finished: bool,
    /// The answer, as the stream describes it.
    pub answer: Answer,
    /// Whether the end was seen (`[DONE]`, `message_stop`, a terminal response).
    pub done: bool,
    /// The first error in the stream.
    pub error: Option<UpstreamError>,
    /// Whether that error came before any output. Another backend may then still take the request.
    pub error_before_content: bool,
}

impl StreamStats {
    /// For [`Objectives::met`](super::Objectives::met).
    pub fn timings(&self) -> Timings {
        Timings { ttft: self.ttft, tpot: self.tpot, e2el: self.e2el }
    }

    /// Tokens generated, all sequences together: the number that the engine reported, or one per
    /// event that carried tokens.
    pub fn generated(&self) -> u64 {
        self.usage.completion.unwrap_or(self.token_events)
    }

    /// Time per output token of one sequence, if `sequences` of equal length were generated in
    /// parallel.
    pub fn tpot_of_one(&self, sequences: u32) -> Option<Duration> {
        let tokens = self.usage.completion? as f64 / f64::from(sequences.max(1));
        let decoding = self.e2el?.checked_sub(self.ttft?)?;
        (tokens >= 2.0).then(|| decoding.div_f64(tokens - 1.0))
    }

    /// Whether the end of the response was seen, without an error.
    pub fn is_complete(&self) -> bool {
        self.done && self.error.is_none()
    }
}

impl StreamMeter {
    /// A meter for a stream whose request was fully received at `start`.
    pub fn new(dialect: Dialect, start: Instant, strip: Strip) -> Self {
        Self {
            sse: SseScanner::new(),
            long: None,
            stripper: Stripper::new(strip),
            tally: Tally::new(dialect, start),
            memo: Memo::default(),
            withheld: None,
        }
    }

    /// Sets the bounds within which reported usage is believed.
    pub fn set_bounds(&mut self, bounds: UsageBounds) {
        self.tally.bounds = bounds;
    }

    /// Measures a chunk that arrived at `now` and returns what to forward.
    pub fn feed(&mut self, chunk: Bytes, now: Instant) -> Forward {
        let keeps = self.memo.kept().is_some();
        let Self { sse, long, stripper, tally, memo, withheld } = self;
        let dialect = tally.dialect;
        let Some(stripper) = stripper else {
            sse.feed(&chunk, |found| {
                read(found, dialect, (long, memo), |raw, event| tally.event(event, raw.oversize, now));
            });
            sse.release();
            return std::iter::once(chunk).filter(|chunk| !chunk.is_empty()).collect();
        };
        let mut out = stripper.begin(&chunk);
        sse.feed(&chunk, |found| {
            read(found, dialect, (long, memo), |raw, event| {
                if withheld.is_some() {
                    return;
                }
                match tally.is_cut_by(&event) && keeps && !raw.oversize {
                    true => *withheld = Some(out.cut(raw)),
                    false => out.event(raw, &event),
                }
                tally.event(event, raw.oversize, now);
            });
        });
        let oversize = sse.pending_oversize() && withheld.is_none();
        out.end(oversize, sse.release())
    }

    /// Stops all timing except TTFT, because from now on the time at which bytes arrive is not the
    /// time at which the engine sent them. The stream gets no further gaps, no TPOT and no E2EL.
    /// TTFT stays if the first token has come.
    pub fn stop_timing(&mut self) {
        self.tally.is_timed = false;
    }

    /// Reads a last event that only the end of the body terminates, and decides whether the stream
    /// is complete. The caller must call [`StreamMeter::finish`] next.
    pub fn end_of_body(&mut self, now: Instant) {
        let Self { sse, long, stripper, tally, memo, .. } = self;
        let oversize = sse.pending_oversize();
        if long.is_none() && !oversize && sse.pending().is_empty() {
            return tally.end_of_body(memo);
        }
        let (last, event) = match long.take() {
            Some(long) => (&[][..], long.finish(memo)),
            None => (sse.pending(), chunk::read_next(tally.dialect, sse.pending(), memo)),
        };
        if oversize || !last.is_empty() {
            if let Some(stripper) = stripper {
                stripper.last_event(last, &event);
            }
            tally.event(event, oversize, now);
        }
        tally.end_of_body(memo);
    }

    /// Ends the stream and returns the bytes of an unfinished event that were held; usually none.
    pub fn finish(&mut self) -> Forward {
        let mut forward = Forward::new();
        if let Some(stripper) = &mut self.stripper {
            let held = [stripper.take_held(), stripper.take_last(self.sse.pending())];
            forward.extend(held.into_iter().filter(|piece| !piece.is_empty()));
        }
        (self.sse, self.long) = (SseScanner::new(), None);
        forward
    }

    /// When the first output arrived. Until then the lease keeps the prefill permit.
    pub fn first_content_at(&self) -> Option<Instant> {
        self.tally.first
    }

    /// The first error in the stream.
    pub fn error(&self) -> Option<&UpstreamError> {
        self.tally.stats.error.as_ref()
    }

    /// Whether the end of the stream has been seen.
    pub fn is_done(&self) -> bool {
        self.tally.stats.done
    }

    /// How far the stream has come.
    pub fn stage(&self) -> StreamStage {
        self.tally.stage
    }

    /// Number of events so far that show that the engine works for this stream.
    pub fn progress(&self) -> u64 {
        self.tally.progress
    }

    /// Tokens so far: the reported number, or one for each event that carried tokens if that is
    /// more.
    pub fn tokens(&self) -> u64 {
        self.tally.stats.usage.completion.unwrap_or(0).max(self.tally.stats.token_events)
    }

    /// Whether the stream is inside an event that is not a comment: bytes of the event came, but
    /// not the end.
    pub fn is_inside_event(&self) -> bool {
        self.sse.pending_oversize() || self.sse.pending().first().is_some_and(|byte| *byte != b':')
    }

    /// Number of events so far, without pings; `None` while an event is open.
    pub fn events_between(&self) -> Option<u64> {
        let is_between = self.sse.pending().is_empty() && !self.sse.pending_oversize();
        is_between.then(|| self.tally.stats.events - self.tally.pings)
    }

    /// Prompt tokens that the stream has reported so far.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.tally.stats.usage.prompt
    }

    /// Completion tokens that the stream has reported so far.
    pub fn completion_tokens(&self) -> Option<u64> {
        self.tally.stats.usage.completion
    }

    /// The measurements so far.
    pub fn stats(&self) -> StreamStats {
        self.tally.stats()
    }
}

/// The stage that a stream has reached, judged by events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StreamStage {
    /// No event came, or only pings.
    #[default]
    Waiting,
    /// The response was accepted; the engine may not have begun.
    Accepted,
    /// The engine has begun, but no output came, only a role or the start of an item.
    Begun,
    /// Output came, or a finish reason, an error, the end, or an unknown event.
    Open,
}

impl StreamStage {
    fn after(event: &StreamEvent) -> Self {
        match event.kind {
            _ if event.finish || !event.kind.is_preamble() => Self::Open,
            EventKind::Ping => Self::Waiting,
            EventKind::Lifecycle | EventKind::Usage => Self::Accepted,
            _ => Self::Begun,
        }
    }
}

/// Reads a scanned event. `take` gets the event once the scanner has seen the end.
#[inline(always)]
fn read<'a>(
    found: Scanned<'a>,
    dialect: Dialect,
    (long, memo): (&mut Option<Box<LongEvent>>, &mut Memo),
    take: impl FnOnce(&RawEvent<'a>, StreamEvent),
) {
    match found {
        Scanned::Event(raw) => {
            let event = match raw.oversize && raw.split {
                false => chunk::read_next(dialect, raw.bytes, memo),
                true if dialect == Dialect::Plain => chunk::plain(end_of_long(long, memo), raw.bytes.len()),
                true => end_of_long(long, memo),
            };
            take(&raw, event);
        }
        Scanned::Piece(piece) => feed_long(long, dialect, piece),
    }
}

#[cold]
fn feed_long(long: &mut Option<Box<LongEvent>>, dialect: Dialect, piece: &[u8]) {
    long.get_or_insert_with(|| Box::new(LongEvent::new(dialect))).feed(piece);
}

#[cold]
fn end_of_long(long: &mut Option<Box<LongEvent>>, memo: &mut Memo) -> StreamEvent {
    if let Some(kept) = memo.kept_mut() {
        kept.drop_for(NotContinued::TooLong);
    }
    long.take().map(|long| long.finish(memo)).unwrap_or_default()
}

#[derive(Clone, Debug)]
struct Tally {
    dialect: Dialect,
    start: Instant,
    first: Option<Instant>,
    /// When the last counted gap ended.
    last: Instant,
    last_choices: Option<Instant>,
    /// Completion tokens that the engine had reported at `last`.
    tokens: Option<u64>,
    /// `token_events` before and after the last run of empty events.
    empty_run: (u64, u64),
    stage: StreamStage,
    progress: u64,
    pings: u64,
    is_timed: bool,
    text: u64,
    bounds: UsageBounds,
    stats: StreamStats,
}

impl Tally {
    fn new(dialect: Dialect, start: Instant) -> Self {
        let stats = StreamStats::default();
        Self {
            dialect,
            start,
            first: None,
            last: start,
            last_choices: None,
            tokens: None,
            empty_run: (0, 0),
            stage: StreamStage::Waiting,
            progress: 0,
            pings: 0,
            is_timed: true,
            text: 0,
            bounds: UsageBounds::default(),
            stats,
        }
    }

    /// The body has ended without a break. If no end marker was seen, decides whether the stream is
    /// complete.
    fn end_of_body(&mut self, memo: &Memo) {
        self.stats.done |= match self.dialect {
            Dialect::Choices => memo.choices().have_finished(),
            Dialect::Messages | Dialect::Cohere => self.stats.finished,
            Dialect::Responses => false,
            Dialect::Plain => true,
        };
    }

    #[inline(always)]
    fn event(&mut self, event: StreamEvent, oversize: bool, now: Instant) {
        self.stats.events += 1;
        self.text += event.text;
        self.stats.oversize_events += u64::from(oversize);
        if event.is_text() && self.is_timed && self.first.is_some() {
            // Nearly every event of a stream takes this branch. It has the effect of `other_event`,
            // written out for speed.
            self.progress += 1;
            self.stage = StreamStage::Open;
            self.stats.content_events += 1;
            self.stats.token_events += 1;
            self.stats.itl.record(now.saturating_duration_since(self.last), 1);
            (self.last, self.last_choices) = (now, Some(now));
            return;
        }
        self.other_event(event, now);
    }

    #[inline(never)]
    fn other_event(&mut self, mut event: StreamEvent, now: Instant) {
        let mut is_progress = event.finish || event.kind.is_progress();
        if let Some(usage) = &mut event.usage {
            *usage = self.bounds.so_far(*usage, self.seen());
            is_progress |= usage.completion > self.stats.usage.completion.or(Some(0));
            self.stats.usage.update(*usage);
        }
        self.stats.times = event.times.or(self.stats.times);
        self.progress += u64::from(is_progress);
        self.pings += u64::from(event.kind == EventKind::Ping);
        if self.stage < StreamStage::Open {
            self.stage = self.stage.max(StreamStage::after(&event));
        }
        self.stats.finished |= event.finish;
        self.stats.answer.update(event.answer);
        self.stats.done |= event.kind == EventKind::Done || (event.finish && self.dialect == Dialect::Responses);
        let output = !event.aborted && (event.kind == EventKind::Content || (event.finish && self.first.is_none()));
        if output {
            self.output(event.usage.and_then(|usage| usage.completion), now);
        }
        if output || event.finish || event.kind.carries_choices() {
            self.last_choices = Some(now);
        }
        let empty = event.kind == EventKind::Empty && self.dialect == Dialect::Choices && self.first.is_some();
        if empty && !output {
            if self.empty_run.1 != self.stats.token_events {
                self.empty_run.0 = self.stats.token_events;
            }
            self.empty_run.1 = self.stats.token_events + 1;
        }
        self.stats.token_events += u64::from(output || empty);
        if event.aborted && self.stats.error.is_none() {
            self.stats.error_before_content = self.first.is_none();
            self.stats.error = Some(UpstreamError::aborted());
        }
        if event.kind == EventKind::Error && self.stats.error.is_none() {
            self.stats.error_before_content = self.first.is_none();
            self.stats.error = Some(event.error.map(|error| *error).unwrap_or_default());
        }
    }

    /// Counts an event with output. `tokens`: the number generated so far, if the event reports it.
    fn output(&mut self, tokens: Option<u64>, now: Instant) {
        self.stats.content_events += 1;
        if self.first.is_none() {
            self.first = Some(now);
            self.last = now;
            self.tokens = tokens;
            return;
        }
        if !self.is_timed {
            self.tokens = tokens.or(self.tokens);
            return;
        }
        let gap = now.saturating_duration_since(self.last);
        match (tokens, self.tokens) {
            (Some(tokens), Some(before)) => {
                self.stats.token_itl = true;
                let new = u32::try_from(tokens.saturating_sub(before)).unwrap_or(u32::MAX);
                if new == 0 {
                    return;
                }
                self.stats.itl.record(gap / new, new);
            }
            _ => self.stats.itl.record(gap, 1),
        }
        self.tokens = tokens.or(self.tokens);
        self.last = now;
    }

    /// The output so far, including the event that is being counted.
    fn seen(&self) -> SeenOutput {
        SeenOutput { bytes: self.text, events: self.stats.token_events + 1 }
    }

    fn stats(&self) -> StreamStats {
        let mut stats = self.stats.clone();
        let seen = SeenOutput { events: stats.token_events, ..self.seen() };
        stats.usage = self.bounds.at_end(stats.usage, seen);
        stats.ttft = self.first.map(|at| at - self.start);
        stats.e2el = self.last_choices.filter(|_| self.is_timed).map(|at| at - self.start);
        stats.tpot = stats.tpot_of_one(1);
        stats
    }
}

mod kept;
#[cfg(test)]
mod tests;
