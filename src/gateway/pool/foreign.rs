//! What other gateways use of the same backends, so that several of them keep one limit.
//!
//! Two amounts of each backend, both [`Share`]s:
//! - its *foreign use*: what other gateways use or may begin to use at any moment. Room is what the limits leave beside the leases of
//!   this gateway and the foreign use.
//! - its *share*, where another gateway divides the limits: what this gateway may use at most. What the limits have beyond it
//!   counts as foreign use.
//!
//! The limits are divided by a gateway that counts the other's claim as foreign use before the other one uses it
//! ([`Admission::concede`]). The other one first lowers its own share to what it claims and then says so ([`Admission::claim`]),
//! and raises its share only to what was conceded ([`Admission::set_shares`]). So the uses of both together are within the limits
//! at every moment, however late a message is. A claim is what is in use and what waits, so that requests that wait at the
//! gateway which claims are served before later ones elsewhere.
//!
//! Leases that have become longer than estimated may exceed a share, as they may exceed a limit.

use std::sync::Arc;

use super::admission::Admission;
use super::backend::BackendState;
use super::capacity::{BackendLimits, CapacityUsage, Need};
use super::share::Share;
use super::spec::Address;
use super::state::AdmissionState;
use sluice_core::base::{BackendId, PoolId};

/// What this gateway claims of one backend.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// The backend.
    pub backend: BackendId,
    /// The name of its pool.
    pub pool: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Where it is reached.
    pub address: Arc<Address>,
    /// Whether an operator has taken it out of rotation.
    pub draining: bool,
    /// What is in use, what waits, and what other gateways claim of it here.
    pub share: Share,
}

impl Admission {
    /// Lowers the share of every backend to what this gateway uses and what waits for it, and returns that: it may be given to
    /// other gateways beyond that from now on.
    pub fn claim(&self) -> Vec<Claim> {
        self.shared.update(|state, _| state.claim())
    }

    /// Sets how much of backends this gateway may use; `None`: all of their limits.
    pub fn set_shares(&self, shares: &[(BackendId, Option<Share>)]) {
        self.shared.update(|state, wakers| {
            for (id, share) in shares {
                let Some(backend) = state.backend_mut(*id) else { continue };
                backend.share = *share;
                state.dispatch(*id, wakers);
            }
        });
    }

    /// Counts what another gateway claims of a backend as foreign use. Returns how much of it the other one may use now: what the
    /// limits leave beside the leases of this gateway. `None`: there is no such backend, so there is nothing to divide.
    pub fn concede(&self, backend: BackendId, claim: Share) -> Option<Share> {
        self.shared.update(|state, wakers| {
            let found = state.backend_mut(backend)?;
            found.foreign = claim;
            let conceded = claim.min(found.most().minus(Share::of(&found.used)));
            state.dispatch(backend, wakers);
            Some(conceded)
        })
    }
}

impl BackendState {
    /// What this gateway and those that it counts may use: the limits, or its share of them.
    fn most(&self) -> Share {
        let limits = Share::of_limits(&self.limits);
        [self.share, self.ledger].into_iter().flatten().fold(limits, Share::min)
    }

    /// What is in use from the point of view of a request that looks for room: by leases, and by other gateways.
    pub(super) fn occupied(&self) -> CapacityUsage {
        let others = match (self.share, self.ledger) {
            (None, None) => self.foreign,
            _ => self.foreign.plus(Share::of_limits(&self.limits).minus(self.most())),
        };
        let mut all = self.used;
        all.slots = all.slots.saturating_add(others.slots);
        all.tokens = all.tokens.saturating_add(others.tokens);
        all.prefill_tokens = all.prefill_tokens.saturating_add(others.prefill_tokens);
        all.long_prefills = all.long_prefills.saturating_add(others.permits);
        all
    }
}

impl AdmissionState {
    fn claim(&mut self) -> Vec<Claim> {
        let ids: Vec<BackendId> = (0..self.backends.len()).map(BackendId::new).collect();
        ids.into_iter().filter_map(|id| self.claim_of(id)).collect()
    }

    fn claim_of(&mut self, id: BackendId) -> Option<Claim> {
        let pool = self.backend(id)?.pool;
        let waiting = self.waiting_for(id, pool);
        let pool = Arc::clone(&self.pools[pool.index()].name);
        let found = self.backend_mut(id)?;
        let in_use = Share::of(&found.used).plus(found.foreign);
        let wanted = in_use.plus(waiting).min(Share::of_limits(&found.limits)).max(in_use);
        found.share = Some(found.share.map_or(wanted, |share| share.min(wanted)));
        let (name, address) = (Arc::clone(&found.name), Arc::clone(&found.address));
        Some(Claim { backend: id, pool, name, address, draining: found.draining, share: wanted })
    }

    /// What the requests need that wait and may use a backend.
    fn waiting_for(&self, id: BackendId, pool: PoolId) -> Share {
        let Some((found, state)) = self.backend(id).zip(self.pools.get(pool.index())) else { return Share::default() };
        let pools = std::iter::once(pool).chain(state.fed_by.iter().copied());
        let waiters = pools.flat_map(|pool| self.pools[pool.index()].queue.ids());
        let requests = waiters.filter_map(|waiter| Some(&self.waiters[waiter as usize].as_ref()?.request));
        let able = requests.filter(|request| self.allows(request, id));
        able.fold(Share::default(), |sum, request| sum.plus(need_of(&request.need, &found.limits)))
    }
}

pub(super) fn need_of(need: &Need, limits: &BackendLimits) -> Share {
    Share {
        slots: need.slots,
        tokens: need.tokens(),
        prefill_tokens: need.prompt_tokens,
        permits: u32::from(limits.is_long(need.prompt_tokens)),
    }
}
