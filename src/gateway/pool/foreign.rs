//! The capacity that other gateways use on the same backends, so that several gateways keep one
//! limit.
//!
//! Say B divides the limits and A claims, as in an upgrade from A to B. A lowers its share to the
//! claim and sends it ([`Admission::claim`]). B counts the claim as foreign use and answers with
//! the part that A may use ([`Admission::concede`]). A raises its share to that part. So both keep
//! the limits, however late a message is. A claim includes the needs of waiters at A, so that they
//! precede later requests at B. Leases that outgrow their estimate may exceed a share or a limit.
//!
//! `divided.rs` is the other protocol. There are two because an upgrade must not depend on a store:
//! two processes of one host talk over a socket, while a ledger has many gateways and needs clocks.

use std::sync::Arc;

use super::admission::Admission;
use super::bounds::Bound;
use super::capacity::{BackendLimits, Need};
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

    /// Counts another gateway's claim as foreign use. Returns the part that the other gateway may
    /// use now: as much as the limits leave next to this gateway's leases. `None`: there is no such
    /// backend.
    pub fn concede(&self, backend: BackendId, claim: Share) -> Option<Share> {
        self.shared.update(|state, wakers| {
            let found = state.backend(backend)?;
            let conceded = claim.min(found.bounds.left(&found.used));
            state.set_bound(backend, Bound::Foreign(claim), wakers);
            Some(conceded)
        })
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
        let wanted = found.bounds.wanted(&found.used, waiting);
        found.bounds.claim(wanted);
        let (name, address) = (Arc::clone(&found.name), Arc::clone(&found.address));
        Some(Claim { backend: id, pool, name, address, draining: found.service.draining, share: wanted })
    }

    /// The needs of waiters that may use a backend.
    fn waiting_for(&self, id: BackendId, pool: PoolId) -> Share {
        let Some((found, state)) = self.backend(id).zip(self.pools.get(pool.index())) else { return Share::default() };
        let pools = std::iter::once(pool).chain(state.fed_by.iter().copied());
        let waiters = pools.flat_map(|pool| self.pools[pool.index()].queue.ids());
        let requests = waiters.filter_map(|waiter| Some(&self.waiters[waiter as usize].as_ref()?.request));
        let able = requests.filter(|request| self.allows(request, id));
        able.fold(Share::default(), |sum, request| sum.plus(need_of(&request.need, found.bounds.in_force())))
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
