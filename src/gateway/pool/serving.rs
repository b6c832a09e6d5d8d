//! How what engines say of themselves takes part in admission; the facts and the rule are in `served.rs`.
//!
//! What a request wants is determined when it enters, and again for each that waits when the facts of an engine change: it then goes
//! to an engine that serves it now. If the engine was the last one to list the model, and no other engine may serve it, the
//! request is refused at once. An engine that starts, drains or is about to be read again may serve
//! every model.
//!
//! A reading is as old as its beginning: refusals since then still count.
//!
//! Bounds: a reading looks at every waiter of the pools that reach the engine, once; a refusal of a
//! model or a route only at waiters with that model or route. Dispatch follows only where room may
//! have become usable.

use smallvec::SmallVec;
use tokio::time::Instant;

use super::admission::Admission;
use super::backend::Cordon;
use super::capacity::Need;
use super::lease::Lease;
use super::queue::WaiterId;
use super::request::AdmissionRequest;
use super::served::{Asks, Facts, Lack, ModelKey, RouteSet, Served, Wants};
use super::state::{AdmissionState, WaiterState, Wakers};
use sluice_core::base::{BackendId, PoolId};

impl Admission {
    /// Takes over the models that an engine says it serves, by a reading that began at `begun`. A
    /// context limit that the engine does not say is kept.
    ///
    /// A reading while the engine starts or drains replaces nothing: its LoRA adapters may not be
    /// loaded yet. The engine is read again until it serves.
    pub fn set_served(&self, backend: BackendId, served: Served, max_model_len: Option<u64>, begun: Instant) {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return };
            let before = found.facts.clone();
            found.take_reading(served, max_model_len, begun);
            state.facts_changed(backend, &before, None, wakers);
        });
    }

    /// The routes that an engine says it has, by a reading that began at `begun`; `None`: it does
    /// not say.
    pub fn set_routes(&self, backend: BackendId, routes: Option<RouteSet>, begun: Instant) {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return };
            let before = found.facts.clone();
            found.routes_due = found.routes.read(routes, begun);
            found.facts.routes = found.routes.set();
            state.facts_changed(backend, &before, None, wakers);
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

    /// Whether every engine of these pools has a list of models, and none lists this one.
    pub fn is_listed_nowhere(&self, pools: impl IntoIterator<Item = PoolId>, model: ModelKey) -> bool {
        let state = self.shared.lock();
        let members = pools.into_iter().flat_map(|pool| state.members(pool).to_vec());
        let mut engines = members.filter_map(|id| state.backend(id));
        engines.all(|engine| matches!(engine.facts.served, Served::List(_)) && !engine.facts.served.has(model))
    }

    /// Whether an engine of these pools would serve a request as soon as it is there and has room,
    /// as far as engines have said. An engine that is stopped for good, or that the request avoids,
    /// does not count.
    pub fn may_serve_later(
        &self,
        pools: impl IntoIterator<Item = PoolId>,
        need: &Need,
        asks: &Asks,
        avoid: &[BackendId],
    ) -> bool {
        let state = self.shared.lock();
        let members = pools.into_iter().flat_map(|pool| state.members(pool).to_vec());
        let mut others = members.filter(|id| !avoid.contains(id)).filter_map(|id| state.backend(id));
        others.any(|engine| {
            let is_out = engine.draining || engine.removed || matches!(engine.cordon(), Cordon::Down | Cordon::Idle);
            !is_out && engine.configured.exceeded_by(need).is_none() && engine.facts.would_serve(asks)
        })
    }
}

impl Lease {
    /// The engine has refused the request at `now`, for a reason that concerns a model, a route or
    /// a length that it does not serve. The refusal counts until the engine is read again, which is
    /// soon. The refusal of a route counts for some seconds.
    pub fn refused_by_engine(&self, lack: Lack, now: Instant) {
        self.shared().update(|state, wakers| state.correct(self.backend(), lack, now, wakers));
    }
}

impl AdmissionState {
    fn correct(&mut self, backend: BackendId, lack: Lack, now: Instant, wakers: &mut Wakers) {
        let Some(found) = self.backend_mut(backend) else { return };
        let (before, pool) = (found.facts.clone(), found.pool);
        if !found.refused(lack, now) {
            return;
        }
        if matches!(lack, Lack::Route(_)) {
            for id in self.members(pool).to_vec() {
                self.backend_mut(id).into_iter().for_each(|member| member.routes_due = true);
            }
        }
        self.facts_changed(backend, &before, Some(lack), wakers);
    }

    /// The facts of an engine may have changed; `before`: as they were. `lack`: because it has
    /// refused a request.
    pub(super) fn facts_changed(
        &mut self,
        backend: BackendId,
        before: &Facts,
        lack: Option<Lack>,
        wakers: &mut Wakers,
    ) {
        let Some(found) = self.backend(backend).filter(|found| found.facts != *before) else { return };
        let pool = found.pool;
        self.compare_facts();
        let homes = std::iter::once(pool).chain(self.pools[pool.index()].fed_by.iter().copied());
        let mut changed = false;
        for home in homes.collect::<SmallVec<[PoolId; 4]>>() {
            changed |= self.reconsider_waiters(home, &before.served, lack, wakers);
        }
        // Where no waiter wants less than before, an engine that serves less has no room that a
        // waiter may use now.
        if !changed && matches!(lack, Some(Lack::Model(_) | Lack::Route(_))) {
            return self.shed_pinned(pool, wakers);
        }
        for index in 0..self.backends.len() {
            self.reconsider(BackendId::new(index), wakers);
        }
    }

    /// Determines the wants of the waiters of a pool anew; after a refusal of a model or a route,
    /// only of the waiters with that model or route. `before`: the models that the engine served
    /// before its facts changed. Returns whether a waiter has left, or wants something else.
    pub(super) fn reconsider_waiters(
        &mut self,
        home: PoolId,
        before: &Served,
        lack: Option<Lack>,
        wakers: &mut Wakers,
    ) -> bool {
        let request = |id: WaiterId| self.waiters[id as usize].as_ref().map(|waiter| &waiter.request);
        let concerned = |id: &WaiterId| request(*id).is_some_and(|request| request.asks.concerns(lack));
        let ids: Vec<WaiterId> = self.pools[home.index()].queue.ids().filter(concerned).collect();
        let mut changed = false;
        for id in ids {
            let Some(request) = self.waiters[id as usize].as_ref().map(|waiter| &waiter.request) else { continue };
            let was_listed = request.asks.model.is_some_and(|key| before.lists(key));
            if was_listed && request.only.is_none() && self.is_unserved(request) {
                self.end_wait(id, WaiterState::Unserved, wakers);
                changed = true;
                continue;
            }
            let wants = self.wants_of(request);
            if let Some(waiter) = self.waiters[id as usize].as_mut() {
                changed |= std::mem::replace(&mut waiter.request.wants, wants) != wants;
            }
        }
        changed
    }

    /// Whether every engine that a request may use says that it does not serve the model.
    fn is_unserved(&self, request: &AdmissionRequest) -> bool {
        let mut engines = request.pools().flat_map(|pool| self.members(pool)).filter_map(|id| self.backend(*id));
        request.asks.model.is_some_and(|key| !engines.any(|engine| engine.may_serve(key)))
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
