//! What a configuration asks of admission, and how a reload is taken over without dropping anyone.
//!
//! Identity: a pool is its name; a backend is its pool, its name and its endpoint. Whatever keeps its
//! identity keeps its id, its counters, its health and what it carries; only limits, queue rules and
//! spill lists change, in place. A backend that is new but whose endpoint is known, because it moved to another pool or was
//! renamed, is as healthy and as fast as it was: its engine does not notice what we call it. A backend that is no longer configured finishes what it carries and
//! then its place is free for a new one. A pool that is no longer configured sends its waiters back
//! to be classified by the new configuration.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::admission::Wakers;
use super::backend::BackendState;
use super::capacity::BackendLimits;
use super::drain_rate::DrainRate;
use super::health::HealthRules;
use super::queue::{QueueOrder, WaitQueue};
use super::state::{AdmissionState, PoolState};
use crate::config::{Endpoint, Policy, Secret};
use sluice_core::base::{BackendId, PoolId};

/// The rules of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRules {
    /// How a backend is picked.
    pub policy: Policy,
    /// BackendLimits of each of its backends.
    pub limits: BackendLimits,
    /// Waiters at most.
    pub queue_length: usize,
    /// The longest wait, counted from the request's arrival.
    pub queue_timeout: Duration,
    /// The order of waiters.
    pub order: QueueOrder,
}

/// One backend as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSpec {
    /// Its name, unique in the pool.
    pub name: Arc<str>,
    /// Where it is reached; its endpoint is part of the backend's identity.
    pub address: Arc<Address>,
    /// Share of new work relative to the other backends of the pool, above 0.
    pub weight: f64,
}

/// Where a backend is reached, in the form the path of a request needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Address {
    /// Host, port and path prefix.
    pub endpoint: Endpoint,
    /// `host:port`, as it goes into a `Host` header.
    pub authority: Arc<str>,
    /// Sent upstream as a bearer token, instead of what the client sent.
    pub api_key: Option<Secret>,
}

/// One pool as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSpec {
    /// Its name.
    pub name: Arc<str>,
    /// Its rules.
    pub rules: PoolRules,
    /// Its backends.
    pub backends: Vec<BackendSpec>,
    /// Positions (in the list of specs) of the pools that its requests may spill to.
    pub spill: Vec<usize>,
}

/// The ids given to a configuration, position by position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolLayout {
    /// Which one it is: grows with every configuration taken over.
    pub number: u64,
    /// One per pool.
    pub pools: Vec<PoolId>,
    /// One list per pool.
    pub backends: Vec<Vec<BackendId>>,
}

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
        self.retire(&layout, wakers);
        for (index, pool) in layout.pools.iter().enumerate() {
            let feeders = specs.iter().zip(&layout.pools).filter(|(spec, _)| spec.spill.contains(&index));
            let feeders = feeders.map(|(_, id)| *id).collect();
            self.pools[pool.index()].fed_by = feeders;
        }
        for backend in layout.backends.iter().flatten() {
            self.dispatch(*backend, wakers);
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
            queue: WaitQueue::default(),
            drain: DrainRate::new(now),
            removed: false,
        });
        PoolId::new(self.pools.len() - 1)
    }

    fn place_backends(&mut self, spec: &PoolSpec, pool: PoolId, now: Instant) -> Vec<BackendId> {
        let ids: Vec<BackendId> = spec.backends.iter().map(|backend| self.place_backend(backend, pool, now)).collect();
        for (position, id) in ids.iter().enumerate() {
            if let Some(backend) = self.backend_mut(*id) {
                backend.set_limits(spec.rules.limits);
                backend.position = position;
                backend.weight = spec.backends[position].weight;
                backend.address = Arc::clone(&spec.backends[position].address);
                backend.removed = false;
            }
        }
        self.pools[pool.index()].members = ids.clone();
        ids
    }

    fn place_backend(&mut self, spec: &BackendSpec, pool: PoolId, now: Instant) -> BackendId {
        let same =
            |b: &BackendState| b.pool == pool && b.name == spec.name && b.address.endpoint == spec.address.endpoint;
        if let Some(index) = self.backends.iter().position(|slot| slot.as_ref().is_some_and(same)) {
            return BackendId::new(index);
        }
        let mut backend = BackendState::new(spec, pool, now);
        let engine = self.backends.iter().flatten().filter(|b| b.address.endpoint == spec.address.endpoint);
        if let Some(known) = engine.max_by_key(|b| !b.removed) {
            backend.take_after(known);
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

    fn retire(&mut self, layout: &PoolLayout, wakers: &mut Wakers) {
        for (index, slot) in self.backends.iter_mut().enumerate() {
            let kept = layout.backends.iter().flatten().any(|id| id.index() == index);
            if let Some(backend) = slot.as_mut().filter(|_| !kept) {
                backend.removed = true;
                if backend.used.requests == 0 {
                    *slot = None;
                }
            }
        }
        for index in 0..self.pools.len() {
            if !layout.pools.contains(&PoolId::new(index)) {
                self.pools[index].removed = true;
                self.pools[index].members.clear();
                self.pools[index].fed_by.clear();
                self.turn_away(PoolId::new(index), wakers);
            }
        }
    }
}
