//! Copies of requests for shadow arms of experiments: they use free room, and give it up at once.
//!
//! No request waits, is shed or is placed elsewhere because of a copy: copies do not count in room,
//! queues and drain rates, and views count them separately. In return:
//!
//! - A copy is admitted where the policy places it, if it fits next to all requests and copies
//!   there, and no request waits that may use the backend. An engine on trial (`bounds.rs`) admits
//!   it if no request runs there.
//! - A copy is cut when a request takes the room, when a request that may use the backend has to
//!   wait, and when the backend leaves the rotation.
//!
//! Between backends with equal room, one with copies counts as more loaded, because its engine is.
//! The health and speed that a copy observes are not noted, because the copy's model may be another
//! one.

use std::sync::Arc;

use super::admission::Admission;
use super::capacity::Allocation;
use super::grant::Grant;
use super::lease::Lease;
use super::request::AdmissionRequest;
use super::state::AdmissionState;
use sluice_core::base::{BackendId, PoolId};

impl Admission {
    /// Cuts all copies and admits no more: the gateway stops and waits only for requests.
    pub fn close_to_copies(&self) {
        self.shared.update(|state, _| {
            state.closed_to_copies = true;
            state.backends.iter_mut().flatten().for_each(|backend| backend.copies.cut());
        });
    }

    /// Admits a copy of `request` to a backend of the home pool. When a request needs the room, the
    /// copy is cut: the abort token is cancelled. `None`: the copy is not admitted.
    pub fn enter_copy(&self, request: &AdmissionRequest) -> Option<Lease> {
        let (grant, serial) = self.shared.update(|state, _| state.enter_copy(request))?;
        Some(Lease::of_copy(Arc::clone(&self.shared), grant, serial))
    }
}

impl AdmissionState {
    fn enter_copy(&mut self, request: &AdmissionRequest) -> Option<(Box<Grant>, u64)> {
        let request = &AdmissionRequest { wants: self.wants_of(request), ..request.clone() };
        let home = request.home;
        if self.closed_to_copies || self.is_removed(home) || request.layout != self.layout {
            return None;
        }
        let on_trial = self.on_trial(home, request);
        let backend = on_trial.or_else(|| self.pick(home, request))?;
        let found = self.backend(backend)?;
        let (is_free, limits) = match on_trial {
            // The engine was not tried with requests and copies together.
            Some(_) => (found.used.requests == 0, found.bounds.of_copies()),
            None => (!self.is_waited_for(backend), *found.bounds.in_force()),
        };
        if !is_free || !found.copies.fit(&found.occupied(), &limits, &request.need) {
            return None;
        }
        let cached = self.expect_cached(home, backend, request)?;
        self.grants += 1;
        let serial = self.grants;
        let found = self.backend_mut(backend)?;
        found.cache.write(request.need.tokens() - cached);
        found.load.granted = serial;
        let cut = found.liveness.abort.child_token();
        found.copies.add(serial, request.need, cut.clone());
        if !self.with_copies.contains(&backend) {
            self.with_copies.push(backend);
        }
        let mut grant = self.grant_of(backend, (Allocation::default(), 0.0), request);
        grant.abort = cut;
        Some((grant, serial))
    }

    /// The backend of a pool that is open to this copy but not to requests.
    fn on_trial(&self, pool: PoolId, request: &AdmissionRequest) -> Option<BackendId> {
        let is_on_trial = |id: &BackendId| {
            self.backend(*id).is_some_and(|found| found.bounds.is_for_copies_only() && found.in_rotation())
        };
        self.members(pool).iter().copied().find(|id| is_on_trial(id) && self.allows(request, *id))
    }

    /// Whether a request that may use this backend waits. In most queues the first waiter already
    /// may, so the search is short.
    fn is_waited_for(&self, backend: BackendId) -> bool {
        let Some(pool) = self.backend(backend).and_then(|found| self.pools.get(found.pool.index())) else {
            return false;
        };
        let feeders = pool.fed_by.iter().map(|feeder| &self.pools[feeder.index()]);
        let mut waiting = std::iter::once(pool).chain(feeders).flat_map(|pool| pool.queue.ids());
        waiting.any(|id| self.waiters[id as usize].as_ref().is_some_and(|waiter| self.allows(&waiter.request, backend)))
    }

    /// Cuts the copies on backends that this waiting request may use.
    pub(super) fn cut_copies(&mut self, request: &AdmissionRequest) {
        for backend in std::mem::take(&mut self.with_copies) {
            match self.backend(backend) {
                Some(found) if !found.bounds.is_for_copies_only() && self.allows(request, backend) => {
                    self.cut_copies_on(backend);
                }
                Some(found) if found.copies.len() > 0 => self.with_copies.push(backend),
                _ => {}
            }
        }
    }

    pub(super) fn cut_copies_on(&mut self, backend: BackendId) {
        if self.backend(backend).is_some_and(|found| found.copies.len() > 0)
            && let Some(found) = self.backend_mut(backend)
        {
            found.copies.cut();
        }
    }
}
