//! `tokens = "auto"`: a limit of outstanding tokens that keeps an engine from preempting requests.
//!
//! An engine has no such limit until it preempts. Then its KV cache is full, and each preempted
//! request is computed again while the others wait. From then on the limit is `share x cache x
//! (outstanding tokens of running requests / tokens in the cache)`, so that requests fill the cache
//! to the share. The quotient in brackets is usually above 1, because running requests have not yet
//! generated all of their tokens. The quotient is measured, so it also accounts for shared prefixes
//! and for wrong estimates of output lengths. It is averaged over about a minute of looks without
//! preemptions, because an engine that preempts keeps the oldest requests, which have little left
//! to generate.
//!
//! The share begins at [`SHARE`], falls by [`STEP_DOWN`] with each look at which the engine
//! preempts within the limit, and rises by [`STEP_UP`] with each look while the limit makes
//! requests wait and the engine hardly preempts. A limit is dropped when it held nothing back for
//! [`UNUSED`], or the engine shows no page for [`STALE`].
//!
//! Bounds: at least half of the KV caches' tokens, at most `limits::MAX_TOKENS`. An engine that
//! does not show the size of the caches gets no limit. Pure: a sample of the engine's page is a
//! parameter.

use std::time::Duration;

use sluice_config::limits::MAX_TOKENS;
use sluice_gateway::pool::LearnedTokens;

use crate::findings::LOOK;
use crate::findings::facts::PageFacts;

/// Preemptions within [`LOOK`] that show a full cache. Fewer are no harm.
const PREEMPTED: f64 = 3.0;
/// [`PREEMPTED`] as a share of the running requests; both must be reached.
const PREEMPTED_SHARE: f64 = 0.1;
/// The share of the cache that requests should fill, at first.
const SHARE: f64 = 0.88;
/// Lower bound of the share.
const SHARE_LEAST: f64 = 0.6;
/// Upper bound of the share.
const SHARE_MOST: f64 = 0.96;
/// Fall of the share at a look with preemptions.
const STEP_DOWN: f64 = 0.02;
/// Rise of the share within [`LOOK`].
const STEP_UP: f64 = 0.005;
/// The least limit, as a share of the tokens that fit the KV caches.
const FLOOR: f64 = 0.5;
/// The weight of one look in the average of the quotient.
const WEIGHT: f64 = 0.2;
/// The quotient before it was measured. It fits requests whose answers have a few more tokens than
/// the prompts.
const UNMEASURED: f64 = 1.4;
/// A look at which a smaller share of the cache is in use says little about the quotient.
const USED_LEAST: f64 = 0.5;
/// Time without many preemptions before the share rises.
const CALM: Duration = Duration::from_secs(25);
/// If this share of the limit is in use, the limit holds requests back.
const NEAR: f64 = 0.9;
/// A limit that held nothing back for this time is dropped.
const UNUSED: Duration = Duration::from_hours(1);
/// After this time without a metrics page, the last page says nothing about the engine, and the
/// limit is dropped.
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
    /// The share of the KV caches in use.
    pub usage: f64,
    /// Tokens in the KV caches of all ranks.
    pub kv_tokens: Option<u64>,
    /// Outstanding tokens of this gateway's requests on the engine.
    pub outstanding: u64,
    /// Whether requests wait in the pool's queue.
    pub queued: bool,
}

impl KvSample {
    /// The sample of an engine's page.
    pub fn new(page: &PageFacts, outstanding: u64, queued: bool, at: Duration) -> Self {
        let PageFacts { preemptions, running, waiting, kv_usage, kv_tokens, .. } = *page;
        Self { at, preemptions, running, waiting, usage: kv_usage, kv_tokens, outstanding, queued }
    }
}

/// The limit of one engine.
#[derive(Clone, Copy, Debug)]
pub struct KvLimit {
    limit: Option<LearnedTokens>,
    last: Option<KvSample>,
    /// The quotient: outstanding tokens of running requests for each token in the cache.
    demand: Option<f64>,
    share: f64,
    /// Since when the engine hardly preempts.
    calm: Duration,
    /// Since when the limit holds nothing back.
    unused: Duration,
}

impl Default for KvLimit {
    fn default() -> Self {
        let (calm, unused) = (Duration::ZERO, Duration::ZERO);
        Self { limit: None, last: None, demand: None, share: SHARE, calm, unused }
    }
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

    /// Learns from one look. Returns whether a limit began or ended.
    pub fn look(&mut self, now: KvSample) -> bool {
        let had = self.limit.is_some();
        self.learn(now);
        self.limit.is_some() != had
    }

    fn learn(&mut self, now: KvSample) {
        let begin_at = |at| Self { last: Some(now), calm: at, unused: at, ..Self::default() };
        let Some(last) = self.last.replace(now) else {
            *self = begin_at(now.at);
            return;
        };
        let Some(kv_tokens) = now.kv_tokens.filter(|_| now.kv_tokens == last.kv_tokens && now.at < last.at + STALE)
        else {
            // Another engine, other flags, or so long a gap that the preemptions in it say nothing
            // about the present tokens.
            *self = begin_at(now.at);
            return;
        };
        let looks = (now.at.saturating_sub(last.at).as_secs_f64() / LOOK.as_secs_f64()).max(1.0);
        // A sum that fell belongs to an engine that has started again.
        let preempted = if now.preemptions < last.preemptions { 0.0 } else { now.preemptions - last.preemptions };
        // Requests may have ended since the engine preempted.
        let outstanding = now.outstanding.max(last.outstanding);
        let preempts = preempted >= PREEMPTED.max(PREEMPTED_SHARE * now.running) * looks && outstanding > 0;
        let (is_above, is_near) = self.limit.map_or((false, false), |limit| {
            let share = outstanding as f64 / limit.tokens.max(1) as f64;
            (share > 1.0, share >= NEAR)
        });
        match preempts {
            true => self.calm = now.at,
            false => self.measure(&now, kv_tokens, looks),
        }
        if preempts || is_near {
            self.unused = now.at;
        }
        match self.limit {
            None if !preempts => return,
            Some(_) if now.at >= self.unused + UNUSED => {
                *self = begin_at(now.at);
                return;
            }
            // Above the limit, requests from before the last cut still run, so the share stays.
            Some(_) if preempts && !is_above => self.share -= STEP_DOWN,
            Some(_) if now.at >= self.calm + CALM && is_near && now.queued => self.share += STEP_UP * looks,
            _ => {}
        }
        self.share = self.share.clamp(SHARE_LEAST, SHARE_MOST);
        let tokens = self.share * kv_tokens as f64 * self.demand.unwrap_or(UNMEASURED);
        let tokens = tokens.max(FLOOR * kv_tokens as f64).clamp(1.0, MAX_TOKENS.0 as f64) as u64;
        let reason = LearnedTokens { tokens, preempted: preempted as u64, outstanding };
        self.limit = Some(match self.limit {
            Some(limit) if !preempts => LearnedTokens { tokens, ..limit },
            _ => reason,
        });
    }

    fn measure(&mut self, now: &KvSample, kv_tokens: u64, looks: f64) {
        // Comparisons with NaN are false, so NaN is ignored.
        let says_something = now.usage >= USED_LEAST && now.running >= 1.0 && now.outstanding > 0 && kv_tokens > 0;
        if !says_something {
            return;
        }
        let runs = now.running / (now.running + now.waiting.max(0.0));
        let quotient = now.outstanding as f64 * runs / (now.usage.min(1.0) * kv_tokens as f64);
        let weight = 1.0 - (1.0 - WEIGHT).powf(looks);
        let before = self.demand.unwrap_or(UNMEASURED);
        self.demand = Some(before + weight * (quotient - before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KV: u64 = 100_000;

    /// A look at a full cache: 60 of 100 requests run.
    fn sample(look: u32, preemptions: f64, outstanding: u64) -> KvSample {
        let (at, kv_tokens) = (look * LOOK, Some(KV));
        let (running, waiting, usage, queued) = (60.0, 40.0, 1.0, true);
        KvSample { at, preemptions, running, waiting, usage, kv_tokens, outstanding, queued }
    }

    /// A look without further preemptions, at 60 running requests.
    fn calm(look: u32, usage: f64, outstanding: u64) -> KvSample {
        KvSample { usage, waiting: 0.0, ..sample(look, 520.0, outstanding) }
    }

    fn tokens(limit: &KvLimit) -> u64 {
        limit.limit().unwrap().tokens
    }

    #[test]
    fn preemptions_bring_a_limit_that_follows_what_fills_the_cache() {
        let mut limit = KvLimit::default();
        assert!(!limit.look(sample(0, 500.0, 200_000)), "the first look has nothing to compare");
        assert!(!limit.look(sample(1, 505.0, 200_000)) && limit.limit().is_none(), "five of sixty are no harm");
        // The look before measured a quotient of 200,000 x 0.6 / 100,000. A look with preemptions
        // measures nothing. The burst is nearly over at this look.
        assert!(limit.look(sample(2, 520.0, 20_000)));
        let demand = UNMEASURED + WEIGHT * (1.2 - UNMEASURED);
        let first = LearnedTokens { tokens: (SHARE * demand * KV as f64) as u64, preempted: 15, outstanding: 200_000 };
        assert_eq!(limit.limit(), Some(first));
        // Requests admitted before the limit must end first.
        assert!(!limit.look(sample(3, 560.0, 150_000)));
        assert_eq!(tokens(&limit), first.tokens);
        // 120,000 outstanding tokens fill only 60 % of the cache.
        for look in 4..40 {
            let before = tokens(&limit);
            limit.look(KvSample { preemptions: 560.0, queued: false, ..calm(look, 0.6, 120_000) });
            assert!(tokens(&limit) >= before);
        }
        assert!((tokens(&limit) as f64 / (SHARE * 2.0 * KV as f64) - 1.0).abs() < 0.01, "{limit:?}");
    }

    #[test]
    fn the_share_falls_with_preemptions_within_the_limit_and_rises_while_requests_wait_for_it() {
        let mut limit = KvLimit::default();
        limit.look(sample(0, 500.0, 140_000));
        limit.look(sample(1, 520.0, 140_000));
        let first = tokens(&limit);
        limit.look(sample(2, 540.0, first));
        // At the look before, more tokens were outstanding than the limit allows.
        assert_eq!(tokens(&limit), first);
        limit.look(sample(3, 560.0, first));
        let second = tokens(&limit);
        assert!(second.abs_diff(((SHARE - STEP_DOWN) * UNMEASURED * KV as f64) as u64) <= 1, "{limit:?}");
        let waits_for = |outstanding: u64, look, queued| {
            let usage = outstanding as f64 / UNMEASURED / KV as f64;
            KvSample { preemptions: 560.0, queued, ..calm(look, usage, outstanding) }
        };
        for look in 4..8 {
            limit.look(waits_for(second, look, false));
        }
        assert!(tokens(&limit).abs_diff(second) <= 1, "no request waits: {limit:?}");
        for look in 8..100 {
            limit.look(waits_for(tokens(&limit), look, true));
        }
        assert!((limit.share - SHARE_MOST).abs() < 1e-9, "{limit:?}");
        for look in 100..200 {
            limit.look(sample(look, f64::from(look) * 50.0, 1_000));
        }
        assert!((limit.share - SHARE_LEAST).abs() < 1e-9, "{limit:?}");
    }

    #[test]
    fn a_limit_never_falls_below_half_of_the_caches_and_ends_with_the_engine() {
        let mut limit = KvLimit::default();
        // Shared prefixes: the cache holds more than the requests demand.
        for look in 0..60 {
            limit.look(KvSample { preemptions: 0.0, ..calm(look, 1.0, 30_000) });
        }
        assert!(limit.look(sample(60, 9.0, 30_000)));
        assert_eq!(tokens(&limit), KV / 2);
        // The engine starts again with the same cache, then with another.
        assert!(!limit.look(sample(61, 0.0, 40_000)) && limit.limit().is_some());
        assert!(limit.look(KvSample { kv_tokens: Some(2 * KV), ..sample(62, 0.0, 40_000) }));
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
        assert_eq!(dropped.iter().position(|dropped| *dropped), Some(360));
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
        /// Whatever an engine reports, a limit is within bounds, and begins only with preemptions.
        #[test]
        fn limits_stay_within_bounds(
            looks in proptest::collection::vec(
                (0.0f64..20.0, 0.0f64..500.0, 0.0f64..500.0, -0.1f64..1.2, 0u64..400_000, any::<bool>()),
                1..60,
            ),
        ) {
            let (mut limit, mut total, mut at) = (KvLimit::default(), 0.0, Duration::ZERO);
            for (preempted, running, waiting, usage, outstanding, queued) in looks {
                let before = limit.limit();
                total += preempted.floor();
                at += LOOK;
                let kv_tokens = Some(KV);
                let usage = if usage < 0.0 { f64::NAN } else { usage };
                let changed =
                    limit.look(KvSample { at, preemptions: total, running, waiting, usage, kv_tokens, outstanding, queued });
                prop_assert_eq!(changed, before.is_some() != limit.limit().is_some());
                prop_assert!((SHARE_LEAST..=SHARE_MOST).contains(&limit.share));
                let Some(now) = limit.limit() else { continue };
                prop_assert!(now.tokens >= KV / 2 && now.tokens <= MAX_TOKENS.0);
                prop_assert!(before.is_some() || preempted.floor() >= PREEMPTED);
            }
        }
    }
}
