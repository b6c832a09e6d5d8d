//! How fast a backend computes prompts, learned from the time to first token of streams.
//!
//! A response that is not streamed returns the prefill share when the prefill should be over by
//! this rate. Too slow a rate keeps a permit a little longer; too fast a rate lets more long
//! prompts into prefill than permits allow. A cached prompt looks a hundred times faster than it
//! is, and a client can send cached prompts at will. So each slower prompt lowers the rate, but the
//! rate rises by at most [`RISE_MAX`] in [`RISE_EVERY`]: a burst of cached prompts raises it by a
//! tenth, and other prompts bring it back.
//!
//! Two kinds of requests are ignored: short prompts, whose time is mostly fixed cost, and requests
//! with several prompts, whose first token says nothing about the others.

use std::time::Duration;

use tokio::time::Instant;

/// Prompt tokens per second before the first measurement; an 8B model does 10k-50k on current GPUs.
const INITIAL: f64 = 10_000.0;
/// Bounds of a plausible rate, in prompt tokens per second.
const RANGE: (f64, f64) = (50.0, 1_000_000.0);
/// Shorter prompts say more about fixed costs than about the rate.
const TOKENS_MIN: u64 = 1_024;
const SLOWER_WEIGHT: f64 = 0.2;
/// The largest factor by which the rate rises at once.
const RISE_MAX: f64 = 1.1;
/// The shortest time between two rises.
const RISE_EVERY: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillRate {
    tokens_per_second: f64,
    raised: Instant,
    seen: Option<Instant>,
}

impl PrefillRate {
    pub(super) fn new(now: Instant) -> Self {
        Self { tokens_per_second: INITIAL, raised: now, seen: None }
    }

    pub(super) fn tokens_per_second(&self) -> f64 {
        self.tokens_per_second
    }

    /// When the rate was last observed; `None`: it is still assumed.
    pub(super) fn seen(&self) -> Option<Instant> {
        self.seen
    }

    /// Learns from the time to first token of one prompt.
    pub(super) fn observe(&mut self, prompt_tokens: u64, ttft: Duration, now: Instant) {
        if prompt_tokens < TOKENS_MIN || ttft.is_zero() {
            return;
        }
        self.seen = Some(now);
        let sample = (prompt_tokens as f64 / ttft.as_secs_f64()).clamp(RANGE.0, RANGE.1);
        if sample <= self.tokens_per_second {
            self.tokens_per_second += SLOWER_WEIGHT * (sample - self.tokens_per_second);
        } else if now.saturating_duration_since(self.raised) >= RISE_EVERY {
            self.raised = now;
            self.tokens_per_second = sample.min(self.tokens_per_second * RISE_MAX);
        }
    }

    pub(super) fn time_for(&self, prompt_tokens: u64) -> Duration {
        Duration::from_secs_f64(prompt_tokens as f64 / self.tokens_per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_burst_of_cached_prompts_does_not_shorten_how_long_a_permit_is_kept() {
        let start = Instant::now();
        let mut rate = PrefillRate::new(start);
        for step in 0..100 {
            // An engine that computes 2,000 tokens a second.
            rate.observe(16_000, 8 * SECOND, start + step * SECOND);
        }
        let honest = rate.time_for(16_000);
        assert!(honest > 7 * SECOND, "{honest:?}");
        for _ in 0..10_000 {
            rate.observe(16_000, Duration::from_millis(20), start + 200 * SECOND);
        }
        assert!(rate.time_for(16_000) > honest.mul_f64(0.9), "{:?}", rate.time_for(16_000));
    }

    #[test]
    fn one_honest_prompt_in_ten_seconds_keeps_the_rate_near_the_truth_whatever_else_is_sent() {
        let start = Instant::now();
        let mut rate = PrefillRate::new(start);
        for tenth in 0..36_000 {
            let now = start + tenth * SECOND / 10;
            rate.observe(16_000, Duration::from_millis(20), now);
            if tenth % 100 == 99 {
                rate.observe(16_000, 8 * SECOND, now);
            }
        }
        assert!(rate.tokens_per_second() < 4_000.0, "{rate:?}");
    }

    #[test]
    fn a_fast_engine_is_known_within_minutes() {
        let start = Instant::now();
        let mut rate = PrefillRate::new(start);
        (0..200).for_each(|step| rate.observe(16_000, Duration::from_millis(400), start + step * SECOND));
        assert!((rate.tokens_per_second() - 40_000.0).abs() < 1.0, "{rate:?}");
    }
}
