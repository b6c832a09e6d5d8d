//! Admission: decides whether there is room, which backend takes a request, and which waiter is next.
//!
//! All pools, their queues and the capacity of every backend are behind one lock. A request [enters](Admission::enter)
//! and gets a lease at once, is queued, or is shed with a reason. Returned capacity goes to the next waiter
//! under the same lock, so that capacity is never free while a request waits for it. One lock makes spilling between
//! pools one decision instead of a protocol; it is held for about a microsecond, three times per request.
//!
//! Rules:
//! - The home pool first, then the spill list in its order. A prompt that needs a permit goes where the fewest long
//!   prefills run, home on a tie. A waiter takes whichever of its backends has room first.
//! - On one backend, requests at home there precede requests that spill to it, until these reach their overtaking limit.
//! - No backend has room that a waiter could use, unless it is reserved for one that entered earlier.
//! - A request is overtaken by a bounded number of others, whatever the order (see `dispatch.rs`), and one that fits
//!   nowhere yet holds up none (see `reservation.rs`). One that would not fit on an empty backend either is refused.
//! - A waiter's waker runs after the lock is released. A grant stays in the table of waiters until its ticket takes it
//!   or is dropped, so that capacity is never between two tasks.
//!
//! Bounds: each queue by its configured length; all waiters by the sum of those. No clock and no I/O: `now` is a
//! parameter, and wakers are returned.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::backend::Cordon;
use super::engine_work::EngineLook;
use super::grant::Entered;
#[cfg(test)]
use super::health::BackendFault;
use super::health::{HealthRules, Phase, RefusedGateway};
use super::lease::{Lease, Ticket};
use super::request::AdmissionRequest;
use super::shared::SharedState;
use super::spec::{Address, PoolLayout, PoolSpec};
use super::state::AdmissionState;
use super::trial::TrialBound;
use super::view::{PoolView, WaitingRequest};
use crate::origin::Origin;
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::{ShedReason, TooLarge};

/// The decision on an [`AdmissionRequest`].
#[derive(Debug)]
pub enum AdmissionDecision {
    /// A backend has room.
    Granted(Lease),
    /// No backend has room: wait on the ticket, at most until the deadline.
    Queued(Ticket, Instant),
    /// Not even an empty backend could take it: its own fault.
    Refused(TooLarge),
    /// Not served.
    Shed(ShedReason),
    /// A reload removed the home pool, or every backend there that may serve the request, after it was classified:
    /// classify it by the next routing table and enter again.
    Reclassify,
}

thread_local! {
    /// Set while this thread runs the `publish` of [`Admission::apply_with`].
    static APPLYING: Cell<bool> = const { Cell::new(false) };
}

/// The owner of all capacity and all queues.
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

    /// Takes over a configuration: new pools and backends appear, limits change in place, what is no longer configured
    /// drains. Requests in flight and waiters are not affected, except that waiters of a removed pool are reclassified.
    pub fn apply(&self, pools: &[PoolSpec], rules: HealthRules, now: Instant) -> PoolLayout {
        self.apply_with(pools, rules, now, |_| ())
    }

    /// The same; `publish` replaces the routing table before any request can see that old ids are gone: a request that
    /// must be reclassified must not find the table that it came with. Runs under the lock, once per reload: it must do no
    /// work that grows with the configuration.
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

    /// Whether this thread is publishing a configuration, so that every request waits for it.
    pub fn is_applying() -> bool {
        APPLYING.get()
    }

    /// Requests a lease.
    pub fn enter(&self, request: AdmissionRequest) -> AdmissionDecision {
        match self.shared.update(|state, wakers| state.enter(request, wakers)) {
            Entered::Granted(grant) => AdmissionDecision::Granted(Lease::new(Arc::clone(&self.shared), grant)),
            Entered::Queued { id, deadline } => {
                AdmissionDecision::Queued(Ticket::new(Arc::clone(&self.shared), id), deadline)
            }
            Entered::Refused(limit) => AdmissionDecision::Refused(limit),
            Entered::Shed(reason) => AdmissionDecision::Shed(reason),
            Entered::Reclassify => AdmissionDecision::Reclassify,
        }
    }

    /// When a client should try again: the time in which the pool's queue drains at the measured rate, or until the first
    /// of its engines is ready, while all of them start. Whole seconds, 1 to 60.
    pub fn retry_after(&self, pool: PoolId, now: Instant) -> Duration {
        self.shared.lock().retry_after(pool, now)
    }

    /// Records the result of a health probe. Returns the change of phase, if any.
    pub fn record_probe(&self, backend: BackendId, up: bool, now: Instant) -> Option<(Phase, Phase)> {
        self.shared.update(|state, wakers| state.record_probe(backend, up, now, wakers))
    }

    /// Whether an id still refers to the backend of that name and endpoint. Ids are reused, so a response that was
    /// awaited outside the lock may concern a backend that is gone.
    pub fn is_same_backend(&self, backend: BackendId, name: &str, address: &Address) -> bool {
        let state = self.shared.lock();
        state.backend(backend).is_some_and(|b| *b.name == *name && b.address.endpoint == address.endpoint)
    }

    /// The engine refuses the gateway's credentials: the backend is ejected, unless it is the only one that is ready. Returns
    /// whether the engine did not refuse them before.
    pub fn refused_gateway(&self, backend: BackendId, refused: RefusedGateway, now: Instant) -> bool {
        self.shared.refused_gateway(backend, refused, Origin::default(), now)
    }

    /// The engine accepted the credentials of a probe.
    pub fn accepted_probe(&self, backend: BackendId) {
        self.shared.update(|state, _| {
            if let Some(found) = state.backend_mut(backend) {
                found.health.accepted_probe();
            }
        });
    }

    /// The tokens that the engine's prefix cache holds, as its metrics say: those of its KV cache, 0 where it is off.
    pub fn set_cache_size(&self, backend: BackendId, tokens: u64) {
        self.shared.update(|state, _| {
            if let Some(found) = state.backend_mut(backend) {
                found.cache.set_size(tokens);
            }
        });
    }

    /// Whether one of these backends gets work if it has room.
    pub fn is_any_in_rotation(&self, backends: &[BackendId]) -> bool {
        let state = self.shared.lock();
        backends.iter().any(|id| state.backend(*id).is_some_and(|backend| backend.in_rotation()))
    }

    /// Takes a backend out of rotation, or back in. Running requests finish. False if unknown.
    pub fn set_draining(&self, backend: BackendId, draining: bool) -> bool {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return false };
            found.draining = draining;
            state.reconsider(backend, wakers);
            true
        })
    }

    /// Sets whether a backend may get work and whether requests may wait for it, as decided by the process that runs
    /// its engine. False if unknown.
    pub fn set_cordon(&self, backend: BackendId, cordon: Cordon) -> bool {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return false };
            found.cordon = cordon;
            if cordon != Cordon::Starting {
                found.ready_at = None;
            }
            state.reconsider(backend, wakers);
            true
        })
    }

    /// Says when the engine of a backend, which starts, is expected to be ready; forgotten with the next other cordon. False
    /// if unknown.
    pub fn set_ready_at(&self, backend: BackendId, ready_at: Instant) -> bool {
        self.shared.update(|state, _| state.backend_mut(backend).map(|found| found.ready_at = Some(ready_at)).is_some())
    }

    /// Says how long a start of the engine of a backend takes. False if unknown.
    pub fn set_start_takes(&self, backend: BackendId, takes: Duration) -> bool {
        self.shared.update(|state, _| state.backend_mut(backend).map(|found| found.start_takes = Some(takes)).is_some())
    }

    /// Whether the engine of a backend schedules by priority, by its flags. A statement in the
    /// pool's rules counts more.
    pub fn set_by_priority(&self, backend: BackendId, by_priority: bool) {
        self.shared.update(|state, _| {
            if let Some(found) = state.backend_mut(backend) {
                found.by_priority = by_priority;
            }
        });
    }

    /// The engine of a backend did not start: requests that wait for the first engine of its pool are shed, unless another one is
    /// on its way.
    pub fn start_failed(&self, backend: BackendId) {
        self.shared.update(|state, wakers| state.start_failed(backend, wakers));
    }

    /// Why a request that waited for its whole time was not served.
    pub fn timeout_reason(&self, home: PoolId, spill: &[PoolId]) -> ShedReason {
        let pools: SmallVec<[PoolId; 4]> = std::iter::once(home).chain(spill.iter().copied()).collect();
        match self.shared.lock().engines_starting(&pools) {
            Some(_) => ShedReason::EngineStarting,
            None => ShedReason::QueueTimeout,
        }
    }

    /// Limits the slots of a backend below its configured limit; `None` removes the limit. Requests in flight are not
    /// affected; nothing more is admitted until usage has fallen. False if unknown.
    pub fn set_ceiling(&self, backend: BackendId, slots: Option<u32>) -> bool {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return false };
            found.set_ceiling(slots);
            state.reconsider(backend, wakers);
            true
        })
    }

    /// Sets what requests may use of backends whose engines are on trial; `None`: all of their limits. Requests in flight are not
    /// affected; copies on a backend that begins to take requests are cut.
    pub fn set_trials(&self, trials: &[(BackendId, Option<TrialBound>)]) {
        self.shared.update(|state, wakers| {
            for (id, trial) in trials {
                if state.backend(*id).is_none_or(|found| found.trial() == *trial) {
                    continue;
                }
                if let Some(found) = state.backend_mut(*id) {
                    found.set_trial(*trial);
                    state.reconsider(*id, wakers);
                }
            }
        });
    }

    /// Forgets the health and the speed of a backend whose engine was replaced by one that is ready. False if unknown.
    pub fn engine_replaced(&self, backend: BackendId, now: Instant) -> bool {
        self.shared.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return false };
            let facts = found.facts.clone();
            found.engine_replaced(now);
            state.facts_changed(backend, &facts, None, wakers);
            state.reconsider(backend, wakers);
            true
        })
    }

    /// Backends with requests in flight that have shown no progress for longer than `limit`.
    pub fn silent_backends(&self, limit: Duration, now: Instant) -> Vec<BackendId> {
        self.shared.lock().silent_backends(limit, now)
    }

    /// Resolves when a silent stream wants its engine to be looked at (see `engine_work.rs`).
    pub async fn silent_stream(&self) {
        self.shared.bell().rung().await;
    }

    /// Backends whose engines are to be looked at.
    pub fn watched_backends(&self) -> Vec<(BackendId, Arc<Address>)> {
        let state = self.shared.lock();
        let backends = state.backends.iter().enumerate();
        let watched = backends.filter_map(|(index, slot)| {
            let found = slot.as_ref().filter(|found| found.progress.work.is_watched())?;
            Some((BackendId::new(index), Arc::clone(&found.address)))
        });
        watched.collect()
    }

    /// Notes what the page of the engine at `address` shows; `None`: nothing.
    pub fn record_look(&self, backend: BackendId, address: &Arc<Address>, look: Option<EngineLook>, now: Instant) {
        let state = self.shared.lock();
        if let Some(found) = state.backend(backend).filter(|found| Arc::ptr_eq(&found.address, address)) {
            found.progress.work.look(look, found.used.requests, now);
        }
    }

    /// Ejects a backend that was found hung and cancels its exchanges.
    pub fn mark_hung(&self, backend: BackendId, now: Instant) {
        self.shared.update(|state, wakers| {
            state.mark_hung(backend, now);
            state.dispatch(backend, wakers);
        });
    }

    /// Cancels all exchanges, those of later leases included: the gateway ends.
    pub fn abort_all(&self) {
        self.shared.update(|state, _| state.abort_all());
    }

    /// A snapshot of all pools, for metrics and the admin API.
    pub fn view(&self) -> Vec<PoolView> {
        self.shared.lock().view()
    }

    /// The requests that wait at `now`, in no order.
    pub fn waiting(&self, now: Instant) -> Vec<WaitingRequest> {
        self.shared.lock().waiting_requests(now)
    }

    /// Requests in flight and requests waiting, all pools together.
    pub fn load(&self) -> (usize, usize) {
        self.shared.lock().load()
    }

    /// Checks every invariant that ties queues, tickets and capacity together (for tests).
    pub fn check_invariants(&self) -> Result<(), String> {
        self.shared.lock().check_invariants()
    }

    #[cfg(test)]
    pub(super) fn failure(&self, backend: BackendId, fault: BackendFault, now: Instant) {
        self.shared.failure(backend, fault, Origin::default(), now);
    }
}
