//! Measures TTFT, ITL, TPOT and E2EL on the bytes of a stream as they are forwarded; the only definition of these.
//!
//! [`StreamMeter::feed`] takes each chunk from upstream and returns what must go to the client now: the same `Bytes`,
//! unless injected usage has to be removed ([`Strip`]). Nothing is held except, when stripping, the tail of an event whose
//! end has not arrived and the event with the finish reason; [`StreamMeter::finish`] returns what is still held.
//!
//! Definitions (contract, section 4), all from the moment the request was fully received:
//! TTFT: to the first event with output or a finish reason. Event ITL: gaps between such events. Token ITL, when events
//! carry cumulative usage: the gap since the last event with new tokens, divided by the tokens it brought, counted once
//! for each; it replaces event ITL in the histogram. E2EL: to the last event that carries choices.
//! TPOT: (E2EL - TTFT) / (completion tokens - 1), from two tokens on. Events that arrive in one chunk share its time: their
//! gaps are zero and are counted.
//!
//! Costs no allocation and no lock for a chunk that splits no event.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::forward::Forward;
use super::histogram::ItlHistogram;
use super::slo::Timings;
pub use super::strip::Strip;
use super::strip::Stripper;
use crate::openai::chunk::{self, Memo};
use crate::openai::event::{Dialect, EventKind, StreamEvent};
use crate::openai::response::{Answer, TokenUsage, UpstreamError};
use crate::openai::sse::SseScanner;

/// The meter of one stream.
#[derive(Clone, Debug)]
pub struct StreamMeter {
    sse: SseScanner,
    stripper: Option<Stripper>,
    tally: Tally,
    memo: Memo,
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
    /// Events that carried tokens: those with output, and empty ones behind the first (a token that completes no
    /// character). As many as tokens where the engine sends each token as an event; fewer where it gathers several.
    pub token_events: u64,
    /// All events, comments included.
    pub events: u64,
    /// Events too long to be read.
    pub oversize_events: u64,
    /// Whether a finish reason was seen.
    pub finished: bool,
    /// What the response says of its answer.
    pub answer: Answer,
    /// Whether the end was seen (`[DONE]`, `message_stop`, a terminal response).
    pub done: bool,
    /// The first error in the stream.
    pub error: Option<UpstreamError>,
    /// Whether that error came before any output (another backend may then still take the request).
    pub error_before_content: bool,
}

impl StreamStats {
    /// For [`Objectives::met`](super::Objectives::met).
    pub fn timings(&self) -> Timings {
        Timings { ttft: self.ttft, tpot: self.tpot, e2el: self.e2el }
    }

    /// Tokens generated, all sequences together: as the engine reported them, or one per event that carried tokens.
    pub fn generated(&self) -> u64 {
        self.usage.completion.unwrap_or(self.token_events)
    }

    /// Time per output token of one of `sequences` that were generated side by side. They are taken as equally long.
    pub fn tpot_of_one(&self, sequences: u32) -> Option<Duration> {
        let tokens = self.usage.completion? as f64 / f64::from(sequences.max(1));
        let decoding = self.e2el?.checked_sub(self.ttft?)?;
        (tokens >= 2.0).then(|| decoding.div_f64(tokens - 1.0))
    }

    /// Whether the response is complete: its end was seen, and no error.
    pub fn is_complete(&self) -> bool {
        self.done && self.error.is_none()
    }
}

impl StreamMeter {
    /// A meter for a stream whose request was fully received at `start`.
    pub fn new(dialect: Dialect, start: Instant, strip: Strip) -> Self {
        Self {
            sse: SseScanner::new(),
            stripper: Stripper::new(strip),
            tally: Tally::new(dialect, start),
            memo: Memo::default(),
        }
    }

    /// Measures a chunk that arrived at `now` and returns what to forward.
    pub fn feed(&mut self, chunk: Bytes, now: Instant) -> Forward {
        let Self { sse, stripper, tally, memo } = self;
        let Some(stripper) = stripper else {
            sse.feed(&chunk, |raw| {
                tally.event(chunk::read_next(tally.dialect, raw.bytes, memo), raw.oversize, now);
            });
            sse.release();
            return std::iter::once(chunk).filter(|chunk| !chunk.is_empty()).collect();
        };
        let mut out = stripper.begin(&chunk);
        sse.feed(&chunk, |raw| {
            let event = chunk::read_next(tally.dialect, raw.bytes, memo);
            out.event(&raw, &event);
            tally.event(event, raw.oversize, now);
        });
        let oversize = sse.pending_oversize();
        out.end(oversize, sse.release())
    }

    /// Ends the stream: returns what was held of an unfinished event, usually nothing.
    pub fn finish(&mut self) -> Forward {
        let mut forward = Forward::new();
        if let Some(stripper) = &mut self.stripper {
            let pending = Bytes::copy_from_slice(self.sse.pending());
            forward.extend([stripper.take_held(), pending].into_iter().filter(|piece| !piece.is_empty()));
        }
        self.sse = SseScanner::new();
        forward
    }

    /// When the first output arrived. Until then the lease keeps its prefill permit.
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

    /// Prompt tokens that the stream has reported so far.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.tally.stats.usage.prompt
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

    fn event(&mut self, event: StreamEvent, oversize: bool, now: Instant) {
        self.stats.events += 1;
        self.stats.oversize_events += u64::from(oversize);
        if let Some(usage) = event.usage {
            self.stats.usage.update(usage);
        }
        self.stats.finished |= event.finish;
        self.stats.answer.update(event.answer);
        self.stats.done |= event.kind == EventKind::Done || (event.finish && self.dialect == Dialect::Responses);
        let output = !event.aborted && (event.kind == EventKind::Content || (event.finish && self.first.is_none()));
        if output {
            self.output(event.usage.and_then(|usage| usage.completion), now);
        }
        if output || event.finish || event.kind == EventKind::Empty {
            self.last_choices = Some(now);
        }
        let empty = event.kind == EventKind::Empty && self.dialect == Dialect::Choices && self.first.is_some();
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

    /// Counts an event with output; `tokens`: generated so far, if the event reports it.
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
        stats.tpot = stats.tpot_of_one(1);
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn delta(delta: &str, rest: &str) -> String {
        format!(
            "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":null}}]{rest}}}\n\n"
        )
    }

    fn role() -> String {
        delta(r#"{"role":"assistant","content":""}"#, "")
    }

    fn text(text: &str) -> String {
        delta(&format!(r#"{{"content":"{text}"}}"#), "")
    }

    fn usage(completion: u64) -> String {
        format!(
            ",\"usage\":{{\"prompt_tokens\":9,\"total_tokens\":{},\"completion_tokens\":{completion}}}",
            9 + completion
        )
    }

    fn last() -> String {
        r#"data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"."},"finish_reason":"stop"}]}"#.to_owned()
            + "\n\n"
    }

    fn usage_event(completion: u64) -> String {
        format!("data: {{\"id\":\"chatcmpl-1\",\"choices\":[]{}}}\n\n", usage(completion))
    }

    const DONE: &str = "data: [DONE]\n\n";

    /// Feeds chunks at the given milliseconds; returns what went to the client and the stats.
    fn run(strip: Strip, chunks: &[(u64, &[u8])]) -> (Vec<u8>, StreamStats) {
        let start = Instant::now();
        let mut meter = StreamMeter::new(Dialect::Choices, start, strip);
        let mut out = Vec::new();
        for (at, chunk) in chunks {
            let forward = meter.feed(Bytes::copy_from_slice(chunk), start + MS * *at as u32);
            assert!(forward.iter().all(|piece| !piece.is_empty()));
            forward.iter().for_each(|piece| out.extend_from_slice(piece));
        }
        meter.finish().iter().for_each(|piece| out.extend_from_slice(piece));
        (out, meter.stats())
    }

    #[test]
    fn every_measure_of_the_contract_is_right() {
        let (out, stats) = run(
            Strip::Nothing,
            &[
                (10, role().as_bytes()),
                (12, text("a").as_bytes()),
                (20, text("b").as_bytes()),
                (25, b": keep-alive\n\n"),
                (30, text("c").as_bytes()),
                (42, last().as_bytes()),
                (50, usage_event(4).as_bytes()),
                (51, DONE.as_bytes()),
            ],
        );
        assert_eq!(stats.ttft, Some(MS * 12));
        assert_eq!(stats.e2el, Some(MS * 42));
        assert_eq!(stats.tpot, Some(MS * 10));
        assert_eq!((stats.content_events, stats.events), (4, 8));
        assert_eq!(stats.itl.count(), 3);
        assert!((stats.itl.sum_seconds() - 0.030).abs() < 1e-9);
        assert!(stats.finished && stats.done && stats.is_complete() && !stats.token_itl);
        assert_eq!(stats.usage, TokenUsage { prompt: Some(9), completion: Some(4), cached: None });
        assert!(String::from_utf8(out).unwrap().contains(": keep-alive"));
    }

    #[test]
    fn without_stripping_every_chunk_is_forwarded_as_the_same_buffer() {
        let mut meter = StreamMeter::new(Dialect::Choices, Instant::now(), Strip::Nothing);
        for part in ["data: {\"cho", "", "ices\":[]}\n", "\ndata: x"] {
            let chunk = Bytes::copy_from_slice(part.as_bytes());
            let forward = meter.feed(chunk.clone(), Instant::now());
            assert_eq!(forward.len(), usize::from(!part.is_empty()));
            assert!(forward.iter().all(|piece| piece.as_ptr() == chunk.as_ptr() && piece.len() == chunk.len()));
        }
        assert!(meter.finish().is_empty());
    }

    #[test]
    fn events_of_one_chunk_share_its_time_and_their_gaps_are_zero() {
        let chunk = [text("a"), text("b"), text("c")].concat();
        let (_, stats) = run(Strip::Nothing, &[(5, chunk.as_bytes())]);
        assert_eq!((stats.itl.count(), stats.itl.counts()[0], stats.ttft), (2, 2, Some(MS * 5)));
    }

    #[test]
    fn continuous_usage_gives_token_gaps() {
        let event = |tokens: u64| delta(r#"{"content":"a"}"#, &usage(tokens));
        let (_, stats) = run(
            Strip::Nothing,
            &[
                (10, event(1).as_bytes()),
                (22, event(4).as_bytes()),
                (25, event(4).as_bytes()),
                (30, event(5).as_bytes()),
            ],
        );
        assert!(stats.token_itl);
        // Three tokens 4 ms apart, an event without a new one, then one token 8 ms after the last.
        assert_eq!(stats.itl.count(), 4);
        assert!((stats.itl.sum_seconds() - 0.020).abs() < 1e-9);
        assert!((stats.itl.max_seconds() - 0.008).abs() < 1e-9);
    }

    #[test]
    fn tokens_are_counted_by_events_where_the_engine_reports_none() {
        let captured = |name: &str| {
            let path = format!("{}/../../tests/fixtures/vllm-0.32/{name}.sse", env!("CARGO_MANIFEST_DIR"));
            run(Strip::Nothing, &[(5, &std::fs::read(path).unwrap())]).1
        };
        for name in
            ["chat-stream-n2", "completion-stream-n2", "completion-stream-list", "chat-stream", "completion-stream"]
        {
            let (plain, reported) = (captured(&format!("{name}-plain")), captured(&format!("{name}-usage")));
            assert_eq!(plain.usage, TokenUsage::default());
            assert_eq!(Some(plain.generated()), reported.usage.completion, "{name}");
        }
    }

    #[test]
    fn sequences_side_by_side_share_their_time() {
        let chunks = [(10, text("a")), (50, [text("b"), last(), usage_event(10)].concat())];
        let chunks: Vec<(u64, &[u8])> = chunks.iter().map(|(at, text)| (*at, text.as_bytes())).collect();
        let (_, stats) = run(Strip::Nothing, &chunks);
        assert_eq!(stats.tpot_of_one(2), Some(MS * 10));
        assert_eq!(stats.tpot_of_one(10), None);
    }

    #[test]
    fn an_error_before_any_content_is_marked() {
        let error = b"data: {\"error\":{\"message\":\"busy\",\"code\":503}}\n\n";
        let (_, early) = run(Strip::Nothing, &[(1, role().as_bytes()), (2, error), (3, DONE.as_bytes())]);
        assert!(early.error_before_content && !early.is_complete());
        assert_eq!(early.error.unwrap().code, Some(503));
        let (_, late) = run(Strip::Nothing, &[(1, text("a").as_bytes()), (2, error)]);
        assert!(!late.error_before_content && late.error.is_some());
    }

    #[test]
    fn an_aborted_response_is_incomplete_although_it_ends_properly() {
        let finish =
            "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n";
        let (_, stats) = run(Strip::Nothing, &[(1, text("a").as_bytes()), (2, finish.as_bytes())]);
        assert!(stats.done && !stats.is_complete() && !stats.error_before_content);
    }

    #[test]
    fn a_response_without_text_has_its_ttft_at_the_finish_reason() {
        let finish = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"finish_reason\":\"stop\"}]}\n\n";
        let (_, stats) = run(Strip::Nothing, &[(3, role().as_bytes()), (8, finish.as_bytes())]);
        assert_eq!((stats.ttft, stats.e2el, stats.tpot), (Some(MS * 8), Some(MS * 8), None));
    }

    #[test]
    fn an_event_too_long_to_hold_is_forwarded_when_stripping() {
        let long = format!("data: {{\"x\":\"{}\"}}\n\n", "y".repeat(3 << 20));
        let stream = [text("a"), long, usage_event(1), DONE.to_owned()].concat();
        let want = stream.replace(&usage_event(1), "");
        for size in [1 << 10, 100_000, 1 << 20, 4 << 20] {
            let chunks: Vec<(u64, &[u8])> = stream.as_bytes().chunks(size).map(|chunk| (1, chunk)).collect();
            let (out, stats) = run(Strip::InjectedUsage, &chunks);
            assert!(out == want.as_bytes(), "{size}");
            assert_eq!(stats.usage.completion, Some(1));
        }
    }

    #[test]
    fn the_held_tail_of_a_broken_stream_is_forwarded_at_its_end() {
        let (out, stats) = run(Strip::InjectedUsage, &[(1, text("a").as_bytes()), (2, b"data: {\"choices\":[]")]);
        assert!(out.ends_with(b"data: {\"choices\":[]"));
        assert!(!stats.done);
    }

    /// A stream of `n` deltas with or without continuous usage; and the same as the client must see it.
    fn stream(texts: &[String], continuous: bool, final_usage: bool) -> String {
        let rest = |tokens| if continuous { usage(tokens) } else { String::new() };
        let mut out = delta(r#"{"role":"assistant","content":""}"#, &rest(0));
        for (index, text) in texts.iter().enumerate() {
            let content = serde_json::Value::from(text.as_str());
            out += &delta(&format!(r#"{{"content":{content}}}"#), &rest(index as u64 + 1));
            if index % 3 == 2 {
                out += ": keep-alive\n\n";
            }
        }
        out += &last();
        if final_usage {
            out += &usage_event(texts.len() as u64 + 1);
        }
        out + DONE
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_bytes_and_stats(
            texts in prop::collection::vec(".{0,6}", 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
            which in 0usize..4,
        ) {
            let (strip, sent, seen) = match which {
                0 => (Strip::Nothing, stream(&texts, true, true), stream(&texts, true, true)),
                1 => (Strip::InjectedUsage, stream(&texts, false, true), stream(&texts, false, false)),
                2 => (Strip::Continuous { keep_final: false }, stream(&texts, true, true), stream(&texts, false, false)),
                _ => (Strip::Continuous { keep_final: true }, stream(&texts, true, true), stream(&texts, false, true)),
            };
            let bytes = sent.as_bytes();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let chunks: Vec<(u64, &[u8])> = cuts.windows(2).map(|pair| (7, &bytes[pair[0]..pair[1]])).collect();
            let (out, stats) = run(strip, &chunks);
            prop_assert_eq!(String::from_utf8(out).unwrap(), seen);
            let (_, whole) = run(strip, &[(7, bytes)]);
            prop_assert_eq!(&stats, &whole);
            prop_assert_eq!(stats.usage.completion, Some(texts.len() as u64 + 1));
            let singles: Vec<(u64, &[u8])> = bytes.chunks(1).map(|chunk| (7, chunk)).collect();
            prop_assert_eq!(run(strip, &singles).1, whole);
        }

        #[test]
        fn arbitrary_bytes_are_forwarded_unchanged(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20)) {
            let timed: Vec<(u64, &[u8])> = chunks.iter().map(|chunk| (1, &chunk[..])).collect();
            prop_assert_eq!(run(Strip::Nothing, &timed).0, chunks.concat());
            // Random bytes have no usage, so stripping changes nothing either.
            prop_assert_eq!(run(Strip::InjectedUsage, &timed).0, chunks.concat());
        }
    }
}
