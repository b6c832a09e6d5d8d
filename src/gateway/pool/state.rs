//! The state behind the admission's lock: pools, backends and waiters, and how requests move
//! between them.
//!
//! See [`super::admission`] for the rules. Everything here returns at once. The caller runs the
//! collected wakers after it has released the lock.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::backend::BackendState;
use super::capacity::{Allocation, LARGE_PROMPT};
use super::drain_rate::DrainRate;
use super::grant::{AdmissionDecision, Grant, WaitResult};
use super::health::{BackendFault, HealthRules, Phase};
use super::owners::Owners;
use super::prefix::PrefixTable;
use super::queue::{Lane, QueuePosition, WaiterId};
use super::request::AdmissionRequest;
use super::room::Rooms;
use super::share::ShareEnd;
use super::spec::PoolRules;
use sluice_config::limits::{RETRY_AFTER_MAX, RETRY_AFTER_MIN};
use sluice_core::base::{BackendId, PoolId, Rng};
use sluice_core::openai::{ShedReason, TooLarge};

/// Wakers to run once the lock is released.
pub(super) type Wakers = SmallVec<[Waker; 4]>;

#[derive(Debug)]
pub(super) struct PoolState {
    pub(super) name: Arc<str>,
    pub(super) members: Vec<BackendId>,
    pub(super) rules: PoolRules,
    /// Pools whose requests may spill into this one, in configuration order.
    pub(super) fed_by: Vec<PoolId>,
    pub(super) queue: Owners,
    /// The backend that is reserved for a waiter.
    pub(super) reserved: Option<Reservation>,
    pub(super) drain: DrainRate,
    pub(super) removed: bool,
    /// Which members may have room.
    pub(super) rooms: Rooms,
    /// The engines that the pool's requests may use have different facts.
    pub(super) differ: bool,
    /// The prompts that members are likely to have in their prefix caches.
    pub(super) prefixes: PrefixTable,
}

/// A backend that is kept for one waiter. Valid only while [`AdmissionState::reservation`] returns
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reservation {
    pub(super) backend: BackendId,
    pub(super) waiter: WaiterId,
    /// Unlike waiter ids, never reused.
    pub(super) serial: u64,
}

impl PoolState {
    pub(super) fn lane_of(&self, request: &AdmissionRequest) -> Lane {
        let is_large = || request.fair.is_some_and(|fair| fair.computed >= LARGE_PROMPT);
        match self.rules.limits.is_long(request.need.prompt_tokens) {
            true => Lane::Long,
            false if is_large() => Lane::Large,
            false => Lane::Rest,
        }
    }
}

#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) request: AdmissionRequest,
    pub(super) lane: Lane,
    pub(super) key: QueuePosition,
    /// `None` while it waits. A grant holds capacity until the ticket takes it: the backend, the
    /// allocation, and the seconds of prefill ahead.
    pub(super) outcome: Option<WaitResult<(BackendId, Allocation, f64)>>,
    pub(super) waker: Option<Waker>,
    /// The number of counted grants when the waiter entered. Later grants may have overtaken it.
    pub(super) grants_before: u64,
    /// No request that arrives later than this overtakes the waiter.
    pub(super) not_overtaken_after: Instant,
}

#[derive(Debug)]
pub(super) struct AdmissionState {
    /// The origin of the times in candidates and queue positions.
    pub(super) epoch: Instant,
    /// When the latest request or retry asked for a lease: the clock of the overtaking limit.
    pub(super) latest: Instant,
    pub(super) rules: HealthRules,
    pub(super) layout: u64,
    pub(super) pools: Vec<PoolState>,
    pub(super) backends: Vec<Option<BackendState>>,
    pub(super) waiters: Vec<Option<Waiter>>,
    pub(super) free: Vec<WaiterId>,
    serial: u64,
    /// Number of dispatches so far; see `dispatch.rs`.
    pub(super) looks: u64,
    pub(super) pinned: usize,
    pub(super) grants: u64,
    pub(super) rng: Rng,
    /// Backends that may have changed since the index of rooms was updated, each once.
    pub(super) changed: Vec<BackendId>,
    /// Backends that may have copies, each once, so that a new waiter need not look at all
    /// backends.
    pub(super) with_copies: SmallVec<[BackendId; 4]>,
    pub(super) closed_to_copies: bool,
    /// A ledger divides the limits: a backend without a share gets no requests.
    pub(super) is_divided: bool,
    pub(super) shares_end: Option<ShareEnd>,
}

impl AdmissionState {
    pub(super) fn new(now: Instant, rules: HealthRules, seed: u64) -> Self {
        Self {
            epoch: now,
            latest: now,
            rules,
            layout: 0,
            pools: Vec::new(),
            backends: Vec::new(),
            waiters: Vec::new(),
            free: Vec::new(),
            serial: 0,
            looks: 0,
            pinned: 0,
            grants: 0,
            rng: Rng::new(seed),
            changed: Vec::new(),
            with_copies: SmallVec::new(),
            closed_to_copies: false,
            is_divided: false,
            shares_end: None,
        }
    }

    pub(super) fn backend(&self, id: BackendId) -> Option<&BackendState> {
        self.backends.get(id.index())?.as_ref()
    }

    pub(super) fn backend_mut(&mut self, id: BackendId) -> Option<&mut BackendState> {
        let backend = self.backends.get_mut(id.index())?.as_mut()?;
        if !std::mem::replace(&mut backend.changed, true) {
            self.changed.push(id);
        }
        Some(backend)
    }

    pub(super) fn is_removed(&self, pool: PoolId) -> bool {
        self.pools.get(pool.index()).is_none_or(|pool| pool.removed)
    }

    /// Grants capacity at once, queues the request, or sheds it.
    pub(super) fn enter(
        &mut self,
        mut request: AdmissionRequest,
        wakers: &mut Wakers,
    ) -> AdmissionDecision<Box<Grant>, WaiterId> {
        if self.is_removed(request.home) {
            return AdmissionDecision::Reclassify;
        }
        self.latest = self.latest.max(request.since);
        request.wants = self.wants_of(&request);
        let reachable: SmallVec<[PoolId; 4]> = request.pools().collect();
        let held = self.held_until(&request, &reachable);
        let backends = || reachable.iter().flat_map(|pool| self.members(*pool));
        if !backends().any(|id| self.allows(&request, *id)) {
            match self.too_large(&request) {
                _ if request.layout != self.layout => return AdmissionDecision::Reclassify,
                Some(limit) => return AdmissionDecision::Refused(limit),
                None if held.is_none() => return AdmissionDecision::Shed(ShedReason::NoBackend),
                None => {}
            }
        }
        if request.pinned && !self.is_any_for(&request) {
            return AdmissionDecision::Shed(ShedReason::NoBackend);
        }
        let deadline = held.unwrap_or(request.since + self.pools[request.home.index()].rules.queue_timeout);
        if self.starts_too_late(&reachable, deadline) {
            return AdmissionDecision::Shed(ShedReason::EngineStarting);
        }
        self.find_owner(&mut request, wakers);
        let preferred = self.in_order_of_prefills(&reachable, &request);
        match self.grant_at_once(&preferred, &request) {
            Some(grant) => AdmissionDecision::Granted(grant),
            None => self.wait_in_queue(&preferred, request, deadline, wakers),
        }
    }

    /// Grants a request that does not wait, if there is room.
    pub(super) fn try_enter(&mut self, mut request: AdmissionRequest, wakers: &mut Wakers) -> Option<Box<Grant>> {
        if self.is_removed(request.home) {
            return None;
        }
        request.wants = self.wants_of(&request);
        let pools: SmallVec<[PoolId; 4]> = request.pools().collect();
        self.find_owner(&mut request, wakers);
        let preferred = self.in_order_of_prefills(&pools, &request);
        self.grant_at_once(&preferred, &request)
    }

    /// The limit that keeps a request from every pool it may use, even from empty backends. Returns
    /// the largest of these limits.
    pub(super) fn too_large(&self, request: &AdmissionRequest) -> Option<TooLarge> {
        let pools = request.pools().filter(|pool| !self.is_removed(*pool));
        let mut exceeded: SmallVec<[Option<TooLarge>; 4]> =
            pools.map(|pool| self.pools[pool.index()].rules.limits.exceeded_by(&request.need)).collect();
        exceeded.sort_by_key(|limit| limit.map(|limit| limit.limit));
        match exceeded.first() {
            Some(Some(_)) => exceeded.pop().flatten(),
            _ => None,
        }
    }

    /// Takes capacity in the first pool that has room and for which no request waits.
    fn grant_at_once(&mut self, pools: &[PoolId], request: &AdmissionRequest) -> Option<Box<Grant>> {
        for pool in pools {
            if self.has_no_waiters(*pool)
                && let Some(backend) = self.pick(*pool, request)
            {
                return Some(self.grant(backend, request));
            }
        }
        None
    }

    /// Queues the request. Other waiters may compete for the room, so the queue decides, backend by
    /// backend in the order of the policy.
    fn wait_in_queue(
        &mut self,
        pools: &[PoolId],
        request: AdmissionRequest,
        deadline: Instant,
        wakers: &mut Wakers,
    ) -> AdmissionDecision<Box<Grant>, WaiterId> {
        let home = request.home;
        let queue_length = self.pools[home.index()].rules.queue_length;
        let mut untried = request.clone();
        let avoided = untried.avoid.len();
        let id = self.enqueue(request);
        for pool in pools {
            while let Some(backend) = self.pick(*pool, &untried) {
                self.dispatch(backend, wakers);
                if let Some(WaitResult::Granted(grant)) = self.take_outcome(id) {
                    return AdmissionDecision::Granted(grant);
                }
                untried.avoid.push(backend);
            }
        }
        if self.pools[home.index()].queue.len() > queue_length && !self.displace(home, id, wakers) {
            self.leave(id, wakers);
            return AdmissionDecision::Shed(ShedReason::QueueFull);
        }
        untried.avoid.truncate(avoided);
        self.cut_copies(&untried);
        self.reserve_if_passed(id);
        if !self.waits_for_share(&untried) {
            return AdmissionDecision::Queued(id, deadline);
        }
        // A backend on which the owner's prefill share is used up is not picked, so no offer has
        // noted that the waiter is held.
        self.pools[home.index()].queue.hold();
        AdmissionDecision::Queued(id, self.patient(&untried, deadline))
    }

    /// Whether no request waits for a backend of this pool.
    pub(super) fn has_no_waiters(&self, pool: PoolId) -> bool {
        let Some(found) = self.pools.get(pool.index()) else { return true };
        found.queue.is_empty() && found.fed_by.iter().all(|feeder| self.pools[feeder.index()].queue.is_empty())
    }

    pub(super) fn members(&self, pool: PoolId) -> &[BackendId] {
        self.pools.get(pool.index()).map_or(&[], |pool| &pool.members)
    }

    fn grant(&mut self, backend: BackendId, request: &AdmissionRequest) -> Box<Grant> {
        let taken = self.take(backend, request).expect("picked from the members of a pool");
        self.grant_of(backend, taken, request)
    }

    pub(super) fn grant_of(
        &self,
        backend: BackendId,
        (allocation, ahead): (Allocation, f64),
        request: &AdmissionRequest,
    ) -> Box<Grant> {
        let found = self.backend(backend).expect("a backend stays while anything is held on it");
        Box::new(Grant {
            backend,
            pool: found.pool,
            pool_name: Arc::clone(&self.pools[found.pool.index()].name),
            name: Arc::clone(&found.name),
            address: Arc::clone(&found.address),
            bill: allocation.bill,
            allocation,
            progress: Arc::clone(&found.liveness.progress),
            abort: found.liveness.abort.clone(),
            prefill_time: found.speed.prefill.time_for(request.need.prompt_tokens),
            max_model_len: found.engine.facts.max_model_len,
            ahead,
            by_priority: self.pools[found.pool.index()].rules.by_priority.unwrap_or(found.engine.by_priority),
            prefix: Arc::clone(&request.prefix),
            session: self.new_session(backend),
        })
    }

    fn enqueue(&mut self, request: AdmissionRequest) -> WaiterId {
        let rules = &self.pools[request.home.index()].rules;
        let lane = self.pools[request.home.index()].lane_of(&request);
        self.serial += 1;
        let arrived = request.arrived.saturating_duration_since(self.epoch);
        let key = rules.order.key(request.priority, arrived, request.need.prompt_tokens, self.serial);
        let (home, since) = (request.home, request.since);
        let not_overtaken_after = request.arrived + rules.overtaken_for();
        let owner = request.owner();
        let waiter = Waiter { request, lane, key, outcome: None, waker: None, grants_before: 0, not_overtaken_after };
        let id = match self.free.pop() {
            Some(id) => {
                self.waiters[id as usize] = Some(waiter);
                id
            }
            None => {
                self.waiters.push(Some(waiter));
                (self.waiters.len() - 1) as WaiterId
            }
        };
        self.pinned += usize::from(self.waiters[id as usize].as_ref().is_some_and(|waiter| waiter.request.pinned));
        let pool = &mut self.pools[home.index()];
        if pool.queue.is_empty() {
            pool.drain.begin(since);
        }
        let grants_before = pool.queue.insert(owner, lane, key, id);
        if let Some(waiter) = self.waiters[id as usize].as_mut() {
            waiter.grants_before = grants_before;
        }
        id
    }

    /// The outcome of a wait; `None` while the waiter waits. In that case `waker` is called when
    /// the wait ends.
    pub(super) fn poll_waiter(&mut self, id: WaiterId, waker: &Waker) -> Option<WaitResult<Box<Grant>>> {
        let outcome = self.take_outcome(id);
        if outcome.is_none()
            && let Some(waiter) = self.waiters[id as usize].as_mut()
            && !waiter.waker.as_ref().is_some_and(|known| known.will_wake(waker))
        {
            waiter.waker = Some(waker.clone());
        }
        outcome
    }

    fn take_outcome(&mut self, id: WaiterId) -> Option<WaitResult<Box<Grant>>> {
        let waiter = self.waiters[id as usize].take_if(|waiter| waiter.outcome.is_some())?;
        self.free.push(id);
        let grant = |(backend, allocation, ahead)| self.grant_of(backend, (allocation, ahead), &waiter.request);
        Some(waiter.outcome?.map(grant))
    }

    /// A ticket was dropped: removes the waiter, and returns capacity that it was granted.
    pub(super) fn leave(&mut self, id: WaiterId, wakers: &mut Wakers) {
        let Some(waiter) = self.waiters[id as usize].take() else { return };
        self.free.push(id);
        match waiter.outcome {
            Some(WaitResult::Granted((backend, allocation, _))) => self.release(backend, allocation, wakers),
            Some(WaitResult::Reclassify | WaitResult::Shed(_) | WaitResult::Unserved) => {}
            None => {
                self.pinned -= usize::from(waiter.request.pinned);
                self.pools[waiter.request.home.index()].queue.remove(waiter.request.owner(), waiter.lane, &waiter.key);
                // The backend that was reserved for it is free for other waiters.
                if let Some(backend) = self.drop_reservation(&waiter) {
                    self.dispatch(backend, wakers);
                }
            }
        }
    }

    pub(super) fn release(&mut self, backend: BackendId, allocation: Allocation, wakers: &mut Wakers) {
        self.end_charge(backend, &allocation);
        let Some(found) = self.backend_mut(backend) else { return };
        if let Some(adapter) = allocation.adapter {
            found.adapters.release(adapter);
        }
        found.settled.end(allocation.seen);
        let bill = allocation.bill;
        found.used.release(allocation);
        let (pool, gone) = (found.pool, found.service.removed && found.used.requests == 0);
        self.pools[pool.index()].drain.departed();
        if gone {
            self.backends[backend.index()] = None;
            self.serve_loosened(pool, wakers);
        } else {
            self.dispatch(backend, wakers);
        }
        self.serve_home_of(bill, wakers);
    }

    pub(super) fn retry_after(&mut self, pool: PoolId, now: Instant) -> Duration {
        let starting = self.engines_starting(&[pool]);
        let ready_at = starting.and_then(|starting| starting.ready_at.or_else(|| Some(now + starting.takes?)));
        if let Some(ready_at) = ready_at.filter(|ready_at| *ready_at > now) {
            return (ready_at - now).clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX);
        }
        match self.pools.get_mut(pool.index()) {
            Some(pool) => {
                if pool.queue.is_empty() {
                    pool.drain.leave_out_idle(now);
                }
                pool.drain.time_for(pool.queue.len() + 1, now)
            }
            None => DrainRate::UNKNOWN,
        }
    }

    pub(super) fn record_probe(
        &mut self,
        backend: BackendId,
        up: bool,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Option<(Phase, Phase)> {
        let rules = self.rules;
        let found = self.backend_mut(backend)?;
        let (before, facts) = (found.health.phase(), found.engine.facts.clone());
        if up {
            found.health.probe_ok(now);
        } else {
            found.health.probe_missed(&rules);
        }
        let after = found.health.phase();
        // An engine that was away has probably started again.
        let was_away = matches!(before, Phase::Down | Phase::Ejected { fault: BackendFault::Connect, .. });
        if was_away && before != after {
            found.forget_engine(now);
        }
        found.engine.expire_routes(now);
        self.facts_changed(backend, &facts, None, wakers);
        self.dispatch(backend, wakers);
        (before != after).then_some((before, after))
    }

    pub(super) fn silent_backends(&mut self, limit: Duration, now: Instant) -> Vec<BackendId> {
        let backends = self.backends.iter_mut().enumerate();
        let silent = backends.filter_map(|(index, slot)| {
            let found = slot.as_mut()?;
            let silence = found.liveness.silence(found.used.requests, now)?;
            (silence > limit).then(|| BackendId::new(index))
        });
        silent.collect()
    }

    pub(super) fn abort_all(&self) {
        self.backends.iter().flatten().for_each(|backend| backend.liveness.abort.cancel());
    }

    /// Takes a waiter out of the queue without granting room.
    pub(super) fn end_wait(
        &mut self,
        id: WaiterId,
        outcome: WaitResult<(BackendId, Allocation, f64)>,
        wakers: &mut Wakers,
    ) {
        let Some(waiter) = self.waiters[id as usize].as_mut() else { return };
        self.pools[waiter.request.home.index()].queue.remove(waiter.request.owner(), waiter.lane, &waiter.key);
        self.pinned -= usize::from(waiter.request.pinned);
        waiter.outcome = Some(outcome);
        wakers.extend(waiter.waker.take());
    }

    pub(super) fn load(&self) -> (usize, usize) {
        let running = self.backends.iter().flatten().map(|b| b.used.requests as usize).sum();
        (running, self.pools.iter().map(|pool| pool.queue.len()).sum())
    }
}
