//! The choice of a backend: which backends may serve a request, which have room, and which of those takes it.
//!
//! Runs under the admission's lock. The policies themselves are in [`policy`]; round robin is here, because it keeps its
//! turn with the backends.

use smallvec::SmallVec;

use super::backend::BackendState;
use super::capacity::{Allocation, Fit};
use super::policy::{self, Candidate};
use super::prefix::CachedBytes;
use super::request::AdmissionRequest;
use super::room::{COMPARED, Positions};
use super::state::AdmissionState;
use crate::config::Policy;
use sluice_core::base::{BackendId, PoolId};

/// Share of an engine's context limit that a spilled prompt's estimate may reach: at home the
/// engine's own 400 is the truth, but a request must not be refused because it was spilled.
const SPILL_LEN_PERCENT: u64 = 90;

/// What a request is compared on.
type Candidates = SmallVec<[Candidate; COMPARED]>;

impl AdmissionState {
    /// Whether this request may use this backend at all.
    pub(super) fn allows(&self, request: &AdmissionRequest, backend: BackendId) -> bool {
        let Some(found) = self.backend(backend) else { return false };
        let home = found.pool == request.home;
        let spilled_in_reach = || {
            request.spill.contains(&found.pool)
                && self.pools[found.pool.index()].fed_by.contains(&request.home)
                && found.max_model_len.is_none_or(|len| request.need.prompt_tokens <= len / 100 * SPILL_LEN_PERCENT)
        };
        let possible = request.only.as_ref().is_none_or(|name| *name == found.name);
        possible
            && found.could_serve(&request.need)
            && !request.avoid.contains(&backend)
            && (home || spilled_in_reach())
    }

    /// Pools in the order in which they are tried: home first and then the spill list, but a prompt that needs a permit
    /// goes where fewest long prefills run, home on a tie. Two long prefills on one engine starve the decodes beside
    /// them while a permit of another lies idle; in a hundred simulated draws of the product's own load this rule beat
    /// round robin on all four tails in 79, home first in 51.
    pub(super) fn in_order_of_prefills(
        &mut self,
        reachable: &[PoolId],
        request: &AdmissionRequest,
    ) -> SmallVec<[PoolId; 4]> {
        let mut pools = SmallVec::from_slice(reachable);
        let prompt_tokens = request.need.prompt_tokens;
        let is_long = |pool: &PoolId| self.pools[pool.index()].rules.limits.is_long(prompt_tokens);
        if reachable.len() > 1 && reachable.iter().any(is_long) {
            pools.sort_by_cached_key(|pool| self.find(*pool, request, &mut Candidates::new()).unwrap_or(u32::MAX));
        }
        pools
    }

    /// Judges the backends that have changed; see `room.rs`.
    fn update_rooms(&mut self) {
        while let Some(id) = self.changed.pop() {
            let Some(backend) = self.backends.get_mut(id.index()).and_then(Option::as_mut) else { continue };
            backend.changed = false;
            // The position of one that is no longer configured may be another's.
            if let Some(pool) = self.pools.get_mut(backend.pool.index()).filter(|_| !backend.removed) {
                pool.rooms.judge(backend.position, !backend.is_full(), backend.has_permit());
            }
        }
    }

    /// The positions of a pool at which a prompt of so many tokens may find room.
    pub(super) fn open_positions(&mut self, pool: PoolId, prompt_tokens: u64) -> Positions {
        self.update_rooms();
        let Some(found) = self.pools.get(pool.index()) else { return Positions::default() };
        found.rooms.open(found.rules.limits.is_long(prompt_tokens))
    }

    /// Adds the backends of a pool that take the request now beside the fewest long prefills: the best in a small pool; in a
    /// larger one those of [`COMPARED`] random ones, or the first that is found after so many. Returns that number.
    fn find(&mut self, pool: PoolId, request: &AdmissionRequest, found: &mut Candidates) -> Option<u32> {
        let mut open = self.open_positions(pool, request.need.prompt_tokens);
        let mut rng = self.rng.clone();
        let cached = self.cached_bytes(pool, request);
        let members = self.members(pool);
        let mut least = None;
        let mut offer = |id: BackendId| {
            let able = |backend: &&BackendState| backend.fit(&request.need) == Fit::Room && self.allows(request, id);
            let Some(backend) = self.backend(id).filter(able) else { return least };
            let beside = backend.prefills_beside(&request.need);
            if least.is_none_or(|least| beside < least) {
                least = Some(beside);
                found.clear();
            }
            if least == Some(beside) {
                let expected = backend.cache.expect(&request.prefix, cached.on(id), request.need.prompt_tokens);
                found.push(Candidate { cached: expected, ..backend.candidate(id, self.latest) });
            }
            least
        };
        if members.len() <= COMPARED {
            while let Some(position) = open.first() {
                offer(members[position]);
            }
        } else {
            // The engines that have most of the prompt are compared in any case, once.
            cached.owners().for_each(|id| {
                if self.backend(id).is_some_and(|owner| open.take(owner.position)) {
                    offer(id);
                }
            });
            let mut drawn = 0;
            while let Some(position) = open.draw(members.len(), &mut rng) {
                drawn += 1;
                if offer(members[position]).is_some() && drawn >= COMPARED {
                    break;
                }
            }
        }
        self.rng = rng;
        least
    }

    pub(super) fn pick(&mut self, pool: PoolId, request: &AdmissionRequest) -> Option<BackendId> {
        let mut candidates = Candidates::new();
        self.find(pool, request, &mut candidates)?;
        // A reserved backend is used when no other has room.
        if candidates.len() > 1
            && let Some(reservation) = self.reservation(pool)
        {
            candidates.retain(|candidate| candidate.id != reservation.backend);
        }
        match self.pools.get(pool.index())?.rules.policy {
            Policy::RoundRobin => self.next_in_turn(&candidates),
            policy => policy::pick(policy, &candidates, &request.need, self.latest, &mut self.rng),
        }
    }

    /// Takes what a request asks for on a backend, as `BackendState::take`.
    pub(super) fn take(&mut self, backend: BackendId, request: &AdmissionRequest) -> Option<(Allocation, f64)> {
        let pool = self.backend(backend)?.pool;
        let mut expected = 0;
        if self.follows_prefixes(pool, request) {
            let Self { pools, backends, .. } = self;
            let cache = |id: BackendId| backends.get(id.index())?.as_ref().map(|found| &found.cache);
            let bytes = pools[pool.index()].prefixes.put(&request.prefix, backend, cache);
            expected = cache(backend)?.expect(&request.prefix, bytes, request.need.prompt_tokens);
        }
        self.grants += 1;
        let (latest, serial) = (self.latest, self.grants);
        Some(self.backend_mut(backend)?.take(&request.need, expected, latest, serial))
    }

    /// Whether the policy of a pool predicts what its engines have of this prompt.
    fn follows_prefixes(&self, pool: PoolId, request: &AdmissionRequest) -> bool {
        let policy = self.pools.get(pool.index()).map(|pool| pool.rules.policy);
        !request.prefix.beginnings.is_empty() && policy.is_some_and(policy::predicts)
    }

    /// How much of the prompt the engines of a pool are likely to have.
    fn cached_bytes(&self, pool: PoolId, request: &AdmissionRequest) -> CachedBytes {
        if !self.follows_prefixes(pool, request) {
            return CachedBytes::default();
        }
        self.pools[pool.index()].prefixes.find(&request.prefix, |id| self.backend(id).map(|found| &found.cache))
    }

    /// Smooth weighted round robin, as nginx does it: each candidate is owed its weight per round,
    /// the one owed most is served and pays for the round.
    fn next_in_turn(&mut self, candidates: &[Candidate]) -> Option<BackendId> {
        let round: f64 = candidates.iter().map(|c| c.weight).sum();
        for candidate in candidates {
            if let Some(backend) = self.backend_mut(candidate.id) {
                backend.turn += candidate.weight;
            }
        }
        let owed = |id: BackendId| self.backend(id).map_or(0.0, |backend| backend.turn);
        let next = candidates.iter().map(|c| c.id).rev().max_by(|a, b| owed(*a).total_cmp(&owed(*b)))?;
        if let Some(backend) = self.backend_mut(next) {
            backend.turn -= round;
        }
        Some(next)
    }
}
