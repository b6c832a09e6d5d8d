//! Takes over a new configuration without interrupting a request.
//!
//! A pool or backend with the same identity (see `spec.rs`) keeps id, counters, health and
//! requests; limits, queue rules and spill lists change in place. A backend that was renamed or
//! moved to another pool is new, but inherits the health and speed of the engine at the same
//! endpoint. A backend that is no longer configured first finishes its requests; then its slot in
//! the table is free.

use std::sync::Arc;

use tokio::time::Instant;

use super::backend::BackendState;
use super::bounds::Bound;
use super::drain_rate::DrainRate;
use super::grant::WaitResult;
use super::health::HealthRules;
use super::owners::Owners;
use super::prefix::PrefixTable;
use super::queue::WaiterId;
use super::room::Rooms;
use super::served::Served;
use super::share::Share;
use super::spec::{BackendSpec, PoolLayout, PoolSpec};
use super::state::{AdmissionState, PoolState, Waiter, Wakers};
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};

impl AdmissionState {
    pub(super) fn apply(
        &mut self,
        specs: &[PoolSpec],
        rules: HealthRules,
        now: Instant,
        wakers: &mut Wakers,
    ) -> PoolLayout {
        self.rules = rules;
        self.layout += 1;
        let pools: Vec<PoolId> = specs.iter().map(|spec| self.place_pool(spec, now)).collect();
        let backends = specs.iter().zip(&pools).map(|(spec, pool)| self.place_backends(spec, *pool, now)).collect();
        let layout = PoolLayout { number: self.layout, pools, backends };
        self.retire(&layout);
        for (index, pool) in layout.pools.iter().enumerate() {
            let feeders = specs.iter().zip(&layout.pools).filter(|(spec, _)| spec.spill.contains(&index));
            let feeders = feeders.map(|(_, id)| *id).collect();
            self.pools[pool.index()].fed_by = feeders;
        }
        self.compare_facts();
        for pool in (0..self.pools.len()).map(PoolId::new) {
            self.reclassify_waiters(pool, wakers);
            self.reconsider_waiters(pool, &Served::Unknown, None, wakers);
        }
        for backend in layout.backends.iter().flatten() {
            self.reconsider(*backend, wakers);
        }
        for pool in &layout.pools {
            self.shed_pinned(*pool, wakers);
        }
        layout
    }

    fn place_pool(&mut self, spec: &PoolSpec, now: Instant) -> PoolId {
        let known = self.pools.iter().position(|pool| pool.name == spec.name);
        if let Some(index) = known {
            let pool = &mut self.pools[index];
            pool.rules = spec.rules.clone();
            pool.removed = false;
            return PoolId::new(index);
        }
        self.pools.push(PoolState {
            name: Arc::clone(&spec.name),
            members: Vec::new(),
            rules: spec.rules.clone(),
            fed_by: Vec::new(),
            queue: Owners::default(),
            reserved: None,
            drain: DrainRate::new(now),
            removed: false,
            rooms: Rooms::default(),
            differ: false,
            prefixes: PrefixTable::default(),
        });
        PoolId::new(self.pools.len() - 1)
    }

    fn place_backends(&mut self, spec: &PoolSpec, pool: PoolId, now: Instant) -> Vec<BackendId> {
        let ids: Vec<BackendId> = spec.backends.iter().map(|backend| self.place_backend(backend, pool, now)).collect();
        for (position, id) in ids.iter().enumerate() {
            if let Some(backend) = self.backend_mut(*id) {
                backend.set_bound(Bound::Configured(spec.rules.limits));
                backend.place.position = position;
                backend.place.weight = spec.backends[position].weight;
                backend.address = Arc::clone(&spec.backends[position].address);
                backend.service.removed = false;
            }
        }
        let found = &mut self.pools[pool.index()];
        (found.members, found.rooms) = (ids.clone(), Rooms::new(ids.len()));
        ids
    }

    fn place_backend(&mut self, spec: &BackendSpec, pool: PoolId, now: Instant) -> BackendId {
        let same =
            |b: &BackendState| b.pool == pool && b.name == spec.name && b.address.endpoint == spec.address.endpoint;
        if let Some(index) = self.backends.iter().position(|slot| slot.as_ref().is_some_and(same)) {
            return BackendId::new(index);
        }
        let limits = self.pools[pool.index()].rules.limits;
        let mut backend = BackendState::new(spec, pool, limits, self.layout, now);
        let engine = self.backends.iter().flatten().filter(|b| b.address.endpoint == spec.address.endpoint);
        if let Some(known) = engine.max_by_key(|b| (!b.service.removed, b.address.rank == spec.address.rank)) {
            backend.inherit(known);
        }
        if self.is_divided {
            backend.set_bound(Bound::Ledger(Share::default()));
        }
        match self.backends.iter().position(Option::is_none) {
            Some(index) => {
                self.backends[index] = Some(backend);
                BackendId::new(index)
            }
            None => {
                self.backends.push(Some(backend));
                BackendId::new(self.backends.len() - 1)
            }
        }
    }

    fn retire(&mut self, layout: &PoolLayout) {
        let kept = |index: usize| layout.backends.iter().flatten().any(|id| id.index() == index);
        let slots = self.backends.iter().enumerate();
        let engines = slots.filter(|(index, _)| kept(*index)).filter_map(|(_, slot)| Some(&slot.as_ref()?.address));
        let engines: Vec<Arc<Address>> = engines.cloned().collect();
        for (index, slot) in self.backends.iter_mut().enumerate() {
            if let Some(backend) = slot.as_mut().filter(|_| !kept(index)) {
                backend.service.removed = true;
                // An engine that is now in the configuration under another name or pool does not
                // leave service.
                if engines.iter().all(|address| address.endpoint != backend.address.endpoint) {
                    backend.service_changed();
                }
                backend.copies.cut();
                if backend.used.requests == 0 {
                    *slot = None;
                }
            }
        }
        for index in 0..self.pools.len() {
            if !layout.pools.contains(&PoolId::new(index)) {
                self.pools[index].removed = true;
                self.pools[index].members.clear();
                self.pools[index].rooms = Rooms::default();
                self.pools[index].fed_by.clear();
            }
        }
    }

    /// Sends waiters back to be classified: all waiters of a removed pool, otherwise waiters whose
    /// requests exceed the new limits even on an empty backend.
    fn reclassify_waiters(&mut self, pool: PoolId, wakers: &mut Wakers) {
        let removed = self.is_removed(pool);
        let ids: Vec<WaiterId> = self.pools[pool.index()].queue.ids().collect();
        for id in ids {
            let waits = |waiter: &&Waiter| removed || self.too_large(&waiter.request).is_some();
            if self.waiters[id as usize].as_ref().is_some_and(|waiter| waits(&waiter)) {
                self.end_wait(id, WaitResult::Reclassify, wakers);
            } else {
                self.sort_into_lane(id);
            }
        }
    }

    /// Moves a waiter to the lane that the new configuration gives the request.
    fn sort_into_lane(&mut self, id: WaiterId) {
        let Some(waiter) = self.waiters[id as usize].as_mut() else { return };
        let pool = &mut self.pools[waiter.request.home.index()];
        let lane = pool.lane_of(&waiter.request);
        if lane != waiter.lane {
            pool.queue.relane(waiter.request.owner(), (waiter.lane, lane), waiter.key, id);
            waiter.lane = lane;
        }
    }
}
