//! Measures a response that is not streamed: duration, usage and error.
//!
//! The response is forwarded as it arrives and never held. A copy of a response of at most [`KEEP`]
//! bytes is read at the end; a longer response is read piece by piece ([`Condenser`]). So usage is
//! found wherever it is, in a body of any size.

use std::time::Duration;

use tokio::time::Instant;

use super::slo::Timings;
use super::usage::{BYTES_PER_TOKEN, SeenOutput, UsageBounds};
use crate::openai::condense::Condenser;
use crate::openai::engine_times::EngineTimes;
use crate::openai::response::{self, Answer, ResponseReader, TokenUsage, UpstreamError};

/// The longest response that is copied and read at the end, bytes.
pub const KEEP: usize = 64 << 10;

/// The meter of one response.
#[derive(Clone, Debug)]
pub struct BodyMeter {
    start: Instant,
    kept: Vec<u8>,
    /// Set once the response is longer than [`KEEP`].
    long: Option<Box<LongBody>>,
    length: u64,
    bounds: UsageBounds,
}

#[derive(Clone, Debug, Default)]
struct LongBody {
    body: Condenser,
    reader: ResponseReader,
}

/// Measurements of one response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyStats {
    /// From the start to the last byte.
    pub e2el: Duration,
    /// Token counts that the response reports, within the bounds.
    pub usage: TokenUsage,
    /// The times that the engine measured, if it reported them.
    pub times: Option<EngineTimes>,
    /// Tokens of the output, estimated from the number of bytes, for a response that reports no
    /// usage.
    pub estimated: u64,
    /// The error, if the body is one.
    pub error: Option<UpstreamError>,
    /// The answer, as the body describes it.
    pub answer: Answer,
}

impl BodyMeter {
    /// A meter for a request that was received at `start`.
    pub fn new(start: Instant) -> Self {
        Self { start, kept: Vec::new(), long: None, length: 0, bounds: UsageBounds::default() }
    }

    /// Sets the bounds within which reported usage is believed.
    pub fn set_bounds(&mut self, bounds: UsageBounds) {
        self.bounds = bounds;
    }

    /// Takes the next chunk.
    pub fn feed(&mut self, chunk: &[u8]) {
        self.length += chunk.len() as u64;
        if self.long.is_none() && self.kept.len() + chunk.len() <= KEEP {
            self.kept.extend_from_slice(chunk);
            return;
        }
        let LongBody { body, reader } = &mut **self.long.get_or_insert_default();
        // When the response first exceeds `KEEP`, the copied bytes are read before the chunk.
        body.feed(&std::mem::take(&mut self.kept), |part| reader.read(part));
        body.feed(chunk, |part| reader.read(part));
    }

    /// Ends the response.
    pub fn finish(&mut self, now: Instant) -> BodyStats {
        let (read, is_long) = match self.long.take() {
            Some(long) => (long.reader.summary(), true),
            None => (response::read(&self.kept), false),
        };
        let seen = SeenOutput { bytes: read.text, events: 0 };
        // A token may be as short as one byte. In a long body the reader sees only the beginnings
        // of texts, so every byte of the body counts as output.
        let most = UsageBounds { completion_max: self.bounds.completion_max.max(self.length), ..self.bounds };
        let usage = most.at_end(read.usage.unwrap_or_default(), seen);
        let output = if is_long && read.text > 0 { self.length } else { read.text };
        let estimated = output.div_ceil(BYTES_PER_TOKEN);
        let (times, error, answer) = (read.times, read.error, read.answer);
        BodyStats { e2el: now - self.start, usage, times, estimated, error, answer }
    }
}

impl BodyStats {
    /// For [`Objectives::met`](super::Objectives::met). A response that is not streamed has no
    /// TTFT, and so no TPOT.
    pub fn timings(&self) -> Timings {
        Timings { ttft: None, tpot: None, e2el: Some(self.e2el) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(body: &[u8], chunk: usize) -> BodyStats {
        let start = Instant::now();
        let mut meter = BodyMeter::new(start);
        for part in body.chunks(chunk) {
            meter.feed(part);
            assert!(meter.kept.len() <= KEEP);
        }
        meter.finish(start + Duration::from_millis(7))
    }

    #[test]
    fn usage_is_found_wherever_it_stands_in_a_body_of_any_size() {
        let usage = TokenUsage { prompt: Some(5), completion: Some(2), cached: Some(1) };
        let counts = r#""usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}"#;
        for size in [0, 100, KEEP - 100, KEEP, 3 * KEEP, 10 * KEEP] {
            let numbers = vec!["-0.0123"; size / 8].join(",");
            let text = "a\\\"}]".repeat(size / 5);
            let choice = format!(r#"{{"index":0,"message":{{"content":"{text}"}},"finish_reason":"length"}}"#);
            for body in [
                format!(r#"{{"choices":[{choice}],{counts},"prompt_token_ids":[{numbers}]}}"#),
                format!(
                    r#"{{{counts},"id":"x","results":[{{"document":{{"text":"{text}"}}}},7],"choices":[{choice}]}}"#
                ),
                format!(
                    r#"{{"prompt_logprobs":[null,{{"5":{{"logprob":-1}}}},[{numbers}]],"choices":[{choice}], {counts} }}"#
                ),
                format!(
                    r#"{{"data":[{{"embedding":[{numbers}]}}],"choices":[{choice}],{counts},"kv":{{"a":[{numbers}]}}}}"#
                ),
            ] {
                for chunk in [1_000, 16 << 10, 100_000, 1 << 20] {
                    let stats = stats(body.as_bytes(), chunk);
                    assert_eq!(stats.usage, usage, "{size} in {chunk}: {}", &body[..80]);
                    assert_eq!(stats.answer.finish, Some(crate::openai::FinishReason::Length));
                    assert_eq!(stats.e2el, Duration::from_millis(7));
                }
            }
        }
    }

    #[test]
    fn an_error_of_any_length_and_an_aborted_choice_among_many_are_found() {
        let long = format!(
            r#"{{"detail":[{}7],"error":{{"message":"no {}","code":400}}}}"#,
            "7,".repeat(KEEP),
            "x".repeat(KEEP)
        );
        let error = stats(long.as_bytes(), 999).error.unwrap();
        assert_eq!((error.code, error.message.len()), (Some(400), response::MAX_MESSAGE));
        let choice = |reason: &str| format!(r#"{{"text":"{}","finish_reason":"{reason}"}},"#, "y".repeat(400));
        let many = format!(
            r#"{{"choices":[{}{}{}null]}}"#,
            choice("stop"),
            choice("abort"),
            choice("length").repeat(KEEP / 200)
        );
        let stats = stats(many.as_bytes(), 7_777);
        assert_eq!(stats.error, Some(UpstreamError::aborted()));
    }

    #[test]
    fn an_error_body_is_read() {
        let stats = stats(br#"{"error":{"message":"no","code":400}}"#, 3);
        assert_eq!(stats.error, Some(UpstreamError { code: Some(400), message: "no".into() }));
    }

    #[test]
    fn usage_outside_the_bounds_is_dropped_and_the_output_is_estimated_by_its_bytes() {
        let bounds = UsageBounds { prompt_min: 0, prompt_max: 100, completion_max: 50, output_is_generated: true };
        let bounded = |body: &str| {
            let mut meter = BodyMeter::new(Instant::now());
            meter.set_bounds(bounds);
            body.as_bytes().chunks(10_000).for_each(|chunk| meter.feed(chunk));
            meter.finish(Instant::now())
        };
        let answer = |letters: usize, tokens: &str| {
            let (text, usage) = ("x".repeat(letters), format!(r#"{{"prompt_tokens":7,"completion_tokens":{tokens}}}"#));
            format!(r#"{{"choices":[{{"message":{{"content":"{text}"}}}}],"usage":{usage}}}"#)
        };
        for (letters, tokens, believed, estimated) in [
            (40, "10", Some(10), 10),
            (40, "0", Some(0), 10),
            (400, "0", None, 100),
            (400, "1000000000000", None, 100),
            (400, "-3", None, 100),
            (400, "120", Some(120), 100),
            (0, "45", Some(45), 0),
        ] {
            let stats = bounded(&answer(letters, tokens));
            assert_eq!((stats.usage.completion, stats.estimated), (believed, estimated), "{letters} letters, {tokens}");
            assert_eq!(stats.usage.prompt, Some(7));
        }
        let long = bounded(&answer(4 * KEEP, "0"));
        assert_eq!(long.usage.completion, None);
        assert!((KEEP as u64..KEEP as u64 + 50).contains(&long.estimated), "{}", long.estimated);
    }
}
