//! What stands behind the admission's lock: pools, backends, waiters, and the moves between them.
//!
//! See [`super::admission`] for the rules. Everything here runs under the lock, returns at once and
//! wakes nobody itself: wakers are collected for the caller.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::admission::{AdmissionRequest, Wakers};
use super::backend::BackendState;
use super::capacity::{Fit, Held};
use super::drain_rate::DrainRate;
use super::health::{BackendFault, HealthRules, Phase};
use super::layout::PoolRules;
use super::lease::Grant;
use super::policy::{self, Candidate};
use super::queue::{Lane, QueuePosition, WaitQueue, WaiterId};
use crate::config::Policy;
use sluice_core::base::{BackendId, PoolId, Rng};
use sluice_core::openai::ShedReason;

/// One pool's members and its queue.
#[derive(Debug)]
pub(super) struct PoolState {
    pub(super) name: Arc<str>,
    pub(super) members: Vec<BackendId>,
    pub(super) rules: PoolRules,
    /// Pools whose requests may spill into this one, in configuration order.
    pub(super) fed_by: Vec<PoolId>,
    pub(super) queue: WaitQueue,
    pub(super) drain: DrainRate,
    pub(super) removed: bool,
}

/// One request in line.
#[derive(Debug)]
struct Waiter {
    ask: AdmissionRequest,
    lane: Lane,
    key: QueuePosition,
    state: WaiterState,
    waker: Option<Waker>,
}

#[derive(Debug)]
enum WaiterState {
    Waiting,
    /// Holds capacity on a backend until the ticket picks it up.
    Granted(BackendId, Held),
    Reclassify,
}

/// Everything behind the lock.
#[derive(Debug)]
pub(super) struct AdmissionState {
    epoch: Instant,
    pub(super) rules: HealthRules,
    /// The number of the layout in force.
    pub(super) layout: u64,
    pub(super) pools: Vec<PoolState>,
    pub(super) backends: Vec<Option<BackendState>>,
    waiters: Vec<Option<Waiter>>,
    free: Vec<WaiterId>,
    serial: u64,
    rng: Rng,
}

/// Share of an engine's context limit that a spilled prompt's estimate may reach: at home the
/// engine's own 400 is the truth, but a request must not be refused because it was spilled.
const SPILL_LEN_PERCENT: u64 = 90;

impl AdmissionState {
    pub(super) fn new(now: Instant, rules: HealthRules, seed: u64) -> Self {
        Self {
            epoch: now,
            rules,
            layout: 0,
            pools: Vec::new(),
            backends: Vec::new(),
            waiters: Vec::new(),
            free: Vec::new(),
            serial: 0,
            rng: Rng::new(seed),
        }
    }

    pub(super) fn backend(&self, id: BackendId) -> Option<&BackendState> {
        self.backends.get(id.index())?.as_ref()
    }

    pub(super) fn backend_mut(&mut self, id: BackendId) -> Option<&mut BackendState> {
        self.backends.get_mut(id.index())?.as_mut()
    }

    /// Whether a pool is no longer configured.
    pub(super) fn is_gone(&self, pool: PoolId) -> bool {
        self.pools.get(pool.index()).is_none_or(|pool| pool.removed)
    }

    /// Grants at once, or puts in line (ticket and deadline), or sheds.
    pub(super) fn enter(
        &mut self,
        ask: AdmissionRequest,
        wakers: &mut Wakers,
    ) -> Result<Result<Grant, (WaiterId, Instant)>, ShedReason> {
        // Nobody serves the line of a removed pool: who asks for one goes by an old plan.
        if self.pools.get(ask.home.index()).is_none_or(|pool| pool.removed) {
            return Err(ShedReason::NoBackend);
        }
        let reachable: SmallVec<[PoolId; 4]> = std::iter::once(ask.home).chain(ask.spill.iter().copied()).collect();
        let allowed = |state: &Self, id: &BackendId| state.allows(&ask, *id);
        if !reachable.iter().any(|pool| self.members(*pool).iter().any(|id| allowed(self, id))) {
            return Err(ShedReason::NoBackend);
        }
        let preferred = self.in_order_of_prefills(&reachable, &ask);
        for pool in &preferred {
            if self.unclaimed(*pool)
                && let Some(backend) = self.pick(*pool, &ask)
            {
                return Ok(Ok(self.grant(backend, &ask)));
            }
        }
        let home = ask.home;
        let (length, deadline) = match self.pools.get(home.index()) {
            Some(pool) => (pool.rules.queue_length, ask.arrived + pool.rules.queue_timeout),
            None => return Err(ShedReason::NoBackend),
        };
        let mut untried = ask.clone();
        let id = self.stand_in_line(ask);
        // Somebody waits for what this request could take: let the line decide, backend by backend
        // in the order in which the policy would have picked them.
        for pool in &preferred {
            while let Some(backend) = self.pick(*pool, &untried) {
                self.dispatch(backend, wakers);
                if let Some(Some(grant)) = self.take_outcome(id) {
                    return Ok(Ok(grant));
                }
                untried.avoid.push(backend);
            }
        }
        if self.pools[home.index()].queue.len() > length {
            self.leave(id, wakers);
            return Err(ShedReason::QueueFull);
        }
        Ok(Err((id, deadline)))
    }

    /// Gives what `backend` has room for to those who wait for it, in line order.
    pub(super) fn dispatch(&mut self, backend: BackendId, wakers: &mut Wakers) {
        let Some(home) = self.backend(backend).filter(|b| b.in_rotation()).map(|b| b.pool) else { return };
        let feeders = self.pools.get(home.index()).map(|pool| pool.fed_by.clone()).unwrap_or_default();
        for pool in std::iter::once(home).chain(feeders) {
            if !self.dispatch_queue(backend, pool, wakers) {
                return;
            }
        }
    }

    /// Serves one queue from one backend; false when the backend is full for whoever comes next.
    fn dispatch_queue(&mut self, backend: BackendId, pool: PoolId, wakers: &mut Wakers) -> bool {
        let mut after = None;
        let mut skip_long = false;
        while let Some((lane, key, id)) = self.pools[pool.index()].queue.next_after(after, skip_long) {
            after = Some(key);
            let Some(waiter) = self.waiters[id as usize].as_ref() else { continue };
            if !self.allows(&waiter.ask, backend) {
                continue;
            }
            let Some(found) = self.backend(backend) else { return false };
            match found.fit(&waiter.ask.need) {
                Fit::Full => return false,
                Fit::NoPermit => skip_long |= lane == Lane::Long && self.whole_lane_is_long(pool, backend),
                Fit::Room => self.hand_over(backend, pool, lane, key, id, wakers),
            }
        }
        true
    }

    fn hand_over(
        &mut self,
        backend: BackendId,
        pool: PoolId,
        lane: Lane,
        key: QueuePosition,
        id: WaiterId,
        wakers: &mut Wakers,
    ) {
        self.pools[pool.index()].queue.remove(lane, &key);
        let Some(waiter) = self.waiters[id as usize].as_mut() else { return };
        let need = waiter.ask.need;
        wakers.extend(waiter.waker.take());
        let Some(found) = self.backends[backend.index()].as_mut() else { return };
        let held = found.used.take(&found.limits, &need);
        waiter.state = WaiterState::Granted(backend, held);
    }

    /// Whether every waiter of `pool`'s long lane needs a permit on `backend` too.
    fn whole_lane_is_long(&self, pool: PoolId, backend: BackendId) -> bool {
        let here = self.backend(backend).and_then(|b| b.limits.long_prefix).map(|long| long.threshold);
        let home = self.pools[pool.index()].rules.limits.long_prefix.map(|long| long.threshold);
        matches!((here, home), (Some(here), Some(home)) if here <= home)
    }

    /// Whether this request may use this backend at all.
    fn allows(&self, ask: &AdmissionRequest, backend: BackendId) -> bool {
        let Some(found) = self.backend(backend) else { return false };
        let home = found.pool == ask.home;
        let spilled_in_reach = || {
            ask.spill.contains(&found.pool)
                && found.max_model_len.is_none_or(|len| ask.need.prompt_tokens <= len / 100 * SPILL_LEN_PERCENT)
        };
        found.could_serve(&ask.need) && !ask.avoid.contains(&backend) && (home || spilled_in_reach())
    }

    /// Whether nobody waits for any backend of this pool.
    fn unclaimed(&self, pool: PoolId) -> bool {
        let Some(found) = self.pools.get(pool.index()) else { return true };
        found.queue.is_empty() && found.fed_by.iter().all(|feeder| self.pools[feeder.index()].queue.is_empty())
    }

    fn members(&self, pool: PoolId) -> &[BackendId] {
        self.pools.get(pool.index()).map_or(&[], |pool| &pool.members)
    }

    /// Pools in the order in which they are tried: home first and then the spill list, but a prompt that needs a permit
    /// goes where fewest long prefills run, home on a tie. Two long prefills on one engine starve the decodes beside
    /// them while a permit of another lies idle; in a hundred simulated draws of the product's own load this rule beat
    /// round robin on all four tails in 79, home first in 51.
    fn in_order_of_prefills(&self, reachable: &[PoolId], ask: &AdmissionRequest) -> SmallVec<[PoolId; 4]> {
        let mut pools = SmallVec::from_slice(reachable);
        if reachable.len() > 1 {
            pools.sort_by_cached_key(|pool| self.least_prefills(*pool, ask).unwrap_or(u32::MAX));
        }
        pools
    }

    /// The fewest long prefills on a backend of this pool that has room; 0 where the request needs no permit.
    fn least_prefills(&self, pool: PoolId, ask: &AdmissionRequest) -> Option<u32> {
        self.with_room(pool, ask).map(|(_, backend)| backend.prefills_beside(&ask.need)).min()
    }

    /// Backends of a pool that could take the request now.
    fn with_room<'s>(
        &'s self,
        pool: PoolId,
        ask: &'s AdmissionRequest,
    ) -> impl Iterator<Item = (BackendId, &'s BackendState)> + 's {
        self.members(pool)
            .iter()
            .filter(|id| self.allows(ask, **id))
            .filter_map(|id| self.backend(*id).map(|backend| (*id, backend)))
            .filter(|(_, backend)| backend.fit(&ask.need) == Fit::Room)
    }

    fn pick(&mut self, pool: PoolId, ask: &AdmissionRequest) -> Option<BackendId> {
        let least = self.least_prefills(pool, ask)?;
        let candidates: SmallVec<[Candidate; 8]> = self
            .with_room(pool, ask)
            .filter(|(_, backend)| backend.prefills_beside(&ask.need) == least)
            .map(|(id, backend)| Candidate {
                id,
                weight: backend.weight,
                tokens: backend.used.tokens,
                requests: backend.used.requests,
                speed: backend.speed,
            })
            .collect();
        match self.pools.get(pool.index())?.rules.policy {
            Policy::RoundRobin => self.next_in_turn(&candidates),
            policy => policy::pick(policy, &candidates, ask.need.tokens(), &mut self.rng),
        }
    }

    /// Smooth weighted round robin, as nginx does it: each candidate is owed its weight per round,
    /// the one owed most is served and pays for the round.
    fn next_in_turn(&mut self, candidates: &[Candidate]) -> Option<BackendId> {
        let round: f64 = candidates.iter().map(|c| c.weight).sum();
        for candidate in candidates {
            if let Some(backend) = self.backend_mut(candidate.id) {
                backend.turn += candidate.weight;
            }
        }
        let owed = |id: BackendId| self.backend(id).map_or(0.0, |backend| backend.turn);
        let next = candidates.iter().map(|c| c.id).rev().max_by(|a, b| owed(*a).total_cmp(&owed(*b)))?;
        if let Some(backend) = self.backend_mut(next) {
            backend.turn -= round;
        }
        Some(next)
    }

    fn grant(&mut self, backend: BackendId, ask: &AdmissionRequest) -> Grant {
        let found = self.backends[backend.index()].as_mut().expect("picked from the members of a pool");
        let held = found.used.take(&found.limits, &ask.need);
        self.grant_of(backend, held, ask.need.prompt_tokens)
    }

    fn grant_of(&self, backend: BackendId, held: Held, prompt_tokens: u64) -> Grant {
        let found = self.backend(backend).expect("a backend stays while anything is held on it");
        Grant {
            backend,
            pool: found.pool,
            pool_name: Arc::clone(&self.pools[found.pool.index()].name),
            name: Arc::clone(&found.name),
            address: Arc::clone(&found.address),
            held,
            pulse: Arc::clone(&found.pulse),
            cut: found.cut.clone(),
            prefill_time: found.prefill_time(prompt_tokens),
        }
    }

    fn stand_in_line(&mut self, ask: AdmissionRequest) -> WaiterId {
        let rules = &self.pools[ask.home.index()].rules;
        let lane = if rules.limits.is_long(ask.need.prompt_tokens) { Lane::Long } else { Lane::Rest };
        self.serial += 1;
        let arrived = ask.arrived.saturating_duration_since(self.epoch);
        let key = rules.order.key(ask.priority, arrived, ask.need.prompt_tokens, self.serial);
        let (home, since) = (ask.home, ask.arrived);
        let waiter = Waiter { ask, lane, key, state: WaiterState::Waiting, waker: None };
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
        let pool = &mut self.pools[home.index()];
        if pool.queue.is_empty() {
            pool.drain.begin(since);
        }
        pool.queue.insert(lane, key, id);
        id
    }

    /// The ticket asks: `None` still waiting, `Some(None)` pool gone, `Some(Some(_))` granted.
    pub(super) fn poll_waiter(&mut self, id: WaiterId, waker: &Waker) -> Option<Option<Grant>> {
        let outcome = self.take_outcome(id);
        if outcome.is_none()
            && let Some(waiter) = self.waiters[id as usize].as_mut()
            && !waiter.waker.as_ref().is_some_and(|known| known.will_wake(waker))
        {
            waiter.waker = Some(waker.clone());
        }
        outcome
    }

    fn take_outcome(&mut self, id: WaiterId) -> Option<Option<Grant>> {
        let waiter = self.waiters[id as usize].as_ref()?;
        let outcome = match &waiter.state {
            WaiterState::Waiting => return None,
            WaiterState::Reclassify => None,
            WaiterState::Granted(backend, held) => Some(self.grant_of(*backend, *held, waiter.ask.need.prompt_tokens)),
        };
        self.waiters[id as usize] = None;
        self.free.push(id);
        Some(outcome)
    }

    /// A ticket was dropped: out of the line, and back with what it had been granted.
    pub(super) fn leave(&mut self, id: WaiterId, wakers: &mut Wakers) {
        let Some(waiter) = self.waiters[id as usize].take() else { return };
        self.free.push(id);
        match waiter.state {
            WaiterState::Reclassify => {}
            WaiterState::Granted(backend, held) => self.release(backend, held, wakers),
            WaiterState::Waiting => {
                self.pools[waiter.ask.home.index()].queue.remove(waiter.lane, &waiter.key);
                // It may have been what others were kept behind.
                for pool in std::iter::once(waiter.ask.home).chain(waiter.ask.spill) {
                    for backend in SmallVec::<[BackendId; 8]>::from_slice(self.members(pool)) {
                        self.dispatch(backend, wakers);
                    }
                }
            }
        }
    }

    pub(super) fn release(&mut self, backend: BackendId, held: Held, wakers: &mut Wakers) {
        let Some(found) = self.backend_mut(backend) else { return };
        found.used.release(held);
        let (pool, gone) = (found.pool, found.removed && found.used.requests == 0);
        self.pools[pool.index()].drain.departed();
        if gone {
            self.backends[backend.index()] = None;
        } else {
            self.dispatch(backend, wakers);
        }
    }

    pub(super) fn retry_after(&mut self, pool: PoolId, now: Instant) -> Duration {
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
        let before = found.health.phase();
        if up {
            found.health.probe_ok(now);
        } else {
            found.health.probe_missed(&rules);
        }
        let after = found.health.phase();
        self.dispatch(backend, wakers);
        (before != after).then_some((before, after))
    }

    pub(super) fn failure(&mut self, backend: BackendId, fault: BackendFault, now: Instant) {
        let rules = self.rules;
        let Some(pool) = self.backend(backend).map(|b| b.pool) else { return };
        let only_one = !self.members(pool).iter().any(|id| *id != backend && self.is_ready(*id));
        if let Some(found) = self.backend_mut(backend) {
            found.health.failure(fault, only_one, &rules, now);
        }
    }

    fn is_ready(&self, backend: BackendId) -> bool {
        self.backend(backend).is_some_and(|b| b.in_rotation() && b.health.phase() == Phase::Ready)
    }

    pub(super) fn silent_backends(&mut self, limit: Duration, now: Instant) -> Vec<BackendId> {
        let backends = self.backends.iter_mut().enumerate();
        let silent = backends.filter_map(|(index, slot)| {
            let silence = slot.as_mut()?.silence(now)?;
            (silence > limit).then(|| BackendId::new(index))
        });
        silent.collect()
    }

    pub(super) fn mark_hung(&mut self, backend: BackendId, now: Instant) {
        self.failure(backend, BackendFault::Hung, now);
        if let Some(found) = self.backend_mut(backend) {
            found.hangs += 1;
            std::mem::replace(&mut found.cut, CancellationToken::new()).cancel();
        }
    }

    /// Waiters of a pool that is no longer configured classify again.
    pub(super) fn turn_away(&mut self, pool: PoolId, wakers: &mut Wakers) {
        let queue = std::mem::take(&mut self.pools[pool.index()].queue);
        for id in queue.ids() {
            if let Some(waiter) = self.waiters[id as usize].as_mut() {
                waiter.state = WaiterState::Reclassify;
                wakers.extend(waiter.waker.take());
            }
        }
    }

    pub(super) fn load(&self) -> (usize, usize) {
        let running = self.backends.iter().flatten().map(|b| b.used.requests as usize).sum();
        (running, self.pools.iter().map(|pool| pool.queue.len()).sum())
    }

    /// See [`super::Admission::check_invariants`].
    pub(super) fn check_invariants(&self) -> Result<(), String> {
        let queued: usize = self.pools.iter().map(|pool| pool.queue.len()).sum();
        let waiting = self.waiters.iter().flatten().filter(|w| matches!(w.state, WaiterState::Waiting)).count();
        if queued != waiting {
            return Err(format!("{queued} in queues but {waiting} waiting"));
        }
        if self.free.len() + self.waiters.iter().flatten().count() != self.waiters.len() {
            return Err("a ticket number is neither free nor taken".to_owned());
        }
        for (index, backend) in self.backends.iter().enumerate() {
            let Some(backend) = backend else { continue };
            // Room that a waiter could take must not lie idle.
            for waiter in self.waiters.iter().flatten().filter(|w| matches!(w.state, WaiterState::Waiting)) {
                let idle = self.allows(&waiter.ask, BackendId::new(index))
                    && backend.used.requests == 0
                    && backend.fit(&waiter.ask.need) == Fit::Room;
                if idle {
                    return Err(format!("backend {} is idle while {:?} waits", backend.name, waiter.ask));
                }
            }
        }
        Ok(())
    }
}
