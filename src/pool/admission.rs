//! Admission: one owner for "is there room", "who is next" and "which backend".
//!
//! All pools, their queues and the capacity of every backend live behind one lock. A request
//! [enters](Admission::enter) and is granted a lease at once, queued, or shed with a reason;
//! whoever returns capacity hands it to the next waiter before letting go of the lock, so room and
//! waiters never pass each other by. One lock for everything is what makes spilling between pools
//! one decision instead of a protocol; it is held for about a microsecond, three times a request.
//!
//! Rules:
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

use super::capacity::{Held, Need};
use super::health::{Fault, HealthRules, Phase};
use super::layout::{Layout, PoolSpec};
use super::lease::{Grant, Lease, Ticket};
use super::queue::WaiterId;
use super::state::State;
use super::view::PoolView;
use crate::base::{BackendId, PoolId};
use crate::openai::ShedReason;

/// What a request asks for.
#[derive(Clone, Debug)]
pub struct Ask {
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

/// The answer to an [`Ask`].
#[derive(Debug)]
pub enum Entry {
    /// A backend has room.
    Granted(Lease),
    /// None has; wait here, no longer than until the deadline.
    Queued(Ticket, Instant),
    /// Not served, and why.
    Refused(ShedReason),
}

/// The owner of all capacity and all queues.
#[derive(Debug)]
pub struct Admission {
    state: Mutex<State>,
}

/// Wakers to run once the lock is released.
pub(super) type Wakers = SmallVec<[Waker; 4]>;

impl Admission {
    /// An admission without pools. `seed` fixes the coin of the policies.
    pub fn new(now: Instant, rules: HealthRules, seed: u64) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::new(now, rules, seed)) })
    }

    /// Takes over a configuration: new pools and backends appear, limits change in place, what is
    /// no longer configured drains. Requests in flight and waiters are not touched, except that
    /// waiters of a removed pool are told to classify again.
    pub fn apply(&self, pools: &[PoolSpec], rules: HealthRules, now: Instant) -> Layout {
        self.update(|state, wakers| state.apply(pools, rules, now, wakers))
    }

    /// Asks for a backend.
    pub fn enter(self: &Arc<Self>, ask: Ask) -> Entry {
        let entered = self.update(|state, wakers| state.enter(ask, wakers));
        match entered {
            Ok(Ok(grant)) => Entry::Granted(Lease::new(Arc::clone(self), grant)),
            Ok(Err((id, deadline))) => Entry::Queued(Ticket::new(Arc::clone(self), id), deadline),
            Err(shed) => Entry::Refused(shed),
        }
    }

    /// How long a client should wait before it tries again: the time in which the pool's queue, at
    /// the rate at which requests have been leaving it, would be through. Whole seconds, 1 to 60.
    pub fn retry_after(&self, pool: PoolId, now: Instant) -> Duration {
        self.state.lock().retry_after(pool, now)
    }

    /// The probe of a backend answered or did not. Returns what changed, for the log.
    pub fn probed(&self, backend: BackendId, up: bool, now: Instant) -> Option<(Phase, Phase)> {
        self.update(|state, wakers| state.probed(backend, up, now, wakers))
    }

    /// Whether a reload has removed this pool: who asks for it goes by an old plan.
    pub fn is_removed(&self, pool: PoolId) -> bool {
        self.state.lock().pools.get(pool.index()).is_none_or(|pool| pool.removed)
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

    /// Backends with requests in flight from which no byte came for longer than `limit`.
    pub fn silent(&self, limit: Duration, now: Instant) -> Vec<BackendId> {
        self.state.lock().silent(limit, now)
    }

    /// A backend was found hung: out of rotation, and its exchanges are cut.
    pub fn hung(&self, backend: BackendId, now: Instant) {
        self.update(|state, _| state.hung(backend, now));
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
    pub fn check(&self) -> Result<(), String> {
        self.state.lock().check()
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

    pub(super) fn give_back(&self, backend: BackendId, held: Held) {
        self.update(|state, wakers| state.give_back(backend, held, wakers));
    }

    pub(super) fn poll_waiter(&self, id: WaiterId, waker: &Waker) -> Option<Option<Grant>> {
        self.state.lock().poll_waiter(id, waker)
    }

    pub(super) fn leave(&self, id: WaiterId) {
        self.update(|state, wakers| state.leave(id, wakers));
    }

    pub(super) fn observe(&self, backend: BackendId, prefill: Option<(u64, Duration)>, tpot: Option<Duration>) {
        self.update(|state, _| {
            let Some(found) = state.backend_mut(backend) else { return };
            if let Some((tokens, ttft)) = prefill {
                found.observe_prefill(tokens, ttft);
            }
            if let Some(tpot) = tpot {
                found.speed.observe(tpot);
            }
        });
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

    pub(super) fn failure(&self, backend: BackendId, fault: Fault, now: Instant) {
        self.update(|state, _| state.failure(backend, fault, now));
    }

    /// Runs `change` under the lock and the wakers it collected after it.
    fn update<T>(&self, change: impl FnOnce(&mut State, &mut Wakers) -> T) -> T {
        let mut wakers = Wakers::new();
        let result = change(&mut self.state.lock(), &mut wakers);
        for waker in wakers {
            waker.wake();
        }
        result
    }
}
