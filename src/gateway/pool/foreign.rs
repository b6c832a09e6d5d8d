//! The capacity that other gateways use on the same backends, so that several gateways keep one
//! limit.
//!
//! Each backend has two amounts, both [`Share`]s:
//! - *foreign use*: capacity that other gateways use, or may begin to use at any moment.
//! - *share*, where another gateway divides the limits: the most that this gateway may use.
//!
//! Say B divides the limits and A claims. A claims by lowering its share to the claim before
//! sending it ([`Admission::claim`]). B counts the claim as foreign use, and answers with the part
//! that A may use ([`Admission::concede`]). Then A raises the share to that part
//! ([`Admission::set_shares`]). So both together keep the limits, however late a message is. A
//! claim includes waiters, so that they precede later requests at B. Leases that outgrow their
//! estimate may exceed a share or a limit.

use std::sync::Arc;

use super::admission::Admission;
use super::backend::BackendState;
use super::capacity::{BackendLimits, CapacityUsage, Need};
use super::share::Share;
use super::state::AdmissionState;
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};

/// The capacity that this gateway claims on one backend.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// The backend.
    pub backend: BackendId,
    /// The name of the pool.
    pub pool: Arc<str>,
    /// The name of the backend.
    pub name: Arc<str>,
    /// The address of the backend.
    pub address: Arc<Address>,
    /// Whether an operator has taken the backend out of rotation.
    pub draining: bool,
    /// Usage, needs of waiters, and claims of other gateways here.
    pub share: Share,
}

impl Admission {
    /// Lowers this gateway's share of every backend to the usage and the needs of waiters here, and
    /// returns these claims. The rest may be given to other gateways from now on.
    pub fn claim(&self) -> Vec<Claim> {
        self.shared.update(|state, _| state.claim())
    }

    /// Sets this gateway's shares of backends; `None`: the full limits.
    pub fn set_shares(&self, shares: &[(BackendId, Option<Share>)]) {
        self.shared.update(|state, wakers| {
            for (id, share) in shares {
                let Some(backend) = state.backend_mut(*id) else { continue };
                backend.share = *share;
                state.dispatch(*id, wakers);
            }
        });
    }

    /// Counts another gateway's claim as foreign use. Returns the part that it may use now: as much
    /// as the limits leave next to this gateway's leases. `None`: there is no such backend.
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
    /// The most that this gateway and the foreign use may take: the limits, or this gateway's
    /// share.
    fn most(&self) -> Share {
        let limits = Share::of_limits(&self.limits);
        [self.share, self.ledger].into_iter().flatten().fold(limits, Share::min)
    }

    /// The usage that a new request must count: leases and other gateways.
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

    /// The needs of waiters that may use a backend.
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
