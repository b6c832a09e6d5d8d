//! `tokens = "auto"`: a limit of outstanding tokens that keeps an engine from preempting requests.
//!
//! There is none until an engine preempts. Then its KV cache is full, and each preempted request is
//! computed again while the others wait. The limit is cut to the outstanding tokens that the engine
//! could run, less a tenth: `outstanding x running / (running + waiting) x 0.9`. It counts in the
//! gateway's own estimate, so wrong estimates of output lengths and shared prefixes are part of it.
//! While requests wait for the limit and the engine preempts none, it rises by [`RISE`] a look. The
//! next cut waits until the requests above the limit have ended. A limit that nothing has needed
//! for [`UNUSED`] looks is dropped.
//!
//! Bounds: at least half of the KV caches, at most `limits::MAX_TOKENS`. Pure: a sample of the
//! engine's page is a parameter.

use sluice_config::limits::MAX_TOKENS;
use sluice_gateway::pool::LearnedTokens;

use crate::findings::facts::PageFacts;

/// Preemptions between two looks that show a full cache. Single ones are no harm.
const PREEMPTED: f64 = 3.0;
const MARGIN: f64 = 0.9;
/// The least limit, as a share of the tokens that fit the KV caches; if the size of the caches is
/// not known, of the outstanding tokens.
const FLOOR: f64 = 0.5;
/// Growth of the limit a look.
const RISE: f64 = 1.02;
/// Looks without a preemption before the limit rises.
const CALM: u32 = 3;
/// The limit holds requests back from this share of it on.
const NEAR: f64 = 0.9;
/// Looks after which a limit that held nothing back is dropped: an hour.
const UNUSED: u32 = 360;

/// One look at an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KvSample {
    /// Preemptions since the engine's start.
    pub preemptions: f64,
    /// Requests that run.
    pub running: f64,
    /// Requests that wait in the engine.
    pub waiting: f64,
    /// Tokens in the KV caches of all ranks.
    pub kv_tokens: Option<u64>,
    /// Outstanding tokens of this gateway's requests there.
    pub outstanding: u64,
    /// Whether requests wait in the pool's queue.
    pub queued: bool,
}

impl KvSample {
    /// The sample of an engine's page.
    pub fn new(page: &PageFacts, outstanding: u64, queued: bool) -> Self {
        let PageFacts { preemptions, running, waiting, kv_tokens, .. } = *page;
        Self { preemptions, running, waiting, kv_tokens, outstanding, queued }
    }
}

/// The limit of one engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvLimit {
    limit: Option<LearnedTokens>,
    last: Option<KvSample>,
    calm: u32,
    unused: u32,
}

impl KvLimit {
    /// The limit in force.
    pub fn limit(&self) -> Option<LearnedTokens> {
        self.limit
    }

    /// One look. Returns whether the limit has been lowered, or dropped.
    pub fn look(&mut self, now: KvSample) -> bool {
        let Some(last) = self.last.replace(now) else { return false };
        if now.kv_tokens != last.kv_tokens {
            // Another engine, or other flags.
            (self.calm, self.unused) = (0, 0);
            return self.limit.take().is_some();
        }
        // A sum that fell belongs to an engine that has started again.
        let preempted = if now.preemptions < last.preemptions { 0.0 } else { now.preemptions - last.preemptions };
        self.calm = if preempted > 0.0 { 0 } else { self.calm.saturating_add(1) };
        let is_near = self.limit.is_some_and(|limit| now.outstanding as f64 >= NEAR * limit.tokens as f64);
        self.unused = if is_near || now.queued { 0 } else { self.unused.saturating_add(1) };
        if preempted >= PREEMPTED {
            return self.cut(&now, preempted);
        }
        match &mut self.limit {
            Some(_) if self.unused >= UNUSED => {
                self.limit = None;
                return true;
            }
            Some(limit) if self.calm >= CALM && is_near && now.queued => {
                limit.tokens = ((limit.tokens as f64 * RISE).ceil() as u64).min(MAX_TOKENS.0);
            }
            _ => {}
        }
        false
    }

    fn cut(&mut self, now: &KvSample, preempted: f64) -> bool {
        // Requests from before the last cut still run above the limit.
        if now.outstanding == 0 || self.limit.is_some_and(|limit| now.outstanding > limit.tokens) {
            return false;
        }
        let outstanding = now.outstanding as f64;
        let runs = now.running.max(1.0) / (now.running + now.waiting).max(1.0);
        let floor = FLOOR * now.kv_tokens.map_or(outstanding, |tokens| tokens as f64);
        let tokens = (outstanding * runs.min(1.0) * MARGIN).max(floor).clamp(1.0, MAX_TOKENS.0 as f64) as u64;
        let lower = self.limit.is_none_or(|limit| tokens < limit.tokens);
        if lower {
            self.limit = Some(LearnedTokens { tokens, preempted: preempted as u64, outstanding: now.outstanding });
        }
        lower
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KV: u64 = 100_000;

    fn sample(preemptions: f64, outstanding: u64) -> KvSample {
        KvSample { preemptions, running: 60.0, waiting: 40.0, kv_tokens: Some(KV), outstanding, queued: true }
    }

    #[test]
    fn preemptions_cut_the_limit_to_what_runs_and_calm_raises_it_slowly() {
        let mut limit = KvLimit::default();
        assert!(!limit.look(sample(500.0, 200_000)), "the first look has nothing to compare");
        assert!(!limit.look(sample(502.0, 200_000)) && limit.limit().is_none(), "two are no harm");
        assert!(limit.look(sample(520.0, 200_000)));
        let cut = LearnedTokens { tokens: 108_000, preempted: 18, outstanding: 200_000 };
        assert_eq!(limit.limit(), Some(cut));
        // What was admitted before ends first.
        assert!(!limit.look(sample(560.0, 150_000)));
        assert_eq!(limit.limit(), Some(cut));
        for _ in 0..CALM {
            assert_eq!(limit.limit(), Some(cut));
            limit.look(sample(560.0, 107_000));
        }
        assert_eq!(limit.limit().unwrap().tokens, 110_160);
        assert!(limit.look(sample(563.0, 105_000)), "it was still too high");
        assert_eq!(limit.limit().unwrap().tokens, 56_700);
    }

    #[test]
    fn a_limit_never_falls_below_half_of_the_caches_and_ends_with_the_engine() {
        let mut limit = KvLimit::default();
        limit.look(sample(0.0, 60_000));
        assert!(limit.look(KvSample { waiting: 1e6, ..sample(9.0, 60_000) }));
        assert_eq!(limit.limit().unwrap().tokens, KV / 2);
        // The engine starts again with the same cache, then with another.
        assert!(!limit.look(sample(0.0, 40_000)) && limit.limit().is_some());
        assert!(limit.look(KvSample { kv_tokens: Some(2 * KV), ..sample(0.0, 40_000) }));
        assert!(limit.limit().is_none());
    }

    #[test]
    fn a_limit_that_holds_nothing_back_is_dropped() {
        let mut limit = KvLimit::default();
        limit.look(sample(0.0, 200_000));
        limit.look(sample(9.0, 200_000));
        let idle = KvSample { queued: false, ..sample(9.0, 1_000) };
        let dropped: Vec<bool> = (0..UNUSED).map(|_| limit.look(idle)).collect();
        assert_eq!(dropped.iter().position(|dropped| *dropped), Some(UNUSED as usize - 1));
        assert!(limit.limit().is_none());
    }

    proptest! {
        /// Whatever an engine reports, a limit is within bounds, falls only with preemptions, and
        /// rises by no more than a step a look.
        #[test]
        fn limits_stay_within_bounds(
            looks in proptest::collection::vec((0.0f64..20.0, 0.0f64..500.0, 0.0f64..500.0, 0u64..400_000, any::<bool>()), 1..60),
        ) {
            let (mut limit, mut total) = (KvLimit::default(), 0.0);
            for (preempted, running, waiting, outstanding, queued) in looks {
                let before = limit.limit();
                total += preempted.floor();
                let now = KvSample { preemptions: total, running, waiting, kv_tokens: Some(KV), outstanding, queued };
                limit.look(now);
                let Some(now) = limit.limit() else { continue };
                prop_assert!(now.tokens >= KV / 2 && now.tokens <= MAX_TOKENS.0);
                if let Some(before) = before {
                    prop_assert!(now.tokens as f64 <= (before.tokens as f64 * RISE).ceil());
                    prop_assert!(now.tokens >= before.tokens || preempted.floor() >= PREEMPTED);
                } else {
                    prop_assert!(preempted.floor() >= PREEMPTED);
                }
            }
        }
    }
}
