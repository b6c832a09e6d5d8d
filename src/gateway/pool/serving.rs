//! How the facts of engines take part in admission; `served.rs` has the facts and the rule.
//!
//! The wants of a request are determined when it enters, and for every waiter when facts change:
//! the request then goes to an engine that serves it now. If the last engine that listed the model
//! drops it, and no other engine may serve it, the request is refused at once. An engine that
//! starts, drains or must be read again counts as serving every model.
//!
//! Bounds: a reading looks once at every waiter of the pools that reach the engine; a refusal of a
//! model or a route looks only at waiters that ask for it.

use smallvec::SmallVec;
use tokio::time::Instant;

use super::admission::Admission;
use super::grant::WaitResult;
use super::lease::Lease;
use super::queue::WaiterId;
use super::request::AdmissionRequest;
use super::served::{Facts, Lack, ModelKey, RouteSet, Served, Wants};
use super::service::Cordon;
use super::state::{AdmissionState, Wakers};
use sluice_core::base::{BackendId, PoolId};

impl Admission {
    /// Takes over the models that an engine lists, by a reading that began at `begun`. If the
    /// engine reports no context limit, the known one is kept.
    ///
    /// While the engine starts or drains, a reading does not replace an earlier one, because LoRA
    /// adapters may not be loaded yet. The engine is read again until it serves.
    pub fn set_served(&self, backend: BackendId, served: Served, max_model_len: Option<u64>, begun: Instant) {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return };
            let before = found.engine.facts.clone();
            let cordon = found.service.cordon();
            found.engine.read(served, max_model_len, begun, cordon);
            state.facts_changed(backend, &before, None, wakers);
        });
    }

    /// Takes over the routes that an engine lists, by a reading that began at `begun`; `None`: the
    /// engine has no such list.
    pub fn set_routes(&self, backend: BackendId, routes: Option<RouteSet>, begun: Instant) {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return };
            let before = found.engine.facts.clone();
            found.engine.read_routes(routes, begun);
            state.facts_changed(backend, &before, None, wakers);
        });
    }

    /// Takes over where the listed models of an engine were loaded from: pairs of name and root.
    pub fn set_roots<'a>(&self, backend: BackendId, roots: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let keys = roots.into_iter().map(|(name, root)| (ModelKey::of(name), ModelKey::of(root)));
        let mut keys: Vec<_> = keys.collect();
        keys.sort_unstable();
        self.shared.change(backend, |found| found.engine.set_roots(keys.into()));
    }

    /// The backends of the same pool whose engine has loaded this name from another root than the
    /// engine of `backend`: they serve another model, or another revision.
    pub fn of_another_root(&self, backend: BackendId, name: ModelKey) -> SmallVec<[BackendId; 2]> {
        let state = self.shared.lock();
        let root = |id: BackendId| state.backend(id).and_then(|found| found.engine.root(name));
        let (Some(pool), Some(first)) = (state.backend(backend).map(|found| found.pool), root(backend)) else {
            return SmallVec::new();
        };
        let differs = |id: &BackendId| root(*id).is_some_and(|root| root != first);
        state.members(pool).iter().copied().filter(differs).collect()
    }

    /// Sets how many LoRA adapters one step of an engine may use (`--max-loras`).
    pub fn set_adapter_slots(&self, backend: BackendId, slots: usize) {
        self.shared.change(backend, |found| found.adapters.set_slots(slots));
    }

    /// Whether an engine of the request's pools would serve it once the engine is there and has
    /// room, according to the facts that engines reported. Engines that are down or idle, and
    /// engines that the request avoids, do not count.
    pub fn may_serve_later(&self, request: &AdmissionRequest) -> bool {
        let state = self.shared.lock();
        let members = request.pools().flat_map(|pool| state.members(pool));
        let mut others = members.filter(|id| !request.avoid.contains(id)).filter_map(|id| state.backend(*id));
        others.any(|found| {
            let is_coming = !matches!(found.service.cordon(), Cordon::Down | Cordon::Idle);
            let fits = found.bounds.configured().exceeded_by(&request.need).is_none();
            found.service.is_wanted() && is_coming && fits && found.engine.facts.would_serve(&request.asks)
        })
    }
}

impl Lease {
    /// The engine has refused the request because of a model, a route, a length or the rank. The
    /// refusal counts until the next reading, which is soon. A refusal of a route counts for some
    /// seconds.
    pub fn refused_by_engine(&self, lack: Lack, now: Instant) {
        self.shared().update(|state, wakers| state.correct(self.backend(), lack, now, wakers));
    }
}

impl AdmissionState {
    fn correct(&mut self, backend: BackendId, lack: Lack, now: Instant, wakers: &mut Wakers) {
        let Some(found) = self.backend_mut(backend) else { return };
        if lack == Lack::Rank {
            found.health.lacks_rank();
        }
        let (before, pool) = (found.engine.facts.clone(), found.pool);
        if !found.engine.refused(lack, now) {
            return;
        }
        if matches!(lack, Lack::Route(_)) {
            for id in self.members(pool).to_vec() {
                self.backend_mut(id).into_iter().for_each(|member| member.engine.routes_due = true);
            }
        }
        self.facts_changed(backend, &before, Some(lack), wakers);
    }

    /// The facts of an engine may have changed from `before`. `lack`: the refusal that changed
    /// them.
    pub(super) fn facts_changed(
        &mut self,
        backend: BackendId,
        before: &Facts,
        lack: Option<Lack>,
        wakers: &mut Wakers,
    ) {
        let Some(found) = self.backend(backend).filter(|found| found.engine.facts != *before) else { return };
        let pool = found.pool;
        self.compare_facts();
        let homes = std::iter::once(pool).chain(self.pools[pool.index()].fed_by.iter().copied());
        let mut changed = false;
        for home in homes.collect::<SmallVec<[PoolId; 4]>>() {
            changed |= self.reconsider_waiters(home, &before.served, lack, wakers);
        }
        // If no waiter's wants have changed, an engine that serves less has no new room for a
        // waiter.
        if !changed && matches!(lack, Some(Lack::Model(_) | Lack::Route(_))) {
            return self.shed_pinned(pool, wakers);
        }
        for index in 0..self.backends.len() {
            self.reconsider(BackendId::new(index), wakers);
        }
    }

    /// Determines the wants of a pool's waiters again; after a refusal of a model or a route, only
    /// of waiters that ask for it. `before`: the models that the engine served before. Returns
    /// whether a waiter has left, or wants have changed.
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
                self.end_wait(id, WaitResult::Unserved, wakers);
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

    /// Whether every engine that a request may use denies the model.
    fn is_unserved(&self, request: &AdmissionRequest) -> bool {
        let mut engines = request.pools().flat_map(|pool| self.members(pool)).filter_map(|id| self.backend(*id));
        request.asks.model.is_some_and(|key| !engines.any(|found| found.engine.may_serve(key, found.service.cordon())))
    }

    /// The wants of a request, given the current state of backends.
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
                Some((&found.engine.facts, open))
            })
        })
    }

    /// Notes for each pool whether the engines that the pool's requests may use have different
    /// facts.
    pub(super) fn compare_facts(&mut self) {
        for home in 0..self.pools.len() {
            let reach = (0..self.pools.len())
                .filter(|pool| *pool == home || self.pools[*pool].fed_by.contains(&PoolId::new(home)));
            let members = reach.flat_map(|pool| self.members(PoolId::new(pool)));
            let facts = members.filter_map(|id| self.backend(*id)).map(|found| &found.engine.facts);
            let mut known = facts.filter(|facts| facts.served != Served::Unknown);
            let first = known.next();
            let differ = first.is_some_and(|first| known.any(|other| !first.same(other)));
            self.pools[home].differ = differ;
        }
    }
}
