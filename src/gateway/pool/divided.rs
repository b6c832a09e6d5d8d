//! Limits that a ledger divides among several gateways.
//!
//! After [`Admission::divide`], a backend gets requests only within this gateway's share of it,
//! which is one more bound of `bounds.rs`. Shares may end ([`ShareEnd`]). The end is checked before
//! every change of the state, so a process that was suspended admits nothing by old shares.
//!
//! `foreign.rs` is the other protocol, for the hand-over of one gateway to its successor on the
//! same host, which must work without a store. Bound: [`WAITERS`] waiters of a pool are looked at.

use std::sync::Arc;

use super::admission::Admission;
use super::bounds::Bound;
use super::capacity::BackendLimits;
use super::foreign::need_of;
pub use super::settled::TICK;
use super::share::Share;
pub use super::share::ShareEnd;
use super::state::AdmissionState;
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};

/// The most waiters of one pool whose needs are added up. More would want more than a backend has
/// anyway.
const WAITERS: usize = 512;

/// This gateway's usage and wants on one backend.
#[derive(Clone, Debug)]
pub struct BackendUse {
    /// The name of the pool.
    pub pool: Arc<str>,
    /// The name of the backend.
    pub name: Arc<str>,
    /// The address of the backend.
    pub address: Arc<Address>,
    /// No longer configured.
    pub removed: bool,
    /// The configured limits.
    pub limits: BackendLimits,
    /// The usage by requests of this gateway and of a gateway that hands over to it.
    pub used: Share,
    /// The backend's part of the needs of waiters.
    pub waiting: Share,
    /// The most that one waiter needs, unit by unit.
    pub need: Share,
    /// The fewest sequences that the engine surely had since the last call of [`Admission::uses`].
    pub settled: u32,
}

impl Admission {
    /// From now on, no backend gets requests beyond this gateway's share.
    pub fn divide(&self) {
        self.shared.update(|state, _| {
            state.is_divided = true;
            state.withdraw_shares();
        });
    }

    /// Whether a ledger divides the limits.
    pub fn is_divided(&self) -> bool {
        self.shared.lock().is_divided
    }

    /// This gateway's usage and wants on every backend.
    pub fn uses(&self) -> Vec<BackendUse> {
        self.shared.update(|state, _| state.uses())
    }

    /// Sets the share of every backend until `end`. `share` gets the names of pool and backend, the
    /// configured limits and the usage. Usage will not exceed the larger of current usage and
    /// share.
    pub fn set_ledger_shares(
        &self,
        end: Option<ShareEnd>,
        mut share: impl FnMut(&str, &str, &BackendLimits, Share) -> Share,
    ) {
        self.shared.update(|state, wakers| {
            state.shares_end = end;
            for id in (0..state.backends.len()).map(BackendId::new) {
                let Some(found) = state.backend(id) else { continue };
                let (pool, bounds) = (&state.pools[found.pool.index()].name, &found.bounds);
                let share = share(pool, &found.name, bounds.configured(), bounds.in_use(&found.used));
                state.set_bound(id, Bound::Ledger(share), wakers);
            }
            // The shares may have ended before they arrived.
            state.end_shares();
        });
    }

    /// Sets which backends another gateway has closed to drain or start their engines. `is_closed`
    /// gets the names of pool and backend.
    pub fn set_closed(&self, mut is_closed: impl FnMut(&str, &str) -> bool) {
        self.shared.update(|state, wakers| {
            for id in (0..state.backends.len()).map(BackendId::new) {
                let Some(found) = state.backend(id) else { continue };
                let closed = is_closed(&state.pools[found.pool.index()].name, &found.name);
                if found.service.closed == closed {
                    continue;
                }
                if let Some(found) = state.backend_mut(id) {
                    found.service.closed = closed;
                    found.service_changed();
                    state.reconsider(id, wakers);
                }
            }
        });
    }

    /// The caller calls this every [`TICK`]. Returns whether any request waits.
    pub fn tick(&self) -> bool {
        self.shared.update(|state, _| {
            state
                .backends
                .iter_mut()
                .flatten()
                .for_each(|found| found.settled.tick(found.liveness.progress.at_client()));
            state.pools.iter().any(|pool| !pool.queue.is_empty())
        })
    }
}

impl AdmissionState {
    /// Sets all shares to 0 if their end has come.
    pub(super) fn end_shares(&mut self) {
        if self.shares_end.is_none_or(|end| (end.clock)() < end.at) {
            return;
        }
        self.shares_end = None;
        self.withdraw_shares();
    }

    fn withdraw_shares(&mut self) {
        for index in 0..self.backends.len() {
            if let Some(found) = self.backend_mut(BackendId::new(index)) {
                found.set_bound(Bound::Ledger(Share::default()));
            }
        }
    }

    fn uses(&mut self) -> Vec<BackendUse> {
        let waiting: Vec<(Share, Share)> =
            (0..self.pools.len()).map(|pool| self.waiting_in(PoolId::new(pool))).collect();
        let Self { pools, backends, .. } = self;
        let uses = backends.iter_mut().flatten().map(|found| {
            let (waiting, need) = if found.service.removed { Default::default() } else { waiting[found.pool.index()] };
            BackendUse {
                pool: Arc::clone(&pools[found.pool.index()].name),
                name: Arc::clone(&found.name),
                address: Arc::clone(&found.address),
                removed: found.service.removed,
                limits: *found.bounds.configured(),
                used: found.bounds.in_use(&found.used),
                waiting,
                need,
                settled: found.settled.look(found.liveness.progress.at_client()),
            }
        });
        uses.collect()
    }

    /// Two shares. The first is the needs of a pool's waiters, divided evenly among the backends in
    /// rotation, but at least the second. The second is the most that one waiter needs.
    fn waiting_in(&self, pool: PoolId) -> (Share, Share) {
        let state = &self.pools[pool.index()];
        let pools = std::iter::once(pool).chain(state.fed_by.iter().copied());
        let waiters = pools.flat_map(|pool| self.pools[pool.index()].queue.ids()).take(WAITERS);
        let requests = waiters.filter_map(|waiter| Some(&self.waiters[waiter as usize].as_ref()?.request));
        let (mut sum, mut most) = (Share::default(), Share::default());
        for request in requests {
            let need = need_of(&request.need, &state.rules.limits);
            (sum, most) = (sum.plus(need), most.max(need));
        }
        let in_rotation = |id: &&BackendId| self.backend(**id).is_some_and(|found| found.in_rotation());
        let backends = state.members.iter().filter(in_rotation).count().max(1);
        (sum.divided_by(backends as u32).max(most), most)
    }
}
