//! One vLLM server as admission sees it: identity, bounds, usage, health and speed.
//!
//! Plain data behind the admission's lock, except the progress in [`Liveness`].

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::adapters::AdapterSlots;
use super::bounds::{Bound, Bounds};
use super::cache_events::EventFollower;
use super::capacity::{Allocation, BackendLimits, CapacityUsage, Fit, Need};
use super::engine_load::{DecodeStart, EngineLoad, Learned};
use super::fault_report::FaultLines;
use super::health::BackendHealth;
use super::known_engine::KnownEngine;
use super::liveness::Liveness;
use super::policy::Candidate;
use super::prefill_rate::PrefillRate;
use super::prefix::EngineCache;
use super::running_copies::RunningCopies;
use super::service::{Cordon, Service};
use super::settled::Settled;
use super::spec::BackendSpec;
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};

/// A TPOT (time per output token) below this is a measurement error: one event held several tokens.
const TPOT_MIN: Duration = Duration::from_micros(100);
/// A TPOT above this means that the engine is stuck, not slow.
const TPOT_MAX: Duration = Duration::from_secs(2);
/// Weight of one TPOT in the mean: about the last 20 requests count.
const TPOT_WEIGHT: f64 = 0.1;

/// The backend's place among the backends of the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) position: usize,
    /// Share of new work relative to the other backends.
    pub(super) weight: f64,
    /// The work that the backend is owed in round robin.
    pub(super) turn: f64,
}

/// The speed that requests showed, for views and prices; the policies use [`EngineLoad`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Speed {
    /// Decayed mean of the TPOT of finished requests, seconds.
    pub(super) seconds_per_token: Option<f64>,
    pub(super) prefill: PrefillRate,
}

impl Speed {
    fn unknown(now: Instant) -> Self {
        Self { seconds_per_token: None, prefill: PrefillRate::new(now) }
    }

    pub(super) fn observe_tpot(&mut self, tpot: Duration) {
        let sample = tpot.clamp(TPOT_MIN, TPOT_MAX).as_secs_f64();
        self.seconds_per_token =
            Some(self.seconds_per_token.map_or(sample, |mean| mean + TPOT_WEIGHT * (sample - mean)));
    }
}

#[derive(Debug)]
pub(super) struct BackendState {
    pub(super) name: Arc<str>,
    pub(super) address: Arc<Address>,
    pub(super) pool: PoolId,
    pub(super) place: Place,
    pub(super) bounds: Bounds,
    pub(super) used: CapacityUsage,
    pub(super) settled: Settled,
    /// Copies that run here; not counted in `used`.
    pub(super) copies: RunningCopies,
    pub(super) service: Service,
    pub(super) health: BackendHealth,
    pub(super) fault_lines: FaultLines,
    pub(super) liveness: Liveness,
    pub(super) speed: Speed,
    pub(super) load: EngineLoad,
    pub(super) cache: EngineCache,
    /// The follower of the engine's events, if there is one.
    pub(super) events: Option<Box<EventFollower>>,
    pub(super) adapters: AdapterSlots,
    pub(super) engine: KnownEngine,
    /// The backend is in the list of changed backends; see `room.rs`.
    pub(super) changed: bool,
}

impl BackendState {
    /// `layout`: number of the layout with which the backend appears.
    pub(super) fn new(spec: &BackendSpec, pool: PoolId, limits: BackendLimits, layout: u64, now: Instant) -> Self {
        Self {
            name: Arc::clone(&spec.name),
            address: Arc::clone(&spec.address),
            pool,
            place: Place { position: 0, weight: spec.weight, turn: 0.0 },
            bounds: Bounds::new(limits),
            used: CapacityUsage::default(),
            settled: Settled::default(),
            copies: RunningCopies::default(),
            service: Service::default(),
            health: BackendHealth::default(),
            fault_lines: FaultLines::default(),
            liveness: Liveness::new(now),
            speed: Speed::unknown(now),
            load: EngineLoad::new(now),
            cache: EngineCache::new(layout),
            events: None,
            adapters: AdapterSlots::default(),
            engine: KnownEngine::default(),
            changed: false,
        }
    }

    /// Takes over the state of the same engine under another name or pool.
    pub(super) fn inherit(&mut self, known: &Self) {
        self.bounds.inherit(&known.bounds);
        self.service = Service { removed: false, ..known.service };
        self.health = known.health.clone();
        self.speed = known.speed;
        self.load.learned = known.load.learned;
        self.engine = known.engine.inherited();
    }

    /// Sets one bound. If the bound opens an engine on trial to requests, copies are cut, because
    /// the engine was not tried with both.
    pub(super) fn set_bound(&mut self, bound: Bound) {
        let was_for_copies = self.bounds.is_for_copies_only();
        self.bounds.set(bound);
        if was_for_copies && !self.bounds.is_for_copies_only() {
            self.copies.cut();
        }
    }

    /// The engine was replaced by one that is ready.
    pub(super) fn engine_replaced(&mut self, now: Instant) {
        self.health = BackendHealth::default();
        self.forget_engine(now);
        self.health.probe_ok(now);
        self.engine.replaced();
    }

    /// The engine has started again: cache and adapters are empty, the speed is unknown.
    pub(super) fn forget_engine(&mut self, now: Instant) {
        self.speed = Speed::unknown(now);
        self.load.learned = Learned::default();
        self.cache.clear();
        self.adapters.clear();
        self.engine.restarted();
    }

    /// The data by which a choice compares the backend. Valid until the backend changes. Times are
    /// in seconds since `epoch`.
    pub(super) fn candidate(&self, id: BackendId, epoch: Instant) -> Candidate {
        let (used, occupied, limits) = (&self.used, self.occupied(), self.bounds.in_force());
        let left = |limit: Option<u64>, used: u64| limit.map_or(u64::MAX, |limit| limit.saturating_sub(used));
        let trial_is_taken = self.health.allowance().is_some_and(|requests| used.requests >= requests);
        let closed = trial_is_taken || !self.in_rotation();
        Candidate {
            id,
            free_slots: if closed { 0 } else { limits.slots.saturating_sub(occupied.slots) },
            free_tokens: left(limits.tokens, occupied.tokens).min(self.bounds.learned_room(used)),
            // A prompt above the limit runs when no other prompt is in prefill.
            free_prefill: left(limits.prefill_tokens.filter(|_| occupied.prefill_tokens > 0), occupied.prefill_tokens),
            weight: self.place.weight,
            // Room counts requests only; load also counts copies.
            requests: used.requests + self.copies.len(),
            sequences: used.slots + self.copies.sequences(),
            long_prefills: used.long_prefills,
            tokens: (used.tokens + self.copies.tokens()) as f64,
            backlog: self.load.backlog(used, epoch),
            small_tokens: (used.computed_prefill_tokens() - used.large_prefill_tokens) as f64,
            interference: self.load.learned.interference,
            trust: self.cache.trust(),
            decode: self.load.learned.decode.seen(epoch),
            prefill: self.load.learned.prefill.seen(epoch),
            granted: self.load.granted,
        }
    }

    /// The usage to which a new request's need is added before the comparison with the limits.
    pub(super) fn occupied(&self) -> CapacityUsage {
        self.bounds.occupied(&self.used)
    }

    /// Takes `need` for the request with number `serial`. `cached`: the prompt tokens that the
    /// engine should have in the prefix cache. Also returns the seconds of large prefills ahead.
    /// Cuts copies that use the room.
    pub(super) fn take(&mut self, need: &Need, cached: u64, now: Instant, serial: u64) -> (Allocation, f64) {
        self.copies.make_room(&self.occupied(), self.bounds.in_force(), need);
        let (ahead, _) = self.load.remaining(&self.used, now);
        self.load.add(need.prompt_tokens - cached, &self.used, now, serial);
        self.cache.write(need.tokens() - cached);
        let mut allocation = self.used.take(self.bounds.in_force(), need);
        self.used.expect_cached(&mut allocation, cached);
        (allocation, ahead)
    }

    pub(super) fn end_prefill(&mut self, allocation: &mut Allocation) -> DecodeStart {
        let before = self.used.computed_prefill_tokens();
        self.used.end_prefill(allocation);
        self.load.end_prefill(before - self.used.computed_prefill_tokens(), &self.used)
    }

    /// Notes for the requests here whether the backend leaves service. Called after a change of
    /// `service`.
    pub(super) fn service_changed(&self) {
        self.liveness.progress.set_leaving(self.service.is_leaving());
    }

    /// Whether new work may go here if there is room.
    pub(super) fn in_rotation(&self) -> bool {
        self.service.is_open() && self.health.allowance() != Some(0)
    }

    /// Whether the backend gets work now or is expected to soon.
    fn is_worth_waiting_for(&self) -> bool {
        let coming = match self.service.cordon() {
            Cordon::Open => self.health.is_untried(),
            Cordon::Draining | Cordon::Starting => true,
            Cordon::Down | Cordon::Idle => false,
        };
        self.in_rotation() || (coming && self.service.is_wanted())
    }

    /// Whether the backend may serve `need` now or soon, once there is room.
    pub(super) fn could_serve(&self, need: &Need) -> bool {
        self.is_worth_waiting_for() && self.bounds.permit(need)
    }

    pub(super) fn fit(&self, need: &Need) -> Fit {
        match self.health.allowance() {
            Some(requests) if self.used.requests >= requests => Fit::Full,
            _ if !self.in_rotation() => Fit::Full,
            _ if need.tokens() > self.bounds.learned_room(&self.used) => Fit::Full,
            _ => self.occupied().fit(self.bounds.in_force(), need),
        }
    }

    pub(super) fn has_permit(&self) -> bool {
        self.bounds.in_force().long_prefix.is_none_or(|long| self.occupied().long_prefills < long.slots)
    }
}
