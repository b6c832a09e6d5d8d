//! The choice of a backend: which backends may serve a request, which have room, and which of those takes it.
//!
//! Runs under the admission's lock. The policies themselves are in [`policy`]; round robin is here, because it keeps its
//! turn with the backends.

use smallvec::SmallVec;

use super::backend::BackendState;
use super::capacity::Fit;
use super::policy::{self, Candidate};
use super::request::AdmissionRequest;
use super::state::AdmissionState;
use crate::config::Policy;
use sluice_core::base::{BackendId, PoolId};

/// Share of an engine's context limit that a spilled prompt's estimate may reach: at home the
/// engine's own 400 is the truth, but a request must not be refused because it was spilled.
const SPILL_LEN_PERCENT: u64 = 90;

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
        &self,
        reachable: &[PoolId],
        request: &AdmissionRequest,
    ) -> SmallVec<[PoolId; 4]> {
        let mut pools = SmallVec::from_slice(reachable);
        if reachable.len() > 1 {
            pools.sort_by_cached_key(|pool| self.least_prefills(*pool, request).unwrap_or(u32::MAX));
        }
        pools
    }

    /// The fewest long prefills on a backend of this pool that has room; 0 where the request needs no permit.
    fn least_prefills(&self, pool: PoolId, request: &AdmissionRequest) -> Option<u32> {
        self.with_room(pool, request).map(|(_, backend)| backend.prefills_beside(&request.need)).min()
    }

    /// Backends of a pool that could take the request now.
    fn with_room<'s>(
        &'s self,
        pool: PoolId,
        request: &'s AdmissionRequest,
    ) -> impl Iterator<Item = (BackendId, &'s BackendState)> + 's {
        self.members(pool)
            .iter()
            .filter(|id| self.allows(request, **id))
            .filter_map(|id| self.backend(*id).map(|backend| (*id, backend)))
            .filter(|(_, backend)| backend.fit(&request.need) == Fit::Room)
    }

    pub(super) fn pick(&mut self, pool: PoolId, request: &AdmissionRequest) -> Option<BackendId> {
        let least = self.least_prefills(pool, request)?;
        let mut candidates: SmallVec<[Candidate; 8]> = self
            .with_room(pool, request)
            .filter(|(_, backend)| backend.prefills_beside(&request.need) == least)
            .map(|(id, backend)| backend.candidate(id, self.latest))
            .collect();
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
