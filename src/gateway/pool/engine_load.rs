//! The outstanding prefill work of an engine, and the paces learned from its streams.
//!
//! Outstanding prefill is modelled as a fluid, in seconds at the engine's own pace: each grant adds
//! prefill, and the sum falls by one second per second. Prompts of [`LARGE_PROMPT`] tokens and more
//! have a separate sum, because only they keep an engine busy for more than a few steps. That sum
//! never exceeds the prefill of large prompts without a first token; if they take longer than
//! predicted, a part of the sum stays (`policy/candidate.rs`).
//!
//! Learned for each engine until it is replaced: the paces of prefill and decoding
//! (`policy/pace.rs`), and how much longer small prompts wait while a large one is in prefill. Only
//! streams show this. Bound: fixed size.

use std::time::Duration;

use tokio::time::Instant;

use super::capacity::{CapacityUsage, LARGE_PROMPT};
use super::policy::cost::{FIRST_TOKEN, PROMPT_TOKEN, SEQUENCE, STEP};
use super::policy::{Backlog, Pace};

/// Weight of one time to first token in the means: about the last 20 count.
const WEIGHT: f64 = 0.05;
/// Time to first token of a small prompt without a large one ahead, seconds, before the first
/// observation.
const UNDISTURBED: f64 = 0.03;
/// How much longer a small prompt waits behind a large one, seconds, before the first observation.
const INTERFERENCE: f64 = 0.1;
/// Shorter outputs are ignored: their TPOT depends on the first steps, which are not typical.
const OUTPUT_MIN: u64 = 8;

#[derive(Clone, Copy, Debug)]
pub(super) struct Learned {
    pub(super) decode: Pace,
    pub(super) prefill: Pace,
    undisturbed: f64,
    /// How much longer small prompts wait while a large one is in prefill, seconds.
    pub(super) interference: f64,
}

impl Default for Learned {
    fn default() -> Self {
        let (decode, prefill) = (Pace::default(), Pace::default());
        Self { decode, prefill, undisturbed: UNDISTURBED, interference: INTERFERENCE }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct EngineLoad {
    pub(super) learned: Learned,
    /// Seconds of outstanding prefill of large prompts at the time `at`.
    large: f64,
    /// Seconds of outstanding prefill of small prompts at the time `at`.
    small: f64,
    /// Seconds of prefill of small prompts that arrived lately, answered or not: a decayed sum at
    /// the time `at`.
    lately: f64,
    at: Instant,
    /// Computed prompt tokens so far, of prompts whose first token was seen.
    prefilled: u64,
    /// The number of the last request that was granted this engine.
    pub(super) granted: u64,
}

/// The state of an engine when a request began to decode.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeStart {
    prefilled: u64,
    sequences: u32,
}

impl EngineLoad {
    pub(super) fn new(now: Instant) -> Self {
        Self { learned: Learned::default(), large: 0.0, small: 0.0, lately: 0.0, at: now, prefilled: 0, granted: 0 }
    }

    fn prefill(&self, tokens: u64) -> f64 {
        tokens as f64 * PROMPT_TOKEN * self.pace()
    }

    /// Seconds of prefill of one token at this engine's pace.
    pub(super) fn seconds_per_prompt_token(&self) -> f64 {
        PROMPT_TOKEN * self.pace()
    }

    /// The pace of prefill at the last grant. Only large prompts show it. Without recent large
    /// prompts, the pace of decoding stands in, so that an engine that was slow once does not count
    /// as slow while prompts are small.
    fn pace(&self) -> f64 {
        let Learned { prefill, decode, .. } = &self.learned;
        prefill.ratio_at(self.at).or_else(|| decode.ratio_at(self.at)).unwrap_or(1.0)
    }

    /// Seconds until the prefills of large, and of small prompts should end.
    pub(super) fn remaining(&self, used: &CapacityUsage, now: Instant) -> (f64, f64) {
        let (backlog, age) = (self.backlog(used, self.at), self.age(now));
        (backlog.large(age), backlog.small(age))
    }

    fn age(&self, now: Instant) -> f64 {
        now.saturating_duration_since(self.at).as_secs_f64()
    }

    /// The outstanding prefill as a function of time, in seconds since `epoch`. Valid while the
    /// engine carries `used`.
    pub(super) fn backlog(&self, used: &CapacityUsage, epoch: Instant) -> Backlog {
        let at = self.at.saturating_duration_since(epoch).as_secs_f64();
        let large_waiting = self.prefill(used.large_prefill_tokens);
        let (large_until, small_until) = (at + self.large, at + self.small);
        Backlog { large_until, large_waiting, small_until, lately: self.lately, at }
    }

    /// Adds a granted request with this number of prompt tokens to compute. `used` does not include
    /// the request.
    pub(super) fn add(&mut self, computed_tokens: u64, used: &CapacityUsage, now: Instant, serial: u64) {
        let (backlog, age) = (self.backlog(used, self.at), self.age(now));
        (self.large, self.small, self.lately) = (backlog.large(age), backlog.small(age), backlog.lately(age));
        let own = self.prefill(computed_tokens);
        if computed_tokens >= LARGE_PROMPT {
            self.large += own
        } else {
            self.small += own;
            self.lately += own;
        }
        self.at = self.at.max(now);
        self.granted = serial;
    }

    /// Ends a prefill of `tokens` computed tokens, because the first token was seen. `used` does
    /// not include that prefill.
    pub(super) fn end_prefill(&mut self, tokens: u64, used: &CapacityUsage) -> DecodeStart {
        self.prefilled = self.prefilled.saturating_add(tokens);
        self.large = self.large.min(self.prefill(used.large_prefill_tokens));
        DecodeStart { prefilled: self.prefilled, sequences: used.slots }
    }

    /// Learns from the time to first token of one prompt with `computed_tokens` outside the prefix
    /// cache. `ahead`: seconds of backlog ahead of it.
    pub(super) fn observe_first_token(&mut self, computed_tokens: u64, ahead: f64, ttft: Duration, now: Instant) {
        let (ttft, pace, learned) = (ttft.as_secs_f64(), self.pace(), &mut self.learned);
        if computed_tokens >= LARGE_PROMPT {
            // `ahead` is in seconds of this engine; `observe` takes seconds of the reference.
            let ahead = ahead / pace;
            learned.prefill.observe(ttft, computed_tokens as f64 * PROMPT_TOKEN + FIRST_TOKEN + ahead, now);
        } else if ahead > 0.0 {
            let longer = (ttft - learned.undisturbed).max(0.0);
            learned.interference += WEIGHT * (longer - learned.interference);
        } else {
            learned.undisturbed += WEIGHT * (ttft - learned.undisturbed);
        }
    }

    /// Learns from the TPOT of a response of `tokens` tokens. The expected time includes the
    /// prefills that ended on the engine meanwhile.
    pub(super) fn observe_decode(
        &mut self,
        start: DecodeStart,
        tokens: u64,
        tpot: Duration,
        used: &CapacityUsage,
        now: Instant,
    ) {
        if tokens < OUTPUT_MIN {
            return;
        }
        let steps = tokens.saturating_sub(1) as f64;
        let sequences = (f64::from(start.sequences) + f64::from(used.slots)) / 2.0;
        let beside = self.prefilled.saturating_sub(start.prefilled) as f64;
        let expected = steps * (STEP + SEQUENCE * sequences) + beside * PROMPT_TOKEN;
        self.learned.decode.observe(steps * tpot.as_secs_f64(), expected, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::capacity::{BackendLimits, Need};

    const LIMITS: BackendLimits = BackendLimits { slots: 64, tokens: None, prefill_tokens: None, long_prefix: None };
    const LARGE: Need = Need { slots: 1, prompt_tokens: 16_000, output_tokens: 64 };
    const SMALL: Need = Need { slots: 1, prompt_tokens: 200, output_tokens: 128 };

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_backlog_runs_off_and_is_over_when_the_first_token_is_seen() {
        let now = Instant::now();
        let (mut load, mut used) = (EngineLoad::new(now), CapacityUsage::default());
        load.add(LARGE.prompt_tokens, &used, now, 1);
        let mut allocation = used.take(&LIMITS, &LARGE);
        let whole = load.remaining(&used, now).0;
        assert!((whole - 16_000.0 * PROMPT_TOKEN).abs() < 1e-9);
        assert!((load.remaining(&used, now + ms(100)).0 - (whole - 0.1)).abs() < 1e-9);
        assert!((load.remaining(&used, now + ms(60_000)).0 - 0.3 * whole).abs() < 1e-9, "overdue");
        let before = used.prefill_tokens;
        used.end_prefill(&mut allocation);
        load.end_prefill(before - used.prefill_tokens, &used);
        assert_eq!(load.remaining(&used, now + ms(100)).0, 0.0);
    }

    /// A [`Backlog`] that was noted once gives the same seconds at any later time as the engine's
    /// own state.
    #[test]
    fn a_noted_backlog_runs_off_as_the_engines_own() {
        let epoch = Instant::now();
        let now = epoch + ms(3_600_000);
        let (mut load, mut used) = (EngineLoad::new(epoch), CapacityUsage::default());
        for (need, later) in [(LARGE, 0), (SMALL, 20), (SMALL, 21), (LARGE, 400), (SMALL, 403)] {
            load.add(need.prompt_tokens, &used, now + ms(later), 1);
            used.take(&LIMITS, &need);
            let noted = load.backlog(&used, epoch);
            for age in [0, 1, 3, 5, 10, 300, 2_000] {
                let at = now + ms(later + age);
                let (large, small) = load.remaining(&used, at);
                let seconds = (at - epoch).as_secs_f64();
                assert!((noted.large(seconds) - large).abs() < 1e-9 && (noted.small(seconds) - small).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn small_prompts_of_a_moment_ago_count_less_and_less_answered_or_not() {
        let now = Instant::now();
        let (mut load, mut used) = (EngineLoad::new(now), CapacityUsage::default());
        load.add(SMALL.prompt_tokens, &used, now, 1);
        let mut held = used.take(&LIMITS, &SMALL);
        let own = 200.0 * PROMPT_TOKEN;
        let lately = |load: &EngineLoad, used: &CapacityUsage, at| load.backlog(used, now).lately(f64::from(at) * 1e-3);
        used.end_prefill(&mut held);
        load.end_prefill(200, &used);
        assert!((lately(&load, &used, 25) - own / 2.0).abs() < 1e-9);
        load.add(SMALL.prompt_tokens, &used, now + ms(25), 2);
        assert!((lately(&load, &used, 25) - own * 1.5).abs() < 1e-9);
        assert_eq!(lately(&load, &used, 80), 0.0);
    }

    #[test]
    fn small_prompts_are_no_backlog_and_are_over_in_a_moment() {
        let now = Instant::now();
        let (mut load, mut used) = (EngineLoad::new(now), CapacityUsage::default());
        load.add(SMALL.prompt_tokens, &used, now, 1);
        used.take(&LIMITS, &SMALL);
        assert_eq!(load.remaining(&used, now).0, 0.0);
        assert!(load.remaining(&used, now).1 > 0.005 && load.remaining(&used, now + ms(5)).1 > 0.0);
        assert_eq!(load.remaining(&used, now + ms(10)).1, 0.0);
    }

    #[test]
    fn how_long_small_prompts_wait_for_large_ones_is_learned() {
        let now = Instant::now();
        let mut in_order = EngineLoad::new(now);
        let mut in_pieces = in_order;
        for _ in 0..100 {
            for (load, beside) in [(&mut in_order, 280), (&mut in_pieces, 45)] {
                load.observe_first_token(200, 0.0, ms(25), now);
                load.observe_first_token(200, 0.2, ms(beside), now);
            }
        }
        assert!((in_order.learned.interference - 0.255).abs() < 0.01, "{in_order:?}");
        assert!((in_pieces.learned.interference - 0.020).abs() < 0.01, "{in_pieces:?}");
    }

    #[test]
    fn a_busy_engine_is_not_taken_for_a_slow_one() {
        let now = Instant::now();
        let used = |slots| CapacityUsage { slots, ..CapacityUsage::default() };
        let mut paces = [(1, 0, 5_021), (100, 0, 7_100), (100, 48_000, 7_100 + 11_716)].map(|(slots, beside, us)| {
            let mut load = EngineLoad::new(now);
            let start = load.end_prefill(0, &used(slots));
            load.end_prefill(beside, &used(slots));
            load.observe_decode(start, 128, Duration::from_micros(us), &used(slots), now);
            load.learned.decode.ratio().unwrap()
        });
        paces.sort_by(f64::total_cmp);
        assert!(paces[2] / paces[0] < 1.01, "{paces:?}");
    }
}
