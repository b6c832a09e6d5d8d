//! The invariants that tie queues, tickets, capacity and reservations together. Tests check them
//! after every event.
//!
//! - Every queue holds exactly the waiters that wait in it, in both orders.
//! - No backend in rotation has room for a waiter, unless it is reserved for another one, or the
//!   owner's prefill share there is used up and other owners are present.
//! - The index of rooms is correct for each backend that is not noted as changed.
//! - No waiter has two reservations.
//! - A pinned request waits only while one of its backends is in rotation.

use super::capacity::Fit;
use super::state::AdmissionState;
use sluice_core::base::{BackendId, PoolId};

impl AdmissionState {
    pub(super) fn check_invariants(&self) -> Result<(), String> {
        let queued: usize = self.pools.iter().map(|pool| pool.queue.len()).sum();
        let by_entry: usize = self.pools.iter().map(|pool| pool.queue.ids().count()).sum();
        let waiting = || self.waiters.iter().flatten().filter(|w| w.outcome.is_none());
        if queued != waiting().count() || queued != by_entry {
            return Err(format!("{queued} in queues, {by_entry} in order of entry, but {} waiting", waiting().count()));
        }
        self.check_ids()?;
        self.pools.iter().try_for_each(|pool| pool.queue.check())?;
        for (index, backend) in self.backends.iter().enumerate() {
            let (id, Some(backend)) = (BackendId::new(index), backend) else { continue };
            let rooms = &self.pools[backend.pool.index()].rooms;
            let judged = !backend.changed && !backend.service.removed;
            let candidate = backend.candidate(id, self.epoch);
            if judged && !rooms.agree(backend.place.position, &candidate, !backend.is_full(), backend.has_permit()) {
                return Err(format!("the index of rooms is wrong about backend {}", backend.name));
            }
            for waiter in waiting() {
                let (need, permit) = (&waiter.request.need, backend.has_permit());
                let is_long = backend.bounds.in_force().is_long(need.prompt_tokens);
                if (candidate.has_room(need) && (permit || !is_long)) != (backend.fit(need) == Fit::Room) {
                    return Err(format!("the candidate of {} is wrong about {need:?}", backend.name));
                }
                let room = self.allows(&waiter.request, id) && backend.fit(&waiter.request.need) == Fit::Room;
                if room && !self.is_kept_from(id, waiter) && !self.is_held(&waiter.request, id) {
                    return Err(format!("backend {} has room while {:?} waits", backend.name, waiter.request));
                }
            }
        }
        let pinned = waiting().filter(|waiter| waiter.request.pinned).count();
        if pinned != self.pinned {
            return Err(format!("{pinned} pinned requests wait, and {} are counted", self.pinned));
        }
        if let Some(left) = waiting().find(|waiter| waiter.request.pinned && !self.is_any_for(&waiter.request)) {
            return Err(format!("no backend is in rotation for {:?}", left.request));
        }
        let mut reserved: Vec<u64> = (0..self.pools.len())
            .filter_map(|pool| self.reservation(PoolId::new(pool)).map(|reservation| reservation.serial))
            .collect();
        reserved.sort_unstable();
        if reserved.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err("a waiter has two reservations".to_owned());
        }
        Ok(())
    }

    fn check_ids(&self) -> Result<(), String> {
        match self.free.len() + self.waiters.iter().flatten().count() == self.waiters.len() {
            true => Ok(()),
            false => Err("a waiter id is neither free nor in use".to_owned()),
        }
    }
}
