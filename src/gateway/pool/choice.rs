//! Chooses a backend: which backends may serve a request, which have room, and which one takes it.
//!
//! Runs under the admission's lock. The policies are in [`policy`]; round robin is here, because
//! its state is kept with the backends.

use smallvec::SmallVec;

use super::adapters::AdapterPlace;
use super::capacity::Allocation;
use super::policy::{self, COMPARED, Candidate, Offer};
use super::prefix::CachedBytes;
use super::request::AdmissionRequest;
use super::room::Positions;
use super::served::ModelKey;
use super::state::AdmissionState;
use sluice_config::Policy;
use sluice_core::base::{BackendId, PoolId, Rng};

/// Percentage of an engine's context limit up to which a prompt may spill to it. At home the engine
/// may answer 400, but no request must be refused only because it spilled.
const SPILL_LEN_PERCENT: u64 = 90;

pub(super) type Offers<'c> = SmallVec<[Offer<'c>; COMPARED]>;

impl AdmissionState {
    /// Whether this request may use this backend, apart from room.
    pub(super) fn allows(&self, request: &AdmissionRequest, backend: BackendId) -> bool {
        let Some(found) = self.backend(backend) else { return false };
        let home = found.pool == request.home;
        let spilled_in_reach = || {
            request.spill.contains(&found.pool)
                && self.pools[found.pool.index()].fed_by.contains(&request.home)
                && found
                    .engine
                    .facts
                    .max_model_len
                    .is_none_or(|len| request.need.prompt_tokens <= len / 100 * SPILL_LEN_PERCENT)
        };
        let possible = request.only.as_ref().is_none_or(|name| *name == found.name);
        possible
            && found.engine.facts.meets(&request.wants)
            && found.could_serve(&request.need)
            && !request.avoid.contains(&backend)
            && (home || spilled_in_reach())
    }

    /// The pools in order: home, then the spill list. For a prompt that needs a permit, the pool
    /// with the fewest long prefills next to it is first, and home on a tie, because two long
    /// prefills on one engine starve the decodes there while a permit of another engine is idle. In
    /// a hundred simulated draws, this rule beat round robin on all four tails 79 times, and
    /// "always home first" did so 51 times.
    pub(super) fn in_order_of_prefills(
        &mut self,
        reachable: &[PoolId],
        request: &AdmissionRequest,
    ) -> SmallVec<[PoolId; 4]> {
        let mut pools = SmallVec::from_slice(reachable);
        if reachable.len() > 1 && reachable.iter().any(|pool| self.is_long(*pool, request)) {
            self.update_rooms();
            pools.sort_by_cached_key(|pool| {
                let beside = |offer: &Offer<'_>| self.prefills_beside(*pool, request, offer.candidate);
                self.find(*pool, request, &mut self.rng.clone()).first().map_or(u32::MAX, beside)
            });
        }
        pools
    }

    fn is_long(&self, pool: PoolId, request: &AdmissionRequest) -> bool {
        self.pools.get(pool.index()).is_some_and(|pool| pool.rules.limits.is_long(request.need.prompt_tokens))
    }

    /// Long prefills that would run next to the request; 0 if the request is not long.
    fn prefills_beside(&self, pool: PoolId, request: &AdmissionRequest, candidate: &Candidate) -> u32 {
        if self.is_long(pool, request) { candidate.long_prefills } else { 0 }
    }

    /// Updates the index of rooms for the backends that have changed; see `room.rs`.
    fn update_rooms(&mut self) {
        while let Some(id) = self.changed.pop() {
            let Some(backend) = self.backends.get_mut(id.index()).and_then(Option::as_mut) else { continue };
            backend.changed = false;
            // Another backend may have the position of one that is no longer configured.
            if let Some(pool) = self.pools.get_mut(backend.pool.index()).filter(|_| !backend.service.removed) {
                let candidate = backend.candidate(id, self.epoch);
                pool.rooms.judge(backend.place.position, candidate, !backend.is_full(), backend.has_permit());
            }
        }
    }

    /// The positions of a pool at which a prompt of this length may find room.
    pub(super) fn open_positions(&mut self, pool: PoolId, prompt_tokens: u64) -> Positions {
        self.update_rooms();
        let Some(found) = self.pools.get(pool.index()) else { return Positions::default() };
        found.rooms.open(found.rules.limits.is_long(prompt_tokens))
    }

    /// The open backends that are compared for the request ([`policy::compared`]): backends with
    /// room and, if the request is long, with the fewest long prefills. The caller has updated the
    /// index of rooms.
    pub(super) fn find(&self, pool: PoolId, request: &AdmissionRequest, rng: &mut Rng) -> Offers<'_> {
        let Some(state) = self.pools.get(pool.index()) else { return Offers::new() };
        let is_long = self.is_long(pool, request);
        let cached = self.cached_bytes(pool, request);
        // At home, a request needs only room, unless it wants certain engines, or another engine
        // has failed or refused it.
        let is_plain =
            request.home == pool && request.only.is_none() && request.avoid.is_empty() && request.wants.is_anything();
        // Nearly all requests: their backends differ only in load.
        let is_simple = is_plain && !is_long && cached.is_empty() && request.adapter.is_none();
        let is_shared = request.fair.is_some() && request.home == pool && state.queue.is_shared();
        let (mut found, mut least) = (Offers::new(), u32::MAX);
        let mut offer = |position: usize| {
            let candidate = state.rooms.candidate(position);
            if !candidate.has_room(&request.need) || !(is_plain || self.allows(request, candidate.id)) {
                return false;
            }
            if is_shared && self.is_held(request, candidate.id) {
                return false;
            }
            if is_simple {
                found.push(Offer { candidate, cached: 0.0, adapter: AdapterPlace::Ready });
                return true;
            }
            let beside = if is_long { candidate.long_prefills } else { 0 };
            if beside < least {
                least = beside;
                found.clear();
            }
            if beside == least {
                let cached = cached.tokens_on(candidate, request) as f64;
                let adapter = request.adapter.map(|adapter| self.adapter_place(candidate.id, adapter));
                found.push(Offer { candidate, cached, adapter: adapter.unwrap_or(AdapterPlace::Ready) });
            }
            true
        };
        let (mut open, compared) = (state.rooms.open(is_long), policy::compared(state.rules.policy));
        if open.count() <= compared {
            open.iter().for_each(|position| {
                offer(position);
            });
            return found;
        }
        // The engines that have most of the prompt are always compared.
        for position in cached.owners().filter_map(|id| self.backend(id)).map(|owner| owner.place.position) {
            if open.take(position) {
                offer(position);
            }
        }
        let (mut some, mut met) = (false, 0);
        if let Some(position) = state.rooms.runner_up().filter(|position| open.take(*position)) {
            (some, met) = (offer(position), 1);
        }
        for position in open.walk(rng) {
            some |= offer(position);
            met += 1;
            if some && met >= compared {
                break;
            }
        }
        found
    }

    /// Like [`Self::find`], but without a reserved backend, unless no other backend has room.
    fn offers(&self, pool: PoolId, request: &AdmissionRequest, rng: &mut Rng) -> Offers<'_> {
        let mut offers = self.find(pool, request, rng);
        if offers.len() > 1
            && let Some(reservation) = self.reservation(pool)
        {
            offers.retain(|offer| offer.candidate.id != reservation.backend);
        }
        offers
    }

    pub(super) fn pick(&mut self, pool: PoolId, request: &AdmissionRequest) -> Option<BackendId> {
        self.update_rooms();
        let policy = self.pools.get(pool.index())?.rules.policy;
        let mut rng = self.rng.clone();
        if policy == Policy::RoundRobin {
            let weight = |offer: &Offer<'_>| (offer.candidate.id, offer.candidate.weight);
            let weights = self.offers(pool, request, &mut rng).iter().map(weight).collect();
            self.rng = rng;
            return self.next_in_turn(weights);
        }
        let now = self.latest.saturating_duration_since(self.epoch).as_secs_f64();
        let offers = self.offers(pool, request, &mut rng);
        let (chosen, runner_up) = policy::pick(policy, &offers, &request.need, now, &mut rng);
        drop(offers);
        self.rng = rng;
        let position = runner_up.and_then(|id| self.backend(id)).map(|found| found.place.position);
        self.pools[pool.index()].rooms.set_runner_up(position);
        chosen
    }

    pub(super) fn take(&mut self, backend: BackendId, request: &AdmissionRequest) -> Option<(Allocation, f64)> {
        let pool = self.backend(backend)?.pool;
        let expected = self.expect_cached(pool, backend, request)?;
        self.grants += 1;
        let (latest, serial) = (self.latest, self.grants);
        let found = self.backend_mut(backend)?;
        let (mut allocation, ahead) = found.take(&request.need, expected, latest, serial);
        allocation.bill = self.charge(backend, request, expected);
        let found = self.backend_mut(backend)?;
        allocation.adapter = request.adapter;
        if let Some(adapter) = request.adapter {
            found.adapters.take(adapter);
        }
        Some((allocation, ahead))
    }

    /// Notes the prompt as sent to the engine. Returns the prompt tokens that should be cached
    /// there.
    pub(super) fn expect_cached(
        &mut self,
        pool: PoolId,
        backend: BackendId,
        request: &AdmissionRequest,
    ) -> Option<u64> {
        if !self.follows_prefixes(pool, request) {
            return Some(0);
        }
        let Self { pools, backends, .. } = self;
        let cache = |id: BackendId| backends.get(id.index())?.as_ref().map(|found| &found.cache);
        let bytes = pools[pool.index()].prefixes.put(&request.prefix, backend, cache);
        Some(cache(backend)?.expect(&request.prefix, bytes, request.need.prompt_tokens))
    }

    fn adapter_place(&self, backend: BackendId, adapter: ModelKey) -> AdapterPlace {
        match self.backend(backend) {
            None => AdapterPlace::Ready,
            Some(found) if !found.engine.facts.served.has(adapter) => AdapterPlace::Missing,
            Some(found) => found.adapters.place(adapter),
        }
    }

    fn follows_prefixes(&self, pool: PoolId, request: &AdmissionRequest) -> bool {
        let policy = self.pools.get(pool.index()).map(|pool| pool.rules.policy);
        !request.prefix.beginnings.is_empty() && policy.is_some_and(policy::predicts)
    }

    /// How much of the prompt the engines of a pool are likely to have in their prefix caches.
    pub(super) fn cached_bytes(&self, pool: PoolId, request: &AdmissionRequest) -> CachedBytes {
        if !self.follows_prefixes(pool, request) {
            return CachedBytes::default();
        }
        self.pools[pool.index()].prefixes.find(&request.prefix, |id| self.backend(id).map(|found| &found.cache))
    }

    /// Smooth weighted round robin, as in nginx: each round adds each backend's weight to the work
    /// that the backend is owed. The backend that is owed most is served and pays the sum of the
    /// weights.
    fn next_in_turn(&mut self, weights: SmallVec<[(BackendId, f64); COMPARED]>) -> Option<BackendId> {
        let round: f64 = weights.iter().map(|(_, weight)| weight).sum();
        for (id, weight) in &weights {
            if let Some(backend) = self.backend_mut(*id) {
                backend.place.turn += weight;
            }
        }
        let owed = |id: BackendId| self.backend(id).map_or(0.0, |backend| backend.place.turn);
        let next = weights.iter().map(|(id, _)| *id).rev().max_by(|a, b| owed(*a).total_cmp(&owed(*b)))?;
        if let Some(backend) = self.backend_mut(next) {
            backend.place.turn -= round;
        }
        Some(next)
    }
}
