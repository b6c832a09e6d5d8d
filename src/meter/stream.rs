//! The one definition of TTFT, ITL, TPOT and E2EL, measured on the bytes of a stream going by.
//!
//! [`StreamMeter::feed`] takes each chunk as it came from upstream and returns what must go to the client now: the very same
//! `Bytes`, unless usage that only we asked for has to be taken out again ([`Strip`]). Nothing is
//! held back except, when stripping, the tail of an event whose end has not come yet; [`StreamMeter::finish`] gives that up.
//!
//! Definitions (contract, section 4), all from the moment the request was fully received:
//! TTFT: to the first event with output or a finish reason. Event ITL: gaps between such events. Token ITL, when events
//! carry cumulative usage: the gap since the last event with new tokens, divided by the tokens it brought, counted once
//! for each; it replaces event ITL in the histogram. E2EL: to the last event that carries choices.
//! TPOT: (E2EL - TTFT) / (completion tokens - 1), from two tokens on. Events that arrive in one chunk share its time: their
//! gaps are zero and are counted.
//!
//! Costs no allocation and no lock for a chunk that cuts no event in two.

use std::time::Duration;

use bytes::Bytes;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::histogram::ItlHistogram;
use super::slo::Timings;
use super::strip::Cutter;
pub use super::strip::Strip;
use crate::openai::answer::{StreamError, TokenUsage};
use crate::openai::chunk::{self, Dialect, Event, EventKind};
use crate::openai::sse::SseScanner;

/// What must go to the client now: pieces in order, none of them empty.
pub type Forward = SmallVec<[Bytes; 2]>;

/// The meter of one stream.
#[derive(Clone, Debug)]
pub struct StreamMeter {
    sse: SseScanner,
    cutter: Option<Cutter>,
    tally: Tally,
}

/// What was measured of one stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StreamStats {
    /// Time to first token; `None` when no output came.
    pub ttft: Option<Duration>,
    /// End-to-end latency; `None` when no event carried choices.
    pub e2el: Option<Duration>,
    /// Time per output token; `None` below two tokens or without usage.
    pub tpot: Option<Duration>,
    /// Gaps between output events, or tokens where `token_itl`.
    pub itl: ItlHistogram,
    /// Whether `itl` counts tokens (continuous usage) and not events.
    pub token_itl: bool,
    /// Token counts as far as the stream reported them.
    pub usage: TokenUsage,
    /// Events with output.
    pub content_events: u64,
    /// All events, comments included.
    pub events: u64,
    /// Events too long to be looked into.
    pub oversize_events: u64,
    /// Whether a finish reason was seen.
    pub finished: bool,
    /// Whether the stream said that it ends (`[DONE]`, `message_stop`, a terminal response).
    pub done: bool,
    /// The first error in the stream.
    pub error: Option<StreamError>,
    /// Whether that error came before any output (another backend may then still take the request).
    pub error_before_content: bool,
}

impl StreamStats {
    /// For [`Objectives::met`](super::Objectives::met).
    pub fn timings(&self) -> Timings {
        Timings { ttft: self.ttft, tpot: self.tpot, e2el: self.e2el }
    }

    /// Whether the answer is whole: finished, ended and without error.
    pub fn is_complete(&self) -> bool {
        self.done && self.error.is_none()
    }
}

impl StreamMeter {
    /// A meter for a stream whose request was fully received at `start`.
    pub fn new(dialect: Dialect, start: Instant, strip: Strip) -> Self {
        Self { sse: SseScanner::new(), cutter: Cutter::new(strip), tally: Tally::new(dialect, start) }
    }

    /// Looks at a chunk that arrived at `now` and returns what to forward.
    pub fn feed(&mut self, chunk: Bytes, now: Instant) -> Forward {
        let tally = &mut self.tally;
        let Some(cutter) = &mut self.cutter else {
            self.sse.feed(&chunk, |raw| {
                tally.event(chunk::read(tally.dialect, raw.bytes), raw.oversize, now);
            });
            self.sse.release();
            let mut forward = Forward::new();
            if !chunk.is_empty() {
                forward.push(chunk);
            }
            return forward;
        };
        let mut cut = cutter.begin(&chunk);
        self.sse.feed(&chunk, |raw| {
            let event = chunk::read(tally.dialect, raw.bytes);
            cut.event(&raw, &event);
            tally.event(event, raw.oversize, now);
        });
        let oversize = self.sse.pending_oversize();
        cut.end(oversize, self.sse.release())
    }

    /// The stream has ended: returns what was held back of an unfinished event, usually nothing.
    pub fn finish(&mut self) -> Forward {
        let mut forward = Forward::new();
        forward.extend(self.cutter.as_mut().map(Cutter::release).filter(|held| !held.is_empty()));
        if self.cutter.is_some() && !self.sse.pending().is_empty() {
            forward.push(Bytes::copy_from_slice(self.sse.pending()));
        }
        self.sse = SseScanner::new();
        forward
    }

    /// When the first output arrived. Until then a lease still holds its prefill permit.
    pub fn first_content_at(&self) -> Option<Instant> {
        self.tally.first
    }

    /// The first error in the stream.
    pub fn saw_error(&self) -> Option<&StreamError> {
        self.tally.stats.error.as_ref()
    }

    /// Whether the stream has said that it ends.
    pub fn is_done(&self) -> bool {
        self.tally.stats.done
    }

    /// Completion tokens that the stream has reported so far.
    pub fn completion_tokens(&self) -> Option<u64> {
        self.tally.stats.usage.completion
    }

    /// What has been measured so far.
    pub fn stats(&self) -> StreamStats {
        self.tally.stats()
    }
}

/// The times and counts of one stream.
#[derive(Clone, Debug)]
struct Tally {
    dialect: Dialect,
    start: Instant,
    first: Option<Instant>,
    /// The end of the last gap that was counted.
    last: Instant,
    last_choices: Option<Instant>,
    /// Completion tokens reported up to `last`.
    tokens: Option<u64>,
    stats: StreamStats,
}

impl Tally {
    fn new(dialect: Dialect, start: Instant) -> Self {
        let stats = StreamStats::default();
        Self { dialect, start, first: None, last: start, last_choices: None, tokens: None, stats }
    }

    fn event(&mut self, event: Event, oversize: bool, now: Instant) {
        self.stats.events += 1;
        self.stats.oversize_events += u64::from(oversize);
        if let Some(usage) = event.usage {
            self.stats.usage.update(usage);
        }
        self.stats.finished |= event.finish;
        self.stats.done |= event.kind == EventKind::Done || (event.finish && self.dialect == Dialect::Responses);
        let output = event.kind == EventKind::Content || (event.finish && self.first.is_none());
        if output {
            self.output(event.usage.and_then(|usage| usage.completion), now);
        }
        if output || event.finish || event.kind == EventKind::Empty {
            self.last_choices = Some(now);
        }
        if event.kind == EventKind::Error && self.stats.error.is_none() {
            self.stats.error_before_content = self.first.is_none();
            self.stats.error = Some(event.error.map(|error| *error).unwrap_or_default());
        }
    }

    /// An event with output; `tokens`: generated so far, where the event says it.
    fn output(&mut self, tokens: Option<u64>, now: Instant) {
        self.stats.content_events += 1;
        if self.first.is_none() {
            self.first = Some(now);
            self.last = now;
            self.tokens = tokens;
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

    fn stats(&self) -> StreamStats {
        let mut stats = self.stats.clone();
        stats.ttft = self.first.map(|at| at - self.start);
        stats.e2el = self.last_choices.map(|at| at - self.start);
        stats.tpot = match (stats.ttft, stats.e2el, stats.usage.completion) {
            (Some(ttft), Some(e2el), Some(tokens @ 2..)) => Some((e2el - ttft).div_f64((tokens - 1) as f64)),
            _ => None,
        };
        stats
    }
}
