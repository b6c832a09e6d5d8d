//! Admission: one owner for "is there room", "who is next" and "which backend".
//!
//! All pools, their queues and the capacity of every backend live behind one lock. A request
//! [enters](Admission::enter) and is granted a lease at once, queued, or shed with a reason;
//! whoever returns capacity hands it to the next waiter before letting go of the lock, so room and
//! waiters never pass each other by. One lock for everything is what makes spilling between pools
//! one decision instead of a protocol; it is held for about a microsecond, three times a request.
//!
//! PoolRules:
//! - home pool first, then the spill list in its order; a prompt that needs a permit goes where fewest long
//!   prefills run, home on a tie; a waiter takes whichever of its backends has
//!   room first;
//! - on one backend, those who call it home come before those who spill to it;
//! - nobody overtakes a waiter ahead of him on the same backend, except one who waits only for a
//!   prefill permit, by somebody who needs none;
//! - a waiter's waker runs after the lock is released; a grant waits in the table until its ticket
//!   picks it up or is dropped, so capacity is never in flight between tasks.
//!
//! Bounds: every queue by its configured length; waiters in all by the sum of those.
//! No clock and no I/O in here: `now` comes in, wakers go out.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::backend::Cordon;
use super::capacity::{Held, Need};
use super::health::{BackendFault, HealthRules, Phase};
use super::layout::{Address, PoolLayout, PoolSpec};
use super::lease::{Grant, Lease, Ticket};
use super::queue::WaiterId;
use super::state::AdmissionState;
use super::view::PoolView;
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::ShedReason;

/// What a request asks for.
#[derive(Clone, Debug)]
pub struct AdmissionRequest {
    /// The number of the layout that it was classified by.
    pub layout: u64,
    /// The pool its prompt length belongs to.
    pub home: PoolId,
    /// Where else it may go, in order of preference.
    pub spill: SmallVec<[PoolId; 2]>,
    /// What it takes.
    pub need: Need,
    /// Lower goes first.
    pub priority: i32,
    /// When the request had been received; keeps its age across retries and reloads.
    pub arrived: Instant,
    /// Backends that failed this request already.
    pub avoid: SmallVec<[BackendId; 2]>,
}

/// The answer to an [`AdmissionRequest`].
#[derive(Debug)]
pub enum AdmissionDecision {
    /// A backend has room.
    Granted(Lease),
    /// None has; wait here, no longer than until the deadline.
    Queued(Ticket, Instant),
    /// Not served, and why.
    Shed(ShedReason),
    /// A reload after the request had been classified removed its home pool, or left nobody there who may serve it:
    /// classify again by the plan that follows, and re-enter.
    Reclassify,
}

/// The owner of all capacity and all queues.
#[derive(Debug)]
pub struct Admission {
    state: Mutex<AdmissionState>,
}

/// Wakers to run once the lock is released.
pub(super) type Wakers = SmallVec<[Waker; 4]>;

impl Admission {
    /// An admission without pools. `seed` fixes the coin of the policies.
    pub fn new(now: Instant, rules: HealthRules, seed: u64) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(AdmissionState::new(now, rules, seed)) })
    }

    /// Takes over a configuration: new pools and backends appear, limits change in place, what is
    /// no longer configured drains. Requests in flight and waiters are not touched, except that
    /// waiters of a removed pool are told to classify again.
    pub fn apply(&self, pools: &[PoolSpec], rules: HealthRules, now: Instant) -> PoolLayout {
        self.apply_with(pools, rules, now, |_| ())
    }

    /// The same; `publish` makes the new ids known before anybody can notice that old ones are gone: whoever is told
    /// to classify again must not find the plan that sent him here. Runs under the lock, once for each reload.
    pub fn apply_with(
        &self,
        pools: &[PoolSpec],
        rules: HealthRules,
        now: Instant,
        publish: impl FnOnce(&PoolLayout),
    ) -> PoolLayout {
        self.update(|state, wakers| {
            let layout = state.apply(pools, rules, now, wakers);
            publish(&layout);
            layout
        })
    }

    /// Asks for a backend.
    pub fn enter(self: &Arc<Self>, ask: AdmissionRequest) -> AdmissionDecision {
        let entered = self.update(|state, wakers| {
            if state.is_gone(ask.home) {
                return None;
            }
            let outdated = ask.layout != state.layout;
            let entered = state.enter(ask, wakers);
            (!outdated || !matches!(entered, Err(ShedReason::NoBackend))).then_some(entered)
        });
        let Some(entered) = entered else { return AdmissionDecision::Reclassify };
        match entered {
            Ok(Ok(grant)) => AdmissionDecision::Granted(Lease::new(Arc::clone(self), grant)),
            Ok(Err((id, deadline))) => AdmissionDecision::Queued(Ticket::new(Arc::clone(self), id), deadline),
            Err(shed) => AdmissionDecision::Shed(shed),
        }
    }

    /// How long a client should wait before it tries again: the time in which the pool's queue, at
    /// the rate at which requests have been leaving it, would be through. Whole seconds, 1 to 60.
    pub fn retry_after(&self, pool: PoolId, now: Instant) -> Duration {
        self.state.lock().retry_after(pool, now)
    }

    /// The probe of a backend answered or did not. Returns what changed, for the log.
    pub fn record_probe(&self, backend: BackendId, up: bool, now: Instant) -> Option<(Phase, Phase)> {
        self.update(|state, wakers| state.record_probe(backend, up, now, wakers))
    }

    /// Whether an id still means the backend of that name and endpoint. Ids are used again: whoever asked an engine
    /// something outside the lock has to know whether the answer is still about the same one.
    pub fn is_same_backend(&self, backend: BackendId, name: &str, address: &Address) -> bool {
        let state = self.state.lock();
        state.backend(backend).is_some_and(|b| *b.name == *name && b.address.endpoint == address.endpoint)
    }

    /// The engine's context limit, as `/v1/models` reports it.
    pub fn set_max_model_len(&self, backend: BackendId, tokens: Option<u64>) {
        self.update(|state, _| {
            if let Some(backend) = state.backend_mut(backend) {
                backend.max_model_len = tokens;
            }
        });
    }

    /// Takes a backend out of rotation, or back in. Running requests finish. False if unknown.
    pub fn set_draining(&self, backend: BackendId, draining: bool) -> bool {
        self.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return false };
            found.draining = draining;
            state.dispatch(backend, wakers);
            true
        })
    }

    /// Says for whoever runs its engine whether a backend may be given work, and whether it is worth waiting for. False if
    /// unknown.
    pub fn set_cordon(&self, backend: BackendId, cordon: Cordon) -> bool {
        self.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return false };
            found.cordon = cordon;
            state.dispatch(backend, wakers);
            true
        })
    }

    /// Bounds the slots of a backend beside its configured limit: what its engine is good for now. `None`: no such bound.
    /// Requests under way are not touched; nothing more is admitted until usage has fallen. False if unknown.
    pub fn set_ceiling(&self, backend: BackendId, slots: Option<u32>) -> bool {
        self.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return false };
            found.set_ceiling(slots);
            state.dispatch(backend, wakers);
            true
        })
    }

    /// Another engine stands behind a backend and was seen to be ready: its health begins anew. False if unknown.
    pub fn reset_health(&self, backend: BackendId, now: Instant) -> bool {
        self.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return false };
            found.reset_health(now);
            state.dispatch(backend, wakers);
            true
        })
    }

    /// Backends with requests in flight from which no byte came for longer than `limit`.
    pub fn silent_backends(&self, limit: Duration, now: Instant) -> Vec<BackendId> {
        self.state.lock().silent_backends(limit, now)
    }

    /// A backend was found hung: out of rotation, and its exchanges are cut.
    pub fn mark_hung(&self, backend: BackendId, now: Instant) {
        self.update(|state, _| state.mark_hung(backend, now));
    }

    /// A picture of everything, for metrics and the admin API.
    pub fn view(&self) -> Vec<PoolView> {
        self.state.lock().view()
    }

    /// Requests in flight and waiting, all pools together.
    pub fn load(&self) -> (usize, usize) {
        self.state.lock().load()
    }

    /// Checks every invariant that ties queues, tickets and capacity together (for tests).
    pub fn check_invariants(&self) -> Result<(), String> {
        self.state.lock().check_invariants()
    }

    pub(super) fn end_prefill(&self, backend: BackendId, held: &mut Held) {
        if *held == Held::default() {
            return;
        }
        self.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return };
            found.used.end_prefill(held);
            state.dispatch(backend, wakers);
        });
    }

    pub(super) fn release(&self, backend: BackendId, held: Held) {
        self.update(|state, wakers| state.release(backend, held, wakers));
    }

    pub(super) fn poll_waiter(&self, id: WaiterId, waker: &Waker) -> Option<Option<Grant>> {
        self.state.lock().poll_waiter(id, waker)
    }

    pub(super) fn leave(&self, id: WaiterId) {
        self.update(|state, wakers| state.leave(id, wakers));
    }

    pub(super) fn observe_prefill(&self, backend: BackendId, prompt_tokens: u64, ttft: Duration) {
        if let Some(found) = self.state.lock().backend_mut(backend) {
            found.observe_prefill(prompt_tokens, ttft);
        }
    }

    pub(super) fn observe_tpot(&self, backend: BackendId, tpot: Duration) {
        if let Some(found) = self.state.lock().backend_mut(backend) {
            found.speed.observe(tpot);
        }
    }

    pub(super) fn success(&self, backend: BackendId) {
        self.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return };
            let before = found.health.allowance();
            found.health.success();
            if before != found.health.allowance() {
                state.dispatch(backend, wakers);
            }
        });
    }

    pub(super) fn failure(&self, backend: BackendId, fault: BackendFault, now: Instant) {
        self.update(|state, _| state.failure(backend, fault, now));
    }

    /// Runs `change` under the lock and the wakers it collected after it.
    fn update<T>(&self, change: impl FnOnce(&mut AdmissionState, &mut Wakers) -> T) -> T {
        let mut wakers = Wakers::new();
        let result = change(&mut self.state.lock(), &mut wakers);
        for waker in wakers {
            waker.wake();
        }
        result
    }
}
