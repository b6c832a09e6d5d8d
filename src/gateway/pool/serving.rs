//! How what engines say of themselves takes part in admission; the facts and the rule are in `served.rs`.
//!
//! What a request wants is determined when it enters, and again for each that waits when the facts of an engine change: it then goes
//! to an engine that serves it now. If the engine was the last one to list the model, and no other engine may serve it, the
//! request is refused at once.
//!
//! Bounds: a change of facts looks at every waiter of the pools that reach the engine, once.

use smallvec::SmallVec;

use super::admission::Admission;
use super::lease::Lease;
use super::queue::WaiterId;
use super::request::AdmissionRequest;
use super::served::{Facts, Lack, RouteSet, Served, Wants};
use super::state::{AdmissionState, WaiterState, Wakers};
use sluice_core::base::{BackendId, PoolId};

impl Admission {
    /// What an engine says that it serves; a context limit that it does not say is kept.
    pub fn set_served(&self, backend: BackendId, served: Served, max_model_len: Option<u64>) {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return };
            found.facts_due = false;
            let max_model_len = max_model_len.or(found.facts.max_model_len);
            let facts = Facts { served, max_model_len, routes: found.facts.routes };
            state.replace_facts(backend, facts, wakers);
        });
    }

    /// The routes that an engine says it has.
    pub fn set_routes(&self, backend: BackendId, routes: RouteSet) {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend(backend) else { return };
            let facts = Facts { routes, ..found.facts.clone() };
            state.replace_facts(backend, facts, wakers);
        });
    }

    /// How many LoRA adapters one step of an engine may use (`--max-loras`).
    pub fn set_adapter_slots(&self, backend: BackendId, slots: usize) {
        self.shared.update(|state, _| {
            if let Some(found) = state.backend_mut(backend) {
                found.adapters.set_slots(slots);
            }
        });
    }
}

impl Lease {
    /// The engine has refused the request for a reason that says what it does not serve: counts until its next reading, which
    /// comes soon.
    pub fn refused_by_engine(&self, lack: Lack) {
        self.shared().update(|state, wakers| state.correct(self.backend(), lack, wakers));
    }
}

impl AdmissionState {
    fn correct(&mut self, backend: BackendId, lack: Lack, wakers: &mut Wakers) {
        let Some(found) = self.backend_mut(backend) else { return };
        let mut facts = found.facts.clone();
        // Of an engine without a list nothing more is learned by asking again at once.
        found.facts_due |= !matches!((lack, &facts.served), (Lack::Route(_), _) | (_, Served::Unreadable { .. }));
        let pool = found.pool;
        if let Some(pool) = self.pools.get_mut(pool.index()) {
            pool.routes_due |= matches!(lack, Lack::Route(_));
        }
        if facts.correct(lack) {
            self.replace_facts(backend, facts, wakers);
        }
    }

    fn replace_facts(&mut self, backend: BackendId, facts: Facts, wakers: &mut Wakers) {
        let Some(found) = self.backend_mut(backend) else { return };
        let before = std::mem::replace(&mut found.facts, facts);
        if found.facts == before {
            return;
        }
        let pool = found.pool;
        self.compare_facts();
        let homes = std::iter::once(pool).chain(self.pools[pool.index()].fed_by.iter().copied());
        for home in homes.collect::<SmallVec<[PoolId; 4]>>() {
            self.reconsider_waiters(home, &before.served, wakers);
        }
        for index in 0..self.backends.len() {
            self.reconsider(BackendId::new(index), wakers);
        }
    }

    /// Determines anew what the waiters of a pool want. `before`: what the engine served whose facts have changed.
    pub(super) fn reconsider_waiters(&mut self, home: PoolId, before: &Served, wakers: &mut Wakers) {
        let ids: Vec<WaiterId> = self.pools[home.index()].queue.ids().collect();
        for id in ids {
            let Some(request) = self.waiters[id as usize].as_ref().map(|waiter| &waiter.request) else { continue };
            let was_listed = request.asks.model.is_some_and(|key| before.lists(key));
            if was_listed && request.only.is_none() && self.is_unserved(request) {
                self.end_wait(id, WaiterState::Unserved, wakers);
                continue;
            }
            let wants = self.wants_of(request);
            if let Some(waiter) = self.waiters[id as usize].as_mut() {
                waiter.request.wants = wants;
            }
        }
    }

    /// Whether every engine that a request may use says that it does not serve the model.
    fn is_unserved(&self, request: &AdmissionRequest) -> bool {
        let mut engines = request.pools().flat_map(|pool| self.members(pool)).filter_map(|id| self.backend(*id));
        request.asks.model.is_some_and(|key| !engines.any(|engine| engine.facts.served.has(key)))
    }

    /// What a request wants of its backends as they are.
    pub(super) fn wants_of(&self, request: &AdmissionRequest) -> Wants {
        let differ = self.pools.get(request.home.index()).is_some_and(|pool| pool.differ);
        if request.only.is_some() || !(differ || request.asks.was_refused()) {
            return Wants::default();
        }
        Wants::of(&request.asks, move || {
            let members = request.pools().flat_map(move |pool| self.members(pool));
            members.filter_map(move |id| {
                let found = self.backend(*id)?;
                let open = found.could_serve(&request.need) && !request.avoid.contains(id);
                Some((&found.facts, open))
            })
        })
    }

    /// Notes for each pool whether the engines that its requests may use differ.
    pub(super) fn compare_facts(&mut self) {
        for home in 0..self.pools.len() {
            let reach = (0..self.pools.len())
                .filter(|pool| *pool == home || self.pools[*pool].fed_by.contains(&PoolId::new(home)));
            let members = reach.flat_map(|pool| self.members(PoolId::new(pool)));
            let facts = members.filter_map(|id| self.backend(*id)).map(|found| &found.facts);
            let mut known = facts.filter(|facts| facts.served != Served::Unknown);
            let first = known.next();
            let differ = first.is_some_and(|first| known.any(|other| !first.same(other)));
            self.pools[home].differ = differ;
        }
    }
}
