//! Finds which limits hold requests up. Once a second, counts a moment with a queue for each limit
//! that is used up on all backends of a pool.
//!
//! Raising a limit that is not used up changes nothing. Lowering a limit has an effect only below
//! the peak of use.

use std::time::Duration;

use sluice_gateway::pool::PoolView;

/// Use of the limits of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Counted moments.
    pub moments: u32,
    /// Moments with a queue.
    pub waiting: u32,
    /// Moments with a queue at which no backend had a free slot.
    pub no_slots: u32,
    /// Moments with a queue at which no backend had a free prefill permit.
    pub no_permits: u32,
    /// Moments with a queue at which no backend had room for prompt tokens in prefill.
    pub no_prefill: u32,
    /// Length of the queue at the last moment.
    pub queue: usize,
    /// The first and the last moment, each with waiting requests plus sequences on backends.
    pub in_flight: Option<((Duration, usize), (Duration, usize))>,
    /// The most sequences on one backend.
    pub slots_peak: u32,
    /// The most long prompts in prefill on one backend.
    pub permits_peak: u32,
    /// The most prompt tokens in prefill on one backend.
    pub prefill_peak: u64,
    /// Smallest context limit of the engines in tokens, where reported.
    pub context: Option<u64>,
    /// Backends in rotation at the last moment.
    pub in_rotation: usize,
}

/// From this share on, a limit counts as used up, because the next request may not fit into the
/// rest.
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
    }
}
