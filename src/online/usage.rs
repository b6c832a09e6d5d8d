//! Which limits hold requests up: counts of moments, one a second, at which each limit of a pool was used up on all of its
//! backends while requests waited.
//!
//! A limit that is not used up is not binding, and raising it would change nothing. The peaks of use are where lowering a limit
//! begins to have an effect.

use std::time::Duration;

use sluice_gateway::pool::PoolView;

/// How the limits of one pool were used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Moments that were counted.
    pub moments: u32,
    /// Those at which requests waited.
    pub waiting: u32,
    /// Of those, the ones at which no backend had a free slot.
    pub no_slots: u32,
    /// .. no free prefill permit.
    pub no_permits: u32,
    /// .. no room for prompt tokens in prefill.
    pub no_prefill: u32,
    /// .. too few tokens left (`pool.tokens`), which the tuner does not move.
    pub no_tokens: u32,
    /// Requests that waited at the last moment.
    pub queue: usize,
    /// Requests in flight at the first and at the last moment: those that waited, and sequences on backends.
    pub in_flight: Option<((Duration, usize), (Duration, usize))>,
    /// The most sequences on one backend.
    pub slots_peak: u32,
    /// The most long prompts in prefill on one backend.
    pub permits_peak: u32,
    /// The most prompt tokens in prefill on one backend.
    pub prefill_peak: u64,
    /// The smallest context limit of its engines, tokens, where they report one.
    pub context: Option<u64>,
    /// Backends that got requests at the last moment.
    pub in_rotation: usize,
}

/// A limit counts as used up from this share on, because the request that waits may not fit in the rest.
const NEARLY: f64 = 0.9;

impl Usage {
    /// Counts one moment.
    pub fn count(&mut self, pool: &PoolView, now: Duration) {
        let serving: Vec<_> = pool.backends.iter().filter(|backend| backend.in_rotation()).collect();
        let on_backends: usize = pool.backends.iter().map(|backend| backend.used.slots as usize).sum();
        let last = (now, pool.queue_length + on_backends);
        self.in_flight = Some((self.in_flight.map_or(last, |(first, _)| first), last));
        self.moments += 1;
        self.queue = pool.queue_length;
        self.in_rotation = serving.len();
        self.context = serving.iter().filter_map(|backend| backend.max_model_len).min();
        for backend in &serving {
            self.slots_peak = self.slots_peak.max(backend.used.slots);
            self.permits_peak = self.permits_peak.max(backend.used.long_prefills);
            self.prefill_peak = self.prefill_peak.max(backend.used.prefill_tokens);
        }
        if pool.queue_length == 0 || serving.is_empty() {
            return;
        }
        self.waiting += 1;
        let is_used = |used: u64, limit: u64| used as f64 >= limit as f64 * NEARLY;
        let all = |used_up: &dyn Fn(&sluice_gateway::pool::BackendView) -> bool| {
            u32::from(serving.iter().all(|backend| used_up(backend)))
        };
        self.no_slots += all(&|b| b.used.slots >= b.limits.slots);
        self.no_permits += all(&|b| b.limits.long_prefix.is_some_and(|long| b.used.long_prefills >= long.slots));
        self.no_prefill += all(&|b| b.limits.prefill_tokens.is_some_and(|limit| is_used(b.used.prefill_tokens, limit)));
        self.no_tokens += all(&|b| b.limits.tokens.is_some_and(|limit| is_used(b.used.tokens, limit)));
    }

    /// Share of the moments at which this many of them were counted.
    pub fn share(&self, count: u32) -> f64 {
        if self.moments == 0 { 0.0 } else { f64::from(count) / f64::from(self.moments) }
    }
}
