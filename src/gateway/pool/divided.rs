//! Limits that are divided among several gateways by a ledger: what this gateway uses and wants of each backend, and what it may use.
//!
//! From [`Admission::divide`] on, a backend gets requests only within its share. A share is one more bound beside the limits, the
//! ceiling of a ramp and what other gateways use (`foreign.rs`): the smallest of each unit is in force, and none of them is ever
//! raised by another. A share of 0 admits nothing, and what waits for it waits: whether a request could be served at all is decided
//! by the configured limits alone.
//!
//! Shares may have an end ([`ShareEnd`]). It is checked whenever capacity may be granted, so that a process that was stopped and
//! runs again admits nothing by old shares, whichever of its threads runs first.
//!
//! Bounds: [`WAITERS`] requests of a pool are looked at.

use std::sync::Arc;

use super::admission::Admission;
use super::capacity::BackendLimits;
use super::foreign::need_of;
pub use super::settled::TICK;
use super::share::Share;
pub use super::share::ShareEnd;
use super::spec::Address;
use super::state::AdmissionState;
use sluice_core::base::{BackendId, PoolId};

/// Requests that wait in one pool of which the needs are added up; more of them want more than a backend has anyway.
const WAITERS: usize = 512;

/// What this gateway uses and wants of one backend.
#[derive(Clone, Debug)]
pub struct BackendUse {
    /// The name of its pool.
    pub pool: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Where it is reached.
    pub address: Arc<Address>,
    /// No longer configured.
    pub removed: bool,
    /// Its configured limits.
    pub limits: BackendLimits,
    /// In use, by requests of this gateway and of one that hands over to it.
    pub used: Share,
    /// Its part of what waits.
    pub waiting: Share,
    /// The most that one waiting request needs, unit by unit.
    pub need: Share,
    /// The fewest sequences since the last look that the engine had for sure.
    pub settled: u32,
}

impl Admission {
    /// From now on no backend gets requests beyond its share.
    pub fn divide(&self) {
        self.shared.update(|state, _| {
            state.is_divided = true;
            state.backends.iter_mut().flatten().for_each(|backend| backend.ledger = Some(Share::default()));
            state.note_all_changed();
        });
    }

    /// Whether the limits are divided by a ledger.
    pub fn is_divided(&self) -> bool {
        self.shared.lock().is_divided
    }

    /// What this gateway uses and wants of every backend.
    pub fn uses(&self) -> Vec<BackendUse> {
        self.shared.update(|state, _| state.uses())
    }

    /// Sets the share of every backend until `end`. `share` gets the names of its pool and its own, its configured limits, and what is
    /// in use: nothing more will be than that or the share, whichever is larger.
    pub fn set_ledger_shares(
        &self,
        end: Option<ShareEnd>,
        mut share: impl FnMut(&str, &str, &BackendLimits, Share) -> Share,
    ) {
        self.shared.update(|state, wakers| {
            state.shares_end = end;
            for id in (0..state.backends.len()).map(BackendId::new) {
                let Some(pool) = state.backend(id).map(|found| Arc::clone(&state.pools[found.pool.index()].name))
                else {
                    continue;
                };
                let Some(found) = state.backend_mut(id) else { continue };
                let used = Share::of(&found.used).plus(found.foreign);
                let (before, now) = (found.ledger, Some(share(&pool, &found.name, &found.configured, used)));
                found.ledger = now;
                if before != now {
                    state.dispatch(id, wakers);
                }
            }
            // The shares may have ended while they were on their way.
            state.end_shares();
        });
    }

    /// Sets which backends another gateway has closed, because it drains or starts their engines. `is_closed` gets the names of pool
    /// and backend.
    pub fn set_closed(&self, mut is_closed: impl FnMut(&str, &str) -> bool) {
        self.shared.update(|state, wakers| {
            for id in (0..state.backends.len()).map(BackendId::new) {
                let Some(found) = state.backend(id) else { continue };
                let closed = is_closed(&state.pools[found.pool.index()].name, &found.name);
                if found.closed == closed {
                    continue;
                }
                if let Some(found) = state.backend_mut(id) {
                    found.closed = closed;
                    state.reconsider(id, wakers);
                }
            }
        });
    }

    /// [`TICK`] has passed. Returns whether any request waits.
    pub fn tick(&self) -> bool {
        self.shared.update(|state, _| {
            state.backends.iter_mut().flatten().for_each(|found| found.settled.tick(found.progress.at_client()));
            state.pools.iter().any(|pool| !pool.queue.is_empty())
        })
    }
}

impl AdmissionState {
    fn note_all_changed(&mut self) {
        for index in 0..self.backends.len() {
            let _ = self.backend_mut(BackendId::new(index));
        }
    }

    /// Takes all shares if their end has come.
    pub(super) fn end_shares(&mut self) {
        if self.shares_end.is_none_or(|end| (end.clock)() < end.at) {
            return;
        }
        self.shares_end = None;
        for index in 0..self.backends.len() {
            if let Some(found) = self.backend_mut(BackendId::new(index)) {
                found.ledger = Some(Share::default());
            }
        }
    }

    fn uses(&mut self) -> Vec<BackendUse> {
        let waiting: Vec<(Share, Share)> =
            (0..self.pools.len()).map(|pool| self.waiting_in(PoolId::new(pool))).collect();
        let Self { pools, backends, .. } = self;
        let uses = backends.iter_mut().flatten().map(|found| {
            let (waiting, need) = if found.removed { Default::default() } else { waiting[found.pool.index()] };
            BackendUse {
                pool: Arc::clone(&pools[found.pool.index()].name),
                name: Arc::clone(&found.name),
                address: Arc::clone(&found.address),
                removed: found.removed,
                limits: found.configured,
                used: Share::of(&found.used).plus(found.foreign),
                waiting,
                need,
                settled: found.settled.look(found.progress.at_client()),
            }
        });
        uses.collect()
    }

    /// What waits for each backend of a pool, and the most that one request needs. What may go to any of them is divided evenly.
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
