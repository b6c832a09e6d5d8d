//! Measures a response that is not streamed: its duration, its usage and its error.
//!
//! The response is forwarded as it arrives and never held; a copy of at most [`KEEP`] bytes is read at its end. A
//! response up to that size is read whole. Of a longer one (embeddings, logprobs) the last bytes are kept, because usage
//! stands at the end; an error is never that long.

use std::time::Duration;

use tokio::time::Instant;

use super::slo::Timings;
use crate::openai::response::{self, Answer, ResponseSummary, TokenUsage, UpstreamError};

/// Bytes of a response that are kept. vLLM puts only a few short members behind `usage`.
pub const KEEP: usize = 64 << 10;

/// The meter of one response.
#[derive(Clone, Debug)]
pub struct BodyMeter {
    start: Instant,
    kept: Vec<u8>,
    truncated: bool,
}

/// What was measured of one response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyStats {
    /// From the start to the last byte.
    pub e2el: Duration,
    /// Token counts, as far as reported.
    pub usage: TokenUsage,
    /// The error, when the body is one.
    pub error: Option<UpstreamError>,
    /// What it says of its answer, unless it is too long to be read whole.
    pub answer: Answer,
}

impl BodyMeter {
    /// A meter for a request that was received at `start`.
    pub fn new(start: Instant) -> Self {
        Self { start, kept: Vec::new(), truncated: false }
    }

    /// Takes the next chunk.
    pub fn feed(&mut self, chunk: &[u8]) {
        if self.kept.len() + chunk.len() <= KEEP {
            self.kept.extend_from_slice(chunk);
            return;
        }
        // Drop half of the buffer at once rather than shift it for each chunk.
        self.truncated = true;
        let chunk = &chunk[chunk.len().saturating_sub(KEEP / 2)..];
        let surplus = self.kept.len().saturating_sub(KEEP / 2);
        self.kept.drain(..surplus);
        self.kept.extend_from_slice(chunk);
    }

    /// Ends the response.
    pub fn finish(&self, now: Instant) -> BodyStats {
        let read = if self.truncated {
            ResponseSummary { usage: response::usage_in_tail(&self.kept), ..ResponseSummary::default() }
        } else {
            response::read(&self.kept)
        };
        let usage = read.usage.unwrap_or_default();
        BodyStats { e2el: now - self.start, usage, error: read.error, answer: read.answer }
    }
}

impl BodyStats {
    /// For [`Objectives::met`](super::Objectives::met). A response that is not streamed has no TTFT, and so no TPOT.
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
    fn usage_is_found_at_the_end_of_a_body_of_any_size_and_cut() {
        let usage = TokenUsage { prompt: Some(5), completion: Some(2), cached: None };
        for size in [0, 100, KEEP - 100, KEEP, 3 * KEEP, 10 * KEEP] {
            let body = format!(
                r#"{{"choices":[{{"text":"{}"}}],"usage":{{"prompt_tokens":5,"completion_tokens":2}},"x":null}}"#,
                "a".repeat(size)
            );
            for chunk in [1_000, 16 << 10, 100_000, 1 << 20] {
                let stats = stats(body.as_bytes(), chunk);
                assert_eq!(stats.usage, usage, "{size} in {chunk}");
                assert_eq!(stats.e2el, Duration::from_millis(7));
            }
        }
    }

    #[test]
    fn an_error_body_is_read() {
        let stats = stats(br#"{"error":{"message":"no","code":400}}"#, 3);
        assert_eq!(stats.error, Some(UpstreamError { code: Some(400), message: "no".into() }));
    }
}
