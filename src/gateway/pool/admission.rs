//! Decides whether there is room, which backend takes a request, and which waiter is next.
//!
//! One lock guards all pools, queues and capacity, so a spill between pools is one decision, and
//! freed capacity goes to the next waiter at once. A request takes the lock three times, for about
//! a microsecond each.
//!
//! Pools are tried home first, then by the spill list (`choice.rs`); a waiter takes the first
//! usable backend with room. On one backend, requests of the backend's pool precede spilled ones up
//! to the overtaking limit (`dispatch.rs`). Room is kept from a waiter only by a reservation
//! (`reservation.rs`), or because the waiter's owner has used up a prefill share
//! (`share_of_prefill.rs`).
//!
//! Bounds: the configured length of each queue. Admission reads no clock and does no I/O. Wakers
//! run outside the lock.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::backend::BackendState;
use super::bounds::Bound;
use super::decoding::DecodeSums;
use super::engine_work::EngineCounters;
use super::grant::AdmissionDecision;
#[cfg(test)]
use super::health::BackendFault;
use super::health::{HealthRules, Phase, RefusedGateway};
use super::lease::{Lease, Ticket};
use super::request::AdmissionRequest;
use super::service::{Cordon, Service};
use super::shared::SharedState;
use super::spec::{PoolLayout, PoolSpec};
use super::state::AdmissionState;
use super::view::{PoolView, WaitingRequest};
use crate::origin::Origin;
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::ShedReason;

thread_local! {
    /// Set while this thread runs the `publish` of [`Admission::apply_with`].
    static APPLYING: Cell<bool> = const { Cell::new(false) };
}

/// Owns all capacity and all queues.
#[derive(Debug)]
pub struct Admission {
    pub(super) shared: Arc<SharedState>,
}

impl Admission {
    /// An admission without pools. `seed` fixes the random choices of the policies.
    pub fn new(now: Instant, rules: HealthRules, seed: u64) -> Arc<Self> {
        let state = AdmissionState::new(now, rules, seed);
        Arc::new(Self { shared: Arc::new(SharedState::new(state)) })
    }

    /// Takes over a configuration: adds pools and backends, changes limits in place, and drains
    /// pools and backends that are gone. Requests stay, except that waiters of a removed pool, and
    /// waiters whose requests exceed the new limits, are reclassified.
    pub fn apply(&self, pools: &[PoolSpec], rules: HealthRules, now: Instant) -> PoolLayout {
        self.apply_with(pools, rules, now, |_| ())
    }

    /// Like [`Admission::apply`], and calls `publish` under the lock, before any request sees that
    /// old ids are gone. `publish` replaces the routing table: otherwise a reclassified request
    /// could find the old table again. `publish` must not do work that grows with the
    /// configuration.
    pub fn apply_with(
        &self,
        pools: &[PoolSpec],
        rules: HealthRules,
        now: Instant,
        publish: impl FnOnce(&PoolLayout),
    ) -> PoolLayout {
        self.shared.update(|state, wakers| {
            let layout = state.apply(pools, rules, now, wakers);
            APPLYING.set(true);
            publish(&layout);
            APPLYING.set(false);
            layout
        })
    }

    /// Whether this thread is publishing a configuration; every request waits meanwhile.
    pub fn is_applying() -> bool {
        APPLYING.get()
    }

    /// Requests a lease.
    pub fn enter(&self, request: AdmissionRequest) -> AdmissionDecision<Lease, Ticket> {
        match self.shared.update(|state, wakers| state.enter(request, wakers)) {
            AdmissionDecision::Granted(grant) => {
                AdmissionDecision::Granted(Lease::new(Arc::clone(&self.shared), grant))
            }
            AdmissionDecision::Queued(id, deadline) => {
                AdmissionDecision::Queued(Ticket::new(Arc::clone(&self.shared), id), deadline)
            }
            AdmissionDecision::Refused(limit) => AdmissionDecision::Refused(limit),
            AdmissionDecision::Shed(reason) => AdmissionDecision::Shed(reason),
            AdmissionDecision::Reclassify => AdmissionDecision::Reclassify,
        }
    }

    /// Requests a lease without waiting. `None`: the request would have to wait, or no backend may
    /// serve it.
    pub fn try_enter(&self, request: AdmissionRequest) -> Option<Lease> {
        let grant = self.shared.update(|state, wakers| state.try_enter(request, wakers))?;
        Some(Lease::new(Arc::clone(&self.shared), grant))
    }

    /// The time after which a client should try again, 1 s to 60 s. If no engine of the pool is in
    /// rotation and a start is foreseen, it is the time until the first engine is ready. Otherwise
    /// it is the time in which the queue drains at the measured rate, in whole seconds.
    pub fn retry_after(&self, pool: PoolId, now: Instant) -> Duration {
        self.shared.lock().retry_after(pool, now)
    }

    /// Records a health probe. Returns the change of phase, if any.
    pub fn record_probe(&self, backend: BackendId, up: bool, now: Instant) -> Option<(Phase, Phase)> {
        self.shared.update(|state, wakers| state.record_probe(backend, up, now, wakers))
    }

    /// Whether an id still refers to the backend with this name and endpoint. Ids are reused, so a
    /// response that was awaited outside the lock may concern a backend that is gone.
    pub fn is_same_backend(&self, backend: BackendId, name: &str, address: &Address) -> bool {
        let state = self.shared.lock();
        state.backend(backend).is_some_and(|b| *b.name == *name && b.address.endpoint == address.endpoint)
    }

    /// Notes that the engine refuses the gateway's credentials. Ejects the backend, unless no other
    /// backend of the pool is ready. Returns whether the refusal is new.
    pub fn refused_gateway(&self, backend: BackendId, refused: RefusedGateway, now: Instant) -> bool {
        self.shared.refused_gateway(backend, refused, Origin::default(), now)
    }

    /// Changes a backend and the other ranks of the same server, if the backend is known. Waiters
    /// then get the room there, or leave if no backend can serve them any more.
    fn change_service(&self, backend: BackendId, change: impl Fn(&mut Service)) {
        self.shared.update(|state, wakers| {
            for rank in state.ranks_of(backend) {
                if let Some(found) = state.backend_mut(rank) {
                    change(&mut found.service);
                    found.service_changed();
                    state.reconsider(rank, wakers);
                }
            }
        });
    }

    /// Changes a backend and the other ranks of the same server, in a way that gives no waiter
    /// room.
    fn change_server(&self, backend: BackendId, change: impl Fn(&mut BackendState)) {
        let mut state = self.shared.lock();
        for rank in state.ranks_of(backend) {
            state.backend_mut(rank).into_iter().for_each(&change);
        }
    }

    /// The engine accepted the credentials of a probe.
    pub fn accepted_probe(&self, backend: BackendId) {
        self.shared.change(backend, |found| found.health.accepted_probe());
    }

    /// Sets the size of the engine's prefix cache in tokens: the size of the KV cache or of a
    /// larger tier in host memory, or 0 if prefix caching is off.
    pub fn set_cache_size(&self, backend: BackendId, tokens: u64) {
        self.shared.change(backend, |found| found.cache.set_size(tokens));
    }

    /// The ranks of the server at `address` that configured backends have, in ascending order.
    pub fn ranks_at(&self, address: &Address) -> Vec<u16> {
        let state = self.shared.lock();
        let same = state.backends.iter().flatten().filter(|own| own.address.is_same_server(address));
        let mut ranks: Vec<u16> = same.filter(|own| !own.service.removed).filter_map(|own| own.address.rank).collect();
        ranks.sort_unstable();
        ranks
    }

    /// Whether one of these backends gets work when it has room.
    pub fn is_any_in_rotation(&self, backends: &[BackendId]) -> bool {
        let state = self.shared.lock();
        backends.iter().any(|id| state.backend(*id).is_some_and(|backend| backend.in_rotation()))
    }

    /// Takes a backend out of rotation, or back in, with the other ranks of the same server.
    /// Running requests finish.
    pub fn set_draining(&self, backend: BackendId, draining: bool) {
        self.change_service(backend, |service| service.draining = draining);
    }

    /// Sets whether a backend may get work and whether requests may wait for it, as decided by the
    /// process that runs the engine.
    pub fn set_cordon(&self, backend: BackendId, cordon: Cordon) {
        self.change_service(backend, |service| service.set_cordon(cordon));
    }

    /// Sets when the starting engine of a backend should be ready. Any later cordon except
    /// `Starting` clears it.
    pub fn set_ready_at(&self, backend: BackendId, ready_at: Instant) {
        self.change_server(backend, |found| found.service.ready_at = Some(ready_at));
    }

    /// Sets how long a start of a backend's engine takes.
    pub fn set_start_takes(&self, backend: BackendId, takes: Duration) {
        self.change_server(backend, |found| found.service.start_takes = Some(takes));
    }

    /// Sets whether an engine's flags say that it schedules by priority. The pool's rules override
    /// this.
    pub fn set_by_priority(&self, backend: BackendId, by_priority: bool) {
        self.change_server(backend, |found| found.engine.by_priority = by_priority);
    }

    /// The engine of a backend failed to start: sheds the requests that the backend's pool holds,
    /// unless another engine is coming.
    pub fn start_failed(&self, backend: BackendId) {
        self.shared.update(|state, wakers| state.start_failed(backend, wakers));
    }

    /// Why a request whose wait timed out was not served.
    pub fn timeout_reason(&self, home: PoolId, spill: &[PoolId]) -> ShedReason {
        let pools: SmallVec<[PoolId; 4]> = std::iter::once(home).chain(spill.iter().copied()).collect();
        match self.shared.lock().engines_starting(&pools) {
            Some(_) => ShedReason::EngineStarting,
            None => ShedReason::QueueTimeout,
        }
    }

    /// Sets bounds of backends. Requests in flight stay; under a lower bound no more are admitted
    /// until usage has fallen. Unknown backends are ignored.
    pub fn set_bounds(&self, bounds: impl IntoIterator<Item = (BackendId, Bound)>) {
        self.shared.update(|state, wakers| {
            for (backend, bound) in bounds {
                match bound {
                    // The flags of a server apply to each rank.
                    Bound::Ceiling(_) => {
                        let ranks = state.ranks_of(backend).into_iter();
                        ranks.for_each(|rank| state.set_bound(rank, bound, wakers));
                    }
                    _ => state.set_bound(backend, bound, wakers),
                }
            }
        });
    }

    /// Forgets the health and speed of a backend whose engine was replaced by one that is ready.
    pub fn engine_replaced(&self, backend: BackendId, now: Instant) {
        self.shared.update(|state, wakers| {
            for rank in state.ranks_of(backend) {
                let Some(found) = state.backend_mut(rank) else { continue };
                let facts = found.engine.facts.clone();
                found.engine_replaced(now);
                state.facts_changed(rank, &facts, None, wakers);
                state.reconsider(rank, wakers);
            }
        });
    }

    /// Backends with requests in flight and no progress for longer than `limit`.
    pub fn silent_backends(&self, limit: Duration, now: Instant) -> Vec<BackendId> {
        self.shared.lock().silent_backends(limit, now)
    }

    /// Resolves when a silent stream needs a look at the engine (see `engine_work.rs`).
    pub async fn silent_stream(&self) {
        self.shared.bell().rung().await;
    }

    /// Backends whose engines must be looked at.
    pub fn watched_backends(&self) -> Vec<(BackendId, Arc<Address>)> {
        let state = self.shared.lock();
        let backends = state.backends.iter().enumerate();
        let watched = backends.filter_map(|(index, slot)| {
            let found = slot.as_ref().filter(|found| found.liveness.progress.work.is_watched())?;
            Some((BackendId::new(index), Arc::clone(&found.address)))
        });
        watched.collect()
    }

    /// Notes the counters on the metrics page of the engine at `address`; `None`: the page had no
    /// usable counters.
    pub fn record_look(&self, backend: BackendId, address: &Arc<Address>, look: Option<EngineCounters>, now: Instant) {
        let state = self.shared.lock();
        if let Some(found) = state.backend(backend).filter(|found| Arc::ptr_eq(&found.address, address)) {
            found.liveness.progress.work.look(look, found.used.requests, now);
        }
    }

    /// Ejects a hung backend and cancels the exchanges there.
    pub fn mark_hung(&self, backend: BackendId, now: Instant) {
        self.shared.update(|state, wakers| {
            state.mark_hung(backend, now);
            state.dispatch(backend, wakers);
        });
    }

    /// Cancels the exchanges of all leases, also of later ones, because the gateway ends.
    pub fn abort_all(&self) {
        self.shared.update(|state, _| state.abort_all());
    }

    /// Time for which streams of a backend have generated until `now`, and their tokens.
    pub fn decoding(&self, backend: BackendId, now: Instant) -> DecodeSums {
        let state = self.shared.lock();
        state.backend(backend).map(|found| found.liveness.progress.decoding.sums(now)).unwrap_or_default()
    }

    /// A snapshot of all pools, for metrics and the admin API.
    pub fn view(&self) -> Vec<PoolView> {
        self.shared.lock().view()
    }

    /// The requests that wait at `now`, in no particular order.
    pub fn waiting(&self, now: Instant) -> Vec<WaitingRequest> {
        self.shared.lock().waiting_requests(now)
    }

    /// Requests in flight, and requests that wait, over all pools.
    pub fn load(&self) -> (usize, usize) {
        self.shared.lock().load()
    }

    /// For each pool with waiting requests, when the oldest of them arrived.
    pub fn oldest_waiting(&self) -> Vec<(PoolId, Instant)> {
        self.shared.lock().oldest_waiting()
    }

    /// Checks the invariants of queues, tickets and capacity (for tests).
    pub fn check_invariants(&self) -> Result<(), String> {
        self.shared.lock().check_invariants()
    }

    #[cfg(test)]
    pub(super) fn failure(&self, backend: BackendId, fault: BackendFault, now: Instant) {
        self.shared.failure(backend, fault, Origin::default(), now);
    }
}
