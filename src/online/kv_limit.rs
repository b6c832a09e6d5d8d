//! `tokens = "auto"`: a limit of outstanding tokens that keeps an engine from preempting requests.
//!
//! There is none until an engine preempts. Then its KV cache is full, and each preempted request is
//! computed again while the others wait. The limit is cut to the outstanding tokens that the engine
//! could run, less a tenth: `outstanding x running / (running + waiting) x 0.9`. It counts in the
//! gateway's own estimate, so wrong estimates of output lengths and shared prefixes are part of it.
//! While requests wait for the limit and the engine hardly preempts, it rises by [`RISE`] in
//! [`LOOK`]. The next cut waits until the requests above the limit have ended. A limit that nothing
//! has needed for [`UNUSED`], or whose engine shows no page for [`STALE`], is dropped.
//!
//! Bounds: at least half of the KV caches, at most `limits::MAX_TOKENS`; none for an engine that
//! does not show the size of the caches. Pure: a sample of the engine's page is a parameter.

use std::time::Duration;

use sluice_config::limits::MAX_TOKENS;
use sluice_gateway::pool::LearnedTokens;

use crate::findings::LOOK;
use crate::findings::facts::PageFacts;

/// Preemptions within [`LOOK`] that show a full cache. Single ones are no harm.
const PREEMPTED: f64 = 3.0;
const MARGIN: f64 = 0.9;
/// The least limit, as a share of the tokens that fit the KV caches.
const FLOOR: f64 = 0.5;
/// Growth of the limit within [`LOOK`].
const RISE: f64 = 1.02;
/// Time without many preemptions before the limit rises.
const CALM: Duration = Duration::from_secs(25);
/// The limit holds requests back from this share of it on.
const NEAR: f64 = 0.9;
/// A limit that held nothing back for this time is dropped.
const UNUSED: Duration = Duration::from_hours(1);
/// After this time without a page, the last one says nothing, and the limit is dropped.
pub const STALE: Duration = Duration::from_mins(5);

/// One look at an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KvSample {
    /// Time of the look.
    pub at: Duration,
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
    pub fn new(page: &PageFacts, outstanding: u64, queued: bool, at: Duration) -> Self {
        let PageFacts { preemptions, running, waiting, kv_tokens, .. } = *page;
        Self { at, preemptions, running, waiting, kv_tokens, outstanding, queued }
    }
}

/// The limit of one engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvLimit {
    limit: Option<LearnedTokens>,
    last: Option<KvSample>,
    /// Since when the engine hardly preempts, and since when the limit holds nothing back.
    calm: Duration,
    unused: Duration,
}

impl KvLimit {
    /// The limit in force.
    pub fn limit(&self) -> Option<LearnedTokens> {
        self.limit
    }

    /// Drops a limit whose engine has shown no page for [`STALE`]. Returns whether it did.
    pub fn expire(&mut self, now: Duration) -> bool {
        self.last.is_some_and(|last| now >= last.at + STALE) && self.limit.take().is_some()
    }

    /// One look. Returns whether the limit has been lowered, or dropped.
    pub fn look(&mut self, now: KvSample) -> bool {
        let Some(last) = self.last.replace(now) else {
            (self.calm, self.unused) = (now.at, now.at);
            return false;
        };
        if now.kv_tokens != last.kv_tokens || now.at >= last.at + STALE {
            // Another engine, other flags, or a gap whose preemptions say nothing about today's
            // tokens.
            (self.calm, self.unused) = (now.at, now.at);
            return self.limit.take().is_some();
        }
        let looks = (now.at.saturating_sub(last.at).as_secs_f64() / LOOK.as_secs_f64()).max(1.0);
        // A sum that fell belongs to an engine that has started again.
        let preempted = if now.preemptions < last.preemptions { 0.0 } else { now.preemptions - last.preemptions };
        let preempts = preempted >= PREEMPTED * looks;
        if preempts {
            self.calm = now.at;
        }
        let is_near = self.limit.is_some_and(|limit| now.outstanding as f64 >= NEAR * limit.tokens as f64);
        if is_near {
            self.unused = now.at;
        }
        if preempts {
            // Requests may have ended since the engine preempted.
            return self.cut(&now, now.outstanding.max(last.outstanding), preempted);
        }
        match &mut self.limit {
            Some(_) if now.at >= self.unused + UNUSED => {
                self.limit = None;
                return true;
            }
            Some(limit) if now.at >= self.calm + CALM && is_near && now.queued => {
                let risen = limit.tokens as f64 * RISE.powf(looks);
                limit.tokens = (risen.ceil() as u64).min(MAX_TOKENS.0);
            }
            _ => {}
        }
        false
    }

    fn cut(&mut self, now: &KvSample, outstanding: u64, preempted: f64) -> bool {
        let Some(kv_tokens) = now.kv_tokens else { return false };
        // Requests from before the last cut still run above the limit.
        if now.outstanding == 0 || self.limit.is_some_and(|limit| outstanding > limit.tokens) {
            return false;
        }
        let runs = now.running.max(1.0) / (now.running + now.waiting).max(1.0);
        let floor = FLOOR * kv_tokens as f64;
        let tokens = (outstanding as f64 * runs.min(1.0) * MARGIN).max(floor).clamp(1.0, MAX_TOKENS.0 as f64) as u64;
        let lower = self.limit.is_none_or(|limit| tokens < limit.tokens);
        if lower {
            self.unused = now.at;
            self.limit = Some(LearnedTokens { tokens, preempted: preempted as u64, outstanding });
        }
        lower
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KV: u64 = 100_000;

    fn sample(look: u32, preemptions: f64, outstanding: u64) -> KvSample {
        let (at, kv_tokens) = (look * LOOK, Some(KV));
        KvSample { at, preemptions, running: 60.0, waiting: 40.0, kv_tokens, outstanding, queued: true }
    }

    #[test]
    fn preemptions_cut_the_limit_to_what_runs_and_calm_raises_it_slowly() {
        let mut limit = KvLimit::default();
        assert!(!limit.look(sample(0, 500.0, 200_000)), "the first look has nothing to compare");
        assert!(!limit.look(sample(1, 502.0, 200_000)) && limit.limit().is_none(), "two are no harm");
        // The burst is nearly over at the look.
        assert!(limit.look(sample(2, 520.0, 20_000)));
        let cut = LearnedTokens { tokens: 108_000, preempted: 18, outstanding: 200_000 };
        assert_eq!(limit.limit(), Some(cut));
        // What was admitted before ends first.
        assert!(!limit.look(sample(3, 560.0, 150_000)));
        assert_eq!(limit.limit(), Some(cut));
        for look in 4..6 {
            limit.look(sample(look, 560.0 + f64::from(look - 3), 107_000));
            assert_eq!(limit.limit(), Some(cut));
        }
        limit.look(sample(6, 563.0, 107_000));
        assert_eq!(limit.limit().unwrap().tokens, 110_160, "single preemptions are no harm");
        // One look after 70 s rises as seven do.
        limit.look(sample(13, 563.0, 107_000));
        assert_eq!(limit.limit().unwrap().tokens, (110_160.0 * RISE.powi(7)).ceil() as u64);
        assert!(limit.look(sample(14, 566.0, 107_000)), "it was still too high");
        assert_eq!(limit.limit().unwrap().tokens, 57_780);
    }

    #[test]
    fn a_limit_never_falls_below_half_of_the_caches_and_ends_with_the_engine() {
        let mut limit = KvLimit::default();
        limit.look(sample(0, 0.0, 60_000));
        assert!(limit.look(KvSample { waiting: 1e6, ..sample(1, 9.0, 60_000) }));
        assert_eq!(limit.limit().unwrap().tokens, KV / 2);
        // The engine starts again with the same cache, then with another.
        assert!(!limit.look(sample(2, 0.0, 40_000)) && limit.limit().is_some());
        assert!(limit.look(KvSample { kv_tokens: Some(2 * KV), ..sample(3, 0.0, 40_000) }));
        assert!(limit.limit().is_none());
    }

    #[test]
    fn a_limit_that_holds_nothing_back_or_has_no_page_is_dropped() {
        let limited = || {
            let mut limit = KvLimit::default();
            limit.look(sample(0, 0.0, 200_000));
            assert!(limit.look(sample(1, 9.0, 200_000)));
            limit
        };
        let (mut unused, mut gone, mut late) = (limited(), limited(), limited());
        let dropped: Vec<bool> = (2..400).map(|look| unused.look(sample(look, 9.0, 1_000))).collect();
        assert_eq!(dropped.iter().position(|dropped| *dropped), Some(359));
        assert!(unused.limit().is_none());
        assert!(!gone.expire(STALE) && gone.expire(LOOK + STALE) && gone.limit().is_none());
        assert!(late.look(sample(60, 900.0, 100)) && late.limit().is_none(), "a gap says nothing");
    }

    #[test]
    fn an_engine_that_does_not_show_its_cache_gets_no_limit() {
        let mut limit = KvLimit::default();
        let unknown = |look, preemptions| KvSample { kv_tokens: None, ..sample(look, preemptions, 6_000) };
        for look in 0..20 {
            assert!(!limit.look(unknown(look, f64::from(look) * 50.0)) && limit.limit().is_none());
        }
    }

    proptest! {
        /// Whatever an engine reports, a limit is within bounds, falls only with preemptions, and
        /// rises by no more than a step a look.
        #[test]
        fn limits_stay_within_bounds(
            looks in proptest::collection::vec((0.0f64..20.0, 0.0f64..500.0, 0.0f64..500.0, 0u64..400_000, any::<bool>()), 1..60),
        ) {
            let (mut limit, mut total, mut at) = (KvLimit::default(), 0.0, Duration::ZERO);
            for (preempted, running, waiting, outstanding, queued) in looks {
                let before = limit.limit();
                total += preempted.floor();
                at += LOOK;
                let kv_tokens = Some(KV);
                limit.look(KvSample { at, preemptions: total, running, waiting, kv_tokens, outstanding, queued });
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
